"""Does ``edgees search`` by evolution strategies find better answers than best-of-n for the same tokens?

    python scripts/study_search.py [--rows 12] [--seeds 1,2,3] [--rollouts 64] [--out docs/studies/search]

Every row is searched by itself, with every seed, by each method. What was expected stands in EXPECTED, written before
anything ran. Tokens are those generated. A difference is paired: the same row, the mean over seeds; its 95 % interval
is over rows (bootstrap). Writes OUT/rows.jsonl (a line per search of a row; what is there is not searched again) and
OUT/README.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgees.config import load
from edgees.opening import open_task
from edgees.search import DEFAULTS, Plan, search

EXPECTED = """Best-of-n wins for few tokens, since perturbed members mostly answer as the greedy model does. ES catches
up by the end on home, whose partial credit shows a direction, and stays behind on sums, where an answer is right or
not."""
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "es": ("es", {}),
    "best-of .7": ("best-of", {"temperature": 0.7}),
    "best-of 1.0": ("best-of", {"temperature": 1.0}),
}
TASKS = ("sums", "home")
BUDGETS = (32, 64, 128, 256, 512, 1024)
FINDING = ""


def spread(names: Sequence[str], count: int) -> list[str]:
    """``count`` of the names at equal distances, as held-out rows are sorted."""
    return [names[int(i)] for i in np.linspace(0, len(names) - 1, count).round()]


def run(task: str, rows: int, seeds: Sequence[int], rollouts: int, path: Path) -> None:
    """Search what is not in ``path`` yet."""
    names = spread([row.id for row in open_task(load(None, {**DEFAULTS, "task": task})).heldout], rows)
    for seed in seeds:
        for arm, (method, given) in ARMS.items():
            known = {(line["row"], line["seed"], line["arm"]) for line in read(path)}
            wanted = [name for name in names if (name, seed, arm) not in known]
            if not wanted:
                continue
            found = search({"task": task, "seed": seed, **given}, Plan(method, rollouts, apart=True), rows=wanted)
            if found.interrupted:
                return
            with path.open("a") as file:
                share = {"seconds": found.spent.seconds / len(wanted), "processed": found.spent.processed / len(wanted)}
                for best in found.rows:
                    line = {"task": task, "arm": arm, "seed": seed, **best.to_dict(), "mean_of_arm": share}
                    file.write(json.dumps(line) + "\n")
            print(f"{task} seed {seed} {arm}: {found.curve[-1][1]:.3f}, {found.spent.seconds:.0f} s", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def at(line: dict[str, Any], budget: float) -> float:
    """Best reward when ``budget`` tokens had been generated; 0 before the first answer."""
    return max((reward for tokens, reward in line["curve"] if tokens <= budget), default=0.0)


def table(lines: Sequence[dict[str, Any]], task: str) -> list[str]:
    """Mean best reward for each budget, and differences to best-of-n."""
    mine = [line for line in lines if line["task"] == task]
    rows = sorted({line["row"] for line in mine})
    arms = list(ARMS)
    generator = np.random.default_rng(0)
    told = [f"## {task}: {len(rows)} held-out rows, {len({line['seed'] for line in mine})} seeds", ""]
    told.append(f"| tokens a row | {' | '.join(arms)} | " + " | ".join(f"es less {arm}" for arm in arms[1:]) + " |")
    told.append("|---" * (2 * len(arms)) + "|")
    for budget in BUDGETS:
        means = {arm: np.array([_mean(mine, row, arm, budget) for row in rows]) for arm in arms}
        cells = [f"{means[arm].mean():.3f}" for arm in arms]
        for arm in arms[1:]:
            gaps = means["es"] - means[arm]
            draws = gaps[generator.integers(0, len(gaps), (4000, len(gaps)))].mean(1)
            low, high = np.quantile(draws, [0.025, 0.975])
            cells.append(f"{gaps.mean():+.3f} ({low:+.3f} to {high:+.3f})")
        told.append(f"| {budget} | {' | '.join(cells)} |")
    for arm in arms:
        share = [line["mean_of_arm"] for line in mine if line["arm"] == arm]
        seconds, processed = (np.mean([each[name] for each in share]) for name in ("seconds", "processed"))
        told += ["", f"{arm}: {seconds:.1f} s and {processed:.0f} tokens with prompts a row."]
    return told


def _mean(lines: Sequence[dict[str, Any]], row: str, arm: str, budget: float) -> float:
    """Over seeds."""
    return float(np.mean([at(line, budget) for line in lines if line["row"] == row and line["arm"] == arm]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--seeds", default="1,2,3", help="default 1,2,3")
    parser.add_argument("--rollouts", type=int, default=64, help="answers a row at most (64)")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--out", type=Path, default=Path("docs/studies/search"))
    parser.add_argument("--table", action="store_true", help="only write the page anew")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rows.jsonl"
    tasks = args.tasks.split(",")
    if not args.table:
        for task in tasks:
            run(task, args.rows, [int(seed) for seed in args.seeds.split(",")], args.rollouts, path)
    page = ["# Search at test time: evolution strategies or best-of-n?", "", f"Expected: {EXPECTED}", ""]
    page += ["Found: " + FINDING, ""] if FINDING else []
    for task in tasks:
        page += ["", *table(read(path), task)]
    (args.out / "README.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()
