"""transformers under kv8 on a GPU: the shipped model against eager float32, its card's figures, random
models of other families, and compiled and captured steps. Skipped without torch, transformers or a GPU.

SPDX-License-Identifier: Apache-2.0
"""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import kv8  # noqa: E402
import kv8.hf  # noqa: E402
from test_hf import COMMON  # noqa: E402

if kv8.images_note().startswith("none"):
    pytest.skip("no CUDA kernels in this build", allow_module_level=True)

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-gpt-oss"
CLOSE = 0.05  # of two best logits: below it either may win


@pytest.fixture(scope="module")
def golden():
    from safetensors.numpy import load_file

    return load_file(MODEL / "golden.safetensors")


@pytest.fixture(scope="module")
def tiny():
    torch.backends.cuda.matmul.allow_tf32 = False
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model.eval().cuda()


@torch.no_grad()
def logits(model, implementation, ids, cache=None):
    model.set_attn_implementation(implementation)
    return model(ids, past_key_values=cache, use_cache=cache is not None).logits.float()


def texts(golden):
    """Every golden prompt with its continuation, and the window."""
    yield golden["window.ids"]
    for name in sorted(golden):
        if name.endswith(".prompt"):
            yield np.concatenate((golden[name], golden[name.replace(".prompt", ".greedy")]))


def test_top1_of_the_golden_prompts(tiny, golden):
    same = total = 0
    for row in texts(golden):
        ids = torch.as_tensor(row.astype(np.int64), device="cuda")[None]
        wanted = logits(tiny, "eager", ids)[0]
        got = logits(tiny, "kv8", ids, kv8.hf.Kv8Cache("bf16"))[0]
        equal = wanted.argmax(-1) == got.argmax(-1)
        best = wanted.topk(2).values
        assert bool((equal | (best[:, 0] - best[:, 1] <= CLOSE)).all())
        same, total = same + int(equal.sum()), total + equal.numel()
    assert same >= 0.995 * total, (same, total)


def test_kl_is_the_model_cards(tiny):
    """e4m3 at scale 1 over the card's windows: 4.26e-3."""
    ids = kv8.Tokenizer(MODEL / "tokenizer.json").encode((MODEL / "held.txt").read_text())
    kl = []
    for i in range(6):
        row = torch.as_tensor(np.asarray(ids[4096 * i: 4096 * (i + 1)]), device="cuda")[None]
        wanted = torch.log_softmax(logits(tiny, "eager", row)[0], -1)
        got = torch.log_softmax(logits(tiny, "kv8", row, kv8.hf.Kv8Cache("e4m3"))[0], -1)
        kl.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
    print(f"KL {np.mean(kl):.3e}")
    assert abs(np.mean(kl) - 4.26e-3) <= 0.1 * 4.26e-3


def random_model(kind):
    torch.manual_seed(0)
    if kind == "llama":
        shape = {**COMMON, "hidden_size": 512, "num_attention_heads": 8}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        config = transformers.Gemma2Config(**COMMON, head_dim=256, sliding_window=8,
                                           attn_logit_softcapping=5.0, query_pre_attn_scalar=256)
        model = transformers.Gemma2ForCausalLM(config)
    return model.eval().cuda()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_random_models_within_bf16_noise(kind):
    model = random_model(kind)
    ids = torch.randint(2, 96, (3, 70), device="cuda")
    exact = logits(model, "eager", ids)
    model = model.bfloat16()
    eager = logits(model, "eager", ids)
    noise = float((eager - exact).norm() / exact.norm())
    for cache in (None, kv8.hf.Kv8Cache("bf16")):
        got = logits(model, "kv8", ids, cache)
        assert float((got - exact).norm() / exact.norm()) <= 1.25 * noise
        rows = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert float(rows.max()) <= 2 * float(((eager - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def steps(model, call, ids, capture=False):
    """Logits of a prompt and of single tokens after it, over a cache of fixed length."""
    cache = kv8.hf.Kv8Cache("e4m3", max_cache_len=64, config=model.config)
    token = torch.zeros(2, 1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        if capture:
            state = [(x.k_codes.clone(), x.v_codes.clone(), x.cumulative_length.clone())
                     for x in cache.layers]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    call(input_ids=token, past_key_values=cache)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                static = call(input_ids=token, past_key_values=cache).logits
            for layer, (k, v, length) in zip(cache.layers, state):
                layer.k_codes.view(torch.uint8).copy_(k.view(torch.uint8))
                layer.v_codes.view(torch.uint8).copy_(v.view(torch.uint8))
                layer.cumulative_length.copy_(length)
        out = []
        for i in range(20, 30):
            token.copy_(ids[:, i: i + 1])
            if capture:
                graph.replay()
                out.append(static.clone())
            else:
                out.append(call(input_ids=token, past_key_values=cache).logits.clone())
    return torch.cat(out, 1)


def test_compiled_and_captured_steps_have_the_bits_of_eager_ones():
    model = random_model("llama").bfloat16()
    model.set_attn_implementation("kv8")
    ids = torch.randint(2, 96, (2, 40), device="cuda")
    eager = steps(model, model, ids)
    assert torch.equal(steps(model, torch.compile(model, backend="aot_eager"), ids), eager)
    assert torch.equal(steps(model, model, ids, capture=True), eager)
