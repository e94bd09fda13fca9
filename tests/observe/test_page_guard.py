"""The page answers only requests with the token, under its own host names."""

import asyncio
from typing import Any

import pytest

from mjax.observe.page.guard import (
    Guard,
    Request,
    cookie_name,
    judge,
    names_of,
)

TOKEN = "0123456789abcdef"
NAMES = frozenset({"localhost", "head"})


def asked(**changes) -> Request:
    fields: dict[str, Any] = {
        "method": "GET",
        "path": "/api/run",
        "host": "localhost:7450",
    }
    fields |= {"token": None, "bearer": None, "cookies": {}}
    return Request(**(fields | changes))


def status(**changes) -> int:
    refusal = judge(asked(**changes), TOKEN, NAMES)
    return 200 if refusal is None else refusal.status


def test_a_request_without_the_token_is_refused():
    assert status() == 401
    assert status(path="/") == 401
    assert status(path="/static/main.js") == 401


@pytest.mark.parametrize("given", ["", "0123456789abcdeF", TOKEN + "0", "é" * 16])
def test_a_wrong_token_is_refused_in_all_three_places(given):
    assert status(bearer=given) == 401
    assert status(cookies={cookie_name(TOKEN): given}) == 401
    assert status(path="/", token=given) == 401


def test_a_bearer_or_a_cookie_is_enough():
    assert status(bearer=TOKEN) == 200
    assert status(cookies={cookie_name(TOKEN): TOKEN}) == 200


def test_cookies_of_other_servers_do_not_hide_that_of_the_page():
    answered = []

    async def app(scope, receive, send):
        answered.append(scope["path"])

    cookie = f'x=" ; a[1]=\xff, ; {cookie_name(TOKEN)}={TOKEN}; =;'
    headers = [(b"host", b"localhost"), (b"cookie", cookie.encode("latin-1"))]
    scope = {"type": "http", "method": "GET", "path": "/api/run", "headers": headers}
    asking = Guard(app, token=TOKEN, names=NAMES)(
        scope | {"query_string": b""}, no_call, no_call
    )
    asyncio.run(asking)
    assert answered == ["/api/run"]


async def no_call(*_):
    raise AssertionError("nothing is to be read or sent")


def test_the_token_in_the_address_becomes_a_cookie_that_scripts_cannot_read():
    refusal = judge(asked(path="/", token=TOKEN), TOKEN, NAMES)
    assert refusal is not None
    headers = dict(refusal.headers)
    assert (refusal.status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"{cookie_name(TOKEN)}={TOKEN};")
    assert {"Path=/", "HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))


def test_the_token_in_the_address_of_the_api_does_not_count():
    assert status(path="/api/run", token=TOKEN) == 401


def test_pages_with_other_tokens_have_cookies_of_other_names():
    assert cookie_name(TOKEN) != cookie_name(TOKEN[::-1])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_other_methods_than_get_are_refused(method):
    assert status(method=method, bearer=TOKEN) == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7450", "", "localhost.evil", "a@localhost/x"]
)
def test_a_name_that_points_here_from_elsewhere_is_refused(host):
    assert status(host=host, bearer=TOKEN) == 421


def test_the_name_that_is_listened_to_is_known():
    assert "head" in names_of("head")
    assert "localhost" in names_of("0.0.0.0")
