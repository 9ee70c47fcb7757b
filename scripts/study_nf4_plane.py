"""How a residual plane beside NF4 codes should count its steps: evenly in absmax, or along the table's intervals.

    python scripts/study_nf4_plane.py

Normal weights, quantised to NF4; a normal displacement of RMS x * rho is dithered onto a plane of r bits. ``even``: a
step is absmax / 8 * 2^(span - r). ``table``: codes become a piecewise linear coordinate, a step is 2^(span - r) of the
interval that it falls into. Spans are the smallest that clip at most 0.1 %. Prints the RMS error of the displacement
as a share of its own RMS.
"""

from __future__ import annotations

import numpy as np

from edgees.blocks import NF4
from edgees.nf4 import quantise


def main() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(256, 4096)).astype(np.float32)
    made = quantise(w)
    absmax = np.repeat(made.absmax_float32(), 64)
    base = made.dequantise().reshape(-1)
    rho = np.sqrt(np.mean(base.astype(np.float64) ** 2))
    place = np.interp(base / absmax, NF4, np.arange(16.0))
    print("| RMS of the move | bits | even | table |\n|---|---|---|---|")
    for x in (0.003, 0.01, 0.03, 0.1):
        move = rng.normal(size=base.size) * x * rho
        u = rng.random(base.size)
        for bits in (2, 4, 8):
            half = 1 << (bits - 1)

            def dithered(t: np.ndarray, u: np.ndarray = u, bits: int = bits, half: int = half) -> np.ndarray:
                for span in range(9):  # of cells
                    step = 2.0 ** (span - bits)
                    if np.mean(np.abs(t) > half * step) <= 1e-3:
                        break
                return np.clip(np.floor(t / step + u), -half, half - 1) * step

            even = dithered(move / (absmax / 8)) * absmax / 8
            target = (base + move) / absmax
            inside = np.interp(target, NF4, np.arange(16.0))
            low, high = NF4[1] - NF4[0], NF4[15] - NF4[14]  # the outer intervals go on
            t = np.where(target < -1, (target + 1) / low, np.where(target > 1, 15 + (target - 1) / high, inside))
            at = place + dithered(t - place)
            back = np.interp(at, np.arange(16.0), NF4)
            back = np.where(at < 0, -1 + at * low, np.where(at > 15, 1 + (at - 15) * high, back))
            table = back * absmax - base
            error = [np.sqrt(np.mean((v - move) ** 2)) / (x * rho) for v in (even, table)]
            print(f"| {x} rho | {bits} | {error[0]:.3f} | {error[1]:.3f} |")


if __name__ == "__main__":
    main()
