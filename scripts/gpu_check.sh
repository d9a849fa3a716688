#!/bin/bash
# Everything that needs a GPU, in one command, with one report: gpu_check.sh [--prebuilt DIR] [--out DIR] [--quick]
#   --prebuilt DIR   the bin/ of a portable build (docs: CONTRIBUTING.md); a copy of this script in there takes its own
#                    folder. Without it, the portable preset is built here.
#   --out DIR        where report.txt, logs.tar.gz, golden.tar and the figures go (default: gpu_check)
#   --quick          fewer tests, shorter soak and timings: minutes instead of a quarter of an hour
#   --cases DIR      also `check` these case files            --device cuda:N   another GPU than cuda:0
#   --soak N         launches of the soak (default 100000, quick 2000)
#   --only STAGES    of environment,tests,golden,check,sanitizers,latency, with commas between
# Needs bash, coreutils and a driver; compute-sanitizer where the machine has it. Every line of the report begins with
# PASS, FAIL or SKIP; the exit status is 1 if one failed.
set -uo pipefail

prebuilt='' out=gpu_check quick=0 cases='' device=cuda:0 soak='' only=''
while (($#)); do
    case $1 in
        --quick) quick=1 ;;
        --prebuilt | --out | --cases | --device | --soak | --only)
            [[ $# -ge 2 ]] || { echo "gpu_check.sh: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        *) echo "gpu_check.sh: unknown option $1; the first lines of this file say what there is" >&2; exit 2 ;;
    esac
    shift
done
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -n $prebuilt || ! -x $here/sparsemla ]] || prebuilt=$here
[[ -z $cases ]] || cases=$(cd "$cases" && pwd) || exit 2
[[ -n $soak ]] || soak=$((quick ? 2000 : 100000))
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
report=$out/report.txt
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
: >"$report"

say() { echo "$*" | tee -a "$report"; }
wanted() { [[ -z $only || ,$only, == *,$1,* ]]; }
# say_failed LINE LOG: with the lines that tell why, in one piece, as programs run beside each other.
say_failed() {
    local pattern='Failure|error|Error|FAILED|FAIL|differ|Invalid|hazard|Uninit'
    say "$1"$'\n'"$({ grep -aE "$pattern" "$2" || tail -n 3 "$2"; } | head -n 8 | cut -c1-300 | sed 's/^/     | /')"
}

build() {
    if [[ -n $prebuilt ]]; then
        bin=$(cd "$prebuilt" && pwd) || exit 2
        [[ -x $bin/sparsemla ]] || { echo "gpu_check.sh: $bin holds no sparsemla" >&2; exit 2; }
        return
    fi
    cd "$here/.." && scripts/install_packages.sh build test && scripts/build.sh portable || exit 2
    bin=$PWD/build-portable/bin
}

# Of the repository, or what portable_archive left beside the programs.
commit() {
    if [[ -f $bin/COMMIT ]]; then cat "$bin/COMMIT"; else git -C "$here" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown; fi
}

environment() {
    say "sparsemla GPU check, $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    say "commit: $(commit)"
    say "programs: $bin"
    if command -v nvidia-smi >/dev/null; then
        local fields=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,memory.total,temperature.gpu,power.draw
        say "GPU ($fields):"
        nvidia-smi --query-gpu=$fields --format=csv,noheader 2>&1 | sed 's/^/  /' | tee -a "$report"
    fi
    "$bin/sparsemla" env >"$logs/env.log" 2>&1
    sed 's/^/  /' "$logs/env.log" | tee -a "$report"
    if grep -q "$device" "$logs/env.log"; then say "PASS environment: $device is there"; else say "FAIL environment: no $device"; fi
}

# run_gtest NAME FILTER LOG MUST_RUN [WORDS]: one test program, and its line in the report. Where nothing of what must run
# did, that is a failure too.
run_gtest() {
    local name=$1 filter=$2 log=$3 must_run=$4 words=${5:+ ($5)}
    local start=$SECONDS
    (cd "$bin" && timeout 900 "./$name" --gtest_filter="$filter") >"$log" 2>&1
    local status=$?
    local ok skipped failed
    ok=$(grep -c '^\[       OK' "$log")
    skipped=$(grep -cE '^\[  SKIPPED \] .* \([0-9]+ ms\)' "$log")
    failed=$(grep -cE '^\[  FAILED  \] .* \([0-9]+ ms\)' "$log")
    local line="test $name$words: $ok ok, $skipped skipped, $failed failed, $((SECONDS - start)) s"
    if [[ $status == 124 ]]; then
        line="FAIL $line, ended after 900 s"
    elif [[ $status != 0 ]]; then
        line="FAIL $line, exit status $status"
    elif [[ $must_run == 1 && $ok == 0 ]]; then
        line="FAIL $line: nothing ran"
    elif [[ $ok == 0 ]]; then
        line="SKIP $line"
    else
        line="PASS $line"
    fi
    if [[ $line == FAIL* ]]; then say_failed "$line" "$log"; else say "$line"; fi
}

# Programs of bin/ that exist among these names.
existing() {
    local name
    for name in "$@"; do
        [[ -x $bin/$name ]] && echo "$name"
    done
}

tests() {
    local name filter
    export SPARSEMLA_TEST_DEVICE=$device SPARSEMLA_SOAK=$soak
    # Alone, one after the other: they look at what runs beside what.
    for name in $(cd "$bin" && existing *_device_test gpu_test gpu_graph_test gpu_order_test gpu_errors_test \
        gpu_tilings_test gpu_balanced_test gpu_wide_test gpu_verbs_test gpu_topk_test gpu_merge_test \
        gpu_dcp*_test dcp_liveness_test gpu_soak_test); do
        run_gtest "$name" '*' "$logs/$name.log" 1
    done
    # Skipped where there is no NCCL. That of python3's packages rather than the system's, which may be older.
    local nccl
    nccl=$(python3 -c 'import importlib.util, os
spec = importlib.util.find_spec("nvidia.nccl")
print(os.path.join(list(spec.submodule_search_locations)[0], "lib", "libnccl.so.2"))' 2>/dev/null)
    [[ -z ${SPARSEMLA_NCCL:-} && -e $nccl ]] && export SPARSEMLA_NCCL=$nccl
    export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # where NVLink multicast is off it must stay off
    [[ -x $bin/nccl_test ]] && run_gtest nccl_test '*' "$logs/nccl_test.log" 0
    local contract=(decode_test determinism_test from_ids_test topk_test problems_test kinds_softmax_test kinds_lists_test
        dcp_test dcp_decode_test dcp_merge_test dcp_payload_test dcp_protocol_test)
    if ((!quick)); then
        contract+=($(cd "$bin" && ls -d kinds_*_test decode_*_test engine_test allocation_test reference_test 2>/dev/null))
    fi
    export -f run_gtest say say_failed
    export bin logs report
    for name in $(existing "${contract[@]}" | grep -v mirrored | grep -v decode_timer_test | sort -u); do
        filter='*'
        [[ $quick == 1 && $name == problems_test ]] && filter='*/1*'
        printf '%s\0%s\0%s\0' "$name" "$filter" "$logs/$name.log"
    done | xargs -0 -r -n 3 -P 4 bash -c 'run_gtest "$1" "$2" "$3" 0' _
}

# The outputs to commit, and whether the CPU reproduces them.
golden() {
    [[ -x $bin/golden_test ]] || { say "SKIP golden: no golden_test"; return; }
    local folder=$logs/golden
    SPARSEMLA_TEST_DEVICE=$device SPARSEMLA_GOLDEN_WRITE=$folder run_gtest golden_test '*WriteWhereAsked*' "$logs/golden_write.log" 1 written
    export SPARSEMLA_GOLDEN=$folder
    SPARSEMLA_TEST_DEVICE=$device run_gtest golden_test '*TheSchedule*' "$logs/golden_gpu.log" 1 "these on the GPU"
    SPARSEMLA_TEST_DEVICE=cpu run_gtest golden_test '*TheSchedule*' "$logs/golden_cpu.log" 1 "these on the CPU"
    unset SPARSEMLA_GOLDEN
    [[ -d $folder ]] && tar cf "$out/golden.tar" -C "$logs" golden
    local committed
    for committed in "$here/../tests/data/golden" "$bin/golden"; do
        [[ -d $committed ]] || continue
        SPARSEMLA_GOLDEN=$committed SPARSEMLA_TEST_DEVICE=$device run_gtest golden_test '*TheSchedule*' "$logs/golden_committed.log" 1 "committed ones"
    done
}

# check_case FILE OPTION...: one case file on the GPU; skipped where no kernel of it takes the case.
check_case() {
    local file=$1 name log status
    name=$(basename "$file" .safetensors)
    name+=${2:+ ${*:2}}
    log=$logs/check_${name// /}.log
    timeout 600 "$bin/sparsemla" check "$file" --device "$device" --kernel all "${@:2}" >"$log" 2>&1
    status=$?
    if [[ $status == 0 ]]; then
        say "PASS check $name"
    elif [[ $status == 2 ]] && grep -q 'a case that a kernel takes' "$log"; then
        say "SKIP check $name: $(sed -n 's/.*a case that a kernel takes, got //p' "$log" | head -n 1 | cut -c1-200)"
    else
        say_failed "FAIL check $name, exit status $status" "$log"
    fi
}

check() {
    local generated=$logs/cases options i=0
    mkdir -p "$generated"
    local recipes=(
        "--record fp8 --record-bytes 576 --rows 5 --heads 96 --width 2048 --counts ragged"
        "--record fp8 --record-bytes 512 --rows 6 --heads 16 --width 128 --extra-record fp8 --extra-record-bytes 512 --extra-width 512 --sinks"
        "--record fp8 --record-bytes 576 --rows 2 --heads 128 --width 640 --query bf16"
    )
    for options in "${recipes[@]}"; do
        i=$((i + 1))
        # shellcheck disable=SC2086
        if "$bin/sparsemla" gen "$generated/generated_$i.safetensors" $options --seed $i >"$logs/gen_$i.log" 2>&1; then
            check_case "$generated/generated_$i.safetensors" --rms
        else
            say_failed "FAIL gen generated_$i" "$logs/gen_$i.log"
        fi
    done
    # Token ids: slots converted before, and within decode.
    local ids=$generated/token_ids.safetensors
    if "$bin/sparsemla" gen "$ids" --record fp8 --rows 5 --heads 96 --width 2048 --token-ids --world 8 --rank 3 --seed 9 >"$logs/gen_ids.log" 2>&1; then
        check_case "$ids"
        check_case "$ids" --from-ids
    else
        say_failed "FAIL gen token_ids" "$logs/gen_ids.log"
    fi
    rm -rf "$generated"
    [[ -n $cases ]] || return
    local file
    for file in "$cases"/*.safetensors; do
        [[ -f $file ]] && check_case "$file"
    done
}

# sanitize TOOL PROGRAM FILTER: a few tests under one tool of compute-sanitizer.
sanitize() {
    local tool=$1 name=$2 filter=$3 log start=$SECONDS status
    [[ -x $bin/$name ]] || return
    log=$logs/${tool}_$name.log
    (cd "$bin" && timeout 600 compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 "./$name" \
        --gtest_filter="$filter") >"$log" 2>&1
    status=$?
    if [[ $status == 0 && $(grep -c '^\[       OK' "$log") -gt 0 ]]; then
        say "PASS $tool $name ($filter), $((SECONDS - start)) s"
    else
        say_failed "FAIL $tool $name ($filter), exit status $status, $((SECONDS - start)) s" "$log"
    fi
}

sanitizers() {
    local tool problems='*/4_*:*/12_*:*/16_*:*/51_*:*/69_*:*/81_*:*/105_*:*/123_*'
    if ! command -v compute-sanitizer >/dev/null; then
        say "SKIP sanitizers: this machine has no compute-sanitizer"
        return
    fi
    (cd "$bin" && timeout 120 compute-sanitizer --tool memcheck --error-exitcode 99 ./gpu_test \
        --gtest_filter='Gpu.BuffersMove') >"$logs/sanitizer_probe.log" 2>&1
    if [[ $? != 0 ]] && grep -qiE 'not supported|failed to initialize|unable to|error 999' "$logs/sanitizer_probe.log"; then
        say "SKIP sanitizers: compute-sanitizer does not work here: $(grep -aiE 'not supported|initialize|unable|999' "$logs/sanitizer_probe.log" | head -n 1)"
        return
    fi
    # Plain allocations: that is what the tools watch.
    export SPARSEMLA_TEST_DEVICE=$device SPARSEMLA_TEST_PLACEMENT=plain SPARSEMLA_SOAK=20
    for tool in memcheck racecheck synccheck initcheck; do
        if [[ $tool == racecheck && ! -f $bin/RACECHECK ]]; then
            say "SKIP racecheck of decodes: these programs were built without SPARSEMLA_RACECHECK, which it needs to follow barriers"
            sanitize racecheck exchange_device_test '*/Of2:*/Of8'
            sanitize racecheck copies_device_test '*'
            sanitize racecheck gpu_verbs_test '-*Decode*'
            sanitize racecheck topk_test '*Duplicates*:*AsMany*:*TakeTheirPlace*'
            sanitize racecheck gpu_merge_test '*ManyRows*'
            continue
        fi
        sanitize "$tool" problems_test "$problems"
        sanitize "$tool" determinism_test '*PositionAndBatchmates*'
        sanitize "$tool" gpu_balanced_test '*OneLongRow*:*FewerRows*'
        sanitize "$tool" gpu_wide_test '*OneRow*:*FewerRows*:*TwoSources*'
        sanitize "$tool" from_ids_test '*'
        sanitize "$tool" gpu_graph_test '*AFirstCall*:*ManyCalls*'
        sanitize "$tool" gpu_verbs_test '*'
        sanitize "$tool" topk_test '*Duplicates*:*AsMany*:*TakeTheirPlace*'
        sanitize "$tool" gpu_merge_test '*ManyRows*'
        sanitize "$tool" gpu_dcp_test '*AnExchangeIs*'
        sanitize "$tool" gpu_dcp_protocol_test '*OfEveryRecord*'
        ((quick)) && continue
        sanitize "$tool" exchange_device_test '*/Of2:*/Of8'
        sanitize "$tool" copies_device_test '*'
        sanitize "$tool" mma_device_test '*NanAndInfinity*'
        sanitize "$tool" gpu_soak_test '*EachPlanAlone*'
    done
    unset SPARSEMLA_TEST_PLACEMENT
}

latency() {
    local options=(--suite latency --device "$device") log=$out/latency.txt status
    if ! "$bin/sparsemla" bench --help 2>&1 | grep -q 'latency'; then
        say "SKIP latency: this tool knows no latency suite"
        return
    fi
    ((quick)) && options+=(--repeats 5 --filter goal)
    timeout 900 "$bin/sparsemla" bench "${options[@]}" --json "$out/latency.json" >"$log" 2>&1
    status=$?
    if [[ $status == 0 ]]; then
        say "PASS latency: figures in latency.txt and latency.json"
        [[ ! -f $bin/RACECHECK ]] || say "SKIP latency as figures to report: built with SPARSEMLA_RACECHECK, which is slower"
    else
        say_failed "FAIL latency, exit status $status" "$log"
    fi
}

build
for stage in environment tests golden check sanitizers latency; do
    wanted $stage && $stage
done
(cd "$logs" && find . -maxdepth 1 -name '*.log' -print0 | tar czf "$out/logs.tar.gz" --null -T -)
count() { grep -c "^$1 " "$report"; }
failed=$(count FAIL)
say "$(count PASS) passed, $failed failed, $(count SKIP) skipped"
((failed == 0))
