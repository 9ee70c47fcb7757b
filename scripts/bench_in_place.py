"""The rivals of ``bench.py generation``: evolution strategies as others run them on float weights.

    PYTHON bench_in_place.py MODEL.gguf MEMBERS MAX_TOKENS PROMPTS_JSON

Needs torch and transformers, nothing of edgees. For each member: add seeded noise to every weight in place, generate
greedily for the whole batch of prompts, subtract the same noise again (the method of "Evolution Strategies at Scale",
2025). Where PyPI's ``eggroll-es`` is installed too, one of its own generations (two pairs, rank 1, every weight) on the
same prompts. Prints one JSON object: seconds per member, peak resident bytes before and after eggroll-es.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def eggroll(model: Any, answer: Any) -> dict[str, float]:
    """A generation of eggroll-es; ``answer`` generates for the whole batch."""
    from eggroll import EggrollConfig, EggrollTrainer

    def reward(model: Any, batch: Any) -> float:
        return float(answer()[:, -1].float().mean())

    config = EggrollConfig(population_size=2, rank=1, sigma=1e-3, generations=2, device="cpu")
    with contextlib.redirect_stdout(sys.stderr):
        trainer = EggrollTrainer(model, config, reward)
        trainer.evolve([0, 0])
    last = trainer.history[-1]
    return {
        "eggroll_seconds_per_member": last["time_sec"] / last["population_size"],
        "eggroll_members": last["population_size"],
        "eggroll_peak_rss_bytes": peak(),
    }


def main() -> None:
    path, members, limit, prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    folder, name = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def shift(seed: int, by: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=by)

    def answer() -> Any:
        return model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)

    def member(seed: int) -> None:
        shift(seed, 1e-3)
        answer()
        shift(seed, -1e-3)

    with torch.inference_mode():
        member(0)
        times = []
        for seed in range(members):
            begin = time.perf_counter()
            member(seed)
            times.append(time.perf_counter() - begin)
    found = {
        "seconds_per_member": sum(times) / len(times),
        "threads": torch.get_num_threads(),
        "peak_rss_bytes": peak(),
    }
    if importlib.util.find_spec("eggroll"):
        found |= eggroll(model, answer)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
