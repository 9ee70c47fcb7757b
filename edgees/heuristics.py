"""Evolution of heuristics: a model writes programs, instances tell which is good, and the better ones are shown to it
for the next (after Evolution of Heuristics, Liu et al. 2024, and FunSearch, Romera-Paredes et al. 2024).

Programs run in a child process, one a program (:mod:`edgees.programs`); what one of them does costs that proposal only.
What is chosen is chosen on the training instances; the held-out ones are touched once, at the end.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgees import config as settings
from edgees import native
from edgees.backends.base import CENTRE, Engine, Request
from edgees.config import Config
from edgees.delta import Delta
from edgees.errors import EdgeesError, Interrupted, UsageError
from edgees.evaluate import interval
from edgees.evolve.reflect import DEADLINE_S, NoReply, Reflector, open_reflector
from edgees.history import History
from edgees.opening import open_engine, open_weights, require_same_base
from edgees.population import request_seed
from edgees.programs import Heldout, Problem, Program, Unusable, code_in, prompt_of
from edgees.stopping import Stop, stop_on_signal

PROPOSALS = 64
"""Where neither a number nor a time is given."""
SIZE = 8
"""Programs in the population."""
SILENT = 10
"""Replies in a row that did not come after which the model is taken to be gone."""
DEFAULTS: Mapping[str, Any] = {"scorer_timeout": 20.0, "temperature": 0.8, "max_tokens": 512, "context": 4096}
"""scorer_timeout: seconds that a program may take for all instances; the others are of a model on this machine."""

Say = Callable[[str], None]
Weights = tuple[History, Config, Delta, str]
"""As :func:`edgees.opening.open_weights` gives them."""


class _Late(Exception):
    """The time is over."""


@dataclass(frozen=True)
class Found:
    """What an evolution came to. first: of the problem, the best of them in front. outcomes: number of proposals that
    were ``no reply``, ``no program``, ``failed``, ``known`` (the same code, or the same costs, was there), ``worse``
    (than all that were kept), ``kept`` or ``best``. beat: those better than all of the first, on training instances.
    faults: [proposal, words]. curve: [proposals, cost] of every improvement. heldout: by label, of the first ones and
    the best; none where there was no time for it. difference: best less best of the first on held-out instances, mean
    and 95 % interval (paired bootstrap)."""

    problem: str
    function: str
    best: Program
    first: tuple[Program, ...]
    proposals: int
    outcomes: Mapping[str, int]
    beat: int
    faults: list[tuple[int, str]]
    curve: list[tuple[int, float]]
    seconds: float
    tokens: int = 0
    interrupted: bool = False
    note: str = ""
    heldout: Mapping[str, Heldout] = field(default_factory=dict)

    @property
    def difference(self) -> dict[str, float | None] | None:
        best, first = (self.heldout.get(p.label, Heldout()).costs for p in (self.best, self.first[0]))
        if not best or not first or self.best.proposal == 0:
            return None
        paired = np.array(best) - np.array(first)
        low, high = interval(paired)
        return {"mean": float(paired.mean()), "low": low, "high": high}

    def to_dict(self) -> dict[str, Any]:
        """What ``search --heuristic --json`` prints."""

        def told(program: Program) -> dict[str, Any]:
            heldout = self.heldout.get(program.label)
            costs = {"training": program.cost, "heldout": heldout.cost if heldout else None}
            fault = {"heldout_fault": heldout.fault} if heldout and heldout.fault else {}
            return {"label": program.label, "proposal": program.proposal, **costs, **fault}

        return {
            "problem": self.problem, "best": {**told(self.best), "code": self.best.code},
            "first": [told(program) for program in self.first], "difference": self.difference,
            "proposals": self.proposals, "outcomes": dict(self.outcomes), "beat": self.beat, "faults": self.faults,
            "curve": self.curve, "seconds": round(self.seconds, 3), "tokens": self.tokens, "note": self.note,
            "interrupted": self.interrupted,
        }  # fmt: skip


def evolve(
    problem: str,
    given: Mapping[str, Any],
    *,
    proposals: int = 0,
    seconds: float = 0.0,
    run: str | Path | None = None,
    weights: str = "best",
    out: str | Path | None = None,
    engine: Engine | None = None,
    model: Callable[[str], str] | None = None,
    say: Say = lambda text: None,
) -> Found:
    """Let a model write better and better programs for a problem (a name of :data:`edgees.programs.PROBLEMS`, or a
    file).

    given: settings (:mod:`edgees.config`): ``reflector`` is the model that writes, ``seed`` drives instances, parents
    and a local model's sampling. proposals, seconds: the budget (0: no limit; both 0: ``PROPOSALS``). run: whose
    ``weights`` a model on this machine has. out: a file for the best program, written anew with every improvement.
    model: a prompt -> a reply, instead of the ``reflector``. Ctrl-C ends it early and is no error: ``interrupted``
    tells.

    :raises UsageError: no such problem, model or run, or a file that is there already.
    """
    if proposals < 0 or not (seconds >= 0 and math.isfinite(seconds)):
        raise UsageError("--rollouts and --time cannot be negative", "leave them out for the default")
    proposals = proposals if proposals or seconds else PROPOSALS
    target = Path(out) if out is not None else None
    if target is not None and (target.exists() or not target.parent.is_dir()):
        why = "is there already" if target.exists() else "has no folder"
        raise UsageError(f"the file {target} {why}", "another name for --out, please")
    with ExitStack() as stack:
        tuned = None if run is None else open_weights(run, weights, stack)
        chosen = _settings(given, run, model)
        opened = stack.enter_context(closing(Problem(problem, chosen.seed, chosen.scorer_timeout)))
        search = _Evolution(opened, chosen, proposals, seconds, target, say)
        if model is not None:
            search.model = model
        else:
            search.model = stack.enter_context(closing(_reflector(chosen, tuned, engine, search, stack)))
        return search.run()


def _settings(given: Mapping[str, Any], run: str | Path | None, model: Any) -> Config:
    if run is None:
        return settings.load(None, {**DEFAULTS, **given})
    if "model" in given:
        raise UsageError("--run has a model of its own", "leave --model out, or --run")
    if model is not None or given.get("reflector", "self") != "self":
        raise UsageError("--run is of no use where another model writes the programs", "leave --run or --reflector out")
    fixed = {"evolve": (), "attempts": "single", "reflector": "self"}
    return settings.load(Path(run) / "config.resolved.toml", {**fixed, **DEFAULTS, **given})


def _reflector(
    c: Config, tuned: Weights | None, engine: Engine | None, search: _Evolution, stack: ExitStack
) -> Reflector:
    """The model that the settings name; one of this machine is loaded here, an API asked when it is needed."""
    native.threads(c.threads)
    here = engine
    if c.reflector == "self":
        if here is None:
            here = stack.enter_context(closing(open_engine(c.absolute())))
        if tuned is not None:
            history, _, delta, _ = tuned
            require_same_base(history, here.base_hash, c.model)
            here.attach(delta)

    def local(prompt: str) -> str:
        assert here is not None
        return search.reply_of(here, prompt)

    def open_gguf(path: Path) -> Callable[[str], str]:
        other = stack.enter_context(closing(open_engine(replace(c, engine="llamacpp", model=str(path), params=""))))
        return lambda prompt: search.reply_of(other, prompt)

    deadline = min(DEADLINE_S, search.limit) if search.limit else DEADLINE_S
    return open_reflector(c.reflector, local=local, open_gguf=open_gguf, deadline=deadline)


class _Evolution:
    """One evolution."""

    model: Callable[[str], str]

    def __init__(self, problem: Problem, c: Config, proposals: int, seconds: float, out: Path | None, say: Say) -> None:
        self.problem, self.config, self.proposals, self.limit, self.out, self.say = (
            problem, c, proposals, seconds, out, say,
        )  # fmt: skip
        self.stop = Stop()
        self.began = time.monotonic()
        self.number = self.tokens = self.silent = 0
        self.outcomes: Counter[str] = Counter()
        self.beat = 0
        self.faults: list[tuple[int, str]] = []
        self.curve: list[tuple[int, float]] = []
        self.seen: set[str] = set()
        self.kept: list[Program] = []
        self.note = ""

    def run(self) -> Found:
        """All of it; what interrupts it leaves what has been found."""
        self.began = time.monotonic()
        first = []
        heldout: dict[str, Heldout] = {}
        for label, code in self.problem.first:
            try:
                first.append(Program(code, label, self.problem.score(code)))
                heldout[label] = Heldout(self.problem.score(code, heldout=True))
            except Unusable as error:
                raise UsageError(f"the problem {self.problem.name} fails with its own {label}: {error}") from error
            self.seen.add(code)
            self.say(f"{label}: cost {first[-1].cost:.4f}")
        first.sort(key=lambda program: program.rank)
        self.kept = first[:SIZE]
        self.curve.append((0, self.kept[0].cost))
        interrupted = False
        with stop_on_signal(self.stop):
            try:
                while not self.over():
                    self.propose(first[0].cost)
            except _Late:
                pass
            except (Interrupted, KeyboardInterrupt):
                interrupted = True
        found = Found(
            self.problem.name, self.problem.function, self.kept[0], tuple(first), sum(self.outcomes.values()),
            self.outcomes, self.beat, self.faults, self.curve, time.monotonic() - self.began, self.tokens, interrupted,
            self.note, heldout,
        )  # fmt: skip
        best = found.best
        try:
            if best.label not in heldout:
                heldout[best.label] = Heldout(self.problem.score(best.code, heldout=True))
        except Unusable as error:
            heldout[best.label] = Heldout(fault=str(error))
        except KeyboardInterrupt:  # of somebody in a hurry
            found = replace(found, interrupted=True)
        self.write(found)
        return found

    def over(self) -> bool:
        self.stop.check()
        if self.silent >= SILENT:
            self.note = f"given up: {SILENT} replies in a row did not come"
            return True
        return bool(self.proposals and self.number >= self.proposals) or self.left() <= 0.0

    def left(self) -> float:
        """Seconds."""
        return self.limit - (time.monotonic() - self.began) if self.limit else math.inf

    def propose(self, bar: float) -> None:
        """One proposal, whatever comes of it. bar: what the best of the first costs."""
        self.number += 1
        outcome, words = "", ""
        try:
            program = self.written()
            outcome = self.took(program)
            self.beat += program.cost < bar
            words = f"cost {program.cost:.4f}"
        except NoReply as error:
            outcome, words = "no reply", error.message
        except Unusable as error:
            outcome, words = error.kind, str(error)
        self.silent = self.silent + 1 if outcome == "no reply" else 0
        self.outcomes[outcome] += 1
        if outcome in ("no reply", "no program", "failed"):
            self.faults.append((self.number, words))
        self.say(f"proposal {self.number}: {outcome}, {words} (best: {self.kept[0].cost:.4f}, {self.kept[0].label})")
        if outcome == "best":
            self.write(None)

    def written(self) -> Program:
        """A program out of one or two of the kept. :raises NoReply, Unusable: there is none."""
        rng = random.Random(f"heuristic {self.config.seed} {self.number}")
        size = len(self.kept)
        parents = [rng.choices(self.kept, [1.0 / (place + 1 + size) for place in range(size)])[0] for _ in "12"]
        if rng.random() < 0.5 or parents[0] is parents[1]:
            parents.pop()
        parents.sort(key=lambda program: program.rank, reverse=True)
        try:
            reply = self.model(prompt_of(self.problem, parents))
        except (_Late, Interrupted, NoReply):
            raise
        except EdgeesError as error:
            if self.number == 1 and isinstance(error, UsageError):  # such as a file that is no model
                raise
            raise NoReply(error.message) from error
        self.stop.check()
        if not isinstance(reply, str):
            raise NoReply(f"the model gave {type(reply).__name__}, not a text")
        text = code_in(reply, self.problem.function)
        if not text:
            raise Unusable("no program", "there is no code in the reply")
        code = self.problem.read(text)
        if code in self.seen:
            raise Unusable("known", "it was there already")
        self.seen.add(code)
        left = self.left()
        if left <= 0.0:
            raise _Late
        try:
            costs = self.problem.score(code, seconds=left)
        except Unusable:
            if self.left() <= 0.0 and left < self.problem.seconds:
                raise _Late from None
            raise
        return Program(code, f"proposal {self.number}", costs, self.number)

    def took(self, program: Program) -> str:
        """What becomes of a program: ``best``, ``kept``, ``worse``, or ``known`` where a shorter one does the same."""
        before = self.kept[0]
        for other in self.kept:
            if other.costs == program.costs:
                if len(other.code) <= len(program.code):
                    return "known"
                self.kept.remove(other)
                break
        self.kept = sorted([*self.kept, program], key=lambda p: p.rank)[:SIZE]
        if program.cost < before.cost:
            self.curve.append((self.number, program.cost))
        if self.kept[0] is program:
            return "best"
        return "kept" if program in self.kept else "worse"

    def write(self, found: Found | None) -> None:
        """The best program so far into the file that was asked for."""
        if self.out is None:
            return
        beside = self.out.with_name(f".{self.out.name}.{os.getpid()}.tmp")
        beside.write_text(source_of(self.problem, self.kept[0], found), encoding="utf-8")
        beside.replace(self.out)

    def reply_of(self, engine: Engine, prompt: str) -> str:
        """A reply of a model on this machine; another one every time. :raises NoReply: the prompt is too long."""
        c = self.config
        tokens = tuple(engine.encode_chat([{"role": "user", "content": prompt}]))
        room = engine.context_length - len(tokens)
        if room < 64:
            raise NoReply(f"a prompt of {len(tokens)} tokens does not fit the context of {engine.context_length}")

        def progress(done: int, count: int) -> None:
            self.stop.check()
            if self.left() <= 0.0:
                raise _Late

        seed = request_seed(c.seed, self.number, "heuristic")
        request = Request(CENTRE, tokens, min(c.max_tokens or 512, room), c.temperature, seed)
        [done] = engine.generate([request], progress)
        self.tokens += len(done.tokens)
        return done.text


def source_of(problem: Problem, best: Program, found: Found | None) -> str:
    """A program as a file: what it costs in the docstring, on held-out instances once that is known."""
    what = best.label if best.proposal else f"{best.label}, which nothing proposed was better than"
    lines = [f"Heuristic for {problem.name}, by edgees search: {what}.", "", f"Cost: training {best.cost:.6f}"]
    if found is not None:
        for program in (best, *(p for p in found.first if p is not best)):
            heldout = found.heldout.get(program.label, Heldout(fault="not scored"))
            value = heldout.fault if heldout.cost is None else f"{heldout.cost:.6f}"
            lines.append(f"{program.label}: training {program.cost:.6f}, held-out {value}")
        del lines[2]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"', "'")
    return f'"""{text}\n"""\n\n{best.code}'


def lines(found: Found) -> list[str]:
    """The end of an evolution for people to read."""
    told = [found.best.code.rstrip("\n"), "", f"{'':<24}{'training':>10}{'held-out':>10}   cost, the lower the better"]
    for program in dict.fromkeys((*reversed(found.first), found.best)):
        heldout = found.heldout.get(program.label, Heldout(fault="not scored"))
        value = f"{heldout.cost:>10.4f}" if heldout.cost is not None else f"   {heldout.fault}"
        told.append(f"{program.label:<24}{program.cost:>10.4f}{value}")
    difference = found.difference
    if difference is not None and difference["low"] is not None:
        told.append(
            f"held-out, less {found.first[0].label}: {difference['mean']:+.4f} "
            f"(95 %: {difference['low']:+.4f} to {difference['high']:+.4f})"
        )
    if found.best.proposal == 0:
        told.append("no proposal was better than what the problem begins with")
    counts = ", ".join(f"{count} {what}" for what, count in found.outcomes.items()) or "none"
    told.append(f"{found.proposals} proposals: {counts}; {found.beat} better than {found.first[0].label}")
    told.append(f"{found.tokens} tokens, {found.seconds:.1f} s" + (f"; {found.note}" if found.note else ""))
    return told
