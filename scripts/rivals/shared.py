"""What all rivals share: the work to do, edgees' own task and scorer, the clock, the peak of memory.

Plain Python that runs in both environments: it needs edgees' tasks and rewards on the path, none of its compiled parts.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgees import rewards
from edgees.errors import UsageError
from edgees.rewards import Scorer
from edgees.tasks import load_task
from edgees.tasks.rows import Row, Task

PACKAGES = ("torch", "transformers", "trl", "peft", "eggroll-es", "reasoning_gym", "llama_cpp_python", "numpy")


@dataclass(frozen=True)
class Work:
    """One run. model: GGUF file or Hugging Face folder. seconds: of training, 0 for what is not trained."""

    rival: str
    task: Task
    scorer: Scorer
    model: str
    seed: int
    seconds: float
    population: int
    """Setting of eggroll-es."""


@dataclass
class Found:
    """What a run hands back. after: see :func:`judge`. peak: bytes resident at most until training ended."""

    after: dict[str, Any]
    peak_rss_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    eval_tokens: int = 0
    steps: int = 0
    rollouts: int = 0
    tokens: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def open_task(name: str) -> tuple[Task, Scorer]:
    """The task and its own scorer. Raises UsageError where it has no scorer or no held-out rows."""
    task = load_task(name)
    if not task.reward or not task.heldout:
        raise UsageError(
            f"task {name} has no {'held-out rows' if task.reward else 'scorer'} of its own",
            "The study takes home, sums and reasoning_gym:NAME.",
        )
    return task, rewards.load(task.reward)


def judge(task: Task, scorer: Scorer, rows: Sequence[Row], texts: Sequence[str]) -> dict[str, Any]:
    """Means over the rows: {"rows", "reward", "excluded", "metrics": {name: mean}}. Unscorable answers are excluded."""
    scored = [value for value in scorer.score(rows, texts).rewards if math.isfinite(value)]
    metrics = {
        name: sum(measure(row, text) for row, text in zip(rows, texts, strict=True)) / len(rows)
        for name, measure in task.metrics.items()
    }
    reward = sum(scored) / len(scored) if scored else None
    return {"rows": len(rows), "reward": reward, "excluded": len(rows) - len(scored), "metrics": metrics}


def mean(values: Sequence[float]) -> float:
    """Mean of those that are numbers; NaN where none is."""
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else math.nan


def batches(rows: Sequence[Row], size: int, seed: int) -> Iterator[list[Row]]:
    """Batches of ``size`` rows for ever: every row once before any comes again, in an order drawn anew each time."""
    rng, waiting = random.Random(seed), list[Row]()
    while True:
        while len(waiting) < size:
            waiting += rng.sample(list(rows), len(rows))
        yield waiting[:size]
        del waiting[:size]


class Budget:
    """Seconds of training by the rule of ``edgees tune --time``: no step is begun that, by the length of the last one,
    would end after them; the first is taken in any case. The clock starts when the object is made."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = seconds, clock
        self._start = self._mark = clock()
        self.steps = 0
        self.last = 0.0

    def elapsed(self) -> float:
        return self._clock() - self._start

    def step(self) -> None:
        """A step has ended."""
        now = self._clock()
        self.last, self._mark = now - self._mark, now
        self.steps += 1

    def over(self) -> bool:
        return self.steps > 0 and self.elapsed() + self.last > self._limit


def peak_rss_bytes() -> int:
    """High-water mark of this process, and of its children the sum of the living and the largest of the dead."""
    own = _high_water(os.getpid())
    living = sum(_high_water(pid) for pid in _descendants(os.getpid()))
    return own + max(living, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _descendants(pid: int) -> list[int]:
    try:
        children = [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    except OSError:
        return []
    return [*children, *(deeper for child in children for deeper in _descendants(child))]


def versions() -> dict[str, str]:
    """Of those :data:`PACKAGES` that are installed here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
