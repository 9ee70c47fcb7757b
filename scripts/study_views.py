"""Where may delta live? What a view's rounding does to a model, before anything is learned.

    python scripts/study_views.py [--seeds 5] [--rows 48] [--out docs/results/views.json]

A random displacement of all linears (sum of 16 rank-1 terms, RMS x times each tensor's) is put into every view and
scored on held-out rows of the task `home`, with training rows as examples in the prompt (without any, the base earns
nothing): likelihood of the reference call, and greedy reward. "exact" is the same float32 displacement written into an
F32 file and run by plain llama.cpp. Compared with exact seed by seed, over the mean of the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgees import blocks, noise, rewards, rollout
from edgees.backends.base import CENTRE
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.delta import Delta, DeltaSpec, Step
from edgees.evaluate import interval
from edgees.gguf_file import GgufFile, write_like
from edgees.model_path import resolve
from edgees.tasks import load_task

VIEWS = {
    "r=8": ("refined", 8),
    "r=4": ("refined", 4),
    "r=2": ("refined", 2),
    "r=0": ("lattice", 0),
    "adapter": ("adapter", 0),
}
SIZES = (0.003, 0.01, 0.03, 0.1)
TERMS = 16
EXAMPLES = (0, 3, 4)
"""Training rows shown in the prompt: three devices."""


def exact_file(base: Path, delta: Delta, out: Path) -> None:
    with GgufFile(base) as file:
        written = {}
        for t in delta.spec.tensors:

            def stream(t=t) -> Iterator[np.ndarray]:  # type: ignore[no-untyped-def]
                kind = file.tensors[t.source].type_name
                w = blocks.decode(kind, file.raw(t.source), t.rows, t.cols)
                d = delta.rows(t.name, 0, t.rows)
                order = t.source_to_canonical()
                yield (w + (d if order is None else d[order])).reshape(-1).view(np.uint8)

            written[t.source] = ("F32", stream)
        write_like(file, out, written)


class Study:
    def __init__(self, rows: int) -> None:
        self.task = load_task("home")
        self.rows = list(self.task.heldout[:rows])
        shown = [
            message
            for row in (self.task.train[i] for i in EXAMPLES)
            for message in (*row.messages, {"role": "assistant", "content": row.answer or ""})
        ]
        self.settings = rollout.Settings(
            self.task.max_tokens,
            lambda row: self.task.conversation(replace(row, messages=(*shown, *row.messages))),
        )
        self.scorer = rewards.load(self.task.reward)

    def score(self, engine: LlamaCppEngine) -> dict[str, list[float]]:
        """Per row: mean log-likelihood of the reference call, greedy reward."""
        likely = rollout.likelihood(engine, rollout.every([CENTRE], self.rows), self.settings)
        played = rollout.play(engine, rollout.every([CENTRE], self.rows), self.settings)
        scores = self.scorer.score(self.rows, [t.completion for t in played])
        return {"loglik": [s.mean for s in likely if s], "reward": scores.rewards}


def step(spec: DeltaSpec, size: float, seed: int) -> Step:
    keys = tuple(noise.make_key(seed, 0, p) for p in range(TERMS))
    return Step(0, keys, tuple(range(TERMS)), (size / TERMS**0.5,) * TERMS, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--out", default="docs/results/views.json")
    arguments = parser.parse_args()
    path = Path(resolve(arguments.model))
    study = Study(arguments.rows)
    found: dict[str, dict[str, list[list[float]]]] = {}
    with LlamaCppEngine(path, params=r"proj") as engine, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "delta.safetensors"

        def keep(name: str, scores: dict[str, list[float]]) -> None:
            for measure, values in scores.items():
                found.setdefault(f"{name} {measure}", {"seeds": []})["seeds"].append(values)
            means = " ".join(f"{m} {statistics.mean(v):.4f}" for m, v in scores.items())
            print(f"{name:24} {means}", file=sys.stderr, flush=True)

        for size in SIZES:
            for seed in range(1, arguments.seeds + 1):
                for name, (view, bits) in VIEWS.items():
                    spec = DeltaSpec(
                        tuple(engine.tensors), view, bits, 32 if view == "adapter" else 0, "lowrank", 1, seed
                    )
                    with Delta.create(file, spec) as delta:
                        delta.apply(step(spec, size, seed))
                        engine.attach(delta)
                        keep(f"{size} {name}", study.score(engine))
                        if name == "r=8":
                            exact_file(path, delta, Path(folder) / "exact.gguf")
                with LlamaCppEngine(Path(folder) / "exact.gguf", plain=True) as oracle:
                    keep(f"{size} exact", study.score(oracle))
        spec = DeltaSpec(tuple(engine.tensors), "refined", 8, 0, "lowrank", 1, 1)
        with Delta.create(file, spec) as delta:
            engine.attach(delta)
            keep("0 base", study.score(engine))
    table = []
    for measure in ("loglik", "reward"):
        base = statistics.mean(found[f"0 base {measure}"]["seeds"][0])
        for size in SIZES:
            exact = np.array(found[f"{size} exact {measure}"]["seeds"])
            for name in ("exact", *VIEWS):
                values = np.array(found[f"{size} {name} {measure}"]["seeds"])
                # the adapter's displacement is another draw: its pair is the base, not the exact displacement
                against = base if name in ("adapter", "exact") else exact.mean(1)
                differences = values.mean(1) - against
                low, high = interval(differences)
                table.append({"measure": measure, "x": size, "view": name, "mean": float(values.mean()),
                              "against": "base" if name in ("adapter", "exact") else "exact",
                              "difference": float(differences.mean()), "low": low, "high": high})  # fmt: skip
    Path(arguments.out).write_text(
        json.dumps(
            {"model": arguments.model, "rows": arguments.rows, "seeds": arguments.seeds, "table": table}, indent=1
        )
    )
    print("| measure | x | view | mean | difference | 95 % interval | against |\n|---|---|---|---|---|---|---|")
    for line in table:
        cells = "| {measure} | {x} | {view} | {mean:.4f} | {difference:+.4f} | {low:+.4f} .. {high:+.4f} | {against} |"
        print(cells.format(**line))


if __name__ == "__main__":
    main()
