"""From rewards to a step: shaping, shrink, drift budget. Pure: numbers in, numbers out.

The estimate is paired: ``d[p]``, half the difference between the mean rewards of the two members of a pair, over the
rows that have a reward for both. One-sided populations (a single member a "pair") have the difference to the mean of
all members on the same row instead. What a step does with ``d`` depends on the shaping:

- ``zscore``: ``z = d / std(F)``, F the mean rewards of all members;
- ``ranks``: the same on centred ranks of F instead of F;
- ``raw``: ``z = d / sigma``, the plain estimate of the gradient in reward units per relative step.

In all three the expected step does not change when sigma does (as long as the reward is smooth over sigma), so lr
means the same at any sigma: with ``zscore`` and ``ranks`` each update moves every tensor by about ``lr/sqrt(P)`` of
its RMS, with ``raw`` by lr times the slope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SHAPINGS = ("zscore", "ranks", "raw")


@dataclass(frozen=True)
class Fitness:
    """mean: float64 [P, 1 or 2], over rows valid for all signs (NaN: no such row); d, se: float64 [P]; rows: int [P].

    ``se`` is the standard error of ``d`` from the spread over rows, NaN with fewer than two rows.
    """

    mean: np.ndarray
    d: np.ndarray
    se: np.ndarray
    rows: np.ndarray
    groups: int = 1

    @property
    def merits(self) -> np.ndarray:
        """Of each member, comparable over groups and free of which rows it answered: float64 like ``mean``.

        One-sided: ``d``. Pairs: ``mean`` less that of the group.
        """
        if self.mean.shape[1] == 1:
            return self.d[:, None]
        found: np.ndarray = self.mean.copy()
        for g in range(self.groups):
            part = found[g :: self.groups]
            if np.isfinite(part).any():
                part -= np.nanmean(part)
        return found

    @property
    def flat(self) -> bool:
        """All equal up to rounding: dividing by such a spread would blow rounding errors up to a full step."""
        known = np.isfinite(self.d)
        scale = max(1.0, float(np.abs(self.mean[known]).max())) if known.any() else 1.0
        return not known.any() or float(np.ptp(self.merits[known])) <= 1e-12 * scale


@dataclass(frozen=True)
class Update:
    """One generation's step. coefs, keep: float32-exact. ``reason`` says in plain words why nothing moves, else ''."""

    fitness: Fitness
    z: tuple[float, ...]
    coefs: tuple[float, ...]
    keep: float
    shrink: float
    reason: str

    @property
    def step(self) -> float:
        """Expected RMS of the step relative to rho (independent unit noise)."""
        return math.sqrt(sum(c * c for c in self.coefs))


def fitness(rewards: np.ndarray, groups: int = 1) -> Fitness:
    """Pair signals of ``rewards`` (float64 [P, 1 or 2, rows], NaN = excluded).

    groups: pair p answered the rows of group ``p % groups``; only members of a group are compared on a row.
    """
    rewards = np.asarray(rewards, np.float64)
    pairs, signs = rewards.shape[:2]
    group = np.arange(pairs) % groups
    mean = np.full((pairs, signs), np.nan)
    everyone = np.zeros((groups, rewards.shape[2]))
    if signs == 1:
        told = np.isfinite(rewards[:, 0])
        for g in range(groups):
            own = told[group == g]
            everyone[g] = np.where(own, rewards[group == g, 0], 0.0).sum(axis=0) / np.maximum(own.sum(axis=0), 1)
    d = np.full(pairs, np.nan)
    se = np.full(pairs, np.nan)
    count = np.zeros(pairs, np.int64)
    for p in range(pairs):
        both = np.isfinite(rewards[p]).all(axis=0)
        n = count[p] = int(both.sum())
        if n == 0:
            continue
        values = rewards[p][:, both]
        mean[p] = values.mean(axis=1)
        half = (values[0] - values[1]) / 2 if signs == 2 else values[0] - everyone[group[p], both]
        d[p] = half.mean()
        if n > 1:
            se[p] = half.std(ddof=1) / math.sqrt(n)
    return Fitness(mean, d, se, count, groups)


def shape(fit: Fitness, shaping: str, sigma: float) -> np.ndarray:
    """z, float64 [P]: 0 for pairs without a signal, and everywhere if all members did equally well."""
    z = np.zeros(len(fit.d))
    known = np.isfinite(fit.d)
    values = fit.merits[known]
    if fit.flat:
        return z
    if shaping == "raw":
        z[known] = fit.d[known] / sigma
    elif shaping == "ranks":
        u = (_ranks(values.reshape(-1)) / max(values.size - 1, 1) - 0.5).reshape(values.shape)
        z[known] = (u[:, 0] - u[:, 1]) / 2 / u.std() if values.shape[1] == 2 else u[:, 0] / u.std()
    elif shaping == "zscore":
        z[known] = fit.d[known] / values.std()
    else:
        raise ValueError(f"shaping {shaping!r}: one of {', '.join(SHAPINGS)}")
    return z


def shrinkage(fit: Fitness) -> float:
    """max(0, 1 - mean(se^2)/mean(d^2)): the share of the pair signals that is not noise; 1 where rows cannot tell."""
    known = np.isfinite(fit.d)
    estimated = known & np.isfinite(fit.se)
    signal = float(np.mean(fit.d[known] ** 2)) if known.any() else 0.0
    if not estimated.any() or signal == 0.0:
        return 1.0 if signal else 0.0
    return max(0.0, 1.0 - float(np.mean(fit.se[estimated] ** 2)) / signal)


def update(
    rewards: np.ndarray,
    *,
    lr: float,
    sigma: float,
    shaping: str = "zscore",
    shrink: bool = True,
    decay: float = 0.0,
    drift: float = 0.0,
    drift_budget: float = 0.0,
    spread: float = 1.0,
    groups: int = 1,
) -> Update:
    """What one generation's rewards (float64 [P, 1 or 2, rows], NaN = excluded) say about the weights.

    ``groups``: see :func:`fitness`.

    ``lr``, ``sigma``: this generation's, relative to rho. ``drift``: RMS of the learned delta relative to rho before
    the step. With a ``drift_budget`` B the old delta is shortened just so far that the new one is expected to end at B
    (step and delta are nearly orthogonal): ``keep = sqrt(B^2 - step^2)/drift`` where that is less than ``1 - decay``;
    a step longer than B is cut to B. As ``keep`` is recorded, replay needs no knowledge of the rule.
    """
    fit = fitness(rewards, groups)
    pairs = len(fit.d)
    z = shape(fit, shaping, sigma)
    factor = shrinkage(fit) if shrink else 1.0
    coefs = np.asarray(lr * factor * z / pairs, np.float32)
    keep = float(np.float32(1.0 - decay))
    reason = _reason(fit, z, factor, shrink)
    if reason:  # decay and budget act with a step, never alone: no signal leaves the weights as they are
        return Update(fit, tuple(z.tolist()), (0.0,) * pairs, 1.0, factor, reason)
    if drift_budget > 0.0:
        length = spread * float(np.sqrt(np.sum(coefs.astype(np.float64) ** 2)))
        if length > drift_budget:
            coefs = np.asarray(coefs * (drift_budget / length), np.float32)
            length = drift_budget
        room = math.sqrt(max(0.0, drift_budget**2 - length**2))
        if keep * drift > room:
            keep = float(np.float32(room / drift))
    return Update(fit, tuple(z.tolist()), tuple(float(c) for c in coefs), keep, factor, reason)


def loglik_weight(fraction: float, first: float, hold: float, end: float) -> float:
    """Weight of the likelihood at ``fraction`` of the run: ``first`` until ``hold``, then straight to 0 at ``end``."""
    if fraction <= hold and fraction < end:
        return first
    if fraction >= end:
        return 0.0
    return first * (end - fraction) / (end - hold)


def mix(rewards: np.ndarray | None, likelihood: np.ndarray | None, weight: float) -> np.ndarray:
    """(1 - weight)*reward + weight*likelihood; either may be None where its weight is 0."""
    if rewards is None or likelihood is None:
        only = rewards if likelihood is None else likelihood
        assert only is not None
        return only
    return (1.0 - weight) * rewards + weight * likelihood


def _reason(fit: Fitness, z: np.ndarray, factor: float, shrink: bool) -> str:
    known = np.isfinite(fit.d)
    if not known.any():
        return "no signal: no pair has a row with a reward for both of its members; nothing is updated"
    values = fit.mean[known]
    if fit.flat:
        return (
            f"no signal: all {values.size} members got the same mean reward ({values.flat[0]:.4g}), so nothing tells "
            "them apart and nothing is updated. A reward with partial credit, an example in the prompt, a larger "
            "sigma or more rows give members something to differ in"
        )
    if not z.any():
        return "no signal: the two members of every pair did equally well; nothing is updated"
    if shrink and factor == 0.0:
        return (
            "no signal: the differences between members are no larger than the rows' own spread explains (shrink 0); "
            "nothing is updated. More rows per generation make the signal visible"
        )
    return ""


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value from 0, ties sharing their mean rank."""
    order = np.sort(values)
    low = np.searchsorted(order, values, side="left")
    high = np.searchsorted(order, values, side="right")
    return (low + high - 1) / 2.0
