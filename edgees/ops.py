"""Operators of the torch engine: ``torch.ops.edgees.*``, products with the noise inside.

Every operator has a schema, a fake (shapes without data), a CPU implementation over the C interface (csrc/api.h) and
a CUDA one over :mod:`edgees.cuda`, or, where its kernels cannot be had, in torch's own operations. Members lie in
tensors on the device of the rest, never in constants, so that a captured graph serves every generation::

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
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch

from edgees import blocks, cuda, native, nf4, noise
from edgees.errors import EdgeesError, EngineError, UsageError

log = logging.getLogger("edgees.torch")

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
        form = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise UsageError(f"{what} is {tensor.dtype} and {form}: a contiguous {dtype} is needed")
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
    name = _coded(packed, absmax, absmax_code, absmax_scale, quant_type, rows, cols, x.device)
    absmax = unnested(absmax, absmax_code, absmax_scale, absmax_offset)
    base, top = packed.data_ptr(), _address(absmax, torch.float32, "absmax")
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
    _check_vectors(base, delta, keys, amplitudes)
    struct = native.Tensor(
        type=blocks.TYPES[float_type(base.dtype)].id, rows=1, cols=base.shape[0],
        base=_address(base, base.dtype, "base"), id=tensor, rho=rho, delta=_address(delta, torch.float32, "delta"),
    )  # fmt: skip
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
    _check_update(delta, keys, coefs, None)
    code = native.lib().edgees_delta_apply(
        _address(delta, torch.float32, "delta"), delta.shape[0], delta.shape[1], row0, tensor, noise, rank,
        int(vector), keys.shape[0], _address(keys, torch.int64, "keys"), _address(coefs, torch.float32, "coefs"), keep,
    )  # fmt: skip
    native.check(code, "update")


def _update_factors_cpu(
    factors: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, coefs: torch.Tensor, keep: float, tensor: int,
    rank: int,
) -> None:  # fmt: skip
    _check_update(factors, keys, coefs, slots)
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


# ---- CUDA
# KERNELS launches edgees.cuda's kernels and never waits for the device, so that a graph can be captured: what only a
# look at the data would show (an owner, a row that is not there) is not checked. PLAIN needs nothing but torch.
CHUNK = 1 << 24
"""Weights that the plain arm dequantises at a time."""

Call = Callable[..., Any]


def device_kernels(device: torch.device) -> cuda.Kernels:
    """The kernels of a device; errors as :func:`edgees.cuda.kernels`. Tests put an emulation here."""
    return cuda.kernels(device.index or 0)


@cache
def arm(device: torch.device) -> cuda.Kernels | None:
    """What runs on a device: its kernels once they have proved themselves; None, after a warning: :data:`PLAIN`.

    The first call for a device compiles and waits, so it must not lie in the capture of a graph.
    """
    try:
        found = device_kernels(device)
        _prove(found, device)
        return found
    except EdgeesError as error:
        log.warning(
            "%s runs without edgees' CUDA kernels, several times slower (weights are dequantised, noise comes from the "
            "CPU): %s%s", device, error.message, f" ({error.hint})" if error.hint else "",
        )  # fmt: skip
        return None


def describe() -> dict[str, Any]:
    """For ``edgees doctor``: device, arm (``CUDA kernels``, ``plain torch`` or ``CPU``) and why; hint where there is
    one. Compiles nothing."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees no GPU" if built else f"torch {torch.__version__} is built without CUDA"
        return {"device": "cpu", "arm": "CPU", "why": why}
    name, found = torch.cuda.get_device_name(), cuda.describe(torch.cuda.current_device())
    if found["ok"]:
        return {"device": name, "arm": "CUDA kernels", "why": f"{found['compiler']} for {found['target']}"}
    hint = {"hint": found["hint"]} if "hint" in found else {}
    return {"device": name, "arm": "plain torch", "why": found["error"], **hint}


def _prove(kernels: cuda.Kernels, device: torch.device) -> None:
    """:raises EngineError: noise that has other bits than the CPU's, or a product that is wrong."""
    rows, cols, tensor = 64, 128, 0x5EED
    key = noise.make_key(1, 2, 3)
    keys = torch.from_numpy(np.array([key], np.uint64).view(np.int64)).to(device)
    one, none = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    for kind, name in enumerate(noise.KINDS):
        eps = torch.zeros((rows, cols), device=device)
        _update_kernels(kernels, eps, keys, one, 0.0, 0, tensor, kind, 2, False)
        if not np.array_equal(eps.cpu().numpy(), noise.eps(name, key, tensor, rows, cols, rank=2)):
            raise EngineError(f"the kernels' {name} noise on {device} is not the CPU's", "please report this")
    w = nf4.quantise(noise.eps("normal", key, 1, rows, cols), nested=False)
    packed, absmax = (torch.from_numpy(part).to(device) for part in (w.packed, w.absmax_float32()))
    full = w.dequantise() + 0.5 * noise.eps("sign", key, tensor, rows, cols)
    for n in (1, cuda.Kernels.FEW + 1):  # column by column, and in tiles
        x = torch.from_numpy(noise.eps("normal", key, 2, n, cols)).to(torch.bfloat16)
        y = _nf4_kernels(
            kernels, x.to(device), packed, absmax, None, None, 0.0, "nf4", rows, keys, one, none, none.repeat(n), 0, 1,
            tensor, 0.5, None, 0, 0, None, None,
        )  # fmt: skip
        want = x.float().numpy() @ full.T
        if not np.abs(y.cpu().float().numpy() - want).max() < 2.0**-6 * np.abs(want).max():
            raise EngineError(f"the kernels compute wrong products of {n} columns on {device}", "please report this")


@dataclass
class _Noisy:
    """What products and lookups have in common, in the order of their schemas."""

    keys: torch.Tensor
    amplitudes: torch.Tensor
    slots: torch.Tensor
    owner: torch.Tensor
    noise: int
    rank: int
    tensor: int
    rho: float
    cell: float
    plane: torch.Tensor | None
    bits: int
    span: int
    factors: torch.Tensor | None
    pool: torch.Tensor | None

    def check(self, device: torch.device, rows: int, cols: int, n: int) -> None:
        """:raises UsageError: what does not fit ``n`` columns of a matrix."""
        _kind(self.noise, self.rank)
        sizes = [t.numel() for t in (self.keys, self.amplitudes, self.slots)]
        if len(set(sizes)) > 1:
            raise UsageError("{} keys, {} amplitudes and {} slots of members".format(*sizes))
        if self.owner.shape != (n,):
            raise UsageError(f"owner has shape {tuple(self.owner.shape)} for {n} columns")
        if self.plane is not None and self.plane.numel() != rows * blocks.plane_row_bytes(self.bits, cols):
            raise UsageError(f"a plane of {self.plane.numel()} bytes, {self.bits} bits, beside {rows} x {cols} weights")
        learned = (self.factors, self.pool)
        if any(t is not None for t in learned):
            shapes = [None if t is None else tuple(t.shape) for t in learned]
            if shapes != [(rows, k := (shapes[0] or (0, 0))[-1]), (k, -(-cols // 128) * 4)] or not k:
                raise UsageError(f"factors {shapes[0]} with a pool {shapes[1]} of words beside {rows} x {cols} weights")
        for what, tensor, dtype in (
            ("keys", self.keys, torch.int64), ("amplitudes", self.amplitudes, torch.float32),
            ("slots", self.slots, torch.int32), ("owner", self.owner, torch.int32), ("plane", self.plane, torch.uint8),
            ("factors", self.factors, torch.float32), ("pool", self.pool, torch.int32),
        ):  # fmt: skip
            _at(device, tensor, dtype, what)

    # ---- as the kernels take it
    def members(self) -> cuda.Members | None:
        if self.rho == 0.0:
            return None
        return cuda.Members(
            cuda.KINDS[self.noise], self.rank, self.keys.data_ptr(), self.amplitudes.data_ptr(), self.owner.data_ptr(),
            self.slots.data_ptr(),
        )  # fmt: skip

    def adapter(self) -> cuda.Adapter | None:
        if self.factors is None or self.pool is None:
            return None
        return cuda.Adapter(self.factors.shape[1], self.factors.data_ptr(), self.pool.data_ptr())

    def beside(self) -> dict[str, Any]:
        """The plane and the cell of a :class:`edgees.cuda.Weight`."""
        if self.plane is None:
            return {"cell": self.cell}
        return {"cell": self.cell, "plane": self.plane.data_ptr(), "bits": self.bits, "span": self.span}

    # ---- as the plain arm takes it
    def perturbed(self) -> Iterator[tuple[int, float, int, list[int]]]:
        """(key, amplitude * rho, slot, its columns) of each member that has noise. Waits for the device."""
        columns: dict[int, list[int]] = {}
        for i, member in enumerate(self.owner.tolist()):
            columns.setdefault(member, []).append(i)
        table = list(zip(self.keys.tolist(), self.amplitudes.tolist(), self.slots.tolist(), strict=True))
        for member, at in columns.items():
            if not 0 <= member < len(table):
                raise UsageError(f"owner names member {member}: there are {len(table)}")
            key, amplitude, slot = table[member]
            if strength := float(np.float32(amplitude) * np.float32(self.rho)):
                yield key & (1 << 64) - 1, strength, slot & (1 << 32) - 1, at

    def signs(self, cols: int) -> torch.Tensor | None:
        """float32 [K, cols] of +-1: the pool."""
        if self.pool is None:
            return None
        bits = self.pool[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.pool.device) & 1
        return 1.0 - 2.0 * bits.reshape(self.pool.shape[0], -1)[:, :cols]

    def factored(self, key: int, slot: int, rows: int, cols: int, signs: torch.Tensor | None) -> tuple[Any, Any]:
        """float32 [rank, rows] left and [rank, cols] right signs of a member's lowrank noise."""
        device, ranks = self.keys.device, range(self.rank)
        left = np.stack([noise.sign_vector(key, self.tensor, noise.LEFT + k, rows) for k in ranks])
        if signs is not None:
            right: torch.Tensor = signs[[(slot * self.rank + k) % signs.shape[0] for k in ranks]]
        else:
            drawn = np.stack([noise.sign_vector(key, self.tensor, noise.RIGHT + k, cols) for k in ranks])
            right = torch.from_numpy(drawn).to(device)
        return torch.from_numpy(left).to(device), right

    def moved(self, w: torch.Tensor, plane: torch.Tensor | None, absmax: torch.Tensor | None) -> torch.Tensor:
        """float32 [n, cols] weights with their rows of the plane; absmax: of their blocks, for 4-bit weights."""
        if plane is None:
            return w
        bits, cols = self.bits, w.shape[1]
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=w.device)[:, None]  # csrc/plane.cpp
        codes = plane.reshape(len(w), -1, 1, 4 * bits) >> shifts & (1 << bits) - 1
        steps = codes.reshape(len(w), -1)[:, :cols].float() - (1 << bits - 1)
        part = 2.0 ** (self.span - bits)
        if absmax is None:
            return w + steps * (self.cell * part)
        return w + steps * (absmax.abs() * (0.125 * part)).reshape(len(w), -1).repeat_interleave(64, dim=1)


def _kind(kind: int, rank: int) -> str:
    if not 0 <= kind < len(cuda.KINDS) or not 1 <= rank <= cuda.MAX_RANK:
        raise UsageError(f"noise {kind} of rank {rank}", f"0 to {len(cuda.KINDS) - 1}, 1 to {cuda.MAX_RANK}")
    return cuda.KINDS[kind]


def _at(device: torch.device, tensor: torch.Tensor | None, dtype: torch.dtype, what: str) -> int:
    """Address of a contiguous tensor of that device; 0 for None."""
    if tensor is not None and tensor.device != device:
        raise UsageError(f"{what} is on {tensor.device}, the rest on {device}")
    return _address(tensor, dtype, what) or 0


@contextmanager
def _stream(device: torch.device) -> Iterator[int]:
    """The device made current, and its current stream."""
    if device.type != "cuda":  # an emulation
        yield 0
        return
    with torch.cuda.device(device):
        yield int(torch.cuda.current_stream().cuda_stream)


def _columns(x: torch.Tensor, cols: int) -> int:
    """How many columns x has. :raises UsageError: of another size or no floats."""
    if not x.dim() or x.shape[-1] != cols or x.dtype not in _FLOATS:
        raise UsageError(
            f"x of {x.dtype} {tuple(x.shape)} for a matrix of {cols} columns", "float32, float16, bfloat16"
        )
    return x.numel() // cols


def _coded(
    packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor | None, scale: torch.Tensor | None,
    quant_type: str, rows: int, cols: int, device: torch.device,
) -> str:  # fmt: skip
    """Name of the type of 4-bit weights whose parts fit each other. :raises UsageError: they do not."""
    parts = -(-rows * cols // 64)
    if quant_type not in nf4.TABLES:
        raise UsageError(f"quant_type {quant_type!r}", "there are nf4 and fp4")
    if rows < 1 or cols < 1 or packed.numel() != -(-rows * cols // 2) or absmax.numel() != parts:
        raise UsageError(
            f"{packed.numel()} bytes with {absmax.numel()} absmax are no {rows} x {cols} weights in blocks of 64"
        )
    _at(device, packed, torch.uint8, "packed")
    if absmax.dtype != torch.uint8:
        _at(device, absmax, torch.float32, "absmax")
    elif code is None or scale is None or code.numel() != 256 or scale.numel() != -(-parts // 256):
        raise UsageError("a uint8 absmax is double-quantised: it needs its code [256] and a scale for every 256")
    else:
        for what, part in (("absmax_code", code), ("absmax_scale", scale)):
            _at(device, part, torch.float32, what)
        _at(device, absmax, torch.uint8, "absmax")
    return quant_type.upper()


# ---- CUDA: by kernels
def _launch(kernels: cuda.Kernels, w: cuda.Weight, x: torch.Tensor, e: _Noisy) -> torch.Tensor:
    n = x.numel() // w.cols
    y = x.new_empty((*x.shape[:-1], w.rows))
    if not n:
        return y
    x = x.contiguous()
    members, adapter = e.members(), e.adapter()
    dots = x.new_empty(n * kernels.dots_per_column(members, adapter), dtype=torch.float32)
    # columns lie stream by stream, and each stream is one member's
    together = n if e.keys.shape[0] == 1 else x.shape[1] if x.dim() == 3 else 1
    with _stream(x.device) as stream:
        kernels.linear(
            w, x.data_ptr(), y.data_ptr(), n, dtype=_FLOATS[x.dtype], tensor=e.tensor, rho=e.rho, members=members,
            adapter=adapter, dots=dots.data_ptr(), together=together, stream=stream,
        )  # fmt: skip
    return y


def _nf4_kernels(
    kernels: cuda.Kernels, x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor | None,
    scale: torch.Tensor | None, offset: float, quant_type: str, rows: int, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    cols, device, e = x.shape[-1], x.device, _Noisy(*(*rest[:8], 0.0, *rest[8:]))
    e.check(device, rows, cols, _columns(x, cols))
    name = _coded(packed, absmax, code, scale, quant_type, rows, cols, device)
    if absmax.dtype == torch.uint8 and code is not None and scale is not None:
        nested = cuda.Nested(absmax.data_ptr(), code.data_ptr(), scale.data_ptr(), offset)
        w = cuda.Weight(name, rows, cols, packed.data_ptr(), nested=nested, **e.beside())
    else:
        w = cuda.Weight(name, rows, cols, packed.data_ptr(), absmax.data_ptr(), **e.beside())
    return _launch(kernels, w, x, e)


def _float_weight(weight: torch.Tensor, e: _Noisy, device: torch.device) -> cuda.Weight:
    rows, cols = weight.shape
    base = _at(device, weight, weight.dtype, "weight")
    return cuda.Weight(float_type(weight.dtype), rows, cols, base, **e.beside())


def _linear_kernels(kernels: cuda.Kernels, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    e, (rows, cols) = _Noisy(*rest), weight.shape
    e.check(x.device, rows, cols, _columns(x, cols))
    return _launch(kernels, _float_weight(weight, e, x.device), x, e)


def _embedding_kernels(kernels: cuda.Kernels, ids: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    e, n, (rows, cols) = _Noisy(*rest), ids.shape[0], weight.shape
    e.check(ids.device, rows, cols, n)
    w = _float_weight(weight, e, ids.device)
    out = weight.new_empty((n, cols), dtype=torch.float32)
    index = _at(ids.device, ids, torch.int64, "ids")
    with _stream(ids.device) as stream:
        kernels.rows(
            w, index, out.data_ptr(), n, dtype="F32", tensor=e.tensor, rho=e.rho, members=e.members(),
            adapter=e.adapter(), stream=stream,
        )  # fmt: skip
    return out


def _check_vectors(
    base: torch.Tensor, delta: torch.Tensor | None, keys: torch.Tensor, amplitudes: torch.Tensor
) -> None:
    if base.dim() != 1 or (delta is not None and delta.shape != base.shape) or amplitudes.shape != keys.shape:
        raise UsageError(
            f"a vector {tuple(base.shape)}, its delta {delta if delta is None else tuple(delta.shape)}, "
            f"{keys.shape[0]} keys and {amplitudes.shape[0]} amplitudes"
        )
    float_type(base.dtype)
    for what, tensor, dtype in (
        ("base", base, base.dtype), ("delta", delta, torch.float32), ("keys", keys, torch.int64),
        ("amplitudes", amplitudes, torch.float32),
    ):  # fmt: skip
        _at(base.device, tensor, dtype, what)


def _vectors_kernels(
    kernels: cuda.Kernels, base: torch.Tensor, delta: torch.Tensor | None, keys: torch.Tensor,
    amplitudes: torch.Tensor, kind: int, rank: int, tensor: int, rho: float,
) -> torch.Tensor:  # fmt: skip
    _check_vectors(base, delta, keys, amplitudes)
    n, cols = keys.shape[0], base.shape[0]
    members = cuda.Members(_kind(kind, rank), rank, keys.data_ptr(), amplitudes.data_ptr(), owner=0)
    out = base.new_empty((n, cols), dtype=torch.float32)
    with _stream(base.device) as stream:
        kernels.vectors(
            base.data_ptr(), float_type(base.dtype), cols, out.data_ptr(), n, dtype="F32",
            delta=0 if delta is None else delta.data_ptr(), tensor=tensor, rho=rho, members=members, stream=stream,
        )  # fmt: skip
    return out


def _check_update(target: torch.Tensor, keys: torch.Tensor, coefs: torch.Tensor, slots: torch.Tensor | None) -> None:
    if target.dim() != 2 or coefs.shape != keys.shape or (slots is not None and slots.shape != keys.shape):
        raise UsageError(f"an update of {tuple(target.shape)} with {keys.numel()} keys, {coefs.numel()} coefficients")
    for what, tensor, dtype in (
        ("what is updated", target, torch.float32), ("keys", keys, torch.int64), ("coefs", coefs, torch.float32),
        ("slots", slots, torch.int32),
    ):  # fmt: skip
        _at(target.device, tensor, dtype, what)


def _update_kernels(
    kernels: cuda.Kernels, delta: torch.Tensor, keys: torch.Tensor, coefs: torch.Tensor, keep: float, row0: int,
    tensor: int, kind: int, rank: int, vector: bool,
) -> None:  # fmt: skip
    _check_update(delta, keys, coefs, None)
    with _stream(delta.device) as stream:
        kernels.delta_apply(
            delta.data_ptr(), *delta.shape, tensor=tensor, kind=_kind(kind, rank), rank=rank, pairs=keys.shape[0],
            keys=keys.data_ptr(), coefs=coefs.data_ptr(), keep=keep, row0=row0, vector=vector, stream=stream,
        )  # fmt: skip


def _update_factors_kernels(
    kernels: cuda.Kernels, factors: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, coefs: torch.Tensor,
    keep: float, tensor: int, rank: int,
) -> None:  # fmt: skip
    _check_update(factors, keys, coefs, slots)
    with _stream(factors.device) as stream:
        kernels.factors_apply(
            factors.data_ptr(), *factors.shape, tensor=tensor, rank=rank, pairs=keys.shape[0], keys=keys.data_ptr(),
            slots=slots.data_ptr(), coefs=coefs.data_ptr(), keep=keep, stream=stream,
        )  # fmt: skip


KERNELS: dict[str, Call] = {
    "nf4_linear_perturbed": _nf4_kernels, "linear_perturbed": _linear_kernels,
    "embedding_perturbed": _embedding_kernels, "vectors_perturbed": _vectors_kernels, "es_update_": _update_kernels,
    "es_update_factors_": _update_factors_kernels,
}  # fmt: skip
"""Operators over kernels, which are their first argument; the others are those of the schema, on any one device."""


# ---- CUDA: without kernels
def _bitsandbytes(packed: torch.Tensor, absmax: torch.Tensor, kind: str) -> torch.Tensor | None:
    """float32 [2 * bytes] by bitsandbytes' kernel; None where it is not installed."""
    try:
        from bitsandbytes import functional
    except ImportError:
        return None
    shape = torch.Size([2 * packed.numel()])
    state = functional.QuantState(absmax, shape=shape, blocksize=64, quant_type=kind, dtype=torch.float32)
    return cast(torch.Tensor, functional.dequantize_4bit(packed[:, None], state).reshape(-1))


def _lookup(packed: torch.Tensor, absmax: torch.Tensor, kind: str) -> torch.Tensor:
    """float32 [2 * bytes] by a table of all pairs of codes."""
    table, pair = nf4.TABLES[kind], np.arange(256)
    pairs = torch.from_numpy(np.stack([table[pair >> 4], table[pair & 15]], axis=1)).to(packed.device)
    w = pairs[packed.int()].reshape(-1)
    return w * absmax.repeat_interleave(64)[: w.numel()]


def _plain_product(x: torch.Tensor, rows: int, e: _Noisy, part: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """part: (first row, a multiple of 64; last + 1) -> float32 [n, cols], the weights without noise."""
    cols, kind = x.shape[-1], cuda.KINDS[e.noise]
    columns = x.reshape(-1, cols).float()
    y = columns.new_empty((columns.shape[0], rows))
    members = list(e.perturbed())
    step = max(64, CHUNK // cols // 64 * 64)
    for r0 in range(0, rows, step):
        r1 = min(rows, r0 + step)
        y[:, r0:r1] = columns @ part(r0, r1).T
        for key, strength, _, at in members if kind != "lowrank" else ():
            eps = torch.from_numpy(noise.eps(kind, key, e.tensor, r1 - r0, cols, row0=r0)).to(x.device)
            y[at, r0:r1] += strength * (columns[at] @ eps.T)
    signs = e.signs(cols)
    if signs is not None and e.factors is not None:
        y += (columns @ signs.T) @ e.factors.T
    for key, strength, slot, at in members if kind == "lowrank" else ():
        left, right = e.factored(key, slot, rows, cols, signs)
        y[at] += strength / e.rank**0.5 * ((columns[at] @ right.T) @ left)
    return y.reshape(*x.shape[:-1], rows).to(x.dtype)


def _nf4_plain(
    x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor | None,
    scale: torch.Tensor | None, offset: float, quant_type: str, rows: int, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    cols, device, e = x.shape[-1], x.device, _Noisy(*(*rest[:8], 0.0, *rest[8:]))
    e.check(device, rows, cols, _columns(x, cols))
    _coded(packed, absmax, code, scale, quant_type, rows, cols, device)
    if e.plane is not None and cols % 64:
        raise UsageError(f"a residual plane beside {rows} x {cols} 4-bit weights needs whole blocks of 64 columns")
    absmax, flat = unnested(absmax, code, scale, offset), packed.reshape(-1)
    plane = None if e.plane is None else e.plane.reshape(rows, -1)

    def part(r0: int, r1: int) -> torch.Tensor:
        first, last = r0 * cols, r1 * cols
        codes, top = flat[first // 2 : -(-last // 2)], absmax[first // 64 : -(-last // 64)]
        w = _bitsandbytes(codes, top, quant_type) if x.is_cuda else None
        w = _lookup(codes, top, quant_type) if w is None else w
        return e.moved(w[: last - first].reshape(-1, cols), None if plane is None else plane[r0:r1], top)

    return _plain_product(x, rows, e, part)


def _linear_plain(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    e, (rows, cols) = _Noisy(*rest), weight.shape
    e.check(x.device, rows, cols, _columns(x, cols))
    _float_weight(weight, e, x.device)
    plane = None if e.plane is None else e.plane.reshape(rows, -1)
    return _plain_product(
        x, rows, e, lambda r0, r1: e.moved(weight[r0:r1].float(), None if plane is None else plane[r0:r1], None)
    )


def _embedding_plain(ids: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    e, (rows, cols) = _Noisy(*rest), weight.shape
    e.check(ids.device, rows, cols, ids.shape[0])
    _float_weight(weight, e, ids.device)
    _at(ids.device, ids, torch.int64, "ids")
    index = ids.tolist()
    if any(not 0 <= i < rows for i in index):
        raise UsageError(f"ids name a row that is not there: there are {rows}")
    out = e.moved(weight[ids].float(), None if e.plane is None else e.plane.reshape(rows, -1)[ids], None)
    signs = e.signs(cols)
    if signs is not None and e.factors is not None:
        out += e.factors[ids] @ signs
    kind = cuda.KINDS[e.noise]
    for key, strength, slot, at in e.perturbed():
        if kind == "lowrank":
            left, right = e.factored(key, slot, rows, cols, signs)
            out[at] += strength / e.rank**0.5 * (left[:, ids[at]].T @ right)
        else:
            eps = np.concatenate([noise.eps(kind, key, e.tensor, 1, cols, row0=index[i]) for i in at])
            out[at] += strength * torch.from_numpy(eps).to(out.device)
    return out


def _vectors_plain(
    base: torch.Tensor, delta: torch.Tensor | None, keys: torch.Tensor, amplitudes: torch.Tensor, kind: int, rank: int,
    tensor: int, rho: float,
) -> torch.Tensor:  # fmt: skip
    _check_vectors(base, delta, keys, amplitudes)
    centre = base.float() if delta is None else base.float() + delta
    out = centre.repeat(keys.shape[0], 1)
    for i, (key, amplitude) in enumerate(zip(keys.tolist(), amplitudes.tolist(), strict=True)):
        if strength := float(np.float32(amplitude) * np.float32(rho)):
            eps = noise.eps(
                _kind(kind, rank), key & (1 << 64) - 1, tensor, 1, base.shape[0], rank=rank, vector=True
            )  # fmt: skip
            out[i] += strength * torch.from_numpy(eps[0]).to(base.device)
    return out


def _update_plain(delta: torch.Tensor, keys: torch.Tensor, coefs: torch.Tensor, *rest: Any) -> None:
    host = delta.cpu()
    _update_cpu(host, keys.cpu(), coefs.cpu(), *rest)
    delta.copy_(host)


def _update_factors_plain(
    factors: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, coefs: torch.Tensor, *rest: Any
) -> None:
    host = factors.cpu()
    _update_factors_cpu(host, keys.cpu(), slots.cpu(), coefs.cpu(), *rest)
    factors.copy_(host)


PLAIN: dict[str, Call] = {
    "nf4_linear_perturbed": _nf4_plain, "linear_perturbed": _linear_plain, "embedding_perturbed": _embedding_plain,
    "vectors_perturbed": _vectors_plain, "es_update_": _update_plain, "es_update_factors_": _update_factors_plain,
}  # fmt: skip
"""Operators in torch's own operations, on any device: float32 weights of :data:`CHUNK` at a time, noise made on the
CPU. They wait for the device."""


def on_device(name: str, *arguments: Any) -> Any:
    """An operator by its name, on the device of its first argument, which is no CPU (or an emulation of none)."""
    kernels = arm(arguments[0].device)
    return PLAIN[name](*arguments) if kernels is None else KERNELS[name](kernels, *arguments)


for _name in SCHEMAS:
    _LIBRARY.impl(_name, partial(on_device, _name), "CUDA")
