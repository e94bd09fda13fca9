"""Forecast the speed of the attention kernels on one H200, and the gain of changes.

    python -m scripts.kernels.forecast
    python -m scripts.kernels.forecast --write

Needs the environment of `make env-plan`: the kernels are compiled and their machine
code is read. Prints the page, or writes docs/benchmarks/attention_forecast.md. Nothing
runs on a GPU.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from scripts.evidence import Table, write_page
from scripts.kernels import (
    attention_loops,
    kernel_speed,
    published,
    schedule,
)
from scripts.kernels.forecast_changes import changes_table, fused_table
from scripts.kernels.forecast_schedules import Kernels, schedule_tables, tflops
from scripts.kernels.kernel_speed import Constants

WIDTHS = (64, 128)
CASES = tuple(f"{H}:{mask}" for H in WIDTHS for mask in ("full", "segments"))
THREE = "64:full:3"
"""Case with three warpgroups, as in FlashAttention-3 at this width."""
FUSED = "128:fused"
BEFORE = "2d1df94"
"""Commit whose forward kernel computes its exponentials after both matmuls."""


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
