"""Who answers what: the members of a generation, its sigma, and its rows. No tensors, no engine."""

from __future__ import annotations

import hashlib
import math

from edgees import noise
from edgees.backends.base import Member


class Population:
    """Antithetic pairs of seeded perturbations; the same (seed, pairs) always gives the same members.

    antithetic: False leaves every pair's minus out, as plain evolution strategies do.
    """

    def __init__(self, seed: int, pairs: int, antithetic: bool = True) -> None:
        self.seed = seed
        self.pairs = pairs
        self.signs = (1, -1) if antithetic else (1,)

    def ask(self, generation: int, sigma: float) -> list[Member]:
        """pairs * len(signs) members, pair by pair, plus before minus; ``sigma``: their amplitude relative to rho."""
        members = []
        for pair in range(self.pairs):
            key = noise.make_key(self.seed, generation, pair)
            slot = self.slot(generation, pair)
            members += [Member(key, sign * sigma, slot, pair, sign) for sign in self.signs]
        return members

    def keys(self, generation: int) -> tuple[int, ...]:
        """The key of each pair."""
        return tuple(noise.make_key(self.seed, generation, pair) for pair in range(self.pairs))

    def slots(self, generation: int) -> tuple[int, ...]:
        """The slot of each pair: its number over the whole run (the kernels count modulo 2^32)."""
        return tuple(self.slot(generation, pair) for pair in range(self.pairs))

    def slot(self, generation: int, pair: int) -> int:
        return (generation * self.pairs + pair) & 0xFFFFFFFF


def sigma_at(fraction: float, sigma: float, end: float) -> float:
    """Cosine from ``sigma`` (fraction 0 of the run) to ``sigma*end`` (fraction 1)."""
    bounded = min(max(fraction, 0.0), 1.0)
    return sigma * (end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * bounded)))


class RowOrder:
    """Which rows a generation sees: every epoch is a permutation of all rows, seeded by (seed, epoch).

    Every row is used once before any is used twice, and no row stands twice in one generation.
    """

    def __init__(self, seed: int, total: int, per_generation: int) -> None:
        if total < 1:
            raise ValueError("no rows")
        self.seed = seed
        self.total = total
        self.count = min(per_generation, total)
        self._stream: list[int] = []

    def rows(self, generation: int) -> list[int]:
        """Indices of the rows of ``generation``."""
        start = generation * self.count
        while len(self._stream) < start + self.count:
            self._extend()
        return self._stream[start : start + self.count]

    def _extend(self) -> None:
        done = len(self._stream)
        order = self._permutation(done // self.total)
        # The generation that straddles two epochs: what it has already comes last in the new one.
        already = set(self._stream[done - done % self.count :])
        self._stream += [i for i in order if i not in already] + [i for i in order if i in already]

    def _permutation(self, epoch: int) -> list[int]:
        def digest(index: int) -> bytes:
            return hashlib.blake2b(f"{self.seed} {epoch} {index}".encode(), digest_size=8).digest()

        return sorted(range(self.total), key=digest)


def request_seed(seed: int, generation: int, row: str) -> int:
    """31-bit sampling seed shared by all members that answer ``row`` in ``generation``."""
    text = f"{seed} {generation} {row}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF
