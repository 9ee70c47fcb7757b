"""Chat templates, rendered where they can do no harm.

A chat template is a program that came with somebody's model file (CVE-2024-34359). It is rendered in Jinja's
immutable sandbox with the behaviour of Hugging Face's ``apply_chat_template``, in a child process of its own with a
limit of memory and a wall deadline, so that neither reaching for Python's internals nor ``'x' * 10**9`` nor nested
endless loops reach the process that holds the model.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from edgees.children import Child, ChildDied, ChildTimeout
from edgees.errors import TemplateError, UsageError

DEADLINE_S = 5.0
MEMORY = 128 << 20
"""Bytes of memory a rendering may use beyond the interpreter's own."""
LARGEST = 4 << 20
"""Characters a rendered conversation may have."""
_CACHED = 4096
_CACHED_CHARS = 16 << 20

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What a model without a template gets: ChatML, no system message added, no BOS."""


class TemplateRefused(TemplateError):
    """The template raised an error of its own: this conversation is not one that it can write."""


class _Host:
    """The one child that renders for all templates of this process; ends with the last open template."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[ChatTemplate] = weakref.WeakSet()
        self._child: Child | None = None

    def enter(self, template: ChatTemplate) -> Child:
        with self._lock:
            self._open.add(template)
            if self._child is None:
                self._child = Child("render.py", {"memory": MEMORY, "largest": LARGEST}, isolated=True)
            return self._child

    def leave(self, template: ChatTemplate) -> None:
        with self._lock:
            self._open.discard(template)
            if not self._open and self._child is not None:
                self._child.close()


_HOST = _Host()


class ChatTemplate:
    """A chat template and the two tokens it may name.

    source: Jinja source as in ``tokenizer.chat_template`` of a GGUF or ``chat_template`` of a tokenizer
        configuration; None: :data:`CHATML`.
    bos_token, eos_token: their text, available to the template under these names.
    now: what ``strftime_now`` tells the template; None: the clock. Templates that print today's date (Llama 3 does)
        make a run depend on the day, so whoever must be reproducible passes a fixed time.
    deadline: seconds for one rendering.

    The first rendering starts the child (a few hundred milliseconds), later ones take a fraction of a millisecond,
    and the same conversation again comes from a cache. Safe to use from several threads. ``close()`` (or leaving a
    ``with`` block) ends the child when no other template is open; at exit that happens by itself.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: datetime | None = None,
        deadline: float = DEADLINE_S,
    ) -> None:
        self.source = CHATML if source is None else source
        self.fallback = source is None
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.deadline = deadline
        self._now = now.isoformat() if now is not None else ""
        self._timeless = now is not None or "strftime_now" not in self.source
        self._id = hashlib.blake2b(self.source.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        self._cache: OrderedDict[bytes, str] = OrderedDict()
        self._cached_chars = 0
        self._tools: bool | None = None
        self._cache_lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        """The text of a conversation, special tokens spelt out.

        messages: ``{"role", "content"}`` and whatever else the template understands (JSON types only).
        extra: further variables, as ``tools`` or ``enable_thinking``.
        Raises TemplateError (with a hint) when the template refuses, fails, or overruns its limits.
        """
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **extra,
        }
        request = {"op": "render", "id": self._id, "variables": variables, "now": self._now}
        key = b""
        if self._timeless:
            key = self._key(variables)
            with self._cache_lock:
                if key in self._cache:
                    self._cache.move_to_end(key)
                    return self._cache[key]
        answer = self._call(request)
        if answer.get("unknown"):  # a fresh child, or one that has forgotten us
            self._check(self._call({"op": "load", "id": self._id, "source": self.source}))
            answer = self._call(request)
        self._check(answer)
        text = answer.get("text")
        if not isinstance(text, str):
            raise TemplateError("the chat template's child process lost the template twice")
        if key:
            self._remember(key, text)
        return text

    @property
    def supports_tools(self) -> bool:
        """Whether it tells the model of tools and shows calls and results; else :func:`edgees.tools.plain` has to."""
        if self._tools is None:
            self._tools = self._knows_tools()
        return self._tools

    def _knows_tools(self) -> bool:
        """Try it with a tool, a call and a result whose words must appear."""
        name, argument, value, result = (f"edgees{part}" for part in ("tool", "argument", "value", "result"))
        properties = {argument: {"type": "string", "description": "x"}}
        parameters = {"type": "object", "properties": properties, "required": [argument]}
        tool = {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}
        call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": {argument: value}}}
        asked: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
        played = [
            *asked,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "name": name, "content": result},
        ]
        try:
            told, shown = self.render(asked, tools=[tool]), self.render(played)
        except TemplateRefused:
            return False
        return name in told and all(word in shown for word in (name, argument, value, result))

    def close(self) -> None:
        """Give the child up. Rendering again is allowed and starts it again."""
        _HOST.leave(self)

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _key(self, variables: Mapping[str, Any]) -> bytes:
        try:
            text = json.dumps(variables, allow_nan=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(
                f"the conversation cannot be passed to the chat template: {error}",
                "Messages and variables may hold text, numbers, lists and objects only.",
            ) from error
        return hashlib.blake2b(text.encode("ascii"), digest_size=16).digest()

    def _remember(self, key: bytes, text: str) -> None:
        with self._cache_lock:
            if key not in self._cache:
                self._cached_chars += len(text)
            self._cache[key] = text
            while len(self._cache) > 1 and (len(self._cache) > _CACHED or self._cached_chars > _CACHED_CHARS):
                self._cached_chars -= len(self._cache.popitem(last=False)[1])

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        child = _HOST.enter(self)
        try:
            answer = child.call(request, self.deadline)
        except ChildTimeout as error:
            raise TemplateError(
                f"the chat template ran for more than {self.deadline:g} s and was stopped",
                "No conversation needs that long: the template loops, or the file is hostile. "
                "Use another file of this model, or pass a template of your own.",
            ) from error
        except ChildDied as error:
            raise TemplateError(
                f"the chat template was stopped: {error}",
                f"It may use {MEMORY >> 20} MiB. Use another file of this model, or pass a template of your own.",
            ) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(
                f"the conversation cannot be passed to the chat template: {error}",
                "Messages and variables may hold text, numbers, lists and objects only.",
            ) from error
        assert isinstance(answer, dict)
        return answer

    def _check(self, answer: Mapping[str, Any]) -> None:
        if "error" not in answer:
            return
        reason, kind = str(answer["error"])[:500], answer["kind"]
        if kind == "memory":
            raise TemplateError(
                f"the chat template ran over its limits: {reason}",
                f"It may use {MEMORY >> 20} MiB and write {LARGEST:,} characters. "
                "Use another file of this model, or pass a template of your own.",
            )
        if kind == "security":
            raise TemplateError(
                f"the chat template reaches for what it may not touch: {reason}",
                "Do not trust this model file. Templates of the well-known models need nothing of the kind.",
            )
        if kind == "syntax":
            raise TemplateError(
                f"the chat template does not parse: line {answer['line']}: {reason}",
                "The template is Jinja, as in Hugging Face's tokenizer_config.json.",
            )
        raise TemplateRefused(
            f"the chat template failed: {answer.get('type', 'TemplateError')}: {reason}",
            "Often it wants other roles or another order of messages (some refuse a system message, "
            "most want user and assistant to alternate).",
        )


# ---------------------------------------------------------------- control tokens
_WORD = re.compile(r"\w+")
_NESTED = 64


class Controls:
    """The spellings of a vocabulary's control tokens, and how to keep them out of what people and models write.

    A template writes control tokens by their spelling; the same spelling in a message is text. So it is hidden before
    the template is rendered, each by one character that occurs nowhere else: such a stand-in can be trimmed, cut or
    joined by a template, but becomes no token. A beginning of a spelling at the end of a text, an end of one at its
    start, and a text that is as a whole part of one, are hidden as well, as what the template puts beside them might
    complete it. (Not covered: a template that removes something from the middle of a text and so joins two halves.)
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = sorted(filter(None, set(spellings)), key=lambda s: (-len(s), s))
        self._any = re.compile("|".join(map(re.escape, self.spellings)) or r"(?!)")
        self._longest = max(map(len, self.spellings), default=0)
        self._starts = {s[:i] for s in self.spellings for i in range(1, len(s))}
        self._ends = {s[i:] for s in self.spellings for i in range(1, len(s))}
        self._joined = "\0".join(self.spellings)

    def hide(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
        """(messages, tools, {stand-in: what it stands for}). template: its source, whose characters are no stand-ins.

        Schemas keep plain words (``type``, ``string``) as they are: templates look for these.
        """
        hider = _Hider(self, messages, tools, template)
        hidden = [
            {
                key: [
                    {**call, "function": hider.all(call["function"], depth=1, keys=("name", "arguments"))} for call in v
                ]
                if key == "tool_calls"
                else v
                if key == "role"
                else hider.all(v)
                for key, v in message.items()
            }
            for message in messages
        ]
        shown = [hider.all(dict(tool), words=False) for tool in tools]
        return hidden, shown, {mark: text for text, mark in hider.marks.items()}

    def split(self, text: str, marks: Mapping[str, str]) -> list[str]:
        """A rendered text in turn as text, control token, text, ..., text; what was hidden is back, as text."""
        parts = []
        position = 0
        for found in self._any.finditer(text):
            parts += [text[position : found.start()], found[0]]
            position = found.end()
        parts.append(text[position:])
        table = str.maketrans(dict(marks))
        return [part if i % 2 else part.translate(table) for i, part in enumerate(parts)]

    def risky(self, text: str, words: bool) -> Iterator[tuple[int, int]]:
        """(start, end) of what has to be hidden in a text, in order. words: also plain words that are part of one."""
        position, found = 0, [match.span() for match in self._any.finditer(text)]
        body = text.strip()
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if not words and _WORD.fullmatch(body) and not found:
            return
        if body and not found and len(body) < self._longest and body in self._joined:
            yield start, end
            return
        for n in range(min(self._longest - 1, len(body)), 0, -1):
            if body[:n] in self._ends and not any(begin < start + n for begin, _ in found):
                yield start, start + n
                position = start + n
                break
        yield from found
        position = found[-1][1] if found else position
        for n in range(min(self._longest - 1, end - position), 0, -1):
            if text[end - n : end] in self._starts:
                yield end - n, end
                break


class _Hider:
    """One conversation's stand-ins, chosen as they are needed. ``marks``: {what is hidden: its stand-in}."""

    def __init__(self, controls: Controls, *texts: Any) -> None:
        self.controls, self.texts = controls, texts
        self.marks: dict[str, str] = {}
        self._free: Iterator[str] | None = None

    def all(self, value: Any, words: bool = True, depth: int = 0, keys: Sequence[str] = ()) -> Any:
        """Every text in a value, keys included but for those in ``keys``."""
        if depth > _NESTED:
            raise UsageError(f"what is said is nested more than {_NESTED} deep")
        if isinstance(value, str):
            return self.text(value, words)
        if isinstance(value, Mapping):
            return {
                k if k in keys else self.text(str(k), words): self.all(v, words, depth + 1) for k, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.all(v, words, depth + 1) for v in value]
        return value

    def text(self, text: str, words: bool) -> str:
        parts, position = [], 0
        for start, end in self.controls.risky(text, words):
            parts += [text[position:start], self._mark(text[start:end])]
            position = end
        return "".join([*parts, text[position:]]) if parts else text

    def _mark(self, text: str) -> str:
        if self._free is None:
            used = set(json.dumps([*self.texts, self.controls.spellings], ensure_ascii=False, default=str))
            # Yi syllables and what follows: letters without case, which repr, JSON and filters leave as they are.
            letters = (c for c in map(chr, range(0xA000, 0x20000)) if c.isalpha() and c.upper() == c.lower())
            self._free = (c for c in letters if c not in used)
        if text not in self.marks:
            mark = next(self._free, "")
            if not mark:
                raise UsageError("the conversation has every letter there is, and a control token's text besides")
            self.marks[text] = mark
        return self.marks[text]
