#!/bin/bash
# The README's support matrix is what the tool says: readme_test.sh SOURCE_DIR TOOL
set -euo pipefail
matrix=$(sed -n '/^<!-- support-matrix -->$/,/^<!-- \/support-matrix -->$/p' "$1/README.md" | sed '1d;$d')
diff <(echo "$matrix") <("$2" support)
