"""The application: OpenAI's paths over a Service, as Starlette runs them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lazyllm.serving.protocol import NoSuchModel, event
from lazyllm.serving.service import Service
from lazyllm.serving.turns import Busy

T = TypeVar("T")
LARGEST_BODY = 16 << 20  # bytes
OPEN = ("/", "/health")  # without a key
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STATUS = {
    Busy: 429,
    NoSuchModel: 404,
    ValueError: 400,
    TypeError: 400,
    RecursionError: 400,
    MemoryError: 503,
    ClientDisconnect: 499,  # which nobody reads
}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
PAGE = Path(__file__).with_name("page.html").read_text("utf-8")
log = logging.getLogger("lazyllm.serving")


def refused(status: int, message: str) -> dict[str, Any]:
    """The keywords of a JSONResponse that says so."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return {"content": {"error": error}, "status_code": status, "headers": HEADERS.get(status)}


def failed(service: Service, error: Exception) -> dict[str, Any]:
    """`refused`, in a sentence for the client if it can do something about it, else the log has a line."""
    if isinstance(error, HTTPException):
        return refused(error.status_code, error.detail)
    for kind, status in STATUS.items():
        if isinstance(error, kind):
            return refused(status, service.public(error))
    log.error("an answer failed", exc_info=error)
    return refused(500, "the answer failed; the server's log says why")


class KeyCheck(AuthenticationBackend):  # type: ignore[misc]
    """Refuses what comes without the key."""

    def __init__(self, key: str) -> None:
        self.wanted = f"Bearer {key}".encode()

    async def authenticate(self, conn: HTTPConnection) -> None:
        given = conn.headers.get("authorization", "").encode("latin-1")
        if conn.scope["path"] not in OPEN and not compare_digest(given, self.wanted):
            raise AuthenticationError


def create(service: Service, key: str | None = None, host: str = LOOPBACK[0]) -> Starlette:
    """The application. Without a key it answers only requests to `host` or to this machine's own names, so
    that no page in a browser can reach the server by a name of its own."""
    model = {"id": service.model, "object": "model", "created": 0, "owned_by": "lazyllm"}
    routes = [
        Route("/", lambda request: HTMLResponse(PAGE)),
        Route("/health", lambda request: JSONResponse({"status": "ok"})),
        Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [model]})),
        Route("/v1/completions", partial(answered, service, False), methods=["POST"]),
        Route("/v1/chat/completions", partial(answered, service, True), methods=["POST"]),
        Route("/metrics", lambda request: Response(service.figures.text(), media_type=CONTENT_TYPE_LATEST)),
        Route("/recent", lambda request: JSONResponse(service.figures.last_hour())),
        Route("/heat-map", lambda request: HTMLResponse(service.heat_map or "")),
    ]
    if key is None:
        check = Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, host])
    else:
        unauthorized = refused(401, "the API key is missing or wrong")
        options = {"backend": KeyCheck(key), "on_error": lambda *error: JSONResponse(**unauthorized)}
        check = Middleware(AuthenticationMiddleware, **options)
    middleware = [Middleware(RequestBodyLimitMiddleware, max_body_size=LARGEST_BODY), check]

    async def handler(request: Request, error: Exception) -> Response:
        return JSONResponse(**failed(service, error))

    handlers = dict.fromkeys((HTTPException, *STATUS, Exception), handler)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def answered(service: Service, chat: bool, request: Request) -> Response:
    """The response to a request for completions, whole or in events."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the content type must be application/json")
    pieces = service.turns.run(partial(service.answer, await request.body(), chat))
    first = await unless_gone(request, anext(pieces))
    if isinstance(first, str):
        events, close = until_failed(service, first, pieces), BackgroundTask(pieces.aclose)
        return StreamingResponse(events, media_type="text/event-stream", background=close)
    await pieces.aclose()
    return JSONResponse(first)


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """The result of `answer`; ClientDisconnect as soon as nobody waits for it."""

    async def client_leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(answer), asyncio.ensure_future(client_leaves())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def until_failed(service: Service, first: str, rest: AsyncIterator[Any]) -> AsyncIterator[str]:
    """All events; an error that ends them is the last one."""
    yield first
    try:
        async for piece in rest:
            yield piece
    except Exception as error:
        yield event(failed(service, error)["content"])
