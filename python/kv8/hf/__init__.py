"""transformers on kv8: attn_implementation="kv8", and a cache in 8 bits under any model.

    import kv8.hf
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kv8")
    model.generate(**inputs, past_key_values=kv8.hf.Kv8Cache("e4m3"))

compare() says what a format does to a model's predictions, calibrate() fits scales for it.

SPDX-License-Identifier: Apache-2.0
"""

from .cache import Kv8Cache
from .evaluate import Comparison, calibrate, compare
from .interface import register

register()

__all__ = ["Comparison", "Kv8Cache", "calibrate", "compare"]
