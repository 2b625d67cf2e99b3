#!/bin/sh
# check_headers.sh - compiles every public header alone, as C11 and as C++, all warnings errors; and
# a use of every KV8_..._INIT.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
for header in include/kv8/*.h; do
    line="#include <kv8/${header##*/}>"
    echo "$line" | ${CC:-cc} -std=c11 -Iinclude -Wall -Wextra -Werror -pedantic -fsyntax-only -x c -
    echo "$line" | ${CXX:-c++} -std=c++11 -Iinclude -Wall -Wextra -Werror -pedantic -fsyntax-only \
        -x c++ -
done
# A use of every initialiser, as a program has it: C++ compilers see fields that were forgotten.
uses=$(
    printf '#include <kv8/%s>\n' kv8.h kv8_engine.h
    sed -n 's/^#define KV8_\([A-Z_]*\)_INIT.*/\1/p' include/kv8/*.h | sort -u | while read -r name; do
        type=kv8_$(echo "$name" | tr 'A-Z' 'a-z')
        echo "void use_$type($type *out);"
        echo "void use_$type($type *out) { $type value = KV8_${name}_INIT; *out = value; }"
    done
)
echo "$uses" | ${CC:-cc} -std=c11 -Iinclude -Wall -Wextra -Werror -pedantic -fsyntax-only -x c -
echo "$uses" | ${CXX:-c++} -std=c++11 -Iinclude -Wall -Wextra -Werror -pedantic -fsyntax-only -x c++ -
echo "$(ls include/kv8/*.h | wc -l) headers stand alone in C11 and C++11"
