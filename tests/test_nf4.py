"""4-bit weights are bitsandbytes' own: codes, absmax, weights and checkpoints, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from edgees import nf4
from edgees.errors import ModelError, UsageError

torch = pytest.importorskip("torch")
functional = pytest.importorskip("bitsandbytes.functional")

KINDS = ("nf4", "fp4")
SHAPES = [(1, 64), (1, 1), (3, 21), (63, 65), (64, 172), (65, 63), (7, 4096), (300, 1000), (1, 131072 + 64 + 1)]


def inputs(rows: int, cols: int, kind: str) -> dict[str, np.ndarray]:
    """Weights that are ordinary, and weights that sit on every edge of the rounding."""
    rng = np.random.default_rng(rows * 1000 + cols)
    plain = rng.standard_normal((rows, cols)).astype(np.float32) * 0.03
    table = np.sort(nf4.TABLES[kind])
    edges = np.concatenate([table, (table[1:] + table[:-1]) / np.float32(2)])
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(2)), np.nextafter(edges, np.float32(-2))]).clip(-1, 1)
    ties = rng.choice(edges, (rows, cols)).astype(np.float32)
    ties.reshape(-1)[::64] = 1
    holes = plain.copy()
    holes.reshape(-1)[64:200] = 0
    holes.reshape(-1)[300:340] = -0.0
    wild = (plain * 10.0 ** rng.integers(-42, 37, (rows, cols))).astype(np.float32)
    zero = np.zeros((rows, cols), np.float32)
    found = {"plain": plain, "ties": ties, "scaled ties": ties * np.float32(0.037), "holes": holes, "wild": wild}
    found |= {"zero": zero, "-0": -zero, "tiny": np.full_like(zero, 1e-41), "bf16": bfloat16(plain)}
    return found


def bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


def theirs(x: np.ndarray, kind: str, nested: bool, dtype: str = "float32") -> tuple[Any, Any]:
    tensor = torch.from_numpy(x).to(getattr(torch, dtype))
    return functional.quantize_4bit(tensor, blocksize=64, quant_type=kind, compress_statistics=nested)


def saved(x: np.ndarray, kind: str, nested: bool, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The tensors that bitsandbytes saves of a weight ``a.weight``."""
    packed, state = theirs(x, kind, nested, dtype)
    tensors = {"a.weight": packed.numpy()}
    return tensors | {f"a.weight.{key}": value.numpy() for key, value in state.as_dict(packed=True).items()}


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_are_theirs(kind: str) -> None:
    assert np.array_equal(bits(nf4.TABLES[kind]), bits(functional.get_4bit_type(kind, device="cpu").numpy()))
    assert np.array_equal(bits(nf4.dynamic_map()), bits(functional.create_dynamic_map().numpy()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_codes_and_absmax_are_theirs(kind: str, rows: int, cols: int) -> None:  # case 3: partial blocks too
    for what, x in inputs(rows, cols, kind).items():
        packed, state = theirs(x, kind, nested=False)
        mine = nf4.quantise(x, kind, nested=False)
        assert np.array_equal(mine.packed, packed.numpy().reshape(-1)), what
        assert mine.nested is None and np.array_equal(bits(mine.absmax_float32()), bits(state.absmax.numpy())), what
        w = functional.dequantize_4bit(packed, state).numpy()
        assert np.array_equal(mine.dequantise(), w), what
        # within the block: half the widest gap of the table, times the largest weight
        flat = np.concatenate([np.abs(x).reshape(-1), np.zeros(-x.size % 64, np.float32)])
        bound = np.repeat(flat.reshape(-1, 64).max(axis=1), 64)[: x.size].reshape(x.shape).astype(np.float64)
        gap = np.diff(np.sort(nf4.TABLES[kind])).max()
        assert (np.abs(mine.dequantise() - x) <= bound * (gap / 2 * (1 + 1e-6)) + 1e-38).all(), what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_nested_absmax_is_theirs(kind: str, rows: int, cols: int) -> None:  # case 4
    for what, x in inputs(rows, cols, kind).items():
        packed, state = theirs(x, kind, nested=True)
        mine = nf4.quantise(x, kind)
        assert mine.nested is not None and mine.absmax is None
        assert np.array_equal(mine.packed, packed.numpy().reshape(-1)), what
        # the mean: their float32 sum against ours in float64
        offset = np.float32(state.offset.item())
        assert abs(mine.nested.offset - offset) <= 4 * np.spacing(offset), what
        # with the same mean: the nearest of the table; their CPU kernel comes as near but for its grid
        absmax = nf4.quantise(x, kind, nested=False).absmax_float32()
        nested = nf4.nest(absmax, offset)
        scale = np.maximum(state.state2.absmax.numpy(), np.float32(1e-38))
        assert np.array_equal(scale, np.maximum(nested.absmax, np.float32(1e-38))), what
        each, table = np.repeat(scale, 256)[: len(absmax)], nested.table.astype(np.float64)
        wanted = (absmax - offset).astype(np.float64) / each
        ours, other = (np.abs(table[codes] - wanted) for codes in (nested.codes, state.absmax.numpy()))
        assert (ours <= np.abs(table[:, None] - wanted).min(axis=0) + 2e-7).all(), what
        assert (other <= ours + 2 / 65535)[each > 1e-37].all(), what
        # and back: NumPy against their dequantisation
        read = nf4.from_state(saved(x, kind, nested=True), "a.weight")
        assert np.array_equal(read.dequantise(), functional.dequantize_4bit(packed, state).numpy()), what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(63, 65), (64, 172), (96, 128)])
def test_a_saved_layer_comes_back_the_same(kind: str, nested: bool, rows: int, cols: int) -> None:  # case 1
    x = inputs(rows, cols, kind)["bf16"]
    mine = nf4.quantise(x, kind, nested, "bfloat16")
    state = nf4.to_state(mine, "a.weight")
    assert sorted(state) == sorted(["a.weight", *nf4.state_names("a.weight", kind, nested)])
    assert nf4.is_quantised(state, "a.weight") and not nf4.is_quantised(state, "b.weight")
    back = nf4.from_state(state, "a.weight")
    assert (back.kind, back.rows, back.cols, back.dtype) == (kind, rows, cols, "bfloat16")
    assert np.array_equal(bits(back.dequantise()), bits(mine.dequantise()))
    # through bitsandbytes, as its layers load it
    from bitsandbytes.nn import Params4bit

    tensors = {k: torch.from_numpy(v.copy()) for k, v in state.items()}
    packed = tensors.pop("a.weight")
    param = Params4bit.from_prequantized(packed, {k.removeprefix("a."): v for k, v in tensors.items()}, device="cpu")
    assert param.quant_state.dtype == torch.bfloat16 and tuple(param.quant_state.shape) == (rows, cols)
    param.quant_state.dtype = torch.float32
    assert np.array_equal(functional.dequantize_4bit(param.data, param.quant_state).numpy(), mine.dequantise())
    column = torch.from_numpy(np.random.default_rng(0).standard_normal((cols, 3)).astype(np.float32))
    wanted = functional.dequantize_4bit(param.data, param.quant_state) @ column
    assert torch.equal(torch.from_numpy(back.dequantise()) @ column, wanted)
    # what bitsandbytes writes has the same names, and the same bytes but for the offset's last bits
    other = saved(x, kind, nested, "bfloat16")
    assert sorted(other) == sorted(state)
    for key in other:
        if "quant_state" not in key and not (nested and key == "a.weight.absmax"):
            assert other[key].dtype == state[key].dtype, key
            assert np.allclose(other[key].reshape(-1), state[key].reshape(-1), rtol=1e-5, atol=0), key
    about = [json.loads(t[f"a.weight.quant_state.bitsandbytes__{kind}"].tobytes()) for t in (other, state)]
    offsets = [a.pop("nested_offset", 0.0) for a in about]
    assert about[0] == about[1] and offsets[0] == pytest.approx(offsets[1], rel=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_are_pieces_of_the_whole(nested: bool) -> None:
    for cols in (65, 128):
        q = nf4.quantise(inputs(600, cols, "nf4")["plain"], "nf4", nested)
        whole = q.dequantise()
        assert np.array_equal(
            whole, nf4.TABLES["nf4"][codes(q)] * np.repeat(q.absmax_float32(), 64)[: whole.size].reshape(whole.shape)
        )
        for row0, rows in ((0, 600), (1, 3), (599, 1), (300, 0), (17, 400)):
            assert np.array_equal(q.dequantise(row0, rows), whole[row0 : row0 + rows])
        for block0, n in ((0, 1), (255, 2), (300, 256)):
            assert np.array_equal(q.absmax_float32(block0, n), q.absmax_float32()[block0 : block0 + n])
        with pytest.raises(IndexError, match="rows 599 to 601 of 600"):
            q.dequantise(599, 2)


def codes(q: nf4.Quantised) -> np.ndarray:
    """int [rows, cols] by the definition of the nibble order."""
    both = np.stack([q.packed >> 4, q.packed & 15], axis=1).reshape(-1)
    return both[: q.rows * q.cols].reshape(q.rows, q.cols)


def test_interleaved_blocks_hold_absmax_and_codes() -> None:
    q = nf4.quantise(inputs(9, 192, "fp4")["plain"], "fp4")
    raw = q.interleaved()
    assert raw.shape == (9, 3 * 36)
    blocks = raw.reshape(-1, 36)
    assert np.array_equal(blocks[:, :4].copy().view(np.float32)[:, 0], q.absmax_float32())
    assert np.array_equal(blocks[:, 4:].reshape(-1), q.packed)
    assert np.array_equal(q.interleaved(2, 5), raw[2:7])
    with pytest.raises(UsageError, match="65 columns are not a multiple of nf4's block of 64"):
        nf4.quantise(np.ones((2, 65), np.float32)).interleaved()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (62, 64), (40, 3)])
def test_one_bad_weight_is_named(bad: float, at: tuple[int, int]) -> None:  # case 8
    x = inputs(63, 65, "nf4")["plain"].copy()
    x[at] = bad
    with pytest.raises(ModelError, match=rf"^model\.x\.weight: the weight in row {at[0]}, column {at[1]} is {bad}$"):
        nf4.quantise(x, name="model.x.weight")


def test_packed_codes_without_their_state_are_no_weight() -> None:  # case 2
    state = nf4.to_state(nf4.quantise(inputs(8, 128, "nf4")["plain"]), "model.layers.3.mlp.up_proj.weight")
    alone = {"model.layers.3.mlp.up_proj.weight": state["model.layers.3.mlp.up_proj.weight"]}
    with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj\.weight holds packed 4-bit codes, but its"):
        nf4.from_state(alone, "model.layers.3.mlp.up_proj.weight")


def changed(state: dict[str, np.ndarray], **about: Any) -> dict[str, np.ndarray]:
    key = "a.weight.quant_state.bitsandbytes__nf4"
    document = json.loads(state[key].tobytes()) | about
    return state | {key: np.frombuffer(json.dumps(document).encode(), np.uint8)}


def test_a_damaged_state_is_named() -> None:
    good = nf4.to_state(nf4.quantise(inputs(8, 128, "nf4")["plain"]), "a.weight")
    key = "a.weight.quant_state.bitsandbytes__nf4"
    for part in ("absmax", "quant_map", "nested_quant_map"):
        with pytest.raises(ModelError, match=rf"a\.weight\.{part} is missing"):
            nf4.from_state({k: v for k, v in good.items() if k != f"a.weight.{part}"}, "a.weight")
    nan = np.full(1, np.nan, np.float32)
    for bad, message in (
        (good | {"a.weight": good["a.weight"][:-1]}, r"^a\.weight is 511 x uint8, where 512 x uint8 belong"),
        (good | {"a.weight.absmax": good["a.weight.absmax"][:-1]}, r"absmax is 15 x uint8, where 16 x uint8"),
        ({k: v for k, v in good.items() if k != "a.weight.nested_absmax"}, "absmax is 16 x uint8, where 16 x float32"),
        (good | {"a.weight.nested_absmax": nan}, r"nested_absmax has a value that is NaN"),
        (good | {"a.weight.quant_map": nf4.FP4}, "not bitsandbytes' nf4 table"),
        (good | {key.replace("nf4", "fp4"): good[key]}, "2 quantisation states"),
        (good | {key: np.frombuffer(b"{", np.uint8)}, "is no JSON"),
        (good | {key: np.frombuffer(b"[]", np.uint8)}, "no JSON object"),
        (changed(good, shape=[8]), r"shape \[8\]"),
        (changed(good, shape=[8, -128]), "shape"),
        (changed(good, quant_type="fp4"), "its name says nf4"),
        (changed(good, dtype="int8"), "dtype 'int8'"),
        (changed(good, nested_offset=None), "has nested_offset None"),
        (changed(good, nested_offset=float("inf")), "has nested_offset inf"),
        (changed(good, nested_blocksize=128), "nested absmax in blocks of 128"),
    ):
        with pytest.raises(ModelError, match=message):
            nf4.from_state(bad, "a.weight")
    with pytest.raises(
        ModelError, match=r"a\.weight is quantised in blocks of 128; edgees reads blocks of 64"
    ) as caught:
        nf4.from_state(changed(good, blocksize=128), "a.weight")
    assert "block size of 64" in str(caught.value.hint)
    with pytest.raises(UsageError, match="no 4-bit type 'int4'"):
        nf4.quantise(np.ones((1, 64), np.float32), "int4")
