"""CUDA GPUs and streams: the context is the one that torch and the CUDA runtime use.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from typing import Any, Optional

from ._core import Handle, check, pointer_of, text, whole
from ._native import ffi, lib


class Device(Handle):
    """A GPU, by the driver's number. NotFoundError says why there is none."""

    _what = "device"

    def __init__(self, index: int = 0) -> None:
        self._own(lib.kv8_device_open, lib.kv8_device_close, "kv8_device", whole(index, "index"))
        self.index = index

    @property
    def name(self) -> str:
        info = lib.kv8_device_get_info(pointer_of(self))
        return text(info.name) or ""

    @property
    def sm_version(self) -> int:
        """90 for Hopper."""
        return int(lib.kv8_device_get_info(pointer_of(self)).sm_version)


class Stream(Handle):
    """A stream of a device: one of its own, or by `cuda_stream` one made elsewhere (an address, as
    torch.cuda.Stream.cuda_stream; 0 is the default stream)."""

    _what = "stream"

    def __init__(self, device: Device, cuda_stream: Optional[int] = None) -> None:
        gpu = pointer_of(device)
        if cuda_stream is None:
            self._own(
                lib.kv8_stream_create, lib.kv8_stream_destroy, "kv8_stream", gpu, parents=(gpu,)
            )
        else:
            self._own(
                lib.kv8_stream_wrap,
                lib.kv8_stream_destroy,
                "kv8_stream",
                gpu,
                ffi.cast("void *", cuda_stream),
                parents=(gpu,),
            )
        self.device = device

    def synchronize(self) -> None:
        """Waits until all work of the stream is done."""
        check(lib.kv8_stream_synchronize(pointer_of(self)))


def device_count() -> int:
    """GPUs that the driver shows; NotFoundError says why there are none."""
    count = ffi.new("int32_t *")
    check(lib.kv8_device_count(count))
    return int(count[0])


def images_note() -> str:
    """Which GPUs this build has kernels for."""
    return text(lib.kv8_device_images_note()) or ""


_devices: dict[int, Device] = {}
_streams: dict[tuple[int, int], Stream] = {}
_lock = threading.Lock()


def device_of(index: int) -> Device:
    """The device of that number, opened once."""
    device = _devices.get(index)
    if device is None:
        with _lock:
            device = _devices.get(index) or Device(index)
            _devices[index] = device
    return device


def stream_of(index: int, cuda_stream: int) -> Stream:
    """A stream made elsewhere, wrapped once."""
    stream = _streams.get((index, cuda_stream))
    if stream is None:
        device = device_of(index)
        with _lock:
            stream = _streams.get((index, cuda_stream)) or Stream(device, cuda_stream)
            _streams[index, cuda_stream] = stream
    return stream


def torch_stream(index: int) -> Stream:
    """torch's current stream on a device."""
    address = _stream_address(index)
    stream = _streams.get((index, address))
    return stream_of(index, address) if stream is None else stream


def _stream_address(index: int) -> int:
    """The first call replaces itself by torch's accessor that makes no object, where torch has it."""
    global _stream_address
    import torch

    def address(index: int) -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    _stream_address = getattr(torch._C, "_cuda_getCurrentRawStream", address)
    return _stream_address(index)


def current_stream(index: int) -> Any:
    return pointer_of(torch_stream(index))
