"""Which processes of the run share this host.

Enters: a run that has been started (`distributed.start`). Leaves: the processes beside
this one.

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

from mjax.processes import distributed
from mjax.processes.agreement import Agreement
from mjax.processes.key_value import KeyValueStore


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

    Each process lists its own host only: what is sent grows with the
    processes of the run, not with their square.
    """
    name, process = socket.gethostname(), distributed.rank()
    if distributed.num_processes() == 1:
        return Host(name=name, processes=(0,), process=0)
    store, identity = KeyValueStore("hosts"), _identity()
    store.post(f"{identity}/{process}", "")
    Agreement("hosts").together(lambda: None)
    processes = sorted(int(other) for other in store.names(identity))
    return Host(name=name, processes=tuple(processes), process=process)


def _identity() -> str:
    """Return a name that the processes of a host, and no others, have in common."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    words = (socket.gethostname(), boot_id, os.readlink("/proc/self/ns/net"))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]
