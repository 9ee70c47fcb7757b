"""Scorers: what they may return, what they may not, and what becomes of the run. Case numbers: the issue tracker's."""

from __future__ import annotations

import math
import os
import random
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgees import rewards
from edgees.children import Child, ChildDied, describe_status
from edgees.errors import DataError, ScorerError, TemplateError, UsageError
from edgees.tasks.rows import Row
from edgees.template import ChatTemplate

ROWS = [Row.plain(f"r{i}", f"question {i}", f"answer {i}", level=i) for i in range(4)]
TALKS = [Row(f"m{i}", ({"role": "user", "content": f"u{i}"},), {"answer": "a"}, "a") for i in range(2)]


def file_of(tmp_path: Path, source: str, name: str = "score.py") -> str:
    path = tmp_path / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)


def scored(tmp_path: Path, source: str, rows: Sequence[Row] = ROWS, **options: Any) -> rewards.Scores:
    with rewards.load([file_of(tmp_path, source)], **options) as scorer:
        return scorer.score(rows, [f"text {i}" for i in range(len(rows))])


# -- a scorer that behaves --------------------------------------------------------------------------------------------


def test_a_scorer_gets_what_trl_gives(tmp_path: Path) -> None:
    source = """
    def reward(prompts, completions, answer, level, **columns):
        assert prompts == ["question 0", "question 1", "question 2", "question 3"], prompts
        assert completions == ["text 0", "text 1", "text 2", "text 3"]
        assert answer == ["answer 0", "answer 1", "answer 2", "answer 3"]
        assert columns == {}, columns
        return [level[i] / 2 for i in range(4)]
    """
    assert scored(tmp_path, source).rewards == [0.0, 0.5, 1.0, 1.5]


def test_rows_with_messages_give_messages(tmp_path: Path) -> None:
    source = """
    def reward(prompts, completions, answer):
        assert prompts == [[{"role": "user", "content": "u0"}], [{"role": "user", "content": "u1"}]], prompts
        assert completions[1] == [{"role": "assistant", "content": "text 1"}]
        return [1, 2]
    """
    assert scored(tmp_path, source, TALKS).rewards == [1.0, 2.0]


def test_a_column_that_only_some_rows_have_is_none_for_the_others(tmp_path: Path) -> None:
    rows = [Row.plain("a", "p", extra=1), Row.plain("b", "p")]
    assert scored(tmp_path, "def reward(extra): return [float(extra == [1, None])] * 2", rows).rewards == [1.0, 1.0]


@pytest.mark.parametrize(
    "result",
    ["[1, 2.0, 3, 4]", "(1, 2, 3, 4)", "np.arange(1, 5)", "np.arange(1, 5, dtype='f4')",
     "[np.float32(i) for i in (1, 2, 3, 4)]",     "[np.array(i) for i in (1, 2, 3, 4)]"],
)  # fmt: skip
def test_lists_tuples_and_arrays_of_numbers_are_rewards(tmp_path: Path, result: str) -> None:
    assert scored(tmp_path, f"import numpy as np\ndef reward(**_): return {result}").rewards == [1.0, 2.0, 3.0, 4.0]


def test_an_async_scorer_is_awaited(tmp_path: Path) -> None:
    source = """
    import asyncio
    async def reward(completions):
        await asyncio.gather(*(asyncio.sleep(0.01) for _ in completions))
        return [1.0] * len(completions)
    """
    assert scored(tmp_path, source).rewards == [1.0] * 4


def test_several_scorers_are_added_up_by_weight(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        """
        def reward(completions): return [1.0] * len(completions)
        def style(completions): return [float(c[-1]) for c in completions]
        """,
    )
    with rewards.load([path, f"{path}:style*0.5", f"{path}:style*-1e-1", "exact*2"]) as scorer:
        scores = scorer.score(ROWS, ["text 0", "text 1", "answer 2", "text 3"])
        assert scorer.names == ["score.py:reward", "score.py:style", "score.py:style#2", "exact"]
    assert scores.rewards == pytest.approx([1.0, 1.4, 1.8 + 2.0, 2.2])
    assert scores.parts["score.py:style"] == [0.0, 1.0, 2.0, 3.0] and scores.parts["exact"] == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def other(): ...\ndef reward(**_): return [1] * 4", "reward"),
        ("def other(): ...\ndef score(**_): return [1] * 4", "score"),
        ("from os.path import join\ndef mine(**_): return [1] * 4\ndef _helper(): ...", "mine"),
    ],
)
def test_without_a_name_the_obvious_function_is_taken(tmp_path: Path, source: str, name: str) -> None:
    with rewards.load([file_of(tmp_path, source)]) as scorer:
        assert scorer.score(ROWS, ["x"] * 4).rewards == [1.0] * 4
        assert scorer.names == [f"score.py:{name}"]


def test_a_scorer_may_import_its_neighbours_whatever_they_are_called(tmp_path: Path) -> None:
    for name in ("calling", "protocol", "helper"):
        file_of(tmp_path, f"VALUE = '{name}'", f"{name}.py")
    source = """
    import helper, importlib.util, os
    def reward(completions):
        assert helper.VALUE == "helper"
        assert os.path.dirname(importlib.util.find_spec("helper").origin) == os.path.dirname(__file__)
        return [1.0] * len(completions)
    """
    assert scored(tmp_path, source).rewards == [1.0] * 4


def test_case_14_a_scorer_in_a_folder_with_spaces_and_other_letters(tmp_path: Path) -> None:
    folder = tmp_path / "meine Bewertung ü 数"
    folder.mkdir()
    assert scored(folder, "def reward(completions): return [1] * len(completions)").rewards == [1.0] * 4


def test_a_relative_path_is_relative_to_the_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_of(tmp_path, "def reward(completions): return [2] * len(completions)")
    with rewards.load(["score.py"], folder=tmp_path) as scorer:
        assert scorer.score(ROWS[:1], ["x"]).rewards == [2.0]
    monkeypatch.chdir(tmp_path)
    with rewards.load(["score.py:reward"]) as scorer:
        assert scorer.score(ROWS[:1], ["x"]).rewards == [2.0]


def test_a_function_from_python_code_runs_here_and_cannot_disturb_random() -> None:
    def noisy(completions: list[str]) -> list[float]:
        random.seed(1)
        np.random.seed(1)
        return [1.0] * len(completions)

    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    scorer = rewards.load([noisy])
    assert scorer.score(ROWS, ["x"] * 4).rewards == [1.0] * 4 and scorer.names == ["noisy"]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # type: ignore[union-attr]

    def leaves(completions: list[str]) -> list[float]:
        sys.exit(3)

    with pytest.raises(ScorerError, match="leaves raised SystemExit: 3"):
        rewards.load([leaves]).score(ROWS, ["x"] * 4)


def test_no_rows_no_rewards(tmp_path: Path) -> None:
    assert scored(tmp_path, "def reward(**_): raise ValueError", []).rewards == []
    with pytest.raises(ValueError, match="4 rows and 1 completions"):
        rewards.load(["exact"]).score(ROWS, ["x"])


def test_case_19_cut_characters_and_lone_surrogates_reach_the_scorer(tmp_path: Path) -> None:
    texts = ["caf\ufffd", "\ud83d", "\x00\u2028", "数"]
    source = r"def reward(completions): return [float(len(c)) for c in completions]"
    with rewards.load([file_of(tmp_path, source)]) as scorer:
        assert scorer.score(ROWS, texts).rewards == [4.0, 1.0, 2.0, 1.0]


# -- no reward: named, excluded, never 0 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("None", "None"), ("float('nan')", "NaN"), ("float('inf')", "inf"), ("-float('inf')", "-inf"),
        ("10**400", "an integer"),
        ("'0.5'", "str '0.5'"), ("True", "bool True: return a float"), ("[0.5]", "list [0.5]"), ("1j", "complex 1j"),
        ("{}", "dict {}"),
    ],
)  # fmt: skip
def test_case_25_what_is_no_reward_is_named_and_excluded(tmp_path: Path, value: str, reason: str) -> None:
    scores = scored(tmp_path, f"def reward(**_): return [1.0, 2.0, {value}, 3.0]")
    assert scores.rewards[:2] == [1.0, 2.0] and scores.rewards[3] == 3.0
    assert math.isnan(scores.rewards[2]) and math.isnan(scores.parts["score.py:reward"][2])
    (fault,) = scores.faults
    assert (fault.index, fault.row, fault.function) == (2, "r2", "score.py:reward")
    assert fault.reason.startswith(reason)
    assert str(fault).startswith("score.py:reward on row r2 (item 2): ")


def test_numpy_truth_and_nan_are_no_rewards(tmp_path: Path) -> None:
    source = "import numpy as np\ndef reward(**_): return [np.bool_(True), np.float32('nan'), np.zeros(2), np.int64(3)]"
    scores = scored(tmp_path, source)
    assert [fault.index for fault in scores.faults] == [0, 1, 2] and scores.rewards[3] == 3.0


def test_one_scorer_without_a_reward_excludes_the_answer_whatever_the_others_say(tmp_path: Path) -> None:
    path = file_of(tmp_path, "def reward(**_): return [1, None, 1, 1]")
    with rewards.load([path, "exact"]) as scorer:
        scores = scorer.score(ROWS, ["answer 0", "answer 1", "x", "y"])
    assert [math.isnan(v) for v in scores.rewards] == [False, True, False, False]
    assert scores.parts["exact"] == [1.0, 1.0, 0.0, 0.0]


def test_a_sum_that_overflows_is_excluded() -> None:
    def huge(completions: list[str]) -> list[float]:
        return [1.7e308] * len(completions)

    scores = rewards.load([huge, huge]).score(ROWS[:1], ["x"])
    assert math.isnan(scores.rewards[0]) and "overflows" in scores.faults[0].reason


# -- a scorer that misbehaves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(**_): return [1.0] * 3", "score.py:reward returned 3 rewards for 4 completions"),
        ("def reward(**_): return []", "score.py:reward returned 0 rewards for 4 completions"),
        ("def reward(**_): return 0.5", "score.py:reward returned float 0.5 instead of a list of 4 numbers"),
        ("def reward(**_): return None", "returned NoneType None instead of a list"),
        ("def reward(**_): return 'abcd'", "returned str 'abcd' instead of a list"),
        ("def reward(**_): return {1: 2}", "returned dict {1: 2} instead of a list"),
        ("def reward(completions):\n  for c in completions: yield 1.0", "returned a generator instead of a list"),
    ],
)
def test_case_26_a_wrong_number_of_rewards_is_an_error_with_function_expected_and_got(
    tmp_path: Path, source: str, message: str
) -> None:
    with pytest.raises(ScorerError, match=re.escape(message)) as caught:
        scored(tmp_path, source)
    assert caught.value.exit_code == 4 and caught.value.hint


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(**_):\n    return [1 / 0]", "score.py:reward raised at score.py:2 in reward (scoring): ZeroDiv"),
        ("import sys\ndef reward(**_):\n    sys.exit(7)", "raised at score.py:3 in reward (scoring): SystemExit: 7"),
        ("def reward(**_):\n    raise KeyboardInterrupt", "raised at score.py:2 in reward (scoring): Keyboard"),
        ("def reward(**_): return f()\ndef f(): raise OSError('x' * 5000)", "raised at score.py:2 in f (scoring): OS"),
        ("async def reward(**_): raise OSError('gone')", "raised at score.py:1 in reward (scoring): OSError: gone"),
        ("1 / 0", "raised at score.py:1 in <module> (loading it): ZeroDivisionError: division by zero"),
        ("def reward(:", "score.py raised at score.py:1 (loading it): SyntaxError"),
        ("import no_such_module", "raised at score.py:1 in <module> (loading it): ModuleNotFoundError"),
        ("import sys; sys.exit()", "raised at score.py:1 in <module> (loading it): SystemExit"),
        ("import os\ndef reward(**_): os._exit(5)", "while scoring: its process ended with exit status 5"),
        ("import os, signal\ndef reward(**_): os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("import os\nos._exit(5)", "ended its process while loading it"),
    ],
)  # fmt: skip
def test_a_scorer_that_raises_or_exits_is_named_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ScorerError, match=re.escape(message)) as caught:
        scored(tmp_path, source)
    assert len(caught.value.message) < 1500


@pytest.mark.parametrize(
    "body", ["while True: pass", "time.sleep(1000)", "re.fullmatch('(a+)+b', 'a' * 60)", "input() or time.sleep(1000)"]
)
def test_case_28_a_scorer_that_never_returns_is_stopped_at_its_deadline(tmp_path: Path, body: str) -> None:
    source = (
        f"import re, time\ndef reward(**_):\n    try:\n        {body}\n    except EOFError:\n        time.sleep(1000)\n"
    )
    start = time.monotonic()
    with pytest.raises(ScorerError, match=r"score\.py:reward did not return within 0\.5 s \(scoring\)") as caught:
        scored(tmp_path, source, deadline=0.5)
    assert time.monotonic() - start < 30
    assert "it was at score.py:" in caught.value.message


def test_after_a_timeout_the_scorer_can_be_called_again(tmp_path: Path) -> None:
    source = "import time\ndef reward(completions):\n    if completions[0] == 'slow': time.sleep(99)\n    return [1.0]"
    with rewards.load([file_of(tmp_path, source)], deadline=0.5) as scorer:
        assert scorer.score(ROWS[:1], ["x"]).rewards == [1.0]
        with pytest.raises(ScorerError, match="did not return"):
            scorer.score(ROWS[:1], ["slow"])
        assert scorer.score(ROWS[:1], ["x"]).rewards == [1.0]


def test_what_a_scorer_prints_disturbs_nothing_and_goes_to_the_log(tmp_path: Path) -> None:
    source = """
    import os, sys
    print("loading", flush=True)
    def reward(completions):
        print('{"values": []}'); print("to stderr", file=sys.stderr)
        os.write(1, b'{"values": [[true, 9]]}\\n'); os.system("echo from a shell")
        sys.stdout.close()
        return [1.0] * len(completions)
    """
    log = tmp_path / "scorer.log"
    with rewards.load([file_of(tmp_path, source)], log=log) as scorer:
        assert scorer.score(ROWS, ["x"] * 4).rewards == [1.0] * 4
    text = log.read_text()
    assert all(part in text for part in ("loading", '{"values": []}', "to stderr", "from a shell"))


def test_what_a_scorer_prints_by_default_is_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scored(tmp_path, "def reward(completions):\n    print('hello')\n    return [1.0] * len(completions)")
    out, err = capfd.readouterr()
    assert out == "" and "hello" in err


def test_the_process_of_a_scorer_ends_with_the_scorer(tmp_path: Path) -> None:
    source = "import os\ndef reward(completions): return [float(os.getpid())] * len(completions)"
    with rewards.load([file_of(tmp_path, source)]) as scorer:
        pid = int(scorer.score(ROWS, ["x"] * 4).rewards[0])
        assert pid != os.getpid()
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_order_of_sets_does_not_vary_from_process_to_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    source = "def reward(completions): return [float(hash('edgees') % 10**9)] * len(completions)"
    assert scored(tmp_path, source).rewards == scored(tmp_path, source).rewards


# -- specs ------------------------------------------------------------------------------------------------------------


def test_wrong_paths_and_names_are_refused_before_anything_starts(tmp_path: Path) -> None:
    path = file_of(tmp_path, "def a(**_): ...\ndef b(**_): ...\nc = 3")
    for spec, message in (
        ("nowhere.py", "scorer file not found: .*nowhere.py"),
        ("nowhere.py:f", "scorer file not found: .*nowhere.py"),
        ("exakt", "unknown scorer 'exakt'"),
        ("loglik", "loglik is no scorer"),
        ("regex:", "needs a pattern"),
        ("regex:(", "does not compile"),
        ("exact*1e999", "is not finite"),
    ):
        with pytest.raises(UsageError, match=message):
            rewards.load([spec])
    with pytest.raises(UsageError, match="no scorer was given"):
        rewards.load([])
    for deadline in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="deadline must be a positive number"):
            rewards.load(["exact"], deadline=deadline)
    for spec, message in (
        (f"{path}:wrong", r"score\.py has no function 'wrong'; it has: a, b"),
        (f"{path}:c", r"score\.py has no function 'c'; it has: a, b"),
        (path, r"score\.py has no function that is obviously meant; it has: a, b"),
    ):
        with rewards.load([spec]) as scorer, pytest.raises(ScorerError, match=message) as caught:
            scorer.dry_run(ROWS)
        assert caught.value.hint == "Name one: --reward score.py:a"
    with rewards.load([file_of(tmp_path, "x = 1", "empty.py")]) as scorer, pytest.raises(ScorerError, match="none"):
        scorer.dry_run(ROWS)


def test_a_column_that_the_data_lacks_is_named(tmp_path: Path) -> None:
    source = "def reward(completions, solution, answer=None): return [1.0] * len(completions)"
    with pytest.raises(
        ScorerError, match="asks for solution, which the data does not have; it has: answer, completions, l"
    ):
        scored(tmp_path, source)


def test_columns_that_are_no_json_are_refused(tmp_path: Path) -> None:
    row = Row.plain("a", "p", thing=object())
    with pytest.raises(ScorerError, match="the columns cannot be passed"):
        scored(tmp_path, "def reward(thing): return [1.0]", [row])


# -- dry run ----------------------------------------------------------------------------------------------------------


def test_the_dry_run_scores_two_rows_with_their_own_answers(tmp_path: Path) -> None:
    source = """
    def reward(completions, answer):
        assert completions == answer == ["answer 0", "answer 1"], completions
        return [1.0, None]
    """
    with rewards.load([file_of(tmp_path, source), "exact"]) as scorer:
        scores = scorer.dry_run(ROWS)
    assert scores.rewards[0] == 2.0 and math.isnan(scores.rewards[1]), "None is allowed: 'does not apply'"
    without = [Row.plain("a", "p")]
    with rewards.load(
        [file_of(tmp_path, "def reward(completions): return [float(len(c)) for c in completions]")]
    ) as scorer:
        assert scorer.dry_run(without).rewards == [float(len(rewards.PLACEHOLDER))]


@pytest.mark.parametrize(("value", "reason"), [("float('nan')", "NaN"), ("'1'", "str '1'"), ("True", "bool True")])
def test_the_dry_run_refuses_what_would_fail_in_every_generation(tmp_path: Path, value: str, reason: str) -> None:
    with (
        rewards.load([file_of(tmp_path, f"def reward(**_): return [1.0, {value}]")]) as scorer,
        pytest.raises(ScorerError, match=rf"dry run: the scorer score\.py:reward on row r1 \(item 1\): {reason}"),
    ):
        scorer.dry_run(ROWS)


def test_the_dry_run_of_built_in_scorers_looks_at_every_row() -> None:
    rows = [*ROWS, Row.plain("bare", "p"), Row.plain("x", "p")]
    with pytest.raises(
        ScorerError, match="exact cannot judge 2 of 6 rows; the first is row bare: the row has no answer"
    ):
        rewards.load(["exact"]).dry_run(rows)
    with pytest.raises(ScorerError, match="json_fields cannot judge 4 of 4 rows"):
        rewards.load(["json_fields"]).dry_run(ROWS)
    with pytest.raises(ScorerError, match=r"numeric cannot judge 1 of 1 rows; .* holds no number"):
        rewards.load(["numeric"]).dry_run([Row.plain("a", "p", "seven")])
    with pytest.raises(DataError, match="no row"):
        rewards.load(["exact"]).dry_run([])


# -- built-in scorers -------------------------------------------------------------------------------------------------


def credit(spec: str, answer: Any, *texts: str) -> list[float]:
    row = Row("r", ({"role": "user", "content": "q"},), {"answer": answer}, None)
    with rewards.load([spec]) as scorer:
        return [pytest.approx(v) if v else v for v in scorer.score([row] * len(texts), texts).rewards]


def test_exact() -> None:
    assert credit("exact", "Paris", "Paris", " Paris\n", "paris", '"Paris".', "Paris, France", "", "Rome") == [
        1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0,
    ]  # fmt: skip
    assert credit("exact", "New  York", "New York", "new\nyork!") == [1.0, 0.5]
    assert credit("exact", 7, "7", "8") == [1.0, 0.0]
    assert credit("exact", "...", "...", "!!!", "") == [1.0, 0.0, 0.0], "punctuation alone is not all the same"


def test_numeric() -> None:
    texts = ("12", "12.0", "1.2e1", "so it is 12", "13", "it is 13", "none", "")
    assert credit("numeric", "12", *texts) == [1.0, 1.0, 1.0, 0.5, 0.1, 0.05, 0.0, 0.0]
    assert credit("numeric", "the answer: 1,000", "1000") == [1.0]
    assert credit("numeric", 0.1, "0.1", "0.10") == [1.0, 1.0]
    assert credit("numeric", 10**20 + 1, str(10**20 + 1), str(10**20)) == [1.0, 0.1], "exact, not in floating point"


def test_json_fields() -> None:
    wanted = {"a": 1, "b": "x"}
    texts = (
        '{"b":"x","a":1.0}', '```json\n{"a":1,"b":"x"}\n```', 'Here: {"a":1,"b":"x"}', '{"a":1,"b":"y"}', '{"a":1}',
        '{"a":"1","b":"x"}', '{"a":1,"b":"x","c":0,"d":0}', "{}", "no", '{"a":1,"a":1,"b":"x"}', '{"a":true,"b":"x"}',
    )  # fmt: skip
    expected = [1.0, 1.0, 0.8, 0.425, 0.425, 0.425, 0.425, 0.05, 0.0, 0.0, 0.425]
    assert credit("json_fields", wanted, *texts) == expected
    assert credit("json_fields", '{"a":1,"b":"x"}', *texts) == expected, "a text that holds the object is the same"


def test_regex() -> None:
    assert credit("regex:\\d+", None, "12", " 12 ", "a 12", "a", "") == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert credit("regex:answer is (\\d+)", "12", "the answer is 12.", "answer is 13", "12") == [1.0, 0.1, 0.0]
    assert credit("regex:answer is (\\d+)", 12, "answer is 12") == [1.0]
    assert credit("regex:a.b", None, "a\nb") == [1.0]
    assert credit("regex:a*2*1", None, "aa2") == [1.0], "a pattern that ends like a weight takes *1"


def test_regex_reads_answers_to_messages_as_text() -> None:
    with rewards.load(["regex:(a)"]) as scorer:
        assert scorer.dry_run(TALKS).rewards == [1.0, 1.0]


def test_case_28_a_pattern_that_takes_for_ever_is_stopped() -> None:
    with (
        rewards.load(["regex:(a+)+b"], deadline=0.5) as scorer,
        pytest.raises(ScorerError, match="did not return within"),
    ):
        scorer.score(ROWS[:1], ["a" * 60])


def test_case_18_an_empty_answer_is_paid_nothing_and_is_no_fault() -> None:
    row = Row.plain("r", "q", "7")
    for spec in ("exact", "numeric", "regex:7"):
        with rewards.load([spec]) as scorer:
            scores = scorer.score([row], [""])
        assert scores.rewards == [0.0] and scores.faults == []


# -- children ---------------------------------------------------------------------------------------------------------


def test_case_37_a_chat_template_cannot_reach_out_or_take_for_ever() -> None:
    attacks = {
        "{{ ''.__class__.__mro__[1].__subclasses__() }}": "refused|unsafe",
        "{{ messages.__init__.__globals__ }}": "refused|unsafe",
        "{{ raise_exception.__globals__ }}": "refused|unsafe",
        "{{ 'x' * 10**9 }}": "memory|large|limit",
        "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3: "",
    }  # fmt: skip
    for source, words in attacks.items():
        with ChatTemplate(source, deadline=1.0) as template:
            start = time.monotonic()
            with pytest.raises(TemplateError, match=re.compile(words, re.IGNORECASE)):
                template.render([{"role": "user", "content": "hi"}])
            assert time.monotonic() - start < 30
    with ChatTemplate(None) as template:
        assert (
            template.render([{"role": "user", "content": "hi"}])
            == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_child_says_how_it_died_and_starts_again(tmp_path: Path) -> None:
    child = Child("score.py", {"file": file_of(tmp_path, "import os\ndef die(): os.abort()\ndef live(): return [1]")})
    assert child.pid is None
    with pytest.raises(ChildDied, match="SIGABRT"):
        child.call({"op": "score", "name": "die", "arguments": {}}, 20.0)
    assert child.call({"op": "score", "name": "live", "arguments": {}}, 20.0) == {"values": [[True, 1.0]]}
    assert child.pid is not None
    child.close()
    assert child.pid is None
    assert describe_status(None) and describe_status(3) and "999" in describe_status(-999)


def test_large_batches_pass(tmp_path: Path) -> None:
    child = Child(
        "score.py", {"file": file_of(tmp_path, "def f(completions): return [float(len(c)) for c in completions]")}
    )
    texts = ["x" * 50_000] * 200  # 10 MB, far more than a pipe holds
    answer = child.call({"op": "score", "name": "f", "arguments": {"completions": texts}}, 60.0)
    assert answer["values"] == [[True, 50_000.0]] * 200
    child.close()
