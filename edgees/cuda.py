"""The CUDA kernels of csrc/cuda: compiled at first use, cached, launched on a caller's stream. Needs no torch.

Their source is data of the package. NVRTC (the one that CUDA builds of torch bring, or the system's) makes a module of
each part that is needed, for the card at hand; ``EDGEES_NVCC=1`` takes nvcc instead. Modules lie in the user's cache
folder under a hash of sources, options and compiler. Launches go through the CUDA driver's own interface.

Pointers are device addresses as integers, shapes are counted in elements. A method of :class:`Kernels` is one
operation; it chooses kernels and launches them through a :class:`Driver`, so that tests run the same code on the host
(csrc/cuda/emulate.h).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgees.errors import EdgeesError, EngineError, MissingExtra, NativeError, UsageError

TYPES = {"F32": 0, "F16": 1, "BF16": 30, "NF4": 100, "FP4": 101}
"""Types of weights, by csrc/blocks.h's numbers; those of x, y and other arguments are the first three."""
KINDS = ("sign", "lowrank", "normal")
OLDEST = 75
"""Compute capability, times ten, of the oldest card that is supported (Turing)."""
MAX_RANK = 256
_NORMAL_SCALE = float.fromhex("0x1.fff01ep-13")  # csrc/normal_table.h

_i32, _i64, _u32, _u64, _f32, _ptr = (
    ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float, ctypes.c_void_p
)  # fmt: skip
Dim = tuple[int, int, int]


# ---- arguments of the kernels: the structures of csrc/cuda/*.h
class _Weight(ctypes.Structure):
    _fields_ = [
        ("base", _ptr), ("absmax", _ptr), ("quantised", _ptr), ("code", _ptr), ("absmax2", _ptr), ("plane", _ptr),
        ("rows", _i64), ("cols", _i64), ("offset", _f32), ("cell", _f32), ("part", _f32), ("type", _i32),
        ("bits", _i32), ("whole", _i32),
    ]  # fmt: skip


class _Noise(ctypes.Structure):
    _fields_ = [
        ("key", _ptr), ("amplitude", _ptr), ("slot", _ptr), ("owner", _ptr), ("rho", _f32), ("scale", _f32),
        ("kind", _i32), ("rank", _i32), ("tensor", _u32), ("factors", _i32), ("a", _ptr), ("pool", _ptr),
    ]  # fmt: skip


class _Product(ctypes.Structure):
    _fields_ = [
        ("w", _Weight), ("e", _Noise), ("x", _ptr), ("y", _ptr), ("dots", _ptr), ("n", _i64), ("x_stride", _i64),
        ("y_stride", _i64), ("x_type", _i32),
    ]  # fmt: skip


class _Lookup(ctypes.Structure):
    _fields_ = [("w", _Weight), ("e", _Noise), ("index", _ptr), ("out", _ptr), ("n", _i64), ("out_type", _i32)]


class _Vector(ctypes.Structure):
    _fields_ = [
        ("base", _ptr), ("delta", _ptr), ("e", _Noise), ("out", _ptr), ("n", _i64), ("cols", _i64),
        ("base_type", _i32), ("out_type", _i32),
    ]  # fmt: skip


class _Delta(ctypes.Structure):
    _fields_ = [
        ("delta", _ptr), ("rows", _i64), ("cols", _i64), ("row0", _i64), ("key", _ptr), ("coef", _ptr),
        ("keep", _f32), ("scale", _f32), ("pairs", _i32), ("kind", _i32), ("rank", _i32), ("vector", _i32),
        ("tensor", _u32),
    ]  # fmt: skip


class _Factors(ctypes.Structure):
    _fields_ = [
        ("a", _ptr), ("rows", _i64), ("key", _ptr), ("slot", _ptr), ("coef", _ptr), ("keep", _f32), ("scale", _f32),
        ("factors", _i32), ("pairs", _i32), ("rank", _i32), ("tensor", _u32),
    ]  # fmt: skip


class _Rounding(ctypes.Structure):
    _fields_ = [
        ("w", _Weight), ("delta", _ptr), ("out", _ptr), ("key", _u64), ("rows", _i64), ("row0", _i64),
        ("tensor", _u32), ("bits", _i32),
    ]  # fmt: skip


# ---- what callers describe
class Nested(NamedTuple):
    """Quantised absmax: uint8 [blocks], float32 [256], float32 [ceil(blocks/256)] on the device, and the offset."""

    codes: int
    table: int
    absmax: int
    offset: float


@dataclass(frozen=True)
class Weight:
    """A matrix on the device.

    type: of :data:`TYPES`; rows, cols: shape; base: numbers row by row, for NF4 and FP4 bitsandbytes' packed codes of
    the flattened matrix; absmax: float32 [ceil(rows*cols/64)] of those, or nested. plane: residual plane of ``bits``
    (2, 4, 8; 0: none) and ``span``, uint8 [rows, ceil(cols/32)*4*bits]; cell: width of a float type's cells (rho/4;
    that of NF4 and FP4 is absmax/8).
    """

    type: str
    rows: int
    cols: int
    base: int
    absmax: int = 0
    nested: Nested | None = None
    plane: int = 0
    bits: int = 0
    span: int = 0
    cell: float = 0.0

    def __post_init__(self) -> None:
        what = f"{self.type} weight of {self.rows} x {self.cols}"
        if self.type not in TYPES:
            raise UsageError(f"no CUDA kernels for type {self.type}", f"there are: {', '.join(TYPES)}")
        if self.rows < 1 or self.cols < 1 or self.rows > 1 << 31 or self.cols > 1 << 31 or not self.base:
            raise UsageError(f"{what}: an empty or impossible shape, or no data")
        if self.coded and not self.absmax and self.nested is None:
            raise UsageError(f"{what}: packed codes without their absmax mean nothing", "give absmax or nested")
        if self.bits not in (0, 2, 4, 8) or not 0 <= self.span <= 8 or bool(self.bits) != bool(self.plane):
            raise UsageError(f"{what}: no residual plane of {self.bits} bits, span {self.span}")
        if self.bits and self.coded and self.cols % 64:
            raise UsageError(f"{what}: a residual plane needs whole blocks of 64 columns")

    @property
    def coded(self) -> bool:
        """NF4 or FP4."""
        return TYPES[self.type] >= 100

    def _whole(self) -> bool:
        return self.cols % 32 == 0 and self.base % 16 == 0 and self.plane % 16 == 0

    def _argument(self, whole: bool) -> _Weight:
        nested = self.nested or Nested(0, 0, 0, 0.0)
        part = 2.0 ** (self.span - self.bits)
        return _Weight(
            self.base, self.absmax, nested.codes, nested.table, nested.absmax, self.plane, self.rows, self.cols,
            nested.offset, self.cell, part, TYPES[self.type], self.bits, whole,
        )  # fmt: skip


@dataclass(frozen=True)
class Members:
    """Whose the columns are. On the device: keys uint64 [m], amplitudes float32 [m] (0: the centre), slots uint32 [m]
    (of the adapter's pool; may be 0 otherwise), owner int32 [n], an index into the others per column or row."""

    kind: str
    rank: int
    keys: int
    amplitudes: int
    owner: int
    slots: int = 0


@dataclass(frozen=True)
class Adapter:
    """a: float32 [rows, factors]; pool: uint32 [factors, ceil(cols/128)*4] of packed signs, on the device."""

    factors: int
    a: int
    pool: int


class Driver(Protocol):
    """What runs a kernel."""

    def launch(self, kernel: str, grid: Dim, block: Dim, argument: ctypes.Structure, stream: int) -> None:
        """Start ``kernel`` of csrc/cuda/kernels.cu with one structure, by value, on a stream (0: the default)."""
        ...


def _scale(kind: str, rank: int, vector: bool = False) -> float:
    """An element of eps is an integer times this (csrc/noise.cpp, noise_scale)."""
    if kind not in KINDS:
        raise UsageError(f"no noise of kind {kind!r}", f"there are: {', '.join(KINDS)}")
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(f"rank {rank}: it is 1 to {MAX_RANK}")
    if kind == "normal":
        return _NORMAL_SCALE
    return 1.0 if kind == "sign" or vector else float(np.float32(1 / np.sqrt(rank)))


def _type(dtype: str) -> int:
    if dtype not in ("F32", "F16", "BF16"):
        raise UsageError(f"no CUDA kernels for numbers of type {dtype}", "F32, F16 or BF16")
    return TYPES[dtype]


def _parts(n: int, size: int) -> int:
    return -(-n // size)


class Kernels:
    """The operations. Nothing here waits for the device; all memory is the caller's and must outlive the stream's work.

    tensor: the noise's number of the tensor (edgees.noise.tensor_id); rho: what its amplitudes are relative to.
    Errors: UsageError for shapes, types and ranks that make no sense; EngineError from the driver.
    """

    FEW = 16
    """Columns up to which a product is made column by column (csrc/cuda/gemv.h), beyond it by tiles (tile.h)."""

    TALL = 65535
    """Most blocks of a grid in y."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    @staticmethod
    def dots_per_column(members: Members | None, adapter: Adapter | None) -> int:
        """Floats of scratch that :meth:`linear` needs for each column."""
        if adapter:
            return adapter.factors
        return members.rank if members and members.kind == "lowrank" else 0

    def linear(
        self, w: Weight, x: int, y: int, n: int, *, dtype: str, tensor: int = 0, rho: float = 1.0,
        members: Members | None = None, adapter: Adapter | None = None, dots: int = 0, x_stride: int | None = None,
        y_stride: int | None = None, together: int = 1, stream: int = 0,
    ) -> None:  # fmt: skip
        """y[c] = (w + noise of column c's member) x[c] for c < n.

        x: [n, cols] with rows ``x_stride`` apart, y: [n, rows], both of ``dtype``; sums are float32. dots: scratch of
        n * :meth:`dots_per_column` floats. together: how many neighbouring columns have one owner, about; with dense
        noise tiles pay from 8 on. A result does not depend on the other columns of a launch, except that more than
        :data:`FEW` columns go through tiles, where weights are rounded to ``dtype`` after the noise was added.
        """
        code = _type(dtype)
        if n < 0 or not x or not y:
            raise UsageError(f"a product of {n} columns, x at {x:#x}, y at {y:#x}")
        if n == 0:
            return
        x_stride, y_stride = x_stride or w.cols, y_stride or w.rows
        size = 4 if dtype == "F32" else 2
        whole = w._whole() and x % 16 == 0 and x_stride * size % 16 == 0
        noise = self._noise(members, adapter, tensor, rho, w)
        width = self.dots_per_column(members, adapter)
        if width and not dots:
            raise UsageError(f"this product needs scratch for {width} numbers a column")
        p = _Product(w._argument(whole), noise, x, y, dots, n, x_stride, y_stride, code)
        if width:
            threads = min(256, _parts(_parts(w.cols, 32), 32) * 32)
            self.driver.launch("sign_dots", (n, width, 1), (threads, 1, 1), p, stream)
        dense = members.kind if members and members.kind != "lowrank" else ""
        if n > self.FEW and (not dense or together >= 8):
            name, columns = f"tile_{dtype.lower()}", 64 if n <= 64 or dtype == "F32" else 128
            grid = (_parts(w.rows, 64), _parts(n, columns), 1)
            self.driver.launch(f"{name}_{columns}", grid, (256, 1, 1), p, stream)
            return
        if not whole:
            self.driver.launch("gemv_any_16", (_parts(w.rows, 4), _parts(n, 16), 1), (32, 4, 1), p, stream)
            return
        choices = {"": (1, 4, 16), "sign": (1, 4, 8), "normal": (4,)}[dense]
        columns = next((c for c in choices if n <= c), choices[-1])
        steps = _parts(w.cols, 1024)
        splits = _parts(steps, _parts(steps, 8))
        groups = min(4, 8 // splits)
        name = f"gemv_{'codes' if w.coded else 'floats'}_{dense or 'plain'}_{columns}"
        grid = (_parts(w.rows, 4 * groups), _parts(n, columns), 1)
        self.driver.launch(name, grid, (32, groups, splits), p, stream)

    def rows(
        self, w: Weight, index: int, out: int, n: int, *, dtype: str, tensor: int = 0, rho: float = 1.0,
        members: Members | None = None, adapter: Adapter | None = None, stream: int = 0,
    ) -> None:  # fmt: skip
        """out[i] = row index[i] (int64 [n]) of the matrix of member owner[i]; out: [n, cols] of ``dtype``.

        An index that is no row gives NaNs. The float32 values are the bits of edgees_row (csrc/api.h).
        """
        if n < 1:
            return
        p = _Lookup(w._argument(False), self._noise(members, adapter, tensor, rho, w), index, out, n, _type(dtype))
        self.driver.launch("row_lookup", (n, _parts(w.cols, 256), 1), (256, 1, 1), p, stream)

    def vectors(
        self, base: int, base_dtype: str, cols: int, out: int, n: int, *, dtype: str, delta: int = 0, tensor: int = 0,
        rho: float = 1.0, members: Members | None = None, stream: int = 0,
    ) -> None:  # fmt: skip
        """out[i] = base + delta + noise of member owner[i], or of member i where owner is 0; out: [n, cols].

        base: [cols]; delta: float32 [cols] or 0. The float32 values are the bits of edgees_vector.
        """
        if cols < 1:
            raise UsageError(f"a vector of {cols} numbers")
        if n < 1:
            return
        noise = self._noise(members, None, tensor, rho, None)
        p = _Vector(base, delta, noise, out, n, cols, _type(base_dtype), _type(dtype))
        self.driver.launch("vector_of", (n, _parts(cols, 256), 1), (256, 1, 1), p, stream)

    def delta_apply(
        self, delta: int, rows: int, cols: int, *, tensor: int, kind: str, rank: int, pairs: int, keys: int,
        coefs: int, keep: float, row0: int = 0, vector: bool = False, stream: int = 0,
    ) -> None:  # fmt: skip
        """delta (float32 [rows, cols], a tensor's rows from row0 on) = keep * delta + sum of coefs[p] * eps of keys[p].

        keys: uint64 [pairs], coefs: float32 [pairs], on the device. The bits of edgees_delta_apply. With one pair, coef
        1 and keep 0 the noise itself is left (of finite numbers).
        """
        scale = _scale(kind, rank, vector)
        if rows < 0 or cols < 0 or row0 < 0 or row0 + rows > 1 << 32 or pairs < 0 or (vector and (row0 or rows != 1)):
            raise UsageError(f"an update of {rows} x {cols} from row {row0} on, {pairs} pairs")
        if not rows or not cols:
            return
        p = _Delta(
            delta, rows, cols, row0, keys, coefs, keep, scale, pairs, KINDS.index(kind), rank, vector, tensor
        )  # fmt: skip
        grid = (_parts(_parts(cols, 128), 8), min(rows, self.TALL), _parts(rows, self.TALL))
        self.driver.launch("delta_apply", grid, (32, 8, 1), p, stream)

    def factors_apply(
        self, a: int, rows: int, factors: int, *, tensor: int, rank: int, pairs: int, keys: int, slots: int,
        coefs: int, keep: float, stream: int = 0,
    ) -> None:  # fmt: skip
        """a (float32 [rows, factors]) = keep * a, plus coefs[p] times the left signs of pair p in its factors' columns.

        slots: uint32 [pairs]. The bits of edgees_factors_apply.
        """
        scale = _scale("lowrank", rank)
        if rows < 0 or factors < 1 or pairs < 0:
            raise UsageError(f"an update of {rows} x {factors} factors, {pairs} pairs")
        if not rows:
            return
        p = _Factors(a, rows, keys, slots, coefs, keep, scale, factors, pairs, rank, tensor)
        self.driver.launch("factors_apply", (_parts(rows * factors, 256), 1, 1), (256, 1, 1), p, stream)

    def plane_encode(
        self, w: Weight, delta: int, rows: int, out: int, *, bits: int, span: int, dither_key: int, tensor: int,
        row0: int = 0, stream: int = 0,
    ) -> None:  # fmt: skip
        """out (uint8 [rows, ceil(cols/32)*4*bits]) = delta (float32 [rows, cols]) of w's rows from row0 on, in steps of
        cell * 2^(span-bits), rounded with the run's dither. The bits of edgees_plane_encode."""
        if bits not in (2, 4, 8) or not 0 <= span <= 8 or rows < 0 or row0 < 0 or row0 + rows > w.rows or out % 4:
            raise UsageError(f"no residual plane of {bits} bits, span {span}, rows {row0} to {row0 + rows} of {w.rows}")
        if w.coded and w.cols % 64:
            raise UsageError(f"a residual plane beside {w.type} needs whole blocks of 64 columns, not {w.cols}")
        if not rows:
            return
        argument = w._argument(False)
        argument.part = 2.0 ** (span - bits)
        p = _Rounding(argument, delta, out, dither_key, rows, row0, tensor, bits)
        grid = (_parts(rows * _parts(w.cols, 32), 256), 1, 1)
        self.driver.launch("plane_encode", grid, (256, 1, 1), p, stream)

    @staticmethod
    def _noise(members: Members | None, adapter: Adapter | None, tensor: int, rho: float, w: Weight | None) -> _Noise:
        noise = _Noise(rho=rho, tensor=tensor, rank=1, kind=KINDS.index("lowrank"))
        if members:
            noise.scale = _scale(members.kind, members.rank, w is None)
            noise.key, noise.amplitude, noise.owner = members.keys, members.amplitudes, members.owner
            noise.slot, noise.kind, noise.rank = members.slots, KINDS.index(members.kind), members.rank
            if not members.keys or not members.amplitudes or not (members.owner or w is None):
                raise UsageError("members without keys, amplitudes or owners")
        if adapter:
            if members and (members.kind != "lowrank" or not members.slots):
                raise UsageError("the adapter's members have lowrank noise and slots")
            if adapter.factors < 1 or not adapter.a or not adapter.pool:
                raise UsageError(f"an adapter of {adapter.factors} factors without its data")
            noise.factors, noise.a, noise.pool = adapter.factors, adapter.a, adapter.pool
        return noise


# ---- sources and compilers
_HEADERS = (
    "cuda/device.h", "cuda/weights.h", "cuda/gemv.h", "cuda/tile.h", "cuda/update.h", "noise.h", "normal_table.h",
    "philox.h",
)  # fmt: skip
PARTS = {
    "gemv_codes": 1, "gemv_floats": 2, "tile_bf16": 8, "tile_f16": 16, "tile_f32": 32, "": 4,
}  # fmt: skip
"""Beginning of a kernel's name -> its part of kernels.cu; a module is compiled per part."""
_STDINT = """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long long uint64_t;
"""


def part_of(kernel: str) -> int:
    """The part that ``kernel`` is in."""
    return next(part for prefix, part in PARTS.items() if kernel.startswith(prefix))


@lru_cache(maxsize=1)
def source_folder() -> Path:
    """Where kernels.cu and its headers lie: data of the package, or a checkout's csrc/.

    :raises NativeError: neither is there.
    """
    package = Path(__file__).parent
    for folder in (package / "_csrc", package.parent / "csrc"):
        if all((folder / name).is_file() for name in ("cuda/kernels.cu", *_HEADERS)):
            return folder
    raise NativeError(f"the source of the CUDA kernels is missing from {package}", "reinstall: pip install .")


@lru_cache(maxsize=1)
def _sources() -> dict[str, bytes]:
    folder = source_folder()
    return {name: (folder / name).read_bytes() for name in ("cuda/kernels.cu", *_HEADERS)}


class Compiler(Protocol):
    """Makes a module of one part of the source."""

    name: str

    def target(self, arch: int) -> str:
        """The architecture to compile for so that a card of ``arch`` runs the result: sm_XX, or compute_XX (PTX)."""
        ...

    def compile(self, part: int, target: str) -> bytes:
        """cubin, or PTX with its closing zero. :raises NativeError: with the compiler's log."""
        ...


class Nvrtc:
    """NVIDIA's run-time compiler. :raises MissingExtra: it is not on this machine."""

    def __init__(self, path: str | None = None) -> None:
        self._lib, self.path = self._load(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.name = f"NVRTC {major.value}.{minor.value}"

    @staticmethod
    def _load(path: str | None) -> tuple[ctypes.CDLL, str]:
        tried = [path] if path else nvrtc_candidates()
        for candidate in tried:
            try:
                return ctypes.CDLL(candidate), candidate
            except OSError:
                continue
        raise MissingExtra(
            f"NVRTC, which compiles the CUDA kernels, is not there (tried: {', '.join(tried) or 'nothing found'})",
            "a CUDA build of torch brings it, so does pip install nvidia-cuda-nvrtc; or EDGEES_NVCC=1 with nvcc",
        )

    def target(self, arch: int) -> str:
        """As :class:`Compiler`: the newest that this NVRTC knows of the card's family, else PTX."""
        count = ctypes.c_int()
        self._lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._lib.nvrtcGetSupportedArchs(known)
        return best_target(arch, list(known))

    def compile(self, part: int, target: str) -> bytes:
        """As :class:`Compiler`."""
        # the names as the sources write them in #include
        headers = {name.split("/")[1] if "/" in name else name: text for name, text in _sources().items()}
        main = headers.pop("kernels.cu")
        headers |= {"../noise.h": headers["noise.h"], "stdint.h": _STDINT.encode()}
        program = _ptr()
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), main, b"kernels.cu", len(headers), texts, names)
        )
        try:
            flags = _flags(part, target)
            options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            code = self._lib.nvrtcCompileProgram(program, len(flags), options)
            if code:
                log = self._get(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                raise NativeError(
                    f"{self.name} could not compile the CUDA kernels for {target}: {self._said(code)}\n{log[-4000:]}",
                    "please report this; without the kernels the engine runs slower, on bitsandbytes' own",
                )
            return self._get(program, "CUBIN" if target.startswith("sm_") else "PTX")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _said(self, code: int) -> str:
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        return str(self._lib.nvrtcGetErrorString(code).decode())

    def _check(self, code: int) -> None:
        if code:
            raise NativeError(f"{self.name}: {self._said(code)}")


class Nvcc:
    """CUDA's compiler, ahead of time. :raises MissingExtra: it is not on this machine."""

    def __init__(self, path: str | None = None) -> None:
        found = path or shutil.which("nvcc")
        if not found:
            raise MissingExtra("EDGEES_NVCC=1, but there is no nvcc on the PATH", "unset it to compile with NVRTC")
        self.path = found
        release = re.search(r"release ([\d.]+)", self._run([found, "--version"]))
        self.name = f"nvcc {release[1] if release else '?'}"

    @staticmethod
    def _run(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NativeError(f"{' '.join(command[:3])} ... failed:\n{(done.stderr or done.stdout)[-4000:]}")
        return done.stdout

    def target(self, arch: int) -> str:
        """As :class:`Compiler`."""
        listed = re.findall(r"compute_(\d+)\b", self._run([self.path, "--list-gpu-arch"]))
        return best_target(arch, [int(a) for a in listed])

    def compile(self, part: int, target: str) -> bytes:
        """As :class:`Compiler`."""
        with tempfile.TemporaryDirectory() as folder:
            out, binary = Path(folder) / "module", target.startswith("sm_")
            flags = [flag for flag in _flags(part, target) if not flag.startswith("--gpu-architecture")]
            made = [f"-arch={target}", "-cubin" if binary else "-ptx", "-o", str(out)]
            self._run([self.path, *flags, *made, str(source_folder() / "cuda" / "kernels.cu")])
            return out.read_bytes() + (b"" if binary else b"\0")


def _flags(part: int, target: str) -> list[str]:
    return ["-std=c++17", f"--gpu-architecture={target}", f"-DEDGEES_PARTS={part}"]


def best_target(arch: int, known: list[int]) -> str:
    """sm_XX of the card's family and not newer than the card, or PTX of the newest that is older than it."""
    older = [a for a in known if a <= arch]
    if not older:
        raise NativeError(
            f"the CUDA compiler knows sm_{min(known)} at least, the card is sm_{arch}", "an older CUDA has it"
        )
    best = max(older)
    return f"sm_{best}" if best // 10 == arch // 10 else f"compute_{best}"


def nvrtc_candidates() -> list[str]:
    """Files that may be NVRTC, best first: beside the torch that is installed, then the system's."""
    found: list[Path] = []
    for package, patterns in (
        (
            "nvidia",
            ("cuda_nvrtc/lib/libnvrtc.so*", "cu*/lib/libnvrtc.so*", "*/bin/nvrtc64_*.dll", "*/bin/*/nvrtc64_*.dll"),
        ),
        ("torch", ("lib/libnvrtc*.so*", "lib/nvrtc64_*.dll")),
    ):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for pattern in patterns:
                found += sorted(Path(folder).glob(pattern), reverse=True)
    for root in filter(None, (os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        found += sorted(Path(root).glob("lib64/libnvrtc.so*"), reverse=True)
    names = [str(p) for p in found if "builtins" not in p.name and ".alt" not in p.name]
    system = ctypes.util.find_library("nvrtc")
    return list(dict.fromkeys([*names, *([system] if system else [])]))


def compiler() -> Compiler:
    """nvcc where ``EDGEES_NVCC=1``, else NVRTC. :raises MissingExtra: it is not there."""
    return Nvcc() if os.environ.get("EDGEES_NVCC", "") not in ("", "0") else Nvrtc()


# ---- the cache of modules
def cache_folder() -> Path:
    """Where modules are kept: ``edgees/cubins`` in the user's cache folder."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "edgees" / "cubins"


def module(part: int, arch: int, make: Compiler, folder: Path | None = None) -> bytes:
    """The module of a part for a card, from the cache or compiled. :raises NativeError: compile error, with its log."""
    target = make.target(arch)
    text = hashlib.sha256(repr((make.name, _flags(part, target), sorted(_sources().items()))).encode())
    path = (folder or cache_folder()) / f"{target}-{part}-{text.hexdigest()[:32]}.cubin"
    try:
        stored = path.read_bytes()
        if len(stored) > 32 and hashlib.sha256(stored[:-32]).digest() == stored[-32:]:
            return stored[:-32]
    except OSError:
        pass  # not made yet, or not readable: make it
    code = make.compile(part, target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
            file.write(code + hashlib.sha256(code).digest())
        os.replace(file.name, path)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return code


# ---- the CUDA driver
_ARCH_MAJOR, _ARCH_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class CudaDriver:
    """Launches through libcuda in the device's primary context, which is also torch's.

    :raises EngineError: no driver, no such device, or a card older than sm_75. :raises MissingExtra: no compiler.
    """

    def __init__(self, device: int = 0, make: Compiler | None = None) -> None:
        self._cuda = _libcuda()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._modules: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)
        handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDeviceGetAttribute", ctypes.byref(major), _ARCH_MAJOR, handle)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), _ARCH_MINOR, handle)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, handle)
        self.arch, self.name = 10 * major.value + minor.value, name.value.decode(errors="replace")
        if self.arch < OLDEST:
            raise EngineError(
                f"{self.name} is sm_{self.arch}; the CUDA kernels need sm_{OLDEST} (Turing) or newer",
                "the engine runs on this card with bitsandbytes' own kernels, slower",
            )
        self.compiler = make or compiler()
        self._context = _ptr()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def call(self, function: str, *arguments: Any) -> None:
        """:raises EngineError: what the driver answered, by its name."""
        code = getattr(self._cuda, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise EngineError(f"{function}: {(text.value or b'unknown').decode()} (code {code})")

    def launch(self, kernel: str, grid: Dim, block: Dim, argument: ctypes.Structure, stream: int) -> None:
        """As :class:`Driver`."""
        current = _ptr()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != self._context.value:
            self.call("cuCtxSetCurrent", self._context)
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = self._function(kernel)
        pointers = (_ptr * 1)(ctypes.addressof(argument))
        self.call("cuLaunchKernel", function, *grid, *block, 0, _ptr(stream), pointers, None)

    def _function(self, kernel: str) -> ctypes.c_void_p:
        part = part_of(kernel)
        if part not in self._modules:
            loaded = _ptr()
            self.call("cuModuleLoadData", ctypes.byref(loaded), module(part, self.arch, self.compiler))
            self._modules[part] = loaded
        function = _ptr()
        self.call("cuModuleGetFunction", ctypes.byref(function), self._modules[part], kernel.encode())
        return function


def _libcuda() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise EngineError(
            f"there is no CUDA driver: {error}", "NVIDIA's driver brings it; without it, the CPU runs"
        ) from error


@cache
def kernels(device: int = 0) -> Kernels:
    """The operations on a device of this machine; its modules are compiled when first needed.

    :raises EngineError: no driver or too old a card. :raises MissingExtra: neither NVRTC nor (where asked for) nvcc.
    """
    return Kernels(CudaDriver(device))


def describe(device: int = 0) -> dict[str, Any]:
    """For ``edgees doctor``: ok, and card, arch, compiler, target and cache, or error and hint. Compiles nothing."""
    try:
        driver = kernels(device).driver
        assert isinstance(driver, CudaDriver)
        return {
            "ok": True, "card": driver.name, "arch": f"sm_{driver.arch}", "compiler": driver.compiler.name,
            "target": driver.compiler.target(driver.arch), "cache": str(cache_folder()),
        }  # fmt: skip
    except EdgeesError as error:
        return {"ok": False, "error": error.message, **({"hint": error.hint} if error.hint else {})}
