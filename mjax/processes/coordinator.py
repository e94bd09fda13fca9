"""jax's coordination service in a separate process.

    python -m mjax.processes.coordinator NUM_PROCESSES HOST:PORT

By default jax runs the service in process 0. Then all processes wait until process 0
listens (a client that cannot connect retries after a second), and all end with process
0. Here the service listens before the first process starts and outlives every process.
The processes are started with `--distributed.no-serves`.

One function of jax starts both the service and the client of process 0. To omit the
service or the client, its factory is replaced by a stand-in.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mjax.processes.config import split_address

_MADE_BY = "jax._src.distributed._jax.get_distributed_runtime"


@contextlib.contextmanager
def without_service() -> Iterator[None]:
    """Let `jax.distributed.initialize` in process 0 start only a client."""
    with mock.patch(f"{_MADE_BY}_service", return_value=None):
        yield


def serve(num_processes: int, address: str) -> Any:
    """Listen for the processes of a run; return the service, which ends when released.

    Args:
      num_processes: number of processes of the run.
      address: host:port at which the processes reach the service, which listens on all
        interfaces.
    """
    import jax
    from jax._src.distributed import State

    jax.config.update("jax_enable_preemption_service", False)
    state = State()
    with mock.patch(f"{_MADE_BY}_client"):
        state.initialize(
            coordinator_address=address,
            num_processes=num_processes,
            process_id=0,
            cluster_detection_method="deactivate",
        )
    return state.service


def main(argv: list[str]) -> int:
    """Serve until a signal arrives."""
    num_processes, address = argv
    split_address(address)
    service = serve(int(num_processes), address)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del service
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main(sys.argv[1:]))
