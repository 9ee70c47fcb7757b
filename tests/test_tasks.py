"""Tasks: the user's own rows, splits, the demo and the other named tasks. Case numbers: the issue tracker's."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edgees import rewards
from edgees.config import Config
from edgees.errors import DataError, EdgeesError, MissingExtra, ScorerError, UsageError
from edgees.tasks import home, load_task, sums
from edgees.tasks.jsonl import read_rows
from edgees.tasks.reading import json_object, number, same
from edgees.tasks.rows import Row, Task, split_rows, without_overlap


def write(path: Path, *rows: Any, end: str = "\n") -> Path:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode("utf-8"))
    return path


def file_of(tmp_path: Path, data: bytes, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(count)]


# -- jsonl: what is accepted ------------------------------------------------------------------------------------------


def test_case_31_bom_crlf_and_empty_lines_are_accepted(tmp_path: Path) -> None:
    path = file_of(tmp_path, b'\xef\xbb\xbf\r\n{"prompt":"a","answer":"1"}\r\n\r\n  \t\r\n{"prompt":"b"}')
    first, second = read_rows(path)
    assert (first.id, first.prompt, first.answer, first.columns) == ("rows.jsonl:2", "a", "1", {"answer": "1"})
    assert (second.id, second.prompt, second.answer, second.columns) == ("rows.jsonl:5", "b", None, {})
    assert first.messages == ({"role": "user", "content": "a"},)
    bom = file_of(tmp_path, b'\xef\xbb\xbf{"prompt":"a"}\n', "bom.jsonl")
    assert read_rows(bom)[0].prompt == "a"


def test_further_columns_reach_the_row_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"prompt": "p", "level": 3, "tags": ["a"], "nested": {"k": None}})
    assert read_rows(path)[0].columns == {"level": 3, "tags": ["a"], "nested": {"k": None}}


def test_an_answer_that_is_no_text_becomes_json_for_loglik_and_stays_a_value_for_scorers(tmp_path: Path) -> None:
    row = read_rows(write(tmp_path / "r.jsonl", {"prompt": "p", "answer": {"tool": "fan", "on": True}}))[0]
    assert row.answer == '{"tool":"fan","on":true}'
    assert row.columns["answer"] == {"tool": "fan", "on": True}


def test_a_closing_message_of_the_assistant_is_the_answer(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    last = {"role": "assistant", "content": "It is 7."}
    first, second, third = read_rows(
        write(
            tmp_path / "r.jsonl",
            {"messages": [*talk, last]}, {"messages": [*talk, last], "answer": 7}, {"prompt": talk, "answer": "x"},
        )
    )  # fmt: skip
    assert [dict(m) for m in first.messages] == talk and first.prompt is None
    assert (first.answer, first.columns["answer"]) == ("It is 7.", "It is 7.")
    assert (second.answer, second.columns["answer"]) == ("It is 7.", 7), "loglik sees the text, scorers the value"
    assert rewards.numeric(second, "7") == 1.0
    assert [dict(m) for m in third.messages] == talk and third.answer == "x"


def test_ids_of_the_file_name_the_rows(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "r.jsonl", {"id": "a", "prompt": "x"}, {"id": 7, "prompt": "y"}, {"prompt": "z"}))
    assert [row.id for row in rows] == ["a", "7", "r.jsonl:3"]
    assert rows[1].columns == {"id": 7}


def test_case_14_paths_with_spaces_and_other_letters(tmp_path: Path) -> None:
    folder = tmp_path / "meine Daten é 数据"
    folder.mkdir()
    write(folder / "zwei Zeilen ü.jsonl", {"prompt": "Grüße, 世界 🎉", "answer": "ß"}, {"prompt": "b", "answer": "c"})
    task = load_task(f"jsonl:{folder / 'zwei Zeilen ü.jsonl'}", split=0.0)
    assert task.train[0].id == "zwei Zeilen ü.jsonl:1" and task.train[0].prompt == "Grüße, 世界 🎉"


# -- jsonl: what is refused, each by file and line --------------------------------------------------------------------

REFUSED = {
    "broken": (b'{"prompt":"a"}\n{"prompt":', "rows.jsonl:2: not JSON"),
    "list": (b'[\n{"prompt":"a"}\n]', "rows.jsonl:1: not JSON"),
    "no object": (b'{"prompt":"a"}\n\n[1]', "rows.jsonl:3: a row must be an object, not a list"),
    "case 31: key twice": (b'{"prompt":"a","prompt":"b"}', "rows.jsonl:1: the key 'prompt' stands twice"),
    "case 31: inner key twice": (b'{"prompt":"a","x":{"k":1,"k":2}}', "rows.jsonl:1: the key 'k' stands twice"),
    "case 31: NaN": (b'{"prompt":"a"}\n{"prompt":"b","x":NaN}', "rows.jsonl:2: the literal NaN is not JSON"),
    "infinity": (b'{"prompt":"a","x":-Infinity}', "rows.jsonl:1: the literal -Infinity is not JSON"),
    "too large": (b'{"prompt":"a","x":1e999}', "rows.jsonl:1: the number 1e999 is too large"),
    "huge integer": (b'{"prompt":"a","x":' + b"1" * 5000 + b"}", "rows.jsonl:1: not usable JSON"),
    "nested": (b'{"prompt":"a","x":' + b"[" * 100_000, "rows.jsonl:1: n"),
    "surrogate": (b'{"prompt":"\\ud800"}', "rows.jsonl:1: an unpaired surrogate"),
    "not UTF-8": (b'{"prompt":"a"}\n{"prompt":"\xe9"}', "rows.jsonl:2: byte 12 of the line (0xe9) is not UTF-8"),
    "UTF-16": ('{"prompt":"a"}'.encode("utf-16"), "rows.jsonl:1: this is UTF-16"),
    "case 31: no prompt": (b'{"question":"a"}', "rows.jsonl:1: neither 'prompt' nor 'messages' is there; the row has"),
    "both": (b'{"prompt":"a","messages":[]}', "rows.jsonl:1: both 'prompt' and 'messages'"),
    "empty prompt": (b'{"prompt":" "}', "rows.jsonl:1: 'prompt' is empty"),
    "null prompt": (b'{"prompt":null}', "rows.jsonl:1: 'prompt' must be a text or a list of messages, not null"),
    "no messages": (b'{"messages":[]}', "rows.jsonl:1: 'messages' is an empty list"),
    "messages text": (b'{"messages":"hi"}', "rows.jsonl:1: 'messages' must be a list of messages, not a text"),
    "role": (b'{"messages":[{"role":"human","content":"a"}]}', "rows.jsonl:1: message 1 of 'messages' has the role"),
    "no content": (b'{"messages":[{"role":"user"}]}', "rows.jsonl:1: message 1 of 'messages' has no 'content'"),
    "parts": (b'{"messages":[{"role":"user","content":[1]}]}', "rows.jsonl:1: 'content' of message 1 of 'messages'"),
    "only an answer": (b'{"messages":[{"role":"assistant","content":"a"}]}', "rows.jsonl:1: 'messages' must end with"),
    "ends with system": (b'{"prompt":[{"role":"system","content":"a"}]}', "rows.jsonl:1: 'prompt' must end with"),
    "reserved": (b'{"prompt":"a","completions":1}', "rows.jsonl:1: the column name 'completions' is reserved"),
    "id twice": (
        b'{"prompt":"a","id":1}\n\n{"prompt":"b","id":"1"}', "rows.jsonl:3: the id '1' stands already in line 1",
    ),
    "id of a kind": (b'{"prompt":"a","id":1.5}', "rows.jsonl:1: 'id' must be a text or a whole number"),
    "empty": (b"", "rows.jsonl holds no rows"),
    "blank": (b"\xef\xbb\xbf\r\n  \n", "rows.jsonl holds no rows"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=list(REFUSED))
def test_bad_rows_are_refused_with_file_and_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_rows(file_of(tmp_path, data))
    assert caught.value.hint and caught.value.exit_code == 2


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file: .*nothing\.jsonl"):
        read_rows(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path)


# -- load_task: names, splits, held-out files -------------------------------------------------------------------------


def test_unknown_tasks_are_refused_with_what_is_known(tmp_path: Path) -> None:
    for spec in ("hom", "", "jsonl:", "csv:x", "home:x"):
        with pytest.raises(UsageError, match="unknown task") as caught:
            load_task(spec)
        assert "reasoning_gym:NAME" in (caught.value.hint or "")
    path = write(tmp_path / "r.jsonl", *numbered(2))
    with pytest.raises(UsageError) as caught:
        load_task(str(path))
    assert caught.value.hint == f"For the rows of a file write jsonl:{path}"


def test_the_split_is_the_same_every_time_in_any_order_and_disjoint(tmp_path: Path) -> None:
    rows = numbered(50)
    write(tmp_path / "a.jsonl", *rows)
    write(tmp_path / "b.jsonl", *rows[::-1])
    a, again, b = (load_task(f"jsonl:{tmp_path / name}.jsonl") for name in "aab")
    assert a == again
    assert len(a.heldout) == 10 and len(a.train) == 40
    assert {r.prompt for r in a.heldout} == {r.prompt for r in b.heldout}
    assert not {r.prompt for r in a.heldout} & {r.prompt for r in a.train}
    assert {r.prompt for r in load_task(f"jsonl:{tmp_path}/a.jsonl", seed=1).heldout} != {r.prompt for r in a.heldout}


def test_the_same_question_never_stands_on_both_sides() -> None:
    rows = [Row.plain(str(i), f"  question {i % 7}" + "\n" * (i % 3), f"answer {i}") for i in range(70)]
    train, heldout = split_rows(rows, 0.3, 0)
    assert len(train) + len(heldout) == 70
    assert not {(r.prompt or "").strip() for r in train} & {(r.prompt or "").strip() for r in heldout}


def test_split_sizes_at_the_edges() -> None:
    rows = [Row.plain(str(i), str(i)) for i in range(3)]
    assert [len(part) for part in split_rows(rows, 0.0, 0)] == [3, 0]
    assert [len(part) for part in split_rows(rows, 0.01, 0)] == [2, 1]
    assert [len(part) for part in split_rows(rows, 0.99, 0)] == [1, 2]
    with pytest.raises(DataError, match=r"1 row\(s\) with 1 distinct question\(s\) cannot be split"):
        split_rows(rows[:1], 0.2, 0)
    with pytest.raises(UsageError, match=r"less than 1, not 1\.5"):
        split_rows(rows, 1.5, 0)


def test_rows_of_an_evaluation_file_are_never_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", *numbered(10))
    held = write(tmp_path / "held.jsonl", {"prompt": "question 3 "}, {"prompt": "new"})
    task = load_task(f"jsonl:{train}", eval_data=held)
    assert [row.prompt for row in task.heldout] == ["question 3 ", "new"]
    assert len(task.train) == 9 and "question 3" not in {row.prompt for row in task.train}
    assert task.warnings == (f"1 training row(s) also stand in {held} and are not trained on: train.jsonl:4",)
    with pytest.raises(DataError, match="every training row also stands in"):
        load_task(f"jsonl:{train}", eval_data=train)
    with pytest.raises(DataError, match=r"held\.jsonl:3: not JSON"):
        held.write_text(held.read_text() + "oops")
        load_task(f"jsonl:{train}", eval_data=held)


def test_an_evaluation_file_may_replace_the_held_out_rows_of_a_built_in_task(tmp_path: Path) -> None:
    own = sums.load()
    held = write(
        tmp_path / "held.jsonl", {"prompt": own.train[0].prompt, "answer": "0"}, {"prompt": "new", "answer": "1"}
    )
    task = load_task("sums", eval_data=held)
    assert len(task.heldout) == 2 and len(task.train) == len(own.train) - 1


def test_limit_takes_the_first_training_rows_and_leaves_the_held_out_ones(tmp_path: Path) -> None:
    spec = f"jsonl:{write(tmp_path / 'r.jsonl', *numbered(20))}"
    all_rows, some = load_task(spec), load_task(spec, limit=5)
    assert some.train == all_rows.train[:5] and some.heldout == all_rows.heldout
    assert load_task(spec, limit=1000).train == all_rows.train
    with pytest.raises(UsageError, match="at least 1, not 0"):
        load_task(spec, limit=0)


def test_the_system_message_is_put_in_front_unless_the_row_has_one() -> None:
    task = Task("t", (), (), system="own")
    plain, with_system = Row.plain("1", "hi"), Row("2", ({"role": "system", "content": "s"},))
    assert task.conversation(plain)[0] == {"role": "system", "content": "own"}
    assert task.conversation(plain, "other")[0]["content"] == "other"
    assert task.conversation(plain, "") == [{"role": "user", "content": "hi"}]
    assert task.conversation(with_system) == [{"role": "system", "content": "s"}]
    task.conversation(with_system)[0]["content"] = "changed"
    assert with_system.messages[0]["content"] == "s", "rows are not to be changed through a conversation"


def test_without_overlap_names_few_of_many() -> None:
    rows = [Row.plain(str(i), str(i)) for i in range(9)]
    kept, warnings = without_overlap(rows, rows[:8], "x")
    assert kept == rows[8:] and warnings[0].endswith("0, 1, 2, 3, 4, ...")
    assert without_overlap(rows, [], "x") == (rows, [])


# -- home -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def the_home() -> Task:
    return load_task("home")


def test_home_is_the_same_for_every_seed_and_touches_no_global_state(the_home: Task) -> None:
    state = random.getstate()
    assert load_task("home", seed=5, split=0.7) == the_home
    assert random.getstate() == state
    assert len(the_home.train) == 1024 and len(the_home.heldout) == 192
    for rows in (the_home.train, the_home.heldout):
        assert len({row.id for row in rows}) == len({row.prompt for row in rows}) == len(rows)


def test_home_rows_do_not_change_between_versions(the_home: Task) -> None:
    """Runs are compared over versions, and a journal names rows by id: these texts are a contract."""
    assert (the_home.train[2].prompt, the_home.train[2].answer) == (
        "pull up the blind in the lounge now",
        '{"device": "blind", "room": "lounge", "state": "open"}',
    )
    text = "\n".join(f"{row.prompt} {row.answer}" for row in (*the_home.train, *the_home.heldout))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "9d00faa4feca40a0"


def skeleton(text: str) -> str:
    """A request with room and degrees taken out: what its template leaves."""
    return re.sub(rf"\b({'|'.join(home.ROOMS)})\b", "R", re.sub(r"\b\d\d\b", "D", text))


def test_home_held_out_rows_share_no_template_and_no_call_with_training_rows(the_home: Task) -> None:
    train, heldout = (({skeleton(r.prompt or "") for r in rows}) for rows in (the_home.train, the_home.heldout))
    assert len(train) < 200 and len(heldout) < 192, "the skeletons have been found, or all would differ"
    assert not train & heldout
    assert not {row.answer for row in the_home.train} & {row.answer for row in the_home.heldout}
    assert not {*home._FRAMES["train"]} & {*home._FRAMES["heldout"]}
    templates = [
        {t for by_state in actions.values() for ts in by_state.values() for t in ts}
        for actions in (home._TRAIN, home._HELDOUT)
    ]
    assert not templates[0] & templates[1]


def test_home_holds_out_two_rooms_of_every_state_and_every_device_alike(the_home: Task) -> None:
    states = sum(len(values) for values in home.STATES.values())
    for state in range(states):
        assert sum(home.is_heldout(state, room) for room in range(len(home.ROOMS))) == 2
    for rows in (the_home.train, the_home.heldout):
        counts = Counter(json.loads(row.answer or "")["device"] for row in rows)
        assert set(counts) == set(home.STATES) and max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(("split", "most"), [("train", 1680), ("heldout", 240)])
def test_home_makes_as_many_rows_as_there_are_and_no_more(split: str, most: int) -> None:
    assert len(home.STATES) * home.MOST[split] == most == len({row.prompt for row in home.generate(most, split)})
    with pytest.raises(ValueError, match=f"{most + 1} rows of {split}: there are {most}"):
        home.generate(most + 1, split)


def test_home_has_words_for_every_state() -> None:
    for actions in (home._TRAIN, home._HELDOUT):
        assert actions.keys() == home.STATES.keys()
        for device, states in home.STATES.items():
            expected = {""} if device == "heat" else set(states)
            assert set(actions[device]) == expected
            for state, templates in actions[device].items():
                assert all("{r}" in t and (("{d}" in t) == (state == "")) for t in templates)
        texts = [t for by_state in actions.values() for ts in by_state.values() for t in ts]
        assert len(texts) == len(set(texts)), "a request must mean one call"


def test_home_answers_are_calls_of_the_schema_and_full_credit_is_theirs_alone(the_home: Task) -> None:
    for row in (*the_home.train, *the_home.heldout):
        assert home.format_metric(row, row.answer or "") == home.exact_metric(row, row.answer or "") == 1.0
        assert rewards.json_fields(row, row.answer or "") == pytest.approx(1.0)
        assert len(row.answer or "") <= 60 and len(row.prompt or "") <= 70
    for row in the_home.train[:50]:
        call = json.loads(row.answer or "")
        for key in home.KEYS:
            assert rewards.json_fields(row, json.dumps({**call, key: "?"})) == pytest.approx(0.05 + 0.75 * 2 / 3)
        assert rewards.json_fields(row, f"Sure: {row.answer}") == pytest.approx(0.8)


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "[]", '{"device":"light"}', '{"device":"oven","room":"hall","state":"on"}',
        '{"device":"heat","room":"hall","state":"on"}', '{"device":"heat","room":"hall","state":"20"}',
        '{"device":["light"],"room":"hall","state":"on"}', '{"device":"light","room":"","state":"on"}',
        '{"device":"light","room":"hall","state":"open"}', '{"device":"light","room":"hall","state":"on","x":1}',
        'ok {"device":"light","room":"hall","state":"on"}', '{"device":"light","room":3,"state":"on"}',
    ],
)  # fmt: skip
def test_home_format_wants_a_call_that_can_be_executed(the_home: Task, text: str) -> None:
    assert home.format_metric(the_home.train[0], text) == home.exact_metric(the_home.train[0], text) == 0.0
    call = '{"device":"light","room":"hall","state":"on"}'
    assert home.format_metric(the_home.train[0], call) == 1.0


def test_case_30_the_best_constant_answer_of_home_scores_low(the_home: Task) -> None:
    """json_fields pays per field, so the modal value of each field bounds every constant answer."""
    rows, calls = the_home.train, [json.loads(row.answer or "") for row in the_home.train]
    for some in (the_home.heldout, the_home.heldout[:64]):
        constant = max(sum(rewards.json_fields(row, other.answer or "") for row in some) for other in some)
        assert constant / len(some) < 0.18
    best = {key: Counter(call[key] for call in calls).most_common(3) for key in home.KEYS}
    exact = Counter(row.answer for row in rows).most_common(1)[0][1] / len(rows)
    bound = 0.05 + 0.75 * sum(best[key][0][1] for key in home.KEYS) / 3 / len(rows) + 0.2 * exact
    found = 0.0
    for values in itertools.product(*([value for value, _ in best[key][:2]] for key in home.KEYS)):
        text = json.dumps(dict(zip(home.KEYS, values, strict=True)))
        found = max(found, sum(rewards.json_fields(row, text) for row in rows) / len(rows))
    assert 0.12 < found <= bound < 0.17
    assert found >= max(
        sum(rewards.json_fields(row, other.answer or "") for row in rows) / len(rows) for other in rows[:20]
    )


def test_home_tells_the_keys_and_the_devices_and_shows_no_call(the_home: Task) -> None:
    talk = the_home.conversation(the_home.heldout[0])
    assert [message["role"] for message in talk] == ["system", "user"] and talk[0]["content"] == home.SYSTEM
    assert len(home.SYSTEM) < 120, "about 54 tokens with a request and the template's"
    shape, clean = json_object(home.SYSTEM)
    assert shape is not None and not clean and tuple(shape) == home.KEYS
    assert all(device in shape["device"] for device in home.STATES) and shape["room"] == shape["state"] == "..."


def test_defaults_of_tasks_are_settings(the_home: Task) -> None:
    for task in (the_home, sums.load()):
        config = Config().with_defaults(task.defaults, task.name)
        assert {name: getattr(config, name) for name in task.defaults} == dict(task.defaults)
        assert all(row.answer for row in (*task.train, *task.heldout)), "loglik needs an answer in every row"


# -- sums -------------------------------------------------------------------------------------------------------------


def test_sums_keeps_operand_pairs_apart_in_either_order() -> None:
    task = load_task("sums", seed=3)
    assert task == sums.load()
    pairs = [
        {tuple(sorted(map(int, re.findall(r"\d", row.prompt or "")))) for row in rows}
        for rows in (task.train, task.heldout)
    ]
    assert not pairs[0] & pairs[1] and len(pairs[0]) == 44 and len(pairs[1]) == 11
    for row in (*task.train, *task.heldout):
        a, b = map(int, re.findall(r"\d", row.prompt or ""))
        assert row.answer == str(a + b)
    assert len({row.id for row in (*task.train, *task.heldout)}) == 300


def test_sums_pays_exactness_far_above_format_and_reports_them_apart() -> None:
    task = sums.load()
    row = next(row for row in task.train if row.answer == "8")
    scorer = rewards.load(task.reward)
    texts = ["8", "7", "3 + 5 = 8", "seven", "It is 9"]
    assert scorer.score([row] * 5, texts).rewards == [1.0, 0.1, 0.5, 0.0, 0.05]
    assert [task.metrics["format"](row, text) for text in texts] == [1, 1, 0, 0, 0]
    assert [task.metrics["exact"](row, text) for text in texts] == [1, 0, 0, 0, 0]


def test_case_30_the_best_constant_answer_of_sums_scores_low() -> None:
    rows = sums.load().train
    best = max(sum(rewards.numeric(row, str(value)) for row in rows) / len(rows) for value in range(19))
    assert 0.1 < best < 0.21


# -- reasoning_gym ----------------------------------------------------------------------------------------------------


def test_reasoning_gym_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match="reasoning-gym") as caught:
        load_task("reasoning_gym:chain_sum")
    assert caught.value.hint == "pip install reasoning-gym" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:", "needs the name of a data set"),
        ("reasoning_gym:chain_sum?size=-1", "size in .* must be a whole number, not -1"),
        ("reasoning_gym:chain_sum?seed=x", "seed in .* must be a whole number, not 'x'"),
        ("reasoning_gym:chain_sum?nonsense", "the parameters of .* cannot be read"),
    ],
)
def test_bad_reasoning_gym_specs(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_task(spec)


def test_reasoning_gym_rows_scores_and_determinism(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    spec = "reasoning_gym:chain_sum?size=20&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    state = random.getstate()
    task = load_task(spec)
    assert random.getstate() == state
    assert load_task(spec) == task
    assert len(task.train) == 16 and len(task.heldout) == 4
    assert {row.id for row in (*task.train, *task.heldout)} == {f"chain_sum/{i}" for i in range(20)}
    with rewards.load(task.reward) as scorer:
        assert scorer.names == ["reasoning_gym:chain_sum"]
        assert scorer.dry_run(task.train).rewards == [1.0, 1.0]
        answers = [row.answer or "" for row in task.train]
        scores = scorer.score(task.train, answers)
        assert scores.rewards == [1.0] * 16 and scores.faults == []
        wrong = scorer.score(task.train, ["", "no idea", *answers[2:]]).rewards
        assert max(wrong[:2]) < 0.5 and wrong[2:] == [1.0] * 14
    with pytest.raises(UsageError, match="no data set 'chain_summ'"):
        load_task("reasoning_gym:chain_summ")
    with pytest.raises(UsageError, match="refuses"):
        load_task("reasoning_gym:chain_sum?no_such_parameter=1")
    with pytest.raises(UsageError, match="cannot come from a file"):
        load_task(spec, eval_data=write(tmp_path / "e.jsonl", {"prompt": "x"}))


def test_reasoning_gym_scores_no_foreign_rows() -> None:
    with rewards.load(["reasoning_gym:chain_sum"]) as scorer, pytest.raises(ScorerError, match="judges only rows of"):
        scorer.dry_run(sums.load().train)


def test_reasoning_gym_entries_with_tuples_survive_the_way_to_the_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task("reasoning_gym:word_ladder?size=4")
    with rewards.load(task.reward) as scorer:
        assert scorer.score(task.train, [row.answer or "" for row in task.train]).rewards == [1.0] * len(task.train)


# -- reading answers: never an exception ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "clean"),
    [
        ('{"a":1}', {"a": 1}, True), (' \n{"a": 1}\n', {"a": 1}, True), ('```json\n{"a":1}\n```', {"a": 1}, True),
        ('```\n{"a":1}```', {"a": 1}, True), ('Sure! {"a":1}', {"a": 1}, False), ('{"a":1} {"b":2}', {"a": 1}, False),
        ('{oops} {"a":1}', {"a": 1}, False), ("{}", {}, True), ('[{"a":1}]', {"a": 1}, False),
        ("", None, False), ("[1,2]", None, False), ('"text"', None, False), ("3", None, False), ('{"a":1', None, False),
        ('{"a":NaN}', None, False), ("{" * 100_000, None, False), ('{"a":' * 50_000, None, False),
        ("{'a': 1}", None, False), ('{"a":1,}', None, False), ("\ud800{", None, False), ("\ufffd", None, False),
    ],
)  # fmt: skip
def test_case_29_malformed_json_is_a_value_and_no_exception(text: str, expected: Any, clean: bool) -> None:
    assert json_object(text) == (expected, clean)


def test_a_key_twice_spoils_only_its_object() -> None:
    assert json_object('{"a":1,"a":2}') == (None, False)
    assert json_object('{"a":1,"a":2} {"b":1}')[0] == {"b": 1}


@pytest.mark.parametrize(
    ("text", "value", "bare"),
    [
        ("8", 8, True), (" -8 \n", -8, True), ("+8", 8, True), ("8.0", 8, True), ("1,000", 1000, True),
        ("1e3", 1000, True), (".5", 0.5, True), ("\u22125", -5, True), ("3 + 5 = 8", 8, False),
        ("It is 8.", 8, False), ("$8", 8, False), ("3-5", 5, False), ("x8", None, False), ("", None, False),
        ("eight", None, False), ("-", None, False),
        ("1" * 5000, None, False), ("1,2,3", 3, False), ("1e9999", None, False),
    ],
)  # fmt: skip
def test_numbers_in_answers(text: str, value: float | None, bare: bool) -> None:
    found, alone = number(text)
    if text == "1e9999":
        assert found is None or found > 10**300
        return
    assert (None if found is None else float(found)) == value and alone == bare


def test_equality_of_json_values() -> None:
    assert same(1, 1.0) and same([1, {"a": None}], [1.0, {"a": None}]) and same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    for left, right in ((1, True), (0, False), ("1", 1), ([1], [1, 2]), ([1, 2], [2, 1]), (None, 0), ({"a": 1}, {})):
        assert not same(left, right) and not same(right, left)


def test_every_refusal_is_an_edgees_error(tmp_path: Path) -> None:
    with pytest.raises(EdgeesError):
        load_task(f"jsonl:{tmp_path / 'missing.jsonl'}")
