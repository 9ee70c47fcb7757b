"""The routes, as one ASGI application: no framework is needed for nine of them, and each request costs less without.

``{base}/v1/...`` with a session's token in the base, or without one where there is a public session.
"""

from __future__ import annotations

import asyncio
import codecs
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from edgees.backends.base import Completion
from edgees.endpoint import anthropic_api, openai_api
from edgees.endpoint.bridge import Bridge, Event, Exchange, Session
from edgees.endpoint.wanted import ApiError, Reply, Wanted, Writer, decode, encode, split_calls

log = logging.getLogger("edgees.endpoint")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

DRAINED = 8
"""So many times the largest body is read to its end and thrown away, so that the client hears why; more is cut off."""


class Gone(Exception):
    """The client has hung up: nobody is there to be answered."""


class Http:
    """One request and the way to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method = str(scope["method"])
        self.path = str(scope["path"])
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._receive, self._send = receive, send
        self.begun = False

    async def body(self, largest: int) -> bytes:
        """:raises ApiError: 413; Gone."""
        size, pieces, more = 0, list[bytes](), True
        declared = self.headers.get("content-length", "")
        if not declared.isdecimal() or int(declared) <= DRAINED * largest:
            while more and size <= DRAINED * largest:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                piece = message.get("body", b"")
                size += len(piece)
                if size <= largest:
                    pieces.append(piece)
                else:
                    pieces.clear()
                more = bool(message.get("more_body"))
        if more or size > largest:
            close = {"connection": "close"} if more else None
            raise ApiError(413, f"the body is larger than {largest:,} bytes", code="request_too_large", headers=close)
        return b"".join(pieces)

    def hung_up(self) -> asyncio.Task[None]:
        """Done when the client has hung up; begin it when the body has been read, and cancel it."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass

        return asyncio.ensure_future(watch())

    async def answer(self, status: int, payload: Any, headers: Mapping[str, str] | None = None) -> None:
        data = encode(payload)
        await self._start(status, {"content-length": str(len(data)), **(headers or {})}, "application/json")
        await self._send({"type": "http.response.body", "body": data})

    async def begin_events(self) -> None:
        await self._start(200, {"cache-control": "no-cache"}, "text/event-stream; charset=utf-8")

    async def send(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: Mapping[str, str], kind: str) -> None:
        self.begun = True
        found = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        found.append((b"content-type", kind.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": found})


class Growing:
    """A reply's text as it comes: whole characters, and nothing that might belong to a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._kept = ""
        self._stopped = False
        self.sent = 0

    def add(self, data: bytes) -> str:
        """What may be sent now."""
        self._kept += self._decoder.decode(data)
        if self._stopped:
            return ""
        places = [at for stop in self._stops if (at := self._kept.find(stop)) >= 0]
        self._stopped = bool(places)
        until = min(places) if places else len(self._kept) - self._doubtful()
        ready, self._kept = self._kept[:until], self._kept[until:]
        self.sent += len(ready)
        return ready

    def _doubtful(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for n in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-n:]) for stop in self._stops):
                return n
        return 0


class App:
    """bridge: answers. public: the session of requests without a token. api_key: theirs; empty: none is needed.

    name: the model's, for clients that list models. largest: bytes of a body.
    """

    def __init__(self, bridge: Bridge, name: str, largest: int) -> None:
        self.bridge, self.name, self.largest = bridge, name, largest
        self.public: Session | None = None
        self.api_key = ""
        self._routes: dict[str, tuple[str, Callable[[Http, Session], Awaitable[None]]]] = {
            "v1/chat/completions": ("POST", self._chat),
            "v1/messages": ("POST", self._messages),
            "v1/completions": ("POST", self._completions),
            "v1/messages/count_tokens": ("POST", self._count_tokens),
            "v1/models": ("GET", self._models),
            "health": ("GET", self._health),
            "reward": ("POST", self._reward),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Http(scope, receive, send)
        base, _, route = http.path[1:].partition("/")
        if base in ("v1", "health"):
            base, route = "", http.path[1:]
        try:
            await self._dispatch(http, base, route.rstrip("/"))
        except Gone:
            return
        except ApiError as error:
            await self._refuse(http, route, error)
        except Exception:
            log.exception("%s %s failed", http.method, route)
            await self._refuse(http, route, ApiError(500, "the server failed", code="internal_error"))

    async def _refuse(self, http: Http, route: str, error: ApiError) -> None:
        if http.begun:  # too late for a status: the connection is cut, so that the client sees that it is not all
            return
        anthropic = route.startswith("v1/messages") or "anthropic-version" in http.headers
        body = anthropic_api.error_body(error) if anthropic else openai_api.error_body(error)
        await http.answer(error.status, body, error.headers)

    async def _dispatch(self, http: Http, base: str, route: str) -> None:
        if not base and route == "health":
            return await self._health(http, None)
        session = self.bridge.session(base) if base else self._anybody(http)
        method, handler = self._routes.get(route, ("GET", self._model if route.startswith("v1/models/") else None))
        if handler is None:
            raise ApiError(404, f"there is no {http.method} /{route}", code="not_found")
        if http.method != method:
            allow = {"allow": method}
            raise ApiError(405, f"/{route} wants {method}, not {http.method}", code="method_not_allowed", headers=allow)
        await handler(http, session)

    def _anybody(self, http: Http) -> Session:
        if self.public is None:
            raise ApiError(401, "the base URL lacks the token of a session", code="invalid_api_key")
        given = http.headers.get("authorization", "").removeprefix("Bearer ") or http.headers.get("x-api-key", "")
        if self.api_key and not hmac.compare_digest(given.encode("latin-1"), self.api_key.encode()):
            raise ApiError(401, "wrong API key", code="invalid_api_key")
        return self.public

    # ---- small routes
    async def _health(self, http: Http, _: Session | None) -> None:
        await http.answer(200, {"status": "ok"})

    async def _models(self, http: Http, _: Session) -> None:
        await http.answer(200, openai_api.models_body(self.name))

    async def _model(self, http: Http, _: Session) -> None:
        asked = http.path.partition("v1/models/")[2]
        if asked != self.name:
            raise ApiError(404, f"there is no model {asked!a}, only {self.name}", code="model_not_found", param="model")
        await http.answer(200, openai_api.model_body(self.name))

    async def _reward(self, http: Http, session: Session) -> None:
        session.post_reward(await http.body(self.largest))
        await http.answer(200, {"status": "ok"})

    async def _count_tokens(self, http: Http, session: Session) -> None:
        wanted = anthropic_api.read(decode(await http.body(self.largest)), counting=True)
        [exchange] = exchanges = [Exchange(session, wanted, counting=True)]
        await self._whole(http, exchanges)
        await http.answer(200, {"input_tokens": exchange.call.tokens_in})

    # ---- answers of the model
    async def _chat(self, http: Http, session: Session) -> None:
        wanted = openai_api.read_chat(decode(await http.body(self.largest)))
        name, n = wanted.model or self.name, wanted.n
        if wanted.stream:
            writer = openai_api.ChatWriter(name, n, n, wanted.include_usage)
            return await self._stream(http, session, [wanted], writer)
        replies = await self._replies(http, session, [wanted])
        await http.answer(200, openai_api.chat_body(name, replies, n))

    async def _completions(self, http: Http, session: Session) -> None:
        found = openai_api.read_completions(decode(await http.body(self.largest)))
        name, n = found[0].model or self.name, found[0].n
        if found[0].stream:
            writer = openai_api.ChatWriter(name, n * len(found), n, found[0].include_usage, plain=True)
            return await self._stream(http, session, found, writer)
        replies = await self._replies(http, session, found)
        await http.answer(200, openai_api.completions_body(name, replies, n))

    async def _messages(self, http: Http, session: Session) -> None:
        wanted = anthropic_api.read(decode(await http.body(self.largest)))
        name = wanted.model or self.name
        if wanted.stream:
            return await self._stream(http, session, [wanted], anthropic_api.MessageWriter(name))
        replies = await self._replies(http, session, [wanted])
        await http.answer(200, anthropic_api.body(name, replies))

    @staticmethod
    def _exchanges(
        session: Session, found: Sequence[Wanted], events: asyncio.Queue[Event] | None = None
    ) -> list[Exchange]:
        """One for each choice, prompt by prompt."""
        choices = [wanted for wanted in found for _ in range(wanted.n)]
        return [Exchange(session, wanted, index, events) for index, wanted in enumerate(choices)]

    async def _replies(self, http: Http, session: Session, found: Sequence[Wanted]) -> list[Reply]:
        exchanges = self._exchanges(session, found)
        await self._whole(http, exchanges)
        return [_reply(exchange) for exchange in exchanges]

    async def _whole(self, http: Http, exchanges: Sequence[Exchange]) -> None:
        """Until all have ended. :raises ApiError: one of them got an error; Gone."""
        self.bridge.put(exchanges)
        watch = http.hung_up()
        try:
            for exchange in exchanges:
                await _unless(watch, exchange.ended)
                _completion(exchange)
        finally:
            watch.cancel()
            self.bridge.leave(exchanges)

    async def _stream(self, http: Http, session: Session, found: Sequence[Wanted], writer: Writer) -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        exchanges = self._exchanges(session, found, events)
        self.bridge.put(exchanges)
        watch = http.hung_up()
        watch.add_done_callback(lambda _: events.put_nowait((-1, None)))
        try:
            for exchange in exchanges:  # an error that comes before the first event is an ordinary one
                await _unless(watch, exchange.started)
                if (error := exchange.started.result()) is not None:
                    raise error
            await http.begin_events()
            await http.send(writer.begin(exchanges[0].call.tokens_in))
            await self._events(http, exchanges, events, writer)
        finally:
            watch.cancel()
            self.bridge.leave(exchanges)

    @staticmethod
    async def _events(http: Http, exchanges: Sequence[Exchange], events: asyncio.Queue[Event], writer: Writer) -> None:
        texts = [Growing(x.wanted.stop) for x in exchanges]
        missing = len(exchanges)
        while missing:
            index, data = await events.get()
            if index < 0:
                raise Gone
            exchange, text = exchanges[index], texts[index]
            if data is None:
                try:
                    reply = _reply(exchange)
                except ApiError as error:
                    return await http.send(writer.error(error), more=False)
                await http.send(writer.end(index, reply.text[text.sent :], reply))
                missing -= 1
            elif not exchange.wanted.tools and (ready := text.add(data)):  # with tools: it may become a call
                await http.send(writer.piece(index, ready))
        await http.send(writer.close(), more=False)


async def _unless(watch: asyncio.Future[None], future: asyncio.Future[Any]) -> None:
    """Wait for ``future``. :raises Gone: ``watch`` came first."""
    await asyncio.wait((future, watch), return_when=asyncio.FIRST_COMPLETED)
    if not future.done():
        raise Gone


def _completion(exchange: Exchange) -> Completion:
    result = exchange.ended.result()
    if isinstance(result, ApiError):
        raise result
    return result


def _reply(exchange: Exchange) -> Reply:
    """The answer, recorded. :raises ApiError: there is none."""
    completion = _completion(exchange)
    text, calls = split_calls(completion.text, exchange.wanted, exchange.call_ids())
    reply = Reply(
        text,
        calls,
        completion.outcome,
        exchange.stopped_by(),
        exchange.call.tokens_in,
        len(completion.tokens),
    )
    exchange.record(reply)
    return reply
