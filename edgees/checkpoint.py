"""A run on disk: its folder, its lock, atomic files, and putting things right after a kill.

history.jsonl          the run itself; everything else can be rebuilt from it and the base
delta.safetensors      what has been learned so far (with a sidecar: updates in it, written to the end or not)
best/                  the same at the best held-out score, and best.json
config.resolved.toml   all settings
metrics.jsonl, .csv    figures per generation
context.json, SKILL.md the context in force, where there is one
traces/, plots/, README.md
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgees.config import Config, differences, load, to_toml
from edgees.context import Context
from edgees.delta import Delta, require_space
from edgees.errors import RunError, UsageError, WillNotFit
from edgees.history import History, replay

LOCK = ".lock"


def write_atomic(path: str | Path, data: bytes) -> None:
    """Whole or not at all, and on disk when this returns; the previous file survives a failure.

    :raises WillNotFit: no space. :raises RunError: not writable.
    """
    path = Path(path)
    require_space(path.parent, len(data), str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WillNotFit(f"{path}: no space left on the disk", "free some space") from error
        raise RunError(f"cannot write {path}: {error.strerror}", "is the folder read-only?") from error


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """One JSON line more; lost at worst with the machine, so not synced. NaN becomes null."""
    text = json.dumps({k: _plain(v) for k, v in record.items()}, ensure_ascii=False, allow_nan=False)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WillNotFit(f"{path}: no space left on the disk", "free some space") from error
        raise RunError(f"cannot write {path}: {error.strerror}") from error


class RunFolder:
    """An open, locked run folder. ``notes``: what was mended on opening."""

    def __init__(self, path: Path, config: Config, lock: int) -> None:
        self.path = path
        self.config = config
        self.notes: list[str] = []
        self._lock = lock
        self._new = False

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new folder: ``config.run``, or the next free ``runs/<task>-<number>``.

        :raises RunError: it holds a run already, is in use, or cannot be written.
        """
        path = Path(config.run) if config.run else _new_folder(config.task)
        new = not config.run or not path.exists()
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file, not a folder", "choose another with --run")
        if (path / "history.jsonl").exists():
            raise RunError(
                f"{path} holds a run already", f"go on with it: edgees resume {path}; or choose another --run"
            )
        try:
            for part in (path, path / "best", path / "traces", path / "plots"):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {path}: {error.strerror}", "choose another folder with --run") from error
        folder = cls(path, config, _take_lock(path))
        folder._new = new
        with folder.made_or_removed():
            write_atomic(path / "config.resolved.toml", to_toml(config).encode())
        return folder

    @contextlib.contextmanager
    def made_or_removed(self) -> Iterator[None]:
        """What fails in here leaves no folder behind that was not there before :meth:`create`."""
        try:
            yield
        except BaseException:
            self.close()
            if self._new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run. :raises RunError: none there, in use, read-only, or its settings were changed."""
        path = Path(path)
        if not path.is_dir():
            raise RunError(f"there is no run folder {path}", "give the folder that tune named")
        history = path / "history.jsonl"
        if not history.exists():
            raise RunError(f"{path} holds no run: history.jsonl is missing", "give the folder that tune named")
        resolved = path / "config.resolved.toml"
        try:
            config = load(resolved)
        except UsageError as error:
            raise RunError(error.message, error.hint) from error
        return cls(path, config, _take_lock(path))

    def check_config(self, history: History) -> None:
        """:raises RunError: config.resolved.toml says other than the history's header; the differences are told."""
        changed = differences(history.header["config"], self.config, free=False)
        if changed:
            raise RunError(
                f"the settings of {self.path} were changed since it began ({'; '.join(changed)}), "
                "and a run keeps its settings",
                "undo that in config.resolved.toml, or start a new run with them",
            )

    @property
    def delta_path(self) -> Path:
        return self.path / "delta.safetensors"

    @property
    def history_path(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def best_path(self) -> Path:
        return self.path / "best" / "delta.safetensors"

    def save_best(self, delta: Delta, record: Mapping[str, Any]) -> None:
        """Snapshot of ``delta`` and why it is the best: best.json is written last and names what lies beside it."""
        (self.path / "best").mkdir(exist_ok=True)
        delta.copy_to(self.best_path)
        write_atomic(self.path / "best" / "best.json", json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def best_record(run: str | Path) -> dict[str, Any] | None:
    """{"generation", "heldout"} of best/, or None where nothing was saved as best yet."""
    try:
        data = json.loads((Path(run) / "best" / "best.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_context(run: Path, context: Context) -> None:
    """The context in force, for people: context.json, and its notes as SKILL.md. None is written for an empty one."""
    path = run / "context.json"
    if context.empty and not path.exists():
        return
    write_atomic(path, json.dumps(context.to_dict(), ensure_ascii=False, indent=1).encode() + b"\n")
    write_atomic(run / "SKILL.md", context.skills.encode() + b"\n")


def recover(folder: RunFolder) -> tuple[History, Delta]:
    """Journal and delta of a run, in agreement with each other however the last process ended.

    The journal leads. A clean delta that lacks its last steps gets them; one that is half-written, damaged, missing,
    or ahead is made anew from the start. best/ is made anew if the journal's best is another than what lies there.
    """
    history = History.open(folder.history_path)
    folder.notes += history.notes
    for stray in (*folder.path.glob("*.tmp"), *folder.path.glob(".*.tmp"), *folder.path.glob("best/*.tmp")):
        stray.unlink(missing_ok=True)
    delta = _agreeing(folder, history)
    try:
        write_context(folder.path, history.context(history.generation))
        while delta.generation < history.generation:
            delta.apply(history.step(delta.generation))
        _mend_best(folder, history, delta)
        _mend_metrics(folder.path / "metrics.jsonl", history)
    except BaseException:
        delta.close()
        raise
    return history, delta


def _agreeing(folder: RunFolder, history: History) -> Delta:
    try:
        delta = Delta.open(folder.delta_path, dirty_ok=True)
    except RunError as error:
        folder.notes.append(f"{error.message}: made anew from the history")
        return replay(folder.history_path, folder.delta_path)
    reason = ""
    if not delta.clean:
        reason = "was left half-written"
    elif delta.generation > history.generation:
        reason = f"holds {delta.generation} updates where the history has {history.generation}"
    elif delta.spec != history.spec:
        reason = "is of another run"
    if not reason:
        if delta.generation < history.generation:
            missing = history.generation - delta.generation
            folder.notes.append(f"{folder.delta_path.name}: {missing} update(s) of the history were missing: added")
        return delta
    delta.close()
    folder.notes.append(f"{folder.delta_path.name} {reason}: made anew from the history")
    return replay(folder.history_path, folder.delta_path)


def _mend_best(folder: RunFolder, history: History, delta: Delta) -> None:
    best = history.best()
    if best is None:
        return
    wanted = {"generation": best["eval"], "heldout": best["mean"]}
    if best_record(folder.path) == wanted:
        with contextlib.suppress(RunError), Delta.open(folder.best_path, write=False) as there:
            if there.generation == best["eval"] and there.spec == delta.spec:
                return
    if best["eval"] == delta.generation:
        folder.save_best(delta, wanted)
        return
    scratch = folder.path / "best" / "replay.safetensors"
    with replay(folder.history_path, scratch, best["eval"]) as other:
        folder.save_best(other, wanted)
    for path in (scratch, Path(f"{scratch}.state.json")):
        path.unlink(missing_ok=True)
    folder.notes.append("best/ was made anew from the history")


def _mend_metrics(path: Path, history: History) -> None:
    """metrics.jsonl tells nothing that the journal does not know, and lacks nothing but times of what was lost."""
    records: list[dict[str, Any]] = []
    try:
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                record = json.loads(text)
                if isinstance(record, dict) and "generation" in record:
                    records.append(record)
    except OSError:
        pass
    evaluated = {e["eval"] for e in history.evals}
    kept = [
        r
        for r in records
        if (r["generation"] in evaluated if "heldout" in r else 1 <= r["generation"] <= history.generation)
    ]
    there = {(r["generation"], "heldout" in r) for r in kept}
    best = float("-inf")
    for e in history.evals:
        better, best = (
            e["mean"] is not None and e["mean"] > best,
            max(best, e["mean"] if e["mean"] is not None else best),
        )
        if (e["eval"], True) not in there:
            kept.append(evaluation_record(e, better))
    for line in history.lines:
        if (line["generation"] + 1, False) not in there:
            kept.append(generation_record(line))
    kept.sort(key=lambda r: (r["generation"], "heldout" in r))
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
    if text or path.exists():
        write_atomic(path, text.encode())


def generation_record(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a journal line says about its generation, under the names of metrics.jsonl (there counted from 1)."""
    means = [m for sign in ("plus", "minus") for m in line["rewards"][sign] if m is not None]
    centre = sum(means) / len(means) if means else None
    spread = (sum((m - centre) ** 2 for m in means) / len(means)) ** 0.5 if means and centre is not None else None
    keys = (
        "sigma", "lr", "keep", "shrink", "loglik", "distinct", "majority", "length", "truncated", "overflow", "tokens",
        "reason",
    )  # fmt: skip
    members = sum(len(line["rewards"].get(sign, ())) for sign in ("plus", "minus"))
    asked = line.get("answers") or members * len(line.get("rows", ()))
    return {
        "generation": line["generation"] + 1,
        "reward": centre,
        "reward_std": spread,
        "reward_max": max(means, default=None),
        **{key: line[key] for key in keys if key in line},
        "excluded": len(line["excluded"]),
        "invalid": len(line["excluded"]) / asked if asked else None,
        "seconds": line.get("seconds"),
    }


def evaluation_record(entry: Mapping[str, Any], best: bool) -> dict[str, Any]:
    """The same for a held-out evaluation: ``generation`` counts the updates made before it, 0 is the base."""
    keys = ("rows", "distinct", "majority", "length", "truncated", "overflow")
    return {
        "generation": entry["eval"],
        "heldout": entry["mean"],
        "heldout_se": entry["se"],
        "best": best,
        **{f"heldout_{key}": entry[key] for key in keys if key in entry},
        **{f"heldout_{name}": value for name, value in entry.get("metrics", {}).items()},
        **{key: entry[key] for key in ("kl", "perplexity") if key in entry},
        "heldout_excluded": len(entry.get("excluded", [])),
        "heldout_seconds": entry.get("seconds"),
    }


def _new_folder(task: str) -> Path:
    """The next free ``runs/<task>-<number>``, made: two runs that start at once get two."""
    name = task.partition("?")[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).stem if name.startswith("jsonl:") else name).strip("-")
    for number in itertools.count(1):
        path = Path("runs") / f"{name or 'run'}-{number}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"cannot make {path}: {error.strerror}", "choose another folder with --run") from error
    raise AssertionError("unreachable")


def _take_lock(path: Path) -> int:
    """File descriptor that holds the folder; the system lets go of it however the process ends."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"cannot write into {path}: {error.strerror}", "is the folder read-only?") from error
    try:
        _lock(fd)
    except OSError:
        os.close(fd)
        raise RunError(f"{path} is in use by another edgees process", "wait for it, or stop it") from None
    return fd


def _lock(fd: int) -> None:
    if os.name == "nt":  # pragma: no cover
        import msvcrt

        getattr(msvcrt, "locking")(fd, getattr(msvcrt, "LK_NBLCK"), 1)  # noqa: B009
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
