"""Merged weights are what the engine multiplied with; what is rounded is rounded well; what cannot be is named."""

from __future__ import annotations

from pathlib import Path

import gguf
import models
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from runs import make_run

from edgees import blocks, gguf_file, merge, moments
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.errors import EdgeesError, ExportError, RunError, WillNotFit
from edgees.gguf_file import GgufFile
from edgees.merge import Effective


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_gguf(tmp_path_factory.mktemp("merge") / "m.gguf", "llama", quant="Q4_1")


@pytest.fixture(scope="module")
def run(model: Path) -> Path:
    return make_run(model.parent / "full", model)


def written(run: Path, out: Path, type_name: str) -> tuple[GgufFile, list[str]]:
    with merge.open_run(run) as opened:
        notes = merge.write_gguf(Effective(opened.base, opened.delta), out, type_name)
    return GgufFile(out), notes


def decoded(file: GgufFile, name: str) -> np.ndarray:
    t = file.tensors[name]
    return gguf.quants.dequantize(np.array(file.raw(name)).reshape(t.shape[0], -1), GGMLQuantizationType[t.type_name])


@pytest.mark.parametrize(
    ("arch", "scope", "options"),
    [
        ("llama", "full", {"bits": 4}),
        ("llama", "full", {"bits": 8, "sigma_abs": 0.01}),
        ("llama", "adapter", {"params": "."}),
        ("llama", "lattice", {}),
        ("qwen2", "full", {"bits": 2}),
        ("gemma3", "lattice", {}),
    ],
)
def test_merged_weights_are_those_the_engine_multiplies_with(
    arch: str, scope: str, options: dict[str, object], tmp_path: Path
) -> None:  # case 5
    path = models.tiny_gguf(tmp_path / "m.gguf", arch, types={"ffn_up": "F16"})
    with merge.open_run(make_run(tmp_path / "run", path, scope, **options)) as opened:  # type: ignore[arg-type]
        effective = Effective(opened.base, opened.delta)
        with LlamaCppEngine(path) as engine:
            engine.attach(opened.delta)
            for name, t in opened.base.tensors.items():
                whole = effective.rows(name)
                assert np.array_equal(whole, engine.effective(name)), name
                piecewise = [effective.rows(name, at, min(7, t.shape[0] - at)) for at in range(0, t.shape[0], 7)]
                assert np.array_equal(whole, np.concatenate(piecewise)), name
                assert np.abs(whole - effective.base_rows(name)).max() > 0, name  # every tensor was tuned


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0"])
def test_wide_types_hold_what_was_scored(type_name: str, run: Path, tmp_path: Path) -> None:  # cases 5 and 9
    file, notes = written(run, tmp_path / "out.gguf", type_name)
    assert notes == []
    with merge.open_run(run) as opened:
        effective, base = Effective(opened.base, opened.delta), opened.base
        for name, t in file.tensors.items():
            want, got = effective.rows(name), decoded(file, name)
            assert t.type_name == ("F32" if t.vector else type_name) and t.dims == base.tensors[name].dims
            if t.type_name == "Q8_0":
                step = np.abs(want.reshape(-1, 32)).max(1, keepdims=True) / 127
                assert (np.abs(want - got).reshape(-1, 32) <= step * 0.54).all()  # 0.5, and the scale is a half
            else:
                relative = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8}[t.type_name]
                assert (np.abs(want - got) <= np.abs(want) * relative + 2**-25 * (relative > 0)).all(), name
        assert file.tied
        changed = {"general.file_type", "general.quantization_version"}
        assert {k: v for k, v in base.metadata.items() if k not in changed}.items() <= file.metadata.items()
        assert list(base.metadata) == list(file.metadata)[: len(base.metadata)]
        assert file.metadata["edgees.base"] == base.sha256() and file.metadata["edgees.generation"] == 2
        assert file.metadata["general.file_type"] == gguf_file.FILE_TYPES[type_name]


def test_lattice_runs_keep_every_bit_in_the_bases_own_types(tmp_path: Path) -> None:
    path = models.tiny_gguf(tmp_path / "m.gguf", n_embd=256, n_ff=256, quant="Q4_K_M")
    run = make_run(tmp_path / "lattice", path, "lattice")
    file, notes = written(run, tmp_path / "out.gguf", "same")
    with merge.open_run(run) as opened:
        effective = Effective(opened.base, opened.delta)
        for name, t in file.tensors.items():
            assert t.type_name == opened.base.tensors[name].type_name
            assert np.array_equal(decoded(file, name), effective.rows(name)), name
    assert notes == []
    with pytest.raises(ExportError, match="cannot be rounded"):
        written(make_run(tmp_path / "full", path), tmp_path / "no.gguf", "same")
    assert not (tmp_path / "no.gguf").exists()


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([1.0, 1.00390625, 1.01171875, -3.1415927, 65504.0, 1e-40, 3.3e38], np.float32)
    wide = (merge.bf16(x).astype(np.uint32) << 16).view(np.float32)
    assert wide[:3].tolist() == [1.0, 1.0, 1.015625]  # ties go to the even neighbour
    assert (np.abs(wide - x) <= np.abs(x) * 2**-8 + 1e-40).all()


# ---- rounding to few bits
@pytest.mark.parametrize("type_name", list(merge.AFFINE))
def test_rounding_beats_ggufs_and_leaves_unmoved_blocks_alone(type_name: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((32, 128)) * 0.1).astype(np.float32)
    x[0, :32] = 0.0
    x[1, :32] = 0.25
    kind = GGMLQuantizationType[type_name]
    theirs = gguf.quants.quantize(x, kind)
    ours = merge.round_affine(x, type_name).reshape(theirs.shape)
    values = [gguf.quants.dequantize(raw, kind) for raw in (ours, theirs)]
    mine, reference = (float(((x - v) ** 2).mean()) for v in values)
    assert mine < 0.93 * reference
    assert np.array_equal(values[0][0, :32], np.zeros(32, np.float32))
    assert np.allclose(values[0][1, :32], 0.25, rtol=1e-2)
    again = merge.round_affine(values[1].astype(np.float32), type_name, start=theirs.reshape(-1))
    assert np.array_equal(gguf.quants.dequantize(again.reshape(theirs.shape), kind), values[1])
    with pytest.raises(ExportError, match="beyond half precision"):
        merge.round_affine(np.full((1, 32), 1e9, np.float32) * np.arange(-16, 16, dtype=np.float32), type_name)


def test_error_feedback_keeps_the_layers_output() -> None:
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((48, 128)) * 0.1).astype(np.float32)
    mix = rng.standard_normal((128, 128)) * np.geomspace(3, 0.05, 128)[:, None]
    inputs = (rng.standard_normal((2000, 128)) @ mix).astype(np.float32)
    moment = inputs.T @ inputs / len(inputs)
    kind = GGMLQuantizationType.Q4_1

    def loss(raw: np.ndarray) -> float:
        return float((((gguf.quants.dequantize(raw.reshape(48, -1), kind) - w) @ inputs.T) ** 2).mean())

    assert loss(merge.round_affine(w, "Q4_1", moment)) < 0.5 * loss(merge.round_affine(w, "Q4_1"))


def test_moments_are_those_of_the_layers_inputs(model: Path, run: Path) -> None:
    texts = [[5, 91, 33, 260, 17, 7], [8, 100, 9], [1, 2, 3]]
    with merge.open_run(run) as opened:
        effective = Effective(opened.base, opened.delta)
        names = [n for n, t in opened.base.tensors.items() if n.startswith("blk") and not t.vector]
        with LlamaCppEngine(model) as engine:
            engine.attach(opened.delta)
            found = moments.gather(engine, texts, names)
        assert set(found) == set(names)
        tokens = [token for text in texts for token in text[:-1]]  # the last one is only predicted
        x = effective.rows("token_embd.weight")[tokens]
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * effective.rows("blk.0.attn_norm.weight")
        assert np.allclose(found["blk.0.attn_q.weight"], x.T @ x / len(tokens), rtol=1e-3, atol=1e-4)
    for i in range(2):
        q, k, v, o, gate, up, down = (
            found[f"blk.{i}.{part}.weight"]
            for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        )
        assert q is k is v and gate is up and o is not q and up is not o and down.shape == (256, 256)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q4_0", "Q5_1", "Q4_K_M", "Q6_K"])
def test_asking_for_few_bits_gives_few_bits(type_name: str, tmp_path: Path) -> None:  # case 9
    path = models.tiny_gguf(tmp_path / "m.gguf", n_embd=256, n_ff=256, quant="Q8_0", tied=False)
    file, notes = written(make_run(tmp_path / "run", path), tmp_path / "out.gguf", type_name)
    types = {t.type_name for n, t in file.tensors.items() if n.startswith("blk") and not t.vector}
    assert types <= ({"Q4_K", "Q6_K"} if type_name == "Q4_K_M" else {type_name}), types
    assert notes == [] and not file.tied and set(file.tensors) == set(GgufFile(path).tensors)
    assert sorted(p.name for p in tmp_path.glob("*.gguf")) == ["m.gguf", "out.gguf"]
    assert not list(tmp_path.glob(".*"))


def test_odd_columns_keep_a_wider_type_and_it_is_said(tmp_path: Path) -> None:  # cases 3 and 10
    path = models.tiny_gguf(tmp_path / "m.gguf", n_embd=48, n_ff=96, quant="F16", embd="F16")
    run = make_run(tmp_path / "run", path)
    file, notes = written(run, tmp_path / "out.gguf", "Q8_0")
    assert (
        file.tensors["blk.0.ffn_up.weight"].type_name == "F16"
        and file.tensors["blk.0.ffn_down.weight"].type_name == "Q8_0"
    )
    (note,) = notes
    assert note.startswith("13 tensor(s) kept wider, as F16: 48 columns are not a multiple of 32, which Q8_0 needs")
    assert "blk.0.attn_q.weight" in note and "ffn_down" not in note
    small = models.tiny_gguf(tmp_path / "s.gguf", quant="Q4_1")
    file, notes = written(make_run(tmp_path / "small", small), tmp_path / "k.gguf", "Q4_K_M")
    assert any("64 columns are not a multiple of 256" in n for n in notes)


# ---- what is refused
def test_a_weight_beyond_f16_is_named(tmp_path: Path) -> None:  # case 7
    path = models.tiny_gguf(tmp_path / "m.gguf", quant="F32")
    file = GgufFile(path)
    t = file.tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    data[t.offset : t.offset + 4] = np.float32(70000).tobytes()
    path.write_bytes(data)
    run = make_run(tmp_path / "run", path, lr=1e-4)
    with pytest.raises(ExportError, match=r"blk\.1\.ffn_down\.weight.*beyond what F16") as caught:
        written(run, tmp_path / "out.gguf", "F16")
    assert "BF16" in (caught.value.hint or "") and not (tmp_path / "out.gguf").exists()
    file, _ = written(run, tmp_path / "out.gguf", "BF16")
    assert decoded(file, t.name).max() == pytest.approx(70000, rel=0.01)


def test_a_nan_in_an_untouched_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 8
    path = models.tiny_gguf(tmp_path / "m.gguf", quant="Q4_1")
    t = GgufFile(path).tensors["blk.0.ffn_norm.weight"]
    data = bytearray(path.read_bytes())
    data[t.offset + 4 : t.offset + 8] = np.float32(np.nan).tobytes()
    run = make_run(tmp_path / "run", path, params="self_attn")
    before = GgufFile(path).sha256()
    path.write_bytes(data)  # after tuning, and unnoticed
    monkeypatch.setattr(GgufFile, "sha256", lambda self: before)
    for type_name in ("F16", "Q4_1"):
        with pytest.raises(ExportError, match=r"blk\.0\.ffn_norm\.weight.*NaN"):
            written(run, tmp_path / "out.gguf", type_name)


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 15
    class Usage:
        free = 1000

    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda _: Usage)
    for type_name in ("F32", "Q4_K_M"):
        with pytest.raises(WillNotFit, match="1000 are free"):
            written(run, tmp_path / "out.gguf", type_name)
    assert list(tmp_path.iterdir()) == []


def test_runs_are_checked_on_opening(model: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run"):
        merge.open_run(tmp_path)
    with merge.open_run(run) as opened:
        assert opened.weights == "best" and opened.delta.path.parent.name == "best"
    with merge.open_run(run, "last") as opened:
        assert opened.weights == "last"
    copy = tmp_path / "m.gguf"
    copy.write_bytes(model.read_bytes())
    moved = make_run(tmp_path / "run", copy)
    (moved / "best" / "delta.safetensors").unlink()
    with merge.open_run(moved) as opened:
        assert opened.weights == "last"  # nothing better was found yet
    copy.write_bytes(model.read_bytes() + b"\0")
    with pytest.raises(RunError, match="is not the model"):
        merge.open_run(moved)
    copy.unlink()
    with pytest.raises(EdgeesError, match=r"m\.gguf"):
        merge.open_run(moved)


def test_file_names_follow_the_convention(tmp_path: Path) -> None:
    for i, keys in enumerate(
        (
            {},
            {"general.basename": "smollm2", "general.size_label": "135M", "general.finetune": "8k-lc100k-mix1-ep2"},
            {"general.basename": "Qwen 2.5", "general.size_label": "1.5B", "general.version": "v2.1"},
            {"general.basename": "Größe/x", "general.size_label": "big"},
        )
    ):
        with GgufFile(models.tiny_gguf(tmp_path / f"{i}.gguf", n_layer=1, metadata=keys)) as base:
            for name in (merge.gguf_name(base, "Q4_K_M"), merge.gguf_name(base, "F32", "LoRA")):
                assert merge.follows_convention(name), name
                assert "edgees" in name and ("-F32-LoRA." in name or "-Q4_K_M." in name)
    assert not merge.follows_convention("model.gguf")
    assert {t for t in blocks.TYPES if blocks.is_float(t)} == set(merge.FLOATS)
