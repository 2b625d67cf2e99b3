"""kv8's kernels from torch: the caller's tensors, compiled, by FlashAttention's names.

SPDX-License-Identifier: Apache-2.0
"""

import kv8.torch_ops  # noqa: F401  (registers torch.ops.kv8)
import torch
from kv8.flash_attn import flash_attn_varlen_func, reshape_and_cache_flash

device = "cuda" if torch.cuda.is_available() else "cpu"
batch, keys, page = 4, 256, 16
pages = batch * keys // page
k_cache, v_cache = torch.zeros(2, pages, page, 8, 64, dtype=torch.float8_e4m3fn, device=device)
rows = torch.randn(2, batch * keys, 8, 64, dtype=torch.bfloat16, device=device)
slots = torch.arange(batch * keys, device=device)
scale = torch.tensor([0.5], device=device)
reshape_and_cache_flash(*rows, k_cache, v_cache, slots, "fp8_e4m3", scale, scale)

q = torch.randn(batch, 64, 64, dtype=torch.bfloat16, device=device)
table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)
lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
cu = torch.arange(batch + 1, dtype=torch.int32, device=device)
sinks = torch.randn(64, device=device)
descale = scale.expand(batch, 8)
by_name = flash_attn_varlen_func(
    q,
    k_cache,
    v_cache,
    1,
    cu,
    keys,
    seqused_k=lens,
    causal=True,
    window_size=(127, 0),
    block_table=table,
    k_descale=descale,
    v_descale=descale,
    s_aux=sinks,
)


@torch.compile(fullgraph=True, backend="aot_eager")
def step(q: torch.Tensor) -> torch.Tensor:
    return torch.ops.kv8.attend(
        q,
        k_cache,
        v_cache,
        None,
        None,
        table,
        lens,
        cu,
        k_scale=descale,
        v_scale=descale,
        sinks=sinks,
        window_left=127,
    )[0]


assert torch.equal(step(q), by_name)
print("by name and compiled:", by_name.dtype, tuple(by_name.shape), "equal")
