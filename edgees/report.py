"""What a person sees of a run: progress in the terminal, the closing table, reward.png, metrics.csv and the run's page.

Observers are told by ``tune`` what happens and never steer it. All that they get is JSON-ready:

- ``on_start(info)``: run, model, task, generations (or None), seconds (limit or None), members, rows, weights,
  generation (the first one to run);
- ``on_progress(done, total, tokens)``: requests of the generation or evaluation under way, tokens processed in it;
- ``on_generation(record)`` and ``on_eval(record)``: a line of ``metrics.jsonl``, see :data:`COLUMNS`;
- ``on_message(text)``: a sentence that a person should read (no signal, tensors that stay frozen);
- ``on_end(summary)``: what ``tune --json`` prints.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from edgees.checkpoint import write_atomic
from edgees.context import diff
from edgees.errors import RunError
from edgees.history import History

COLUMNS = (
    "generation",
    "reward",
    "reward_std",
    "reward_max",
    "heldout",
    "heldout_se",
    "best",
    "heldout_distinct",
    "heldout_majority",
    "heldout_length",
    "heldout_truncated",
    "kl",
    "perplexity",
    "loglik",
    "sigma",
    "lr",
    "shrink",
    "drift",
    "distinct",
    "majority",
    "length",
    "truncated",
    "overflow",
    "excluded",
    "invalid",
    "tokens",
    "seconds",
    "peak_rss_bytes",
)
"""Columns of metrics.csv, one line a generation; more keys of metrics.jsonl are left there. ``reward``: mean over
members of the training reward; ``reward_std``, ``reward_max``: its standard deviation over members, the best of them;
``heldout``, ``heldout_se``: mean and standard error over held-out rows of what has been learned after that generation
(generation 0 is the base), where it was evaluated; ``best``: 1 where that was the best so far; ``distinct``,
``majority``: different answers, and the share of the commonest one, among training or held-out answers; ``length``:
mean tokens of one; ``truncated``: those cut at the limit of tokens; ``kl``, ``perplexity``: nats a token from the base
on fixed prompts, and perplexity on a general text; ``loglik``: weight of the likelihood in the training reward;
``excluded``, ``invalid``: rewards that could not be used, and their share; ``seconds``: wall time."""

Record = Mapping[str, Any]


class Observer:
    """What is told of a run as it goes; this one does nothing with it."""

    def on_start(self, info: Record) -> None: ...

    def on_progress(self, done: int, total: int, tokens: int) -> None: ...

    def on_generation(self, record: Record) -> None: ...

    def on_eval(self, record: Record) -> None: ...

    def on_message(self, text: str) -> None: ...

    def on_end(self, summary: Record) -> None: ...

    def close(self) -> None:
        """The run is over, well or not: leave the terminal usable."""


# --- observers ----------------------------------------------------------------------------------------------------


def observer(out: TextIO) -> Observer:
    """A live display where ``out`` is a terminal that can move its cursor, plain lines everywhere else."""
    if out.isatty() and os.environ.get("TERM", "") != "dumb":
        return TerminalObserver(out)
    return PlainObserver(out)


class _Figures:
    """What both observers know of the run so far."""

    def __init__(self) -> None:
        self.total: int | None = None
        self.limit: float | None = None
        self.first = 0
        self.done = 0
        self.began = time.monotonic()
        self.generation_began = self.began
        self.record: Record = {}
        self.heldout: Record = {}
        self.best: Record = {}

    def start(self, info: Record) -> None:
        self.total = info.get("generations")
        self.limit = info.get("seconds")
        self.first = self.done = int(info.get("generation") or 0)
        self.began = self.generation_began = time.monotonic()

    def generation(self, record: Record) -> None:
        self.record = record
        self.done = int(record["generation"])
        self.generation_began = time.monotonic()

    def evaluation(self, record: Record) -> None:
        self.heldout = record
        if record.get("best") or not self.best:
            self.best = record
        self.generation_began = time.monotonic()

    def left(self) -> float | None:
        """Seconds to the end at the pace so far, None before the first generation is through."""
        elapsed = time.monotonic() - self.began
        guesses = []
        if self.total and self.done > self.first:
            guesses.append(elapsed / (self.done - self.first) * (self.total - self.done))
        if self.limit:
            guesses.append(max(0.0, self.limit - elapsed))
        return min(guesses, default=None)

    def of_total(self) -> str:
        return f"{self.done}/{self.total}" if self.total else str(self.done)

    def facts(self) -> list[str]:
        """Reward, held-out score, speed and memory: whatever is known, one text each."""
        parts = []
        if self.record:
            parts.append(f"reward {number(self.record.get('reward'))}")
        parts += variety(self.record)
        if self.heldout:
            text = f"held-out {number(self.heldout.get('heldout'))}"
            if self.best and self.best is not self.heldout:
                text += f" (best {number(self.best.get('heldout'))} after {self.best.get('generation')})"
            parts.append(text)
        if self.record.get("tokens_per_second"):
            parts.append(f"{self.record['tokens_per_second']:.0f} tok/s")
        if self.record.get("peak_rss_bytes"):
            parts.append(size(self.record["peak_rss_bytes"]))
        return parts


class PlainObserver(Observer):
    """One line per event, no control characters. A reader that went away does not end the run."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.figures = _Figures()

    def line(self, text: str) -> None:
        try:
            print(text, file=self.out, flush=True)
        except (OSError, ValueError):  # closed pipe or file: what the run computes is worth more than its log
            self.out = io.StringIO()

    def on_start(self, info: Record) -> None:
        self.figures.start(info)
        for text in introduction(info):
            self.line(text)

    def on_generation(self, record: Record) -> None:
        self.figures.generation(record)
        parts = [f"reward {number(record.get('reward'))} +- {number(record.get('reward_std'))}"]
        if record.get("shrink") is not None:
            parts.append(f"shrink {record['shrink']:.2f}")
        if record.get("excluded"):
            parts.append(f"{record['excluded']} rewards excluded")
        parts += variety(record)
        parts += self.figures.facts()[-2:] if record.get("tokens_per_second") else []
        parts.append(f"{duration(record.get('seconds'))}")
        left = self.figures.left()
        if left is not None:
            parts.append(f"{duration(left)} left")
        self.line(f"generation {self.figures.of_total()}: {', '.join(parts)}")

    def on_eval(self, record: Record) -> None:
        self.figures.evaluation(record)
        best = ", best so far" if record.get("best") and record.get("generation") else ""
        what = f"after generation {record['generation']}" if record.get("generation") else "of the base"
        self.line(f"held-out score {what}: {number(record.get('heldout'))} +- {number(record.get('heldout_se'))}{best}")

    def on_message(self, text: str) -> None:
        self.line(text)

    def on_end(self, summary: Record) -> None:
        for name, value in closing(summary):
            self.line(f"{name + ':':<12} {value}")
        self.line(f"next: {following(summary)}")


class TerminalObserver(Observer):
    """A live block: bars for generations and members, and one line of figures. Messages scroll above it."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        figures = self.figures = _Figures()
        self.console = Console(file=out, highlight=False)

        class Bars(Progress):
            def get_renderables(self) -> Any:
                yield self.make_tasks_table(self.tasks)
                if figures.facts():
                    yield Text("  ".join(figures.facts()), overflow="fold")

        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None if self.console.width >= 60 else 10),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            expand=self.console.width >= 60,
        )
        self.generations = self.bars.add_task("generations", total=None, text="")
        self.members = self.bars.add_task("members", total=None, text="", visible=False)

    def on_start(self, info: Record) -> None:
        self.figures.start(info)
        for text in introduction(info):
            self.console.print(text, markup=False)
        self.bars.start()
        self._show()

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        elapsed = max(time.monotonic() - self.figures.generation_began, 1e-9)
        text = f"{done}/{total}" + (f" {tokens / elapsed:.0f} tok/s" if tokens and elapsed > 0.5 else "")
        self.bars.update(self.members, completed=done, total=total, text=text, visible=True)
        self._show()

    def on_generation(self, record: Record) -> None:
        self.figures.generation(record)
        if record.get("excluded"):
            self.on_message(f"generation {record['generation']}: {record['excluded']} rewards excluded")
        self._show()

    def on_eval(self, record: Record) -> None:
        self.figures.evaluation(record)
        self._show()

    def on_message(self, text: str) -> None:
        self.console.print(text, markup=False)

    def on_end(self, summary: Record) -> None:
        from rich.table import Table

        self.bars.stop()
        table = Table(show_header=False)
        for name, value in closing(summary):
            table.add_row(name, value)
        self.console.print(table)
        self.console.print(f"next: {following(summary)}", markup=False, soft_wrap=True)

    def close(self) -> None:
        self.bars.stop()

    def _show(self) -> None:
        left = self.figures.left()
        text = self.figures.of_total() + (f" {duration(left)} left" if left is not None else "")
        total, done = self.figures.total, self.figures.done
        self.bars.update(self.generations, completed=done, total=total, text=text)


def variety(record: Record) -> list[str]:
    """How many different answers there were, and how common the commonest was where that is a trap's sign."""
    if record.get("distinct") is None:
        return []
    text = f"{record['distinct']} different answers"
    share = record.get("majority") or 0.0
    return [f"{text} ({share:.0%} the same)" if share >= 0.5 else text]


def introduction(info: Record) -> list[str]:
    """What is about to happen, in two lines."""
    length = f"{info['generations']} generations" if info.get("generations") else ""
    if info.get("seconds"):
        length += (", " if length else "") + f"at most {duration(info['seconds'])}"
    start = f"from generation {info['generation']}" if info.get("generation") else ""
    work = f"{info['members']} members x {info['rows']} rows" if info.get("members") else ""
    scale = ", ".join(part for part in (length, work, start) if part)
    return [
        f"tuning {info.get('model')} on {info.get('task')}: {scale}",
        f"run folder: {info.get('run')}",
    ]


def closing(summary: Record) -> list[tuple[str, str]]:
    """Rows of the table at the end."""
    base, best = _score(summary.get("base")), _score(summary.get("best"))
    rows = [("base", number(base)), ("best", number(best))]
    if base is not None and best is not None:
        rows.append(("difference", f"{best - base:+.3f}"))
    rows.append(("generations", str(summary.get("generations"))))
    rows.append(("time", duration(summary.get("seconds"))))
    if summary.get("tokens"):
        rows.append(("tokens", f"{summary['tokens']:,}"))
    if summary.get("peak_rss_bytes"):
        rows.append(("peak memory", size(summary["peak_rss_bytes"])))
    return rows


def _score(value: Any) -> float | None:
    """``base`` and ``best`` of a summary are a number, or a record of an evaluation."""
    if isinstance(value, Mapping):
        value = value.get("heldout", value.get("mean"))
    return None if value is None or not math.isfinite(value) else float(value)


def following(summary: Record) -> str:
    """The command to type next."""
    return f"edgees eval {shlex.quote(str(summary.get('run')))}"


# --- words for numbers --------------------------------------------------------------------------------------------


def number(value: Any) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _short(value: Any) -> str:
    """Counts as they are, other figures with three digits."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _as_text(text: str) -> str:
    """For Markdown: a scorer's own words in a finding make no markup and no new line."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# --- files of a finished or running run ---------------------------------------------------------------------------


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a last line cut off by a crash is left out. :raises RunError: no run, or damaged."""
    path = run / "metrics.jsonl"
    try:
        texts = [text for text in path.read_text(encoding="utf-8").split("\n") if text]
    except FileNotFoundError:
        raise RunError(
            f"{run} is not a run folder: it has no metrics.jsonl", "give the folder that tune named"
        ) from None
    records = []
    for index, text in enumerate(texts):
        try:
            records.append(json.loads(text))
        except json.JSONDecodeError as error:
            if index + 1 < len(texts):
                raise RunError(f"{path}:{index + 1}: not JSON ({error})") from error
    return records


def table(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One dict per generation with the keys of :data:`COLUMNS`; of several lines on a generation later ones win."""
    merged: dict[int, dict[str, Any]] = {}
    for record in records:
        if "generation" in record and "finding" not in record:
            row = merged.setdefault(int(record["generation"]), {})
            row |= {key: value for key, value in record.items() if value is not None}
    return [{column: merged[generation].get(column) for column in COLUMNS} for generation in sorted(merged)]


def findings(records: Sequence[Record]) -> list[Record]:
    """What the watchdogs told (:meth:`edgees.watch.Finding.record`), in order, each once."""
    told = {(r.get("generation"), r["finding"], bool(r.get("ended"))): r for r in records if "finding" in r}
    return list(told.values())


def write_csv(run: Path, rows: Sequence[Record]) -> Path:
    """metrics.csv: one line per generation; what is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: int(v) if isinstance(v, bool) else v for key, v in row.items()} for row in rows)
    path = run / "metrics.csv"
    write_atomic(path, text.getvalue().encode())
    return path


HELD, TRAINED = "#0b6e4f", "#1f5aa6"
SIGNS = (
    ("KL from the base", "", "kl"),
    ("perplexity", "", "perplexity"),
    ("reply length", "length", "heldout_length"),
    ("different answers", "distinct", ""),
    ("share of invalid", "invalid", ""),
)
"""Small plots under the rewards: title, column of training, column of held-out evaluations."""


def plot(run: Path, rows: Sequence[Record]) -> Path | None:
    """plots/reward.png: held-out score with its standard error, training reward with its spread over members, and below
    them, small, those of :data:`SIGNS` that are known and not always 0.

    None where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    signs = [sign for sign in SIGNS if any(any(_columns(rows, "generation", y)[1]) for y in sign[1:] if y)]
    figure = Figure(figsize=(8, 7.5 if signs else 6), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    heights = [3, 3, 1.5] if signs else [3, 3]
    grid = figure.add_gridspec(len(heights), max(len(signs), 1), height_ratios=heights)
    upper = figure.add_subplot(grid[0, :])
    lower = figure.add_subplot(grid[1, :], sharex=upper)
    upper.tick_params(labelbottom=False)
    small = [figure.add_subplot(grid[2, place]) for place in range(len(signs))]
    held = _columns(rows, "generation", "heldout", "heldout_se")
    trained = _columns(rows, "generation", "reward", "reward_std")
    if held[0]:
        upper.errorbar(*held[:2], yerr=held[2], fmt="o-", color=HELD, capsize=3, label="held-out score, ±1 s.e.")
        upper.axhline(held[1][0], color="#888888", linestyle="--", linewidth=1, label=f"start {held[1][0]:.3f}")
        upper.legend(loc="best")
    if trained[0]:
        low = [mean - spread for mean, spread in zip(trained[1], trained[2], strict=True)]
        high = [mean + spread for mean, spread in zip(trained[1], trained[2], strict=True)]
        lower.plot(*trained[:2], marker=".", color=TRAINED, label="mean over members")
        lower.fill_between(trained[0], low, high, color=TRAINED, alpha=0.2, label="±1 s.d. over members")
        lower.legend(loc="best")
    upper.set_ylabel("held-out score")
    lower.set_ylabel("training reward")
    lower.set_xlabel("generation")
    for axes, (title, in_training, in_heldout) in zip(small, signs, strict=True):
        for y, style, color in ((in_training, "-", TRAINED), (in_heldout, "o-", HELD)):
            if y:
                axes.plot(*_columns(rows, "generation", y)[:2], style, color=color, markersize=3)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_ylim(bottom=0)
    for axes in (lower, *small):
        axes.xaxis.set_major_locator(MaxNLocator(5 if axes in small else "auto", integer=True, min_n_ticks=1))
    for axes in (upper, lower, *small):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    upper.set_title(run.name)
    picture = io.BytesIO()
    canvas.print_png(picture)
    path = run / "plots" / "reward.png"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, picture.getvalue())
    return path


def _columns(rows: Sequence[Record], x: str, y: str, error: str = "") -> tuple[list[float], list[float], list[float]]:
    known = [row for row in rows if row.get(y) is not None and math.isfinite(row[y])]
    return [row[x] for row in known], [row[y] for row in known], [row.get(error) or 0.0 for row in known]


PLOT_HINT = "no plot: matplotlib is not installed (pip install matplotlib, then: edgees report RUN)"


_EXTRA = (
    ("tokens a reply", "heldout_length"),
    ("cut off", "heldout_truncated"),
    ("KL from the base", "kl"),
    ("perplexity", "perplexity"),
)
"""Columns of the page's table that are left out where nothing is known of them."""


def write_page(
    run: Path,
    rows: Sequence[Record],
    settings: Record,
    summary: Record | None,
    picture: bool,
    told: Sequence[Record] = (),
) -> Path:
    """README.md of the run folder: what was tuned, how it went, what was found wrong (``told``), what to do next."""
    lines = [f"# {run.name}", ""]
    if settings:
        lines += [f"`{settings.get('model')}` tuned on `{settings.get('task')}` by edgees.", ""]
    if summary:
        lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in closing(summary)), ""]
    if picture:
        lines += ["![held-out score and training reward per generation](plots/reward.png)", ""]
    evaluated = [row for row in rows if row.get("heldout") is not None]
    if evaluated:
        extra = [(name, y) for name, y in _EXTRA if any(row.get(y) is not None for row in evaluated)]
        names = ["after generation", "held-out score", "s.e.", "different answers", "the commonest", *dict(extra)]
        lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for r in evaluated:
            share = "-" if r.get("heldout_majority") is None else f"{r['heldout_majority']:.0%}"
            cells = [number(r["heldout"]), number(r.get("heldout_se")), str(r.get("heldout_distinct") or "-"), share]
            cells += [_short(r.get(y)) for _, y in extra]
            lines.append(f"| {r['generation']} | {' | '.join(cells)} |")
        lines.append("")
    lines += contexts(run)
    lines += examples(run, rows)
    if told:
        lines += ["## What the watchdogs said", ""]
        lines += [f"- after generation {r['generation']}: **{r['finding']}**: {_as_text(r['text'])}" for r in told]
        lines.append("")
    lines += [
        "## Next",
        "",
        "Run these from the folder in which this one lies:",
        "",
        "```bash",
        *(
            f"edgees {command}"
            for command in (
                f"eval {shlex.quote(run.name)}",
                f"export {shlex.quote(run.name)} --to gguf --out {shlex.quote(run.name + '-gguf')} --verify",
                f"resume {shlex.quote(run.name)}",
            )
        ),
        "```",
        "",
        "`history.jsonl` is the run: with the same base model it rebuilds these weights bit for bit (`edgees replay`).",
        "All settings are in `config.resolved.toml`, all figures in `metrics.csv`.",
        "",
    ]
    path = run / "README.md"
    write_atomic(path, "\n".join(lines).encode())
    return path


def examples(run: Path, rows: Sequence[Record]) -> list[str]:
    """Held-out rows before and after, side by side: the one that gained most and the one that lost most."""
    evaluated = [int(r["generation"]) for r in rows if r.get("heldout") is not None]
    best = max((r for r in rows if r.get("heldout") is not None), key=lambda r: float(r["heldout"]), default=None)
    if best is None or not best["generation"] or 0 not in evaluated:
        return []
    base, tuned = (_traces(run / "traces" / f"eval-{g:06d}.jsonl") for g in (0, int(best["generation"])))
    change = {
        row: float(tuned[row]["reward"]) - float(base[row]["reward"])
        for row in base
        if row in tuned and None not in (base[row].get("reward"), tuned[row].get("reward"))
    }
    order = sorted(change, key=lambda row: (-change[row], row))
    chosen = list(dict.fromkeys([*order[:1], *(row for row in order[-1:] if change[row] < 0)]))
    lines: list[str] = []
    for row in chosen:
        heads = [f"{name}: {float(t['reward']):.3f}" for name, t in (("base", base[row]), ("tuned", tuned[row]))]
        lines += [f"Held-out row {_cell(row)}:", "", f"| | {' | '.join(heads)} |", "|---|---|---|"]
        said = [_said(trace) for trace in (base[row], tuned[row])]
        for turn in range(max(map(len, said))):
            cells = [column[turn] if turn < len(column) else ("", "") for column in said]
            lines.append(f"| {cells[0][0] or cells[1][0]} | {cells[0][1]} | {cells[1][1]} |")
        lines.append("")
    return ["## Before and after", "", *lines] if lines else []


def contexts(run: Path) -> list[str]:
    """What was tried before the questions: each context under the one that it was made from, with what its trial showed
    (the last one, where what it was tried against has changed), the rollouts that were played with it, and what is
    different in the end; [] where nothing was proposed."""
    try:
        history = History.open(run / "history.jsonl", repair=False)
    except RunError:
        return []
    if not history.proposals:
        return []
    config = history.header["config"]
    each = config["pairs"] * (2 if config.get("antithetic") else 1) // max(1, config.get("groups", 1))
    if config.get("scope") == "none":
        each = 2
    rows: dict[str, list[float]] = {}
    played: dict[str, int] = {}
    fate: dict[str, str] = {}
    taken: list[str] = []
    for line in history.lines:
        trial = line.get("trial") or {"units": {}, "dropped": [], "adopted": ""}
        after = f"after generation {line['generation'] + 1}"
        for digest, units in trial["units"].items():
            if digest not in taken:  # what was in force was measured when it was adopted
                rows.setdefault(digest, []).extend(units)
            played[digest] = played.get(digest, 0) + len(units) * max(1, each // 2)
        fate |= {digest: f"dropped {after}" for digest in trial["dropped"] if digest not in taken}
        if new := trial["adopted"]:
            if taken and taken[-1] in fate:
                fate[taken[-1]] += f", replaced {after}"
            fate[new] = f"{fate[new]}, taken back {after}" if new in taken else f"**adopted** {after}"
            taken.append(new)
            rows = {d: x for d, x in rows.items() if d in fate}
    made = [(p["from"], found) for p in history.proposals for found in p["candidates"]]
    first = history.context(0).digest
    out = ["## Contexts", "", f"- `{first[:8]}`: what the run began with"]

    def below(parent: str, depth: int) -> None:
        for origin, found in made:
            if origin != parent:
                continue
            digest, seen = found["digest"], rows.get(found["digest"], [])
            score = f"{sum(seen) / len(seen):+.3f} a row over {len(seen)} rows" if seen else "no row yet"
            told = f"{score}, about {played.get(digest, 0)} rollouts; {fate.get(digest, 'on trial at the end')}"
            out.append(f"{'  ' * depth}- `{digest[:8]}` {_cell(found['origin'], 160)}: {told}")
            below(digest, depth + 1)

    below(first, 1)
    own = sum(p["rollouts"] for p in history.proposals)
    failures = [failure for p in history.proposals for failure in p["failures"]]
    out += ["", f"Proposals played {own} rollouts of their own; {len(failures)} came to nothing"]
    out[-1] += f", the last: {_cell(failures[-1], 160)}" if failures else "."
    changed = diff(history.context(0), history.context(history.generation))
    if changed:
        text = "".join(c if c.isprintable() or c == "\n" else "·" for c in changed)
        fence = "`" * (3 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
        out += ["", "What is in force at the end, against the beginning:", "", f"{fence}diff", text, fence]
    return [*out, ""]


def _traces(path: Path) -> dict[str, Record]:
    """The lines of a trace by row; nothing where it is missing or damaged."""
    found: dict[str, Record] = {}
    with suppress(OSError, ValueError):
        for line in filter(None, path.read_text(encoding="utf-8", errors="replace").split("\n")):
            record = json.loads(line)
            found[str(record["row"])] = record
    return found


def _said(trace: Record) -> list[tuple[str, str]]:
    """(role, text) of each message of a trace, fit for cells of a table."""
    messages = trace.get("messages") or [{"role": "assistant", "content": trace.get("answer")}]
    said = []
    for message in messages:
        calls = [c.get("function", {}) for c in message.get("tool_calls") or ()]
        text = " ".join([str(message.get("content") or ""), *(f"{c.get('name')}({c.get('arguments')})" for c in calls)])
        said.append((_cell(str(message.get("role"))), _cell(text)))
    return said


def _cell(text: str, width: int = 300) -> str:
    """One cell of a table of Markdown: a model may write anything."""
    flat = " ".join(text.split())
    flat = "".join(c if c.isprintable() else "·" for c in flat)
    return _as_text(flat if len(flat) <= width else flat[: width - 3] + "...")


def write(run: Path, settings: Record | None = None, summary: Record | None = None) -> tuple[list[Path], list[str]]:
    """metrics.csv, plots/reward.png and README.md anew from metrics.jsonl. Returns the files and what is to be said."""
    records = read_metrics(run)
    rows = table(records)
    picture = plot(run, rows)
    files = [write_csv(run, rows), *([picture] if picture else [])]
    files.append(write_page(run, rows, settings or {}, summary, picture is not None, findings(records)))
    return files, [] if picture else [PLOT_HINT]
