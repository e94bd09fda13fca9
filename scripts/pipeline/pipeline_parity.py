"""Show that a pipelined run equals a run on one device, and that bugs are detected.

    python -m scripts.pipeline.pipeline_parity

Compares loss and gradients of small models on 8 simulated devices with one device, for
every number of stages, virtual stages (`chunks`) and microbatches of the grid; trains a
deeper `debug` recipe with and without a pipeline; and runs the executor with planted
bugs. Writes docs/benchmarks/pipeline_parity.md and exits with 1 if a bound is exceeded
or a bug is missed.
"""

import dataclasses
import functools
import math
import os
import sys
import time

# As in tests: programs are compiled and run once, so LLVM's optimisation would take
# most of the time. XLA also ends the process if eight devices on two loaded cores do
# not all reach a collective within 40 s. Set before jax reads the variable.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

from mjax.config.train import with_tokenizer
from mjax.data.dataset import open_dataset
from mjax.mesh.devices import simulate_devices
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.pipeline.schedule import build
from mjax.recipes import RECIPES
from scripts.correctness import parity
from scripts.evidence import Table, largest_difference, write_page
from scripts.pipeline.pipeline_cases import (
    BFLOAT16_BOUND,
    FLOAT32_BOUND,
    REFUSED,
    Case,
    cases,
)
from tests.pipeline import planted
from tests.training import (
    Gradients,
    Layout,
    compile_gradients,
    gradients,
    largest_error,
    make_program,
    partition_of,
)

LOSS_BOUND = 1e-6
"""Relative bound of the summed loss; only the order of its terms differs."""
STEPS_BOUND = 1e-5
NUM_STEPS = 30
NUM_LAYERS = 16
BUG_BOUND = 2e-3
"""Least error of a bug: 1000 times the tolerance of the correct program."""

RUNS = {
    "pp4 x tp2, 2 chunks": parity.Layout(
        pp=4, tp=2, microbatches=8, pipeline=PipelineConfig(chunks=2)
    ),
    "pp2 x dp2 x tp2, 4 chunks": parity.Layout(
        pp=2, dp_shard=2, tp=2, microbatches=4, pipeline=PipelineConfig(chunks=4)
    ),
    "pp8, GPipe": parity.Layout(
        pp=8, zero=0, microbatches=8, pipeline=PipelineConfig(schedule="gpipe")
    ),
    "pp4 x dp2, 2 chunks, stash input, idle slots computed": parity.Layout(
        pp=4,
        dp_shard=2,
        microbatches=4,
        pipeline=PipelineConfig(chunks=2, stash="input", idle="compute"),
    ),
}


def main() -> int:
    """Run everything, write the page, return 1 if a bound is exceeded."""
    simulate_devices(8)
    grid, grid_holds = compare_gradients()
    refusals = refuse()
    steps, worst_step = compare_steps()
    bugs, num_missed = plant()
    page = write_page(
        "pipeline_parity",
        "Pipelined = one device",
        "python -m scripts.pipeline.pipeline_parity",
        [grid, refusals, steps, bugs],
    )
    print(page)
    return int(not (grid_holds and worst_step <= STEPS_BOUND and num_missed == 0))


def compare_gradients() -> tuple[Table, bool]:
    """Compare every case; return the table, and whether all are within bounds."""
    rows, holds, worst, worst_loss = [], True, 0.0, 0.0
    for case in cases():
        began = time.process_time()
        want = one_device(case.model, case.rows, case.compute, case_microbatches(case))
        got = gradients_of(case, case.layout)
        error, leaf = largest_error(got, want)
        loss = abs(got.loss / want.loss - 1)
        loss_bound = LOSS_BOUND if case.compute == "float32" else case.bound
        holds &= error <= case.bound and loss <= loss_bound and got.empty == 0
        if case.compute == "float32":
            worst, worst_loss = max(worst, error), max(worst_loss, loss)
        rows.append([*describe(case), f"{loss:.1e}", f"{error:.1e}", f"`{leaf}`"])
        print(
            " | ".join(rows[-1]), f"| {time.process_time() - began:.0f} s", flush=True
        )
    table = Table(
        title="Loss and gradients",
        text=(
            "One batch of random tokens, two documents a row that do not see each "
            "other, d_model 32, 8 heads, 16 positions, on 8 simulated devices, against "
            "the same model on one device, without microbatches. The error of a leaf "
            "is max abs(a - b) / max abs(b); the table lists the worst leaf. In "
            f"float32 at most {FLOAT32_BOUND:g}: found {worst:.1e}; of the loss "
            f"{LOSS_BOUND:g}: found {worst_loss:.1e}. In bfloat16 at most "
            f"{BFLOAT16_BOUND:g} (each layer rounds to 8 bits), against one device "
            "with the same microbatches. Gradients of stacked parameters that hold no "
            "layer (uneven virtual stages) are exactly zero."
        ),
        header=(
            *("P", "v", "M", "dp_replicate x dp_shard x tp", "`--zero`", "layers"),
            *("model", "remat", "pipeline", "loss error", "error", "leaf"),
        ),
        rows=rows,
    )
    return table, holds


def case_microbatches(case: Case) -> int:
    """Return the number of microbatches into which the single device splits the
    batch."""
    # bfloat16 gradients are rounded once for each microbatch.
    return 1 if case.compute == "float32" else case.layout.microbatches


@functools.cache
def one_device(
    model: ModelConfig, rows: int, compute: str, microbatches: int
) -> Gradients:
    """Compute loss and gradients without a mesh and without a pipeline."""
    layout = Layout((1, 1, 1, 1), 0, microbatches)
    case = Case(model=model, layout=layout, rows=rows, compute=compute)
    return gradients_of(case, layout)


def gradients_of(case: Case, layout: Layout) -> Gradients:
    """Compute loss and gradients of a case's model and batch on a layout."""
    program = make_program(layout, case.model, compute=case.compute, rows=case.rows)
    partition = partition_of(layout, case.model)
    return gradients(program, compile_gradients(program), partition)


def describe(case: Case) -> list[str]:
    """Describe a case in words."""
    layout, model, config = case.layout, case.model, case.layout.pipeline
    assert config is not None
    features = {
        model.block: True,
        "tied": model.tie_embeddings,
        "windows": model.window != (None,),
        model.norm: model.norm != "layernorm",
        model.activation: model.activation != "gelu",
        f"{model.num_kv_heads} kv heads": model.num_kv_heads < model.heads,
        "biases": model.attn_bias,
        "dropout": model.dropout > 0,
        case.compute: case.compute != "float32",
    }
    name = {"interleaved-1f1b": "interleaved"}.get(config.schedule_name)
    partition = partition_of(layout, model)
    uneven = len(set(partition.layers_per_chunk)) > 1
    return [
        str(layout.mesh[0]),
        str(config.chunks),
        str(layout.microbatches),
        " x ".join(map(str, layout.mesh[1:])),
        str(layout.zero),
        f"{model.layers}, uneven" if uneven else str(model.layers),
        ", ".join(feature for feature, is_on in features.items() if is_on),
        model.remat,
        f"{name or config.schedule_name}, {config.stash}, {config.idle}",
    ]


def refuse() -> Table:
    """List the messages for the numbers of the grid that have no schedule."""
    rows = []
    for p, v, m in REFUSED:
        try:
            build("interleaved-1f1b", num_stages=p, num_chunks=v, num_microbatches=m)
        except ValueError as error:
            rows.append([str(p), str(v), str(m), str(error)])
        else:
            raise RuntimeError(f"P={p}, v={v}, M={m} was not refused")
    return Table(
        title="Refused",
        text="The rest of the grid: several virtual stages per stage, with M not a "
        "multiple of P.",
        header=("P", "v", "M", "message"),
        rows=rows,
    )


def compare_steps() -> tuple[Table, float]:
    """Train with and without a pipeline; return the table and the worst difference."""
    config = RECIPES["debug"]()
    model = dataclasses.replace(config.model, layers=NUM_LAYERS)
    config = dataclasses.replace(config, steps=NUM_STEPS, model=model)
    dataset = open_dataset(config.data, seed=config.seed)
    config = with_tokenizer(config, dataset.tokenizer.vocab_size)
    reference = parity.train(config, dataset, parity.ONE_DEVICE)
    rows, worst = [], 0.0
    for name, layout in RUNS.items():
        got = parity.train(config, dataset, layout)
        found = [largest_difference(got, reference, f) for f in ("loss", "grad_norm")]
        worst = max(worst, *found)
        counts = [str(layout.zero), str(layout.microbatches)]
        rows.append([name, *counts, *(f"{value:.1e}" for value in found)])
        print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title=f"{NUM_STEPS} steps of training",
        text=(
            f"Recipe `debug` with {NUM_LAYERS} layers (windows 16 and none in turn), "
            f"float32, {NUM_STEPS} steps of real text: LAMB, clipping, warm-up and "
            "cosine; against one device without a pipeline. Largest relative "
            f"differences of all steps, at most {STEPS_BOUND:g}: found {worst:.1e}. "
            f"Loss of one device: {reference[0]['loss']:.4f} at step 1, "
            f"{reference[-1]['loss']:.4f} at step {NUM_STEPS}."
        ),
        header=("layout", "`--zero`", "M", "loss difference", "grad_norm difference"),
        rows=rows,
    )
    return table, worst


def plant() -> tuple[Table, int]:
    """Run every planted bug; return the table and how many were not noticed."""
    rows, num_missed = [], 0
    for name, bug in planted.BUGS.items():
        error = planted.error(bug)
        num_missed += error < BUG_BOUND
        found = "not a number" if math.isinf(error) else f"{error:.1e}"
        refused = f"`{bug.by_schedule}`" if bug.by_schedule else "no change of a table"
        rows.append([name, refused, found])
        print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title="Planted bugs",
        text=(
            "Each is run by the executor on a small model, by "
            "`test_a_planted_bug_changes_the_gradients`; the table lists the largest "
            f"relative error of a leaf, at least {BUG_BOUND:g}. Those in a table are "
            "also refused before anything runs, by the named test in "
            f"tests/pipeline/test_planted_tables.py. {len(rows) - num_missed} of "
            f"{len(rows)} are caught."
        ),
        header=("bug", "table refused in", "error of the gradients"),
        rows=rows,
    )
    return table, num_missed


if __name__ == "__main__":
    sys.exit(main())
