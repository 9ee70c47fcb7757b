"""How a reward function is called and what it may return: shared by the child and by scorers in our own process.

Standard library only, for the child imports it by path.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def preserved_random() -> Iterator[None]:
    """Put the global states of ``random`` and NumPy back afterwards: foreign code likes to seed them."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def seed_globals(seed: int) -> None:
    """Seed ``random`` and, where it is loaded, NumPy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def parameters_of(function: Callable[..., Any]) -> tuple[list[str] | None, list[str]]:
    """(names it takes, None for any; names it must get)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names: list[str] | None = [p.name for p in named]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = None
    required = [p.name for p in named if p.default is p.empty]
    required += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    return names, required


def number(value: Any) -> tuple[bool, Any]:
    """(True, float) for a finite number, else (False, what it is instead)."""
    if value is None:
        return False, "None"
    item = getattr(value, "item", None)
    if callable(item) and not isinstance(value, (int, float)):
        try:
            value = item()  # NumPy and torch scalars
        except (TypeError, ValueError, RuntimeError):
            return False, describe(value)
    if isinstance(value, bool):
        return False, f"bool {value}: return a float"
    if not isinstance(value, (int, float)):
        return False, describe(value)
    try:
        result = float(value)
    except OverflowError:
        return False, "an integer too large for a float"
    if math.isnan(result):
        return False, "NaN"
    if math.isinf(result):
        return False, "inf" if result > 0 else "-inf"
    return True, result


def describe(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "(no repr)"
    return f"{type(value).__name__} {text[:60]}"


def values_of(result: Any) -> list[Any] | str:
    """A list of what came back, or words for what it is instead."""
    if inspect.isgenerator(result):
        return "a generator"
    to_list = getattr(result, "tolist", None)
    if callable(to_list):
        result = to_list()
    if not isinstance(result, (list, tuple)):
        return describe(result)
    return list(result)


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """{"values": [(ok, number or reason)]}, or {"shape": words} where no list came back. Exceptions pass."""
    names, _ = parameters_of(function)
    chosen = dict(arguments) if names is None else {k: v for k, v in arguments.items() if k in names}
    result = function(**chosen)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    values = values_of(result)
    if isinstance(values, str):
        return {"shape": values}
    return {"values": [number(value) for value in values]}
