"""test_http - HTTP as clients and proxies send it, on raw sockets where a library would be too well
behaved; errors, ids, and clients that go.

SPDX-License-Identifier: Apache-2.0
"""
import contextlib
import ctypes
import itertools
import json
import os
import re
import socket
import threading
import time
import unittest

from serving import ServerTest, raw_post, read_http, sized

SHORT = {"prompt": "x", "max_tokens": 2, "temperature": 0}
LONG = {"prompt": "x", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"  # of a chunked body; 512 are what is taken


def library_version():
    version = ctypes.CDLL("libmicrohttpd.so.12").MHD_get_version
    version.restype = ctypes.c_char_p
    return version()


# libmicrohttpd since 1.0 refuses more by itself, with a page instead of an error object.
LIBRARY_IS_OLD = library_version().startswith(b"0.")

METRICS = dict(
    [(f"vllm:{name}", "gauge") for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")] +
    [(f"vllm:{name}_total", "counter") for name in (
        "prompt_tokens", "generation_tokens", "request_success", "num_preemptions",
        "prefix_cache_queries", "prefix_cache_hits")] +
    [(f"vllm:{name}", "histogram") for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens")] +
    [(f"kv8:{name}", "gauge") for name in ("kv_pages", "kv_pool_bytes", "kv_pool_tokens")] +
    [(f"kv8:{name}_total", "counter") for name in (
        "steps", "step_seconds", "step_read_bytes", "kv_clip", "kv_nan")])


def open_files(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def wait_until(check, seconds=20):
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise AssertionError("did not come true in time")
        time.sleep(0.02)


class Http(ServerTest):
    def exchange(self, data):
        with self.server.connect() as connection:
            connection.sendall(data)
            return read_http(connection)

    def test_plain_routes(self):
        for path in ("/health", "/ping"):
            status, headers, body = self.server.request("GET", path)
            self.assertEqual((status, body), (200, b""))
        status, _, body = self.server.request("GET", "/version")
        self.assertRegex(json.loads(body)["version"], r"^\d+\.\d+\.\d+$")
        for path in ("/v1/models", "/models"):
            models = json.loads(self.server.request("GET", path)[2])
            self.assertEqual(models["object"], "list")
            self.assertEqual(models["data"][0]["id"], "tiny-gpt-oss")
            for key in ("object", "created", "owned_by", "root", "parent", "max_model_len"):
                self.assertIn(key, models["data"][0])
        one = json.loads(self.server.request("GET", "/v1/models/tiny-gpt-oss")[2])
        self.assertEqual(one, models["data"][0])
        status, _, body = self.server.request("GET", "/v1/models/other")
        self.assertEqual((status, json.loads(body)["error"]["code"]), (404, "model_not_found"))
        self.assertEqual(self.server.request("GET", "/")[1]["Content-Type"],
                         "text/html; charset=utf-8")

    def test_metrics(self):
        """Every name that dashboards and gateways read, and what its figures say of a request."""
        before = self.metrics()
        self.server.ask("/v1/completions", prompt="x = 1\ny = 2\n", max_tokens=5, ignore_eos=True)
        last = "vllm:request_generation_tokens_count"  # counted once the answer is away
        wait_until(lambda: self.metrics()[last] > before[last])
        after = self.metrics()

        def grown(name, labels=""):
            return after[name + labels] - before[name + labels]

        for name, about in METRICS.items():
            self.assertEqual(self.types[name], about, name)
        self.assertEqual(grown("vllm:generation_tokens_total"), 5)
        self.assertEqual(grown("vllm:request_success_total", ',finished_reason="length"'), 1)
        self.assertEqual(grown("vllm:request_generation_tokens_sum"), 5)
        times = [grown(f"vllm:{name}_seconds_sum") for name in (
            "request_queue_time", "request_prefill_time", "time_to_first_token", "request_decode_time",
            "request_inference_time", "e2e_request_latency")]
        queue, prefill, first, decode, inference, whole = times
        self.assertGreater(prefill, 0)
        self.assertAlmostEqual(queue + prefill, first, places=6)
        self.assertAlmostEqual(prefill + decode, inference, places=6)
        self.assertLessEqual(first + decode, whole)
        self.assertGreater(grown("kv8:step_read_bytes_total"), 5e6)
        pool = [key for key in after if key.startswith("vllm:cache_config_info")]
        self.assertRegex(pool[0], r',block_size="16",num_gpu_blocks="\d+",cache_dtype="f32"$')
        pages = int(re.search(r'num_gpu_blocks="(\d+)"', pool[0])[1])
        self.assertEqual(pages, int(after['kv8:kv_pool_tokens,format="f32"']) // 16)
        for name in (name for name, about in METRICS.items() if about == "histogram"):
            counts = [value for key, value in after.items() if key.startswith(name + "_bucket,")]
            self.assertEqual(counts, sorted(counts), name)
            self.assertEqual(counts[-1], after[name + "_count"], name)

    def metrics(self):
        """Values by name and labels behind the model's; self.types by name."""
        text = self.server.request("GET", "/metrics")[2].decode()
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        return {name + labels: float(value) for name, labels, value in re.findall(
            r'^(\S+){model_name="tiny-gpt-oss"([^}]*)} (\S+)$', text, re.M)}

    def test_tokens(self):
        answer = self.server.ask("/tokenize", prompt="def f():", add_special_tokens=True,
                                 return_token_strs=True)
        self.assertEqual(answer["count"], len(answer["tokens"]))
        self.assertEqual("".join(answer["token_strs"]), "def f():")
        self.assertEqual(answer["max_model_len"], 8192)
        self.assertEqual(self.server.ask("/detokenize", tokens=answer["tokens"]),
                         {"prompt": "def f():"})
        self.assertEqual(self.server.ask("/tokenize", prompt="")["tokens"], [])
        self.assertEqual(self.server.ask("/detokenize", tokens=[])["prompt"], "")
        self.refused("/tokenize", 400, "prompt", prompt=5)
        self.refused("/detokenize", 400, "tokens", tokens="x")
        self.refused("/detokenize", 400, "tokens", tokens=[123456])

    def test_methods(self):
        for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"),
                             ("PUT", "/health"), ("POST", "/metrics")):
            status, headers, body = self.server.request(method, path, "" if method != "GET" else None)
            self.assertEqual(status, 405, (method, path))
            self.assertIn("OPTIONS", headers["Allow"])
            self.assertEqual(json.loads(body)["error"]["code"], "method_not_allowed")
        for path in ("/nothing", "/v1/health", "/v1", "/v1/models/", "/v1/completions/x"):
            self.assertEqual(self.server.request("GET", path)[0], 404, path)

    def test_head_has_no_body(self):
        with self.server.connect() as connection:
            connection.sendall(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
                               b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
            data = b""
            while data.count(b"HTTP/1.1 200") < 2:
                data += connection.recv(65536)
        self.assertNotIn(b"tiny-gpt-oss", data)
        self.assertIn(b"Content-Type: application/json", data)

    def test_cross_origin(self):
        status, headers, body = self.server.request(
            "OPTIONS", "/v1/chat/completions", None,
            {"Origin": "http://a", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,x-stainless-os"})
        self.assertEqual((status, body), (204, b""))
        self.assertIn("POST", headers["Access-Control-Allow-Methods"])
        self.assertEqual(headers["Access-Control-Allow-Headers"], "authorization,x-stainless-os")
        for path in ("/v1/models", "/nothing"):
            headers = self.server.request("GET", path, None, {"Origin": "http://a"})[1]
            self.assertEqual(headers["Access-Control-Allow-Origin"], "*")

    def test_request_ids(self):
        headers = self.server.request("GET", "/ping", None, {"X-Request-Id": "mine-17"})[1]
        self.assertEqual(headers["X-Request-Id"], "mine-17")
        ids = {self.server.request("GET", "/ping", None, given)[1]["X-Request-Id"]
               for given in ({}, {}, {"X-Request-Id": "x" * 200}, {"X-Request-Id": "a b"})}
        self.assertEqual({len(i) for i in ids}, {32})
        self.assertEqual(len(ids), 4)

    def test_expect_continue(self):
        body = json.dumps(SHORT).encode()
        with self.server.connect() as connection:
            connection.sendall(raw_post("/v1/completions", b"", sized(body), "Expect: 100-continue"))
            self.assertEqual(connection.recv(25), b"HTTP/1.1 100 Continue\r\n\r\n")
            connection.sendall(body)
            self.assertIn("200", read_http(connection)[0])
        # Refused before the body is sent.
        line, _, _ = self.exchange(raw_post("/v1/nothing", b"", sized(body), "Expect: 100-continue"))
        self.assertIn("404", line)
        line, _, _ = self.exchange(raw_post("/v1/completions", b"", "Content-Length: 99999999999",
                                            "Expect: 100-continue"))
        self.assertIn("413", line)

    def test_chunked_bodies(self):
        body = json.dumps(SHORT).encode()
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c)
                          for c in (body[:1], body[1:9], body[9:])) + b"0\r\n\r\n"
        line, _, answer = self.exchange(
            raw_post("/v1/completions", chunks, "Transfer-Encoding: chunked"))
        self.assertIn("200", line)
        self.assertEqual(json.loads(answer)["object"], "text_completion")

    def test_bodies_in_pieces(self):
        body = json.dumps(SHORT).encode()
        with self.server.connect() as connection:
            for byte in raw_post("/v1/completions", body, sized(body)):
                connection.sendall(bytes([byte]))
            self.assertIn("200", read_http(connection)[0])

    def test_pipelining(self):
        body = json.dumps(SHORT).encode()
        stream = json.dumps(dict(SHORT, stream=True)).encode()
        with self.server.connect() as connection:
            connection.sendall(raw_post("/v1/completions", body, sized(body)) +
                               b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" +
                               raw_post("/v1/completions", stream, sized(stream)) +
                               b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            data = b""
            while b'"version"' not in data:
                data += connection.recv(65536)
        self.assertEqual(data.count(b"HTTP/1.1 200 OK"), 4)
        order = [data.index(part) for part in (b"text_completion", b'"list"', b"[DONE]",
                                               b'"version"')]
        self.assertEqual(order, sorted(order))

    def test_ambiguous_lengths(self):
        """No two readings of one request: what follows it is not taken for another."""
        hidden = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
        for headers in (["Content-Length: 5", "Content-Length: 6"],
                        ["Content-Length: 5", "Content-Length: 5"],
                        ["Content-Length: 5", "Transfer-Encoding: chunked"],
                        ["Transfer-Encoding: chunked", "Content-Length: 5"],
                        ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
                        ["Transfer-Encoding: identity"], ["Transfer-Encoding: xchunked"],
                        ["Transfer-Encoding: chunked, identity"], ["Transfer-Encoding: gzip, chunked"],
                        ["Content-Length: +5"], ["Content-Length: 0x5"], ["Content-Length: 5, 5"],
                        ["Content-Length: -1"], ["Content-Length: "],
                        ["Content-Length: 99999999999999999999999"],
                        ["Content-Length : 5"], ["Transfer-Encoding : chunked"]):
            data = self.everything(raw_post("/v1/completions", b"0\r\n\r\n" + hidden, *headers))
            self.assertRegex(data, rb"^HTTP/1.1 4(00|13) ", headers)
            self.assertNotIn(b" 200 ", data, headers)
            self.assertNotIn(b'"list"', data, headers)

    def test_headers_of_two_readings(self):
        """Refused with an error object, and the connection ends: what is behind is not read."""
        hidden = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
        for headers in (["Content-Length:\r\n 5"], ["Content-Length:\r\n\t5"],
                        ["Content-Length: 3\r\n 0"], ["Content-Len: 5\r\n gth"],
                        ["Content-Length:\r\n 5", "Content-Length: 30"],
                        ["Transfer-Encoding:\r\n chunked"], ["Transfer-Enc: chunked\r\n oding"],
                        ["Transfer-Encoding:\r\n chunked", "Content-Length: 5"],
                        ["Content-Length: 5", "Transfer-Encoding:\r\n chunked"],
                        ["Content-Length: 5", "X: a\r\n b"], ["Content-Length: 5", "X: a\r\n b\r\n c"],
                        ["X: a\rTransfer-Encoding: chunked", "Content-Length: 5"],
                        ["X: a\x01", "Content-Length: 5"], ["X\x0bY: a", "Content-Length: 5"],
                        ["X(: a", "Content-Length: 5"], ["Content-Length: 5\nX: a"],
                        ["X: a\nContent-Length: 5"], ["Content-Length: 5", "X: a\n"],
                        [": a", "Content-Length: 5"], ["Content-Length: 5", "X: a", ": b", "X: c"],
                        ["Content-Length: 5", "X: a\x00b"], ["Host: b", "Content-Length: 5"]):
            data = self.everything(raw_post("/v1/completions", b"0\r\n\r\n" + hidden, *headers))
            self.refuses(data, "invalid_header", headers)
        for method in (b"G\x08ET", b"G\xf0T", b"G(T", b"(GET"):
            self.refuses(self.everything(method + b" /version HTTP/1.1\r\nHost: a\r\n\r\n" + hidden),
                         "invalid_header")
        for lines in (b" HTTP/1.1\r\nX: a\r\n\r\n", b" HTTP/1.1\nHost: a\r\n\r\n",
                      b" HTTP/1.1\r\nHost: a\n\r\n", b" HTTP/1.1\r\nHost: a\r\n\n"):
            self.refuses(self.everything(b"GET /version" + lines + hidden), "invalid_header")
        self.refuses(self.everything(
            b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden),
            "ambiguous_length")

    def test_headers_of_all_kinds(self):
        """What RFC 9110 allows is taken, wherever it stands."""
        for header in (b"X: a  ", b"X: a\t", b"X:", b"X: ", b"X:\t a\tb", b"X: caf\xc3\xa9", b"X: \xff",
                       b"X:a:b:c", b"Cookie: a=\"b\"; c=\xff", b"x_y.z~!#$%&'*+-^`|: 1",
                       b"X: " + b"y" * 9000, b"\r\n".join(b"H%d: %d" % (i, i) for i in range(200)),
                       b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQA"):
            for lines in ([b"Host: a", header], [header, b"Host: a"]):
                first = b"\r\n".join([b"GET /version?a=%20b HTTP/1.1", *lines, b""])
                data = self.everything(first + b"\r\n" + first + b"Connection: close\r\n\r\n")
                self.assertEqual(data.count(b"HTTP/1.1 200"), 2, (lines, data))

    def test_long_headers(self):
        """More of them than libmicrohttpd reads at first, in one piece and in many."""
        body = json.dumps(SHORT).encode()
        request = raw_post("/v1/completions?" + "a=%41&" * 9, body, sized(body),
                           *(f"X-{i}: {'x' * 1700}" for i in range(12)))
        for size in (len(request), 1000):
            with self.server.connect() as connection:
                for at in range(0, len(request), size):
                    connection.sendall(request[at:at + size])
                    time.sleep(0.001)
                self.assertIn("200", read_http(connection)[0], size)

    def test_lines_of_chunks(self):
        """One that a lone line feed ends is refused, or nothing behind the body is read."""
        hidden = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
        for body in (b"2\n{}\r\n0\r\n\r\n", b"2\r\n{}\n0\r\n\r\n", b"2\r\n{}\r\n0\n\n",
                     b"2;\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n\n"):
            data = self.everything(raw_post("/v1/completions", body + hidden,
                                            "Transfer-Encoding: chunked"))
            self.assertRegex(data, rb"^HTTP/1.1 400 ", body)
            self.assertNotIn(b'"list"', data, body)

    def test_trailers(self):
        """They are passed over, and end the connection: libmicrohttpd may see too early an end."""
        body = json.dumps(SHORT).encode()
        chunk = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
        hidden = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
        for trailers in (b"X: a\r\n\r\n", b"X: a\r\n b\r\n\r\n", b"X: a\r\n: b\r\n"):
            is_plain = trailers.count(b":") == 1 and b" b" not in trailers
            data = self.everything(raw_post(
                "/v1/completions", chunk + trailers + hidden, "Transfer-Encoding: chunked"))
            self.assertNotIn(b'"list"', data)
            if is_plain or LIBRARY_IS_OLD:
                self.assertEqual(data.count(b"HTTP/1.1 200"), 1, (trailers, data))
                self.assertIn(b"text_completion", data)
            else:
                self.refuses(data, None)

    def refuses(self, data, code, about=None):
        """One answer of 400, which ends the connection."""
        self.assertEqual(re.findall(rb"HTTP/1\.1 \d+", data), [b"HTTP/1.1 400"], (about, data))
        self.assertRegex(data, rb"(?i)\r\nconnection: close\r\n", about)
        body = data.split(b"\r\n\r\n", 1)[1]
        if LIBRARY_IS_OLD or not body.startswith(b"<html>"):
            self.assertEqual(json.loads(body)["error"]["code"], code, about)

    def everything(self, request):
        """What comes until the server closes the connection."""
        data = b""
        with self.server.connect() as connection:
            try:
                connection.sendall(request)
                while more := connection.recv(65536):
                    data += more
            except (ConnectionResetError, BrokenPipeError):
                pass
        return data

    def test_targets(self):
        """Absolute ones, as proxies send them; one for the whole server; none."""
        def get(target, method="GET"):
            return self.exchange(f"{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())

        for target in ("/version", "http://host/version", "HTTPS://host:80/version?x=1"):
            line, _, body = get(target)
            self.assertIn("200", line, target)
            self.assertIn("version", json.loads(body), target)
        self.assertIn("200", get("http://host/v1/models/tiny-gpt-oss")[0])
        for target in ("http://host", "http://host?x=/version"):
            self.assertEqual(get(target)[1]["content-type"], "text/html; charset=utf-8", target)
        self.assertIn("404", get("ftp://host/version")[0])
        for target, allow in (("*", "GET, HEAD, POST, OPTIONS"), ("/version", "GET, HEAD, OPTIONS")):
            line, headers, _ = get(target, "OPTIONS")
            self.assertIn("204", line)
            self.assertEqual(headers["allow"], allow)
        self.assertIn("404", get("*")[0])
        for target in ("/version /x", "/version?a b", "/version\rX:", "http://a%2Fversion/x"):
            self.refuses(self.everything(
                f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n".encode()),
                "invalid_target", target)

    def test_bytes_that_are_no_characters(self):
        """Of what an error names; cut in two by the length that it names at most, too."""
        for path in (b"/%ff", b"/\xff", b"/v1/models/%ff", b"/v1/models/a" + b"%c3%a4" * 150):
            line, _, body = self.exchange(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            self.assertIn("404", line, path)
            self.assertIn("?", json.loads(body)["error"]["message"])
        self.refuses(self.everything(raw_post("/v1/completions", b"").replace(
            b"\r\n\r\n", b"\r\nTransfer-Encoding: \xff\r\n\r\n")), "ambiguous_length")
        body = json.dumps(dict(SHORT, model="a" + "\u00e4" * 150)).encode()
        line, _, answer = self.exchange(raw_post("/v1/completions", body, sized(body)))
        self.assertIn("404", line)
        self.assertIn("?\" is not served", json.loads(answer)["error"]["message"])

    def test_bodies_too_large(self):
        line, headers, _ = self.exchange(
            raw_post("/v1/completions", b"", "Content-Length: 100000000"))
        self.assertIn("413", line)
        self.assertEqual(headers["connection"].lower(), "close")
        line, _, answer = self.exchange(raw_post(
            "/v1/completions", CHUNK * 520 + b"0\r\n\r\n", "Transfer-Encoding: chunked"))
        self.assertIn("413", line)
        self.assertEqual(json.loads(answer)["error"]["code"], "body_too_large")

    def test_bodies_without_end(self):
        """The answer comes once the limit is passed, the connection ends soon after; also where the
        answer is settled by the headers."""
        for path in ("/v1/completions", "/v1/nothing"):
            with self.server.connect() as connection:
                connection.sendall(raw_post(path, CHUNK * 513, "Transfer-Encoding: chunked"))
                line, headers, answer = read_http(connection)
                self.assertIn("413", line)
                self.assertEqual(headers["connection"], "close")
                self.assertEqual(json.loads(answer)["error"]["code"], "body_too_large")
                with self.assertRaises(OSError):
                    for _ in range(3000):
                        connection.sendall(CHUNK)
        data = self.everything(raw_post("/v1/completions", CHUNK * 520 + b"0\r\n\r\n",
                                        "Transfer-Encoding: chunked") +
                               b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        self.assertEqual(data.count(b"HTTP/1.1 "), 1)

    def test_http_1_0(self):
        body = json.dumps(dict(SHORT, stream=True)).encode()
        with self.server.connect() as connection:
            connection.sendall(f"POST /v1/completions HTTP/1.0\r\n{sized(body)}\r\n\r\n".encode() +
                               body)
            data = b""
            while more := connection.recv(65536):
                data += more
        self.assertNotIn(b"chunked", data)
        self.assertTrue(data.endswith(b"data: [DONE]\n\n"))

    def test_a_chunk_is_an_event(self):
        body = json.dumps(dict(SHORT, max_tokens=20, stream=True, ignore_eos=True)).encode()
        with self.server.connect() as connection:
            connection.sendall(raw_post("/v1/completions", body, sized(body)))
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += connection.recv(65536)
        at, chunks = data.index(b"\r\n\r\n") + 4, []
        while True:
            end = data.index(b"\r\n", at)
            size = int(data[at:end], 16)
            if size == 0:
                break
            chunks.append(data[end + 2:end + 2 + size])
            at = end + 4 + size
        self.assertEqual(len(chunks), 21)
        for chunk in chunks:
            self.assertTrue(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n"))
            self.assertEqual(chunk.count(b"\n\n"), 1)

    def test_clients_that_go_leave_nothing(self):
        """Before the first token, within a stream, while waiting for a whole answer."""
        for stream in (False, True):
            body = json.dumps(dict(LONG, stream=stream)).encode()
            connections = [self.server.connect() for _ in range(6)]
            for connection in connections:
                connection.sendall(raw_post("/v1/completions", body, sized(body)))
            wait_until(lambda: self.server.metric("vllm:num_requests_running") == 6)
            if stream:
                self.assertIn(b"200 OK", connections[0].recv(100))
            for connection in connections:
                connection.close()
            wait_until(lambda: self.server.metric("vllm:num_requests_running") == 0, 5)
            self.assertEqual(self.server.metric("vllm:kv_cache_usage_perc"), 0)

    def test_bodies_cut_off_leave_no_connection(self):
        """The end comes with the last bytes: libmicrohttpd hears of both at once."""
        before = open_files(self.server)
        for _ in range(50):
            with self.server.connect() as connection:
                connection.sendall(raw_post("/v1/completions", b"{", "Content-Length: 9999"))
        wait_until(lambda: open_files(self.server) < before + 5, 5)

    def test_chunks_cut_off_leave_no_connection(self):
        before = open_files(self.server)
        for _ in range(50):
            with self.server.connect() as connection:
                connection.sendall(raw_post("/v1/completions", CHUNK, "Transfer-Encoding: chunked"))
        wait_until(lambda: open_files(self.server) < before + 5, 5)

    def test_streams_cut_off_leave_no_connection(self):
        """Nor do they while connections that were there before say nothing."""
        body = json.dumps(dict(LONG, stream=True)).encode()
        before = open_files(self.server)
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(self.server.connect()).sendall(b"GET /")
            for _ in range(20):
                with self.server.connect() as connection:
                    connection.sendall(raw_post("/v1/completions", body, sized(body)))
                    connection.recv(100)
            wait_until(lambda: open_files(self.server) < before + 25, 10)

    def test_readers_that_do_not_read(self):
        body = json.dumps(dict(LONG, max_tokens=2000, stream=True)).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", self.server.port))
            slow.sendall(raw_post("/v1/completions", body, sized(body)))
            self.assertEqual(self.server.post("/v1/completions", SHORT)[0], 200)
            data = b""
            while b"[DONE]" not in data:
                data = data[-100:] + slow.recv(65536)


class Abuse(ServerTest):
    """Over a pool so small that all of it is in use soon: what grows then is no page of it."""
    OPTIONS = ("--kv-memory", "24MB", "--max-model-len", "1024", "--max-num-seqs", "8")

    HUGE = (raw_post("/v1/completions", b" " * (33 << 20), f"Content-Length: {33 << 20}"),
            raw_post("/v1/completions", CHUNK * 528 + b"0\r\n\r\n", "Transfer-Encoding: chunked"),
            raw_post("/v1/completions", CHUNK * 528, "Transfer-Encoding: chunked"))

    @staticmethod
    def bodies():
        def asking(**fields):
            body = json.dumps(dict(LONG, max_tokens=500, **fields)).encode()
            return raw_post("/v1/completions", body, sized(body))

        return [b"{", b"\xff" * 500, b"GARBAGE\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n",
                raw_post("/v1/completions", b"{}", "Content-Length: 2"),
                raw_post("/v1/completions", b"{", "Content-Length: 9999"),
                raw_post("/v1/completions", b"zz\r\n", "Transfer-Encoding: chunked"),
                b"GET /" + b"x" * 40000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
                b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9000 + b"\r\n",
                raw_post("/v1/completions", b" " * 1000, "Content-Length: 99999999999"),
                *Abuse.HUGE,
                raw_post("/v1/completions", b"[" * (64 << 10), sized(b"[" * (64 << 10))),
                asking(prompt="too long " * 2000), asking(prompt="x" * 1024, stream=True),
                asking(stream=True, n=3), asking(stream=True, logprobs=5), asking(echo=True)]

    def resident_bytes(self):
        with open(f"/proc/{self.server.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def abuse(self, stop, seed):
        """Sends every body in turn and goes: at once, at a first answer, or reading slowly."""
        bodies = self.bodies()
        for i in itertools.count(seed):
            if stop.is_set():
                break
            try:
                with self.server.connect() as connection:
                    connection.settimeout(0.1)
                    connection.sendall(bodies[i % len(bodies)])
                    for _ in range((0, 1, 20)[i % 3]):
                        connection.recv(100)
                        stop.wait(0.01)
            except OSError:
                pass

    def test_huge_bodies(self):
        """More bytes than are taken, all of them sent: 413, and nothing of them stays."""
        def send(request):
            with self.server.connect() as connection:
                try:
                    connection.sendall(request)
                except OSError:  # refused by its length, before it is all sent
                    pass
                self.assertIn("413", read_http(connection)[0])

        for request in self.HUGE:
            send(request)
        before = self.resident_bytes()
        for request in self.HUGE * 3:
            send(request)
        self.assertLess(self.resident_bytes(), before + (16 << 20))
        self.assertEqual(len(self.server.ask("/v1/completions", **SHORT)["choices"]), 1)

    def work_beside_abuse(self, seconds):
        """Returns the server's resident bytes after it."""
        stop = threading.Event()
        threads = [threading.Thread(target=self.abuse, args=(stop, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        begin, num = time.monotonic(), 0
        try:
            while num < 15 or time.monotonic() - begin < seconds:
                self.assertEqual(self.server.ask("/v1/completions", **SHORT)["choices"][0]["text"],
                                 self.wanted)
                num += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        wait_until(lambda: self.server.metric("vllm:kv_cache_usage_perc") == 0)
        return self.resident_bytes()

    def test_abuse_beside_work(self):
        """Thirty requests, and as many more as KV8_ABUSE_SECONDS hold: memory is then flat."""
        self.wanted = self.server.ask("/v1/completions", **SHORT)["choices"][0]["text"]
        seconds = float(os.environ.get("KV8_ABUSE_SECONDS", 0)) / 2
        middle, end = (self.work_beside_abuse(seconds) for _ in range(2))
        if seconds >= 30:
            wait_until(lambda: self.resident_bytes() < middle + (16 << 20), 60)
            print(f"{middle >> 20} MiB in the middle, {end >> 20} at the end")


if __name__ == "__main__":
    unittest.main()
