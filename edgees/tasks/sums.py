"""``sums``: one-digit sums, a quick check that tuning works at all.

    What is 3 plus 5?  ->  8

The 55 unordered pairs of digits are divided once and for all: no pair of a held-out row, in either order, stands in a
training row; the ways to ask are common to both. Credit is ``numeric``: 1 for the right number alone, 0.5 within text,
0.1 for a wrong number alone. The metrics tell apart what has been learned: ``format`` is the share of answers that are
a number and nothing else, ``exact`` the share that are the right one.
"""

from __future__ import annotations

import random

from edgees.tasks.reading import number
from edgees.tasks.rows import SEARCH, Row, Task

SYSTEM = "Answer with the number only."
MAX_TOKENS = 12
HELDOUT_PAIRS = 11
_ASK = ("{a} + {b} =", "What is {a} plus {b}?", "Add {a} and {b}.")


def format_metric(row: Row, completion: str) -> float:
    """1 if the answer is a number and nothing else."""
    return float(number(completion)[1])


def exact_metric(row: Row, completion: str) -> float:
    """1 if the answer is the right number and nothing else."""
    value, bare = number(completion)
    return float(bare and value == int(row.answer or "-1"))


def load() -> Task:
    """The task: 3 ways to ask for each ordered pair, 44 of the 55 unordered pairs for training."""
    pairs = [(a, b) for a in range(10) for b in range(a, 10)]
    random.Random("edgees sums").shuffle(pairs)
    return Task(
        name="sums",
        train=_rows("train", pairs[HELDOUT_PAIRS:]),
        heldout=_rows("heldout", pairs[:HELDOUT_PAIRS]),
        reward=("numeric",),
        system=SYSTEM,
        max_tokens=MAX_TOKENS,
        metrics={"format": format_metric, "exact": exact_metric},
        defaults=SEARCH,
    )


def _rows(split: str, pairs: list[tuple[int, int]]) -> tuple[Row, ...]:
    ordered = sorted({pair for a, b in pairs for pair in ((a, b), (b, a))})
    return tuple(
        Row.plain(f"sums/{split}/{a}+{b}/{index}", ask.format(a=a, b=b), str(a + b))
        for a, b in ordered
        for index, ask in enumerate(_ASK)
    )
