"""reference.py - attention by its definition, in float64, one row and head at a time; and the inputs
of the tests. It shares nothing with the package that is tested.

SPDX-License-Identifier: Apache-2.0
"""

import ml_dtypes
import numpy as np

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
         "e4m3": ml_dtypes.float8_e4m3fn, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
         "e5m2": ml_dtypes.float8_e5m2}


def attention(q, k, v, *, sm_scale=None, k_scale=1.0, v_scale=1.0, sinks=None, causal=True,
              window_left=-1, window_right=-1, soft_cap=0.0, mask=None):
    """o [rows, heads, dim_v] and lse [rows, heads] of one request: q [rows, heads, dim], k and v
    [keys, kv_heads, dim]. Scales are [kv_heads]."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    rows, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    k = k * np.broadcast_to(k_scale, kv_heads)[None, :, None]
    v = v * np.broadcast_to(v_scale, kv_heads)[None, :, None]
    scale = 1 / np.sqrt(dim) if sm_scale is None else sm_scale
    o = np.zeros((rows, heads, v.shape[2]))
    lse = np.full((rows, heads), -np.inf)
    at = np.arange(keys)
    for r in range(rows):
        position = keys - rows + r
        sees = np.ones(keys, bool)
        if causal:
            sees &= at <= position
        if window_left >= 0:
            sees &= at >= position - window_left
        if window_right >= 0:
            sees &= at <= position + window_right
        if mask is not None:
            sees &= mask[r]
        if not sees.any():
            continue
        for h in range(heads):
            g = h // (heads // kv_heads)
            s = scale * (k[sees, g] @ q[r, h])
            if soft_cap:
                s = soft_cap * np.tanh(s / soft_cap)
            lse[r, h] = np.log(np.exp(s - s.max()).sum()) + s.max()
            sink = -np.inf if sinks is None else float(sinks[h])
            m = max(s.max(), sink)
            p = np.exp(s - m)
            o[r, h] = p @ v[sees, g] / (p.sum() + np.exp(sink - m))
    return o, lse


def close(got, wanted, row_bound, what=""):
    """Every row of `got` within row_bound of `wanted`, by norms over its last axis."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    error = np.linalg.norm(got - wanted, axis=-1)
    size = np.linalg.norm(wanted, axis=-1)
    bad = ~(error <= row_bound * np.maximum(size, 1e-6))
    assert not bad.any(), f"{what}: row {np.argwhere(bad)[0]} is off by {(error / size)[bad].max()}"


def close_lse(got, wanted, bound):
    got = np.asarray(got).astype(np.float64)
    assert got.shape == wanted.shape
    empty = np.isneginf(wanted)
    assert (np.isneginf(got) == empty).all()
    assert not (~(np.abs(got[~empty] - wanted[~empty]) <= bound)).any()


def random(rng, shape, dtype="f32", scale=1.0):
    """Codes of normal values / scale."""
    return (rng.standard_normal(shape) / scale).astype(np.float32).astype(NUMPY[dtype])


def bounds(*dtypes):
    """Row and lse bounds: of f32 arithmetic, or where something of 16 bits is rounded."""
    return (3e-5, 1e-5) if set(dtypes) <= {"f32"} else (8e-3, 2e-3)
