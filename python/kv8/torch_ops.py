"""torch operators: kv8::attend and kv8::store, with fake kernels, so that torch.compile traces them and
CUDA graphs capture them. Importing this module registers them.

    o, lse = torch.ops.kv8.attend(q, k, v, None, None, block_table, seq_lens, cu_seqlens_q, ...)

There is no backward pass.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Optional

import torch

from ._face import refuse_gradients
from ._tensor import call_key
from .append import store as _store
from .attend import again, remember
from .attend import attend as _attend
from .device import torch_stream
from .pages import Paged, PageTable

_library = torch.library.Library("kv8", "DEF")  # operators live as long as it
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? k_row_scale, Tensor? v_row_scale,"
    " Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, Tensor? key_begin=None,"
    " Tensor? key_end=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? sinks=None,"
    " float? sm_scale=None, float soft_cap=0.0, bool causal=True, SymInt window_left=-1,"
    " SymInt window_right=-1, *, ScalarType? o_dtype=None) -> (Tensor, Tensor)"
)
_library.define(
    "store(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!)? k_row_scale,"
    " Tensor(d!)? v_row_scale, Tensor slot_mapping, Tensor? k_scale=None, Tensor? v_scale=None)"
    " -> ()"
)


def _pages(codes: torch.Tensor, row_scale: Optional[torch.Tensor]):
    return codes if row_scale is None else (codes, row_scale)


@torch.library.impl(_library, "attend", "CompositeExplicitAutograd")
def _attend_rows(
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
    *,
    o_dtype=None,
):
    """o [rows, heads, v_dim] and lse [rows, heads] of q [rows, heads, dim] over pages k and v [page,
    slot, kv_head, dim], those of int8 with their f16 row scales [page, slot, kv_head]."""
    refuse_gradients(q, k, v)
    key = None
    if q.is_cuda:
        stream = torch_stream(q.get_device())
        tensors = block_table, seq_lens, cu_seqlens_q, key_begin, key_end, k_scale, v_scale, sinks
        plain = stream, sm_scale, soft_cap, causal, window_left, window_right, o_dtype
        key = call_key((q,), (k, v, k_row_scale, v_row_scale, *tensors), plain)
        found = again(key, q, None, None, True, stream)
        if found is not None:
            return found
    found = _attend(
        q,
        _pages(k, k_row_scale),
        _pages(v, v_row_scale),
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
    if key is not None:
        remember(key)
    return found


@torch.library.register_fake("kv8::attend", lib=_library)
def _(q, k, v, *_, o_dtype=None):
    o_dtype = o_dtype or (torch.float32 if q.dtype == torch.float8_e4m3fn else q.dtype)
    o = q.new_empty((q.shape[0], q.shape[1], v.shape[3]), dtype=o_dtype)
    return o, q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


@torch.library.impl(_library, "store", "CompositeExplicitAutograd")
def _store_rows(
    k, v, k_pages, v_pages, k_row_scale, v_row_scale, slot_mapping, k_scale=None, v_scale=None
):
    """Row i of k [rows, kv_heads, dim] and v goes, quantised, to slot slot_mapping[i] of the pages."""
    refuse_gradients(k, v)
    pages = Paged(k_pages, row_scale=k_row_scale), Paged(v_pages, row_scale=v_row_scale)
    _store(k, v, *pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)


@torch.library.register_fake("kv8::store", lib=_library)
def _(*_):
    return None


# What computes asks for no gradients itself, so autograd need not look at the arguments first.
for _name in ("attend", "store"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

attend = torch.ops.kv8.attend.default
store = torch.ops.kv8.store.default
