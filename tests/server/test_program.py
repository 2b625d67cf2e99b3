"""test_program - what kv8 serve says of itself when it starts, how soon it serves, and the words of
vLLM's command line.

SPDX-License-Identifier: Apache-2.0
"""
import http.client
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from serving import MODEL, PROGRAM, Server

SMALL = ["--kv-memory", "400MB", "--max-model-len", "2048"]
VLLM = ["--kv-cache-dtype", "fp8", "--enable-prefix-caching", "--enforce-eager", "--quantization", "mxfp4",
        "--tensor-parallel-size", "1", "--pipeline-parallel-size", "1", "--load-format", "safetensors",
        "--dtype", "auto", "--enable-auto-tool-choice", "--tool-call-parser", "openai",
        "--trust-remote-code", "--served-model-name", "one,two", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "256"]


def refusal(*options):
    """What the program says of options that it does not take."""
    done = subprocess.run([PROGRAM, "serve", MODEL, "--port", "0", *options], capture_output=True,
                          text=True, errors="replace", timeout=60, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    return done.stderr


class Program(unittest.TestCase):
    def test_says_what_it_will_do(self):
        server = Server(options=[*SMALL, "--kv", "e4m3"])
        plan = "".join(server.lines)
        self.assertEqual(server.stop(), 0)
        for said in (r"model +models/tiny-gpt-oss \(GptOssForCausalLM\), 0\.0133 GB of weights",
                     r"device +cpu, \w+, \d+ threads",
                     r"kv +e4m3, 1536 bytes a token \(bf16: 3072\), scales 1\n",
                     r" 0\.\d+ GB: \d+ tokens in pages, in bf16 they would take 2\.00 times as much\n",
                     r" in bf16 the same memory would hold \d+ tokens\n",
                     r" \d+ requests of 2048 tokens fit at once\n",
                     r"batch +64 requests and 512 tokens a step",
                     r"memory +GB: weights 0\.01, KV 0\.\d\d\n"):
            self.assertRegex(plan, said)
        tokens, requests, bf16 = (int(re.search(said, plan)[1]) for said in (
            r"(\d+) tokens in", r"(\d+) requests of", r"hold (\d+) tokens"))
        self.assertEqual(requests, tokens // 2048)
        self.assertLess(bf16, 0.6 * tokens)
        self.assertLess(float(re.search(r"ready in ([\d.]+) s", plan)[1]), 2)

    def test_words_of_vllm(self):
        server = Server(options=[*SMALL, *VLLM])
        names = [model["id"] for model in json.loads(server.request("GET", "/v1/models")[2])["data"]]
        plan = "".join(server.lines)
        self.assertEqual(server.stop(), 0)
        self.assertRegex(plan, r"kv +e4m3,")
        self.assertRegex(plan, r"batch +8 requests and 256 tokens a step, prefixes shared")
        self.assertEqual(names, ["one", "two"])
        server = Server(options=[*SMALL, "--kv-cache-dtype", "auto", "--no-enable-prefix-caching"])
        plan = "".join(server.lines)
        self.assertEqual(server.stop(), 0)
        self.assertRegex(plan, r"kv +bf16,")
        self.assertRegex(plan, r"prefixes computed again")

    def test_refuses_by_name(self):
        for said, options in (
                ("--kv-cache-dtype is \"fp4\", must be auto", ["--kv-cache-dtype", "fp4"]),
                ("--kv and --kv-cache-dtype", ["--kv", "e4m3", "--kv-cache-dtype", "fp8"]),
                ("contradict", ["--enable-prefix-caching", "--no-enable-prefix-caching"]),
                ("--quantization is \"awq\", checkpoints are mxfp4", ["--quantization", "awq"]),
                ("--tensor-parallel-size is 2, one device serves", ["--tensor-parallel-size", "2"]),
                ("--pipeline-parallel-size is 2", ["--pipeline-parallel-size", "2"]),
                ("--load-format is \"gguf\", must be auto or safetensors", ["--load-format", "gguf"]),
                ("--tool-call-parser is \"hermes\"", ["--tool-call-parser", "hermes"]),
                ("--gpu-memory-utilization is about a GPU", ["--gpu-memory-utilization", "0.9"]),
                ("--reasoning-parser is \"deepseek_r1\", must be harmony or none",
                 ["--reasoning-parser", "deepseek_r1"]),
                ("--max-num-batched-tokens is 4, must be at least --max-num-seqs",
                 ["--max-num-batched-tokens", "4"]),
                ("--max-model-len is 262144, the model's context holds 131072",
                 ["--max-model-len", "262144"]),
                ("--kv-memory is \"1KB\", must be a size", ["--kv-memory", "1KB"]),
                ("--kv-memory is \"-1GB\", must be a size", ["--kv-memory", "-1GB"]),
                ("--kv-memory is \"25\", must be a size", ["--kv-memory", "25"]),
                ("\" is no UTF-8, --served-model-name", ["--served-model-name", b"x,a\xff"]),
                ("--swap-space", ["--swap-space", "4"])):
            self.assertIn(said, refusal(*options))

    def test_says_how_much_memory_is_needed(self):
        for size, more in (("1KiB", []), ("6MB", ["--kv", "f32"]), ("1KiB", ["--max-num-seqs", "1"])):
            said = re.search(r"the KV memory is \S+ MB, must be at least (\d+) MB",
                             refusal("--kv-memory", size, *more))
            server = Server(options=["--kv-memory", f"{said[1]}MB", *more])
            self.assertEqual(server.stop(), 0)

    def test_serves_few_tokens(self):
        server = Server(options=["--kv-memory", "40MB", "--max-num-seqs", "1", "--max-model-len", "128"])
        self.assertEqual(server.stop(), 0)

    def test_names_a_file_cut_short(self):
        # On one thread the weights are read by the service's, on two by a worker of the pool as well.
        for threads in ("1", "2"):
            with tempfile.TemporaryDirectory() as folder:
                model = shutil.copytree(MODEL, f"{folder}/model")
                server = Server("--threads", threads, options=SMALL, model=model)
                os.truncate(f"{model}/model.safetensors", 20000)
                with self.assertRaises((ConnectionError, http.client.HTTPException)):
                    server.ask("/v1/completions", prompt="hello", max_tokens=4)
                self.assertEqual(server.wait(), 2)
                self.assertEqual(server.lines[-1], f"kv8 serve: {model}/model.safetensors: cut short, or no "
                                                   "longer readable, while it was in use\n")


if __name__ == "__main__":
    unittest.main()
