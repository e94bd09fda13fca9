"""The page on a port: a socket, a server in a thread of its own.

Enters: a `Page`, an address, a token. Leaves: a server that answers until `close`, also
while viewers hold event streams open.
"""

import errno
import ipaddress
import re
import socket
import threading
import time

import uvicorn

from mjax.observe.page.answers import Page
from mjax.observe.page.app import make_app
from mjax.observe.page.guard import names_of

_GRACE_S = 2
"""Seconds that answers under way may still take when the server stops. Chosen."""
_BACKLOG = 128
_LISTEN = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


def address_of(listen: str) -> tuple[str, int]:
    """Read HOST:PORT; an IPv6 address stands in brackets.

    Raises:
      ValueError: it is none.
    """
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found[3]) > 65535:
        raise ValueError(
            f"--listen must be HOST:PORT, got {listen}; write --listen 127.0.0.1:7450"
        )
    return found[1] or found[2], int(found[3])


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PageServer:
    """Serves a page until it is closed."""

    def __init__(self, page: Page, *, listen: str, token: str) -> None:
        """Bind the address and begin to answer; `problems` are to be told.

        Args:
          page: of a run; closing it is up to the caller.
          listen: HOST:PORT; port 0 takes a free one.
          token: that requests must have.
        Raises:
          ValueError: the address cannot be used.
        """
        host, port = address_of(listen)
        self._page = page
        self._socket = _bound(host, port, listen)
        port = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        self.address = f"{self.url}?token={token}"
        self.problems: tuple[str, ...] = ()
        if not is_loopback(host):
            self.problems = (
                f"--listen {listen} can be reached from other machines, and nothing is "
                "encrypted: whoever sees the traffic sees the token; --listen "
                "127.0.0.1:7450 and ssh -L do better",
            )
        config = uvicorn.Config(
            make_app(page, token=token, names=names_of(host)),
            access_log=False,  # addresses have the token in them
            log_level="warning",
            interface="asgi3",
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="page", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def is_alive(self) -> bool:
        """Say whether the server still answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End event streams and answers under way, and release the port."""
        self._page.stopping.set()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def _bound(host: str, port: int, listen: str) -> socket.socket:
    """Return a socket that listens.

    Raises:
      ValueError: the address is in use, or is none of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(
            f"--listen {listen}: the host is not known ({error.strerror}); write "
            "--listen 127.0.0.1:7450"
        ) from error
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that has just ended leaves connections that hold the port for a
        # minute; two servers cannot listen on it for all that.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"--listen {listen}: the port is in use; end the program that has it, "
                f"or write --listen {host}:{port + 1 if port < 65535 else 0}"
            ) from error
        raise ValueError(
            f"--listen {listen} cannot be used: {error.strerror}; write --listen "
            "127.0.0.1:7450"
        ) from error
    return made
