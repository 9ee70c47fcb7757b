"""The operators of the torch engine, each in its three arms: the compiled core on the CPU, the CUDA kernels (emulated,
tests/test_cuda.py) and torch's own operations; against float64, against each other, and as torch wants operators."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_cuda
import torch
from test_cuda import RHO, ROUNDOFF, SEED, TENSOR, TYPES, Crowd, EmulatedDriver, Learned, from_dtype, to_dtype

from edgees import blocks, cuda, nf4, noise, ops
from edgees.backends.base import TensorInfo
from edgees.cuda import Kernels
from edgees.delta import Delta, DeltaSpec, Step
from edgees.errors import MissingExtra, UsageError

ROOT = Path(__file__).resolve().parents[1]
library = test_cuda.library  # the fixture
ARMS = ("cpu", "kernels", "plain")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NO_VIEW = (None, 0, 0, None, None)


class Arm:
    """Runs operators by name in one of the arms."""

    def __init__(self, name: str, library: ctypes.CDLL) -> None:
        self.name, self.kernels = name, Kernels(EmulatedDriver(library))

    def __call__(self, operator: str, *arguments: Any) -> Any:
        if self.name == "cpu":
            return getattr(torch.ops.edgees, operator)(*arguments)
        if self.name == "kernels":
            return ops.KERNELS[operator](self.kernels, *arguments)
        return ops.PLAIN[operator](*arguments)


@pytest.fixture(params=ARMS)
def arm(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Arm:
    return Arm(request.param, library)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Which arm a device has is found out anew, before and after."""
    ops.arm.cache_clear()
    yield
    ops.arm.cache_clear()


# ---- what operators are given
def tensor_of(array: np.ndarray, dtype: str = "") -> torch.Tensor:
    """A copy that torch allocated, and aligned."""
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.view(f"i{array.itemsize}")
    copy = torch.from_numpy(np.array(array))
    return copy.view(torch.bfloat16).clone() if dtype == "BF16" else copy.clone()


@dataclass
class Matrix:
    """operator, what it takes of the weight, its cells' width where it takes one; what the weight is in float32."""

    kind: str
    arguments: tuple[Any, ...]
    view: tuple[Any, ...]
    full: np.ndarray
    peak: np.ndarray
    """float32 [rows, cols]: absmax of each weight's block."""

    @property
    def coded(self) -> bool:
        return self.kind in nf4.TABLES or self.kind.lower() in nf4.TABLES

    def product(self, arm: Arm, x: torch.Tensor, c: Crowd, rho: float = RHO, tensor: int = TENSOR) -> torch.Tensor:
        return arm(*self.call(x, c, rho, tensor))

    def call(self, x: torch.Tensor, c: Crowd, rho: float = RHO, tensor: int = TENSOR) -> tuple[Any, ...]:
        if self.coded:
            return ("nf4_linear_perturbed", x, *self.arguments, *members(c), tensor, rho, *self.view)
        return ("linear_perturbed", x, *self.arguments, *members(c), tensor, rho, RHO / 4, *self.view)


def matrix(
    kind: str, rows: int, cols: int, bits: int = 0, nested: bool = False, adapter: Learned | None = None
) -> Matrix:
    rng = np.random.default_rng([rows, cols, bits])
    w = rng.normal(0, RHO, (rows, cols)).astype(np.float32)
    peak = np.zeros_like(w)
    if kind in ("NF4", "FP4"):
        q = nf4.quantise(w, kind.lower(), nested)
        peak = np.repeat(q.absmax_float32(), 64)[: w.size].reshape(w.shape)
        if q.nested is None:
            top: tuple[Any, ...] = (tensor_of(q.absmax_float32()), None, None, 0.0)
        else:
            n = q.nested
            top = (tensor_of(n.codes), tensor_of(n.table), tensor_of(n.absmax), float(n.offset))
        arguments: tuple[Any, ...] = (tensor_of(q.packed), *top, kind.lower(), rows)
        raw, full = None if cols % 64 else q.interleaved(), q.dequantise()
    else:
        base = to_dtype(w, kind)
        arguments, raw, full = (tensor_of(base, kind),), base.view(np.uint8), from_dtype(base, kind)
    view = NO_VIEW
    if bits:
        plane, span = rng.integers(0, 256, (rows, blocks.plane_row_bytes(bits, cols)), np.uint8), 8 - bits
        assert raw is not None
        full = blocks.effective(kind, raw, rows, cols, plane, bits, span, RHO)
        view = (tensor_of(plane), bits, span, None, None)
    if adapter:
        view = (*view[:3], tensor_of(adapter.a), tensor_of(adapter.packed))
    return Matrix(kind, arguments, view, full, peak)


def members(c: Crowd) -> tuple[Any, ...]:
    four = (tensor_of(part) for part in (c.keys, c.amplitudes, c.slots, c.owner))
    return (*four, noise.KINDS.index(c.kind), c.rank)


def inputs(n: int, cols: int, dtype: str = "F32") -> torch.Tensor:
    return tensor_of(np.random.default_rng([n, cols]).normal(0, 1, (n, cols)).astype(np.float32)).to(DTYPES[dtype])


def check_product(arm: Arm, m: Matrix, n: int, dtype: str, c: Crowd, adapter: Learned | None, streams: int = 0) -> None:
    """y against float64. The stated bound: float32 sums, y of x's dtype; on the CPU, x in steps of 2^-14 of the
    largest of its group and NF4's table in steps of 2^-11; in tiles, weights of x's dtype."""
    rows, cols = m.full.shape
    x = inputs(n, cols, dtype)
    if streams:
        y = m.product(arm, x.reshape(streams, n // streams, cols), c)
        assert y.shape == (streams, n // streams, rows)
    else:
        y = m.product(arm, x, c)
        assert y.shape == (n, rows)
    assert y.dtype == x.dtype and y.is_contiguous()
    exact = x.float().numpy()
    want, size = test_cuda.specification(m.full, exact, c, adapter)
    bound = size * (cols + 40) * 2.0**-24 + np.abs(want) * ROUNDOFF[dtype] + 2.0**-24
    if arm.name == "cpu":
        most = np.abs(exact).max(axis=1, keepdims=True)
        bound += test_cuda.specification(m.full, np.broadcast_to(most, exact.shape), c, adapter)[1] * 2.0**-14
        bound += np.abs(exact) @ m.peak.T * 2.0**-12
    elif arm.name == "kernels" and n > Kernels.FEW:
        bound += size * ROUNDOFF[dtype] + (np.sqrt(cols) * 2.0**-14 if dtype == "F16" else 0)
    worst = (np.abs(y.reshape(n, rows).float().numpy() - want) / bound).max()
    assert worst <= 1, f"{worst} times the bound"


# ---- values
@pytest.mark.parametrize("kind", noise.KINDS)
@pytest.mark.parametrize("type_name", TYPES)
def test_products_are_those_of_the_specification(arm: Arm, type_name: str, kind: str) -> None:
    shapes = [(63, 65), (64, 172), (70, 128), (3, 1088)]
    for i, ((rows, cols), (n, streams)) in enumerate(product(shapes, [(1, 0), (5, 0), (20, 2)])):
        c = test_cuda.crowd(kind, n, rank=1 + i % 3, together=bool(streams))
        m = matrix(type_name, rows, cols, nested=i % 2 == 0)
        check_product(arm, m, n, ("F32", "BF16", "F16")[(i + i // 3) % 3], c, None, streams)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("type_name", TYPES)
def test_residual_planes_are_added(arm: Arm, type_name: str, bits: int) -> None:
    for kind, n in product(noise.KINDS, (2, 20)):
        c = test_cuda.crowd(kind, n, together=True)
        check_product(arm, matrix(type_name, 70, 128, bits, nested=n == 2), n, "F32", c, None, n // 10)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("type_name", ["NF4", "BF16"])
def test_adapters_and_their_members(arm: Arm, type_name: str, rank: int) -> None:
    for (rows, cols), n in product([(63, 65), (70, 128)], (3, 20)):
        learned = test_cuda.learned(rows, cols, 5)
        m = matrix(type_name, rows, cols, adapter=learned)
        check_product(arm, m, n, "F32", test_cuda.crowd("lowrank", n, rank), learned)


@pytest.mark.parametrize("type_name", ["NF4", "F16"])
def test_what_is_not_tuned_has_no_noise(arm: Arm, type_name: str) -> None:
    """rho 0: as if all were the centre, to the bit."""
    m, x, c = matrix(type_name, 63, 65), inputs(4, 65), test_cuda.crowd("sign", 4)
    still = Crowd(c.kind, c.rank, c.keys, np.zeros_like(c.amplitudes), c.slots, c.owner)
    torch.testing.assert_close(m.product(arm, x, c, rho=0.0), m.product(arm, x, still), rtol=0, atol=0)


def test_no_columns_are_no_error(arm: Arm) -> None:
    for type_name in ("NF4", "F32"):
        y = matrix(type_name, 64, 128).product(arm, inputs(0, 128), test_cuda.crowd("sign", 0))
        assert y.shape == (0, 64)


@pytest.mark.parametrize("kind", noise.KINDS)
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_rows_of_embeddings(arm: Arm, type_name: str, kind: str) -> None:
    for (rows, cols), bits, adapter in [((63, 65), 0, 0), ((9, 128), 4, 0), ((20, 130), 0, 5)]:
        if adapter and kind != "lowrank":
            continue
        learned = test_cuda.learned(rows, cols, adapter) if adapter else None
        m, c = matrix(type_name, rows, cols, bits, adapter=learned), test_cuda.crowd(kind, 7, rank=2)
        ids = torch.tensor([0, rows - 1, 3, 3, 1, 5, 0])
        got = arm("embedding_perturbed", ids, *m.arguments, *members(c), TENSOR, RHO, RHO / 4, *m.view)
        assert got.dtype == torch.float32 and got.shape == (7, cols)
        want = np.empty((7, cols))
        for i, (row, member) in enumerate(zip(ids.tolist(), c.owner, strict=True)):
            eps = test_cuda.eps_of(c, member, rows, cols, learned)[row]
            base = m.full[row] + (learned.delta[row] if learned else 0)
            want[i] = base + float(c.strength(member)) * eps
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-7)
        if arm.name == "kernels":  # the very bits
            core = torch.ops.edgees.embedding_perturbed
            same = core(ids, *m.arguments, *members(c), TENSOR, RHO, RHO / 4, *m.view)
            np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize("kind", noise.KINDS)
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_vectors_of_members(arm: Arm, type_name: str, kind: str) -> None:
    c = test_cuda.crowd(kind, 5, rank=2)
    keys, amplitudes, _, _, *who = members(c)
    for cols, learned in product((1, 130), (False, True)):
        base = inputs(1, cols, type_name)[0]
        delta = inputs(2, cols)[1] / 50 if learned else None
        arguments = (base, delta, keys, amplitudes, *who, TENSOR, RHO)
        got = arm("vectors_perturbed", *arguments)
        if arm.name == "kernels":  # the very bits
            np.testing.assert_array_equal(got, torch.ops.edgees.vectors_perturbed(*arguments))
        for i, key in enumerate(c.keys):
            want = base.float().numpy() + (delta.numpy() if delta is not None else np.float32(0))
            eps = noise.eps(kind, int(key), TENSOR, 1, cols, rank=2, vector=True)[0]
            np.testing.assert_allclose(got[i], want + c.strength(i) * eps, rtol=0, atol=2.0**-22)


@pytest.mark.parametrize("kind", noise.KINDS)
def test_an_update_is_that_of_a_delta_file(arm: Arm, tmp_path: Path, kind: str) -> None:
    infos = (
        TensorInfo("a.weight", "a", 19, 140, False, RHO), TensorInfo("a.bias", "b", 1, 140, True, 1.0),
    )  # fmt: skip
    spec = DeltaSpec(infos, "refined", 8, 0, kind, 2, SEED)
    step = Step(0, (5, 2**63 + 9, 77), (0, 1, 2), (0.5, -0.25, 3.0), 0.5)
    keys = tensor_of(np.array(step.keys, np.uint64))
    with Delta.create(tmp_path / "delta.safetensors", spec) as delta:
        for generation in (0, 1):
            step = Step(generation, step.keys, step.slots, step.coefs, step.keep)
            before = {t.name: delta.rows(t.name, 0, t.rows) for t in infos}
            delta.apply(step)
            for t in infos:
                coefs = torch.tensor(step.coefs) * np.float32(spec.scale(t)).item()
                held = tensor_of(before[t.name])
                for r0, r1 in [(0, 1)] if t.vector else [(0, 7), (7, 19)]:
                    piece = held[r0:r1]
                    arguments = (keys, coefs, step.keep, r0, t.id, noise.KINDS.index(kind), 2, t.vector)
                    assert arm("es_update_", piece, *arguments) is None
                np.testing.assert_array_equal(held, delta.rows(t.name, 0, t.rows))
                assert generation == 0 or np.abs(before[t.name]).max() > 0


def test_an_update_of_factors_is_that_of_a_delta_file(arm: Arm, tmp_path: Path) -> None:
    info = TensorInfo("a.weight", "a", 19, 140, False, RHO)
    spec = DeltaSpec((info,), "adapter", 0, 5, "lowrank", 2, SEED)
    with Delta.create(tmp_path / "delta.safetensors", spec) as delta:
        held = torch.zeros(19, 5)
        for generation in (0, 1):
            step = Step(generation, (5, 2**63 + 9, 77), (0, 1, 9), (0.5, -0.25, 3.0), 0.5)
            delta.apply(step)
            keys, slots = tensor_of(np.array(step.keys, np.uint64)), torch.tensor(step.slots, dtype=torch.int32)
            coefs = torch.tensor(step.coefs) * np.float32(spec.scale(info)).item()
            arm("es_update_factors_", held, keys, slots, coefs, step.keep, info.id, 2)
            np.testing.assert_array_equal(held, delta.factors(info.name))


def test_perturbed_products_leave_the_weights_alone(arm: Arm) -> None:
    m, x = matrix("NF4", 63, 65, nested=True), inputs(2, 65)
    held = [t for t in m.arguments if isinstance(t, torch.Tensor)]

    def digest() -> str:
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in held)).hexdigest()

    before = digest()
    for i in range(200):
        c = test_cuda.crowd(noise.KINDS[i % 3], 2, count=2)
        c.keys += np.uint64(i)
        m.product(arm, x, c)
    assert digest() == before


def test_equal_shaped_tensors_have_uncorrelated_noise(arm: Arm) -> None:
    zero = torch.zeros(64, 256)
    x = torch.eye(256)
    c = test_cuda.crowd("sign", 256, count=1)
    noises = []
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        who = (*members(c), noise.tensor_id(name), 1.0, 0.25)
        noises.append(arm("linear_perturbed", x, zero, *who, *NO_VIEW).numpy().ravel())
    correlation = np.corrcoef(noises)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(zero.numel())
    assert np.std(noises[0]) == pytest.approx(abs(c.amplitudes[0]), rel=1e-2)


# ---- wrong arguments
def changed(arguments: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*arguments[:at], value, *arguments[at + 1 :])


def test_wrong_products_are_refused(arm: Arm) -> None:
    """Positions are those of the schema. What only a look at the data can find, kernels do not look for."""
    x, c = inputs(4, 128), test_cuda.crowd("lowrank", 4)
    m = matrix("NF4", 64, 128, bits=4)
    name, *arguments = m.call(x, c)
    packed, absmax = m.arguments[:2]
    far = torch.full((4,), 5, dtype=torch.int32)
    wrong: list[tuple[int, Any]] = [
        (0, inputs(4, 127)),
        (1, packed[:-1]),
        (1, packed.to(torch.int8)),
        (1, packed.repeat(2)[::2]),
        (2, absmax[:-1]),
        (2, absmax.double()),
        (2, torch.zeros(absmax.numel(), dtype=torch.uint8)),
        (6, "int4"),
        (8, torch.zeros(5)),  # keys
        (9, torch.zeros(4)),  # amplitudes
        (10, torch.zeros(5)),  # slots
        (11, torch.zeros(4)),  # owner
        (11, torch.zeros(3, dtype=torch.int32)),
        (16, torch.zeros(5, dtype=torch.uint8)),  # plane
        (19, torch.zeros(64, 5)),  # factors without their pool
    ] + ([] if arm.name == "kernels" else [(11, far), (11, -far)])
    for at, value in wrong:
        with pytest.raises(UsageError):
            arm(name, *changed(tuple(arguments), at, value))
    m = matrix("F32", 64, 128)
    name, *arguments = m.call(x, c)
    for at, value in [(1, m.arguments[0].double()), (1, m.arguments[0].T.contiguous().T), (0, inputs(4, 64))]:
        with pytest.raises(UsageError):
            arm(name, *changed(tuple(arguments), at, value))


def test_wrong_updates_are_refused(arm: Arm) -> None:
    keys, coefs, slots = torch.arange(3), torch.ones(3), torch.zeros(3, dtype=torch.int32)
    for delta, k, c in [
        (torch.zeros(4, 8).double(), keys, coefs),
        (torch.zeros(8, 4).T, keys, coefs),
        (torch.zeros(4, 8), keys.int(), coefs),
        (torch.zeros(4, 8), keys, coefs[:2]),
        (torch.zeros(32), keys, coefs),
    ]:
        with pytest.raises(UsageError):
            arm("es_update_", delta, k, c, 1.0, 0, TENSOR, 0, 1, False)
        with pytest.raises(UsageError):
            arm("es_update_factors_", delta, k, slots, c, 1.0, TENSOR, 1)
    with pytest.raises(UsageError):
        arm("es_update_factors_", torch.zeros(4, 8), keys, slots[:2], coefs, 1.0, TENSOR, 1)


def test_wrong_vectors_are_refused(arm: Arm) -> None:
    base, keys, amplitudes = torch.zeros(8), torch.arange(2), torch.ones(2)
    for b, delta, k, a in [
        (base.double(), None, keys, amplitudes),
        (base, torch.zeros(7), keys, amplitudes),
        (base, base.double(), keys, amplitudes),
        (base, None, keys, amplitudes[:1]),
    ]:
        with pytest.raises(UsageError):
            arm("vectors_perturbed", b, delta, k, a, 0, 1, TENSOR, RHO)


# ---- as torch wants them
def calls() -> list[tuple[Any, ...]]:
    """One call of every operator, and of products one in every view."""
    c, x = test_cuda.crowd("lowrank", 6, 2), inputs(6, 128)
    learned = test_cuda.learned(64, 128, 5)
    keys, amplitudes, slots, _, number, rank = members(c)
    weight = matrix("BF16", 64, 128)
    ids = torch.arange(6)
    return [
        matrix("NF4", 64, 128, 4).call(x, c),
        matrix("FP4", 64, 128, nested=True).call(x.reshape(2, 3, 128), c),
        matrix("NF4", 64, 128, adapter=learned).call(x.bfloat16(), c),
        weight.call(x, c),
        ("embedding_perturbed", ids, *weight.arguments, *members(c), TENSOR, RHO, RHO / 4, *NO_VIEW),
        ("vectors_perturbed", x[0].clone(), x[1].clone(), keys, amplitudes, number, rank, TENSOR, RHO),
        ("es_update_", torch.ones(3, 8), keys, amplitudes, 0.5, 0, TENSOR, number, rank, False),
        ("es_update_factors_", torch.ones(3, 8), keys, slots, amplitudes, 0.5, TENSOR, rank),
    ]


def test_every_operator_passes_opcheck() -> None:
    seen = set()
    for name, *arguments in calls():
        torch.library.opcheck(getattr(torch.ops.edgees, name).default, tuple(arguments))
        seen.add(name)
    assert seen == set(ops.SCHEMAS) == set(ops.KERNELS) == set(ops.PLAIN)


class Block(torch.nn.Module):
    """A product, a norm's vector and an update, as a model has them."""

    def __init__(self, m: Matrix, c: Crowd) -> None:
        super().__init__()
        self.m, self.who = m, members(c)

    def forward(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        keys, amplitudes, _, owner, number, rank = self.who
        e, o = torch.ops.edgees, self.who
        scale = e.vectors_perturbed(x[0], None, keys, amplitudes, number, rank, 3, RHO)
        h = torch.relu(x * scale[owner.long()])
        y = e.nf4_linear_perturbed(h, *self.m.arguments, *o, TENSOR, RHO, *self.m.view)
        e.es_update_(delta, keys, amplitudes, 0.5, 0, TENSOR, number, rank, False)
        return y + delta.sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_give_the_same(backend: str) -> None:
    block = Block(matrix("NF4", 64, 128, 4), test_cuda.crowd("lowrank", 6, 2))
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    x = inputs(6, 128)
    for _ in range(2):
        deltas = [torch.ones(3, 8) for _ in range(2)]
        with torch.no_grad():
            want, got = block(x, deltas[0]), compiled(x, deltas[1])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(deltas[1], deltas[0], rtol=0, atol=0)
        x = x * 2
    torch._dynamo.reset()


def test_inference_mode_gives_the_same(arm: Arm) -> None:
    for name, *arguments in calls():
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        want = arm(name, *arguments)
        with torch.inference_mode():
            got = arm(name, *before)
        torch.testing.assert_close(before[0] if got is None else got, arguments[0] if want is None else want)


# ---- which arm, and how it launches
def test_kernels_run_after_they_proved_themselves(
    fresh: None, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = EmulatedDriver(library)
    monkeypatch.setattr(ops, "device_kernels", lambda device: Kernels(driver))
    for name, *arguments in calls():
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        want = getattr(torch.ops.edgees, name)(*arguments)
        got = ops.on_device(name, *copies)
        want, got = (arguments[0], copies[0]) if want is None else (want, got)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)
    kinds = {kernel.split("_")[0] for kernel in driver.launched}
    assert kinds == {"delta", "gemv", "tile", "sign", "row", "vector", "factors"}
    assert not caplog.records


@pytest.mark.parametrize("fault", ["absent", "noise", "product"])
def test_without_kernels_torch_computes_and_it_is_said_once(
    fresh: None, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    class Broken(EmulatedDriver):
        def launch(self, kernel: str, grid: Any, block: Any, argument: Any, stream: int) -> None:
            if fault == "noise" and kernel == "delta_apply":
                argument.tensor += 1
            if fault == "product" and kernel.startswith("tile"):
                argument.e.rho *= 1.5
            super().launch(kernel, grid, block, argument, stream)

    def kernels(device: torch.device) -> Kernels:
        if fault == "absent":
            raise MissingExtra("NVRTC is not there", "pip install nvidia-cuda-nvrtc")
        return Kernels(Broken(library))

    monkeypatch.setattr(ops, "device_kernels", kernels)
    for name, *arguments in calls():
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        want, got = ops.PLAIN[name](*arguments), ops.on_device(name, *copies)
        want, got = (arguments[0], copies[0]) if want is None else (want, got)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    said = {
        "absent": "NVRTC is not there (pip install nvidia-cuda-nvrtc)",
        "noise": "the kernels' sign noise on cpu is not the CPU's",
        "product": f"the kernels compute wrong products of {Kernels.FEW + 1} columns",
    }[fault]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert said in caplog.text and "several times slower" in caplog.text


class Recorder(EmulatedDriver):
    """Keeps launches, as the capture of a CUDA graph does: arguments by value."""

    def launch(self, kernel: str, grid: Any, block: Any, argument: ctypes.Structure, stream: int) -> None:
        copy = type(argument).from_buffer_copy(argument)
        self.graph = [*getattr(self, "graph", []), (kernel, grid, block, copy, stream)]
        super().launch(kernel, grid, block, argument, stream)

    def replay(self) -> None:
        for launch in self.graph:
            EmulatedDriver.launch(self, *launch)


@pytest.mark.parametrize("kind", ["sign", "normal"])
def test_a_captured_graph_serves_other_members(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nothing is read back from the device, and no key or amplitude is baked into a launch."""
    driver = Recorder(library)
    kernels = Kernels(driver)
    m, x, c = matrix("NF4", 63, 65), inputs(3, 65), test_cuda.crowd(kind, 3)
    name, *arguments = m.call(x, c)
    base, keys, amplitudes = x[0].clone(), arguments[8], arguments[9]

    def reads(*_: Any, **__: Any) -> None:
        raise AssertionError("waits for the device")

    with monkeypatch.context() as patch:
        for method in ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, method, reads)
        y = ops.KERNELS[name](kernels, *arguments)
        number, rank = arguments[12:14]
        v = ops.KERNELS["vectors_perturbed"](kernels, base, None, keys, amplitudes, number, rank, TENSOR, RHO)
    old = y.clone()
    keys += 12345
    amplitudes *= -2
    x *= 3
    driver.replay()
    assert not torch.equal(y, old)
    torch.testing.assert_close(y, ops.KERNELS[name](Kernels(EmulatedDriver(library)), *arguments), rtol=0, atol=0)
    want = torch.ops.edgees.vectors_perturbed(base, None, keys, amplitudes, number, rank, TENSOR, RHO)
    torch.testing.assert_close(v, want, rtol=0, atol=0)


def test_columns_of_one_owner_go_through_tiles(library: ctypes.CDLL) -> None:
    """With dense noise tiles pay only where neighbours share their noise, which x's shape tells."""
    m, x = matrix("NF4", 64, 128), inputs(24, 128)
    for shape, count, tiles in [((24,), 3, False), ((3, 8), 3, True), ((8, 3), 3, False), ((24,), 1, True)]:
        driver = EmulatedDriver(library)
        c = test_cuda.crowd("sign", 24, count=count, together=True)
        name, *arguments = m.call(x.reshape(*shape, 128), c)
        ops.KERNELS[name](Kernels(driver), *arguments)
        assert any(kernel.startswith("tile") for kernel in driver.launched) == tiles


def test_noise_where_kernels_have_none_is_refused(library: ctypes.CDLL) -> None:
    c, x = test_cuda.crowd("sign", 2), inputs(2, 128)
    learned = test_cuda.learned(64, 128, 5)
    name, *arguments = matrix("NF4", 64, 128, adapter=learned).call(x, c)
    with pytest.raises(UsageError, match="lowrank"):
        ops.KERNELS[name](Kernels(EmulatedDriver(library)), *arguments)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_dequantises_to_the_same(kind: str) -> None:
    w = np.random.default_rng(1).normal(0, 1, (63, 65)).astype(np.float32)
    q = nf4.quantise(w, kind, nested=False)
    packed, absmax = tensor_of(q.packed), tensor_of(q.absmax_float32())
    by_table = ops._lookup(packed, absmax, kind)
    np.testing.assert_array_equal(by_table[: w.size].reshape(w.shape), q.dequantise())
    by_library = ops._bitsandbytes(packed, absmax, kind)
    assert by_library is not None
    torch.testing.assert_close(by_library[: w.size], by_table[: w.size], rtol=1e-6, atol=0)


def test_large_matrices_are_dequantised_in_pieces(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "CHUNK", 64 * 65)
    arm = Arm("plain", library)
    for type_name, kind in product(("NF4", "F16"), noise.KINDS):
        c = test_cuda.crowd(kind, 3)
        check_product(arm, matrix(type_name, 130, 65, nested=True), 3, "F32", c, None)
    check_product(arm, matrix("NF4", 200, 64, 4), 3, "F32", test_cuda.crowd("sign", 3), None)


# ---- packaging
def test_the_wheel_carries_the_source_of_the_kernels() -> None:
    """setup.py copies what edgees/cuda.py compiles."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (kernels,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "KERNELS")
    names = {node.value for node in ast.walk(kernels) if isinstance(node, ast.Constant)}
    assert names == {"cuda/kernels.cu", *cuda._HEADERS}
    assert all((cuda.source_folder() / name).is_file() for name in names)
