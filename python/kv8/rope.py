"""Rotary position embedding: angles of positions, rotation of rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._core import Handle, InvalidError, enum, struct, whole
from ._native import ffi, lib
from ._tensor import address_of, host_array, pointer, view


class Rope(Handle):
    """Inverse frequencies of a head of `head_dim` elements.

    kind: "default", "yarn" (factor, original_max_position, beta_fast, beta_slow, attention_factor,
    truncate), "linear" (factor) or "llama3" (factor, original_max_position, low_freq_factor,
    high_freq_factor). Pairs are (i, i + head_dim/2), or (2i, 2i + 1) where interleaved.
    """

    _what = "rope"

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        *,
        kind: str = "default",
        interleaved: bool = False,
        factor: float = 0.0,
        original_max_position: int = 0,
        beta_fast: float = 0.0,
        beta_slow: float = 0.0,
        attention_factor: float = 0.0,
        truncate: bool = False,
        low_freq_factor: float = 0.0,
        high_freq_factor: float = 0.0,
    ) -> None:
        options = struct(
            "kv8_rope_options",
            kind=enum("KV8_ROPE_", kind, "kind", ("default", "yarn", "linear", "llama3")),
            head_dim=whole(head_dim, "head_dim"),
            theta=theta,
            factor=factor,
            original_max_position=whole(original_max_position, "original_max_position"),
            interleaved=bool(interleaved),
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=attention_factor,
            truncate=bool(truncate),
            low_freq_factor=low_freq_factor,
            high_freq_factor=high_freq_factor,
        )
        self._own(lib.kv8_rope_create, lib.kv8_rope_destroy, "kv8_rope", options)
        self.head_dim = head_dim
        self.interleaved = bool(interleaved)

    @property
    def inv_freq(self) -> Any:
        """Inverse frequencies, float32 [head_dim / 2]."""
        with self._held as rope:
            values = lib.kv8_rope_inv_freq(rope, ffi.new("float *"))
            return np.frombuffer(ffi.buffer(values, 2 * self.head_dim), np.float32).copy()

    @property
    def factor(self) -> float:
        """Factor on cosines and sines."""
        with self._held as rope:
            factor = ffi.new("float *")
            lib.kv8_rope_inv_freq(rope, factor)
            return float(factor[0])

    def angles(self, positions: Any) -> Any:
        """cos_sin [n, head_dim] of positions [n]: cosines, then sines, times the factor."""
        at = host_array(positions, "positions", np.int32)
        if at.ndim != 1:
            raise InvalidError(f"positions has shape {list(at.shape)}, must have 1 axis")
        cos_sin = np.empty((at.size, self.head_dim), np.float32)
        with self._held as rope:
            lib.kv8_rope_angles(
                rope,
                pointer(address_of(at), "int32_t *"),
                at.size,
                pointer(address_of(cos_sin), "float *"),
            )
        return cos_sin

    def apply(self, x: Any, cos_sin: Any) -> Any:
        """Rotates x [n, num_heads, head_dim] float32 in place, and returns it."""
        rows = view(x, "x", 3, "f32", writable=True)
        angles = host_array(cos_sin, "cos_sin", np.float32)
        if rows.shape[2] != self.head_dim or angles.shape != (rows.shape[0], self.head_dim):
            raise InvalidError(
                f"x has shape {list(rows.shape)} and cos_sin {list(angles.shape)}, must "
                f"be [n, heads, {self.head_dim}] and [n, {self.head_dim}]"
            )
        with self._held as rope:
            lib.kv8_rope_apply(
                rope,
                pointer(address_of(angles), "float *"),
                rows.shape[0],
                pointer(rows.address, "float *"),
                rows.shape[1],
                rows.strides[0],
                rows.strides[1],
            )
        return x
