"""tokenizer.json files of several makes, and texts that tell them apart, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models

from edgees import hf_layout

TEXTS = (
    "Hello world, it's 2024!  Two  spaces\n\n\tand tabs \r\n",
    "don't DON'T we'll I'M 12345678 3.14 a1b2",
    "Größe ñandú 日本語テキスト привет עברית 👩‍👩‍👧 ½ ①",
    "   leading, trailing   ",
    "\n\n\n x\n y",
    "def f(x):\n    return {'a': x**2}  # _under_score",
    "<|im_start|>user\nnot special here<|im_end|>",
    "▁ already marked ▁▁",
    "\u00a0nbsp\u2003em \u200bzero",
    "",
    " ",
)
"""Hostile texts."""


def byte_bpe(pre: str = "smollm", **model: Any) -> dict[str, Any]:
    """Byte-level BPE with the tokens of models.py, split as llama.cpp does for ``tokenizer.ggml.pre`` = ``pre``."""
    tokens, merges = models.vocabulary()
    kind, pattern = hf_layout.PRE[pre]
    byte_level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    before: dict[str, Any] = {**byte_level, "use_regex": kind != "split"}
    if kind == "digits":
        before = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, before]}
    elif kind == "split":
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [split, before]}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added(enumerate(models.SPECIALS)),
        "normalizer": {"type": "NFC"} if pre in hf_layout.NFC else None, "pre_tokenizer": before,
        "post_processor": None, "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pre in hf_layout.IGNORE_MERGES, "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [rule.split(" ") for rule in merges], **model,
        },
    }  # fmt: skip


def sentencepiece_bpe(prefix: bool = True, metaspace: bool = False) -> dict[str, Any]:
    """As made from a sentencepiece BPE model (Llama 2, Gemma): every cut of every piece into pieces is a merge.

    prefix: a space is put in front; metaspace: by a pre-tokenizer instead of a normalizer.
    """
    rules = models.vocabulary()[1]
    plain = {s: bytes([b]) for b, s in enumerate(models.byte_symbols())}
    pieces = [b"".join(plain[c] for c in rule.replace(" ", "")).decode().replace(" ", "▁") for rule in rules]
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    singles = sorted({c for piece in pieces for c in piece} | set("▁éß日本あ"))
    for token in [*(f"<0x{b:02X}>" for b in range(256)), *pieces, *singles]:
        vocab.setdefault(token, len(vocab))
    merges = []
    for piece in pieces:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        found = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(found, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer: dict[str, Any] | None = replace
    before: dict[str, Any] | None = None
    if metaspace:
        scheme = "always" if prefix else "never"
        normalizer, before = None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    elif prefix:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    else:
        before = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    mark = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    special = added(enumerate(("<unk>", "<s>", "</s>")))
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": normalizer, "pre_tokenizer": before,
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos, text], "pair": [bos, text, text],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [mark, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip


def added(tokens: Any) -> list[dict[str, Any]]:
    """Entries of ``added_tokens`` for (id, special token)."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": i, "content": token, **flags} for i, token in tokens]


def write(folder: Path, data: dict[str, Any], template: str | None = models.CHATML, **settings: Any) -> None:
    """tokenizer.json and tokenizer_config.json; the second and third special tokens are BOS and EOS."""
    first = data["added_tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": first[1]["content"],
        "eos_token": first[2]["content"], "pad_token": first[2]["content"], "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}), **settings,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
