"""What every module stands on: errors as exceptions, and objects of the library as Python objects.

An object of the library is freed when nothing refers to it any more, and then its parents may be:
a closed or collected object can be named by no call, and no order of closing frees memory that
another object still reads. One thread at a time uses an object; a second one is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Optional

from ._native import ffi, lib


class Error(Exception):
    """An error of kv8; its text is the library's sentence, which names the value and the limit."""


class InvalidError(Error, ValueError):
    """An argument, option or file content is wrong."""


class TypeMismatchError(Error, TypeError):
    """An argument is of a type, dtype or device that the call does not take."""


class UnsupportedError(Error, NotImplementedError):
    """Well formed, but no kernel here computes it."""


class NoMemoryError(Error, MemoryError):
    """The allocator said no."""


class FullError(Error, RuntimeError):
    """A pool (pages, sequences) has no room; nothing was changed."""


class NotFoundError(Error, LookupError):
    """A file, tensor, key, sequence or GPU does not exist."""


class FileError(Error, OSError):
    """The operating system refused a read or write."""


class CorruptError(Error, ValueError):
    """A file is torn, truncated or not what it claims to be."""


class DeviceError(Error, RuntimeError):
    """The GPU or its driver refused or failed."""


class CancelledError(Error, RuntimeError):
    """A callback asked to stop."""


class ClosedError(Error, RuntimeError):
    """The object was closed."""


class BusyError(Error, RuntimeError):
    """The object is in use by another thread, or was made by another process."""


_EXCEPTIONS: dict[int, type[Error]] = {
    lib.KV8_ERR_INVALID: InvalidError,
    lib.KV8_ERR_UNSUPPORTED: UnsupportedError,
    lib.KV8_ERR_NO_MEMORY: NoMemoryError,
    lib.KV8_ERR_FULL: FullError,
    lib.KV8_ERR_NOT_FOUND: NotFoundError,
    lib.KV8_ERR_IO: FileError,
    lib.KV8_ERR_CORRUPT: CorruptError,
    lib.KV8_ERR_DEVICE: DeviceError,
    lib.KV8_ERR_CANCELLED: CancelledError,
}


def check(status: int) -> None:
    """Raises what a call of the library returned, unless that is KV8_OK."""
    if status:
        message = ffi.string(lib.kv8_status_message()).decode("utf-8", "replace")
        raise _EXCEPTIONS[status](message)


def text(pointer: Any) -> Optional[str]:
    """A C string as str; None for NULL."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else None


def path_bytes(path: Any) -> bytes:
    """A path as the library reads it: to its first NUL, so it may hold none."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise InvalidError(f"the path {path!r} holds a NUL")
    return name


def utf8(value: Any, name: str) -> bytes:
    """The bytes of a str."""
    if not isinstance(value, str):
        raise TypeMismatchError(f"{name} is {value!r}, must be a str")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidError(f"{name} is no text: {error}") from None


def whole(value: Any, name: str, low: int = -(2**31), high: int = 2**31 - 1) -> int:
    """`value` as an int within [low, high]."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise TypeMismatchError(f"{name} is {value!r}, must be a whole number") from None
    if not low <= number <= high:
        raise InvalidError(f"{name} is {number}, must be {low} to {high}")
    return int(number)


def struct(name: str, **fields: Any) -> Any:
    """A new struct of the library by its KV8_..._INIT, with some fields set."""
    value = ffi.new(name + " *")
    getattr(lib, "kv8_py_init_" + name)(value)
    for field, entry in fields.items():
        setattr(value, field, entry)
    return value


def enum(prefix: str, name: str, what: str, members: tuple[str, ...]) -> int:
    """The value of `prefix`NAME, of the members that `what` has."""
    if name not in members:
        raise InvalidError(f'{what} is "{name}", must be one of {", ".join(members)}')
    return int(getattr(lib, prefix + name.upper()))


_process = os.getpid()  # asked once: some systems take a microsecond


class Held:
    """A pointer of the library while it is used: `with held as pointer`."""

    __slots__ = ("pointer", "what", "_lock", "_pid")

    def __init__(self, pointer: Any, what: str) -> None:
        self.pointer = pointer
        self.what = what
        self._lock = threading.Lock()
        self._pid = _process

    def __enter__(self) -> Any:
        pointer = self.pointer
        if pointer is None:
            raise ClosedError(f"the {self.what} is closed")
        if self._pid != _process:
            raise BusyError(f"the {self.what} was made by process {self._pid}, this is another")
        if not self._lock.acquire(False):
            raise BusyError(
                f"the {self.what} is in use: one thread at a time, and not in its own callback"
            )
        return pointer

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Handle:
    """An object of the library."""

    _what = "object"

    def _own(
        self,
        create: Callable[..., int],
        destroy: Callable[[Any], None],
        type_name: str,
        *arguments: Any,
        parents: tuple[Any, ...] = (),
    ) -> None:
        """Owns what create(out, *arguments) makes; `parents` stay alive until it is destroyed."""
        out = ffi.new(type_name + " **")
        check(create(out, *arguments))
        self._adopt(out[0], destroy, parents)

    def _adopt(
        self, pointer: Any, destroy: Callable[[Any], None], parents: tuple[Any, ...] = ()
    ) -> None:
        def release(dead: Any, kept: tuple[Any, ...] = parents) -> None:
            destroy(dead)

        self._held = Held(ffi.gc(pointer, release), self._what)

    @property
    def closed(self) -> bool:
        return self._held.pointer is None

    def close(self) -> None:
        """Frees the object as soon as nothing else reads from it. Twice is fine."""
        self._held.pointer = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Threads(Handle):
    """A pool of threads: `num_threads` with the calling one, 0 = as many as there are processors."""

    _what = "pool of threads"

    def __init__(self, num_threads: int = 0) -> None:
        self._own(
            lib.kv8_threads_create,
            lib.kv8_threads_destroy,
            "kv8_threads",
            whole(num_threads, "num_threads"),
        )

    def __len__(self) -> int:
        return int(lib.kv8_threads_count(pointer_of(self)))


def pointer_of(handle: Optional[Handle]) -> Any:
    """The pointer of an object that others borrow and that locks itself; NULL for None."""
    if handle is None:
        return ffi.NULL
    held = handle._held
    if held.pointer is None:
        raise ClosedError(f"the {held.what} is closed")
    if held._pid != _process:
        raise BusyError(f"the {held.what} was made by process {held._pid}, this is another")
    return held.pointer


_default_threads: Optional[Threads] = None
_default_lock = threading.Lock()


def default_threads() -> Threads:
    """The pool that objects made without one share: all processors of the process."""
    global _default_threads
    with _default_lock:
        if _default_threads is None:
            _default_threads = Threads()
        return _default_threads


def _after_fork() -> None:
    global _default_threads, _default_lock, _process
    _default_threads, _default_lock, _process = None, threading.Lock(), os.getpid()


os.register_at_fork(after_in_child=_after_fork)


class Callback:
    """Python code that the library calls back: what it raises ends the call and is raised there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.raised: Optional[BaseException] = None
        self.cookie = ffi.new_handle(self)

    def check(self, status: int) -> None:
        """As check(), but raises what the callback raised."""
        if self.raised is not None:
            raise self.raised
        check(status)


def _progress(cookie: Any, what: Any, done: int, total: int) -> int:
    callback: Callback = ffi.from_handle(cookie)
    try:
        return 1 if callback.function(text(what), done, total) else 0
    except BaseException as error:  # KeyboardInterrupt too: it is raised again by check()
        callback.raised = error
        return 1


ffi.def_extern(name="kv8_py_progress", error=1)(_progress)


def version() -> str:
    """The library's version."""
    return text(lib.kv8_version()) or ""


def machine_isa() -> str:
    """The instruction-set rung that kernels take on this machine: "avx512_bf16"."""
    isa = ffi.new("kv8_isa *")
    check(lib.kv8_machine_isa(isa))
    return text(lib.kv8_isa_name(isa[0])) or ""


ISAS = ("best", "scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16")


def isa_of(name: str) -> int:
    return enum("KV8_ISA_", name, "isa", ISAS)
