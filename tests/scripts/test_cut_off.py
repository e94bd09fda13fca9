"""The proxy that cuts a host off: bytes pass, are swallowed, and pass again."""

import socket
import socketserver
import threading

import pytest

from scripts.faults.cut_off import Proxy


class Echo(socketserver.BaseRequestHandler):
    """Send back what comes."""

    def handle(self):
        while data := self.request.recv(100):
            self.request.sendall(data)


@pytest.fixture
def echo():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address
        server.shutdown()


def test_a_cut_is_silent_and_connections_that_lost_bytes_are_ended(echo):
    proxy = Proxy(echo)
    with socket.create_connection(("127.0.0.1", proxy.port)) as one:
        one.settimeout(10)
        one.sendall(b"before")
        assert one.recv(100) == b"before"
        proxy.cut()
        one.sendall(b"lost")
        one.settimeout(0.3)
        with pytest.raises(TimeoutError):
            one.recv(100)
        proxy.heal()
        one.settimeout(10)
        assert one.recv(100) == b""
    with socket.create_connection(("127.0.0.1", proxy.port)) as one:
        one.settimeout(10)
        one.sendall(b"after")
        assert one.recv(100) == b"after"
