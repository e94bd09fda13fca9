"""Measure how much slower mjax is than a bare training loop, and what the host costs.

    python -m scripts.speed.overhead

Writes docs/benchmarks/overhead.md from three measurements: steps in turns with the bare
loop (`scripts.speed.bench_overhead`), the host around a compiled step that computes
nothing (`scripts.speed.host_time`), and the CPU time of importing the trainer. Run it
on an idle machine.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from scripts.evidence import REPOSITORY, Table, write_page
from scripts.speed import bench_overhead, host_time
from scripts.speed.bench_overhead import Compared, Workload
from scripts.speed.host_time import HostTimes

_NUM_IMPORTS = 5
_IMPORTS: Mapping[str, Sequence[str]] = {
    "`python -c 'import mjax.trainer'`": ("-c", "import mjax.trainer"),
    "`python -m mjax.train -h`": ("-m", "mjax.train", "-h"),
}
_SPREAD = ("min", "median", "max")


def step_table(work: Workload, found: Compared) -> Table:
    """Return the times of both programs and their ratio."""
    num_pairs = len(found.times["mjax"])
    gflops = _both(found.gflops, "{:.1f}")
    temp_mib = _both(found.temp_mib, "{:.0f}")
    return Table(
        title="Step",
        text=f"The step of mjax and that of `scripts/speed/bare_loop.py` (the same "
        "maths, sharding, remat and attention, nothing else), in turns in one process, "
        f"{num_pairs} pairs: {bench_overhead.describe(work)}, simulated devices. "
        f"GFLOP of matmuls per device: {gflops}; MiB of temporary memory per device: "
        f"{temp_mib}. The ratio is taken pair by pair. mjax's program stores one leaf "
        "per matrix where the bare loop stores them fused, can skip a step, and "
        "returns metrics.",
        header=("", *_SPREAD),
        rows=bench_overhead.rows(found),
    )


def _both(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{form.format(value)} ({name})" for name, value in values.items())


def host_table(found: Mapping[int, HostTimes]) -> Table:
    """Return the host's times.

    Args:
      found: by the number of devices of the process.
    """
    names = dict.fromkeys(name for one in found.values() for name in one.times_ms)
    arrays = " and ".join(
        f"{one.num_inputs} and {one.num_outputs} with {_devices(number)}"
        for number, one in found.items()
    )
    return Table(
        title="Host",
        text="An iteration of the training loop around a compiled step of the same "
        "arguments that computes nothing: dispatch, reading the metrics, the row, a "
        f"progress line. {host_time.NUM_STEPS} iterations, of which the first "
        f"{host_time.NUM_WARMUP_STEPS} are left out. The call is the work of jax and "
        f"XLA alone; arrays per device that it takes and returns: {arrays}. The loader "
        "reads ahead in a thread, which overlaps a real step but nothing here. An "
        "empty cell: nothing is sharded that could be gathered.",
        header=(
            "ms",
            *(f"{_devices(number)}, {name}" for number in found for name in _SPREAD),
        ),
        rows=[
            [
                name,
                *(
                    cell
                    for one in found.values()
                    for cell in (
                        bench_overhead.spread(one.times_ms[name])
                        if name in one.times_ms
                        else [""] * len(_SPREAD)
                    )
                ),
            ]
            for name in names
        ],
    )


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"


def import_table(found: Mapping[str, Sequence[float]]) -> Table:
    """Return the CPU time of imports.

    Args:
      found: CPU-seconds of each process, by its command.
    """
    counts = {len(values) for values in found.values()}
    return Table(
        title="Import",
        text="CPU-seconds (user and system) of a process that imports all that a run "
        f"needs, and of one that prints the help; {max(counts)} processes each. "
        "`tests/run/test_trainer_imports.py` names what may not be loaded.",
        header=("CPU-s", *_SPREAD),
        rows=[[name, *bench_overhead.spread(values)] for name, values in found.items()],
    )


def import_times_s(words: Sequence[str], num_runs: int) -> list[float]:
    """Run python several times, once more to warm up; return its CPU-seconds.

    Raises:
      CalledProcessError: it failed.
    """
    found = []
    for _ in range(num_runs + 1):
        before = os.times()
        subprocess.run(
            [sys.executable, *words],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = os.times()
        user_s = after.children_user - before.children_user
        found.append(user_s + after.children_system - before.children_system)
    return found[1:]


def in_own_process[**P, R](
    function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call a function in a new process: the devices of a process are made once."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {args.pairs}")
    imports = {
        name: import_times_s(words, _NUM_IMPORTS) for name, words in _IMPORTS.items()
    }
    work = Workload()
    works = {8: work, 1: Workload(dp=1, tp=1)}
    host = {n: in_own_process(host_time.time_host, one) for n, one in works.items()}
    compared = in_own_process(bench_overhead.compare, work, args.pairs)
    tables = [step_table(work, compared), host_table(host), import_table(imports)]
    command = "python -m scripts.speed.overhead"
    if args.pairs != parser.get_default("pairs"):
        command += f" --pairs {args.pairs}"
    title = "A step compared with a bare loop, and the host around it"
    print(write_page("overhead", title, command, tables))
    ratio = statistics.median(
        ours[0] / bare[0] for ours, bare in zip(*compared.times.values(), strict=True)
    )
    print(f"mjax takes {ratio:.3f} times as long as the bare loop")


if __name__ == "__main__":
    main()
