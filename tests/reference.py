"""The whole of edgees on a toy problem, in NumPy, to be read from top to bottom.

Nothing here is fast and nothing is imported from edgees: it is the oracle of the tests, written from the contract
(docs: noise version 1, views, update), so that a fault in the product and a fault here would have to agree.

    1 Philox            counters and keys -> random words
    2 noise             random words -> eps of the three kinds
    3 members           keys, antithetic pairs, slots
    4 fitness           rewards -> pair signals, their errors, shrink, coefficients
    5 update            coefficients -> the exact float32 delta, or the adapter's factors
    6 views             delta -> what the forward pass multiplies with (residual planes, factors)
    7 a run             all of it on a quadratic toy
"""

from __future__ import annotations

import hashlib
import statistics

import numpy as np

# ------------------------------------------------------------------------------------------------- 1 Philox


def philox(key: int, block: np.ndarray, row: np.ndarray, tensor: int, stream: int, rounds: int) -> np.ndarray:
    """Philox4x32 (Salmon et al., SC'11): uint32 [..., 4] for counters (block, row, tensor, stream)."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    block, row = np.broadcast_arrays(np.asarray(block, np.uint64), np.asarray(row, np.uint64))
    c0, c1 = block.copy(), row.copy()
    c2 = np.full_like(c0, tensor)
    c3 = np.full_like(c0, stream)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(rounds):
        p0 = c0 * np.uint64(0xD2511F53)
        p1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> half) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> half) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def make_key(seed: int, generation: int, pair: int) -> int:
    """64-bit key of one pair's noise: ten rounds, keyed by the run's seed."""
    words = philox(seed, np.array(generation), np.array(pair), 0x45444745, 1, rounds=10)
    return int(words[0]) | int(words[1]) << 32


def tensor_id(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def words(key: int, tensor: int, stream: int, rows: np.ndarray, blocks: int) -> np.ndarray:
    """uint32 [rows, blocks*4]: the noise's own Philox has seven rounds."""
    grid = philox(key, np.arange(blocks)[None, :], np.asarray(rows)[:, None], tensor, stream, rounds=7)
    return grid.reshape(len(rows), blocks * 4)


# -------------------------------------------------------------------------------------------------- 2 noise

POOL_GENERATION = 0xFFFFFFFF
STREAM_SIGN, STREAM_A, STREAM_B, STREAM_NORMAL, STREAM_DITHER, STREAM_POOL = 0, 0x100, 0x200, 0x300, 0x400, 0x500


def signs(key: int, tensor: int, stream: int, rows: np.ndarray, cols: int) -> np.ndarray:
    """int64 [rows, cols] of +-1: one bit each, 1 means -1, 128 to a Philox block."""
    w = words(key, tensor, stream, rows, -(-cols // 128))
    bits = (w[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    return 1 - 2 * bits.reshape(len(rows), -1)[:, :cols].astype(np.int64)


def halves(key: int, tensor: int, stream: int, rows: np.ndarray, cols: int) -> np.ndarray:
    """int64 [rows, cols] in 0..65535: 16 bits each, low half first, 8 to a Philox block."""
    w = words(key, tensor, stream, rows, -(-cols // 8))
    both = np.stack([w & np.uint32(0xFFFF), w >> np.uint32(16)], axis=-1)
    return both.reshape(len(rows), -1)[:, :cols].astype(np.int64)


def normal_table() -> np.ndarray:
    """int64 [2049]: quantiles of the half-normal in 1/4096."""
    inverse = statistics.NormalDist().inv_cdf
    t = [round(4096 * inverse(0.5 + 0.5 * (i / 2048))) for i in range(2048)]
    return np.array([*t, round(4096 * inverse(1 - 2.0**-17))], dtype=np.int64)


TABLE = normal_table()


def normal_integers(h: np.ndarray) -> np.ndarray:
    i, f = (h >> 4) & 0x7FF, h & 0xF
    m = TABLE[i] + (((TABLE[i + 1] - TABLE[i]) * f) >> 4)
    return np.where(h >> 15, -m, m)


NORMAL_SCALE = np.float32(1 / np.sqrt(np.mean(normal_integers(np.arange(65536)).astype(np.float64) ** 2)))


def integers(
    kind: str, key: int, tensor: int, rows: int, cols: int, rank: int = 1, row0: int = 0, vector: bool = False
) -> tuple[np.ndarray, np.float32]:
    """(int64 [rows, cols], s): eps is float(integer) * s with variance 1. Vectors take the dense streams, row 0."""
    index = np.array([0]) if vector else np.arange(row0, row0 + rows)
    if kind == "normal":
        return normal_integers(halves(key, tensor, STREAM_NORMAL, index, cols)), NORMAL_SCALE
    if kind == "sign" or vector:
        return signs(key, tensor, STREAM_SIGN, index, cols), np.float32(1)
    zero = np.array([0])
    total = np.zeros((rows, cols), np.int64)
    for k in range(rank):
        a = signs(key, tensor, STREAM_A + k, zero, row0 + rows)[0, row0:]
        b = signs(key, tensor, STREAM_B + k, zero, cols)[0]
        total += np.outer(a, b)
    return total, np.float32(1 / np.sqrt(rank))


def left(key: int, tensor: int, k: int, rows: int) -> np.ndarray:
    """int64 [rows]: left factor k of the lowrank noise."""
    return signs(key, tensor, STREAM_A + k, np.array([0]), rows)[0]


def pool(seed: int, tensor: int, cols: int, factors: int) -> np.ndarray:
    """int64 [cols, factors]: the adapter view's right factors, fixed for the run."""
    key = make_key(seed, POOL_GENERATION, 0)
    return np.stack([signs(key, tensor, STREAM_POOL + k, np.array([0]), cols)[0] for k in range(factors)], axis=1)


def dither(seed: int, tensor: int, rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols] in (0, 1), fixed for the run."""
    h = halves(make_key(seed, POOL_GENERATION, 1), tensor, STREAM_DITHER, np.arange(rows), cols)
    return ((h + 0.5) / 65536).astype(np.float32)


# ------------------------------------------------------------------------------------------------ 3 members


def members(seed: int, generation: int, pairs: int, sigma: float) -> list[tuple[int, float, int]]:
    """(key, amplitude, slot), pair-major, plus before minus."""
    out = []
    for p in range(pairs):
        key = make_key(seed, generation, p)
        out += [(key, sigma, generation * pairs + p), (key, -sigma, generation * pairs + p)]
    return out


def sigma_at(fraction: float, sigma: float, end: float) -> float:
    """Cosine from sigma to sigma*end."""
    return sigma * (end + (1 - end) * 0.5 * (1 + np.cos(np.pi * fraction)))


# ------------------------------------------------------------------------------------------------ 4 fitness


def fitness(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """rewards [P, 2, rows] -> (mean [P, 2], d [P], se [P]); a row counts where both signs have a reward."""
    mean, d, se = [], [], []
    for plus, minus in rewards:
        both = ~(np.isnan(plus) | np.isnan(minus))
        n = int(both.sum())
        half = (plus[both] - minus[both]) / 2
        mean.append([plus[both].mean(), minus[both].mean()] if n else [np.nan, np.nan])
        d.append(half.mean() if n else np.nan)
        se.append(half.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan)
    return np.array(mean), np.array(d), np.array(se)


def coefficients(
    rewards: np.ndarray, lr: float, sigma: float, shaping: str = "zscore", use_shrink: bool = True
) -> tuple[np.ndarray, np.ndarray, float]:
    """(float32 [P], z [P], shrink): what one generation's rewards say."""
    mean, d, se = fitness(rewards)
    known = ~np.isnan(d)
    values = mean[known]
    z = np.zeros(len(d))
    if values.size == 0 or np.ptp(values) == 0:
        return z.astype(np.float32), z, 0.0
    if shaping == "zscore":
        z[known] = d[known] / values.std()
    elif shaping == "ranks":
        flat = values.reshape(-1)
        rank = np.array([np.sum(flat < v) + (np.sum(flat == v) - 1) / 2 for v in flat])
        u = (rank / (flat.size - 1) - 0.5).reshape(-1, 2)
        z[known] = (u[:, 0] - u[:, 1]) / 2 / u.std()
    elif shaping == "raw":
        z[known] = d[known] / sigma
    shrink = 1.0
    estimated = known & ~np.isnan(se)
    if use_shrink and estimated.any() and np.any(d[known] != 0):
        shrink = max(0.0, 1 - np.mean(se[estimated] ** 2) / np.mean(d[known] ** 2))
    return (lr * shrink * z / len(d)).astype(np.float32), z, shrink


# ------------------------------------------------------------------------------------------------- 5 update


def update_dense(
    delta: np.ndarray,
    name: str,
    rho: float,
    keys: list[int],
    coefs: np.ndarray,
    keep: float,
    kind: str,
    rank: int = 1,
    vector: bool = False,
) -> np.ndarray:
    """float32 [rows, cols]: keep*delta + sum_p cs_p * integer_p, pairs in order, every operation rounded."""
    acc = np.zeros(delta.shape, np.float32)
    for key, coef in zip(keys, coefs, strict=True):
        noise, s = integers(kind, key, tensor_id(name), delta.shape[0], delta.shape[1], rank, vector=vector)
        cs = np.float32(np.float32(float(coef) * rho) * s)
        acc = acc + cs * noise.astype(np.float32)
    kept = delta if keep == 1 else np.float32(keep) * delta
    return (kept + acc).astype(np.float32)


def update_factors(
    a: np.ndarray,
    name: str,
    rho: float,
    keys: list[int],
    slots: list[int],
    coefs: np.ndarray,
    keep: float,
    rank: int = 1,
) -> np.ndarray:
    """float32 [rows, K]: A of delta = A B^T; pair with slot n writes into columns (n*rank + j) mod K."""
    rows, factors = a.shape
    a = a.copy() if keep == 1 else np.float32(keep) * a
    s = np.float32(1 / np.sqrt(rank))
    for key, slot, coef in zip(keys, slots, coefs, strict=True):
        cs = np.float32(np.float32(float(coef) * rho) * s)
        for j in range(rank):
            k = (slot * rank + j) % factors
            a[:, k] += cs * left(key, tensor_id(name), j, rows).astype(np.float32)
    return a


# -------------------------------------------------------------------------------------------------- 6 views


def span(delta: np.ndarray, cell: np.ndarray) -> int:
    """Smallest e in 0..8 for which at most 0.1 % of the deltas lie beyond cell * 2^(e-1)."""
    for e in range(9):
        outside = (np.abs(delta) > cell * np.float32(2.0 ** (e - 1))) & (cell != 0)
        if outside.sum() <= 0.001 * delta.size:
            return e
    return 8


def plane(delta: np.ndarray, cell: np.ndarray, u: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(q int, step): the residual of `bits` bits a weight; effective weight = base + step*q."""
    step = cell * np.float32(2.0 ** (span(delta, cell) - bits))
    safe = np.where(step == 0, np.float32(1), step)
    q = np.clip(np.floor(delta / safe + u), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return np.where(step == 0, 0, q).astype(np.int64), step


def adapter_delta(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 [rows, cols]: A B^T, summed over k in order."""
    out = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for k in range(a.shape[1]):
        out = out + a[:, k : k + 1] * b[:, k].astype(np.float32)[None, :]
    return out


def adapter_noise(key: int, slot: int, tensor: int, rows: int, b: np.ndarray, rank: int = 1) -> np.ndarray:
    """float32 [rows, cols]: a member's eps in the adapter view."""
    total = np.zeros((rows, b.shape[0]), np.int64)
    for j in range(rank):
        total += np.outer(left(key, tensor, j, rows), b[:, (slot * rank + j) % b.shape[1]])
    return total.astype(np.float32) * np.float32(1 / np.sqrt(rank))


# -------------------------------------------------------------------------------------------------- 7 a run


def tune_quadratic(
    seed: int = 1,
    generations: int = 60,
    pairs: int = 8,
    sigma: float = 0.05,
    lr: float = 0.2,
    shaping: str = "zscore",
    kind: str = "lowrank",
    factors: int = 0,
) -> list[float]:
    """Loss after each generation of a quadratic bowl; row i is rewarded by -|(W - target) x_i|^2.

    ``factors`` > 0 tunes in the adapter view.
    """
    rng = np.random.default_rng(seed)
    rows, cols, episodes = 12, 10, 6
    base = rng.normal(size=(rows, cols)).astype(np.float32)
    rho = float(np.float32(np.sqrt(np.mean(base.astype(np.float64) ** 2))))
    target = base + (0.5 * rho * rng.normal(size=base.shape)).astype(np.float32)
    x = rng.normal(size=(episodes, cols)).astype(np.float32)
    name = "toy.weight"
    b = pool(seed, tensor_id(name), cols, factors) if factors else np.zeros((cols, 0), np.int64)
    a = np.zeros((rows, factors), np.float32)
    delta = np.zeros_like(base)
    losses = []
    for g in range(generations):
        sigma_g = float(sigma_at(g / generations, sigma, 0.5))
        who = members(seed, g, pairs, sigma_g)
        scores = []
        for key, amplitude, slot in who:
            if factors:
                noise = adapter_noise(key, slot, tensor_id(name), rows, b)
            else:
                value, s = integers(kind, key, tensor_id(name), rows, cols)
                noise = value.astype(np.float32) * s
            member = base + delta + np.float32(amplitude * rho) * noise
            scores.append([-float(np.sum(((member - target) @ v) ** 2)) for v in x])
        rewards = np.array(scores).reshape(pairs, 2, episodes)
        coefs, _, _ = coefficients(rewards, lr * sigma_g / sigma, sigma_g, shaping)
        keys, slots = [m[0] for m in who[::2]], [m[2] for m in who[::2]]
        if factors:
            a = update_factors(a, name, rho, keys, slots, coefs, 1.0)
            delta = adapter_delta(a, b)
        else:
            delta = update_dense(delta, name, rho, keys, coefs, 1.0, kind)
        losses.append(float(np.mean(((base + delta - target) @ x.T) ** 2)))
    return losses


if __name__ == "__main__":
    for label, loss in (("lowrank", tune_quadratic()), ("adapter, 16 factors", tune_quadratic(factors=16))):
        print(f"{label}: loss {loss[0]:.3f} -> {loss[-1]:.3f}")
