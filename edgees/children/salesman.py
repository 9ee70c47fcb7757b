"""The travelling salesman, by construction: a round tour through all cities, lengthened by one city at a time, never
changed afterwards, is to be as short as possible. Cities lie anywhere in a square of side 1.

Cost: length of the tour over that of the nearest neighbour's tour from the same city, less 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

Distances = tuple[tuple[float, ...], ...]

CITIES = 60
"""Cities of an instance; the tour begins in city 0."""


def next_city(current: int, start: int, unvisited: list[int], distances: Sequence[Sequence[float]]) -> int:
    """The city to go to next.

    current: where the tour is. start: where it began and will end. unvisited: the cities still to be visited.
    distances: distances[a][b] is the distance from city a to city b.
    Returns one of the unvisited cities.
    """
    return min(unvisited, key=lambda city: distances[current][city])


HEURISTICS = {"nearest neighbour": next_city}


def instances(seed: int, heldout: bool) -> list[Distances]:
    """Distances between uniform random points: 12 instances to select by, 40 held out."""
    found = []
    for number in range(40 if heldout else 12):
        rng = random.Random(f"salesman {seed} {heldout} {number}")
        points = [(rng.random(), rng.random()) for _ in range(CITIES)]
        found.append(tuple(tuple(math.dist(a, b) for b in points) for a in points))
    return found


def tour_length(heuristic: Callable[..., int], distances: Distances) -> float:
    """Of the round tour. :raises ValueError: what the heuristic returned is no city that could be next."""
    unvisited = list(range(1, len(distances)))
    current, length = 0, 0.0
    while unvisited:
        city = heuristic(current, 0, unvisited.copy(), distances)
        if not isinstance(city, int) or city not in unvisited:
            raise ValueError(f"an unvisited city is needed, and it returned {str(city)[:40]}")
        length += distances[current][city]
        unvisited.remove(city)
        current = city
    return length + distances[current][0]


def cost(heuristic: Callable[..., int], instance: Distances) -> float:
    """Relative to the nearest neighbour's tour."""
    return tour_length(heuristic, instance) / tour_length(next_city, instance) - 1.0
