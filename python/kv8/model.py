"""Checkpoints: facts, steps, scores, what a cache format does to a model, text to tokens and back.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence, Union

import numpy as np

from ._core import (
    Callback,
    Handle,
    InvalidError,
    Threads,
    check,
    default_threads,
    isa_of,
    path_bytes,
    pointer_of,
    struct,
    text,
    utf8,
    whole,
)
from ._native import ffi, lib
from ._tensor import address_of, dtype_code, host_array, name_of_code, pointer
from .cache import Cache, CacheLayer
from .cache import Sequence as CacheSequence
from .calibrate import Observer, ScaleFile

Path = Union[str, "os.PathLike[str]"]
Progress = Callable[[str, int, int], Any]


class Tokenizer(Handle):
    """Byte-level BPE of a Hugging Face tokenizer.json; any number of threads may use it."""

    _what = "tokenizer"

    def __init__(self, path: Path) -> None:
        self._own(
            lib.kv8_tokenizer_open, lib.kv8_tokenizer_close, "kv8_tokenizer", path_bytes(path)
        )

    def __len__(self) -> int:
        return int(lib.kv8_tokenizer_vocab_size(pointer_of(self)))

    def encode(self, string: str, *, special: bool = False) -> Any:
        """Ids, int32 [n]. special: added tokens' texts become their ids, else they are text."""
        data = utf8(string, "string")
        ids, n = ffi.new("int32_t **"), ffi.new("size_t *")
        mode = lib.KV8_SPECIAL_AS_TOKENS if special else lib.KV8_SPECIAL_AS_TEXT
        check(lib.kv8_tokenizer_encode(pointer_of(self), data, len(data), mode, ids, n))
        array = np.frombuffer(ffi.buffer(ids[0], 4 * n[0]), np.int32).copy() if n[0] else None
        lib.kv8_free(ids[0])
        return np.empty(0, np.int32) if array is None else array

    def decode(self, ids: Any) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        tokenizer, n = pointer_of(self), ffi.new("size_t *")
        parts = []
        for token in host_array(ids, "ids", np.int32).reshape(-1).tolist():
            data = lib.kv8_tokenizer_token_bytes(tokenizer, token, n)
            if not data:
                raise InvalidError(f"id {token} has no token")
            parts.append(bytes(ffi.buffer(data, n[0])))
        return b"".join(parts).decode("utf-8", "replace")


class ModelInfo(NamedTuple):
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_token: int
    window_left: int
    max_seq_len: int
    num_full_layers: int
    num_sliding_layers: int
    num_tensors: int
    num_files: int
    num_parameters: int
    bytes: int
    bytes_per_decoded_token: int
    eos: tuple[int, ...]
    architecture: str


class CompareRow(NamedTuple):
    """What one setting does, beside an f32 cache; +-: the errors are standard errors. NaN: not run."""

    kv: str
    kl: float
    top1: float
    loss: float
    dloss: float
    kl_error: float
    top1_error: float
    dloss_error: float
    greedy_error: float
    recall_error: float
    greedy_match: float
    recall: float
    bytes_per_token: float
    tokens_per_s: float
    decode_tokens_per_s: float


def setting_of(kv: str) -> Any:
    """A KV setting by its name: "e4m3", "e4m3@full", "k=int8,v=e4m3"."""
    setting = ffi.new("kv8_kv_setting *")
    check(lib.kv8_kv_setting_parse(utf8(kv, "kv"), setting))
    return setting


class _Scales:
    """Arrays of pointers by layer, as the library takes scales."""

    def __init__(self, scales: Optional[ScaleFile]) -> None:
        self.k = self.v = ffi.NULL
        self.dtype = 0
        if scales is None:
            return
        data = scales.data
        self.dtype = dtype_code(data.dtype)
        rows = [scales.layer(layer) for layer in range(data.num_layers)]
        self.rows = rows
        self.k = ffi.new("float *[]", [pointer(address_of(k), "float *") for k, _ in rows])
        self.v = ffi.new("float *[]", [pointer(address_of(v), "float *") for _, v in rows])


class Model(Handle):
    """A checkpoint directory: config.json and safetensors, mapped and not read."""

    _what = "model"

    def __init__(
        self,
        directory: Path,
        *,
        max_step_tokens: int = 0,
        max_step_seqs: int = 0,
        max_seq_len: int = 0,
        batch_invariant: bool = True,
        without_sinks: bool = False,
        without_window: bool = False,
        isa: str = "best",
        threads: Optional[Threads] = None,
    ) -> None:
        pool = pointer_of(threads or default_threads())
        options = struct(
            "kv8_model_options",
            threads=pool,
            isa=isa_of(isa),
            max_step_tokens=whole(max_step_tokens, "max_step_tokens"),
            max_step_seqs=whole(max_step_seqs, "max_step_seqs"),
            max_seq_len=whole(max_seq_len, "max_seq_len"),
            batch_invariant=1 if batch_invariant else -1,
            without_sinks=bool(without_sinks),
            without_window=bool(without_window),
        )
        self._own(
            lib.kv8_model_open,
            lib.kv8_model_close,
            "kv8_model",
            path_bytes(directory),
            options,
            parents=(pool,),
        )
        self.directory = directory

    @property
    def info(self) -> ModelInfo:
        info = struct("kv8_model_info")
        with self._held as model:
            check(lib.kv8_model_get_info(model, info))
        numbers = [int(getattr(info, name)) for name in ModelInfo._fields[:18]]
        eos = tuple(info.eos[i] for i in range(info.num_eos))
        return ModelInfo._make([*numbers, eos, text(info.architecture) or ""])

    @property
    def hash(self) -> int:
        """Tells checkpoints apart; scale files hold it."""
        with self._held as model:
            return int(lib.kv8_model_hash(model))

    def cache(
        self,
        kv: str = "e4m3",
        *,
        max_seqs: int = 1,
        max_seq_len: int,
        num_tokens: int = 0,
        scales: Optional[ScaleFile] = None,
    ) -> Cache:
        """A cache for this model that stores as `kv` says: room for max_seqs sequences of up to
        max_seq_len tokens, num_tokens in all (0 = all of them full)."""
        table = _Scales(scales)
        options = struct(
            "kv8_kv_cache_options",
            max_seqs=whole(max_seqs, "max_seqs"),
            max_seq_len=whole(max_seq_len, "max_seq_len"),
            num_tokens=whole(num_tokens, "num_tokens", 0, 2**62),
            k_scale=table.k,
            v_scale=table.v,
            scale_dtype=table.dtype,
        )
        setting, info = setting_of(kv), self.info
        cache = _ModelCache.__new__(_ModelCache)
        with self._held as model:
            cache._own(
                lib.kv8_kv_setting_cache_create,
                lib.kv8_cache_destroy,
                "kv8_cache",
                model,
                setting,
                options,
                parents=(model,),
            )
            windows = [lib.kv8_model_layer_window(model, i) for i in range(info.num_layers)]
        cache._of_model(info, setting, windows, max_seq_len)
        return cache

    def step(
        self,
        cache: Cache,
        seqs: Sequence[CacheSequence],
        token_ids: Any,
        indptr: Any = None,
        logit_rows: Any = None,
    ) -> Any:
        """Appends tokens [rows] to sequences of `cache` (sequence i takes indptr[i]:indptr[i+1]) and
        gives the logits of logit_rows, float32 [n, vocab_size]; None = each sequence's last row."""
        ids = host_array(token_ids, "token_ids", np.int32)
        bounds = host_array([0, ids.size] if indptr is None else indptr, "indptr", np.int32)
        handles = cache._seqs(seqs)
        if bounds.shape != (len(handles) + 1,) or int(bounds.max()) > ids.size:
            raise InvalidError(
                f"indptr is {bounds.tolist()}, must have {len(handles) + 1} entries up to {ids.size}"
            )
        wanted = bounds[1:] - 1 if logit_rows is None else logit_rows
        rows = host_array(wanted, "logit_rows", np.int32)
        if rows.size > ids.size:
            raise InvalidError(f"logit_rows has {rows.size} rows, there are {ids.size}")
        logits = np.empty((rows.size, self.info.vocab_size), np.float32)
        seq_ids = ffi.new("kv8_seq[]", handles)
        step = struct(
            "kv8_step",
            num_seqs=len(handles),
            seqs=seq_ids,
            indptr=_ints(bounds),
            token_ids=_ints(ids),
            num_logit_rows=rows.size,
            logit_rows=_ints(rows),
            logits_out=pointer(address_of(logits), "float *"),
        )
        with self._held as model, cache._held as pages:
            check(lib.kv8_model_step(model, pages, step))
        return logits

    def score(
        self, token_ids: Any, kv: str = "e4m3", *, progress: Optional[Progress] = None
    ) -> Any:
        """Nats of each token but the first, given those before it: float32 [n - 1]."""
        ids = host_array(token_ids, "token_ids", np.int32)
        out, setting, call = (
            np.empty(max(ids.size - 1, 0), np.float32),
            setting_of(kv),
            _call(progress),
        )
        options = struct("kv8_score_options", **call.fields)
        with self._held as model:
            status = lib.kv8_evaluate_score(
                model, setting, _ints(ids), ids.size, options, pointer(address_of(out), "float *")
            )
            call.callback.check(status)
        return out

    def compare(
        self,
        token_ids: Any,
        kv: Sequence[str] = ("bf16", "e4m3", "int8"),
        *,
        num_windows: int = 1,
        window_len: int = 1024,
        scales: Optional[ScaleFile] = None,
        num_greedy: int = 0,
        greedy_len: int = 64,
        num_recall: int = 0,
        tokenizer: Optional[Tokenizer] = None,
        progress: Optional[Progress] = None,
    ) -> list[CompareRow]:
        """What each setting does to the model's predictions of a text, beside an f32 cache (row 0);
        bf16 is the noise floor."""
        ids, table, call = (
            host_array(token_ids, "token_ids", np.int32),
            _Scales(scales),
            _call(progress),
        )
        settings = ffi.new("kv8_kv_setting[]", [setting_of(name)[0] for name in kv])
        rows = ffi.new("kv8_compare_row[]", len(kv) + 1)
        rows[0].struct_size = ffi.sizeof("kv8_compare_row")
        options = struct(
            "kv8_compare_options",
            tokenizer=pointer_of(tokenizer),
            token_ids=_ints(ids),
            num_tokens=ids.size,
            num_windows=whole(num_windows, "num_windows"),
            window_len=whole(window_len, "window_len"),
            k_scale=table.k,
            v_scale=table.v,
            scale_dtype=table.dtype,
            num_greedy=whole(num_greedy, "num_greedy"),
            greedy_len=whole(greedy_len, "greedy_len"),
            num_recall=whole(num_recall, "num_recall"),
            **call.fields,
        )
        with self._held as model:
            call.callback.check(lib.kv8_evaluate_compare(model, settings, len(kv), options, rows))
        return [
            CompareRow(text(row.kv) or "", *(getattr(row, name) for name in CompareRow._fields[1:]))
            for row in rows
        ]

    def observe(
        self, token_ids: Any, *, window_len: int = 1024, progress: Optional[Progress] = None
    ) -> Observer:
        """Runs a text past the layers and counts K and V: Observer.fit_all gives scales."""
        info = self.info
        observer = Observer(info.num_layers, info.num_kv_heads, info.head_dim)
        ids, call = host_array(token_ids, "token_ids", np.int32), _call(progress)
        options = struct(
            "kv8_observe_text_options",
            token_ids=_ints(ids),
            num_tokens=ids.size,
            window_len=whole(window_len, "window_len"),
            **call.fields,
        )
        with self._held as model, observer._held as counts:
            call.callback.check(lib.kv8_evaluate_observe(model, counts, options))
        return observer

    def generate(
        self, token_ids: Any, max_tokens: int = 64, kv: str = "e4m3", **sampling: Any
    ) -> Iterator[int]:
        """Tokens after token_ids, as they are drawn: greedy, or as the options of Engine.submit say."""
        from .engine import Engine

        ids = host_array(token_ids, "token_ids", np.int32)
        cache = self.cache(kv, max_seq_len=ids.size + max_tokens)
        with Engine(self, cache) as engine:
            engine.submit(ids, max_tokens=max_tokens, **sampling)
            for event in engine:
                if event.token >= 0:
                    yield event.token


class _ModelCache(Cache):
    """A cache whose options the library chose."""

    def _of_model(
        self, info: ModelInfo, setting: Any, windows: list[int], max_seq_len: int
    ) -> None:
        self.num_kv_heads, self.head_dim, self.v_head_dim = (
            info.num_kv_heads,
            info.head_dim,
            info.head_dim,
        )
        self.layers = tuple(
            CacheLayer(
                name_of_code(setting.full_k if window < 0 else setting.sliding_k),
                name_of_code(setting.full_v if window < 0 else setting.sliding_v),
                window,
            )
            for window in windows
        )
        self.max_seq_len, self.device = max_seq_len, (1, 0)
        self.page_size = self.num_pages = 0

    def layer_kv(self, layer: int) -> Any:
        raise InvalidError("the pages of a model's cache are its own: use read() of a sequence")

    def page_table(self, layer: int, seqs: Any) -> Any:
        raise InvalidError("the pages of a model's cache are its own: use read() of a sequence")

    block_table = page_table


class _call:
    """A progress callback for the options of a long call; Ctrl-C ends the call."""

    def __init__(self, progress: Optional[Progress]) -> None:
        self.callback = Callback(progress or (lambda what, done, total: None))
        self.fields = {"progress": lib.kv8_py_progress, "progress_cookie": self.callback.cookie}


def _ints(array: Any) -> Any:
    return pointer(address_of(array), "int32_t *")
