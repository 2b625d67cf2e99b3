"""Partial results over disjoint keys: merged exactly, and the sink's part in the end.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._core import InvalidError
from ._native import lib
from ._tensor import address_of, host_array, pointer


def merge(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """The exact result over the keys of both: o [..., dim] and natural-log lse [...], of disjoint
    keys and without a sink. New float32 arrays."""
    o, lse = _copy(o_a, "o_a"), _copy(lse_a, "lse_a")
    other, other_lse = host_array(o_b, "o_b", np.float32), host_array(lse_b, "lse_b", np.float32)
    if (
        o.ndim == 0
        or o.shape != other.shape
        or lse.shape != o.shape[:-1]
        or other_lse.shape != lse.shape
    ):
        raise InvalidError(
            f"o has shapes {list(o.shape)} and {list(other.shape)}, lse {list(lse.shape)} "
            f"and {list(other_lse.shape)}; must be [..., dim] and [...]"
        )
    if o.size:
        lib.kv8_attention_merge(
            pointer(address_of(o), "float *"),
            pointer(address_of(lse), "float *"),
            pointer(address_of(other), "float *"),
            pointer(address_of(other_lse), "float *"),
            lse.size,
            o.shape[-1],
        )
    return o, lse


def apply_sink(o: Any, lse: Any, sinks: Any) -> Any:
    """o [..., num_heads, dim] after the sink [num_heads] has joined the denominator: once, last."""
    result, weights = _copy(o, "o"), host_array(lse, "lse", np.float32)
    if result.ndim < 2 or weights.shape != result.shape[:-1]:
        raise InvalidError(
            f"o has shape {list(result.shape)} and lse {list(weights.shape)}, must be "
            "[..., heads, dim] and [..., heads]"
        )
    try:
        logits = np.ascontiguousarray(
            np.broadcast_to(host_array(sinks, "sinks", np.float32), weights.shape)
        )
    except ValueError:
        raise InvalidError(f"sinks does not fit heads {weights.shape[-1]}") from None
    if result.size:
        lib.kv8_attention_apply_sink(
            pointer(address_of(result), "float *"),
            pointer(address_of(weights), "float *"),
            pointer(address_of(logits), "float *"),
            weights.size,
            result.shape[-1],
        )
    return result


def _copy(x: Any, name: str) -> Any:
    return host_array(x, name, np.float32).copy()
