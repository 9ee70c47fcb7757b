"""The CPU engine: stock llama-cpp-python, with our backend inside its graph (csrc/llama/accel.cpp).

llama.cpp tokenizes, keeps the KV cache, attends and rotates; every operation that reads a tuned weight is ours and
answers for the member to whom each column belongs. One context serves many members at once.

Whose column is it? With one KV stream per sequence llama.cpp forms micro-batches by its own rule. Every call made
here is one that the rule leaves whole and in order: sequences of neighbouring ids, the same number of tokens each,
no more tokens than a micro-batch. The backend compares the token ids that it sees in the graph with those
submitted, and fails the call if they differ.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgees import blocks, native, noise
from edgees.backends.base import (
    CENTRE,
    Member,
    Memory,
    TensorInfo,
)
from edgees.backends.grammar import Grammar
from edgees.backends.streams import SEQUENCES, Scheduler, StreamEngine, output_rows
from edgees.errors import EngineError, MissingExtra, ModelError, UsageError, WillNotFit
from edgees.gguf_file import GgufFile
from edgees.hf_layout import canonical, rope_permuted
from edgees.template import ChatTemplate

if TYPE_CHECKING:
    from edgees.delta import Delta

log = logging.getLogger("edgees.llamacpp")

MICRO_BATCH = 256
"""Tokens per graph: the product's cost per token is flat from here on, the compute buffer grows with it."""
CHUNK_BYTES = 4 << 20
GRAMMARS = 64
"""Grammars that are kept read: an environment may have another one for every turn."""
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
    _give_back()
    return api


def _give_back() -> None:
    """Have glibc return large blocks to the system when they are freed.

    Its threshold for that rises with every large block that a program frees: 5 MiB of a tuning stay in the heap unused.
    Any setting keeps it where it starts.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, start = -3, 128 << 10
        libc.mallopt(mmap_threshold, start)


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


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    type_name: str,
    threads: int = 0,
    importance: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Requantise a GGUF file with llama.cpp's own quantiser (``llama_model_quantize``), in process.

    ``type_name``: a llama.cpp file type such as ``Q4_K_M``. ``importance``: by tensor, float32 [cols], mean square of
    what each column is multiplied with. Errors: ModelError with llama.cpp's own words.
    """
    api = _library()
    number = getattr(api, f"LLAMA_FTYPE_MOSTLY_{type_name}", getattr(api, f"LLAMA_FTYPE_ALL_{type_name}", None))
    if number is None:
        raise UsageError(f"llama.cpp knows no file type {type_name}")
    params = api.llama_model_quantize_default_params()
    nthread = native.threads(threads or None)
    set_fields(params, ftype=number, nthread=nthread, allow_requantize=True)
    kept = {name.encode(): np.ascontiguousarray(v, np.float32) for name, v in (importance or {}).items()}
    table = (api.llama_model_imatrix_data * (len(kept) + 1))()  # the last one, all null, ends it
    for entry, (name, values) in zip(table, kept.items(), strict=False):
        data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        set_fields(entry, name=name, data=data, size=len(values))
    if kept:
        set_fields(params, imatrix=table)
    del _messages[:]
    code = api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code:
        raise ModelError(f"{source} cannot be quantised to {type_name}: {'; '.join(_messages[-3:]) or code}")


def supports_codec(type_name: str) -> bool:
    """Whether weights of this GGUF type can be tuned."""
    return type_name in blocks.TYPES


class _Context:
    """A llama_context of ``parallel`` streams of ``length`` tokens, with its batch (:class:`streams.Streams`)."""

    def __init__(self, engine: LlamaCppEngine, length: int, parallel: int, micro: int, threads: int) -> None:
        self.engine, self.api = engine, engine.api
        self.length, self.parallel, self.micro = length, parallel, micro
        self.ragged = False  # llama.cpp would cut such a batch into several
        self.seamless = not engine.plain  # our attention and products: see csrc/llama/ops.h
        self.outputs = output_rows(engine.vocabulary, parallel, micro)
        api = self.api
        params = set_fields(
            api.llama_context_default_params(),
            n_ctx=length * parallel,
            n_batch=micro,
            n_ubatch=micro,
            n_seq_max=parallel,
            n_threads=threads,
            n_threads_batch=threads,
            # One operation, ours (csrc/llama/ops.cpp). llama.cpp's own splits a long row over threads: its sums depend
            # on their number.
            flash_attn_type=api.LLAMA_FLASH_ATTN_TYPE_DISABLED if engine.plain else api.LLAMA_FLASH_ATTN_TYPE_ENABLED,
            kv_unified=False,
            no_perf=True,
            **engine.context_options,
        )
        if "n_outputs_max" in {entry[0] for entry in params._fields_}:
            set_fields(params, n_outputs_max=self.outputs)
        del _messages[:]
        engine.activate()
        self.handle = api.llama_init_from_model(engine.model, params)
        if not self.handle:
            raise WillNotFit(
                f"llama.cpp cannot make a context of {parallel} sequences of {length} tokens: "
                f"{'; '.join(_messages[-3:])}",
                hint="lower --parallel or --context",
            )
        self.memory = api.llama_get_memory(self.handle)
        self.batch = api.llama_batch_init(micro, 0, 1)
        self.scheduler = Scheduler(self, engine)

    def copy(self, source: int, target: int) -> None:
        self.trim(target, 0)
        self.api.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def trim(self, stream: int, length: int) -> None:
        if not self.api.llama_memory_seq_rm(self.memory, stream, length if length else -1, -1):
            raise EngineError(f"llama.cpp cannot shorten a sequence to {length} tokens", hint="is the model recurrent?")

    def decode(
        self,
        streams: Sequence[int],
        tokens: Sequence[Sequence[int]],
        members: Sequence[Member],
        wanted: Sequence[Sequence[bool]],
        starts: Sequence[int],
    ) -> np.ndarray:
        """uint64 addresses of float32 rows of logits; see :meth:`streams.Streams.decode`."""
        api, batch = self.api, self.batch
        n = 0
        rows = []
        for stream, ids, want, start in zip(streams, tokens, wanted, starts, strict=True):
            for j, token in enumerate(ids):
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, start + j, 1
                batch.seq_id[n][0] = stream
                batch.logits[n] = want[j]
                if want[j]:
                    rows.append(n)
                n += 1
        batch.n_tokens = n
        self.engine.announce(tokens, members, wanted)
        del _messages[:]
        code = api.llama_decode(self.handle, batch)
        if code:
            raise EngineError(
                f"llama.cpp failed to decode {n} tokens of {len(streams)} sequences (code {code}): "
                f"{self.engine.fault() or '; '.join(_messages[-3:]) or 'no reason given'}"
            )
        return np.array(
            [ctypes.cast(api.llama_get_logits_ith(self.handle, i), ctypes.c_void_p).value for i in rows], np.uint64
        )

    def close(self) -> None:
        if self.handle:
            self.api.llama_batch_free(self.batch)
            self.api.llama_free(self.handle)
            self.handle = None


class LlamaCppEngine(StreamEngine):
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
        self.model: Any = None
        self._session: Any = None
        self._delta: Delta | None = None
        self._lora: Any = None
        self._learned: dict[str, np.ndarray] = {}
        self.context_options: dict[str, Any] = {}
        """Further parameters of contexts that are made from now on (llama.cpp's names)."""
        self._spec_tensors: list[TensorInfo] = []
        self.file = GgufFile(self.path)
        self._refuse_experts()
        self.api = _library()
        if not plain:
            install()
        self._load()
        if lora is not None:
            self._lora = self.api.llama_adapter_lora_init(self.model, os.fsencode(lora))
            if not self._lora:
                raise ModelError(f"llama.cpp refuses the adapter {lora}: {'; '.join(_messages[-3:])}")
        self._tensors: list[TensorInfo] = []
        self._claimed: list[TensorInfo] = []  # all that our backend computes, tuned or not: one arithmetic for all
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
        # Weights must stay as they are in the file for us; and llama.cpp's extra buffer types crash on virtual machines
        # that advertise AMX without enabling it (an illegal instruction in ggml_backend_amx_mul_mat).
        params = set_fields(api.llama_model_default_params(), n_gpu_layers=0, use_extra_bufts=False)
        names = {entry[0] for entry in params._fields_}
        if "load_mode" in names:
            set_fields(params, load_mode=1)
        else:
            set_fields(params, use_mmap=True)
        del _messages[:]
        self.model = api.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self.model:
            raise ModelError(
                f"llama.cpp cannot load {self.path}: {'; '.join(_messages[-3:]) or 'no reason given'}",
                hint="is the file complete, and of an architecture that this llama.cpp knows?",
            )
        self.vocab = api.llama_model_get_vocab(self.model)
        self.vocabulary = int(api.llama_vocab_n_tokens(self.vocab))
        self.trained_context = int(api.llama_model_n_ctx_train(self.model))
        bos, eos = api.llama_vocab_bos(self.vocab), api.llama_vocab_eos(self.vocab)
        self._add_bos = bool(api.llama_vocab_get_add_bos(self.vocab)) and bos >= 0
        self._bos = int(bos)
        source = self.file.metadata.get("tokenizer.chat_template")
        self.template = ChatTemplate(
            source, bos_token=self._piece(bos, True).decode("utf-8", "replace") if bos >= 0 else "",
            eos_token=self._piece(eos, True).decode("utf-8", "replace") if eos >= 0 else "",
        )  # fmt: skip
        ends = {i for i in range(self.vocabulary) if api.llama_vocab_is_eog(self.vocab, i)}
        self._stop = frozenset(ends | self._behind_answer())
        self._grammars: dict[str, Grammar] = {}

    def _grammar(self, text: str) -> Grammar:
        if text not in self._grammars:
            while len(self._grammars) >= GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
            self._grammars[text] = Grammar(self.api, self.vocab, text, self._stop, self._control)
        return self._grammars[text]

    def _control(self, token: int) -> bool:
        return bool(self.api.llama_vocab_is_control(self.vocab, token))

    def control_texts(self) -> list[str]:
        wanted = self.api.LLAMA_TOKEN_ATTR_CONTROL | self.api.LLAMA_TOKEN_ATTR_UNKNOWN  # all that special=True adds
        ids = (i for i in range(self.vocabulary) if self.api.llama_vocab_get_attr(self.vocab, i) & wanted)
        return [self.api.llama_vocab_get_text(self.vocab, i).decode("utf-8", "replace") for i in ids]

    def _choose(self, pattern: re.Pattern[str] | None) -> None:
        """Find out which tensors can be tuned: codec, name, finite, and really used by the graph as we think."""
        arch = self.file.arch
        chosen: list[TensorInfo] = []
        passive: list[TensorInfo] = []
        for source, t in self.file.tensors.items():
            name = canonical(arch, source) or f"gguf:{source}"
            heads = rope_permuted(arch, source, self.file.metadata)
            if not supports_codec(t.type_name):
                self._frozen.append((source, f"no codec for type {t.type_name}"))
            elif len(t.dims) > 2:
                self._frozen.append((source, f"it has {len(t.dims)} dimensions"))
            elif t.vector and heads:
                self._frozen.append((source, "a bias in rotary order"))
            else:
                rho = self._rms(source)
                wanted = not pattern or pattern.search(name) is not None
                tuned = wanted and rho > 0.0
                if not tuned:
                    self._frozen.append((source, "all its weights are zero" if wanted else "not chosen by --params"))
                info = TensorInfo(name, source, t.shape[0], t.shape[1], t.vector, rho, heads)
                (chosen if tuned else passive).append(info)
        noise.check_ids([t.name for t in chosen])
        used = self._probe([*chosen, *passive])
        self._tensors = [t for t in chosen if not used[t.source]]
        self._claimed = [*self._tensors, *(t for t in passive if not used[t.source])]
        self._frozen += [(t.source, used[t.source]) for t in chosen if used[t.source]]
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
            part = float(np.square(w, dtype=np.float64).sum())
            if not np.isfinite(part):
                raise ModelError(
                    f"{self.path}: tensor {source} has a NaN or infinite weight in rows {row} to {row + n - 1}",
                    hint="the file is damaged or was converted wrongly; get it again",
                )
            total += part
            self.file.release()
        return float(np.float32(np.sqrt(total / (rows * cols))))

    def _probe(self, tensors: list[TensorInfo]) -> dict[str, str]:
        """Run two tokens through the graph: '' for each tensor that came by as expected, else why it is frozen."""
        session = self._open_session(tensors, "lowrank", 1)
        library = native.lib()
        context = None
        self._session = session
        try:
            context = _Context(self, 32, 1, 32, 1)
            token = self._tokenize("a", special=False) or [0]
            context.decode([0], [(token * 2)[:2]], [CENTRE], [[False, True]], [0])
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
        return session

    def _struct(self, t: TensorInfo) -> native.Tensor:
        file_type = self.file.tensors[t.source].type_name
        return native.Tensor(
            type=blocks.TYPES[file_type].id, heads=t.heads, rows=t.rows, cols=t.cols, id=t.id,
            row_stride=blocks.row_bytes(file_type, t.cols), cell=t.rho / 4,
            rho=self._delta.spec.scale(t) if self._delta else 0.0,
        )  # fmt: skip

    # ---- what it is
    @property
    def base_hash(self) -> str:
        return self.file.sha256()

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
        tuned = {t.source for t in spec.tensors}
        others = [replace(t, amplitude=0.0) for t in self._claimed if t.source not in tuned]
        self._session = self._open_session([*self._spec_tensors, *others], spec.kind, spec.rank)
        self._dither = noise.dither_key(spec.seed)
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
            source, vector = t.source.encode(), int(t.vector)
            code = library.edgees_session_tensor(self._session, i, source, vector, ctypes.byref(struct))
            native.check(code, t.source)
        if self._ctx:
            self._ctx.scheduler.forget()  # keys and values of the old weights

    def _fill(self, struct: native.Tensor, t: TensorInfo) -> None:
        delta = self._delta
        assert delta is not None
        spec = delta.spec
        stored = self.file.tensors[t.source]
        if t.vector:
            values = np.ascontiguousarray(delta.vector(t.name), np.float32)
            # The session holds its address: one array for as long as the delta is attached.
            self._learned.setdefault(t.source, np.empty_like(values))[:] = values
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
            self.file.release()

    def _plane(self, struct: native.Tensor, t: TensorInfo, bits: int) -> None:
        delta = self._delta
        assert delta is not None
        stored = self.file.tensors[t.source]
        shape = (t.rows, blocks.plane_row_bytes(bits, t.cols))
        plane = self._learned.get(t.source)
        if plane is None or plane.shape != shape:
            plane = self._learned[t.source] = np.empty(shape, np.uint8)
        struct.bits, struct.plane, struct.span = bits, native.pointer(plane), 0
        if delta.generation == 0:
            plane[:] = blocks.EMPTY_STEPS[bits]
            return
        struct.span = blocks.plane_fill(
            stored.type_name,
            lambda: ((row, self.file.raw(t.source, row, len(v)), v, order) for row, v, order in self._delta_rows(t)),
            self._dither, t.id, bits, t.rho, plane,
        )  # fmt: skip

    def _lattice(self, struct: native.Tensor, t: TensorInfo) -> None:
        stored = self.file.tensors[t.source]
        copy = self._learned.get(t.source)
        if copy is None:
            copy = self._learned[t.source] = np.array(self.file.raw(t.source)).reshape(t.rows, -1)
        for row, values, order in self._delta_rows(t):
            n = len(values)
            blocks.lattice_encode(
                stored.type_name, self.file.raw(t.source, row, n), values, order, self._dither, t.id,
                out=copy[row : row + n],
            )  # fmt: skip
        struct.base, struct.row_stride, struct.lattice = native.pointer(copy), copy.shape[1], 1

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
            return np.asarray(base + (learned if order is None else learned[order]))
        if struct.lattice:
            return blocks.decode(stored.type_name, self._learned[source], rows, cols)
        plane, span = self._learned[source], struct.span
        return blocks.effective(stored.type_name, self.file.raw(source), rows, cols, plane, struct.bits, span, t.rho)

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
        self._ctx = _Context(self, length, wanted, max(MICRO_BATCH, wanted), self.threads)
        if self._lora:
            adapters = (type(self._lora) * 1)(self._lora)
            if self.api.llama_set_adapters_lora(self._ctx.handle, adapters, 1, (ctypes.c_float * 1)(1.0)):
                raise EngineError(f"llama.cpp cannot apply the adapter to {self.path}")
        return self._ctx

    def scheduler(self, length: int, jobs: int) -> Scheduler:
        return self._need(length, jobs).scheduler

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

    def activate(self) -> None:
        """Make this engine's session the one that llama.cpp's scheduler asks."""
        native.lib().edgees_session_activate(self._session)

    def fault(self) -> str:
        """What our backend says about the last failed call."""
        return native.lib().edgees_session_error(self._session).decode() if self._session else ""

    def announce(
        self, tokens: Sequence[Sequence[int]], members: Sequence[Member], wanted: Sequence[Sequence[bool]]
    ) -> None:
        """Tell the backend whose each column of the next call is."""
        self.activate()
        if not self._session:
            return
        distinct: dict[tuple[int, float, int], int] = {}
        table: list[Member] = []
        owner: list[int] = []
        output_owner: list[int] = []
        for ids, member, want in zip(tokens, members, wanted, strict=True):
            at = distinct.setdefault((member.key, member.amplitude, member.slot), len(table))
            if at == len(table):
                table.append(member)
            owner += [at] * len(ids)
            output_owner += [at] * sum(want)
        array = (native.Member * len(table))(*[native.Member(m.key, m.amplitude, m.slot) for m in table])
        flat = np.fromiter((t for ids in tokens for t in ids), np.int32)
        owners, outs = np.array(owner, np.int32), np.array(output_owner, np.int32)
        code = native.lib().edgees_session_batch(
            self._session, len(table), ctypes.byref(array), len(flat), native.pointer(flat), native.pointer(owners),
            len(outs), native.pointer(outs),
        )  # fmt: skip
        native.check(code, "batch")

    def own(self, member: Member) -> None:
        """:raises UsageError: a perturbed member where no noise is attached."""
        if member.amplitude and (self.plain or self._session is None):
            raise UsageError("this engine has no noise attached: only the unperturbed centre can be run")

    def piece(self, token: int) -> bytes:
        return self._piece(token, False)

    def logits(self, tokens: Sequence[int], member: Member = CENTRE) -> np.ndarray:
        """float32 [len(tokens), vocabulary]: logits after each token (checks and tests; not for rollouts)."""
        self.own(member)
        ctx = self._need(len(tokens), 1)
        ctx.scheduler.forget()
        ctx.trim(0, 0)
        out: list[np.ndarray] = []
        for at in range(0, len(tokens), ctx.outputs):
            piece = list(tokens[at : at + ctx.outputs])
            rows = ctx.decode([0], [piece], [member], [[True] * len(piece)], [at])
            out += [self._row(r).copy() for r in rows]
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
        self._grammars.clear()
        if self.model:
            self.api.llama_model_free(self.model)
            self.model = None
        self.template.close()
        self.file.close()

    def __enter__(self) -> LlamaCppEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
