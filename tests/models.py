"""Tiny random GGUF models that llama.cpp really runs, for tests.

``tiny_gguf(path, arch, ...)`` writes one. Logits have a standard deviation of about 2.5 and what the layers add
outweighs the embedding, so that greedy choices are neither ties nor an echo of the last token. The tokenizer is a small
byte-level BPE learned from a paragraph below; the chat template is ChatML.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

TEXT = (
    "The small model answers short questions about lamps, doors and timers in the house. Please turn the bedroom "
    "lights off at half past nine, and make the kitchen warmer before breakfast. It listens, thinks about the "
    "request, then writes one line that the machine can read: the name of the device, the action and the value. "
    "When there is nothing to do it says so. Numbers such as one, two, three, four and five are counted; the sum "
    "of two and three is five. What is the time now? There are many ways of saying the same thing, and the model "
    "should learn all of them from the answers that were good. "
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ARCHS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")


@cache
def byte_symbols() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in keep}
    for i, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + i)
    return tuple(table[b] for b in range(256))


@cache
def vocabulary(merges: int = 189) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tokens, merges): specials first, then the bytes, then what was merged; 448 tokens by default."""
    symbols = byte_symbols()
    words: Counter[tuple[str, ...]] = Counter()
    for i, word in enumerate(TEXT.split(" ")):
        text = word if i == 0 else " " + word
        words[tuple(symbols[b] for b in text.encode())] += 1
    tokens, rules = [*SPECIALS, *symbols], []
    while len(rules) < merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += n
        best = min(pairs, key=lambda p: (-pairs[p], p))
        rules.append(" ".join(best))
        tokens.append("".join(best))
        joined: Counter[tuple[str, ...]] = Counter()
        for word, n in words.items():
            out: list[str] = []
            for s in word:
                if out and (out[-1], s) == best:
                    out[-1] += s
                else:
                    out.append(s)
            joined[tuple(out)] += n
        words = joined
    return tuple(tokens), tuple(rules)


# ---- K-quants: plain min/max rounding, enough for valid blocks with sensible values
def _pack_scales(sc: np.ndarray, mn: np.ndarray) -> np.ndarray:
    """uint8 [n, 8] scales and minima of 6 bits -> [n, 12] as in Q4_K and Q5_K."""
    out = np.zeros((len(sc), 12), np.uint8)
    out[:, 0:4] = (sc[:, :4] & 63) | ((sc[:, 4:] >> 4) << 6)
    out[:, 4:8] = (mn[:, :4] & 63) | ((mn[:, 4:] >> 4) << 6)
    out[:, 8:12] = (sc[:, 4:] & 15) | ((mn[:, 4:] & 15) << 4)
    return out


def _k_affine(x: np.ndarray, bits: int) -> np.ndarray:
    """float32 [n, 256] -> blocks of Q4_K (bits 4) or Q5_K (bits 5)."""
    top = (1 << bits) - 1
    sub = x.reshape(-1, 8, 32)
    low = np.minimum(sub.min(-1), 0)
    scale, minimum = (sub.max(-1) - low) / top, -low
    d = (scale.max(-1, keepdims=True) / 63).astype(np.float16)
    dmin = (minimum.max(-1, keepdims=True) / 63).astype(np.float16)
    d32, m32 = d.astype(np.float32), dmin.astype(np.float32)
    sc = np.clip(np.rint(scale / np.where(d32 == 0, 1, d32)), 0, 63).astype(np.uint8)
    mn = np.clip(np.rint(minimum / np.where(m32 == 0, 1, m32)), 0, 63).astype(np.uint8)
    step = (d32 * sc)[..., None]
    q = np.rint((sub + (m32 * mn)[..., None]) / np.where(step == 0, 1, step)).clip(0, top).astype(np.uint8)
    pairs = q.reshape(-1, 4, 2, 32)
    ql = ((pairs[:, :, 0] & 15) | ((pairs[:, :, 1] & 15) << 4)).reshape(-1, 128)
    head = [d.view(np.uint8), dmin.view(np.uint8), _pack_scales(sc, mn)]
    if bits == 5:
        high = np.zeros((len(x), 32), np.uint8)
        for j in range(8):
            high |= (q[:, j] >> 4) << j
        head.append(high)
    return np.concatenate([*head, ql], axis=1)


def _k_q6(x: np.ndarray) -> np.ndarray:
    sub = x.reshape(-1, 16, 16)
    scale = np.abs(sub).max(-1) / 31
    d = (scale.max(-1, keepdims=True) / 127).astype(np.float16)
    d32 = d.astype(np.float32)
    sc = np.clip(np.rint(scale / np.where(d32 == 0, 1, d32)), 1, 127).astype(np.int8)
    step = (d32 * sc)[..., None]
    q = (np.rint(sub / np.where(step == 0, 1, step)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    ql = np.stack([(q[:, :, 0] & 15) | ((q[:, :, 2] & 15) << 4), (q[:, :, 1] & 15) | ((q[:, :, 3] & 15) << 4)], 2)
    qh = (q[:, :, 0] >> 4) | ((q[:, :, 1] >> 4) << 2) | ((q[:, :, 2] >> 4) << 4) | ((q[:, :, 3] >> 4) << 6)
    parts = [ql.reshape(-1, 128), qh.reshape(-1, 64), sc.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1)


def quantize(x: np.ndarray, type_name: str) -> np.ndarray:
    """float32 [rows, cols] -> uint8 [rows, row bytes] in a ggml type."""
    x = np.ascontiguousarray(x, np.float32)
    if type_name in ("Q4_K", "Q5_K", "Q6_K"):
        blocks = x.reshape(-1, 256)
        packed = _k_q6(blocks) if type_name == "Q6_K" else _k_affine(blocks, 4 if type_name == "Q4_K" else 5)
        return packed.reshape(len(x), -1)
    return gguf.quants.quantize(x, GGMLQuantizationType[type_name]).view(np.uint8)


def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """uint8 [rows, row bytes] -> float32 [rows, cols], by the ``gguf`` package."""
    return gguf.quants.dequantize(raw, GGMLQuantizationType[type_name])


def _type_of(name: str, quant: str, embd: str | None, types: Mapping[str, str] | None) -> str:
    for part, chosen in (types or {}).items():
        if part in name:
            return chosen
    if name.startswith(("token_embd", "output.")):
        return embd or {"Q4_K_M": "Q6_K", "Q4_K": "Q6_K", "Q5_K": "Q6_K"}.get(quant, "Q8_0")
    if quant == "Q4_K_M":
        return "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"
    return quant


def tiny_gguf(
    path: str | Path,
    arch: str = "llama",
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int | None = None,
    quant: str = "Q4_1",
    embd: str | None = None,
    types: Mapping[str, str] | None = None,
    tied: bool = True,
    vocab: int | None = None,
    context: int = 512,
    seed: int = 0,
    template: str | None = CHATML,
    rope_freqs: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write a random model and return its path.

    arch: one of ``ARCHS``, or ``qwen2moe`` (four experts, for refusals).
    quant: type of the matrices (``Q4_1``, ``F32``, ``Q4_K``...; ``Q4_K_M`` mixes Q4_K and Q6_K; K types need
    ``n_embd`` and ``n_ff`` multiples of 256); embd: type of embedding and head (Q8_0, or Q6_K beside K types);
    types: parts of tensor names -> type, to override. vocab: pads the 448 tokens with unused ones.
    metadata: further keys (str, int, float or bool values). Norms and biases are F32.
    """
    path = Path(path)
    rng = np.random.default_rng(seed)
    head_dim = head_dim or (2 * n_embd // n_head if arch in ("qwen3", "gemma3") else n_embd // n_head)
    n_ff = n_ff or (256 if n_embd % 256 else 512)
    gemma = arch.startswith("gemma")
    if arch in ("gemma", "gemma2"):
        tied = True
    if arch == "qwen2moe":
        tied = False
    tokens, merges = vocabulary()
    n_vocab = vocab or len(tokens)
    names = [*tokens, *(f"<|unused_{i}|>" for i in range(n_vocab - len(tokens)))]

    w = gguf.GGUFWriter(path, arch)
    w.add_name("Tiny random")  # llama.cpp has rules for names such as "phi3"
    w.add_context_length(context)
    w.add_embedding_length(n_embd)
    w.add_block_count(n_layer)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head_kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(head_dim)
    if head_dim * n_head != n_embd or gemma:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if arch == "gemma2":
        w.add_attn_logit_softcapping(50.0)
        w.add_final_logit_softcapping(30.0)
    if arch in ("gemma2", "gemma3"):
        w.add_sliding_window(32)
    if arch == "phi3":
        w.add_rope_scaling_orig_ctx_len(context)
    if arch == "qwen2moe":
        w.add_expert_count(4)
        w.add_expert_used_count(2)
        w.add_expert_feed_forward_length(n_ff)
        w.add_expert_shared_feed_forward_length(n_ff)
    w.add_vocab_size(n_vocab)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    file_type = {"Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S", "F32": "ALL_F32"}.get(quant, f"MOSTLY_{quant}")
    w.add_file_type(gguf.LlamaFileType[file_type])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2" if arch.startswith("qwen") else "smollm")
    w.add_token_list(names)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIALS))
    w.add_token_types([*kinds, *([gguf.TokenType.UNUSED] * (n_vocab - len(tokens)))])
    w.add_token_merges(list(merges))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(2)
    w.add_add_bos_token(False)
    if template is not None:
        w.add_chat_template(template)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, int):
            w.add_uint32(key, value)
        elif isinstance(value, float):
            w.add_float32(key, value)
        else:
            w.add_string(key, str(value))

    # Gemma multiplies the embedding by sqrt(n_embd), so its layers have to speak up
    loud = (32.0 if arch == "gemma" else 1.0) if gemma else 8.0
    post_norm = 10.0

    def matrix(name: str, rows: int, cols: int, std: float | None = None, experts: int = 0) -> None:
        shape = (experts, rows, cols) if experts else (rows, cols)
        into_residual = "attn_output" in name or "ffn_down" in name
        std = std or (loud if into_residual else 1.0) * cols**-0.5
        x = rng.standard_normal(shape).astype(np.float32) * np.float32(std)
        type_name = _type_of(name, quant, embd, types)
        if type_name == "F32":
            w.add_tensor(name, x)
            return
        packed = quantize(x.reshape(-1, cols), type_name)
        w.add_tensor(name, packed.reshape(*shape[:-1], -1), raw_dtype=GGMLQuantizationType[type_name])

    def vector(name: str, n: int, centre: float = 1.0) -> None:
        w.add_tensor(name, (centre + 0.1 * rng.standard_normal(n)).astype(np.float32))

    head_std = 2.5 * n_embd**-0.5
    matrix("token_embd.weight", n_vocab, n_embd, head_std)
    vector("output_norm.weight", n_embd)
    if not tied:
        matrix("output.weight", n_vocab, n_embd, head_std)
    if rope_freqs:
        w.add_tensor("rope_freqs.weight", np.linspace(1, 4, head_dim // 2).astype(np.float32))
    q, kv = n_head * head_dim, n_head_kv * head_dim
    for i in range(n_layer):
        b = f"blk.{i}."
        vector(b + "attn_norm.weight", n_embd)
        if arch == "phi3":
            matrix(b + "attn_qkv.weight", q + 2 * kv, n_embd)
        else:
            matrix(b + "attn_q.weight", q, n_embd)
            matrix(b + "attn_k.weight", kv, n_embd)
            matrix(b + "attn_v.weight", kv, n_embd)
        if arch in ("qwen2", "qwen2moe"):
            for part, n in (("q", q), ("k", kv), ("v", kv)):
                vector(f"{b}attn_{part}.bias", n, 0.0)
        if arch in ("qwen3", "gemma3"):
            vector(b + "attn_q_norm.weight", head_dim)
            vector(b + "attn_k_norm.weight", head_dim)
        matrix(b + "attn_output.weight", n_embd, q)
        if arch in ("gemma2", "gemma3"):
            vector(b + "post_attention_norm.weight", n_embd, post_norm)
        vector(b + "ffn_norm.weight", n_embd)
        if arch == "phi3":
            matrix(b + "ffn_up.weight", 2 * n_ff, n_embd)
            matrix(b + "ffn_down.weight", n_embd, n_ff)
        elif arch == "qwen2moe":
            w.add_tensor(b + "ffn_gate_inp.weight", rng.standard_normal((4, n_embd)).astype(np.float32))
            matrix(b + "ffn_gate_exps.weight", n_ff, n_embd, experts=4)
            matrix(b + "ffn_up_exps.weight", n_ff, n_embd, experts=4)
            matrix(b + "ffn_down_exps.weight", n_embd, n_ff, experts=4)
            vector(b + "ffn_gate_inp_shexp.weight", n_embd, 0.0)
            matrix(b + "ffn_gate_shexp.weight", n_ff, n_embd)
            matrix(b + "ffn_up_shexp.weight", n_ff, n_embd)
            matrix(b + "ffn_down_shexp.weight", n_embd, n_ff)
        else:
            matrix(b + "ffn_gate.weight", n_ff, n_embd)
            matrix(b + "ffn_up.weight", n_ff, n_embd)
            matrix(b + "ffn_down.weight", n_embd, n_ff)
        if arch in ("gemma2", "gemma3"):
            vector(b + "post_ffw_norm.weight", n_embd, post_norm)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
