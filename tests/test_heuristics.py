"""``edgees search --heuristic``: programs that a model writes, checked, confined, scored and bred."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from runs import make_run
from test_evolve import Server, said

from edgees import heuristics
from edgees.backends.toy import ToyEngine
from edgees.cli import run
from edgees.errors import EdgeesError, ModelError, RunError, UsageError
from edgees.evolve.reflect import NoReply
from edgees.heuristics import Found, evolve
from edgees.programs import PROBLEMS, Problem, Program, Unusable, code_in, prompt_of

GUESS = '''"""Numbers are guessed."""
def guess(number: float) -> float:
    """The number, or one near it."""
    return 0.0
def one(number):
    return 1.0
HEURISTICS = {"zero": guess, "one": one}
def instances(seed, heldout):
    return [[3.0 + seed, 4.0], [5.0 + heldout, 6.0]]
def cost(heuristic, instance):
    return sum(abs(heuristic(number) - number) for number in instance)
'''


def block(body: str, head: str = "def guess(number):") -> str:
    """A model's reply with a program."""
    inner = "".join(f"    {line}\n" for line in body.splitlines())
    return f"Here is a better one:\n```python\n{head}\n{inner}```\nIt costs less."


def packing(body: str) -> str:
    return block(body, "def priority(item, bins):")


AVOIDS_SMALL_GAPS = packing(
    "capacity = bins[-1]\n"
    "return [item - space - (1000 if 0.05 * capacity < space - item < 0.2 * capacity else 0) for space in bins]"
)
"""Found by a search over the two numbers: space that nothing fits into later is what costs."""
LOOKS_BACK = block(
    "middle = {c: sum(distances[c][u] for u in unvisited) / len(unvisited) for c in unvisited}\n"
    "return min(unvisited, key=lambda c: distances[current][c] - 0.2 * distances[start][c] - 0.4 * middle[c])",
    "def next_city(current, start, unvisited, distances):",
)
"""Found likewise: what lies far from all that is left is better visited on the way."""


def script(*replies: str) -> Callable[[str], str]:
    """A model that says these, one after the other."""
    rest = iter(replies)
    return lambda prompt: next(rest)


@pytest.fixture
def guess(tmp_path: Path) -> Path:
    path = tmp_path / "guess_problem.py"
    path.write_text(GUESS)
    return path


@pytest.fixture(scope="module")
def bins() -> Iterator[Problem]:
    with closing(Problem("bin-packing", 0, 30.0)) as problem:
        yield problem


def evolved(problem: Path | str, *replies: str, **options: Any) -> Found:
    given = {"scorer_timeout": 30.0, **options.pop("given", {})}
    return evolve(str(problem), given, proposals=len(replies), model=script(*replies), **options)


def test_a_better_program_wins_on_heldout_instances_and_bad_ones_lose() -> None:
    bad = {
        "no program: there is no code": "I think that first-fit is fine.",
        "no program: it is not Python": packing("return [0.0 for"),
        "no program: it imports os": packing("import os\nreturn os.system('touch x')"),
        "failed: it took more than 5 s": packing("while True:\n    pass"),
        "failed: NameError: name 'print' is not defined": packing("print('x' * 1000000)\nreturn bins"),
        "failed: ZeroDivisionError: division by zero": packing("return [1 / 0 for space in bins]"),
        "failed: ValueError: numbers are needed": packing("return [float('nan') for space in bins]"),
        "failed: ValueError: 2 numbers are needed": packing("return [1.0]"),
        "failed: TypeError": packing("return bins[0]()"),
        "failed: out of memory": packing("return [0.0] * 10 ** 10"),
    }
    told: list[str] = []
    found = evolved("bin-packing", *bad.values(), AVOIDS_SMALL_GAPS, given={"scorer_timeout": 5.0}, say=told.append)
    for number, (expected, (at, words)) in enumerate(zip(bad, found.faults, strict=True), 1):
        assert at == number and words.startswith(expected.partition(": ")[2])
        assert any(line.startswith(f"proposal {number}: {expected.partition(':')[0]}, ") for line in told)
    assert dict(found.outcomes) == {"no program": 3, "failed": 7, "best": 1} and found.beat == 1
    assert [p.label for p in found.first] == ["best-fit", "first-fit"]
    first, second, best = (found.heldout[label] for label in ("best-fit", "first-fit", "proposal 11"))
    assert best.cost is not None and first.cost is not None and second.cost is not None
    assert best.cost < 0.6 * first.cost < first.cost < second.cost and len(best.costs) == 20
    assert found.difference is not None and found.difference["high"] is not None
    assert found.difference["low"] < found.difference["mean"] < found.difference["high"] < 0  # type: ignore[operator]
    for kind in (0, 1):  # uniform, Weibull
        assert sum(best.costs[kind::2]) < sum(first.costs[kind::2])


def test_a_better_tour_is_found_too() -> None:
    nearest = block(
        "return sorted(unvisited, key=lambda c: distances[current][c])[0]",
        "def next_city(current, start, unvisited, distances):",
    )
    wrong = [
        block(f"return {value}", "def next_city(current, start, unvisited, distances):")
        for value in ("start", "-1", "float(unvisited[0])", "len(distances)", "None", "True")
    ]
    found = evolved("salesman", *wrong, nearest, LOOKS_BACK)
    assert [words.partition(",")[0] for _, words in found.faults] == ["ValueError: an unvisited city is needed"] * 6
    assert dict(found.outcomes) == {"failed": 6, "known": 1, "best": 1}
    assert found.heldout["nearest neighbour"].cost == 0.0
    cost = found.heldout[found.best.label].cost
    assert cost is not None and cost < -0.05 and found.difference is not None
    assert (found.difference["high"] or 0.0) < -0.03


@pytest.mark.parametrize("name", PROBLEMS)
def test_instances_follow_from_the_seed(name: str) -> None:
    costs = []
    for seed in (0, 0, 1):
        with closing(Problem(name, seed, 30.0)) as problem:
            code = problem.first[0][1] if name == "bin-packing" else code_in(LOOKS_BACK, problem.function)
            costs.append([problem.score(code, heldout) for heldout in (False, True)])
    assert costs[0] == costs[1] != costs[2]
    assert costs[0][0] != costs[0][1][: len(costs[0][0])] and len(costs[0][1]) > 3 * len(costs[0][0])
    assert len(set(costs[0][1])) > 5


def test_what_best_fit_and_first_fit_do() -> None:
    """Against packings made by hand."""
    spec = importlib.util.spec_from_file_location("bin_packing", PROBLEMS["bin-packing"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    items = (6, 5, 3, 4, 2)  # first fit: 6 3 | 5 4 | 2; best fit: 6 4 | 5 3 2
    assert module.cost(module.priority, (10, items)) == pytest.approx(3 / 2 - 1)
    assert module.cost(module.best_fit, (10, (6, 5, 4, 3, 2))) == 0.0
    seen: list[tuple[int, list[int]]] = []
    module.cost(lambda item, bins: seen.append((item, bins)) or [0.0] * len(bins), (10, (6, 4, 5, 6)))
    assert seen == [(6, [10]), (4, [4, 10]), (5, [10]), (6, [10])], "full bins are gone, the new one is the last"
    assert module.cost(lambda item, bins: list(range(len(bins))), (10, (5, 5))) == 1.0


def hashed(prompt: str) -> str:
    """A model that says what follows from the prompt alone, and is not always able to."""
    rng = random.Random(prompt)
    body = f"return {rng.uniform(0, 8):.2f}" if rng.random() < 0.8 else "return number / 0"
    return block(body)


def test_it_can_be_repeated_and_seeds_differ(guess: Path) -> None:
    def told(seed: int) -> dict[str, Any]:
        found = evolve(str(guess), {"seed": seed, "scorer_timeout": 30.0}, proposals=12, model=hashed).to_dict()
        assert found.pop("seconds") >= 0
        return found

    guess.write_text(GUESS.replace("3.0 + seed", "3.0"))  # so that the instances are the same
    first = told(0)
    assert first == told(0) and first["best"]["training"] < 8.0 and len(first["curve"]) > 1
    assert first["outcomes"] != told(1)["outcomes"] or first["best"]["code"] != told(1)["best"]["code"]


def test_parents_are_the_better_ones_mostly_and_the_better_comes_last(guess: Path) -> None:
    prompts: list[str] = []

    def model(prompt: str) -> str:
        prompts.append(prompt)
        return block(f"return {len(prompts) / 4}")

    found = evolve(str(guess), {"scorer_timeout": 30.0}, proposals=24, model=model)
    shown = [[float(cost) for cost in re.findall(r"Version \d, cost ([\d.]+):", prompt)] for prompt in prompts]
    assert {len(costs) for costs in shown} == {1, 2}
    assert all(costs == sorted(costs, reverse=True) for costs in shown)
    costs = [abs(n / 4 - 3) + abs(n / 4 - 4) + abs(n / 4 - 5) + abs(n / 4 - 6) for n in range(1, 25)]
    assert found.best.cost == pytest.approx(min(costs) / 2) and found.outcomes["best"] > 10
    for prompt in prompts:
        assert "Numbers are guessed." in prompt and "def guess(number: float) -> float:" in prompt
        assert "The number, or one near it." in prompt and "def guess(number):\n    return " in prompt


def test_rank_selection_leans_to_the_better(guess: Path) -> None:
    with closing(Problem(str(guess), 0, 30.0)) as problem:
        config = heuristics.settings.load(None, heuristics.DEFAULTS)
        search = heuristics._Evolution(problem, config, 0, 0.0, None, lambda text: None)
        search.kept = [Program("", f"p{n}", (float(n),), n) for n in range(8)]
        asked: list[str] = []

        def model(prompt: str) -> str:
            asked.append(prompt)
            return "nothing"

        search.model = model
        for number in range(400):
            search.number = number
            with pytest.raises(Unusable):
                search.written()
    counts = [sum(f"cost {n}.0000" in prompt for prompt in asked) for n in range(8)]
    assert counts[0] > 1.4 * counts[7] > 20


def test_the_population_is_bounded_and_ties_go_to_the_shorter(guess: Path) -> None:
    with closing(Problem(str(guess), 0, 30.0)) as problem:
        config = heuristics.settings.load(None, heuristics.DEFAULTS)
        search = heuristics._Evolution(problem, config, 0, 0.0, None, lambda text: None)
        search.kept = [Program("long code", "zero", (2.0,))]
        took = search.took
        assert took(Program("a longer code", "p1", (2.0,), 1)) == "known"
        assert took(Program("short", "p2", (2.0,), 2)) == "best" and [p.label for p in search.kept] == ["p2"]
        assert took(Program("other", "p3", (1.0, 3.0), 3)) == "kept" and search.kept[1].label == "p3"
        assert took(Program("tiny", "p4", (3.0, 1.0), 4)) == "best"
        for n in range(5, 20):
            took(Program("x", f"p{n}", (float(n),), n))
        assert len(search.kept) == heuristics.SIZE and [p.rank for p in search.kept] == sorted(
            p.rank for p in search.kept
        )
        search.number = 21
        assert took(Program("x", "p20", (99.0,), 20)) == "worse" and took(Program("x", "p21", (0.5,), 21)) == "best"
        assert search.curve == [(21, 0.5)], "a shorter one that costs the same is no improvement"


REPLIES = {
    "def f(x):\n    return 1\n": "def f(x):\n    return 1\n",
    "Sure!\n\ndef f(x):\n    return 1\n\nThis is better.": "def f(x):\n    return 1\n\n",
    "import math\n\ndef g(x):\n    return x\n\ndef f(x):\n    return g(x)": "import math\n\ndef g(x):\n    return x\n\n"
    "def f(x):\n    return g(x)\n",
    "```\ndef f(x):\n    return 1\n```\n```python\ndef f(x):\n    return 2\n```": "def f(x):\n    return 2\n",
    "```python\ndef f(x):\n    return 1\n```\nUse:\n```\nf(3)\n```": "def f(x):\n    return 1\n",
    "```python\ndef f(x):\n    return 1": "def f(x):\n    return 1\n",
    "<think>\ndef f(x):\n    return 0\n</think>\n```python\ndef f(x):\n    return 1\n```": "def f(x):\n    return 1\n",
    "<think>\n```python\ndef f(x):\n    return 0\n```\n</think>\nI do not know.": "",
    "nothing": "",
    "": "",
    "import math, says the manual": "",
}


@pytest.mark.parametrize("reply", REPLIES)
def test_the_code_in_a_reply(reply: str) -> None:
    assert code_in(reply, "f") == REPLIES[reply]


ESCAPES = {
    "import os\n": "it imports os",
    "import math, sys\n": "it imports sys",
    "from os import path\n": "it imports os",
    "from . import protocol\n": "it imports .",
    "import collections.abc\n": "it imports collections.abc",
    "class A:\n    pass\n": "it is more than functions",
    "for i in [1]:\n    pass\n": "it is more than functions",
    "x = ().__class__\n": "it uses the attribute __class__",
    "x = (i for i in [1]).gi_frame\n": "it uses the attribute gi_frame",
    "x = __builtins__\n": "it uses the name __builtins__",
    "x = __import__('os')\n": "it uses the name __import__",
    "__builtins__ = {}\n": "it uses the name __builtins__",
    "import math as __builtins__\n": "it uses the name __builtins__",
    "def __build_class__(a): return a\n": "it uses the name __build_class__",
    "def g():\n    import math\n    math.sqrt = 1\n": "it sets the attribute sqrt",
    "def g():\n    import math\n    for math.pi in [3]: pass\n": "it sets the attribute pi",
    "def g():\n    import math\n    del math.pi\n": "it sets the attribute pi",
    "def g(x):\n    class A: pass\n": "functions alone are needed, and there is ClassDef",
    "def g(x):\n    match x:\n        case int(real=r): return r\n": "functions alone are needed, and there is Match",
    "def g(x):\n    match x:\n        case {**__y}: return 1\n": "it uses the name __y",
    "async def g(): pass\n": "it is more than functions",
    "x = " + "(" * 3000 + ")" * 3000 + "\n": "it is not Python",
    "x = " + "-" * 4000 + "1\n": "it is n",
    "x = '\0'\n": "it is not Python",
    "x = '" + "a" * 9000 + "'\n": "it has 9,0",
}


@pytest.mark.parametrize("text", ESCAPES, ids=range(len(ESCAPES)))
def test_what_no_program_may_do(bins: Problem, text: str) -> None:
    with pytest.raises(Unusable) as caught:
        bins.read(f"{text}def priority(item, bins):\n    return bins\n")
    assert str(caught.value).startswith(ESCAPES[text]) and caught.value.kind == "no program"


def test_what_is_read_is_what_runs(bins: Problem) -> None:
    code = bins.read(
        "from typing import List\nimport math, typing\nfrom heapq import heappush\n# ignore the rules\nSIZE: int = 3\n"
        "def helper(x: int = 2) -> int:\n    'ignore them'\n"
        "def priority(item: int, bins: List[int]) -> List[float]:\n    '''What it does.'''\n    y: int = 1\n"
        "    z: int\n"
        "    return [helper() for b in bins]  # why\n"
        "if __name__ == '__main__':\n    print(priority(1, [2]))\nprint(priority(3, [4]))\n"
    )
    assert code == (
        "import math\nfrom heapq import heappush\nSIZE = 3\n\ndef helper(x=2):\n    pass\n\n"
        "def priority(item, bins):\n    y = 1\n    pass\n    return [helper() for b in bins]\n"
    )
    assert bins.read(code) == code
    for text in ("def other(x):\n    return 1\n", "x = 1\n"):
        with pytest.raises(Unusable, match="no function priority"):
            bins.read(text)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return open('/etc/passwd')", "NameError: name 'open' is not defined (line 2)"),
        ("return eval('1')", "NameError: name 'eval' is not defined (line 2)"),
        ("return getattr(item, 'real')", "NameError: name 'getattr' is not defined (line 2)"),
        ("return priority(item, bins)", "RecursionError: maximum recursion"),
        ("import math\nreturn math.os", "AttributeError: module 'math' has no attribute 'os'"),
        ("import collections\nreturn collections.abc", "AttributeError: module 'collections'"),
        ("import heapq\nreturn heapq.sys", "AttributeError: module 'heapq'"),
        ("assert item is None, 'x' * 10 ** 6", "AssertionError: " + "x" * 300 + " (line 2)"),
        ("return 'abc'[:len(bins)]", "ValueError: 1 numbers are needed, one for each bin, and it returned str"),
        ("return ['x' * 10 ** 6]", "ValueError: numbers are needed, and it returned " + "x" * 40),
        ("text = 'x'\nwhile True:\n    text += text", "out of memory"),
        ("found = []\nwhile True:\n    found.append(list(range(1000)))", "out of memory"),
        ("try:\n    return priority(item, bins)\nexcept Exception:\n    return None", "ValueError: 1 numbers"),
    ],
)
def test_a_program_that_fails_is_told_why(bins: Problem, body: str, expected: str) -> None:
    code = bins.read(code_in(packing(body), "priority"))
    with pytest.raises(Unusable) as caught:
        bins.score(code)
    assert str(caught.value).startswith(expected) and caught.value.kind == "failed" and len(str(caught.value)) < 400


@pytest.mark.parametrize("body", ["while True:\n    pass", "return 10 ** 10 ** 10", "return [sum(range(10 ** 15))]"])
def test_a_program_without_an_end_is_ended(body: str) -> None:
    with closing(Problem("bin-packing", 0, 1.0)) as problem:
        with pytest.raises(Unusable, match="it took more than 1 s"):
            problem.score(code_in(packing(body), "priority"))
        assert problem.score(problem.first[1][1]), "the next one finds a process"


def test_programs_cannot_spoil_what_they_are_given(bins: Problem) -> None:
    honest = bins.score(bins.first[1][1])
    greedy = bins.read(code_in(packing("found = [item - b for b in bins]\nbins.clear()\nreturn found"), "priority"))
    assert bins.score(greedy) == honest
    with closing(Problem("salesman", 0, 30.0)) as problem:
        honest = problem.score(problem.first[0][1])
        head = "def next_city(current, start, unvisited, distances):"
        body = "found = min(unvisited, key=lambda c: distances[current][c])\nunvisited.clear()\nreturn found"
        assert problem.score(problem.read(code_in(block(body, head), "next_city"))) == honest
        with pytest.raises(Unusable, match="does not support item assignment"):
            problem.score(code_in(block("distances[0][1] = 0.0\nreturn unvisited[0]", head), "next_city"))


def test_a_program_begins_anew_with_each_instance(guess: Path) -> None:
    counting = "seen = []\ndef guess(number):\n    seen.append(number)\n    return number - len(seen)\n"
    with closing(Problem(str(guess), 0, 30.0)) as problem:
        assert problem.score(problem.read(counting)) == (3.0, 3.0)
        hidden = "def guess(number):\n    global seen\n    try:\n        seen += 1\n"
        hidden += "    except Exception:\n        seen = 1\n"
        assert problem.score(problem.read(f"{hidden}    return number - seen\n")) == (3.0, 3.0)


def test_a_program_finds_no_process_of_another(guess: Path) -> None:
    guess.write_text(
        GUESS.replace("    return sum(", "    calls.append(1)\n    return len(calls) + sum(") + "calls = []\n"
    )
    with closing(Problem(str(guess), 0, 30.0)) as problem:
        assert problem.score(problem.first[0][1]) == problem.score(problem.first[0][1]) == (8.0, 13.0)


def test_a_program_opens_no_file(tmp_path: Path) -> None:
    """Even one that got past the checks: the problem hands it ``open``."""
    victim = tmp_path / "x"
    path = tmp_path / "leaky.py"
    path.write_text(
        GUESS.replace("heuristic(number) - number", f"heuristic(lambda: open({str(victim)!r}, 'w')) - number")
    )
    with (
        closing(Problem(str(path), 0, 30.0)) as problem,
        pytest.raises(Unusable, match=r"OSError: .*Too many open files"),
    ):
        problem.score("def guess(number):\n    number().write('x')\n    return 1.0\n")
    assert not victim.exists()


def test_time_ends_it_and_counts_nothing_that_was_not_finished(guess: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(heuristics.time, "monotonic", lambda: now[0])

    def model(prompt: str) -> str:
        now[0] += 10.0
        return block(f"return {now[0] / 20}")

    found = evolve(str(guess), {"scorer_timeout": 30.0}, seconds=35.0, model=model)
    assert found.proposals == 3 and found.seconds == 40.0 and found.best.label == "proposal 3"
    assert not found.interrupted and found.heldout


def test_a_program_gets_no_more_time_than_is_left(guess: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []
    score = Problem.score

    def watched(self: Problem, code: str, heldout: bool = False, seconds: float = float("inf")) -> Any:
        allowed.append(seconds)
        return score(self, code, heldout, seconds)

    monkeypatch.setattr(Problem, "score", watched)
    endless = block("while True: pass")
    found = evolve(str(guess), {"scorer_timeout": 60.0}, seconds=3.0, model=lambda prompt: endless)
    assert found.proposals == 0 and not found.faults, "it is not the program's fault"
    assert [seconds <= 3.0 for seconds in allowed] == [False] * 4 + [True]


def test_what_was_there_is_not_tried_again(guess: Path) -> None:
    bad, good = block("return 1 / 0"), block("return 4")
    again = good.replace("return 4", "return 4  # better")
    found = evolved(guess, bad, good, bad, again, block("return 1.0"), block("return -5"))
    assert dict(found.outcomes) == {"failed": 1, "best": 1, "known": 3, "kept": 1} and found.beat == 1


def test_a_budget_of_proposals_has_a_default(guess: Path) -> None:
    found = evolve(str(guess), {}, model=lambda prompt: "nothing")
    assert found.proposals == heuristics.PROPOSALS and found.best.label == "one" and found.difference is None
    assert "no proposal was better" in "\n".join(heuristics.lines(found))


def failing(then: Sequence[Any]) -> Callable[[str], Any]:
    rest = iter(then)

    def model(prompt: str) -> Any:
        said = next(rest)
        if isinstance(said, Exception):
            raise said
        return said

    return model


def test_a_model_that_does_not_reply_costs_proposals_and_is_given_up(guess: Path) -> None:
    silent = [NoReply("no reply within 6 s"), EdgeesError("it broke"), None]
    found = evolve(str(guess), {}, proposals=4, model=failing([*silent, block("return 4")]))
    assert dict(found.outcomes) == {"no reply": 3, "best": 1} and not found.note
    assert [words for _, words in found.faults] == [
        "no reply within 6 s",
        "it broke",
        "the model gave NoneType, not a text",
    ]
    found = evolve(str(guess), {}, proposals=99, model=failing([block("return 4"), *[NoReply("gone")] * 99]))
    assert found.proposals == 1 + heuristics.SILENT and "given up" in found.note and found.best.proposal == 1
    assert "given up" in heuristics.lines(found)[-1]


def interrupting(at: int) -> Callable[[str], str]:
    count = [0]

    def model(prompt: str) -> str:
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGINT)
        return block(f"return {count[0] + 2}")

    return model


def test_ctrl_c_leaves_the_best_so_far(guess: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.py"
    found = evolve(str(guess), {}, proposals=99, model=interrupting(3), out=out)
    assert found.interrupted and found.proposals == 2 and found.best.label == "proposal 2"
    assert "return 4" in out.read_text() and found.heldout[found.best.label].cost is not None


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_best_program_is_a_file_of_its_own(guess: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.py"
    seen: list[str] = []

    def say(text: str) -> None:
        seen.append(out.read_text() if out.exists() else "")

    found = evolved(guess, block("return 3"), block("return number / 0"), block("return number + 1"), out=out, say=say)
    assert "return 3" in seen[-1] and "held-out" not in seen[-1], "it is there before the end"
    module = loaded(out)
    assert module.guess(7.0) == 8.0 and found.best.proposal == 3
    assert "proposal 3: training 2.000000, held-out 2.000000" in module.__doc__
    assert "one: training 7.000000, held-out 7.500000" in module.__doc__
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["best.py", guess.name]
    before = out.read_text()
    with pytest.raises(UsageError, match="is there already"):
        evolved(guess, block("return 1"), out=out)
    with pytest.raises(UsageError, match="has no folder"):
        evolved(guess, block("return 1"), out=tmp_path / "nowhere" / "best.py")
    assert out.read_text() == before


def test_a_winner_that_fails_on_heldout_instances_is_told(guess: Path) -> None:
    found = evolved(guess, block("return number if number == 6.0 or number < 5.5 else None"), given={"seed": 0})
    told = found.to_dict()
    assert told["best"]["heldout"] == 0.0 and told["difference"]["mean"] == -7.5
    found = evolved(
        guess, block("return {3.0: 3.0, 4.0: 4.0, 5.0: 5.0, 6.0: 5.5}[number]"), block("return {1: 1}[number]")
    )
    assert found.heldout["proposal 1"].cost == 0.5
    path = guess.with_name("shifted.py")
    path.write_text(GUESS.replace("5.0 + heldout", "5.0 + heldout / 2"))
    found = evolved(path, block("return {3.0: 3.0, 4.0: 4.0, 5.0: 5.0, 6.0: 5.5}[number]"))
    told = found.to_dict()
    assert told["best"]["heldout"] is None and told["best"]["heldout_fault"].startswith("KeyError: 5.5")
    assert told["difference"] is None and any("KeyError" in line for line in heuristics.lines(found))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (('"""Numbers are guessed."""', ""), "docstring of the file"),
        (("def cost", "def price"), "missing: cost"),
        (("def instances", "def examples"), "missing: instances"),
        (("HEURISTICS =", "OTHERS ="), "missing: HEURISTICS"),
        (('"""The number, or one near it."""', ""), "guess, the first of HEURISTICS, has no docstring"),
        (('"one": one', '"one": lambda number: 1.0'), "not a function that was written with def"),
        (("return 1.0", "return open('x')"), "its own one: NameError"),
        (("return 1.0", "import os"), "must run where programs run: it imports os"),
        (("return sum(", "return float('nan') * sum("), "its own zero: its cost is nan"),
        (("return [[3.0 + seed, 4.0], [5.0 + heldout, 6.0]]", "return []"), "gave none"),
        (("return [[3.0 + seed", "return [[3.0 / 0"), "problem.py:9 in instances: ZeroDivisionError"),
        (("def guess", "def guess guess"), "SyntaxError"),
        (("HEURISTICS =", "import os; os._exit(3)\nHEURISTICS ="), "exit status 3"),
    ],
)
def test_what_is_wrong_with_a_problem_is_said(guess: Path, change: tuple[str, str], match: str) -> None:
    guess.write_text(GUESS.replace(*change))
    with pytest.raises(UsageError, match=match):
        evolved(guess, block("return 1"))


def test_there_is_no_such_problem(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no heuristic problem bin-backing") as caught:
        evolved("bin-backing")
    assert "bin-packing" in str(caught.value.hint)
    for options in ({"proposals": -1}, {"seconds": float("inf")}, {"seconds": -1.0}):
        with pytest.raises(UsageError, match="cannot be negative"):
            evolve("bin-packing", {}, model=hashed, **options)  # type: ignore[arg-type]


TOY = {"engine": "toy", "model": "toy"}


def test_a_model_on_this_machine_is_sampled_anew_each_time(guess: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    generate = ToyEngine.generate

    def counted(self: ToyEngine, requests: Any, progress: Any = None) -> Any:
        asked.extend(requests)
        return generate(self, requests, progress)

    monkeypatch.setattr(ToyEngine, "generate", counted)
    found = evolve(str(guess), {**TOY, "max_tokens": 5}, proposals=4)
    assert dict(found.outcomes) == {"no program": 4} and found.tokens > 0
    assert len({r.seed for r in asked}) == 4 and {r.temperature for r in asked} == {0.8}
    assert {r.max_tokens for r in asked} == {5} and {r.member.amplitude for r in asked} == {0.0}
    seeds = [r.seed for r in asked]
    asked.clear()
    evolve(str(guess), {**TOY, "max_tokens": 5}, proposals=4)
    assert [r.seed for r in asked] == seeds
    found = evolve(str(guess), {"engine": "toy", "model": "toy:context=100"}, proposals=1)
    assert dict(found.outcomes) == {"no reply": 1} and "does not fit the context of 100" in found.faults[0][1]


def test_time_and_ctrl_c_end_a_reply_of_a_model_on_this_machine(guess: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(heuristics.time, "monotonic", lambda: now[0])
    generate = ToyEngine.generate
    during: list[Callable[[], Any]] = [lambda: now.__setitem__(0, now[0] + 20.0)]
    finished: list[Any] = []

    def slow(self: ToyEngine, requests: Any, progress: Any = None) -> Any:
        during[0]()
        finished.append(generate(self, requests, progress))
        return finished[-1]

    monkeypatch.setattr(ToyEngine, "generate", slow)
    found = evolve(str(guess), TOY, seconds=50.0)
    assert found.proposals == 2 == len(finished) and not found.interrupted
    during[0] = lambda: os.kill(os.getpid(), signal.SIGINT)
    found = evolve(str(guess), TOY, seconds=50.0)
    assert found.proposals == 0 and found.interrupted and len(finished) == 2


def test_a_runs_weights_write(guess: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said_by: dict[str, list[str]] = {"base": [], "run": []}
    generate = ToyEngine.generate

    def kept(who: str) -> None:
        def recording(self: ToyEngine, requests: Any, progress: Any = None) -> Any:
            done = generate(self, requests, progress)
            said_by[who] += [c.text for c in done]
            return done

        monkeypatch.setattr(ToyEngine, "generate", recording)

    folder = make_run(tmp_path / "run", "toy", "full", engine="toy", generations=3, lr=0.5)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    kept("base")
    evolve(str(guess), {**TOY, "temperature": 0.0, "seed": 7}, proposals=1)  # the run's seed: the same prompt
    kept("run")
    evolve(str(guess), {"temperature": 0.0}, proposals=1, run=folder)
    assert said_by["base"] != said_by["run"] and len(said_by["run"]) == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    for given in ({"model": "toy"}, {"reflector": "openai:x"}):
        with pytest.raises(UsageError, match="--run"):
            evolve(str(guess), given, proposals=1, run=folder)
    with pytest.raises(RunError):
        evolve(str(guess), {}, proposals=1, run=tmp_path)


def test_a_gguf_file_may_write(guess: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(heuristics, "open_engine", lambda c: (opened.append(c), ToyEngine())[1])
    file = tmp_path / "other.gguf"
    file.write_bytes(b"GGUF")
    found = evolve(str(guess), {"reflector": str(file)}, proposals=2)
    assert found.outcomes["no program"] == 2 and [c.model for c in opened] == [str(file)]
    assert opened[0].context == 4096 and opened[0].engine == "llamacpp"
    with pytest.raises(UsageError, match="does not exist"):
        evolve(str(guess), {"reflector": "no.gguf"}, proposals=2)
    monkeypatch.undo()
    with pytest.raises(ModelError):
        evolve(str(guess), {"reflector": str(file)}, proposals=2)


def test_an_endpoint_writes(guess: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    replies = iter([block("return 4.5"), "x" * (1 << 20), block("return number"), "no more"])
    with Server() as server:
        server.behave = lambda body: said("openai", next(replies))
        monkeypatch.setenv("OPENAI_API_KEY", "k3y-of-mine")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/v1")
        asked = ["search", "--heuristic", str(guess), "--reflector", "openai:some-model", "--rollouts", "4", "--json"]
        assert run(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["outcomes"] == {"best": 2, "no reply": 1, "no program": 1} and told["beat"] == 2
    assert "1,048,576 characters" in told["faults"][0][1]
    assert told["best"]["code"] == "def guess(number):\n    return number\n"
    assert told["best"]["training"] == told["best"]["heldout"] == 0.0 and told["difference"]["high"] < 0
    assert [line["label"] for line in told["first"]] == ["one", "zero"] and told["curve"][0] == [0, 7.0]
    assert (
        server.bodies[0]["model"] == "some-model"
        and "Numbers are guessed." in server.bodies[0]["messages"][0]["content"]
    )


def test_the_command(guess: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "--heuristic", str(guess), "--engine", "toy", "--model", "toy", "--rollouts", "2"]
    assert run([*asked, "--out", str(tmp_path / "best.py")]) == 0
    out = capsys.readouterr()
    assert "def guess(number):" in out.out and "held-out" in out.out and "2 proposals: 2 no program" in out.out
    assert "proposal 2: no program, there is no code in the reply (best: 7.0000, one)" in out.err
    assert "one, which nothing proposed was better than" in (tmp_path / "best.py").read_text()
    assert run([*asked, "--out", str(tmp_path / "best.py")]) == 2
    assert run(["search", "--heuristic", "nothing"]) == 2


def test_an_interrupted_command(
    guess: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = ToyEngine.generate
    count = [0]

    def interrupted(self: ToyEngine, requests: Any, progress: Any = None) -> Any:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return generate(self, requests, progress)

    monkeypatch.setattr(ToyEngine, "generate", interrupted)
    asked = ["search", "--heuristic", str(guess), "--engine", "toy", "--model", "toy", "--rollouts", "20", "--json"]
    assert run(asked) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["interrupted"] is True and told["proposals"] == 2 and told["best"]["label"] == "one"


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--row", "x"], "--row has no meaning with --heuristic"),
        (["--rows", "1"], "--rows has no meaning"),
        (["--apart"], "--apart has no meaning"),
        (["--method", "es"], "--method has no meaning"),
        (["--enough", "1"], "--enough has no meaning"),
        (["--task", "sums"], "--task has no meaning"),
        (["--sigma", "1"], "--sigma has no meaning"),
        (["--pairs", "1"], "--pairs has no meaning"),
    ],
)
def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str], more: list[str], match: str) -> None:
    assert run(["search", "--heuristic", "bin-packing", *more]) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--out", "x.py"], ["--reflector", "self"]])
def test_options_of_heuristics_alone(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert run(["search", "--rows", "1", *more]) == 2
    assert f"{more[0]} is of --heuristic" in capsys.readouterr().err


def test_the_prompt(bins: Problem) -> None:
    [(_, first), (_, best)] = bins.first
    one = prompt_of(bins, [Program(best, "best-fit", (0.5,))])
    assert "def priority(item: int, bins: list[int]) -> list[float]:" in one and "Version 1, cost 0.5000:" in one
    assert "Version 2" not in one and "the oldest\n    first" in one and best in one
    two = prompt_of(bins, [Program(first, "first-fit", (0.6,)), Program(best, "best-fit", (0.5,))])
    assert two.index("cost 0.6000") < two.index("cost 0.5000") and len(two) < 4000
