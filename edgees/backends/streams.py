"""Continuous batching over KV streams: which sequence runs where, whatever the engine underneath.

A *stream* holds the keys and values of one sequence. Jobs (texts to complete, likelihoods to compute) take free
streams as these become free; what another stream has already computed for the same member (a shared system prompt)
is copied, not computed again. Every call to the engine covers neighbouring streams with the same number of tokens
each: the one shape of batch that engines leave whole and in order.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from edgees import native
from edgees import tools as calls
from edgees.backends.base import Completion, Member, Progress, Request, Score, Source, TensorInfo
from edgees.backends.grammar import Grammar
from edgees.errors import UsageError
from edgees.template import ChatTemplate, Controls, TemplateRefused

log = logging.getLogger("edgees.streams")

OUTPUT_BYTES = 48 << 20
"""Room for a call's rows of logits, each of which costs 4 bytes times the vocabulary."""
SEQUENCES = 32
"""Sequences at once where nothing else is asked for."""
SHARED_PREFIX = 16
"""Shorter common beginnings are computed again: copying a stream costs about as much."""
ADMIT = 0.25
"""Free streams wait until so large a share of all is free: their prompts then go through in few, well-filled calls."""
CALL_COST = 64
"""What a call costs whatever is in it, in tokens."""
FEW_STREAMS = 4
"""So few running sequences leave room in a call: finished answers to the same prompt then draft what comes next."""
DRAFT = 7
"""Tokens that may be drafted at a time."""
ENDING = 4
"""So many last tokens tell one place of a text from another."""
REMEMBERED = 1024
"""Prompts whose answers are kept as drafts while requests keep coming."""
KEPT = 64
"""Answers to one prompt that are kept as drafts."""
FIRST_LENGTH = 512
"""Tokens of a stream while nobody knows how long the episodes will be; doubled when one needs more."""

Target = tuple[Member, tuple[int, ...], tuple[int, ...]]


class Streams(Protocol):
    """What the scheduler needs of an engine's context.

    parallel: number of streams; length: tokens that one holds; micro: tokens per call; outputs: rows of logits per
    call, at least ``parallel``.
    seamless: how a text is cut into calls changes no bit of it. ragged: a call may take pieces of different lengths.
    """

    parallel: int
    length: int
    micro: int
    outputs: int
    seamless: bool
    ragged: bool

    def copy(self, source: int, target: int) -> None:
        """Make stream ``target`` a copy of ``source``."""

    def trim(self, stream: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a stream."""

    def decode(
        self,
        streams: Sequence[int],
        tokens: Sequence[Sequence[int]],
        members: Sequence[Member],
        wanted: Sequence[Sequence[bool]],
        starts: Sequence[int],
    ) -> np.ndarray:
        """Compute ``tokens[i]``, of one length unless ragged, on stream ``streams[i]`` (neighbours, ascending).

        starts: tokens that each stream holds before it.

        Returns one handle per wanted token, in order, valid until the next call.
        """


class Text(Protocol):
    """What the scheduler needs to know of the vocabulary."""

    def ends_turn(self, token: int) -> bool: ...

    def piece(self, token: int) -> bytes: ...

    def sample(self, jobs: Sequence[Job], rows: np.ndarray) -> list[int]:
        """The next token of each job from its row of logits."""

    def logprob(self, rows: np.ndarray, tokens: Sequence[int]) -> list[float]:
        """Natural log-probability of each token under its row of logits."""


@dataclass(eq=False)
class Job:
    """One sequence on its way: ``tokens`` to compute, and what has come out so far.

    first_output: position of the first token whose logits are wanted (likelihoods; completions want the last only).
    limit: how many tokens may be generated. draft: how many of them may be guessed at a time.
    """

    index: int
    member: Member
    tokens: list[int]
    first_output: int = 0
    limit: int = 0
    request: Request | None = None
    generated: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    outcome: str = ""
    draft: int = 2
    rows: list[float] = field(default_factory=list)
    grammar: Grammar | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        assert self.request
        return self.request.prompt

    @property
    def reusable(self) -> int:
        """Leading tokens that may be taken over from another stream: those whose logits nobody wants, all but two."""
        wanted = self.first_output if self.request is None else len(self.tokens) - 1
        return max(0, min(wanted, len(self.tokens) - 2))

    def wanted(self, start: int, width: int) -> list[bool]:
        first = self.first_output if self.request is None else len(self.tokens) - 1
        return [start + j >= first for j in range(width)]

    def append(self, token: int, text: Text) -> bool:
        """Add a sampled token; True when the completion is finished."""
        request = self.request
        assert request
        if text.ends_turn(token):
            self.outcome = "stop"
            return True
        self.generated.append(token)
        self.data += text.piece(token)
        if request.stop and any(s in self.data.decode("utf-8", "ignore") for s in request.stop):
            self.outcome = "stop"
            return True
        if len(self.generated) >= self.limit:
            self.outcome = "length" if self.limit == request.max_tokens else "overflow"
            return True
        return False

    def completion(self) -> Completion:
        # An incremental decoder keeps back a character that the limit cut in two; broken ones inside are marked.
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self.data), False)
        for stop in self.request.stop if self.request else ():
            text = text.split(stop, 1)[0]
        return Completion(text, tuple(self.generated), self.outcome)


@dataclass(eq=False)
class Slot:
    """A stream: whose keys and values it holds, for which tokens, and the job that it works on."""

    id: int
    member: Member | None = None
    held: list[int] = field(default_factory=list)
    job: Job | None = None
    used: int = 0
    """When it was last given a job, for the choice of the one to be overwritten."""

    def shares(self, job: Job) -> int:
        """Leading tokens of ``job`` that may be taken over from this stream."""
        if self.member is None or not same(self.member, job.member):
            return 0
        n = 0
        for a, b in zip(self.held, job.tokens[: job.reusable], strict=False):
            if a != b:
                break
            n += 1
        return n

    @property
    def missing(self) -> int:
        return len(self.job.tokens) - len(self.held) if self.job else 0


def same(a: Member, b: Member) -> bool:
    """Whether two members are the same model (all unperturbed ones are the centre)."""
    return a.amplitude == b.amplitude and (a.amplitude == 0.0 or (a.key, a.slot) == (b.key, b.slot))


def output_rows(vocabulary: int, parallel: int, micro: int) -> int:
    """Rows of logits that a call of ``micro`` tokens may yield: within :data:`OUTPUT_BYTES`, one a stream at least."""
    return min(max(OUTPUT_BYTES // (4 * vocabulary), parallel), micro)


def runs(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots of neighbouring ids, in order."""
    run: list[Slot] = []
    for slot in sorted(slots, key=lambda s: s.id):
        if run and slot.id != run[-1].id + 1:
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


def order(job: Job) -> tuple[int, int, float, int]:
    """Members together (they share their prompts' beginnings), short prompts first (equal lengths meet)."""
    return job.member.slot, job.member.key, job.member.amplitude, len(job.tokens)


def rounds(jobs: Sequence[Job], width: int) -> list[Job]:
    """Blocks of ``width`` members: the first job of each, the second of each, and so on.

    Members answer the same rows, so a round's jobs have one length and fill whole calls, and every member's stream
    keeps the beginning that its next job shares.
    """
    by_member: dict[tuple[int, int, float], list[Job]] = {}
    for job in sorted(jobs, key=order):
        by_member.setdefault(order(job)[:3], []).append(job)
    lists = list(by_member.values())
    found = []
    for at in range(0, len(lists), width):
        block = lists[at : at + width]
        for k in range(max(map(len, block))):
            found += [mine[k] for mine in block if k < len(mine)]
    return found


class Feed(Protocol):
    """Where jobs come from, and answers go to, while others are running; see :class:`edgees.backends.base.Source`."""

    def take(self, room: int, idle: bool) -> list[Job] | None: ...

    def piece(self, job: Job, data: bytes) -> bool: ...

    def done(self, job: Job) -> None: ...


class Scheduler:
    """Runs jobs on an engine's streams. What a job yields does not depend on the others, nor on their order."""

    def __init__(self, streams: Streams, text: Text) -> None:
        self.streams, self.text = streams, text
        self.slots = [Slot(i) for i in range(streams.parallel)]
        self.tokens = 0
        self.turn = 0
        self.answers: dict[tuple[int, ...], list[list[int]]] = {}
        """The finished answers to each prompt: drafts for the other members'."""

    def forget(self) -> None:
        """The weights have changed: no stream's keys and values can be taken over any more."""
        for slot in self.slots:
            if slot.held:  # the stream must not hold what we do not know of: it may ride along in a call
                self.streams.trim(slot.id, 0)
            slot.member, slot.held, slot.job, slot.used = None, [], None, 0
        self.turn = 0  # where cuts show, the choice of streams must not depend on what was done before

    def complete(self, jobs: Sequence[Job], progress: Progress | None = None) -> None:
        """Generate until every job has its outcome."""
        queue = iter(sorted(jobs, key=order))
        done, self.tokens = 0, 0
        self.answers.clear()
        while True:
            fresh = list[Slot]()
            if sum(s.job is None for s in self.slots) >= ADMIT * len(self.slots):
                self._compact()
                fresh = self._admit_all(queue)
            done += self._first_tokens(fresh)
            self._compact()
            running = [s for s in self.slots if s.job]
            if not running and not fresh:
                return
            for run in runs(running):
                done += self._advance(run, len(running))
            if progress:
                progress(done, self.tokens)

    def serve(self, feed: Feed, progress: Progress | None = None) -> None:
        """Answer jobs as they come, until the feed has no more.

        A stream whose job is done keeps its keys and values for the next turn of the same episode. So streams are not
        moved together here: those without a job that stand between others ride along in a call, by a token that is
        forgotten at once, as a call of its own for each run of neighbours would cost far more.
        """
        done, self.tokens = 0, 0
        self.answers.clear()
        waiting: list[Job] = []
        more = True
        while True:
            running = [s for s in self.slots if s.job]
            free = len(self.slots) - len(running)
            if more and free > len(waiting):
                taken = feed.take(free - len(waiting), not running and not waiting)
                more = taken is not None
                waiting += taken or ()
            if waiting and free >= ADMIT * len(self.slots):
                fresh = [self._place(job) for job in sorted(waiting, key=order)]
                waiting = []
                done += self._first_tokens(fresh, feed)
                running = [s for s in self.slots if s.job]
            if running:
                done += self._advance(running, len(running), feed)
            elif not more and not waiting:
                return
            if progress:
                progress(done, self.tokens)

    def score(
        self, jobs: Sequence[Job], targets: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> list[Score]:
        """Likelihood of ``targets[job.index]`` for each job, in the order of the jobs."""
        waiting = rounds(jobs, len(self.slots))
        self.tokens = 0
        for at in range(0, len(waiting), len(self.slots)):
            group = waiting[at : at + len(self.slots)]
            taken = self._admit_all(iter(group))
            for slot, rows in self._prefill(taken):
                job = slot.job
                assert job
                got = len(job.rows)
                job.rows += self.text.logprob(rows, targets[job.index][got : got + len(rows)])
            for slot in taken:
                slot.job = None
            if progress:
                progress(at + len(group), self.tokens)
        return [Score(sum(j.rows), len(j.rows)) for j in jobs]

    # ---- parts
    def _first_tokens(self, fresh: Sequence[Slot], feed: Feed | None = None) -> int:
        """Compute the prompts of newly admitted jobs, and the first token of each; how many end with it."""
        first: dict[int, int] = {}
        for slot, rows in self._prefill(fresh):
            first[slot.id] = self.text.sample([slot.job] if slot.job else [], rows)[0]
        return sum(self._absorb([slot], [first[slot.id]], feed) for slot in fresh)

    def _advance(self, run: Sequence[Slot], running: int, feed: Feed | None = None) -> int:
        """The next token, or more where a guess holds, of each of these jobs; how many end. running: jobs in all."""
        jobs = [s.job for s in run if s.job]
        # Guesses only where the whole call stays small, whoever has to ride along.
        few = running <= FEW_STREAMS and run[-1].id - run[0].id < FEW_STREAMS
        new = self._new_tokens(jobs, self.streams.seamless and few)
        width = len(new[0])
        given = dict(zip((s.id for s in run), new, strict=True))
        riders = [s for s in self.slots[run[0].id : run[-1].id] if s.id not in given]
        for slot in riders:
            if len(slot.held) + width > self.streams.length:
                slot.held = slot.held[: self.streams.length - width]
                self.streams.trim(slot.id, len(slot.held))
            given[slot.id] = [new[0][0]] * width
        span = self.slots[run[0].id : run[-1].id + 1]
        rows = self.streams.decode(
            [s.id for s in span],
            [given[s.id] for s in span],
            [s.job.member if s.job else jobs[0].member for s in span],
            [[s.job is not None] * width for s in span],
            [len(s.held) for s in span],
        )
        self.tokens += len(run) * width
        for slot in riders:
            self.streams.trim(slot.id, len(slot.held))
        if width == 1:
            for slot, tokens in zip(run, new, strict=True):
                slot.held = slot.held + tokens
            return self._absorb(run, self.text.sample(jobs, rows), feed)
        pieces = zip(run, new, range(0, len(rows), width), strict=True)
        return sum(self._verify(slot, tokens, rows[at : at + width], feed) for slot, tokens, at in pieces)

    def _new_tokens(self, jobs: Sequence[Job], draft: bool) -> list[list[int]]:
        """What each job is to go on with, all of one length: its last token, and perhaps a guess at the next ones."""
        last = [[j.generated[-1]] for j in jobs]
        guesses = [self._guess(j) for j in jobs] if draft else []
        width = min(map(len, guesses), default=0)
        return [a + b[:width] for a, b in zip(last, guesses, strict=True)] if width else last

    def _guess(self, job: Job) -> list[int]:
        """How a text goes on from the tokens that the job ends with: another member's answer to the prompt, or its own.

        The longest common ending counts, of equally long ones the latest.
        """
        own = [*job.prompt, *job.generated]
        room = min(job.draft, job.limit - len(job.generated) - 1)
        texts = [own[:-1], *([*job.prompt[-ENDING:], *a] for a in self.answers.get(job.prompt, ()))]
        best, found = 1, list[int]()
        for text in texts:
            for at in range(1, len(text)):  # text[at - 1] is the last token in common
                if text[at - 1] != own[-1]:
                    continue
                n = 1
                while n < min(ENDING, at) and text[at - 1 - n] == own[-1 - n]:
                    n += 1
                if n > 1 and n >= best:
                    best, found = n, text[at : at + room]
        return found

    def _verify(self, slot: Slot, tokens: list[int], rows: np.ndarray, feed: Feed | None = None) -> int:
        """Accept drafted tokens as far as the job would have sampled them itself; 1 when it is finished."""
        job = slot.job
        assert job
        for k in range(len(tokens)):
            [token] = self.text.sample([job], rows[k : k + 1])
            done = self._absorb([slot], [token], feed)
            if done or k + 1 == len(tokens) or token != tokens[k + 1]:
                break
        slot.held = slot.held + tokens[: k + 1]
        # A guess that held is worth a longer one; each token costs a part of a step.
        job.draft = min(DRAFT, 2 * k + 1) if k + 1 == len(tokens) else max(1, k)
        if k + 1 < len(tokens):
            self.streams.trim(slot.id, len(slot.held))
        return done

    def _absorb(self, slots: Sequence[Slot], tokens: Sequence[int], feed: Feed | None = None) -> int:
        done = 0
        for slot, token in zip(slots, tokens, strict=True):
            job = slot.job
            assert job
            before = len(job.data)
            ended = job.append(token, self.text)
            if feed and len(job.data) > before and not feed.piece(job, bytes(job.data[before:])) and not ended:
                ended, job.outcome = True, "stop"
            if ended:
                if len(self.answers) >= REMEMBERED and feed:
                    self.answers.clear()
                kept = self.answers.setdefault(job.prompt, [])
                kept.append(job.generated)
                del kept[:-KEPT]
                slot.job = None
                done += 1
                if feed:
                    feed.done(job)
        return done

    def _place(self, job: Job) -> Slot:
        """Give a job to the free stream that holds most of it already, else to the one unused for longest."""
        free = [s for s in self.slots if s.job is None]
        slot = max(free, key=lambda s: (s.shares(job), -s.used, -s.id))
        if slot.shares(job) < SHARED_PREFIX:
            slot = min(free, key=lambda s: (s.used, s.id))
        self._admit(slot, job)
        self.turn += 1
        slot.used = self.turn
        return slot

    def _admit_all(self, queue: Iterator[Job]) -> list[Slot]:
        fresh = []
        for slot in self.slots:
            if slot.job is None and (job := next(queue, None)):
                self._admit(slot, job)
                fresh.append(slot)
        return fresh

    def _admit(self, slot: Slot, job: Job) -> None:
        """Give a job to a stream, with whatever some stream has already computed for its member."""
        best = max(self.slots, key=lambda s: (s.shares(job), s is slot))
        if best is not slot and best.shares(job) < SHARED_PREFIX:
            best = slot
        shared = best.shares(job)
        if best is not slot:
            self.streams.copy(best.id, slot.id)
        self.streams.trim(slot.id, shared)
        slot.job, slot.member, slot.held = job, job.member, job.tokens[:shared]

    def _prefill(self, slots: Sequence[Slot]) -> Iterator[tuple[Slot, np.ndarray]]:
        """Compute all that the slots' jobs still lack; yields (slot, handles of its wanted rows) as they come.

        Of several jobs of one member with a common beginning the first is computed whole; the others take it over.
        """
        waiting = list(slots)
        while waiting:
            leaders: list[Slot] = []
            followers: list[Slot] = []
            for slot in waiting:
                (followers if any(self._follows(slot, x) for x in leaders) else leaders).append(slot)
            while leaders:
                run = next(runs(leaders))
                group, widths = self._piece(run)
                jobs = [s.job for s in group if s.job]
                todo = list(zip(group, jobs, widths, strict=True))
                pieces = [j.tokens[len(s.held) : len(s.held) + n] for s, j, n in todo]
                wanted = [j.wanted(len(s.held), n) for s, j, n in todo]
                starts = [len(s.held) for s in group]
                rows = self.streams.decode([s.id for s in group], pieces, [j.member for j in jobs], wanted, starts)
                self.tokens += sum(widths)
                at = 0
                for slot, piece, want in zip(group, pieces, wanted, strict=True):
                    slot.held = slot.held + piece
                    if any(want):
                        yield slot, rows[at : at + sum(want)]
                        at += sum(want)
                leaders = [s for s in leaders if s.missing]
            for slot in followers:
                assert slot.job
                self._admit(slot, slot.job)
            waiting = followers

    def _piece(self, run: list[Slot]) -> tuple[list[Slot], list[int]]:
        """The next call for neighbouring streams: how many of them, and how many tokens of each, so as to fill it.

        Bounded by the tokens of a call and by the rows of logits that it may yield. A ragged call costs what its
        longest piece costs for each stream.
        """
        best: tuple[list[Slot], list[int]] = (run[:1], [1])
        worth = 0.0
        count = min(len(run), self.streams.micro)
        while count:
            group = run[:count]
            missing = [s.missing for s in group]
            most = min((max if self.streams.ragged else min)(missing), self.streams.micro // count)
            for width in range(most, 0, -1):
                widths = [self._cut(n, width) for n in missing]
                if all(widths) and self._outputs(group, widths) <= self.streams.outputs:
                    gain = sum(widths) / (CALL_COST + count * max(widths))
                    if gain > worth:
                        best, worth = (group, widths), gain
                    break
            count //= 2
        return best

    def _cut(self, missing: int, width: int) -> int:
        """How many of a text's missing tokens, at most ``width``, may go into a call; 0: they must be cut otherwise.

        Where cuts show, no piece is, or leaves, a single token of a longer text: attention to a single token is another
        kernel, whose sums differ in the last bit.
        """
        if missing <= width:
            return missing
        if self.streams.seamless:
            return width
        if missing - width == 1:
            width = width - 1 if self.streams.ragged else 0
        return width if width > 1 else 0

    @staticmethod
    def _outputs(group: Sequence[Slot], widths: Sequence[int]) -> int:
        return sum(sum(s.job.wanted(len(s.held), n)) for s, n in zip(group, widths, strict=True) if s.job)

    @staticmethod
    def _follows(slot: Slot, leader: Slot) -> bool:
        """Whether ``slot`` should wait for ``leader``: same member, a long common beginning not yet held."""
        a, b = slot.job, leader.job
        assert a and b
        if len(slot.held) >= SHARED_PREFIX or a.reusable < SHARED_PREFIX or not same(a.member, b.member):
            return False
        return len(b.tokens) >= SHARED_PREFIX and a.tokens[:SHARED_PREFIX] == b.tokens[:SHARED_PREFIX]

    def _compact(self) -> None:
        """Move running streams down into gaps, so that one call covers them all."""
        while True:
            free = next((s for s in self.slots if not s.job), None)
            last = next((s for s in reversed(self.slots) if s.job), None)
            if free is None or last is None or free.id > last.id:
                return
            self.streams.copy(last.id, free.id)
            free.job, free.member, free.held = last.job, last.member, list(last.held)
            last.job = None


class StreamEngine:
    """What engines with streams have in common: text, requests to jobs, sampling and likelihoods.

    vocabulary: numbers in a row of logits. Handles of rows are addresses of float32 in host memory.
    """

    name: str
    vocabulary: int
    trained_context: int
    template: ChatTemplate
    _context_wanted: int  # 0: by need
    _tensors: list[TensorInfo]
    _frozen: list[tuple[str, str]]
    _bos: int  # -1: there is none
    _add_bos: bool
    _stop: frozenset[int]

    # ---- what it is
    @property
    def tensors(self) -> list[TensorInfo]:
        return list(self._tensors)

    @property
    def frozen(self) -> list[tuple[str, str]]:
        return list(self._frozen)

    @property
    def context_length(self) -> int:
        return min(self._context_wanted or self.trained_context, self.trained_context)

    # ---- text
    def _tokenize(self, text: str, special: bool) -> list[int]:
        raise NotImplementedError

    def _control(self, token: int) -> bool:
        """Whether a token is none of text."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        return self._tokenize(text, special=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        said = calls.normal(messages, developer="developer" in self.template.source)
        if not calls.needed(said, tools):
            return self._chat(said, ())
        if self.template.supports_tools:
            with contextlib.suppress(TemplateRefused):  # several calls at once, say; then in plain words
                return self._chat(said, tools)
        return self._chat(calls.plain(said, tools), ())

    def _chat(self, said: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        hidden, shown, marks = self._controls.hide(said, tools, self.template.source)
        try:
            text = self.template.render(hidden, tools=shown or None)
        except TemplateRefused:
            if not any(m["role"] == "system" for m in hidden):
                raise
            text = self.template.render(calls.folded(hidden), tools=shown or None)
        tokens = self._with_hidden(text, marks) if marks else self._tokenize(text, special=True)
        if self._add_bos and tokens[:1] != [self._bos]:  # exactly one, whether the template writes it or not
            tokens.insert(0, self._bos)
        return tokens

    def _with_hidden(self, text: str, marks: Mapping[str, str]) -> list[int]:
        """Tokens of a rendered text in which some of what people wrote is hidden (:class:`edgees.template.Controls`).

        The text is cut at the template's own control tokens, where every tokenizer cuts it as well.
        """
        parts = self._controls.split(text, marks)
        whole = "".join(parts)
        if self._controls.split(whole, {}) == parts:  # nothing comes to light that was hidden
            return self._tokenize(whole, special=True)
        tokens: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                tokens += self._tokenize(part, special=True)
                continue
            space = part[: len(part) - len(part.lstrip())]
            if i and space and self._swallows(parts[i - 1] + space, parts[i - 1]):
                part = part[len(space) :]
            space = part[len(part.rstrip()) :]
            if i + 1 < len(parts) and space and self._swallows(space + parts[i + 1], parts[i + 1]):
                part = part[: len(part) - len(space)]
            tokens += self._tokenize(part, special=False)
        return tokens

    def _swallows(self, text: str, token: str) -> bool:
        """Whether a control token takes the blanks beside it along, as Phi-3's do."""
        return self._tokenize(text, special=True) == self._tokenize(token, special=True)

    @cached_property
    def _controls(self) -> Controls:
        return Controls(self.control_texts())

    def control_texts(self) -> list[str]:
        """The spellings of the vocabulary's control tokens."""
        raise NotImplementedError

    def end_of_turn(self) -> frozenset[int]:
        """Token ids at which a generated turn ends."""
        return self._stop

    def ends_turn(self, token: int) -> bool:
        return token in self._stop

    def _behind_answer(self) -> set[int]:
        """The control token that the template puts behind an answer."""
        mark = "edgees-answer"
        try:
            text = self.template.render(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}], add_generation_prompt=False
            )
        except Exception as error:  # a template may refuse such a conversation; then the model's own list has to do
            log.debug("end of turn not probed: %s", error)
            return set()
        tail = self._tokenize(text.split(mark)[-1], special=True)
        return {tail[0]} if tail and self._control(tail[0]) else set()

    # ---- running

    def scheduler(self, length: int, jobs: int) -> Scheduler:
        """One whose streams hold ``length`` tokens each, for ``jobs`` jobs."""
        raise NotImplementedError

    def own(self, member: Member) -> None:
        """:raises UsageError: a member that cannot be run here."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        """Complete all requests; order and company in the batch change nothing in any of them."""
        results: list[Completion] = [Completion("", (), "overflow")] * len(requests)
        jobs: list[Job] = []
        limit = self.context_length
        for i, r in enumerate(requests):
            self.own(r.member)
            if not r.prompt:
                raise UsageError("a prompt needs at least one token")
            if len(r.prompt) < limit:
                room = min(r.max_tokens, limit - len(r.prompt))
                jobs.append(Job(i, r.member, list(r.prompt), limit=room, request=r))
        if jobs:
            scheduler = self.scheduler(max(len(j.tokens) + j.limit for j in jobs), len(jobs))
            scheduler.complete(jobs, progress)
        for job in jobs:
            results[job.index] = job.completion()
        return results

    def serve(self, source: Source, progress: Progress | None = None) -> None:
        """Answer requests as they come; see :class:`edgees.backends.base.Source`."""
        feed = _Feed(self, source)
        while feed.open:
            scheduler = self.scheduler(feed.length, SEQUENCES)
            # Where cuts show, what was grown by earlier work must not show either.
            have = scheduler.streams.length if scheduler.streams.seamless else feed.length
            feed.length = min(have, self.context_length)
            scheduler.serve(feed, progress)

    def loglik(
        self, requests: Sequence[tuple[Member, tuple[int, ...], tuple[int, ...]]], progress: Progress | None = None
    ) -> list[Score]:
        """Log-likelihood of each target after its prompt; NaN where both together do not fit the context."""
        scores = [Score(float("nan"), len(target)) for _, _, target in requests]
        jobs = []
        for i, (member, prompt, target) in enumerate(requests):
            self.own(member)
            if not prompt:
                raise UsageError("a likelihood needs at least one token of prompt")
            if not target:
                scores[i] = Score(0.0, 0)
            elif len(prompt) + len(target) <= self.context_length + 1:
                jobs.append(Job(i, member, [*prompt, *target[:-1]], first_output=len(prompt) - 1))
        if jobs:
            scheduler = self.scheduler(max(len(j.tokens) for j in jobs), len(jobs))
            found = scheduler.score(jobs, [target for _, _, target in requests], progress)
            for job, score in zip(jobs, found, strict=True):
                scores[job.index] = score
        return scores

    def sample(self, jobs: Sequence[Job], rows: np.ndarray) -> list[int]:
        """Greedy, or by Gumbel noise of (seed, step) alone: members of a row share it and differ by weights only."""
        best = np.empty(len(jobs), np.int32)
        code = native.lib().edgees_logprob(
            native.pointer(rows), len(jobs), self.vocabulary, None, None, native.pointer(best)
        )
        native.check(code, "sampling")
        result = [int(b) for b in best]
        for i, job in enumerate(jobs):
            request = job.request
            if request is None or not (request.temperature > 0 or request.grammar):
                continue
            scores = self._row(rows[i])
            if request.temperature > 0:
                noise = self._gumbel(request.seed, len(job.generated))
                scores = scores / np.float32(request.temperature) + noise
            if request.grammar:
                job.grammar = job.grammar or self._grammar(request.grammar).begin()
                result[i] = job.grammar.choose(scores)
            else:
                result[i] = int(np.argmax(scores))
        return result

    def _grammar(self, text: str) -> Grammar:
        """At its beginning. :raises UsageError: it cannot be read, or no reply of this engine can follow one."""
        raise UsageError(
            f"engine {self.name} cannot make replies follow a grammar", "engine = llamacpp can, or leave grammar out"
        )

    def check_grammar(self, grammar: str) -> None:
        self._grammar(grammar)

    def logprob(self, rows: np.ndarray, tokens: Sequence[int]) -> list[float]:
        wanted, out = np.array(tokens, np.int32), np.empty(len(rows), np.float64)
        code = native.lib().edgees_logprob(
            native.pointer(rows), len(rows), self.vocabulary, native.pointer(wanted), native.pointer(out), None
        )
        native.check(code, "likelihood")
        return [float(x) for x in out]

    def _row(self, address: np.uint64) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_float * self.vocabulary).from_address(int(address)))

    # For the members of a row, who draw it at the same time; an entry is as large as the vocabulary.
    @lru_cache(maxsize=32)  # noqa: B019 - the engine outlives the cache's entries
    def _gumbel(self, seed: int, step: int) -> np.ndarray:
        raw = np.random.Philox(key=[seed & (2**64 - 1), step]).random_raw(self.vocabulary)
        u = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return np.asarray(-np.log(-np.log(u)), np.float32)


class _Feed:
    """A source's requests as jobs; one that needs longer streams than there are waits until they have been remade."""

    def __init__(self, engine: StreamEngine, source: Source) -> None:
        self.engine, self.source = engine, source
        self.length = FIRST_LENGTH
        self.open = True
        self._long: list[Job] = []

    def take(self, room: int, idle: bool) -> list[Job] | None:
        if self._long:
            if not idle:
                return []
            need = max(len(j.tokens) + j.limit for j in self._long)
            if need > self.length:
                self.length = max(need, 2 * self.length)
                return None
            jobs, self._long = self._long[:room], self._long[room:]
            return jobs
        taken = self.source.take(room, idle)
        if taken is None:
            self.open = False
            return None
        return [job for ticket, request in taken if (job := self._job(ticket, request))]

    def _job(self, ticket: int, request: Request) -> Job | None:
        limit = self.engine.context_length
        self.engine.own(request.member)
        if not request.prompt:
            raise UsageError("a prompt needs at least one token")
        if len(request.prompt) >= limit:
            self.source.done(ticket, Completion("", (), "overflow"))
            return None
        room = min(request.max_tokens, limit - len(request.prompt))
        job = Job(ticket, request.member, list(request.prompt), limit=room, request=request)
        if len(job.tokens) + room > self.length:
            self._long.append(job)
            return None
        return job

    def piece(self, job: Job, data: bytes) -> bool:
        return self.source.piece(job.index, data)

    def done(self, job: Job) -> None:
        self.source.done(job.index, job.completion())
