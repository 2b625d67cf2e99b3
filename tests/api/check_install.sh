#!/bin/sh
# check_install.sh BUILD - installs into an empty prefix and uses what lies there as a stranger
# would: through pkg-config and through find_package, shared and static.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")"
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
cmake --install "$build" --prefix "$prefix" >"$work/log" || { cat "$work/log" >&2; exit 1; }

pc=$(find "$prefix" -name kv8.pc)
libdir=$(dirname "$(dirname "$pc")")
export PKG_CONFIG_PATH="$libdir/pkgconfig"
version=$(pkg-config --modversion kv8)
run() { # what, program...
    what=$1
    shift
    said=$("$@")
    if [ "$said" != "$version 1" ]; then
        echo "$what: printed \"$said\", must be \"$version 1\"" >&2
        exit 1
    fi
}
for library in kv8 kv8_engine; do
    # shellcheck disable=SC2046
    ${CC:-cc} consumer_$library.c -o "$work/shared" $(pkg-config --cflags --libs $library)
    run "pkg-config, shared $library" env LD_LIBRARY_PATH="$libdir" "$work/shared"
    archives="$libdir/lib$library.a"
    [ $library = kv8 ] || archives="$archives $libdir/libkv8.a"
    # shellcheck disable=SC2046,SC2086
    ${CC:-cc} consumer_$library.c -o "$work/static" $(pkg-config --cflags $library) $archives \
        $(pkg-config --static --libs $library | sed 's/-lkv8_engine//; s/-lkv8//')
    run "pkg-config, static $library" "$work/static"
    # The shared program must not have linked the library in, nor the static one need it.
    readelf -d "$work/shared" | grep -q "lib$library\.so\.0"
    if readelf -d "$work/static" | grep -q 'libkv8'; then
        echo "the static program needs libkv8.so" >&2
        exit 1
    fi
done
if readelf -d "$libdir/libkv8.so" | grep -qE 'jansson|pcre2'; then
    echo "libkv8.so needs libraries of libkv8_engine" >&2
    exit 1
fi

cmake -S consumer -B "$work/consumer" -DKV8_FROM=package -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 &&
    cmake --build "$work/consumer" >>"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
for program in kv8 kv8_static kv8_engine kv8_engine_static; do
    run "find_package, kv8::$program" "$work/consumer/consumer_$program"
done

if [ -x "$build/kv8" ]; then
    LD_LIBRARY_PATH="$libdir" "$prefix/bin/kv8" --help >/dev/null
fi
echo "installed to an empty prefix; used by pkg-config and CMake, shared and static"
