"""The torch engine: a Hugging Face model whose linears are held in 4 bits, answering for many members at once.

transformers' model code computes the graph (rotary embedding, attention, gates); every module that holds a weight is
replaced by ours, whose operators (:mod:`edgees.ops`) put the noise into the product. On a GPU they run CUDA kernels,
on a CPU the same C code as the llama.cpp engine. Keys and values lie in one block per layer, a stream per sequence;
the scheduler of :mod:`edgees.backends.streams` fills them, as it does llama.cpp's.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgees import blocks, native, nf4, noise
from edgees.backends.base import CENTRE, Member, Memory, TensorInfo
from edgees.backends.streams import SEQUENCES, Scheduler, StreamEngine, output_rows
from edgees.errors import MissingExtra, ModelError, UsageError, WillNotFit
from edgees.hf_files import HfFolder
from edgees.template import ChatTemplate

if TYPE_CHECKING:
    from edgees.delta import Delta

log = logging.getLogger("edgees.torch")

MICRO_BATCH = {"cpu": 256, "cuda": 2048}
"""Tokens per call: where the product's cost per token stops to fall."""
CHUNK_BYTES = 4 << 20
ATTENTION = "edgees"
"""Name under which our attention is known to transformers."""


@lru_cache(maxsize=1)
def _import() -> tuple[Any, Any, Any]:
    """(torch, transformers, edgees.ops). Errors: MissingExtra naming what is absent."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning beside our own threads costs 20x
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtra(
            f"the torch engine needs torch and transformers: {error}", 'pip install "edgees[torch]"'
        ) from error
    from edgees import ops

    transformers.AttentionInterface.register(ATTENTION, _attention)
    return torch, transformers, ops


def version() -> str:
    """Versions of torch and transformers. Errors: MissingExtra when one is absent."""
    torch, transformers, _ = _import()
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, softcap: float | None = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attention without a copy of keys and values for each query head: heads that share them become rows of one.

    query [B, heads, T, d]; key, value [B, kv heads, L, d]; attention_mask float [B, 1, heads/kv * T, L], added.
    """
    torch, _, _ = _import()
    batch, heads, width, dim = query.shape
    kv = key.shape[1]
    rows = query.reshape(batch, kv, heads // kv * width, dim)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = torch.matmul(rows, key.transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap + attention_mask
        out = torch.matmul(torch.softmax(scores.float(), dim=-1).to(value.dtype), value)
    return out.reshape(batch, heads, width, dim).transpose(1, 2), None


@dataclass
class _Weight:
    """A weight on the device, with what was learned beside it."""

    info: TensorInfo
    type_name: str
    base: Any
    """Packed codes; or the float weight; or, float32, a vector."""
    absmax: Any = None
    scale: float = 0.0
    """What amplitudes are multiplied with; 0: not tuned."""
    plane: Any = None
    bits: int = 0
    span: int = 0
    factors: Any = None
    pool: Any = None
    delta: Any = None

    @property
    def nbytes(self) -> int:
        parts = (self.base, self.absmax)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    @property
    def learned_bytes(self) -> int:
        parts = (self.plane, self.factors, self.pool, self.delta)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


class _Call:
    """What all modules need to know of the call that is going on."""

    def __init__(self) -> None:
        self.noise, self.rank = noise.KINDS.index("lowrank"), 1
        self.members: Any = None
        """ops.Members of all columns, row by row of [streams, width]."""
        self.stream_member: Any = None
        """int64 [streams]: index of each stream's member."""


def _modules(torch: Any) -> tuple[Any, Any]:
    """Our replacements of nn.Linear and nn.Embedding."""
    ops = torch.ops.edgees

    class Linear(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, call: _Call, weight: _Weight, bias: Any) -> None:
            super().__init__()
            self.call, self.held, self.bias = call, weight, bias  # bias: None or a _Vector

        def forward(self, x: Any, members: Any = None) -> Any:
            call, w = self.call, self.held
            m = call.members if members is None else members
            who = (m.keys, m.amplitudes, m.slots, m.owner, call.noise, call.rank)
            learned = (w.plane, w.bits, w.span, w.factors, w.pool)
            if w.absmax is not None:
                y = ops.nf4_linear_perturbed(
                    x, w.base, w.absmax, None, None, 0.0, w.type_name.lower(), w.info.rows, *who, w.info.id, w.scale,
                    *learned,
                )  # fmt: skip
            else:
                y = ops.linear_perturbed(x, w.base, *who, w.info.id, w.scale, w.info.rho / 4, *learned)
            return y if self.bias is None else y + self.bias.of_streams(x.dim())

    class Embedding(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, call: _Call, weight: _Weight, dtype: Any, by: float | None) -> None:
            super().__init__()
            self.call, self.held, self.dtype, self.by = call, weight, dtype, by

        def forward(self, ids: Any) -> Any:
            call, w, m = self.call, self.held, self.call.members
            out = ops.embedding_perturbed(
                ids.reshape(-1), w.base, m.keys, m.amplitudes, m.slots, m.owner, call.noise, call.rank, w.info.id,
                w.scale, w.info.rho / 4, w.plane, w.bits, w.span, w.factors, w.pool,
            ).to(self.dtype)  # fmt: skip
            if self.by is not None:
                out = out * torch.tensor(self.by, dtype=self.dtype, device=out.device)
            return out.reshape(*ids.shape, -1)

    return Linear, Embedding


class _Vector:
    """A norm's weight or a bias: one vector per member, made anew when the members change."""

    def __init__(self, call: _Call, weight: _Weight, dtype: Any) -> None:
        self.call, self.held, self.dtype = call, weight, dtype
        self._made: Any = None

    def remake(self) -> None:
        torch, _, _ = _import()
        call, w = self.call, self.held
        m = call.members
        rows = torch.ops.edgees.vectors_perturbed(
            w.base, w.delta, m.keys, m.amplitudes, call.noise, call.rank, w.info.id, w.scale
        )
        self._made = rows.to(self.dtype)[call.stream_member]

    def of_streams(self, dims: int) -> Any:
        """[streams, 1, ..., cols] of ``dims`` dimensions."""
        return self._made.view(self._made.shape[0], *[1] * (dims - 2), self._made.shape[1])

    def attach(self, norm: Any) -> None:
        """Make a norm module use the members' vectors, whatever it does with them."""
        del norm._parameters["weight"]
        norm.weight = None

        def before(module: Any, args: tuple[Any, ...]) -> None:
            module.weight = self.of_streams(args[0].dim())

        norm.register_forward_pre_hook(before)


class _Streams:
    """Keys and values of ``parallel`` sequences of ``length`` tokens (:class:`streams.Streams`).

    To transformers it is a cache: attention modules call :meth:`update`.
    """

    seamless = False
    ragged = True
    is_compileable = False

    def __init__(self, engine: TorchEngine, length: int, parallel: int) -> None:
        torch = engine.torch
        self.engine, self.length, self.parallel = engine, length, parallel
        self.micro = max(MICRO_BATCH.get(engine.device.type, 2048), parallel)
        self.outputs = output_rows(engine.vocabulary, parallel, self.micro)
        shape = (parallel, length, engine.kv_heads, engine.head_dim)
        try:  # zeros, because what no one may see is still multiplied with 0; untouched pages cost nothing
            self.k = [torch.zeros(shape, dtype=engine.dtype, device=engine.device) for _ in range(engine.layers)]
            self.v = [torch.zeros(shape, dtype=engine.dtype, device=engine.device) for _ in range(engine.layers)]
        except RuntimeError as error:
            raise WillNotFit(
                f"no memory for {parallel} sequences of {length} tokens: {str(error).splitlines()[0]}",
                "lower --parallel or --context",
            ) from error
        self.held = [0] * parallel
        self.scheduler = Scheduler(self, engine)
        self._rows: Any = None
        self._at: Any = None
        self._first = self._last = self._reach = 0
        self.logits: Any = None  # handles point into it

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def copy(self, source: int, target: int) -> None:
        n = self.held[source]
        for layer in (*self.k, *self.v):
            layer[target, :n] = layer[source, :n]
        self.held[target] = n

    def trim(self, stream: int, length: int) -> None:
        self.held[stream] = min(self.held[stream], length)

    # ---- what transformers asks of a cache
    def update(self, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store [B, kv heads, T, d] at the call's places; all that its streams hold, [B, kv heads, L, d]."""
        found = []
        for store, new in ((self.k[layer_idx], key), (self.v[layer_idx], value)):
            store[self._rows, self._at] = new.transpose(1, 2)
            found.append(store[self._first : self._last, : self._reach].transpose(1, 2))
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length

    # ---- computing
    def decode(
        self,
        streams: Sequence[int],
        tokens: Sequence[Sequence[int]],
        members: Sequence[Member],
        wanted: Sequence[Sequence[bool]],
        starts: Sequence[int],
    ) -> np.ndarray:
        engine, torch = self.engine, self.engine.torch
        lengths, device = list(map(len, tokens)), engine.device
        width = max(lengths)
        # A shorter piece is filled up with its last token at its last place: what is stored there stays the same.
        ids = torch.tensor([[*t, *t[-1:] * (width - len(t))] for t in map(list, tokens)], device=device)
        wanted = [[*w, *[False] * (width - len(w))] for w in wanted]
        begins, last = torch.tensor([starts, [n - 1 for n in lengths]], device=device)[:, :, None]
        places = begins + torch.minimum(torch.arange(width, device=device), last)
        self._rows = torch.tensor(streams, device=device)[:, None]
        self._at = places
        ends = [start + n for start, n in zip(starts, lengths, strict=True)]
        self._first, self._last, self._reach = streams[0], streams[-1] + 1, max(ends)
        with torch.inference_mode():
            outs = engine.announce(members, width, wanted)
            hidden = engine.body(ids, places, self._masks(places), self)
            chosen = hidden.reshape(-1, hidden.shape[-1])[torch.tensor(wanted, device=device).reshape(-1)]
            self.logits = engine.head(chosen, outs).to("cpu", torch.float32).contiguous()
        for stream, end in zip(streams, ends, strict=True):
            self.held[stream] = end
        first, step = self.logits.data_ptr(), self.logits.stride(0) * 4
        return np.asarray(np.arange(self.logits.shape[0], dtype=np.uint64) * np.uint64(step) + np.uint64(first))

    def _masks(self, places: Any) -> Any:
        """What is added to scores, [B, 1, heads/kv heads * T, L]; by kind of layer where the model has several."""
        engine, torch = self.engine, self.engine.torch
        cells = torch.arange(self._reach, device=engine.device)
        distance = places[:, None, :, None] - cells
        made = {}
        for kind, window in engine.windows.items():
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(seen.shape, dtype=engine.dtype, device=engine.device)
            mask.masked_fill_(~seen, float("-inf"))
            made[kind] = mask.repeat(1, 1, engine.groups, 1)
        return made if engine.several_masks else next(iter(made.values()))


class TorchEngine(StreamEngine):
    """A Hugging Face folder (never modified), its linears in 4 bits, on a GPU or a CPU.

    path: the folder. context: tokens per sequence, 0 = by need. parallel: sequences at once, 0 = 32. threads: of our
    products and of torch, 0 = all processors. params: regular expression over tensor names; only those it finds are
    tuned. device: ``cuda``, ``cuda:1``, ``cpu``; empty: a GPU where there is one.

    Errors: ModelError (damaged, unsupported or non-finite model), MissingExtra (no torch or transformers), WillNotFit,
    UsageError (no such device, or nothing to tune).
    """

    name = "torch"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        context: int = 0,
        parallel: int = 0,
        threads: int = 0,
        params: str | None = None,
        device: str = "",
    ) -> None:
        self.torch, self._transformers, ops = _import()
        torch = self.torch
        self.folder = HfFolder(Path(path))
        self.threads = native.threads(threads)
        torch.set_num_threads(self.threads)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            why = ops.describe()["why"] if not torch.cuda.is_available() else f"there are {torch.cuda.device_count()}"
            raise UsageError(
                f"device = {device}: no such GPU: {why}", "--device cpu, or leave it out; see edgees doctor"
            )
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        if self.device.type != "cpu":
            ops.arm(self.device)  # compiles, tries and, where need be, warns now rather than in the first call
        self._context_wanted, self._parallel = context, parallel or SEQUENCES
        self._streams: _Streams | None = None
        self._delta: Delta | None = None
        self._call = _Call()
        self._members: tuple[Member, ...] = ()
        self._weights: dict[str, _Weight] = {}
        self._vectors: list[_Vector] = []
        self._frozen: list[tuple[str, str]] = []
        self._kept: list[np.ndarray] = []  # whose memory tensors use
        self._pinned: Any = None
        self._load_config()
        self._load_text()
        pattern = re.compile(params) if params else None
        self._infos = [self._load(name, pattern) for name in self.folder.tensors]
        self._tensors = [t for t in self._infos if self._weights[t.name].scale]
        if not self._tensors:
            raise UsageError(f"{self.folder.path}: no tensor can be tuned", "see --params")
        noise.check_ids([t.name for t in self._tensors])
        self._build()

    # ---- opening
    def _load_config(self) -> None:
        transformers = self._transformers
        config = transformers.AutoConfig.from_pretrained(self.folder.path, local_files_only=True)
        config._attn_implementation = ATTENTION
        if hasattr(config, "quantization_config"):  # the weights are ours to read
            del config.quantization_config
        self.config = config
        self.layers = int(config.num_hidden_layers)
        heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.groups = heads // self.kv_heads
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.vocabulary = int(config.vocab_size)
        self.trained_context = int(config.max_position_embeddings)
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if kinds:
            self.windows = {k: window if k == "sliding_attention" else None for k in dict.fromkeys(kinds)}
        else:
            self.windows = {"": window}

    def _load_text(self) -> None:
        from tokenizers import Tokenizer

        file = self.folder.path / "tokenizer.json"
        if file.exists():
            self._tokenizer = Tokenizer.from_file(str(file))
        else:
            fast = self._transformers.AutoTokenizer.from_pretrained(self.folder.path, local_files_only=True)
            self._tokenizer = fast.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings, ids = self.folder.document("tokenizer_config.json", needed=False), self.folder.special_ids

        def role(name: str) -> int | None:
            """The tokenizer's own word for it wins, as in transformers and in the GGUF form."""
            text = settings.get(f"{name}_token")
            text = text.get("content") if isinstance(text, dict) else text
            token = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
            return ids.get(name) if token is None else int(token)

        def text(token: int | None) -> str:
            return "" if token is None else self._tokenizer.id_to_token(token) or ""

        bos, eos = role("bos"), role("eos")
        self._bos = -1 if bos is None else bos
        asked = settings.get("add_bos_token")
        probe = self._tokenizer.encode("x", add_special_tokens=True).ids
        self._add_bos = bos is not None and (asked if isinstance(asked, bool) else probe[:1] == [bos])
        self._pieces = _Pieces(self._tokenizer)
        self.template = ChatTemplate(self.folder.template, bos_token=text(bos), eos_token=text(eos))
        self._stop = frozenset({*self.folder.stop_ids, *([] if eos is None else [eos]), *self._behind_answer()})

    def _control(self, token: int) -> bool:
        return self._pieces.special(token)

    def control_texts(self) -> list[str]:
        return [str(t.content) for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]

    def _load(self, name: str, pattern: re.Pattern[str] | None) -> TensorInfo:
        """Bring a tensor to the device and measure its RMS."""
        torch = self.torch
        tensor = self.folder.tensors[name]
        vector, (rows, cols) = tensor.vector, tensor.shape
        absmax = None
        if tensor.type_name in ("NF4", "FP4"):
            stored = self.folder.quantised(name)
            base, absmax = self._to(stored.packed), self._to(stored.absmax_float32())
            pieces: Iterator[np.ndarray] = (stored.dequantise(r, n) for r, n in _pieces_of(rows, cols))
        else:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.type_name]
            base = self._to(self.folder.raw(name, 0, rows)).view(dtype).reshape(cols if vector else (rows, cols))
            pieces = (self.folder.rows(name, r, n) for r, n in _pieces_of(rows, cols))
        total = sum(float(np.square(p, dtype=np.float64).sum()) for p in pieces)
        if not np.isfinite(total):
            raise ModelError(f"{self.folder.path}: tensor {name} has a NaN or infinite weight", "get the model again")
        rho = float(np.float32(np.sqrt(total / (rows * cols))))
        wanted = pattern is None or pattern.search(name) is not None
        if not wanted or rho == 0.0:
            self._frozen.append((name, "all its weights are zero" if wanted else "not chosen by --params"))
        info = TensorInfo(name, name, rows, cols, vector, rho)
        self._weights[name] = _Weight(info, tensor.type_name, base, absmax, rho if wanted else 0.0)
        self.folder.release()
        return info

    def _to(self, array: np.ndarray) -> Any:
        """A tensor on the device; on a CPU the array's own memory."""
        flat = np.ascontiguousarray(array)
        if not flat.flags.writeable:  # torch takes only what it might write to
            memory = (ctypes.c_ubyte * flat.nbytes).from_address(flat.ctypes.data)
            self._kept.append(flat)
            flat = np.frombuffer(memoryview(memory), flat.dtype)
        return self.torch.from_numpy(flat.reshape(-1)).to(self.device)

    def _build(self) -> None:
        """transformers' model without its weights, ours in their places."""
        torch, transformers = self.torch, self._transformers
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(self.config)
        Linear, Embedding = _modules(torch)
        call = self._call
        used: set[str] = set()

        def held(name: str) -> _Weight:
            used.add(name)
            if name not in self._weights:
                raise ModelError(f"{self.folder.path} lacks tensor {name}", "is the folder complete?")
            return self._weights[name]

        def vector(name: str) -> _Vector:
            made = _Vector(call, held(name), self.dtype)
            self._vectors.append(made)
            return made

        for name, module in list(model.named_modules()):
            parent = model.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            if isinstance(module, torch.nn.Linear):
                tied = name == "lm_head" and self.folder.tied
                weight = held("model.embed_tokens.weight" if tied else f"{name}.weight")
                if (weight.info.rows, weight.info.cols) != (module.out_features, module.in_features):
                    raise ModelError(
                        f"{self.folder.path}: {weight.info.name} is {weight.info.rows} x {weight.info.cols}; "
                        f"{module.out_features} x {module.in_features} is needed"
                    )
                setattr(parent, leaf, Linear(call, weight, None if module.bias is None else vector(f"{name}.bias")))
            elif isinstance(module, torch.nn.Embedding):
                by = getattr(module, "scalar_embed_scale", None)
                setattr(parent, leaf, Embedding(call, held(f"{name}.weight"), self.dtype, by))
            elif set(module._parameters) == {"weight"}:
                vector(f"{name}.weight").attach(module)
            elif module._parameters:
                raise ModelError(f"{name} ({type(module).__name__}) has parameters that this engine does not know")
            elif any(b.is_meta for b in module._buffers.values() if b is not None):
                setattr(parent, leaf, type(module)(config=self.config).to(self.device))  # rotary frequencies
        model.eval()
        missing = set(self._weights) - used
        if missing:
            self._frozen += [(name, "the model's code does not use it") for name in sorted(missing)]
            self._tensors = [t for t in self._tensors if t.name not in missing]
        self._model = model
        body = type(model.model).forward
        self._cache_word = (
            "cache" if "cache" in inspect.signature(inspect.unwrap(body)).parameters else "past_key_values"
        )
        source = inspect.getsource(inspect.unwrap(body))
        self.several_masks = "attention_mask, dict" in source
        if len(self.windows) > 1 and not self.several_masks:
            raise ModelError(f"{type(model).__name__} has layers of several kinds, which this engine cannot tell apart")

    # ---- what it is
    @property
    def base_hash(self) -> str:
        return self.folder.sha256()

    # ---- text
    def _tokenize(self, text: str, special: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = not special
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def piece(self, token: int) -> bytes:
        return self._pieces.of(token)

    # ---- what has been learned
    def attach(self, delta: Delta) -> None:
        """Make ``delta`` part of every member. Errors: UsageError when it belongs to other tensors."""
        spec = delta.spec
        missing = [
            t.name for t in spec.tensors
            if t.name not in self._weights
            or (t.rows, t.cols) != (self._weights[t.name].info.rows, self._weights[t.name].info.cols)
        ]  # fmt: skip
        if missing:
            raise UsageError(
                f"{self.folder.path} lacks tensors of this run, or has them in another shape: {missing[:3]}"
            )
        if spec.view == "lattice":
            raise UsageError("the torch engine has no lattice of its own", "use --scope full or adapter")
        self._delta = delta
        if self.device.type == "cuda":
            delta.updater = self.update_piece
        self._call.noise, self._call.rank = noise.KINDS.index(spec.kind), spec.rank
        for w in self._weights.values():
            w.scale, w.bits, w.span = 0.0, 0, 0
            w.plane = w.factors = w.pool = w.delta = None
        for t in spec.tensors:
            w = self._weights[t.name]
            w.info, w.scale = t, spec.scale(t)
            if spec.view == "adapter" and not t.vector:
                packed = noise.pool_packed(spec.seed, t.id, t.cols, spec.factors)
                w.pool = self._to(packed.view(np.int32)).reshape(packed.shape)
        self.refresh()

    def refresh(self) -> None:
        delta = self._delta
        if delta is None:
            return
        spec = delta.spec
        for t in spec.tensors:
            w = self._weights[t.name]
            if t.vector:
                w.delta = self._to(np.array(delta.vector(t.name), np.float32))
            elif spec.view == "adapter":
                w.factors = self._to(delta.factors(t.name)).reshape(t.rows, spec.factors)
            else:
                self._plane(w, delta, spec.bits or 8)
        self._members = ()
        if self._streams:
            self._streams.scheduler.forget()

    def update_piece(
        self, info: TensorInfo, piece: np.ndarray, row: int, keys: np.ndarray, coefs: np.ndarray, keep: float
    ) -> None:
        """:data:`edgees.delta.Updater` on the device, through one pinned buffer: the delta itself stays on the disk."""
        torch, spec = self.torch, self._delta.spec if self._delta else None
        assert spec is not None
        if self._pinned is None or self._pinned.numel() < piece.size:
            self._pinned = torch.empty(piece.size, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        pinned = self._pinned[: piece.size].view(piece.shape)
        pinned.numpy()[:] = piece
        there = pinned.to(self.device, non_blocking=True)
        torch.ops.edgees.es_update_(
            there, torch.from_numpy(keys.view(np.int64)).to(self.device), torch.from_numpy(coefs).to(self.device), keep,
            row, info.id, noise.KINDS.index(spec.kind), spec.rank, info.vector,
        )  # fmt: skip
        piece[:] = pinned.copy_(there).numpy()

    def _plane(self, w: _Weight, delta: Delta, bits: int) -> None:
        t = w.info
        if w.plane is None:
            shape = (t.rows, blocks.plane_row_bytes(bits, t.cols))
            w.plane = self.torch.empty(shape, dtype=self.torch.uint8, device=self.device)
        w.bits, w.span = bits, 0
        if delta.generation == 0:
            w.plane.fill_(blocks.EMPTY_STEPS[bits])
            return
        raw = self._raw_rows(w)
        here = w.plane if w.plane.device.type == "cpu" else self.torch.empty(w.plane.shape, dtype=w.plane.dtype)
        w.span = blocks.plane_fill(
            w.type_name,
            lambda: (
                (r, raw(r, n), delta.rows(t.name, r, n), np.arange(r, r + n, dtype=np.int32))
                for r, n in _pieces_of(t.rows, t.cols)
            ),
            noise.dither_key(delta.spec.seed), t.id, bits, t.rho, here.numpy(),
        )  # fmt: skip
        if here is not w.plane:
            w.plane.copy_(here)

    def _raw_rows(self, w: _Weight) -> Any:
        """(first row, rows) -> uint8 rows in the type of the codecs, from the device's own copy."""
        t = w.info
        if w.absmax is None:
            bytes_ = w.base.view(self.torch.uint8).reshape(t.rows, -1)
            return lambda r, n: bytes_[r : r + n].cpu().numpy()
        packed, absmax = w.base.cpu().numpy(), w.absmax.cpu().numpy()
        stored = nf4.Quantised(w.type_name.lower(), t.rows, t.cols, packed, absmax, None)
        return stored.interleaved

    def effective(self, name: str) -> np.ndarray:
        """float32 [rows, cols]: the weights that the centre is scored with (base and what was learned)."""
        w = self._weights[name]
        t = w.info
        if t.vector:
            base = w.base.float().cpu().numpy()[None, :]
            return np.asarray(base if w.delta is None else base + w.delta.cpu().numpy()[None, :])
        raw = self._raw_rows(w)(0, t.rows)
        if w.plane is not None:
            plane = w.plane.cpu().numpy()
            return blocks.effective(w.type_name, raw, t.rows, t.cols, plane, w.bits, w.span, t.rho)
        base = blocks.decode(w.type_name, raw, t.rows, t.cols)
        if w.factors is None or self._delta is None:
            return base
        return np.asarray(base + self._delta.rows(name, 0, t.rows))

    # ---- running
    def scheduler(self, length: int, jobs: int) -> Scheduler:
        """Streams for sequences of ``length`` tokens. Nothing is taken over from an earlier call: what is computed with
        what decides the last bits here, and a resumed run must find the same."""
        length = self.context_length if self._context_wanted else min(length, self.context_length)
        length = -(-length // 256) * 256
        if self._streams is None or self._streams.length < length:
            self._streams = None
            self._streams = _Streams(self, length, self._parallel)
        self._streams.scheduler.forget()
        return self._streams.scheduler

    def own(self, member: Member) -> None:
        """:raises UsageError: a perturbed member where no noise is attached."""
        if member.amplitude and self._delta is None:
            raise UsageError("this engine has no noise attached: only the unperturbed centre can be run")

    def announce(self, members: Sequence[Member], width: int, wanted: Sequence[Sequence[bool]]) -> Any:
        """Tell the modules whose the columns of the next call are; whose its rows of logits are comes back."""
        torch, call = self.torch, self._call
        _, _, ops = _import()
        distinct: dict[tuple[int, float, int], int] = {}
        owner = [distinct.setdefault((m.key, m.amplitude, m.slot), len(distinct)) for m in members]
        keys = np.array([k for k, _, _ in distinct], np.uint64).view(np.int64)
        table = [
            torch.from_numpy(keys).to(self.device),
            torch.tensor([a for _, a, _ in distinct], dtype=torch.float32, device=self.device),
            torch.tensor([s for _, _, s in distinct], dtype=torch.int32, device=self.device),
        ]
        of_stream = torch.tensor(owner, dtype=torch.int32, device=self.device)
        call.stream_member = of_stream.long()
        call.members = ops.Members(*table, of_stream.repeat_interleave(width))
        if tuple(members) != self._members:
            for vector in self._vectors:
                vector.remake()
            self._members = tuple(members)
        outs = [o for o, want in zip(owner, wanted, strict=True) for _ in range(sum(want))]
        return ops.Members(*table, torch.tensor(outs, dtype=torch.int32, device=self.device))

    def body(self, ids: Any, places: Any, masks: Any, streams: _Streams) -> Any:
        """Hidden states [B, T, hidden] behind the last norm."""
        return self._model.model(
            input_ids=ids, position_ids=places, attention_mask=masks, use_cache=True, **{self._cache_word: streams}
        ).last_hidden_state

    def head(self, hidden: Any, members: Any) -> Any:
        """Logits [n, vocabulary] of hidden states [n, hidden], as the model's own head makes them."""
        logits = self._model.lm_head(hidden, members)
        if by := getattr(self.config, "logits_scaling", None):
            logits = logits / by
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = self.torch.tanh(logits / cap) * cap
        return logits

    def logits(self, tokens: Sequence[int], member: Member = CENTRE) -> np.ndarray:
        """float32 [len(tokens), vocabulary]: logits after each token (checks and tests; not for rollouts)."""
        self.own(member)
        self.scheduler(len(tokens), 1)
        streams = self._streams
        assert streams
        out: list[np.ndarray] = []
        for at in range(0, len(tokens), streams.outputs):
            piece = list(tokens[at : at + streams.outputs])
            streams.decode([0], [piece], [member], [[True] * len(piece)], [at])
            out.append(streams.logits.numpy().copy())
        return np.concatenate(out)

    def memory(self) -> Memory:
        weights = list(self._weights.values())
        return Memory(
            weights=sum(w.nbytes for w in weights),
            kv=self._streams.nbytes if self._streams else 0,
            learned=sum(w.learned_bytes for w in weights),
        )

    # ---- closing
    def close(self) -> None:
        self._streams = None
        self._weights.clear()
        self._vectors.clear()
        self._model = None
        self._delta = None
        self.template.close()
        self.folder.close()

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pieces:
    """Bytes of each token, by the kind of vocabulary: bytes as letters (GPT-2), or pieces with ``<0xNN>``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._bytes = _byte_letters() if '"ByteLevel"' in tokenizer.to_str() else None

    def special(self, token: int) -> bool:
        return token in self._added and bool(self._added[token].special)

    def of(self, token: int) -> bytes:
        """Nothing for special tokens."""
        if token in self._added:
            return b"" if self._added[token].special else str(self._added[token].content).encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:  # a row of the embedding that no token has
            return b""
        if self._bytes is not None:
            return bytes(self._bytes[c] for c in text)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return str(text).replace("\u2581", " ").encode()


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Letter -> byte, as GPT-2's byte-level BPE writes bytes: printable ones as they are, others from 256 up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _pieces_of(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK_BYTES // (4 * cols))
    return ((r, min(step, rows - r)) for r in range(0, rows, step))
