"""Forecast the speed of the attention kernels in each order of their thread blocks.

Input: compiled kernels, and the constants of the model. Output: tables for the page of
`scripts.kernels.forecast`.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from scripts.evidence import Table
from scripts.kernels import (
    kernel_speed,
    persistent,
    published,
    schedule,
)
from scripts.kernels.attention_shapes import KERNELS, SHAPES, Shape
from scripts.kernels.kernel_speed import Constants, Kernel

Kernels = Mapping[str, Mapping[str, Kernel]]
"""Kernels by case and name."""
StepUs = Callable[[str, int], float]
"""(kernel, head width) -> microseconds of a step, which is one block of the loop."""


def tflops(
    own: Mapping[str, Kernel],
    names: Sequence[str],
    shape: Shape,
    constants: Constants,
    *,
    order: str,
) -> float:
    """Return the TFLOP/s of kernels that run one after another."""
    is_backward = names != ("forward",)
    flops = published.model_flops(
        batch=shape.batch,
        seq_len=shape.seq_len,
        heads=shape.heads,
        head_dim=shape.head_dim,
        causal=True,
        backward=is_backward,
    )
    us = kernel_speed.delta_us(shape) if is_backward else 0.0
    for name in names:
        us += kernel_speed.call_us(own[name], name, shape, constants, order=order)
    return flops / us / 1e6


def schedule_tables(kernels: Kernels, constants: Constants) -> list[Table]:
    """Simulate the orders of thread blocks with the step times of the model."""

    def step_us(kernel: str, head_dim: int) -> float:
        clocks = kernels[f"{head_dim}:full"][kernel].step_clocks(constants)
        return constants.us(clocks)

    header, rows = schedule.table(SHAPES, step_us)
    text = (
        "Work of all tiles over the time of 132 SMs. Blocks start in this order on the "
        "first free SM, one on an SM at a time; "
        f"{schedule.FIXED_US:.0f} us of a block are not hidden (a guess). *load / "
        "longest*: mean load of an SM over the longest tile; below 1, no order reaches "
        "more. *parts*: of a group of query heads in dkv (`tuning.GroupSplit`), with a "
        "block each, partial sums in float32 and a second kernel that adds them up: "
        f"{schedule.LAUNCH_US:.0f} us (a guess), and the bytes of the sums, written "
        "and read, and of the result. *us*: time as "
        "shipped. *by head*: one head after the other, no parts. *tiles "
        "first*: the heaviest tiles of all heads first, no parts. *unsplit*: so within "
        "equal groups of heads, as many as it takes for each to fit into half of the "
        "L2, but with about two blocks an SM; no parts. *shipped*: likewise, with "
        "parts. *longest first*: sorted by work over all heads, no parts. *cut*: "
        "walks cut at half of the mean load, longest first. *persistent*: shipped, and "
        "half of the fixed cost hidden. m: reading from memory would "
        "take longer than computing. B, T, heads: scripts/kernels/attention_shapes.py; "
        "documents have log-normal lengths of mean 1024, seed 0."
    )
    orders = Table(
        title="Order of the blocks",
        text=text,
        header=header,
        rows=rows,
        file="attention_forecast_orders",
    )
    return [
        _targets_table(step_us),
        orders,
        _fixed_cost_table(step_us),
        _persistent_table(step_us),
        _one_grid_table(step_us),
    ]


def _targets_table(step_us: StepUs) -> Table:
    """Count, for each design of the grid, the shapes that reach their targets."""
    rows = []
    for kernel in KERNELS:
        reached, missing = [0, 0, 0], []
        for shape in SHAPES:
            step = step_us(kernel, shape.head_dim)
            hidden_us = schedule.FIXED_US * (1 - schedule.HIDDEN)
            found = schedule.outcomes(shape, kernel, step=step)
            persistent = schedule.outcomes(shape, kernel, step=step, fixed_us=hidden_us)
            designs = (found["by head"], found["shipped"], persistent["shipped"])
            for i, outcome in enumerate(designs):
                reached[i] += round(outcome.efficiency, 2) >= _target(shape)
            if round(designs[-1].efficiency, 2) < _target(shape):
                missing.append(f"{shape.name} ({designs[-1].efficiency:.2f})")
        counts = [f"{n} of {len(SHAPES)}" for n in reached]
        rows.append([kernel, *counts, "; ".join(missing) or "none"])
    text = (
        "Shapes of the next table that reach an efficiency of 0.90, or 0.80 at tp 8. "
        "*persistent*: the shipped order, with half of the fixed cost hidden. The "
        "simulation starts blocks in the order of their index, as GPUs are seen to do; "
        "NVIDIA does not promise it."
    )
    return Table(
        title="Which design reaches the targets",
        text=text,
        header=["kernel", "by head", "shipped", "persistent", "still below"],
        rows=rows,
    )


def _target(shape: Shape) -> float:
    return 0.80 if shape.name.endswith("tp 8") else 0.90


def _fixed_cost_table(step_us: StepUs) -> Table:
    """Show how the efficiencies depend on the assumed fixed cost of a block."""
    costs, rows = (1.0, 2.0, 4.0), []
    for shape in SHAPES:
        for kernel in KERNELS:
            cells = []
            for order in ("shipped", "persistent"):
                for cost in costs:
                    step = step_us(kernel, shape.head_dim)
                    found = schedule.outcomes(shape, kernel, step=step, fixed_us=cost)
                    cells.append(f"{found[order].efficiency:.2f}")
            rows.append([shape.name, kernel, *cells])
    names = [
        f"{order}, {cost:.0f} us"
        for order in ("shipped", "persistent")
        for cost in costs
    ]
    text = "The same, with other fixed costs of a block."
    return Table(
        title="What the fixed cost does",
        text=text,
        header=["shape", "kernel", *names],
        rows=rows,
        file="attention_forecast_fixed_cost",
    )


def _persistent_table(step_us: StepUs) -> Table:
    """Compare ways to assign tiles to persistent thread blocks."""
    rows = []
    for shape in SHAPES:
        for kernel in KERNELS:
            step = step_us(kernel, shape.head_dim)
            found = persistent.efficiencies(shape, kernel, step)
            rows.append([shape.name, kernel, *(f"{share:.2f}" for share in found)])
    text = (
        "Efficiency. *shipped*: a thread block for each tile. The others have as many "
        "thread blocks as SMs, and half of the fixed cost hidden, but for the first "
        "tile. *counter*: each takes the next tile when it is done. *round robin*: "
        "every 132nd tile of the shipped order. *planned*: tiles are given to SMs "
        "beforehand, as the counter would if there were no documents. *guided*: more "
        "thread blocks than SMs; the first take several tiles, as many as an SM has "
        "left on average by the same plan, the last ones one. *uneven*: SMs are slower "
        "than planned by unequal shares, 0.05 times the absolute value of a normal "
        "number (a guess). Reading from memory is not counted."
    )
    return Table(
        title="Persistent grids",
        text=text,
        header=["shape", "kernel", *persistent.WAYS],
        rows=rows,
        file="attention_forecast_persistent",
    )


def _one_grid_table(step_us: StepUs) -> Table:
    """Compare dq and dkv in sequence with both in one grid."""
    rows = []
    for shape in SHAPES:
        works, end_us = [], 0.0
        for kernel in ("dq", "dkv"):
            step = step_us(kernel, shape.head_dim)
            found = schedule.outcomes(shape, kernel, step=step)
            end_us += found["shipped"].makespan_us
            works.append(schedule.blocks_of(shape, kernel, step))
        work_us = math.fsum(block.work_us for work in works for block in work)
        apart = work_us / schedule.NUM_SMS / end_us
        whole = f"{schedule.one_grid(works):.2f}"
        parts, cut = schedule.parts_of(shape, "dkv"), ""
        if parts > 1:
            works[1], sum_us = schedule.split(works[1], shape, parts)
            cut = f"{schedule.one_grid(works, extra_us=sum_us):.2f}"
        rows.append([shape.name, f"{apart:.2f}", whole, cut])
    text = (
        "Efficiency of the backward pass: dq and dkv one after the other, as shipped, "
        "and the blocks of both in one grid, longest first, without and with parts, "
        "which would take one kernel that branches."
    )
    return Table(
        title="Backward in one grid",
        text=text,
        header=["shape", "two kernels", "one grid", "one grid, parts"],
        rows=rows,
    )
