"""More than one reply to a question, and which of them counts: ``best:N``, ``majority:N``, ``retry:N``.

Pure: texts and numbers in, a choice out. :mod:`edgees.rollout` plays them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

KINDS = ("best", "majority", "retry")
SAMPLED = ("best", "majority")
"""Those whose replies differ by their sampling alone."""
MOST = 256
ENOUGH = 1.0
"""A reply that is paid so much is not tried again."""


@dataclass(frozen=True)
class Attempts:
    """kind: ``single``, ``best`` (the scorer chooses), ``majority`` (the commonest answer counts, as in Wang et al.'s
    self-consistency) or ``retry`` (feedback, and the last answer counts). count: replies, at most."""

    kind: str = "single"
    count: int = 1

    @property
    def single(self) -> bool:
        return self.kind == "single"

    def __str__(self) -> str:
        return self.kind if self.single else f"{self.kind}:{self.count}"

    def told(self, temperature: float) -> str:
        """How answers are made, for people. temperature: of sampling."""
        how = f"sampled at temperature {temperature:g}" if temperature else "greedy"
        return {
            "single": f"one reply, {how}",
            "best": f"the best of {self.count} replies by the scorer, {how}",
            "majority": f"the commonest answer of {self.count} replies, {how}",
            "retry": f"up to {self.count} replies, {how}, each after the score of the one before; the last counts",
        }[self.kind]


SINGLE = Attempts()


def parse(text: str) -> Attempts:
    """``single``, or ``best:N``, ``majority:N``, ``retry:N`` with N from 2 to :data:`MOST`.

    :raises ValueError: anything else, with the words for it.
    """
    if text == "single":
        return SINGLE
    match = re.fullmatch(rf"({'|'.join(KINDS)}):([0-9]{{1,4}})", text)
    if match is None:
        raise ValueError("single, best:N, majority:N or retry:N is needed")
    count = int(match[2])
    if not 2 <= count <= MOST:
        raise ValueError(f"a number from 2 to {MOST} is needed after the colon")
    return Attempts(match[1], count)


def best(rewards: Sequence[float]) -> int:
    """Place of the highest reward, the earliest of equals; replies without one (NaN) count less than any."""
    return max(range(len(rewards)), key=lambda i: (rewards[i] == rewards[i], rewards[i], -i))


def commonest(answers: Sequence[Hashable | None]) -> int:
    """Place of the first reply that gives the commonest answer; of equally common ones the earliest.

    None: a reply in which no answer was found. It has no vote; where nobody has, the first reply counts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0
    most = max(votes.values())
    return next(i for i, answer in enumerate(answers) if answer is not None and votes[answer] == most)


def plain_texts(texts: Sequence[str]) -> list[str | None]:
    """What stands for replies in a vote where nothing is picked out of them: the texts, white space squeezed."""
    return [" ".join(text.split()) or None for text in texts]


def feedback(reward: float) -> str:
    """What is said after a reply that was not paid enough. reward: NaN where it has none."""
    if reward != reward:
        return "That answer could not be scored. Try again."
    return f"That answer scored {reward:.2f}. Try again."
