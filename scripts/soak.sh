#!/bin/bash
# Exchanges of decode context parallelism by the hundred thousand: soak.sh [--device cuda:N] [--exchanges N] [--bin DIR]
#   --device D      cpu (if not given), where ranks are threads; or a GPU, stage by stage and by ranks at the same time
#   --exchanges N   of each test (default 100000)
#   --bin DIR       the test programs; without it those beside this script, as in a portable archive, or else a build
# Prints a line for each program, which begins with PASS or FAIL; the exit status is 1 if one failed.
set -uo pipefail

device=cpu exchanges=100000 bin=''
while (($#)); do
    case $1 in
        --device | --exchanges | --bin)
            [[ $# -ge 2 ]] || { echo "soak.sh: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        *) echo "soak.sh: unknown option $1; the first lines of this file say what there is" >&2; exit 2 ;;
    esac
    shift
done
[[ $exchanges =~ ^[1-9][0-9]*$ ]] || { echo "soak.sh: --exchanges must be a number above 0, got $exchanges" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Program and tests of it that do as many exchanges as they are told.
soaks=("dcp_test Dcp.*")
[[ $device == cpu ]] || soaks+=("gpu_dcp_concurrent_test *.Soak" "gpu_dcp_order_test *.ANewQuery*")

if [[ -z $bin && -x $here/dcp_test ]]; then
    bin=$here
elif [[ -z $bin ]]; then
    preset=release
    [[ $device != cpu ]] || preset=cpu
    cd "$here/.." && scripts/install_packages.sh build test && scripts/build.sh $preset "${soaks[@]%% *}" >&2 || exit 2
    bin=$here/../$([[ $preset == cpu ]] && echo build-cpu || echo build)/bin
fi
bin=$(cd "$bin" && pwd) || exit 2

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export SPARSEMLA_TEST_DEVICE=$device SPARSEMLA_DCP_STEPS=$exchanges
failed=0
for soak in "${soaks[@]}"; do
    read -r name filter <<<"$soak"
    start=$SECONDS
    (cd "$bin" && timeout 7200 "./$name" --gtest_filter="$filter") >"$log" 2>&1
    status=$?
    ok=$(grep -c '^\[       OK' "$log")
    line="$name on $device: $ok tests of $exchanges exchanges, $((SECONDS - start)) s"
    if [[ $status == 0 && $ok -gt 0 ]]; then
        echo "PASS $line"
    else
        echo "FAIL $line, exit status $status"
        { grep -aE 'Failure|rror|exchange|FAILED' "$log" || tail -n 3 "$log"; } | head -n 8 | cut -c1-300 | sed 's/^/     | /'
        failed=1
    fi
done
exit $failed
