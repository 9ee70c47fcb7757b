"""Rows from a JSON Lines file: one object per line with ``prompt`` or ``messages``, and any further columns.

``prompt`` is a text or a list of messages; ``messages`` is a conversation whose last message, if it is the
assistant's, is taken off as the reference answer. ``answer`` is the reference for scorers (and for ``loglik``, unless
the conversation ends with one). ``id``, if there, names the row in the history and in complaints. UTF-8; a byte-order
mark, CRLF and empty lines are accepted. Whatever cannot be used is a DataError with file and line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from edgees.errors import DataError
from edgees.tasks.rows import Row, as_text

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = ("prompts", "completions", "entries")
"""Names that scorers get from us, so no column may have them."""
_SUCH = 'Such as {"prompt": "...", "answer": "..."}.'


class _Bad(ValueError):
    """What is wrong with a line, and a hint; :func:`read_rows` adds the place."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, in order; ids are the column ``id`` or ``NAME:LINE``. :raises DataError: see the module."""
    rows: list[Row] = []
    lines: dict[str, int] = {}
    number = 0
    try:
        for number, raw in enumerate(_lines(path), 1):
            text = _decoded(raw, first=number == 1)
            if not text:
                continue
            row = _row(_record(text), f"{path.name}:{number}")
            if row.id in lines:
                raise _Bad(
                    f"the id {row.id!r} stands already in line {lines[row.id]}",
                    "Ids name rows, so each may stand once. Rename the column if it means something else.",
                )
            lines[row.id] = number
            rows.append(row)
    except _Bad as error:
        raise DataError(f"{path}:{number}: {error}", error.hint) from error
    if not rows:
        raise DataError(f"{path} holds no rows", f"One JSON object a line. {_SUCH}")
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except FileNotFoundError as error:
        raise DataError(f"no such file: {path}", "Paths are relative to the current folder.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "It must be a JSON Lines file.") from error


def _decoded(raw: bytes, first: bool) -> str:
    if first and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _Bad("this is UTF-16, not UTF-8", "Save the file as UTF-8.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
        raise _Bad(f"{byte} is not UTF-8", "Save the file as UTF-8.") from error
    return (text.removeprefix("\ufeff") if first else text).strip(" \t\r\n")


def _record(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except _Bad:
        raise
    except json.JSONDecodeError as error:
        what = "One JSON object per line; a list of objects over several lines is JSON, not JSON Lines."
        raise _Bad(f"not JSON: {error.msg} at column {error.colno}", what) from error
    except UnicodeEncodeError as error:
        reason = "an unpaired surrogate (\\ud800 to \\udfff) is no character"
        raise _Bad(reason, "Write the character itself, or both halves of the pair.") from error
    except RecursionError as error:
        raise _Bad("nested too deeply", "Flatten the row.") from error
    except ValueError as error:  # integers of thousands of digits
        raise _Bad(f"not usable JSON: {error}", "Write such a number as a text.") from error
    if not isinstance(record, dict):
        raise _Bad(f"a row must be an object, not {_kind(record)}", _SUCH)
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Bad(f"the key {key!r} stands twice in one object", "Keep one of them.")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise _Bad(f"the literal {name} is not JSON", "Write null, or leave the column out.")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Bad(f"the number {text[:40]} is too large", "Write such a number as a text.")
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


def _row(record: dict[str, Any], default_id: str) -> Row:
    has = [key for key in ("prompt", "messages") if key in record]
    if not has:
        there = ", ".join(map(repr, record)) or "nothing"
        raise _Bad(f"neither 'prompt' nor 'messages' is there; the row has: {there}", "Rename the question's column.")
    if len(has) == 2:
        raise _Bad("both 'prompt' and 'messages' are there", "Keep one of them.")
    (key,) = has
    value = record[key]
    columns = {name: item for name, item in record.items() if name != key}
    for name in RESERVED:
        if name in columns:
            raise _Bad(f"the column name {name!r} is reserved", "Rename the column.")
    given: Any = columns.pop("answer", None)
    answer = as_text(given)
    prompt: str | None = None
    if key == "prompt" and isinstance(value, str):
        if not value.strip():
            raise _Bad("'prompt' is empty", "Remove the row, or ask something in it.")
        prompt = value
        messages = [{"role": "user", "content": value}]
    else:
        messages = _messages(key, value)
        if key == "messages" and messages[-1]["role"] == "assistant":
            answer = messages.pop()["content"]
            given = answer if given is None else given
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise _Bad(
                f"{key!r} must end with a message of the user or a tool (an answer after it is taken off)",
                "The model answers the last message.",
            )
    if given is not None:
        columns["answer"] = given
    return Row(_id(columns, default_id), tuple(messages), columns, answer, prompt)


def _id(columns: dict[str, Any], default: str) -> str:
    given = columns.get("id")
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
        raise _Bad(f"'id' must be a text or a whole number, not {given!r:.40}", "Leave it out, or rename the column.")
    return str(given)


def _messages(key: str, value: Any) -> list[dict[str, str]]:
    expected = 'A list such as [{"role": "user", "content": "..."}].'
    if not isinstance(value, list):
        wanted = "a text or a list of messages" if key == "prompt" else "a list of messages"
        raise _Bad(f"{key!r} must be {wanted}, not {_kind(value)}", expected)
    if not value:
        raise _Bad(f"{key!r} is an empty list", expected)
    for index, message in enumerate(value):
        place = f"message {index + 1} of {key!r}"
        if not isinstance(message, dict):
            raise _Bad(f"{place} must be an object, not {_kind(message)}", expected)
        for name in ("role", "content"):
            if name not in message:
                raise _Bad(f"{place} has no {name!r}", expected)
        for name, item in message.items():
            if not isinstance(item, str):
                hint = "Images, content parts and recorded tool calls are not supported; write them as text."
                raise _Bad(f"{name!r} of {place} must be a text, not {_kind(item)}", hint)
        if message["role"] not in ROLES:
            raise _Bad(f"{place} has the role {message['role']!r}", f"Roles are {', '.join(ROLES)}.")
    return [dict(message) for message in value]
