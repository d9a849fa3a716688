#!/bin/bash
# Generates and checks a decode step for every record x heads x width x counts x sources x sinks; more than 12000 steps.
# Resumable: what passed is not run again; what failed keeps its case file. full_product.sh [--sample N] [PATTERN]
#   --sample N   every N-th combination only        PATTERN   only names that match, e.g. 'fp8_v4.*h128'
# SPARSEMLA_TOOL names a tool that is built already; otherwise it is built here. One step runs on each core.
set -euo pipefail
cd "$(dirname "$0")/.."

every=1
if [[ ${1:-} == --sample ]]; then
    every=$2
    shift 2
fi
pattern=${1:-.}

tool=${SPARSEMLA_TOOL:-build/bin/sparsemla}
if [[ -z ${SPARSEMLA_TOOL:-} ]]; then
    scripts/install_packages.sh build
    options=()
    [[ -f build/CMakeCache.txt ]] || options=(-DSPARSEMLA_TESTS=OFF)
    scripts/build.sh release "${options[@]}" sparsemla_tool
fi
work=build/full_product
mkdir -p "$work"
touch "$work/passed"
# Results are of one version of the tool.
version=$(sha256sum "$tool")
if [[ $(cat "$work/tool" 2>/dev/null) != "$version" ]]; then
    : >"$work/passed"
    echo "$version" >"$work/tool"
fi

# A second source has another record of the same d_qk.
records=(
    "bf16|--record bf16|--extra-record fp8 --extra-record-bytes 576"
    "bf16_split|--record bf16 --split-rope|--extra-record fp8_ds_mla"
    "fp8_576|--record fp8 --record-bytes 576|--extra-record nvfp4_ds_mla"
    "fp8_512|--record fp8 --record-bytes 512|--extra-record fp8 --extra-record-bytes 512"
    "fp8_ds_mla|--record fp8_ds_mla|--extra-record bf16 --extra-split-rope"
    "fp8_ds_mla_pow2|--record fp8_ds_mla --power-of-two-scales|--extra-record fp8_ds_mla"
    "fp8_ds_mla_norope|--record fp8_ds_mla_norope|--extra-record fp8_v4"
    "fp8_v4|--record fp8_v4|--extra-record nvfp4_v41"
    "fp8_v41|--record fp8_v41|--extra-record nvfp4_v41 --extra-layout contiguous"
    "fp8_v41_contiguous|--record fp8_v41 --layout contiguous|--extra-record fp8_ds_mla_norope"
    "nvfp4_v41|--record nvfp4_v41|--extra-record fp8_v41"
    "nvfp4_v41_contiguous|--record nvfp4_v41 --layout contiguous|--extra-record fp8_v4"
    "nvfp4_ds_mla|--record nvfp4_ds_mla|--extra-record fp8 --extra-record-bytes 576"
)
all_heads=(1 2 6 8 12 16 24 48 64 96 128)
widths=(0 1 63 64 65 127 128 129 640 2048 2049)

# NAME|OPTIONS of gen, one combination a line.
combinations() {
    local seed=0
    for record in "${records[@]}"; do
        IFS='|' read -r name first extra <<<"$record"
        for heads in "${all_heads[@]}"; do
            for width in "${widths[@]}"; do
                for counts in all ragged; do
                    for sources in one two; do
                        for sinks in none sinks; do
                            seed=$((seed + 1))
                            ((seed % every == 0)) || continue
                            command="$first --rows 3 --heads $heads --width $width --counts $counts --seed $seed"
                            [[ $sources == one ]] || command+=" $extra --extra-width $width"
                            [[ $sinks == none ]] || command+=" --sinks"
                            echo "$name-h$heads-w$width-$counts-$sources-$sinks|$command"
                        done
                    done
                done
            done
        done
    done
}

# Generates and checks one combination; appends its name to `passed`, or prints what went wrong.
run_one() {
    local name=${1%%|*} command=${1#*|}
    local case_file=$work/$name.safetensors
    local log=$work/$name.log
    local options
    read -ra options <<<"$command"
    if $tool gen "$case_file" "${options[@]}" >"$log" 2>&1 &&
        $tool check "$case_file" --device cpu --threads 1 --kernel all >>"$log" 2>&1; then
        echo "$name" >>"$work/passed"
        rm -f "$case_file" "$log"
    else
        printf '\nFAILED %s\n  %s gen %s %s\n%s\n' "$name" "$tool" "$case_file" "$command" "$(sed 's/^/  /' "$log")"
    fi
}
export -f run_one
export tool work

wanted=$(combinations | grep -E -- "^[^|]*($pattern)[^|]*\|" || true)
remaining=$(awk -F'|' 'FILENAME == ARGV[1] { done[$1]; next } !($1 in done)' "$work/passed" - <<<"$wanted")
if [[ -n $remaining ]]; then
    xargs -d '\n' -P "$(nproc)" -I {} bash -c 'run_one "$1"' _ {} <<<"$remaining"
fi

total=$(grep -c . <<<"$wanted" || true)
passed=$(awk -F'|' 'FILENAME == ARGV[1] { done[$1]; next } $1 in done' "$work/passed" - <<<"$wanted" | grep -c . || true)
echo "$passed passed, $((total - passed)) failed"
((passed == total && total > 0))
