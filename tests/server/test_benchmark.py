"""test_benchmark - scripts/benchmark_serving with a client that is none: what a run that ends early keeps,
what its tables name as lacking, and what --continue measures.

SPDX-License-Identifier: Apache-2.0
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from serving import MODEL, PATIENCE, PROGRAM

# Writes the rows that it is asked for as llama-benchy does, and a line of them to $ASKED. Of the workload
# $HANGS it waits for SIGINT, and gives the rows before it.
CLIENT = """#!%s
import itertools, json, os, signal, sys, time
if "--version" in sys.argv: sys.exit(print("a client"))
def of(name):
    at = sys.argv.index(name) + 1
    return list(itertools.takewhile(lambda word: word[0] != "-", sys.argv[at:]))
rows, hung = [], []
signal.signal(signal.SIGINT, lambda *_: hung.append(1))
for pp, tg, depth, c in itertools.product(of("--pp"), of("--tg"), of("--depth"), of("--concurrency")):
    name = "/".join((pp, tg, depth, c))
    if name == os.environ.get("HANGS"):
        open(os.environ["ASKED"] + ".hangs", "w").close()
        while not hung: time.sleep(0.01)
        break
    with open(os.environ["ASKED"], "a") as file: file.write(name + "\\n")
    rate = {"mean": float(c), "std": 0.5, "values": [float(c)]}
    rows.append({"prompt_size": int(pp), "response_size": int(tg), "context_size": int(depth),
        "concurrency": int(c), "pp_throughput": rate, "tg_throughput": rate, "e2e_ttft": None})
if rows:
    with open(of("--save-result")[0], "w") as file: json.dump({"benchmarks": rows}, file)
sys.exit(len(hung))
""" % sys.executable
SIX = ["8/4/0/1,2", "8/4/16/1,2", "8,16/4/0/4"]
NAMES = ["8/4/0/1", "8/4/0/2", "8/4/16/1", "8/4/16/2", "8/4/0/4", "16/4/0/4"]


def row_name(name):
    return "pp{} tg{} @ d{} c{}".format(*name.split("/"))


class Benchmark(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.out, self.asked = (os.path.join(self.directory.name, name) for name in ("out", "asked"))
        client = os.path.join(self.directory.name, "client")
        with open(client, "w") as file:
            file.write(CLIENT)
        os.chmod(client, 0o755)
        self.command = [sys.executable, "scripts/benchmark_serving", MODEL, "--build",
                        os.path.dirname(PROGRAM), "--client", client, "--kv", "f32,e4m3", "--text-tokens", "48",
                        "--runs", "3", "--serve", "--kv-memory 100MB --max-model-len 1024", "--out", self.out]
        self.environment = dict(os.environ, ASKED=self.asked, HOME=self.directory.name)

    def run_benchmark(self, *options, grid=tuple(SIX)):
        words = [word for axes in grid for word in ("--grid", axes)]
        return subprocess.run([*self.command, *words, *options], capture_output=True, text=True,
                              timeout=PATIENCE, env=self.environment, check=False)

    def names_asked(self):
        with open(self.asked) as file:
            return file.read().split()

    def record(self, setting):
        with open(os.path.join(self.out, setting + ".json")) as file:
            return json.load(file)

    def interrupt_at(self, name):
        """What the client had been asked before, of a run that a signal ends at that workload."""
        words = [word for axes in SIX for word in ("--grid", axes)]
        process = subprocess.Popen([*self.command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env=dict(self.environment, HANGS=name))
        while not os.path.exists(self.asked + ".hangs"):
            self.assertIsNone(process.poll(), "it ended before the workload")
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        told, complaint = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 1, complaint)
        self.assertIn("--continue", complaint)
        return told

    def test_an_interrupted_run_is_continued(self):
        told = self.interrupt_at("8/4/16/2")
        self.assertEqual(self.names_asked(), NAMES[:3])
        self.assertIn("Not measured with f32, 3 of 6: " + ", ".join(map(row_name, NAMES[3:])),
                      " ".join(told.split()))
        self.assertIn("Not measured with e4m3, 6 of 6", told)
        self.assertEqual(len(self.record("f32")["rows"]), 3)
        done = self.run_benchmark("--continue")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.names_asked(), NAMES + NAMES)  # each once a format
        self.assertNotIn("Not measured", done.stdout)
        for name in NAMES:
            self.assertEqual(done.stdout.count(f"| {row_name(name)} | ["), 2, name)
        for setting in ("f32", "e4m3"):
            rows = self.record(setting)["rows"]
            self.assertEqual([row["runs"] for row in rows], [3] * 6)
            self.assertTrue(all(row["behind"]["date"] and row["behind"]["load"] for row in rows))

    def test_time_that_is_over_leaves_tables(self):
        done = self.run_benchmark("--limit", "0.001")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Not measured with f32 and e4m3, 6 of 6", done.stdout)
        for setting in ("f32", "e4m3"):
            self.assertEqual(len(self.record(setting)["greedy"]), 3)
        self.assertFalse(os.path.exists(self.asked))
        done = self.run_benchmark("--continue", grid=["8/4/0/1,2/1"])
        self.assertEqual(self.names_asked(), ["8/4/0/1", "8/4/0/2"] * 2)
        done = self.run_benchmark("--continue", grid=["8/4/0/2,4/2"])  # more runs: measured again
        self.assertEqual(self.names_asked()[4:], ["8/4/0/2", "8/4/0/4"] * 2)
        self.assertEqual([row["runs"] for row in self.record("e4m3")["rows"]], [1, 2, 2])
        self.assertIn(f"| {row_name('8/4/0/1')} | [f32]", done.stdout)  # of the record, not of this grid

    def test_another_build_goes_on_and_is_named(self):
        done = self.run_benchmark("--commit", "1" * 40, grid=["8/4,5/0/1", "8/6/0/1"])
        self.assertEqual(done.returncode, 0, done.stderr)
        for setting, program in (("f32", "old"), ("e4m3", "older")):
            record = self.record(setting)
            self.assertEqual(len(record["client_commands"]), 1)
            record["sessions"][0]["machine"]["program_sha256"] = program
            with open(os.path.join(self.out, setting + ".json"), "w") as file:
                json.dump(record, file)
        done = self.run_benchmark("--continue", "--commit", "2" * 40, grid=["8/4,7/0/1,2"])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.names_asked(), ["8/4/0/1", "8/5/0/1", "8/6/0/1"] * 2 +
                         ["8/4/0/2", "8/7/0/1", "8/7/0/2"] * 2)
        self.assertEqual(len(self.record("f32")["client_commands"]), 3)
        lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| pp")]
        self.assertEqual([line[2] for line in lines], ["1" * 7] * 2 + ["2" * 7] * 6 + ["1" * 7] * 4)
        self.assertEqual([line[6] for line in lines],  # compared where one program gave both
                         ["1.000", "–"] + ["1.000"] * 6 + ["1.000", "–"] * 2)
        for line in lines:
            name = f"{line[1].split(']')[0][1:]}.{line[2][0]}.metrics.txt"
            self.assertIn(f"[figures]({name})", line[1])
            self.assertTrue(os.path.exists(os.path.join(self.out, name)))
        self.assertIn("| e4m3 | 2222222 | ", done.stdout)  # how far answers agree

    def test_what_cannot_go_on_is_refused(self):
        done = self.run_benchmark("--limit", "0.001")
        for options, why in (((), "f32.json is there: --continue"),
                             (("--continue", "--text-tokens", "32"), "text_tokens is 48 and now 32"),
                             (("--continue", "--serve", ""), "serve is --kv-memory")):
            done = self.run_benchmark(*options)
            self.assertEqual(done.returncode, 1)
            self.assertIn(why, done.stderr)
        for word in ("8/4/0", "8/4/0/x", "8/4/0/1/1,2", "8//0/1", "8/4/0/1/2/3"):
            done = self.run_benchmark(grid=[word])
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"{word}: wants PP/TG/DEPTH/CONCURRENCY[/RUNS]", done.stderr)


if __name__ == "__main__":
    unittest.main()
