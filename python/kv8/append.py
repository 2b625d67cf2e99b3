"""Rows of K and V into pages of the caller's own: quantised, rotated on the way where asked for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from ._core import Handle, InvalidError, check, default_threads, pointer_of, struct
from ._native import ffi, lib
from ._tensor import (
    CPU,
    _foreign_view,
    address_of,
    dtype_code,
    host_array,
    is_torch,
    pointer,
    same_device,
    view,
)
from .pages import Paged


class _AppendPlan(Handle):
    _what = "append plan"

    def __init__(self, device: tuple[int, int], **fields: int) -> None:
        spec = struct("kv8_append_spec", **fields)
        if device[0] == CPU:
            pool = pointer_of(default_threads())
            self._own(
                lib.kv8_append_plan_create,
                lib.kv8_append_plan_destroy,
                "kv8_append_plan",
                spec,
                pool,
                ffi.NULL,
                parents=(pool,),
            )
        else:
            from .device import device_of

            gpu = pointer_of(device_of(device[1]))
            self._own(
                lib.kv8_append_device_plan_create,
                lib.kv8_append_device_plan_destroy,
                "kv8_append_device_plan",
                gpu,
                spec,
                parents=(gpu,),
            )


_plans: dict[Any, _AppendPlan] = {}


def _plan(device: tuple[int, int], **fields: int) -> _AppendPlan:
    key = (device, default_threads() if device[0] == CPU else None, *fields.values())
    if key not in _plans:
        if len(_plans) >= 64:
            _plans.clear()
        _plans[key] = _AppendPlan(device, **fields)
    return _plans[key]


def store(
    k: Any,
    v: Any,
    k_pages: Paged,
    v_pages: Paged,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    cos_sin: Any = None,
    interleaved: bool = False,
) -> None:
    """Writes row i of k [rows, kv_heads, dim] and v to slot slot_mapping[i] % page_size of page
    slot_mapping[i] // page_size; rows whose slot is negative are left out. code = x / scale, scales
    one number or [kv_heads]. K is rotated by cos_sin [rows, dim] where that is given."""
    rows, values = view(k, "k", 3), view(v, "v", 3)
    _, page_size, heads, dim = k_pages.shape
    if rows.shape[1:] != (heads, dim) or values.shape != (rows.shape[0], heads, v_pages.shape[3]):
        raise InvalidError(
            f"k has shape {list(rows.shape)} and v {list(values.shape)}, the pages "
            f"{list(k_pages.shape)} and {list(v_pages.shape)}"
        )
    if rows.dtype != values.dtype:
        raise InvalidError(f"k is {rows.dtype} and v {values.dtype}, must be one dtype")
    same_device(rows.device, v=values, k_pages=k_pages.data, v_pages=v_pages.data)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not pages.data.writable:
            raise InvalidError(f"{name} is read-only, and rows are written to it")
    plan = _plan(
        rows.device,
        num_kv_heads=heads,
        k_head_dim=dim,
        v_head_dim=v_pages.shape[3],
        page_size=page_size,
        src_dtype=dtype_code(rows.dtype, "dtype of k"),
        k_dtype=dtype_code(k_pages.dtype),
        v_dtype=dtype_code(v_pages.dtype),
    )
    slots = _slots(slot_mapping, rows.device)
    if tuple(slots.shape) != (rows.shape[0],):
        raise InvalidError(f"slot_mapping has shape {list(slots.shape)}, k {rows.shape[0]} rows")
    k_struct, v_struct = k_pages.struct(), v_pages.struct()
    args = struct(
        "kv8_append_args",
        batch=1,
        max_rows=rows.shape[0],
        interleaved=bool(interleaved),
        slot_mapping=pointer(address_of(slots), "int64_t *"),
        k=pointer(rows.address),
        k_stride_row=rows.strides[0],
        k_stride_head=rows.strides[1],
        v=pointer(values.address),
        v_stride_row=values.strides[0],
        v_stride_head=values.strides[1],
        k_pages=k_struct,
        v_pages=v_struct,
        scale_stride_head=1,
    )
    kept = [_scale(k_scale, "k_scale", heads, k), _scale(v_scale, "v_scale", heads, v)]
    args.k_scale, args.v_scale = (_floats(scale) for scale in kept)
    if cos_sin is not None:
        angles = view(cos_sin, "cos_sin", 2, "f32")
        same_device(rows.device, cos_sin=angles)
        if angles.shape != (rows.shape[0], dim) or angles.strides[0] != dim:
            raise InvalidError(
                f"cos_sin has shape {list(angles.shape)}, must be [{rows.shape[0]}, {dim}]"
            )
        args.cos_sin = pointer(angles.address, "float *")
    if rows.device[0] == CPU:
        check(lib.kv8_append_run(pointer_of(plan), args))
    else:
        from .device import current_stream

        check(lib.kv8_append_device_run(pointer_of(plan), current_stream(rows.device[1]), args))


def _slots(slot_mapping: Any, device: tuple[int, int]) -> Any:
    if device[0] == CPU:
        return host_array(slot_mapping, "slot_mapping", np.int64)
    import torch

    return torch.as_tensor(slot_mapping, dtype=torch.int64, device=f"cuda:{device[1]}").contiguous()


def _scale(scale: Any, name: str, heads: int, like: Any) -> Optional[Any]:
    """[heads] float32 on the device of `like`."""
    if scale is None:
        return None
    if is_torch(like) and like.is_cuda:
        import torch

        scale = torch.as_tensor(scale, dtype=torch.float32, device=like.device).reshape(-1)
        scale = scale.expand(heads).contiguous() if scale.numel() == 1 else scale.contiguous()
    else:
        scale = host_array(scale, name, np.float32).reshape(-1)
        scale = np.full(heads, scale[0], np.float32) if scale.size == 1 else scale
    if _foreign_view(scale, name).shape != (heads,):
        raise InvalidError(f"{name} has shape {list(scale.shape)}, must be one number or [{heads}]")
    return scale


def _floats(array: Any) -> Any:
    return ffi.NULL if array is None else pointer(address_of(array), "float *")
