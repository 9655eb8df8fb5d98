"""50 clients of `lazyllm serve` for SOAK_SECONDS (300), on the demonstration model: part of `make soak`.

Whole and streamed answers under several settings, and clients that leave. Each answer must be that of
`llm.generate` alone, the only error is 429, and at rest the server's memory, threads and files must not grow.
Before that, the seconds to the first piece of text over HTTP and of `llm.stream`.
"""

import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from serving import Client, serve, wait_for
from soak import Use, grew

import lazyllm

SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
CLIENTS, ROUND, LEAST_ROUNDS = 50, 15, 6  # seconds between rests
CACHE = 64 << 20  # bytes of shared beginnings; how many it holds at rest differs from round to round
MOST_GROWTH = CACHE + (4 << 20)  # bytes; the page's points of the last hour take up to 2 MiB
PAIRS, MOST_SECONDS = 21, 0.010  # that HTTP may add to the first piece of text
LINGER = struct.pack("ii", 1, 0)  # a close that sends a reset
TEXT = "The harbour master wrote down every ship that came in that year, and the name of its captain. "
SETTINGS = [None, "2x", "1.5x", {"6": 0.6, "15": 0.3}, "dense"]
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}

Case = tuple[str, dict[str, Any], str]
"""The path and body of a request, and the answer of `generate`."""


def cases(llm: lazyllm.LLM) -> list[Case]:
    made = list[Case]()
    for i in range(20):
        text = TEXT * (2 + i) + f"Which ship came {i} days later?"
        setting, seed = SETTINGS[i % len(SETTINGS)], None if i % 3 else i
        name, prompt = ("messages", [{"role": "user", "content": text}]) if i % 2 else ("prompt", text)
        sampling = {"temperature": 0.0 if seed is None else 0.8, "seed": seed}
        body = {name: prompt, "max_tokens": 4 + i, "stream": i % 4 < 2, "lazyllm": {"pruning": setting}, **sampling}
        how: dict[str, Any] = {"max_new_tokens": 4 + i, "sampling": lazyllm.SamplingParams(**sampling)}
        made.append((PATHS[name], body, llm.generate(prompt, setting or "2x", **how).text))
    return made


def text_of(answer: bytes) -> str:
    """The text of a whole answer, or of its events."""
    events = [json.loads(line.removeprefix(b"data: ")) for line in answer.splitlines() if line.endswith(b"}")]
    choices = [choice for event in events for choice in event["choices"]]
    assert answer.endswith((b"}", b"data: [DONE]\n\n")), answer[-200:]
    messages = [choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices]
    return "".join(message.get("content") or "" for message in messages)


def outcome(client: Client, case: Case, chance: random.Random) -> str:
    path, body, wanted = case
    with closing(client.sent("POST", path, body)) as connection:
        if chance.random() < 0.1:
            time.sleep(chance.random())
            assert connection.sock is not None
            if chance.random() < 0.5:  # else as the system does for a process that is killed
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
            return "left"
        answer = connection.getresponse()
        data = answer.read()
    if answer.status == 429:
        time.sleep(0.2)
        return "429"
    assert (answer.status, text_of(data)) == (200, wanted), (body, data, wanted)
    return "answered"


def outcomes(client: Client, cases: list[Case], seed: int) -> Counter[str]:
    """The outcomes of one client's requests in a round."""
    chance, counts, ends = random.Random(seed), Counter[str](), time.monotonic() + ROUND
    while time.monotonic() < ends:
        try:
            counts[outcome(client, chance.choice(cases), chance)] += 1
        except Exception as error:
            counts[f"error {error!r}"] += 1
    return counts


def at_rest(client: Client, process: int) -> Use:
    """The server's resources once no request runs: the least of six seconds, as uvicorn keeps connections for five."""

    def is_idle() -> bool:
        text = client.send("GET", "/metrics")[2]
        return b"lazyllm_running 0.0" in text and b"lazyllm_waiting 0.0" in text

    wait_for(is_idle, 60)
    looks = list[Use]()
    for _ in range(60):
        looks.append(Use.of(process))
        time.sleep(0.1)
    return Use(*map(min, zip(*looks, strict=True)))


def first_pieces(llm: lazyllm.LLM, client: Client, n_words: int) -> tuple[float, float]:
    """Median seconds to the first piece of text, over HTTP and of `llm.stream`, in turns."""

    def over_http(text: str) -> Iterator[Any]:
        body = {"prompt": text, "max_tokens": 3, "stream": True}
        with closing(client.sent("POST", PATHS["prompt"], body)) as connection:
            answer = connection.getresponse()
            assert answer.status == 200
            yield from answer

    def here(text: str) -> Iterator[Any]:
        return llm.stream(text, "2x", max_new_tokens=3, progress=False)

    seconds: dict[Callable[[str], Iterator[Any]], list[float]] = {over_http: [], here: []}
    for pair in range(PAIRS + 2):
        for way in (over_http, here) if pair % 2 else (here, over_http):
            started = time.perf_counter()
            pieces = way(f"{pair}{way.__name__} " + "word " * n_words)  # no two begin alike
            next(pieces)
            seconds[way].append(time.perf_counter() - started)
            list(pieces)
    return median(seconds[over_http][2:]), median(seconds[here][2:])


def main() -> int:
    folder, failed = lazyllm.demo_model(), False
    llm, counts, uses = lazyllm.load(folder), Counter[str](), list[Use]()
    options = f"--speedup 2 --waiting 40 --cache-bytes {CACHE}"
    with (
        tempfile.TemporaryDirectory() as place,
        serve(folder, options, Path(place, "log")) as (client, server),
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        for n_words in (30, 300):
            over_http, here = first_pieces(llm, client, n_words)
            print(f"first piece after {n_words} words: {over_http:.4f} s over HTTP, {here:.4f} s of llm.stream")
            failed |= over_http - here > MOST_SECONDS
        asked = cases(llm)
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends or len(uses) < LEAST_ROUNDS:
            seeds = range(CLIENTS * len(uses), CLIENTS * (len(uses) + 1))
            counts += sum(pool.map(lambda seed: outcomes(client, asked, seed), seeds), Counter())
            uses.append(at_rest(client, server.pid))
            print(f"{len(uses)}: {uses[-1]}; {dict(counts)}", flush=True)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    failed |= grew(uses, MOST_GROWTH) or bool(counts.keys() - {"answered", "429", "left"})
    print("FAILED" if failed else "passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
