"""Tools in a conversation: schemas from typed methods, calls found in replies, and conversations without tools.

Messages and schemas are those of OpenAI's chat API. A model whose chat template knows tools writes calls in its own
way; one that does not is told of them in the system message (:func:`describe`) and writes the plain form::

    {"tool": "set_light", "room": "hall", "level": 3}

What a model writes wrongly never raises: it becomes words to send back to it.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from edgees.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
FORM = '{"tool": NAME, ARGUMENT: VALUE, ...}'
LONGEST = 200
"""Characters that a grammar allows in a string where its schema does not say."""
MOST = 16
"""Entries that a grammar allows in a list or map where its schema does not say."""


@dataclass(frozen=True)
class Call:
    """A call that a model wrote. ``arguments`` by name, as JSON values."""

    id: str
    name: str
    arguments: dict[str, Any]

    def message(self) -> dict[str, Any]:
        """An entry of ``tool_calls`` of an assistant message."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True)
class Parsed:
    """A reply taken apart. content: the text without its calls; errors: what to tell the model of its failed calls."""

    content: str
    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()

    def message(self) -> dict[str, Any]:
        """The reply as an assistant message."""
        calls = {"tool_calls": [call.message() for call in self.calls]} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}


# ---------------------------------------------------------------- schemas
_PLAIN_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields|Raises|Examples?|Notes?):\s*$", re.M)
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(\[.*\])\)\s*$", re.S)


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The function schema of a typed function or method.

    Types come from the hints: str, int, float, bool, list, dict, Literal, Optional, unions of these, Any. Descriptions
    come from the docstring: what precedes ``Args:``, and there ``name: text`` for each argument, where a final
    ``(choices: ["a", "b"])`` lists the values allowed (transformers' convention). An argument with a default may be
    left out; None as its default is not offered to the model.

    Errors: UsageError naming method and argument.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise UsageError(f"tool {name}: its signature cannot be read: {error}", "Give a plain typed method.") from error
    text, told = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for i, parameter in enumerate(parameters):
        where = f"tool {name}, argument {parameter.name}"
        if i == 0 and parameter.name in ("self", "cls"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UsageError(f"{where}: a model passes arguments by name only", "Name each argument.")
        if parameter.name == "tool":
            raise UsageError(f"{where}: that name is taken by the plain JSON form {FORM}", "Call it something else.")
        if parameter.name not in hints:
            raise UsageError(f"{where}: it has no type hint", f"For example {parameter.name}: str")
        hint, optional = hints[parameter.name], parameter.default is not parameter.empty
        if optional and parameter.default is None and type(None) in get_args(hint):
            hint = Union[tuple(a for a in get_args(hint) if a is not type(None))]  # noqa: UP007 - built at run time
        entry = _typed(hint, where)
        if parameter.name in told:
            entry.update(_described(told[parameter.name], where))
        if not optional:
            required.append(parameter.name)
        elif isinstance(parameter.default, (str, int, float, bool)):
            entry["default"] = parameter.default
        properties[parameter.name] = entry
    about: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": about}}


def _typed(hint: Any, where: str) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in _PLAIN_TYPES:
        return {"type": _PLAIN_TYPES[hint]}
    if hint is list or (origin in (list, Sequence) and len(args) == 1):
        return {"type": "array", **({"items": _typed(args[0], where)} if args else {})}
    if hint is dict or (origin in (dict, Mapping) and args[0] is str):
        return {"type": "object", **({"additionalProperties": _typed(args[1], where)} if args else {})}
    if origin is Literal and all(type(a) in _PLAIN_TYPES for a in args):
        kinds = list(dict.fromkeys(_PLAIN_TYPES[type(a)] for a in args))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_typed(a, where) for a in args]}
    raise UsageError(
        f"{where}: the type {hint if origin else getattr(hint, '__name__', hint)} cannot be told to a model",
        "Use str, int, float, bool, list[...], dict[str, ...], Literal[...] or Optional[...].",
    )


def _described(text: str, where: str) -> dict[str, Any]:
    choices = _CHOICES.search(text)
    if choices is None:
        return {"description": text}
    try:
        return {"description": text[: choices.start()].strip(), "enum": json.loads(choices[1])}
    except ValueError as error:
        raise UsageError(f"{where}: its choices are not a JSON list: {error}", 'Write (choices: ["a", "b"]).') from None


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """(description, {argument: its description}) of a docstring in Google's style."""
    parts = _SECTION.split(text)
    told: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        lines = [line for line in body.splitlines() if line.strip()]
        depth = min((len(line) - len(line.lstrip()) for line in lines), default=0)
        name = ""
        for line in lines:
            found = _ARGUMENT.match(line[depth:])
            if found:
                name = found[1]
                told[name] = found[2].strip()
            elif name:
                told[name] = f"{told[name]} {line.strip()}".strip()
    return " ".join(parts[0].split()), told


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """``name``, ``description`` and ``parameters`` of a function schema, with or without its wrapping.

    Errors: UsageError where it is none.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError(f"this is no function schema: {str(tool)[:200]}", '{"type": "function", "function": {...}}')
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise UsageError(f"tool {function['name']}: its parameters are no JSON schema", '{"type": "object", ...}')
    return function


def _arguments(tool: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], Mapping[str, Any]]:
    """(schema by argument, required ones, the whole schema of the arguments)."""
    whole: Mapping[str, Any] = function_of(tool).get("parameters") or {}
    properties = {str(key): value for key, value in (whole.get("properties") or {}).items()}
    return properties, tuple(whole.get("required") or ()), whole


def _follow(node: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a local ``$ref`` stands for."""
    for _ in range(32):
        if not isinstance(node, Mapping) or "$ref" not in node:
            return node
        target: Any = root
        for part in str(node["$ref"]).removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        node = target
    return {}


# ---------------------------------------------------------------- calls in a reply
_MARK = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>")
_BREAK = re.compile(f"</tool_call>|{_MARK.pattern}")
_CLOSE = re.compile(r"\s*(?:</tool_call>|<\|eo[mt]_id\|>)?")
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_FENCE = re.compile(r"```[ \t]*(?:json|tool_calls?)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.S | re.I)
_MEANT = re.compile(r"""\s*\[?\s*\{\s*["']?(?:tool|name|function)\b""")
_BETWEEN = re.compile(r"[\s,;]*(?=\{)")
_DEPTH = 32
"""Lists and objects in one another that a call may have."""
_BEGINS = re.compile(rf"\s*(?:[\[{{]|{_MARK.pattern})")
_STARTS = 8
"""Opening braces tried before a text counts as one without JSON."""


def parse(text: str, names: Collection[str] | None = None, start: int = 0) -> Parsed:
    """The tool calls in a model's reply.

    names: of the tools there are; None: any, empty: none, so that all is content. start: number of the first call,
    so that ids (``call_0``, ...) are unique in a conversation. Understood are ``<tool_call>`` of Hermes and Qwen (an
    object, several, or SmolLM's list), ``[TOOL_CALLS]`` of Mistral, Llama's object with ``parameters``, with or
    without ``<|python_tag|>``, and, fenced or not, as the first JSON of the reply, ``{"name", "arguments"}`` or the
    plain form. What stands in ``<think>`` is never a call. Never raises.
    """
    thoughts, body = _thoughts(text)
    if names is not None and not names:
        return Parsed(text)
    found = _Found(names, start)
    rest = _marked(body, found) if _MARK.search(body) else _bare(body, found)
    if not found.calls and not found.errors:
        return Parsed(text)
    return Parsed((thoughts + rest).strip(), tuple(found.calls), tuple(found.errors))


def _thoughts(text: str) -> tuple[str, str]:
    """(what a model thinks, what it says). Many templates have it think from the start, so ``<think>`` may lack."""
    if _BEGINS.match(text):  # with a call; ``</think>`` may stand in its arguments
        return "", text
    head, end, body = text.partition("</think>")
    if end or head.lstrip().startswith("<think>"):
        return head + end, body
    return "", text


@dataclass
class _Found:
    names: Collection[str] | None
    start: int
    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, value: Any) -> None:
        """A JSON value that is meant as a call, or as several."""
        for entry in value if isinstance(value, list) and value else [value]:
            try:
                name, arguments = _read(entry)
            except ValueError as error:
                self.errors.append(f"That is no tool call: {error}. Write it as {FORM}")
                continue
            if self.names is not None and name not in self.names:
                self.errors.append(f"There is no tool {_short(name)}. Tools: {', '.join(sorted(self.names))}.")
            else:
                self.calls.append(Call(f"call_{self.start + len(self.calls)}", name, arguments))

    def malformed(self, error: object) -> None:
        self.errors.append(f"That is no tool call: its JSON is malformed ({error}). Write it as {FORM}")

    def meant(self, value: Any) -> bool:
        """Whether a JSON value outside all marks is meant as a call."""
        if isinstance(value, list):
            return bool(value) and all(isinstance(entry, dict) and self.meant(entry) for entry in value)
        if not isinstance(value, dict):
            return False
        inner = _unwrapped(value)
        known = self.names is not None and isinstance(inner.get("name"), str) and inner["name"] in self.names
        return "tool" in inner or known or ("name" in inner and ("arguments" in inner or "parameters" in inner))


def _unwrapped(value: dict[str, Any]) -> dict[str, Any]:
    """What stands in ``function``, in the form that the API has for calls."""
    inner = value.get("function")
    return inner if isinstance(inner, dict) and not ("tool" in value or "name" in value) else value


def _read(value: Any) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a call in any of its forms. Raises ValueError with words for the model."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {_kind_of(value)}, not a JSON object")
    value = _unwrapped(value)
    key = "tool" if "tool" in value else "name"
    if key not in value:
        raise ValueError("the name of the tool is missing")
    name = value[key]
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of the tool is {_kind_of(name)}, not text")
    rest = {k: v for k, v in value.items() if k != key}
    wrapped = [k for k in ("arguments", "parameters") if k in rest]
    if wrapped and (key == "name" or len(rest) == 1):
        given = rest[wrapped[0]]
    else:
        given = rest if key == "tool" else {k: v for k, v in rest.items() if k not in ("id", "type")}
    if isinstance(given, str):
        try:
            given = _loads(given)[0] if given.strip() else {}
        except ValueError as error:
            raise ValueError(f"its arguments are text that is not JSON ({error})") from None
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ValueError(f"its arguments are {_kind_of(given)}, not a JSON object")
    return name, given


def _marked(body: str, found: _Found) -> str:
    """Calls behind marks; the text outside them."""
    outside, position = [], 0
    while (mark := _MARK.search(body, position)) is not None:
        outside.append(body[position : mark.start()])
        named = _NAMED.match(body, mark.end())
        try:
            values, position = _loads_all(body, named.end() if named else mark.end())
            if named:
                values = [{"name": named[1], "arguments": value} for value in values]
            for value in values:
                found.add(value)
            close = _CLOSE.match(body, position)
            position = close.end() if close else position
        except ValueError as error:
            found.malformed(error)
            following = _BREAK.search(body, mark.end())
            position = len(body)
            if following:
                position = following.end() if following[0] == "</tool_call>" else following.start()
    return "".join([*outside, body[position:]])


def _bare(body: str, found: _Found) -> str:
    """A call as the first JSON of a text without marks; the text outside it."""
    fence = _FENCE.search(body)
    if fence and body.find("{", 0, fence.start()) < 0:
        before, inside, after = body[: fence.start()], fence[1], body[fence.end() :]
    else:
        before, inside, after = "", body, ""
    start = len(inside) - len(inside.lstrip())
    if inside[start : start + 1] != "[":
        start = inside.find("{")
    for _ in range(_STARTS):
        if start < 0:
            break
        try:
            values, end = _loads_all(inside, start)
        except ValueError as error:
            if _MEANT.match(inside, start):
                found.malformed(error)
                return f"{before}{inside[:start]}"
            start = inside.find("{", start + 1)
            continue
        if found.meant(values[0]):
            for value in values:
                if found.meant(value):
                    found.add(value)
            return f"{before}{inside[:start]}{inside[end:]}{after}"
        break
    return body


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
"""Strict about what models write: an object with a key twice, or NaN, is no JSON."""


def _loads(text: str, start: int = 0) -> tuple[Any, int]:
    """(value, end) of the JSON at ``start``. Raises ValueError in a few words."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {max(0, error.pos - start)}") from None
    except RecursionError:
        value, end = [], -1
    layer = [value]
    for _ in range(_DEPTH if end >= 0 else 0):
        if not layer:
            return value, end
        layer = [x for v in layer for x in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]
    raise ValueError("it is nested too deeply")


def _loads_all(text: str, start: int) -> tuple[list[Any], int]:
    """A JSON value, and the objects that follow it at once."""
    value, end = _loads(text, start)
    values = [value]
    while (between := _BETWEEN.match(text, end)) is not None:
        value, end = _loads(text, between.end())
        values.append(value)
    return values, end


# ---------------------------------------------------------------- arguments
def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


_WORDS = {
    "string": "text", "integer": "an integer", "number": "a number", "boolean": "true or false", "null": "null",
    "array": "a list", "object": "an object",
}  # fmt: skip


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    match kind:
        case "integer":
            return isinstance(value, int)
        case "number":
            return isinstance(value, (int, float))
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return kind == "null" and value is None


def _kinds(node: Mapping[str, Any]) -> list[str]:
    kind = node.get("type") or []
    return [kind] if isinstance(kind, str) else [str(k) for k in kind]


def coerce(call: Call, tool: Mapping[str, Any]) -> Call:
    """The call with what was obviously meant: "5" for 5, "On" for "on", null for an argument that may be left out."""
    properties, required, root = _arguments(tool)
    found = {}
    for key, value in call.arguments.items():
        if value is None and key in properties and key not in required and _fault(value, properties[key], root, key):
            continue
        found[key] = _meant(value, properties[key], root) if key in properties else value
    return replace(call, arguments=found)


def _meant(value: Any, node: Any, root: Mapping[str, Any]) -> Any:
    node = _follow(node, root)
    if not isinstance(node, Mapping):
        return value
    if isinstance(value, list) and "items" in node:
        value = [_meant(entry, node["items"], root) for entry in value]
    elif isinstance(value, dict):
        other = node.get("additionalProperties")
        value = {k: _meant(v, (node.get("properties") or {}).get(k, other), root) for k, v in value.items()}
    if not _fault(value, node, root, ""):
        return value
    for choice in node.get("anyOf") or node.get("oneOf") or ():
        other = _meant(value, choice, root)
        if not _fault(other, choice, root, ""):
            return other
    word = value.strip().casefold() if isinstance(value, str) else None
    similar = [e for e in node.get("enum") or () if str(e).casefold() == (word if word is not None else str(value))]
    tries = similar if len(similar) == 1 else []
    for kind in _kinds(node):
        if kind == "string" and isinstance(value, (int, float)) and not isinstance(value, bool):
            tries.append(str(value))
        elif kind == "integer" and isinstance(value, float) and value.is_integer():
            tries.append(int(value))
        elif kind in ("integer", "number", "boolean", "array", "object") and word:
            try:
                text = word if kind == "boolean" else str(value)
                read, end = _loads(text)
                tries += [_meant(read, node, root)] if not isinstance(read, str) and not text[end:].strip() else []
            except ValueError:
                continue
    return next((other for other in tries if not _fault(other, node, root, "")), value)


def check(call: Call, tool: Mapping[str, Any]) -> str:
    """'' or, in words for the model, what is wrong with the arguments. Call :func:`coerce` first."""
    properties, required, root = _arguments(tool)
    wrong = [f'argument "{key}" is missing' for key in required if key not in call.arguments]
    for key, value in call.arguments.items():
        if key in properties:
            wrong += filter(None, [_fault(value, properties[key], root, f'"{key}"')])
        elif not root.get("additionalProperties"):
            wrong.append(f"there is no argument {_short(key)}")
    if not wrong:
        return ""
    return f"{call.name}: {'; '.join(wrong)}. It takes: {', '.join(properties) or 'no arguments'}."


def _fault(value: Any, node: Any, root: Mapping[str, Any], where: str) -> str:
    """'' or in what a value differs from its JSON schema. Keywords that are not known here are not looked at."""
    node = _follow(node, root)
    if not isinstance(node, Mapping):
        return ""
    choices = node.get("anyOf") or node.get("oneOf")
    if choices:
        faults = [_fault(value, choice, root, where) for choice in choices]
        return faults[0] if all(faults) else ""
    kinds = _kinds(node)
    if kinds and not any(_is(value, kind) for kind in kinds) and not (value is None and node.get("nullable")):
        return f"{where} must be {' or '.join(_WORDS.get(k, k) for k in kinds)}, not {_short(value)}"
    allowed = [node["const"]] if "const" in node else node.get("enum")
    if allowed is not None and not any(type(value) is type(e) and value == e for e in allowed):
        return f"{where} must be one of {', '.join(json.dumps(e, ensure_ascii=False) for e in allowed)}"
    size = len(value) if isinstance(value, (str, list)) else value
    low, high = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
    if not isinstance(value, (str, list)):
        low, high = "minimum", "maximum"
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        what = f"{where} must {'be' if size is value else 'have'}"
        unit = "" if size is value else " characters" if isinstance(value, str) else " entries"
        if isinstance(node.get(low), (int, float)) and size < node[low]:
            return f"{what} at least {node[low]}{unit}"
        if isinstance(node.get(high), (int, float)) and size > node[high]:
            return f"{what} at most {node[high]}{unit}"
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        inner = [(entry, node.get("items"), f"{where}[{i}]") for i, entry in enumerate(value)]
    elif isinstance(value, dict):
        properties = node.get("properties") or {}
        missing = [key for key in node.get("required") or () if key not in value]
        if missing:
            return f"{where} lacks {', '.join(missing)}"
        other = node.get("additionalProperties")
        unknown = [key for key in value if key not in properties]
        if unknown and other is False:
            return f"{where} has no {_short(unknown[0])}"
        inner = [(v, properties.get(key, other), f"{where}.{key}") for key, v in value.items()]
    return next(filter(None, (_fault(*each[:2], root, each[2]) for each in inner)), "")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# ---------------------------------------------------------------- conversations
def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """What to tell a model of its tools: a line for each, written as the call that it is to answer with."""
    lines = ["To use a tool, write nothing but its JSON:"]
    for tool in tools:
        function = function_of(tool)
        properties, required, root = _arguments(tool)
        told = {key: _word(node, root) + ("" if key in required else " (optional)") for key, node in properties.items()}
        nested = _nested(told)
        shown = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {word}" for key, word in told.items())
        shown = f'"arguments": {{{shown}}}' if nested else shown
        about = [str(function.get("description") or "").strip()]
        for key, node in properties.items():
            node = _follow(node, root)
            if isinstance(node, Mapping) and node.get("description"):
                about.append(f"{key}: {str(node['description']).strip()}")
        head = json.dumps(function["name"], ensure_ascii=False)
        line = f'{{"tool": {head}{", " if shown else ""}{shown}}}'
        lines.append(" ".join([line, " ".join(filter(None, about))]).strip())
    return "\n".join(lines)


def _nested(arguments: Collection[str]) -> bool:
    """Whether the plain form needs its arguments in an object of their own, to be read again as they are."""
    return "tool" in arguments or set(arguments) in ({"arguments"}, {"parameters"})


def _word(node: Any, root: Mapping[str, Any]) -> str:
    node = _follow(node, root)
    if not isinstance(node, Mapping):
        return "value"
    choices = node.get("anyOf") or node.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(_word(choice, root) for choice in choices))
    if node.get("enum"):
        return " or ".join(json.dumps(e, ensure_ascii=False) for e in node["enum"])
    words = [
        f"list of {_word(node['items'], root)}" if kind == "array" and node.get("items") else
        _WORDS.get(kind, kind).removeprefix("an ").removeprefix("a ")
        for kind in _kinds(node)
    ]  # fmt: skip
    return " or ".join(words) or "value"


def normal(messages: Sequence[Mapping[str, Any]], developer: bool = False) -> list[dict[str, Any]]:
    """Messages of the chat API as chat templates expect them.

    Contents become text (parts joined by line breaks, None empty), arguments of calls become objects, and results get
    the name of their tool. Ids are numbered anew, with nine letters and digits, which is all that Mistral's templates
    accept. developer: whether the template knows that role; else it becomes system.

    Errors: UsageError naming the message.
    """
    ids: dict[Any, tuple[str, str]] = {}
    numbered = 0
    found = []
    for i, message in enumerate(messages):
        where = f"message {i + 1}"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise UsageError(f"{where}: its role is {role!r}", f"Roles are {', '.join(ROLES)}.")
        role = "system" if role == "developer" and not developer else role
        now = {**message, "role": role, "content": _text(message.get("content"), where)}
        calls = now.pop("tool_calls", None)
        if calls:
            now["tool_calls"] = []
            for call in calls if isinstance(calls, (list, tuple)) else [calls]:
                name, arguments = _called(call, where)
                new = f"call{numbered:05d}"
                numbered += 1
                ids[call.get("id")] = (new, name)
                function = {"name": name, "arguments": arguments}
                now["tool_calls"].append({"id": new, "type": "function", "function": function})
        if role == "tool":
            new, name = ids.get(message.get("tool_call_id"), ("call99999", "tool"))
            now |= {"tool_call_id": new, "name": str(message.get("name") or name)}
        found.append(now)
    return found


def needed(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has anything to do with tools."""
    return bool(tools) or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)


def _called(call: Any, where: str) -> tuple[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f"{where}: an entry of its tool_calls is no call of a function",
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            value, end = _loads(arguments)
        except ValueError:
            return function["name"], _clean(arguments)
        arguments = value if isinstance(value, dict) and not arguments[end:].strip() else _clean(arguments)
    return function["name"], arguments


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return _clean(content or "")
    if isinstance(content, (list, tuple)):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return _clean("\n".join(texts))
        kinds = {str(part.get("type")) for part in content if isinstance(part, Mapping) and "text" not in part}
        told = ", ".join(sorted(kinds)) or "that"
        raise UsageError(f"{where}: only text can be read, not {told}", "Send text parts.")
    raise UsageError(f"{where}: its content is {_kind_of(content)}, not text", "Content is text, text parts or null.")


def _clean(text: str) -> str:
    """Without lone surrogates, which JSON can spell but no tokenizer reads."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def written(name: str, arguments: Any) -> str:
    """A call in the plain form."""
    if not isinstance(arguments, Mapping) or _nested(arguments):
        return json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False)
    return json.dumps({"tool": name, **arguments}, ensure_ascii=False)


def plain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """A conversation with tools as one of system, user and assistant only, whose user and assistant alternate.

    The tools are described in the system message, calls become their plain JSON and results messages of the user.
    """
    system: list[str] = []
    found: list[dict[str, Any]] = []
    for message in normal(messages):
        role, text = message["role"], message["content"]
        if role == "system" and not found:
            system.append(text)
            continue
        if role == "tool":
            text = f"Result of {message['name']}: {text}"
        for call in message.get("tool_calls", ()):
            text += ("\n" if text else "") + written(**call["function"])
        role = role if role == "assistant" else "user"
        if found and found[-1]["role"] == role:
            found[-1]["content"] += "\n" + text
        else:
            found.append({"role": role, "content": text})
    if tools:
        system.append(describe(tools))
    return [*([{"role": "system", "content": "\n\n".join(system)}] if system else []), *found]


def folded(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """System messages put in front of what the user says next, for templates that refuse them."""
    found: list[dict[str, Any]] = []
    system: list[str] = []
    for message in messages:
        if message["role"] == "system":
            system.append(message["content"])
        elif system and message["role"] == "user":
            found.append({**message, "content": "\n\n".join([*system, message["content"]])})
            system = []
        else:
            found.append(dict(message))
    return [*found, *([{"role": "user", "content": "\n\n".join(system)}] if system else [])]


# ---------------------------------------------------------------- grammars
_IGNORED = {
    "title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions", "deprecated", "nullable",
    "type", "strict",
}  # fmt: skip
_KNOWN = {
    "string": {"minLength", "maxLength"}, "integer": {"minimum", "maximum"}, "number": set(), "boolean": set(),
    "null": set(), "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}  # fmt: skip
_CHARACTER = r"""[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})"""
_LISTED = 256
"""Integers of a range that are listed one by one, as a grammar cannot compare."""


def grammar(
    tools: Sequence[Mapping[str, Any]] | None = None,
    actions: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """A grammar (GBNF, llama.cpp's form) for replies: one of ``actions``, or one plain call of ``tools`` or one JSON
    value of ``schema``. Keys come in the order of the schema, required ones first; strings, lists and numbers are
    bounded, so that every reply ends.

    Errors: UsageError for a keyword of JSON schema that is not supported, by name and place.
    """
    if (actions is None) == (tools is None and schema is None):
        raise UsageError("a grammar is made of actions, or of tools or a schema", "Give one of them.")
    if actions is not None:
        if not actions or not all(isinstance(action, str) and action for action in actions):
            raise UsageError("actions for a grammar must be texts, at least one, none of them empty")
        return f"root ::= {' | '.join(map(_literal, dict.fromkeys(actions)))}\n"
    rules: dict[str, str] = {}
    choices = []
    if tools is not None:
        if not tools:
            raise UsageError("a grammar needs at least one tool")
        for i, tool in enumerate(tools):
            properties, _, root = _arguments(tool)
            name = str(function_of(tool)["name"])
            arguments = {"type": "object", **root, "properties": properties}
            start = f'{{"tool": {json.dumps(name, ensure_ascii=False)}'
            maker = _Gbnf(root, rules, f"tool {name}")
            if _nested(properties):
                rules[f"call{i}"] = f'{_literal(start + ", " + _key("arguments"))} {maker.value(arguments)} "}}"'
            else:
                rules[f"call{i}"] = f'{_literal(start)} {maker.members(arguments, "", first=False)} "}}"'
            choices.append(f"call{i}")
    if schema is not None:
        choices.append(_Gbnf(schema, rules, "schema").value(schema))
    return _grammar(" | ".join(choices), rules)


def _grammar(root: str, rules: Mapping[str, str]) -> str:
    return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in rules.items()), ""])


def _literal(text: str) -> str:
    def escaped(c: str) -> str:
        if c in '"\\':
            return "\\" + c
        return c if c.isprintable() else f"\\U{ord(c):08X}"

    return '"' + "".join(map(escaped, text)) + '"'


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


class _Gbnf:
    """Expressions for JSON schemas; what they share goes into ``rules``."""

    def __init__(self, root: Mapping[str, Any], rules: dict[str, str], where: str) -> None:
        self.root, self.rules, self.where = root, rules, where
        self.open: list[str] = []

    def value(self, node: Any, at: str = "") -> str:
        reference = node.get("$ref") if isinstance(node, Mapping) else None
        if reference in self.open:
            raise self._refused(at, f"the recursive $ref {reference}")
        self.open += [reference] if reference else []
        found = self._value(_follow(node, self.root), at)
        if reference:
            self.open.pop()
        return found

    def _value(self, node: Any, at: str) -> str:
        if node is True or node == {} or (isinstance(node, Mapping) and not set(node) - _IGNORED and not _kinds(node)):
            return self._any(2)
        if not isinstance(node, Mapping):
            raise self._refused(at, f"{node!r} as a schema")
        allowed = [node["const"]] if "const" in node else node.get("enum")
        if allowed is not None:
            return self._either(_literal(json.dumps(entry, ensure_ascii=False)) for entry in allowed)
        choices = node.get("anyOf") or node.get("oneOf")
        kinds = _kinds(node) or (["object"] if "properties" in node else [])
        known = _IGNORED | {"anyOf", "oneOf"} if choices else _IGNORED.union(*(_KNOWN.get(k, set()) for k in kinds))
        unknown = sorted(set(node) - known)
        if unknown or not (choices or kinds):
            raise self._refused(at, ", ".join(unknown) or "a schema without a type")
        found = [self.value(choice, at) for choice in choices or ()] or [self._typed(kind, node, at) for kind in kinds]
        return self._either([*found, *(['"null"'] if node.get("nullable") else [])])

    def _typed(self, kind: str, node: Mapping[str, Any], at: str) -> str:
        match kind:
            case "string":
                return self._string(int(node.get("minLength", 0)), int(node.get("maxLength", LONGEST)))
            case "integer":
                low, high = node.get("minimum"), node.get("maximum")
                if low is None and high is None:
                    return self._shared("integer", '"-"? ("0" | [1-9] [0-9]{0,14})')
                if not isinstance(low, int) or not isinstance(high, int) or not 0 <= high - low < _LISTED:
                    raise self._refused(at, f"minimum and maximum, unless they are both given and near ({_LISTED})")
                return self._either(_literal(str(i)) for i in range(low, high + 1))
            case "number":
                return self._shared("number", '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,9})?')
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                entry = self.value(node.get("items", {}), f"{at}[]")
                return self._list(entry, int(node.get("minItems", 0)), int(node.get("maxItems", MOST)), "[]")
            case "object":
                if not node.get("properties") and node.get("additionalProperties", True) is not False:
                    entry = self.value(node.get("additionalProperties", {}), f"{at}.*")
                    return self._list(f'{self._string(1, LONGEST)} ": " {entry}', 0, MOST, "{}")
                return f'"{{" {self.members(node, at)} "}}"'
        raise self._refused(at, f"type {kind}")

    def members(self, node: Mapping[str, Any], at: str, first: bool = True) -> str:
        """The members of an object; ``first``: nothing stands before them, so that no comma comes first."""
        unknown = sorted(set(node) - _IGNORED - _KNOWN["object"])
        if unknown:
            raise self._refused(at, ", ".join(unknown))
        needed = [key for key in node.get("required") or () if key in node["properties"]]
        pairs = {k: f"{_literal(_key(k))} {self.value(v, f'{at}.{k}')}" for k, v in node["properties"].items()}
        found, optional = [], [key for key in pairs if key not in needed]
        for key in (k for k in pairs if k in needed):
            found.append(f"{'' if first else _literal(', ') + ' '}{pairs[key]}")
            first = False
        if not first:
            return " ".join([*found, *(f'(", " {pairs[key]})?' for key in optional)])
        follow = {key: f'(", " {pairs[key]})?' for key in optional}
        chains = [" ".join([pairs[k], *(follow[o] for o in optional[i + 1 :])]) for i, k in enumerate(optional)]
        return f"({' | '.join(chains)})?" if chains else ""

    def _any(self, depth: int) -> str:
        """Any JSON value, at most ``depth`` lists or objects in one another."""
        simple = [self._string(0, LONGEST), self._typed("number", {}, ""), '"true"', '"false"', '"null"']
        if depth:
            inner = self._any(depth - 1)
            simple += [
                self._list(inner, 0, MOST, "[]"),
                self._list(f'{self._string(1, LONGEST)} ": " {inner}', 0, MOST, "{}"),
            ]
        return self._shared(f"any{depth}", " | ".join(simple))

    def _string(self, least: int, most: int) -> str:
        self._shared("char", _CHARACTER)
        return self._shared(f"string-{least}-{most}", rf'"\"" char{{{least},{most}}} "\""')

    def _list(self, entry: str, least: int, most: int, brackets: str) -> str:
        left, right = f'"{brackets[0]}"', f'"{brackets[1]}"'
        if most == 0:
            return f"{left} {right}"
        body = f'{entry} (", " ({entry})){{{max(0, least - 1)},{most - 1}}}' if most > 1 else entry
        return f"{left} {body} {right}" if least else f"{left} ({body})? {right}"

    def _either(self, found: Any) -> str:
        found = list(dict.fromkeys(found))
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _shared(self, name: str, body: str) -> str:
        self.rules[name] = body
        return name

    def _refused(self, at: str, what: str) -> UsageError:
        place = f" at {at.lstrip('.')}" if at else ""
        return UsageError(f"{self.where}{place}: a grammar does not support {what}", "Leave it out, or use no grammar.")
