"""The CUDA kernels on the host: the same source under csrc/cuda/emulate.h, launched by the same Python, against the
compiled core bit for bit (noise, rows, vectors, updates) and against products in float64. What needs a card is in
scripts/gpu_check.py."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgees import blocks, cuda, native, nf4, noise
from edgees.cuda import Adapter, Dim, Kernels, Members, Nested, Weight
from edgees.errors import EngineError, MissingExtra, NativeError, UsageError

ROOT = Path(__file__).resolve().parents[1]
TENSOR, SEED, RHO = 0x1234ABCD, 7, 0.03
TYPES = ("NF4", "FP4", "F32", "F16", "BF16")
ROUNDOFF = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}


class EmulatedDriver:
    """Runs kernels on the host, the threads of a block in an order drawn from ``seed`` (0: their own)."""

    def __init__(self, library: ctypes.CDLL, seed: int = 0) -> None:
        self.library, self.seed, self.launched = library, seed, list[str]()

    def launch(self, kernel: str, grid: Dim, block: Dim, argument: ctypes.Structure, stream: int) -> None:
        dims = [(ctypes.c_uint * 3)(*dim) for dim in (grid, block)]
        size = ctypes.c_uint64(ctypes.sizeof(argument))
        code = self.library.edgees_emulate(
            kernel.encode(), *dims, ctypes.byref(argument), size, ctypes.c_uint64(self.seed)
        )
        assert code == 0, f"{kernel}: no such kernel, or its structure has another size than {size.value}"
        self.launched.append(kernel)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "a C++ compiler is needed, as for building edgees"
    out = tmp_path_factory.mktemp("cuda") / "emulated.so"
    flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    source = ["-x", "c++", "-std=c++17", "-DEDGEES_EMULATE", str(ROOT / "csrc/cuda/kernels.cu")]
    subprocess.run([*compiler.split(), *flags, *source, "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


@pytest.fixture
def kernels(library: ctypes.CDLL) -> Kernels:
    return Kernels(EmulatedDriver(library))


# ---- numbers on the "device"
def to_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
        return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.ascontiguousarray(x, np.float32 if dtype == "F32" else np.float16)


def from_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else x.astype(np.float32)


def aligned(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy at an address that is a multiple of 64, plus ``offset``."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    out = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


@dataclass
class Matrix:
    """A weight with its data, what it is in float32, and its rows as blocks.py takes them."""

    weight: Weight
    full: np.ndarray
    raw: np.ndarray | None = None
    keep: list[Any] = field(default_factory=list)


def matrix(
    kind: str, rows: int, cols: int, bits: int = 0, span: int = 2, nested: bool = False, seed: int = 0, offset: int = 0
) -> Matrix:
    rng = np.random.default_rng([rows, cols, bits, seed])
    w = rng.normal(0, RHO, (rows, cols)).astype(np.float32)
    keep: list[Any] = []
    more: dict[str, Any] = {}
    if kind in ("NF4", "FP4"):
        q = nf4.quantise(w, kind.lower(), nested)
        base, full = q.packed, q.dequantise()
        raw = None if cols % 64 else q.interleaved()
        if q.nested is None:
            absmax = aligned(q.absmax_float32())
            more["absmax"] = native.pointer(absmax)
            keep.append(absmax)
        else:
            parts = [aligned(part) for part in (q.nested.codes, q.nested.table, q.nested.absmax)]
            more["nested"] = Nested(*(native.pointer(part) for part in parts), float(q.nested.offset))
            keep += parts
    else:
        base = to_dtype(w, kind)
        full = from_dtype(base, kind)
        raw = base.view(np.uint8)
    base = aligned(base, offset)
    cell = float(np.float32(RHO / 4))
    if bits:
        width = -(-cols // 32) * 4 * bits
        plane = aligned(rng.integers(0, 256, (rows, width), np.uint8))
        assert raw is not None
        full = blocks.effective(kind, raw, rows, cols, plane, bits, span, RHO)
        more |= {"plane": native.pointer(plane), "bits": bits, "span": span}
        keep.append(plane)
    return Matrix(Weight(kind, rows, cols, native.pointer(base), cell=cell, **more), full, raw, [base, *keep])


@dataclass
class Crowd:
    """Members, and whose each of n columns is."""

    kind: str
    rank: int
    keys: np.ndarray
    amplitudes: np.ndarray
    slots: np.ndarray
    owner: np.ndarray

    @property
    def members(self) -> Members:
        return Members(
            self.kind, self.rank, native.pointer(self.keys), native.pointer(self.amplitudes),
            native.pointer(self.owner), native.pointer(self.slots),
        )  # fmt: skip

    def strength(self, m: int) -> np.float32:
        return np.float32(self.amplitudes[m]) * np.float32(RHO)


def crowd(kind: str, n: int, rank: int = 1, count: int = 5, together: bool = False) -> Crowd:
    rng = np.random.default_rng([n, rank, count])
    amplitudes = np.array([0.05, -0.05, 0.0, 0.2, -0.011, 0.3, 0.4][:count], np.float32)
    owner = rng.integers(0, count, n).astype(np.int32)
    return Crowd(
        kind, rank, np.array([noise.make_key(SEED, 3, p) for p in range(count)], np.uint64), amplitudes,
        rng.integers(0, 1 << 32, count).astype(np.uint32), np.sort(owner) if together else owner,
    )  # fmt: skip


@dataclass
class Learned:
    """An adapter with its data; delta: float64 [rows, cols]."""

    a: np.ndarray
    packed: np.ndarray
    signs: np.ndarray

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.a.shape[1], native.pointer(self.a), native.pointer(self.packed))

    @property
    def delta(self) -> np.ndarray:
        return self.a.astype(np.float64) @ self.signs.T.astype(np.float64)


def learned(rows: int, cols: int, factors: int) -> Learned:
    a = np.random.default_rng(factors).normal(0, 0.002, (rows, factors)).astype(np.float32)
    return Learned(a, noise.pool_packed(SEED, TENSOR, cols, factors), noise.pool(SEED, TENSOR, cols, factors))


def eps_of(c: Crowd, m: int, rows: int, cols: int, adapter: Learned | None) -> np.ndarray:
    """float64 [rows, cols]."""
    if adapter is None:
        return noise.eps(c.kind, int(c.keys[m]), TENSOR, rows, cols, rank=c.rank).astype(np.float64)
    total = np.zeros((rows, cols))
    for k in range(c.rank):
        at = (int(c.slots[m]) * c.rank + k) % adapter.a.shape[1]
        total += np.outer(noise.sign_vector(int(c.keys[m]), TENSOR, 0x100 + k, rows), adapter.signs[:, at])
    return total / np.sqrt(c.rank)


def specification(
    full: np.ndarray, x: np.ndarray, c: Crowd | None, adapter: Learned | None
) -> tuple[np.ndarray, np.ndarray]:
    """float64 [n, rows] products, and the sums of their terms' absolute values."""
    w = full.astype(np.float64)
    base = w + adapter.delta if adapter else w
    y, size = np.empty((len(x), len(w))), np.empty((len(x), len(w)))
    cache: dict[int, np.ndarray] = {}
    for j, column in enumerate(x.astype(np.float64)):
        member = -1 if c is None else int(c.owner[j])
        if member not in cache:
            eps = 0 if c is None else float(c.strength(member)) * eps_of(c, member, *w.shape, adapter)
            cache[member] = eps
        all_of_it = base + cache[member]
        y[j] = all_of_it @ column
        size[j] = (np.abs(w) + np.abs(cache[member])) @ np.abs(column)
        if adapter:
            size[j] += np.abs(adapter.a).sum(axis=1) * np.abs(column).sum()
    return y, size


def run(
    kernels: Kernels, m: Matrix, x: np.ndarray, dtype: str, c: Crowd | None = None, adapter: Learned | None = None,
    together: int = 1,
) -> np.ndarray:  # fmt: skip
    """float32 [n, rows] of the kernels; x is of dtype, rows may be apart."""
    n, size = len(x), 4 if dtype == "F32" else 2
    y = aligned(np.full((n, m.weight.rows), 0x7E7E, np.uint16 if size == 2 else np.float32))
    y = y.view(np.float16) if dtype == "F16" else y
    members, view = (c.members if c else None), (adapter.adapter if adapter else None)
    dots = np.full(max(1, n * kernels.dots_per_column(members, view)), np.nan, np.float32)
    kernels.linear(
        m.weight, x.ctypes.data, native.pointer(y), n, dtype=dtype, tensor=TENSOR, rho=RHO, members=members,
        adapter=view, dots=native.pointer(dots), x_stride=x.strides[0] // size, together=together,
    )  # fmt: skip
    return from_dtype(y, dtype)


def close(got: np.ndarray, want: np.ndarray, size: np.ndarray, dtype: str, cols: int, tiles: bool) -> None:
    """The stated bound: float32 sums of ``cols`` terms, y rounded to dtype, and in tiles so are the weights."""
    bound = size * (cols + 40) * 2.0**-24 + np.abs(want) * ROUNDOFF[dtype] + 2.0**-24
    if tiles:
        bound += size * ROUNDOFF[dtype] + (np.sqrt(cols) * 2.0**-14 if dtype == "F16" else 0)
    worst = (np.abs(got - want) / bound).max()
    assert worst <= 1, f"{worst} times the bound"


def inputs(n: int, cols: int, dtype: str, stride: int | None = None) -> np.ndarray:
    x = np.random.default_rng([n, cols]).normal(0, 1, (n, stride or cols))
    return aligned(to_dtype(x, dtype))[:, :cols]


# ---- products
SHAPES = [(5, 32), (7, 64), (70, 96), (18, 1056), (9, 2112)]
ODD = [(63, 65), (64, 172), (3, 1), (1, 7), (2, 130)]


@pytest.mark.parametrize("noisy", [None, "sign", "lowrank", "normal"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", TYPES)
def test_products_are_those_of_the_specification(kernels: Kernels, kind: str, dtype: str, noisy: str | None) -> None:
    for (rows, cols), n in itertools.product(SHAPES + ODD, (1, 3, 16)):
        m = matrix(kind, rows, cols, nested=(rows + n) % 2 == 0)
        c = crowd(noisy, n, rank=1 + n % 3) if noisy else None
        x = inputs(n, cols, dtype)
        want, size = specification(m.full, from_dtype(x, dtype), c, None)
        close(run(kernels, m, x, dtype, c), want, size, dtype, cols, tiles=False)
    used = {re.sub(r"_\d+$", "", name) for name in kernels.driver.launched}
    fast = f"gemv_{'codes' if kind in ('NF4', 'FP4') else 'floats'}_{noisy if noisy in ('sign', 'normal') else 'plain'}"
    assert used == {fast, "gemv_any"} | ({"sign_dots"} if noisy == "lowrank" else set())


@pytest.mark.parametrize("noisy", [None, "sign", "lowrank", "normal"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", TYPES)
def test_tiles_are_those_of_the_specification(kernels: Kernels, kind: str, dtype: str, noisy: str | None) -> None:
    for rows, cols, n in [(70, 96, 17), (63, 65, 40), (130, 160, 70), (1, 7, 150), (64, 1088, 20)]:
        m = matrix(kind, rows, cols, nested=n % 2 == 0)
        c = crowd(noisy, n, rank=1 + n % 3, count=3, together=n % 2 == 0) if noisy else None
        x = inputs(n, cols, dtype)
        want, size = specification(m.full, from_dtype(x, dtype), c, None)
        close(run(kernels, m, x, dtype, c, together=8), want, size, dtype, cols, tiles=True)
    assert {re.sub(r"_\d+$", "", name) for name in kernels.driver.launched} - {"sign_dots"} == {f"tile_{dtype.lower()}"}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", TYPES)
def test_residual_planes_are_added(kernels: Kernels, kind: str, bits: int) -> None:
    shapes = [(6, 64), (5, 1152)] if kind in ("NF4", "FP4") else [(6, 96), (5, 65), (3, 1088)]
    for (rows, cols), (n, dtype), span in itertools.product(shapes, [(2, "F32"), (20, "F32"), (18, "BF16")], (0, 5)):
        m = matrix(kind, rows, cols, bits, span, nested=True)
        x = inputs(n, cols, dtype)
        want, size = specification(m.full, from_dtype(x, dtype), None, None)
        close(run(kernels, m, x, dtype), want, size, dtype, cols, tiles=n > 16)


@pytest.mark.parametrize("factors", [1, 5, 32])
def test_adapters_and_their_members(kernels: Kernels, factors: int) -> None:
    for (rows, cols), n, rank in itertools.product([(70, 160), (33, 65)], (1, 4, 20, 130), (1, 3)):
        m, view = matrix("NF4", rows, cols), learned(rows, cols, factors)
        for c in (None, crowd("lowrank", n, rank)):
            x = inputs(n, cols, "F32" if n != 20 else "BF16")
            dtype = "F32" if n != 20 else "BF16"
            want, size = specification(m.full, from_dtype(x, dtype), c, view)
            close(run(kernels, m, x, dtype, c, view), want, size, dtype, cols, tiles=n > 16)


@pytest.mark.parametrize("noisy", [None, "sign", "lowrank", "normal"])
def test_a_column_is_the_same_in_any_company(kernels: Kernels, noisy: str | None) -> None:
    rows, cols = 23, 2112
    m, x = matrix("NF4", rows, cols, 4), inputs(16, cols, "BF16")
    c = crowd(noisy, 16, 2) if noisy else None
    whole = run(kernels, m, x, "BF16", c)
    for first, last in [(0, 1), (3, 6), (5, 13), (15, 16)]:
        part = None
        if c:
            part = Crowd(c.kind, c.rank, c.keys, c.amplitudes, c.slots, c.owner[first:last].copy())
        got = run(kernels, m, x[first:last], "BF16", part)
        np.testing.assert_array_equal(got, whole[first:last])


def test_the_noise_in_a_product_is_the_noise(kernels: Kernels) -> None:
    """One-hot columns on a base of zeros read the noise out, each number of it."""
    rows, cols = 19, 160
    zero = aligned(np.zeros((rows, cols), np.float32))
    weight = Weight("F32", rows, cols, native.pointer(zero))
    for kind, n, together in itertools.product(("sign", "normal", "lowrank"), (16, 160), (1, 8)):
        got = []
        for first in range(0, cols, n):
            x = aligned(np.eye(cols, dtype=np.float32)[first : first + n])
            c = crowd(kind, n, rank=3, count=1)
            got.append(run(kernels, Matrix(weight, zero), x, "F32", c, together=together))
        eps = noise.eps(kind, int(c.keys[0]), TENSOR, rows, cols, rank=3)
        strong = c.strength(0) * (np.float32(1) if kind != "normal" else np.float32(cuda._NORMAL_SCALE))
        if kind == "lowrank":
            np.testing.assert_allclose(np.concatenate(got).T, eps * c.strength(0), rtol=1e-5, atol=1e-9)
        else:
            integers = eps if kind == "sign" else np.rint(eps / np.float32(cuda._NORMAL_SCALE)).astype(np.float32)
            np.testing.assert_array_equal(np.concatenate(got).T, strong * integers)


def test_rows_apart_and_crooked_addresses(kernels: Kernels) -> None:
    for dtype, n in itertools.product(("F32", "BF16"), (2, 20)):
        for m, x in [
            (matrix("NF4", 9, 96), inputs(n, 96, dtype, stride=104)),  # whole, rows apart
            (matrix("NF4", 9, 96), inputs(n, 96, dtype, stride=99)),  # x not aligned
            (matrix("NF4", 9, 96, offset=1), inputs(n, 96, dtype)),  # codes not aligned
            (matrix("BF16", 9, 96, offset=2), inputs(n, 96, dtype)),
        ]:
            want, size = specification(m.full, from_dtype(x, dtype), None, None)
            close(run(kernels, m, x, dtype), want, size, dtype, 96, tiles=n > 16)


def test_infinite_columns_stay_in_their_columns(kernels: Kernels) -> None:
    """A column with a NaN spoils no other one, also where tiles zero columns of other members."""
    m, x = matrix("NF4", 40, 96), inputs(24, 96, "F32")
    x[3, 5], x[9, 1] = np.nan, np.inf
    y = run(kernels, m, x, "F32", crowd("sign", 24, count=3), together=8)
    assert set(np.flatnonzero(~np.isfinite(y).all(axis=1))) == {3, 9}


# ---- the threads' order
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_order_of_threads_changes_a_bit(library: ctypes.CDLL, seed: int) -> None:
    """A race would: every kernel, with the threads of each block in other orders."""
    calls: list[Callable[[Kernels], np.ndarray]] = []
    for kind, noisy in itertools.product(("NF4", "BF16"), (None, "sign", "lowrank", "normal")):
        for rows, cols, n, dtype in [
            (9, 2112, 1, "F32"), (9, 2112, 4, "BF16"), (6, 1088, 16, "F32"), (5, 65, 7, "F32"), (66, 96, 20, "BF16"),
            (66, 96, 80, "F16"), (66, 96, 80, "BF16"), (33, 70, 20, "F32"), (33, 70, 20, "F16"), (33, 70, 129, "F16"),
        ]:  # fmt: skip
            m, x = matrix(kind, rows, cols), inputs(n, cols, dtype)
            c = crowd(noisy, n, 2, count=2) if noisy else None
            calls.append(lambda k, m=m, x=x, d=dtype, c=c: run(k, m, x, d, c, together=8))  # type: ignore[misc]
    view = learned(40, 160, 5)
    for n in (3, 20):
        m, x, c = matrix("NF4", 40, 160), inputs(n, 160, "F32"), crowd("lowrank", n, 2)
        calls.append(lambda k, m=m, x=x, c=c: run(k, m, x, "F32", c, view))  # type: ignore[misc]
    calls += [
        lambda k: looked_up(k, matrix("NF4", 9, 70), crowd("lowrank", 6, 2), learned(9, 70, 4), "F32"),
        lambda k: vector(k, "BF16", 300, crowd("normal", 3), "F16"),
        lambda k: update(k, "lowrank", 3, 4, 700, 40, False),
        lambda k: update(k, "sign", 1, 4, 700, 40, False),
        lambda k: factors(k, 2, 30, 7, 9),
        lambda k: encoded(k, matrix("NF4", 5, 192), 4, 1),
    ]
    straight, shuffled = EmulatedDriver(library), EmulatedDriver(library, seed)
    for call in calls:
        np.testing.assert_array_equal(call(Kernels(straight)), call(Kernels(shuffled)))
    source = (ROOT / "csrc/cuda/kernels.cu").read_text()
    assert set(shuffled.launched) == set(re.findall(r"^EDGEES_KERNEL\((\w+),", source, re.M)), "kernels left out"


# ---- rows and vectors
def tensor_of(m: Matrix, view: Learned | None = None) -> native.Tensor:
    """The same matrix for the compiled core: float rows, with the plane and the base's cells already added."""
    full = np.ascontiguousarray(m.full)
    m.keep.append(full)
    t = native.Tensor(
        type=0, rows=m.weight.rows, cols=m.weight.cols, base=native.pointer(full), row_stride=4 * m.weight.cols,
        id=TENSOR, rho=RHO,
    )  # fmt: skip
    if view:
        t.factors, t.a, t.pool = view.a.shape[1], native.pointer(view.a), native.pointer(view.packed)
    return t


def looked_up(kernels: Kernels, m: Matrix, c: Crowd | None, view: Learned | None, dtype: str) -> np.ndarray:
    n = 6
    index = np.random.default_rng(1).integers(0, m.weight.rows, n)
    out = np.zeros((n, m.weight.cols), to_dtype(np.zeros(1), dtype).dtype)
    kernels.rows(
        m.weight, native.pointer(index), native.pointer(out), n, dtype=dtype, tensor=TENSOR, rho=RHO,
        members=c.members if c else None, adapter=view.adapter if view else None,
    )  # fmt: skip
    want = np.empty((n, m.weight.cols), np.float32)
    t = tensor_of(m, view)
    for i in range(n):
        member = native.Member(0, 0.0, 0)
        if c:
            o = int(c.owner[i])
            member = native.Member(int(c.keys[o]), float(c.amplitudes[o]), int(c.slots[o]))
        kind = native.NoiseKind(noise.KINDS.index(c.kind) if c else 1, c.rank if c else 1)
        refs = [ctypes.byref(s) for s in (t, kind, member)]
        assert native.lib().edgees_row(*refs, int(index[i]), native.pointer(want[i])) == 0
    got = from_dtype(out, dtype)
    np.testing.assert_array_equal(got, from_dtype(to_dtype(want, dtype), dtype))
    return got


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_the_cores_bit_for_bit(kernels: Kernels, kind: str) -> None:
    for (rows, cols), noisy, dtype in itertools.product(
        [(9, 64), (5, 300), (63, 65)], (None, "sign", "lowrank", "normal"), ("F32", "BF16", "F16")
    ):
        c = crowd(noisy, 6, rank=3 if rows == 5 else 1) if noisy else None
        bits = 4 if cols == 64 else 0
        looked_up(kernels, matrix(kind, rows, cols, bits, nested=True), c, None, dtype)
        if noisy in (None, "lowrank"):
            looked_up(kernels, matrix(kind, rows, cols, bits), c, learned(rows, cols, 5), dtype)


def test_a_row_that_is_not_there_is_nan(kernels: Kernels) -> None:
    m, index = matrix("F32", 4, 8), np.array([1, 4, -1, 1 << 40])
    out = np.zeros((4, 8), np.float32)
    kernels.rows(m.weight, native.pointer(index), native.pointer(out), 4, dtype="F32")
    assert np.isnan(out[1:]).all()
    np.testing.assert_array_equal(out[0], m.full[1])


def vector(kernels: Kernels, base_dtype: str, cols: int, c: Crowd | None, dtype: str, delta: bool = True) -> np.ndarray:
    rng = np.random.default_rng(cols)
    base = to_dtype(rng.normal(1, 0.1, cols), base_dtype)
    moved = rng.normal(0, 0.01, cols).astype(np.float32)
    n = len(c.owner) if c else 2
    out = np.zeros((n, cols), to_dtype(np.zeros(1), dtype).dtype)
    kernels.vectors(
        native.pointer(base), base_dtype, cols, native.pointer(out), n, dtype=dtype, tensor=TENSOR, rho=RHO,
        delta=native.pointer(moved) if delta else 0, members=c.members if c else None,
    )  # fmt: skip
    t = native.Tensor(
        type=cuda.TYPES[base_dtype], rows=1, cols=cols, base=native.pointer(base), id=TENSOR, rho=RHO,
        delta=native.pointer(moved) if delta else None,
    )  # fmt: skip
    want = np.empty((n, cols), np.float32)
    for i in range(n):
        member = native.Member(0, 0.0, 0)
        if c:
            member = native.Member(int(c.keys[c.owner[i]]), float(c.amplitudes[c.owner[i]]), 0)
        kind = native.NoiseKind(noise.KINDS.index(c.kind) if c else 0, c.rank if c else 1)
        refs = [ctypes.byref(s) for s in (t, kind, member)]
        assert native.lib().edgees_vector(*refs, native.pointer(want[i])) == 0
    got = from_dtype(out, dtype)
    np.testing.assert_array_equal(got, from_dtype(to_dtype(want, dtype), dtype))
    return got


def test_vectors_are_the_cores_bit_for_bit(kernels: Kernels) -> None:
    for base, cols, noisy, dtype in itertools.product(
        ("F32", "F16", "BF16"), (1, 256, 577), (None, "sign", "lowrank", "normal"), ("F32", "BF16")
    ):
        vector(kernels, base, cols, crowd(noisy, 4, rank=4) if noisy else None, dtype, delta=cols != 256)


def test_a_vector_for_every_member(kernels: Kernels) -> None:
    c = crowd("sign", 5)
    base, out = np.ones(40, np.float32), np.zeros((5, 40), np.float32)
    members = Members("sign", 1, native.pointer(c.keys), native.pointer(c.amplitudes), 0)
    kernels.vectors(native.pointer(base), "F32", 40, native.pointer(out), 5, dtype="F32", rho=2.0, members=members)
    np.testing.assert_array_equal(np.abs(out - 1).max(axis=1), np.abs((1 + 2 * c.amplitudes) - 1))


# ---- the update
def pairs_of(pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """keys, slots, coefs"""
    rng = np.random.default_rng(pairs)
    keys = np.array([noise.make_key(SEED, 4, p) for p in range(pairs)], np.uint64)
    coefs = rng.choice(np.array([0.0, -0.3, 0.017, 1e-30, 2.5], np.float32), pairs)
    return keys, rng.integers(0, 1 << 32, pairs).astype(np.uint32), coefs


def update(
    kernels: Kernels, kind: str, rank: int, rows: int, cols: int, pairs: int, vector: bool, row0: int = 0,
    keep: float = 0.9,
) -> np.ndarray:  # fmt: skip
    keys, _, coefs = pairs_of(pairs)
    got = np.random.default_rng(0).normal(0, 1, (rows, cols)).astype(np.float32)
    want = got.copy()
    kernels.delta_apply(
        native.pointer(got), rows, cols, tensor=TENSOR, kind=kind, rank=rank, pairs=pairs, keys=native.pointer(keys),
        coefs=native.pointer(coefs), keep=keep, row0=row0, vector=vector,
    )  # fmt: skip
    code = native.lib().edgees_delta_apply(
        native.pointer(want), rows, cols, row0, TENSOR, noise.KINDS.index(kind), rank, int(vector), pairs,
        native.pointer(keys), native.pointer(coefs), keep,
    )  # fmt: skip
    assert code == 0
    assert got.tobytes() == want.tobytes()
    return got


@pytest.mark.parametrize("kind", noise.KINDS)
def test_the_update_of_delta_is_the_cores_bit_for_bit(kernels: Kernels, kind: str) -> None:
    for (rows, cols), rank, pairs, row0 in itertools.product(
        [(1, 1), (3, 127), (5, 1100)], (1, 3, 40), (0, 1, 3, 33), (0, 300)
    ):
        update(kernels, kind, rank, rows, cols, pairs, False, row0)
    for cols in (1, 130, 576):
        update(kernels, kind, 5, 1, cols, 7, True)
    update(kernels, kind, 1, 2, 64, 2, False, row0=(1 << 32) - 2, keep=0.0)


def test_an_update_of_more_rows_than_a_grid_is_high(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "TALL", 7)
    for rows in (7, 8, 20):
        update(kernels, "sign", 1, rows, 130, 2, False)


def factors(kernels: Kernels, rank: int, rows: int, count: int, pairs: int) -> np.ndarray:
    keys, slots, coefs = pairs_of(pairs)
    got = np.random.default_rng(0).normal(0, 1, (rows, count)).astype(np.float32)
    want = got.copy()
    pointers = native.pointer(keys), native.pointer(slots), native.pointer(coefs)
    kernels.factors_apply(
        native.pointer(got), rows, count, tensor=TENSOR, rank=rank, pairs=pairs, keys=pointers[0], slots=pointers[1],
        coefs=pointers[2], keep=0.7,
    )  # fmt: skip
    code = native.lib().edgees_factors_apply(native.pointer(want), rows, count, TENSOR, rank, pairs, *pointers, 0.7)
    assert code == 0
    assert got.tobytes() == want.tobytes()
    return got


def test_the_update_of_factors_is_the_cores_bit_for_bit(kernels: Kernels) -> None:
    for rank, rows, count, pairs in itertools.product((1, 2, 7), (1, 140, 300), (1, 4, 33), (0, 1, 9)):
        factors(kernels, rank, rows, count, pairs)


def encoded(kernels: Kernels, m: Matrix, bits: int, span: int, row0: int = 0) -> np.ndarray:
    w, rows = m.weight, m.weight.rows - row0
    rng = np.random.default_rng(bits)
    delta = (rng.normal(0, RHO / 8, (rows, w.cols)) * rng.choice([0.1, 1, 30], (rows, w.cols))).astype(np.float32)
    delta[0, 0], delta[-1, -1] = np.nan, np.inf
    got = aligned(np.full((rows, -(-w.cols // 32) * 4 * bits), 0xAA, np.uint8))
    kernels.plane_encode(
        w, native.pointer(delta), rows, native.pointer(got), bits=bits, span=span, dither_key=noise.dither_key(SEED),
        tensor=TENSOR, row0=row0,
    )  # fmt: skip
    assert m.raw is not None
    order, raw = np.arange(row0, w.rows, dtype=np.int32), m.raw.reshape(w.rows, -1)[row0:]
    want = blocks.plane_encode(
        w.type, raw, delta, order, noise.dither_key(SEED), TENSOR, bits, span, RHO
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)
    return got


@pytest.mark.parametrize("kind", TYPES)
def test_planes_are_the_cores_bit_for_bit(kernels: Kernels, kind: str) -> None:
    for bits, span, row0, cols in itertools.product((2, 4, 8), (0, 3, 8), (0, 2), (64, 65, 320)):
        if kind in ("NF4", "FP4"):
            if cols % 64:
                continue
            rng = np.random.default_rng(cols)
            q = nf4.quantise(rng.normal(0, RHO, (5, cols)).astype(np.float32), kind.lower(), nested=False)
            absmax = q.absmax_float32()
            absmax[1] = 0  # no cell, no step
            base = aligned(q.packed)
            weight = Weight(kind, 5, cols, native.pointer(base), absmax=native.pointer(absmax))
            encoded(kernels, Matrix(weight, q.dequantise(), q.interleaved(), [base, absmax]), bits, span, row0)
        else:
            encoded(kernels, matrix(kind, 5, cols), bits, span, row0)


# ---- ten million numbers of each kind
@pytest.mark.slow
@pytest.mark.parametrize("kind", noise.KINDS)
def test_ten_million_numbers_of_noise(kernels: Kernels, kind: str) -> None:
    rows, cols, rank = 2000, 5003, 3
    got = np.zeros((rows, cols), np.float32)
    key, coef = np.array([noise.make_key(SEED, 1, 2)], np.uint64), np.ones(1, np.float32)
    kernels.delta_apply(
        native.pointer(got), rows, cols, tensor=TENSOR, kind=kind, rank=rank, pairs=1, keys=native.pointer(key),
        coefs=native.pointer(coef), keep=0.0, row0=11,
    )  # fmt: skip
    want = noise.eps(kind, int(key[0]), TENSOR, rows, cols, rank=rank, row0=11)
    assert (got + np.float32(0)).tobytes() == (want + np.float32(0)).tobytes()


# ---- what is refused
def test_impossible_arguments_are_named(kernels: Kernels) -> None:
    m, c = matrix("NF4", 4, 64), crowd("lowrank", 3)
    plain: dict[str, Any] = {"type": "NF4", "rows": 4, "cols": 64, "base": 64, "absmax": 64}
    for change, said in [
        ({"type": "Q4_0"}, "no CUDA kernels for type Q4_0"),
        ({"rows": 0}, "an empty or impossible shape"),
        ({"base": 0}, "no data"),
        ({"absmax": 0}, "packed codes without their absmax"),
        ({"bits": 3, "plane": 64}, "no residual plane of 3 bits"),
        ({"bits": 4}, "no residual plane of 4 bits"),
        ({"bits": 4, "plane": 64, "span": 9}, "span 9"),
        ({"bits": 4, "plane": 64, "cols": 96}, "whole blocks of 64 columns"),
    ]:
        with pytest.raises(UsageError, match=said):
            Weight(**(plain | change))
    x = np.zeros(64, np.float32)
    at = native.pointer(x)
    for call, said in [
        (lambda: kernels.linear(m.weight, at, at, 1, dtype="F64"), "numbers of type F64"),
        (lambda: kernels.linear(m.weight, 0, at, 1, dtype="F32"), "a product of 1 columns, x at 0x0"),
        (lambda: kernels.linear(m.weight, at, at, -1, dtype="F32"), "a product of -1 columns"),
        (lambda: kernels.linear(m.weight, at, at, 3, dtype="F32", members=c.members), "scratch for 1 numbers"),
        (lambda: kernels.linear(m.weight, at, at, 1, dtype="F32", members=Members("sign", 1, 0, at, at)), "keys"),
        (lambda: kernels.linear(m.weight, at, at, 1, dtype="F32", members=Members("odd", 1, at, at, at)), "kind 'odd'"),
        (lambda: kernels.linear(m.weight, at, at, 1, dtype="F32", members=Members("sign", 0, at, at, at)), "rank 0"),
        (lambda: kernels.linear(m.weight, at, at, 1, dtype="F32", dots=at, members=crowd("sign", 1).members,
                                adapter=Adapter(4, at, at)), "lowrank noise and slots"),
        (lambda: kernels.linear(m.weight, at, at, 1, dtype="F32", dots=at, adapter=Adapter(0, at, at)), "0 factors"),
        (lambda: kernels.delta_apply(at, 1, 4, tensor=0, kind="sign", rank=257, pairs=0, keys=0, coefs=0, keep=1),
         "rank 257"),
        (lambda: kernels.delta_apply(at, 2, 2, tensor=0, kind="sign", rank=1, pairs=0, keys=0, coefs=0, keep=1,
                                     vector=True), "an update of 2 x 2"),
        (lambda: kernels.factors_apply(at, 2, 0, tensor=0, rank=1, pairs=0, keys=0, slots=0, coefs=0, keep=1),
         "2 x 0 factors"),
        (lambda: kernels.plane_encode(m.weight, at, 5, at, bits=4, span=0, dither_key=1, tensor=0), "rows 0 to 5 of 4"),
        (lambda: kernels.plane_encode(matrix("NF4", 4, 65).weight, at, 1, at, bits=4, span=0, dither_key=1, tensor=0),
         "not 65"),
        (lambda: kernels.vectors(at, "F32", 0, at, 1, dtype="F32"), "a vector of 0"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=said):
            call()
    kernels.linear(m.weight, at, at, 0, dtype="F32")
    kernels.rows(m.weight, at, at, 0, dtype="F32")
    kernels.delta_apply(at, 0, 4, tensor=0, kind="sign", rank=1, pairs=0, keys=0, coefs=0, keep=0)
    assert kernels.driver.launched == []


# ---- compilers, the cache, the driver
class FakeCompiler:
    name = "fake 1"

    def __init__(self) -> None:
        self.made = 0

    def target(self, arch: int) -> str:
        return f"sm_{arch}"

    def compile(self, part: int, target: str) -> bytes:
        self.made += 1
        return f"module {part} {target}".encode()


def test_modules_are_cached_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    make = FakeCompiler()
    for _ in range(2):
        assert cuda.module(4, 86, make, tmp_path / "new") == b"module 4 sm_86"
    assert make.made == 1
    (path,) = (tmp_path / "new").iterdir()
    for damage in (b"", path.read_bytes()[:-1], b"x" + path.read_bytes()[1:]):
        path.write_bytes(damage)
        assert cuda.module(4, 86, make, tmp_path / "new") == b"module 4 sm_86"
    assert make.made == 4
    assert [p.name for p in (tmp_path / "new").iterdir()] == [path.name], "nothing else is left there"
    cuda.module(4, 89, make, tmp_path / "new")
    make.name = "fake 2"
    cuda.module(4, 86, make, tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) == 3
    (tmp_path / "file").write_text("in the way")
    assert cuda.module(1, 86, make, tmp_path / "file") == b"module 1 sm_86"


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cuda.cache_folder() == tmp_path / "edgees" / "cubins"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cuda.cache_folder() == tmp_path / ".cache" / "edgees" / "cubins"


def test_the_target_runs_on_the_card() -> None:
    known = [75, 80, 86, 89, 90, 100, 120]
    assert [cuda.best_target(a, known) for a in (75, 80, 87, 89, 121)] == ["sm_75", "sm_80", "sm_86", "sm_89", "sm_120"]
    assert cuda.best_target(130, known) == "compute_120"
    with pytest.raises(NativeError, match="sm_80 at least, the card is sm_75"):
        cuda.best_target(75, known[1:])


def test_every_kernel_has_a_part() -> None:
    source = (ROOT / "csrc/cuda/kernels.cu").read_text()
    part, seen = 0, set()
    for line in source.splitlines():
        if opened := re.match(r"#if EDGEES_PARTS & (\d+)", line):
            part = int(opened[1])
        if kernel := re.match(r"EDGEES_KERNEL\((\w+),", line):
            assert cuda.part_of(kernel[1]) == part, kernel[1]
            seen.add(part)
    assert seen == set(cuda.PARTS.values())


def test_no_compiler_and_no_driver_are_said_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "nvrtc_candidates", lambda: ["/nowhere/libnvrtc.so.12"])
    with pytest.raises(MissingExtra, match=r"NVRTC.*tried: /nowhere/libnvrtc.so.12"):
        cuda.compiler()
    monkeypatch.setenv("EDGEES_NVCC", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtra, match="no nvcc on the PATH"):
        cuda.compiler()

    def nothing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    with pytest.raises(EngineError, match="no CUDA driver"):
        cuda.CudaDriver()
    cuda.kernels.cache_clear()
    told = cuda.describe()
    assert not told["ok"]
    assert "no CUDA driver" in told["error"]


def test_an_nvcc_that_fails_shows_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 'release 12.9, V12';;"
        " --list-gpu-arch) printf 'compute_75\\ncompute_90\\n';;"
        " *) echo 'kernels.cu(1): error: no such thing' >&2; exit 2;; esac\n"
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("EDGEES_NVCC", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    make = cuda.compiler()
    assert (make.name, make.target(86)) == ("nvcc 12.9", "compute_75")
    with pytest.raises(NativeError, match="error: no such thing"):
        make.compile(4, "sm_90")


class FakeNvrtc:
    """libnvrtc that knows two architectures and compiles nothing; keeps what it was given."""

    def __init__(self, fails: bool) -> None:
        self.code, self.given, self.options = 6 if fails else 0, dict[str, bytes](), list[str]()
        self.nvrtcGetErrorString: Any = lambda code: b"NVRTC_ERROR_COMPILATION"

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "nvrtcVersion":
                arguments[0]._obj.value, arguments[1]._obj.value = 12, 4
            elif name == "nvrtcGetNumSupportedArchs":
                arguments[0]._obj.value = 2
            elif name == "nvrtcGetSupportedArchs":
                arguments[0][:] = [75, 86]
            elif name == "nvrtcCreateProgram":
                _, main, title, count, texts, names = arguments
                self.given = {names[i].decode(): texts[i] for i in range(count)} | {title.decode(): main}
            elif name == "nvrtcCompileProgram":
                self.options = [arguments[2][i].decode() for i in range(arguments[1])]
                return self.code
            elif name.endswith("Size"):
                arguments[1]._obj.value = 5
            elif name.startswith("nvrtcGet"):
                arguments[1].value = {"nvrtcGetProgramLog": b"a(1)", "nvrtcGetCUBIN": b"code", "nvrtcGetPTX": b"text"}[
                    name
                ]
            else:
                assert name == "nvrtcDestroyProgram", name
            return 0

        return call


def test_nvrtc_is_given_every_header_and_its_log_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = FakeNvrtc(False), FakeNvrtc(True)
    monkeypatch.setattr(cuda.Nvrtc, "_load", lambda self, path: (good, "libnvrtc"))
    make = cuda.Nvrtc()
    assert (make.name, make.target(89), make.target(90)) == ("NVRTC 12.4", "sm_86", "compute_86")
    assert make.compile(2, "sm_86")[:4] == b"code"
    assert make.compile(2, "compute_86")[:4] == b"text"
    assert good.options == ["-std=c++17", "--gpu-architecture=compute_86", "-DEDGEES_PARTS=2"]
    for name, text in good.given.items():
        wanted = set(re.findall(r'#include ["<](.*)[">]', text.decode())) - {"emulate.h"}
        assert wanted <= set(good.given), name
    monkeypatch.setattr(cuda.Nvrtc, "_load", lambda self, path: (bad, "libnvrtc"))
    with pytest.raises(NativeError, match=r"(?s)NVRTC 12.4 could not .* sm_86: NVRTC_ERROR_COMPILATION.*a\(1\)"):
        cuda.Nvrtc().compile(2, "sm_86")


def test_nvrtc_is_looked_for_beside_torch_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.4",
        "nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12",
        "torch/lib/libnvrtc-1a2b.so.12",
        "toolkit/lib64/libnvrtc.so.13",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    class Spec:
        def __init__(self, folder: Path) -> None:
            self.submodule_search_locations = [str(folder)]

    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: Spec(tmp_path / name))
    monkeypatch.setattr(cuda.ctypes.util, "find_library", lambda name: "libnvrtc.so.11")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    found = [name.removeprefix(f"{tmp_path}/") for name in cuda.nvrtc_candidates()]
    ours = ["nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "torch/lib/libnvrtc-1a2b.so.12", "toolkit/lib64/libnvrtc.so.13"]
    assert [found[0], found[1], found[2], found[-1]] == [*ours, "libnvrtc.so.11"]
    assert not any("builtins" in name or ".alt" in name for name in found)


class FakeCuda:
    """libcuda with one card, as far as CudaDriver calls it."""

    def __init__(self, arch: int = 86, fails: str = "") -> None:
        self.arch, self.fails, self.loaded, self.launched = arch, fails, list[bytes](), list[tuple[Any, ...]]()
        self.current = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 999
            first = arguments[0]._obj if hasattr(arguments[0], "_obj") else arguments[0]
            if name == "cuDeviceGetAttribute":
                first.value = self.arch // 10 if arguments[1] == 75 else self.arch % 10
            elif name == "cuDeviceGetName":
                first.value = b"Fake Card"
            elif name == "cuDevicePrimaryCtxRetain":
                first.value = 77
            elif name == "cuCtxGetCurrent":
                first.value = self.current
            elif name == "cuCtxSetCurrent":
                self.current = first.value
            elif name == "cuModuleLoadData":
                self.loaded.append(arguments[1])
            elif name == "cuModuleGetFunction":
                first.value = len(arguments[2])
            elif name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_UNKNOWN"
            elif name == "cuLaunchKernel":
                base = ctypes.cast(arguments[9][0], ctypes.POINTER(ctypes.c_uint64))[0]
                self.launched.append((*arguments, base))
            else:
                assert name in ("cuInit", "cuDeviceGet"), name
            return 0

        return call


def test_launches_through_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake, make = FakeCuda(), FakeCompiler()
    monkeypatch.setattr(cuda, "_libcuda", lambda: fake)
    driver = cuda.CudaDriver(0, make)
    kernels = Kernels(driver)
    m, x = matrix("NF4", 8, 64), inputs(1, 64, "F32")
    for _ in range(2):
        kernels.linear(m.weight, x.ctypes.data, x.ctypes.data, 1, dtype="F32", stream=1234)
    kernels.vectors(x.ctypes.data, "F32", 64, x.ctypes.data, 1, dtype="F32")
    assert (driver.name, driver.arch, fake.current) == ("Fake Card", 86, 77)
    assert fake.loaded == [b"module 1 sm_86", b"module 4 sm_86"], "each part is loaded once"
    function, *dims, shared, stream, _, extra, base = fake.launched[0]
    assert (function.value, dims, shared, stream.value, extra) == (18, [1, 1, 1, 32, 4, 1], 0, 1234, None)
    assert base == m.weight.base
    assert [len(list(tmp_path.rglob(f"sm_86-{part}-*"))) for part in (1, 4)] == [1, 1]


def test_old_cards_and_faults_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_libcuda", lambda: FakeCuda(arch=61))
    with pytest.raises(EngineError, match=r"Fake Card is sm_61; .* sm_75"):
        cuda.CudaDriver(0, FakeCompiler())
    monkeypatch.setattr(cuda, "_libcuda", lambda: FakeCuda(fails="cuDeviceGet"))
    with pytest.raises(EngineError, match="cuDeviceGet: CUDA_ERROR_UNKNOWN"):
        cuda.CudaDriver(0, FakeCompiler())


def test_doctor_is_told_of_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "_libcuda", lambda: FakeCuda(arch=90))
    monkeypatch.setattr(cuda, "compiler", FakeCompiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda.kernels.cache_clear()
    told = cuda.describe()
    cuda.kernels.cache_clear()
    assert told == {
        "ok": True, "card": "Fake Card", "arch": "sm_90", "compiler": "fake 1", "target": "sm_90",
        "cache": str(tmp_path / "edgees" / "cubins"),
    }  # fmt: skip


def compilers() -> list[cuda.Compiler]:
    """What is on this machine."""
    found: list[cuda.Compiler] = []
    for kind in (cuda.Nvrtc, cuda.Nvcc):
        try:
            found.append(kind())
        except MissingExtra:
            continue
    return found


@pytest.mark.slow
def test_nothing_is_fused_in_the_noise_and_the_update() -> None:
    """In PTX, for each compiler that is here: products and sums of float32 stay two roundings, and none is flushed."""
    for make in compilers():
        text = make.compile(cuda.PARTS[""], "compute_75" if isinstance(make, cuda.Nvcc) else "compute_80").decode()
        for name in ("row_lookup", "vector_of", "delta_apply", "factors_apply", "plane_encode"):
            entry = re.search(rf"\.entry {name}\b.*?^}}", text, re.S | re.M)
            assert entry, name
            assert not re.search(r"\bfma\.|\bmad\.[^ ]*f32|\.ftz", entry[0]), name
            assert re.search(r"\badd\.(rn\.)?f32", entry[0]), name


@pytest.mark.slow
def test_the_source_compiles_here() -> None:
    """Some part for the oldest card, by each compiler that is here; scripts/gpu_check.sh compiles all for all."""
    for make in compilers():
        assert make.compile(cuda.PARTS["tile_bf16"], make.target(75))[:4] == b"\x7fELF"
        assert make.compile(cuda.PARTS["tile_f16"], make.target(75))[:4] == b"\x7fELF"
