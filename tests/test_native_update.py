"""The exact update, natively, against tests/reference.py: the same bits on every arm, whatever the threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_noise import ANSWERS, MAKE

from edgees import native, noise

NAME: str = ANSWERS["name"]
KEEPS = (1.0, MAKE.KEEP, 0.0)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Arm and threads are afterwards what they were before."""
    isa, threads = native.isa(), native.threads()
    yield
    native.set_isa(isa)
    native.threads(threads)


def settings_of_the_library() -> Iterator[tuple[str, int]]:
    """Each arm, with several thread counts on the first."""
    for i, isa in enumerate(native.available_isas()):
        for threads in (1, 2, 3) if i == 0 else (2,):
            native.set_isa(isa)
            native.threads(threads)
            yield isa, threads


def apply_delta(
    delta: np.ndarray,
    kind: str,
    rank: int,
    vector: bool,
    keys: list[int],
    coefs: np.ndarray,
    keep: float,
    row0: int = 0,
) -> int:
    k, c = np.array(keys, np.uint64), np.array(coefs, np.float32)
    return int(
        native.lib().edgees_delta_apply(
            native.pointer(delta), *delta.shape, row0, noise.tensor_id(NAME), noise.KINDS.index(kind), rank,
            int(vector), len(k), native.pointer(k), native.pointer(c), keep,
        )
    )  # fmt: skip


def apply_factors(a: np.ndarray, rank: int, keys: list[int], slots: list[int], coefs: np.ndarray, keep: float) -> int:
    k, n, c = np.array(keys, np.uint64), np.array(slots, np.uint32), np.array(coefs, np.float32)
    return int(
        native.lib().edgees_factors_apply(
            native.pointer(a), *a.shape, noise.tensor_id(NAME), rank, len(k), native.pointer(k), native.pointer(n),
            native.pointer(c), keep,
        )
    )  # fmt: skip


def start(rows: int, cols: int, seed: int) -> np.ndarray:
    """float32: ordinary values among zeros of both signs, a subnormal and a large one."""
    rng = np.random.default_rng(seed)
    delta = rng.normal(scale=0.02, size=(rows, cols)).astype(np.float32)
    odd = rng.random(delta.shape) < 0.1
    delta[odd] = rng.choice(np.array([0.0, -0.0, 1e-40, 3e8], np.float32), int(odd.sum()))
    return delta


@pytest.mark.parametrize("case", ANSWERS["delta"], ids=lambda c: f"{c['kind']}{c['rank']}-{c['keep']:.3f}")
def test_delta_known_answers(case: dict[str, Any]) -> None:
    keys, _, coefs = MAKE.pairs(case["pairs"])
    for where in settings_of_the_library():
        delta = MAKE.start(case["rows"], case["cols"])
        assert apply_delta(delta, case["kind"], case["rank"], case["vector"], keys, coefs, case["keep"]) == 0
        assert MAKE.fnv(delta) == case["fnv"], where


@pytest.mark.parametrize("case", ANSWERS["factors"], ids=lambda c: f"{c['rank']}-{c['factors']}-{c['keep']:.3f}")
def test_factors_known_answers(case: dict[str, Any]) -> None:
    keys, slots, coefs = MAKE.pairs(case["pairs"])
    for where in settings_of_the_library():
        a = MAKE.start(case["rows"], case["factors"])
        assert apply_factors(a, case["rank"], keys, slots, coefs, case["keep"]) == 0
        assert MAKE.fnv(a) == case["fnv"], where


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(noise.KINDS), rank=st.integers(1, 5), vector=st.booleans(), rows=st.integers(1, 300),
    cols=st.integers(1, 300), pairs=st.integers(0, 5), keep=st.sampled_from(KEEPS), cut=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_delta_is_the_reference(
    kind: str, rank: int, vector: bool, rows: int, cols: int, pairs: int, keep: float, cut: int, seed: int
) -> None:
    rows = 1 if vector else rows
    rng = np.random.default_rng(seed)
    keys = [int(k) for k in rng.integers(0, 1 << 63, pairs)]
    coefs = rng.choice(np.array([0.0, -0.3, 0.017, 1e-30, 2.5], np.float32), pairs)
    before = start(rows, cols, seed)
    want = reference.update_dense(before, NAME, 1.0, keys, coefs, keep, kind, rank, vector)
    for where in settings_of_the_library():
        whole = before.copy()
        assert apply_delta(whole, kind, rank, vector, keys, coefs, keep) == 0
        assert whole.tobytes() == want.tobytes(), where
    if 0 < cut < rows:
        pieces = before.copy()
        for row0, piece in ((0, pieces[:cut]), (cut, pieces[cut:])):
            assert apply_delta(piece, kind, rank, vector, keys, coefs, keep, row0) == 0
        assert pieces.tobytes() == want.tobytes()


@settings(max_examples=40, deadline=None)
@given(
    rank=st.integers(1, 5), rows=st.integers(0, 2500), factors=st.integers(1, 9), pairs=st.integers(0, 5),
    keep=st.sampled_from(KEEPS), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_factors_are_the_reference(rank: int, rows: int, factors: int, pairs: int, keep: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = [int(k) for k in rng.integers(0, 1 << 63, pairs)]
    slots = [int(n) for n in rng.integers(0, 1 << 32, pairs)]
    coefs = rng.choice(np.array([0.0, -0.3, 0.017, 1e-30, 2.5], np.float32), pairs)
    before = start(rows, factors, seed)
    want = reference.update_factors(before, NAME, 1.0, keys, slots, coefs, keep, rank)
    for where in settings_of_the_library():
        a = before.copy()
        assert apply_factors(a, rank, keys, slots, coefs, keep) == 0
        assert a.tobytes() == want.tobytes(), where


@pytest.mark.parametrize(("kind", "vector"), [("lowrank", False), ("sign", False), ("normal", True)])
def test_rows_wider_than_a_task(kind: str, vector: bool) -> None:
    keys, _, coefs = MAKE.pairs(3)
    before = start(1 if vector else 2, 70001, 1)
    want = reference.update_dense(before, NAME, 1.0, keys, coefs, 1.0, kind, 1, vector)
    native.threads(3)
    assert apply_delta(before, kind, 1, vector, keys, coefs, 1.0) == 0
    assert before.tobytes() == want.tobytes()


def test_the_update_is_along_the_members_noise() -> None:
    keys, _, coefs = MAKE.pairs(1)
    for kind in noise.KINDS:
        delta = np.zeros((40, 50), np.float32)
        assert apply_delta(delta, kind, 2, False, keys, coefs, 1.0) == 0
        eps = noise.eps(kind, keys[0], noise.tensor_id(NAME), 40, 50, rank=2)
        np.testing.assert_allclose(delta, coefs[0] * eps, rtol=3e-7)


def test_arguments_that_make_no_sense_are_refused() -> None:
    keys, slots, coefs = MAKE.pairs(2)
    delta = np.ones((2, 8), np.float32)
    assert apply_delta(delta, "lowrank", 0, False, keys, coefs, 1.0) == -1
    assert apply_delta(delta, "lowrank", 257, False, keys, coefs, 1.0) == -1
    assert apply_delta(delta, "sign", 1, True, keys, coefs, 1.0) == -1
    assert apply_delta(delta, "sign", 1, False, keys, coefs, 1.0, row0=(1 << 32) - 1) == -1
    assert apply_delta(delta, "sign", 1, False, keys, coefs, 1.0, row0=-1) == -1
    assert apply_factors(delta, 0, keys, slots, coefs, 1.0) == -1
    assert apply_factors(delta[:, :0].copy(), 1, keys, slots, coefs, 1.0) == -1
    assert (delta == 1).all()
