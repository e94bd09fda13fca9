"""Join a run as a training process does, and time each phase.

    python -m mjax.processes.timed_start RANK NUM_PROCESSES HOST:PORT REPORT_FD BEGAN_S

`mjax.health.startup` starts several of these processes. Input: the address of the
coordination service (`mjax.processes.coordinator`), and the start time of this process
by the monotonic clock of the host. Output: at the end of each phase one JSON line on
the file descriptor REPORT_FD, with the name of the phase, its seconds, and the CPU
seconds of this process in it.

Before the next phase the process waits for a byte on its standard input, so no phase
includes the wait for the slowest process of the previous phase. The process ends at
once when that input ends. The phases are those of `mjax.train` that depend on the
number of processes, in its order; there is no model.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator

LIMIT_S = 3_600
"""Timeout in seconds. It is above any limit of the parent, which ends the processes."""
_FIX = "Do not change files of mjax while processes start"


def phases(rank: int, num_processes: int, address: str) -> Iterator[str]:
    """Join the run, one phase per iteration; yield each phase's name when it ends.

    Raises:
      RuntimeError: the processes did not connect, or their combined result is wrong.
      ValueError: the processes have different code or environments.
    """
    yield "spawn"
    import jax

    from mjax.processes import distributed
    from mjax.processes.agreement import Agreement
    from mjax.processes.comparison import check_same, code_facts, environment_facts
    from mjax.processes.config import DistributedConfig
    from mjax.processes.device_sum import device_sum

    yield "import"
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    distributed.start(
        DistributedConfig(
            coordinator=address,
            num_processes=num_processes,
            process_id=rank,
            serves=False,
            timeout_s=LIMIT_S,
        )
    )
    yield "connect"
    distributed.client().wait_at_barrier("timed_start", 1_000 * LIMIT_S)
    yield "barrier"
    check_same(Agreement("start"), environment_facts() | code_facts(), _FIX)
    yield "comparison"
    devices = jax.devices()
    if len(devices) != num_processes or len(jax.local_devices()) != 1:
        raise RuntimeError(
            f"process {rank} sees {len(devices)} devices, {len(jax.local_devices())} "
            f"of its own; there must be one for each of {num_processes} processes"
        )
    yield "devices"
    summed, numbers, right = device_sum()
    compiled = summed.lower(numbers).compile()
    yield "compile"
    (shard,) = compiled(numbers).addressable_shards
    if (found := float(shard.data[0])) != right:
        raise RuntimeError(f"the sum over all processes is {found:g}, not {right:g}")
    yield "collective"
    jax.distributed.shutdown()
    yield "end"


def report_phases(steps: Iterator[str], descriptor: int, began_s: float) -> int:
    """Run phases: report the end of each, and wait to be released.

    Args:
      steps: each iteration is a phase and yields its name.
      descriptor: file descriptor for the reports.
      began_s: start of the first phase, by the monotonic clock.
    Returns:
      exit code 0.
    """
    began_cpu_s = 0.0
    released: queue.SimpleQueue[None] = queue.SimpleQueue()
    with os.fdopen(descriptor, "w", buffering=1) as report:
        threading.Thread(target=_listen, args=(released,), daemon=True).start()
        while (name := next(steps, None)) is not None:
            ended_s, ended_cpu_s = time.monotonic(), time.process_time()
            times = {"wall_s": ended_s - began_s, "cpu_s": ended_cpu_s - began_cpu_s}
            report.write(json.dumps({"phase": name, **times}) + "\n")
            released.get()
            began_s, began_cpu_s = time.monotonic(), time.process_time()
    return 0


def _listen(released: queue.SimpleQueue[None]) -> None:
    while os.read(0, 1):  # sys.stdin has a lock that this thread would hold at exit
        released.put(None)
    os._exit(1)  # the parent process is gone


def main(argv: list[str]) -> int:
    """Run the phases, and report each."""
    rank, num_processes, address, descriptor, began = argv
    steps = phases(int(rank), int(num_processes), address)
    return report_phases(steps, int(descriptor), float(began))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
