"""Trials of contexts: the sequential test keeps its promise, and contexts and members are not confounded."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from edgees.trials import PATIENCE, Deal, Trials, evidence, level, units
from edgees.update import fitness, update

ERROR = 0.05


def rewards_of(
    deal: Deal, rng: np.random.Generator, *, effect: float = 0.0, likes: float = 0.3, member: float = 0.3,
    noise: float = 0.2, signs: int = 1,
) -> np.ndarray:  # fmt: skip
    """A generation's rewards. likes: how differently rows take to a candidate; member: to members."""
    pairs, rows = deal.arms.shape
    group = np.arange(pairs) % len(deal.candidates)
    base = rng.normal(0.0, 0.5, (len(deal.candidates), rows))
    change = rng.normal(effect, likes, (len(deal.candidates), rows))
    mean = base[group] + deal.arms * change[group]
    return mean[:, None] + rng.normal(0.0, member, (pairs, signs, 1)) + rng.normal(0.0, noise, (pairs, signs, rows))


def carry_out(trials: Trials, seed: int, generations: int, shape: tuple[int, int, int], **truth: float) -> str:
    rng = np.random.default_rng(seed)
    for _ in range(generations):
        deal = trials.deal(*shape)
        if deal.idle:
            break
        verdict = trials.judge(deal, rewards_of(deal, rng, **truth))  # type: ignore[arg-type]
        if verdict.adopted:
            return verdict.adopted
        trials.take(json.loads(json.dumps(verdict.to_dict())))
    return ""


@pytest.mark.parametrize(
    ("shape", "truth"),
    [
        ((64, 4, 2), {}),
        ((64, 4, 2), {"likes": 0.0, "member": 0.0, "noise": 0.5}),
        ((32, 1, 8), {"member": 1.0}),  # members that differ more than rows do
        ((32, 16, 2), {"member": 0.0, "noise": 0.0}),  # scope none: two members a group
        ((16, 1, 8), {"signs": 2}),
    ],
)
def test_null_candidates_are_adopted_no_more_often_than_stated(
    shape: tuple[int, int, int], truth: dict[str, Any]
) -> None:
    adopted = 0
    for seed in range(300):
        trials = Trials("present", ERROR)
        trials.propose(["candidate"])
        adopted += carry_out(trials, seed, 60, shape, **truth) != ""
    assert adopted <= ERROR * 300


@pytest.mark.parametrize("pairs", [3, 4])
def test_the_rate_holds_for_halves_that_cannot_be_equal_and_skewed_rewards(pairs: int) -> None:
    adopted = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        trials = Trials("present", ERROR)
        trials.propose(["candidate"])
        while not (deal := trials.deal(pairs, 1, 1)).idle and trials.present == "present":
            rewards = (rng.random((pairs, 1, 1)) < 0.9).astype(float)
            trials.take(trials.judge(deal, rewards).to_dict())
        adopted += trials.present != "present"
    assert adopted <= ERROR * 300


@pytest.mark.parametrize("growth", [1.1, 1.5])
def test_the_rate_holds_for_rewards_that_grow_from_row_to_row(growth: float) -> None:
    """What is known by then of their size counts, never what is known later; looked at after every row."""
    adopted = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        trials = Trials("present", ERROR)
        trials.propose(["candidate"])
        for n in range(PATIENCE):
            deal = trials.deal(2, 1, 1)
            if deal.idle or trials.present != "present":
                break
            trials.take(trials.judge(deal, rng.normal(size=(2, 1, 1)) * growth**n).to_dict())
        adopted += trials.present != "present"
    assert adopted <= ERROR * 300


def test_nothing_is_dropped_before_it_was_played() -> None:
    trials = Trials("present", 0.5)
    trials.propose(["a", "b", "c"])
    deal = trials.deal(8, 1, 2)
    verdict = trials.judge(deal, np.random.default_rng(0).normal(size=(8, 1, 2)))
    assert set(verdict.dropped) <= set(deal.candidates)


def test_a_better_candidate_is_adopted_among_worse_ones() -> None:
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        trials = Trials("present", ERROR)
        trials.propose(["worse", "same", "better"])
        effects = {"worse": -0.3, "same": 0.0, "better": 0.3}
        for _ in range(40):
            deal = trials.deal(64, 4, 2)
            if deal.idle:
                break
            rewards = rewards_of(deal, rng)
            for group, name in enumerate(deal.candidates):
                if name:
                    rewards[group::4] += effects[name] * deal.arms[group::4][:, None]
            verdict = trials.judge(deal, rewards)
            trials.take(verdict.to_dict())
            if verdict.adopted:
                break
        found.append(trials.present)
    assert found.count("better") >= 19


def test_the_bound_holds_for_any_size_of_differences() -> None:
    """The evidence does not change with the unit of the reward."""
    found = []
    for unit in (1.0, 1e6):
        rng = np.random.default_rng(0)
        trials = Trials("present", ERROR)
        trials.propose(["a"])
        deal = trials.deal(16, 1, 2)
        trials.take(trials.judge(deal, unit * rewards_of(deal, rng, likes=0.0)).to_dict())
        verdict = trials.judge(deal, unit * rewards_of(deal, rng, likes=0.0))
        found.append(verdict.evidence["a"])
    assert found[0] == pytest.approx(found[1]) and found[0]
    assert evidence(np.zeros(5)) == 0.0
    assert evidence(np.empty(0)) == 0.0


def test_evidence_is_a_martingale_under_fair_signs() -> None:
    """Mean over all 2^n signs is exactly 1, so that Ville's inequality holds."""
    sizes = np.array([0.3, 2.0, 0.7, 1.1, 0.05, 4.0])
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(sizes))).reshape(len(sizes), -1).T
    scale = float(np.sqrt(np.mean(sizes**2)))
    assert np.mean([math.exp(evidence(s * sizes / scale)) for s in signs]) == pytest.approx(1.0)


def test_every_row_is_played_on_both_sides_and_every_member_plays_both() -> None:
    trials = Trials("present", ERROR)
    trials.propose(["a", "b"])
    deal = trials.deal(16, 4, 2)
    assert set(deal.candidates) == {"a", "b"}
    for group in range(4):
        arms = deal.arms[group::4]
        assert (arms.sum(axis=0) == 2).all() and (arms.sum(axis=1) == 1).all()
    assert deal.of(0, 0) in ("", *deal.candidates) and deal.of(0, 0) != deal.of(4, 0)


def test_a_context_that_matters_does_not_move_the_weights() -> None:
    """The confound, one way: only the context matters."""
    rng = np.random.default_rng(1)
    trials = Trials("present", ERROR)
    trials.propose(["much better"])
    deal = trials.deal(16, 1, 8)
    rewards = np.zeros((16, 1, 8)) + rng.normal(size=8) + 5.0 * deal.arms[:, None]
    step = update(level(deal, rewards), lr=0.2, sigma=0.04)
    assert step.reason and not any(step.coefs)
    assert units(deal, rewards) == {"much better": pytest.approx([5.0] * 8)}


def test_members_that_matter_do_not_make_a_context_look_better() -> None:
    """The confound, the other way: only the weights matter, and the update is what it would be without a trial."""
    rng = np.random.default_rng(2)
    rewards = rng.normal(size=(16, 1, 1)) + rng.normal(size=8)
    trials = Trials("present", ERROR)
    trials.propose(["candidate"])
    deal = trials.deal(16, 1, 8)
    found = np.array(units(deal, rewards)["candidate"])
    assert abs(found.mean()) < 1e-12  # each member plays as many rows with it as without
    plain, levelled = fitness(rewards), fitness(level(deal, rewards))
    assert np.corrcoef(plain.d, levelled.d)[0, 1] > 0.9  # one contrast of sixteen, between odd and even ones, is halved


def test_what_was_replaced_can_come_back() -> None:
    trials = Trials("first", ERROR)
    trials.propose(["second", "third"])
    trials.take({"units": {"second": [0.5]}, "adopted": "second", "dropped": []})
    assert trials.present == "second" and trials.standings["first"].former
    assert trials.new == 1 and trials.standings["third"].differences == []
    trials.propose(["second"])
    assert "second" not in trials.standings
    rng = np.random.default_rng(3)
    while trials.present == "second":
        deal = trials.deal(32, 4, 2)
        rewards = rewards_of(deal, rng, effect=0.0, likes=0.0)
        for group, name in enumerate(deal.candidates):
            rewards[group::4] += (1.0 if name == "first" else 0.0) * deal.arms[group::4][:, None]
        trials.take(trials.judge(deal, rewards).to_dict())
    assert trials.present == "first"


def test_hopeless_candidates_leave() -> None:
    rng = np.random.default_rng(4)
    trials = Trials("present", ERROR)
    trials.propose(["bad", "same"])
    played = 0
    while not (deal := trials.deal(32, 4, 2)).idle:
        rewards = rewards_of(deal, rng, likes=0.0)
        for group, name in enumerate(deal.candidates):
            rewards[group::4] -= (1.0 if name == "bad" else 0.0) * deal.arms[group::4][:, None]
        trials.take(trials.judge(deal, rewards).to_dict())
        played += 1
    assert trials.present == "present" and not trials.standings
    assert played * 8 < 2 * PATIENCE


def test_a_fold_over_the_journal_is_the_same_trial() -> None:
    """A run that is killed in the middle of a test decides the same."""
    rng = np.random.default_rng(5)
    whole, records = Trials("present", ERROR), []
    whole.propose(["a", "b", "c"])
    for _ in range(6):
        deal = whole.deal(32, 4, 2)
        records.append(json.dumps(whole.judge(deal, rewards_of(deal, rng, effect=0.1)).to_dict()))
        whole.take(json.loads(records[-1]))
    again = Trials("present", ERROR)
    again.propose(["a", "b", "c"])
    for record in records:
        again.take(json.loads(record))
    assert again.present == whole.present
    one, two = whole.deal(32, 4, 2), again.deal(32, 4, 2)
    assert one.candidates == two.candidates and (one.arms == two.arms).all()
    rewards = rewards_of(one, rng)
    assert whole.judge(one, rewards).to_dict() == again.judge(two, rewards).to_dict()


def test_excluded_rewards_take_no_part() -> None:
    trials = Trials("present", ERROR)
    trials.propose(["a"])
    deal = trials.deal(4, 1, 2)
    rewards = np.array([[1.0, 5.0], [3.0, 1.0], [1.0, math.nan], [math.nan, 1.0]])[:, None]
    assert deal.arms.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert units(deal, rewards) == {"a": [2.0, 4.0]}
    assert np.isnan(level(deal, rewards)).sum() == 2
    rewards[:, :, 1] = math.nan
    assert units(deal, rewards) == {"a": [2.0]}
