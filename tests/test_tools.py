"""Schemas from methods, calls found in replies (case 29), arguments checked, tools told in plain words, grammars."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import tiny_gguf

from edgees import tools
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.backends.toy import ToyEngine
from edgees.errors import UsageError

NAMES = ("look", "set_light")


class Home:
    def set_light(
        self,
        room: str,
        level: int = 3,
        mode: Literal["on", "off"] = "on",
        tags: list[str] | None = None,
    ) -> str:
        """Set a light,
        anywhere.

        Args:
            room: Where it is,
                or nearly.
            level (int): 0 to 9.

        Returns:
            str: what was done
        """
        return room

    def look(self) -> str:
        """Look around."""
        return ""

    def put(self, items: dict[str, float], when: Optional[int], what: Union[int, str], extra: Any = None) -> None:  # noqa: UP007, UP045
        """Put."""


LIGHT, LOOK, PUT = (tools.schema(m) for m in (Home().set_light, Home().look, Home().put))


def call(name: str, **arguments: Any) -> tools.Call:
    return tools.Call("call_0", name, arguments)


# ---- schemas
def test_schema_of_a_method() -> None:
    function = LIGHT["function"]
    assert (LIGHT["type"], function["name"], function["description"]) == (
        "function",
        "set_light",
        "Set a light, anywhere.",
    )
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "room": {"type": "string", "description": "Where it is, or nearly."},
            "level": {"type": "integer", "description": "0 to 9.", "default": 3},
            "mode": {"type": "string", "enum": ["on", "off"], "default": "on"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["room"],
    }
    assert PUT["function"]["parameters"]["properties"] == {
        "items": {"type": "object", "additionalProperties": {"type": "number"}},
        "when": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "what": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "extra": {},
    }
    assert PUT["function"]["parameters"]["required"] == ["items", "when", "what"]
    assert tools.schema(Home.look)["function"]["parameters"]["properties"] == {}  # self is none


def test_choices_in_a_docstring() -> None:
    def paint(colour: str) -> None:
        """Paint.

        Args:
            colour: Which one. (choices: ["red", "blue"])
        """

    assert tools.schema(paint)["function"]["parameters"]["properties"]["colour"] == {
        "type": "string", "description": "Which one.", "enum": ["red", "blue"],
    }  # fmt: skip


def untyped(a) -> None: ...  # type: ignore[no-untyped-def]
def odd(a: bytes) -> None: ...
def odd_inside(a: list[set[int]]) -> None: ...
def many(*a: int) -> None: ...
def taken(tool: str) -> None: ...
def nowhere(a: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037


def badly_chosen(a: str) -> None:
    """X.

    Args:
        a: b (choices: [red])
    """


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (untyped, "tool untyped, argument a: it has no type hint"),
        (odd, "tool odd, argument a: the type bytes"),
        (odd_inside, "tool odd_inside, argument a: the type set"),
        (many, "tool many, argument a: a model passes arguments by name"),
        (taken, "tool taken, argument tool: that name is taken"),
        (nowhere, "tool nowhere: its signature cannot be read"),
        (badly_chosen, "tool badly_chosen, argument a: its choices"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(function: Callable[..., Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        tools.schema(function)
    assert error.value.hint


# ---- calls
A: tuple[str, dict[str, Any]] = ("look", {})
B: tuple[str, dict[str, Any]] = ("set_light", {"room": "a", "level": 2})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "", [A]),
        (
            'Two: <tool_call>{"name": "look", "arguments": {}}</tool_call>\n<tool_call>{"name": "set_light", '
            '"arguments": "{\\"room\\": \\"a\\", \\"level\\": 2}"}</tool_call> done',
            "Two: \n done", [A, B],
        ),
        ('<tool_call>{"name": "look", "arguments": {}}', "", [A]),  # cut, or its end was a control token
        (
            '<tool_call>[{"name": "look", "arguments": {}}, '
            '{"name": "set_light", "arguments": {"room": "a", "level": 2}}]</tool_call>',
            "", [A, B],
        ),
        (
            '<tool_call>{"name": "look", "arguments": {"x": "</tool_call>"}}</tool_call>',
            "", [("look", {"x": "</tool_call>"})],
        ),
        ('{"name": "look", "parameters": {}}', "", [A]),
        ('<|python_tag|>{"name": "look", "parameters": {}}<|eom_id|>', "", [A]),
        ('{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}', "", [A, A]),
        ('[TOOL_CALLS] [{"name": "look", "arguments": {}, "id": "call00001"}]', "", [A]),
        ('[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]set_light[ARGS]{"room": "a", "level": 2}', "", [A, B]),
        ('[{"name": "look", "arguments": {}}]', "", [A]),
        ('Sure:\n```json\n{"tool": "set_light", "room": "a", "level": 2}\n```', "Sure:", [B]),
        ('```\n{"tool": "look"}\n```', "", [A]),
        ('I look. {"tool": "look"}', "I look.", [A]),
        ('{"tool": "set_light", "arguments": {"room": "a", "level": 2}}', "", [B]),
        ('{"name": "set_light", "room": "a", "level": 2}', "", [B]),
        ('{"type": "function", "function": {"name": "look", "arguments": "{}"}}', "", [A]),
        ('{"name": "look", "arguments": null}', "", [A]),
        ('<think>{"tool": "set_light"}</think>{"tool": "look"}', '<think>{"tool": "set_light"}</think>', [A]),
        ('so {"tool": "set_light"}?\n</think>{"tool": "look"}', 'so {"tool": "set_light"}?\n</think>', [A]),
    ],
)  # fmt: skip
def test_calls_in_all_forms(text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    parsed = tools.parse(text, NAMES)
    assert [(c.name, c.arguments) for c in parsed.calls] == calls and parsed.errors == ()
    assert parsed.content == content
    assert [c.id for c in tools.parse(text, NAMES, start=5).calls] == [f"call_{5 + i}" for i in range(len(calls))]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('<tool_call>{"name": "look", "arguments": {}</tool_call>', "malformed"),
        ('<tool_call>{"name": "look" "arguments": {}}</tool_call>', "(Expecting ',' delimiter at character 16)"),
        ("<tool_call>5</tool_call>", "a number, not a JSON object"),
        ('<tool_call>["look"]</tool_call>', "text, not a JSON object"),
        ("<tool_call>[]</tool_call>", "a list, not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "name of the tool is missing"),
        ('<tool_call>{"name": null}</tool_call>', "name of the tool is null"),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "arguments are a list"),
        ('<tool_call>{"name": "look", "arguments": "{"}</tool_call>', "arguments are text that is not JSON"),
        ('<tool_call>{"name": "look", "arguments": "5"}</tool_call>', "arguments are a number"),
        ('<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "look", "name": "set_light"}</tool_call>', "a key stands twice"),
        ("<|python_tag|>look()", "malformed"),
        ('{"tool": "look", "room": ', "malformed"),
        ('{"tool": "look", "arguments": {"room": "x"}', "malformed"),
        ("{'tool': 'look'}", "malformed"),
        ("{tool: look}", "malformed"),
        ('{"tool": "dance"}', 'no tool "dance". Tools: look, set_light.'),
        ('{"name": "dance", "arguments": {}}', 'no tool "dance"'),
        ('<tool_call>{"name": "dance", "arguments": {}}</tool_call>', 'no tool "dance"'),
        ('<tool_call>{"name": "look", "arguments": {"a": ' + "[" * 2000, "nested too deeply"),
        ('<tool_call>{"name": "look", "arguments": {"a": ' + "[" * 60 + "]" * 60 + "}}", "nested too deeply"),
    ],
)  # fmt: skip
def test_broken_calls_become_words_for_the_model(text: str, told: str) -> None:
    """Case 29."""
    parsed = tools.parse(text, NAMES)
    assert parsed.calls == () and len(parsed.errors) == 1
    assert told in parsed.errors[0]


def test_a_broken_call_does_not_hide_the_others() -> None:
    text = '<tool_call>{"name": </tool_call> and <tool_call>{"name": "look", "arguments": {}}</tool_call>'
    parsed = tools.parse(text, NAMES)
    assert [c.name for c in parsed.calls] == ["look"] and len(parsed.errors) == 1 and parsed.content == "and"
    unclosed = '<tool_call>{"name": \n<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert [c.name for c in tools.parse(unclosed, NAMES).calls] == ["look"]


@pytest.mark.parametrize(
    "text",
    [
        "", "It is 5.", '{"a": 1}', '{"name": "Bob", "age": 3}', "[1, 2]", "{", "x = {y}", "[TOOL] {}",
        '<think>{"tool": "look"}', '<think>{"tool": "look"}</think>no', '```python\nprint({"a": 1})\n```',
    ],
)  # fmt: skip
def test_what_is_no_call_stays_as_it_is(text: str) -> None:
    assert tools.parse(text, NAMES) == tools.Parsed(text)


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert tools.parse(text, ()) == tools.Parsed(text)
    assert [c.name for c in tools.parse('{"tool": "anything"}').calls] == ["anything"]


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "```json\n",
        "```", '{"tool": "look"', '{"name": "look"', ', "arguments": ', "{", "}", "[", "]", '"', ":", ",", ";", "null",
        "NaN", "1e999", "9" * 5000, "[" * 3000, "\\ud800", "look", "\n", "\x00", "{}",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=12).map("".join)))
@example('{"tool": "look", "x": ' + '{"x": ' * 5000)
def test_parse_never_raises(text: str) -> None:
    for names in (None, (), NAMES):
        parsed = tools.parse(text, names)
        assert all(names is None or c.name in names for c in parsed.calls)
        for c in parsed.calls:  # and what it finds can go on its way
            tools.coerce(c, LIGHT)
            tools.check(c, LIGHT)
            json.dumps(c.message())


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=9), VALUES, max_size=4))
@example({"tool": "x"})
@example({"arguments": {"a": 1}})
@example({"parameters": 1})
@example({"arguments": {"a": 1}, "b": 2})
@example({"function": {"name": "x"}})
@example({"</think>": "```"})
def test_what_is_written_is_read_again(arguments: dict[str, Any]) -> None:
    wanted = [("look", arguments)]
    dumped = json.dumps({"name": "look", "arguments": arguments})
    forms = [tools.written("look", arguments), f"<tool_call>{dumped}</tool_call>", dumped, f"[TOOL_CALLS] [{dumped}]"]
    for text in forms:
        parsed = tools.parse(text, ["look"])
        assert [(c.name, c.arguments) for c in parsed.calls] == wanted, text
        assert json.loads(parsed.calls[0].message()["function"]["arguments"]) == arguments


# ---- arguments
def test_obviously_meant_values() -> None:
    meant = tools.coerce(call("set_light", room=5, level="7", mode=" ON ", tags='["a", 1]'), LIGHT)
    assert meant.arguments == {"room": "5", "level": 7, "mode": "on", "tags": ["a", "1"]}
    assert tools.check(meant, LIGHT) == ""
    assert tools.coerce(call("set_light", room="a", level=2.0, tags=None), LIGHT).arguments == {"room": "a", "level": 2}
    meant = tools.coerce(call("put", items='{"a": "1.5"}', when="3", what="4", extra={"b": "1"}), PUT)
    assert meant.arguments == {"items": {"a": 1.5}, "when": 3, "what": "4", "extra": {"b": "1"}}
    assert tools.coerce(call("put", when=None), PUT).arguments == {"when": None}
    flag = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "boolean"}}}}
    assert tools.coerce(call("f", x="True"), flag).arguments == {"x": True}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, 'argument "room" is missing'),
        ({"room": "a", "colour": 1}, 'there is no argument "colour"'),
        ({"room": "a", "level": "high"}, '"level" must be an integer, not "high"'),
        ({"room": "a", "level": True}, '"level" must be an integer, not true'),
        ({"room": "a", "level": 2.5}, '"level" must be an integer, not 2.5'),
        ({"room": ["a"]}, '"room" must be text, not ["a"]'),
        ({"room": "a", "mode": "dim"}, '"mode" must be one of "on", "off"'),
        ({"room": "a", "tags": [["b"]]}, '"tags"[0] must be text, not ["b"]'),
    ],
)
def test_wrong_arguments_in_words(arguments: dict[str, Any], told: str) -> None:
    wrong = tools.check(tools.coerce(call("set_light", **arguments), LIGHT), LIGHT)
    assert told in wrong and wrong.endswith("It takes: room, level, mode, tags.")


@pytest.mark.parametrize(
    ("node", "value", "told"),
    [
        ({"type": "integer", "minimum": 1}, 0, "at least 1"),
        ({"type": "integer", "maximum": 1}, 2, "at most 1"),
        ({"type": "string", "maxLength": 2}, "abc", "at most 2 characters"),
        ({"type": "array", "minItems": 2}, [1], "at least 2 entries"),
        ({"type": "object", "required": ["a"]}, {}, "lacks a"),
        ({"type": "object", "properties": {}, "additionalProperties": False}, {"b": 1}, 'has no "b"'),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, {"a": 1}, '"x".a must be null'),
        ({"$ref": "#/$defs/P"}, {"q": "z"}, '"x".q must be an integer'),
        ({"const": 1}, True, "one of 1"),
        ({"type": ["integer", "null"]}, "z", "an integer or null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "z", "an integer"),
    ],
)
def test_more_of_json_schema(node: dict[str, Any], value: Any, told: str) -> None:
    parameters = {
        "type": "object", "properties": {"x": node},
        "$defs": {"P": {"type": "object", "properties": {"q": {"type": "integer"}}}},
    }  # fmt: skip
    assert told in tools.check(call("f", x=value), {"name": "f", "parameters": parameters})


def test_no_function_schema() -> None:
    for wrong in ({}, {"function": 5}, {"name": ""}, {"name": "f", "parameters": [1]}):
        with pytest.raises(UsageError):
            tools.describe([wrong])


# ---- conversations
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": None, "tool_calls": [tools.Call("x", "look", {"a": 1}).message()]},
    {"role": "tool", "tool_call_id": "x", "content": "a lamp"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "That is all."},
    {"role": "assistant", "content": "Bye."},
]


def test_tools_are_described_shortly() -> None:
    assert tools.describe([LIGHT, LOOK, PUT]).splitlines()[1:] == [
        '{"tool": "set_light", "room": text, "level": integer (optional), "mode": "on" or "off" (optional), '
        '"tags": list of text (optional)} Set a light, anywhere. room: Where it is, or nearly. level: 0 to 9.',
        '{"tool": "look"} Look around.',
        '{"tool": "put", "items": object, "when": integer or null, "what": integer or text, "extra": value (optional)} '
        "Put.",
    ]


def test_a_conversation_in_plain_words() -> None:
    said = tools.plain(TALK, [LOOK])
    assert said == [
        {"role": "system", "content": "Be short.\n\n" + tools.describe([LOOK])},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": '{"tool": "look", "a": 1}'},
        {"role": "user", "content": "Result of look: a lamp\nand?"},
        {"role": "assistant", "content": "That is all.\nBye."},
    ]
    assert tools.plain(TALK[1:2]) == [{"role": "user", "content": "one\ntwo"}]


def test_a_conversation_as_templates_expect_it() -> None:
    said = tools.normal(TALK)
    assert [m["role"] for m in said] == ["system", "user", "assistant", "tool", "user", "assistant", "assistant"]
    assert said[2]["content"] == "" and said[2]["tool_calls"] == [
        {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    ]
    assert said[3] == {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "a lamp"}
    assert tools.normal(TALK, developer=True)[0]["role"] == "developer"
    odd = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{no"}}]}
    assert tools.normal([odd])[0]["tool_calls"][0]["function"]["arguments"] == "{no"
    assert tools.normal([{"role": "user", "content": "a\ud800ß"}])[0]["content"] == "a\ufffdß"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "narrator", "content": "x"}, "message 1: its role is 'narrator'"),
        ({"content": "x"}, "message 1: its role is None"),
        ("x", "message 1: its role is None"),
        ({"role": "user", "content": 5}, "content is a number"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "not image_url"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "only text"),
        ({"role": "assistant", "tool_calls": [{"name": "look"}]}, "no call of a function"),
        ({"role": "assistant", "tool_calls": "look"}, "no call of a function"),
    ],
)
def test_messages_that_cannot_be_read(message: Any, told: str) -> None:
    for refuse in (tools.normal, tools.plain, ToyEngine().encode_chat):
        with pytest.raises(UsageError, match=told):
            refuse([message])


def test_the_toy_reads_tools() -> None:
    engine = ToyEngine()
    assert engine.encode_chat([{"role": "user", "content": "a"}]) == [257, 97, 259, 258]
    said = tools.plain(TALK, [LOOK])
    assert engine.encode_chat(TALK, [LOOK]) == engine.encode_chat(said)
    assert engine.encode_chat(TALK[2:3]) == engine.encode_chat(tools.plain(TALK[2:3]))


# ---- grammars
@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    with LlamaCppEngine(tiny_gguf(tmp_path_factory.mktemp("g") / "m.gguf", "llama"), plain=True) as engine:
        yield engine


def accepts(engine: LlamaCppEngine, grammar: str, text: str) -> bool:
    """Whether llama.cpp's own sampler lets the text through, token by token, and then an end."""
    api = engine.api
    sampler = api.llama_sampler_init_grammar(engine.vocab, grammar.encode(), b"root")
    assert sampler, grammar
    try:
        for token in [*engine.encode(text), api.llama_vocab_eos(engine.vocab)]:
            data = (api.llama_token_data * 1)(api.llama_token_data(token, 0.0, 0.0))
            array = api.llama_token_data_array(data, 1, -1, False)
            api.llama_sampler_apply(sampler, ctypes.byref(array))
            if data[0].logit < -1e30:
                return False
            if token != api.llama_vocab_eos(engine.vocab):
                api.llama_sampler_accept(sampler, token)
        return True
    finally:
        api.llama_sampler_free(sampler)


def test_a_grammar_of_actions(engine: LlamaCppEngine) -> None:
    actions = ["go", "go north", 'say "hi"\n\\', "ä☃", "tab\there", "[x]"]
    grammar = tools.grammar(actions=actions)
    assert grammar.count("\n") == 1  # a line break in an action is none in the grammar
    assert all(accepts(engine, grammar, action) for action in actions)
    assert not any(accepts(engine, grammar, text) for text in ("", "g", "go  north", "go north!", "Go", "ä"))


def test_a_grammar_of_tools(engine: LlamaCppEngine) -> None:
    nested = {"name": "n", "parameters": {"type": "object", "properties": {"tool": {"type": "boolean"}}}}
    grammar = tools.grammar(tools=[LIGHT, LOOK, PUT, nested])
    good = [
        tools.written("look", {}),
        tools.written("set_light", {"room": 'a "b" ö\n'}),
        tools.written("set_light", {"room": "a", "mode": "off"}),
        tools.written("set_light", {"room": "a", "level": -12, "mode": "on", "tags": ["x", ""]}),
        tools.written("put", {"items": {"a": 1.5}, "when": None, "what": "x", "extra": [{"a": True}, None, {}]}),
        tools.written("put", {"items": {}, "when": 2, "what": 3}),
        '{"tool": "n", "arguments": {"tool": true}}',
        '{"tool": "n", "arguments": {}}',
    ]
    for text in good:
        assert accepts(engine, grammar, text), text
        [found] = tools.parse(text).calls
        assert found.name == "n" or not tools.check(found, {"look": LOOK, "set_light": LIGHT, "put": PUT}[found.name])
    bad = [
        "", "look", '{"tool": "dance"}', '{"tool": "set_light"}', '{"tool": "set_light", "room": 5}',
        '{"tool": "set_light", "room": "a", "level": 1.5}', '{"tool": "set_light", "room": "a", "mode": "dim"}',
        '{"tool": "look"', '{"tool": "look"} ', '{"tool": "look"}{"tool": "look"}', '{"tool": "look", "x": 1}',
        tools.written("set_light", {"room": "x" * 201}), tools.written("set_light", {"room": "a", "level": 10**15}),
        tools.written("set_light", {"room": "a", "tags": ["x"] * 17}), '{"tool": "set_light", "room": "\n"}',
    ]  # fmt: skip
    for text in bad:
        assert not accepts(engine, grammar, text), text


SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "x",
    "properties": {
        "free": {"type": "string", "maxLength": 3, "minLength": 1},
        "n": {"type": "integer", "minimum": -1, "maximum": 2},
        "p": {"$ref": "#/$defs/P"},
        "maybe": {"type": ["number", "null"]},
        "list": {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["n"],
    "$defs": {"P": {"type": "object", "properties": {"q": {"type": "boolean"}, "r": {"const": None}}}},
}


def test_a_grammar_of_a_schema(engine: LlamaCppEngine) -> None:
    grammar = tools.grammar(schema=SCHEMA)
    good: list[dict[str, Any]] = [
        {"n": 2}, {"n": -1, "free": "abc"}, {"n": 0, "p": {}, "list": ["a", 1]}, {"n": 0, "p": {"q": True, "r": None}},
        {"n": 0, "p": {"r": None}, "maybe": None}, {"n": 0, "maybe": -1.25},
    ]  # fmt: skip
    bad: list[Any] = [
        {}, {"n": 3}, {"n": 0, "free": ""}, {"n": 0, "free": "abcd"}, {"n": 0, "p": {"q": 1}}, {"n": 0, "list": []},
        {"n": 0, "list": ["a", 1, 1]}, {"n": 0, "list": ["b"]}, {"n": 0, "other": 1}, [], 5,
    ]  # fmt: skip
    for value in good:
        assert accepts(engine, grammar, json.dumps(value)), value
    for value in bad:
        assert not accepts(engine, grammar, json.dumps(value)), value
    anything = tools.grammar(schema={})
    assert accepts(engine, anything, '[1, {"a": "b"}]') and not accepts(engine, anything, "[1, ")


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "string", "pattern": "a+"}, "does not support pattern"),
        ({"type": "string", "format": "date"}, "does not support format"),
        ({"type": "integer", "minimum": 0}, "minimum and maximum"),
        ({"type": "integer", "minimum": 0, "maximum": 1000}, "minimum and maximum"),
        ({"type": "number", "maximum": 1}, "does not support maximum"),
        ({"allOf": [{}]}, "does not support allOf"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}, r"schema at a\[\]: .*not"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {}}, "patternProperties"),
        ({"type": "tuple"}, "type tuple"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}}, "recursive"),
    ],
)
def test_schemas_without_a_grammar_are_refused_by_name(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        tools.grammar(schema=schema)
    with pytest.raises(UsageError, match=told if r"\[" not in told else "not"):
        parameters = {"type": "object", "properties": {"x": schema}, "$defs": schema.get("$defs", {})}
        tools.grammar(tools=[{"name": "f", "parameters": parameters}])


def test_what_a_grammar_is_made_of() -> None:
    several: list[dict[str, Any]] = [{}, {"tools": [LOOK], "actions": ["a"]}, {"tools": []}, {"actions": [""]}]
    for wrong in several:
        with pytest.raises(UsageError, match="grammar"):
            tools.grammar(**wrong)


def test_nothing_but_the_standard_library() -> None:
    """It is loaded by path in the process of an environment, where edgees may be all there is."""
    source = Path(tools.__file__).read_text(encoding="utf-8")
    assert [line for line in source.splitlines() if line.startswith(("from edgees", "import edgees"))] == [
        "from edgees.errors import UsageError"
    ]
