"""Environments as tasks: ``env:FILE.py:CLASS``, ``textarena:ID``, ``textworld:[FILE]``, ``gymnasium:ID``, each with
``?name=value&...``. A row is an instance to play, and the environment itself pays.

A class of one's own has one of two shapes:

- tools (TRL's): ``reset(**row)`` returns the first observation, a list of messages, or None where the row's ``prompt``
  says all; every other public method with type hints is a tool for the model; ``get_reward()`` or an attribute
  ``reward`` pays; ``done`` (attribute, property or method), or a reply without a call, ends the episode.
- step (gymnasium's): ``reset(seed=..., options=row)`` or ``reset(**row)`` returns an observation, perhaps with a
  dictionary; ``step(action)``, with the reply's text, returns (observation, reward, done[, info]) or (observation,
  reward, terminated, truncated, info); paid is the sum, or ``get_reward()``. ``parse_action(text)`` may pick the action
  out of a reply (None: there is none). ``info["invalid"]`` counts an action as invalid, and ``info["actions"]`` (or an
  attribute ``actions``) says which are possible.

Either may have ``system``, ``max_turns`` (10), ``max_tokens`` of a reply (64), ``deadline`` of a call in seconds (30),
``examples`` (messages put before the first observation), ``metrics()`` (numbers for the report), ``close()`` and
``rows()`` (dictionaries, each perhaps with ``split``: train or heldout). Without rows, an instance is a seed: 256 to
train on and 64 others held out. Parameters go to the constructor; where it does not take them, ``rows`` (a JSON Lines
file), ``train``, ``heldout``, ``system``, ``max_turns``, ``max_tokens`` and ``deadline`` are ours.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from edgees.errors import DataError, MissingExtra, UsageError
from edgees.tasks import jsonl
from edgees.tasks.playing import About, Environments
from edgees.tasks.rows import Row, Task, split_rows, without_overlap

KINDS = ("env", "textarena", "textworld", "gymnasium")
TRAIN, HELDOUT = 256, 64
GENERATED = 64, 32
"""The same for textworld, where an instance is a game that takes about a second to generate."""
SEARCH = {"pairs": 32, "rows": 4, "groups": 2, "lr": 0.2, "sigma": 0.0, "eval_every": 5}
"""Settings that suit rewards without likelihoods: a sigma at which episodes differ, more rows than with likelihoods."""
FIRST_HELDOUT = 1_000_000
"""Seeds from here on are held out."""


def parse(spec: str) -> dict[str, Any]:
    """What the child is told of a spec: kind, name or file and class, parameters (JSON where they parse as such).

    :raises UsageError: it cannot be read, or DataError: there is no such file.
    """
    match = re.fullmatch(r"(\w+)(?::([^?]*))?(?:\?(.*))?", spec, re.DOTALL)
    assert match is not None and match[1] in KINDS
    kind, rest, query = match[1], match[2] or "", match[3] or ""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError(f"the parameters of {spec!r} cannot be read: {error}", "Write them as ?a=1&b=2.") from error
    parameters: dict[str, Any] = {}
    for key, text in pairs:
        try:
            parameters[key] = json.loads(text)
        except ValueError:
            parameters[key] = text
    if kind != "env":
        if not rest and kind != "textworld":
            raise UsageError(f"{kind}: needs the id of an environment", f"For example {_EXAMPLES[kind]}.")
        name = str(Path(rest).expanduser().absolute()) if rest and kind == "textworld" else rest
        return {"kind": kind, "name": name, "parameters": parameters}
    found = re.fullmatch(r"(.+\.py)(?::(\w*))?", rest)
    if found is None:
        raise UsageError(f"{spec!r} names no Python file", "Write env:FILE.py:CLASS, for example env:shop.py:Shop.")
    file = Path(found[1]).expanduser().absolute()
    if not file.is_file():
        raise DataError(f"no such file: {found[1]}", "Paths are relative to the current folder.")
    return {"kind": kind, "file": str(file), "class": found[2] or "", "parameters": parameters}


_EXAMPLES = {"textarena": "textarena:GuessTheNumber-v0", "gymnasium": "gymnasium:FrozenLake-v1?render_mode=ansi"}


def load(spec: str, split: float, seed: int) -> Task:
    """The task; ``split`` and ``seed`` as in :func:`edgees.tasks.rows.split_rows`, for rows that do not say themselves.

    :raises UsageError: no such class, environment or parameter. :raises MissingExtra: the package is not there.
    :raises ScorerError: the class cannot be loaded.
    """
    target = parse(spec)
    if target["kind"] != "env" and importlib.util.find_spec(target["kind"]) is None:
        raise MissingExtra(f"{spec} needs the package {target['kind']}", f"pip install {target['kind']}")
    source = Environments(target)
    try:
        about = source.about()
    finally:
        source.close()
    train, held, warnings = _rows(spec, about, split, seed)
    return Task(
        name=spec,
        train=tuple(train),
        heldout=tuple(held),
        system=about.system,
        max_tokens=about.max_tokens,
        warnings=tuple(warnings),
        defaults=SEARCH,
        episodes=lambda: Environments(target, about),
    )


def _rows(spec: str, about: About, split: float, seed: int) -> tuple[list[Row], list[Row], list[str]]:
    file = about.settings.get("rows")
    if file is None and about.rows is None:
        short = spec.partition("?")[0].rsplit("/", 1)[-1]
        usual = GENERATED if spec.startswith("textworld") else (TRAIN, HELDOUT)
        count = about.settings.get("train", usual[0])
        held = about.settings.get("heldout", usual[1]) if split else 0
        seeds = (range(count), range(FIRST_HELDOUT, FIRST_HELDOUT + held))
        train, heldout = ([Row(f"{short}/{n}", (), {"seed": n}) for n in numbers] for numbers in seeds)
        return train, heldout, []
    if file is not None:
        found = _records(Path(file).expanduser())
    else:
        found = [(f"{about.name}/{index}", dict(row)) for index, row in enumerate(about.rows or ())]
    parts: dict[str, list[Row]] = {"train": [], "heldout": [], "": []}
    seen: set[str] = set()
    for name, record in found:
        part = record.pop("split", "")
        if part not in parts:
            raise DataError(f"row {name}: split must be train or heldout, not {part!r}", "Or leave it out.")
        row = _row(name, record)
        if row.id in seen:
            raise DataError(f"row {name}: the id {row.id!r} stands already at another row", "Each may stand once.")
        seen.add(row.id)
        parts[part].append(row)
    train, heldout = list(parts["train"]), list(parts["heldout"])
    if parts[""]:
        more, held_too = split_rows(parts[""], 0.0 if heldout else split, seed)
        train, heldout = [*train, *more], [*heldout, *held_too]
    if not train:
        raise DataError(f"{spec} has no rows to train on", "rows() must return at least one that is not held out.")
    train, warnings = without_overlap(train, heldout, "its own held-out rows")
    return train, heldout if split else [], warnings


def read_rows(path: Path) -> tuple[Row, ...]:
    """Instances to play from a JSON Lines file: one object a line, its columns are what reset gets."""
    rows = []
    for name, record in _records(path):
        record.pop("split", None)
        rows.append(_row(name, record))
    return tuple(rows)


def _row(name: str, record: dict[str, Any]) -> Row:
    given = record.get("id")
    named = type(given) is int or (isinstance(given, str) and given != "")
    return Row(str(given) if named else name, (), record)


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(place, columns) of every line that holds something. :raises DataError: file and line of what cannot be used."""
    found: list[tuple[str, dict[str, Any]]] = []
    number = 0
    try:
        for number, raw in enumerate(jsonl._lines(path), 1):
            if text := jsonl._decoded(raw, first=number == 1):
                found.append((f"{path.name}:{number}", jsonl._record(text)))
    except jsonl._Bad as error:
        raise DataError(f"{path}:{number}: {error}", error.hint) from error
    if not found:
        raise DataError(f"{path} holds no rows", 'One JSON object a line, such as {"seed": 1}.')
    return found


def is_spec(spec: str) -> bool:
    """Whether a task's name is of one of these kinds."""
    return re.split(r"[:?]", spec, maxsplit=1)[0] in KINDS
