"""``edgees serve``: a model, or a run's weights, at a plain address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgees import config, opening
from edgees.backends.base import CENTRE, Request
from edgees.backends.toy import ToyEngine
from edgees.checkpoint import RunFolder
from edgees.delta import Delta
from edgees.endpoint import Endpoint
from edgees.errors import EdgeesError, ModelError, RunError, UsageError
from edgees.history import History, with_header
from edgees.serve import serve

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

ASKED = [{"role": "user", "content": "a number, please"}]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def serving(what: str | Path, **options: Any) -> Iterator[tuple[Endpoint, list[str]]]:
    """(endpoint, what was said) of a server in a thread."""
    there: list[Endpoint] = []
    said: list[str] = []
    ready = threading.Event()
    failure: list[BaseException] = []

    def started(endpoint: Endpoint) -> None:
        there.append(endpoint)
        ready.set()

    def run() -> None:
        try:
            serve(what, port=0, say=said.append, started=started, **options)
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        if failure:
            raise failure[0]
        yield there[0], said
    finally:
        for endpoint in there:
            endpoint.close()
        thread.join(60)
    assert not thread.is_alive() and not failure


def ask(url: str, key: str = "any", **options: Any) -> str:
    with openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
        found = client.chat.completions.create(**{"model": "m", "messages": ASKED, **options})
        return str(found.choices[0].message.content)


def answer(delta: Delta | None = None, temperature: float = 0.0, seed: int = 0, messages: Any = ASKED) -> str:
    """What the toy says in this process."""
    with closing(ToyEngine()) as engine:
        if delta is not None:
            engine.attach(delta)
        prompt = tuple(engine.encode_chat(messages))
        return engine.generate([Request(CENTRE, prompt, 99, temperature, seed)])[0].text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose best weights are after one step and whose last after two."""
    settings = config.load(None, {"model": "toy", "engine": "toy", "run": str(tmp_path / "run"), "pairs": 2})
    with closing(opening.open_engine(settings)) as engine, RunFolder.create(settings) as folder:
        spec = opening.spec_of(settings, engine)
        header = {
            "base": engine.base_hash, "config": settings.public(free=False), "seed": settings.seed,
            "pairs": settings.pairs, "delta": spec.to_dict(), "data": "",
        }  # fmt: skip
        history = History.create(folder.history_path, header)
        with Delta.create(folder.delta_path, spec) as delta:
            for g in range(2):
                coefs = [float(c) for c in np.array([0.5, -0.5], np.float32)]
                history.append(
                    {"generation": g, "coefs": coefs, "keep": 1.0, "rewards": {"plus": [], "minus": []}, "excluded": []}
                )
                delta.apply(history.step(g))
                if not g:
                    folder.save_best(delta, {"generation": 1, "heldout": 0.5})
    return tmp_path / "run"


def test_a_model_answers_both_clients_without_a_token() -> None:
    with serving("toy", engine="toy") as (endpoint, said):
        assert ask(endpoint.url) == answer()
        with anthropic.Anthropic(base_url=endpoint.url, api_key="any", max_retries=0) as client:
            found = client.messages.create(model="m", max_tokens=99, messages=ASKED)
            assert found.content[0].text == answer()
        assert said == [f"serving toy at {endpoint.url}/v1 (OpenAI) and {endpoint.url} (Anthropic); Ctrl-C ends"]
        assert endpoint.url.startswith("http://127.0.0.1:")


def test_the_clients_sampling_is_honoured_and_nothing_is_kept() -> None:
    with serving("toy", engine="toy") as (endpoint, _):
        found = ask(endpoint.url, temperature=0.8, seed=5)
        assert found == answer(temperature=0.8, seed=5) != answer()
        assert ask(endpoint.url, temperature=0.8, seed=5) == found
        assert ask(endpoint.url, temperature=0.8) != ask(endpoint.url, temperature=0.8)
        assert endpoint.app.public is not None and endpoint.app.public.calls == []
    with serving("toy", engine="toy", temperature=0.8, max_tokens=3) as (endpoint, _):
        assert ask(endpoint.url, seed=5) == found[:3]


def test_a_runs_best_and_last_weights(run: Path) -> None:
    with Delta.open(run / "best" / "delta.safetensors", write=False) as delta:
        best = answer(delta)
    with Delta.open(run / "delta.safetensors", write=False) as delta:
        last = answer(delta)
    assert len({best, last, answer()}) == 3
    with serving(run) as (endpoint, said):
        assert ask(endpoint.url) == best
        assert "(best weights, generation 1)" in said[0]
        with openai.OpenAI(base_url=endpoint.url + "/v1", api_key="x", max_retries=0) as client:
            assert [m.id for m in client.models.list()] == ["run"]
    with serving(run, weights="last") as (endpoint, said):
        assert ask(endpoint.url) == last
        assert "(last weights, generation 2)" in said[0]


def test_the_tasks_system_message_stands_where_a_client_brings_none(run: Path) -> None:
    path, system = run / "history.jsonl", {"role": "system", "content": "be brief"}
    header = History.open(path).header
    path.write_bytes(with_header(path, {**header, "recommended": {"attempts": "single", "system": "be brief"}}))
    with Delta.open(run / "best" / "delta.safetensors", write=False) as delta:
        without, behind = answer(delta), answer(delta, messages=[system, *ASKED])
    with serving(run) as (endpoint, said):
        assert ask(endpoint.url) == behind != without
        own = [{"role": "system", "content": "be brief"}, *ASKED]
        assert ask(endpoint.url, messages=own) == behind
        assert ask(endpoint.url, messages=[{"role": "system", "content": "shout"}, *ASKED]) != behind
        assert "its task's system message where a conversation brings none" in said[0]


def test_an_api_key_is_asked_of_everybody() -> None:
    with serving("toy", engine="toy", api_key="sesame") as (endpoint, _):
        assert ask(endpoint.url, "sesame") == answer()
        for wrong in ("open", "sesame2"):
            with pytest.raises(openai.AuthenticationError):
                ask(endpoint.url, wrong)
        with anthropic.Anthropic(base_url=endpoint.url, api_key="sesame", max_retries=0) as client:
            assert client.messages.create(model="m", max_tokens=99, messages=ASKED).content[0].text == answer()
        with anthropic.Anthropic(base_url=endpoint.url, api_key="no", max_retries=0) as client:
            for call in (
                lambda: client.messages.create(model="m", max_tokens=99, messages=ASKED),
                lambda: client.models.list(),
            ):
                with pytest.raises(anthropic.AuthenticationError):
                    call()


@pytest.mark.parametrize(("key", "warning"), [("", "no authentication"), ("k", "not encrypted")])
def test_another_host_is_allowed_where_it_is_named_and_warned_of(key: str, warning: str) -> None:
    with serving("toy", engine="toy", host="0.0.0.0", api_key=key) as (endpoint, said):
        assert said[0].startswith("warning: 0.0.0.0 can be reached from other machines") and warning in said[0]
        assert ask(f"http://127.0.0.1:{endpoint.port}", key or "any") == answer()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda run: (run / "config.resolved.toml").unlink(), RunError, "is no run folder"),
        (lambda run: (run / "best" / "delta.safetensors").write_bytes(b"x"), RunError, "delta.safetensors"),
        (lambda run: (run / "history.jsonl").unlink(), ModelError, "run"),
        (
            lambda run: (run / "config.resolved.toml").write_text('model = "toy:seed=9"\nengine = "toy"\n'),
            RunError,
            "is not the one",
        ),
    ],
)
def test_a_damaged_run_is_refused(run: Path, change: Callable[[Path], object], kind: type, says: str) -> None:
    change(run)
    with pytest.raises(kind, match=says), serving(run):
        pass


def test_what_cannot_be_served_is_refused(tmp_path: Path, run: Path) -> None:
    for what in (str(tmp_path / "no.gguf"), "folder/no.gguf"):
        with pytest.raises(ModelError, match=r"no model file .*no\.gguf"), serving(what):
            pass
    with pytest.raises(UsageError, match="weights"), serving(run, weights="worst"):
        pass
    with serving("toy", engine="toy") as (endpoint, _), pytest.raises(EdgeesError, match="cannot be listened on"):
        serve("toy", engine="toy", port=endpoint.port, say=lambda text: None)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_cleanly(number: signal.Signals) -> None:
    code = "from edgees.serve import serve; serve('toy:delay=0.05', engine='toy', port=0); print('ended')"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        url = line.split(" at ")[1].split("/v1")[0]
        assert ask(url) == answer()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "ended\n", "")
