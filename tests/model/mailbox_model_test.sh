#!/bin/bash
# The model of the mailbox protocol holds, and each fault put into it is found:
#   mailbox_model_test.sh SOURCE_DIR [SPIN [OPTION...]]     options go to every search, e.g. -m8000000 for more depth
set -euo pipefail
model=$1/tests/model/mailbox.pml
spin=${2:-}
shift "$(($# < 2 ? $# : 2))"
options=("$@")
if [[ -z $spin || $spin == *NOTFOUND ]]; then
    echo "skipped: no spin"
    exit 77
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
failures=0

# search CC_OPTION PAN_OPTIONS DEFINE...: an exhaustive search, which stops at the first error.
search() {
    local compile=("$1" -w -DCOLLAPSE -DNOFAIR -DMEMLIM=2000) run
    read -ra run <<<"$2"
    shift 2
    # Where no cycles are looked for, there is less to keep.
    [[ " ${run[*]} " == *' -a '* ]] || compile+=(-DSAFETY)
    rm -f -- *.log pan*
    "$spin" -a "$@" "$model" >spin.log 2>&1 && "${CC:-cc}" "${compile[@]}" -o pan pan.c 2>cc.log &&
        ./pan "${run[@]}" "${options[@]}" >pan.log 2>&1
}

# report RESULT DEFINE...
report() {
    local result=$1 states='' seconds=''
    shift
    if [[ -f pan.log ]]; then
        states=$(sed -nE 's/^ *([0-9]+) states, stored.*/\1/p' pan.log)
        seconds=$(sed -nE 's/^pan: elapsed time ([0-9.e+-]+) seconds.*/\1/p' pan.log)
    fi
    printf '%-16s %9s states %6s s   %s\n' "$result" "$states" "$seconds" "$*"
    if [[ $result != holds && $result != found ]]; then
        failures=$((failures + 1))
        tail -n 40 -- *.log
    fi
}

# holds PAN_OPTION DEFINE...: no error in any state, and no line of the model that no state reaches.
holds() {
    local result=holds pan_option=$1
    shift
    if ! search -O1 "-m4000000 $pan_option" "$@" || ! grep -q 'errors: 0$' pan.log; then
        result='FAILS'
    elif grep -qE 'too small|not completed|out of memory' pan.log; then
        result='NOT COMPLETED'
    elif grep -E ', state [0-9]+, "' pan.log | grep -qv '"-end-"'; then
        result='UNREACHED LINES'
    fi
    report "$result" "$@"
}

# finds ERROR DEFINE...: the fault is found, by a rank that waits forever or by an assertion.
finds() {
    local result=found error=$1
    shift
    if ! search -O0 '-m1000000 -w20' "$@" || ! grep -qE "^pan:1: $error" pan.log; then
        result='NOT FOUND'
    fi
    report "$result" "$@"
}

# Every word for itself; then coarser, and three ranks.
holds '' -DN=2 -DCAP=1 -DWORDS=2 -DEACH_WORD
holds '' -DN=2 -DCAP=2 -DROWS_ALIKE -DPERIOD=4 -DEACH_WORD
holds '' -DN=2 -DCAP=2
holds '' -DN=3 -DCAP=1
holds '' -DN=3 -DCAP=2 -DROWS_ALIKE -DPERIOD=4
# Unequal shares of the heads, and a rank without.
holds '' -DN=2 -DCAP=2 -DHEADS=3
holds '' -DN=3 -DCAP=1 -DHEADS=4
holds '' -DN=2 -DCAP=2 -DHEADS=1
holds '' -DN=3 -DCAP=1 -DHEADS=2
# Decode does not wait for the end of gather.
holds '' -DN=2 -DCAP=1 -DEACH_WORD -DOVERLAP=DECODE
holds '' -DN=2 -DCAP=2 -DOVERLAP=DECODE
# Exchanges follow each other without end, whichever CTA is the slow one.
holds -a -DN=2 -DCAP=2 -DLIVENESS

waits='invalid end state'
asserts='assertion violated'
finds "$asserts" -DEACH_WORD -DFAULT=ONE_PARITY
finds "$waits" -DEACH_WORD -DFAULT=FIRST_READER_REARMS
finds "$asserts" -DEACH_WORD -DFAULT=UNREAD_NOT_AWAITED
finds "$asserts" -DEACH_WORD -DFAULT=UNREAD_NOT_REARMED
finds "$waits" -DEACH_WORD -DFAULT=FIRST_CTA_ADVANCES
finds "$waits" -DEACH_WORD -DFAULT=NO_EMPTY
finds "$asserts" -DEACH_WORD -DFAULT=OWN_PARTIAL_IGNORED
finds "$asserts" -DEACH_WORD -DFAULT=EMPTY_SOURCE_IGNORED
finds "$waits" -DEACH_WORD -DFAULT=EMPTY_VALUE_AWAITED
finds "$asserts" -DEACH_WORD -DCAP=1 -DFAULT=VALUE_NOT_AWAITED
finds "$asserts" -DEACH_WORD -DWORDS=2 -DFAULT=FIRST_WORD_AWAITED
finds "$waits" -DEACH_WORD -DFAULT=ALL_ROWS_AWAITED
finds "$asserts" -DEACH_WORD -DFAULT=ROWS_DIFFER
finds "$asserts" -DEACH_WORD -DFAULT=LOCKSTEP_CLAIMED
finds "$waits" -DEACH_WORD -DOVERLAP=MERGE
finds "$asserts" -DEACH_WORD -DOVERLAP=GATHER

if ((failures > 0)); then
    echo "$failures searches failed"
    exit 1
fi
echo "the protocol holds, every fault is found"
