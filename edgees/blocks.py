"""GGUF weight formats: the native codecs, their NumPy twin, and what is needed to move codes.

A row of a block format is a sequence of blocks; in each group of weights ``w = scale * code + offset`` (codes signed
where the format has no offset). Formats: ggml's ``ggml-common.h`` and ``ggml-quants.c``, the definition of GGUF's
types. Both decoders give the bits that ``gguf.quants.dequantize`` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from edgees import native
from edgees.errors import UsageError

Parts = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]
"""scale float32 [blocks, groups]; codes int [blocks, weights]; offset float32 [blocks, groups] or None."""


@dataclass(frozen=True)
class BlockType:
    """id: ggml's type number, or ours; weights, bytes: of one block; group: weights sharing a scale; low, high: of the
    codes; values: float32 [16], what codes stand for where they are no numbers (times the block's absmax)."""

    name: str
    id: int
    weights: int
    bytes: int
    group: int
    low: int = 0
    high: int = 0
    parts: Callable[[np.ndarray], Parts] | None = None
    values: np.ndarray | None = None


def _half(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _nibbles(b: np.ndarray) -> np.ndarray:
    return np.concatenate([b & 15, b >> 4], axis=1).astype(np.int32)


def _fifths(h: np.ndarray) -> np.ndarray:
    return np.unpackbits(h, axis=1, bitorder="little").astype(np.int32) << 4


def _q4_0(b: np.ndarray) -> Parts:
    return _half(b[:, :2]), _nibbles(b[:, 2:]) - 8, None


def _q4_1(b: np.ndarray) -> Parts:
    return _half(b[:, :2]), _nibbles(b[:, 4:]), _half(b[:, 2:4])


def _q5_0(b: np.ndarray) -> Parts:
    return _half(b[:, :2]), (_nibbles(b[:, 6:]) | _fifths(b[:, 2:6])) - 16, None


def _q5_1(b: np.ndarray) -> Parts:
    return _half(b[:, :2]), _nibbles(b[:, 8:]) | _fifths(b[:, 4:8]), _half(b[:, 2:4])


def _q8_0(b: np.ndarray) -> Parts:
    return _half(b[:, :2]), b[:, 2:].view(np.int8).astype(np.int32), None


def _k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset, float32 [n, 8], of Q4_K and Q5_K: eight 6-bit pairs in twelve bytes."""
    s = b[:, 4:16]
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1).astype(np.float32)
    low = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1).astype(np.float32)
    return _half(b[:, :2]) * scale, -(_half(b[:, 2:4]) * low)


def _pairs(b: np.ndarray) -> np.ndarray:
    """Nibbles of Q4_K and Q5_K: 32 low ones, then 32 high ones, of every 32 bytes."""
    c = b.reshape(len(b), 4, 32)
    return np.stack([c & 15, c >> 4], axis=2).reshape(len(b), 256).astype(np.int32)


def _q4_k(b: np.ndarray) -> Parts:
    scale, offset = _k_scales(b)
    return scale, _pairs(b[:, 16:]), offset


def _q5_k(b: np.ndarray) -> Parts:
    scale, offset = _k_scales(b)
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    return scale, _pairs(b[:, 48:]) | (high.reshape(len(b), 256).astype(np.int32) << 4), offset


def _q6_k(b: np.ndarray) -> Parts:
    ql, qh = b[:, :128].reshape(-1, 2, 1, 64), b[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(len(b), 256)
    high = (qh >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]) & 3
    codes = low.astype(np.int32) | (high.reshape(len(b), 256).astype(np.int32) << 4)
    scale = _half(b[:, 208:]) * b[:, 192:208].view(np.int8).astype(np.float32)
    return scale, codes - 32, None


def _table(b: np.ndarray) -> Parts:
    """bitsandbytes' types: absmax in front of 64 codes, of which the high nibble of a byte comes first."""
    codes = np.stack([b[:, 4:] >> 4, b[:, 4:] & 15], axis=2).reshape(len(b), 64).astype(np.int32)
    return np.repeat(np.ascontiguousarray(b[:, :4]).view("<f4"), 2, axis=1), codes, None


NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
"""Values of bitsandbytes' 4-bit codes (QLoRA, arXiv 2305.14314, appendix E; bitsandbytes.functional.get_4bit_type)."""
TABLE_CELL = np.float32(1 / 8)
"""Cell of the residual plane beside them, in absmax."""

FLOAT_GROUP = 32
TYPES: dict[str, BlockType] = {
    t.name: t
    for t in (
        BlockType("F32", 0, 1, 4, FLOAT_GROUP),
        BlockType("F16", 1, 1, 2, FLOAT_GROUP),
        BlockType("BF16", 30, 1, 2, FLOAT_GROUP),
        BlockType("Q4_0", 2, 32, 18, 32, -8, 7, _q4_0),
        BlockType("Q4_1", 3, 32, 20, 32, 0, 15, _q4_1),
        BlockType("Q5_0", 6, 32, 22, 32, -16, 15, _q5_0),
        BlockType("Q5_1", 7, 32, 24, 32, 0, 31, _q5_1),
        BlockType("Q8_0", 8, 32, 34, 32, -128, 127, _q8_0),
        BlockType("Q4_K", 12, 256, 144, 32, 0, 15, _q4_k),
        BlockType("Q5_K", 13, 256, 176, 32, 0, 31, _q5_k),
        BlockType("Q6_K", 14, 256, 210, 16, -32, 31, _q6_k),
        BlockType("NF4", 100, 64, 36, 32, 0, 15, _table, NF4),
        BlockType("FP4", 101, 64, 36, 32, 0, 15, _table, FP4),
    )
}
"""Types with a codec, by GGUF's name, and bitsandbytes' (blocks.h, Table4)."""


def block_type(name: str) -> BlockType:
    """:raises UsageError: no codec for that type."""
    try:
        return TYPES[name]
    except KeyError:
        raise UsageError(f"no codec for GGUF type {name}", f"there are: {', '.join(TYPES)}") from None


def is_float(name: str) -> bool:
    """F32, F16 or BF16: no codes, no cells of its own."""
    return block_type(name).parts is None


def row_bytes(name: str, cols: int) -> int:
    """Bytes of a row of ``cols`` weights. :raises UsageError: no codec, or not a whole number of blocks."""
    t = block_type(name)
    if cols <= 0 or cols % t.weights:
        raise UsageError(f"{cols} columns are not a multiple of {name}'s block of {t.weights}")
    return cols // t.weights * t.bytes


def cell_group(name: str) -> int:
    """Weights that share a cell width."""
    return block_type(name).group


def decode(name: str, raw: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols] of ``raw``, uint8, rows one after the other."""
    raw = _raw(name, raw, rows, cols)
    out = np.empty((rows, cols), np.float32)
    code = native.lib().edgees_decode(block_type(name).id, native.pointer(raw), rows, cols, native.pointer(out))
    native.check(code, f"decoding {name}")
    return out


def decode_numpy(name: str, raw: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The twin of :func:`decode`."""
    raw = _raw(name, raw, rows, cols)
    t = block_type(name)
    if t.parts is None:
        if name == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(rows, cols)
        return raw.view("<f4" if name == "F32" else "<f2").astype(np.float32).reshape(rows, cols)
    scale, codes, offset = t.parts(raw.reshape(-1, t.bytes))
    numbers = codes.astype(np.float32) if t.values is None else t.values[codes]
    w = scale[:, :, None] * numbers.reshape(len(codes), -1, t.group)
    if offset is not None:
        w = w + offset[:, :, None]
    return np.asarray(w.reshape(rows, cols))


def cells(name: str, raw: np.ndarray, rows: int, cols: int, rho: float = 0.0) -> np.ndarray:
    """float32 [rows, ceil(cols/group)]: width of a code step, that is, |scale|; for float types ``rho/4``."""
    raw = _raw(name, raw, rows, cols)
    out = np.empty((rows, -(-cols // cell_group(name))), np.float32)
    code = native.lib().edgees_cells(
        block_type(name).id, native.pointer(raw), rows, cols, _cell(rho), native.pointer(out)
    )
    native.check(code, f"cells of {name}")
    return out


def cells_numpy(name: str, raw: np.ndarray, rows: int, cols: int, rho: float = 0.0) -> np.ndarray:
    """The twin of :func:`cells`."""
    t = block_type(name)
    raw = _raw(name, raw, rows, cols)
    if t.parts is None:
        return np.full((rows, -(-cols // t.group)), rho / 4, np.float32)
    cell = np.abs(t.parts(raw.reshape(-1, t.bytes))[0]).reshape(rows, cols // t.group)
    return np.asarray(cell if t.values is None else cell * TABLE_CELL)


def codes(name: str, raw: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """int32 [rows, cols]: the codes of a block type, ``low``..``high``. :raises UsageError: a float type."""
    t = block_type(name)
    if t.parts is None:
        raise UsageError(f"{name} has no codes")
    return t.parts(_raw(name, raw, rows, cols).reshape(-1, t.bytes))[1].reshape(rows, cols)


# ---- what was learned, beside the base's blocks: residual planes (refined view) and moved codes (lattice view)
def plane_row_bytes(bits: int, cols: int) -> int:
    """Bytes of a residual plane's row: ``bits`` (2, 4 or 8) a weight. :raises UsageError: other bits."""
    width = int(native.lib().edgees_plane_row_bytes(bits, cols))
    if width < 0:
        raise UsageError(f"no residual plane of {bits} bits and {cols} columns")
    return width


def plane_span(name: str, pieces: Iterable[tuple[np.ndarray, np.ndarray]], rho: float) -> int:
    """A tensor's span exponent, 0 to 8: the smallest that at most 0.1 % of its deltas go beyond.

    pieces: (raw blocks, delta float32 [n, cols]) of the whole tensor, row by row.
    """
    counts, size = np.zeros(9, np.int64), 0
    for raw, delta in pieces:
        rows, cols = delta.shape
        raw, delta, size = _raw(name, raw, rows, cols), _float32(delta), size + delta.size
        code = native.lib().edgees_plane_count(
            block_type(name).id, native.pointer(raw), rows, cols, native.pointer(delta), _cell(rho),
            native.pointer(counts),
        )  # fmt: skip
        native.check(code, f"residual plane beside {name}")
    within = np.flatnonzero(counts <= size // 1000)
    return int(within[0]) if len(within) else 8


def plane_encode(
    name: str, raw: np.ndarray, delta: np.ndarray, order: np.ndarray, dither: int, id: int, bits: int, span: int,
    rho: float, out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """uint8 [n, plane_row_bytes]: ``delta`` (float32 [n, cols]) rounded, with dither, to steps of the base's cells.

    order: int32 [n], canonical row of each row; dither, id: key and tensor number of the dither's bits.
    """
    rows, cols = delta.shape
    raw, delta, order = _raw(name, raw, rows, cols), _float32(delta), _rows(order, rows)
    out = _bytes(out, (rows, plane_row_bytes(bits, cols)))
    code = native.lib().edgees_plane_encode(
        block_type(name).id, native.pointer(raw), rows, cols, native.pointer(delta), native.pointer(order), dither, id,
        bits, span, _cell(rho), native.pointer(out),
    )  # fmt: skip
    native.check(code, f"residual plane beside {name}")
    return out


EMPTY_STEPS = {2: 0xAA, 4: 0x88, 8: 0x80}
"""A plane's bytes, by its bits, where nothing has been learned: all steps are zero."""


def plane_fill(
    name: str, pieces: Callable[[], Iterable[tuple[int, np.ndarray, np.ndarray, np.ndarray]]], dither: int, id: int,
    bits: int, rho: float, out: np.ndarray,
) -> int:  # fmt: skip
    """Encode a whole tensor's plane into ``out`` (uint8 [rows, plane_row_bytes]); returns its span.

    pieces: called twice; (first row, raw blocks, delta float32 [n, cols], order int32 [n]) from the first row on.
    """
    span = plane_span(name, ((raw, delta) for _, raw, delta, _ in pieces()), rho)
    for row, raw, delta, order in pieces():
        plane_encode(name, raw, delta, order, dither, id, bits, span, rho, out=out[row : row + len(delta)])
    return span


def effective(
    name: str, raw: np.ndarray, rows: int, cols: int, plane: np.ndarray, bits: int, span: int, rho: float
) -> np.ndarray:
    """float32 [rows, cols]: base and residual plane together, as the engine multiplies with them."""
    raw = _raw(name, raw, rows, cols)
    plane, out = _bytes(plane, (rows, plane_row_bytes(bits, cols))), np.empty((rows, cols), np.float32)
    code = native.lib().edgees_effective(
        block_type(name).id, native.pointer(raw), rows, cols, bits, native.pointer(plane), span, _cell(rho),
        native.pointer(out),
    )  # fmt: skip
    native.check(code, f"weights of {name} with a residual plane")
    return out


def lattice_encode(
    name: str, raw: np.ndarray, delta: np.ndarray, order: np.ndarray, dither: int, id: int,
    out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """uint8 [n, row_bytes]: the blocks, their codes moved by ``delta``, rounded with dither. Not for float types."""
    rows, cols = delta.shape
    raw, delta, order = _raw(name, raw, rows, cols), _float32(delta), _rows(order, rows)
    out = _bytes(out, (rows, row_bytes(name, cols)))
    code = native.lib().edgees_lattice_encode(
        block_type(name).id, native.pointer(raw), rows, cols, native.pointer(delta), native.pointer(order), dither, id,
        native.pointer(out),
    )  # fmt: skip
    native.check(code, f"moving codes of {name}")
    return out


def _float32(delta: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(delta, np.float32)


def _rows(order: np.ndarray, rows: int) -> np.ndarray:
    if order.shape != (rows,):
        raise UsageError(f"an order of {order.shape} for {rows} rows")
    return np.ascontiguousarray(order, np.int32)


def _bytes(array: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """``array``, which native code reads or fills as ``shape``, or a new one."""
    if array is None:
        return np.empty(shape, np.uint8)
    if array.dtype != np.uint8 or array.shape != shape:
        raise UsageError(f"{array.dtype} {array.shape} where uint8 {shape} is meant")
    return array


def _cell(rho: float) -> float:
    return float(np.float32(rho / 4))


def _raw(name: str, raw: np.ndarray, rows: int, cols: int) -> np.ndarray:
    raw = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    wanted = rows * row_bytes(name, cols)
    if raw.size != wanted:
        raise UsageError(f"{rows} x {cols} of {name} are {wanted} bytes, not {raw.size}")
    return raw
