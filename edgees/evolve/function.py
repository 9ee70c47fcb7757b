"""The user's own functions, in a child process: evolvers, and hooks that mask texts.

``FILE.py[:FUNCTION]`` as an evolver is ``propose(context: dict, attempts: list[dict], seed: int) -> list[dict | str]``:
``context`` as :meth:`edgees.context.Context.to_dict` makes it, an attempt with the fields of
:class:`edgees.evolve.protocol.Attempt`. A text in the list is another system message; a dict is a context of which
keys that are left out stay as they are, with ``origin`` (a line for people) if it likes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgees.children import Child, ChildDied, ChildTimeout, guest_place
from edgees.context import Context
from edgees.errors import DataError, EdgeesError, UsageError
from edgees.evolve.bounds import shown
from edgees.evolve.protocol import Attempt, Candidate, NoProposal, Situation

DEADLINE_S = 60.0
"""Seconds a call may take."""
LOADING_S = 120.0
"""Seconds that importing the file may take."""
MEMORY = 2 << 30
"""Bytes that a call may take beyond what the imported file has."""
LARGEST = 1 << 18
"""Characters that a function may return, as JSON."""


class FunctionFailed(EdgeesError):
    """The user's function raised, hung, died, or returned what cannot be used."""


class UserFunction:
    """A function of a user's file. role: what it is for ("evolver"); default: its name where none is given.

    :raises UsageError: there is no such file.
    """

    def __init__(
        self, spec: str, role: str, default: str, *, folder: Path | None, deadline: float, log: Path | None
    ) -> None:
        base = folder if folder is not None else Path.cwd()
        head, colon, tail = spec.rpartition(":")
        path, self._function = base / Path(spec).expanduser(), ""
        if not path.is_file() and colon and tail.isidentifier():
            path, self._function = base / Path(head).expanduser(), tail
        if not path.is_file():
            raise UsageError(f"the {role}'s file {path} does not exist", "Paths are relative to the current folder.")
        self.spec, self._role, self._default, self._deadline = spec, role, default, deadline
        self._path = path.resolve()
        self._child = Child("evolve.py", {"file": str(self._path), "memory": MEMORY}, log=log)
        self._loaded: int | None = None  # the process that has the file

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """What the function returns, called with those of the arguments that it names. :raises FunctionFailed:"""
        if self._loaded is None or self._loaded != self._child.pid:
            self._load(arguments)
        request = {"op": "call", "name": self._function, "arguments": dict(arguments), "largest": LARGEST}
        answer = self._ask(request, self._deadline)
        if "shape" in answer:
            raise FunctionFailed(f"the {self._role} {self.spec} returned {shown(answer['shape'])}")
        return answer["value"]

    def close(self) -> None:
        """End its process."""
        self._child.close()

    def _load(self, arguments: Mapping[str, Any]) -> None:
        request = {"op": "load", "name": self._function, "default": self._default}
        answer = self._ask(request, max(LOADING_S, self._deadline))
        if not answer["name"]:
            wanted = self._function or self._default
            there = ", ".join(answer["functions"]) or "none"
            raise FunctionFailed(f"{self._path} has no function {wanted!r}; it has: {there}")
        missing = [name for name in answer["required"] if name not in arguments]
        if missing:
            raise FunctionFailed(
                f"the {self._role} {self.spec} asks for {', '.join(missing)}; it is called with {', '.join(arguments)}"
            )
        self._function, self._loaded = answer["name"], self._child.pid

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        name = f"the {self._role} {self.spec}"
        try:
            answer = self._child.call(request, seconds)
        except ChildTimeout as error:
            where = guest_place(error.trace)
            at = f"; it was at {where}" if where else ""
            raise FunctionFailed(f"{name} did not return within {seconds:g} s{at}") from error
        except ChildDied as error:
            raise FunctionFailed(f"{name} ended its process: {error}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise FunctionFailed(f"{name}: what it is given or gives is not JSON: {error}") from error
        assert isinstance(answer, dict)
        if "error" in answer:
            place = f" at {answer['where']}" if answer["where"] else ""
            raise FunctionFailed(f"{name} raised{place}: {answer['error']}")
        return answer


class FunctionEvolver:
    """A user's function as an evolver; see the module."""

    def __init__(self, spec: str, *, folder: Path | None, deadline: float, log: Path | None) -> None:
        self.name = spec
        self._call = UserFunction(spec, "evolver", "propose", folder=folder, deadline=deadline, log=log)

    def propose(self, situation: Situation) -> list[Candidate | NoProposal]:
        """What the function returns; an item that is no context is told and costs itself only."""
        said = self._call(
            {
                "context": situation.context.to_dict(),
                "attempts": [_as_dict(attempt) for attempt in situation.attempts],
                "seed": situation.seed,
            }
        )
        if not isinstance(said, list):
            raise NoProposal(f"it returned {shown(repr(said))} instead of a list")
        return [_candidate(item, number, situation.context) for number, item in enumerate(said, 1)]

    def close(self) -> None:
        """End its process."""
        self._call.close()


def _as_dict(attempt: Attempt) -> dict[str, Any]:
    reward = attempt.reward if attempt.reward is not None and math.isfinite(attempt.reward) else None
    return {**asdict(attempt), "messages": [dict(m) for m in attempt.messages], "reward": reward}


def _candidate(item: Any, number: int, force: Context) -> Candidate | NoProposal:
    if isinstance(item, str):
        return Candidate(replace(force, system=item), f"system message: {shown(item)}")
    if not isinstance(item, dict):
        return NoProposal(f"item {number} is {shown(repr(item))}, neither a text nor a context")
    given = {key: value for key, value in item.items() if key != "origin"}
    try:
        context = Context.from_dict({**force.to_dict(), **given}, f"item {number}")
    except DataError as error:
        return NoProposal(error.message)
    return Candidate(context, str(item.get("origin") or f"item {number} of its list"))
