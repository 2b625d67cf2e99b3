"""check_stops [N] - N starts of kv8 serve and N ends amid work: clients that come, read streams and vanish
when SIGTERM does. Every second one under strace, where that is installed: it stops threads at their
calls of the system, so that orders come which else take thousands of tries. KV8_PROGRAM is the program.

SPDX-License-Identifier: Apache-2.0
"""
import http.client
import json
import random
import shutil
import sys
import threading
import time

from serving import Server

OPTIONS = ["--kv-memory", "40MB", "--max-model-len", "512", "--max-num-seqs", "8", "--threads", "1", "--log", "none"]
# -D: the program is the child, not strace. A sanitizer of leaks does not work beside it.
STRACE = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-E", "LSAN_OPTIONS=detect_leaks=0",
          "-e", "trace=epoll_wait,epoll_ctl,write,sendto,recvfrom"]
NUM_CLIENTS = 6


def ask_until(is_over, server, chance):
    """One request after another, each on a connection of its own; two of five are left at once."""
    while not is_over.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": "hello", "max_tokens": chance.choice((1, 20, 60)), "ignore_eos": True,
                "stream": chance.random() < 0.7}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            if chance.random() < 0.4:
                time.sleep(chance.random() * 0.03)
            else:
                connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            time.sleep(0.002)  # it ends
        finally:
            connection.close()


def end_once(number):
    """The exit status of one server."""
    chance = random.Random(number)
    server = Server(options=OPTIONS, under=STRACE if number % 2 == 1 and shutil.which("strace") else ())
    is_over = threading.Event()
    clients = [threading.Thread(target=ask_until, args=(is_over, server, random.Random(f"{number}.{i}")))
               for i in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(chance.random() * 0.3)
    try:
        status = server.stop()
    finally:
        is_over.set()
        for client in clients:
            client.join()
    if status != 0:
        print(f"server {number} ended with {status}: {''.join(server.lines[-3:])}", file=sys.stderr)
    return status


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    num_bad = sum(end_once(number) != 0 for number in range(count))
    if not shutil.which("strace"):
        print("check_stops: SKIPPED the orders that strace brings: it is not on this machine")
    print(f"check_stops: {count} servers ended amid work, {num_bad} not as they should")
    return 1 if num_bad > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
