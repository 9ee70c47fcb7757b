"""What an evolver is given and what it gives: the context's half of a step, ``c[t+1] = U(c[t]; D[t])``.

An evolver looks at what was played and proposes other contexts. It decides nothing: whether a candidate takes the
place of the context in force is measured elsewhere, on rows that are played under both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgees.context import Context
from edgees.episodes import Message
from edgees.errors import EdgeesError


class Spent(Exception):
    """Raised by :attr:`Situation.play`: the rollouts that evolvers may have are used up."""


class NoProposal(EdgeesError):
    """An evolver has nothing to propose, or one thing less; the message says why."""


@dataclass(frozen=True)
class Attempt:
    """One training row as it was played.

    messages: the question and all that followed, without what the context added (no notes, no examples); a single
        answer is the question and one assistant message.
    reward: None where there is none; reference: the row's reference answer, where it has one; fault: why there can be
        no reward; context: digest of the context it was played under.
    """

    row: str
    messages: tuple[Message, ...]
    reward: float | None
    reference: str | None = None
    fault: str = ""
    context: str = ""


@dataclass(frozen=True)
class Situation:
    """All that an evolver may use.

    context: the one in force. attempts: of training rows only; may be empty, or all without a reward.
    reflect: a prompt -> the reflecting model's reply; None: no such model is configured.
    play: plays training rows (ids) with the unperturbed model under a context, an attempt per id in order; raises
        :class:`Spent`. rows: the ids that may be played, in the order in which to use them.
    count: tokens of a text. limit: tokens that system message, notes and examples may have together.
    wanted: most candidates that are of use. seed: of every choice made by chance.
    folder: for state that lasts, this proposal's own; before: that of the evolver's previous proposal.
    room: tokens that a prompt to the reflecting model may have; 0: not known.
    """

    context: Context
    attempts: Sequence[Attempt]
    reflect: Callable[[str], str] | None
    play: Callable[[Context, Sequence[str]], list[Attempt]]
    rows: Sequence[str]
    count: Callable[[str], int]
    limit: int
    wanted: int
    seed: int
    folder: Path | None = None
    before: Path | None = None
    room: int = 0


@dataclass(frozen=True)
class Candidate:
    """A context to be tried. origin: one line for people, such as ``4 of 11 successes as examples``."""

    context: Context
    origin: str


@dataclass(frozen=True)
class Proposal:
    """candidates: cleaned, within the limit, all different. failures: what came to nothing, ``evolver: reason``."""

    candidates: tuple[Candidate, ...]
    failures: tuple[str, ...]


class Evolver(Protocol):
    """Proposes contexts. The same situation gives the same candidates, as far as its models allow."""

    name: str

    def propose(self, situation: Situation) -> Sequence[Candidate | NoProposal]:
        """Candidates, best first; any exception costs this proposal only. A NoProposal in the list tells of a
        candidate, or a part of one, that came to nothing."""
