"""From rewards to a step, against the readable twin; population and rows, which feed it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference

from edgees import noise
from edgees.population import Population, RowOrder, request_seed, sigma_at
from edgees.update import SHAPINGS, fitness, loglik_weight, mix, shrinkage, update


def some_rewards(seed: int = 0, pairs: int = 5, rows: int = 6, holes: int = 4) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(pairs, 2, rows)) + np.array([0.3, -0.3])[None, :, None] * rng.normal(size=(pairs, 1, 1))
    rewards.reshape(-1)[rng.choice(rewards.size, holes, replace=False)] = np.nan
    return rewards


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("shrink", [True, False])
def test_coefficients_are_those_of_the_twin(shaping: str, shrink: bool) -> None:
    for seed in range(5):
        rewards = some_rewards(seed)
        rewards[1, 0] = np.nan  # a pair without any row in common
        step = update(rewards, lr=0.2, sigma=0.04, shaping=shaping, shrink=shrink)
        coefs, z, factor = reference.coefficients(rewards, 0.2, 0.04, shaping, shrink)
        assert step.coefs == tuple(coefs.astype(float).tolist())
        np.testing.assert_allclose(step.z, z, rtol=1e-12)
        assert math.isclose(step.shrink, factor) and step.keep == 1.0
        assert step.coefs[1] == 0.0


def test_a_missing_reward_is_excluded_not_averaged() -> None:
    """Case 25: row 2 of the minus member has none, so row 2 counts for neither side of the pair."""
    rewards = np.array([[[1.0, 2.0, 100.0], [0.0, 1.0, np.nan]]])
    fit = fitness(rewards)
    assert fit.mean.tolist() == [[1.5, 0.5]]
    assert (fit.d[0], fit.se[0], fit.rows[0]) == (0.5, 0.0, 2)
    assert np.isnan(fitness(np.full((1, 2, 3), np.nan)).d[0])


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_members_without_a_minus_are_measured_against_all(shaping: str) -> None:
    """One-sided: d is the mean difference to all members on the same row, whatever a row is worth to everybody."""
    rewards = np.array([[[1.0, 12.0]], [[3.0, 14.0]], [[2.0, np.nan]]])
    fit = fitness(rewards)
    np.testing.assert_allclose(fit.d, [-1.0, 1.0, 0.0])
    assert fit.rows.tolist() == [2, 2, 1] and fit.mean.shape == (3, 1)
    rng = np.random.default_rng(0)
    g = rng.normal(size=64)
    easy = 0.1 * g[:, None, None] + 100 * rng.normal(size=8)
    step = update(easy, lr=0.2, sigma=1.0, shaping=shaping)
    assert np.corrcoef(step.coefs, g)[0, 1] > 0.95
    if shaping != "raw":
        assert math.isclose(step.step, 0.2 / 8, rel_tol=0.01)
    assert "same mean reward" in update(easy[:1], lr=0.2, sigma=1.0).reason  # a single member tells nothing


@pytest.mark.parametrize("shaping", ["zscore", "ranks"])
def test_missing_rows_are_no_merit(shaping: str) -> None:
    """Members of equal merit; one of them has no reward on the hard rows."""
    rewards = np.tile([1.0, 1.0, 0.0, 0.0], (8, 1, 1)) + 1e-3 * np.arange(8)[:, None, None] % 4e-3
    rewards[3, 0, 2:] = np.nan
    z = np.array(update(rewards, lr=1.0, sigma=0.1, shaping=shaping).z)
    assert abs(z).max() < 2.0 and z[7] > 0.8 and abs(z[3] - z[7]) < 0.6


@pytest.mark.parametrize("size", [1.0, 1e4, 1e6])
def test_large_equal_rewards_move_nothing_with_gaps(size: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rewards = np.where(rng.random((8, 1, 4)) < 0.1, np.nan, size * 1.1)
        assert update(rewards, lr=1.0, sigma=0.1, shrink=False).reason


@pytest.mark.parametrize("signs", [1, 2])
def test_groups_are_compared_within_themselves(signs: int) -> None:
    """Members 0, 2, 4 answered an easy row, 1, 3, 5 a hard one: which of the two is no merit."""
    rewards = np.zeros((6, signs, 1))
    rewards[0::2] = 100.0
    rewards[:, 0, 0] += [0.0, 1.0, 1.0, 3.0, 2.0, 2.0]
    fit = fitness(rewards, 2)
    wanted = [-1.0, -1.0, 0.0, 1.0, 1.0, 0.0] if signs == 1 else [0.0, 0.5, 0.5, 1.5, 1.0, 1.0]
    np.testing.assert_allclose(fit.d, wanted)
    step = update(rewards, lr=0.6, sigma=0.1, groups=2)
    np.testing.assert_allclose(step.z, np.array(wanted) / fit.merits.std())
    assert float(np.abs(fit.merits).max()) < 3.0
    flat = np.repeat([[[1.0]], [[5.0]]], 3, axis=0)[[0, 3, 1, 4, 2, 5]]
    assert "no signal" in update(flat, lr=0.6, sigma=0.1, groups=2).reason


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("value", [0.0, 0.7, -3e8])
def test_equal_rewards_move_nothing(shaping: str, value: float) -> None:
    """Case 24: no update, a plain reason, never NaN; decay and budget do not act either."""
    rewards = np.full((4, 2, 8), value) + np.linspace(0, 1, 8)  # rows may differ
    step = update(rewards, lr=1.0, sigma=0.1, shaping=shaping, decay=0.1, drift=2.0, drift_budget=0.5)
    assert step.coefs == (0.0,) * 4 and step.keep == 1.0 and step.step == 0.0
    assert "no signal: all 8 members got the same mean reward" in step.reason
    assert all(math.isfinite(z) for z in step.z)


def test_every_kind_of_no_signal_is_told_apart() -> None:
    nothing = update(np.full((2, 2, 3), np.nan), lr=1.0, sigma=0.1)
    assert "no pair has a row" in nothing.reason and nothing.coefs == (0.0, 0.0)
    twins = np.zeros((2, 2, 3))
    twins[0] = 1.0
    assert "every pair did equally well" in update(twins, lr=1.0, sigma=0.1).reason
    rng = np.random.default_rng(0)
    noisy = rng.normal(size=(4, 2, 64))
    noisy[:, 1] = -noisy[:, 0]
    noisy -= noisy.mean(axis=2, keepdims=True) * 0.999
    step = update(noisy, lr=1.0, sigma=0.1)
    assert step.shrink == 0.0 and "rows' own spread" in step.reason
    assert update(noisy, lr=1.0, sigma=0.1, shrink=False).reason == ""


def test_shrink_is_the_share_that_is_not_noise() -> None:
    rewards = np.zeros((1, 2, 4))
    rewards[0, 0] = [2.0, 4.0, 2.0, 4.0]  # d = 1.5, se^2 = (1/3)/4
    assert math.isclose(shrinkage(fitness(rewards)), 1 - (1 / 3 / 4) / 2.25)
    assert shrinkage(fitness(rewards[:, :, :1])) == 1.0  # one row says nothing about its own spread


def test_the_step_has_the_length_that_lr_says() -> None:
    """z-scored and ranked steps are about lr/sqrt(pairs) long; raw ones follow the reward's scale."""
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(400, 2, 1))
    for shaping in ("zscore", "ranks"):
        step = update(rewards, lr=0.2, sigma=0.04, shaping=shaping, shrink=False)
        assert 0.6 < step.step / (0.2 / math.sqrt(400)) < 0.8  # d has 1/sqrt(2) of F's spread
        again = update(rewards * 7 + 3, lr=0.2, sigma=0.04, shaping=shaping, shrink=False)
        np.testing.assert_allclose(again.coefs, step.coefs, rtol=1e-5)
    raw = [update(rewards * s, lr=0.2, sigma=0.04, shaping="raw", shrink=False).step for s in (1, 2)]
    assert math.isclose(raw[1], 2 * raw[0], rel_tol=1e-6)


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_lr_means_the_same_at_any_sigma(shaping: str) -> None:
    """Case 27: of a linear reward the step is the same whatever sigma was."""
    rng = np.random.default_rng(2)
    slopes = rng.normal(size=(8, 1)) * np.ones((8, 4))

    def at(sigma: float) -> tuple[float, ...]:
        return update(
            np.stack([sigma * slopes, -sigma * slopes], axis=1), lr=0.2, sigma=sigma, shaping=shaping
        ).coefs  # fmt: skip

    np.testing.assert_allclose(at(0.01), at(0.08), rtol=1e-5)


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("factors", [0, 16])
def test_the_algorithm_climbs_a_quadratic(shaping: str, factors: int) -> None:
    """Case 27, on the twin; tests/test_tune.py shows the same of the product."""
    lr = 0.01 if shaping == "raw" else 0.2
    losses = reference.tune_quadratic(shaping=shaping, generations=30, lr=lr, factors=factors)
    assert losses[-1] < 0.8 * losses[0]


def test_the_drift_budget_holds() -> None:
    rewards = some_rewards(3)
    free = update(rewards, lr=0.2, sigma=0.04, shrink=False)
    step = update(rewards, lr=0.2, sigma=0.04, shrink=False, drift=0.1, drift_budget=0.1)
    assert step.coefs == free.coefs
    assert math.isclose((step.keep * 0.1) ** 2 + step.step**2, 0.01, rel_tol=1e-6)
    assert update(rewards, lr=0.2, sigma=0.04, shrink=False, drift=0.05, drift_budget=10.0).keep == 1.0
    long = update(rewards, lr=20.0, sigma=0.04, shrink=False, drift=0.1, drift_budget=0.1)
    assert math.isclose(long.step, 0.1, rel_tol=1e-6) and long.keep == 0.0
    assert update(rewards, lr=0.2, sigma=0.04, shrink=False, decay=0.01).keep == float(np.float32(0.99))


def test_the_likelihood_anneals_to_exactly_nothing() -> None:
    weights = [loglik_weight(f, 0.8, 0.3, 0.8) for f in (0.0, 0.3, 0.55, 0.8, 1.0)]
    np.testing.assert_allclose(weights, [0.8, 0.8, 0.4, 0.0, 0.0], atol=1e-12)
    assert weights[-2:] == [0.0, 0.0]
    assert loglik_weight(0.5, 1.0, 0.5, 0.5) == 0.0
    assert loglik_weight(0.0, 0.0, 0.3, 0.8) == 0.0
    a, b = np.array([1.0, np.nan]), np.array([-1.0, -1.0])
    np.testing.assert_array_equal(mix(a, b, 0.25), [0.5, np.nan])
    assert mix(a, None, 0.0) is a and mix(None, b, 1.0) is b


def test_members_are_antithetic_seeded_and_ordered() -> None:
    people = Population(3, 4)
    members = people.ask(5, 0.04)
    assert [(m.key, m.amplitude, m.slot) for m in members] == reference.members(3, 5, 4, 0.04)
    assert [m.pair for m in members] == [0, 0, 1, 1, 2, 2, 3, 3] and [m.sign for m in members[:2]] == [1, -1]
    assert people.keys(5) == tuple(m.key for m in members[::2])
    assert people.slots(5) == tuple(m.slot for m in members[::2])
    assert len({key for g in range(50) for key in people.keys(g)}) == 200
    assert Population(3, 5).keys(5)[:4] == people.keys(5)
    assert people.slots(2**31)[0] == 2**31 * 4 % 2**32


def test_equal_shapes_get_uncorrelated_noise() -> None:
    """Case 22: |correlation| of 4096 signs is below 5 standard errors, over tensors, pairs and generations."""
    key = noise.make_key(0, 0, 0)
    a = noise.eps("sign", key, noise.tensor_id("blk.0.w"), 64, 64)
    others = [
        noise.eps("sign", key, noise.tensor_id("blk.1.w"), 64, 64),
        noise.eps("sign", noise.make_key(0, 0, 1), noise.tensor_id("blk.0.w"), 64, 64),
        noise.eps("sign", noise.make_key(0, 1, 0), noise.tensor_id("blk.0.w"), 64, 64),
        noise.eps("sign", noise.make_key(1, 0, 0), noise.tensor_id("blk.0.w"), 64, 64),
    ]
    for b in others:
        assert abs(float((a * b).mean())) < 5 / 64


def test_sigma_ends_where_it_is_told() -> None:
    values = [sigma_at(f, 0.04, 0.5) for f in (0.0, 0.5, 1.0, 7.0)]
    np.testing.assert_allclose(values, [0.04, 0.03, 0.02, 0.02])
    np.testing.assert_allclose(values[:3], [reference.sigma_at(f, 0.04, 0.5) for f in (0.0, 0.5, 1.0)])


def test_rows_come_round_before_they_come_again() -> None:
    order = RowOrder(1, 10, 4)
    drawn = [order.rows(g) for g in range(10)]
    assert all(len(set(rows)) == 4 for rows in drawn)
    assert sorted(i for rows in drawn for i in rows) == sorted(list(range(10)) * 4)
    assert [RowOrder(1, 10, 4).rows(g) for g in (7, 2)] == [drawn[7], drawn[2]]
    assert RowOrder(2, 10, 4).rows(0) != drawn[0]
    assert sorted(RowOrder(1, 3, 8).rows(5)) == [0, 1, 2]
    with pytest.raises(ValueError):
        RowOrder(1, 0, 4)
    seeds = {request_seed(1, g, row) for g in range(10) for row in ("a", "b")}
    assert len(seeds) == 20 and all(0 <= s < 2**31 for s in seeds)
