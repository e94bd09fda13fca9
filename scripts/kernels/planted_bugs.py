"""Plant bugs in the Mosaic GPU attention kernels, and show which check catches each.

    python -m scripts.kernels.planted_bugs

Changes the kernels' source in memory, one bug at a time, and runs a case of the tests.
Writes docs/benchmarks/planted_bugs.md and ends with 1 if a bug is missed or if the
unchanged source fails. Needs no GPU.
"""

import collections
import sys
from collections.abc import Sequence

from scripts.evidence import Table, write_page
from tests.kernels.attention.mosaic_bugs import BUGS, controls, how_caught, submit
from tests.kernels.interpreter.runner import Pool


def main() -> int:
    """Run everything, write the page, return 1 on any unexpected result."""
    rows, missed, false_alarms = [], 0, 0
    unchanged = controls()
    with Pool() as pool:
        futures = {
            name: (bug, submit(pool, bug)) for name, bug in (unchanged | BUGS).items()
        }
        for name, (bug, future) in futures.items():
            caught = how_caught(future)
            if name in unchanged:
                false_alarms += caught is not None
            else:
                missed += caught is None
            rows.append([name, f"`{bug.module}`", caught or "nothing"])
            print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title="Attention",
        text=(
            "Numbers are errors in units of what rounding explains, as in "
            "[kernel_parity.md](kernel_parity.md). A race is one that the interpreter "
            "sees, also where the numbers are right. A deadlock is found as such, "
            f"not by a timeout. {len(BUGS) - missed} of {len(BUGS)} bugs are caught; "
            f"{false_alarms} of {len(unchanged)} runs of the unchanged source are not "
            "accepted."
        ),
        header=("bug", "module", "caught by"),
        rows=rows,
        file="planted_bugs",
    )
    command = "python -m scripts.kernels.planted_bugs"
    print(write_page("planted_bugs", "Planted bugs", command, [table, by_module(rows)]))
    return int(missed > 0 or false_alarms > 0)


def by_module(rows: Sequence[Sequence[str]]) -> Table:
    """Count the runs by kernel module and by the check that caught the bug.

    Args:
      rows: cells of each run: bug, module, check that caught the bug. For a run of the
        unchanged source, the first cell begins with "no change".
    """
    counts = collections.Counter(
        (module, how.partition(":")[0])
        for name, module, how in rows
        if not name.startswith("no change")
    )
    ways = sorted({how for _, how in counts})
    modules = sorted({module for module, _ in counts})
    return Table(
        title="By module",
        text="How many bugs of a module were caught in which way.",
        header=("module", *ways, "all"),
        rows=[
            [
                *(module, *(str(counts[module, way]) for way in ways)),
                str(sum(counts[module, way] for way in ways)),
            ]
            for module in modules
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
