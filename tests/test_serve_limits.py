"""Requests that a server refuses, and its behaviour when clients or it itself must go."""

import gc
import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from folders import WIDE, model_folder
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyllm

pytest.importorskip("starlette", reason="needs the extra [serve]: starlette, uvicorn, prometheus-client")
from serving import Server, serve, serving, wait_for

from lazyllm.serving import turns
from lazyllm.serving.protocol import CHAT, ONLY, SAMPLING, SHARED, WITHOUT_EFFECT
from lazyllm.session import Session
from lazyllm.support.progress import Watch, watching

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [7] * 3500, "max_tokens": 500}


@pytest.fixture(scope="module")
def server(llm: lazyllm.LLM) -> Iterator[Server]:
    with serving(llm) as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> lazyllm.LLM:
    return lazyllm.load(model_folder(tmp_path_factory.mktemp("serve") / "slow", WIDE), threads=1)


# ---- requests that are not as they should be -------------------------------------------------------

FIELDS = ["prompt", *SHARED, *CHAT, *SAMPLING, *WITHOUT_EFFECT, *ONLY, "pruning", "trace", "role", "content"]
TEXTS = st.sampled_from(["", "user", "2x", "dense", "/etc/passwd.json", "compress:ratio=0.5", "\ud800", "a"])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.just(10**400), TEXTS, st.text(max_size=4)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*FIELDS, "method", "stages", "1"]), inner, max_size=4)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": VALUES, "content": VALUES}) | VALUES, max_size=2)
BODIES = st.one_of(
    VALUES,
    st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=6),
    st.fixed_dictionaries(
        {"messages": MESSAGES, "prompt": VALUES},
        optional=dict.fromkeys(("lazyllm", "stop", "n", "tools", "logprobs", "max_tokens"), VALUES),
    ),
)


@settings(max_examples=200)
@given(body=BODIES | st.binary(max_size=20), chat=st.booleans())
def test_any_body_is_answered_or_refused_in_one_sentence(server: Server, body: Any, chat: bool) -> None:
    """An answer where the body happens to be one that can be answered; never a traceback."""
    if isinstance(body, dict) and not chat:
        body = {name: value for name, value in body.items() if name not in CHAT}
    status, answer = server.post(CHATS if chat else COMPLETIONS, body)
    if status == 200:
        assert answer["choices"]
        return
    assert 400 <= status < 500
    assert re.fullmatch("(?!.*Traceback).+", answer["error"]["message"])
    assert str(server.service.llm.checkpoint.path) not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt must be text"),
        ({"prompt": ""}, "prompt must be text"),
        ({"prompt": ["a", ""]}, "prompt is empty"),
        ({"prompt": [[1], [300]]}, "token id 300"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be from 1"),
        ({"prompt": "a", "max_tokens": 600}, "the model's context is 600"),
        ({"prompt": ["a"] * 129}, "129 prompts are more than the 128 of one request"),
        ({"prompt": "a", "n": 2}, "a temperature above 0"),
        ({"prompt": "a", "stop": ["a"] * 17}, "17 stop texts"),
        ({"prompt": "a", "temprature": 1}, "a request has no field 'temprature'"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"prompt": "a", "lazyllm": {"pruning": "preset.json"}}, "pruning is 'preset.json'; it must be"),
        ({"prompt": "a", "lazyllm": {"pruning": {"method": "compress", "model": "/"}}}, "method must be"),
        ({"prompt": "a", "lazyllm": {"pruning": {"method": "fastkv", "model": "/"}}}, "it takes layer, keep"),
        ({"prompt": "a", "lazyllm": {"pruning": {"9": 0.5}}}, "in a model of 6 layers"),
        ({"prompt": "a", "lazyllm": {"prunning": 2}}, "lazyllm has no field 'prunning'"),
    ],
)
def test_what_is_wrong_is_named(server: Server, body: Any, words: str) -> None:
    status, answer = server.post(COMPLETIONS, body)
    assert status == 400
    assert words in answer["error"]["message"]


def test_deep_bodies_are_answered_or_refused(server: Server) -> None:
    """Some can be parsed, and not be written again for the template."""
    for depth in (*range(970, 990), 10**6):
        deep = b"[" * depth + b"]" * depth
        chat = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "tools": [{"a": %s}]}'
        status, answer = server.post(CHATS, chat % deep)
        assert status == 400 or answer["choices"]


def test_no_place_of_this_machine_is_shown(tmp_path: Path) -> None:
    settings = model_folder(tmp_path / "tiny") / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": "{{ 1 / 0 }}"}))
    with serving(lazyllm.load(settings.parent)) as server:
        status, answer = server.post(CHATS, {"messages": [{"role": "user", "content": "Hi"}]})
    assert status == 400
    assert "the chat template failed: division by zero" in answer["error"]["message"]
    assert str(tmp_path) not in answer["error"]["message"]


def test_an_error_after_the_first_event_is_the_last_one(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In place of a whole answer it is the answer. Its reason stands in the log alone, and it keeps no session."""

    def sessions() -> int:
        return sum(isinstance(item, Session) for item in gc.get_objects())

    def fails(*answer: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(server.service.figures, "answered", fails)
    before = sessions()
    body = {"prompt": "a", "max_tokens": 3}
    status, _, answer = server.send("POST", COMPLETIONS, {**body, "stream": True})
    first, *_, last, end = answer.decode().split("\n\n")
    assert status == 200
    assert json.loads(first.removeprefix("data: "))["choices"]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], end) == ("server_error", "")
    assert server.post(COMPLETIONS, body) == (500, {"error": error})
    assert "a secret" not in error["message"]
    logged = [record.exc_info for record in caplog.records if record.name == "lazyllm.serving"]
    assert [str(reason[1]) for reason in logged if reason] == ["a secret"] * 2
    assert sessions() <= before


def test_keys(llm: lazyllm.LLM) -> None:
    with serving(llm, key="a key") as server:
        for wrong in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer a keyx"}):
            status, answer = server.post(COMPLETIONS, {"prompt": "a"}, **wrong)
            assert (status, answer["error"]["message"]) == (401, "the API key is missing or wrong")
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, Authorization="Bearer a key")[0] == 200
        assert server.send("GET", "/health")[0] == 200


def test_hosts_types_and_sizes(server: Server) -> None:
    large = b'{"prompt": "' + b"a" * (17 << 20)
    for request, headers, status in (
        (("GET", "/health"), {"Host": "attacker.example"}, 400),
        (("GET", "/health"), {"Host": "localhost:80"}, 200),
        (("GET", "/health"), {"X_Long": "a" * (1 << 17)}, 400),
        (("GET", "/v1/none"), {}, 404),
        (("GET", COMPLETIONS), {}, 405),
        (("POST", COMPLETIONS, {"prompt": "a"}), {"Content_Type": "text/plain"}, 415),
        (("POST", COMPLETIONS, large), {}, 413),
    ):
        with closing(server.sent(*request, **headers)) as connection:
            assert connection.getresponse().status == status


# ---- turns -----------------------------------------------------------------------------------------


def begun(server: Server, **more: Any) -> socket.socket:
    """The connection of a client that waits for a long answer."""
    before = server.service.turns.requests
    connection = server.sent("POST", COMPLETIONS, {**LONG, **more})
    wait_for(lambda: server.service.turns.requests > before)
    assert connection.sock is not None
    return connection.sock


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers done, at each look of a request's thread whether somebody waits for it."""
    looks: list[int] = []

    def recording(check: Watch) -> AbstractContextManager[None]:
        def recorded(layers_done: int, n_layers: int) -> None:
            looks.append(layers_done)
            check(layers_done, n_layers)

        return watching(recorded)

    monkeypatch.setattr(turns, "watching", recording)
    return looks


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pass(slow: lazyllm.LLM, layers: list[int], stream: bool) -> None:
    """In the prompt's pass, which takes seconds; those that wait for their turn never begin."""
    with serving(slow, at_once=1) as server:
        clients = [begun(server, stream=stream) for _ in range(3)]
        wait_for(lambda: layers)
        for client in clients:
            client.close()
        wait_for(lambda: server.service.turns.requests == 0)
        server.service.turns.threads.submit(int).result()  # once the pass has ended
        assert layers == [*range(1, len(layers) + 1)]
        assert len(layers) < WIDE.n_layers
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200


def test_a_client_that_goes_away_frees_its_decode_steps(slow: lazyllm.LLM, layers: list[int]) -> None:
    with serving(slow, at_once=1) as server:
        for more in ({"n": 2, "temperature": 1}, {"stream": True}):
            client = begun(server, prompt="a", max_tokens=4000, **more)
            before = len(layers)
            wait_for(lambda before=before: len(layers) > before + 20)
            client.close()
            assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
            assert len(layers) < before + 3000


def test_beyond_the_queue_is_429(slow: lazyllm.LLM) -> None:
    with serving(slow, at_once=1, waiting=1) as server:
        clients = [begun(server), begun(server)]
        status, headers, answer = server.send("POST", COMPLETIONS, LONG)
        assert (status, headers["retry-after"]) == (429, "1")
        assert b"too many requests wait" in answer
        for client in clients:
            client.close()


def test_a_request_beyond_memory_is_refused(llm: lazyllm.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyllm.machine.memory.available_bytes", lambda: 1000)
    with serving(llm) as server:
        for stream in (False, True):
            status, answer = server.post(COMPLETIONS, {"prompt": "a" * 300, "stream": stream})
            assert (status, "a session of" in answer["error"]["message"]) == (503, True)


def test_requests_that_fit_alone_are_refused_beside_others(slow: lazyllm.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is promised to what runs, and free again once it has gone, answered or not."""
    needed = slow.session().core.bytes_for(4000)
    monkeypatch.setattr("lazyllm.machine.memory.available_bytes", lambda: 3 * needed // 2)
    with serving(slow, at_once=3) as server:
        client = begun(server)  # beside which short requests are answered
        wait_for(lambda: server.service._promises == needed)
        status, answer = server.post(COMPLETIONS, LONG)
        assert status == 503
        # less than `needed` once the first request has made the model's tables of RoPE longer
        assert re.search(rf"needs \d+ bytes; {needed // 2} are available beside", answer["error"]["message"])
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
        client.close()
        wait_for(lambda: not server.service._promises)
        begun(server).close()
        wait_for(lambda: not server.service.turns.requests)


# ---- the command, and its end ----------------------------------------------------------------------


def test_sigterm_finishes_what_runs(slow: lazyllm.LLM, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serve(slow.checkpoint.path, "--speedup 2", log) as (client, process):
        streamed = client.sent("POST", COMPLETIONS, {"prompt": "a" * 1000, "max_tokens": 30, "stream": True})
        answer = streamed.getresponse()  # it has begun
        process.send_signal(signal.SIGTERM)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(60) in (0, -signal.SIGTERM)
    assert "Traceback" not in log.read_text()
