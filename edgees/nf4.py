"""4-bit weights as bitsandbytes stores them: NF4 and FP4 in blocks of 64, absmax plain or quantised itself ("nested").

A weight [rows, cols] is flattened row by row; every 64 consecutive elements share an ``absmax``, and a weight is
``table[code] * absmax``, a float32 product. Element 2i is the high nibble of byte i, 2i + 1 the low one. Nested:
``absmax = table256[code] * absmax2 + offset``, float32 product, then sum, where 256 blocks share an ``absmax2``.
Format: bitsandbytes' functional.py (``QuantState``, ``quantize_4bit``, ``create_dynamic_map``). Codes, absmax and
weights are those of bitsandbytes on the CPU, bit for bit (the sign of a zero in FP4 excepted); for nested absmax see
:func:`quantise`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgees.blocks import FP4, NF4
from edgees.errors import ModelError, UsageError

BLOCK = 64
"""Weights that share an absmax."""
NESTED_BLOCK = 256
"""Absmax values that share an absmax of their own."""
BYTES = 36
"""Of an interleaved block: its absmax as float32, then the 32 bytes of its codes."""
DTYPES = ("float32", "bfloat16", "float16")

TABLES = {"nf4": NF4, "fp4": FP4}

_CHUNK = 1 << 17  # weights at a time: what is made on the way stays in the cache
_TINY = np.float32(1e-38)

Read = Callable[[int, int], np.ndarray]
"""(begin, end) -> float32 [end - begin]: a weight's elements, flattened row by row."""


def dynamic_map() -> np.ndarray:
    """float32 [256], ascending: bitsandbytes' 8-bit table for nested absmax (arXiv 1511.04561).

    Seven decades, the i-th cut evenly into 2^i parts; their means, both signs, and 0 and 1.
    """
    values = [0.0, 1.0]
    low, high = np.float32(0.1), np.float32(1)
    for i in range(7):
        n = 1 << i
        step, k = float((high - low) / np.float32(n)), np.arange(n + 1)
        # torch.linspace counts from both ends and rounds once; these products and sums are exact in float64
        edges = np.where(k < (n + 1) // 2, float(low) + step * k, float(high) - step * (n - k)).astype(np.float32)
        means = np.float32(10.0 ** (i - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [*means.tolist(), *(-means).tolist()]
    return np.sort(np.array(values, np.float32))


@dataclass(frozen=True)
class Nested:
    """Quantised absmax. codes: uint8 [blocks]; absmax: float32 [ceil(blocks/256)]; table: float32 [256]."""

    codes: np.ndarray
    absmax: np.ndarray
    table: np.ndarray
    offset: np.float32


@dataclass(frozen=True)
class Quantised:
    """A weight in 4 bits.

    kind: ``nf4`` or ``fp4``; packed: uint8 [ceil(n/2)], n = rows * cols; absmax: float32 [ceil(n/64)], or nested: the
    parts that it is computed from; dtype: of the weight that was quantised, in torch's words. The arrays may be
    read-only views of a file.
    """

    kind: str
    rows: int
    cols: int
    packed: np.ndarray
    absmax: np.ndarray | None
    nested: Nested | None
    dtype: str = "float32"

    def absmax_float32(self, block0: int = 0, blocks: int | None = None) -> np.ndarray:
        """float32 [blocks] from ``block0`` on. A nested one may be a little below 0 where the weights are all ~0."""
        end = -(-self.rows * self.cols // BLOCK) if blocks is None else block0 + blocks
        if self.absmax is not None:
            return self.absmax[block0:end]
        assert self.nested is not None
        scale = np.repeat(self.nested.absmax[block0 // NESTED_BLOCK : -(-end // NESTED_BLOCK)], NESTED_BLOCK)
        first = block0 % NESTED_BLOCK
        out: np.ndarray = self.nested.table[self.nested.codes[block0:end]]
        out *= scale[first : first + end - block0]
        out += self.nested.offset
        return out

    def dequantise(self, row0: int = 0, rows: int | None = None) -> np.ndarray:
        """float32 [rows, cols] from ``row0`` on."""
        rows = self._rows(row0, rows)
        begin, end = row0 * self.cols, (row0 + rows) * self.cols
        table, pair = TABLES[self.kind], np.arange(256)
        pairs = np.stack([table[pair >> 4], table[pair & 15]], axis=1).view(np.uint64)[:, 0]
        out = np.empty(end - begin, np.float32)
        for start in range(begin // BLOCK * BLOCK, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            blocks = -(-stop // BLOCK) - start // BLOCK
            w = pairs.take(self.packed[start // 2 : (stop + 1) // 2]).view(np.float32)[: stop - start]
            absmax = self.absmax_float32(start // BLOCK, blocks)
            whole = (stop - start) // BLOCK
            w[: whole * BLOCK].reshape(whole, BLOCK)[:] *= absmax[:whole, None]
            w[whole * BLOCK :] *= absmax[-1]
            at = max(start, begin)
            out[at - begin : stop - begin] = w[at - start :]
        return out.reshape(rows, self.cols)

    def interleaved(self, row0: int = 0, rows: int | None = None) -> np.ndarray:
        """uint8 [rows, cols/64*36]: each block's absmax and codes beside each other, as our kernels read them.

        :raises UsageError: rows that are no whole number of blocks.
        """
        rows = self._rows(row0, rows)
        if self.cols % BLOCK:
            raise UsageError(f"{self.cols} columns are not a multiple of {self.kind}'s block of {BLOCK}")
        width = self.cols // BLOCK
        first, count = row0 * width, rows * width
        out = np.empty((count, BYTES), np.uint8)
        out[:, :4] = self.absmax_float32(first, count).view(np.uint8).reshape(count, 4)
        out[:, 4:] = self.packed[first * BLOCK // 2 :][: count * BLOCK // 2].reshape(count, BLOCK // 2)
        return out.reshape(rows, width * BYTES)

    def _rows(self, row0: int, rows: int | None) -> int:
        rows = self.rows - row0 if rows is None else rows
        if row0 < 0 or rows < 0 or row0 + rows > self.rows:
            raise IndexError(f"rows {row0} to {row0 + rows} of {self.rows}")
        return rows


# ---- quantising
def quantise(
    x: np.ndarray, kind: str = "nf4", nested: bool = True, dtype: str = "float32", name: str = "the weight"
) -> Quantised:
    """``x``, float32 [rows, cols], in 4 bits, as ``bitsandbytes.functional.quantize_4bit`` does it on the CPU.

    The offset of a nested absmax is the mean, rounded once; bitsandbytes sums in float32, in an order that depends on
    the machine, so theirs may differ in its last bits. For the nested codes see :func:`nest`.

    :raises ModelError: a weight that is NaN or infinite, naming ``name``.
    """
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    rows, cols = x.shape
    return quantise_pieces(lambda begin, end: flat[begin:end], rows, cols, kind, nested, dtype, name)


def quantise_pieces(
    read: Read, rows: int, cols: int, kind: str = "nf4", nested: bool = True, dtype: str = "float32",
    name: str = "the weight",
) -> Quantised:  # fmt: skip
    """As :func:`quantise`, the weight read in pieces: it is never whole in memory."""
    if kind not in TABLES:
        raise UsageError(f"no 4-bit type {kind!r}", f"there are: {', '.join(TABLES)}")
    n = rows * cols
    table = TABLES[kind]
    order = np.argsort(table, kind="stable").astype(np.uint8)
    bounds = (table[order[:-1]] + table[order[1:]]) / np.float32(2)
    packed, absmax = np.empty(-(-n // 2), np.uint8), np.empty(-(-n // BLOCK), np.float32)
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        x = read(start, stop)
        whole = (stop - start) // BLOCK
        body, rest = x[: whole * BLOCK].reshape(whole, BLOCK), x[whole * BLOCK :]
        size = np.maximum(body.max(axis=1), -body.min(axis=1)) + np.float32(0)  # no -0
        if rest.size:  # bitsandbytes divides by this one, and keeps the bound
            size = np.append(size, np.maximum(np.abs(rest).max(), _TINY))
        if not np.isfinite(size).all():
            at = start + int(np.argmin(np.isfinite(x)))
            raise ModelError(f"{name}: the weight in row {at // cols}, column {at % cols} is {x[at - start]}")
        scaled = np.empty(stop - start + (stop - start) % 2, np.float32)
        scaled[-1] = 0  # the nibble beside the last of an odd number
        inverse = np.float32(1) / np.maximum(size[:whole, None], _TINY)
        np.multiply(body, inverse, out=scaled[: whole * BLOCK].reshape(whole, BLOCK))
        if rest.size:
            scaled[whole * BLOCK : stop - start] = rest / size[-1]
        codes = np.zeros(scaled.size, np.uint8)
        for bound in bounds:
            codes += scaled > bound
        if kind != "nf4":
            codes = order[codes]
        packed[start // 2 : start // 2 + scaled.size // 2] = codes[::2] << 4 | codes[1::2]
        absmax[start // BLOCK : start // BLOCK + size.size] = size
    if not nested:
        return Quantised(kind, rows, cols, packed, absmax, None, dtype)
    return Quantised(kind, rows, cols, packed, None, nest(absmax, np.float32(absmax.mean(dtype=np.float64))), dtype)


def nest(absmax: np.ndarray, offset: np.float32) -> Nested:
    """``absmax`` (float32 [blocks]) less ``offset`` in 8 bits: of the table's values the nearest, of two the lower.

    That is bitsandbytes' ``quantize_blockwise`` on GPUs and in plain torch. Its CPU kernel rounds to a grid of 1/65535
    of the largest first, so there a code may be a neighbour's.
    """
    table = dynamic_map()
    rest = absmax - offset
    whole = len(rest) // NESTED_BLOCK * NESTED_BLOCK
    body = rest[:whole].reshape(-1, NESTED_BLOCK)
    scale = np.abs(body).max(axis=1)
    scaled = (body * (np.float32(1) / np.maximum(scale, _TINY))[:, None]).reshape(-1)
    if whole < len(rest):  # as in the blocks of weights
        last = np.maximum(np.abs(rest[whole:]).max(), _TINY)
        scale, scaled = np.append(scale, last), np.concatenate([scaled, rest[whole:] / last])
    codes = np.searchsorted((table[:-1] + table[1:]) / np.float32(2), scaled)
    return Nested(codes.astype(np.uint8), scale, table, offset)


# ---- checkpoints
_STATE = ".quant_state.bitsandbytes__"


def is_quantised(names: Mapping[str, Any], name: str) -> bool:
    """Whether ``name`` has a 4-bit quantisation state beside it."""
    return any(f"{name}{_STATE}{kind}" in names for kind in TABLES)


def state_names(name: str, kind: str, nested: bool = True) -> list[str]:
    """Names of the tensors that a checkpoint keeps beside the packed ``name``."""
    parts = ["absmax", "quant_map", *(["nested_absmax", "nested_quant_map"] if nested else [])]
    return [f"{name}.{part}" for part in parts] + [f"{name}{_STATE}{kind}"]


def to_state(q: Quantised, name: str) -> dict[str, np.ndarray]:
    """What bitsandbytes' ``Params4bit`` saves of a weight called ``name`` (``...weight``): packed codes and state."""
    about: dict[str, Any] = {"quant_type": q.kind, "blocksize": BLOCK, "dtype": q.dtype, "shape": [q.rows, q.cols]}
    out = {name: q.packed.reshape(-1, 1), f"{name}.quant_map": TABLES[q.kind]}
    if q.nested is None:
        out[f"{name}.absmax"] = q.absmax_float32()
    else:
        out[f"{name}.absmax"] = q.nested.codes
        out[f"{name}.nested_absmax"] = q.nested.absmax
        out[f"{name}.nested_quant_map"] = q.nested.table
        about |= {
            "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(q.nested.offset),
        }  # fmt: skip
    out[f"{name}{_STATE}{q.kind}"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return out


def from_state(tensors: Mapping[str, np.ndarray], name: str) -> Quantised:
    """The weight ``name`` of a checkpoint, its arrays taken as they are. Inverse of :func:`to_state`.

    :raises ModelError: packed codes without their state, a part that is missing or has another size, another block
        size, or another table than bitsandbytes' own; the layer is named.
    """
    packed = np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8)
    kinds = [kind for kind in TABLES if f"{name}{_STATE}{kind}" in tensors]
    if len(kinds) != 1:
        raise ModelError(
            f"{name} holds packed 4-bit codes, but {len(kinds)} quantisation states are beside it, not one"
            if kinds else f"{name} holds packed 4-bit codes, but its quantisation state ({name}{_STATE}nf4) is missing",
            "the checkpoint is incomplete: save it again with all its tensors, or use the 16-bit model",
        )  # fmt: skip
    kind = kinds[0]
    about = _about(tensors[f"{name}{_STATE}{kind}"], name, kind)
    rows, cols = about["shape"]
    n = rows * cols
    blocks = -(-n // BLOCK)
    _part(packed, -(-n // 2), np.uint8, name)
    table = _part(_take(tensors, f"{name}.quant_map"), 16, np.float32, f"{name}.quant_map")
    if not np.allclose(table, TABLES[kind], rtol=0, atol=1e-6):
        raise ModelError(f"{name}.quant_map is not bitsandbytes' {kind} table", "use the 16-bit model")
    absmax = _take(tensors, f"{name}.absmax")
    if f"{name}.nested_absmax" not in tensors:
        absmax = _part(absmax, blocks, np.float32, f"{name}.absmax")
        return Quantised(kind, rows, cols, packed, absmax, None, about["dtype"])
    offset = about.get("nested_offset")
    if not isinstance(offset, (int, float)) or not abs(offset) < 1e38:
        raise ModelError(f"{name}: its quantisation state has nested_offset {offset!r}")
    if about.get("nested_blocksize") != NESTED_BLOCK:
        raise ModelError(
            f"{name}: nested absmax in blocks of {about.get('nested_blocksize')}; edgees reads {NESTED_BLOCK}"
        )
    codes = _part(absmax, blocks, np.uint8, f"{name}.absmax")
    inner = f"{name}.nested_absmax"
    scale = _part(_take(tensors, inner), -(-blocks // NESTED_BLOCK), np.float32, inner)
    inner = f"{name}.nested_quant_map"
    nested = Nested(codes, scale, _part(_take(tensors, inner), 256, np.float32, inner), np.float32(offset))
    return Quantised(kind, rows, cols, packed, None, nested, about["dtype"])


def _about(raw: np.ndarray, name: str, kind: str) -> dict[str, Any]:
    """The part of a quantisation state that is JSON, checked."""
    try:
        about = json.loads(np.ascontiguousarray(raw).tobytes())
    except ValueError as error:
        raise ModelError(f"{name}{_STATE}{kind} is no JSON: {error}") from None
    if not isinstance(about, dict):
        raise ModelError(f"{name}{_STATE}{kind} is no JSON object")
    shape = about.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(v) is int and v > 0 for v in shape):
        raise ModelError(f"{name}: its quantisation state has shape {shape!r}, not two numbers")
    if about.get("quant_type") != kind:
        raise ModelError(f"{name}: its quantisation state is {about.get('quant_type')!r}, its name says {kind}")
    if about.get("blocksize") != BLOCK:
        raise ModelError(
            f"{name} is quantised in blocks of {about.get('blocksize')}; edgees reads blocks of {BLOCK}",
            f"quantise the 16-bit model again with a block size of {BLOCK}, or give the 16-bit model itself",
        )
    if about.get("dtype") not in DTYPES:
        raise ModelError(
            f"{name}: its quantisation state has dtype {about.get('dtype')!r} (there are: {', '.join(DTYPES)})"
        )
    return about


def _take(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in tensors:
        raise ModelError(
            f"{name} is missing: the 4-bit weight cannot be read without it", "the checkpoint is incomplete"
        )
    return tensors[name]


def _part(array: np.ndarray, count: int, dtype: type, name: str) -> np.ndarray:
    """``array`` flat, of that size and dtype, all finite."""
    if array.dtype != dtype or array.size != count:
        raise ModelError(f"{name} is {array.size} x {array.dtype}, where {count} x {np.dtype(dtype)} belong")
    if array.dtype == np.float32 and not np.isfinite(array).all():
        raise ModelError(f"{name} has a value that is NaN or infinite")
    return array.reshape(-1)
