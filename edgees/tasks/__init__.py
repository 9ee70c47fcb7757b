"""Tasks by name: ``home``, ``sums``, ``jsonl:FILE``, ``reasoning_gym:NAME[?parameter=value&...]``, and environments
(:mod:`edgees.tasks.environments`): ``env:FILE.py:CLASS``, ``textarena:ID``, ``textworld:[FILE]``, ``gymnasium:ID``.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from edgees.errors import UsageError
from edgees.tasks import environments, gym, home, jsonl, sums
from edgees.tasks.rows import Row, Task, split_rows, without_overlap

KNOWN = ("home", "sums", "jsonl:FILE", "reasoning_gym:NAME", "env:FILE.py:CLASS", "textarena:ID", "textworld:",
         "gymnasium:ID")  # fmt: skip
SPLIT = 0.2
"""Share of the questions held out where neither the task nor the user says which."""


def load_task(
    spec: str,
    *,
    eval_data: str | Path | None = None,
    split: float = SPLIT,
    seed: int = 0,
    limit: int | None = None,
) -> Task:
    """The task that ``spec`` names, its training rows free of every question that is held out.

    eval_data: JSON Lines file whose rows are held out instead of the task's own. split, seed: share and seed of the
    split of tasks that have none of their own (``jsonl``, ``reasoning_gym``, rows of environments); the same rows and
    seed give the same split. limit: use only the first so many training rows. Relative paths are relative to the
    current folder.

    :raises UsageError: unknown task, or DataError: file and line of a row that cannot be used.
    :raises MissingExtra: the package that the task needs is not installed.
    :raises ScorerError: the user's environment cannot be loaded.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"the number of training rows must be at least 1, not {limit}", "Leave it out to use all.")
    task = _named(spec, 0.0 if eval_data else split, seed)
    if eval_data:
        if any(row.entry is not None for row in task.train):
            raise UsageError(
                f"held-out rows of {spec} cannot come from a file: its own scorer knows only rows that it made",
                "Leave --eval-data out: some of the task's rows are held out.",
            )
        heldout = _read(eval_data) if task.episodes is None else environments.read_rows(Path(eval_data).expanduser())
        train, warnings = without_overlap(task.train, heldout, str(eval_data))
        task = replace(task, train=tuple(train), heldout=heldout, warnings=(*task.warnings, *warnings))
    return replace(task, train=task.train[:limit])


def _named(spec: str, split: float, seed: int) -> Task:
    kind, colon, rest = spec.partition(":")
    if spec == "home":
        return home.load()
    if spec == "sums":
        return sums.load()
    if kind == "jsonl" and rest:
        train, heldout = split_rows(_read(rest), split, seed)
        return Task(spec, tuple(train), tuple(heldout))
    if kind == "reasoning_gym" and colon:
        return gym.load(spec, split, seed)
    if environments.is_spec(spec):
        return environments.load(spec, split, seed)
    hint = f"Known: {', '.join(KNOWN)}."
    near = difflib.get_close_matches(kind, [name.partition(":")[0] for name in KNOWN], 1)
    if Path(spec).is_file():
        what = ("an environment", "env") if spec.endswith(".py") else ("the rows of a file", "jsonl")
        hint = f"For {what[0]} write {what[1]}:{spec}"
    elif near and near[0] != kind:
        hint = f"Did you mean {near[0]}? {hint}"
    raise UsageError(f"unknown task {spec!r}", hint)


def _read(path: str | Path) -> tuple[Row, ...]:
    return tuple(jsonl.read_rows(Path(path).expanduser()))
