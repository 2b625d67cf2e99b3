"""test_responses - /v1/responses on the model that ships: items, events, and that both say the same.

SPDX-License-Identifier: Apache-2.0
"""
import json
import unittest

from serving import ServerTest

PATH = "/v1/responses"
LISTED = {"role": "developer", "content": "pear = 4410\napple = 1517\nplum = 2093"}
QUESTION = {"role": "user", "content": [{"type": "input_text",
                                         "text": "What is the code for apple?"}]}
REASONS = {"input": [LISTED, QUESTION], "temperature": 0, "max_output_tokens": 80}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {
    "type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}}


class Responses(ServerTest):
    def events(self, **body):
        status, headers, data = self.server.request("POST", PATH, dict(body, stream=True))
        self.assertEqual(status, 200, data)
        self.assertTrue(headers["Content-Type"].startswith("text/event-stream"))
        events = []
        for part in data.decode().split("\n\n")[:-1]:
            name, value = part.split("\n")
            events.append(json.loads(value.removeprefix("data: ")))
            self.assertEqual(name, "event: " + events[-1]["type"])
        self.assertEqual([e["sequence_number"] for e in events], list(range(len(events))))
        return events

    def test_answer(self):
        answer = self.server.ask(PATH, input="hi", temperature=0, max_output_tokens=40)
        self.assertEqual(answer["object"], "response")
        self.assertTrue(answer["id"].startswith("resp_"))
        message = answer["output"][-1]
        self.assertEqual((message["type"], message["role"]), ("message", "assistant"))
        self.assertEqual(message["content"][0]["type"], "output_text")
        self.assertTrue(message["content"][0]["text"])
        self.assertEqual(answer["usage"]["total_tokens"],
                         answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"])
        chat = self.server.ask("/v1/chat/completions", temperature=0, max_tokens=40,
                               messages=[{"role": "user", "content": "hi"}])
        self.assertEqual(message["content"][0]["text"], chat["choices"][0]["message"]["content"])
        told = self.server.ask(PATH, input="hi", instructions="Be brief.", max_output_tokens=1)
        self.assertEqual(told["instructions"], "Be brief.")
        chat = self.server.ask("/tokenize", messages=[{"role": "system", "content": "Be brief."},
                                                      {"role": "user", "content": "hi"}])
        self.assertEqual(told["usage"]["input_tokens"], chat["count"])

    def test_reasoning(self):
        answer = self.server.ask(PATH, **REASONS)
        self.assertEqual([item["type"] for item in answer["output"]], ["reasoning", "message"])
        self.assertEqual(answer["output"][0]["content"][0]["type"], "reasoning_text")
        self.assertGreater(answer["usage"]["output_tokens_details"]["reasoning_tokens"], 0)
        # What was said goes back as it came.
        self.server.ask(PATH, temperature=0, max_output_tokens=8, input=[
            LISTED, QUESTION, *answer["output"], {"role": "user", "content": "And plum?"}])

    def test_events_say_the_whole(self):
        whole = self.server.ask(PATH, **REASONS)
        events = self.events(**REASONS)
        self.assertEqual([e["type"] for e in events[:2]],
                         ["response.created", "response.in_progress"])
        self.assertEqual(events[-1]["type"], "response.completed")
        last = events[-1]["response"]

        def said(response):
            return [item["content"][0]["text"] for item in response["output"]]

        self.assertEqual(said(last), said(whole))
        self.assertEqual(last["usage"]["output_tokens"], whole["usage"]["output_tokens"])
        for index, kind in enumerate(("reasoning_text", "output_text")):
            deltas = [e for e in events if e["type"] == f"response.{kind}.delta"]
            self.assertEqual("".join(e["delta"] for e in deltas), said(whole)[index])
            self.assertEqual({e["output_index"] for e in deltas}, {index})
            done = [e for e in events if e["type"] == f"response.{kind}.done"]
            self.assertEqual([e["text"] for e in done], [said(whole)[index]])
        added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        self.assertEqual(added, [item["id"] for item in done])
        self.assertEqual(done, last["output"])

    def test_cut_short(self):
        body = dict(REASONS, max_output_tokens=3)
        answer = self.server.ask(PATH, **body)
        self.assertEqual(answer["status"], "incomplete")
        self.assertEqual(answer["incomplete_details"], {"reason": "max_output_tokens"})
        self.assertEqual(self.events(**body)[-1]["type"], "response.incomplete")

    def test_calls(self):
        body = dict(input="hi", temperature=0, tools=[WEATHER], max_output_tokens=24,
                    tool_choice={"type": "function", "name": "get_weather"})
        call = self.server.ask(PATH, **body)["output"][0]
        self.assertEqual((call["type"], call["name"]), ("function_call", "get_weather"))
        events = self.events(**body)
        deltas = "".join(e["delta"] for e in events
                         if e["type"] == "response.function_call_arguments.delta")
        self.assertEqual(deltas, call["arguments"])
        done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
        self.assertEqual([e["arguments"] for e in done], [call["arguments"]])
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        self.server.ask(PATH, input=[QUESTION, call, output], temperature=0, max_output_tokens=8)

    def test_refusals(self):
        for param, body in (("input", {}), ("input", {"input": []}), ("input", {"input": [5]}),
                            ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
                            ("input[0].type", {"input": [{"type": "image"}]}),
                            ("input[0].call_id", {"input": [{"type": "function_call_output",
                                                             "call_id": "x", "output": "1"}]}),
                            ("previous_response_id", {"input": "x", "previous_response_id": "r"}),
                            ("background", {"input": "x", "background": True}),
                            ("top_logprobs", {"input": "x", "top_logprobs": 2}),
                            ("include", {"input": "x", "include": ["message.output_text.logprobs"]}),
                            ("include", {"input": "x", "include": "all"}),
                            ("bad_words", {"input": "x", "bad_words": ["y"]}),
                            ("text.format", {"input": "x", "text": {
                                "format": {"type": "json_schema"}}}),
                            ("reasoning.effort", {"input": "x", "reasoning": {"effort": "huge"}}),
                            ("tools", {"input": "x", "tools": [{"type": "web_search"}]}),
                            ("max_output_tokens", {"input": "x", "max_output_tokens": 0})):
            self.refused(PATH, 400, param, **body)
        self.server.ask(PATH, input="x", max_output_tokens=1, top_logprobs=0, background=False,
                        include=["reasoning.encrypted_content"])


if __name__ == "__main__":
    unittest.main()
