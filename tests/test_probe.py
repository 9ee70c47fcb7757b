"""The efficiency probe: its formula on a made-up landscape, the command on the toy engine, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgees import config as settings
from edgees.cli import run
from edgees.errors import UsageError
from edgees.probe import Efficiency, choices, efficiency


def landscape(
    pairs: int, rows: int, sigma: float, *, noise: float = 0.0, seed: int = 0, size: int = 400
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Rewards of members on f(x) = g.x - |x|^2/2 h, rows adding gradients of their own; g^2 and the trace of h."""
    rng = np.random.default_rng(seed)
    g, h = rng.normal(size=size), rng.uniform(0.5, 1.5, size) * 4
    eps = rng.choice([-1.0, 1.0], (pairs, size))
    own = noise * rng.normal(size=(pairs, rows, size))
    centre = rng.normal(size=(pairs, rows))
    rewards = np.empty((pairs, 2, rows))
    for p in range(pairs):
        for side, sign in enumerate((1.0, -1.0)):
            x = sign * sigma * eps[p]
            rewards[p, side] = centre[p] + (g + own[p]) @ x - (h * x * x).sum() / 2
    return rewards, centre, float(g @ g), float(h.sum())


def measured(noise: float, seed: int = 1, pairs: int = 400, rows: int = 4) -> tuple[Efficiency, float]:
    rewards, centre, square, trace = landscape(pairs, rows, 0.01, noise=noise, seed=seed)
    return efficiency(rewards, centre, 1000, sigma=0.01), square / (2 * trace)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_efficiency_is_slope_squared_by_twice_the_curvature(noise: float) -> None:
    """With rows that disagree, too: their noise is taken out of the signal. The error bar covers what is left."""
    found, wanted = measured(noise)
    assert found.efficiency is not None and found.error is not None and found.per_token is not None
    assert abs(found.efficiency - wanted) < 3 * found.error < 0.5 * wanted
    assert found.per_token == pytest.approx(found.efficiency * 400)
    assert found.shrink == (1.0 if noise == 0.0 else pytest.approx(1 / (1 + noise**2 / 4), abs=0.1))


def test_its_error_bar_is_what_seeds_show() -> None:
    found = [measured(1.0, seed, pairs=40)[0] for seed in range(60)]
    ratio = np.std([f.efficiency / measured(0.0, s)[1] for s, f in enumerate(found) if f.efficiency]) / np.mean(
        [f.error / measured(0.0, s)[1] for s, f in enumerate(found) if f.error]
    )
    assert 0.7 < ratio < 1.4


def test_lr_is_the_best_step_of_the_formula() -> None:
    """coefs = lr * shrink * d / (std * P) equals shrink * sigma * d / (2 drop)."""
    rewards, centre, _, trace = landscape(50, 3, 0.02)
    found = efficiency(rewards, centre, sigma=0.02, pairs=10)
    d = (rewards[:, 0] - rewards[:, 1]).mean(axis=1) / 2
    assert found.lr == pytest.approx(10 / trace * np.sqrt(np.mean(d**2)) / 0.02)
    assert found.per_token is None


def test_no_drop_no_bound_and_holes_are_left_out() -> None:
    rewards, centre, *_ = landscape(10, 4, 0.01)
    assert efficiency(rewards, centre - 5.0, sigma=0.01).efficiency is None
    whole = efficiency(rewards[:9], centre[:9], sigma=0.01)
    rewards[9, 1] = np.nan
    assert efficiency(rewards, centre, sigma=0.01) == whole
    rewards[2:, 0] = np.nan
    with pytest.raises(ValueError, match="three pairs"):
        efficiency(rewards, centre, sigma=0.01)


def test_choices_are_all_combinations() -> None:
    base = settings.load(None, {"engine": "toy", "model": "toy", "pairs": 5})
    found = choices(base, ["sigma=0.02|0.04", "noise=sign|lowrank", "params=a|b"])
    assert len(found) == 8
    assert [c.sigma for _, c in found] == [0.02] * 4 + [0.04] * 4 and all(c.pairs == 5 for _, c in found)
    assert choices(base, [])[0][0] == {}
    for bad in (["pairs=3"], ["sigma"], ["sigma=1", "sigma=2"], ["sigma=x"], ["noise=pink"]):
        with pytest.raises(UsageError):
            choices(base, bad)


def arguments(tmp_path: Path, *more: str) -> list[str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"question {i}", "answer": f"{i % 7 / 7:.3f}"}) + "\n" for i in range(40))
    )
    reward = tmp_path / "near.py"
    lines = ["def near(completions, answer, **_):"]
    lines += ["    return [-abs(float(c) - float(a)) for c, a in zip(completions, answer)]"]
    reward.write_text("\n".join(lines) + "\n")
    return ["probe", "--engine", "toy", "--model", "toy", "--task", f"jsonl:{rows}", "--reward", str(reward),
            "--pairs", "8", "--rows", "4", *more]  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments(tmp_path, "--vary", "sigma=0.02|0.2", "--vary", "params=hidden|out", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["choice"] for c in found["choices"]] == [
        {"sigma": s, "params": p} for s in ("0.02", "0.2") for p in ("hidden", "out")
    ]
    assert all(c["pairs"] == 8 and c["rows"] == 4 for c in found["choices"])
    assert run(arguments(tmp_path)) == 0
    assert "as configured" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} <= {"rows.jsonl", "near.py", "__pycache__"}


@pytest.mark.parametrize(
    "more", [("--rows", "1"), ("--pairs", "2"), ("--vary", "lr=1|2"), ("--vary", "params=nothing")]
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    assert run(arguments(tmp_path, *more)) == 2
    told = capsys.readouterr().err
    assert more[-1].split("=")[0].lstrip("-") in told or "three pairs and two rows" in told
