"""Finding the JSON object or the number in what a model has written. Never raises on garbage."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from edgees.tools import DECODER

_FENCE = re.compile(r"\A```[ \t]*[A-Za-z]*[ \t]*\r?\n(.*?)\r?\n?[ \t]*```\Z", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?(?![\w])")
_STARTS = 8
"""Opening braces tried before giving up on a text."""


def json_object(text: str) -> tuple[dict[str, Any] | None, bool]:
    """(object, clean): the first JSON object in a text, or None.

    clean: the text is nothing but the object, white space and at most one code fence around it, which is what a
    program that executes the call would accept. Objects with a key twice or with NaN are no JSON objects here.
    """
    text = text.strip()
    fenced = _FENCE.match(text)
    body = fenced.group(1).strip() if fenced else text
    start = body.find("{")
    for _ in range(_STARTS):
        if start < 0:
            break
        try:
            value, end = DECODER.raw_decode(body, start)
        except (ValueError, RecursionError):
            start = body.find("{", start + 1)
            continue
        if isinstance(value, dict):
            return value, start == 0 and not body[end:].strip()
        break
    return None, False


def number(text: str) -> tuple[Decimal | None, bool]:
    """(value, bare): the last number in a text, or None. bare: the text is that number and nothing else."""
    text = text.strip()
    found: Decimal | None = None
    bare = False
    for match in _NUMBER.finditer(text):
        digits = match.group().replace(",", "").replace("\u2212", "-")
        if not any(character.isdigit() for character in digits) or len(digits) > 100:
            continue
        try:
            found = Decimal(digits)
        except InvalidOperation:
            continue
        bare = match.group() == text
    return found, bare


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but true is not 1; order counts in lists, not in objects."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left == right
    return type(left) is type(right) and bool(left == right)
