#!/bin/bash
# Generates and checks a decode step for every record x heads x width x counts x sources x sinks; more than 12000 steps.
# Resumable: what passed is not run again; what failed keeps its case file. full_product.sh [--sample N] [PATTERN]
#   --sample N   every N-th combination only        PATTERN   only names that match, e.g. 'fp8_v4.*h128'
set -euo pipefail
cd "$(dirname "$0")/.."

every=1
if [[ ${1:-} == --sample ]]; then
    every=$2
    shift 2
fi
pattern=${1:-.}

scripts/install_packages.sh build
options=()
[[ -f build/CMakeCache.txt ]] || options=(-DSPARSEMLA_TESTS=OFF)
scripts/build.sh release "${options[@]}" sparsemla_tool
tool=build/bin/sparsemla
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

names=()
commands=()
seed=0
for record in "${records[@]}"; do
    IFS='|' read -r name first extra <<<"$record"
    for heads in "${all_heads[@]}"; do
        for width in "${widths[@]}"; do
            for counts in all ragged; do
                for sources in one two; do
                    for sinks in none sinks; do
                        seed=$((seed + 1))
                        ((seed % every == 0)) || continue
                        names+=("$name-h$heads-w$width-$counts-$sources-$sinks")
                        command="$first --rows 3 --heads $heads --width $width --counts $counts --seed $seed"
                        [[ $sources == one ]] || command+=" $extra --extra-width $width"
                        [[ $sinks == none ]] || command+=" --sinks"
                        commands+=("$command")
                    done
                done
            done
        done
    done
done

declare -A passed
while read -r name; do passed[$name]=1; done <"$work/passed"
failed=0
done_now=0
for i in "${!names[@]}"; do
    name=${names[i]}
    [[ $name =~ $pattern ]] || continue
    if [[ -z ${passed[$name]:-} ]]; then
        case_file=$work/$name.safetensors
        read -ra options <<<"${commands[i]}"
        if $tool gen "$case_file" "${options[@]}" >"$work/log" 2>&1 &&
            $tool check "$case_file" --kernel all >>"$work/log" 2>&1; then
            echo "$name" >>"$work/passed"
            rm -f "$case_file"
            passed[$name]=1
        else
            failed=$((failed + 1))
            printf '\nFAILED %s\n  %s gen %s %s\n' "$name" "$tool" "$case_file" "${commands[i]}"
            sed 's/^/  /' "$work/log"
        fi
    fi
    done_now=$((done_now + 1))
    [[ -t 1 ]] && printf '\r%d of %d, %d failed' "$done_now" "${#names[@]}" "$failed"
done
[[ -t 1 ]] && echo
echo "$((done_now - failed)) passed, $failed failed"
((failed == 0 && done_now > 0))
