"""OpenAI's chat completions and completions: requests read, answers and errors written."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from edgees.endpoint.wanted import (
    MOST_CHOICES,
    MOST_TOOLS,
    ApiError,
    Reply,
    Wanted,
    encode,
    flag,
    form,
    name_of,
    number,
    objects,
    refuse,
    require,
    stops,
    texts,
    tool,
    whole,
)
from edgees.episodes import Message

MOST_MESSAGES = 10_000
NO_LOGPROBS = "the engine does not give log-probabilities"
_NEITHER = {
    "logprobs": NO_LOGPROBS,
    "top_logprobs": NO_LOGPROBS,
    "logit_bias": "the engine cannot bias tokens",
}


def error_body(error: ApiError) -> dict[str, Any]:
    if error.status >= 500:
        kind = "server_error"
    elif error.status == 429:
        kind = error.code or "requests"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


# ---- requests


def read_chat(body: Mapping[str, Any]) -> Wanted:
    """:raises ApiError: 400, which names the field."""
    refuse(
        body,
        {
            **_NEITHER,
            "functions": "use tools",
            "function_call": "use tool_choice",
            "audio": "the model writes text only",
            "prediction": "nothing is predicted here",
            "web_search_options": "there is no search",
        },
    )
    modalities = body.get("modalities")
    require(modalities in (None, ["text"]), "modalities: the model writes text only", "modalities")
    found = objects(body.get("messages"), "messages", MOST_MESSAGES)
    require(bool(found), "messages must be a list of at least one message", "messages")
    names: dict[str, str] = {}
    messages = tuple(_message(m, f"messages[{i}]", names) for i, m in enumerate(found))
    offered = tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(objects(body.get("tools"), "tools", MOST_TOOLS)))
    asked = whole(body, "max_completion_tokens", 1)
    choice = body.get("tool_choice")
    chosen = _choice(choice, offered)
    return Wanted(
        messages=messages,
        tools=chosen,
        **form(chosen, choice == "required" or isinstance(choice, dict), _schema(body), "response_format"),
        single=body.get("parallel_tool_calls") is False,
        max_tokens=whole(body, "max_tokens", 1) if asked is None else asked,
        **_common(body),
    )


def read_completions(body: Mapping[str, Any]) -> list[Wanted]:
    """One for each prompt. :raises ApiError: 400."""
    refuse(body, {**_NEITHER, "echo": "the prompt is not repeated", "suffix": "the model writes from left to right"})
    require(body.get("logprobs") is None, f"logprobs is not supported: {NO_LOGPROBS}", "logprobs")
    common = _common(body)
    best_of = whole(body, "best_of", 1)
    require(best_of is None or best_of == common["n"], "best_of must be n: answers are not ranked", "best_of")
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    require(
        isinstance(prompts, list) and bool(prompts) and all(isinstance(p, str) and p for p in prompts),
        "prompt must be text, or a list of texts, none of them empty",
        "prompt",
    )
    assert isinstance(prompts, list)
    require(
        len(prompts) * common["n"] <= MOST_CHOICES, f"at most {MOST_CHOICES} choices at a time, prompts x n", "prompt"
    )
    asked = whole(body, "max_tokens", 1)
    return [Wanted(prompt=p, max_tokens=16 if asked is None else asked, **common) for p in prompts]


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    stream = flag(body, "stream")
    options = body.get("stream_options")
    require(options is None or isinstance(options, dict), "stream_options must be an object", "stream_options")
    require(options is None or stream, "stream_options is for stream = true only", "stream_options")
    return {
        "model": name_of(body),
        "temperature": number(body, "temperature", 0, 2),
        "seed": whole(body, "seed", -(1 << 63), 1 << 63),
        "stop": stops(body.get("stop"), "stop"),
        "n": whole(body, "n", 1, MOST_CHOICES) or 1,
        "stream": stream,
        "include_usage": flag(options or {}, "include_usage"),
    }


def _message(message: Mapping[str, Any], where: str, names: dict[str, str]) -> Message:
    """names: of the tools called so far, by the id of the call; added to."""
    role, content = message.get("role"), message.get("content")
    place = f"{where}.content"
    if role in ("system", "developer"):
        return {"role": "system", "content": texts(content, place)}
    if role == "user":
        return {"role": "user", "content": texts(content, place)}
    if role == "assistant":
        calls = [
            _call(c, f"{where}.tool_calls[{i}]")
            for i, c in enumerate(objects(message.get("tool_calls"), f"{where}.tool_calls", MOST_TOOLS))
        ]
        require(message.get("function_call") is None, f"{where}.function_call: use tool_calls", where)
        require(content is not None or bool(calls), f"{place}: an answer without tool calls needs a text", place)
        text = "" if content is None else texts(content, place, ("text", "refusal"))
        names.update((call["id"], call["function"]["name"]) for call in calls)
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    if role == "tool":
        call_id = message.get("tool_call_id")
        require(isinstance(call_id, str), f"{where}.tool_call_id must be text", f"{where}.tool_call_id")
        known = names.get(str(call_id))
        require(known is not None, f"{where}: no message before it calls a tool with the id {call_id!a}", where)
        return {"role": "tool", "tool_call_id": call_id, "name": known, "content": texts(content, place)}
    raise ApiError(
        400,
        f"{where}.role must be one of system, developer, user, assistant, tool, not {role!a}",
        code="invalid_value",
        param=f"{where}.role",
    )


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    good = (
        call.get("type", "function") == "function"
        and isinstance(call.get("id"), str)
        and isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
    )
    require(good, f"{where} must have an id and a function with name and arguments, all texts", where)
    assert isinstance(function, dict)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def _tool(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = given.get("function")
    require(
        given.get("type") == "function" and isinstance(function, dict), f"{where}: only functions are supported", where
    )
    assert isinstance(function, dict)
    return tool(function.get("name"), function.get("description"), function.get("parameters"), where)


def _schema(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that ``response_format`` asks for; None: text."""
    wanted = body.get("response_format")
    if wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text"):
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    inner = wanted.get("json_schema") if kind == "json_schema" else None
    found = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(found, dict):
        said = "response_format must be of type text, json_object, or json_schema with json_schema.schema"
        raise ApiError(400, said, param="response_format")
    return found


def _choice(choice: Any, offered: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The tools that the model is to see."""
    if choice in (None, "auto", "required"):
        require(choice != "required" or bool(offered), "tool_choice: there are no tools", "tool_choice")
        return offered
    if choice == "none":
        return ()
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    chosen = tuple(t for t in offered if t["function"]["name"] == name)
    require(bool(chosen), "tool_choice must be none, auto, required, or name a function of tools", "tool_choice")
    return chosen


# ---- answers


def usage(replies: Sequence[Reply], n: int = 1) -> dict[str, int]:
    """n: how many of the replies share a prompt, which counts once."""
    tokens_in, tokens_out = sum(r.tokens_in for r in replies[::n]), sum(r.tokens_out for r in replies)
    return {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls else "stop" if reply.outcome == "stop" else "length"


def _head(kind: str, name: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}


def chat_body(name: str, replies: Sequence[Reply], n: int) -> dict[str, Any]:
    choices = [
        {
            "index": i,
            "message": {**reply.message(), "refusal": None},
            "logprobs": None,
            "finish_reason": _finish(reply),
        }
        for i, reply in enumerate(replies)
    ]
    return {**_head("chat.completion", name), "choices": choices, "usage": usage(replies, n)}


def completions_body(name: str, replies: Sequence[Reply], n: int) -> dict[str, Any]:
    choices = [
        {"index": i, "text": reply.text, "logprobs": None, "finish_reason": _finish(reply)}
        for i, reply in enumerate(replies)
    ]
    return {**_head("text_completion", name), "choices": choices, "usage": usage(replies, n)}


class ChatWriter:
    """Server-sent events of a chat completion; ``plain``: of a plain one."""

    def __init__(self, name: str, count: int, n: int, include_usage: bool, plain: bool = False) -> None:
        self._head = _head("text_completion" if plain else "chat.completion.chunk", name)
        self._plain, self._count, self._n = plain, count, n
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._replies: dict[int, Reply] = {}

    def _event(self, index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        body = {"text": delta.get("content", "")} if self._plain else {"delta": delta}
        choice = {"index": index, **body, "logprobs": None, "finish_reason": finish}
        return b"data: " + encode({**self._head, "choices": [choice], **self._usage}) + b"\n\n"

    def begin(self, tokens_in: int) -> bytes:
        if self._plain:
            return b""
        return b"".join(self._event(i, {"role": "assistant", "content": ""}) for i in range(self._count))

    def piece(self, index: int, text: str) -> bytes:
        return self._event(index, {"content": text})

    def end(self, index: int, rest: str, reply: Reply) -> bytes:
        self._replies[index] = reply
        out = self.piece(index, rest) if rest else b""
        if reply.tool_calls:
            calls = [{"index": k, **call.message()} for k, call in enumerate(reply.tool_calls)]
            out += self._event(index, {"tool_calls": calls})
        return out + self._event(index, {}, _finish(reply))

    def close(self) -> bytes:
        out = b""
        if self._usage:
            found = usage([self._replies[i] for i in sorted(self._replies)], self._n)
            out = b"data: " + encode({**self._head, "choices": [], "usage": found}) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + encode(error_body(error)) + b"\n\n"


def models_body(name: str) -> dict[str, Any]:
    """A list that both APIs' clients can read."""
    return {
        "object": "list",
        "data": [model_body(name)],
        "has_more": False,
        "first_id": name,
        "last_id": name,
    }


def model_body(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "edgees",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
