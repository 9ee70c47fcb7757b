"""A model, or what a run has made of one, behind an OpenAI- and Anthropic-compatible address.

The unperturbed model answers: of a run, the base with its best (or last) weights, in the very engine that tuned them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from edgees import config, model_path, native
from edgees.backends.base import Engine
from edgees.context import Context
from edgees.endpoint import Endpoint, Policy
from edgees.endpoint.server import is_loopback
from edgees.opening import open_engine, open_weights, require_same_base

HOST, PORT = "127.0.0.1", 8000
PARALLEL = 4
"""Answers at once where nothing is said: each takes its own keys and values."""
MAX_TOKENS = 1024

Say = Callable[[str], None]


def serve(
    model_or_run: str | Path,
    *,
    host: str = HOST,
    port: int = PORT,
    api_key: str = "",
    weights: str = "best",
    engine: str = "",
    context: int = 0,
    parallel: int = PARALLEL,
    threads: int = 0,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.0,
    say: Say = print,
    started: Callable[[Endpoint], None] | None = None,
) -> None:
    """Serve until Ctrl-C (or ``started``'s endpoint is closed).

    model_or_run: a run folder, or what ``--model`` takes. host: other machines reach the server only where it is named.
    api_key: what clients must show; empty: nothing. weights: ``best`` or ``last``, of a run. engine: of a model; empty:
    by its form. context: tokens a conversation may have, 0: as the model; parallel: answers at once; max_tokens: of an
    answer. temperature: where a request says nothing; its own temperature and seed are honoured, 0 is greedy.

    :raises EdgeesError: no such run or model; the address is taken; uvicorn is missing.
    """
    with ExitStack() as stack:
        machine = {"context": context, "parallel": parallel, "threads": threads}
        if (Path(model_or_run) / "history.jsonl").is_file():
            opened, what, before, system = _open_run(Path(model_or_run), weights, machine, stack)
        else:
            opened, what = _open_model(str(model_or_run), engine, machine, stack)
            before, system = Context(), ""
        name = Path(model_or_run).resolve().name if Path(model_or_run).exists() else str(model_or_run)
        endpoint = Endpoint(opened, host=host, port=port, exposed=True, name=name)
        policy = Policy(max_tokens, temperature, client_sampling=True, record=False, system=system, context=before)
        endpoint.open_to_all(policy, api_key)
        stack.enter_context(endpoint)
        if not is_loopback(host):
            say(f"warning: {host} can be reached from other machines, and {_danger(api_key)}")
        say(f"serving {what} at {endpoint.url}/v1 (OpenAI) and {endpoint.url} (Anthropic); Ctrl-C ends")
        with _ended_by_signals(endpoint):
            if started is not None:
                started(endpoint)
            opened.serve(endpoint)


def _danger(api_key: str) -> str:
    return "what is said, the key too, is not encrypted" if api_key else "there is no authentication (--api-key)"


def _open_model(model: str, engine: str, machine: dict[str, int], stack: ExitStack) -> tuple[Engine, str]:
    folder = Path(model).expanduser()
    if not engine:
        whole = model_path.is_model_folder(folder) and not any(folder.glob("*.gguf"))
        hub_id = not folder.exists() and model.count("/") == 1 and not model.endswith(".gguf")
        engine = "torch" if whole or hub_id else "llamacpp"
    settings = config.load(None, {"model": model, "engine": engine, **machine})
    native.threads(settings.threads)
    return stack.enter_context(closing(open_engine(settings))), model


def _open_run(run: Path, weights: str, machine: dict[str, int], stack: ExitStack) -> tuple[Engine, str, Context, str]:
    history, settings, delta, chosen = open_weights(run, weights, stack)
    given: dict[str, Any] = {name: value for name, value in machine.items() if value}
    settings = replace(settings, **given)
    native.threads(settings.threads)
    engine = stack.enter_context(closing(open_engine(settings)))
    require_same_base(history, engine.base_hash, settings.model)
    engine.attach(delta)
    before = history.context(delta.generation)
    told = "" if before.empty else f", with its context {before.digest[:8]} before every conversation"
    system = history.header.get("recommended", {}).get("system") or ""
    if system and before.system is None:
        told += ", with its task's system message where a conversation brings none"
    return engine, f"{run} ({chosen} weights, generation {delta.generation}{told})", before, system


@contextmanager
def _ended_by_signals(endpoint: Endpoint) -> Iterator[None]:
    """The first Ctrl-C or polite kill ends the server, the second one the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        endpoint.bridge.close()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
