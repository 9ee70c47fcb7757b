"""Evolution strategies with noise added to float weights in place, with the settings of "Evolution Strategies at Scale"
(2025): 30 members, one-sided, greedy answers, z-scored rewards, sigma 0.001, step 0.0005 = sigma / 2, no decay, all
parameters. ``in-place-rms`` is the same with both in units of each tensor's root-mean-square (sigma 0.04), as the
absolute ones do not transfer between models.

The weights are float32; each member is written from them in bfloat16, which computes up to twice as fast on CPUs that
have its instructions, and alone would swallow the steps. Noise is drawn again for the step, never kept.
"""

from __future__ import annotations

from typing import Any

import torch
from shared import Budget, Found, Work, batches, mean, peak_rss_bytes
from torch_model import TorchModel

MEMBERS = 30
ROWS = 16
"""Rows that each member of a generation answers; the paper takes its whole training set of 200."""
SIGMA = {"in-place-paper": 1e-3, "in-place-rms": 0.04}
STEP = 0.5
"""Of sigma."""


def train(work: Work) -> Found:
    model = TorchModel(work.model, work.task)
    sigma, relative = SIGMA[work.rival], work.rival == "in-place-rms"
    weights = [w.data for w in model.model.parameters()]
    scales = [float(w.square().mean().sqrt()) if relative else 1.0 for w in weights]
    members = [w.data for w in model.model.bfloat16().parameters()]  # the float32 ones stay in ``weights``
    settings: dict[str, Any] = {
        "members": MEMBERS, "rows": ROWS, "sigma": sigma, "step": STEP * sigma, "relative_to_rms": relative,
        "dtype": "bfloat16 from float32",
    }  # fmt: skip
    batch, curve, budget = batches(work.task.train, ROWS, work.seed), [], Budget(work.seconds)

    def shift(seed: int, by: float, into: list[torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight, scale, target in zip(weights, scales, into, strict=True):
            target.copy_(torch.randn(weight.shape, generator=generator).mul_(by * scale).add_(weight))

    while not budget.over():
        rows = next(batch)
        seeds = [hash((work.seed, budget.steps, member)) & 0x7FFFFFFF for member in range(MEMBERS)]
        scores = []
        for seed in seeds:
            shift(seed, sigma, members)
            scores.append(mean(work.scorer.score(rows, model.answers(rows)).rewards))
        fitness = torch.tensor(scores, dtype=torch.float64).nan_to_num(nan=mean(scores))
        z = (fitness - fitness.mean()) / (fitness.std(correction=0) + 1e-8)
        for seed, weight in zip(seeds, z.tolist(), strict=True):
            if weight:
                shift(seed, STEP * sigma * weight / MEMBERS, weights)
        budget.step()
        curve.append((budget.elapsed(), mean(scores)))
    seconds, peak, rollouts, tokens = budget.elapsed(), peak_rss_bytes(), model.answered, model.tokens
    for target, weight in zip(model.model.float().parameters(), weights, strict=True):
        target.data = weight
    after, eval_seconds, eval_tokens = model.heldout(work)
    return Found(after, peak, settings, seconds, eval_seconds, eval_tokens, budget.steps, rollouts, tokens, curve)
