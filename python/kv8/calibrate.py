"""What K, V and Q look like, the scales that fit them, and the files that scales are kept in.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from ._core import (
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
    text,
    utf8,
    whole,
)
from ._native import ffi, lib
from ._tensor import address_of, dtype_code, host_array, name_of_code, pointer, view

Path = Union[str, "os.PathLike[str]"]
SCALE_FORMATS = ("kv8", "lightllm", "sglang", "compressed_tensors", "modelopt")


class ObservedHead(NamedTuple):
    """What was seen of one head; histogram: counts of |x|, eight bins to a power of two from 2^-32."""

    num_rows: int
    num_values: int
    zeros: int
    nans: int
    infs: int
    absmax: float
    channel_absmax: Any
    channel_nonfinite: Any
    histogram: Any


class Fit(NamedTuple):
    """A scale (value = code * scale) and what storing the observed values with it costs."""

    scale: float
    amax: float
    num_rows: int
    sqnr_db: float
    sqnr_at_1_db: float
    clip_rate: float
    clip_rate_at_1: float
    flushed_rate: float
    flushed_rate_at_1: float
    headroom: float
    warnings: tuple[str, ...]
    channel: int


class Observer(Handle):
    """Counts rows of K (after rope), V and, with num_qo_heads, Q. Sums are exact and merge in any
    order; memory does not grow with the text."""

    _what = "observer"

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int = 0,
        num_qo_heads: int = 0,
        rank: int = 0,
        num_ranks: int = 0,
        isa: str = "best",
        threads: Optional[Threads] = None,
    ) -> None:
        pool = pointer_of(threads or default_threads())
        self.num_layers = whole(num_layers, "num_layers")
        self.num_kv_heads = whole(num_kv_heads, "num_kv_heads")
        self.num_qo_heads = whole(num_qo_heads, "num_qo_heads")
        self.head_dim = whole(head_dim, "head_dim")
        self.v_head_dim = whole(v_head_dim, "v_head_dim") or self.head_dim
        options = struct(
            "kv8_observer_options",
            threads=pool,
            isa=isa_of(isa),
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            num_qo_heads=self.num_qo_heads,
            k_head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            rank=whole(rank, "rank"),
            num_ranks=whole(num_ranks, "num_ranks"),
        )
        self._own(
            lib.kv8_observer_create,
            lib.kv8_observer_destroy,
            "kv8_observer",
            options,
            parents=(pool,),
        )
        lib.kv8_observer_start(self._held.pointer)

    def start(self) -> None:
        with self._held as observer:
            lib.kv8_observer_start(observer)

    def stop(self) -> None:
        """What is added from here on is left out; what was counted stays."""
        with self._held as observer:
            lib.kv8_observer_stop(observer)

    def add(self, layer: int, *, k: Any = None, v: Any = None, q: Any = None) -> None:
        """Counts rows [n, heads, head_dim] of a layer, of one dtype: f32, bf16 or f16."""
        args = struct("kv8_observe_args")
        kept: list[Any] = []
        for name, rows, heads, dim in (
            ("k", k, self.num_kv_heads, self.head_dim),
            ("v", v, self.num_kv_heads, self.v_head_dim),
            ("q", q, self.num_qo_heads, self.head_dim),
        ):
            if rows is None:
                continue
            seen = view(rows, name, 3)
            if seen.shape[1:] != (heads, dim) or seen.device[0] != 1:
                raise InvalidError(
                    f"{name} has shape {list(seen.shape)}, must be [rows, {heads}, {dim}] on the CPU"
                )
            if kept and (seen.shape[0] != kept[0].shape[0] or seen.dtype != kept[0].dtype):
                raise InvalidError(
                    f"{name} is {seen.shape[0]} rows of {seen.dtype}, must be "
                    f"{kept[0].shape[0]} of {kept[0].dtype}"
                )
            kept.append(seen)
            setattr(args, name, pointer(seen.address))
            setattr(args, name + "_stride_row", seen.strides[0])
            setattr(args, name + "_stride_head", seen.strides[1])
        if not kept:
            return
        args.num_rows = kept[0].shape[0]
        args.src_dtype = dtype_code(kept[0].dtype)
        with self._held as observer:
            check(lib.kv8_observer_add(observer, whole(layer, "layer"), args))

    def merge(self, other: "Observer") -> None:
        """Adds what `other` counted."""
        with self._held as observer, other._held as counted:
            check(lib.kv8_observer_merge(observer, counted))

    def head(self, tensor: str, layer: int, head: int) -> ObservedHead:
        """What was seen of one head of "k", "v" or "q"."""
        seen = struct("kv8_observed_head")
        with self._held as observer:
            kind = enum("KV8_OBSERVED_", tensor, "tensor", ("k", "v", "q"))
            at = whole(layer, "layer"), whole(head, "head")
            check(lib.kv8_observer_get(observer, kind, *at, seen))
            return ObservedHead(
                seen.num_rows,
                seen.num_values,
                seen.zeros,
                seen.nans,
                seen.infs,
                seen.absmax,
                _array(seen.channel_absmax, seen.head_dim, np.float32),
                _array(seen.channel_nonfinite, seen.head_dim, np.uint64),
                _array(seen.histogram, lib.KV8_OBSERVE_BINS, np.uint64),
            )

    def fit(
        self,
        tensor: str,
        layer: int,
        head: int = -1,
        *,
        dtype: Any = "e4m3",
        method: str = "absmax",
        percentile: float = 0.0,
        margin: float = 1.0,
        power_of_two: bool = False,
    ) -> Fit:
        """A scale for one head, or all heads of a layer together (-1)."""
        methods = ("absmax", "percentile", "squared_error")
        options = struct(
            "kv8_fit_options",
            dtype=dtype_code(dtype),
            method=enum("KV8_FIT_", method, "method", methods),
            percentile=percentile,
            margin=margin,
            power_of_two=bool(power_of_two),
        )
        fit = struct("kv8_fit")
        kind = enum("KV8_OBSERVED_", tensor, "tensor", ("k", "v", "q"))
        with self._held as observer:
            at = whole(layer, "layer"), whole(head, "head")
            check(lib.kv8_observer_fit(observer, kind, *at, options, fit))
        found = tuple(
            text(lib.kv8_fit_warning_text(1 << bit)) or ""
            for bit in range(32)
            if fit.warnings >> bit & 1
        )
        values = [getattr(fit, name) for name in Fit._fields[:10]]
        return Fit._make([*values, found, fit.channel])

    def fit_all(self, *, per_head: bool = True, **options: Any) -> "ScaleData":
        """Scales of K and V of every layer, as a file holds them. Options are those of fit()."""
        heads = range(self.num_kv_heads) if per_head else [-1]
        fits = [
            [self.fit(tensor, layer, head, **options) for tensor in "kv" for head in heads]
            for layer in range(self.num_layers)
        ]

        def table(field: str, dtype: Any) -> Any:
            return np.array([[getattr(fit, field) for fit in row] for row in fits], dtype)

        power = bool(options.get("power_of_two"))
        return ScaleData(
            scales=table("scale", np.float32),
            num_kv_heads=self.num_kv_heads,
            dtype=options.get("dtype", "e4m3"),
            per_tensor=not per_head,
            amax=None if power else table("amax", np.float32),
            sqnr_db=table("sqnr_db", np.float64),
            clip_rate=table("clip_rate", np.float64),
            method=options.get("method", "absmax"),
            margin=options.get("margin", 1.0),
        )


def _array(address: Any, n: int, dtype: Any) -> Any:
    size = n * np.dtype(dtype).itemsize
    return np.frombuffer(ffi.buffer(address, size), dtype).copy() if address else None


@dataclass
class ScaleData:
    """What a scale file holds. Rows are layers; columns K's heads, then V's, or [k, v] per tensor.
    value = code * scale. Fields that are None are not in the file."""

    scales: Any
    num_kv_heads: int
    dtype: str = "e4m3"
    per_tensor: bool = False
    architecture: Optional[str] = None
    amax: Any = None
    sqnr_db: Any = None
    clip_rate: Any = None
    method: Optional[str] = None
    margin: float = 0.0
    num_tokens: int = 0
    model_hash: int = 0
    kv_dtypes: Optional[list[tuple[str, str]]] = None

    @property
    def num_layers(self) -> int:
        return len(self.scales)


class ScaleFile(Handle):
    """Scales of a model, from a file of any known form (open), or made of data to be written."""

    _what = "scale file"

    def __init__(self, data: ScaleData) -> None:
        table = host_array(data.scales, "scales", np.float32)
        columns = 2 if data.per_tensor else 2 * whole(data.num_kv_heads, "num_kv_heads", 1)
        if table.ndim != 2 or table.shape[1] != columns:
            raise InvalidError(f"scales has shape {list(table.shape)}, must be [layers, {columns}]")
        out = struct(
            "kv8_scale_data",
            dtype=dtype_code(data.dtype),
            num_layers=table.shape[0],
            num_kv_heads=data.num_kv_heads,
            per_tensor=bool(data.per_tensor),
            scales=pointer(address_of(table), "float *"),
            margin=data.margin,
            num_tokens=whole(data.num_tokens, "num_tokens", 0, 2**63 - 1),
            model_hash=whole(data.model_hash, "model_hash", 0, 2**64 - 1),
        )
        kept: list[Any] = [table]
        for name, dtype, kind in (
            ("amax", np.float32, "float *"),
            ("sqnr_db", np.float64, "double *"),
            ("clip_rate", np.float64, "double *"),
        ):
            values = getattr(data, name)
            if values is None:
                continue
            array = host_array(values, name, dtype)
            if array.shape != table.shape:
                raise InvalidError(f"{name} has shape {list(array.shape)}, scales {table.shape}")
            kept.append(array)
            setattr(out, name, pointer(address_of(array), kind))
        for name in ("architecture", "method"):
            value = getattr(data, name)
            if value is not None:
                kept.append(ffi.new("char[]", utf8(value, name)))
                setattr(out, name, kept[-1])
        if data.kv_dtypes is not None:
            codes = [dtype_code(dtype) for pair in data.kv_dtypes for dtype in pair]
            if len(codes) != 2 * table.shape[0]:
                raise InvalidError(f"kv_dtypes has {len(codes)} entries, must be 2 per layer")
            kept.append(ffi.new("kv8_dtype[]", codes))
            out.kv_dtypes = kept[-1]
        self._own(lib.kv8_scale_file_create, lib.kv8_scale_file_close, "kv8_scale_file", out)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        num_layers: int = 0,
        num_kv_heads: int = 0,
        architecture: Optional[str] = None,
        model_hash: int = 0,
    ) -> "ScaleFile":
        """Reads JSON, a .safetensors file or a checkpoint directory. What the model that is named
        contradicts is refused by its key; 0 and None stand for any."""
        name = (
            ffi.NULL
            if architecture is None
            else ffi.new("char[]", utf8(architecture, "architecture"))
        )
        expect = struct(
            "kv8_scale_expect",
            num_layers=whole(num_layers, "num_layers"),
            num_kv_heads=whole(num_kv_heads, "num_kv_heads"),
            architecture=name,
            model_hash=model_hash,
        )
        file = cls.__new__(cls)
        file._own(
            lib.kv8_scale_file_open,
            lib.kv8_scale_file_close,
            "kv8_scale_file",
            path_bytes(path),
            expect,
        )
        return file

    def write(self, path: Path, format: str = "kv8", *, num_ranks: int = 0) -> None:
        """Writes the whole file or none, as "kv8", "lightllm", "sglang", "compressed_tensors" or
        "modelopt"."""
        kind = enum("KV8_SCALES_", format, "format", SCALE_FORMATS)
        with self._held as file:
            check(lib.kv8_scale_file_write(file, path_bytes(path), kind, num_ranks))

    def split(self, first_head: int, num_heads: int) -> "ScaleFile":
        """The heads of one rank alone."""
        part = ScaleFile.__new__(ScaleFile)
        with self._held as file:
            part._own(
                lib.kv8_scale_file_split,
                lib.kv8_scale_file_close,
                "kv8_scale_file",
                file,
                whole(first_head, "first_head"),
                whole(num_heads, "num_heads"),
            )
        return part

    @property
    def data(self) -> ScaleData:
        """All that the file holds."""
        out = struct("kv8_scale_data")
        with self._held as file:
            check(lib.kv8_scale_file_get(file, out))
            columns = 2 if out.per_tensor else 2 * out.num_kv_heads
            shape, n = (out.num_layers, columns), out.num_layers * columns

            def table(address: Any, dtype: Any) -> Any:
                values = _array(address, n, dtype)
                return values if values is None else values.reshape(shape)

            pairs = None
            if out.kv_dtypes:
                names = [name_of_code(out.kv_dtypes[i]) for i in range(2 * out.num_layers)]
                pairs = list(zip(names[::2], names[1::2]))
            return ScaleData(
                scales=table(out.scales, np.float32),
                num_kv_heads=out.num_kv_heads,
                dtype="e4m3" if out.dtype == 0 else name_of_code(out.dtype),
                per_tensor=bool(out.per_tensor),
                architecture=text(out.architecture),
                amax=table(out.amax, np.float32),
                sqnr_db=table(out.sqnr_db, np.float64),
                clip_rate=table(out.clip_rate, np.float64),
                method=text(out.method),
                margin=out.margin,
                num_tokens=out.num_tokens,
                model_hash=out.model_hash,
                kv_dtypes=pairs,
            )

    def layer(self, layer: int) -> tuple[Any, Any]:
        """k_scale and v_scale [num_kv_heads] of a layer."""
        data = self.data
        row = data.scales[whole(layer, "layer", 0, data.num_layers - 1)]
        if data.per_tensor:
            row = np.repeat(row, data.num_kv_heads)
        return row[: data.num_kv_heads].copy(), row[data.num_kv_heads :].copy()
