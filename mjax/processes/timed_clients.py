"""Many clients of the coordination service in one process, and the time they take.

    python -m mjax.processes.timed_clients NUM_CLIENTS HOST:PORT REPORT_FD BEGAN_S

To the coordinator each client is what a process of `timed_start` is: a connection of
its own, the same requests. It has no devices, and no interpreter of its own, so that a
host that has memory for a few dozen processes has a thousand clients: what the
coordinator does grows with the clients, and that is what this is for. Phases, reports
and releases are those of `timed_start`; phases without messages are left out.

What jax asks for when the devices of all processes are exchanged is asked here by hand:
every client posts its own, client 0 reads those of all and posts them together, the
others read that. Source: openxla/xla, xla/pjrt/distributed/topology_util.cc,
ExchangeTopologies.
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
"""What a process with one CPU device posts. Measured with jax 0.11.2: 69 and 80."""


def phases(num_clients: int, address: str) -> Iterator[str]:
    """Start all clients, one phase a turn; yield the name of the phase that has ended.

    Raises:
      RuntimeError: what the clients agree on is wrong.
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
        # The clients wait for each other: each needs a thread.
        def all_of(act: Callable[[int], Any]) -> list[Any]:
            return list(pool.map(act, range(num_clients)))

        all_of(lambda number: clients[number])  # the threads are there
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
    """Return another loopback address of the same port.

    Clients with one address share a connection, as processes cannot.
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
    """Say and ask what `check_same` does where nothing differs.

    It would parse the text too. A thousand clients in one interpreter would take so
    long that those who wait for the answer would ask again, see `KeyValueStore`.
    """
    if agreement.from_rank(0, text) != text:
        raise RuntimeError("a client has read another text than that of client 0")
    agreement.merge("{}", lambda texts: "")


def _exchange(client: Any, number: int, num_clients: int) -> int:
    """Exchange what devices there are; return the bytes of all."""
    own = number.to_bytes(LOCAL_TOPOLOGY_BYTES, "little")
    timeout_ms = 1_000 * LIMIT_S
    client.key_value_set_bytes(f"timed/{number}", own)
    if number == 0:
        keys = [f"timed/{other}" for other in range(num_clients)]
        found = [client.blocking_key_value_get_bytes(k, timeout_ms) for k in keys]
        client.key_value_set_bytes("timed/all", b"".join(found))
    return len(client.blocking_key_value_get_bytes("timed/all", timeout_ms))


def main(argv: list[str]) -> int:
    """Go through the phases, and report each."""
    num_clients, address, descriptor, began = argv
    steps = phases(int(num_clients), address)
    return report_phases(steps, int(descriptor), float(began))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
