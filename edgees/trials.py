"""Which context is better, told by the very rollouts that teach the weights. Pure: numbers in, numbers out.

A candidate context is tried inside a generation: in the group (set of rows) that it is dealt to, every member plays
half of its rows with the candidate and half with the context in force, and members take turns as a chessboard does. So
each row is played in both, by different members, and each member plays both. Then

- what a context does to a row is the difference between the mean rewards of the two halves of its members, and the
  members' own merits cancel in it (:func:`units`);
- what a member is worth is compared within a row and a context, so that contexts cancel in it (:func:`level`).

Evidence: if a candidate is no better and no worse, the difference on a row is as likely x as -x, so that
exp(b*x)/cosh(b*x) has the mean 1 for every b, and the product over rows is a martingale. By Ville's inequality it ever
reaches 1/error with a probability of ``error`` at most, however often one looks and whenever one stops (Ramdas et al.,
"Game-theoretic statistics and safe anytime-valid inference", Statistical Science 2023). Four values of b, relative to
the size of the differences, are mixed; that size may be taken from the same rows, as signs are fair given sizes, but
not from later ones: what was bet on a row stays as it was. The unit is the row and not the rollout: that a context
suits some rows and not others is part of what must be outweighed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BETS = (0.2, 0.5, 1.0, 2.0)
"""Values of b, in units of one over the root-mean-square difference."""
LEAVE = 2.0
"""A candidate is dropped once it is this many times less surely worse than one must be better to be adopted."""
PATIENCE = 96
"""Rows after which a candidate that is neither is dropped."""


@dataclass(frozen=True)
class Deal:
    """candidates: of each group the candidate on trial there, '' for none. arms: int8 [pairs, rows], 1: candidate."""

    candidates: tuple[str, ...]
    arms: np.ndarray

    @property
    def idle(self) -> bool:
        return not any(self.candidates)

    def of(self, pair: int, row: int) -> str:
        """What the members of a pair play their row number ``row`` with; '' for the context in force."""
        return self.candidates[pair % len(self.candidates)] if self.arms[pair, row] else ""


@dataclass
class Standing:
    """What is known of a candidate against the context in force. differences: one a row; scaled: the same, in units of
    the size that differences had when each was found. former: it was in force."""

    former: bool = False
    differences: list[float] = field(default_factory=list)
    scaled: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return float(np.mean(self.differences)) if self.differences else 0.0


@dataclass(frozen=True)
class Verdict:
    """What a generation says. units: differences by candidate; evidence: log of it that the candidate is better, after
    the generation; adopted: '' for none; dropped: those that are not tried any longer."""

    units: Mapping[str, tuple[float, ...]]
    evidence: Mapping[str, float]
    adopted: str
    dropped: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "units": {name: list(values) for name, values in self.units.items()}, "evidence": dict(self.evidence),
            "adopted": self.adopted, "dropped": list(self.dropped),
        }  # fmt: skip


class Trials:
    """Candidates against the context in force, from the first generation on: a fold over proposals and verdicts.

    first: digest of the context that the run begins with. error: bound on the probability that a candidate which makes
    no difference is adopted.
    """

    def __init__(self, first: str, error: float) -> None:
        self.present = first
        self.error = error
        self.standings: dict[str, Standing] = {}

    @property
    def new(self) -> int:
        """Candidates on trial that were never in force."""
        return sum(not s.former for s in self.standings.values())

    def propose(self, digests: Sequence[str]) -> None:
        """These are to be tried."""
        for digest in digests:
            if digest != self.present:
                self.standings.setdefault(digest, Standing())

    def deal(self, pairs: int, groups: int, rows: int) -> Deal:
        """Which group of a generation tries what: the most promising first, each with a bonus for how little is known
        of it (upper confidence bound)."""
        chosen = [""] * groups
        taken = dict.fromkeys(self.standings, 0)
        scale = self._scale({})
        for group in range(groups if self.standings else 0):
            total = 1 + sum(len(s.differences) + rows * taken[name] for name, s in self.standings.items())
            best, value = "", -math.inf
            for name, s in self.standings.items():
                n = len(s.differences) + rows * taken[name]
                bound = s.mean / scale + math.sqrt(2 * math.log(total) / n) if n else math.inf
                if bound > value:
                    best, value = name, bound
            chosen[group] = best
            taken[best] += 1
        arms = np.zeros((pairs, rows), np.int8)
        for pair in range(pairs):
            if chosen[pair % groups]:
                arms[pair] = (pair // groups + np.arange(rows)) % 2
        return Deal(tuple(chosen), arms)

    def judge(self, deal: Deal, rewards: np.ndarray) -> Verdict:
        """What a generation's rewards (float64 [pairs, 1 or 2, rows], NaN = excluded) say; changes nothing."""
        found = units(deal, rewards)
        scale = self._scale(found)
        better: dict[str, float] = {}
        means: dict[str, float] = {}
        dropped = []
        for name, standing in self.standings.items():
            values = np.array([*standing.differences, *found.get(name, ())])
            bets = np.array([*standing.scaled, *(x / scale for x in found.get(name, ()))])
            better[name], worse = evidence(bets), evidence(-bets)
            means[name] = float(values.mean()) if len(values) else 0.0
            hopeless = (len(values) and worse >= math.log(1 / (LEAVE * self.error))) or len(values) >= PATIENCE
            if hopeless and better[name] < math.log(1 / self.error):
                dropped.append(name)
        winners = [name for name, value in better.items() if value >= math.log(1 / self.error)]
        adopted = max(winners, key=lambda name: means[name], default="")
        return Verdict({name: tuple(values) for name, values in found.items()}, better, adopted, tuple(dropped))

    def take(self, verdict: Mapping[str, Any]) -> None:
        """Go on from a verdict as recorded (:meth:`Verdict.to_dict`).

        What an adopted context has replaced stays on trial, so that later evidence can bring it back; all that is
        known of the others was against it, and is forgotten.
        """
        scale = self._scale(verdict["units"])
        for name, values in verdict["units"].items():
            self.standings[name].differences += values
            self.standings[name].scaled += [x / scale for x in values]
        for name in verdict["dropped"]:
            del self.standings[name]
        adopted = verdict["adopted"]
        if adopted:
            del self.standings[adopted]
            self.standings = {name: Standing(s.former) for name, s in self.standings.items() if not s.former}
            self.standings[self.present] = Standing(former=True)
            self.present = adopted

    def _scale(self, more: Mapping[str, Sequence[float]]) -> float:
        """Root-mean-square of all differences."""
        known = [x for s in self.standings.values() for x in s.differences]
        values = np.array([*known, *(x for xs in more.values() for x in xs)])
        return float(np.sqrt(np.mean(values**2))) if len(values) and np.any(values) else 1.0


def units(deal: Deal, rewards: np.ndarray) -> dict[str, list[float]]:
    """By candidate, a number for each row it was played on: mean reward with it less that with the context in force."""
    groups = len(deal.candidates)
    found: dict[str, list[float]] = {}
    for group, name in enumerate(deal.candidates):
        if not name:
            continue
        mine, arms = rewards[group::groups], deal.arms[group::groups]
        for row in range(rewards.shape[2]):
            sides = [mine[arms[:, row] == arm, :, row] for arm in (1, 0)]
            sides = [side[np.isfinite(side)] for side in sides]
            # As many on each side: of skewed rewards the mean of three differs from that of two in no fair way.
            if each := min(side.size for side in sides):
                found.setdefault(name, []).append(float(sides[0][:each].mean() - sides[1][:each].mean()))
    return found


def level(deal: Deal, rewards: np.ndarray) -> np.ndarray:
    """The rewards as if all had played in the context in force: of each row and group, those with the candidate are
    moved to the mean of the others. What is left tells members apart, and not contexts."""
    groups = len(deal.candidates)
    found = np.array(rewards, np.float64)
    for group, name in enumerate(deal.candidates):
        if not name:
            continue
        mine, arms = found[group::groups], deal.arms[group::groups]
        for row in range(found.shape[2]):
            side, other = mine[arms[:, row] == 1, :, row], mine[arms[:, row] == 0, :, row]
            if np.isfinite(side).any() and np.isfinite(other).any():
                mine[arms[:, row] == 1, :, row] = side + (np.nanmean(other) - np.nanmean(side))
    return found


def evidence(scaled: np.ndarray) -> float:
    """Natural logarithm of the mixed martingale: 0 for nothing known. scaled: float64 [n], see :class:`Standing`."""
    if not len(scaled):
        return 0.0
    x = np.asarray(scaled, np.float64)
    logs = [float(np.sum(b * x - (np.logaddexp(b * x, -b * x) - math.log(2.0)))) for b in BETS]
    top = max(logs)
    return top + math.log(sum(math.exp(v - top) for v in logs) / len(BETS))
