"""Measurements of devices through jax: a process that `health burn` starts.

Input: a `measurements.Task` as JSON in argv. Output: reports. A value is the work of a
call over its median time t in seconds. GB are 10^9 bytes, n is the number of devices,
and S is the size in bytes of the buffer on each device:

- gemm: [m, m] times [m, m] of random numbers on one device, 2 m^3 operations; the sums
  are float32 (int8: int32), and float32 factors are multiplied in full precision.
- bits: one program runs the same GEMM on all devices at once; all results must have the
  same bits, every time. A GEMM of small integers must give the exact result.
- device_memory: reads and writes a buffer on one device, 2 S/t.
- host_to_device, device_to_host: between page-locked host memory and a device, S/t.
- pair: from one device to another, for every ordered pair, S/t.
- all_to_all: bus bandwidth, S/t (n-1)/n.
- all_reduce, all_reduce_hosts: bus bandwidth, S/t 2(n-1)/n; S/t alone is the algorithm
  bandwidth. Source of both factors: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.

For copies and collectives, the received bytes are compared with the expected ones.
"""

import collections
import functools
import sys
from collections.abc import Callable, Mapping, Sequence

import jax

from mjax import checked_json
from mjax.health.burn import gemm_workloads, link_workloads, reporting
from mjax.health.burn.device_bench import Bench, Device
from mjax.health.burn.host_workloads import processor
from mjax.health.burn.measurements import DTYPES, Measured, Outcome, Report, Task

Functions = Mapping[str, Callable[[], Sequence[Measured]]]


def main(argv: list[str]) -> int:
    """Run the measurements of the task; return exit code 0."""
    task = checked_json.read(argv[0], Task)
    reporting.end_with_parent()
    if task.num_processes > 1:
        jax.distributed.initialize(
            coordinator_address=task.coordinator,
            num_processes=task.num_processes,
            process_id=task.process_id,
            initialization_timeout=task.join_s,
            cluster_detection_method="deactivate",
        )
    devices = start_devices()
    reporting.send(task, Report(event="hardware", hardware=hardware(devices)))
    reporting.run(task, functions(Bench(devices, task)))
    if task.num_processes > 1:
        elapsed_s = link_workloads.agree(task.elapsed_s)
        reporting.send(task, Report(event="agreed", elapsed_s=elapsed_s))
        jax.distributed.shutdown()
    return 0


def start_devices() -> dict[str, Device]:
    """Return the devices of this process by name, in the order of jax.

    Raises:
      SystemExit: there are no devices, or they cannot start; one line says why.
    """
    try:
        found = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        asked = jax.config.jax_platforms or "any platform"
        raise SystemExit(f"jax cannot start devices of {asked}: {why}") from error
    return {f"{one.platform}{index}": one for index, one in enumerate(found)}


def functions(bench: Bench) -> Functions:
    """Return the function that measures each kind."""
    found: dict[str, Callable[[], Sequence[Measured]]] = {
        "devices": lambda: [present(bench)],
        "device_memory": lambda: link_workloads.device_memory(bench),
        "host_to_device": lambda: link_workloads.transfers(bench, "host_to_device"),
        "device_to_host": lambda: link_workloads.transfers(bench, "device_to_host"),
        "pair": lambda: link_workloads.pair(bench),
        "all_to_all": lambda: link_workloads.all_to_all(bench),
        "all_reduce": lambda: link_workloads.all_reduce(bench),
        "all_reduce_hosts": lambda: link_workloads.all_reduce_hosts(bench),
    }
    for dtype in DTYPES:
        found[f"gemm.{dtype}"] = functools.partial(gemm_workloads.gemm, bench, dtype)
        found[f"bits.{dtype}"] = functools.partial(gemm_workloads.bits, bench, dtype)
    return found


def hardware(devices: Mapping[str, Device]) -> str:
    """Return the model of the devices as jax names it, or all models if they differ."""
    kinds = {
        processor() if device.platform == "cpu" else device.device_kind
        for device in devices.values()
    }
    return " and ".join(sorted(kinds))


def present(bench: Bench) -> Measured:
    """Return the number and model of the devices; they must be of one model."""
    kinds = collections.Counter(d.device_kind for d in bench.devices.values())
    note = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    outcome: Outcome = "right" if len(kinds) == 1 else "wrong"
    count = float(len(bench.devices))
    return Measured(name="devices", outcome=outcome, value=count, note=note)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
