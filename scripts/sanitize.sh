#!/bin/bash
# Runs the tests under AddressSanitizer + UndefinedBehaviorSanitizer and under ThreadSanitizer, and the fuzz target for a
# bounded number of runs: sanitize.sh [--quick] [asan] [tsan] [fuzz]
#   --quick   only the tests that reach the most memory (asan) and the threads (tsan): minutes instead of half an hour
set -uo pipefail
cd "$(dirname "$0")/.."

declare -A quick_tests=(
    [asan]="c_api_arguments_test c_api_dcp_arguments_test c_api_dcp_test cache_view_test case_file_test case_sources_test
            dcp_arguments_test dcp_decode_test dcp_merge_test dcp_payload_test decode_test engine_test from_ids_test
            indices_test kinds_arguments_test kinds_lists_test mailbox_layout_test merge_math_test merge_test quantise_test
            records_test reference_test safetensors_test topk_arguments_test topk_test"
    [tsan]="dcp_liveness_test dcp_protocol_test dcp_test decode_schedule_test decode_test determinism_test engine_test
            oracle_test"
)
quick=0
if [[ ${1:-} == --quick ]]; then
    quick=1
    export SPARSEMLA_DCP_STEPS=${SPARSEMLA_DCP_STEPS:-100}
    shift
fi
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
    selection=()
    # Of the tool only the speed probes and dcp start threads, whose exchanges dcp_test runs; its subcommands run under
    # the other sanitizers.
    tools=ON
    [[ $preset == tsan || $quick == 1 ]] && tools=OFF
    [[ $preset == fuzz ]] && arguments=(case_file_fuzz) || arguments=(-DSPARSEMLA_TOOLS=$tools)
    if [[ $quick == 1 && -n ${quick_tests[$preset]:-} ]]; then
        read -ra tests -d '' <<<"${quick_tests[$preset]}" || true
        arguments+=("${tests[@]}")
        selection=(-R "^($(IFS='|' && echo "${tests[*]}"))$")
    fi
    if ! { scripts/build.sh "$preset" "${arguments[@]}" &&
        ctest --test-dir "build-$preset" "${selection[@]}" --output-on-failure --no-tests=error -j "$(nproc)"; }; then
        failed+=("$preset")
    fi
done
if [[ ${#failed[@]} != 0 ]]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
