"""kv8: 8-bit KV caches and attention over them, from numpy, torch and everything with DLPack.

    cache = kv8.Cache([kv8.CacheLayer("e4m3", "e4m3")], num_kv_heads=8, head_dim=64, num_pages=64,
                      max_seq_len=1024)
    seq = cache.sequence()
    seq.extend(len(k))
    cache.append(0, seq, k, v)
    o = kv8.attend(q, *cache.layer_kv(0), cache.page_table(0, seq), [0, len(q)])

Errors are exceptions under kv8.Error with the library's sentence.

SPDX-License-Identifier: Apache-2.0
"""

from ._core import (
    BusyError,
    CancelledError,
    ClosedError,
    CorruptError,
    DeviceError,
    Error,
    FileError,
    FullError,
    InvalidError,
    NoMemoryError,
    NotFoundError,
    Threads,
    TypeMismatchError,
    UnsupportedError,
    machine_isa,
    version,
)
from ._operands import pack_mask
from .attend import attend, last_kernel
from .attention import AttentionPlan
from .attention_batch import AttentionBatch
from .cache import Cache, CacheCounters, CacheLayer, CacheStats, Sequence
from .calibrate import Fit, ObservedHead, Observer, ScaleData, ScaleFile
from .device import Device, Stream, device_count, images_note
from .engine import Engine, Event
from .formats import (
    Narrowed,
    NarrowedInt8,
    dtype_max,
    dtype_size,
    mxfp4_narrow,
    mxfp4_widen,
    narrow,
    narrow_int8,
    widen,
)
from .merge import apply_sink, merge
from .model import CompareRow, Model, ModelInfo, Tokenizer
from .pages import Paged, PageTable
from .rope import Rope

__version__ = version()

__all__ = [name for name in dir() if not name.startswith("_")]
