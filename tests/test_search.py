"""``edgees search``: better answers to one row at test time, on the toy engine; what it counts and what it leaves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import make_run

from edgees import rollout
from edgees import search as searching
from edgees.backends.base import CENTRE
from edgees.backends.toy import ToyEngine
from edgees.cli import run
from edgees.errors import RunError, UsageError
from edgees.search import Best, Found, Plan, Spent, merged, pick, search
from edgees.tasks.rows import Row, Task

GIVEN: dict[str, Any] = {"engine": "toy", "model": "toy", "task": "made", "sigma": 0.3, "lr": 0.5}


def near(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 at the wanted number, falling with the distance: every answer tells which way to go."""
    return [1.0 - abs(float(c) - float(a)) for c, a in zip(completions, answer, strict=True)]


def made(far: float = 3.0, **options: Any) -> Task:
    """Four rows whose wanted number lies ``far`` from what the toy says, two of them held out."""
    engine = ToyEngine()
    rows = []
    for i in range(4):
        row = Row.plain(f"r{i}", f"question {i}", "0")
        said = rollout.play(engine, [(CENTRE, row)], rollout.Settings(8, lambda r, context: r.messages))[0]
        rows.append(Row.plain(row.id, f"question {i}", f"{float(said.completion) + far:.3f}"))
    return Task("made", tuple(rows[:2]), tuple(rows[2:]), reward=(near,), max_tokens=8, **options)


def found(plan: Plan, *, given: dict[str, Any] | None = None, task: Task | None = None, **options: Any) -> Found:
    options = {"count": 1, **options} if "rows" not in options else options
    return search({**GIVEN, **(given or {})}, plan, task=task or made(), **options)


def test_es_climbs_where_samples_do_not_reach() -> None:
    """The wanted number is 3 away: samples of the centre at temperature 0.5 stay about it, ES walks there."""
    es = found(Plan("es", 160))
    best = found(Plan("best-of", 160), given={"temperature": 0.5})
    assert es.rows[0].reward is not None and best.rows[0].reward is not None
    assert es.rows[0].reward > 0.9 > 0.5 > best.rows[0].reward > -2.0
    assert es.spent.rollouts <= 160 and best.spent.rollouts == 160


def test_the_greedy_answer_comes_first_and_counts() -> None:
    for method in searching.METHODS:
        one = found(Plan(method, 1))
        assert one.spent.rollouts == 1 and one.rows[0].reward == pytest.approx(-2.0, abs=1e-6)
        assert one.rows[0].found_at.rollouts == 1 and one.curve[0] == [one.spent.tokens, one.rows[0].reward]


@pytest.mark.parametrize("scope", ["adapter", "full"])
def test_the_steps_are_what_helps(scope: str) -> None:
    """With steps of no length the same population stays where it is."""
    given = {"scope": scope}
    assert (found(Plan("es", 160), given=given).rows[0].reward or 0) > 0.9
    assert (found(Plan("es", 160), given={**given, "lr": 1e-9}).rows[0].reward or 0) < 0.6


def test_it_can_be_repeated_and_seeds_differ() -> None:
    def without_time(f: Found) -> Any:
        return [(b.row.id, b.reward, b.answer, b.curve) for b in f.rows], f.spent.rollouts, f.spent.tokens, f.curve

    for method in searching.METHODS:
        a, b, c = (found(Plan(method, 40, enough=9.0), given={"seed": s}) for s in (0, 0, 1))
        assert without_time(a) == without_time(b) != without_time(c)


def test_what_is_spent_is_what_the_engine_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answered: list[int] = []
    generate = ToyEngine.generate

    def counted(self: ToyEngine, requests: Any, progress: Any = None) -> Any:
        done = generate(self, requests, progress)
        asked.extend(requests)
        answered.extend(len(c.tokens) for c in done)
        return done

    monkeypatch.setattr(ToyEngine, "generate", counted)
    task = made()
    asked.clear(), answered.clear()
    result = found(Plan("es", 21, enough=9.0), task=task, count=2)
    assert len(asked) == result.spent.rollouts == 42
    assert sum(answered) == result.spent.tokens
    assert sum(len(r.prompt) for r in asked) + sum(answered) == result.spent.processed
    amplitudes = [r.member.amplitude for r in asked]
    assert amplitudes[0] == 0.0 and amplitudes[2] > amplitudes[-1] > 0.0
    asked.clear()
    found(Plan("best-of", 21, enough=9.0), task=task, count=2)
    seeds = [r.seed for r in asked if r.temperature]
    assert len(set(seeds)) == len(seeds) == 40 and all(r.member.amplitude == 0.0 for r in asked)
    asked.clear()
    found(Plan("es", 17, enough=9.0), task=task, given={"temperature": 0.5})
    drawn = [(r.member.slot, r.seed) for r in asked if r.temperature]
    assert len({seed for _, seed in drawn}) == 2 and len(drawn) == 16  # the members of a generation share their luck


def test_sigma_falls_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    ask = searching.Population.ask
    monkeypatch.setattr(
        searching.Population, "ask", lambda self, g, sigma: (seen.append(sigma), ask(self, g, sigma))[1]
    )
    found(Plan("es", 81, enough=9.0))
    assert seen == sorted(seen, reverse=True) and len(seen) == 10 and seen[0] > 0.29 and seen[-1] < 0.03
    seen.clear()
    found(Plan("es", 81, enough=9.0, sigma_end=1.0))
    assert seen == [0.3] * 10


def test_enough_is_enough() -> None:
    """Each row is left as it is done; when all are, the search ends."""
    task = made(0.0)
    one = found(Plan("es", 80), task=task, count=2)
    assert one.spent.rollouts == 2 and [b.reward for b in one.rows] == [1.0, 1.0]
    far = made()
    mixed = Task("made", far.train, (task.heldout[0], far.heldout[1]), reward=(near,), max_tokens=8)
    two = found(Plan("es", 41, enough=0.999), task=mixed, count=2)
    assert two.rows[0].found_at.rollouts == 1 and 41 < two.spent.rollouts <= 42
    assert found(Plan("es", 41, enough=float("inf")), task=task).spent.rollouts == 41


def test_rows_together_and_apart() -> None:
    task = made()
    together = found(Plan("es", 65, enough=9.0), task=task, count=2)
    apart = found(Plan("es", 65, enough=9.0, apart=True), task=task, count=2)
    alone = [found(Plan("es", 65, enough=9.0), task=task, rows=[row.id]) for row in task.heldout]
    assert [b.curve for b in apart.rows] == [f.rows[0].curve for f in alone]
    assert together.spent.rollouts == apart.spent.rollouts == 130
    assert apart.spent.tokens == sum(f.spent.tokens for f in alone)
    assert together.rows[0].curve != apart.rows[0].curve
    assert apart.curve[-1] == [apart.spent.tokens, pytest.approx(np.mean([f.rows[0].reward for f in alone]))]


def test_merged_curves_go_on_side_by_side() -> None:
    def part(curve: list[list[float]], tokens: int) -> Found:
        return Found([Best(Row.plain("a", "a"))], Spent(1, tokens, 0, 1.0), curve, Plan())

    both = merged([part([[10, 0.2], [30, 0.6]], 30), part([[5, 1.0]], 5)])
    assert both.curve == [[10, 1.0], [15, pytest.approx(0.6)], [35, pytest.approx(0.8)]]
    assert both.spent == Spent(2, 35, 0, 2.0)


def test_answers_that_cannot_be_scored() -> None:
    """None is never 0: such answers are counted and left out; a row with nothing else has no reward."""
    calls = [0]

    def odd(completions: Sequence[str], **_: Any) -> list[float | None]:
        calls[0] += len(completions)
        return [None for c in completions]

    task = made()
    result = found(Plan("es", 17), task=Task("made", task.train, task.heldout, reward=(odd,), max_tokens=8))
    assert result.rows[0].reward is None and result.rows[0].faults == 17 and result.curve == []
    assert "no answer could be scored" in searching.lines(result)[0]
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_runs_weights_are_the_centre_and_stay(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "toy", "full", engine="toy", generations=3, lr=0.5)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    given = {key: value for key, value in GIVEN.items() if key not in ("model", "engine")}
    plain, tuned = (
        search(g, Plan("es", 41, enough=9.0), task=made(), count=1, run=r) for g, r in ((GIVEN, None), (given, folder))
    )
    assert plain.rows[0].curve[0] != tuned.rows[0].curve[0], "the greedy answer is the tuned model's"
    assert (tuned.rows[0].reward or -9) > tuned.rows[0].curve[0][1]
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    with pytest.raises(UsageError, match="a model and a scope of its own"):
        search({**given, "model": "toy"}, Plan(), task=made(), count=1, run=folder)
    with pytest.raises(RunError):
        search(given, Plan(), task=made(), count=1, run=tmp_path)


def test_an_absolute_sigma_of_a_run_stays_absolute(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "toy", "full", engine="toy", sigma_abs=0.01)
    for given, wanted in (({}, 0.01), ({"sigma": 0.02}, 0.02)):
        with ExitStack() as stack:
            chosen, *_ = searching._opened(given, folder, "best", stack)
        assert chosen.sigma_abs == wanted and chosen.pairs == 8


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No generation begins that would not end in time, and one that runs over is broken off."""
    now = [0.0]
    monkeypatch.setattr(searching.time, "monotonic", lambda: now[0])
    generate = ToyEngine.generate
    slow = [1.0]

    def timed(self: ToyEngine, requests: Any, progress: Any = None) -> Any:
        now[0] += slow[0] * len(requests)
        return generate(self, requests, progress)

    monkeypatch.setattr(ToyEngine, "generate", timed)
    result = found(Plan("es", seconds=30.0, enough=9.0))
    assert result.spent.rollouts == 1 + 3 * 8 and result.spent.seconds == 25.0
    now[0], slow[0] = 0.0, 20.0
    result = found(Plan("es", seconds=45.0, enough=9.0))
    assert result.spent.rollouts == 1 and not result.interrupted


def interrupted_at_the_third_call(monkeypatch: pytest.MonkeyPatch) -> None:
    play = rollout.play
    calls = [0]

    def interrupting(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return play(*args, **options)

    monkeypatch.setattr(rollout, "play", interrupting)


def test_ctrl_c_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    task = made()
    interrupted_at_the_third_call(monkeypatch)
    result = found(Plan("es", 400, enough=9.0, apart=True), task=task, count=2)
    assert result.interrupted and result.spent.rollouts == 9 and len(result.rows) == 1
    assert result.rows[0].reward is not None


def test_draws_change_sampling_and_nothing_else() -> None:
    row = Row.plain("r", "question", "0")
    plain = rollout.Settings(8, lambda r, context: r.messages, temperature=1.0)
    drawn = rollout.Settings(8, lambda r, context: r.messages, temperature=1.0, draws=(0, 1, 1, 2))
    said = [t.completion for t in rollout.play(ToyEngine(), [(CENTRE, row)] * 4, drawn)]
    assert said[1] == said[2] and len(set(said)) == 3
    assert said[0] == rollout.play(ToyEngine(), [(CENTRE, row)], plain)[0].completion


def test_episodes_are_searched_on_and_stay_the_same(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(
        "class Guess:\n"
        "    max_turns = 1\n"
        "    def reset(self, seed, **row):\n"
        "        self.goal = seed % 1000 / 500 - 1\n"
        "        return f'Which number? {seed}'\n"
        "    def step(self, text):\n"
        "        return 'well', 1.0 - abs(float(text) - self.goal), True\n"
    )
    given = {"engine": "toy", "model": "toy", "task": f"env:{tmp_path / 'guess.py'}:Guess", "sigma": 0.3, "lr": 0.5}
    result = search(given, Plan("es", 121), count=1)
    first, last = result.rows[0].curve[0][1], result.rows[0].reward or 0.0
    assert last > 0.9 > first or last == first >= 0.9
    assert result.rows[0].answer.count("Which number?") == 1 and "assistant: " in result.rows[0].answer


@pytest.mark.parametrize(
    ("plan", "given", "match"),
    [
        (Plan("hill"), {}, "--method"),
        (Plan(rollouts=-1), {}, "negative"),
        (Plan(seconds=float("inf")), {}, "negative"),
        (Plan(sigma_end=2.0), {}, "sigma-end"),
        (Plan(enough=float("nan")), {}, "enough"),
        (Plan("best-of"), {"temperature": 0.0}, "again and again"),
        (Plan("es"), {"sigma": 0.0}, "perturbs nothing"),
        (Plan("es"), {"agent_cmd": "python x.py"}, "no agent programs"),
    ],
)
def test_what_is_refused(plan: Plan, given: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        found(plan, given=given)


def test_rows_are_picked_by_name_or_number() -> None:
    task = made()
    assert [r.id for r in pick(task, ["r3", "r0", "r3"], 0)] == ["r3", "r0"]
    assert [r.id for r in pick(task, [], 1)] == ["r2"]
    for names, count, match in ((["r9"], 0, "no row r9"), ([], 0, "no row was named"), ([], 3, "2 held-out rows")):
        with pytest.raises(UsageError, match=match):
            pick(task, names, count)


def arguments(tmp_path: Path, *more: str) -> list[str]:
    task = made()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": r.prompt, "answer": r.answer}) + "\n" for r in task.heldout))
    (tmp_path / "near.py").write_text(
        "def near(completions, answer, **_):\n"
        "    return [1 - abs(float(c) - float(a)) for c, a in zip(completions, answer)]\n"
    )
    return ["search", "--engine", "toy", "--model", "toy", "--task", f"jsonl:{rows}", "--reward",
            str(tmp_path / "near.py"), "--rows", "1", "--sigma", "0.3", "--lr", "0.5", *more]  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run(arguments(tmp_path, "--rollouts", "120", "--json")) == 0
    out = capsys.readouterr()
    told = json.loads(out.out)
    assert told["rows"][0]["reward"] > 0.9 and {"row", "reward", "answer", "found_at"} <= set(told["rows"][0])
    assert {"rollouts", "tokens", "seconds"} <= set(told["rows"][0]["found_at"]) and told["curve"][0][1] < -1
    assert {"rollouts", "tokens", "seconds", "curve"} <= set(told) and out.err.count("answer(s)") > 2
    assert run(arguments(tmp_path, "--rollouts", "8", "--method", "best-of")) == 0
    assert "best-of, 1 row(s): mean best reward" in capsys.readouterr().out
    assert run(arguments(tmp_path, "--time", "soon")) == 2
    assert run(arguments(tmp_path, "--row", "nothing")) == 2
    assert {p.name for p in tmp_path.iterdir()} <= {"rows.jsonl", "near.py", "__pycache__"}, "nothing is left behind"


def test_an_interrupted_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = arguments(tmp_path, "--json")
    interrupted_at_the_third_call(monkeypatch)
    assert run(asked) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["interrupted"] is True and told["rows"][0]["reward"] is not None


def test_a_run_may_have_more_groups_than_a_search_has_pairs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "toy", "full", engine="toy", pairs=32, groups=16)
    given = {name: value for name, value in GIVEN.items() if name not in ("model", "engine", "scope")}
    assert search(given, Plan("es", 9), task=made(), count=1, run=folder).rows[0].curve
