"""scripts/study.py on the toy engine: runs once each, failures on record, and its statistics by hand."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgees import opening, report, tune
from edgees.errors import EngineError, RunError, UsageError
from edgees.history import History

ROOT = Path(__file__).resolve().parents[1]
QUICK = (ROOT / "docs/studies/quick.toml").read_text()


def load() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("study")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


STUDY = load()


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than the runs here; one test has that of the study. ``bench`` is found as from scripts/."""
    monkeypatch.setattr(report, "plot", lambda run, rows: None)
    monkeypatch.setattr(STUDY, "plot", lambda plan, name, done: None)
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of docs/studies/quick.toml, all runs done; its file."""
    plan = tmp_path_factory.mktemp("quick") / "quick.toml"
    plan.write_text(QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        patch.setattr(report, "plot", lambda run, rows: None)
        assert STUDY.main([str(plan)]) == 0
    return plan


@pytest.fixture
def plan(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / "quick.toml"


def lines(plan: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (plan.parent / "quick/runs.jsonl").read_text().splitlines()]


def readme(plan: Path) -> str:
    return (plan.parent / "quick/README.md").read_text()


# --- runs -----------------------------------------------------------------------------------------------------------
def test_every_run_is_done_once_seed_by_seed(finished: Path) -> None:
    found = [(line["seed"], line["arm"], line["state"]) for line in lines(finished)]
    assert found == [(seed, arm, "finished") for seed in (1, 2, 3) for arm in ("short", "long")]
    text = readme(finished)
    assert "6 of 6 runs have finished" in text and "![held-out reward](quick-digit.svg)" in text
    assert "<svg" in (finished.parent / "quick/quick-digit.svg").read_text()


def test_what_a_run_spent_is_counted_by_hand(finished: Path) -> None:
    """8 pairs on 16 rows for 8 generations, an evaluation of 63 rows every second one; no rollout of the probe."""
    for line in lines(finished):
        assert [p["rollouts"] for p in line["curve"]] == [0, 512, 1024, 1536, 2048]
        assert [p["answers"] for p in line["curve"]] == [0, 512, 1024, 1536, 2048]
        assert [p["heldout_rollouts"] for p in line["curve"]] == [63, 126, 189, 252, 315]
        assert {p["logliks"] for p in line["curve"]} == {0} and len(line["shrink"]) == len(line["sigma"]) == 8
        assert line["settings"]["sigma"] == {"short": 0.1, "long": 0.3}[line["arm"]] and "seed" not in line["settings"]
        assert set(line["curve"][0]["metrics"]) == {"format", "exact"}


def test_a_shared_engine_gives_what_a_fresh_process_gives(finished: Path, tmp_path: Path) -> None:
    last = lines(finished)[-1]
    assert (last["arm"], last["seed"]) == ("long", 3)
    options = STUDY.read(finished).run("digit", "long", 3).options
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    run = tmp_path / "run"
    command = [sys.executable, "-m", "edgees", "tune", *flags, "--seed", "3", "--run", str(run)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    history = History.open(run / "history.jsonl")
    assert [p["reward"] for p in last["curve"]] == [e["mean"] for e in history.evals]
    assert last["shrink"] == [float(f"{entry['shrink']:.4g}") for entry in history.lines]
    metrics = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert last["curve"][-1]["tokens"] == sum(record.get("processed", 0) for record in metrics)


def test_likelihoods_are_counted_apart_and_the_journals_own_is_kept(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = "loglik = 0.5\nloglik_hold = 0.3\nloglik_end = 0.8\n"
    plan.write_text(QUICK.replace("loglik = 0\n", weight).replace("generations = 8", "generations = 5"))
    opened = History.open

    def with_loglik(*args: Any, **more: Any) -> History:
        history = opened(*args, **more)
        for value, entry in zip(({"mean": -2.0}, -1.5, None, None), history.evals, strict=True):
            entry["loglik"] = value
        return history

    monkeypatch.setattr(History, "open", with_loglik)
    assert STUDY.main([str(plan), "--seeds", "1", "--only", "short"]) == 0
    curve = lines(plan)[-1]["curve"]
    # the weight is 0.5 until 0.3 of the run and 0 from 0.8 on: answers with all 5 generations, likelihoods with 4
    assert (curve[-1]["answers"], curve[-1]["logliks"], curve[-1]["rollouts"]) == (5 * 256, 4 * 256, 9 * 256)
    assert [p["loglik"] for p in curve] == [-2.0, -1.5, None, None]
    run = STUDY.read(plan).run("digit", "short", 1)
    assert STUDY.expected_rollouts(run.settings(), opening.open_task(run.settings())) == 9 * 256


def test_a_finished_run_is_skipped_unless_its_options_changed(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (plan.parent / "quick/runs.jsonl").read_bytes()
    with open(plan.parent / "quick/runs.jsonl", "ab") as file:
        file.write(b'{"task": "digit", "a')  # what a kill leaves
    assert STUDY.main([str(plan)]) == 0
    assert (plan.parent / "quick/runs.jsonl").read_bytes() == before
    plan.write_text(QUICK.replace("lr = 1.0", "lr = 0.9"))
    assert STUDY.main([str(plan), "--dry-run", "--seeds", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert "digit long seed 1: to do, 2048 rollouts" in shown and "digit short seed 1: finished" in shown
    assert "2 of 4 runs are left: 4096 rollouts" in shown
    assert STUDY.main([str(plan), "--seeds", "2"]) == 0
    assert [(line["arm"], line["seed"]) for line in lines(plan)[6:]] == [("long", 2)]
    assert readme(plan).count("finished (does not count)") == 3


def test_a_run_that_raises_is_on_record_and_done_again(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plan.parent / "quick/runs.jsonl").unlink()
    whole, closed, opened = tune.tune, [], opening.open_engine

    def broken(config: Any, **more: Any) -> Any:
        if (config.sigma, config.seed) == (0.3, 1):
            raise EngineError("the fan | stopped")
        return whole(config, **more)

    def watched(config: Any) -> Any:
        engine = opened(config)
        monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
        return engine

    monkeypatch.setattr(tune, "tune", broken)
    monkeypatch.setattr(opening, "open_engine", watched)
    assert STUDY.main([str(plan), "--seeds", "1,2"]) == 0
    assert [(line["arm"], line["seed"], line["state"]) for line in lines(plan)] == [
        ("short", 1, "finished"), ("long", 1, "failed"), ("short", 2, "finished"), ("long", 2, "finished"),
    ]  # fmt: skip
    assert lines(plan)[1]["error"] == "EngineError: the fan | stopped" and lines(plan)[1]["curve"] == []
    assert len(closed) == 2 and closed[0] is not closed[1]  # a failed run's engine is not used again
    assert "| long | failed |" in readme(plan) and "EngineError: the fan \\| stopped |" in readme(plan)
    monkeypatch.setattr(tune, "tune", whole)
    assert STUDY.main([str(plan), "--seeds", "1"]) == 0
    assert [(line["arm"], line["state"]) for line in lines(plan)[4:]] == [("long", "finished")]
    assert "| long | failed |" not in readme(plan) and "stopped (does not count)" in readme(plan)


def test_ctrl_c_loses_only_the_run_under_way(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plan.parent / "quick/runs.jsonl").unlink()
    evaluated = STUDY.Watcher.on_eval

    def on_eval(watcher: Any, record: Any) -> None:
        evaluated(watcher, record)
        if (plan.parent / "quick/runs.jsonl").exists() and record["generation"] == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(STUDY.Watcher, "on_eval", on_eval)
    assert STUDY.main([str(plan)]) == 130
    assert [(line["arm"], line["seed"]) for line in lines(plan)] == [("short", 1)]
    assert "1 of 6 runs have finished" in readme(plan)


def test_ctrl_c_outside_of_a_run_ends_the_study_too(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupted)
    (plan.parent / "quick/runs.jsonl").unlink()
    assert STUDY.main([str(plan)]) == 130
    assert not (plan.parent / "quick/runs.jsonl").exists() and "0 of 6 runs have finished" in readme(plan)


def test_a_later_change_of_what_was_expected_shows(plan: Path) -> None:
    sha = STUDY.read(plan).expected_sha256
    assert {line["expected_sha256"] for line in lines(plan)} == {sha} and sha[:16] in readme(plan)
    assert f"as it was at the first run, {lines(plan)[0]['began']}" in readme(plan)
    plan.write_text(QUICK.replace("No: the long steps", "Yes: the long steps") + "\n")
    assert STUDY.main([str(plan), "--table"]) == 0
    assert "**Changed since the first run**" in readme(plan) and sha[:16] in readme(plan) and len(lines(plan)) == 6


# --- statistics -----------------------------------------------------------------------------------------------------
CURVE = [(0.0, 0.1), (100.0, 0.3), (200.0, 0.2), (300.0, 0.6)]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.05, (0.0, False)), (0.1, (0.0, False)), (0.2, (50.0, False)), (0.3, (100.0, False)), (0.4, (250.0, False)),
        (0.61, (300.0, True)),
    ],
)  # fmt: skip
def test_the_first_crossing_is_on_the_line_between_evaluations(threshold: float, expected: tuple[float, bool]) -> None:
    value, censored = STUDY.crossing(CURVE, threshold)
    assert value == pytest.approx(expected[0]) and censored is expected[1]


def test_the_area_is_the_mean_height() -> None:
    assert STUDY.area(CURVE, 300.0) == pytest.approx((0.2 + 0.25 + 0.4) / 3)
    assert STUDY.area(CURVE, 150.0) == pytest.approx((0.2 * 100 + 0.275 * 50) / 150)
    assert STUDY.area(CURVE, 0.0) == 0.1


def test_ratios_are_geometric_means_and_bounds_are_marked() -> None:
    def reached(value: float) -> tuple[float, bool]:
        return value, False

    def never(value: float) -> tuple[float, bool]:
        return value, True

    found = STUDY.ratio([(reached(200), reached(100)), (reached(800), reached(100))])
    # logarithms ln 2 and ln 8: mean ln 4, deviation sqrt(2) ln 2, so ln 2 after division by sqrt(2); t = 12.706
    half = 12.706 * math.log(2)
    assert (found.bound, found.pairs) == ("", 2) and found.mean == pytest.approx(4)
    assert (found.low, found.high) == (pytest.approx(4 / math.exp(half)), pytest.approx(4 * math.exp(half)))
    one = (reached(400), reached(100))
    assert STUDY.ratio([one, (never(900), reached(100))]) == STUDY.Ratio(
        pytest.approx(6), pytest.approx(6 / 1.5 ** 12.706), pytest.approx(6 * 1.5 ** 12.706), ">=", 2
    )  # fmt: skip
    assert STUDY.ratio([one, (reached(100), never(400))]).bound == "<="
    assert STUDY.ratio([(never(100), reached(400)), (reached(100), never(400))]).bound == "?"
    left = STUDY.ratio([one, (never(900), never(900)), (reached(0), reached(0))])
    assert left.mean == pytest.approx(4) and left.pairs == 1 and math.isnan(left.low)
    assert STUDY.ratio([(never(900), never(900))]) is None


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (4, 2.776), (11, 2.201), (30, 2.042), (1000, 1.962)])
def test_students_t_is_the_textbooks(freedom: int, expected: float) -> None:
    assert STUDY.t95(freedom) == pytest.approx(expected, rel=1e-3)


def test_the_page_says_what_the_numbers_are(plan: Path) -> None:
    """Two made-up arms on three seeds; the baseline misses .1 with one of them."""
    heights = {"short": [(0.06, 0.1), (0.06, 0.1), (0.04, 0.08)], "long": [(0.2, 0.3), (0.1, 0.2), (0.1, 0.3)]}
    made = []
    for line in lines(plan):
        ends = (0.0, *heights[line["arm"]][line["seed"] - 1])
        curve = [{**line["curve"][i], "rollouts": 1000 * i, "reward": y} for i, y in enumerate(ends)]
        made.append(json.dumps({**line, "curve": curve}))
    (plan.parent / "quick/runs.jsonl").write_text("\n".join(made) + "\n")
    assert STUDY.main([str(plan), "--table"]) == 0
    text = readme(plan)
    # differences .2, .1, .22: mean .1733, deviation .0643, t(2) = 4.303
    assert "| long | 0.300 | 0.200 | 0.300 | 0.267 (0.123 .. 0.410) | " in text
    # to .1: 2000, 2000, never in 2000; 500, 1000, 1000. Ratios 4, 2, at least 2
    assert "| short | 2000, 2000, >2000 |" in text and "| long | 500, 1000, 1000 |" in text
    assert "| >= 2.52 (0.93 .. 6.81) |" in text


# --- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('baseline = "short"', 'baseline = "shirt"', "baseline 'shirt' is no arm"),
        ("seeds = [1, 2, 3]", "seeds = [1, 1]", "seeds must be whole numbers, each once"),
        ("sigma = 0.3", "sigmo = 0.3", "task digit, arm long: command line: unknown setting 'sigmo'"),
        ("sigma = 0.3", "seed = 3", "seed is no option"),
        ("per_task.digit", "per_task.digits", "per_task names no task of the plan: digits"),
        ("expected =", "expect =", "unknown key 'expect'"),
        ("threshold = [0.05, 0.1]", "", "threshold missing"),
        ("threshold = [0.05, 0.1]", "threshold = ['a']", "threshold is no number"),
        ("threshold = [0.05, 0.1]", "threshold = 'a'", "is of the wrong type"),
        ('name = "long"', 'name = "short"', "every [[arm]] needs a name of its own"),
        ('name = "quick"', 'name = "../quick"', "cannot name a folder"),
        ("[[arm]]", "[[arm", "cannot read the plan"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in QUICK
    (tmp_path / "quick.toml").write_text(QUICK.replace(old, new))
    with pytest.raises(UsageError) as caught:
        STUDY.read(tmp_path / "quick.toml")
    assert message in caught.value.message


def test_choices_and_damage_are_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert STUDY.main([str(plan), "--only", "shirt"]) == 2
    assert "has no arm shirt" in capsys.readouterr().err
    assert STUDY.main([str(plan), "--seeds", "one"]) == 2
    (plan.parent / "quick/runs.jsonl").write_text("{}}\n")
    with pytest.raises(RunError, match=r"runs\.jsonl:1: damaged line"):
        STUDY.read_lines(plan.parent / "quick/runs.jsonl")


def test_a_measure_that_the_task_does_not_have_fails_the_run(plan: Path) -> None:
    plan.write_text(QUICK.replace('measure = "reward"', 'measure = "rewards"').replace("lr = 0.2", "lr = 0.3"))
    assert STUDY.main([str(plan), "--seeds", "1"]) == 0
    assert "has no measure rewards" in lines(plan)[-1]["error"] and "No run has finished with a value" in readme(plan)
