"""Exports load elsewhere and say the same; what goes wrong is named, and leaves nothing behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from runs import make_run
from safetensors.numpy import load_file

from edgees import cli, export, gguf_file, hf_layout, merge, noise, recommend
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.context import HEADING, Context
from edgees.errors import ExportError, UsageError, WillNotFit
from edgees.gguf_file import GgufFile
from edgees.history import History, with_header
from edgees.merge import Effective
from edgees.template import ChatTemplate

HELLO = [{"role": "user", "content": "Please turn on two lamps,\n  at half past nine! 12345 é"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return models.tiny_gguf(folder / "m.gguf", "llama", quant="Q4_1")


@pytest.fixture(scope="module")
def run(folder: Path, model: Path) -> Path:
    return make_run(folder / "full", model, task="sums")


@pytest.fixture(scope="module")
def adapter(folder: Path, model: Path) -> Path:
    return make_run(folder / "adapter", model, "adapter", params="proj", task="sums")


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    """(exit code, JSON document or None, standard error) of ``edgees ARGUMENTS --json``."""
    code = cli.run([*(str(a) for a in arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


# ---- GGUF
def test_gguf_as_a_script_sees_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # case 14
    out = tmp_path / "ein Ordner" / "große Ausgabe 日本"
    code, document, _ = command(capsys, "export", run, "--to", "gguf", "--out", out, "--verify")
    assert code == 0 and document["type"] == "Q8_0" and document["weights"] == "best"
    (entry,) = document["files"]
    data = Path(entry["path"]).read_bytes()
    assert os.listdir(out) == [Path(entry["path"]).name]
    assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    checked = document["verify"]
    assert checked["ok"] and checked["failed"] == [] and checked["kl"]["mean"] < checked["kl"]["bound"]
    assert all(checked[name] for name in ("keys", "tensors", "types", "tied_head", "name", "tokens", "kl"))
    assert document["base"]["sha256"] == GgufFile(run.parent / "m.gguf").sha256().removeprefix("sha256:")  # case 5
    # an existing file is safe, unless --force
    before = data
    code, document, err = command(capsys, "export", run, "--to", "gguf", "--out", out, "--last")
    assert (code, document) == (2, None) and "exists already" in err and "--force" in err
    assert Path(entry["path"]).read_bytes() == before
    code, document, _ = command(capsys, "export", run, "--to", "gguf", "--out", out, "--last", "--force")
    assert code == 0 and document["weights"] == "last"


def test_a_file_name_may_be_given_and_types_are_spelt_freely(run: Path, tmp_path: Path) -> None:
    made = export.export(run, "gguf", tmp_path / "mine.gguf", type_name="bf16", verify=True)
    assert os.listdir(tmp_path) == ["mine.gguf"] and made["type"] == "BF16" and made["verify"]["ok"]


def test_last_and_best_are_told_apart(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", model, generations=1)
    other = make_run(tmp_path / "other", model, generations=3)
    for name in ("delta.safetensors", "delta.safetensors.state.json"):
        (run / name).write_bytes((other / name).read_bytes())
    best = export.export(run, "gguf", tmp_path / "best.gguf", type_name="F32")
    last = export.export(run, "gguf", tmp_path / "last.gguf", type_name="F32", weights="last")
    assert (best["generation"], last["generation"]) == (1, 3)
    assert best["files"][0]["sha256"] != last["files"][0]["sha256"]


def test_a_rounded_type_is_scored_again_and_the_loss_is_said(run: Path, tmp_path: Path) -> None:
    made = export.export(run, "gguf", tmp_path, type_name="Q4_0", verify=True)
    assert made["rescored"]["rows"] > 0 and made["rescored"]["loglik"]["difference"]["mean"] is not None
    assert any("held-out reward" in note and "Q4_0 is re-rounded" in note for note in made["notes"])
    assert made["verify"]["ok"] and made["verify"]["kl"]["bound"] is None and made["verify"]["kl"]["mean"] > 0
    assert "Q4_0" in made["files"][0]["path"]
    lines = export.lines(made)
    assert any("not bounded" in line for line in lines)


def test_care_in_rounding_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.tiny_gguf(tmp_path / "m.gguf", n_embd=256, n_ff=256, quant="Q8_0")
    run = make_run(tmp_path / "run", path, task="sums")
    monkeypatch.setattr(export._Export, "rescore", lambda *_: None)
    monkeypatch.setattr(export, "CHATS", ("What is 3 plus 4?", "Add 7 and 2.", "1 + 5 ="))
    loss, files = [], []
    for care in (True, False):
        if not care:
            monkeypatch.setattr(export._Export, "moments", lambda *_: None)
        made = export.export(run, "gguf", tmp_path / "out", type_name="Q4_1", verify=True, force=True)
        loss.append(made["verify"]["kl"]["mean"])
        files.append(export.export(run, "gguf", tmp_path / "k", type_name="Q4_K_M", force=True)["files"][0]["sha256"])
    assert loss[0] < 0.85 * loss[1], loss
    assert files[0] != files[1]  # llama.cpp's quantiser listens, too


def test_a_float_base_keeps_its_type_and_a_lattice_run_its_bits(tmp_path: Path) -> None:
    path = models.tiny_gguf(tmp_path / "f.gguf", quant="F16", embd="F16")
    made = export.export(make_run(tmp_path / "float", path), "gguf", tmp_path / "out")
    assert made["type"] == "F16"
    path = models.tiny_gguf(tmp_path / "q.gguf", quant="Q4_1")
    made = export.export(make_run(tmp_path / "lattice", path, "lattice"), "gguf", tmp_path / "out", verify=True)
    assert made["type"] == "same" and "Q4_1" in made["files"][0]["path"] and made["verify"]["ok"]


def test_verify_catches_what_is_not_the_scored_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Effective.rows
    monkeypatch.setattr(Effective, "rows", lambda self, name, row0=0, n=None: self.base_rows(name, row0, n))
    code, document, err = command(
        capsys, "export", run, "--to", "gguf", "--out", tmp_path / "base", "--type", "F32", "--verify"
    )
    assert code == 1 and document["verify"]["failed"] == ["kl"] and "not what was scored: kl" in err

    write = merge.write_gguf
    with monkeypatch.context() as patch:  # case 9: eight bits were asked for
        patch.setattr(
            merge, "write_gguf", lambda effective, path, _, moments, template: write(effective, path, "F16", moments)
        )
        patch.setattr(Effective, "rows", rows)
        made = export.export(run, "gguf", tmp_path / "wide", verify=True)
    assert made["type"] == "Q8_0" and made["verify"]["failed"] == ["types"]

    def transposed_heads(self: Effective, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        w = rows(self, name, row0, n)
        return w[::-1] if "attn_q" in name else w

    monkeypatch.setattr(Effective, "rows", transposed_heads)
    made = export.export(run, "safetensors", tmp_path / "hf", verify=True)
    assert made["verify"]["failed"] == ["kl"]
    with pytest.raises(ExportError, match="kl differ"):
        export.require_verified(made)


# ---- safetensors
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_safetensors_hold_the_scored_weights_in_hugging_face_order(arch: str, tmp_path: Path) -> None:
    path = models.tiny_gguf(tmp_path / "m.gguf", arch, tied=arch != "qwen3")
    run = make_run(tmp_path / "run", path)
    made = export.export(run, "safetensors", tmp_path / "hf", type_name="F32", verify=True)
    assert made["verify"]["ok"], made["verify"]
    names = {Path(f["path"]).name for f in made["files"]}
    assert names == set(os.listdir(tmp_path / "hf")) == {
        "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in weights) == (arch != "qwen3")  # case 6
    assert config["torch_dtype"] == "float32" and config["edgees"]["base"] == GgufFile(path).sha256()
    with merge.open_run(run) as opened:
        effective, base = Effective(opened.base, opened.delta), opened.base
        for name, t in base.tensors.items():
            want = effective.rows(name)
            got = weights[str(hf_layout.canonical(arch, name))]
            if t.vector:
                want = want[0] - (1 if arch.startswith("gemma") else 0)
            elif arch == "llama" and ("attn_q" in name or "attn_k" in name):
                # transformers' own way back: convert_llama_weights_to_hf.permute, as in modeling_gguf_pytorch_utils
                heads = base.get("attention.head_count") if "attn_q" in name else base.get("attention.head_count_kv")
                dim = want.shape[0] // heads // 2
                want = want.reshape(heads, dim, 2, want.shape[1]).swapaxes(2, 1).reshape(want.shape)
            assert np.array_equal(got, want), name


def test_shards_and_their_index(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = export.export(run, "safetensors", tmp_path / "hf")
    whole = (tmp_path / "hf" / "model.safetensors").read_bytes()
    monkeypatch.setattr(export, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(export.write_safetensors, "__defaults__", (100_000,))
    many = export.export(run, "safetensors", tmp_path / "hf", verify=True, force=True)
    assert many["verify"]["ok"] and len(many["files"]) > len(one["files"])
    assert not (tmp_path / "hf" / "model.safetensors").exists()  # it would be taken for part of the new one
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    sizes = {name: len(load(tmp_path / "hf" / name)) for name in set(index["weight_map"].values())}
    assert sum(sizes.values()) == len(index["weight_map"]) and all(
        (tmp_path / "hf" / name).stat().st_size < 110_000 for name in sizes
    )
    assert index["metadata"]["total_size"] == len(whole) - 8 - int.from_bytes(whole[:8], "little")


def load(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert isinstance(header, dict)
    return {k: v for k, v in header.items() if k != "__metadata__"}


def test_what_hugging_face_cannot_say_is_refused(tmp_path: Path) -> None:  # case 11
    for i, (keys, message) in enumerate(
        (
            ({"llama.rope.scaling.type": "mrope", "llama.rope.scaling.factor": 2.0}, "rope scaling 'mrope'"),
            ({"tokenizer.ggml.pre": "never-heard-of"}, "pre-tokenizer 'never-heard-of'"),
        )
    ):
        path = models.tiny_gguf(tmp_path / f"{i}.gguf")
        with GgufFile(path) as base:
            gguf_file.write_like(base, tmp_path / f"{i}b.gguf", {}, metadata=keys)
        with GgufFile(tmp_path / f"{i}b.gguf") as base, pytest.raises(ExportError, match=message):
            hf_layout.config(base, "bfloat16")
            hf_layout.tokenizer(base)
    for keys in (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ):
        with GgufFile(models.tiny_gguf(tmp_path / "s.gguf", metadata=keys)) as base:
            scaling = hf_layout.config(base, "bfloat16")["rope_scaling"]
            assert (scaling["rope_type"], scaling["type"], scaling["factor"]) == ("linear", "linear", 4.0)


def test_stop_tokens_and_bos_go_along(tmp_path: Path) -> None:  # cases 12 and 13
    path = models.tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 2})
    with GgufFile(path) as base:
        gguf_file.write_like(base, tmp_path / "e.gguf", {}, metadata={"tokenizer.ggml.eos_token_id": 0})
    run = make_run(tmp_path / "run", tmp_path / "e.gguf", generations=1)
    export.export(run, "safetensors", tmp_path / "hf")
    stops = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [0, 2]  # <|im_end|> ends a turn, though the EOS is another
    made = export.export(run, "gguf", tmp_path / "out.gguf", verify=True)
    assert made["verify"]["ok"]
    with LlamaCppEngine(tmp_path / "out.gguf", plain=True) as engine:
        assert {0, 2} <= engine.end_of_turn()
        assert engine.encode_chat(HELLO).count(1) == 2  # <|im_start|> twice, which is the BOS token here, none added


# ---- adapter
def test_an_adapter_is_exact_and_loads_in_llama_cpp(adapter: Path, model: Path, tmp_path: Path) -> None:
    made = export.export(adapter, "adapter", tmp_path, verify=True)
    assert made["verify"]["ok"] and made["verify"]["kl"]["mean"] < 0.01, made["verify"]
    gguf = next(tmp_path.glob("*-F32-LoRA.gguf"))
    peft, config = (
        load_file(tmp_path / "adapter_model.safetensors"),
        json.loads((tmp_path / "adapter_config.json").read_text()),
    )
    assert config["r"] == config["lora_alpha"] == 8
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    with merge.open_run(adapter) as opened, GgufFile(gguf) as file:
        assert file.metadata["adapter.lora.alpha"] == 8.0
        effective = Effective(opened.base, opened.delta)
        for info in opened.delta.spec.tensors:
            module = "base_model.model." + info.name.removesuffix(".weight")
            a, b = peft[f"{module}.lora_A.weight"], peft[f"{module}.lora_B.weight"]
            assert set(np.unique(a)) == {-1.0, 1.0}
            assert np.allclose(b @ a, opened.delta.rows(info.name, 0, info.rows), atol=1e-7)
            la, lb = (
                np.array(file.raw(f"{info.source}.lora_{x}"))
                .view("<f4")
                .reshape(file.tensors[f"{info.source}.lora_{x}"].shape)
                for x in "ab"
            )
            assert np.allclose(lb @ la, effective.delta_rows(info.source), atol=1e-7)
    tokens = [5, 91, 33, 260, 17, 7]
    with LlamaCppEngine(model, plain=True) as base, LlamaCppEngine(model, plain=True, lora=gguf) as tuned:
        assert np.abs(base.logits(tokens) - tuned.logits(tokens)).max() > 0.1


def test_an_untied_embedding_fits_an_adapter_and_a_tied_one_does_not(tmp_path: Path) -> None:
    path = models.tiny_gguf(tmp_path / "u.gguf", tied=False)
    run = make_run(tmp_path / "run", path, "adapter", params="embed|head|q_proj")
    made = export.export(run, "adapter", tmp_path / "out", verify=True)
    assert made["verify"]["ok"]
    peft = load_file(tmp_path / "out" / "adapter_model.safetensors")
    embedding = "base_model.model.model.embed_tokens.lora_embedding_"
    with merge.open_run(run) as opened:
        want = opened.delta.rows("model.embed_tokens.weight", 0, 448)
        assert np.allclose((peft[embedding + "B"] @ peft[embedding + "A"]).T, want, atol=1e-7)
        pool = noise.pool(7, opened.delta.spec.tensors[0].id, 64, 8)
        assert opened.delta.spec.tensors[0].source == "token_embd.weight" and np.array_equal(
            peft[embedding + "B"], pool
        )
    tied = models.tiny_gguf(tmp_path / "t.gguf")
    with pytest.raises(UsageError, match=r"embed_tokens\.weight, which is the embedding and the head at once"):
        export.export(make_run(tmp_path / "tied", tied, "adapter", params="embed"), "adapter", tmp_path / "no")
    with pytest.raises(UsageError, match=r"layernorm\.weight, which is a vector"):
        export.export(
            make_run(tmp_path / "norms", tied, "adapter", params="layernorm|proj"), "adapter", tmp_path / "no"
        )
    assert not (tmp_path / "no").exists()


# ---- what is refused
def test_requests_that_make_no_sense(
    run: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (("--to", "adapter"), "tuned with --scope full"),
        (("--to", "adapter", "--type", "F16"), "no --type to choose"),
        (("--to", "gguf", "--type", "Q3_Z"), "no type 'Q3_Z'"),
        (("--to", "safetensors", "--type", "Q8_0"), "there are: BF16, F16, F32"),
        (("--to", "onnx"), "onnx"),
    ):
        code, document, err = command(capsys, "export", run, *arguments, "--out", tmp_path / "out")
        assert code == 2 and document is None and message in err, err
    code, _, err = command(capsys, "export", adapter, "--to", "adapter", "--out", tmp_path / "x.gguf")
    assert code == 2 and "must be a folder" in err
    code, _, err = command(capsys, "export", tmp_path, "--to", "gguf", "--out", tmp_path / "out")
    assert code == 2 and "no run" in err
    (tmp_path / "file").write_text("x")
    code, _, err = command(capsys, "export", run, "--to", "gguf", "--out", tmp_path / "file")
    assert code == 1 and "cannot write into" in err
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_a_full_disk_is_exit_3_and_leaves_nothing(
    to: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # case 15
    class Usage:
        free = 70_000

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file.shutil, "disk_usage", lambda _: Usage)
        code, document, err = command(capsys, "export", run, "--to", to, "--out", tmp_path / "new" / "out")
    assert code == 3 and document is None and "are free" in err
    assert os.listdir(tmp_path) == []

    def full(x: np.ndarray, *_: object) -> np.ndarray:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr(merge, "to_float", full)
        patch.setattr(export, "to_float", full)
        code, _, err = command(capsys, "export", run, "--to", to, "--type", "F16", "--out", tmp_path / "out", "--force")
    assert code == 3 and "No space left" in err
    assert os.listdir(tmp_path / "out") == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "precious"


def test_ctrl_c_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # case 35
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export._Export, "verify", pressed)
    code, document, _ = command(capsys, "export", run, "--to", "safetensors", "--out", tmp_path / "out", "--verify")
    assert (code, document) == (130, None) and os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit there")
def test_a_disk_that_fills_while_writing(run: Path, tmp_path: Path) -> None:  # case 15
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(WillNotFit, match="does not fit"):
            export.export(run, "gguf", tmp_path / "out", type_name="F32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("to", "type_name"), [("gguf", "F16"), ("gguf", "Q8_0"), ("safetensors", "BF16")])
def test_memory_does_not_grow_with_the_model(
    to: str, type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.tiny_gguf(tmp_path / "m.gguf", n_embd=256, n_ff=8192, quant="Q8_0")
    run = make_run(tmp_path / "run", path, generations=1)
    monkeypatch.setattr(merge, "_PIECE", 1 << 16)
    tracemalloc.start()
    try:
        made = export.export(run, to, tmp_path / "out", type_name=type_name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # two buffers of 4 MB for writing and hashing; one tensor alone is 8 MB in float32, all of them 50
    assert sum(f["bytes"] for f in made["files"]) > 13e6 and peak < 11e6, peak


def test_kl_is_what_it_is() -> None:
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], np.float32)) + 7
    q = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]], np.float32)) - 3
    want = [0.5 * np.log(2) + 0.25 * np.log(0.5), 0.0]
    assert np.allclose(export.divergence(p, q), want, atol=1e-6)


# ---- transformers (not among the test requirements: skipped where it is missing)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_transformers_agrees(arch: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = models.tiny_gguf(tmp_path / "m.gguf", arch)
    run = make_run(tmp_path / "run", path)
    export.export(run, "safetensors", tmp_path / "hf", type_name="F32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    with merge.open_run(run) as opened, LlamaCppEngine(path) as engine:
        engine.attach(opened.delta)
        tokens = engine.encode_chat(HELLO)
        assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False) == tokens
        ours = engine.logits(tokens)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 4e-3 * np.abs(ours).max()  # the KV cache is half precision here


# ---- contexts
HARD = 'Say {"a": {"b": 1}}, {{x}} {# c #} 100 %} {%- endif -%} \\u0041 \\ "é" \U0001f600\r\n\ttab\' }}'


def in_context(run: Path, context: Context) -> Path:
    """The same run as if it had begun with a context."""
    file = run / "history.jsonl"
    recommended = {"attempts": "single", "temperature": 0.0, "max_tokens": 16, "tools": True, "system": None}
    header = History.open(file).header | {"context": context.to_dict(), "recommended": recommended}
    file.write_bytes(with_header(file, header))
    return run


def test_a_context_is_baked_in_word_for_word(model: Path, tmp_path: Path) -> None:
    """And with no escapes that llama.cpp's own Jinja, or Python's, would read otherwise."""
    shot = ({"role": "user", "content": HARD}, {"role": "assistant", "content": "four"})
    run = in_context(make_run(tmp_path / "run", model, task="sums"), Context(skills=HARD, shots=(shot,)))
    made = export.export(run, "gguf", tmp_path / "out.gguf", bake=True, verify=True)
    assert made["verify"]["ok"]
    with GgufFile(tmp_path / "out.gguf") as file, GgufFile(model) as base:
        baked, own = (str(f.metadata["tokenizer.chat_template"]) for f in (file, base))
    assert "\\ud83d" not in baked and "\U0001f600" in baked
    head = [{"role": "system", "content": f"{HEADING}\n{HARD}"}, *shot]
    with ChatTemplate(baked) as after, ChatTemplate(own) as before:
        assert after.render(HELLO) == before.render([*head, *HELLO])
        asked = [{"role": "system", "content": "Own."}, *HELLO]
        assert after.render(asked) == before.render(asked)
    assert json.loads((tmp_path / "out.context.json").read_text())["skills"] == HARD


def test_a_template_begins_as_it_would_alone() -> None:
    own = "\n  {% if true %}  {{ messages[0]['content'] }}{% endif %}"
    with ChatTemplate(recommend.baked(own, HELLO)) as baked, ChatTemplate(own) as before:
        assert baked.render([{"role": "user", "content": "x"}]) == before.render(HELLO)


def test_a_context_that_the_template_refuses_is_not_baked_in(tmp_path: Path) -> None:
    """Our engines put a system message before the question there; a template that refused every question is no use."""
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + models.CHATML
    path = models.tiny_gguf(tmp_path / "m.gguf", template=template)
    run = in_context(make_run(tmp_path / "run", path, task="sums"), Context(skills="- add"))
    with pytest.raises(UsageError, match="no system"):
        export.export(run, "gguf", tmp_path / "out", bake=True)
    assert not (tmp_path / "out").exists()
    assert export.export(run, "gguf", tmp_path / "out", verify=True)["verify"]["ok"]


@pytest.mark.parametrize("to", ["gguf", "safetensors", "adapter"])
def test_every_export_has_the_context_with_its_calls_of_tools(model: Path, tmp_path: Path, to: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": HARD}}}
    shot = (
        {"role": "user", "content": HARD}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": HARD}, {"role": "assistant", "content": "done"},
    )  # fmt: skip
    context = Context(system='"""' + HARD, skills=HARD, shots=(shot,))
    run = in_context(make_run(tmp_path / "run", model, "adapter", params="proj", task="sums"), context)
    made = export.export(run, to, tmp_path / "out")
    [file] = [Path(f["path"]) for f in made["files"] if f["path"].endswith("context.json")]
    assert Context.from_dict(json.loads(file.read_text()), "") == context
    with pytest.raises(UsageError):
        export.export(run, to, tmp_path / "baked", bake=True)
    assert not (tmp_path / "baked").exists()
