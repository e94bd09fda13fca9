"""Who shares a host; a run of two processes is in `test_train`."""

import socket

import pytest
from jax._src.distributed import global_state

from mjax.processes import hosts


@pytest.fixture
def as_process_5(coordinator, monkeypatch):
    """Make this process number 5 of 13."""
    monkeypatch.setattr(global_state, "process_id", 5)
    monkeypatch.setattr(global_state, "num_processes", 13)
    hosts.this_host.cache_clear()
    yield coordinator
    hosts.this_host.cache_clear()


def test_a_run_of_one_process_has_its_host_to_itself():
    host = hosts.this_host()
    assert (host.processes, host.process, host.first) == ((0,), 0, 0)


def test_processes_of_one_host_find_each_other_and_no_others(as_process_5, monkeypatch):
    monkeypatch.setattr(hosts.Agreement, "together", lambda self, act: act())
    here, elsewhere = hosts._identity(), "elsewhere"
    for folder, process in ((here, 12), (here, 4), (elsewhere, 0), (elsewhere, 6)):
        as_process_5.key_value_set(f"mjax/hosts/{folder}/{process}", "")
    host = hosts.this_host()
    assert host.processes == (4, 5, 12)
    assert (host.process, host.first, host.name) == (5, 4, socket.gethostname())


def test_a_host_is_a_kernel_a_name_and_a_network(monkeypatch):
    one = hosts._identity()
    assert one == hosts._identity()
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "another-container")
    two = hosts._identity()
    monkeypatch.setattr(hosts.os, "readlink", lambda path: "net:[1]")
    assert len({one, two, hosts._identity()}) == 3
