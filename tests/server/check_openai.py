"""check_openai - openai-python, as released, against kv8 serve: what people call, and the errors they
catch. Run by scripts/check_clients.

SPDX-License-Identifier: Apache-2.0
"""
import asyncio
import enum
import json
import typing
import unittest

import openai
import pydantic

from serving import Server

MESSAGES = [{"role": "user", "content": "hi"}]
LOOK_UP = [{"role": "developer", "content": "pear = 4410\napple = 1517\nplum = 2093"},
           {"role": "user", "content": "What is the code for apple?"}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "parameters": {
        "type": "object", "properties": {"location": {"type": "string"}}}}}


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Place(pydantic.BaseModel):
    code: typing.Annotated[str, pydantic.Field(pattern="^[A-Z]{2}-\\d{1,3}$")]
    share: typing.Annotated[float, pydantic.Field(ge=0, lt=1)]


class Thing(pydantic.BaseModel):
    colour: Colour
    kind: typing.Literal["a", "b"]
    place: Place | None
    numbers: typing.Annotated[list[typing.Annotated[int, pydantic.Field(ge=1, le=99)]],
                              pydantic.Field(max_length=3)]


class OpenAI(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--api-key", "sesame")
        cls.url = f"http://127.0.0.1:{cls.server.port}/v1"
        cls.client = openai.OpenAI(base_url=cls.url, api_key="sesame", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        assert cls.server.stop() == 0

    def chat(self, messages=MESSAGES, **options):
        return self.client.chat.completions.create(model="tiny-gpt-oss", messages=messages,
                                                   temperature=0, **options)

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()], ["tiny-gpt-oss"])
        self.assertEqual(self.client.models.retrieve("tiny-gpt-oss").owned_by, "kv8")

    def test_chat(self):
        whole = self.chat(max_tokens=64)
        self.assertEqual(whole.choices[0].finish_reason, "stop")
        text = ""
        for chunk in self.chat(max_tokens=64, stream=True, stream_options={"include_usage": True}):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunk.usage.completion_tokens, whole.usage.completion_tokens)

    def test_stream_helper(self):
        with self.client.chat.completions.stream(model="tiny-gpt-oss", messages=MESSAGES,
                                                 temperature=0) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        self.assertEqual(final.choices[0].message.content,
                         self.chat().choices[0].message.content)

    def test_reasoning(self):
        answer = self.chat(LOOK_UP, max_tokens=80, reasoning_effort="low")
        self.assertTrue(answer.choices[0].message.reasoning)
        self.assertEqual(answer.choices[0].message.reasoning_content, answer.choices[0].message.reasoning)
        deltas = [chunk.choices[0].delta for chunk in self.chat(
            LOOK_UP, max_tokens=80, reasoning_effort="low", stream=True)]
        self.assertEqual("".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
                         answer.choices[0].message.reasoning_content)
        self.assertGreater(answer.usage.completion_tokens_details.reasoning_tokens, 0)

    def test_tools(self):
        named = {"type": "function", "function": {"name": "get_weather"}}
        answer = self.chat(tools=[WEATHER], tool_choice=named, max_tokens=16)
        call = answer.choices[0].message.tool_calls[0]
        self.assertEqual(call.function.name, "get_weather")
        self.chat(MESSAGES + [answer.choices[0].message,
                              {"role": "tool", "tool_call_id": call.id, "content": "sun"}],
                  tools=[WEATHER], max_tokens=4)

    def test_logprobs(self):
        answer = self.chat(max_tokens=4, logprobs=True, top_logprobs=2)
        for entry in answer.choices[0].logprobs.content:
            self.assertEqual(len(entry.top_logprobs), 2)

    def test_completions(self):
        answer = self.client.completions.create(model="tiny-gpt-oss", prompt=["a", "b"], n=2,
                                                max_tokens=3, logprobs=1, echo=True, seed=1)
        self.assertEqual([c.index for c in answer.choices], [0, 1, 2, 3])
        stream = self.client.completions.create(model="tiny-gpt-oss", prompt="a", max_tokens=3,
                                                stream=True)
        self.assertEqual(sum(1 for _ in stream), 3)

    def test_stops(self):
        """Ids that end a completion, and a stop string that stays in it."""
        def ask(**extra):
            return self.client.completions.create(model="tiny-gpt-oss", prompt="x = 1\ny =", max_tokens=20,
                                                  temperature=0, extra_body=extra).choices[0]

        whole = ask(return_token_ids=True)
        end = whole.token_ids.index(whole.token_ids[3]) + 1
        ended = ask(return_token_ids=True, stop_token_ids=[whole.token_ids[3]])
        self.assertEqual(ended.token_ids, whole.token_ids[:end])
        self.assertEqual((ended.finish_reason, ended.stop_reason), ("stop", whole.token_ids[3]))
        stop = whole.text[4:7]
        cut = ask(stop=stop).text
        self.assertEqual(cut, whole.text[:whole.text.index(stop)])
        self.assertEqual(ask(stop=stop, include_stop_str_in_output=True).text, cut + stop)

    def test_prompt_logprobs(self):
        """Of a prompt's tokens, under both of its forms."""
        def ask(**options):
            return self.client.completions.create(model="tiny-gpt-oss", prompt="x = 1\ny = 2", max_tokens=1,
                                                  temperature=0, **options)

        answer, echoed = ask(extra_body={"prompt_logprobs": 2}), ask(echo=True, logprobs=0)
        entries, scored = answer.choices[0].prompt_logprobs, echoed.choices[0].logprobs.token_logprobs
        self.assertEqual(len(entries), answer.usage.prompt_tokens)
        self.assertEqual((entries[0], scored[0]), (None, None))
        for entry, logprob in zip(entries[1:], scored[1:len(entries)], strict=True):
            self.assertTrue(any(abs(item["logprob"] - logprob) < 1e-4 for item in entry.values()))

    def test_cached_tokens(self):
        ids = self.client.post("/tokenize", cast_to=dict, body={"prompt": "x = 1\n" * 200})["tokens"]
        cached = [self.client.completions.create(
            model="tiny-gpt-oss", prompt=ids, max_tokens=1, extra_body={"cache_salt": "cached"}
        ).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
        self.assertEqual(cached[0], 0)
        self.assertGreater(cached[1], 0.9 * len(ids))

    def test_json_object(self):
        for seed in range(2):
            answer = self.client.chat.completions.create(
                model="tiny-gpt-oss", messages=LOOK_UP, seed=seed, temperature=0.3, max_tokens=600,
                response_format={"type": "json_object"})
            self.assertIsInstance(json.loads(answer.choices[0].message.content), dict)

    def test_tokens_and_text(self):
        text = "→ é 漢 x = 1\n"
        counted = self.client.post("/tokenize", cast_to=dict, body={"prompt": text})
        self.assertEqual(counted["count"], len(counted["tokens"]))
        self.assertEqual(self.client.post("/detokenize", cast_to=dict,
                                          body={"tokens": counted["tokens"]})["prompt"], text)
        chat = self.client.post("/tokenize", cast_to=dict, body={"messages": MESSAGES})
        self.assertEqual(chat["count"], self.chat(max_tokens=1).usage.prompt_tokens)

    def test_responses(self):
        answer = self.client.responses.create(model="tiny-gpt-oss", input=LOOK_UP, temperature=0,
                                              max_output_tokens=80)
        self.assertTrue(answer.output_text)
        self.assertEqual(answer.output[0].type, "reasoning")
        with self.client.responses.stream(model="tiny-gpt-oss", input=LOOK_UP, temperature=0,
                                          max_output_tokens=80) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        self.assertEqual(final.output_text, answer.output_text)
        self.assertIn("response.reasoning_text.delta", kinds)

    def test_errors(self):
        for error, call in (
                (openai.BadRequestError, lambda: self.chat(top_p=5)),
                (openai.NotFoundError, lambda: self.client.models.retrieve("gpt-17")),
                (openai.AuthenticationError, lambda: openai.OpenAI(
                    base_url=self.url, api_key="wrong", max_retries=0).models.list())):
            with self.assertRaises(error) as caught:
                call()
            self.assertIsNotNone(caught.exception.request_id)
            self.assertTrue(caught.exception.body["message"])
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(top_p=5)
        self.assertEqual(caught.exception.param, "top_p")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(extra_body={"bad_words": ["x"]})
        self.assertEqual(caught.exception.param, "bad_words")

    def test_many_at_once(self):
        """64 streams at temperature 0 give, each, what it gives alone."""
        prompts = [f"x{i} = {i}\ny = " for i in range(64)]

        async def ask(client, prompt):
            text = ""
            async for chunk in await client.completions.create(
                    model="tiny-gpt-oss", prompt=prompt, temperature=0, max_tokens=32, stream=True):
                text += chunk.choices[0].text
            return text

        async def all_at_once():
            async with openai.AsyncOpenAI(base_url=self.url, api_key="sesame",
                                          max_retries=0) as client:
                return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

        together = asyncio.run(all_at_once())
        alone = [self.client.completions.create(model="tiny-gpt-oss", prompt=prompt, temperature=0,
                                                max_tokens=32).choices[0].text
                 for prompt in prompts]
        self.assertEqual(together, alone)

    def test_parse(self):
        """Answers as objects of a pydantic model, whole and streamed; arguments of a strict function."""
        for seed in range(2):
            options = {"model": "tiny-gpt-oss", "messages": LOOK_UP, "seed": seed, "temperature": 0.3,
                       "max_tokens": 600}
            answer = self.client.chat.completions.parse(response_format=Thing, **options)
            self.assertIsInstance(answer.choices[0].message.parsed, Thing)
            with self.client.chat.completions.stream(response_format=Thing, **options) as stream:
                for _ in stream:
                    pass
                final = stream.get_final_completion()
            self.assertEqual(final.choices[0].message.parsed, answer.choices[0].message.parsed)
            called = self.client.chat.completions.parse(
                tools=[openai.pydantic_function_tool(Thing)], tool_choice="required", **options)
            call = called.choices[0].message.tool_calls[0].function
            self.assertIsInstance(call.parsed_arguments, Thing)

    def test_sampling_fields(self):
        """Each is taken and does what it says where that can be told from outside."""
        plain = self.chat(max_tokens=12).choices[0].message.content or ""
        drawn = [self.client.chat.completions.create(
            model="tiny-gpt-oss", messages=MESSAGES, seed=5, temperature=1.5, top_p=0.9, n=2,
            presence_penalty=0.5, frequency_penalty=0.5, max_completion_tokens=12)
            for _ in range(2)]
        self.assertEqual([c.message.content for c in drawn[0].choices],
                         [c.message.content for c in drawn[1].choices])
        stopped = self.client.completions.create(model="tiny-gpt-oss", prompt="x = 1\ny =", max_tokens=40,
                                                 temperature=0, stop=["\n", "="])
        self.assertNotIn("=", stopped.choices[0].text)
        forced = self.client.completions.create(model="tiny-gpt-oss", prompt="x", max_tokens=3,
                                                temperature=0, logit_bias={"65": 100})
        again = self.client.completions.create(model="tiny-gpt-oss", prompt="x", max_tokens=3,
                                               temperature=0, extra_body={"logit_bias": {"65": 100}})
        self.assertEqual(forced.choices[0].text, again.choices[0].text)
        self.assertEqual(len(set(forced.choices[0].text)), 1)
        self.assertIsInstance(plain, str)
        chunks = list(self.chat(max_tokens=5, stream=True, extra_body={
            "ignore_eos": True, "stream_options": {"include_usage": True,
                                                   "continuous_usage_stats": True}}))
        self.assertTrue(all(chunk.usage is not None for chunk in chunks))

    def test_raw_and_async(self):
        raw = self.client.chat.completions.with_raw_response.create(
            model="tiny-gpt-oss", messages=MESSAGES, max_tokens=2,
            extra_headers={"X-Request-Id": "mine"})
        self.assertEqual(raw.headers["x-request-id"], "mine")
        self.assertEqual(raw.parse().object, "chat.completion")
        slow = self.client.with_options(timeout=0.001)
        with self.assertRaises(openai.APITimeoutError):
            slow.chat.completions.create(model="tiny-gpt-oss", messages=MESSAGES, max_tokens=400)

    def test_extra_fields(self):
        answer = self.chat(max_tokens=4, extra_body={
            "min_tokens": 4, "ignore_eos": True, "top_k": 5, "min_p": 0.1,
            "repetition_penalty": 1.1, "return_token_ids": True, "cache_salt": "me"})
        self.assertEqual(len(json.loads(answer.model_dump_json())["choices"][0]["token_ids"]), 4)


if __name__ == "__main__":
    unittest.main()
