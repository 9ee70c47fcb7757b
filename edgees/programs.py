"""Heuristic problems, and the programs that a model writes for them: read, checked and scored in a child process.

A problem is a Python file: a docstring that says what it is about, ``instances(seed, heldout) -> list``,
``cost(heuristic, instance) -> float`` (the lower the better) and ``HEURISTICS``, a dict of functions of which the first
one's name, signature and docstring say what a program must be. ``edgees/children/bin_packing.py`` is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgees.children import FOLDER, Child, ChildDied, ChildTimeout
from edgees.errors import UsageError
from edgees.evolve.fence import spoken

PROBLEMS: Mapping[str, Path] = {"bin-packing": FOLDER / "bin_packing.py", "salesman": FOLDER / "salesman.py"}
MEMORY = 256 << 20
"""Bytes that a program may take."""
READING_S = 30.0
"""Seconds for the problem's file to load, or a program to be read."""


class Unusable(Exception):
    """What is wrong with a program, in words. kind: ``no program`` or ``failed``."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


@dataclass(frozen=True)
class Program:
    """code: without comments and annotations. costs: of the training instances. proposal: its number; 0: given."""

    code: str
    label: str
    costs: tuple[float, ...]
    proposal: int = 0

    @property
    def cost(self) -> float:
        """Mean over the instances."""
        return sum(self.costs) / len(self.costs)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sorts the best first: the lower cost, then the shorter code, then the older."""
        return self.cost, len(self.code), self.proposal


@dataclass(frozen=True)
class Heldout:
    """Costs on held-out instances; none, and why, where the program failed on them."""

    costs: tuple[float, ...] = ()
    fault: str = ""

    @property
    def cost(self) -> float | None:
        return sum(self.costs) / len(self.costs) if self.costs else None


class Problem:
    """A problem and the processes that its programs run in. ``function``, ``signature``, ``documentation``, ``about``,
    ``first`` ((label, code) pairs): what its file says.

    name: of a built-in problem, or a file. seconds: that a program may take for all instances of a set.
    :raises UsageError: there is no such problem, or its file is not one.
    """

    def __init__(self, name: str, seed: int, seconds: float) -> None:
        path = PROBLEMS.get(name) or Path(name).expanduser()
        if not path.is_file():
            raise UsageError(f"there is no heuristic problem {name}", f"{', '.join(PROBLEMS)}, or a file of your own")
        self.name, self.seconds, self._path = name, seconds, path
        self._child = Child("heuristic.py", {"file": str(path.resolve()), "seed": seed, "memory": MEMORY})
        try:
            told = self._ask({"op": "problem"}, READING_S)
        except (ChildTimeout, ChildDied) as error:
            raise UsageError(f"the problem {path} cannot be read: {error}") from error
        except UsageError:
            self.close()
            raise
        self.function, self.signature = str(told["function"]), str(told["signature"])
        self.documentation, self.about = str(told["documentation"]), str(told["about"])
        self.first: list[tuple[str, str]] = [(label, code) for label, code in told["first"]]

    def read(self, text: str) -> str:
        """The program in a text, without what does nothing. :raises Unusable: there is none that may be run."""
        try:
            answer = self._ask({"op": "read", "text": text, "function": self.function}, READING_S)
        except (ChildTimeout, ChildDied) as error:
            raise Unusable("no program", f"it cannot be read: {error}") from error
        if "refused" in answer:
            raise Unusable("no program", str(answer["refused"]))
        return str(answer["code"])

    def score(self, code: str, heldout: bool = False, seconds: float = math.inf) -> tuple[float, ...]:
        """Cost of each instance. seconds: that are left, if fewer than a program may take.

        :raises Unusable: it raised, hung, took too much memory or returned what is no answer.
        """
        request = {"op": "score", "code": code, "function": self.function, "heldout": heldout}
        try:
            answer = self._ask(request, min(self.seconds, seconds))
        except ChildTimeout as error:
            raise Unusable("failed", f"it took more than {error.seconds:g} s") from error
        except ChildDied as error:
            raise Unusable("failed", str(error)) from error
        finally:
            self._child.close()  # the next program finds nothing of this one
        if "fault" in answer:
            raise Unusable("failed", str(answer["fault"]))
        return tuple(answer["costs"])

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        answer: dict[str, Any] = self._child.call(request, seconds)
        if "error" in answer:
            at = f" at {answer['where']}" if answer["where"] else ""
            raise UsageError(f"the problem {self._path} fails{at}: {answer['error']}")
        return answer


def code_in(reply: str, function: str) -> str:
    """The program in a reply: its last fenced block that defines the function, or what looks like code; "" for none."""
    lines = spoken(reply).splitlines()
    blocks: list[list[str]] = []
    inside = False
    for line in lines:
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line)
    for block in reversed(blocks):
        if any(line.lstrip().startswith(f"def {function}(") for line in block):
            return "\n".join(block) + "\n"
    taken: list[str] = []
    for line in lines:
        begins = line.startswith(("def ", "import ", "from ", "@"))
        if begins or (taken and (not line.strip() or line[0] in " \t#)")):
            taken.append(line)
        elif taken and any(other.startswith("def ") for other in taken):
            break
    return "\n".join(taken) + "\n" if any(line.startswith("def ") for line in taken) else ""


def prompt_of(problem: Problem, parents: Sequence[Program]) -> str:
    """What the model is asked. parents: one or two, the better one last."""
    told = "\n".join(f"    {line}".rstrip() for line in problem.documentation.splitlines())
    shown = [
        f"Version {number}, cost {parent.cost:.4f}:\n```python\n{parent.code}```"
        for number, parent in enumerate(parents, 1)
    ]
    if len(parents) > 1:
        wish = "Write another version that is likely to cost less than both. Take over what is good in them."
    else:
        wish = "Write another version that is likely to cost less. Change what it does, not just how it is written."
    return "\n\n".join(
        (
            problem.about,
            f'It is solved by a Python function:\n```python\n{problem.signature}\n    """{told.lstrip()}\n    """\n```',
            *shown,
            f"{wish} Rules: plain functions; from the standard library only math, itertools, heapq, bisect, "
            "collections and functools; no NumPy, no random numbers, no printing. The name and the parameters stay "
            "as they are. Reply with the code alone.",
        )
    )
