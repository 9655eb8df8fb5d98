"""50 clients of `lazyllm serve` for SOAK_SECONDS (300), on the demonstration model: part of `make soak`.

Whole and streamed answers under several settings, clients that leave and clients that are killed. Each
answer must be that of `llm.generate` alone, the only error is 429, and at rest the server's memory, threads
and files must not grow. Before that, the seconds to the first piece of text over HTTP and of `llm.stream`.
"""

import http.client
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from serving import free_port, wait_for

import lazyllm

SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
CLIENTS, ROUND, LEAST_ROUNDS = 50, 15, 6  # seconds between rests
WARM_UP = 1 / 3  # of the rounds
CACHE = 64 << 20  # bytes of shared beginnings; how many it holds at rest differs from round to round
MOST_GROWTH = CACHE + (4 << 20)  # bytes; the page's points of the last hour take up to 2 MiB
PAIRS, MOST_SECONDS = 21, 0.010  # that HTTP may add to the first piece of text
LINGER = struct.pack("ii", 1, 0)  # a close that sends a reset
TEXT = "The harbour master wrote down every ship that came in that year, and the name of its captain. "
SETTINGS = [None, "2x", "1.5x", {"6": 0.6, "15": 0.3}, "dense"]
KILLED = """
import socket, sys, time
server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
server.sendall(sys.argv[2].encode())
print(server.recv(1), flush=True)
time.sleep(60)
"""


def request(port: int, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def text_of(answer: bytes, stream: bool) -> str:
    if not stream:
        (choice,) = json.loads(answer)["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.splitlines() if line[:7] == b"data: {"]
    choices = [choice for event in events for choice in event["choices"]]
    assert answer.endswith(b"data: [DONE]\n\n"), answer[-200:]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def cases(llm: lazyllm.LLM) -> list[tuple[dict[str, Any], str]]:
    """Bodies of requests, and the answers of `generate`."""
    made: list[tuple[dict[str, Any], str]] = []
    for i in range(20):
        text = TEXT * (2 + i) + f"Which ship came {i} days later?"
        setting, sampled = SETTINGS[i % len(SETTINGS)], i % 3 == 0
        prompt: Any = [{"role": "user", "content": text}] if i % 2 else text
        body = {"messages" if i % 2 else "prompt": prompt, "max_tokens": 4 + i, "stream": i % 4 < 2}
        body |= {"lazyllm": {"pruning": setting}, **({"temperature": 0.8, "seed": i} if sampled else {})}
        sampling = lazyllm.SamplingParams(temperature=0.8 if sampled else 0.0, seed=i if sampled else None)
        answer = llm.generate(prompt, setting or "2x", max_new_tokens=4 + i, sampling=sampling)
        made.append((body, answer.text))
    return made


class Client(threading.Thread):
    """Sends requests until `stop`, or leaves early."""

    def __init__(self, number: int, port: int, bodies: list[tuple[dict[str, Any], str]], counts: Counter[str]):
        super().__init__()
        self.random, self.port, self.bodies, self.counts = random.Random(number), port, bodies, counts
        self.ends = time.monotonic() + ROUND

    def run(self) -> None:
        while time.monotonic() < self.ends:
            body, wanted = self.random.choice(self.bodies)
            try:
                self.counts[self.outcome(body, wanted)] += 1
            except Exception as error:
                self.counts[f"error {error!r}"] += 1

    def outcome(self, body: dict[str, Any], wanted: str) -> str:
        chance = self.random.random()
        if chance < 0.01:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            text = json.dumps({"prompt": TEXT, "max_tokens": 500, "stream": True})
            sent = f"{head}Content-Length: {len(text)}\r\n\r\n{text}"
            child = subprocess.Popen([sys.executable, "-c", KILLED, str(self.port), sent], stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
            return "killed"
        connection = request(self.port, body)
        try:
            if chance < 0.1:
                time.sleep(self.random.random())
                assert connection.sock is not None
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
                return "left"
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                assert answer.status == 429, data
                time.sleep(0.2)
                return "429"
            assert text_of(data, body["stream"]) == wanted, (body, data, wanted)
            return "answered"
        finally:
            connection.close()


def use(pid: int) -> tuple[int, int, int]:
    """Bytes of memory without pages of mapped files, threads, files; at rest, the least of six seconds:
    uvicorn keeps connections for five."""
    looks = []
    for _ in range(60):
        looks.append(look(pid))
        time.sleep(0.1)
    memory, threads, files = map(min, zip(*looks, strict=True))
    return memory, threads, files


def look(pid: int) -> tuple[int, int, int]:
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file.read().splitlines())
    kilobytes = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return kilobytes << 10, len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def at_rest(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return "lazyllm_running 0.0" in text and "lazyllm_waiting 0.0" in text


def first_pieces(llm: lazyllm.LLM, port: int, n_words: int) -> tuple[float, float]:
    """Median seconds to the first piece of text, over HTTP and of `llm.stream`, in turns."""

    def over_http(text: str) -> None:
        connection = request(port, {"prompt": text, "max_tokens": 3, "stream": True})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: {")
        rest.append(answer)

    def here(text: str) -> None:
        stream = llm.stream(text, "2x", max_new_tokens=3, progress=False)
        next(stream)
        rest.append(stream)

    rest: list[Any] = []
    seconds: dict[Callable[[str], None], list[float]] = {over_http: [], here: []}
    for pair in range(PAIRS + 2):
        for way in (over_http, here) if pair % 2 else (here, over_http):
            text = f"{pair}{way.__name__} " + "word " * n_words  # no two begin alike
            started = time.perf_counter()
            way(text)
            seconds[way].append(time.perf_counter() - started)
            last = rest.pop()
            last.read() if way is over_http else last.finished()
    return statistics.median(seconds[over_http][2:]), statistics.median(seconds[here][2:])


def main() -> int:
    folder, port, failed = lazyllm.demo_model(), free_port(), False
    llm = lazyllm.load(folder)
    call = f"-m lazyllm serve --model {folder} --port {port} --speedup 2 --waiting 40 --cache-bytes {CACHE}"
    server = subprocess.Popen([sys.executable, *call.split()], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 60)
        for n_words in (30, 300):
            over_http, here = first_pieces(llm, port, n_words)
            print(f"first piece after {n_words} words: {over_http:.4f} s over HTTP, {here:.4f} s of llm.stream")
            failed |= over_http - here > MOST_SECONDS
        bodies, counts = cases(llm), Counter[str]()
        uses: list[tuple[int, int, int]] = []
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends or len(uses) < LEAST_ROUNDS:
            clients = [Client(100 * len(uses) + i, port, bodies, counts) for i in range(CLIENTS)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            wait_for(lambda: at_rest(port), 60)
            uses.append(use(server.pid))
            print(f"{len(uses)}: memory, threads, files {uses[-1]}; {dict(counts)}", flush=True)
        later = uses[round(WARM_UP * len(uses)) :]
        third = len(later) // 3
        growth = [
            statistics.median(column[-third:]) - statistics.median(column[:third])
            for column in zip(*later, strict=True)
        ]
        print(f"growth of memory, threads, files after the warm-up: {growth}")
        failed |= growth[0] > MOST_GROWTH or growth[1] > 0 or growth[2] >= 1
        failed |= any(name not in ("answered", "429", "left", "killed") for name in counts)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    finally:
        server.kill()
    print("FAILED" if failed else "passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
