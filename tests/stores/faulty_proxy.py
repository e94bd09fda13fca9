"""A proxy before an S3 server that fails on purpose."""

import contextlib
import http.client
import http.server
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.stores.servers import S3Server

Fault = Callable[[str, str, int], str]
"""(method, path, number of the request) -> name of a fault, "" for none."""

_HOP_HEADERS = ("transfer-encoding", "connection", "content-length")


class FaultyProxy(http.server.ThreadingHTTPServer):
    """Passes requests on, except those for which `fault` names a fault.

    Faults: `hang` accepts the request and never answers; `half` sends the headers and
    half of the body, then nothing; `503` refuses the request; `short` omits the last
    byte, with a Content-Length that fits.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = port
        self.fault: Fault = lambda method, path, number: ""
        self.num_requests = 0
        self.is_over = threading.Event()

    def next_fault(self, method: str, path: str) -> str:
        self.num_requests += 1
        return self.fault(method, path, self.num_requests)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _proxy(self) -> FaultyProxy:
        assert isinstance(self.server, FaultyProxy)
        return self.server

    def _pass_on(self) -> None:
        request = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match fault := self._proxy.next_fault(self.command, self.path):
            case "hang":
                self._stall()
            case "503":
                self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
            case _:
                self._answer(*self._asked(request), fault)

    def do_GET(self) -> None:
        self._pass_on()

    def do_PUT(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def do_DELETE(self) -> None:
        self._pass_on()

    def _asked(self, request: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self._proxy.upstream_port)
        upstream.request(self.command, self.path, request, dict(self.headers))
        answer = upstream.getresponse()
        body = answer.read()
        headers = [h for h in answer.getheaders() if h[0].lower() not in _HOP_HEADERS]
        if self.command == "HEAD":
            headers.append(("Content-Length", answer.headers["Content-Length"] or "0"))
        upstream.close()
        return answer.status, headers, body

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, fault: str = ""
    ) -> None:
        if fault == "short":
            body = body[:-1]
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "half":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self._stall()
        else:
            self.wfile.write(body)

    def _stall(self) -> None:
        self._proxy.is_over.wait(60)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            super().handle()


@pytest.fixture
def proxy(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    """A proxy to which environment variables direct S3 clients."""
    made = FaultyProxy(s3_server.port)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.server_port}")
    yield made
    made.is_over.set()
    made.shutdown()
    made.server_close()
