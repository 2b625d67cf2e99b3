"""test_ends - keys that a server asks for, and how it ends: drained, at once, with figures to the last.

SPDX-License-Identifier: Apache-2.0
"""
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

from serving import MODEL, OPTIONS, PATIENCE, PROGRAM, Server, raw_post, read_http, sized

SHORT = {"prompt": "x", "max_tokens": 2, "temperature": 0}
LONG = {"prompt": "x", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}


class Keys(unittest.TestCase):
    def test_keys(self):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("first-key\nsecond-key\n")
            file.flush()
            server = Server("--api-key-file", file.name)
        for key, wanted in ((None, 401), ("Bearer first-key", 200), ("bearer second-key", 200),
                            ("Bearer first-keyx", 401), ("Bearer first-ke", 401), ("Bearer ", 401),
                            ("first-key", 401), ("Basic first-key", 401)):
            headers = {"Authorization": key} if key else {}
            for method, path, body in (("GET", "/v1/models", None), ("GET", "/models", None),
                                       ("POST", "/v1/completions", SHORT),
                                       ("POST", "/tokenize", {"prompt": "x"})):
                status, got, data = server.request(method, path, body, headers)
                self.assertEqual(status, wanted, (key, path))
                if wanted == 401:
                    self.assertEqual(json.loads(data)["error"]["code"], "invalid_api_key")
                    self.assertEqual(got["WWW-Authenticate"], "Bearer")
        for path in ("/health", "/version", "/metrics", "/"):
            self.assertEqual(server.request("GET", path)[0], 200)
        self.assertEqual(server.request("OPTIONS", "/v1/models")[0], 204)
        self.assertEqual(server.stop(), 0)


class Ends(unittest.TestCase):
    def test_drain(self):
        """SIGTERM: what runs ends as it would have, nothing new is taken."""
        server = Server("--log", "json")
        body = json.dumps(dict(LONG, max_tokens=1500, stream=True)).encode()
        connection = server.connect()
        connection.sendall(raw_post("/v1/completions", body, sized(body)))
        idle = server.connect()
        idle.sendall(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
        self.assertIn("200", read_http(idle)[0])
        data = connection.recv(100)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        short = json.dumps(SHORT).encode()
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        self.assertIn("503", read_http(idle)[0])
        idle.sendall(raw_post("/v1/completions", short, sized(short)))
        self.assertIn("503", read_http(idle)[0])
        for path, body in (("/health", None), ("/v1/completions", SHORT)):
            self.assertEqual(server.request("POST" if body else "GET", path, body)[0], 503)
        while more := connection.recv(65536):
            data += more
            if data.endswith(b"0\r\n\r\n"):
                break
        self.assertIn(b"data: [DONE]", data)
        self.assertEqual(data.count(b"data: {"), 1500)
        connection.close()
        idle.close()
        self.assertEqual(server.process.wait(20), 0)
        self.assertEqual(server.stop(signal.SIGTERM), 0)
        lines = [json.loads(line) for line in server.lines if line.startswith("{")]
        self.assertEqual(sorted((line["path"], line["status"]) for line in lines),
                         [*[("/health", 503)] * 2, ("/ping", 200), ("/v1/completions", 200),
                          *[("/v1/completions", 503)] * 2])
        self.assertEqual([(line["completion_tokens"], line["finish"]) for line in lines
                          if "finish" in line], [(1500, "length")])

    def test_log_of_any_bytes(self):
        """One line a request, as JSON and as text, whatever a method or a path holds."""
        for form in ("json", "text"):
            server = Server("--log", form)
            for sent in (b"GET /%ff", b"GET /%0a%1b%22", b"G\xf0T /", b"GET /%c3%a4"):
                with server.connect() as connection:
                    connection.sendall(sent + b" HTTP/1.1\r\nHost: a\r\n\r\n")
                    self.assertRegex(read_http(connection)[0], "40[04]")
            self.assertEqual(server.stop(), 0)
            lines = [line for line in server.lines if re.match(r"\{|\d{4}-\d\d-\d\dT", line)]
            wanted = {("GET", "/?"), ("GET", '/\n\x1b"'), ("G?T", ""), ("GET", "/\u00e4")}
            self.assertEqual(len(lines), len(wanted))
            if form == "json":
                said = [json.loads(line) for line in lines]
                self.assertEqual({(line["method"], line["path"]) for line in said}, wanted)
                continue
            for method, path in wanted:
                path = re.sub("[\n\x1b]", "?", path)
                self.assertEqual(sum(f" {method} {path} 40" in line for line in lines), 1, lines)

    def test_figures_while_it_ends(self):
        """Connections that ask for figures until the server closes them, and new ones that keep coming."""
        for _ in range(8):
            server = Server("--log", "none")
            began = threading.Barrier(7, timeout=60)

            def ask(connection, path):
                count = 0
                with connection, contextlib.suppress(OSError):
                    while True:
                        connection.sendall(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path)
                        if not read_http(connection)[0]:
                            break
                        count += 1
                        if count == 5:
                            began.wait()

            def ask_anew():
                count = 0
                try:
                    while True:
                        self.assertEqual(server.request("GET", "/ping")[0], 200)
                        count += 1
                        if count == 5:
                            began.wait()
                except (OSError, http.client.HTTPException):
                    pass

            threads = [threading.Thread(target=ask, args=(server.connect(), path))
                       for path in (b"/stats", b"/metrics", b"/stats", b"/health")]
            threads += [threading.Thread(target=ask_anew) for _ in range(2)]
            for thread in threads:
                thread.start()
            began.wait()
            self.assertEqual(server.stop(), 0)
            for thread in threads:
                thread.join()

    def test_second_signal(self):
        server = Server()
        body = json.dumps(dict(LONG, stream=True)).encode()
        with server.connect() as connection:
            connection.sendall(raw_post("/v1/completions", body, sized(body)))
            connection.recv(100)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
            began = time.monotonic()
            self.assertEqual(server.stop(signal.SIGINT), 130)
            self.assertLess(time.monotonic() - began, 2)

    def test_signal_while_it_loads(self):
        """The first ends the process: here within its plan, which a full pipe does not take."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b" " * 4096)
        os.set_blocking(writer, True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen([PROGRAM, "serve", MODEL, "--port", str(port), "--log", "none", *OPTIONS],
                                   stderr=writer)
        self.addCleanup(process.kill)
        status = None
        while status is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            with contextlib.suppress(ConnectionError):
                connection.request("GET", "/health")
                status = connection.getresponse().status
            connection.close()
            self.assertIsNone(process.poll())
        self.assertEqual(status, 503)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        os.read(reader, 1 << 16)  # TSan's _exit() flushes what waits for the pipe
        self.assertEqual(process.wait(PATIENCE), 128 + signal.SIGTERM)
        os.close(reader)
        os.close(writer)


if __name__ == "__main__":
    unittest.main()
