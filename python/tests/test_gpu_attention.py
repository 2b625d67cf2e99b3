"""The GPU from torch: attention, stores and the cache on the caller's stream, under compile and in a
captured graph, against float64. Skipped without torch, a GPU, or kernels for it in the build.

SPDX-License-Identifier: Apache-2.0
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import time  # noqa: E402

import kv8  # noqa: E402
import kv8.flashinfer as fi  # noqa: E402
import kv8.torch_ops  # noqa: E402, F401
from arrays import back, of  # noqa: E402
from kv8 import flash_attn as fa  # noqa: E402
from kv8._launch import Workspace, launch  # noqa: E402
from kv8.device import torch_stream  # noqa: E402
from reference import attention, close, close_lse, random  # noqa: E402

if kv8.images_note().startswith("none"):
    pytest.skip("no CUDA kernels in this build", allow_module_level=True)

ROW, LSE = 8e-3, 2e-3


def pool(rng, lens, page, heads, dim, dtype):
    """K and V pages on the GPU, a block table, and each request's rows."""
    width = max(-(-n // page) for n in lens)
    table = rng.permutation(len(lens) * width).reshape(len(lens), width).astype(np.int32)
    tensors, rows = [], []
    for _ in range(2):
        pages = np.zeros((len(lens) * width, page, heads, dim), random(rng, (1,), dtype).dtype)
        own = [random(rng, (n, heads, dim), dtype) for n in lens]
        for b, part in enumerate(own):
            for i, row in enumerate(part):
                pages[table[b, i // page], i % page] = row
        tensors.append(of("torch", pages, "cuda"))
        rows.append(own)
    return tensors, of("torch", table, "cuda"), rows


@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("window", [(-1, -1), (127, 0)])
def test_varlen(rng, kv_dtype, rows, window):
    lens = [200, 1025]
    (k, v), table, (k_rows, v_rows) = pool(rng, lens, 16, 8, 64, kv_dtype)
    cu = np.arange(3, dtype=np.int32) * rows
    q = random(rng, (2 * rows, 64, 64), "bf16")
    sinks = rng.standard_normal(64).astype(np.float32)
    k_scale, v_scale = np.linspace(0.3, 0.6, 8, dtype=np.float32), np.linspace(2, 1, 8, dtype=np.float32)
    with torch.cuda.stream(torch.cuda.Stream()):
        o, lse = fa.flash_attn_varlen_func(
            of("torch", q, "cuda"), k, v, rows, of("torch", cu, "cuda"), 1025,
            seqused_k=torch.tensor(lens, dtype=torch.int32, device="cuda"), causal=True,
            window_size=window, block_table=table, s_aux=of("torch", sinks, "cuda"),
            k_descale=of("torch", k_scale, "cuda").expand(2, 8),
            v_descale=of("torch", v_scale, "cuda").expand(2, 8), return_softmax_lse=True)
        torch.cuda.current_stream().synchronize()
    for b in range(2):
        at = slice(cu[b], cu[b + 1])
        wanted, wanted_lse = attention(q[at], k_rows[b], v_rows[b], sinks=sinks, k_scale=k_scale,
                                       v_scale=v_scale, window_left=window[0])
        close(back(o)[at], wanted, ROW)
        close_lse(back(lse).T[at], np.logaddexp(wanted_lse, sinks), LSE)


def test_flashinfer_decode(rng):
    lens = [97, 512]
    (k, v), table, (k_rows, v_rows) = pool(rng, lens, 16, 8, 64, "e4m3")
    counts = [-(-n // 16) for n in lens]
    indices = torch.cat([table[b, :c] for b, c in enumerate(counts)])
    indptr = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device="cuda")
    last = torch.tensor([(n - 1) % 16 + 1 for n in lens], dtype=torch.int32, device="cuda")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8, device="cuda"))
    wrapper.plan(indptr, indices, last, 64, 8, 64, 16, q_data_type=torch.bfloat16,
                 kv_data_type=torch.float8_e4m3fn, use_sinks=True)
    q, sinks = random(rng, (2, 64, 64), "bf16"), rng.standard_normal(64).astype(np.float32)
    o = wrapper.run(of("torch", q, "cuda"), (k, v), sinks=of("torch", sinks, "cuda"), k_scale=0.5,
                    v_scale=2.0)
    assert "decode" in wrapper.describe() and "k e4m3, v e4m3, sinks" in wrapper.describe()
    for b in range(2):
        wanted, _ = attention(q[b: b + 1], k_rows[b], v_rows[b], sinks=sinks, k_scale=0.5, v_scale=2.0)
        close(back(o)[b: b + 1], wanted, ROW)


def test_store_and_cache(rng):
    rows = torch.randn(2, 40, 8, 64, dtype=torch.bfloat16, device="cuda")
    caches = torch.zeros(2, 4, 16, 8, 64, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(64, device="cuda")[:40]
    scale = torch.tensor([0.5], device="cuda")
    fa.reshape_and_cache_flash(*rows, caches[0], caches[1], slots, "fp8_e4m3", scale, scale)
    wanted = kv8.narrow(rows.float().cpu().numpy(), "e4m3", 0.5).codes.view(np.uint8)
    assert (caches.view(2, 64, 8, 64)[:, slots].cpu().numpy() == wanted).all()
    stream = kv8.Stream(kv8.Device(0), torch.cuda.current_stream().cuda_stream)
    cache = kv8.Cache([kv8.CacheLayer("e4m3", "e4m3", k_scale=0.5, v_scale=0.5)], num_kv_heads=8,
                      head_dim=64, num_pages=8, max_seq_len=64, stream=stream)
    seq = cache.sequence()
    seq.extend(40)
    cache.append(0, seq, rows[0], rows[1])
    k, v = seq.read(0)
    torch.testing.assert_close(
        torch.from_numpy(k), caches[0].view(64, 8, 64)[slots].view(torch.float8_e4m3fn).float().cpu() * 0.5)
    pages = cache.layer_kv(0)[0]
    assert torch.from_dlpack(pages).is_cuda and torch.from_dlpack(pages).shape == (8, 16, 8, 64)
    with pytest.raises(kv8.TypeMismatchError, match="must be on CUDA device 0"):
        cache.append(0, seq, rows[0].cpu(), rows[1].cpu())


def test_compiled_and_captured_have_the_bits_of_eager_calls(rng):
    (k, v), table, _ = pool(rng, [300, 70], 16, 8, 64, "e4m3")
    q = of("torch", random(rng, (2, 64, 64), "bf16"), "cuda")
    lens = torch.tensor([300, 70], dtype=torch.int32, device="cuda")
    cu = torch.arange(3, dtype=torch.int32, device="cuda")
    sinks = torch.zeros(64, device="cuda")

    def call():
        return torch.ops.kv8.attend(q, k, v, None, None, table, lens, cu, sinks=sinks)[0]

    eager = call()
    assert torch.equal(torch.compile(call, fullgraph=True)(), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
    lens.copy_(torch.tensor([123, 9]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, call())


def test_repeated_calls_see_new_values_and_new_arguments(rng):
    """A call that repeats another's shapes and addresses, but not its values, scales or outputs."""
    (k, v), table, (k_rows, v_rows) = pool(rng, [300, 70], 16, 8, 64, "e4m3")
    lens = torch.tensor([300, 70], dtype=torch.int32, device="cuda")
    cu = torch.arange(3, dtype=torch.int32, device="cuda")
    scale = torch.full((8,), 0.5, device="cuda")
    kept = torch.empty(2, 64, 64, dtype=torch.bfloat16, device="cuda")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8, device="cuda"))
    counts = [19, 5]
    wrapper.plan(torch.tensor([0, 19, 24], device="cuda"),
                 torch.cat([table[b, :c] for b, c in enumerate(counts)]),
                 torch.tensor([12, 6], device="cuda"), 64, 8, 64, 16, q_data_type=torch.bfloat16,
                 kv_data_type=torch.float8_e4m3fn)
    for turn in range(6):
        q = random(rng, (2, 64, 64), "bf16")
        scale.fill_(0.25 * (1 + turn))
        seen = [300 - turn, 70 - turn]
        lens.copy_(torch.tensor(seen))
        out = kept if turn % 2 else None
        v_scale = [1.0, 2.0][turn // 3]
        o = kv8.attend(of("torch", q, "cuda"), k, v, kv8.PageTable.dense(table, lens), cu,
                       k_scale=scale, v_scale=v_scale, out=out)
        assert out is None or o is out
        o_wrapper = wrapper.run(of("torch", q, "cuda"), (k, v), k_scale=scale, v_scale=v_scale)
        for b, n in enumerate(seen):
            options = {"k_scale": np.float32(0.25 * (1 + turn)), "v_scale": np.float32(v_scale)}
            wanted, _ = attention(q[b: b + 1], k_rows[b][:n], v_rows[b][:n], **options)
            close(back(o)[b: b + 1], wanted, ROW)
            wanted, _ = attention(q[b: b + 1], k_rows[b], v_rows[b], **options)
            close(back(o_wrapper)[b: b + 1], wanted, ROW)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_plan_before_a_replay_is_seen_by_it(rng, warm, rows):
    """FlashInfer's wrappers in a graph: index arrays in the buffers that the constructor got."""
    lens = [[300, 70], [5, 511], [16, 17]]
    (k, v), table, (k_rows, v_rows) = pool(rng, [512, 512], 16, 8, 64, "e4m3")
    q = random(rng, (2 * rows, 64, 64), "bf16")
    q_gpu = of("torch", q, "cuda")
    space = torch.empty(1, dtype=torch.uint8, device="cuda")
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (3, 64, 2)]
    if rows == 1:
        wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space, *buffers)
    else:
        indptr = torch.zeros(3, dtype=torch.int32, device="cuda")
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", True, indptr, *buffers)

    def plan(seen):
        counts = [-(-n // 16) for n in seen]
        pages = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        indices = torch.cat([table[b, :c] for b, c in enumerate(counts)])
        last = torch.tensor([(n - 1) % 16 + 1 for n in seen], dtype=torch.int32)
        options = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
        first = [] if rows == 1 else [torch.tensor([0, rows, 2 * rows], dtype=torch.int32)]
        wrapper.plan(*first, pages, indices, last, 64, 8, 64, 16, **options,
                     **({} if rows == 1 else {"causal": True}))

    plan(lens[0])
    if warm:
        wrapper.run(q_gpu, (k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = wrapper.run(q_gpu, (k, v))
    for seen in lens:
        plan(seen)
        graph.replay()
        torch.cuda.synchronize()
        for b, n in enumerate(seen):
            at = slice(b * rows, (b + 1) * rows)
            close(back(o)[at], attention(q[at], k_rows[b][:n], v_rows[b][:n])[0], ROW)
    with pytest.raises(kv8.InvalidError, match="first plan"):
        wrapper._plan_again({**wrapper._spec, "num_qo_heads": 32})


def test_a_call_costs_little(rng):
    """Planning included, when shapes repeat: host time of a decode launch beside the C calls'."""
    (k, v), table, _ = pool(rng, [64] * 4, 16, 8, 64, "e4m3")
    q = of("torch", random(rng, (4, 64, 64), "bf16"), "cuda")
    lens = torch.full((4,), 64, dtype=torch.int32, device="cuda")
    cu = torch.arange(5, dtype=torch.int32, device="cuda")
    sinks = torch.zeros(64, device="cuda")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8, device="cuda"))
    wrapper.plan(4 * cu, table[:, :4].reshape(-1), 16 * torch.ones_like(lens), 64, 8, 64, 16,
                 q_data_type=torch.bfloat16, kv_data_type=torch.float8_e4m3fn, use_sinks=True)
    out = torch.empty_like(q)
    stream = torch_stream(0)
    repeat, space = c_calls(q, k, v, table, lens, cu, sinks, out)
    calls = {
        "C": lambda: launch(repeat.plan, repeat._args, stream, space, prepare=True),
        "attend": lambda: kv8.attend(q, k, v, kv8.PageTable.dense(table, lens), cu, sinks=sinks),
        "operator": lambda: torch.ops.kv8.attend(q, k, v, None, None, table, lens, cu, sinks=sinks),
        "flash_attn": lambda: fa.flash_attn_varlen_func(
            q, k, v, 1, cu, 64, seqused_k=lens, causal=True, block_table=table, s_aux=sinks),
        "flashinfer": lambda: wrapper.run(q, (k, v), sinks=sinks),
    }
    spent = {name: measure(call) for name, call in calls.items()}
    print(", ".join(f"{name} {us:.1f}" for name, us in spent.items()), "us of host time a call")
    for name, us in spent.items():
        assert us <= spent["C"] + 30, name


def c_calls(q, k, v, table, lens, cu, sinks, out):
    """The args of a call, and a workspace: what a C program would hold."""
    plan = kv8.AttentionPlan(num_qo_heads=64, num_kv_heads=8, head_dim=64, max_batch=4, max_total_q=4,
                             max_kv_len=64, device=0)
    batch = plan.prepare(cu, kv8.PageTable.dense(table, lens))
    batch.run(q, k, v, sinks=sinks, out=out)
    return batch.repeat(q), Workspace(plan)


def measure(call, n=1000):
    """Least host time of a call in us: of ten runs, as the machine has other work too."""
    for _ in range(50):
        call()
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(n // 10):
            call()
        best = min(best, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return best / (n // 10) * 1e6
