"""What an episode is: turns between a model and something that answers it, and one number at the end.

A source of episodes (an environment in this process, somebody's agent program) knows nothing of engines and members;
:mod:`edgees.rollout` brings them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]
"""A message of OpenAI's chat API: role, content (text), for calls ``tool_calls``, for results ``tool_call_id``."""


@dataclass(frozen=True)
class Ask:
    """What the model is to answer next. messages: the whole conversation so far; tools: function schemas; actions: the
    replies that are possible, where it is known."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How an episode ended.

    reward: None where there is none, and ``fault`` says why; such an episode is excluded, never counted as 0.
    outcome: ``finished``; ``truncated`` (a limit of turns, tokens or time; ``reason`` says which); ``overflow`` (the
        context was full); ``failed`` (what played with the model broke down).
    messages: everything that was said, replies included. given: how many of them every episode begins with (system
        message, the environment's own examples).
    """

    reward: float | None
    outcome: str = "finished"
    reason: str = ""
    fault: str = ""
    messages: tuple[Message, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    given: int = 0


class Episode(Protocol):
    """One row played by one member; :meth:`start` or :meth:`reply` are called until one of them gives an ending."""

    def start(self) -> Ask | Ending: ...

    def reply(self, text: str, outcome: str) -> Ask | Ending:
        """The model's answer to the last ``Ask``; outcome: as of :class:`edgees.backends.base.Completion`."""

    def abandon(self, reason: str) -> Ending:
        """The player breaks off: the ending with what has been reached so far."""


class Episodes(Protocol):
    """Where episodes come from. Rows, seeds and replies alone decide what happens in one."""

    def begin(self, row_id: str, columns: Mapping[str, Any], system: str | None, seed: int) -> Episode:
        """A new episode of a row. seed: of everything random in it, shared by all members."""

    def close(self) -> None: ...


def transcript(messages: Sequence[Message]) -> str:
    """A conversation for people to read, one paragraph a message."""
    lines = []
    for message in messages:
        text = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            text += f"{' ' if text else ''}-> {function.get('name')}({function.get('arguments')})"
        lines.append(f"{message.get('role')}: {text}")
    return "\n".join(lines)
