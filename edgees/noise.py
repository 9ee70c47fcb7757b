"""Noise version 1: keys, tensor ids and the random numbers of members, made natively, with a twin in NumPy.

Every number is a pure function of (run seed, generation, pair, tensor name, row, column), the same bits on every
machine: a history of coefficients therefore rebuilds everything that was learned. Generator: Philox4x32 of Salmon et
al. (SC'11), ten rounds for keys, seven for noise. csrc/noise.h says which random bit belongs to which weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np

from edgees import native
from edgees.errors import ModelError, UsageError

VERSION = 1
KINDS = ("sign", "lowrank", "normal")
POOL_GENERATION = 0xFFFFFFFF
"""The generation that no run reaches: pair 0 keys the pool of the adapter view, pair 1 the dither."""

LEFT, RIGHT = 0x100, 0x200
"""Streams of the left and right factors of lowrank noise: + k for factor k."""
_SIGN, _NORMAL, _POOL = 0, 0x300, 0x500


def make_key(seed: int, generation: int, pair: int) -> int:
    """64-bit key of one pair's noise. :raises UsageError: seed beyond 64, generation or pair beyond 32 bits."""
    if not (0 <= seed < 1 << 64 and 0 <= generation < 1 << 32 and 0 <= pair < 1 << 32):
        raise UsageError(
            f"no key for seed {seed}, generation {generation}, pair {pair}",
            "a seed is 0 to 2^64-1, generations and pairs are below 2^32",
        )
    return int(native.lib().edgees_key(seed, generation, pair))


@cache
def tensor_id(name: str) -> int:
    """32-bit id of a canonical tensor name: its BLAKE2b digest of 4 bytes, little-endian."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def check_ids(names: Iterable[str]) -> None:
    """:raises ModelError: two different names have one id, and would get the same noise."""
    seen: dict[int, str] = {}
    for name in names:
        other = seen.setdefault(tensor_id(name), name)
        if other != name:
            raise ModelError(
                f"tensors {other!r} and {name!r} have the same noise id {tensor_id(name):#010x}",
                "freeze one of the two with --params",
            )


def eps(
    kind: str, key: int, tensor: int, rows: int, cols: int, *, rank: int = 1, row0: int = 0, vector: bool = False
) -> np.ndarray:
    """float32 [rows, cols]: canonical rows from ``row0`` of a member's noise, mean 0 and variance 1.

    ``kind``: of :data:`KINDS`; ``rank``: 1 to 256, of lowrank only. ``vector``: a 1-D tensor, rows is 1 and row0 is 0.
    :raises NativeError: sizes that make no sense.
    """
    out = np.empty((rows, cols), np.float32)
    code = native.lib().edgees_eps(
        KINDS.index(kind), rank, int(vector), key, tensor, row0, rows, cols, native.pointer(out)
    )
    native.check(code, f"{kind} noise of {rows} x {cols}")
    return out


def sign_vector(key: int, tensor: int, stream: int, n: int) -> np.ndarray:
    """float32 [n] of +-1: row 0 of a sign stream (``LEFT + k``, ``RIGHT + k``: factors k of lowrank)."""
    out = np.empty(n, np.float32)
    native.check(
        native.lib().edgees_sign_vector(key, tensor, stream, n, native.pointer(out)), f"{n} signs of stream {stream:#x}"
    )
    return out


def pool(seed: int, tensor: int, cols: int, factors: int) -> np.ndarray:
    """int8 [cols, factors] of +-1: the right factors of the adapter view, fixed for a run; columns are contiguous."""
    bits = np.unpackbits(pool_packed(seed, tensor, cols, factors).view(np.uint8), axis=1, bitorder="little")
    return np.asarray((1 - 2 * bits[:, :cols].view(np.int8)).T)


def pool_packed(seed: int, tensor: int, cols: int, factors: int) -> np.ndarray:
    """uint32 [factors, ceil(cols/128)*4]: the pool as bits, element j in bit j%32 of word j//32, 1 for -1."""
    blocks = -(-cols // 128)
    out = np.empty((factors, blocks * 4), np.uint32)
    key = make_key(seed, POOL_GENERATION, 0)
    for k in range(factors):
        code = native.lib().edgees_philox(key, 0, tensor, _POOL + k, 0, blocks, native.pointer(out[k]))
        native.check(code, f"pool of {cols} x {factors}")
    return out


def dither_key(seed: int) -> int:
    """Key of a run's dither."""
    return make_key(seed, POOL_GENERATION, 1)


def dither(seed: int, tensor: int, rows: int, cols: int, row0: int = 0) -> np.ndarray:
    """float32 [rows, cols], uniform in (0, 1): what rounding adds before it takes the floor, fixed for a run."""
    out = np.empty((rows, cols), np.float32)
    code = native.lib().edgees_dither(dither_key(seed), tensor, row0, rows, cols, native.pointer(out))
    native.check(code, f"dither of {rows} x {cols}")
    return out


# ---- the twin
def eps_numpy(
    kind: str, key: int, tensor: int, rows: int, cols: int, *, rank: int = 1, row0: int = 0, vector: bool = False
) -> np.ndarray:
    """:func:`eps` without the compiled library: the same bits, slowly."""
    index = np.zeros(1, np.uint64) if vector else np.arange(row0, row0 + rows, dtype=np.uint64)
    if kind == "normal":
        table, scale = _quantiles()
        words = _words(key, index, tensor, _NORMAL, -(-cols // 8))
        h = np.ascontiguousarray(words).astype("<u4").view("<u2")[:, :cols].astype(np.int64)
        i, f = (h >> 4) & 0x7FF, h & 0xF
        m = table[i] + ((table[i + 1] - table[i]) * f >> 4)
        return np.asarray(np.where(h >> 15, -m, m).astype(np.float32) * scale)
    if kind == "sign" or vector:
        return _signs(key, index, tensor, _SIGN, cols).astype(np.float32)
    total = np.zeros((rows, cols), np.int64)
    first = np.zeros(1, np.uint64)
    for k in range(rank):
        a = _signs(key, first, tensor, LEFT + k, row0 + rows)[0, row0:]
        total += np.outer(a, _signs(key, first, tensor, RIGHT + k, cols)[0])
    return np.asarray(total.astype(np.float32) * np.float32(1 / np.sqrt(rank)))


def _words(key: int, rows: np.ndarray, tensor: int, stream: int, blocks: int) -> np.ndarray:
    """uint32 [rows, blocks*4]: Philox4x32-7 of counters (block, row, tensor, stream)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    shape = (len(rows), blocks)
    c0 = np.broadcast_to(np.arange(blocks, dtype=np.uint64), shape)
    c1 = np.broadcast_to(rows[:, None], shape)
    c2, c3 = np.full(shape, tensor, np.uint64), np.full(shape, stream, np.uint64)
    for r in range(7):
        k0 = np.uint64((key + r * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64(((key >> 32) + r * 0xBB67AE85) & 0xFFFFFFFF)
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32).reshape(len(rows), -1)


def _signs(key: int, rows: np.ndarray, tensor: int, stream: int, n: int) -> np.ndarray:
    """int64 [rows, n] of +-1."""
    words = _words(key, rows, tensor, stream, -(-n // 128)).astype("<u4")
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return 1 - 2 * bits[:, :n].astype(np.int64)


@lru_cache(maxsize=1)
def _quantiles() -> tuple[np.ndarray, np.float32]:
    """(int64 [2049], scale): the table of csrc/normal_table.h, computed anew."""
    inverse = NormalDist().inv_cdf
    p = [0.5 + 0.5 * (i / 2048) for i in range(2048)] + [1 - 2.0**-17]
    t = np.array([round(4096 * inverse(x)) for x in p], np.int64)
    h = np.arange(1 << 15)
    m = t[h >> 4] + ((t[(h >> 4) + 1] - t[h >> 4]) * (h & 15) >> 4)
    return t, np.float32(1 / np.sqrt(np.mean(m.astype(np.float64) ** 2)))
