"""Attention in one call: a plan, prepare and run, with the plans of shapes that repeat kept.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any, Optional

import numpy as np

from ._core import InvalidError, TypeMismatchError
from ._launch import MAX_REPEATS, Workspace
from ._operands import _aligned, _one_page
from ._tensor import (
    CPU,
    _foreign_view,
    address_of,
    call_key,
    dtype_name,
    host_array,
    is_torch,
    round_up_pow2,
    view,
)
from .attention import AttentionPlan
from .attention_batch import Keys, Mask
from .device import torch_stream
from .pages import Paged, PageTable

logger = logging.getLogger("kv8")

_MAX_PLANS = 256
_MAX_SPACES = 32
_plans: dict[tuple[Any, ...], AttentionPlan] = {}
_plans_lock = threading.Lock()
_scratch = threading.local()


def plan_for(**spec: Any) -> AttentionPlan:
    """A plan from the pool of those in use, or a new one."""
    key = tuple(spec.values())
    plan = _plans.get(key)
    if plan is None or plan._held._pid != os.getpid():
        plan = AttentionPlan(**spec)
        with _plans_lock:
            while len(_plans) >= _MAX_PLANS:
                _plans.pop(next(iter(_plans)))
            _plans[key] = plan
    return plan


def _scratch_of(plan: AttentionPlan) -> Any:
    """This thread's workspace for one-call runs on the CPU: nothing in it outlives a call."""
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.size < plan.workspace_size:
        buffer = _scratch.buffer = _aligned(round_up_pow2(plan.workspace_size))
    return buffer


def attend(
    q: Any,
    k: Keys,
    v: Keys,
    pages: Optional[PageTable] = None,
    qo_indptr: Any = None,
    *,
    layout: str = "NHD",
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    sinks: Any = None,
    sm_scale: Optional[float] = None,
    soft_cap: float = 0.0,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_dtype: Any = None,
    v_dtype: Any = None,
    q_dtype: Any = None,
    o_dtype: Any = None,
    qo_lens: Any = None,
    mask: Mask = None,
    key_begin: Any = None,
    key_end: Any = None,
    out: Any = None,
    o_scale: Any = None,
    return_lse: bool = False,
    lse: Any = None,
    lse_base2: bool = False,
    batch_invariant: bool = False,
    math: str = "auto",
    max_kv_len: Optional[int] = None,
) -> Any:
    """Attention in one call: AttentionPlan, prepare and run, with plans kept for shapes that repeat.

    With `pages`, q is [total_q, num_qo_heads, head_dim], k and v are pages in `layout` (or rows
    [row, kv_head, dim] with PageTable.ragged), and qo_indptr says whose the rows are; without it
    every request has one row. Without `pages` q is [batch, rows, num_qo_heads, head_dim], k and v
    are [batch, keys, num_kv_heads, dim], and the result has q's axes; or all three without the first
    axis, for one request. Scales, masks and results are as in AttentionBatch.run and prepare.
    k_dtype, v_dtype and q_dtype name the format of uint8 and uint16 codes. max_kv_len bounds the keys
    of a request where the lengths lie on a GPU.
    """
    if pages is None:
        return _attend_dense(locals())
    sm_scale = None if sm_scale is None else float(sm_scale)
    key = None
    if is_torch(q) and q.is_cuda:
        stream = torch_stream(q.get_device())
        read = k, v, qo_indptr, *pages.arrays.values(), sinks, k_scale, v_scale, q_scale, o_scale
        plain: Any = (stream, layout, causal, window_left, window_right, sm_scale, soft_cap)
        plain += k_dtype, v_dtype, q_dtype, o_dtype, return_lse, lse_base2, batch_invariant
        key = call_key(
            (q, out, lse), (*read, qo_lens, mask, key_begin, key_end), (*plain, math, max_kv_len)
        )
        found = again(key, q, out, lse, return_lse, stream)
        if found is not None:
            return found
    seen = view(q, "q", 3, None if q_dtype is None else dtype_name(q_dtype))
    keys = k if isinstance(k, Paged) else _as_pages(k, "k", k_dtype, layout, pages)
    values = v if isinstance(v, Paged) else _as_pages(v, "v", v_dtype or k_dtype, layout, pages)
    on_host = seen.device[0] == CPU
    if qo_indptr is None:
        if seen.shape[0] != pages.batch:
            raise InvalidError(
                f"q has {seen.shape[0]} rows for {pages.batch} requests and no qo_indptr"
            )
        qo_indptr = _arange(pages.batch + 1, seen.device)
    if max_kv_len is None:
        max_kv_len = _longest(pages, keys, on_host)
    total = seen.shape[0]
    plan = plan_for(
        num_qo_heads=seen.shape[1],
        num_kv_heads=keys.shape[2],
        head_dim=seen.shape[2],
        v_head_dim=values.shape[3],
        q_dtype=seen.dtype,
        k_dtype=keys.dtype,
        v_dtype=values.dtype,
        o_dtype=None if o_dtype is None and out is None else _o_dtype(o_dtype, out, seen.dtype),
        page_size=0 if pages.kind == "ragged" else keys.page_size,
        causal=bool(causal),
        window_left=window_left,
        window_right=window_right,
        has_mask=mask is not None,
        has_key_range=key_begin is not None,
        batch_invariant=batch_invariant,
        math=math,
        max_batch=max(round_up_pow2(pages.batch) if on_host else pages.batch, 1),
        max_total_q=max(round_up_pow2(total) if on_host else total, 1),
        max_kv_len=max(round_up_pow2(max_kv_len), 1),
        device=None if on_host else seen.device[1],
    )
    batch = plan.prepare(
        qo_indptr,
        pages,
        qo_lens=qo_lens,
        mask=mask,
        key_begin=key_begin,
        key_end=key_end,
        workspace=_scratch_of(plan) if on_host else _space_of(plan, torch_stream(seen.device[1])),
    )
    result = batch.run(
        q,
        keys,
        values,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        out=out,
        o_scale=o_scale,
        return_lse=return_lse,
        lse=lse,
        lse_base2=lse_base2,
    )
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", batch.describe())
        key = None  # every call says what it is
    _scratch.batch = batch if logger.isEnabledFor(logging.DEBUG) else None
    _scratch.repeat = None if key is None else batch.repeat(q)
    remember(key)
    return result


def again(key: Any, q: Any, out: Any, lse: Any, return_lse: bool, stream: Any) -> Any:
    """What a call gives whose key an earlier one had; None where none had."""
    repeat = None if key is None else _of_thread("repeats").get(key)
    if repeat is None:
        return None
    _scratch.repeat = repeat
    space = _space_of(repeat.plan, stream)
    return repeat.run(q, out, lse, return_lse, stream, space, prepare=True)


def remember(key: Any) -> None:
    """The args of this thread's latest attend() on a GPU serve calls of this key too."""
    repeat = _scratch.repeat
    if repeat is None:
        return
    kept = _of_thread("repeats")
    while len(kept) >= MAX_REPEATS:
        kept.pop(next(iter(kept)))
    kept[key] = repeat


def _of_thread(name: str) -> dict[Any, Any]:
    """Of this thread, as args and workspaces are written to by every call."""
    try:
        return getattr(_scratch, name)  # type: ignore[no-any-return]
    except AttributeError:
        setattr(_scratch, name, {})
        return getattr(_scratch, name)  # type: ignore[no-any-return]


def _after_fork() -> None:
    """Nothing of a GPU is used in a child."""
    global _scratch
    _scratch = threading.local()


os.register_at_fork(after_in_child=_after_fork)


def _space_of(plan: AttentionPlan, stream: Any) -> Workspace:
    """The workspace of this thread's calls of a plan on a stream; a new one in the memory of a graph
    that is captured."""
    if sys.modules["torch"].cuda.is_current_stream_capturing():
        return Workspace(plan)
    spaces = _of_thread("spaces")
    space: Optional[Workspace] = spaces.get((plan, stream))
    if space is None:
        while len(spaces) >= _MAX_SPACES:
            spaces.pop(next(iter(spaces)))
        space = spaces[plan, stream] = Workspace(plan)
    return space


def _o_dtype(o_dtype: Any, out: Any, q_dtype: str) -> str:
    if o_dtype is not None:
        return dtype_name(o_dtype, "o_dtype")
    found = _foreign_view(out, "out").dtype
    return q_dtype if found in ("u8", "u16") else found


def _as_pages(x: Any, name: str, dtype: Any, layout: str, pages: PageTable) -> Paged:
    data, scale = x if isinstance(x, tuple) else (x, None)
    if pages.kind == "ragged":
        data = _one_page(view(data, name, 3))
        scale = scale if scale is None else _one_page(view(scale, "row_scale of " + name, 2))
        layout = "NHD"
    return Paged(data, dtype=dtype, layout=layout, row_scale=scale)


def _longest(pages: PageTable, keys: Paged, on_host: bool) -> int:
    arrays = pages.arrays
    if pages.kind == "ragged":
        if not on_host:
            return keys.shape[1]
        steps = np.diff(host_array(arrays["kv_indptr"], "kv_indptr", np.int64))
        return int(steps.max()) if steps.size else 0
    if pages.kind == "dense":
        if not on_host:
            return int(arrays["block_table"].shape[1]) * keys.page_size
        lens = host_array(arrays["seq_lens"], "seq_lens", np.int64)
        return int(lens.max()) if lens.size else 0
    if not on_host and is_torch(arrays["page_indptr"]) and arrays["page_indptr"].is_cuda:
        return int(arrays["page_indices"].shape[0]) * keys.page_size
    steps = np.diff(host_array(arrays["page_indptr"], "page_indptr", np.int64))
    return int(steps.max()) * keys.page_size if steps.size else 0


_aranges: dict[tuple[int, tuple[int, int]], Any] = {}


def _arange(n: int, device: tuple[int, int]) -> Any:
    found = _aranges.get((n, device))
    if found is None:
        if device[0] == CPU:
            found = np.arange(n, dtype=np.int32)
        else:
            import torch

            found = torch.arange(n, dtype=torch.int32, device=f"cuda:{device[1]}")
        _aranges[n, device] = found
    return found


def _attend_dense(options: dict[str, Any]) -> Any:
    """attend() without pages: a batch of equal lengths, or one request."""
    q, k, v, out, lse = (options.pop(name) for name in ("q", "k", "v", "out", "lse"))
    options.pop("pages")
    if options.pop("qo_indptr") is not None or options.pop("qo_lens") is not None:
        raise InvalidError("qo_indptr and qo_lens go with pages")
    if options.pop("layout") != "NHD":
        raise InvalidError("layout goes with pages")
    if isinstance(k, (tuple, Paged)) or isinstance(v, (tuple, Paged)):
        raise InvalidError("int8 codes and their scales go with pages")
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
        if not hasattr(x, "ndim") and (x is not None or name in "qkv"):
            raise TypeMismatchError(f"{name} is a {type(x).__name__}, must be an array")
    if q.ndim == 3 and k.ndim == 3 and v.ndim == 3:
        device = _foreign_view(q, "q").device
        table = PageTable.ragged(_pair(k.shape[0], device))
        return attend(q, k, v, table, _pair(q.shape[0], device), out=out, lse=lse, **options)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InvalidError(
            f"q has shape {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, must be "
            "[batch, tokens, heads, dim] of one batch, or all without batch"
        )
    if k.shape[1] != v.shape[1]:
        raise InvalidError(f"k has {k.shape[1]} keys and v {v.shape[1]}")
    batch, rows = int(q.shape[0]), int(q.shape[1])
    flat = q.reshape(batch * rows, *q.shape[2:])
    seen = _foreign_view(flat, "q")
    if k.shape[1] == 0:  # a page holds a key at least
        k, v = (x.reshape(0, *x.shape[2:]) for x in (k, v))
        table = PageTable.ragged(np.zeros(batch + 1, np.int32))
    else:
        table = PageTable.batched(np.full(batch, k.shape[1], np.int32))
    indptr = np.arange(batch + 1, dtype=np.int32) * rows
    if seen.device[0] != CPU:
        import torch

        indptr = torch.as_tensor(indptr, device=flat.device)
        table.arrays = {
            name: torch.as_tensor(x, device=flat.device) for name, x in table.arrays.items()
        }
    for name, given in (("out", out), ("lse", lse)):
        if given is not None and tuple(given.shape[:2]) != (batch, rows):
            raise InvalidError(
                f"{name} has shape {list(given.shape)}, must begin with {[batch, rows]}"
            )
    result = attend(
        flat,
        k,
        v,
        table,
        indptr,
        out=None if out is None else _flatten(out, "out"),
        lse=None if lse is None else _flatten(lse, "lse"),
        **options,
    )
    if not options["return_lse"]:
        return out if out is not None else result.reshape(batch, rows, *result.shape[1:])
    o, found = result
    return (
        out if out is not None else o.reshape(batch, rows, *o.shape[1:]),
        lse if lse is not None else found.reshape(batch, rows, *found.shape[1:]),
    )


def _flatten(x: Any, name: str) -> Any:
    """[batch, rows, ...] as [batch * rows, ...] in place."""
    flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    if x.size != 0 and address_of(flat) != address_of(x):
        raise InvalidError(f"{name} has strides that [batch * rows] has not")
    return flat


def _pair(n: int, device: tuple[int, int]) -> Any:
    if device[0] == CPU:
        return np.array([0, n], np.int32)
    import torch

    return torch.tensor([0, n], dtype=torch.int32, device=f"cuda:{device[1]}")


def last_kernel() -> str:
    """What describe() says of this thread's latest attend(), kept while the logger "kv8" is at DEBUG."""
    batch = getattr(_scratch, "batch", None)
    if batch is None:
        raise InvalidError('nothing is kept: set logging.getLogger("kv8") to DEBUG')
    return str(batch.describe())
