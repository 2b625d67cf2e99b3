"""test_completions - /v1/completions on the model that ships: every field that changes an answer,
against the program's own verbs where they compute the same.

SPDX-License-Identifier: Apache-2.0
"""
import concurrent.futures
import json
import subprocess
import tempfile
import time
import unittest

from serving import DEVICE, MODEL, PLACE, PROGRAM, ServerTest

PATH = "/v1/completions"
PROMPT = "def f(x):\n    return"


def text_of(events):
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def held_text(length):
    with open(MODEL + "/held.txt", encoding="utf-8") as file:
        return file.read(length)


class Completions(ServerTest):
    def test_greedy_equals_the_program(self):
        answer = self.server.ask(PATH, prompt=PROMPT, temperature=0, max_tokens=40)
        out = subprocess.run([PROGRAM, "generate", MODEL, "--prompt", PROMPT, "--max-tokens", "40",
                              "--kv", "f32", *PLACE, "--json"], capture_output=True, check=True).stdout
        self.assertEqual(answer["choices"][0]["text"], json.loads(out)["text"])
        self.assertEqual(answer["object"], "text_completion")
        self.assertEqual(answer["model"], "tiny-gpt-oss")
        self.assertTrue(answer["id"].startswith("cmpl-"))

    def test_sixteen_tokens_unless_asked(self):
        answer = self.server.ask(PATH, prompt=PROMPT, ignore_eos=True)
        self.assertEqual(answer["usage"]["completion_tokens"], 16)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")

    def test_stream_is_the_whole(self):
        for extra in ({}, {"stop": [" x", "\n\n"]}, {"seed": 7, "temperature": 1.5},
                      {"echo": True}, {"logprobs": 2}):
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 48, **extra}
            whole = self.server.ask(PATH, **body)
            events = self.server.events(PATH, **body, stream_options={"include_usage": True})
            choice = whole["choices"][0]
            self.assertEqual(text_of(events), choice["text"], extra)
            self.assertEqual(events[-1]["choices"], [])
            same = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.assertEqual([events[-1]["usage"][k] for k in same],
                             [whole["usage"][k] for k in same])
            self.assertNotIn("usage", events[0])
            self.assertEqual([e["choices"][0]["finish_reason"] for e in events[:-1]][-1],
                             choice["finish_reason"])
            for event in events[:-2]:
                self.assertIsNone(event["choices"][0]["finish_reason"])
            if "logprobs" in extra:
                for key in ("tokens", "token_logprobs", "text_offset"):
                    joined = sum((e["choices"][0]["logprobs"][key] for e in events[:-1]), [])
                    self.assertEqual(joined, choice["logprobs"][key])

    def test_one_event_a_token(self):
        events = self.server.events(PATH, prompt=PROMPT, temperature=0, max_tokens=12,
                                    return_token_ids=True,
                                    stream_options={"include_usage": True,
                                                    "continuous_usage_stats": True})
        self.assertEqual([len(e["choices"][0]["token_ids"]) for e in events[:-1]], [1] * 12)
        self.assertEqual([e["usage"]["completion_tokens"] for e in events[:-1]],
                         list(range(1, 13)))
        tokens = self.server.ask("/tokenize", prompt=PROMPT)["tokens"]
        self.assertEqual(events[0]["prompt_token_ids"], tokens)
        self.assertNotIn("prompt_token_ids", events[1])

    def test_stop_strings(self):
        whole = self.server.ask(PATH, prompt=PROMPT, temperature=0, max_tokens=60)
        text = whole["choices"][0]["text"]
        for stop in (text[5:7], text[3:14], text[20:21], text[11:30]):  # within, across tokens
            at = text.index(stop)
            for stream in (False, True):
                body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "stop": stop}
                if stream:
                    events = self.server.events(PATH, **body)
                    got, choice = text_of(events), events[-1]["choices"][0]
                else:
                    choice = self.server.ask(PATH, **body)["choices"][0]
                    got = choice["text"]
                self.assertEqual(got, text[:at], (stop, stream))
                self.assertEqual(choice["finish_reason"], "stop")
                self.assertEqual(choice["stop_reason"], stop)
            kept = self.server.ask(PATH, **body, include_stop_str_in_output=True)
            self.assertEqual(kept["choices"][0]["text"], text[:at] + stop)
        # What only begins like one comes through, at the end too.
        answer = self.server.ask(PATH, prompt=PROMPT, temperature=0, max_tokens=60,
                                 stop=[text[-3:] + "never", "\x00"[:0] + "nowhere"])
        self.assertEqual(answer["choices"][0]["text"], text)

    def test_stop_ids_and_min_tokens(self):
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
        ids = self.server.ask(PATH, **body)["choices"][0]["token_ids"]
        choice = self.server.ask(PATH, **body, stop_token_ids=[ids[4]])["choices"][0]
        end = ids.index(ids[4])
        self.assertEqual(choice["token_ids"], ids[:end + 1])
        self.assertEqual((choice["finish_reason"], choice["stop_reason"]), ("stop", ids[4]))
        longer = self.server.ask(PATH, **body, stop_token_ids=[ids[0]], min_tokens=9)
        self.assertGreaterEqual(longer["usage"]["completion_tokens"], 9)

    def test_seeds(self):
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.2}
        first = self.server.ask(PATH, **body, seed=1)["choices"][0]["text"]
        self.assertEqual(self.server.ask(PATH, **body, seed=1)["choices"][0]["text"], first)
        self.assertNotEqual(self.server.ask(PATH, **body, seed=2)["choices"][0]["text"], first)
        unseeded = {self.server.ask(PATH, **body)["choices"][0]["text"] for _ in range(4)}
        self.assertGreater(len(unseeded), 1)

    def test_many_choices(self):
        answer = self.server.ask(PATH, prompt=PROMPT, n=3, seed=5, temperature=1.5, max_tokens=16)
        self.assertEqual([c["index"] for c in answer["choices"]], [0, 1, 2])
        self.assertEqual(len({c["text"] for c in answer["choices"]}), 3)
        self.assertEqual(answer["usage"]["completion_tokens"], 48)
        events = self.server.events(PATH, prompt=PROMPT, n=3, seed=5, temperature=1.5,
                                    max_tokens=16)
        for choice in answer["choices"]:
            text = "".join(e["choices"][0]["text"] for e in events
                           if e["choices"][0]["index"] == choice["index"])
            self.assertEqual(text, choice["text"])

    def test_batches(self):
        prompts = ["import os", "class A:", "x = ["]
        ids = [self.server.ask("/tokenize", prompt=p)["tokens"] for p in prompts]
        alone = [self.server.ask(PATH, prompt=p, temperature=0)["choices"][0]["text"]
                 for p in prompts]
        for batch in (prompts, ids):
            answer = self.server.ask(PATH, prompt=batch, temperature=0)
            self.assertEqual([c["text"] for c in answer["choices"]], alone)
            self.assertEqual(answer["usage"]["prompt_tokens"], sum(map(len, ids)))
        self.assertEqual(self.server.ask(PATH, prompt=ids[0], temperature=0)["choices"][0]["text"],
                         alone[0])

    def test_many_at_once(self):
        """64 streams at temperature 0 give, each, the tokens that it gives alone."""
        def ask(i):
            events = self.server.events(PATH, prompt=f"x{i} = {i}\ny = ", temperature=0,
                                        return_token_ids=True)
            return [id for e in events for choice in e["choices"] for id in choice["token_ids"]]
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            together = list(pool.map(ask, range(64)))
        self.assertEqual(together, [ask(i) for i in range(64)])

    def test_logit_bias(self):
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
        ids = self.server.ask(PATH, **body)["choices"][0]["token_ids"]
        never = self.server.ask(PATH, **body, logit_bias={str(ids[0]): -100})
        self.assertNotIn(ids[0], never["choices"][0]["token_ids"])
        always = self.server.ask(PATH, **body, logit_bias={"17": 100})
        self.assertEqual(always["choices"][0]["token_ids"], [17] * 6)

    def test_logprobs_equal_score(self):
        text = held_text(900)
        ids = self.server.ask("/tokenize", prompt=text)["tokens"]
        answer = self.server.ask(PATH, prompt=ids, echo=True, logprobs=1, max_tokens=1,
                                 temperature=0)
        logprobs = answer["choices"][0]["logprobs"]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(ids, file)
            file.flush()
            out = subprocess.run([PROGRAM, "score", MODEL, "--tokens", file.name, "--kv", "f32",
                                  *PLACE, "--json"], capture_output=True, check=True).stdout
        nll = json.loads(out)["nll"]
        self.assertEqual(len(logprobs["token_logprobs"]), len(ids) + 1)
        self.assertIsNone(logprobs["token_logprobs"][0])
        for got, wanted in zip(logprobs["token_logprobs"][1:], nll):
            self.assertLess(abs(got + wanted), 1e-4)
        self.assertEqual("".join(logprobs["tokens"][:-1]), text)
        self.assertTrue(answer["choices"][0]["text"].startswith(text))
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
            self.assertEqual(answer["choices"][0]["text"][offset:offset + len(token)], token)
        for logprob, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:]):
            self.assertGreaterEqual(max(top.values()), logprob)

    def test_scoring_alone(self):
        answer = self.server.ask(PATH, prompt="x = 1", echo=True, logprobs=0, max_tokens=0,
                                 return_token_ids=True)
        self.assertEqual(answer["choices"][0]["token_ids"], [])
        choice = answer["choices"][0]
        self.assertEqual(choice["text"], "x = 1")
        self.assertEqual(answer["usage"]["completion_tokens"], 0)
        self.assertEqual(len(choice["logprobs"]["tokens"]), answer["usage"]["prompt_tokens"])
        named = self.server.ask(PATH, prompt=PROMPT, logprobs=2, max_tokens=4, temperature=0,
                                return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
        self.assertEqual(named["logprobs"]["tokens"], [f"token_id:{i}" for i in named["token_ids"]])
        for top, token in zip(named["logprobs"]["top_logprobs"], named["logprobs"]["tokens"]):
            self.assertEqual(max(top, key=top.get), token)
        listed = self.server.ask(PATH, prompt="x = 1", prompt_logprobs=2, max_tokens=1)
        entries = listed["choices"][0]["prompt_logprobs"]
        self.assertIsNone(entries[0])
        for entry, logprob in zip(entries[1:], choice["logprobs"]["token_logprobs"][1:]):
            self.assertIn(len(entry), (2, 3))
            self.assertTrue(any(abs(item["logprob"] - logprob) < 1e-4 for item in entry.values()))

    def test_prefixes_are_found_again(self):
        text = held_text(9000)[3000:]
        first = self.server.ask(PATH, prompt=text, temperature=0)
        again = self.server.ask(PATH, prompt=text, temperature=0)
        other = self.server.ask(PATH, prompt=text, temperature=0, cache_salt="somebody else")
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"]
                  for a in (first, again, other)]
        self.assertEqual((cached[0], cached[2]), (0, 0))
        self.assertGreater(cached[1], 0.9 * first["usage"]["prompt_tokens"])
        self.assertEqual({a["choices"][0]["text"] for a in (first, again, other)},
                         {first["choices"][0]["text"]})

    @unittest.skipIf(DEVICE != "cpu", "a GPU computes this model's prompts as soon as it finds them")
    def test_a_prompt_found_waits_a_tenth(self):
        """4096 tokens again: found in the cache, the first token after a tenth of the time at most."""
        tokens = self.server.ask("/tokenize", prompt=held_text(20000))["tokens"][:4096]
        self.assertEqual(len(tokens), 4096)
        seconds = []
        for cached in (0, 4095, 4095, 4095):
            began = time.monotonic()
            answer = self.server.ask(PATH, prompt=tokens, max_tokens=1, temperature=0, cache_salt="twice")
            seconds.append(time.monotonic() - began)
            self.assertEqual(answer["usage"]["prompt_tokens_details"]["cached_tokens"], cached)
        self.assertLess(min(seconds[1:]), 0.1 * seconds[0])

    def test_characters_come_whole(self):
        ids = self.server.ask("/tokenize", prompt="→ é 漢 🙂")["tokens"]
        self.assertEqual(self.server.ask("/detokenize", tokens=ids)["prompt"], "→ é 漢 🙂")
        bias = {str(i): 100 for i in set(ids)}
        for seed in range(3):
            body = dict(prompt="é", logit_bias=bias, max_tokens=40, seed=seed, ignore_eos=True)
            whole = self.server.ask(PATH, **body)["choices"][0]["text"]
            self.assertEqual(text_of(self.server.events(PATH, **body)), whole)

    def test_nulls_and_strangers_pass(self):
        self.server.ask(PATH, prompt="x", max_tokens=1, logprobs=None, stop=None, seed=None,
                        stream=None, stream_options=None, name=None, n=None, user="me", bad_words=[],
                        allowed_token_ids=None, truncate_prompt_tokens=None, logits_processors=[],
                        something_new={"a": 1})

    def test_bench_serve(self):
        """The requests of `vllm bench serve`, openai and openai-chat, read as it reads them."""
        model = self.server.ask_for("/v1/models")["data"][0]
        self.assertIn("root", model)
        common = {"model": model["root"], "repetition_penalty": 1.0, "stream": True,
                  "stream_options": {"include_usage": True}, "ignore_eos": True}
        text = held_text(400)
        for path, body in (
                (PATH, dict(common, prompt=text, max_tokens=12, logprobs=None)),
                ("/v1/chat/completions", dict(common, max_completion_tokens=12, messages=[
                    {"role": "user", "content": [{"type": "text", "text": text}]}]))):
            status, _, data = self.server.request("POST", path, body, {
                "Content-Type": "application/json", "Authorization": "Bearer ",
                "x-request-id": "benchmark-serving-0"})
            self.assertEqual(status, 200, data)
            pieces = [piece.removeprefix("data: ") for piece in data.decode().split("\n\n") if piece]
            self.assertEqual(pieces.pop(), "[DONE]")
            chunks = [json.loads(piece) for piece in pieces]
            usages = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
            self.assertEqual([usage["completion_tokens"] for usage in usages], [12])
            timed = [chunk for chunk in chunks if chunk["choices"]]
            self.assertLessEqual(len(timed), 14)
            self.assertTrue(all("text" in c["choices"][0] or "delta" in c["choices"][0]
                                for c in timed))

    def test_refusals(self):
        good = {"prompt": "x", "max_tokens": 1}
        for field, value in (
                ("temperature", "hot"), ("temperature", -1), ("top_p", 0), ("top_p", 1.5),
                ("top_k", -2), ("min_p", 2), ("n", 0), ("n", 2.5), ("n", 100000),
                ("max_tokens", -1), ("max_tokens", 1 << 40), ("stop", 5), ("stop", [""]),
                ("stop", ["a"] * 65), ("stream", "yes"), ("seed", "x"), ("logprobs", 21),
                ("logprobs", True), ("echo", 1), ("stop_token_ids", [5000]),
                ("stop_token_ids", ["a"]), ("logit_bias", {"x": 1}), ("logit_bias", {"9999": 1}),
                ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
                ("prompt", None), ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", 5),
                ("prompt", [1, "a"]), ("prompt", [5000]), ("prompt", [-1]), ("prompt", {"a": 1}),
                ("best_of", 2), ("suffix", "x"), ("guided_json", {}), ("use_beam_search", True),
                ("bad_words", ["x"]), ("allowed_token_ids", [5]), ("truncate_prompt_tokens", 8),
                ("response_format", {"type": "grammar"}), ("min_tokens", 2), ("cache_salt", ""),
                ("stream_options", {"include_usage": True}), ("priority", "high")):
            body = dict(good)
            body[field] = value
            error = self.refused(PATH, 400, field, **body)
            self.assertIn(field, error["message"])
            self.assertEqual(error["type"], "invalid_request_error")
        self.refused(PATH, 404, "model", **good, model="gpt-17")
        long = self.refused(PATH, 400, "prompt", prompt="x y z " * 9000)
        self.assertEqual(long["code"], "context_length_exceeded")
        self.refused(PATH, 400, "prompt", prompt="x" * 20_000_000)
        self.refused(PATH, 400, "max_tokens", prompt="x", max_tokens=8192)

    def test_bodies_that_are_no_requests(self):
        for body in ("", "{", "[]", "null", '{"prompt":"x"} y', b"\xff\xfe", '"x"',
                     '{"prompt":"\xff"}'.encode("latin-1"), "[" * 100000):
            status, _, data = self.server.request("POST", PATH, body)
            self.assertEqual(status, 400, body[:20])
            self.assertEqual(json.loads(data)["error"]["code"], "invalid_json")


if __name__ == "__main__":
    unittest.main()
