"""The examples run.

SPDX-License-Identifier: Apache-2.0
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(name, *arguments):
    path = str(ROOT / "python" / "examples" / name)
    done = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy():
    lines = run("numpy_formats.py").splitlines()
    errors = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    assert errors["f16"] < errors["bf16"] < errors["int8"] < errors["e4m3"] < errors["e5m2"] < 0.2


def test_torch():
    pytest.importorskip("torch")
    assert "equal" in run("torch_kernels.py")


def test_transformers():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = ROOT / "models" / "tiny-gpt-oss"
    assert "e4m3" in run("hf_fp8_cache.py", str(model), str(model / "held.txt"))
