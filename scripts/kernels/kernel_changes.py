"""Compare the compiled attention kernels with those of an older commit.

    python -m scripts.kernels.kernel_changes COMMIT

Needs git and the environment of `make env-plan`. Compiles the shipped cases with the
current package and the older commit's cases with its own, and reads both in the same
way. Writes docs/benchmarks/kernel_changes.md. A case that the older commit lacks or
cannot compile is listed without a comparison.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from mjax.hardware.gpus import GPUS
from scripts.evidence import REPOSITORY, Table, write_page
from scripts.kernels.attention_loops import package_at
from scripts.kernels.compiled_kernels import CaseReport, CompiledKernel, compile_cases
from scripts.kernels.kernel_summary import of_changes
from scripts.kernels.kernel_table import SHIPPED
from scripts.kernels.sass import Loop

_GPU = "h200"
_READERS = ("scripts/kernels/compiled_kernels.py", "scripts/kernels/sass.py")
"""Files of the current code that compile cases and read the machine code."""
_OF_LOOPS: Mapping[str, Callable[[Loop], str]] = {
    "instructions": lambda loop: str(loop.instructions),
    "exponentials under a product": lambda loop: (
        f"{loop.hidden_exponentials} of {loop.exponentials}"
    ),
    "generic loads": lambda loop: str(loop.counts["LD"]),
    "barriers": lambda loop: str(loop.counts["BAR"] + loop.counts["MEMBAR"]),
}
_OF_KERNELS: Mapping[str, Callable[[CompiledKernel], str]] = {
    "spilled, reloaded": lambda k: f"{k.spill_store_bytes}, {k.spill_load_bytes} B",
    "serialised products": lambda k: "yes" if k.serialised else "no",
    "registers": lambda k: "/".join(map(str, k.set_registers)) or str(k.registers),
    "shared memory": lambda k: f"{k.shared_memory_bytes / 1024:.0f} KiB",
}
HEADER = ("case", "kernel", "", *_OF_LOOPS, *_OF_KERNELS)


def rows(
    before: Sequence[CaseReport], now: Sequence[CaseReport]
) -> list[tuple[str, ...]]:
    """Return two rows for each attention kernel that is compiled now.

    Loops are in the order of the code, including the masked ones.
    """
    old = {(r.case, k.name): k for r in before for k in r.kernels}
    compared = []
    for report in now:
        for kernel in report.kernels:
            if not kernel.name.startswith("attention"):
                continue
            was = old.get((report.case, kernel.name))
            for label, one in (("before", was), ("now", kernel)):
                compared.append((report.case, kernel.name, label, *_cells(one)))
    return compared


def _cells(kernel: CompiledKernel | None) -> tuple[str, ...]:
    if kernel is None:
        return ("none",) * (len(_OF_LOOPS) + len(_OF_KERNELS))
    of_loops = (" / ".join(map(tell, kernel.loops)) for tell in _OF_LOOPS.values())
    return *of_loops, *(tell(kernel) for tell in _OF_KERNELS.values())


def main(argv: Sequence[str]) -> int:
    """Write the page and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", help="with which the kernels are compared")
    commit = parser.parse_args(argv).commit
    try:
        with package_at(commit, "mjax", "scripts") as source:
            for name in _READERS:
                shutil.copy(REPOSITORY / name, source / name)
            before = compile_cases(SHIPPED, gpu=_GPU, source=source)
        now = compile_cases(SHIPPED, gpu=_GPU)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    faults = [f"{r.case}: {fault}" for r in now for fault in r.faults]
    text = (
        f"Compiled for {GPUS[_GPU].device_kind}, on a machine without one, at {commit} "
        "and now. Loops that multiply matrices, in the order of the code; "
        "*exponentials under a product* run while a matrix product is under way; "
        "*generic loads* do not name their memory and wait for the L2 or beyond; "
        "*barriers* are those of a thread block and of memory. *none*: the older "
        f"commit lacks the case. Faults now: {'; '.join(faults) or 'none'}."
    )
    table = Table(
        title="Loops before and now",
        text=text,
        header=HEADER,
        rows=rows(before, now),
        file="kernel_changes",
    )
    tables = [of_changes(table.header, table.rows), table]
    command = f"python -m scripts.kernels.kernel_changes {commit}"
    print(
        write_page(
            "kernel_changes", "Attention kernels, before and now", command, tables
        )
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
