"""One run of one rival, in a process and an environment of its own; study_rivals.py starts it.

PYTHONPATH=CHECKOUT PYTHON scripts/rivals/worker.py RIVAL --task T --model M --seed N --seconds S --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from shared import Found, Work, open_task, versions

from edgees.errors import EdgeesError


def play(work: Work) -> Found:
    """Imports only what the rival needs: each environment has but its own."""
    if work.rival == "base-torch":
        from torch_model import untrained

        return untrained(work)
    if work.rival == "grpo-lora":
        import grpo

        return grpo.train(work)
    if work.rival.startswith("in-place-"):
        import in_place

        return in_place.train(work)
    if work.rival == "eggroll-es":
        import eggroll_es

        return eggroll_es.train(work)
    import untuned

    if work.rival == "best-of-8":
        return untuned.best_of(work)
    return untuned.greedy(work, 0 if work.rival == "untuned" else int(work.rival.removeprefix("few-shot-")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rival")
    parser.add_argument("--task", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--population", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    start = time.monotonic()
    try:
        task, scorer = open_task(given.task)
        with scorer:
            found = play(Work(given.rival, task, scorer, given.model, given.seed, given.seconds, given.population))
    except EdgeesError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    result = {**asdict(found), "total_seconds": time.monotonic() - start, "versions": versions()}
    given.out.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
