"""test_calibration - kv8 serve --calibrate: what it writes is what kv8 calibrate writes for the same
tokens; it begins, ends and begins again by calls that ask for the key.

SPDX-License-Identifier: Apache-2.0
"""
import json
import os
import subprocess
import tempfile
import time
import unittest

from serving import MODEL, PROGRAM, Server

KEY = {"Authorization": "Bearer k"}


def wait_for(server, state):
    end = time.monotonic() + 30
    while True:
        now = json.loads(server.request("GET", "/calibration", headers=KEY)[2])
        if now["state"] == state:
            return now
        assert time.monotonic() < end, now
        time.sleep(0.02)


def read(path):
    with open(path) as file:
        return json.load(file)


class Calibration(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.directory.name, "scales.json")

    def tearDown(self):
        self.directory.cleanup()

    def serve(self, *options):
        server = Server(*options)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def ask(self, server, prompt):
        status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1,
                                                         "temperature": 0}, KEY)
        self.assertEqual(status, 200, answer)

    def act(self, server, action, wanted=200):
        status, answer = server.post(f"/calibration/{action}", {}, KEY)
        self.assertEqual(status, wanted, answer)
        return answer

    def same(self, got, want):
        for key in ("scales", "amax"):
            for own, other in zip(sum(got[key], []), sum(want[key], []), strict=True):
                self.assertAlmostEqual(own / other, 1, delta=1e-4)
        self.assertEqual(set(got), set(want))

    def test_writes_what_kv8_calibrate_writes(self):
        text = "The quick brown fox jumps over the lazy dog, said the engine. " * 12
        other, source = self.path + ".other", self.path + ".txt"
        with open(source, "w") as file:
            file.write(text)
        subprocess.run([PROGRAM, "calibrate", MODEL, "--text", source, "-o", other], check=True,
                       stdout=subprocess.DEVNULL)
        server = self.serve("--calibrate", self.path, "--calibrate-warmup", "3",
                            "--calibrate-tokens", str(read(other)["tokens"]), "--api-key", "k",
                            "--no-enable-prefix-caching")
        ids = server.post("/tokenize", {"prompt": text}, KEY)[1]["tokens"]
        begin = server.post("/tokenize", {"prompt": "<|endoftext|>"}, KEY)[1]["tokens"]
        self.assertEqual(wait_for(server, "warming-up")["max_tokens"], 3)
        self.ask(server, ids[:3])
        self.assertEqual(wait_for(server, "counting")["tokens"], 0)
        self.assertFalse(os.path.exists(self.path))
        self.ask(server, begin + ids)
        wait_for(server, "written")
        self.same(read(self.path), read(other))
        self.assertEqual(server.stop(), 0)

    def test_begins_and_ends_by_calls(self):
        server = self.serve("--calibrate", self.path, "--api-key", "k")
        for path in ("start", "stop"):
            self.assertEqual(server.post(f"/calibration/{path}", {})[0], 401)
        self.assertEqual(server.request("GET", "/calibration")[0], 401)
        self.act(server, "start", 409)  # under way since the beginning
        self.ask(server, list(range(100, 140)))
        self.act(server, "stop")
        wait_for(server, "written")
        first = read(self.path)
        self.assertEqual(first["tokens"], 40)
        self.act(server, "stop", 409)
        self.ask(server, list(range(200, 240)))  # seen by nobody
        self.act(server, "start")
        self.ask(server, list(range(300, 325)))
        self.assertEqual(wait_for(server, "counting")["tokens"], 25)
        self.assertEqual(read(self.path), first)  # until the next is whole
        self.assertEqual(server.stop(), 0)  # writes what it has
        self.assertEqual(read(self.path)["tokens"], 25)
        self.assertEqual(os.listdir(self.directory.name), ["scales.json"])

    def test_is_not_there_unasked(self):
        server = self.serve()
        self.assertEqual(server.request("GET", "/calibration")[0], 404)
        self.assertEqual(server.post("/calibration/start", {})[0], 404)
        self.assertEqual(server.stop(), 0)
        server = self.serve("--calibrate", self.path)
        self.assertEqual(server.stop(), 2)  # nothing to fit
        self.assertIn("no token was counted", "".join(server.lines))
        self.assertEqual(os.listdir(self.directory.name), [])


if __name__ == "__main__":
    unittest.main()
