"""What a cache format does to any transformers model, and scales fitted to it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Sequence

import torch
from transformers.cache_utils import DynamicCache

from .._core import InvalidError
from ..calibrate import Observer, ScaleFile
from .cache import Kv8Cache


class Row(NamedTuple):
    """One setting beside the f32 cache: means over all positions and their standard errors."""

    kv: str
    kl: float
    kl_error: float
    top1: float
    top1_error: float
    dloss: float
    dloss_error: float
    bytes_per_token: float


@dataclass(frozen=True)
class Comparison:
    """Rows of compare(); the first 16-bit one is the noise floor. str() is a table."""

    rows: list[Row]
    loss: float
    num_windows: int
    window_len: int

    def __str__(self) -> str:
        width = max(8, *(len(row.kv) for row in self.rows))
        lines = [
            f"{self.num_windows} windows of {self.window_len} tokens; f32 KV is the reference, "
            f"its loss {self.loss:.4f} nats per token",
            f"{'kv':<{width}} {'KL nats':>10} {'+-':>8} {'top-1':>8} {'+-':>8} {'dloss':>9} {'+-':>8} "
            f"{'bytes/token':>12}",
        ]
        for row in self.rows:
            lines.append(
                f"{row.kv:<{width}} {row.kl:>10.3g} {row.kl_error:>8.1g} {row.top1:>8.4f} "
                f"{row.top1_error:>8.4f} {row.dloss:>+9.4f} {row.dloss_error:>8.4f} "
                f"{row.bytes_per_token:>12.0f}"
            )
        return "\n".join(lines)

    def plot(self, path: str) -> None:
        """KL over bytes per token with error bars, the noise floor dashed: needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        rows = [row for row in self.rows if row.kl > 0]
        for row in rows:
            axes.errorbar(row.bytes_per_token, row.kl, row.kl_error, fmt="o", capsize=3)
            axes.annotate(f" {row.kv}", (row.bytes_per_token, row.kl))
        floors = [row.kl for row in rows if row.kv in ("bf16", "f16")]
        if floors:
            axes.axhline(floors[0], linestyle="--", linewidth=1)
        axes.set(xlabel="cache bytes per token", ylabel="KL from f32 KV, nats per token")
        axes.set_yscale("log")
        figure.savefig(path)


def _windows(
    tokenizer: Any, text: str, num_windows: Optional[int], window_len: int
) -> torch.Tensor:
    """[windows, window_len] ids."""
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    room = ids.numel() // window_len
    if room == 0:
        raise InvalidError(f"the text has {ids.numel()} tokens, a window {window_len}")
    n = room if num_windows is None else num_windows
    if n > room:
        raise InvalidError(f"num_windows is {n}, the text has {room} of {window_len} tokens")
    return ids[: n * window_len].view(n, window_len)


class _Kv8Attention:
    """The model under attn_implementation="kv8" for a while."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.before = model.config._attn_implementation

    def __enter__(self) -> None:
        self.model.set_attn_implementation("kv8")

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self.before)


def _logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    ids = ids[None].to(model.device)
    return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].float()


@torch.no_grad()
def compare(
    model: Any,
    tokenizer: Any,
    text: str,
    kv: Sequence[Any] = ("bf16", "e4m3", "e5m2", "int8"),
    *,
    scales: Optional[ScaleFile] = None,
    num_windows: Optional[int] = None,
    window_len: int = 512,
) -> Comparison:
    """Runs windows of a text with every cache format of `kv` (as Kv8Cache takes them) and an f32
    cache, the model and its numbers otherwise the same; every position is teacher-forced."""
    windows = _windows(tokenizer, text, num_windows, window_len)
    sums: dict[str, list[torch.Tensor]] = {}
    size: dict[str, float] = {}
    losses = []
    with _Kv8Attention(model):
        for ids in windows:
            base = torch.log_softmax(_logits(model, ids, Kv8Cache("f32")), -1)
            target = ids[1:, None].to(base.device)
            loss = -base[:-1].gather(1, target)[:, 0]
            losses.append(loss)
            for setting in ("f32", *kv):
                name = setting if isinstance(setting, str) else _name(setting)
                cache = Kv8Cache(setting, scales)
                other = torch.log_softmax(_logits(model, ids, cache), -1)
                size[name] = _bytes_per_token(cache)
                kl = (base.exp() * (base - other)).sum(-1)
                same = (base.argmax(-1) == other.argmax(-1)).float()
                dloss = -other[:-1].gather(1, target)[:, 0] - loss
                found = sums.setdefault(name, [])
                found.append(torch.stack((kl[:-1], same[:-1], dloss)))
    rows = []
    for name, parts in sums.items():
        kl, same, dloss = torch.cat(parts, 1).double()
        hits, n = float(same.sum()) + 1, same.numel() + 2
        rows.append(
            Row(
                name,
                float(kl.mean()),
                _error(kl),
                float(same.mean()),
                math.sqrt(hits / n * (1 - hits / n) / n),
                float(dloss.mean()),
                _error(dloss),
                size[name],
            )
        )
    return Comparison(rows, float(torch.cat(losses).mean()), len(windows), window_len)


def _name(setting: Any) -> str:
    if isinstance(setting, tuple):
        return f"k={setting[0]},v={setting[1]}"
    return ",".join(sorted({x if isinstance(x, str) else _name(x) for x in setting}))


def _error(values: torch.Tensor) -> float:
    return float(values.std() / math.sqrt(values.numel()))


def _bytes_per_token(cache: Kv8Cache) -> float:
    held = 0.0
    for layer in cache.layers:
        for name in ("k_codes", "v_codes", "k_rows", "v_rows"):
            tensor = getattr(layer, name)
            if tensor is not None:
                held += tensor.numel() * tensor.element_size() / (layer.batch * layer.capacity)
    return held


class _ObservingCache(DynamicCache):
    """Counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.observer: Optional[Observer] = None
        self.num_layers = 0

    def update(self, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.observer is None:
            heads, dim = key.shape[1], key.shape[3]
            self.observer = Observer(self.num_layers, heads, dim, v_head_dim=value.shape[3])
        rows = [x.transpose(1, 2).flatten(0, 1).float().cpu() for x in (key, value)]
        self.observer.add(layer_idx, k=rows[0], v=rows[1])
        return super().update(key, value, layer_idx, *args, **kwargs)


@torch.no_grad()
def calibrate(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    num_windows: Optional[int] = None,
    window_len: int = 512,
    **fit: Any,
) -> ScaleFile:
    """Scales of K and V for every layer and head, fitted to what the model stores while it reads a
    text. Options are those of Observer.fit_all: dtype, method, margin, per_head, ..."""
    windows = _windows(tokenizer, text, num_windows, window_len)
    total: Optional[Observer] = None
    for ids in windows:
        cache = _ObservingCache()
        cache.num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        model(input_ids=ids[None].to(model.device), past_key_values=cache, use_cache=True)
        if cache.observer is None:
            raise InvalidError("the model stores nothing in a cache")
        if total is None:
            total = cache.observer
        else:
            total.merge(cache.observer)
    assert total is not None
    data = total.fit_all(**fit)
    data.num_tokens = windows.numel()
    architectures = getattr(model.config, "architectures", None)
    data.architecture = architectures[0] if architectures else type(model).__name__
    return ScaleFile(data)
