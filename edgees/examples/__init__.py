"""Examples that ``edgees init`` copies: one folder each, with a config.toml, a README.md and whatever they need."""

from __future__ import annotations

from pathlib import Path

from edgees.errors import RunError, UsageError

FOLDER = Path(__file__).resolve().parent


def names() -> dict[str, str]:
    """Each example's name and its first sentence."""
    return {path.parent.name: _about(path) for path in sorted(FOLDER.glob("*/config.toml"))}


def _about(config: Path) -> str:
    return config.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").strip()


def copy(name: str, target: str | Path) -> list[Path]:
    """Write the example ``name`` into the folder ``target``, made where needed; the files, in order.

    :raises UsageError: no such example. :raises RunError: a file of that name is there already, or none can be written.
    """
    known = names()
    if name not in known:
        raise UsageError(f"there is no example {name!r}", f"there are: {', '.join(known)}")
    folder = Path(target)
    files = sorted(path for path in (FOLDER / name).iterdir() if path.is_file())
    there = [path.name for path in files if (folder / path.name).exists()]
    if there:
        raise RunError(f"{folder} holds {', '.join(there)} already", "choose another folder; nothing was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            (folder / path.name).write_bytes(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot write into {folder}: {error.strerror}", "choose another folder") from error
    return [folder / path.name for path in files]
