"""Between llama.cpp's layout and Hugging Face's: tensor names, row order, norm shift, configuration, tokenizer.

Facts checked in llama.cpp's sources: names in gguf-py/gguf/tensor_mapping.py; the rotary row order in
conversion/llama.py (``LlamaModel.permute``); the ``+ 1`` of Gemma norms in conversion/gemma.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edgees.errors import ExportError

if TYPE_CHECKING:
    from edgees.gguf_file import GgufFile

_LLAMA_BLOCK: dict[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_down.bias": "mlp.down_proj.bias",
}
_QK_NORM: dict[str, str] = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_POST_NORMS: dict[str, str] = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GEMMA2_BLOCK = _LLAMA_BLOCK | _POST_NORMS | {"ffn_norm.weight": "pre_feedforward_layernorm.weight"}
# OLMo 2 has no norm in front of attention or FFN, only behind them.
_OLMO2_BLOCK = {k: v for k, v in _LLAMA_BLOCK.items() if "norm" not in k} | _POST_NORMS | _QK_NORM
_PHI3_BLOCK: dict[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

BLOCKS: dict[str, dict[str, str]] = {
    "llama": _LLAMA_BLOCK,
    "smollm3": _LLAMA_BLOCK,
    "granite": _LLAMA_BLOCK,
    "qwen2": _LLAMA_BLOCK,
    "qwen3": _LLAMA_BLOCK | _QK_NORM,
    "gemma": _LLAMA_BLOCK,
    "gemma2": _GEMMA2_BLOCK,
    "gemma3": _GEMMA2_BLOCK | _QK_NORM,
    "olmo2": _OLMO2_BLOCK,
    "phi3": _PHI3_BLOCK,
}
"""Architecture (``general.architecture``) -> name inside a block in the GGUF -> name inside a layer."""

OUTSIDE: dict[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}

PERMUTED = frozenset({"llama", "smollm3", "granite"})
"""Architectures whose q and k rows llama.cpp's converter reorders (its rotation works on neighbouring pairs)."""

SHIFTED_NORMS = frozenset({"gemma", "gemma2", "gemma3"})
"""Architectures whose GGUF norm weights are the Hugging Face weight + 1."""

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def supported(arch: str) -> bool:
    """Whether tensors of this architecture have canonical names."""
    return arch in BLOCKS


def canonical(arch: str, gguf_name: str) -> str | None:
    """Hugging Face name of a GGUF tensor, or None: unknown architecture or a tensor that is no parameter there.

    >>> canonical("llama", "blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    block = BLOCKS.get(arch)
    if block is None:
        return None
    if (name := OUTSIDE.get(gguf_name)) is not None:
        return name
    match = _BLOCK.fullmatch(gguf_name)
    if match is None or (inner := block.get(match[2])) is None:
        return None
    return f"model.layers.{int(match[1])}.{inner}"


def rope_permuted(arch: str, gguf_name: str, metadata: Mapping[str, Any]) -> int:
    """Heads by which the rows of q or k (weight or bias) are permuted in the file; 0 where they are not.

    Row ``h*hd + 2*j + i`` of the file is row ``h*hd + i*hd/2 + j`` of the Hugging Face tensor (hd = rows/heads).
    """
    if arch not in PERMUTED:
        return 0
    match = _BLOCK.fullmatch(gguf_name)
    if match is None:
        return 0
    part = match[2].rsplit(".", 1)[0]
    if part not in ("attn_q", "attn_k"):
        return 0
    heads = metadata.get(f"{arch}.attention.head_count", 0)
    if part == "attn_k":
        heads = metadata.get(f"{arch}.attention.head_count_kv", heads)
    if isinstance(heads, list):
        heads = heads[int(match[1])]
    return int(heads)


def norm_shift(arch: str, gguf_name: str) -> float:
    """What the GGUF's norm weight has more than the Hugging Face one: 1 for Gemma norms, else 0."""
    return 1.0 if arch in SHIFTED_NORMS and gguf_name.endswith("norm.weight") else 0.0


# ---- configuration
_MODEL_TYPES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}

# llama.cpp takes the score scale of the largest Gemma of a family from its layer count.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def config(base: GgufFile, dtype: str) -> dict[str, Any]:
    """``config.json`` of a merged model, from the GGUF's metadata and tensor table.

    dtype: ``bfloat16``, ``float16`` or ``float32``. Rotary parameters are written as ``rope_theta`` and
    ``rope_scaling``, which transformers 4 and 5 both read. ExportError where something cannot be expressed.
    """
    arch = base.arch
    if arch not in _MODEL_TYPES:
        raise ExportError(
            f"architecture {arch!r} has no Hugging Face export yet (there are: {', '.join(_MODEL_TYPES)})",
            "export --to gguf works for it",
        )
    model_type, class_name = _MODEL_TYPES[arch]
    hidden, heads = int(_need(base, "embedding_length")), int(_need(base, "attention.head_count"))
    layers = int(_need(base, "block_count"))
    kv_heads = base.get("attention.head_count_kv", heads)
    if not isinstance(kv_heads, int):
        raise ExportError(f"{base.path}: key/value heads differ between layers; {class_name} has one number")
    head_dim = int(base.get("attention.key_length", hidden // heads))
    if base.get("attention.value_length", head_dim) != head_dim:
        raise ExportError(f"{base.path}: keys and values have heads of different length")
    rotated = int(base.get("rope.dimension_count", head_dim))
    if rotated != head_dim and arch != "phi3":
        raise ExportError(f"{base.path}: only {rotated} of {head_dim} dimensions are rotated; {class_name} rotates all")
    ids = special_ids(base)
    out: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": base.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(_need(base, "feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(_need(base, "context_length")),
        "rms_norm_eps": _short(_need(base, "attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(base.get("rope.freq_base", 1e6 if arch == "gemma3" else 10000.0)),
        "rope_scaling": rope_scaling(base),
        "tie_word_embeddings": base.tied,
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ids.get("eos"),
        "pad_token_id": ids.get("padding"),
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    has_bias = {part: f"blk.0.{part}.bias" in base.tensors for part in ("attn_q", "attn_output", "ffn_gate", "ffn_up")}
    if arch == "llama":
        if has_bias["attn_q"] != has_bias["attn_output"]:
            raise ExportError(f"{base.path}: biases on q, k, v but not on the attention output; Llama has all or none")
        out["attention_bias"], out["mlp_bias"] = has_bias["attn_q"], has_bias["ffn_gate"]
    elif arch == "qwen3":
        out["attention_bias"] = has_bias["attn_q"]
    if arch in ("qwen2", "qwen3"):
        out["use_sliding_window"] = False
    if arch.startswith("gemma"):
        out["hidden_act"] = out["hidden_activation"] = "gelu_pytorch_tanh"
        out["attention_bias"] = False
    if arch in ("gemma2", "gemma3"):
        largest = layers == GEMMA_27B_LAYERS[arch]
        out["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
        out["final_logit_softcapping"] = _short(base.get("final_logit_softcapping")) or None
        out["attn_logit_softcapping"] = _short(base.get("attn_logit_softcapping")) or None
        window = base.get("attention.sliding_window", 4096 if arch == "gemma2" else 0)
        period = base.get("attention.sliding_window_pattern", 2 if arch == "gemma2" else 6)
        if not isinstance(period, int):
            raise ExportError(f"{base.path}: a sliding-window pattern by layer has no counterpart in {class_name}")
        sliding = [bool(window) and (i + 1) % period != 0 for i in range(layers)]
        out["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding]
        out["sliding_window"] = int(window) or 4096
    if arch == "gemma3":
        out["rope_local_base_freq"] = _short(base.get("rope.freq_base_swa", 10000.0))
    if arch == "phi3":
        out["original_max_position_embeddings"] = int(
            base.get("rope.scaling.original_context_length", out["max_position_embeddings"])
        )
        out["partial_rotary_factor"] = rotated / head_dim
        out["sliding_window"] = int(base.get("attention.sliding_window", 0)) or None
    return out


def _need(base: GgufFile, key: str) -> Any:
    value = base.get(key)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]  # one number per layer, all alike
    if not isinstance(value, (int, float)):
        raise ExportError(f"{base.path}: key '{base.arch}.{key}' is {value!r}; one number is needed")
    return value


def _short(value: float | None) -> float | None:
    """A float32 read as a double, as the short decimal that it was: 9.999999747378752e-06 -> 1e-05."""
    return None if value is None else float(f"{value:.7g}")


def rope_scaling(base: GgufFile) -> dict[str, Any] | None:
    """Hugging Face's ``rope_scaling`` from ``<arch>.rope.scaling.*``, the older ``rope.scale_linear``, or tensors.

    Llama 3's scaling is stored by llama.cpp only as the divisors in ``rope_freqs.weight``; its parameters are found
    again and must reproduce the divisors. ExportError for a scaling that cannot be expressed.
    """
    kind = base.get("rope.scaling.type")
    factor = base.get("rope.scaling.factor", base.get("rope.scale_linear"))
    if "rope_freqs.weight" in base.tensors:
        t = base.tensors["rope_freqs.weight"]
        if t.type_name != "F32":
            raise ExportError(f"{base.path}: rope_freqs.weight is {t.type_name}, not F32")
        return _llama3_scaling(base, np.array(base.raw(t.name)).view("<f4"))
    if "rope_factors_long.weight" in base.tensors:
        long, short = (
            [_short(v) for v in np.array(base.raw(f"rope_factors_{n}.weight")).view("<f4").tolist()]
            for n in ("long", "short")
        )
        return {"rope_type": "longrope", "type": "longrope", "long_factor": long, "short_factor": short}
    if kind is None:
        kind = "linear" if factor not in (None, 0, 1) else "none"
    if kind == "none":
        return None
    if not isinstance(factor, (int, float)) or factor <= 0:
        raise ExportError(f"{base.path}: rope scaling {kind!r} without a usable factor ({factor!r})")
    out: dict[str, Any] = {"rope_type": kind, "type": kind, "factor": _short(float(factor))}
    if kind == "linear":
        return out
    if kind == "yarn":
        original = base.get("rope.scaling.original_context_length")
        if original is None:
            raise ExportError(f"{base.path}: yarn scaling without rope.scaling.original_context_length")
        out["original_max_position_embeddings"] = int(original)
        for ours, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := base.get(f"rope.scaling.{ours}")) is not None:
                out[theirs] = _short(value)
        return out
    raise ExportError(
        f"{base.path}: rope scaling {kind!r} cannot be written to config.json", "export --to gguf keeps it"
    )


def llama3_divisors(theta: float, dims: int, factor: float, low: float, high: float, original: float) -> np.ndarray:
    """float64 [dims/2]: what Llama 3's scaling divides each rotary frequency by (``_compute_llama3_parameters`` of
    transformers' modeling_rope_utils.py)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, dims, 2) / dims)
    smooth = (original / wavelength - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, middle))


def _llama3_scaling(base: GgufFile, divisors: np.ndarray) -> dict[str, Any]:
    dims = 2 * len(divisors)
    theta = float(base.get("rope.freq_base", 10000.0))
    factor = float(divisors.max())
    low, high = 1.0, 4.0
    for original in (8192, 4096, 2048, 16384, 32768):
        if np.allclose(llama3_divisors(theta, dims, factor, low, high, original), divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "type": "llama3",
                "factor": _short(factor),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ExportError(
        f"{base.path}: rope_freqs.weight (largest divisor {factor:g}) is no Llama 3 scaling of config.json",
        "export --to gguf keeps it",
    )


# ---- tokenizer
_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _WORDS % "{1,3}", _WORDS % ""
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}")
_TEKKEN = _CASED % ("", "", "")

# ``tokenizer.ggml.pre`` -> (kind of split, pattern). ``digits``: single digits, then GPT-2's pattern.
PRE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt", "gigachat", "trillion"), ("gpt2", GPT2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), ("digits", GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), ("split", _LLAMA3)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), ("split", _LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), ("split", _QWEN2)),
    "gpt-4o": ("split", _GPT4O),
    "tekken": ("split", _TEKKEN),
}
IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"})
NFC = frozenset({"qwen2", "deepseek-r1-qwen"})

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<turn|>")


def special_ids(base: GgufFile) -> dict[str, int]:
    """Special token ids by role: bos, eos, eot, eom, unknown, padding (those that the file has)."""
    found: dict[str, int] = {}
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        value = base.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(value, int) and 0 <= value < len(base.metadata.get("tokenizer.ggml.tokens", ())):
            found[role] = value
    if base.metadata.get("tokenizer.ggml.model") == "llama":  # llama.cpp's defaults for sentencepiece files
        for role, value in (("bos", 1), ("eos", 2), ("unknown", 0)):
            found.setdefault(role, value)
    return found


def stop_ids(base: GgufFile) -> list[int]:
    """Tokens that end an answer: eos, eot, eom, and end-of-turn tokens that the chat template uses."""
    ids = special_ids(base)
    out = [ids[role] for role in ("eos", "eot", "eom") if role in ids]
    template = str(base.metadata.get("tokenizer.chat_template", ""))
    tokens = base.metadata.get("tokenizer.ggml.tokens", [])
    out += [tokens.index(token) for token in END_OF_TURN if token in template and token in tokens]
    return list(dict.fromkeys(out))


def adds_bos(base: GgufFile) -> bool:
    """Whether llama.cpp puts the BOS token in front of plain text (the key, or the tokenizer's default)."""
    key = base.metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(key, bool):
        return key
    return (
        base.metadata.get("tokenizer.ggml.model") == "llama" or base.metadata.get("tokenizer.ggml.pre") in IGNORE_MERGES
    )


def _tokens(base: GgufFile) -> tuple[list[str], list[int]]:
    tokens = base.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ExportError(f"{base.path}: key 'tokenizer.ggml.tokens' is missing")
    kinds = base.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    return tokens, kinds


def tokenizer(base: GgufFile) -> dict[str, Any]:
    """``tokenizer.json`` from the GGUF's tokens: byte-level BPE (model ``gpt2``) or sentencepiece BPE (``llama``).

    ExportError naming the tokenizer where its splitting rules are not known here.
    """
    tokens, kinds = _tokens(base)
    model = base.metadata.get("tokenizer.ggml.model")
    pre = str(base.metadata.get("tokenizer.ggml.pre", "default"))
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[i] == _CONTROL,
        }
        for i in range(len(tokens))
        if kinds[i] in (_CONTROL, _USER_DEFINED) and tokens[i]
    ]
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)
    if model == "gpt2":
        parts = _byte_level(base, pre, vocab)
    elif model == "llama":
        parts = _sentencepiece(base, tokens, vocab)
    else:
        raise ExportError(
            f"{base.path}: tokenizer {model!r} cannot be written as tokenizer.json (gpt2 and llama can)",
            "export --to gguf keeps it",
        )
    ids = special_ids(base)
    if adds_bos(base) and "bos" in ids:
        bos = tokens[ids["bos"]]
        template = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": bos, "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [ids["bos"]], "tokens": [bos]}},
        }
        inner = parts["post_processor"]
        parts["post_processor"] = template if inner is None else {"type": "Sequence", "processors": [inner, template]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def _byte_level(base: GgufFile, pre: str, vocab: dict[str, int]) -> dict[str, Any]:
    if pre not in PRE:
        raise ExportError(
            f"{base.path}: pre-tokenizer {pre!r} is not known here, so tokenizer.json cannot be written",
            "take tokenizer.json from the model's own folder, or export --to gguf",
        )
    merges = base.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ExportError(f"{base.path}: key 'tokenizer.ggml.merges' is missing")
    kind, pattern = PRE[pre]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": kind != "split"}
    before: dict[str, Any] = byte_level
    if kind == "digits":
        before = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    elif kind == "split":
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    pairs = []
    for rule in merges:
        left, _, right = rule.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ExportError(f"{base.path}: merge {rule!r} has a part that is no token")
        pairs.append([left, right])
    return {
        "normalizer": {"type": "NFC"} if pre in NFC else None,
        "pre_tokenizer": before,
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, pairs, ignore_merges=pre in IGNORE_MERGES),
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **more,
        "vocab": vocab,
        "merges": merges,
    }


def _sentencepiece(base: GgufFile, tokens: list[str], vocab: dict[str, int]) -> dict[str, Any]:
    """Sentencepiece's BPE joins the pair whose result scores best: as a list of merges, best first."""
    scores = base.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ExportError(f"{base.path}: key 'tokenizer.ggml.scores' is missing or too short")
    kinds = _tokens(base)[1]
    found: list[tuple[float, int, int, str, str]] = []
    for piece, i in vocab.items():
        if kinds[i] in (_CONTROL, _UNUSED, _BYTE) or len(piece) < 2:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], left, right, piece[:cut], piece[cut:]))
    found.sort(key=lambda rule: rule[:3])
    prefix = base.metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = special_ids(base).get("unknown", 0)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normal: dict[str, Any] = replace
    decode: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normal = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
        decode.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normal,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decode},
        "model": _bpe(
            vocab,
            [[left, right] for _, _, _, left, right in found],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def tokenizer_config(base: GgufFile) -> dict[str, Any]:
    """``tokenizer_config.json``: special tokens, BOS rule and chat template(s) of the GGUF."""
    out: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos(base),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(base.get("context_length", 2048)),
        **special_tokens_map(base),
    }
    out["added_tokens_decoder"] = {
        str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokenizer(base)["added_tokens"]
    }
    main = base.metadata.get("tokenizer.chat_template")
    names = base.metadata.get("tokenizer.chat_templates")
    if isinstance(names, list) and names:
        templates = [{"name": "default", "template": main}] if main else []
        templates += [
            {"name": name, "template": base.metadata[f"tokenizer.chat_template.{name}"]}
            for name in names
            if name != "default" and f"tokenizer.chat_template.{name}" in base.metadata
        ]
        out["chat_template"] = templates
    elif main:
        out["chat_template"] = main
    return out


def special_tokens_map(base: GgufFile) -> dict[str, str]:
    """``special_tokens_map.json``: bos_token, eos_token, unk_token, pad_token as strings."""
    tokens, _ = _tokens(base)
    ids = special_ids(base)
    roles = (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token"))
    return {name: tokens[ids[role]] for role, name in roles if role in ids}


def generation_config(base: GgufFile) -> dict[str, Any]:
    """``generation_config.json``: start and stop tokens, the chat template's end of turn among the latter."""
    ids = special_ids(base)
    stops = stop_ids(base)
    out: dict[str, Any] = {"_from_model_config": False}
    if "bos" in ids:
        out["bos_token_id"] = ids["bos"]
    if stops:
        out["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    if "padding" in ids:
        out["pad_token_id"] = ids["padding"]
    return out
