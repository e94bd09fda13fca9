"""A small test of a group with one real process per host, on this machine.

    python -m scripts.health.group_test --hosts n0,n1,n2

Each process does the same arithmetic from a fixed seed, then sends its checksum around
a ring until all processes have all checksums. The test fails if two differ, so a test
of one host always passes. It takes as long as its slowest host.

Faults are simulated: hosts named in SLOW_HOSTS take several times as long, and each
host named in WRONG_HOSTS flips a different bit. The work is mostly waiting, so eight
processes run on two cores without slowing each other down.
"""

import argparse
import multiprocessing
import os
import sys
import time
import zlib
from multiprocessing.connection import Connection

_SEED, _STEPS = 20_26, 2_000
_SLOWDOWN = 8.0


def compute(host: str) -> int:
    """Return the checksum that a host computes."""
    value = _SEED
    for _ in range(_STEPS):
        # The generator of Numerical Recipes, 2nd edition, chapter 7.1.
        value = (1664525 * value + 1013904223) % 2**32
    if host in _named("WRONG_HOSTS"):
        value ^= 1 << zlib.crc32(host.encode()) % 32
    return value


def work(
    host: str, before: Connection, behind: Connection, num: int, work_s: float
) -> None:
    """Run as one host of the group; exit code 1 if its checksum differs from any other.

    Args:
      host: name of this host.
      before: receives checksums from the previous host.
      behind: sends checksums to the next host.
      num: hosts of the group.
      work_s: seconds of work of a host that is not slow.
    """
    time.sleep(work_s * (_SLOWDOWN if host in _named("SLOW_HOSTS") else 1.0))
    own = passed_on = compute(host)
    agree = True
    for _ in range(num - 1):
        behind.send(passed_on)
        passed_on = before.recv()
        agree = agree and passed_on == own
    sys.exit(0 if agree else 1)


def _named(variable: str) -> set[str]:
    return set(os.environ.get(variable, "").split(",")) - {""}


def main(argv: list[str] | None = None) -> int:
    """Run the test of a group; return 0 if all hosts agree."""
    parser = argparse.ArgumentParser(prog="python -m scripts.health.group_test")
    parser.add_argument("--hosts", required=True, help="names, with commas")
    parser.add_argument("--work-s", type=float, default=0.5, help="seconds of work")
    args = parser.parse_args(argv)
    hosts = args.hosts.split(",")
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in hosts]
    processes = [
        context.Process(
            target=work,
            args=(host, pipes[rank - 1][0], pipes[rank][1], len(hosts), args.work_s),
        )
        for rank, host in enumerate(hosts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    wrong = [h for h, p in zip(hosts, processes, strict=True) if p.exitcode]
    print("differ" if wrong else "agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
