"""Fixtures: a bucket of an S3 server and one of a small GCS, both on this machine.

`from tests.stores.servers import s3_url, gs_url` in the conftest.py of a folder.
"""

import importlib
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stores.gcs_server import GcsServer

BUCKET = "bucket"


class S3Server:
    """moto's server in threads of this process; its buckets outlive `stop`."""

    def __init__(self) -> None:
        module: Any = importlib.import_module("moto.server")
        self._make = module.ThreadedMotoServer
        self._server: Any = None
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = self._make(ip_address="127.0.0.1", port=self.port)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    def stop(self) -> None:
        self._server.stop()
        self._server._server.server_close()  # moto leaves the socket open

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which a program reaches the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """Return a client that is not ours."""
        module: Any = importlib.import_module("boto3")
        return module.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def forget(self) -> None:
        """Delete all buckets, which otherwise live as long as this process."""
        urllib.request.urlopen(f"{self.endpoint}/moto-api/reset", data=b"").close()


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server with one empty bucket; environment variables direct clients to
    it."""
    server = S3Server()
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    server.make_bucket(BUCKET)
    yield server
    server.forget()
    server.stop()


@pytest.fixture
def gcs_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A small GCS with one empty bucket; environment variables direct clients to it."""
    server = GcsServer()
    server.buckets[BUCKET] = {}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", server.key)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """A prefix in an empty bucket of S3."""
    return f"s3://{BUCKET}/some/where"


@pytest.fixture
def gs_url(gcs_server: GcsServer) -> str:
    """A prefix in an empty bucket of GCS."""
    return f"gs://{BUCKET}/some/where"
