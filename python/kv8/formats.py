"""Number formats: what codes mean, and conversions of whole arrays.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._core import InvalidError, check, isa_of
from ._native import ffi, lib
from ._tensor import address_of, dtype_code, dtype_name, host_array, numpy_dtype, pointer, view


class Narrowed(NamedTuple):
    """Codes, and how many values were saturated or NaN."""

    codes: Any
    clips: int
    nans: int


class NarrowedInt8(NamedTuple):
    """int8 codes [rows, n], the f16 scale of every row, and counts as of Narrowed."""

    codes: Any
    scales: Any
    clips: int
    nans: int


def dtype_max(dtype: Any) -> float:
    """Largest finite value: 448 of "e4m3"."""
    return float(lib.kv8_dtype_max(dtype_code(dtype)))


def dtype_size(dtype: Any) -> int:
    """Bytes of an element."""
    return int(lib.kv8_dtype_size(dtype_code(dtype)))


def widen(codes: Any, dtype: Any = None, *, isa: str = "best") -> Any:
    """The values of `codes` as a float32 array of its shape, exact. `dtype` is needed where the
    array itself does not say it (uint8, uint16)."""
    array = np.asarray(codes, order="C")
    name = dtype_name(array.dtype if dtype is None else dtype)
    seen = view(array.reshape(-1), "codes", 1, name)
    values = np.empty(array.shape, np.float32)
    check(
        lib.kv8_widen(
            isa_of(isa),
            dtype_code(name),
            pointer(seen.address),
            array.size,
            pointer(address_of(values), "float *"),
        )
    )
    return values


def narrow(values: Any, dtype: Any, scale: float = 1.0, *, isa: str = "best") -> Narrowed:
    """Codes of values / scale: rounded to nearest even, saturated at the largest finite value."""
    name = dtype_name(dtype)
    array = host_array(values, "values", np.float32)
    codes = np.empty(array.shape, numpy_dtype(name))
    counts = ffi.new("kv8_narrow_counts *")
    check(
        lib.kv8_narrow(
            isa_of(isa),
            dtype_code(name),
            pointer(address_of(array), "float *"),
            array.size,
            scale,
            pointer(address_of(codes)),
            counts,
        )
    )
    return Narrowed(codes, counts.clips, counts.nans)


def narrow_int8(values: Any, *, isa: str = "best") -> NarrowedInt8:
    """int8 codes of rows [..., n] with one f16 scale per row: absmax / 127."""
    array = host_array(values, "values", np.float32)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise InvalidError(f"values has shape {list(array.shape)}, must be rows of one or more")
    codes = np.empty(array.shape, np.int8)
    scales = np.empty(array.shape[:-1], np.float16)
    counts = ffi.new("kv8_narrow_counts *")
    n = array.shape[-1]
    source, target = address_of(array), address_of(codes)
    for row in range(scales.size):
        check(
            lib.kv8_narrow_int8(
                isa_of(isa),
                pointer(source + 4 * row * n, "float *"),
                n,
                pointer(target + row * n, "int8_t *"),
                pointer(address_of(scales) + 2 * row, "kv8_f16 *"),
                counts,
            )
        )
    return NarrowedInt8(codes, scales, counts.clips, counts.nans)


def mxfp4_widen(blocks: Any, scales: Any, *, isa: str = "best") -> Any:
    """Values [..., n, 32] of MXFP4 blocks [..., n, 16] uint8 and their e8m0 scales [..., n] uint8."""
    packed = host_array(blocks, "blocks", np.uint8)
    exponents = host_array(scales, "scales", np.uint8)
    if packed.ndim == 0 or packed.shape[-1] != 16 or packed.shape[:-1] != exponents.shape:
        raise InvalidError(
            f"blocks has shape {list(packed.shape)} and scales "
            f"{list(exponents.shape)}, must be [..., 16] and [...]"
        )
    values = np.empty(exponents.shape + (32,), np.float32)
    check(
        lib.kv8_mxfp4_widen(
            isa_of(isa),
            pointer(address_of(packed), "uint8_t *"),
            pointer(address_of(exponents), "kv8_e8m0 *"),
            exponents.size,
            pointer(address_of(values), "float *"),
        )
    )
    return values


def mxfp4_narrow(values: Any) -> tuple[Any, Any]:
    """MXFP4 blocks [..., n, 16] and scales [..., n] of values [..., n, 32]; nothing clips."""
    array = host_array(values, "values", np.float32)
    if array.ndim == 0 or array.shape[-1] != 32:
        raise InvalidError(f"values has shape {list(array.shape)}, must be [..., 32]")
    blocks = np.empty(array.shape[:-1] + (16,), np.uint8)
    scales = np.empty(array.shape[:-1], np.uint8)
    check(
        lib.kv8_mxfp4_narrow(
            pointer(address_of(array), "float *"),
            scales.size,
            pointer(address_of(blocks), "uint8_t *"),
            pointer(address_of(scales), "kv8_e8m0 *"),
        )
    )
    return blocks, scales
