"""The rival of ``bench.py generation``: evolution strategies as others run them on float weights.

    PYTHON bench_in_place.py MODEL.gguf MEMBERS MAX_TOKENS PROMPTS_JSON

Needs torch and transformers, nothing of edgees. For each member: add seeded noise to every weight in place, generate
greedily for the whole batch of prompts, subtract the same noise again (the method of "Evolution Strategies at Scale",
2025). Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM


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

    def member(seed: int) -> None:
        shift(seed, 1e-3)
        model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)
        shift(seed, -1e-3)

    with torch.inference_mode():
        member(0)
        times = []
        for seed in range(members):
            begin = time.perf_counter()
            member(seed)
            times.append(time.perf_counter() - begin)
    print(json.dumps({"seconds_per_member": sum(times) / len(times), "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
