"""Script of the environments' child: plays many episodes of one environment class, each as if it were alone.

Options: {"kind": "env", "file", "class"} or {"kind": "textarena" | "textworld" | "gymnasium", "name"}, and
"parameters" (constructor arguments and our own settings), "tools" (path of the module that writes schemas), "folder"
(for generated files), "memory" (bytes). Requests, and what they answer:

- {"op": "load"}: {"name", "shape": "tools" | "step", "tools", "settings", "rows"}; {"usage", "hint"} where what was
  asked for is not there; {"error", "where", "trace"} where the user's code broke.
- {"op": "reset", "episode", "row", "seed"}, {"op": "step", "episode", "text"},
  {"op": "call", "episode", "name", "arguments"}: {"text", "done", "truncated", "invalid", "actions"} ("messages"
  instead of "text" where a reset gives a conversation), or {"fault"}, and the episode is over.
- {"op": "end", "episode"}: {"reward", "parts"} or {"fault"}; the episode is over.

A fresh child answers {"unloaded": true} until it is loaded, and {"unknown": true} for an episode it has not begun.
The global states of ``random`` and NumPy belong to the episode that is being called, so that episodes cannot influence
each other, in whatever order they are called.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.util
import inspect
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_HERE = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _HERE:
    sys.path.pop(0)  # our own file names must not hide the user's modules
sys.path.insert(0, _HERE)
import calling  # type: ignore[import-not-found]  # noqa: E402
import games  # type: ignore[import-not-found]  # noqa: E402
import protocol  # type: ignore[import-not-found]  # noqa: E402
import score  # type: ignore[import-not-found]  # noqa: E402

sys.path.pop(0)
for _name in ("calling", "games", "protocol", "score"):
    del sys.modules[_name]  # nor may they be found in place of the user's ``score``

LONGEST = 16_000
"""Characters of one observation."""
SHOWN = 256 << 10
"""Bytes of what the environments print that are passed on."""
SETTINGS = {"rows": str, "train": int, "heldout": int, "max_turns": int, "max_tokens": int, "deadline": float,
            "system": str}  # fmt: skip
"""Parameters of ours, where the constructor does not take one of that name."""
RESERVED = ("reset", "step", "get_reward", "reward", "done", "metrics", "rows", "parse_action", "close", "actions")
"""Public names that are no tools."""


class Failed(Exception):
    """The environment broke its contract: the words become the episode's fault."""


class Slot:
    """One running episode: its environment, the random states it sees, and what it has earned."""

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row = row
        self.seed = seed
        self.env: Any = None
        self.states: tuple[Any, Any] | None = None
        self.total = 0.0
        self.action_list: Any = None

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The function's result, under this episode's random states; coroutines are run to their end."""
        if self.states is None:
            calling.seed_globals(self.seed)
        else:
            random.setstate(self.states[0])
            np.random.set_state(self.states[1])
        try:
            result = function(*arguments, **named)
            return asyncio.run(result) if inspect.iscoroutine(result) else result
        finally:
            self.states = (random.getstate(), np.random.get_state())


class Host:
    """All episodes of one class, by number."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.path = str(options.get("file", ""))
        self.make: Callable[..., Any] | None = None
        self.name = ""
        self.steps = False
        self.arguments: dict[str, Any] = {}
        self.slots: dict[int, Slot] = {}

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "load":
                return self._load()
            if self.make is None:
                return {"unloaded": True}
            return self._episode(request)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()

    # -- loading --------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, Any]:
        try:
            return self._described()
        except games.Refused as error:
            return {"usage": str(error), "hint": error.hint}
        except BaseException as error:  # SystemExit too: it must not end the loop
            return dict(score.failure(error, self.path))

    def _described(self) -> dict[str, Any]:
        if self.options["kind"] == "env":
            make, self.name = self._own_class()
            accepted = calling.parameters_of(make)[0]
        else:
            make, self.name, accepted = games.prepare(self.options)
        settings = self._divide(accepted)
        probe = Slot({}, 0)
        env = probe.call(make, **self.arguments)
        self.steps = callable(getattr(env, "step", None))
        if not callable(getattr(env, "reset", None)):
            raise games.Refused(f"{self.name} has no method reset", "An environment is told there what to begin with.")
        tools = [] if self.steps else self._tools(env)
        for key in ("system", "max_turns", "max_tokens", "deadline", "examples"):
            if key not in settings and getattr(env, key, None) is not None:
                settings[key] = getattr(env, key)
        rows = probe.call(env.rows) if callable(getattr(env, "rows", None)) else None
        self._close(env)
        self.make = make
        answer = {
            "name": self.name,
            "shape": "step" if self.steps else "tools",
            "tools": tools,
            "settings": settings,
            "rows": rows if rows is None else list(rows),
        }
        try:
            json.dumps(answer, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise games.Refused(
                f"the rows, settings or examples of {self.name} hold what JSON cannot: {error}",
                "Rows are dictionaries of texts, numbers, lists and dictionaries.",
            ) from error
        return answer

    def _own_class(self) -> tuple[Callable[..., Any], str]:
        module = score.load_file(self.path)
        own = sorted(
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
        )
        able = [name for name in own if callable(getattr(getattr(module, name), "reset", None))]
        wanted = self.options["class"] or (able[0] if len(able) == 1 else "")
        found = getattr(module, wanted, None) if wanted else None
        if not callable(found):
            there = f"It has the classes {', '.join(own)}." if own else "It defines no class."
            near = difflib.get_close_matches(wanted, own, 1)
            what = f"has no class {wanted!r}" if wanted else "does not say by itself which class is meant"
            hint = f"Did you mean {near[0]}? {there}" if near else f"{there} Write env:FILE.py:CLASS."
            raise games.Refused(f"{self.path} {what}", hint)
        return found, wanted

    def _divide(self, accepted: list[str] | None) -> dict[str, Any]:
        """Our settings among the parameters; the constructor's go to ``arguments``."""
        settings: dict[str, Any] = {}
        self.arguments = {}
        for key, value in self.options["parameters"].items():
            if accepted is not None and key in accepted:
                self.arguments[key] = value
            elif key in SETTINGS:
                settings[key] = value
            elif accepted is None:
                self.arguments[key] = value
            else:
                known = sorted({*accepted, *SETTINGS})
                near = difflib.get_close_matches(key, known, 1)
                hint = f"Did you mean {near[0]}? " if near else ""
                raise games.Refused(f"{self.name} has no parameter {key!r}", f"{hint}There are: {', '.join(known)}.")
        return settings

    def _tools(self, env: Any) -> list[dict[str, Any]]:
        spec = importlib.util.spec_from_file_location("_edgees_tools", self.options["tools"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["_edgees_tools"] = module
        spec.loader.exec_module(module)
        members = {name: value for cls in reversed(type(env).__mro__) for name, value in vars(cls).items()}
        names = [
            name
            for name, value in members.items()
            if not name.startswith("_")
            and name not in RESERVED
            and (inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod)))
        ]
        if not names:
            raise games.Refused(
                f"{self.name} has neither a method step nor a public method that could be a tool",
                "Write step(action) -> (observation, reward, done), or methods with type hints and a docstring.",
            )
        schemas = []
        for name in names:
            try:
                schemas.append(module.schema(getattr(env, name)))
            except Exception as error:  # by whatever name: edgees is not imported here
                hint = "Every public method is a tool for the model: give it type hints, or call it _" + name + "."
                raise games.Refused(f"{self.name}.{name} cannot be a tool: {error}", hint) from error
        return schemas

    # -- playing --------------------------------------------------------------------------------------------------

    def _episode(self, request: Mapping[str, Any]) -> dict[str, Any]:
        number, op = request["episode"], request["op"]
        if op == "reset":
            self.slots[number] = Slot(request["row"], request["seed"])
        slot = self.slots.get(number)
        if slot is None:
            return {"unknown": True}
        answer: dict[str, Any]
        try:
            answer = getattr(self, f"_{op}")(slot, request)
        except Failed as error:
            answer = {"fault": str(error)}
        except BaseException as error:
            method = request.get("name") or ("get_reward" if op == "end" else op)
            answer = {"fault": f"{self.name}.{method}: {self._what(error)}"}
        if "fault" in answer or op == "end":
            self._close(self.slots.pop(number).env)
        return answer

    def _what(self, error: BaseException) -> str:
        """Type, message and place: the user's innermost line, or the package's where the class is not the user's."""
        what = score.failure(error, self.path)
        frames = traceback.extract_tb(error.__traceback__)
        where = what["where"] or f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"
        return f"{what['error']} ({where})"

    def _close(self, env: Any) -> None:
        close = getattr(env, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):
                close()

    def _reset(self, slot: Slot, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.make is not None
        slot.env = slot.call(self.make, **self.arguments)
        row = dict(slot.row)
        names, required = calling.parameters_of(slot.env.reset)
        if names is not None and "options" in names and "options" not in row:
            given = {"seed": slot.seed, "options": row}
        else:
            given = {"seed": slot.seed, **row}
            if names is None and "seed" not in (*row, *required):  # **row takes everything: give what the row has
                del given["seed"]
        lacking = [name for name in required if name not in given]
        if lacking:
            raise Failed(f"{self.name}.reset needs {', '.join(map(repr, lacking))}, which the row lacks")
        given = {key: value for key, value in given.items() if names is None or key in names}
        result = slot.call(slot.env.reset, **given)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result, slot.action_list = result[0], result[1].get("actions")
        if isinstance(result, list) and result and all(isinstance(m, dict) and "role" in m for m in result):
            return self._observed(slot, messages=[conversation_message(self.name, m) for m in result])
        return self._observed(slot, text=None if result is None else text_of(result))

    def _step(self, slot: Slot, request: Mapping[str, Any]) -> dict[str, Any]:
        action: Any = request["text"].strip()
        pick = getattr(slot.env, "parse_action", None)
        if callable(pick):
            action = slot.call(pick, request["text"])
            if action is None:
                return self._observed(slot, text="Error: there is no valid action in this reply.", invalid=True)
        result = slot.call(slot.env.step, action)
        if not isinstance(result, tuple) or not 3 <= len(result) <= 5:
            raise Failed(
                f"{self.name}.step returned {calling.describe(result)}, not (observation, reward, done[, info]) or "
                "(observation, reward, terminated, truncated, info)"
            )
        observation, reward, done, *rest = result
        info = rest[-1] if rest and isinstance(rest[-1], dict) else {}
        if not callable(getattr(slot.env, "get_reward", None)):
            ok, value = calling.number(reward)
            if not ok:
                raise Failed(f"{self.name}.step returned {value} as its reward")
            slot.total += value
        slot.action_list = info.get("actions")
        return self._observed(
            slot,
            text=text_of(observation),
            done=bool(done),
            truncated=len(result) == 5 and bool(rest[0]),
            invalid=bool(info.get("invalid")),
        )

    def _call(self, slot: Slot, request: Mapping[str, Any]) -> dict[str, Any]:
        method = getattr(slot.env, request["name"])
        try:
            text, invalid = text_of(slot.call(method, **request["arguments"])), False
        except MemoryError:
            raise
        except Exception as error:
            text, invalid = clip(f"Error: {type(error).__name__}: {error}"), True
        done = getattr(slot.env, "done", False)
        return self._observed(slot, text=text, done=bool(slot.call(done) if callable(done) else done), invalid=invalid)

    def _observed(self, slot: Slot, **more: Any) -> dict[str, Any]:
        actions = slot.action_list
        if actions is None:
            actions = getattr(slot.env, "actions", None)
        known = [str(action) for action in actions] if isinstance(actions, (list, tuple)) else None
        return {"done": False, "truncated": False, "invalid": False, "actions": known, **more}

    def _end(self, slot: Slot, request: Mapping[str, Any]) -> dict[str, Any]:
        get_reward = getattr(slot.env, "get_reward", None)
        if callable(get_reward):
            source, value = "get_reward", slot.call(get_reward)
        elif self.steps:
            source, value = "step", slot.total
        elif hasattr(slot.env, "reward"):
            source, value = "reward", slot.env.reward
        else:
            raise Failed(f"{self.name} has neither a method get_reward nor an attribute reward")
        ok, number = calling.number(value)
        if not ok:
            raise Failed(f"{self.name}.{source} gave {number} as the reward")
        parts: dict[str, float] = {}
        if callable(getattr(slot.env, "metrics", None)):
            values = slot.call(slot.env.metrics)
            if not isinstance(values, dict):
                raise Failed(f"{self.name}.metrics returned {calling.describe(values)}, not a dictionary")
            checked = {str(key): calling.number(float(v) if isinstance(v, bool) else v) for key, v in values.items()}
            parts = {key: v for key, (good, v) in checked.items() if good}
        return {"reward": number, "parts": parts}


def conversation_message(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message that a reset gave, checked."""
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool") or not isinstance(content, str):
        raise Failed(
            f"{name}.reset returned the message {calling.describe(dict(message))}: a role and a text are needed"
        )
    return {**message, "content": clip(content)}


def text_of(value: Any) -> str:
    """An observation as text: JSON for dictionaries and lists, else what ``str`` makes of it."""
    if isinstance(value, (dict, list, tuple)):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return clip(json.dumps(value, ensure_ascii=False, default=str))
    return clip(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))


def clip(text: str) -> str:
    """At most LONGEST characters, all of them encodable, with a note where something was cut."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}\n(cut here: {len(text):,} characters in all)"
    return text.encode("utf-8", "replace").decode("utf-8")


def bounded_output() -> None:
    """Pass on the first SHOWN bytes of what is printed and swallow the rest: a log must not fill the disk.

    By a process of its own, since a thread would wait for the interpreter lock of what prints.
    """
    if not hasattr(os, "fork"):
        return
    inward, outward = os.pipe()
    if os.fork():
        os.close(inward)
        os.dup2(outward, 2)
        os.close(outward)
        sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8")  # the old one may believe that it can seek
        return
    os.close(outward)
    for descriptor in (0, 1):
        os.close(descriptor)
    left = SHOWN
    while data := os.read(inward, 1 << 16):
        with contextlib.suppress(OSError):
            os.write(2, data[:left])
            if 0 < left <= len(data):
                os.write(2, b"\n(what the environments print from here on is not shown)\n")
        left = max(0, left - len(data))
    os._exit(0)


def limit(size: int) -> None:
    """Bytes of writable memory; a no-op where the system has no such limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (size if hard < 0 else min(size, hard), hard))


def main() -> None:
    options = json.loads(sys.argv[1])
    bounded_output()
    limit(int(options["memory"]))
    protocol.serve(Host(options).handle)


if __name__ == "__main__":
    main()
