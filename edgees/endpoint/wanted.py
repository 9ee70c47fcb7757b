"""What a client asked for, whichever API it speaks; what it gets back; and how it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edgees import tools
from edgees.episodes import Message
from edgees.errors import UsageError

MOST_CHOICES = 8
MOST_STOPS = 16
MOST_TOOLS = 128


class ApiError(Exception):
    """An answer that is an error. status: HTTP's; code, param: as in OpenAI's error objects; headers: further ones."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class Wanted:
    """A request, checked. Contents are text; messages and tools have the form of OpenAI's chat API.

    prompt: of plain completions, which then have no messages. tools: those that the model is to see. single: at most
    one tool call is wanted. model, max_tokens, temperature, seed: as asked for, None where nothing was said. grammar:
    GBNF for the answer, empty: none; firm: where the engine cannot follow it, the request is refused.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    single: bool = False
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str = ""
    firm: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


@dataclass(frozen=True)
class Reply:
    """One answer. outcome: as of Completion; stopped_by: the stop string that ended it; tokens_in, tokens_out: numbers
    of tokens."""

    text: str
    tool_calls: tuple[tools.Call, ...]
    outcome: str
    stopped_by: str | None
    tokens_in: int
    tokens_out: int

    def message(self) -> Message:
        """As it stands in the conversation that goes on from it."""
        message: Message = {"role": "assistant", "content": self.text or (None if self.tool_calls else "")}
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


def split_calls(text: str, wanted: Wanted, ids: Sequence[str]) -> tuple[str, tuple[tools.Call, ...]]:
    """(text, tool calls) of what the model wrote; ids: names for the calls, as many as there may be.

    What cannot be read as a call of one of the tools stays text.
    """
    if not wanted.tools:
        return text, ()
    parsed = tools.parse(text, names=wanted.names)
    if not parsed.calls:
        return text, ()
    chosen = parsed.calls[: 1 if wanted.single else len(ids)]
    return parsed.content, tuple(replace(call, id=name) for name, call in zip(ids, chosen, strict=False))


def form(
    offered: Sequence[Mapping[str, Any]], forced: bool, schema: Mapping[str, Any] | None, where: str
) -> dict[str, Any]:
    """``grammar`` and ``firm`` of an answer that has to be JSON of a schema, where there is one, or a call of one of
    the tools, where that is forced; either, where there are both.

    A schema is firm: :raises ApiError: 400 for what no grammar can be made of. Calls are forced as far as it goes.
    """
    if schema is None and not forced:
        return {}
    calls = list(offered) or None
    try:
        made = tools.grammar(tools=calls, schema=None if forced else schema)
    except UsageError as error:
        if schema is None:
            return {}
        raise ApiError(400, f"{where}: {error.message}", param=where) from None
    return {"grammar": made, "firm": schema is not None}


class Writer(Protocol):
    """A streamed answer in one API's events. All methods return what is to be sent."""

    def begin(self, tokens_in: int) -> bytes: ...

    def piece(self, index: int, text: str) -> bytes: ...

    def end(self, index: int, rest: str, reply: Reply) -> bytes:
        """rest: the text of the reply that has not been sent yet."""

    def close(self) -> bytes:
        """All choices have ended."""

    def error(self, error: ApiError) -> bytes: ...


def encode(payload: Any) -> bytes:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


# ---- checks


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. :raises ApiError: 400."""

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        found = json.loads(body, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    require(isinstance(found, dict), "the body must be a JSON object")
    return dict(found)


def require(condition: bool, message: str, param: str | None = None) -> None:
    if not condition:
        raise ApiError(400, message, param=param)


def whole(body: Mapping[str, Any], key: str, low: int, high: int = 1 << 31) -> int | None:
    value = body.get(key)
    require(
        value is None or (type(value) is int and low <= value <= high),
        f"{key} must be a whole number of {low} to {high}",
        key,
    )
    return value


def number(body: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    good = type(value) in (int, float) and low <= value <= high
    require(good, f"{key} must be a number of {low:g} to {high:g}", key)
    return float(value)


def flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    require(value is None or isinstance(value, bool), f"{key} must be true or false", key)
    return bool(value)


def name_of(body: Mapping[str, Any]) -> str:
    value = body.get("model", "")
    require(isinstance(value, str), "model must be text", "model")
    return str(value)


def stops(value: Any, key: str) -> tuple[str, ...]:
    """Stop strings: None, one, or a list of them."""
    found = [value] if isinstance(value, str) else [] if value is None else value
    require(
        isinstance(found, list) and len(found) <= MOST_STOPS and all(isinstance(s, str) and s for s in found),
        f"{key} must be text or a list of at most {MOST_STOPS} texts, none of them empty",
        key,
    )
    return tuple(found)


def refuse(body: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    """400 for fields whose being ignored would give another answer than was asked for. fields: name -> reason."""
    for key, reason in fields.items():
        if body.get(key) not in (None, False, 0, "", [], {}):
            raise ApiError(400, f"{key} is not supported: {reason}", code="unsupported_parameter", param=key)


def texts(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A content as one text: text, or a list of text parts, which are joined by line ends."""
    if isinstance(value, str):
        return value
    require(isinstance(value, list), f"{where} must be text or a list of text parts", where)
    found = []
    for i, part in enumerate(value):
        place = f"{where}[{i}]"
        require(isinstance(part, dict), f"{place} must be an object", place)
        kind = part.get("type")
        require(kind in kinds, f"{place}: parts of type {kind!a} are not supported, only text is", place)
        text = part.get(kind)
        require(isinstance(text, str), f"{place}.{kind} must be text", place)
        found.append(text)
    return "\n".join(found)


def objects(value: Any, key: str, most: int) -> list[dict[str, Any]]:
    """A list of objects; None is an empty one."""
    found = [] if value is None else value
    require(
        isinstance(found, list) and len(found) <= most and all(isinstance(x, dict) for x in found),
        f"{key} must be a list of at most {most} objects",
        key,
    )
    return list(found)


def tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    require(isinstance(name, str) and 0 < len(name) <= 128, f"{where}: a tool needs a name", where)
    require(description is None or isinstance(description, str), f"{where}: description must be text", where)
    require(parameters is None or isinstance(parameters, dict), f"{where}: the schema must be an object", where)
    function: dict[str, Any] = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
