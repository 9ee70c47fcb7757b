"""The loop. It alone knows the order of things; what each of them does stands in the other modules.

Nothing is printed here: an observer (:class:`edgees.report.Observer`) is told what happens.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgees import __version__, native, report, rewards, rollout
from edgees.backends.base import CENTRE, Engine, Member
from edgees.checkpoint import (
    RunFolder,
    append_line,
    evaluation_record,
    generation_record,
    recover,
    write_atomic,
)
from edgees.config import Config
from edgees.delta import Delta, DeltaSpec, require_space
from edgees.errors import EdgeesError, Interrupted, RunError, ScorerError, UsageError
from edgees.history import History, short_float32s
from edgees.population import Population, RowOrder, sigma_at
from edgees.report import Observer
from edgees.rewards import Scorer
from edgees.rollout import Trajectory
from edgees.tasks import load_task
from edgees.tasks.rows import Row, Task
from edgees.update import Update, loglik_weight, mix, update


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
        stop = stack.enter_context(_stop_on_signal())
        task = task or open_task(config)
        config = config.with_defaults(task.defaults, f"task {task.name}")
        scorer = _scorer(config, task, scorer, stack)
        _check_task(config, task)
        engine = _engine(config, engine, stack)
        spec = spec_of(config, engine)
        _check_space(config, spec)
        folder = stack.enter_context(RunFolder.create(config))
        delta = stack.enter_context(Delta.create(folder.delta_path, spec))
        header = {
            "edgees": __version__, "base": engine.base_hash, "data": _data_hash(config, task),
            "config": config.public(free=False), "seed": config.seed, "pairs": config.pairs, "delta": spec.to_dict(),
        }  # fmt: skip
        history = History.create(folder.history_path, header)
        return _Run(config, engine, task, scorer, folder, history, delta, observer or Silent(), stop).carry_on()


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
    observer = observer or Silent()
    with ExitStack() as stack:
        stop = stack.enter_context(_stop_on_signal())
        folder = stack.enter_context(RunFolder.open(run))
        config = folder.config
        folder.check_config(History.open(folder.history_path, repair=False))
        history, delta = recover(folder)
        stack.enter_context(delta)
        for note in folder.notes:
            observer.on_message(note)
        task = task or open_task(config)
        if _data_hash(config, task) != history.header["data"]:
            raise RunError(f"the rows of task {task.name} are not those that {run} began with", "restore the data")
        scorer = _scorer(config, task, scorer, stack)
        engine = _engine(config, engine, stack)
        if engine.base_hash != history.header["base"]:
            raise RunError(
                f"the model {config.model} is not the one that {run} began with: it is {engine.base_hash}, "
                f"the history says {history.header['base']}",
                "restore the model file",
            )
        if spec_of(config, engine) != delta.spec:
            raise RunError(
                f"the engine sees other tensors than {run} began with", "use the edgees version that began it"
            )
        return _Run(config, engine, task, scorer, folder, history, delta, observer, stop).carry_on()


def open_task(config: Config) -> Task:
    """The task that a configuration names."""
    return load_task(
        config.task,
        eval_data=config.eval_data or None,
        split=config.heldout,
        seed=config.seed,
        limit=config.limit or None,
    )


def open_scorer(config: Config, task: Task) -> Scorer:
    """The user's scorers, else the task's own. :raises UsageError: there is none."""
    specs = config.reward or task.reward
    if not specs:
        raise UsageError(f"task {task.name} has no scorer of its own", "name one: --reward score.py, or --reward exact")
    return rewards.load(specs, deadline=config.scorer_timeout)


def open_engine(config: Config) -> Engine:
    """The engine that a configuration names, its model loaded."""
    if config.engine == "toy":
        from edgees.backends.toy import ToyEngine

        return ToyEngine(config.model, params=config.params)
    if config.engine == "llamacpp":
        from edgees.backends.llamacpp import LlamaCppEngine
        from edgees.model_path import resolve

        return LlamaCppEngine(
            resolve(config.model), context=config.context, parallel=config.parallel, threads=config.threads,
            params=config.params or None,
        )  # fmt: skip
    raise UsageError("the torch engine is not there yet", "use --engine llamacpp")


def spec_of(config: Config, engine: Engine) -> DeltaSpec:
    """What is tuned, and how. With ``sigma_abs`` all amplitudes are absolute: rho is 1 for every tensor."""
    tensors = engine.tensors
    if config.sigma_abs is not None:
        tensors = [replace(t, rho=1.0) for t in tensors]
    view = config.view
    return DeltaSpec(
        tuple(tensors),
        view,
        config.bits if view == "refined" else 0,
        config.factors if view == "adapter" else 0,
        config.noise,
        config.rank,
        config.seed,
    )


def evaluation_rows(task: Task, count: int) -> list[Row]:
    """The held-out rows that are scored: all, or ``count`` chosen by a hash of their names, the same in every run."""
    rows = list(task.heldout)
    if not count or count >= len(rows):
        return rows
    chosen = sorted(rows, key=lambda row: hashlib.blake2b(row.id.encode(), digest_size=8).digest())[:count]
    names = {row.id for row in chosen}
    return [row for row in rows if row.id in names]


class Silent:
    """An observer that does nothing with what it is told."""

    def on_start(self, info: report.Record) -> None: ...

    def on_progress(self, done: int, total: int, tokens: int) -> None: ...

    def on_generation(self, record: report.Record) -> None: ...

    def on_eval(self, record: report.Record) -> None: ...

    def on_message(self, text: str) -> None: ...

    def on_end(self, summary: report.Record) -> None: ...


@dataclass
class _Generation:
    """What the members of one generation did. rewards: float64 [P, 2, rows], NaN = excluded."""

    rewards: np.ndarray
    excluded: list[list[Any]]
    answers: list[Trajectory]
    tokens: int
    processed: int


class _Run:
    """One process's work on a run: :meth:`loop` is the algorithm, everything below it a detail."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        task: Task,
        scorer: Scorer,
        folder: RunFolder,
        history: History,
        delta: Delta,
        observer: Observer,
        stop: _Stop,
    ) -> None:
        self.config, self.engine, self.task, self.scorer = config, engine, task, scorer
        self.folder, self.history, self.delta = folder, history, delta
        self.observer, self.stop = observer, stop
        self.sigma = config.sigma if config.sigma_abs is None else config.sigma_abs
        self.population = Population(config.seed, config.pairs)
        self.order = RowOrder(config.seed, len(task.train), config.rows)
        self.mark = time.monotonic()
        self.processed = 0
        self.warned: set[str] = set()

    def loop(self) -> None:
        """Perturb, play, score, step; journal first, weights second. Ends when the run is over."""
        c, task = self.config, self.task
        while True:
            g, fraction, over = self.history.generation, self.fraction(), self.over()
            if self.evaluation_is_due(g, over):
                self.evaluate(g)
            if over:
                return
            clock = _Clock()
            sigma = sigma_at(fraction, self.sigma, c.sigma_end)
            lr = c.lr * sigma / self.sigma
            weight = loglik_weight(fraction, c.loglik, c.loglik_hold, c.loglik_end)
            members = self.population.ask(g, sigma)
            rows = [task.train[i] for i in self.order.rows(g)]
            made = self.play(g, members, rows, weight, clock)
            drift = self.delta.drift()
            step = update(
                made.rewards, lr=lr, sigma=sigma, shaping=c.shaping, shrink=c.shrink, decay=c.decay, drift=drift,
                drift_budget=c.drift_budget,
            )  # fmt: skip
            line = {"generation": g, "rows": [row.id for row in rows], "fraction": fraction, "sigma": sigma, "lr": lr}
            line |= {"loglik": weight, "drift": drift, **_of_step(step), **_of_answers(made)}
            self.history.append({**line, "seconds": self.lap()})
            self.delta.apply(self.history.step(g))
            self.engine.refresh()
            clock.lap("update")
            self.tell(g, step, made, clock)

    def carry_on(self) -> RunResult:
        """Run the loop to its end; whatever ends it, the figures on disk are brought up to date."""
        native.threads(self.config.threads)
        self.engine.attach(self.delta)
        self.observer.on_start(self.info())
        for text in (*self.task.warnings, *_frozen(self.engine)):
            self.observer.on_message(text)
        saved = f"the run is saved up to generation {self.history.generation}"
        try:
            try:
                self.loop()
            except (Interrupted, KeyboardInterrupt) as error:
                saved = f"{self.history.generation} generation(s) are saved in {self.folder.path}"
                raise Interrupted(f"interrupted; {saved}", f"go on with: edgees resume {self.folder.path}") from error
            if not self.task.heldout:
                self.folder.save_best(self.delta, {"generation": self.history.generation, "heldout": None})
        finally:
            self.write_report()
        result = self.result()
        self.observer.on_end(result.to_dict())
        return result

    # ------------------------------------------------------------------------------------- how far the run is

    def fraction(self) -> float:
        """Share of the run that is over: of its generations, or of its time where that alone limits it."""
        total = self.config.max_generations
        if total is not None:
            return min(1.0, self.history.generation / total)
        return min(1.0, self.history.seconds() / self.config.time)

    def over(self) -> bool:
        total = self.config.max_generations
        if total is not None and self.history.generation >= total:
            return True
        return self.config.time > 0 and self.history.seconds() >= self.config.time

    def evaluation_is_due(self, generation: int, over: bool) -> bool:
        if not self.task.heldout or any(e["eval"] == generation for e in self.history.evals):
            return False
        every = self.config.eval_every
        return generation == 0 or over or (every > 0 and generation % every == 0)

    def lap(self) -> float:
        """Seconds since the last line of the journal."""
        now = time.monotonic()
        seconds, self.mark = now - self.mark, now
        return seconds

    # --------------------------------------------------------------------------------------- members and rows

    def play(
        self, generation: int, members: Sequence[Member], rows: Sequence[Row], weight: float, clock: _Clock
    ) -> _Generation:
        """Every member on every row: rewards, or likelihoods, or a mixture of both by ``weight``."""
        c = self.config
        shape = (c.pairs, 2, len(rows))
        settings = self.settings(generation, c.temperature)
        excluded: list[list[Any]] = []
        answers: list[Trajectory] = []
        scored = likely = None
        tokens = self.processed = 0
        if weight < 1.0:
            answers = rollout.play(self.engine, members, rows, settings, self.progress(members, rows))
            tokens += sum(len(t.tokens) for t in answers)
            clock.lap("generate")
            scored = self.score(answers, shape, excluded)
            clock.lap("score")
        processed, self.processed = self.processed, 0
        if weight > 0.0:
            scores = rollout.likelihood(self.engine, members, rows, settings, self.progress(members, rows))
            tokens += sum(s.tokens for s in scores if s is not None)
            likely = np.array([np.nan if s is None else s.mean for s in scores]).reshape(shape)
            for pair, side, row in np.argwhere(~np.isfinite(likely)):
                reason = "no likelihood: prompt and answer do not fit the context, or it is not finite"
                excluded.append([int(pair), 1 - 2 * int(side), rows[row].id, reason])
            clock.lap("loglik")
        self.stop.check()
        made = _Generation(mix(scored, likely, weight), excluded, answers, tokens, processed + self.processed)
        self.trace(f"{generation:06d}.jsonl", answers, made.rewards.reshape(-1).tolist())
        self.refuse_if_too_many_are_invalid(generation, made)
        return made

    def score(
        self, answers: Sequence[Trajectory], shape: tuple[int, int, int], excluded: list[list[Any]]
    ) -> np.ndarray:
        scores = self.scorer.score([t.row for t in answers], [t.completion for t in answers])
        for fault in scores.faults:
            t = answers[fault.index]
            excluded.append([t.member.pair, t.member.sign, t.row.id, f"{fault.function}: {fault.reason}"[:200]])
        return np.array(scores.rewards, np.float64).reshape(shape)

    def refuse_if_too_many_are_invalid(self, generation: int, made: _Generation) -> None:
        invalid, total = int((~np.isfinite(made.rewards)).sum()), made.rewards.size
        if not invalid:
            return
        pair, sign, row, reason = made.excluded[0]
        first = f"pair {pair}{'+' if sign > 0 else '-'}, row {row}: {reason}"
        if invalid > self.config.max_invalid * total:
            raise ScorerError(
                f"generation {generation + 1}: {invalid} of {total} rewards are invalid (more than max_invalid = "
                f"{self.config.max_invalid:g}); the first: {first}",
                f"mend the scorer, then: edgees resume {self.folder.path}",
            )
        more = f" (and {invalid - 1} more)" if invalid > 1 else ""
        self.observer.on_message(f"generation {generation + 1}: excluded: {first}{more}")

    def evaluate(self, generation: int) -> None:
        """Score the unperturbed centre on the held-out rows, greedily; keep it if it is the best so far."""
        rows = evaluation_rows(self.task, self.config.eval_rows)
        answers = rollout.play(self.engine, [CENTRE], rows, self.settings(0, 0.0), self.progress([CENTRE], rows))
        self.stop.check()
        scores = self.scorer.score(rows, [t.completion for t in answers])
        values = np.array(scores.rewards, np.float64)
        valid = values[np.isfinite(values)]
        entry: dict[str, Any] = {
            "eval": generation,
            "mean": float(valid.mean()) if valid.size else None,
            "se": float(valid.std(ddof=1) / math.sqrt(valid.size)) if valid.size > 1 else None,
            "rows": len(rows),
            "rewards": [float(v) if math.isfinite(v) else None for v in values],
            "metrics": {
                name: float(np.mean([measure(t.row, t.completion) for t in answers]))
                for name, measure in self.task.metrics.items()
            },
            **_texts(answers),
        }
        best = self.history.best()
        self.history.append({**entry, "seconds": self.lap()})
        better = entry["mean"] is not None and (best is None or entry["mean"] > best["mean"])
        if better:
            self.folder.save_best(self.delta, {"generation": generation, "heldout": entry["mean"]})
        self.trace(f"eval-{generation:06d}.jsonl", answers, list(scores.rewards))
        record = evaluation_record(self.history.evals[-1], better)
        append_line(self.folder.path / "metrics.jsonl", record)
        self.observer.on_eval(record)
        self.warn_of_constant_answer(entry, rows)

    def warn_of_constant_answer(self, entry: dict[str, Any], rows: Sequence[Row]) -> None:
        wanted = Counter(row.answer for row in rows if row.answer is not None)
        natural = max(wanted.values(), default=0) / max(1, len(rows))
        if (
            len(rows) >= 8
            and entry["majority"] >= 0.8 > natural
            and entry["eval"] > 0
            and "constant" not in self.warned
        ):
            self.warned.add("constant")
            self.observer.on_message(
                f"{entry['majority']:.0%} of the held-out answers are the same text: the reward may pay one constant "
                "answer too well"
            )

    def settings(self, generation: int, temperature: float) -> rollout.Settings:
        return rollout.Settings(
            max_tokens=self.config.max_tokens or self.task.max_tokens,
            conversation=lambda row: self.task.conversation(row, self.config.system),
            temperature=temperature,
            seed=self.config.seed,
            generation=generation,
        )

    def progress(self, members: Sequence[Member], rows: Sequence[Row]) -> Callable[[int, int], None]:
        total = len(members) * len(rows)

        def tell(done: int, tokens: int) -> None:
            self.stop.check()
            self.processed = tokens
            self.observer.on_progress(done, total, tokens)

        return tell

    # ------------------------------------------------------------------------------------------------ records

    def tell(self, generation: int, step: Update, made: _Generation, clock: _Clock) -> None:
        line = self.history.lines[generation]
        record = generation_record(line) | {
            "drift": self.delta.drift(),
            "tokens": made.processed or made.tokens,
            "tokens_per_second": (made.processed or made.tokens) / max(line["seconds"], 1e-9),
            "peak_rss_bytes": peak_rss_bytes(),
            **{f"seconds_{name}": seconds for name, seconds in clock.seconds.items()},
        }
        append_line(self.folder.path / "metrics.jsonl", record)
        self.observer.on_generation(record)
        if step.reason:
            self.observer.on_message(f"generation {generation + 1}: {step.reason}")

    def trace(self, name: str, answers: Sequence[Trajectory], values: Sequence[float]) -> None:
        """Every answer of a generation with its reward, for people to read."""
        if not answers:
            return
        lines = [
            json.dumps(
                {
                    "row": t.row.id, "pair": t.member.pair, "sign": t.member.sign if t.member.amplitude else 0,
                    "reward": value if math.isfinite(value) else None, "outcome": t.outcome, "answer": t.completion,
                },
                ensure_ascii=False,
            )
            for t, value in zip(answers, values, strict=True)
        ]  # fmt: skip
        folder = self.folder.path / "traces"
        folder.mkdir(exist_ok=True)
        write_atomic(folder / name, ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))

    def info(self) -> dict[str, Any]:
        c = self.config
        return {
            "run": str(self.folder.path), "model": c.model, "task": self.task.name, "generations": c.max_generations,
            "seconds": c.time or None, "members": 2 * c.pairs, "rows": self.order.count,
            "weights": sum(t.size for t in self.delta.spec.tensors), "generation": self.history.generation,
            "scope": c.scope, "tensors": len(self.delta.spec.tensors), "elapsed": self.history.seconds(),
        }  # fmt: skip

    def result(self) -> RunResult:
        base = next((e["mean"] for e in self.history.evals if e["eval"] == 0), None)
        best = self.history.best()
        return RunResult(
            run=str(self.folder.path),
            generations=self.history.generation,
            base=base,
            best=best["mean"] if best else None,
            seconds=self.history.seconds(),
            peak_rss_bytes=peak_rss_bytes(),
            best_generation=best["eval"] if best else None,
            tokens=sum(entry.get("tokens", 0) for entry in [*self.history.lines, *self.history.evals]),
        )

    def write_report(self) -> None:
        """metrics.csv, plot and page. A run that ends by an error must end by that error, not by one from here."""
        failed = sys.exc_info()[0] is not None
        try:
            if (self.folder.path / "metrics.jsonl").exists():
                _, notes = report.write(self.folder.path, self.config.public(), self.result().to_dict())
                for note in notes if not failed else []:
                    self.observer.on_message(note)
        except (EdgeesError, OSError):
            if not failed:
                raise


class _Clock:
    """Seconds by phase of one generation."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class _Stop:
    """Ctrl-C once: stop at the next occasion; twice: at once."""

    def __init__(self) -> None:
        self.asked = 0

    def handle(self, *_: object) -> None:
        self.asked += 1
        if self.asked > 1:
            raise KeyboardInterrupt

    def check(self) -> None:
        if self.asked:
            raise Interrupted("interrupted")


@contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """SIGINT asks for a stop instead of tearing through whatever is being written."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, stop.handle)
    try:
        yield stop
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted", "what is saved can be resumed: edgees resume RUN") from error
    finally:
        signal.signal(signal.SIGINT, before)


def peak_rss_bytes() -> int:
    """Peak resident set of this process so far."""
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak) if sys.platform == "darwin" else int(peak) * 1024
    return 0


def _of_step(step: Update) -> dict[str, Any]:
    mean = step.fitness.mean
    return {
        "keep": short_float32s([step.keep])[0],
        "shrink": step.shrink,
        "rewards": {
            name: [float(v) if math.isfinite(v) else None for v in mean[:, side]]
            for side, name in enumerate(("plus", "minus"))
        },
        "z": list(step.z),
        "coefs": short_float32s(step.coefs),
        "reason": step.reason,
    }


def _of_answers(made: _Generation) -> dict[str, Any]:
    return {"excluded": made.excluded, **_texts(made.answers), "tokens": made.tokens}


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
        "truncated": sum(t.outcome == "length" for t in answers),
        "overflow": sum(t.outcome == "overflow" for t in answers),
        "tokens": tokens,
    }


def _scorer(config: Config, task: Task, given: Scorer | None, stack: ExitStack) -> Scorer:
    scorer = given or stack.enter_context(open_scorer(config, task))
    scorer.dry_run(task.train)
    return scorer


def _engine(config: Config, given: Engine | None, stack: ExitStack) -> Engine:
    if given is not None:
        return given
    engine = open_engine(config)
    stack.callback(engine.close)
    return engine


def _check_task(config: Config, task: Task) -> None:
    if not task.train:
        raise UsageError(f"task {task.name} has no rows to train on")
    if config.loglik > 0.0:
        without = [row.id for row in task.train if row.answer is None]
        if without:
            raise UsageError(
                f"loglik = {config.loglik:g} needs an answer in every row; {len(without)} have none, the first is row "
                f"{without[0]}",
                "add the column, or set loglik = 0",
            )


def _check_space(config: Config, spec: DeltaSpec) -> None:
    """Delta, the best so far, and its replacement while that is written: seen to before anything is written."""
    size = 0
    for t in spec.tensors:
        size += 4 * t.rows * (spec.factors if spec.view == "adapter" and not t.vector else t.cols)
    folder = Path(config.run or "runs").absolute()
    while not folder.exists():
        folder = folder.parent
    require_space(folder, 3 * size, "a run (the learned weights, the best so far, and one copy in the making)")


def _data_hash(config: Config, task: Task) -> str:
    """SHA-256 of all rows, as the scorer and the model see them."""
    digest = hashlib.sha256()
    for part in (task.train, task.heldout):
        for row in part:
            whole = [row.id, task.conversation(row, config.system), dict(row.columns), row.answer, row.entry]
            digest.update(json.dumps(whole, sort_keys=True, default=str).encode())
            digest.update(b"\n")
        digest.update(b"\n")
    return f"sha256:{digest.hexdigest()}"


def _frozen(engine: Engine) -> list[str]:
    frozen = engine.frozen
    if not frozen:
        return []
    some = "; ".join(f"{name}: {reason}" for name, reason in frozen[:3])
    return [f"{len(frozen)} tensor(s) stay as they are ({some}{'; ...' if len(frozen) > 3 else ''})"]
