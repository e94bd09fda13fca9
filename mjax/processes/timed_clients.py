"""Time many clients of the coordination service in one process.

    python -m mjax.processes.timed_clients NUM_CLIENTS HOST:PORT REPORT_FD BEGAN_S

To the coordinator each client looks like a process of `timed_start`, with its own
connection and the same requests. A client has no devices and no interpreter of its own,
so a host with memory for a few dozen processes can run a thousand clients. The work of
the coordinator grows with the number of clients; this program measures it. Phases,
reports and releases are those of `timed_start`; phases without messages are left out.

The requests that jax makes to exchange the devices of all processes are made here
explicitly: every client posts its own devices, client 0 reads all of them and posts the
result, and the other clients read it. Source: openxla/xla,
xla/pjrt/distributed/topology_util.cc, ExchangeTopologies.
"""

import collections
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from mjax.processes.timed_start import LIMIT_S, report_phases

LOCAL_TOPOLOGY_BYTES = 80
"""Bytes that a process with one CPU device posts. Measured, jax 0.11.2: 69 and 80."""


def phases(num_clients: int, address: str) -> Iterator[str]:
    """Start all clients, one phase per iteration; yield each phase's name when it ends.

    Raises:
      RuntimeError: the clients agreed on a wrong result.
      jax.errors.JaxRuntimeError: the coordinator is gone.
    """
    import jax  # noqa: F401, by itself jaxlib does not load
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    from mjax.processes.comparison import code_facts, environment_facts

    clients = [
        _jax.get_distributed_runtime_client(
            _own_address(address, number),
            number,
            init_timeout=LIMIT_S,
            use_compression=True,
        )
        for number in range(num_clients)
    ]
    with ThreadPoolExecutor(num_clients) as pool:
        # The clients wait for each other, so each needs a thread.
        def all_of(act: Callable[[int], Any]) -> list[Any]:
            return list(pool.map(act, range(num_clients)))

        all_of(lambda number: clients[number])  # starts all threads
        yield "import"
        all_of(lambda number: clients[number].connect())
        yield "connect"
        all_of(lambda n: clients[n].wait_at_barrier("timed_start", 1_000 * LIMIT_S))
        yield "barrier"
        text = json.dumps(environment_facts() | code_facts())
        agreements = _agreements(clients)
        all_of(lambda number: _compare(agreements[number], text))
        yield "comparison"
        lengths = all_of(lambda number: _exchange(clients[number], number, num_clients))
        if {*lengths} != {num_clients * LOCAL_TOPOLOGY_BYTES}:
            raise RuntimeError(f"the clients have read {sorted({*lengths})} bytes")
        yield "devices"
        all_of(lambda number: clients[number].shutdown())
        yield "end"


def _own_address(address: str, number: int) -> str:
    """Return the loopback address of one client, with the port of `address`.

    Clients with the same address share a connection; processes cannot.
    """
    port = address.rpartition(":")[2]
    return f"127.1.{number // 250}.{1 + number % 250}:{port}"


def _agreements(clients: Sequence[Any]) -> list[Any]:
    """Return an agreement for each client, as if each had a process of its own."""
    from mjax.processes import agreement, distributed

    found = []
    for number, client in enumerate(clients):
        state = mock.Mock(process_id=number, num_processes=len(clients), client=client)
        with (
            mock.patch.object(distributed, "_state", return_value=state),
            mock.patch.object(agreement, "_opened", collections.Counter()),
        ):
            found.append(agreement.Agreement("start"))
    return found


def _compare(agreement: Any, text: str) -> None:
    """Post and read the same texts as `check_same` does if nothing differs.

    Unlike `check_same`, do not parse the text: with a thousand clients in one
    interpreter that would take so long that waiting clients would time out and ask
    again, see `KeyValueStore`.
    """
    if agreement.from_rank(0, text) != text:
        raise RuntimeError(
            "a client has read a text that differs from that of client 0"
        )
    agreement.merge("{}", lambda texts: "")


def _exchange(client: Any, number: int, num_clients: int) -> int:
    """Exchange the lists of devices; return their total size in bytes."""
    own = number.to_bytes(LOCAL_TOPOLOGY_BYTES, "little")
    timeout_ms = 1_000 * LIMIT_S
    client.key_value_set_bytes(f"timed/{number}", own)
    if number == 0:
        keys = [f"timed/{other}" for other in range(num_clients)]
        found = [client.blocking_key_value_get_bytes(k, timeout_ms) for k in keys]
        client.key_value_set_bytes("timed/all", b"".join(found))
    return len(client.blocking_key_value_get_bytes("timed/all", timeout_ms))


def main(argv: list[str]) -> int:
    """Run the phases, and report each."""
    num_clients, address, descriptor, began = argv
    steps = phases(int(num_clients), address)
    return report_phases(steps, int(descriptor), float(began))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
