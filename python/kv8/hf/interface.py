"""attn_implementation="kv8": transformers' attention function and its mask on kv8's kernels.

Masks of transformers come as key bounds: an int32 tensor [batch, 1, 1, 1] of lengths, or [batch, 1,
1, 2] of (length, first key) where the batch is padded on the left; four axes, which say to
transformers that a mask is ready. Causal masks and windows are the kernels'
own. Any other mask is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .._core import UnsupportedError
from ..torch_ops import attend
from .cache import latest


def key_bounds(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Optional[torch.Tensor] = None,
    local_size: Optional[int] = None,
    device: Any = "cpu",
    **_: Any,
) -> torch.Tensor:
    """The mask: how many keys each row of the batch has, and its first where that is padding."""
    if attention_mask is not None:
        device = attention_mask.device
    if isinstance(q_offset, torch.Tensor):
        device = q_offset.device
    checks = _may_read(device)
    if checks:
        _check_is_causal(mask_function, q_length, kv_length, int(q_offset), kv_offset, local_size)
    end = torch.zeros(batch_size, dtype=torch.int32, device=device) + (
        q_offset + q_length - kv_offset
    )
    if attention_mask is None:
        return end.to(torch.int32)[:, None, None, None]
    seen = attention_mask.to(torch.bool)
    if checks and bool(seen.all()):
        return end.to(torch.int32)[:, None, None, None]
    # Only what follows the first key's padding counts: rows of padding at the end see, and nobody
    # sees them.
    first = seen.int().argmax(1)
    if checks:
        steps = seen.int().diff(dim=1)
        if bool((steps == 1).sum(1).gt(1).any() | ((steps == 1).any(1) & seen[:, 0]).any()):
            raise UnsupportedError("attention_mask has holes; supported: padding at the ends")
    bounds = torch.stack((end, (first - kv_offset).clamp(min=0)), 1)
    return bounds.to(torch.int32)[:, None, None]


def _may_read(device: Any) -> bool:
    """Values of a mask can be read: neither traced nor recorded in a graph, which repeat a call whose
    mask was checked before."""
    if torch.compiler.is_compiling():
        return False
    return torch.device(device).type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _check_is_causal(
    mask: Any, q_length: int, kv_length: int, q_offset: int, kv_offset: int, local: Optional[int]
) -> None:
    """Asks the mask for a few rows."""
    if mask is None:
        return
    keys = torch.arange(kv_length) + kv_offset
    rows = torch.unique(torch.linspace(0, q_length - 1, min(q_length, 8)).long()) + q_offset
    zero = torch.zeros(1, dtype=torch.long)
    try:
        found = mask(zero, zero, rows[:, None], keys[None])
    except Exception as error:  # a mask over data of the batch
        raise UnsupportedError(f"the model's mask: {error}; supported: causal, sliding") from error
    wanted = keys[None] <= rows[:, None]
    if local is not None:
        wanted &= keys[None] > rows[:, None] - local
    if not bool((torch.as_tensor(found).expand_as(wanted) == wanted).all()):
        raise UnsupportedError("the model's mask is neither causal nor a sliding window")


def kv8_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    is_causal: Optional[bool] = None,
    position_bias: Optional[torch.Tensor] = None,
    head_mask: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, rows, dim], key and value [batch, kv_heads, keys, dim], or a Kv8Cache's
    codes. Returns [batch, rows, heads, dim]."""
    for name, given in (("position_bias", position_bias), ("head_mask", head_mask)):
        if given is not None:
            raise UnsupportedError(f"{name} is given; supported: None")
    if dropout:
        raise UnsupportedError(f"dropout is {dropout}; supported: 0 (model.eval())")
    if torch.is_grad_enabled() and query.requires_grad:
        raise UnsupportedError("gradients: kv8 has no backward pass; call it under torch.no_grad()")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    batch, heads, rows, dim = query.shape
    layer, latest.layer = latest.layer, None
    if layer is not None and layer.owns(key):
        k, v, pages = layer.k_codes, layer.v_codes, layer.capacity // layer.page_size
        extra = layer.k_rows, layer.v_rows
        scales = layer.k_scale, layer.v_scale
    elif key.element_size() == 1:
        raise UnsupportedError(f"{key.dtype} keys that no Kv8Cache gave; supported: 16 and 32 bits")
    else:
        k, v, pages = key.transpose(1, 2), value.transpose(1, 2), 1
        extra = scales = (None, None)
    device = query.device
    if attention_mask is None:
        lens = torch.full((batch,), key.shape[2], dtype=torch.int32, device=device)
    elif attention_mask.dtype == torch.int32 and attention_mask.shape[:3] == (batch, 1, 1):
        lens = attention_mask[:, 0, 0, 0].contiguous()
    else:
        raise UnsupportedError(
            f"attention_mask is {list(attention_mask.shape)} {attention_mask.dtype}; supported: "
            "padding, which transformers turns into key bounds"
        )
    begin = end = None
    if attention_mask is not None and attention_mask.shape[3] == 2:
        begin = attention_mask[:, 0, 0, 1].repeat_interleave(rows)
        end = lens.repeat_interleave(rows)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    o, _lse = attend(
        query.transpose(1, 2).reshape(batch * rows, heads, dim),
        k,
        v,
        *extra,
        table,
        lens,
        torch.arange(batch + 1, dtype=torch.int32, device=device) * rows,
        begin,
        end,
        *scales,
        None if s_aux is None else s_aux.float(),
        scaling,
        softcap or 0.0,
        bool(causal),
        -1 if sliding_window is None else sliding_window - 1,
    )
    return o.view(batch, rows, heads, -1), None


def register() -> None:
    """Makes attn_implementation="kv8" known to transformers."""
    AttentionInterface.register("kv8", kv8_attention)
    AttentionMaskInterface.register("kv8", key_bounds)
