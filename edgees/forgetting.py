"""How far a model has moved from its base where nobody meant to change it, and a price for that.

Measured on replies that the base itself gave to fixed prompts (:data:`edgees.watch.PROMPTS`), sampled at temperature 1
before the first generation, and on a piece of plain text. The mean of ``log p_base - log p`` over tokens that the base
sampled estimates KL(base | model) without bias, in nats a token; few tokens are seen, so it has an error of its own, of
about a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgees import watch
from edgees.backends.base import CENTRE, Engine, Member, Request, Score
from edgees.population import request_seed

REPLY, PIECE, OVERLAP = 24, 64, 8
"""Tokens of a reply, of a piece of the text, and of its beginning that is only read."""
ASKED = 2
"""Replies on which the members of a generation are compared; others in each generation."""
Pair = tuple[tuple[int, ...], tuple[int, ...]]


def texts(engine: Engine) -> tuple[list[tuple[int, ...]], list[Pair]]:
    """As tokens: prompts, and (beginning, rest) of each piece of the text."""
    prompts = [tuple(engine.encode_chat([{"role": "user", "content": text}])) for text in watch.PROMPTS]
    text = tuple(engine.encode(watch.TEXT))
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    return prompts, [(piece[:OVERLAP], piece[OVERLAP:]) for piece in pieces if len(piece) > OVERLAP]


def measure(engine: Engine, first: Mapping[str, Any] | None) -> tuple[dict[str, float], dict[str, Any]]:
    """({``kl``, ``perplexity``} of the centre, what the base said and how likely it found that).

    first: the latter, as an earlier call gave it; None: the centre is still the base.
    """
    prompts, pieces = texts(engine)
    if first is None:
        asked = [Request(CENTRE, p, REPLY, 1.0, request_seed(0, 0, str(i))) for i, p in enumerate(prompts)]
        first = {"replies": [list(reply.tokens) for reply in engine.generate(asked)]}
    replies = _replies(prompts, first)
    said = [(CENTRE, *pair) for pair in [*replies, *pieces]]
    # One at a time: the logits of all of them would take more memory than tuning does.
    scores = [score for one in said for score in engine.loglik([one])]
    mean = per_token(scores[: len(replies)])
    first = {"loglik": mean, "each": [score.mean for score in scores[: len(replies)]], **first}
    read = -per_token(scores[len(replies) :])
    return {"kl": first["loglik"] - mean, "perplexity": math.exp(min(read, 700.0))}, first


def moved(engine: Engine, members: Sequence[Member], first: Mapping[str, Any], generation: int) -> np.ndarray:
    """Nats a token by which each member has moved from the base, float64 [members], on a few replies, the same for all
    of a generation. Nobody gains by finding one likelier than the base did: 0 then."""
    replies = _replies(texts(engine)[0], first)
    places = [(generation * ASKED + i) % len(replies) for i in range(min(ASKED, len(replies)))]
    scores = engine.loglik([(member, *replies[place]) for member in members for place in places])
    found = np.array([score.mean for score in scores], np.float64).reshape(len(members), len(places))
    return np.asarray(np.maximum(np.array(first["each"])[places] - found, 0.0).mean(1))


def per_token(scores: Sequence[Score]) -> float:
    """Mean log-likelihood, nats a token; 0 for no scores."""
    return sum(s.sum for s in scores) / max(sum(s.tokens for s in scores), 1)


def _replies(prompts: Sequence[tuple[int, ...]], first: Mapping[str, Any]) -> list[Pair]:
    return [(p, tuple(r)) for p, r in zip(prompts, first["replies"], strict=True) if r]
