#!/bin/bash
# Every C, C++ and CUDA file is as .clang-format says: format_test.sh SOURCE_DIR [CLANG_FORMAT]
set -euo pipefail
cd "$1"
clang_format=${2:-}
if [[ -z $clang_format || $clang_format == *NOTFOUND ]]; then
    echo "skipped: no clang-format"
    exit 77
fi
if ! "$clang_format" --version | grep -q 'version 14\.'; then
    echo "skipped: the files are formatted by clang-format 14, this is $("$clang_format" --version)"
    exit 77
fi
find include src harness tools tests bench fuzz examples \
    \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 2>/dev/null |
    xargs -0 "$clang_format" --dry-run -Werror
