"""BatchAttention, and latent attention (MLA).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from .._core import UnsupportedError
from .._face import refuse
from .._tensor import is_torch
from ..pages import Paged, PageTable
from ._wrapper import _refuse_buffers, _Wrapper


class BatchAttention(_Wrapper):
    """Prefill and decode rows in one call; run gives (o, lse)."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cpu") -> None:
        super().__init__(None, kv_layout)
        name, _, index = str(device).partition(":")
        if name not in ("cpu", "cuda"):
            raise UnsupportedError(f'device is "{device}"; supported: cpu, cuda')
        self._index = int(index or 0) if name == "cuda" else None

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: Optional[float] = None,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Any = "bfloat16",
        kv_data_type: Any = "bfloat16",
        use_profiler: bool = False,
    ) -> None:
        refuse(use_profiler=(use_profiler, False))
        self._begin(
            qo_indptr,
            PageTable.csr(kv_indptr, kv_indices, _last_page_len(kv_len_arr, page_size)),
            kv_len_arr,
            heads=(num_qo_heads, num_kv_heads),
            dims=(head_dim_qk, head_dim_vo),
            page_size=page_size,
            causal=causal,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )

    def run(
        self,
        q: Any,
        kv_cache: Any,
        out: Any = None,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Any = None,
        kv_cache_sf: Any = None,
        sinks: Any = None,
    ) -> Any:
        _refuse_buffers(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        operands = None, k_scale, v_scale, out, lse, True, sinks
        planned = self._soft_cap
        self._soft_cap = float(logits_soft_cap) or planned
        try:
            return self._run(q, (kv_cache,), self._split, *operands)
        finally:
            self._soft_cap = planned


def _last_page_len(lens: Any, page_size: int) -> Any:
    return (lens - 1) % page_size * (lens > 0) + 1 * (lens > 0)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """Multi-head latent attention: keys are [ckv, kpe], values ckv, one KV head."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        refuse(use_cuda_graph=(use_cuda_graph, False))
        super().__init__(float_workspace_buffer, "NHD")

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Any,
        kv_data_type: Any,
        use_profiler: bool = False,
    ) -> None:
        refuse(use_profiler=(use_profiler, False))
        self._begin(
            qo_indptr,
            PageTable.csr(kv_indptr, kv_indices, _last_page_len(kv_len_arr, page_size)),
            kv_len_arr,
            heads=(num_heads, 1),
            dims=(head_dim_ckv + head_dim_kpe, head_dim_ckv),
            page_size=page_size,
            causal=causal,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
        )

    def run(
        self,
        q_nope: Any,
        q_pe: Any,
        ckv_cache: Any,
        kpe_cache: Any,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        **kernels: Any,
    ) -> Any:
        """q_nope [rows, heads, ckv], q_pe [rows, heads, kpe]; caches [pages, page, ckv], [.., kpe].
        Caches that are views of one [.., ckv + kpe] are read in place, others are put together."""
        _refuse_buffers(profiler_buffer=profiler_buffer, **kernels)
        q = _concat(q_nope, q_pe)
        k = _joined(ckv_cache, kpe_cache)
        operands = None, None, None, out, lse, return_lse, None
        return self._run(q, (k, ckv_cache), _pages_of_one_head, *operands)


def _pages_of_one_head(k: Any, v: Any) -> tuple[Paged, Paged]:
    return Paged(k[:, :, None]), Paged(v[:, :, None])


def _concat(a: Any, b: Any) -> Any:
    if is_torch(a):
        import torch

        return torch.cat((a, b), -1)
    return np.concatenate((a, b), -1)


def _joined(a: Any, b: Any) -> Any:
    """One tensor of two along the last axis, in place where b lies behind a."""
    if is_torch(a) and a.stride() == b.stride() and a.stride(-2) >= a.shape[-1] + b.shape[-1]:
        if b.data_ptr() == a.data_ptr() + a.shape[-1] * a.element_size():
            shape = (*a.shape[:-1], a.shape[-1] + b.shape[-1])
            return a.as_strided(shape, a.stride())
    return _concat(a, b)
