#!/bin/sh
# check_kernels.sh BUILD - the objects of src/<room>/cpu/<stem>_<rung>.c export only what the room
# lists: each global name ends in its own file's rung, and the rest of the name, with the rung as a
# word, stands in the room's <room>_kernels.inc (base has no kernels; there, in <stem>.h). So no
# function compiled for a newer processor can be reached but through the dispatch.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
nm=${NM:-nm}
rungs=$(sed -n 's/^ *set(KV8_RUNGS \([a-z].*\))/\1/p' CMakeLists.txt)
bad=0
count=0
for object in $(find "$1"/CMakeFiles/kv8*_objects.dir/src -path '*/cpu/*.o' | sort); do
    file=$(basename "$object" .c.o)
    room=${object##*_objects.dir/src/}
    room=${room%%/*}
    [ -e "src/$room/cpu/$file.c" ] || continue # left over from before its source went
    rung=
    for each in $rungs; do
        case $file in *_"$each") rung=$each ;; esac
    done
    if [ -z "$rung" ]; then
        echo "$object: file name ends in no rung" >&2
        bad=1
        continue
    fi
    list=src/$room/${room}_kernels.inc
    [ -e "$list" ] || list=src/$room/${file%_"$rung"}.h
    for name in $($nm -g --defined-only "$object" | awk '{ print $3 }' | grep -v '^__odr_asan'); do
        stem=${name%_"$rung"}
        stem=${stem%_}
        if [ "$stem" = "$name" ]; then
            echo "$object: exports $name, which does not end in _$rung" >&2
            bad=1
        elif ! grep -q "$stem" "$list" || ! grep -qE "$rung([^a-z0-9_]|\$)" "$list"; then
            echo "$object: exports $name, which $list does not list" >&2
            bad=1
        fi
        count=$((count + 1))
    done
done
if [ $count -eq 0 ]; then
    echo "found no kernel object in $1" >&2
    exit 1
fi
[ $bad -eq 0 ] || exit 1
echo "$count kernel names, each listed by its room"
