"""Serve the page on a port: a socket, and a server in its own thread.

Input: a `Page`, an address, a token. Output: a server that answers until `close`,
which also ends the open event streams of viewers.
"""

import re
import threading
import time

import uvicorn

from mjax import listening
from mjax.observe.page.answers import Page
from mjax.observe.page.app import make_app
from mjax.observe.page.guard import names_of

_GRACE_S = 2
"""Seconds for pending answers when the server stops. The value was picked by judgement,
not measured."""
_LISTEN = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


def address_of(listen: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address needs brackets.

    Raises:
      ValueError: the text is not an address.
    """
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found[3]) > 65535:
        raise ValueError(
            f"--listen must be HOST:PORT with a port up to 65535, got {listen}; write "
            "--listen 127.0.0.1:7450"
        )
    return found[1] or found[2], int(found[3])


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
        host, port = address_of(listen)
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
        config = uvicorn.Config(
            make_app(page, token=token, names=names_of(host)),
            access_log=False,  # addresses contain the token
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
        """Return whether the server still answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End event streams and pending answers, and release the port."""
        self._page.stopping.set()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
