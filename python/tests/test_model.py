"""The model that ships, from Python: steps, scores, comparison, calibration, scale files, the engine.

SPDX-License-Identifier: Apache-2.0
"""

import json
from pathlib import Path

import numpy as np
import pytest

import kv8

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-gpt-oss"


@pytest.fixture(scope="module")
def model():
    return kv8.Model(MODEL, max_seq_len=1024)


@pytest.fixture(scope="module")
def tokenizer():
    return kv8.Tokenizer(MODEL / "tokenizer.json")


@pytest.fixture(scope="module")
def ids(tokenizer):
    return tokenizer.encode((MODEL / "held.txt").read_text()[:6000])


def test_text_and_back(tokenizer):
    string = "Grüße, 8 bits: <|end|>"
    assert tokenizer.decode(tokenizer.encode(string)) == string
    assert len(tokenizer.encode("<|end|>", special=True)) == 1
    with pytest.raises(kv8.InvalidError):
        tokenizer.decode([2**30])
    for wrong in (None, 5, b"bytes"):
        with pytest.raises(TypeError, match="string is .*, must be a str"):
            tokenizer.encode(wrong)
    with pytest.raises(kv8.InvalidError, match="string is no text"):
        tokenizer.encode("\ud800")


def test_a_path_is_read_whole():
    for opened in (kv8.Model, kv8.Tokenizer):
        with pytest.raises(kv8.InvalidError, match="holds a NUL"):
            opened("models/tiny-gpt-oss\0else")


def test_facts(model):
    config = json.loads((MODEL / "config.json").read_text())
    info = model.info
    assert info.num_layers == config["num_hidden_layers"]
    assert info.vocab_size == config["vocab_size"]
    assert info.architecture == "GptOssForCausalLM" and model.hash != 0
    with pytest.raises(kv8.NotFoundError):
        kv8.Model(MODEL / "absent")


def test_score_is_the_softmax_of_the_steps(model, ids):
    text = ids[:40]
    cache = model.cache("f32", max_seq_len=64)
    logits = model.step(cache, [cache.sequence()], text, logit_rows=np.arange(40)).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    nll = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(40), np.roll(text, -1)]
    assert np.abs(model.score(text, "f32") - nll[:-1]).max() < 1e-4


def test_compare_and_interrupt(model, ids):
    rows = model.compare(ids, ["bf16", "e4m3", "k=int8,v=e4m3"], num_windows=1, window_len=256)
    assert [row.kv for row in rows] == ["f32", "bf16", "e4m3", "k=int8,v=e4m3"]
    assert rows[0].kl == 0 and 0 < rows[1].kl < rows[3].kl < rows[2].kl
    assert rows[2].bytes_per_token * 4 == rows[0].bytes_per_token

    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.compare(ids, ["bf16"], window_len=256, progress=interrupt)
    with pytest.raises(kv8.CancelledError):
        model.score(ids[:100], progress=lambda *_: True)

    def reenter(what, done, total):
        model.score(ids[:2])

    with pytest.raises(kv8.BusyError, match="model is in use"):
        model.score(ids[:100], progress=reenter)


def test_calibration(model, ids, tmp_path):
    observer = model.observe(ids[:512], window_len=256)
    info = model.info
    head = observer.head("k", 0, 1)
    assert head.num_rows == 512 and head.histogram.sum() + head.zeros == head.num_values
    fit = observer.fit("k", 0, 1)
    assert fit.scale == np.float32(head.absmax / 448) and fit.clip_rate == 0
    data = observer.fit_all()
    data.architecture, data.model_hash, data.num_tokens = info.architecture, model.hash, 512
    assert data.scales.shape == (info.num_layers, 2 * info.num_kv_heads)
    assert data.scales[0, 1] == fit.scale
    kv8.ScaleFile(data).write(tmp_path / "scales.json")
    file = kv8.ScaleFile.open(tmp_path / "scales.json", num_kv_heads=info.num_kv_heads)
    assert (file.data.scales == data.scales).all() and file.data.method == "absmax"
    assert (file.layer(0)[0] == data.scales[0, : info.num_kv_heads]).all()
    with pytest.raises(kv8.InvalidError, match="num_head"):
        kv8.ScaleFile.open(tmp_path / "scales.json", num_kv_heads=info.num_kv_heads + 1)
    cache = model.cache("e4m3", max_seq_len=64, scales=file)
    seq = cache.sequence()
    assert (cache.scales(0, seq)[0][0] == file.layer(0)[0]).all()
    rows = model.compare(ids, ["e4m3"], window_len=256, scales=file)
    assert 0 < rows[1].kl < 0.05
    twice = model.observe(ids[:256], window_len=256)
    twice.merge(model.observe(ids[256:512], window_len=256))
    assert (twice.head("v", 1, 0).histogram == observer.head("v", 1, 0).histogram).all()


def test_engine(model, ids):
    prompts = [ids[:20], ids[100:160], ids[300:305]]
    alone = [list(model.generate(prompt, 12, "bf16", ignore_eos=True)) for prompt in prompts]
    cache = model.cache("bf16", max_seqs=3, max_seq_len=128)
    with kv8.Engine(model, cache) as engine:
        numbers = [engine.submit(p, 12, ignore_eos=True, num_logprobs=2) for p in prompts]
        together = {number: [] for number in numbers}
        for event in engine:
            if event.token >= 0:
                together[event.request].append(event.token)
                assert event.top[0] == (event.token, event.logprob) and len(event.top) == 2
        assert [together[number] for number in numbers] == alone
        one = engine.submit(ids[:8], 5, temperature=1.0, seed=7)
        drawn = [event.token for event in engine if event.token >= 0]
        again = engine.submit(ids[:8], 5, temperature=1.0, seed=7)
        assert drawn == [event.token for event in engine if event.token >= 0] and again == one + 1
        engine.submit(ids[:8], 100)
        engine.cancel(again + 1)
        assert engine.step() == []
        with pytest.raises(kv8.InvalidError):
            engine.submit([2**30])
    with pytest.raises(kv8.ClosedError):
        engine.step()


def test_an_engine_outlives_names_not_objects(ids):
    model = kv8.Model(MODEL, max_seq_len=64)
    cache = model.cache("e4m3", max_seq_len=64)
    engine = kv8.Engine(model, cache)
    engine.submit(ids[:5], 3, ignore_eos=True)
    cache.close()
    with pytest.raises(kv8.ClosedError, match="cache is closed"):
        engine.step()
    del model, cache
    engine.close()
