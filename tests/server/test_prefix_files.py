"""test_prefix_files - kv8 serve --snapshot-dir: a prompt of the run before is found after a restart,
whole or refused by name, whatever became of the process while it wrote.

SPDX-License-Identifier: Apache-2.0
"""
import glob
import os
import random
import signal
import tempfile
import time
import unittest

from serving import Server

PROMPTS = [[7 + (i * (k + 3)) % 1000 for i in range(350 + 30 * k)] for k in range(6)]


class PrefixFiles(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()

    def tearDown(self):
        self.folder.cleanup()

    def serve(self, *options):
        server = Server("--snapshot-dir", self.folder.name, *options)
        self.addCleanup(server.process.kill)
        return server

    def files(self):
        return sorted(glob.glob(self.folder.name + "/*/*"))

    @staticmethod
    def ask(server, prompt):
        """(tokens of the prompt that were found, the answer)."""
        answer = server.ask("/v1/completions", prompt=prompt, max_tokens=20, temperature=0,
                            ignore_eos=True)
        return (answer["usage"]["prompt_tokens_details"]["cached_tokens"],
                answer["choices"][0]["text"])

    def test_found_after_a_restart(self):
        first = self.serve()
        texts = [self.ask(first, prompt)[1] for prompt in PROMPTS]
        self.assertEqual(first.stop(), 0)
        whole = self.files()
        self.assertGreaterEqual(len(whole), len(PROMPTS))
        for _ in range(2):  # nothing is written anew where nothing was added
            before = [os.stat(path).st_ino for path in whole]
            again = self.serve()
            for prompt, text in zip(PROMPTS, texts):
                found, same = self.ask(again, prompt)
                self.assertEqual(found, (len(prompt) - 1) // 16 * 16)
                self.assertEqual(same, text)
            self.assertEqual(again.stop(), 0)
            self.assertEqual([os.stat(path).st_ino for path in whole], before)
        self.assertEqual(self.files(), whole)

    def test_salts_and_other_settings_stay_apart(self):
        first = self.serve()
        first.ask("/v1/completions", prompt=PROMPTS[0], max_tokens=1, cache_salt="mine")
        self.ask(first, PROMPTS[1])
        self.assertEqual(first.stop(), 0)
        other = self.serve("--kv", "bf16")
        self.assertEqual(self.ask(other, PROMPTS[1])[0], 0)
        self.assertEqual(other.stop(), 0)
        again = self.serve()
        self.assertEqual(self.ask(again, PROMPTS[0])[0], 0)
        self.assertGreater(self.ask(again, PROMPTS[1])[0], 0)
        self.assertEqual(again.stop(), 0)

    def test_altered_files_are_refused(self):
        first = self.serve()
        for prompt in PROMPTS[:2]:
            self.ask(first, prompt)
        self.assertEqual(first.stop(), 0)
        path = max(self.files(), key=os.path.getsize)
        with open(path, "r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))
        again = self.serve()
        self.assertTrue(any("refused" in line and path in line and "checksum" in line
                            for line in again.lines), again.lines)
        found = [self.ask(again, prompt)[0] for prompt in PROMPTS[:2]]
        self.assertEqual(min(found), 0)
        self.assertGreater(max(found), 0)
        self.assertEqual(again.stop(), 0)
        last = self.serve()
        self.assertGreater(min(self.ask(last, prompt)[0] for prompt in PROMPTS[:2]), 0)
        self.assertEqual(last.stop(), 0)

    def unfinished(self):
        return [path for path in self.files() if not path.endswith(".kv8")]

    def test_killed_while_writing(self):
        """Whatever is killed at whatever moment: what was on disk is, and every file is whole."""
        first = self.serve()
        self.ask(first, PROMPTS[0])
        self.assertEqual(first.stop(), 0)
        delays = random.Random(1)
        hits = 0
        for prompt in PROMPTS[1:] * 2:
            server = self.serve()
            self.assertFalse(any("refused" in line for line in server.lines), server.lines)
            self.assertGreater(self.ask(server, PROMPTS[0])[0], 0)
            self.ask(server, [prompt[0] + hits] + prompt[1:])
            server.process.send_signal(signal.SIGTERM)
            while server.process.poll() is None and not self.unfinished():
                pass
            time.sleep(delays.uniform(0, 0.001))
            server.stop(signal.SIGKILL)
            hits += bool(self.unfinished())
        self.assertGreater(hits, 0, "no write was ever under way")
        last = self.serve()
        self.assertGreater(self.ask(last, PROMPTS[0])[0], 0)
        self.assertEqual(last.stop(), 0)
        self.assertFalse(self.unfinished())


if __name__ == "__main__":
    unittest.main()
