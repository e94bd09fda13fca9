"""Read blocks of a remote data set from this disk, another host, or the remote.

Only one host reads a given block from the remote: the first of the block's hosts that
answers. Each host has an equal share of the rate limit. Fixed shares need no
communication, and they suffice because `placement` spreads the first hosts evenly. A
shared token bucket would have to survive the loss of the host that holds it.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from mjax.data.mirror import placement
from mjax.data.mirror.ahead import NUM_AHEAD, in_order
from mjax.data.mirror.blocks import DIGEST_BYTES, BlockStore, sealed
from mjax.data.mirror.checksums import Comparison
from mjax.data.mirror.config import MirrorConfig
from mjax.data.mirror.peers import Answer, Method, Peers
from mjax.data.mirror.server import Blocks, Server

_RETRY_S = (1.0, 2.0, 4.0)  # seconds to wait before each retry of the remote
_LOCK_S = 600.0  # maximum wait for a lock, without the time of the rate limit
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """One file of a remote data set."""

    name: str
    size: int
    """Size in bytes."""
    checksum: str
    """Checksum from the remote: sha256:HEX, or git:HEX for the hash of a git blob. Any
    other text only identifies the content, together with the name, and is not compared.
    """

    @property
    def identity(self) -> str:
        """Text that identifies the content; it differs if the content differs."""
        is_hash = self.checksum.startswith(("sha256:", "git:"))
        return f"{'' if is_hash else self.name}\n{self.checksum}\n{self.size}"


class WrongContentError(OSError):
    """A file does not have the checksum that the remote gives."""


@runtime_checkable
class Remote(Protocol):
    """Interface of the remote that a mirror reads."""

    @property
    def files(self) -> Sequence[RemoteFile]:
        """Return the files, equal on every host."""
        ...

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from `start` on.

        Raises:
          OSError: the store does not answer.
          ValueError: the store refuses access, or the file has changed.
        """
        ...


class Mirror:
    """One host of a mirror: reads blocks, and serves the blocks that it keeps."""

    def __init__(
        self,
        host: str,
        remote: Remote,
        config: MirrorConfig,
        folder: pathlib.Path,
        limit_bytes: int | None = None,
    ) -> None:
        """Open the folder of this host; `serve` lets other hosts read it.

        Raises:
          ValueError: the host has no address in config.
          OSError: the folder cannot be created.
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
            {block: self._length(block) for block in self._blocks},
            list(config.addresses),
            config.num_replicas,
        )
        self.limit_bytes = limit_bytes
        self.store = BlockStore(folder, limit_bytes)
        self._peers = Peers(
            *(config.addresses, config.token, config.timeout_s, config.block_timeout_s),
            closed=self.store.closed,
        )
        self._digests: dict[str, bytes] = {}
        self._failures: dict[str, tuple[float, OSError | ValueError]] = {}
        self._server: Server | None = None

    def serve(self, listener: socket.socket | None = None) -> None:
        """Start answering the other hosts of the run, in threads of this process.

        Args:
          listener: socket that listens on the address of this host; `close` closes it.
            None opens one.
        Raises:
          OSError: the address of this host cannot be used.
        """
        blocks = Blocks(
            *(self._blocks, self._stored, self._fetched, self.store.remove, NUM_AHEAD)
        )
        terms = (self.config.token, self.config.timeout_s)
        address = self.config.addresses[self.host]
        self._server = Server(blocks, *terms, address, listener)

    def close(self) -> None:
        """Stop answering, and allow `purge` to remove the folder."""
        if self._server is not None:
            self._server.close()
        self.store.close()

    def fill(self) -> None:
        """Fetch all blocks that this host keeps, and check all files.

        Raises:
          WrongContentError: see `check`.
          OSError: no host has a block, and the remote does not answer.
          ValueError: the remote refuses access, or the file has changed.
        """
        self.fetch()
        for name in self._files:
            self.check(name)

    @property
    def num_own_bytes(self) -> int:
        """Total bytes of the blocks that this host keeps."""
        return sum(map(self._length, self._own()))

    def fetch(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Fetch the blocks that this host keeps, and store them on its disk.

        The blocks that this host reads from the remote come first, so all hosts read
        the remote at the same time. The very first block is read alone; if the remote
        refuses it, no other block is requested.

        Args:
          on_read: called with the number of bytes of each block.
        Raises:
          OSError: no host has a block, and the remote does not answer.
          ValueError: the remote refuses access, or the file has changed.
        """
        own = sorted(self._own(), key=lambda b: self.table[b][0] != self.host)
        for blocks in (own[:1], own[1:]):
            for block, _ in self._each(blocks):
                on_read(self._length(block))

    def _each(self, blocks: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield (block, content) in order, while the next blocks are read."""
        return zip(blocks, in_order(self._read, blocks), strict=True)

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
        """Read a file, check its checksum, and return its hexadecimal SHA-256.

        Args:
          name: name of the file.
          on_read: called with the number of bytes of each block.
        Raises:
          WrongContentError: the checksum differs; the blocks of the file are removed on
            this host and on the hosts that answer.
          OSError: no host has a block, and the remote does not answer.
          ValueError: the remote refuses access, or the file has changed.
        """
        file = self._files[name]
        found, digests = Comparison(file.checksum, file.size), {}
        for block, content in self._each(self._blocks_of(file)):
            found.update(_data(content))
            digests[block] = content[:DIGEST_BYTES]
            on_read(self._length(block))
        if found.difference:
            found = self._check_remote(file, digests, found)
        self._digests |= digests
        return found.sha256

    def _check_remote(
        self, file: RemoteFile, digests: dict[str, bytes], found: Comparison
    ) -> Comparison:
        """Read a file from the remote only, and replace the blocks that differ.

        Args:
          file: file whose checksum differs.
          digests: block -> SHA-256 of the content read before; changed in place.
          found: comparison of the content read before.
        Returns:
          The comparison of the content of the remote, which has the right checksum.
        Raises:
          WrongContentError: the content of the remote differs as well.
        """
        _log.warning(
            "mirror: %s has the %s; host %s reads it from the remote again",
            *(file.name, found.difference, self.host),
        )
        again, differing = Comparison(file.checksum, file.size), []
        for block, before in digests.items():
            try:
                data = self._read_remote(block)
            except OSError as error:
                raise WrongContentError(
                    f"{file.name} has the {found.difference}, which the remote "
                    f"states, and cannot be read again: {error}"
                ) from None
            again.update(data)
            content = sealed(data)
            digests[block] = content[:DIGEST_BYTES]
            if digests[block] != before:
                self.store.remove(block)
                self._keep(block, content)
                differing.append(block)
        if again.difference:
            for block in digests:
                self._remove_everywhere(block)
            raise WrongContentError(
                f"{file.name} has the {again.difference}, which the remote states; its "
                "blocks were removed, so start again, and if it fails again the file "
                "of the remote is damaged"
            )
        for block in differing:
            self._digests[block] = digests[block]
            for host in self._others(self.table[block]):
                if self._ask(host, block, "GET").content is None:
                    self._ask(host, block, "DELETE", is_last_try=True)
        return again

    def _remove_everywhere(self, block: str) -> None:
        self.store.remove(block)
        for host in self._others(self.table[block]):
            self._ask(host, block, "DELETE")

    def digests(self, name: str) -> list[str]:
        """Return the hexadecimal SHA-256 of each block of a checked file."""
        return [self._digests[b].hex() for b in self._blocks_of(self._files[name])]

    def trust(self, name: str, digests: Sequence[str]) -> bool:
        """From now on, check blocks of a file against `digests` of an earlier run.

        Returns:
          Whether there is one digest per block; if not, they are ignored.
        """
        blocks = self._blocks_of(self._files[name])
        if len(blocks) != len(digests):
            return False
        self._digests |= zip(blocks, map(bytes.fromhex, digests), strict=True)
        return True

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file, or fewer at its end.

        Raises:
          OSError: no host has a block, and the remote does not answer.
          ValueError: the remote refuses access, or the file has changed.
        """
        file, size = self._files[name], self.config.block_bytes
        stop = min(start + length, file.size)
        first = start // size * size
        parts = [
            _data(self._read(_block_name(file, at, size)))
            for at in range(first, stop, size)
        ]
        if len(parts) == 1:
            return bytes(parts[0][start - first : stop - first])
        return b"".join(parts)[start - first : stop - first]

    # ------------------------------------------------------------------------- blocks

    def _stored(self, block: str) -> bytes | None:
        """Return a block from this host's disk; None if it is absent."""
        content = self.store.read(block)
        if content is None or self._is_right(block, content):
            return content
        _log.warning(
            "%s on the disk of host %s is not what was checked; it is fetched again",
            *(self._label(block), self.host),
        )
        self.store.remove(block)
        return None

    def _is_right(self, block: str, content: bytes) -> bool:
        """Return whether a block has the checked content; True if none was checked."""
        is_whole = len(content) == self._length(block) + DIGEST_BYTES
        return is_whole and content[:DIGEST_BYTES] == self._digests.get(
            block, content[:DIGEST_BYTES]
        )

    def _keep(self, block: str, content: bytes) -> None:
        if self.host in self.table[block]:
            self.store.write(block, content)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        share = self._share
        reads_s = 0.0 if share is None else self.config.block_bytes / share
        with self.store.locked(name, _LOCK_S + 2 * NUM_AHEAD * reads_s):
            yield

    def _read(self, block: str) -> bytes:
        """Return a block from this disk, another host, or the remote."""
        content = self._stored(block)
        if content is not None:
            return content
        with self._locked(f"read-{block}"):
            content = self._stored(block)  # another process may have fetched it
            return content or self._read_elsewhere(block)

    def _read_elsewhere(self, block: str) -> bytes:
        hosts = self.table[block]
        for host in self._others(hosts):
            answer = self._ask(host, block, "GET")
            if answer.content is not None:
                self._keep(block, answer.content)
                return answer.content
        reasons: list[str] = []
        failure: OSError | ValueError | None = None
        for host in hosts:
            if host != self.host:
                answer = self._ask(host, block, "POST")
                if answer.content is not None:
                    self._keep(block, answer.content)
                    return answer.content
                reasons.append(f"host {host}: {answer.reason}")
                continue
            try:
                return self._fetched(block)
            except (OSError, ValueError) as error:  # other hosts may reach the remote
                failure = error
        try:
            if failure is None:
                return self._fetched(block)
        except (OSError, ValueError) as error:
            failure = error
        return self._last_copy(block, failure, reasons)

    def _last_copy(
        self, block: str, failure: OSError | ValueError | None, reasons: list[str]
    ) -> bytes:
        """Ask all hosts, even those that just failed: one may have the only copy.

        Args:
          block: name of the block, which the remote does not return.
          failure: error of the remote on this host.
          reasons: for each other host of the block, why it did not return the block.
        """
        others = self._others(self.config.addresses)
        answers = in_order(
            lambda host: self._ask(host, block, "GET", is_last_try=True), others
        )
        for answer in answers:
            if answer.content is not None:
                self._keep(block, answer.content)
                return answer.content
        if isinstance(failure, ValueError):
            raise failure
        raise OSError("; ".join([str(failure), *reasons]))

    def _fetched(self, block: str) -> bytes:
        """Return a block from this disk or from the remote, and keep it.

        Other hosts are asked before the remote: one may still have the block from an
        earlier run with another number of hosts. After `timeout_s` seconds no
        further host is asked.
        """
        begin_s = time.monotonic()
        with self._locked(block):
            content = self._stored(block)
            if content is not None:
                return content
            failed_s, failure = self._failures.get(block, (-math.inf, None))
            # The fetch failed in another thread while this thread waited for the lock.
            if failure is not None and failed_s >= begin_s:
                raise failure
            until_s = time.monotonic() + self.config.timeout_s
            for host in self._others(self.config.addresses):
                if host not in self.table[block] and time.monotonic() < until_s:
                    content = self._ask(host, block, "GET").content
                if content is not None:
                    break
            try:
                content = content or sealed(self._read_remote(block))
            except (OSError, ValueError) as error:
                self._failures[block] = time.monotonic(), error
                raise
            self._keep(block, content)
            return content

    @property
    def _share(self) -> float | None:
        """Bytes per second that this host may read from the remote; None: no limit."""
        total = self.config.bytes_per_s
        return None if total is None else total / len(self.config.addresses)

    def _read_remote(self, block: str) -> bytes:
        (file, start), length = self._blocks[block], self._length(block)
        failure, digest = "", self._digests.get(block)
        for wait_s in (0.0, *_RETRY_S):
            time.sleep(wait_s)
            self.store.check_open()
            if self._share is not None:
                self.store.wait_for(length, self._share)
            try:
                data = self._remote.read_range(file.name, start, length)
            except OSError as error:
                failure = str(error) or type(error).__name__
                continue
            if len(data) != length:
                failure = f"it sent {len(data)} bytes instead of {length}"
            elif digest is not None and hashlib.sha256(data).digest() != digest:
                failure = "it sent other bytes than those that were checked before"
            else:
                return data
        raise OSError(
            f"host {self.host} cannot read {self._label(block)} from the remote in "
            f"{len(_RETRY_S) + 1} tries ({failure}); start again when the remote can "
            "be reached"
        )

    def _label(self, block: str) -> str:
        file, start = self._blocks[block]
        return f"bytes {start} to {start + self._length(block)} of {file.name}"

    def _others(self, hosts: Iterable[str]) -> list[str]:
        return [host for host in hosts if host != self.host]

    def _ask(
        self, host: str, block: str, method: Method, *, is_last_try: bool = False
    ) -> Answer:
        return self._peers.ask(
            host,
            block,
            method,
            lambda content: self._is_right(block, content),
            label=self._label(block),
            is_last_try=is_last_try,
        )


def _data(content: bytes) -> memoryview:
    """Return the bytes of a sealed block, without their SHA-256."""
    return memoryview(content)[DIGEST_BYTES:]


def _block_name(file: RemoteFile, start: int, block_bytes: int) -> str:
    text = f"{file.identity}\n{start}\n{block_bytes}"
    return hashlib.sha256(text.encode()).hexdigest()
