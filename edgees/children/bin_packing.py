"""Online bin packing. Items come one after the other; each must go into a bin before the next one is seen, and stays
there. As few bins as possible are to be used. The sizes are whole numbers: half of the instances have sizes from 20 to
100, all alike, and bins of 150; in the other half sizes follow a Weibull distribution (mean 40, standard deviation 15)
and bins have 100.

Cost: bins used over the least number that the items' total size allows, less 1. After the instances that Falkenauer
(1996) and Castineiras et al. (2012) introduced; generated here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

Instance = tuple[int, tuple[int, ...]]

ITEMS = 1000
"""Items of an instance."""


def priority(item: int, bins: list[int]) -> list[float]:
    """How good each bin is for the item. It goes into the one with the highest number, the first of equal ones.

    item: size of the item. bins: the space left in each bin that has room for it, before it is put there, the oldest
    first; the last one is always a new, empty bin, so its number is the capacity.
    Returns a list with one number for each of the bins.
    """
    return [0.0 for space in bins]


def best_fit(item: int, bins: list[int]) -> list[float]:
    return [item - space for space in bins]


HEURISTICS = {"first-fit": priority, "best-fit": best_fit}


def instances(seed: int, heldout: bool) -> list[Instance]:
    """Capacity and sizes: half uniform, half Weibull; 6 to select by, 20 held out."""
    found: list[Instance] = []
    for number in range(10 if heldout else 3):
        rng = random.Random(f"bin packing {seed} {heldout} {number}")
        found.append((150, tuple(rng.randint(20, 100) for _ in range(ITEMS))))
        found.append((100, tuple(min(100, max(1, round(rng.weibullvariate(45, 3)))) for _ in range(ITEMS))))
    return found


def cost(heuristic: Callable[[int, list[int]], Sequence[float]], instance: Instance) -> float:
    """Share of bins above the lower bound. :raises ValueError: what the heuristic returned is no list of priorities."""
    capacity, items = instance
    left: list[int] = []
    used = 0
    for item in items:
        room = [place for place, space in enumerate(left) if space >= item]
        spaces = [left[place] for place in room]
        spaces.append(capacity)
        numbers = heuristic(item, spaces.copy())
        if not isinstance(numbers, (list, tuple)) or len(numbers) != len(spaces):
            got = f"{len(numbers)} numbers" if isinstance(numbers, (list, tuple)) else type(numbers).__name__
            raise ValueError(f"{len(spaces)} numbers are needed, one for each bin, and it returned {got}")
        for number in numbers:
            if not isinstance(number, (int, float)) or number != number:
                raise ValueError(f"numbers are needed, and it returned {str(number)[:40]}")
        best = max(range(len(numbers)), key=numbers.__getitem__)
        if best == len(room):
            used += 1
            room.append(len(left))
            left.append(capacity)
        left[room[best]] -= item
        if not left[room[best]]:
            del left[room[best]]
    return used / math.ceil(sum(items) / capacity) - 1.0
