"""Measure the temporary memory of a pipelined training step, without a GPU.

    python -m scripts.pipeline.pipeline_memory

Compiles the step for 4 described H200s (`mjax.hardware.described`; needs `make
env-plan`) with 8 to 128 microbatches, and reads the compiler's temporary bytes: ours
with each schedule and remat policy, and GPipe by autodiff. Writes docs/benchmarks/
pipeline_memory.md. Ends with 1 if the interleaved schedule grows by more than 5%, or
its compile time by more than 30%, from 8 to 128 microbatches.

GPipe by autodiff is `jax.grad` of a pipeline: a scan over the forward ticks,
differentiated as a whole. The tick is one `jax.checkpoint`, including head and
embedding, that selects and casts its weights inside, so only values carried between
ticks are saved. It runs the same model functions in place of
`mjax.pipeline.run.gradients`.
"""

import dataclasses
import functools
import os
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.kernels.cross_entropy.tuning import CHUNKED
from mjax.layers.config import Remat
from mjax.mesh import collectives
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.model.counts import num_params
from mjax.pipeline import run
from mjax.pipeline.config import PipelineConfig, ScheduleName, Stash
from mjax.pipeline.held import take_layers
from mjax.pipeline.model import Row
from mjax.pipeline.pieces import Pieces
from mjax.pipeline.schedule import Schedule, build, build_forward
from mjax.pipeline.tick import Execution
from mjax.step.program import Program, build_program
from mjax.trace.vjp import zeros_of
from scripts.evidence import Table, write_page

NUM_STAGES = 4
SEQ_LEN = 1024
MICROBATCHES = (8, 16, 32, 64, 128)
ENDS = MICROBATCHES[0], MICROBATCHES[-1]
MODEL = ModelConfig(
    layers=8,
    d_model=1024,
    heads=16,
    d_ff=4096,
    vocab_size=32768,
    block="serial",
    norm="rmsnorm",
)
MAX_GROWTH = 0.05
MAX_COMPILE_RATIO = 1.3

# ------------------------------------------------------------- GPipe by autodiff


def gradients_by_autodiff(
    schedule: Schedule,
    model: run.Model,
    weights: run.Weights,
    microbatches: run.Microbatches,
    *,
    options: run.Options,
    dtype: DTypeLike,
    pieces: Pieces,
    **log_and_mark: Any,
) -> tuple[Float[Array, ""], run.Weights, Any]:
    """Compute the results of `run.gradients` by `jax.grad` through the forward ticks.

    Gradients are summed in `dtype` too: the weights are cast inside the tick.
    Stored parameters must be whole: no data parallelism over dp_shard.
    """
    forward = build_forward(
        num_stages=schedule.num_stages,
        num_chunks=schedule.num_chunks,
        num_microbatches=schedule.num_microbatches,
    )

    def start(weights: run.Weights) -> tuple[Execution, run.Weights]:
        copy = jax.tree.map(lambda w: w.astype(pieces.compute_dtype), weights)
        at = Execution(forward, model, copy.embedding, microbatches, options)
        return at, copy

    @functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.nothing_saveable,
        prevent_cse=False,
    )
    def tick(weights: run.Weights, sums: PyTree, carry: Any, row: Row) -> Any:
        x, total = carry
        at, copy = start(weights)
        chunk = row["forward_chunk"]
        # The gradients are summed in the cotangent of `sums`.
        held = run.Held(
            take_layers(copy.chunks.joined, chunk),
            take_layers(sums, chunk),
            at.pick(copy.chunks.others, chunk),
        )
        micro = at.microbatch(row["forward_microbatch"])
        x = lax.cond(
            at.begins_at(chunk), lambda: model.embed(at.embedding, micro), lambda: x
        )
        y = model.chunk(x, held, model.context(micro), at.number(chunk))
        loss = lax.cond(
            at.ends_at(chunk),
            lambda: model.head(copy.embedding, copy.head, y, micro),
            lambda: jnp.zeros_like(total),
        )
        return collectives.send_to_next_stage(y), total + loss

    def loss(weights: run.Weights, sums: PyTree) -> Float[Array, ""]:
        at, copy = start(weights)
        first = zeros_of(at.x_type), zeros_of(at.total_type(copy.head))
        rows = at.rows(0, forward.num_ticks)
        (_, total), _ = lax.scan(
            lambda carry, row: (tick(weights, sums, carry, row), None), first, rows
        )
        return total

    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    zeros = jax.tree.map(jnp.zeros_like, weights.chunks.joined)
    total, (grads, sums) = jax.value_and_grad(loss, argnums=(0, 1))(weights, zeros)
    specs, chunks = pieces.specs, grads.chunks._replace(joined=sums)
    reduced = run.Weights(
        chunks=pieces.finish(chunks, take_layers(sums, 0), []),
        embedding=pieces.reduce_whole(grads.embedding, specs.embedding),
        head=pieces.reduce_whole(grads.head, specs.head),
    )
    return total, reduced, log_and_mark.get("log")


# ------------------------------------------------------------------- what is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training step without its number of microbatches."""

    schedule: ScheduleName = "interleaved-1f1b"
    chunks: int = 2
    remat: Remat = "full"
    stash: Stash = "residuals"
    vocab_size: int = MODEL.vocab_size
    autodiff: bool = False
    """Differentiate the forward ticks instead of running the backward half-ticks.
    """

    @property
    def name(self) -> str:
        """Name in the table."""
        if self.autodiff:
            kind = "circular" if self.chunks > 1 else "GPipe"
            return f"{kind} by autodiff, v={self.chunks}, one checkpoint a tick"
        kept = f"remat {self.remat}" if self.stash == "residuals" else "stash input"
        return f"{self.schedule}, v={self.chunks}, {kept}"

    def program(self, microbatches: int, mesh: Mesh) -> Program:
        """Build the model functions."""
        return build_program(
            model=dataclasses.replace(
                MODEL, vocab_size=self.vocab_size, remat=self.remat
            ),
            optimizer=OptimConfig(name="adamw"),
            batch=BatchConfig(size=microbatches, microbatches=microbatches),
            precision=PrecisionConfig(),
            seq_len=SEQ_LEN,
            num_steps=10,
            seed=0,
            zero_level=2,
            isolate_documents=True,
            mesh=mesh,
            pipeline=PipelineConfig(
                schedule=self.schedule, chunks=self.chunks, stash=self.stash
            ),
        )

    def build_schedule(self, microbatches: int) -> Schedule:
        """Build the schedule."""
        return build(
            self.schedule,
            num_stages=NUM_STAGES,
            num_chunks=self.chunks,
            num_microbatches=microbatches,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Figures of one compiled step."""

    temp_bytes: int
    argument_bytes: int
    cpu_s: float
    """CPU-seconds of lowering and compiling, in this process and its children."""


def compile_step(case: Case, microbatches: int, mesh: Mesh) -> Compiled:
    """Compile a training step for the mesh's devices."""
    start = sum(os.times()[:4])
    program = case.program(microbatches, mesh)
    executor = gradients_by_autodiff if case.autodiff else run.gradients
    with mock.patch.object(run, "gradients", executor):
        lowered = program.trace().lower()
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return Compiled(
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        cpu_s=sum(os.times()[:4]) - start,
    )


# --------------------------------------------------------------------------- the page

OURS = Case()
CASES = {
    OURS: MICROBATCHES,
    Case(stash="input"): ENDS,
    Case(remat="dots"): ENDS,
    Case(remat="none"): ENDS,
    Case(schedule="1f1b", chunks=1): ENDS,
    Case(schedule="gpipe", chunks=1): (8, 32, 128),
    Case(autodiff=True): (8, 32, 128),
    Case(schedule="gpipe", chunks=1, autodiff=True): (8, 32, 128),
}
"""The compiled cases, and their numbers of microbatches."""
OURS_512 = Case(vocab_size=512)

MAXTEXT = {
    "whole-batch loss": {
        8: 455_569_112,
        16: 668_480_472,
        32: 1_115_370_456,
        64: 1_992_357_336,
        128: 3_746_281_432,
    },
    "loss in 8 pieces (num_vocab_tiling=8)": {
        8: 450_236_632,
        32: 674_943_448,
        128: 1_583_928_536,
    },
}
"""Temporary bytes of MaxText 0.2.5's circular pipeline, by microbatches."""
MAXTEXT_512 = {8: 322_285_528, 32: 582_758_616, 64: 927_069_144, 128: 1_615_705_560}
"""Temporary bytes of the same pipeline with a vocabulary of 512."""

Results = dict[tuple[Case, int], Compiled]


def compile_all(mesh: Mesh) -> tuple[Results, dict[int, list[float]]]:
    """Compile everything; return the results, and our compile times by microbatches.

    With the fewest and the most microbatches ours is compiled twice, and the smaller
    time counts.
    """
    wanted = [(case, m) for case, sizes in CASES.items() for m in sizes]
    wanted += [(OURS_512, m) for m in ENDS] + [(OURS, m) for m in ENDS]
    results: Results = {}
    times: dict[int, list[float]] = {m: [] for m in ENDS}
    for case, m in wanted:
        results[case, m] = compiled = compile_step(case, m, mesh)
        if case == OURS and m in ENDS:
            times[m].append(compiled.cpu_s)
        print(
            f"{case.name}, vocabulary {case.vocab_size}, m={m}: "
            f"{compiled.temp_bytes} bytes, {compiled.cpu_s:.1f} CPU-s",
            flush=True,
        )
    return results, times


def row(name: str, temp_bytes: dict[int, int]) -> tuple[str, ...]:
    """Return a row: MB for each number of microbatches, and the growth over all."""
    cells = (
        f"{temp_bytes[m] / 1e6:.1f}" if m in temp_bytes else "" for m in MICROBATCHES
    )
    return (name, *cells, f"{100 * growth(temp_bytes):.1f}%")


def growth(temp_bytes: dict[int, int]) -> float:
    """Return the relative growth from the fewest to the most microbatches."""
    return temp_bytes[ENDS[1]] / temp_bytes[ENDS[0]] - 1


def by_microbatches(results: Results, case: Case) -> dict[int, int]:
    """Pick the temporary bytes of a case."""
    return {m: r.temp_bytes for (c, m), r in results.items() if c == case}


HEADER = ("", *(f"m={m}" for m in MICROBATCHES), f"growth {ENDS[0]} to {ENDS[1]}")


def temp_tables(results: Results) -> list[Table]:
    """Write the tables of temporary bytes."""
    arguments = results[OURS, ENDS[0]].argument_bytes
    ends = results[OURS, ENDS[0]].temp_bytes - results[OURS_512, ENDS[0]].temp_bytes
    ours = Table(
        title="Temporary memory per GPU",
        text=f"""MB (10^6 bytes) of a whole training step beside its arguments, from the
compiler's memory analysis for {NUM_STAGES} described H200s, p={NUM_STAGES}, dp=tp=1: \
{MODEL.layers} layers, d {MODEL.d_model},
{MODEL.heads} heads, {MODEL.activation} of width {MODEL.ffn_width}, {MODEL.norm}, \
{MODEL.block} block, sequence {SEQ_LEN}, vocabulary
{MODEL.vocab_size} untied, bfloat16 compute, float32 parameters and gradients, AdamW, m
microbatches of one sequence. The arguments (parameters and moments) are \
{arguments / 1e6:.0f} MB; only the
tokens in them grow with m. Bound: {OURS.name} grows by at most {MAX_GROWTH:.0%}.

*By autodiff* is `jax.grad` through the forward ticks, with the same model functions. A
tick is one `jax.checkpoint`, head and embedding included, that selects and casts its
weights inside: only values carried between ticks are saved. Loss and gradients equal
those of the executor.""",
        header=HEADER,
        rows=[row(case.name, by_microbatches(results, case)) for case in CASES],
    )
    peer = Table(
        title="Beside MaxText's circular pipeline",
        text=f"""Same shapes, optimizer, microbatches and GPUs; remat full, attention
dot_product. MaxText 0.2.5 was compiled separately (jax 0.11.2, `train_compile` with its
mesh laid over the described devices, `ici_pipeline_parallelism=4`,
`num_layers_per_pipeline_stage=1`, llama2 block); its arguments are 1107 MB, as ours. It
computes the loss of the whole batch at once, so the rows with a vocabulary of 512
compare the pipelines alone. {ends / 1e6:.0f} MB of ours come with the larger
vocabulary: gradients and bfloat16 copy of embedding and head, kept from the first tick
to the last, and the logits of a microbatch; hence the higher start.""",
        header=HEADER,
        rows=[
            row("ours", by_microbatches(results, OURS)),
            *(row(f"MaxText, {name}", sizes) for name, sizes in MAXTEXT.items()),
            row("ours, vocabulary 512", by_microbatches(results, OURS_512)),
            row("MaxText, vocabulary 512", MAXTEXT_512),
        ],
    )
    return [ours, peer]


def parts_table(results: Results) -> Table:
    """Break down the bytes; check the bytes of a buffer entry by a schedule with
    many."""
    layer = 2 * SEQ_LEN * MODEL.d_model  # A block's input, bfloat16.
    norm, ends = MODEL.d_model, 2 * MODEL.padded_vocab * MODEL.d_model  # Parameters.
    held = ends + norm + (num_params(MODEL) - ends - norm) // NUM_STAGES
    num_chunks = CHUNKED.num_chunks(SEQ_LEN, MODEL.padded_vocab)
    logits = -(-SEQ_LEN // num_chunks) * MODEL.padded_vocab
    schedule = OURS.build_schedule(ENDS[1])
    stash, waiting = schedule.num_stash_slots, schedule.num_gradient_slots
    parts = [
        ("compute copy", "2 bytes x parameters of a stage", 2 * held),
        ("gradients", "4 bytes x parameters of a stage", 4 * held),
        ("stash", f"{stash} slots x {layer} bytes", stash * layer),
        ("gradients that wait", f"{waiting} slots x {layer} bytes", waiting * layer),
        ("logits", "(4 + 2) bytes x positions x vocabulary", 6 * logits),
    ]
    temp = results[OURS, ENDS[1]].temp_bytes
    rest = temp - sum(size for _, _, size in parts)
    parts += [("the rest", "work space of a tick", rest), ("together", "", temp)]
    gpipe = Case(schedule="gpipe", chunks=1)
    few, many = (gpipe.build_schedule(m) for m in ENDS)
    # A virtual stage of two layers: remat full keeps both inputs.
    expected = layer * (
        MODEL.layers // NUM_STAGES * (many.num_stash_slots - few.num_stash_slots)
        + many.num_gradient_slots
        - few.num_gradient_slots
    )
    sizes = by_microbatches(results, gpipe)
    found = sizes[ENDS[1]] - sizes[ENDS[0]]
    return Table(
        title="What it consists of",
        text=f"""{OURS.name}, m={ENDS[1]}. The sizes of buffer entries can be checked in
GPipe, whose ring buffers grow with m: from m={ENDS[0]} to m={ENDS[1]} by \
{expected / 1e6:.1f} MB as counted
from the schedule, by {found / 1e6:.1f} MB as compiled.""",
        header=("part", "size", "MB"),
        rows=[(name, size, f"{n / 1e6:.1f}") for name, size, n in parts],
    )


def compile_table(times: dict[int, list[float]]) -> Table:
    """Write the table of compile times."""
    ratio = min(times[ENDS[1]]) / min(times[ENDS[0]])
    return Table(
        title="Compile time",
        text=f"""CPU-seconds of lowering and compiling {OURS.name}, each twice, of
which the smaller time counts:
{ratio:.2f} times as long with m={ENDS[1]} as with m={ENDS[0]}; \
at most {MAX_COMPILE_RATIO}.""",
        header=("m", "first", "second"),
        rows=[(str(m), *(f"{t:.1f}" for t in times[m])) for m in ENDS],
    )


def main() -> int:
    mesh = described_mesh(AxisSizes(pp=NUM_STAGES, dp_replicate=1, dp_shard=1, tp=1))
    results, times = compile_all(mesh)
    tables = [*temp_tables(results), parts_table(results), compile_table(times)]
    title = "Memory of a pipeline against its microbatches"
    print(
        write_page(
            "pipeline_memory",
            title,
            "python -m scripts.pipeline.pipeline_memory",
            tables,
        )
    )
    grown = growth(by_microbatches(results, OURS))
    ratio = min(times[ENDS[1]]) / min(times[ENDS[0]])
    print(f"{OURS.name}: memory grows by {grown:.2%}, compile time {ratio:.2f}x")
    return int(grown > MAX_GROWTH or ratio > MAX_COMPILE_RATIO)


if __name__ == "__main__":
    sys.exit(main())
