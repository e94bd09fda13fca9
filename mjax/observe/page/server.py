"""Serve the page on a port: a socket, and a server in its own thread.

Input: a `Page`, an address, a token. Output: a server that answers until `close`,
which also ends the open event streams of viewers.
"""

import threading
import time

from mjax.cli import listening
from mjax.cli.listening import asgi
from mjax.observe.page.answers import Page
from mjax.observe.page.app import make_app
from mjax.observe.page.guard import names_of

_GRACE_S = 2
"""Seconds for pending answers when the server stops. Not measured."""


class PageServer:
    """Serves a page until `close`."""

    def __init__(self, page: Page, *, listen: str, token: str) -> None:
        """Bind the address and start answering; the caller reports `problems`.

        Args:
          page: page of a run; the caller closes it.
          listen: HOST:PORT; port 0 selects a free one.
          token: token that requests must have.
        Raises:
          ValueError: the address cannot be used.
        """
        host, port = listening.address_of(listen)
        self._page = page
        self._socket = listening.bind(
            host,
            port,
            named=f"--listen {listen}",
            instead=lambda other: f"--listen {host}:{other}",
            default="--listen 127.0.0.1:7450",
        )
        port = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        self.address = f"{self.url}?token={token}"
        self.problems: tuple[str, ...] = ()
        if not listening.is_loopback(host):
            self.problems = (
                f"--listen {listen} can be reached from other machines without "
                "encryption: anyone who sees the traffic sees the token; use "
                "--listen 127.0.0.1:7450 and ssh -L instead",
            )
        self._server = asgi.make_server(
            make_app(page, token=token, names=names_of(host)),
            self._socket,
            bad_request=b'{"error":"the request is not HTTP/1.1"}',
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="page", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def is_alive(self) -> bool:
        """Return whether the server still answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End event streams and pending answers, and release the port."""
        self._page.stopping.set()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
