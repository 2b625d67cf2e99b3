"""torch operators: kv8::attend and kv8::store, with fake kernels, so that torch.compile traces them and
CUDA graphs capture them. Importing this module registers them.

    o, lse = torch.ops.kv8.attend(q, k, v, None, None, block_table, seq_lens, cu_seqlens_q, ...)

There is no backward pass.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Optional

import torch

from .append import store as _store
from .attend import attend as _attend
from .pages import Paged, PageTable


@torch.library.custom_op("kv8::attend", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_row_scale: Optional[torch.Tensor],
    v_row_scale: Optional[torch.Tensor],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    key_begin: Optional[torch.Tensor] = None,
    key_end: Optional[torch.Tensor] = None,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    sm_scale: Optional[float] = None,
    soft_cap: float = 0.0,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    o_dtype: Optional[torch.dtype] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [rows, heads, v_dim] and lse [rows, heads] of q [rows, heads, dim] over pages k and v [page,
    slot, kv_head, dim], those of int8 with their f16 row scales [page, slot, kv_head]."""
    o, lse = _attend(
        q,
        Paged(k, row_scale=k_row_scale),
        Paged(v, row_scale=v_row_scale),
        PageTable.dense(block_table, seq_lens),
        cu_seqlens_q,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        key_begin=key_begin,
        key_end=key_end,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        o_dtype=o_dtype,
        return_lse=True,
    )
    return o, lse


@attend.register_fake
def _(
    q,
    k,
    v,
    k_row_scale,
    v_row_scale,
    block_table,
    seq_lens,
    cu_seqlens_q,
    key_begin=None,
    key_end=None,
    k_scale=None,
    v_scale=None,
    sinks=None,
    sm_scale=None,
    soft_cap=0.0,
    causal=True,
    window_left=-1,
    window_right=-1,
    o_dtype=None,
):
    o_dtype = o_dtype or (torch.float32 if q.dtype == torch.float8_e4m3fn else q.dtype)
    o = q.new_empty((q.shape[0], q.shape[1], v.shape[3]), dtype=o_dtype)
    return o, q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


@torch.library.custom_op(
    "kv8::store", mutates_args=("k_pages", "v_pages", "k_row_scale", "v_row_scale")
)
def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_row_scale: Optional[torch.Tensor],
    v_row_scale: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
) -> None:
    """Row i of k [rows, kv_heads, dim] and v goes, quantised, to slot slot_mapping[i] of the pages."""
    pages = Paged(k_pages, row_scale=k_row_scale), Paged(v_pages, row_scale=v_row_scale)
    _store(k, v, *pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)


@store.register_fake
def _(k, v, k_pages, v_pages, k_row_scale, v_row_scale, slot_mapping, k_scale=None, v_scale=None):
    return None
