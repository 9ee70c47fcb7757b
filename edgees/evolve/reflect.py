"""The reflecting model: any of the tuned model itself, a GGUF file, or an API that was asked for by name.

Nothing leaves the machine unless ``openai:MODEL`` or ``anthropic:MODEL`` is configured, and then only what redaction
let through. Those calls run in a child process: a server that sends a byte a minute, or a gigabyte, ends with it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from edgees.children import Child, ChildDied, ChildTimeout
from edgees.errors import EdgeesError, MissingExtra, UsageError
from edgees.evolve.bounds import shown
from edgees.evolve.redaction import masked

DEADLINE_S = 120.0
"""Seconds a reply may take, retries included."""
LOADING_S = 120.0
"""Seconds that importing the API's package may take."""
LARGEST = 1 << 16
"""Characters of a reply."""
TOKENS = 4096
"""Tokens that an API is asked for, at most: thoughts count."""
RETRIES = 2
"""Further tries after a failed connection, a server's error (5xx) or "too many requests", as the packages do them."""
MEMORY = 1 << 30
"""Bytes that a call of an API may take."""
KEYS: Mapping[str, tuple[str, ...]] = {
    "openai": ("OPENAI_API_KEY",), "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
}  # fmt: skip

Model = Callable[[str], str]


class NoReply(EdgeesError):
    """The reflecting model gave no usable reply."""


class Reflector(Protocol):
    """A prompt -> a reply of 1 to ``LARGEST`` characters. :raises NoReply: there is none."""

    def __call__(self, prompt: str, /) -> str: ...

    def close(self) -> None:
        """End what was started for it."""


def open_reflector(
    name: str,
    *,
    local: Model,
    open_gguf: Callable[[Path], Model],
    redact: Callable[[str], str] = masked,
    deadline: float = DEADLINE_S,
    folder: Path | None = None,
    log: Path | None = None,
) -> Reflector:
    """A prompt -> a reply. name: ``self`` (``local``), a GGUF file (by ``open_gguf``), ``openai:MODEL`` or
    ``anthropic:MODEL``: address and key from the environment, as those packages read them.

    redact: what every prompt to an API goes through (:class:`edgees.evolve.redaction.Redaction`); where it raises,
    nothing is sent. deadline: seconds for a reply of an API. folder: what a relative file is relative to.
    log: file for what the packages print (default: our stderr).
    The reply raises :class:`NoReply` where there is none, or more than ``LARGEST`` characters.
    :raises UsageError: an unknown name, no such file, no key. :raises MissingExtra: the package is not installed.
    """
    if name == "self":
        return _Local(local)
    api, colon, model = name.partition(":")
    if colon and api in KEYS:
        if not model:
            raise UsageError(f"the reflector {name!r} names no model", f"Such as {api}:MODEL.")
        if importlib.util.find_spec(api) is None:
            raise MissingExtra(f"the reflector {name} needs the package {api}", f"pip install {api}")
        if not any(os.environ.get(key) for key in KEYS[api]):
            raise UsageError(
                f"the reflector {name} needs a key in the environment: {' or '.join(KEYS[api])}",
                "A server of your own that asks for none takes any word.",
            )
        return _ByApi(api, model, redact, deadline, log)
    path = (folder if folder is not None else Path.cwd()) / Path(name).expanduser()
    if path.suffix.lower() == ".gguf" or path.is_file():
        if not path.is_file():
            raise UsageError(f"the reflector's file {path} does not exist", "Paths are relative to the current folder.")
        return _Local(open_gguf(path))
    raise UsageError(f"{name!r} is no reflector", "Known: self, FILE.gguf, openai:MODEL, anthropic:MODEL.")


class _Local:
    """A model on this machine."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(self, prompt: str) -> str:
        reply: Any = self._model(prompt)
        if not isinstance(reply, str) or not reply.strip():
            raise NoReply("the reflecting model replied nothing")
        if len(reply) > LARGEST:
            raise NoReply(f"the reflecting model's reply has {len(reply):,} characters, more than {LARGEST:,}")
        return reply

    def close(self) -> None:
        """Whoever made the model ends it."""


class _ByApi:
    """A model behind an API; its child starts with the first prompt."""

    def __init__(self, api: str, model: str, redact: Callable[[str], str], deadline: float, log: Path | None) -> None:
        self._name, self._model, self._redact, self._deadline = f"{api}:{model}", model, redact, deadline
        self._child = Child("evolve.py", {"api": api, "memory": MEMORY}, log=log)
        self._opened: int | None = None  # the process that has the package

    def __call__(self, prompt: str) -> str:
        safe = self._redact(prompt)
        if self._opened is None or self._opened != self._child.pid:  # importing the package is not the model's time
            self._ask({"op": "open", "timeout": self._deadline, "retries": RETRIES}, LOADING_S)
            self._opened = self._child.pid
        request = {"op": "ask", "model": self._model, "prompt": safe, "tokens": TOKENS, "largest": LARGEST}
        return str(self._ask(request, self._deadline)["text"])

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        try:
            answer = self._child.call(request, seconds)
        except ChildTimeout as error:
            raise NoReply(f"no reply of {self._name} within {seconds:g} s") from error
        except (ChildDied, TypeError, ValueError) as error:
            raise NoReply(f"no reply of {self._name}: {error}") from error
        assert isinstance(answer, dict)
        if "error" in answer:  # some servers repeat a part of the key
            raise NoReply(f"no reply of {self._name}: {masked(str(answer['error']))[:300]}")
        if "shape" in answer:
            raise NoReply(f"the reply of {self._name} cannot be used: {shown(answer['shape'])}")
        return answer

    def close(self) -> None:
        self._child.close()
