#!/bin/sh
# check_circles.sh BUILD - the files of a room need one another in one direction: over the objects of
# each room, an edge for every symbol that one uses and another defines. The files of a circle are
# printed with those symbols. What a file is given at run time, as a cache its store, is no edge.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
nm=${NM:-nm}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# "user definer symbol" for every symbol that one object has of another of its room. nm -A prints
# BUILD/.../src/<room>/.../<file>.c.o:[address] kind symbol; the program's lie under apps/.
find "$1"/CMakeFiles/kv8*_objects.dir/src "$1"/apps/CMakeFiles/kv8.dir \
    "$1"/src/server/CMakeFiles/kv8_server.dir -name '*.c.o' |
    while read -r object; do
        case $object in
        */kv8.dir/*) source=apps/${object##*/kv8.dir/} ;;
        */kv8_server.dir/*) source=src/server/${object##*/kv8_server.dir/} ;;
        *) source=src/${object##*_objects.dir/src/} ;;
        esac
        if [ -e "${source%.o}" ]; then echo "$object"; fi # else left over from before it went
    done | xargs "$nm" -gA | awk '{
        path = substr($1, 1, index($1, ":") - 1)
        room = "apps"
        if (path ~ /kv8_server\.dir/) room = "server"
        if (sub(/.*_objects\.dir\/src\//, "", path)) { room = path; sub(/\/.*/, "", room) }
        sub(/.*\//, "", path); sub(/\.o$/, "", path)
        file = room "/" path; symbol = room " " $NF
        if ($(NF - 1) ~ /U$/) users[symbol] = users[symbol] " " file
        else definer[symbol] = file
    }
    END {
        for (symbol in users) if (symbol in definer) {
            n = split(users[symbol], user, " ")
            for (i = 1; i <= n; i++)
                print user[i], definer[symbol], substr(symbol, index(symbol, " ") + 1)
        }
    }' | sort >"$work/edges"
if [ ! -s "$work/edges" ]; then
    echo "found no object that needs another in $1" >&2
    exit 1
fi

# tsort names the members of the circles it meets, each on a line behind its own name.
cut -d' ' -f1,2 "$work/edges" | sort -u >"$work/pairs"
if ! tsort "$work/pairs" >/dev/null 2>"$work/loops"; then
    sed -n 's/^tsort: \([^ ]*\.c\)$/\1/p' "$work/loops" >"$work/members"
    echo "files of one room that need one another:" >&2
    awk 'NR == FNR { member[$1] = 1; next }
         $1 in member && $2 in member { print "  " $1, "->", $2, "by", $3 }' \
        "$work/members" "$work/edges" >&2
    exit 1
fi
echo "$(wc -l <"$work/pairs") pairs of files, one needs the other, no circle"
