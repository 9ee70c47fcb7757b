"""Does tuning help, and by how much? The same run with several seeds, each compared on held-out rows.

    python scripts/study_seeds.py NAME --task home [--seeds 1,2,3] [OPTIONS OF edgees tune]

Writes docs/results/NAME.json: per seed the settings given, what `edgees tune --json` and `edgees eval --json` printed,
and the seconds that each took. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import machine


def call(*arguments: str) -> dict[str, Any]:
    print("$ edgees", *arguments, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "edgees", *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(name: str, seed: int, base: float, tuned: float, difference: dict[str, float]) -> str:
    d = difference
    return f"| {name} | {seed} | {base:.3f} | {tuned:.3f} | {d['mean']:+.3f} | {d['low']:+.3f} .. {d['high']:+.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--task", default="home")
    parser.add_argument("--seeds", default="1,2,3")
    arguments, options = parser.parse_known_args()
    results = []
    for seed in map(int, arguments.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            run = f"{folder}/run"
            start = time.monotonic()
            tuned = call("tune", "--task", arguments.task, "--seed", str(seed), "--run", run, *options)
            middle = time.monotonic()
            compared = call("eval", run)
            end = time.monotonic()
        tuned.pop("run")
        compared.pop("run", None)
        results.append(
            {
                "seed": seed,
                "tune": tuned,
                "eval": compared,
                "tune_seconds": middle - start,
                "eval_seconds": end - middle,
            }
        )
        target = Path("docs/results") / f"{arguments.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        command = f"python scripts/study_seeds.py {' '.join(sys.argv[1:])}"
        target.write_text(json.dumps({"command": command, "machine": machine(), "results": results}, indent=1) + "\n")
    print("| measure | seed | base | tuned | difference | 95 % interval |\n|---|---|---|---|---|---|")
    for r in results:
        e = r["eval"]
        print(line("reward", r["seed"], e["base"], e["tuned"], e["difference"]))
        for name, m in e.get("metrics", {}).items():
            print(line(name, r["seed"], m["base"], m["tuned"], m["difference"]))


if __name__ == "__main__":
    main()
