"""Noise version 1: known answers; the same bits on every arm, in the NumPy twin and in the reference; moments."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from edgees import native, noise
from edgees.errors import ModelError, NativeError, UsageError

ROOT = Path(__file__).resolve().parents[1]
ARMS = (
    ("neon", "scalar")
    if platform.machine() in ("aarch64", "arm64")
    else ("avx512vnni", "avx512", "avxvnni", "avx2", "scalar")
)
ANSWERS = json.loads((ROOT / "tests" / "data" / "noise_v1.json").read_text(encoding="utf-8"))
TENSOR: int = ANSWERS["tensor"]
KEY = reference.make_key(7, 3, 1)


def load(path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = load("tests/data/make_noise_v1.py")


@pytest.fixture
def restored() -> Iterator[None]:
    """The arm in use before the test is in use after it."""
    before = native.isa()
    yield
    native.set_isa(before)


@pytest.fixture(params=ARMS)
def arm(request: pytest.FixtureRequest, restored: None) -> str:
    if request.param not in native.available_isas():
        pytest.skip(f"this machine has no {request.param}")
    native.set_isa(request.param)
    return str(request.param)


def expected(
    kind: str, key: int, tensor: int, rows: int, cols: int, rank: int, row0: int, vector: bool = False
) -> np.ndarray:
    value, s = reference.integers(kind, key, tensor, rows, cols, rank, row0, vector)
    return np.asarray(value.astype(np.float32) * s)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit for bit: -0.0 is not 0.0."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# ---- what the files say
def test_the_known_answers_are_those_of_the_reference() -> None:
    known = MAKE.answers()
    assert json.loads(json.dumps(known)) == ANSWERS
    assert MAKE.JSON.read_text(encoding="utf-8") == MAKE.render_json(known)
    assert MAKE.INC.read_text(encoding="utf-8") == MAKE.render_inc(known)


def test_the_table_of_quantiles_is_what_its_script_makes() -> None:
    script = load("scripts/make_normal_table.py")
    assert script.TARGET.read_text(encoding="utf-8") == script.render()
    assert script.table() == reference.normal_table().tolist()


def test_philox_is_random123s() -> None:
    words = {(c["rounds"], c["key"]): " ".join(f"{w:08x}" for w in c["words"]) for c in ANSWERS["philox"]}
    assert words[10, 0] == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"
    assert words[10, (1 << 64) - 1] == "408f276d 41c83b0e a20bc7c6 6d5451fd"
    assert words[10, 0x299F31D0A4093822] == "d16cfe09 94fdcceb 5001e420 24126ea1"
    assert words[7, 0] == "5f6fb709 0d893f64 4f121f81 4f730a48"


# ---- the product says the same
@pytest.mark.parametrize("case", [c for c in ANSWERS["philox"] if c["rounds"] == 7])
def test_philox_of_the_kernels(arm: str, case: dict[str, Any]) -> None:
    block, row, tensor, stream = case["counter"]
    out = np.empty(4, np.uint32)
    native.check(native.lib().edgees_philox(case["key"], row, tensor, stream, block, 1, native.pointer(out)), "philox")
    assert out.tolist() == case["words"]


def test_keys_and_ids() -> None:
    for c in ANSWERS["keys"]:
        assert noise.make_key(c["seed"], c["generation"], c["pair"]) == c["key"]
    assert noise.tensor_id(ANSWERS["name"]) == TENSOR == reference.tensor_id(ANSWERS["name"])


@pytest.mark.parametrize("case", ANSWERS["eps"], ids=lambda c: f"{c['kind']}{c['rank']}-{c['row0']}-{c['cols']}")
def test_eps_known_answers(case: dict[str, Any], restored: None) -> None:
    options = {"rank": case["rank"], "row0": case["row0"], "vector": case["vector"]}
    arguments = (case["kind"], case["key"], TENSOR, case["rows"], case["cols"])
    for isa in native.available_isas():
        native.set_isa(isa)
        out = noise.eps(*arguments, **options)
        assert out.dtype == np.float32 and out.shape == arguments[3:]
        assert MAKE.fnv(out) == case["fnv"], isa
    assert MAKE.fnv(noise.eps_numpy(*arguments, **options)) == case["fnv"]
    integers = np.array(case["integers"], np.float32)
    assert same(out.reshape(-1)[: len(integers)], integers * np.float32(case["scale"]))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(noise.KINDS), key=st.integers(0, 2**64 - 1), tensor=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5), cols=st.integers(1, 1500), rank=st.integers(1, 9), row0=st.integers(0, 700),
    vector=st.booleans(),
)  # fmt: skip
def test_eps_is_the_reference_on_every_arm(
    kind: str, key: int, tensor: int, rows: int, cols: int, rank: int, row0: int, vector: bool
) -> None:
    if vector:
        rows, row0 = 1, 0
    want = expected(kind, key, tensor, rows, cols, rank, row0, vector)
    before = native.isa()
    try:
        for isa in native.available_isas():
            native.set_isa(isa)
            assert same(noise.eps(kind, key, tensor, rows, cols, rank=rank, row0=row0, vector=vector), want), isa
    finally:
        native.set_isa(before)
    assert same(noise.eps_numpy(kind, key, tensor, rows, cols, rank=rank, row0=row0, vector=vector), want)


@pytest.mark.parametrize("kind", noise.KINDS)
def test_rows_are_the_same_whatever_is_asked_for_with_them(kind: str, arm: str) -> None:
    whole = noise.eps(kind, KEY, TENSOR, 300, 40, rank=2)
    assert same(noise.eps(kind, KEY, TENSOR, 7, 40, rank=2, row0=125), whole[125:132])
    assert same(noise.eps(kind, KEY, TENSOR, 3, 33, rank=2, row0=255), np.ascontiguousarray(whole[255:258, :33]))


def test_nothing_is_asked_for() -> None:
    assert noise.eps("sign", KEY, TENSOR, 0, 5).shape == (0, 5) and noise.eps("normal", KEY, TENSOR, 2, 0).shape == (
        2,
        0,
    )


def test_a_vector_takes_the_dense_streams(arm: str) -> None:
    sign = noise.eps("sign", KEY, TENSOR, 1, 77)
    assert same(noise.eps("lowrank", KEY, TENSOR, 1, 77, rank=3, vector=True), sign)
    assert same(noise.eps("sign", KEY, TENSOR, 1, 77, vector=True), sign)
    assert not same(noise.eps("lowrank", KEY, TENSOR, 1, 77), sign)


def test_factors_of_lowrank(arm: str) -> None:
    a = np.stack([noise.sign_vector(KEY, TENSOR, 0x100 + k, 150) for k in range(2)], axis=1)
    b = np.stack([noise.sign_vector(KEY, TENSOR, 0x200 + k, 131) for k in range(2)], axis=1)
    assert np.array_equal(a[:, 1], reference.left(KEY, TENSOR, 1, 150))
    assert same(noise.eps("lowrank", KEY, TENSOR, 150, 131, rank=2), (a @ b.T) * np.float32(1 / np.sqrt(2)))


def test_pool(arm: str) -> None:
    for case in ANSWERS["pool"]:
        pool = noise.pool(case["seed"], TENSOR, case["cols"], case["factors"])
        assert pool.shape == (case["cols"], case["factors"]) and pool[:, 0].flags.c_contiguous
        assert MAKE.fnv(pool) == case["fnv"]
        packed = noise.pool_packed(case["seed"], TENSOR, case["cols"], case["factors"])
        assert packed.dtype == np.uint32 and packed.shape == (case["factors"], -(-case["cols"] // 128) * 4)
        j = np.arange(case["cols"])
        assert np.array_equal(1 - 2 * ((packed[:, j // 32] >> (j % 32).astype(np.uint32)) & 1).astype(int), pool.T)


def test_dither(arm: str) -> None:
    for case in ANSWERS["dither"]:
        assert MAKE.fnv(noise.dither(case["seed"], TENSOR, case["rows"], case["cols"])) == case["fnv"]
    u = noise.dither(5, TENSOR, 64, 2048)
    assert same(noise.dither(5, TENSOR, 1, 31, 63)[0], u[63, :31])
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / u.size) and abs(u.var() - 1 / 12) < 0.001


# ---- moments
@pytest.mark.parametrize(("kind", "rank"), [("sign", 1), ("lowrank", 1), ("lowrank", 4), ("normal", 1)])
def test_mean_0_variance_1(kind: str, rank: int) -> None:
    """Bounds of five standard errors; those of lowrank are of its factors, which are far fewer than its elements."""
    rows, cols = 1024, 1024
    eps = noise.eps(kind, KEY, TENSOR, rows, cols, rank=rank).astype(np.float64)
    if kind == "lowrank":  # mean of a b^T is mean(a) mean(b), each of standard error 1/32
        assert abs(eps.mean()) < 25 / rows
        assert abs(eps.var() - 1) < (0.001 if rank == 1 else 0.2)
    else:
        assert abs(eps.mean()) < 5 / np.sqrt(eps.size)
        assert abs(eps.var() - 1) < 5 * np.sqrt(2 / eps.size)
        assert np.abs(eps.mean(axis=0)).max() < 6 / np.sqrt(rows) and np.abs(eps.mean(axis=1)).max() < 6 / np.sqrt(cols)


def test_normals_have_the_normal_distribution() -> None:
    x = np.sort(noise.eps("normal", KEY, TENSOR, 256, 1024).reshape(-1))
    normal = reference.statistics.NormalDist()
    quantiles = np.array([normal.inv_cdf(p) for p in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)])
    assert np.abs(x[(np.array([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99]) * x.size).astype(int)] - quantiles).max() < 0.03
    assert abs(np.mean(x**4) - 3) < 0.1
    every = reference.normal_integers(np.arange(65536)) * float(reference.NORMAL_SCALE)
    assert abs(every.mean()) < 1e-12 and abs(np.mean(every**2) - 1) < 1e-6


def test_members_tensors_and_generations_are_uncorrelated() -> None:
    n = 1 << 16
    vectors = [
        noise.eps("sign", noise.make_key(seed, g, p), tensor, 1, n)[0]
        for seed, g, p, tensor in ((1, 0, 0, 5), (1, 0, 1, 5), (1, 1, 0, 5), (2, 0, 0, 5), (1, 0, 0, 6))
    ]
    gram = np.stack(vectors) @ np.stack(vectors).T / n
    assert np.abs(gram - np.eye(len(vectors))).max() < 5 / np.sqrt(n)


# ---- refusals
def test_two_names_with_one_id_are_refused() -> None:
    names = ["model.layers.31131.weight", "model.layers.152458.weight"]
    assert noise.tensor_id(names[0]) == noise.tensor_id(names[1])
    noise.check_ids(["a", "b", "a"])
    with pytest.raises(ModelError, match=f"{names[0]}.*{names[1]}"):
        noise.check_ids(["a", names[0], "b", names[1]])


@pytest.mark.parametrize("seed_generation_pair", [(-1, 0, 0), (1 << 64, 0, 0), (0, 1 << 32, 0), (0, 0, -1)])
def test_keys_beyond_their_bits_are_refused(seed_generation_pair: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="no key for seed"):
        noise.make_key(*seed_generation_pair)


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("lowrank", (2, 2), {"rank": 0}),
        ("lowrank", (2, 2), {"rank": 257}),
        ("sign", (2, 2), {"vector": True}),
        ("sign", (1, 2), {"vector": True, "row0": 1}),
        ("sign", (2, 2), {"row0": (1 << 32) - 1}),
        ("normal", (2, 2), {"row0": -1}),
    ],
)
def test_sizes_that_make_no_sense_are_refused(kind: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    with pytest.raises(NativeError, match="noise of"):
        noise.eps(kind, KEY, TENSOR, *shape, **options)
