"""Episodes of environments that live in a child process: who says what, and how it ends.

An :class:`Environments` is one child (``children/play.py``) with all episodes of one environment class. Each
:class:`Play` keeps what it has asked of the child. When a call hangs or the child dies, the episode at fault ends
(``failed``, no reward, a fault that names class, method and row); the others are played again in a fresh child from
what they kept, at their next turn, and one that then meets other observations is failed as not deterministic.

How an episode ends, and what it is paid:

- ``finished``: the environment says so, or (tools) the model replies without a call.
- ``truncated``, reason ``turns``: ``max_turns`` replies; ``environment``: the environment itself broke off; other
  reasons are those of :meth:`Play.abandon`. Paid with what the environment gives at that moment: ``get_reward()``, or
  the sum of the steps' rewards so far.
- ``overflow``: the context was full; paid in the same way.
- ``failed``: the environment raised, hung, died or gave no number; no reward.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgees import tools
from edgees.children import Child, ChildDied, ChildTimeout, guest_place
from edgees.episodes import Ask, Ending, Message
from edgees.errors import ScorerError, UsageError

DEADLINE_S = 30.0
"""Seconds that one call of an environment may take."""
LOADING_S = 120.0
"""Seconds that importing the user's file, or a package of games, may take."""
MEMORY = 4 << 30
"""Bytes that the child may allocate."""
MAX_TURNS = 10
MAX_TOKENS = 64


class Broken(Exception):
    """The episode cannot go on; the words are its fault."""


@dataclass(frozen=True)
class About:
    """What a class says of itself. shape: ``tools`` or ``step``; rows: its own instances, None where it has none."""

    name: str
    shape: str
    tools: tuple[Mapping[str, Any], ...] = ()
    system: str | None = None
    examples: tuple[Message, ...] = ()
    max_turns: int = MAX_TURNS
    max_tokens: int = MAX_TOKENS
    deadline: float = DEADLINE_S
    rows: tuple[Mapping[str, Any], ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> About:
        """From the child's answer to ``load``, checked. :raises UsageError: a setting that cannot be one."""
        name, given = answer["name"], dict(answer["settings"])
        for key in ("max_turns", "max_tokens", "train", "heldout"):
            least = 0 if key == "heldout" else 1
            value = given.get(key, least)
            if type(value) is not int or value < least:
                raise UsageError(f"{key} of {name} must be a whole number of at least {least}, not {value!r}")
        deadline = given.get("deadline", DEADLINE_S)
        if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0:
            raise UsageError(f"deadline of {name} must be a number of seconds above 0, not {deadline!r}")
        for key in ("system", "rows"):
            if not isinstance(given.get(key), (str, type(None))):
                raise UsageError(f"{key} of {name} must be a text, not {given[key]!r}")
        examples = given.get("examples", [])
        if not isinstance(examples, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in examples
        ):
            raise UsageError(
                f"examples of {name} must be a list of messages", 'Such as {"role": "user", "content": "..."}.'
            )
        rows = answer["rows"]
        if rows is not None and not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"rows() of {name} must return a list of dictionaries", "They are what reset gets.")
        return cls(
            name,
            answer["shape"],
            tuple(answer["tools"]),
            given.get("system"),
            tuple(examples),
            given.get("max_turns", MAX_TURNS),
            given.get("max_tokens", MAX_TOKENS),
            float(deadline),
            None if rows is None else tuple(rows),
            given,
        )


class Environments:
    """Episodes of one class, in one child. target: options of ``play.py`` that say which class.

    :meth:`about` loads the class (UsageError or ScorerError where that fails).
    """

    def __init__(self, target: Mapping[str, Any], about: About | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="edgees-games-", ignore_cleanup_errors=True)
        given = {"tools": tools.__file__, "folder": self._folder.name, "memory": MEMORY}
        self._child = Child("play.py", {**given, **target})
        self._about = about
        self._numbers = itertools.count()

    def about(self) -> About:
        if self._about is None:
            self._about = self._load()
        return self._about

    def begin(self, row_id: str, columns: Mapping[str, Any], system: str | None, seed: int) -> Play:
        """See :class:`edgees.episodes.Episodes`. A row with a whole number ``seed`` overrules ``seed``."""
        own = columns.get("seed")
        return Play(self, next(self._numbers), row_id, columns, system, own if type(own) is int else seed)

    def close(self) -> None:
        self._child.close()
        self._folder.cleanup()

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer, the class loaded first in a fresh one. Raises ChildTimeout, ChildDied, Broken."""
        deadline = self.about().deadline
        answer: dict[str, Any] = self._child.call(request, deadline)
        if "unloaded" in answer:
            try:
                self._load()
            except (ScorerError, UsageError) as error:  # it could be loaded before
                raise Broken(error.message) from error
            answer = self._child.call(request, deadline)
        return answer

    def _load(self) -> About:
        try:
            answer = self._child.call({"op": "load"}, LOADING_S)
        except ChildTimeout as error:
            raise ScorerError(
                f"the environment could not be loaded: no answer within {LOADING_S:g} s{place(error.trace)}",
                "Importing its file, or its constructor, hangs.",
            ) from error
        except ChildDied as error:
            raise ScorerError(
                f"the environment could not be loaded: {error}", "Importing its file, or its constructor, ends Python."
            ) from error
        if "usage" in answer:
            raise UsageError(answer["usage"], answer["hint"])
        if "error" in answer:
            where = f" ({answer['where']})" if answer["where"] else ""
            raise ScorerError(f"the environment could not be loaded: {answer['error']}{where}", answer["trace"])
        return About.of(answer)


class Play:
    """One row in one environment. ``actions``: what may be done now, where the environment says so."""

    def __init__(
        self, pool: Environments, number: int, row_id: str, columns: Mapping[str, Any], system: str | None, seed: int
    ) -> None:
        self._pool, self._number = pool, number
        self._row_id, self._columns, self._seed = row_id, columns, seed
        self._system = system
        self._messages: list[Message] = []
        self._asked: list[tuple[dict[str, Any], bytes]] = []
        self._turns = self._invalid = 0
        self._begun = False
        self._ending: Ending | None = None
        self.actions: tuple[str, ...] = ()
        self._given = 0

    def start(self) -> Ask | Ending:
        about = self._pool.about()
        system = about.system if self._system is None else self._system
        head: list[Message] = [{"role": "system", "content": system}] if system else []
        try:
            answer = self._do({"op": "reset", "row": dict(self._columns), "seed": self._seed}, "reset")
            opening = self._opening(answer, self._columns.get("prompt"))
        except Broken as error:
            return self._failed(error)
        if opening[0]["role"] in ("system", "developer"):
            head = []
        self._messages = [*head, *about.examples, *opening]
        self._given = len(head) + len(about.examples)
        return self._next(answer["done"], answer["truncated"])

    def _opening(self, answer: Mapping[str, Any], prompt: Any) -> list[Message]:
        """The first messages: the row's ``prompt``, if it has one, and what reset gave, in its last message."""
        opening: list[Message] = answer.get("messages") or []
        text = answer.get("text")
        if isinstance(prompt, str):
            opening = [{"role": "user", "content": prompt}, *opening]
        elif isinstance(prompt, list):
            opening = [*(dict(message) for message in prompt), *opening]
        if text is not None:
            if opening and opening[-1].get("role") == "user":
                opening[-1] = {"role": "user", "content": f"{opening[-1]['content']}\n\n{text}"}
            else:
                opening = [*opening, {"role": "user", "content": text}]
        if not opening:
            raise Broken(self._fault("reset", "it returned nothing to begin with, and the row has no 'prompt'"))
        return opening

    def reply(self, text: str, outcome: str) -> Ask | Ending:
        self._turns += 1
        about = self._pool.about()
        try:
            done, truncated = self._with_tools(text) if about.shape == "tools" else self._with_step(text)
        except Broken as error:
            return self._failed(error)
        if outcome == "overflow" and not done:
            return self._end("overflow", "context")
        return self._next(done, truncated)

    def _with_step(self, text: str) -> tuple[bool, bool]:
        self._messages.append({"role": "assistant", "content": text})
        answer = self._do({"op": "step", "text": text}, "step")
        self._messages.append({"role": "user", "content": answer["text"]})
        self._invalid += bool(answer["invalid"])
        return answer["done"], answer["truncated"]

    def _with_tools(self, text: str) -> tuple[bool, bool]:
        schemas = {schema["function"]["name"]: schema for schema in self._pool.about().tools}
        parsed = tools.parse(text, names=tuple(schemas))
        if not parsed.calls:
            self._messages.append({"role": "assistant", "content": text})
            if not parsed.errors:
                return True, False
            self._invalid += 1
            self._messages.append({"role": "user", "content": _errors(parsed.errors)})
            return False, False
        meant = [tools.coerce(call, schemas[call.name]) if call.name in schemas else call for call in parsed.calls]
        named = [(f"call_{self._turns}_{index}", call) for index, call in enumerate(meant)]
        self._messages.append(
            {
                "role": "assistant",
                "content": parsed.content,
                "tool_calls": [
                    {
                        "id": name,
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                    }
                    for name, call in named
                ],
            }
        )
        done = False
        wrong = bool(parsed.errors)
        for name, call in named:
            complaint = tools.check(call, schemas[call.name]) if call.name in schemas else _unknown(call.name, schemas)
            if complaint:
                wrong, content = True, f"Error: {complaint}"
            elif done:  # every call must be answered, or templates refuse the conversation
                content = "Error: it is over."
            else:
                answer = self._do({"op": "call", "name": call.name, "arguments": dict(call.arguments)}, call.name)
                wrong, content, done = wrong or answer["invalid"], answer["text"], answer["done"]
            self._messages.append({"role": "tool", "tool_call_id": name, "name": call.name, "content": content})
        if parsed.errors:
            self._messages.append({"role": "user", "content": _errors(parsed.errors)})
        self._invalid += wrong
        return done, False

    def _next(self, done: bool, truncated: bool) -> Ask | Ending:
        about = self._pool.about()
        if done:
            return self._end("finished")
        if truncated:
            return self._end("truncated", "environment")
        if self._turns >= about.max_turns:
            return self._end("truncated", "turns")
        return Ask(tuple(self._messages), about.tools, self.actions)

    def abandon(self, reason: str) -> Ending:
        """What has been reached so far; ``overflow`` or ``context`` as the reason mean that the context is full."""
        return self._end("overflow" if reason in ("overflow", "context") else "truncated", reason)

    # -- the child ------------------------------------------------------------------------------------------------

    def _end(self, outcome: str, reason: str = "") -> Ending:
        if self._ending is not None:
            return self._ending
        if not self._begun:
            return self._failed(Broken(self._fault("reset", f"given up before it had begun: {reason}")))
        try:
            answer = self._do({"op": "end"}, "get_reward")
        except Broken as error:
            return self._failed(error)
        parts = {**answer["parts"], **self._counts()}
        self._ending = Ending(answer["reward"], outcome, reason, "", tuple(self._messages), parts, self._given)
        return self._ending

    def _failed(self, error: Broken) -> Ending:
        self._ending = Ending(
            None, "failed", "environment", str(error), tuple(self._messages), self._counts(), self._given
        )
        return self._ending

    def _counts(self) -> dict[str, float]:
        return {"turns": float(self._turns), "invalid": self._invalid / max(self._turns, 1)}

    def _fault(self, method: str, what: str) -> str:
        return f"{self._pool.about().name}.{method} on row {self._row_id}: {what}"

    def _do(self, request: dict[str, Any], method: str) -> dict[str, Any]:
        """The child's answer, kept for playing again. :raises Broken: the fault, naming class, method and row."""
        request = {**request, "episode": self._number}
        answer = self._ask(request, method)
        for _ in range(2):
            if "unknown" not in answer:
                break
            self._again()
            answer = self._ask(request, method)
        if "unknown" in answer:
            raise Broken(self._fault(method, "its process ends between calls"))
        if "fault" in answer:
            raise Broken(f"row {self._row_id}: {answer['fault']}")
        self._asked.append((request, _digest(answer)))
        self._begun = True
        self.actions = tuple(answer.get("actions") or ())
        return answer

    def _again(self) -> None:
        """Play what has been played once more, in a fresh child."""
        for request, digest in self._asked:
            answer = self._ask(request, f"{request.get('name', request['op'])} (played again)")
            if "unknown" in answer:
                return
            if _digest(answer) != digest:
                raise Broken(
                    self._fault(
                        str(request.get("name", request["op"])),
                        "played again after another episode broke down it answered differently: it is not "
                        "deterministic in its row, the seed of random and the actions",
                    )
                )

    def _ask(self, request: Mapping[str, Any], method: str) -> dict[str, Any]:
        try:
            return self._pool.call(request)
        except ChildTimeout as error:
            raise Broken(self._fault(method, f"no answer within {error.seconds:g} s{place(error.trace)}")) from error
        except ChildDied as error:
            raise Broken(self._fault(method, str(error))) from error
        except Broken as error:
            raise Broken(self._fault(method, str(error))) from error


def place(trace: str) -> str:
    """`` (at file:line in function)`` where the child could say where it was."""
    found = guest_place(trace)
    return f" (at {found})" if found else ""


def _digest(answer: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(answer, sort_keys=True).encode(), digest_size=16).digest()


def _errors(errors: Iterable[Any]) -> str:
    return "\n".join(f"Error: {error}" for error in errors)


def _unknown(name: str, schemas: Mapping[str, Any]) -> str:
    return f"there is no tool {name!r}; the tools are {', '.join(schemas)}"
