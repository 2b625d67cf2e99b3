"""arrays.py - the same test from numpy and from torch.

SPDX-License-Identifier: Apache-2.0
"""

import numpy as np
import pytest

try:
    import torch
except ImportError:
    torch = None

from reference import NUMPY

LIBRARIES = ["numpy", pytest.param("torch", marks=pytest.mark.skipif(torch is None, reason="no torch"))]
_TORCH_VIEWS = {
    "bfloat16": ("int16", "bfloat16"),
    "float8_e4m3fn": ("uint8", "float8_e4m3fn"),
    "float8_e5m2": ("uint8", "float8_e5m2"),
    "float8_e4m3fnuz": ("uint8", "float8_e4m3fnuz"),
}


def of(library, x, device="cpu"):
    """A numpy array as one of `library`."""
    if library == "numpy" or x is None:
        return x
    x = np.ascontiguousarray(x)
    if x.dtype.name in _TORCH_VIEWS:
        plain, name = _TORCH_VIEWS[x.dtype.name]
        return torch.from_numpy(x.view(plain).copy()).view(getattr(torch, name)).to(device)
    return torch.from_numpy(x.copy()).to(device)


def back(x):
    """An array of either library as float32 numpy."""
    if torch is not None and isinstance(x, torch.Tensor):
        return x.detach().float().cpu().numpy()
    return np.asarray(x).astype(np.float32)


def dtype_in(library, name):
    """A dtype by kv8's name."""
    numpy_dtype = np.dtype(NUMPY[name])
    return numpy_dtype if library == "numpy" else getattr(torch, numpy_dtype.name)
