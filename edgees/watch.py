"""Watchdogs: is a run learning nothing, being fooled by its scorer, or forgetting? Pure functions of the journal.

:func:`look` says what is wrong at the journal's end; :class:`Watch` tells each kind once per onset, and its state is
itself a function of the journal, so a resumed run says just what an uninterrupted one would have said.

Evidence, not impressions: held-out evaluations score the same rows each time, so they are compared by paired
differences; a best is chosen on one half of the rows and measured on the other, for the best of many is partly luck;
training rewards are compared against the scatter from one generation to the next, and that of rows. An alarm needs
:data:`SURE` standard errors, because a run is looked at a hundred times. ``None`` in the journal means "unknown", and
whatever a journal lacks (no held-out rows, no metrics, no KL) is simply not judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Entry = Mapping[str, Any]
"""A line of the journal: ``History.lines`` or ``History.evals``."""

SURE = 3.5
"""Standard errors that an alarm needs: 2 in 10,000 by chance at one look, below 2 % over a run of many."""
LIKELY = 2.0
"""Standard errors for a condition that only stands beside such evidence."""
TOGETHER = 2.5
"""Standard errors for each of several conditions that must hold together."""
RECENT = 3
"""Generations that say how things stand now."""
NOW = 2
"""Evaluations that say how things stand now."""
MIN_ROWS = 8
"""Rows below which shares and standard errors mean little."""

STUCK = 3
"""Generations in a row without any signal; members that all get the same reward do not begin to differ by waiting."""
DROWNED = 5
"""Generations in a row with shrink about 0: a weak but real signal has such a generation in every third or so."""
FAINT = 0.02
"""A shrink below this moves nothing worth the name."""
FULL = 0.98
"""Share of the highest reward from which on there is next to nothing left to learn."""
MAJORITY = 0.8
"""Share of one text among the answers from which on they have collapsed (if the reference answers have not)."""
FEWER = 0.25
"""Different answers, as a fraction of those at the start, below which variety has been lost."""
BEHIND = 0.5
"""A metric of right answers should rise at least this fraction of the reward's rise (both in units of their range)."""
LENGTH_FACTOR = 2.0
"""Change of reply length that explains a rising reward while the metrics stand still."""
LENGTH_GROWTH = 3.0
"""Growth of reply length that is told by itself."""
TRUNCATED = 0.5
"""Share of replies cut at the limit: beyond it most rewards judge half a reply."""
INVALID = 0.05
"""Share of excluded rewards below which single odd answers explain them."""
PATIENCE = 3
"""Evaluations that must lie behind the best before its loss counts as decay and not as a bad evaluation."""
STALLED = 10
"""Evaluations without a new best that count as standing still."""
AT_BUDGET = 0.95
"""Share of the drift budget from which on old learning is given up for new."""
MAX_KL = 0.5
"""Nats a token from the base on the fixed prompts. A judgement: at a half, what the base would have said has on
(geometric) average fallen to exp(-0.5) = 60 % of its probability, at every token of replies nobody meant to change."""
MAX_PERPLEXITY = 1.25
"""Factor on the base's perplexity on general text. A judgement: 0.22 nats a token, beyond anything that the rounding of
weights or a change of style explains on text that is plain and the same each time."""
CORRECT = ("exact", "accuracy", "correct", "solved", "success", "pass")
"""Names of metrics that count right answers; a task without one is judged by all its metrics."""
QUIET = 3
"""Looks without a finding after which it has ended: what flickers at a threshold is told once."""


@dataclass(frozen=True)
class Finding:
    """kind: one of :data:`KINDS`. text: one sentence, with the figures and what to do. ended: it no longer holds.

    For people: ``f"{kind}: {text}"``.
    """

    kind: str
    text: str
    ended: bool = False

    def record(self, generation: int) -> dict[str, Any]:
        """A line of metrics.jsonl. generation: updates made so far."""
        ended = {"ended": True} if self.ended else {}
        return {"generation": generation, "finding": self.kind, "text": self.text, **ended}


@dataclass(frozen=True)
class _Journal:
    lines: Sequence[Entry]
    evals: Sequence[Entry]
    natural: float
    drift_budget: float

    @property
    def scored(self) -> list[Entry]:
        return [e for e in self.evals if e.get("mean") is not None]

    @property
    def tuned(self) -> list[Entry]:
        """Evaluations of something learned; the first one is of the base."""
        return [e for e in self.evals if e["eval"] > 0]

    @property
    def highest(self) -> float | None:
        """The highest reward of a held-out row so far, None where none was scored."""
        values = [v for e in self.evals for v in e.get("rewards") or () if v is not None]
        return max(values, default=None)


def look(lines: Sequence[Entry], evals: Sequence[Entry], natural: float, *, drift_budget: float = 0.0) -> list[Finding]:
    """What is wrong with a run at the end of its journal; at most one finding of each kind.

    natural: share of the commonest reference answer among the held-out rows (0: no reference answers).
    drift_budget: the setting of that name (0: none).
    """
    journal = _Journal(lines, evals, natural, drift_budget)
    found = ((kind, detector(journal)) for kind, detector in _DETECTORS.items())
    return [Finding(kind, text) for kind, text in found if text]


@dataclass
class Watch:
    """Tells each finding when it begins and when it has ended. ``active``: kinds told, and looks since last found."""

    natural: float
    drift_budget: float = 0.0
    active: dict[str, int] = field(default_factory=dict)

    def see(self, lines: Sequence[Entry], evals: Sequence[Entry]) -> list[Finding]:
        """To be called after every generation and every evaluation: what began or ended with it."""
        found = look(lines, evals, self.natural, drift_budget=self.drift_budget)
        news = [finding for finding in found if finding.kind not in self.active]
        for kind in self.active:
            self.active[kind] += 1
        self.active |= {finding.kind: 0 for finding in found}
        for kind in [kind for kind, looks in self.active.items() if looks >= QUIET]:
            del self.active[kind]
            news.append(Finding(kind, "what was found before no longer holds", ended=True))
        return news

    def catch_up(self, lines: Sequence[Entry], evals: Sequence[Entry]) -> list[tuple[int, Finding]]:
        """Live through a journal from its start, as the run did: (updates made, finding) of all that was told."""
        told: list[tuple[int, Finding]] = []
        seen = 0
        for generation in range(len(lines) + 1):
            if generation:
                told += [(generation, finding) for finding in self.see(lines[:generation], evals[:seen])]
            while seen < len(evals) and evals[seen]["eval"] <= generation:
                seen += 1
                told += [(generation, finding) for finding in self.see(lines[:generation], evals[:seen])]
        return told


# --- no signal ------------------------------------------------------------------------------------------------------


def _no_signal(j: _Journal) -> str:
    flat = _trailing(j.lines, lambda line: bool(line.get("reason")) and not _drowned(line))
    weak = _trailing(j.lines, lambda line: bool(line.get("reason")) or _drowned(line))
    if len(flat) < STUCK and len(weak) < DROWNED:
        return ""
    lines = flat if len(flat) >= STUCK else weak
    last = lines[-1]
    start = f"nothing was learned in {len(lines)} generations in a row: "
    values = _members(last)
    if not values:
        return start + "no pair of members has a usable reward, so look at why rewards are excluded and mend the scorer"
    mean, top = sum(values) / len(values), j.highest
    if not last.get("loglik") and top is not None and top > 0 and min(values) >= FULL * top:
        return (
            start + f"the training reward is at its maximum ({mean:.3g} of {top:.3g}), so nothing is left to learn on "
            "these rows; stop here, or give harder rows or a finer reward"
        )
    distinct, rows = last.get("distinct"), len(last.get("rows") or ())
    if distinct == 1 and rows > 1:
        return (
            start + f"every member gives the same one text to all {rows} rows, so rewards cannot differ; raise sigma, "
            "put an example into the prompt, or begin with loglik"
        )
    if distinct is not None and rows and distinct <= 1.1 * rows:
        return (
            start + f"{_answers(last)} answers to {rows} rows are only {distinct} different texts, so members hardly "
            f"differ; raise sigma (now {last.get('sigma') or 0:.3g}) or add pairs"
        )
    if _drowned(last):
        return (
            start + f"members differ by no more than {rows} rows explain by chance (shrink {last.get('shrink'):.2g}); "
            "raise rows (or pairs) until shrink rises above 0.1"
        )
    many = f"although there are {distinct} different answers" if distinct is not None else "on all rows"
    return (
        start + f"all members get the same reward ({mean:.3g}) {many}, so the reward does not tell them apart; give "
        "partial credit, easier rows or an example in the prompt, or begin with loglik"
    )


def _drowned(line: Entry) -> bool:
    """Members differ, but not beyond chance."""
    values = _members(line)
    shrink = line.get("shrink")
    return shrink is not None and shrink < FAINT and bool(values) and max(values) > min(values)


def _trailing(lines: Sequence[Entry], holds: Callable[[Entry], bool]) -> list[Entry]:
    """The lines at the end for all of which it holds."""
    count = 0
    while count < len(lines) and holds(lines[-1 - count]):
        count += 1
    return list(lines[len(lines) - count :])


# --- collapse, length, invalid --------------------------------------------------------------------------------------


def _collapse(j: _Journal) -> str:
    advice = "see that no constant answer is paid, balance the rows, or lower lr"
    limit = max(MAJORITY, (1.0 + j.natural) / 2)
    if j.tuned and (last := j.tuned[-1]).get("rows", 0) >= MIN_ROWS and (last.get("majority") or 0.0) >= limit:
        return (
            f"{last['majority']:.0%} of the held-out answers are one and the same text where the commonest reference "
            f"answer has {j.natural:.0%}; {advice}"
        )
    recent = [line for line in j.lines[-RECENT:] if line.get("majority") is not None]
    rows = {row for line in recent for row in line.get("rows") or ()}
    if len(recent) == RECENT and len(rows) >= MIN_ROWS:
        share = _mean([line["majority"] for line in recent])
        if share >= limit:
            return (
                f"{share:.0%} of the members' answers in {RECENT} generations are one and the same text where the "
                f"commonest reference answer has {j.natural:.0%}; {advice}"
            )
    advice = "answers are becoming all alike: look at the traces for a text that is paid too well, or lower lr"
    if j.tuned and (before := j.evals[0].get("distinct")) and j.tuned[-1].get("distinct") is not None:
        now, count = j.tuned[-1]["distinct"], j.tuned[-1].get("rows", 0)
        if count >= MIN_ROWS and now < min(FEWER * before, _variety(j.natural, count) / 2):
            return f"different held-out answers fell from {before} to {now} of {count}; {advice}"
    first = [line for line in j.lines[:RECENT] if line.get("distinct") is not None]
    if len(j.lines) >= 2 * RECENT and len(first) == len(recent) == RECENT:
        shares = [_mean([line["distinct"] / max(_answers(line), 1) for line in part]) for part in (first, recent)]
        count = min(len(line.get("rows") or ()) for line in recent)
        floor = _variety(j.natural, count) / 2
        if shares[1] < FEWER * shares[0] and _mean([line["distinct"] for line in recent]) < floor:
            counts = [_mean([line["distinct"] for line in part]) for part in (first, recent)]
            return f"different answers a generation fell from {counts[0]:.0f} to {counts[1]:.0f}; {advice}"
    return ""


def _variety(natural: float, rows: int) -> float:
    """Different answers that right answers to ``rows`` rows must about have: if the commonest reference answer has a
    share ``natural``, there are at least 1/natural of them."""
    return (1.0 - (1.0 - natural) ** rows) / natural if natural > 0.0 else float(rows)


def _length(j: _Journal) -> str:
    advice = "raise max_tokens, or ask for short replies in the system message"
    recent = [line for line in j.lines[-RECENT:] if line.get("distinct") is not None]
    if len(recent) == RECENT:
        share = _mean([line.get("truncated", 0) / max(_answers(line), 1) for line in recent])
        if share >= TRUNCATED:
            return f"{share:.0%} of the replies in {RECENT} generations were cut at the limit of tokens; {advice}"
    if j.tuned and (last := j.tuned[-1]).get("rows"):
        share = last.get("truncated", 0) / last["rows"]
        if share >= TRUNCATED:
            return f"{share:.0%} of the held-out replies were cut at the limit of tokens; {advice}"
    lengths = _lengths(j)
    if lengths and lengths[1] >= LENGTH_GROWTH * lengths[0] and not any(c.z > LIKELY for c in _metrics(j).values()):
        return (
            f"held-out replies grew from {lengths[0]:.0f} to {lengths[1]:.0f} tokens; see in the traces whether the "
            "reward pays for length, and make it judge the answer alone"
        )
    return ""


def _lengths(j: _Journal) -> tuple[float, float] | None:
    """Mean tokens of a held-out reply: of the base, now."""
    before = j.evals[0].get("length") if j.evals else None
    now = [e["length"] for e in j.tuned[-NOW:] if e.get("length") is not None]
    return (float(before), _mean(now)) if before and now else None


def _invalid(j: _Journal) -> str:
    window = min(RECENT, len(j.lines) // 2)
    if not window:
        return ""
    first, recent = (_excluded(part) for part in (j.lines[:window], j.lines[-window:]))
    if len(j.lines) < 2 * RECENT or recent < max(INVALID, 2 * first):
        return ""
    reasons = Counter(str(item[-1]) for line in j.lines[-window:] for item in line["excluded"])
    return (
        f"excluded rewards grew from {first:.0%} at the start to {recent:.0%} in the last {window} generations, mostly "
        f"by {reasons.most_common(1)[0][0]!r}; make the scorer give such answers a low reward instead of none"
    )


def _excluded(lines: Sequence[Entry]) -> float:
    total = sum(_answers(line) for line in lines)
    return sum(len(line.get("excluded") or ()) for line in lines) / total if total else 0.0


# --- fooled, overfitted ---------------------------------------------------------------------------------------------


def _hacking(j: _Journal) -> str:
    return _paid_for_else(j) or _by_heart(j)


def _paid_for_else(j: _Journal) -> str:
    """The reward rises, and the task's own metrics do not or fall."""
    rise, pair, metrics = _heldout(j), _training(j), _metrics(j)
    risen = rise if rise is not None and rise.z > SURE else None
    if risen is not None:
        what = f"held-out reward rose from {risen.old:.3f} to {risen.new:.3f}"
    elif pair is not None and pair[0].z > SURE:
        what = f"training reward rose from {pair[0].old:.3f} to {pair[0].new:.3f}"
    else:
        return ""
    advice = "read the traces: the scorer pays for something else than right answers, so mend it or stop"
    lengths = _lengths(j)
    grown = bool(lengths and not 1 / LENGTH_FACTOR < lengths[1] / lengths[0] < LENGTH_FACTOR)
    length = f" and replies went from {lengths[0]:.0f} to {lengths[1]:.0f} tokens" if grown and lengths else ""
    for name, metric in metrics.items():
        if metric.z < -SURE:
            return f"the {what} while {name} fell from {metric.old:.2f} to {metric.new:.2f}{length}; {advice}"
    if risen is not None and metrics:
        judged = {name: m for name, m in metrics.items() if name in CORRECT} or metrics
        figures = ", ".join(f"{name} {m.old:.2f} to {m.new:.2f}" for name, m in judged.items())
        scale = _range(j)
        if all(_behind(risen, m, scale) > LIKELY and m.z < LIKELY for m in judged.values()):
            return f"the {what} while right answers did not keep up ({figures}){length}; {advice}"
        if grown and all(m.z < 1.0 for m in judged.values()):
            return f"the {what}{length} while right answers stand still ({figures}); {advice}"
    return ""


def _by_heart(j: _Journal) -> str:
    """The training reward rises and the held-out one does not."""
    pair = _training(j)
    if pair is None or pair[1].z >= 1.0 or not _overfitted(j, *pair):
        return ""
    train, held = pair
    return (
        f"training reward rose from {train.old:.3f} to {train.new:.3f} while the held-out reward did not "
        f"({held.old:.3f} to {held.new:.3f}, standard error {held.se:.3f}), so what is learned holds only for the "
        "training rows; give more rows, read the traces for a loophole in the scorer, or stop"
    )


def _gap(j: _Journal) -> str:
    pair = _training(j)
    if pair is None or pair[1].z < 1.0 or not _overfitted(j, *pair):
        return ""
    train, held = pair
    return (
        f"training reward rose by {train.mean:.3f} to {train.new:.3f}, the held-out reward only by {held.mean:.3f} to "
        f"{held.new:.3f}, so the run learns its training rows by heart; give more rows, lower lr, or stop"
    )


def _overfitted(j: _Journal, train: _Change, held: _Change) -> bool:
    """Training reward rose clearly, clearly more than the held-out one, and is now above it.

    The last condition is there because members are perturbed: as sigma falls their reward rises towards the centre's
    without any learning, but not beyond it.
    """
    growth = _Change(held.mean, train.mean, math.hypot(train.se, held.se), min(train.df, held.df))
    level = _Change(held.new, train.new, math.hypot(train.se, j.scored[-1].get("se") or 0.0), train.df)
    return min(train.z, growth.z) > TOGETHER and level.z > LIKELY


def _range(j: _Journal) -> float:
    """Spread of held-out rewards over all rows and evaluations, to put them beside a metric from 0 to 1."""
    values = [v for e in j.evals for v in e.get("rewards") or () if v is not None]
    return max(values) - min(values) if values else 0.0


def _behind(rise: _Change, metric: _Change, scale: float) -> float:
    """Standard errors by which a metric's rise lies below ``BEHIND`` times the reward's."""
    if scale <= 0.0:
        return 0.0
    expected = BEHIND * rise.mean / scale
    error = math.hypot(BEHIND * rise.se / scale, metric.se)
    return (expected - metric.mean) / error if error else 0.0


# --- forgetting, drift, decay ---------------------------------------------------------------------------------------


def _forgetting(j: _Journal) -> str:
    signs = []
    if j.tuned and (kl := j.tuned[-1].get("kl")) is not None and kl > MAX_KL:
        signs.append(f"replies to general prompts are {kl:.2f} nats a token from the base's (limit {MAX_KL:g})")
    known = [e["perplexity"] for e in j.evals if e.get("perplexity") is not None]
    if j.tuned and j.tuned[-1].get("perplexity") is not None and known[-1] > MAX_PERPLEXITY * known[0]:
        signs.append(
            f"perplexity on general text rose from {known[0]:.1f} to {known[-1]:.1f} "
            f"({known[-1] / known[0] - 1:+.0%}, limit {MAX_PERPLEXITY - 1:+.0%})"
        )
    if not signs:
        return ""
    return f"{' and '.join(signs)}; lower lr, set drift_budget or decay, or stop and keep the best"


def _drift(j: _Journal) -> str:
    drifts = [line.get("drift") or 0.0 for line in j.lines[-RECENT:]]
    if not j.drift_budget or len(drifts) < RECENT or min(drifts) < AT_BUDGET * j.drift_budget:
        return ""
    return (
        f"drift {drifts[-1]:.3g} has reached its budget of {j.drift_budget:.3g}, so each step now takes away from what "
        "was learned before; raise drift_budget if held-out scores still rise and nothing is forgotten, or stop"
    )


def _decay(j: _Journal) -> str:
    scored = j.scored
    best = _best(scored)
    if best > len(scored) - 1 - PATIENCE:
        return ""
    table = _rows(scored)
    if table is None:
        return ""
    past, present = table[:-PATIENCE], _row_means(table[-NOW:])
    reference = np.empty_like(present)
    for part in (slice(0, None, 2), slice(1, None, 2)):  # the best by one half of the rows, measured on the other
        other = slice(1 - (part.start or 0), None, 2)
        reference[part] = past[int(np.argmax([_finite_mean(row[other]) for row in past]))][part]
    fall = _paired(reference, present)
    if fall is None or fall.z > -SURE:
        return ""
    at = scored[best]["eval"]
    return (
        f"held-out reward has fallen from {scored[best]['mean']:.3f} "
        f"{f'after generation {at}' if at else 'of the base'} to {_mean([e['mean'] for e in scored[-NOW:]]):.3f}, "
        f"{-fall.z:.1f} standard errors by the same rows; the best is kept: stop, or go on with a lower lr and a "
        "smaller sigma_end"
    )


def _stall(j: _Journal) -> str:
    scored = j.scored
    best = _best(scored)
    since = len(scored) - 1 - best
    if since < STALLED or _decay(j):
        return ""
    mean, top = scored[best]["mean"], j.highest
    if top is not None and top > 0 and mean >= FULL * top:
        return (
            f"the held-out reward is at its maximum ({mean:.3f}) since generation {scored[best]['eval']}; stop, or "
            "give harder rows"
        )
    return (
        f"the held-out reward has had no new best for {since} evaluations ({mean:.3f} after generation "
        f"{scored[best]['eval']}, {scored[-1]['mean']:.3f} now); stop, or go on with more rows and pairs or another "
        "sigma and lr"
    )


def _best(scored: Sequence[Entry]) -> int:
    """Place of the highest mean, the earliest of equals."""
    return max(range(len(scored)), key=lambda i: (scored[i]["mean"], -i), default=0)


# --- figures with their errors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """From old to new, with the standard error of the difference and its degrees of freedom."""

    old: float
    new: float
    se: float
    df: float

    @property
    def mean(self) -> float:
        return self.new - self.old

    @property
    def z(self) -> float:
        """The t statistic as a normal deviate (Wallace 1959), so that few rows are not taken for many."""
        if abs(self.mean) <= 1e-12:
            return 0.0
        t = self.mean / self.se if self.se > 0.0 else math.inf
        squared = min(t * t / self.df, 1e300)
        size = (8 * self.df + 1) / (8 * self.df + 3) * math.sqrt(self.df * math.log1p(squared))
        return math.copysign(size, self.mean)


def _heldout(j: _Journal, since: int = 0) -> _Change | None:
    """Held-out reward from the last evaluation up to generation ``since`` (0: of the base) to now, paired by row."""
    scored = j.scored
    before = sum(e["eval"] <= since for e in scored)
    table = _rows(scored)
    if table is None or not 0 < before < len(scored):
        return None
    return _paired(table[before - 1], _row_means(table[before:][-NOW:]))


def _training(j: _Journal) -> tuple[_Change, _Change] | None:
    """(training, held-out) reward over the generations without likelihood in the reward: the first of them against now.

    Two things make the members' mean move without learning: which rows a generation drew (estimated from successive
    differences, which a slow trend hardly touches), and chance changes of the rows themselves (as large as those of
    held-out rows), which do not average out where the same few rows come again and again.
    """
    pure = [(line, _mean(values)) for line in j.lines if not line.get("loglik") and (values := _members(line))]
    held = _heldout(j, pure[0][0]["generation"]) if pure else None
    if len(pure) < 6 or held is None:
        return None
    means = np.array([mean for _, mean in pure])
    start, window = min(5, len(means) // 3), min(10, len(means) // 3)  # the start is short: most is learned early
    scatter = float(np.mean(np.diff(means) ** 2)) / 2
    rows = {row for line, _ in pure[-window:] for row in line.get("rows") or ()}
    chance = held.se**2 * (held.df + 1) / max(len(rows), 1)
    error = math.sqrt(scatter / start + scatter / window + chance)
    return _Change(float(means[:start].mean()), float(means[-window:].mean()), error, 2 * (len(means) - 1) / 3), held


def _metrics(j: _Journal) -> dict[str, _Change]:
    """Each metric of the task with values from 0 to 1, base to now.

    Only means are known: the error is that of two independent shares, which paired rows stay below.
    """
    known = [e for e in j.tuned[-NOW:] if e.get("metrics")]
    if not known or not j.evals[0].get("metrics"):
        return {}
    changes = {}
    count = min(e.get("rows", 0) for e in [j.evals[0], *known])
    for name, old in j.evals[0]["metrics"].items():
        values = [e["metrics"][name] for e in known if e["metrics"].get(name) is not None]
        if count < MIN_ROWS or not values or not all(0.0 <= v <= 1.0 for v in [old, *values]):
            continue
        new = _mean(values)
        # one row's worth of doubt: a share of 0 or 1 is not known without error
        error = math.sqrt(sum(max(p * (1 - p), 1 / (count + 2)) for p in (old, new)) / count)
        changes[name] = _Change(old, new, error, 2 * (count - 1))
    return changes


def _rows(evals: Sequence[Entry]) -> np.ndarray | None:
    """Rewards, float64 [evaluations, rows], NaN where excluded; None unless all have the same rows."""
    lists = [e.get("rewards") for e in evals]
    sizes = {len(values) if values else 0 for values in lists}
    if len(sizes) != 1 or sizes.pop() < MIN_ROWS:
        return None
    return np.array(lists, np.float64)


def _row_means(table: np.ndarray) -> np.ndarray:
    """[rows]: mean over the evaluations in which a row was scored, NaN where in none."""
    known = np.isfinite(table)
    count = known.sum(axis=0)
    means = np.where(known, table, 0.0).sum(axis=0) / np.maximum(count, 1)
    return np.where(count > 0, means, np.nan)


def _finite_mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else -math.inf


def _paired(old: np.ndarray, new: np.ndarray) -> _Change | None:
    """Mean difference over the rows that both have; None with too few of them."""
    both = np.isfinite(old) & np.isfinite(new)
    count = int(both.sum())
    if count < MIN_ROWS:
        return None
    error = float((new[both] - old[both]).std(ddof=1)) / math.sqrt(count)
    return _Change(float(old[both].mean()), float(new[both].mean()), error, count - 1)


def _members(line: Entry) -> list[float]:
    """Mean rewards of a generation's members, as far as they have one."""
    rewards = line.get("rewards") or {}
    return [m for sign in ("plus", "minus") for m in rewards.get(sign) or () if m is not None]


def _answers(line: Entry) -> int:
    """Answers of a generation."""
    rewards = line.get("rewards") or {}
    members = sum(len(rewards.get(sign) or ()) for sign in ("plus", "minus")) or 2 * len(line.get("coefs") or ())
    return int(line.get("answers") or members * len(line.get("rows") or ()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_DETECTORS: dict[str, Callable[[_Journal], str]] = {
    "no-signal": _no_signal,
    "collapse": _collapse,
    "hacking": _hacking,
    "forgetting": _forgetting,
    "drift": _drift,
    "gap": _gap,
    "invalid": _invalid,
    "length": _length,
    "decay": _decay,
    "stall": _stall,
}
KINDS = tuple(_DETECTORS)
"""What can be found, and what ``stop_on`` may name."""


# --- what forgetting is measured on ---------------------------------------------------------------------------------

PROMPTS = (
    "What should I pack for a weekend of walking in the hills in autumn?",
    "Explain to a ten-year-old why the moon seems to change its shape.",
    "Write a short, polite message to a neighbour whose dog barks at night.",
    "List three ways to save water in a small flat.",
    "My tomato plants have yellow leaves. What could be the reasons?",
    "Put this into one sentence: The train was late. I missed the meeting. My colleague told me later what was said.",
    "What is the difference between a lake and a pond?",
    "Suggest a name and a slogan for a bakery that opens at four in the morning.",
)
"""General requests; how far replies to them move from the base's is the KL of an evaluation."""

TEXT = """\
On weekdays the market in our town opens before the shops do. Farmers come in from the villages with vans full of \
cabbages, eggs and apples, and by seven o'clock the square smells of bread, wet stone and coffee. Most people buy the \
same things every week and know by name whoever sells them. An old man with a green cap has repaired clocks and radios \
at the corner for thirty years; he says that nothing is ever quite broken, only waiting for someone patient.

When it rains, the traders pull plastic sheets over their tables and talk about the weather, which is never right. Too \
little water makes the carrots small, too much of it rots the strawberries, and a late frost in May can spoil a whole \
year of cherries. Still, they return. In winter, when the light is poor and fingers turn stiff, soup is sold from a \
large pot, and children on their way to school warm their hands on the paper cups.

My grandmother taught me how to choose a melon by its weight and its sound, and to ask for the price only after \
tasting. She also taught me to carry two bags, so that the load is balanced on the way home, because the street is \
steep and has many steps. At the top there is a bench beneath a chestnut tree. From there you can see the river, the \
two bridges, and the trains that leave for the city every half hour.
"""
"""General prose; the perplexity of an evaluation is that of this text."""
