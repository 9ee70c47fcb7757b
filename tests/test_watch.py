"""Watchdogs: noise does not ring them, what really goes wrong does, soon, and each thing is said once."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgees import watch
from edgees.watch import KINDS, Finding, Watch, look

Curve = Callable[[int], float]
NOISY = {"hacking", "decay", "gap"}
"""What is judged by statistics alone, and must therefore stay silent on noise."""


def flat(g: int) -> float:
    return 0.3


class Run:
    """A simulated journal. Each row is solved with its own probability, moved by what was learned after g generations.

    train, held, exact: mean probability after g generations on training rows, on held-out rows, and of the metric.
    renew: share of rows whose outcome is drawn anew from one generation to the next (1: all; small: they wander).
    """

    def __init__(
        self,
        seed: int,
        train: Curve = flat,
        held: Curve = flat,
        exact: Curve | None = None,
        *,
        generations: int = 24,
        train_rows: int = 200,
        held_rows: int = 64,
        renew: float = 0.5,
        more: dict[str, Curve] | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lines: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        hard = {"train": rng.normal(0, 0.2, train_rows), "held": rng.normal(0, 0.2, held_rows)}
        luck = {"train": rng.random(train_rows), "held": rng.random(held_rows)}
        for g in range(generations + 1):
            for name, u in luck.items():
                again = rng.random(u.size) < renew
                luck[name] = np.where(again, rng.random(u.size), u)
            if g % 2 == 0:
                rewards = (luck["held"] < np.clip(held(g) + hard["held"], 0, 1)).astype(float)
                right = luck["held"] < np.clip((exact or held)(g) + hard["held"], 0, 1)
                self.evals.append(
                    {
                        "eval": g, "mean": rewards.mean(), "se": rewards.std(ddof=1) / held_rows**0.5,
                        "rows": held_rows, "rewards": rewards.tolist(), "metrics": {"exact": right.mean()},
                        "distinct": 20, "majority": 0.2, "length": 10.0, "truncated": 0,
                        **{name: curve(g) for name, curve in (more or {}).items()},
                    }
                )  # fmt: skip
            if g == generations:
                return
            rows = rng.permutation(train_rows)[:8]
            chance = np.clip(train(g) + hard["train"][rows], 0, 1)
            means = (luck["train"][rows] + rng.normal(0, 0.2, (2, 16, 8)) < chance).mean(axis=2)
            self.lines.append(line(g, means, rows=[f"r{row}" for row in rows]))

    def told(self) -> list[tuple[int, Finding]]:
        return Watch(natural=0.1).catch_up(self.lines, self.evals)

    def kinds(self) -> set[str]:
        return {finding.kind for _, finding in self.told()}


def line(g: int, means: Any, **more: Any) -> dict[str, Any]:
    """A generation of 16 pairs on 8 rows."""
    plus, minus = np.asarray(means, float).tolist()
    return {
        "generation": g, "rows": [f"r{8 * g + i}" for i in range(8)], "sigma": 0.04, "loglik": 0.0, "drift": 0.01 * g,
        "shrink": 0.4, "rewards": {"plus": plus, "minus": minus}, "coefs": [0.0] * 16, "reason": "", "excluded": [],
        "distinct": 90, "majority": 0.2, "length": 10.0, "truncated": 0, "overflow": 0, "tokens": 2560, **more,
    }  # fmt: skip


def found(
    lines: list[dict[str, Any]], evals: list[dict[str, Any]] | None = None, natural: float = 0.1
) -> dict[str, str]:
    return {finding.kind: finding.text for finding in look(lines, evals or [], natural)}


def evaluation(g: int, **more: Any) -> dict[str, Any]:
    return {"eval": g, "mean": 0.3, "se": 0.05, "rows": 64, "distinct": 40, "majority": 0.1, **more}


def first(run: Run, kind: str) -> tuple[int, str]:
    """(generation, text) of the first such finding."""
    texts = [(generation, finding.text) for generation, finding in run.told() if finding.kind == kind]
    assert texts, f"no {kind} in {run.told()}"
    return texts[0]


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("renew", "train_rows", "held_rows", "generations"),
    [(1.0, 200, 64, 24), (0.1, 200, 64, 24), (0.3, 8, 8, 24), (0.1, 16, 64, 24)],
    ids=["fresh", "wandering", "hardly any rows", "the same few rows"],
)
def test_noise_rings_no_alarm(renew: float, train_rows: int, held_rows: int, generations: int) -> None:
    """75 runs of each sort in which nothing is learned, each looked at after every generation and evaluation."""
    rung = []
    for seed in range(75):
        run = Run(seed, renew=renew, train_rows=train_rows, held_rows=held_rows, generations=generations)
        if kinds := run.kinds() & NOISY:
            rung.append(kinds)
    assert len(rung) <= 2, rung  # 2.7 %


def test_the_luck_of_few_training_rows_is_not_learned_by_heart() -> None:
    """Sixteen rows that come again and again wander together, and by more than generations scatter."""
    rung = []
    for seed in range(60):
        run = Run(seed, renew=0.05, train_rows=16, generations=60)
        for end in (20, 30, 40, 50, 60):
            kinds = set(found(run.lines[:end], [e for e in run.evals if e["eval"] <= end])) & {"hacking", "gap"}
            rung += [(seed, end)] if kinds else []
    assert len(rung) <= 2, rung


def test_learning_rings_no_alarm() -> None:
    """Right answers rise with the reward in training and held-out rows alike; so do the wrong suspicions not."""

    def learning(g: int) -> float:
        return 0.3 + 0.4 * min(g / 16, 1.0)

    rung = [kinds for seed in range(40) if (kinds := Run(seed, learning, learning).kinds() & NOISY)]
    assert len(rung) <= 1, rung


def test_members_that_near_the_centre_as_sigma_falls_are_no_overfitting() -> None:
    """Training reward rises from a fifth of the centre's to all of it, with nothing learned."""
    rung = [
        kinds
        for seed in range(40)
        if (kinds := Run(seed, lambda g: 0.1 + 0.4 * g / 24, lambda g: 0.5).kinds() & {"gap", "hacking"})
    ]
    assert len(rung) <= 1, rung


def test_a_best_by_luck_is_no_decay() -> None:
    """The best of many noisy evaluations looks better than it is, but not on rows that did not choose it."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(60):
        rewards = rng.integers(0, 2, (40, 64)).astype(float)
        evals = [evaluation(2 * i, mean=r.mean(), rewards=r.tolist()) for i, r in enumerate(rewards)]
        wrong += any("decay" in found([], evals[:count]) for count in range(20, 41))
    assert wrong <= 2, wrong


# --- each failure, within few evaluations --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_decay(seed: int) -> None:
    def peak(g: int) -> float:
        return 0.3 + 0.4 * min(g / 6, 1.0) - 0.5 * max(0.0, min((g - 8) / 6, 1.0))

    generation, text = first(Run(seed, peak, peak), "decay")
    assert 10 <= generation <= 20  # the fall lasts from 8 to 14
    assert "after generation" in text
    assert "standard errors" in text
    assert "the best is kept" in text


def test_decay_below_the_base_is_said_so() -> None:
    generation, text = first(Run(1, held=lambda g: 0.7 if g == 0 else 0.25), "decay")
    assert generation == 6  # three evaluations after the best
    assert "of the base" in text


@pytest.mark.parametrize("seed", range(8))
def test_a_scorer_that_pays_for_any_number(seed: int) -> None:
    """The reward rises on all rows, right answers do not."""

    def fooled(g: int) -> float:
        return 0.3 + 0.6 * min(g / 8, 1.0)

    generation, text = first(Run(seed, fooled, fooled, flat), "hacking")
    assert 4 <= generation <= 14
    assert "held-out reward rose from" in text
    assert "exact" in text
    assert "mend it or stop" in text


def test_a_metric_that_falls_as_the_reward_rises() -> None:
    def metrics(g: int) -> Any:
        return {"format": min(1.0, 0.2 + 0.1 * g), "tidy": 0.9 if g == 0 else 0.3}

    run = Run(0, held=lambda g: min(0.9, 0.3 + 0.1 * g), generations=8, more={"metrics": metrics})
    generation, text = first(run, "hacking")
    assert generation <= 6
    assert "while tidy fell from 0.90 to 0.30" in text
    for entry in run.evals:
        entry["metrics"]["tidy"] = 0.9
    assert "hacking" not in run.kinds()


def test_a_first_step_by_the_format_is_no_hacking() -> None:
    """``sums``: a number alone earns a tenth, so the reward rises a little before any answer is right."""
    run = Run(0)
    for index, entry in enumerate(run.evals):
        rewards = [0.1 * (row < 10 * index) for row in range(64)]
        right = [float(row < 4) for row in range(64)]
        rewards = [max(a, b) for a, b in zip(rewards, right, strict=True)]
        entry |= {"rewards": rewards, "mean": float(np.mean(rewards)), "metrics": {"exact": 4 / 64}}
    assert "hacking" not in run.kinds()


def test_right_answers_that_rise_more_slowly_are_no_hacking() -> None:
    evals = shares((3, 4 / 64), (60, 19 / 64), (60, 19 / 64))
    assert "hacking" not in found([], evals)
    assert "hacking" in found([], [e | {"metrics": {"exact": 4 / 64}} for e in evals])


def test_replies_that_grow_while_right_answers_stand_still() -> None:
    evals = shares((20, 0.3), (36, 0.3), (36, 0.3))  # by itself too little against the error of the metric
    assert "hacking" not in found([], evals)
    text = found([], [e | {"length": length} for e, length in zip(evals, (10.0, 21.0, 25.0), strict=True)])["hacking"]
    assert "reward rose from 0.312 to 0.562 and replies went from 10 to 23 tokens" in text
    better = [
        e | {"length": n, "metrics": {"exact": m}} for e, n, m in zip(evals, (10, 25, 25), (0.3, 0.5, 0.5), strict=True)
    ]
    assert "hacking" not in found([], better)


def shares(*parts: tuple[int, float]) -> list[dict[str, Any]]:
    """Evaluations in which so many of 64 rows are paid, and that is the share of exact answers."""
    rewards = [[float(row < count) for row in range(64)] for count, _ in parts]
    return [
        evaluation(2 * i, mean=float(np.mean(r)), rewards=r, metrics={"exact": exact})
        for i, (r, (_, exact)) in enumerate(zip(rewards, parts, strict=True))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_training_rows_learned_by_heart(seed: int) -> None:
    run = Run(seed, lambda g: 0.2 + 0.8 * min(g / 10, 1.0), lambda g: 0.2, generations=32)
    generation, kind, text = next((g, f.kind, f.text) for g, f in run.told() if f.kind in ("gap", "hacking"))
    assert generation <= 24
    assert ("while the held-out reward did not" if kind == "hacking" else "held-out reward only by") in text
    for end in range(6, 33):
        evals = [e for e in run.evals if e["eval"] <= end]
        assert not {"hacking", "gap"} <= set(found(run.lines[:end], evals))  # one fault, one name


def test_a_gap_is_told_from_a_held_out_reward_that_stands_still() -> None:
    caught = 0
    for seed in range(8):
        run = Run(seed, lambda g: 0.2 + 0.8 * min(g / 10, 1.0), lambda g: 0.2 + 0.2 * min(g / 10, 1.0), generations=32)
        told = [f.text for _, f in run.told() if f.kind == "gap" and not f.ended]
        caught += bool(told)
        assert all("held-out reward only by" in text for text in told)
    assert caught >= 7, caught


def test_a_gap_is_not_judged_while_likelihood_is_in_the_reward() -> None:
    run = Run(0, lambda g: 0.2 + 0.75 * min(g / 12, 1.0), generations=40)
    assert run.kinds() & {"gap", "hacking"}
    for entry in run.lines:
        entry["loglik"] = 0.5
    assert not run.kinds() & {"gap", "hacking"}


EQUAL, APART = np.full((2, 16), 0.25), np.linspace(0, 1, 32).reshape(2, 16)


@pytest.mark.parametrize(
    ("means", "more", "evals", "cause", "advice"),
    [
        (EQUAL, {"reason": "no signal"}, [], "same reward (0.25) although there are 90", "partial credit"),
        (EQUAL, {"reason": "no signal", "distinct": 8}, [], "256 answers to 8 rows are only 8", "sigma (now 0.04)"),
        (EQUAL, {"reason": "no signal", "distinct": 1}, [], "the same one text to all 8 rows", "raise sigma"),
        (
            EQUAL * 4, {"reason": "no signal"}, [evaluation(0, rewards=[1.0] * 64)],
            "at its maximum (1 of 1)", "harder rows",
        ),
        (
            EQUAL, {"reason": "no signal", "rewards": {"plus": [None], "minus": [None]}}, [],
            "no pair of members has a usable reward", "mend the scorer",
        ),
        (APART, {"reason": "no signal", "shrink": 0.0}, [], "no more than 8 rows explain", "raise rows"),
        (APART, {"shrink": 0.01}, [], "(shrink 0.01)", "raise rows"),
    ],
    ids=["equal", "few texts", "one text", "full", "none", "noise", "nearly noise"],
)  # fmt: skip
def test_no_signal_has_its_cause_told(
    means: Any, more: dict[str, Any], evals: list[dict[str, Any]], cause: str, advice: str
) -> None:
    needed = watch.DROWNED if means is APART else watch.STUCK
    lines = [line(g, means, **more) for g in range(needed)]
    text = found(lines, evals)["no-signal"]
    assert text.startswith(f"nothing was learned in {needed} generations in a row: ")
    assert cause in text
    assert advice in text
    assert "no-signal" not in found(lines[1:], evals)
    assert "no-signal" not in found([*lines, line(needed, APART)], evals)


def test_collapse_to_one_answer() -> None:
    text = found([], [evaluation(0), evaluation(2, majority=0.9)], natural=0.2)["collapse"]
    assert "90% of the held-out answers" in text
    assert "commonest reference answer has 20%" in text
    assert "collapse" not in found([], [evaluation(0), evaluation(2, majority=0.78)])
    assert "collapse" not in found([], [evaluation(0, majority=0.9)])  # the base itself: nothing has been tuned
    assert "collapse" not in found([], [evaluation(0), evaluation(2, majority=0.9)], natural=0.85)  # they are so
    lines = [line(g, APART, majority=0.85) for g in range(3)]
    assert "of the members' answers" in found(lines)["collapse"]
    assert "collapse" not in found(lines[:2])


def test_loss_of_variety() -> None:
    text = found([], [evaluation(0, distinct=60), evaluation(2, distinct=3)], natural=0.05)["collapse"]
    assert "fell from 60 to 3 of 64" in text
    assert "collapse" not in found([], [evaluation(0, distinct=60), evaluation(2, distinct=14)], natural=0.05)
    assert "collapse" not in found(
        [], [evaluation(0, distinct=60), evaluation(2, distinct=2)], natural=0.5
    )  # yes or no
    lines = [line(g, APART, distinct=200 if g < 4 else 2) for g in range(7)]
    assert "from 200 to 2" in found(lines)["collapse"]
    assert "collapse" not in found(lines[:5])
    assert "collapse" not in found([line(g, APART, distinct=200 if g < 4 else 8) for g in range(7)])  # one per row


def test_forgetting() -> None:
    base = evaluation(0, kl=0.0, perplexity=20.0)
    text = found([], [base, evaluation(2, kl=0.8, perplexity=30.0)])["forgetting"]
    assert "0.80 nats a token" in text
    assert "from 20.0 to 30.0 (+50%" in text
    assert "kl" not in found([], [base, evaluation(2, kl=0.1, perplexity=26.0)])["forgetting"]
    assert "perplexity" not in found([], [base, evaluation(2, kl=0.6, perplexity=20.5)])["forgetting"]
    assert "forgetting" not in found([], [base, evaluation(2, kl=0.4, perplexity=24.0)])
    assert "forgetting" not in found([], [base, evaluation(2, kl=None, perplexity=None)])


def test_drift_against_its_budget() -> None:
    lines = [line(g, APART, drift=drift) for g, drift in enumerate([0.05, 0.097, 0.099, 0.098])]
    (finding,) = look(lines, [], 0.0, drift_budget=0.1)
    assert finding.kind == "drift"
    assert "drift 0.098 has reached its budget of 0.1" in finding.text
    assert look(lines, [], 0.0) == []
    assert look(lines[:3], [], 0.0, drift_budget=0.1) == []


def test_excluded_rewards_that_grow() -> None:
    lost = [[0, 1, "r0", "score: None"]] * 20 + [[0, 1, "r1", "score: nan"]] * 6
    lines = [line(g, APART, excluded=lost if g > 2 else []) for g in range(6)]
    text = found(lines)["invalid"]
    assert "from 0% at the start to 10%" in text
    assert "'score: None'" in text
    assert "invalid" not in found(lines[:5])
    assert "invalid" not in found([line(g, APART, excluded=lost) for g in range(6)])  # as ever
    assert "invalid" not in found([line(g, APART, excluded=lost[:8] if g > 2 else []) for g in range(6)])  # 3 %


def test_replies_cut_at_the_limit() -> None:
    lines = [line(g, APART, truncated=140) for g in range(3)]
    assert "55% of the replies in 3 generations were cut" in found(lines)["length"]
    assert "length" not in found(lines[:2])
    assert "length" not in found([line(g, APART, truncated=120) for g in range(3)])
    assert "50% of the held-out replies" in found([], [evaluation(0), evaluation(2, truncated=32)])["length"]
    grown = [evaluation(0, length=10.0), evaluation(2, length=31.0)]
    assert "from 10 to 31 tokens" in found([], grown)["length"]
    better = [e | {"metrics": {"exact": right}} for e, right in zip(grown, (0.1, 0.7), strict=True)]
    assert "length" not in found([], better)


def test_a_run_that_stands_still() -> None:
    means = [0.3, 0.5] + [0.45] * 10
    evals = [evaluation(2 * g, mean=mean) for g, mean in enumerate(means)]
    assert "no new best for 10 evaluations (0.500 after generation 2, 0.450 now)" in found([], evals)["stall"]
    assert "stall" not in found([], evals[:-1])
    full = [evaluation(2 * g, mean=1.0, rewards=[1.0] * 64) for g in range(12)]
    assert "at its maximum" in found([], full)["stall"]


# --- what a journal may lack -----------------------------------------------------------------------------------------


def test_a_journal_without_anything_to_judge_is_silent() -> None:
    assert look([], [], 0.0) == []
    bare = {"generation": 0, "coefs": [0.0], "keep": 1.0, "rewards": {"plus": [], "minus": []}, "excluded": []}
    assert look([bare | {"generation": g} for g in range(20)], [], 0.0) == []
    unknown = {"eval": 0, "mean": None, "se": None, "rows": 4, "rewards": [None] * 4, "metrics": {}, "majority": None}
    assert look([bare], [unknown, unknown | {"eval": 1}], 0.0) == []


def test_rows_without_a_reward_do_not_count() -> None:
    """The same decay with a third of the rows excluded here and there."""

    def peak(g: int) -> float:
        return 0.8 if 2 <= g <= 6 else 0.2

    run = Run(0, held=peak)
    rng = np.random.default_rng(5)
    for entry in run.evals:
        entry["rewards"] = [None if rng.random() < 0.3 else value for value in entry["rewards"]]
    entry = run.evals[-1]
    entry["rewards"] = [None, *entry["rewards"][1:]]
    assert "decay" in run.kinds()


# --- telling ----------------------------------------------------------------------------------------------------------


def test_a_kind_is_told_when_it_begins_and_when_it_ends() -> None:
    lines = [line(g, EQUAL if 1 <= g < 6 or g == 9 else APART, reason="no" if 1 <= g < 6 else "") for g in range(16)]
    told = [(g, f.kind, f.ended) for g, f in Watch(0.1).catch_up(lines, [])]
    assert told == [(4, "no-signal", False), (9, "no-signal", True)]
    again = [*lines, *(line(16 + g, EQUAL, reason="no") for g in range(3))]
    assert [(g, f.ended) for g, f in Watch(0.1).catch_up(again, [])] == [(4, False), (9, True), (19, False)]


def test_a_resumed_run_tells_what_an_unbroken_one_would() -> None:
    run = Run(2, held=lambda g: 0.7 if g < 8 else 0.2)
    whole = run.told()
    assert whole
    for cut in (1, 9, 13, 20):
        watcher = Watch(0.1)
        evals = [e for e in run.evals if e["eval"] <= cut]
        told = watcher.catch_up(run.lines[:cut], evals)
        count = len(evals)
        for g in range(cut + 1, len(run.lines) + 1):
            told += [(g, finding) for finding in watcher.see(run.lines[:g], run.evals[:count])]
            if g % 2 == 0:
                count += 1
                told += [(g, finding) for finding in watcher.see(run.lines[:g], run.evals[:count])]
        assert told == whole


def test_records_and_kinds() -> None:
    assert Finding("gap", "so").record(4) == {"generation": 4, "finding": "gap", "text": "so"}
    assert Finding("gap", "so", ended=True).record(4)["ended"] is True
    assert set(KINDS) == {
        "no-signal", "collapse", "hacking", "forgetting", "drift", "gap", "invalid", "length", "decay", "stall",
    }  # fmt: skip


def test_nothing_of_the_journal_is_changed() -> None:
    run = Run(0)
    before = json.dumps([run.lines, run.evals])
    run.told()
    assert json.dumps([run.lines, run.evals]) == before


def test_the_module_needs_nothing_else_of_edgees() -> None:
    tree = ast.parse(Path(watch.__file__).read_text(encoding="utf-8"))
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name and name.startswith("edgees")]


def test_the_texts_are_plain() -> None:
    assert len(watch.PROMPTS) == len(set(watch.PROMPTS)) == 8
    assert 200 <= len(watch.TEXT.split()) <= 300
    assert watch.TEXT.isascii()
