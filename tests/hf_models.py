"""Tiny random Hugging Face models, made through transformers' own configurations, for tests.

``tiny_hf(path, arch, ...)`` writes a folder of weights, configuration and tokenizer; ``tiny_bnb`` the same as a
bitsandbytes 4-bit checkpoint with nested absmax. The tokenizer is that of ``models.tiny_gguf``: same tokens, same ids,
ChatML. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np

from edgees import nf4

ARCHS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mistral", "smollm3", "granite", "olmo2")
_CLASSES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "phi3": "Phi3",
    "mistral": "Mistral", "smollm3": "SmolLM3", "granite": "Granite", "olmo2": "Olmo2",
}  # fmt: skip


def tiny_model(arch: str, *, tied: bool = True, seed: int = 0, hidden: int = 64, layers: int = 2, **config: Any) -> Any:
    """A random float32 ``...ForCausalLM`` of transformers, in eval mode.

    Four heads of 16 (or of ``head_dim``), two of keys and values, an FFN of 2 * hidden, the vocabulary of
    ``models.vocabulary()``; **config: more keys of the configuration. Weights are large enough that what the layers add
    outweighs the embedding; norms differ from 1 and biases from 0.
    """
    import torch
    import transformers

    name = _CLASSES[arch]
    settings: dict[str, Any] = {
        "vocab_size": len(models.vocabulary()[0]), "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if arch != "phi3":
        settings["head_dim"] = hidden // 4
    if arch in ("gemma2", "gemma3_text"):
        settings |= {"query_pre_attn_scalar": hidden // 4, "sliding_window": 64}
    text = "TextConfig" if arch == "gemma3_text" else "Config"
    made = getattr(transformers, f"{name}{text}")(**settings | config)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    rng = np.random.default_rng(seed)
    centre = 0.0 if arch.startswith("gemma") else 1.0  # Gemma's norms multiply with 1 + weight
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            x = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
            if "norm" in key:
                x = centre + 0.1 * x
            elif key.endswith(".bias"):
                x = 0.1 * x
            else:
                x = x * (0.08 if "embed" in key else 1.2 / np.sqrt(parameter.shape[-1]))
            parameter.copy_(torch.from_numpy(x))
    return model


def tiny_hf(path: Path, arch: str = "llama", *, dtype: str = "bfloat16", shard: str | None = None, **more: Any) -> Path:
    """The model of :func:`tiny_model` (**more) as a folder. shard: largest weights file, such as ``50KB``."""
    import torch

    model = tiny_model(arch, **more).to(getattr(torch, dtype))
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    write_tokenizer(path)
    return path


def tiny_bnb(path: Path, arch: str = "llama", *, kind: str = "nf4", nested: bool = True, **more: Any) -> Path:
    """The model of :func:`tiny_hf` as bitsandbytes saves it: linears of the layers in 4 bits, the rest bfloat16."""
    from bitsandbytes import functional
    from safetensors.torch import load_file, save_file

    tiny_hf(path, arch, **more)
    tensors: dict[str, Any] = {}
    for name, x in load_file(path / "model.safetensors").items():
        if not (name.startswith("model.layers.") and name.endswith("proj.weight")):
            tensors[name] = x
            continue
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type=kind, compress_statistics=nested)
        tensors[name] = packed
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in state.as_dict(packed=True).items()}
    save_file({k: v.clone() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_tokenizer(path: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` of ``models.vocabulary()``, with ChatML."""
    tokens, merges = models.vocabulary()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": token, **flags} for i, token in enumerate(models.SPECIALS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [rule.split(" ") for rule in merges],
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": models.SPECIALS[0], "eos_token": models.SPECIALS[2],
        "pad_token": models.SPECIALS[0], "clean_up_tokenization_spaces": False, "model_max_length": 512,
        "chat_template": models.CHATML,
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def rewrite(path: Path, change: Any, file: str = "model.safetensors") -> None:
    """Change a safetensors file's tensors: ``change`` gets {name: (dtype, shape, bytes)} and alters it."""
    raw = (path / file).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    tensors = {
        name: (e["dtype"], e["shape"], raw[8 + size :][slice(*e["data_offsets"])])
        for name, e in header.items()
        if name != "__metadata__"
    }
    change(tensors)
    write_safetensors(path / file, tensors)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file from {name: (dtype, shape, bytes)}."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def packed_tensors(q: nf4.Quantised, name: str) -> dict[str, tuple[str, list[int], bytes]]:
    """A 4-bit weight as :func:`rewrite` wants tensors."""
    return {
        key: ("U8" if value.dtype == np.uint8 else "F32", list(value.shape), value.tobytes())
        for key, value in nf4.to_state(q, name).items()
    }
