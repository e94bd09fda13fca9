"""A coordination service of jax, in this process."""

import socket

import pytest
from jax._src.distributed import global_state
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture
def coordinator(monkeypatch):
    """Return jax's client of the key-value store of a run."""
    with socket.create_server(("localhost", 0)) as probe:
        address = f"localhost:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=60)
    client.connect()
    monkeypatch.setattr(global_state, "client", client)
    yield client
    client.shutdown()
    service.shutdown()
