"""Access rules of the page: host names, methods and token; and headers of all answers.

Input: a request. Output: a refusal, or the forwarded request, with security headers on
every answer. The rules are pure functions; `Guard` applies them.

Requests with a foreign host name are refused, since an attacker may point that name at
this machine (DNS rebinding). An IP address cannot be redirected.
"""

import dataclasses
import hashlib
import socket
import urllib.parse
from collections.abc import Mapping

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mjax.cli.listening import asgi, is_equal, is_known_host

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: no content from other servers, no inline code."""
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_COOKIE = "mjax_page_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """Answer to a request that is not forwarded: an error, or a redirect."""

    status: int
    text: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The parts of a request that the rules use."""

    method: str
    path: str
    host: str
    """Value of the header Host."""
    token: str | None
    """Token in the query."""
    bearer: str | None
    """Token in the header Authorization."""
    cookies: Mapping[str, str]


def cookie_name(token: str) -> str:
    """Return the name of the cookie for a page.

    All ports of a host share its cookies, so two pages need different names.
    """
    return _COOKIE + hashlib.sha256(token.encode()).hexdigest()[:8]


def names_of(listen_host: str) -> frozenset[str]:
    """Return the host names under which the page may be requested, without ports."""
    own = {"localhost", listen_host, socket.gethostname()}
    return frozenset(name.lower().rstrip(".") for name in own if name)


def judge(asked: Request, token: str, names: frozenset[str]) -> Refusal | None:
    """Return the answer to a request that is not forwarded; None if it is forwarded.

    A request for the page with a valid token in its query is answered with the page's
    cookie and a redirect to the page without the token.
    """
    if not is_known_host(asked.host, names):
        return Refusal(
            status=421,
            text="this page is not served under this host name; use localhost, the "
            "name or the IP address of its machine",
        )
    if asked.method != "GET":
        return Refusal(
            status=405,
            text="this page is read-only; use GET",
            headers=(("allow", "GET"),),
        )
    if asked.path == "/" and asked.token is not None:
        if not is_equal(asked.token, token):
            return _not_allowed()
        cookie = f"{cookie_name(token)}={token}; Path=/; HttpOnly; SameSite=Strict"
        return Refusal(
            status=303, text="", headers=(("location", "/"), ("set-cookie", cookie))
        )
    given = asked.bearer or asked.cookies.get(cookie_name(token)) or ""
    return None if is_equal(given, token) else _not_allowed()


def _not_allowed() -> Refusal:
    return Refusal(
        status=401,
        text="the token is missing or wrong; open the address that "
        "`python -m mjax.observe serve` printed",
        headers=(("www-authenticate", "Bearer"),),
    )


class Guard:
    """Applies `judge` to each request, and adds headers to each answer."""

    def __init__(self, app: ASGIApp, *, token: str, names: frozenset[str]) -> None:
        """Wrap an application.

        Args:
          app: application that receives allowed requests.
          token: token that requests must have; printable ASCII without separators.
          names: host names of this machine.
        """
        self._app, self._token, self._names = app, token, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request or forward it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here; the server closes unanswered connections

        path = scope["path"]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with_headers(message, path)}
            await send(message)

        refusal = judge(_request(scope), self._token, self._names)
        if refusal is None:
            asgi.authenticate(scope)
            await self._app(scope, receive, send_with_headers)
        else:
            await _answer(refusal, path, send_with_headers)


def _request(scope: Scope) -> Request:
    """Read the parts of a request that the rules use."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"))
    scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
    # Other servers on this host may have set cookies that violate the standard.
    pairs = (pair.partition("=") for pair in headers.get(b"cookie", "").split(";"))
    return Request(
        method=scope["method"],
        path=scope["path"],
        host=headers.get(b"host", ""),
        token=query.get("token", [None])[0],
        bearer=bearer.strip() if scheme.lower() == "bearer" else None,
        cookies={name.strip(): value.strip() for name, _, value in pairs},
    )


def _with_headers(message: Message, path: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer, with the security headers."""
    added = dict(_HEADERS)
    if not path.startswith("/static/"):
        added["cache-control"] = "no-store"
    own = [(name.lower(), value) for name, value in message.get("headers", [])]
    kept = [(name, value) for name, value in own if name.decode("latin-1") not in added]
    return kept + [(name.encode(), value.encode()) for name, value in added.items()]


async def _answer(refusal: Refusal, path: str, send: Send) -> None:
    """Send a refusal: JSON for programs, one line for people."""
    is_api = path.startswith("/api/") or path == "/live"
    body = refusal.text.encode() + b"\n" * bool(refusal.text)
    content_type = b"text/plain; charset=utf-8"
    if is_api:
        body, content_type = (
            msgspec.json.encode({"error": refusal.text}),
            b"application/json",
        )
    headers = [(name.encode(), value.encode()) for name, value in refusal.headers]
    headers += [
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
    ]
    start = {"type": "http.response.start", "status": refusal.status}
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": body})
