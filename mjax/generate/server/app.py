"""The ASGI application: routes and the handling of one request.

Input: the served model and a scheduler. Output: an application. Errors have OpenAI's
format. An error after the first bytes of a stream ends the stream without `[DONE]`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mjax.generate.server import answers, bodies, metrics, prompts, protocol
from mjax.generate.server.auth import Guard
from mjax.generate.server.bodies import ClientGoneError
from mjax.generate.server.errors import ApiError
from mjax.generate.server.prompts import Job, Served
from mjax.generate.server.protocol import Options
from mjax.generate.server.scheduler import Scheduler, Ticket

_GOODBYE_S = 1.0
"""Seconds for which the server tries to send the error at the end of a stream. A client
that does not read must not block the server."""
_JSON = [(b"content-type", b"application/json")]
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_GONE = 499
"""Status that is counted if a client disconnects before its answer, as in nginx."""
_IS_GONE = "mjax.is_gone"
_KNOWN_TOKENS = 1 << 16
"""Maximum number of token texts in the cache. The texts take a few MB."""


def make_app(
    served: Served,
    scheduler: Scheduler,
    *,
    tokens: frozenset[str],
    counters: metrics.Metrics,
) -> ASGIApp:
    """Build the application.

    Args:
      served: the model and its limits.
      scheduler: scheduler of the engine.
      tokens: accepted API tokens; empty: none is required.
      counters: counters of the server.
    """
    pages = _Pages(served, scheduler, counters)
    completions = _Generation("completion", served, scheduler, counters)
    chat = _Generation("chat", served, scheduler, counters)
    routes = [
        Route("/health", pages.health, methods=["GET"]),
        Route("/metrics", pages.metrics, methods=["GET"]),
        Route("/v1/models", pages.models, methods=["GET"]),
        Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    handlers = {HTTPException: _no_route, ApiError: _refused, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return _Outermost(Guard(app, tokens=tokens), counters)


class _Outermost:
    """Answers refused requests, counts answers, and reports bugs."""

    def __init__(self, app: ASGIApp, counters: metrics.Metrics) -> None:
        self._app, self._counters = app, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None

        async def send_seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except ApiError as error:
            await _send_whole(send_seen, error.status, error.body(), error.headers)
        except Exception as error:  # a bug must not end more than its request
            traceback.print_exception(error, file=sys.stderr)
        finally:
            # Unknown paths must not become names of counters.
            path = scope["path"] if "endpoint" in scope else "other"
            if path.startswith("/v1/models/"):
                path = "/v1/models/"
            code = _GONE if status is None or _IS_GONE in scope else status
            self._counters.answers[path, code] += 1


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        said = ApiError(405, f"{path} does not accept {method}; use {allowed}")
        said.headers["allow"] = allowed
    else:
        said = ApiError(
            404,
            f"there is nothing at {method} {path}; this server has /v1/completions, "
            "/v1/chat/completions, /v1/models, /health and /metrics",
            code="unknown_url",
        )
    return await _refused(request, said)


async def _refused(request: Request, error: Exception) -> Response:
    """Answer an error that is meant for clients."""
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers, "application/json")


async def _bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected error; Starlette raises it again."""
    kind = type(error).__name__
    said = ApiError(500, f"{kind} in the server; its stderr has details")
    return await _refused(request, said)


class _Pages:
    """Answers that need no engine."""

    def __init__(
        self, served: Served, scheduler: Scheduler, counters: metrics.Metrics
    ) -> None:
        self._served, self._scheduler, self._counters = served, scheduler, counters

    async def health(self, request: Request) -> Response:
        """Report whether new requests are accepted."""
        state = self._scheduler.state
        status = 200 if state == "ok" else 503
        return _json({"status": state}, status)

    async def metrics(self, request: Request) -> Response:
        """Return counters for Prometheus."""
        gauges = {
            "open_answers": self._scheduler.num_open,
            "running_answers": self._scheduler.num_running,
            "waiting_answers": self._scheduler.num_waiting,
        }
        counts = dataclasses.asdict(self._scheduler.counts)
        text = self._counters.text(gauges, counts)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe a model."""
        prompts.check_model(request.path_params["name"], self._served)
        return _json(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created_s,
            "owned_by": "mjax",
            "max_model_len": self._served.max_len,
        }


class _Generation:
    """Handles the requests to one of the two endpoints that generate text."""

    def __init__(
        self,
        kind: answers.Kind,
        served: Served,
        scheduler: Scheduler,
        counters: metrics.Metrics,
    ) -> None:
        self._kind: answers.Kind = kind
        self._served, self._scheduler, self._counters = served, scheduler, counters
        self._decode = functools.lru_cache(_KNOWN_TOKENS)(_token_text(served))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes away."""
        try:
            await self._answer(scope, receive, send)
        except ClientGoneError:
            scope[_IS_GONE] = True

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, check, accept, generate and answer."""
        self._scheduler.check_open()
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        body = await bodies.read(receive, headers, self._served.limits)
        # Tokenizers and templates take milliseconds, and streams must not wait for
        # them.
        job, options = await run_in_threadpool(self._prepare, body)
        with self._ticket(job) as ticket:
            writer = answers.Writer(
                self._kind,
                job,
                model=self._served.name,
                decode=self._decode,
                with_logprobs=options.num_alternatives is not None,
                include_usage=options.include_usage,
            )
            answer = self._stream if options.stream else self._whole
            try:
                await bodies.while_connected(answer(ticket, writer, send), receive)
            finally:
                self._counters.num_tokens += writer.num_tokens

    def _prepare(self, body: bytes) -> tuple[Job, Options]:
        if self._kind == "chat":
            chat = protocol.read_chat(body)
            return prompts.chat_job(chat, self._served), chat.options
        completion = protocol.read_completion(body)
        return prompts.completion_job(completion, self._served), completion.options

    @contextlib.contextmanager
    def _ticket(self, job: Job) -> Iterator[Ticket]:
        """Accept a job and yield its ticket; free its capacity at the end."""
        ticket = self._scheduler.open(job.requests)
        self._counters.num_prompt_tokens += job.num_prompt_tokens
        try:
            yield ticket
        finally:
            self._scheduler.close(ticket)
            self._counters.request_s.add(time.monotonic() - ticket.opened_s)

    async def _read(self, ticket: Ticket) -> list[tuple[int, answers.Event]]:
        """Wait within the time limit; return pairs of (index of the choice, event).

        Raises:
          ApiError: the time is up, or the request has failed.
        """
        try:
            async with asyncio.timeout(self._left_s(ticket)):
                return await ticket.read()
        except TimeoutError:
            raise self._late() from None

    def _left_s(self, ticket: Ticket) -> float:
        return ticket.opened_s + self._served.limits.request_s - time.monotonic()

    def _late(self) -> ApiError:
        return ApiError(
            503,
            f"the answer was not complete after {self._served.limits.request_s:g} s "
            "(--request-s of this server); request fewer tokens, or try again",
            code="timeout",
            retry_after_s=10,
        )

    async def _whole(self, ticket: Ticket, writer: answers.Writer, send: Send) -> None:
        is_first = True
        while events := await self._read(ticket):
            if is_first:
                self._count_first(ticket)
            is_first = False
            writer.add(events)
        await _send_whole(send, 200, writer.whole())

    async def _stream(self, ticket: Ticket, writer: answers.Writer, send: Send) -> None:
        # Send no status before the first token: until then an error sets the status.
        events = await self._read(ticket)
        self._count_first(ticket)
        await _send_start(send, 200, _STREAM)
        try:
            async with asyncio.timeout(self._left_s(ticket)):
                await _send_part(send, writer.first())
                while events:
                    await _send_part(send, writer.pieces(events))
                    events = await self._read(ticket)
                await _send_part(send, writer.last())
        except (ApiError, TimeoutError) as error:
            said = error if isinstance(error, ApiError) else self._late()
            # A client that stopped reading cannot receive this either, so it is
            # disconnected.
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await _send_part(send, answers.error_event(said.content()))
            except TimeoutError:
                raise ClientGoneError from None
        await _send_end(send)

    def _count_first(self, ticket: Ticket) -> None:
        self._counters.first_token_s.add(time.monotonic() - ticket.opened_s)


def _token_text(served: Served) -> Callable[[int], str]:
    """Return a function: token id -> text of the token, or the id without a text."""

    def text(token: int) -> str:
        decoded = served.tokenizer.decode(np.array([token]))
        # The token is only a part of a character, or there is no token with this id.
        return f"token_id:{token}" if "\ufffd" in decoded or not decoded else decoded

    return text


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, None, "application/json")


async def _send_whole(
    send: Send, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    added = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    length = (b"content-length", str(len(body)).encode())
    await _send_start(send, status, [*_JSON, length, *added])
    await send({"type": "http.response.body", "body": body})


async def _send_start(
    send: Send, status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    start = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)


async def _send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def _send_end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})
