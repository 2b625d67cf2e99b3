#!/bin/sh
# check_symbols.sh BUILD - libkv8.so exports what include/kv8 declares: nothing less, nothing else,
# every symbol with the library's version.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Declarations as the compiler sees them: the name before the first parenthesis after KV8_API.
echo '#include <kv8/kv8.h>' | ${CC:-cc} -E -P -Iinclude -x c - |
    awk 'BEGIN { RS = ";" }
         index($0, "visibility(\"default\")") {
             sub(/.*visibility\("default"\)\)\)/, ""); sub(/\(.*/, ""); n = split($0, word, /[ \t\n*]+/)
             print word[n]
         }' | sort >"$work/declared"
if [ ! -s "$work/declared" ]; then
    echo "found no declaration in include/kv8" >&2
    exit 1
fi
nm -D --defined-only "$build/libkv8.so" | awk '$2 != "A" { print $3 }' >"$work/versioned"
sed 's/@.*//' "$work/versioned" | sort >"$work/exported"

bad=0
report() { # file with names, what is wrong with them
    if [ -s "$1" ]; then awk -v is="$2" '{ print $0 ": " is }' "$1" >&2; bad=1; fi
}
comm -23 "$work/declared" "$work/exported" >"$work/undefined"
comm -13 "$work/declared" "$work/exported" >"$work/undeclared"
grep -v '^kv8_[a-z0-9_]*@@KV8_[0-9.]*$' "$work/versioned" >"$work/unversioned" || true
report "$work/undefined" "declared in include/kv8, not exported"
report "$work/undeclared" "exported, not declared in include/kv8"
report "$work/unversioned" "exported without a version"
[ $bad -eq 0 ] || exit 1
echo "$(wc -l <"$work/declared") functions declared, exported and versioned"
