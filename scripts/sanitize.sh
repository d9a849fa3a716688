#!/bin/bash
# Runs the tests under AddressSanitizer + UndefinedBehaviorSanitizer and under ThreadSanitizer, and the fuzz target for a
# bounded number of runs: sanitize.sh [asan] [tsan] [fuzz]
set -uo pipefail
cd "$(dirname "$0")/.."

presets=("$@")
[[ $# == 0 ]] && presets=(asan tsan fuzz)
scripts/install_packages.sh build test sanitize || exit 1

export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=suppressions=$PWD/scripts/tsan.supp

failed=()
for preset in "${presets[@]}"; do
    echo "Building build-$preset/"
    arguments=()
    # Of the tool only the speed probes start threads; its subcommands run under the other sanitizers.
    [[ $preset == tsan ]] && arguments=(-DSPARSEMLA_TOOLS=OFF)
    [[ $preset == fuzz ]] && arguments=(case_file_fuzz)
    if ! { scripts/build.sh "$preset" "${arguments[@]}" &&
        ctest --test-dir "build-$preset" --output-on-failure --no-tests=error -j "$(nproc)"; }; then
        failed+=("$preset")
    fi
done
if [[ ${#failed[@]} != 0 ]]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
