#!/bin/bash
# Installs the Debian packages that a group of tasks needs: install_packages.sh build|test|sanitize...
# Does nothing, and asks no network, when they are all there.
set -euo pipefail

packages=()
for group in "$@"; do
    case $group in
        build) packages+=(cmake ninja-build g++ libhwy-dev libtbb-dev libcli11-dev nlohmann-json3-dev libfmt-dev) ;;
        test) packages+=(libgtest-dev libgmock-dev clang-format-14 python3 spin) ;;
        sanitize) packages+=(clang-14 libclang-rt-14-dev) ;;
        *)
            echo "install_packages.sh: need groups build, test, sanitize, got '$group'" >&2
            exit 2
            ;;
    esac
done

if ! command -v dpkg-query >/dev/null; then
    echo "This is no Debian system: install what corresponds to ${packages[*]} by hand." >&2
    exit 0
fi

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | sort -u) || true
    [[ $status == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} == 0 ]] && exit 0

echo "Installing ${missing[*]}"
as_root=()
if [[ $(id -u) != 0 ]]; then
    if ! command -v sudo >/dev/null; then
        echo "Need root to install them: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
quiet() {
    if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        echo "failed: $*" >&2
        exit 1
    fi
}
quiet apt-get -qq -o Acquire::Retries=3 update
quiet apt-get -qq -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 install --no-install-recommends -y "${missing[@]}"
