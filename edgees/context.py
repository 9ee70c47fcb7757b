"""What stands before a question: system message, notes (a skill file), worked examples. A value, named by its hash.

A run has one context in force at a time. Which, and since when, stands in the journal, so that it is replayed and
exported together with the weights. Nothing in a context is trusted more than a row's own text: engines pass control
tokens in it as plain text, and :func:`cleaned` takes control characters out of what was written by a model.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edgees.episodes import Message, transcript
from edgees.errors import DataError

FORMAT = 1
HEADING = "Notes from earlier tries:"
"""Stands between the system message and the notes."""
LARGEST = 1 << 20
"""Characters of a file that holds a context."""
_ROLES = ("user", "assistant", "tool")
_SYSTEM = ("system", "developer")

Shot = tuple[Message, ...]
"""A worked example: messages from the question to the last reply."""


@dataclass(frozen=True)
class Context:
    """system: instead of the task's own system message; None: that. skills: notes in Markdown, put after the system
    message. shots: worked examples, put before the question."""

    system: str | None = None
    skills: str = ""
    shots: tuple[Shot, ...] = ()

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """16 hex digits of the SHA-256 of :meth:`to_dict`."""
        text = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def empty(self) -> bool:
        return self == Context()

    def apply(self, messages: Sequence[Message], *, whole: bool = False, same: bool = False) -> list[Message]:
        """A conversation with the context in it. Examples that ask what the conversation asks are left out (same: are
        not: where all episodes begin with the same words, these do not say which instance is played).

        The system message is taken as it stands (a task puts ``system`` there itself); whole: unless this context has
        one, which then takes its place, as for a program whose system message nobody else can change.
        """
        said = [dict(message) for message in messages]
        head, rest = (said[:1], said[1:]) if said and said[0].get("role") in _SYSTEM else ([], said)
        if whole and self.system is not None:
            head = [{**(head[0] if head else {"role": "system"}), "content": self.system}] if self.system else []
        if self.skills:
            before = str(head[0].get("content") or "") if head else ""
            notes = f"{HEADING}\n{self.skills}"
            role = head[0]["role"] if head else "system"
            head = [{"role": role, "content": f"{before}\n\n{notes}" if before else notes}]
        asked = () if same else _asked(rest)
        shots = [dict(m) for shot in self.shots if not (asked and _as_far(_asked(shot), asked)) for m in shot]
        return [*head, *shots, *rest]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` of it is equal."""
        return {
            "context": FORMAT, "system": self.system, "skills": self.skills,
            "shots": [[dict(message) for message in shot] for shot in self.shots],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, found: Any, where: str) -> Context:
        """:raises DataError: not what :meth:`to_dict` makes; ``where`` names the source."""
        hint = 'Such as {"context": 1, "system": "...", "skills": "- ...", "shots": [[{"role": "user", ...}, ...]]}.'
        if not isinstance(found, dict) or found.get("context", FORMAT) != FORMAT:
            raise DataError(f"{where} holds no context of format {FORMAT}", hint)
        unknown = set(found) - {"context", "system", "skills", "shots"}
        if unknown:
            raise DataError(f"{where}: {sorted(unknown)[0]!r} is no part of a context", hint)
        system, skills, shots = found.get("system"), found.get("skills", ""), found.get("shots", [])
        if not (system is None or isinstance(system, str)) or not isinstance(skills, str):
            raise DataError(f"{where}: system and skills must be texts", hint)
        if not isinstance(shots, list) or not all(_is_shot(shot) for shot in shots):
            raise DataError(f"{where}: shots must be lists of messages that begin with the user's", hint)
        try:
            written = json.dumps(shots, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{where}: shots that are not JSON: {error}", hint) from error
        _require_text([system or "", skills, written], where)
        return cls(system, skills, tuple(tuple(dict(m) for m in shot) for shot in shots))

    def to_text(self) -> str:
        """All of it for people to read, one thing a line where that can be: what :func:`diff` compares."""
        parts = [] if self.system is None else ["# System message", self.system]
        parts += ["# Notes", self.skills] if self.skills else []
        for number, shot in enumerate(self.shots, 1):
            parts += [f"# Example {number}", transcript(shot)]
        return "\n".join(parts) + ("\n" if parts else "")


def load(path: str | Path) -> Context:
    """A context from a file: JSON as :meth:`Context.to_dict` makes it; any other file is Markdown, and its text notes.

    :raises DataError: no such file, or nothing usable in it.
    """
    file = Path(path)
    try:
        with open(file, encoding="utf-8-sig") as opened:
            text = opened.read(LARGEST + 1)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8", "Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", "Give a context.json or Markdown.") from error
    if len(text) > LARGEST or "\0" in text:
        what = "has NUL characters in it" if "\0" in text else f"has more than {LARGEST:,} characters"
        raise DataError(f"{file} {what}", "Give a context.json or Markdown.")
    if file.suffix.lower() != ".json":
        _require_text([text], str(file))
        return Context(skills=text.strip())
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}", "edgees export writes such a file as context.json.") from error
    return Context.from_dict(found, str(file))


def diff(before: Context, after: Context) -> str:
    """What changed, as a unified diff; '' for nothing."""
    a, b = (c.to_text().splitlines() for c in (before, after))
    return "\n".join(list(difflib.unified_diff(a, b, before.digest, after.digest, lineterm="", n=1)))


def cleaned(text: str) -> str:
    """What a model wrote, fit to stand in a context: no control, format or unassigned characters but line ends and
    tabs, no unpaired surrogates, lines stripped at their ends, no more than one empty line in a row."""
    kept = "".join(c for c in text.replace("\r\n", "\n") if c in "\n\t" or unicodedata.category(c)[0] != "C")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in kept.split("\n"))).strip()


def _asked(messages: Sequence[Message]) -> list[str]:
    """What the user says, message by message."""
    return [" ".join(str(m.get("content")).split()) for m in messages if m.get("role") == "user"]


def _as_far(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two users say the same as far as both of them speak."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _is_shot(shot: Any) -> bool:
    return (
        isinstance(shot, list)
        and bool(shot)
        and all(isinstance(m, dict) and m.get("role") in _ROLES for m in shot)
        and all(m.get("content") is None or isinstance(m["content"], str) for m in shot)
        and all(isinstance(m.get("tool_calls") or [], (list, tuple)) for m in shot)
        and all(_is_call(call) for m in shot for call in m.get("tool_calls") or ())
        and shot[0]["role"] == "user"
    )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _require_text(texts: Sequence[str], where: str) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: an unpaired surrogate is no character", "Write the character itself.") from error
