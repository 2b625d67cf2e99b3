"""Attention over K and V in pages or ragged rows, on the CPU and on a CUDA GPU, in three calls: a
plan for a shape, prepare() once for a batch, run() for every layer of it. What is computed is what
kv8/attention.h says:

    s_j = cap(sm_scale * q . k_j * k_scale)          of the keys that a row sees
    o   = sum_j exp(s_j - m) v_j v_scale / (sum_j exp(s_j - m) + exp(sink - m))
    lse = ln sum_j exp(s_j)                          without the sink

A combination that no kernel computes is an UnsupportedError; nothing is dropped or replaced.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

from ._core import Handle, Threads, default_threads, enum, isa_of, pointer_of, struct, whole
from ._native import ffi, lib
from ._tensor import CPU, CUDA, dtype_code, dtype_name
from .attention_batch import AttentionBatch, Mask
from .pages import PageTable


class AttentionPlan(Handle):
    """A kernel for a shape. One plan serves all layers of it, batch after batch.

    max_batch requests, max_total_q rows of Q in all, max_kv_len keys a request: bounds of every run.
    page_size 0: K and V are ragged rows without pages. o_dtype None: that of Q, or f32 for e4m3 Q.
    device: the number of a GPU; None is the CPU.
    """

    _what = "attention plan"

    def __init__(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int = 0,
        q_dtype: Any = "bf16",
        k_dtype: Any = "e4m3",
        v_dtype: Any = None,
        o_dtype: Any = None,
        page_size: int = 16,
        causal: bool = True,
        window_left: int = -1,
        window_right: int = -1,
        has_mask: bool = False,
        has_key_range: bool = False,
        batch_invariant: bool = False,
        isa: str = "best",
        math: str = "auto",
        max_batch: int,
        max_total_q: int,
        max_kv_len: int,
        threads: Optional[Threads] = None,
        device: Optional[int] = None,
    ) -> None:
        self.q_dtype, self.k_dtype = dtype_name(q_dtype, "q_dtype"), dtype_name(k_dtype, "k_dtype")
        self.v_dtype = self.k_dtype if v_dtype is None else dtype_name(v_dtype, "v_dtype")
        if o_dtype is None:
            o_dtype = "f32" if self.q_dtype == "e4m3" else self.q_dtype
        self.o_dtype = dtype_name(o_dtype, "o_dtype")
        self.num_qo_heads = whole(num_qo_heads, "num_qo_heads")
        self.num_kv_heads = whole(num_kv_heads, "num_kv_heads")
        self.head_dim = whole(head_dim, "head_dim")
        self.v_head_dim = whole(v_head_dim, "v_head_dim") or self.head_dim
        self.page_size = whole(page_size, "page_size")
        self.has_mask, self.has_key_range = bool(has_mask), bool(has_key_range)
        spec = struct(
            "kv8_attention_spec",
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            q_dtype=dtype_code(self.q_dtype),
            k_dtype=dtype_code(self.k_dtype),
            v_dtype=dtype_code(self.v_dtype),
            o_dtype=dtype_code(self.o_dtype),
            page_size=self.page_size,
            causal=bool(causal),
            window_left=whole(window_left, "window_left"),
            window_right=whole(window_right, "window_right"),
            has_mask=self.has_mask,
            has_key_range=self.has_key_range,
            batch_invariant=bool(batch_invariant),
            isa=isa_of(isa),
            math=enum("KV8_MATH_", math, "math", ("auto", "f32", "bf16")),
            max_batch=whole(max_batch, "max_batch"),
            max_total_q=whole(max_total_q, "max_total_q"),
            max_kv_len=whole(max_kv_len, "max_kv_len"),
        )
        self.spec = spec
        if device is None:
            self.device = (CPU, 0)
            pool = pointer_of(threads or default_threads())
            self._own(
                lib.kv8_attention_plan_create,
                lib.kv8_attention_plan_destroy,
                "kv8_attention_plan",
                spec,
                pool,
                ffi.NULL,
                parents=(pool,),
            )
            self.workspace_size = int(lib.kv8_attention_workspace_size(pointer_of(self)))
        else:
            from .device import device_of

            self.device = (CUDA, device)
            gpu = pointer_of(device_of(device))
            self._own(
                lib.kv8_attention_device_plan_create,
                lib.kv8_attention_device_plan_destroy,
                "kv8_attention_device_plan",
                gpu,
                spec,
                ffi.NULL,
                parents=(gpu,),
            )
            self.workspace_size = int(lib.kv8_attention_device_workspace_size(pointer_of(self)))

    def prepare(
        self,
        qo_indptr: Any,
        pages: PageTable,
        *,
        qo_lens: Any = None,
        mask: Mask = None,
        key_begin: Any = None,
        key_end: Any = None,
        workspace: Any = None,
    ) -> AttentionBatch:
        """A batch: request b owns rows qo_indptr[b]:qo_indptr[b+1] of Q, of which the first
        qo_lens[b] are in use, and the keys that `pages` says.

        mask: a list of boolean [qo_len, kv_len] arrays, one per request, or (bits, indptr) packed as
        kv8_attention_args has it. key_begin, key_end [total_q]: a row sees keys in [begin, end).
        Arrays are the host's, or the GPU's for a plan of a GPU.
        """
        return AttentionBatch(self, qo_indptr, pages, qo_lens, mask, key_begin, key_end, workspace)
