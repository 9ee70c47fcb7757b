"""What scripts/gpu_check.sh runs: see there.

``--compile-only`` asks nvcc for every architecture and prints a table of registers and spills. Otherwise, on the first
card: the modules are built; noise, updates, rows and products are compared with the compiled core and with float64;
products are timed against bitsandbytes' unperturbed 4-bit ones and against a plain copy of memory, all in CUDA graphs
over enough copies of the weights that the card's cache does not help; and a short ``edgees tune`` runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hf_from_gguf import convert

from edgees import blocks, cuda, native, nf4, noise
from edgees.cuda import Adapter, CudaDriver, Kernels, Members, Nested, Weight
from edgees.errors import EdgeesError

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
BUDGET = 570.0
"""Seconds that a whole run may take; what comes last is left out rather than that."""
TENSOR, SEED, RHO, RANK = 0x1234ABCD, 7, 0.03, 1
ROUNDOFF = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}


# ---- compiling for cards that are not here
@dataclass
class Usage:
    """What a kernel takes on one architecture."""

    registers: int
    shared: int
    spills: int


def usage(nvcc: str, arch: int) -> dict[str, Usage]:
    """kernel -> what ptxas says of it. Raises CalledProcessError when the source does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        source = str(cuda.source_folder() / "cuda" / "kernels.cu")
        command = [nvcc, "-std=c++17", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", "-o", f"{folder}/out", source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    found: dict[str, Usage] = {}
    for block in done.stderr.split("Compiling entry function '")[1:]:
        registers, spills = re.search(r"Used (\d+) registers", block), re.search(r"(\d+) bytes spill stores", block)
        assert registers and spills, block
        shared = re.search(r"(\d+) bytes smem", block)
        found[block.split("'")[0]] = Usage(int(registers[1]), int(shared[1]) if shared else 0, int(spills[1]))
    return found


def table(found: dict[int, dict[str, Usage]]) -> str:
    """Markdown: a row per kernel, registers per architecture, bytes spilled behind a plus sign."""
    lines = [
        "| kernel | shared memory, bytes | " + " | ".join(f"sm_{arch}" for arch in found) + " |",
        "|---" * (len(found) + 2) + "|",
    ]
    first = next(iter(found.values()))
    for kernel in sorted(first):
        each = [found[arch][kernel] for arch in found]
        cells = [f"{u.registers}" + (f" +{u.spills}" if u.spills else "") for u in each]
        lines.append(f"| `{kernel}` | {max(u.shared for u in each)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compile_only(write: bool) -> int:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("nothing compiled: there is no nvcc on the PATH (the kernels' tests on the host need none)")
        return 0
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        try:
            made = list(pool.map(lambda arch: usage(nvcc, arch), ARCHITECTURES))
        except subprocess.CalledProcessError as error:
            print(f"error: {' '.join(error.cmd[:3])} failed", file=sys.stderr)
            return 1
    text = table(dict(zip(ARCHITECTURES, made, strict=True)))
    print(text)
    version = cuda.Nvcc(nvcc).name
    print(f"\n{version}, {len(made[0])} kernels, {len(made)} architectures, {time.monotonic() - started:.0f} s")
    if write:
        path = ROOT / "docs" / "gpu.md"
        page = path.read_text(encoding="utf-8")
        mark = re.compile(r"(<!-- registers -->\n).*?(<!-- /registers -->)", re.S)
        page, count = mark.subn(lambda m: f"{m[1]}\n{version}:\n\n{text}\n\n{m[2]}", page)
        assert count == 1, f"{path} has no place for the table"
        path.write_text(page, encoding="utf-8")
    return 0


# ---- correctness on the card
@dataclass
class Bench:
    """torch, the kernels, and where tensors live."""

    torch: Any
    kernels: Kernels
    device: str
    started: float = field(default_factory=time.monotonic)
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def left(self) -> float:
        return BUDGET - (time.monotonic() - self.started)

    def put(self, array: np.ndarray) -> Any:
        """The array on the device; unsigned types as the signed ones of the same size."""
        signed = {np.dtype(np.uint64): np.int64, np.dtype(np.uint32): np.int32}.get(array.dtype)
        return self.torch.from_numpy(np.ascontiguousarray(array.view(signed) if signed else array)).to(self.device)

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream) if self.device == "cuda" else 0

    def dtype(self, name: str) -> Any:
        return {"F32": self.torch.float32, "F16": self.torch.float16, "BF16": self.torch.bfloat16}[name]

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        self.checks.append({"name": name, "ok": bool(ok), **({"detail": detail} if detail else {})})
        print(f"{'ok   ' if ok else 'FAIL '} {name} {detail}", flush=True)


@dataclass
class Held:
    """A weight on the device, its tensors, and its value in float32 (NumPy)."""

    weight: Weight
    tensors: list[Any]
    full: np.ndarray
    quantised: nf4.Quantised | None = None


def held(b: Bench, kind: str, rows: int, cols: int, nested: bool = True, seed: int = 0) -> Held:
    w = np.random.default_rng([rows, cols, seed]).normal(0, RHO, (rows, cols)).astype(np.float32)
    if kind not in ("NF4", "FP4"):
        base = b.torch.from_numpy(w).to(b.dtype(kind)).to(b.device)
        weight = Weight(kind, rows, cols, base.data_ptr(), cell=float(np.float32(RHO / 4)))
        return Held(weight, [base], base.float().cpu().numpy())
    q = nf4.quantise(w, kind.lower(), nested)
    base = b.put(q.packed)
    if q.nested is None:
        absmax = b.put(q.absmax_float32())
        return Held(
            Weight(kind, rows, cols, base.data_ptr(), absmax=absmax.data_ptr()), [base, absmax], q.dequantise(), q
        )
    parts = [b.put(part) for part in (q.nested.codes, q.nested.table, q.nested.absmax)]
    packed = Nested(*(part.data_ptr() for part in parts), float(q.nested.offset))
    return Held(Weight(kind, rows, cols, base.data_ptr(), nested=packed), [base, *parts], q.dequantise(), q)


@dataclass
class Crowd:
    """Members on the device, and their values."""

    keys: np.ndarray
    amplitudes: np.ndarray
    owner: np.ndarray
    tensors: list[Any]
    members: Members


def crowd(b: Bench, kind: str, n: int, count: int = 3, rank: int = RANK) -> Crowd:
    keys = np.array([noise.make_key(SEED, 1, p) for p in range(count)], np.uint64)
    amplitudes = np.array([0.05, -0.05, 0.2, 0.0][:count], np.float32)
    owner = np.sort(np.arange(n) % count).astype(np.int32)
    slots = np.arange(count, dtype=np.uint32)
    tensors = [b.put(part) for part in (keys, amplitudes, owner, slots)]
    at = [t.data_ptr() for t in tensors]
    return Crowd(keys, amplitudes, owner, tensors, Members(kind, rank, at[0], at[1], at[2], at[3]))


def bits(x: Any) -> np.ndarray:
    return np.asarray(x.cpu().numpy() + np.float32(0)).view(np.uint32)


def check_noise(b: Bench, rows: int = 2000, cols: int = 5003) -> None:
    """10^7 numbers of each kind, and updates of several pairs, bit for bit."""
    key, one = b.put(np.array([noise.make_key(SEED, 1, 2)], np.uint64)), b.put(np.ones(1, np.float32))
    for kind in noise.KINDS:
        out = b.put(np.zeros((rows, cols), np.float32))
        b.kernels.delta_apply(
            out.data_ptr(), rows, cols, tensor=TENSOR, kind=kind, rank=3, pairs=1, keys=key.data_ptr(),
            coefs=one.data_ptr(), keep=0.0, row0=11, stream=b.stream(),
        )  # fmt: skip
        want = noise.eps(kind, noise.make_key(SEED, 1, 2), TENSOR, rows, cols, rank=3, row0=11)
        b.check(
            f"{rows * cols:.0e} numbers of {kind}", np.array_equal(bits(out), (want + np.float32(0)).view(np.uint32))
        )
    keys = np.array([noise.make_key(SEED, 2, p) for p in range(40)], np.uint64)
    slots = np.arange(40, dtype=np.uint32) * 1001
    coefs = np.random.default_rng(0).normal(0, 1, 40).astype(np.float32)
    on = [b.put(part) for part in (keys, slots, coefs)]
    start = np.random.default_rng(1).normal(0, 1, (300, 577)).astype(np.float32)
    for kind in noise.KINDS:
        got, want = b.put(start.copy()), start.copy()
        b.kernels.delta_apply(
            got.data_ptr(), 300, 577, tensor=TENSOR, kind=kind, rank=2, pairs=40, keys=on[0].data_ptr(),
            coefs=on[2].data_ptr(), keep=0.9, stream=b.stream(),
        )  # fmt: skip
        code = native.lib().edgees_delta_apply(
            native.pointer(want), 300, 577, 0, TENSOR, noise.KINDS.index(kind), 2, 0, 40, native.pointer(keys),
            native.pointer(coefs), 0.9,
        )  # fmt: skip
        b.check(f"update of delta, {kind}", code == 0 and np.array_equal(bits(got), bits(b.put(want))))
    got, want = b.put(start.copy()), start.copy()
    b.kernels.factors_apply(
        got.data_ptr(), 300, 577, tensor=TENSOR, rank=2, pairs=40, keys=on[0].data_ptr(), slots=on[1].data_ptr(),
        coefs=on[2].data_ptr(), keep=0.9, stream=b.stream(),
    )  # fmt: skip
    code = native.lib().edgees_factors_apply(
        native.pointer(want), 300, 577, TENSOR, 2, 40, native.pointer(keys), native.pointer(slots),
        native.pointer(coefs), 0.9,
    )  # fmt: skip
    b.check("update of factors", code == 0 and np.array_equal(bits(got), bits(b.put(want))))


def check_planes_and_rows(b: Bench, rows: int = 257, cols: int = 576) -> None:
    delta = np.random.default_rng(2).normal(0, RHO / 8, (rows, cols)).astype(np.float32)
    order, index = np.arange(rows, dtype=np.int32), np.arange(0, rows, 2)
    for kind, n_bits in itertools.product(("NF4", "FP4", "F32"), (2, 4, 8)):
        h = held(b, kind, rows, cols, nested=False)
        raw = h.quantised.interleaved() if h.quantised else h.full
        want = blocks.plane_encode(
            kind, raw.view(np.uint8), delta, order, noise.dither_key(SEED), TENSOR, n_bits, 2, RHO
        )
        on, got = b.put(delta), b.put(np.zeros_like(want))
        b.kernels.plane_encode(
            h.weight, on.data_ptr(), rows, got.data_ptr(), bits=n_bits, span=2, dither_key=noise.dither_key(SEED),
            tensor=TENSOR, stream=b.stream(),
        )  # fmt: skip
        b.check(f"plane of {n_bits} bits beside {kind}", np.array_equal(got.cpu().numpy(), want))
        full = blocks.effective(kind, raw.view(np.uint8), rows, cols, want, n_bits, 2, RHO)
        w = Weight(
            kind, rows, cols, h.weight.base, absmax=h.weight.absmax, plane=got.data_ptr(), bits=n_bits, span=2,
            cell=h.weight.cell,
        )  # fmt: skip
        for noisy in noise.KINDS:
            c, on_index = crowd(b, noisy, len(index)), b.put(index)
            out = b.put(np.zeros((len(index), cols), np.float32))
            b.kernels.rows(
                w, on_index.data_ptr(), out.data_ptr(), len(index), dtype="F32", tensor=TENSOR, rho=RHO,
                members=c.members, stream=b.stream(),
            )  # fmt: skip
            values = [np.float32(np.float32(a) * np.float32(RHO)) for a in c.amplitudes]
            all_eps = [noise.eps(noisy, int(k), TENSOR, rows, cols, rank=RANK) for k in c.keys]
            told = np.stack([full[r] + values[o] * all_eps[o][r] for r, o in zip(index, c.owner, strict=True)])
            # normals: two ways of rounding the product of three numbers
            close = np.abs(out.cpu().numpy() - told).max() <= (0 if noisy != "normal" else 2e-7)
            b.check(f"rows of {kind} with {n_bits} bits, {noisy}", bool(close))


def check_products(b: Bench, shapes: list[tuple[int, int]], columns: tuple[int, ...]) -> None:
    """Products against float64, within the bound of tests/test_cuda.py."""
    torch = b.torch
    for (rows, cols), kind, dtype, noisy in itertools.product(
        shapes, ("NF4", "BF16"), ("BF16", "F16", "F32"), (None, *noise.KINDS)
    ):
        h = held(b, kind, rows, cols)
        full = torch.from_numpy(h.full).to(b.device).double()
        worst = 0.0
        for n in columns:
            c = crowd(b, noisy, n) if noisy else None
            x = torch.from_numpy(np.random.default_rng(n).normal(0, 1, (n, cols))).to(b.dtype(dtype)).to(b.device)
            y = torch.full((n, rows), math.nan, dtype=b.dtype(dtype), device=b.device)
            dots = torch.empty(n * RANK, dtype=torch.float32, device=b.device)
            b.kernels.linear(
                h.weight, x.data_ptr(), y.data_ptr(), n, dtype=dtype, tensor=TENSOR, rho=RHO,
                members=c.members if c else None, dots=dots.data_ptr(), together=n // 3, stream=b.stream(),
            )  # fmt: skip
            want, size = x.double() @ full.T, x.double().abs() @ full.abs().T
            for m in range(len(c.keys) if c else 0):
                assert c is not None
                eps = noise.eps(str(noisy), int(c.keys[m]), TENSOR, rows, cols, rank=RANK)
                moved = torch.from_numpy(eps).to(b.device).double() * float(
                    np.float32(c.amplitudes[m]) * np.float32(RHO)
                )
                mine = torch.from_numpy(c.owner == m).to(b.device)
                want[mine] += x[mine].double() @ moved.T
                size[mine] += x[mine].double().abs() @ moved.abs().T
            bound = size * (cols + 40) * 2.0**-24 + want.abs() * ROUNDOFF[dtype] + 2.0**-24
            if n > Kernels.FEW:
                bound += size * ROUNDOFF[dtype] + (math.sqrt(cols) * 2.0**-14 if dtype == "F16" else 0)
            error = (y.double() - want).abs() / bound
            worst = max(worst, float(error.max()) if bool(error.isfinite().all()) else math.inf)
        b.check(f"products {rows}x{cols} {kind} {dtype} {noisy or 'plain'}", worst <= 1, f"{worst:.2f} of the bound")


def check_adapter(b: Bench, rows: int = 300, cols: int = 577, factors: int = 32) -> None:
    torch = b.torch
    h = held(b, "NF4", rows, cols)
    a = np.random.default_rng(3).normal(0, 0.002, (rows, factors)).astype(np.float32)
    pool = noise.pool(SEED, TENSOR, cols, factors)
    on = [b.put(a), b.put(noise.pool_packed(SEED, TENSOR, cols, factors))]
    adapter = Adapter(factors, on[0].data_ptr(), on[1].data_ptr())
    for n in (3, 100):
        c = crowd(b, "lowrank", n)
        x = torch.from_numpy(np.random.default_rng(n).normal(0, 1, (n, cols)).astype(np.float32)).to(b.device)
        y, dots = torch.empty((n, rows), device=b.device), torch.empty(n * factors, device=b.device)
        b.kernels.linear(
            h.weight, x.data_ptr(), y.data_ptr(), n, dtype="F32", tensor=TENSOR, rho=RHO, members=c.members,
            adapter=adapter, dots=dots.data_ptr(), stream=b.stream(),
        )  # fmt: skip
        worst = 0.0
        for j in range(n):
            m = int(c.owner[j])
            delta = a.astype(np.float64) @ pool.T
            left = noise.sign_vector(int(c.keys[m]), TENSOR, noise.LEFT, rows)
            delta += float(np.float32(c.amplitudes[m]) * np.float32(RHO)) * np.outer(left, pool[:, m % factors])
            want = (h.full + delta) @ x[j].cpu().numpy().astype(np.float64)
            worst = max(worst, float(np.abs(y[j].cpu().numpy() - want).max()))
        b.check(f"adapter, {n} columns", worst < 1e-3, f"{worst:.1e}")


# ---- speed
def clock(b: Bench, calls: list[Callable[[], Any]], rounds: int = 7) -> list[float]:
    """Seconds of one call: all calls captured in one CUDA graph, which is replayed ``rounds`` times."""
    torch = b.torch
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return times


def figure(b: Bench, name: str, ours: list[float], rival: list[float], unit: str, per: float) -> None:
    """``per``: what one call moves or computes; value and rival are rates, so that a ratio above 1 means better."""
    value, other = per / statistics.median(ours), per / statistics.median(rival)
    b.figures.append(
        {"name": name, "value": value, "rival": other, "ratio": value / other, "unit": unit, "runs": len(ours)}
    )
    print(f"      {name}: {value:.4g} {unit}, rival {other:.4g}, ratio {value / other:.2f}", flush=True)


def copy_rate(b: Bench) -> float:
    """Bytes a second that a plain copy reads and writes."""
    torch = b.torch
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    source, to = (
        torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    rate = 2 * size / statistics.median(clock(b, [lambda: to.copy_(source)]))
    b.figures.append({"name": "copy", "value": rate / 1e9, "rival": None, "ratio": None, "unit": "GB/s", "runs": 7})
    print(f"      copy: {rate / 1e9:.0f} GB/s", flush=True)
    return float(rate)


def speeds(b: Bench, shapes: list[tuple[int, int]], columns: tuple[int, ...], copy: float) -> Iterator[None]:
    """GEMV and tiles of NF4 with bfloat16 activations against bitsandbytes' product without noise."""
    import bitsandbytes
    from bitsandbytes import functional

    torch = b.torch
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    for rows, cols in shapes:
        size = rows * cols // 2
        copies = max(2, min(48, math.ceil(3 * cache / size)))
        theirs, mine, keep = [], [], []
        for _ in range(copies):
            w = torch.randn((rows, cols), device="cuda", dtype=torch.bfloat16) * RHO
            packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
            theirs.append((packed, state))
            parts = [state.absmax, state.state2.code.float(), state.state2.absmax]
            nested = Nested(*(part.data_ptr() for part in parts), float(state.offset))
            mine.append(Weight("NF4", rows, cols, packed.data_ptr(), nested=nested))
            keep += parts
        for n in columns:
            x = torch.randn((n, cols), device="cuda", dtype=torch.bfloat16)
            y = torch.empty((n, rows), device="cuda", dtype=torch.bfloat16)
            dots = torch.empty(n, device="cuda", dtype=torch.float32)
            rival = clock(
                b,
                [lambda p=p, s=s, x=x: bitsandbytes.matmul_4bit(x, p.t(), quant_state=s) for p, s in theirs],  # type: ignore[misc]
            )
            # codes, absmax in 8 bits and its own, activations and results
            moved = size + rows * cols / 64 * (1 + 4 / 256) + 2 * n * (rows + cols)
            for noisy in (None, "lowrank", "sign", "normal"):
                c = crowd(b, noisy, n, count=min(n, 4)) if noisy else None

                def one(w: Weight, c: Crowd | None = c, x: Any = x, y: Any = y, dots: Any = dots, n: int = n) -> None:
                    b.kernels.linear(
                        w, x.data_ptr(), y.data_ptr(), n, dtype="BF16", tensor=TENSOR, rho=RHO,
                        members=c.members if c else None, dots=dots.data_ptr(), together=n // 4, stream=b.stream(),
                    )  # fmt: skip

                ours = clock(b, [lambda w=w: one(w) for w in mine])  # type: ignore[misc]
                name = f"{noisy or 'plain'} {rows}x{cols} n={n}"
                if n <= Kernels.FEW:
                    figure(b, name, ours, rival, "GB/s", moved / 1e9)
                    b.figures[-1]["of_copy"] = moved / statistics.median(ours) / copy
                else:
                    figure(b, name, ours, rival, "TFLOP/s", 2e-12 * n * rows * cols)
                yield
        del theirs, mine, keep


def tune(b: Bench, model: str | None) -> dict[str, Any]:
    """A short run of the whole product on the card, of the embedded model where none is named."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = f"{folder}/model"
            try:
                convert("smollm2-135m", Path(model))
            except EdgeesError as error:
                return {"skipped": f"no --model, and {error.message}"}
        seconds = int(min(240, b.left() - 60))
        if seconds < 60:
            return {"skipped": "no time left"}
        command = [
            sys.executable, "-m", "edgees", "tune", "--engine", "torch", "--model", model, "--task", "sums",
            "--time", f"{seconds}s", "--run", f"{folder}/run", "--json",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(60.0, b.left() - 5))
        except subprocess.TimeoutExpired:
            return {"failed": "it did not end in time", "command": command[2:]}
    if done.returncode:
        return {"failed": done.stderr[-2000:], "command": command[2:]}
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def on_the_card(model: str | None, out: Path) -> int:
    try:
        import torch
    except ImportError:
        print("error: torch is not installed\nhint: a CUDA build of torch, and bitsandbytes", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("error: torch sees no card\nhint: --compile-only needs none", file=sys.stderr)
        return 1
    told = cuda.describe()
    if not told["ok"]:
        print(f"error: {told['error']}\nhint: {told.get('hint', '-')}", file=sys.stderr)
        return 1
    from edgees import ops

    torch.cuda.init()
    kernels = cuda.kernels()
    b = Bench(torch, kernels, "cuda")
    driver = kernels.driver
    assert isinstance(driver, CudaDriver)
    begin = time.monotonic()
    for part in cuda.PARTS.values():
        cuda.module(part, driver.arch, driver.compiler)
    report: dict[str, Any] = {
        "machine": told | {"torch": torch.__version__, "cuda": torch.version.cuda},
        "build_seconds": time.monotonic() - begin,
    }
    faults: list[str] = []
    for what in (
        lambda: check_noise(b),
        lambda: check_planes_and_rows(b),
        lambda: check_products(b, [(576, 1536), (63, 65), (130, 1056)], (1, 4, 16, 60, 300)),
        lambda: check_adapter(b),
        lambda: b.check("operators use the kernels", ops.arm(torch.device("cuda", 0)) is not None),
    ):
        try:
            what()
        except (EdgeesError, RuntimeError, AssertionError) as error:  # the rest is still worth knowing
            faults.append(f"{type(error).__name__}: {error}")
            print(f"FAIL  {faults[-1]}", flush=True)
    if not faults:
        copy = copy_rate(b)
        shapes = [(4096, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (576, 1536)]
        for _ in speeds(b, shapes, (1, 4, 16, 64, 512), copy):
            if b.left() < 240:
                faults.append("not all speeds were measured: no time left")
                break
    report |= {"checks": b.checks, "figures": b.figures, "faults": faults}
    report["tune"] = tune(b, model)
    report["seconds"] = time.monotonic() - b.started
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    bad = [check["name"] for check in b.checks if not check["ok"]]
    print(f"{len(b.checks) - len(bad)} checks ok, {len(bad)} failed; {out}")
    return 1 if bad or faults or "failed" in report["tune"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", action="store_true", help="for all architectures, with nvcc; needs no card")
    parser.add_argument("--write", action="store_true", help="put the table of registers into docs/gpu.md")
    parser.add_argument("--model", help="Hugging Face folder to tune for a few minutes (default: SmolLM2-135M)")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    arguments = parser.parse_args()
    if arguments.compile_only:
        return compile_only(arguments.write)
    return on_the_card(arguments.model, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
