"""Several replies to a row: which of them counts, seeds, resuming, episodes, and what is told to those who use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import test_episodes as haggling
from test_tune import TASK, Watcher, config, journal, learned

from edgees import attempts, cli, evaluate, opening, recommend, report, rewards, rollout, tune
from edgees.attempts import Attempts, parse
from edgees.backends.base import CENTRE, Completion, Member, Progress, Request
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.backends.toy import ToyEngine
from edgees.config import Config, load
from edgees.context import Context
from edgees.delta import Delta
from edgees.episodes import Ending
from edgees.errors import Interrupted, RunError, ScorerError, UsageError
from edgees.history import History
from edgees.population import request_seed
from edgees.rollout import Trajectory
from edgees.tasks.rows import Row, Task

NAN = float("nan")
A, B = Member(key=1, amplitude=0.1), Member(key=2, amplitude=-0.1, sign=-1)
ROWS = [Row.plain("r0", "question 0", "7"), Row.plain("r1", "question 1", "8")]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plot", lambda run, rows: None)


class Scripted(ToyEngine):
    """Says what ``texts[row][attempt]`` says, whoever is asked; keeps the requests of each call."""

    def __init__(self, texts: dict[str, Sequence[str]], model: str = "toy") -> None:
        super().__init__(model)
        self.texts = {
            request_seed(0, 0, f"{row} attempt {k}" if k else row): text
            for row, each in texts.items()
            for k, text in enumerate(each)
        }
        self.calls: list[list[Request]] = []

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        self.calls.append(list(requests))
        done = [Completion(text := self.texts[r.seed], tuple(text.encode()), "stop") for r in requests]
        for at in range(len(done)):
            self._tick(progress, at + 1, 10 * (at + 1))
        return done


def settings(how: str, **more: Any) -> rollout.Settings:
    made = {
        "max_tokens": 16,
        "conversation": lambda row, context: row.messages,
        "attempts": parse(how),
        "temperature": 0.7,
    }
    return rollout.Settings(**(made | more))


def by_number(played: Sequence[Trajectory]) -> list[float]:
    """The text as a number is the reward; NaN for other texts."""
    return [float(t.completion) if re.fullmatch(r"-?[\d.]+", t.completion) else NAN for t in played]


def paid_by_episodes(played: Sequence[Trajectory]) -> list[float]:
    return rewards.judge(rewards.Scorer([]), played).rewards


def text_of(request: Request) -> str:
    return "".join(chr(t) if t < 256 else f"<{t}>" for t in request.prompt)


# --- what can be set --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [("single", Attempts()), ("best:2", Attempts("best", 2)), ("majority:256", Attempts("majority", 256)),
     ("retry:03", Attempts("retry", 3))],
)  # fmt: skip
def test_what_can_be_set(text: str, found: Attempts) -> None:
    assert parse(text) == found
    assert parse(str(found)) == found
    assert load(None, {"attempts": text, "temperature": 0.5}).tries == found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"attempts": "best"}, "single, best:N, majority:N or retry:N is needed"),
        ({"attempts": "best:"}, "is needed"),
        ({"attempts": ""}, "is needed"),
        ({"attempts": "single:2"}, "is needed"),
        ({"attempts": "majority:-3"}, "is needed"),
        ({"attempts": "retry:1"}, "a number from 2 to 256"),
        ({"attempts": "best:0", "temperature": 1}, "a number from 2 to 256"),
        ({"attempts": "best:257", "temperature": 1}, "a number from 2 to 256"),
        ({"attempts": 3}, "a text is needed"),
        ({"attempts": "best:2"}, "all 2 replies would be the same"),
        ({"attempts": "majority:5", "temperature": 0.0}, "all 5 replies would be the same"),
        ({"tools": 1}, "true or false is needed"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as info:
        load(None, given)
    assert info.value.exit_code == 2 and info.value.hint


def test_held_out_answers_are_sampled_only_where_several_are() -> None:
    assert load(None, {"temperature": 0.7}).scored_at == 0.0
    assert load(None, {"temperature": 0.7, "attempts": "best:2"}).scored_at == 0.7
    assert load(None, {"attempts": "retry:2"}).scored_at == 0.0
    assert load(None, {"temperature": 0.7, "attempts": "retry:2"}).scored_at == 0.7


# --- which counts -----------------------------------------------------------------------------------------------------


def test_the_best_is_the_earliest_of_equals_and_never_one_without_a_reward() -> None:
    assert attempts.best([0.1, 0.5, 0.5]) == 1
    assert attempts.best([NAN, -3.0, NAN]) == 1
    assert attempts.best([NAN, NAN]) == 0


def test_the_commonest_answer_ties_to_the_earliest_and_silence_has_no_vote() -> None:
    assert attempts.commonest(["a", "b", "b"]) == 1
    assert attempts.commonest(["a", "b", "b", "a"]) == 0
    assert attempts.commonest([None, None, "c"]) == 2
    assert attempts.commonest([None, None]) == 0
    assert attempts.plain_texts([" a  b\n", " "]) == ["a b", None]


@pytest.mark.parametrize(
    ("specs", "texts", "same"),
    [
        (["numeric"], ["1,000", "It is 1e3.", "1000.0", "999", "none"], [0, 0, 0, 1, None]),
        (["exact"], ["Paris", '"paris".', " PARIS ", "Lyon", "?!"], [0, 0, 0, 1, None]),
        (
            ["json_fields"],
            ['{"a": 1, "b": [2]}', 'so: {"b": [2.0], "a": 1.0}', '{"a": true, "b": [2]}', "a is 1"],
            [0, 0, 1, None],
        ),
        ([r"regex:answer (?:is|=) (\d+)"], ["answer is 4", "4? answer = 4, then", "answer is 5", "4"], [0, 0, 1, None]),
        ([r"regex:\d+"], ["4 or 5", "4", "5", "four"], [0, 0, 1, None]),
        ([lambda **columns: [0.0], "numeric"], ["4", "so 4", "5"], [0, 0, 1]),  # the first that can say
        ([lambda **columns: [0.0]], ["so  4", "so 4", "4", " "], [0, 0, 1, None]),  # nobody can: the texts
    ],
)
def test_what_counts_as_the_same_answer(specs: list[Any], texts: list[str], same: list[int | None]) -> None:
    with rewards.load(specs) as scorer:
        found = scorer.answers(texts)
        assert scorer.answers([]) == []
    order: list[Hashable] = []
    for answer in found:
        if answer is not None and answer not in order:
            order.append(answer)
    assert [None if answer is None else order.index(answer) for answer in found] == same


def test_a_file_says_itself_what_texts_answer(tmp_path: Path) -> None:
    def scorer(extract: str) -> rewards.Scorer:
        file = tmp_path / "mine.py"
        file.write_text(f"def grade(completions, **columns):\n    return [1.0] * len(completions)\n\n{extract}\n")
        return rewards.load([str(file)], deadline=2.0)

    head = "def extract_answers(completions):\n    "
    with scorer(f"{head}return [text.split()[-1] if text else None for text in completions]") as found:
        assert found.answers(["so 4", "4", ""]) == ["4", "4", None]
        assert found.names == ["mine.py:grade"]  # not a second scorer
    with scorer("") as found:
        assert found.answers([" a ", "b"]) == ["a", "b"]
    for body, told in [
        ("return ['a']", "returned 1 of them for 2"),
        ("return 'ab'", "returned str 'ab' for 2"),
        ("raise ValueError('no')", "ValueError: no"),
        ("while True: pass", "did not return within 2 s (extracting)"),
    ]:
        with scorer(head + body) as found, pytest.raises(ScorerError, match=re.escape(told)):
            found.answers(["a", "b"])


# --- sampled: best and majority ---------------------------------------------------------------------------------------


def test_the_best_of_n_counts_and_all_tokens_are_paid_for() -> None:
    engine = Scripted({"r0": ["1", "33", "2"], "r1": ["nothing", "5", "5"]})
    seen: list[tuple[int, int]] = []
    played = rollout.play(
        engine, rollout.every([CENTRE], ROWS), settings("best:3", judge=by_number), lambda *at: seen.append(at)
    )
    assert [t.completion for t in played] == ["33", "5"]
    assert [t.chosen for t in played] == [1, 1]
    assert [t.tokens for t in played] == [tuple(b"1332"), tuple(b"nothing55")]
    assert [a.completion for a in played[0].attempts] == ["1", "33", "2"]
    assert played[1].first_tokens == tuple(b"nothing")
    assert len(engine.calls) == 1 and {r.temperature for r in engine.calls[0]} == {0.7}
    assert seen[-1] == (2, 60)  # rollouts, not replies; all tokens


def test_the_commonest_answer_is_what_is_scored() -> None:
    engine = Scripted({"r0": ["9", "so 7", "7.0", "8"], "r1": ["?", "1", "2", "?"]})
    with rewards.load(["numeric"]) as scorer:
        played = rollout.play(engine, [(A, row) for row in ROWS], settings("majority:4", vote=scorer.answers))
        assert [t.completion for t in played] == ["so 7", "1"]
        assert rewards.judge(scorer, played).rewards == [0.5, 0.1]
    assert played[0].tokens == tuple(b"9so 77.08")


def test_members_share_the_seeds_of_each_attempt() -> None:
    """Common random numbers; the first attempt is what a single one would have been."""
    engine = ToyEngine()
    requests: list[Request] = []
    generate = engine.generate
    engine.generate = lambda asked, progress=None: requests.extend(asked) or generate(asked, progress)  # type: ignore
    members = [replace(CENTRE, pair=pair) for pair in range(2)]
    played = rollout.play(engine, rollout.every(members, ROWS), settings("best:3", judge=by_number, generation=5))
    seeds = [[r.seed for r in requests if r.member.pair == pair] for pair in range(2)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 6
    alone = rollout.play(engine, rollout.every(members, ROWS), settings("single", generation=5))
    assert [t.attempts[0].completion for t in played] == [t.completion for t in alone]
    assert len({a.completion for a in played[0].attempts}) == 3


# --- retries ----------------------------------------------------------------------------------------------------------


def test_retries_go_on_with_feedback_and_the_last_counts() -> None:
    rows = [*ROWS, Row.plain("r2", "question 2", "9")]
    engine = Scripted({"r0": ["0.25", "1.5"], "r1": ["0.9", "0.5", "0.1"], "r2": ["hm", "hm", "0.5"]})
    seen: list[tuple[int, int]] = []
    made = settings("retry:3", judge=by_number, temperature=0.0)
    played = rollout.play(engine, [(A, row) for row in rows], made, lambda *at: seen.append(at))
    assert [t.completion for t in played] == ["1.5", "0.1", "0.5"]  # enough; the last though the first was better
    assert [(t.turns, t.chosen) for t in played] == [(2, 1), (3, 2), (3, 2)]
    assert [len(call) for call in engine.calls] == [3, 3, 2]  # round by round, all together
    assert played[1].tokens == tuple(b"0.90.50.1") and played[1].first_tokens == tuple(b"0.9")
    last = text_of(engine.calls[2][0])
    assert last == (
        "<257>question 1<259><258>0.9<259><257>That answer scored 0.90. Try again.<259>"
        "<258>0.5<259><257>That answer scored 0.50. Try again.<259><258>"
    )
    assert "hm<259><257>That answer could not be scored. Try again." in text_of(engine.calls[1][2])
    assert not played[0].episode and played[0].answer == "1.5"  # to a scorer an answer like any other
    assert seen[-1] == (3, 80) and sorted(seen) == seen  # never backwards, and the tokens of all rounds
    assert len({r.seed for call in engine.calls for r in call}) == 8


def test_a_full_context_ends_the_retries_with_what_there_is() -> None:
    room = len("question 0") + 3 + 4  # the question and one reply
    engine = Scripted({"r0": ["0.1", "0.2"], "r1": ["2", "3"], "long": ["9"]}, f"toy:context={room + 10}")
    rows = [*ROWS, Row.plain("long", "x" * 100)]
    played = rollout.play(engine, [(A, row) for row in rows], settings("retry:2", judge=by_number))
    assert [(t.completion, t.outcome, t.turns) for t in played] == [
        ("0.1", "overflow", 1), ("2", "stop", 1), ("", "overflow", 1),
    ]  # fmt: skip
    assert len(engine.calls) == 1


def test_without_a_judge_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="needs a judge"):
        rollout.play(ToyEngine(), [(CENTRE, ROWS[0])], settings("best:2"))


# --- episodes ---------------------------------------------------------------------------------------------------------


def test_the_best_of_several_episodes() -> None:
    """The same instance each time, other sampling; one that breaks down never counts."""

    class Fragile(haggling.Haggling):
        """Breaks down in every row's first episode."""

        def begin(self, row_id: str, *rest: Any) -> Any:
            first = row_id not in [name for name, _ in self.begun]
            episode = super().begin(row_id, *rest)
            if first:
                episode.start = lambda: Ending(None, "failed", fault="broken")  # type: ignore[method-assign]
            return episode

    task = haggling.some_task()
    there = Fragile()
    scorer = rewards.Scorer([])
    made = settings(
        "best:3",
        episodes=there,
        conversation=lambda row, context: (),
        judge=lambda played: rewards.judge(scorer, played).rewards,
    )
    played = rollout.play(ToyEngine(), rollout.every([CENTRE], task.train), made)
    for t in played:
        paid = [a.reward for a in t.attempts]
        assert paid[0] is None and t.reward == max(p for p in paid[1:] if p is not None) and not t.fault
        assert paid[1] != paid[2] and len(t.tokens) == sum(len(a.tokens) for a in t.attempts)
    seeds = [[seed for name, seed in there.begun if name == row.id] for row in task.train]
    assert all(len(each) == 3 and len(set(each)) == 1 for each in seeds)


def test_a_run_on_the_best_of_two_episodes(tmp_path: Path) -> None:
    given = haggling.settings(tmp_path / "run", attempts="best:2", temperature=0.3, generations=2, eval_every=0)
    assert tune.tune(given, task=haggling.some_task()).generations == 2
    trace = [json.loads(line) for line in (tmp_path / "run/traces/000000.jsonl").read_text().splitlines()]
    assert all(len(line["attempts"]) == 2 and line["chosen"] in (0, 1) for line in trace)
    entry = History.open(tmp_path / "run/history.jsonl", repair=False).lines[0]
    assert entry["tokens"] == sum(line["tokens"] for line in trace)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"attempts": "majority:3", "temperature": 1.0}, "voted on"),
        ({"attempts": "retry:3"}, "tried again after feedback"),
    ],
)
def test_what_means_nothing_for_episodes_is_refused(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as info:
        tune.tune(haggling.settings(tmp_path / "run", **given), task=haggling.some_task())
    assert "best:3" in info.value.hint and not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=told):
        tune.tune(config(tmp_path / "run", agent_cmd="true", **given), task=TASK)
    with pytest.raises(UsageError, match=told):
        opening.check_answering(load(None, given), haggling.some_task())


def test_agents_play_every_attempt_with_its_own_luck() -> None:
    asked: list[tuple[str, str, Any]] = []

    class Agents:
        def play(self, rollouts: Any, policy_of: Callable[[str], Any], progress: Any) -> list[Any]:
            from edgees.agents import Played

            asked.extend((name, policy_of(i, name).row, given["id"]) for i, (_, name, given) in enumerate(rollouts))
            return [Played(Ending(float(i)), (), 0.0, (1, 2), "done") for i, _ in enumerate(rollouts)]

    made = settings("best:2", agents=Agents(), judge=paid_by_episodes)
    [played] = rollout.play(ToyEngine(), [(A, ROWS[0])], made)
    assert asked == [("r0", "r0", "r0"), ("r0 attempt 1", "r0 attempt 1", "r0")]
    assert played.reward == 1.0 and played.tokens == (1, 2, 1, 2) and played.chosen == 1


def test_tools_can_be_hidden(tmp_path: Path) -> None:
    file = tmp_path / "shop.py"
    file.write_text(
        "class Shop:\n    def reset(self, seed, **row):\n        return 'go'\n"
        "    def buy(self, amount: int) -> str:\n        '''Buys.'''\n        return 'ok'\n"
        "    def get_reward(self):\n        return 0.5\n"
    )
    shown: list[int] = []

    class Spy(ToyEngine):
        def encode_chat(self, messages: Any, tools: Any = ()) -> list[int]:
            shown.append(len(tools))
            return super().encode_chat(messages, tools)

    for tools in (True, False):
        shown.clear()
        given = config(tmp_path / f"run-{tools}", task=f"env:{file}:Shop", generations=1, tools=tools, sigma=0.05)
        tune.tune(given, engine=Spy())
        assert (1 in shown) == tools and History.open(
            tmp_path / f"run-{tools}/history.jsonl", repair=False
        ).header["recommended"]["tools"] is tools  # fmt: skip


def test_tools_are_of_environments() -> None:
    with pytest.raises(UsageError, match="task toy task has no tools"):
        opening.check_answering(load(None, {"tools": False}), TASK)
    with pytest.raises(UsageError, match="brings its own tools"):
        opening.check_answering(load(None, {"tools": False, "agent_cmd": "true"}), haggling.some_task())


# --- runs -------------------------------------------------------------------------------------------------------------

WAYS = ["best:3", "majority:3", "retry:3"]


@pytest.mark.parametrize("how", WAYS)
def test_a_run_resumes_exactly_and_counts_everything(tmp_path: Path, how: str) -> None:
    given = {"attempts": how, "temperature": 0.4, "generations": 4}
    tune.tune(config(tmp_path / "whole", **given), task=TASK)
    with pytest.raises(Interrupted):
        tune.tune(config(tmp_path / "halves", **given), task=TASK, observer=Watcher(stop_after=1))
    tune.resume(tmp_path / "halves", task=TASK)
    assert learned(tmp_path / "halves") == learned(tmp_path / "whole")
    assert journal(tmp_path / "halves") == journal(tmp_path / "whole")
    header, *entries = journal(tmp_path / "whole")
    assert header["config"]["attempts"] == how
    assert header["recommended"] == {
        "attempts": how, "temperature": 0.4, "max_tokens": 16, "tools": True, "system": None,
    }  # fmt: skip
    for entry in entries:
        name = f"eval-{entry['eval']:06d}" if "eval" in entry else f"{entry['generation']:06d}"
        trace = [json.loads(line) for line in (tmp_path / f"whole/traces/{name}.jsonl").read_text().splitlines()]
        assert entry["tokens"] == sum(len(text) for line in trace for text in line["attempts"])
        assert all(line["answer"] == line["attempts"][line["chosen"]] for line in trace)
        assert all(len(line["attempts"]) == 3 for line in trace)  # never enough here: near() is below 0


def test_held_out_rows_are_played_as_in_tuning(tmp_path: Path) -> None:
    """At the configured temperature, with the same seeds every time; a single attempt stays greedy."""
    for how, temperatures in (("best:2", {0.4}), ("single", {0.0})):
        calls: list[list[Request]] = []

        class Spy(ToyEngine):
            def generate(self, requests: Any, progress: Any = None, calls: Any = calls) -> list[Completion]:
                calls.append(list(requests))
                return super().generate(requests, progress)

        given = config(tmp_path / how[:4], attempts=how, temperature=0.4, generations=2, eval_every=1)
        tune.tune(given, task=TASK, engine=Spy())
        count = len(TASK.heldout) * given.tries.count
        held = [call for call in calls if len(call) == count and not call[0].member.amplitude]
        assert len(held) == 3 and {r.temperature for call in held for r in call} == temperatures
        assert len({tuple(r.seed for r in call) for call in held}) == 1


def test_a_run_asks_its_own_scorer(tmp_path: Path) -> None:
    given = config(tmp_path / "run", attempts="majority:2", temperature=0.5)
    with ExitStack() as stack:
        setup = opening.open_setup(given, stack, task=replace(TASK, reward=("numeric",)))
        made = setup.replies(0, 0.0)
        one, other = made.vote(["so 7", "7.0"])
        assert one is not None and one == other
        assert made.judge is not None
        assert made.judge([Trajectory(A, ROWS[0], "7"), Trajectory(A, ROWS[1], "7")]) == [1.0, 0.1]


@pytest.mark.parametrize("how", ["best:4", "majority:3"])
def test_weights_are_tuned_for_the_way_they_are_used(tmp_path: Path, how: str) -> None:
    """The toy climbs in its own currency. (Every number differs, so that a majority is the first reply.)"""
    result = tune.tune(config(tmp_path / "run", attempts=how, temperature=0.3, pairs=8), task=TASK)
    assert result.base is not None and result.best is not None and result.best > result.base + 0.1


def test_another_way_is_another_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        tune.tune(config(run, attempts="retry:2"), task=TASK, observer=Watcher(stop_after=1))
    file = run / "config.resolved.toml"
    file.write_text(file.read_text().replace('attempts = "retry:2"', 'attempts = "single"'))
    with pytest.raises(RunError, match="attempts"):
        tune.resume(run, task=TASK)


def test_a_run_that_answers_nothing_in_tuning_says_so(tmp_path: Path) -> None:
    for more, said in (({"loglik_hold": 1.0}, True), ({}, False), ({"attempts": "single", "loglik_hold": 1.0}, False)):
        watcher = Watcher()
        given = {"attempts": "best:2", "temperature": 0.5, "loglik": 1.0, "loglik_end": 1.0, "generations": 1} | more
        tune.tune(config(tmp_path / f"run{len(list(tmp_path.iterdir()))}", **given), task=TASK, observer=watcher)
        assert any("counts in evaluations alone" in text for text in watcher.texts) == said


def test_a_rehearsal_measures_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe plays as the run does, so what it says of the time counts every attempt."""
    for how, replies in (("single", 8), ("best:5", 40)):
        asked: list[int] = []

        class Spy(ToyEngine):
            def generate(self, requests: Any, progress: Any = None, asked: Any = asked) -> list[Completion]:
                asked.append(len(requests))
                return super().generate(requests, progress)

        tune.rehearse(config(tmp_path / "run", attempts=how, temperature=0.5), task=TASK, engine=Spy())
        assert asked == [replies]


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_gguf(tmp_path_factory.mktemp("attempts") / "m.gguf", "llama", quant="Q4_1")


def on_llama(model: Path, run: Path, **more: Any) -> Config:
    given = {
        "model": str(model), "run": str(run), "task": "sums", "pairs": 2, "rows": 2, "groups": 1, "generations": 1,
        "loglik": 0.0, "eval_rows": 4, "max_tokens": 6, "temperature": 0.7, "sigma": 0.05, "antithetic": True,
    }  # fmt: skip
    return load(None, given | more)


@pytest.mark.parametrize("how", WAYS)
def test_the_same_with_one_sequence_at_once_and_with_eight(model: Path, tmp_path: Path, how: str) -> None:
    found = []
    for parallel in (1, 8):
        given = on_llama(model, tmp_path / "run", attempts=how, parallel=parallel)
        with opening.open_engine(given) as engine:
            spec = opening.spec_of(given, engine)
            with Delta.create(tmp_path / f"{parallel}.safetensors", spec) as delta:
                engine.attach(delta)
                task = opening.open_task(given)
                setup = opening.Setup(given, task, rewards.load(["numeric"]), engine, lambda: None)
                members = [Member(5, 0.05, 0, 0, 1), Member(5, -0.05, 0, 0, -1)]
                played = rollout.play(engine, rollout.every(members, task.train[:4]), setup.replies(3, 0.7))
        found.append([(t.completion, t.tokens, t.chosen, [a.completion for a in t.attempts]) for t in played])
    assert found[0] == found[1] and len({tuple(f[3]) for f in found[0]}) > 4


@pytest.fixture(scope="module")
def run(model: Path) -> Path:
    """One generation of majority:3 on the tiny model."""
    made = model.parent / "run"
    tune.tune(on_llama(model, made, attempts="majority:3", system="Say a number."))
    return made


def test_eval_plays_as_the_run_was_tuned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[int, set[float]]] = []
    generate = LlamaCppEngine.generate

    def watched(self: LlamaCppEngine, requests: Any, progress: Any = None) -> Any:
        asked.append((len(requests), {r.temperature for r in requests}))
        return generate(self, requests, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaCppEngine, "generate", watched)
        assert cli.run(["eval", str(run), "--rows", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["attempts"], result["temperature"]) == ("majority:3", 0.7)
    assert asked == [(12, {0.7})] * 3  # tuned, base, our own engine
    assert result["agreement"]["ok"]
    words = evaluate.lines(result)[1]
    assert words.endswith("in plain llama.cpp by the commonest answer of 3 replies, sampled at temperature 0.7")
    assert "answered greedily" in evaluate.lines(result | {"attempts": "single", "temperature": 0.0})[1]


def test_without_references_the_first_attempt_is_what_engines_compare(run: Path, model: Path) -> None:
    """The reply to the very row, not all replies in a row, nor one to a conversation that went on."""
    given = on_llama(model, run, attempts="retry:2")
    rows = [Row.plain("a", "Say a number.")]
    task = Task("own", tuple(rows), tuple(rows), max_tokens=6)
    with evaluate.open_engine(given, model, plain=True) as engine, rewards.load([lambda **c: [0.2]]) as scorer:
        answers = evaluate.answer(engine, rows, task, scorer, given)
        [(prompt, target)] = evaluate.targets(engine, rows, task, given, answers)
        alone = rollout.play(engine, [(CENTRE, rows[0])], settings("single", max_tokens=6))
    assert target == alone[0].tokens and list(prompt) == list(engine_prompt(model, given, rows[0]))


def engine_prompt(model: Path, given: Config, row: Row) -> list[int]:
    with evaluate.open_engine(given, model, plain=True) as engine:
        return engine.encode_chat(row.messages)


def test_estimates_count_every_attempt(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(how: str) -> dict[str, Any]:
        given = {"model": model, "task": "sums", "loglik": 0, "temperature": 0.7, "attempts": how, "pairs": 8,
                 "rows": 4, "groups": 1, "run": tmp_path / "r"}  # fmt: skip
        assert cli.run(["estimate", *(f"--{name}={value}" for name, value in given.items()), "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    single, best, retry = (found(how) for how in ("single", "best:4", "retry:4"))
    one, four, long = (f["time"]["tokens"] for f in (single, best, retry))
    assert 2 * one < four <= 4 * one  # a prompt that several replies share is read once
    assert long > four  # conversations grow
    assert single["settings"]["context"] == best["settings"]["context"] < found("retry:20")["settings"]["context"]
    assert "all 4 attempts are made" in " ".join(best["assumptions"])


def test_the_probe_compares_ways(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q {i}", "answer": str(i % 3)}) + "\n" for i in range(30)))
    code = cli.run(
        ["probe", "--engine", "toy", "--model", "toy", "--task", f"jsonl:{rows}", "--reward", "numeric", "--pairs", "4",
         "--rows", "3", "--temperature", "0.5", "--vary", "attempts=single|retry:2", "--json"]
    )  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and [c["choice"] for c in found["choices"]] == [{"attempts": "single"}, {"attempts": "retry:2"}]


# --- what goes with an export -----------------------------------------------------------------------------------------


def test_exports_say_how_to_ask(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"attempts": "majority:3", "temperature": 0.7, "max_tokens": 6, "tools": True, "system": "Say a number."}
    assert cli.run(["export", str(run), "--to", "gguf", "--out", str(tmp_path), "--verify", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    gguf, beside, modelfile = (Path(f["path"]) for f in document["files"])
    about = json.loads(beside.read_text(encoding="utf-8"))
    assert about.pop("about") == "the commonest answer of 3 replies, sampled at temperature 0.7" and about == asked
    assert beside.name == f"{gguf.stem}.recommended.json" and any("commonest" in note for note in document["notes"])
    assert modelfile.read_text(encoding="utf-8").splitlines() == [
        "# scored with the commonest answer of 3 replies, sampled at temperature 0.7", f"FROM ./{gguf.name}",
        "PARAMETER temperature 0.7", "PARAMETER repeat_penalty 1", "PARAMETER top_k 0", "PARAMETER top_p 1",
        "PARAMETER min_p 0", "PARAMETER num_predict 6", 'SYSTEM """Say a number."""',
    ]  # fmt: skip
    gguf.unlink()
    assert cli.run(["export", str(run), "--to", "gguf", "--out", str(tmp_path)]) == 2  # another file's advice
    err = capsys.readouterr().err
    assert beside.name in err and "writing" not in err  # found out before the work is done

    assert cli.run(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "hf"), "--verify"]) == 0
    config_ = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert {k: config_[k] for k in ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens")} == {
        "do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 6,
    }  # fmt: skip
    assert "eos_token_id" in config_ and json.loads((tmp_path / "hf/recommended.json").read_text())["attempts"]


def test_greedy_advice_takes_the_bases_sampling_out() -> None:
    found = {"attempts": "single", "temperature": 0.0, "max_tokens": 32, "tools": True, "system": None}
    base = {"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert recommend.generation_config(found, base) == {"eos_token_id": 2, "do_sample": False, "max_new_tokens": 32}
    assert recommend.modelfile(found, "m.gguf").splitlines()[2:] == [
        "PARAMETER temperature 0", "PARAMETER repeat_penalty 1", "PARAMETER num_predict 32",
    ]  # fmt: skip
    for hard in ('say """', 'say "so"'):  # a quote at the end would be a fourth
        assert "SYSTEM" not in (text := recommend.modelfile({**found, "system": hard}, "m.gguf")) and "JSON" in text
    assert recommend.documents({}, "gguf", "m.gguf") == {}  # a run begun before it was recorded


def test_advice_has_the_context_in_force() -> None:
    shot = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})
    found = {"attempts": "single", "temperature": 0.0, "max_tokens": 8, "tools": True, "system": "Be brief."}
    assert recommend.in_context(found, Context()) == found
    assert recommend.in_context({}, Context(system="x")) == {}
    full = recommend.in_context(found, Context(skills="- add", shots=(shot,)))
    assert full["system"].startswith("Be brief.") and full["system"].endswith("- add")
    assert full["examples"] == list(shot)
    assert recommend.modelfile(full, "m.gguf").endswith('MESSAGE user """2+2?"""\nMESSAGE assistant """4"""\n')
    assert recommend.in_context(found, Context(system="Own."))["system"] == "Own."
    none = recommend.in_context({**found, "system": None}, Context(shots=(shot,)))
    assert none["system"] is None and none["examples"] == list(shot)
    call = ({"role": "user", "content": "buy"}, {"role": "assistant", "content": "", "tool_calls": []})
    assert "MESSAGE" not in recommend.modelfile(recommend.in_context(found, Context(shots=(call,))), "m.gguf")


def test_words() -> None:
    assert parse("single").told(0.0) == "one reply, greedy"
    assert "best of 4" in parse("best:4").told(1.0) and "up to 3 replies, greedy" in parse("retry:3").told(0.0)
    assert attempts.feedback(0.2) == "That answer scored 0.20. Try again."
