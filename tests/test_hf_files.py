"""Model folders: what is read equals transformers' own tensors; what is damaged or unsafe is refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import hf_models
import models
import numpy as np
import pytest

from edgees import model_path, nf4
from edgees.errors import MissingExtra, ModelError, UsageError
from edgees.hf_files import HfFolder, normal_rope

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of bfloat16 in one file; do not change it."""
    return hf_models.tiny_hf(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> Path:
    """Change keys of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (path / "config.json").write_text(text)
    return path


def parameters(arch: str, dtype: str = "bfloat16", **more: Any) -> dict[str, np.ndarray]:
    """What :func:`hf_models.tiny_hf` wrote, as float32."""
    model = hf_models.tiny_model(arch, **more).to(getattr(torch, dtype))
    return {name: x.detach().float().numpy() for name, x in model.named_parameters()}


# ---- what is read
@pytest.mark.parametrize("arch", hf_models.ARCHS)
@pytest.mark.parametrize(("tied", "more"), [(True, {}), (False, {"attention_bias": True, "mlp_bias": True})])
def test_every_architecture_is_read_as_transformers_has_it(
    tmp_path: Path, arch: str, tied: bool, more: dict[str, Any]
) -> None:
    if arch in ("mistral", "phi3", "qwen2"):
        more = {}  # no such keys there
    elif arch in ("gemma2", "gemma3_text", "olmo2", "qwen3"):
        more = {k: v for k, v in more.items() if k == "attention_bias"}
    path = hf_models.tiny_hf(tmp_path / arch, arch, tied=tied, hidden=128, **more)
    wanted = parameters(arch, tied=tied, hidden=128, **more)
    with HfFolder(path) as folder:
        assert folder.arch == arch and folder.tied == tied and folder.notes == []
        assert list(folder.tensors) == sorted(wanted)
        for name, x in wanted.items():
            t = folder.tensors[name]
            assert t.dims == x.shape and t.dtype == "BF16" and not t.quantised and t.vector == (x.ndim == 1)
            assert t.shape == (x.shape if x.ndim == 2 else (1, len(x)))
            linear = name.startswith("model.layers.") and x.ndim == 2
            assert t.type_name == ("NF4" if linear else "BF16")
            if linear:
                x = nf4.quantise(x).dequantise()
            assert np.array_equal(folder.array(name), x), name
        assert (folder.template, folder.stop_ids) == (models.CHATML, [2])
        assert folder.special_ids == {"bos": 0, "eos": 2, "padding": 0}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_and_raw_are_the_same_weights(tmp_path: Path, dtype: str) -> None:
    path = hf_models.tiny_hf(tmp_path / "m", "qwen3", dtype=dtype)
    with HfFolder(path) as folder:
        short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
        name = "model.embed_tokens.weight"
        assert folder.tensors[name].type_name == short
        raw = folder.raw(name, 3, 5)
        if short == "BF16":
            x = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            x = raw.view("<f4" if short == "F32" else "<f2").astype(np.float32)
        assert np.array_equal(x, folder.rows(name, 3, 5)) and x.shape == (5, 64)
        assert np.array_equal(folder.array(name), parameters("qwen3", dtype)[name])
        name = "model.layers.1.mlp.down_proj.weight"
        q = folder.quantised(name)
        assert (q.kind, q.dtype) == ("nf4", dtype) and q.nested is not None
        assert np.array_equal(folder.raw(name, 7, 9), q.interleaved()[7:16])
        assert np.array_equal(folder.rows(name, 7, 9), q.dequantise()[7:16])
        with pytest.raises(IndexError, match=r"rows 60 to 65 of .*down_proj\.weight., which has 64"):
            folder.rows(name, 60, 5)
        with pytest.raises(ModelError, match=r"'model\.norm\.weight' is .*, not in 4 bits"):
            folder.quantised("model.norm.weight")


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("fp4", False)])
def test_a_4_bit_checkpoint_is_taken_as_it_is(tmp_path: Path, kind: str, nested: bool) -> None:  # cases 1 and 4
    path = hf_models.tiny_bnb(tmp_path / "m", "qwen2", kind=kind, nested=nested)
    wanted = parameters("qwen2")
    with HfFolder(path) as folder:
        assert list(folder.tensors) == sorted(wanted)
        for name, x in wanted.items():
            t = folder.tensors[name]
            if t.quantised:
                q = folder.quantised(name)
                assert t.type_name == kind.upper() and (q.nested is not None) == nested and q.dtype == "bfloat16"
                functional = pytest.importorskip("bitsandbytes.functional")
                packed, state = functional.quantize_4bit(
                    torch.from_numpy(x).bfloat16(), blocksize=64, quant_type=kind, compress_statistics=nested
                )
                state.dtype = torch.float32
                assert np.array_equal(folder.array(name), functional.dequantize_4bit(packed, state).numpy())
            else:
                assert t.type_name == "BF16" and np.array_equal(folder.array(name), x)
        assert sum(t.quantised for t in folder.tensors.values()) == 14
    # and the same again from what to_state writes
    other = Path(shutil.copytree(path, tmp_path / "again"))

    def repack(tensors: dict[str, Any]) -> None:
        with HfFolder(path) as folder:
            for name, t in folder.tensors.items():
                if t.quantised:
                    tensors.update(hf_models.packed_tensors(folder.quantised(name), name))

    hf_models.rewrite(other, repack)
    with HfFolder(path) as one, HfFolder(other) as two:
        assert all(np.array_equal(one.array(n), two.array(n)) for n in one.tensors)


def test_odd_columns_keep_a_wider_type_said_aloud(tmp_path: Path) -> None:  # cases 3 and 10
    path = hf_models.tiny_hf(tmp_path / "m", "llama", head_dim=18, intermediate_size=172)
    with HfFolder(path) as folder:
        down, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "up"))
        assert folder.tensors[down].type_name == "BF16" and folder.tensors[up].type_name == "NF4"
        assert len(folder.notes) == 1
        assert folder.notes[0].startswith(
            "4 tensor(s) kept wider, as BF16: their columns are not a multiple of 64 (model"
        )
        x = folder.array(down)
    packed = Path(shutil.copytree(path, tmp_path / "packed"))
    q = nf4.quantise(x, dtype="bfloat16")
    hf_models.rewrite(packed, lambda tensors: tensors.update(hf_models.packed_tensors(q, down)))
    with HfFolder(packed) as folder:
        assert folder.tensors[down].type_name == "F32" and folder.tensors[down].quantised
        assert folder.tensors[up].type_name == "BF16"  # a checkpoint that is packed already is taken as it is
        assert np.array_equal(folder.array(down), q.dequantise())
        assert np.array_equal(folder.raw(down, 1, 3).view(np.float32), q.dequantise(1, 3))


def test_the_hash_is_of_the_weights_alone(tmp_path: Path, tiny: Path) -> None:
    moved = Path(shutil.copytree(tiny, tmp_path / "där drüben"))  # case 14
    sharded = hf_models.tiny_hf(tmp_path / "sharded", shard="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    with HfFolder(tiny) as a, HfFolder(moved) as b, HfFolder(sharded) as c:
        assert a.sha256() == b.sha256() == c.sha256()
        assert a.sha256().startswith("sha256:") and len(a.sha256()) == 71
        assert all(np.array_equal(a.array(n), c.array(n)) for n in a.tensors)
        first = a.sha256()

    def one_bit(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = dtype, shape, bytes([data[0] ^ 1]) + data[1:]

    hf_models.rewrite(moved, one_bit)
    with HfFolder(moved) as folder:
        assert folder.sha256() != first


def test_what_was_read_stays_after_release_and_close(tiny: Path) -> None:
    folder = HfFolder(tiny)
    raw = folder.raw("model.embed_tokens.weight")
    before = raw.copy()
    folder.release()
    assert np.array_equal(raw, before)
    folder.close()
    assert np.array_equal(raw, before)


def test_templates_and_stops(copy: Path) -> None:
    settings = json.loads((copy / "tokenizer_config.json").read_text())

    def template(value: Any) -> str | None:
        (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": value}))
        with HfFolder(copy) as folder:
            return folder.template

    assert template("a") == "a" and template(None) is None
    assert template([{"name": "tools", "template": "b"}, {"name": "default", "template": "c"}]) == "c"
    with pytest.raises(ModelError, match="chat_template is no text"):
        template(7)
    template("from the tokenizer")
    (copy / "chat_template.jinja").write_text("{{ 'jinja<|im_start|>' }}")
    with HfFolder(copy) as folder:
        assert folder.template == "{{ 'jinja<|im_start|>' }}"
    # eos may be a list, and the template's end of turn stops even where no configuration says so (case 13)
    edit(copy, eos_token_id=[0, 5], pad_token_id=-1)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    (copy / "chat_template.jinja").write_text(models.CHATML)
    with HfFolder(copy) as folder:
        assert folder.stop_ids == [7, 0, 5, 2]
        assert folder.special_ids == {"bos": 0, "eos": 7}


# ---- tied heads (case 6)
def test_a_tied_head_that_differs_is_refused(copy: Path) -> None:
    def add_head(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    with HfFolder(copy) as folder:
        assert folder.tied and "lm_head.weight" not in folder.tensors
        plain = folder.sha256()
    hf_models.rewrite(copy, add_head)
    with HfFolder(copy) as folder:  # the same again: left out
        assert folder.tied and "lm_head.weight" not in folder.tensors and folder.sha256() == plain

    def change_head(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = dtype, shape, data[:-1] + bytes([data[-1] ^ 1])

    hf_models.rewrite(copy, change_head)
    with pytest.raises(ModelError, match=r"says tie_word_embeddings, but lm_head\.weight differs") as caught:
        HfFolder(copy)
    assert "tie_word_embeddings to false" in str(caught.value.hint)
    with HfFolder(edit(copy, tie_word_embeddings=False)) as folder:
        assert not folder.tied and "lm_head.weight" in folder.tensors and folder.sha256() != plain


def test_an_untied_model_without_its_head_is_refused(copy: Path) -> None:
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is missing") as caught:
        HfFolder(edit(copy, tie_word_embeddings=False))
    assert "tie_word_embeddings true" in str(caught.value.hint)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is missing"):  # Llama's class says untied
        HfFolder(edit(copy, tie_word_embeddings=None))


# ---- bad weights
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight"])
def test_one_nan_is_found(copy: Path, name: str) -> None:  # case 8
    def poison(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, data[:22] + b"\xc0\x7f" + data[24:]

    hf_models.rewrite(copy, poison)
    with HfFolder(copy) as folder:
        assert [(n, folder.first_bad(n)) for n in folder.tensors if folder.first_bad(n) is not None] == [(name, 11)]
        if folder.tensors[name].four_bit:
            with pytest.raises(ModelError, match=rf"model\.safetensors: {name}: the weight in row 0, column 11 is nan"):
                folder.raw(name)


def test_packed_codes_without_their_state_are_refused(tmp_path: Path) -> None:  # case 2
    path = hf_models.tiny_bnb(tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj.weight"

    def lose(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(f"{name}.")]:
            del tensors[key]

    hf_models.rewrite(path, lose)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name} holds packed 4-bit codes, but its quantisation"):
        HfFolder(path)


def test_a_4_bit_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = hf_models.tiny_bnb(tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj.weight"
    q = nf4.quantise(np.ones((16, 128), np.float32))
    hf_models.rewrite(path, lambda tensors: tensors.update(hf_models.packed_tensors(q, name)))
    with pytest.raises(ModelError, match=rf"'{name}' is \(16, 128\), config\.json wants \(32, 64\)"):
        HfFolder(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor 'model\.norm\.weight' is missing"),
        (lambda t: t.update(extra=("F32", [1], b"\0" * 4)), "'extra' is no part of a llama model"),
        (
            lambda t: t.update({"model.norm.weight": ("BF16", [32], b"\0" * 64)}),
            r"'model\.norm\.weight' is \(32,\), config\.json wants \(64,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": ("I32", [64], b"\0" * 256)}),
            r"'model\.norm\.weight' is I32; weights must be F32, F16, BF16 or packed",
        ),
        (
            lambda t: t.update({"model.norm.weight": ("I8", [64], b"\0" * 64)}),
            r"'model\.norm\.weight' holds 8-bit codes",
        ),
        (
            lambda t: t.update({"model.norm.weight": ("F4", [64], b"\0" * 32)}),
            r"'model\.norm\.weight' has unknown dtype 'F4'",
        ),
        (
            lambda t: t.update({"model.norm.weight": ("BF16", [63], b"\0" * 128)}),
            r"\[63\] of BF16 are not the 128 bytes",
        ),
        (lambda t: t.update({"model.norm.weight": ("BF16", [-64], b"")}), r"has shape \[-64\]"),
        (lambda t: t.update({"model.norm.weight": (["BF16"], [64], b"")}), r"unknown dtype \['BF16'\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy: Path, change: Any, message: str) -> None:
    hf_models.rewrite(copy, change)
    with pytest.raises(ModelError, match=message) as caught:
        HfFolder(copy)
    assert "copy" in caught.value.message  # the file or folder


def test_tensors_that_follow_from_the_configuration_are_passed_over(copy: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    hf_models.rewrite(copy, lambda tensors: tensors.update({name: ("F32", [8], b"\0" * 32)}))
    with HfFolder(copy) as folder:
        assert name not in folder.tensors


def test_every_cut_is_refused(tiny: Path, copy: Path) -> None:
    data = (tiny / "model.safetensors").read_bytes()
    header = int.from_bytes(data[:8], "little")
    for n in (0, 7, 8, 100, 8 + header - 1, 8 + header, 8 + header + 1000, len(data) - 1):
        (copy / "model.safetensors").write_bytes(data[:n])
        with pytest.raises(ModelError, match=r"model\.safetensors(: truncated| is empty)") as caught:
            HfFolder(copy)
        assert caught.value.hint == "download the file again"


def test_a_damaged_header_is_named(tiny: Path, copy: Path) -> None:
    data = (tiny / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    first, second = sorted((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])[:2]
    begin, end = header[second]["data_offsets"]

    def refused(text: str, message: str, tail: bytes = b"") -> None:
        raw = text.encode()
        (copy / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + body + tail)
        with pytest.raises(ModelError, match=message):
            HfFolder(copy)

    def moved(*offsets: int) -> str:
        return json.dumps(header | {second: header[second] | {"data_offsets": list(offsets)}})

    refused(moved(begin - 2, end - 2), "overlap")
    refused(moved(0, end - begin), "overlap")
    refused(moved(begin + 2, end + 2), "have a hole between them|overlap")
    refused(moved(len(body), len(body) + end - begin), f"truncated: tensor {second!r}")
    refused(moved(end, begin), "data offsets")
    refused(moved(-2, 2), "data offsets")
    refused(json.dumps(header), "4 bytes behind its last tensor belong to none", tail=b"1234")
    text = json.dumps(header)
    refused(text[:-1] + f", {json.dumps(first)}: {json.dumps(header[first])}}}", f"tensor {first!r} occurs twice")
    refused("[1]", "no JSON object")
    refused("{", "no JSON")
    refused("[" * 100_000, "no JSON")
    refused(json.dumps({first: {"dtype": "F32"}}), "is described by")
    (copy / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="is no safetensors file"):
        HfFolder(copy)


# ---- what would lead out of the folder, or run code
@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return hf_models.tiny_hf(tmp_path / "shards" / "model", shard="60KB")


def remap(path: Path, file: str, tensor: str = "model.norm.weight") -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"][tensor] = file
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", ""]
)
def test_an_index_that_leads_out_is_refused(sharded: Path, file: str) -> None:  # case 38
    for place in (sharded.parent / "x.safetensors", sharded / "..\\x.safetensors"):
        shutil.copy(next(sharded.glob("*.safetensors")), place)
    remap(sharded, file)
    with pytest.raises(ModelError, match=r"index\.json: '.*' leads out of the folder"):
        HfFolder(sharded)


def test_links_may_not_leave_the_model(sharded: Path, tmp_path: Path) -> None:  # case 38
    name = sorted(p.name for p in sharded.glob("*.safetensors"))[1]
    outside = tmp_path / "outside.safetensors"
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    with pytest.raises(ModelError, match=rf"{name} is a link that leads out of the folder, to {outside}"):
        HfFolder(sharded)
    (sharded / name).unlink()
    outside.rename(sharded / "inner.bytes")
    (sharded / name).symlink_to("inner.bytes")
    with HfFolder(sharded) as folder:  # a link within is fine
        assert folder.array("model.norm.weight").shape == (64,)
    (sharded / "config.json").rename(tmp_path / "config.json")
    (sharded / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json is a link that leads out of the folder"):
        HfFolder(sharded)


def test_a_snapshot_in_the_cache_links_to_its_blobs(tiny: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(tiny.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    with HfFolder(snapshot) as folder, HfFolder(tiny) as plain:
        assert folder.sha256() == plain.sha256() and folder.template == models.CHATML
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tiny / "model.safetensors")
    with pytest.raises(ModelError, match="leads out of the folder"):
        HfFolder(snapshot)


def test_an_index_that_does_not_fit_its_files_is_named(sharded: Path) -> None:
    files = sorted(p.name for p in sharded.glob("*.safetensors"))
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(f for f in files if f != index["model.norm.weight"])
    remap(sharded, other)
    with pytest.raises(
        ModelError, match=r"'model\.norm\.weight' (is here, but|of model\.safetensors\.index\.json is not)"
    ):
        HfFolder(sharded)
    remap(sharded, index["model.norm.weight"])
    remap(sharded, other, "nowhere.weight")
    with pytest.raises(ModelError, match=rf"{other}: tensor 'nowhere\.weight' of .* is not in it"):
        HfFolder(sharded)
    remap(sharded, "gone.safetensors", "nowhere.weight")
    with pytest.raises(ModelError, match=r"cannot read .*gone\.safetensors") as gone:
        HfFolder(sharded)
    assert "is the folder complete?" in str(gone.value.hint)
    remap(sharded, "weights.bin", "nowhere.weight")
    with pytest.raises(ModelError, match=r"'weights\.bin' is no safetensors file"):
        HfFolder(sharded)
    shutil.copy(sharded / other, sharded / "model.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=r"holds two models: model\.safetensors"):
        HfFolder(sharded)
    (sharded / "model.safetensors").unlink()
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ModelError, match="weight_map is no object"):
        HfFolder(sharded)


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_loaded(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # case 39
    monkeypatch.chdir(copy)
    torch.save({"model.norm.weight": _Bomb()}, copy / name)
    HfFolder(copy).close()  # beside safetensors: not looked at
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"only as pickles \\({name}\\), which can run any code"):
        HfFolder(copy)
    assert not (copy / "exploded").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_model_is_never_run(copy: Path, file: str) -> None:  # case 39
    (copy / "modeling_x.py").write_text("raise SystemExit('ran')\n")
    document = json.loads((copy / file).read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    (copy / file).write_text(json.dumps(document))
    with pytest.raises(ModelError, match=rf"{file} wants the model's own Python code \(auto_map\)") as caught:
        HfFolder(copy)
    assert "take auto_map out" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": "gemma3"}, "'gemma3' is a model for more than text"),
        ({"text_config": {}}, r"more than text \(text_config\)"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, r"'qwen3_moe' is a mixture of experts \(num_experts\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by gptq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes in 8 bits"),
        ({"hidden_size": None}, "hidden_size is None, not a positive whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers, but the weights are 20 tensors"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"num_hidden_layers": 3}, r"tensor 'model\.layers\.2\..*' is missing"),
        ({"num_hidden_layers": 1}, r"'model\.layers\.1\..*' is no part of a llama model"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight' is \(32, 64\), config\.json wants \(64, 64\)"),
    ],
)
def test_models_that_cannot_be_tuned_are_refused_by_name(copy: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        HfFolder(edit(copy, **changes))


def test_folders_that_are_no_model(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no folder"):
        HfFolder(copy / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        HfFolder(tmp_path / "empty")
    (copy / "config.json").write_text('{"model_type": "llama", "model_type": "qwen2"}')
    with pytest.raises(ModelError, match=r"config\.json: key 'model_type' occurs twice"):
        HfFolder(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is no JSON"):
        HfFolder(copy)
    shutil.copy(copy / "tokenizer_config.json", copy / "config.json")
    (copy / "model.safetensors").rename(copy / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="model_type None is not supported"):
        HfFolder(copy)
    (copy / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .* \(there is adapter_model\.safetensors\)"):
        HfFolder(copy)


# ---- rope (case 11)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 500000, "rope_parameters": {"type": "llama3", **LLAMA3, "factor": 8}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ],
)
def test_either_spelling_of_rope_scaling_is_the_same(config: dict[str, Any]) -> None:
    wanted = {"full_attention": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    assert normal_rope(config, 1e4, "c") == wanted


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_what_is_normal_is_what_transformers_reads(tmp_path: Path, kind: str, key: str) -> None:
    given: dict[str, Any] = {key: kind, "factor": 4.0}
    if kind == "llama3":
        given |= LLAMA3
    if kind in ("yarn", "longrope"):
        given["original_max_position_embeddings"] = 128
    if kind == "longrope":
        given |= {"short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3.5] * 4}
    path = hf_models.tiny_hf(tmp_path / "m", "llama", rope_scaling=given, rope_theta=5e4)
    written = json.loads((path / "config.json").read_text())
    with HfFolder(path) as folder:
        mine = folder.rope()["full_attention"]
    assert mine["rope_type"] == kind and mine["rope_theta"] == 5e4
    # the spelling of transformers 5, which wrote the file, and the older one
    old = {k: v for k, v in written.items() if k != "rope_parameters"}
    old |= {"rope_theta": 5e4, "rope_scaling": given}
    assert normal_rope(old, 1e4, "c")["full_attention"] == mine
    theirs = {k: v for k, v in written["rope_parameters"].items() if k != "type"}
    assert {k: v for k, v in theirs.items() if k in mine} == mine


def test_rope_where_nothing_is_said(tmp_path: Path) -> None:
    assert normal_rope({}, 1e6, "c") == {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    assert normal_rope({"rope_scaling": None, "rope_theta": 7.0}, 1e6, "c")["full_attention"]["rope_theta"] == 7
    both = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 1e4}}
    found = normal_rope({"rope_parameters": both, "rope_theta": 1e6}, 1e4, "c")
    assert found == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    gemma = {
        "model_type": "gemma3_text",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 1e4,
    }
    assert normal_rope(gemma, 1e6, "c") == found
    phi = {
        "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [2]},
        "original_max_position_embeddings": 4096,
    }
    assert normal_rope({**phi, "max_position_embeddings": 131072}, 1e4, "c")["full_attention"] == {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0],
        "original_max_position_embeddings": 4096,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "of type linear and yarn at once"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2}}, "type 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2}}, "is not supported"),
        ({"rope_parameters": {"full_attention": 1}}, "has 1 where an object belongs"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' without factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "alpha": 1}}, "no parameter 'alpha'"),
        ({"rope_scaling": {"factor": 2}}, "by 2 without a type"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1]}}, "'longrope' without short_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": 1, "short_factor": [1]}}, "long_factor is 1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', no object"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
            "contradict each other",
        ),
    ],
)
def test_rope_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^c: .*{message}"):
        normal_rope(config, 1e4, "c")


# ---- from a name to a folder
def test_a_folder_is_found_by_its_path(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_path.resolve_folder("copy") == copy.resolve()
    (copy / "x.gguf").write_bytes(b"GGUF")  # both: the engine says which is meant
    assert model_path.resolve_folder(str(copy)) == copy.resolve()
    (tmp_path / "empty").mkdir()
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "a.gguf").write_bytes(b"GGUF")
    for name, message, hint in (
        ("empty", "empty holds no model: neither a GGUF file nor config.json", "give a GGUF file"),
        ("shelf", "shelf holds GGUF files, but no Hugging Face model", "--engine llamacpp --model shelf/a.gguf"),
        ("shelf/a.gguf", "is a GGUF file, which the torch engine cannot read", "use --engine llamacpp"),
        ("copy/config.json", "is a file", "give the Hugging Face folder"),
        ("smollm2-135m", "is a GGUF model", "scripts/hf_from_gguf.py"),
        ("absent", "no model folder absent", "such as org/name"),
        ("a/b/c", "no model folder a/b/c", "such as org/name"),
        ("../absent", "no model folder", "such as org/name"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            model_path.resolve_folder(name)
        assert hint in str(caught.value.hint)


def cached(tiny: Path, cache: Path) -> Path:
    """``org/name`` in a cache as huggingface_hub lays it out, from a folder."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in tiny.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    return snapshot


def test_an_id_in_the_cache_needs_no_network(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    snapshot = cached(tiny, tmp_path)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = model_path.resolve_folder("org/name")
    assert found.resolve() == snapshot.resolve()
    with HfFolder(found) as folder:
        assert folder.arch == "llama"
    (snapshot / "model.safetensors").unlink()  # not whole: it must be fetched, which fails here
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("org/name", "org/other"):
        with pytest.raises(ModelError, match=f"cannot fetch {name} from Hugging Face|{name} has no safetensors"):
            model_path.resolve_folder(name)


def test_only_harmless_files_are_fetched(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        calls: list[dict[str, Any]] = []  # noqa: RUF012

        def snapshot_download(self, name: str, **more: Any) -> str:
            self.calls.append({"name": name, **more})
            if more.get("local_files_only"):
                raise FileNotFoundError("not cached")
            return str(cached(tiny, tmp_path))

    hub = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert (model_path.resolve_folder("org/name") / "config.json").is_file()
    assert [call.get("local_files_only", False) for call in hub.calls] == [True, False]
    utils = pytest.importorskip("huggingface_hub.utils")
    kept = utils.filter_repo_objects(
        ["a.safetensors", "a.json", "chat_template.jinja", "tokenizer.model", "pytorch_model.bin", "modeling.py",
         "original/x.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "x.pt", "README.md"],
        allow_patterns=hub.calls[1]["allow_patterns"], ignore_patterns=hub.calls[1]["ignore_patterns"],
    )  # fmt: skip
    assert list(kept) == ["a.safetensors", "a.json", "chat_template.jinja", "tokenizer.model"]


def test_an_id_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match="huggingface_hub is not installed"):
        model_path.resolve_folder("org/name")


# ---- scripts/hf_from_gguf.py
def script() -> Any:
    path = Path(__file__).resolve().parents[1] / "scripts" / "hf_from_gguf.py"
    spec = importlib.util.spec_from_file_location("hf_from_gguf", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decoded(path: Path) -> dict[str, np.ndarray]:
    """A llama GGUF's weights under Hugging Face's names, in its row order, by the ``gguf`` package."""
    reader = gguf.GGUFReader(path)
    back = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for i in range(2):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                     "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):  # fmt: skip
            name = f"model.layers.{i}.{part}"
            back[str(names.get_name(name))] = name
    out = {}
    for t in reader.tensors:
        x = gguf.quants.dequantize(t.data, t.tensor_type)
        for part, count in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
            if part in t.name:  # undo LlamaModel.permute of llama.cpp's conversion/llama.py
                heads = int(reader.fields[f"llama.attention.{count}"].contents())
                x = x.reshape(heads, len(x) // heads // 2, 2, -1).swapaxes(1, 2).reshape(x.shape)
        out[back[t.name.removesuffix(".weight")] + ".weight"] = x
    return out


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_gguf_becomes_a_folder_of_the_same_weights(tmp_path: Path, dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = models.tiny_gguf(tmp_path / "m.gguf", "llama", quant="Q4_1")
    out = tmp_path / "out folder"
    names = script().convert(str(path), out, dtype)
    assert sorted(names) == sorted(file.name for file in out.iterdir())
    wanted = decoded(path)
    with HfFolder(out) as folder:
        assert list(folder.tensors) == sorted(wanted)
        assert folder.tied and folder.template == models.CHATML and folder.special_ids["eos"] == 2
        for name, x in wanted.items():
            x = bfloat16(x) if dtype == "BF16" else x
            if folder.tensors[name].four_bit:
                x = nf4.quantise(x).dequantise()
            assert np.array_equal(folder.array(name), x), name
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    state = {name: x.numpy() for name, x in model.state_dict().items() if name != "lm_head.weight"}
    assert sorted(state) == sorted(wanted)
    if dtype == "F32":
        assert all(np.array_equal(state[name], x) for name, x in wanted.items())
        llamacpp = pytest.importorskip("edgees.backends.llamacpp")
        ids = [1, 40, 50, 60, 300, 17]
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0].numpy()
        with llamacpp.LlamaCppEngine(path) as engine:
            ours = engine.logits(ids)
        assert np.abs(ours - theirs).max() < 0.03 * np.abs(ours).max()  # inputs of products have 8 bits there
    with pytest.raises(UsageError, match="exists already"):
        script().convert(str(path), out, dtype)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return np.asarray(torch.from_numpy(x.copy()).bfloat16().float().numpy())
