"""Anthropic's messages: requests read, answers and errors written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from edgees.endpoint.wanted import (
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

MOST_MESSAGES = 100_000
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def read(body: Mapping[str, Any], counting: bool = False) -> Wanted:
    """counting: the tokens of the prompt are all that is asked for. :raises ApiError: 400, which names the field."""
    refuse(
        body,
        {
            "mcp_servers": "there are none here",
            "container": "there are none here",
        },
    )
    thinking = body.get("thinking")
    require(
        not (isinstance(thinking, dict) and thinking.get("type") == "enabled"),
        "thinking: the model does not think apart from its answer",
        "thinking",
    )
    asked = whole(body, "max_tokens", 1)
    require(asked is not None or counting, "max_tokens: field required", "max_tokens")
    offered = tuple(_tool(t, f"tools.{i}") for i, t in enumerate(objects(body.get("tools"), "tools", MOST_TOOLS)))
    choice = body.get("tool_choice") or {"type": "auto"}
    require(isinstance(choice, dict), "tool_choice must be an object", "tool_choice")
    chosen = _choice(choice, offered)
    return Wanted(
        messages=_messages(body),
        tools=chosen,
        **form(chosen, choice.get("type") in ("any", "tool"), _schema(body), "output_config.format"),
        single=flag(choice, "disable_parallel_tool_use"),
        model=name_of(body),
        max_tokens=asked,
        temperature=number(body, "temperature", 0, 1),
        stop=stops(body.get("stop_sequences"), "stop_sequences"),
        stream=flag(body, "stream"),
    )


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    found = objects(body.get("messages"), "messages", MOST_MESSAGES)
    require(bool(found), "messages: at least one message is required", "messages")
    require(
        found[-1].get("role") != "assistant",
        "messages: the last one must be the user's, an answer cannot be begun for the model",
        "messages",
    )
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": texts(body["system"], "system")})
    names: dict[str, str] = {}
    for i, message in enumerate(found):
        for part in _parts(message, f"messages.{i}", names):
            last = messages[-1] if messages else {}
            if last.get("role") == part["role"] == "user":  # turns of one side are one turn
                last["content"] += "\n" + part["content"]
            else:
                messages.append(part)
    return tuple(messages)


def _parts(message: Mapping[str, Any], where: str, names: dict[str, str]) -> list[Message]:
    """A message of blocks as messages of OpenAI's form. names: of the tools called so far, by id; added to."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        hint = "; the system prompt is a field of its own" if role == "system" else ""
        raise ApiError(400, f"{where}.role must be user or assistant, not {role!a}{hint}")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    require(isinstance(blocks, list) and bool(blocks), f"{where}.content must be text or a list of blocks", where)
    assert isinstance(blocks, list)
    said: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for i, block in enumerate(blocks):
        place = f"{where}.content.{i}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            said.append(texts([block], place))
        elif kind == "tool_use" and role == "assistant":
            good = isinstance(block.get("id"), str) and isinstance(block.get("name"), str)
            require(good and isinstance(block.get("input"), dict), f"{place}: tool_use needs id, name, input", place)
            names[block["id"]] = block["name"]
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            known = names.get(block.get("tool_use_id")) if isinstance(block.get("tool_use_id"), str) else None
            require(known is not None, f"{place}: no tool_use before it has the id of this tool_result", place)
            text = texts(block.get("content") or "", f"{place}.content")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "name": known, "content": text})
        elif not (kind in ("thinking", "redacted_thinking") and role == "assistant"):
            raise ApiError(400, f"{place}: blocks of type {kind!a} are not supported in messages of the {role}")
    if role == "user":
        return [*results, *([{"role": "user", "content": "\n".join(said)}] if said or not results else [])]
    return [{"role": "assistant", "content": "\n".join(said), **({"tool_calls": calls} if calls else {})}]


def _tool(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = given.get("type", "custom")
    require(kind in ("custom", None), f"{where}: tools of type {kind!a} run at Anthropic's, not here", where)
    return tool(given.get("name"), given.get("description"), given.get("input_schema"), where)


def _schema(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that an answer has to follow; None: text. ``output_format`` is the older name."""
    output = body.get("output_config")
    wanted = (output.get("format") if isinstance(output, dict) else None) or body.get("output_format")
    if not wanted:
        return None
    good = isinstance(wanted, dict) and wanted.get("type") == "json_schema" and isinstance(wanted.get("schema"), dict)
    require(good, "output_config.format must be of type json_schema, with a schema", "output_config")
    return dict(wanted["schema"])


def _choice(choice: Mapping[str, Any], offered: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The tools that the model is to see."""
    kind = choice.get("type")
    if kind in ("auto", "any"):
        return offered
    if kind == "none":
        return ()
    chosen = tuple(t for t in offered if kind == "tool" and t["function"]["name"] == choice.get("name"))
    require(bool(chosen), "tool_choice must be of type auto, any, none, or tool with the name of one", "tool_choice")
    return chosen


# ---- answers


def _stop(reply: Reply) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)"""
    if reply.tool_calls:
        return "tool_use", None
    if reply.outcome != "stop":
        return ("max_tokens" if reply.outcome == "length" else "model_context_window_exceeded"), None
    return ("end_turn", None) if reply.stopped_by is None else ("stop_sequence", reply.stopped_by)


def _message(name: str, tokens_in: int) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": tokens_in, "output_tokens": 0},
    }


def body(name: str, replies: Sequence[Reply]) -> dict[str, Any]:
    [reply] = replies
    content: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text else []
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.tool_calls
    ]
    reason, sequence = _stop(reply)
    found = {**_message(name, reply.tokens_in), "content": content, "stop_reason": reason, "stop_sequence": sequence}
    found["usage"]["output_tokens"] = reply.tokens_out
    return found


class MessageWriter:
    """Server-sent events of a message."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._block = 0
        self._open = False

    @staticmethod
    def _event(kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **fields}) + b"\n\n"

    def begin(self, tokens_in: int) -> bytes:
        return self._event("message_start", message=_message(self._name, tokens_in))

    def _start(self, block: dict[str, Any]) -> bytes:
        self._open = True
        return self._event("content_block_start", index=self._block, content_block=block)

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        self._block += 1
        return self._event("content_block_stop", index=self._block - 1)

    def piece(self, index: int, text: str) -> bytes:
        out = b"" if self._open else self._start({"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": text}
        return out + self._event("content_block_delta", index=self._block, delta=delta)

    def end(self, index: int, rest: str, reply: Reply) -> bytes:
        out = self.piece(index, rest) if rest else b""
        out += self._stop()
        for call in reply.tool_calls:
            out += self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            part = {"type": "input_json_delta", "partial_json": json.dumps(call.arguments, ensure_ascii=False)}
            out += self._event("content_block_delta", index=self._block, delta=part) + self._stop()
        reason, sequence = _stop(reply)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return out + self._event("message_delta", delta=delta, usage={"output_tokens": reply.tokens_out})

    def close(self) -> bytes:
        return self._event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return self._event("error", error=error_body(error)["error"])
