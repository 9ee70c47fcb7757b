"""The learned weights on disk: exact updates, in any view, and a file that is whole or says that it is not."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference

from edgees import native, noise
from edgees.backends.base import TensorInfo
from edgees.delta import Delta, DeltaSpec, Step, float32s, state_path
from edgees.errors import RunError, WillNotFit

TENSORS = (
    TensorInfo("a.weight", "blk.a", 37, 70, False, 0.25),
    TensorInfo("b.weight", "blk.b", 20, 24, False, 0.5),
    TensorInfo("b.bias", "blk.bias", 1, 24, True, 2.0),
)


def spec(view: str = "refined", kind: str = "lowrank", rank: int = 2) -> DeltaSpec:
    return DeltaSpec(TENSORS, view, 4, 6 if view == "adapter" else 0, kind, rank, 7)


def steps(count: int, pairs: int = 3, keep: float = 1.0) -> list[Step]:
    rng = np.random.default_rng(0)
    return [
        Step(
            g,
            tuple(noise.make_key(7, g, p) for p in range(pairs)),
            tuple(g * pairs + p for p in range(pairs)),
            float32s(rng.normal(size=pairs) * 0.01),
            float32s([keep])[0],
        )
        for g in range(count)
    ]


def test_steps_are_scaled_by_rms_and_amplitude() -> None:
    two = (TensorInfo("a", "a", 4, 8, False, 0.5, amplitude=3.0), TensorInfo("b", "b", 12, 8, False, 0.25))
    relative = DeltaSpec(two, "refined", 4, 0, "sign", 1, 0)
    assert [relative.scale(t) for t in two] == [1.5, 0.25]
    assert relative.spread == math.sqrt((4 * 9 + 12 * 1) / 16)
    absolute = dataclasses.replace(relative, absolute=True)
    assert [absolute.scale(t) for t in two] == [3.0, 1.0]
    assert DeltaSpec.from_dict(json.loads(json.dumps(absolute.to_dict())), "x") == absolute


@pytest.mark.parametrize("kind", ["sign", "lowrank", "normal"])
def test_an_update_is_the_reference_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Case 23: three steps with decay, all tensors, against the readable twin."""
    expected = {t.name: np.zeros((t.rows, t.cols), np.float32) for t in TENSORS}
    with Delta.create(tmp_path / "d.safetensors", spec(kind=kind)) as delta:
        for step in steps(3, keep=0.9):
            delta.apply(step)
            for t in TENSORS:
                expected[t.name] = reference.update_dense(
                    expected[t.name], t.name, t.rho, list(step.keys), np.array(step.coefs, np.float32), step.keep,
                    kind, 2, t.vector,
                )  # fmt: skip
        for t in TENSORS:
            found = delta.rows(t.name, 0, t.rows)
            assert found.tobytes() == expected[t.name].tobytes()
            assert delta.rows(t.name, t.rows // 2, 1).tobytes() == expected[t.name][t.rows // 2].tobytes()
        square = sum(float(np.square(expected[t.name].astype(np.float64)).sum()) / t.rho**2 for t in TENSORS)
        assert math.isclose(delta.drift(), math.sqrt(square / sum(t.size for t in TENSORS)), rel_tol=1e-12)
        assert delta.vector("b.bias").shape == (24,)


def test_an_adapter_update_is_the_reference_bit_for_bit(tmp_path: Path) -> None:
    t = TENSORS[0]
    a = np.zeros((t.rows, 6), np.float32)
    with Delta.create(tmp_path / "d.safetensors", spec("adapter")) as delta:
        factors = delta.factors(t.name)
        for step in steps(4, keep=0.9):
            delta.apply(step)
            coefs = np.array(step.coefs, np.float32)
            a = reference.update_factors(
                a, t.name, t.rho, list(step.keys), list(step.slots), coefs, step.keep, 2
            )  # fmt: skip
        assert delta.factors(t.name) is factors and factors.tobytes() == a.tobytes()
        dense = reference.adapter_delta(a, reference.pool(7, t.id, t.cols, 6))
        assert delta.rows(t.name, 0, t.rows).tobytes() == dense.tobytes()
        square = sum(
            float(np.square(delta.rows(t.name, 0, t.rows).astype(np.float64)).sum()) / t.rho**2 for t in TENSORS
        )
        assert math.isclose(delta.drift(), math.sqrt(square / sum(t.size for t in TENSORS)), rel_tol=1e-6)
    with Delta.open(tmp_path / "d.safetensors", write=False) as again:
        assert again.factors(t.name).tobytes() == a.tobytes()
        assert (again.generation, again.spec) == (4, spec("adapter"))


@pytest.mark.parametrize("view", ["refined", "adapter"])
def test_files_agree_over_threads_and_instruction_sets(tmp_path: Path, view: str) -> None:
    """Cases 23 and 33: the file's bytes do not depend on how they were computed."""
    before, threads = native.isa(), native.threads()
    files = set()
    try:
        for isa in native.available_isas():
            for count in (1, 3):
                native.set_isa(isa)
                native.threads(count)
                path = tmp_path / f"{isa}-{count}.safetensors"
                with Delta.create(path, spec(view)) as delta:
                    for step in steps(3, keep=0.99):
                        delta.apply(step)
                files.add(path.read_bytes())
    finally:
        native.set_isa(before)
        native.threads(threads)
    assert len(files) == 1


def test_tiny_updates_add_up(tmp_path: Path) -> None:
    """Case 21: 1,000 moves of 1e-6 on weights of RMS 0.02 come to 1e-3, not to nothing."""
    info = TensorInfo("w", "w", 8, 8, False, 0.02)
    coef = float32s([1e-6 / 0.02])
    with Delta.create(tmp_path / "d.safetensors", DeltaSpec((info,), "refined", 4, 0, "sign", 1, 0)) as delta:
        for g in range(1000):
            delta.apply(Step(g, (noise.make_key(0, 0, 0),), (g,), coef, 1.0))  # the same direction every time
        moved = delta.rows("w", 0, 8)
    np.testing.assert_allclose(np.abs(moved), 1e-3, rtol=1e-4)


def test_a_step_of_nothing_changes_no_byte(tmp_path: Path) -> None:
    """Case 20: zero coefficients leave the weights' bytes alone; the number of updates still grows."""
    path = tmp_path / "d.safetensors"
    with Delta.create(path, spec()) as delta:
        delta.apply(steps(1)[0])
        before = path.read_bytes()
        for g in range(1, 20):
            delta.apply(Step(g, (1, 2), (0, 1), (0.0, 0.0), 1.0))
        assert path.read_bytes() == before and delta.generation == 20


def test_steps_come_in_order(tmp_path: Path) -> None:
    with Delta.create(tmp_path / "d.safetensors", spec()) as delta:
        first, second, _ = steps(3)
        with pytest.raises(RunError, match="number 1 does not come next"):
            delta.apply(second)
        delta.apply(first)
        with pytest.raises(RunError, match="number 0 does not come next"):
            delta.apply(first)
        with pytest.raises(RunError, match="differ in number"):
            delta.apply(Step(1, (1, 2), (1,), (0.1, 0.1), 1.0))
        with pytest.raises(RunError, match="has no tensor nobody"):
            delta.rows("nobody", 0, 1)
        with pytest.raises(RunError, match=r"37 rows; 30\.\.40 were asked for"):
            delta.rows("a.weight", 30, 10)


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with Delta.create(tmp_path / "d.safetensors", spec()) as delta:
        delta.apply(steps(1)[0])
        loaded = load_file(tmp_path / "d.safetensors")
        assert set(loaded) == {t.name for t in TENSORS}
        for t in TENSORS:
            assert loaded[t.name].reshape(t.rows, t.cols).tobytes() == delta.rows(t.name, 0, t.rows).tobytes()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-100], "is truncated"),
        (lambda data: data[:5], "truncated or no safetensors"),
        (lambda data: b"\xff" * 8 + data[8:], "truncated or no safetensors"),
        (lambda data: data[:8] + b"x" * 100 + data[108:], "damaged header"),
        (lambda data: data.replace(b'"noise\\":1', b'"noise\\":9'), "noise version 9"),
        (lambda data: data.replace(b'"rank\\":2', b'"rank\\":x'), "damaged header"),
        (lambda data: data.replace(b'"shape":[37,70]', b'"shape":[70,37]'), "contradicts itself"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: object, told: str) -> None:
    path = tmp_path / "d.safetensors"
    Delta.create(path, spec()).close()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(RunError, match=told) as info:
        Delta.open(path)
    assert str(path) in info.value.message


def test_a_half_written_file_is_not_used(tmp_path: Path) -> None:
    """Case 32: the sidecar tells; without it the file counts as half-written."""
    path = tmp_path / "d.safetensors"
    Delta.create(path, spec()).close()
    state_path(path).write_text(json.dumps({"generation": 3, "clean": False}))
    with pytest.raises(RunError, match="half-written"):
        Delta.open(path)
    with Delta.open(path, dirty_ok=True) as delta:
        assert (delta.generation, delta.clean) == (3, False)
        with pytest.raises(RunError, match="half-written"):
            delta.apply(steps(4)[3])
    state_path(path).unlink()
    with pytest.raises(RunError, match="half-written"):
        Delta.open(path)
    path.unlink()
    with pytest.raises(RunError, match="is missing"):
        Delta.open(path)


def test_a_copy_is_independent(tmp_path: Path) -> None:
    with Delta.create(tmp_path / "d.safetensors", spec()) as delta:
        first, second = steps(2)
        delta.apply(first)
        before = (tmp_path / "d.safetensors").read_bytes()
        delta.copy_to(tmp_path / "copy.safetensors")
        delta.apply(second)
    with Delta.open(tmp_path / "copy.safetensors", write=False) as copy:
        assert copy.generation == 1
    assert (tmp_path / "copy.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_no_space_is_found_out_first(tmp_path: Path) -> None:
    """Case 15: nothing is written, and what was there before stays."""
    path = tmp_path / "d.safetensors"
    Delta.create(path, spec()).close()
    before = path.read_bytes()
    huge = DeltaSpec((TensorInfo("w", "w", 1 << 24, 1 << 24, False, 1.0),), "refined", 4, 0, "sign", 1, 0)
    with pytest.raises(WillNotFit, match=r"needs .* MB on disk") as info:
        Delta.create(path, huge)
    assert info.value.exit_code == 3 and "--scope adapter" in str(info.value.hint)
    assert path.read_bytes() == before
    with Delta.open(path) as delta:
        assert delta.clean


def test_a_spec_survives_json() -> None:
    odd = DeltaSpec(
        (TensorInfo("a", "b", 4, 8, False, float(np.float32(0.1)), 2),), "lattice", 0, 0, "normal", 1, 2**60
    )
    assert DeltaSpec.from_dict(json.loads(json.dumps(odd.to_dict())), "x") == odd
    with pytest.raises(RunError, match="x describes no delta"):
        DeltaSpec.from_dict({"noise": noise.VERSION}, "x")
    with pytest.raises(RunError, match="unknown view"):
        DeltaSpec.from_dict({**odd.to_dict(), "view": "odd"}, "x")
