#!/bin/bash
# Configures a preset and builds targets (default: all); shows progress on a terminal, and else failures only:
# build.sh PRESET [-DOPTION=VALUE...] [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
shift
options=()
targets=()
for argument in "$@"; do
    if [[ $argument == -D* ]]; then options+=("$argument"); else targets+=("$argument"); fi
done

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$preset" "${options[@]}" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
grep -h '^-- sparsemla:' "$log" | sed 's/^-- //' || true

build=(cmake --build --preset "$preset")
[[ ${#targets[@]} == 0 ]] || build+=(--target "${targets[@]}")
if [[ -t 1 ]]; then
    "${build[@]}"
    exit
fi
if ! "${build[@]}" >"$log" 2>&1; then
    # Ninja prints the commands of failed steps and what they said; the finished steps' lines say nothing.
    grep -v '^\[[0-9]*/[0-9]*\] [A-Z]' "$log" >&2
    exit 1
fi
tail -n 1 "$log"
