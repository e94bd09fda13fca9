"""The ASGI application of the live page: routes and their handlers.

Input: a `Page` with the data of the run, and access rules. Output: an application.
Errors are JSON with one line for people; an invalid request is answered with 400.
"""

import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mjax.observe.page import assets, live
from mjax.observe.page.answers import Page, encode
from mjax.observe.page.guard import Guard
from mjax.observe.page.query import BadQueryError, Query

type _Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(page: Page, *, token: str, names: frozenset[str]) -> Starlette:
    """Build the application.

    Args:
      page: page of a run; the caller starts and closes it.
      token: token that requests must have.
      names: host names under which the page may be requested.
    """
    quick: dict[str, Callable[[Query], Any]] = {
        "run": page.run,
        "events": page.events,
        "rank": page.rank,
        "state": page.state,
    }
    slow: dict[str, Callable[[Query], Awaitable[Any]]] = {
        "metrics": page.metrics,
        "stragglers": page.stragglers,
        "timeline": page.timeline,
        "stuck": page.stuck,
        "ledger": page.ledger,
        "whatif": page.whatif,
    }
    routes = {
        "/": _index,
        "/static/{name:path}": _static,
        "/api/heat": _heat(page),
        "/live": _live(page),
        **{f"/api/{name}": _quick(of) for name, of in quick.items()},
        **{f"/api/{name}": _slow(of) for name, of in slow.items()},
    }
    return Starlette(
        routes=[Route(path, _safe(endpoint)) for path, endpoint in routes.items()],
        middleware=[Middleware(Guard, token=token, names=names)],
        exception_handlers={404: _not_found},
    )


def _safe(endpoint: _Endpoint) -> _Endpoint:
    """Return an endpoint that answers invalid requests and internal errors in one line.

    The endpoint runs inside the guard, which also adds its headers to these answers.
    """

    async def safe(request: Request) -> Response:
        try:
            return await endpoint(request)
        except BadQueryError as error:
            return _json({"error": str(error)}, 400)
        except Exception as error:  # a bug in mjax must not end the page
            traceback.print_exception(error, file=sys.stderr)
            text = f"{type(error).__name__} in the server; details are on its stderr"
            return _json({"error": text}, 500)

    return safe


def _json(content: Any, status: int = 200) -> Response:
    body = content if isinstance(content, bytes) else encode(content)
    return Response(body, status_code=status, media_type="application/json")


def _quick(answer: Callable[[Query], Any]) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        query = Query(request.query_params)
        return _json(await run_in_threadpool(answer, query))

    return endpoint


def _slow(answer: Callable[[Query], Awaitable[Any]]) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        return _json(await answer(Query(request.query_params)))

    return endpoint


def _heat(page: Page) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        query = Query(request.query_params)
        body = await run_in_threadpool(page.heat, query)
        return Response(body, media_type="application/octet-stream")

    return endpoint


def _live(page: Page) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        rows = live.rows_seen(request.headers.get("last-event-id"))
        return StreamingResponse(
            live.stream(page, rows),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    return endpoint


async def _index(request: Request) -> Response:
    return _file(request, "index.html")


async def _static(request: Request) -> Response:
    return _file(request, request.path_params["name"])


def _file(request: Request, name: str) -> Response:
    found = assets.read(name)
    if found is None:
        return _json({"error": f"there is no file {name[:200]}"}, 404)
    headers = {"etag": found.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, headers=headers | {"content-type": found.content_type})


async def _not_found(request: Request, error: Exception) -> Response:
    path = request.url.path[:200]
    return _json({"error": f"there is nothing at {path}; the page is at /"}, 404)
