"""The cache from numpy: what is stored, forks, prefixes, snapshots, attention over it.

SPDX-License-Identifier: Apache-2.0
"""

import numpy as np
import pytest

import kv8
from reference import NUMPY, attention, close, random


def make(*layers, **options):
    options = {"num_kv_heads": 2, "head_dim": 32, "page_size": 4, "num_pages": 32, "max_seqs": 8,
               "max_seq_len": 64, **options}
    return kv8.Cache(layers or (kv8.CacheLayer(),), **options)


def fill(cache, seq, rng, n, ids=None, layer=None):
    k, v = random(rng, (n, 2, 32)), random(rng, (n, 2, 32))
    seq.extend(n, ids)
    for at in range(len(cache.layers)) if layer is None else [layer]:
        cache.append(at, seq, k, v)
    return k, v


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "e4m3", "e4m3fnuz", "e5m2"])
def test_what_is_stored(rng, dtype):
    scale = np.array([0.25, 2.0], np.float32)
    cache = make(kv8.CacheLayer(dtype, dtype, k_scale=scale, v_scale=0.5))
    seq = cache.sequence()
    k, v = fill(cache, seq, rng, 10)
    got_k, got_v = seq.read(0)
    limit = kv8.dtype_max(dtype)
    coded = np.clip(k / scale[:, None], -limit, limit).astype(NUMPY[dtype]).astype(np.float32)
    assert (got_k == coded * scale[:, None]).all()
    assert (got_v == (v / np.float32(0.5)).astype(NUMPY[dtype]).astype(np.float32) * 0.5).all()
    pages = cache.layer_kv(0)[0]
    table = cache.page_table(0, seq).arrays
    first = pages.numpy()[table["page_indices"][0], :4]
    assert (kv8.widen(first, dtype) == coded[:4]).all()
    if dtype == "bf16":  # which numpy does not take
        return
    assert (np.from_dlpack(pages).view(np.uint8).reshape(-1)
            == pages.numpy().view(np.uint8).reshape(-1)).all()


def test_no_rows_are_appended():
    cache = make()
    seq, none = cache.sequence(), np.empty((0, 2, 32), np.float32)
    cache.append(0, seq, none, none)
    assert [x.shape for x in seq.read(0)] == [(0, 2, 32), (0, 2, 32)]


def test_int8_rows_have_their_own_scale(rng):
    cache = make(kv8.CacheLayer("int8", "int8"))
    seq = cache.sequence()
    k, v = fill(cache, seq, rng, 9)
    got, _ = seq.read(0)
    step = np.abs(k).max(axis=-1, keepdims=True) / 127
    assert (np.abs(got - k) <= step * 0.51 + 1e-7).all()
    q = random(rng, (2, 4, 32))
    o = kv8.attend(q, *cache.layer_kv(0), cache.page_table(0, seq), [0, 2])
    close(o, attention(q, *seq.read(0))[0], 3e-5)


def test_attention_over_layers_of_different_kinds(rng):
    cache = make(kv8.CacheLayer("e4m3", "e5m2", k_scale=0.5, v_scale=2.0),
                 kv8.CacheLayer("bf16", "int8", window_left=7), layout="HND")
    seqs = [cache.sequence() for _ in range(2)]
    for seq, n in zip(seqs, (13, 29)):
        fill(cache, seq, rng, n)
    q = random(rng, (2, 4, 32), "bf16")
    for layer, window in ((0, -1), (1, 7)):
        k_scale, v_scale = cache.scales(layer, seqs)
        for table in (cache.page_table(layer, seqs), cache.block_table(layer, seqs)):
            o = kv8.attend(q, *cache.layer_kv(layer), table, window_left=window, k_scale=k_scale,
                           v_scale=v_scale)
            for b, seq in enumerate(seqs):
                begin = 0 if window < 0 else max(0, len(seq) - 1 - window)
                k, v = seq.read(layer, begin)
                close(o[b: b + 1], attention(q[b: b + 1], k, v)[0], 8e-3)


def test_fork_truncate_and_own_scales(rng):
    cache = make(kv8.CacheLayer("f32", "f32"))
    seq = cache.sequence()
    k, _ = fill(cache, seq, rng, 10)
    other = seq.fork()
    more, _ = fill(cache, other, rng, 3)
    assert len(seq) == 10 and len(other) == 13
    assert (other.read(0)[0] == np.concatenate((k, more))).all() and (seq.read(0)[0] == k).all()
    other.truncate(4)
    assert (other.read(0)[0] == k[:4]).all()
    third = cache.sequence()
    third.set_scales(0, k_scale=[2.0, 3.0])
    assert (cache.scales(0, third)[0] == [[2.0, 3.0]]).all()
    free = cache.stats().pages_free
    other.close()
    seq.close()
    assert cache.stats().pages_free > free
    with pytest.raises(kv8.ClosedError):
        len(seq)


def test_prefixes_and_snapshots(rng, tmp_path):
    cache = make(kv8.CacheLayer("e4m3", "e4m3"))
    seq = cache.sequence()
    ids = rng.integers(0, 1000, 11).astype(np.int32)
    fill(cache, seq, rng, 11, ids)
    seq.publish()
    found, matched = cache.prefix_match(ids)
    assert matched == 8 and len(found) == 8
    assert (found.read(0)[0] == seq.read(0)[0][:8]).all()
    seq.save(tmp_path / "snapshot")
    second = make(kv8.CacheLayer("e4m3", "e4m3"), page_size=16, layout="HND")
    loaded = second.load(tmp_path / "snapshot")
    for a, b in zip(loaded.read(0), seq.read(0)):
        assert (a == b).all()
    torn = (tmp_path / "snapshot").read_bytes()[:-3]
    (tmp_path / "torn").write_bytes(torn)
    with pytest.raises(kv8.CorruptError, match="torn"):
        second.load(tmp_path / "torn")
    with pytest.raises(kv8.NotFoundError):
        second.load(tmp_path / "absent")


def test_rotation_on_the_way_and_counters(rng):
    cache = make(kv8.CacheLayer("f32", "e4m3"))
    rope = kv8.Rope(32, 10000.0)
    seq = cache.sequence()
    seq.extend(5)
    k, v = random(rng, (5, 2, 32)), random(rng, (5, 2, 32))
    v[0, 1, 3], v[2, 1, 4] = 1e6, np.nan
    angles = rope.angles(np.arange(5))
    cache.append(0, seq, k, v, cos_sin=angles)
    turn = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 32, 2) / 32)
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
    a, b = k[..., :16], k[..., 16:]
    wanted = np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)
    assert np.abs(seq.read(0)[0] - wanted).max() < 1e-5
    assert np.abs(rope.apply(k.copy(), angles) - wanted).max() < 1e-5
    assert cache.counters(0, 1) == (0, 0, 1, 1) and cache.counters(0, 0) == (0, 0, 0, 0)
    cache.reset_counters()
    assert cache.counters(0, 1) == (0, 0, 0, 0)


def test_a_full_pool_changes_nothing(rng):
    cache = make(num_pages=2)
    seq = cache.sequence()
    seq.extend(8)
    with pytest.raises(kv8.FullError):
        seq.extend(1)
    assert len(seq) == 8
    assert cache.layer_kv(0)[0].dtype == "e4m3"
