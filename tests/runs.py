"""Run folders without a tuning run: a delta of random steps, as the loop would have left them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from edgees import config, opening
from edgees.checkpoint import RunFolder
from edgees.delta import Delta
from edgees.history import History


def make_run(
    run: Path, model: str | Path, scope: str = "full", *, generations: int = 2, lr: float = 0.03, **options: object
) -> Path:
    """A run on ``model`` with ``generations`` steps of about ``lr`` times each tensor's RMS; its best is the last."""
    given = {"model": str(model), "run": str(run), "scope": scope, "pairs": 4, "seed": 7, "factors": 8, **options}
    settings = config.load(None, given)
    with closing(opening.open_engine(settings)) as engine, RunFolder.create(settings) as folder:
        spec = opening.spec_of(settings, engine)
        header = {
            "base": engine.base_hash, "config": settings.public(free=False), "seed": settings.seed,
            "pairs": settings.pairs, "delta": spec.to_dict(), "data": "",
        }  # fmt: skip
        history = History.create(folder.history_path, header)
        rng = np.random.default_rng(1)
        with Delta.create(folder.delta_path, spec) as delta:
            for g in range(generations):
                coefs = (rng.standard_normal(settings.pairs) * lr / np.sqrt(settings.pairs)).astype(np.float32)
                line = {"generation": g, "coefs": [float(c) for c in coefs], "keep": 1.0}
                history.append({**line, "rewards": {"plus": [], "minus": []}, "excluded": []})
                delta.apply(history.step(g))
            folder.save_best(delta, {"generation": generations, "heldout": 0.5})
    return run
