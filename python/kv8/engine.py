"""The engine: many requests through one model and cache, tokens as they come.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Optional

import numpy as np

from ._core import Error, Handle, check, struct, text, whole
from ._native import ffi, lib
from ._tensor import address_of, host_array, pointer
from .cache import Cache
from .model import Model

_FINISH = {
    int(getattr(lib, "KV8_FINISH_" + name.upper())): name
    for name in ("eos", "stop", "length", "failed")
}


class Event(NamedTuple):
    """What a step did for a request. token: -1 = none was drawn. finish: None (goes on), "eos",
    "stop" or "length". top: the likeliest (token, logprob), with num_logprobs."""

    request: int
    token: int
    finish: Optional[str]
    num_computed: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Engine(Handle):
    """Steps requests through a model. Iterating gives events until nothing is left to do."""

    _what = "engine"

    def __init__(
        self, model: Model, cache: Cache, *, max_requests: int = 0, step_tokens: int = 0
    ) -> None:
        options = struct(
            "kv8_engine_options",
            max_requests=whole(max_requests, "max_requests"),
            step_tokens=whole(step_tokens, "step_tokens"),
        )
        with model._held as weights, cache._held as pages:
            self._own(
                lib.kv8_engine_create,
                lib.kv8_engine_destroy,
                "kv8_engine",
                weights,
                pages,
                options,
                parents=(weights, pages),
            )
        self._borrowed = (model, cache)
        self._logprobs: dict[int, int] = {}

    def submit(
        self,
        token_ids: Any,
        max_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 0.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        bias: Optional[dict[int, float]] = None,
        seed: int = 0,
        stream: int = 0,
        stop_ids: Any = (),
        ignore_eos: bool = False,
        num_logprobs: int = 0,
    ) -> int:
        """Takes a request and gives its number. Greedy at temperature 0; an option at its default
        leaves its step out."""
        ids = host_array(token_ids, "token_ids", np.int32).reshape(-1)
        stops = host_array(list(stop_ids), "stop_ids", np.int32)
        given = bias or {}
        bias_ids = ffi.new("int32_t[]", list(given))
        biases = ffi.new("float[]", list(given.values()))
        sampling = struct(
            "kv8_sampling",
            bias_ids=bias_ids,
            bias=biases,
            num_bias=len(given),
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            temperature=temperature,
            top_k=whole(top_k, "top_k"),
            top_p=top_p,
            min_p=min_p,
            seed=whole(seed, "seed", 0, 2**64 - 1),
            stream=whole(stream, "stream", 0, 2**64 - 1),
        )
        request = struct(
            "kv8_request",
            token_ids=pointer(address_of(ids), "int32_t *"),
            num_tokens=ids.size,
            max_tokens=whole(max_tokens, "max_tokens"),
            sampling=sampling,
            stop_ids=pointer(address_of(stops), "int32_t *"),
            num_stop_ids=stops.size,
            ignore_eos=bool(ignore_eos),
            num_logprobs=whole(num_logprobs, "num_logprobs"),
        )
        number = ffi.new("uint64_t *")
        with self._held as engine:
            check(lib.kv8_engine_submit(engine, request, number))
        self._logprobs[number[0]] = num_logprobs
        return int(number[0])

    def cancel(self, request: int) -> None:
        """Ends a request; there is no event."""
        with self._held as engine:
            check(lib.kv8_engine_cancel(engine, whole(request, "request", 0, 2**64 - 1)))

    def step(self) -> list[Event]:
        """One step: its events; none when nothing is left to do."""
        model, cache = self._borrowed
        n = ffi.new("int32_t *")
        with self._held as engine, model._held, cache._held:
            check(lib.kv8_engine_step(engine, n))
            return [self._event(lib.kv8_engine_event(engine, i)) for i in range(n[0])]

    def _event(self, event: Any) -> Event:
        if event.finish == lib.KV8_FINISH_FAILED:
            raise Error(f"request {event.request}: {text(event.message)}")
        wanted = self._logprobs.get(event.request, 0)
        top: tuple[tuple[int, float], ...] = ()
        if wanted and event.token >= 0 and event.top:
            top = tuple((event.top[i].token, event.top[i].logprob) for i in range(wanted))
        finish = _FINISH.get(event.finish)
        if finish is not None:
            self._logprobs.pop(event.request, None)
        return Event(
            event.request,
            event.token,
            finish,
            event.num_computed,
            event.logprob if wanted else 0.0,
            top,
        )

    def __iter__(self) -> Iterator[Event]:
        while True:
            events = self.step()
            if not events:
                return
            yield from events
