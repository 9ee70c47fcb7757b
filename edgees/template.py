"""Chat templates, rendered where they can do no harm.

A chat template is a program that came with somebody's model file (CVE-2024-34359). It is rendered in Jinja's
immutable sandbox with the behaviour of Hugging Face's ``apply_chat_template``, in a child process of its own with a
limit of memory and a wall deadline, so that neither reaching for Python's internals nor ``'x' * 10**9`` nor nested
endless loops reach the process that holds the model.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from edgees.children import Child, ChildDied, ChildTimeout
from edgees.errors import TemplateError

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
        raise TemplateError(
            f"the chat template failed: {answer.get('type', 'TemplateError')}: {reason}",
            "Often it wants other roles or another order of messages (some refuse a system message, "
            "most want user and assistant to alternate).",
        )
