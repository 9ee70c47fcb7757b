"""The journal of a run: one JSON object a line, only ever appended to. Base + history gives the learned delta.

The first line is the header (what the run is), then one line per generation (what its rewards were and what step they
made), one per held-out evaluation (``{"eval": n, ...}``, n: updates made before it), and one per proposal of contexts
(``{"proposal": k, "generation": n, ...}``); which context is adopted stands in a generation's ``trial``. A line is on
disk before the step it describes is taken: a kill loses at most the generation in progress, and the delta is brought
up to the journal, never the reverse. Numbers are written so that they read back exactly.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgees.context import Context
from edgees.delta import Delta, DeltaSpec, Step, float32s
from edgees.errors import RunError, WillNotFit
from edgees.population import Population

FORMAT = 1
_HEADER_KEYS = ("history", "noise", "base", "config", "delta", "seed", "pairs")
_LINE_KEYS = ("generation", "coefs", "keep")


class History:
    """An open journal. ``header``: first line; ``lines``: one dict per generation; ``evals``: held-out evaluations;
    ``proposals``: contexts proposed for trial; ``notes``: what was mended on opening."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.header = header
        self.lines: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.proposals: list[dict[str, Any]] = []
        self.contexts: dict[str, Context] = {}
        first = Context.from_dict(header["context"], f"{path}:1") if "context" in header else Context()
        self.contexts[first.digest] = self._first = first
        self.notes: list[str] = []

    @classmethod
    def create(cls, path: str | Path, header: Mapping[str, Any]) -> History:
        """Start a journal; ``header`` needs the keys base, config, delta (a spec's dict), seed, pairs.

        :raises RunError: there is one already, or it cannot be written.
        """
        path = Path(path)
        full = {"history": FORMAT, "noise": header["delta"]["noise"], **header}
        try:
            with open(path, "xb") as file:
                file.write(_encode(full))
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise RunError(f"{path} exists already", "resume that run, or choose another folder with --run") from None
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}") from error
        return cls(path, full)

    @classmethod
    def open(cls, path: str | Path, *, repair: bool = True) -> History:
        """Read a journal. A last line cut short by a kill is dropped (and cut from the file if ``repair``).

        :raises RunError: no such file, no header, or a damaged line anywhere else; file and line are told.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise RunError(f"there is no run in {path.parent}: {path.name} is missing", "give a run folder") from None
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        texts, kept, torn = _split(data)
        if not texts:
            raise RunError(f"{path} is empty: the run was killed before it began", "delete the folder and tune again")
        history = cls(path, _header(path, texts[0]))
        for number, text in enumerate(texts[1:], start=2):
            history._take(_decode(path, number, text), number)
        if torn:
            history.notes.append(
                f"{path.name}: the last line was cut short by a crash ({len(data) - kept} bytes) and is dropped; "
                f"the run goes on from generation {history.generation}"
            )
            if repair:
                try:
                    with open(path, "r+b") as file:
                        file.truncate(kept)
                        os.fsync(file.fileno())
                except OSError as error:
                    raise RunError(f"cannot write {path}: {error.strerror}") from error
        return history

    @property
    def generation(self) -> int:
        """Generations in the journal, which is the number of the next one."""
        return len(self.lines)

    @property
    def spec(self) -> DeltaSpec:
        return DeltaSpec.from_dict(self.header["delta"], str(self.path))

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line to disk before returning.

        :raises WillNotFit: the disk is full (the journal is as before).
        """
        entry = json.loads(_encode(line))
        self._check(entry, len(self.lines) + len(self.evals) + len(self.proposals) + 2)
        before = self.path.stat().st_size
        try:
            with open(self.path, "ab") as file:
                file.write(_encode(line))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # if this fails too, opening it again drops the torn line
                os.truncate(self.path, before)
            raise WillNotFit(f"cannot write {self.path}: {error.strerror}", "free some space") from error
        self._take(entry, 0)

    def step(self, generation: int) -> Step:
        """The update of one generation, as recorded."""
        line = self.lines[generation]
        population = Population(int(self.header["seed"]), int(self.header["pairs"]))
        return Step(
            generation,
            population.keys(generation),
            population.slots(generation),
            float32s(line["coefs"]),
            float32s([line["keep"]])[0],
        )

    def best(self) -> dict[str, Any] | None:
        """The evaluation with the highest held-out mean, the earliest of equals; None before any."""
        scored = [e for e in self.evals if e.get("mean") is not None]
        return max(scored, key=lambda e: (e["mean"], -e["eval"])) if scored else None

    def context(self, generation: int) -> Context:
        """The one in force when a generation began: the last adopted before it, or that of the header."""
        adopted = [line["trial"]["adopted"] for line in self.lines[:generation] if "trial" in line]
        return self.contexts[next((digest for digest in reversed(adopted) if digest), self._first.digest)]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """All lines but the header, by kind."""
        return [*self.lines, *self.evals, *self.proposals]

    def seconds(self) -> float:
        """Wall time of everything so far."""
        return float(sum(entry.get("seconds", 0.0) for entry in self.entries))

    def _check(self, entry: dict[str, Any], number: int) -> None:
        where = f"{self.path}:{number}"
        if "eval" in entry:
            if entry["eval"] != self.generation:
                raise RunError(
                    f"{where}: an evaluation after {entry['eval']} generations where {self.generation} stand"
                )
            return
        if "proposal" in entry:
            if (entry["proposal"], entry.get("generation")) != (len(self.proposals), self.generation):
                raise RunError(f"{where}: proposal {entry['proposal']} out of order: lines are missing")
            return
        missing = [key for key in _LINE_KEYS if key not in entry]
        if missing:
            raise RunError(f"{where}: {', '.join(missing)} missing: damaged, or not of edgees")
        if entry["generation"] != self.generation:
            raise RunError(
                f"{where}: generation {entry['generation']} where {self.generation} is due: lines are missing"
            )
        if len(entry["coefs"]) != self.header["pairs"]:
            raise RunError(f"{where}: {len(entry['coefs'])} coefficients for {self.header['pairs']} pairs")

    def _take(self, entry: dict[str, Any], number: int) -> None:
        if number:
            self._check(entry, number)
        if "proposal" in entry:
            for found in entry["candidates"]:
                context = Context.from_dict(found["context"], f"{self.path}: proposal {entry['proposal']}")
                self.contexts[context.digest] = context
        kinds = {"eval": self.evals, "proposal": self.proposals}
        next((where for kind, where in kinds.items() if kind in entry), self.lines).append(entry)


def short_float32s(values: Iterable[float]) -> list[float]:
    """The shortest decimals that read back as the same float32 numbers."""
    return [float(str(np.float32(v))) for v in values]


def replay(history_path: str | Path, delta_path: str | Path, upto: int | None = None) -> Delta:
    """Base + history -> the delta, bit for bit: zeros, then every recorded step. No engine and no model needed.

    ``upto``: number of generations to apply (default: all). Writes ``delta_path`` (replacing it).
    """
    history = History.open(history_path, repair=False)
    last = history.generation if upto is None else upto
    if not 0 <= last <= history.generation:
        raise RunError(f"{history_path} holds {history.generation} generations; {last} were asked for")
    delta = Delta.create(delta_path, history.spec)
    try:
        for generation in range(last):
            delta.apply(history.step(generation))
    except BaseException:
        delta.close()
        raise
    return delta


def with_header(path: str | Path, header: Mapping[str, Any]) -> bytes:
    """The complete lines of a journal, the first one replaced; the same bytes where ``header`` is that of the file."""
    texts, _, _ = _split(Path(path).read_bytes())
    return _encode(header) + b"".join(text + b"\n" for text in texts[1:])


def _encode(line: Mapping[str, Any]) -> bytes:
    """Python's float repr is the shortest text that reads back exactly; NaN has no place in JSON."""
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _split(data: bytes) -> tuple[list[bytes], int, bool]:
    """(complete lines, bytes they take, whether a torn line follows them).

    A crash of the machine can also leave a tail of NUL bytes where the file had grown but not yet been filled.
    """
    solid = data.rstrip(b"\x00")
    end = solid.rfind(b"\n") + 1
    lines = solid[:end].split(b"\n")[:-1]
    return lines, end, end != len(data)


def _decode(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(text)
        if isinstance(entry, dict):
            return entry
    except ValueError:
        pass
    raise RunError(
        f"{path}:{number}: damaged line",
        "restore the file from a copy, or cut it before that line to lose what follows",
    )


def _header(path: Path, text: bytes) -> dict[str, Any]:
    header = _decode(path, 1, text)
    missing = [key for key in _HEADER_KEYS if key not in header]
    if missing:
        raise RunError(f"{path}:1: no header of an edgees run ({', '.join(missing)} missing)")
    if header["history"] != FORMAT:
        raise RunError(f"{path}: history format {header['history']}, this edgees reads {FORMAT}")
    return header
