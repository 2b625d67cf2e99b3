"""check_lm_eval - lm_eval's local-completions, as released, against kv8 serve: its loglikelihoods are
those of kv8 score, asked for alone and beside other work. Run by scripts/check_clients.

SPDX-License-Identifier: Apache-2.0
"""
import contextlib
import json
import subprocess
import tempfile
import threading

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from serving import DEVICE, MODEL, PLACE, PROGRAM, Server


def score(ids):
    """The program's losses of ids[1:]."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(ids, file)
        file.flush()
        out = subprocess.run([PROGRAM, "score", MODEL, "--tokens", file.name, "--kv", "f32", *PLACE,
                              "--json"], capture_output=True, check=True).stdout
    return json.loads(out)["nll"]


@contextlib.contextmanager
def other_work(server):
    """Eight clients whose requests come and end all the time."""
    ended, answered = threading.Event(), []

    def work(index):
        while not ended.is_set():
            server.ask("/v1/completions", prompt=f"x{index} = {len(answered)}\n" * (1 + index),
                       max_tokens=8 + index, seed=index, ignore_eos=True)
            answered.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    assert len(answered) >= len(workers), answered


def compare(server):
    """(how many loglikelihoods, the furthest of them from the program's, a token)."""
    model = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{server.port}/v1/completions", model="tiny-gpt-oss",
        tokenizer_backend="huggingface", tokenizer=MODEL, num_concurrent=4, max_length=4096)
    with open(MODEL + "/held.txt", encoding="utf-8") as file:
        text = file.read(4000)
    pairs = [(text[at:at + 300], text[at + 300:at + 400]) for at in range(0, 3600, 400)]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    alone = model.loglikelihood(requests)
    with other_work(server):
        beside = model.loglikelihood(requests)
    assert DEVICE == "cpu" or beside == alone, (beside, alone)  # on the CPU but for last bits
    worst = 0
    for (context, continuation), *answers in zip(pairs, alone, beside):
        context_ids, continuation_ids = model._encode_pair(context, continuation)
        nll = score(context_ids + continuation_ids)[-len(continuation_ids):]
        worst = max(worst, *(abs(logprob + sum(nll)) / len(nll) for logprob, _ in answers))
    assert worst < 1e-4, worst
    words = model.generate_until([Instance(
        "generate_until", {}, ("def f(x):", {"until": ["\n"], "max_gen_toks": 16}), 0)])
    assert len(words) == 1 and "\n" not in words[0], words
    return len(pairs), worst


def main():
    server = Server()
    try:
        num, worst = compare(server)
    finally:
        status = server.stop()
    assert status == 0, status
    print(f"check_lm_eval: {DEVICE}: {num} loglikelihoods within {worst:.1e} a token of kv8 score, "
          "alone and beside other work")


main()
