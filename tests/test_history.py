"""The journal and the run folder: what a kill, a full disk, a second process or a hand can do to them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgees import noise
from edgees.backends.base import TensorInfo
from edgees.checkpoint import RunFolder, append_line, best_record, recover, write_atomic
from edgees.config import Config, load
from edgees.delta import Delta, DeltaSpec, state_path
from edgees.errors import EdgeesError, RunError, WillNotFit
from edgees.history import History, replay, short_float32s

SPEC = DeltaSpec((TensorInfo("w", "blk.w", 6, 40, False, 0.5),), "refined", 4, 0, "lowrank", 1, 3)


def config(path: Path, **more: Any) -> Config:
    return load(None, {"run": str(path), "seed": 3, "pairs": 2, **more})


def header(settings: Config) -> dict[str, Any]:
    return {
        "base": "sha256:0", "data": "sha256:1", "config": settings.public(free=False), "delta": SPEC.to_dict(),
        "seed": 3, "pairs": 2,
    }  # fmt: skip


def line(generation: int) -> dict[str, Any]:
    rng = np.random.default_rng(generation)
    return {
        "generation": generation, "coefs": short_float32s(rng.normal(size=2) * 0.01), "keep": 1.0, "seconds": 1.0,
        "rewards": {"plus": [0.1, 0.2], "minus": [0.3, None]}, "excluded": [], "sigma": 0.04, "lr": 0.2,
    }  # fmt: skip


def evaluation(generation: int, mean: float | None) -> dict[str, Any]:
    return {"eval": generation, "mean": mean, "se": 0.1, "rows": 4, "seconds": 0.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four generations, evaluated after 0, 2 and 4; the best is after 2."""
    path = tmp_path / "run"
    with RunFolder.create(config(path)) as folder, Delta.create(folder.delta_path, SPEC) as delta:
        history = History.create(folder.history_path, header(folder.config))
        for generation, mean in enumerate((0.1, None, 0.5, None, 0.3)):
            if mean is not None:
                history.append(evaluation(generation, mean))
                if mean != 0.3:
                    folder.save_best(delta, {"generation": generation, "heldout": mean})
            if generation < 4:
                history.append(line(generation))
                delta.apply(history.step(generation))
    return path


def files(run: Path) -> dict[str, bytes]:
    names = ("history.jsonl", "delta.safetensors", "best/delta.safetensors", "best/best.json")
    return {name: (run / name).read_bytes() for name in names}


def mended(run: Path) -> list[str]:
    with RunFolder.open(run) as folder:
        recover(folder)[1].close()
        return folder.notes


# --- the journal --------------------------------------------------------------------------------------------------


def test_a_journal_reads_back_exactly(run: Path) -> None:
    history = History.open(run / "history.jsonl")
    assert history.generation == 4 and history.notes == []
    assert history.lines == [line(g) for g in range(4)]
    assert history.spec == SPEC
    assert history.best() == evaluation(2, 0.5)
    assert history.seconds() == 5.5
    step = history.step(1)
    assert step.keys == (noise.make_key(3, 1, 0), noise.make_key(3, 1, 1)) and step.slots == (2, 3)
    assert [np.float32(c) for c in step.coefs] == [np.float32(c) for c in line(1)["coefs"]]


def test_replay_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    with replay(run / "history.jsonl", tmp_path / "again.safetensors") as delta:
        assert delta.generation == 4
    assert (tmp_path / "again.safetensors").read_bytes() == (run / "delta.safetensors").read_bytes()
    with replay(run / "history.jsonl", tmp_path / "again.safetensors", 2):
        pass
    assert (tmp_path / "again.safetensors").read_bytes() == (run / "best/delta.safetensors").read_bytes()
    with pytest.raises(RunError, match="holds 4 generations; 5 were asked for"):
        replay(run / "history.jsonl", tmp_path / "again.safetensors", 5)


def test_the_shortest_decimals_of_float32() -> None:
    values = np.float32([0.1, 1 / 3, 1e-30, 16777217, -0.0])
    short = short_float32s(values)
    assert [np.float32(json.loads(json.dumps(v))) for v in short] == list(values)
    assert short[0] == 0.1


def test_nan_has_no_place_in_a_journal(run: Path) -> None:
    history = History.open(run / "history.jsonl")
    before = (run / "history.jsonl").read_bytes()
    with pytest.raises(ValueError):
        history.append({**line(4), "sigma": float("nan")})
    with pytest.raises(RunError, match="3 coefficients for 2 pairs"):
        history.append({**line(4), "coefs": [1.0, 2.0, 3.0]})
    with pytest.raises(RunError, match="generation 7 where 4 is due"):
        history.append(line(7))
    assert (run / "history.jsonl").read_bytes() == before


def test_cut_anywhere_it_opens_at_the_last_complete_line(run: Path, tmp_path: Path) -> None:
    """Case 32: every length that a kill or a crash can leave."""
    data = (run / "history.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    path = tmp_path / "history.jsonl"
    ends = [i + 1 for i, c in enumerate(data) if c == 10]
    for size in sorted({*range(first, len(data), 29), *ends, *(e - 1 for e in ends[1:])}):
        path.write_bytes(data[:size])
        history = History.open(path)
        lines = data[:size].count(b"\n") - 1
        assert len(history.lines) + len(history.evals) == lines
        assert bool(history.notes) == (data[size - 1 : size] != b"\n")
        assert path.read_bytes() == data[: data.rindex(b"\n", 0, size) + 1]
    path.write_bytes(data + b"\x00" * 100)
    assert History.open(path).generation == 4 and path.read_bytes() == data
    path.write_bytes(data[:first] + b'{"generation": 0, "co')
    assert History.open(path, repair=False).generation == 0
    assert path.read_bytes() != data[:first]
    for size in (0, first // 2):
        path.write_bytes(data[:size])
        with pytest.raises(RunError, match="killed before it began"):
            History.open(path)


@pytest.mark.parametrize(
    ("number", "text", "told"),
    [
        (3, '{"generation": 0, "coefs"', r"history\.jsonl:3: damaged line"),
        (3, "[1]", r"history\.jsonl:3: damaged line"),
        (3, '{"generation": 0, "keep": 1.0}', r"history\.jsonl:3: coefs missing"),
        (3, '{"generation": 1, "coefs": [1, 2], "keep": 1.0}', r"history\.jsonl:3: generation 1 where 0 is due"),
        (3, '{"generation": 0, "coefs": [1], "keep": 1.0}', r"history\.jsonl:3: 1 coefficients for 2 pairs"),
        (2, '{"eval": 3, "mean": 1.0}', r"history\.jsonl:2: an evaluation after 3 generations where 0 stand"),
        (1, '{"hello": 1}', r"history\.jsonl:1: no header of an edgees run"),
        (1, "not json", r"history\.jsonl:1: damaged line"),
    ],
)
def test_damage_is_told_with_file_and_line(run: Path, number: int, text: str, told: str) -> None:
    path = run / "history.jsonl"
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=told) as info:
        History.open(path)
    assert info.value.exit_code == 2


def test_other_versions_are_refused(run: Path) -> None:
    path = run / "history.jsonl"
    data = path.read_text()
    path.write_text(data.replace('"history":1', '"history":2'))
    with pytest.raises(RunError, match="history format 2, this edgees reads 1"):
        History.open(path)
    path.write_text(data.replace('"noise":1', '"noise":2'))
    with pytest.raises(RunError, match="noise version 2, this edgees has 1"):
        _ = History.open(path).spec


def test_a_journal_is_never_overwritten(run: Path) -> None:
    with pytest.raises(RunError, match="exists already"):
        History.create(run / "history.jsonl", header(config(run)))


# --- the folder ---------------------------------------------------------------------------------------------------


def test_a_folder_that_is_well_is_left_alone(run: Path) -> None:
    before = files(run)
    assert mended(run) == []
    assert files(run) == before
    assert best_record(run) == {"generation": 2, "heldout": 0.5}
    records = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["generation"], "heldout" in r) for r in records] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
    ]  # fmt: skip
    assert [r["best"] for r in records if "heldout" in r] == [True, True, False]


def broken_delta(run: Path) -> None:
    data = bytearray((run / "delta.safetensors").read_bytes())
    data[-8:] = b"garbage!"
    (run / "delta.safetensors").write_bytes(data)
    state_path(run / "delta.safetensors").write_text('{"generation": 3, "clean": false}')


def behind(run: Path) -> None:
    replay(run / "history.jsonl", run / "delta.safetensors", 1).close()


def half_copied_best(run: Path) -> None:
    (run / "best/delta.safetensors.tmp").write_bytes(b"half")
    state_path(run / "best/delta.safetensors").write_text('{"generation": 2, "clean": false}')


def stale_best(run: Path) -> None:
    replay(run / "history.jsonl", run / "best/delta.safetensors", 0).close()
    (run / "best/best.json").write_text('{"generation": 0, "heldout": 0.1}\n')


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (broken_delta, "left half-written: made anew"),
        (behind, "3 update(s) of the history were missing: added"),
        (lambda run: (run / "delta.safetensors").unlink(), "is missing: made anew"),
        (lambda run: state_path(run / "delta.safetensors").unlink(), "half-written: made anew"),
        (lambda run: (run / "delta.safetensors").write_bytes(b"x" * 9), "safetensors file (9 bytes): made anew"),
        (half_copied_best, "best/ was made anew"),
        (stale_best, "best/ was made anew"),
        (lambda run: (run / "best/best.json").write_text("{"), "best/ was made anew"),
        (lambda run: (run / "best/delta.safetensors").unlink(), "best/ was made anew"),
    ],
)
def test_whatever_a_kill_leaves_is_mended_to_the_byte(run: Path, damage: Any, told: str) -> None:
    """Case 32: the journal leads, and everything else is brought up to it."""
    before = files(run)
    damage(run)
    assert any(told in note for note in mended(run))
    assert files(run) == before
    assert not list(run.rglob("*.tmp")) and mended(run) == []


def test_a_delta_ahead_of_its_journal_is_made_anew(run: Path) -> None:
    path = run / "history.jsonl"
    data = path.read_bytes()
    cut = data[: data.index(b'{"generation":3')]
    path.write_bytes(cut)
    assert any("holds 4 updates where the history has 3" in note for note in mended(run))
    with Delta.open(run / "delta.safetensors") as delta:
        assert delta.generation == 3


def test_a_delta_of_another_run_is_not_taken(run: Path) -> None:
    before = files(run)
    other = DeltaSpec(SPEC.tensors, "refined", 4, 0, "sign", 1, 3)
    Delta.create(run / "delta.safetensors", other).close()
    state_path(run / "delta.safetensors").write_text('{"generation": 4, "clean": true}')
    assert any("is of another run: made anew" in note for note in mended(run))
    assert files(run) == before


def test_changed_settings_are_refused_with_the_difference(run: Path) -> None:
    """Case 33."""
    resolved = run / "config.resolved.toml"
    text = resolved.read_text()
    resolved.write_text(text.replace("sigma = 0.04", "sigma = 0.08").replace("threads = 0", "threads = 1"))
    with RunFolder.open(run) as folder:
        with pytest.raises(RunError, match=r"sigma: 0\.04 -> 0\.08") as info:
            folder.check_config(History.open(run / "history.jsonl"))
        assert "threads" not in info.value.message
    resolved.write_text(text.replace("threads = 0", "threads = 1"))
    with RunFolder.open(run) as folder:
        folder.check_config(History.open(run / "history.jsonl"))


def test_a_run_in_use_is_refused(run: Path) -> None:
    with RunFolder.open(run), pytest.raises(RunError, match="in use by another edgees process"):
        RunFolder.open(run)
    context = multiprocessing.get_context("spawn")
    with RunFolder.open(run):
        child = context.Process(target=_open_and_leave, args=(str(run),))
        child.start()
        child.join(60)
        assert child.exitcode == 2
    RunFolder.open(run).close()


def _open_and_leave(run: str) -> None:
    try:
        RunFolder.open(run).close()
    except RunError as error:
        os._exit(error.exit_code)


def test_names_of_new_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for task, name in (
        ("home", "home-1"), ("home", "home-2"), ("jsonl:/x/my röws.jsonl", "my-r-ws-1"),
        ("reasoning_gym:chain_sum?seed=1", "reasoning_gym-chain_sum-1"),
    ):  # fmt: skip
        with RunFolder.create(load(None, {"task": task})) as folder:
            assert folder.path == Path("runs") / name
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("runs").write_text("")
    with pytest.raises(RunError, match="cannot make runs/home-1"):
        RunFolder.create(load(None, {}))


def test_folders_that_cannot_be(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, told in (
        (run, "holds a run already"),
        (tmp_path / "file", "is a file, not a folder"),
        (tmp_path / "file" / "below", "cannot make"),
    ):
        with pytest.raises(RunError, match=told) as info:
            RunFolder.create(config(path))
        assert info.value.hint
    (tmp_path / "empty").mkdir()
    for path, told in ((tmp_path / "nowhere", "there is no run folder"), (tmp_path / "empty", "holds no run")):
        with pytest.raises(RunError, match=told):
            RunFolder.open(path)
    (run / "config.resolved.toml").write_text("sigma = ")
    with pytest.raises(RunError, match="not valid TOML"):
        RunFolder.open(run)


def test_a_failed_start_leaves_no_folder_behind(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path / "new"))
    with pytest.raises(ZeroDivisionError), folder.made_or_removed():
        raise ZeroDivisionError
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine").write_text("")
    folder = RunFolder.create(config(tmp_path / "old"))
    with pytest.raises(ZeroDivisionError), folder.made_or_removed():
        raise ZeroDivisionError
    assert (tmp_path / "old" / "mine").exists()


# --- disks that are full or read-only -------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB of its own; skipped where nothing may be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, check=False)
    except OSError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with pytest.raises(OSError) as info, open(filler, "wb", buffering=0) as file:
        while True:
            if file.write(b"x" * 4096) < 4096:
                raise OSError(errno.ENOSPC, "full")
    assert info.value.errno == errno.ENOSPC
    return filler


def test_a_full_disk_costs_nothing_that_was_there(run: Path, disk: Path) -> None:
    """Case 15: journal, snapshots and small files survive; exit code 3 and what to do."""
    subprocess.run(["cp", "-r", str(run), str(disk / "run")], check=True)
    path = disk / "run"
    before = files(path)
    with RunFolder.open(path) as folder:
        history, delta = recover(folder)
        filler = fill(disk)
        attempts: list[Any] = [
            lambda: write_atomic(path / "best" / "best.json", b"x" * 5000),
            lambda: folder.save_best(delta, {"generation": 4, "heldout": 1.0}),
            lambda: history.append({**line(4), "rows": ["x" * 8000]}),
            lambda: append_line(path / "metrics.jsonl", {"text": "x" * 8000}),
            lambda: Delta.create(path / "other.safetensors", SPEC),
        ]
        for attempt in attempts:
            with pytest.raises(WillNotFit) as info:
                attempt()
            assert info.value.exit_code == 3 and info.value.hint
        assert files(path) == before and history.generation == 4
        filler.unlink()
        history.append(line(4))
        delta.apply(history.step(4))
        delta.close()
    assert mended(path) == []


def test_a_read_only_folder_is_said(run: Path, disk: Path) -> None:
    subprocess.run(["cp", "-r", str(run), str(disk / "run")], check=True)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(RunError, match="cannot write into") as info:
        RunFolder.open(disk / "run")
    assert "read-only" in str(info.value.hint)
    with pytest.raises(RunError, match="cannot make"):
        RunFolder.create(config(disk / "new"))
    with pytest.raises(EdgeesError, match="cannot write"):
        write_atomic(disk / "x", b"")
    with Delta.open(disk / "run" / "delta.safetensors") as delta:  # reading is no problem
        assert delta.generation == 4
