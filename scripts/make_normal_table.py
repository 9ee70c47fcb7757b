"""Writes csrc/normal_table.h, the half-normal quantiles of noise version 1: python scripts/make_normal_table.py"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from statistics import NormalDist

TARGET = Path(__file__).resolve().parents[1] / "csrc" / "normal_table.h"


def table() -> list[int]:
    """t[i] = round(4096 * quantile(0.5 + 0.5*i/2048)), i = 0..2047; the last is the quantile of 1 - 2^-17."""
    exact = [4096 * NormalDist().inv_cdf(0.5 + 0.5 * (i / 2048)) for i in range(2048)]
    exact.append(4096 * NormalDist().inv_cdf(1 - 2.0**-17))
    # inv_cdf is good to about 1e-15: no entry may lie so near a half that another libm would round it elsewhere.
    assert min(abs(x - math.floor(x) - 0.5) for x in exact) > 1e-6
    return [round(x) for x in exact]


def magnitude(t: list[int], h: int) -> int:
    """|value| of the half-word h: linear between two quantiles, in integers."""
    i, f = (h >> 4) & 0x7FF, h & 0xF
    return t[i] + (((t[i + 1] - t[i]) * f) >> 4)


def render() -> str:
    """The whole header."""
    t = table()
    mean_square = sum(magnitude(t, h) ** 2 for h in range(1 << 16)) / (1 << 16)
    scale = struct.unpack("<f", struct.pack("<f", 1 / math.sqrt(mean_square)))[0]
    lines = [
        "// Made by scripts/make_normal_table.py: quantiles of the half-normal in 1/4096 (noise version 1).",
        "#pragma once",
        "#include <stdint.h>",
        "",
        "// clang-format off",
        "namespace edgees {",
        "",
        "// Variance of scale * value over all 65536 half-words is 1.",
        f"constexpr float kNormalScale = {scale.hex()}f;",
        "inline constexpr int32_t kNormalTable[2049] = {",
    ]
    lines += ["    " + ", ".join(map(str, t[i : i + 16])) + "," for i in range(0, 2049, 16)]
    return "\n".join([*lines, "};", "", "}  // namespace edgees", "// clang-format on", ""])


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
