"""A server in this process, on a port of its own."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import uvicorn

import lazyllm
from lazyllm.serving.app import Service, create
from lazyllm.serving.options import Options


class Server:
    """A Service behind uvicorn, as `lazyllm serve` runs it."""

    def __init__(self, llm: lazyllm.LLM, pruning: Any = None, key: str | None = None, **options: Any) -> None:
        self.service = Service(llm, Options(pruning=pruning, **options))
        config = uvicorn.Config(create(self.service, key), port=0, http="h11", log_level="error")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run)

    @property
    def port(self) -> int:
        port: int = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPConnection:
        """The connection by which a request has gone out, whose body may be anything."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, {"Content-Type": "application/json", **named})
        return connection

    def send(self, *request: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and body of the answer to a request."""
        with closing(self.sent(*request, **headers)) as connection:
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, answer = self.send("POST", path, body, **headers)
        return status, json.loads(answer)


@contextmanager
def serving(llm: lazyllm.LLM, pruning: Any = None, key: str | None = None, **options: Any) -> Iterator[Server]:
    server = Server(llm, pruning, key, **options)
    server.thread.start()
    try:
        wait_for(lambda: server.uvicorn.started)
        yield server
    finally:
        server.uvicorn.should_exit = True
        server.thread.join()
        server.service.close()


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def wait_for(condition: Any, seconds: float = 30) -> None:
    """Returns as soon as the condition holds; fails if it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.005)
