"""What a task is: rows to answer, how answers are paid, which rows are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgees.episodes import Episodes
from edgees.errors import DataError, UsageError

RewardFunction = Callable[..., Any]
"""TRL's signature: ``f(prompts, completions, **columns) -> list[float | None]``."""


SEARCH: Mapping[str, Any] = {
    "pairs": 64, "rows": 2, "groups": 4, "lr": 0.28, "generations": 20, "eval_every": 10, "loglik": 1.0,
    "loglik_hold": 1.0, "loglik_end": 1.0,
}  # fmt: skip
"""Settings that the built-in tasks share (docs/studies/split). Likelihood of the reference answer to the end: with few
rows it carries the signal of several times as many greedy answers, and is cheaper to compute. Many members on two rows
each: a row costs as much as a direction, and two tell more than half of a member's merit from noise; eight rows in all,
so that no step is for two rows alone. Steps of lr/sqrt(pairs) = .035 of the weights' RMS are the best at first
(docs/log.md).
"""


@dataclass(frozen=True)
class Row:
    """One thing to answer.

    id: unique among the training rows and among the held-out ones, stable from run to run (it stands in the history).
    messages: the conversation so far (``role``, ``content``), ending before the answer. Without the task's system
        message: :meth:`Task.conversation` adds it.
    columns: every further column of the data, as scorers get them; JSON values.
    answer: reference text for ``loglik`` and the built-in scorers; None where there is none.
    prompt: the question's text where the data had a plain string, None where it had messages. It decides, as in TRL,
        whether scorers see strings or lists of messages.
    entry: what only the task's own scorer needs; never shown to the user's.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    answer: str | None = None
    prompt: str | None = None
    entry: str | None = None

    @classmethod
    def plain(cls, id: str, prompt: str, answer: str | None = None, **columns: Any) -> Row:
        """A row with a plain string prompt; ``answer`` is a column, too."""
        if answer is not None:
            columns = {"answer": answer, **columns}
        return cls(id, ({"role": "user", "content": prompt},), columns, answer, prompt)

    def content_key(self) -> str:
        """Digest of what the model is asked: equal for rows that differ only in id, columns or white space.

        Rows without messages are instances to play: their columns, the id aside, say which.
        """
        if self.messages:
            text = json.dumps([{k: " ".join(v.split()) for k, v in sorted(m.items())} for m in self.messages])
        else:
            text = json.dumps({k: v for k, v in self.columns.items() if k != "id"}, sort_keys=True)
        return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


Metric = Callable[[Row, str], float]
"""A named measure of one answer, reported beside the reward and never optimised."""


@dataclass(frozen=True)
class Task:
    """Rows and what goes with them.

    name: as given. train, heldout: no question stands in both. reward: what :func:`edgees.rewards.load` takes
    (specs or functions); empty where the user must bring a scorer. system: system message for rows that have none.
    max_tokens: room for an answer. metrics: further measures by name. warnings: what should be said aloud.
    defaults: configuration values that suit the task, below anything the user says. episodes: opens what plays the
    rows, one episode each, and pays for them itself; None where a row is answered once.
    """

    name: str
    train: tuple[Row, ...]
    heldout: tuple[Row, ...]
    reward: tuple[str | RewardFunction, ...] = ()
    system: str | None = None
    max_tokens: int = 256
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    episodes: Callable[[], Episodes] | None = None

    def conversation(self, row: Row, system: str | None = None) -> list[dict[str, str]]:
        """The row's messages with the system message in front (``system`` instead of the task's, if given)."""
        text = self.system if system is None else system
        own = bool(row.messages) and row.messages[0]["role"] in ("system", "developer")
        head = [{"role": "system", "content": text}] if text and not own else []
        return [*head, *(dict(message) for message in row.messages)]


def as_text(value: Any) -> str | None:
    """A reference answer as text: what is no text becomes compact JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def split_rows(rows: Sequence[Row], heldout: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(train, held-out) by a hash of each row's question: the same rows give the same split in any order.

    ``heldout`` is the share of distinct questions held out: none for 0, else at least one, and at least one is left
    to train on; rows with the same question always land on the same side. DataError for fewer than two of them.
    """
    if heldout == 0.0:
        return list(rows), []
    if not 0.0 < heldout < 1.0:
        raise UsageError(f"the held-out share must be at least 0 and less than 1, not {heldout:g}", "For example 0.2.")
    keys = [row.content_key() for row in rows]
    distinct = sorted(set(keys), key=lambda key: hashlib.blake2b(f"{seed} {key}".encode(), digest_size=16).digest())
    if len(distinct) < 2:
        raise DataError(
            f"{len(rows)} row(s) with {len(distinct)} distinct question(s) cannot be split into training and held-out",
            "Add rows, give the held-out ones in a file of their own (--eval-data FILE), or none: --heldout 0.",
        )
    count = min(max(round(len(distinct) * heldout), 1), len(distinct) - 1)
    chosen = set(distinct[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = [row for row, key in zip(rows, keys, strict=True) if key in chosen]
    return train, held


def without_overlap(train: Iterable[Row], heldout: Iterable[Row], source: str) -> tuple[list[Row], list[str]]:
    """Training rows whose question is not among the held-out ones, and a warning if some were dropped."""
    seen = {row.content_key() for row in heldout}
    train = list(train)
    kept = [row for row in train if row.content_key() not in seen]
    dropped = [row.id for row in train if row.content_key() in seen]
    if not kept:
        raise DataError(
            f"every training row also stands in {source}",
            "Held-out rows must not be trained on: give --eval-data other rows, or leave it out for a split.",
        )
    if not dropped:
        return kept, []
    names = ", ".join(dropped[:5]) + (", ..." if len(dropped) > 5 else "")
    return kept, [f"{len(dropped)} training row(s) also stand in {source} and are not trained on: {names}"]
