"""The whole way on real llama.cpp graphs (tiny random models): tune, stop, resume, replay, compare, export, verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import tiny_gguf
from test_tune import Watcher, journal, learned

from edgees import config, tune
from edgees.errors import Interrupted
from edgees.gguf_file import file_sha256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", "llama", quant="Q4_1")


def settings(model: Path, run: Path, **more: Any) -> config.Config:
    given = {
        "model": str(model), "run": str(run), "task": "sums", "pairs": 3, "rows": 3, "generations": 4, "eval_every": 2,
        "eval_rows": 6, "max_tokens": 4, "seed": 5, "loglik_hold": 0.3, "loglik_end": 0.8,
    }  # fmt: skip
    return config.load(None, {**given, **more})


@pytest.fixture(scope="module", params=["full", "adapter"])
def whole(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    run = tmp_path_factory.mktemp("runs") / "whole"
    before = file_sha256(model)
    result = tune.tune(settings(model, run, scope=request.param))
    assert result.generations == 4 and file_sha256(model) == before
    return request.param, run


def test_resume_threads_and_replay_give_the_same_bytes(whole: tuple[str, Path], model: Path, tmp_path: Path) -> None:
    """Case 33, on the real engine."""
    scope, run = whole
    parts = tmp_path / "parts"
    with pytest.raises(Interrupted):
        tune.tune(settings(model, parts, scope=scope, threads=1), observer=Watcher(stop_after=1))
    assert tune.resume(parts).generations == 4
    assert learned(parts) == learned(run)
    assert journal(parts)[1:] == journal(run)[1:]  # the header tells the number of threads
    again = tmp_path / "again"
    tune.replay(run / "history.jsonl", model=str(model), out=again)
    assert learned(again) == learned(run)


def test_compare_and_export(whole: tuple[str, Path], tmp_path: Path) -> None:
    """As a user does it: one process per command; case 34: none of them needs a network."""
    scope, run = whole
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}

    def edgees(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "edgees", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    compared = edgees("eval", str(run), "--rows", "8", "--last")
    assert compared["rows"] == 8 and compared["agreement"]["ok"] and compared["agreement_base"]["ok"]
    for kind in ("gguf", "safetensors", *(["adapter"] if scope == "adapter" else [])):
        made = edgees("export", str(run), "--to", kind, "--out", str(tmp_path / "out é" / kind), "--verify", "--last")
        assert made["verify"]["ok"], made
        for file in made["files"]:
            assert Path(file["path"]).stat().st_size == file["bytes"]
            assert file_sha256(file["path"]).removeprefix("sha256:") == file["sha256"].removeprefix("sha256:")
