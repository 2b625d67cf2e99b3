"""transformers under kv8: logits as with eager attention, the cache through generate in all its ways.

SPDX-License-Identifier: Apache-2.0
"""

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kv8  # noqa: E402
import kv8.hf  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-gpt-oss"
COMMON = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def random_model(kind):
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**COMMON)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "mistral":
        config = transformers.MistralConfig(**COMMON, sliding_window=9)
        model = transformers.MistralForCausalLM(config)
    elif kind == "gemma":
        config = transformers.Gemma2Config(**COMMON, head_dim=256, sliding_window=8,
                                           attn_logit_softcapping=5.0, query_pre_attn_scalar=256)
        model = transformers.Gemma2ForCausalLM(config)
    elif kind == "qwen":
        config = transformers.Qwen3Config(**COMMON, head_dim=32)
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            **COMMON, head_dim=16, sliding_window=7, num_local_experts=4, num_experts_per_tok=2,
            rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        model = transformers.GptOssForCausalLM(config)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model.eval()


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma", "qwen", "gpt_oss"])
def model(request):
    return random_model(request.param)


def ids_of(*lens):
    torch.manual_seed(1)
    longest = max(lens)
    ids, mask = torch.zeros(len(lens), longest, dtype=torch.long), torch.zeros(len(lens), longest, dtype=torch.long)
    for row, n in enumerate(lens):
        ids[row, longest - n:] = torch.randint(2, 96, (n,))
        mask[row, longest - n:] = 1
    return ids, mask


@torch.no_grad()
def logits(model, implementation, *args, **kwargs):
    model.set_attn_implementation(implementation)
    return model(*args, **kwargs).logits


def near(a, b, mask=None, bound=1e-4):
    error = (a - b).abs().amax(-1)
    error = error if mask is None else error[mask.bool()]
    assert bool((error <= bound).all()), float(error.max())


def test_prefill_is_eager(model):
    ids, _ = ids_of(23)
    near(logits(model, "kv8", ids), logits(model, "eager", ids))
    near(logits(model, "kv8", ids, past_key_values=kv8.hf.Kv8Cache("f32")), logits(model, "eager", ids))


def test_padded_batches_and_decode_steps(model):
    ids, mask = ids_of(19, 5, 12)
    wanted = logits(model, "eager", ids, attention_mask=mask)
    near(logits(model, "kv8", ids, attention_mask=mask), wanted, mask)
    cache = kv8.hf.Kv8Cache("f32", page_size=4)
    for begin, end in ((0, 7), (7, 8), (8, 16), (16, 17), (17, 19)):
        part = logits(model, "kv8", ids[:, begin:end], attention_mask=mask[:, :end],
                      past_key_values=cache,
                      position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, begin:end])
        whole = logits(model, "eager", ids, attention_mask=mask,
                       position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        near(part, whole[:, begin:end], mask[:, begin:end])


def generate(model, implementation, ids, mask, **options):
    model.set_attn_implementation(implementation)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)


def test_generate_and_beams(model):
    ids, mask = ids_of(9, 17)
    wanted = generate(model, "eager", ids, mask)
    assert torch.equal(generate(model, "kv8", ids, mask), wanted)
    assert torch.equal(generate(model, "kv8", ids, mask, past_key_values=kv8.hf.Kv8Cache("f32")), wanted)
    fixed = kv8.hf.Kv8Cache("f32", max_cache_len=64, config=model.config)
    model.generation_config.disable_compile = True
    assert torch.equal(generate(model, "kv8", ids, mask, past_key_values=fixed), wanted)
    static = generate(model, "kv8", ids, mask, cache_implementation="static")
    assert torch.equal(static, wanted)
    beams = {"num_beams": 3}
    wanted = generate(model, "eager", ids, mask, **beams)
    assert torch.equal(generate(model, "kv8", ids, mask, past_key_values=kv8.hf.Kv8Cache("f32"), **beams), wanted)


def test_crop_goes_back(model):
    ids, _ = ids_of(20)
    cache = kv8.hf.Kv8Cache("e4m3")
    logits(model, "kv8", ids[:, :15], past_key_values=cache)
    first = logits(model, "kv8", ids[:, 15:], past_key_values=cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    assert torch.equal(logits(model, "kv8", ids[:, 15:], past_key_values=cache), first)


def test_assisted_generation():
    model = random_model("llama")
    ids, mask = ids_of(9)
    wanted = generate(model, "eager", ids, mask)
    got = generate(model, "kv8", ids, mask, past_key_values=kv8.hf.Kv8Cache("f32"),
                   prompt_lookup_num_tokens=3)
    assert torch.equal(got, wanted)


def test_compiled_steps_have_the_bits_of_eager_ones():
    model = random_model("llama")
    model.set_attn_implementation("kv8")
    ids, _ = ids_of(12)

    def run(call):
        cache = kv8.hf.Kv8Cache("e4m3", max_cache_len=32, config=model.config)
        with torch.no_grad():
            out = [model(ids[:, :10], past_key_values=cache).logits]
            for i in (10, 11):
                out.append(call(input_ids=ids[:, i: i + 1], past_key_values=cache).logits)
        return torch.cat(out, 1)

    eager = run(model)
    compiled = run(torch.compile(model, backend="aot_eager"))
    assert torch.equal(eager, compiled)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2", "int8", ("int8", "e4m3")])
def test_stored_formats_are_near(dtype):
    model = random_model("gpt_oss")
    ids, _ = ids_of(40)
    wanted = torch.log_softmax(logits(model, "eager", ids), -1)
    got = torch.log_softmax(logits(model, "kv8", ids, past_key_values=kv8.hf.Kv8Cache(dtype)), -1)
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean()
    assert 0 < float(kl) < 1e-3


def test_refusals():
    model = random_model("llama")
    ids, mask = ids_of(9)
    mask[0, 4] = 0
    with pytest.raises(NotImplementedError, match="holes"):
        logits(model, "kv8", ids, attention_mask=mask)
    model.set_attn_implementation("kv8")
    with pytest.raises(NotImplementedError, match="gradients"):
        model(ids)
    with pytest.raises(NotImplementedError, match="attention_mask is"), torch.no_grad():
        model(ids, attention_mask=torch.zeros(1, 1, 9, 9))
    model.set_attn_implementation("eager")
    with pytest.raises(Exception), torch.no_grad():
        model(ids, past_key_values=kv8.hf.Kv8Cache("e4m3"))


def test_the_model_that_ships_compare_and_calibrate(tmp_path):
    """KL as the model card has it, and scales that make it smaller or leave it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"))
    text = (MODEL / "held.txt").read_text()
    scales = kv8.hf.calibrate(model, tokenizer, text[:4000], window_len=256)
    scales.write(tmp_path / "scales.json")
    scales = kv8.ScaleFile.open(tmp_path / "scales.json", architecture="GptOssForCausalLM")
    settings = ["bf16", "e4m3", "int8", ("int8", "e4m3")]
    result = kv8.hf.compare(model, tokenizer, text, settings, num_windows=2, window_len=512)
    rows = {row.kv: row for row in result.rows}
    ids = kv8.Tokenizer(MODEL / "tokenizer.json").encode(text)
    own = {row.kv: row for row in kv8.Model(MODEL).compare(
        ids, ["bf16", "e4m3", "int8", "k=int8,v=e4m3"], num_windows=2, window_len=512)}
    assert rows["f32"].kl == 0 and rows["f32"].top1 == 1
    assert math.isclose(result.loss, own["f32"].loss, rel_tol=1e-3)
    for name in ("bf16", "e4m3", "int8", "k=int8,v=e4m3"):
        spread = max(0.1 * own[name].kl, 2 * own[name].kl_error)  # of 1024 positions
        assert abs(rows[name].kl - own[name].kl) <= spread, name
        assert rows[name].bytes_per_token == own[name].bytes_per_token
    fitted = kv8.hf.compare(model, tokenizer, text, ["e4m3"], scales=scales, num_windows=1, window_len=512)
    assert 0 < fitted.rows[1].kl < 2 * rows["e4m3"].kl
    assert "k=int8,v=e4m3" in str(result) and len(str(result).splitlines()) == 7
