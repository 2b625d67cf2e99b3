"""FlashInfer's rotary functions: rows of q and k rotated by their positions, in float32, into their own
dtype or quantised. numpy arrays and torch tensors of any device.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from .._core import InvalidError
from .._face import copy_into, like, refuse
from .._rotary import angles, in_form, rotate
from .._tensor import dtype_name, host_array, is_torch
from ..rope import Rope

Pair = tuple[Any, Any]


def apply_rope_pos_ids(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> Pair:
    """q [nnz, heads, dim] and k [nnz, kv_heads, dim] of positions pos_ids [nnz], the first rotary_dim
    elements of each head rotated."""
    dim = _rotary_dim(q, rotary_dim)
    rope = Rope(dim, rope_theta, kind="linear", factor=rope_scale)
    return _rotate(q, k, rope, pos_ids, interleave)


def apply_llama31_rope_pos_ids(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> Pair:
    """As apply_rope_pos_ids, with Llama 3.1's frequencies."""
    rope = Rope(
        _rotary_dim(q, rotary_dim),
        rope_theta,
        kind="llama3",
        factor=rope_scale,
        original_max_position=old_context_len,
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
    )
    return _rotate(q, k, rope, pos_ids, interleave)


def apply_rope(q: Any, k: Any, indptr: Any, offsets: Any, *options: Any, **named: Any) -> Pair:
    """As apply_rope_pos_ids; the rows indptr[b]:indptr[b+1] have positions from offsets[b] on."""
    return apply_rope_pos_ids(q, k, _positions(q, indptr, offsets), *options, **named)


def apply_llama31_rope(
    q: Any, k: Any, indptr: Any, offsets: Any, *options: Any, **named: Any
) -> Pair:
    """As apply_llama31_rope_pos_ids; positions as in apply_rope."""
    return apply_llama31_rope_pos_ids(q, k, _positions(q, indptr, offsets), *options, **named)


def apply_rope_inplace(q: Any, k: Any, *options: Any, **named: Any) -> None:
    _write(q, k, apply_rope(q, k, *options, **named))


def apply_rope_pos_ids_inplace(q: Any, k: Any, *options: Any, **named: Any) -> None:
    _write(q, k, apply_rope_pos_ids(q, k, *options, **named))


def apply_llama31_rope_inplace(q: Any, k: Any, *options: Any, **named: Any) -> None:
    _write(q, k, apply_llama31_rope(q, k, *options, **named))


def apply_llama31_rope_pos_ids_inplace(q: Any, k: Any, *options: Any, **named: Any) -> None:
    _write(q, k, apply_llama31_rope_pos_ids(q, k, *options, **named))


def apply_rope_with_cos_sin_cache(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> Pair:
    """query [nnz, heads * head_size] and key by rows of cos_sin_cache [max_seq_len, rotary_dim]:
    cosines, then sines."""
    cos, sin = _from_cache(cos_sin_cache, positions, query)
    rotated = []
    for x in (query, key):
        heads = x.reshape(x.shape[0], -1, head_size)
        rotated.append(like(rotate(heads, cos, sin, not is_neox), x).reshape(x.shape))
    return rotated[0], rotated[1]


def apply_rope_with_cos_sin_cache_inplace(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> None:
    rotated = apply_rope_with_cos_sin_cache(
        positions, query, key, head_size, cos_sin_cache, is_neox
    )
    _write(query, key, rotated)


def rope_quantize_fp8(
    q_rope: Any,
    k_rope: Any,
    q_nope: Any,
    k_nope: Any,
    cos_sin_cache: Any,
    pos_ids: Any,
    is_neox: bool = True,
    quantize_dtype: Any = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Any = None,
    k_rope_out: Any = None,
    q_nope_out: Any = None,
    k_nope_out: Any = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Any, Any, Any, Any]:
    """The rotated and the other elements of q and k, times quant_scale_q and quant_scale_kv, in e4m3
    or e5m2: rounded to nearest even, saturated. q [nnz, heads, ..], k [nnz, kv_heads, ..] or, of one
    head, [nnz, ..]; q_nope and k_nope may be None."""
    outs = q_rope_out, k_rope_out, q_nope_out, k_nope_out
    if quantize_dtype is None:
        quantize_dtype = next((x.dtype for x in outs if x is not None), "e4m3")
    form = dtype_name(quantize_dtype, "quantize_dtype")
    refuse(quantize_dtype=(form if form not in ("e4m3", "e5m2") else None, None))
    cos, sin = _from_cache(cos_sin_cache, pos_ids, q_rope)
    results: list[Any] = []
    inputs = (
        (q_rope, quant_scale_q, True),
        (k_rope, quant_scale_kv, True),
        (q_nope, quant_scale_q, False),
        (k_nope, quant_scale_kv, False),
    )
    for (x, scale, rotated), out in zip(inputs, outs):
        if x is None:
            results.append(None)
            continue
        heads = x if x.ndim == 3 else x[:, None]
        values = rotate(heads, cos, sin, not is_neox) if rotated else heads
        results.append(copy_into(out, in_form(values, form, scale).reshape(x.shape)))
    return results[0], results[1], results[2], results[3]


mla_rope_quantize_fp8 = rope_quantize_fp8


def _rotary_dim(q: Any, rotary_dim: Optional[int]) -> int:
    return int(q.shape[-1] if rotary_dim is None else rotary_dim)


def _rotate(q: Any, k: Any, rope: Rope, pos_ids: Any, interleave: bool) -> Pair:
    cos, sin = angles(rope.inv_freq, pos_ids, q)
    return (like(rotate(q, cos, sin, interleave), q), like(rotate(k, cos, sin, interleave), k))


def _positions(q: Any, indptr: Any, offsets: Any) -> Any:
    """Of every row; on a GPU nothing is read back."""
    n = int(q.shape[0])
    if is_torch(indptr) and indptr.is_cuda:
        import torch

        rows = torch.arange(n, device=indptr.device)
        b = torch.searchsorted(indptr[1:].long().contiguous(), rows, right=True)
        b = b.clamp(max=len(offsets) - 1)
        return rows - indptr[b] + offsets[b]
    indptr = host_array(indptr, "indptr", np.int64)
    offsets = host_array(offsets, "offsets", np.int64)
    if indptr.shape != (len(offsets) + 1,) or indptr[-1] != n:
        raise InvalidError(
            f"indptr has shape {list(indptr.shape)} and ends with {indptr[-1]}, "
            f"must be [{len(offsets) + 1}] and end with {n}"
        )
    return np.arange(n) + np.repeat(offsets - indptr[:-1], np.diff(indptr))


def _from_cache(cos_sin_cache: Any, positions: Any, x: Any) -> Pair:
    if str(cos_sin_cache.dtype).rsplit(".", 1)[-1] != "float32":
        raise InvalidError(f"cos_sin_cache has dtype {cos_sin_cache.dtype}, must be float32")
    if not is_torch(cos_sin_cache):
        positions = host_array(positions, "positions", np.int64)
    rows = cos_sin_cache[positions]
    half = rows.shape[-1] // 2
    return rows[:, :half], rows[:, half:]


def _write(q: Any, k: Any, rotated: Pair) -> None:
    copy_into(q, rotated[0])
    copy_into(k, rotated[1])
