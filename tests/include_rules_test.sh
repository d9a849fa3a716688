#!/bin/bash
# Who may include whom, and where record sizes may stand: include_rules_test.sh SOURCE_DIR
set -euo pipefail
cd "$1"
failures=0

# forbid RULE PATTERN PATH...: no line of the files (in folders: all sources) may match.
forbid() {
    local rule=$1 pattern=$2
    shift 2
    local paths=()
    for path in "$@"; do
        [[ -e $path ]] && paths+=("$path")
    done
    [[ ${#paths[@]} == 0 ]] && return
    local hits
    hits=$(grep -rnPH --include='*.h' --include='*.hpp' --include='*.c' --include='*.cpp' --include='*.cu' \
        --include='*.cuh' --include='*.inc' -e "$pattern" "${paths[@]}") || true
    if [[ -n $hits ]]; then
        printf 'rule broken: %s\n%s\n' "$rule" "$hits"
        failures=$((failures + 1))
    fi
}

include='^\s*#\s*include\s*'

forbid 'public headers include the C++ standard library and sparsemla/ only' \
    "$include(<[^>]*[/.][^>]*>|\"(?!sparsemla/))" $(ls include/sparsemla/*.h | grep -v '/sparsemla\.h$')
forbid 'sparsemla.h includes the C standard library only' \
    "$include+(?!<(stddef|stdint|string)\.h>)" include/sparsemla/sparsemla.h
forbid 'sparsemla_dcp.h includes sparsemla.h only' \
    "$include+(?!\"sparsemla/sparsemla\.h\")" include/sparsemla/sparsemla_dcp.h
forbid 'CUDA headers stay in src/cuda, tests/cuda and harness/gpu.cpp, gpu_probes.cu and gpu_runtime.h' \
    "$include[<\"](cuda|cuda_[a-z_]*|cub/.*|cutlass/.*|nccl|device_launch_parameters)(\.h)?[>\"]" \
    include src/*.cpp src/*.h src/cpu src/nccl $(ls harness/* | grep -vE '/(gpu\.cpp|gpu_probes\.cu|gpu_runtime\.h)$') tools \
    $(ls -d tests/* | grep -v '^tests/cuda$') bench fuzz
forbid 'src/cpu does not include src/cuda' "$include[<\"](\.\./)?cuda/" src/cpu
forbid 'src/cuda does not include src/cpu' "$include[<\"](\.\./)*cpu/" src/cuda
forbid 'src/nccl includes neither src/cpu nor src/cuda' "$include[<\"](\.\./)*(cpu|cuda)/" src/nccl
forbid 'src/cuda/device includes the CUDA toolkit and itself only' \
    "$include[<\"](sparsemla/|kernels\.h|gpu\.h|cpu/|harness/|\.\./)" src/cuda/device
forbid 'the tool includes the public API, the harness and its own files only' \
    "$include\"(?!sparsemla/|harness/|tools/)" tools
forbid 'the library does not include the harness, the tool or the tests' "$include[<\"](harness|tools|tests)/" include src
forbid 'the harness does not include the library'"'"'s inside, the tool or the tests' \
    "$include[<\"](src/|cpu/|cuda/|tools/|tests/|kernels\.h|check\.h|gpu\.h)" harness
forbid 'the library prints nothing, ends nothing and reads no environment variable' \
    '\b(std::cout|std::cerr|printf\s*\(|puts\s*\(|std::abort|std::exit|abort\s*\(\)|(?<!_)exit\s*\(|getenv)' include src
forbid 'record sizes are written in records.h only' \
    '(?<![\w.])(656|584|352|288|1152)(?![\w.])' \
    $(ls include/sparsemla/*.h | grep -v '/records\.h$') src tools harness

if ((failures > 0)); then
    echo "$failures rules broken"
    exit 1
fi
echo "all rules hold"
