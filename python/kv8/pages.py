"""K and V in pages, and where the keys of a batch lie in them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from ._core import InvalidError, enum, struct
from ._tensor import CPU, View, dtype_name, host_array, pointer, to_dlpack, view

LAYOUTS = ("NHD", "HND")


class Paged:
    """K or V in pages: a tensor [page, slot, kv_head, head_dim] ("NHD") or [page, kv_head, slot,
    head_dim] ("HND") where it lies. int8 codes come with `row_scale`, the f16 scale of each row:
    [page, slot, kv_head] or [page, kv_head, slot]."""

    def __init__(
        self, data: Any, *, dtype: Any = None, layout: str = "NHD", row_scale: Any = None
    ) -> None:
        enum("KV8_LAYOUT_", layout, "layout", LAYOUTS)
        seen = view(data, "pages", 4, None if dtype is None else dtype_name(dtype))
        if dtype is None:
            dtype_name(seen.dtype, "dtype of pages")
        scales = None if row_scale is None else view(row_scale, "row_scale", 3)
        if scales is not None and scales.dtype != "f16":
            raise InvalidError(f"row_scale has dtype {scales.dtype}, must be f16")
        if (seen.dtype == "int8") != (scales is not None):
            raise InvalidError(
                f"row_scale is {'missing' if scales is None else 'given'} and pages are "
                f"{seen.dtype}: int8 alone has one"
            )
        if layout == "HND":
            seen = seen.permute(0, 2, 1, 3)
            scales = scales and scales.permute(0, 2, 1)
        if scales is not None and scales.shape != seen.shape[:3]:
            raise InvalidError(
                f"row_scale has shape {list(scales.shape)}, must be {list(seen.shape[:3])}"
            )
        self.data: View = seen
        self.row_scale: Optional[View] = scales

    @property
    def shape(self) -> tuple[int, ...]:
        """[page, slot, kv_head, head_dim]"""
        return self.data.shape

    @property
    def dtype(self) -> str:
        return self.data.dtype

    @property
    def page_size(self) -> int:
        return self.data.shape[1]

    def parts(self) -> tuple[Any, ...]:
        """What calls are compared by."""
        return self.data, self.row_scale

    def borrowed(self) -> "Paged":
        """The same, which keeps no tensor alive."""
        scales = self.row_scale
        return _borrowed(self.data.bare(), None if scales is None else scales.bare())

    def struct(self) -> Any:
        """The library's kv8_paged."""
        paged = struct("kv8_paged")
        paged.data = pointer(self.data.address)
        paged.stride_page, paged.stride_slot, paged.stride_head = self.data.strides[:3]
        paged.num_pages = self.data.shape[0]
        if self.row_scale is not None:
            paged.row_scale = pointer(self.row_scale.address, "kv8_f16 *")
            (
                paged.row_scale_stride_page,
                paged.row_scale_stride_slot,
                paged.row_scale_stride_head,
            ) = self.row_scale.strides
        return paged

    def numpy(self) -> Any:
        """The codes [page, slot, kv_head, head_dim] in place: of a cache on the host."""
        if self.data.device[0] != CPU:
            raise InvalidError("the pages lie on a GPU: read them with torch.from_dlpack")
        return np.asarray(_InPlace(self.data))

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return to_dlpack(self.data, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.device


class _InPlace:
    """numpy's view of memory that it does not own: keeps the owner alive."""

    def __init__(self, seen: View) -> None:
        size = {"f32": 4, "bf16": 2, "f16": 2}.get(seen.dtype, 1)
        kind = {"f32": "<f4", "f16": "<f2", "int8": "|i1", "bf16": "<u2"}.get(seen.dtype, "|u1")
        self.owner = seen.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (seen.address, False),
            "shape": seen.shape,
            "typestr": kind,
            "strides": tuple(stride * size for stride in seen.strides),
        }


class PageTable:
    """Where the keys of a batch lie; made by csr(), dense(), ragged() or batched()."""

    def __init__(self, kind: str, batch: int, **arrays: Any) -> None:
        self.kind, self.batch, self.arrays = kind, batch, arrays

    @classmethod
    def csr(cls, indptr: Any, indices: Any, last_page_len: Any) -> "PageTable":
        """Request b owns pages indices[indptr[b]:indptr[b+1]], the last filled by last_page_len[b]."""
        return cls(
            "csr",
            len(indptr) - 1,
            page_indptr=indptr,
            page_indices=indices,
            last_page_len=last_page_len,
        )

    @classmethod
    def dense(cls, block_table: Any, seq_lens: Any) -> "PageTable":
        """Request b owns seq_lens[b] keys in pages block_table[b]."""
        return cls("dense", len(seq_lens), block_table=block_table, seq_lens=seq_lens)

    @classmethod
    def ragged(cls, kv_indptr: Any, seq_lens: Any = None) -> "PageTable":
        """Without pages: request b owns rows kv_indptr[b]:kv_indptr[b+1], of which the first
        seq_lens[b] are in use."""
        return cls("ragged", len(kv_indptr) - 1, kv_indptr=kv_indptr, seq_lens=seq_lens)

    @classmethod
    def batched(cls, seq_lens: Any) -> "PageTable":
        """K and V are [batch, token, kv_head, head_dim]: request b owns the first seq_lens[b] tokens."""
        lens = host_array(seq_lens, "seq_lens", np.int32)
        return cls.dense(np.arange(len(lens), dtype=np.int32)[:, None], lens)


def _borrowed(data: View, scales: Optional[View]) -> Paged:
    paged = Paged.__new__(Paged)
    paged.data, paged.row_scale = data, scales
    return paged
