"""`python -m mjax.health COMMAND`: check hosts and find the faulty ones.

check     check this host with its own tools
checks    list all checks
burn      measure devices and host under load, and compare
bisect    find bad hosts or links by tests of groups
cluster   check the cables of a cluster, place ranks, write expectations
history   show past events of hosts, and which hosts to trust
ports     watch the counters of network ports
watch     find events in logs by rules, and react to them
init      time how process groups start

`COMMAND --help` lists the flags of a command. Exit codes: 0 no problem found, 1 problem
found, 2 bad input.
"""

import sys
from collections.abc import Sequence

from mjax.cli import interrupts
from mjax.cli.flags import run_command

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
    sys.exit(interrupts.with_cleanup(main))
