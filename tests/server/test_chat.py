"""test_chat - /v1/chat/completions on the model that ships.

SPDX-License-Identifier: Apache-2.0
"""
import unittest

from serving import ServerTest

PATH = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Gets the weather.",
    "parameters": {"type": "object", "required": ["location"], "properties": {
        "location": {"type": "string", "description": "City name"},
        "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}}}}}


class Chat(ServerTest):
    def prompt_of(self, **body):
        tokens = self.server.ask("/tokenize", **body)["tokens"]
        return self.server.ask("/detokenize", tokens=tokens)["prompt"]

    def test_answer(self):
        answer = self.server.ask(PATH, **ASK, max_tokens=64)
        choice = answer["choices"][0]
        self.assertEqual(answer["object"], "chat.completion")
        self.assertTrue(answer["id"].startswith("chatcmpl-"))
        self.assertEqual(choice["message"]["role"], "assistant")
        self.assertTrue(choice["message"]["content"])
        self.assertNotIn("<|", choice["message"]["content"])
        self.assertEqual(choice["finish_reason"], "stop")

    def test_stream_is_the_whole(self):
        for extra in ({}, {"seed": 3, "temperature": 1.3}, {"stop": "e"}, {"logprobs": True},
                      {"n": 2, "temperature": 1.3, "seed": 4}):
            body = {**ASK, "max_tokens": 80, **extra}
            whole = self.server.ask(PATH, **body)
            events = self.server.events(PATH, **body)
            for choice in whole["choices"]:
                deltas = [e["choices"][0] for e in events
                          if e["choices"][0]["index"] == choice["index"]]
                for key in ("content", "reasoning", "reasoning_content"):
                    joined = "".join(d["delta"].get(key) or "" for d in deltas)
                    self.assertEqual(joined, choice["message"].get(key) or "", (key, extra))
                self.assertEqual(deltas[0]["delta"]["role"], "assistant")
                self.assertEqual(sum("role" in d["delta"] for d in deltas), 1)
                self.assertEqual(deltas[-1]["finish_reason"], choice["finish_reason"])
                if choice["logprobs"]:
                    joined = sum((d["logprobs"]["content"] for d in deltas), [])
                    self.assertEqual(joined, choice["logprobs"]["content"])

    def test_bare_path_and_parts(self):
        parts = [{"type": "text", "text": "hi"}]
        self.assertEqual(
            self.server.ask("/chat/completions", **ASK)["choices"][0]["message"]["content"],
            self.server.ask(PATH, messages=[{"role": "user", "content": parts}],
                            temperature=0)["choices"][0]["message"]["content"])

    def test_reasoning(self):
        # The model has learnt to look codes up, and says so in analysis.
        question = {"role": "user", "content": "What is the code for apple?"}
        listed = {"role": "developer", "content": "pear = 4410\napple = 1517\nplum = 2093"}
        body = dict(messages=[listed, question], temperature=0, max_tokens=60)
        answer = self.server.ask(PATH, **body)
        message = answer["choices"][0]["message"]
        self.assertTrue(message["reasoning"], message)
        self.assertEqual(message["reasoning"], message["reasoning_content"])
        self.assertGreater(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0)
        for hidden in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
            quiet = self.server.ask(PATH, **body, **hidden)["choices"][0]["message"]
            self.assertNotIn("reasoning", quiet)
            self.assertEqual(quiet["content"], message["content"])
            for event in self.server.events(PATH, **body, **hidden):
                self.assertNotIn("reasoning", event["choices"][0]["delta"])

    def test_effort_reaches_the_prompt(self):
        for body in ({"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}},
                     {"chat_template_kwargs": {"reasoning_effort": "high"}}):
            self.assertIn("Reasoning: high", self.prompt_of(messages=ASK["messages"], **body))
        self.assertIn("Reasoning: medium", self.prompt_of(messages=ASK["messages"]))

    def test_conversation(self):
        prompt = self.prompt_of(messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning": "dropped"},
            {"role": "user", "content": "<|end|>c"},
            {"role": "assistant", "content": None, "reasoning": "kept", "tool_calls": [
                {"id": "call_1", "type": "function",
                 "function": {"name": "f", "arguments": "{\"a\":1}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "7"}])
        wanted = (
            "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nBe kind.<|end|>"
            "<|start|>user<|message|>a<|end|>"
            "<|start|>assistant<|channel|>final<|message|>b<|end|>"
            "<|start|>user<|message|><|end|>c<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>kept<|end|>"
            "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
            "{\"a\":1}<|call|>"
            "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>"
            "<|start|>assistant")
        self.assertTrue(prompt.endswith(wanted), prompt)
        # A control token that somebody writes stays text.
        control = self.server.ask("/tokenize", prompt="<|end|>")["tokens"]
        tokens = self.server.ask("/tokenize", messages=[
            {"role": "user", "content": "<|end|>"}])["tokens"]
        self.assertEqual(tokens.count(control[0]), 2)  # of the system's and the user's message

    def test_functions_reach_the_prompt(self):
        prompt = self.prompt_of(messages=ASK["messages"], tools=[WEATHER])
        self.assertIn("must be included for every message.\nCalls to these tools must go to the "
                      "commentary channel: 'functions'.<|end|>", prompt)
        self.assertIn(
            "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
            "// Gets the weather.\ntype get_weather = (_: {\n// City name\nlocation: string,\n"
            "format?: \"celsius\" | \"fahrenheit\", // default: celsius\n}) => any;\n\n"
            "} // namespace functions<|end|>", prompt)
        instructed = self.prompt_of(
            messages=[{"role": "system", "content": "Be brief."}] + ASK["messages"],
            tools=[WEATHER])
        self.assertIn("# Instructions\n\nBe brief.\n\n# Tools\n\n## functions", instructed)
        without = self.prompt_of(messages=ASK["messages"], tools=[WEATHER], tool_choice="none")
        self.assertEqual(without, self.prompt_of(messages=ASK["messages"]))

    def test_forced_calls(self):
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice in (named, "required"):
            body = {**ASK, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 24}
            message = self.server.ask(PATH, **body)["choices"][0]["message"]
            call = message["tool_calls"][0]
            self.assertEqual((call["type"], call["function"]["name"]), ("function", "get_weather"))
            self.assertTrue(call["id"].startswith("call_"))
            self.assertIsNone(message["content"])
            deltas = [e["choices"][0]["delta"] for e in self.server.events(PATH, **body)]
            calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
            self.assertEqual("".join(c["function"]["arguments"] for c in calls),
                             call["function"]["arguments"])
            self.assertEqual([c["function"].get("name") for c in calls if "id" in c],
                             ["get_weather"])
            self.assertEqual({c["index"] for c in calls}, {0})

    def test_logprobs(self):
        answer = self.server.ask(PATH, **ASK, max_tokens=8, logprobs=True, top_logprobs=3)
        content = answer["choices"][0]["logprobs"]["content"]
        self.assertEqual(len(content), answer["usage"]["completion_tokens"])
        for entry in content:
            self.assertEqual(len(entry["top_logprobs"]), 3)
            self.assertEqual(entry["top_logprobs"][0]["logprob"], entry["logprob"])  # greedy
            self.assertEqual(bytes(entry["bytes"]).decode(), entry["token"])
        named = self.server.ask(PATH, **ASK, max_tokens=8, logprobs=True, top_logprobs=3,
                                return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
        for entry, same, token in zip(named["logprobs"]["content"], content, named["token_ids"]):
            self.assertEqual(entry["token"], f"token_id:{token}")
            self.assertEqual(entry["top_logprobs"][0]["token"], entry["token"])
            self.assertEqual(entry["bytes"], same["bytes"])

    def test_refusals(self):
        for param, body in (
                ("messages", {}), ("messages", {"messages": []}), ("messages", {"messages": "hi"}),
                ("messages", {"messages": ["hi"]}),
                ("messages[0].role", {"messages": [{"content": "a"}]}),
                ("messages[0].role", {"messages": [{"role": "king", "content": "a"}]}),
                ("messages[0].content", {"messages": [{"role": "user"}]}),
                ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
                ("messages[0].content", {"messages": [{"role": "user", "content": "a\0b"}]}),
                ("messages[1].content", {"messages": ASK["messages"] + [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
                ("messages[0].tool_call_id", {"messages": [
                    {"role": "tool", "tool_call_id": "x", "content": "1"}]}),
                ("reasoning_effort", {**ASK, "reasoning_effort": "xhigh"}),
                ("top_logprobs", {**ASK, "top_logprobs": 2}),
                ("tools", {**ASK, "tools": [{"type": "retrieval"}]}),
                ("tools[0].function.name", {**ASK, "tools": [
                    {"type": "function", "function": {"name": "a b"}}]}),
                ("tools[1].function.name", {**ASK, "tools": [WEATHER, WEATHER]}),
                ("tool_choice", {**ASK, "tool_choice": "required"}),
                ("tool_choice", {**ASK, "tools": [WEATHER], "tool_choice": {
                    "type": "function", "function": {"name": "other"}}}),
                ("tool_choice", {**ASK, "tools": [WEATHER], "tool_choice": "always"})):
            self.refused(PATH, 400, param, **body)

    def test_unsupported_fields(self):
        for param, value in (
                ("allowed_token_ids", [5]), ("bad_words", ["x"]), ("truncate_prompt_tokens", 8),
                ("skip_special_tokens", False), ("continue_final_message", True), ("echo", True),
                ("add_generation_prompt", False), ("chat_template", "{{ messages }}"),
                ("modalities", ["text", "audio"]), ("functions", [WEATHER["function"]]),
                ("function_call", {"name": "get_weather"}), ("web_search_options", {})):
            error = self.refused(PATH, 400, param, **ASK, **{param: value})
            self.assertIn(param, error["message"])
            self.assertEqual(error["type"], "invalid_request_error")
        self.server.ask(PATH, **ASK, max_tokens=1, allowed_token_ids=None, bad_words=[],
                        skip_special_tokens=True, continue_final_message=False, echo=False,
                        add_generation_prompt=True, chat_template=None, modalities=["text"],
                        functions=[], function_call="none")


class WithoutChannels(ServerTest):
    OPTIONS = ("--reasoning-parser", "none", "--served-model-name", "one,two", "--date",
               "2025-06-28")

    def test_text_as_it_is(self):
        message = self.server.ask(PATH, **ASK, max_tokens=40, model="two")["choices"][0]["message"]
        self.assertTrue(message["content"].startswith("final"), message)
        prompt = self.server.ask("/tokenize", messages=ASK["messages"], model="one",
                                 return_token_strs=True)
        self.assertIn("Current date: 2025-06-28\n", "".join(prompt["token_strs"]))
        names = [m["id"] for m in
                 __import__("json").loads(self.server.request("GET", "/v1/models")[2])["data"]]
        self.assertEqual(names, ["one", "two"])


if __name__ == "__main__":
    unittest.main()
