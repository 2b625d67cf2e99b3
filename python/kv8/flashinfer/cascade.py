"""Attention over shared and own pages: a level for each, merged.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._face import like
from .._face import merge_states as merge_parts
from ._wrapper import _LN2
from .batch import BatchPrefillWithPagedKVCacheWrapper
from .functions import merge_state, single_prefill_with_kv_cache


class MultiLevelCascadeAttentionWrapper:
    """Attention over shared and own pages: a level for each, merged."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Any = None,
        paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None,
    ) -> None:
        buffers = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        self._levels = []
        for i in range(num_levels):
            own: Any = [None if arr is None else arr[i] for arr in buffers]
            self._levels.append(
                BatchPrefillWithPagedKVCacheWrapper(
                    float_workspace_buffer, kv_layout, use_cuda_graph, *own
                )
            )

    def plan(
        self,
        qo_indptr_arr: Any,
        paged_kv_indptr_arr: Any,
        paged_kv_indices_arr: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        last = len(self._levels) - 1
        for i, level in enumerate(self._levels):
            level.plan(
                qo_indptr_arr[i],
                paged_kv_indptr_arr[i],
                paged_kv_indices_arr[i],
                paged_kv_last_page_len[i],
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and i == last,
                **options,
            )

    begin_forward = plan

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        parts = [level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]
        o, _ = merge_parts([o for o, _ in parts], [lse * _LN2 for _, lse in parts])
        return like(o, parts[0][0])

    forward = run


class _SharedPrefix:
    """K and V that all requests share, beside pages of their own."""

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        self._level = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._layout = kv_layout

    def forward(self, q: Any, k_shared: Any, v_shared: Any, unique_kv_cache: Any) -> Any:
        own = self._level.run(q, unique_kv_cache, return_lse=True)
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._layout, return_lse=True
        )
        return merge_state(*shared, *own)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """forward(q, k_shared, v_shared, unique_kv_cache), one row a request."""

    def begin_forward(
        self,
        unique_kv_indptr: Any,
        unique_kv_indices: Any,
        unique_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> None:
        self._level.plan(
            np.arange(len(unique_kv_last_page_len) + 1, dtype=np.int32),
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=data_type,
        )

    plan = begin_forward
    run = _SharedPrefix.forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """forward(q, k_shared, v_shared, unique_kv_cache), ragged rows; begin_forward() says whether causal."""

    def begin_forward(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = True,
        q_data_type: Any = "float16",
    ) -> None:
        self._level.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            causal=causal,
            q_data_type=q_data_type,
        )

    plan = begin_forward
    run = _SharedPrefix.forward
