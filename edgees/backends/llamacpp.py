"""The CPU engine: stock llama-cpp-python, with our backend inside its graph (csrc/llama/accel.cpp).

llama.cpp tokenizes, keeps the KV cache, attends and rotates; every operation that reads a tuned weight is ours and
answers for the member to whom each column belongs. One context serves many members at once.

Whose column is it? With one KV stream per sequence llama.cpp forms micro-batches by its own rule. Every call made
here is one that the rule leaves whole and in order: sequences of neighbouring ids, the same number of tokens each,
no more tokens than a micro-batch. The backend compares the token ids that it sees in the graph with those
submitted, and fails the call if they differ.
"""

from __future__ import annotations

import codecs
import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgees import blocks, native, noise
from edgees.backends.base import (
    CENTRE,
    Completion,
    Member,
    Memory,
    Progress,
    Request,
    Score,
    TensorInfo,
)
from edgees.errors import EngineError, MissingExtra, ModelError, UsageError, WillNotFit
from edgees.gguf_file import GgufFile
from edgees.hf_layout import canonical, rope_permuted
from edgees.template import ChatTemplate

if TYPE_CHECKING:
    from edgees.delta import Delta

log = logging.getLogger("edgees.llamacpp")

MICRO_BATCH = 256
"""Tokens per graph: the product's cost per token is flat from here on, the compute buffer grows with it."""
OUTPUTS = 64
"""Rows of logits per call, kept low because each costs 4 bytes times the vocabulary."""
SEQUENCES = 32
"""Sequences at once where nothing else is asked for."""
SHARED_PREFIX = 16
"""Shorter common prefixes are computed again: copying a stream costs about as much."""
CHUNK_BYTES = 4 << 20
WORKING_VERSIONS = "0.3.36"
"""llama-cpp-python versions that the backend was tried with (named where another one is refused)."""


# ---------------------------------------------------------------- the library
@lru_cache(maxsize=1)
def _library() -> Any:
    """The module ``llama_cpp.llama_cpp``, its log quietened, its threads told not to spin against ours."""
    # OpenMP reads this once, when it is loaded. Spinning waits beside our own pool cost 20x on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import llama_cpp.llama_cpp as api
    except ImportError as error:
        raise MissingExtra(
            f"llama-cpp-python cannot be imported: {error}",
            hint='pip install "edgees[llama]" (it is compiled: a C++ compiler and some minutes)',
        ) from error
    api.llama_log_set(_log_callback(api), ctypes.c_void_p(0))
    api.llama_backend_init()
    return api


_kept: list[Any] = []  # ctypes callbacks that llama.cpp holds: a collected one is a segmentation fault
_messages: list[str] = []


def _log_callback(api: Any) -> Any:
    def write(level: int, text: bytes, _: object) -> None:
        message = text.decode("utf-8", "replace").rstrip()
        log.debug(message)
        if level in (3, 4) and message:  # warn, error
            _messages.append(message)
            del _messages[:-20]

    callback = api.llama_log_callback(write)
    _kept.append(callback)
    return callback


def set_fields(struct: Any, **values: Any) -> Any:
    """Set fields of a ctypes structure, refusing names that it lacks (ctypes would silently make attributes)."""
    names = {entry[0] for entry in struct._fields_}
    for name, value in values.items():
        if name not in names:
            raise EngineError(
                f"this llama-cpp-python has no parameter {name} in {type(struct).__name__}",
                hint=f"versions that work: {WORKING_VERSIONS}",
            )
        setattr(struct, name, value)
    return struct


def install() -> None:
    """Register our backend in llama.cpp, once per process.

    Errors: EngineError naming what differs when llama.cpp has another layout than the declared one.
    """
    api = _library()
    code = native.lib().edgees_llama_install(api._lib._handle)
    if code:
        import llama_cpp

        reason = native.lib().edgees_llama_error().decode()
        raise EngineError(
            f"llama-cpp-python {llama_cpp.__version__} cannot be used for tuning: {reason}",
            hint=f'versions that work: {WORKING_VERSIONS} (pip install "llama-cpp-python=={WORKING_VERSIONS}")',
        )


def version() -> str:
    """Version of llama-cpp-python. Errors: MissingExtra when it is absent."""
    _library()
    import llama_cpp

    return str(llama_cpp.__version__)


def quantize(source: str | os.PathLike[str], target: str | os.PathLike[str], type_name: str, threads: int = 0) -> None:
    """Requantise a GGUF file with llama.cpp's own quantiser (``llama_model_quantize``), in process.

    ``type_name``: a llama.cpp file type such as ``Q4_K_M``. Errors: ModelError with llama.cpp's own words.
    """
    api = _library()
    number = getattr(api, f"LLAMA_FTYPE_MOSTLY_{type_name}", getattr(api, f"LLAMA_FTYPE_ALL_{type_name}", None))
    if number is None:
        raise UsageError(f"llama.cpp knows no file type {type_name}")
    params = api.llama_model_quantize_default_params()
    set_fields(params, ftype=number, nthread=native.threads(threads) if threads else native.threads(), allow_requantize=True)
    del _messages[:]
    code = api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code:
        raise ModelError(f"{source} cannot be quantised to {type_name}: {'; '.join(_messages[-3:]) or code}")


def supports_codec(type_name: str) -> bool:
    """Whether weights of this GGUF type can be tuned."""
    return type_name in blocks.TYPES


# ---------------------------------------------------------------- slots
@dataclass
class _Job:
    """One request on its way: what must be computed, and what has come out."""

    index: int
    member: Member
    tokens: list[int]
    limit: int = 0
    first_output: int = 0  # position of the first token whose logits are wanted (likelihood)
    request: Request | None = None
    generated: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    outcome: str = ""
    total: float = 0.0
    scored: int = 0


@dataclass
class _Slot:
    """One KV stream: the member and tokens whose keys and values it holds, and the job it works on."""

    id: int
    member: tuple[int, float] = (0, 0.0)
    held: list[int] = field(default_factory=list)
    job: _Job | None = None

    def shares(self, job: _Job) -> int:
        """Leading tokens of ``job`` that this stream already holds for the same member."""
        if self.member != (job.member.key, job.member.amplitude) or not self.held:
            return 0
        n = 0
        for a, b in zip(self.held, job.tokens, strict=False):
            if a != b:
                break
            n += 1
        return n


class _Context:
    """A llama_context of ``parallel`` streams of ``length`` tokens, with its batch."""

    def __init__(self, api: Any, model: Any, length: int, parallel: int, micro: int, threads: int, plain: bool) -> None:
        self.api, self.length, self.parallel, self.micro = api, length, parallel, micro
        self.outputs = max(OUTPUTS, parallel)
        params = set_fields(
            api.llama_context_default_params(),
            n_ctx=length * parallel,
            n_batch=micro,
            n_ubatch=micro,
            n_seq_max=parallel,
            n_threads=threads,
            n_threads_batch=threads,
            # Flash attention on the CPU splits one long row over threads: its sums would depend on their number.
            flash_attn_type=api.LLAMA_FLASH_ATTN_TYPE_DISABLED,
            kv_unified=False,
            no_perf=True,
        )
        names = {entry[0] for entry in params._fields_}
        if "n_outputs_max" in names:
            set_fields(params, n_outputs_max=self.outputs)
        del _messages[:]
        self.handle = api.llama_init_from_model(model, params)
        if not self.handle:
            raise WillNotFit(
                f"llama.cpp cannot make a context of {parallel} sequences of {length} tokens: "
                f"{'; '.join(_messages[-3:])}",
                hint="lower --parallel or --context",
            )
        self.memory = api.llama_get_memory(self.handle)
        self.batch = api.llama_batch_init(micro, 0, 1)
        self.slots = [_Slot(i) for i in range(parallel)]

    def close(self) -> None:
        if self.handle:
            self.api.llama_batch_free(self.batch)
            self.api.llama_free(self.handle)
            self.handle = None


class LlamaCppEngine:
    """A GGUF model on the CPU, answering for many members at once.

    path: the GGUF file (never modified). context: tokens per sequence, 0 = by need. parallel: sequences at once,
    0 = by need and memory. threads: of our products and of llama.cpp, 0 = all processors. params: regular
    expression over canonical names; only tensors it finds are tuned. plain: run llama.cpp as it is, our backend
    not loaded (a check from outside); such an engine knows only the centre. lora: an adapter GGUF (plain only).

    Errors: ModelError (damaged, unsupported or non-finite model), MissingExtra, EngineError (llama.cpp of another
    layout).
    """

    name = "llamacpp"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        context: int = 0,
        parallel: int = 0,
        threads: int = 0,
        params: str | None = None,
        plain: bool = False,
        lora: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.plain = plain
        self.threads = native.threads(threads)
        self._context_wanted, self._parallel_wanted = context, parallel
        self._ctx: _Context | None = None
        self._model: Any = None
        self._session = None
        self._delta: Delta | None = None
        self._lora: Any = None
        self._learned: dict[str, np.ndarray] = {}
        self._keep: list[Any] = []
        self._spec_tensors: list[TensorInfo] = []
        self.file = GgufFile(self.path)
        self._refuse_experts()
        self.api = _library()
        if not plain:
            install()
        self._load()
        if lora is not None:
            self._lora = self.api.llama_adapter_lora_init(self._model, os.fsencode(lora))
            if not self._lora:
                raise ModelError(f"llama.cpp refuses the adapter {lora}: {'; '.join(_messages[-3:])}")
        self._tensors: list[TensorInfo] = []
        self._frozen: list[tuple[str, str]] = []
        if not plain:
            self._choose(re.compile(params) if params else None)

    # ---- opening
    def _refuse_experts(self) -> None:
        experts = next((n for n in self.file.tensors if "_exps." in n or "_chexps." in n), None)
        if experts and not self.plain:
            raise ModelError(
                f"{self.path}: {experts} belongs to a mixture of experts, which cannot be tuned yet",
                hint="choose a dense model",
            )

    def _load(self) -> None:
        api = self.api
        params = set_fields(api.llama_model_default_params(), n_gpu_layers=0)
        names = {entry[0] for entry in params._fields_}
        if not self.plain:
            set_fields(params, use_extra_bufts=False)  # weights must stay as they are in the file
        if "load_mode" in names:
            set_fields(params, load_mode=1)
        else:
            set_fields(params, use_mmap=True)
        del _messages[:]
        self._model = api.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._model:
            raise ModelError(
                f"llama.cpp cannot load {self.path}: {'; '.join(_messages[-3:]) or 'no reason given'}",
                hint="is the file complete, and of an architecture that this llama.cpp knows?",
            )
        self.vocab = api.llama_model_get_vocab(self._model)
        self.vocabulary = int(api.llama_vocab_n_tokens(self.vocab))
        self.trained_context = int(api.llama_model_n_ctx_train(self._model))
        bos, eos = api.llama_vocab_bos(self.vocab), api.llama_vocab_eos(self.vocab)
        self._add_bos = bool(api.llama_vocab_get_add_bos(self.vocab)) and bos >= 0
        self._bos = int(bos)
        source = self.file.metadata.get("tokenizer.chat_template")
        self.template = ChatTemplate(
            source, bos_token=self._piece(bos, True).decode("utf-8", "replace") if bos >= 0 else "",
            eos_token=self._piece(eos, True).decode("utf-8", "replace") if eos >= 0 else "",
        )  # fmt: skip
        self._stop = self._end_of_turn()

    def _end_of_turn(self) -> frozenset[int]:
        """Tokens that end a turn: llama.cpp's own list, and whatever the template puts behind an answer."""
        api = self.api
        found = {i for i in range(self.vocabulary) if api.llama_vocab_is_eog(self.vocab, i)}
        mark = "edgees-answer"
        try:
            text = self.template.render(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}], add_generation_prompt=False
            )
        except Exception as error:  # a template may refuse such a conversation; then llama.cpp's list has to do
            log.debug("end of turn not probed: %s", error)
            return frozenset(found)
        tail = self._tokenize(text.split(mark)[-1], special=True)
        if tail and api.llama_vocab_is_control(self.vocab, tail[0]):
            found.add(tail[0])
        return frozenset(found)

    def _choose(self, pattern: re.Pattern[str] | None) -> None:
        """Find out which tensors can be tuned: codec, name, finite, and really used by the graph as we think."""
        arch = self.file.arch
        chosen: list[TensorInfo] = []
        for source, t in self.file.tensors.items():
            name = canonical(arch, source) or f"gguf:{source}"
            heads = rope_permuted(arch, source, self.file.metadata)
            if not supports_codec(t.type_name):
                self._frozen.append((source, f"no codec for type {t.type_name}"))
            elif len(t.dims) > 2:
                self._frozen.append((source, f"it has {len(t.dims)} dimensions"))
            elif t.vector and heads:
                self._frozen.append((source, "a bias in rotary order"))
            elif pattern and not pattern.search(name):
                self._frozen.append((source, "not chosen by --params"))
            else:
                rho = self._rms(source)
                if rho == 0.0:
                    self._frozen.append((source, "all its weights are zero"))
                    continue
                chosen.append(TensorInfo(name, source, t.shape[0], t.shape[1], t.vector, rho, heads))
        noise.check_ids([t.name for t in chosen])
        used = self._probe(chosen)
        self._tensors = [t for t in chosen if not used[t.source]]
        self._frozen += [(source, reason) for source, reason in used.items() if reason]
        if not self._tensors:
            raise ModelError(
                f"{self.path}: no tensor can be tuned ({len(self._frozen)} are frozen: "
                + "; ".join(f"{s}: {r}" for s, r in self._frozen[:3]) + ")",
                hint="see edgees doctor, and --params",
            )  # fmt: skip

    def _rms(self, source: str) -> float:
        """Root-mean-square of a tensor's weights, float32-exact. ModelError on NaN or Inf, by name (case 8)."""
        t = self.file.tensors[source]
        rows, cols = t.shape
        total = 0.0
        step = max(1, CHUNK_BYTES // (4 * cols))
        for row in range(0, rows, step):
            n = min(step, rows - row)
            w = blocks.decode(t.type_name, self.file.raw(source, row, n), n, cols)
            part = float(np.dot(w.reshape(-1), w.reshape(-1)).astype(np.float64)) if n * cols < 4096 else float(
                np.square(w, dtype=np.float64).sum()
            )
            if not np.isfinite(part):
                raise ModelError(
                    f"{self.path}: tensor {source} has a NaN or infinite weight in rows {row} to {row + n - 1}",
                    hint="the file is damaged or was converted wrongly; get it again",
                )
            total += part
        return float(np.float32(np.sqrt(total / (rows * cols))))

    def _probe(self, tensors: list[TensorInfo]) -> dict[str, str]:
        """Run two tokens through the graph: '' for each tensor that came by as expected, else why it is frozen."""
        session = self._open_session(tensors, "lowrank", 1)
        library = native.lib()
        context = None
        try:
            self._session = session
            context = _Context(self.api, self._model, 32, 1, 32, 1, False)
            token = self._tokenize("a", special=False) or [0]
            self._decode(context, [0], [(token * 2)[:2]], [CENTRE], [[False, True]])
            result = {}
            for i, t in enumerate(tensors):
                other = library.edgees_session_unclaimed(session, i).decode()
                seen = library.edgees_session_seen(session, i)
                result[t.source] = (
                    f"llama.cpp also uses it in {other}" if other else "" if seen else "llama.cpp's graph never used it"
                )
            return result
        finally:
            if context:
                context.close()
            self._session = None
            library.edgees_session_free(session)

    def _open_session(self, tensors: Sequence[TensorInfo], kind: str, rank: int) -> Any:
        library = native.lib()
        session = library.edgees_session_new(len(tensors), noise.KINDS.index(kind), rank)
        for i, t in enumerate(tensors):
            library.edgees_session_tensor(session, i, t.source.encode(), int(t.vector), ctypes.byref(self._struct(t)))
        library.edgees_session_activate(session)
        return session

    def _struct(self, t: TensorInfo) -> native.Tensor:
        file_type = self.file.tensors[t.source].type_name
        return native.Tensor(
            type=blocks.TYPES[file_type].id, heads=t.heads, rows=t.rows, cols=t.cols, id=t.id, rho=t.rho,
            row_stride=blocks.row_bytes(file_type, t.cols),
        )  # fmt: skip

    # ---- what it is
    @property
    def tensors(self) -> list[TensorInfo]:
        return list(self._tensors)

    @property
    def frozen(self) -> list[tuple[str, str]]:
        return list(self._frozen)

    @property
    def base_hash(self) -> str:
        return self.file.sha256()

    @property
    def context_length(self) -> int:
        return min(self._context_wanted or self.trained_context, self.trained_context)

    # ---- text
    def _tokenize(self, text: str, special: bool) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        size = len(data) + 8
        buffer = (self.api.llama_token * size)()
        n = self.api.llama_tokenize(self.vocab, data, len(data), buffer, size, False, special)
        if n < 0:
            buffer = (self.api.llama_token * -n)()
            n = self.api.llama_tokenize(self.vocab, data, len(data), buffer, -n, False, special)
        return list(buffer[: max(n, 0)])

    def _piece(self, token: int, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n = self.api.llama_token_to_piece(self.vocab, token, buffer, 64, 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self.api.llama_token_to_piece(self.vocab, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    def encode(self, text: str) -> list[int]:
        return self._tokenize(text, special=False)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokens = self._tokenize(self.template.render(messages), special=True)
        if self._add_bos and tokens[:1] != [self._bos]:  # exactly one, whether the template writes it or not
            tokens.insert(0, self._bos)
        return tokens

    def end_of_turn(self) -> frozenset[int]:
        """Token ids at which a generated turn ends."""
        return self._stop

    # ---- what has been learned
    def attach(self, delta: Delta) -> None:
        """Make ``delta`` part of every member. Errors: UsageError when it belongs to other tensors."""
        spec = delta.spec
        missing = [t.source for t in spec.tensors if t.source not in self.file.tensors]
        for t in spec.tensors:
            stored = self.file.tensors.get(t.source)
            if stored and stored.shape != (t.rows, t.cols):
                missing.append(t.source)
        if missing:
            raise UsageError(f"{self.path} lacks tensors of this run, or has them in another shape: {missing[:3]}")
        self._detach()
        self._delta = delta
        self._spec_tensors = list(spec.tensors)
        self._session = self._open_session(self._spec_tensors, spec.kind, spec.rank)
        self._dither = noise.make_key(spec.seed, noise.POOL_GENERATION, 1)
        for t in self._spec_tensors:
            if not t.vector and spec.view == "adapter":
                self._learned[f"{t.source}/pool"] = noise.pool_packed(spec.seed, t.id, t.cols, spec.factors)
        if self._ctx:  # its graphs were planned for other tensors
            self._ctx.close()
            self._ctx = None
        self.refresh()

    def refresh(self) -> None:
        if self._delta is None:
            return
        library = native.lib()
        for i, t in enumerate(self._spec_tensors):
            struct = self._struct(t)
            self._fill(struct, t)
            code = library.edgees_session_tensor(self._session, i, t.source.encode(), int(t.vector), ctypes.byref(struct))
            native.check(code, t.source)
        if self._ctx:
            for slot in self._ctx.slots:  # keys and values of the old weights
                slot.held, slot.member = [], (0, 0.0)

    def _fill(self, struct: native.Tensor, t: TensorInfo) -> None:
        delta = self._delta
        assert delta is not None
        spec = delta.spec
        stored = self.file.tensors[t.source]
        if t.vector:
            self._learned[t.source] = np.ascontiguousarray(delta.vector(t.name), np.float32)
            struct.delta = native.pointer(self._learned[t.source])
        elif spec.view == "adapter":
            self._learned[t.source] = delta.factors(t.name)
            struct.a, struct.factors = native.pointer(self._learned[t.source]), spec.factors
            struct.pool = native.pointer(self._learned[f"{t.source}/pool"])
        elif spec.view == "lattice" and not blocks.is_float(stored.type_name):
            self._lattice(struct, t)
        else:
            self._plane(struct, t, spec.bits or 8)

    def _delta_rows(self, t: TensorInfo) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first file row, delta of these rows in file order, their canonical rows), a few megabytes at a time."""
        delta = self._delta
        assert delta is not None
        order = t.source_to_canonical()
        step = t.rows if order is not None else max(1, CHUNK_BYTES // (4 * t.cols))
        for row in range(0, t.rows, step):
            n = min(step, t.rows - row)
            values = delta.rows(t.name, row, n)
            if order is None:
                yield row, values, np.arange(row, row + n, dtype=np.int32)
            else:
                yield row, np.ascontiguousarray(values[order]), order

    def _plane(self, struct: native.Tensor, t: TensorInfo, bits: int) -> None:
        delta = self._delta
        assert delta is not None
        library, stored = native.lib(), self.file.tensors[t.source]
        width = int(library.edgees_plane_row_bytes(bits, t.cols))
        plane = self._learned.get(t.source)
        if plane is None or plane.shape != (t.rows, width):
            plane = self._learned[t.source] = np.empty((t.rows, width), np.uint8)
        struct.bits, struct.plane, struct.span = bits, native.pointer(plane), 0
        if delta.generation == 0:
            plane[:] = {2: 0xAA, 4: 0x88, 8: 0x80}[bits]  # all steps zero
            return
        cell = float(np.float32(t.rho / 4))
        kind = blocks.TYPES[stored.type_name].id
        counts = np.zeros(9, np.int64)
        for row, values, _ in self._delta_rows(t):
            base = self.file.raw(t.source, row, len(values))
            code = library.edgees_plane_count(
                kind, native.pointer(base), len(values), t.cols, native.pointer(values), cell, native.pointer(counts)
            )
            native.check(code, f"{t.source}: residual plane")
        within = np.nonzero(counts <= t.size // 1000)[0]
        struct.span = int(within[0]) if len(within) else 8
        for row, values, order in self._delta_rows(t):
            base = self.file.raw(t.source, row, len(values))
            code = library.edgees_plane_encode(
                kind, native.pointer(base), len(values), t.cols, native.pointer(values), native.pointer(order),
                self._dither, t.id, bits, struct.span, cell, native.pointer(plane) + row * width,
            )  # fmt: skip
            native.check(code, f"{t.source}: residual plane")

    def _lattice(self, struct: native.Tensor, t: TensorInfo) -> None:
        library, stored = native.lib(), self.file.tensors[t.source]
        copy = self._learned.get(t.source)
        if copy is None:
            copy = self._learned[t.source] = np.array(self.file.raw(t.source))
        width = blocks.row_bytes(stored.type_name, t.cols)
        for row, values, order in self._delta_rows(t):
            base = self.file.raw(t.source, row, len(values))
            code = library.edgees_lattice_encode(
                struct.type, native.pointer(base), len(values), t.cols, native.pointer(values), native.pointer(order),
                self._dither, t.id, native.pointer(copy) + row * width,
            )  # fmt: skip
            native.check(code, f"{t.source}: lattice")
        struct.base, struct.row_stride, struct.lattice = native.pointer(copy), width, 1

    def effective(self, source: str) -> np.ndarray:
        """float32 [rows, cols], file order: the weights that the centre is scored with (base + what was learned).

        Bit for bit what the product's tile holds in the full views; adapter: decode + A B^T in float32.
        """
        stored = self.file.tensors[source]
        rows, cols = stored.shape
        t = next((x for x in self._spec_tensors if x.source == source), None)
        if t is None or self._delta is None:
            return blocks.decode(stored.type_name, self.file.raw(source), rows, cols)
        struct = self._struct(t)
        self._fill(struct, t)
        if t.vector or struct.factors:
            base = blocks.decode(stored.type_name, self.file.raw(source), rows, cols)
            learned = self._delta.vector(t.name)[None, :] if t.vector else self._delta.rows(t.name, 0, rows)
            order = t.source_to_canonical()
            return base + (learned if order is None else learned[order])
        if struct.lattice:
            return blocks.decode(stored.type_name, self._learned[source], rows, cols)
        out = np.empty((rows, cols), np.float32)
        code = native.lib().edgees_effective(
            struct.type, native.pointer(self.file.raw(source)), rows, cols, struct.bits, struct.plane, struct.span,
            float(np.float32(t.rho / 4)), native.pointer(out),
        )  # fmt: skip
        native.check(code, source)
        return out

    # ---- running
    def _need(self, length: int, jobs: int) -> _Context:
        """The context, remade when longer sequences or more of them are wanted than it has room for."""
        limit = self.context_length
        length = min(max(length, 1), limit)
        if self._context_wanted:
            length = limit
        length = -(-length // 256) * 256
        wanted = self._parallel_wanted or min(SEQUENCES, max(1, jobs))
        have = self._ctx
        if have and have.length >= length and have.parallel >= wanted:
            return have
        if have:
            length, wanted = max(length, have.length), max(wanted, have.parallel)
            have.close()
            self._ctx = None
        if not self._parallel_wanted:
            wanted = max(1, min(wanted, self._room() // max(1, self._stream_bytes(length))))
        self._activate()
        self._ctx = _Context(
            self.api, self._model, length, wanted, max(MICRO_BATCH, wanted), self.threads, self.plain
        )
        if self._lora:
            adapters = (ctypes.c_void_p * 1)(self._lora)
            scales = (ctypes.c_float * 1)(1.0)
            self.api.llama_set_adapters_lora(self._ctx.handle, adapters, 1, scales)
        return self._ctx

    @staticmethod
    def _room() -> int:
        """Bytes that the KV cache may take: half of what is available."""
        try:
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 512
        except OSError:
            pass
        return 4 << 30

    def _stream_bytes(self, length: int) -> int:
        layers = int(self.file.get("block_count", 1))
        heads = self.file.get("attention.head_count", 1)
        kv = self.file.get("attention.head_count_kv", heads)
        kv_max = max(kv) if isinstance(kv, list) else int(kv)
        heads_max = max(heads) if isinstance(heads, list) else int(heads)
        width = int(self.file.get("embedding_length", 1)) // max(heads_max, 1)
        key = int(self.file.get("attention.key_length", width))
        value = int(self.file.get("attention.value_length", width))
        return length * layers * kv_max * (key + value) * 2

    def _activate(self) -> None:
        native.lib().edgees_session_activate(self._session)

    def _decode(
        self, ctx: _Context, slots: Sequence[int], tokens: Sequence[Sequence[int]], members: Sequence[Member],
        outputs: Sequence[Sequence[bool]], starts: Sequence[int] | None = None,
    ) -> np.ndarray:
        """One llama_decode: ``tokens[i]`` (all of one length) to neighbouring streams. Returns pointers to logits rows.

        Result: uint64 [number of outputs], addresses of float32 rows, in the order of the tokens.
        """  # fmt: skip
        api, batch = self.api, ctx.batch
        n = 0
        for s, ids in enumerate(tokens):
            start = starts[s] if starts else 0
            for j, token in enumerate(ids):
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, start + j, 1
                batch.seq_id[n][0] = slots[s]
                batch.logits[n] = outputs[s][j]
                n += 1
        batch.n_tokens = n
        rows = [i for i in range(n) if batch.logits[i]]
        if self._session:
            self._announce(tokens, members, outputs)
        self._activate()
        del _messages[:]
        code = api.llama_decode(ctx.handle, batch)
        if code:
            reason = native.lib().edgees_session_error(self._session).decode() if self._session else ""
            raise EngineError(
                f"llama.cpp failed to decode {n} tokens of {len(slots)} sequences (code {code}): "
                f"{reason or '; '.join(_messages[-3:]) or 'no reason given'}"
            )
        return np.array(
            [ctypes.cast(api.llama_get_logits_ith(ctx.handle, i), ctypes.c_void_p).value for i in rows], np.uint64
        )

    def _announce(
        self, tokens: Sequence[Sequence[int]], members: Sequence[Member], outputs: Sequence[Sequence[bool]]
    ) -> None:
        """Tell the backend whose each column is."""
        distinct: dict[tuple[int, float], int] = {}
        table: list[Member] = []
        owner: list[int] = []
        output_owner: list[int] = []
        for ids, member, wanted in zip(tokens, members, outputs, strict=True):
            at = distinct.setdefault((member.key, member.amplitude), len(table))
            if at == len(table):
                table.append(member)
            owner += [at] * len(ids)
            output_owner += [at] * sum(wanted)
        array = (native.Member * len(table))(*[native.Member(m.key, m.amplitude, m.slot) for m in table])
        flat = np.fromiter((t for ids in tokens for t in ids), np.int32)
        owners, outs = np.array(owner, np.int32), np.array(output_owner, np.int32)
        code = native.lib().edgees_session_batch(
            self._session, len(table), ctypes.byref(array), len(flat), native.pointer(flat), native.pointer(owners),
            len(outs), native.pointer(outs),
        )  # fmt: skip
        native.check(code, "batch")

    @staticmethod
    def _runs(slots: Sequence[_Slot]) -> Iterator[list[_Slot]]:
        """Slots of neighbouring ids, in order."""
        run: list[_Slot] = []
        for slot in sorted(slots, key=lambda s: s.id):
            if run and slot.id != run[-1].id + 1:
                yield run
                run = []
            run.append(slot)
        if run:
            yield run

    def _admit(self, ctx: _Context, slot: _Slot, job: _Job) -> None:
        """Give a job to a free stream, taking over what another stream has already computed for the same member."""
        api = self.api
        best = max(ctx.slots, key=lambda s: (s.shares(job), s is slot))
        shared = min(best.shares(job), len(job.tokens) - 1, job.first_output or len(job.tokens))
        if best is not slot and shared < SHARED_PREFIX:
            best, shared = slot, min(slot.shares(job), len(job.tokens) - 1, job.first_output or len(job.tokens))
        if best is not slot:
            api.llama_memory_seq_rm(ctx.memory, slot.id, -1, -1)
            api.llama_memory_seq_cp(ctx.memory, best.id, slot.id, -1, -1)
        api.llama_memory_seq_rm(ctx.memory, slot.id, shared, -1)
        slot.job, slot.held = job, job.tokens[:shared]
        slot.member = (job.member.key, job.member.amplitude)

    def _prefill(self, ctx: _Context, slots: list[_Slot], finish: Callable[[_Slot, np.ndarray], None]) -> int:
        """Compute all tokens of the slots' jobs that are not yet held. ``finish`` gets each stream's logits rows."""
        done = 0
        waiting = [s for s in slots if s.job]
        # A prefix that several waiting jobs of one member share is computed by the first and copied to the rest.
        while waiting:
            leaders: list[_Slot] = []
            for slot in waiting:
                assert slot.job
                if not any(self._follows(slot, leader) for leader in leaders):
                    leaders.append(slot)
            ready = leaders if len(leaders) < len(waiting) else waiting
            for run in self._runs(ready):
                while run:
                    group, width = self._piece_of(ctx, run)
                    outputs = [self._wanted(s, width) for s in group]
                    jobs = [s.job for s in group if s.job]
                    pieces = [j.tokens[len(s.held) : len(s.held) + width] for s, j in zip(group, jobs, strict=True)]
                    rows = self._decode(
                        ctx, [s.id for s in group], pieces, [j.member for j in jobs], outputs, [len(s.held) for s in group]
                    )
                    at = 0
                    for slot, piece, wanted in zip(group, pieces, outputs, strict=True):
                        count = sum(wanted)
                        slot.held = slot.held + piece
                        finish(slot, rows[at : at + count])
                        at += count
                    done += width * len(group)
                    rest = [s for s in run if s.job and len(s.held) < len(s.job.tokens)]
                    if rest and len(rest) < len(run) and rest != run[len(run) - len(rest) :]:
                        for part in list(self._runs(rest))[1:]:  # gaps: the later parts wait for the next round
                            rest = [s for s in rest if s not in part]
                    run = rest
            waiting = [s for s in waiting if s.job and len(s.held) < len(s.job.tokens)]
            for slot in waiting:
                if slot.job and len(slot.held) < SHARED_PREFIX:
                    self._admit(ctx, slot, slot.job)
        return done

    def _piece_of(self, ctx: _Context, run: list[_Slot]) -> tuple[list[_Slot], int]:
        """The next call for neighbouring streams: which of them, and how many tokens of each.

        Bounded by the micro-batch and by the rows of logits that the context keeps.
        """
        group = run
        width = min(len(s.job.tokens) - len(s.held) for s in run if s.job)
        width = max(1, min(width, ctx.micro // len(group)))
        if sum(sum(self._wanted(s, width)) for s in group) <= ctx.outputs:
            return group, width
        silent = min((self._wanted(s, width) + [True]).index(True) for s in group)
        if silent:  # what yields no logits first, for all; then the rest, a few streams at a time
            return group, silent
        width = min(width, ctx.outputs)
        return group[: max(1, ctx.outputs // width)], width

    @staticmethod
    def _follows(slot: _Slot, leader: _Slot) -> bool:
        """Whether ``slot`` should wait for ``leader``: same member, a long common beginning, nothing held yet."""
        a, b = slot.job, leader.job
        if a is None or b is None or a.member != b.member or len(slot.held) >= SHARED_PREFIX:
            return False
        limit = min(a.first_output or len(a.tokens), len(a.tokens) - 1)
        return limit >= SHARED_PREFIX and a.tokens[:SHARED_PREFIX] == b.tokens[:SHARED_PREFIX]

    @staticmethod
    def _wanted(slot: _Slot, width: int) -> list[bool]:
        job = slot.job
        assert job
        start = len(slot.held)
        if job.request is None:  # likelihood: every position that predicts a token of the target
            return [job.first_output <= start + j < len(job.tokens) for j in range(width)]
        return [start + j == len(job.tokens) - 1 for j in range(width)]

    def _compact(self, ctx: _Context) -> None:
        """Move running streams down into gaps, so that one call covers them all."""
        while True:
            running = [s for s in ctx.slots if s.job]
            free = next((s for s in ctx.slots if not s.job), None)
            last = running[-1] if running else None
            if not last or not free or free.id > last.id:
                return
            self.api.llama_memory_seq_rm(ctx.memory, free.id, -1, -1)
            self.api.llama_memory_seq_cp(ctx.memory, last.id, free.id, -1, -1)
            free.job, free.held, free.member = last.job, last.held, last.member
            last.job, last.held = None, list(last.held)

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        """Complete all requests; order and company in the batch change nothing in any of them."""
        results: list[Completion | None] = [None] * len(requests)
        jobs: list[_Job] = []
        limit = self.context_length
        for i, r in enumerate(requests):
            self._own(r.member)
            if len(r.prompt) >= limit or r.max_tokens <= 0 or not r.prompt:
                results[i] = Completion("", (), "overflow" if len(r.prompt) >= limit else "length")
                continue
            jobs.append(_Job(i, r.member, list(r.prompt), min(r.max_tokens, limit - len(r.prompt)), request=r))
        if not jobs:
            return [c for c in results if c]
        ctx = self._need(max(len(j.tokens) + j.limit for j in jobs), len(jobs))
        jobs.sort(key=lambda j: (j.member.slot, j.member.key, j.member.amplitude, len(j.tokens)))
        queue = iter(jobs)
        done = tokens = 0
        pending: dict[int, np.ndarray] = {}

        def first(slot: _Slot, rows: np.ndarray) -> None:
            if len(rows):
                pending[slot.id] = rows

        def absorb(running: list[_Slot], rows: np.ndarray) -> None:
            nonlocal done
            for slot, token in zip(running, self._sample([s.job for s in running if s.job], rows), strict=True):
                job = slot.job
                assert job and job.request
                if self._append(job, token):
                    text, outcome = self._text(job)
                    results[job.index] = Completion(text, tuple(job.generated), outcome)
                    slot.job = None
                    done += 1

        while True:
            fresh = []
            for slot in ctx.slots:
                if slot.job is None and (job := next(queue, None)):
                    self._admit(ctx, slot, job)
                    fresh.append(slot)
            if fresh:
                tokens += self._prefill(ctx, fresh, first)
                ready = [s for s in fresh if s.id in pending]
                absorb(ready, np.concatenate([pending.pop(s.id) for s in ready]))
            self._compact(ctx)
            running = [s for s in ctx.slots if s.job]
            if running:
                for run in self._runs(running):
                    new = [[s.job.generated[-1]] for s in run if s.job]
                    rows = self._decode(
                        ctx, [s.id for s in run], new, [s.job.member for s in run if s.job], [[True]] * len(run),
                        [len(s.held) for s in run],
                    )  # fmt: skip
                    for slot, token in zip(run, new, strict=True):
                        slot.held = slot.held + token
                    tokens += len(run)
                    absorb(run, rows)
            if progress:
                progress(done, tokens)
            if not any(s.job for s in ctx.slots) and not fresh:
                break
        return [c for c in results if c is not None]

    def _own(self, member: Member) -> None:
        if member.amplitude and (self.plain or self._session is None):
            raise UsageError("this engine has no noise attached: only the unperturbed centre can be run")

    def _append(self, job: _Job, token: int) -> bool:
        """Add a sampled token; True when the text is complete."""
        request = job.request
        assert request
        if token in self._stop:
            job.outcome = "stop"
            return True
        job.generated.append(token)
        job.data += self._piece(token, False)
        if request.stop:
            text = job.data.decode("utf-8", "ignore")
            if any(s in text for s in request.stop):
                job.outcome = "stop"
                return True
        if len(job.generated) >= job.limit:
            job.outcome = "length" if job.limit == request.max_tokens else "overflow"
            return True
        return False

    @staticmethod
    def _text(job: _Job) -> tuple[str, str]:
        # An incremental decoder keeps back a character that the limit cut in two; broken ones inside are marked.
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(job.data), False)
        assert job.request
        for stop in job.request.stop:
            text = text.split(stop, 1)[0]
        return text, job.outcome

    def _sample(self, jobs: Sequence[_Job], rows: np.ndarray) -> list[int]:
        n = len(jobs)
        best = np.empty(n, np.int32)
        code = native.lib().edgees_logprob(
            native.pointer(np.ascontiguousarray(rows)), n, self.vocabulary, None, None, native.pointer(best)
        )
        native.check(code, "sampling")
        result = [int(b) for b in best]
        for i, job in enumerate(jobs):
            request = job.request
            assert request
            if request.temperature > 0:
                logits = np.ctypeslib.as_array(
                    (ctypes.c_float * self.vocabulary).from_address(int(rows[i]))
                )
                # Gumbel noise from (seed, step) alone: members of a row share it, so they differ by weights only.
                result[i] = int(np.argmax(logits / request.temperature + self._gumbel(request.seed, len(job.generated))))
        return result

    @lru_cache(maxsize=256)  # noqa: B019 - the engine outlives the cache's entries
    def _gumbel(self, seed: int, step: int) -> np.ndarray:
        raw = np.random.Philox(key=[seed & (2**64 - 1), step]).random_raw(self.vocabulary)
        u = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return np.asarray(-np.log(-np.log(u)), np.float32)

    def loglik(
        self, requests: Sequence[tuple[Member, tuple[int, ...], tuple[int, ...]]], progress: Progress | None = None
    ) -> list[Score]:
        """Log-likelihood of each target after its prompt; NaN where both together do not fit the context."""
        scores = [Score(float("nan"), len(target)) for _, _, target in requests]
        jobs = []
        for i, (member, prompt, target) in enumerate(requests):
            self._own(member)
            if not prompt:
                raise UsageError("a likelihood needs at least one token of prompt")
            if not target:
                scores[i] = Score(0.0, 0)
            elif len(prompt) + len(target) <= self.context_length + 1:
                jobs.append(_Job(i, member, [*prompt, *target[:-1]], first_output=len(prompt) - 1))
        if not jobs:
            return scores
        ctx = self._need(max(len(j.tokens) for j in jobs), len(jobs))
        jobs.sort(key=lambda j: (j.member.slot, j.member.key, j.member.amplitude, len(j.tokens)))
        done = tokens = 0

        def add(slot: _Slot, rows: np.ndarray) -> None:
            job = slot.job
            if not len(rows) or job is None:
                return
            target = requests[job.index][2]
            wanted = np.array(target[job.scored : job.scored + len(rows)], np.int32)
            out = np.empty(len(rows), np.float64)
            code = native.lib().edgees_logprob(
                native.pointer(np.ascontiguousarray(rows)), len(rows), self.vocabulary, native.pointer(wanted),
                native.pointer(out), None,
            )  # fmt: skip
            native.check(code, "likelihood")
            for value in out:
                job.total += float(value)
            job.scored += len(rows)

        for at in range(0, len(jobs), ctx.parallel):
            group = jobs[at : at + ctx.parallel]
            for slot, job in zip(ctx.slots, group, strict=False):
                self._admit(ctx, slot, job)
            tokens += self._prefill(ctx, ctx.slots[: len(group)], add)
            for slot, job in zip(ctx.slots, group, strict=False):
                scores[job.index] = Score(job.total, job.scored)
                slot.job = None
            done += len(group)
            if progress:
                progress(done, tokens)
        return scores

    def logits(self, tokens: Sequence[int], member: Member = CENTRE) -> np.ndarray:
        """float32 [len(tokens), vocabulary]: logits after each token (checks and tests; not for rollouts)."""
        self._own(member)
        ctx = self._need(len(tokens), 1)
        job = _Job(0, member, list(tokens), first_output=0)
        out: list[np.ndarray] = []

        def copy(slot: _Slot, rows: np.ndarray) -> None:
            for address in rows:
                row = (ctypes.c_float * self.vocabulary).from_address(int(address))
                out.append(np.ctypeslib.as_array(row).copy())

        slot = ctx.slots[0]
        slot.held = []
        self.api.llama_memory_seq_rm(ctx.memory, slot.id, -1, -1)
        slot.job, slot.member = job, (member.key, member.amplitude)
        self._prefill(ctx, [slot], copy)
        slot.job, slot.held = None, []
        return np.array(out)

    def memory(self) -> Memory:
        kv = self._stream_bytes(self._ctx.length) * self._ctx.parallel if self._ctx else 0
        return Memory(
            weights=self.file.size, kv=kv, learned=sum(a.nbytes for a in self._learned.values()),
        )  # fmt: skip

    # ---- closing
    def _detach(self) -> None:
        if self._session:
            native.lib().edgees_session_free(self._session)
            self._session = None
        self._learned.clear()

    def close(self) -> None:
        if self._ctx:
            self._ctx.close()
            self._ctx = None
        self._detach()
        if self._lora:
            self.api.llama_adapter_lora_free(self._lora)
            self._lora = None
        if self._model:
            self.api.llama_model_free(self._model)
            self._model = None
        self.template.close()
        self.file.close()

    def __enter__(self) -> LlamaCppEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
