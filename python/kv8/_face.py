"""What the faces share: arguments refused by name, and results in the peers' shapes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ._core import InvalidError, UnsupportedError
from ._tensor import is_torch
from .merge import merge


def refuse(**arguments: tuple[Any, Any]) -> None:
    """Each argument is (value, what it must be): any other is refused by its name."""
    for name, (value, only) in arguments.items():
        if value is only or (value is not None and only is not None and value == only):
            continue
        shown = f"a tensor of {list(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise UnsupportedError(f"{name} is {shown}; supported: {only!r}")


def need(**arguments: Any) -> None:
    """Each argument that is None is refused by its name."""
    for name, value in arguments.items():
        if value is None:
            raise InvalidError(f"{name} is missing")


def refuse_gradients(*tensors: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise UnsupportedError(
                "gradients: kv8 has no backward pass; call it under torch.no_grad()"
            )


def window(size: Any, causal: bool) -> dict[str, Any]:
    """(left, right) as kv8 has it: below 0 is all, and causal bounds the right already."""
    left, right = (-1, -1) if size is None else (int(size[0]), int(size[1]))
    return {"window_left": max(left, -1), "window_right": -1 if causal else max(right, -1)}


def add_sinks(lse: Any, sinks: Any, base2: bool = False) -> Any:
    """lse [..., heads] with the sinks among the keys, as the peers count them."""
    if sinks is None:
        return lse
    if is_torch(lse):
        import torch

        extra = sinks.to(lse).expand_as(lse) * (1.4426950408889634 if base2 else 1.0)
        return (torch.logaddexp2 if base2 else torch.logaddexp)(lse, extra)
    extra = np.asarray(sinks, np.float32) * np.float32(1.4426950408889634 if base2 else 1.0)
    return (np.logaddexp2 if base2 else np.logaddexp)(lse, extra)


def merge_states(o: list[Any], lse: list[Any]) -> tuple[Any, Any]:
    """The exact result of partial ones: o [..., dim] and natural lse [...] each, in float32. An lse
    of +inf, as of -inf, says that there were no keys."""
    if is_torch(o[0]) and o[0].is_cuda:
        import torch

        stack = torch.stack([x.float() for x in lse])
        stack = torch.where(torch.isposinf(stack), float("-inf"), stack)
        total = torch.logsumexp(stack, 0)
        weights = torch.nan_to_num(torch.exp(stack - total), nan=0.0)
        parts = torch.stack([x.float() for x in o])
        parts = torch.where(weights.unsqueeze(-1) == 0, 0.0, parts)
        return (parts * weights.unsqueeze(-1)).sum(0), total
    total_o, total_lse = o[0], lse[0]
    for other_o, other_lse in zip(o[1:], lse[1:]):
        total_o, total_lse = merge(total_o, total_lse, other_o, other_lse)
    if is_torch(o[0]):
        import torch

        return torch.as_tensor(total_o), torch.as_tensor(total_lse)
    return total_o, total_lse


def like(x: Any, other: Any) -> Any:
    """x in the dtype of `other`."""
    return x.to(other.dtype) if is_torch(x) else x.astype(other.dtype)


def copy_into(target: Any, x: Any) -> Any:
    """Writes x to `target` where that is given."""
    if target is None:
        return x
    if is_torch(target):
        target.copy_(x)
    else:
        target[...] = x
    return target
