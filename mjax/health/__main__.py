"""`python -m mjax.health COMMAND`: is this host healthy, and which one is not?

check     judge this host by what its tools say
checks    list all checks
burn      measure what devices and host reach, and compare
bisect    find the hosts or links that make a test of a group fail
cluster   check the cables of a cluster, place ranks, write expectations
history   what has happened to hosts, and which to trust
ports     watch the counters of network ports
watch     find events in logs by rules, and act on them
init      time how process groups start

`COMMAND --help` has the flags of each. Exit codes: 0 all is well, 1 something is not, 2
bad input.
"""

import os
import sys
from collections.abc import Sequence

from mjax.health import check_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    match words[:1]:
        case ["check" | "checks"]:
            return check_command.main(words)
        case ["burn"]:
            from mjax.health.burn import command as burn

            return burn.main(words[1:])
        case ["bisect"]:
            from mjax.health.bisect import command as bisect

            return bisect.main(words[1:])
        case ["cluster"]:
            from mjax.health.cluster import command as cluster

            return cluster.main(words[1:])
        case ["history"]:
            from mjax.health.history import command as history

            return history.main(words[1:])
        case ["ports"]:
            from mjax.health.watch import command as ports

            return ports.main(words[1:])
        case ["watch"]:
            from mjax.health.events import command as watch

            return watch.main(words[1:])
        case ["init"]:
            from mjax.health.startup import command as init

            return init.main(words[1:])
        case ["-h" | "--help"]:
            print(__doc__)
            return 0
    said = f"there is no command {words[0]}" if words else "a command is missing"
    print(f"error: {said}\n\n{__doc__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
