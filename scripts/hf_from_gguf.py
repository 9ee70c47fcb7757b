"""A GGUF model as a plain Hugging Face folder: python scripts/hf_from_gguf.py MODEL OUT [--dtype BF16|F16|F32]

MODEL is what ``edgees tune --model`` takes: a GGUF file, or smollm2-135m. The weights are the decoded ones, so a
quantised file loses nothing more in F32, and in BF16 each weight is rounded once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from edgees import model_path
from edgees.delta import Delta, DeltaSpec
from edgees.errors import EdgeesError, UsageError
from edgees.export import DTYPES, write_safetensors
from edgees.gguf_file import GgufFile
from edgees.merge import Effective

NOTHING = DeltaSpec(tensors=(), view="adapter", bits=0, factors=1, kind="lowrank", rank=1, seed=0)
"""A run that tuned no tensor: what is written is the base."""


def convert(model: str, out: Path, dtype: str = "BF16") -> list[str]:
    """Write ``model`` into folder ``out``, which must be new or empty; returns the names of the files."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already", "choose another folder")
    with GgufFile(model_path.resolve(model)) as base, tempfile.TemporaryDirectory() as scratch:
        out.mkdir(parents=True, exist_ok=True)
        with Delta.create(Path(scratch) / "delta.safetensors", NOTHING) as delta:
            return write_safetensors(Effective(base, delta), out, dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="BF16")
    arguments = parser.parse_args()
    try:
        for name in convert(arguments.model, arguments.out, arguments.dtype):
            print(arguments.out / name)
    except EdgeesError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
