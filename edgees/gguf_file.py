"""GGUF files: checked reading (memory-mapped) and streamed, all-or-nothing writing.

The layout is that of ggml's docs/gguf.md (versions 2 and 3, little-endian): magic, version, counts, key/value
pairs, tensor table, padding, tensor data. The block sizes come from the ``gguf`` package; parsing is ours because
every count and offset must be checked against the file's real size before it is believed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType

from edgees.errors import EdgeesError, ExportError, ModelError, WillNotFit

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
CHUNK = 1 << 22  # bytes per read or write

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}

FILE_TYPES: dict[str, int] = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q5_0": LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": LlamaFileType.MOSTLY_Q5_1,
    "Q2_K": LlamaFileType.MOSTLY_Q2_K,
    "Q3_K_S": LlamaFileType.MOSTLY_Q3_K_S,
    "Q3_K_M": LlamaFileType.MOSTLY_Q3_K_M,
    "Q3_K_L": LlamaFileType.MOSTLY_Q3_K_L,
    "Q4_K_S": LlamaFileType.MOSTLY_Q4_K_S,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K_S": LlamaFileType.MOSTLY_Q5_K_S,
    "Q5_K_M": LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
}
"""``general.file_type`` numbers by the name that llama.cpp gives them (``MOSTLY_`` left out)."""

# Byte offsets of the half-precision fields of one block, for the NaN/Inf scan.
_HALF_FIELDS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def type_sizes(type_name: str) -> tuple[int, int]:
    """(elements per block, bytes per block) of a ggml type by name; ModelError for an unknown one."""
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    except KeyError:
        raise ModelError(f"unknown tensor type {type_name!r}") from None
    return int(block), int(size)


def tensor_bytes(type_name: str, shape: tuple[int, int]) -> int:
    """Bytes of ``rows x cols`` in a type; ModelError if the columns are no whole number of blocks."""
    block, size = type_sizes(type_name)
    rows, cols = shape
    if cols % block:
        raise ModelError(f"{cols} columns are not a multiple of {type_name}'s block of {block}")
    return rows * (cols // block) * size


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    shape: (rows, cols) in file order, 1-D tensors are (1, n), higher dimensions are folded into rows;
    dims: as stored (fastest first, so ``dims[0] == cols``); offset: absolute, in bytes.
    """

    name: str
    type_name: str
    shape: tuple[int, int]
    offset: int
    nbytes: int
    dims: tuple[int, ...]

    @property
    def vector(self) -> bool:
        return len(self.dims) == 1

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0]


class _Cursor:
    """Reads little-endian values from a buffer and knows where the file ends."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def take(self, n: int, what: str) -> bytes:
        if n < 0 or self.at + n > self.size:
            raise ModelError(
                f"{self.path}: truncated: {what} at byte {self.at} needs {n} bytes, the file has {self.size}",
                "download the file again",
            )
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        start = self.at
        raw = self.take(self.number("<Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} at byte {start} is not UTF-8: {error}") from error

    def value(self, kind: int, what: str) -> tuple[Any, int]:
        """(value, element type): the element type equals ``kind`` unless the value is an array."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what), kind
        if kind == GGUFValueType.STRING:
            return self.text(what), kind
        if kind != GGUFValueType.ARRAY:
            raise ModelError(f"{self.path}: {what} has unknown value type {kind} at byte {self.at - 4}")
        element = self.number("<I", what)
        count = self.number("<Q", what)
        if element in _SCALARS:
            code = _SCALARS[element]
            raw = self.take(count * struct.calcsize(code), what)
            return [v[0] for v in struct.iter_unpack(code, raw)], element
        if element == GGUFValueType.STRING:
            # every string takes at least its 8-byte length: a wild count is caught before the loop
            if count * 8 > self.size - self.at:
                self.take(count * 8, what)
            return [self.text(what) for _ in range(count)], element
        raise ModelError(f"{self.path}: {what} is an array of unknown type {element}")


class GgufFile:
    """A GGUF file, its metadata read and its tensors mapped read-only.

    metadata: key -> plain Python value; kinds: key -> (value type, element type) as in the file;
    tensors: name -> :class:`GgufTensor` in file order.
    Raises ModelError naming the file and the byte for anything that does not fit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            handle = open(self.path, "rb")  # noqa: SIM115 - closed below, or by close()
        except IsADirectoryError:
            raise ModelError(f"{self.path} is a folder, not a GGUF file") from None
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror or error}") from error
        with handle:
            self.size = os.fstat(handle.fileno()).st_size
            if self.size < 24:
                raise ModelError(f"{self.path}: {self.size} bytes are too few for a GGUF header (24)")
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except BaseException:
            self._map.close()
            raise
        self._memmap: np.memmap[Any, np.dtype[np.uint8]] | None = None
        self._sha256: str | None = None

    # ---- parsing
    def _parse(self) -> None:
        at = _Cursor(self.path, self._map, self.size)
        magic = at.take(4, "magic")
        if magic != MAGIC:
            raise ModelError(
                f"{self.path} is not a GGUF file: it starts with {magic!r}",
                "edgees reads GGUF models (llama.cpp's format)",
            )
        version = at.number("<I", "version")
        if version & 0xFFFF == 0 and version:
            raise ModelError(f"{self.path}: big-endian GGUF files are not supported")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}; versions 2 and 3 can be read")
        self.version: int = version
        tensor_count = at.number("<Q", "tensor count")
        kv_count = at.number("<Q", "key count")
        if tensor_count * 24 + kv_count * 12 > self.size:
            raise ModelError(
                f"{self.path}: {tensor_count} tensors and {kv_count} keys cannot fit into {self.size} bytes"
            )
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, tuple[int, int]] = {}
        self._kv: dict[str, tuple[int, int]] = {}
        for _ in range(kv_count):
            start = at.at
            key = at.text("key")
            if key in self.metadata:
                raise ModelError(f"{self.path}: key {key!r} occurs twice (byte {start})")
            kind = at.number("<I", f"type of key {key!r}")
            self.metadata[key], element = at.value(kind, f"key {key!r}")
            self.kinds[key] = (kind, element)
            self._kv[key] = (start, at.at)
        split = self.metadata.get("split.count", 0)
        if (isinstance(split, int) and split > 1) or re.search(r"-\d{5}-of-\d{5}\.gguf$", self.path.name):
            raise ModelError(
                f"{self.path} is one part of a split GGUF",
                "join the parts first: llama-gguf-split --merge FIRST-PART OUT.gguf",
            )
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, not a positive multiple of 8")
        self.alignment: int = alignment
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        seen: set[str] = set()
        for _ in range(tensor_count):
            start = at.at
            name = at.text("tensor name")
            if name in seen:
                raise ModelError(f"{self.path}: tensor {name!r} occurs twice (byte {start})")
            seen.add(name)
            n_dims = at.number("<I", f"tensor {name!r}")
            if not 1 <= n_dims <= MAX_DIMS:
                raise ModelError(f"{self.path}: tensor {name!r} has {n_dims} dimensions (1 to {MAX_DIMS} allowed)")
            dims = tuple(at.number("<Q", f"tensor {name!r}") for _ in range(n_dims))
            if min(dims) == 0:
                raise ModelError(f"{self.path}: tensor {name!r} has an empty dimension: {dims}")
            kind = at.number("<I", f"tensor {name!r}")
            entries.append((name, dims, kind, at.number("<Q", f"tensor {name!r}")))
        self.data_offset = -(-at.at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, dims, kind, offset in entries:
            try:
                type_name = GGMLQuantizationType(kind).name
            except ValueError:
                raise ModelError(f"{self.path}: tensor {name!r} has unknown type number {kind}") from None
            rows = 1
            for n in dims[1:]:
                rows *= n
            try:
                nbytes = tensor_bytes(type_name, (rows, dims[0]))
            except ModelError as error:
                raise ModelError(f"{self.path}: tensor {name!r}: {error.message}") from None
            if offset % alignment:
                raise ModelError(
                    f"{self.path}: tensor {name!r} starts at data byte {offset}, not a multiple of {alignment}"
                )
            begin = self.data_offset + offset
            if begin + nbytes > self.size:
                raise ModelError(
                    f"{self.path}: truncated: tensor {name!r} needs bytes {begin} to {begin + nbytes}, "
                    f"the file has {self.size}",
                    "download the file again",
                )
            self.tensors[name] = GgufTensor(name, type_name, (rows, dims[0]), begin, nbytes, dims)
        regions = sorted((t.offset, t.offset + t.nbytes, t.name) for t in self.tensors.values())
        for (_, end, left), (begin, _, right) in itertools.pairwise(regions):
            if begin < end:
                raise ModelError(f"{self.path}: tensors {left!r} and {right!r} overlap at byte {begin}")

    # ---- content
    @property
    def arch(self) -> str:
        """``general.architecture``; ModelError where it is missing."""
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelError(f"{self.path}: key 'general.architecture' is missing")
        return arch

    def get(self, suffix: str, default: Any = None) -> Any:
        """Metadata of the architecture: ``get("block_count")`` is key ``llama.block_count``."""
        return self.metadata.get(f"{self.arch}.{suffix}", default)

    @property
    def tied(self) -> bool:
        """True if the output head is the token embedding."""
        return "output.weight" not in self.tensors

    def raw(self, name: str, row0: int = 0, rows: int | None = None) -> np.ndarray:
        """uint8 [bytes]: the stored bytes of a tensor (or of some of its rows), read-only, nothing copied."""
        t = self.tensors[name]
        if self._memmap is None:
            self._memmap = np.memmap(self.path, dtype=np.uint8, mode="r")
        count = t.shape[0] - row0 if rows is None else rows
        if row0 < 0 or count < 0 or row0 + count > t.shape[0]:
            raise IndexError(f"rows {row0} to {row0 + count} of {name!r}, which has {t.shape[0]}")
        begin = t.offset + row0 * t.row_bytes
        return self._memmap[begin : begin + count * t.row_bytes]

    def release(self) -> None:
        """Let go of the pages that :meth:`raw` has touched; arrays stay valid and read them again.

        llama.cpp maps the same file, and what is mapped twice counts twice in a process's resident set.
        """
        if self._memmap is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._memmap._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def kv_bytes(self, key: str) -> bytes:
        """The stored bytes of one key/value pair, key included."""
        start, end = self._kv[key]
        return self._map[start:end]

    def sha256(self) -> str:
        """``sha256:<hex>`` of the whole file; computed once, streamed."""
        if self._sha256 is None:
            self._sha256 = file_sha256(self.path)
        return self._sha256

    def first_bad(self, name: str) -> int | None:
        """Index (in file order) of the first NaN or Inf weight, of its block's start for quantised types, else None.

        Blocks are judged by their half-precision scales. ModelError for a type that cannot be judged.
        """
        t = self.tensors[name]
        block, size = type_sizes(t.type_name)
        per = max(1, CHUNK // size)
        data = self.raw(name)
        if t.type_name not in ("F32", "F16", "BF16", "F64") and t.type_name not in _HALF_FIELDS:
            if t.type_name.startswith("I") and not t.type_name.startswith("IQ"):
                return None
            raise ModelError(f"{self.path}: tensor {name!r}: type {t.type_name} cannot be scanned for NaN")
        for start in range(0, t.nbytes, per * size):
            piece = np.asarray(data[start : start + per * size])
            if t.type_name == "BF16":
                bad = (piece.view("<u2") & 0x7F80) == 0x7F80
            elif t.type_name in ("F32", "F16", "F64"):
                bad = ~np.isfinite(piece.view({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[t.type_name]))
            else:
                blocks = piece.reshape(-1, size)
                bad = np.zeros(len(blocks), bool)
                for at in _HALF_FIELDS[t.type_name]:
                    half = np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")[:, 0]
                    bad |= (half & 0x7C00) == 0x7C00
            if bad.any():
                return (start // size + int(bad.argmax())) * block
        return None

    def close(self) -> None:
        """Unmap the file (arrays still held keep their own mapping)."""
        self._memmap = None
        self._map.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_sha256(path: str | os.PathLike[str]) -> str:
    """``sha256:<hex>`` of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(CHUNK):
            digest.update(piece)
    return "sha256:" + digest.hexdigest()


# ---- writing
Producer = Callable[[], Iterable[bytes | bytearray | memoryview | np.ndarray]]
"""Called once, yields the tensor's bytes in order, in pieces of any size."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write. dims: fastest first, as in the file; produce: see :data:`Producer`."""

    name: str
    type_name: str
    dims: tuple[int, ...]
    produce: Producer

    @property
    def nbytes(self) -> int:
        rows = 1
        for n in self.dims[1:]:
            rows *= n
        return tensor_bytes(self.type_name, (rows, self.dims[0]))


def pack_text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def pack_kv(key: str, value: Any, kind: int | None = None) -> bytes:
    """One key/value pair as bytes. Without ``kind``: bool, int (UINT32), float (FLOAT32), str or a list of str."""
    if kind is None:
        if isinstance(value, bool):
            kind = GGUFValueType.BOOL
        elif isinstance(value, int):
            kind = GGUFValueType.UINT32
        elif isinstance(value, float):
            kind = GGUFValueType.FLOAT32
        elif isinstance(value, str):
            kind = GGUFValueType.STRING
        elif isinstance(value, list):
            kind = GGUFValueType.ARRAY
        else:
            raise TypeError(f"no GGUF type for {type(value).__name__}")
    head = pack_text(key) + struct.pack("<I", kind)
    if kind in _SCALARS:
        return head + struct.pack(_SCALARS[kind], value)
    if kind == GGUFValueType.STRING:
        return head + pack_text(value)
    return head + struct.pack("<IQ", GGUFValueType.STRING, len(value)) + b"".join(pack_text(v) for v in value)


def require_space(target: Path, needed: int) -> None:
    """WillNotFit, naming both numbers, unless ``needed`` bytes and a little more are free where ``target`` will be."""
    free = shutil.disk_usage(target.parent).free
    margin = 1 << 16
    if free < needed + margin:
        raise WillNotFit(
            f"{target}: {needed} bytes are needed on its disk, {free} are free",
            "free some space, choose another --out, or a smaller --type",
        )


def write_all(
    target: str | os.PathLike[str],
    pairs: Sequence[bytes],
    tensors: Sequence[NewTensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
) -> Path:
    """Write a GGUF (version 3): ``pairs`` as packed by :func:`pack_kv`, then the tensors, streamed.

    The file appears under its name only when it is complete and on disk; on any failure an older file of that name is
    untouched and nothing is left beside it. Raises WillNotFit before writing if the disk is too full, ExportError if
    writing fails or a producer yields a wrong number of bytes.
    """
    path = Path(target)
    table, offset = [], 0
    for t in tensors:
        head = pack_text(t.name) + struct.pack("<I", len(t.dims)) + struct.pack(f"<{len(t.dims)}Q", *t.dims)
        table.append(head + struct.pack("<IQ", GGMLQuantizationType[t.type_name], offset))
        offset += -(-t.nbytes // alignment) * alignment
    header = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(table)
    header += b"\0" * (-len(header) % alignment)
    with atomic_file(path, len(header) + offset) as out:
        out.write(header)
        for t in tensors:
            written = 0
            for piece in t.produce():
                data = np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else memoryview(piece)
                out.write(data.cast("B"))
                written += data.nbytes
            if written != t.nbytes:
                raise ExportError(f"{path}: tensor {t.name!r} gave {written} bytes instead of {t.nbytes}")
            out.write(b"\0" * (-written % alignment))
    return path


class atomic_file:
    """``with atomic_file(path, bytes_needed) as out``: a file that replaces ``path`` at the end, or leaves no trace."""

    def __init__(self, target: Path, needed: int) -> None:
        self.target, self.needed = target, needed

    def __enter__(self) -> Any:
        if self.target.is_dir():
            raise ExportError(f"{self.target} is a folder")
        try:
            require_space(self.target, self.needed)
            self._fd, self._temp = tempfile.mkstemp(prefix=".edgees-", suffix=".part", dir=self.target.parent)
        except OSError as error:
            raise _cannot_write(self.target, error) from error
        self._out = os.fdopen(self._fd, "wb", buffering=CHUNK)
        return self._out

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self._out.flush()
                mask = os.umask(0)
                os.umask(mask)
                os.chmod(self._temp, 0o666 & ~mask)  # mkstemp's 0600 would lock out other users
                os.fsync(self._fd)
                self._out.close()
                os.replace(self._temp, self.target)
                _sync_folder(self.target.parent)
                return
        except OSError as later:
            error = later
        with contextlib.suppress(OSError):  # where the buffer cannot be flushed either, the file goes anyway
            self._out.close()
        Path(self._temp).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(self.target, error) from error


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cannot_write(target: Path, error: OSError) -> EdgeesError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return WillNotFit(
            f"{target} does not fit: {error.strerror}",
            "free some space or choose another --out; nothing was left behind, and a file already there is unchanged",
        )
    return ExportError(
        f"cannot write {target}: {error.strerror or error}",
        "check that the folder exists, is writable and has space; a file already there is unchanged",
    )


def write_like(
    base: GgufFile,
    target: str | os.PathLike[str],
    replace: Mapping[str, tuple[str, Producer]],
    *,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF with every key and tensor of ``base``, in its order, some tensors replaced.

    replace: name -> (type name, producer of the bytes in that type, same shape as the base's tensor).
    metadata: keys to set (new value in the old one's type and place, or appended); None removes a key.
    """
    unknown = sorted(set(replace) - set(base.tensors))
    if unknown:
        raise ExportError(f"{base.path} has no tensor {unknown[0]!r}")
    changes = dict(metadata or {})
    pairs: list[bytes] = []
    for key in base.metadata:
        if key not in changes:
            pairs.append(base.kv_bytes(key))
            continue
        value = changes.pop(key)
        if value is not None:
            kind = base.kinds[key][0]
            pairs.append(pack_kv(key, value, kind if kind in _SCALARS or isinstance(value, str) else None))
    pairs += [pack_kv(key, value) for key, value in changes.items() if value is not None]

    def copied(name: str) -> Producer:
        def pieces() -> Iterator[np.ndarray]:
            data = base.raw(name)
            for start in range(0, len(data), CHUNK):
                yield data[start : start + CHUNK]

        return pieces

    tensors = []
    for name, t in base.tensors.items():
        type_name, produce = replace.get(name) or (t.type_name, copied(name))
        tensors.append(NewTensor(name, type_name, t.dims, produce))
    return write_all(target, pairs, tensors, alignment=base.alignment)
