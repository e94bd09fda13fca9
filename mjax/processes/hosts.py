"""Which processes of the run share this host.

Enters: a run that has been started (`distributed.start`). Leaves: the processes beside
this one, and words that they can leave for each other at the coordinator.

Two processes share a host when they see one kernel (its boot id), one host name and one
network namespace: then a Unix socket of the abstract kind that one of them opens can be
reached by the other. Containers on one machine are hosts of their own unless they share
all three.
"""

import dataclasses
import functools
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import jax

from mjax.processes.distributed import wait_for_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The processes of the run on this machine."""

    name: str
    """Its host name."""
    processes: tuple[int, ...]
    """Their indices in the run, ascending."""
    process: int
    """The index of this one."""

    @property
    def first(self) -> int:
        """The process that does what is done once per host."""
        return self.processes[0]


@functools.cache
def this_host() -> Host:
    """Return who shares this host; every process of the run must call it.

    Each process asks the coordinator for its own host only: what is sent grows with the
    processes of the run, not with their square.
    """
    client, process = _client()
    if client is None:
        return Host(name=socket.gethostname(), processes=(0,), process=0)
    folder = f"mjax/hosts/{_identity()}/"
    client.key_value_set(f"{folder}{process}", "")
    wait_for_all("the hosts are known")
    keys = [key for key, _ in client.key_value_dir_get(folder)]
    processes = sorted(int(key.rpartition("/")[2]) for key in keys)
    return Host(name=socket.gethostname(), processes=tuple(processes), process=process)


def publish(name: str, text: str) -> None:
    """Leave a text at the coordinator for other processes; each name once."""
    client, _ = _client()
    assert client is not None  # of a run of one: there is nobody to read it
    client.key_value_set(f"mjax/{name}", text)


def look_up(name: str, timeout_s: int) -> str:
    """Return what another process has published, waiting for it.

    Raises:
      RuntimeError: it was not published within timeout_s.
    """
    client, _ = _client()
    assert client is not None
    try:
        return client.blocking_key_value_get(f"mjax/{name}", timeout_s * 1000)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"no process has published {name!r} within {timeout_s} s: {error}"
        ) from error


def _client() -> tuple[Any, int]:
    """Return jax's client of the coordinator, None in a run of one, and our index."""
    from jax._src.distributed import (
        global_state,
    )  # no public way to the key-value store

    return global_state.client, global_state.process_id


def _identity() -> str:
    """Return a name that the processes of a host, and no others, have in common."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    words = (socket.gethostname(), boot_id, os.readlink("/proc/self/ns/net"))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]
