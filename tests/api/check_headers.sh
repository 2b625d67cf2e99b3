#!/bin/sh
# check_headers.sh - compiles every public header alone, as C11 and as C++, all warnings errors.
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
echo "$(ls include/kv8/*.h | wc -l) headers stand alone in C11 and C++11"
