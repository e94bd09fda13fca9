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

import sys
from collections.abc import Sequence

from mjax.flags import run_command

_COMMANDS = {
    "bisect": "mjax.health.bisect.command",
    "burn": "mjax.health.burn.command",
    "check": "mjax.health.check_command",
    "checks": "mjax.health.checks_command",
    "cluster": "mjax.health.cluster.command",
    "history": "mjax.health.history.command",
    "init": "mjax.health.startup.command",
    "ports": "mjax.health.watch.command",
    "watch": "mjax.health.events.command",
}
"""Modules with `main(argv) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(words, _COMMANDS, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
