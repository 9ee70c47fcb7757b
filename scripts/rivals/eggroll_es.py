"""PyPI's eggroll-es through its Python interface, with the defaults of its command but for the population.

Not the command itself: its ``score(text)`` is not told which row a text answers, it builds no chat prompts, and it has
no limit of time. Not its population of 64: all members' noise is held in memory at once, half a gigabyte a member for
135 million weights.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from eggroll import CustomReward, EggrollConfig, EggrollTrainer  # type: ignore[import-not-found]
from shared import Budget, Found, Work, batches, mean, peak_rss_bytes
from torch_model import TorchModel

from edgees.tasks.rows import Row

ROWS = 16
"""Rows that each member of a generation answers, as for ``in_place``."""
GENERATIONS = 1_000_000
DEFAULTS = {"rank": 8, "sigma": 0.01, "lr": 0.001}
"""Of ``eggroll tune --help``."""


class TimeIsOver(Exception):
    """Ends ``evolve`` between two generations: it offers no other way."""


class Rows:
    """Batches of training rows; one pass has no end."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __iter__(self) -> Iterator[list[Row]]:
        return batches(self.work.task.train, ROWS, self.work.seed)


def train(work: Work) -> Found:
    model = TorchModel(work.model, work.task)
    curve: list[tuple[float, float]] = []
    scores: list[float] = []

    def reward(_: Any, rows: list[Row]) -> float:
        scores.append(mean(work.scorer.score(rows, model.answers(rows)).rewards))
        return scores[-1]

    config = EggrollConfig(
        population_size=work.population, generations=GENERATIONS, device="cpu", seed=work.seed, **DEFAULTS
    )
    trainer = EggrollTrainer(model.model, config, CustomReward(reward), model.tokenizer)
    members, budget = 0, Budget(work.seconds)

    def generation_ended(*_: Any) -> None:
        nonlocal members
        budget.step()
        members = len(scores)
        curve.append((budget.elapsed(), mean(scores)))
        scores.clear()
        if budget.over():
            raise TimeIsOver

    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(TimeIsOver):
        trainer.evolve(Rows(work), generation_ended)
    seconds, peak, rollouts, tokens = budget.elapsed(), peak_rss_bytes(), model.answered, model.tokens
    after, eval_seconds, eval_tokens = model.heldout(work)
    settings = {
        "population_size": work.population,
        "evaluations_per_generation": members,
        "rows": ROWS,
        **DEFAULTS,
        "dtype": "float32",
    }
    return Found(after, peak, settings, seconds, eval_seconds, eval_tokens, budget.steps, rollouts, tokens, curve)
