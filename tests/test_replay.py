"""A run on one engine, replayed on the other: the same delta to the bit, and the same model as far as its forms allow.

The GGUF of most tests is the folder's own 4-bit form in F32: both engines then hold one and the same base, and what is
left between them is the arithmetic of their products.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models
import hf_tokenizers
import numpy as np
import pytest
from models import tiny_gguf
from runs import make_run
from test_tune import Watcher, journal

from edgees import cli, config, evaluate, export, merge, noise, opening, tune
from edgees.backends.base import CENTRE, Member
from edgees.checkpoint import RunFolder
from edgees.delta import Delta
from edgees.errors import Interrupted, RunError, UsageError
from edgees.gguf_from_hf import Twin
from edgees.hf_files import HfFolder
from edgees.history import History

pytest.importorskip("torch")
pytest.importorskip("transformers")

ARCHS = ("llama", "qwen2", "gemma2")
"""Heads in another order in the GGUF; biases; norms that a GGUF holds 1 larger."""
SAME_BASE = 0.008
"""Largest difference of a logit, relative to the largest logit, where both engines hold the same base (measured, with
planes of 8 bits on different cells: 0.0046): products of integers round activations and the 4-bit table, and llama.cpp
keeps keys and values in half precision."""
TOKENS = [5, 91, 33, 260, 17, 7, 120, 44, 9, 300, 12]


def four_bit_twin(folder: Path, out: Path) -> Path:
    """What the torch engine holds of a folder, as a GGUF in F32."""
    with HfFolder(folder) as base:
        merge.write_gguf(merge.GgufForm(base.rows, Twin(base), {}, {}), out, "F32")
    return out


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """By architecture: the same model for each engine."""
    made = {}
    for arch in ARCHS:
        place = tmp_path_factory.mktemp(arch)
        folder = hf_models.tiny_hf(place / "folder", arch)
        hf_tokenizers.write(folder, hf_tokenizers.byte_bpe())
        made[arch] = {"torch": folder, "llamacpp": four_bit_twin(folder, place / "model.gguf")}
    return made


def data(delta: Path) -> bytes:
    """The tensors of a safetensors file, its header left out."""
    raw = delta.read_bytes()
    return raw[8 + int.from_bytes(raw[:8], "little") :]


def logits(run: Path, member: Member = CENTRE, *, learned: bool = True) -> np.ndarray:
    """float32 [tokens, vocabulary] of a run's engine, with or without what was learned."""
    with RunFolder.open(run) as folder, Delta.open(folder.delta_path, write=False) as delta:
        engine = opening.open_engine(folder.config)
        try:
            if learned:
                engine.attach(delta)
            return np.array(engine.logits(TOKENS, member))  # type: ignore[attr-defined]
        finally:
            engine.close()


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def other(engine: str) -> str:
    return "llamacpp" if engine == "torch" else "torch"


@pytest.mark.parametrize("engine", ["llamacpp", "torch"])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scope", ["full", "adapter"])
def test_the_same_delta_is_the_same_model(
    forms: dict[str, dict[str, Path]], tmp_path: Path, arch: str, scope: str, engine: str
) -> None:
    options = {"params": ".", "bits": 8} if scope == "adapter" else {"bits": 8}
    run = make_run(tmp_path / "run", forms[arch][engine], scope, engine=engine, lr=0.05, **options)
    new = tmp_path / "new"
    result = tune.replay(run / "history.jsonl", model=str(forms[arch][other(engine)]), out=new, engine=other(engine))
    assert result.generations == 2

    old, header = (History.open(r / "history.jsonl").header for r in (run, new))
    assert data(new / "delta.safetensors") == data(run / "delta.safetensors")
    assert journal(new)[1:] == journal(run)[1:]
    assert header["origin"] == [
        {"base": old["base"], "model": None, "engine": engine, "generations": 2},
    ]
    assert header["base"] != old["base"] and header["config"]["engine"] == other(engine)
    for before, after in zip(old["delta"]["tensors"], header["delta"]["tensors"], strict=True):
        name, source, *measures, heads, amplitude = after
        assert [name, *measures, amplitude] == [before[0], *before[2:6], before[7]]  # shape and RMS of the first base
        to_torch = other(engine) == "torch"
        permuted = arch == "llama" and ("q_proj" in name or "k_proj" in name)
        assert (source == name) == to_torch and bool(heads) == (permuted and not to_torch)

    base, tuned = logits(run, learned=False), logits(run)
    assert apart(logits(new, learned=False), base) < SAME_BASE
    assert apart(logits(new), tuned) < SAME_BASE
    assert apart(tuned, base) > 4 * SAME_BASE  # the two are two models
    member = Member(noise.make_key(7, 2, 1), 0.1, 9)
    perturbed = logits(run, member)
    assert apart(logits(new, member), perturbed) < SAME_BASE < 4 * SAME_BASE < apart(perturbed, tuned)


def test_there_and_back(forms: dict[str, dict[str, Path]], tmp_path: Path) -> None:
    """Two replays are written down one after the other, and the last is the first run again but for its past."""
    run = make_run(tmp_path / "run", forms["llama"]["llamacpp"], engine="llamacpp")
    tune.replay(run, model=str(forms["llama"]["torch"]), out=tmp_path / "new", engine="torch")
    tune.replay(tmp_path / "new", model=str(forms["llama"]["llamacpp"]), out=tmp_path / "back", engine="llamacpp")
    first, back = journal(run)[0], journal(tmp_path / "back")[0]
    assert [o["engine"] for o in back.pop("origin")] == ["llamacpp", "torch"]
    assert {**first, "model": "model.gguf"} == back
    assert (tmp_path / "back" / "delta.safetensors").read_bytes() == (run / "delta.safetensors").read_bytes()
    # On its own base a history stays what it is, whether an engine is named or not.
    tune.replay(run, model=str(forms["llama"]["llamacpp"]), out=tmp_path / "same", engine="llamacpp")
    assert (tmp_path / "same" / "history.jsonl").read_bytes() == (run / "history.jsonl").read_bytes()


def test_another_quantisation(tmp_path: Path) -> None:
    """Between GGUFs of one base the tuned models are no further apart than the bases."""
    first = tiny_gguf(tmp_path / "first.gguf", "llama", quant="F32", embd="F32")
    second = tiny_gguf(tmp_path / "second.gguf", "llama", quant="Q8_0")
    run = make_run(tmp_path / "run", first, lr=0.05, bits=8)
    tune.replay(run, model=str(second), out=tmp_path / "new", engine="llamacpp")
    assert data(tmp_path / "new" / "delta.safetensors") == data(run / "delta.safetensors")
    base = apart(logits(tmp_path / "new", learned=False), logits(run, learned=False))
    assert apart(logits(tmp_path / "new"), logits(run)) < 1.2 * base < 0.04


@pytest.mark.parametrize("engine", ["llamacpp", "torch"])
def test_a_replayed_run_goes_on(forms: dict[str, dict[str, Path]], tmp_path: Path, engine: str) -> None:
    """Resumed on the other engine, scored and exported there like any other run."""
    run, new = tmp_path / "run", tmp_path / "new"
    given = {
        "model": str(forms["llama"][engine]), "engine": engine, "run": str(run), "task": "sums", "pairs": 2, "rows": 3,
        "generations": 2, "eval_every": 1, "eval_rows": 4, "max_tokens": 4, "seed": 5, "loglik": 1.0, "shrink": False,
    }  # fmt: skip
    with pytest.raises(Interrupted):
        tune.tune(config.load(None, given), observer=Watcher(stop_after=1))
    model = forms["llama"][other(engine)]
    assert tune.replay(run, model=str(model), out=new, engine=other(engine)).generations == 1
    assert tune.resume(new).generations == 2
    lines = journal(new)
    assert lines[1 : len(journal(run))] == journal(run)[1:] and lines[0]["origin"][0]["generations"] == 1
    assert any(any(line["coefs"]) for line in lines if line.get("generation") == 1)  # it moved on
    with RunFolder.open(new) as folder, Delta.open(folder.delta_path) as delta:
        assert delta.generation == 2
    compared = evaluate.evaluate(new, rows=4, weights="last")
    assert compared["rows"] == 4 and compared["agreement"]["ok"] is not False
    made = export.export(new, "gguf", tmp_path / "out", type_name="F16", weights="last", verify=True)
    assert made["verify"]["ok"], made
    assert made["base"]["sha256"] == lines[0]["base"].removeprefix("sha256:")


def test_what_is_not_the_same_model_is_refused(forms: dict[str, dict[str, Path]], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", forms["llama"]["llamacpp"], engine="llamacpp")
    out = tmp_path / "out"
    with pytest.raises(RunError, match="is not the one") as error:  # another engine must be asked for
        tune.replay(run, model=str(tiny_gguf(tmp_path / "other.gguf", "llama", quant="Q8_0")), out=out)
    assert "--engine" in error.value.hint
    for options, told in [
        ({"layers": 1}, r"has no tensor model\.layers\.1\.input_layernorm\.weight"),
        ({"intermediate_size": 192}, r"mlp\.down_proj\.weight is 64 x 192 in .*, 64 x 128 in the history"),
        ({"tied": False}, r"has a tensor lm_head\.weight of its own"),
    ]:
        folder = hf_models.tiny_hf(tmp_path / "other", "llama", **options)
        with pytest.raises(RunError, match=told):
            tune.replay(run, model=str(folder), out=out, engine="torch")
        assert not out.exists()
    lattice = make_run(tmp_path / "lattice", forms["llama"]["llamacpp"], "lattice", engine="llamacpp")
    with pytest.raises(UsageError, match="lattice"):
        tune.replay(lattice, model=str(forms["llama"]["torch"]), out=out, engine="torch")


def test_the_command(forms: dict[str, dict[str, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", forms["llama"]["llamacpp"], engine="llamacpp")
    arguments = ["replay", str(run / "history.jsonl"), "--out", str(tmp_path / "new"), "--json"]
    folder = str(forms["llama"]["torch"])
    assert cli.run([*arguments, "--model", folder]) == 2  # a folder is none of llama.cpp's
    assert "add --engine torch" in capsys.readouterr().err
    assert cli.run([*arguments, "--model", folder, "--engine", "torch"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["generations"] == 2 and told["run"] == str(tmp_path / "new")
