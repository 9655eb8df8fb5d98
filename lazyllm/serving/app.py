"""The application: OpenAI's paths over a Service, as Starlette runs them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
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

from lazyllm.serving.protocol import Answered, Ask, NoSuchModel, choice, envelope, usage
from lazyllm.serving.service import Item, Service
from lazyllm.serving.turns import Busy

T = TypeVar("T")
LARGEST_BODY = 16 << 20  # bytes
OPEN = ("/", "/health")  # without a key
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
PAGE = Path(__file__).with_name("page.html").read_text("utf-8")
log = logging.getLogger("lazyllm.serving")


def refused(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, HEADERS.get(status))


def failed(service: Service, error: Exception) -> JSONResponse:
    """The response to an error: a sentence for the client if it can do something about it, else a line of the
    log."""
    match error:
        case HTTPException():
            return refused(error.status_code, error.detail)
        case Busy():
            return refused(429, "too many requests wait already; try again later")
        case RecursionError():
            return refused(400, "the request's body is nested too deeply")
        case MemoryError():
            return refused(503, service.public(error))
        case ValueError() | TypeError():
            return refused(404 if isinstance(error, NoSuchModel) else 400, service.public(error))
    log.error("an answer failed", exc_info=error)
    return refused(500, "the answer failed; the server's log says why")


class KeyCheck(AuthenticationBackend):  # type: ignore[misc]
    """Refuses what comes without the key."""

    def __init__(self, key: str) -> None:
        self.wanted = f"Bearer {key}".encode()

    async def authenticate(self, conn: HTTPConnection) -> None:
        given = conn.headers.get("authorization", "").encode("latin-1")
        if conn.scope["path"] not in OPEN and not compare_digest(given, self.wanted):
            raise AuthenticationError("the API key is missing or wrong")


class Events(StreamingResponse):  # type: ignore[misc]
    """Server-sent events. However the response ends, so does what makes them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


def create(service: Service, key: str | None = None, host: str = LOOPBACK[0]) -> Starlette:
    """The application. Without a key it answers only requests to `host` or to this machine's own names, so
    that no page in a browser can reach the server by a name of its own."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

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
        wrong = partial(refused, 401, "the API key is missing or wrong")
        check = Middleware(
            AuthenticationMiddleware, backend=KeyCheck(key), on_error=lambda conn, error: wrong()
        )
    middleware = [Middleware(RequestBodyLimitMiddleware, max_body_size=LARGEST_BODY), check]

    async def handler(request: Request, error: Exception) -> Response:
        return failed(service, error)

    handlers = {HTTPException: handler, Exception: handler}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


async def answered(service: Service, chat: bool, request: Request) -> Response:
    """The response to a request for completions, whole or in events."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return refused(415, "the content type must be application/json")
    body = await request.body()
    items = service.turns.run(partial(service.answers, body, chat))
    try:
        ask = await unless_gone(request, anext(items))
        assert isinstance(ask, Ask)
        if not ask.stream:
            return JSONResponse(await unless_gone(request, whole(service, ask, items)))
        first = await unless_gone(request, anext(items))
        return Events(events(service, ask, first, items), media_type="text/event-stream")
    except ClientDisconnect:
        return Response(status_code=499)  # which nobody reads
    except Exception as error:
        return failed(service, error)


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


async def whole(service: Service, ask: Ask, items: AsyncGenerator[Item]) -> dict[str, Any]:
    """The body of an answer that comes in one piece."""
    texts: dict[int, str] = {}
    choices: list[dict[str, Any]] = []
    n_new = 0
    async with aclosing(items):
        async for item in items:
            assert not isinstance(item, Ask)
            index, part = item
            if isinstance(part, Answered):
                n_new += len(part.generation.token_ids)
                choices.append(choice(service.llm, ask, index, texts.get(index, ""), part))
            else:
                texts[index] = texts.get(index, "") + part
    return {**envelope(ask, service.model, choices), "usage": usage(ask, n_new)}


async def events(service: Service, ask: Ask, item: Item, items: AsyncGenerator[Item]) -> AsyncIterator[str]:
    """The events of a streamed answer, of which `item` is the first."""
    n_new, begun = 0, set[int]()

    def event(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**envelope(ask, service.model, [*choices]), **more})}\n\n"

    async with aclosing(items):
        try:
            while True:
                assert not isinstance(item, Ask)
                index, part = item
                if ask.chat and index not in begun:
                    begun.add(index)
                    role = {"role": "assistant", "content": ""}
                    yield event({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
                if isinstance(part, Answered):
                    n_new += len(part.generation.token_ids)
                    yield event(choice(service.llm, ask, index, "", part))
                else:
                    yield event(choice(service.llm, ask, index, part))
                item = await anext(items)
        except StopAsyncIteration:
            if ask.include_usage:
                yield event(usage=usage(ask, n_new))
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {bytes(failed(service, error).body).decode()}\n\n"
