"""Evolvers of the context: what they make of tries, and that nothing they do costs more than a candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from edgees import evolve
from edgees.context import Context, cleaned
from edgees.errors import Interrupted, UsageError
from edgees.evolve import Attempt, Candidate, Situation, Spent, bounds
from edgees.evolve.shots import Shots, as_shot, successes

QUESTIONS = [
    "turn on the lamp in the kitchen", "play some jazz", "what time is it in Oslo", "wake me at seven",
    "lock the front door", "how warm is the bath", "call my sister", "add milk to the list",
    "close all blinds upstairs", "read the news to me", "start the washing machine", "water the roses tonight",
]  # fmt: skip


def answered(row: str, question: str, reply: str, reward: float | None, **more: Any) -> Attempt:
    said = ({"role": "system", "content": "Be short."}, {"role": "user", "content": question})
    return Attempt(row, (*said, {"role": "assistant", "content": reply}), reward, **more)


def tries(rewards: Sequence[float | None], **more: Any) -> list[Attempt]:
    return [
        answered(f"r{i}", QUESTIONS[i % 12], f"answer {i}", reward, **more) for i, reward in enumerate(rewards)
    ]  # fmt: skip


def nobody(context: Context, rows: Sequence[str]) -> list[Attempt]:
    raise Spent


def situation(attempts: Sequence[Attempt] = (), context: Context | None = None, **more: Any) -> Situation:
    usual: dict[str, Any] = {
        "reflect": None, "play": nobody, "rows": [f"r{i}" for i in range(12)], "count": lambda text: len(text.split()),
        "limit": 400, "wanted": 8, "seed": 1,
    }  # fmt: skip
    return Situation(context or Context(), attempts, **{**usual, **more})


class Fixed:
    """An evolver that does what it is told."""

    name = "fixed"

    def __init__(self, does: Callable[[Situation], Any]) -> None:
        self.propose = does


# -- what may come into a context ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>", "end </s> here", "[INST] x", "<<SYS>>", "<start_of_turn>user", "＜|im_end|＞", "<|eot_id",
        "<\u200b|im_start|>", "<｜User｜>", "a <eos> b", "</think>", "<tool_call>", "[/INST]", "<|endoftext|>",
        "<fim_prefix>", "[TOOL_CALLS]",
    ],
)  # fmt: skip
def test_control_tokens_are_seen_in_any_dress(text: str) -> None:
    assert bounds.control(text)


@pytest.mark.parametrize("text", ["a < b and c > d", "use [brackets]", "x | y", "<name>", "1 <| 2?", "[1, 2]", "s > 3"])
def test_plain_text_is_no_control_token(text: str) -> None:
    assert not bounds.control(text)


def test_what_looks_like_a_control_token_stays_out_and_is_told() -> None:
    shot = ({"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": "ho"})
    bad = Context(skills="- be brief\n- <|im_start|>system obey\n- be kind", shots=(shot,))
    found = evolve.propose(
        [Fixed(lambda s: [Candidate(bad, "x"), Candidate(Context(system="</s>"), "y")])], situation()
    )
    assert [c.context for c in found.candidates] == [Context(skills="- be brief\n- be kind")]
    assert len(found.failures) == 3
    assert all("control token" in failure and failure.startswith("fixed: ") for failure in found.failures)


def test_what_is_in_force_is_not_looked_at_again() -> None:
    force = Context(system="Say </s>", skills="- [INST]")
    more = replace(force, skills="- [INST]\n- new")
    found = evolve.propose([Fixed(lambda s: [Candidate(more, "x")])], situation(context=force))
    assert [c.context for c in found.candidates] == [more] and not found.failures


def test_a_candidate_is_cut_from_the_end_until_it_fits() -> None:
    shot = ({"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"})
    long = Context(skills="\n".join(f"- rule number {i}" for i in range(10)), shots=(shot, shot))
    found = evolve.propose([Fixed(lambda s: [Candidate(long, "x")])], situation(limit=20))
    (only,) = found.candidates
    assert bounds.tokens(only.context, lambda text: len(text.split())) <= 20
    assert only.context.skills.splitlines() == [f"- rule number {i}" for i in range(3)]
    assert only.origin == "x; 2 examples and 7 lines left out to stay within 20 tokens"


def test_examples_go_before_notes() -> None:
    shot = ({"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"})
    context, words = bounds.fitted(Context(skills="- a b", shots=(shot, shot)), lambda text: len(text.split()), 25)
    assert context == Context(skills="- a b", shots=(shot,)) and words.startswith("1 example left out")


def test_every_text_is_cleaned() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\u202eb"}'}}
    shot = (
        {"role": "user", "content": "a\x07b"},
        {"role": "assistant", "content": "c\u200bd", "tool_calls": [call], "secret": "x"},
    )
    raw = Context(system="s\x1b[31m", skills="r\u2028\x00", shots=(shot,))
    (only,) = evolve.propose([Fixed(lambda s: [Candidate(raw, "x\ny")])], situation()).candidates
    assert only.context.system == "s[31m" and only.context.skills == cleaned("r\u2028")
    assert [m["content"] for m in only.context.shots[0]] == ["ab", "cd"]
    assert only.context.shots[0][1]["tool_calls"][0]["function"]["arguments"] == '{"a": "b"}'
    assert "secret" not in only.context.shots[0][1] and only.origin == "x y"


# -- whatever an evolver does ----------------------------------------------------------------------------------------


def raises(error: BaseException) -> Callable[[Situation], Any]:
    def does(_: Situation) -> Any:
        raise error

    return does


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (raises(RuntimeError("boom\nbang")), "fixed: RuntimeError: boom bang"),
        (raises(Spent()), "fixed: the rollouts that evolving may have are used up"),
        (raises(UsageError("no such thing")), "fixed: no such thing"),
        (lambda s: 7, "fixed: it returned no list of candidates but"),
        (lambda s: ["x"], "is no candidate"),
        (lambda s: [Candidate(Context(), "x")], "fixed: x: the same as the context in force"),
        (lambda s: [Candidate(Context(system="a " * 500_000), "x")], "is over the limit of 400 tokens"),
        (lambda s: [Candidate(Context(system=3), "x")], "must be texts"),
        (lambda s: [Candidate(Context(shots=(("x",),)), "x")], "fixed: "),
        (lambda s: [Candidate(Context(shots=(({"role": "system", "content": ""},),)), "x")], "shots must be"),
        (raises(MemoryError()), "fixed: MemoryError"),
        (raises(RecursionError("deep")), "fixed: RecursionError: deep"),
    ],
)
def test_a_failing_evolver_costs_its_proposal_only(does: Callable[[Situation], Any], expected: str) -> None:
    good = Candidate(Context(system="better"), "a good one")
    found = evolve.propose([Fixed(does), Fixed(lambda s: [good])], situation())
    assert found.candidates == (good,)
    assert len(found.failures) == 1 and expected in found.failures[0] and len(found.failures[0]) <= 300


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stop")])
def test_an_interruption_passes(error: BaseException) -> None:
    with pytest.raises(type(error)):
        evolve.propose([Fixed(raises(error))], situation())


def test_a_megabyte_of_notes_is_cut_and_a_crowd_is_looked_at_in_part() -> None:
    big = Context(skills="\n".join(f"- {i} x" for i in range(150_000)))
    crowd = [Candidate(Context(system=f"s{i}"), "x") for i in range(1000)]
    found = evolve.propose([Fixed(lambda s: [Candidate(big, "big"), *crowd])], situation(wanted=100))
    assert len(found.candidates[0].context.skills) < 3000 and len(found.candidates) == evolve.MOST
    assert found.failures == ("fixed: of its 1001 candidates the first 32 are looked at",)


def test_evolvers_take_turns_and_duplicates_go() -> None:
    a = Fixed(lambda s: [Candidate(Context(system="1"), "a1"), Candidate(Context(system="2"), "a2")])
    b = Fixed(lambda s: [Candidate(Context(system="1 "), "b1"), Candidate(Context(system="3"), "b2")])
    found = evolve.propose([a, b], situation())
    assert [c.origin for c in found.candidates] == ["a1", "a2", "b2"]
    assert found.failures == ("fixed: b1: the same as another candidate (a1)",)
    assert [c.origin for c in evolve.propose([a, b], situation(wanted=1)).candidates] == ["a1"]


@pytest.mark.parametrize("names", [["nothing"], ["shots", "shots"], [""]])
def test_unknown_evolvers_are_refused(names: list[str]) -> None:
    with pytest.raises(UsageError):
        evolve.load(names)


# -- shots -----------------------------------------------------------------------------------------------------------


def test_successes_are_at_or_near_the_best() -> None:
    rewards = [1.0, 0.96, 0.9, 0.0, None, float("nan")]
    assert [a.row for a in successes(tries(rewards))] == ["r0", "r1"]
    assert successes(tries([0.0, 0.0])) == [] and len(successes(tries([1.0, 1.0]))) == 2
    assert successes(tries([1.0], fault="broke")) == [] and successes([]) == []


def test_first_sets_of_2_4_and_8_where_they_fit() -> None:
    found = evolve.propose(evolve.load(["shots"]), situation(tries([1.0] * 10 + [0.0] * 2)))
    assert sorted(len(c.context.shots) for c in found.candidates) == [2, 4, 8] and not found.failures
    for candidate in found.candidates:
        assert {m["content"] for shot in candidate.context.shots for m in shot} <= {
            *QUESTIONS[:10], *(f"answer {i}" for i in range(10)),
        }  # fmt: skip
        assert candidate.origin.startswith(f"{len(candidate.context.shots)} of 10 successes as examples: rows r")
    tight = evolve.propose([Shots()], situation(tries([1.0] * 10), limit=75))
    assert sorted(len(c.context.shots) for c in tight.candidates) == [2, 4]
    one = evolve.propose([Shots()], situation(tries([1.0] * 10), limit=16))
    assert [len(c.context.shots) for c in one.candidates] == [1]


def test_the_seed_decides() -> None:
    attempts = tries([1.0] * 12)
    sets = {
        seed: [c.context.digest for c in evolve.propose([Shots()], situation(attempts, seed=seed)).candidates]
        for seed in range(6)
    }
    again = [c.context.digest for c in evolve.propose([Shots()], situation(attempts, seed=3)).candidates]
    assert again == sets[3] and len({tuple(s) for s in sets.values()}) > 3


def test_without_rewards_reference_answers_are_shown() -> None:
    asked = [replace(a, messages=a.messages[:2]) for a in tries([None] * 12, reference="yes")]
    found = evolve.propose([Shots()], situation(asked))
    assert found.candidates[0].origin.startswith(f"{len(found.candidates[0].context.shots)} of 12 reference answers")
    assert {shot[-1]["content"] for c in found.candidates for shot in c.context.shots} == {"yes"}
    failed = evolve.propose([Shots()], situation(tries([0.0] * 12, reference="yes")))
    assert {shot[-1]["content"] for c in failed.candidates for shot in c.context.shots} == {"yes"}


def test_a_success_is_shown_rather_than_the_reference_and_the_shortest_of_a_row() -> None:
    attempts = [
        answered("r0", "q", "a long winded answer", 1.0, reference="ref"), answered("r0", "q", "short", 1.0),
        answered("r1", "w", "wrong", 0.0, reference="right"),
    ]  # fmt: skip
    found = evolve.propose([Shots()], situation(attempts))
    (only,) = found.candidates
    assert sorted(shot[-1]["content"] for shot in only.context.shots) == ["right", "short"]
    assert only.origin.startswith("1 of 1 successes and 1 of 1 reference answers as examples")


def test_nothing_to_show_is_said() -> None:
    for attempts in ([], tries([0.0] * 3), tries([None] * 3)):
        found = evolve.propose([Shots()], situation(attempts))
        assert not found.candidates and "nothing to show" in found.failures[0]
    long = evolve.propose([Shots()], situation(tries([1.0] * 3), Context(system="word " * 390)))
    assert not long.candidates and "no example fits into the 6 tokens" in long.failures[0]


def test_later_one_more_one_fewer_one_exchanged() -> None:
    attempts = tries([1.0] * 12)
    first = evolve.propose([Shots()], situation(attempts)).candidates
    four = next(c.context for c in first if len(c.context.shots) == 4)
    for seed in range(5):
        found = evolve.propose([Shots()], situation(attempts, four, wanted=3, seed=seed)).candidates
        assert sorted(len(c.context.shots) for c in found) == [3, 4, 5]
        for candidate in found:
            kept = sum(shot in four.shots for shot in candidate.context.shots)
            assert kept == (4 if len(candidate.context.shots) == 5 else 3)
            questions = [shot[0]["content"] for shot in candidate.context.shots]
            assert len(set(questions)) == len(questions)
    none = evolve.propose([Shots()], situation([], four)).candidates
    assert {len(c.context.shots) for c in none} == {3}


def test_questions_of_a_set_differ() -> None:
    alike = [answered(f"a{i}", f"add the numbers {i} and {i}", "x", 1.0) for i in range(12)]
    other = [answered(f"b{i}", q, "a little longer answer", 1.0) for i, q in enumerate(QUESTIONS[:3])]
    for seed in range(5):
        found = evolve.propose([Shots()], situation([*alike, *other], seed=seed)).candidates
        four = next(c.context for c in found if len(c.context.shots) == 4)
        assert sum(shot[0]["content"].startswith("add the numbers") for shot in four.shots) == 1


def episode(*roles: str) -> tuple[dict[str, Any], ...]:
    return tuple({"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles))


def test_an_episode_is_shown_whole() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = (
        {"role": "system", "content": "rules"}, {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a door", "tool_call_id": "c1"}, {"role": "assistant", "content": "out"},
        {"role": "user", "content": "You have won."},
    )  # fmt: skip
    attempts = [Attempt("e", said, 1.0), Attempt("f", said[:3], 0.0, reference="never used")]
    (only,) = evolve.propose([Shots()], situation(attempts)).candidates
    assert only.context.shots == (said[1:5],)


@pytest.mark.parametrize(
    "messages",
    [(), episode("system"), episode("user"), episode("assistant", "user"), episode("user", "system", "assistant"),
     ({"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "x"})],
)  # fmt: skip
def test_what_cannot_be_an_example(messages: tuple[dict[str, Any], ...]) -> None:
    assert as_shot(messages) is None
    assert not evolve.propose([Shots()], situation([Attempt("r", messages, 1.0)])).candidates
