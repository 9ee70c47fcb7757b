"""Codecs and planes: every arm against the NumPy twin, gguf and tests/reference.py, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import reference

from edgees import blocks, native, noise
from edgees.errors import UsageError

BLOCK = [name for name, t in blocks.TYPES.items() if t.parts]
GGUF = [name for name, t in blocks.TYPES.items() if t.id < 100]
TABLES = [name for name, t in blocks.TYPES.items() if t.values is not None]
FLOAT = [name for name, t in blocks.TYPES.items() if not t.parts]


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def random_raw(name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Any bit pattern is a block; only the half-precision fields are kept finite and of the size of weights."""
    rng = np.random.default_rng(seed)
    t = blocks.TYPES[name]
    if not t.parts:
        x = rng.normal(size=(rows, cols)).astype(np.float32)
        if name == "BF16":
            return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
        return x.astype(np.float16 if name == "F16" else np.float32).view(np.uint8).reshape(-1)
    raw = rng.integers(0, 256, (rows * cols // t.weights, t.bytes), dtype=np.uint8)
    if t.values is not None:
        absmax = np.abs(rng.normal(size=len(raw)) * 0.1).astype(np.float32)
        absmax[::7] = 0
        absmax[1::11] *= -1  # what double quantisation can make of a tiny one
        raw[:, :4] = absmax.view(np.uint8).reshape(-1, 4)
        return raw.reshape(-1)
    fields = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))
    for at in fields:
        value = (rng.normal(size=(len(raw), 1)) * 0.03).astype(np.float16)
        value[::7] = np.float16(3e-7)  # subnormal
        value[::11] = 0
        raw[:, at : at + 2] = value.view(np.uint8)
    return raw.reshape(-1)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", TABLES)
def test_decode_of_tables(name: str, isa: str) -> None:
    raw = random_raw(name, 5, 512)
    got = blocks.decode(name, raw, 5, 512)
    assert same_bits(got, blocks.decode_numpy(name, raw, 5, 512))
    block = raw.reshape(-1, 36)[3]
    absmax, byte = block[:4].view(np.float32)[0], block[4 + 7]
    assert got.reshape(-1, 64)[3, 14] == blocks.TYPES[name].values[byte >> 4] * absmax
    assert got.reshape(-1, 64)[3, 15] == blocks.TYPES[name].values[byte & 15] * absmax


@pytest.mark.parametrize("name", GGUF)
def test_decode_is_ggufs(name: str, isa: str) -> None:
    cols = 512 if name in BLOCK else 77
    raw = random_raw(name, 5, cols)
    wanted = gguf.quants.dequantize(raw.reshape(5, -1), gguf.GGMLQuantizationType[name]).astype(np.float32)
    got = blocks.decode(name, raw, 5, cols)
    assert same_bits(got, blocks.decode_numpy(name, raw, 5, cols))
    assert np.array_equal(got, wanted.reshape(5, cols))
    assert int(gguf.GGMLQuantizationType[name]) == blocks.TYPES[name].id
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (
        blocks.TYPES[name].weights,
        blocks.TYPES[name].bytes,
    )


def test_every_half_converts(isa: str) -> None:
    h = np.arange(65536, dtype=np.uint16)
    finite = np.isfinite(h.view(np.float16))
    got = blocks.decode("F16", h[finite].view(np.uint8), 1, int(finite.sum()))
    assert same_bits(got[0], h[finite].view(np.float16).astype(np.float32))
    scales = np.zeros((65536, 18), np.uint8)
    scales[:, :2] = h.view(np.uint8).reshape(-1, 2)
    scales[:, 2:] = 0x99  # code 1
    w = blocks.decode("Q4_0", scales[finite], int(finite.sum()), 32)
    assert same_bits(np.ascontiguousarray(w[:, 0]), h[finite].view(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", list(blocks.TYPES))
def test_cells(name: str, isa: str) -> None:
    cols = 512 if name in BLOCK else 77
    raw = random_raw(name, 4, cols)
    got = blocks.cells(name, raw, 4, cols, rho=0.3)
    assert same_bits(got, blocks.cells_numpy(name, raw, 4, cols, rho=0.3))
    assert (got >= 0).all()


def heads_order(rows: int) -> np.ndarray:
    return np.random.default_rng(3).permutation(rows).astype(np.int32)


def encode(name: str, raw: np.ndarray, delta: np.ndarray, order: np.ndarray, bits: int, rho: float, seed: int = 5):
    """(plane, span, effective float32 [rows, cols]) (see :mod:`edgees.blocks`)."""
    rows, cols = delta.shape
    span = blocks.plane_span(name, [(raw, delta)], rho)
    cut = raw.reshape(rows, -1)
    assert span == blocks.plane_span(name, [(cut[:2], delta[:2]), (cut[2:], delta[2:])], rho), (
        "piece by piece, the same"
    )
    key = noise.dither_key(seed)
    plane = blocks.plane_encode(name, raw, delta, order, key, 99, bits, span, rho)
    out = blocks.effective(name, raw, rows, cols, plane, bits, span, rho)
    return plane, span, out


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", list(blocks.TYPES))
def test_plane_is_the_references(name: str, bits: int, isa: str) -> None:
    rows, cols = 6, 512 if name in BLOCK else 77
    raw, rho = random_raw(name, rows, cols, 1), 0.2
    rng = np.random.default_rng(2)
    delta = (rng.normal(size=(rows, cols)) * 0.03).astype(np.float32)
    order = heads_order(rows)
    _, span, got = encode(name, raw, delta, order, bits, rho)
    cell = np.repeat(blocks.cells_numpy(name, raw, rows, cols, rho), blocks.cell_group(name), axis=1)[:, :cols]
    u = reference.dither(5, 99, rows, cols)[order]
    assert span == reference.span(delta, cell)
    q, step = reference.plane(delta, cell, u, bits)
    assert same_bits(got, blocks.decode_numpy(name, raw, rows, cols) + step * q.astype(np.float32))
    assert len(np.unique(q)) > 2


@pytest.mark.parametrize("name", [name for name in BLOCK if name not in TABLES])
def test_lattice_moves_codes_by_whole_cells(name: str, isa: str) -> None:
    rows, cols = 6, 512
    raw = random_raw(name, rows, cols, 4)
    rng = np.random.default_rng(6)
    cell = np.repeat(blocks.cells_numpy(name, raw, rows, cols), blocks.cell_group(name), axis=1)
    delta = (rng.normal(size=(rows, cols)) * 2 * cell).astype(np.float32)
    order = heads_order(rows)
    key = noise.dither_key(5)
    out = blocks.lattice_encode(name, raw, delta, order, key, 99)
    t = blocks.TYPES[name]
    assert t.parts is not None
    scale = np.repeat(t.parts(raw.reshape(-1, t.bytes))[0].reshape(rows, -1), t.group, axis=1)
    u = reference.dither(5, 99, rows, cols)[order]
    safe = np.where(cell == 0, np.float32(1), cell)
    steps = np.where(cell == 0, 0, np.floor(delta / safe + u)).astype(np.int64) * np.where(scale < 0, -1, 1)
    wanted = np.clip(blocks.codes(name, raw, rows, cols) + steps, t.low, t.high)
    assert np.array_equal(blocks.codes(name, out, rows, cols), wanted)
    assert same_bits(blocks.decode(name, out, rows, cols), blocks.decode_numpy(name, out, rows, cols))
    assert np.abs(steps).max() > 3


def test_dither_leaves_no_bias() -> None:
    """The mean of the effective moves is the mean of the deltas, far below a step."""
    raw, rho = random_raw("Q4_1", 64, 512, 7), 0.2
    cell = np.repeat(blocks.cells("Q4_1", raw, 64, 512), 32, axis=1)
    delta = np.ascontiguousarray(cell * np.float32(0.013))
    base = blocks.decode("Q4_1", raw, 64, 512)
    _, span, got = encode("Q4_1", raw, delta, np.arange(64, dtype=np.int32), 4, rho)
    assert span == 0
    moved = ((got - base)[cell > 0] / cell[cell > 0]).astype(np.float64)
    step = 1 / 16
    sd = np.sqrt(0.013 * (step - 0.013))  # of one dithered weight
    assert abs(moved.mean() - 0.013) < 4 * sd / np.sqrt(moved.size)


def test_threads_do_not_show() -> None:
    raw = random_raw("Q4_K", 300, 512, 8)
    delta = (np.random.default_rng(9).normal(size=(300, 512)) * 0.05).astype(np.float32)
    before = native.threads()
    results = []
    for n in (1, 2, 5):
        native.threads(n)
        plane, span, out = encode("Q4_K", raw, delta, np.arange(300, dtype=np.int32), 4, 0.1)
        results.append((plane.tobytes(), span, out.tobytes()))
    native.threads(before)
    assert results[0] == results[1] == results[2]


def test_refusals() -> None:
    with pytest.raises(UsageError, match="no codec for GGUF type Q2_K"):
        blocks.row_bytes("Q2_K", 256)
    with pytest.raises(UsageError, match="33 columns are not a multiple of Q4_0's block of 32"):
        blocks.row_bytes("Q4_0", 33)
    with pytest.raises(UsageError, match="are 36 bytes, not 35"):
        blocks.decode("Q4_0", np.zeros(35, np.uint8), 2, 32)
    assert native.lib().edgees_row_bytes(2, 33) == -1
    assert native.lib().edgees_row_bytes(10, 256) == -2


def test_span_is_the_whole_tensors_however_it_is_cut() -> None:
    """20 of 40 x 512 deltas may lie beyond it: 15 in one piece do not lengthen it, 12 in each of two pieces do."""
    raw = random_raw("F32", 40, 512, 1).reshape(40, -1)
    few, many = np.zeros((40, 512), np.float32), np.zeros((40, 512), np.float32)
    few[0, :15] = many[0, :12] = many[39, :12] = 0.3
    for delta, longer in ((few, False), (many, True)):
        whole = blocks.plane_span("F32", [(raw, delta)], rho=0.4)
        for cut in (20, 39):
            pieces = [(raw[:cut], delta[:cut]), (raw[cut:], delta[cut:])]
            assert whole == blocks.plane_span("F32", pieces, rho=0.4)
        assert (whole > 0) == longer


def test_encoders_refuse_what_native_code_would_misread() -> None:
    raw = random_raw("Q4_1", 2, 64, 1)
    delta = np.random.default_rng(2).normal(size=(2, 64)).astype(np.float32) * np.float32(0.03)
    order = np.arange(2, dtype=np.int32)
    with pytest.raises(UsageError, match=r"an order of \(1,\) for 2 rows"):
        blocks.plane_encode("Q4_1", raw, delta, order[:1], 1, 1, 4, 0, 0.1)
    with pytest.raises(UsageError, match="where uint8"):
        blocks.plane_encode("Q4_1", raw, delta, order, 1, 1, 4, 0, 0.1, out=np.empty((2, 16), np.uint8))
    with pytest.raises(UsageError, match="where uint8"):
        blocks.effective("Q4_1", raw, 2, 64, np.empty((1, 32), np.uint8), 4, 0, 0.1)
    with pytest.raises(UsageError, match="no residual plane of 3 bits"):
        blocks.plane_row_bytes(3, 64)
    wide = blocks.plane_encode("Q4_1", raw, delta.astype(np.float64), order.astype(np.int64), 1, 1, 4, 0, 0.1)
    assert np.array_equal(wide, blocks.plane_encode("Q4_1", raw, delta, order, 1, 1, 4, 0, 0.1))
