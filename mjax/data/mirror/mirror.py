"""Read blocks of a remote data set from this disk, another host, or the remote.

One host per block reads the remote: the first of the block's hosts that answers. Each
host gets an equal share of the rate limit. Fixed shares need no agreement, and they
suffice because `placement` spreads the first hosts evenly; a shared token bucket would
have to survive the loss of the host that holds it.
"""

import dataclasses
import hashlib
import hmac
import http.client
import http.server
import logging
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from mjax.data.mirror import placement
from mjax.data.mirror.blocks import BlockStore, sealed, unsealed
from mjax.data.mirror.checksums import Comparison

BLOCK_BYTES = 64 << 20
_DOWN_S = 30.0  # until a host that did not answer is asked again
_RETRY_S = (1.0, 2.0, 4.0)  # waits before the remote is asked again
_POLL_S = 0.05  # a server notices within this time that it is to end
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """One file of a remote data set."""

    name: str
    size: int
    """Size in bytes."""
    checksum: str
    """Checksum from the remote: sha256:HEX, or git:HEX for the hash of a git blob. Text
    of another form identifies the content together with the name, and is not compared.
    """

    @property
    def identity(self) -> str:
        """Return a text that is equal for equal content only."""
        is_hash = self.checksum.startswith(("sha256:", "git:"))
        return f"{'' if is_hash else self.name}\n{self.checksum}\n{self.size}"


class WrongContentError(OSError):
    """A file does not have the checksum that the remote states."""


@runtime_checkable
class Remote(Protocol):
    """The store that a mirror reads."""

    @property
    def files(self) -> Sequence[RemoteFile]:
        """Return the files, the same on every host."""
        ...

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of a file.

        Raises:
          OSError: the store does not answer.
          ValueError: it refuses, or the file has changed.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """Settings that are the same on all hosts of a mirror."""

    addresses: Mapping[str, tuple[str, int]]
    """Address and port of the server of each host."""
    token: str
    """Secret of the run; a request without it is refused."""
    num_replicas: int = 3
    """Hosts that keep each block."""
    block_bytes: int = BLOCK_BYTES
    """Bytes per block; the last of a file may have fewer."""
    bytes_per_s: float | None = None
    """Rate limit of all hosts together on the remote; None sets no limit."""
    timeout_s: float = 10.0
    """Seconds to wait for a block that a host keeps; then the host counts as lost."""
    fetch_timeout_s: float = 600.0
    """The same for a host that first reads the remote, under its rate limit."""

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or min(self.timeout_s, self.fetch_timeout_s) <= 0:
            raise ValueError(
                "block_bytes must be at least 1, and timeout_s and fetch_timeout_s "
                f"above 0, got {self.block_bytes}, {self.timeout_s} and "
                f"{self.fetch_timeout_s}"
            )
        if not self.token:
            raise ValueError("the token of a mirror is empty; give the run's secret")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s must be above 0, got {self.bytes_per_s}")


class Mirror:
    """One host of a mirror: reads blocks, and serves those that it keeps."""

    def __init__(
        self,
        host: str,
        remote: Remote,
        config: MirrorConfig,
        folder: pathlib.Path,
        limit_bytes: int | None = None,
    ) -> None:
        """Open the folder of this host; `serve` lets others read.

        Raises:
          ValueError: the host has no address in config.
          OSError: the folder cannot be made.
        """
        if host not in config.addresses:
            raise ValueError(
                f"host {host} is none of {' '.join(config.addresses)}; give its address"
            )
        self.host, self.config, self._remote = host, config, remote
        self._files = {file.name: file for file in remote.files}
        size = config.block_bytes
        self._blocks = {
            _block_name(file, start, size): (file, start)
            for file in self._files.values()
            for start in range(0, file.size, size)
        }
        self.table = placement.replicas(
            list(self._blocks), list(config.addresses), config.num_replicas
        )
        self.limit_bytes = limit_bytes
        self.store = BlockStore(folder, limit_bytes)
        self._down: dict[str, float] = {}
        self._said: set[tuple[str, str]] = set()
        self._server: http.server.ThreadingHTTPServer | None = None

    def serve(self, listener: socket.socket | None = None) -> None:
        """Answer the other hosts of the run, in threads of this process.

        Args:
          listener: listens on the address of this host, and is closed by `close`; None
            opens one.
        Raises:
          OSError: the address of this host cannot be used.
        """
        address = self.config.addresses[self.host]
        handler = type("Handler", (_Handler,), {"mirror": self})
        self._server = http.server.ThreadingHTTPServer(
            address, handler, bind_and_activate=listener is None
        )
        if listener is not None:
            self._server.socket.close()
            self._server.socket = listener
        self._server.daemon_threads = True
        turn = self._server.serve_forever
        threading.Thread(target=turn, args=(_POLL_S,), daemon=True).start()

    def close(self) -> None:
        """Stop answering, and let `purge` remove the folder."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self.store.close()

    def fill(self) -> None:
        """Fetch all blocks that this host keeps to its disk, and compare checksums.

        The hosts that keep the first block of a file read all of it and compare its
        checksum, so all hosts together read each file as often as it has replicas.

        Raises:
          WrongContentError: see `check`.
          OSError: no host has a block, and the remote does not answer.
        """
        self.fetch()
        for file in self._files.values():
            blocks = self._blocks_of(file)
            if blocks and self.host in self.table[blocks[0]]:
                self.check(file.name)

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the blocks that this host keeps."""
        return sum(map(self._length, self._own()))

    def fetch(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Fetch all blocks that this host keeps to its disk.

        The blocks that this host reads from the remote come first, so all hosts read
        from it at the same time.

        Args:
          on_read: called with the bytes of each block.
        Raises:
          OSError: no host has a block, and the remote does not answer.
          ValueError: the remote refuses, or the file has changed.
        """
        for block in sorted(self._own(), key=lambda b: self.table[b][0] != self.host):
            self._read(block)
            on_read(self._length(block))

    def _own(self) -> list[str]:
        return [block for block in self._blocks if self.host in self.table[block]]

    def _length(self, block: str) -> int:
        file, start = self._blocks[block]
        return min(self.config.block_bytes, file.size - start)

    def _blocks_of(self, file: RemoteFile) -> list[str]:
        size = self.config.block_bytes
        return [_block_name(file, start, size) for start in range(0, file.size, size)]

    def check(
        self, name: str, on_read: Callable[[int], None] = lambda num_bytes: None
    ) -> str:
        """Read a file, compare its checksum, and return its hexadecimal SHA-256.

        Args:
          name: name of the file.
          on_read: called with the bytes of each block.
        Raises:
          WrongContentError: the checksum differs; the blocks of the file are removed
            here and on the hosts that answer.
          OSError: no host has a block, and the remote does not answer.
          ValueError: the remote refuses, or the file has changed.
        """
        file = self._files[name]
        blocks = self._blocks_of(file)
        found = Comparison(file.checksum, file.size)
        for block in blocks:
            data = self._read(block)
            found.update(data)
            on_read(len(data))
        if not found.difference:
            return found.sha256
        for block in blocks:
            self.store.remove(block)
            for host in self.table[block]:
                if host != self.host:
                    self._ask(host, block, "DELETE")
        raise WrongContentError(
            f"{file.name} has the {found.difference}, which the remote states; its "
            "blocks were removed, so start again, and if it fails again the file of "
            "the remote is damaged"
        )

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of a file; fewer at its end.

        Raises:
          OSError: no host has a block, and the remote does not answer.
          ValueError: the remote refuses, or the file has changed.
        """
        file, size = self._files[name], self.config.block_bytes
        stop = min(start + length, file.size)
        first = start // size * size
        parts = [
            self._read(_block_name(file, at, size)) for at in range(first, stop, size)
        ]
        return b"".join(parts)[start - first : stop - first]

    def kept(self, block: str, is_asked_to_fetch: bool) -> bytes | None:
        """Return a block for another host; None if it is not here."""
        data = self.store.read(block)
        if data is None and is_asked_to_fetch and block in self._blocks:
            with self.store.locked(block):
                data = self.store.read(block)
                return self._fetch(block) if data is None else data
        return data

    def _read(self, block: str) -> bytes:
        data = self.store.read(block)
        if data is not None:
            return data
        with self.store.locked(f"read-{block}"):
            data = self.store.read(block)  # another process may have brought it
            if data is not None:
                return data
            data = self._read_elsewhere(block)
            if self.host in self.table[block]:
                self.store.write(block, data)
            return data

    def _read_elsewhere(self, block: str) -> bytes:
        hosts = self.table[block]
        for host in hosts:
            if host != self.host:
                data = self._ask(host, block, "GET")
                if data is not None:
                    return data
        failure = None
        for host in hosts:
            if host == self.host:
                try:
                    data = self.kept(block, True)
                except (OSError, ValueError) as error:  # others may reach the remote
                    data, failure = None, error
            else:
                data = self._ask(host, block, "POST")
            if data is not None:
                return data
        if failure is not None:
            raise failure
        return self._fetch(block)

    def _fetch(self, block: str) -> bytes:
        """Read a block from the remote, and keep it if this host should keep it.

        Other hosts are asked first: one of them may still have the block from an
        earlier run with more or fewer hosts.
        """
        data = None
        for host in self.config.addresses:
            if host not in (self.host, *self.table[block]) and data is None:
                data = self._ask(host, block, "GET")
        if data is None:
            file, start = self._blocks[block]
            data = self._read_remote(file, start, self._length(block))
        if self.host in self.table[block]:
            self.store.write(block, data)
        return data

    def _read_remote(self, file: RemoteFile, start: int, length: int) -> bytes:
        failure = ""
        for wait_s in (0.0, *_RETRY_S):
            time.sleep(wait_s)
            if self.config.bytes_per_s is not None:
                share = self.config.bytes_per_s / len(self.config.addresses)
                self.store.wait_for(length, share)
            try:
                data = self._remote.read_range(file.name, start, length)
            except OSError as error:
                failure = str(error) or type(error).__name__
                continue
            if len(data) == length:
                return data
            failure = f"it sent {len(data)} bytes instead of {length}"
        raise OSError(
            f"host {self.host} cannot read bytes {start} to {start + length} of "
            f"{file.name} from the remote in {len(_RETRY_S) + 1} tries ({failure}); "
            "start again when the remote can be reached"
        )

    def _ask(self, host: str, block: str, method: str) -> bytes | None:
        """Return a block from another host; None if it has none or does not answer.

        GET asks for a block that the host has, POST lets it fetch the block first,
        DELETE removes the block there and returns None.
        """
        now = time.monotonic()
        if self._down.get(host, now) > now:
            return None
        config = self.config
        limit_s = config.fetch_timeout_s if method == "POST" else config.timeout_s
        connection = http.client.HTTPConnection(
            *config.addresses[host], timeout=limit_s
        )
        headers = {"Authorization": f"Bearer {config.token}"}
        try:
            connection.request(method, f"/{block}", headers=headers)
            answer = connection.getresponse()
            content = bytearray()
            while part := answer.read1(1 << 20):
                content += part
                if time.monotonic() > now + limit_s:
                    raise TimeoutError(f"no whole block in {limit_s} s")
            status = answer.status
        except (OSError, http.client.HTTPException) as error:
            self._down[host] = time.monotonic() + _DOWN_S
            self._say_once(host, "does not answer", error)
            return None
        finally:
            connection.close()
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        data = unsealed(bytes(content)) if status == http.HTTPStatus.OK else None
        if data is None:
            self._say_once(host, "sent no good block", f"HTTP status {status}")
        return data

    def _say_once(self, host: str, what: str, why: object) -> None:
        if (host, what) not in self._said:
            _log.warning("mirror: host %s %s (%s)", host, what, why)
        self._said.add((host, what))


class _Handler(http.server.BaseHTTPRequestHandler):
    mirror: Mirror

    def do_GET(self) -> None:
        self._answer(lambda block: self.mirror.kept(block, False))

    def do_POST(self) -> None:
        self._answer(lambda block: self.mirror.kept(block, True))

    def do_DELETE(self) -> None:
        self._answer(self.mirror.store.remove)

    def _answer(self, call: Callable[[str], bytes | None]) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(
            given, f"Bearer {self.mirror.config.token}".encode()
        ):
            self.send_error(http.HTTPStatus.FORBIDDEN)
            return
        block = self.path[1:]
        if block not in self.mirror.table:  # other files, or another block size
            self.send_error(http.HTTPStatus.CONFLICT)
            return
        try:
            data = call(block)
        except (OSError, ValueError):
            self.send_error(http.HTTPStatus.BAD_GATEWAY)
            return
        if data is None:
            self.send_error(http.HTTPStatus.NOT_FOUND)
            return
        content = sealed(data)
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log line of each request."""


def _block_name(file: RemoteFile, start: int, block_bytes: int) -> str:
    text = f"{file.identity}\n{start}\n{block_bytes}"
    return hashlib.sha256(text.encode()).hexdigest()
