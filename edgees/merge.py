"""The model as it was scored: base and delta of a run put together, and written as GGUF in any type.

``Effective`` gives the weights that the engine multiplied with: the base decoded plus the view of the delta. The
writers here are shared by export (which names and checks files) and evaluate (which needs a plain copy to judge).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from edgees import blocks, config, hf_layout, model_path, native, noise
from edgees.backends.base import TensorInfo
from edgees.delta import Delta
from edgees.errors import ExportError, RunError
from edgees.gguf_file import FILE_TYPES, GgufFile, GgufTensor, Producer, type_sizes, write_like

FLOATS = ("F32", "F16", "BF16")
AFFINE = {"Q4_0": (15, False), "Q4_1": (15, True), "Q5_0": (31, False), "Q5_1": (31, True)}
"""Types that are rounded here with a search for the best scale: highest code, and whether there is an offset."""
K_MIXES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")
"""Types that llama.cpp's own quantiser writes."""
TYPES = (*FLOATS, "Q8_0", *AFFINE, *K_MIXES, "same")
EXACT = frozenset({*FLOATS, "Q8_0"})
"""Types that hold what was scored (to within their own rounding)."""

_PIECE = 1 << 22  # weights per piece

Quantize = Callable[[Path, Path, str], None]
"""``(source GGUF, target GGUF, type name)``: llama.cpp's quantiser, :func:`edgees.backends.llamacpp.quantize`."""


@dataclass
class Run:
    """An opened run folder: its base model and what it has learned."""

    folder: Path
    base: GgufFile
    delta: Delta
    settings: config.Config
    header: dict[str, Any]
    weights: str
    """``best`` (by held-out reward) or ``last``: which of the two this is."""

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
    if weights not in ("best", "last"):
        raise RunError(f"weights are 'best' or 'last', not {weights!r}")
    resolved, history = folder / "config.resolved.toml", folder / "history.jsonl"
    if not resolved.is_file() or not history.is_file():
        raise RunError(f"{folder} is no run folder: {resolved.name} or {history.name} is missing")
    settings = config.load(resolved)
    with history.open(encoding="utf-8") as lines:
        try:
            header = json.loads(lines.readline())
            wanted = str(header["base"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{history}:1: no header of a run ({error})") from error
    base = GgufFile(model_path.resolve(settings.model))
    try:
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
    return Run(folder, base, delta, settings, header, chosen)


class Effective:
    """Weights as they were scored, tensor by tensor, in file order.

    refined: decode(base) + step * code; adapter: decode(base) + A B^T; lattice: the moved codes, decoded;
    vectors: base + delta; tensors without a delta: the base. All float32.
    """

    def __init__(self, base: GgufFile, delta: Delta) -> None:
        self.base, self.delta = base, delta
        self.infos: dict[str, TensorInfo] = {info.source: info for info in delta.spec.tensors}
        missing = sorted(set(self.infos) - set(base.tensors))
        if missing:
            raise RunError(f"{base.path} has no tensor {missing[0]!r}, which {delta.path} holds a delta for")
        for info in delta.spec.tensors:
            if base.tensors[info.source].shape != (info.rows, info.cols):
                raise RunError(f"{delta.path}: {info.name} is {info.rows}x{info.cols}, the base's differs")
        self._spans: dict[str, int] = {}
        self._dither = noise.make_key(delta.spec.seed, noise.POOL_GENERATION, 1)

    def base_rows(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols]: the base alone, file order."""
        t = self.base.tensors[name]
        n = t.shape[0] - row0 if n is None else n
        if t.type_name not in blocks.TYPES:
            raise ExportError(f"{self.base.path}: tensor {name!r}: type {t.type_name} has no codec here")
        return blocks.decode(t.type_name, self.base.raw(name, row0, n), n, t.shape[1])

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
        return self.delta.rows(info.name, first, last - first)[order[row0 : row0 + n] - first]

    def rows(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """float32 [n, cols]: what the engine multiplied with, file order."""
        t = self.base.tensors[name]
        n = t.shape[0] - row0 if n is None else n
        info = self.infos.get(name)
        if info is None:
            return self.base_rows(name, row0, n)
        if info.vector:
            return self.base_rows(name, row0, n) + self.delta.vector(info.name)[None, :]
        if self.delta.spec.view == "adapter":
            return self.base_rows(name, row0, n) + self.delta_rows(name, row0, n)
        if self.delta.spec.view == "lattice" and t.type_name not in FLOATS:
            return blocks.decode(t.type_name, self.lattice(name, row0, n), n, t.shape[1])
        return self._refined(t, info, row0, n)

    def lattice(self, name: str, row0: int = 0, n: int | None = None) -> np.ndarray:
        """uint8: the base's blocks with their codes moved (view ``lattice``), file order."""
        t, info = self.base.tensors[name], self.infos[name]
        n = t.shape[0] - row0 if n is None else n
        delta = np.ascontiguousarray(self.delta_rows(name, row0, n))
        return self._move(t, info, row0, n, delta)

    def _move(self, t: GgufTensor, info: TensorInfo, row0: int, n: int, delta: np.ndarray) -> np.ndarray:
        raw = np.ascontiguousarray(self.base.raw(t.name, row0, n))
        out = np.empty_like(raw)
        order = self._order(info, row0, n)
        native.check(
            native.lib().edgees_lattice_encode(
                int(GGMLQuantizationType[t.type_name]), native.pointer(raw), n, t.shape[1], native.pointer(delta),
                native.pointer(order), self._dither, info.id, native.pointer(out),
            ),
            f"moving the codes of {t.name}",
        )  # fmt: skip
        return out

    def nearest(self, name: str, row0: int, n: int) -> np.ndarray:
        """uint8: the base's blocks with each code moved to the one nearest the effective weight; scales stay.

        The dithered encoder does the packing: it takes floor(x + u), so it is handed x = nearest + 1/2 - u.
        """
        t, info = self.base.tensors[name], self.infos[name]
        cols = t.shape[1]
        start = self.base_rows(name, row0, n)
        cell = np.repeat(blocks.cells(t.type_name, self.base.raw(name, row0, n), n, cols), _group(t.type_name), axis=1)
        safe = np.where(cell == 0, np.float32(1), cell)
        steps = np.rint((self.rows(name, row0, n) - start) / safe)
        order = self._order(info, row0, n)
        u = np.stack([noise.dither(self.delta.spec.seed, info.id, 1, cols, int(r))[0] for r in order])
        return self._move(t, info, row0, n, np.ascontiguousarray((steps + np.float32(0.5) - u) * cell, np.float32))

    def _order(self, info: TensorInfo, row0: int, n: int) -> np.ndarray:
        order = info.source_to_canonical()
        if order is None:
            return np.arange(row0, row0 + n, dtype=np.int32)
        return np.ascontiguousarray(order[row0 : row0 + n])

    def _refined(self, t: GgufTensor, info: TensorInfo, row0: int, n: int) -> np.ndarray:
        bits = self.delta.spec.bits if self.delta.spec.view == "refined" else 8
        kind, cols, cell_rho = int(GGMLQuantizationType[t.type_name]), t.shape[1], np.float32(info.rho / 4)
        span = self._span(t, info, float(cell_rho))
        raw = np.ascontiguousarray(self.base.raw(t.name, row0, n))
        delta = np.ascontiguousarray(self.delta_rows(t.name, row0, n))
        order = self._order(info, row0, n)
        lib = native.lib()
        plane = np.zeros(n * int(lib.edgees_plane_row_bytes(bits, cols)), np.uint8)
        native.check(
            lib.edgees_plane_encode(
                kind, native.pointer(raw), n, cols, native.pointer(delta), native.pointer(order), self._dither,
                info.id, bits, span, cell_rho, native.pointer(plane),
            ),
            f"residual plane of {t.name}",
        )  # fmt: skip
        out = np.empty((n, cols), np.float32)
        native.check(
            lib.edgees_effective(
                kind, native.pointer(raw), n, cols, bits, native.pointer(plane), span, cell_rho, native.pointer(out)
            ),
            f"effective weights of {t.name}",
        )
        return out

    def _span(self, t: GgufTensor, info: TensorInfo, cell_rho: float) -> int:
        """The tensor's span exponent: the smallest that at most 0.1 % of its deltas go beyond."""
        if t.name not in self._spans:
            counts = np.zeros(9, np.int64)
            for row0, n in pieces(t):
                raw = np.ascontiguousarray(self.base.raw(t.name, row0, n))
                delta = np.ascontiguousarray(self.delta_rows(t.name, row0, n))
                native.check(
                    native.lib().edgees_plane_count(
                        int(GGMLQuantizationType[t.type_name]), native.pointer(raw), n, t.shape[1],
                        native.pointer(delta), cell_rho, native.pointer(counts),
                    ),
                    f"span of {t.name}",
                )  # fmt: skip
            fits = np.flatnonzero(counts * 1000 <= info.rows * info.cols)
            self._spans[t.name] = int(fits[0]) if len(fits) else 8
        return self._spans[t.name]


def _group(type_name: str) -> int:
    return int(native.lib().edgees_cell_group(int(GGMLQuantizationType[type_name])))


def pieces(t: GgufTensor, weights: int = _PIECE) -> Iterator[tuple[int, int]]:
    """(first row, rows) in pieces of about ``weights`` weights."""
    per = max(1, weights // t.shape[1])
    for row0 in range(0, t.shape[0], per):
        yield row0, min(per, t.shape[0] - row0)


# ---- rounding
def to_float(x: np.ndarray, type_name: str, name: str) -> np.ndarray:
    """float32 -> uint8 bytes of F32, F16 or BF16. ExportError naming the tensor where F16 would overflow (case 7)."""
    x = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(x).all():
        raise ExportError(f"tensor {name!r} has a weight that is NaN or infinite")
    if type_name == "F32":
        return x.view(np.uint8).reshape(-1)
    if type_name == "BF16":
        return bf16(x).view(np.uint8).reshape(-1)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if np.isinf(half).any():
        worst = float(np.abs(x).max())
        raise ExportError(
            f"tensor {name!r} has a weight of {worst:g}, beyond what F16 can hold (65504)", "use --type BF16 or F32"
        )
    return half.view(np.uint8).reshape(-1)


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 of bfloat16, rounded to nearest, ties to even. Finite input only."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def q8_0(x: np.ndarray) -> np.ndarray:
    """float32 [rows, cols] -> uint8 bytes of Q8_0."""
    return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), GGMLQuantizationType.Q8_0).reshape(-1)


_SHRINK = (1.0, 0.94, 0.88, 0.8)


def round_affine(
    x: np.ndarray, type_name: str, importance: np.ndarray | None = None, start: np.ndarray | None = None
) -> np.ndarray:
    """float32 [rows, cols] -> uint8 bytes of Q4_0, Q4_1, Q5_0 or Q5_1 with the least squared error found.

    Each block of 32 tries several ranges; every try is refitted once by least squares and rounded again, and the one
    with the smallest error *as stored* (half-precision scale and offset) stays. ``importance`` float32 [cols]: second
    moments of the layer's input, which weigh the errors. ``start``: the base's blocks of the same type (uint8); their
    scales are one of the tries, so that unmoved weights come back exactly.
    """
    top, offset = AFFINE[type_name]
    b = np.ascontiguousarray(x, np.float32).reshape(-1, 32)
    weight = np.ones((1, 32), np.float32)
    if importance is not None:
        w = np.maximum(np.asarray(importance, np.float32), 0)
        w = w / max(float(w.mean()), 1e-30) + np.float32(1e-3)
        weight = np.tile(w.reshape(-1, 32), (x.size // len(w), 1))
    half = (top + 1) // 2
    tries: list[tuple[np.ndarray, np.ndarray]] = []
    if start is not None:
        old = start.reshape(len(b), -1)
        d = np.ascontiguousarray(old[:, :2]).view("<f2").astype(np.float32)
        m = np.ascontiguousarray(old[:, 2:4]).view("<f2").astype(np.float32) if offset else -half * d
        tries.append((d, m))
    if offset:
        low, high = b.min(1, keepdims=True), b.max(1, keepdims=True)
        middle = (low + high) / 2
        for s in _SHRINK:
            span = (high - low) * np.float32(s)
            tries.append((span / top, middle - span / 2))
    else:
        peak = np.take_along_axis(b, np.abs(b).argmax(1)[:, None], 1)
        for s in _SHRINK:
            for d in (peak * np.float32(s) / -half, peak * np.float32(s) / (half - 1)):
                tries.append((d, -half * d))
    best_error = np.full((len(b), 1), np.inf, np.float32)
    best_d, best_m = np.zeros((len(b), 1), np.float16), np.zeros((len(b), 1), np.float16)
    best_q = np.zeros(b.shape, np.uint8)

    def offer(d: np.ndarray, m: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            d16, m16 = d.astype(np.float16), m.astype(np.float16)
        d32 = d16.astype(np.float32)
        m32 = m16.astype(np.float32) if offset else -half * d32
        ok = np.isfinite(d32) & np.isfinite(m32)
        d32, m32 = np.where(ok, d32, 0), np.where(ok, m32, 0)
        q = np.rint((b - m32) / np.where(d32 == 0, np.float32(1), d32)).clip(0, top)
        e = b - (d32 * q + m32)
        error = np.where(ok, (weight * e * e).sum(1, keepdims=True), np.inf)
        better = error < best_error
        np.copyto(best_error, error, where=better)
        np.copyto(best_d, d16, where=better)
        np.copyto(best_m, m16, where=better)
        np.copyto(best_q, q.astype(np.uint8), where=better)
        return q

    for d, m in tries:
        q = offer(d, m)
        # least squares for the codes just found
        sw = np.broadcast_to(weight, b.shape)
        if offset:
            s0 = sw.sum(1, keepdims=True)
            mq, mx = (sw * q).sum(1, keepdims=True) / s0, (sw * b).sum(1, keepdims=True) / s0
            var = (sw * (q - mq) ** 2).sum(1, keepdims=True)
            cov = (sw * (q - mq) * (b - mx)).sum(1, keepdims=True)
            fit = np.where(var > 0, cov / np.where(var > 0, var, 1), 0).astype(np.float32)
            offer(fit, mx - fit * mq)
        else:
            c = q - half
            var = (sw * c * c).sum(1, keepdims=True)
            fit = np.where(var > 0, (sw * c * b).sum(1, keepdims=True) / np.where(var > 0, var, 1), 0)
            offer(fit.astype(np.float32), -half * fit)
    if not np.isfinite(best_error).all():
        raise ExportError(f"a block cannot be held by {type_name}: its weights are beyond half precision")
    return _pack(type_name, best_d, best_m, best_q)


def _pack(type_name: str, d: np.ndarray, m: np.ndarray, q: np.ndarray) -> np.ndarray:
    top, offset = AFFINE[type_name]
    parts = [d.view(np.uint8)]
    if offset:
        parts.append(m.view(np.uint8))
    if top == 31:
        parts.append(np.packbits(q >> 4, axis=1, bitorder="little"))
    parts.append((q[:, :16] & 15) | ((q[:, 16:] & 15) << 4))
    return np.concatenate(parts, axis=1).reshape(-1)


# ---- writing
@dataclass
class Plan:
    """What each tensor is to become. notes: what the user should hear."""

    types: dict[str, str]
    notes: list[str] = field(default_factory=list)


def plan(base: GgufFile, type_name: str) -> Plan:
    """Types for a GGUF in ``type_name`` (one of :data:`TYPES` but the K mixes). Vectors keep their own type.

    Four- and five-bit types leave embedding and head in the base's type where that is narrower than 16 bits (they are
    the most sensitive tensors), else in Q8_0. A tensor whose columns are no multiple of the block keeps a wider type.
    """
    out = Plan({})
    for name, t in base.tensors.items():
        weight = hf_layout.canonical(base.arch, name) is not None or not hf_layout.supported(base.arch)
        if t.vector or not weight or type_name == "same":
            out.types[name] = t.type_name
            continue
        if t.type_name not in blocks.TYPES:
            out.types[name] = t.type_name
            out.notes.append(f"{name} stays {t.type_name}: there is no codec for that type")
            continue
        chosen = type_name
        if type_name in AFFINE and name in ("token_embd.weight", "output.weight"):
            chosen = t.type_name if t.type_name not in FLOATS else "Q8_0"
        if t.shape[1] % type_sizes(chosen)[0]:
            chosen = "Q8_0" if t.shape[1] % 32 == 0 else "F16"
            out.notes.append(
                f"{name} becomes {chosen}: its {t.shape[1]} columns are not a multiple of "
                f"{type_sizes(type_name)[0]}, which {type_name} needs"
            )
        out.types[name] = chosen
    return out


def producer(
    effective: Effective, name: str, type_name: str, importance: Mapping[str, np.ndarray] | None = None
) -> Producer:
    """Bytes of one tensor's effective weights in ``type_name``, streamed by rows.

    Unmoved tensors that keep their type, and the moved codes of the ``lattice`` view, are copied as they are.
    """
    base = effective.base
    t, moved = base.tensors[name], name in effective.infos
    lattice = moved and effective.delta.spec.view == "lattice" and t.type_name not in FLOATS

    def stream() -> Iterator[np.ndarray]:
        for row0, n in pieces(t):
            if type_name == t.type_name and not moved:
                yield base.raw(name, row0, n)
            elif type_name == t.type_name and lattice:
                yield effective.lattice(name, row0, n)
            elif type_name in FLOATS:
                yield to_float(effective.rows(name, row0, n), type_name, name)
            elif type_name == "Q8_0":
                yield q8_0(_finite(effective.rows(name, row0, n), name))
            elif type_name in AFFINE:
                start = np.ascontiguousarray(base.raw(name, row0, n)) if type_name == t.type_name else None
                weights = None if importance is None else importance.get(name)
                yield round_affine(_finite(effective.rows(name, row0, n), name), type_name, weights, start)
            elif type_name == t.type_name:
                yield effective.nearest(name, row0, n)
            else:
                raise ExportError(f"tensor {name!r} cannot be rounded from {t.type_name} to {type_name} here")

    return stream


def _finite(x: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(x).all():
        raise ExportError(f"tensor {name!r} has a weight that is NaN or infinite")
    return x


def write_gguf(
    effective: Effective,
    target: Path,
    type_name: str,
    *,
    quantize: Quantize | None = None,
    importance: Mapping[str, np.ndarray] | None = None,
) -> list[str]:
    """Write the tuned model as GGUF with the base as template; returns notes for the user.

    Every key, the tokenizer and the chat template are kept; ``edgees.base`` names the base by its hash. A tied head
    stays tied. K mixes go through ``quantize`` (from a temporary F32 file beside the target).
    Errors: ExportError, WillNotFit; the target is then as it was before.
    """
    if type_name not in TYPES:
        raise ExportError(f"unknown type {type_name!r}", f"there are: {', '.join(TYPES)}")
    base = effective.base
    metadata: dict[str, Any] = {
        "edgees.base": base.sha256(),
        "edgees.generation": int(effective.delta.generation),
    }
    if type_name != "same":
        metadata["general.file_type"] = int(FILE_TYPES[type_name])
    if type_name not in FLOATS:
        metadata["general.quantization_version"] = int(gguf.GGML_QUANT_VERSION)
    if type_name in K_MIXES:
        return _through_llama(effective, target, type_name, metadata, quantize)
    chosen = plan(base, type_name)
    replace = {
        name: (kind, producer(effective, name, kind, importance))
        for name, kind in chosen.types.items()
        if kind != base.tensors[name].type_name or name in effective.infos
    }
    write_like(base, target, replace, metadata=metadata)
    return chosen.notes


def _through_llama(
    effective: Effective, target: Path, type_name: str, metadata: dict[str, Any], quantize: Quantize | None
) -> list[str]:
    if quantize is None:
        raise ExportError(f"{type_name} is written by llama.cpp's quantiser, which is not at hand here")
    full = target.with_name(f".{target.name}.f32.part")
    small = target.with_name(f".{target.name}.quantised.part")
    try:
        notes = write_gguf(effective, full, "F32")
        quantize(full, small, type_name)
        wanted = {"Q4_K": "Q4_K", "Q5_K": "Q5_K", "Q6_K": "Q6_K", "Q2_K": "Q2_K", "Q3_K": "Q3_K"}[type_name[:4]]
        with GgufFile(small) as made:
            odd = [t for t in made.tensors.values() if not t.vector and t.shape[1] % 256]
            for t in odd:
                notes.append(
                    f"{t.name} becomes {t.type_name}: its {t.shape[1]} columns are not a multiple of 256, "
                    f"which {wanted} needs"
                )
            # llama.cpp's quantiser drops nothing, but the keys are written once more so that they are the base's
            replace: dict[str, tuple[str, Producer]] = {
                name: (t.type_name, _copy_of(made, name)) for name, t in made.tensors.items()
            }
            write_like(effective.base, target, replace, metadata=metadata)
    finally:
        full.unlink(missing_ok=True)
        small.unlink(missing_ok=True)
    return notes


def _copy_of(source: GgufFile, name: str) -> Producer:
    def stream() -> Iterator[np.ndarray]:
        for row0, n in pieces(source.tensors[name]):
            yield source.raw(name, row0, n)

    return stream


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


def gguf_name(base: GgufFile, encoding: str, kind: str | None = None) -> str:
    """File name by the GGUF naming convention: base name, size, fine-tune, version, encoding[, ``LoRA``]."""

    def clean(text: object, pattern: str = r"[^A-Za-z0-9]+") -> str:
        return re.sub(pattern, "-", str(text)).strip("-")

    m = base.metadata
    name = clean(m.get("general.basename") or m.get("general.name") or base.arch) or base.arch
    label = str(m.get("general.size_label", ""))
    if not re.fullmatch(r"(?:\d+x)?(?:\d+\.)?\d+[A-Za-z]", label):
        n = float(sum(t.shape[0] * t.shape[1] for t in base.tensors.values()))
        scale, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if n >= s), (1e3, "K"))
        label = f"{n / scale:.0f}{unit}" if n / scale >= 10 else f"{n / scale:.1f}{unit}"
    tune = "-".join(part for part in (clean(m.get("general.finetune", "")), "edgees") if part)
    version = str(m.get("general.version", "v1.0"))
    if not re.fullmatch(r"v\d+(\.\d+)*", version):
        version = "v1.0"
    return "-".join([name, label, tune, version, encoding, *([kind] if kind else [])]) + ".gguf"
