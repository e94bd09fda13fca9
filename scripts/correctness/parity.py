"""Show that a sharded run is the run of one device, layout by layout.

    python -m scripts.correctness.parity

Takes the `debug` recipe (float32, real text) and runs it in this process on one device
and on 4 or 8 simulated ones; then, as separate commands, once as one process with 8
devices and once as four processes with 2 each. Writes docs/benchmarks/parity.md and
ends with 1 if a bound is exceeded.
"""

import dataclasses
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from mjax.config.step import BatchConfig
from mjax.config.train import TrainConfig, with_tokenizer
from mjax.data.dataset import Dataset, open_dataset
from mjax.data.loader import Loader
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import simulate_devices
from mjax.pipeline.config import PipelineConfig
from mjax.recipes import RECIPES
from mjax.step.program import build_program
from scripts.evidence import (
    REPOSITORY,
    Table,
    largest_difference,
    read_metrics,
    run_training,
    train_command,
    write_page,
)

LAYOUT_BOUND = 1e-5
PROCESS_BOUND = 1e-6
NUM_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How one run is spread; all else is the recipe's."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    zero: int = 2
    microbatches: int = 1
    pp: int = 1
    pipeline: PipelineConfig | None = None

    @property
    def sizes(self) -> AxisSizes:
        """Sizes of all mesh axes."""
        return AxisSizes(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
        )


ONE_DEVICE = Layout(zero=0)
LAYOUTS = {
    "dp8": Layout(dp_shard=8),
    "dp8, optimizer state sharded": Layout(dp_shard=8, zero=1),
    "dp8, nothing sharded": Layout(dp_shard=8, zero=0),
    "dp8, parameters sharded": Layout(dp_shard=8, zero=3),
    "dp_shard4 x dp_replicate2": Layout(dp_shard=4, dp_replicate=2),
    "dp_shard4 x dp_replicate2, parameters sharded": Layout(
        dp_shard=4, dp_replicate=2, zero=3
    ),
    "tp8": Layout(tp=8),
    "tp4 x dp2": Layout(tp=4, dp_shard=2),
    "tp2 x dp2, ZeRO-3, 4 devices": Layout(tp=2, dp_shard=2, zero=3),
    "tp2 x dp_shard2 x dp_replicate2": Layout(tp=2, dp_shard=2, dp_replicate=2),
    "one device, accumulation 4": Layout(zero=0, microbatches=4),
    "dp2, accumulation 4": Layout(dp_shard=2, microbatches=4),
    "tp2 x dp2, ZeRO-3, accumulation 4": Layout(
        tp=2, dp_shard=2, zero=3, microbatches=4
    ),
    "tp4, nothing sharded, accumulation 2": Layout(tp=4, zero=0, microbatches=2),
}


def main() -> int:
    """Run everything, write the page, return 1 if a bound is exceeded."""
    simulate_devices(8)
    config = dataclasses.replace(RECIPES["debug"](), steps=NUM_STEPS)
    dataset = open_dataset(config.data, seed=config.seed)
    config = with_tokenizer(config, dataset.tokenizer.vocab_size)
    reference = train(config, dataset, ONE_DEVICE)
    worst, rows = 0.0, []
    for name, layout in LAYOUTS.items():
        got = train(config, dataset, layout)
        loss = largest_difference(got, reference, "loss")
        norm = largest_difference(got, reference, "grad_norm")
        worst = max(worst, loss)
        mesh = f"{layout.dp_replicate} x {layout.dp_shard} x {layout.tp}"
        counts = [mesh, str(layout.zero), str(layout.microbatches)]
        rows.append([name, *counts, f"{loss:.1e}", f"{norm:.1e}"])
        print(" | ".join(rows[-1]), flush=True)
    layouts = Table(
        title="Layouts",
        text=(
            f"Recipe `debug`, float32, {NUM_STEPS} steps of real text, against one "
            "device (`--zero 0`). Differences are relative, the largest of all steps; "
            f"of the loss at most {LAYOUT_BOUND:g}: found {worst:.1e}. Loss of one "
            f"device: {reference[0]['loss']:.4f} at step 1, "
            f"{reference[-1]['loss']:.4f} at step {NUM_STEPS}."
        ),
        header=(
            *("layout", "dp_replicate x dp_shard x tp", "`--zero`", "microbatches"),
            *("loss difference", "grad_norm difference"),
        ),
        rows=rows,
    )
    processes, worst_process = compare_processes()
    print(
        write_page(
            "parity",
            "Sharded = one device",
            "python -m scripts.correctness.parity",
            [layouts, processes],
        )
    )
    return int(not (worst <= LAYOUT_BOUND and worst_process <= PROCESS_BOUND))


def train(
    config: TrainConfig, dataset: Dataset, layout: Layout
) -> list[dict[str, Any]]:
    """Train in this process on the first devices; return step, loss and grad_norm."""
    sizes = layout.sizes
    program = build_program(
        model=config.model,
        optimizer=config.optim,
        batch=BatchConfig(size=config.batch.size, microbatches=layout.microbatches),
        precision=config.precision,
        seq_len=config.data.seq_len,
        num_steps=config.steps,
        seed=config.seed,
        zero_level=layout.zero,
        isolate_documents=config.data.isolate_documents,
        mesh=build_mesh(sizes, jax.devices()[: sizes.num_devices]),
        pipeline=layout.pipeline,
    )
    rows, state = [], program.init()
    with Loader(
        dataset.train, program.batch_sharding, batch_size=config.batch.size
    ) as batches:
        for step in range(1, config.steps + 1):
            state, metrics = program.train_step(state, next(batches))
            loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
            rows.append({"step": step, "loss": loss, "grad_norm": grad_norm})
    return rows


def compare_processes() -> tuple[Table, float]:
    """Run the command as one process and as four; return the table and the worst."""
    worst, rows = 0.0, []
    for mesh, zero in (("dp8", 2), ("dp4 x tp2", 2), ("dp4 x tp2", 3)):
        flags = ["--recipe", "debug", "--steps", str(NUM_STEPS), "--zero", str(zero)]
        flags += ["--mesh.tp", "2"] if "tp2" in mesh else []
        with tempfile.TemporaryDirectory() as folder:
            one, four = Path(folder) / "one", Path(folder) / "four"
            run_training(*flags, "--simulate-devices", "8", "--work-dir", str(one))
            _run_processes(4, [*flags, "--simulate-devices", "2"], four)
            reference, got = read_metrics(one), read_metrics(four)
        fields = ("loss", "grad_norm")
        found = [largest_difference(got, reference, field) for field in fields]
        worst = max(worst, *found)
        rows.append([mesh, str(zero), *(f"{value:.1e}" for value in found)])
        print("4 x 2 | " + " | ".join(rows[-1]), flush=True)
    table = Table(
        title="Four processes with 2 devices = one process with 8",
        text=(
            "`python -m mjax.train --recipe debug` once, and four times with "
            "`--distributed.coordinator`, `.num-processes 4`, `.process-id`; gloo "
            "between the processes. Largest relative differences between their "
            f"metrics.jsonl, at most {PROCESS_BOUND:g}: found {worst:.1e}."
        ),
        header=("mesh", "`--zero`", "loss difference", "grad_norm difference"),
        rows=rows,
    )
    return table, worst


def _run_processes(num_processes: int, flags: list[str], work_dir: Path) -> None:
    """Run one training as several processes of this machine, until all have ended."""
    with socket.create_server(("localhost", 0)) as probe:
        coordinator = f"localhost:{probe.getsockname()[1]}"
    flags = [
        *(*flags, "--work-dir", str(work_dir), "--distributed.coordinator"),
        *(coordinator, "--distributed.num-processes", str(num_processes)),
    ]
    processes = [
        subprocess.Popen(
            train_command(*flags, "--distributed.process-id", str(index)),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(num_processes)
    ]
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"a process ended with {process.returncode}:\n{output}")


if __name__ == "__main__":
    sys.exit(main())
