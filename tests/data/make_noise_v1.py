"""Known answers of noise version 1, from tests/reference.py alone: python tests/data/make_noise_v1.py

Writes noise_v1.json beside this file and the same numbers as csrc/tests/noise_v1.inc. Only a new version of the noise
may change them. Arrays are kept as the FNV-1a hash (64 bits) of their little-endian bytes, and their first elements.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import reference  # noqa: E402

JSON, INC = ROOT / "tests" / "data" / "noise_v1.json", ROOT / "csrc" / "tests" / "noise_v1.inc"
KINDS = ("sign", "lowrank", "normal")
NAME = "model.layers.0.self_attn.q_proj.weight"
KEEP = float(np.float32(0.999))


def fnv(array: np.ndarray) -> int:
    """FNV-1a, 64 bits, of the bytes."""
    value = 0xCBF29CE484222325
    for byte in np.ascontiguousarray(array).tobytes():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def start(rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols]: a delta that any language can write down exactly."""
    i = np.arange(rows * cols, dtype=np.int64)
    return (((i * 40503) & 0xFFFF) / 65536 - 0.5).astype(np.float32).reshape(rows, cols)


def pairs(n: int) -> tuple[list[int], list[int], np.ndarray]:
    """(keys, slots, float32 coefficients) of n pairs."""
    coefs = np.array([(-1) ** p * 0.01 * (p + 1) for p in range(n)], np.float32)
    return [reference.make_key(11, 4, p) for p in range(n)], [3 * p + 1 for p in range(n)], coefs


def answers() -> dict[str, Any]:
    """Everything that noise_v1.json says."""
    out: dict[str, Any] = {"version": 1, "name": NAME, "tensor": reference.tensor_id(NAME)}
    counters = {  # by key: those of Random123's own known answers
        0: (0, 0, 0, 0),
        (1 << 64) - 1: (0xFFFFFFFF,) * 4,
        0x299F31D0A4093822: (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
    }
    out["philox"] = []
    for rounds in (7, 10):
        for key, (block, row, tensor, stream) in counters.items():
            words = reference.philox(key, np.array(block), np.array(row), tensor, stream, rounds).tolist()
            out["philox"].append(
                {"rounds": rounds, "key": key, "counter": [block, row, tensor, stream], "words": words}
            )
    out["keys"] = [
        {"seed": s, "generation": g, "pair": p, "key": reference.make_key(s, g, p)}
        for s, g, p in ((0, 0, 0), (1, 2, 3), ((1 << 64) - 1, 0xFFFFFFFF, 1), (42, 0xFFFFFFFF, 0))
    ]
    key, tensor = reference.make_key(7, 3, 1), out["tensor"]
    shapes = [
        (kind, rank, False, row0, 3, cols)
        for kind, rank in (("sign", 1), ("lowrank", 1), ("lowrank", 2), ("lowrank", 3), ("normal", 1))
        for row0 in (0, 126)
        for cols in (1, 31, 129, 576)
    ]
    shapes += [(kind, 2, True, 0, 1, 131) for kind in KINDS]
    shapes += [(kind, 1, False, (1 << 32) - 2, 2, 40) for kind in ("sign", "normal")]
    out["eps"] = []
    for kind, rank, vector, row0, rows, cols in shapes:
        value, s = reference.integers(kind, key, tensor, rows, cols, rank, row0, vector)
        eps = value.astype(np.float32) * s
        out["eps"].append(
            {
                "kind": kind, "rank": rank, "vector": vector, "key": key, "row0": row0, "rows": rows, "cols": cols,
                "integers": value.reshape(-1)[:8].tolist(), "scale": float(s), "fnv": fnv(eps),
            }
        )  # fmt: skip
    out["dither"] = [
        {"seed": 5, "rows": 3, "cols": c, "fnv": fnv(reference.dither(5, tensor, 3, c))} for c in (1, 31, 129, 1100)
    ]
    out["pool"] = [
        {"seed": 5, "cols": c, "factors": 4, "fnv": fnv(reference.pool(5, tensor, c, 4).astype(np.int8))}
        for c in (1, 129, 576)
    ]
    out["delta"] = []
    for kind, rank, vector, rows, cols in (
        ("sign", 1, False, 5, 131), ("lowrank", 1, False, 140, 576), ("lowrank", 3, False, 7, 2100),
        ("normal", 1, False, 5, 131), ("lowrank", 2, True, 1, 576),
    ):  # fmt: skip
        for keep in (1.0, KEEP):
            keys, _, coefs = pairs(3)
            moved = reference.update_dense(start(rows, cols), NAME, 1.0, keys, coefs, keep, kind, rank, vector)
            out["delta"].append(
                {
                    "kind": kind, "rank": rank, "vector": vector, "rows": rows, "cols": cols, "pairs": 3, "keep": keep,
                    "fnv": fnv(moved),
                }
            )  # fmt: skip
    out["factors"] = []
    for rank, rows, factors in ((1, 140, 4), (3, 9, 4), (2, 5, 1)):
        for keep in (1.0, KEEP):
            keys, slots, coefs = pairs(3)
            moved = reference.update_factors(start(rows, factors), NAME, 1.0, keys, slots, coefs, keep, rank)
            out["factors"].append(
                {"rank": rank, "rows": rows, "factors": factors, "pairs": 3, "keep": keep, "fnv": fnv(moved)}
            )
    return out


def render_inc(data: dict[str, Any]) -> str:
    """The numbers as C++ initialisers, one case a line."""

    def cell(name: str, value: Any) -> str:
        if name in ("counter", "words"):
            return "{" + ", ".join(f"{v:#010x}u" for v in value) + "}"
        if name in ("seed", "key", "fnv"):
            return f"{value:#018x}u"
        if name == "keep":
            return f"{value.hex()}f"
        return str(KINDS.index(value) if name == "kind" else int(value))

    tables = {
        "philox": "rounds key counter words",
        "keys": "seed generation pair key",
        "eps": "kind rank vector key row0 rows cols fnv",
        "dither": "seed rows cols fnv",
        "delta": "kind rank vector rows cols pairs keep fnv",
        "factors": "rank rows factors pairs keep fnv",
    }
    lines = [
        "// Made by tests/data/make_noise_v1.py from tests/reference.py.",
        f"const uint32_t kTensor = {data['tensor']:#010x}u;",
    ]
    for name, fields in tables.items():
        lines.append(f"const {name.capitalize()}Case k{name.capitalize()}[] = {{")
        lines += ["    {" + ", ".join(cell(f, case[f]) for f in fields.split()) + "}," for case in data[name]]
        lines.append("};")
    return "\n".join([*lines, ""])


def render_json(data: dict[str, Any]) -> str:
    """One case a line."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list):
            parts.append(f'"{name}": [\n' + ",\n".join("  " + json.dumps(v) for v in value) + "\n]")
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    known = answers()
    JSON.write_text(render_json(known), encoding="utf-8")
    INC.write_text(render_inc(known), encoding="utf-8")
