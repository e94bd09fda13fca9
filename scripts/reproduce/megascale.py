"""Simulate MegaScale's tables and compare them with the paper. No GPU is involved.

    python -m scripts.reproduce.megascale

Fits two constants of the step-time model of `mjax.estimate.formulas` on two rows of the
paper's strong-scaling table, and predicts the others, the ablation, and the 530B model.
Writes docs/benchmarks/megascale.md.
"""

import dataclasses
import sys
from collections.abc import Sequence

from mjax.estimate.formulas.memory import memory
from mjax.estimate.formulas.step_time import StepTime
from scripts.evidence import Table, write_page
from scripts.reproduce import megascale_cases as paper
from scripts.reproduce.megascale_cases import Fit, Row
from scripts.reproduce.megascale_fit import (
    FITTED_GPUS,
    errors,
    fitted_rows,
    largest,
    simulate_model,
    simulate_row,
    solve,
)
from scripts.reproduce.megascale_grounds import (
    choices,
    constants,
    lacks,
    own_pairs,
    sensitivity,
)


def strong_scaling(rows: Sequence[Row], fit: Fit) -> Table:
    """Compare the paper's table 2 with its simulation."""
    chosen = fitted_rows(rows)
    cells = []
    for row, error in zip(rows, errors(rows, fit), strict=True):
        time, simulated = simulate_model(
            *(paper.GPT_175B, paper.SYSTEMS[row.system], row.gpus, row.batch, fit)
        )
        cells.append(
            (
                *(row.system, str(row.gpus), str(row.batch)),
                *(f"{row.step_s:g}", f"{time.total_s:.2f}", f"{100 * error:+z.1f}%"),
                *(f"{100 * row.mfu:.1f}%", f"{100 * simulated:.1f}%"),
                "fitted" if row in chosen else "predicted",
            )
        )
    ours = [row for row in rows if row.system == "MegaScale"]
    others = [row for row in rows if row.system != "MegaScale"]
    text = (
        f"Largest error of a step's time over MegaScale's {len(ours)} rows: "
        f"{100 * largest(errors(ours, fit)):.1f}%. Two of them, on "
        f"{FITTED_GPUS[0]} and {FITTED_GPUS[1]} GPUs, were fitted: product efficiency "
        f"{fit.product_efficiency:.3f} and {fit.fixed_s:.2f} s a step whatever its "
        "size. No row of Megatron-LM was fitted: it has the same two constants, no "
        "overlap, the serial block, full attention and operators that are not fused; "
        f"largest error {100 * largest(errors(others, fit)):.1f}%."
    )
    return Table(
        title="Strong scaling of the 175B model (table 2), simulated",
        text=text,
        header=(
            *("system", "GPUs", "batch", "paper, s", "simulated, s", "error"),
            *("paper's MFU", "simulated MFU", "row"),
        ),
        rows=cells,
    )


def parts(rows: Sequence[Row], fit: Fit) -> Table:
    """Break down the simulated time."""
    names = [field.name for field in dataclasses.fields(StepTime)]
    cells = []
    for row in rows:
        time = simulate_row(row, fit)
        system = paper.SYSTEMS[row.system]
        case = paper.make_case(paper.GPT_175B, system, row.gpus, row.batch)
        gib = memory(case).total_bytes / 2**30
        seconds = [f"{getattr(time, name):.2f}" for name in names]
        cells.append(
            (row.system, str(row.gpus), str(case.microbatches), *seconds, f"{gib:.0f}")
        )
    header = [name.removesuffix("_s") for name in names]
    return Table(
        title="Where the simulated time goes",
        text="Seconds of one step, which add up to it; tp, pp and dp are "
        "communication that is not overlapped. GiB is the estimate of "
        "`mjax.estimate.formulas.memory` for one GPU, of 80.",
        header=("system", "GPUs", "microbatches", *header, "GiB"),
        rows=cells,
    )


def ablation(fit: Fit) -> Table:
    """Compare the paper's table 3 with its simulation."""
    cells = []
    before = None
    differences = []
    for (name, mfu_of_paper, batch, _), system in zip(
        paper.ABLATION, paper.ABLATION_SYSTEMS, strict=True
    ):
        time, simulated = simulate_model(paper.GPT_175B, system, 256, batch, fit)
        gain = ("", "")
        if before is not None:
            gain = tuple(
                f"{100 * (now - then):+.1f}"
                for now, then in zip((mfu_of_paper, simulated), before, strict=True)
            )
        before = mfu_of_paper, simulated
        differences.append(simulated - mfu_of_paper)
        cells.append(
            (
                *(name, f"{time.total_s:.2f}", f"{100 * mfu_of_paper:.1f}%"),
                *(f"{100 * simulated:.1f}%", f"{100 * differences[-1]:+.1f}", *gain),
            )
        )
    text = (
        "256 GPUs, batch 256. The last row has 768 and is the fitted row above; the "
        "others are predictions, with the same two constants. Largest difference "
        f"{100 * largest(differences):.1f} points of MFU. Step (7), data loading and "
        "slow code, has no counterpart in the model, so its gain is 0: the fixed time "
        "that it shortens is short in all rows. From (2) on the FLOPs of the MFU are "
        "counted with the window, as in the paper's table 2 by its figures; with the "
        "shorter step but fewer FLOPs, (2) loses MFU here."
    )
    header = (
        *("step", "simulated, s", "paper's MFU", "simulated MFU", "points off"),
        *("paper's gain", "simulated gain"),
    )
    title = "Ablation (table 3), simulated"
    return Table(title=title, text=text, header=header, rows=cells)


def weak_scaling(fit: Fit) -> Table:
    """Compare the paper's figure 9 with its simulation."""
    cells = []
    differences = []
    for name, gpus, mfu_of_paper in paper.WEAK_SCALING:
        system = paper.SYSTEMS[name]
        time, simulated = simulate_model(paper.GPT_530B, system, gpus, gpus, fit)
        differences.append(simulated - mfu_of_paper)
        cells.append(
            (
                *(name, str(gpus), f"{time.total_s:.2f}", f"{100 * time.bubble:.1f}%"),
                *(f"{100 * mfu_of_paper:.1f}%", f"{100 * simulated:.1f}%"),
                f"{100 * differences[-1]:+.1f}",
            )
        )
    text = (
        "As many sequences as GPUs, 280 microbatches of one. Predicted with the same "
        "two constants. Both systems are flat in the simulation, as MegaScale is in "
        "the paper; Megatron-LM's loss of one point is not in it. The level is off by "
        f"up to {100 * largest(differences):.1f} points: the efficiency that was "
        "fitted on 175B does not carry over to 35 stages of three layers."
    )
    header = (
        *("system", "GPUs", "simulated, s", "simulated bubble", "paper's MFU"),
        *("simulated MFU", "points off"),
    )
    title = "Weak scaling of the 530B model (figure 9), simulated"
    return Table(title=title, text=text, header=header, rows=cells)


def make_tables(rows: Sequence[Row]) -> list[Table]:
    """Fit, predict, and return all tables.

    Raises:
      RuntimeError: the chosen rows cannot be fitted.
    """
    fit = solve(fitted_rows(rows))
    if fit is None:
        raise RuntimeError(
            f"no constants fit the rows of {FITTED_GPUS} GPUs; choose another pair"
        )
    return [
        *(strong_scaling(rows, fit), ablation(fit), weak_scaling(fit)),
        *(parts(rows, fit), constants(fit), sensitivity(rows), choices(rows)),
        *(lacks(rows, fit), own_pairs(rows)),
    ]


def main() -> int:
    """Write the page."""
    tables = make_tables(paper.STRONG_SCALING)
    title = "MegaScale's tables, simulated: nothing here ran on a GPU"
    command = "python -m scripts.reproduce.megascale"
    print(tables[0].text)
    print(write_page("megascale", title, command, tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
