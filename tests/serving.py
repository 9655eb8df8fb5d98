"""Servers on ports of their own, in this process and in others, and their clients."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import uvicorn

import lazyllm
from lazyllm.serving.app import Service, create
from lazyllm.serving.options import Options


class Client:
    """Requests to a server of this machine."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def sent(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPConnection:
        """The connection by which a request has gone out, whose body may be anything."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
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

    def is_heard(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Server(Client):
    """A server in this process, and the Service behind it."""

    def __init__(self, port: int, service: Service) -> None:
        super().__init__(port)
        self.service = service


@contextmanager
def serving(llm: lazyllm.LLM, pruning: Any = None, key: str | None = None, **options: Any) -> Iterator[Server]:
    """With uvicorn, as `lazyllm serve` runs it."""
    service = Service(llm, Options(pruning=pruning, **options))
    server = uvicorn.Server(uvicorn.Config(create(service, key), port=0, http="h11", log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Server(server.servers[0].sockets[0].getsockname()[1], service)
    finally:
        server.should_exit = True
        thread.join()
        service.close()


@contextmanager
def serve(folder: Path, options: str, log: Path) -> Iterator[tuple[Client, subprocess.Popen[bytes]]]:
    """`lazyllm serve` in a process of its own, which writes errors to the log."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        client = Client(unused.getsockname()[1])
    call = f"-m lazyllm serve --model {folder} --port {client.port} {options}"
    with (
        log.open("wb") as errors,
        subprocess.Popen([sys.executable, *call.split()], stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        try:
            wait_for(client.is_heard, 60)
            yield client, process
        finally:
            process.kill()


def wait_for(condition: Any, seconds: float = 30) -> None:
    """Returns as soon as the condition holds; fails if it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.005)
