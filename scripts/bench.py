"""Speed and memory, measured side by side with plain llama.cpp on the same file.

    python scripts/bench.py speed [--model M] [--rounds N] [--json]
    python scripts/bench.py memory [--model M] [--json]

``speed``: medians of alternating rounds, our engine with members mixed in the batch against stock llama.cpp without any
perturbation (its own defaults, and with flash attention off as we run it: the faster of the two counts).
``memory``: peak resident set of one generation of ``edgees tune`` against plain inference, each in its own process.
ratio > 1: we are better. Let the machine be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from edgees import native, noise
from edgees.backends.base import CENTRE, Member

WORDS = 32  # tokens in each sequence before the measured part


def machine() -> dict[str, object]:
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model or platform.processor(), "threads": native.threads(), "isa": native.isa()}


def members(n: int, pairs: int = 16) -> list[Member]:
    found = []
    for i in range(n):
        pair = i // 2 % pairs
        found.append(Member(noise.make_key(1, 0, pair), 0.04 if i % 2 else -0.04, pair, pair))
    return found


class Runner:
    """One context of ``streams`` sequences; ``step`` decodes one more token of each, ``prompts`` a fresh prompt."""

    def __init__(self, path: Path, streams: int, kind: str | None, view: str = "refined", flash: bool = False) -> None:
        from edgees.backends import llamacpp
        from edgees.delta import Delta, DeltaSpec, Step

        self.engine = llamacpp.LlamaCppEngine(path, parallel=streams, plain=kind is None)
        self.folder = tempfile.TemporaryDirectory()
        if kind is not None:
            spec = DeltaSpec(
                tuple(self.engine.tensors),
                view,
                4 if view == "refined" else 0,
                32 if view == "adapter" else 0,
                kind,
                1,
                1,
            )
            delta = Delta.create(Path(self.folder.name) / "delta.safetensors", spec)
            self.engine.attach(delta)
            keys = tuple(noise.make_key(1, 9, p) for p in range(4))
            delta.apply(Step(0, keys, (0, 1, 2, 3), (0.01, -0.01, 0.01, 0.01), 1.0))
            self.engine.refresh()
        if flash:  # the engine never switches it on: see edgees/backends/llamacpp.py
            original = llamacpp.set_fields
            llamacpp.set_fields = lambda struct, **values: original(
                struct, **{k: 1 if k == "flash_attn_type" else v for k, v in values.items()}
            )
            self.context = self.engine._need(512, streams)
            llamacpp.set_fields = original
        else:
            self.context = self.engine._need(512, streams)
        self.streams = streams
        self.members = members(streams) if kind else [CENTRE] * streams
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(1000, 9000, (streams, 512)).tolist()
        self.at = 0

    def start(self) -> None:
        for s in range(self.streams):
            self.context.trim(s, 0)
            self.context.decode([s], [self.tokens[s][:WORDS]], [self.members[s]], [[False] * (WORDS - 1) + [True]], [0])
        self.at = WORDS

    def decode(self, steps: int) -> float:
        """Tokens per second of all sequences together."""
        self.start()
        n = self.streams
        begin = time.perf_counter()
        for _ in range(steps):
            self.context.decode(
                list(range(n)), [[t[self.at]] for t in self.tokens], self.members, [[True]] * n, [self.at] * n
            )
            self.at += 1
        return steps * n / (time.perf_counter() - begin)

    def prompt(self, length: int) -> float:
        """Tokens per second of ``streams`` prompts of ``length`` tokens in one call."""
        for s in range(self.streams):
            self.context.trim(s, 0)
        begin = time.perf_counter()
        self.context.decode(
            list(range(self.streams)), [t[:length] for t in self.tokens], self.members,
            [[False] * (length - 1) + [True]] * self.streams, [0] * self.streams,
        )  # fmt: skip
        return self.streams * length / (time.perf_counter() - begin)

    def close(self) -> None:
        self.engine.close()
        self.folder.cleanup()


CASES = [
    ("decode", 1, 48),
    ("decode", 2, 32),
    ("decode", 8, 24),
    ("decode", 32, 12),
    ("prompt", 1, 256),
    ("prompt", 2, 128),
]


def speed(path: Path, rounds: int, kinds: list[str]) -> list[dict[str, object]]:
    figures = []
    for what, streams, n in CASES:
        arms = {"stock": (None, "refined", False), "stock flash": (None, "refined", True)}
        for kind in kinds:
            noise_kind, _, view = kind.partition("/")
            arms[kind] = (noise_kind, view or "refined", False)
        runs: dict[str, list[float]] = {name: [] for name in arms}
        runners = {name: Runner(path, streams, *arm) for name, arm in arms.items()}
        for i in range(rounds + 1):
            for name, runner in runners.items():
                value = runner.decode(n) if what == "decode" else runner.prompt(n)
                if i:  # the first round warms up
                    runs[name].append(value)
        for runner in runners.values():
            runner.close()
        median = {name: statistics.median(values) for name, values in runs.items()}
        rival = max(median["stock"], median["stock flash"])
        for kind in kinds:
            figures.append(
                {"name": f"{what} {streams} x {n} {kind}", "value": median[kind], "rival": rival,
                 "ratio": median[kind] / rival, "unit": "tokens/s", "runs": rounds}
            )  # fmt: skip
            say(figures[-1])
    return figures


TASK = "home"
"""What memory is measured on, with the task's own settings."""


def plain(path: str) -> None:
    """Child process: plain llama.cpp does what one generation of tune asks for (an evaluation, then likelihoods)."""
    import resource

    from edgees import rollout
    from edgees.backends.llamacpp import LlamaCppEngine
    from edgees.config import Config
    from edgees.tasks import load_task

    loaded = load_task(TASK)
    config = Config().with_defaults(loaded.defaults, TASK)
    engine = LlamaCppEngine(path, plain=True)
    settings = rollout.Settings(config.max_tokens or loaded.max_tokens, loaded.conversation)
    rollout.play(engine, [CENTRE], loaded.heldout[:8], settings)
    rollout.likelihood(engine, [CENTRE] * (2 * config.pairs), loaded.train[: config.rows], settings)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def memory(path: Path) -> list[dict[str, object]]:
    figures = []
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench; bench.plain({str(path)!r})"
    rival = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    weights = os.path.getsize(path)
    for scope, bits in (("adapter", 0), ("full", 4)):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "edgees", "tune", "--model", str(path), "--task", TASK, "--generations", "1",
                "--eval-every", "0", "--eval-rows", "8", "--scope", scope, "--run", f"{folder}/run", "--json",
            ]  # fmt: skip
            command += ["--bits", str(bits)] if bits else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peak = int(json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"])
        figures.append(
            {"name": f"peak RSS, {scope}{f' r={bits}' if bits else ''}", "value": peak / 2**20, "rival": rival / 2**20,
             "ratio": rival / peak, "unit": "MiB", "runs": 1, "file_mib": weights / 2**20}
        )  # fmt: skip
        say(figures[-1])
    return figures


def say(figure: dict[str, object]) -> None:
    print("{name:32} {value:9.1f}   stock {rival:9.1f}   ratio {ratio:5.2f}  {unit}".format(**figure), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "memory"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", default="lowrank", help="comma-separated: lowrank, lowrank/adapter, sign, normal")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from edgees.model_path import resolve

    path = Path(resolve(arguments.model))
    if arguments.what == "speed":
        figures = speed(path, arguments.rounds, arguments.kinds.split(","))
    else:
        figures = memory(path)
    if arguments.json:
        print(json.dumps({"machine": machine(), "figures": figures}))


if __name__ == "__main__":
    main()
