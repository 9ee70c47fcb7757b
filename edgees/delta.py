"""What has been learned: one float32 per tuned weight (or the factors of an adapter), kept in a safetensors file.

The file is written in place, in pieces of a few MB through plain reads and writes, so that the resident set of a run
does not grow with it. A sidecar ``<file>.state.json`` says how many updates are in it and whether the last one was
written to the end; a run that was killed in between is rebuilt from its history (``edgees.checkpoint.recover``).
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgees import native, noise
from edgees.backends.base import TensorInfo
from edgees.errors import RunError, WillNotFit

VIEWS = ("refined", "adapter", "lattice")
CHUNK_BYTES = 4 << 20
_ALIGN = 4096
_MARGIN = 1 << 20


@dataclass(frozen=True)
class DeltaSpec:
    """Everything that fixes the meaning of a delta file.

    view: ``refined``, ``adapter`` or ``lattice``; bits: of the residual plane (r); factors: K of the adapter view;
    kind, rank: of the noise; seed: the run's; absolute: amplitudes are not relative to each tensor's RMS.
    """

    tensors: tuple[TensorInfo, ...]
    view: str
    bits: int
    factors: int
    kind: str
    rank: int
    seed: int
    absolute: bool = False

    def scale(self, info: TensorInfo) -> float:
        """What sigma and steps are multiplied with: the tensor's RMS (1 where they are absolute) and amplitude."""
        return float(np.float32((1.0 if self.absolute else info.rho) * info.amplitude))

    @property
    def spread(self) -> float:
        """RMS over all weights of the tensors' amplitudes: how much longer a step is than its coefficients say."""
        total = sum(t.size for t in self.tensors)
        return math.sqrt(sum(t.size * t.amplitude**2 for t in self.tensors) / max(total, 1))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; floats round-trip exactly. Tensors are
        ``[name, source, rows, cols, vector, rho, heads, amplitude]``."""
        return {
            "noise": noise.VERSION, "view": self.view, "bits": self.bits, "factors": self.factors, "kind": self.kind,
            "rank": self.rank, "seed": self.seed, "absolute": self.absolute,
            "tensors": [
                [t.name, t.source, t.rows, t.cols, t.vector, t.rho, t.heads, t.amplitude] for t in self.tensors
            ],
        }  # fmt: skip

    @staticmethod
    def from_dict(data: dict[str, Any], where: str) -> DeltaSpec:
        """Inverse of :meth:`to_dict`. :raises RunError: fields missing, other noise version; ``where`` is told."""
        try:
            if data["noise"] != noise.VERSION:
                raise RunError(
                    f"{where} was made with noise version {data['noise']}, this edgees has {noise.VERSION}",
                    "use the edgees version that made it",
                )
            tensors = tuple(
                TensorInfo(str(n), str(s), int(r), int(c), bool(v), float(rho), int(h), float(a))
                for n, s, r, c, v, rho, h, a in data["tensors"]
            )
            spec = DeltaSpec(
                tensors, str(data["view"]), int(data["bits"]), int(data["factors"]), str(data["kind"]),
                int(data["rank"]), int(data["seed"]), bool(data["absolute"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{where} describes no delta of edgees ({error!r})", "it is damaged or not of edgees"
            ) from None
        if spec.view not in VIEWS or spec.kind not in noise.KINDS:
            raise RunError(f"{where}: unknown view {spec.view!r} or noise {spec.kind!r}")
        return spec


@dataclass(frozen=True)
class Step:
    """One generation's update. coefs: float32-exact, without rho; keep: float32-exact; slots: of each pair's member."""

    generation: int
    keys: tuple[int, ...]
    slots: tuple[int, ...]
    coefs: tuple[float, ...]
    keep: float


Updater = Callable[[TensorInfo, np.ndarray, int, np.ndarray, np.ndarray, float], None]
"""(tensor, piece float32 [n, cols] changed in place, its first row, keys uint64 [P], coefs float32 [P], keep)."""


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    offset: int
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.cols * 4


class Delta:
    """An open delta file. ``generation``: updates applied; ``clean``: the last one was written to its end."""

    def __init__(
        self, path: Path, spec: DeltaSpec, fd: int, entries: dict[str, _Entry], state: tuple[int, bool]
    ) -> None:
        self.path = path
        self.spec = spec
        self.generation, self.clean = state
        self._fd = fd
        self._entries = entries
        self.updater: Updater | None = None
        """Does a piece's update elsewhere, to the same bits: a GPU's own kernel."""
        self._arrays: dict[str, np.ndarray] = {}
        self._grams: dict[str, np.ndarray] = {}
        self._pool: tuple[str, np.ndarray] | None = None
        self._drift: float | None = None
        if spec.view == "adapter":
            # Small, needed by every product, and their addresses are handed to the engine: they stay in memory.
            for name, entry in entries.items():
                array = np.empty((entry.rows, entry.cols), np.float32)
                self._read(entry, 0, array)
                self._arrays[name] = array

    @classmethod
    def create(cls, path: str | Path, spec: DeltaSpec) -> Delta:
        """A file of zeros, its space reserved on disk; replaces an existing one.

        :raises WillNotFit: not enough space; nothing is left behind.
        """
        path = Path(path)
        header, entries, size = _layout(spec)
        old = path.stat().st_size if path.exists() else 0
        require_space(path.parent, size - old, f"the learned weights ({path.name})")
        try:
            _write_state(path, 0, False)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}", "choose another run folder with --run") from error
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
            else:
                os.ftruncate(fd, size)
            _pwrite(fd, header, 0)
            os.fsync(fd)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            state_path(path).unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _no_space(path.parent, size, f"the learned weights ({path.name})") from error
            raise RunError(f"cannot write {path}: {error.strerror}") from error
        _write_state(path, 0, True)
        return cls(path, spec, fd, entries, (0, True))

    @classmethod
    def open(cls, path: str | Path, *, dirty_ok: bool = False, write: bool = True) -> Delta:
        """Open an existing file; the specification comes from its metadata.

        :raises RunError: missing, truncated, not of edgees, or (unless ``dirty_ok``) left half-written by a kill.
        """
        path = Path(path)
        try:
            flags = os.O_RDWR if write and os.access(path, os.W_OK) else os.O_RDONLY
            fd = os.open(path, flags | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            raise RunError(f"{path} is missing", "edgees replay rebuilds it from history.jsonl and the base") from None
        except OSError as error:
            raise RunError(f"cannot open {path}: {error.strerror}") from error
        try:
            spec, entries = _parse(path, fd)
            state = _read_state(path)
            if not state[1] and not dirty_ok:
                raise RunError(
                    f"{path} was left half-written by a run that was killed",
                    f"edgees resume {path.parent} (or edgees replay) mends it from the history",
                )
            return cls(path, spec, fd, entries, state)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the file. Arrays handed out by :meth:`factors` stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Delta:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, name: str, row0: int, n: int) -> np.ndarray:
        """float32 [n, cols]: the exact dense delta of canonical rows from ``row0`` (adapter: A B^T, k in order)."""
        entry = self._entry(name)
        info = entry.info
        if row0 < 0 or n < 0 or row0 + n > info.rows:
            raise RunError(f"{name} has {info.rows} rows; {row0}..{row0 + n} were asked for")
        if self.spec.view != "adapter":
            out = np.empty((n, info.cols), np.float32)
            self._read(entry, row0, out)
            return out
        if info.vector:
            return np.array(self._arrays[name][row0 : row0 + n])
        b = self._pool_of(info)
        a = self._arrays[name][row0 : row0 + n]
        out = np.zeros((n, info.cols), np.float32)
        product = np.empty_like(out)
        for k in range(self.spec.factors):
            np.multiply(a[:, k : k + 1], b[:, k][None, :], out=product)
            out += product
        return out

    def factors(self, name: str) -> np.ndarray:
        """float32 [rows, K]: A of the adapter view. The same array for the life of this object; do not write to it."""
        entry = self._entry(name)
        if self.spec.view != "adapter" or entry.info.vector:
            raise RunError(f"{name} has no factors in the {self.spec.view} view")
        return self._arrays[name]

    def vector(self, name: str) -> np.ndarray:
        """float32 [cols]: the delta of a 1-D tensor."""
        if not self._entry(name).info.vector:
            raise RunError(f"{name} is a matrix")
        return self.rows(name, 0, 1).reshape(-1)

    def drift(self) -> float:
        """Root-mean-square over all tuned weights of delta/rho."""
        if self._drift is None:
            if self.spec.view == "adapter":
                self._drift = self._adapter_drift()
            else:
                total = 0.0
                square = np.empty(CHUNK_BYTES // 4, np.float64)
                for entry in self._entries.values():
                    part = 0.0
                    for row, piece in self._pieces(entry):
                        self._read(entry, row, piece)
                        part += _sum_of_squares(piece, square)
                    total += part / entry.info.rho**2
                self._drift = math.sqrt(total / self._weights())
        return self._drift

    def apply(self, step: Step) -> float:
        """Add one generation's update; returns the drift afterwards. The file is marked dirty meanwhile.

        :raises RunError: a step that is not the next one, or a file that cannot be written.
        """
        if not self.clean:
            raise RunError(f"{self.path} is half-written and cannot be updated")
        if step.generation != self.generation:
            raise RunError(f"{self.path} holds {self.generation} updates; number {step.generation} does not come next")
        if not len(step.keys) == len(step.slots) == len(step.coefs):
            raise RunError(f"step {step.generation}: keys, slots and coefficients differ in number")
        try:
            if step.keep != 1.0 or any(step.coefs):
                _write_state(self.path, self.generation, False)
                self.clean = False
                self._drift = None
                if self.spec.view == "adapter":
                    self._apply_adapter(step)
                else:
                    self._drift = self._apply_dense(step)
                os.fsync(self._fd)
            _write_state(self.path, self.generation + 1, True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise WillNotFit(f"cannot write {self.path}: no space left on the disk", "free some space") from error
            raise RunError(f"cannot write {self.path}: {error.strerror}") from error
        self.generation += 1
        self.clean = True
        return self.drift()

    def copy_to(self, path: str | Path) -> None:
        """An independent copy, complete or not there at all. :raises WillNotFit: no space; the old copy survives."""
        path = Path(path)
        size = os.fstat(self._fd).st_size
        require_space(path.parent, size, f"a copy of the learned weights ({path})")
        temporary = path.with_name(path.name + ".tmp")
        try:
            with open(temporary, "wb") as out:
                _copy(self._fd, out.fileno(), size)
                out.flush()
                os.fsync(out.fileno())
            _write_state(path, self.generation, False)
            os.replace(temporary, path)
            _sync_folder(path.parent)
            _write_state(path, self.generation, True)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(path.parent, size, f"a copy of the learned weights ({path})") from error
            raise RunError(f"cannot write {path}: {error.strerror}") from error

    # ------------------------------------------------------------------------------------------------ inside

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise RunError(f"{self.path} has no tensor {name}") from None

    def _weights(self) -> int:
        return max(1, sum(e.info.size for e in self._entries.values()))

    def _pool_of(self, info: TensorInfo) -> np.ndarray:
        if self._pool is None or self._pool[0] != info.name:
            self._pool = (info.name, noise.pool(self.spec.seed, info.id, info.cols, self.spec.factors))
        return self._pool[1]

    def _pieces(self, entry: _Entry) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, buffer [n, cols]) covering a tensor; one buffer, reused."""
        per = max(1, CHUNK_BYTES // (entry.cols * 4))
        buffer = np.empty((min(per, entry.rows), entry.cols), np.float32)
        for row in range(0, entry.rows, per):
            yield row, buffer[: min(per, entry.rows - row)]

    def _read(self, entry: _Entry, row: int, out: np.ndarray) -> None:
        view = out.reshape(-1).view(np.uint8).data
        at, end = 0, out.nbytes
        offset = entry.offset + row * entry.cols * 4
        while at < end:
            got = _pread(self._fd, view[at:], offset + at)
            if got <= 0:
                raise RunError(f"{self.path} is truncated in {entry.info.name}")
            at += got

    def _write(self, entry: _Entry, row: int, data: np.ndarray) -> None:
        _pwrite(self._fd, data.reshape(-1).view(np.uint8).data, entry.offset + row * entry.cols * 4)

    def _native_arguments(self, step: Step, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            np.array(step.keys, np.uint64),
            np.array(step.slots, np.uint32),
            np.array([np.float32(c * scale) for c in step.coefs], np.float32),
        )

    def _update_piece(
        self, entry: _Entry, row: int, piece: np.ndarray, step: Step, keys: np.ndarray, coefs: np.ndarray
    ) -> None:
        info, spec = entry.info, self.spec
        if self.updater is not None:
            self.updater(info, piece, row, keys, coefs, step.keep)
            return
        code = native.lib().edgees_delta_apply(
            native.pointer(piece), piece.shape[0], piece.shape[1], row, info.id, noise.KINDS.index(spec.kind),
            spec.rank, int(info.vector), len(keys), native.pointer(keys), native.pointer(coefs), step.keep,
        )  # fmt: skip
        native.check(code, f"update of {info.name}")

    def _apply_dense(self, step: Step) -> float:
        total = 0.0
        square = np.empty(CHUNK_BYTES // 4, np.float64)
        for entry in self._entries.values():
            keys, _, coefs = self._native_arguments(step, self.spec.scale(entry.info))
            part = 0.0
            for row, piece in self._pieces(entry):
                self._read(entry, row, piece)
                self._update_piece(entry, row, piece, step, keys, coefs)
                self._write(entry, row, piece)
                part += _sum_of_squares(piece, square)
            total += part / entry.info.rho**2
        return math.sqrt(total / self._weights())

    def _apply_adapter(self, step: Step) -> None:
        for name, entry in self._entries.items():
            array, info = self._arrays[name], entry.info
            keys, slots, coefs = self._native_arguments(step, self.spec.scale(info))
            if info.vector:
                self._update_piece(entry, 0, array, step, keys, coefs)
            else:
                code = native.lib().edgees_factors_apply(
                    native.pointer(array), entry.rows, entry.cols, info.id, self.spec.rank, len(keys),
                    native.pointer(keys), native.pointer(slots), native.pointer(coefs), step.keep,
                )  # fmt: skip
                native.check(code, f"update of {info.name}")
            self._write(entry, 0, array)

    def _adapter_drift(self) -> float:
        total = 0.0
        for name, entry in self._entries.items():
            a = self._arrays[name]
            if entry.info.vector:
                total += float(np.square(a, dtype=np.float64).sum()) / entry.info.rho**2
                continue
            # |A B^T|^2 = sum of (A^T A) * (B^T B); no BLAS, whose order of summing depends on its threads.
            columns = np.ascontiguousarray(a.T, dtype=np.float64)
            if name not in self._grams:
                b = self._pool_of(entry.info).astype(np.int64)
                self._grams[name] = (b.T @ b).astype(np.int32)
            gram = self._grams[name]
            part = 0.0
            for k in range(entry.cols):
                part += float(((columns[k:] * columns[k]).sum(axis=1) * gram[k, k:]).sum() * 2)
                part -= float((columns[k] * columns[k]).sum() * gram[k, k])
            total += max(part, 0.0) / entry.info.rho**2
        return math.sqrt(total / self._weights())


def state_path(path: str | Path) -> Path:
    """The sidecar of a delta file."""
    return Path(str(path) + ".state.json")


def require_space(folder: Path, size: int, what: str) -> None:
    """:raises WillNotFit: ``folder``'s disk has less than ``size`` bytes (and a small margin) free."""
    if size > 0 and shutil.disk_usage(folder).free < size + _MARGIN:
        raise _no_space(folder, size, what)


def _no_space(folder: Path, size: int, what: str) -> WillNotFit:
    free = shutil.disk_usage(folder).free
    return WillNotFit(
        f"{what} needs {_mb(size)} on disk, {folder} has {_mb(free)} free",
        "free some space, choose a run folder on another disk with --run, or use --scope adapter (a few MB)",
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _layout(spec: DeltaSpec) -> tuple[bytes, dict[str, _Entry], int]:
    """(header bytes, entries, file size): tensors in order, data from a page boundary on."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "edgees": json.dumps(spec.to_dict(), separators=(",", ":"))}
    }
    shapes: list[tuple[TensorInfo, int, int, int]] = []
    at = 0
    for info in spec.tensors:
        factored = spec.view == "adapter" and not info.vector
        rows, cols = info.rows, spec.factors if factored else info.cols
        key = info.name + (".A" if factored else "")
        if key in header:
            raise RunError(f"two tensors are called {key}")
        header[key] = {
            "dtype": "F32",
            "shape": [cols] if info.vector else [rows, cols],
            "data_offsets": [at, at + rows * cols * 4],
        }
        shapes.append((info, at, rows, cols))
        at += rows * cols * 4
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    start = 8 + len(text)
    entries = {info.name: _Entry(info, start + offset, rows, cols) for info, offset, rows, cols in shapes}
    return len(text).to_bytes(8, "little") + text, entries, start + at


def _parse(path: Path, fd: int) -> tuple[DeltaSpec, dict[str, _Entry]]:
    size = os.fstat(fd).st_size
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    hint = "edgees replay rebuilds it from history.jsonl and the base"
    if len(head) < 8 or length > 100_000_000 or 8 + length > size:
        raise RunError(f"{path} is truncated or no safetensors file ({size} bytes)", hint)
    text = os.pread(fd, length, 8)
    try:
        header = json.loads(text)
        described = json.loads(header["__metadata__"]["edgees"])
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path} has a damaged header or is not of edgees", hint) from None
    spec = DeltaSpec.from_dict(described, str(path))
    expected, entries, total = _layout(spec)
    if expected[8:] != text:
        raise RunError(f"{path} has a header that contradicts itself", hint)
    if total != size:
        raise RunError(f"{path} is truncated: {size} bytes of {total}", hint)
    return spec, entries


def _write_state(path: Path, generation: int, clean: bool) -> None:
    target = state_path(path)
    temporary = target.with_name(target.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"generation": generation, "clean": clean}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    _sync_folder(target.parent)


def _read_state(path: Path) -> tuple[int, bool]:
    """(generation, clean); a missing or unreadable sidecar counts as half-written."""
    try:
        data = json.loads(state_path(path).read_text(encoding="utf-8"))
        return int(data["generation"]), bool(data["clean"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, False


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pread(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    data = os.pread(fd, len(view), offset)
    view[: len(data)] = data
    return len(data)


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    at = 0
    while at < len(view):
        at += os.pwrite(fd, view[at : at + (1 << 30)], offset + at)


def _copy(source: int, target: int, size: int) -> None:
    """Whole file; shares blocks where the file system can."""
    at = 0
    try:
        while hasattr(os, "copy_file_range") and at < size:
            done = os.copy_file_range(source, target, size - at, at, at)
            if done == 0:
                break
            at += done
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
    while at < size:
        piece = os.pread(source, min(CHUNK_BYTES, size - at), at)
        if not piece:
            raise OSError(errno.EIO, "unexpected end of file")
        _pwrite(target, piece, at)
        at += len(piece)


def _sum_of_squares(piece: np.ndarray, buffer: np.ndarray) -> float:
    flat = piece.reshape(-1)
    out = buffer[: flat.size] if flat.size <= buffer.size else np.empty(flat.size, np.float64)
    np.multiply(flat, flat, out=out, dtype=np.float64)
    return float(out.sum())


def float32s(values: Sequence[float]) -> tuple[float, ...]:
    """Each value rounded to float32 and back, so that JSON carries exactly what the kernels get."""
    return tuple(float(np.float32(v)) for v in values)
