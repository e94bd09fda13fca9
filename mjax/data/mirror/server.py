"""Answer the other hosts of a mirror over HTTP.

A request names a block and carries the secret of the run. If an answer takes long, the
server first answers that it is busy, so a slow host does not count as lost.
"""

import concurrent.futures
import hmac
import http
import http.server
import logging
import socket
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

from mjax.data.mirror.peers import BUSY

_POLL_S = 0.05  # seconds within which the server notices `close`
_NUM_ANSWERS = 8  # blocks in memory for other hosts at the same time
_SEND_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Blocks:
    """The blocks that a server returns."""

    def __init__(
        self,
        names: Collection[str],
        read: Callable[[str], bytes | None],
        fetch: Callable[[str], bytes],
        remove: Callable[[str], None],
        num_fetches: int,
    ) -> None:
        """Store the functions that access the blocks of a host.

        Args:
          names: names of all blocks of the data set.
          read: returns a sealed block from this disk; None if it is absent.
          fetch: returns a sealed block, reading the remote if necessary. Raises OSError
            or ValueError.
          remove: removes a block from this disk.
          num_fetches: number of blocks that are fetched at the same time.
        """
        self.names, self.read, self.remove = names, read, remove
        self._fetch, self._lock = fetch, threading.Lock()
        self._turns = threading.Semaphore(num_fetches)
        self._under_way: dict[str, concurrent.futures.Future[bytes]] = {}

    def fetched(self, block: str) -> concurrent.futures.Future[bytes]:
        """Start fetching a block, or return the future of a fetch that is running."""
        with self._lock:
            future = self._under_way.get(block)
            if future is None:
                future = self._under_way[block] = concurrent.futures.Future()
                act = (block, future)
                threading.Thread(target=self._run, args=act, daemon=True).start()
            return future

    def _run(self, block: str, future: concurrent.futures.Future[bytes]) -> None:
        try:
            with self._turns:
                future.set_result(self._fetch(block))
        except BaseException as error:  # the waiting host receives the error
            future.set_exception(error)
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            with self._lock:
                del self._under_way[block]


class Server(http.server.ThreadingHTTPServer):
    """Server that answers until `close`."""

    daemon_threads = True

    def __init__(
        self,
        blocks: Blocks,
        token: str,
        timeout_s: float,
        address: tuple[str, int],
        listener: socket.socket | None = None,
    ) -> None:
        """Start answering, in threads.

        Args:
          blocks: the blocks of this host.
          token: secret of the run.
          timeout_s: seconds within which other hosts expect a byte.
          address: address and port to listen on.
          listener: socket that listens there; None opens one.
        Raises:
          OSError: the address cannot be used.
        """
        handler = type("Handler", (_Handler,), {"owner": self, "timeout": timeout_s})
        super().__init__(address, handler, bind_and_activate=False)
        self.blocks, self.token, self.timeout_s = blocks, token, timeout_s
        self.answers = threading.Semaphore(_NUM_ANSWERS)
        self.socket.close()
        self.socket = listener or _listen(address)
        turn = self.serve_forever
        threading.Thread(target=turn, args=(_POLL_S,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log in one line that a host was lost while it was being answered."""
        error = sys.exception()
        if isinstance(error, OSError):
            _log.debug("mirror: %s left before its answer (%s)", client_address, error)
        else:
            super().handle_error(request, client_address)


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the mirror of this host cannot listen on {address[0]}:{address[1]} "
            f"({error.strerror}); end the process that does, or give another port",
        ) from None


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        if self._is_allowed():
            self._send_block(lambda: self.owner.blocks.read(self.path[1:]))

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        future = self.owner.blocks.fetched(self.path[1:])
        concurrent.futures.wait([future], self._busy_s)
        if not future.done():
            self._send_text(BUSY, "")
        elif error := future.exception():
            text = f"{error}" or type(error).__name__
            self._send_text(http.HTTPStatus.BAD_GATEWAY, text)
        else:
            self._send_block(future.result)

    def do_DELETE(self) -> None:
        if self._is_allowed():
            self.owner.blocks.remove(self.path[1:])
            self._send_text(http.HTTPStatus.OK, "")

    @property
    def _busy_s(self) -> float:
        """Seconds until a waiting host receives a busy answer."""
        return self.owner.timeout_s / 3  # an answer may wait this long twice

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.owner.token}".encode()):
            self._send_text(http.HTTPStatus.FORBIDDEN, "")
            return False
        if self.path[1:] not in self.owner.blocks.names:
            self._send_text(http.HTTPStatus.CONFLICT, "")
            return False
        return True

    def _send_block(self, read: Callable[[], bytes | None]) -> None:
        if not self.owner.answers.acquire(timeout=self._busy_s):
            self._send_text(BUSY, "")
            return
        try:
            content = read()
            if content is None:
                self._send_text(http.HTTPStatus.NOT_FOUND, "")
            else:
                self._send(http.HTTPStatus.OK, content)
        finally:
            self.owner.answers.release()

    def _send_text(self, status: http.HTTPStatus, text: str) -> None:
        self._send(status, text.encode("utf-8", "replace"))

    def _send(self, status: http.HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        view = memoryview(content)  # the connection's time limit is per write
        for start in range(0, len(view), _SEND_BYTES):
            self.wfile.write(view[start : start + _SEND_BYTES])

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log line of each request."""
