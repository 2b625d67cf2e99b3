"""Arguments of attention brought to the form that the library reads: scales, masks, workspaces.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._core import InvalidError
from ._tensor import View, address_of, host_array, is_torch


def _one_page(rows: View) -> View:
    return View(
        rows.address,
        (1,) + rows.shape,
        (0,) + rows.strides,
        rows.dtype,
        rows.device,
        rows.owner,
        rows.writable,
    )


def _must(seen: View, name: str, shape: tuple[int, ...], exact: bool = True) -> None:
    if (
        seen.shape[1:] != shape[1:]
        or seen.shape[0] < shape[0]
        or (exact and seen.shape[0] != shape[0])
    ):
        raise InvalidError(f"{name} has shape {list(seen.shape)}, must be {list(shape)}")


def _as_float_array(values: Any, name: str) -> Any:
    """float32 on the host, with strides of 0 kept where a torch tensor has them."""
    if is_torch(values):
        if values.device.type == "cpu" and str(values.dtype) == "torch.float32":
            return values.detach().numpy()
        return values.detach().float().cpu().numpy()
    return host_array(values, name, np.float32)


_device_scalars: dict[tuple[float, int], Any] = {}


def _device_floats(values: Any, index: int) -> Any:
    import torch

    if isinstance(values, (int, float)):
        key = (float(values), index)
        if key not in _device_scalars:
            _device_scalars[key] = torch.full((1,), float(values), device=f"cuda:{index}")
        return _device_scalars[key]
    if is_torch(values) and values.is_cuda and values.dtype == torch.float32:
        return values.detach()
    return torch.as_tensor(values, dtype=torch.float32, device=f"cuda:{index}").detach()


def pack_mask(masks: list[Any]) -> tuple[Any, Any]:
    """Boolean [qo_len, kv_len] arrays of every request as (bits, byte offsets)."""
    packed = [
        np.packbits(host_array(mask, "mask", bool).reshape(-1), bitorder="little") for mask in masks
    ]
    indptr = np.concatenate(([0], np.cumsum([bits.size for bits in packed]))).astype(np.int64)
    return np.concatenate(packed + [np.zeros(1, np.uint8)]), indptr


def _aligned(size: int) -> Any:
    whole_buffer = np.empty(size + 64, np.uint8)
    start = -address_of(whole_buffer) % 64
    return whole_buffer[start : start + max(size, 1)]
