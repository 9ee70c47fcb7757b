"""Base against tuned on held-out rows, paired by row, judged from outside: plain llama.cpp on exported files.

Base and tuned model are written as temporary F16 GGUFs and answer in llama.cpp as it comes, without our backend. (The
base's own 4-bit file would run with activations rounded to 8 bits, and the difference would not be tuning's alone; how
likely it finds the answers is told beside.) Then our engine scores the same texts, base and base + delta, and both
must find them equally likely (:data:`TOLERANCE`): otherwise what was tuned is not what was exported. Likelihoods are
compared because greedy answers may part ways at a rounding error. Where the base is a Hugging Face folder it stands for
its 4-bit form, which is what was tuned, and its engine is not asked, so that no torch is needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgees import merge, rewards, rollout
from edgees.attempts import parse
from edgees.backends.base import CENTRE, Engine
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.config import Config
from edgees.context import Context
from edgees.delta import Delta
from edgees.episodes import Message, transcript
from edgees.errors import ExportError, TemplateError, UsageError
from edgees.gguf_file import GgufFile
from edgees.opening import Setup, check_answering, open_grammar
from edgees.rewards import Scorer
from edgees.tasks import load_task
from edgees.tasks.rows import Row, Task

TOLERANCE = 0.01
"""Largest difference between plain llama.cpp and our engine on the tuned model: nats per token, mean over the rows of
the absolute difference. Both keep keys and values in half precision, and the exported weights are halves, too; measured
on SmolLM2-135M: 0.0007."""
AGREEMENT_ROWS = 32
"""Rows on which our engine repeats what plain llama.cpp did."""
RESAMPLES = 20_000
EXAMPLES = 6

NOTHING = Context()
Say = Callable[[str], None]
"""Told what is being done, for people who wait."""


@dataclass(frozen=True)
class Answers:
    """One model on the rows. rewards: float64 [rows], NaN where excluded; metrics: the same by name. tokens: of the
    first attempt.

    messages: of each episode, empty for single answers. completions: the texts, of episodes their transcripts.
    """

    completions: list[str]
    tokens: list[tuple[int, ...]]
    rewards: np.ndarray
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    messages: list[tuple[Message, ...]] = field(default_factory=list)


def open_task(settings: Config, name: str | None = None) -> tuple[Task, Scorer]:
    """The run's task and scorer, or those of task ``name``, which then brings its own scorer where it has one.

    :raises UsageError: nothing is held out, or there is no scorer.
    """
    task = load_task(
        name or settings.task,
        eval_data=None if name else settings.eval_data or None,
        split=settings.heldout,
    )
    if not task.heldout:
        raise UsageError(f"task {task.name} has no held-out rows", "give some in tuning with --eval-data FILE")
    check_answering(settings, task)
    other = name is not None and name != settings.task
    specs = (task.reward or settings.reward) if other else (settings.reward or task.reward)
    if other and task.episodes:  # it pays itself; the run's own scorer is for the run's own rows
        specs = task.reward
    if not specs and (task.episodes or settings.agent_cmd):
        return task, Scorer([])  # the episodes pay themselves
    if not specs:
        raise UsageError(f"task {task.name} has no scorer", "name one in tuning with --reward score.py")
    return task, rewards.load(specs, deadline=settings.scorer_timeout)


def choose(task: Task, count: int, used: int) -> tuple[list[Row], int]:
    """(rows in the task's order, how many of them chose the best generation).

    ``count`` 0: all. ``used``: rows scored during the run (0: all), which are the first by a hash of their names; fewer
    rows than all are therefore taken from the end of that order: rows that had no say come first.
    """
    order = sorted(task.heldout, key=lambda row: hashlib.blake2b(row.id.encode(), digest_size=8).digest())
    voted = {row.id for row in order[: used or len(order)]}
    chosen = {row.id for row in (order[-count:] if count else order)}
    rows = [row for row in task.heldout if row.id in chosen]
    return rows, sum(row.id in voted for row in rows)


def open_engine(settings: Config, path: Path, *, plain: bool) -> LlamaCppEngine:
    """An engine under the conditions of the run. plain: stock llama.cpp, without our backend."""
    return LlamaCppEngine(
        path, context=settings.context, parallel=settings.parallel, threads=settings.threads, plain=plain,
        params=settings.pattern or None,
    )  # fmt: skip


def answer(
    engine: Engine, rows: Sequence[Row], task: Task, scorer: Scorer, settings: Config, context: Context = NOTHING
) -> Answers:
    """The centre's answers to ``rows`` under the conditions of the run (greedy, or its ``attempts``) and in a context,
    scored."""
    with ExitStack() as stack:
        grammar = open_grammar(settings, task)
        setup = Setup(settings, task, scorer, engine, lambda: None, context=context, grammar=grammar)
        setup = setup.with_players(stack)
        played = rollout.play(engine, rollout.every([CENTRE], rows), setup.replies(0, 0.0))
    scores = rewards.judge(scorer, played)
    metrics = {
        name: np.array([measure(t.row, t.completion) for t in played], np.float64)
        for name, measure in task.metrics.items()
    }
    reported = dict.fromkeys(name for t in played for name in t.parts)
    metrics |= {name: np.array([t.parts.get(name, math.nan) for t in played], np.float64) for name in reported}
    return Answers(
        [transcript(t.messages) if t.episode else t.completion for t in played],
        [t.first_tokens for t in played],
        np.array(scores.rewards, np.float64),
        metrics,
        [str(f) for f in scores.faults],
        [t.messages for t in played],
    )


Target = tuple[tuple[int, ...], tuple[int, ...]]


def targets(
    engine: Engine, rows: Sequence[Row], task: Task, settings: Config, given: Answers, context: Context = NOTHING
) -> list[Target]:
    """(prompt, tokens to be found likely) per row: the reference answer, or else the answer that was given; of an
    episode the first reply."""
    setup = Setup(settings, task, Scorer([]), engine, lambda: None)
    found: list[Target] = []
    for row, tokens, messages in zip(rows, given.tokens, given.messages, strict=True):
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("content")), 0)
        conversation = setup.conversation(row, context)
        if first:
            prompt = tuple(
                engine.encode_chat(context.apply(messages[:first], whole=bool(settings.agent_cmd), same=True))
            )
            found.append((prompt, tuple(engine.encode(str(messages[first]["content"])))))
        elif row.answer is not None and not messages:
            found.append(rollout.reference(engine, conversation, row.answer))
        elif row.messages or messages:
            said = conversation if row.messages else messages
            found.append((tuple(engine.encode_chat(said)), tokens if not messages else ()))
        else:  # an episode that broke down before anything was said
            found.append(((), ()))
    return found


def texts(
    engine: Engine, rows: Sequence[Row], task: Task, scorer: Scorer, settings: Config, context: Context = NOTHING
) -> list[list[int]]:
    """What the model reads and writes on ``rows``, as tokens: questions with their reference answers, or episodes."""
    if task.episodes or settings.agent_cmd:
        played = answer(engine, rows, task, scorer, settings, context)
        said = []
        for messages in played.messages:
            with suppress(TemplateError):  # a program's own last word may break the order that a template wants
                said += [engine.encode_chat(context.apply(messages, same=True))] if messages else []
        return said
    nothing = Answers([], [()] * len(rows), np.empty(0), messages=[()] * len(rows))
    return [[*prompt, *target] for prompt, target in targets(engine, rows, task, settings, nothing, context)]


def likelihoods(engine: Engine, wanted: Sequence[Target]) -> np.ndarray:
    """float64 [rows]: mean log-likelihood per token of each target; NaN where it is empty or does not fit."""
    found = np.full(len(wanted), np.nan)
    places = [i for i, (prompt, target) in enumerate(wanted) if prompt and target]
    scores = engine.loglik([(CENTRE, *wanted[i]) for i in places]) if places else []
    for i, score in zip(places, scores, strict=True):
        found[i] = score.mean
    return found


def interval(differences: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float | None, float | None]:
    """95 % percentile-bootstrap interval of the mean of paired differences; (None, None) for fewer than two."""
    n = len(differences)
    if n < 2:
        return None, None
    rng = np.random.default_rng(seed)
    per = max(1, 4_000_000 // n)
    means = np.concatenate(
        [differences[rng.integers(0, n, (min(per, resamples - at), n))].mean(1) for at in range(0, resamples, per)]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def compare(base: np.ndarray, tuned: np.ndarray) -> dict[str, Any]:
    """{"base", "tuned", "difference": {"mean", "low", "high"}, "rows"} over the rows that both have a number for."""
    both = np.isfinite(base) & np.isfinite(tuned)
    if not both.any():
        return {"base": None, "tuned": None, "difference": {"mean": None, "low": None, "high": None}, "rows": 0}
    a, b = base[both], tuned[both]
    low, high = interval(b - a)
    return {
        "base": float(a.mean()),
        "tuned": float(b.mean()),
        "difference": {"mean": float((b - a).mean()), "low": low, "high": high},
        "rows": int(both.sum()),
    }


def agreement(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """How far two engines are apart in likelihood, nats per token. ok: the mean difference is within ``tolerance``."""
    both = np.isfinite(ours) & np.isfinite(theirs)
    if not both.any():
        return {"ok": None, "rows": 0, "mean": None, "largest": None, "tolerance": tolerance}
    apart = np.abs(ours - theirs)[both]
    mean = float(apart.mean())
    return {
        "ok": mean <= tolerance,
        "rows": int(both.sum()),
        "mean": mean,
        "largest": float(apart.max()),
        "tolerance": tolerance,
    }


def examples(rows: Sequence[Row], base: Answers, tuned: Answers, count: int = EXAMPLES) -> list[dict[str, Any]]:
    """Answers that changed: those that gained most and, a third of them, those that lost most."""
    change = np.nan_to_num(tuned.rewards - base.rewards)
    order = sorted(
        (i for i in range(len(rows)) if base.completions[i] != tuned.completions[i]), key=lambda i: -change[i]
    )
    losses = [i for i in reversed(order) if change[i] < 0][: count // 3]
    shown = [*[i for i in order if i not in losses][: count - len(losses)], *losses]
    return [
        {
            "row": rows[i].id,
            "prompt": rows[i].messages[-1]["content"] if rows[i].messages else json.dumps(dict(rows[i].columns)),
            "answer": rows[i].answer,
            "base": base.completions[i],
            "tuned": tuned.completions[i],
            "base_reward": float(base.rewards[i]),
            "tuned_reward": float(tuned.rewards[i]),
        }
        for i in shown
    ]


def evaluate(
    run_dir: str | Path,
    *,
    task: str | None = None,
    rows: int = 0,
    weights: str = "best",
    task_and_scorer: tuple[Task, Scorer] | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Compare base and tuned model of a run; what ``eval --json`` prints.

    rows: held-out rows to use, 0 = all. Writes nothing but temporary files of 2 bytes a weight in the run's folder
    (in the system's temporary folder where that is read-only). "agreement" tells whether our engine and plain llama.cpp
    are within :data:`TOLERANCE`; the caller decides what to do where not.
    """
    with ExitStack() as stack:
        run = stack.enter_context(merge.open_run(run_dir, weights))
        settings = run.settings
        found, scorer = task_and_scorer or open_task(settings, task)
        stack.enter_context(scorer)
        chosen, voted = choose(found, rows, settings.eval_rows)
        evolved = run.context != run.first
        if not (found.episodes or settings.agent_cmd):
            scorer.dry_run(chosen)
        scratch = Path(stack.enter_context(_scratch(run.folder)))
        exported, untuned = scratch / "tuned.gguf", scratch / "base.gguf"
        say(f"writing {run.weights} weights (generation {run.delta.generation}) as a temporary F16 GGUF")
        effective = merge.Effective(run.base, run.delta)
        try:
            merge.write_gguf(effective, exported, kind := "F16")
        except ExportError:  # beyond half precision; a NaN is refused again
            merge.write_gguf(effective, exported, kind := "F32")

        # Plain llama.cpp first: our backend, once loaded, stays in the process (asleep, but why argue).
        say(f"{len(chosen)} held-out rows in plain llama.cpp: tuned")
        with open_engine(settings, exported, plain=True) as engine:
            tuned = answer(engine, chosen, found, scorer, settings, run.context)
            wanted = targets(engine, chosen, found, settings, tuned, run.context)
            tuned_plain = likelihoods(engine, wanted)
            weights_alone = answer(engine, chosen, found, scorer, settings, run.first) if evolved else tuned
        exported.unlink()
        say(f"{len(chosen)} held-out rows in plain llama.cpp: base, written in the same way")
        nothing = replace(run.delta.spec, view="adapter", bits=0, factors=1, kind="lowrank", rank=1)
        zero = stack.enter_context(Delta.create(scratch / "nothing.safetensors", nothing))
        merge.write_gguf(merge.Effective(run.base, zero), untuned, kind)
        with open_engine(settings, untuned, plain=True) as engine:
            base = answer(engine, chosen, found, scorer, settings, run.first)
            base_plain = likelihoods(engine, wanted)
            base_first = likelihoods(engine, targets(engine, chosen, found, settings, base, run.first))
            context_alone = answer(engine, chosen, found, scorer, settings, run.context) if evolved else base
        untuned.unlink()
        some = slice(0, AGREEMENT_ROWS if isinstance(run.base, GgufFile) else 0)
        own_file = np.full(len(chosen), np.nan)
        base_ours = tuned_ours = np.empty(0)
        own: Answers | None = None
        if isinstance(run.base, GgufFile):
            with open_engine(settings, run.base.path, plain=True) as engine:
                own_file = likelihoods(engine, wanted)
            say(f"{len(chosen[some])} of them in our own engine: base and tuned")
            with open_engine(settings, run.base.path, plain=False) as engine:
                engine.attach(zero)  # so that the base, too, is computed by us
                base_ours = likelihoods(engine, wanted[some])
                engine.attach(run.delta)
                tuned_ours = likelihoods(engine, wanted[some])
                own = answer(engine, chosen[some], found, scorer, settings, run.context)

        referenced = np.array([r.answer is not None and not m for r, m in zip(chosen, tuned.messages, strict=True)])
        unknown = np.full(len(chosen), np.nan)
        plain = [np.where(referenced, values, np.nan) for values in (base_first, tuned_plain)]
        ours = [np.where(referenced[some], values, np.nan) for values in (base_ours, tuned_ours)]
        result = compare(base.rewards, tuned.rewards)
        return {
            "run": str(run.folder),
            "task": found.name,
            "weights": run.weights,
            "generation": run.delta.generation,
            "type": kind,
            "attempts": str(settings.tries),
            "temperature": settings.scored_at,
            **result,
            "chose_best": voted if task is None or task == settings.task else 0,
            "context": run.context.digest,
            "parts": {
                "weights": compare(base.rewards, weights_alone.rewards),
                "context": compare(base.rewards, context_alone.rewards),
            }
            if evolved
            else None,
            "metrics": {
                name: compare(base.metrics.get(name, unknown), tuned.metrics.get(name, unknown))
                for name in dict.fromkeys([*base.metrics, *tuned.metrics])
            },
            "loglik": compare(*plain),
            "own_engine": own
            and {
                "rows": len(own.completions),
                "tuned": _mean(own.rewards),
                "same_answers": sum(a == b for a, b in zip(tuned.completions[some], own.completions, strict=True)),
                "loglik": compare(*ours),
            },
            "agreement": agreement(tuned_ours, tuned_plain[some]),
            "agreement_base": agreement(base_ours, base_plain[some]),
            "base_file": {"loglik": _mean(np.where(referenced, own_file, np.nan))},
            "excluded": [*base.faults, *tuned.faults],
            "examples": examples(chosen, base, tuned),
        }


def _mean(values: np.ndarray) -> float | None:
    found = values[np.isfinite(values)]
    return float(found.mean()) if found.size else None


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the run's own disk, which has room for models, or where the system puts such things."""
    try:
        return tempfile.TemporaryDirectory(prefix=".edgees-eval-", dir=folder)
    except OSError:
        return tempfile.TemporaryDirectory(prefix="edgees-eval-")


def require_agreement(result: dict[str, Any]) -> None:
    """:raises ExportError: our engine and plain llama.cpp judge the tuned model differently."""
    found = result["agreement"]
    if found["ok"] is False:
        raise ExportError(
            f"plain llama.cpp and our engine differ on the tuned model by {found['mean']:.4f} nats per token "
            f"(allowed: {found['tolerance']:g})",
            "the exported model is not what was tuned: please report this, with edgees doctor --json",
        )


def lines(result: dict[str, Any]) -> list[str]:
    """The same for people."""
    chose = f", of which {result['chose_best']} also chose the best generation" if result["chose_best"] else ""
    tries = parse(result["attempts"])
    how = "in plain llama.cpp by " + tries.told(result["temperature"])
    how = "greedily in plain llama.cpp" if tries.single else how
    out = [
        f"{result['run']}: {result['weights']} weights, generation {result['generation']}",
        f"{result['task']}: {result['rows']} held-out rows{chose}, answered {how}",
        f"{'':<12}{'base':>9}{'tuned':>9}   difference (95 %)",
    ]
    out.append(_line("reward", result))
    if result["parts"]:
        out += [_line(f"{name} only", part) for name, part in result["parts"].items()]
    out += [_line(name, part) for name, part in result["metrics"].items()]
    if result["loglik"]["rows"]:
        out.append(_line("likelihood", result["loglik"]) + "   nats per token of the reference answer")
    own, agreed = result["own_engine"], result["agreement"]
    if own and agreed["mean"] is not None:
        out.append(
            f"our engine agrees to {agreed['mean']:.4f} nats per token (allowed: {agreed['tolerance']:g}), and on "
            f"{own['same_answers']} of {own['rows']} answers; its tuned reward: {_number(own['tuned'])}"
        )
    file = result["base_file"]
    if file["loglik"] is not None:
        out.append(f"the base's own file, with llama.cpp's 8-bit activations: likelihood {_number(file['loglik'])}")
    out += [f"excluded: {fault}" for fault in result["excluded"]]
    for example in result["examples"]:
        out += [
            "",
            f"{example['row']}: {_short(example['prompt'])}",
            f"  base   {_number(example['base_reward'])}  {_short(example['base'])}",
            f"  tuned  {_number(example['tuned_reward'])}  {_short(example['tuned'])}",
        ]
    return out


def _line(name: str, part: dict[str, Any]) -> str:
    d = part["difference"]
    span = "" if d["low"] is None else f" ({d['low']:+.3f} to {d['high']:+.3f})"
    return f"{name:<12}{_number(part['base']):>9}{_number(part['tuned']):>9}   {_number(d['mean'], '+')}{span}"


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None or math.isnan(value) else f"{value:{sign}.3f}"


def _short(text: str, width: int = 100) -> str:
    """One line of it, fit for a terminal: a model may write control characters."""
    flat = "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
    return flat if len(flat) <= width else flat[: width - 3] + "..."
