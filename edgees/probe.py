"""How much a rollout teaches: the efficiency probe. What to perturb, how, and how far, from one generation of members.

For a small step along the estimate of P pairs, a second-order expansion of the mean reward gives the gain
``lr g^2 - lr^2 g^2 H / 2P`` with g the reward's slope per relative step, H the trace of its curvature. Its maximum is
``P * efficiency``, and both g and H are seen at the perturbation's own size:

    efficiency = (mean d^2 - mean se^2) / (4 * drop)        reward gained per antithetic pair, at most

d: pair signals, se: their standard errors over rows (:mod:`edgees.update`), drop: mean reward of the centre less that
of the members on the same rows. It is a bound for few pairs: with many, curvature along the slope itself, which this
formula leaves out, limits the step (measured: docs/log.md). Every pair answers rows of its own, so that a few odd rows
do not decide.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgees import config as settings
from edgees import opening, rewards, rollout
from edgees.backends.base import CENTRE, Member
from edgees.config import SETTINGS, Config
from edgees.delta import Delta
from edgees.errors import NoSignal, UsageError
from edgees.population import Population, RowOrder
from edgees.rollout import Trajectory
from edgees.tasks.rows import Row
from edgees.update import fitness, loglik_weight, mix, shrinkage

VARIED = ("sigma", "params", "noise", "rank", "amplitudes", "loglik", "scope", "factors", "temperature", "attempts",
          "system")  # fmt: skip
"""Settings whose choices can be compared."""
LADDER = (0.01, 0.02, 0.04, 0.08)
"""What ``sigma = 0`` chooses from."""
CLOSE = 0.7
"""So large a part of the highest shrink will do."""


@dataclass(frozen=True)
class Efficiency:
    """pairs, rows: that it was measured with. signal: variance of d that rows do not explain. drop: reward that
    perturbation costs. efficiency, error: reward a pair can gain, and its standard error (None: the members did not do
    worse than the centre, so there is no bound). per_token: the same for 1000 tokens. shrink: share of d^2 that
    is signal. lr: the best, for z-scored rewards and the configured pairs, at most.
    """

    pairs: int
    rows: int
    signal: float
    drop: float
    drop_error: float
    efficiency: float | None
    error: float | None
    per_token: float | None
    shrink: float
    lr: float | None


def efficiency(rewards: np.ndarray, centre: np.ndarray, tokens: int = 0, *, sigma: float, pairs: int = 0) -> Efficiency:
    """From ``rewards`` float64 [P, 2, rows] of the members and ``centre`` float64 [P, rows] on each pair's rows (NaN:
    excluded). tokens: that the members took. pairs: of the run that lr is for (0: P). Errors by jackknife over pairs.

    :raises ValueError: fewer than three pairs with at least two rows each.
    """
    valid = np.isfinite(rewards).all(axis=1) & np.isfinite(centre)
    use = valid.sum(axis=1) >= 2
    if int(use.sum()) < 3:
        raise ValueError("an efficiency needs three pairs with two rows each")
    masked = np.where(valid[:, None, :], rewards, np.nan)[use]
    fit = fitness(masked)
    drops = np.array(
        [float(np.nanmean(c[v]) - m.mean()) for c, v, m in zip(centre[use], valid[use], fit.mean, strict=True)]
    )
    signals = fit.d**2 - fit.se**2
    count = len(drops)
    signal, drop = float(signals.mean()), float(drops.mean())
    value = error = per_token = lr = None
    if drop > 0.0:
        value = signal / (4 * drop)
        others = [(signals.sum() - s) / (4 * (drops.sum() - x)) for s, x in zip(signals, drops, strict=True)]
        error = math.sqrt((count - 1) / count * float(np.sum((np.array(others) - np.mean(others)) ** 2)))
        per_token = 1000 * value * count / tokens if tokens else None
        # coefficients shrink*sigma*d/(2 drop) a pair, in units of lr*shrink*d/(std*P)
        lr = (pairs or count) * sigma * float(np.sqrt(np.mean(fit.d**2))) / (2 * drop)
    total = float(np.mean(fit.d**2))
    return Efficiency(
        count, int(valid.shape[1]), signal, drop, float(drops.std(ddof=1)) / math.sqrt(count), value, error, per_token,
        max(0.0, signal / total) if total else 0.0, lr,
    )  # fmt: skip


def choices(base: Config, vary: Sequence[str]) -> list[tuple[dict[str, Any], Config]]:
    """Every combination of ``NAME=VALUE|VALUE|...``, with the configuration that it makes of ``base``.

    :raises UsageError: not of that form, or a setting that cannot be varied, or a bad value.
    """
    names, values = [], []
    for item in vary:
        name, equals, rest = item.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in VARIED:
            raise UsageError(f"--vary {item!r} is not NAME=VALUE|VALUE", f"NAME is one of {', '.join(VARIED)}")
        if name in names:
            raise UsageError(f"--vary names {name} twice", f"write {name}=A|B")
        names.append(name)
        values.append([part.strip() for part in rest.split("|")])
    given = {name: getattr(base, name) for name in base.given}
    found = []
    for combination in itertools.product(*values):
        chosen = dict(zip(names, combination, strict=True))
        typed = {n: (v,) if SETTINGS[n].type == "tuple[str, ...]" else v for n, v in chosen.items()}
        found.append((chosen, settings.load(None, given | typed)))
    return found


def probe(base: Config, vary: Iterable[str] = ()) -> dict[str, Any]:
    """Measure every choice on the same rows and, where tensors and noise are the same, the same members.

    Returns, JSON-ready: task; choices, of {"choice", **Efficiency} each; best (index, by tokens, or None).
    Nothing is written but temporary files.

    :raises EdgeesError: as :func:`edgees.tune.tune`.
    """
    measured: list[dict[str, Any]] = []
    name = ""
    for chosen, config in choices(base, list(vary)):
        with ExitStack() as stack:
            setup = opening.open_setup(config, stack)
            name = setup.task.name
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgees-probe-")))
            delta = stack.enter_context(
                Delta.create(folder / "delta.safetensors", opening.spec_of(setup.config, setup.engine))
            )
            setup.engine.attach(delta)
            measured.append({"choice": chosen, **asdict(measure(setup))})
    known = [i for i, m in enumerate(measured) if m["per_token"] is not None]
    best = max(known, key=lambda i: measured[i]["per_token"], default=None)
    return {"task": name, "choices": measured, "best": best}


def measure(setup: opening.Setup) -> Efficiency:
    """One generation of ``pairs`` pairs, each on ``rows`` rows of its own, its delta attached; nothing is updated.

    :raises UsageError: fewer than three pairs or two rows are asked for, or too few rewards are valid.
    """
    c, task = setup.config, setup.task
    order = RowOrder(c.seed, len(task.train), c.rows)
    sigma = (c.sigma or LADDER[1]) if c.sigma_abs is None else c.sigma_abs
    if c.pairs < 3 or order.count < 2:
        raise UsageError("a probe needs at least three pairs and two rows", "--pairs 16 --rows 4")
    rows = [[task.train[i] for i in order.rows(pair)] for pair in range(c.pairs)]
    members = [(m, row) for m in Population(c.seed, c.pairs).ask(0, sigma) for row in rows[m.pair]]
    seen = {row.id: row for part in rows for row in part}
    values, tokens, _ = _rewards(setup, members)
    centre, _, _ = _rewards(setup, [(CENTRE, row) for row in seen.values()])
    of_row = dict(zip(seen, centre, strict=True))
    try:
        return efficiency(
            values.reshape(c.pairs, 2, order.count), np.array([[of_row[r.id] for r in part] for part in rows]), tokens,
            sigma=sigma,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(
            f"{error}, and too few of their rewards are valid", "see the scorer, or raise pairs"
        ) from error


@dataclass(frozen=True)
class Seen:
    """What members of one sigma showed. spread: standard deviation of their mean rewards; shrink: share of the pairs'
    differences that is no noise of rows; reward: mean."""

    sigma: float
    spread: float
    shrink: float
    reward: float


def choose_sigma(setup: opening.Setup, say: Callable[[str], None] = lambda text: None) -> float:
    """A sigma at which members differ, for setting ``sigma = 0``; tried with a delta attached, for about the rollouts
    of a generation.

    The smallest of :data:`LADDER` at which the pairs' differences stand out of the rows' own spread nearly as much as
    they do anywhere: a larger one sees no more and pays more curvature. What was seen is said.

    :raises NoSignal: all rewards are equal at every sigma; the message says why, as far as the episodes show it.
    """
    c, task = setup.config, setup.task
    order = RowOrder(c.seed, len(task.train), c.rows)
    rows = [task.train[i] for i in order.rows(0)]
    pairs = max(3, -(-c.members // (2 * len(LADDER))))
    seen: list[Seen] = []
    played: list[Trajectory] = []
    for sigma in LADDER:
        members = Population(c.seed, pairs).ask(0, sigma)
        values, _, answers = _rewards(setup, rollout.every(members, rows))
        played += answers
        fit = fitness(values.reshape(pairs, 2, len(rows)))
        known = fit.mean[np.isfinite(fit.mean)]
        spread = float(known.std()) if known.size else 0.0
        seen.append(
            Seen(
                sigma, spread, shrinkage(fit) if len(rows) > 1 else 1.0, float(known.mean()) if known.size else math.nan
            )
        )
    told = ", ".join(f"{s.sigma:g}: reward {s.reward:.4g} +- {s.spread:.2g}, shrink {s.shrink:.2f}" for s in seen)
    useful = [s for s in seen if s.spread > 1e-12 * max(1.0, abs(s.reward))]
    if not useful:
        raise NoSignal(
            f"all rewards are equal ({seen[0].reward:.4g}) at every sigma tried, {LADDER[0]:g} to {LADDER[-1]:g}: "
            f"no signal, because {_why(played)}",
            "members must differ in reward: partial credit, an example in the prompt, an easier start, or --sigma to "
            "try it all the same",
        )
    most = max(s.shrink for s in useful)
    chosen = next((s for s in useful if s.shrink >= CLOSE * most), None) if most else None
    chosen = chosen or max(useful, key=lambda s: s.spread / s.sigma)
    say(f"sigma = {chosen.sigma:g}, chosen by a probe (sigma: members' mean reward +- spread): {told}")
    if not most:
        say("the rows' own spread explains all differences between members so far: more rows or pairs may be needed")
    return chosen.sigma


def _why(played: Sequence[Trajectory]) -> str:
    """What the trajectories have in common that explains equal rewards."""
    if not played:
        return "the likelihood of the reference answers does not depend on the weights that are tuned"
    count = len(played)
    broken = [t for t in played if t.fault]
    truncated = sum(t.outcome in ("truncated", "length") for t in played)
    overflow = sum(t.outcome == "overflow" for t in played)
    invalid = [t.parts["invalid"] for t in played if "invalid" in t.parts]
    texts = {t.completion.strip() for t in played}
    if len(broken) == count:
        return f"every episode failed ({broken[0].fault})"
    if invalid and min(invalid) >= 1.0:
        return "every action was invalid"
    if overflow == count:
        return "the context was full in every episode"
    if truncated == count:
        return "every episode was cut at its limit of turns or tokens"
    if len(texts) == 1:
        return f"all {count} answers are the same text"
    return f"the scorer gave the same to all of {len(texts)} different answers"


def _rewards(setup: opening.Setup, rollouts: Sequence[tuple[Member, Row]]) -> tuple[np.ndarray, int, list[Trajectory]]:
    """Rewards as in a run's first generation, float64, NaN where there is none; tokens processed; what was played."""
    c = setup.config
    weight = loglik_weight(0.0, c.loglik, c.loglik_hold, c.loglik_end)
    replies = setup.replies(0, c.temperature)
    tokens, last = 0, 0

    def count(_: int, so_far: int) -> None:
        nonlocal last
        last = so_far

    scored = likely = None
    answers: list[Trajectory] = []
    if weight < 1.0:
        answers = rollout.play(setup.engine, rollouts, replies, count)
        tokens, last = tokens + last, 0
        scored = np.array(rewards.judge(setup.scorer, answers).rewards)
    if weight > 0.0:
        scores = rollout.likelihood(setup.engine, rollouts, replies, count)
        tokens += last
        likely = np.array([math.nan if s is None else s.mean for s in scores])
    return mix(scored, likely, weight), tokens, answers


def lines(found: dict[str, Any]) -> list[str]:
    """A table for people."""
    head = ["choice", "gain a pair", "gain / 1000 tokens", "drop", "shrink", "lr at most"]
    table = [head]
    for m in found["choices"]:
        name = ", ".join(f"{k}={v}" for k, v in m["choice"].items()) or "as configured"
        gain = "-" if m["efficiency"] is None else f"{m['efficiency']:.4f} +- {m['error']:.4f}"
        token = "-" if m["per_token"] is None else f"{m['per_token']:.5f}"
        drop = f"{m['drop']:.4f} +- {m['drop_error']:.4f}"
        table.append([name, gain, token, drop, f"{m['shrink']:.2f}", "-" if m["lr"] is None else f"{m['lr']:.3f}"])
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    if any(m["efficiency"] is None for m in found["choices"]):
        out.append(
            "-: members did no worse than the centre, so the curvature bounds nothing here (a base at the floor)"
        )
    if any(m["shrink"] == 0.0 for m in found["choices"]):
        out.append("shrink 0: rows explain all differences between members: more rows or pairs, or another sigma")
    return out
