#!/usr/bin/env bash
# All checks: linters and layers, the C++ tests under sanitizers, NEON under emulation where the tools exist, pytest.
#
#   bash scripts/test.sh [PYTEST ARGUMENTS]      e.g. bash scripts/test.sh -k noise
#
# Makes .venv in the checkout when there is none. Only an interpreter, its venv module and a C++ compiler are assumed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env agents,games,llama,plot,reasoning,test,torch model
cd "$ROOT"

# On a CI machine that is ours to change: the cross compiler and emulator for the NEON arm. Never a reason to fail.
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
  ! { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static; } >/dev/null; then
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    g++-aarch64-linux-gnu qemu-user-static; } >/dev/null 2>&1 ||
    say "note: no aarch64 cross compiler to be had: the NEON arm is not tested in this run"
fi

# Everything runs, so that one report names all that is wrong; pytest comes last, its closing line is the verdict's.
failed=()
bash scripts/check.sh || failed+=("scripts/check.sh")
if [ -f scripts/native_tests.sh ]; then
  bash scripts/native_tests.sh || failed+=("scripts/native_tests.sh")
fi
bash scripts/gpu_check.sh --compile-only || failed+=("scripts/gpu_check.sh --compile-only")
if [ "${#failed[@]}" -gt 0 ]; then
  say "FAILED before pytest: ${failed[*]}"
fi
"$PY" -m pytest "$@" || failed+=("pytest")
[ "${#failed[@]}" -eq 0 ] || exit 1
