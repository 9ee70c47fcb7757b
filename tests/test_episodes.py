"""Whole episodes in the loop: members play environments and agent programs, limits and faults have their outcomes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pytest

from edgees import cli, config, examples, opening, probe, report, rewards, rollout, tune
from edgees.backends.base import CENTRE, Member
from edgees.backends.toy import ToyEngine
from edgees.episodes import Ask, Ending, Message, transcript
from edgees.errors import NoSignal, RunError, ScorerError, UsageError
from edgees.history import History
from edgees.report import Observer
from edgees.rewards import Scorer
from edgees.tasks.rows import Row, Task

WANTED = 1.5


class Haggling:
    """Three turns: the model names a price, is told how far off it was, and is paid by its best one.

    odd: what one row does instead: raises, pays text, pays nothing, never ends.
    """

    def __init__(self, odd: Mapping[str, str] | None = None) -> None:
        self.odd = dict(odd or {})
        self.begun: list[tuple[str, int]] = []
        self.closed = False

    def begin(self, row_id: str, columns: Mapping[str, Any], system: str | None, seed: int) -> Play:
        self.begun.append((row_id, seed))
        return Play(row_id, columns["item"], system, self.odd.get(row_id, ""))

    def close(self) -> None:
        self.closed = True


class Play:
    def __init__(self, row_id: str, item: str, system: str | None, odd: str) -> None:
        self.row_id, self.odd = row_id, odd
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages.append({"role": "user", "content": f"what is {item} worth?"})
        self.offers: list[float] = []

    def start(self) -> Ask | Ending:
        if self.odd == "raises":
            return Ending(None, "failed", fault="Haggling.reset: KeyError: 'item'")
        return Ask(tuple(self.messages))

    def reply(self, text: str, outcome: str) -> Ask | Ending:
        self.messages.append({"role": "assistant", "content": text})
        self.offers.append(abs(float(text) - WANTED))
        self.messages.append({"role": "user", "content": f"off by {self.offers[-1]:.2f}"})
        if len(self.offers) == 3 and self.odd != "endless":
            return self._end("finished")
        return Ask(tuple(self.messages))

    def abandon(self, reason: str) -> Ending:
        return self._end("truncated", reason)

    def _end(self, outcome: str, reason: str = "") -> Ending:
        reward = {"unpaid": None, "nan": float("nan")}.get(self.odd, -min(self.offers, default=9.0))
        return Ending(reward, outcome, reason, "", tuple(self.messages), {"offers": float(len(self.offers))})


def some_task(odd: Mapping[str, str] | None = None, made: list[Haggling] | None = None, **more: Any) -> Task:
    rows = [Row(f"r{i}", (), {"item": f"item {i}"}) for i in range(24)]

    def open_them() -> Haggling:
        there = Haggling(odd)
        (made if made is not None else []).append(there)
        return there

    return Task("haggling", tuple(rows[:16]), tuple(rows[16:]), episodes=open_them, max_tokens=16, **more)


def settings(run: Path, **more: Any) -> config.Config:
    return config.load(
        None, {"engine": "toy", "model": "toy", "run": str(run), "pairs": 8, "rows": 4, "generations": 8} | more
    )


def play(task: Task, members: list[Member], **more: Any) -> list[rollout.Trajectory]:
    made = rollout.Settings(max_tokens=16, conversation=lambda row, context: (), **({"episodes": Haggling()} | more))
    return rollout.play(ToyEngine(), rollout.every(members, task.train), made)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plot", lambda run, rows: None)


def test_the_return_of_episodes_rises_and_a_run_resumes(tmp_path: Path) -> None:
    made: list[Haggling] = []
    result = tune.tune(settings(tmp_path / "whole", system="be brief"), task=some_task(made=made))
    assert result.base is not None and result.best is not None and result.best > result.base + 0.2
    assert made[0].closed
    seeds = [dict(made[0].begun)[f"r{i}"] for i in range(16)]
    assert len(set(seeds)) == 16  # a row's own, the same for all members of a generation

    class Stop(Observer):
        def on_generation(self, record: Any) -> None:
            if record["generation"] == 3:
                raise KeyboardInterrupt

    with pytest.raises(Exception, match="interrupted"):
        tune.tune(settings(tmp_path / "halves", system="be brief"), task=some_task(), observer=Stop())
    tune.resume(tmp_path / "halves", task=some_task())
    for name in ("delta.safetensors", "best/delta.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    trace = [json.loads(line) for line in (tmp_path / "whole/traces/eval-000000.jsonl").read_text().splitlines()]
    assert trace[0]["turns"] == 3 and trace[0]["outcome"] == "finished" and trace[0]["parts"] == {"offers": 3.0}
    assert [m["role"] for m in trace[0]["messages"]][:3] == ["system", "user", "assistant"]
    entry = History.open(tmp_path / "whole/history.jsonl", repair=False).evals[0]
    assert entry["metrics"] == {"offers": 3.0, "turns": 3.0} and entry["truncated"] == 0
    page = (tmp_path / "whole/README.md").read_text()
    assert "## Before and after" in page and "what is item" in page and page.count("| assistant |") >= 3


def test_an_episode_does_not_depend_on_the_others() -> None:
    """One by one, all at once, and in another order: the same messages, rewards and tokens."""
    task = some_task()
    engine = ToyEngine()
    together = play(task, [CENTRE])
    made = rollout.Settings(max_tokens=16, conversation=lambda row, context: (), episodes=Haggling())
    alone = [rollout.play(engine, [(CENTRE, row)], made)[0] for row in task.train]
    backwards = rollout.play(engine, [(CENTRE, row) for row in task.train[::-1]], made)[::-1]
    assert together == alone == backwards
    assert together[0].messages[0]["content"] == "what is item 0 worth?" and together[0].reward is not None
    assert transcript(together[0].messages).startswith("user: what is item 0 worth?\nassistant: ")


@pytest.mark.parametrize(
    "limits, outcome, reason, turns",
    [({"turns": 2}, "truncated", "turns", 2), ({"tokens": 9}, "truncated", "tokens", 2), ({}, "finished", "", 3)],
)
def test_limits_end_an_episode_with_what_it_has_reached(
    limits: dict[str, int], outcome: str, reason: str, turns: int
) -> None:
    for t in play(some_task(), [CENTRE], **limits):
        assert (t.outcome, t.reason, t.turns) == (outcome, reason, turns)
        assert t.reward is not None and t.parts["offers"] == turns
        assert len(t.tokens) <= limits.get("tokens", 99)


def test_a_full_context_ends_that_episode_alone(tmp_path: Path) -> None:
    """Case 18."""
    endless = Haggling({"r1": "endless"})
    made = rollout.Settings(max_tokens=16, conversation=lambda row, context: (), episodes=endless)
    played = rollout.play(ToyEngine("toy:context=200"), [(CENTRE, row) for row in some_task().train[:3]], made)
    assert [t.outcome for t in played] == ["finished", "overflow", "finished"]
    assert played[1].reason == "the context is full" and played[1].reward is not None and played[1].turns > 3


def test_what_has_no_reward_is_excluded_and_named(tmp_path: Path) -> None:
    """Case 25: never 0; too many end the run with code 4."""
    odd = {"r1": "raises", "r2": "unpaid", "r3": "nan"}
    played = play(some_task(), [CENTRE], episodes=Haggling(odd))
    scores = rewards.judge(Scorer([]), played)
    assert [i for i, r in enumerate(scores.rewards) if not np.isfinite(r)] == [1, 2, 3]
    assert [(f.index, f.row) for f in scores.faults] == [(1, "r1"), (2, "r2"), (3, "r3")]
    assert "KeyError: 'item'" in scores.faults[0].reason and "without a reward" in scores.faults[1].reason
    texts: list[str] = []

    class Told(Observer):
        def on_message(self, text: str) -> None:
            texts.append(text)

    tune.tune(settings(tmp_path / "run", generations=4), task=some_task(odd), observer=Told())
    assert any("excluded: pair" in text and "KeyError" in text for text in texts)
    with pytest.raises(ScorerError, match="rewards are invalid") as info:
        tune.tune(settings(tmp_path / "bad"), task=some_task({f"r{i}": "unpaid" for i in range(24)}))
    assert info.value.exit_code == 4


def test_a_scorer_may_judge_whole_conversations(tmp_path: Path) -> None:
    def polite(prompts: list[Any], completions: list[list[Message]], item: list[str], **columns: Any) -> list[float]:
        assert [m[0]["content"] for m in completions] == [f"what is {i} worth?" for i in item]
        return [float(len([m for m in c if m["role"] == "assistant"])) for c in completions]

    played = play(some_task(), [CENTRE], episodes=Haggling({"r1": "raises"}))
    scores = rewards.judge(rewards.load([polite]), played)
    assert scores.rewards[0] == 3.0 and not np.isfinite(scores.rewards[1]) and len(scores.faults) == 1
    exact = rewards.judge(rewards.load(["numeric"]), [t for t in played if not t.fault][:1])
    assert "no answer" in exact.faults[0].reason  # the built-in ones look at the last reply


def test_likelihoods_and_episodes_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no reference answer whose likelihood"):
        tune.tune(settings(tmp_path / "run", loglik=0.5), task=some_task())


# --- sigma by trying ------------------------------------------------------------------------------------------------


def test_a_sigma_is_found_before_the_run(tmp_path: Path) -> None:
    texts: list[str] = []

    class Told(Observer):
        def on_message(self, text: str) -> None:
            texts.append(text)

    tune.tune(settings(tmp_path / "run", sigma=0, generations=2), task=some_task(), observer=Told())
    said = next(text for text in texts if "chosen by a probe" in text)
    sigma = config.load(tmp_path / "run/config.resolved.toml").sigma
    assert sigma in probe.LADDER and f"sigma = {sigma:g}" in said
    journal = History.open(tmp_path / "run/history.jsonl", repair=False)
    assert journal.header["config"]["sigma"] == sigma == journal.lines[0]["sigma"]
    assert tune.resume(tmp_path / "run", task=some_task()).generations == 2  # nothing is tried again


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


FLAT = Task("flat", tuple(Row.plain(f"p{i}", f"q{i}") for i in range(8)), (), (constant,))
BROKEN = some_task({f"r{i}": "raises" for i in range(24)})


@pytest.mark.parametrize("task, why", [(BROKEN, "every episode failed"), (FLAT, "the scorer gave the same to all of")])
def test_no_signal_is_said_before_hours_are_spent(task: Task, why: str, tmp_path: Path) -> None:
    """Case 24."""
    with pytest.raises(NoSignal, match="every sigma tried") as info:
        tune.tune(settings(tmp_path / "run", sigma=0), task=task)
    assert why in info.value.message and info.value.exit_code == 1
    assert not (tmp_path / "run").exists()


def test_why_there_is_no_signal() -> None:
    def made(**more: Any) -> rollout.Trajectory:
        return rollout.Trajectory(CENTRE, Row("r", ()), **({"completion": "x", "episode": True, "reward": 0.0} | more))

    for played, words in (
        ([made(parts={"invalid": 1.0}, outcome="truncated")], "every action was invalid"),
        ([made(outcome="truncated")], "cut at its limit"),
        ([made(outcome="overflow")], "context was full"),
        ([made(), made()], "all 2 answers are the same text"),
        ([], "likelihood"),
    ):
        assert words in probe._why(played)


# --- agent programs -------------------------------------------------------------------------------------------------

AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert "answer" not in task
body = {"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
reply = json.load(urllib.request.urlopen(request))
print(reply["choices"][0]["message"]["content"])
"""


def test_an_agent_program_is_tuned(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"prompt": f"number {i}?", "answer": str(WANTED)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(
        "def score(completions, answer, **columns):\n"
        "    return [-abs(float(c[-1]['content']) - float(a)) for c, a in zip(completions, answer)]\n"
    )
    given = settings(
        tmp_path / "run", task=f"jsonl:{tmp_path}/rows.jsonl", agent_cmd=f"{quote(sys.executable)} {tmp_path}/agent.py",
        reward=(f"{tmp_path}/score.py",), pairs=4, rows=2, generations=3, eval_every=3,
    )  # fmt: skip
    result = tune.tune(given)
    assert result.generations == 3 and result.base is not None
    trace = [json.loads(line) for line in (tmp_path / "run/traces/000000.jsonl").read_text().splitlines()]
    assert len(trace) == 8 and all(t["messages"][0]["content"].startswith("number") for t in trace)
    journal = History.open(tmp_path / "run/history.jsonl", repair=False)
    assert (
        journal.header["config"]["agent_cmd"].endswith("agent.py") and "/" not in journal.header["config"]["agent_cmd"]
    )


# --- examples -------------------------------------------------------------------------------------------------------


def test_every_example_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "--list"]) == 0
    listed = capsys.readouterr().out.split("\n")
    assert [line.split()[0] for line in listed if line] == sorted(examples.names())
    assert {"shop", "sudoku", "guess", "cave", "assistant"} <= set(examples.names())
    for name in examples.names():
        files = examples.copy(name, tmp_path / name)
        assert {"config.toml", "README.md"} <= {f.name for f in files}
        made = config.load(tmp_path / name / "config.toml")
        assert made.task != config.Config().task or made.agent_cmd
    with pytest.raises(RunError, match="already"):
        examples.copy("shop", tmp_path / "shop")
    assert cli.run(["init", str(tmp_path / "x"), "--example", "nothing"]) == 2
    assert "there is no example 'nothing'" in capsys.readouterr().err
    assert cli.run(["init", str(tmp_path / "x")]) == 2


@pytest.mark.parametrize("name", ["shop", "sudoku"])
def test_our_own_environments_pay_right(name: str, tmp_path: Path) -> None:
    """Played by an oracle all is won; by nonsense nothing, or next to nothing."""
    from edgees.tasks import load_task

    examples.copy(name, tmp_path)
    task = load_task(config.load(tmp_path / "config.toml").task)
    assert task.episodes is not None
    there = task.episodes()
    try:
        sys.path.insert(0, str(tmp_path))
        module = __import__(name)
        for row in task.heldout[:3]:
            for good in (True, False):
                episode = there.begin(row.id, row.columns, None, 7)
                step: Ask | Ending = episode.start()
                while isinstance(step, Ask):
                    step = episode.reply(_oracle(name, module, row, step) if good else "no idea", "stop")
                assert step.reward is not None
                assert step.reward == pytest.approx(1.0) if good else step.reward <= 0.1
    finally:
        there.close()
        sys.path.remove(str(tmp_path))
        sys.modules.pop(name, None)


def _oracle(name: str, module: Any, row: Row, ask: Ask) -> str:
    last = ask.messages[-1]
    if name == "shop":
        if last["role"] == "tool":
            return json.dumps({"tool": "answer", "number": int(last["content"])})
        return json.dumps({"tool": row.columns["what"], "item": row.columns["item"], "colour": row.columns["colour"]})
    import re

    r, c = map(int, re.findall(r"row (\d) column (\d)", last["content"])[0])
    return f"set {r} {c} {module.solution(row.columns['seed'])[r - 1][c - 1]}"


def test_an_estimate_says_what_it_cannot_know(tmp_path: Path) -> None:
    from models import tiny_gguf

    from edgees import estimate

    model = tiny_gguf(tmp_path / "m.gguf", "llama", quant="Q4_1")
    chosen = config.load(None, {"model": str(model), "run": str(tmp_path / "run")})
    found = estimate.estimate(chosen, task=some_task())
    assert found["time"] is None and "not known before they are played" in found["assumptions"][0]
    assert found["settings"]["context"] >= 512 and not any(line.startswith("time") for line in estimate.lines(found))


def test_opening_closes_what_it_opened(tmp_path: Path) -> None:
    from contextlib import ExitStack

    made: list[Haggling] = []
    with ExitStack() as stack:
        setup = opening.open_setup(settings(tmp_path / "run"), stack, task=some_task(made=made))
        assert setup.episodes is made[0] and not made[0].closed and setup.scorer.names == []
    assert made[0].closed
