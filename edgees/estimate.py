"""``edgees estimate``: what a run will take (memory, disk, time) before anything is loaded into an engine.

Only headers are read. Sizes of what the engines allocate are computed with their own rules; how many tokens and rows of
logits a call has is found by running the engines' own scheduler on streams that merely count. What cannot be computed
(interpreter, libraries) is a measured constant, see :class:`Host`. Time comes from our own products, measured here on
the model's shapes, or from a table of cards.

Texts are counted as one token per :data:`BYTES_PER_TOKEN` bytes: which token really is where only the tokenizer knows,
and it belongs to the engine.
"""

from __future__ import annotations

import csv
import ctypes
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edgees import blocks, config, model_path, native, noise, opening, report, tune
from edgees.attempts import feedback
from edgees.backends import llamacpp, torch_nf4
from edgees.backends.base import Member, Request
from edgees.backends.streams import FIRST_LENGTH, SEQUENCES, Job, Scheduler, output_rows
from edgees.config import Config
from edgees.context import Context
from edgees.errors import ModelError, UsageError, WillNotFit
from edgees.gguf_file import GgufFile
from edgees.hf_files import HfFolder
from edgees.hf_layout import canonical, rope_permuted
from edgees.opening import first_context
from edgees.tasks.rows import Row, Task
from edgees.update import loglik_weight

MIB = 1 << 20
BYTES_PER_TOKEN = 3
"""Of prompts and answers. English takes about 4, JSON and code about 3."""
MESSAGE_TOKENS = 6
"""What a chat template puts around a message; once more where the answer begins."""
SPAN = 256
"""Contexts are made in multiples of so many tokens (``LlamaCppEngine._need``)."""
CHUNK = 4 * MIB
"""Bytes of float32 that an update works on at a time (``delta.CHUNK_BYTES``)."""
EVENLY = 100
"""Generations that are looked at one by one."""
STEPS = 64
"""Tokens of a reply that are looked at one by one: the rest goes on as these do."""
SIMULATED = 128
"""Jobs that are run on counting streams; of more, their share is scaled."""
CALIBRATION_ERROR = 0.5
PAPER_ERROR = 1.0


@dataclass(frozen=True)
class Host:
    """What one engine takes of the host beyond what the model's shapes say, in bytes; all measured on Linux x86-64.

    libraries: peak resident set of a run on a model of next to no size. entry: per token and per merge of the
    vocabulary, in Python and in the engine. kv: of one number in the cache. mapped: resident bytes per byte of a float
    weight that stays in its file. most: sequences at once. by_need: of these no more are made than there are jobs and
    memory. seamless, ragged: see :class:`streams.Streams`.
    """

    libraries: int
    entry: int
    kv: int
    mapped: int
    most: int
    by_need: bool
    seamless: bool
    ragged: bool


LLAMACPP = Host(libraries=60 * MIB, entry=300, kv=2, mapped=1, most=256, by_need=True, seamless=True, ragged=False)
"""``edgees tune`` on tests/models.py's tiny model (63 MiB); with 152 thousand tokens, and SmolLM2's 49 thousand."""
TORCH = Host(libraries=355 * MIB, entry=290, kv=4, mapped=2, most=1 << 16, by_need=False, seamless=False, ragged=True)
"""On the CPU, torch 2.13 and transformers 5.24: tests/hf_models.py's tiny model (361 MiB), SmolLM2-135M (712 MiB and
more). Importing both and a model's code takes 326 MiB."""
HOSTS = {"llamacpp": LLAMACPP, "torch": TORCH}
CUDA_HOST = 900 * MIB
CUDA_DEVICE = 450 * MIB
CUDA_KV = 2
"""From paper: CUDA's libraries in the host's memory, its context and workspaces on the device, bytes of a number."""


@dataclass(frozen=True)
class Card:
    """memory: bytes; bandwidth: bytes a second; peak: multiply-adds a second of the matrix units, 16-bit with float32
    sums. Vendors' data sheets, half of "FLOPS", without sparsity."""

    memory: int
    bandwidth: float
    peak: float


CARDS: dict[str, Card] = {
    "t4": Card(15 << 30, 300e9, 32e12),
    "rtx3060": Card(12 << 30, 360e9, 12.7e12),
    "rtx3090": Card(24 << 30, 936e9, 35.5e12),
    "rtx4060": Card(8 << 30, 272e9, 15.1e12),
    "rtx4070laptop": Card(8 << 30, 256e9, 15.6e12),
    "rtx4070": Card(12 << 30, 504e9, 29.1e12),
    "rtx4090": Card(24 << 30, 1008e9, 82.6e12),
    "rtx5090": Card(32 << 30, 1792e9, 104.8e12),
    "l4": Card(23 << 30, 300e9, 60e12),
    "a100": Card(80 << 30, 2039e9, 156e12),
    "h100": Card(80 << 30, 3350e9, 494e12),
    "h200": Card(141 << 30, 4800e9, 494e12),
}
CARD_BANDWIDTH, CARD_PEAK = 0.6, 0.3
"""Shares of a card's data sheet that a decode and a prompt are taken to reach."""
LAUNCH = 8e-6
KERNELS = 16
"""Seconds per kernel launched, and kernels per layer."""


@dataclass(frozen=True)
class Weight:
    """One tensor: canonical name; rows, cols; its type in the engine's memory and bytes there; possible: it can be
    tuned; permuted: its rows are stored in another order than the canonical one."""

    name: str
    rows: int
    cols: int
    vector: bool
    type_name: str
    nbytes: int
    possible: bool
    permuted: bool = False

    @property
    def size(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Model:
    """What the headers say. file: bytes mapped from the file, 0 if the engine holds its own copy. entries: of the
    vocabulary, merges included. kv: numbers kept per token and layer. queries: width of a layer's queries."""

    path: Path
    arch: str
    tensors: tuple[Weight, ...]
    file: int
    entries: int
    vocabulary: int
    context: int
    layers: int
    width: int
    inner: int
    queries: int
    kv: int

    @cached_property
    def head(self) -> Weight:
        """What the logits are a product with: the head, or the embedding where they are one."""
        named = {t.name: t for t in self.tensors}
        for name in ("lm_head.weight", "gguf:output.weight", "model.embed_tokens.weight", "gguf:token_embd.weight"):
            if name in named:
                return named[name]
        raise ModelError(f"{self.path} has neither an output head nor a token embedding")

    @property
    def products(self) -> list[Weight]:
        """The matrices that every token is multiplied with."""
        return [t for t in self.tensors if not t.vector and t is not self.head and not _EMBEDDING.search(t.name)]


_EMBEDDING = re.compile(r"(embed_tokens|token_embd)\.weight$")


def read(chosen: Config) -> Model:
    """The headers of the model that a configuration names.

    :raises ModelError: no such model, or one that the engine cannot run. :raises UsageError: an engine without models.
    """
    if chosen.engine == "llamacpp":
        return _read_gguf(model_path.resolve(chosen.model))
    if chosen.engine == "torch":
        return _read_folder(model_path.resolve_folder(chosen.model))
    raise UsageError(f"engine {chosen.engine} has nothing to estimate", "use --engine llamacpp or torch")


def _read_gguf(path: Path) -> Model:
    with GgufFile(path) as file:
        tensors = []
        for source, t in file.tensors.items():
            name = canonical(file.arch, source) or f"gguf:{source}"
            permuted = bool(rope_permuted(file.arch, source, file.metadata))
            possible = t.type_name in blocks.TYPES and len(t.dims) <= 2 and not (t.vector and permuted)
            possible = possible and not source.startswith("rope_")  # llama.cpp's own tables
            tensors.append(Weight(name, *t.shape, t.vector, t.type_name, t.nbytes, possible, permuted))
        width, heads = _number(file, "embedding_length"), _largest(file, "attention.head_count", 1)
        head = _number(file, "attention.key_length", width // max(heads, 1))
        value = _number(file, "attention.value_length", width // max(heads, 1))
        tokens, merges = (file.metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "merges"))
        rows = next((t.shape[0] for n, t in file.tensors.items() if n == "token_embd.weight"), len(tokens))
        return Model(
            path, file.arch, tuple(tensors), file.size, len(tokens) + len(merges),
            rows, _number(file, "context_length"), _number(file, "block_count"), width,
            _largest(file, "feed_forward_length", 0), heads * head,
            _largest(file, "attention.head_count_kv", heads) * (head + value),
        )  # fmt: skip


def _number(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.get(key, default)
    if not isinstance(value, int):
        raise ModelError(f"{file.path}: key {file.arch}.{key} is {'missing' if value is None else repr(value)}")
    return value


def _largest(file: GgufFile, key: str, default: int) -> int:
    value = file.get(key, default)
    return max(value) if isinstance(value, list) else int(value)


def _read_folder(path: Path) -> Model:
    with HfFolder(path) as folder:
        settings = {**folder.config, **folder.config.get("text_config", {})}
        tensors = []
        for name, t in folder.tensors.items():
            rows, cols = t.shape
            possible = t.type_name in blocks.TYPES and len(t.dims) <= 2
            tensors.append(Weight(name, rows, cols, t.vector, t.type_name, _held(t.type_name, rows, cols), possible))

    def number(key: str, default: int | None = None) -> int:
        value = settings.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{path / 'config.json'}: {key} is {'missing' if value is None else repr(value)}")
        return value

    width, heads = number("hidden_size"), number("num_attention_heads")
    head, vocabulary = number("head_dim", width // max(heads, 1)), number("vocab_size")
    return Model(
        path, folder.arch, tuple(tensors), 0, 2 * vocabulary, vocabulary, number("max_position_embeddings", 1 << 30),
        number("num_hidden_layers"), width, number("intermediate_size", 4 * width), heads * head,
        2 * number("num_key_value_heads", heads) * head,
    )  # fmt: skip


def _held(type_name: str, rows: int, cols: int) -> int:
    """Bytes of a matrix in the torch engine: packed codes and float32 absmax, else the file's type."""
    known = blocks.TYPES.get(type_name)
    return rows * -(-cols // known.weights) * known.bytes if known else 4 * rows * cols


# --- what the scheduler does --------------------------------------------------------------------------------------


@dataclass
class Calls:
    """Calls of an engine: (columns, rows of logits) -> how often; attended: tokens looked at by all of them."""

    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)
    attended: float = 0.0
    scale: float = 1.0

    @property
    def outputs(self) -> int:
        return max((outputs for _, outputs in self.shapes), default=0)

    @property
    def tokens(self) -> float:
        return self.scale * sum(columns * n for (columns, _), n in self.shapes.items())


class _Counting:
    """Streams that compute nothing, and a vocabulary in which no answer ends (:mod:`edgees.backends.streams`)."""

    def __init__(self, parallel: int, micro: int, outputs: int, seamless: bool, ragged: bool) -> None:
        self.parallel, self.micro, self.outputs, self.length = parallel, micro, outputs, 1 << 30
        self.seamless, self.ragged = seamless, ragged
        self.calls = Calls()

    def copy(self, source: int, target: int) -> None:
        pass

    def trim(self, stream: int, length: int) -> None:
        pass

    def decode(
        self, streams: Sequence[int], tokens: Sequence[Sequence[int]], members: Sequence[Member],
        wanted: Sequence[Sequence[bool]], starts: Sequence[int],
    ) -> np.ndarray:  # fmt: skip
        outputs = sum(map(sum, wanted))
        self.calls.shapes[len(tokens) * max(map(len, tokens)), outputs] += 1
        self.calls.attended += sum(len(ids) * (start + len(ids) / 2) for ids, start in zip(tokens, starts, strict=True))
        return np.zeros(outputs, np.uint64)

    def ends_turn(self, token: int) -> bool:
        return False

    def piece(self, token: int) -> bytes:
        return b""

    def sample(self, jobs: Sequence[Job], rows: np.ndarray) -> list[int]:
        return [-1] * len(jobs)

    def logprob(self, rows: np.ndarray, tokens: Sequence[int]) -> list[float]:
        return [0.0] * len(rows)


def pieces(text: str) -> list[int]:
    """Stand-ins for a text's tokens: equal beginnings have equal ones."""
    data = text.encode("utf-8", "surrogatepass")
    return [int.from_bytes(data[i : i + BYTES_PER_TOKEN], "little") + 1 for i in range(0, len(data), BYTES_PER_TOKEN)]


def count(text: str) -> int:
    """Tokens that a text is taken to have: ``len(pieces(text))``."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


@dataclass(frozen=True)
class Work:
    """What a run asks of an engine. answers: most tokens of a reply; limit: tokens that a sequence may have."""

    chosen: Config
    task: Task
    limit: int

    @property
    def episodes(self) -> bool:
        """Whether a rollout is more than one answer."""
        return self.task.episodes is not None or bool(self.chosen.agent_cmd)

    @property
    def answers(self) -> int:
        return self.chosen.max_tokens or self.task.max_tokens

    @cached_property
    def context(self) -> Context:
        return first_context(self.chosen)

    @property
    def grown(self) -> int:
        """Tokens that the context may have come to."""
        return self.chosen.evolve_tokens if self.chosen.evolve else 0

    def _conversation(self, row: Row) -> list[dict[str, Any]]:
        system = self.chosen.system if self.context.system is None else self.context.system
        return self.context.apply(self.task.conversation(row, system))

    def prompt(self, row: Row) -> list[int]:
        tokens = [0] * self.grown
        for message in self._conversation(row):
            tokens += [0] * MESSAGE_TOKENS + pieces(message["content"])
        return (tokens + [0] * MESSAGE_TOKENS)[: max(1, self.limit - 1)]

    @property
    def again(self) -> int:
        """Tokens by which a conversation grows from one try to the next: the answer, and the feedback to it."""
        return 2 * MESSAGE_TOKENS + self.answers + count(feedback(0.0))

    def prompts(self, row: Row) -> list[list[list[int]]]:
        """Of a row's attempts: those made at once, round by round. Every try but the last is taken to fail."""
        tries, prompt = self.chosen.tries, self.prompt(row)
        if tries.kind != "retry":
            return [[prompt] * tries.count]
        return [[(prompt + [0] * (self.again * i))[: max(1, self.limit - 1)]] for i in range(tries.count)]

    def target(self, row: Row) -> list[int]:
        return [*pieces(row.answer or ""), 0]

    @property
    def heldout(self) -> list[Row]:
        rows = list(self.task.heldout)
        return rows[: self.chosen.eval_rows or len(rows)]

    @cached_property
    def length(self) -> int:
        """Tokens of the longest sequence; of episodes what engines begin with, as nobody knows how long they get."""
        if self.episodes:
            return min(2 * FIRST_LENGTH, self.limit)
        longest = 0
        for row in (*self.task.train, *self.heldout):
            messages = self._conversation(row)
            prompt = sum(MESSAGE_TOKENS + count(m["content"]) for m in messages) + MESSAGE_TOKENS
            target = 1 + count(row.answer or "") if self.chosen.loglik else 0
            tries = self.chosen.tries
            more = self.again * (tries.count - 1) if tries.kind == "retry" else 0
            longest = max(longest, prompt + more + self.answers, prompt + target)
        return min(longest + self.grown, self.limit)

    @property
    def weights(self) -> list[float]:
        """Weight of the likelihood in the reward, of every generation or of as many, evenly, over the run."""
        c, count = self.chosen, min(self.chosen.max_generations or EVENLY, EVENLY)
        return [loglik_weight(g / count, c.loglik, c.loglik_hold, c.loglik_end) for g in range(count)]

    def jobs(self) -> int:
        """Sequences that could be computed at once."""
        rows = min(self.chosen.rows, len(self.task.train))
        tries = self.chosen.tries
        replies = 1 if tries.kind == "retry" else tries.count
        each = 1 if min(self.weights) == 1.0 else replies
        return max(self.chosen.members * rows * each, len(self.heldout) * replies)

    def calls(self, streams: int, micro: int, outputs: int) -> dict[str, Calls]:
        """Of a generation's replies and likelihoods, of an evaluation, and of the probe before the first generation.

        streams: at once; micro, outputs: tokens and rows of logits of a call at most.
        """
        # Seamless streams draft answers when few are left: what that saves, replies are not taken to save.
        host = HOSTS[self.chosen.engine]
        rows, members, weights = self.task.train[: self.chosen.rows], self.chosen.members, self.weights
        probe = self.task.train[: tune.PROBE_ROWS]
        wanted: dict[str, tuple[Sequence[Row], int, bool]] = {"probe": (probe, 1, False)}
        if self.heldout:
            wanted["evaluation"] = (self.heldout, 1, False)
        if min(weights) < 1.0:
            wanted["replies"] = (rows, members, False)
        if max(weights) > 0.0:
            wanted |= {"likelihoods": (rows, members, True), "probe_likelihoods": (probe, 1, True)}
        return {
            name: self._count(_Counting(streams, micro, outputs, host.seamless and what[2], host.ragged), *what)
            for name, what in wanted.items()
        }

    def _count(self, counting: _Counting, rows: Sequence[Row], members: int, likely: bool) -> Calls:
        """The calls in which ``members`` answer ``rows``, or (likely) the reference answers are scored."""
        rounds = [self.prompts(row) for row in rows] if not likely else []
        each = len(rows) * (len(rounds[0][0]) if rounds else 1)
        simulated = min(members, max(1, max(SIMULATED, counting.parallel) // each))
        part = [Member(i // 2, 1.0 - i % 2 * 2, i // 2) for i in range(simulated)]
        scheduler = Scheduler(counting, counting)
        if likely:
            jobs: list[Job] = []
            targets: list[list[int]] = []
            for member in part:
                for row in rows:
                    prompt, target = self.prompt(row), self.target(row)
                    whole = [*prompt, *target[:-1]][: self.limit]
                    jobs.append(Job(len(jobs), member, whole, first_output=len(prompt) - 1))
                    targets.append(target)
            scheduler.score(jobs, targets)
        for at_once in zip(*rounds, strict=True):
            self._reply(counting, scheduler, part, [prompt for prompts in at_once for prompt in prompts])
        counting.calls.scale = members / simulated
        return counting.calls

    def _reply(
        self, counting: _Counting, scheduler: Scheduler, part: Sequence[Member], prompts: Sequence[list[int]]
    ) -> None:
        """Replies of every member to every prompt, made together."""
        jobs: list[Job] = []
        for member in part:
            for prompt in prompts:
                room = max(1, min(self.answers, self.limit - len(prompt)))
                request = Request(member, tuple(prompt), room)
                jobs.append(Job(len(jobs), member, prompt, limit=min(room, STEPS), request=request))
        scheduler.complete(jobs)
        at_once = min(counting.parallel, len(jobs))
        rest = [(len(j.tokens), j.request.max_tokens) for j in jobs if j.request and j.request.max_tokens > STEPS]
        counting.calls.shapes[at_once, at_once] += sum(limit - STEPS for _, limit in rest) // at_once
        counting.calls.attended += sum((n - STEPS) * (k + (n + STEPS) / 2) for k, n in rest)


@dataclass(frozen=True)
class Setting:
    """One configuration brought to numbers. streams: sequences at once; context: tokens of each; micro, outputs: tokens
    and rows of logits of a call at most; calls: by what they are for (:meth:`Work.calls`)."""

    work: Work
    model: Model
    streams: int
    context: int
    micro: int
    outputs: int
    calls: Mapping[str, Calls]

    @property
    def chosen(self) -> Config:
        return self.work.chosen

    @property
    def host(self) -> Host:
        return HOSTS[self.chosen.engine]

    @cached_property
    def tuned(self) -> list[Weight]:
        pattern = re.compile(self.chosen.pattern)
        return [t for t in self.model.tensors if t.possible and pattern.search(t.name)]

    @property
    def rows_of_logits(self) -> int:
        """Of the call that has most."""
        return max(calls.outputs for calls in self.calls.values())


def plan(chosen: Config, model: Model, task: Task, available: int | None, on_device: bool = False) -> Setting:
    """How the engine would set itself up. available: bytes that are free as it sees it, None: unknown."""
    host = HOSTS[chosen.engine]
    limit = min(chosen.context or model.context, model.context)
    work = Work(chosen, task, limit)
    context = -(-(limit if chosen.context else work.length) // SPAN) * SPAN
    streams = chosen.parallel or SEQUENCES
    if host.by_need and not chosen.parallel:
        streams = min(streams, work.jobs())
        if available is not None:
            streams = max(1, min(streams, available // 2 // (context * model.layers * model.kv * host.kv)))
    micro = max(torch_nf4.MICRO_BATCH["cuda"] if on_device else llamacpp.MICRO_BATCH, streams)
    outputs = output_rows(model.vocabulary, streams, micro)
    return Setting(work, model, streams, context, micro, outputs, work.calls(streams, micro, outputs))


# --- memory -------------------------------------------------------------------------------------------------------


def learned(chosen: Config, t: Weight) -> tuple[int, int]:
    """Bytes of (what is held for the products of a tuned tensor, its float32 delta on disk)."""
    if t.vector:
        return 4 * t.cols, 4 * t.cols
    if chosen.view == "adapter":
        pool = -(-t.cols // 128) * 16
        return chosen.factors * (4 * t.rows + pool), 4 * t.rows * chosen.factors
    if chosen.view == "lattice" and not blocks.is_float(t.type_name):
        return t.nbytes, 4 * t.size
    return t.rows * blocks.plane_row_bytes(chosen.bits if chosen.view == "refined" else 8, t.cols), 4 * t.size


def step_buffers(chosen: Config, tensors: Sequence[Weight]) -> int:
    """Bytes that an update needs besides, at most: a piece of the delta and its squares, or whole permuted tensors."""
    largest = 0
    for t in tensors:
        if chosen.view == "adapter":  # squares of the factors and of the pool in 64 bits (Delta._adapter_drift)
            largest = max(largest, 8 * chosen.factors * (2 * t.rows + t.cols))
        else:
            whole = 2 * 4 * t.size if t.permuted else 0
            largest = max(largest, whole, 3 * min(CHUNK, 4 * t.size))
    return largest


def compute_buffers(setting: Setting, size: int = 4) -> int:
    """Bytes of one call's activations, of ``size`` bytes each: its logits (always float32), or the widest part of a
    layer, beside two copies of the residual; and the mask."""
    model, columns = setting.model, setting.micro
    wide = columns * max(3 * model.inner, 2 * model.queries + model.kv)
    logits = 4 * setting.rows_of_logits * model.vocabulary
    return max(logits, size * wide) + 2 * size * columns * model.width + 2 * setting.context * columns


Bytes = dict[str, int]


def host_bytes(setting: Setting, on_device: bool = False) -> Bytes:
    """Resident bytes of the process by purpose."""
    c, model, host = setting.chosen, setting.model, setting.host
    found: Bytes = {"libraries": host.libraries, "tokenizer": model.entries * host.entry}
    if on_device:
        found["libraries"] += CUDA_HOST
    else:
        floats = sum(t.nbytes for t in model.tensors if not t.vector and t.type_name in ("F32", "F16", "BF16"))
        held = sum(t.nbytes for t in model.tensors) + (host.mapped - 1) * floats
        found["weights"] = model.file or held
        found["kv"] = setting.streams * setting.context * model.layers * model.kv * host.kv
        found["compute"] = compute_buffers(setting)
        found["logits"] = 4 * setting.rows_of_logits * model.vocabulary
        found["learned"] = sum(learned(c, t)[0] for t in setting.tuned)
    found["update"] = step_buffers(c, setting.tuned)
    return found


def device_bytes(setting: Setting) -> Bytes:
    """Bytes on the card by purpose (torch engine)."""
    c, model = setting.chosen, setting.model
    return {
        "libraries": CUDA_DEVICE,
        "weights": sum(t.nbytes for t in model.tensors),
        "kv": setting.streams * setting.context * model.layers * model.kv * CUDA_KV,
        "compute": compute_buffers(setting, CUDA_KV),
        "logits": 4 * setting.rows_of_logits * model.vocabulary,
        "learned": sum(learned(c, t)[0] for t in setting.tuned),
        "update": 2 * min(CHUNK, max((4 * t.size for t in setting.tuned), default=0)),
    }


def loading_bytes(setting: Setting) -> int:
    """Host bytes at most while a torch model is loaded: one tensor as it is in the file, beside what is held."""
    model, host = setting.model, setting.host
    held = sum(t.nbytes for t in model.tensors)
    return host.libraries + model.entries * host.entry + held + max(4 * t.size for t in model.tensors)


def peak(parts: Mapping[str, int], tuning: bool = True) -> int:
    """Bytes at most; without ``tuning`` those of plain inference in the same settings."""
    return sum(n for name, n in parts.items() if tuning or name not in ("learned", "update"))


def disk_bytes(setting: Setting) -> Bytes:
    """Of the run folder: the learned weights, the best of them, and its replacement while that is written."""
    delta = sum(learned(setting.chosen, t)[1] for t in setting.tuned)
    return {"delta": delta, "best": delta, "in_the_making": delta}


# --- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """Seconds of a call and of an update. source: calibration or the card's name; error: relative."""

    source: str
    error: float
    columns: tuple[int, ...]
    body: tuple[float, ...]
    head: tuple[float, ...]
    attention: float
    """Per token of context looked at by one token, all layers."""
    step: float
    per_pair: float

    def of(self, calls: Calls) -> float:
        total = calls.attended * self.attention
        for (columns, outputs), n in calls.shapes.items():
            total += n * float(np.interp(columns, self.columns, self.body))
            total += n * float(np.interp(outputs, self.columns, self.head)) if outputs else 0.0
        return total * calls.scale


LAYER_OVERHEAD = 1.1
"""A call's seconds over those of its products: norms, rotation, activation, the graph. Eight measurements, with
SmolLM2-135M and a 1.1 B model on two cores that others used too: 0.8 to 1.7, median 1.05."""
BUDGET = 400_000_000
"""Multiply-adds per measured product."""
MOVED = 6e-9
"""Seconds per weight and update for the delta on its way: read four times from the system's cache, written once."""
SPREAD = 16 * MIB
"""Bytes of weights of each shape to go through, so that they do not stay in a cache."""


def calibrate(setting: Setting) -> Pace:
    """Measure our own products on the model's shapes, and an update on a piece: a second or two.

    :raises UsageError: the model has no matrix with a codec.
    """
    model, c = setting.model, setting.chosen
    native.threads(c.threads)
    tuned = set(setting.tuned)
    shapes = Counter((t.type_name, t.rows, t.cols, t in tuned) for t in model.products if t.type_name in blocks.TYPES)
    if not shapes:
        raise UsageError(f"{model.path} has no matrix that our products can work with")
    columns = tuple(sorted({1, 8, 32, min(256, setting.micro)}))
    body = tuple(
        LAYER_OVERHEAD * sum(n * _seconds(c, shape, columns=k, copies=n) for shape, n in shapes.items())
        for k in columns
    )
    head = model.head
    of_head = (head.type_name, head.rows, head.cols, head in tuned)
    known = head.type_name in blocks.TYPES
    heads = tuple(_seconds(c, of_head, columns=k, copies=1) if known else 0.0 for k in columns)
    weights = sum(t.size for t in model.products)
    attention = body[0] / weights * 2 * model.queries * model.layers
    step, per_pair = _step_seconds(setting)
    return Pace("calibration", CALIBRATION_ERROR, columns, body, heads, attention, step, per_pair)


def _seconds(c: Config, shape: tuple[str, int, int, bool], *, columns: int, copies: int) -> float:
    """Seconds of one product of ``columns`` columns, each of its own member, with matrices of this shape."""
    type_name, rows, cols, tuned = shape
    few = max(1, min(rows, BUDGET // (columns * cols)))
    width = blocks.row_bytes(type_name, cols)
    copies = max(1, min(copies, SPREAD // (few * width), BUDGET // (columns * few * cols)))
    base = np.full((copies, few, width), 0x11, np.uint8)  # small numbers in every type
    t = native.Tensor(
        type=blocks.TYPES[type_name].id, rows=few, cols=cols, row_stride=width, id=1, rho=0.1 if tuned else 0.0,
        cell=0.02,
    )  # fmt: skip
    kept: list[np.ndarray] = []
    if tuned and c.view == "adapter":
        kept = [np.zeros((few, c.factors), np.float32), noise.pool_packed(0, 1, cols, c.factors)]
        t.factors, t.a, t.pool = c.factors, native.pointer(kept[0]), native.pointer(kept[1])
    elif tuned and (c.view == "refined" or blocks.is_float(type_name)):
        bits = c.bits if c.view == "refined" else 8
        kept = [np.full((few, blocks.plane_row_bytes(bits, cols)), 0x88, np.uint8)]
        t.bits, t.plane = bits, native.pointer(kept[0])
    kind = native.NoiseKind(noise.KINDS.index(c.noise), c.rank)
    members = (native.Member * columns)(*[native.Member(k + 1, 0.04, k) for k in range(columns)])
    owner = np.arange(columns, dtype=np.int32)
    x = np.random.default_rng(0).standard_normal((columns, cols)).astype(np.float32)
    y = np.empty((columns, few), np.float32)
    xs = (ctypes.c_void_p * columns)(*[row.ctypes.data for row in x])
    ys = (ctypes.c_void_p * columns)(*[row.ctypes.data for row in y])

    def go_through() -> float:
        begin = time.perf_counter()
        for k in range(copies):
            t.base = native.pointer(base[k])
            code = native.lib().edgees_product(
                ctypes.byref(t), ctypes.byref(kind), members, native.pointer(owner), columns, xs, ys
            )
            native.check(code, f"product of {few} x {cols} {type_name}")
        return time.perf_counter() - begin

    go_through()
    return statistics.median(go_through() for _ in range(3)) / copies * rows / few


def _step_seconds(setting: Setting) -> tuple[float, float]:
    """(seconds of an update, and more of it per pair): dense deltas only, an adapter's is next to nothing."""
    c, tuned = setting.chosen, setting.tuned
    weights = sum(t.size for t in tuned)
    if c.view == "adapter":
        return 0.0, 0.0
    rows, cols = 256, 1024
    delta = np.full((rows, cols), 1e-3, np.float32)
    keys, coefs = np.arange(8, dtype=np.uint64), np.full(8, 1e-6, np.float32)
    base = np.full((rows, blocks.row_bytes("Q4_1", cols)), 0x11, np.uint8)
    order, squares = np.arange(rows, dtype=np.int32), np.empty((rows, cols), np.float64)

    def apply(pairs: int) -> float:
        begin = time.perf_counter()
        code = native.lib().edgees_delta_apply(
            native.pointer(delta), rows, cols, 0, 1, noise.KINDS.index(c.noise), c.rank, 0, pairs, native.pointer(keys),
            native.pointer(coefs), 1.0,
        )  # fmt: skip
        native.check(code, "update")
        return time.perf_counter() - begin

    def refresh() -> float:
        begin = time.perf_counter()
        np.multiply(delta, delta, out=squares, dtype=np.float64).sum()
        blocks.plane_encode("Q4_1", base, delta, order, 1, 1, c.bits, 0, 0.1)
        return time.perf_counter() - begin

    for warm in (apply, apply):
        warm(8)
    eight, one = (statistics.median(apply(n) for _ in range(3)) for n in (8, 1))
    each = statistics.median(refresh() for _ in range(3))
    scale = weights / (rows * cols)
    once = scale * (max(0.0, one - (eight - one) / 7) + 2 * each) + MOVED * weights
    return once, scale * max(0.0, eight - one) / 7


def on_paper(setting: Setting, name: str, card: Card) -> Pace:
    """Seconds by a card's data sheet: bytes read, or multiply-adds, whichever takes longer, and launches."""
    model, c = setting.model, setting.chosen
    extra = sum(learned(c, t)[0] for t in setting.tuned if t in model.products)
    columns = (1, 8, 32, setting.micro)

    def product(nbytes: int, size: int, n: int) -> float:
        return max(nbytes / (card.bandwidth * CARD_BANDWIDTH), size * n / (card.peak * CARD_PEAK))

    read, size = sum(t.nbytes for t in model.products) + extra, sum(t.size for t in model.products)
    body = tuple(product(read, size, n) + LAUNCH * KERNELS * model.layers for n in columns)
    head = tuple(product(model.head.nbytes, model.head.size, n) for n in columns)
    attention = model.kv * CUDA_KV * model.layers / (card.bandwidth * CARD_BANDWIDTH)
    dense = 0 if c.view == "adapter" else sum(t.size for t in setting.tuned)
    link, disk = 12e9, 1e9  # bytes a second, PCIe 4 x8 of a laptop and its disk
    step = 8 * dense / link + 8 * dense / disk
    return Pace(name, PAPER_ERROR, columns, body, head, attention, step, dense / (card.bandwidth * CARD_BANDWIDTH))


def run_time(setting: Setting, pace: Pace) -> dict[str, Any]:
    """Seconds of a generation, an evaluation and the run; tokens of a generation."""
    c = setting.chosen
    weights = setting.work.weights
    update = pace.step + pace.per_pair * c.pairs
    seconds = {name: pace.of(calls) for name, calls in setting.calls.items()}
    each = [
        update + seconds.get("replies", 0.0) * (w < 1.0) + seconds.get("likelihoods", 0.0) * (w > 0.0) for w in weights
    ]
    evaluation = seconds.get("evaluation", 0.0)
    if c.max_generations is None:
        total = c.time
    else:
        times = 1 + -(-c.max_generations // (c.eval_every or c.max_generations))
        total = seconds["probe"] + seconds.get("probe_likelihoods", 0.0) + evaluation * times
        total += sum(each) / len(each) * c.max_generations
        total = min(total, c.time) if c.time else total
    tokens = sum(calls.tokens for name, calls in setting.calls.items() if name in ("replies", "likelihoods"))
    return {
        "generation": each[0], "evaluation": evaluation, "update": update, "run": total, "tokens": round(tokens),
        "source": pace.source, "error": pace.error,
    }  # fmt: skip


# --- does it fit --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Bytes there are; None: unknown. device: None where nothing runs on a card."""

    host: int | None
    disk: int | None
    device: int | None


def lacks(setting: Setting, room: Room) -> list[str]:
    """What does not fit, in words."""
    found = []
    device = room.device is not None
    most = setting.host.most
    if setting.streams > most:
        found.append(f"{setting.streams} sequences at once, at most {most} are possible")
    needed = [
        ("memory", peak(host_bytes(setting, device)), room.host),
        ("disk", peak(disk_bytes(setting)), room.disk),
    ]
    if device:
        needed.append(("memory of the card", peak(device_bytes(setting)), room.device))
    if setting.chosen.engine == "torch":
        needed.append(("memory while loading", loading_bytes(setting), room.host))
    for what, size, there in needed:
        if there is not None and size > there:
            found.append(f"{report.size(size)} of {what}, {report.size(there)} there")
    return found


def alternatives(setting: Setting) -> Iterator[dict[str, Any]]:
    """Changes of settings that need less, the most harmless first."""
    c, streams = setting.chosen, setting.streams
    fewer: list[dict[str, Any]] = []
    while streams > 1:
        streams = (streams + 1) // 2
        fewer.append({"parallel": streams})
    shorter: list[dict[str, Any]] = [{"context": setting.work.length}] if c.context > setting.work.length else []
    bits: list[dict[str, Any]] = [{"bits": b} for b in (4, 2) if c.view == "refined" and b < c.bits]
    adapter: list[dict[str, Any]] = [{"scope": "adapter"}] if c.view != "adapter" else []
    adapter += [{"scope": "adapter", "factors": k} for k in (16, 8) if c.rank <= k < c.factors]
    for z in ({}, *bits, *adapter):
        for a in ({}, *shorter):
            yield from ({**a, **b, **z} for b in ({}, *fewer))


def nearest(setting: Setting, task: Task, room: Room, available: int | None) -> dict[str, Any] | None:
    """The first of :func:`alternatives` that fits, with as many sequences as do; tried in full. None: there is none."""

    def fits(changes: Mapping[str, Any]) -> bool:
        try:
            other = config.load(None, {**setting.chosen.public(), **changes})
        except UsageError:  # an adapter cannot have every kind of noise
            return False
        return not lacks(plan(other, setting.model, task, available, room.device is not None), room)

    found = next((changes for changes in alternatives(setting) if changes and fits(changes)), None)
    if found and "parallel" in found:
        low, high = found["parallel"], min(2 * found["parallel"], setting.streams)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits({**found, "parallel": middle}) else (low, middle)
        found["parallel"] = low
    return found


# --- the command --------------------------------------------------------------------------------------------------


def estimate(chosen: Config, *, card: str = "", budget: str = "", task: Task | None = None) -> dict[str, Any]:
    """Everything, JSON-ready; nothing is written and no engine is loaded.

    card: a name of :data:`CARDS` (torch engine): its memory and pace instead of this machine's. budget: as "8G" (units
    of 1024): memory to fit into, of the card where there is one. task: instead of the configuration's.

    Keys: model, engine, card, settings, assumptions, host, device (None: there is none), plain, ratio, disk, time,
    available, fits, problems, nearest. host and device hold bytes by purpose and their "peak"; plain the peaks of
    inference in the same settings; ratio: peak of tuning over plain where the engine computes.

    :raises UsageError: unknown card or budget, or a card without the torch engine. :raises ModelError: of the headers.
    """
    chosen = chosen.absolute()
    task = task or opening.open_task(chosen)
    chosen = chosen.with_defaults(task.defaults, f"task {task.name}")
    if not task.train:
        raise UsageError(f"task {task.name} has no rows to train on")
    limit = parse_bytes(budget) if budget else None
    name, size = _card(chosen, card)
    model, available = read(chosen), free_memory()
    on_device = size is not None
    setting = plan(chosen, model, task, available, on_device)
    room = Room(
        limit if limit is not None and not on_device else available,
        free_disk(chosen),
        (limit if limit is not None else size) if on_device else None,
    )
    host = host_bytes(setting, on_device)
    device = device_bytes(setting) if on_device else None
    busy = device or host
    problems = lacks(setting, room)
    time_: dict[str, Any] | None = None
    if setting.work.episodes:
        pass  # how long one takes shows only when it is played
    elif name in CARDS:
        time_ = run_time(setting, on_paper(setting, name, CARDS[name]))
    elif not on_device:
        time_ = run_time(setting, calibrate(setting))
    c = setting.chosen
    return {
        "model": {
            "name": c.model, "arch": model.arch, "weights": sum(t.size for t in model.tensors),
            "tuned": sum(t.size for t in setting.tuned), "tensors": len(setting.tuned),
        },
        "engine": c.engine, "card": name or None,
        "settings": {
            "scope": c.scope, "bits": c.bits if c.view == "refined" else 0,
            "factors": c.factors if c.view == "adapter" else 0, "parallel": setting.streams, "context": setting.context,
            "pairs": c.pairs, "rows": min(c.rows, len(task.train)),
        },
        "assumptions": assumptions(setting, on_device),
        "host": {**host, "peak": _host_peak(setting, on_device)},
        "device": {**device, "peak": peak(device)} if device else None,
        "plain": {"host": peak(host, False), "device": peak(device, False) if device else None},
        "ratio": peak(busy) / peak(busy, False),
        "disk": {**disk_bytes(setting), "peak": peak(disk_bytes(setting))},
        "time": time_,
        "available": {"host": room.host, "disk": room.disk, "device": room.device},
        "fits": not problems, "problems": problems,
        "nearest": nearest(setting, task, room, available) if problems else None,
    }  # fmt: skip


def _host_peak(setting: Setting, on_device: bool) -> int:
    loading = loading_bytes(setting) if setting.chosen.engine == "torch" else 0
    return max(peak(host_bytes(setting, on_device)), loading)


def require_fit(found: Mapping[str, Any]) -> None:
    """:raises WillNotFit: the estimate says so; the hint is a setting that was checked to fit."""
    if found["fits"]:
        return
    hint = "nothing nearer than a smaller model fits; --budget, --card and --run choose other room"
    if found["nearest"]:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found["nearest"].items())
        hint = f"this would fit: {flags}"
    raise WillNotFit(f"it will not fit: {'; '.join(found['problems'])}", hint)


def assumptions(setting: Setting, on_device: bool) -> list[str]:
    """What was taken for granted, in words."""
    c, work = setting.chosen, setting.work
    if work.episodes:
        return [
            f"episodes of at most {setting.context} tokens, which is not known before they are played (--context N "
            "sets it); for the time they take: edgees tune --dry-run"
        ]
    found = [
        f"{BYTES_PER_TOKEN} bytes of text a token, {MESSAGE_TOKENS} tokens around a message: the longest sequence has "
        f"{work.length} tokens"
        if not c.context
        else f"context of {setting.context} tokens as set",
        f"every reply takes all of its {work.answers} tokens"
        + (f", and all {c.tries.count} attempts are made" if not c.tries.single else ""),
    ]
    if on_device:
        found.append("what CUDA takes, and the card's pace, are from paper: the time may be off by a factor of two")
    return found


def lines(found: Mapping[str, Any]) -> list[str]:
    """For people."""
    settings, model = found["settings"], found["model"]
    scope = settings["scope"] + {
        "full": f", {settings['bits']} bits",
        "adapter": f", {settings['factors']} factors",
    }.get(settings["scope"], "")
    out = [
        f"model     {model['name']}: {model['arch']}, {model['weights']:,} weights, {model['tuned']:,} tuned",
        f"settings  {found['engine']}, scope {scope}; {settings['parallel']} sequences of {settings['context']} tokens",
        *(f"assumed   {text}" for text in found["assumptions"]),
        "",
    ]
    places = [("memory", found["host"], "host"), (f"card {found['card']}", found["device"], "device")]
    shown = [(title, parts, key) for title, parts, key in places if parts]
    out.append(f"{'':<12}" + "".join(f"{title:>20}" for title, _, _ in shown))
    names = dict.fromkeys(name for _, parts, _ in shown for name in parts if name != "peak")
    for name in (*names, "peak"):
        cells = (report.size(parts[name]) if name in parts else "-" for _, parts, _ in shown)
        out.append(f"{name:<12}" + "".join(f"{cell:>20}" for cell in cells))
    for title, source in (("inference", found["plain"]), ("there is", found["available"])):
        cells = (report.size(source[key]) if source[key] is not None else "?" for _, _, key in shown)
        out.append(f"{title:<12}" + "".join(f"{cell:>20}" for cell in cells))
    disk = found["available"]["disk"]
    out += [
        "",
        f"ratio     {found['ratio']:.2f} of inference in the same settings",
        f"disk      {report.size(found['disk']['peak'])}, {'?' if disk is None else report.size(disk)} free",
    ]
    if found["time"]:
        t = found["time"]
        out.append(
            f"time      {report.duration(t['generation'])} a generation, {report.duration(t['run'])} the run "
            f"(by {t['source']}, give or take {t['error']:.0%})"
        )
    return out


# --- what there is ------------------------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """``8G``, ``500M``, ``1.5GiB``, or bytes; units are powers of 1024. :raises UsageError: anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size < 1:
        raise UsageError(f"--budget {text!r} is no size", "write it like 8G or 500M")
    return size


def _card(chosen: Config, name: str) -> tuple[str, int | None]:
    """(name in :data:`CARDS` or the card's own, bytes of its memory); ("", None) where the CPU computes."""
    if name:
        if chosen.engine != "torch":
            raise UsageError(f"--card {name}: engine {chosen.engine} computes on the CPU", "add --engine torch")
        known = _known_card(name)
        if known is None:
            raise UsageError(f"--card {name!r} is not in the table", f"there are: {', '.join(CARDS)}; or use --budget")
        return known, CARDS[known].memory
    if chosen.engine != "torch" or chosen.device == "cpu":
        return "", None
    number = chosen.device.partition(":")[2] or "0"
    command = ["nvidia-smi", f"--id={number}", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        found, free = next(csv.reader(done.stdout.splitlines()))
        return _known_card(found) or found, int(free) * MIB
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError):  # no driver, or one without a card
        if chosen.device:
            raise UsageError(f"device = {chosen.device}: no such GPU here", "--card names another machine's") from None
        return "", None


def _known_card(name: str) -> str | None:
    """Its name in the table; those of vendors have the maker's in front, and the size and the socket behind."""
    plain = re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|gpu", "", name.lower())
    return next((key for key in CARDS if re.fullmatch(rf"{key}(sxm\d?|pcie|\d+gb)*", plain)), None)


def free_memory() -> int | None:
    """Bytes that this process may still take: what the system calls available, and a container's limit."""
    found: list[int] = []
    try:
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(meminfo["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(0, min(found)) if found else None


def free_disk(chosen: Config) -> int:
    """Bytes free where the run folder will be."""
    folder = Path(chosen.run or "runs").absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
