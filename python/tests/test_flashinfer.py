"""kv8.flashinfer by the cases that FlashInfer documents, against float64.

SPDX-License-Identifier: Apache-2.0
"""

import logging

import numpy as np
import pytest

import kv8
import kv8.flashinfer as fi
from arrays import LIBRARIES, back, dtype_in, of
from reference import attention, close, close_lse, random

pytestmark = pytest.mark.parametrize("library", LIBRARIES)
LN2 = np.log(2)


class Pages:
    """Requests' K and V in one pool of some layout, and the rows they are."""

    def __init__(self, rng, lens, size, heads, dim, dtype, layout="NHD"):
        counts = [-(-n // size) for n in lens]
        self.indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.indices = rng.permutation(sum(counts) + 2)[: sum(counts)].astype(np.int32)
        self.last = np.array([n - (c - 1) * size if c else 0 for n, c in zip(lens, counts)], np.int32)
        self.k = [random(rng, (n, heads, dim), dtype) for n in lens]
        self.v = [random(rng, (n, heads, dim), dtype) for n in lens]
        pool = np.full((sum(counts) + 2, 2, size, heads, dim), np.nan, np.float32)
        self.pool = pool.astype(random(rng, (1,), dtype).dtype)
        for which, rows in enumerate((self.k, self.v)):
            for b, own in enumerate(rows):
                for i, row in enumerate(own):
                    self.pool[self.indices[self.indptr[b] + i // size], which, i % size] = row
        if layout == "HND":
            self.pool = np.ascontiguousarray(self.pool.swapaxes(2, 3))

    def table(self, library):
        return [of(library, x) for x in (self.indptr, self.indices, self.last)]

    def cache(self, library, split):
        if split:
            return of(library, self.pool[:, 0].copy()), of(library, self.pool[:, 1].copy())
        return of(library, self.pool)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("sinks", [False, True])
def test_decode(rng, library, layout, split, kv_dtype, sinks):
    pages = Pages(rng, [17, 54, 97], 16, 4, 64, kv_dtype, layout)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(None, layout, use_tensor_cores=True)
    sink = rng.standard_normal(8).astype(np.float32) if sinks else None
    wrapper.plan(*pages.table(library), 8, 4, 64, 16, q_data_type=dtype_in(library, "bf16"),
                 kv_data_type=dtype_in(library, kv_dtype), window_left=33, logits_soft_cap=20.0,
                 use_sinks=sinks)
    q = random(rng, (3, 8, 64), "bf16")
    scales = {} if kv_dtype == "bf16" else {"k_scale": 0.5, "v_scale": 2.0}
    o, lse = wrapper.run(of(library, q), pages.cache(library, split), sinks=of(library, sink),
                         return_lse=True, **scales)
    for b in range(3):
        wanted, wanted_lse = attention(q[b: b + 1], pages.k[b], pages.v[b], sinks=sink, window_left=33,
                                       soft_cap=20.0, **scales)
        close(back(o)[b: b + 1], wanted, 8e-3)
        wanted_lse = wanted_lse if sink is None else np.logaddexp(wanted_lse, sink)
        close_lse(back(lse)[b: b + 1] * LN2, wanted_lse, 2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "custom", "packed"])
def test_prefill_paged_and_ragged(rng, library, causal, masked):
    pages = Pages(rng, [9, 30], 5, 2, 32, "f16")
    qo_indptr, kv_lens = np.array([0, 4, 11], np.int32), [9, 30]
    q = random(rng, (11, 4, 32), "f16")
    masks = [rng.random((n, m)) < 0.7 for n, m in ((4, 9), (7, 30))]
    options = {"causal": causal, "window_left": 12 if masked is None else -1}
    if masked == "custom":
        options["custom_mask"] = of(library, np.concatenate([m.reshape(-1) for m in masks]))
    if masked == "packed":
        bits = [np.packbits(m.reshape(-1), bitorder="little") for m in masks]
        options["packed_custom_mask"] = of(library, np.concatenate(bits))
    paged = fi.BatchPrefillWithPagedKVCacheWrapper()
    paged.plan(of(library, qo_indptr), *pages.table(library), 4, 2, 32, 5, **options)
    o = paged.run(of(library, q), pages.cache(library, False))
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper()
    kv_indptr = np.array([0, 9, 39], np.int32)
    ragged.plan(of(library, qo_indptr), of(library, kv_indptr), 4, 2, 32, **options)
    rows_of = [of(library, q), *(of(library, np.concatenate(x)) for x in (pages.k, pages.v))]
    r = ragged.run(*rows_of)
    for again in (ragged.forward_return_lse(*rows_of), ragged.run_return_lse(*rows_of)):
        assert (back(again[0]) == back(r)).all() and again[1].shape == (11, 4)
    assert kv_lens == [len(x) for x in pages.k]
    for b in range(2):
        rows = slice(qo_indptr[b], qo_indptr[b + 1])
        wanted, _ = attention(
            q[rows], pages.k[b], pages.v[b], causal=causal and masked is None,
            mask=masks[b] if masked else None, window_left=options["window_left"])
        close(back(o)[rows], wanted, 8e-3)
        close(back(r)[rows], wanted, 8e-3)


def test_sink_wrapper_and_refusals(rng, library):
    pages = Pages(rng, [40], 16, 8, 64, "e4m3")
    sinks = rng.standard_normal(64).astype(np.float32)
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(
        None, q_data_type="bfloat16", kv_data_type="float8_e4m3fn", window_left=20)
    wrapper.plan(of(library, np.array([0, 3], np.int32)), *pages.table(library), 64, 8, 64, 16, causal=True)
    q = random(rng, (3, 64, 64), "bf16")
    o = wrapper.run(of(library, q), pages.cache(library, True), of(library, sinks), 0.1)
    close(back(o), attention(q, pages.k[0], pages.v[0], sinks=sinks, sm_scale=0.1, window_left=20)[0], 8e-3)
    again = wrapper.forward(of(library, q), pages.cache(library, True), of(library, sinks), 0.1)
    assert (back(again) == back(o)).all()
    assert "k e4m3, v e4m3, sinks" in wrapper.describe()
    plain = fi.BatchDecodeWithPagedKVCacheWrapper(None)
    for mode in ({"pos_encoding_mode": "ROPE_LLAMA"}, {"window_right": 3}):
        with pytest.raises(NotImplementedError, match=next(iter(mode))):
            plan = pages.table(library)
            plain.plan(*plan, 64, 8, 64, 16, **mode)
    for q_type in ("float8_e4m3fn", "float32"):
        plain.plan(*pages.table(library), 64, 8, 64, 16, q_data_type=q_type, kv_data_type="float8_e4m3fn")
        one = of(library, random(rng, (1, 64, 64), "e4m3" if "8" in q_type else "f32"))
        with pytest.raises(NotImplementedError, match="query"):
            plain.run(one, pages.cache(library, True), sinks=of(library, sinks))
    plain.plan(*pages.table(library), 64, 8, 64, 16, q_data_type="bfloat16", use_sinks=True,
               kv_data_type="float8_e4m3fn")
    with pytest.raises(ValueError, match="without sinks"):
        plain.run(of(library, q[:1]), pages.cache(library, True))


def test_the_kernel_is_logged(rng, library, caplog):
    pages = Pages(rng, [40], 16, 8, 64, "e4m3")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*pages.table(library), 64, 8, 64, 16, q_data_type="bfloat16",
                 kv_data_type="float8_e4m3fn")
    with caplog.at_level(logging.DEBUG, "kv8"):
        wrapper.run(of(library, random(rng, (1, 64, 64), "bf16")), pages.cache(library, True),
                    sinks=of(library, np.zeros(64, np.float32)))
    assert wrapper.describe() in caplog.text and "kv8_attention" in caplog.text


def test_single_requests(rng, library):
    q, k, v = random(rng, (5, 4, 64), "bf16"), random(rng, (20, 2, 64), "bf16"), random(rng, (20, 2, 64), "bf16")
    hnd = [of(library, np.ascontiguousarray(x.swapaxes(0, 1))) for x in (k, v)]
    o, lse = fi.single_prefill_with_kv_cache_return_lse(of(library, q), *hnd, causal=True, kv_layout="HND",
                                                        scale_v=3.0, logits_soft_cap=9.0)
    wanted, wanted_lse = attention(q, k, v, v_scale=3.0, soft_cap=9.0)
    close(back(o), wanted, 8e-3)
    close_lse(back(lse) * LN2, wanted_lse, 2e-3)
    o = fi.single_decode_with_kv_cache(of(library, q[4]), of(library, k), of(library, v), q_scale=2.0,
                                       window_left=7)
    close(back(o)[None], attention(q[4:] * 2, k, v, window_left=7)[0], 8e-3)


def test_append_and_batch_attention(rng, library):
    lens, page = np.array([11, 20], np.int32), 8
    pages = Pages(rng, lens, page, 2, 32, "bf16")
    cache = pages.cache(library, True)
    indptr = np.array([0, 3, 8], np.int32)
    k, v = random(rng, (8, 2, 32), "bf16"), random(rng, (8, 2, 32), "bf16")
    b, at = fi.get_batch_indices_positions(of(library, indptr), of(library, lens), 8)
    assert back(at).tolist() == [8, 9, 10, 15, 16, 17, 18, 19] and back(b).tolist() == [0] * 3 + [1] * 5
    got = fi.get_seq_lens(*(of(library, x) for x in (pages.indptr, pages.last)), page)
    assert back(got).tolist() == lens.tolist()
    table = pages.table(library)
    fi.append_paged_kv_cache(of(library, k), of(library, v), b, at, cache, table[1], table[0], table[2])
    q = random(rng, (8, 4, 32), "bf16")
    wrapper = fi.BatchAttention()
    wrapper.plan(of(library, indptr), table[0], table[1], of(library, lens), 4, 2, 32, 32, page, causal=True)
    o, _ = wrapper.run(of(library, q), cache)
    for i in range(2):
        rows = slice(indptr[i], indptr[i + 1])
        n = indptr[i + 1] - indptr[i]
        keys = np.concatenate((pages.k[i][:-n], k[rows]))
        values = np.concatenate((pages.v[i][:-n], v[rows]))
        close(back(o)[rows], attention(q[rows], keys, values)[0], 8e-3)
        capped, _ = wrapper.run(of(library, q), cache, logits_soft_cap=0.5)
        close(back(capped)[rows], attention(q[rows], keys, values, soft_cap=0.5)[0], 8e-3)
    o_again, _ = wrapper.run(of(library, q), cache)  # a cap of one run is not the next one's
    assert (back(o_again) == back(o)).all()


def test_cascade_and_shared_prefix(rng, library):
    own, shared = Pages(rng, [9, 17], 8, 2, 32, "f16"), random(rng, (2, 16, 2, 32), "f16")
    total = len(own.pool)
    pool = np.concatenate((own.pool, shared.reshape(2, 2, 8, 2, 32).swapaxes(0, 1)))
    q = random(rng, (2, 4, 32), "f16")
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2)
    ints = [np.array(x, np.int32) for x in ([0, 2], [0, 2], [total, total + 1], [8], [0, 1, 2])]
    first = [of(library, x) for x in ints]
    table = own.table(library)
    wrapper.plan([first[0], first[4]], [first[1], table[0]], [first[2], table[1]], [first[3], table[2]],
                 4, 2, 32, 8, causal=True)
    o = wrapper.run(of(library, q), of(library, pool))
    decode = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    decode.begin_forward(*table, 4, 2, 32, 8)
    d = decode.forward(of(library, q), of(library, shared[0]), of(library, shared[1]), own.cache(library, False))
    for b in range(2):
        k, v = (np.concatenate((shared[i], x[b])) for i, x in enumerate((own.k, own.v)))
        wanted, _ = attention(q[b: b + 1], k, v)
        close(back(o)[b: b + 1], wanted, 8e-3)
        close(back(d)[b: b + 1], wanted, 8e-3)


def test_merges(rng, library):
    v, s = random(rng, (6, 3, 4, 16)), random(rng, (6, 3, 4))
    o, lse = fi.merge_states(of(library, v), of(library, s))
    total = np.log2(np.exp2(s.astype(np.float64)).sum(1))
    close(back(o), (np.exp2(s - total[:, None])[..., None] * v).sum(1), 1e-5)
    close_lse(back(lse), total, 1e-5)
    a, b = of(library, v[:, 0].copy()), of(library, s[:, 0].copy())
    mask = np.array([1, 0, 1, 1, 0, 1], bool)
    fi.merge_state_in_place(a, b, of(library, v[:, 1].copy()), of(library, s[:, 1].copy()), of(library, mask))
    total = np.logaddexp2(s[:, 0], s[:, 1])
    assert (back(a)[~mask] == v[~mask, 0]).all() and np.abs(back(b)[mask] - total[mask]).max() < 1e-5


@pytest.mark.parametrize("joined", [False, True])
def test_latent_attention(rng, library, joined):
    lens = np.array([7, 30], np.int32)
    whole = random(rng, (6, 8, 576), "bf16", 2.0)
    indptr, indices = np.array([0, 1, 5], np.int32), np.array([3, 0, 5, 1, 2], np.int32)
    cache = of(library, whole)
    ckv, kpe = cache[..., :512], cache[..., 512:]
    if not joined:
        ckv, kpe = of(library, whole[..., :512].copy()), of(library, whole[..., 512:].copy())
    wrapper = fi.BatchMLAPagedAttentionWrapper()
    wrapper.plan(of(library, np.array([0, 1, 3], np.int32)), of(library, indptr), of(library, indices),
                 of(library, lens), 16, 512, 64, 8, True, 0.05, dtype_in(library, "bf16"),
                 dtype_in(library, "bf16"))
    q = random(rng, (3, 16, 576), "bf16")
    o = wrapper.run(of(library, q[..., :512].copy()), of(library, q[..., 512:].copy()), ckv, kpe)
    for b, rows in enumerate((slice(0, 1), slice(1, 3))):
        keys = whole[indices[indptr[b]: indptr[b + 1]]].reshape(-1, 1, 576)[: lens[b]]
        close(back(o)[rows], attention(q[rows], keys, keys[..., :512], sm_scale=0.05)[0], 8e-3)
    with pytest.raises(kv8.InvalidError, match="before plan"):
        fi.BatchMLAPagedAttentionWrapper().run(of(library, q[..., :512].copy()),
                                               of(library, q[..., 512:].copy()), ckv, kpe)


def test_constructors_take_the_peers_arguments_and_refuse_by_name(library):
    workspace = of(library, np.zeros(1, np.uint8))
    for make in (fi.BatchDecodeWithPagedKVCacheWrapper, fi.BatchPrefillWithPagedKVCacheWrapper,
                 fi.BatchPrefillWithRaggedKVCacheWrapper, fi.BatchAttentionWithAttentionSinkWrapper):
        make(workspace, "HND", False)
        with pytest.raises(NotImplementedError, match="use_cuda_graph"):
            make(workspace, use_cuda_graph=True)
    with pytest.raises(NotImplementedError, match="use_cuda_graph"):
        fi.BatchMLAPagedAttentionWrapper(workspace, True)
    with pytest.raises(NotImplementedError, match="custom_mask_buf"):
        fi.BatchPrefillWithPagedKVCacheWrapper(workspace, custom_mask_buf=workspace)
    with pytest.raises(NotImplementedError, match="pos_encoding_mode"):
        fi.BatchAttentionWithAttentionSinkWrapper(workspace, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(NotImplementedError, match="kv_cache_sf"):
        fi.BatchDecodeWithPagedKVCacheWrapper(workspace).run(workspace, workspace, kv_cache_sf=workspace)
