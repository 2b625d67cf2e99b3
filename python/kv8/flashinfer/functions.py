"""Single requests, stores, merges.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from .._face import add_sinks, like, refuse_gradients
from .._face import merge_states as merge_parts
from .._tensor import is_torch
from ..append import store
from ..attend import attend
from ..flash_attn import _positions
from ._wrapper import _LN2, _mask, _refuse_modes, _split_kv


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
    rope_scale: Any = None,
    rope_theta: Any = None,
    return_lse: bool = False,
    sinks: Any = None,
) -> Any:
    """One row q [heads, dim] over k and v [keys, kv_heads, dim] (NHD)."""
    result = single_prefill_with_kv_cache(
        q[None],
        k,
        v,
        scale_q=q_scale,
        scale_k=k_scale,
        scale_v=v_scale,
        causal=True,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        return_lse=return_lse,
        sinks=sinks,
    )
    return tuple(x[0] for x in result) if return_lse else result[0]


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    rope_scale: Any = None,
    rope_theta: Any = None,
    backend: str = "auto",
    return_lse: bool = False,
    sinks: Any = None,
) -> Any:
    """Rows q [rows, heads, dim] of one request over k and v [keys, kv_heads, dim] (NHD)."""
    _refuse_modes(pos_encoding_mode, use_fp16_qk_reduction)
    refuse_gradients(q, k, v)
    if kv_layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    mask = _mask(custom_mask, packed_custom_mask, [0, q.shape[0]], [k.shape[0]])
    is_e4m3 = "float8" in str(q.dtype)
    if scale_q is not None and not is_e4m3:
        sm_scale = (sm_scale or q.shape[-1] ** -0.5) * float(scale_q)
    o, lse = attend(
        q,
        k,
        v,
        causal=causal and mask is None,
        window_left=window_left,
        soft_cap=logits_soft_cap or 0.0,
        sm_scale=sm_scale,
        q_scale=scale_q if is_e4m3 else None,
        k_scale=scale_k,
        v_scale=scale_v,
        mask=mask,
        sinks=sinks,
        o_dtype=o_dtype or ("bf16" if is_e4m3 else None),
        return_lse=True,
        lse_base2=True,
    )
    return (o, add_sinks(lse, sinks, base2=True)) if return_lse else o


def single_prefill_with_kv_cache_return_lse(*args: Any, **kwargs: Any) -> Any:
    kwargs["return_lse"] = True
    return single_prefill_with_kv_cache(*args, **kwargs)


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Writes row i of append_key [rows, kv_heads, dim] to position positions[i] of request
    batch_indices[i]."""
    k, v = _split_kv(paged_kv_cache, kv_layout)
    at, size = kv_indptr[batch_indices] + positions // k.page_size, k.page_size
    if is_torch(kv_indices):
        slots = kv_indices[at.long()].long() * size + positions % size
    else:
        slots = kv_indices[at].astype(np.int64) * size + positions % size
    store(append_key, append_value, k, v, slots, k_scale=k_scale, v_scale=v_scale)


def get_batch_indices_positions(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    """Request and position of each of nnz appended rows, which are each request's last."""
    b, at = _positions(append_indptr, seq_lens, nnz)
    if is_torch(append_indptr):
        import torch

        device = append_indptr.device
        return (
            torch.as_tensor(b, dtype=torch.int32, device=device),
            torch.as_tensor(at, dtype=torch.int32, device=device),
        )
    return b.astype(np.int32), at.astype(np.int32)


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Two partial results v [rows, heads, dim], s [rows, heads] to base 2."""
    o, lse = merge_parts([v_a, v_b], [s_a * _LN2, s_b * _LN2])
    return like(o, v_a), lse / _LN2


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    """merge_state written to v and s, of the rows that mask [rows] names."""
    o, lse = merge_state(v, s, v_other, s_other)
    if mask is None:
        mask = slice(None)
    elif not is_torch(mask):
        mask = np.asarray(mask, bool)
    v[mask], s[mask] = o[mask], lse[mask]


def merge_states(v: Any, s: Any) -> tuple[Any, Any]:
    """Partial results v [rows, states, heads, dim], s [rows, states, heads] to base 2."""
    n = v.shape[1]
    o, lse = merge_parts([v[:, i] for i in range(n)], [s[:, i] * _LN2 for i in range(n)])
    return like(o, v), lse / _LN2
