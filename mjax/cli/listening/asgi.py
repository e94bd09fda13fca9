"""uvicorn servers with limits on their connections.

Input: an ASGI application. Output: a `uvicorn.Server` whose connections pass an
`Admission`. The application calls `authenticate` once it permits a request.
"""

import socket
from collections.abc import MutableMapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mjax.cli.listening import AT_ONCE, keep_more
from mjax.cli.listening.admission import Admission, Peer

_PEER = "mjax.peer"
"""Key of a connection's `Peer` in the state of its requests."""
_FIRST_BYTES = 2**18 + 2**16
"""Maximum size of a head and of what asyncio reads with it at once: the beginning of a
body arrives before the application has seen the head."""
_SWEEP_S = 1


def make_server(
    app: ASGIApp, listening: socket.socket, *, bad_request: bytes, **options: Any
) -> uvicorn.Server:
    """Return a server that is not running yet.

    Args:
      app: the application.
      listening: the listening socket.
      bad_request: JSON that answers what is not HTTP.
      options: more arguments of `uvicorn.Config`.
    """
    admission = Admission(first_bytes=_FIRST_BYTES)

    async def sweep() -> None:
        keep_more(listening.fileno())
        admission.sweep()

    config = uvicorn.Config(
        lambda: _watched(app),
        factory=True,  # otherwise uvicorn tries to detect it
        http=type(
            "Protocol",
            (_Protocol,),
            {"admission": admission, "bad_request": bad_request},
        ),
        access_log=False,  # addresses may contain tokens
        # Applications report their failures; the rest is caused by strangers.
        log_level="critical",
        interface="asgi3",
        lifespan="off",
        ws="none",
        backlog=AT_ONCE,
        proxy_headers=False,
        server_header=False,
        loop="asyncio",
        callback_notify=sweep,  # first when the server has started
        timeout_notify=_SWEEP_S,
        **options,
    )
    return uvicorn.Server(config)


def authenticate(scope: MutableMapping[str, Any]) -> None:
    """Note that the client of a request may use the server.

    Other ASGI servers, such as those of tests, have no limits to lift.
    """
    peer: Peer | None = scope.get("state", {}).get(_PEER)
    if peer is not None:
        peer.authenticate()


class _Protocol(H11Protocol):
    """uvicorn's protocol, with an admission and answers in JSON."""

    admission: Admission
    bad_request: bytes
    _peer: Peer

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        self._peer = self.admission.enter(connection.fileno, transport.abort)
        self.app_state = {**self.app_state, _PEER: self._peer}

    def data_received(self, data: bytes) -> None:
        self._peer.count(len(data))
        if not self.transport.is_closing():
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._peer.leave()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        del msg
        head = (
            "HTTP/1.1 400 Bad Request\r\nconnection: close\r\n"
            f"content-type: application/json\r\n"
            f"content-length: {len(self.bad_request)}\r\n\r\n"
        )
        self.transport.write(head.encode() + self.bad_request)
        self.transport.close()


def _watched(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that a peer is busy except while it sends a request."""

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # uvicorn closes a connection that got no answer
        peer: Peer = scope["state"][_PEER]
        is_whole = False

        async def receive_watched() -> Message:
            nonlocal is_whole
            if not is_whole:
                peer.wait()
            message = await receive()
            peer.begin()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        peer.begin()
        try:
            await app(scope, receive_watched, send)
        finally:
            peer.rest()

    return watched
