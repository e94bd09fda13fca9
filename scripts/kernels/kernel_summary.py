"""Short tables of the compiled kernels, from the rows of the long tables.

Input: the rows that `scripts.kernels.kernel_table` or `kernel_changes` writes. Output:
a table with one row for each kernel.
"""

import re
from collections.abc import Iterable, Sequence

from scripts.evidence import Table

Row = Sequence[str]
_LOOPS = " / "
"""Separator of the figures of a kernel's loops, in a row of kernel_changes."""


def of_kernels(
    header: Row, rows: Sequence[Row], loop_header: Row, loops: Sequence[Row]
) -> Table:
    """Return, for each kernel of kernel_table, the extremes over all cases."""
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    bodies = [dict(zip(loop_header, row, strict=True)) for row in loops]
    short = []
    for kernel in _names(cells):
        own = [cell for cell in cells if cell["kernel"] == kernel]
        inner = [body for body in bodies if body["kernel"] == kernel]
        shared = [_number(cell["shared memory"]) for cell in own]
        short.append(
            [
                *(kernel, str(len(own)), str(len(inner))),
                f"{max(_number(cell['registers']) for cell in own):.0f}",
                f"{max(_number(cell['spilled']) for cell in own):.0f} B",
                f"{min(shared)} to {max(shared)} KiB",
                _longest(body["instructions"] for body in inner),
                _least(body["exponentials under a product"] for body in inner),
                *(_sum(body[name] for body in inner) for name in ("LD", "BAR")),
            ]
        )
    return Table(
        title="By kernel",
        text="Over all cases of a kernel: most registers of a thread at the start, "
        "most bytes spilled, range of shared memory, most instructions in a loop, "
        "least share of exponentials beside a matmul in a loop, and how many generic "
        "loads and barriers all loops have.",
        header=(
            *("kernel", "cases", "loops", "registers", "spilled", "shared memory"),
            *("longest loop", "exponentials beside a matmul"),
            *("generic loads", "barriers"),
        ),
        rows=short,
    )


def of_changes(header: Row, rows: Sequence[Row]) -> Table:
    """Return the sums and extremes before and now, for each kernel of kernel_changes.

    Only cases that both commits have are counted.
    """
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    pairs = list(zip(cells[::2], cells[1::2], strict=True))
    both = [pair for pair in pairs if pair[0]["instructions"] != "none"]
    short = []
    for kernel in _names(pair[1] for pair in both):
        for label, which in (("before", 0), ("now", 1)):
            own = [pair[which] for pair in both if pair[1]["kernel"] == kernel]

            def loops(name: str, own: Sequence[dict[str, str]] = own) -> list[str]:
                return [one for cell in own for one in cell[name].split(_LOOPS)]

            short.append(
                [
                    *(kernel, label, str(len(own)), str(len(loops("instructions")))),
                    _longest(loops("instructions")),
                    _least(loops("exponentials under a product")),
                    *(_sum(loops(name)) for name in ("generic loads", "barriers")),
                    str(sum(cell["serialised products"] == "yes" for cell in own)),
                    str(sum(_number(c["spilled, reloaded"]) > 0 for c in own)),
                ]
            )
    return Table(
        title="By kernel",
        text="Over the cases that both commits have: most instructions in a loop, "
        "least share of exponentials beside a matmul in a loop, how many generic loads "
        "and barriers all loops have, and how many cases have serialised matmuls or "
        "spill registers.",
        header=(
            *("kernel", "", "cases", "loops", "longest loop"),
            *("exponentials beside a matmul", "generic loads", "barriers"),
            *("serialised", "spilling"),
        ),
        rows=short,
    )


def _names(cells: Iterable[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(cell["kernel"] for cell in cells))


def _number(cell: str) -> float:
    """Return the number that a cell begins with, like `168 (240/24)` and `0, 0 B`."""
    found = re.match(r"[\d.]+", cell)
    if found is None:
        raise ValueError(f"a cell must begin with a number, got {cell!r}")
    return float(found[0])


def _longest(cells: Iterable[str]) -> str:
    return str(max(map(int, cells), default=""))


def _sum(cells: Iterable[str]) -> str:
    return str(sum(map(int, cells)))


def _least(cells: Iterable[str]) -> str:
    """Return the least share of cells like `64 of 66`, or nothing if none has any."""
    pairs = [tuple(map(int, cell.split(" of "))) for cell in cells]
    shares = [part / whole for part, whole in pairs if whole]
    return f"{min(shares):.0%}" if shares else ""
