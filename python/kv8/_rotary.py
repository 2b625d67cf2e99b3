"""Rotation of rows in float32, of numpy arrays and torch tensors where they lie.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._tensor import _TO_FOREIGN, host_array, is_torch, numpy_dtype
from .formats import dtype_max, narrow, widen


def angles(inv_freq: Any, positions: Any, x: Any) -> tuple[Any, Any]:
    """Cosines and sines [n, dim / 2] of positions [n], where x lies. Products are float64: a float32
    of 100000 radians is off by 0.004."""
    if is_torch(x):
        import torch

        at = torch.as_tensor(positions, device=x.device).double()
        turned = at[:, None] * torch.as_tensor(inv_freq, device=x.device).double()
        return turned.cos().float(), turned.sin().float()
    at = host_array(positions, "positions", np.int64)
    turned = at[:, None] * inv_freq.astype(np.float64)
    return np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)


def as_float(x: Any) -> Any:
    """x in float32."""
    if is_torch(x):
        return x.float()
    return x if x.dtype == np.float32 else widen(x)


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """x [n, heads, dim] in float32, the first 2 * cos.shape[1] elements of a head rotated: pairs (i,
    i + half), or (2i, 2i + 1) where interleaved."""
    half = cos.shape[-1]
    values = as_float(x)
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = values[..., first], values[..., second]
    out = values.clone() if is_torch(values) else values.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def in_form(values: Any, form: str, scale: float) -> Any:
    """values * scale in an 8-bit format: nearest even, saturated."""
    values = as_float(values) * np.float32(scale).item()
    if is_torch(values):
        import torch

        limit = dtype_max(form)
        return values.clamp(-limit, limit).to(getattr(torch, _TO_FOREIGN[form]))
    return narrow(values, form).codes.view(numpy_dtype(form))
