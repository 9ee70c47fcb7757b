"""Operators of the torch engine: ``torch.ops.edgees.*``, products with the noise inside.

Every operator has a schema, a fake (shapes without data), a CPU implementation over the C interface (csrc/api.h) and
a CUDA one over :mod:`edgees.cuda`. Members lie in tensors on the device of the rest, never in constants, so that a
captured graph serves every generation::

    keys int64 [M] (the bits of uint64), amplitudes float32 [M] (sign * sigma; 0: the centre), slots int32 [M]
    owner int32 [n]: whose each column (row of x) is

``noise``: 0 sign, 1 lowrank, 2 normal (:data:`edgees.noise.KINDS`). ``rho`` multiplies amplitudes. What has been
learned comes as ``plane`` (uint8 [rows, plane bytes]; ``bits``, ``span``: csrc/plane.cpp) or as ``factors`` (float32
[rows, K]) with ``pool`` (int32 [K, words], packed signs). 4-bit weights are stored as bitsandbytes does
(:mod:`edgees.nf4`): ``packed`` uint8, ``absmax`` float32 of every 64 weights; or, double-quantised, ``absmax`` uint8
with ``absmax_code`` float32 [256], ``absmax_scale`` float32 per 256 blocks and ``absmax_offset``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from edgees import blocks, native
from edgees.errors import UsageError

_MEMBERS = "Tensor keys, Tensor amplitudes, Tensor slots, Tensor owner, int noise, int rank"
_LEARNED = "Tensor? plane, int bits, int span, Tensor? factors, Tensor? pool"
SCHEMAS = {
    "nf4_linear_perturbed":
        "(Tensor x, Tensor packed, Tensor absmax, Tensor? absmax_code, Tensor? absmax_scale, float absmax_offset, "
        f"str quant_type, int rows, {_MEMBERS}, int tensor, float rho, {_LEARNED}) -> Tensor",
    "linear_perturbed":
        f"(Tensor x, Tensor weight, {_MEMBERS}, int tensor, float rho, float cell, {_LEARNED}) -> Tensor",
    "embedding_perturbed":
        f"(Tensor ids, Tensor weight, {_MEMBERS}, int tensor, float rho, float cell, {_LEARNED}) -> Tensor",
    "vectors_perturbed":
        "(Tensor base, Tensor? delta, Tensor keys, Tensor amplitudes, int noise, int rank, int tensor, float rho) "
        "-> Tensor",
    "es_update_":
        "(Tensor(a!) delta, Tensor keys, Tensor coefs, float keep, int row0, int tensor, int noise, int rank, "
        "bool vector) -> ()",
    "es_update_factors_":
        "(Tensor(a!) factors, Tensor keys, Tensor slots, Tensor coefs, float keep, int tensor, int rank) -> ()",
}  # fmt: skip
"""Operators by name. ``x`` [..., cols] (float32; on CUDA also half types) -> [..., rows] of its dtype; ``ids`` int64
[n] -> float32 [n, cols]; ``vectors_perturbed``: base [cols] -> float32 [M, cols]. ``es_update_`` is
:func:`edgees_delta_apply <native>` on ``delta`` float32 [n, cols], canonical rows from ``row0``: coefs float32 [P]."""

_torch: Any = torch  # parts of it have no types
_LIBRARY = _torch.library.Library("edgees", "DEF")
for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass
class Members:
    """Whose columns a call has: the four tensors of the operators' schemas, on one device."""

    keys: torch.Tensor
    amplitudes: torch.Tensor
    slots: torch.Tensor
    owner: torch.Tensor


def float_type(dtype: torch.dtype) -> str:
    """Name of a float dtype among :data:`edgees.blocks.TYPES`. :raises UsageError: another dtype."""
    if dtype not in _FLOATS:
        raise UsageError(f"weights of {dtype} cannot be tuned", "float32, float16 and bfloat16 can")
    return _FLOATS[dtype]


# ---- fakes: shapes and dtypes alone
def _fake_nf4(x: torch.Tensor, packed: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rest[5]))


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_embedding(ids: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]), dtype=torch.float32)


def _fake_vectors(base: torch.Tensor, delta: torch.Tensor | None, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
    return base.new_empty((keys.shape[0], base.shape[0]), dtype=torch.float32)


def _fake_nothing(*args: Any) -> None:
    return None


for _name, _fake in (
    ("nf4_linear_perturbed", _fake_nf4), ("linear_perturbed", _fake_linear), ("embedding_perturbed", _fake_embedding),
    ("vectors_perturbed", _fake_vectors), ("es_update_", _fake_nothing), ("es_update_factors_", _fake_nothing),
):  # fmt: skip
    torch.library.register_fake(f"edgees::{_name}", _fake, lib=_LIBRARY)


# ---- CPU: the C interface
def _address(tensor: torch.Tensor | None, dtype: torch.dtype, what: str) -> int | None:
    """Address of a contiguous CPU tensor; None for None."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise UsageError(
            f"{what} is {'' if tensor.is_contiguous() else 'not '}contiguous {tensor.dtype}; contiguous {dtype} is needed"
        )
    return int(tensor.data_ptr())


def _members(keys: torch.Tensor, amplitudes: torch.Tensor, slots: torch.Tensor) -> native.Members:
    count = keys.shape[0]
    if amplitudes.shape[0] != count or slots.shape[0] != count:
        raise UsageError(f"{count} keys, {amplitudes.shape[0]} amplitudes and {slots.shape[0]} slots of members")
    return native.Members(
        count, _address(keys, torch.int64, "keys"), _address(amplitudes, torch.float32, "amplitudes"),
        _address(slots, torch.int32, "slots"),
    )  # fmt: skip


def _owners(owner: torch.Tensor, count: int) -> int | None:
    if owner.shape[0] != count:
        raise UsageError(f"owner has shape {tuple(owner.shape)} for {count} columns")
    return _address(owner, torch.int32, "owner")


def _check(code: int, what: str) -> None:
    if code == native.NO_MEMBER:
        raise UsageError(f"{what}: owner names a member that is not there")
    native.check(code, what)


def _struct(
    type_name: str, rows: int, cols: int, base: int | None, tensor: int, rho: float, cell: float,
    plane: torch.Tensor | None, bits: int, span: int, factors: torch.Tensor | None, pool: torch.Tensor | None,
    absmax: int | None = None,
) -> native.Tensor:  # fmt: skip
    block = blocks.TYPES[type_name]
    if plane is not None and plane.numel() != rows * -(-cols // 32) * 4 * bits:
        raise UsageError(f"a plane of {plane.numel()} bytes beside {rows} x {cols} weights of {bits} bits")
    if (factors is None) != (pool is None) or (factors is not None and factors.shape[0] != rows):
        raise UsageError("factors [rows, K] and their pool come together")
    return native.Tensor(
        block.id, 0, rows, cols, base, 0 if absmax else cols * block.bytes // block.weights, tensor, rho, cell,
        0 if plane is None else bits, span, _address(plane, torch.uint8, "plane"),
        0 if factors is None else factors.shape[1], _address(factors, torch.float32, "factors"),
        _address(pool, torch.int32, "pool"), None, 0, absmax,
    )  # fmt: skip


def _product(
    x: torch.Tensor, struct: native.Tensor, keys: torch.Tensor, amplitudes: torch.Tensor, slots: torch.Tensor,
    owner: torch.Tensor, noise: int, rank: int,
) -> torch.Tensor:  # fmt: skip
    rows, cols = struct.rows, struct.cols
    if x.shape[-1] != cols:
        raise UsageError(f"columns of {x.shape[-1]} numbers for a matrix of {cols}")
    columns = x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()
    n = columns.numel() // cols
    y = torch.empty((*x.shape[:-1], rows), dtype=torch.float32)
    code = native.lib().edgees_product_rows(
        ctypes.byref(struct), ctypes.byref(native.NoiseKind(noise, rank)),
        ctypes.byref(_members(keys, amplitudes, slots)), _owners(owner, n), n, columns.data_ptr(), cols, y.data_ptr(),
        rows,
    )  # fmt: skip
    if code:
        _check(code, "perturbed product")
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def unnested(
    absmax: torch.Tensor, code: torch.Tensor | None, scale: torch.Tensor | None, offset: float
) -> torch.Tensor:
    """float32 absmax of each block of 64, from the double-quantised form (blocks of 256) or as it is."""
    if absmax.dtype != torch.uint8:
        return absmax
    if code is None or scale is None:
        raise UsageError("a uint8 absmax needs its code and scale: it is double-quantised")
    return code[absmax.long()] * scale.repeat_interleave(256)[: absmax.numel()] + offset


def _nf4_cpu(
    x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, absmax_code: torch.Tensor | None,
    absmax_scale: torch.Tensor | None, absmax_offset: float, quant_type: str, rows: int, keys: torch.Tensor,
    amplitudes: torch.Tensor, slots: torch.Tensor, owner: torch.Tensor, noise: int, rank: int, tensor: int, rho: float,
    plane: torch.Tensor | None, bits: int, span: int, factors: torch.Tensor | None, pool: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    cols = x.shape[-1]
    name = quant_type.upper()
    if name not in ("NF4", "FP4"):
        raise UsageError(f"quant_type {quant_type!r}", "there are nf4 and fp4")
    if packed.numel() != (rows * cols + 1) // 2 or absmax.numel() != (rows * cols + 63) // 64:
        raise UsageError(
            f"{packed.numel()} bytes with {absmax.numel()} absmax are no {rows} x {cols} weights in blocks of 64"
        )
    absmax = unnested(absmax, absmax_code, absmax_scale, absmax_offset)
    base, top = _address(packed, torch.uint8, "packed"), _address(absmax, torch.float32, "absmax")
    struct = _struct(name, rows, cols, base, tensor, rho, 0.0, plane, bits, span, factors, pool, top)
    return _product(x, struct, keys, amplitudes, slots, owner, noise, rank)


def _float_struct(
    weight: torch.Tensor, tensor: int, rho: float, cell: float, plane: torch.Tensor | None, bits: int, span: int,
    factors: torch.Tensor | None, pool: torch.Tensor | None,
) -> native.Tensor:  # fmt: skip
    base = _address(weight, weight.dtype, "weight")
    rows, cols = weight.shape
    return _struct(float_type(weight.dtype), rows, cols, base, tensor, rho, cell, plane, bits, span, factors, pool)


def _linear_cpu(
    x: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor, amplitudes: torch.Tensor, slots: torch.Tensor,
    owner: torch.Tensor, noise: int, rank: int, tensor: int, rho: float, cell: float, plane: torch.Tensor | None,
    bits: int, span: int, factors: torch.Tensor | None, pool: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    struct = _float_struct(weight, tensor, rho, cell, plane, bits, span, factors, pool)
    return _product(x, struct, keys, amplitudes, slots, owner, noise, rank)


def _embedding_cpu(
    ids: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor, amplitudes: torch.Tensor, slots: torch.Tensor,
    owner: torch.Tensor, noise: int, rank: int, tensor: int, rho: float, cell: float, plane: torch.Tensor | None,
    bits: int, span: int, factors: torch.Tensor | None, pool: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    struct = _float_struct(weight, tensor, rho, cell, plane, bits, span, factors, pool)
    out = torch.empty((ids.shape[0], weight.shape[1]), dtype=torch.float32)
    code = native.lib().edgees_rows(
        ctypes.byref(struct), ctypes.byref(native.NoiseKind(noise, rank)),
        ctypes.byref(_members(keys, amplitudes, slots)), _owners(owner, ids.shape[0]), ids.shape[0],
        _address(ids, torch.int64, "ids"), out.data_ptr(),
    )  # fmt: skip
    _check(code, "perturbed embedding")
    return out


def _vectors_cpu(
    base: torch.Tensor, delta: torch.Tensor | None, keys: torch.Tensor, amplitudes: torch.Tensor, noise: int,
    rank: int, tensor: int, rho: float,
) -> torch.Tensor:  # fmt: skip
    struct = native.Tensor(
        type=blocks.TYPES[float_type(base.dtype)].id, rows=1, cols=base.shape[0],
        base=_address(base, base.dtype, "base"), id=tensor, rho=rho, delta=_address(delta, torch.float32, "delta"),
    )  # fmt: skip
    if amplitudes.shape != keys.shape:
        raise UsageError(f"{keys.shape[0]} keys and {amplitudes.shape[0]} amplitudes of members")
    out = torch.empty((keys.shape[0], base.shape[0]), dtype=torch.float32)
    kind = ctypes.byref(native.NoiseKind(noise, rank))
    for i, (key, amplitude) in enumerate(zip(keys.tolist(), amplitudes.tolist(), strict=True)):
        member = native.Member(key, amplitude, 0)
        code = native.lib().edgees_vector(ctypes.byref(struct), kind, ctypes.byref(member), out[i].data_ptr())
        native.check(code, "perturbed vector")
    return out


def _update_cpu(
    delta: torch.Tensor, keys: torch.Tensor, coefs: torch.Tensor, keep: float, row0: int, tensor: int, noise: int,
    rank: int, vector: bool,
) -> None:  # fmt: skip
    code = native.lib().edgees_delta_apply(
        _address(delta, torch.float32, "delta"), delta.shape[0], delta.shape[1], row0, tensor, noise, rank,
        int(vector), keys.shape[0], _address(keys, torch.int64, "keys"), _address(coefs, torch.float32, "coefs"), keep,
    )  # fmt: skip
    native.check(code, "update")


def _update_factors_cpu(
    factors: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, coefs: torch.Tensor, keep: float, tensor: int,
    rank: int,
) -> None:  # fmt: skip
    code = native.lib().edgees_factors_apply(
        _address(factors, torch.float32, "factors"), factors.shape[0], factors.shape[1], tensor, rank, keys.shape[0],
        _address(keys, torch.int64, "keys"), _address(slots, torch.int32, "slots"),
        _address(coefs, torch.float32, "coefs"), keep,
    )  # fmt: skip
    native.check(code, "update of factors")


for _name, _implementation in (
    ("nf4_linear_perturbed", _nf4_cpu), ("linear_perturbed", _linear_cpu), ("embedding_perturbed", _embedding_cpu),
    ("vectors_perturbed", _vectors_cpu), ("es_update_", _update_cpu), ("es_update_factors_", _update_factors_cpu),
):  # fmt: skip
    _LIBRARY.impl(_name, _implementation, "CPU")
