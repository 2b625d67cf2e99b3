"""Rotary functions of the faces against rotation by complex numbers in float64.

SPDX-License-Identifier: Apache-2.0
"""

import math

import numpy as np
import pytest

import kv8
import kv8.flashinfer as fi
from arrays import LIBRARIES, back, of
from kv8 import flash_attn as fa
from reference import attention, close, random

pytestmark = pytest.mark.parametrize("library", LIBRARIES)


def turned(x, angle, interleaved):
    """x [n, heads, dim], the pairs of the first 2 * angle.shape[1] elements turned by angle."""
    half, x = angle.shape[1], x.astype(np.float64)
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
        slice(0, half), slice(half, 2 * half))
    z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)[:, None]
    out = x.copy()
    out[..., a], out[..., b] = z.real, z.imag
    return out


def frequencies(dim, theta, llama31=None, scale=1.0):
    freq = theta ** (-np.arange(0, dim, 2) / dim)
    if llama31 is None:
        return freq / scale
    low, high, old = llama31
    smooth = np.clip((old * freq / (2 * math.pi) - low) / (high - low), 0, 1)
    return (1 - smooth) * freq / scale + smooth * freq


def near(got, wanted, bits=8):
    assert np.abs(back(got) - wanted).max() <= 2.0**-bits * np.abs(wanted).max() + 1e-6


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32])
@pytest.mark.parametrize("llama31", [None, (1.0, 4.0, 8192)])
def test_positions_and_frequencies(rng, library, interleave, rotary_dim, llama31):
    lens, offsets = [3, 0, 5], [7, 0, 100000]
    indptr = np.cumsum([0, *lens]).astype(np.int32)
    positions = np.concatenate([o + np.arange(n) for n, o in zip(lens, offsets)]).astype(np.int32)
    q, k = random(rng, (8, 4, 64), "bf16"), random(rng, (8, 2, 64), "bf16")
    freq = frequencies(rotary_dim or 64, 5e5, llama31, 8.0)
    wanted = [turned(x.astype(np.float32), positions[:, None] * freq, interleave) for x in (q, k)]
    options = (rotary_dim, interleave, 8.0, 5e5)
    one = (fi.apply_rope if llama31 is None else fi.apply_llama31_rope)(
        of(library, q), of(library, k), of(library, indptr), of(library, np.array(offsets, np.int32)),
        *options)
    two = (fi.apply_rope_pos_ids if llama31 is None else fi.apply_llama31_rope_pos_ids)(
        of(library, q), of(library, k), of(library, positions), *options)
    inplace = of(library, q), of(library, k)
    (fi.apply_rope_pos_ids_inplace if llama31 is None else fi.apply_llama31_rope_pos_ids_inplace)(
        *inplace, of(library, positions), *options)
    for got in (one, two, inplace):
        for x, y in zip(got, wanted):
            near(x, y)


@pytest.mark.parametrize("is_neox", [False, True])
def test_cache_of_angles_and_quantised(rng, library, is_neox):
    angle = np.arange(50)[:, None] * frequencies(32, 1e4)
    cache = np.concatenate((np.cos(angle), np.sin(angle)), 1).astype(np.float32)
    positions = np.array([0, 49, 3, 3], np.int64)
    q, k = random(rng, (4, 6 * 48), "f32"), random(rng, (4, 48), "f32")
    wanted = [turned(x.reshape(4, -1, 48), angle[positions], not is_neox) for x in (q, k)]
    got = fi.apply_rope_with_cos_sin_cache(
        of(library, positions), of(library, q), of(library, k), 48, of(library, cache), is_neox)
    for x, y in zip(got, wanted):
        near(x, y.reshape(4, -1), 20)
    heads = q.reshape(4, 6, 48)
    out = fi.rope_quantize_fp8(
        of(library, heads[..., :32].copy()), of(library, k[:, :32].copy()),
        of(library, heads[..., 32:].copy()), None, of(library, cache), of(library, positions), is_neox,
        quant_scale_q=200.0, quant_scale_kv=0.5)
    wanted = [turned(heads[..., :32], angle[positions], not is_neox) * 200,
              turned(k[:, None, :32], angle[positions], not is_neox)[:, 0] * 0.5, heads[..., 32:] * 200]
    assert out[3] is None
    for x, y in zip(out, wanted):
        exact = kv8.widen(kv8.narrow(y.astype(np.float32), "e4m3").codes, "e4m3")
        assert np.abs(back(x) - exact).max() <= 32  # a step, where float32 stood on an edge
        assert (back(x) == exact).mean() > 0.99 and np.abs(back(x)).max() <= 448
    with pytest.raises(NotImplementedError, match="quantize_dtype"):
        fi.rope_quantize_fp8(*[of(library, heads)] * 4, of(library, cache), of(library, positions),
                             quantize_dtype="bf16")


@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_rotates_q_and_new_keys(rng, library, causal):
    batch, rows, room, lens = 2, 3, 32, np.array([9, 20], np.int32)
    q = random(rng, (batch, rows, 4, 64), "f32")
    new = [random(rng, (batch, rows, 2, 64), "f32") for _ in "kv"]
    caches = [random(rng, (batch, room, 2, 64), "f32") for _ in "kv"]
    angle = np.arange(room)[:, None] * frequencies(48, 1e4)
    tables = [f(angle).astype(np.float32) for f in (np.cos, np.sin)]
    stored = [of(library, x) for x in caches]
    o = fa.flash_attn_with_kvcache(
        of(library, q), *stored, *(of(library, x) for x in new), *(of(library, x) for x in tables),
        cache_seqlens=of(library, lens), causal=causal, rotary_interleaved=False)
    for b in range(batch):
        at = lens[b] + np.arange(rows)
        turned_k = turned(new[0][b], angle[at], False)
        turned_q = turned(q[b], angle[at if causal else at * 0 + lens[b]], False)
        near(back(stored[0])[b, at], turned_k, 20)
        keys = np.concatenate((caches[0][b][: lens[b]], turned_k)).astype(np.float32)
        values = np.concatenate((caches[1][b][: lens[b]], new[1][b]))
        wanted, _ = attention(turned_q.astype(np.float32), keys, values, causal=causal)
        close(back(o)[b], wanted, 1e-4)
    with pytest.raises(ValueError, match="rotary_seqlens"):
        fa.flash_attn_with_kvcache(of(library, q), *stored, rotary_seqlens=of(library, lens))
