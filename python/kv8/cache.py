"""The paged KV cache: sequences, quantising append, forks, shared prefixes, snapshots.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union
from typing import Sequence as SequenceOf

import numpy as np

from ._core import (
    ClosedError,
    Handle,
    InvalidError,
    Threads,
    check,
    default_threads,
    enum,
    isa_of,
    path_bytes,
    pointer_of,
    struct,
    whole,
)
from ._native import ffi, lib
from ._tensor import (
    CPU,
    CUDA,
    View,
    address_of,
    dtype_code,
    dtype_name,
    host_array,
    pointer,
    same_device,
    view,
)
from .device import Stream
from .pages import LAYOUTS, Paged, PageTable, _borrowed


@dataclass(frozen=True)
class CacheLayer:
    """How one layer stores. Scales are [num_kv_heads] or one number; real value = code * scale.
    window_left: keys before its own that a query sees; what lies further back is freed. -1 = all."""

    k_dtype: Any = "e4m3"
    v_dtype: Any = "e4m3"
    window_left: int = -1
    k_scale: Any = None
    v_scale: Any = None


class CacheStats(NamedTuple):
    num_groups: int
    pages_total: int
    pages_free: int
    num_seqs: int
    bytes: int
    bytes_per_token: int
    bytes_per_token_unwindowed: int


class CacheCounters(NamedTuple):
    """Elements that were saturated or NaN since the cache was made or reset."""

    k_clips: int
    k_nans: int
    v_clips: int
    v_nans: int


class Sequence:
    """A list of tokens in a cache, which outlives it or closes it; made by Cache.sequence()."""

    def __init__(self, cache: "Cache", seq: int) -> None:
        self.cache, self._seq = cache, seq

    @property
    def id(self) -> int:
        if self._seq < 0:
            raise ClosedError("the sequence is closed")
        return self._seq

    def __len__(self) -> int:
        length = ffi.new("int32_t *")
        with self.cache._held as cache:
            check(lib.kv8_cache_seq_length(cache, self.id, length))
        return int(length[0])

    def fork(self) -> "Sequence":
        """A second sequence with the same tokens; its pages are shared until they are written."""
        out = ffi.new("kv8_seq *")
        with self.cache._held as cache:
            check(lib.kv8_cache_seq_fork(cache, self.id, out))
        return Sequence(self.cache, out[0])

    def extend(self, num_tokens: int, token_ids: Any = None) -> None:
        """Makes room for more tokens. Their ids make prefixes findable (publish)."""
        ids = ffi.NULL
        if token_ids is not None:
            array = host_array(token_ids, "token_ids", np.int32)
            if array.shape != (num_tokens,):
                raise InvalidError(
                    f"token_ids has shape {list(array.shape)}, must be [{num_tokens}]"
                )
            ids = pointer(address_of(array), "int32_t *")
        with self.cache._held as cache:
            check(lib.kv8_cache_extend(cache, self.id, whole(num_tokens, "num_tokens"), ids))

    def truncate(self, length: int) -> None:
        """Drops tokens from the end."""
        with self.cache._held as cache:
            check(lib.kv8_cache_truncate(cache, self.id, whole(length, "length")))

    def set_scales(self, layer: int, k_scale: Any = None, v_scale: Any = None) -> None:
        """Scales of this sequence, [num_kv_heads]; only while it is empty."""
        k, v = self.cache._scales(k_scale, "k_scale"), self.cache._scales(v_scale, "v_scale")
        with self.cache._held as cache:
            check(
                lib.kv8_cache_seq_set_scales(
                    cache, self.id, whole(layer, "layer"), _floats(k), _floats(v)
                )
            )

    def publish(self) -> None:
        """Lets other sequences find the full pages by their token ids."""
        with self.cache._held as cache:
            check(lib.kv8_cache_publish(cache, self.id))

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes a snapshot, whole or not at all."""
        with self.cache._held as cache:
            check(lib.kv8_cache_save(cache, self.id, path_bytes(path)))

    def read(self, layer: int, begin: int = 0, num_tokens: Optional[int] = None) -> tuple[Any, Any]:
        """K and V as stored (code * scale): float32 [num_tokens, num_kv_heads, head_dim] each."""
        length = len(self)
        begin = whole(begin, "begin", 0, length)
        room = length - begin
        n = room if num_tokens is None else whole(num_tokens, "num_tokens", 0, room)
        heads = self.cache.num_kv_heads
        k = np.empty((n, heads, self.cache.head_dim), np.float32)
        v = np.empty((n, heads, self.cache.v_head_dim), np.float32)
        with self.cache._held as cache:
            check(
                lib.kv8_cache_read(
                    cache, whole(layer, "layer"), self.id, begin, n, _floats(k), _floats(v)
                )
            )
        return k, v

    def close(self) -> None:
        """Gives the pages back; published ones stay findable until their room is needed."""
        if self._seq >= 0 and not self.cache.closed:
            with self.cache._held as cache:
                check(lib.kv8_cache_seq_destroy(cache, self._seq))
        self._seq = -1

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _floats(array: Any) -> Any:
    return ffi.NULL if array is None else pointer(address_of(array), "float *")


def _ints(array: Any) -> Any:
    return pointer(address_of(array), "int32_t *")


class Cache(Handle):
    """Pages of K and V for some layers, on the host or, with `stream`, on its GPU.

    One step: sequence.extend, append for each layer, attention over layer_kv and page_table.
    """

    _what = "cache"

    def __init__(
        self,
        layers: SequenceOf[CacheLayer],
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int = 0,
        page_size: int = 16,
        num_pages: int,
        num_window_pages: int = 0,
        max_seqs: int = 16,
        max_seq_len: int,
        window_slack: int = 0,
        layout: str = "NHD",
        isa: str = "best",
        threads: Optional[Threads] = None,
        stream: Optional[Stream] = None,
    ) -> None:
        self.num_kv_heads = whole(num_kv_heads, "num_kv_heads", 1)
        self.head_dim = whole(head_dim, "head_dim", 1)
        self.v_head_dim = whole(v_head_dim, "v_head_dim", 0) or self.head_dim
        self.layers = tuple(layers)
        pool = pointer_of(threads or default_threads())
        rows = ffi.new("kv8_cache_layer[]", len(self.layers))
        kept = []
        for row, layer in zip(rows, self.layers):
            row.struct_size = ffi.sizeof("kv8_cache_layer")
            row.k_dtype = dtype_code(layer.k_dtype, "k_dtype")
            row.v_dtype = dtype_code(layer.v_dtype, "v_dtype")
            row.window_left = whole(layer.window_left, "window_left")
            kept.append(
                (self._scales(layer.k_scale, "k_scale"), self._scales(layer.v_scale, "v_scale"))
            )
            row.k_scale, row.v_scale = _floats(kept[-1][0]), _floats(kept[-1][1])
        gpu = ffi.NULL if stream is None else pointer_of(stream.device)
        options = struct(
            "kv8_cache_options",
            threads=pool,
            isa=isa_of(isa),
            num_layers=len(self.layers),
            num_kv_heads=self.num_kv_heads,
            k_head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            page_size=whole(page_size, "page_size"),
            num_pages=whole(num_pages, "num_pages"),
            num_window_pages=whole(num_window_pages, "num_window_pages"),
            max_seqs=whole(max_seqs, "max_seqs"),
            max_seq_len=whole(max_seq_len, "max_seq_len"),
            window_slack=whole(window_slack, "window_slack"),
            layout=enum("KV8_LAYOUT_", layout, "layout", LAYOUTS),
            layers=rows,
            device=gpu,
            stream=pointer_of(stream),
        )
        self._own(
            lib.kv8_cache_create,
            lib.kv8_cache_destroy,
            "kv8_cache",
            options,
            parents=(pool, gpu, pointer_of(stream)),
        )
        self.page_size, self.num_pages, self.layout = page_size, num_pages, layout
        self.max_seq_len = max_seq_len
        self._num_pages_of = [
            num_pages if layer.window_left < 0 else num_window_pages or num_pages
            for layer in self.layers
        ]
        self.device = (CPU, 0) if stream is None else (CUDA, stream.device.index)

    def _scales(self, scales: Any, name: str) -> Any:
        if scales is None:
            return None
        array = host_array(scales, name, np.float32)
        if array.ndim == 0:
            array = np.full(self.num_kv_heads, array, np.float32)
        if array.shape != (self.num_kv_heads,):
            raise InvalidError(
                f"{name} has shape {list(array.shape)}, must be [{self.num_kv_heads}]"
            )
        return array

    def _seqs(self, seqs: Union[Sequence, SequenceOf[Sequence]]) -> list[int]:
        each = [seqs] if isinstance(seqs, Sequence) else list(seqs)
        for seq in each:
            if seq.cache is not self:
                raise InvalidError("the sequence belongs to another cache")
        return [seq.id for seq in each]

    def sequence(self) -> Sequence:
        """A new, empty sequence. FullError at max_seqs."""
        out = ffi.new("kv8_seq *")
        with self._held as cache:
            check(lib.kv8_cache_seq_create(cache, out))
        return Sequence(self, out[0])

    def load(self, path: Union[str, "os.PathLike[str]"]) -> Sequence:
        """A new sequence from a snapshot."""
        out = ffi.new("kv8_seq *")
        with self._held as cache:
            check(lib.kv8_cache_load(cache, path_bytes(path), out))
        return Sequence(self, out[0])

    def prefix_match(self, token_ids: Any) -> tuple[Sequence, int]:
        """A new sequence that holds the longest published prefix of token_ids, and its length."""
        ids = host_array(token_ids, "token_ids", np.int32)
        out, matched = ffi.new("kv8_seq *"), ffi.new("int32_t *")
        with self._held as cache:
            check(lib.kv8_cache_prefix_match(cache, _ints(ids), ids.size, out, matched))
        return Sequence(self, out[0]), int(matched[0])

    def append(
        self,
        layer: int,
        seqs: Union[Sequence, SequenceOf[Sequence]],
        k: Any,
        v: Any,
        indptr: Any = None,
        *,
        cos_sin: Any = None,
        interleaved: bool = False,
    ) -> None:
        """Writes k [rows, num_kv_heads, head_dim] and v to the newest positions of the sequences:
        sequence i takes rows indptr[i]:indptr[i+1]. K arrives rotated, or is rotated by cos_sin
        [rows, head_dim] (Rope.angles). dtypes f32, bf16 or f16; of a cache on a GPU k, v and cos_sin
        lie there."""
        ids = self._seqs(seqs)
        k_rows, v_rows = view(k, "k", 3), view(v, "v", 3)
        heads = self.num_kv_heads
        for name, rows, dim in (("k", k_rows, self.head_dim), ("v", v_rows, self.v_head_dim)):
            if rows.shape != (k_rows.shape[0], heads, dim):
                raise InvalidError(
                    f"{name} has shape {list(rows.shape)}, must be "
                    f"[{k_rows.shape[0]}, {heads}, {dim}]"
                )
        if k_rows.dtype != v_rows.dtype:
            raise InvalidError(f"k is {k_rows.dtype} and v {v_rows.dtype}, must be one dtype")
        same_device(self.device, k=k_rows, v=v_rows)
        bounds = host_array([0, k_rows.shape[0]] if indptr is None else indptr, "indptr", np.int32)
        if bounds.shape != (len(ids) + 1,) or bounds[-1] > k_rows.shape[0]:
            raise InvalidError(
                f"indptr is {bounds.tolist()}, must have {len(ids) + 1} entries up to "
                f"{k_rows.shape[0]}"
            )
        angles = None
        if cos_sin is not None:
            angles = view(cos_sin, "cos_sin", 2, "f32")
            same_device(self.device, cos_sin=angles)
            if (
                angles.shape != (k_rows.shape[0], self.head_dim)
                or angles.strides[0] != self.head_dim
            ):
                raise InvalidError(
                    f"cos_sin has shape {list(angles.shape)}, must be contiguous "
                    f"[{k_rows.shape[0]}, {self.head_dim}]"
                )
        handles = ffi.new("kv8_seq[]", ids)
        rows = struct(
            "kv8_append",
            num_seqs=len(ids),
            interleaved=bool(interleaved),
            seqs=handles,
            indptr=_ints(bounds),
            src_dtype=dtype_code(k_rows.dtype, "dtype of k"),
            k=pointer(k_rows.address),
            k_stride_row=k_rows.strides[0],
            k_stride_head=k_rows.strides[1],
            v=pointer(v_rows.address),
            v_stride_row=v_rows.strides[0],
            v_stride_head=v_rows.strides[1],
            cos_sin=ffi.NULL if angles is None else pointer(angles.address, "float *"),
        )
        with self._held as cache:
            check(lib.kv8_cache_append(cache, whole(layer, "layer"), rows))

    def layer_kv(self, layer: int) -> tuple[Paged, Paged]:
        """K and V of a layer where they lie; the memory stays as long as one of them does."""
        k, v = struct("kv8_paged"), struct("kv8_paged")
        with self._held as cache:
            check(lib.kv8_cache_layer_kv(cache, whole(layer, "layer"), k, v))
            entry, pages = self.layers[layer], self._num_pages_of[layer]
            return (
                self._paged(cache, k, entry.k_dtype, self.head_dim, pages),
                self._paged(cache, v, entry.v_dtype, self.v_head_dim, pages),
            )

    def _paged(self, owner: Any, paged: Any, dtype: Any, dim: int, pages: int) -> Paged:
        shape = (pages, self.page_size, self.num_kv_heads)
        data = View(
            int(ffi.cast("uintptr_t", paged.data)),
            shape + (dim,),
            (paged.stride_page, paged.stride_slot, paged.stride_head, 1),
            dtype_name(dtype),
            self.device,
            owner,
        )
        scales = None
        if paged.row_scale:
            scales = View(
                int(ffi.cast("uintptr_t", paged.row_scale)),
                shape,
                (
                    paged.row_scale_stride_page,
                    paged.row_scale_stride_slot,
                    paged.row_scale_stride_head,
                ),
                "f16",
                self.device,
                owner,
            )
        return _borrowed(data, scales)

    def page_table(self, layer: int, seqs: Union[Sequence, SequenceOf[Sequence]]) -> PageTable:
        """The page table of some sequences, for every layer with this one's window."""
        ids = self._seqs(seqs)
        handles, n = ffi.new("kv8_seq[]", ids), len(ids)
        indptr, last = np.empty(n + 1, np.int32), np.empty(n, np.int32)
        capacity = n * (-(-self.max_seq_len // self.page_size) + 1)
        indices = np.empty(capacity, np.int32)
        with self._held as cache:
            check(
                lib.kv8_cache_page_table(
                    cache,
                    whole(layer, "layer"),
                    handles,
                    n,
                    _ints(indptr),
                    _ints(indices),
                    capacity,
                    _ints(last),
                )
            )
        return PageTable.csr(indptr, indices, last)

    def block_table(self, layer: int, seqs: Union[Sequence, SequenceOf[Sequence]]) -> PageTable:
        """The same in dense form."""
        ids = self._seqs(seqs)
        handles, n = ffi.new("kv8_seq[]", ids), len(ids)
        stride = -(-self.max_seq_len // self.page_size)
        table, lens = np.empty((n, stride), np.int32), np.empty(n, np.int32)
        with self._held as cache:
            check(
                lib.kv8_cache_block_table(
                    cache, whole(layer, "layer"), handles, n, _ints(table), stride, _ints(lens)
                )
            )
        return PageTable.dense(table, lens)

    def scales(self, layer: int, seqs: Union[Sequence, SequenceOf[Sequence]]) -> tuple[Any, Any]:
        """k_scale and v_scale of each sequence: float32 [num_seqs, num_kv_heads]."""
        ids = self._seqs(seqs)
        handles = ffi.new("kv8_seq[]", ids)
        k = np.empty((len(ids), self.num_kv_heads), np.float32)
        v = np.empty_like(k)
        with self._held as cache:
            check(
                lib.kv8_cache_scales(
                    cache, whole(layer, "layer"), handles, len(ids), _floats(k), _floats(v)
                )
            )
        return k, v

    def counters(self, layer: int, kv_head: int) -> CacheCounters:
        out = ffi.new("kv8_cache_counters *")
        with self._held as cache:
            check(
                lib.kv8_cache_get_counters(
                    cache, whole(layer, "layer"), whole(kv_head, "kv_head"), out
                )
            )
        return CacheCounters(out.k_clips, out.k_nans, out.v_clips, out.v_nans)

    def reset_counters(self) -> None:
        with self._held as cache:
            check(lib.kv8_cache_reset_counters(cache))

    def stats(self) -> CacheStats:
        out = struct("kv8_cache_stats")
        with self._held as cache:
            check(lib.kv8_cache_get_stats(cache, out))
        return CacheStats(*(int(getattr(out, field)) for field in CacheStats._fields))
