"""What must never crash: wrong dtypes, shapes, strides and devices, closed objects, threads, forks,
arguments at random. Every one is an exception that names the cause, or a result.

SPDX-License-Identifier: Apache-2.0
"""

import gc
import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kv8
from reference import random


def cache_of(**options):
    options = {"num_kv_heads": 2, "head_dim": 32, "page_size": 4, "num_pages": 16, "max_seqs": 4,
               "max_seq_len": 32, **options}
    return kv8.Cache([kv8.CacheLayer("f32", "f32")], **options)


def test_errors_are_of_the_fitting_types():
    pairs = [(kv8.InvalidError, ValueError), (kv8.UnsupportedError, NotImplementedError),
             (kv8.NoMemoryError, MemoryError), (kv8.FullError, RuntimeError),
             (kv8.NotFoundError, LookupError), (kv8.FileError, OSError),
             (kv8.TypeMismatchError, TypeError)]
    for error, builtin in pairs:
        assert issubclass(error, builtin) and issubclass(error, kv8.Error)


def test_wrong_tensors_are_named(rng):
    q, k, v = random(rng, (3, 4, 32)), random(rng, (9, 2, 32)), random(rng, (9, 2, 32))
    ragged = kv8.PageTable.ragged([0, 9])
    bad = [
        (TypeError, "q has dtype float64", dict(q=q.astype(np.float64))),
        (TypeError, "q has dtype >f4", dict(q=q.astype(">f4"))),
        (ValueError, "q has stride 2", dict(q=np.repeat(q, 2, -1)[..., ::2])),
        (ValueError, r"q has shape \[3, 128\]", dict(q=q.reshape(3, 128))),
        (TypeError, "q is a list", dict(q=[1, 2])),
        (ValueError, r"k has shape .*\[1, 9, 2, 16\]", dict(k=k[..., :16])),
        (ValueError, "kv_indptr goes up to 9", dict(k=k[:8])),
        (ValueError, "multiple of num_kv_heads", dict(q=q[:, :3])),
        (ValueError, r"sinks has shape \[3\]", dict(sinks=np.zeros(3))),
        (ValueError, "NaN", dict(sinks=np.array([0, 0, np.nan, 0]))),
        (ValueError, "k_scale has shape", dict(k_scale=np.ones(5))),
        (ValueError, "q_scale", dict(q_scale=1.0)),
        (ValueError, "k_scale holds 0.0, must be finite and above 0", dict(k_scale=0)),
        (ValueError, "k_scale holds nan", dict(k_scale=np.array([1, np.nan], np.float32))),
        (ValueError, "v_scale holds -1.0", dict(v_scale=np.array([[1, -1]]))),
        (ValueError, "v_scale holds inf", dict(v_scale=float("inf"))),
        (ValueError, "o_scale holds 0.0", dict(o_scale=0.0, o_dtype="e4m3")),
        (ValueError, "q_scale holds nan", dict(q=np.zeros((3, 4, 32), np.uint8), q_dtype="e4m3",
                                               q_scale=np.full((3, 2, 2), np.nan))),
        (ValueError, "out is read-only", dict(out=np.broadcast_to(np.float32(0), (3, 4, 32)).copy())),
        (ValueError, "sm_scale is -1", dict(sm_scale=-1)),
        (ValueError, r"q has shape \[3, 4, 32\], must be \[4", dict(qo_indptr=[0, 4])),
        (ValueError, "qo_indptr", dict(qo_indptr=[0, 1, 3])),
        (TypeError, "qo_indptr has dtype float", dict(qo_indptr=[0.5, 3])),
        (ValueError, "must be -2147483648 to 2147483647", dict(qo_indptr=[0, 2**40])),
        (ValueError, 'math is "fast"', dict(math="fast")),
        (ValueError, "window_left", dict(window_left=-2)),
        (TypeError, "window_left is 1.5", dict(window_left=1.5)),
    ]
    for error, match, change in bad:
        arguments = {"q": q, "k": k, "v": v, "pages": ragged, "qo_indptr": [0, 3], **change}
        if "out" in change:
            change["out"].flags.writeable = False
        with pytest.raises(error, match=match):
            kv8.attend(**arguments)
    for name in ("q", "k", "v", "out", "lse"):
        with pytest.raises(TypeError, match=f"{name} is a str, must be an array"):
            kv8.attend(**{"q": q, "k": k, "v": v, name: "x"})


def test_page_ids_beyond_the_pool_are_refused(rng):
    pool, q = random(rng, (3, 4, 2, 32)), random(rng, (1, 4, 32))
    with pytest.raises(kv8.InvalidError, match="table entry 1 is 3, k.num_pages is 3"):
        kv8.attend(q, pool, pool, kv8.PageTable.csr([0, 2], [0, 3], [4]))
    with pytest.raises(kv8.InvalidError, match="page_indices has 2"):
        kv8.attend(q, pool, pool, kv8.PageTable.csr([0, 3], [0, 1], [4]))
    with pytest.raises(kv8.InvalidError, match="block_table has room for 8"):
        kv8.attend(q, pool, pool, kv8.PageTable.dense([[0, 1]], [9]))


def test_closed_objects(rng):
    cache = cache_of()
    seq = cache.sequence()
    seq.extend(3)
    rows = random(rng, (3, 2, 32))
    cache.append(0, seq, rows, rows)
    pages, table = cache.layer_kv(0), cache.page_table(0, seq)
    cache.close()
    cache.close()
    for call in (lambda: seq.extend(1), cache.sequence, cache.stats, lambda: cache.layer_kv(0)):
        with pytest.raises(kv8.ClosedError, match="cache is closed"):
            call()
    o = kv8.attend(random(rng, (1, 4, 32)), *pages, table)  # views keep the memory
    assert np.isfinite(o).all()
    seq.close()
    other = cache_of()
    with pytest.raises(kv8.InvalidError, match="another cache"):
        other.page_table(0, cache_of().sequence())


def test_stale_sequences_are_recognised():
    cache = cache_of()
    seq = cache.sequence()
    again = kv8.Sequence(cache, seq.id)
    seq.close()
    with pytest.raises(kv8.NotFoundError):
        again.extend(1)
    with pytest.raises(kv8.NotFoundError):
        kv8.Sequence(cache, 2**62).extend(1)


def test_views_outlive_what_made_them(rng):
    cache = cache_of()
    seq = cache.sequence()
    seq.extend(2)
    rows = random(rng, (2, 2, 32))
    cache.append(0, seq, rows, rows)
    page = cache.page_table(0, seq).arrays["page_indices"][0]
    array, shared = cache.layer_kv(0)[0].numpy(), np.from_dlpack(cache.layer_kv(0)[0])
    del cache, seq
    gc.collect()
    assert (array[page, :2] == rows).all() and (shared[page, :2] == rows).all()


def test_one_thread_at_a_time_per_object(rng):
    """Threads that fight over a cache either get in or are refused; nothing is torn."""
    cache = cache_of(num_pages=4000, max_seqs=2000, max_seq_len=64)
    outcomes = []

    def work():
        for _ in range(200):
            try:
                seq = cache.sequence()
                seq.extend(5)
                seq.close()
                outcomes.append("done")
            except kv8.BusyError:
                outcomes.append("busy")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 800 and outcomes.count("done") > 0
    assert cache.stats().num_seqs <= outcomes.count("busy")
    with cache._held:
        with pytest.raises(kv8.BusyError, match="cache is in use"):
            cache.stats()


def test_threads_share_one_call_attention(rng):
    q, k = random(rng, (2, 4, 32)), random(rng, (50, 2, 32))
    wanted, wrong = kv8.attend(q, k, k), []

    def work():
        for _ in range(100):
            if not (kv8.attend(q, k, k) == wanted).all():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_long_call_lets_other_threads_run(rng):
    q, k = random(rng, (1500, 8, 64)), random(rng, (1500, 8, 64))
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    kv8.attend(q[:1], k, k)
    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.2:
        start = time.perf_counter()
        kv8.attend(q, k, k)
        end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(start < at < end for at in ticks) >= 3, end - start


def test_another_process_is_refused():
    code = """
import os, kv8
cache = kv8.Cache([kv8.CacheLayer()], num_kv_heads=1, head_dim=8, num_pages=2, max_seq_len=8)
child = os.fork()
if child == 0:
    try:
        cache.sequence()
    except kv8.BusyError:
        kv8.Cache([kv8.CacheLayer()], num_kv_heads=1, head_dim=8, num_pages=2, max_seq_len=8).sequence()
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "7", out.stderr


def test_no_leak_over_many_calls(rng):
    q, k = random(rng, (1, 2, 8)), random(rng, (4, 1, 8))
    cache = cache_of(num_kv_heads=1, head_dim=8)
    seq = cache.sequence()

    def round_trip():
        try:
            seq.extend(1000)
        except kv8.InvalidError:
            pass
        seq.extend(4)
        cache.append(0, seq, k, k)
        np.from_dlpack(cache.layer_kv(0)[0])
        kv8.attend(q, *cache.layer_kv(0), cache.page_table(0, seq))
        seq.truncate(0)

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    for _ in range(500):
        round_trip()
    before = resident()
    for _ in range(100_000 // 6 + 1):  # six calls each
        round_trip()
    assert resident() - before < 2 << 20


def test_random_arguments():
    """Whatever is passed, it is an exception or a result (KV8_FUZZ_SECONDS=60 for a minute)."""
    rng = np.random.default_rng(os.getpid())
    seconds = float(os.environ.get("KV8_FUZZ_SECONDS", "2"))
    numbers = [-(2**40), -2, -1, 0, 1, 2, 3, 7, 16, 2**31 - 1, 2**33, 0.5, float("nan"), None, "x", True]
    dtypes = ["f32", "bf16", "f16", "e4m3", "e5m2", "int8"]

    def number():
        return numbers[rng.integers(len(numbers))]

    def array():
        shape = tuple(rng.integers(0, 5, rng.integers(1, 5)))
        kind = [np.float32, np.float16, np.uint8, np.int32, np.int64, np.float64][rng.integers(6)]
        made = rng.integers(-3, 9, shape).astype(kind)
        return made[..., ::2] if rng.random() < 0.2 else made

    def value():
        return [number, array, lambda: None, lambda: dtypes[rng.integers(6)]][rng.integers(4)]()

    def some(names):
        return {name: value() for name in names if rng.random() < 0.4}

    cache = cache_of()
    seq = cache.sequence()
    good = random(rng, (2, 4, 32))

    def table():
        kind = rng.integers(4)
        if kind == 0:
            return kv8.PageTable.csr(rng.integers(-1, 4, 3), rng.integers(-2, 9, 4), rng.integers(-1, 6, 2))
        if kind == 1:
            return kv8.PageTable.dense(rng.integers(-2, 9, (2, 2)), rng.integers(-1, 12, 2))
        if kind == 2:
            return kv8.PageTable.ragged(rng.integers(-1, 9, 3))
        return value()

    calls = [
        lambda: kv8.attend(good, random(rng, (6, 4, 2, 32)), random(rng, (6, 4, 2, 32)), table(),
                           [[0, 1, 2], value()][rng.integers(2)], **some(
                               ["sinks", "window_left", "window_right", "soft_cap", "k_scale", "mask",
                                "key_begin", "key_end", "qo_lens", "out", "lse", "causal"])),
        lambda: kv8.attend(value(), value(), value(), table(), value(), **some(["causal", "math"])),
        lambda: kv8.Cache([kv8.CacheLayer(value(), value(), value())], **{
            "num_kv_heads": 1, "head_dim": 8, "num_pages": 2, "max_seq_len": 8,
            **some(["num_kv_heads", "head_dim", "page_size", "max_seqs", "layout", "window_slack"])}),
        lambda: seq.extend(value()),
        lambda: seq.truncate(value()),
        lambda: seq.read(value(), value(), value()),
        lambda: cache.append(value(), [seq, value()][: rng.integers(3)], value(), value(), value()),
        lambda: cache.append(0, seq, good[:, :2], value(), value(), cos_sin=value()),
        lambda: cache.page_table(value(), [seq]),
        lambda: cache.layer_kv(value()),
        lambda: kv8.narrow(value(), value(), value()),
        lambda: kv8.widen(value(), value()),
        lambda: kv8.merge(value(), value(), value(), value()),
        lambda: kv8.Rope(value(), value()),
        lambda: kv8.Paged(value(), dtype=value(), row_scale=value()),
    ]
    expected = (kv8.Error, TypeError, ValueError, OverflowError, AttributeError, IndexError)
    begin, ran, failed = time.monotonic(), 0, 0
    while time.monotonic() - begin < seconds:
        ran += 1
        try:
            calls[rng.integers(len(calls))]()
        except expected:
            failed += 1
    assert failed > 50 and failed < ran


def test_the_program_runs():
    out = subprocess.run([sys.executable, "-m", "kv8", "--version"], capture_output=True, text=True)
    assert out.returncode == 0 and kv8.__version__ in out.stdout
    out = subprocess.run([sys.executable, "-m", "kv8", "nonsense"], capture_output=True, text=True)
    assert out.returncode == 2
