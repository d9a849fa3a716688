#!/bin/bash
# Compiles CUDA and keeps what `ptxas -v` says of its kernels in OBJECT.ptxas.log, for cuda_budgets_test; shows the rest:
# keep_ptxas_log.sh NVCC... -o OBJECT
set -uo pipefail

object=
previous=
for argument in "$@"; do
    [[ $previous == -o ]] && object=$argument
    previous=$argument
done
[[ -n $object ]] || exec "$@"

said=$(mktemp)
trap 'rm -f "$said"' EXIT
rm -f "$object.ptxas.log"
"$@" >"$said" 2>&1
status=$?
# Lines of resources belong to the log alone; a warning, (C7512) say, is shown too.
resources='^ptxas info +: [^(]|bytes stack frame, .* bytes spill|^ptxas info +:.*bytes gmem'
grep -vE "$resources" "$said" >&2
if [[ $status == 0 ]]; then cp "$said" "$object.ptxas.log"; fi
exit "$status"
