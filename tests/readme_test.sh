#!/bin/bash
# The README's support matrix is what the tool says, built with the CUDA part: readme_test.sh SOURCE_DIR TOOL
# Exits 77, which counts as skipped, for a tool without it.
set -euo pipefail
"$2" env | grep -q '^ *CUDA part *built in' || exit 77
matrix=$(sed -n '/^<!-- support-matrix -->$/,/^<!-- \/support-matrix -->$/p' "$1/README.md" | sed '1d;$d')
diff <(echo "$matrix") <("$2" support)
