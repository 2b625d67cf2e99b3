"""Tensors of other libraries as kv8 sees them: address, shape, strides, dtype, device.

numpy arrays, torch tensors and everything with __dlpack__ are read where they lie; nothing is
copied, and neither torch nor ml_dtypes is imported.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Optional

import numpy as np

from ._core import InvalidError, TypeMismatchError
from ._native import ffi, lib

DTYPES = ("f32", "bf16", "f16", "e4m3", "e4m3fnuz", "e5m2", "int8")
_CODES = {name: int(getattr(lib, "KV8_" + name.upper())) for name in DTYPES}
_NAMES = {code: name for name, code in _CODES.items()}
SIZES = {
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "e4m3": 1,
    "e4m3fnuz": 1,
    "e5m2": 1,
    "int8": 1,
    "u8": 1,
    "u16": 2,
}
# Names of numpy, ml_dtypes and torch. u8 and u16 are codes whose format the call says.
_FOREIGN = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "e4m3",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2": "e5m2",
    "int8": "int8",
    "uint8": "u8",
    "uint16": "u16",
}
_TO_FOREIGN = {name: foreign for foreign, name in _FOREIGN.items()}
_DLPACK = {
    (2, 32): "f32",
    (4, 16): "bf16",
    (2, 16): "f16",
    (0, 8): "int8",
    (1, 8): "u8",
    (1, 16): "u16",
    (10, 8): "e4m3",
    (11, 8): "e4m3fnuz",
    (12, 8): "e5m2",
}
_TO_DLPACK = {"f32": (2, 32), "bf16": (4, 16), "f16": (2, 16), "int8": (0, 8)}
_seen: dict[Any, Optional[str]] = {}
# Tensors without elements have no address elsewhere; the library wants one, and never looks there.
_no_elements = ffi.new("char[]", 64)
_nowhere = int(ffi.cast("uintptr_t", _no_elements))

CPU, CUDA = 1, 2  # device types, as DLPack numbers them


def dtype_name(dtype: Any, name: str = "dtype") -> str:
    """kv8's name of a dtype: "e4m3" of "e4m3", torch.float8_e4m3fn or ml_dtypes.float8_e4m3fn."""
    if isinstance(dtype, str) and dtype in _CODES:
        return dtype
    known = _foreign_name(dtype)
    if known not in _CODES:
        raise InvalidError(f"{name} is {dtype!r}, must be one of {', '.join(DTYPES)}")
    return str(known)


def dtype_code(dtype: Any, name: str = "dtype") -> int:
    return _CODES[dtype_name(dtype, name)]


def name_of_code(code: int) -> str:
    return _NAMES.get(code, "none")


def _foreign_name(dtype: Any) -> Optional[str]:
    try:
        return _seen[dtype]
    except (KeyError, TypeError):
        pass
    found = _FOREIGN.get(str(dtype).rsplit(".", 1)[-1])
    if found is None:
        try:
            found = _FOREIGN.get(np.dtype(dtype).name)
        except TypeError:
            pass
    try:
        _seen[dtype] = found
    except TypeError:
        pass
    return found


class View:
    """A tensor where it lies. `strides` count elements; `device` is (CPU, 0) or (CUDA, index)."""

    __slots__ = ("address", "shape", "strides", "dtype", "device", "owner", "writable")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        device: tuple[int, int],
        owner: Any,
        writable: bool = True,
    ) -> None:
        self.address, self.shape, self.strides = address, shape, strides
        self.dtype, self.device, self.owner, self.writable = dtype, device, owner, writable

    def permute(self, *axes: int) -> "View":
        return self.offset(0, axes)

    def bare(self) -> "View":
        """The same view, which keeps nothing alive."""
        return View(
            self.address, self.shape, self.strides, self.dtype, self.device, None, self.writable
        )

    def offset(self, elements: int, axes: tuple[int, ...]) -> "View":
        """The view of some axes, `elements` further on."""
        return View(
            self.address + elements * SIZES[self.dtype],
            tuple(self.shape[a] for a in axes),
            tuple(self.strides[a] for a in axes),
            self.dtype,
            self.device,
            self.owner,
            self.writable,
        )


def is_torch(x: Any) -> bool:
    """x is a torch tensor: asked without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def call_key(rewritten: tuple[Any, ...], read: tuple[Any, ...], plain: tuple[Any, ...]) -> Any:
    """What two calls on a GPU have in common when they fill the same arguments: of the tensors that lie
    elsewhere each time (`rewritten`) shape, strides and dtype, of those that are read the address too,
    and all of `plain`, hashable values. None for a call that reads arrays of the host."""
    signer = _signer
    if signer is None:
        signer = _find_signer()
    if signer:
        words = signer(rewritten + read, len(rewritten))
        if words is not None:
            return plain, words
    parts: list[Any] = [plain]
    add, tensor = parts.append, sys.modules["torch"].Tensor
    for x in rewritten:
        if x is None:
            add(None)
        elif isinstance(x, tensor) and x.is_cuda:
            parts += x.shape, x.stride(), x.dtype, x.get_device()
        else:
            return None
    for x in read:
        if x is None:
            add(None)
        elif isinstance(x, tensor):
            if not x.is_cuda:
                return None
            parts += x.data_ptr(), x.shape, x.stride(), x.dtype
        elif isinstance(x, (int, float, str)):
            add(x)
        elif isinstance(x, View):
            if x.device[0] != CUDA:
                return None
            parts += x.address, x.shape, x.strides, x.dtype
        else:  # several of these
            inner = x if isinstance(x, tuple) else x.parts() if hasattr(x, "parts") else None
            inner = None if inner is None else call_key((), inner, ())
            if inner is None:
                return None
            add(inner)
    return tuple(parts)


_signer: Any = None


def _find_signer() -> Any:
    """call_key's shorter way: torch shows tensors to C. False with a torch that has no such calls."""
    global _signer
    tensor = sys.modules["torch"].Tensor
    capsule = getattr(tensor, "__dlpack_c_exchange_api__", None)
    calls = ffi.NULL if capsule is None else lib.kv8_py_dl_calls_of(id(capsule))
    if calls == ffi.NULL:
        _signer = False
        return False
    of_thread, of_type, room = threading.local(), id(tensor), 1024
    sign, unpack = lib.kv8_py_sign, ffi.unpack

    def signer(arguments: tuple[Any, ...], num_rewritten: int) -> Any:
        try:
            words, as_bytes = of_thread.words
        except AttributeError:
            words = ffi.new("int64_t[]", room)
            as_bytes = ffi.cast("char *", words)
            of_thread.words = words, as_bytes
        num = sign(calls, of_type, id(arguments), num_rewritten, words, room)
        return unpack(as_bytes, num * 8) if num else None

    _signer = signer
    return signer


def _foreign_view(x: Any, name: str) -> View:
    if isinstance(x, np.ndarray):
        dtype = _foreign_name(x.dtype)
        if dtype is None or not x.dtype.isnative:
            raise TypeMismatchError(
                f"{name} has dtype {x.dtype}, must be one of {', '.join(_FOREIGN)}"
            )
        size = x.itemsize
        if any(stride % size for stride in x.strides):
            raise InvalidError(f"{name} has strides {x.strides} bytes, must be multiples of {size}")
        return View(
            x.__array_interface__["data"][0],
            x.shape,
            # numpy 2.4 gives an array without elements strides of 0.
            tuple(stride // size for stride in x.strides)
            if x.size
            else contiguous_strides(x.shape),
            dtype,
            (CPU, 0),
            x,
            x.flags.writeable,
        )
    if is_torch(x):
        dtype = _foreign_name(x.dtype)
        if dtype is None:
            raise TypeMismatchError(
                f"{name} has dtype {x.dtype}, must be one of {', '.join(_FOREIGN)}"
            )
        place = x.device
        if place.type == "cpu":
            device = (CPU, 0)
        elif place.type == "cuda":
            device = (CUDA, place.index)
        else:
            raise TypeMismatchError(f"{name} is on device {place}, must be on cpu or cuda")
        address, shape = x.data_ptr(), tuple(x.shape)
        if address == 0:
            return View(_nowhere, shape, contiguous_strides(shape), dtype, device, x)
        return View(address, shape, x.stride(), dtype, device, x)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, name)
    raise TypeMismatchError(
        f"{name} is a {type(x).__name__}, must be a numpy array, a torch tensor or have __dlpack__"
    )


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _from_dlpack(x: Any, name: str) -> View:
    capsule = x.__dlpack__()  # kept, not taken over: its owner frees it
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    dtype = _DLPACK.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeMismatchError(
            f"{name} has DLPack type {tensor.code} of {tensor.bits} bits, which "
            f"is none of {', '.join(DTYPES)}"
        )
    if tensor.device_type not in (CPU, CUDA):
        raise TypeMismatchError(
            f"{name} is on DLPack device {tensor.device_type}, must be CPU or CUDA"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
    else:
        strides = contiguous_strides(shape)
    return View(
        (tensor.data or _nowhere) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        (tensor.device_type, tensor.device_id),
        (x, capsule),
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def view(x: Any, name: str, ndim: int, dtype: Optional[str] = None, writable: bool = False) -> View:
    """x as a View of `ndim` axes, the last contiguous. `dtype` names its format: x must have it, or
    be unsigned codes of its size."""
    seen = x if isinstance(x, View) else _foreign_view(x, name)
    if len(seen.shape) != ndim:
        raise InvalidError(f"{name} has shape {list(seen.shape)}, must have {ndim} axes")
    if seen.strides[-1] != 1 and seen.shape[-1] > 1:
        raise InvalidError(f"{name} has stride {seen.strides[-1]} along its last axis, must be 1")
    if dtype is not None and seen.dtype != dtype:
        if seen.dtype not in ("u8", "u16") or SIZES[seen.dtype] != SIZES[dtype]:
            raise TypeMismatchError(f"{name} has dtype {seen.dtype}, must be {dtype}")
        seen = View(
            seen.address, seen.shape, seen.strides, dtype, seen.device, seen.owner, seen.writable
        )
    if writable and not seen.writable:
        raise InvalidError(f"{name} is read-only, and results are written to it")
    return seen


def same_device(device: tuple[int, int], **views: Optional[View]) -> None:
    for name, seen in views.items():
        if seen is not None and seen.device != device:
            raise TypeMismatchError(
                f"{name} is on {device_text(seen.device)}, must be on {device_text(device)}"
            )


def device_text(device: tuple[int, int]) -> str:
    return "the CPU" if device[0] == CPU else f"CUDA device {device[1]}"


def pointer(address: int, type_name: str = "void *") -> Any:
    return ffi.cast(type_name, address)


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """A tensor of the library and device of `like`; formats that its library lacks come as codes."""
    if is_torch(like):
        import torch

        return torch.empty(shape, dtype=getattr(torch, _TO_FOREIGN[dtype]), device=like.device)
    return np.empty(shape, numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> Any:
    """numpy's dtype for a format: ml_dtypes' where that is there, else unsigned codes."""
    if dtype in ("f32", "f16", "int8", "u8", "u16"):
        return np.dtype(_TO_FOREIGN[dtype])
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _TO_FOREIGN[dtype]))
    except (ImportError, AttributeError):
        return np.dtype("uint16" if SIZES[dtype] == 2 else "uint8")


def host_array(x: Any, name: str, dtype: Any) -> Any:
    """x as a contiguous numpy array of `dtype`, copied where it is none; whole numbers are checked."""
    if is_torch(x):
        x = x.detach()
        if np.dtype(dtype).kind == "f":
            x = x.float()
        x = x.cpu().numpy()
    try:
        array = np.asarray(x)
        if array.dtype == dtype:
            return np.asarray(array, order="C")
        kind = np.dtype(dtype).kind
        if array.size and kind in "iu" and array.dtype.kind not in "iub":
            raise TypeMismatchError(f"{name} has dtype {array.dtype}, must hold whole numbers")
        if array.size and kind in "iu":
            limits = np.iinfo(dtype)
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                raise InvalidError(
                    f"{name} holds {low if low < limits.min else high}, must be "
                    f"{limits.min} to {limits.max}"
                )
        return np.asarray(array, dtype, order="C")
    except (ValueError, TypeError) as error:
        if isinstance(error, (InvalidError, TypeMismatchError)):
            raise
        raise TypeMismatchError(
            f"{name} cannot be read as {np.dtype(dtype).name}: {error}"
        ) from None


def address_of(array: Any) -> int:
    """Address of a numpy array or a torch tensor."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data_ptr())


_capsule = ctypes.pythonapi.Py_DecRef
_capsule.argtypes = [ctypes.py_object]
_capsule.restype = None


def to_dlpack(seen: View, owner: Any) -> Any:
    """A DLPack capsule of a view that keeps `owner` alive; 8-bit floats come as uint8 codes."""
    shape = ffi.new("int64_t[]", list(seen.shape))
    strides = ffi.new("int64_t[]", list(seen.strides))
    code, bits = _TO_DLPACK.get(seen.dtype, (1, 8))
    tensor = ffi.new("kv8_py_dl_tensor *")
    tensor.data = pointer(seen.address)
    tensor.device.device_type, tensor.device.device_id = seen.device
    tensor.ndim = len(seen.shape)
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
    tensor.shape, tensor.strides = shape, strides
    address = int(lib.kv8_py_dlpack(tensor, id(owner)))
    if address == 0:
        raise MemoryError("no memory for a DLPack capsule")
    capsule = ctypes.cast(address, ctypes.py_object).value  # a second reference
    _capsule(capsule)
    return capsule


def round_up_pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
