"""Search at test time: more compute for one hard row. Nothing is tuned and nothing stays but the answers.

``es``: a small population perturbs the model on the row itself, the scorer (or what the episode pays) moves a temporary
delta, and sigma falls to zero. ``best-of``: the unperturbed model answers again and again at a temperature. Both begin
with the greedy answer, which counts, and both count alike: answers, tokens generated, tokens that went through the
model (perturbed members share no prompt, samples of one model do), seconds. The base, and a run whose weights are the
centre, are only read; the temporary delta goes with the folder that it is in.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgees import config as settings
from edgees import rewards, rollout
from edgees.backends.base import CENTRE, Engine, Member
from edgees.config import Config
from edgees.delta import Delta, Step
from edgees.episodes import transcript
from edgees.errors import Interrupted, UsageError
from edgees.opening import Setup, open_setup, open_weights, require_same_base, spec_of
from edgees.population import Population, sigma_at
from edgees.rewards import Scorer
from edgees.stopping import Stop, stop_on_signal
from edgees.tasks.rows import Row, Task
from edgees.update import update

METHODS = ("es", "best-of")
ROLLOUTS = 64
"""Answers a row where neither a number nor a time is given."""
TEMPERATURE = 0.7
"""Of best-of where none is given."""
DEFAULTS: Mapping[str, Any] = {"scope": "adapter", "pairs": 8, "sigma": 0.08, "lr": 0.1, "loglik": 0.0}
"""Instead of the task's own, which are for tuning on many rows; of a run only ``pairs``, ``sigma``, ``lr``, ``loglik``,
the latter ones where its sigma is not absolute."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What a search may use. rollouts: answers a row, the greedy one included; seconds: for all of it (0: no limit);
    both: whatever comes first. sigma_end: last sigma as a share of the first. enough: a row whose best reward reaches
    it is done; built-in scorers pay at most 1. apart: each row by itself, with a population and the whole budget of its
    own, instead of all together."""

    method: str = "es"
    rollouts: int = 0
    seconds: float = 0.0
    sigma_end: float = 0.0
    enough: float = 1.0
    apart: bool = False

    def checked(self) -> Plan:
        """With a budget. :raises UsageError: a value that cannot be meant."""
        if self.method not in METHODS:
            raise UsageError(f"--method {self.method!r} is not one of {', '.join(METHODS)}")
        if self.rollouts < 0 or not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise UsageError("--rollouts and --time cannot be negative", "leave them out for the default")
        if not 0.0 <= self.sigma_end <= 1.0:
            raise UsageError(f"--sigma-end {self.sigma_end:g}: a share of sigma from 0 to 1 is needed")
        if math.isnan(self.enough):
            raise UsageError("--enough must be a number", "inf: never enough")
        return self if self.rollouts or self.seconds else replace(self, rollouts=ROLLOUTS)


@dataclass
class Spent:
    """Answers, tokens generated, tokens processed (prompts included), seconds."""

    rollouts: int = 0
    tokens: int = 0
    processed: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 3)}


@dataclass
class Best:
    """The best answer to a row so far. reward: None while no answer could be scored. found_at: what had been spent,
    answers counted in their order. curve: [tokens, reward] of every improvement."""

    row: Row
    reward: float | None = None
    answer: str = ""
    found_at: Spent = field(default_factory=Spent)
    curve: list[list[float]] = field(default_factory=list)
    faults: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row.id, "reward": self.reward, "answer": self.answer, "found_at": self.found_at.to_dict(),
            "curve": self.curve, "unscored": self.faults,
        }  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a search came to. curve: [tokens of all rows, mean best reward] of every change."""

    rows: list[Best]
    spent: Spent
    curve: list[list[float]]
    plan: Plan
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """What ``search --json`` prints."""
        return {
            "method": self.plan.method, "rows": [best.to_dict() for best in self.rows], **self.spent.to_dict(),
            "curve": self.curve, "interrupted": self.interrupted,
        }  # fmt: skip


def search(
    given: Mapping[str, Any],
    plan: Plan,
    *,
    rows: Sequence[str] = (),
    count: int = 0,
    run: str | Path | None = None,
    weights: str = "best",
    engine: Engine | None = None,
    task: Task | None = None,
    scorer: Scorer | None = None,
    say: Say = lambda text: None,
) -> Found:
    """Search for better answers to rows by name, or to the first ``count`` held-out ones.

    given: settings (:mod:`edgees.config`). run: whose weights (``best`` or ``last``) are the centre, with its settings
    where ``given`` says nothing. say: told of every improvement. Ctrl-C ends the search early and is no error:
    ``interrupted`` tells.

    :raises UsageError: no such row or run, or settings that do not go together.
    """
    plan = plan.checked()
    with ExitStack() as stack:
        chosen, centre, history = _opened(given, run, weights, stack)
        if chosen.agent_cmd:
            raise UsageError("edgees search plays no agent programs", "search on the task without --agent-cmd")
        if plan.method == "best-of" and chosen.temperature == 0.0:
            if "temperature" in given:
                raise UsageError("best-of at temperature 0 gives one answer again and again", "--temperature 0.7")
            chosen = replace(chosen, temperature=TEMPERATURE, given=chosen.given | {"temperature"})
        setup = open_setup(chosen, stack, engine, task, scorer)
        stack.callback(setup.release)
        if history is not None:
            require_same_base(history, setup.engine.base_hash, chosen.model)
            assert centre is not None
            setup = replace(setup, context=history.context(centre.generation))
        wanted = pick(setup.task, rows, count)
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="edgees-search-")))
        if centre is None:
            centre = stack.enter_context(Delta.create(scratch / "centre.safetensors", spec_of(chosen, setup.engine)))
        setup.engine.attach(centre)
        return _Search(setup, plan, centre, scratch, say).run(wanted)


def pick(task: Task, names: Sequence[str], count: int) -> list[Row]:
    """Rows by name, held-out ones first to be looked at; else the first ``count`` held-out rows.

    :raises UsageError: no such row, none held out, or nothing was named.
    """
    there = {row.id: row for row in (*task.train, *task.heldout)}
    missing = [name for name in names if name not in there]
    if missing:
        near = difflib.get_close_matches(missing[0], there, n=3, cutoff=0.5) or list(there)[:3]
        raise UsageError(f"task {task.name} has no row {missing[0]}", f"there are {', '.join(near)}, ...")
    if names:
        return [there[name] for name in dict.fromkeys(names)]
    if count < 1:
        raise UsageError("no row was named", "--row ID (several allowed), or --rows N for the first N held-out rows")
    if len(task.heldout) < count:
        raise UsageError(f"task {task.name} has {len(task.heldout)} held-out rows, not {count}", "name some by --row")
    return list(task.heldout[:count])


def _opened(
    given: Mapping[str, Any], run: str | Path | None, weights: str, stack: ExitStack
) -> tuple[Config, Delta | None, Any]:
    """(settings, the run's learned weights, its journal)."""
    if run is None:
        return settings.load(None, {**DEFAULTS, **given}), None, None
    if "model" in given or "scope" in given:
        raise UsageError("--run has a model and a scope of its own", "leave --model and --scope out, or --run")
    history, tuned, centre, _ = open_weights(run, weights, stack)
    mine = {name: DEFAULTS[name] for name in ("pairs", "loglik")} | {"evolve": (), "groups": 1}
    if tuned.scope == "none":  # whose delta is an adapter of zeros
        mine["scope"] = "adapter"
    if tuned.sigma_abs is None:
        mine |= {name: DEFAULTS[name] for name in ("sigma", "lr")}
    given = dict(given)
    if tuned.sigma_abs is not None and "sigma" in given:
        given["sigma_abs"] = given.pop("sigma")
    return settings.load(Path(run) / "config.resolved.toml", {**mine, **given}), centre, history


class _Late(Exception):
    """The time is over."""


class _Search:
    """One search, or one after another where rows are apart."""

    def __init__(self, setup: Setup, plan: Plan, centre: Delta, scratch: Path, say: Say) -> None:
        self.setup, self.plan, self.centre, self.scratch, self.say = setup, plan, centre, scratch, say
        c = self.config = setup.config
        self.sigma = c.sigma if c.sigma_abs is None else c.sigma_abs
        if plan.method == "es" and self.sigma == 0.0:
            raise UsageError("sigma = 0 perturbs nothing, and search chooses none by itself", "--sigma 0.08")
        self.members = 1 if plan.method == "best-of" else c.members
        self.greedy = setup.replies(0, 0.0)
        # The same generation throughout: an episode that is searched on stays the same episode.
        self.replies = setup.replies(0, c.temperature)
        self.stop = Stop()
        self.began = time.monotonic()
        self.until = self.began + plan.seconds if plan.seconds else math.inf
        self.bests: list[Best] = []
        self.open: list[Best] = []
        self.spent = Spent()
        self.curve: list[list[float]] = []

    def run(self, rows: Sequence[Row]) -> Found:
        """All rows, together or one after another; what interrupts it leaves what has been found."""
        groups = [[row] for row in rows] if self.plan.apart else [list(rows)]
        done: list[Found] = []
        interrupted = False
        with stop_on_signal(self.stop):
            for group in groups:
                try:
                    self.begin(group)
                    if self.plan.method == "es":
                        self.evolve()
                    else:
                        self.sample()
                except _Late:
                    pass
                except (Interrupted, KeyboardInterrupt):
                    interrupted = True
                self.spent.seconds = time.monotonic() - self.began
                self.mark(self.spent.tokens)
                done.append(Found(self.bests, self.spent, self.curve, self.plan, interrupted))
                if interrupted:
                    break
        return merged(done)

    def begin(self, rows: Sequence[Row]) -> None:
        """A search from the start: the centre's greedy answers."""
        self.began = time.monotonic()
        self.until = self.began + self.plan.seconds if self.plan.seconds else math.inf
        self.spent, self.curve = Spent(), []
        self.bests = [Best(row) for row in rows]
        self.open = list(self.bests)
        self.used, self.pace = 0, 0.0
        self.play([CENTRE], self.greedy, [0])

    def left(self, wanted: int) -> int:
        """How many of ``wanted`` answers a row there is still budget for; 0 too where all rows are done."""
        if not self.open or time.monotonic() + self.pace > self.until:
            return 0
        return min(wanted, self.plan.rollouts - self.used) if self.plan.rollouts else wanted

    def fraction(self) -> float:
        """Share of the budget that is spent."""
        by_rollouts = self.used / self.plan.rollouts if self.plan.rollouts else 0.0
        by_time = (time.monotonic() - self.began) / self.plan.seconds if self.plan.seconds else 0.0
        return min(1.0, max(by_rollouts, by_time))

    def sample(self) -> None:
        """Best-of-n, as many samples at once as a population would have members."""
        while count := self.left(self.config.members):
            self.play([CENTRE] * count, self.replies, range(self.used, self.used + count))

    def evolve(self) -> None:
        """Evolution strategies on the open rows, from the centre, in a copy of it."""
        if not self.left(1):
            return
        c = self.config
        path = self.scratch / "steps.safetensors"
        self.centre.copy_to(path)
        with Delta.open(path) as delta:
            self.setup.engine.attach(delta)
            try:
                population = Population(c.seed, c.pairs, c.antithetic)
                while count := self.left(c.members):
                    g = delta.generation
                    sigma = sigma_at(self.fraction(), self.sigma, self.plan.sigma_end)
                    members = population.ask(g, sigma)[:count]
                    # The sampling, where there is any, is the same for all members: they differ in weights alone.
                    made = self.play(members, self.replies, [g + 1] * count)
                    if not self.left(1) or len(members) < c.members or sigma == 0.0:
                        continue
                    shaped = made.reshape(c.pairs, c.members // c.pairs, -1)
                    step = update(shaped, lr=c.lr * sigma / self.sigma, sigma=sigma, shaping=c.shaping, shrink=c.shrink)
                    delta.apply(Step(g, population.keys(g), population.slots(g), step.coefs, step.keep))
                    self.setup.engine.refresh()
            finally:
                self.setup.engine.attach(self.centre)

    def play(self, members: Sequence[Member], replies: rollout.Settings, draws: Sequence[int]) -> np.ndarray:
        """Rewards float64 [members, open rows], NaN for none; the best answers are kept, rows that are done closed."""
        before = time.monotonic()
        bests = self.open
        rollouts = rollout.every(members, [best.row for best in bests])
        each = tuple(draw for draw in draws for _ in bests)
        processed = self.spent.processed

        def progress(done: int, tokens: int) -> None:
            self.spent.processed = processed + tokens
            self.stop.check()
            if time.monotonic() > self.until:
                raise _Late

        played = rollout.play(self.setup.engine, rollouts, replace(replies, draws=each), progress)
        scores = rewards.judge(self.setup.scorer, played)
        self.stop.check()
        now = time.monotonic() - self.began
        for place, (t, reward) in enumerate(zip(played, scores.rewards, strict=True)):
            self.spent.rollouts += 1
            self.spent.tokens += len(t.tokens)
            best = bests[place % len(bests)]
            if not math.isfinite(reward):
                best.faults += 1
            elif best.reward is None or reward > best.reward:
                best.reward, best.answer = reward, transcript(t.messages) if t.episode else t.completion
                best.found_at = replace(self.spent, seconds=now)
                best.curve.append([self.spent.tokens, reward])
                self.mark(self.spent.tokens)
                self.say(f"{best.row.id}: {reward:.3f} {_after(best.found_at)}: {_short(best.answer)}")
        self.used += len(members)
        self.open = [best for best in bests if best.reward is None or best.reward < self.plan.enough]
        self.pace = time.monotonic() - before
        return np.array(scores.rewards, np.float64).reshape(len(members), len(bests))

    def mark(self, tokens: int) -> None:
        known = [best.reward for best in self.bests if best.reward is not None]
        if known:
            self.curve.append([tokens, sum(known) / len(known)])


def merged(parts: Sequence[Found]) -> Found:
    """Searches of rows apart as one. Its curve is that of all of them going on side by side."""
    if len(parts) == 1:
        return parts[0]
    total = Spent()
    for p in parts:
        for name, value in vars(p.spent).items():
            setattr(total, name, getattr(total, name) + value)
    marks = sorted({tokens for p in parts for tokens, _ in p.curve})
    curve = []
    for mark in marks:
        known = [[reward for tokens, reward in p.curve if tokens <= mark] for p in parts]
        last = [values[-1] for values in known if values]
        curve.append([sum(min(mark, p.spent.tokens) for p in parts), sum(last) / len(last)])
    rows = [best for p in parts for best in p.rows]
    return Found(rows, total, curve, parts[0].plan, any(p.interrupted for p in parts))


def lines(found: Found) -> list[str]:
    """The end of a search for people to read."""
    told = []
    for best in found.rows:
        reward = "no answer could be scored" if best.reward is None else f"{best.reward:.3f} {_after(best.found_at)}"
        told.append(f"{best.row.id}: {reward}\n{best.answer}" if best.answer else f"{best.row.id}: {reward}")
    known = [best.reward for best in found.rows if best.reward is not None]
    mean = f"mean best reward {sum(known) / len(known):.3f}" if known else "no rewards"
    spent = found.spent
    told.append(
        f"{found.plan.method}, {len(found.rows)} row(s): {mean}; {spent.rollouts} answers, {spent.tokens} tokens "
        f"({spent.processed} with prompts), {spent.seconds:.1f} s"
    )
    return told


def _after(spent: Spent) -> str:
    return f"after {spent.rollouts} answer(s), {spent.tokens} tokens, {spent.seconds:.1f} s"


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most] + "..."
