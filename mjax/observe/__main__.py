"""`python -m mjax.observe COMMAND`: what did each process of a run do, and when?

bubble    how long pipeline stages are idle, measured and by the schedule
collect   send the files of a run to an ingester
diff      what differs between two runs: records, losses, times
fake      repeat a run in short runs, each without one part, to explain its time
heatmap   which hosts are slow, and in what; a picture of hosts and phases
ingest    own the database, and store the data that collectors send
ledger    how much of its time a run spent on training
mfu       diagnose a run from the shape of its MFU series
phases    time of recorded steps by phase and role, overlapped or exposed
serve     a live page of a run for a browser
stuck     which ranks block the others, and who waits for whom
timeline  some steps of all ranks on one clock, as a trace or a picture
unused    parameters that never had a gradient
whatif    how fast the run would be without its slow hosts

`COMMAND --help` lists the flags of a command. Exit codes: 0 done, 2 bad input.
"""

import sys
from collections.abc import Sequence

from mjax.cli import interrupts
from mjax.cli.flags import run_command

_COMMANDS = {
    "bubble": "mjax.observe.bubble",
    "collect": "mjax.observe.collect",
    "diff": "mjax.observe.diff",
    "fake": "mjax.observe.fake",
    "heatmap": "mjax.observe.heatmap",
    "ingest": "mjax.observe.ingest",
    "ledger": "mjax.observe.ledger",
    "mfu": "mjax.observe.mfu",
    "phases": "mjax.observe.phases",
    "serve": "mjax.observe.serve",
    "stuck": "mjax.observe.stuck",
    "timeline": "mjax.observe.timeline",
    "unused": "mjax.observe.unused",
    "whatif": "mjax.observe.whatif",
}
"""Modules with `main(argv) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(words, _COMMANDS, __doc__ or "")


if __name__ == "__main__":
    sys.exit(interrupts.with_cleanup(main))
