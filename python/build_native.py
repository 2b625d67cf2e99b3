"""build_native.py - writes the C source of kv8._native from include/kv8.

The headers are preprocessed and given to cffi as they are, so no declaration is kept twice; the C
compiler that then compiles the source sees the headers themselves, and cffi refuses at import a
struct whose layout differs. Beside what the headers declare there are one kv8_py_init_<struct> for
every KV8_<STRUCT>_INIT, and what native_extra.h adds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import cffi

HERE = Path(__file__).parent


def preprocess(compiler: str, include: Path, header: Path) -> str:
    """The declarations of `header` without macros, comments and the C library's headers."""
    with tempfile.TemporaryDirectory() as empty:
        for name in ("stddef.h", "stdint.h"):
            (Path(empty) / name).touch()
        command = [compiler, "-E", "-P", "-nostdinc", "-U__GNUC__", "-U__clang__",
                   f"-I{empty}", f"-I{include}", str(header)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def initialisers(include: Path) -> list[str]:
    """Names of the structs that have an initialiser: "kv8_cache_options" by KV8_CACHE_OPTIONS_INIT."""
    text = "".join(path.read_text() for path in sorted(include.glob("kv8/*.h")))
    names = re.findall(r"#define (KV8_\w+)_INIT\b", text)
    return sorted({name.lower() for name in names})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    header = arguments.include / "kv8" / "kv8_engine.h"
    declarations = preprocess(arguments.compiler, arguments.include, header)
    source = ["#include <kv8/kv8_engine.h>", (HERE / "native_extra.h").read_text()]
    for name in initialisers(arguments.include):
        function = f"void kv8_py_init_{name}({name} *value)"
        declarations += function + ";\n"
        source.append(f"static {function} {{ const {name} init = {name.upper()}_INIT; *value = init; }}")

    builder = cffi.FFI()
    builder.cdef(declarations)
    builder.cdef((HERE / "native_extra_cdef.h").read_text())
    builder.set_source("kv8._native", "\n".join(source))
    builder.emit_c_code(str(arguments.out))


if __name__ == "__main__":
    main()
