"""python -m kv8: the program kv8 in this process's place.

SPDX-License-Identifier: Apache-2.0
"""

import os
import sys
from pathlib import Path


def main() -> None:
    program = str(Path(__file__).parent / "bin" / "kv8")
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
