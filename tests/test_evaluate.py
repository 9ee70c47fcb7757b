"""The comparison is paired, honest about its error, and made from outside; engines that disagree are found out."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import models
import numpy as np
import pytest
from runs import make_run

from edgees import cli, evaluate, merge
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.errors import ExportError, UsageError
from edgees.evaluate import Answers
from edgees.tasks.rows import Row, Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return models.tiny_gguf(folder / "m.gguf", "llama", quant="Q4_1")


@pytest.fixture(scope="module")
def run(folder: Path, model: Path) -> Path:
    return make_run(folder / "run", model, task="sums", lr=0.05)


def test_as_a_script_sees_it(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # cases 16 and 34
    opened: list[bool] = []
    init = LlamaCppEngine.__init__

    def watched(self: LlamaCppEngine, path: object, **options: object) -> None:
        opened.append(bool(options.get("plain")))
        init(self, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LlamaCppEngine, "__init__", watched)
    before = sorted(os.listdir(run))
    assert cli.run(["eval", str(run), "--rows", "12", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert opened == [True, True, True, False]  # plain llama.cpp before our backend is in the process
    assert sorted(os.listdir(run)) == before and "plain llama.cpp" in err
    assert result["rows"] == 12 and result["task"] == "sums" and result["weights"] == "best"
    d = result["difference"]
    assert d["mean"] == pytest.approx(result["tuned"] - result["base"]) and d["low"] <= d["mean"] <= d["high"]
    assert set(result["metrics"]) == {"format", "exact"}
    likely = result["loglik"]
    assert likely["rows"] == 12 and likely["base"] < 0 and likely["tuned"] != likely["base"]
    assert result["agreement"]["ok"] and result["agreement"]["mean"] < evaluate.TOLERANCE / 2
    own = result["own_engine"]
    assert own["rows"] == 12 and own["same_answers"] >= 8
    assert result["agreement_base"]["ok"] and own["loglik"]["base"] == pytest.approx(likely["base"], abs=0.01)
    assert result["base_file"]["loglik"] != likely["base"]  # the same weights with rounded activations
    assert own["loglik"]["tuned"] == pytest.approx(likely["tuned"], abs=evaluate.TOLERANCE)
    assert cli.run(["eval", str(run), "--rows", "12"]) == 0
    text = capsys.readouterr().out
    assert "reward" in text and "our engine agrees to" in text and all(c.isprintable() or c == "\n" for c in text)


def test_engines_that_disagree_are_an_error(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = merge.Effective.rows
    monkeypatch.setattr(
        merge.Effective, "rows", lambda self, *a: rows(self, *a) * np.float32(1.01 if "attn_q" in a[0] else 1.2)
    )
    assert cli.run(["eval", str(run), "--rows", "4", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["agreement"]["ok"] is False and "differ on the tuned model" in err


def test_rows_without_answers_and_the_users_own_scorer(model: Path, tmp_path: Path) -> None:  # case 31
    data = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"Say {i}", "n": i}) for i in range(20)]
    data.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    scorer = tmp_path / "score.py"
    scorer.write_text(
        "def reward(prompts, completions, n):\n"
        "    return [None if k % 5 == 0 else len(c) / 10 for c, k in zip(completions, n)]\n"
    )
    run = make_run(
        tmp_path / "run", model, task=f"jsonl:{data}", reward=(str(scorer),), heldout=0.5, max_tokens=8, eval_rows=0
    )
    result = evaluate.evaluate(run)
    assert result["loglik"]["rows"] == 0 and result["loglik"]["tuned"] is None
    assert result["agreement"]["ok"] and result["agreement"]["rows"] > 5  # judged on the answers that were given
    assert result["rows"] + len(result["excluded"]) // 2 == 10 and result["chose_best"] == 10
    assert all("score.py:reward" in fault for fault in result["excluded"])  # case 25
    other = evaluate.evaluate(run, task="sums", rows=3)
    assert other["task"] == "sums" and other["rows"] == 3 and other["chose_best"] == 0


# ---- the arithmetic
def test_the_interval_is_that_of_the_mean() -> None:
    rng = np.random.default_rng(3)
    differences = rng.standard_normal(400) * 2 + 0.5
    low, high = evaluate.interval(differences)
    assert low is not None and high is not None
    error = 1.96 * differences.std() / math.sqrt(400)
    assert low == pytest.approx(differences.mean() - error, abs=0.02)
    assert high == pytest.approx(differences.mean() + error, abs=0.02)
    assert evaluate.interval(differences) == (low, high) and evaluate.RESAMPLES >= 10_000
    assert evaluate.interval(np.full(5, 0.25)) == (0.25, 0.25)
    assert evaluate.interval(np.array([1.0])) == (None, None)
    covered = 0
    for _ in range(200):
        low, high = evaluate.interval(rng.standard_normal(60), resamples=1000)
        covered += low is not None and high is not None and low <= 0 <= high
    assert 0.90 <= covered / 200 <= 0.99


def test_only_rows_with_both_rewards_count() -> None:  # case 25
    base, tuned = np.array([0.0, 0.5, np.nan, 1.0]), np.array([1.0, 0.5, 1.0, np.nan])
    assert evaluate.compare(base, tuned) | {"difference": None} == {
        "base": 0.25, "tuned": 0.75, "difference": None, "rows": 2,
    }  # fmt: skip
    nothing = evaluate.compare(np.array([np.nan]), np.array([1.0]))
    assert nothing["rows"] == 0 and nothing["base"] is None


def test_fewer_rows_are_those_that_had_no_say() -> None:
    rows = tuple(Row.plain(f"r{i}", f"question {i}", str(i)) for i in range(30))
    task = Task("t", rows[:1], rows)
    every, voted = evaluate.choose(task, 0, 10)
    assert every == list(rows) and voted == 10
    some, voted = evaluate.choose(task, 20, 10)
    assert len(some) == 20 and voted == 0 and [r for r in rows if r in some] == some
    assert evaluate.choose(task, 25, 10)[1] == 5
    assert evaluate.choose(task, 5, 0)[1] == 5  # all rows were scored during the run


def test_examples_show_gains_and_losses() -> None:
    rows = [Row.plain(f"r{i}", f"q{i}", "a") for i in range(8)]
    base = Answers([f"b{i}" for i in range(8)], [()] * 8, np.array([0, 0, 0, 1, 1, 0, 0, np.nan]))
    tuned = Answers([*(f"t{i}" for i in range(7)), "b7"], [()] * 8, np.array([0.2, 0.9, 0.5, 0, 0.4, 0, 0.1, np.nan]))
    shown = evaluate.examples(rows, base, tuned)
    assert [e["row"] for e in shown] == ["r1", "r2", "r0", "r6", "r3", "r4"]
    assert shown[0] == {
        "row": "r1", "prompt": "q1", "answer": "a", "base": "b1", "tuned": "t1",
        "base_reward": 0.0, "tuned_reward": 0.9,
    }  # fmt: skip


def test_agreement_and_its_bound() -> None:
    a = np.array([-1.0, -2.0, np.nan])
    assert evaluate.agreement(a, a + 0.5 * evaluate.TOLERANCE)["ok"] is True
    apart = evaluate.agreement(a, a + 2 * evaluate.TOLERANCE)
    assert apart["ok"] is False and apart["rows"] == 2
    with pytest.raises(ExportError, match="differ on the tuned model"):
        evaluate.require_agreement({"agreement": apart})
    unknown = evaluate.agreement(a, np.full(3, np.nan))
    assert unknown["ok"] is None
    evaluate.require_agreement({"agreement": unknown})


def test_a_task_without_what_it_takes_is_refused(run: Path, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {i}", "answer": str(i)}) + "\n" for i in range(6)))
    bare = make_run(tmp_path / "run", model, task=f"jsonl:{data}")
    with pytest.raises(UsageError, match="no scorer"):
        evaluate.evaluate(bare)
    data.unlink()
    with pytest.raises(UsageError, match=r"rows\.jsonl"):
        evaluate.evaluate(bare)
    with pytest.raises(UsageError, match="unknown task"):
        evaluate.evaluate(run, task="nonsense")
