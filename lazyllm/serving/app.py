"""The application: OpenAI's paths over a Service, as Starlette runs them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from hmac import compare_digest
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lazyllm.generation import Generation
from lazyllm.serving.protocol import Ask, NoSuchModel, choice, envelope, usage
from lazyllm.serving.service import Item, Service
from lazyllm.serving.turns import Busy

T = TypeVar("T")
LARGEST_BODY = 16 << 20  # bytes
OPEN = ("/", "/health")  # without a key
LOOPBACK = ("127.0.0.1", "localhost", "::1")
log = logging.getLogger("lazyllm.serving")


class Problem(NamedTuple):
    """An answer that is an error."""

    status: int
    message: str

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": None}}

    def response(self) -> Response:
        headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status)
        return JSONResponse(self.body, self.status, headers)


def problem_of(error: Exception, service: Service) -> Problem:
    """The status and the sentence for an error of an answer; others than the client's are logged."""
    if isinstance(error, Busy):
        return Problem(429, "too many requests wait already; try again later")
    if isinstance(error, RecursionError):
        return Problem(400, "the request's body is nested too deeply")
    if isinstance(error, MemoryError):
        return Problem(503, service.public(error))
    if isinstance(error, ValueError | TypeError):
        return Problem(404 if isinstance(error, NoSuchModel) else 400, service.public(error))
    log.error("an answer failed", exc_info=error)
    return Problem(500, "the answer failed; the server's log says why")


class KeyCheck(AuthenticationBackend):  # type: ignore[misc]
    """Refuses what comes without the key."""

    def __init__(self, key: str) -> None:
        self.wanted = f"Bearer {key}".encode()

    async def authenticate(self, conn: HTTPConnection) -> None:
        given = conn.headers.get("authorization", "").encode()
        if conn.url.path not in OPEN and not compare_digest(given, self.wanted):
            raise AuthenticationError("the API key is missing or wrong")


class Events(StreamingResponse):  # type: ignore[misc]
    """Server-sent events. However the response ends, so does what makes them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


def create(service: Service, key: str | None = None, host: str = LOOPBACK[0]) -> Starlette:
    """The application. Without a key it answers only requests to `host` or to this machine's own names, so
    that no page in a browser can reach the server by a name of its own."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        model = {"id": service.model, "object": "model", "created": 0, "owned_by": "lazyllm"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(request: Request) -> Response:
        return await answered(request, chat=False)

    async def chat_completions(request: Request) -> Response:
        return await answered(request, chat=True)

    async def answered(request: Request, chat: bool) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return Problem(415, "the content type must be application/json").response()
        body = await request.body()
        items = service.turns.run(lambda: service.answers(body, chat))
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
            return problem_of(error, service).response()

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return Problem(error.status_code, error.detail).response()

    async def failed(request: Request, error: Exception) -> Response:
        return problem_of(error, service).response()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

    middleware = [Middleware(RequestBodyLimitMiddleware, max_body_size=LARGEST_BODY)]
    if key is None:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, host]))
    else:
        wrong = Problem(401, "the API key is missing or wrong")
        middleware.append(
            Middleware(
                AuthenticationMiddleware, backend=KeyCheck(key), on_error=lambda conn, error: wrong.response()
            )
        )
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]
    handlers = {HTTPException: refused, Exception: failed}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


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
            if isinstance(part, Generation):
                n_new += len(part.token_ids)
                choices.append(choice(service.llm, ask, index, texts.get(index, ""), part))
            else:
                texts[index] = texts.get(index, "") + part
    return {**envelope(ask, service.model, choices), "usage": usage(ask, n_new)}


async def events(service: Service, ask: Ask, item: Item, items: AsyncGenerator[Item]) -> AsyncIterator[str]:
    """The events of a streamed answer, of which `item` is the first."""
    n_new, begun = 0, set[int]()

    def chunk(*choices: dict[str, Any], **more: Any) -> str:
        return event({**envelope(ask, service.model, [*choices]), **more})

    async with aclosing(items):
        try:
            while True:
                assert not isinstance(item, Ask)
                index, part = item
                if ask.chat and index not in begun:
                    begun.add(index)
                    role = {"role": "assistant", "content": ""}
                    yield chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
                if isinstance(part, Generation):
                    n_new += len(part.token_ids)
                    yield chunk(choice(service.llm, ask, index, "", part))
                else:
                    yield chunk(choice(service.llm, ask, index, part))
                item = await anext(items)
        except StopAsyncIteration:
            if ask.include_usage:
                yield chunk(usage=usage(ask, n_new))
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(problem_of(error, service).body)


def event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
