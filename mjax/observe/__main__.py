"""`python -m mjax.observe COMMAND`: what did each process of a run do, and when?

collect   send the files of a run to an ingester
diff      what differs between two runs: records, losses, times
heatmap   which hosts are slow, and in what; a picture of hosts and phases
ingest    own a database, and write what collectors send
ledger    how much of its time a run has spent on training
mfu       what the shape of the MFU series says, and what to do
phases    where the time of recorded steps went: by phase and role, overlapped or not
stuck     which ranks hold the others up, and who waits for whom
timeline  some steps of all ranks on one clock, as a trace or a picture
whatif    how fast the run would be without its slow hosts

`COMMAND --help` has the flags of each. Exit codes: 0 done, 2 bad input.
"""

import importlib
import os
import sys
from collections.abc import Sequence

_COMMANDS = {
    "collect": "mjax.observe.collect",
    "diff": "mjax.observe.diff",
    "heatmap": "mjax.observe.heatmap",
    "ingest": "mjax.observe.ingest",
    "ledger": "mjax.observe.ledger",
    "mfu": "mjax.observe.mfu",
    "phases": "mjax.observe.phases",
    "stuck": "mjax.observe.stuck",
    "timeline": "mjax.observe.timeline",
    "whatif": "mjax.observe.whatif",
}
"""Modules with `main(argv) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if words and words[0] in _COMMANDS:
        return importlib.import_module(_COMMANDS[words[0]]).main(words[1:])
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
