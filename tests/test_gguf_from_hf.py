"""A Hugging Face folder written as GGUF is the same model to llama.cpp (logits, token ids, stops), or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models
import hf_tokenizers
import models
import numpy as np
import pytest
from hf_tokenizers import TEXTS, byte_bpe, sentencepiece_bpe

from edgees import gguf_from_hf, hf_layout, merge
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.errors import EdgeesError, ExportError
from edgees.gguf_file import GgufFile

pytest.importorskip("transformers")
pytest.importorskip("torch")

TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 448, 60)]


ODD: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "granite": {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.5,
    },
    "smollm3": {"layers": 4},
}  # fmt: skip
"""What makes an architecture differ from Llama; the seventh layer of a Gemma 3 is not its first global one."""


def tiny_hf(path: Path, arch: str, dtype: str = "float32", **options: Any) -> Path:
    more = {"tied": arch not in ("phi3", "mistral"), "pad_token_id": 2, **ODD.get(arch, {}), **options}
    folder = hf_models.tiny_hf(path, arch, dtype=dtype, **more)
    hf_tokenizers.write(folder, byte_bpe("qwen2" if arch.startswith("qwen") else "smollm"))
    return folder


def torch_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocabulary]: transformers' logits."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0].numpy())


def converted(folder: Path, type_name: str = "F32") -> Path:
    merge.convert(folder, folder / f"{type_name}.gguf", type_name)
    return folder / f"{type_name}.gguf"


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    with LlamaCppEngine(path, plain=True) as engine:
        engine.context_options |= {"type_k": 0, "type_v": 0}  # keys and values in float32
        return engine.logits(tokens)


def bound(folder: Path) -> float:
    """Largest difference of two logits whose standard deviation is about 0.6. ggml's GELU is a table of halves."""
    return 4e-3 if "gemma" in json.loads((folder / "config.json").read_text())["model_type"] else 1e-4


def agree(folder: Path) -> None:
    ours, theirs = logits(converted(folder), TOKENS), torch_logits(folder, TOKENS)
    assert theirs.std() > 0.3 and np.abs(ours - theirs).max() < bound(folder), np.abs(ours - theirs).max()


@pytest.mark.parametrize("kind", hf_models.ARCHS)
def test_llama_cpp_agrees_with_transformers(kind: str, tmp_path: Path) -> None:
    agree(tiny_hf(tmp_path / "m", kind))


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope", "long_factor": [1.0 + i / 3 for i in range(8)],
    "short_factor": [1.0 + i / 20 for i in range(8)], "original_max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize(
    ("kind", "scaling", "options"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}, {}),
        ("llama", LLAMA3, {}),
        ("qwen2", YARN, {}),
        ("llama", {**YARN, "factor": 2.0, "attention_factor": 1.3}, {}),
        ("phi3", LONG, {"original_max_position_embeddings": 256}),
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, {}),
    ],
)  # fmt: skip
def test_rope_scaling_survives_in_either_spelling(
    kind: str, scaling: dict[str, Any], options: dict[str, Any], spelling: str, tmp_path: Path
) -> None:  # case 11
    parameters: dict[str, Any] = {"rope_theta": 5e4, **scaling}
    if kind == "gemma3_text":
        parameters = {
            "full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
        }  # fmt: skip
    folder = tiny_hf(tmp_path / "m", kind, rope_parameters=parameters, **options)
    theirs = torch_logits(folder, TOKENS)
    document = json.loads((folder / "config.json").read_text())
    assert document["rope_parameters"]
    if spelling != "rope_parameters":  # transformers 4
        old = document.pop("rope_parameters")
        if kind == "gemma3_text":
            document["rope_local_base_freq"] = old["sliding_attention"]["rope_theta"]
            old = old["full_attention"]
        document["rope_theta"] = old.pop("rope_theta")
        if spelling == "type":
            old["type"] = old.pop("rope_type").replace("longrope", "su")
        document["rope_scaling"] = old
        (folder / "config.json").write_text(json.dumps(document))
    ours = logits(converted(folder), TOKENS)
    assert np.abs(ours - theirs).max() < bound(folder)
    del document["rope_scaling" if spelling != "rope_parameters" else "rope_parameters"]
    (folder / "config.json").write_text(json.dumps(document))
    assert np.abs(logits(converted(folder), TOKENS) - theirs).max() > 5 * bound(folder)  # and it matters


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' without factor"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16}}, "yarn scaling with .*beta_fast"),
        ("qwen2", {"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope'"),
        ("phi3", {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}}, "1 values in long_fac"),
        ("llama", {"partial_rotary_factor": 0.5}, "only 8 of 16 dimensions"),
        ("llama", {"hidden_act": "gelu"}, "activation is 'gelu'"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar is 99, not 16"),
        ("gemma2", {"attn_logit_softcapping": None}, "no attn_logit_softcapping"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "without rotation"),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_run_otherwise_is_refused(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tiny_hf(tmp_path / "m", kind)
    document = json.loads((folder / "config.json").read_text())
    document.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(EdgeesError, match=message):
        converted(folder)
    assert not list(folder.glob("*.gguf")) and not list(folder.glob(".*"))


def test_a_window_that_llama_cpp_lacks_is_said(tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path / "m", "mistral", sliding_window=40)
    (note,) = merge.convert(folder, tmp_path / "m.gguf", "F32")
    assert "window of 40 tokens" in note
    assert merge.convert(tiny_hf(tmp_path / "n", "qwen2", sliding_window=40), tmp_path / "n.gguf", "F32") == []


def test_gemmas_window_by_layer(tmp_path: Path) -> None:
    folder = tiny_hf(
        tmp_path / "m", "gemma3_text", layers=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    agree(folder)


def test_biases_follow_their_rows(tmp_path: Path) -> None:
    agree(tiny_hf(tmp_path / "m", "llama", attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize("type_name", ["F16", "BF16"])
def test_halves(type_name: str, tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path / "phi-3", "phi3", dtype="bfloat16")
    with GgufFile(converted(folder, type_name)) as file:
        kinds = {t.type_name for t in file.tensors.values() if not t.vector}
        assert kinds == {type_name} and not file.tied
        assert file.metadata["general.file_type"] == {"F16": 1, "BF16": 32}[type_name]
        w = models.dequantize(np.array(file.raw("output.weight")).reshape(448, -1), type_name)
    source = merge.SafeTensors(folder)
    assert np.allclose(w, source.rows("lm_head.weight", 0, 448), atol=1e-7 if type_name == "F16" else 0)


# ---- tokenizer
def their_ids(folder: Path, text: str) -> list[int]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf(tmp_path_factory.mktemp("tokenizer") / "llama", "llama", vocab_size=600)


def engine_for(llama: Path, folder: Path, data: dict[str, Any], **settings: Any) -> LlamaCppEngine:
    """Plain llama.cpp on the model with another tokenizer."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((llama / name).read_bytes())
    hf_tokenizers.write(folder, data, **settings)
    return LlamaCppEngine(converted(folder), plain=True)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "stablelm2", "gpt-4o", "tekken"])
def test_byte_level_token_ids_agree(pre: str, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with engine_for(llama, folder, byte_bpe(pre)) as engine:
        assert engine.file.metadata["tokenizer.ggml.pre"] == pre
        for text in TEXTS:
            assert engine._tokenize(text, special=True) == their_ids(folder, text), text


@pytest.mark.parametrize(("prefix", "metaspace"), [(True, False), (False, False), (True, True), (False, True)])
def test_sentencepiece_token_ids_agree(prefix: bool, metaspace: bool, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    data = sentencepiece_bpe(prefix, metaspace)
    with engine_for(llama, folder, data) as engine:
        m = engine.file.metadata
        assert m["tokenizer.ggml.model"] == "llama" and m["tokenizer.ggml.add_space_prefix"] is prefix
        assert m["tokenizer.ggml.add_bos_token"] is True
        for text in (*TEXTS, models.TEXT):
            # Metaspace puts no space in front of a space, llama.cpp does; and it puts none before nothing
            if text and not (metaspace and prefix and text.startswith((" ", "▁"))):
                assert engine._tokenize(text, special=True) == their_ids(folder, text), text
        assert len(their_ids(folder, models.TEXT)) < len(models.TEXT) / 2  # something was merged
        assert engine._tokenize("turn</s>it", special=True).count(2) == 1


def test_scores_come_from_tokenizer_model_where_it_is(llama: Path, tmp_path: Path) -> None:
    data = sentencepiece_bpe()
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)

    def field(number: int, wire: int, body: bytes) -> bytes:
        return bytes([number << 3 | wire]) + body

    def piece(i: int, token: str) -> bytes:
        text = token.encode()
        kind = 2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 5 if i == 300 else 1
        inner = field(1, 2, bytes([len(text)]) + text) + field(2, 5, np.float32(-i).tobytes())
        inner += field(3, 0, bytes([kind]))
        return field(1, 2, bytes([len(inner)]) + inner)

    folder = tmp_path / "m"
    folder.mkdir()
    trainer = field(2, 2, b"\x03\x18\x80\x40")  # another message, to be skipped
    (folder / "tokenizer.model").write_bytes(b"".join(piece(i, t) for i, t in enumerate(tokens)) + trainer)
    rules = data["model"]["merges"]
    data["model"]["merges"] = rules[1:] + rules[:1]  # no longer what scores could say
    with engine_for(llama, folder, data) as engine:
        assert engine.file.metadata["tokenizer.ggml.scores"][290:300] == [-float(i) for i in range(290, 300)]
        assert engine.file.metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
        assert engine.file.metadata["tokenizer.ggml.token_type"][300] == 5
    (folder / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff\xff\x0fnot protobuf")
    with pytest.raises(ExportError, match=r"tokenizer\.model is no sentencepiece model"):
        engine_for(llama, folder, data)


def test_tokenizers_that_llama_cpp_lacks_are_refused(llama: Path, tmp_path: Path) -> None:
    spm = sentencepiece_bpe()["model"]
    for i, (data, message) in enumerate(
        (
            ({**byte_bpe(), "pre_tokenizer": {"type": "Whitespace"}}, "splits text in a way that is not known here"),
            ({**byte_bpe(), "normalizer": {"type": "Lowercase"}}, "Lowercase"),
            ({**byte_bpe(), "model": {"type": "Unigram", "vocab": []}}, "'Unigram' cannot be written"),
            ({**byte_bpe(), "model": {**byte_bpe()["model"], "dropout": 0.1}}, "dropout = 0.1"),
            (byte_bpe("qwen2", ignore_merges=True), '"ignore_merges": true'),
            ({**sentencepiece_bpe(), "normalizer": None}, "spaces are not marked"),
            ({**sentencepiece_bpe(), "normalizer": {"type": "NFKC"}}, "NFKC"),
            ({**sentencepiece_bpe(), "model": {**spm, "merges": spm["merges"][:-1]}}, "are not merged though"),
            ({**sentencepiece_bpe(), "model": {**spm, "merges": shuffled(spm["merges"])}}, "do not stand together"),
        )
    ):
        with pytest.raises(ExportError, match=message):
            engine_for(llama, tmp_path / str(i), data)
    (tmp_path / "0" / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"tokenizer\.json is missing"):
        converted(tmp_path / "0")
    too_many = tiny_hf(tmp_path / "few", "llama", vocab_size=400)
    with pytest.raises(ExportError, match="448 tokens, the embedding 400 rows"):
        converted(too_many)


def shuffled(merges: list[list[str]]) -> list[list[str]]:
    """The second rule of some piece put to the end."""
    seen: set[str] = set()
    at = next(i for i, (a, b) in enumerate(merges) if a + b in seen or seen.add(a + b))  # type: ignore[func-returns-value]
    return [*merges[:at], *merges[at + 1 :], merges[at]]


def test_stops_bos_and_template(llama: Path, tmp_path: Path) -> None:  # cases 12 and 13
    folder = tmp_path / "m"
    data = sentencepiece_bpe()
    data["added_tokens"] += hf_tokenizers.added([(len(data["model"]["vocab"]), "<end_of_it>")])
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, data["added_tokens"][-1]["id"]]}))
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<end_of_it>{% endfor %}"
    with engine_for(llama, folder, data, template=template) as engine:
        tokens = engine.encode_chat([{"role": "user", "content": "Turn it on"}])
        assert tokens.count(1) == 1 and tokens[0] == 1  # BOS in the template and add_bos set
        assert {2, data["added_tokens"][-1]["id"]} <= engine.end_of_turn()
        assert engine.file.metadata["tokenizer.ggml.eot_token_id"] == data["added_tokens"][-1]["id"]
        assert engine.file.metadata["tokenizer.chat_template"] == template
        tokens = engine.file.metadata["tokenizer.ggml.tokens"]
        assert tokens[599] == "[PAD599]" and engine.file.metadata["tokenizer.ggml.token_type"][599] == 5
    with engine_for(llama, tmp_path / "n", sentencepiece_bpe(), add_bos_token=False, template=template) as engine:
        assert engine.file.metadata["tokenizer.ggml.add_bos_token"] is False
        assert engine.encode_chat([{"role": "user", "content": "on"}]).count(1) == 1


def test_phi_3_keeps_its_rule_for_space_behind_special_tokens(llama: Path, tmp_path: Path) -> None:
    data = sentencepiece_bpe()
    size = len(data["model"]["vocab"])
    data["added_tokens"] += hf_tokenizers.added([(size, "<|endoftext|>"), (size + 1, "<|user|>")])
    for t in data["added_tokens"]:
        t["rstrip"] = t["content"] in ("</s>", "<|user|>")
    with engine_for(llama, tmp_path / "m", data) as engine:
        assert "phi-3" in engine.file.metadata["general.name"]
        for text in ("<|user|>\nTurn it on</s>  now", "<|user|> x"):
            assert engine._tokenize(text, special=True) == their_ids(tmp_path / "m", text)
    with engine_for(llama, tmp_path / "Phi-3-mini", sentencepiece_bpe()) as engine:
        assert engine.file.metadata["general.name"] == "phi-mini"


# ---- there and back
def test_the_embedded_model_comes_back(smollm2: Path, tmp_path: Path) -> None:
    """GGUF -> Hugging Face folder -> GGUF: token ids, keys and weights are those of the embedded file."""
    from runs import make_run

    from edgees import export

    run = make_run(tmp_path / "run", smollm2, "adapter", generations=0, params="q_proj", factors=1)
    export.export(run, "safetensors", tmp_path / "hf", type_name="F32")
    merge.convert(tmp_path / "hf", tmp_path / "back.gguf", "F32")
    with GgufFile(smollm2) as base, GgufFile(tmp_path / "back.gguf") as back:
        described = {k for k in base.metadata if k.startswith("general.")} - {"general.architecture", "general.type"}
        different = {k: v for k, v in base.metadata.items() if k not in described and back.metadata.get(k) != v}
        assert different == {} and set(back.tensors) == set(base.tensors)
        for name, t in base.tensors.items():
            want = models.dequantize(np.array(base.raw(name)).reshape(t.shape[0], -1), t.type_name)
            assert np.array_equal(np.array(back.raw(name)).view("<f4").reshape(t.shape), want), name
    with LlamaCppEngine(smollm2, plain=True) as a, LlamaCppEngine(tmp_path / "back.gguf", plain=True) as b:
        for text in TEXTS:
            assert a._tokenize(text, special=True) == b._tokenize(text, special=True), text
        assert a.encode_chat([{"role": "user", "content": "hi"}]) == b.encode_chat([{"role": "user", "content": "hi"}])


def test_a_snapshot_has_the_models_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny-Phi-3" / "snapshots" / "0123abcd"
    assert gguf_from_hf.hub_id(snapshot) == "org/tiny-Phi-3" and gguf_from_hf.model_name(snapshot) == "tiny-phi"
    assert gguf_from_hf.hub_id(tmp_path / "m") is None and gguf_from_hf.model_name(tmp_path / "m") == "m"


def test_every_way_to_split_text_is_found_again() -> None:
    for name, (kind, _) in hf_layout.PRE.items():
        found = gguf_from_hf._pre_name(Path("x"), byte_bpe(name))
        same = {n for n, split in hf_layout.PRE.items() if split == hf_layout.PRE[name]}
        assert found in same and kind in ("gpt2", "digits", "split")
        assert (found in hf_layout.IGNORE_MERGES) == (name in hf_layout.IGNORE_MERGES)
        assert (found in hf_layout.NFC) == (name in hf_layout.NFC)
