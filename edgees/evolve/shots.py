"""``shots``: tries that went well become worked examples. Needs no reflecting model, so it works with the smallest.

Which examples help is not judged here: sets are drawn, later varied by one example at a time, and measured by whoever
asked. (The gain of an example depends on the model far more than on anything that the text of it shows.)
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgees.context import Context, Shot
from edgees.evolve.bounds import control, of_shot, overlap, said_in, shown, tokens, words
from edgees.evolve.protocol import Attempt, Candidate, NoProposal, Situation

SIZES = (2, 4, 8)
"""Examples in the first sets."""
NEAR = 0.05
"""A reward counts as a success within this share of the range of rewards below the best."""
POOL = 4
"""Sets are drawn from this many times as many of the shortest as they need."""
AT_LEAST = 16
"""... and from no fewer than this."""
_ROLES = ("user", "assistant", "tool")


@dataclass(frozen=True)
class Example:
    """A shot with what choosing looks at. size: tokens. success: from a try; else the row's reference answer."""

    row: str
    shot: Shot
    question: frozenset[str]
    size: int
    success: bool


class Shots:
    """The evolver; see the module."""

    name = "shots"

    def propose(self, situation: Situation) -> list[Candidate]:
        """Without examples in force: sets of 2, 4 and 8 that fit. Else: one more, one fewer, one exchanged."""
        examples = usable(situation)
        there = {_identity(shot) for shot in situation.context.shots}
        fresh = [example for example in examples if _identity(example.shot) not in there]
        rng = random.Random(f"shots {situation.seed}")
        if situation.context.shots:
            return _varied(situation, fresh, rng)
        if not fresh:
            raise NoProposal("no try was a success and no row has a reference answer, so there is nothing to show")
        return _first(situation, fresh, rng)


def usable(situation: Situation) -> list[Example]:
    """One example a question, the shortest first: a success, else the row's reference answer."""
    best: dict[str, Example] = {}
    good = {id(attempt) for attempt in successes(situation.attempts)}
    for attempt in situation.attempts:
        success = id(attempt) in good
        shot = as_shot(attempt.messages) if success else by_reference(attempt)
        if shot is None or control(said_in(shot)):
            continue
        size = of_shot(shot, situation.count)
        if size > situation.limit:
            continue
        example = Example(attempt.row, shot, words(asked(shot)), size, success)
        key = asked(shot) if len(shot) == 2 else f"row {attempt.row}"  # episodes may all begin with the same words
        known = best.get(key)
        if known is None or (not example.success, example.size) < (not known.success, known.size):
            best[key] = example
    return sorted(best.values(), key=lambda e: (e.size, e.row))


def successes(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Tries with a reward at or near the best seen. Where all rewards are the same, that is a success if it is more
    than nothing."""
    paid = [(a.reward, a) for a in attempts if not a.fault and a.reward is not None and math.isfinite(a.reward)]
    if not paid:
        return []
    high, low = max(reward for reward, _ in paid), min(reward for reward, _ in paid)
    if high == low and high <= 0:
        return []
    return [attempt for reward, attempt in paid if reward >= high - NEAR * (high - low)]


def as_shot(messages: Sequence[dict]) -> Shot | None:
    """A played row as an example, tool calls and results included: from the question to the last reply (to the
    results of its calls). None: it holds no reply, or messages that cannot stand in the middle of a conversation."""
    said = [dict(message) for message in messages]
    while said and said[0].get("role") in ("system", "developer"):
        del said[0]
    while said and said[-1].get("role") == "user":  # what came after the last reply was answered by nobody
        del said[-1]
    sound = all(m.get("role") in _ROLES and isinstance(m.get("content"), (str, type(None))) for m in said)
    if not said or not sound or said[0]["role"] != "user" or not any(m["role"] == "assistant" for m in said):
        return None
    return tuple(said)


def by_reference(attempt: Attempt) -> Shot | None:
    """Question and reference answer; None for an episode, whose question does not end before the first reply."""
    if not attempt.reference:
        return None
    said = list(attempt.messages)
    if said and said[-1].get("role") == "assistant" and not said[-1].get("tool_calls"):
        said.pop()
    if not said or any(m.get("role") in ("assistant", "tool") for m in said):
        return None
    return as_shot([*said, {"role": "assistant", "content": attempt.reference}])


def _identity(shot: Sequence[dict]) -> str:
    """What makes two examples the same: the question of an answer, all of an episode."""
    return asked(shot) if len(shot) == 2 else json.dumps(list(shot), sort_keys=True)


def asked(shot: Sequence[dict]) -> str:
    """The question of an example."""
    return " ".join(str(shot[0].get("content") or "").split())


def spread(examples: Sequence[Example], number: int, rng: random.Random) -> list[Example]:
    """``number`` of the shorter examples (or all), the first by chance, each further one the least like those chosen
    in its question's words; among equals the shorter."""
    left = list(examples[: max(AT_LEAST, POOL * number)])
    chosen: list[Example] = []
    likeness = [0.0] * len(left)
    while left and len(chosen) < number:
        at = (
            rng.randrange(len(left)) if not chosen else min(range(len(left)), key=lambda i: (likeness[i], left[i].size))
        )
        taken = left.pop(at)
        del likeness[at]
        chosen.append(taken)
        likeness = [max(like, overlap(taken.question, e.question)) for like, e in zip(likeness, left, strict=True)]
    return chosen


def _first(situation: Situation, fresh: Sequence[Example], rng: random.Random) -> list[Candidate]:
    sizes = [n for n in SIZES if n <= len(fresh)] or [len(fresh)]
    rng.shuffle(sizes)  # where fewer candidates are wanted, other seeds bring other sizes
    room = situation.limit - tokens(situation.context, situation.count)
    found: list[Candidate] = []
    for size in sizes[: situation.wanted]:
        chosen: list[Example] = []
        for example in spread(fresh, len(fresh), rng):
            if len(chosen) < size and sum(e.size for e in chosen) + example.size <= room:
                chosen.append(example)
        if len(chosen) == size:
            found.append(_with(situation.context, chosen, _origin(chosen, fresh)))
    if not found:
        fits = [example for example in fresh if example.size <= room][:1]
        if not fits:
            raise NoProposal(f"no example fits into the {max(room, 0)} tokens that are left")
        found.append(_with(situation.context, fits, _origin(fits, fresh)))
    return found


def _varied(situation: Situation, fresh: Sequence[Example], rng: random.Random) -> list[Candidate]:
    shots = situation.context.shots
    room = situation.limit - tokens(situation.context, situation.count)
    sizes = [of_shot(shot, situation.count) for shot in shots]
    questions = [words(asked(shot)) for shot in shots]
    found: dict[str, Candidate] = {}

    def new(space: int, beside: Sequence[frozenset[str]]) -> Example | None:
        """One of the least like those that stay, by chance."""
        fits = [e for e in fresh if e.size <= space][: AT_LEAST * 2]
        fits.sort(key=lambda e: max((overlap(e.question, q) for q in beside), default=0.0))
        return rng.choice(fits[: max(1, len(fits) // 2)]) if fits else None

    for _ in range(4):  # rounds: a move that could not be made, or was made before, is drawn again
        moves = ["more", "fewer", "exchanged"]
        rng.shuffle(moves)
        for move in moves:
            at = rng.randrange(len(shots))
            rest = [*shots[:at], *shots[at + 1 :]]
            if move == "fewer":
                made = Candidate(
                    replace(situation.context, shots=tuple(rest)), f"without the example {_name(shots[at])}"
                )
            elif move == "more":
                added = new(room, questions)
                if added is None:
                    continue
                made = Candidate(
                    replace(situation.context, shots=(*shots, added.shot)), f"one more example: {_name(added.shot)}"
                )
            else:
                added = new(room + sizes[at], [*questions[:at], *questions[at + 1 :]])
                if added is None:
                    continue
                made = Candidate(
                    replace(situation.context, shots=(*shots[:at], added.shot, *shots[at + 1 :])),
                    f"example {_name(shots[at])} exchanged for {_name(added.shot)}",
                )
            found.setdefault(made.context.digest, made)
            if len(found) >= situation.wanted:
                return list(found.values())
    return list(found.values())


def _with(context: Context, chosen: Sequence[Example], origin: str) -> Candidate:
    return Candidate(replace(context, shots=tuple(example.shot for example in chosen)), origin)


def _origin(chosen: Sequence[Example], fresh: Sequence[Example]) -> str:
    parts = []
    for success, what in ((True, "successes"), (False, "reference answers")):
        number, of = (sum(e.success is success for e in some) for some in (chosen, fresh))
        if number:
            parts.append(f"{number} of {of} {what}")
    rows = ", ".join(example.row for example in chosen)
    return f"{' and '.join(parts)} as examples: rows {rows if len(rows) <= 120 else rows[:119] + '…'}"


def _name(shot: Shot) -> str:
    return shown(asked(shot), 50)
