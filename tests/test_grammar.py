"""Replies that follow a grammar: chosen as the model would among what is allowed, in answers, episodes and requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import tiny_gguf

from edgees import cli, config, opening, report, rollout, tools, tune
from edgees.backends.base import CENTRE, Request
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.backends.toy import ToyEngine
from edgees.errors import DataError, UsageError
from edgees.history import History
from edgees.tasks import load_task

SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["den", "hall"]}, "level": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["room", "level"],
}
GAME = '''
class Doors:
    """Two turns: of the doors that are there, one is right."""
    max_turns = 2
    max_tokens = 12

    def reset(self, seed):
        self.seed, self.turn, self.good, self.actions = seed, 0, 0, ["open left", "open right"]
        return "Which door?"

    def step(self, action):
        self.turn += 1
        known = action in self.actions
        self.good += action.endswith("left" if self.seed % 2 else "right")
        self.actions = ["wait", "run"]
        return "And now?", 0.0, self.turn == 2, {"invalid": not known}

    def get_reward(self):
        return self.good

class Lamp:
    """One tool, which ends it."""
    max_turns = 2
    max_tokens = 48

    def reset(self, seed):
        self.done, self.level = False, None
        return "Switch the lamp."

    def switch(self, room: str, on: bool) -> str:
        """Switch a lamp.

        Args:
            room: Where.
            on: Whether it is to be on.
        """
        self.done, self.level = True, on
        return "Done."

    def get_reward(self):
        return float(self.done)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("g") / "m.gguf", "llama")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LlamaCppEngine]:
    with LlamaCppEngine(model, plain=True) as engine:
        yield engine


@pytest.fixture
def game(tmp_path: Path) -> Path:
    path = tmp_path / "game.py"
    path.write_text(GAME)
    return path


def ask(engine: LlamaCppEngine, grammar: str, seed: int = 0, temperature: float = 1.0, most: int = 80) -> Request:
    prompt = tuple(engine.encode_chat([{"role": "user", "content": "say"}]))
    return Request(CENTRE, prompt, most, temperature, seed, grammar=grammar)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_random_model_writes_what_the_schema_wants(engine: LlamaCppEngine, temperature: float) -> None:
    grammar = tools.grammar(schema=SCHEMA)
    made = engine.generate([ask(engine, grammar, seed, temperature, most=300) for seed in range(6)])
    for completion in made:
        found = json.loads(completion.text)
        assert completion.outcome == "stop"
        assert (
            found["room"] in ("den", "hall") and type(found["level"]) is int and set(found) <= {*SCHEMA["properties"]}
        )
    assert len({completion.text for completion in made}) == (1 if temperature == 0.0 else 6)
    [free] = engine.generate([ask(engine, "", 0, temperature)])
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(free.text)


def test_the_best_of_what_is_allowed_is_said(engine: LlamaCppEngine) -> None:
    """Against the plain rule: the highest logit among the tokens that the grammar's language lets through."""
    words = ["yes", "yellow", "no", "note"]
    request = ask(engine, tools.grammar(actions=words), temperature=0.0)
    [made] = engine.generate([request])
    said = ""
    for token in made.tokens:
        logits = engine.logits([*request.prompt, *made.tokens[: made.tokens.index(token)]])[-1]
        pieces = [engine.piece(t).decode("utf-8", "replace") for t in range(engine.vocabulary)]
        able = [
            t for t, piece in enumerate(pieces)
            if piece and not engine._control(t) and any(word.startswith(said + piece) for word in words)
        ]  # fmt: skip
        ends = [*engine.end_of_turn()] if said in words else []
        assert token == max([*able, *ends], key=lambda t: (logits[t], -t)), said
        said += pieces[token]
    assert said == made.text and said in words


def test_company_in_a_batch_changes_nothing(engine: LlamaCppEngine) -> None:
    asked = [
        ask(engine, grammar, seed, temperature)
        for grammar in ("", tools.grammar(schema=SCHEMA), tools.grammar(actions=["up", "down"]), "root ::= [a-z]{1,9}")
        for seed, temperature in ((0, 0.0), (1, 1.0), (2, 1.0))
    ]
    alone = [engine.generate([request])[0] for request in asked]
    assert engine.generate(asked) == alone
    assert engine.generate(asked[::-1])[::-1] == alone


def test_control_tokens_are_no_text_and_only_a_whole_reply_ends(engine: LlamaCppEngine) -> None:
    grammar = engine._grammar('root ::= [^\\x00]{3,9} | "<|im_start|>"').begin()
    everything = np.arange(engine.vocabulary)
    control = np.array([engine._control(t) for t in everything])
    assert control.sum() > 2
    first = grammar.allowed(everything)
    assert not first[control].any() and first.any()
    for text in "abc":
        [token] = engine.encode(text)[-1:]
        scores = np.full(engine.vocabulary, -9.0, np.float32)
        scores[token] = 1.0
        assert grammar.choose(scores) == token
    after = grammar.allowed(everything)
    assert [t for t in everything if control[t] and after[t]] == sorted(t for t in engine.end_of_turn() if control[t])


def test_what_cannot_be_read_is_refused(engine: LlamaCppEngine, capfd: pytest.CaptureFixture[str]) -> None:
    for wrong in ("", "root ::= nothing", 'other ::= "a"', "root ::= root", 'root ::= "a\0"'):
        with pytest.raises(UsageError, match="grammar cannot be read"):
            engine.check_grammar(wrong)
    with pytest.raises(UsageError, match="toy"):
        ToyEngine().check_grammar('root ::= "a"')


def test_many_grammars_are_forgotten_in_turn(engine: LlamaCppEngine) -> None:
    for number in range(200):
        [made] = engine.generate([ask(engine, tools.grammar(actions=[f"number {number}"]))])
        assert made.text == f"number {number}"
    assert len(engine._grammars) <= 64


# -- settings


def opened(gguf: Path, **given: Any) -> rollout.Settings:
    with ExitStack() as stack:
        setup = opening.open_setup(config.load(None, {"model": str(gguf), "task": "sums", **given}), stack)
        return setup.replies(0, 0.0)


def test_grammars_from_files(model: Path, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "g.gbnf").write_text("root ::= [0-9]{1,3}\n")
    assert opened(model, grammar=str(tmp_path / "s.json")).grammar == tools.grammar(schema=SCHEMA)
    assert opened(model, grammar=str(tmp_path / "g.gbnf")).grammar == "root ::= [0-9]{1,3}\n"
    assert opened(model).grammar == ""


@pytest.mark.parametrize(
    ("given", "text", "says"),
    [
        ({"grammar": "none.json"}, None, "no file none.json"),
        ({"grammar": "words"}, None, "'words' is neither actions, tools"),
        ({"grammar": "actions"}, None, "task sums is none"),
        ({"grammar": "g.json"}, "{", "g.json cannot be read"),
        ({"grammar": "g.json"}, '{"type": "string", "pattern": "a+"}', "does not support pattern"),
        ({"grammar": "g.gbnf"}, "root = x", "cannot be read"),
        ({"grammar": "g.gbnf", "agent_cmd": "python a.py"}, 'root ::= "a"', "agent programs"),
        ({"grammar": "g.gbnf", "engine": "toy", "model": "toy"}, 'root ::= "a"', "toy"),
    ],
)
def test_settings_that_mean_nothing(
    given: dict[str, Any], text: str | None, says: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(given["grammar"]).write_text(text)
    with pytest.raises((UsageError, DataError), match=re.escape(says)):
        opened(model, **given)


# -- episodes


def played(engine: LlamaCppEngine, spec: str, grammar: str) -> list[rollout.Trajectory]:
    task = load_task(spec)
    assert task.episodes is not None
    source = task.episodes()
    try:
        made = rollout.Settings(task.max_tokens, lambda row, context: (), 1.0, episodes=source, grammar=grammar)
        return rollout.play(engine, rollout.every([CENTRE], task.train[:6]), made)
    finally:
        source.close()


def test_every_reply_is_one_of_the_actions_of_its_turn(engine: LlamaCppEngine, game: Path) -> None:
    for t in played(engine, f"env:{game}:Doors", "actions"):
        said = [m["content"] for m in t.messages if m["role"] == "assistant"]
        assert said[0] in ("open left", "open right") and said[1] in ("wait", "run")
        assert t.parts["invalid"] == 0.0 and t.outcome == "finished"
    assert all(t.parts["invalid"] == 1.0 for t in played(engine, f"env:{game}:Doors", ""))


def test_every_reply_is_a_call(engine: LlamaCppEngine, game: Path) -> None:
    for t in played(engine, f"env:{game}:Lamp", "tools"):
        assert t.turns == 1 or t.parts["invalid"] > 0, "a call that the token limit cut"
    assert sum(t.reward or 0.0 for t in played(engine, f"env:{game}:Lamp", "")) == 0.0


def test_an_environment_without_what_the_grammar_is_made_of(engine: LlamaCppEngine, game: Path) -> None:
    for name, wanted in (("Doors", "tools"), ("Lamp", "actions")):
        with pytest.raises(UsageError, match=f"the environment has no {wanted}"):
            played(engine, f"env:{game}:{name}", wanted)


def test_tune_with_a_grammar(model: Path, game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members choose among the actions: the only thing that is left to learn, and what the journal keeps."""
    monkeypatch.setattr(report, "plot", lambda run, rows: None)
    run = tmp_path / "run"
    given = {
        "model": str(model), "task": f"env:{game}:Doors?train=8&heldout=4", "grammar": "actions", "run": str(run),
        "pairs": 4, "rows": 2, "groups": 1, "generations": 2, "sigma": 0.5, "eval_every": 1,
    }  # fmt: skip
    tune.tune(config.load(None, given))
    assert History.open(run / "history.jsonl").header["config"]["grammar"] == "actions"
    traces = sorted((run / "traces").glob("*.jsonl"))
    lines = [json.loads(line) for file in traces for line in file.read_text().splitlines()]
    assert lines and all(line["parts"]["invalid"] == 0.0 for line in lines)


def test_the_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "--help"])
    assert "--grammar" in capsys.readouterr().out
