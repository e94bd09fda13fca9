"""Access control of the server: tokens, host names, and JSON only.

Input: a request's headers. Output: nothing, or an ApiError. The rules are in `judge`;
`Guard` applies them before a body is read.

Without tokens the server listens on a loopback address. It must then refuse requests of
web pages in a browser on the same machine. A page may send a form or plain text to any
address, and a host name that its owner points at 127.0.0.1 makes the server part of the
page's site (DNS rebinding). So the header Host must name this machine, and bodies must
be declared as JSON. For JSON a browser first requests permission, which the server does
not grant.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from mjax.cli import listening
from mjax.cli.listening import asgi
from mjax.generate.server.errors import ApiError

_REMEDY = "write one token per line, as openssl rand -hex 16 prints them"
_JSON = re.compile(r"application/json(\s*;.*)?", re.IGNORECASE)
_OPEN_PATH = "/health"
"""Path that needs no token, for load balancers; it reveals nothing."""
LOCAL_NAMES = frozenset({"localhost"})


def read_tokens(path: Path) -> frozenset[str]:
    """Return the tokens of a file, one per line; lines with # are comments.

    Raises:
      ValueError: the file cannot be read, others may read it, or a line is not a token.
    """
    lines = listening.read_private(path, _REMEDY).splitlines()
    tokens = [line.strip() for line in lines if not line.lstrip().startswith("#")]
    tokens = [token for token in tokens if token]
    for number, token in enumerate(tokens, 1):
        if not listening.TOKEN.fullmatch(token):
            raise ValueError(
                f"--token-file {path}: token {number} must have 16 to 256 letters, "
                f"digits, hyphens, dots, tildes or underscores; {_REMEDY}"
            )
    if not tokens:
        raise ValueError(f"--token-file {path} has no token; {_REMEDY}")
    return frozenset(tokens)


def judge(
    method: str, path: str, headers: Mapping[str, str], tokens: frozenset[str]
) -> None:
    """Refuse a request without permission.

    Args:
      method: HTTP method.
      path: requested path.
      headers: headers by name, in lower case.
      tokens: accepted API tokens; empty: none is required.
    Raises:
      ApiError: 401, 403 or 415.
    """
    host = headers.get("host", "")
    if not tokens and not listening.is_known_host(host, LOCAL_NAMES):
        raise ApiError(
            403,
            "this server accepts only requests to its own machine, got the host "
            f"{host[:100]!r}; use 127.0.0.1 or localhost",
            code="unknown_host",
        )
    if tokens and path != _OPEN_PATH and not _has_token(headers, tokens):
        raise ApiError(
            401,
            "the API key is missing or wrong; send a token of the server's "
            "--token-file as Authorization: Bearer TOKEN",
            code="invalid_api_key",
        )
    kind = headers.get("content-type", "")
    if method == "POST" and not _JSON.fullmatch(kind):
        raise ApiError(
            415,
            f"the header Content-Type must be application/json, got {kind[:100]!r}",
            code="unsupported_media_type",
        )


def _has_token(headers: Mapping[str, str], tokens: frozenset[str]) -> bool:
    """Return whether the request has a token.

    All tokens are compared, so that the time does not reveal a close match.
    """
    scheme, _, given = headers.get("authorization", "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else ""
    equal = [listening.is_equal(given, token) for token in tokens]
    return any(equal)


class Guard:
    """Applies `judge` to each request."""

    def __init__(self, app: ASGIApp, *, tokens: frozenset[str]) -> None:
        """Wrap an application.

        Args:
          app: gets the permitted requests.
          tokens: accepted API tokens; empty: none is required.
        """
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise its refusal."""
        if scope["type"] == "http":
            headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in scope["headers"]
            }
            judge(scope["method"], scope["path"], headers, self._tokens)
            if scope["path"] != _OPEN_PATH:
                asgi.authenticate(scope)
        await self._app(scope, receive, send)
