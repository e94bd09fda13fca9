"""Answer the other hosts of a mirror over HTTP.

A request names a block and carries the secret of the run. If an answer takes long, the
server first answers that it is busy, so a slow host does not count as lost.
"""

import concurrent.futures
import http
import socket
import threading
from collections.abc import Callable, Collection

from mjax.cli.listening import BACKLOG, threads
from mjax.data.mirror.peers import BUSY

_NUM_ANSWERS = 8  # blocks in memory for other hosts at the same time


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


class Server:
    """Server that answers until `close`."""

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
        fields = {"owner": self, "timeout": timeout_s, "token": token}
        self.blocks, self.timeout_s = blocks, timeout_s
        self.answers = threading.Semaphore(_NUM_ANSWERS)
        self._server = threads.Server(
            listener or _listen(address),
            type("Handler", (_Handler,), fields),
        )

    def close(self) -> None:
        """Stop answering."""
        self._server.close()


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the mirror of this host cannot listen on {address[0]}:{address[1]} "
            f"({error.strerror}); end the process that does, or give another port",
        ) from None


class _Handler(threads.Handler):
    disable_nagle_algorithm = True
    denial = (http.HTTPStatus.FORBIDDEN, "the token is of another run")
    owner: Server

    def do_GET(self) -> None:
        if self._has_name():
            self._send_block(lambda: self.owner.blocks.read(self.path[1:]))

    def do_POST(self) -> None:
        if not self._has_name():
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
        if self._has_name():
            self.owner.blocks.remove(self.path[1:])
            self._send_text(http.HTTPStatus.OK, "")

    @property
    def _busy_s(self) -> float:
        """Seconds until a waiting host receives a busy answer."""
        return self.owner.timeout_s / 3  # an answer may wait this long twice

    def _has_name(self) -> bool:
        if self.path[1:] in self.owner.blocks.names:
            return True
        self._send_text(http.HTTPStatus.CONFLICT, "")
        return False

    def _send_block(self, read: Callable[[], bytes | None]) -> None:
        if not self.owner.answers.acquire(timeout=self._busy_s):
            self._send_text(BUSY, "")
            return
        try:
            content = read()
            if content is None:
                self._send_text(http.HTTPStatus.NOT_FOUND, "")
            else:
                self.write(http.HTTPStatus.OK, content)
        finally:
            self.owner.answers.release()

    def _send_text(self, status: http.HTTPStatus, text: str) -> None:
        self.write(status, text.encode("utf-8", "replace"))
