"""Hugging Face model folders: checked reading of configuration, safetensors (memory-mapped) and tokenizer files.

Nothing of the model's author is executed: pickled weights and ``auto_map`` code are refused. The layout of a
safetensors file is that of the safetensors README (8 bytes of header length, JSON, data without holes); every length
and offset is checked against the file's real size before it is believed. Shapes are checked against ``config.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgees import nf4
from edgees.errors import ModelError
from edgees.hf_layout import END_OF_TURN

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of the types that weights may have in a file."""
_SIZES = {
    **FLOATS, "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
RULE = "edgees-hf-1: layers' *proj.weight of cols % 64 == 0 as nf4, nested absmax"
"""How floats are brought to 4 bits; part of :meth:`HfFolder.sha256`."""
LARGEST_HEADER = 100_000_000
CHUNK = 1 << 22  # bytes per read
_LINEAR = re.compile(r"model\.layers\.\d+\..*proj\.weight")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors that old checkpoints hold although they follow from the configuration."""


# ---- architectures
@dataclass(frozen=True)
class _Arch:
    """What ``config.json`` leaves to the model class.

    head_dim None: hidden_size / heads; bias: of attention, ``config`` as attention_bias says, ``qkv`` always but not of
    the output; qk_norm: over each ``head`` or ``all`` of them; fused: q, k and v in one matrix, gate and up too.
    """

    tied: bool = False
    head_dim: int | None = None
    theta: float = 10000.0
    bias: str = "config"
    mlp_bias: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: str = ""
    fused: bool = False


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
ARCHS: dict[str, _Arch] = {
    "llama": _Arch(mlp_bias=True),
    "mistral": _Arch(bias=""),
    "qwen2": _Arch(bias="qkv"),
    "qwen3": _Arch(head_dim=128, qk_norm="head"),
    "gemma2": _Arch(tied=True, head_dim=256, norms=_GEMMA_NORMS),
    "gemma3_text": _Arch(tied=True, head_dim=256, theta=1_000_000.0, norms=_GEMMA_NORMS, qk_norm="head"),
    "phi3": _Arch(bias="", fused=True),
    "smollm3": _Arch(tied=True, theta=2_000_000.0, mlp_bias=True),
    "granite": _Arch(mlp_bias=True),
    "olmo2": _Arch(norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="all"),
}
"""``model_type`` -> what its class in transformers assumes."""


@dataclass(frozen=True)
class HfTensor:
    """One parameter under its canonical name.

    dtype: in the file (``U8`` and the like where it is packed); dims: of the parameter; quantised: packed in the file;
    type_name: what the engine holds, ``NF4`` or ``FP4`` for matrices in 4 bits, else ``F32``, ``F16`` or ``BF16``.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    quantised: bool
    type_name: str

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols); a vector is one row."""
        return (1, self.dims[0]) if len(self.dims) == 1 else (self.dims[0], self.dims[1])

    @property
    def vector(self) -> bool:
        return len(self.dims) == 1

    @property
    def four_bit(self) -> bool:
        return self.type_name in ("NF4", "FP4")


# ---- safetensors
@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file. offset: in bytes, from the file's start."""

    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _unique(path: Path, what: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ModelError(f"{path}: {what} {twice!r} occurs twice")
        return found

    return check


def _header(path: Path, data: mmap.mmap, size: int, file: int) -> dict[str, _Stored]:
    """The tensors of a safetensors file of ``size`` bytes. :raises ModelError: whatever does not fit."""
    again = "download the file again"
    if size < 8:
        raise ModelError(f"{path}: truncated: {size} bytes are too few for a safetensors header", again)
    length = int.from_bytes(data[:8], "little")
    if length > LARGEST_HEADER:
        raise ModelError(f"{path} is no safetensors file: its header would be {length} bytes long")
    if 8 + length > size:
        raise ModelError(f"{path}: truncated: its header needs {8 + length} bytes, the file has {size}", again)
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique(path, "tensor"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: its safetensors header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: its safetensors header is no JSON object")
    found: dict[str, _Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        where = f"{path}: tensor {name!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ModelError(f"{where} is described by {entry!r}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _SIZES:
            raise ModelError(f"{where} has unknown dtype {dtype!r}")
        if not _counts(shape):
            raise ModelError(f"{where} has shape {shape!r}")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ModelError(f"{where} has data offsets {offsets!r}")
        begin, end = 8 + length + offsets[0], 8 + length + offsets[1]
        if end > size:
            raise ModelError(f"{path}: truncated: tensor {name!r} ends at byte {end}, the file has {size}", again)
        if end - begin != math.prod(shape) * _SIZES[dtype]:
            raise ModelError(f"{where}: {shape} of {dtype} are not the {end - begin} bytes that its offsets give")
        found[name] = _Stored(file, dtype, tuple(shape), begin, end - begin)
    at, last = 8 + length, "the header"
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != at:
            kind = "overlap" if stored.offset < at else "have a hole between them"
            raise ModelError(f"{path}: {last} and tensor {name!r} {kind} at byte {min(at, stored.offset)}")
        at, last = at + stored.nbytes, f"tensor {name!r}"
    if at != size:
        raise ModelError(f"{path}: {size - at} bytes behind its last tensor belong to none")
    return found


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


class HfFolder:
    """A Hugging Face model folder, its metadata read and its weights mapped read-only.

    config: ``config.json``; arch: its ``model_type``; tensors: canonical name -> :class:`HfTensor`, names in sorted
    order, a tied head left out; notes: what the user should hear about types.
    Linears of the layers are held in 4 bits: those of a 16- or 32-bit model are quantised on access (:mod:`nf4`, nested
    absmax), one at a time, a bitsandbytes 4-bit checkpoint is taken as it is.
    Raises ModelError naming file and tensor for anything that does not fit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"{self.path} is no folder", "give a Hugging Face model folder")
        self._maps: list[mmap.mmap] = []
        self._files: list[Path] = []
        self._views: list[np.ndarray] = []
        self._last: nf4.Quantised | None = None
        self._last_name = ""
        self._sha256: str | None = None
        self.notes: list[str] = []
        try:
            self.config = self.document(CONFIG)
            self.arch = self._check_config()
            self._stored = self._open_weights()
            self.tensors = self._parameters()
        except BaseException:
            self.close()
            raise

    # ---- files
    def inside(self, name: str, named_in: str) -> Path:
        """The file ``name`` of the folder, wherever a link takes it, if that is still the model's own place.

        A snapshot in Hugging Face's cache links to ``../../blobs``: links may lead anywhere in that repository.
        """
        if os.path.isabs(name) or "\\" in name or ".." in Path(name).parts or not name:
            raise ModelError(f"{named_in}: {name!r} leads out of the folder", "it may only name files beside it")
        home = self.path.resolve()
        if home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir():
            home = home.parent.parent
        found = (self.path / name).resolve()
        if not found.is_relative_to(home):
            raise ModelError(
                f"{self.path / name} is a link that leads out of the folder, to {found}",
                "copy the file into the folder, or give the folder that it lies in",
            )
        return found

    def document(self, name: str, needed: bool = True) -> dict[str, Any]:
        """A JSON object of the folder; {} where a file that is not needed is missing."""
        path = self.path / name
        try:
            text = self.inside(name, str(self.path)).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            if not needed:
                return {}
            raise ModelError(f"{self.path} has no {name}", "give a whole Hugging Face model folder") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        try:
            found = json.loads(text, object_pairs_hook=_unique(path, "key"))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ModelError(f"{path} is no JSON object")
        return found

    def _check_config(self) -> str:
        config, where = self.config, self.path / CONFIG
        tokenizer = self.document("tokenizer_config.json", needed=False)
        for document, name in ((config, CONFIG), (tokenizer, "tokenizer_config.json")):
            if document.get("auto_map"):
                raise ModelError(
                    f"{self.path / name} wants the model's own Python code (auto_map), which edgees never runs",
                    f"architectures of transformers need none: take auto_map out of {name}, or use another model",
                )
        arch = config.get("model_type")
        wrapped = next((key for key in ("text_config", "vision_config", "audio_config") if key in config), None)
        experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(k)), None)
        known = f"there are: {', '.join(ARCHS)}"
        if wrapped or arch == "gemma3":
            raise ModelError(f"{where}: {arch!r} is a model for more than text ({wrapped}): not supported", known)
        if experts:
            raise ModelError(f"{where}: {arch!r} is a mixture of experts ({experts}): not supported", known)
        if not isinstance(arch, str) or arch not in ARCHS:
            raise ModelError(f"{where}: model_type {arch!r} is not supported", known)
        quantisation = config.get("quantization_config")
        if isinstance(quantisation, dict):
            method = quantisation.get("quant_method", "bitsandbytes")
            if method != "bitsandbytes" or quantisation.get("load_in_8bit"):
                kind = "bitsandbytes in 8 bits" if method == "bitsandbytes" else method
                raise ModelError(
                    f"{where}: the weights are quantised by {kind}; edgees reads bitsandbytes in 4 bits",
                    "give the 16-bit model: it is quantised to 4 bits on loading",
                )
        return arch

    def _open_weights(self) -> dict[str, _Stored]:
        index = self.path / INDEX
        if not index.is_file():
            if (self.path / SINGLE).is_file():
                return self._map(SINGLE)
            inside = sorted(p.name for p in self.path.iterdir())
            pickles = [name for name in inside if name.endswith(_PICKLES)]
            if pickles:
                raise ModelError(
                    f"{self.path} has its weights only as pickles ({pickles[0]}), which can run any code: never loaded",
                    "use a safetensors version of the model",
                )
            others = [name for name in inside if name.endswith(".safetensors")]
            raise ModelError(
                f"{self.path} has neither {SINGLE} nor {INDEX}" + (f" (there is {others[0]})" if others else ""),
                "give a whole Hugging Face model folder",
            )
        where = self.document(INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()) or not where:
            raise ModelError(f"{index}: weight_map is no object of file names")
        names = sorted(set(where.values()))
        for name in names:
            self.inside(name, str(index))
            if not name.endswith(".safetensors"):
                raise ModelError(f"{index}: {name!r} is no safetensors file", "use a safetensors version of the model")
        if SINGLE not in names and (self.path / SINGLE).is_file():
            raise ModelError(f"{self.path} holds two models: {SINGLE}, and the one in {INDEX}", "remove one of them")
        found: dict[str, _Stored] = {}
        for name in names:
            part = self._map(name)
            for tensor in part:
                if where.get(tensor) != name:
                    raise ModelError(
                        f"{self.path / name}: tensor {tensor!r} is here, but {INDEX} has it in {where.get(tensor)!r}"
                    )
            missing = sorted(tensor for tensor, file in where.items() if file == name and tensor not in part)
            if missing:
                raise ModelError(f"{self.path / name}: tensor {missing[0]!r} of {INDEX} is not in it")
            found |= part
        return found

    def _map(self, name: str) -> dict[str, _Stored]:
        path = self.inside(name, str(self.path / INDEX))
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            hint = f"{INDEX} names it: is the folder complete?" if name != SINGLE else None
            raise ModelError(f"cannot read {self.path / name}: {error.strerror or error}", hint) from error
        if data is None:
            raise ModelError(f"{self.path / name} is empty", "download the file again")
        self._maps.append(data)
        self._files.append(self.path / name)
        found = _header(self.path / name, data, size, len(self._files) - 1)
        self._views.append(np.frombuffer(data, np.uint8))
        return found

    # ---- parameters
    def _number(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise ModelError(f"{self.path / CONFIG}: {key} is {self.config.get(key)!r}, not a positive whole number")
        return value

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, ``lm_head.weight`` among them, as the configuration wants them."""
        arch, config = ARCHS[self.arch], self.config
        hidden, ffn, heads = (self._number(k) for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
        kv = self._number("num_key_value_heads", heads)
        head = self._number("head_dim", arch.head_dim or hidden // heads)
        q, k = heads * head, kv * head
        vocabulary = self._number("vocab_size")
        out: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,),
            "lm_head.weight": (vocabulary, hidden),
        }  # fmt: skip
        attention = {"q_proj": (q, hidden), "k_proj": (k, hidden), "v_proj": (k, hidden), "o_proj": (hidden, q)}
        mlp = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        if arch.fused:
            attention = {"qkv_proj": (q + 2 * k, hidden), "o_proj": (hidden, q)}
            mlp = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
        layer: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in arch.norms}
        for name, shape in attention.items():
            layer[f"self_attn.{name}.weight"] = shape
            if (arch.bias == "config" and config.get("attention_bias")) or (arch.bias == "qkv" and name != "o_proj"):
                layer[f"self_attn.{name}.bias"] = shape[:1]
        for name, shape in mlp.items():
            layer[f"mlp.{name}.weight"] = shape
            if arch.mlp_bias and config.get("mlp_bias"):
                layer[f"mlp.{name}.bias"] = shape[:1]
        if arch.qk_norm:
            layer["self_attn.q_norm.weight"] = (head if arch.qk_norm == "head" else q,)
            layer["self_attn.k_norm.weight"] = (head if arch.qk_norm == "head" else k,)
        layers = self._number("num_hidden_layers")
        if layers > len(self._stored):  # before names are made for each
            raise ModelError(f"{self.path / CONFIG}: {layers} layers, but the weights are {len(self._stored)} tensors")
        for i in range(layers):
            out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return out

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor: what the configuration says, or its class where it is silent."""
        return bool(self.config.get("tie_word_embeddings", ARCHS[self.arch].tied))

    def _parameters(self) -> dict[str, HfTensor]:
        wanted = self._shapes()
        parts: set[str] = set()
        any_quantised = any(nf4.is_quantised(self._stored, name) for name in wanted)
        out: dict[str, HfTensor] = {}
        odd: dict[str, list[str]] = {}
        for name in sorted(wanted):
            if name not in self._stored:
                if name == "lm_head.weight" and self.tied:
                    continue
                self._missing(name)
            out[name] = self._parameter(name, wanted[name], any_quantised, odd)
            if out[name].quantised:
                parts.update(key for key in self._stored if key.startswith(f"{name}."))
        unknown = sorted(set(self._stored) - set(wanted) - parts)
        for name in unknown:
            if not _COMPUTED.fullmatch(name):
                raise ModelError(
                    f"{self._place(name)}: tensor {name!r} is no part of a {self.arch} model of this configuration"
                )
        if self.tied and "lm_head.weight" in out:
            self._check_tied(out)
            del out["lm_head.weight"]
        self.notes += [
            f"{len(names)} tensor(s) kept wider, {reason} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
            for reason, names in odd.items()
        ]
        return out

    def _missing(self, name: str) -> None:
        hint = "the model is incomplete: download it again"
        if name == "lm_head.weight":
            hint = "if the head is the embedding, config.json must say so: tie_word_embeddings true"
        elif f"model.{name}" in self._stored or name.removeprefix("model.") in self._stored:
            hint = "the names lack their usual prefix: save the model with its ...ForCausalLM class"
        raise ModelError(f"{self.path}: tensor {name!r} is missing", hint)

    def _place(self, name: str) -> Path:
        return self._files[self._stored[name].file]

    def _parameter(self, name: str, dims: tuple[int, ...], any_quantised: bool, odd: dict[str, list[str]]) -> HfTensor:
        stored, where = self._stored[name], f"{self._place(name)}: tensor {name!r}"
        packed = nf4.is_quantised(self._stored, name)
        if packed or stored.dtype in ("U8", "I8"):
            if stored.dtype == "I8":
                raise ModelError(f"{where} holds 8-bit codes; edgees reads bitsandbytes in 4 bits")
            q = self._from_state(name)
            if (q.rows, q.cols) != dims:
                raise ModelError(f"{where} is {(q.rows, q.cols)}, config.json wants {dims}")
            if q.cols % nf4.BLOCK == 0:
                return HfTensor(name, stored.dtype, dims, True, q.kind.upper())
            odd.setdefault(f"as F32: their columns are not a multiple of {nf4.BLOCK}", []).append(name)
            return HfTensor(name, stored.dtype, dims, True, "F32")
        if stored.dtype not in FLOATS:
            raise ModelError(f"{where} is {stored.dtype}; weights must be {', '.join(FLOATS)} or packed in 4 bits")
        if stored.shape != dims:
            raise ModelError(f"{where} is {stored.shape}, config.json wants {dims}")
        type_name = stored.dtype
        if _LINEAR.fullmatch(name) and not any_quantised:
            if dims[1] % nf4.BLOCK == 0:
                type_name = "NF4"
            else:
                reason = f"as {stored.dtype}: their columns are not a multiple of {nf4.BLOCK}"
                odd.setdefault(reason, []).append(name)
        return HfTensor(name, stored.dtype, dims, False, type_name)

    def _check_tied(self, tensors: Mapping[str, HfTensor]) -> None:
        head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
        same = head.dtype == embedding.dtype and not head.quantised
        if not same or not np.array_equal(self._bytes(head.name), self._bytes(embedding.name)):
            raise ModelError(
                f"{self._place(head.name)}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                "model.embed_tokens.weight: one of them would be lost",
                "set tie_word_embeddings to false if the head is to be kept, or remove lm_head.weight if it is not",
            )

    # ---- content
    def _bytes(self, name: str) -> np.ndarray:
        """uint8 [nbytes]: what the file holds, nothing copied."""
        stored = self._stored[name]
        return self._views[stored.file][stored.offset : stored.offset + stored.nbytes]

    def _from_state(self, name: str) -> nf4.Quantised:
        """An already packed weight, its arrays views of the file."""
        found: dict[str, np.ndarray] = {}
        for key, stored in self._stored.items():
            if key == name or key.startswith(f"{name}."):
                raw = self._bytes(key)
                found[key] = raw.view("<f4") if stored.dtype == "F32" and key != name else raw
        try:
            return nf4.from_state(found, name)
        except ModelError as error:
            raise ModelError(f"{self._place(name)}: {error.message}", error.hint) from None

    def _floats(self, name: str, begin: int, end: int) -> np.ndarray:
        """float32 [end - begin]: elements of a float tensor, flattened."""
        dtype = self.tensors[name].dtype
        size = FLOATS[dtype]
        raw = self._bytes(name)[begin * size : end * size]
        if dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return raw.view("<f2" if dtype == "F16" else "<f4").astype(np.float32)

    def quantised(self, name: str) -> nf4.Quantised:
        """A 4-bit matrix (``four_bit``, or packed in the file). The last one is kept.

        :raises ModelError: a weight that is NaN or infinite.
        """
        t = self.tensors[name]
        if not (t.four_bit or t.quantised):
            raise ModelError(f"tensor {name!r} is {t.type_name}, not in 4 bits")
        if self._last is None or self._last_name != name:
            if t.quantised:
                self._last = self._from_state(name)
            else:
                dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[t.dtype]
                self._last = nf4.quantise_pieces(
                    lambda begin, end: self._floats(name, begin, end), *t.shape, dtype=dtype,
                    name=f"{self._place(name)}: {name}",
                )  # fmt: skip
            self._last_name = name
        return self._last

    def rows(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols]: what the engine multiplies with, 4-bit weights dequantised."""
        t = self.tensors[name]
        n = self._count(t, row0, n)
        if t.four_bit or t.quantised:
            return self.quantised(name).dequantise(row0, n)
        cols = t.shape[1]
        return self._floats(name, row0 * cols, (row0 + n) * cols).reshape(n, cols)

    def raw(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """uint8 [n, bytes of a row] in the type of ``type_name``; 4-bit blocks interleaved (see :mod:`nf4`)."""
        t = self.tensors[name]
        n = self._count(t, row0, n)
        if t.four_bit:
            return self.quantised(name).interleaved(row0, n)
        if t.quantised:
            return self.rows(name, row0, n).view(np.uint8)
        width = t.shape[1] * FLOATS[t.dtype]
        return self._bytes(name)[row0 * width : (row0 + n) * width].reshape(n, width)

    def array(self, name: str) -> np.ndarray:
        """float32, whole: [rows, cols], or [n] of a vector."""
        return self.rows(name).reshape(self.tensors[name].dims)

    def _count(self, t: HfTensor, row0: int, n: int | None) -> int:
        n = t.shape[0] - row0 if n is None else n
        if row0 < 0 or n < 0 or row0 + n > t.shape[0]:
            raise IndexError(f"rows {row0} to {row0 + n} of {t.name!r}, which has {t.shape[0]}")
        return n

    def first_bad(self, name: str) -> int | None:
        """Number of the first NaN or Inf weight of a float tensor in the file, else None. 4-bit ones have none."""
        t = self.tensors[name]
        if t.quantised:
            return None
        count, step = t.shape[0] * t.shape[1], CHUNK // 4
        for start in range(0, count, step):
            bad = ~np.isfinite(self._floats(name, start, min(start + step, count)))
            if bad.any():
                return start + int(bad.argmax())
        return None

    def sha256(self) -> str:
        """``sha256:<hex>`` over names, types, shapes and bytes of all parameters and :data:`RULE`; computed once.

        Independent of where the folder lies and of how the weights are cut into files.
        """
        if self._sha256 is None:
            digest = hashlib.sha256(RULE.encode())
            for name, t in self.tensors.items():
                keys = sorted(k for k in self._stored if k.startswith(f"{name}.")) if t.quantised else []
                for key in (name, *keys):
                    stored = self._stored[key]
                    digest.update(f"\n{key} {stored.dtype} {list(stored.shape)}\n".encode())
                    data = self._bytes(key)
                    for start in range(0, len(data), CHUNK):
                        digest.update(data[start : start + CHUNK].data)
            self.release()
            self._sha256 = "sha256:" + digest.hexdigest()
        return self._sha256

    def release(self) -> None:
        """Let go of the pages that were read, and of the last quantised matrix; arrays stay valid."""
        self._last = None
        if hasattr(mmap, "MADV_DONTNEED"):
            for data in self._maps:
                data.madvise(mmap.MADV_DONTNEED)

    # ---- tokenizer and rope
    @property
    def template(self) -> str | None:
        """The chat template's source: ``chat_template.jinja``, else ``chat_template`` of tokenizer_config.json."""
        try:
            return self.inside("chat_template.jinja", str(self.path)).read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {self.path / 'chat_template.jinja'}: {error}") from error
        found = self.document("tokenizer_config.json", needed=False).get("chat_template")
        if isinstance(found, list):
            named = (t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default")
            found = next(named, None)
        if found is not None and not isinstance(found, str):
            raise ModelError(f"{self.path / 'tokenizer_config.json'}: chat_template is no text")
        return found

    @property
    def special_ids(self) -> dict[str, int]:
        """Token ids by role: bos, eos (the first of several), padding, of those that the files name."""
        documents = (self.document("generation_config.json", needed=False), self.config)
        found: dict[str, int] = {}
        for role, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
            for ids in (self._ids(document.get(key)) for document in documents):
                if ids:
                    found.setdefault(role, ids[0])
        return found

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer: every eos of the two configurations, and end-of-turn tokens of the template."""
        generation = self.document("generation_config.json", needed=False)
        out = [*self._ids(generation.get("eos_token_id"))]
        out += self._ids(self.config.get("eos_token_id"))
        template = self.template or ""
        added = self.document("tokenizer.json", needed=False).get("added_tokens")
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict) and token.get("content") in END_OF_TURN and token["content"] in template:
                out += self._ids(token.get("id"))
        return list(dict.fromkeys(out))

    def _ids(self, value: Any) -> list[int]:
        """One id or several; what is no token (some files pad with -1) is none."""
        values = value if isinstance(value, list) else [value]
        return [v for v in values if type(v) is int and 0 <= v < self._number("vocab_size")]

    def rope(self) -> dict[str, dict[str, Any]]:
        """Rotary parameters by kind of layer, in one form whichever way ``config.json`` spells them.

        {"full_attention": {"rope_type", "rope_theta", ...}}, and "sliding_attention" where its layers differ (Gemma 3).
        rope_type: default, linear, dynamic, yarn, llama3 or longrope, with the keys that it needs.
        :raises ModelError: a type not known, a parameter that is missing, or two spellings that contradict each other.
        """
        return normal_rope(self.config, ARCHS[self.arch].theta, str(self.path / CONFIG))

    # ---- end
    def close(self) -> None:
        """Let go of the files (arrays still held keep their own mapping)."""
        self._last = None
        self._views = []
        for data in self._maps:
            try:
                data.close()
            except BufferError:  # an array still looks into it: the mapping goes when that goes
                continue
        self._maps = []

    def __enter__(self) -> HfFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- rope
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_MAY = {
    "yarn": (
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor"),
    "dynamic": ("original_max_position_embeddings",),
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")


def normal_rope(config: Mapping[str, Any], theta: float, where: str) -> dict[str, dict[str, Any]]:
    """See :meth:`HfFolder.rope`. theta: where the configuration names none."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{where}: {key} is {value!r}, no object")
    theta = config.get("rope_theta") or theta
    common: dict[str, Any] = {"rope_theta": theta}
    if config.get("partial_rotary_factor") is not None:
        common["partial_rotary_factor"] = config["partial_rotary_factor"]
    fallback = config.get("original_max_position_embeddings"), config.get("max_position_embeddings")

    def normal(given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise ModelError(f"{where}: rope_parameters has {given!r} where an object belongs")
        return _one_rope({**common, **given}, fallback, where)

    out: dict[str, dict[str, Any]] = {}
    if new:
        nested = {kind: new[kind] for kind in _KINDS if new.get(kind) is not None}
        out = {kind: normal(given) for kind, given in nested.items()} or {"full_attention": normal(new)}
    if old or not out:
        spelt = {"full_attention": normal(old or {})}
        if out and spelt["full_attention"] != out.get("full_attention"):
            raise ModelError(
                f"{where}: rope_scaling ({old}) and rope_parameters ({new}) contradict each other", "remove one of them"
            )
        out = out or spelt
    local = config.get("rope_local_base_freq", 10000.0 if config.get("model_type") == "gemma3_text" else None)
    if local is not None and "sliding_attention" not in out:
        out["sliding_attention"] = _one_rope({"rope_theta": local}, fallback, where)
    return out


def _one_rope(given: dict[str, Any], lengths: tuple[Any, Any], where: str) -> dict[str, Any]:
    named = given.pop("type", None), given.pop("rope_type", None)
    kinds = {"longrope" if kind == "su" else str(kind) for kind in named if kind}
    if len(kinds) > 1:
        raise ModelError(
            f"{where}: rope scaling is of type {' and '.join(sorted(kinds))} at once", "remove one of them"
        )
    kind = kinds.pop() if kinds else "default"
    if kind not in _ROPE_NEEDS:
        raise ModelError(
            f"{where}: rope scaling of type {kind!r} is not supported", f"there are: {', '.join(_ROPE_NEEDS)}"
        )
    out: dict[str, Any] = {"rope_type": kind}
    if kind in ("yarn", "longrope", "llama3") and (lengths[0] or lengths[1]):
        if lengths[0]:  # beside the scaling it counts more than in it (Phi-3)
            given["original_max_position_embeddings"] = lengths[0]
        given.setdefault("original_max_position_embeddings", lengths[1])
    for key, value in given.items():
        if key in ("rope_theta", "partial_rotary_factor") or key in _ROPE_NEEDS[kind] or key in _ROPE_MAY.get(kind, ()):
            if value is not None:
                out[key] = _rope_value(key, value, where)
        elif value is not None and kind != "default":
            raise ModelError(f"{where}: rope scaling {kind!r} has no parameter {key!r}")
    missing = [key for key in _ROPE_NEEDS[kind] if key not in out]
    if missing:
        raise ModelError(f"{where}: rope scaling {kind!r} without {missing[0]}")
    if kind == "default" and given.get("factor") not in (None, 1, 1.0):
        raise ModelError(f"{where}: rope scaling by {given['factor']} without a type", "add rope_type, such as linear")
    return out


def _rope_value(key: str, value: Any, where: str) -> Any:
    numbers: Iterable[Any] = value if isinstance(value, list) else [value]
    if key == "truncate" and isinstance(value, bool):
        return value
    listed = key.endswith(("short_factor", "long_factor"))
    if isinstance(value, list) != listed or not all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e30 for v in numbers
    ):
        raise ModelError(f"{where}: rope parameter {key} is {value!r}")
    if key == "original_max_position_embeddings":
        return int(value)
    return [float(v) for v in value] if listed else float(value)
