"""Reading refuses damage by name and byte; writing keeps everything of the base and never leaves a half file."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import models
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from edgees import gguf_file
from edgees.errors import ExportError, ModelError, WillNotFit
from edgees.gguf_file import GgufFile, file_sha256, pack_kv, write_like


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", quant="Q4_1")


def damaged(tiny: Path, tmp_path: Path, old: bytes, new: bytes, count: int = 1) -> Path:
    data = tiny.read_bytes()
    assert old in data
    path = tmp_path / "bad.gguf"
    path.write_bytes(data.replace(old, new, count))
    return path


def test_agrees_with_the_gguf_package(tiny: Path) -> None:
    ours, theirs = GgufFile(tiny), gguf.GGUFReader(tiny)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert (mine.offset, mine.nbytes, mine.type_name) == (t.data_offset, t.n_bytes, t.tensor_type.name)
        assert mine.dims == tuple(t.shape)
        assert np.array_equal(ours.raw(t.name), t.data.view(np.uint8).ravel())
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert ours.arch == "llama" and ours.get("block_count") == 2 and ours.tied
    assert ours.tensors["blk.0.attn_k.weight"].shape == (32, 64)
    assert ours.tensors["output_norm.weight"].vector and ours.tensors["output_norm.weight"].shape == (1, 64)
    assert np.array_equal(ours.raw("blk.0.attn_k.weight", 3, 2), ours.raw("blk.0.attn_k.weight")[3 * 40 : 5 * 40])
    with pytest.raises(ValueError, match="read-only"):
        ours.raw("blk.0.attn_k.weight")[0] = 1
    assert ours.sha256() == file_sha256(tiny) and ours.sha256().startswith("sha256:")


def test_every_cut_is_refused_with_the_real_size(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    start = GgufFile(tiny).data_offset
    for n in [0, 3, 23, 24, 30, 200, 1500, start - 40, start, start + 1000, len(data) - 40]:
        cut.write_bytes(data[:n])
        with pytest.raises(ModelError, match=str(n)):
            GgufFile(cut)


def test_damage_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(damaged(tiny, tmp_path, b"GGUF", b"GGML"))
    with pytest.raises(ModelError, match="version 1"):
        GgufFile(damaged(tiny, tmp_path, b"GGUF\x03", b"GGUF\x01"))
    with pytest.raises(ModelError, match="big-endian"):
        GgufFile(damaged(tiny, tmp_path, b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03"))
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_k\.weight' occurs twice"):
        GgufFile(damaged(tiny, tmp_path, b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(ModelError, match=r"key 'tokenizer\.ggml\.eos_token_id' occurs twice"):
        GgufFile(damaged(tiny, tmp_path, b"ggml.bos_token_id", b"ggml.eos_token_id"))
    data = bytearray(tiny.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight")
    kind_at, offset_at = at + 4 + 16, at + 4 + 16 + 4
    for position, value, code, message in (
        (at, 9, "<I", "9 dimensions"),
        (at + 4, 0, "<Q", "empty dimension"),
        (at + 4, 65, "<Q", "65 columns are not a multiple"),
        (kind_at, 999, "<I", "unknown type number 999"),
        (offset_at, 8, "<Q", "not a multiple of 32"),
        (offset_at, 1 << 40, "<Q", "truncated: tensor 'blk.1.ffn_up.weight'"),
        (offset_at, 0, "<Q", "overlap"),
        (8, 1 << 60, "<Q", "cannot fit"),
    ):
        changed = data.copy()
        struct.pack_into(code, changed, position, value)
        path = tmp_path / "bad.gguf"
        path.write_bytes(changed)
        with pytest.raises(ModelError, match=message):
            GgufFile(path)
    with pytest.raises(ModelError, match="folder"):
        GgufFile(tmp_path)
    with pytest.raises(ModelError, match="cannot read"):
        GgufFile(tmp_path / "none.gguf")


def test_split_files_are_refused(tiny: Path, tmp_path: Path) -> None:
    part = tmp_path / "model-00001-of-00003.gguf"
    part.write_bytes(tiny.read_bytes())
    with pytest.raises(ModelError, match="split") as caught:
        GgufFile(part)
    assert "merge" in (caught.value.hint or "")
    marked = models.tiny_gguf(tmp_path / "marked.gguf", metadata={"split.count": 2})
    with pytest.raises(ModelError, match="split"):
        GgufFile(marked)


@pytest.mark.parametrize(
    "quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
)
def test_one_nan_is_found(quant: str, tmp_path: Path) -> None:  # case 8
    path = models.tiny_gguf(tmp_path / "m.gguf", n_layer=1, n_embd=256, quant=quant)
    base = GgufFile(path)
    assert [name for name in base.tensors if base.first_bad(name) is not None] == []
    t = base.tensors["blk.0.attn_v.weight"]
    assert t.type_name == quant
    block, size = gguf_file.type_sizes(quant)
    blocks = t.nbytes // size
    scales = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(quant, [0])
    bad = {"F32": b"\0\0\x80\x7f", "BF16": b"\xc0\x7f"}.get(quant, b"\0\xfc")
    for scale in scales:
        data = bytearray(path.read_bytes())
        at = t.offset + (blocks - 2) * size + scale
        data[at : at + len(bad)] = bad
        (tmp_path / "nan.gguf").write_bytes(data)
        assert GgufFile(tmp_path / "nan.gguf").first_bad(t.name) == (blocks - 2) * block


def test_write_like_keeps_all_and_replaces_one(tiny: Path, tmp_path: Path) -> None:
    base = GgufFile(tiny)
    name = "blk.1.ffn_down.weight"
    rows, cols = base.tensors[name].shape
    new = np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)

    def produce() -> Iterator[np.ndarray]:
        yield new[:7]
        yield new[7:]

    target = tmp_path / "päth with späces ünd 日本.gguf"  # case 14
    changes = {"general.file_type": 1, "edgees.base": "abc", "tokenizer.ggml.padding_token_id": None}
    write_like(base, target, {name: ("F32", produce)}, metadata=changes)
    out = GgufFile(target)
    expected = {**base.metadata, "general.file_type": 1, "edgees.base": "abc"}
    del expected["tokenizer.ggml.padding_token_id"]
    assert out.metadata == expected and list(out.metadata) == list(expected)
    assert list(out.tensors) == list(base.tensors)
    assert np.array_equal(out.raw(name).view("<f4").reshape(rows, cols), new)
    for other in base.tensors:
        if other != name:
            assert np.array_equal(out.raw(other), base.raw(other)), other
    theirs = gguf.GGUFReader(target)  # an independent reader agrees
    assert {t.name: t.tensor_type for t in theirs.tensors}[name] == GGMLQuantizationType.F32
    assert os.listdir(tmp_path) == [target.name]
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask


def test_an_unchanged_copy_is_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    write_like(GgufFile(tiny), tmp_path / "copy.gguf", {})
    assert (tmp_path / "copy.gguf").read_bytes() == tiny.read_bytes()


def test_a_failure_leaves_the_old_file_and_nothing_else(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # case 15
    base = GgufFile(tiny)
    target = tmp_path / "out.gguf"
    target.write_bytes(b"precious")
    name = "blk.0.attn_q.weight"

    def too_few() -> Iterator[bytes]:
        yield b"12345"

    def broken() -> Iterator[bytes]:
        yield b"1"
        raise OSError(28, "No space left on device")

    with pytest.raises(ExportError, match="gave 5 bytes instead of 2560"):
        write_like(base, target, {name: ("Q4_1", too_few)})
    with pytest.raises(WillNotFit, match="No space left"):
        write_like(base, target, {name: ("Q4_1", broken)})
    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda _: _Usage(1000))
    with pytest.raises(WillNotFit, match=rf"{tiny.stat().st_size} bytes are needed on its disk, 1000 are free"):
        write_like(base, target, {})
    monkeypatch.undo()
    with pytest.raises(ExportError, match="no tensor 'nope'"):
        write_like(base, target, {"nope": ("Q4_1", too_few)})
    with pytest.raises(ExportError, match="cannot write"):
        write_like(base, tmp_path / "no" / "folder" / "x.gguf", {})
    assert target.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["out.gguf"]


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_packed_values_come_back(tiny: Path, tmp_path: Path) -> None:
    pairs = [
        pack_kv("a", "é"), pack_kv("b", 7), pack_kv("c", 0.5), pack_kv("d", True), pack_kv("e", ["x", "yz"])
    ]  # fmt: skip
    out = GgufFile(gguf_file.write_all(tmp_path / "kv.gguf", pairs, []))
    assert out.metadata == {"a": "é", "b": 7, "c": 0.5, "d": True, "e": ["x", "yz"]}
