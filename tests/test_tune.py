"""The loop on the toy engine: it climbs, it is reproducible to the byte, and it stops and goes on as it should."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import reference
from test_history import disk, fill  # noqa: F401 - a fixture

from edgees import forgetting, native, opening, report, tune, watch
from edgees.backends.base import CENTRE, Completion, Member, Progress, Request
from edgees.backends.toy import ToyEngine
from edgees.checkpoint import best_record
from edgees.config import Config, load
from edgees.delta import Delta, Step
from edgees.errors import EngineError, Interrupted, ModelError, RunError, ScorerError, UsageError, WillNotFit
from edgees.history import History
from edgees.report import Observer
from edgees.tasks.rows import Row, Task

NAN = float("nan")
TARGET = 1.5


def near(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The nearer to 1.5 the better."""
    return [-abs(float(text) - TARGET) for text in completions]


def some_task(count: int = 40, reward: Callable[..., Any] = near, **more: Any) -> Task:
    rows = [Row.plain(f"r{i}", f"question {i}", str(TARGET)) for i in range(count)]
    cut = count * 3 // 4
    return Task("toy task", tuple(rows[:cut]), tuple(rows[cut:]), (reward,), max_tokens=16, **more)


TASK = some_task()


def config(run: Path, **more: Any) -> Config:
    settings = {"engine": "toy", "model": "toy", "run": str(run), "pairs": 4, "rows": 4, "generations": 10}
    settings["antithetic"] = True
    return load(None, settings | more)


class Watcher(Observer):
    """Remembers what it is told; ``stop_after``: asks for a stop (as Ctrl-C does) when that generation is through."""

    def __init__(self, stop_after: int = -1) -> None:
        self.stop_after = stop_after
        self.texts: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {}
        self.requests = 0

    def on_start(self, info: Any) -> None:
        self.info = dict(info)

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        self.requests += 1

    def on_generation(self, record: Any) -> None:
        self.records.append(dict(record))
        if record["generation"] == self.stop_after:
            signal.raise_signal(signal.SIGINT)

    def on_eval(self, record: Any) -> None:
        self.evals.append(dict(record))

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def journal(run: Path) -> list[Any]:
    """The journal without its times."""
    return [
        {k: v for k, v in json.loads(text).items() if k != "seconds"}
        for text in (run / "history.jsonl").read_text().splitlines()
    ]


def learned(run: Path) -> tuple[bytes, bytes, dict[str, Any] | None]:
    delta, best = run / "delta.safetensors", run / "best/delta.safetensors"
    return delta.read_bytes(), best.read_bytes(), best_record(run)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than the runs here; tests/test_report.py has them."""
    monkeypatch.setattr(report, "plot", lambda run, rows: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten generations, never interrupted."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    tune.tune(config(run), task=TASK)
    return run


# --- learning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shaping": "ranks"},
        {"shaping": "raw", "lr": 0.02},
        {"shrink": False, "noise": "sign"},
        {"noise": "normal"},
        {"scope": "adapter", "factors": 8, "params": "."},
        {"scope": "lattice"},
        {"loglik": 1.0},
        {"sigma_abs": 0.02, "lr": 0.1},
        {"antithetic": False, "pairs": 16},
        {"antithetic": False, "pairs": 32, "rows": 2, "groups": 8},
        {"groups": 4, "rows": 2},
    ],
)
def test_the_reward_rises(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Case 27: for every shaping, view and kind of noise, on rows that were never tuned on."""
    result = tune.tune(config(tmp_path / "run", **({"pairs": 8, "rows": 8, "generations": 12} | settings)), task=TASK)
    assert result.base is not None and result.best is not None
    assert result.best > result.base + 0.25
    assert result.generations == 12 and result.best_generation


def test_one_generation_is_what_the_twin_says(tmp_path: Path) -> None:
    """Members, rewards, coefficients and the step, put together from the other modules by hand."""
    from edgees.population import Population, RowOrder
    from edgees.update import update

    run = tmp_path / "run"
    tune.tune(config(run, generations=1, seed=5), task=TASK)
    engine, people = ToyEngine(), Population(5, 4)
    rows = [TASK.train[i] for i in RowOrder(5, len(TASK.train), 4).rows(0)]
    rewards = np.zeros((8, 4))
    members = people.ask(0, 0.04)
    with Delta.create(tmp_path / "zero.safetensors", opening.spec_of(config(run, seed=5), engine)) as zero:
        engine.attach(zero)
        for i, member in enumerate(members):
            prompts = [tuple(engine.encode_chat(TASK.conversation(row))) for row in rows]
            texts = [engine.generate([Request(member, p, 16)])[0].text for p in prompts]
            rewards[i] = near([], texts)
    step = update(rewards.reshape(4, 2, 4), lr=0.2, sigma=0.04)
    line = journal(run)[2]
    assert line["rows"] == [row.id for row in rows]
    assert [np.float32(c) for c in line["coefs"]] == [np.float32(c) for c in step.coefs]
    assert line["shrink"] == step.shrink and line["z"] == list(step.z)
    with Delta.open(run / "delta.safetensors") as delta:
        info = delta.spec.tensors[0]
        from edgees import noise

        acc = np.zeros((info.rows, info.cols), np.float32)
        for key, coef in zip(people.keys(0), step.coefs, strict=True):
            cs = np.float32(coef * info.rho)
            acc += cs * noise.eps("lowrank", key, info.id, info.rows, info.cols, rank=1)
        np.testing.assert_array_equal(delta.rows(info.name, 0, info.rows), acc)


def test_members_without_a_minus_resume_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"antithetic": False, "pairs": 6, "rows": 2, "groups": 3, "generations": 4}
    tune.tune(config(tmp_path / "whole", **settings), task=TASK)
    with pytest.raises(Interrupted):
        tune.tune(config(tmp_path / "halves", **settings), task=TASK, observer=Watcher(stop_after=2))
    tune.resume(tmp_path / "halves", task=TASK)
    assert learned(tmp_path / "halves") == learned(tmp_path / "whole")
    assert journal(tmp_path / "halves") == journal(tmp_path / "whole")
    line = journal(tmp_path / "whole")[2]
    assert len(line["rewards"]["plus"]) == 6 and line["rewards"]["minus"] == [] and len(line["coefs"]) == 6
    assert len(line["rows"]) == 6 == len(set(line["rows"])) and line["answers"] == 12


def test_a_run_begun_before_there_was_the_setting_keeps_its_pairs(tmp_path: Path) -> None:
    """Its journal says nothing of antithetic, and the default has changed since."""
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        tune.tune(config(run, generations=4), task=TASK, observer=Watcher(stop_after=2))
    lines = (run / "history.jsonl").read_text().split("\n")
    header = json.loads(lines[0])
    del header["config"]["antithetic"]
    (run / "history.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]))
    resolved = (run / "config.resolved.toml").read_text()
    (run / "config.resolved.toml").write_text(resolved.replace("antithetic = true\n", ""))
    tune.resume(run, task=TASK)
    assert [len(line["rewards"]["minus"]) for line in journal(run) if "coefs" in line] == [4, 4, 4, 4]


def test_the_same_seed_gives_the_same_run_and_another_does_not(whole: Path, tmp_path: Path) -> None:
    tune.tune(config(tmp_path / "again"), task=TASK)
    assert learned(tmp_path / "again") == learned(whole) and journal(tmp_path / "again") == journal(whole)
    tune.tune(config(tmp_path / "other", seed=1), task=TASK)
    assert learned(tmp_path / "other")[0] != learned(whole)[0]


def test_common_random_numbers(tmp_path: Path) -> None:
    """Every member of a generation sees the same rows with the same sampling seeds."""

    class Spy(ToyEngine):
        seen: ClassVar[list[list[Request]]] = []

        def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
            self.seen.append(list(requests))
            return super().generate(requests, progress)

    spy = Spy()
    tune.tune(config(tmp_path / "run", generations=2, temperature=0.5), task=TASK, engine=spy)
    generations = [calls for calls in spy.seen if any(r.member.amplitude for r in calls)]
    assert len(generations) == 2
    seeds = []
    for calls in generations:
        per_member: dict[Any, list[Any]] = {}
        for r in calls:
            per_member.setdefault((r.member.pair, r.member.sign), []).append((r.prompt, r.seed, r.temperature))
        assert len(per_member) == 8 and len({tuple(v) for v in per_member.values()}) == 1
        seeds.append(calls[0].seed)
    assert seeds[0] != seeds[1]
    general = {tuple(spy.encode_chat([{"role": "user", "content": text}])) for text in watch.PROMPTS}
    centre = [r for calls in spy.seen for r in calls if not r.member.amplitude]
    assert all(r.temperature == 0.0 for r in centre if r.prompt not in general)
    assert sum(r.prompt in general for r in centre) == len(general)  # the base's own replies, once a run


def test_the_base_is_never_touched(tmp_path: Path) -> None:
    """Case 20: after 200 perturbed evaluations the weights are the same bytes, the centre's answers the same."""
    engine = ToyEngine()
    before = {name: w.tobytes() for name, w in engine.base.items()}
    request = Request(CENTRE, tuple(engine.encode_chat([{"role": "user", "content": "x"}])), 16)
    answer = engine.generate([request])
    with Delta.create(tmp_path / "d.safetensors", opening.spec_of(config(tmp_path), engine)) as delta:
        engine.attach(delta)
        people = tune.Population(0, 100)
        others = [dataclasses.replace(request, member=m) for m in people.ask(0, 0.5)]
        texts = {c.text for c in engine.generate(others)}
        assert len(texts) > 100
        # Case 17: neither the order nor what was asked before matters.
        assert {c.text for c in engine.generate(others[::-1])} == texts
    assert engine.generate([request]) == answer
    assert {name: w.tobytes() for name, w in engine.base.items()} == before


# --- interrupted and resumed ----------------------------------------------------------------------------------------


def test_five_and_five_are_ten(whole: Path, tmp_path: Path) -> None:
    """Case 33: interrupted after five, resumed: the same bytes."""
    run = tmp_path / "run"
    with pytest.raises(Interrupted) as info:
        tune.tune(config(run), task=TASK, observer=Watcher(stop_after=5))
    assert info.value.exit_code == 130
    assert info.value.hint == f"5 generation(s) are saved; go on with: edgees resume {run}"
    assert (run / "metrics.csv").read_text().count("\n") == 7
    watcher = Watcher()
    result = tune.resume(run, task=TASK, observer=watcher)
    assert watcher.info["generation"] == 5 and [r["generation"] for r in watcher.records] == [6, 7, 8, 9, 10]
    assert learned(run) == learned(whole) and journal(run) == journal(whole)
    assert result.generations == 10 and result.best == History.open(whole / "history.jsonl").best()["mean"]  # type: ignore[index]
    again = tune.resume(run, task=TASK)  # a run that is over stays as it is
    assert dataclasses.replace(again, peak_rss_bytes=0) == dataclasses.replace(result, peak_rss_bytes=0)
    assert learned(run) == learned(whole)


@pytest.mark.parametrize(("isa", "threads"), [("scalar", 1), ("", 1), ("", 3)])
def test_the_same_bytes_from_any_instruction_set_and_threads(
    whole: Path, tmp_path: Path, isa: str, threads: int
) -> None:
    """Cases 23 and 33."""
    before = native.isa(), native.threads()
    try:
        native.set_isa(isa or before[0])
        tune.tune(config(tmp_path / "run", threads=threads), task=TASK)
    finally:
        native.set_isa(before[0])
        native.threads(before[1])
    assert learned(tmp_path / "run") == learned(whole) and journal(tmp_path / "run") == journal(whole)


ROWS = "".join(json.dumps({"prompt": f"question {i}", "answer": "1.5"}) + "\n" for i in range(12))
SCORE = "def near(prompts, completions, **columns):\n    return [-abs(float(c) - 1.5) for c in completions]\n"


def process(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "edgees", *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path(tune.__file__).parents[1])},
    )  # fmt: skip


def wait_for(run: Path, generations: int) -> None:
    path = run / "history.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if path.exists() and path.read_text().count('"generation"') >= generations:
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} did not come to generation {generations}")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task, and the run ``whole`` of it: 4 generations of 8 requests of 20 ms."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "score.py").write_text(SCORE)
    (folder / "run.toml").write_text(
        'engine = "toy"\nmodel = "toy:delay=0.02"\ntask = "jsonl:rows.jsonl"\nreward = "score.py:near"\n'
        "antithetic = true\npairs = 2\nrows = 2\ngenerations = 4\neval_every = 1\n"
    )
    done = process(folder, "tune", "run.toml", "--run", "whole", "--json")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert set(json.loads(out)) >= {"run", "generations", "base", "best", "seconds", "peak_rss_bytes"}
    return folder


@pytest.mark.parametrize(
    ("generation", "signals", "kind"), [(1, 1, signal.SIGINT), (2, 2, signal.SIGINT), (2, 1, signal.SIGTERM)]
)
def test_ctrl_c_or_a_polite_kill(slow: Path, generation: int, signals: int, kind: signal.Signals) -> None:
    """Case 35: once or twice, the process ends with 130, says how to go on, and the run comes out the same."""
    run = slow / f"interrupted-{signals}-{kind.name}"
    child = process(slow, "tune", "run.toml", "--run", run.name)
    wait_for(run, generation)
    for _ in range(signals):
        child.send_signal(kind)
        time.sleep(0.02)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert err.startswith("error: interrupted\nhint: ") and f"edgees resume {run.name}" in err
    assert "Traceback" not in err
    assert tune.resume(run).generations == 4
    assert learned(run) == learned(slow / "whole") and journal(run) == journal(slow / "whole")


def test_kill_9_at_any_moment(slow: Path) -> None:
    """Case 32: killed again and again, at moments that nobody chose, the run still comes out the same."""
    run = slow / "killed"
    child = process(slow, "tune", "run.toml", "--run", run.name)
    for generation in (1, 2, 3):
        wait_for(run, generation)
        time.sleep(0.013 * generation)
        child.kill()
        child.communicate(timeout=60)
        child = process(slow, "resume", run.name)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert learned(run) == learned(slow / "whole") and journal(run) == journal(slow / "whole")


@pytest.mark.parametrize("moment", ["append", "apply", "save_best", "write_atomic", "append_line"])
def test_an_end_between_any_two_steps(slow: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Case 32, each place by name: the process vanishes just before or just after it."""
    from edgees import checkpoint

    class Vanished(BaseException):
        pass

    owner: Any = {"append": History, "apply": Delta, "save_best": checkpoint.RunFolder}.get(moment, tune)
    real = getattr(owner, moment)
    for after in (False, True):
        calls = 0

        def vanish(*args: Any, after: bool = after, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != 3:
                return real(*args, **kwargs)
            if after:
                real(*args, **kwargs)
            raise Vanished

        run = slow / f"{moment}-{after}"
        settings = load(slow / "run.toml", {"run": str(run), "model": "toy"})
        with monkeypatch.context() as patch:
            patch.setattr(owner, moment, vanish)
            with pytest.raises(Vanished):
                tune.tune(settings)
        tune.resume(run)
        assert learned(run) == learned(slow / "whole") and journal(run)[1:] == journal(slow / "whole")[1:]


def test_a_run_in_use(slow: Path, whole: Path) -> None:
    from edgees.checkpoint import RunFolder

    with RunFolder.open(whole), pytest.raises(RunError, match="in use by another edgees process"):
        tune.resume(whole, task=TASK)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"task": some_task(41)}, "the rows of task toy task are not those"),
        ({"task": some_task(system="be brief")}, "the rows of task toy task are not those"),
        ({"task": TASK, "engine": ToyEngine("toy:seed=1")}, "the model toy is not the one"),
    ],
)
def test_changed_data_or_model_are_refused(whole: Path, more: dict[str, Any], told: str) -> None:
    before = learned(whole)
    with pytest.raises(RunError, match=told) as info:
        tune.resume(whole, **more)
    assert info.value.exit_code == 2
    assert learned(whole) == before


def test_changed_settings_are_refused(whole: Path, tmp_path: Path) -> None:
    """Case 33: with the difference; what changes no result may change."""
    run = tmp_path / "run"
    tune.tune(config(run, generations=1), task=TASK)
    resolved = run / "config.resolved.toml"
    text = resolved.read_text()
    resolved.write_text(text.replace("\nlr = 0.2", "\nlr = 0.3"))
    with pytest.raises(RunError, match=r"lr: 0\.2 -> 0\.3"):
        tune.resume(run, task=TASK)
    resolved.write_text(text.replace("\nthreads = 0", "\nthreads = 1"))
    tune.resume(run, task=TASK)


def test_a_project_may_move(slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are kept absolute, so that resume works from anywhere, and compared by name, so that a run may move."""
    resolved = (slow / "whole" / "config.resolved.toml").read_text()
    assert f'task = "jsonl:{slow}/rows.jsonl"' in resolved and f'reward = ["{slow}/score.py:near"]' in resolved
    header = History.open(slow / "whole" / "history.jsonl").header
    assert header["config"]["task"] == "jsonl:rows.jsonl" and header["config"]["reward"] == ["score.py:near"]
    moved = tmp_path / "moved"
    subprocess.run(["cp", "-r", str(slow), str(moved)], check=True)
    path = moved / "whole" / "config.resolved.toml"
    path.write_text(resolved.replace(str(slow), str(moved)))
    monkeypatch.chdir("/")
    assert tune.resume(moved / "whole").generations == 4


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"scope": "adapter", "factors": 4}, {"noise": "normal", "decay": 0.05}])
def test_replay_rebuilds_the_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """From the journal alone, in an empty place: delta and best to the byte, and a folder that can be resumed."""
    run, lonely = tmp_path / "run", tmp_path / "lonely"
    tune.tune(config(run, generations=4, **settings), task=TASK)
    lonely.mkdir()
    (lonely / "h.jsonl").write_bytes((run / "history.jsonl").read_bytes() + b'{"generation":4,"co')
    result = tune.replay(lonely / "h.jsonl", model="toy", out=tmp_path / "out")
    assert learned(tmp_path / "out") == learned(run)
    assert journal(tmp_path / "out") == journal(run)
    assert result.generations == 4 and result.run == str(tmp_path / "out")
    assert (tmp_path / "out" / "metrics.csv").exists() and (tmp_path / "out" / "README.md").exists()
    assert tune.resume(tmp_path / "out", task=TASK).generations == 4
    tune.replay(run, model="toy", out=tmp_path / "out2")
    assert learned(tmp_path / "out2") == learned(run)


def test_replay_refuses(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the model toy:seed=1 is not the one"):
        tune.replay(whole, model="toy:seed=1", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="holds a run already"):
        tune.replay(whole, model="toy", out=whole)
    with pytest.raises(RunError, match="there is no run"):
        tune.replay(tmp_path, model="toy", out=tmp_path / "out")
    with pytest.raises(ModelError):
        tune.replay(whole, model="other", out=tmp_path / "out")


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_the_best_on_held_out_rows_is_kept(tmp_path: Path) -> None:
    """A step that is far too long makes things worse: best/ holds the base then."""
    run = tmp_path / "run"
    tune.tune(config(run, generations=3, eval_every=1, lr=30.0, shrink=False), task=TASK)
    evals = [e["mean"] for e in journal(run) if "eval" in e]
    assert len(evals) == 4 and evals[3] < max(evals)
    at = int(np.argmax(evals))
    assert best_record(run) == {"generation": at, "heldout": evals[at]}
    with Delta.open(run / "best" / "delta.safetensors") as best:
        assert best.generation == at


@pytest.mark.parametrize(("every", "after"), [(0, [0, 5]), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])])
def test_evaluations_come_when_they_are_due(tmp_path: Path, every: int, after: list[int]) -> None:
    watcher = Watcher()
    tune.tune(config(tmp_path / "run", generations=5, eval_every=every), task=TASK, observer=watcher)
    assert [e["generation"] for e in watcher.evals] == after


def test_evaluation_rows_are_always_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tune.tune(config(run, generations=1, eval_rows=4), task=TASK)
    assert {e["rows"] for e in journal(run) if "eval" in e} == {4}
    rows = [json.loads(t)["row"] for t in (run / "traces" / "eval-000000.jsonl").read_text().splitlines()]
    again = [json.loads(t)["row"] for t in (run / "traces" / "eval-000001.jsonl").read_text().splitlines()]
    assert rows == again and len(set(rows)) == 4


def test_without_held_out_rows_the_last_is_the_best(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = tune.tune(config(run, generations=2), task=dataclasses.replace(TASK, heldout=()))
    assert (result.base, result.best) == (None, None)
    assert best_record(run) == {"generation": 2, "heldout": None}
    assert learned(run)[0] == learned(run)[1]


# --- length -----------------------------------------------------------------------------------------------------------


def test_a_time_limit_ends_the_run_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each generation is made to last 10 s, each evaluation 5: 47 s hold three of them, with evaluations."""
    clock = [0.0]

    class Slow(ToyEngine):
        def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
            perturbed = any(r.member.amplitude for r in requests)
            clock[0] += 10.0 if perturbed else 5.0 if len(requests) == len(TASK.heldout) else 0.0
            return super().generate(requests, progress)

    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])
    run, watcher = tmp_path / "run", Watcher()
    result = tune.tune(config(run, generations=0, time="47s", eval_every=2), task=TASK, engine=Slow(), observer=watcher)
    assert result.generations == 3 and result.seconds == 45.0
    lines = [entry for entry in journal(run) if "coefs" in entry]
    np.testing.assert_allclose([line["fraction"] for line in lines], [5 / 47, 15 / 47, 30 / 47])
    assert lines[0]["sigma"] > lines[1]["sigma"] > lines[2]["sigma"] > 0.02
    assert "expected time: about 47 s" in watcher.texts
    one = tune.tune(config(tmp_path / "one", generations=0, time=0.001), task=TASK, engine=Slow())
    assert one.generations == 1  # something is learned in any case


def test_schedules(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"generations": 10, "loglik": 0.8, "loglik_hold": 0.2, "loglik_end": 0.6, "sigma": 0.1, "sigma_end": 0.3}
    tune.tune(config(run, **settings), task=TASK)
    lines = [entry for entry in journal(run) if "coefs" in entry]
    np.testing.assert_allclose([e["fraction"] for e in lines], np.arange(10) / 10)
    sigma = [0.1 * (0.3 + 0.7 * 0.5 * (1 + np.cos(np.pi * g / 10))) for g in range(10)]
    np.testing.assert_allclose([e["sigma"] for e in lines], sigma)
    np.testing.assert_allclose([e["lr"] for e in lines], [0.2 * s / 0.1 for s in sigma])
    np.testing.assert_allclose([e["loglik"] for e in lines], [0.8, 0.8, 0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0], atol=1e-12)
    assert lines[6]["loglik"] == 0.0


def test_the_drift_budget_bounds_the_delta(tmp_path: Path) -> None:
    watcher = Watcher()
    tune.tune(config(tmp_path / "run", drift_budget=0.05, lr=0.5), task=TASK, observer=watcher)
    drifts = [r["drift"] for r in watcher.records]
    assert max(drifts) < 0.06 and drifts[-1] > 0.03
    free = Watcher()
    tune.tune(config(tmp_path / "free", lr=0.5), task=TASK, observer=free)
    assert free.records[-1]["drift"] > 0.1


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_equal_rewards_say_no_signal(tmp_path: Path) -> None:
    """Case 24: nothing moves, the reason is told, nothing is NaN."""
    run, watcher = tmp_path / "run", Watcher()
    result = tune.tune(
        config(run, generations=2), task=some_task(reward=lambda completions, **_: [0.5] * len(completions)),
        observer=watcher,
    )  # fmt: skip
    assert (result.base, result.best) == (0.5, 0.5)
    assert sum("no signal: all 8 members got the same mean reward (0.5)" in text for text in watcher.texts) == 2
    with Delta.open(run / "delta.safetensors") as delta:
        assert delta.drift() == 0.0 and delta.generation == 2
    assert "NaN" not in (run / "history.jsonl").read_text()


def test_a_missing_reward_is_named_excluded_and_counted(tmp_path: Path) -> None:
    """Case 25: one None among 32; its pair loses that row, the mean is not touched by it."""
    calls = 0

    def flaky(completions: list[str], **_: Any) -> list[float | None]:
        nonlocal calls
        calls += 1
        rewards: list[float | None] = list(near([], completions))
        if len(completions) == 32:
            rewards[4 * 3 + 2] = None  # member 3: the minus of pair 1; third row
        return rewards

    run, watcher = tmp_path / "run", Watcher()
    tune.tune(config(run, generations=1), task=some_task(reward=flaky), observer=watcher)
    line = next(entry for entry in journal(run) if "coefs" in entry)
    assert line["excluded"] == [[1, -1, line["rows"][2], "flaky: None"]]
    assert f"generation 1: excluded: pair 1-, row {line['rows'][2]}: flaky: None" in watcher.texts
    answers = [json.loads(text) for text in (run / "traces" / "000000.jsonl").read_text().splitlines()]
    minus = [a for a in answers if (a["pair"], a["sign"]) == (1, -1)]
    assert minus[2]["reward"] is None
    kept = [a["reward"] for i, a in enumerate(minus) if i != 2]
    assert line["rewards"]["minus"][1] == pytest.approx(sum(kept) / 3, abs=1e-12)
    assert watcher.records[0]["excluded"] == 1


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (lambda n: [None] * n, "32 of 32 rewards are invalid"),
        (lambda n: [NAN] * (n // 2) + [0.0] * (n - n // 2), "16 of 32 rewards are invalid"),
        (lambda n: [0.0] * (n - 1), "returned 31 rewards for 32 completions"),
        (lambda n: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_broken_scorer_stops_the_run_with_its_state_saved(
    tmp_path: Path, bad: Callable[[int], Any], told: str
) -> None:
    """Cases 25 and 26: exit code 4, and once the scorer is mended the run goes on as if nothing had been."""
    broken = True
    generation = 0

    def reward(completions: list[str], **_: Any) -> Any:
        nonlocal generation
        generation += len(completions) == 32
        return bad(len(completions)) if broken and generation == 3 else near([], completions)

    task = some_task(reward=reward)
    run = tmp_path / "run"
    with pytest.raises(ScorerError, match=told) as info:
        tune.tune(config(run, generations=4), task=task)
    assert info.value.exit_code == 4
    assert f"2 generation(s) are saved; go on with: edgees resume {run}" in str(info.value.hint)
    broken = False
    tune.resume(run, task=task)
    tune.tune(config(tmp_path / "whole", generations=4), task=task)
    assert learned(run) == learned(tmp_path / "whole") and journal(run) == journal(tmp_path / "whole")


def test_few_invalid_rewards_in_an_evaluation_are_left_out_of_its_mean(tmp_path: Path) -> None:
    def holey(completions: list[str], **_: Any) -> list[float | None]:
        rewards: list[float | None] = list(near([], completions))
        if len(completions) == 10:
            rewards[0] = None
        return rewards

    run = tmp_path / "run"
    tune.tune(config(run, generations=1), task=some_task(reward=holey))
    entry = journal(run)[1]
    assert entry["rewards"][0] is None and entry["excluded"] == [[0, 0, "r30", "holey: None"]]
    assert entry["mean"] == pytest.approx(np.mean(entry["rewards"][1:]))
    with pytest.raises(ScorerError, match="evaluation after 0 generation"):
        tune.tune(config(tmp_path / "strict", generations=1, max_invalid=0.05), task=some_task(reward=holey))


def test_the_scorer_is_tried_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_model(_: Config) -> Any:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(opening, "open_engine", no_model)
    broken = some_task(reward=lambda completions, **_: ["good"] * len(completions))
    for attempt in (tune.tune, tune.rehearse):
        with pytest.raises(ScorerError, match="dry run"):
            attempt(config(tmp_path / "run"), task=broken)
    assert not (tmp_path / "run").exists()


def test_a_constant_answer_that_pays_shows(tmp_path: Path) -> None:
    """Case 30: the share of the commonest answer is in every record, and a sentence says what it means."""

    class Parrot(ToyEngine):
        def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
            return [dataclasses.replace(c, text="7", tokens=(55,)) for c in super().generate(requests, progress)]

    rows = [Row.plain(f"r{i}", f"question {i}", str(i)) for i in range(40)]
    task = Task("t", tuple(rows[:30]), tuple(rows[30:]), (near,))
    watcher = Watcher()
    tune.tune(config(tmp_path / "run", generations=4), task=task, engine=Parrot(), observer=watcher)
    (text,) = [text for text in watcher.texts if text.startswith("collapse: ")]
    assert "100% of the held-out answers are one and the same text where the commonest reference answer has 10%" in text
    assert watcher.records[0]["distinct"] == 1 and watcher.records[0]["majority"] == 1.0
    assert watcher.evals[1]["heldout_distinct"] == 1
    assert "| 1 | 100% |" in (tmp_path / "run" / "README.md").read_text()


def test_a_full_context_ends_one_answer_and_nothing_else(tmp_path: Path) -> None:
    """Case 18: prompts that leave no room, or too little, have a defined outcome."""
    rows = [Row.plain(f"r{i}", "q" * (60 if i % 4 == 0 else 30), "1.5") for i in range(16)]
    task = Task("t", tuple(rows[:12]), tuple(rows[12:]), (lambda completions, **_: [len(c) for c in completions],))
    run = tmp_path / "run"
    tune.tune(config(run, model="toy:context=36", generations=2), task=task)
    line = next(entry for entry in journal(run) if "coefs" in entry)
    outcomes = [json.loads(text)["outcome"] for text in (run / "traces" / "000000.jsonl").read_text().splitlines()]
    assert line["overflow"] == outcomes.count("overflow") > 0
    assert len(outcomes) == 32


# --- bad beginnings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "task", "error", "told"),
    [
        ({"model": "nonsense"}, TASK, ModelError, "engine toy runs the model 'toy'"),
        ({"params": "nothing"}, TASK, UsageError, "matches no tensor"),
        ({"task": "jsonl:/nowhere/rows.jsonl"}, None, UsageError, "rows.jsonl"),
        ({"engine": "torch"}, TASK, ModelError, "no model folder toy"),
        ({}, dataclasses.replace(TASK, reward=()), UsageError, "has no scorer of its own"),
        ({}, dataclasses.replace(TASK, train=()), UsageError, "has no rows to train on"),
        (
            {"loglik": 0.5}, dataclasses.replace(TASK, train=(Row.plain("r", "q"), *TASK.train)), UsageError,
            "1 have none, the first is row r",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], task: Task | None, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=re.escape(told)):
        tune.tune(config(tmp_path / "run", **settings), task=task)
    assert not (tmp_path / "run").exists()


def test_too_little_space_is_found_out_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 15."""
    real = tune.require_space
    monkeypatch.setattr(tune, "require_space", lambda folder, size, what: real(folder, size + (1 << 60), what))
    with pytest.raises(WillNotFit, match=r"a run .* needs") as info:
        tune.tune(config(tmp_path / "run"), task=TASK)
    assert info.value.exit_code == 3
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_costs_the_generation_in_progress(disk: Path, tmp_path: Path) -> None:  # noqa: F811
    """Case 15: exit code 3, and with space again the run goes on to the same bytes."""
    calls = 0

    def filling(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        if len(completions) == 32:
            calls += 1
            if calls == 3:
                fill(disk)
        return near([], completions)

    task = some_task(reward=filling)
    run = disk / "run"
    with pytest.raises(WillNotFit) as info:
        tune.tune(config(run, generations=4), task=task)
    assert info.value.exit_code == 3 and f"edgees resume {run}" in str(info.value.hint)
    assert 2 <= History.open(run / "history.jsonl", repair=False).generation <= 3
    (disk / "filler").unlink()
    tune.resume(run, task=task)
    tune.tune(config(tmp_path / "whole", generations=4), task=TASK)
    assert learned(run) == learned(tmp_path / "whole")
    assert journal(run)[1:] == journal(tmp_path / "whole")[1:]


def test_a_rehearsal_writes_nothing_and_says_what_is_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = tune.rehearse(config(tmp_path / "run", model="toy:delay=0.001"), task=TASK)
    assert list(tmp_path.iterdir()) == []
    assert (found["train"], found["heldout"], found["generations"], found["tensors"]) == (30, 10, 10, 3)
    assert found["weights"] == 12 * 24 + 12 + 2 * 12 and found["disk_bytes"] == 3 * 4 * found["weights"]
    assert found["sample"]["row"] == "r0" and found["sample"]["reward"] == near([], [found["sample"]["answer"]])[0]
    assert found["seconds"] > 0.001 * (8 * 4 * 10 + 7 * 10)
    assert tune.rehearse(config(tmp_path / "run", generations=0, time=60), task=TASK)["seconds"] == 60.0
    json.dumps(found)


def test_frozen_tensors_and_warnings_are_said(tmp_path: Path) -> None:
    """Case 10: what is not tuned is named."""
    watcher = Watcher()
    task = dataclasses.replace(TASK, warnings=("mind the gap",))
    tune.tune(config(tmp_path / "run", generations=1, params="weight"), task=task, observer=watcher)
    assert watcher.texts[0] == "mind the gap"
    assert watcher.texts[1] == "1 tensor(s) stay as they are (model.hidden.bias: not matched by params = weight)"
    assert any(text.startswith("expected time: about ") for text in watcher.texts)


def test_tasks_bring_their_own_settings(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, defaults={"pairs": 3, "rows": 2, "generations": 1})
    run = tmp_path / "run"
    tune.tune(load(None, {"engine": "toy", "model": "toy", "run": str(run), "rows": 5}), task=task)
    header = History.open(run / "history.jsonl").header
    assert (header["pairs"], header["config"]["rows"], header["config"]["generations"]) == (3, 5, 1)


@pytest.mark.parametrize(
    ("scope", "kind", "rank"),
    [("full", "sign", 1), ("full", "lowrank", 3), ("full", "normal", 1), ("adapter", "lowrank", 2)],
)
def test_a_member_of_the_toy_is_what_the_twin_says(tmp_path: Path, scope: str, kind: str, rank: int) -> None:
    """Base + delta + amplitude * rho * eps, for matrices and vectors, in both kinds of view."""
    engine = ToyEngine("toy:seed=2")
    spec = opening.spec_of(config(tmp_path, scope=scope, noise=kind, rank=rank, factors=5, seed=9), engine)
    member = Member(reference.make_key(9, 3, 1), -0.07, 3 * 4 + 1, 1, -1)
    with pytest.raises(EngineError, match="needs an attached delta"):
        engine.weights(member)
    with Delta.create(tmp_path / "d.safetensors", spec) as delta:
        delta.apply(Step(0, (1, 2), (0, 1), (0.125, -0.25), 1.0))
        engine.attach(delta)
        for t in spec.tensors:
            expected = engine.base[t.name] + delta.rows(t.name, 0, t.rows)
            if scope == "adapter" and not t.vector:
                pool = reference.pool(9, t.id, t.cols, 5)
                eps = reference.adapter_noise(member.key, member.slot, t.id, t.rows, pool, rank)
            else:
                value, s = reference.integers(kind, member.key, t.id, t.rows, t.cols, rank, vector=t.vector)
                eps = value.astype(np.float32) * s
            expected = expected + np.float32(-0.07 * t.rho) * eps
            np.testing.assert_array_equal(engine.weights(member)[t.name], expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is the process's own anyway")
def test_a_large_parent_does_not_raise_the_peak() -> None:
    ballast = np.ones(300 << 20, np.uint8)
    code = "from edgees.tune import peak_rss_bytes; print(peak_rss_bytes())"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 10 << 20 < int(out) < ballast.nbytes


# --- watchdogs --------------------------------------------------------------------------------------------------------


class Parrot(ToyEngine):
    """Says one thing whatever is asked."""

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        return [dataclasses.replace(c, text="7", tokens=(55,)) for c in super().generate(requests, progress)]


def parrot(run: Path, **settings: Any) -> tuple[tune.RunResult, Watcher]:
    rows = [Row.plain(f"r{i}", f"question {i}", str(i)) for i in range(40)]
    watcher = Watcher()
    task = Task("t", tuple(rows[:30]), tuple(rows[30:]), (near,))
    return tune.tune(config(run, **settings), task=task, engine=Parrot(), observer=watcher), watcher


@pytest.mark.parametrize("kind", ["collapse", "no-signal"])
def test_stop_on_ends_the_run_and_keeps_the_best(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    result, watcher = parrot(run, generations=9, stop_on=[kind])
    assert result.generations < 9 and (run / "best" / "delta.safetensors").exists()
    assert any(f"stop_on = {kind}" in text for text in watcher.texts)
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert kind in [record.get("finding") for record in found]
    assert journal(run)[-1]["eval"] == result.generations  # scored where it ended
    assert parrot(tmp_path / "whole", generations=4)[0].generations == 4


def test_an_unknown_finding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stop_on"):
        config(tmp_path, stop_on=["boredom"])


def test_findings_have_one_list() -> None:
    from edgees.config import FINDINGS

    assert watch.KINDS == FINDINGS


def test_how_far_general_text_has_moved_is_measured(whole: Path, tmp_path: Path) -> None:
    """KL from the base on its own replies, 0 at the base; a perplexity; the likelihood of held-out answers."""
    evals = [entry for entry in journal(whole) if "eval" in entry]
    assert evals[0]["kl"] == 0.0 and len(evals[0]["general"]["replies"]) == len(watch.PROMPTS)
    assert all(e["kl"] != 0.0 and e["perplexity"] > 0.0 and "general" not in e for e in evals[1:])
    assert "loglik" not in evals[0]
    tune.tune(config(tmp_path / "run", loglik=1.0, generations=4), task=TASK)
    likely = [entry["loglik"] for entry in journal(tmp_path / "run") if "eval" in entry]
    assert likely[-1] > likely[0]


def test_an_anchor_holds_the_model_where_it_was(whole: Path, tmp_path: Path) -> None:
    """Members lose what they have moved; the journal has it, so a run that was cut in two comes to the same."""
    tune.tune(config(tmp_path / "held", anchor=1e6, shrink=False), task=TASK)
    lines = journal(tmp_path / "held")
    for entry in lines:
        if "coefs" in entry and "moved" in entry:
            moved = np.array(entry["moved"]).reshape(4, 2)
            lost = moved[:, 0] - moved[:, 1]
            assert np.corrcoef(entry["z"], -lost)[0, 1] > 0.99, "what is left of the reward does not count"
    told = [entry["moved"] for entry in lines if "moved" in entry]
    assert len(told) > 5 and all(max(moved) > min(moved) >= 0.0 for moved in told)
    assert not any("moved" in entry for entry in journal(whole))
    with pytest.raises(Interrupted):
        tune.tune(config(tmp_path / "cut", anchor=1e6, shrink=False), task=TASK, observer=Watcher(stop_after=4))
    tune.resume(tmp_path / "cut", task=TASK)
    assert journal(tmp_path / "cut") == lines and learned(tmp_path / "cut") == learned(tmp_path / "held")
    with pytest.raises(UsageError, match="anchor needs held-out rows"):
        tune.tune(config(tmp_path / "none", anchor=1.0), task=dataclasses.replace(TASK, heldout=()))


def test_how_far_members_have_moved(tmp_path: Path) -> None:
    """As their likelihoods say, reply by reply, other replies in the next generation; the base has not moved at all."""
    engine = ToyEngine()
    prompts, _ = forgetting.texts(engine)
    with Delta.create(tmp_path / "d.safetensors", opening.spec_of(config(tmp_path / "run"), engine)) as delta:
        engine.attach(delta)
        _, first = forgetting.measure(engine, None)
        members = [CENTRE, *(Member(key=k, amplitude=0.3, slot=k) for k in (1, 2, 3, 4))]
        for generation in (0, 1):
            places = [2 * generation, 2 * generation + 1]
            found = forgetting.moved(engine, members, first, generation)
            for member, value in zip(members, found, strict=True):
                asked = [(member, prompts[i], tuple(first["replies"][i])) for i in places]
                lost = [first["each"][i] - s.mean for i, s in zip(places, engine.loglik(asked), strict=True)]
                assert value == pytest.approx(np.mean(np.maximum(lost, 0.0)))
            assert found[0] == 0.0 and found.max() > 0.0
