#!/bin/bash
# Builds everything and runs all tests.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install_packages.sh build test
echo "Building everything in build/"
scripts/build.sh release -DSPARSEMLA_TESTS=ON
ctest --test-dir build --output-on-failure --no-tests=error -j "$(nproc)"
