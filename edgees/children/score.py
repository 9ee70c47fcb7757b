"""Script of the scorer child: imports a user's file once and calls its functions on request.

Options: one of {"file"}, {"regex"}, {"gym": {"name", "parameters"}}.
Requests: {"op": "load", "name"} ("": whatever is meant), {"op": "score", "name", "arguments": {...}} and {"op":
"extract", "completions"}.
Answers to ``load``: {"name" ("": not there), "functions", "required"}; to ``score``: {"values": [[ok, number or
reason]]}, or {"shape": words} for no list; to ``extract``: {"texts": [text or None]}, {"shape": words}, or {"nothing":
True} where there is no such function; to all {"error", "where", "trace"} where something was raised.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _HERE:
    sys.path.pop(0)  # our own file names must not hide the user's modules
sys.path.insert(0, _HERE)
import calling  # type: ignore[import-not-found]  # noqa: E402
import protocol  # type: ignore[import-not-found]  # noqa: E402

sys.path.pop(0)

EXTRACT = "extract_answers"
"""Name of a function, of a user's file too, that says what texts answer."""


def load_file(path: str) -> ModuleType:
    sys.path.insert(0, os.path.dirname(path))
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def own_functions(module: ModuleType) -> list[str]:
    """Names to suggest: what the file itself defines."""
    return sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__
    )


def default_name(names: list[str]) -> str:
    """The function that is meant where none is named; "" if that is anybody's guess."""
    names = [name for name in names if name != EXTRACT] or names
    return next((name for name in ("reward", "score") if name in names), names[0] if len(names) == 1 else "")


def failure(error: BaseException, path: str) -> dict[str, Any]:
    """What went wrong and where: the innermost frame of the user's file, and the last lines of the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{os.path.basename(error.filename)}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        folder = os.path.dirname(path)
        own = [f for f in frames if path and os.path.dirname(os.path.abspath(f.filename)) == folder]
        where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""
    last = traceback.format_exception_only(type(error), error)[-1].strip()
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip().splitlines()
    return {"error": last[:1000], "where": where, "trace": "\n".join(lines[-6:])[-2000:]}


def regex_scorer(pattern: str) -> Callable[..., list[float]]:
    compiled = re.compile(pattern, re.DOTALL)

    def score(completions: list[str], answers: list[str | None]) -> list[float]:
        return [regex_credit(compiled, text, wanted) for text, wanted in zip(completions, answers)]  # noqa: B905

    return score


def regex_credit(compiled: re.Pattern[str], text: str, wanted: str | None) -> float:
    text = text.strip()
    found = compiled.search(text)
    if found is None:
        return 0.0
    if compiled.groups and wanted is not None:
        return 1.0 if (found.group(1) or "").strip() == wanted.strip() else 0.1
    return 1.0 if compiled.fullmatch(text) else 0.5


def regex_extract(pattern: str) -> Callable[[list[str]], list[str | None]]:
    """What the pattern finds first: its group, where it has one, else all of it."""
    compiled = re.compile(pattern, re.DOTALL)

    def extract(completions: list[str]) -> list[str | None]:
        found = [compiled.search(text.strip()) for text in completions]
        return [match and (match.group(min(compiled.groups, 1)) or "").strip() for match in found]

    return extract


def extracted(function: Callable[..., Any] | None, completions: list[str]) -> dict[str, Any]:
    """{"texts": [text or None]}, {"nothing": True} where there is no function, {"shape": words} for what is no list."""
    if not callable(function):
        return {"nothing": True}
    values = calling.values_of(function(completions))
    if isinstance(values, str):
        return {"shape": values}
    return {"texts": [None if value is None else str(value) for value in values]}


def gym_scorer(name: str, parameters: Mapping[str, Any]) -> Callable[..., list[float]]:
    import base64
    import pickle

    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, **parameters)

    def score(completions: list[str], entries: list[str]) -> list[float]:
        # The entries were pickled by our own parent: tuples and sets in them survive, which JSON would not keep.
        unpacked = [pickle.loads(base64.b64decode(entry)) for entry in entries]
        return [dataset.score_answer(text.strip(), entry) for text, entry in zip(completions, unpacked)]  # noqa: B905

    return score


def main() -> None:
    options = json.loads(sys.argv[1])
    path = options.get("file", "")
    functions: dict[str, Any] = {}
    listed: list[str] = []

    def load() -> None:
        if functions:
            return
        if "regex" in options:
            functions["regex"] = regex_scorer(options["regex"])
            functions[EXTRACT] = regex_extract(options["regex"])
        elif "gym" in options:
            functions["gym"] = gym_scorer(options["gym"]["name"], options["gym"]["parameters"])
        else:
            module = load_file(path)
            listed.extend(own_functions(module))
            functions.update(vars(module))  # imported functions and callable objects may be named as well

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        try:
            load()
            if request["op"] == "load":
                name = request["name"] or default_name(listed)
                if not callable(functions.get(name)):
                    return {"name": "", "functions": listed}
                required = calling.parameters_of(functions[name])[1]
                return {"name": name, "functions": listed, "required": required}
            if request["op"] == "extract":
                return extracted(functions.get(EXTRACT), request["completions"])
            answer: dict[str, Any] = calling.call(functions[request["name"]], request["arguments"])
            return answer
        except BaseException as error:  # SystemExit too: it must not end the loop
            return failure(error, path)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()

    protocol.serve(handle)


if __name__ == "__main__":
    main()
