"""``reasoning_gym:NAME[?parameter=value&...]``: a data set of the package reasoning-gym, with its own scoring.

``seed`` and ``size`` are parameters like the others (seed 0 and 320 rows by default).
"""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any
from urllib.parse import parse_qsl, urlencode

from edgees.children.calling import preserved_random, seed_globals
from edgees.errors import MissingExtra, UsageError
from edgees.tasks.rows import Row, Task, split_rows

SIZE = 320


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """(data set, parameters) of a spec; values are JSON where they parse as such, else text."""
    name, _, query = spec.removeprefix("reasoning_gym:").partition("?")
    if not name:
        raise UsageError("reasoning_gym: needs the name of a data set", "For example reasoning_gym:chain_sum.")
    parameters: dict[str, Any] = {"seed": 0, "size": SIZE}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError(
            f"the parameters of {spec!r} cannot be read: {error}", "Write them as ?min_terms=2&max_terms=3."
        ) from error
    for key, text in pairs:
        try:
            parameters[key] = json.loads(text)
        except ValueError:
            parameters[key] = text
    for key in ("seed", "size"):
        if type(parameters[key]) is not int or parameters[key] < 0:
            raise UsageError(f"{key} in {spec!r} must be a whole number, not {parameters[key]!r}")
    return name, parameters


def canonical(name: str, parameters: dict[str, Any]) -> str:
    """The spec again, every parameter spelt out."""
    return f"reasoning_gym:{name}?" + urlencode(
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in sorted(parameters.items())}
    )


def load(spec: str, split: float, seed: int) -> Task:
    """The task; ``split`` and ``seed`` as in :func:`edgees.tasks.rows.split_rows`.

    :raises UsageError: unknown data set or parameter. :raises MissingExtra: the package is not there.
    """
    name, parameters = parse(spec)
    with preserved_random():
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise MissingExtra(
                f"{spec} needs the package reasoning-gym ({error})", "pip install reasoning-gym"
            ) from error
        if name not in DATASETS:
            raise UsageError(f"reasoning_gym has no data set {name!r}", f"It has: {', '.join(sorted(DATASETS))}.")
        seed_globals(parameters["seed"])  # not every generator keeps to a random.Random of its own
        try:
            dataset = reasoning_gym.create_dataset(name, **parameters)
            entries = [dataset[index] for index in range(len(dataset))]
        except Exception as error:  # every generator has its own way to refuse a parameter
            raise UsageError(
                f"reasoning_gym refuses {spec!r}: {type(error).__name__}: {error}",
                "Parameters are those of the data set's configuration class.",
            ) from error
    rows = [_row(name, index, entry) for index, entry in enumerate(entries)]
    train, held = split_rows(rows, split, seed)
    return Task(
        name=spec,
        train=tuple(train),
        heldout=tuple(held),
        reward=(canonical(name, parameters),),
        system=None,
        max_tokens=256,
    )


def _row(name: str, index: int, entry: dict[str, Any]) -> Row:
    question, answer = str(entry["question"]), entry.get("answer")
    text = None if answer is None else str(answer)
    packed = base64.b64encode(pickle.dumps(dict(entry))).decode("ascii")
    columns: dict[str, Any] = {"metadata": json.loads(json.dumps(entry.get("metadata"), default=str, skipkeys=True))}
    if text is not None:
        columns["answer"] = text
    return Row(f"{name}/{index}", ({"role": "user", "content": question},), columns, text, question, packed)
