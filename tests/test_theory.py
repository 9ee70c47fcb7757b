"""What the theory of evolution strategies says about our own update, checked by simulation.

Sources: the random walk of z-scored noise and its cure, design.md section 2; the rate on a quadratic, the expansion in
edgees/probe.py; dithering's noise, Schuchman (IEEE Trans. Commun. Technol. 12, 1964).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference

from edgees import blocks, noise
from edgees.update import update

PAIRS, ROWS, SIZE = 16, 8, 2000


def walk(generations: int, shrink: bool, seed: int) -> float:
    """RMS of delta/rho after generations whose rewards have nothing to do with who got them."""
    rng = np.random.default_rng(seed)
    delta = np.zeros(SIZE)
    for _ in range(generations):
        rewards = rng.permutation(rng.normal(size=PAIRS * 2 * ROWS)).reshape(PAIRS, 2, ROWS)
        step = update(rewards, lr=0.2, sigma=0.04, shrink=shrink)
        delta += np.array(step.coefs) @ rng.choice([-1.0, 1.0], (PAIRS, SIZE))
    return float(np.sqrt(np.mean(delta**2)))


def test_shuffled_rewards_are_a_random_walk_of_known_length() -> None:
    """RMS lr * sqrt(T/P) of z, whose variance is that of d over that of F: a half. Shrink makes it far shorter."""
    generations = 60
    free = np.mean([walk(generations, False, seed) for seed in range(8)])
    expected = 0.2 * math.sqrt(generations / PAIRS) * math.sqrt(0.5)
    assert free == pytest.approx(expected, rel=0.1)
    assert np.mean([walk(generations, True, seed) for seed in range(8)]) < 0.5 * free


@pytest.mark.parametrize("pairs", [8, 32])
def test_a_quadratic_converges_at_the_predicted_rate(pairs: int) -> None:
    """Loss h|x|^2/2 falls by (1 - lr h)^2 + lr^2 h^2 (n - 1)/P a generation in expectation, with shaping raw."""
    n, h, sigma, generations = 50, 1.0, 0.01, 40
    lr = 0.5 / (1 + (n - 1) / pairs) / h
    ratios = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=n)
        first = x @ x
        for _ in range(generations):
            eps = rng.choice([-1.0, 1.0], (pairs, n))
            rewards = np.array(
                [[[-h * float((x + s * sigma * e) @ (x + s * sigma * e)) / 2] for s in (1, -1)] for e in eps]
            )
            x = x + np.array(update(rewards, lr=lr, sigma=sigma, shaping="raw", shrink=False).coefs) @ eps
        ratios.append(math.log(x @ x / first) / generations)
    rate = (1 - lr * h) ** 2 + lr**2 * h**2 * (n - 1) / pairs
    assert np.mean(ratios) == pytest.approx(math.log(rate), rel=0.15)


@pytest.mark.parametrize("bits", [0, 2, 4, 8])
@pytest.mark.parametrize("size", [0.003, 0.03])
def test_the_noise_floor_of_a_view_is_that_of_dithering(bits: int, size: float) -> None:
    """Rounding a move of t steps with dither has variance t(1-t) step^2; bits 0 is the base's own lattice."""
    rows, cols, rho = 64, 512, 0.2
    rng = np.random.default_rng(4)
    scale = np.full((rows * cols // 32, 1), 0.066, np.float16).view(np.uint8)
    codes = rng.integers(5, 11, (rows * cols // 32, 32)).astype(np.uint8)  # far enough from the ends of the lattice
    raw = np.concatenate([scale, codes[:, :16] | codes[:, 16:] << 4], axis=1).reshape(-1)
    base = blocks.decode("Q4_0", raw, rows, cols)
    delta = (rng.normal(size=(rows, cols)) * size * rho).astype(np.float32)
    cell = float(np.float16(0.066))
    order, key = np.arange(rows, dtype=np.int32), noise.dither_key(3)
    if bits:
        span = blocks.plane_span("Q4_0", [(raw, delta)], rho)
        plane = blocks.plane_encode("Q4_0", raw, delta, order, key, 7, bits, span, rho)
        moved = blocks.effective("Q4_0", raw, rows, cols, plane, bits, span, rho)
        _, step = reference.plane(delta, np.full_like(delta, cell), np.full_like(delta, 0.5), bits)
        width = float(np.max(step))
    else:
        moved = blocks.decode("Q4_0", blocks.lattice_encode("Q4_0", raw, delta, order, key, 7), rows, cols)
        width = cell
    t = np.abs(delta.astype(np.float64)) / width
    t -= np.floor(t)
    error = (moved - base).astype(np.float64) - delta
    assert np.mean(error**2) == pytest.approx(np.mean(t * (1 - t)) * width**2, rel=0.05)
