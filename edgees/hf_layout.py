"""Between llama.cpp's layout and Hugging Face's: tensor names, row order, norm shift, configuration, tokenizer.

Facts checked in llama.cpp's sources: names in gguf-py/gguf/tensor_mapping.py; the rotary row order in
conversion/llama.py (``LlamaModel.permute``); the ``+ 1`` of Gemma norms in conversion/gemma.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
