"""Loads the compiled library (``_native.so``), checks its ABI and tells which instruction set it uses."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from edgees.errors import NativeError, UsageError

ABI = 2
REASONS = {
    -1: "a size, type or name makes no sense",
    -2: "no codec for this block type",
    -3: "llama.cpp has another layout than expected",
    -4: "a product had columns that belong to no member",
}

NO_MEMBER = -4

_i32, _i64, _u32, _u64, _f32 = ctypes.c_int, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
_ptr = ctypes.c_void_p


class Tensor(ctypes.Structure):
    """``struct edgees_tensor`` of csrc/api.h."""

    _fields_ = [
        ("type", _i32), ("heads", _i32), ("rows", _i64), ("cols", _i64), ("base", _ptr), ("row_stride", _i64),
        ("id", _u32), ("rho", _f32), ("cell", _f32), ("bits", _i32), ("span", _i32), ("plane", _ptr), ("factors", _i32),
        ("a", _ptr), ("pool", _ptr), ("delta", _ptr), ("lattice", _i32), ("absmax", _ptr),
    ]  # fmt: skip


class Member(ctypes.Structure):
    """``struct edgees_member`` of csrc/api.h."""

    _fields_ = [("key", _u64), ("amplitude", _f32), ("slot", _u32)]


class Members(ctypes.Structure):
    """``struct edgees_members`` of csrc/api.h."""

    _fields_ = [("count", _i64), ("keys", _ptr), ("amplitudes", _ptr), ("slots", _ptr)]


class NoiseKind(ctypes.Structure):
    """``struct edgees_noise_kind`` of csrc/api.h."""

    _fields_ = [("kind", _i32), ("rank", _i32)]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "edgees_abi": (_i32, []),
    "edgees_isa": (ctypes.c_char_p, []),
    "edgees_isas": (ctypes.c_char_p, []),
    "edgees_set_isa": (_i32, [ctypes.c_char_p]),
    "edgees_set_threads": (None, [_i32]),
    "edgees_threads": (_i32, []),
    "edgees_key": (_u64, [_u64, _u32, _u32]),
    "edgees_philox": (_i32, [_u64, _u32, _u32, _u32, _u32, _i64, _ptr]),
    "edgees_eps": (_i32, [_i32, _i32, _i32, _u64, _u32, _i64, _i64, _i64, _ptr]),
    "edgees_sign_vector": (_i32, [_u64, _u32, _u32, _i64, _ptr]),
    "edgees_dither": (_i32, [_u64, _u32, _i64, _i64, _i64, _ptr]),
    "edgees_delta_apply": (_i32, [_ptr, _i64, _i64, _i64, _u32, _i32, _i32, _i32, _i32, _ptr, _ptr, _f32]),
    "edgees_factors_apply": (_i32, [_ptr, _i64, _i64, _u32, _i32, _i32, _ptr, _ptr, _ptr, _f32]),
    "edgees_plane_count": (_i32, [_i32, _ptr, _i64, _i64, _ptr, _f32, _ptr]),
    "edgees_plane_encode": (
        _i32, [_i32, _ptr, _i64, _i64, _ptr, _ptr, _u64, _u32, _i32, _i32, _f32, _ptr]),
    "edgees_lattice_encode": (_i32, [_i32, _ptr, _i64, _i64, _ptr, _ptr, _u64, _u32, _ptr]),
    "edgees_plane_row_bytes": (_i64, [_i32, _i64]),
    "edgees_row_bytes": (_i64, [_i32, _i64]),
    "edgees_decode": (_i32, [_i32, _ptr, _i64, _i64, _ptr]),
    "edgees_cell_group": (_i32, [_i32]),
    "edgees_cells": (_i32, [_i32, _ptr, _i64, _i64, _f32, _ptr]),
    "edgees_effective": (_i32, [_i32, _ptr, _i64, _i64, _i32, _ptr, _i32, _f32, _ptr]),
    "edgees_peak": (_i64, [_i64]),
    "edgees_product": (_i32, [_ptr, _ptr, _ptr, _ptr, _i64, _ptr, _ptr]),
    "edgees_product_rows": (_i32, [_ptr, _ptr, _ptr, _ptr, _i64, _ptr, _i64, _ptr, _i64]),
    "edgees_rows": (_i32, [_ptr, _ptr, _ptr, _ptr, _i64, _ptr, _ptr]),
    "edgees_row": (_i32, [_ptr, _ptr, _ptr, _i64, _ptr]),
    "edgees_vector": (_i32, [_ptr, _ptr, _ptr, _ptr]),
    "edgees_llama_install": (_i32, [_ptr]),
    "edgees_llama_error": (ctypes.c_char_p, []),
    "edgees_session_new": (_ptr, [_i32, _i32, _i32]),
    "edgees_session_free": (None, [_ptr]),
    "edgees_session_activate": (None, [_ptr]),
    "edgees_session_tensor": (_i32, [_ptr, _i32, ctypes.c_char_p, _i32, _ptr]),
    "edgees_session_batch": (_i32, [_ptr, _i32, _ptr, _i64, _ptr, _ptr, _i64, _ptr]),
    "edgees_session_error": (ctypes.c_char_p, [_ptr]),
    "edgees_session_seen": (_i64, [_ptr, _i32]),
    "edgees_session_unclaimed": (ctypes.c_char_p, [_ptr, _i32]),
    "edgees_logprob": (_i32, [_ptr, _i64, _i64, _ptr, _ptr, _ptr]),
}  # fmt: skip


@lru_cache(maxsize=1)
def lib() -> ctypes.CDLL:
    """The library with all signatures set.

    Errors: NativeError when it was never built or is of another ABI; UsageError when ``EDGEES_ISA`` names an
    instruction set that this machine lacks.
    """
    folder = Path(__file__).parent
    path = next((p for p in (folder / "_native.so", folder / "_native.dll") if p.exists()), None)
    if path is None:
        raise NativeError(
            f"the compiled part of edgees is missing from {folder}",
            hint="install it with a C++17 compiler present: pip install . (or python setup.py build_ext --inplace)",
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}", hint="rebuild it here: pip install .") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise NativeError(f"{path} lacks {name}: it was built from other sources", hint="rebuild: pip install .")
        function.restype, function.argtypes = result, arguments
    found = library.edgees_abi()
    if found != ABI:
        raise NativeError(f"{path} has ABI {found}, this edgees needs {ABI}", hint="rebuild: pip install .")
    wanted = os.environ.get("EDGEES_ISA", "")
    usable = library.edgees_isas().decode().split()
    if wanted and wanted not in usable:
        raise UsageError(f"EDGEES_ISA={wanted}: this machine has {', '.join(usable)}", hint="unset EDGEES_ISA")
    return library


def isa() -> str:
    """Name of the instruction-set arm in use; :func:`available_isas` lists them, best first."""
    return str(lib().edgees_isa().decode())


def available_isas() -> list[str]:
    """Arms that this CPU and operating system can run, best first."""
    return list(lib().edgees_isas().decode().split())


def set_isa(name: str) -> None:
    """Switch the arm (tests, studies). Errors: UsageError when it is not usable here."""
    if lib().edgees_set_isa(name.encode()):
        raise UsageError(f"instruction set {name!r}: this machine has {', '.join(available_isas())}")


def threads(n: int | None = None) -> int:
    """Set the number of threads of our own pool (0: all) and return the number in force."""
    if n is not None:
        lib().edgees_set_threads(n)
    return int(lib().edgees_threads())


def check(code: int, what: str) -> None:
    """Raise NativeError when a function of the library returned other than 0."""
    if code:
        raise NativeError(f"{what}: {REASONS.get(code, 'unknown fault')} (code {code})")


def pointer(array: np.ndarray) -> int:
    """Address of a C-contiguous array's data. The caller keeps the array alive."""
    if not array.flags.c_contiguous:
        raise NativeError(f"array of shape {array.shape} is not contiguous")
    return int(array.ctypes.data)
