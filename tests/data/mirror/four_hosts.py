"""Content, remote and settings of a mirror of four hosts on loopback."""

import collections
import hashlib
import random
import socket
import threading
from collections.abc import Callable

from mjax.data.mirror.config import MirrorConfig
from mjax.data.mirror.mirror import Mirror, RemoteFile

HOSTS = ("a", "b", "c", "d")
BLOCK = 1000
CONTENT = {
    "large": random.Random(0).randbytes(57_300),
    "small": random.Random(1).randbytes(70),
}


class Remote:
    """The files of CONTENT; counts reads, and fails as often as it is told."""

    def __init__(self) -> None:
        self.reads = collections.Counter()
        self.cut = self.num_failures = self.wrong = 0
        self.down_after: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.before: Callable[[], object] = lambda: None
        self.checksums = {n: f"sha256:{sha256(data)}" for n, data in CONTENT.items()}

    @property
    def files(self) -> list[RemoteFile]:
        return [
            RemoteFile(name, len(CONTENT[name]), checksum)
            for name, checksum in self.checksums.items()
        ]

    def read_range(self, name: str, start: int, length: int) -> bytes:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise ConnectionResetError("connection reset")
        if self.down_after is not None and self.reads.total() >= self.down_after:
            raise ConnectionResetError("connection reset")
        self.before()
        self.gate.wait(20)
        self.reads[name, start] += 1
        if self.wrong > 0:
            self.wrong -= 1
            return b"?" * length
        return CONTENT[name][start : start + length - self.cut]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def free_addresses() -> dict[str, tuple[str, int]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in HOSTS]
    found = {h: s.getsockname()[:2] for h, s in zip(HOSTS, sockets, strict=True)}
    for opened in sockets:
        opened.close()
    return found


def terms(addresses: dict, **changes) -> MirrorConfig:
    given = {"token": "secret", "block_bytes": BLOCK, **changes}
    return MirrorConfig(addresses=addresses, **given)


def read_all(mirror: Mirror) -> dict[str, bytes]:
    return {n: mirror.read_range(n, 0, len(data)) for n, data in CONTENT.items()}
