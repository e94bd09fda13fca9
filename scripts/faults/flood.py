"""Flood each server of mjax with connections that do not authenticate.

    python -m scripts.faults.flood [--connections 2000] [--only SERVER]

Each server runs in a process of its own that may open 1,024 files, the usual limit:
`generate --serve`, the live page, the ingester on a port and on a Unix socket, the
server of a data mirror, the driver of a launch. Each is flooded in turn, in every way
of `FLOODS`, with all connections opened at once and held. Meanwhile an honest client
with a token sends requests, each on a new connection, and another one keeps its first
connection. Checks: every honest request is answered, within 2 s; the memory of the
server grows by at most 256 MiB. Writes docs/benchmarks/flood.md. Exits with 1 if a
check fails.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import multiprocessing
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.launch import messages
from mjax.launch.client import write_private
from mjax.observe.stream import wire
from scripts.evidence import REPOSITORY, Table, run_training, write_page

MOST_S, MOST_MIB = 2.0, 256.0
FILES = 1024
"""Soft limit on open files of each server: the default of Linux."""
TOKEN = "token-of-the-flood-0123456789"
_HOLD_S = 15.0
"""Seconds for which the connections of a flood are held."""
_BETWEEN_S = 0.1
"""Seconds between two honest requests."""
_START_S = 240.0
_HONEST_S = 20.0
"""Seconds after which an honest request counts as not answered."""
_CONNECT_S = 5.0
_BLOCK = "f-0"
MOST_BYTES = 2**23
"""Bytes that each connection of a flood sends at most."""

type Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A running server."""

    pid: int
    address: Address
    request: bytes
    """An honest request."""
    keeps: bool = True
    """Whether a connection may have several requests."""
    is_http: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flood:
    """What each connection of a flood sends."""

    http: bytes = b""
    """Sent at once to a server of HTTP."""
    driver: bytes = b""
    """Sent at once to a driver."""
    repeated: bytes = b""
    """Sent after it, up to `MOST_BYTES`."""
    slow: bytes = b""
    """Sent after it, one byte a second."""
    is_request: bool = False
    """Whether it is a request, which lacks only the token."""


_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
_BODY = b"Content-Type: application/json\r\nContent-Length: 60000000\r\n\r\n"
_HELLO = b'{"type":"hello","version":1,"x":"'
FLOODS: dict[str, Flood] = {
    "silent": Flood(),
    "one byte a second": Flood(http=_HEAD, driver=_HELLO, slow=b"X" * 1000),
    "a head without end": Flood(
        http=_HEAD, driver=_HELLO, repeated=b"X: 1\r\n" * 10000
    ),
    "a line without end": Flood(repeated=b"x" * 2**16),
    "a body without a token": Flood(
        http=_HEAD + _BODY, driver=_HELLO, repeated=b"x" * 2**16, is_request=True
    ),
    "a refused request, then silent": Flood(
        http=b"GET /api/run HTTP/1.1\r\nHost: localhost\r\n\r\n",
        driver=b"{}\n",
        is_request=True,
    ),
    "TLS": Flood(
        http=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 50, driver=b"\x16" * 500
    ),
}


@dataclasses.dataclass(kw_only=True)
class Result:
    """Measurements of one flood."""

    server: str
    flood: str
    opened: int = 0
    """Connections that were accepted."""
    held: int = 0
    """Connections that the server has not closed at the end."""
    slowest_s: float = 0.0
    """Slowest honest request."""
    num_asked: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    before_mib: float = 0.0
    most_mib: float = 0.0

    def ask(self, served: Served, kept: socket.socket | None) -> None:
        """Send an honest request, and note its outcome."""
        self.num_asked += 1
        try:
            self.slowest_s = max(self.slowest_s, _ask(served, kept))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failed.append(("kept: " if kept else "") + repr(error))

    @property
    def is_right(self) -> bool:
        """Whether all checks pass."""
        grown_mib = self.most_mib - self.before_mib
        return not self.failed and self.slowest_s <= MOST_S and grown_mib <= MOST_MIB


# -------------------------------------------------------------------------- the servers


@contextlib.contextmanager
def _process(command: Sequence[str], **pipes: Any) -> Iterator["subprocess.Popen[str]"]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    program = [sys.executable, "-c", _LIMITED, str(FILES), str(hard), *command]
    process = subprocess.Popen(program, cwd=REPOSITORY, text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


_LIMITED = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def _http(method: str, path: str, body: bytes = b"", token: str = TOKEN) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    if body:
        head += "Content-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def _local(url: str) -> Address:
    return ("127.0.0.1", int(url.split(":")[2].split("/")[0]))


@contextlib.contextmanager
def _generate(folder: Path) -> Iterator[Served]:
    run = folder / "run"
    flags = ("--recipe", "debug", "--steps", "2", "--log.sample-tokens", "0")
    run_training(*flags, "--work-dir", str(run))
    write_private(folder / "tokens", TOKEN + "\n")
    command = ["-m", "mjax.generate", str(run), "--serve", "0", "--token-file"]
    command += [str(folder / "tokens"), "--dtype", "float32", "--slots", "2"]
    with _process(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = _local(process.stdout.readline())
        body = json.dumps({"prompt": "ab", "max_tokens": 4}).encode()
        request = _http("POST", "/v1/completions", body)
        yield Served(pid=process.pid, address=address, request=request)


@contextlib.contextmanager
def _page(folder: Path) -> Iterator[Served]:
    (folder / "run").mkdir()
    write_private(folder / "token", TOKEN + "\n")
    command = ["-m", "mjax.observe", "serve", "--work-dir", str(folder / "run")]
    command += ["--listen", "127.0.0.1:0", "--token-file", str(folder / "token")]
    with _process(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = _local(process.stdout.readline())
        request = _http("GET", "/api/run")
        yield Served(pid=process.pid, address=address, request=request)


@contextlib.contextmanager
def _ingest(folder: Path, listen: str) -> Iterator[Served]:
    (folder / "run").mkdir()
    command = ["-m", "mjax.observe", "ingest", "--work-dir", str(folder / "run")]
    command += ["--listen", listen]
    is_port = not listen.startswith("unix:")
    if is_port:
        write_private(folder / "token", TOKEN + "\n")
        command += ["--token-file", str(folder / "token")]
    with _process(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.readline().split("ingest: ")[1].strip()
        address = _local(said) if is_port else said.removeprefix("unix:")
        body = wire.encode(wire.MarksRequest(run="r", sources=["a"]))
        request = _http("POST", "/marks", body, TOKEN if is_port else "")
        yield Served(pid=process.pid, address=address, request=request)


_MIRROR = """import socket, sys
from mjax.data.mirror import server
read = lambda name: b"x" * 2**16
blocks = server.Blocks(["{block}"], read, read, print, 1)
bound = socket.create_server(("127.0.0.1", 0))
made = server.Server(blocks, "{token}", 10.0, bound.getsockname(), bound)
print(bound.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _mirror(folder: Path) -> Iterator[Served]:
    del folder
    command = ["-c", _MIRROR.format(block=_BLOCK, token=TOKEN)]
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
    with _process(command, **pipes) as process:
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        request = _http("GET", f"/{_BLOCK}")
        yield Served(pid=process.pid, address=address, request=request, keeps=False)


@contextlib.contextmanager
def _driver(folder: Path) -> Iterator[Served]:
    work_dir = folder / "run"
    write_private(folder / "token", TOKEN)
    command = ["-m", "mjax.launch", "driver", "--hosts", "2", "--bind", "127.0.0.1:0"]
    command += ["--token-file", str(folder / "token"), "--"]
    command += ["--recipe", "debug", "--work-dir", str(work_dir)]
    with _process(command) as process:
        place = work_dir / "launch" / "address.json"
        _wait(place.exists)
        _, port = json.loads(place.read_text())
        status = messages.Command(version=messages.VERSION, token=TOKEN, name="status")
        yield Served(
            pid=process.pid,
            address=("127.0.0.1", port),
            request=messages.encode(status),
            is_http=False,
            keeps=False,
        )


def _unix(folder: Path) -> contextlib.AbstractContextManager[Served]:
    return _ingest(folder, f"unix:{folder / 'socket'}")


SERVERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Served]]] = {
    "generate --serve": _generate,
    "observe serve": _page,
    "observe ingest, port": lambda folder: _ingest(folder, "127.0.0.1:0"),
    "observe ingest, Unix socket": _unix,
    "data mirror": _mirror,
    "launch driver": _driver,
}


def _wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError("a server did not start")
        time.sleep(0.1)


# -------------------------------------------------------------------------- the clients


def _connect(address: Address, timeout_s: float) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=timeout_s)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(timeout_s)
    made.connect(address)
    return made


def _ask(served: Served, kept: socket.socket | None = None) -> float:
    """Send an honest request; return the seconds until its whole answer.

    Raises:
      OSError, HTTPException, ValueError: there is no right answer.
    """
    begun_s = time.monotonic()
    made = kept or _connect(served.address, _HONEST_S)
    try:
        made.sendall(served.request)
        if served.is_http:
            answer = http.client.HTTPResponse(made)
            answer.begin()
            data = answer.read()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {data[:100]!r}")
        elif b'"answer"' not in made.makefile("rb").readline():
            raise ValueError("no answer")
    finally:
        if kept is None:
            made.close()
    return time.monotonic() - begun_s


def _open_all_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class _Flooding:
    """A process that opens the connections of a flood and feeds them."""

    def __init__(self, served: Served, kind: str, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends, self._counts = context.Event(), context.Queue()
        given = (served.address, served.is_http, kind, number)
        self._process = context.Process(
            target=_flood, args=(*given, self._ends, self._counts)
        )
        self._process.start()

    def end(self) -> tuple[int, int]:
        """Close all connections; return how many there were, and were still open."""
        self._ends.set()
        counts = self._counts.get(timeout=_START_S)
        self._process.join()
        return counts


def _flood(
    address: Address, is_http: bool, kind: str, number: int, ends: Any, counts: Any
) -> None:
    """Open connections, feed them once a second until the end, and close them."""
    _open_all_files()
    flood, held, sent = FLOODS[kind], list[socket.socket](), list[int]()
    repeats = MOST_BYTES // len(flood.repeated) if flood.repeated else 0
    data = (flood.http if is_http else flood.driver) + flood.repeated * repeats
    while len(held) < number and not ends.is_set():
        try:
            made = _connect(address, _CONNECT_S)
        except OSError:
            continue
        made.setblocking(False)
        held.append(made)
        sent.append(_send(made, data))
    while not ends.wait(1.0):
        for at, made in enumerate(held):
            sent[at] += _send(made, data[sent[at] :])
            _send(made, flood.slow[:1])
    counts.put((len(held), sum(map(_close, held))))


def _send(made: socket.socket, data: bytes) -> int:
    """Send what the kernel takes; return the number of bytes."""
    num, view = 0, memoryview(data)
    with contextlib.suppress(OSError):
        while num < len(data):
            num += made.send(view[num : num + 2**16])
    return num


def _close(made: socket.socket) -> bool:
    """Close a connection; return whether the other side had not closed it."""
    is_open = False
    try:
        while made.recv(2**16):
            pass
    except BlockingIOError:
        is_open = True
    except OSError:
        pass
    made.close()
    return is_open


def measure(name: str, kind: str, served: Served, number: int) -> Result:
    """Flood a server, and send honest requests meanwhile."""
    result = Result(server=name, flood=kind)
    for _ in range(10):
        _ask(served)
    result.before_mib = result.most_mib = memory_mib(served.pid)
    kept = _connect(served.address, _HONEST_S) if served.keeps else None
    with kept or contextlib.nullcontext():
        if kept is not None:
            _ask(served, kept)
        flooding = _Flooding(served, kind, number)
        until_s = time.monotonic() + _HOLD_S
        while time.monotonic() < until_s:
            result.ask(served, None)
            if kept is not None:
                result.ask(served, kept)
            result.most_mib = max(result.most_mib, memory_mib(served.pid))
            time.sleep(_BETWEEN_S)
        result.opened, result.held = flooding.end()
    time.sleep(1.0)  # the server closes the connections
    return result


def run(names: Sequence[str], number: int) -> list[Result]:
    """Flood servers in turn, in every way."""
    results = []
    for name in names:
        with (
            tempfile.TemporaryDirectory() as folder,
            SERVERS[name](Path(folder)) as served,
        ):
            for kind, flood in FLOODS.items():
                if flood.is_request and isinstance(served.address, str):
                    continue  # the mode of the socket permits it
                result = measure(name, kind, served, number)
                print(json.dumps(dataclasses.asdict(result)), flush=True)
                results.append(result)
    return results


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the tables of the page."""
    return [
        Table(
            title="Honest clients, and the memory of the server",
            text=f"Connections that each flood opens: {results[0].opened}, held for "
            f"{_HOLD_S:g} s; a server may open {FILES} files. Honest clients send a "
            "request on a new connection and another one on a connection that is kept, "
            f"every {_BETWEEN_S:g} s. Bounds: none fails, the slowest takes "
            f"{MOST_S:g} s, the memory grows by {MOST_MIB:g} MiB. A Unix socket needs "
            "no token, so requests without one are honest there.",
            header=("server", "flood", "requests", "failed", "slowest", "memory"),
            rows=[
                (
                    one.server,
                    one.flood,
                    str(one.num_asked),
                    str(len(one.failed)),
                    f"{one.slowest_s:.2f} s",
                    f"{one.before_mib:.0f} + {one.most_mib - one.before_mib:.0f} MiB",
                )
                for one in results
            ],
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Flood all servers and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--only", choices=[*SERVERS], help="flood one server, no page")
    given = parser.parse_args(argv)
    names = [*SERVERS] if given.only is None else [given.only]
    results = run(names, given.connections)
    if given.only is None:
        command = f"python -m scripts.faults.flood --connections {given.connections}"
        title = "Servers flooded with connections"
        print(write_page("flood", title, command, tables(results)))
    return int(not all(one.is_right for one in results))


if __name__ == "__main__":
    sys.exit(main())
