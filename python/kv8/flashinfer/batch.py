"""Decode and prefill wrappers over pages and ragged rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from .._face import refuse
from ..pages import PageTable
from ._wrapper import _mask, _refuse_buffers, _refuse_modes, _Wrapper


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Keys of each request."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return (pages - 1).clip(min=0) * page_size + kv_last_page_len * (pages > 0)


class _RunWrapper(_Wrapper):
    """run() under the names that it has beside."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def run_return_lse(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, return_lse=True, **kwargs)

    forward_return_lse = run_return_lse


class _PagedWrapper(_RunWrapper):
    """Runs over pages."""

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: Any = None,
        window_left: Optional[int] = None,
        sinks: Any = None,
        sm_scale: Optional[float] = None,
        **kernels: Any,
    ) -> Any:
        """q [rows, heads, dim]; o, or (o, lse [rows, heads] to base 2). `kernels`: what single kernels
        take there, refused by name: kv_cache_sf, skip_softmax_threshold_scale_factor, ..."""
        _refuse_buffers(**kernels)
        if window_left is not None and self._plan is not None:
            refuse(window_left=(window_left, self._plan.spec.window_left))
        operands = q_scale, k_scale, v_scale, out, lse, return_lse, sinks, sm_scale
        return self._run(q, (paged_kv_cache,), self._split, *operands)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """One row (or q_len_per_req causal rows) a request over pages. With use_cuda_graph the batch is that
    of the buffers, and a plan() before a replay is seen by it."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        _refuse_buffers(jit_args=jit_args)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            page_indptr=paged_kv_indptr_buffer,
            page_indices=paged_kv_indices_buffer,
            last_page_len=paged_kv_last_page_len_buffer,
        )

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: Optional[float] = None,
        block_tables: Any = None,
        seq_lens: Any = None,
        q_len_per_req: int = 1,
        use_sinks: bool = False,
        **modes: Any,
    ) -> None:
        _refuse_modes(**modes)
        refuse(window_right=(window_right, 0))
        if data_type is not None:
            q_data_type = kv_data_type = data_type
        self.use_sinks = use_sinks
        batch = len(last_page_len)
        qo_indptr = np.arange(batch + 1, dtype=np.int32) * q_len_per_req
        self._begin(
            qo_indptr,
            PageTable.csr(indptr, indices, last_page_len),
            get_seq_lens(indptr, last_page_len, page_size),
            heads=(num_qo_heads, num_kv_heads),
            dims=(head_dim, head_dim),
            page_size=page_size,
            causal=True,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )

    begin_forward = plan


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same under a graph: index buffers keep their addresses."""

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Any,
        indices_buffer: Any,
        last_page_len_buffer: Any,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper, *args: Any, **kwargs: Any
) -> None:
    """wrapper.plan(...)."""
    wrapper.plan(*args, **kwargs)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Ragged rows over pages. With use_cuda_graph the batch is that of the buffers, the first plan()
    has the most rows, and a plan() before a replay is seen by it."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        _refuse_buffers(
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
        )
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr=qo_indptr_buf,
            page_indptr=paged_kv_indptr_buf,
            page_indices=paged_kv_indices_buf,
            last_page_len=paged_kv_last_page_len_buf,
        )

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        *,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        use_sinks: bool = False,
        **modes: Any,
    ) -> None:
        _refuse_modes(**modes)
        self.use_sinks = use_sinks
        lens = get_seq_lens(paged_kv_indptr, paged_kv_last_page_len, page_size)
        self._begin(
            qo_indptr,
            PageTable.csr(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            lens,
            heads=(num_qo_heads, num_kv_heads),
            dims=(head_dim_qk, head_dim_vo or head_dim_qk),
            page_size=page_size,
            causal=causal,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
            mask=_mask(custom_mask, packed_custom_mask, qo_indptr, lens),
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )

    begin_forward = plan


class BatchPrefillWithRaggedKVCacheWrapper(_RunWrapper):
    """Ragged rows over ragged K and V."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        _refuse_buffers(
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
        )
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr=qo_indptr_buf,
            kv_indptr=kv_indptr_buf,
        )

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        *,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        use_sinks: bool = False,
        **modes: Any,
    ) -> None:
        _refuse_modes(**modes)
        self.use_sinks = use_sinks
        lens = kv_indptr[1:] - kv_indptr[:-1]
        self._begin(
            qo_indptr,
            PageTable.ragged(kv_indptr),
            lens,
            heads=(num_qo_heads, num_kv_heads),
            dims=(head_dim_qk, head_dim_vo or head_dim_qk),
            page_size=0,
            causal=causal,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
            mask=_mask(custom_mask, packed_custom_mask, qo_indptr, lens),
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )

    begin_forward = plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: Any = None,
        sinks: Any = None,
        sm_scale: Optional[float] = None,
    ) -> Any:
        """q [rows, heads, dim], k and v [keys, kv_heads, dim]."""
        operands = q_scale, k_scale, v_scale, out, lse, return_lse, sinks, sm_scale
        return self._run(q, (k, v), None, *operands)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """run(q, paged_kv_cache, sinks, sm_scale)."""

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Any = "bfloat16",
        kv_data_type: Any = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        """head_dim_qk and head_dim_vo are plan()'s here."""
        _refuse_modes(pos_encoding_mode, use_fp16_qk_reduction)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
        )
        self._defaults = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._defaults["window_left"] = window_left

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **{**self._defaults, **kwargs}, use_sinks=True)

    def run(  # type: ignore[override]
        self,
        q: Any,
        paged_kv_cache: Any,
        sinks: Any,
        sm_scale: Optional[float] = None,
        **options: Any,
    ) -> Any:
        return super().run(q, paged_kv_cache, sinks=sinks, sm_scale=sm_scale, **options)
