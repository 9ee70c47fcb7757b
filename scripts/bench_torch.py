"""Speed and memory of the torch engine's CPU arm, each beside its rival in one run; medians.

    python scripts/bench_torch.py product|generation|memory... --model HF_FOLDER [--rounds N] [--json]

``product``: a perturbed NF4 product of mixed members (lowrank noise) against bitsandbytes' own, unperturbed one, at 1,
32 and 256 columns. ``generation``: the rollouts of a generation against the same engine with each linear dequantised by
bitsandbytes, noise added, multiplied by torch: one member at a time, so that it dequantises once for all its rows.
``memory``: peak resident set of ``edgees tune`` against generation alone with the same requests. ratio > 1: we are
better. ``scripts/hf_from_gguf.py smollm2-135m HF_FOLDER`` makes a model of the embedded one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As the engine sets it: threads that spin for one side steal from the other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import bitsandbytes
import numpy as np
import torch
from bench import TASK, Figure, alternate, figure, machine, members

from edgees import native, nf4, noise
from edgees.backends.base import CENTRE, Request
from edgees.backends.torch_nf4 import TorchEngine

SHAPES = ((1536, 576), (576, 1536), (2048, 2048))
COLUMNS = (1, 32, 256)


def product(_: Path, rounds: int) -> Iterator[Figure]:
    from edgees import ops  # registers the operators

    assert ops
    rng = np.random.default_rng(0)
    for rows, cols in SHAPES:
        weight = rng.normal(size=(rows, cols)).astype(np.float32)
        made = nf4.quantise(weight)
        packed, absmax = torch.from_numpy(made.packed.copy()), torch.from_numpy(made.absmax_float32().copy())
        theirs = bitsandbytes.nn.Linear4bit(cols, rows, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        theirs.weight = bitsandbytes.nn.Params4bit(torch.from_numpy(weight), requires_grad=False, quant_type="nf4")
        theirs = theirs.to("cpu").eval()
        for n in COLUMNS:
            x, m = torch.randn(n, cols), min(n, 32)
            who = (
                torch.arange(m), torch.full((m,), 0.05), torch.arange(m, dtype=torch.int32),
                (torch.arange(n) % m).to(torch.int32), noise.KINDS.index("lowrank"), 1,
            )  # fmt: skip

            def ours(x: Any = x, who: Any = who, p: Any = packed, a: Any = absmax, rows: int = rows) -> float:
                begin = time.perf_counter()
                for _ in range(10):
                    torch.ops.edgees.nf4_linear_perturbed(
                        x, p, a, None, None, 0.0, "nf4", rows, *who, 7, 1.0, None, 0, 0, None, None
                    )
                return time.perf_counter() - begin

            def rival(x: Any = x, layer: Any = theirs) -> float:
                begin = time.perf_counter()
                for _ in range(10):
                    layer(x)
                return time.perf_counter() - begin

            with torch.inference_mode():
                found = alternate({"ours": ours, "rival": rival}, 3 * rounds)
            speed = rows * cols * n * 10 / 1e9
            yield figure(
                f"nf4_product_{rows}x{cols}_{n}", speed / found["ours"], speed / found["rival"], "G multiply-adds/s",
                3 * rounds,
            )  # fmt: skip


def whole_generation(path: Path, rival: bool, pairs: int, rows: int, limit: int) -> float:
    """Seconds for one member's share of the rollouts. Ours: all members at once; the rival: two of them, one by one."""
    from edgees.delta import Delta, DeltaSpec
    from edgees.tasks import load_task

    task = load_task(TASK)
    with tempfile.TemporaryDirectory() as folder, TorchEngine(path) as engine:
        spec = DeltaSpec(tuple(engine.tensors), "refined", 4, 0, "lowrank", 1, 1)
        with Delta.create(Path(folder) / "delta.safetensors", spec) as delta:
            engine.attach(delta)
            if rival:
                in_place(engine)
            prompts = [tuple(engine.encode_chat(task.conversation(row))) for row in task.train[:rows]]
            owners = members(2 if rival else 2 * pairs, pairs)
            engine.generate([Request(CENTRE, prompts[0], 2)])
            begin = time.perf_counter()
            if rival:
                for m in owners:
                    engine.generate([Request(m, p, limit) for p in prompts])
            else:
                engine.generate([Request(m, p, limit) for m in owners for p in prompts])
            return (time.perf_counter() - begin) / len(owners)


def in_place(engine: TorchEngine) -> None:
    """Every linear of the layers: dequantise, add the member's noise, multiply."""
    call = engine._call

    def forward(module: Any, x: Any, _: Any = None) -> Any:
        w, m = module.held, call.members
        state = bitsandbytes.functional.QuantState(
            w.absmax, shape=torch.Size((w.info.rows, w.info.cols)), blocksize=64, quant_type="nf4", dtype=torch.float32,
            code=bitsandbytes.functional.get_4bit_type("nf4", device="cpu"),
        )  # fmt: skip
        weight = bitsandbytes.functional.dequantize_4bit(w.base, state)
        key = int(m.keys[0]) & (1 << 64) - 1
        left = noise.sign_vector(key, w.info.id, noise.LEFT, w.info.rows)
        right = noise.sign_vector(key, w.info.id, noise.RIGHT, w.info.cols)
        weight += float(m.amplitudes[0]) * w.scale * torch.outer(torch.from_numpy(left), torch.from_numpy(right))
        y = torch.nn.functional.linear(x, weight)
        return y if module.bias is None else y + module.bias.of_streams(x.dim())

    for module in engine._model.modules():
        if getattr(getattr(module, "held", None), "absmax", None) is not None:
            module.forward = forward.__get__(module)


def generation(path: Path, rounds: int) -> Iterator[Figure]:
    size = (16, 16, 16)
    found = alternate(
        {str(rival): lambda rival=rival: whole_generation(path, rival, *size) for rival in (False, True)}, rounds
    )
    yield figure(
        "torch_generation_vs_dequantised", 32 * found["True"], 32 * found["False"], "s", rounds, members_measured=2
    )


def alone(path: str) -> None:
    """Child process: the engine without a delta does what one generation of tune asks for."""
    from edgees import rollout as play
    from edgees.config import Config
    from edgees.tasks import load_task
    from edgees.tune import peak_rss_bytes

    loaded = load_task(TASK)
    config = Config().with_defaults(loaded.defaults, TASK)
    engine = TorchEngine(path)
    settings = play.Settings(config.max_tokens or loaded.max_tokens, loaded.conversation)
    play.play(engine, [CENTRE], loaded.heldout[:8], settings)
    play.likelihood(engine, [CENTRE] * (2 * config.pairs), loaded.train[: config.rows], settings)
    print(peak_rss_bytes())


def memory(path: Path, _: int) -> Iterator[Figure]:
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import bench_torch; bench_torch.alone({str(path)!r})"
    rival = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    for scope in ("adapter", "full"):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "edgees", "tune", "--engine", "torch", "--model", str(path), "--task", TASK,
                "--generations", "1", "--eval-every", "0", "--eval-rows", "8", "--scope", scope, "--run",
                f"{folder}/run", "--json",
            ]  # fmt: skip
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peak = int(json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"])
        yield figure(f"torch_memory_inference_over_tune_{scope}", rival / 2**20, peak / 2**20, "MiB", 1)


PARTS = {"product": product, "generation": generation, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=list(PARTS))
    parser.add_argument("--model", type=Path, default=Path("smollm2-hf"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(native.threads())
    figures = [f for what in arguments.what for f in PARTS[what](arguments.model, arguments.rounds)]
    if arguments.json:
        print(json.dumps({"machine": machine(), "figures": figures}))


if __name__ == "__main__":
    main()
