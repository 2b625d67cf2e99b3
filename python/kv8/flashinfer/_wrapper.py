"""What FlashInfer's wrappers share: a plan and a prepared batch, masks, refusals.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Callable, Optional

import numpy as np

from .._core import InvalidError, UnsupportedError
from .._face import add_sinks, copy_into, refuse, refuse_gradients
from .._tensor import dtype_name, host_array, is_torch
from ..attention import AttentionPlan
from ..pages import Paged, PageTable

logger = logging.getLogger("kv8")
_LN2 = 0.6931471805599453


def _split_kv(paged_kv_cache: Any, kv_layout: str) -> tuple[Paged, Paged]:
    """K and V of a tuple, or of one tensor [pages, 2, ...]."""
    if isinstance(paged_kv_cache, tuple):
        k, v = paged_kv_cache
    else:
        if paged_kv_cache.ndim != 5 or paged_kv_cache.shape[1] != 2:
            raise InvalidError(
                f"paged_kv_cache has shape {list(paged_kv_cache.shape)}, must be [pages, 2, ..]"
            )
        k, v = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    return Paged(k, layout=kv_layout), Paged(v, layout=kv_layout)


def _on_gpu(x: Any) -> Optional[int]:
    return x.device.index if is_torch(x) and x.is_cuda else None


def _mask(custom: Any, packed: Any, qo_indptr: Any, kv_lens: Any) -> Any:
    """FlashInfer's flat masks as (bits, byte offsets)."""
    if custom is None and packed is None:
        return None
    qo = np.diff(host_array(qo_indptr, "qo_indptr", np.int64))
    sizes = qo * host_array(kv_lens, "kv_lens", np.int64)
    offsets = np.concatenate(([0], np.cumsum((sizes + 7) // 8))).astype(np.int64)
    if packed is not None:
        return host_array(packed, "packed_custom_mask", np.uint8), offsets
    flat = host_array(custom, "custom_mask", bool).reshape(-1)
    if flat.size != sizes.sum():
        raise InvalidError(f"custom_mask has {flat.size} entries, must be {sizes.sum()}")
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    bits = [np.packbits(part, bitorder="little") for part in parts]
    return np.concatenate([*bits, np.zeros(1, np.uint8)]), offsets


class _Wrapper:
    """What the wrappers share: a plan and a prepared batch, and runs over it."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str,
        use_cuda_graph: bool = False,
        **buffers: Any,
    ) -> None:
        """`buffers`: of a wrapper whose runs are captured, where plan() puts its index arrays."""
        self._layout = kv_layout
        self._plan: Optional[AttentionPlan] = None
        self._spec: Optional[dict[str, Any]] = None
        self._index = _on_gpu(float_workspace_buffer)
        self._buffers = buffers if use_cuda_graph else {}
        self._graph = bool(use_cuda_graph)
        self._had_sinks = False
        self.use_sinks = False
        if self._graph and self._index is None:
            raise UnsupportedError("use_cuda_graph is True on the CPU; supported: False")
        for name, buffer in self._buffers.items():
            if not is_torch(buffer) or str(buffer.dtype) != "torch.int32" or buffer.ndim != 1:
                raise InvalidError(f"the buffer of {name} must be an int32 tensor of one axis")

    def _into_buffers(self, qo_indptr: Any, table: PageTable) -> tuple[Any, PageTable]:
        """The index arrays where a captured graph reads them."""
        arrays = {**table.arrays, "qo_indptr": qo_indptr}
        for name, buffer in self._buffers.items():
            count, room = len(arrays[name]), len(buffer)
            if count > room or (count < room and name != "page_indices"):
                raise InvalidError(f"{name} has {count} entries, its buffer {room}")
            buffer[:count].copy_(sys.modules["torch"].as_tensor(arrays[name]))
            arrays[name] = buffer
        qo_indptr = arrays.pop("qo_indptr")
        return qo_indptr, PageTable(table.kind, table.batch, **arrays)

    def _plan_again(self, spec: dict[str, Any]) -> None:
        """plan() of a wrapper whose runs may lie in a graph: the plan stays, other lengths come."""
        assert self._spec is not None
        for name, value in spec.items():
            first = self._spec[name]
            if value > first if name in ("max_total_q", "max_kv_len") else value != first:
                raise InvalidError(
                    f"use_cuda_graph: {name} is {value}, the first plan() had {first}"
                )
        self._batch.refresh()

    def _begin(
        self,
        qo_indptr: Any,
        table: PageTable,
        kv_lens: Any,
        *,
        heads: tuple[int, int],
        dims: tuple[int, int],
        page_size: int,
        causal: bool,
        window_left: int = -1,
        q_data_type: Any,
        kv_data_type: Any,
        o_data_type: Any = None,
        mask: Any = None,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float],
    ) -> None:
        q_dtype = dtype_name(q_data_type, "q_data_type")
        kv_dtype = q_dtype if kv_data_type is None else dtype_name(kv_data_type, "kv_data_type")
        if o_data_type is None:
            o_data_type = "bf16" if q_dtype == "e4m3" else q_dtype
        host_qo = host_array(qo_indptr, "qo_indptr", np.int32)
        host_lens = host_array(kv_lens, "kv_lens", np.int32)
        self._total = int(host_qo[-1]) if host_qo.size else 0
        bound = int(host_lens.max()) if host_lens.size else 0
        if self._graph:
            qo_indptr, table = self._into_buffers(qo_indptr, table)
        if self._graph and table.kind == "csr":  # lengths may grow up to what the pages hold
            bound = max(bound, int(table.arrays["page_indices"].shape[0]) * page_size)
        self._soft_cap = float(logits_soft_cap or 0.0)
        self._sm_scale = sm_scale
        self._head_dim = dims[0]
        spec: dict[str, Any] = dict(
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dims[0],
            v_head_dim=dims[1],
            q_dtype=q_dtype,
            k_dtype=kv_dtype,
            o_dtype=o_data_type,
            page_size=page_size,
            causal=causal and mask is None,
            window_left=window_left,
            has_mask=mask is not None,
            max_batch=max(table.batch, 1),
            max_total_q=max(self._total, 1),
            max_kv_len=max(bound, 1),
            device=self._index,
        )
        if self._graph and self._spec is not None:
            self._plan_again(spec)
            return
        self._spec = spec
        self._plan = AttentionPlan(**spec)
        self._batch = self._plan.prepare(qo_indptr, table, mask=mask)

    def _split(self, cache: Any) -> tuple[Paged, Paged]:
        return _split_kv(cache, self._layout)

    def _check_sinks(self, sinks: Any) -> None:
        """The refusals of FlashInfer's sink kernels that are about numbers."""
        plan = self._plan
        assert plan is not None
        if sinks is None:
            if self.use_sinks:
                raise InvalidError("plan(use_sinks=True) and run() without sinks")
            return
        if plan.q_dtype in ("e4m3", "f32"):
            raise UnsupportedError(f"sinks with a {plan.q_dtype} query; supported: f16, bf16")
        if plan.k_dtype == "f32":
            raise UnsupportedError("sinks with f32 K and V; supported: 8 and 16 bits")

    def _run(
        self,
        q: Any,
        source: tuple[Any, ...],
        split: Optional[Callable[..., Any]],
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
        sinks: Any,
        sm_scale: Optional[float] = None,
    ) -> Any:
        """K and V are split(*source)."""
        if self._plan is None:
            raise InvalidError("run() before plan()")
        refuse_gradients(q, *source)
        self._check_sinks(sinks)
        scale = sm_scale if sm_scale is not None else self._sm_scale
        if q_scale is not None and self._plan.q_dtype != "e4m3":
            scale = (scale or self._head_dim**-0.5) * float(q_scale)
            q_scale = None
        operands = q_scale, k_scale, v_scale, sinks, None
        found = self._batch._run(
            source, split, q, operands, scale, self._soft_cap, out, return_lse, None, True
        )
        self._had_sinks = sinks is not None
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", self.describe())
        if not return_lse:
            return found
        return found[0], copy_into(lse, add_sinks(found[1], sinks, base2=True))

    def describe(self) -> str:
        """The kernel of the planned batch, its splits, the bytes it moves, and what the last run had:
        formats and sinks."""
        plan = self._plan
        if plan is None:
            raise InvalidError("describe() before plan()")
        formats = f"q {plan.q_dtype}, k {plan.k_dtype}, v {plan.v_dtype}"
        return f"{self._batch.describe()}, {formats}, {'sinks' if self._had_sinks else 'no sinks'}"

    def reset_workspace_buffer(self, *_: Any) -> None:
        """Nothing: kv8 keeps workspaces of its own."""

    def end_forward(self) -> None:
        """Nothing, as there."""


def _refuse_buffers(**buffers: Any) -> None:
    """What the peers' constructors take and kv8 has no use for it: masks that a graph reads, JIT."""
    refuse(**{name: (value, None) for name, value in buffers.items()})


def _refuse_modes(
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    rope_scale: Any = None,
    rope_theta: Any = None,
    prefix_len_ptr: Any = None,
    token_pos_in_items_ptr: Any = None,
    token_pos_in_items_len: int = 0,
    max_item_len_ptr: Any = None,
    non_blocking: bool = True,
    fixed_split_size: Any = None,
    disable_split_kv: bool = False,
    max_token_per_sequence: Any = None,
    max_sequence_kv: Any = None,
    backend: str = "auto",
    use_tensor_cores: bool = False,
    global_override_indptr_cpu: Any = None,
) -> None:
    """Refuses what kv8 does not compute; the last seven only advise a launch."""
    refuse(
        pos_encoding_mode=(pos_encoding_mode, "NONE"),
        use_fp16_qk_reduction=(use_fp16_qk_reduction, False),
        prefix_len_ptr=(prefix_len_ptr, None),
        token_pos_in_items_ptr=(token_pos_in_items_ptr, None),
        token_pos_in_items_len=(token_pos_in_items_len, 0),
        max_item_len_ptr=(max_item_len_ptr, None),
    )
