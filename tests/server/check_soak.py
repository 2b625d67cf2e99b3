"""check_soak [seconds [clients [model]]] - kv8 serve under requests of all kinds at once, some of which are
left amid their answers. Every answer is the one that the request got alone, as batch_invariant promises; of
random weights (random:gpt-oss-20b), which are served without it, every answer is complete. KV8_PROGRAM is
the program, KV8_DEVICE=cuda a GPU. Few pages, so that requests give theirs back and begin anew.

SPDX-License-Identifier: Apache-2.0
"""
import http.client
import json
import random
import sys
import threading
import time

from serving import DEVICE, MODEL, PATIENCE, PLACE, Server

NUM_ASKED = 120  # different requests
SHARED = 300     # tokens that prompts have in common, at most
LONGEST = 1200   # prompt and answer
SCHEMA = {"type": "object", "required": ["name", "size"], "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}}}


def sampling(chance):
    """Settings of a draw: a few of many, each with values at which something begins or ends."""
    every = {"temperature": (0, 0.7, 1, 1.5), "top_p": (0.5, 0.9, 0.999), "top_k": (1, 7, 50, 700),
             "min_p": (0.01, 0.2), "repetition_penalty": (0.8, 1.3), "frequency_penalty": (-0.5, 0.7),
             "presence_penalty": (0.5,), "logit_bias": ({"11": 3, "12": -100},), "min_tokens": (4,),
             "n": (2, 3), "stop": ("e",), "stop_token_ids": ([13, 14],)}
    body = {"seed": chance.randrange(1 << 31), "max_tokens": chance.choice((1, 2, 16, 40, 90)),
            "ignore_eos": chance.random() < 0.7}
    for name in chance.sample(sorted(every), chance.choice((0, 1, 2, 5))):
        body[name] = chance.choice(every[name])
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return body


def completion(chance, shared, vocab):
    kept = shared[:chance.choice((0, 15, 16, 100, SHARED))]
    own = [chance.randrange(20, vocab) for _ in range(chance.choice((1, 3, 17, 200, 700)))]
    body = dict(sampling(chance), prompt=kept + own)
    if chance.random() < 0.3:
        body["logprobs"] = chance.choice((0, 1, 5))
    if chance.random() < 0.1:
        body["prompt_logprobs"] = 2
    return "/v1/completions", body


def chat(chance):
    body = dict(sampling(chance), messages=[{"role": "user", "content": chance.choice(
        ("hello", "one two three", "what is a cache? " * 20))}])
    if chance.random() < 0.5:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body.update(max_tokens=60, ignore_eos=False, min_tokens=0)
    return "/v1/chat/completions", body


def requests(is_random, vocab):
    """(path, body) of every request."""
    chance = random.Random(1)
    shared = [chance.randrange(20, vocab) for _ in range(SHARED)]
    return [completion(chance, shared, vocab) if is_random or i % 4 < 3 else chat(chance)
            for i in range(NUM_ASKED)]


def ask(server, path, body):
    """The answer without what is another each time."""
    status, answer = server.post(path, body)
    if status != 200:
        raise AssertionError(f"{path}: {status} {answer}\n{json.dumps(body)[:2000]}")
    usage = answer["usage"]
    return answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]


def leave(server, path, body, seconds):
    """Asks for a stream and goes away amid it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        connection.request("POST", path, json.dumps(dict(body, stream=True)))
        time.sleep(seconds)
    finally:
        connection.close()


class Load:
    """Clients that ask for requests by chance until the time is over."""

    def __init__(self, server, asked, alone, seconds):
        self.server, self.asked, self.alone = server, asked, alone
        self.end = time.monotonic() + seconds
        self.num_answers = self.num_left = 0
        self.bad = []
        self.lock = threading.Lock()

    def judge(self, i, answer):
        if self.alone is not None:
            return None if answer == self.alone[i] else f"alone: {self.alone[i]}\namong others: {answer}"
        body, (choices, _, completion_tokens) = self.asked[i][1], answer
        ends_early = "stop" in body or "stop_token_ids" in body or not body["ignore_eos"]
        whole = len(choices) * body["max_tokens"]
        return None if ends_early or completion_tokens == whole else f"{completion_tokens} tokens of {whole}"

    def run(self, client):
        chance = random.Random(f"client {client}")
        while time.monotonic() < self.end and not self.bad:
            i = chance.randrange(len(self.asked))
            path, body = self.asked[i]
            try:
                if chance.random() < 0.15:
                    leave(self.server, path, body, chance.random() * 0.05)
                    with self.lock:
                        self.num_left += 1
                    continue
                wrong = self.judge(i, ask(self.server, path, body))
            except (OSError, http.client.HTTPException, AssertionError, ValueError) as error:
                wrong = repr(error)
            with self.lock:
                self.num_answers += 1
                if wrong:
                    self.bad.append(f"request {i}, {path} {json.dumps(body)[:2000]}\n{wrong}")


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    num_clients = int(sys.argv[2]) if len(sys.argv) > 2 else 48
    model = sys.argv[3] if len(sys.argv) > 3 else MODEL
    is_random = model.startswith("random:")
    place = ["--device", DEVICE] if is_random else PLACE
    memory = ["--kv-memory", "500MB"] if is_random else ["--kv-memory", "40MB", "--kv", "f32"]
    server = Server(options=[*memory, "--max-model-len", str(LONGEST), "--max-num-seqs", "40", "--threads", "2",
                             "--log", "none", *place], model=model)
    asked = requests(is_random, 4000)
    alone = None if is_random else [ask(server, path, body) for path, body in asked]
    load = Load(server, asked, alone, seconds)
    clients = [threading.Thread(target=load.run, args=(i,), daemon=True) for i in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(seconds + PATIENCE)
    hangs = sum(client.is_alive() for client in clients)
    rests = sum(server.metric(f"vllm:num_requests_{kind}") for kind in ("running", "waiting"))
    preemptions = server.metric("vllm:num_preemptions_total")
    status = server.stop()
    print(f"check_soak: {load.num_answers} answers and {load.num_left} left of {num_clients} clients, "
          f"{preemptions:.0f} preemptions: {len(load.bad)} wrong, {hangs} clients hang, {rests:.0f} requests rest, "
          f"the server ended with {status}")
    for bad in load.bad[:3]:
        print(bad, file=sys.stderr)
    return 1 if load.bad or hangs or rests or status != 0 or load.num_answers == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
