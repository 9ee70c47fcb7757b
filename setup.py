"""Builds csrc/ into one plain shared library inside the package (loaded with ctypes: no Python ABI, no torch).

The source of the CUDA kernels is data of the package, edgees/_csrc/, compiled where there is a card.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).parent


class NativeBuild(build_ext):
    """A shared library, not a Python module: no init symbol, no ABI tag in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + (".dll" if sys.platform == "win32" else ".so")

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def build_extensions(self) -> None:
        extra = os.environ.get("EDGEES_CXXFLAGS", "").split()
        for ext in self.extensions:
            # -ffp-contract=off: a fused multiply-add where the contract has two roundings changes the noise.
            flags = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fvisibility=hidden -Wall -Wextra"
            ext.extra_compile_args = [*flags.split(), *extra]
            ext.extra_link_args = ["-pthread", *extra]
        super().build_extensions()


# As edgees/cuda.py names them, below csrc/ here and below edgees/_csrc/ in a wheel.
KERNELS = [
    *("cuda/kernels.cu", "cuda/device.h", "cuda/weights.h", "cuda/gemv.h", "cuda/tile.h", "cuda/update.h"),
    *("noise.h", "normal_table.h", "philox.h"),
]


class KernelSource(build_py):
    """Adds the source of the kernels to what is built; an editable install finds it in csrc/."""

    def run(self) -> None:
        super().run()
        for source, target in self._kernels().items():
            self.mkpath(os.path.dirname(target))
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._kernels().values()]

    def _kernels(self) -> dict[str, str]:
        if self.editable_mode:
            return {}
        return {os.path.join("csrc", name): os.path.join(self.build_lib, "edgees", "_csrc", name) for name in KERNELS}


class PlatformWheel(Distribution):
    """The wheel carries machine code, whatever its extension is called."""

    def has_ext_modules(self) -> bool:
        return True


sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp") if "tests" not in p.parts)
headers = sorted(str(p.relative_to(ROOT)) for pattern in ("*.h", "*.inl") for p in (ROOT / "csrc").rglob(pattern))
setup(
    ext_modules=[Extension("edgees._native", sources=sources, depends=headers, language="c++")],
    cmdclass={"build_ext": NativeBuild, "build_py": KernelSource},
    distclass=PlatformWheel,
)
