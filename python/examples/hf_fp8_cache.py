"""An FP8 cache under a Hugging Face model, and what it costs: python hf_fp8_cache.py MODEL TEXT

SPDX-License-Identifier: Apache-2.0
"""

import sys

import kv8.hf
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

directory, text = sys.argv[1], open(sys.argv[2]).read()
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = PreTrainedTokenizerFast(tokenizer_file=directory + "/tokenizer.json")
model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="kv8").to(device).eval()
inputs = tokenizer(text[:400], return_tensors="pt", return_token_type_ids=False).to(device)
out = model.generate(
    **inputs, past_key_values=kv8.hf.Kv8Cache("e4m3"), max_new_tokens=32, do_sample=False
)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))
print(kv8.hf.compare(model, tokenizer, text, ["bf16", "e4m3", "int8"], num_windows=2))
