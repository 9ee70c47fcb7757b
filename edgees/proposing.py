"""When new contexts are proposed, out of what, and at whose cost: between the evolvers and a run.

Evolvers see training rows only: the answers of the last generation (from its trace, so that a resumed run shows them
the same), and whatever they let the unperturbed model play, within ``evolve_budget``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgees import evolve, rewards, rollout
from edgees.backends.base import CENTRE, Engine, Request
from edgees.config import Config
from edgees.context import Context
from edgees.errors import TemplateError, UsageError
from edgees.evolve import reflect
from edgees.evolve.redaction import Redaction
from edgees.history import History
from edgees.opening import Setup, open_engine
from edgees.population import RowOrder, request_seed
from edgees.tasks.rows import Row

REPLY = 512
"""Tokens of a reflecting model's reply, where it is a local one."""
CONTEXT = 4096
"""Tokens that a sequence of a reflecting GGUF may have."""
PRACTICE = 16
"""Training rows that are played where evolvers would see nothing else."""
SHOWN = 96
"""Training rows whose reference answers evolvers see where nothing was answered yet."""


def opened(
    config: Config,
    stack: ExitStack,
    local: Callable[[str], str],
    open_gguf: Callable[[Path], Callable[[str], str]],
    folder: Path | None = None,
) -> tuple[list[evolve.Evolver], reflect.Reflector]:
    """Evolvers and reflecting model of a configuration, closed with ``stack``. folder: the run's, for logs.

    :raises UsageError: there is no such evolver, model or hook. :raises MissingExtra: its package is missing.
    """
    log = folder and folder / "evolve.log"
    evolvers = evolve.load(config.evolve, log=log)
    stack.callback(evolve.close, evolvers)
    redact = Redaction(config.redact or None, log=log)
    stack.callback(redact.close)
    reflector = reflect.open_reflector(config.reflector, local=local, open_gguf=open_gguf, redact=redact, log=log)
    stack.callback(reflector.close)
    return evolvers, reflector


def check(config: Config) -> None:
    """:raises UsageError, MissingExtra: as :func:`opened`, before anything dear is done."""
    if config.evolve:
        with ExitStack() as stack:
            opened(config, stack, lambda prompt: "", lambda path: lambda prompt: "")


class Proposer:
    """Proposals of a run. ``spent``: rollouts and tokens of the one under way."""

    def __init__(self, setup: Setup, history: History, folder: Path, stack: ExitStack) -> None:
        """:raises UsageError: an evolver or reflecting model that there is not; MissingExtra: its package."""
        c = setup.config
        self.setup, self.history, self.folder = setup, history, folder
        self.rollouts = self.tokens = 0
        self._stack = stack
        self._gguf: Engine | None = None
        self.evolvers, self._reflect = opened(c, stack, self._reply_of(setup.engine), self._open_gguf, folder)
        self._rows = {row.id: row for row in setup.task.train}
        longest: dict[tuple[str, ...], Row] = {}
        for row in sorted(setup.task.train, key=lambda row: sum(len(m["content"]) for m in row.messages)):
            longest[tuple(m["role"] for m in row.messages)] = row
        self._longest = list(longest.values())

    def propose(self, generation: int, context: Context, wanted: int) -> dict[str, Any]:
        """A line of the journal but for its time: what is to be tried, where it comes from, what did not work."""
        number = len(self.history.proposals)
        self.rollouts = self.tokens = 0
        c = self.setup.config
        folders = [self.folder / "evolve" / f"{n:06d}" for n in (number, number - 1)]
        shutil.rmtree(folders[0], ignore_errors=True)  # of a process that was killed before this was in the journal
        folders[0].mkdir(parents=True)
        order = RowOrder(c.seed + 1, len(self._rows), len(self._rows)).rows(number)
        situation = evolve.Situation(
            context=context,
            attempts=self._attempts(generation, context, order),
            reflect=self._reflect,
            play=lambda tried, rows: self._play(generation, tried, rows),
            rows=[self.setup.task.train[i].id for i in order],
            count=lambda text: len(self.setup.engine.encode(text)),
            limit=c.evolve_tokens,
            wanted=wanted,
            seed=request_seed(c.seed, generation, "proposal"),
            folder=folders[0],
            before=folders[1] if folders[1].is_dir() else None,
        )
        made = evolve.propose(self.evolvers, situation)
        found, failures = [], list(made.failures)
        for candidate in made.candidates:
            if reason := self._unplayable(candidate.context, context):
                failures.append(f"{candidate.origin}: {reason}")
            else:
                found.append(candidate)
        return {
            "proposal": number, "generation": generation, "from": context.digest,
            "candidates": [
                {"digest": m.context.digest, "origin": m.origin, "context": m.context.to_dict()}
                for m in found
            ],
            "failures": failures, "rollouts": self.rollouts, "tokens": self.tokens,
        }  # fmt: skip

    def _unplayable(self, tried: Context, force: Context) -> str:
        """Why rows cannot be played in a context, "" where they can: one that the model's chat template refuses, or
        that leaves no room, would end the run, and not only its own trial. Tried with the longest row of each kind."""
        for row in self._longest:
            try:
                need, before = self._needed(row, tried), self._needed(row, force)
            except (TemplateError, UsageError) as error:
                return error.message
            if need > self.setup.engine.context_length >= before:
                where = f"row {row.id}" if row.messages else "what is played"
                return f"it leaves no room for {where} in the {self.setup.engine.context_length} tokens that there are"
        return ""

    def _needed(self, row: Row, context: Context) -> int:
        """Tokens of a question with its reference answer, where that counts; of an episode those before it."""
        setup = self.setup
        if setup.config.agent_context == "files" and setup.agents is not None:
            return 0
        if not row.messages:
            asked = [{"role": "user", "content": "?"}]
            system = [{"role": "system", "content": context.system}] if context.system else []
            return len(setup.engine.encode_chat(context.apply([*system, *asked], same=True))) + 1
        conversation = setup.conversation(row, context)
        if setup.config.loglik and row.answer is not None:
            return sum(map(len, rollout.reference(setup.engine, conversation, row.answer)))
        return len(setup.engine.encode_chat(conversation)) + 1

    def _attempts(self, generation: int, context: Context, order: Sequence[int]) -> list[evolve.Attempt]:
        """Of the last generation; where nothing was answered, reference answers, or tries made for the purpose."""
        trace = self.folder / "traces" / f"{generation - 1:06d}.jsonl"
        if generation and trace.exists():
            lines = trace.read_text(encoding="utf-8", errors="replace").split("\n")  # a reply may have other line ends
            told = [json.loads(line) for line in lines if line]
            return [self._attempt(self._rows[t["row"]], t) for t in told if t["row"] in self._rows]
        rows = [self.setup.task.train[i] for i in order[:SHOWN]]
        found = [self._attempt(row, {}) for row in rows if row.answer is not None and row.messages]
        if found:
            return found
        with suppress(evolve.Spent):
            return self._play(generation, context, [row.id for row in rows[:PRACTICE]])
        return []

    @staticmethod
    def _attempt(row: Row, told: dict[str, Any]) -> evolve.Attempt:
        """told: a line of a trace; {}: nothing was answered."""
        messages: Sequence[Any] = told.get("messages", ())[told.get("given", 0) :] or row.messages
        if told and "messages" not in told:
            messages = [*row.messages, {"role": "assistant", "content": told["answer"]}]
        return evolve.Attempt(
            row.id, tuple(messages), told.get("reward"), row.answer, told.get("fault", ""), told.get("context", "")
        )

    def _play(self, generation: int, context: Context, ids: Sequence[str]) -> list[evolve.Attempt]:
        rows = [self._rows[name] for name in ids]
        c = self.setup.config
        allowed = c.evolve_budget * c.members * c.rows * (generation + c.evolve_every)
        before = sum(p["rollouts"] for p in self.history.proposals)
        if before + self.rollouts + len(rows) > allowed:
            raise evolve.Spent(f"its share of the rollouts is used up ({before + self.rollouts} of {allowed:g})")
        settings = self.setup.replies(generation, 0.0, context)
        played = rollout.play(self.setup.engine, rollout.every([CENTRE], rows), settings)
        scores = rewards.judge(self.setup.scorer, played)
        self.rollouts += len(rows)
        self.tokens += sum(len(t.tokens) for t in played)
        found = []
        for t, value in zip(played, scores.rewards, strict=True):
            told: dict[str, Any] = {
                "answer": t.completion, "reward": value if value == value else None, "fault": t.fault,
                "context": context.digest,
            }  # fmt: skip
            found.append(self._attempt(t.row, told | ({"messages": t.messages, "given": t.given} if t.episode else {})))
        return found

    def _reply_of(self, engine: Engine) -> Callable[[str], str]:
        def reply(prompt: str) -> str:
            tokens = tuple(engine.encode_chat([{"role": "user", "content": prompt}]))
            room = engine.context_length - len(tokens)
            if room < 16:
                raise UsageError(
                    f"{len(tokens)} tokens to reflect on do not fit the context of {engine.context_length}"
                )
            [done] = engine.generate([Request(CENTRE, tokens, min(REPLY, room))])
            self.tokens += len(done.tokens)
            return done.text

        return reply

    def _open_gguf(self, path: Path) -> Callable[[str], str]:
        """Another model, opened when it is first asked and kept; its context is its own."""

        def reply(prompt: str) -> str:
            if self._gguf is None:
                c = replace(self.setup.config, engine="llamacpp", model=str(path), context=CONTEXT, params="")
                self._gguf = self._stack.enter_context(closing(open_engine(c)))
            return self._reply_of(self._gguf)(prompt)

        return reply
