#!/bin/sh
# Prints the folder of GoogleTest's sources, or nothing where the compiler finds an installed one.
# Brings the sources to build/googletest where there is neither.
set -eu

if [ -n "${GTEST_SOURCE_DIR:-}" ]; then
    echo "$GTEST_SOURCE_DIR"
    exit 0
fi
root=$(cd "$(dirname "$0")/.." && pwd)
sources=$root/build/googletest

mkdir -p "$root/build"
if printf '#include <gtest/gtest.h>\nint main() {}\n' |
    "${CXX:-c++}" -std=c++20 -x c++ - -lgtest -pthread -o "$root/build/googletest-probe" 2>/dev/null
then
    rm "$root/build/googletest-probe"
    exit 0
fi
for folder in "$sources" /usr/src/googletest; do
    if [ -f "$folder/CMakeLists.txt" ]; then
        echo "$folder"
        exit 0
    fi
done

echo "GoogleTest is missing: trying to bring it" >&2

# Debian and Ubuntu: the package holds the sources, and unpacking it needs no root.
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
    unpacked=$root/build/googletest-package
    rm -rf "$unpacked"
    mkdir -p "$unpacked"
    if (cd "$unpacked" && {
        apt-get download googletest ||
            { [ "$(id -u)" = 0 ] && apt-get update && apt-get download googletest; }
    }) >&2; then
        dpkg-deb -x "$unpacked"/googletest_*.deb "$unpacked"
        rm -rf "$sources"
        mv "$unpacked/usr/src/googletest" "$sources"
        rm -rf "$unpacked"
        echo "$sources"
        exit 0
    fi
fi

if command -v git >/dev/null &&
    git clone --quiet --depth 1 --branch v1.14.0 https://github.com/google/googletest "$sources" >&2; then
    echo "$sources"
    exit 0
fi

cat >&2 <<'MESSAGE'
GoogleTest was not found and could not be fetched. Install it (Debian, Ubuntu: libgtest-dev;
Fedora: gtest-devel; macOS: brew install googletest) or set GTEST_SOURCE_DIR to its sources.
MESSAGE
exit 1
