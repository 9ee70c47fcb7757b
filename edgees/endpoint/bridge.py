"""Between the server's thread and the engine's: sessions, the queue of requests, and the way back of their answers.

Whatever order requests are taken in, their answers are the same: a request's sampling seed comes from its session's
policy and its number within the session, and no answer depends on the company in a batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

from edgees import population
from edgees.backends.base import Completion, Engine, Member, Request
from edgees.context import Context
from edgees.endpoint.wanted import ApiError, Reply, Wanted, decode
from edgees.episodes import Message
from edgees.errors import EdgeesError, UsageError

log = logging.getLogger("edgees.endpoint")

PATIENCE_S = 0.2
"""How long the engine's thread waits for a request before it is told that there is none."""
REMEMBERED = 100_000
"""Tokens of closed sessions that get 410 rather than 401."""


def request_seed(seed: int, generation: int, row: str, turn: int, index: int = 0) -> int:
    """31-bit sampling seed of a session's request ``turn`` (from 0), choice ``index``, shared by all members.

    That of :func:`edgees.population.request_seed` for the row ``"{row}[ turn {turn}][ choice {index}]"``, as of
    episodes that are played in this process.
    """
    which = row + f" turn {turn}" * (turn > 0) + f" choice {index}" * (index > 0)
    return population.request_seed(seed, generation, which)


@dataclass(frozen=True)
class Policy:
    """What a session may do, and how its answers are sampled, whatever the client asks for.

    max_tokens: of one answer; a client may ask for fewer. seed: the run's. max_requests, max_session_tokens: answers,
    and generated tokens, of the whole session; 0: no limit. client_sampling: the client's temperature and seed are
    honoured. record: the session's calls are kept. system: message for conversations that bring none. context: put into
    every conversation; files: not there, the client reads it from files.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    generation: int = 0
    row: str = ""
    max_requests: int = 0
    max_session_tokens: int = 0
    client_sampling: bool = False
    record: bool = True
    system: str = ""
    context: Context = field(default_factory=Context)
    files: bool = False


@dataclass
class Call:
    """One answer and what was asked for. model, temperature, seed, max_tokens: the client's words, None: none.

    outcome: ``running``; ``stop``, ``length``, ``overflow`` (the context was full); ``gone`` (the client hung up, or
    the session was closed); ``error``. seconds: from its arrival; tokens_in, tokens_out: numbers. error: what the
    client was told instead of an answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    model: str
    temperature: float | None
    seed: int | None
    max_tokens: int | None
    turn: int
    text: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    outcome: str = "running"
    error: str = ""
    reply: Message | None = None
    """The answer as the client got it, tool calls included."""


@dataclass(eq=False)
class Session:
    """One client's way to one member, at a base URL of its own.

    base_url: of Anthropic clients; OpenAI's want ``base_url + "/v1"``. reward, parts: what ``POST base_url/reward``
    said last; reward_error: why it said nothing that is a reward. limited: the limit of the policy (``requests`` or
    ``tokens``) that the client ran into; empty: none.
    """

    bridge: Bridge
    token: str
    base_url: str
    member: Member
    policy: Policy
    calls: list[Call] = field(default_factory=list)
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""
    limited: str = ""
    closed: bool = False
    turns: int = 0
    tokens: int = 0

    def close(self) -> None:
        """Whatever still comes, or is being answered, gets 410."""
        self.bridge.close_session(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def messages(self) -> tuple[Message, ...]:
        """The longest conversation, of equally long ones the latest, with the answer to it."""
        if not self.calls:
            return ()
        call = max(self.calls, key=lambda c: (len(c.messages), c.turn))
        if call.reply is None and not call.text:  # it has none
            return call.messages
        return (*call.messages, call.reply or {"role": "assistant", "content": call.text})

    def post_reward(self, data: bytes) -> None:
        """What was posted before counts no more. :raises ApiError: 400, this is no reward."""
        self.reward, self.parts = None, {}
        try:
            body = decode(data)
        except ApiError as error:
            self.reward_error = f"the agent posted a reward that cannot be read: {error.message}"
            raise
        value = body.get("reward")
        if not is_number(value):
            self.reward_error = f"the agent posted {ascii(value)[:100]} as its reward, which is no finite number"
            raise ApiError(400, "reward must be a finite number", param="reward")
        self.reward, self.reward_error = float(value), ""
        for name, part in body.items():
            if name != "reward" and is_number(part):
                self.parts[name] = float(part)


def is_number(value: Any) -> TypeGuard[int | float]:
    """A finite one that a float can hold; true and "0.5" are none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


Event = tuple[int, bytes | None]
"""(choice, more of its text as UTF-8; None: it has ended)"""


class Exchange:
    """One answer on its way. Made and awaited on the server's loop, worked on by the engine's thread.

    counting: only the tokens of the prompt are wanted. started: resolves when the engine takes it on, ended: when there
    is an answer; an ApiError instead of one resolves both. events: of a streamed answer.
    """

    def __init__(
        self,
        session: Session,
        wanted: Wanted,
        index: int = 0,
        events: asyncio.Queue[Event] | None = None,
        counting: bool = False,
    ) -> None:
        self.session, self.wanted, self.index, self.counting = session, wanted, index, counting
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[ApiError | None] = loop.create_future()
        self.ended: asyncio.Future[Completion | ApiError] = loop.create_future()
        self.events = events
        self.data = bytearray()
        self.gone = False
        self.began = time.monotonic()
        self.call = Call(
            wanted.messages or ({"role": "user", "content": wanted.prompt or ""},),
            wanted.tools,
            wanted.model,
            wanted.temperature,
            wanted.seed,
            wanted.max_tokens,
            session.turns,
        )

    def sampling(self) -> tuple[float, int]:
        """(temperature, seed)"""
        policy, wanted, call = self.session.policy, self.wanted, self.call
        if not policy.client_sampling:
            seed = request_seed(policy.seed, policy.generation, policy.row, call.turn, self.index)
            return policy.temperature, seed
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed + self.index
        return policy.temperature if wanted.temperature is None else wanted.temperature, seed & 0x7FFFFFFF

    def call_ids(self, most: int = 16) -> list[str]:
        """Names for tool calls: nine letters and digits, as some templates want, the same for all members."""
        digests = (hashlib.blake2b(f"{self.call.turn} {self.index} {k}".encode(), digest_size=4) for k in range(most))
        return ["c" + digest.hexdigest() for digest in digests]

    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        text = self.data.decode("utf-8", "replace") if self.wanted.stop else ""
        places = [(at, stop) for stop in self.wanted.stop if (at := text.find(stop)) >= 0]
        return min(places)[1] if places else None

    def resolve(self, result: Completion | ApiError) -> None:
        """On the loop."""
        if not self.started.done():
            self.started.set_result(result if isinstance(result, ApiError) else None)
        if not self.ended.done():
            self.ended.set_result(result)
            if self.events is not None:
                self.events.put_nowait((self.index, None))

    def start(self) -> None:
        """On the loop."""
        if not self.started.done():
            self.started.set_result(None)

    def record(self, reply: Reply) -> None:
        self.call.reply = reply.message()


class Bridge:
    """A :class:`edgees.backends.base.Source` fed from another thread.

    engine: tokenises what is taken, on the engine's thread. queue: requests that may wait.
    """

    def __init__(self, engine: Engine, queue: int) -> None:
        self.engine, self.limit = engine, queue
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Condition()
        self._queue: deque[Exchange] = deque()
        self._running: dict[int, Exchange] = {}
        self._tickets = 0
        self._finish = self._closed = False
        self._sessions: dict[str, Session] = {}
        self._stale: OrderedDict[str, None] = OrderedDict()
        self._outbox: deque[Callable[[], None]] = deque()
        self._woken = False

    # ---- sessions, from any thread
    def add(self, session: Session) -> None:
        with self._ready:
            self._sessions[session.token] = session

    def session(self, token: str) -> Session:
        """:raises ApiError: 401 unknown, 410 closed."""
        with self._ready:
            found = self._sessions.get(token)
            if found is not None:
                return found
            if token in self._stale:
                raise ApiError(410, "this session is over", code="session_closed")
        raise ApiError(401, "no session has this base URL", code="invalid_api_key")

    def close_session(self, session: Session) -> None:
        with self._ready:
            if session.closed:
                return
            session.closed = True
            self._sessions.pop(session.token, None)
            self._stale[session.token] = None
            while len(self._stale) > REMEMBERED:
                self._stale.popitem(last=False)
            self._refuse(lambda x: x.session is session, ApiError(410, "this session is over", code="session_closed"))

    def finish(self) -> None:
        """The engine's ``serve`` is to end when what runs has been answered; a later one goes on with the rest."""
        with self._ready:
            self._finish = True
            self._ready.notify_all()

    def close(self) -> None:
        """Nothing is answered any more: what waits or runs, and whatever comes, gets 503."""
        with self._ready:
            self._closed = True
            self._refuse(lambda x: True, ApiError(503, "the server is closing", code="closing"))
            self._ready.notify_all()

    def _refuse(self, which: Callable[[Exchange], bool], error: ApiError) -> None:
        for exchange in [x for x in (*self._queue, *self._running.values()) if which(x) and not x.gone]:
            self._leave(exchange)
            self._post(partial(exchange.resolve, error))

    # ---- from the loop
    def put(self, exchanges: Sequence[Exchange]) -> None:
        """Queue the answers that one request wants. :raises ApiError: 410, 429, 503."""
        session = exchanges[0].session
        policy = session.policy
        counting = exchanges[0].counting
        with self._ready:
            if session.closed:
                raise ApiError(410, "this session is over", code="session_closed")
            if self._closed:
                raise ApiError(503, "the server is closing", code="closing")
            if not counting:
                over = "requests" if policy.max_requests and session.turns >= policy.max_requests else ""
                if policy.max_session_tokens and session.tokens >= policy.max_session_tokens:
                    over = "tokens"
                if over:
                    session.limited = over
                    no_retry = {"x-should-retry": "false"}
                    message = f"this session has had all the {over} that it may have"
                    raise ApiError(429, message, code="insufficient_quota", headers=no_retry)
            if len(self._queue) + len(exchanges) > self.limit:
                wait = {"retry-after": "1"}
                raise ApiError(
                    429, "too many requests are waiting: try again", code="rate_limit_exceeded", headers=wait
                )
            if not counting:
                session.turns += 1
                if policy.record:
                    session.calls += [x.call for x in exchanges]
            self._queue += exchanges
            self._ready.notify_all()

    def leave(self, exchanges: Sequence[Exchange]) -> None:
        """The client has hung up, or has all that it wanted."""
        with self._ready:
            for exchange in exchanges:
                if not exchange.ended.done() and not exchange.gone:
                    self._leave(exchange)

    def _leave(self, exchange: Exchange) -> None:
        exchange.gone = True
        self._close_call(exchange, "gone")
        if exchange in self._queue:
            self._queue.remove(exchange)

    # ---- from the engine's thread
    def take(self, room: int, idle: bool) -> list[tuple[int, Request]] | None:
        found: list[tuple[int, Request]] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < room:
            with self._ready:
                while idle and not (found or self._queue or self._finish or self._closed):
                    if not self._ready.wait(deadline - time.monotonic()):
                        return []
                if self._finish or self._closed:
                    if found:
                        return found
                    self._finish = False
                    return None
                if not self._queue:
                    return found
                exchange = self._queue.popleft()
                self._tickets += 1
                ticket = self._tickets
                self._running[ticket] = exchange
            request = self._request(exchange)
            if request is None or exchange.gone:
                with self._ready:
                    del self._running[ticket]
            else:
                found.append((ticket, request))
                self._post(exchange.start)
        return found

    def _request(self, exchange: Exchange) -> Request | None:
        """None: it has been answered already."""
        wanted, policy = exchange.wanted, exchange.session.policy
        try:
            if wanted.prompt is None:
                context = Context() if policy.files else policy.context
                messages = wanted.messages
                if policy.system and messages[0]["role"] not in ("system", "developer"):
                    messages = ({"role": "system", "content": policy.system}, *messages)
                tokens = self.engine.encode_chat(context.apply(messages, whole=True, same=True), wanted.tools)
            else:
                tokens = self.engine.encode(wanted.prompt)
        except Exception as error:  # a conversation that the template refuses, or a text that is none
            log.debug("a conversation was refused", exc_info=True)
            said = f"{error.message} ({error.hint})" if isinstance(error, EdgeesError) and error.hint else str(error)
            kind = "" if isinstance(error, EdgeesError) else f"{type(error).__name__}: "
            refused = ApiError(400, f"the conversation was refused: {kind}{said}", param="messages")
            self._end(exchange, refused, "error")
            return None
        exchange.call.tokens_in = len(tokens)
        room = self.engine.context_length
        if exchange.counting:
            self._end(exchange, Completion("", (), "stop"))
        elif not tokens:
            self._end(exchange, ApiError(400, "the prompt is empty", param="prompt"), "error")
        elif len(tokens) >= room:
            self._end(exchange, too_long(len(tokens), room), "overflow")
        else:
            most = policy.max_tokens if wanted.max_tokens is None else min(wanted.max_tokens, policy.max_tokens)
            if policy.max_session_tokens:
                most = max(1, min(most, policy.max_session_tokens - exchange.session.tokens))
            grammar = wanted.grammar
            try:
                if grammar:
                    self.engine.check_grammar(grammar)
            except UsageError as error:
                if wanted.firm:
                    self._end(exchange, ApiError(400, f"{error.message}: ask for text"), "error")
                    return None
                grammar = ""
            return Request(exchange.session.member, tuple(tokens), most, *exchange.sampling(), wanted.stop, grammar)
        return None

    def piece(self, ticket: int, data: bytes) -> bool:
        exchange = self._running[ticket]
        if exchange.gone:
            return False
        if exchange.wanted.stop:
            exchange.data += data
        if exchange.events is not None:
            self._post(partial(exchange.events.put_nowait, (exchange.index, data)))
        return True

    def done(self, ticket: int, completion: Completion) -> None:
        with self._ready:
            exchange = self._running.pop(ticket)
        if exchange.gone:
            return
        exchange.call.text = completion.text
        exchange.call.tokens_out = len(completion.tokens)
        exchange.session.tokens += len(completion.tokens)
        self._end(exchange, completion, completion.outcome)

    def _end(self, exchange: Exchange, result: Completion | ApiError, outcome: str = "stop") -> None:
        if isinstance(result, ApiError):
            exchange.call.error = result.message
        self._close_call(exchange, outcome)
        self._post(partial(exchange.resolve, result))

    @staticmethod
    def _close_call(exchange: Exchange, outcome: str) -> None:
        if exchange.call.outcome == "running":
            exchange.call.outcome = outcome
            exchange.call.seconds = time.monotonic() - exchange.began

    def _post(self, action: Callable[[], None]) -> None:
        """Have something done on the loop: many such things wake it once."""
        self._outbox.append(action)
        if not self._woken and self.loop is not None:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has ended: nobody waits for anything
                self._outbox.clear()

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from here on either is seen below or wakes the loop again
        while self._outbox:
            self._outbox.popleft()()


def too_long(tokens: int, context: int) -> ApiError:
    """A prompt of so many tokens where the context has so many."""
    return ApiError(
        400,
        f"prompt is too long: this model's maximum context length is {context} tokens, the prompt has {tokens} tokens",
        code="context_length_exceeded",
        param="messages",
    )
