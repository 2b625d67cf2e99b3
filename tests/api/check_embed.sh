#!/bin/sh
# check_embed.sh BUILD - kv8 as a part of a stranger's project: by add_subdirectory with both
# libraries, and by FetchContent with libkv8 alone. The parent's flags reach kv8's files, kv8's do not
# reach the parent, and nothing but the libraries is built, or installed with the parent unless it asks:
# then libkv8 alone is whole, its headers without those of libkv8_engine.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")"
source=$(cd ../.. && pwd)
launcher=$(sed -n 's/^CMAKE_C_COMPILER_LAUNCHER:[A-Z]*=//p' "$1/CMakeCache.txt")
version=$(sed -n 's/.*KV8_VERSION "\(.*\)"/\1/p' "$1/generated/kv8_version.h")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "check_embed.sh: $from: $*" >&2; exit 1; }
# Kernels are compiled twice and run by nobody: not optimised as they are elsewhere.
cat >"$work/compile" <<EOF
#!/bin/sh
for word do
    shift
    [ "\$word" != -O3 ] || word=-O1
    set -- "\$@" "\$word"
done
exec $(echo "$launcher" | tr ';' ' ') "\$@"
EOF
chmod +x "$work/compile"

for from in subdirectory fetch; do
    build=$work/$from
    cmake -S consumer -B "$build" -G Ninja -DKV8_FROM=$from -DKV8_SOURCE="$source" -DKV8_CUDA=OFF \
        -DCMAKE_C_COMPILER="${CC:-cc}" -DCMAKE_C_COMPILER_LAUNCHER="$work/compile" \
        -DCMAKE_C_FLAGS="-O0 -DPARENTS_FLAG" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
        >"$work/log" 2>&1 && cmake --build "$build" >>"$work/log" 2>&1 ||
        { tail -n 50 "$work/log" >&2; fail "does not build"; }
    for program in "$build"/consumer_*; do
        said=$("$program")
        [ "$said" = "$version 1" ] || fail "$program printed \"$said\", must be \"$version 1\""
    done
    awk '/"command":/ { ours = /-ffp-contract=off/; all += 1
             if (!/-DPARENTS_FLAG/ || ours == /consumer_kv8/) { print; bad = 1 } }
         END { exit bad || !all }' "$build/compile_commands.json" >&2 ||
        fail "flags of the parent and of kv8 are mixed up"
    unwanted=$(find "$build" -name 'kv8' -type f -o -name 'test_*' -o -name 'libcuda*')
    [ -z "$unwanted" ] || fail "builds more than the libraries: $unwanted"
    cmake --install "$build" --prefix "$work/prefix" >"$work/log" 2>&1 || fail "does not install"
    [ ! -e "$work/prefix" ] || fail "installs kv8 with the parent"
done
[ ! -e "$work/fetch/_deps/kv8-build/libkv8_engine.a" ] || fail "KV8_ENGINE=OFF builds libkv8_engine"
grep -q '^KV8_jansson' "$work/fetch/CMakeCache.txt" && fail "KV8_ENGINE=OFF looks for jansson"

cmake -DKV8_INSTALL=ON "$work/fetch" >"$work/log" 2>&1 && cmake --build "$work/fetch" >>"$work/log" 2>&1 &&
    cmake --install "$work/fetch" --prefix "$work/prefix" >>"$work/log" 2>&1 ||
    { tail -n 50 "$work/log" >&2; fail "does not install libkv8"; }
${CC:-cc} -I"$work/prefix/include" consumer_kv8.c -o "$work/installed" \
    "$(find "$work/prefix" -name 'libkv8.so')" || fail "libkv8 is not whole without libkv8_engine"
engine=$(find "$work/prefix" -name '*engine*' -o -name 'model.h' -o -name 'tokenizer.h')
[ -z "$engine" ] || fail "KV8_ENGINE=OFF installs $engine"
echo "kv8 as a part of another project: add_subdirectory, and FetchContent with libkv8 alone"
