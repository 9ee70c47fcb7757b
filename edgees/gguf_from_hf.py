"""A Hugging Face folder seen as the GGUF that llama.cpp would run: keys, tokenizer, tensor table, row order.

The weights themselves come from whoever has them (the folder's own, or what a run made of them) through a callback
that gives rows in Hugging Face's order. Facts checked in llama.cpp's sources: keys and what they mean in
src/models/*.cpp, the converter's choices in conversion/*.py, tokenizers in src/llama-vocab.cpp. What llama.cpp would
run otherwise than Hugging Face's model says is refused by name.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGUFValueType

from edgees import hf_layout
from edgees.backends.base import TensorInfo
from edgees.errors import ExportError
from edgees.gguf_file import GgufTensor, pack_kv, pack_text, tensor_bytes

if TYPE_CHECKING:
    from edgees.hf_files import HfFolder

Rows = Callable[[str, int, int], np.ndarray]
"""(canonical name, first row, rows) -> float32 [rows, cols] in Hugging Face's order; a vector is one row."""

ARCHS: dict[str, str] = {
    **{name: name for name in ("llama", "smollm3", "granite", "qwen2", "qwen3", "gemma2", "phi3", "olmo2")},
    "mistral": "llama",
    "gemma3_text": "gemma3",
}
"""``model_type`` of config.json -> ``general.architecture``."""

# What configurations leave out because the model's class knows it.
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA, "gemma3": _GEMMA | {"max_position_embeddings": 131072}, "qwen3": {"head_dim": 128},
}  # fmt: skip
_GEMMA_PERIOD = {"gemma2": 2, "gemma3": 6}
_EPSILON = {"phi3": 1e-5, "olmo2": 1e-5}  # else 1e-6
_NEEDS_HEAD = frozenset({"olmo2"})
"""Architectures whose head llama.cpp demands as a tensor of its own."""


@dataclass(frozen=True)
class Part:
    """source: canonical name; heads, shift: as in hf_layout. constant: float32 [n], of tensors that hold settings."""

    source: str = ""
    heads: int = 0
    shift: float = 0.0
    constant: np.ndarray | None = None


class Twin:
    """The GGUF form of a Hugging Face model, the weights left out.

    metadata: GGUF keys -> values; tensors: GGUF name -> entry (F32 for vectors, F16 for matrices, offset 0) in order of
    writing; parts: where each comes from; notes: what llama.cpp does otherwise.

    :raises ExportError: something that llama.cpp cannot express, or that is not known here; it is named.
    """

    def __init__(self, folder: HfFolder) -> None:
        self.path, self.config = folder.path, folder.config
        if folder.arch not in ARCHS:
            raise ExportError(
                f"{self.path}: {folder.arch!r} models cannot be written as GGUF (there are: {', '.join(ARCHS)})",
                "export --to safetensors works for it",
            )
        self.arch = ARCHS[folder.arch]
        self.notes: list[str] = []
        self._constants: dict[str, np.ndarray] = {}
        vocabulary = folder.tensors["model.embed_tokens.weight"].shape[0]
        self.metadata: dict[str, Any] = {
            "general.architecture": self.arch, "general.type": "model", "general.name": model_name(self.path),
            f"{self.arch}.vocab_size": vocabulary,
        }  # fmt: skip
        self._hyperparameters(folder.rope())
        self.metadata |= tokenizer(self.path, vocabulary, self.config, folder.template, folder.stop_ids)
        self.parts: dict[str, Part] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._table({name: t.dims for name, t in folder.tensors.items()})

    @property
    def tied(self) -> bool:
        """True if the output head is the token embedding."""
        return "output.weight" not in self.tensors

    def pairs(self, more: Mapping[str, Any]) -> list[bytes]:
        """All keys, then ``more`` (which wins), packed for :func:`gguf_file.write_all`."""
        return [pack(key, value) for key, value in {**self.metadata, **more}.items()]

    def rows(self, read: Rows, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols] of GGUF tensor ``name`` in the order of the file, norms as llama.cpp wants them."""
        part, t = self.parts[name], self.tensors[name]
        n = t.shape[0] - row0 if n is None else n
        if part.constant is not None:
            return part.constant[None, :]
        order = TensorInfo("", "", t.shape[1 if t.vector else 0], 1, False, 1.0, part.heads).source_to_canonical()
        if t.vector:
            w = read(part.source, 0, 1) + np.float32(part.shift)
            return w if order is None else np.ascontiguousarray(w[:, order])
        if order is None:
            return read(part.source, row0, n)
        # a head's rows are permuted among themselves: fetch the heads that the rows belong to
        hd = t.shape[0] // part.heads
        first, last = row0 // hd * hd, -(-(row0 + n) // hd) * hd
        return np.ascontiguousarray(read(part.source, first, last - first)[order[row0 : row0 + n] - first])

    # ---- tensors
    def _table(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        outside = {hf: gguf for gguf, hf in hf_layout.OUTSIDE.items()}
        inside = {hf: gguf for gguf, hf in hf_layout.BLOCKS[self.arch].items()}
        for source, shape in shapes.items():
            name = outside.get(source, "")
            if source.startswith("model.layers."):
                layer, _, inner = source.removeprefix("model.layers.").partition(".")
                name = f"blk.{layer}.{inside[inner]}" if layer.isdigit() and inner in inside else ""
            if not name:
                raise ExportError(
                    f"{self.path}: tensor {source!r} has no place in a GGUF of architecture {self.arch}",
                    "export --to safetensors keeps it",
                )
            heads = hf_layout.rope_permuted(self.arch, name, self.metadata)
            self._add(name, shape, Part(source, heads, hf_layout.norm_shift(self.arch, name)))
        if self.arch in _NEEDS_HEAD and self.tied:
            source = "model.embed_tokens.weight"
            self._add("output.weight", shapes[source], Part(source))
        for name, values in self._constants.items():
            self._add(name, values.shape, Part(constant=values))

    def _add(self, name: str, shape: tuple[int, ...], part: Part) -> None:
        flat = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
        kind = "F32" if len(shape) == 1 else "F16"
        self.parts[name] = part
        self.tensors[name] = GgufTensor(name, kind, flat, 0, tensor_bytes(kind, flat), tuple(reversed(shape)))

    # ---- hyperparameters
    def _need(self, key: str) -> Any:
        value = self.config.get(key)
        value = _DEFAULTS.get(self.arch, {}).get(key) if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ExportError(f"{self.path}: {key} in config.json is {value!r}; a number is needed")
        return value

    def _refuse(self, what: str) -> None:
        raise ExportError(
            f"{self.path}: {what}, which llama.cpp cannot run for {self.arch}", "export --to safetensors keeps it"
        )

    def _hyperparameters(self, rope: Mapping[str, Mapping[str, Any]]) -> None:
        config, arch = self.config, self.arch
        hidden, heads, layers = (
            int(self._need(k)) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        head_dim = int(config.get("head_dim") or _DEFAULTS.get(arch, {}).get("head_dim") or hidden // heads)
        scaling = rope["full_attention"]
        rotated = int(head_dim * float(scaling.get("partial_rotary_factor", 1.0)))
        if rotated != head_dim and arch != "phi3":
            self._refuse(f"only {rotated} of {head_dim} dimensions of a head are rotated")
        wanted = "gelu_pytorch_tanh" if arch.startswith("gemma") else "silu"
        found = config.get("hidden_activation" if arch.startswith("gemma") else "hidden_act") or wanted
        if found != wanted:
            self._refuse(f"its activation is {found!r}")
        keys: dict[str, Any] = {
            "block_count": layers, "context_length": int(self._need("max_position_embeddings")),
            "embedding_length": hidden, "feed_forward_length": int(self._need("intermediate_size")),
            "attention.head_count": heads,
            "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
            "rope.freq_base": float(scaling["rope_theta"]), "rope.dimension_count": rotated,
            "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or _EPSILON.get(arch, 1e-6)),
        }  # fmt: skip
        if head_dim * heads != hidden or arch.startswith("gemma"):
            keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        if arch == "granite":
            for ours, theirs in (
                ("attention.scale", "attention_multiplier"), ("embedding_scale", "embedding_multiplier"),
                ("residual_scale", "residual_multiplier"), ("logit_scale", "logits_scaling"),
            ):  # fmt: skip
                keys[ours] = float(self._need(theirs))
        if arch == "smollm3":
            used = config.get("no_rope_layers") or [int((i + 1) % 4 != 0) for i in range(layers)]
            if [int(v) for v in used] != [int((i + 1) % 4 != 0) for i in range(layers)]:
                self._refuse("other layers than every fourth are without rotation")
        if arch in _GEMMA_PERIOD:
            self._gemma(keys, hidden // heads, head_dim, layers, rope.get("sliding_attention") or {})
        elif window := self._window():
            self.notes.append(
                f"llama.cpp lets every token see all others; this model has a window of {window} tokens: texts longer "
                "than that are read otherwise"
            )
        if arch == "phi3":
            keys["attention.sliding_window"] = int(config.get("sliding_window") or 0)
            keys["rope.scaling.original_context_length"] = int(
                config.get("original_max_position_embeddings")
                or scaling.get("original_max_position_embeddings")
                or keys["context_length"]
            )
        keys |= self._scaling(scaling, keys["context_length"], rotated)
        self.metadata |= {f"{arch}.{key}": value for key, value in keys.items()}

    def _window(self) -> int:
        config = self.config
        if self.arch in ("qwen2", "qwen3", "smollm3") and not config.get("use_sliding_window"):
            return 0
        window = int(config.get("sliding_window") or 0)
        return window if window < int(self._need("max_position_embeddings")) else 0

    def _gemma(self, keys: dict[str, Any], width: int, head_dim: int, layers: int, local: Mapping[str, Any]) -> None:
        config, arch = self.config, self.arch
        scale = width if layers == hf_layout.GEMMA_27B_LAYERS[arch] else head_dim
        if self._need("query_pre_attn_scalar") != scale:
            self._refuse(f"its query_pre_attn_scalar is {config.get('query_pre_attn_scalar')}, not {scale}")
        if arch == "gemma2":
            cap = config.get("attn_logit_softcapping", 50.0)
            if not cap:
                self._refuse("it has no attn_logit_softcapping")
            keys["attn_logit_softcapping"] = float(cap)
        cap = config.get("final_logit_softcapping", 30.0 if arch == "gemma2" else None)
        keys["final_logit_softcapping"] = float(cap or 0.0)
        period = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 0)
        period = period or _GEMMA_PERIOD[arch]
        default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
        sliding = [kind == "sliding_attention" for kind in config.get("layer_types") or default]
        keys["attention.sliding_window"] = int(self._need("sliding_window"))
        if sliding != [(i + 1) % _GEMMA_PERIOD[arch] != 0 for i in range(layers)]:
            keys["attention.sliding_window_pattern"] = sliding
        if arch == "gemma3":
            if local.get("rope_type", "default") != "default":
                self._refuse(f"its sliding layers have rope scaling {local['rope_type']!r}")
            keys["rope.freq_base_swa"] = float(local.get("rope_theta", 10000.0))

    def _scaling(self, scaling: Mapping[str, Any], context: int, rotated: int) -> dict[str, Any]:
        """Keys for a rope scaling (case 11); its divisors, where it has some, become tensors."""
        kind, factor = str(scaling["rope_type"]), float(scaling.get("factor", 1.0))
        original = int(scaling.get("original_max_position_embeddings", context))
        if kind == "default":
            return {}
        if kind == "linear":
            return {"rope.scaling.type": kind, "rope.scaling.factor": factor}
        if kind == "llama3":
            self._constants["rope_freqs.weight"] = hf_layout.llama3_divisors(
                float(scaling["rope_theta"]), rotated, factor, float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]), original,
            ).astype(np.float32)  # fmt: skip
            return {}
        if kind == "yarn":
            # llama.cpp reads the two betas only for other architectures, and rounds their range outwards
            usual = {"mscale": 0, "mscale_all_dim": 0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
            odd = {key: scaling[key] for key, value in usual.items() if scaling.get(key, value) != value}
            if odd:
                self._refuse(f"it has yarn scaling with {odd}")
            attention = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            return {
                "rope.scaling.type": kind, "rope.scaling.factor": factor,
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": float(scaling.get("attention_factor", attention)) / attention,
            }  # fmt: skip
        if kind != "longrope" or self.arch not in ("phi3", "llama"):
            self._refuse(f"it has rope scaling {kind!r}")
        for name in ("long", "short"):
            values = np.array(scaling[f"{name}_factor"], np.float32)
            if values.shape != (rotated // 2,):
                raise ExportError(
                    f"{self.path}: rope scaling has {values.size} values in {name}_factor, not {rotated // 2}"
                )
            self._constants[f"rope_factors_{name}.weight"] = values
        stretch = context / original
        attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        return {
            "rope.scaling.type": kind, "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": float(scaling.get("attention_factor", attention)),
        }  # fmt: skip


# ---- tokenizer
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


def tokenizer(
    path: Path, vocabulary: int, config: Mapping[str, Any], template: str | None, stops: Sequence[int]
) -> dict[str, Any]:
    """Keys ``tokenizer.*`` from a folder's tokenizer.json; byte-level BPE, or BPE made from sentencepiece.

    vocabulary: rows of the embedding; ids without a token are filled up. config: for special ids that the tokenizer's
    own files leave out. stops: ids that end an answer. ExportError naming what is not known here.
    """
    data = _document(path, "tokenizer.json")
    if data is None:
        raise ExportError(
            f"{path}: tokenizer.json is missing, so no GGUF can be written",
            "transformers writes it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    model = data.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ExportError(
            f"{path}/tokenizer.json: a tokenizer of type {model.get('type')!r} cannot be written as GGUF; BPE can"
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ExportError(f"{path}/tokenizer.json: {key} = {model[key]!r} cannot be written as GGUF")
    vocab: dict[str, int] = model["vocab"]
    added = [t for t in data.get("added_tokens") or [] if t.get("content")]
    size = 1 + max([*vocab.values(), *(int(t["id"]) for t in added)], default=-1)
    if size > vocabulary:
        raise ExportError(f"{path}: the tokenizer has {size} tokens, the embedding {vocabulary} rows")
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    kinds = [_UNUSED] * vocabulary
    for token, i in vocab.items():
        tokens[i], kinds[i] = token, _NORMAL
    for t in added:
        tokens[t["id"]], kinds[t["id"]] = t["content"], _CONTROL if t.get("special") else _USER_DEFINED
    out: dict[str, Any] = {}
    if model.get("byte_fallback"):
        out["tokenizer.ggml.model"], out["tokenizer.ggml.pre"] = "llama", "default"
        out["tokenizer.ggml.add_space_prefix"] = _space_prefix(path, data)
        for i, token in enumerate(tokens):
            if kinds[i] == _NORMAL and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                kinds[i] = _BYTE
        if (unknown := vocab.get(str(model.get("unk_token")))) is not None:
            kinds[unknown] = _UNKNOWN
        out["tokenizer.ggml.scores"] = _scores(path, tokens, kinds, model)
    else:
        out["tokenizer.ggml.model"], out["tokenizer.ggml.pre"] = "gpt2", _pre_name(path, data)
        out["tokenizer.ggml.add_space_prefix"] = False
        out["tokenizer.ggml.merges"] = [" ".join(pair) for pair in _merges(model)]
    out["tokenizer.ggml.tokens"], out["tokenizer.ggml.token_type"] = tokens, kinds
    return out | _specials(path, data, tokens, config, template, stops)


def hub_id(path: Path) -> str | None:
    """``org/name`` of a snapshot in Hugging Face's cache (``models--org--name/snapshots/COMMIT``), else None."""
    kind, *parts = path.resolve().parent.parent.name.split("--")
    return "/".join(parts) if path.resolve().parent.name == "snapshots" and kind == "models" else None


def model_name(path: Path) -> str:
    """The folder's name. llama.cpp drops white space behind special tokens of a model whose name says Phi-3, as that
    tokenizer does (``rstrip``), so the name says it only then."""
    name = (hub_id(path) or path.resolve().name or "model").rsplit("/", 1)[-1]
    added = (_document(path, "tokenizer.json") or {}).get("added_tokens") or []
    strips = {t.get("content") for t in added if t.get("rstrip")}
    if "</s>" in strips and {"<unk>", "<s>", "<|endoftext|>"} <= {t.get("content") for t in added} - strips:
        return name if re.search("phi-?3", name, re.IGNORECASE) else f"phi-3 {name}"
    return re.sub("(?i)phi-?3", "phi", name)


def _document(path: Path, name: str) -> dict[str, Any] | None:
    """A JSON file of the folder, or None where it is not there."""
    file = path / name
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"cannot read {file}: {error}") from error
    if not isinstance(data, dict):
        raise ExportError(f"{file} holds no JSON object")
    return data


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rules of either spelling: ``"a b"`` or ``["a", "b"]``."""
    rules = (rule.split(" ", 1) if isinstance(rule, str) else rule for rule in model.get("merges") or [])
    return [(left, right) for left, right in rules]


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """A normalizer, pre-tokenizer or post-processor as a list: a Sequence taken apart."""
    if part is None:
        return []
    return list(part[inner]) if part.get("type") == "Sequence" else [part]


def _pre_name(path: Path, data: Mapping[str, Any]) -> str:
    """``tokenizer.ggml.pre``: the name under which llama.cpp knows this way of splitting text."""
    steps = _steps(data.get("pre_tokenizer"), "pretokenizers")
    forms = [step.get("type") for step in _steps(data.get("normalizer"), "normalizers")]
    split: tuple[str, str] | None = None
    last = steps[-1] if steps else {}
    plain = last.get("type") == "ByteLevel" and not last.get("add_prefix_space") and forms in ([], ["NFC"])
    uses_regex = last.get("use_regex", True)
    if plain and len(steps) == 1 and uses_regex:
        split = ("gpt2", hf_layout.GPT2)
    elif plain and len(steps) == 2 and uses_regex and steps[0] == {"type": "Digits", "individual_digits": True}:
        split = ("digits", hf_layout.GPT2)
    elif plain and len(steps) == 2 and not uses_regex and steps[0].get("type") == "Split":
        first = steps[0]
        if first.get("behavior") == "Isolated" and not first.get("invert"):
            split = ("split", str((first.get("pattern") or {}).get("Regex")))
    whole = bool((data.get("model") or {}).get("ignore_merges"))
    names = [
        name for name, known in hf_layout.PRE.items()
        if known == split and (name in hf_layout.IGNORE_MERGES) == whole
    ]  # fmt: skip
    # llama.cpp never normalises; a name that goes with the same normalisation reads back as the same tokenizer
    names.sort(key=lambda name: (name in hf_layout.NFC) != (forms == ["NFC"]))
    if not names:
        shown = json.dumps({"normalizer": forms, "pre_tokenizer": steps, "ignore_merges": whole}, ensure_ascii=False)
        raise ExportError(
            f"{path}/tokenizer.json splits text in a way that is not known here: {shown[:400]}",
            "export --to safetensors keeps it; llama.cpp's converter may know it",
        )
    return names[0]


def _space_prefix(path: Path, data: Mapping[str, Any]) -> bool:
    """Whether a space is put in front of the text; ExportError where spaces are treated as llama.cpp does not."""
    prefix = marked = False
    unknown = []
    for step in _steps(data.get("normalizer"), "normalizers"):
        if step == {"type": "Prepend", "prepend": _SPACE}:
            prefix = True
        elif step == {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}:
            marked = True
        else:
            unknown.append(step)
    for step in _steps(data.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("replacement") == _SPACE and step.get("split") is False:
            prefix, marked = step.get("prepend_scheme", "always") != "never", True
        elif not (marked and step.get("type") == "Split" and step.get("pattern") == {"String": " "}):
            unknown.append(step)  # a split at spaces finds none once they are marked
    if unknown or not marked:
        shown = json.dumps(unknown, ensure_ascii=False)[:300] if unknown else "spaces are not marked"
        raise ExportError(f"{path}/tokenizer.json treats text in a way that is not known here: {shown}")
    return prefix


def _scores(path: Path, tokens: list[str], kinds: list[int], model: Mapping[str, Any]) -> list[float]:
    """llama.cpp joins the neighbours whose result scores best. tokenizer.model has the scores; merges imply them.

    ``kinds`` learns of tokens that tokenizer.model calls unused. ExportError where merges say other than any scores.
    """
    original = _sentencepiece(path / "tokenizer.model")
    out = [-1000.0 if kind in (_CONTROL, _USER_DEFINED) else -10000.0 for kind in kinds]
    if original and all(
        piece == tokens[i] or kinds[i] in (_CONTROL, _USER_DEFINED) for i, (piece, _, _) in enumerate(original)
    ):
        for i, (_, score, kind) in enumerate(original):
            if kinds[i] == _NORMAL:
                out[i], kinds[i] = score, kind
        return out
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == _NORMAL}
    rules = _merges(model)
    ranks: dict[str, int] = {}
    last = ""
    for left, right in rules:
        joined = left + right
        if joined != last and joined in ranks:
            raise ExportError(
                f"{path}/tokenizer.json: its merges of {joined!r} do not stand together, so that no scores give them",
                "put the model's tokenizer.model beside it",
            )
        ranks.setdefault(joined, len(ranks))
        last = joined
    there = set(rules)
    for token in ids:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in ids and pair[1] in ids and pair not in there:
                raise ExportError(
                    f"{path}/tokenizer.json: {pair[0]!r} and {pair[1]!r} are not merged though {token!r} is a token; "
                    "llama.cpp would",
                    "put the model's tokenizer.model beside it",
                )
    for token, i in ids.items():
        out[i] = -float(ranks.get(token, len(ranks)))
    for i, kind in enumerate(kinds):
        if kind in (_BYTE, _UNKNOWN):
            out[i] = 0.0
    return out


def _sentencepiece(file: Path) -> list[tuple[str, float, int]]:
    """(piece, score, type) of each piece in a sentencepiece model, or nothing where there is none.

    Protocol buffers: ModelProto has repeated ``pieces`` (field 1) of piece (1), score (2, float) and type (3); the
    types are numbered as GGUF's.
    """
    try:
        data = memoryview(file.read_bytes())
    except OSError:
        return []
    pieces = []
    try:
        for field, value in _fields(data):
            if field == 1 and isinstance(value, memoryview):
                found = dict(_fields(value))
                score = struct.unpack("<f", found[2])[0] if 2 in found else 0.0
                pieces.append((bytes(found.get(1, b"")).decode("utf-8"), float(score), int(found.get(3, _NORMAL))))
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise ExportError(f"{file} is no sentencepiece model: {error}") from error
    return pieces


def _fields(data: memoryview) -> list[tuple[int, Any]]:
    """(field number, value) of a protocol buffer: int for varints, else the bytes."""
    found: list[tuple[int, Any]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        head = varint()
        kind = head & 7
        if kind == 0:
            found.append((head >> 3, varint()))
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind}")
        size = {1: 8, 5: 4}.get(kind) or varint()
        if at + size > len(data):
            raise ValueError("truncated")
        found.append((head >> 3, data[at : at + size]))
        at += size
    return found


def _specials(
    path: Path, data: Mapping[str, Any], tokens: list[str], config: Mapping[str, Any], template: str | None,
    stops: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Special token ids, whether BOS is put in front, and the chat template."""
    settings = _document(path, "tokenizer_config.json") or {}
    roles = {**(_document(path, "special_tokens_map.json") or {}), **{k: v for k, v in settings.items() if v}}
    generation = _document(path, "generation_config.json") or {}
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    out: dict[str, Any] = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        text = roles.get(f"{role}_token")
        text = text.get("content") if isinstance(text, dict) else text
        found = ids.get(str(text)) if text else None
        if found is None:
            given = config.get(f"{role}_token_id", generation.get(f"{role}_token_id"))
            found = given[0] if isinstance(given, list) and given else given
        if isinstance(found, int) and 0 <= found < len(tokens):
            out[f"tokenizer.ggml.{name}_token_id"] = found
    others = [i for i in stops if i != out.get("tokenizer.ggml.eos_token_id")]
    for i, name in zip(others, ("eot", "eom"), strict=False):
        out[f"tokenizer.ggml.{name}_token_id"] = i
    leading = False
    for step in _steps(data.get("post_processor"), "processors"):
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            first = (step["single"][0].get("SpecialToken") or {}).get("id")
            leading = first is not None and ids.get(first) == out.get("tokenizer.ggml.bos_token_id")
    asked = settings.get("add_bos_token")
    out["tokenizer.ggml.add_bos_token"] = asked if isinstance(asked, bool) else leading
    if template is not None:
        out["tokenizer.chat_template"] = template
    return out


def pack(key: str, value: Any) -> bytes:
    """A key/value pair; of lists also those of bool, int (INT32) and float (FLOAT32)."""
    if not isinstance(value, list) or not value or isinstance(value[0], str):
        return pack_kv(key, value)
    if isinstance(value[0], bool):
        kind, body = GGUFValueType.BOOL, bytes(value)
    elif isinstance(value[0], int):
        kind, body = GGUFValueType.INT32, np.array(value, "<i4").tobytes()
    else:
        kind, body = GGUFValueType.FLOAT32, np.array(value, "<f4").tobytes()
    return pack_text(key) + struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(value)) + body
