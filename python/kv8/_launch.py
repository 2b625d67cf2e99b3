"""Launches of attention on a GPU: device memory to work in, and runs that are made again.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ._core import check, pointer_of
from ._native import ffi, lib
from ._tensor import _TO_FOREIGN, pointer

if TYPE_CHECKING:
    from .attention import AttentionPlan

MAX_REPEATS = 1024  # layers times the shapes in use
_ones: dict[Any, Any] = {}


def _maker(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Makes tensors of that shape by a pattern that has no memory of its own: half the time that a
    shape as a tuple takes."""
    import torch

    one = _ones.get((dtype, device))
    if one is None:
        one = _ones[dtype, device] = torch.empty(1, dtype=dtype, device=device)
    return partial(torch.empty_like, one.expand(shape), memory_format=torch.contiguous_format)


class Workspace:
    """Device memory that runs of a plan work in, one after another on one stream."""

    __slots__ = ("_memory", "_pointer", "_ready")

    def __init__(self, plan: AttentionPlan) -> None:
        import torch

        self._memory = torch.empty(
            plan.workspace_size + 256, dtype=torch.uint8, device=f"cuda:{plan.device[1]}"
        )
        self._pointer = pointer(-(-self._memory.data_ptr() // 256) * 256)
        self._ready = False

    def init(self, plan: Any, stream: Any) -> Any:
        """Its address; its counters are 0 from the first call on."""
        if not self._ready:
            check(lib.kv8_attention_device_workspace_init(plan, stream, self._pointer))
            self._ready = True
        return self._pointer


def launch(
    plan: AttentionPlan, args: Any, stream: Any, workspace: Workspace, prepare: bool
) -> None:
    """A run on a stream."""
    handle, queue = pointer_of(plan), pointer_of(stream)
    space = workspace.init(handle, queue)
    if prepare:
        check(lib.kv8_attention_device_prepare(handle, queue, args, space))
    check(lib.kv8_attention_device_run(handle, queue, args, space))


class Repeat:
    """The args of a run on a GPU, checked and filled. They point to memory that a later call with an
    equal call_key has; q, o and lse lie elsewhere each time. Keeps none of it alive."""

    __slots__ = ("plan", "_args", "_structs", "_new_o", "_new_lse")

    def __init__(self, plan: AttentionPlan, args: Any, kept: list[Any], q: Any) -> None:
        import torch

        self.plan = plan
        self._args = ffi.new("kv8_attention_args *", args[0])
        self._structs = [x for x in kept if isinstance(x, ffi.CData)]
        rows, o_dtype = (q.shape[0], plan.num_qo_heads), getattr(torch, _TO_FOREIGN[plan.o_dtype])
        self._new_o = _maker((*rows, plan.v_head_dim), o_dtype, q.device)
        self._new_lse = _maker(rows, torch.float32, q.device)

    def run(
        self,
        q: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
        stream: Any,
        workspace: Workspace,
        prepare: bool,
    ) -> Any:
        if out is None:
            out = self._new_o()
        if return_lse and lse is None:
            lse = self._new_lse()
        plan, queue = pointer_of(self.plan), pointer_of(stream)
        status = lib.kv8_py_attend_again(
            plan,
            queue,
            self._args,
            workspace.init(plan, queue),
            q.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            prepare,
        )
        check(status)
        return (out, lse) if return_lse else out
