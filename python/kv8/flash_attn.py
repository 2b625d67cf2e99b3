"""FlashAttention's functions, and vLLM's of the same shape, on kv8's kernels.

Arguments and results are theirs; a caller changes the import. What is not done here is an
UnsupportedError that names the argument. Arguments that only advise a launch there (max_seqlen_q,
num_splits, num_splits_kv, is_mix_batch, scheduler_metadata, pack_gqa, sm_margin, fa_version,
deterministic) change no result and are taken: kv8 cuts its own work, and its forward pass is
deterministic. Descales are real = code * scale, a missing one is 1; lse counts the sinks, as theirs
does, and is -inf where no key is seen.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from ._core import InvalidError, TypeMismatchError, UnsupportedError
from ._face import add_sinks, copy_into, like, merge_states, need, refuse, refuse_gradients, window
from ._rotary import as_float, rotate
from ._tensor import host_array, is_torch
from .append import store
from .attend import attend
from .pages import Paged, PageTable


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: Optional[int] = None,
    cu_seqlens_q: Any = None,
    max_seqlen_k: Optional[int] = None,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    fa_version: Optional[int] = None,
    s_aux: Any = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
    *,
    seqused_q: Any = None,
    sinks: Any = None,
    attention_chunk: int = 0,
    qv: Any = None,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    output_scale: Any = None,
    num_splits_kv: Optional[int] = None,
    is_mix_batch: bool = True,
    host_kv_lens: Any = None,
) -> Any:
    """q [total_q, heads, dim], k and v [total_k, kv_heads, dim] by cu_seqlens_k, or with block_table
    pages [blocks, block_size, kv_heads, dim]; the argument order is vLLM's. host_kv_lens is XPU's name for
    a seqused_k of the host. Returns out, or with
    return_softmax_lse (out, lse [heads, total_q])."""
    refuse(
        q_v=(q_v, None),
        qv=(qv, None),
        dropout_p=(dropout_p, 0.0),
        alibi_slopes=(alibi_slopes, None),
        return_attn_probs=(return_attn_probs, False),
        cp_world_size=(cp_world_size, 1),
        cp_tot_seqused_k=(cp_tot_seqused_k, None),
    )
    need(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    refuse_gradients(q, k, v)
    if isinstance(cu_seqlens_k, int):
        raise TypeMismatchError(
            f"cu_seqlens_k is {cu_seqlens_k}, must be an array: by place each max_seqlen stands "
            "before its cu_seqlens, as vLLM has them; names say it in any order"
        )
    cu_seqlens_q, cu_seqlens_k = (
        _ints(cu, q) if isinstance(cu, (list, tuple)) else cu for cu in (cu_seqlens_q, cu_seqlens_k)
    )
    sinks = s_aux if sinks is None else sinks
    if host_kv_lens is not None:
        if seqused_k is not None:
            raise InvalidError("seqused_k and host_kv_lens are given, must be one of them")
        seqused_k = _ints(host_kv_lens, q)
    if block_table is not None:
        lens = seqused_k if seqused_k is not None else _lengths(cu_seqlens_k)
        pages = PageTable.dense(block_table, lens)
    elif cu_seqlens_k is not None:
        pages, lens = PageTable.ragged(cu_seqlens_k, seqused_k), seqused_k
        lens = _lengths(cu_seqlens_k) if lens is None else lens
    else:
        raise InvalidError("neither block_table nor cu_seqlens_k is given")
    ranges = _chunks(attention_chunk, cu_seqlens_q, lens, q.shape[0])
    found = attend(
        q,
        k,
        v,
        pages,
        cu_seqlens_q,
        causal=bool(causal),
        **window(window_size, causal),
        sinks=sinks,
        sm_scale=softmax_scale,
        soft_cap=softcap,
        q_scale=q_descale,
        k_scale=k_descale,
        v_scale=v_descale,
        o_dtype=_o_dtype(q, out),
        qo_lens=seqused_q,
        out=out,
        o_scale=output_scale,
        return_lse=return_softmax_lse,
        max_kv_len=None if max_seqlen_k is None else int(max_seqlen_k),
        **ranges,
    )
    return (found[0], add_sinks(found[1], sinks).T) if return_softmax_lse else found


def _o_dtype(q: Any, out: Any) -> Optional[str]:
    """bf16 for 8-bit queries, as there."""
    return "bf16" if out is None and q.itemsize == 1 else None


def _lengths(cu_seqlens: Any) -> Any:
    if cu_seqlens is None:
        raise InvalidError("neither seqused_k nor cu_seqlens_k is given")
    return cu_seqlens[1:] - cu_seqlens[:-1]


def _positions(cu_seqlens_q: Any, kv_lens: Any, total_q: int) -> tuple[Any, Any]:
    """Request and position of every row of q."""
    if is_torch(cu_seqlens_q) and cu_seqlens_q.is_cuda:
        import torch

        rows = torch.arange(total_q, device=cu_seqlens_q.device, dtype=torch.int32)
        b = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
        b = b.clamp(max=len(kv_lens) - 1)
    else:
        cu_seqlens_q = host_array(cu_seqlens_q, "cu_seqlens_q", np.int32)
        kv_lens = host_array(kv_lens, "seqused_k", np.int32)
        rows = np.arange(total_q, dtype=np.int32)
        b = np.minimum(np.searchsorted(cu_seqlens_q[1:], rows, side="right"), len(kv_lens) - 1)
    return b, rows - cu_seqlens_q[1:][b] + kv_lens[b]


def _chunks(chunk: int, cu_seqlens_q: Any, kv_lens: Any, total_q: int) -> dict[str, Any]:
    """A row sees the chunk of keys that its position lies in."""
    if chunk <= 0:
        return {}
    _, at = _positions(cu_seqlens_q, kv_lens, total_q)
    begin = at - at % chunk
    return {"key_begin": begin.clip(0), "key_end": (begin + chunk).clip(0)}


def _ints(values: Any, other: Any) -> Any:
    """int32 where `other` lies."""
    if is_torch(other):
        import torch

        return torch.as_tensor(values, dtype=torch.int32, device=other.device)
    return np.asarray(values, np.int32)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    learnable_sink: Any = None,
    return_softmax_lse: bool = False,
) -> Any:
    """q [batch, rows, heads, dim], k and v [batch, keys, kv_heads, dim]. Returns out, or with
    return_softmax_lse (out, lse [batch, heads, rows])."""
    refuse(
        dropout_p=(dropout_p, 0.0),
        alibi_slopes=(alibi_slopes, None),
        return_attn_probs=(return_attn_probs, False),
        qv=(qv, None),
    )
    need(q=q, k=k, v=v)
    if k.shape[1] == 0:  # the caches below have a key at least
        refuse_gradients(q, k, v)
        found = attend(
            q,
            k,
            v,
            sinks=learnable_sink,
            q_scale=q_descale,
            k_scale=k_descale,
            v_scale=v_descale,
            o_dtype=_o_dtype(q, None),
            return_lse=return_softmax_lse,
        )
        if not return_softmax_lse:
            return found
        return found[0], add_sinks(found[1], learnable_sink).swapaxes(1, 2)
    return flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=k.shape[1],
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        s_aux=learnable_sink,
        return_softmax_lse=return_softmax_lse,
    )


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Any = None,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    out: Any = None,
    s_aux: Any = None,
    fa_version: Optional[int] = None,
) -> Any:
    """q [batch, rows, heads, dim] over caches [batch, keys, kv_heads, dim], or pages with
    block_table, of which request b has cache_seqlens[b] keys. New k and v [batch, new, kv_heads,
    dim] are stored behind those first. q and the new k are rotated by rotary_cos and rotary_sin
    [positions, rotary_dim / 2] where those are given. Returns out, or (out, lse [batch, heads,
    rows])."""
    refuse(
        alibi_slopes=(alibi_slopes, None),
        qv=(qv, None),
        cu_seqlens_q=(cu_seqlens_q, None),
        cu_seqlens_k_new=(cu_seqlens_k_new, None),
    )
    need(q=q, k_cache=k_cache, v_cache=v_cache)
    if (k is None) != (v is None):
        raise InvalidError(f"{'k' if k is None else 'v'} is missing: new k and v go together")
    refuse_gradients(q, k_cache, v_cache, k, v)
    if cache_leftpad is not None and attention_chunk:
        raise UnsupportedError("cache_leftpad with attention_chunk; supported: one of them")
    if k_cache.shape[1] == 0:
        raise InvalidError(f"k_cache has shape {list(k_cache.shape)}, must have room for a key")
    batch, rows = int(q.shape[0]), int(q.shape[1])
    block_table = page_table if block_table is None else block_table
    if block_table is None:
        index = range(batch) if cache_batch_idx is None else cache_batch_idx
        block_table = _ints(np.arange(batch) if cache_batch_idx is None else index, q)[:, None]
    elif cache_batch_idx is not None:
        raise UnsupportedError("cache_batch_idx with block_table; supported: one of them")
    lens = _ints(k_cache.shape[1] if cache_seqlens is None else cache_seqlens, q)
    lens = lens + _ints(np.zeros(batch), q) if lens.ndim == 0 else lens
    if rotary_cos is not None or rotary_sin is not None:
        every = causal or tuple(window_size) != (-1, -1)  # else all rows have the first position
        at = lens if rotary_seqlens is None else _ints(rotary_seqlens, q)
        q = _rotated(q, rotary_cos, rotary_sin, at, rotary_interleaved, every)
        k = None if k is None else _rotated(k, rotary_cos, rotary_sin, at, rotary_interleaved)
    elif rotary_seqlens is not None:
        raise InvalidError("rotary_seqlens is given and rotary_cos and rotary_sin are not")
    if k is not None:
        _store_new(k, v, k_cache, v_cache, block_table, lens, k_descale, v_descale)
        lens = lens + k.shape[1]
    cu = _ints(np.arange(batch + 1) * rows, q)
    ranges = _chunks(attention_chunk, cu, lens, batch * rows)
    if cache_leftpad is not None:
        b, _ = _positions(cu, lens, batch * rows)
        pad = _ints(cache_leftpad, q)
        ranges = {"key_begin": pad[b], "key_end": lens[b]}
    found = attend(
        q.reshape(batch * rows, *q.shape[2:]),
        k_cache,
        v_cache,
        PageTable.dense(block_table, lens),
        cu,
        causal=bool(causal),
        **window(window_size, causal),
        sinks=s_aux,
        sm_scale=softmax_scale,
        soft_cap=softcap,
        q_scale=q_descale,
        k_scale=k_descale,
        v_scale=v_descale,
        o_dtype=_o_dtype(q, None),
        return_lse=return_softmax_lse,
        **ranges,
    )
    o = found[0] if return_softmax_lse else found
    o = copy_into(out, o.reshape(batch, rows, *o.shape[1:]))
    if not return_softmax_lse:
        return o
    lse = add_sinks(found[1], s_aux).reshape(batch, rows, -1)
    return o, lse.swapaxes(1, 2)


def _rotated(
    x: Any, cos: Any, sin: Any, begin: Any, interleaved: bool, every_row: bool = True
) -> Any:
    """x [batch, rows, heads, dim] by rows of cos and sin [positions, rotary_dim / 2]: row i of
    request b has position begin[b] + i, or begin[b]."""
    if cos is None or sin is None or cos.shape != sin.shape:
        raise InvalidError("rotary_cos and rotary_sin go together, in one shape")
    batch, rows = int(x.shape[0]), int(x.shape[1])
    at = (begin[:, None] + _ints(np.arange(rows) * bool(every_row), x)).reshape(-1)
    at = at.long() if is_torch(at) else at.astype(np.int64)
    flat = rotate(
        x.reshape(batch * rows, *x.shape[2:]), as_float(cos[at]), as_float(sin[at]), interleaved
    )
    return like(flat, x).reshape(x.shape)


def _store_new(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    lens: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Row i of request b goes to position lens[b] + i."""
    batch, new, page_size = k.shape[0], k.shape[1], k_cache.shape[1]
    at = lens[:, None] + _ints(np.arange(new), lens)
    room = block_table.shape[1] * page_size
    if not (is_torch(at) and at.is_cuda) and int(at.max()) >= room:
        raise InvalidError(f"{int(at.max()) + 1} keys, the cache has room for {room}")
    if is_torch(at):
        page = block_table.to(at.device).long().gather(1, (at // page_size).long())
    else:
        page = np.take_along_axis(np.asarray(block_table, np.int64), at // page_size, 1)
    slots = (page * page_size + at % page_size).reshape(-1)
    rows, values = (x.reshape(batch * new, *x.shape[2:]) for x in (k, v))
    for name, scale in (("k_descale", k_scale), ("v_descale", v_scale)):
        if scale is not None and getattr(scale, "ndim", 0) == 2 and scale.shape[0] > 1:
            raise UnsupportedError(f"{name} by request with new k and v; supported: by head")
    pages = Paged(k_cache), Paged(v_cache)
    store(rows, values, *pages, slots, k_scale=k_scale, v_scale=v_scale)


def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any]:
    """Partial results [splits, batch, rows, heads, dim] and lse [splits, batch, rows, heads] put
    together: out [batch, rows, heads, dim] and lse [batch, rows, heads]."""
    o, lse = merge_states(list(out_partial), list(lse_partial))
    if out_dtype is not None:
        o = o.to(out_dtype) if is_torch(o) else o.astype(out_dtype)
    else:
        o = like(o, out_partial)
    return copy_into(out, o), lse


# --- vLLM's own ---


def unified_attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    seqused_k: Any,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: Any,
    block_table: Any,
    softcap: float,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    alibi_slopes: Any = None,
    output_scale: Any = None,
    qq_bias: Any = None,
    sinks: Any = None,
    mm_prefix_range: Any = None,
    use_alibi_sqrt: bool = False,
    **launch: Any,
) -> None:
    """Writes attention over pages to out. `launch`: seq_threshold_3D, num_par_softmax_segments and
    softmax_segm_*, the scratch of its kernel."""
    known = ("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output")
    for name in launch:
        if name not in known + ("softmax_segm_max", "softmax_segm_expsum"):
            raise UnsupportedError(f"{name}: unified_attention of kv8 has no such argument")
    refuse(
        qq_bias=(qq_bias, None),
        mm_prefix_range=(mm_prefix_range, None),
        use_alibi_sqrt=(use_alibi_sqrt, False),
    )
    flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        out=out,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        sinks=sinks,
        output_scale=output_scale,
    )


_CACHE_DTYPES = {
    "auto": None,
    "bfloat16": "bf16",
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
}


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Stores key / k_scale and value / v_scale [tokens, kv_heads, dim] in the slots of caches
    [blocks, block_size, kv_heads, dim]; tokens whose slot is negative are left out. kv_cache_dtype
    names the format of uint8 caches: "fp8" (e4m3), "fp8_e4m3", "fp8_e5m2"."""
    if kv_cache_dtype not in _CACHE_DTYPES:
        raise UnsupportedError(
            f'kv_cache_dtype is "{kv_cache_dtype}"; supported: {", ".join(_CACHE_DTYPES)}'
        )
    dtype, n = _CACHE_DTYPES[kv_cache_dtype], len(slot_mapping)
    if dtype not in ("e4m3", "e5m2"):  # scales are those of 8-bit formats there
        k_scale = v_scale = None
    pages = Paged(key_cache, dtype=dtype), Paged(value_cache, dtype=dtype)
    store(key[:n], value[:n], *pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
) -> None:
    """Writes what two disjoint sets of keys give together to output [tokens, heads, dim] and
    output_lse [heads, tokens]; lse of +inf or -inf: no keys."""
    o, lse = merge_states([prefix_output, suffix_output], [prefix_lse.T, suffix_lse.T])
    copy_into(output, like(o, output))
    if output_lse is not None:
        copy_into(output_lse, lse.T)
