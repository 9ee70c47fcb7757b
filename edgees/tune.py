"""The loop. It alone knows the order of things; what each of them does stands in the other modules.

Nothing is printed here: an observer (:class:`edgees.report.Observer`) is told what happens.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgees import config, forgetting, proposing, report, rewards, rollout, watch
from edgees import probe as probing
from edgees.backends.base import CENTRE, Engine, Member, Progress
from edgees.checkpoint import (
    RunFolder,
    append_line,
    evaluation_record,
    generation_record,
    recover,
    write_atomic,
    write_context,
)
from edgees.config import Config
from edgees.context import Context
from edgees.delta import Delta, DeltaSpec, require_space
from edgees.errors import EdgeesError, Interrupted, RunError, ScorerError
from edgees.history import History, short_float32s, with_header
from edgees.opening import Setup, base_hash, open_engine, open_setup, require_same_base, spec_of, under_names_of
from edgees.population import Population, RowOrder, sigma_at
from edgees.proposing import Proposer
from edgees.report import Observer
from edgees.rewards import Scorer
from edgees.rollout import Trajectory
from edgees.stopping import Stop, stop_on_signal
from edgees.tasks.rows import Row, Task
from edgees.trials import Deal, Trials, level
from edgees.update import Update, fitness, loglik_weight, mix, update

REPLY, PIECE, OVERLAP = 24, 64, 8
"""Tokens of the base's replies to general prompts, and of the pieces of general text, whose first ones are not scored.
Short, so that they need no longer context than the task does."""
FRUITLESS = 3
"""Proposals without a candidate after which a run that tunes no weights ends."""
PROBE_ROWS = 8
"""Rows that are answered to estimate how long a run will take."""


@dataclass(frozen=True)
class RunResult:
    """What ``tune --json`` prints. base, best: mean held-out rewards, None where nothing was held out."""

    run: str
    generations: int
    base: float | None
    best: float | None
    seconds: float
    peak_rss_bytes: int
    best_generation: int | None = None
    tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, run: str | Path, history: History, peak: int) -> RunResult:
        """What the journal of ``run`` says. peak: bytes resident at most."""
        base = next((e["mean"] for e in history.evals if e["eval"] == 0), None)
        best = history.best()
        return cls(
            run=str(run),
            generations=history.generation,
            base=base,
            best=best["mean"] if best else None,
            seconds=history.seconds(),
            peak_rss_bytes=peak,
            best_generation=best["eval"] if best else None,
            tokens=sum(entry.get("tokens", 0) for entry in history.entries),
        )


# --- starting, resuming, rehearsing, replaying --------------------------------------------------------------------


def tune(
    config: Config,
    *,
    engine: Engine | None = None,
    task: Task | None = None,
    scorer: Scorer | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Start a run and carry it to its end. What is not given is made from ``config``.

    :raises EdgeesError: by cause, see :mod:`edgees.errors`; :class:`Interrupted` on Ctrl-C. From the moment that the
        run folder has a history, everything up to the last complete generation is saved whatever happens.
    """
    with ExitStack() as stack:
        observer = observer or Observer()
        proposing.check(config)
        setup = open_setup(config, stack, engine, task, scorer)
        spec = spec_of(setup.config, setup.engine)
        _require_space(setup.config, spec)
        if setup.config.sigma == 0.0 and setup.config.sigma_abs is None and setup.config.scope != "none":
            setup = _with_sigma(setup, spec, observer)
        folder = stack.enter_context(RunFolder.create(setup.config))
        with folder.made_or_removed():
            delta = stack.enter_context(Delta.create(folder.delta_path, spec))
            history = History.create(folder.history_path, setup.header(spec))
            write_context(folder.path, setup.context)
        return _Run(setup, folder, history, delta, observer).carry_on()


def _with_sigma(setup: Setup, spec: DeltaSpec, observer: Observer) -> Setup:
    """The same with a sigma found by trying; the configuration has it from here on, as if it had been given."""
    with (
        TemporaryDirectory(prefix="edgees-probe-") as scratch,
        Delta.create(Path(scratch) / "delta.safetensors", spec) as nothing,
    ):
        setup.engine.attach(nothing)
        sigma = probing.choose_sigma(setup, observer.on_message)
    return replace(setup, config=replace(setup.config, sigma=sigma, given=setup.config.given | {"sigma"}))


def resume(
    run: str | Path,
    *,
    engine: Engine | None = None,
    task: Task | None = None,
    scorer: Scorer | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Go on with a run exactly where its journal ends; the result is that of a run never interrupted.

    :raises RunError: no run there, in use, damaged beyond repair, or its settings, data or model have changed.
    """
    observer = observer or Observer()
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(run))
        begun = History.open(folder.history_path, repair=False)
        folder.config = replace(folder.config, **_before(begun))
        folder.check_config(begun)
        setup = open_setup(folder.config, stack, engine, task, scorer, begun)
        history, delta = recover(folder)
        stack.enter_context(delta)
        for note in folder.notes:
            observer.on_message(note)
        return _Run(setup, folder, history, delta, observer).carry_on()


def rehearse(
    config: Config, *, engine: Engine | None = None, task: Task | None = None, scorer: Scorer | None = None
) -> dict[str, Any]:
    """Everything that can go wrong before a run, tried without writing anything (``tune --dry-run``).

    Returns, JSON-ready: model, task, train, heldout (rows), tensors, weights, frozen, disk_bytes, generations,
    seconds (expected), sample ({"row", "answer", "reward"}), warnings.
    """
    with ExitStack() as stack:
        proposing.check(config)
        setup = open_setup(config, stack, engine, task, scorer)
        c, task = setup.config, setup.task
        spec = spec_of(c, setup.engine)
        tuned = () if c.scope == "none" else spec.tensors
        disk = _require_space(c, spec)
        costs, answers = probe(setup)
        scores = rewards.judge(setup.scorer, answers[:1])
        sample = {"row": answers[0].row.id, "answer": answers[0].completion, "reward": scores.rewards[0]}
        return {
            "model": c.model, "task": task.name, "train": len(task.train), "heldout": len(task.heldout),
            "tensors": len(tuned), "weights": sum(t.size for t in tuned),
            "frozen": len(setup.engine.frozen), "disk_bytes": disk, "generations": c.max_generations,
            "seconds": costs.of_run(setup), "sample": sample,
            "warnings": [*task.warnings, *(_frozen(setup.engine) if tuned else ())],
        }  # fmt: skip


def replay(history: str | Path, *, model: str, out: str | Path, engine: str | None = None) -> RunResult:
    """Rebuild a run folder from its journal and the base model alone; its delta is bit-identical.

    history: a history.jsonl, or the folder with one. model: the base (its hash must be the journal's). engine: says
    that ``model`` may be another form of that base (another quantisation, the Hugging Face folder of a GGUF or the
    reverse), for this engine. The delta is the same to the bit then, too, as names, shapes and RMS are the journal's;
    only the header is new: it names the new base and, under ``origin``, those before it with the generations made by
    then. Rewards and evaluations stay those that were had there. Such a run can be resumed: it goes on from the same
    delta with what the new base answers.

    :raises RunError: no journal, another model, one that lacks a tensor, or ``out`` holds a run already.
    """
    source = Path(history)
    source = source / "history.jsonl" if source.is_dir() else source
    journal = History.open(source, repair=False)
    settings = {name: value for name, value in journal.header["config"].items() if value is not None}
    resolved = source.with_name("config.resolved.toml")  # of the paths the journal has only the files' names
    settings = {} if resolved.exists() else settings
    given = {"model": model, "run": str(out)} | ({"engine": engine} if engine else {})
    config_ = config.load(resolved if resolved.exists() else None, _before(journal) | settings | given).absolute()
    header = journal.header
    if engine is None:
        require_same_base(journal, base_hash(config_), model)
    elif (found := base_hash(config_)) != header["base"]:
        header = _moved(journal, config_, found)
    _require_space(config_, journal.spec)
    with RunFolder.create(config_) as folder:
        with folder.made_or_removed():
            folder.check_config(History(source, header))
            write_atomic(folder.history_path, with_header(source, header))
            journal, delta = recover(folder)
            delta.close()
        result = RunResult.of(folder.path, journal, peak_rss_bytes())
        report.write(folder.path, config_.public(), result.to_dict())
        return result


def _before(journal: History) -> dict[str, Any]:
    """Settings that a run was begun without, as they were then."""
    return {name: value for name, value in config.BEFORE.items() if name not in journal.header["config"]}


def _moved(journal: History, config: Config, base: str) -> dict[str, Any]:
    """The header of a run that goes over to another form of its base. :raises RunError: it lacks a tensor."""
    old = journal.header
    with closing(open_engine(config)) as engine:
        spec = under_names_of(engine, journal.spec, config.model)
    left = {"base": old["base"], "model": old.get("model"), "engine": old["config"]["engine"]}
    return {
        **old, "base": base, "model": Path(config.model).name, "delta": spec.to_dict(),
        "config": {**old["config"], "engine": config.engine},
        "origin": [*old.get("origin", []), {**left, "generations": journal.generation}],
    }  # fmt: skip


def report_of(run: str | Path) -> tuple[RunResult, list[Path], list[str]]:
    """The files for people of a run (:func:`edgees.report.write`) made anew: result, files, what is to be said.

    :raises RunError: no run there.
    """
    folder = Path(run)
    history = History.open(folder / "history.jsonl", repair=False)
    if not (folder / "metrics.jsonl").exists():
        raise RunError(f"{run} has nothing to report yet", f"go on with it: edgees resume {shlex.quote(str(run))}")
    records = report.read_metrics(folder)
    result = RunResult.of(folder, history, max((r.get("peak_rss_bytes") or 0 for r in records), default=0))
    return result, *report.write(folder, config.load(folder / "config.resolved.toml").public(), result.to_dict())


# --- the parts of a run ---------------------------------------------------------------------------------------------


# --- how long it takes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds that one answer, and one likelihood of a reference answer, take."""

    reply: float
    loglik: float

    def of_run(self, setup: Setup) -> float:
        """Seconds that a run will take, evaluations included."""
        c, total = setup.config, setup.config.max_generations
        if total is None:
            return c.time
        seconds = 0.0
        for g in range(total):
            weight = loglik_weight(g / total, c.loglik, c.loglik_hold, c.loglik_end)
            seconds += (self.reply * (weight < 1.0) + self.loglik * (weight > 0.0)) * c.members * c.rows
        evaluations = 1 + -(-total // (c.eval_every or total))
        seconds += evaluations * len(setup.heldout()) * self.reply
        if c.evolve:  # what proposals may play; prompts that grow are not foreseen
            seconds *= 1.0 + c.evolve_budget
        return min(seconds, c.time) if c.time else seconds


def probe(setup: Setup, progress: Progress | None = None) -> tuple[Costs, list[Trajectory]]:
    """Measure :class:`Costs` on a few rows, answered by the model as it is; also those answers."""
    rows = setup.task.train[:PROBE_ROWS]
    began = time.monotonic()
    answers = rollout.play(setup.engine, rollout.every([CENTRE], rows), setup.replies(0, 0.0), progress)
    reply, began = (time.monotonic() - began) / len(rows), time.monotonic()
    if setup.config.loglik > 0.0:
        rollout.likelihood(setup.engine, rollout.every([CENTRE], rows), setup.replies(0, 0.0))
    return Costs(reply, (time.monotonic() - began) / len(rows)), answers


# --- the run --------------------------------------------------------------------------------------------------------


@dataclass
class _Generation:
    """What the members of one generation did. rewards: float64 [P, 1 or 2, rows], NaN = excluded.

    tokens: generated, or scored as a reference answer; processed: all that went through the model.
    """

    rewards: np.ndarray
    excluded: list[list[Any]] = field(default_factory=list)
    answers: list[Trajectory] = field(default_factory=list)
    tokens: int = 0
    processed: int = 0


class _Run:
    """One process's work on a run: :meth:`loop` is the algorithm, everything below it a detail."""

    def __init__(self, setup: Setup, folder: RunFolder, history: History, delta: Delta, observer: Observer) -> None:
        self.setup, self.folder, self.history, self.delta, self.observer = setup, folder, history, delta, observer
        self.config, self.task, self.engine, self.scorer = setup.config, setup.task, setup.engine, setup.scorer
        self.sigma = self.config.sigma if self.config.sigma_abs is None else self.config.sigma_abs
        self.population = Population(self.config.seed, self.config.pairs, self.config.antithetic)
        total = len(self.task.train)
        each = min(self.config.rows, total)
        self.groups = min(self.config.groups, total // each)
        if self.config.scope == "none":  # members are all alike: two a set of rows, one for each side of a trial
            self.groups = max(1, min(self.config.pairs // 2, total // each))
        self.order = RowOrder(self.config.seed, total, each * self.groups)
        self.stop = Stop()
        self.mark = time.monotonic()
        self.phases: dict[str, float] = {}
        self.last_phases: dict[str, float] = {}
        wanted = Counter(row.answer for row in setup.heldout() if row.answer is not None)
        self.watch = watch.Watch(max(wanted.values(), default=0) / max(wanted.total(), 1), self.config.drift_budget)
        self.watch.catch_up(history.lines, history.evals)
        self.stopped = False
        self.fruitless = 0
        self.stack = ExitStack()
        self.trials = Trials(setup.context.digest, self.config.evolve_error)
        for entry in sorted([*history.proposals, *history.lines], key=lambda e: (e["generation"], "proposal" not in e)):
            if "proposal" in entry:
                self.put_on_trial(entry)
            elif "trial" in entry:
                self.trials.take(entry["trial"])
        self.proposer = Proposer(setup, history, folder.path, self.stack) if self.config.evolve else None

    @property
    def context(self) -> Context:
        """The one in force."""
        return self.history.contexts[self.trials.present]

    def loop(self) -> None:
        """Perturb, play, score, step; journal first, weights second. Ends when the run is over."""
        c, history = self.config, self.history
        while True:
            g = history.generation
            if self.evaluation_is_due(g):
                self.evaluate(g)
            if self.over():
                return
            if self.proposal_is_due(g):
                self.propose(g)
                if self.stopped:
                    continue
            fraction = self.fraction()
            sigma = sigma_at(fraction, self.sigma, c.sigma_end)
            lr = c.lr * sigma / self.sigma if self.sigma else 0.0  # scope none has neither
            weight = loglik_weight(fraction, c.loglik, c.loglik_hold, c.loglik_end)
            members = self.population.ask(g, 0.0 if c.scope == "none" else sigma)
            rows = [self.task.train[i] for i in self.order.rows(g)]
            deal = self.trials.deal(c.pairs, self.groups, self.order.count // self.groups)
            made = self.play(g, members, rows, weight, deal)
            verdict = self.trials.judge(deal, made.rewards)
            drift = self.delta.drift()
            moved = self.moved(g, members)
            step = self.step(level(deal, made.rewards) - c.anchor * moved, lr, sigma, drift)
            line = {"generation": g, "rows": [row.id for row in rows], "fraction": fraction, "sigma": sigma, "lr": lr,
                    "loglik": weight, "drift": drift, "answers": made.rewards.size, "context": self.context.digest,
                    **({} if deal.idle else {"trial": verdict.to_dict()}),
                    **({"moved": [round(float(x), 4) for x in moved.ravel()]} if moved.any() else {}), **_of_step(step),
                    **_of_answers(made)}  # fmt: skip
            history.append({**line, "seconds": self.seconds()})
            self.delta.apply(history.step(g))
            self.engine.refresh()
            self.tell(g, step, made)
            self.turn(g)

    def carry_on(self) -> RunResult:
        """Run the loop to its end; whatever ends it, what can be read of the run is brought up to date."""
        with stop_on_signal(self.stop):
            self.engine.attach(self.delta)
            self.observer.on_start(self.info())
            agents = self.setup.agents
            if agents is not None:
                agents.log = self.folder.path / "agents.log"
            frozen = [] if self.config.scope == "none" else _frozen(self.engine)
            for text in (*self.task.warnings, *(agents.notes if agents else ()), *frozen):
                self.observer.on_message(text)
            try:
                self.foretell()
                self.loop()
                if not self.task.heldout:
                    self.folder.save_best(self.delta, {"generation": self.history.generation, "heldout": None})
            except KeyboardInterrupt as error:
                raise self.advised(Interrupted("interrupted")) from error
            except EdgeesError as error:
                self.advised(error)
                raise
            finally:
                self.stack.close()
                result = RunResult.of(self.folder.path, self.history, peak_rss_bytes())
                self.write_report(result)
        self.observer.on_end(result.to_dict())
        return result

    def advised(self, error: EdgeesError) -> EdgeesError:
        """The error, saying what is saved and how to go on."""
        run = shlex.quote(str(self.folder.path))
        advice = f"{self.history.generation} generation(s) are saved; go on with: edgees resume {run}"
        error.hint = f"{error.hint}; {advice}" if error.hint else advice
        return error

    # ------------------------------------------------------------------------------------- how far the run is

    def fraction(self) -> float:
        """Share of the run that is over: of its generations, or of its time where that alone limits it."""
        total = self.config.max_generations
        if total is not None:
            return min(1.0, self.history.generation / total)
        return min(1.0, self.history.seconds() / self.config.time)

    def over(self) -> bool:
        """No generation is left, none that would end, with the last evaluation, within the time, or a watchdog stopped
        the run."""
        if self.stopped:
            return True
        lines, evals, limit = self.history.lines, self.history.evals, self.config.time
        total = self.config.max_generations
        if total is not None and len(lines) >= total:
            return True
        if not limit or not lines:  # one generation there is in any case
            return False
        return self.history.seconds() + sum(float(e[-1]["seconds"]) for e in (lines, evals) if e) > limit

    def evaluation_is_due(self, generation: int) -> bool:
        if not self.task.heldout or any(e["eval"] == generation for e in self.history.evals):
            return False
        every = self.config.eval_every
        return generation == 0 or (every > 0 and generation % every == 0) or self.over()

    def foretell(self) -> None:
        """Say how long it will take: by the pace so far, before there is any by a short probe."""
        done, total, spent = self.history.generation, self.config.max_generations, self.history.seconds()
        if self.over():
            return
        if not done:
            seconds = probe(self.setup, self.progress(PROBE_ROWS))[0].of_run(self.setup)
            self.stop.check()
        elif total is None:
            seconds = self.config.time - spent
        else:
            seconds = spent / done * (total - done)
        self.observer.on_message(f"expected time: about {report.duration(seconds)}")

    def lap(self, phase: str) -> None:
        """The time since the last lap went into ``phase``."""
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.mark
        self.mark = now

    def seconds(self) -> float:
        """Seconds since the last line of the journal; starts the next one's phases."""
        self.lap("other")
        total = sum(self.phases.values())
        self.last_phases, self.phases = self.phases, {}
        return total

    # --------------------------------------------------------------------------------------- members and rows
    def play(
        self, generation: int, members: Sequence[Member], rows: Sequence[Row], weight: float, deal: Deal
    ) -> _Generation:
        """Every member on every row of its group: rewards, or likelihoods, or a mixture of both by ``weight``."""
        each = len(rows) // self.groups
        shape = (self.config.pairs, len(self.population.signs), each)
        mine = [rows[g * each : (g + 1) * each] for g in range(self.groups)]
        rollouts = [(member, row) for member in members for row in mine[member.pair % self.groups]]
        if self.config.scope == "none" and deal.idle:  # nobody differs from anybody
            return _Generation(np.full(shape, math.nan))
        known = self.history.contexts
        told = [known[deal.of(member.pair, i) or self.trials.present] for member in members for i in range(each)]
        settings = self.setup.replies(generation, self.config.temperature, self.context, told)
        progress = self.progress(len(rollouts))
        made = _Generation(np.empty(0))
        scored = likely = None
        if weight < 1.0:
            made.answers = rollout.play(self.engine, rollouts, settings, progress)
            made.tokens += sum(len(t.tokens) for t in made.answers)
            made.processed += progress.tokens
            self.lap("generate")
            scored = np.array(self.score(made.answers, made.excluded)).reshape(shape)
            self.lap("score")
        if weight > 0.0:
            scores = rollout.likelihood(self.engine, rollouts, settings, progress)
            made.tokens += sum(s.tokens for s in scores if s is not None)
            made.processed += progress.tokens
            likely = np.array([math.nan if s is None else s.mean for s in scores]).reshape(shape)
            reason = "no likelihood: prompt and answer do not fit the context, or it is not finite"
            for pair, side, row in np.argwhere(~np.isfinite(likely)):
                made.excluded.append([int(pair), 1 - 2 * int(side), mine[pair % self.groups][row].id, reason])
            self.lap("loglik")
        self.stop.check()
        made.rewards = mix(scored, likely, weight)
        self.trace(f"{generation:06d}.jsonl", made.answers, made.rewards.reshape(-1).tolist(), told)
        self.require_rewards(f"generation {generation + 1}", made.rewards.reshape(-1), made.excluded)
        return made

    def moved(self, generation: int, members: Sequence[Member]) -> np.ndarray:
        """Nats a token by which each member has moved from the base, float64 [pairs, 1 or 2, 1]; 0 without anchor."""
        shape = self.config.pairs, len(self.population.signs), 1
        if not self.config.anchor or self.config.scope == "none":
            return np.zeros(shape)
        first = self.history.evals[0]["general"]
        found = forgetting.moved(self.engine, members, first, generation).reshape(shape)
        self.lap("anchor")
        return found

    def step(self, rewards: np.ndarray, lr: float, sigma: float, drift: float) -> Update:
        """What they say about the weights; nothing where these are not tuned."""
        c = self.config
        if c.scope == "none":
            reason = "" if np.isfinite(rewards).any() else "no context is on trial: nothing was played"
            return Update(fitness(rewards, self.groups), (0.0,) * c.pairs, (0.0,) * c.pairs, 1.0, 0.0, reason)
        return update(
            rewards, lr=lr, sigma=sigma, shaping=c.shaping, shrink=c.shrink, decay=c.decay, drift=drift,
            drift_budget=c.drift_budget, spread=self.delta.spec.spread, groups=self.groups,
        )  # fmt: skip

    def score(self, answers: Sequence[Trajectory], excluded: list[list[Any]]) -> list[float]:
        """A reward per answer, NaN for those that have none; these are added to ``excluded``."""
        scores = rewards.judge(self.scorer, answers)
        for fault in scores.faults:
            t = answers[fault.index]
            sign = t.member.sign if t.member.amplitude else 0
            excluded.append([t.member.pair, sign, t.row.id, f"{fault.function}: {fault.reason}"[:200]])
        return scores.rewards

    def require_rewards(self, where: str, values: np.ndarray, excluded: Sequence[Sequence[Any]]) -> None:
        """Say which rewards were excluded. :raises ScorerError: they are more than ``max_invalid`` of all."""
        invalid = int((~np.isfinite(values)).sum())
        if not invalid:
            return
        pair, sign, row, reason = excluded[0]
        first = f"{f'pair {pair}{chr(43) if sign > 0 else chr(45)}, ' if sign else ''}row {row}: {reason}"
        if invalid > self.config.max_invalid * values.size:
            raise ScorerError(
                f"{where}: {invalid} of {values.size} rewards are invalid (more than max_invalid = "
                f"{self.config.max_invalid:g}); the first: {first}",
                "mend the scorer",
            )
        more = f" (and {invalid - 1} more)" if invalid > 1 else ""
        self.observer.on_message(f"{where}: excluded: {first}{more}")

    def evaluate(self, generation: int) -> None:
        """Score the unperturbed centre on the held-out rows, greedily or with the run's attempts; keep it if it is the
        best so far."""
        rows = self.setup.heldout()
        progress = self.progress(len(rows))
        settings = self.setup.replies(0, 0.0, self.context)
        answers = rollout.play(self.engine, rollout.every([CENTRE], rows), settings, progress)
        self.stop.check()
        self.lap("generate")
        excluded: list[list[Any]] = []
        values = np.array(self.score(answers, excluded), np.float64)
        self.lap("score")
        where = f"evaluation after {generation} generation(s)"
        self.trace(f"eval-{generation:06d}.jsonl", answers, values.tolist(), [self.context] * len(answers))
        self.require_rewards(where, values, excluded)
        valid = values[np.isfinite(values)]
        entry: dict[str, Any] = {
            "eval": generation,
            "context": self.context.digest,
            "mean": float(valid.mean()) if valid.size else None,
            "se": float(valid.std(ddof=1) / math.sqrt(valid.size)) if valid.size > 1 else None,
            "rows": len(rows),
            "rewards": _numbers(values),
            "metrics": self.measures(answers),
            "excluded": excluded,
            **_texts(answers),
        }
        entry |= self.general(entry)
        if self.config.loglik > 0.0:
            scores = rollout.likelihood(self.engine, rollout.every([CENTRE], rows), settings, progress)
            entry["loglik"] = forgetting.per_token([score for score in scores if score is not None])
            self.lap("loglik")
        best = self.history.best()
        self.history.append({**entry, "seconds": self.seconds()})
        better = entry["mean"] is not None and (best is None or entry["mean"] > best["mean"])
        if better:
            self.folder.save_best(self.delta, {"generation": generation, "heldout": entry["mean"]})
        record = evaluation_record(self.history.evals[-1], better)
        append_line(self.folder.path / "metrics.jsonl", record)
        self.observer.on_eval(record)
        self.look(generation)

    def measures(self, answers: Sequence[Trajectory]) -> dict[str, float]:
        """The task's metrics, and what episodes report of themselves: means over the rows that have them."""
        found = {name: [measure(t.row, t.completion) for t in answers] for name, measure in self.task.metrics.items()}
        for t in answers:
            for name, value in t.parts.items():
                found.setdefault(name, []).append(value)
        if any(t.episode for t in answers):
            found["turns"] = [float(t.turns) for t in answers]
        return {name: float(np.mean(values)) for name, values in found.items()}

    def general(self, entry: dict[str, Any]) -> dict[str, Any]:
        """``kl`` and ``perplexity`` of an evaluation (:mod:`edgees.forgetting`); the first keeps what the base said."""
        evals = self.history.evals
        first = evals[0].get("general") if evals else None
        if first is None and entry["eval"]:
            return {}  # a run begun before this was measured
        found, first = forgetting.measure(self.engine, first)
        self.lap("general")
        return found if entry["eval"] else {**found, "general": first}

    # ------------------------------------------------------------------------------------------------ contexts

    def proposal_is_due(self, generation: int) -> bool:
        """At every ``evolve_every``-th generation, or where nothing else is left to try; once a generation."""
        c, made = self.config, self.history.proposals
        if self.proposer is None or (made and made[-1]["generation"] == generation):
            return False
        if c.scope == "none" and not self.trials.new:
            return True
        return generation % c.evolve_every == 0 and self.trials.new < c.evolve_candidates

    def propose(self, generation: int) -> None:
        """Let the evolvers propose contexts; they are on trial from this generation on."""
        assert self.proposer
        line = self.proposer.propose(generation, self.context, self.config.evolve_candidates - self.trials.new)
        self.stop.check()
        known = self.history.contexts  # what was tried once is not tried again: every trial is another chance to err
        line["candidates"] = [found for found in line["candidates"] if found["digest"] not in known]
        self.lap("propose")
        self.history.append({**line, "seconds": self.seconds()})
        self.put_on_trial(line)
        for found in line["candidates"]:
            self.observer.on_message(f"context {found['digest'][:8]} on trial: {found['origin']}")
        for failure in line["failures"]:
            self.observer.on_message(f"proposal failed: {failure}")
        if self.stopped:
            self.observer.on_message(f"the run ends here: {self.fruitless} proposals in a row held nothing new to try")

    def put_on_trial(self, proposal: Mapping[str, Any]) -> None:
        """A proposal's candidates. One that is the last of several without any ends a run that tunes no weights."""
        self.trials.propose([found["digest"] for found in proposal["candidates"]])
        self.fruitless = 0 if proposal["candidates"] else self.fruitless + 1
        if self.config.scope == "none" and self.fruitless >= FRUITLESS and not self.trials.new:
            self.stopped = True

    def turn(self, generation: int) -> None:
        """Take the verdict of a generation: which context is in force now, which are not tried any longer."""
        verdict = self.history.lines[generation].get("trial")
        if verdict is None:
            return
        before = self.context
        seen = {name: list(s.differences) for name, s in self.trials.standings.items()}
        self.trials.take(verdict)
        for name in filter(None, [verdict["adopted"]]):
            values = [*seen[name], *verdict["units"].get(name, [])]
            self.observer.on_message(
                f"context {name[:8]} adopted for {before.digest[:8]}: {np.mean(values):+.3f} a row over {len(values)} "
                f"rows; its text: {self.folder.path / 'context.json'}"
            )
        write_context(self.folder.path, self.context)

    def look(self, generation: int) -> None:
        """Let the watchdogs look at the journal; say what they find, and stop where the user asked for it."""
        for finding in self.watch.see(self.history.lines, self.history.evals):
            if self.config.scope == "none" and finding.kind in ("no-signal", "stall"):
                continue  # of weights that nobody tunes
            append_line(self.folder.path / "metrics.jsonl", finding.record(generation))
            self.observer.on_message(f"{finding.kind}: {finding.text}")
            if finding.kind in self.config.stop_on and not finding.ended:
                self.stopped = True
                self.observer.on_message(f"the run ends here, as stop_on = {finding.kind} asks; the best is kept")

    def progress(self, total: int) -> _Progress:
        return _Progress(self.stop, self.observer, total)

    # ------------------------------------------------------------------------------------------------ records

    def tell(self, generation: int, step: Update, made: _Generation) -> None:
        line = self.history.lines[generation]
        record = generation_record(line) | {
            "drift": self.delta.drift(),
            "processed": made.processed,
            "tokens_per_second": (made.processed or made.tokens) / max(line["seconds"], 1e-9),
            "peak_rss_bytes": peak_rss_bytes(),
            **{f"seconds_{name}": seconds for name, seconds in self.last_phases.items()},
        }
        append_line(self.folder.path / "metrics.jsonl", record)
        self.observer.on_generation(record)
        if step.reason:
            self.observer.on_message(f"generation {generation + 1}: {step.reason}")
        self.look(generation + 1)

    def trace(self, name: str, answers: Sequence[Trajectory], values: Sequence[float], told: Sequence[Context]) -> None:
        """Every answer of a generation with its reward, for people to read."""
        if not answers:
            return
        lines = [
            json.dumps(
                {
                    "row": t.row.id, "pair": t.member.pair, "sign": t.member.sign if t.member.amplitude else 0,
                    "reward": value if math.isfinite(value) else None, "outcome": t.outcome, "answer": t.completion,
                    "context": context.digest, **_of_episode(t), **_of_attempts(t),
                },
                ensure_ascii=False,
            )
            for t, value, context in zip(answers, values, told, strict=True)
        ]  # fmt: skip
        folder = self.folder.path / "traces"
        folder.mkdir(exist_ok=True)
        write_atomic(folder / name, ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))

    def info(self) -> dict[str, Any]:
        c, spec = self.config, self.delta.spec
        return {
            "run": str(self.folder.path), "model": c.model, "task": self.task.name, "generations": c.max_generations,
            "seconds": c.time or None, "members": c.members, "rows": self.order.count // self.groups,
            "weights": sum(t.size for t in spec.tensors), "generation": self.history.generation, "scope": c.scope,
            "tensors": len(spec.tensors), "elapsed": self.history.seconds(),
        }  # fmt: skip

    def write_report(self, result: RunResult) -> None:
        """metrics.csv, plot and page. A run that ends by an error must end by that error, not by one from here."""
        failed = sys.exc_info()[0] is not None
        try:
            self.setup.release()  # what plots is not to come on top of the model
            if self.stop.asked < 2 and (self.folder.path / "metrics.jsonl").exists():
                _, notes = report.write(self.folder.path, self.config.public(), result.to_dict())
                for note in notes if not failed else []:
                    self.observer.on_message(note)
        except (EdgeesError, OSError, KeyboardInterrupt):
            if not failed:
                raise


class _Progress:
    """What an engine calls now and then: passes it on, and is the place to stop. tokens: processed so far."""

    def __init__(self, stop: Stop, observer: Observer, total: int) -> None:
        self.stop, self.observer, self.total, self.tokens = stop, observer, total, 0

    def __call__(self, done: int, tokens: int) -> None:
        self.tokens = tokens
        self.observer.on_progress(done, self.total, tokens)
        self.stop.check()


def peak_rss_bytes() -> int:
    """Peak resident set of this process so far."""
    with suppress(OSError):  # Linux: getrusage tells the peak of the parent before exec if that was higher
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak) if sys.platform == "darwin" else int(peak) * 1024
    return 0


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


def _of_step(step: Update) -> dict[str, Any]:
    mean = step.fitness.mean
    return {
        "keep": short_float32s([step.keep])[0],
        "shrink": step.shrink,
        "rewards": {"plus": _numbers(mean[:, 0]), "minus": _numbers(mean[:, 1]) if mean.shape[1] == 2 else []},
        "z": list(step.z),
        "coefs": short_float32s(step.coefs),
        "reason": step.reason,
    }


def _of_answers(made: _Generation) -> dict[str, Any]:
    return {"excluded": made.excluded, **_texts(made.answers), "tokens": made.tokens}


def _of_episode(t: Trajectory) -> dict[str, Any]:
    """What a trace tells of an episode beyond a single answer."""
    if not t.episode:
        return {}
    return {
        "reason": t.reason, "fault": t.fault, "turns": t.turns, "tokens": len(t.tokens), "paid": t.reward,
        "parts": dict(t.parts), "given": t.given, "messages": list(t.messages),
    }  # fmt: skip


def _of_attempts(t: Trajectory) -> dict[str, Any]:
    """What a trace tells of several attempts: every answer, and which of them counts."""
    return {"attempts": [a.completion for a in t.attempts], "chosen": t.chosen} if t.attempts else {}


def _texts(answers: Sequence[Trajectory]) -> dict[str, Any]:
    """distinct: different texts; majority: share of the commonest; length: mean tokens; the rest: counts."""
    if not answers:
        return {"distinct": None, "majority": None, "length": None, "truncated": 0, "overflow": 0, "tokens": 0}
    texts = Counter(t.completion.strip() for t in answers)
    tokens = sum(len(t.tokens) for t in answers)
    return {
        "distinct": len(texts),
        "majority": max(texts.values()) / len(answers),
        "length": tokens / len(answers),
        "truncated": sum(t.outcome in ("length", "truncated") for t in answers),
        "overflow": sum(t.outcome == "overflow" for t in answers),
        "tokens": tokens,
    }


# --- what is refused ------------------------------------------------------------------------------------------------


def _require_space(config: Config, spec: DeltaSpec) -> int:
    """Bytes for delta, the best so far, and its replacement while that is written: refused before anything is."""
    size = 0
    for t in spec.tensors:
        size += 4 * t.rows * (spec.factors if spec.view == "adapter" and not t.vector else t.cols)
    folder = Path(config.run or "runs").absolute()
    while not folder.exists():
        folder = folder.parent
    require_space(folder, 3 * size, "a run (the learned weights, the best so far, and one copy in the making)")
    return 3 * size


def _frozen(engine: Engine) -> list[str]:
    frozen = engine.frozen
    if not frozen:
        return []
    some = "; ".join(f"{name}: {reason}" for name, reason in frozen[:3])
    return [f"{len(frozen)} tensor(s) stay as they are ({some}{'; ...' if len(frozen) > 3 else ''})"]
