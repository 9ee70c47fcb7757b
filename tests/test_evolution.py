"""Contexts that evolve with the weights, in the loop: each found where it matters, resumed exactly, hard to upset."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgees import config, report, rollout, tune
from edgees.backends.base import CENTRE, Completion, Request
from edgees.backends.toy import ToyEngine
from edgees.config import Config
from edgees.context import Context
from edgees.delta import Delta
from edgees.episodes import Ask, Ending
from edgees.errors import Interrupted, UsageError
from edgees.history import History
from edgees.report import Observer
from edgees.tasks.rows import Row, Task
from edgees.template import TemplateRefused

GOOD, BAD = "Be helpful.", "Be rude."
EVOLVER = f"""
def propose(context, attempts, seed):
    return [{GOOD!r}, {BAD!r}, f"Think of {{seed}}."]
"""


class Table:
    """Episodes of one reply. ``pays``: (system message, number that was said) -> reward."""

    def __init__(self, pays: Any) -> None:
        self.pays = pays

    def begin(self, row_id: str, columns: Mapping[str, Any], system: str | None, seed: int) -> Play:
        return Play(self.pays, system, int(row_id[1:]))

    def close(self) -> None: ...


class Play:
    def __init__(self, pays: Any, system: str | None, row: int) -> None:
        self.pays, self.system, self.row = pays, system, row
        self.messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": f"question {row}"},)

    def start(self) -> Ask | Ending:
        return Ask(self.messages)

    def reply(self, text: str, outcome: str) -> Ask | Ending:
        said = (*self.messages, {"role": "assistant", "content": text})
        return Ending(self.pays(self.system, float(text), self.row), messages=said)

    def abandon(self, reason: str) -> Ending:
        return Ending(None)


def only_context(system: str | None, value: float, row: int) -> float:
    return {GOOD: 1.0, BAD: -1.0}.get(system or "", 0.0) + row % 7


def only_weights(system: str | None, value: float, row: int) -> float:
    return -abs(value - 1.5)


def task(pays: Any) -> Task:
    rows = [Row(f"r{i}", (), {"item": i}) for i in range(60)]
    return Task("talk", tuple(rows[:48]), tuple(rows[48:]), episodes=lambda: Table(pays), max_tokens=16)


def settings(run: Path, evolver: str = EVOLVER, **more: Any) -> Config:
    file = run.parent / "evolver.py"
    file.write_text(evolver)
    given = {
        "engine": "toy", "model": "toy", "run": str(run), "pairs": 8, "rows": 4, "groups": 2, "generations": 8,
        "evolve": [str(file)], "evolve_every": 2,
    }  # fmt: skip
    return config.load(None, given | more)


class Heard(Observer):
    def __init__(self, stop_after: int = -1) -> None:
        self.texts: list[str] = []
        self.stop_after = stop_after

    def on_generation(self, record: Any) -> None:
        if record["generation"] == self.stop_after:
            signal.raise_signal(signal.SIGINT)

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def journal(run: Path) -> list[Any]:
    """Without times, and without the path of the user's function."""
    text = (run / "history.jsonl").read_text().replace(str(run.parent), "")
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text.splitlines()]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plot", lambda run, rows: None)


def test_where_only_the_context_matters_it_is_found_and_the_weights_stay(tmp_path: Path) -> None:
    run, heard = tmp_path / "run", Heard()
    result = tune.tune(settings(run), task=task(only_context), observer=heard)
    history = History.open(run / "history.jsonl")
    assert history.context(history.generation).system == GOOD
    assert not any(any(line["coefs"]) for line in history.lines)  # every one of its rewards is the context's doing
    assert result.base is not None and result.best == pytest.approx(result.base + 1.0)
    assert history.evals[-1]["context"] == history.context(history.generation).digest
    assert any("adopted" in text for text in heard.texts)
    assert json.loads((run / "context.json").read_text())["system"] == GOOD
    page = (run / "README.md").read_text()
    good = history.context(history.generation).digest
    [told] = [line for line in page.splitlines() if line.startswith(f"  - `{good[:8]}`")]
    assert GOOD in told and "+1.000 a row" in told and "**adopted** after generation" in told
    assert f"+{GOOD}" in page
    bad = Context(system=BAD).digest
    assert any(bad in line.get("trial", {}).get("dropped", []) for line in history.lines)
    assert not any(line.get("trial", {}).get("adopted") == bad for line in history.lines)


def test_where_only_the_weights_matter_no_context_is_adopted(tmp_path: Path) -> None:
    """Episodes that are paid for the number alone; replies do not depend on the system message (Play leaves it out)."""
    run = tmp_path / "run"
    found = tune.tune(settings(run, pairs=16, generations=20, sigma=0.1, lr=0.3), task=task(only_weights))
    history = History.open(run / "history.jsonl")
    assert history.proposals and any("trial" in line for line in history.lines)
    assert history.context(history.generation) == Context()
    assert found.base is not None and found.best is not None and found.best > found.base + 0.1


@pytest.mark.parametrize("after", [1, 2, 3])
def test_killed_in_the_middle_of_a_trial_it_decides_the_same(tmp_path: Path, after: int) -> None:
    whole, halved = tmp_path / "a" / "run", tmp_path / "b" / "run"
    pays = lambda system, value, row: only_context(system, value, row) * 0.2 + only_weights(system, value, row)  # noqa: E731
    for run in (whole, halved):
        run.parent.mkdir()
    tune.tune(settings(whole, generations=6), task=task(pays))
    with pytest.raises(Interrupted):
        tune.tune(settings(halved, generations=6), task=task(pays), observer=Heard(after))
    assert len(journal(halved)) < len(journal(whole))
    tune.resume(halved, task=task(pays))
    one, other = journal(whole)[1:], journal(halved)[1:]
    assert one == other
    assert any(entry.get("trial", {}).get("adopted") for entry in one)
    assert (whole / "delta.safetensors").read_bytes() == (halved / "delta.safetensors").read_bytes()
    shutil.copytree(halved, tmp_path / "c")
    (tmp_path / "c" / "context.json").unlink()  # what people read is made anew from the journal
    tune.resume(tmp_path / "c", task=task(pays))
    assert json.loads((tmp_path / "c" / "context.json").read_text())["system"] == GOOD


@pytest.mark.parametrize(
    ("evolver", "reason"),
    [
        ("def propose(context, attempts, seed):\n    raise RuntimeError('no idea')", "no idea"),
        ("def propose(context, attempts, seed):\n    return 7", "7"),
        ("def propose(context, attempts, seed):\n    return ['x' * 1_000_000]", "evolver"),
        ("def propose(context, attempts, seed):\n    import os\n    os._exit(3)", "evolver"),
    ],
)
def test_an_evolver_that_fails_costs_its_proposal_only(tmp_path: Path, evolver: str, reason: str) -> None:
    run, heard = tmp_path / "run", Heard()
    tune.tune(settings(run, evolver, generations=3), task=task(only_weights), observer=heard)
    history = History.open(run / "history.jsonl")
    assert history.generation == 3
    assert [p["candidates"] for p in history.proposals] == [[], []]
    assert all(reason in p["failures"][0] for p in history.proposals)
    assert any(text.startswith("proposal failed: ") for text in heard.texts)


def test_contexts_alone(tmp_path: Path) -> None:
    """scope none: members are alike, rows are played in pairs, nothing is learned, and it ends when nothing is new."""
    run, heard = tmp_path / "run", Heard()
    result = tune.tune(settings(run, scope="none", generations=30), task=task(only_context), observer=heard)
    history = History.open(run / "history.jsonl")
    assert history.context(history.generation).system == GOOD
    assert result.best == pytest.approx((result.base or 0.0) + 1.0)
    with Delta.open(run / "delta.safetensors", write=False) as delta:
        assert delta.drift() == 0.0
    assert history.generation < 30 or history.proposals[-1]["candidates"]
    stuck = tmp_path / "stuck"
    one = "def propose(context, attempts, seed):\n    return ['The same.']"
    tune.tune(settings(stuck, one, scope="none", generations=99), task=task(only_context), observer=heard)
    assert History.open(stuck / "history.jsonl").generation < 99
    assert any("nothing new to try" in text for text in heard.texts)


def test_the_file_to_begin_with(tmp_path: Path) -> None:
    notes, run = tmp_path / "SKILL.md", tmp_path / "run"
    notes.write_text("- Say please.\n")
    asked: list[Request] = []

    class Listening(ToyEngine):
        def generate(self, requests: Any, progress: Any = None) -> list[Completion]:
            asked.extend(requests)
            return super().generate(requests, progress)

    rows = [Row.plain(f"r{i}", f"question {i}", "1.5") for i in range(20)]
    answering = Task("t", tuple(rows[:15]), tuple(rows[15:]), (lambda completions, **_: [1.0] * len(completions),),
                     max_tokens=16)  # fmt: skip
    made = config.load(
        None,
        {"engine": "toy", "model": "toy", "run": str(run), "pairs": 2, "generations": 1, "context_file": str(notes)},
    )
    tune.tune(made, engine=Listening(), task=answering)
    assert History.open(run / "history.jsonl").context(0) == Context(skills="- Say please.")
    played = [bytes(t for t in r.prompt if t < 256).decode() for r in asked if len(r.prompt) > 40]
    assert any("Say please." in text and "question" in text for text in played)
    notes.write_text("- Say nothing.\n")  # the journal has what the run began with
    tune.resume(run, engine=ToyEngine(), task=answering)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pairs": 4}, "evolve needs 4 pairs in each of the 2 groups"),
        ({"evolve": ["luck"]}, "'luck' is no way to evolve a context"),
        ({"evolve": [], "scope": "none"}, "nothing else evolves"),
        ({"scope": "none", "antithetic": True}, "no plus and minus"),
        ({"reflector": "nothing.gguf"}, "nothing.gguf"),
        ({"redact": "nowhere.py"}, "nowhere.py"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        tune.tune(settings(tmp_path / "run", **more), task=task(only_context))
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()


def test_members_of_both_arms_are_told_so(tmp_path: Path) -> None:
    """The traces name the context of each rollout: half of a group's on each row, by turns."""
    run = tmp_path / "run"
    tune.tune(settings(run, generations=1), task=task(only_context))
    told = [json.loads(line) for line in (run / "traces/000000.jsonl").read_text().splitlines()]
    for row in {t["row"] for t in told}:
        contexts = [t["context"] for t in told if t["row"] == row]
        assert sorted(np.unique(contexts, return_counts=True)[1]) == [2, 2]


def test_contexts_by_place_in_a_call() -> None:
    """Rollouts of one call may have a context each, and answers are those of calls of their own."""
    rows = [Row.plain(f"r{i}", f"question {i}") for i in range(3)]
    contexts = [Context(), Context(skills="- a"), Context(shots=(({"role": "user", "content": "question 2"},),))]

    def settings_of(some: list[Context]) -> rollout.Settings:
        return rollout.Settings(
            max_tokens=16, conversation=lambda row, context: context.apply(row.messages), contexts=some
        )

    engine = ToyEngine()
    rollouts = rollout.every([CENTRE], rows)
    together = [t.completion for t in rollout.play(engine, rollouts, settings_of(contexts))]
    alone = [
        rollout.play(engine, [one], settings_of([context]))[0].completion
        for one, context in zip(rollouts, contexts, strict=True)
    ]
    assert together == alone
    bare = [t.completion for t in rollout.play(engine, rollouts, settings_of([Context()] * 3))]
    assert together[1] != bare[1] and together[2] == bare[2]  # an example that asks the very question is left out


def test_contexts_alone_need_no_sigma(tmp_path: Path) -> None:
    run, heard = tmp_path / "run", Heard()
    tune.tune(settings(run, scope="none", sigma=0.0, generations=2), task=task(only_context), observer=heard)
    assert History.open(run / "history.jsonl").lines[0]["lr"] == 0.0
    assert not any("probe" in text or text.startswith("no-signal") for text in heard.texts)


class Strange(Play):
    """Says what other line ends are, and calls a tool with no number."""

    calls = ({"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": float("nan")}}},)

    def reply(self, text: str, outcome: str) -> Ask | Ending:
        said = {"role": "assistant", "content": f"one\u2028two\x85{text}", "tool_calls": list(self.calls)}
        return Ending(float(text), messages=(*self.messages, said))


def test_replies_with_any_line_ends_and_calls_that_are_no_json_cost_a_proposal_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(Table, "begin", lambda self, row, columns, system, seed: Strange(self.pays, system, 0))
    tune.tune(settings(run, evolve=["shots"], generations=3), task=task(only_context), observer=Heard())
    history = History.open(run / "history.jsonl")
    assert history.generation == 3 and not any(p["candidates"] for p in history.proposals)
    assert "not JSON" in history.proposals[-1]["failures"][0]
    assert "one two" in "\n".join(report.examples(run, [{"generation": g, "heldout": float(g)} for g in (0, 3)]))


def test_a_run_without_anything_new_ends_in_the_same_place_when_it_is_resumed(tmp_path: Path) -> None:
    nothing = "def propose(context, attempts, seed):\n    return []"
    whole = tmp_path / "whole"
    tune.tune(settings(whole, nothing, scope="none"), task=task(only_context))
    lines = (whole / "history.jsonl").read_bytes().splitlines(keepends=True)
    for cut in range(2, len(lines) + 1):
        part = tmp_path / f"part{cut}"
        shutil.copytree(whole, part)
        (part / "history.jsonl").write_bytes(b"".join(lines[:cut]))
        tune.resume(part, task=task(only_context))
        assert journal(part) == journal(whole)


class Narrow(ToyEngine):
    """Refuses conversations whose roles do not alternate, as some chat templates do."""

    def __init__(self) -> None:
        super().__init__("toy:context=120")

    def encode_chat(self, messages: Any, tools: Any = ()) -> list[int]:
        roles = [m["role"] for m in messages if m["role"] != "system"]
        if any(a == b for a, b in itertools.pairwise(roles)):
            raise TemplateRefused("roles must alternate")
        return super().encode_chat(messages, tools)


@pytest.mark.parametrize("loglik", [0.0, 1.0])
def test_contexts_that_cannot_be_played_are_not_tried(tmp_path: Path, loglik: float) -> None:
    rows = [Row.plain(f"r{i}", f"question {i}", "1.5") for i in range(40)]
    answering = Task("t", tuple(rows[:30]), tuple(rows[30:]), (lambda completions, **_: [1.0] * len(completions),),
                     max_tokens=16)  # fmt: skip
    evolver = """
def propose(context, attempts, seed):
    refused = {"shots": [[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]], "origin": "two"}
    return [refused, {"skills": "- long " * 20, "origin": "long"}, {"skills": "- ok", "origin": "short"}]
"""
    run = tmp_path / "run"
    made = settings(run, evolver, generations=2, loglik=loglik, loglik_hold=1.0, loglik_end=1.0)
    tune.tune(made, engine=Narrow(), task=answering)
    history = History.open(run / "history.jsonl")
    assert [c["origin"] for c in history.proposals[0]["candidates"]] == ["short"]
    assert history.proposals[0]["failures"] == [
        "two: roles must alternate", "long: it leaves no room for row r29 in the 120 tokens that there are",
    ]  # fmt: skip


def test_the_page_tells_what_was_adopted_by_what_it_was_then(tmp_path: Path) -> None:
    """A context that was replaced is on trial again, against what replaced it; that is another trial."""
    run = tmp_path / "run"
    tune.tune(settings(run, generations=2), task=task(only_weights))
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    one, two = (Context(system=text) for text in ("One.", "Two."))
    kept = [line for line in lines if "history" in line or ("generation" in line and "proposal" not in line)]
    offer = {
        "proposal": 0, "generation": 0, "from": Context().digest, "failures": [], "rollouts": 0, "tokens": 0,
        "candidates": [{"digest": c.digest, "origin": c.system, "context": c.to_dict()} for c in (one, two)],
    }  # fmt: skip
    told = [
        {"units": {one.digest: [0.5, 0.5], two.digest: [0.0]}, "adopted": one.digest, "dropped": []},
        {"units": {Context().digest: [-0.5], two.digest: [0.25]}, "adopted": two.digest, "dropped": []},
        {"units": {one.digest: [-1.0]}, "adopted": "", "dropped": [one.digest, Context().digest]},
    ]
    generations = [{**kept[1], "generation": g, "trial": {"evidence": {}, **t}} for g, t in enumerate(told)]
    (run / "history.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (kept[0], offer, *generations)))
    page = "\n".join(report.contexts(run))
    assert "One.: +0.500 a row over 2 rows, about 6 rollouts; **adopted** after generation 1, replaced after" in page
    assert "Two.: +0.250 a row over 1 rows" in page


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a\0b", b"x" * (1 << 20) + b"yz", None])
def test_files_that_hold_no_context(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "SKILL.md"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as error:
        tune.tune(settings(tmp_path / "run", context_file=str(file)), task=task(only_context))
    assert "SKILL.md" in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("calls", ['"x"', "[{}]", '[{"function": {"name": 1}}]', "7", "[NaN]"])
def test_calls_that_are_none_are_no_example(tmp_path: Path, calls: str) -> None:
    file = tmp_path / "context.json"
    file.write_text(
        f'{{"shots": [[{{"role": "user", "content": "q"}}, {{"role": "assistant", "tool_calls": {calls}}}]]}}'
    )
    with pytest.raises(UsageError) as error:
        tune.tune(settings(tmp_path / "run", context_file=str(file)), task=task(only_context))
    assert "shots" in str(error.value)


def test_the_context_to_begin_with_lies_in_the_run(tmp_path: Path) -> None:
    notes, run = tmp_path / "notes.md", tmp_path / "run"
    notes.write_text("- Say please.\n")
    tune.tune(settings(run, evolve=[], context_file=str(notes), generations=1), task=task(only_context))
    assert json.loads((run / "context.json").read_text())["skills"] == "- Say please."


def test_a_rehearsal_of_contexts_alone_tells_of_no_weights(tmp_path: Path) -> None:
    heard = Heard()
    made = settings(tmp_path / "run", scope="none", generations=1)
    found = tune.rehearse(made, task=task(only_context))
    assert (found["weights"], found["tensors"], found["warnings"]) == (0, 0, [])
    tune.tune(made, task=task(only_context), observer=heard)
    assert not any("stay as they are" in text for text in heard.texts)


def test_an_example_is_left_out_where_it_answers_the_question_itself() -> None:
    def shot(*questions: str) -> tuple[dict[str, Any], ...]:
        return tuple(
            m for q in questions for m in ({"role": "user", "content": q}, {"role": "assistant", "content": "a"})
        )

    def shown(context: Context, *questions: str) -> list[str]:
        asked = [m for m in context.apply(shot(*questions)[:-1]) if m["role"] == "user"]
        return [str(m["content"]) for m in asked[: -len(questions)]]

    single = Context(shots=(shot("one"), shot("two")))
    assert shown(single, "three") == ["one", "two"]
    assert shown(single, " two ") == ["one"]
    chats = Context(shots=(shot("hello", "one"), shot("hello", "two")))
    assert shown(chats, "hello", "three") == ["hello", "one", "hello", "two"], "that all begin alike tells nothing"
    assert shown(chats, "hello", "two") == ["hello", "one"]
    assert shown(chats, "hello") == [], "nor may it be told how the conversation goes on"


def test_rows_with_system_messages_of_their_own_leave_a_prompt_nothing_to_do(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "system", "content": f"s{i}"}, {"role": "user", "content": f"q{i}"}]} for i in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {
        "model": "toy", "engine": "toy", "task": f"jsonl:{tmp_path / 'rows.jsonl'}", "reward": ["numeric"],
        "run": str(tmp_path / "run"), "pairs": 8, "evolve": ["prompt"],
    }  # fmt: skip
    with pytest.raises(UsageError, match="every row brings a system message of its own"):
        tune.tune(config.load(None, given))
