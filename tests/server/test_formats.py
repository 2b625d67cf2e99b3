"""test_formats - response_format and strict tools: whatever the model would rather say, and however it
is drawn, the answer parses and holds to the schema.

SPDX-License-Identifier: Apache-2.0
"""
import itertools
import json
import os
import unittest
from concurrent.futures import ThreadPoolExecutor

from serving import ServerTest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
IS_SHORT = "KV8_TEST_SHORT" in os.environ  # under sanitizers: other draws run the same code
ASK = {"messages": [{"role": "user", "content": "hi"}]}

SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6},
                                      "age": {"type": "integer"}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"},
                                      "c": {"enum": ["x", 1, None]}}, "required": ["b"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    {"anyOf": [{"const": "yes"}, {"type": "integer"}]},
    {"type": ["boolean", "null"]},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"$ref": "#/$defs/list", "$defs": {"list": {"type": "object", "properties": {
        "v": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}},
        "required": ["v", "next"]}}},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"const": {"a": [1, "\u00e9\n\"quoted\""]}},
    {},
    {"type": "array", "minItems": 4, "maxItems": 4,
     "items": {"type": "integer", "minimum": -3, "exclusiveMaximum": 117}},
    {"type": ["integer", "null"], "exclusiveMinimum": 998},
    {"type": "number", "minimum": 0},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "string", "maxLength": 3}],
     "$defs": {"a": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
               "b": {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}}},
]


def holds(value, schema, root):
    """The definition, for the keywords that the schemas above have."""
    if "$ref" in schema:
        return holds(value, root["$defs"][schema["$ref"].split("/")[-1]], root)
    if "anyOf" in schema:
        return any(holds(value, s, root) for s in schema["anyOf"])
    if "oneOf" in schema:
        return sum(holds(value, s, root) for s in schema["oneOf"]) == 1
    if "const" in schema:
        return value == schema["const"]
    if "enum" in schema:
        return any(type(value) is type(v) and value == v for v in schema["enum"])
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    python = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
              "integer": int, "number": (int, float)}
    if kinds and not any(isinstance(value, python[k]) and not (
            k in ("integer", "number") and isinstance(value, bool)) for k in kinds):
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (schema.get("minimum", value) <= value <= schema.get("maximum", value) and
                schema.get("exclusiveMinimum", float("-inf")) < value <
                schema.get("exclusiveMaximum", float("inf")))
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30)
    if isinstance(value, list):
        return (schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30) and
                all(holds(v, schema.get("items", {}), root) for v in value))
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return (all(k in value for k in schema.get("required", [])) and
                all(holds(v, properties.get(k, others), root) for k, v in value.items()))
    return True


class Formats(ServerTest):
    def check(self, choice, schema, text):
        """What ended by itself is whole; what was cut begins like it."""
        if choice == "length":
            return 0
        value = json.loads(text)
        self.assertTrue(holds(value, schema, schema), (schema, text))
        return 1

    def test_schemas(self):
        """Six answers of a schema at a time, cold and hot, as chat and as text; in short two."""
        for n, schema in enumerate(SCHEMAS):
            draws = ([(0, TEXT), (1 + n % 2, CHAT)] if IS_SHORT else
                     itertools.product(range(3), (CHAT, TEXT)))
            form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}

            def ended_whole(drawn):
                seed, path = drawn
                body = ASK if path == CHAT else {"prompt": "x"}
                choice = self.server.ask(path, **body, response_format=form, seed=seed,
                                         temperature=[0, 1, 3][seed], max_tokens=150)["choices"][0]
                text = choice["message"]["content"] if path == CHAT else choice["text"]
                return self.check(choice["finish_reason"], schema, text)

            with ThreadPoolExecutor() as together:
                whole = together.map(ended_whole, draws)
                self.assertGreater(sum(whole), 0, schema)

    def test_any_object(self):
        whole = 0
        for seed in range(2 if IS_SHORT else 8):
            choice = self.server.ask(CHAT, **ASK, response_format={"type": "json_object"}, seed=seed,
                                     temperature=2, max_tokens=200)["choices"][0]
            whole += self.check(choice["finish_reason"], {"type": "object"},
                                choice["message"]["content"])
        self.assertGreater(whole, 0)

    def test_stream_and_many(self):
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMAS[0]}}
        body = dict(ASK, response_format=form, n=3, seed=1, temperature=2, max_tokens=200)
        whole = self.server.ask(CHAT, **body)
        events = self.server.events(CHAT, **body)
        for choice in whole["choices"]:
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in events
                           if e["choices"][0]["index"] == choice["index"])
            self.assertEqual(text, choice["message"]["content"])

    def test_reasoning_stays_free(self):
        body = {"temperature": 0, "max_tokens": 120, "messages": [
            {"role": "developer", "content": "pear = 4410\napple = 1517\nplum = 2093"},
            {"role": "user", "content": "What is the code for apple?"}]}
        free = self.server.ask(CHAT, **body)["choices"][0]["message"]
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMAS[0]}}
        held = self.server.ask(CHAT, **body, response_format=form)["choices"][0]["message"]
        self.assertTrue(free["reasoning"])
        self.assertTrue(held["reasoning"])
        self.assertTrue(holds(json.loads(held["content"]), SCHEMAS[0], SCHEMAS[0]))

    def test_calls(self):
        tools = [{"type": "function", "function": {
            "name": name, "strict": True, "parameters": SCHEMAS[0]}} for name in ("one", "other")]
        named = {"type": "function", "function": {"name": "other"}}
        for choice, names in (("required", {"one", "other"}), (named, {"other"})):
            for seed in range(1 if IS_SHORT else 4):
                answer = self.server.ask(CHAT, **ASK, tools=tools, tool_choice=choice, seed=seed,
                                         temperature=2, max_tokens=120)["choices"][0]
                call = answer["message"]["tool_calls"][0]["function"]
                self.assertIn(call["name"], names)
                if answer["finish_reason"] != "length":
                    self.assertEqual(answer["finish_reason"], "tool_calls")
                    value = json.loads(call["arguments"])
                    self.assertTrue(holds(value, SCHEMAS[0], SCHEMAS[0]))

    def test_the_model_is_told(self):
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMAS[4]}}
        tokens = self.server.ask("/tokenize", **ASK, response_format=form)["tokens"]
        prompt = self.server.ask("/detokenize", tokens=tokens)["prompt"]
        self.assertIn('<|start|>developer<|message|># Response Formats\n\n## it\n\n'
                      '{"type":["boolean","null"]}<|end|>', prompt)

    def test_refusals(self):
        for schema in ({"type": "string", "pattern": "(?=a)"}, {"type": "string", "pattern": "(a)\\1"},
                       {"type": "integer", "minimum": 2, "maximum": 1}, {"minimum": 1},
                       {"type": "number", "maximum": 1, "minimum": 2}, {"type": "integer", "maximum": 1e30},
                       {"type": "integer", "exclusiveMinimum": 9007199254740991},
                       {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"oneOf": []},
                       {"oneOf": [{"type": "object"}, {"type": "object"}]},
                       {"oneOf": [{"$ref": "#"}, {"type": "null"}]},
                       {"type": "object", "required": ["x"]}, {"$ref": "#/$defs/none"},
                       {"$ref": "http://elsewhere"}, {"$ref": "#"}, {"enum": []},
                       {"allOf": [{"type": "null"}, {"type": "string"}]}, {"not": {}},
                       {"type": "colour"}, {"type": "array", "items": 5},
                       {"type": "array", "maxItems": 1 << 30}, {"enum": [1], "type": "string"},
                       {"anyOf": [{"type": "null"}], "type": "string"}):
            form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
            error = self.refused(CHAT, 400, "response_format", **ASK, response_format=form)
            self.assertEqual(error["code"], "unsupported_schema", schema)
        for form in ("json", {"type": "json_schema"}, {"type": "grammar"}, {}):
            self.refused(CHAT, 400, "response_format", **ASK, response_format=form)
        deep = {"type": "null"}
        for _ in range(200):
            deep = {"type": "array", "items": deep}
        self.refused(TEXT, 400, "response_format", prompt="x", response_format={
            "type": "json_schema", "json_schema": {"schema": deep}})
        self.refused(CHAT, 400, "ignore_eos", **ASK, response_format={"type": "json_object"},
                     ignore_eos=True)
        self.refused(CHAT, 400, "min_tokens", **ASK, response_format={"type": "json_object"},
                     min_tokens=5)


if __name__ == "__main__":
    unittest.main()
