#!/bin/bash
# Ranks with a GPU each, in processes of their own on this machine: nccl_check.sh [RANKS] [EXCHANGES] [PROGRAM]
# RANKS: as many as there are GPUs. PROGRAM: nccl_ranks, where the release or portable preset or an archive has it.
# SPARSEMLA_NCCL names NCCL's library; otherwise libnccl.so.2, or the one of python3's packages. Ends with 1 where a rank
# found something wrong, 77 where ranks were skipped.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

ranks=${1:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
exchanges=${2:-200}
program=${3:-}
for place in "$here" "$here/../build/bin" "$here/../build-cuda/bin" "$here/../build-portable/bin"; do
    [[ -z $program && -x $place/nccl_ranks ]] && program=$place/nccl_ranks
done
if [[ -z $program ]]; then
    echo "nccl_check.sh: need the program nccl_ranks (a build with the CUDA part), found none" >&2
    exit 2
fi
if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "SKIP no GPU"
    exit 77
fi
if [[ -z ${SPARSEMLA_NCCL:-} ]]; then
    found=$(python3 -c 'import importlib.util, os
spec = importlib.util.find_spec("nvidia.nccl")
print(os.path.join(list(spec.submodule_search_locations)[0], "lib", "libnccl.so.2"))' 2>/dev/null) || found=
    [[ -e $found ]] && export SPARSEMLA_NCCL=$found
fi
# Where NVLink multicast is off it must stay off, and NCCL would use it.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 20000))}

processes=()
for ((rank = 0; rank < ranks; ++rank)); do
    RANK=$rank LOCAL_RANK=$rank "$program" "$exchanges" &
    processes+=($!)
done
worst=0
for process in "${processes[@]}"; do
    wait "$process"
    code=$?
    [[ $code == 77 && $worst == 0 ]] && worst=77
    [[ $code != 0 && $code != 77 ]] && worst=1
done
case $worst in
    0) echo "PASS $ranks ranks" ;;
    77) echo "SKIP some of $ranks ranks" ;;
    *) echo "FAIL $ranks ranks" ;;
esac
exit $worst
