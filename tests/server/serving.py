"""serving - a running `kv8 serve` for the tests, and the plainest client: http.client, raw sockets.

SPDX-License-Identifier: Apache-2.0
"""
import atexit
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["KV8_PROGRAM"]
MODEL = "models/tiny-gpt-oss"
# Seconds for an answer: a step of 512 tokens takes tens of them under a sanitizer on a busy machine.
PATIENCE = 300
# Where the server computes, and what it is compared with: KV8_DEVICE=cuda, a GPU.
DEVICE = os.environ.get("KV8_DEVICE", "cpu")
PLACE = [] if DEVICE == "cpu" else ["--device", DEVICE, "--batch-invariant"]
OPTIONS = ["--kv-memory", "400MB", "--max-model-len", "8192", "--kv", "f32", "--threads", "2", *PLACE]


class Server:
    """The program, started and listening."""

    def __init__(self, *more, options=OPTIONS, model=MODEL, under=()):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([*under, PROGRAM, "serve", model, "--port", "0", *options, *more],
                                        stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)  # of a test that failed before it stopped its server
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.match(r"serving +http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                break
        else:
            raise RuntimeError("kv8 serve ended: " + "".join(self.lines))
        # What follows goes to a file, so that the program never waits for a reader.
        self.drain = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=self.log)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        """Its exit status; `lines` are then all that it said."""
        status = self.process.wait(PATIENCE)
        self.drain.wait(PATIENCE)
        self.process.stderr.close()
        self.log.seek(0)
        self.lines += self.log.readlines()
        self.log.close()
        return status

    def request(self, method, path, body=None, headers=None):
        """(status, headers, body as bytes)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = json.dumps(body) if isinstance(body, (dict, list)) else body
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def post(self, path, body, headers=None):
        """(status, JSON)."""
        status, _, data = self.request("POST", path, body, headers)
        return status, json.loads(data)

    def ask(self, path, **body):
        """The JSON of an answer that must be good."""
        status, answer = self.post(path, body)
        if status != 200:
            raise AssertionError(f"{path}: {status} {answer}")
        return answer

    def ask_for(self, path):
        """The JSON of a page."""
        status, _, data = self.request("GET", path)
        if status != 200:
            raise AssertionError(f"{path}: {status} {data}")
        return json.loads(data)

    def events(self, path, **body):
        """The JSON of every event of a stream, which must end with [DONE]."""
        status, headers, data = self.request("POST", path, dict(body, stream=True))
        assert status == 200, data
        assert headers["Content-Type"].startswith("text/event-stream"), headers
        parts = data.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""], parts[-2:]
        return [json.loads(part[len("data: "):]) for part in parts[:-2]]

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def metric(self, name):
        """The value of a metric without further labels."""
        text = self.request("GET", "/metrics")[2].decode()
        return float(re.search(rf"^{re.escape(name)}{{model_name=\"[^\"]*\"}} (\S+)$", text, re.M)[1])


class ServerTest(unittest.TestCase):
    """Tests that share one server."""

    OPTIONS = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.OPTIONS)

    @classmethod
    def tearDownClass(cls):
        status = cls.server.stop()
        assert status == 0, f"kv8 serve ended with {status}: {''.join(cls.server.lines[-20:])}"

    def refused(self, path, status, param, **body):
        """A request that is refused with this status, naming the field."""
        got, answer = self.server.post(path, body)
        self.assertEqual(got, status, answer)
        error = answer["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertEqual(error["param"], param, error)
        return error


def raw_post(path, body, *headers):
    head = [f"POST {path} HTTP/1.1", "Host: a", *headers]
    return ("\r\n".join(head) + "\r\n\r\n").encode() + body


def sized(body):
    return f"Content-Length: {len(body)}"


def read_http(connection):
    """One answer from a raw socket: (status line, headers, body)."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return data.decode(), {}, b""
        data += more
    head, body = data.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
    while len(body) < int(headers.get("content-length", 0)):
        more = connection.recv(65536)
        if not more:
            raise ConnectionError("the answer's body ends early")
        body += more
    return lines[0], headers, body
