"""Script of the evolver child: a user's functions that propose contexts or mask texts, and calls of model APIs.

Options: {"memory": bytes that calls may take} and one of {"file"}, {"api": "openai" | "anthropic"}.
Requests: {"op": "load", "name", "default"} and {"op": "call", "name", "arguments": {...}, "largest": characters}; of an
API {"op": "open", "timeout", "retries"}, once, and {"op": "ask", "model", "prompt", "tokens", "largest"}.
Answers to ``load``: {"name" ("": not there), "functions", "required"}; to ``call``: {"value"}, or {"shape": words} for
what is not JSON or too large; to ``open``: {}; to ``ask``: {"text"}, or {"shape"}. To all {"error", "where", "trace"}
where something was raised. Only ``ask`` touches a network; address and key are what the API's own package reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _HERE:
    sys.path.pop(0)  # our own file names must not hide the user's modules
sys.path.insert(0, _HERE)
import calling  # type: ignore[import-not-found]  # noqa: E402
import protocol  # type: ignore[import-not-found]  # noqa: E402
import score  # type: ignore[import-not-found]  # noqa: E402

sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
del sys.modules["score"]  # a likely name for a module of the user's


def value_of(function: Any, arguments: dict[str, Any], largest: int) -> dict[str, Any]:
    """What a function returns, if that is JSON of at most ``largest`` characters. Exceptions pass."""
    names, _ = calling.parameters_of(function)
    result = function(**(arguments if names is None else {k: v for k, v in arguments.items() if k in names}))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    try:
        size = len(json.dumps(result))
    except (TypeError, ValueError, RecursionError):
        return {"shape": f"{calling.describe(result)}, which is not JSON"}
    return {"value": result} if size <= largest else {"shape": f"{size:,} characters of JSON"}


def asker(api: str, seconds: float, retries: int) -> Callable[[str, str, int], tuple[str, str]]:
    """(model, prompt, tokens) -> (text, why it ended). The package reads address and key from the environment."""
    return claude(seconds, retries) if api == "anthropic" else gpt(seconds, retries)


def claude(seconds: float, retries: int) -> Callable[[str, str, int], tuple[str, str]]:
    import anthropic

    client = anthropic.Anthropic(timeout=seconds, max_retries=retries)

    def ask(model: str, prompt: str, tokens: int) -> tuple[str, str]:
        said = client.messages.create(model=model, max_tokens=tokens, messages=[{"role": "user", "content": prompt}])
        return "".join(getattr(part, "text", "") or "" for part in said.content or ()), str(said.stop_reason)

    return ask


def gpt(seconds: float, retries: int) -> Callable[[str, str, int], tuple[str, str]]:
    import openai

    client = openai.OpenAI(timeout=seconds, max_retries=retries)
    # OpenAI's own models of today refuse max_tokens; servers that copy the API often know nothing else.
    limit = "max_completion_tokens" if client.base_url.host.endswith("openai.com") else "max_tokens"

    def ask(model: str, prompt: str, tokens: int) -> tuple[str, str]:
        more: Any = {limit: tokens}
        said = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], **more)
        if not said.choices:
            return "", "no choice"
        return said.choices[0].message.content or "", str(said.choices[0].finish_reason)

    return ask


def main() -> None:
    options = json.loads(sys.argv[1])
    path = options.get("file", "")
    functions: dict[str, Any] = {}
    listed: list[str] = []
    askers: dict[str, Any] = {}

    def load() -> None:
        if not functions:
            module = score.load_file(path)
            listed.extend(score.own_functions(module))
            functions.update(vars(module))
            protocol.limit(int(options["memory"]))  # what the file imports may be large; a call of it may not

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        text, reason = askers[""](request["model"], request["prompt"], int(request["tokens"]))
        if not isinstance(text, str) or not text.strip():
            return {"shape": f"no text ({reason})"}
        return {"text": text} if len(text) <= request["largest"] else {"shape": f"{len(text):,} characters"}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "open":
                askers[""] = asker(options["api"], float(request["timeout"]), int(request["retries"]))
                protocol.limit(int(options["memory"]))
                return {}
            if request["op"] == "ask":
                return ask(request)
            load()
            if request["op"] == "load":
                only = listed[0] if len(listed) == 1 else ""
                name = request["name"] or (request["default"] if request["default"] in listed else only)
                if not callable(functions.get(name)):
                    return {"name": "", "functions": listed}
                return {"name": name, "functions": listed, "required": calling.parameters_of(functions[name])[1]}
            return value_of(functions[request["name"]], request["arguments"], int(request["largest"]))
        except BaseException as error:  # SystemExit too: it must not end the loop
            answer: dict[str, Any] = score.failure(error, path)
            return answer
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()

    protocol.serve(handle)


if __name__ == "__main__":
    main()
