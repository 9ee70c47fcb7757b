"""(member, row) -> trajectory: what a member answered to a row, or how likely the right answer was to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgees.backends.base import Engine, Member, Progress, Request, Score
from edgees.errors import UsageError
from edgees.population import request_seed
from edgees.tasks.rows import Row

Conversation = Callable[[Row], Sequence[dict[str, str]]]
Rollout = tuple[Member, Row]
"""Who plays what."""


@dataclass(frozen=True)
class Settings:
    """How answers are made. seed, generation: of the sampling; ``conversation`` puts the system message in front."""

    max_tokens: int
    conversation: Conversation
    temperature: float = 0.0
    seed: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Trajectory:
    """One member's answer to one row. outcome: ``stop``, ``length`` or ``overflow`` (the context was full)."""

    member: Member
    row: Row
    completion: str
    tokens: tuple[int, ...] = ()
    outcome: str = "stop"


def every(members: Sequence[Member], rows: Sequence[Row]) -> list[Rollout]:
    """Every member on every row; member-major, rows in order."""
    return [(member, row) for member in members for row in rows]


def play(
    engine: Engine, rollouts: Sequence[Rollout], settings: Settings, progress: Progress | None = None
) -> list[Trajectory]:
    """Each rollout's trajectory, in order.

    A row whose prompt leaves no room in the context ends at once with outcome ``overflow`` and an empty answer.
    """
    prompts: dict[str, tuple[int, ...]] = {}
    requests: list[Request] = []
    places: list[int] = []
    result: list[Trajectory | None] = []
    for member, row in rollouts:
        if row.id not in prompts:
            prompts[row.id] = tuple(engine.encode_chat(settings.conversation(row)))
        prompt = prompts[row.id]
        if len(prompt) >= engine.context_length:
            result.append(Trajectory(member, row, "", (), "overflow"))
            continue
        places.append(len(result))
        result.append(None)
        seed = request_seed(settings.seed, settings.generation, row.id)
        requests.append(Request(member, prompt, settings.max_tokens, settings.temperature, seed))
    done = engine.generate(requests, progress) if requests else []
    for place, completion in zip(places, done, strict=True):
        member, row = rollouts[place]
        result[place] = Trajectory(member, row, completion.text, completion.tokens, completion.outcome)
    return [t for t in result if t is not None]


def likelihood(
    engine: Engine, rollouts: Sequence[Rollout], settings: Settings, progress: Progress | None = None
) -> list[Score | None]:
    """Log-likelihood of each rollout's reference answer, in order. None: it does not fit the context.

    :raises UsageError: a row without an answer.
    """
    texts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    fits: list[bool] = []
    for _, row in rollouts:
        if row.id not in texts:
            if row.answer is None:
                raise UsageError(
                    f"row {row.id} has no answer, and loglik needs one in every row", "add answers, or loglik = 0"
                )
            texts[row.id] = reference(engine, settings.conversation(row), row.answer)
        fits.append(sum(map(len, texts[row.id])) <= engine.context_length)
    requests = [(member, *texts[row.id]) for (member, row), fit in zip(rollouts, fits, strict=True) if fit]
    scores = iter(engine.loglik(requests, progress) if requests else [])
    return [next(scores) if fit else None for fit in fits]


def reference(
    engine: Engine, conversation: Sequence[dict[str, str]], answer: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt, target) tokens of a reference answer, the end of the turn included where the template shows it.

    Without the end of the turn a model tuned on likelihood would learn what to say but not when to stop.
    """
    prompt = tuple(engine.encode_chat(conversation))
    target = tuple(engine.encode(answer))
    whole = tuple(engine.encode_chat([*conversation, {"role": "assistant", "content": answer}]))
    end = len(prompt) + len(target)
    if whole[:end] == prompt + target and len(whole) > end:
        target = whole[len(prompt) : end + 1]
    return prompt, target
