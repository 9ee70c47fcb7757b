"""What may come into a context: cleaned, bounded in tokens, and nothing that looks like a chat's control token.

Engines pass control tokens in a context as plain text anyway (:class:`edgees.template.Controls`). Still, nothing that
a model wrote has a need for them, and an exported context may be read by programs that take them for what they seem.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from edgees.context import HEADING, Context, Shot, cleaned
from edgees.episodes import Message, transcript

MARKS = 4
"""Tokens counted for what a chat template puts round each message."""
LONGEST = 64
"""Characters a token has at most, on average over a text: longer texts are refused without counting."""

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_CONTROL = re.compile(
    r"<\|[^\n]{0,64}?(?:\|>|>)|<\|\w|\w\|>|</?s>|\[/?(?:INST|SYS|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|THINK)\]|<<?/?SYS>>?"
    r"|</?(?:bos|eos|pad|unk|mask|cls|sep|think|thinking|tool_calls?|tool_response|tools|endoftext"
    r"|(?:start|end|begin)_of_\w+|fim_\w+|unused\d+|reserved_\w+)>|\[(?:CLS|SEP|PAD|UNK|MASK|BOS|EOS|gMASK|sMASK)\]",
    re.IGNORECASE,
)


def control(text: str) -> str:
    """The first thing in a text that looks like a chat's control token (``<|im_start|>``, ``</s>``, ``[INST]``); ""."""
    # Full-width letters and the like become plain ones, as some tokenizers do to all text.
    found = _CONTROL.search(unicodedata.normalize("NFKC", cleaned(text)))
    return found[0] if found else ""


def said_in(shot: Sequence[Message]) -> str:
    """All text of an example."""
    return transcript(shot)


def tokens(context: Context, count: Callable[[str], int]) -> int:
    """Tokens that a context adds to a conversation, ``MARKS`` for each message included."""
    total = count(context.system) + MARKS if context.system else 0
    total += count(f"{HEADING}\n{context.skills}") + MARKS if context.skills else 0
    return total + sum(of_shot(shot, count) for shot in context.shots)


def of_shot(shot: Shot, count: Callable[[str], int]) -> int:
    """Tokens of an example."""
    return sum(count(transcript([message])) + MARKS for message in shot)


def admitted(context: Context, force: Context) -> tuple[Context, list[str]]:
    """(what of a context may be tried, what was left out and why). What is in force already is not looked at again.

    :raises ValueError: its system message may not.
    """
    told: list[str] = []
    system, skills, shots = context.system, context.skills, context.shots
    if system is not None and system != force.system:
        system = cleaned(system)
        if mark := control(system):
            raise ValueError(f"the system message holds what looks like a control token: {shown(mark)}")
    if skills != force.skills:
        kept = []
        known = force.skills.splitlines()
        for line in cleaned(skills).splitlines():
            if line not in known and (mark := control(line)):
                told.append(f"left out, as it holds what looks like a control token ({shown(mark)}): {shown(line)}")
            else:
                kept.append(line)
        skills = cleaned("\n".join(kept))
    if shots != force.shots:
        taken = []
        for shot in shots:
            if shot not in force.shots and (mark := control(said_in(shot))):
                told.append(f"an example was left out, as it holds what looks like a control token: {shown(mark)}")
            else:
                taken.append(shot if shot in force.shots else _clean_shot(shot))
        shots = tuple(taken)
    return Context(system, skills, shots), told


def fitted(context: Context, count: Callable[[str], int], limit: int) -> tuple[Context, str]:
    """(a context of at most ``limit`` tokens, words for what had to go). Examples go first, then lines of the notes,
    each from the end.

    :raises ValueError: the system message alone is too long.
    """
    if context.system and (len(context.system) > LONGEST * limit or count(context.system) + MARKS > limit):
        raise ValueError(
            f"the system message of {len(context.system):,} characters is over the limit of {limit} tokens"
        )
    shots, lines = context.shots, context.skills.splitlines()

    def fits(examples: int, notes: int) -> bool:
        kept = Context(context.system, cleaned("\n".join(lines[:notes])), shots[:examples])
        return not _over(kept, count, limit)

    examples = _most(len(shots), lambda n: fits(n, len(lines)))
    notes = _most(len(lines), lambda n: fits(examples, n))
    if (examples, notes) == (len(shots), len(lines)):
        return context, ""
    gone = ((len(shots) - examples, "example"), (len(lines) - notes, "line"))
    said = " and ".join(f"{n:,} {what}{'s' if n > 1 else ''}" for n, what in gone if n)
    left = Context(context.system, cleaned("\n".join(lines[:notes])), shots[:examples])
    return left, f"{said} left out to stay within {limit} tokens"


def _most(number: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to ``number`` that fits; 0 where none does. Fewer are taken to fit where more do."""
    if fits(number):
        return number
    low, high = 0, number
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _over(context: Context, count: Callable[[str], int], limit: int) -> bool:
    size = len(context.system or "") + len(context.skills) + sum(len(said_in(shot)) for shot in context.shots)
    return size > LONGEST * limit or tokens(context, count) > limit


def _clean_shot(shot: Shot) -> Shot:
    """Every text cleaned, and nothing but what a chat's message has."""
    return tuple({key: _cleaned(message[key]) for key in _KEYS if key in message} for message in shot)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return cleaned(value)
    if isinstance(value, dict):
        return {key: _cleaned(one) for key, one in value.items()}
    return [_cleaned(one) for one in value] if isinstance(value, (list, tuple)) else value


def shown(text: str, length: int = 80) -> str:
    """A text in quotes on one line, cut: for messages."""
    line = " ".join(text.split())
    return json.dumps(line if len(line) <= length else f"{line[: length - 1]}…", ensure_ascii=False)


def words(text: str) -> frozenset[str]:
    """The different words of a text, in small letters."""
    return frozenset(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def overlap(a: frozenset[str], b: frozenset[str]) -> float:
    """Jaccard's index: shared words over all words; 0 for nothing in common, 1 for the same words."""
    return len(a & b) / len(a | b) if a or b else 1.0
