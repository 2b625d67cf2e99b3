"""check_lm_eval - lm_eval's local-completions, as released, against kv8 serve: its loglikelihoods are
those of kv8 score. Run by scripts/check_clients.

SPDX-License-Identifier: Apache-2.0
"""
import json
import subprocess
import tempfile

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from serving import MODEL, PROGRAM, Server


def score(ids):
    """The program's losses of ids[1:]."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(ids, file)
        file.flush()
        out = subprocess.run([PROGRAM, "score", MODEL, "--tokens", file.name, "--kv", "f32",
                              "--json"], capture_output=True, check=True).stdout
    return json.loads(out)["nll"]


def main():
    server = Server()
    model = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{server.port}/v1/completions", model="tiny-gpt-oss",
        tokenizer_backend="huggingface", tokenizer=MODEL, num_concurrent=4, max_length=4096)
    with open(MODEL + "/held.txt", encoding="utf-8") as file:
        text = file.read(4000)
    pairs = [(text[at:at + 300], text[at + 300:at + 400]) for at in range(0, 3600, 400)]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    worst = 0
    for (context, continuation), (logprob, _) in zip(pairs, model.loglikelihood(requests)):
        context_ids, continuation_ids = model._encode_pair(context, continuation)
        nll = score(context_ids + continuation_ids)[-len(continuation_ids):]
        worst = max(worst, abs(logprob + sum(nll)) / len(nll))
    assert worst < 1e-4, worst
    words = model.generate_until([Instance(
        "generate_until", {}, ("def f(x):", {"until": ["\n"], "max_gen_toks": 16}), 0)])
    assert len(words) == 1 and "\n" not in words[0], words
    assert server.stop() == 0
    print(f"check_lm_eval: {len(pairs)} loglikelihoods within {worst:.1e} a token of kv8 score")


main()
