#!/bin/bash
# What CUDA sources may not hold, whatever compiles: cuda_rules_test.sh SOURCE_DIR
set -euo pipefail
cd "$1"
failures=0

# forbid RULE PATTERN PATH...: no line of the sources in these folders may match, but for those of tests/cuda where the
# rule says so.
forbid() {
    local rule=$1 pattern=$2
    shift 2
    local hits
    hits=$(grep -rnPH --include='*.h' --include='*.c' --include='*.cpp' --include='*.cu' --include='*.cuh' \
        --include='*.inc' -e "$pattern" "$@") || true
    if [[ -n $hits ]]; then
        printf 'rule broken: %s\n%s\n' "$rule" "$hits"
        failures=$((failures + 1))
    fi
}

all=(include src harness tools tests bench fuzz)
forbid 'no NVLink multicast: it is off where these kernels must run' '(?i)\bmultimem\b|cuMulticast|cudaMulticast' "${all[@]}"
# A launch names its stream in the line that opens it.
forbid 'every launch names its stream' '<<<(?!.*\b(stream|handle_of)\b.*>>>)' "${all[@]}"
forbid 'no launch without a configuration that names its stream' '\bcudaLaunch(CooperativeKernel|Kernel)\s*\(' "${all[@]}"
forbid 'no per-thread default stream' 'CUDA_API_PER_THREAD_DEFAULT_STREAM|cudaStreamPerThread' "${all[@]}"
# Empty assembly that only pins a value is no instruction.
# The harness measures the machine, and may not include the library's inside.
forbid 'instructions in assembly stand in src/cuda/device only' '\basm\b(?!\s*(volatile)?\s*\(\s*"")' \
    include src/*.cpp src/*.h src/cpu src/nccl $(find src/cuda -maxdepth 1 -type f) \
    $(ls harness/* | grep -v '/gpu_probes\.cu$') tools tests bench fuzz

if ((failures > 0)); then
    echo "$failures rules broken"
    exit 1
fi
echo "all rules hold"
