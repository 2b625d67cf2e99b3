"""Attention from numpy against its definition: pages, ragged rows, dense batches, sinks, windows.

SPDX-License-Identifier: Apache-2.0
"""

import numpy as np
import pytest

import kv8
from reference import attention, bounds, close, close_lse, random

K_SCALE = np.array([0.5, 2.0], np.float32)
V_SCALE = np.array([3.0, 0.25], np.float32)


def paged(rng, lens, page_size, heads, dim, dtype, layout="NHD", scale=1.0):
    """A pool with more pages than are used, NaN where nobody looks, and the rows of each request."""
    counts = [-(-n // page_size) for n in lens]
    total = sum(counts) + 3
    pool = np.full((total, page_size, heads, dim), np.nan, np.float32).astype(
        random(rng, (1,), dtype).dtype)
    order = rng.permutation(total)[: sum(counts)].astype(np.int32)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = []
    for b, n in enumerate(lens):
        own = random(rng, (n, heads, dim), dtype, scale)
        rows.append(own)
        for i, page in enumerate(order[indptr[b]: indptr[b + 1]]):
            part = own[i * page_size: (i + 1) * page_size]
            pool[page, : len(part)] = part
    last = np.array([n - (c - 1) * page_size if c else 0 for n, c in zip(lens, counts)], np.int32)
    if layout == "HND":
        pool = np.ascontiguousarray(pool.transpose(0, 2, 1, 3))
    return pool, (indptr, order, last), rows


def check(q, k_rows, v_rows, qo_indptr, o, lse, row_bound, lse_bound, **options):
    for b in range(len(k_rows)):
        rows = slice(qo_indptr[b], qo_indptr[b + 1])
        wanted, wanted_lse = attention(q[rows], k_rows[b], v_rows[b], **options)
        close(o[rows], wanted, row_bound, f"request {b}")
        if lse is not None:
            close_lse(lse[rows], wanted_lse, lse_bound)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("dtypes", [("f32", "f32"), ("bf16", "e4m3"), ("f16", "e5m2"),
                                    ("bf16", "bf16"), ("f32", "e4m3fnuz")])
def test_pages(rng, dtypes, page_size, layout):
    q_dtype, kv_dtype = dtypes
    lens, qo_indptr = [17, 1, 0, 40], np.array([0, 3, 4, 4, 9], np.int32)
    k_scale, v_scale = (K_SCALE, V_SCALE) if kv_dtype != q_dtype else (1.0, 1.0)
    k, table, k_rows = paged(rng, lens, page_size, 2, 24, kv_dtype, layout, 0.7)
    v, v_rows = np.full_like(k, np.nan), []
    for b, n in enumerate(lens):
        own = random(rng, (n, 2, 24), kv_dtype)
        v_rows.append(own)
        pages = v if layout == "NHD" else v.transpose(0, 2, 1, 3)
        for i in range(n):
            pages[table[1][table[0][b] + i // page_size], i % page_size] = own[i]
    q = random(rng, (9, 6, 24), q_dtype)
    sinks = rng.standard_normal(6).astype(np.float32)
    o, lse = kv8.attend(q, k, v, kv8.PageTable.csr(*table), qo_indptr, layout=layout, sinks=sinks,
                        window_left=20, k_scale=k_scale, v_scale=v_scale, return_lse=True)
    assert o.dtype == q.dtype
    check(q, k_rows, v_rows, qo_indptr, o, lse, *bounds(q_dtype), sinks=sinks, window_left=20,
          k_scale=k_scale, v_scale=v_scale)


def test_dense_table_is_csr(rng):
    k, (indptr, indices, last), _ = paged(rng, [33, 20], 16, 2, 32, "e4m3")
    v = random(rng, k.shape, "e4m3")
    q = random(rng, (2, 4, 32), "bf16")
    table = np.full((2, 3), -1, np.int32)
    for b in range(2):
        table[b, : indptr[b + 1] - indptr[b]] = indices[indptr[b]: indptr[b + 1]]
    a = kv8.attend(q, k, v, kv8.PageTable.csr(indptr, indices, last))
    b = kv8.attend(q, k, v, kv8.PageTable.dense(table, [33, 20]))
    assert (a == b).all()


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"causal": False, "window_right": 2},
                                     {"soft_cap": 5.0}, {"sm_scale": 0.3}, {"window_left": 0}])
def test_ragged_rows(rng, options):
    indptr = np.array([0, 5, 5, 30], np.int32)
    k, v = random(rng, (30, 2, 45), "f32"), random(rng, (30, 2, 16), "f32")
    q = random(rng, (7, 4, 45), "f32")
    qo_indptr = np.array([0, 2, 2, 7], np.int32)
    o, lse = kv8.attend(q, k, v, kv8.PageTable.ragged(indptr), qo_indptr, return_lse=True, **options)
    rows = [k[indptr[b]: indptr[b + 1]] for b in range(3)]
    values = [v[indptr[b]: indptr[b + 1]] for b in range(3)]
    check(q, rows, values, qo_indptr, o, lse, *bounds("f32"), **options)


def test_dense_batch_and_one_request(rng):
    q, k, v = (random(rng, (2, n, h, 64), "bf16") for n, h in ((3, 8), (19, 2), (19, 2)))
    o, lse = kv8.attend(q, k, v, return_lse=True)
    assert o.shape == (2, 3, 8, 64) and lse.shape == (2, 3, 8)
    for b in range(2):
        wanted, wanted_lse = attention(q[b], k[b], v[b])
        close(o[b], wanted, 8e-3)
        close_lse(lse[b], wanted_lse, 2e-3)
        close(kv8.attend(q[b], k[b], v[b]), wanted, 8e-3)


@pytest.mark.parametrize("batch, rows, keys", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_batches_without_elements(batch, rows, keys):
    """numpy gives such arrays strides of 0. A row that sees no key is 0."""
    q = np.empty((batch, rows, 4, 32), np.float32)
    q[...] = 1
    kv = np.empty((batch, keys, 2, 32), np.float32)
    o, lse = kv8.attend(q, kv, kv, return_lse=True)
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    assert not o.any() and (lse == -np.inf).all()


def test_masks_ranges_and_unused_rows(rng):
    q, k, v = random(rng, (6, 4, 32)), random(rng, (20, 2, 32)), random(rng, (20, 2, 32))
    qo_indptr, kv = np.array([0, 4, 6], np.int32), kv8.PageTable.ragged([0, 12, 20])
    masks = [rng.random((4, 12)) < 0.5, rng.random((2, 8)) < 0.5]
    masks[0][2] = False
    o, lse = kv8.attend(q, k, v, kv, qo_indptr, causal=False, mask=masks, return_lse=True)
    for b, (rows, keys) in enumerate(((slice(0, 4), slice(0, 12)), (slice(4, 6), slice(12, 20)))):
        wanted, wanted_lse = attention(q[rows], k[keys], v[keys], causal=False, mask=masks[b])
        close(o[rows], wanted, 3e-5)
        close_lse(lse[rows], wanted_lse, 1e-5)
    begin, end = np.array([0, 3, 11, 5, 0, 7]), np.array([1, 9, 12, 5, 8, 8])
    o = kv8.attend(q, k, v, kv, qo_indptr, causal=False, key_begin=begin, key_end=end)
    for r in range(6):
        keys = np.arange(12 if r < 4 else 8)
        seen = ((keys >= begin[r]) & (keys < end[r]))[None]
        base = slice(0, 12) if r < 4 else slice(12, 20)
        close(o[r: r + 1], attention(q[r: r + 1], k[base], v[base], causal=False, mask=seen)[0], 3e-5)
    out = np.full_like(q, 7)
    kv8.attend(q, k, v, kv, qo_indptr, qo_lens=[1, 2], out=out)
    assert (out[1:4] == 7).all() and not (out[[0, 4, 5]] == 7).any()


def test_one_plan_for_many_layers(rng):
    plan = kv8.AttentionPlan(num_qo_heads=4, num_kv_heads=2, head_dim=64, q_dtype="f32",
                             k_dtype="f32", page_size=8, max_batch=4, max_total_q=16, max_kv_len=64)
    k, table, k_rows = paged(rng, [9, 30], 8, 2, 64, "f32")
    batch = plan.prepare([0, 1, 3], kv8.PageTable.csr(*table))
    assert "kv8_attention_f32" in batch.describe()
    q = random(rng, (3, 4, 64))
    for layer in range(3):
        sinks = np.full(4, layer, np.float32)
        o = batch.run(q, k, k, sinks=sinks, v_scale=1.0 + layer)
        check(q, k_rows, k_rows, [0, 1, 3], o, None, *bounds("f32"), sinks=sinks, v_scale=1.0 + layer)
    wanted, wanted_lse = batch.reference(q, k, k, sinks=sinks, v_scale=3.0)
    close(o, wanted, 3e-5)
    lse = np.empty((4, 3), np.float32).T
    batch.run(q, k, k, lse=lse, lse_base2=True)
    close_lse(lse * np.log(2), wanted_lse, 2e-5)


def test_e4m3_queries_and_results(rng):
    q, k = random(rng, (4, 4, 64), "e4m3"), random(rng, (12, 2, 64), "e4m3")
    v = random(rng, (12, 2, 64), "e4m3")
    q_scale = np.array([[0.5, 2.0]], np.float32)
    real = q.astype(np.float32) * np.repeat(q_scale[0], 2)[None, :, None]
    o = kv8.attend(q, k, v, q_scale=q_scale)
    assert o.dtype == np.float32
    wanted, _ = attention(real, k, v)
    close(o, wanted, 8e-3)
    out = np.empty((4, 4, 64), q.dtype)
    kv8.attend(q, k, v, q_scale=q_scale, out=out, o_scale=0.01)
    close(out.astype(np.float32) * 0.01, wanted, 7e-2)
    rows = np.linspace(0.5, 2, 4 * 2 * 2, dtype=np.float32).reshape(4, 2, 2)
    o = kv8.attend(q, k, v, q_scale=rows)
    close(o, attention(q.astype(np.float32) * rows.reshape(4, 4, 1), k, v)[0], 8e-3)


def test_merge_and_sink(rng):
    q, k, v = random(rng, (5, 4, 32)), random(rng, (40, 2, 32)), random(rng, (40, 2, 32))
    sinks = rng.standard_normal(4).astype(np.float32)
    parts = [kv8.attend(q, k[s], v[s], causal=False, return_lse=True)
             for s in (slice(0, 13), slice(13, 40))]
    o, lse = kv8.merge(*parts[0], *parts[1])
    wanted, wanted_lse = attention(q, k, v, causal=False, sinks=sinks)
    close(kv8.apply_sink(o, lse, sinks), wanted, 3e-5)
    close_lse(lse, wanted_lse, 1e-5)


def test_codes_without_their_dtype(rng):
    q, k, v = random(rng, (2, 4, 64), "bf16"), random(rng, (9, 2, 64), "e4m3"), random(rng, (9, 2, 64), "e5m2")
    plain = kv8.attend(q, k, v)
    codes = kv8.attend(q.view(np.uint16), k.view(np.uint8), v.view(np.uint8), q_dtype="bf16",
                       k_dtype="e4m3", v_dtype="e5m2")
    assert (codes.view(np.uint16) == plain.view(np.uint16)).all()
