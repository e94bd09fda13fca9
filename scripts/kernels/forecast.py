"""Forecast the speed of the attention kernels on one H200, and the gain of changes.

    python -m scripts.kernels.forecast
    python -m scripts.kernels.forecast --write

Needs the environment of `make env-plan`: the kernels are compiled and their machine
code is read. Prints the page, or writes docs/benchmarks/attention_forecast.md. Nothing
runs on a GPU.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from scripts.evidence import Table, write_page
from scripts.kernels import (
    attention_loops,
    kernel_speed,
    persistent,
    published,
    schedule,
)
from scripts.kernels.attention_shapes import KERNELS, SHAPES, Shape
from scripts.kernels.forecast_changes import changes_table, fused_table
from scripts.kernels.kernel_speed import Constants, Kernel

WIDTHS = (64, 128)
CASES = tuple(f"{H}:{mask}" for H in WIDTHS for mask in ("full", "segments"))
THREE = "64:full:3"
"""Case with three warpgroups, as in FlashAttention-3 at this width."""
FUSED = "128:fused"
BEFORE = "2d1df94"
"""Commit whose forward kernel computes its exponentials after both matmuls."""
Kernels = Mapping[str, Mapping[str, Kernel]]
"""Kernels by case and name."""
StepUs = Callable[[str, int], float]
"""(kernel, head width) -> microseconds of a step, which is one block of the loop."""


def read_all(dumps: Path | None, commit: str | None) -> Kernels:
    """Compile the cases, or read the compiler output that an earlier call kept.

    Args:
      dumps: folder to keep the compiler's output; None keeps none.
      commit: commit of the kernels; None uses the working tree.
    """
    found = {}
    for case in (*CASES, THREE, FUSED) if commit is None else CASES:
        name = f"{commit or 'now'}_{case}.txt".replace(":", "_").replace("/", "_")
        file = None if dumps is None else dumps / name
        if file is not None and file.exists():
            printed = file.read_text()
        else:
            printed = (
                attention_loops.compiled(case)
                if commit is None
                else attention_loops.compiled_at([case], commit)[case]
            )
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(printed)
        found[case] = kernel_speed.read_kernels(printed, case)
    return found


def model_tflops(
    kernels: Kernels,
    series: published.Series,
    constants: Constants,
    fixed_us: float = schedule.FIXED_US,
) -> list[float]:
    """Return the modelled TFLOP/s of FlashAttention-3, one for each length."""
    own = kernels[f"{series.head_dim}:full"]
    kernel = kernel_speed.flash3(
        own["forward"], own["dkv"], causal=series.causal, backward=series.backward
    )
    speeds = []
    for T in published.LENGTHS:
        sizes = {
            "batch": published.TOKENS // T,
            "seq_len": T,
            "heads": published.HIDDEN // series.head_dim,
            "causal": series.causal,
            "backward": series.backward,
        }
        flops = published.model_flops(**sizes, head_dim=series.head_dim)
        us = kernel_speed.flash3_us(kernel, constants, **sizes, fixed_us=fixed_us)
        speeds.append(flops / us / 1e6)
    return speeds


def error_table(kernels: Kernels, constants: Constants) -> Table:
    """Compare the model with figures that were not used to fit it."""
    rows, forecast, truth = list[list[str]](), list[float](), list[int]()
    for series in published.SERIES:
        model = model_tflops(kernels, series, constants)
        forecast += model
        truth += series.flash3
        pairs = zip(series.flash3, model, strict=True)
        null = [kernel_speed.null_share() * kernel_speed.peak_tflops()] * len(model)
        rows.append(
            [
                series.name,
                *(f"{f} / {m:.0f}" for f, m in pairs),
                f"{kernel_speed.mean_error(model, series.flash3):.1%}",
                f"{kernel_speed.mean_error(null, series.flash3):.1%}",
            ]
        )
    peak = kernel_speed.peak_tflops()
    null = kernel_speed.mean_error([published.ABLATION_FULL] * len(truth), truth)
    best = min(
        kernel_speed.mean_error([share * peak / 1000] * len(truth), truth)
        for share in range(200, 800)
    )
    all_error = kernel_speed.mean_error(forecast, truth)
    text = (
        "FlashAttention-3 on H100, TFLOP/s: published / model, by sequence length "
        "(arXiv:2407.08608, figures 5 and 6, transcribed). Two constants were "
        "fitted, on the two speeds of that paper's table 2 alone (661 and 582 TFLOP/s, "
        f"head width 128, T 8448): a warp alone takes {constants.slowness:.2f} times "
        "the clocks of its busiest pipe, and the GPU sustains "
        f"{constants.sustained:.3f} of 1.83 GHz. The 36 speeds of this table were not "
        "used for them, but the form of the model was chosen with some of them in "
        "sight (of three ways in which a warp may be slow, the one that explains "
        "table 2). FlashAttention-3 is modelled with the block sizes of its source and "
        f"the instructions per score of our loops. Mean error {all_error:.1%}. A "
        f"constant share of the peak, from the same source (661 of 989): {null:.1%}. "
        "The best constant share, fitted on "
        f"these 36 themselves: {best:.1%}. The fixed cost of a thread block is a guess "
        f"({schedule.FIXED_US:.0f} us; half of it hidden by a persistent grid)."
    )
    lengths = [f"T {T}" for T in published.LENGTHS]
    return Table(
        title="Is the model any good?",
        text=text,
        header=["series", *lengths, "model's error", "constant share's error"],
        rows=rows,
    )


def fixed_error_table(kernels: Kernels) -> Table:
    """Compare assumed fixed costs of a thread block with the published speeds."""
    own, rows = kernels["128:full"], []
    for fixed_us in (0.0, 2.0, 4.0, 6.0, 8.0):
        constants = kernel_speed.fitted(own["forward"], own["dkv"], fixed_us=fixed_us)
        forecast, truth, errors = list[float](), list[int](), list[str]()
        for series in published.SERIES:
            model = model_tflops(kernels, series, constants, fixed_us)
            errors.append(f"{kernel_speed.mean_error(model, series.flash3):.1%}")
            forecast += model
            truth += series.flash3
        error = f"{kernel_speed.mean_error(forecast, truth):.1%}"
        rows.append([f"{fixed_us:.0f} us", *errors, error])
    text = (
        "Mean error of the model with other fixed costs of a block (forward, where the "
        "grid is persistent, half of it counts). The two constants are fitted again "
        "for each. This looks at the figures that the model is judged by, so no "
        "forecast here uses it; but it says that a block costs rather more than the "
        f"{schedule.FIXED_US:.0f} us that are assumed."
    )
    names = [series.name for series in published.SERIES]
    return Table(
        title="Which fixed cost the published speeds agree with",
        text=text,
        header=["fixed cost", *names, "all"],
        rows=rows,
    )


def counts_table(kernels: Kernels, constants: Constants) -> Table:
    """Count the clocks that a block takes on each resource of an SM."""
    rows = []
    for case, own in kernels.items():
        for name, kernel in own.items():
            if case == FUSED and name != "fused":
                continue
            count = kernel.counts(kernel.plain)
            clocks = kernel.step_clocks(constants)
            cells = [f"{c:.0f}" for c in dataclasses.astuple(count)]
            rows.append(
                [
                    case,
                    name,
                    f"{kernel.tile} x {kernel.block}",
                    *cells,
                    f"{clocks:.0f}",
                    f"{kernel.step_clocks(constants, masked=True):.0f}",
                    f"{count.tensor / clocks:.0%}",
                ]
            )
    text = (
        "Clocks of an SM for one block of the other sequence and all rows of a tile, "
        "from the machine code of the loop without a mask: tensor cores (4096 FLOPs a "
        "clock), shared memory (128 bytes: operands read again by each instruction, "
        "copies, stores), exponentials (16), issue slots of a scheduler, L2 (38.8 "
        "bytes, the A100's figure, as NVIDIA gives none for Hopper; what is added to "
        "sums there counts twice, read and written). *model*: with waits, turns, "
        "meetings and two warpgroups; *masked*: the longest of the other loops; "
        "*tensor busy*: what is left of the sustained clock."
    )
    resources = ["tensor", "shared", "exponentials", "issue", "L2"]
    return Table(
        title="Clocks of a step",
        text=text,
        header=[
            "case",
            "kernel",
            "rows x block",
            *resources,
            "model",
            "masked",
            "tensor busy",
        ],
        rows=rows,
    )


def speed_table(kernels: Kernels, constants: Constants) -> Table:
    """Forecast our kernels at the sizes of the published figures."""
    rows = []
    for H in WIDTHS:
        own = kernels[f"{H}:full"]
        by = {(s.backward, s.causal): s for s in published.SERIES if s.head_dim == H}
        forward_series, backward_series = by[False, True], by[True, False]
        forward_model = model_tflops(kernels, forward_series, constants)
        backward_model = model_tflops(kernels, backward_series, constants)
        for i, T in enumerate(published.LENGTHS):
            shape = kernel_speed.causal_shape(H, T)
            cells = []
            for is_backward, names, series, model in (
                (False, ("forward",), forward_series, forward_model),
                (True, ("dq", "dkv"), backward_series, backward_model),
            ):
                speeds = [
                    tflops(own, names, shape, constants, order=order)
                    for order in ("by head", "shipped")
                ]
                ratio = series.flash3[i] / model[i]
                cells += [f"{speed:.0f}" for speed in speeds]
                cells += [f"{speeds[1] * ratio:.0f}"]
                if not is_backward:
                    cells += [f"{series.flash3[i]}", f"{series.cudnn[i]}"]
            rows.append([str(H), str(T), *cells])
    text = (
        "**Forecast, not measured on a GPU.** Our kernels on an H200, causal, "
        "bfloat16, 16k tokens, hidden size 2048, as many key heads as query heads; "
        "TFLOP/s of model FLOPs (backward 2.5 times the forward's; dq and dkv do 3.5). "
        "*by head*: one head after the other; *shipped*: in the shipped order; "
        "*corrected*: that, times published / model of FlashAttention-3 at the same "
        "width and length (backward: of its figures without a mask). FlashAttention-3 "
        "and cuDNN: published, H100."
    )
    return Table(
        title="Speed",
        text=text,
        header=[
            "width",
            "T",
            "forward, by head",
            "shipped",
            "corrected",
            "FlashAttention-3",
            "cuDNN",
            "backward, by head",
            "shipped",
            "corrected",
        ],
        rows=rows,
    )


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


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", default=BEFORE, help="commit to compare with")
    parser.add_argument(
        "--dumps", type=Path, help="keep what the compiler prints here, and read it"
    )
    parser.add_argument("--write", action="store_true", help="write the page")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    now = read_all(args.dumps, None)
    before = read_all(args.dumps, args.before)
    own = now["128:full"]
    constants = kernel_speed.fitted(own["forward"], own["dkv"])
    tables = [
        error_table(now, constants),
        fixed_error_table(now),
        counts_table(now, constants),
        speed_table(now, constants),
        changes_table(now, before, constants, args.before),
        fused_table(now, constants),
        *schedule_tables(now, constants),
    ]
    if args.write:
        command = "python -m scripts.kernels.forecast --write"
        if args.before != BEFORE:
            command += f" --before {args.before}"
        title = "Attention on Hopper: forecast, not measured on a GPU"
        print(write_page("attention_forecast", title, command, tables))
        return 0
    for table in tables:
        print(f"\n## {table.title}\n\n{table.text}\n")
        for row in (table.header, ["---"] * len(table.header), *table.rows):
            print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
