"""Be one host of a mirror in a process of its own, and control four of them.

The remote is a file on disk that logs what is read, and that can be taken away. Used by
`data_mirror` and `mirror_faults`; as a program it is one host, told by JSON.
"""

import dataclasses
import hashlib
import http.server
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from mjax.data.mirror.blocks import sealed
from mjax.data.mirror.config import MirrorConfig
from mjax.data.mirror.mirror import Mirror, RemoteFile
from scripts.evidence import REPOSITORY

HOSTS: tuple[str, ...] = ("a", "b", "c", "d")
NUM_REPLICAS = 3
NAME = "f"
DOWN = "down"
"""Name of a file in the folder of all hosts; while it exists, the remote fails."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker process is told."""

    folder: str
    host: str
    ports: dict[str, int]
    num_bytes: int
    block_bytes: int
    sha256: str
    token: str = "of this run"
    limit_bytes: int | None = None
    """Of the disk of this host."""
    max_file_bytes: int | None = None
    """The system lets this process write no larger file, as on a full disk."""


class LoggedRemote:
    """A file on disk; each read is a line of a log that all processes append to."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._folder = settings, Path(settings.folder)

    @property
    def files(self) -> list[RemoteFile]:
        """Return the one file."""
        told = self._settings
        return [RemoteFile(NAME, told.num_bytes, f"sha256:{told.sha256}")]

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of the file."""
        if (self._folder / DOWN).exists():
            raise ConnectionRefusedError("the remote is down")
        with (self._folder / "log").open("a") as log:
            log.write(f"{self._settings.host} {start} {length}\n")
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(length)


def work(settings: Settings) -> None:
    """Be one host: fill, read or lie on each line of stdin, answer in lines of JSON."""
    if settings.max_file_bytes is not None:
        limit = settings.max_file_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    config = MirrorConfig(
        addresses={h: ("127.0.0.1", port) for h, port in settings.ports.items()},
        token=settings.token,
        num_replicas=NUM_REPLICAS,
        block_bytes=settings.block_bytes,
    )
    folder = Path(settings.folder) / settings.host
    mirror = Mirror(
        settings.host, LoggedRemote(settings), config, folder, settings.limit_bytes
    )
    mirror.serve()
    print("up", flush=True)
    for line in sys.stdin:
        match line:
            case "fill\n":
                mirror.fill()
                print("filled", flush=True)
            case "read\n":
                print(json.dumps(read_all(mirror, settings)), flush=True)
            case _:
                mirror.close()
                threading.Thread(target=misbehave, args=(line, settings)).start()
                print("up", flush=True)


def misbehave(how: str, settings: Settings) -> None:
    """Answer in the place of a mirror: wrong bytes, or half of what is announced."""
    content = sealed(b"?" * settings.block_bytes)
    sent = content[: len(content) // (2 if how == "cut\n" else 1)]

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(http.HTTPStatus.OK)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(sent)

    methods = dict.fromkeys(("do_GET", "do_POST", "do_DELETE"), answer)
    quiet = {"log_message": lambda *args: None, **methods}
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), quiet)
    address = ("127.0.0.1", settings.ports[settings.host])
    http.server.ThreadingHTTPServer(address, handler).serve_forever()


def read_all(mirror: Mirror, settings: Settings) -> dict[str, int | float | str]:
    """Read the file in pieces that do not end where blocks end, until a read fails."""
    digest, num_reads, num_failed = hashlib.sha256(), 0, 0
    slowest_s, error_text = 0.0, ""
    piece = settings.block_bytes * 3 // 10
    half = settings.num_bytes // piece // 2
    for start in range(0, settings.num_bytes, piece):
        begin_s = time.monotonic()
        try:
            digest.update(mirror.read_range(NAME, start, piece))
        except OSError as error:
            error_text = str(error)
            num_failed += 1
        slowest_s = max(slowest_s, time.monotonic() - begin_s)
        if num_reads == half or (error_text and num_reads < half):
            print("half", flush=True)
        num_reads += 1
        if error_text:
            break
    return {
        "sha256": digest.hexdigest(),
        "reads": num_reads,
        "failed": num_failed,
        "slowest_s": slowest_s,
        "error": error_text,
    }


def free_ports() -> dict[str, int]:
    """Return a port for each host that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in HOSTS]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return dict(zip(HOSTS, ports, strict=True))


def start_worker(settings: Settings) -> subprocess.Popen[str]:
    """Start a host in a process of its own."""
    command = [sys.executable, "-m", "scripts.data.mirror_hosts"]
    return subprocess.Popen(
        [*command, json.dumps(dataclasses.asdict(settings))],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process.

    Raises:
      RuntimeError: it has ended.
    """
    assert process.stdout is not None
    found = process.stdout.readline()
    if not found:
        raise RuntimeError(f"a host has ended with exit code {process.wait()}")
    return found.strip()


def expect(
    hosts: Mapping[str, subprocess.Popen[str]], which: Iterable[str], word: str
) -> None:
    """Wait until each of these hosts has written a word."""
    for host in which:
        found = line(hosts[host])
        if found != word:
            raise RuntimeError(f"host {host} wrote {found!r} instead of {word!r}")


def tell(
    hosts: Mapping[str, subprocess.Popen[str]], which: Iterable[str], word: str
) -> None:
    """Write a word to each of these hosts."""
    for host in which:
        pipe = hosts[host].stdin
        assert pipe is not None
        pipe.write(f"{word}\n")
        pipe.flush()


def kill(process: subprocess.Popen[str]) -> None:
    """End a process with SIGKILL and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def remote_bytes(log: Path) -> dict[str, int]:
    """Return how many bytes of the remote each host has read."""
    found = dict.fromkeys(HOSTS, 0)
    for one in log.read_text().splitlines():
        host, _, length = one.split()
        found[host] += int(length)
    return found


def kept_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes of the blocks in the folder of each host."""
    return {
        host: sum(path.stat().st_size for path in (folder / host).glob("*.block"))
        for host in HOSTS
    }


if __name__ == "__main__":
    work(Settings(**json.loads(sys.argv[1])))
