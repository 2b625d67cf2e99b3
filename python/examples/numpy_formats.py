"""What storing in 8 bits does to attention, from numpy alone: python numpy_formats.py

SPDX-License-Identifier: Apache-2.0
"""

import kv8
import numpy as np

rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 1024, 8, 64), np.float32)
q, sinks = rng.standard_normal((1, 64, 64), np.float32), rng.standard_normal(64, np.float32)


def attend(dtype: str, scale: float = 1.0) -> np.ndarray:
    """The last row's output over a cache of `dtype`, with sinks."""
    layer = kv8.CacheLayer(dtype, dtype, k_scale=scale, v_scale=scale)
    with kv8.Cache([layer], num_kv_heads=8, head_dim=64, num_pages=64, max_seq_len=1024) as cache:
        seq = cache.sequence()
        seq.extend(1024)
        cache.append(0, seq, k, v)
        k_scale, v_scale = cache.scales(0, seq)
        table = cache.page_table(0, seq)
        return kv8.attend(
            q, *cache.layer_kv(0), table, sinks=sinks, k_scale=k_scale, v_scale=v_scale
        )


exact = attend("f32")
print(f"{'format':<10} {'relative error':>15} {'bytes/token':>12}")
for dtype in ("bf16", "f16", "e4m3", "e5m2", "int8"):
    error = np.linalg.norm(attend(dtype) - exact) / np.linalg.norm(exact)
    size = 8 * 2 * (64 * kv8.dtype_size(dtype) + 2 * (dtype == "int8"))
    print(f"{dtype:<10} {error:>15.2e} {size:>12}")
