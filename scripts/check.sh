#!/usr/bin/env bash
# Style and types: ruff (lint and format), mypy, clang-format, and the import layers. Changes nothing.
# To mend the formatting: .venv/bin/ruff format . && .venv/bin/clang-format -i <files>
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
BIN="$ROOT/.venv/bin"
cd "$ROOT" || exit 1
if [ ! -x "$BIN/ruff" ]; then
  printf 'error: no linters in .venv\nhint: bash scripts/test.sh makes it and runs this script too\n' >&2
  exit 1
fi

status=0
check() {
  local name="$1"
  shift
  if "$@"; then
    printf 'ok    %s\n' "$name"
  else
    printf 'FAIL  %s\n' "$name"
    status=1
  fi
}

check "ruff lint" "$BIN/ruff" check --quiet .
check "ruff format" "$BIN/ruff" format --quiet --check .
check "mypy" "$BIN/mypy" --no-error-summary
sources=()
while IFS= read -r -d '' file; do sources+=("$file"); done \
  < <(find csrc \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0)
if [ "${#sources[@]}" -gt 0 ]; then
  check "clang-format" "$BIN/clang-format" --dry-run --Werror "${sources[@]}"
fi
check "layers" "$BIN/python" -m pytest --quiet --no-header -p no:cacheprovider tests/test_layers.py
exit "$status"
