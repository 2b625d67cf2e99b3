"""Kv8Cache: a transformers cache that stores K and V in a format of kv8, in pages.

Every layer keeps all its tokens, those of sliding windows too, so that crop() can go back anywhere.
Attention reads the codes in place: the model has to run with attn_implementation="kv8".

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .._core import InvalidError
from .._tensor import _TO_FOREIGN, dtype_name
from ..calibrate import ScaleFile
from ..torch_ops import store


class _Latest:
    """The layer that was updated last: attention of the same layer follows and reads its scales."""

    layer: Optional["Kv8Layer"] = None


latest = _Latest()


class Kv8Layer(CacheLayerMixin):
    """K and V of one layer: pages [batch * pages, page_size, heads, dim], those of a row of the batch
    one behind the other."""

    is_sliding = False
    is_croppable = True

    def __init__(
        self, dtypes: tuple[str, str], scales: Any, page_size: int, max_cache_len: Optional[int]
    ) -> None:
        super().__init__()
        self.dtypes, self.scales, self.page_size = dtypes, scales, page_size
        self.is_compileable = max_cache_len is not None
        self.max_cache_len = max_cache_len
        self.capacity = 0
        self.k_scale: Optional[torch.Tensor] = None
        self.v_scale: Optional[torch.Tensor] = None
        # A tensor where the length is fixed, so that a graph does not depend on it.
        self.cumulative_length: Any = 0 if max_cache_len is None else torch.tensor(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.batch, self.heads = key_states.shape[:2]
        self.dims = key_states.shape[-1], value_states.shape[-1]
        if self.scales is not None:
            k, v = (torch.as_tensor(x, device=self.device) for x in self.scales)
            if k.shape != (self.heads,):
                raise InvalidError(f"scales are of {k.shape[0]} heads, the layer has {self.heads}")
            self.k_scale, self.v_scale = k, v
        if self.max_cache_len is not None:
            self.cumulative_length = self.cumulative_length.to(self.device)
        self.k_codes: Any = None
        self.v_codes: Any = None
        self.k_rows: Any = None
        self.v_rows: Any = None
        self.is_initialized = True
        self._grow(self.max_cache_len or 4 * self.page_size)
        if self.max_cache_len is not None and not torch.compiler.is_compiling():
            for tensor in (self.k_codes, self.v_codes, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)

    def _grow(self, length: int) -> None:
        """Room for `length` tokens a row, in whole pages; what is stored stays."""
        old = self.capacity
        self.capacity = -(-length // self.page_size) * self.page_size
        for which, (name, dim) in enumerate(zip(self.dtypes, self.dims)):
            dtype = getattr(torch, _TO_FOREIGN[name])
            codes = self._buffer((self.heads, dim), dtype)
            rows = self._buffer((self.heads,), torch.float16) if name == "int8" else None
            attribute = "kv"[which]
            for suffix, new in (("_codes", codes), ("_rows", rows)):
                kept = getattr(self, attribute + suffix)
                if kept is not None and new is not None:
                    source = kept.view(self.batch, old, *kept.shape[2:])
                    target = new.view(self.batch, self.capacity, *kept.shape[2:])
                    _bytes(target)[:, :old].copy_(_bytes(source))
                setattr(self, attribute + suffix, new)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pages = self.batch * (self.capacity // self.page_size)
        return torch.zeros((pages, self.page_size, *shape), dtype=dtype, device=self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        begin = self.cumulative_length
        if self.max_cache_len is None:
            if begin + new > self.capacity:
                self._grow(max(begin + new, 2 * self.capacity))
            self.cumulative_length = begin + new
            at = torch.arange(begin, begin + new, device=self.device)
        else:
            at = torch.arange(new, device=self.device) + begin
            self.cumulative_length.add_(new)
            # Beyond the end nothing is stored: the slot is negative, as of rows that are left out.
            at = torch.where(at < self.max_cache_len, at, -(2**40))
        rows = torch.arange(self.batch, device=self.device)[:, None] * self.capacity
        store(
            key_states.transpose(1, 2).reshape(self.batch * new, self.heads, self.dims[0]),
            value_states.transpose(1, 2).reshape(self.batch * new, self.heads, self.dims[1]),
            self.k_codes,
            self.v_codes,
            self.k_rows,
            self.v_rows,
            (rows + at).reshape(-1),
            self.k_scale,
            self.v_scale,
        )
        latest.layer = self
        return self._seen(self.k_codes), self._seen(self.v_codes)

    def _seen(self, codes: Any) -> torch.Tensor:
        """[batch, heads, tokens, dim], as attention functions take it; the codes themselves."""
        return codes.view(self.batch, self.capacity, *codes.shape[2:]).transpose(1, 2)

    def owns(self, key: torch.Tensor) -> bool:
        """`key` is what update() gave: this layer's codes."""
        codes = self.k_codes
        return key.dtype == codes.dtype and key.shape == (
            self.batch,
            self.heads,
            self.capacity,
            self.dims[0],
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.max_cache_len is not None:
            return self.max_cache_len, 0
        return self.cumulative_length + query_length, 0

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def reset(self) -> None:
        if self.max_cache_len is None:
            self.cumulative_length = 0
        else:
            self.cumulative_length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops tokens from the end: -n drops n, as transformers has it; n > 0 leaves n."""
        length, n = int(self.get_seq_length()), int(tokens_to_remove)
        kept = min(n, length) if n > 0 else max(length + n, 0)
        if self.max_cache_len is None:
            self.cumulative_length = kept
        else:
            self.cumulative_length.fill_(kept)

    def _select(self, index: torch.Tensor) -> None:
        for name in ("k_codes", "v_codes", "k_rows", "v_rows"):
            held = getattr(self, name)
            if held is not None:
                rows = held.view(self.batch, -1, *held.shape[1:])
                chosen = _bytes(rows).index_select(0, index.to(self.device)).view(held.dtype)
                setattr(self, name, chosen.reshape(-1, *held.shape[1:]))
        self.batch = int(index.shape[0])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.is_initialized:
            self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._select(torch.arange(self.batch, device=indices.device)[indices])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Codes as whole numbers: not every operator knows 8-bit floats."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


class Kv8Cache(Cache):
    """A cache of every layer in `dtype`: "e4m3", "e5m2", "int8", "bf16", "f16", "f32", or (K's, V's),
    or a list of one of these for each layer. `scales`: a ScaleFile (calibrate() makes one). With
    max_cache_len memory is taken once and generate may be compiled; without, it grows."""

    def __init__(
        self,
        dtype: Any = "e4m3",
        scales: Optional[ScaleFile] = None,
        page_size: int = 16,
        max_cache_len: Optional[int] = None,
        config: Any = None,
    ) -> None:
        self._dtype = dtype
        self._data = None if scales is None else scales
        self._page_size, self._max = page_size, max_cache_len
        layers = 0 if config is None else config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layer_class_to_replicate=self._next_layer)
        while len(self.layers) < layers:
            self.layers.append(self._next_layer())

    def _next_layer(self) -> Kv8Layer:
        at = len(self.layers)
        dtype: Union[str, tuple[str, str]] = (
            self._dtype[at] if isinstance(self._dtype, list) else self._dtype
        )
        pair = dtype if isinstance(dtype, tuple) else (dtype, dtype)
        names = dtype_name(pair[0]), dtype_name(pair[1])
        scales = None
        if self._data is not None and any(name in ("e4m3", "e4m3fnuz", "e5m2") for name in names):
            k, v = self._data.layer(at)
            coarse = self._data.data.dtype
            for name in names:
                if name in ("e4m3", "e4m3fnuz", "e5m2") and name != coarse:
                    raise InvalidError(f"the scales are for {coarse}, the cache is {name}")
            scales = tuple(
                x if name not in ("int8", "bf16", "f16", "f32") else x * 0 + 1
                for x, name in zip((k, v), names)
            )
        return Kv8Layer(names, scales, self._page_size, self._max)
