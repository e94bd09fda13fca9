"""Time the phases of starting a process group: `python -m mjax.health init`.

Input: numbers of processes. Output: the time of each phase on this host and its
growth, and a model of many hosts next to MegaScale's figures, as a table or JSON. Each
process has one CPU device and no model; see `mjax.processes.timed_start`.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mjax.cli.flags.standard import ArgumentParser
from mjax.health.startup.model import PhaseTimes, Starts, read_phases
from mjax.health.startup.report import Size, as_json, table
from mjax.health.startup.starts import (
    PROCESS_BYTES,
    FailedError,
    ended_by_signal,
    raise_file_limit,
    time_start,
)

MOST_CLIENTS = 4_096
"""Maximum number of light clients. A client takes about three threads and two open
files on this host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitFlags:
    """Time the phases of starting a process group, and show how they grow."""

    processes: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32)
    """Sizes of the groups to start, one after the other."""
    repeats: int = 3
    """Number of starts of each size; the median is reported."""
    clients: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Numbers of light clients, to measure the coordinator with many processes."""
    round_trip_us: float = 100.0
    """Network round trip between two hosts in microseconds, for the model."""
    hosts: int = 10_000
    """Number of processes for which the model is evaluated."""
    port: int = 0
    """Port of the coordination service; 0: any free one."""
    limit_s: float = 300.0
    """Time limit of one start in seconds."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        if not self.processes:
            raise ValueError(
                "--processes must have at least one number; for example 2 4 8 16 32"
            )
        given = {"--processes": self.processes, "--clients": self.clients}
        for flag, sizes in given.items():
            if min(sizes, default=2) < 2 or len({*sizes}) != len(sizes):
                raise ValueError(
                    f"{flag} must be distinct numbers, each at least 2, got "
                    f"{' '.join(map(str, sizes))}; for example 2 4 8 16 32"
                )
        if max(self.clients, default=2) > MOST_CLIENTS:
            raise ValueError(
                f"--clients must be at most {MOST_CLIENTS}, got {max(self.clients)}"
            )
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        if self.hosts < 2:
            raise ValueError(f"--hosts must be at least 2, got {self.hosts}")
        if not 0 <= self.round_trip_us < float("inf"):
            raise ValueError(
                f"--round-trip-us must be at least 0, got {self.round_trip_us:g}"
            )
        if not 0 <= self.port < 65_536:
            raise ValueError(f"--port must be from 0 to 65535, got {self.port}")
        if not 0 < self.limit_s < float("inf"):
            raise ValueError(f"--limit-s must be positive, got {self.limit_s:g}")


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
      0; 2 after bad input; 1 if a start failed.
    Raises:
      SystemExit: argparse has shown the help (code 0) or a syntax error in the flags
        (code 2).
    """
    try:
        asked = parse(argv, "python -m mjax.health init")
        _check_memory(max(asked.processes), _available_bytes())
        with ended_by_signal():
            starts, clients = measure(asked)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (FailedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    phases = read_phases(starts, clients)
    size = Size(hosts=asked.hosts, round_trip_s=asked.round_trip_us / 1e6)
    if asked.json:
        print(json.dumps(as_json(phases, size, starts, clients)))
    else:
        print("\n".join(table(phases, size)))
    return 0


def parse(argv: Sequence[str], prog: str) -> InitFlags:
    """Read the words of the command line.

    Raises:
      ValueError: a value cannot be used; the message names the flag.
      SystemExit: see `main`.
    """
    parser = ArgumentParser(
        prog=prog, description=(InitFlags.__doc__ or ""), allow_abbrev=False
    )
    add, usual = parser.add_argument, InitFlags()
    add("--processes", type=int, nargs="+", help="sizes of the groups", metavar="N")
    add("--repeats", type=int, help="starts of each size; the median is reported")
    add("--clients", type=int, nargs="*", help="numbers of light clients", metavar="N")
    trip = "network round trip in microseconds, for the model"
    add("--round-trip-us", type=float, help=trip)
    add("--hosts", type=int, help="number of processes for the model")
    add("--port", type=int, help="port of the coordination service; 0: any free one")
    add("--limit-s", type=float, help="time limit of one start in seconds")
    add("--json", action="store_true", help="print one JSON object")
    found = vars(parser.parse_args([*argv]))
    given = {name: value for name, value in found.items() if value is not None}
    for name in ("processes", "clients"):
        given[name] = tuple(given.get(name, getattr(usual, name)))
    return InitFlags(**given)


def measure(asked: InitFlags) -> tuple[Starts, Starts]:
    """Start groups of all sizes in turn, so that slow minutes affect all sizes.

    Returns:
      the starts of processes, and of light clients.
    Raises:
      ValueError: the port is in use.
      FailedError: a start failed; the message has its size.
    """
    raise_file_limit()
    found: dict[bool, dict[int, list[tuple[PhaseTimes, ...]]]] = {
        False: {size: [] for size in asked.processes},
        True: {size: [] for size in asked.clients},
    }
    for repeat in range(asked.repeats):
        for is_light, starts in found.items():
            for size in starts:
                what = f"{size} {'clients' if is_light else 'processes'}"
                began_s = time.monotonic()
                try:
                    start = time_start(
                        size,
                        port=asked.port,
                        limit_s=asked.limit_s,
                        is_light=is_light,
                    )
                except FailedError as error:
                    raise FailedError(f"a start of {what}: {error}") from error
                starts[size].append(start)
                print(
                    f"start {repeat + 1} of {asked.repeats}, {what}: "
                    f"{time.monotonic() - began_s:.1f} s",
                    file=sys.stderr,
                )
    return found[False], found[True]


def _available_bytes() -> int:
    """Return the memory that is available to programs (proc_meminfo(5))."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise ValueError("/proc/meminfo has no MemAvailable; this command needs Linux 3.14")


def _check_memory(size: int, available_bytes: int) -> None:
    if size * PROCESS_BYTES > available_bytes:
        most = available_bytes // PROCESS_BYTES
        raise ValueError(
            f"--processes {size} may take {size * PROCESS_BYTES / 1e9:.1f} GB, "
            f"{available_bytes / 1e9:.1f} GB are available; give at most {most}"
        )
