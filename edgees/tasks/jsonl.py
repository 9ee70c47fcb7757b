"""Rows from a JSON Lines file: one object per line with ``prompt`` or ``messages``, and any further columns.

``prompt`` is a text or a list of messages; ``messages`` is a conversation whose last message, if it is the
assistant's, is taken off as the reference answer. ``answer`` is the reference for scorers (and for ``loglik``, unless
the conversation ends with one). UTF-8; a byte-order mark, CRLF and empty lines are accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from edgees.errors import DataError
from edgees.tasks.rows import Row

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = ("prompts", "completions", "entries")
"""Names that scorers get from us, so no column may have them."""


def read_rows(path: Path, columns: Mapping[str, str] | None = None) -> list[Row]:
    """All rows of a file, in order; ids are ``NAME:LINE``. DataError with file and line for anything unreadable.

    columns: our name -> the file's name, for ``prompt``, ``messages`` and ``answer`` (``{"prompt": "question"}``).
    """
    rows = [_row(path, line, record, columns or {}) for line, record in _records(path)]
    if not rows:
        raise DataError(f"{path} holds no rows", 'One JSON object a line, such as {"prompt": "...", "answer": "..."}.')
    return rows


class _Refused(ValueError):
    """A reason found while parsing; the caller knows the line."""


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = open(path, "rb")
    except FileNotFoundError as error:
        raise DataError(f"no such file: {path}", "Paths are relative to the current folder.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "It must be a JSON Lines file.") from error
    with file:
        for line, raw in enumerate(file, 1):
            if line == 1:
                if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                    _fail(path, 1, "this is UTF-16, not UTF-8", "Save the file as UTF-8.")
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                text = raw.decode("utf-8").strip(" \t\r\n")
            except UnicodeDecodeError as error:
                _fail(
                    path,
                    line,
                    f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8",
                    "Save the file as UTF-8.",
                )
            if text:
                yield line, _parse(path, line, text)


def _parse(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except _Refused as error:
        _fail(path, line, str(error), "JSON has no such value; write null, or leave the column out.")
    except json.JSONDecodeError as error:
        what = "One JSON object per line; a list of objects over several lines is JSON, not JSON Lines."
        _fail(path, line, f"not JSON: {error.msg} at column {error.colno}", what)
    except RecursionError:
        _fail(path, line, "nested too deeply", "Flatten the row.")
    except ValueError as error:  # integers of thousands of digits
        _fail(path, line, f"not usable JSON: {error}", "Write such a number as a text.")
    if not isinstance(record, dict):
        _fail(path, line, f"a row must be an object, not {_kind(record)}", 'Such as {"prompt": "...", "answer": "..."}.')
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _fail(
            path,
            line,
            "an unpaired surrogate (\\ud800 to \\udfff) is no character",
            "Write the character itself, or both halves of the pair.",
        )
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Duplicate(key)
        found[key] = value
    return found


class _Duplicate(_Refused):
    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} stands twice in one object")


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"the literal {name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Refused(f"the number {text[:40]} is too large")
    return value


def _fail(path: Path, line: int, reason: str, hint: str) -> NoReturn:
    raise DataError(f"{path}:{line}: {reason}", hint)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


def _row(path: Path, line: int, record: dict[str, Any], columns: Mapping[str, str]) -> Row:
    names = {key: columns.get(key, key) for key in ("prompt", "messages", "answer")}
    has = [key for key in ("prompt", "messages") if names[key] in record]
    if not has:
        _fail(
            path,
            line,
            f"neither {names['prompt']!r} nor {names['messages']!r} is there; the row has: "
            f"{', '.join(map(repr, record)) or 'nothing'}",
            "Rename the column that holds the question to 'prompt'.",
        )
    if len(has) == 2:
        _fail(path, line, f"both {names['prompt']!r} and {names['messages']!r} are there", "Keep one of them.")
    value = record[names[has[0]]]
    rest = {key: item for key, item in record.items() if key not in (names["prompt"], names["messages"])}
    for key in RESERVED:
        if key in rest:
            _fail(path, line, f"the column name {key!r} is reserved", "Rename the column.")
    given: Any = rest.pop(names["answer"], None)
    answer = _as_text(given)

    prompt: str | None = None
    if has[0] == "prompt" and isinstance(value, str):
        if not value.strip():
            _fail(path, line, f"{names['prompt']!r} is empty", "Remove the row, or ask something in it.")
        prompt = value
        messages = [{"role": "user", "content": value}]
    else:
        messages = _messages(path, line, names[has[0]], value)
        if has[0] == "messages" and messages[-1]["role"] == "assistant":
            reference = messages.pop()["content"]
            if given is None:
                given = reference
            answer = reference
        if not messages or messages[-1]["role"] in ("assistant", "system", "developer"):
            _fail(
                path,
                line,
                f"{names[has[0]]!r} must end with a message of the user or a tool (an answer after it is taken off)",
                "The model answers the last message.",
            )
    if given is not None:
        rest["answer"] = given
    return Row(f"{path.name}:{line}", tuple(messages), rest, answer, prompt)


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _messages(path: Path, line: int, key: str, value: Any) -> list[dict[str, str]]:
    expected = 'A list such as [{"role": "user", "content": "..."}].'
    if not isinstance(value, list):
        wanted = "a text or a list of messages" if key == "prompt" else "a list of messages"
        _fail(path, line, f"{key!r} must be {wanted}, not {_kind(value)}", expected)
    if not value:
        _fail(path, line, f"{key!r} is an empty list", expected)
    for index, message in enumerate(value):
        place = f"message {index + 1} of {key!r}"
        if not isinstance(message, dict):
            _fail(path, line, f"{place} must be an object, not {_kind(message)}", expected)
        for name in ("role", "content"):
            if name not in message:
                _fail(path, line, f"{place} has no {name!r}", expected)
        for name, item in message.items():
            if not isinstance(item, str):
                hint = "Images, content parts and recorded tool calls are not supported; write them as text."
                _fail(path, line, f"{name!r} of {place} must be a text, not {_kind(item)}", hint)
        if message["role"] not in ROLES:
            _fail(path, line, f"{place} has the role {message['role']!r}", f"Roles are {', '.join(ROLES)}.")
    return [dict(message) for message in value]
