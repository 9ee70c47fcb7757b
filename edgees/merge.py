"""The model as it was scored: base and delta of a run put together, and written as GGUF in any type.

``Effective`` gives the weights that the engine multiplied with: the base decoded plus the view of the delta. A base is
a GGUF file, or a Hugging Face folder, which ``GgufForm`` then shows as the GGUF that it would be. The writers here are
shared by export (which names and checks files) and evaluate (which needs a plain copy to judge).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from edgees import blocks, config, model_path, noise
from edgees.backends.base import TensorInfo
from edgees.backends.llamacpp import quantize
from edgees.context import Context
from edgees.delta import Delta
from edgees.errors import ExportError, ModelError, RunError
from edgees.gguf_file import (
    FILE_TYPES,
    GgufFile,
    GgufTensor,
    NewTensor,
    Producer,
    require_space,
    type_sizes,
    write_all,
    write_like,
)
from edgees.gguf_from_hf import Rows, Twin
from edgees.hf_files import HfFolder
from edgees.history import History

FLOATS = ("F32", "F16", "BF16")
AFFINE = {"Q4_0": (15, False), "Q4_1": (15, True), "Q5_0": (31, False), "Q5_1": (31, True)}
"""Types that are rounded here with a search for the best scale: highest code, and whether there is an offset."""
K_MIXES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")
"""Types that llama.cpp's own quantiser writes."""
SAME = "same"
"""Every tensor in the base's own type: of a ``lattice`` run exactly what was scored."""
TYPES = (*FLOATS, "Q8_0", *AFFINE, *K_MIXES, SAME)
EXACT = frozenset({*FLOATS, "Q8_0", SAME})
"""Types that hold what was scored (to within their own rounding)."""

_PIECE = 1 << 22  # weights per piece


@dataclass
class Run:
    """An opened run folder: its base model and what it has learned."""

    folder: Path
    base: GgufFile | HfFolder
    delta: Delta
    settings: config.Config
    weights: str
    """``best`` (by held-out reward) or ``last``: which of the two this is."""
    context: Context
    """In force when these weights were evaluated, and what the run began with."""
    first: Context
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """How it was asked when it was scored (:mod:`edgees.recommend`)."""

    def close(self) -> None:
        self.delta.close()
        self.base.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(run_dir: str | Path, weights: str = "best") -> Run:
    """Open ``run_dir`` for reading. ``weights``: ``best`` falls back to ``last`` while nothing better was found.

    Errors: RunError for a folder that is no run or a base that is not the one tuned; ModelError for a bad base.
    """
    folder = Path(run_dir)
    history = History.open(folder / "history.jsonl", repair=False)
    resolved = folder / "config.resolved.toml"
    if not resolved.is_file():
        raise RunError(f"{folder} is no run folder: {resolved.name} is missing")
    settings = config.load(resolved)
    base = open_base(settings)
    try:
        wanted = str(history.header["base"])
        if base.sha256() != wanted:
            raise RunError(
                f"{base.path} is not the model that {folder} tuned: it has {base.sha256()}, the run had {wanted}",
                "put the original file back, or name it in config.resolved.toml (model = ...)",
            )
        best = folder / "best" / "delta.safetensors"
        chosen = "best" if weights == "best" and best.is_file() else "last"
        delta = Delta.open(best if chosen == "best" else folder / "delta.safetensors", write=False)
    except BaseException:
        base.close()
        raise
    return Run(
        folder, base, delta, settings, chosen, history.context(delta.generation), history.context(0),
        history.header.get("recommended", {}),
    )  # fmt: skip


def open_base(settings: config.Config) -> GgufFile | HfFolder:
    """The model of a run: the torch engine's are Hugging Face folders. :raises ModelError: missing or bad."""
    if settings.engine == "torch":
        return HfFolder(model_path.resolve_folder(settings.model))
    return GgufFile(model_path.resolve(settings.model))


class Effective:
    """Weights as they were scored, tensor by tensor, all float32, under the base's names and in its order: a GGUF's
    file order, a Hugging Face folder's canonical one.

    refined: decode(base) + step * code; adapter: decode(base) + A B^T; lattice: the moved codes, decoded;
    vectors: base + delta; tensors without a delta: the base. Bit for bit what the engine multiplies with.
    tensors: the base's; of a folder those as its engine holds them (NF4 linears, whatever the files have).
    """

    def __init__(self, base: GgufFile | HfFolder, delta: Delta) -> None:
        self.base, self.delta = base, delta
        if isinstance(base, GgufFile):
            self.tensors = base.tensors
            self.infos: dict[str, TensorInfo] = {info.source: info for info in delta.spec.tensors}
        else:
            self.tensors = {
                name: GgufTensor(name, t.type_name, t.shape, 0, 0, tuple(reversed(t.dims)))
                for name, t in base.tensors.items()
            }
            # by canonical name, so that a history made on a GGUF of the same model fits, too
            self.infos = {t.name: replace(t, source=t.name, heads=0) for t in delta.spec.tensors}
        missing = sorted(set(self.infos) - set(self.tensors))
        if missing:
            raise RunError(f"{base.path} has no tensor {missing[0]!r}, which {delta.path} holds a delta for")
        for name, info in self.infos.items():
            if self.tensors[name].shape != (info.rows, info.cols):
                raise RunError(f"{delta.path}: {info.name} is {info.rows}x{info.cols}, the base's differs")
        self._spans: dict[str, int] = {}
        self._dither = noise.dither_key(delta.spec.seed)

    def base_rows(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols]: the base alone, file order. ExportError naming a tensor whose type cannot be decoded."""
        t = self.tensors[name]
        n = t.shape[0] - row0 if n is None else n
        if isinstance(self.base, HfFolder):
            return np.asarray(self.base.rows(name, row0, n)).reshape(n, t.shape[1])
        raw = self.base.raw(name, row0, n)
        if t.type_name in blocks.TYPES:
            return blocks.decode(t.type_name, raw, n, t.shape[1])
        try:
            found = gguf.quants.dequantize(np.asarray(raw).reshape(n, -1), GGMLQuantizationType[t.type_name])
        except NotImplementedError:
            raise ExportError(f"{self.base.path}: tensor {name!r}: type {t.type_name} cannot be decoded") from None
        return np.ascontiguousarray(found, np.float32).reshape(n, t.shape[1])

    def delta_rows(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols]: the exact delta, file order."""
        info = self.infos[name]
        n = info.rows - row0 if n is None else n
        order = info.source_to_canonical()
        if order is None:
            return self.delta.rows(info.name, row0, n)
        # a head's rows are permuted among themselves: fetch the heads that the rows belong to
        hd = info.rows // info.heads
        first, last = row0 // hd * hd, -(-(row0 + n) // hd) * hd
        return np.ascontiguousarray(
            self.delta.rows(info.name, first, last - first)[order[row0 : row0 + n] - np.int32(first)]
        )

    def rows(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols]: what the engine multiplied with, file order."""
        t = self.tensors[name]
        n = t.shape[0] - row0 if n is None else n
        info = self.infos.get(name)
        if info is None:
            return self.base_rows(name, row0, n)
        if info.vector:
            return np.asarray(self.base_rows(name) + self.delta.vector(info.name)[None, :])
        if self.delta.spec.view == "adapter":
            return np.asarray(self.base_rows(name, row0, n) + self.delta_rows(name, row0, n))
        if self.on_lattice(name):
            return blocks.decode(t.type_name, self.lattice(name, row0, n), n, t.shape[1])
        return self._refined(t, info, row0, n)

    def label(self, name: str) -> str:
        """What errors call a tensor."""
        return name

    @property
    def origin(self) -> dict[str, Any]:
        """Keys that name the base by its hash (case 5) and what was learned on it."""
        return {"edgees.base": self.base.sha256(), "edgees.generation": int(self.delta.generation)}

    def write(self, target: Path, tensors: Mapping[str, tuple[str, Producer]], metadata: Mapping[str, Any]) -> None:
        """A GGUF like the base (a GGUF), with these tensors and keys."""
        assert isinstance(self.base, GgufFile)
        write_like(self.base, target, tensors, metadata=metadata)

    def on_lattice(self, name: str) -> bool:
        """Whether a tensor was tuned by moving its codes, so that its bytes in the base's type are what was scored."""
        info = self.infos.get(name)
        moved = info is not None and not info.vector and self.delta.spec.view == "lattice"
        return moved and not blocks.is_float(self.tensors[name].type_name)

    def lattice(self, name: str, row0: int, n: int) -> np.ndarray:
        """uint8: the base's blocks with their codes moved (:meth:`on_lattice` tensors), file order."""
        t, info = self.tensors[name], self.infos[name]
        order = _order(info, row0, n)
        delta = self.delta_rows(name, row0, n)
        return blocks.lattice_encode(t.type_name, self.base.raw(name, row0, n), delta, order, self._dither, info.id)

    def _refined(self, t: GgufTensor, info: TensorInfo, row0: int, n: int) -> np.ndarray:
        raw, span = self.base.raw(t.name, row0, n), self._span(t, info)
        bits, order = self.delta.spec.bits or 8, _order(info, row0, n)
        delta = self.delta_rows(t.name, row0, n)
        plane = blocks.plane_encode(t.type_name, raw, delta, order, self._dither, info.id, bits, span, info.rho)
        return blocks.effective(t.type_name, raw, n, t.shape[1], plane, bits, span, info.rho)

    def _span(self, t: GgufTensor, info: TensorInfo) -> int:
        if t.name not in self._spans:
            parts = ((self.base.raw(t.name, row0, n), self.delta_rows(t.name, row0, n)) for row0, n in pieces(t))
            self._spans[t.name] = blocks.plane_span(t.type_name, parts, info.rho)
        return self._spans[t.name]


class GgufForm:
    """A model in Hugging Face's form as the GGUF that it would be: an :class:`Effective` under llama.cpp's names.

    read: rows in Hugging Face's order; twin: the form; infos: tuned tensors by canonical name; origin: further keys.
    """

    def __init__(self, read: Rows, twin: Twin, infos: Mapping[str, TensorInfo], origin: Mapping[str, Any]) -> None:
        self.read, self.base, self.origin = read, twin, dict(origin)
        self.tensors = twin.tensors
        self.infos = {name: infos[part.source] for name, part in twin.parts.items() if part.source in infos}

    @classmethod
    def of(cls, effective: Effective) -> GgufForm:
        """The form of a tuned folder."""
        assert isinstance(effective.base, HfFolder)
        return cls(effective.rows, Twin(effective.base), effective.infos, effective.origin)

    def rows(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols]: what llama.cpp is to multiply with, file order."""
        return self.base.rows(self.read, name, row0, n)

    def label(self, name: str) -> str:
        return self.base.parts[name].source or name

    def on_lattice(self, name: str) -> bool:
        return False

    def write(self, target: Path, tensors: Mapping[str, tuple[str, Producer]], metadata: Mapping[str, Any]) -> None:
        made = [NewTensor(name, kind, self.tensors[name].dims, produce) for name, (kind, produce) in tensors.items()]
        write_all(target, self.base.pairs(metadata), made)


def convert(folder: Path, target: Path, type_name: str) -> list[str]:
    """A Hugging Face folder as it lies there, not brought to 4 bits, as GGUF of ``type_name``; returns notes."""
    with HfFolder(folder) as opened:
        stored = SafeTensors(folder)

        def read(name: str, row0: int, n: int) -> np.ndarray:
            return opened.rows(name, row0, n) if opened.tensors[name].quantised else stored.rows(name, row0, n)

        return write_gguf(GgufForm(read, Twin(opened), {}, {}), target, type_name)


class SafeTensors:
    """Float tensors of the safetensors files in a folder, mapped: as they lie there, not as an engine would hold them.

    entries: name -> (file, dtype, shape, offset, bytes).
    """

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, tuple[Path, str, list[int], int, int]] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    self.entries[name] = (path, entry["dtype"], entry["shape"], 8 + size + begin, end - begin)

    def raw(self, name: str) -> np.ndarray:
        """uint8 [bytes]."""
        path, _, _, offset, nbytes = self.entries[name]
        return np.memmap(path, np.uint8, "r", offset, (nbytes,))

    def rows(self, name: str, row0: int, n: int) -> np.ndarray:
        """float32 [n, cols]; a vector is one row."""
        _, dtype, shape, _, nbytes = self.entries[name]
        width, cols = (nbytes, shape[0]) if len(shape) == 1 else (nbytes // shape[0], shape[1])
        return blocks.decode_numpy(dtype, np.asarray(self.raw(name)[row0 * width : (row0 + n) * width]), n, cols)


def _order(info: TensorInfo, row0: int, n: int) -> np.ndarray:
    """int32 [n]: canonical row of each file row from ``row0``."""
    order = info.source_to_canonical()
    if order is None:
        return np.arange(row0, row0 + n, dtype=np.int32)
    return np.ascontiguousarray(order[row0 : row0 + n])


def pieces(t: GgufTensor, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(first row, rows) in pieces of about four million weights, each but the last a multiple of ``multiple`` rows."""
    per = max(1, _PIECE // t.shape[1] // multiple) * multiple
    for row0 in range(0, t.shape[0], per):
        yield row0, min(per, t.shape[0] - row0)


# ---- rounding
def to_float(x: np.ndarray, type_name: str, name: str) -> np.ndarray:
    """float32 -> uint8 bytes of F32, F16 or BF16. ExportError naming the tensor where F16 would overflow (case 7)."""
    x = finite(x, name)
    if type_name == "F32":
        return x.reshape(-1).view(np.uint8)
    if type_name == "BF16":
        return bf16(x).reshape(-1).view(np.uint8)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if np.isinf(half).any():
        worst = float(np.abs(x).max())
        raise ExportError(
            f"tensor {name!r} has a weight of {worst:g}, beyond what F16 can hold (65504)", "use --type BF16 or F32"
        )
    return half.reshape(-1).view(np.uint8)


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 of bfloat16, rounded to nearest, ties to even. Finite input only."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.asarray(rounded, np.uint16)


def finite(x: np.ndarray, name: str) -> np.ndarray:
    """``x`` as contiguous float32; ExportError naming the tensor for a NaN or an infinity (case 8)."""
    x = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(x).all():
        raise ExportError(f"tensor {name!r} has a weight that is NaN or infinite")
    return x


def q8_0(x: np.ndarray) -> np.ndarray:
    """float32 [rows, cols] -> uint8 bytes of Q8_0, codes nearest for the scale as stored (a half)."""
    b = np.ascontiguousarray(x, np.float32).reshape(-1, 32)
    with np.errstate(over="ignore"):
        d = (np.abs(b).max(1, keepdims=True) / np.float32(127)).astype(np.float16)
    if np.isinf(d).any():
        raise ExportError(
            f"a weight of {float(np.abs(b).max()):g} is beyond what Q8_0 can hold", "use --type BF16 or F32"
        )
    wide = d.astype(np.float32)
    q = np.rint(b / np.where(wide == 0, np.float32(1), wide)).clip(-127, 127).astype(np.int8)
    return np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=1).reshape(-1)


_SHRINK = (1.0, 0.94, 0.88, 0.8)


def round_affine(
    x: np.ndarray, type_name: str, moment: np.ndarray | None = None, start: np.ndarray | None = None
) -> np.ndarray:
    """float32 [rows, cols] -> uint8 bytes of Q4_0, Q4_1, Q5_0 or Q5_1 with the least squared error found.

    Each block of 32 tries several ranges (see :func:`_fit`). ``moment``: float32 [cols, cols], second moments of the
    layer's input (mean of x x^T); the error of each column is then passed on to those behind it so that the layer's
    *output* stays (Frantar et al., GPTQ). ``start``: the base's blocks of the same type (uint8); their scales are one
    of the tries, so that unmoved weights come back exactly.
    ExportError for a weight beyond half precision.
    """
    x = np.ascontiguousarray(x, np.float32)
    rows, cols = x.shape
    old = None if start is None else np.ascontiguousarray(start).reshape(rows, cols // 32, -1)
    if moment is None:
        d, m, q = _fit(
            x.reshape(-1, 32),
            type_name,
            np.ones(32, np.float32),
            None if old is None else old.reshape(rows * cols // 32, -1),
        )
        return _pack(type_name, d, m, q).reshape(-1)
    # Upper Cholesky factor of the inverse: its row c says how the error of column c is made good behind it.
    h = moment.astype(np.float64)
    h[np.diag_indices(cols)] += 0.01 * float(np.trace(h)) / cols + 1e-12
    passing = np.linalg.cholesky(np.linalg.inv(h)).T.astype(np.float32)
    importance = np.maximum(np.diag(moment), 0).astype(np.float32)
    importance = importance / max(float(importance.mean()), 1e-30) + np.float32(1e-3)
    w = x.copy()
    out = np.empty((rows, cols // 32, type_sizes(type_name)[1]), np.uint8)
    for block in range(cols // 32):
        here = slice(32 * block, 32 * block + 32)
        d, m, _ = _fit(w[:, here], type_name, importance[here], None if old is None else old[:, block])
        q, errors = np.empty((rows, 32), np.uint8), np.empty((rows, 32), np.float32)
        for j in range(32):
            c = 32 * block + j
            code, value = _nearest(w[:, c : c + 1], d, m, type_name)
            q[:, j] = code[:, 0]
            errors[:, j] = (w[:, c] - value[:, 0]) / passing[c, c]
            w[:, c + 1 : here.stop] -= errors[:, j : j + 1] * passing[c, c + 1 : here.stop]
        w[:, here.stop :] -= errors @ passing[here, here.stop :]
        out[:, block] = _pack(type_name, d, m, q)
    return out.reshape(-1)


def _fit(
    b: np.ndarray, type_name: str, weight: np.ndarray, old: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 [n, 32] -> scale, offset float16 [n, 1], codes uint8 [n, 32].

    Several ranges are tried; each is refitted once by least squares, and the try with the smallest error *as stored*
    (half-precision scale and offset) stays. weight: float32 [32]. old: uint8 [n, bytes], blocks to try first.
    """
    top, offset = AFFINE[type_name]
    half = (top + 1) // 2
    tries: list[tuple[np.ndarray, np.ndarray]] = []
    if old is not None:
        d = np.ascontiguousarray(old[:, :2]).view("<f2").astype(np.float32)
        tries.append((d, np.ascontiguousarray(old[:, 2:4]).view("<f2").astype(np.float32) if offset else -half * d))
    if offset:
        low, high = b.min(1, keepdims=True), b.max(1, keepdims=True)
        for s in _SHRINK:
            span = (high - low) * np.float32(s)
            tries.append((span / top, (low + high - span) / 2))
    else:
        peak = np.take_along_axis(b, np.abs(b).argmax(1)[:, None], 1)
        tries += [
            (d, -half * d) for s in _SHRINK for d in (peak * np.float32(-s / half), peak * np.float32(s / (half - 1)))
        ]
    best = np.full((len(b), 1), np.inf, np.float32)
    best_d, best_m = np.zeros((len(b), 1), np.float16), np.zeros((len(b), 1), np.float16)
    best_q = np.zeros(b.shape, np.uint8)

    def offer(d: np.ndarray, m: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            d16, m16 = d.astype(np.float16), m.astype(np.float16)
            q, value = _nearest(b, d16, m16, type_name)
            error = (weight * (b - value) ** 2).sum(1, keepdims=True)
        better = error < best  # never true for a NaN
        np.copyto(best, error, where=better)
        np.copyto(best_d, d16, where=better)
        np.copyto(best_m, m16, where=better)
        np.copyto(best_q, q, where=better)
        return q.astype(np.float32)

    total = float(weight.sum())
    for d, m in tries:
        q = offer(d, m)
        if offset:
            mean_q, mean_b = (weight * q).sum(1, keepdims=True) / total, (weight * b).sum(1, keepdims=True) / total
            spread = (weight * (q - mean_q) ** 2).sum(1, keepdims=True)
            fit = (weight * (q - mean_q) * (b - mean_b)).sum(1, keepdims=True) / np.where(spread > 0, spread, np.inf)
            offer(fit, mean_b - fit * mean_q)
        else:
            q -= half
            spread = (weight * q * q).sum(1, keepdims=True)
            fit = (weight * q * b).sum(1, keepdims=True) / np.where(spread > 0, spread, np.inf)
            offer(fit, -half * fit)
    if not np.isfinite(best).all():
        raise ExportError(
            f"a block cannot be held by {type_name}: its weights are beyond half precision", "use --type BF16 or F32"
        )
    return best_d, best_m, best_q


def _nearest(b: np.ndarray, d: np.ndarray, m: np.ndarray, type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8) nearest to ``b`` for scales and offsets float16 [n, 1], and the values (float32) they decode to."""
    top, offset = AFFINE[type_name]
    d32 = d.astype(np.float32)
    m32 = m.astype(np.float32) if offset else d32 * np.float32(-((top + 1) // 2))
    scaled = (b - m32) / np.where(d32 == 0, np.float32(1), d32)
    q = np.nan_to_num(np.rint(scaled)).clip(0, top)
    return q.astype(np.uint8), d32 * q + m32


def _pack(type_name: str, d: np.ndarray, m: np.ndarray, q: np.ndarray) -> np.ndarray:
    """uint8 [n, bytes]: blocks of 32 as ggml stores them."""
    top, offset = AFFINE[type_name]
    parts: list[np.ndarray] = [d.view(np.uint8)]
    if offset:
        parts.append(m.view(np.uint8))
    if top == 31:
        parts.append(np.packbits(q >> 4, axis=1, bitorder="little"))
    parts.append((q[:, :16] & 15) | ((q[:, 16:] & 15) << 4))
    return np.concatenate(parts, axis=1)


# ---- writing
@dataclass
class Plan:
    """What each tensor is to become. notes: what the user should hear."""

    types: dict[str, str]
    notes: list[str] = field(default_factory=list)


def plan(effective: Effective | GgufForm, type_name: str) -> Plan:
    """Types for a GGUF in ``type_name`` (one of :data:`TYPES` but the K mixes).

    Vectors keep their own type, and so do unmoved F32 matrices (routers and the like). Four- and five-bit types leave
    embedding and head in the base's type where that is narrower than 16 bits (they are the most sensitive tensors),
    else in Q8_0. A tensor whose columns are no multiple of the block keeps a wider type (case 10).
    """
    out = Plan({})
    wider: dict[str, list[str]] = {}
    for name, t in effective.tensors.items():
        moved = name in effective.infos
        out.types[name] = t.type_name
        if len(t.dims) != 2 or (t.type_name == "F32" and not moved) or type_name == SAME:
            continue
        if t.type_name not in blocks.TYPES:
            wider.setdefault(f"{t.type_name}, which has no codec here", []).append(name)
            continue
        chosen = type_name
        if type_name in AFFINE and name in ("token_embd.weight", "output.weight"):
            chosen = "Q8_0" if t.type_name in FLOATS else t.type_name
            if chosen not in (*AFFINE, "Q8_0") and moved and not effective.on_lattice(name):
                chosen = "Q8_0"  # a K type cannot be rounded to here
        if t.shape[1] % type_sizes(chosen)[0]:
            wider.setdefault(_odd("F16", t.shape[1], type_sizes(chosen)[0], chosen), []).append(name)
            chosen = "F16"
        out.types[name] = chosen
    out.notes = _told(wider)
    return out


def _odd(kept: str, columns: int, block: int, wanted: str) -> str:
    return f"{kept}: {columns} columns are not a multiple of {block}, which {wanted} needs"


def _told(wider: dict[str, list[str]]) -> list[str]:
    """One note for each reason: ``3 tensors stay wider, as F16: ...: first, second, ...``."""
    return [
        f"{len(names)} tensor(s) kept wider, as {reason} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
        for reason, names in wider.items()
    ]


def producer(
    effective: Effective | GgufForm, name: str, type_name: str, moments: dict[str, np.ndarray] | None = None
) -> Producer:
    """Bytes of one tensor's effective weights in ``type_name``, streamed by rows.

    Unmoved tensors that keep their type, and the moved codes of the ``lattice`` view, are copied as they are.
    """
    base = effective.base if isinstance(effective.base, GgufFile) else None
    t, moved, label = effective.tensors[name], name in effective.infos, effective.label(name)
    own = base is not None and type_name == t.type_name

    def stream() -> Iterator[np.ndarray]:
        if base and own and not moved:
            _refuse_bad(base, name)
        for row0, n in pieces(t):
            if base and own and not moved:
                yield base.raw(name, row0, n)
            elif own and isinstance(effective, Effective) and effective.on_lattice(name):
                yield effective.lattice(name, row0, n)
            elif type_name in FLOATS:
                yield to_float(effective.rows(name, row0, n), type_name, label)
            elif type_name == "Q8_0" or type_name in AFFINE:
                x = finite(effective.rows(name, row0, n), label)
                start = base.raw(name, row0, n) if base and own else None
                try:
                    moment = (moments or {}).get(name)
                    yield q8_0(x) if type_name == "Q8_0" else round_affine(x, type_name, moment, start)
                except ExportError as error:
                    raise ExportError(f"tensor {label!r}: {error.message}", error.hint) from error
            else:
                raise ExportError(
                    f"tensor {name!r} was not tuned on its own {t.type_name} codes and cannot be rounded to them here",
                    "use --type Q8_0, or a mix such as Q4_K_M",
                )

    return stream


def _refuse_bad(base: GgufFile, name: str) -> None:
    try:
        bad = base.first_bad(name)
    except ModelError:  # a type that cannot be judged
        return
    if bad is not None:
        raise ExportError(f"tensor {name!r} has a weight that is NaN or infinite (number {bad})")


def write_gguf(
    effective: Effective | GgufForm,
    target: Path,
    type_name: str,
    moments: dict[str, np.ndarray] | None = None,
    template: str | None = None,
) -> list[str]:
    """Write the tuned model as GGUF with the base as template; returns notes for the user.

    Every key, the tokenizer and the chat template are kept (of a Hugging Face folder: put into GGUF's keys);
    ``edgees.base`` names the base by its hash (case 5). A tied head stays tied. K mixes are made by llama.cpp's
    quantiser from a temporary F16 file beside the target.
    moments: see :mod:`edgees.moments`; four- and five-bit types are rounded with them, K mixes with their diagonals.
    template: chat template instead of the base's.
    Errors: ExportError, WillNotFit; the target is then as it was before.
    """
    if isinstance(effective, Effective) and isinstance(effective.base, HfFolder):
        effective = GgufForm.of(effective)
    metadata = effective.origin
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    if type_name in K_MIXES:
        return _through_llama(effective, target, type_name, moments, template)
    if type_name != SAME:
        metadata["general.file_type"] = int(FILE_TYPES[type_name])
    if type_name not in FLOATS:
        metadata["general.quantization_version"] = int(gguf.GGML_QUANT_VERSION)
    chosen = plan(effective, type_name)
    tensors = {name: (kind, producer(effective, name, kind, moments)) for name, kind in chosen.types.items()}
    effective.write(target, tensors, metadata)
    return [*(effective.base.notes if isinstance(effective, GgufForm) else ()), *chosen.notes]


def _through_llama(
    effective: Effective | GgufForm,
    target: Path,
    type_name: str,
    moments: dict[str, np.ndarray] | None,
    template: str | None,
) -> list[str]:
    wide = target.with_name(f".{target.name}.f16.part")
    small = target.with_name(f".{target.name}.quantised.part")
    try:
        notes = write_gguf(effective, wide, "F16", template=template)
        require_space(target, wide.stat().st_size)  # llama.cpp itself would not tell a full disk from another fault
        quantize(wide, small, type_name, importance={n: np.diag(m) for n, m in (moments or {}).items()})
        with GgufFile(small) as made:
            wider: dict[str, list[str]] = {}
            for t in made.tensors.values():
                if len(t.dims) == 2 and t.shape[1] % 256 and t.type_name not in FLOATS:
                    wider.setdefault(_odd(t.type_name, t.shape[1], 256, "a K type"), []).append(t.name)
            notes += _told(wider)
        small.replace(target)
    finally:
        wide.unlink(missing_ok=True)
        small.unlink(missing_ok=True)
    return notes


# ---- file names
_NAME = re.compile(
    r"^(?P<BaseName>[A-Za-z0-9\s]*(?:(?:-(?:(?:[A-Za-z\s][A-Za-z0-9\s]*)|(?:[0-9\s]*)))*))"
    r"-(?:(?P<SizeLabel>(?:\d+x)?(?:\d+\.)?\d+[A-Za-z](?:-[A-Za-z]+(\d+\.)?\d+[A-Za-z]+)?)"
    r"(?:-(?P<FineTune>[A-Za-z0-9\s-]+))?)?-(?:(?P<Version>v\d+(?:\.\d+)*))"
    r"(?:-(?P<Encoding>(?!LoRA|vocab)[\w_]+))?(?:-(?P<Type>LoRA|vocab))?(?:-(?P<Shard>\d{5}-of-\d{5}))?\.gguf$"
)
"""The pattern of ggml's docs/gguf.md, "GGUF Naming Convention"."""


def follows_convention(file_name: str) -> bool:
    """Whether a file name can be taken apart by the GGUF naming convention."""
    return _NAME.match(file_name) is not None


def gguf_name(base: GgufFile | Twin, encoding: str, kind: str | None = None) -> str:
    """File name by the GGUF naming convention: base name, size, fine-tune, version, encoding[, ``LoRA``]."""

    def clean(text: object) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", str(text)).strip("-")

    m = base.metadata
    label = str(m.get("general.size_label", ""))
    if not re.fullmatch(r"(?:\d+x)?(?:\d+\.)?\d+[A-Za-z]", label):
        n = float(sum(t.shape[0] * t.shape[1] for t in base.tensors.values()))
        scale, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if n >= s), (1e3, "K"))
        label = f"{n / scale:.0f}{unit}" if n / scale >= 10 else f"{n / scale:.1f}{unit}"
    name = clean(m.get("general.basename") or m.get("general.name") or base.arch) or base.arch
    tune = "-".join(part for part in (clean(m.get("general.finetune", "")), "edgees") if part)
    version = str(m.get("general.version", "v1.0"))
    if not re.fullmatch(r"v\d+(\.\d+)*", version):
        version = "v1.0"
    return "-".join([name, label, tune, version, encoding, *([kind] if kind else [])]) + ".gguf"
