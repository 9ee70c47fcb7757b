#!/usr/bin/env bash
# The CUDA kernels: compiled for every architecture, or, on a machine with a card, built, tested, measured and tuned
# with, in under ten minutes and one JSON file. Neither building edgees nor its tests need this.
#
#   bash scripts/gpu_check.sh --compile-only [--write]     registers, shared memory, spills; --write: into docs/gpu.md
#   bash scripts/gpu_check.sh [--model HF_FOLDER] [--out gpu_check.json]     needs a card, CUDA torch and bitsandbytes
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
PY="${PYTHON:-}"
for candidate in "$ROOT/.venv/bin/python" python3 python; do
  [ -n "$PY" ] || PY="$(command -v "$candidate" || true)"
done
[ -n "$PY" ] || { printf 'error: no Python\nhint: name one: PYTHON=...\n' >&2; exit 1; }
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$PY" scripts/gpu_check.py "$@"
