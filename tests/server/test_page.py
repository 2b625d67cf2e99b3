"""test_page - the page at / in a headless browser, by the WebDriver protocol: ask, stream, stop, edit,
retry, dark and light, a narrow window, the keyboard alone. With KV8_PICTURES=DIR pictures are left
there. Skipped, with the reason, where there is no chromedriver.

SPDX-License-Identifier: Apache-2.0
"""
import base64
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
import unittest

from serving import Server

DRIVER = shutil.which("chromedriver")
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"


class Browser:
    """One window, and the few commands of WebDriver that the tests need."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen([DRIVER, f"--port={self.port}"],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--window-size=1200,800"]
        options = {"goog:chromeOptions": {"args": arguments},
                   "goog:loggingPrefs": {"browser": "ALL"}}
        self.path = ""
        end = time.monotonic() + 60
        while True:
            try:
                session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        self.path = "/session/" + session["sessionId"]

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, self.path + path, json.dumps(body) if body is not None else None)
        value = json.loads(connection.getresponse().read())["value"]
        connection.close()
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(value["error"] + ": " + value["message"].split("\n")[0])
        return value

    def run(self, script):
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def click(self, css):
        found = self.call("POST", "/element", {"using": "css selector", "value": css})
        self.call("POST", f"/element/{next(iter(found.values()))}/click", {})

    def press(self, keys):
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def wait(self, script, seconds=30):
        end = time.monotonic() + seconds
        while not self.run("return " + script):
            if time.monotonic() > end:
                raise AssertionError("did not come true: " + script)
            time.sleep(0.05)

    def picture(self, name):
        folder = os.environ.get("KV8_PICTURES")
        if folder:
            with open(os.path.join(folder, name + ".png"), "wb") as file:
                file.write(base64.b64decode(self.call("GET", "/screenshot")))

    def resize(self, width, height):
        self.call("POST", "/window/rect", {"width": width, "height": height})

    def complaints(self):
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})
                if entry["level"] == "SEVERE"]

    def close(self):
        self.call("DELETE", "")
        self.process.terminate()
        self.process.wait(20)


IDLE = "document.querySelector('#send').textContent === 'Send'"
# An answer goes on until it is stopped, however slow the browser is.
ENDLESS = """const plain = window.fetch;
window.fetch = (path, options) => plain(path, options && options.body ? {...options,
    body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})} : options);"""
LAST = "[...document.querySelectorAll('article.assistant > .text')].at(-1)"


@unittest.skipIf(DRIVER is None, "no chromedriver (package chromium-driver)")
class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--max-model-len", "100000")
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        assert cls.server.stop() == 0

    def setUp(self):
        self.browser.resize(1200, 800)
        self.browser.call("POST", "/url", {"url": f"http://127.0.0.1:{self.server.port}/"})
        self.browser.wait("document.querySelector('#model').textContent === 'tiny-gpt-oss'")

    def tearDown(self):
        self.assertEqual(self.browser.complaints(), [])

    def set(self, name, value):
        self.browser.run(f"document.getElementById('{name}').value = {json.dumps(value)}")

    def ask(self, text):
        self.browser.press(text + ENTER)

    def test_an_answer(self):
        self.set("temperature", "0")
        self.ask("hi")
        self.browser.wait(f"{LAST} && {IDLE}")
        whole = self.server.ask("/v1/chat/completions", temperature=0, max_tokens=512,
                                messages=[{"role": "user", "content": "hi"}])
        text = self.browser.run(f"return {LAST}.textContent")
        self.assertEqual(text, whole["choices"][0]["message"]["content"])
        note = self.browser.run("return document.querySelector('article.assistant .note').textContent")
        self.assertIn(f"{whole['usage']['completion_tokens']} tokens", note)
        self.browser.picture("answer")

    def test_reasoning_stands_apart(self):
        self.set("temperature", "0")
        self.set("system", "pear = 4410\napple = 1517\nplum = 2093")
        self.ask("What is the code for apple?")
        self.browser.wait(f"{LAST} && {IDLE}")
        reasoning = self.browser.run("return document.querySelector('details .text').textContent")
        self.assertTrue(reasoning)
        self.assertNotIn(reasoning, self.browser.run(f"return {LAST}.textContent"))
        self.browser.picture("reasoning")

    def test_stop_retry_edit(self):
        self.browser.run(ENDLESS)
        for name, value in (("max_tokens", "99000"), ("temperature", "2"), ("seed", "1")):
            self.set(name, value)
        self.ask("import os")
        self.browser.wait(f"{LAST} && {LAST}.textContent.length > 40")
        self.browser.wait("Number(document.querySelector('#running').textContent) === 1")
        self.browser.wait("document.querySelector('#pages .private') !== null")
        self.browser.wait("document.querySelectorAll('#pages i').length === 240")
        self.browser.picture("streaming")
        self.browser.press(ESCAPE)
        self.browser.wait(IDLE)
        self.assertEqual(self.browser.run("return document.querySelector('.note').textContent"),
                         "stopped")
        self.browser.wait("Number(document.querySelector('#running').textContent) === 0")
        self.set("max_tokens", "5")
        self.browser.click("article.assistant .acts button")
        self.browser.wait(f"{IDLE} && document.querySelector('.note').textContent.includes('cut short')")
        self.assertEqual(self.browser.run("return document.querySelectorAll('article').length"), 2)
        self.browser.click("article.user .acts button")
        self.assertEqual(self.browser.run("return document.querySelectorAll('article').length"), 0)
        self.assertEqual(self.browser.run("return document.querySelector('#input').value"),
                         "import os")

    def test_refusals_are_shown(self):
        self.set("temperature", "1000")
        self.ask("hi")
        self.browser.wait("document.querySelector('.failed') !== null")
        self.assertIn("temperature", self.browser.run(
            "return document.querySelector('.failed').textContent"))
        self.browser.complaints()  # the browser logs the 400

    def test_text_is_text(self):
        self.set("max_tokens", "1")
        self.ask("<b id=bold>&amp;</b>")
        self.browser.wait(f"{LAST} && {IDLE}")
        self.assertEqual(self.browser.run(
            "return document.querySelector('article.user .text').textContent"),
            "<b id=bold>&amp;</b>")
        self.assertIsNone(self.browser.run("return document.getElementById('bold')"))

    def test_dark_and_light(self):
        def ground():
            return self.browser.run("return getComputedStyle(document.body).backgroundColor")
        before = ground()
        self.browser.click("#theme")
        self.assertNotEqual(ground(), before)
        self.browser.picture("theme")
        self.browser.click("#theme")
        self.assertEqual(ground(), before)

    def test_narrow_window(self):
        self.browser.resize(500, 800)
        width = self.browser.run("return [document.documentElement.scrollWidth, innerWidth]")
        self.assertLessEqual(width[0], width[1])
        shown = "getComputedStyle(document.querySelector('aside')).display"
        self.assertEqual(self.browser.run(f"return {shown}"), "none")
        self.browser.picture("narrow")
        self.browser.click("#side")
        self.assertNotEqual(self.browser.run(f"return {shown}"), "none")
        self.browser.picture("narrow_settings")

    def test_keyboard(self):
        seen = set()
        for _ in range(24):
            self.browser.press(TAB)
            seen.add(self.browser.run("return document.activeElement.id"))
        self.assertLessEqual({"send", "fresh", "theme", "input", "temperature", "system"}, seen)

    def test_nothing_from_elsewhere(self):
        urls = self.browser.run("return performance.getEntries().map(e => e.name)"
                                ".filter(n => n.includes('://'))")
        for url in urls:
            self.assertTrue(url.startswith(f"http://127.0.0.1:{self.server.port}/"), url)


if __name__ == "__main__":
    if DRIVER is None:
        print("SKIPPED: the page: no chromedriver (package chromium-driver)")
    unittest.main()
