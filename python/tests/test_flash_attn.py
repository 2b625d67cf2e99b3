"""kv8.flash_attn by the cases that FlashAttention and vLLM document, against float64.

SPDX-License-Identifier: Apache-2.0
"""

import numpy as np
import pytest

import kv8
from arrays import LIBRARIES, back, of
from kv8 import flash_attn as fa
from reference import attention, bounds, close, close_lse, random

pytestmark = pytest.mark.parametrize("library", LIBRARIES)


def with_sinks(lse, sinks):
    return lse if sinks is None else np.logaddexp(lse, sinks)


def block_pool(rng, lens, block, heads, dim, dtype, scale=1.0):
    """Blocks with NaN where nobody looks, a table, and each request's rows."""
    width = max(-(-n // block) for n in lens)
    total = len(lens) * width + 2
    pool = np.full((total, block, heads, dim), np.nan, np.float32).astype(random(rng, (1,), dtype).dtype)
    table = rng.permutation(total)[: len(lens) * width].reshape(len(lens), width).astype(np.int32)
    rows = [random(rng, (n, heads, dim), dtype, scale) for n in lens]
    for b, own in enumerate(rows):
        for i, row in enumerate(own):
            pool[table[b, i // block], i % block] = row
    return pool, table, rows


@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("window", [(-1, -1), (37, 0)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_varlen_paged(rng, library, kv_dtype, window, sinks, softcap):
    """vLLM's call: sink, window, FP8 and descales [seqs, heads] together, prefill beside decode."""
    q_lens, lens, heads, dim = [1, 17, 5], [129, 17, 300], 2, 64
    k, table, k_rows = block_pool(rng, lens, 16, heads, dim, kv_dtype, 0.6)
    v = np.full_like(k, np.nan)
    v_rows = [random(rng, (n, heads, dim), kv_dtype) for n in lens]
    for b, own in enumerate(v_rows):
        for i, row in enumerate(own):
            v[table[b, i // 16], i % 16] = row
    cu = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
    q = random(rng, (23, 8, dim), "bf16")
    sink = rng.standard_normal(8).astype(np.float32) if sinks else None
    scaled = kv_dtype != "bf16"
    k_scale = np.array([[0.5, 0.75], [0.25, 2], [1, 0.6]], np.float32) if scaled else None
    v_scale = np.array([[3, 0.1], [0.5, 1], [2, 0.3]], np.float32) if scaled else None
    out = np.zeros_like(q)
    out_in = of(library, out)
    o, lse = fa.flash_attn_varlen_func(
        of(library, q), of(library, k), of(library, v), max(q_lens), of(library, cu), max(lens),
        seqused_k=of(library, np.array(lens, np.int32)), softmax_scale=0.1, causal=True,
        window_size=window, softcap=softcap, block_table=of(library, table), out=out_in,
        k_descale=of(library, k_scale), v_descale=of(library, v_scale), s_aux=of(library, sink),
        return_softmax_lse=True)
    assert o is out_in and lse.shape == (8, 23)
    for b in range(3):
        rows = slice(cu[b], cu[b + 1])
        wanted, wanted_lse = attention(
            q[rows], k_rows[b], v_rows[b], sm_scale=0.1, causal=True, window_left=window[0],
            soft_cap=softcap, sinks=sink, k_scale=k_scale[b] if scaled else 1,
            v_scale=v_scale[b] if scaled else 1)
        close(back(o)[rows], wanted, 8e-3)
        close_lse(back(lse).T[rows], with_sinks(wanted_lse, sink), 2e-3)


@pytest.mark.parametrize("causal,window", [(True, (-1, -1)), (False, (-1, -1)), (False, (3, 5)),
                                           (False, (-1, 2)), (True, (7, 9))])
def test_varlen_ragged(rng, library, causal, window):
    q, k, v = random(rng, (11, 4, 40)), random(rng, (30, 4, 40)), random(rng, (30, 4, 24))
    cu_q, cu_k = np.array([0, 4, 11], np.int32), np.array([0, 9, 30], np.int32)
    o = fa.flash_attn_varlen_func(of(library, q), of(library, k), of(library, v), 7, of(library, cu_q),
                                  21, of(library, cu_k), causal=causal, window_size=window)
    for b in range(2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        wanted, _ = attention(q[rows], k[keys], v[keys], causal=causal, window_left=window[0],
                              window_right=-1 if causal else window[1])
        close(back(o)[rows], wanted, 3e-5)


def test_varlen_seqused_and_chunks(rng, library):
    q, k, v = random(rng, (10, 2, 32)), random(rng, (40, 2, 32)), random(rng, (40, 2, 32))
    cu_q, cu_k = np.array([0, 4, 10], np.int32), np.array([0, 16, 40], np.int32)
    used_q, used_k = np.array([2, 6], np.int32), np.array([11, 24], np.int32)
    out = np.full((10, 2, 32), 5, np.float32)
    fa.flash_attn_varlen_func(
        of(library, q), of(library, k), of(library, v), 6, of(library, cu_q), 24, of(library, cu_k),
        seqused_k=of(library, used_k), seqused_q=of(library, used_q), causal=True,
        out=(given := of(library, out)))
    given = back(given)
    assert (given[2:4] == 5).all()
    for b in range(2):
        n, keys = used_q[b], slice(cu_k[b], cu_k[b] + used_k[b])
        rows = slice(cu_q[b], cu_q[b] + n)
        close(given[rows], attention(q[rows], k[keys], v[keys])[0], 3e-5)
    o = fa.flash_attn_varlen_func(of(library, q), of(library, k), of(library, v), 6, of(library, cu_q),
                                  24, of(library, cu_k), causal=True, attention_chunk=7)
    for b in range(2):
        keys = slice(cu_k[b], cu_k[b + 1])
        n, m = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        at = m - n + np.arange(n)
        mask = np.arange(m)[None] >= (at - at % 7)[:, None]
        rows = slice(cu_q[b], cu_q[b + 1])
        close(back(o)[rows], attention(q[rows], k[keys], v[keys], mask=mask)[0], 3e-5)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("keys", [128, 1024])
def test_gpt_oss_sinks(rng, library, batch, keys):
    """64/8 heads of 64 with sink, window, FP8, distinct scales: decode."""
    k, table, k_rows = block_pool(rng, [keys] * batch, 16, 8, 64, "e4m3", 0.4)
    v_rows = [random(rng, (keys, 8, 64), "e4m3") for _ in range(batch)]
    v = np.full_like(k, np.nan)
    for b, own in enumerate(v_rows):
        v[table[b]] = own.reshape(-1, 16, 8, 64)
    q, sinks = random(rng, (batch, 64, 64), "bf16"), rng.standard_normal(64).astype(np.float32) * 2
    k_scale, v_scale = np.linspace(0.3, 0.6, 8, dtype=np.float32), np.linspace(2, 1, 8, dtype=np.float32)
    for window in ((-1, -1), (127, 0)):
        o = fa.flash_attn_varlen_func(
            of(library, q), of(library, k), of(library, v), 1,
            of(library, np.arange(batch + 1, dtype=np.int32)), keys,
            seqused_k=of(library, np.full(batch, keys, np.int32)), causal=True, window_size=window,
            block_table=of(library, table), k_descale=of(library, np.tile(k_scale, (batch, 1))),
            v_descale=of(library, np.tile(v_scale, (batch, 1))), s_aux=of(library, sinks))
        for b in range(batch):
            wanted, _ = attention(q[b: b + 1], k_rows[b], v_rows[b], sinks=sinks, k_scale=k_scale,
                                  v_scale=v_scale, window_left=window[0])
            close(back(o)[b: b + 1], wanted, 8e-3)


def test_kvcache(rng, library):
    cache_k, cache_v = random(rng, (5, 24, 2, 32)), random(rng, (5, 24, 2, 32))
    q, new_k, new_v = random(rng, (2, 3, 4, 32)), random(rng, (2, 3, 2, 32)), random(rng, (2, 3, 2, 32))
    lens, index, pad = np.array([10, 20], np.int32), np.array([4, 1], np.int32), np.array([2, 0], np.int32)
    k_in, v_in = of(library, cache_k.copy()), of(library, cache_v.copy())
    o, lse = fa.flash_attn_with_kvcache(
        of(library, q), k_in, v_in, of(library, new_k), of(library, new_v),
        cache_seqlens=of(library, lens), cache_batch_idx=of(library, index),
        cache_leftpad=of(library, pad), causal=True, return_softmax_lse=True)
    assert o.shape == (2, 3, 4, 32) and lse.shape == (2, 4, 3)
    for b in range(2):
        rows = np.concatenate((cache_k[index[b], : lens[b]], new_k[b]))
        values = np.concatenate((cache_v[index[b], : lens[b]], new_v[b]))
        assert (back(k_in)[index[b], : lens[b] + 3] == rows).all()
        mask = np.tile(np.arange(len(rows)) >= pad[b], (3, 1))
        wanted, wanted_lse = attention(q[b], rows, values, mask=mask)
        close(back(o)[b], wanted, 3e-5)
        close_lse(back(lse)[b].T, wanted_lse, 1e-5)
    with pytest.raises(kv8.InvalidError, match="room for 24"):
        fa.flash_attn_with_kvcache(of(library, q), k_in, v_in, of(library, new_k), of(library, new_v),
                                   cache_seqlens=22)


def test_dense_and_combine(rng, library):
    q, k, v = (random(rng, (2, n, h, 64), "bf16") for n, h in ((5, 8), (30, 2), (30, 2)))
    sinks = rng.standard_normal(8).astype(np.float32)
    o = fa.flash_attn_func(*(of(library, x) for x in (q, k, v)), causal=True, softcap=10.0,
                           learnable_sink=of(library, sinks))
    parts = [fa.flash_attn_func(*(of(library, x) for x in (q, k[:, s], v[:, s])),
                                return_softmax_lse=True) for s in (slice(0, 9), slice(9, 30))]
    stack = np.stack if library == "numpy" else __import__("torch").stack
    whole, lse = fa.flash_attn_combine(stack([p[0] for p in parts]),
                                       stack([p[1].swapaxes(1, 2) for p in parts]))
    for b in range(2):
        close(back(o)[b], attention(q[b], k[b], v[b], soft_cap=10.0, sinks=sinks)[0], 8e-3)
        wanted, wanted_lse = attention(q[b], k[b], v[b], causal=False)
        close(back(whole)[b], wanted, 1e-2)
        close_lse(back(lse)[b], wanted_lse, 2e-3)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_vllm_store_and_attend(rng, library, kv_cache_dtype):
    key, value = random(rng, (20, 2, 32), "bf16"), random(rng, (20, 2, 32), "bf16")
    kind = {"auto": "bf16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}[kv_cache_dtype]
    pool = np.zeros((4, 8, 2, 32), np.uint8 if kind != "bf16" else key.dtype)
    caches = of(library, pool.copy()), of(library, pool.copy())
    slots = rng.permutation(32)[:20].astype(np.int64)
    slots[3] = -1
    k_scale, v_scale = np.array([0.5], np.float32), np.array([0.25], np.float32)
    fa.reshape_and_cache_flash(of(library, key), of(library, value), *caches, of(library, slots),
                               kv_cache_dtype, of(library, k_scale), of(library, v_scale))
    stored = np.asarray(caches[0]) if kind != "bf16" else back(caches[0])
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        row = stored[slot // 8, slot % 8]
        if kind == "bf16":
            assert (row == key[i].astype(np.float32)).all()
        else:
            wanted = kv8.narrow(key[i].astype(np.float32), kind, 0.5).codes
            assert (row == wanted.view(np.uint8)).all()
    assert (stored.reshape(32, -1)[np.setdiff1d(np.arange(32), slots)] == 0).all()
    with pytest.raises(kv8.UnsupportedError, match="kv_cache_dtype"):
        fa.reshape_and_cache_flash(of(library, key), of(library, value), *caches, of(library, slots),
                                   "nvfp4")


def test_unified_attention_is_varlen(rng, library):
    k, table, _ = block_pool(rng, [20, 33], 16, 2, 64, "e4m3")
    q, cu = random(rng, (3, 4, 64), "bf16"), np.array([0, 1, 3], np.int32)
    arguments = (of(library, cu), 2, of(library, np.array([20, 33], np.int32)), 33)
    sinks = of(library, np.ones(4, np.float32))
    out = of(library, np.zeros_like(q))
    fa.unified_attention(of(library, q), of(library, k), of(library, k), out, *arguments, 0.125, True,
                         (-1, -1), of(library, table), 0, None, 0.5, 2.0, sinks=sinks)
    o = fa.flash_attn_varlen_func(
        of(library, q), of(library, k), of(library, k), 2, arguments[0], 33, seqused_k=arguments[2],
        softmax_scale=0.125, causal=True, block_table=of(library, table), k_descale=0.5, v_descale=2.0,
        s_aux=sinks)
    assert (back(o) == back(out)).all() and back(out).any()
    small = of(library, np.zeros_like(q).astype(k.dtype))
    fa.unified_attention(of(library, q), of(library, k), of(library, k), small, *arguments, 0.125, True,
                         (-1, -1), of(library, table), 0, None, 0.5, 2.0, sinks=sinks,
                         output_scale=of(library, np.array([0.02], np.float32)))
    assert np.abs(back(small) * 0.02 - back(out)).max() <= 0.07 * np.abs(back(out)).max()


def test_merge_attn_states(rng, library):
    a, b = random(rng, (6, 4, 16)), random(rng, (6, 4, 16))
    lse_a, lse_b = random(rng, (4, 6)), random(rng, (4, 6))
    lse_a[1, 2] = np.inf
    lse_b[0, 0] = -np.inf
    out, out_lse = of(library, np.zeros_like(a)), of(library, np.zeros_like(lse_a))
    fa.merge_attn_states(out, of(library, a), of(library, lse_a), of(library, b), of(library, lse_b), out_lse)
    x, y = np.where(np.isinf(lse_a), -np.inf, lse_a).T, lse_b.T
    total = np.logaddexp(x, y)
    wanted = np.exp(x - total)[..., None] * a + np.exp(y - total)[..., None] * b
    close(back(out), wanted.astype(np.float64), 1e-5)
    close_lse(back(out_lse).T, total, 1e-5)


def test_lengths_of_the_host_are_seqused_k(rng, library):
    """host_kv_lens, as XPU's callers give them beside a block table."""
    k, table, _ = block_pool(rng, [33, 9], 16, 2, 32, "bf16", 0.6)
    q, cu = of(library, random(rng, (2, 4, 32), "bf16")), of(library, np.arange(3, dtype=np.int32))
    rest = (of(library, k), of(library, k), 1, cu, 33)
    lens, options = [33, 9], {"block_table": of(library, table), "causal": True}
    wanted = fa.flash_attn_varlen_func(q, *rest, seqused_k=of(library, np.array(lens, np.int32)), **options)
    got = fa.flash_attn_varlen_func(
        q, *rest, host_kv_lens=lens, num_splits_kv=4, is_mix_batch=False, **options)
    assert (back(got) == back(wanted)).all()
    with pytest.raises(ValueError, match="one of them"):
        fa.flash_attn_varlen_func(q, *rest, host_kv_lens=lens, seqused_k=lens, **options)


def test_without_keys_only_the_sinks_count(rng, library):
    q, none = random(rng, (2, 3, 8, 64), "bf16"), random(rng, (2, 0, 2, 64), "bf16")
    sinks = rng.standard_normal(8).astype(np.float32)
    q, none = of(library, q), of(library, none)
    assert not np.any(back(fa.flash_attn_func(q, none, none, causal=True)))
    o, lse = fa.flash_attn_func(q, none, none, return_softmax_lse=True)
    assert o.shape == (2, 3, 8, 64) and not np.any(back(o))
    assert np.array_equal(back(lse), np.full((2, 8, 3), -np.inf))
    lse = fa.flash_attn_func(q, none, none, learnable_sink=of(library, sinks),
                             return_softmax_lse=True)[1]
    close_lse(back(lse), np.broadcast_to(sinks[None, :, None], (2, 8, 3)), 1e-6)
    o = fa.flash_attn_varlen_func(q[0], none[0], none[0], cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 0])
    assert not np.any(back(o))
    assert fa.flash_attn_func(q[:, :0], q, q).shape == (2, 0, 8, 64)
    with pytest.raises(kv8.InvalidError, match=r"k_cache has shape \[2, 0, 2, 64\]"):
        fa.flash_attn_with_kvcache(q, none, none)


def test_refusals_name_the_argument(rng, library):
    q, k = of(library, random(rng, (2, 4, 32))), of(library, random(rng, (9, 2, 32)))
    cu_q, cu_k = of(library, np.array([0, 2], np.int32)), of(library, np.array([0, 9], np.int32))
    for name, value in (("dropout_p", 0.1), ("alibi_slopes", q), ("q_v", q), ("cp_world_size", 2),
                        ("return_attn_probs", True)):
        with pytest.raises(NotImplementedError, match=name):
            fa.flash_attn_varlen_func(q, k, k, 2, cu_q, 9, cu_k, **{name: value})
    with pytest.raises(ValueError, match="q_scale"):
        fa.flash_attn_varlen_func(q, k, k, 2, cu_q, 9, cu_k, q_descale=2.0)
    with pytest.raises(ValueError, match="^v is missing"):
        fa.flash_attn_varlen_func(q, k, None, 2, cu_q, 9, cu_k)
    with pytest.raises(ValueError, match="^v is missing"):
        fa.flash_attn_func(q[None], k[None], None)
    with pytest.raises(ValueError, match="^k_cache is missing"):
        fa.flash_attn_with_kvcache(q[None], None, k[None])
    with pytest.raises(ValueError, match="^v is missing: new k and v"):
        fa.flash_attn_with_kvcache(q[None], k[None], k[None], k=k[None, :1])
    if library == "torch":
        with pytest.raises(NotImplementedError, match="gradients"):
            fa.flash_attn_varlen_func(q.requires_grad_(), k, k, 2, cu_q, 9, cu_k)
    assert bounds("f32")


@pytest.mark.parametrize("lens", [[37, 128, 333, 1024], [129], [16, 1023]])
@pytest.mark.parametrize("heads", [1, 8, 16])
def test_mla_decode_over_a_latent_cache(rng, library, lens, heads):
    """As XPU's MLA decode is called: V is the first 512 of K's 576 elements, in place."""
    page = 64
    width = -(-max(lens) // page)
    cache = random(rng, (len(lens) * width, page, 1, 576), "bf16")
    table = rng.permutation(len(lens) * width).reshape(len(lens), width).astype(np.int32)
    q = random(rng, (len(lens), heads, 576), "bf16")
    pages = of(library, cache)
    o = fa.flash_attn_varlen_func(
        of(library, q), pages, pages[..., :512], 1, of(library, np.arange(len(lens) + 1, dtype=np.int32)),
        max(lens), seqused_k=of(library, np.array(lens, np.int32)), block_table=of(library, table),
        softmax_scale=576**-0.5, fa_version=2)
    for b, n in enumerate(lens):
        keys = cache[table[b]].reshape(-1, 1, 576)[:n]
        wanted, _ = attention(q[b: b + 1], keys, keys[..., :512], sm_scale=576**-0.5)
        close(back(o)[b: b + 1], wanted, 8e-3)


def test_varlen_in_another_order_is_refused(rng, library):
    """FlashAttention's: both cu_seqlens, then both lengths."""
    arrays = random(rng, (4, 4, 64)), random(rng, (4, 2, 64)), np.array([0, 4], np.int32)
    q, kv, cu = (of(library, x) for x in arrays)
    with pytest.raises(TypeError, match="before its cu_seqlens, as vLLM has them"):
        fa.flash_attn_varlen_func(q, kv, kv, cu, cu, 4, 4)
