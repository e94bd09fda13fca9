"""Compare the CPU time of a pipelined training step with that of a data-parallel one.

    python -m scripts.pipeline.bench_pipeline

All programs run in one process, on the same 4 simulated devices, from the same seed and
on the same batch. They alternate, so that other load on the machine affects all of
them. A step's time is the CPU-seconds of the process, over all threads, from the call
until the outputs are ready. The fastest step of each program counts, since disturbances
only add time.

The devices share the cores, so an idle stage costs nothing here, and the bubble does
not appear as waiting. With `--pipeline.idle compute`, which is meant for GPUs, idle
half-ticks do work that is discarded. The bubble then appears as CPU time, and the rest
of the difference is the cost of the executor.
"""

import argparse
import dataclasses
import shlex
import statistics
import sys
import time
from typing import Literal

import jax
import numpy as np

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig, ScheduleName
from mjax.pipeline.schedule import build
from mjax.step.program import Program, build_program
from scripts.evidence import Table, write_page

NUM_DEVICES = 4
BATCH = 32
SEQ_LEN = 256
MODEL = ModelConfig(
    layers=8,
    d_model=256,
    heads=8,
    d_ff=1024,
    vocab_size=512,
    block="serial",
    norm="rmsnorm",
    remat="full",
)
ALLOWANCE = 1.15
"""Maximum time of a pipelined step, over (1 + bubble) times that of the plain step."""
MAX_LOSS_DIFFERENCE = 1e-5
"""Relative bound of the loss after a few steps, for sums in another order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to take a step."""

    microbatches: int
    schedule: ScheduleName | None = None
    """None if there is no pipeline and all devices are data-parallel."""
    chunks: int = 1
    stash: Literal["residuals", "input"] = "residuals"
    idle: Literal["compute", "skip"] = "compute"

    @property
    def name(self) -> str:
        """Name in the table."""
        if self.schedule is None:
            whole = self.microbatches == 1
            pieces = "whole batch" if whole else f"{self.microbatches} microbatches"
            return f"dp={NUM_DEVICES}, {pieces}"
        return (
            f"pp={NUM_DEVICES}, {self.schedule}, v={self.chunks}, "
            f"m={self.microbatches}, stash {self.stash}, idle {self.idle}"
        )

    @property
    def bubble(self) -> float:
        """Bubble of the schedule, as a fraction of the ideal time."""
        if self.schedule is None:
            return 0.0
        return build(
            self.schedule,
            num_stages=NUM_DEVICES,
            num_chunks=self.chunks,
            num_microbatches=self.microbatches,
        ).bubble

    def program(self) -> Program:
        """Build the training step."""
        pp = 1 if self.schedule is None else NUM_DEVICES
        sizes = AxisSizes(pp=pp, dp_replicate=1, dp_shard=NUM_DEVICES // pp, tp=1)
        return build_program(
            model=MODEL,
            optimizer=OptimConfig(name="adamw", schedule="constant", clip_norm=1.0),
            batch=BatchConfig(size=BATCH, microbatches=self.microbatches),
            precision=PrecisionConfig(compute="float32"),
            seq_len=SEQ_LEN,
            num_steps=1000,
            seed=0,
            zero_level=2,
            isolate_documents=True,
            mesh=build_mesh(sizes),
            pipeline=PipelineConfig(
                schedule=self.schedule,
                chunks=self.chunks,
                stash=self.stash,
                idle=self.idle,
            ),
        )


PLAIN = Variant(microbatches=1)
"""The reference step of the bound: data parallelism without microbatches."""
BOUND = Variant(microbatches=8, schedule="interleaved-1f1b", chunks=2)
"""The step that must meet the bound."""
VARIANTS = (
    PLAIN,
    Variant(microbatches=8),
    BOUND,
    dataclasses.replace(BOUND, stash="input"),
    dataclasses.replace(BOUND, idle="skip"),
    Variant(microbatches=8, schedule="1f1b"),
    Variant(microbatches=8, schedule="1f1b", stash="input"),
    Variant(microbatches=8, schedule="gpipe"),
)


class Stepper:
    """Runs the steps of one variant and holds its state."""

    def __init__(self, variant: Variant):
        """Compile, initialise the state, and run a first step to warm up."""
        program = variant.program()
        self.name = variant.name
        self.state = program.init()
        self.batch = jax.device_put(make_batch(), program.batch_sharding)
        self.compiled = program.trace().lower().compile()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.step()
        self.seconds.clear()

    def step(self) -> None:
        """Run a step; record its loss and CPU-seconds."""
        start = time.process_time()
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.process_time() - start)
        self.losses.append(float(metrics["loss"]))


def make_batch() -> dict[str, np.ndarray]:
    """Draw random tokens; each sequence is one document."""
    rng = np.random.default_rng(0)
    shape = BATCH, SEQ_LEN
    stream = rng.integers(0, MODEL.vocab_size, (BATCH, SEQ_LEN + 1), np.int32)
    positions = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), shape)
    return {
        "tokens": stream[:, :-1],
        "targets": stream[:, 1:],
        "segments": np.zeros(shape, np.int32),
        "positions": positions,
    }


def measure(repetitions: int) -> dict[Variant, list[float]]:
    """Alternate steps of the variants; return the CPU-seconds of each variant's steps.

    Raises:
      RuntimeError: the losses of the variants differ.
    """
    steppers = {}
    for variant in VARIANTS:
        steppers[variant] = Stepper(variant)
        print(f"ready: {variant.name}", flush=True)
    for _ in range(repetitions):
        for stepper in steppers.values():
            stepper.step()
            print(f"{stepper.seconds[-1]:.3f} CPU-s: {stepper.name}", flush=True)
    want = steppers[PLAIN].losses
    for stepper in steppers.values():
        if not np.allclose(stepper.losses, want, rtol=MAX_LOSS_DIFFERENCE, atol=0):
            raise RuntimeError(
                f"{stepper.name} has losses {stepper.losses}, {PLAIN.name} has {want}: "
                f"they must agree to {MAX_LOSS_DIFFERENCE}"
            )
    return {variant: stepper.seconds for variant, stepper in steppers.items()}


def table_of(seconds: dict[Variant, list[float]]) -> Table:
    """Write the table of step times."""
    plain = min(seconds[PLAIN])
    rows = []
    for variant, values in seconds.items():
        ratio = min(values) / plain
        allowed = ALLOWANCE * (1 + variant.bubble)
        rows.append(
            (
                variant.name,
                f"{min(values):.2f}",
                f"{statistics.median(values):.2f}",
                f"{ratio:.3f}",
                f"{variant.bubble:.3f}" if variant.schedule else "",
                f"{ratio / (1 + variant.bubble):.3f}",
                f"**{allowed:.3f}**" if variant == BOUND else "",
            )
        )
    header = ("step", "min", "median", "ratio", "bubble")
    return Table(
        title="Ours, paired",
        text=f"""CPU-seconds a step on {NUM_DEVICES} simulated devices: {MODEL.layers} \
layers, d {MODEL.d_model}, {MODEL.heads} heads,
{MODEL.activation} of width {MODEL.ffn_width}, {MODEL.norm}, {MODEL.block} block, \
rotary positions, untied head, sequence {SEQ_LEN},
vocabulary {MODEL.vocab_size}, batch {BATCH}, float32, AdamW with clipping, remat \
{MODEL.remat}. {len(seconds[PLAIN])} steps each, in turn;
their losses agree to {MAX_LOSS_DIFFERENCE} at every step. *Ratio*: of the fastest \
step to that of
"{PLAIN.name}", which is how one would run it without a pipeline. With
idle slots that compute (the mode for GPUs) the bubble costs CPU time, so the bound is
{ALLOWANCE} x (1 + bubble).""",
        header=(*header, "ratio / (1 + bubble)", "bound on ratio"),
        rows=rows,
    )


def peers_table(peers: list[tuple[str, float]]) -> Table:
    """List steps of other frameworks that were measured separately."""
    return Table(
        title="Others, on the same shapes",
        text="""Measured one by one with their own trainers on the same machine, each by
process CPU-seconds: not paired, so a few tenths apart is no difference; and not the
same graph (attention, remat, masks, loss).""",
        header=("step", "CPU-s"),
        rows=[(name, f"{seconds:.2f}") for name, seconds in peers],
    )


def parse_peer(text: str) -> tuple[str, float]:
    """Read NAME=SECONDS; the name may contain =."""
    name, _, seconds = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"write NAME=SECONDS, got {text!r}")
    return name, float(seconds)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument(
        "--peer",
        type=parse_peer,
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="list a step that was measured separately; repeat for more",
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    seconds = measure(args.repetitions)
    tables = [table_of(seconds)]
    if args.peer:
        tables.append(peers_table(args.peer))
    command = shlex.join(["python", "-m", "scripts.pipeline.bench_pipeline", *argv])
    print(write_page("pipeline_cpu", "CPU time of a pipelined step", command, tables))
    ratio = min(seconds[BOUND]) / min(seconds[PLAIN])
    bound = ALLOWANCE * (1 + BOUND.bubble)
    print(f"{BOUND.name}: {ratio:.3f} of {PLAIN.name}; at most {bound:.3f}")
    return int(ratio > bound)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
