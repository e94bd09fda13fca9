"""Show, without a GPU, that compute overlaps the transfers between stages.

    make env-plan && .venv/bin/python -m scripts.pipeline.pipeline_overlap

Compiles the gradients of a pipelined model for described H200s with the options of
training, and reads from XLA's schedule what runs between the start and the end of each
collective in the body of the steady loop. Writes docs/benchmarks/pipeline_overlap.md.
Exits with 1 if a transfer takes longer than the matmuls that overlap it (modelled), a
matmul of the steady loop overlaps nothing, a data-parallel collective is in that loop,
or a gradient accumulator is copied.

The last matmuls of the loop compute weight gradients, on which nothing else in the loop
depends. XLA places them beside the transfer to the next stage or, with tensor
parallelism, beside the last collective over tp, which nothing else could overlap.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import jax

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import DP, AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import Analysis, Collective, analyse
from mjax.plan.hlo.collectives import collective_kind
from mjax.plan.hlo.parse import Array, Instruction, Module, parse
from mjax.plan.hlo.work import fused_work
from mjax.step.program import Program, build_program
from mjax.trace import scopes
from scripts.evidence import Table, write_page


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a mesh."""

    name: str
    sizes: AxisSizes
    model: ModelConfig
    num_chunks: int
    num_microbatches: int
    seq_len: int
    tp_chunks: int = 1
    """Chunks over tp; 1 means --mesh.tp-overlap off."""

    def build(self) -> Program:
        """Build the program for described H200s."""
        return build_program(
            model=self.model,
            optimizer=OptimConfig(),
            batch=BatchConfig(
                size=self.num_microbatches * self.sizes.dp,
                microbatches=self.num_microbatches,
            ),
            precision=PrecisionConfig(),
            seq_len=self.seq_len,
            num_steps=10,
            seed=0,
            zero_level=2,
            isolate_documents=True,
            mesh=described_mesh(self.sizes),
            pipeline=PipelineConfig(chunks=self.num_chunks),
            tp_chunks=self.tp_chunks,
        )


def _sizes(*, pp: int, dp: int, tp: int) -> AxisSizes:
    return AxisSizes(pp=pp, dp_replicate=1, dp_shard=dp, tp=tp)


_SMALL = ModelConfig(layers=8, d_model=1024, heads=16, vocab_size=32_768)
_175B = ModelConfig(layers=32, d_model=12_288, heads=128, vocab_size=64_000)

CASES = (
    Case(
        name="width 1024, tp",
        sizes=_sizes(pp=4, dp=1, tp=2),
        model=_SMALL,
        num_chunks=2,
        num_microbatches=8,
        seq_len=1024,
    ),
    Case(
        name="width 1024, dp",
        sizes=_sizes(pp=4, dp=2, tp=1),
        model=_SMALL,
        num_chunks=2,
        num_microbatches=8,
        seq_len=1024,
    ),
    Case(
        name="width 4096, chunks over tp",
        sizes=_sizes(pp=4, dp=2, tp=8),
        model=ModelConfig(layers=16, d_model=4096, heads=32, vocab_size=32_768),
        num_chunks=2,
        num_microbatches=8,
        seq_len=2048,
        tp_chunks=8,
    ),
    Case(
        name="32 of the 96 layers of megascale-175b",
        sizes=_sizes(pp=8, dp=2, tp=8),
        model=_175B,
        num_chunks=2,
        num_microbatches=16,
        seq_len=2048,
    ),
)


def compile_gradients(program: Program) -> str:
    """Return the compiled module of the gradients."""
    state = program.abstract_state
    lowered = program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    text = lowered.compile().as_text()
    assert text is not None
    return text


def transfers(analysis: Analysis, computation: str) -> dict[str, Collective]:
    """Return the permutes between stages of a computation, by direction."""
    step = analysis.sizes.dp * analysis.sizes.tp  # pp is the slowest axis of the mesh
    found = {}
    for collective in inside(analysis, computation):
        if collective.role == "pp" and collective.kind == "collective-permute":
            sender, receiver = collective.groups.members[0]
            to_next = receiver - sender == step
            found["forward" if to_next else "backward"] = collective
    return found


def inside(analysis: Analysis, computation: str) -> list[Collective]:
    """Return the collectives of a computation, without those of the computations that
    it calls.
    """
    return [c for c in analysis.collectives if c.computation == computation]


def steady_body(analysis: Analysis) -> str:
    """Return the body of the loop that sends in both directions.

    Raises:
      ValueError: the module has no such loop, or more than one.
    """
    steady = []
    for name in analysis.work:  # the first and last ticks may be outside of the loop
        runs = [sent.runs for sent in transfers(analysis, name).values()]
        if len(runs) == 2 and min(runs) > 1:
            steady.append(name)
    if len(steady) != 1:
        raise ValueError(f"one loop must send in both directions, these do: {steady}")
    return steady[0]


def cover(transfer: Collective) -> float:
    """Return the time of the overlapping matmuls, in times of the transfer (modelled).

    Both as `mjax.plan.cost` models them for an H200 in bfloat16; kernels do not count.
    """
    cost = CostModel.of(GPUS["h200"])
    speed = cost.peak_flops_per_s * cost.product_efficiency
    return transfer.flops / speed / cost.collective_s(transfer)


def idle_matmuls(module: Module, analysis: Analysis, name: str) -> int:
    """Return how many matmuls of a computation run while it communicates nothing.

    The conditional of the backward pass is not counted: the first stage alone takes the
    branch with the two small matmuls of the embedding's gradient.
    """
    computation = module.computations[name]
    in_flight: set[str] = set()
    asynchronous = {c.name for c in inside(analysis, name) if c.is_async}
    done = {computation.done_of[start]: start for start in asynchronous}
    count = 0
    for x in computation.instructions:
        in_flight.discard(done.get(x.name, ""))
        if x.name in asynchronous:
            in_flight.add(x.name)
        elif not in_flight and not _is_of_embedding(x):
            calls = analysis.calls.get((name, x.name), ())
            count += sum(analysis.work[inner].products * n for inner, n in calls)
            if not calls and not collective_kind(x, module):
                count += fused_work(x, computation, module).products
    return count


def _is_of_embedding(x: Instruction) -> bool:
    return x.opcode == "conditional" and scopes.phase("backward") in x.op_name


def find_faults(module: Module, analysis: Analysis, program: Program) -> list[str]:
    """Return faults: exposed transfers and superfluous operations; empty is good."""
    steady = steady_body(analysis)
    faults = [
        f"the {direction} transfer is exposed: {transfer}"
        for direction, transfer in transfers(analysis, steady).items()
        if not transfer.is_async or cover(transfer) < 1
    ]
    if idle := idle_matmuls(module, analysis, steady):
        faults.append(
            f"{idle} of the {analysis.work[steady].products} matmuls of the steady "
            "loop overlap nothing"
        )
    faults += [
        f"in the steady loop: {collective}"
        for collective in inside(analysis, steady)
        if set(DP) & set(collective.axes)
    ]
    accumulators = accumulator_shapes(program)
    faults += [
        f"{name} copies a gradient accumulator, {x.shape}"
        for name in analysis.work
        for x in module.computations[name].instructions
        if x.opcode == "copy" and x.shape in accumulators
    ]
    return faults


def accumulator_shapes(program: Program) -> set[Array]:
    """Return the shapes [v, n, ...] of a device's gradient accumulators of matrices."""
    shapes = set()
    for leaf in jax.tree.leaves(program.abstract_state.params["blocks"]):
        spec = jax.sharding.PartitionSpec(*_without(leaf.sharding.spec, set(DP)))
        whole_over_dp = jax.sharding.NamedSharding(program.mesh, spec)
        slots, *rest = whole_over_dp.shard_shape(leaf.shape)
        if len(rest) > 1:
            shapes |= {
                Array("f32", (v, slots // v, *rest)) for v in range(1, slots + 1)
            }
    return shapes


def _without(spec: jax.sharding.PartitionSpec, axes: set[str]) -> list:
    def entry(names):
        names = names if isinstance(names, tuple) else (names,)
        return tuple(name for name in names if name and name not in axes) or None

    return [entry(names) for names in spec]


def _hidden(collectives: Sequence[Collective]) -> str:
    """Return the overlapped share of bytes and the number of collectives."""
    if not collectives:
        return "none"
    total = sum(c.wire_bytes * c.runs for c in collectives)
    hidden = sum(c.wire_bytes * c.runs for c in collectives if c.is_overlapped)
    return f"{hidden / total:.0%} of {len(collectives)}"


def _overlapping(between: Mapping[str, Collective]) -> int:
    return sum(transfer.products for transfer in between.values())


def main() -> int:
    rows, faults = [], []
    for case in CASES:
        program = case.build()
        module = parse(compile_gradients(program))
        analysis = analyse(module, case.sizes)
        steady = steady_body(analysis)
        between = transfers(analysis, steady)
        over_dp = [c for c in analysis.collectives if set(DP) & set(c.axes)]
        in_steady = sum(c.computation == steady for c in over_dp)
        pieces = [c for c in over_dp if c.computation not in (steady, module.entry)]
        sizes = case.sizes
        rows.append(
            (
                case.name,
                f"{sizes.pp} x {sizes.dp} x {sizes.tp}",
                str(case.num_chunks),
                str(analysis.work[steady].products),
                *(
                    f"{between[d].products} matmuls, {between[d].kernels} kernels; "
                    f"{cover(between[d]):.1f}"
                    for d in ("backward", "forward")
                ),
                str(analysis.work[steady].products - _overlapping(between)),
                str(in_steady),
                _hidden(pieces),
                _hidden([c for c in analysis.collectives if c.role == "tp"]),
            )
        )
        faults += [
            f"{case.name}: {fault}" for fault in find_faults(module, analysis, program)
        ]
        print(*rows[-1], sep=" | ", flush=True)
    text = (
        "A tick of the steady loop runs one virtual stage forward and one backward. "
        "The forward half-tick runs while the gradient of the previous tick is sent "
        "to the previous stage, and the backward half-tick while the activation is "
        "sent to the next stage. The columns count what runs between the start and "
        "the end of each transfer in the schedule of the loop's body, including the "
        "matmuls of the loss, which the last stage runs; of each conditional, the "
        "branch with most FLOPs counts. The number behind them is the time of these "
        "matmuls, in times of the transfer, both modelled for an H200. Bounds: it is "
        "at least 1; and each matmul that overlaps no transfer (weight gradients at "
        "the end of the body) overlaps a collective over tp. No data-parallel "
        "collective is in that loop: those of ZeRO are in the loops of the warm-up "
        "and the cool-down. No gradient accumulator is copied. Compiled for H200s "
        "without a GPU; no transfer was timed."
    )
    if faults:
        text += f" Not met: {'; '.join(faults)}."
    header = (
        *("model", "pp x dp x tp", "chunks", "matmuls in the steady loop"),
        *(
            "overlapping the gradient's transfer",
            "overlapping the activation's transfer",
            "matmuls overlapping only collectives over tp",
        ),
        *("dp collectives in it", "overlapped in other loops", "overlapped over tp"),
    )
    table = Table(
        title="What overlaps the transfers", text=text, header=header, rows=rows
    )
    command = "python -m scripts.pipeline.pipeline_overlap"
    title = "Are transfers between stages overlapped?"
    print(write_page("pipeline_overlap", title, command, [table]))
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
