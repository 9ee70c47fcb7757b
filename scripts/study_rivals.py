"""Rivals on the same CPU, model, rows and scorer, each in a process of its own.

    python scripts/study_rivals.py --task home --rivals untuned,few-shot-4,best-of-8,edgees [--seeds 1,2,3]
                                   [--seconds 600] [--python RIVALS/bin/python] [--folder MODEL-FOLDER]

Rivals: untuned, few-shot-K, best-of-8 (no tuning; the last one asks the scorer at test time), edgees (`edgees tune
--time`), and, with an environment of their own (python -m venv RIVALS; pip install torch transformers trl peft
eggroll-es numpy gguf, and what edgees itself needs) and the model as a Hugging Face folder
(scripts/hf_from_gguf.py): base-torch,
grpo-lora, in-place-absolute, in-place-relative, eggroll-es.

Appends a JSON line per run to docs/studies/rivals/runs.jsonl; what is there is not run again. Prints all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import machine
from study_seeds import call

from edgees.model_path import resolve

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "docs" / "studies" / "rivals" / "runs.jsonl"
IN_OURS = ("untuned", "few-shot", "best-of")


def edgees(task: str, seed: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tuned = call("tune", "--task", task, "--seed", str(seed), "--time", str(seconds), "--run", f"{folder}/run")
        compared = call("eval", f"{folder}/run")
    metrics = {name: m["tuned"] for name, m in compared.get("metrics", {}).items()}
    return {
        "after": {"rows": compared["rows"], "reward": compared["tuned"], "metrics": metrics},
        "peak_rss_bytes": tuned["peak_rss_bytes"], "train_seconds": tuned["seconds"], "steps": tuned["generations"],
        "tokens": tuned["tokens"],
    }  # fmt: skip


def other(given: argparse.Namespace, rival: str, seed: int) -> dict[str, Any]:
    ours = rival.startswith(IN_OURS)
    if not ours and not (given.python and given.folder):
        sys.exit(f"{rival} needs --python and --folder (see --help)")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        model = resolve("smollm2-135m") if ours else given.folder
        command = [
            sys.executable if ours else given.python, str(HERE / "rivals" / "worker.py"), rival, "--task", given.task,
            "--model", str(model), "--seed", str(seed), "--seconds", str(given.seconds), "--out", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(HERE.parent)}, stdout=sys.stderr)
        if done.returncode or not out.exists():
            return {"failed": done.returncode}
        return dict(json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="home")
    parser.add_argument("--rivals", default="untuned,few-shot-2,few-shot-4,few-shot-8,best-of-8,edgees")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--python", default="")
    parser.add_argument("--folder", default="")
    given = parser.parse_args()
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(text) for text in RUNS.read_text().splitlines()] if RUNS.exists() else []
    done = {(r["rival"], r["task"], r["seed"], r["seconds"]) for r in lines if "failed" not in r}
    for seed in map(int, given.seeds.split(",")):
        for rival in given.rivals.split(","):
            key = (rival, given.task, seed, 0.0 if rival.startswith(IN_OURS) else given.seconds)
            if key in done or (rival == "untuned" and seed != int(given.seeds.split(",")[0])):
                continue
            found = edgees(given.task, seed, given.seconds) if rival == "edgees" else other(given, rival, seed)
            line = dict(zip(("rival", "task", "seed", "seconds"), key, strict=True)) | found | {"machine": machine()}
            with RUNS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(line)
    print("| rival | task | seed | reward | metrics | training s | peak MiB |\n|---|---|---|---|---|---|---|")
    for r in lines:
        after = r.get("after", {"reward": float("nan"), "metrics": {}})
        metrics = ", ".join(f"{name} {value:.3f}" for name, value in after["metrics"].items())
        cells = [r["rival"], r["task"], str(r["seed"]), f"{after['reward']:.3f}", metrics]
        cells += [f"{r.get('train_seconds', 0.0):.0f}", f"{r.get('peak_rss_bytes', 0) / 2**20:.0f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
