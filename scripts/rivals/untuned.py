"""No tuning, in edgees' own llama.cpp engine on the 4-bit file: the bare prompt, few-shot prompts, the best of n."""

from __future__ import annotations

import math
import random
import time
from typing import Any

from shared import Found, Work, judge, mean, peak_rss_bytes

from edgees.backends.base import CENTRE, Request
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.population import request_seed
from edgees.tasks.rows import Row

SAMPLES, TEMPERATURE = 8, 0.7
"""Of best-of-8."""


def examples(train: tuple[Row, ...], count: int, seed: int) -> list[dict[str, str]]:
    """``count`` training rows with answers, drawn by ``seed``, as turns of a conversation.

    :raises ValueError: there are not so many."""
    answered = [row for row in train if row.answer is not None]
    if len(answered) < count:
        raise ValueError(f"{count} examples: only {len(answered)} training rows have an answer")
    turns: list[dict[str, str]] = []
    for row in random.Random(f"few-shot {seed}").sample(answered, count):
        turns += [*(dict(message) for message in row.messages), {"role": "assistant", "content": str(row.answer)}]
    return turns


def conversation(work: Work, row: Row, turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """The row's conversation with the example turns behind its system message."""
    whole = work.task.conversation(row)
    head = [message for message in whole[:1] if message["role"] == "system"]
    return [*head, *turns, *whole[len(head) :]]


def greedy(work: Work, shots: int) -> Found:
    turns = examples(work.task.train, shots, work.seed)
    rows = list(work.task.heldout)
    with LlamaCppEngine(work.model) as engine:
        start = time.monotonic()
        prompts = [tuple(engine.encode_chat(conversation(work, row, turns))) for row in rows]
        done = engine.generate([Request(CENTRE, prompt, work.task.max_tokens) for prompt in prompts])
        seconds, peak = time.monotonic() - start, peak_rss_bytes()
    after = judge(work.task, work.scorer, rows, [c.text for c in done])
    settings: dict[str, Any] = {"shots": shots, "prompt_tokens": mean([float(len(prompt)) for prompt in prompts])}
    tokens = sum(len(c.tokens) for c in done)
    return Found(after, peak, settings, eval_seconds=seconds, eval_tokens=tokens)


def best_of(work: Work) -> Found:
    rows = list(work.task.heldout)
    with LlamaCppEngine(work.model) as engine:
        start = time.monotonic()
        prompts = [tuple(engine.encode_chat(work.task.conversation(row))) for row in rows]
        asked = [
            Request(CENTRE, prompt, work.task.max_tokens, TEMPERATURE, request_seed(work.seed, draw, row.id))
            for row, prompt in zip(rows, prompts, strict=True)
            for draw in range(SAMPLES)
        ]
        done = engine.generate(asked)
        seconds, peak = time.monotonic() - start, peak_rss_bytes()
    texts = [c.text for c in done]
    scores = work.scorer.score([row for row in rows for _ in range(SAMPLES)], texts).rewards
    chosen = []
    for at in range(0, len(texts), SAMPLES):
        best = max(range(at, at + SAMPLES), key=lambda i: scores[i] if math.isfinite(scores[i]) else -math.inf)
        chosen.append(texts[best])
    settings = {"samples": SAMPLES, "temperature": TEMPERATURE, "chooser": "the task's scorer, at test time"}
    more = {"mean_of_all_samples": mean(scores)}
    tokens = sum(len(c.tokens) for c in done)
    after = judge(work.task, work.scorer, rows, chosen)
    return Found(after, peak, settings, eval_seconds=seconds, eval_tokens=tokens, more=more)
