"""A study: the same tasks with several settings (arms) and seeds, one run after the other; tables of all that came out.

    python scripts/study.py PLAN.toml [--only ARM,ARM] [--tasks a,b] [--seeds 1,2] [--dry-run | --table]

The plan (docs/studies/quick.toml shows the format) says what is asked and, before anything runs, what is expected.
Results go into the folder NAME (of the plan) beside it: ``runs.jsonl``, a line per run, and ``README.md`` with plots,
made anew at the end of each call and by ``--table``. A run that has finished is not done again, one that failed is;
Ctrl-C loses only the run under way. Paths in options are relative to the current folder.

Runs go seed by seed, in each of them task by task and arm by arm, so that an early stop leaves a balanced table. A
rollout is one member on one row: an answer, or the likelihood of the reference answer. Rollouts and tokens are counted
where the engine is asked, held-out rows apart; the probe that foretells how long a run takes is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgees import __version__, config, forgetting, opening, tune
from edgees.backends.base import Completion, Engine, Member, Progress, Request, Score
from edgees.checkpoint import write_atomic
from edgees.config import Config
from edgees.errors import EdgeesError, Interrupted, RunError, UsageError
from edgees.history import History
from edgees.report import Observer
from edgees.tasks.rows import Task
from edgees.update import loglik_weight

ROOT = Path(__file__).resolve().parents[1]
Line = dict[str, Any]
"""A line of runs.jsonl."""
Points = list[tuple[float, float]]
"""(rollouts, tokens or seconds so far; held-out measure), in order."""

# --- the plan -------------------------------------------------------------------------------------------------------

_NUMBERS = (int, float, list)
_PLAN = {"name": str, "question": str, "expected": str, "seeds": list, "baseline": str, "task": list, "arm": list}
_TASK = {"name": str, "options": dict, "measure": str, "threshold": _NUMBERS}
_ARM = {"name": str, "options": dict}


@dataclass(frozen=True)
class Run:
    """One run of a plan. options: the task's, over them the arm's, over them the arm's for this task."""

    task: str
    arm: str
    seed: int
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Changes with the options: a run with others is another run."""
        return hashlib.sha256(json.dumps(self.options, sort_keys=True).encode()).hexdigest()[:12]

    def settings(self) -> Config:
        try:
            return config.load(None, {**self.options, "seed": self.seed})
        except UsageError as error:
            raise UsageError(f"task {self.task}, arm {self.arm}: {error.message}", error.hint) from error


@dataclass(frozen=True)
class Plan:
    """A plan file. tasks, arms: its tables by name; measure and thresholds of a task are filled in."""

    path: Path
    name: str
    question: str
    expected: str
    seeds: tuple[int, ...]
    baseline: str
    tasks: dict[str, dict[str, Any]]
    arms: dict[str, dict[str, Any]]
    finding: str = ""

    @property
    def folder(self) -> Path:
        return self.path.parent / self.name

    @property
    def expected_sha256(self) -> str:
        return hashlib.sha256(self.expected.encode()).hexdigest()

    def run(self, task: str, arm: str, seed: int) -> Run:
        a = self.arms[arm]
        return Run(task, arm, seed, {**self.tasks[task]["options"], **a["options"], **a["per_task"].get(task, {})})

    def runs(self, tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """:raises UsageError: a task, arm or seed that the plan does not have."""
        for kind, chosen, known in (
            ("task", tasks, self.tasks), ("arm", arms, self.arms), ("seed", seeds, self.seeds)
        ):  # fmt: skip
            for item in chosen:
                if item not in known:
                    raise UsageError(f"{self.path} has no {kind} {item}", f"it has: {', '.join(map(str, known))}")
        return [self.run(task, arm, seed) for seed in seeds for task in tasks for arm in arms]


def read(path: Path) -> Plan:
    """:raises UsageError: unreadable, a key missing, unknown or of the wrong type, or a setting that cannot be."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        data = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the plan {path}: {error}") from error
    _check(data, str(path), _PLAN, {"finding": str})
    tasks, arms = _tables(data, "task", path), _tables(data, "arm", path)
    for name, task in tasks.items():
        _check(task, f"{path}, task {name}", _TASK, {})
        levels = task["threshold"] if isinstance(task["threshold"], list) else [task["threshold"]]
        if not levels or not all(isinstance(level, (int, float)) for level in levels):
            raise UsageError(f"{path}, task {name}: threshold is no number or list of numbers")
        task["thresholds"] = levels
    for name, arm in arms.items():
        _check(arm, f"{path}, arm {name}", _ARM, {"per_task": dict})
        arm.setdefault("per_task", {})
        if strange := set(arm["per_task"]) - set(tasks):
            raise UsageError(f"{path}, arm {name}: per_task names no task of the plan: {', '.join(sorted(strange))}")
    seeds = tuple(data["seeds"])
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int for seed in seeds):
        raise UsageError(f"{path}: seeds must be whole numbers, each once", "seeds = [1, 2, 3]")
    if data["baseline"] not in arms:
        raise UsageError(f"{path}: baseline {data['baseline']!r} is no arm", f"there are: {', '.join(arms)}")
    if not re.fullmatch(r"[\w.-]+", data["name"]) or data["name"].startswith("."):
        raise UsageError(f"{path}: name {data['name']!r} cannot name a folder", "letters, digits, - and _")
    texts = {key: data.get(key, "").strip() for key in ("question", "expected", "finding")}
    plan = Plan(path, data["name"], seeds=seeds, baseline=data["baseline"], tasks=tasks, arms=arms, **texts)
    for run in plan.runs([*tasks], [*arms], seeds[:1]):
        if fixed := {"seed", "run"} & {option.replace("-", "_") for option in run.options}:
            raise UsageError(f"{path}: {fixed.pop()} is no option of a task or an arm: the study sets it")
        run.settings()
    return plan


def _check(table: Mapping[str, Any], where: str, needed: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    known = {**needed, **optional}
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}", f"known keys: {', '.join(known)}")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            raise UsageError(f"{where}: {key} = {value!r} is of the wrong type", "see docs/studies/quick.toml")
    if missing := [key for key in needed if key not in table]:
        raise UsageError(f"{where}: {', '.join(missing)} missing", "see docs/studies/quick.toml")


def _tables(data: Mapping[str, Any], kind: str, path: Path) -> dict[str, dict[str, Any]]:
    names = [str(table.get("name", "")) if isinstance(table, dict) else "" for table in data[kind]]
    if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise UsageError(f"{path}: every [[{kind}]] needs a name of its own", "letters, digits, . - and _")
    return dict(zip(names, data[kind], strict=True))


# --- runs -----------------------------------------------------------------------------------------------------------


Tokens = tuple[int, ...]


@dataclass
class Count:
    answers: int = 0
    logliks: int = 0
    tokens: int = 0


class CountingEngine:
    """An engine that counts what it is asked for: the centre on held-out prompts apart from all else, and apart from
    both, uncounted in the end, the centre on the general texts that forgetting is measured on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forget()

    def forget(self, heldout: Set[Tokens] = frozenset(), general: Set[Tokens] = frozenset()) -> None:
        """Count anew. heldout, general: prompts, as tokens."""
        self.training, self.heldout, self.general = Count(), Count(), Count()
        self.kinds = {"heldout": heldout, "general": general}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        counts = [self._of(request.member, request.prompt) for request in requests]
        for count in counts:
            count.answers += 1
        return self.engine.generate(requests, self._tokens(counts, progress))

    def loglik(
        self, requests: Sequence[tuple[Member, tuple[int, ...], tuple[int, ...]]], progress: Progress | None = None
    ) -> list[Score]:
        counts = [self._of(member, prompt) for member, prompt, _ in requests]
        for count in counts:
            count.logliks += 1
        return self.engine.loglik(requests, self._tokens(counts, progress))

    def _of(self, member: Member, prompt: tuple[int, ...]) -> Count:
        kinds = [kind for kind, prompts in self.kinds.items() if member.amplitude == 0.0 and prompt in prompts]
        return cast(Count, getattr(self, kinds[0] if kinds else "training"))

    def _tokens(self, counts: Sequence[Count], progress: Progress | None) -> Progress:
        """One call's tokens cannot be divided: they are training's where any of it is."""
        count, last = next((c for c in counts if c is self.training), counts[0] if counts else self.heldout), 0

        def tick(done: int, tokens: int) -> None:
            nonlocal last
            count.tokens += tokens - last
            last = tokens
            if progress is not None:
                progress(done, tokens)

        return tick


class Watcher(Observer):
    """What had been spent at each held-out evaluation, by the generations before it."""

    def __init__(self, engine: CountingEngine) -> None:
        self.engine = engine
        self.at: dict[int, dict[str, Any]] = {}
        self.steps: dict[str, list[float | None]] = {"sigma": [], "shrink": []}
        self.seconds = self.heldout_seconds = 0.0

    def on_message(self, text: str) -> None:
        if text.startswith("expected time"):  # the probe for it is over: no part of learning
            self.engine.training = Count()

    def on_generation(self, record: Mapping[str, Any]) -> None:
        self.seconds += record["seconds"]
        for name, values in self.steps.items():
            value = record.get(name)
            values.append(None if value is None else float(f"{value:.4g}"))

    def on_eval(self, record: Mapping[str, Any]) -> None:
        self.heldout_seconds += record["heldout_seconds"]
        t, h = self.engine.training, self.engine.heldout
        self.at[record["generation"]] = {
            "rollouts": t.answers + t.logliks, "answers": t.answers, "logliks": t.logliks, "tokens": t.tokens,
            "seconds": round(self.seconds, 3), "heldout_rollouts": h.answers + h.logliks, "heldout_tokens": h.tokens,
            "heldout_seconds": round(self.heldout_seconds, 3),
        }  # fmt: skip

    def played(self, history: History) -> None:
        """Whoever plays episodes asks the engine turn by turn: they are counted in the journal (tokens generated)."""
        for generation, at in self.at.items():
            lines = history.lines[:generation]
            answers = sum(line["answers"] for line in lines)
            at |= {"rollouts": answers, "answers": answers, "tokens": sum(line["tokens"] for line in lines)}
            at["heldout_rollouts"] = sum(e["rows"] for e in history.evals if e["eval"] <= generation)

    def curve(self, run: Path) -> list[dict[str, Any]]:
        """Every evaluation in the journal of a run: what had been spent by then, and what came out."""
        if not self.at:
            return []
        points = []
        history = History.open(run / "history.jsonl", repair=False)
        if not any(at["rollouts"] for at in self.at.values()):
            self.played(history)
        for entry in history.evals:
            loglik = entry.get("loglik")
            loglik = loglik.get("mean") if isinstance(loglik, dict) else loglik
            points.append(
                {"generation": entry["eval"], **self.at[entry["eval"]], "reward": entry["mean"], "se": entry["se"],
                 "metrics": entry.get("metrics", {}), "loglik": loglik}
            )  # fmt: skip
        return points


@dataclass
class Workshop:
    """Engines that several runs share: :func:`tune.tune` attaches the delta of its run, nothing else stays."""

    engines: dict[tuple[Any, ...], CountingEngine] = field(default_factory=dict)

    @staticmethod
    def key(c: Config) -> tuple[Any, ...]:
        return c.engine, c.model, c.device, c.context, c.parallel, c.threads, c.pattern

    def engine(self, c: Config) -> CountingEngine:
        key = self.key(c)
        if key not in self.engines:
            self.engines[key] = CountingEngine(opening.open_engine(c))
        return self.engines[key]

    def close_all_but(self, wanted: set[tuple[Any, ...]]) -> None:
        for key in [key for key in self.engines if key not in wanted]:
            self.engines.pop(key).engine.close()

    def do(self, run: Run, measure: str) -> Line:
        """One run, whatever becomes of it. :raises Interrupted: Ctrl-C."""
        settings = run.settings()
        line: Line = {"state": "finished", "error": None}
        began = time.monotonic()
        watcher: Watcher | None = None
        with tempfile.TemporaryDirectory(prefix="study-") as folder:
            where = Path(folder) / "run"
            try:
                task = opening.open_task(settings)
                if measure not in ("reward", "loglik", *task.metrics):
                    raise UsageError(f"task {task.name} has no measure {measure}", f"it has: {', '.join(task.metrics)}")
                line["settings"] = _not_default(settings.with_defaults(task.defaults))
                engine = self.engine(settings)
                rows = (task.conversation(row, settings.system) for row in task.heldout)
                prompts, pieces = forgetting.texts(cast(Engine, engine))
                general = {*prompts, *(piece[0] for piece in pieces)}
                engine.forget({tuple(engine.encode_chat(row)) for row in rows}, general)
                watcher = Watcher(engine)
                tune.tune(replace(settings, run=str(where)), engine=cast(Engine, engine), task=task, observer=watcher)
            except Interrupted:
                raise
            except Exception as error:  # the study goes on; the page shows it
                line |= {"state": "failed", "error": f"{type(error).__name__}: {error}"}
                self.close_all_but(self.engines.keys() - {self.key(settings)})  # who knows what it is in
            if watcher:
                line |= {"curve": watcher.curve(where), **watcher.steps}
        return {"curve": [], **line, "wall_seconds": round(time.monotonic() - began, 3)}


def _not_default(c: Config) -> dict[str, Any]:
    usual = Config().public()
    return {name: value for name, value in c.public().items() if value != usual[name] and name != "seed"}


def commit() -> str:
    """The commit of this checkout, ``+`` where the code differs from it; empty where git cannot tell."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "edgees", "csrc"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + "+" * bool(changed)


def read_lines(file: Path) -> list[Line]:
    """Lines of runs.jsonl; what a kill left of a last one is cut off. :raises RunError: damage anywhere else."""
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    lines = []
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError):
            raise RunError(f"{file}:{number}: damaged line", "restore the file, or delete that line") from None
    return lines


def latest(plan: Plan, lines: Sequence[Line]) -> dict[tuple[str, str, int], Line]:
    """What counts of each run of the plan as it stands: it finished, else how it last failed."""
    found: dict[tuple[str, str, int], Line] = {}
    for line in lines:
        name = (line["task"], line["arm"], line["seed"])
        if name[0] not in plan.tasks or name[1] not in plan.arms or name[2] not in plan.seeds:
            continue
        before = found.get(name)
        if line["key"] == plan.run(*name).key and (before is None or before["state"] == "failed"):
            found[name] = line
    return found


def study(plan: Plan, runs: Sequence[Run]) -> None:
    """Do what is left of ``runs``. :raises Interrupted: Ctrl-C."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    file = plan.folder / "runs.jsonl"
    done = latest(plan, read_lines(file))
    left = [r for r in runs if done.get((r.task, r.arm, r.seed), {}).get("state") != "finished"]
    machine = importlib.import_module("bench").machine
    workshop = Workshop()
    try:
        for i, run in enumerate(left):
            began = datetime.now(timezone.utc).isoformat(timespec="seconds")
            workshop.close_all_but({workshop.key(r.settings()) for r in left[i:]})
            line = workshop.do(run, plan.tasks[run.task]["measure"])
            line = {
                "task": run.task, "arm": run.arm, "seed": run.seed, "key": run.key, "began": began,
                "expected_sha256": plan.expected_sha256, "edgees": __version__, "commit": commit(),
                "machine": machine(), **line,
            }  # fmt: skip
            with open(file, "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            said = line["error"] or f"{_number(final(line, plan.tasks[run.task]['measure']))} held out"
            said = f"{i + 1}/{len(left)} {run.task} {run.arm} seed {run.seed}: {said}, {line['wall_seconds']:.0f} s"
            print(said, file=sys.stderr, flush=True)
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted") from error
    finally:
        workshop.close_all_but(set())


def expected_rollouts(c: Config, task: Task) -> int | None:
    """Of the training as planned, every member on every row; None where only time limits it."""
    c = c.with_defaults(task.defaults)
    total = c.max_generations
    if total is None:
        return None
    weights = [loglik_weight(g / total, c.loglik, c.loglik_hold, c.loglik_end) for g in range(total)]
    return sum((w < 1.0) + (w > 0.0) for w in weights) * c.members * min(c.rows, len(task.train))


# --- statistics -----------------------------------------------------------------------------------------------------

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t95(freedom: int) -> float:
    """97.5 % quantile of Student's t: a table, beyond it the expansion in 1/freedom (within 0.1 %)."""
    z = 1.959964
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def mean95(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean and its 95 % t interval (NaN for a single value); None without values."""
    if not values:
        return None
    mean = statistics.fmean(values)
    half = t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean, mean - half, mean + half


def points(line: Line, measure: str, spent: str = "rollouts") -> Points:
    """(what had been spent, measure) of every evaluation that has both."""
    found = ((p[spent], p[measure] if measure in ("reward", "loglik") else p["metrics"].get(measure))
             for p in line["curve"])  # fmt: skip
    return [(x, y) for x, y in found if x is not None and y is not None]


def final(line: Line, measure: str) -> float | None:
    values = points(line, measure)
    return values[-1][1] if values and line["state"] == "finished" else None


def crossing(curve: Points, threshold: float) -> tuple[float, bool]:
    """What had been spent when the threshold was first reached, linear between evaluations; (all, True) if never."""
    for i, (x, y) in enumerate(curve):
        if y >= threshold:
            if i == 0:
                return x, False
            before_x, before_y = curve[i - 1]
            return before_x + (threshold - before_y) / (y - before_y) * (x - before_x), False
    return curve[-1][0], True


def area(curve: Points, budget: float) -> float:
    """Mean height of the curve, linear between evaluations, from the first of them to ``budget``."""
    x, y = np.array(curve, np.float64).T
    if budget <= x[0]:
        return float(y[0])
    inside = x < budget
    x, y = np.append(x[inside], budget), np.append(y[inside], np.interp(budget, x, y))
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / (budget - x[0]))


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios. bound: ``>=``, ``<=`` where some are bounds, ``?`` where both kinds are."""

    mean: float
    low: float
    high: float
    bound: str
    pairs: int


def ratio(pairs: Sequence[tuple[tuple[float, bool], tuple[float, bool]]]) -> Ratio | None:
    """Baseline over arm from pairs of :func:`crossing`; 95 % t interval of the logarithms.

    A baseline that never got there makes its ratio a lower bound, an arm that never did an upper one. A pair in which
    neither did says nothing and is left out, as is one that was there before training.
    """
    told = [(b, a) for b, a in pairs if not (b[1] and a[1]) and b[0] > 0 and a[0] > 0]
    found = mean95([math.log(b[0] / a[0]) for b, a in told])
    if found is None:
        return None
    lower, upper = any(b[1] for b, _ in told), any(a[1] for _, a in told)
    bound = "?" if lower and upper else ">=" if lower else "<=" if upper else ""
    mean, low, high = (math.exp(v) for v in found)
    return Ratio(mean, low, high, bound, len(told))


# --- the page -------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _interval(found: tuple[float, float, float] | None, sign: str = "") -> str:
    if found is None:
        return "-"
    mean, low, high = found
    return f"{mean:{sign}.3f}" + ("" if math.isnan(low) else f" ({low:{sign}.3f} .. {high:{sign}.3f})")


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items()) or "none"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["", *("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines), ""]


def task_part(plan: Plan, name: str, done: Mapping[tuple[str, str, int], Line]) -> list[str]:
    """What the page says of one task."""
    measure, thresholds = plan.tasks[name]["measure"], plan.tasks[name]["thresholds"]
    of = {(arm, seed): done[name, arm, seed] for arm in plan.arms for seed in plan.seeds if (name, arm, seed) in done}
    curves = {k: line for k, line in of.items() if final(line, measure) is not None}
    seeds = [str(seed) for seed in plan.seeds]
    text = [f"## {name}", "", f"Options: {_options(plan.tasks[name]['options'])}. Measure: held-out {measure}.", ""]
    if not curves:
        return [*text, "No run has finished with a value of it.", ""]
    budget = min(points(line, measure)[-1][0] for line in curves.values())

    def cell(arm: str, seed: int, spent: str, threshold: float) -> str:
        if (arm, seed) not in curves:
            return of[arm, seed]["state"] if (arm, seed) in of else "-"
        curve = points(curves[arm, seed], measure, spent)
        value, censored = crossing(curve, threshold) if curve else (math.nan, False)
        return ">" * censored + _spent(value) if curve else "-"

    rows = []
    for arm in plan.arms:
        last = {seed: final(curves[arm, seed], measure) for seed in plan.seeds if (arm, seed) in curves}
        base = {seed: final(curves[plan.baseline, seed], measure) for seed in last if (plan.baseline, seed) in curves}
        gains = [cast(float, last[seed]) - cast(float, base[seed]) for seed in base]
        began = [points(curves[arm, seed], measure)[0][1] for seed in last]
        rises = [cast(float, v) - b for v, b in zip(last.values(), began, strict=True)]
        areas = [area(points(curves[arm, seed], measure), budget) for seed in last]
        cells = [_number(last[s]) if s in last else of[arm, s]["state"] if (arm, s) in of else "-" for s in plan.seeds]
        mean = mean95([cast(float, v) for v in last.values()])
        less = "baseline" if arm == plan.baseline else _interval(mean95(gains), "+")
        rise = _interval(mean95(rises), "+")
        rows.append([arm, *cells, _interval(mean), rise, less, _interval(mean95(areas))])
    head = [
        "arm",
        *(f"seed {s}" for s in seeds),
        "mean",
        "minus before",
        "minus baseline",
        f"area to {budget:.0f} rollouts",
    ]
    text += ["At the end:", *_table(head, rows), f"![held-out {measure}]({plan.name}-{name}.svg)", ""]
    for threshold in thresholds:
        rows = []
        for arm in plan.arms:
            both = [s for s in plan.seeds if (arm, s) in curves and (plan.baseline, s) in curves]
            crossed = [[crossing(points(curves[a, s], measure), threshold) for a in (plan.baseline, arm)] for s in both]
            found = ratio([(b, a) for b, a in crossed])
            said = "-"
            if found:
                said = f"{found.bound} {found.mean:.2f}".strip()
                said += "" if math.isnan(found.low) else f" ({found.low:.2f} .. {found.high:.2f})"
                said += f", {found.pairs} of {len(plan.seeds)} seeds" if found.pairs < len(plan.seeds) else ""
            cells = [", ".join(cell(arm, s, spent, threshold) for s in plan.seeds)
                     for spent in ("rollouts", "tokens", "seconds")]  # fmt: skip
            rows.append([arm, *cells, "baseline" if arm == plan.baseline else said])
        head = ["arm", "rollouts", "tokens", "training seconds", "rollouts, baseline / arm"]
        text += [f"To {threshold:g}, seed by seed ({', '.join(seeds)}):", *_table(head, rows)]
    return text


NOTES = """\
Means are over seeds, with 95 % t intervals in brackets; differences and ratios are paired by seed, ratios are geometric
means with the interval of their logarithms. A threshold counts as reached where the straight line between two
evaluations first meets it; `>N`: not within the N that the run spent. `>=`: the baseline never got there with some
seeds, so the ratio is at least that; `<=`: the arm did not, so it is at most that; `?`: both happened. The interval is
then one of bounds. A seed with which neither got there, or that was there before training, is left out of the ratio.
Rollouts, tokens and seconds are those of training. The area is the mean height of the held-out curve up to the number
of rollouts that every run had. Failed runs are in no mean."""


def page(plan: Plan, lines: Sequence[Line]) -> str:
    """README.md of a study."""
    done = latest(plan, lines)
    sha, first = plan.expected_sha256, lines[0] if lines else None
    told = f"SHA-256 of the text: `{sha[:16]}`. No run yet."
    if first and first["expected_sha256"] == sha:
        told = f"SHA-256 of the text: `{sha[:16]}`, as it was at the first run, {first['began']}."
    elif first:
        old = first["expected_sha256"][:16]
        told = f"**Changed since the first run**, {first['began']}: its SHA-256 was `{old}`, now it is `{sha[:16]}`."
    machines = sorted({_options(line["machine"]) for line in lines})
    arms = []
    for name, arm in plan.arms.items():
        own = [f"; {task}: {_options(options)}" for task, options in arm["per_task"].items()]
        arms.append(f"- {name}: {_options(arm['options'])}{''.join(own)}")
    planned = len(plan.tasks) * len(plan.arms) * len(plan.seeds)
    finished = sum(line["state"] == "finished" for line in done.values())
    text = [
        f"# {plan.name}", "", plan.question, "", "## Expected", "", plan.expected, "", told, "",
        "## What was found", "", plan.finding or "Not written yet.", "",
        "## How", "", f"`python scripts/study.py {_shown(plan.path)}`: {finished} of {planned} runs have finished.", "",
        f"Machine: {'; '.join(machines) or '-'}.", "", f"Arms (baseline: {plan.baseline}):", "", *arms, "", NOTES, "",
    ]  # fmt: skip
    for name in plan.tasks:
        text += task_part(plan, name, done)
    rows = []
    for line in lines:
        counts = any(line is other for other in done.values())
        measure = plan.tasks[line["task"]]["measure"] if line["task"] in plan.tasks else "reward"
        end = line["curve"][-1] if line["curve"] else {}
        state = (line["error"] or line["state"]).replace("\n", " ") + ("" if counts else " (does not count)")
        spent = [_spent(end[k]) if end else "-" for k in ("generation", "answers", "logliks", "tokens", "seconds")]
        spent += [_spent(end[k]) if end else "-" for k in ("heldout_rollouts", "heldout_seconds")]
        shown = [line["task"], line["arm"], str(line["seed"]), state, _number(final(line, measure)), *spent]
        rows.append([*shown, line["began"], f"{line['edgees']} {line['commit']}"])
    head = ["task", "arm", "seed", "state", "held out", "generations", "answers", "likelihoods", "tokens", "seconds",
            "held-out rollouts", "held-out seconds", "began", "edgees, commit"]  # fmt: skip
    text += ["## All runs", "", "In the order in which they were done. A run does not count where its options are no "
             "longer the plan's, or where it failed and was done again. `+`: the code differed from the commit.",
             *_table(head, rows)]  # fmt: skip
    return "\n".join(text).rstrip() + "\n"


def _shown(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def plot(plan: Plan, name: str, done: Mapping[tuple[str, str, int], Line]) -> None:
    """NAME-TASK.svg: every run thin, the mean of an arm over its seeds bold. Nothing where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'edgees[plot]')", file=sys.stderr)
        return
    measure = plan.tasks[name]["measure"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for i, arm in enumerate(plan.arms):
        lines = [done[name, arm, seed] for seed in plan.seeds if (name, arm, seed) in done]
        curves = [np.array(points(line, measure)).T for line in lines if final(line, measure) is not None]
        for x, y in curves:
            axes.plot(x, y, color=f"C{i}", linewidth=0.6, alpha=0.5)
        if curves:
            until = min(x[-1] for x, _ in curves)
            grid = np.unique(np.concatenate([x[x <= until] for x, _ in curves]))
            mean = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
            axes.plot(grid, mean, color=f"C{i}", linewidth=2.2, label=arm)
    for threshold in plan.tasks[name]["thresholds"]:
        axes.axhline(threshold, color="#888888", linestyle="--", linewidth=0.8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize="small")
    axes.set(xlabel="training rollouts", ylabel=f"held-out {measure}", title=f"{plan.name}: {name}")
    axes.grid(alpha=0.3)
    # Written alike each time: a picture changes only where its numbers do.
    with matplotlib.rc_context({"svg.hashsalt": plan.name}):
        FigureCanvasSVG(figure).print_svg(plan.folder / f"{plan.name}-{name}.svg", metadata={"Date": None})


def write_page(plan: Plan) -> None:
    plan.folder.mkdir(parents=True, exist_ok=True)
    lines = read_lines(plan.folder / "runs.jsonl")
    for name in plan.tasks:
        plot(plan, name, latest(plan, lines))
    write_atomic(plan.folder / "README.md", page(plan, lines).encode())


def rehearse(plan: Plan, runs: Sequence[Run]) -> None:
    """Print the runs, how many are left, and the rollouts that they are expected to take."""
    done, total, left = latest(plan, read_lines(plan.folder / "runs.jsonl")), 0, 0
    for run in runs:
        settings = run.settings()
        rollouts = expected_rollouts(settings, opening.open_task(settings))
        state = str(done.get((run.task, run.arm, run.seed), {}).get("state", "to do"))
        if state != "finished":
            total, left = total + (rollouts or 0), left + 1
        print(f"{run.task} {run.arm} seed {run.seed}: {state}, {rollouts or 'as many as time allows'} rollouts")
    print(f"{left} of {len(runs)} runs are left: {total} rollouts where they have a number")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--only", metavar="ARM,ARM", help="only these arms")
    parser.add_argument("--tasks", metavar="TASK,TASK", help="only these tasks")
    parser.add_argument("--seeds", metavar="N,N", help="only these seeds of the plan")
    parser.add_argument("--table", action="store_true", help="run nothing: write the page anew")
    parser.add_argument("--dry-run", action="store_true", help="run nothing: list the runs and what they cost")
    given = parser.parse_args(arguments)
    try:
        plan = read(given.plan)
        tasks, arms = ([*known] if chosen is None else chosen.split(",")
                       for chosen, known in ((given.tasks, plan.tasks), (given.only, plan.arms)))  # fmt: skip
        try:
            seeds = list(plan.seeds) if given.seeds is None else [int(seed) for seed in given.seeds.split(",")]
        except ValueError:
            raise UsageError(f"--seeds {given.seeds}: whole numbers are needed", "--seeds 1,2") from None
        runs = plan.runs(tasks, arms, seeds)
        if given.dry_run:
            rehearse(plan, runs)
            return 0
        try:
            if not given.table:
                study(plan, runs)
        finally:
            write_page(plan)
        print(plan.folder / "README.md")
    except EdgeesError as error:
        print(f"error: {error.message}" + f"\nhint: {error.hint}" * bool(error.hint), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
