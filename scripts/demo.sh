#!/bin/bash
# Builds the tool and shows what it does on one real decode step: its content, the result, the check, the plan.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install_packages.sh build
echo "Building the tool in build/"
# A tree that test.sh configured keeps its tests.
options=()
[[ -f build/CMakeCache.txt ]] || options=(-DSPARSEMLA_TESTS=OFF)
scripts/build.sh release "${options[@]}" sparsemla_tool

tool=build/bin/sparsemla
example=examples/decode_step.safetensors
result=build/decode_step_result.safetensors

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}
show $tool info $example
show $tool decode $example -o $result
show $tool check $example --kernel all
show $tool plan $example

cat <<TEXT

That was one decode step: every query row attended to its own list of cache records, on this machine's CPU.
  $result  the output and the LSE
  $tool gen --help      makes steps of any record, shape and seed
  $tool check CASE...   compares every kernel with the float64 oracle
  scripts/test.sh                 runs all tests
TEXT
