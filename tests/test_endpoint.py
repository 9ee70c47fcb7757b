"""The endpoint, spoken to by the real ``openai`` and ``anthropic`` clients and by plain HTTP; the engine is a fake."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from edgees.backends.base import Completion, Member, Progress, Request, Source
from edgees.endpoint import Endpoint, Policy, Session, request_seed
from edgees.endpoint.app import Growing
from edgees.endpoint.wanted import Wanted, split_calls
from edgees.errors import TemplateError, UsageError
from edgees.population import request_seed as seed_of_episodes
from edgees.tools import grammar

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

POLICY = Policy(max_tokens=200, temperature=0.5, seed=3, generation=2, row="r1")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


class FakeEngine:
    """Text is bytes, one token each, written one at a time on ``streams`` sequences.

    What it says: ``KEY|last message``, KEY being the member's, or what follows ``say:`` in the last message, or the
    request's temperature and seed where that is ``sampling?``.
    """

    context_length = 3000

    def __init__(self, streams: int = 4) -> None:
        self.streams = streams
        self.seen: list[tuple[list[dict[str, Any]], list[Mapping[str, Any]]]] = []
        self.requests: list[Request] = []
        self.written = 0
        self.running: dict[int, tuple[Request, bytes, bytearray]] = {}
        self.open = threading.Event()
        """Clear: no request is taken."""
        self.open.set()
        self.held = threading.Event()
        self.pace = 0.0
        """Seconds for a byte."""
        self.grammars = True

    def check_grammar(self, grammar: str) -> None:
        if not self.grammars:
            raise UsageError("this engine cannot make replies follow a grammar", "leave it out")

    def hold(self) -> None:
        """Take no more requests until ``open`` is set."""
        self.held.clear()
        self.open.clear()
        assert self.held.wait(60)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        self.seen.append(([dict(m) for m in messages], list(tools)))
        if messages[0]["content"] == "refused":
            raise TemplateError("the chat template failed: no system message", "leave it out")
        return list("\0".join(m["content"] for m in messages).encode())

    def serve(self, source: Source, progress: Progress | None = None) -> None:
        more = True
        while more or self.running:
            room = self.streams - len(self.running) if self.open.is_set() else 0
            if not self.open.is_set():
                self.held.set()
            taken = source.take(room, not self.running) if room and more else []
            more = taken is not None
            for ticket, request in taken or ():
                self.requests.append(request)
                self.running[ticket] = (request, self.say(request), bytearray())
            for ticket, (request, text, done) in list(self.running.items()):
                wanted = len(done) < len(text)
                if wanted:
                    done += text[len(done) : len(done) + 1]
                    self.written += 1
                    wanted = source.piece(ticket, bytes(done[-1:]))
                said = done.decode("utf-8", "ignore")
                stopped = any(s in said for s in request.stop)
                outcome = "length" if len(done) >= request.max_tokens and len(done) < len(text) else "stop"
                if not wanted or stopped or outcome == "length" or len(done) == len(text):
                    for stop in request.stop:
                        said = said.split(stop, 1)[0]
                    del self.running[ticket]
                    source.done(ticket, Completion(said, tuple(done), "stop" if stopped else outcome))
            time.sleep(self.pace if self.running else 0.001 * (not self.open.is_set()))

    @staticmethod
    def say(request: Request) -> bytes:
        last = bytes(request.prompt).decode().split("\0")[-1]
        if last == "sampling?":
            return f"{request.temperature} {request.seed}".encode()
        return (last[4:] if last.startswith("say:") else f"{request.member.key}|{last}").encode()


class Served:
    """An endpoint with its engine in a thread."""

    def __init__(self, engine: Any, **options: Any) -> None:
        self.engine = engine
        self.endpoint = Endpoint(engine, **options)
        self.thread = threading.Thread(target=self._run)
        self.failure: BaseException | None = None

    def _run(self) -> None:
        try:
            self.engine.serve(self.endpoint)
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Served:
        self.endpoint.start()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.open.set()
        self.endpoint.close()
        self.thread.join(30)
        assert not self.thread.is_alive()
        assert self.failure is None, self.failure

    def session(self, key: int = 7, policy: Policy = POLICY) -> Session:
        return self.endpoint.open(Member(key, 0.1), policy)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with Served(FakeEngine()) as found:
        yield found


@pytest.fixture
def served(shared: Served) -> Served:
    """A server that has done nothing yet, as far as its engine tells; starting one for each test takes its time."""
    engine = shared.engine
    engine.seen, engine.requests, engine.written, engine.pace, engine.grammars = [], [], 0, 0.0, True
    return shared


@pytest.fixture
def session(served: Served) -> Session:
    return served.session()


@pytest.fixture
def gpt(session: Session) -> Iterator[Any]:
    with client_of(session) as client:
        yield client


@pytest.fixture
def claude(session: Session) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=session.base_url, api_key="any", max_retries=0) as client:
        yield client


def client_of(session: Session) -> Any:
    return openai.OpenAI(base_url=session.base_url + "/v1", api_key="any", max_retries=0)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def post(
    session: Session | str, path: str, body: bytes, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """(status, JSON, headers) of a plain request."""
    url = urlsplit(session if isinstance(session, str) else session.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    try:
        connection.request(method, url.path + path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), {k.lower(): v for k, v in response.getheaders()}
    finally:
        connection.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


# ---- OpenAI's chat


def test_chat_answers_with_text_usage_and_the_members_voice(gpt: Any, session: Session) -> None:
    found = gpt.chat.completions.create(model="gpt-x", messages=[{"role": "system", "content": "é"}, *user("hello")])
    [choice] = found.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("7|hello", "assistant", "stop")
    assert (found.model, found.object, choice.message.tool_calls) == ("gpt-x", "chat.completion", None)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (8, 7, 15)
    [call] = session.calls
    assert (call.text, call.outcome, call.tokens_in, call.tokens_out) == ("7|hello", "stop", 8, 7)
    assert session.messages()[-1] == {"role": "assistant", "content": "7|hello"}
    assert call.seconds > 0


def test_text_parts_are_joined_and_developer_is_system(gpt: Any, served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    assert gpt.chat.completions.create(model="m", messages=messages).choices[0].message.content == "7|a\nb"
    assert [m["role"] for m in served.engine.seen[0][0]] == ["system", "user"]


def test_sampling_is_the_policys_and_what_was_asked_for_is_recorded(gpt: Any, session: Session, served: Served) -> None:
    for turn in range(2):
        text = (
            gpt.chat.completions.create(
                model="m", messages=user("sampling?"), temperature=1.5, seed=99, max_tokens=1000, top_p=0.3
            )
            .choices[0]
            .message.content
        )
        assert text == f"0.5 {request_seed(3, 2, 'r1', turn)}"
    call = session.calls[1]
    assert (call.model, call.temperature, call.seed, call.max_tokens, call.turn) == ("m", 1.5, 99, 1000, 1)
    assert served.engine.requests[0].max_tokens == 200
    other = served.session(8)
    with client_of(other) as client:
        same = client.chat.completions.create(model="m", messages=user("sampling?")).choices[0].message.content
    assert same == f"0.5 {request_seed(3, 2, 'r1', 0)}", "members share their seeds"


def test_seeds_are_those_of_episodes_played_in_this_process() -> None:
    assert request_seed(3, 2, "r1", 0) == seed_of_episodes(3, 2, "r1")
    assert request_seed(3, 2, "r1", 4) == seed_of_episodes(3, 2, "r1 turn 4")
    assert len({request_seed(3, 2, "r1", t, i) for t in range(3) for i in range(3)}) == 9


def test_the_clients_sampling_counts_where_the_policy_says_so(served: Served) -> None:
    session = served.session(policy=Policy(max_tokens=50, temperature=0.25, client_sampling=True))
    with client_of(session) as client:

        def ask(**options: Any) -> str:
            found = client.chat.completions.create(model="m", messages=user("sampling?"), **options)
            return str(found.choices[0].message.content)

        assert ask(temperature=1.5, seed=99) == "1.5 99"
        assert ask(seed=5) == "0.25 5"
        assert len({ask() for _ in range(3)}) == 3, "without a seed every answer has its own"


def test_max_tokens_ends_an_answer(gpt: Any, session: Session) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        found = gpt.chat.completions.create(model="m", messages=user("hello"), **{name: 3})
        assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("7|h", "length")
    assert [c.outcome for c in session.calls] == ["length", "length"]


@pytest.mark.parametrize("stop", ["STOP", ["x?", "STOP"]])
def test_stop_strings_do_not_show(gpt: Any, stop: Any) -> None:
    found = gpt.chat.completions.create(model="m", messages=user("say:one STOP two"), stop=stop)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("one ", "stop")
    chunks = list(gpt.chat.completions.create(model="m", messages=user("say:a ST STOP b"), stop=stop, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "a ST "


def test_n_answers_of_one_member_with_seeds_of_their_own(gpt: Any, session: Session) -> None:
    found = gpt.chat.completions.create(model="m", messages=user("sampling?"), n=6)
    texts = [c.message.content for c in found.choices]
    assert texts == [f"0.5 {request_seed(3, 2, 'r1', 0, i)}" for i in range(6)]
    assert [c.index for c in found.choices] == list(range(6))
    assert found.usage.prompt_tokens == 9
    assert found.usage.completion_tokens == sum(map(len, texts))
    assert (session.turns, len(session.calls)) == (1, 6)


def test_streaming_gives_whole_characters_then_usage(gpt: Any) -> None:
    chunks = list(
        gpt.chat.completions.create(
            model="m", messages=user("say:für 🐟!"), stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert pieces == ["f", "ü", "r", " ", "🐟", "!"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 10)
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_streaming_is_incremental(gpt: Any, served: Served) -> None:
    served.engine.pace = 0.02
    written = []
    for chunk in gpt.chat.completions.create(model="m", messages=user("say:" + "a" * 40), stream=True):
        if chunk.choices[0].delta.content:
            written.append(served.engine.written)
    assert written[0] < 20, "the first piece comes before the last one is written"


def test_streams_of_several_choices(gpt: Any) -> None:
    texts = ["", "", ""]
    for chunk in gpt.chat.completions.create(model="m", messages=user("hé"), stream=True, n=3):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["7|hé"] * 3


def test_a_stream_ends_with_done(session: Session) -> None:
    url = urlsplit(session.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    body = json.dumps({"model": "m", "messages": user("x"), "stream": True})
    connection.request("POST", url.path + "/v1/chat/completions", body)
    response = connection.getresponse()
    data = response.read().decode()
    connection.close()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert data.endswith("data: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in data.split("\n\n") if line)


def test_growing_text_keeps_back_what_may_be_a_stop_string() -> None:
    text = "ab<|x|>rest <| a <|x <|stop|> behind"
    for size in (1, 2, 3, 50):
        growing = Growing(("<|stop|>", "<|stopp"))
        data = text.encode()
        sent = "".join(growing.add(data[i : i + size]) for i in range(0, len(data), size))
        assert sent == "ab<|x|>rest <| a <|x "
        assert growing.sent == len(sent)
    assert Growing(()).add("é".encode()[:1]) == ""


# ---- tools


def test_openai_tools_there_and_back(gpt: Any, session: Session, served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}}]
    messages: list[Any] = user(f"say:{CALL}")
    found = gpt.chat.completions.create(model="m", messages=messages, tools=tools)
    [choice] = found.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Rome"},
    )
    assert call.id.isalnum() and len(call.id) == 9
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "<|im_end|>sunny"}]
    found = gpt.chat.completions.create(model="m", messages=messages, tools=tools)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("7|<|im_end|>sunny", "stop")
    seen, offered = served.engine.seen[1]
    assert offered == tools
    assert seen[1]["tool_calls"] == [call.model_dump()]
    assert seen[2] == {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "<|im_end|>sunny"}
    assert [m["role"] for m in session.messages()] == ["user", "assistant", "tool", "assistant"]
    assert session.calls[0].reply is not None and session.calls[0].reply["tool_calls"] == [call.model_dump()]


def test_openai_tools_streamed(gpt: Any) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    text, name, arguments, finish = "", "", "", ""
    for chunk in gpt.chat.completions.create(model="m", messages=user(f"say:{CALL}"), tools=tools, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (text, name, json.loads(arguments), finish) == ("", "weather", {"city": "Rome"}, "tool_calls")
    chunks = gpt.chat.completions.create(model="m", messages=user("say:plain text"), tools=tools, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "plain text"


def test_tool_choice_says_what_the_model_sees(gpt: Any, served: Served) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": WEATHER, "description": ""}}
        for name in ("weather", "time")
    ]

    def seen(choice: Any) -> list[str]:
        gpt.chat.completions.create(model="m", messages=user("x"), tools=tools, tool_choice=choice)
        return [t["function"]["name"] for t in served.engine.seen[-1][1]]

    assert seen("none") == []
    assert seen("auto") == seen("required") == ["weather", "time"]
    assert seen({"type": "function", "function": {"name": "time"}}) == ["time"]
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        seen({"type": "function", "function": {"name": "other"}})
    found = gpt.chat.completions.create(model="m", messages=user(f"say:{CALL}"), tools=tools[:1], tool_choice="none")
    assert found.choices[0].message.content == CALL


def test_the_form_of_an_answer(gpt: Any, claude: Any, served: Served) -> None:
    """What asks for JSON, or for a call, gets a grammar; who asks for JSON of an engine that knows none is refused."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "description": ""}}]
    theirs = [{"name": "weather", "input_schema": WEATHER}]
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER}}
    only_call, only_schema = grammar(tools=tools), grammar(schema=WEATHER)

    def asked(client: Any, **more: Any) -> str:
        if client is gpt:
            client.chat.completions.create(model="m", messages=user("x"), **more)
        else:
            client.messages.create(model="m", max_tokens=9, messages=user("x"), **more)
        return served.engine.requests[-1].grammar

    assert asked(gpt) == asked(gpt, tools=tools) == asked(gpt, tools=tools, tool_choice="none") == ""
    assert asked(gpt, response_format=schema) == only_schema
    assert asked(gpt, response_format={"type": "json_object"}) == grammar(schema={"type": "object"})
    assert asked(gpt, tools=tools, response_format=schema) == grammar(tools=tools, schema=WEATHER)
    assert asked(gpt, tools=tools, tool_choice="required") == only_call
    assert asked(gpt, tools=tools, tool_choice="required", response_format=schema) == only_call
    assert asked(gpt, tools=tools, tool_choice={"type": "function", "function": {"name": "weather"}}) == only_call
    assert asked(claude, tools=theirs) == ""
    assert asked(claude, tools=theirs, tool_choice={"type": "any"}) == only_call
    for more in ({"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}},
                 {"output_format": {"type": "json_schema", "schema": WEATHER}}):  # fmt: skip
        assert asked(claude, extra_body=more) == only_schema
    with pytest.raises(anthropic.BadRequestError, match="output_config"):
        asked(claude, extra_body={"output_config": {"format": {"type": "xml"}}})
    odd = [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"x": {"type": "string", "pattern": "a"}}}}}]  # fmt: skip
    assert asked(gpt, tools=odd, tool_choice="required") == "", "a call of it cannot be forced"
    served.engine.grammars = False
    assert asked(gpt, tools=tools, tool_choice="required") == ""
    with pytest.raises(openai.BadRequestError, match="cannot make replies follow a grammar"):
        asked(gpt, response_format=schema)


def test_one_call_where_only_one_is_wanted() -> None:
    tools = ({"type": "function", "function": {"name": "weather", "parameters": WEATHER}},)
    ids = ["c1", "c2"]
    assert len(split_calls(CALL + CALL, Wanted(tools=tools), ids)[1]) == 2
    assert len(split_calls(CALL + CALL, Wanted(tools=tools, single=True), ids)[1]) == 1
    assert split_calls(CALL, Wanted(), ids) == (CALL, ())


def test_ids_of_calls_are_the_same_for_every_member(served: Served) -> None:
    """They go back into the prompt of some templates."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    ids = []
    for key in (1, 2):
        with client_of(served.session(key)) as client:
            for _ in range(2):
                found = client.chat.completions.create(model="m", messages=user(f"say:{CALL}"), tools=tools)
                ids.append(found.choices[0].message.tool_calls[0].id)
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]


# ---- OpenAI's completions, models


def test_completions(gpt: Any, session: Session) -> None:
    found = gpt.completions.create(model="m", prompt="say:one two", max_tokens=5)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("one t", "length")
    found = gpt.completions.create(model="m", prompt=["say:a", "say:b"], n=2)
    assert [c.text for c in found.choices] == ["a", "a", "b", "b"]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (10, 4)
    chunks = gpt.completions.create(model="m", prompt="say:one two", stream=True)
    assert "".join(c.choices[0].text for c in chunks) == "one two"
    assert session.messages()[0] == {"role": "user", "content": "say:one two"}
    for wrong in ({"prompt": ""}, {"prompt": [1, 2]}, {"prompt": "x", "echo": True}, {"prompt": "x", "logprobs": 0}):
        with pytest.raises(openai.BadRequestError):
            gpt.completions.create(model="m", **wrong)


def test_models_for_both_clients(gpt: Any, claude: Any) -> None:
    assert [m.id for m in gpt.models.list()] == ["edgees"]
    assert gpt.models.retrieve("edgees").object == "model"
    assert [m.id for m in claude.models.list()] == ["edgees"]
    with pytest.raises(openai.NotFoundError, match="no model"):
        gpt.models.retrieve("other")


# ---- Anthropic's messages


def test_claude_answers(claude: Any, session: Session, served: Served) -> None:
    system = [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2", "cache_control": {"type": "ephemeral"}}]
    found = claude.messages.create(
        model="c", max_tokens=50, system=system, messages=user("hello"), extra_body={"temperature": 0.9}
    )
    assert [(b.type, b.text) for b in found.content] == [("text", "7|hello")]
    assert (found.stop_reason, found.stop_sequence, found.role, found.model) == ("end_turn", None, "assistant", "c")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (11, 7)
    assert served.engine.seen[0][0][0] == {"role": "system", "content": "s1\ns2"}
    assert (session.calls[0].temperature, served.engine.requests[0].temperature) == (0.9, 0.5)
    found = claude.messages.create(model="c", max_tokens=3, messages=user("hello"))
    assert (found.content[0].text, found.stop_reason) == ("7|h", "max_tokens")


def test_claude_says_which_stop_sequence_it_was(claude: Any) -> None:
    found = claude.messages.create(
        model="c", max_tokens=50, messages=user("say:one END two"), stop_sequences=["x", "END"]
    )
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("one ", "stop_sequence", "END")


def test_claude_streams(claude: Any) -> None:
    with claude.messages.stream(model="c", max_tokens=50, messages=user("say:für 🐟!")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (kinds[0], kinds[1], kinds[-1]) == ("message_start", "content_block_start", "message_stop")
    assert kinds.index("content_block_stop") < kinds.index("message_delta")
    assert (final.content[0].text, final.stop_reason) == ("für 🐟!", "end_turn")
    assert (final.usage.input_tokens, final.usage.output_tokens) == (len("say:für 🐟!".encode()), 10)


def test_claudes_tools_there_and_back(claude: Any, served: Served) -> None:
    tools = [{"name": "weather", "description": "d", "input_schema": WEATHER}]
    messages: list[Any] = user(f"say:Let me see.{CALL}")
    for streamed in (False, True):
        if streamed:
            with claude.messages.stream(model="c", max_tokens=99, messages=messages, tools=tools) as stream:
                found = stream.get_final_message()
        else:
            found = claude.messages.create(model="c", max_tokens=99, messages=messages, tools=tools)
        assert found.stop_reason == "tool_use"
        text, use = found.content
        assert (text.text, use.name, use.input) == ("Let me see.", "weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    messages += [
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        {"role": "user", "content": "well?"},
    ]
    found = claude.messages.create(model="c", max_tokens=99, messages=messages, tools=tools)
    assert found.content[0].text == "7|and?\nwell?"
    seen, offered = served.engine.seen[-1]
    assert [m["role"] for m in seen] == ["user", "assistant", "tool", "user"]
    assert seen[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert seen[2] == {"role": "tool", "tool_call_id": use.id, "name": "weather", "content": "sunny"}
    assert offered[0]["function"] == {"name": "weather", "description": "d", "parameters": WEATHER}


def test_claude_counts_tokens_and_nothing_is_generated(claude: Any, session: Session, served: Served) -> None:
    assert claude.messages.count_tokens(model="c", messages=user("hello")).input_tokens == 5
    assert (session.calls, session.turns, served.engine.requests) == ([], 0, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "system prompt is a field"),
        ({"messages": [*user("x"), {"role": "assistant", "content": "so"}]}, "cannot be begun"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "no"}]}]}, "tool_result"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run at Anthropic's"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
def test_what_claude_refuses(claude: Any, session: Session, change: dict[str, Any], says: str) -> None:
    body = {"model": "c", "max_tokens": 5, "messages": user("x"), **change}
    status, found, _ = post(session, "/v1/messages", json.dumps(body).encode())
    assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert says in found["error"]["message"]
    with pytest.raises(anthropic.BadRequestError):
        claude.post("/v1/messages", body=body, cast_to=object)
    assert session.calls == []


# ---- errors


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "x"}]}, "'c1'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "tool_calls[0]"),
        ({"logprobs": True}, "log-probabilities"),
        ({"top_logprobs": 3}, "log-probabilities"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "a"}}}},
            "does not support pattern",
        ),
        ({"functions": [{"name": "f"}]}, "use tools"),
        ({"n": 9}, "n must be"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": 5}, "model"),
    ],
)
def test_what_openais_chat_refuses(gpt: Any, session: Session, change: dict[str, Any], says: str) -> None:
    body = {"model": "m", "messages": user("x"), **change}
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.post("/chat/completions", body=body, cast_to=object)
    assert says in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"
    assert (session.calls, session.turns) == ([], 0), "a refused request counts for nothing"


def test_unknown_and_harmless_fields_are_ignored(gpt: Any) -> None:
    extra = {"top_k": 5, "nonsense": {"a": 1}, "logprobs": False, "response_format": {"type": "text"}}
    found = gpt.chat.completions.create(model="m", messages=user("x"), extra_body=extra, user="u", presence_penalty=0.5)
    assert found.choices[0].message.content == "7|x"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "x": NaN}',
        b"[" * 200_000,
        b'{"model": "\\ud800", "messages": 1}',
    ],
    ids=["empty", "cut", "list", "text", "bytes", "nan", "deep", "surrogate"],
)
def test_malformed_json_is_400_in_the_apis_shape(session: Session, body: bytes) -> None:
    status, found, _ = post(session, "/v1/chat/completions", body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    status, found, _ = post(session, "/v1/messages", body)
    assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")


def test_text_that_is_no_unicode_harms_only_its_client(session: Session, gpt: Any) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'
    status, found, _ = post(session, "/v1/chat/completions", body)
    assert status == 400 and "UnicodeEncodeError" in found["error"]["message"]
    assert gpt.chat.completions.create(model="m", messages=user("x")).choices[0].message.content == "7|x"


def test_a_conversation_that_the_template_refuses_is_that_clients_400(gpt: Any, session: Session) -> None:
    bad = [{"role": "system", "content": "refused"}, *user("x")]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"no system message \(leave it out\)"):
            gpt.chat.completions.create(model="m", messages=bad, stream=stream)
    assert [c.outcome for c in session.calls] == ["error", "error"]
    assert "no system message" in session.calls[0].error
    assert session.messages() == tuple(bad), "there was no answer"
    assert gpt.chat.completions.create(model="m", messages=user("x")).choices[0].message.content == "7|x"


def test_case_18_a_full_context_is_an_error_with_a_code(gpt: Any, claude: Any, session: Session) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(model="m", messages=user("x" * 3000))
    assert caught.value.code == "context_length_exceeded"
    assert "3000 tokens" in str(caught.value)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model="c", max_tokens=5, messages=user("x" * 3001))
    assert [(c.outcome, c.tokens_in) for c in session.calls] == [("overflow", 3000), ("overflow", 3001)]
    assert gpt.chat.completions.create(model="m", messages=user("x")).choices[0].message.content == "7|x"


def test_wrong_tokens_are_401(session: Session, served: Served) -> None:
    for base in (session.base_url[:-1] + ("a" if session.base_url[-1] != "a" else "b"), served.endpoint.url):
        with (
            openai.OpenAI(base_url=base + "/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.chat.completions.create(model="m", messages=user("x"))
        with (
            anthropic.Anthropic(base_url=base, api_key="x", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(model="m", max_tokens=5, messages=user("x"))
    assert session.calls == []
    assert len(session.token) >= 32


def test_a_closed_session_is_410(gpt: Any, claude: Any, session: Session) -> None:
    gpt.chat.completions.create(model="m", messages=user("x"))
    session.close()
    session.close()
    with pytest.raises(openai.APIStatusError) as caught:
        gpt.chat.completions.create(model="m", messages=user("x"))
    assert (caught.value.status_code, caught.value.code) == (410, "session_closed")
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.messages.create(model="m", max_tokens=5, messages=user("x"))
    assert caught.value.status_code == 410
    assert len(session.calls) == 1


def test_closing_a_session_ends_what_it_waits_for(served: Served, session: Session) -> None:
    served.engine.pace = 0.01
    with ThreadPoolExecutor(2) as pool, client_of(session) as client:
        whole = pool.submit(lambda: client.chat.completions.create(model="m", messages=user("say:" + "a" * 190)))
        stream = client.chat.completions.create(model="m", messages=user("say:" + "b" * 190), stream=True)
        until(lambda: len(served.engine.running) == 2)
        session.close()
        with pytest.raises(openai.APIStatusError) as caught:
            whole.result(60)
        assert caught.value.status_code == 410
        with pytest.raises(openai.APIError, match="over"):
            list(stream)
    until(lambda: not served.engine.running)
    assert served.engine.written < 300, "the engine stopped writing"
    assert [c.outcome for c in session.calls] == ["gone", "gone"]


def test_unknown_paths_and_methods(session: Session, gpt: Any) -> None:
    status, found, _ = post(session, "/v1/embeddings", b"{}")
    assert (status, found["error"]["code"]) == (404, "not_found")
    with pytest.raises(openai.NotFoundError):
        gpt.embeddings.create(model="m", input="x")
    status, found, headers = post(session, "/v1/chat/completions", b"", "GET")
    assert (status, headers["allow"], found["error"]["type"]) == (405, "POST", "invalid_request_error")
    status, found, _ = post(session, "/v1/messages", b"", "DELETE")
    assert (status, found["type"]) == (405, "error")
    assert post(session, "/v1/models", b"", "PUT")[0] == 405
    assert post(session, "/health", b"", "GET")[:2] == (200, {"status": "ok"})


def test_a_body_of_ten_megabytes_is_413(gpt: Any, claude: Any, session: Session) -> None:
    big = user("x" * 10_000_000)
    with pytest.raises(openai.APIStatusError) as caught:
        gpt.chat.completions.create(model="m", messages=big)
    assert caught.value.status_code == 413
    with pytest.raises(anthropic.RequestTooLargeError):
        claude.messages.create(model="m", max_tokens=5, messages=big)
    url = urlsplit(session.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    connection.request("POST", url.path + "/v1/chat/completions", (b"x" * 1_000_000 for _ in range(11)))  # no length
    assert connection.getresponse().status == 413
    connection.close()
    assert gpt.chat.completions.create(model="m", messages=user("x")).choices[0].message.content == "7|x"


def test_a_body_without_end_is_cut_off(session: Session) -> None:
    url = urlsplit(session.base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    connection.putrequest("POST", url.path + "/v1/chat/completions")
    connection.putheader("content-length", str(10**12))
    connection.endheaders()
    response = connection.getresponse()
    assert (response.status, response.headers["connection"]) == (413, "close")
    connection.close()


def test_a_full_queue_is_429_with_retry_after() -> None:
    with Served(FakeEngine(), queue=2) as served:
        session = served.session()
        served.engine.hold()
        with ThreadPoolExecutor(4) as pool, client_of(session) as client:
            waiting = [
                pool.submit(lambda: client.chat.completions.create(model="m", messages=user("x"))) for _ in range(2)
            ]
            until(lambda: session.turns == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="m", messages=user("x"))
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.code == "rate_limit_exceeded"
            with (
                anthropic.Anthropic(base_url=session.base_url, api_key="x", max_retries=0) as other,
                pytest.raises(anthropic.RateLimitError),
            ):
                other.messages.create(model="m", max_tokens=5, messages=user("x"))
            assert session.turns == 2, "what was refused is no turn"
            patient = pool.submit(
                lambda: client.with_options(max_retries=5).chat.completions.create(model="m", messages=user("later"))
            )
            served.engine.open.set()
            assert [f.result(60).choices[0].message.content for f in waiting] == ["7|x", "7|x"]
            assert patient.result(60).choices[0].message.content == "7|later"


def test_limits_of_a_session(served: Served) -> None:
    session = served.session(policy=Policy(max_tokens=50, max_requests=2))
    with client_of(session) as client:
        client = client.with_options(max_retries=3)
        for _ in range(2):
            client.chat.completions.create(model="m", messages=user("x"))
        with pytest.raises(openai.RateLimitError, match="all the requests") as caught:
            client.chat.completions.create(model="m", messages=user("x"))
    assert (caught.value.code, session.limited, session.turns) == ("insufficient_quota", "requests", 2)
    session = served.session(policy=Policy(max_tokens=50, max_session_tokens=5))
    with client_of(session) as client:
        texts = [
            client.chat.completions.create(model="m", messages=user("say:abc")).choices[0].message.content
            for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError, match="all the tokens"):
            client.chat.completions.create(model="m", messages=user("x"))
    assert (texts, session.limited) == (["abc", "ab"], "tokens")


# ---- hanging up


def half_a_stream(session: Session, text: str, streamed: bool = True) -> socket.socket:
    """A client that has sent a request, and reads no more than the beginning of an answer."""
    url = urlsplit(session.base_url)
    body = json.dumps({"model": "m", "messages": user(text), "stream": streamed}).encode()
    client = socket.create_connection((str(url.hostname), url.port or 0), timeout=60)
    head = f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    if streamed:
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    return client


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_frees_its_place_and_harms_nobody(streamed: bool) -> None:
    with Served(FakeEngine(streams=2)) as served:
        session, other = served.session(1), served.session(2)
        served.engine.pace = 0.01
        with ThreadPoolExecutor(1) as pool, client_of(other) as client:
            answer = pool.submit(lambda: client.chat.completions.create(model="m", messages=user("b" * 60)))
            leaver = half_a_stream(session, "say:" + "a" * 190, streamed)
            until(lambda: len(served.engine.running) == 2)
            leaver.close()
            until(lambda: session.calls[0].outcome == "gone")
            assert answer.result(60).choices[0].message.content == "2|" + "b" * 60
            until(lambda: not served.engine.running)
            assert served.engine.written < 200, "nobody wanted the rest"
            assert other.calls[0].outcome == "stop"


def test_a_client_that_hangs_up_while_it_waits_is_never_begun() -> None:
    with Served(FakeEngine(streams=1), queue=1) as served:
        session, other = served.session(1), served.session(2)
        served.engine.hold()
        half_a_stream(session, "say:never", streamed=False).close()
        until(lambda: len(session.calls) == 1 and session.calls[0].outcome == "gone")
        with ThreadPoolExecutor(1) as pool, client_of(other) as client:
            answer = pool.submit(lambda: client.chat.completions.create(model="m", messages=user("x")))
            until(lambda: other.turns == 1 or answer.done())
            served.engine.open.set()
            assert answer.result(60).choices[0].message.content == "2|x", "its place in the queue is free again"
        assert [r.member.key for r in served.engine.requests] == [2]


def test_half_a_body_and_silence_harm_nobody(session: Session, gpt: Any) -> None:
    url = urlsplit(session.base_url)
    for sent in (b"POST ", f"POST {url.path}/v1/chat/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{{".encode()):
        with socket.create_connection((str(url.hostname), url.port or 0), timeout=60) as client:
            client.sendall(sent)
        assert gpt.chat.completions.create(model="m", messages=user("x")).choices[0].message.content == "7|x"
    assert len(session.calls) == 2


# ---- rewards


def test_rewards_are_posted_with_their_parts(session: Session) -> None:
    assert (session.reward, session.reward_error) == (None, "")
    assert post(session, "/reward", b'{"reward": 0.75, "speed": 2, "note": "x", "flag": true}')[0] == 200
    assert (session.reward, session.parts, session.reward_error) == (0.75, {"speed": 2.0}, "")


@pytest.mark.parametrize(
    "body",
    [
        b'{"reward": "0.5"}',
        b'{"reward": null}',
        b"{}",
        b'{"reward": true}',
        b'{"reward": 1e999}',
        b'{"reward": 1' + b"0" * 400 + b"}",
        b"0.5",
        b"{",
    ],
)
def test_case_25_what_is_no_number_is_no_reward(session: Session, body: bytes) -> None:
    post(session, "/reward", b'{"reward": 1, "speed": 2}')
    status, found, _ = post(session, "/reward", body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    assert (session.reward, session.parts) == (None, {}), "never what was said before, never 0"
    assert session.reward_error.startswith("the agent posted ")
    post(session, "/reward", b'{"reward": -1}')
    assert (session.reward, session.reward_error) == (-1.0, ""), "the last word counts"


# ---- the server itself


def test_it_binds_to_loopback_only() -> None:
    with pytest.raises(UsageError, match="other machines"):
        Endpoint(FakeEngine(), host="0.0.0.0")  # type: ignore[arg-type]
    with Served(FakeEngine()) as served:
        assert served.endpoint.url.startswith("http://127.0.0.1:")
        with pytest.raises(UsageError, match="cannot be listened on"):
            Endpoint(FakeEngine(), port=served.endpoint.port).start()  # type: ignore[arg-type]


def test_serve_ends_with_finish_and_the_next_one_goes_on() -> None:
    engine = FakeEngine()
    with Endpoint(engine) as endpoint:  # type: ignore[arg-type]
        session = endpoint.open(Member(5, 0.1), POLICY)
        with ThreadPoolExecutor(2) as pool, client_of(session) as client:
            endpoint.finish()
            engine.serve(endpoint)  # returns at once
            waiting = pool.submit(lambda: client.chat.completions.create(model="m", messages=user("x")))
            until(lambda: session.turns == 1)
            serving = pool.submit(engine.serve, endpoint)
            assert waiting.result(60).choices[0].message.content == "5|x"
            endpoint.finish()
            serving.result(60)


def test_closing_the_endpoint_ends_everything() -> None:
    before = set(threading.enumerate())
    with Served(FakeEngine()) as served:
        session = served.session()
        served.engine.hold()
        with ThreadPoolExecutor(1) as pool, client_of(session) as client:
            waiting = pool.submit(lambda: client.chat.completions.create(model="m", messages=user("x")))
            until(lambda: session.turns == 1)
            served.endpoint.close()
            with pytest.raises(openai.InternalServerError) as caught:
                waiting.result(60)
            assert caught.value.status_code == 503
            with pytest.raises(openai.APIConnectionError):
                client.chat.completions.create(model="m", messages=user("x"))
        assert set(threading.enumerate()) - before <= {served.thread}


def test_an_internal_fault_is_500_and_the_server_lives(
    session: Session, gpt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr("edgees.endpoint.openai_api.chat_body", broken)
        with pytest.raises(openai.InternalServerError) as caught:
            gpt.chat.completions.create(model="m", messages=user("x"))
    assert "secret" not in str(caught.value)
    assert gpt.chat.completions.create(model="m", messages=user("x")).choices[0].message.content == "7|x"


CLIENTS, TURNS = 64, 6


@pytest.mark.parametrize("streamed", [False, True])
def test_64_clients_each_hear_their_own_member(streamed: bool) -> None:
    """None lost, none answered by another, whole conversations in their order."""

    async def play(client: Any, name: int) -> list[str]:
        texts: list[str] = []
        for turn in range(TURNS):
            options: dict[str, Any] = {"model": "m", "messages": user(f"{name}.{turn}")}
            if streamed and name % 2:
                text = ""
                async for chunk in await client.chat.completions.create(**options, stream=True):
                    text += chunk.choices[0].delta.content or ""
                texts.append(text)
            else:
                texts.append((await client.chat.completions.create(**options)).choices[0].message.content)
        return texts

    async def all_of_them(sessions: Sequence[Session]) -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="x", max_retries=0) as one:
            clients = [one.with_options(base_url=s.base_url + "/v1") for s in sessions]
            return list(await asyncio.gather(*(play(client, i) for i, client in enumerate(clients))))

    with Served(FakeEngine(streams=32)) as served:
        sessions = [served.session(1000 + i) for i in range(CLIENTS)]
        found = asyncio.run(all_of_them(sessions))
        assert found == [[f"{1000 + i}|{i}.{turn}" for turn in range(TURNS)] for i in range(CLIENTS)]
        for i, session in enumerate(sessions):
            assert [c.text for c in session.calls] == found[i]
            assert [c.turn for c in session.calls] == list(range(TURNS))
        seeds = {(bytes(r.prompt), r.seed) for r in served.engine.requests}
        assert {seed for _, seed in seeds} == {request_seed(3, 2, "r1", turn) for turn in range(TURNS)}


@pytest.mark.slow
def test_of_10_000_requests_none_is_lost_or_goes_to_another_member() -> None:
    """64 clients of plain HTTP, as the client packages take several times as long as all the rest."""
    turns = 160

    async def play(session: Session, name: int) -> int:
        url = urlsplit(session.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        right = 0
        for turn in range(turns):
            body = json.dumps({"messages": user(f"{name}.{turn}")})
            head = f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(answer.split("content-length: ")[1].split("\r\n")[0])
            found = json.loads(await reader.readexactly(length))
            right += found["choices"][0]["message"]["content"] == f"{1000 + name}|{name}.{turn}"
        writer.close()
        await writer.wait_closed()
        return right

    async def all_of_them(sessions: Sequence[Session]) -> list[int]:
        return list(await asyncio.gather(*(play(s, i) for i, s in enumerate(sessions))))

    with Served(FakeEngine(streams=32)) as served:
        sessions = [served.session(1000 + i) for i in range(CLIENTS)]
        assert asyncio.run(all_of_them(sessions)) == [turns] * CLIENTS
        assert len(served.engine.requests) == turns * CLIENTS > 10_000
