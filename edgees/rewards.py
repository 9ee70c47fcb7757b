"""Scorers: load them, call them where they cannot do harm, and never mistake "no reward" for 0.

A reward function has TRL's signature, ``f(prompts, completions, **columns) -> list[float | None]``:

- ``prompts``, ``completions``: one item per answer. As in TRL, rows whose data had a plain string prompt give strings
  for both; rows whose data had messages give lists of messages, the completion being
  ``[{"role": "assistant", "content": text}]``.
- every further column of the data by its name, a list of the same length (None where a row lacks it). A function
  without ``**kwargs`` gets only what it names.
- it returns a list (tuple, NumPy array, tensor) of numbers of that length; it may be ``async``.

The user's functions live in a child process, one per file, with the file's folder on ``sys.path`` and a wall deadline
per call. What they print goes to our stderr or to a log; what they do to ``random`` stays there.

What cannot be a reward (None, NaN, an infinity, text, a bool) is named and excluded: a :class:`Fault`, and NaN in its
place. A call that raises, hangs, or returns the wrong number of rewards is a :class:`~edgees.errors.ScorerError`.

Where replies are voted on (``attempts = "majority:N"``) the first function that can says what each of them answers
(:meth:`Scorer.answers`); a user's file does by a function ``extract_answers(completions) -> list[str | None]``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from edgees.attempts import plain_texts
from edgees.children import Child, ChildDied, ChildTimeout, calling, guest_place
from edgees.episodes import Message
from edgees.errors import DataError, ScorerError, UsageError
from edgees.rollout import Trajectory
from edgees.tasks.reading import json_object, number, same
from edgees.tasks.rows import RewardFunction, Row, as_text

DEADLINE_S = 60.0
"""Seconds one call of one function may take."""
LOADING_S = 120.0
"""Seconds that importing the user's file may take (it may import a deep-learning library)."""
PLACEHOLDER = "edgees dry run"
"""The completion of a dry run on rows without a reference answer."""

NAN = math.nan
Answer = str | Sequence[Message]
"""What was answered to a row: a text, or all the messages of an episode."""
Outcome = tuple[bool, Any]
"""(True, reward) or (False, why there is none)."""


@dataclass(frozen=True)
class Fault:
    """One answer without a reward. index: its place in the call. row: its row's id."""

    index: int
    row: str
    function: str
    reason: str

    def __str__(self) -> str:
        return f"{self.function} on row {self.row} (item {self.index}): {self.reason}"


@dataclass(frozen=True)
class Scores:
    """rewards: one float per answer, NaN where excluded; parts: each function's own values, unweighted."""

    rewards: list[float]
    faults: list[Fault] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


# -- built-in scorers ---------------------------------------------------------------------------------------------


class NoReward(Exception):
    """Raised by a built-in scorer for a row it cannot judge; becomes a fault."""


def _answer(row: Row) -> str:
    wanted = as_text(row.columns.get("answer", row.answer))
    if wanted is None:
        raise NoReward("the row has no answer to compare with")
    return wanted


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def exact(row: Row, completion: str) -> float:
    """``exact``: 1 for the answer itself (white space squeezed), 0.5 if only letter case, quotes around it or closing
    punctuation differ, else 0."""
    wanted, given = _squeezed(_answer(row)), _squeezed(completion)
    if given == wanted:
        return 1.0
    return 0.5 if _loose(given) == _loose(wanted) != "" else 0.0


def numeric(row: Row, completion: str) -> float:
    """``numeric``: the last number of the text against the answer's (``1,000`` equals ``1e3`` equals ``1000.0``).

    1 for the right number alone; 0.5 for the right number with other text around it; 0.1 for a wrong number alone;
    0.05 for a wrong number within text; 0 without a number. So form alone pays a tenth of being right.
    """
    wanted, _ = number(_answer(row))
    if wanted is None:
        raise NoReward("the row's answer holds no number")
    value, bare = number(completion)
    if value is None:
        return 0.0
    if value == wanted:
        return 1.0 if bare else 0.5
    return 0.1 if bare else 0.05


def json_fields(row: Row, completion: str) -> float:
    """``json_fields``: the first JSON object of the text against the answer's.

    0 without a JSON object. Otherwise 0.05, plus 0.75 times the share of fields that are right (of all fields that
    either side has, so that needless ones cost), plus 0.2 if all are right and the text is nothing but the object
    (white space and a code fence allowed): full credit for an exact call only. Values must be equal with their type
    (``"3"`` is not 3); 3 equals 3.0. An object with a key twice counts as none.
    """
    wanted, _ = json_object(_answer(row))
    if not wanted:
        raise NoReward("the row's answer is not a JSON object with fields")
    given, clean = json_object(completion)
    if given is None:
        return 0.0
    right = sum(key in given and same(value, given[key]) for key, value in wanted.items())
    share = right / len(wanted.keys() | given.keys())
    return 0.05 + 0.75 * share + (0.2 if share == 1.0 and clean else 0.0)


def _loose(text: str) -> str:
    return _squeezed(text).strip("\"'`*“”‘’ .!?,;:").casefold()


def _extract_json(text: str) -> str | None:
    found = json_object(text)[0]
    return None if found is None else json.dumps(_plain_numbers(found), sort_keys=True)


def _plain_numbers(value: Any) -> Any:
    """The same with 3.0 as 3, for they are the same answer."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_EXTRACT: dict[str, Callable[[str], Hashable | None]] = {
    "exact": lambda text: _loose(text) or None, "numeric": lambda text: number(text)[0], "json_fields": _extract_json,
}  # fmt: skip
"""What a text answers, to each of the built-in scorers."""
BUILTIN: dict[str, Callable[[Row, str], float]] = {"exact": exact, "numeric": numeric, "json_fields": json_fields}
_OTHERS = ("regex:PATTERN", "reasoning_gym:NAME", "FILE.py[:FUNCTION]")


# -- parts: one function each ---------------------------------------------------------------------------------------


class _Part(Protocol):
    name: str

    def check(self) -> None:
        """Load what can be loaded. Raises ScorerError or UsageError."""

    def values(self, rows: Sequence[Row], completions: Sequence[Answer]) -> list[Outcome]: ...

    def answers(self, texts: Sequence[str]) -> Sequence[Hashable | None] | None:
        """What each text answers, None for nothing; None for all: this function does not pick out answers."""

    def close(self) -> None: ...


class _BuiltIn:
    def __init__(self, name: str) -> None:
        self.name = name
        self._function = BUILTIN[name]

    def check(self) -> None:
        pass

    def check_rows(self, rows: Sequence[Row]) -> None:
        bad = [
            (row.id, reason)
            for row, (ok, reason) in zip(rows, self.values(rows, [PLACEHOLDER] * len(rows)), strict=True)
            if not ok
        ]
        if bad:
            raise ScorerError(
                f"the scorer {self.name} cannot judge {len(bad)} of {len(rows)} rows; the first is row {bad[0][0]}: "
                f"{bad[0][1]}",
                "Give every row an answer that fits the scorer, or take the row out.",
            )

    def values(self, rows: Sequence[Row], completions: Sequence[Answer]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for row, completion in zip(rows, completions, strict=True):
            try:
                outcomes.append((True, self._function(row, last_text(completion))))
            except NoReward as error:
                outcomes.append((False, str(error)))
        return outcomes

    def answers(self, texts: Sequence[str]) -> list[Hashable | None]:
        return [_EXTRACT[self.name](text) for text in texts]

    def close(self) -> None:
        pass


class _InProcess:
    """A function handed over from Python code, called right here: no deadline, but ``random`` is put back."""

    def __init__(self, function: RewardFunction) -> None:
        self.name = str(getattr(function, "__name__", None) or type(function).__name__)
        self._function = function

    def check(self) -> None:
        pass

    def values(self, rows: Sequence[Row], completions: Sequence[Answer]) -> list[Outcome]:
        arguments = _arguments(rows, completions)
        _require(self.name, calling.parameters_of(self._function)[1], arguments)
        try:
            with calling.preserved_random():
                answer = calling.call(self._function, arguments)
        except (Exception, SystemExit) as error:
            raise ScorerError(
                f"the scorer {self.name} raised {type(error).__name__}: {error}",
                "See the exception this one was raised from.",
            ) from error
        return _checked(self.name, answer, len(rows))

    def answers(self, texts: Sequence[str]) -> None:
        return None

    def close(self) -> None:
        pass


class _InChild:
    """A function that runs in a child process. function: its name there."""

    def __init__(self, name: str, function: str, child: Child, deadline: float) -> None:
        self.name = name
        self._function = function
        self._child = child
        self._deadline = deadline

    def check(self) -> None:
        pass

    def values(self, rows: Sequence[Row], completions: Sequence[Answer]) -> list[Outcome]:
        arguments: dict[str, Any] = {"completions": [last_text(c) for c in completions]}
        if self._function == "gym":
            arguments["entries"] = [row.entry for row in rows]
            if None in arguments["entries"]:
                raise ScorerError(
                    f"the scorer {self.name} judges only rows of the task of that name",
                    "Name a scorer that fits the task, or leave --reward out for the task's own.",
                )
        else:
            arguments["answers"] = [as_text(row.columns.get("answer", row.answer)) for row in rows]
        return self._values(arguments, len(rows))

    def _values(self, arguments: Mapping[str, Any], count: int) -> list[Outcome]:
        request = {"op": "score", "name": self._function, "arguments": arguments}
        return _checked(self.name, self._call(request, self._deadline, "scoring"), count)

    def answers(self, texts: Sequence[str]) -> Sequence[Hashable | None] | None:
        self.check()
        answer = self._call({"op": "extract", "completions": list(texts)}, self._deadline, "extracting")
        if "nothing" in answer:
            return None
        found = answer.get("texts", [])
        if len(found) != len(texts):
            what = answer.get("shape") or f"{len(found)} of them"
            raise ScorerError(
                f"extract_answers of {self.name} returned {what} for {len(texts)} completions",
                "It gets a list of texts and returns a list as long: what each answers as a text, or None.",
            )
        return [None if text is None else str(text) for text in found]

    def close(self) -> None:
        self._child.close()

    def _call(self, request: Mapping[str, Any], seconds: float, doing: str) -> dict[str, Any]:
        try:
            answer = self._child.call(request, seconds)
        except ChildTimeout as error:
            where = guest_place(error.trace)
            raise ScorerError(
                f"the scorer {self.name} did not return within {seconds:g} s ({doing})"
                + (f"; it was at {where}" if where else ""),
                "Its process was stopped. Give the function a limit of its own, or more time: --scorer-timeout.",
            ) from error
        except ChildDied as error:
            raise ScorerError(
                f"the scorer {self.name} ended its process while {doing}: {error}",
                "A crash in a compiled module, os._exit, or too little memory.",
            ) from error
        except (TypeError, ValueError) as error:
            raise ScorerError(
                f"the columns cannot be passed to the scorer {self.name}: {error}", "Columns must be JSON values."
            ) from error
        assert isinstance(answer, dict)
        if "error" in answer:
            place = f" at {answer['where']}" if answer["where"] else ""
            raise ScorerError(
                f"the scorer {self.name} raised{place} ({doing}): {answer['error']}",
                f"The end of it:\n{answer['trace']}",
            )
        return answer


class _OfFile(_InChild):
    """A function of the user's file. Without a name: ``reward``, ``score``, or the only one that the file defines."""

    def __init__(self, path: Path, function: str, child: Child, deadline: float) -> None:
        super().__init__(f"{path.name}:{function}" if function else path.name, function, child, deadline)
        self._path = path
        self._required: list[str] | None = None

    def check(self) -> None:
        if self._required is not None:
            return
        answer = self._call({"op": "load", "name": self._function}, max(LOADING_S, self._deadline), "loading it")
        names = answer["functions"]
        if not answer["name"]:
            wanted = f"function {self._function!r}" if self._function else "function that is obviously meant"
            raise ScorerError(
                f"{self._path} has no {wanted}; it has: {', '.join(names) or 'none'}",
                f"Name one: --reward {self._path.name}:{names[0]}" if names else "Write `def reward(...)` in it.",
            )
        self._function = answer["name"]
        self.name = f"{self._path.name}:{self._function}"
        self._required = [str(name) for name in answer["required"]]

    def values(self, rows: Sequence[Row], completions: Sequence[Answer]) -> list[Outcome]:
        self.check()
        arguments = _arguments(rows, completions)
        _require(self.name, self._required or [], arguments)
        return self._values(arguments, len(rows))


def last_text(answer: Answer) -> str:
    """The text of an answer; of an episode that of the last reply."""
    if isinstance(answer, str):
        return answer
    said = [m for m in answer if m.get("role") == "assistant"]
    return str(said[-1].get("content") or "") if said else ""


def judge(scorer: Scorer, played: Sequence[Trajectory]) -> Scores:
    """Rewards of trajectories: the scorer's, or where it has no functions what the episodes themselves paid.

    An episode that broke down has no reward whatever the scorer might say to it.
    """
    rewards, faults, parts = [NAN] * len(played), list[Fault](), dict[str, list[float]]()
    sound = [i for i, t in enumerate(played) if not t.fault]
    if scorer.names:
        scores = scorer.score([played[i].row for i in sound], [played[i].answer for i in sound])
        for i, reward in zip(sound, scores.rewards, strict=True):
            rewards[i] = reward
        faults = [replace(fault, index=sound[fault.index]) for fault in scores.faults]
        parts = {name: [NAN] * len(played) for name in scores.parts}
        for name, values in scores.parts.items():
            for i, value in zip(sound, values, strict=True):
                parts[name][i] = value
    for i, t in enumerate(played):
        paid = t.reward
        if t.fault:
            faults.append(Fault(i, t.row.id, "the episode", t.fault))
        elif not scorer.names and (paid is None or not math.isfinite(paid)):
            faults.append(Fault(i, t.row.id, "the episode", f"it ended without a reward ({t.outcome})"))
        elif not scorer.names and paid is not None:
            rewards[i] = paid
    return Scores(rewards, sorted(faults, key=lambda fault: fault.index), parts)


def _arguments(rows: Sequence[Row], completions: Sequence[Answer]) -> dict[str, Any]:
    """TRL's keyword arguments for a batch."""
    prompts: list[Any] = []
    given: list[Any] = []
    for row, text in zip(rows, completions, strict=True):
        if not isinstance(text, str):
            prompts.append(row.prompt if row.prompt is not None else [dict(message) for message in row.messages])
            given.append([dict(message) for message in text])
        elif row.prompt is not None:
            prompts.append(row.prompt)
            given.append(text)
        else:
            prompts.append([dict(message) for message in row.messages])
            given.append([{"role": "assistant", "content": text}])
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row.columns))
        if row.answer is not None:
            columns["answer"] = None
    arguments: dict[str, Any] = {
        name: [row.columns.get(name, row.answer if name == "answer" else None) for row in rows] for name in columns
    }
    return {**arguments, "prompts": prompts, "completions": given}


def _require(name: str, required: Sequence[str], arguments: Mapping[str, Any]) -> None:
    missing = [parameter for parameter in required if parameter not in arguments]
    if missing:
        raise ScorerError(
            f"the scorer {name} asks for {', '.join(missing)}, which the data does not have; "
            f"it has: {', '.join(sorted(arguments))}",
            "Parameters are named after the columns of the data. Add the column, or give the parameter a default.",
        )


def _checked(name: str, answer: Mapping[str, Any], expected: int) -> list[Outcome]:
    if "shape" in answer:
        raise ScorerError(
            f"the scorer {name} returned {answer['shape']} instead of a list of {expected} numbers",
            "A reward function gets a whole batch and returns one number for each completion.",
        )
    values = answer["values"]
    if len(values) != expected:
        raise ScorerError(
            f"the scorer {name} returned {len(values)} rewards for {expected} completions",
            "A reward function returns one number for each completion, in their order; None for 'does not apply'.",
        )
    return [(bool(ok), value) for ok, value in values]


# -- the mixture ----------------------------------------------------------------------------------------------------


class Scorer:
    """A weighted sum of reward functions: ``sum(weight * value)``, not divided by the weights.

    An answer for which any of them gives no reward is excluded (NaN). Use :func:`load` to make one; ``close()`` or a
    ``with`` block ends its processes, which otherwise happens at exit.
    """

    def __init__(self, parts: Sequence[tuple[_Part, float]]) -> None:
        self._parts = list(parts)
        self.weights = [weight for _, weight in self._parts]

    @property
    def names(self) -> list[str]:
        """The functions' names, in order; keys of ``Scores.parts``. Complete once the files have been loaded."""
        taken: Counter[str] = Counter()
        names: list[str] = []
        for part, _ in self._parts:
            taken[part.name] += 1
            names.append(part.name if taken[part.name] == 1 else f"{part.name}#{taken[part.name]}")
        return names

    def check(self) -> None:
        """Load every file and see that its function is there. Raises ScorerError."""
        for part, _ in self._parts:
            part.check()

    def score(self, rows: Sequence[Row], completions: Sequence[Answer]) -> Scores:
        """Rewards of ``completions[i]``, given for ``rows[i]``. Raises ScorerError (see the module)."""
        if len(rows) != len(completions):
            raise ValueError(f"{len(rows)} rows and {len(completions)} completions")
        self.check()
        if not rows:
            return Scores([], [], {name: [] for name in self.names})
        rewards = [0.0] * len(rows)
        faults: list[Fault] = []
        parts: dict[str, list[float]] = {}
        for name, (part, weight) in zip(self.names, self._parts, strict=True):
            column: list[float] = []
            for index, (ok, value) in enumerate(part.values(rows, completions)):
                if not ok:
                    faults.append(Fault(index, rows[index].id, name, str(value)))
                column.append(float(value) if ok else NAN)
                rewards[index] += weight * column[-1]
            parts[name] = column
        for index, reward in enumerate(rewards):
            if math.isinf(reward):  # finite parts whose sum is not
                rewards[index] = NAN
                faults.append(Fault(index, rows[index].id, "+".join(self.names), "the weighted sum overflows"))
        return Scores(rewards, faults, parts)

    def answers(self, texts: Sequence[str]) -> Sequence[Hashable | None]:
        """What each text answers, so that equal answers are equal; None: nothing. By the first function that can say,
        else the texts themselves, white space squeezed. Raises ScorerError (a user's ``extract_answers``)."""
        for part, _ in self._parts:
            found = part.answers(texts) if texts else []
            if found is not None:
                return found
        return plain_texts(texts)

    def dry_run(self, rows: Sequence[Row]) -> Scores:
        """Score the first two rows with their own reference answers, before anything expensive is loaded.

        Rows without one are answered with a placeholder. None is accepted ("does not apply"); anything else that is
        no number is a ScorerError here, for it would be one in every generation. A built-in scorer looks at every
        row, for one that it cannot judge (no answer) is a row for nothing.
        """
        sample = list(rows[:2])
        if not sample:
            raise DataError("there is no row to try the scorer on", "Give the task at least one row.")
        self.check()
        for part, _ in self._parts:
            if isinstance(part, _BuiltIn):
                part.check_rows(rows)
        answers = [row.answer if row.answer is not None else PLACEHOLDER for row in sample]
        scores = self.score(sample, answers)
        broken = [fault for fault in scores.faults if fault.reason != "None"]
        if broken:
            raise ScorerError(
                f"dry run: the scorer {broken[0]}",
                "It was called with the rows' own answers. Return one finite float for each completion.",
            )
        return scores

    def close(self) -> None:
        for part, _ in self._parts:
            part.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_WEIGHT = re.compile(r"\*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\Z")


def load(
    specs: Sequence[str | RewardFunction],
    *,
    deadline: float = DEADLINE_S,
    folder: Path | None = None,
    log: Path | None = None,
) -> Scorer:
    """A scorer from specs, each a function (called in this process) or a text:

    - ``FILE.py[:FUNCTION]``: the user's function in a child process; without FUNCTION it is ``reward``, else ``score``,
      else the only one that the file defines;
    - ``exact``, ``numeric``, ``json_fields``: see the functions of this module for the credit they give;
    - ``regex:PATTERN``: dots match newlines, surrounding white space is ignored. Without a group, 1 if the whole text
      matches, 0.5 if a part does, else 0. With a group and a row that has an answer, 1 if the first match's first
      group is the answer, 0.1 for a match that is not, else 0. Runs in a child, for patterns can take for ever;
    - ``reasoning_gym:NAME[?parameters]``: that data set's own scoring, in a child;
    - any of these with ``*WEIGHT`` behind (``score.py:style*0.3``). A pattern that ends like a weight takes ``*1``.

    deadline: seconds per call of one function. folder: what relative files are relative to (default: the current
    one). log: file for what the functions print (default: our stderr). Raises UsageError for a spec that cannot be;
    nothing is started before ``dry_run`` or ``score``.
    """
    if isinstance(specs, str):
        specs = [specs]
    if not specs:
        raise UsageError("no scorer was given", "For example --reward score.py, or --reward exact.")
    if not (deadline > 0 and math.isfinite(deadline)):
        raise UsageError(f"the scorer's deadline must be a positive number of seconds, not {deadline}")
    files: dict[Path, Child] = {}
    parts: list[tuple[_Part, float]] = []
    for spec in specs:
        if not isinstance(spec, str):
            parts.append((_InProcess(spec), 1.0))
            continue
        name, weight = _split_weight(spec)
        if name in BUILTIN:
            parts.append((_BuiltIn(name), weight))
        elif name.startswith("regex:"):
            parts.append((_regex(name, deadline, log), weight))
        elif name.startswith("reasoning_gym:"):
            parts.append((_gym(name, deadline, log), weight))
        else:
            parts.append((_file(name, spec, deadline, folder, log, files), weight))
    return Scorer(parts)


def _split_weight(spec: str) -> tuple[str, float]:
    found = _WEIGHT.search(spec)
    if found is None:
        return spec.strip(), 1.0
    weight = float(found.group(1))
    if not math.isfinite(weight):
        raise UsageError(f"the weight in {spec!r} is not finite")
    return spec[: found.start()].strip(), weight


def _regex(name: str, deadline: float, log: Path | None) -> _Part:
    pattern = name.partition(":")[2]
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"the pattern of {name!r} does not compile: {error}", "It is a Python regular expression."
        ) from error
    if not pattern:
        raise UsageError("regex: needs a pattern", r"For example --reward 'regex:answer is (\d+)'.")
    return _InChild(name, "regex", Child("score.py", {"regex": pattern}, log=log), deadline)


def _gym(name: str, deadline: float, log: Path | None) -> _Part:
    from edgees.tasks.gym import parse  # lazily, so that a plain run does not read it

    dataset, parameters = parse(name)
    options = {"gym": {"name": dataset, "parameters": parameters}}
    return _InChild(name.partition("?")[0], "gym", Child("score.py", options, log=log), deadline)


def _file(
    name: str, spec: str, deadline: float, folder: Path | None, log: Path | None, files: dict[Path, Child]
) -> _Part:
    base = folder if folder is not None else Path.cwd()
    path, function = base / Path(name).expanduser(), ""
    head, colon, tail = name.rpartition(":")
    if not path.is_file() and colon and tail.isidentifier():
        path, function = base / Path(head).expanduser(), tail
    if not path.is_file():
        known = ", ".join([*BUILTIN, *_OTHERS])
        if name == "loglik":
            raise UsageError("loglik is no scorer but a weight beside it", "Set it by its own option: --loglik 1.")
        if path.suffix == ".py":
            raise UsageError(f"scorer file not found: {path}", "Paths are relative to the current folder.")
        raise UsageError(f"unknown scorer {spec!r}", f"Known: {known}; each may have a weight behind (*0.3).")
    path = path.resolve()
    if path not in files:
        files[path] = Child("score.py", {"file": str(path)}, log=log)
    return _OfFile(path, function, files[path], deadline)
