"""Runs on Hugging Face folders: what was scored is what is merged, exported, verified and judged, without torch."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import hf_models
import hf_tokenizers
import models
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import load_file

from edgees import blocks, cli, config, evaluate, export, gguf_file, merge, nf4
from edgees.backends.base import TensorInfo
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.checkpoint import RunFolder
from edgees.delta import Delta, DeltaSpec
from edgees.errors import ExportError, RunError, UsageError, WillNotFit
from edgees.gguf_file import GgufFile
from edgees.hf_files import HfFolder
from edgees.history import History
from edgees.merge import Effective

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HELLO = [{"role": "user", "content": "Please turn on two lamps,\n  at half past nine! 12345 é"}]


def hf_run(
    run: Path, folder: Path, scope: str = "full", *, generations: int = 2, lr: float = 0.03, **options: Any
) -> Path:
    """A run of the torch engine on ``folder`` as the loop would have left it; its best is the last."""
    given = {
        "model": str(folder), "run": str(run), "scope": scope, "pairs": 4, "seed": 7, "factors": 8, "task": "sums",
        "engine": "torch", **options,
    }  # fmt: skip
    settings = config.load(None, given)
    with HfFolder(folder) as base, RunFolder.create(settings) as made:
        infos = []
        for name, t in base.tensors.items():
            if not settings.pattern or re.search(settings.pattern, name):
                rho = float(np.float32(np.sqrt(np.mean(np.square(base.rows(name), dtype=np.float64)))))
                infos.append(TensorInfo(name, name, *t.shape, t.vector, rho))
        refined = settings.view == "refined"
        spec = DeltaSpec(
            tuple(infos), settings.view, settings.bits if refined else 0, 0 if refined else settings.factors,
            settings.noise, settings.rank, settings.seed,
        )  # fmt: skip
        header = {
            "base": base.sha256(), "config": settings.public(free=False), "seed": settings.seed,
            "pairs": settings.pairs, "delta": spec.to_dict(), "data": "",
        }  # fmt: skip
        history = History.create(made.history_path, header)
        rng = np.random.default_rng(1)
        with Delta.create(made.delta_path, spec) as delta:
            for g in range(generations):
                coefs = (rng.standard_normal(settings.pairs) * lr / np.sqrt(settings.pairs)).astype(np.float32)
                line = {"generation": g, "coefs": [float(c) for c in coefs], "keep": 1.0}
                history.append({**line, "rewards": {"plus": [], "minus": []}, "excluded": []})
                delta.apply(history.step(g))
            made.save_best(delta, {"generation": generations, "heldout": 0.5})
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = hf_models.tiny_hf(tmp_path_factory.mktemp("hf") / "tiny llama", "llama", hidden=128)
    hf_tokenizers.write(folder, hf_tokenizers.byte_bpe())
    return folder


@pytest.fixture(scope="module")
def run(model: Path) -> Path:
    return hf_run(model.parent / "full", model)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return hf_run(model.parent / "adapter", model, "adapter")


def scored(run: Path) -> dict[str, np.ndarray]:
    """What the engine multiplied with, float32, by canonical name."""
    with merge.open_run(run) as opened:
        effective = Effective(opened.base, opened.delta)
        return {name: effective.rows(name).reshape(t.dims[::-1]) for name, t in effective.tensors.items()}


def floats(folder: Path) -> dict[str, np.ndarray]:
    """A folder's float tensors as float32."""
    stored = merge.SafeTensors(folder)
    return {
        name: stored.rows(name, 0, 1 if len(shape) == 1 else shape[0]).reshape(shape)
        for name, (_, _, shape, _, _) in stored.entries.items()
    }


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    code = cli.run([*(str(a) for a in arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


# ---- what was scored
@pytest.mark.parametrize(
    ("arch", "scope", "options"),
    [
        ("llama", "full", {"bits": 4}),
        ("qwen2", "full", {"bits": 2}),
        ("gemma3_text", "full", {"bits": 8}),
        ("phi3", "adapter", {"params": "."}),
    ],
)
def test_merged_weights_are_those_the_engine_multiplies_with(
    arch: str, scope: str, options: dict[str, Any], tmp_path: Path
) -> None:  # case 5
    from edgees.backends.torch_nf4 import TorchEngine

    folder = hf_models.tiny_hf(tmp_path / "m", arch)
    with merge.open_run(hf_run(tmp_path / "run", folder, scope, **options)) as opened:
        effective = Effective(opened.base, opened.delta)
        engine = TorchEngine(folder, device="cpu")
        engine.attach(opened.delta)
        for name, t in effective.tensors.items():
            whole = effective.rows(name)
            assert np.array_equal(whole, engine.effective(name).reshape(whole.shape)), name
            piecewise = [effective.rows(name, at, min(7, t.shape[0] - at)) for at in range(0, t.shape[0], 7)]
            assert np.array_equal(whole, np.concatenate(piecewise)), name
        engine.close()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_plane_beside_nf4_is_within_its_step(bits: int, model: Path, tmp_path: Path) -> None:
    with merge.open_run(hf_run(tmp_path / "run", model, bits=bits)) as opened:
        effective, base = Effective(opened.base, opened.delta), opened.base
        assert isinstance(base, HfFolder)
        for name, t in base.tensors.items():
            got, delta = effective.rows(name), opened.delta.rows(name, 0, t.shape[0])
            if t.vector:
                assert np.array_equal(got, base.rows(name) + delta)
                continue
            assert np.abs(delta).max() > 0
            cell = blocks.cells(t.type_name, base.raw(name), *t.shape, float(np.sqrt(np.mean(base.rows(name) ** 2))))
            if t.four_bit:
                assert np.allclose(np.repeat(cell, 32, 1), absmax(base, name) / 8)
            step = np.repeat(cell, 32, 1) * 2.0 ** (effective._spans[name] - bits)
            inside = np.abs(delta) < step * (2 ** (bits - 1) - 1)
            assert inside.mean() > 0.9
            assert (np.abs(got - base.rows(name) - delta)[inside] <= 1.001 * step[inside] + 1e-7).all(), name


def absmax(base: HfFolder, name: str) -> np.ndarray:
    rows, cols = base.tensors[name].shape
    return np.repeat(base.quantised(name).absmax_float32(), 64).reshape(rows, cols)


def test_runs_are_checked_on_opening(model: Path, run: Path, tmp_path: Path) -> None:
    with merge.open_run(run) as opened:
        assert isinstance(opened.base, HfFolder) and opened.weights == "best"
        with HfFolder(model) as folder:
            assert all(np.array_equal(folder.rows(n), opened.base.rows(n)) for n in folder.tensors)
    other = hf_models.tiny_hf(tmp_path / "m", "llama", hidden=128, seed=5)
    moved = hf_run(tmp_path / "run", other)
    hf_models.tiny_hf(other, "llama", hidden=128, seed=6)
    with pytest.raises(RunError, match="is not the model"):
        merge.open_run(moved)


def test_a_history_made_on_a_gguf_applies_to_the_folder(smollm2_like: tuple[Path, Path], tmp_path: Path) -> None:
    """Names and element order are canonical, so the same delta goes onto either form of a model."""
    from runs import make_run

    gguf, folder = smollm2_like
    run = make_run(tmp_path / "run", gguf)
    with merge.open_run(run) as opened, HfFolder(folder) as base:
        there, here = Effective(opened.base, opened.delta), Effective(base, opened.delta)
        assert set(here.infos) == set(base.tensors)
        assert isinstance(opened.base, GgufFile)
        form = merge.GgufForm.of(here)
        for name, t in opened.base.tensors.items():
            moved = there.rows(name) - there.base_rows(name)
            also = form.rows(name) - form.base.rows(base.rows, name)
            assert np.abs(moved - also).max() < 0.1 * np.abs(there.base_rows(name)).max(), name
            assert t.vector or np.corrcoef(moved.ravel(), also.ravel())[0, 1] > 0.9, name


@pytest.fixture
def smollm2_like(tmp_path: Path) -> tuple[Path, Path]:
    from runs import make_run

    gguf = models.tiny_gguf(tmp_path / "m.gguf", "llama", quant="F32", embd="F32")
    nothing = make_run(tmp_path / "nothing", gguf, generations=0)
    export.export(nothing, "safetensors", tmp_path / "folder", type_name="F32")
    return gguf, tmp_path / "folder"


# ---- safetensors
@pytest.mark.parametrize("arch", hf_models.ARCHS)
def test_safetensors_hold_the_scored_weights(arch: str, tmp_path: Path) -> None:  # cases 5, 6 and 9
    tied = arch not in ("phi3", "mistral", "olmo2")
    folder = hf_models.tiny_hf(tmp_path / "m", arch, tied=tied)
    hf_tokenizers.write(folder, hf_tokenizers.byte_bpe())
    run = hf_run(tmp_path / "run", folder)
    out = tmp_path / "out"
    made = export.export(run, "safetensors", out, type_name="F32", verify=True)
    assert made["verify"]["ok"], made["verify"]
    weights, want = load_file(out / "model.safetensors"), scored(run)
    assert set(weights) == set(want) and all(np.array_equal(weights[n], want[n]) for n in want)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    assert after["tie_word_embeddings"] is tied and ("lm_head.weight" in weights) is not tied
    assert after["edgees"]["base"] == HfFolder(folder).sha256() and after["torch_dtype"] == "float32"
    kept = {k: v for k, v in before.items() if k not in ("dtype", "torch_dtype", "tie_word_embeddings")}
    assert kept.items() <= after.items()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    tokens = [5, 91, 33, 260, 17, 7]
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.float32
    head = loaded.get_output_embeddings().weight
    assert (head is loaded.get_input_embeddings().weight) is tied  # a reload keeps the tuned head
    with torch.no_grad():
        theirs = loaded(torch.tensor([tokens])).logits[0].numpy()
    merge.convert(out, tmp_path / "m.gguf", "F32")
    with LlamaCppEngine(tmp_path / "m.gguf", plain=True) as engine:
        assert np.abs(engine.logits(tokens) - theirs).max() < 1e-2


@pytest.mark.parametrize(("type_name", "relative"), [("BF16", 2**-8), ("F16", 2**-11)])
def test_halves(type_name: str, relative: float, run: Path, tmp_path: Path) -> None:  # cases 5 and 9
    made = export.export(run, "safetensors", tmp_path / "out", type_name=type_name, verify=True)
    assert made["verify"]["ok"] and made["verify"]["kl"]["mean"] <= export.KL_BOUNDS[type_name]
    assert {e[1] for e in merge.SafeTensors(tmp_path / "out").entries.values()} == {type_name}
    got, want = floats(tmp_path / "out"), scored(run)
    for name, x in want.items():
        assert (np.abs(got[name] - x) <= np.abs(x) * relative + 2**-25).all(), name


def test_four_bits(run: Path, tmp_path: Path) -> None:  # cases 1 and 9
    out = tmp_path / "out"
    made = export.export(run, "safetensors", out, type_name="nf4", verify=True)
    assert made["type"] == "NF4" and made["verify"]["ok"] and made["verify"]["kl"]["bound"] is None
    assert any("NF4 is re-rounded: held-out reward" in note for note in made["notes"])
    assert made["rescored"]["loglik"]["difference"]["mean"] is not None
    entries, want = merge.SafeTensors(out).entries, scored(run)
    with HfFolder(out) as folder:
        assert folder.config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
        for name, x in want.items():
            packed = name.startswith("model.layers.") and x.ndim == 2
            assert entries[name][1] == ("U8" if packed else "BF16") and folder.tensors[name].quantised is packed
            if packed:
                ours = nf4.quantise(x, "nf4", nested=True)
                assert np.array_equal(folder.quantised(name).packed, ours.packed)
                assert np.array_equal(folder.rows(name), ours.dequantise()), name
        from bitsandbytes import functional

        for name in (n for n, t in folder.tensors.items() if t.quantised):
            tensors = {
                key: torch.from_numpy(np.array(raw(folder, key))) for key in entries if key.startswith(f"{name}.")
            }
            state = functional.QuantState.from_dict(tensors, torch.device("cpu"))
            codes = torch.from_numpy(np.array(raw(folder, name)))
            w = functional.dequantize_4bit(codes, state).float().numpy()
            assert np.abs(w - folder.rows(name)).max() < 2**-8 * np.abs(w).max()  # theirs is rounded to bfloat16


def raw(folder: HfFolder, name: str) -> np.ndarray:
    _, dtype, shape, _, _ = (stored := merge.SafeTensors(folder.path)).entries[name]
    return np.asarray(stored.raw(name)).view(np.uint8 if dtype == "U8" else np.float32).reshape(shape)


def test_transformers_loads_four_bits(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import transformers

    out = tmp_path / "out"
    export.export(run, "safetensors", out, type_name="NF4")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, device_map="cpu")
    assert sum(type(module).__name__ == "Linear4bit" for module in loaded.modules()) == 14
    tokens = [5, 91, 33, 260, 17, 7]
    with torch.no_grad():
        theirs = loaded(torch.tensor([tokens])).logits[0].float().numpy()
    merge.convert(out, tmp_path / "m.gguf", "F32")
    with LlamaCppEngine(tmp_path / "m.gguf", plain=True) as engine:
        assert np.abs(engine.logits(tokens) - theirs).max() < 0.05 * np.abs(theirs).max()


def test_four_bits_of_odd_columns_stay_wide(tmp_path: Path) -> None:  # cases 3 and 10
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", intermediate_size=96)
    run = hf_run(tmp_path / "run", folder)
    export.export(run, "safetensors", tmp_path / "out", type_name="NF4")
    entries = merge.SafeTensors(tmp_path / "out").entries
    assert entries["model.layers.0.mlp.down_proj.weight"][1] == "BF16"
    assert entries["model.layers.0.mlp.up_proj.weight"][1] == "U8"
    skipped = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    assert skipped == ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    with HfFolder(tmp_path / "out") as back:
        types = {name: t.type_name for name, t in back.tensors.items()}
    assert types["model.layers.0.mlp.down_proj.weight"] == "BF16"
    assert types["model.layers.0.mlp.up_proj.weight"] == "NF4"


def test_shards(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export.write_safetensors, "__defaults__", (200_000,))
    for type_name in ("BF16", "NF4"):
        many = export.export(run, "safetensors", tmp_path / type_name, type_name=type_name, verify=True)
        assert many["verify"]["ok"] and len(many["files"]) > 4
        index = json.loads((tmp_path / type_name / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():  # state and codes lie in one file
            assert name.rsplit(".weight.", 1)[0] in name and (tmp_path / type_name / file).is_file()
        HfFolder(tmp_path / type_name).close()


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("fp4", False)])
def test_an_already_four_bit_checkpoint_needs_no_other_model(
    kind: str, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # cases 4 and 16
    folder = hf_models.tiny_bnb(tmp_path / "m", "qwen2", kind=kind, nested=nested)
    run = hf_run(tmp_path / "run", folder)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would fail
    monkeypatch.setitem(sys.modules, "transformers", None)
    made = export.export(run, "safetensors", tmp_path / "out", type_name="F32", verify=True)
    assert made["verify"]["ok"]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    want = scored(run)
    assert all(np.array_equal(x, want[n]) for n, x in load_file(tmp_path / "out" / "model.safetensors").items())
    assert export.export(run, "gguf", tmp_path / "m.gguf", verify=True)["verify"]["ok"]


# ---- GGUF
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_gguf(type_name: str, tmp_path: Path) -> None:  # cases 5, 9 and 10
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", hidden=256)
    run = hf_run(tmp_path / "run", folder)
    made = export.export(run, "gguf", tmp_path / "out", type_name=type_name, verify=True)
    checked = made["verify"]
    assert checked["ok"] and checked["tied_head"] and checked["keys"], checked
    assert merge.follows_convention(Path(made["files"][0]["path"]).name)
    with GgufFile(made["files"][0]["path"]) as file, HfFolder(folder) as base:
        assert file.metadata["edgees.base"] == base.sha256() and file.metadata["edgees.generation"] == 2
        types = {t.type_name for n, t in file.tensors.items() if n.startswith("blk") and not t.vector}
        assert types <= ({"Q4_K", "Q6_K"} if type_name == "Q4_K_M" else {type_name})
        if type_name in merge.EXACT:
            q = file.tensors["blk.1.attn_q.weight"]
            raw = np.array(file.raw(q.name)).reshape(q.shape[0], -1)
            w = dequantize(raw, GGMLQuantizationType[type_name])
            want = scored(run)["model.layers.1.self_attn.q_proj.weight"]
            # as llama.cpp's converter permutes: halves of a head become neighbours
            want = want.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(want.shape)
            assert np.abs(w - want).max() <= np.abs(want).max() * {"F32": 0, "F16": 2**-11}.get(type_name, 2**-7)
            assert made["rescored"] is None and checked["kl"]["mean"] <= checked["kl"]["bound"]
        else:
            assert made["rescored"]["rows"] > 0 and any("re-rounded" in n for n in made["notes"])
    assert os.listdir(tmp_path / "out") == [Path(made["files"][0]["path"]).name]


@pytest.mark.parametrize("arch", hf_models.ARCHS)
def test_gguf_of_every_architecture(arch: str, tmp_path: Path) -> None:
    folder = hf_models.tiny_hf(tmp_path / "m", arch, tied=arch not in ("phi3", "olmo2"))
    hf_tokenizers.write(folder, hf_tokenizers.byte_bpe())
    made = export.export(hf_run(tmp_path / "run", folder), "gguf", tmp_path / "out.gguf", verify=True)
    assert made["type"] == "Q8_0" and made["verify"]["ok"], made["verify"]
    with LlamaCppEngine(tmp_path / "out.gguf", plain=True) as engine:
        import tokenizers

        own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for text in hf_tokenizers.TEXTS:
            assert engine._tokenize(text, special=True) == own.encode(text, add_special_tokens=False).ids


def test_odd_columns_keep_a_wider_type_and_it_is_said(run: Path, tmp_path: Path) -> None:  # case 10
    made = export.export(run, "gguf", tmp_path, type_name="Q4_K_M")
    assert any("128 columns are not a multiple of 256" in note for note in made["notes"])
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", intermediate_size=80)
    made = export.export(hf_run(tmp_path / "run", folder), "gguf", tmp_path / "o.gguf", type_name="Q8_0", verify=True)
    assert made["verify"]["ok"] and any("80 columns are not a multiple of 32" in note for note in made["notes"])


def test_care_in_rounding_is_taken_without_our_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", hidden=256)
    run = hf_run(tmp_path / "run", folder)
    monkeypatch.setattr(export._Export, "rescore", lambda *_: None)
    monkeypatch.setattr(export, "CHATS", ("What is 3 plus 4?", "Add 7 and 2.", "1 + 5 ="))
    loss = []
    for care in (True, False):
        if not care:
            monkeypatch.setattr(export._Export, "moments", lambda *_: None)
        made = export.export(run, "gguf", tmp_path / "out", type_name="Q4_1", verify=True, force=True)
        loss.append(made["verify"]["kl"]["mean"])
    assert loss[0] < 0.96 * loss[1], loss


def test_verify_catches_what_is_not_the_scored_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = merge.write_gguf

    def reversed_heads(effective: Any, path: Path, type_name: str, moments: Any = None, _: Any = None) -> list[str]:
        if path.name != "scored.gguf":
            form = merge.GgufForm.of(effective)
            rows = form.rows
            form.rows = lambda n, r=0, k=None: rows(n, r, k)[::-1] if "attn_q" in n else rows(n, r, k)  # type: ignore[method-assign]
            return write(form, path, type_name, moments)
        return write(effective, path, type_name, moments)

    monkeypatch.setattr(merge, "write_gguf", reversed_heads)
    code, document, err = command(
        capsys, "export", run, "--to", "gguf", "--out", tmp_path / "out", "--type", "F32", "--verify"
    )
    assert code == 1 and document["verify"]["failed"] == ["kl"] and "not what was scored: kl" in err


def test_rope_scaling_goes_along(tmp_path: Path) -> None:  # case 11
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", rope_parameters=scaling)
    document = json.loads((folder / "config.json").read_text())
    old = {**document, "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    del old["rope_parameters"]
    for i, spelling in enumerate((document, old)):
        (folder / "config.json").write_text(json.dumps(spelling))
        run = hf_run(tmp_path / f"run{i}", folder)
        export.export(run, "gguf", tmp_path / f"{i}.gguf", type_name="F32")
        with GgufFile(tmp_path / f"{i}.gguf") as file:
            assert (file.get("rope.scaling.type"), file.get("rope.scaling.factor")) == ("linear", 4.0)
            assert file.get("rope.freq_base") == 5e4
        export.export(run, "safetensors", tmp_path / f"hf{i}")
        key = "rope_scaling" if i else "rope_parameters"
        assert json.loads((tmp_path / f"hf{i}" / "config.json").read_text())[key] == spelling[key]


def test_bos_and_stops_go_along(tmp_path: Path) -> None:  # cases 12 and 13
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", eos_token_id=0, vocab_size=600)
    hf_tokenizers.write(
        folder, hf_tokenizers.sentencepiece_bpe(), add_bos_token=True,
        template="{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    )  # fmt: skip
    data = json.loads((folder / "tokenizer.json").read_text())
    size = len(data["model"]["vocab"])
    data["added_tokens"] += hf_tokenizers.added([(size, "<|im_start|>"), (size + 1, "<|im_end|>")])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    run = hf_run(tmp_path / "run", folder, generations=1)
    export.export(run, "safetensors", tmp_path / "hf")
    stops = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [0, size + 1]
    made = export.export(run, "gguf", tmp_path / "out.gguf", verify=True)
    assert made["verify"]["ok"]
    with LlamaCppEngine(tmp_path / "out.gguf", plain=True) as engine:
        assert size + 1 in engine.end_of_turn()
        assert engine.encode_chat(HELLO)[0] == 1 and engine.encode_chat(HELLO).count(1) == 1


# ---- adapter
def test_an_adapter_is_exact(adapter: Path, model: Path, tmp_path: Path) -> None:
    made = export.export(adapter, "adapter", tmp_path, verify=True)
    assert made["verify"]["ok"] and made["verify"]["kl"]["mean"] < 1e-3, made["verify"]
    gguf = next(tmp_path.glob("*-F32-LoRA.gguf"))
    peft = load_file(tmp_path / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model.resolve())
    assert settings["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    with merge.open_run(adapter) as opened, GgufFile(gguf) as file:
        effective = Effective(opened.base, opened.delta)
        for info in opened.delta.spec.tensors:
            a, b = (peft[f"base_model.model.{info.name.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
            assert set(np.unique(a)) == {-1.0, 1.0}
            assert np.allclose(b @ a, opened.delta.rows(info.name, 0, info.rows), atol=1e-7)
            whole = effective.rows(info.name)
            assert np.array_equal(whole, effective.base_rows(info.name) + effective.delta_rows(info.name))
        form = merge.GgufForm.of(effective)
        for name in ("blk.1.attn_q.weight", "blk.0.ffn_down.weight"):  # one permuted, one not
            la, lb = (
                np.array(file.raw(f"{name}.lora_{x}")).view("<f4").reshape(file.tensors[f"{name}.lora_{x}"].shape)
                for x in "ab"
            )
            moved = form.rows(name) - form.base.rows(effective.base_rows, name)
            assert np.allclose(lb @ la, moved, atol=1e-6)


def test_an_adapter_of_a_full_run_or_a_tied_embedding_is_refused(run: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tuned with --scope full"):
        export.export(run, "adapter", tmp_path / "no")
    tied = hf_run(tmp_path / "tied", model, "adapter", params="embed")
    with pytest.raises(UsageError, match="the embedding and the head at once"):
        export.export(tied, "adapter", tmp_path / "no")


# ---- what is refused
def test_a_weight_beyond_f16_is_named(tmp_path: Path) -> None:  # case 7
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", dtype="float32")

    def change(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        dtype, shape, data = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = dtype, shape, np.float32(70000).tobytes() + data[4:]

    hf_models.rewrite(folder, change)
    run = hf_run(tmp_path / "run", folder, lr=1e-4)
    for to in ("gguf", "safetensors"):
        with pytest.raises(ExportError, match=r"model\.embed_tokens\.weight.*beyond what F16") as caught:
            export.export(run, to, tmp_path / "out", type_name="F16")
        assert "BF16" in (caught.value.hint or "") and not (tmp_path / "out").exists()
    export.export(run, "safetensors", tmp_path / "out", type_name="BF16")
    assert floats(tmp_path / "out")["model.embed_tokens.weight"].max() == pytest.approx(70000, rel=0.01)


def test_a_nan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 8
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", dtype="float32")
    run = hf_run(tmp_path / "run", folder, params="self_attn")
    before = HfFolder(folder).sha256()

    def change(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        dtype, shape, data = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = dtype, shape, np.float32(np.nan).tobytes() + data[4:]

    hf_models.rewrite(folder, change)  # after tuning, and unnoticed
    monkeypatch.setattr(HfFolder, "sha256", lambda self: before)
    for to, type_name in (("gguf", "F16"), ("gguf", "Q4_0"), ("safetensors", "BF16"), ("safetensors", "NF4")):
        with pytest.raises(ExportError, match=r"model\.norm\.weight.*NaN"):
            export.export(run, to, tmp_path / "out", type_name=type_name)


def test_requests_that_make_no_sense(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from runs import make_run

    gguf = make_run(tmp_path / "gguf", models.tiny_gguf(tmp_path / "m.gguf"), task="sums")
    for which, arguments, message in (
        (run, ("--to", "gguf", "--type", "same"), "has no GGUF types of its own"),
        (run, ("--to", "safetensors", "--type", "Q8_0"), "there are: BF16, F16, F32, NF4"),
        (gguf, ("--to", "safetensors", "--type", "NF4"), "needs a run on a Hugging Face folder"),
    ):
        code, document, err = command(capsys, "export", which, *arguments, "--out", tmp_path / "out")
        assert code == 2 and document is None and message in err, err
    assert not (tmp_path / "out").exists()


def test_safetensors_need_nothing_that_llama_cpp_lacks(run: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    odd = {**hf_tokenizers.byte_bpe(), "pre_tokenizer": {"type": "Whitespace"}}
    hf_tokenizers.write(folder, odd)
    other = hf_run(tmp_path / "run", folder)
    for type_name in ("BF16", "NF4"):
        made = export.export(other, "safetensors", tmp_path / type_name, type_name=type_name)
        assert (tmp_path / type_name / "tokenizer.json").is_file() and made["rescored"] is None
    assert any("NF4 is re-rounded, and was not scored again" in note for note in made["notes"])
    with pytest.raises(ExportError, match="splits text in a way that is not known here"):
        export.export(other, "gguf", tmp_path / "out")


def test_a_path_with_spaces_and_a_full_disk(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # cases 14 and 15
    out = tmp_path / "ein Ordner" / "große Ausgabe 日本"
    for to in ("gguf", "safetensors"):
        code, document, _ = command(capsys, "export", run, "--to", to, "--out", out, "--verify")
        assert code == 0 and document["verify"]["ok"]
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    class Usage:
        free = 70_000

    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda _: Usage)
    for to, type_name in (("gguf", "F32"), ("gguf", "Q4_K_M"), ("safetensors", "BF16"), ("safetensors", "NF4")):
        with pytest.raises(WillNotFit, match="are free"):
            export.export(run, to, out, type_name=type_name, force=True)
        with pytest.raises(WillNotFit, match="are free"):
            export.export(run, to, tmp_path / "new", type_name=type_name)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert os.listdir(tmp_path) == ["ein Ordner"]


# ---- eval
def test_eval_compares_the_four_bit_base_with_the_tuned_model(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # cases 16 and 34
    opened: list[bool] = []
    init = LlamaCppEngine.__init__

    def watched(self: LlamaCppEngine, path: Path, **options: Any) -> None:
        opened.append(bool(options.get("plain")))
        if path.name == "base.gguf":
            with merge.open_run(run) as made, GgufFile(path) as file:
                raw = np.array(file.raw("blk.0.ffn_up.weight")).view("<f2").reshape(256, 128)
                want = made.base.rows("model.layers.0.mlp.up_proj.weight")  # type: ignore[union-attr]
                assert np.abs(raw - want).max() <= 2**-11 * np.abs(want).max()
        init(self, path, **options)

    monkeypatch.setattr(LlamaCppEngine, "__init__", watched)
    monkeypatch.setitem(sys.modules, "torch", None)
    before = sorted(os.listdir(run))
    code, result, err = command(capsys, "eval", run, "--rows", "12")
    assert code == 0 and opened == [True, True] and sorted(os.listdir(run)) == before and "plain llama.cpp" in err
    d = result["difference"]
    assert result["rows"] == 12 and d["mean"] == pytest.approx(result["tuned"] - result["base"])
    assert result["loglik"]["tuned"] != result["loglik"]["base"] < 0
    assert result["own_engine"] is None and result["agreement"]["ok"] is None
    assert any("likelihood" in line for line in evaluate.lines(result))


def test_memory_is_that_of_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    folder = hf_models.tiny_hf(tmp_path / "m", "llama", hidden=256, layers=6, intermediate_size=2048)
    run = hf_run(tmp_path / "run", folder, generations=1)
    monkeypatch.setattr(merge, "_PIECE", 1 << 16)
    for to, type_name in (("gguf", "Q8_0"), ("safetensors", "BF16"), ("safetensors", "NF4")):
        monkeypatch.setattr(export._Export, "rescore", lambda *_: None)
        monkeypatch.setattr(export._Export, "moments", lambda *_: None)
        tracemalloc.start()
        try:
            export.export(run, to, tmp_path / to / type_name, type_name=type_name)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # buffers of 4 MB for writing and hashing, and a tensor of 2 MB in float32 a few times; the model has 48 MB
        assert peak < 16e6, (to, type_name, peak)
