"""Evolvers of the context: what was played -> other system messages, notes and examples worth trying.

``load`` makes them from their names, ``propose`` asks them. Whatever an evolver or the model behind it does (raises,
hangs until its deadline, writes garbage or a megabyte, obeys what stood in a transcript) costs that candidate only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from edgees.context import Context
from edgees.errors import EdgeesError, Interrupted, UsageError
from edgees.evolve.bounds import admitted, fitted, shown
from edgees.evolve.function import DEADLINE_S, FunctionEvolver
from edgees.evolve.prompt import Prompt
from edgees.evolve.protocol import Attempt, Candidate, Evolver, NoProposal, Proposal, Situation, Spent
from edgees.evolve.shots import Shots
from edgees.evolve.skills import Skills

__all__ = [
    "Attempt", "Candidate", "Evolver", "NoProposal", "Proposal", "Situation", "Spent", "close", "load", "propose",
]  # fmt: skip

KNOWN = "shots, skills, prompt, FILE.py[:FUNCTION]"
_WAYS: Mapping[str, Callable[[], Evolver]] = {"shots": Shots, "skills": Skills, "prompt": Prompt}
MOST = 32
"""Candidates that are looked at from one evolver."""
_Made = tuple[str, Candidate | NoProposal]
LINE = 300
"""Characters of an origin and of a failure."""


def load(
    names: Sequence[str], *, folder: Path | None = None, deadline: float = DEADLINE_S, log: Path | None = None
) -> list[Evolver]:
    """Evolvers from their names: ``shots``, ``skills``, ``prompt``, or a user's function ``FILE.py[:FUNCTION]``.

    folder: what relative files are relative to (default: the current one). deadline: seconds that a call of a user's
    function may take. log: file for what it prints (default: our stderr). Nothing is started.
    :raises UsageError: an unknown name, or one twice. :raises MissingExtra: ``prompt`` without the package gepa.
    """
    found: list[Evolver] = []
    for name in names:
        if name in {evolver.name for evolver in found}:
            raise UsageError(f"{name!r} is named twice among what evolves", "Name each way once.")
        if name in _WAYS:
            found.append(_WAYS[name]())
        elif ".py" in name:
            found.append(FunctionEvolver(name, folder=folder, deadline=deadline, log=log))
        else:
            raise UsageError(f"{name!r} is no way to evolve a context", f"Known: {KNOWN}.")
    return found


def close(evolvers: Sequence[Evolver]) -> None:
    """End the processes that evolvers have, which otherwise happens at exit."""
    for evolver in evolvers:
        end = getattr(evolver, "close", None)
        if callable(end):
            end()


def propose(evolvers: Sequence[Evolver], situation: Situation) -> Proposal:
    """Candidates of all evolvers in turn (the first of each, the second of each, ...), at most ``situation.wanted``.

    Every text is cleaned (:func:`edgees.context.cleaned`), what looks like a control token is left out, and all is
    within ``situation.limit`` tokens. Nothing that an evolver does is raised but KeyboardInterrupt and
    :class:`~edgees.errors.Interrupted`.
    """
    failures: dict[str, None] = {}  # in order, each once
    made: list[list[_Made]] = []
    for evolver in evolvers:
        said = _asked(evolver, situation, failures)
        made.append([(evolver.name, candidate) for candidate in said])
    taken = {situation.context.digest: "the context in force"}
    candidates: list[Candidate] = []
    for name, candidate in _in_turn(made):
        if len(candidates) >= situation.wanted:
            break
        try:
            context, told, origin = _bounded(candidate, situation)
            for line in told:
                failures[_line(f"{name}: {line}")] = None
            if context.digest in taken:
                failures[_line(f"{name}: {origin}: the same as {taken[context.digest]}")] = None
                continue
        except Interrupted:
            raise
        except Exception as error:
            failures[_line(f"{name}: {_words(error)}")] = None
            continue
        taken[context.digest] = f"another candidate ({origin})"
        candidates.append(Candidate(context, origin))
    return Proposal(tuple(candidates), tuple(failures))


def _asked(evolver: Evolver, situation: Situation, failures: dict[str, None]) -> list[Candidate | NoProposal]:
    try:
        said: Any = evolver.propose(situation)
    except Interrupted:
        raise
    except Exception as error:
        failures[_line(f"{evolver.name}: {_words(error)}")] = None
        return []
    if not isinstance(said, (list, tuple)):
        failures[_line(f"{evolver.name}: it returned no list of candidates but {shown(repr(said))}")] = None
        return []
    if len(said) > MOST:
        failures[_line(f"{evolver.name}: of its {len(said)} candidates the first {MOST} are looked at")] = None
    return list(said[:MOST])


def _bounded(candidate: Candidate | NoProposal, situation: Situation) -> tuple[Context, list[str], str]:
    """(its context as it may be tried, what was left out, its origin). Raises whatever is wrong with it."""
    if isinstance(candidate, NoProposal):
        raise candidate
    if not isinstance(candidate, Candidate) or not isinstance(candidate.context, Context):
        raise ValueError(f"{shown(repr(candidate))} is no candidate")
    raw = candidate.context
    if not isinstance(raw.skills, str) or not (raw.system is None or isinstance(raw.system, str)):
        raise ValueError("system message and notes must be texts")
    if raw.shots != situation.context.shots:  # also what cannot be JSON
        Context.from_dict({"shots": [list(shot) for shot in raw.shots]}, "an example")
    context, told = admitted(raw, situation.context)
    context, less = fitted(context, situation.count, situation.limit)
    Context.from_dict(context.to_dict(), "the candidate")
    return context, told, _line("; ".join(part for part in (str(candidate.origin), less) if part))


def _in_turn(made: Sequence[Sequence[_Made]]) -> Iterator[_Made]:
    for row in zip_longest(*made):
        yield from (one for one in row if one is not None)


def _words(error: Exception) -> str:
    if isinstance(error, Spent):
        more = f": {error}" if str(error) else ""
        return f"the rollouts that evolving may have are used up{more}"
    if isinstance(error, (EdgeesError, ValueError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _line(text: str) -> str:
    """One printable line of bounded length."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LINE]).split())
    return line if len(line) <= LINE else f"{line[: LINE - 1]}…"
