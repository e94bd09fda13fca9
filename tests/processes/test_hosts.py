"""Who shares a host; a run of two processes is in `test_train`."""

import socket

import pytest
from jax._src.distributed import global_state
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from mjax.processes import hosts


@pytest.fixture
def coordinator(monkeypatch):
    """The key-value store of a run, seen as its process 5."""
    with socket.create_server(("localhost", 0)) as probe:
        address = f"localhost:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=60)
    client.connect()
    monkeypatch.setattr(global_state, "client", client)
    monkeypatch.setattr(global_state, "process_id", 5)
    hosts.this_host.cache_clear()
    yield client
    hosts.this_host.cache_clear()
    client.shutdown()
    service.shutdown()


def test_a_run_of_one_process_has_its_host_to_itself():
    host = hosts.this_host()
    assert (host.processes, host.process, host.first) == ((0,), 0, 0)


def test_processes_of_one_host_find_each_other_and_no_others(coordinator):
    here, elsewhere = hosts._identity(), "elsewhere"
    for folder, process in ((here, 12), (here, 4), (elsewhere, 0), (elsewhere, 6)):
        coordinator.key_value_set(f"mjax/hosts/{folder}/{process}", "")
    host = hosts.this_host()
    assert host.processes == (4, 5, 12)
    assert (host.process, host.first, host.name) == (5, 4, socket.gethostname())


def test_what_one_process_publishes_another_looks_up(coordinator):
    hosts.publish("address", "text")
    assert hosts.look_up("address", timeout_s=60) == "text"
    with pytest.raises(RuntimeError, match="no process has published 'absent' with"):
        hosts.look_up("absent", timeout_s=0)


def test_a_host_is_a_kernel_a_name_and_a_network(monkeypatch):
    one = hosts._identity()
    assert one == hosts._identity()
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "another-container")
    two = hosts._identity()
    monkeypatch.setattr(hosts.os, "readlink", lambda path: "net:[1]")
    assert len({one, two, hosts._identity()}) == 3
