"""Speed and memory, each measured side by side with its rival, alternating in one run; medians.

    python scripts/bench.py WHAT... [--model M] [--rounds N] [--json] [--torch-python PYTHON]

``rollout``: a batch of sequences of different members against stock llama.cpp without any perturbation, on the same
file and on the fastest type of the model here; one member against many; the product against the machine's own peak.
``prompt``: prompts. ``decode``: one sequence, plain and with drafts. ``update``: a step of the weights against the
generation that led to it. ``generation``: the same generation with torch and transformers, adding noise to float
weights and taking it off again, and with PyPI's eggroll-es (``--torch-python`` names an interpreter that has them).
``memory``: peak resident set of ``edgees tune`` against plain inference. ``large``: a random model of 1.1 billion
weights.

Stock llama.cpp runs with flash attention off and on: the faster one counts. ratio > 1: we are better. Let the machine
be idle otherwise: neighbours cost up to half of everything, which is why only ratios within a run are compared.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgees import native, noise
from edgees.backends import llamacpp
from edgees.backends.base import CENTRE, Member, Request

WORDS = 32  # tokens in each sequence before the measured part
TASK = "home"
"""What whole generations and memory are measured on, with the task's own settings."""

Figure = dict[str, Any]


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


@contextmanager
def parameters(**values: Any) -> Iterator[None]:
    """llama.cpp's parameters of these names, whatever the engine asks for (it never runs stock's fast settings)."""
    original = llamacpp.set_fields

    def patched(struct: Any, **wanted: Any) -> Any:
        return original(struct, **{k: values.get(k, v) for k, v in wanted.items()})

    llamacpp.set_fields = patched
    try:
        yield
    finally:
        llamacpp.set_fields = original


def without_amx() -> None:
    """llama.cpp believes what the CPU says of AMX and dies where the virtual machine does not keep its registers.

    Refuse it the permission to use them (a seccomp filter on this process): it then takes its next best kernels.
    """
    if platform.machine() != "x86_64" or "amx_tile" not in Path("/proc/cpuinfo").read_text():
        return
    allow, refuse = 0x7FFF0000, 0x00050001
    program = [  # arch_prctl(ARCH_REQ_XCOMP_PERM, ...) fails, everything else passes
        (0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (0x06, 0, 0, refuse),
        (0x06, 0, 0, allow),
    ]  # fmt: skip

    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]

    rules = (Filter * len(program))(*program)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)
    if libc.prctl(22, 2, ctypes.byref(Program(len(program), rules)), 0, 0):
        print("cannot switch AMX off: stock's repacked types are left out", file=sys.stderr)


class Runner:
    """One context of ``streams`` sequences; ``decode`` goes on with all of them, ``prompt`` computes fresh prompts."""

    def __init__(
        self, path: Path, streams: int, kind: str | None = None, *, mixed: bool = True, flash: bool = False,
        extra: bool = False, micro: int = llamacpp.MICRO_BATCH,
    ) -> None:  # fmt: skip
        noise_kind, _, view = (kind or "").partition("/")
        with parameters(use_extra_bufts=extra):
            self.engine = llamacpp.LlamaCppEngine(path, parallel=streams, plain=kind is None)
        self.folder = tempfile.TemporaryDirectory()
        if kind is not None:
            attach(self.engine, Path(self.folder.name), noise_kind, view or "refined")
        default, llamacpp.MICRO_BATCH = llamacpp.MICRO_BATCH, micro
        if kind is None:
            with parameters(flash_attn_type=int(flash)):
                self.context = self.engine._need(1024 if micro > 256 else 512, streams)
        else:
            self.context = self.engine._need(1024 if micro > 256 else 512, streams)
        llamacpp.MICRO_BATCH = default
        self.streams, self.flash, self.started = streams, flash, False
        self.members = [CENTRE] * streams if kind is None else members(streams) if mixed else members(1) * streams
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(1000, min(9000, self.engine.vocabulary), (streams, 1024)).tolist()

    def decode(self, steps: int) -> float:
        """Tokens per second of all sequences together."""
        n = self.streams
        for s in range(n):
            if not self.started:
                wanted = [[False] * (WORDS - 1) + [True]]
                self.context.decode([s], [self.tokens[s][:WORDS]], [self.members[s]], wanted, [0])
            self.context.trim(s, WORDS)
        self.started = True
        begin = time.perf_counter()
        for at in range(WORDS, WORDS + steps):
            self.context.decode(list(range(n)), [[t[at]] for t in self.tokens], self.members, [[True]] * n, [at] * n)
        return steps * n / (time.perf_counter() - begin)

    def prompt(self, length: int) -> float:
        """Tokens per second of ``streams`` prompts of ``length`` tokens."""
        self.started = False
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


def attach(engine: llamacpp.LlamaCppEngine, folder: Path, kind: str, view: str) -> Any:
    """A delta of a few steps, so that its residual planes or factors are not empty."""
    from edgees.delta import Delta, DeltaSpec, Step

    bits, factors = (4, 0) if view == "refined" else (0, 32)
    spec = DeltaSpec(tuple(engine.tensors), view, bits, factors, kind, 1, 1)
    delta = Delta.create(folder / "delta.safetensors", spec)
    engine.attach(delta)
    keys = tuple(noise.make_key(1, 9, p) for p in range(4))
    delta.apply(Step(0, keys, (0, 1, 2, 3), (0.01, -0.01, 0.01, 0.01), 1.0))
    engine.refresh()
    return delta


def alternate(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of ``rounds`` runs of each arm, in turn; a first round warms up."""
    runs: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 1):
        for name, arm in arms.items():
            value = arm()
            if i:
                runs[name].append(value)
    return {name: statistics.median(values) for name, values in runs.items()}


def figure(name: str, value: float, rival: float, unit: str, runs: int, **more: Any) -> Figure:
    found: Figure = {
        "name": name, "value": value, "rival": rival, "ratio": value / rival, "unit": unit, "runs": runs, **more,
    }  # fmt: skip
    print(f"{name:38} {value:10.1f}   rival {rival:10.1f}   ratio {value / rival:6.2f}  {unit}", file=sys.stderr)
    return found


def stock(path: Path, streams: int, **more: Any) -> dict[str, Runner]:
    return {f"stock{' flash' * flash}": Runner(path, streams, flash=flash, **more) for flash in (False, True)}


def best_stock(median: Mapping[str, float]) -> float:
    return max(value for name, value in median.items() if name.startswith("stock"))


# ---------------------------------------------------------------- what is measured
def rollout(path: Path, rounds: int, _: argparse.Namespace) -> Iterator[Figure]:
    streams, steps = 32, 12
    runners = stock(path, streams) | {
        "mixed": Runner(path, streams, "lowrank"), "one": Runner(path, streams, "lowrank", mixed=False),
        "adapter": Runner(path, streams, "lowrank/adapter"), "sign": Runner(path, streams, "sign"),
    }  # fmt: skip
    median = alternate({k: lambda r=r: r.decode(steps) for k, r in runners.items()}, rounds)
    rival = best_stock(median)
    yield figure("rollout_mixed_lowrank_vs_same_file", median["mixed"], rival, "tokens/s", rounds)
    yield figure("rollout_mixed_adapter_vs_same_file", median["adapter"], rival, "tokens/s", rounds)
    yield figure("rollout_mixed_sign_vs_same_file", median["sign"], rival, "tokens/s", rounds)
    yield figure("rollout_mixed_vs_one_member", median["mixed"], median["one"], "tokens/s", rounds)
    for r in runners.values():
        r.close()
    yield from against_best_type(path, rounds)
    for columns in (32, 64, 256):
        yield share_of_peak(rounds, columns)


def against_best_type(path: Path, rounds: int) -> Iterator[Figure]:
    """Each type, batch and flash setting is tried once; the fastest is then measured against ours at 64 sequences."""
    with tempfile.TemporaryDirectory() as folder:
        tried: dict[tuple[str, int, bool], float] = {}
        files = {"same": path}
        for kind in ("Q4_0", "Q8_0", "F16"):
            files[kind] = Path(folder) / f"{kind}.gguf"
            llamacpp.quantize(path, files[kind], kind)
        for kind, file in files.items():
            for streams in (32, 64):
                for flash in (False, True):
                    r = Runner(file, streams, flash=flash, extra=True)
                    tried[kind, streams, flash] = max(r.decode(6), r.decode(6))
                    r.close()
        kind, streams, flash = max(tried, key=lambda k: tried[k])
        runners = {"ours": Runner(path, 64, "lowrank"), "stock": Runner(files[kind], streams, flash=flash, extra=True)}
        median = alternate({k: lambda r=r: r.decode(8) for k, r in runners.items()}, rounds)
        yield figure(
            "rollout_mixed_lowrank_vs_best_stock", median["ours"], median["stock"], "tokens/s", rounds,
            best=f"{kind} x {streams}{' flash' * flash}",
            tried={f"{a} x {b}{' flash' * c}": round(v, 1) for (a, b, c), v in tried.items()},
        )  # fmt: skip
        for r in runners.values():
            r.close()


SHAPES = ((576, 576, 2), (192, 576, 2), (1536, 576, 2), (576, 1536, 1))
"""Rows, columns and how many there are of them in a layer of SmolLM2-135M."""


def share_of_peak(rounds: int, columns: int) -> Figure:
    """A layer's products (Q4_1 with 4-bit planes, every column its own member) against multiply-adds on registers."""
    library, rng = native.lib(), np.random.default_rng(0)
    kind = native.NoiseKind(1, 1)
    table = (native.Member * columns)(*[native.Member(m.key, m.amplitude, m.slot) for m in members(columns)])
    owner = np.arange(columns, dtype=np.int32)
    cases = []
    for rows, cols, times in SHAPES:
        base = np.zeros((rows * cols // 32, 20), np.uint8)
        base[:, :4] = np.array([0x2000, 0xA400], np.uint16).view(np.uint8)
        base[:, 4:] = rng.integers(0, 256, (len(base), 16), np.uint8)
        plane = rng.integers(0, 256, rows * cols // 2, np.uint8)
        x, y = rng.standard_normal((columns, cols)).astype(np.float32), np.empty((columns, rows), np.float32)
        t = native.Tensor(type=3, rows=rows, cols=cols, row_stride=cols // 32 * 20, id=7, rho=0.2, bits=4)
        t.base, t.plane = native.pointer(base), native.pointer(plane)
        xs = (ctypes.c_void_p * columns)(*[x[c].ctypes.data for c in range(columns)])
        ys = (ctypes.c_void_p * columns)(*[y[c].ctypes.data for c in range(columns)])
        cases.append((t, xs, ys, times, (base, plane, x, y)))
    macs = sum(rows * cols * times for rows, cols, times in SHAPES) * columns

    def products() -> float:
        begin = time.perf_counter()
        for _ in range(20):
            for t, xs, ys, times, _kept in cases:
                for _ in range(times):
                    code = library.edgees_product(
                        ctypes.byref(t), ctypes.byref(kind), table, native.pointer(owner), columns, xs, ys
                    )
                    native.check(code, "product")
        return 20 * macs / (time.perf_counter() - begin) / 1e9

    def peak() -> float:
        begin = time.perf_counter()
        return float(library.edgees_peak(20_000_000)) / (time.perf_counter() - begin) / 1e9

    median = alternate({"products": products, "peak": peak}, rounds)
    name = "rollout_share_of_peak" + ("" if columns == 64 else f"_{columns}")
    return figure(name, median["products"], median["peak"], "G multiply-adds/s", rounds, columns=columns)


def prompt(path: Path, rounds: int, _: argparse.Namespace) -> Iterator[Figure]:
    for length in (128, 512):
        runners = stock(path, 1, micro=512) | {"ours": Runner(path, 1, "lowrank", micro=512)}
        median = alternate({k: lambda r=r, n=length: r.prompt(n) for k, r in runners.items()}, rounds)
        yield figure(f"prompt_vs_same_file_{length}", median["ours"], best_stock(median), "tokens/s", rounds)
        for r in runners.values():
            r.close()


def decode(path: Path, rounds: int, _: argparse.Namespace) -> Iterator[Figure]:
    kinds = ("lowrank", "lowrank/adapter", "sign")
    runners = stock(path, 1) | {kind: Runner(path, 1, kind) for kind in kinds}
    median = alternate({k: lambda r=r: r.decode(48) for k, r in runners.items()}, rounds)
    for kind in kinds:
        yield figure(f"decode1_{kind.replace('/', '_')}", median[kind], best_stock(median), "tokens/s", rounds)
    for r in runners.values():
        r.close()
    yield answers(path, rounds)


def demo(engine: llamacpp.LlamaCppEngine, rows: int) -> tuple[list[tuple[int, ...]], int]:
    """Prompts of the demo task, and how long its answers may be."""
    from edgees.tasks import load_task

    task = load_task(TASK)
    return [tuple(engine.encode_chat(task.conversation(row))) for row in task.train[:rows]], task.max_tokens


def answers(path: Path, rounds: int) -> Figure:
    """Whole answers, one at a time: sign noise with drafts from other members' answers, against stock's plain ones."""
    runners = stock(path, 1) | {"ours": Runner(path, 1, "sign")}
    prompts, limit = demo(runners["ours"].engine, 1)
    owners = members(6)

    def run(name: str) -> float:
        r = runners[name]
        asked = [Request(m if name == "ours" else CENTRE, p, limit) for p in prompts for m in owners]
        r.context.scheduler.forget()
        begin = time.perf_counter()
        if name == "ours":
            done = r.engine.generate(asked)
        else:  # stock keeps no drafts; each answer from a fresh context, as ours
            done = []
            for request in asked:
                r.context.scheduler.forget()
                done += r.engine.generate([request])
        return sum(len(c.tokens) for c in done) / (time.perf_counter() - begin)

    median = alternate({name: lambda name=name: run(name) for name in runners}, rounds)
    for r in runners.values():
        r.close()
    return figure("answer_sign_speculative", median["ours"], best_stock(median), "tokens/s", rounds)


def whole_generation(path: Path, pairs: int = 16, rows: int = 16, limit: int = 16) -> tuple[float, float, int]:
    """Seconds of the rollouts and of the update of one generation of the demo task, and tokens computed."""
    from edgees.delta import Step

    with tempfile.TemporaryDirectory() as folder, llamacpp.LlamaCppEngine(path) as engine:
        delta = attach(engine, Path(folder), "lowrank", "refined")
        prompts, _ = demo(engine, rows)
        owners = members(2 * pairs, pairs)
        asked = [Request(m, p, limit) for m in owners for p in prompts]
        engine.generate(asked[:2])
        begin = time.perf_counter()
        done = engine.generate(asked)
        middle = time.perf_counter()
        keys = tuple(m.key for m in owners[::2])
        delta.apply(Step(1, keys, tuple(range(pairs)), tuple(0.001 for _ in keys), 1.0))
        engine.refresh()
        end = time.perf_counter()
        tokens = sum(len(c.tokens) for c in done)
    return middle - begin, end - middle, tokens


def update(path: Path, _: int, __: argparse.Namespace) -> Iterator[Figure]:
    runs = [whole_generation(path) for _ in range(3)]
    rollouts, step = (statistics.median(r[i] for r in runs) for i in (0, 1))
    print(f"{'(rollouts, update)':38} {rollouts:10.2f} {step:10.2f} s", file=sys.stderr)
    # The generation's time takes the place of a rival's: the ratio says how little the update is.
    yield figure("generation_over_update", rollouts + step, step, "s", 3)


def generation(path: Path, _: int, arguments: argparse.Namespace) -> Iterator[Figure]:
    if not arguments.torch_python:
        print("generation: skipped, --torch-python names no interpreter with torch and transformers", file=sys.stderr)
        return
    pairs, rows, limit, measured = 16, 16, 16, 2
    with llamacpp.LlamaCppEngine(path, plain=True) as engine:
        prompts, _ = demo(engine, rows)
    script = Path(__file__).with_name("bench_in_place.py")
    command = [arguments.torch_python, str(script), str(path), str(measured), str(limit), json.dumps(prompts)]
    runs, rivals = [], []
    for _ in range(2):
        rivals.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        runs.append(whole_generation(path, pairs, rows, limit))
    ours = statistics.median(r + s for r, s, _ in runs)
    per_member = statistics.median(r["seconds_per_member"] for r in rivals)
    # Seconds: the smaller the better, so the rival's time is divided by ours.
    memory_of = {k: r for k, r in rivals[0].items() if k.endswith("bytes")}
    yield figure("generation_vs_in_place", 2 * pairs * per_member, ours, "s", 2, members_measured=measured, **memory_of)
    if "eggroll_members" in rivals[0]:
        per_member = statistics.median(r["eggroll_seconds_per_member"] for r in rivals)
        measured = rivals[0]["eggroll_members"]
        yield figure("generation_vs_eggroll_es", 2 * pairs * per_member, ours, "s", 2, members_measured=measured)


def plain(path: str, task: str) -> None:
    """Child process: plain llama.cpp does what one generation of tune asks for: an evaluation, then as many answers, or
    likelihoods, as there are members and rows."""
    from edgees import opening
    from edgees import rollout as play
    from edgees.config import load
    from edgees.tune import peak_rss_bytes

    with ExitStack() as stack:
        config = load(None, {"model": path, "task": task, **({} if task == TASK else {"sigma": 0.02})})
        engine = llamacpp.LlamaCppEngine(path, plain=True)
        setup = opening.open_setup(config, stack, engine)
        replies, rows = setup.replies(0, 0.0), setup.task.train[: setup.config.rows]
        play.play(engine, play.every([CENTRE], setup.heldout()[:8]), replies)
        rollouts = play.every([CENTRE] * setup.config.members, rows)
        if setup.config.loglik:
            play.likelihood(engine, rollouts, replies)
        else:
            play.play(engine, rollouts, replies)
        print(peak_rss_bytes())


def memory(path: Path, _: int, __: argparse.Namespace) -> Iterator[Figure]:
    """Episodes at a sigma with which members play as the model itself: others may play longer, which takes memory."""
    shop = Path(__file__).resolve().parents[1] / "edgees" / "examples" / "shop" / "shop.py"
    for task, prefix in ((TASK, "memory"), (f"env:{shop}:Shop", "memory_episodes")):
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench"
        code += f"; bench.plain({str(path)!r}, {task!r})"
        rival = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for scope, name in (("adapter", "inference_over_tune"), ("full", "inference_over_tune_full")):
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable, "-m", "edgees", "tune", "--model", str(path), "--task", task, "--generations", "1",
                    "--eval-every", "0", "--eval-rows", "8", "--scope", scope, "--run", f"{folder}/run", "--json",
                    *(() if task == TASK else ("--sigma", "1e-6")),
                ]  # fmt: skip
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                peak = int(json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"])
            # MiB: the smaller the better, so inference is divided by tuning.
            size = os.path.getsize(path) / 2**20
            yield figure(f"{prefix}_{name}", rival / 2**20, peak / 2**20, "MiB", 1, file_mib=size)


def large(path: Path, rounds: int, _: argparse.Namespace) -> Iterator[Figure]:
    steps = 4
    with tempfile.TemporaryDirectory() as folder:
        for kind, name in (("Q4_K", "rollout_1b"), ("Q4_0", "rollout_1b_q4_0")):
            big = write_large(path, Path(folder) / f"{kind}.gguf", kind)
            for streams in (16, 32):
                rivals = stock(big, streams)
                rivals |= {f"{k} repacked": Runner(big, streams, flash=r.flash, extra=True) for k, r in rivals.items()}
                runners = rivals | {"ours": Runner(big, streams, "lowrank")}
                median = alternate({k: lambda r=r: r.decode(steps) for k, r in runners.items()}, rounds)
                yield figure(
                    f"{name}{'' if streams == 32 else f'_x{streams}'}_vs_same_file", median["ours"], best_stock(median),
                    "tokens/s", rounds, file_mib=os.path.getsize(big) / 2**20,
                    stock={k: round(v, 1) for k, v in median.items() if k != "ours"},
                )  # fmt: skip
                for r in runners.values():
                    r.close()
            big.unlink()


def write_large(template: Path, out: Path, kind: str) -> Path:
    """A random model of 1.1 billion weights (22 layers, 2048 wide) with the tokenizer of another file.

    Q4_K stands for the mixture Q4_K_M: token table, half of the values and of the last products of a layer are Q6_K.
    """
    import gguf

    rng = np.random.default_rng(0)
    source = gguf.GGUFReader(template)
    layers, width, inner, heads, groups = 22, 2048, 5632, 32, 4
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    for name, entry in source.fields.items():
        if name.startswith("tokenizer."):
            sub = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub)
    vocabulary = len(source.fields["tokenizer.ggml.tokens"].data)
    sizes = {"Q4_K": (256, 144), "Q6_K": (256, 210), "Q4_0": (32, 18)}

    def matrix(name: str, rows: int, cols: int, better: bool = False) -> None:
        kind_of = "Q6_K" if better and kind == "Q4_K" else kind
        weights, size = sizes[kind_of]
        raw = rng.integers(0, 256, (rows, cols // weights, size), np.uint8)
        scale = np.float16(0.02 / 16 / {"Q4_K": 32, "Q6_K": 256, "Q4_0": 1}[kind_of])
        at = size - 2 if kind_of == "Q6_K" else 0
        raw[:, :, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        if kind_of == "Q4_K":
            raw[:, :, 2:4] = np.array([scale * 7], np.float16).view(np.uint8)
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind_of])

    def vector(name: str) -> None:
        writer.add_tensor(name, np.ones(width, np.float32))

    matrix("token_embd.weight", vocabulary, width, True)
    for i in range(layers):
        vector(f"blk.{i}.attn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", width, width)
        matrix(f"blk.{i}.attn_k.weight", width // heads * groups, width)
        matrix(f"blk.{i}.attn_v.weight", width // heads * groups, width, i % 2 == 0)
        matrix(f"blk.{i}.attn_output.weight", width, width)
        vector(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.ffn_gate.weight", inner, width)
        matrix(f"blk.{i}.ffn_up.weight", inner, width)
        matrix(f"blk.{i}.ffn_down.weight", width, inner, i % 2 == 0)
    vector("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


PARTS = {
    "rollout": rollout, "prompt": prompt, "decode": decode, "update": update, "generation": generation,
    "memory": memory, "large": large,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=list(PARTS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch-python", help="interpreter with torch and transformers, for `generation`")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from edgees.model_path import resolve

    path = Path(resolve(arguments.model))
    without_amx()
    figures: list[Figure] = []
    try:
        for what in arguments.what:
            for found in PARTS[what](path, arguments.rounds, arguments):
                figures.append(found)
    finally:  # what was measured before a failure counts
        if arguments.json:
            print(json.dumps({"machine": machine(), "figures": figures}))


if __name__ == "__main__":
    main()
