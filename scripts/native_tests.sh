#!/usr/bin/env bash
# The compiled core under sanitizers, with csrc/tests: address and undefined behaviour on every usable arm, threads,
# and AArch64 under qemu where the cross compiler and the emulator are installed. About a minute on two cores.
#
#   bash scripts/native_tests.sh       CXX=... chooses the compiler (default g++, else clang++), JOBS=... how many at once
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
CXX="${CXX:-$(command -v g++ || command -v clang++ || true)}"
[ -n "$CXX" ] || { printf 'error: no C++ compiler\nhint: apt-get install g++, or name one: CXX=...\n' >&2; exit 1; }
JOBS="${JOBS:-$(nproc)}"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
# GCC's AVX-512 headers leave registers undefined on purpose and then warn of it.
FLAGS=(-std=c++17 -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-uninitialized -Wno-maybe-uninitialized -pthread)

# build NAME COMPILER FLAGS...: csrc without csrc/llama, and one program per file of csrc/tests, in $WORK/NAME
build() {
  local out="$WORK/$1" compiler="$2" test name
  shift 2
  mkdir -p "$out"
  printf '%s\0' csrc/*.cpp csrc/cpu/*.cpp |
    xargs -0 -P "$JOBS" -I{} sh -c 'out=$1 file=$2; shift 2; exec "$@" -c "$file" -o "$out/$(basename "$file" .cpp).o"' \
      sh "$out" {} "$compiler" "${FLAGS[@]}" "$@"
  for test in csrc/tests/*.cpp; do
    name="$(basename "$test" .cpp)"
    "$compiler" "${FLAGS[@]}" "$@" "$test" "$out"/*.o -o "$out/$name"
  done
}

# run_tests NAME ISA LAUNCHER...: "" as ISA is the best arm
run_tests() {
  local out="$WORK/$1" isa="$2" program
  shift 2
  for program in "$out"/*_test; do EDGEES_ISA="$isa" "$@" "$program"; done
}

arms() { # usable here, by the library's own probe
  printf '#include "%s/csrc/api.h"\n#include <cstdio>\nint main() { puts(edgees_isas()); }\n' "$ROOT" >"$WORK/arms.cpp"
  "$CXX" "${FLAGS[@]}" -fsanitize=address,undefined "$WORK/arms.cpp" "$WORK"/address/*.o -o "$WORK/arms"
  "$WORK/arms"
}

printf '== address and undefined behaviour (%s)\n' "$CXX"
build address "$CXX" -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
for isa in $(arms); do run_tests address "$isa" env; done

printf '== threads\n'
build threads "$CXX" -O1 -g1 -fsanitize=thread
run_tests threads "" env

printf '== AArch64\n'
CROSS="$(command -v aarch64-linux-gnu-g++ || true)" QEMU="$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)"
if [ -n "$CROSS" ] && [ -n "$QEMU" ]; then
  build aarch64 "$CROSS" -O2 -static
  for isa in neon scalar; do run_tests aarch64 "$isa" "$QEMU"; done
else
  printf 'skipped: needs aarch64-linux-gnu-g++ and qemu-aarch64-static (Debian: g++-aarch64-linux-gnu qemu-user-static)\n'
fi
printf 'native tests: ok\n'
