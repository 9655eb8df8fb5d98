"""The web application: OpenAI's paths over a Service, which answers requests to one model."""

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lazyllm.llm import LLM
from lazyllm.machine import memory
from lazyllm.prefix_cache import PrefixCache
from lazyllm.serving.figures import Figures
from lazyllm.serving.options import Options
from lazyllm.serving.protocol import Ask, Part, contents
from lazyllm.serving.shadow import Guard, Shadow
from lazyllm.serving.turns import Turns

LARGEST_BODY = 16 << 20  # bytes
OPEN = ("/", "/health")  # without a key
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STATUS = {ValueError: 400, TypeError: 400, RecursionError: 400, MemoryError: 503, ClientDisconnect: 499}
PAGE = Path(__file__).with_name("page.html").read_text("utf-8")
log = logging.getLogger("lazyllm.serving")


class Service:
    """Answers requests to one model under its own setting or the request's."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self.llm, self.model = llm, llm.config.name or "lazyllm"
        self.roles = options.protect.split(",") if options.protect else []
        self.heat_map = ""  # of the last traced request, as HTML
        self._lock, self._promises = threading.Lock(), 0  # bytes, of the requests that run
        self.guard = Guard(options)
        self.guard.setting.check(llm.config_for(self.guard.setting))
        if self.guard.setting.compresses:
            raise ValueError(f"{self.guard.setting} rewrites prompts, which serve does not do")
        self.cache = PrefixCache(options.cache_bytes, eager=False) if options.cache_bytes else None
        self.turns = Turns(options.at_once, options.waiting)
        self.figures = Figures(self.turns, self.cache)
        self.shadow = Shadow(llm, self.turns, self.figures, self.guard, options)

    def answer(self, body: bytes, chat: bool) -> Iterator[Any]:
        """The answer to a request, or the events of a streamed one."""
        ask = Ask(self.llm, self.model, body, chat, self.roles)
        yield from contents(ask, self._parts(ask))

    def _parts(self, ask: Ask) -> Iterator[Part]:
        named = ask.pruning or self.guard.setting
        setting = named.protecting(ask.protected) if ask.protected else named
        session = self.llm.session(setting, self.cache if setting.reads_in_parts else None, progress=False)
        prompts = [session.checked_prompt(ids, ask.request) for ids in ask.prompts]
        n_tokens = max(setting.kept(len(ids)) for ids in ask.prompts) + ask.request.max_new_tokens
        n_sessions = 1 if ask.n == 1 else 2  # each of several answers continues in a fork, one by one
        with self._promised(n_tokens, n_sessions * session.core.bytes_for(n_tokens)):
            for number, prompt in enumerate(prompts):
                request = replace(ask.request, sampling=ask.request.sampling.for_prompt(number))
                streams = session.fork().streams(prompt, request, ask.n)
                for index, stream in enumerate(streams, number * ask.n):
                    if ask.stream:
                        yield from ((index, piece, None, {}) for piece in stream)
                    generation = stream.finished()
                    text = "" if ask.stream else generation.text
                    yield index, text, generation, self.figures.answered(named, generation)
                    if request.trace:
                        self.heat_map = generation.trace.heatmap()._repr_html_()
                self.shadow.offer(prompt.ids, setting, named)

    @contextmanager
    def _promised(self, n_tokens: int, n_bytes: int) -> Iterator[None]:
        """Promises memory to a request while it runs; MemoryError if the promises to others leave too little.
        Free memory is read while no request runs: later, part of the promised memory is in use already."""
        with self._lock:
            if not self._promises:
                self._free = memory.available_bytes()
            left = None if self._free is None else self._free - self._promises
            if self.llm.device == "cpu" and left is not None and n_bytes > left:
                needs = f"a session of {n_tokens} tokens needs {n_bytes} bytes"
                raise MemoryError(f"{needs}; {left} are available beside the requests that run")
            self._promises += n_bytes
        try:
            yield
        finally:
            with self._lock:
                self._promises -= n_bytes

    def failed(self, error: Exception) -> JSONResponse:
        """The response to an error: one sentence, without paths of this machine, on what the client can change; for
        a failure of the server, the sentence names the log, which has the error."""
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
        text = " ".join(str(error).split()) or type(error).__name__
        tokenizer = self.llm.checkpoint.tokenizer
        for path in {str(self.llm.checkpoint.path), str(tokenizer.place) if tokenizer else ""} - {""}:
            text = text.replace(path, self.model)
        if isinstance(error, HTTPException):
            status, text = error.status_code, error.detail
        elif status == 500:
            log.error("an answer failed", exc_info=error)
            text = "the answer failed; the server's log says why"
        kind = "invalid_request_error" if status < 500 else "server_error"
        text = text.encode(errors="replace").decode()
        content = {"error": {"message": text, "type": kind, "param": None, "code": None}}
        return JSONResponse(content, status, getattr(error, "headers", None))

    def close(self) -> None:
        """Ends all passes, and waits until the threads are gone."""
        self.turns.closing.set()
        for executor in self.turns.threads, self.shadow.thread:
            executor.shutdown(cancel_futures=True)


class Answer(StreamingResponse):  # type: ignore[misc]
    """One JSON body or events. An error before the first event has a status; a later error is the last event."""

    def __init__(self, service: Service, body: bytes, chat: bool) -> None:
        self.service, self.pieces = service, service.turns.run(partial(service.answer, body, chat))
        super().__init__(self.pieces, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends when the client leaves, even before anything is sent, as Starlette does under old versions of ASGI."""
        await super().__call__({**scope, "asgi": {}}, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.pieces):
            first = await anext(self.pieces)
            if isinstance(first, str):
                self.body_iterator = self.until_failed(first)
                await super().stream_response(send)
        if not isinstance(first, str):
            await JSONResponse(first)({"type": "http"}, None, send)

    async def until_failed(self, first: str) -> AsyncIterator[str]:
        yield first
        try:
            async for piece in self.pieces:
                yield piece
        except Exception as error:
            yield f"data: {self.service.failed(error).body.decode()}\n\n"


class KeyCheck(AuthenticationBackend):  # type: ignore[misc]
    """Refuses requests without the key."""

    def __init__(self, key: str) -> None:
        self.expected = f"Bearer {key}".encode()

    async def authenticate(self, conn: HTTPConnection) -> None:
        sent = conn.headers.get("authorization", "").encode("latin-1")
        if conn.scope["path"] not in OPEN and not compare_digest(sent, self.expected):
            raise AuthenticationError


def create(service: Service, key: str | None = None, host: str = LOOPBACK[0]) -> Starlette:
    """The application. Without a key it answers only requests to `host` or to this machine's own names, so
    that no page in a browser can reach the server by a name of its own."""
    model = {"id": service.model, "object": "model", "created": 0, "owned_by": "lazyllm"}

    async def completions(request: Request, chat: bool = False) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "the content type must be application/json")
        return Answer(service, await request.body(), chat)

    async def refuse(request: Request, error: Exception) -> Response:
        return service.failed(error)

    registry = service.figures.registry
    routes = [
        Route("/", lambda _: HTMLResponse(PAGE)),
        Route("/health", lambda _: JSONResponse({"status": "ok"})),
        Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [model]})),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", partial(completions, chat=True), methods=["POST"]),
        Route("/metrics", lambda _: Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)),
        Route("/recent", lambda _: JSONResponse(service.figures.last_hour())),
        Route("/heat-map", lambda _: HTMLResponse(service.heat_map)),
    ]
    if key is None:
        check = Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, host])
    else:
        missing = HTTPException(401, "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"})
        options = {"backend": KeyCheck(key), "on_error": lambda *error: service.failed(missing)}
        check = Middleware(AuthenticationMiddleware, **options)
    middleware = [Middleware(RequestBodyLimitMiddleware, max_body_size=LARGEST_BODY), check]
    handlers = dict.fromkeys((HTTPException, *STATUS, Exception), refuse)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
