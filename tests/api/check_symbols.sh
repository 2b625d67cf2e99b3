#!/bin/sh
# check_symbols.sh BUILD - libkv8.so and libkv8_engine.so export what include/kv8 declares: nothing
# less, nothing else, every symbol with the library's version; but for what libkv8 exports to
# libkv8_engine as KV8_PRIVATE, which is what that library uses of it, no more.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Declarations as the compiler sees them: the name before the first parenthesis after KV8_API.
declared() { # header
    echo "#include <kv8/$1>" | ${CC:-cc} -E -P -Iinclude -x c - |
        awk 'BEGIN { RS = ";" }
             index($0, "visibility(\"default\")") {
                 gsub(/__attribute__\(\(warn_unused_result\)\)/, "")
                 sub(/.*visibility\("default"\)\)\)/, ""); sub(/\(.*/, "")
                 n = split($0, word, /[ \t\n*]+/); print word[n]
             }' | sort
}
exported() { # library: its symbols with their versions
    nm -D --defined-only "$build/$1" | awk '$2 != "A" { print $3 }' | sort
}
declared kv8.h >"$work/kv8.declared"
declared kv8_engine.h | comm -13 "$work/kv8.declared" - >"$work/kv8_engine.declared"
for library in kv8 kv8_engine; do
    if [ ! -s "$work/$library.declared" ]; then
        echo "found no declaration of lib$library in include/kv8" >&2
        exit 1
    fi
    exported "lib$library.so" >"$work/versioned"
    grep -v '@@KV8_PRIVATE$' "$work/versioned" >"$work/$library.versioned"
    sed 's/@.*//' "$work/$library.versioned" >"$work/$library.exported"
done
exported libkv8.so | sed -n 's/@@KV8_PRIVATE$//p' >"$work/private"
nm -D --undefined-only "$build/libkv8_engine.so" | sed -n 's/.* \(kv8_.*\)@KV8_PRIVATE$/\1/p' |
    sort >"$work/used"

bad=0
report() { # file with names, what is wrong with them
    if [ -s "$1" ]; then awk -v is="$2" '{ print $0 ": " is }' "$1" >&2; bad=1; fi
}
for library in kv8 kv8_engine; do
    comm -23 "$work/$library.declared" "$work/$library.exported" >"$work/undefined"
    comm -13 "$work/$library.declared" "$work/$library.exported" >"$work/undeclared"
    grep -v '^kv8_[a-z0-9_]*@@KV8_[0-9.]*$' "$work/$library.versioned" >"$work/unversioned" || true
    report "$work/undefined" "declared in include/kv8, not exported by lib$library"
    report "$work/undeclared" "exported by lib$library, not declared in include/kv8 nor KV8_PRIVATE"
    report "$work/unversioned" "exported by lib$library without a version"
done
comm -23 "$work/private" "$work/used" >"$work/unused"
report "$work/unused" "KV8_PRIVATE in libkv8, not used by libkv8_engine"
[ $bad -eq 0 ] || exit 1
echo "$(cat "$work"/*.declared | wc -l) functions declared, exported and versioned;" \
    "$(wc -l <"$work/private") private to the two libraries"
