"""Environments as tasks: both shapes of class, every fault of one, and that episodes do not influence each other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgees.children import games
from edgees.episodes import Ask, Ending, Episode
from edgees.errors import DataError, MissingExtra, ScorerError, UsageError
from edgees.tasks import load_task
from edgees.tasks.playing import Environments, place
from edgees.tasks.rows import Row, Task

Policy = Callable[[Ask], str]

SHOP = '''
import os, random, time

class Shop:
    """A till."""
    system = "You keep a till."
    max_turns = 6
    examples = [{"role": "user", "content": "An example."}, {"role": "assistant", "content": "Seen."}]

    def reset(self, goal: int, **row):
        self.sum, self.done = 0, False
        self.goal = goal
        return f"Put {goal} into the till."

    def put(self, amount: int) -> str:
        """Put money into the till.

        Args:
            amount: how much
        """
        if amount < 0:
            raise ValueError("no debts")
        self.sum += amount
        self.done = self.sum >= self.goal
        return f"There are {self.sum}."

    def count(self) -> dict:
        """How much there is."""
        return {"sum": self.sum}

    def get_reward(self) -> float:
        return 1.0 if self.sum == self.goal else 0.0

    def metrics(self):
        return {"sum": self.sum, "nothing": None}

    @staticmethod
    def rows():
        return [{"goal": n, "split": "heldout" if n > 8 else "train"} for n in range(1, 11)]
'''

DICE = '''
import os, random, sys, time
import numpy as np

class Dice:
    """Rolls with the global generators, which reset seeds anew; the reply may name something to go wrong."""
    max_turns = 5

    def __init__(self, sides=6, reseed=True):
        self.sides, self.reseed = sides, reseed

    def reset(self, seed, **row):
        if self.reseed:
            random.seed(seed)
        self.left = 4
        return f"Roll. {random.random():.6f}"

    def step(self, action):
        self.left -= 1
        if action == "raise":
            raise RuntimeError("broken die")
        if action == "hang":
            time.sleep(60)
        if action == "die":
            os._exit(3)
        if action == "print":
            for _ in range(100):
                print("x" * 1_000_000)
        if action == "os.write":
            os.write(1, b"y" * 1_000_000)
        if action == "memory":
            self.much = bytearray(6 << 30)
        if action == "long":
            return "z" * 50_000, 0.0, False
        if action == "shape":
            return "only a text"
        rewards = {"str": "1.0", "nan": float("nan"), "inf": float("inf"), "none": None, "bool": True, "list": [1.0]}
        value = rewards.get(action, random.randint(1, self.sides) + float(np.random.random()))
        return f"You rolled {value}.", value, self.left == 0, {"actions": ["roll"], "invalid": action == "what"}
'''


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Callable[..., tuple[Task, Environments]]]:
    """Writes a file, loads its class as a task, and opens it; closes what it has opened."""
    opened: list[Environments] = []

    def make(text: str, query: str = "") -> tuple[Task, Environments]:
        name = text.partition("class ")[2].partition(":")[0]
        file = tmp_path / f"{name.lower()}_{len(opened)}.py"
        file.write_text(text, encoding="utf-8")
        task = load_task(f"env:{file}:{name}{query}")
        assert task.episodes is not None
        source = task.episodes()
        assert isinstance(source, Environments)
        opened.append(source)
        return task, source

    yield make
    for source in opened:
        source.close()


def scripted(*replies: str) -> Policy:
    """Says these things, the last of them for ever."""
    rest = list(replies)
    return lambda ask: rest.pop(0) if len(rest) > 1 else rest[0]


def play(source: Environments, row: Row | dict[str, Any], policy: Policy, seed: int = 5) -> Ending:
    columns = row.columns if isinstance(row, Row) else row
    episode = source.begin("r", columns, None, seed)
    return finish(episode, episode.start(), policy)


def finish(episode: Episode, turn: Ask | Ending, policy: Policy) -> Ending:
    while isinstance(turn, Ask):
        turn = episode.reply(policy(turn), "stop")
    return turn


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# -- tools ------------------------------------------------------------------------------------------------------------


def test_a_class_with_tools_is_played(written: Any) -> None:
    task, source = written(SHOP)
    assert [row.columns["goal"] for row in task.train] == list(range(1, 9))
    assert [row.columns["goal"] for row in task.heldout] == [9, 10]
    assert (task.system, task.max_tokens, task.reward) == ("You keep a till.", 64, ())
    episode = source.begin("r", {"goal": 7}, None, 5)
    ask = episode.start()
    assert isinstance(ask, Ask)
    assert [tool["function"]["name"] for tool in ask.tools] == ["put", "count"]
    assert ask.tools[0]["function"]["parameters"]["properties"]["amount"]["type"] == "integer"
    assert [message["content"] for message in ask.messages] == [
        "You keep a till.",
        "An example.",
        "Seen.",
        "Put 7 into the till.",
    ]
    ending = finish(episode, ask, scripted("I begin. " + call("put", amount=3), call("count"), call("put", amount=4)))
    assert (ending.reward, ending.outcome, ending.fault) == (1.0, "finished", "")
    assert ending.parts == {"sum": 7.0, "turns": 3.0, "invalid": 0.0}
    said = ending.messages[4:]
    assert [message["role"] for message in said] == ["assistant", "tool"] * 3
    first = said[0]["tool_calls"][0]
    assert said[0]["content"] == "I begin." and first["type"] == "function"
    assert json.loads(first["function"]["arguments"]) == {"amount": 3}
    assert said[1]["tool_call_id"] == first["id"] and said[1]["content"] == "There are 3."
    assert json.loads(said[3]["content"]) == {"sum": 3}


def test_a_reply_without_a_call_ends_it(written: Any) -> None:
    _, source = written(SHOP)
    ending = play(source, {"goal": 7}, scripted(call("put", amount=6), "That is all."))
    assert (ending.reward, ending.outcome, ending.parts["turns"]) == (0.0, "finished", 2.0)
    assert ending.messages[-1] == {"role": "assistant", "content": "That is all."}


def test_malformed_calls_go_back_to_the_model(written: Any) -> None:
    _, source = written(SHOP)
    bad = ['<tool_call>{"name": "put", "arguments": {"amount": </tool_call>', call("steal", amount=1), call("put"),
           call("put", amount="much"), call("put", amount=-1)]  # fmt: skip
    ending = play(source, {"goal": 7}, scripted(*bad, call("put", amount=7)))
    assert (ending.reward, ending.outcome) == (1.0, "finished")
    assert ending.parts["invalid"] == pytest.approx(5 / 6)
    answers = [message["content"] for message in ending.messages if message["role"] in ("tool", "user")][-6:]
    assert all(answer.startswith("Error: ") for answer in answers[:5]), answers
    assert "steal" in answers[1] and "amount" in answers[2] and answers[4] == "Error: ValueError: no debts"


def test_several_calls_in_one_reply(written: Any) -> None:
    _, source = written(SHOP)
    ending = play(source, {"goal": 2}, scripted(call("put", amount=2) + call("count")))
    assert (ending.reward, ending.parts["turns"]) == (1.0, 1.0)
    told = [message["content"] for message in ending.messages if message["role"] == "tool"]
    assert told == ["There are 2.", "Error: it is over."]


def test_the_systems_message_can_be_another(written: Any) -> None:
    _, source = written(SHOP)
    ask = source.begin("r", {"goal": 1}, "Be quick.", 0).start()
    assert isinstance(ask, Ask) and ask.messages[0]["content"] == "Be quick."


def test_a_prompt_in_the_row_comes_first(written: Any) -> None:
    _, source = written(SHOP.replace('return f"Put', 'return None if goal == 3 else f"Put'))
    ask = source.begin("r", {"goal": 4, "prompt": "Hello."}, None, 0).start()
    assert isinstance(ask, Ask) and ask.messages[-1]["content"] == "Hello.\n\nPut 4 into the till."
    ask = source.begin("r", {"goal": 3, "prompt": [{"role": "user", "content": "Only this."}]}, None, 0).start()
    assert isinstance(ask, Ask) and ask.messages[-1]["content"] == "Only this."
    ending = source.begin("r9", {"goal": 3}, None, 0).start()
    assert isinstance(ending, Ending)
    assert "Shop.reset on row r9" in ending.fault and "nothing to begin with" in ending.fault


def test_reset_may_give_a_conversation(written: Any) -> None:
    talk = '[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]'
    _, source = written(SHOP.replace('return f"Put {goal} into the till."', f"return {talk}").replace("examples", "_e"))
    ask = source.begin("r", {"goal": 4}, None, 0).start()
    assert isinstance(ask, Ask) and [m["content"] for m in ask.messages] == ["S", "U"]


# -- steps ------------------------------------------------------------------------------------------------------------


def test_steps_are_summed(written: Any) -> None:
    task, source = written(DICE.replace("seed, **row", "*, seed"))
    assert len(task.train) == 256 and len(task.heldout) == 64
    assert not {row.content_key() for row in task.train} & {row.content_key() for row in task.heldout}
    episode = source.begin("r", task.train[0].columns, None, 5)
    ask = episode.start()
    assert isinstance(ask, Ask) and ask.tools == ()
    ending = finish(episode, ask, scripted(" roll\n", "what", "roll", "roll"))
    rolled = [float(m["content"][11:-1]) for m in ending.messages if m["content"].startswith("You rolled")]
    assert len(rolled) == 4 and ending.reward == pytest.approx(sum(rolled))
    assert (ending.outcome, ending.parts) == ("finished", {"turns": 4.0, "invalid": 0.25})
    assert episode.actions == () or episode.actions == ("roll",)


def test_the_horizon_truncates_and_pays_what_there_is(written: Any) -> None:
    _, source = written(DICE, "?max_turns=2")
    ending = play(source, {"seed": 1}, scripted("roll"))
    assert (ending.outcome, ending.reason, ending.parts["turns"]) == ("truncated", "turns", 2.0)
    assert ending.reward is not None and ending.reward > 2


def test_given_up_and_overflow(written: Any) -> None:
    _, source = written(DICE)
    for reason, outcome in (("time", "truncated"), ("overflow", "overflow")):
        episode = source.begin("r", {"seed": 1}, None, 0)
        episode.start()
        episode.reply("roll", "stop")
        ending = episode.abandon(reason)
        assert (ending.outcome, ending.reason) == (outcome, reason)
        assert ending.reward is not None and ending.reward > 1
    episode = source.begin("r", {"seed": 1}, None, 0)
    episode.start()
    ending2 = episode.reply("roll", "overflow")
    assert isinstance(ending2, Ending) and ending2.outcome == "overflow" and ending2.reward is not None
    assert source.begin("r", {"seed": 1}, None, 0).abandon("time").reward is None


def test_gymnasiums_reset_and_parse_action(written: Any) -> None:
    _, source = written(
        """
class Five:
    def reset(self, *, seed=None, options=None):
        return {"seed": seed, "options": options}, {"actions": ["a", "b"]}
    def parse_action(self, text):
        return text[-1] if text else None
    def step(self, action):
        return action, 0.5, False, action == "b", {}
"""
    )
    episode = source.begin("r", {"level": 3}, None, 11)
    ask = episode.start()
    assert isinstance(ask, Ask) and json.loads(ask.messages[-1]["content"]) == {"seed": 11, "options": {"level": 3}}
    assert episode.actions == ("a", "b")
    ending = finish(episode, ask, scripted("", "take a", "take b"))
    assert (ending.outcome, ending.reason, ending.reward) == ("truncated", "environment", 1.0)
    assert ending.parts["invalid"] == pytest.approx(1 / 3)


def test_long_observations_are_cut(written: Any) -> None:
    _, source = written(DICE)
    ending = play(source, {"seed": 1}, scripted("long", "roll"))
    longest = max((m["content"] for m in ending.messages), key=len)
    assert 16_000 <= len(longest) < 16_100 and "50,000 characters" in longest


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise", ["Dice.step", "RuntimeError: broken die", "dice_0.py:"]),
        ("die", ["Dice.step", "row r", "exit status 3"]),
        ("memory", ["Dice.step", "MemoryError"]),
        ("shape", ["Dice.step", "str 'only a text'"]),
        ("str", ["Dice.step", "str '1.0'"]),
        ("nan", ["Dice.step", "NaN"]),
        ("inf", ["Dice.step", "inf"]),
        ("none", ["Dice.step", "None"]),
        ("bool", ["Dice.step", "bool True"]),
        ("list", ["Dice.step", "list [1.0]"]),
    ],
)
def test_a_step_that_breaks_down(written: Any, action: str, words: list[str]) -> None:
    _, source = written(DICE)
    ending = play(source, {"seed": 1}, scripted("roll", action))
    assert (ending.reward, ending.outcome) == (None, "failed")
    assert all(word in ending.fault for word in words), ending.fault
    assert ending.messages[-1]["content"] == action
    assert play(source, {"seed": 1}, scripted("roll")).outcome == "finished", "the next one is played"


def test_100_megabytes_on_stdout_are_swallowed(written: Any, capfd: pytest.CaptureFixture[str]) -> None:
    _, source = written(DICE, "?reseed=false")
    plain = play(source, {"seed": 1}, scripted("roll"))
    loud = play(source, {"seed": 1}, scripted("print", "os.write", "roll"))
    assert loud.outcome == "finished" and loud.reward == plain.reward
    source.close()
    shown = capfd.readouterr()
    assert len(shown.out) + len(shown.err) < 1_000_000


@pytest.mark.parametrize("action", ["hang", "die"])
def test_the_others_are_played_again(written: Any, action: str) -> None:
    _, source = written(DICE, "?deadline=1.5&reseed=false")
    alone = [play(source, {"seed": n}, scripted("roll")) for n in range(4)]
    first = source._child.pid
    episodes = [source.begin(f"r{n}", {"seed": n}, None, 5) for n in range(4)]
    turns: list[Ask | Ending] = [episode.start() for episode in episodes]
    turns = [episode.reply("roll", "stop") for episode in episodes]
    turns[2] = episodes[2].reply(action, "stop")
    failed = turns[2]
    assert isinstance(failed, Ending) and (failed.reward, failed.outcome) == (None, "failed")
    assert "Dice.step on row r2" in failed.fault
    assert ("no answer within 1.5 s (at dice_0.py:" if action == "hang" else "exit status 3") in failed.fault
    for n in (3, 0, 1):
        ending = finish(episodes[n], turns[n], scripted("roll"))
        assert (ending.messages, ending.reward, ending.parts) == (alone[n].messages, alone[n].reward, alone[n].parts)
    assert source._child.pid != first


def test_what_cannot_be_played_again_is_said(written: Any) -> None:
    _, source = written(DICE.replace("random.random():.6f", "time.time_ns()"))
    episodes = [source.begin(f"r{n}", {"seed": n}, None, 5) for n in range(2)]
    for episode in episodes:
        episode.start()
    episodes[0].reply("die", "stop")
    ending = episodes[1].reply("roll", "stop")
    assert isinstance(ending, Ending) and ending.outcome == "failed"
    assert "Dice.reset on row r1" in ending.fault and "not deterministic" in ending.fault


def test_a_tool_that_ends_python_or_pays_nothing(written: Any) -> None:
    text = SHOP.replace('raise ValueError("no debts")', "os._exit(4)")
    text = text.replace("return 1.0 if self.sum == self.goal else 0.0", 'return "much" if self.goal == 7 else 1 / 0')
    _, source = written(text)
    ending = play(source, {"goal": 7}, scripted(call("put", amount=-1)))
    assert ending.outcome == "failed" and "Shop.put on row r: its process ended with exit status 4" in ending.fault
    ending = play(source, {"goal": 7}, scripted("I am done."))
    assert (ending.reward, ending.outcome) == (None, "failed")
    assert "Shop.get_reward gave str 'much'" in ending.fault
    ending = play(source, {"goal": 1}, scripted("I am done."))
    assert "Shop.get_reward: ZeroDivisionError" in ending.fault and "shop_0.py:" in ending.fault


def test_reset_gets_what_it_needs(written: Any) -> None:
    _, source = written(SHOP)
    ending = source.begin("r4", {"price": 3}, None, 0).start()
    assert isinstance(ending, Ending) and "row r4" in ending.fault
    assert "Shop.reset needs 'goal'" in ending.fault


# -- one or many at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reseed", ["true", "false"])
def test_32_interleaved_are_as_one_alone(written: Any, reseed: str) -> None:
    _, source = written(DICE, f"?reseed={reseed}")
    rows = [{"seed": n % 5} for n in range(32)]
    alone = [play(source, row, scripted("roll")) for row in rows]
    episodes = [source.begin("r", row, None, 5) for row in rows]
    turns: list[Ask | Ending] = [episode.start() for episode in episodes]
    order = random.Random(3)
    while waiting := [n for n in range(32) if isinstance(turns[n], Ask)]:
        n = order.choice(waiting)
        turns[n] = episodes[n].reply("roll", "stop")
    assert turns == alone
    assert len({ending.reward for ending in alone}) == 5


def test_seeds_come_from_the_row_or_the_run(written: Any) -> None:
    _, source = written(DICE.replace("seed, **row", "**row"), "?reseed=false")
    same = [play(source, {"level": 1}, scripted("roll"), seed).reward for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]
    assert play(source, {"seed": 9}, scripted("roll"), 1) == play(source, {"seed": 9}, scripted("roll"), 2)


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("env:{file}:Dise", UsageError, "no class 'Dise' / Did you mean Dice?"),
        ("env:{file}?side=4", UsageError, "no parameter 'side' / Did you mean sides?"),
        ("env:{file}?max_turns=0", UsageError, "max_turns of Dice must be a whole number of at least 1"),
        ("env:{file}?deadline=soon", UsageError, "deadline of Dice"),
        ("env:{file}?rows=nowhere.jsonl", DataError, "no such file: nowhere.jsonl"),
        ("env:missing.py:A", DataError, "no such file: missing.py"),
        ("env:Dice", UsageError, "names no Python file / env:FILE.py:CLASS"),
        ("textarea:GuessTheNumber-v0", UsageError, "unknown task / Did you mean textarena?"),
        ("gymnasium:", UsageError, "needs the id"),
        ("textworld:nowhere.z8", UsageError, "no such game file"),
    ],
)
def test_what_cannot_be_loaded_is_said(tmp_path: Path, spec: str, error: type[UsageError], words: str) -> None:
    if spec.startswith("textworld"):
        pytest.importorskip("textworld")
    file = tmp_path / "dice.py"
    file.write_text(DICE, encoding="utf-8")
    with pytest.raises(error) as caught:
        load_task(spec.format(file=file))
    text = f"{caught.value.message} {caught.value.hint}"
    assert all(word in text for word in words.split(" / ")), text


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("class A:\n    def reset(self): pass\n    def __init__(self): 1 / 0\n", ScorerError, "ZeroDivisionError"),
        ("import os; os._exit(7)\nclass A: pass\n", ScorerError, "exit status 7"),
        ("class A(\n", ScorerError, "SyntaxError"),
        ("class A:\n    def step(self, a): pass\n", UsageError, "no method reset"),
        ("class A:\n    def reset(self): pass\n", UsageError, "neither a method step nor"),
        ("class A:\n    def reset(self): pass\n    def tool(self, x): pass\n", UsageError, "A.tool cannot be a tool"),
        ("class A:\n    def reset(self): 0\n    def step(self): 0\n    def rows(self): return [{1, 2}]\n", UsageError,
         "what JSON cannot"),
        ("class A:\n    examples = [1]\n    def reset(self): 0\n    def step(self): 0\n", UsageError, "examples of A"),
    ],
)  # fmt: skip
def test_a_broken_class_is_refused(tmp_path: Path, text: str, error: type[UsageError], words: str) -> None:
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    with pytest.raises(error) as caught:
        load_task(f"env:{tmp_path / 'a.py'}:A")
    assert words in caught.value.message


def test_rows_from_files(tmp_path: Path) -> None:
    (tmp_path / "dice.py").write_text(DICE, encoding="utf-8")
    lines = [{"seed": n, "level": "easy", **({"id": "first"} if n == 0 else {})} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "held.jsonl").write_text('{"seed": 3, "level": "easy"}\n{"seed": 77}\n', encoding="utf-8")
    spec = f"env:{tmp_path / 'dice.py'}?rows={tmp_path / 'rows.jsonl'}"
    task = load_task(spec)
    assert len(task.train) == 8 and len(task.heldout) == 2 and all(row.messages == () for row in task.train)
    assert {"first", "rows.jsonl:2"} <= {row.id for row in (*task.train, *task.heldout)}
    task = load_task(spec, eval_data=tmp_path / "held.jsonl", limit=5)
    assert [row.columns["seed"] for row in task.heldout] == [3, 77] and len(task.train) == 5
    assert 3 not in [row.columns["seed"] for row in task.train] and "1 training row" in task.warnings[0]
    (tmp_path / "rows.jsonl").write_text('{"seed": 1}\n{"seed": }\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.jsonl:2"):
        load_task(spec)


def test_rows_are_told_apart_by_their_columns() -> None:
    one, two = Row("a", (), {"seed": 1, "id": "a"}), Row("b", (), {"id": "b", "seed": 1})
    assert one.content_key() == two.content_key() != Row("a", (), {"seed": 2}).content_key()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as caught:
        load_task("textarena:GuessTheNumber-v0")
    assert caught.value.hint == "pip install textarena"


def test_a_users_module_may_be_called_score(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("WORTH = 2.5\n", encoding="utf-8")
    (tmp_path / "a.py").write_text(
        "import score\nclass A:\n    reset = lambda self: 'go'\n    step = lambda self, a: ('', score.WORTH, True)\n",
        encoding="utf-8",
    )
    task = load_task(f"env:{tmp_path / 'a.py'}")
    assert task.episodes is not None
    source = task.episodes()
    assert isinstance(source, Environments)
    assert play(source, {}, scripted("x")).reward == 2.5
    source.close()


def test_the_place_of_a_hang() -> None:
    trace = 'Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n  File "/a/b.py", line 7 in f\n'
    assert place(trace) == " (at b.py:7 in f)" and place("") == ""


# -- packages of games ------------------------------------------------------------------------------------------------


def bisecting() -> Policy:
    span = [1, 20, 0]

    def guess(ask: Ask) -> str:
        told = ask.messages[-1]["content"]
        if "is higher" in told:
            span[0] = span[2] + 1
        if "is lower" in told:
            span[1] = span[2] - 1
        span[2] = (span[0] + span[1]) // 2
        return f"My guess is {span[2]}."

    return guess


def test_textarena_guess_the_number() -> None:
    pytest.importorskip("textarena")
    task = load_task("textarena:GuessTheNumber-v0")
    assert task.episodes is not None and task.max_tokens == 32
    source = task.episodes()
    assert isinstance(source, Environments)
    endings = [play(source, row, bisecting()) for row in task.train[:8]]
    assert [ending.reward for ending in endings] == [1.0] * 8
    assert len({ending.parts["turns"] for ending in endings}) > 1, "the numbers differ"
    assert len(endings[0].messages[0]["content"]) < 200
    silly = play(source, task.train[0], scripted("I do not know"))
    assert (silly.reward, silly.outcome, silly.parts) == (0.0, "finished", {"turns": 2.0, "invalid": 1.0})
    state = random.getstate()
    near = play(source, task.train[0], scripted(*(f"[{n}]" for n in range(1, 20))))
    assert random.getstate() == state and near.reward is not None and 0 < near.reward <= 1
    source.close()


@pytest.mark.parametrize("name", ["Countdown-v0", "ThreeCardMonte-v0"])
def test_textarena_texts_as_rewards(name: str) -> None:
    """Games that give set_invalid_move its arguments in the wrong order: the reward is the number, not the text."""
    pytest.importorskip("textarena")
    task = load_task(f"textarena:{name}")
    assert task.episodes is not None
    source = task.episodes()
    assert isinstance(source, Environments)
    ending = play(source, task.train[0], scripted("hello"))
    assert ending.outcome == "finished" and isinstance(ending.reward, float), ending.fault
    assert ending.parts["invalid"] == 1.0
    source.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GuessTheNumbr-v0", "Did you mean GuessTheNumber-v0"),
        ("ConnectFour-v0", "several players"),
        ("GuessTheNumber-v0?max_numbr=3", "no parameter 'max_numbr' / Did you mean max_number?"),
    ],
)
def test_textarena_refusals(name: str, words: str) -> None:
    pytest.importorskip("textarena")
    with pytest.raises(UsageError) as caught:
        load_task(f"textarena:{name}")
    assert all(word in f"{caught.value.message} {caught.value.hint}" for word in words.split(" / "))


@pytest.mark.filterwarnings("ignore")  # the oracle below runs textworld in this process
def test_textworld_and_its_oracle(tmp_path: Path) -> None:
    pytest.importorskip("textworld")
    task = load_task("textworld:?quest_length=2&world_size=2&progress=true")
    assert task.episodes is not None
    source = task.episodes()
    assert isinstance(source, Environments)
    row = task.train[0]
    game = games.TextWorld("", str(tmp_path), quest_length=2)
    game.reset(row.columns["seed"])
    moves, done = [], False
    while not done:
        moves.append(str(game.commands.index(game.state.policy_commands[0]) + 1))
        _, _, done, _ = game.step(moves[-1])
    game.close()
    won = play(source, row, scripted(*moves))
    assert (won.reward, won.outcome, won.parts["won"]) == (1.0, "finished", 1.0)
    assert "Answer with the number of one action." in won.messages[0]["content"]
    half = play(source, row, scripted(moves[0], "none"))
    assert half.outcome == "truncated" and half.reward == pytest.approx(0.25), "half of the walk, no score"
    assert half.parts["invalid"] == pytest.approx(7 / 8)
    source.close()


def test_gymnasium_with_numbers() -> None:
    pytest.importorskip("gymnasium")
    task = load_task("gymnasium:FrozenLake-v1?render_mode=ansi&is_slippery=false")
    assert task.episodes is not None
    source = task.episodes()
    assert isinstance(source, Environments)
    ending = play(source, task.train[0], scripted("go 2", "2", "1", "9", "1", "1", "2"))
    assert (ending.reward, ending.outcome) == (1.0, "finished")
    assert ending.parts["invalid"] == pytest.approx(1 / 7)
    assert "(S)FFF" in ending.messages[0]["content"]
    source.close()
