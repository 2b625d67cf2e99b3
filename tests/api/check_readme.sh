#!/bin/sh
# check_readme.sh BUILD - the README's C program: at most 40 lines, only include/kv8 and the C
# library, compiles without a warning, runs, and prints what the README says. Then with the sink
# taken away, where the answer must change to the one the README names.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' README.md >"$work/program.c"
lines=$(wc -l <"$work/program.c")
if [ "$lines" -lt 10 ] || [ "$lines" -gt 40 ]; then
    echo "README's program has $lines lines, must be 10 to 40" >&2
    exit 1
fi
if grep '#include' "$work/program.c" | grep -qv '<kv8/\|<std'; then
    echo "README's program includes more than kv8 and the C library" >&2
    exit 1
fi
expect() { # printed line
    ${CC:-cc} -std=c11 -Wall -Wextra -Werror -pedantic -Iinclude "$work/program.c" \
        -o "$work/program" -L"$build" -lkv8 -Wl,-rpath,"$build"
    said=$("$work/program")
    if [ "$said" != "$1" ]; then
        echo "README's program printed \"$said\", must be \"$1\"" >&2
        exit 1
    fi
}
expect 'o = 1.5000'
grep -q 'prints `o = 1.5000`' README.md
sed -i 's/sink = 8.0f/sink = -1e30f/' "$work/program.c"
expect 'o = 2.0000'
echo "README's program: $lines lines, right with and without its sink"
