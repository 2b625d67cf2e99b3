"""A batch that attention was prepared for: index arrays, runs over them, runs made again.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import numpy as np

from ._core import BusyError, InvalidError, UnsupportedError, check, pointer_of, struct, text
from ._launch import MAX_REPEATS, Repeat, Workspace, launch
from ._native import ffi, lib
from ._operands import _aligned, _as_float_array, _device_floats, _must, _one_page, pack_mask
from ._tensor import (
    CPU,
    View,
    _foreign_view,
    address_of,
    call_key,
    empty,
    host_array,
    is_torch,
    pointer,
    same_device,
    view,
)
from .device import torch_stream
from .pages import Paged, PageTable

if TYPE_CHECKING:
    from .attention import AttentionPlan

Keys = Union[Paged, Any]
Mask = Union[list[Any], tuple[Any, Any], None]
Operands = tuple[Any, Any, Any, Any, Any]  # q_scale, k_scale, v_scale, sinks, o_scale


class AttentionBatch:
    """A prepared batch; made by AttentionPlan.prepare."""

    def __init__(
        self,
        plan: AttentionPlan,
        qo_indptr: Any,
        pages: PageTable,
        qo_lens: Any,
        mask: Mask,
        key_begin: Any,
        key_end: Any,
        workspace: Any,
    ) -> None:
        self.plan = plan
        self._keep: list[Any] = []
        self._on_host = plan.device[0] == CPU
        self.copies_indices = self._copies_floats = False  # rather than point to the caller's
        self._repeats: dict[Any, Repeat] = {}
        self._args = args = struct("kv8_attention_args", batch=pages.batch)
        self._table = struct("kv8_page_table")
        args.pages = self._table
        indptr = self._ints(qo_indptr, "qo_indptr", args, "qo_indptr")
        if indptr.shape != (pages.batch + 1,):
            raise InvalidError(
                f"qo_indptr has shape {list(indptr.shape)}, must be [{pages.batch + 1}], "
                "one more than there are requests"
            )
        self.total_q = int(indptr[-1]) if self._on_host else -1  # a GPU's is not read
        if qo_lens is not None:
            self._per_request(self._ints(qo_lens, "qo_lens", args, "qo_lens"), "qo_lens")
        self.max_kv_row = -1
        self._set_pages(pages)
        self._set_mask(mask)
        if (key_begin is not None or key_end is not None) != plan.has_key_range or (
            key_begin is None
        ) != (key_end is None):
            raise InvalidError("key_begin and key_end go together, with has_key_range of the plan")
        if key_begin is not None:
            for name, values in (("key_begin", key_begin), ("key_end", key_end)):
                array = self._ints(values, name, args, name)
                if array.ndim != 1 or (self._on_host and array.shape[0] < self.total_q):
                    raise InvalidError(
                        f"{name} has shape {list(array.shape)}, must be [{self.total_q}]"
                    )
        self._lock = threading.Lock()
        if self._on_host:
            self._workspace = _aligned(plan.workspace_size) if workspace is None else workspace
            check(lib.kv8_attention_prepare(pointer_of(plan), args, self._workspace_pointer()))
        else:
            self._workspace = workspace
            self._prepared = False

    def _workspace_pointer(self) -> Any:
        return pointer(address_of(self._workspace))

    def _ints(self, values: Any, name: str, target: Any, field: str, dtype: str = "int32") -> Any:
        """Sets an index array of the args, on the plan's device; returns it."""
        if self._on_host:
            array = host_array(values, name, dtype)
        else:
            import torch

            wanted = getattr(torch, dtype)
            array = torch.as_tensor(values, dtype=wanted, device=f"cuda:{self.plan.device[1]}")
            array = array.contiguous()
            if not is_torch(values) or array.data_ptr() != values.data_ptr():
                self.copies_indices = True
        self._keep.append(array)
        setattr(target, field, pointer(address_of(array), dtype + "_t *"))
        return array

    def _per_request(self, array: Any, name: str) -> None:
        if tuple(array.shape) != (self._args.batch,):
            raise InvalidError(
                f"{name} has shape {list(array.shape)}, must be [{self._args.batch}]"
            )

    def _set_pages(self, pages: PageTable) -> None:
        table, arrays = self._table, pages.arrays
        if pages.kind == "csr":
            indptr = self._ints(arrays["page_indptr"], "page_indptr", table, "page_indptr")
            indices = self._ints(arrays["page_indices"], "page_indices", table, "page_indices")
            last = self._ints(arrays["last_page_len"], "last_page_len", table, "last_page_len")
            self._per_request(last, "last_page_len")
            if indices.ndim != 1:
                raise InvalidError(
                    f"page_indices has shape {list(indices.shape)}, must have 1 axis"
                )
            if self._on_host and indptr.size and int(indptr.max()) > indices.size:
                raise InvalidError(
                    f"page_indptr goes up to {int(indptr.max())}, page_indices has "
                    f"{indices.size} entries"
                )
        elif pages.kind == "dense":
            block = self._ints(arrays["block_table"], "block_table", table, "block_table")
            lens = self._ints(arrays["seq_lens"], "seq_lens", table, "seq_lens")
            self._per_request(lens, "seq_lens")
            if block.ndim != 2 or block.shape[0] < pages.batch:
                raise InvalidError(
                    f"block_table has shape {list(block.shape)}, must be [{pages.batch}, pages]"
                )
            room = block.shape[1] * self.plan.page_size
            if self._on_host and lens.size and int(lens.max()) > room:
                raise InvalidError(
                    f"seq_lens goes up to {int(lens.max())}, block_table has room for {room}"
                )
            table.block_table_stride = block.shape[1]
        else:
            indptr = self._ints(arrays["kv_indptr"], "kv_indptr", table, "kv_indptr")
            if arrays["seq_lens"] is not None:
                self._per_request(
                    self._ints(arrays["seq_lens"], "seq_lens", table, "seq_lens"), "seq_lens"
                )
            if self._on_host and indptr.size:
                self.max_kv_row = int(indptr.max())

    def _set_mask(self, mask: Mask) -> None:
        if (mask is not None) != self.plan.has_mask:
            raise InvalidError(
                f"mask is {'given' if mask is not None else 'missing'} and has_mask of the "
                f"plan is {self.plan.has_mask}"
            )
        if mask is None:
            return
        bits, indptr = mask if isinstance(mask, tuple) else pack_mask(mask)
        bits = self._ints(bits, "mask bits", self._args, "mask_bits", "uint8")
        indptr = self._ints(indptr, "mask indptr", self._args, "mask_indptr", "int64")
        if tuple(indptr.shape) != (self._args.batch + 1,):
            raise InvalidError(
                f"mask indptr has shape {list(indptr.shape)}, must be [{self._args.batch + 1}]"
            )
        if self._on_host and int(indptr.max()) > bits.size:
            raise InvalidError(
                f"mask indptr goes up to {int(indptr.max())}, mask bits has {bits.size}"
            )

    def run(
        self,
        q: Any,
        k: Keys,
        v: Keys,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: Any = None,
        sm_scale: Optional[float] = None,
        soft_cap: float = 0.0,
        out: Any = None,
        o_scale: Any = None,
        return_lse: bool = False,
        lse: Any = None,
        lse_base2: bool = False,
    ) -> Any:
        """o [total_q, num_qo_heads, v_head_dim], or (o, lse [total_q, num_qo_heads]).

        q: [total_q, num_qo_heads, head_dim]. k, v: a Paged, pages [page, slot, kv_head, dim], or
        without pages rows [row, kv_head, dim]; int8 comes as (codes, row_scale). Scales are a
        number, [num_kv_heads] or [batch, num_kv_heads]; q_scale, for e4m3 Q alone, also
        [total_q, num_kv_heads, group_size]. sinks: [num_qo_heads]. sm_scale None = 1/sqrt(head_dim).
        soft_cap 0 = off. out and lse are written to where they are given; lse may be a transposed
        view.
        """
        operands = q_scale, k_scale, v_scale, sinks, o_scale
        return self._run(
            (k, v), None, q, operands, sm_scale, soft_cap, out, return_lse, lse, lse_base2
        )

    def _run(
        self,
        source: tuple[Any, ...],
        split: Optional[Callable[..., Any]],
        q: Any,
        operands: Operands,
        sm_scale: Optional[float],
        soft_cap: float,
        out: Any,
        return_lse: bool,
        lse: Any,
        lse_base2: bool,
    ) -> Any:
        """run() over K and V as a caller has them: split(*source), asked for where no earlier call had
        the same."""
        if not self._lock.acquire(False):
            raise BusyError("the batch is in use: one thread at a time")
        try:
            sm_scale = None if sm_scale is None else float(sm_scale)
            key = None
            if not self._on_host and is_torch(q):
                scalars = sm_scale, soft_cap, return_lse, lse_base2
                key = call_key((q, out, lse), (*source, *operands), scalars)
                repeat = None if key is None else self._repeats.get(key)
                if repeat is not None:
                    stream = torch_stream(self.plan.device[1])
                    return repeat.run(q, out, lse, return_lse, stream, self._workspace, False)
            self._copies_floats = False
            k, v = source if split is None else split(*source)
            kept, out, lse = self._fill(
                q, k, v, *operands, sm_scale, soft_cap, out, return_lse, lse, lse_base2
            )
            if self._on_host:
                plan = pointer_of(self.plan)
                check(lib.kv8_attention_run(plan, self._args, self._workspace_pointer()))
            else:
                self._launch()
            if key is not None and not self._copies_floats:
                while len(self._repeats) >= MAX_REPEATS:
                    self._repeats.pop(next(iter(self._repeats)))
                self._repeats[key] = Repeat(self.plan, self._args, kept, q)
            return (out, lse) if return_lse else out
        finally:
            self._lock.release()

    def _launch(self) -> None:
        if self._workspace is None:
            self._workspace = Workspace(self.plan)
        stream = torch_stream(self.plan.device[1])
        launch(self.plan, self._args, stream, self._workspace, prepare=not self._prepared)
        self._prepared = True

    def refresh(self) -> None:
        """After the values of a GPU's index arrays changed: cuts the work anew for runs to come, those of
        captured graphs too."""
        if not self._on_host and self._workspace is not None:
            plan, queue = pointer_of(self.plan), pointer_of(torch_stream(self.plan.device[1]))
            space = self._workspace.init(plan, queue)
            check(lib.kv8_attention_device_prepare(plan, queue, self._args, space))

    def repeat(self, q: Any) -> Optional["Repeat"]:
        """The run just made of q, to be made again over other q, o and lse; None where the args point to
        copies."""
        if self._on_host or self.copies_indices or self._copies_floats:
            return None
        return Repeat(self.plan, self._args, [self._table, *self._kept], q)

    def reference(self, q: Any, k: Keys, v: Keys, **options: Any) -> tuple[Any, Any]:
        """The oracle: o and lse in float64, slow and obvious, of the same arguments as run()."""
        if not self._on_host:
            raise UnsupportedError("the reference runs on the CPU")
        plan = self.plan
        kept, _, _ = self._fill(q, k, v, return_lse=True, **options)
        o = np.zeros((self.total_q, plan.num_qo_heads, plan.v_head_dim))
        lse = np.zeros((self.total_q, plan.num_qo_heads))
        check(
            lib.kv8_attention_reference(
                plan.spec,
                self._args,
                pointer(address_of(o), "double *"),
                pointer(address_of(lse), "double *"),
            )
        )
        del kept
        return o, lse

    def describe(self) -> str:
        """Kernel, splits, bytes to move: one line."""
        line = ffi.new("char[]", 1024)
        plan = pointer_of(self.plan)
        if self._on_host:
            check(
                lib.kv8_attention_describe(plan, self._args, self._workspace_pointer(), line, 1024)
            )
        else:
            args = self._args if self._args.k else ffi.NULL
            check(lib.kv8_attention_device_describe(plan, args, line, 1024))
        return text(line) or ""

    def _fill(
        self,
        q: Any,
        k: Keys,
        v: Keys,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: Any = None,
        o_scale: Any = None,
        sm_scale: Optional[float] = None,
        soft_cap: float = 0.0,
        out: Any = None,
        return_lse: bool = False,
        lse: Any = None,
        lse_base2: bool = False,
    ) -> tuple[list[Any], Any, Any]:
        plan, args = self.plan, self._args
        rows = view(q, "q", 3, plan.q_dtype)
        total = rows.shape[0] if self.total_q < 0 else self.total_q
        _must(rows, "q", (total, plan.num_qo_heads, plan.head_dim), exact=False)
        k_pages = self._keys(k, "k", plan.k_dtype, plan.head_dim)
        v_pages = self._keys(v, "v", plan.v_dtype, plan.v_head_dim)
        if out is None:
            out = empty((rows.shape[0], plan.num_qo_heads, plan.v_head_dim), plan.o_dtype, q)
            if self._on_host and rows.shape[0] > total:
                out[total:] = 0
        o_rows = view(out, "out", 3, plan.o_dtype, writable=True)
        _must(o_rows, "out", (total, plan.num_qo_heads, plan.v_head_dim), exact=False)
        same_device(plan.device, q=rows, k=k_pages.data, v=v_pages.data, out=o_rows)
        k_struct, v_struct = k_pages.struct(), v_pages.struct()
        if plan.page_size == 0:
            k_struct.num_pages = v_struct.num_pages = 0
        kept = [rows, k_pages, v_pages, o_rows, k_struct, v_struct]
        args.q, args.o = pointer(rows.address), pointer(o_rows.address)
        args.q_stride_row, args.q_stride_head = rows.strides[0], rows.strides[1]
        args.o_stride_row, args.o_stride_head = o_rows.strides[0], o_rows.strides[1]
        args.k, args.v = k_struct, v_struct
        for name, values in (("k_scale", k_scale), ("v_scale", v_scale)):
            address, per_batch, per_head = self._scale(values, name, kept)
            setattr(args, name, address)
            setattr(args, name + "_stride_batch", per_batch)
            setattr(args, name + "_stride_head", per_head)
        self._set_q_scale(q_scale, kept)
        args.sm_scale = 0.0 if sm_scale is None else sm_scale
        if sm_scale is not None and not sm_scale > 0:
            raise InvalidError(f"sm_scale is {sm_scale}, must be above 0")
        args.logits_soft_cap = soft_cap
        args.sink_logit = self._floats(sinks, "sinks", (plan.num_qo_heads,), kept)
        if o_scale is not None:
            self._scale_view(o_scale, "o_scale")
        args.o_scale = self._floats(o_scale, "o_scale", (), kept)
        args.lse_base2 = bool(lse_base2)
        lse = self._set_lse(rows, lse, return_lse, q, kept)
        self._kept = kept  # describe reads the args
        return kept, out, lse

    def _set_lse(self, rows: View, lse: Any, return_lse: bool, q: Any, kept: list[Any]) -> Any:
        args = self._args
        args.lse = ffi.NULL
        if lse is None and return_lse:
            lse = empty((rows.shape[0], self.plan.num_qo_heads), "f32", q)
            if self._on_host and rows.shape[0] > self.total_q:
                lse[self.total_q :] = -np.inf
        if lse is None:
            return None
        seen = _foreign_view(lse, "lse")
        if (
            seen.dtype != "f32"
            or len(seen.shape) != 2
            or not seen.writable
            or (seen.shape[0] < max(self.total_q, 0))
            or seen.shape[1] != self.plan.num_qo_heads
        ):
            raise InvalidError(
                f"lse has shape {list(seen.shape)} and dtype {seen.dtype}, must be "
                f"[{rows.shape[0]}, {self.plan.num_qo_heads}] f32"
            )
        same_device(self.plan.device, lse=seen)
        args.lse = pointer(seen.address, "float *")
        args.lse_stride_row, args.lse_stride_head = seen.strides
        kept.append(seen)
        return lse

    def _keys(self, x: Keys, name: str, dtype: str, dim: int) -> Paged:
        plan = self.plan
        if not isinstance(x, Paged):
            data, scale = x if isinstance(x, tuple) else (x, None)
            if plan.page_size == 0:
                data = _one_page(view(data, name, 3, dtype))
                scale = (
                    scale if scale is None else _one_page(view(scale, "row_scale of " + name, 2))
                )
            x = Paged(data, dtype=dtype, row_scale=scale)
        if x.dtype != dtype:
            raise InvalidError(f"{name} has dtype {x.dtype}, the plan {dtype}")
        shape = x.shape
        if shape[2:] != (plan.num_kv_heads, dim) or plan.page_size not in (0, shape[1]):
            raise InvalidError(
                f"{name} has shape {list(shape)}, must be [pages, {plan.page_size or 'rows'},"
                f" {plan.num_kv_heads}, {dim}]"
            )
        if plan.page_size == 0 and (shape[0] != 1 or self.max_kv_row > shape[1]):
            raise InvalidError(
                f"{name} has {shape[1]} rows, kv_indptr goes up to {self.max_kv_row}"
            )
        return x

    def _scale(self, values: Any, name: str, kept: list[Any]) -> tuple[Any, int, int]:
        """Address and strides over batch and KV head of a scale."""
        if values is None:
            return ffi.NULL, 0, 0
        seen = self._scale_view(values, name)
        batch, heads = int(self._args.batch), self.plan.num_kv_heads
        kept.append(seen)
        shape, strides = seen.shape, seen.strides
        if len(shape) == 1 and shape[0] in (1, heads):
            shape, strides = (1,) + shape, (0,) + strides
        if len(shape) == 0:
            shape, strides = (1, 1), (0, 0)
        if len(shape) != 2 or shape[0] not in (1, batch) or shape[1] not in (1, heads):
            raise InvalidError(
                f"{name} has shape {list(seen.shape)}, must be one number, [{heads}] or "
                f"[{batch}, {heads}]"
            )
        return (
            pointer(seen.address, "float *"),
            strides[0] if shape[0] > 1 else 0,
            strides[1] if shape[1] > 1 else 0,
        )

    def _set_q_scale(self, values: Any, kept: list[Any]) -> None:
        plan, args = self.plan, self._args
        group = plan.num_qo_heads // max(plan.num_kv_heads, 1)
        if values is not None and plan.q_dtype != "e4m3":
            raise InvalidError(f"q_scale is given and q is {plan.q_dtype}: e4m3 alone has one")
        args.q_scale_stride_row = args.q_scale_stride_group = 0
        if values is not None and getattr(values, "ndim", 0) == 3:
            seen = self._scale_view(values, "q_scale")
            if seen.shape[0] < self.total_q or seen.shape[1:] != (plan.num_kv_heads, group):
                raise InvalidError(
                    f"q_scale has shape {list(seen.shape)}, must be [{self.total_q}, "
                    f"{plan.num_kv_heads}, {group}]"
                )
            kept.append(seen)
            args.q_scale = pointer(seen.address, "float *")
            args.q_scale_stride_batch = 0
            (args.q_scale_stride_row, args.q_scale_stride_kv_head, args.q_scale_stride_group) = (
                seen.strides
            )
            return
        if values is None and plan.q_dtype == "e4m3":
            values = 1.0
        (args.q_scale, args.q_scale_stride_batch, args.q_scale_stride_kv_head) = self._scale(
            values, "q_scale", kept
        )

    def _scale_view(self, values: Any, name: str) -> View:
        """_float_view() of scales; those that the host has are looked at."""
        if self._on_host or not is_torch(values):
            array = _as_float_array(values, name)
            wrong = array[~((array > 0) & (array < np.inf))]
            if wrong.size:
                raise InvalidError(f"{name} holds {wrong.flat[0]}, must be finite and above 0")
        return self._float_view(values, name)

    def _float_view(self, values: Any, name: str) -> View:
        """float32 values on the plan's device."""
        if self._on_host:
            if not isinstance(values, np.ndarray) or values.dtype != np.float32:
                values = _as_float_array(values, name)
            return _foreign_view(values, name)
        floats = _device_floats(values, self.plan.device[1])
        if not isinstance(values, (int, float)) and (
            not is_torch(values) or floats.data_ptr() != values.data_ptr()
        ):
            self._copies_floats = True
        return _foreign_view(floats, name)

    def _floats(self, values: Any, name: str, shape: tuple[int, ...], kept: list[Any]) -> Any:
        if values is None:
            return ffi.NULL
        seen = self._float_view(values, name)
        count = int(np.prod(seen.shape, dtype=np.int64))
        if (len(seen.shape) > 1 and shape) or count != (shape[0] if shape else 1):
            raise InvalidError(f"{name} has shape {list(seen.shape)}, must be {list(shape)}")
        if seen.shape and seen.strides[0] != 1 and seen.shape[0] > 1:
            raise InvalidError(f"{name} has stride {seen.strides[0]}, must be 1")
        kept.append(seen)
        return pointer(seen.address, "float *")
