#!/usr/bin/env bash
# From nothing to a tuned, evaluated and exported model: tunes the embedded SmolLM2-135M on the `home` task.
#
#   bash scripts/demo.sh [OPTIONS OF edgees tune]     e.g. bash scripts/demo.sh --generations 2    (a quick look)
#
# Writes into runs/demo-<time> of the checkout. PYTHON=... chooses the interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

say "edgees demo: install (the first time 3 to 15 minutes, then seconds), tune (about 8 minutes on two cores),"
say "             compare on held-out rows, export. Ctrl-C saves; 'edgees resume' goes on."
ensure_env llama,plot model

RUN="$ROOT/runs/demo-$(date +%Y%m%d-%H%M%S)"
previous=""
for argument in "$@"; do # a run folder given by the user is the one to evaluate
  [ "$previous" != --run ] || RUN="$argument"
  case "$argument" in --run=*) RUN="${argument#--run=}" ;; esac
  previous="$argument"
done

edgees() { "$PY" -m edgees "$@"; }
step() { printf '\n$ edgees %s\n' "$*" && edgees "$@"; }

step tune --model smollm2-135m --task home --run "$RUN" "$@"
step eval "$RUN"
step export "$RUN" --to gguf --out "$RUN/export/gguf" --verify
step export "$RUN" --to safetensors --out "$RUN/export/safetensors" --verify
printf '\nThe tuned model is in %s\n' "$RUN/export"
