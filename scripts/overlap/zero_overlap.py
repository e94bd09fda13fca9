"""Show, without a GPU, what ZeRO and HSDP send and what overlaps it.

    make env-plan && .venv/bin/python -m scripts.overlap.zero_overlap

Compiles the gradients of a model for described H200s with the options of training, and
reads XLA's schedule. Writes docs/benchmarks/zero_overlap.md. Exits with 1 if too little
is overlapped, or if data crosses nodes that should not.
"""

import dataclasses
import sys
from collections.abc import Iterator

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, Precision, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.hlo.analysis import Analysis, Collective, analyse
from mjax.plan.hlo.parse import parse
from mjax.step.program import Program, build_program
from scripts.evidence import Table, write_page

LEAST_OVERLAP = 0.8
"""Share of the data-parallel bytes, on two nodes."""

MODEL = ModelConfig(layers=24, d_model=2048, heads=16, vocab_size=32_768)
SEQ_LEN, ROWS = 2048, 4
SMALL_BYTES = 2**20
"""Bytes below which a collective is ignored: it sends the scale of a norm, or a
scalar."""
ITEM_BYTES = {"bf16": 2, "f32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ZeRO level on a mesh of data parallelism alone."""

    level: int
    dp_replicate: int
    dp_shard: int = 8
    microbatches: int = 1
    reduce: Precision = "float32"

    @property
    def sizes(self) -> AxisSizes:
        """Sizes of the mesh axes."""
        return AxisSizes(
            pp=1, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, tp=1
        )

    @property
    def name(self) -> str:
        """The mesh as the page shows it."""
        mesh = f"{self.dp_replicate} x {self.dp_shard}"
        return f"ZeRO-{self.level}, {mesh}, {self.microbatches} microbatches"

    def build(self, model: ModelConfig = MODEL) -> Program:
        """Build the program for described H200s, `ROWS` sequences per GPU and
        microbatch."""
        return build_program(
            model=model,
            optimizer=OptimConfig(),
            batch=BatchConfig(
                size=ROWS * self.microbatches * self.sizes.dp,
                microbatches=self.microbatches,
            ),
            precision=PrecisionConfig(reduce=self.reduce),
            seq_len=SEQ_LEN,
            num_steps=10,
            seed=0,
            zero_level=self.level,
            isolate_documents=True,
            mesh=described_mesh(self.sizes),
        )


TWO_NODES = (
    Case(level=2, dp_replicate=2),
    Case(level=2, dp_replicate=2, microbatches=4),
    Case(level=3, dp_replicate=2),
)
ONE_NODE = (
    Case(level=0, dp_replicate=1),
    Case(level=3, dp_replicate=1),
    Case(level=3, dp_replicate=1, reduce="bfloat16"),
)


def read(case: Case) -> Analysis:
    """Compile the gradients of a case and read what the schedule sends."""
    program = case.build()
    state = program.abstract_state
    lowered = program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    text = lowered.compile().as_text()
    assert text is not None
    return analyse(parse(text), case.sizes)


def num_params(model: ModelConfig = MODEL) -> tuple[int, int]:
    """Count the parameters of the layers, and of embedding, final norm and head."""
    layer = 12 * model.d_model**2 + model.d_model
    ends = 2 * model.padded_vocab * model.d_model + model.d_model
    return model.layers * layer, ends


def find_faults(case: Case, found: Analysis) -> Iterator[str]:
    """Return the faults on two nodes: superfluous or exposed bytes; empty is good."""
    hidden = found.overlapped_bytes_fraction("dp") or 0.0
    if hidden < LEAST_OVERLAP:
        yield f"{hidden:.1%} of the bytes are overlapped, less than {LEAST_OVERLAP:.0%}"
    crossing = 0
    for c in found.collectives:
        large = c.wire_bytes > SMALL_BYTES
        if c.kind == "all-gather" and c.dtype != "bf16" and large:
            yield f"a gather of {c.dtype}: {c.name}"
        if c.kind == "reduce-scatter" and c.tier != "node":
            yield f"a reduce-scatter leaves the node: {c.name}"
        if c.kind == "all-reduce" and c.tier == "node" and large:
            yield f"an all-reduce of whole gradients: {c.name}"
        if c.tier == "network" and large and c.axes != ("dp_replicate",):
            yield f"{c.name} crosses nodes over {', '.join(c.axes)}"
        crossing += c.wire_bytes * c.runs * (c.tier == "network")
    # An all-reduce over 2 devices sends its operand once: 1/dp_shard of the float32
    # gradients.
    share = 4 * sum(num_params()) / case.dp_shard
    if not share <= crossing < 1.001 * share:
        yield f"{crossing} bytes cross nodes, {share:.0f} are needed"


def main() -> int:
    """Write the page; return 1 if there is a fault."""
    pages = {case: read(case) for case in (*TWO_NODES, *ONE_NODE)}
    faults = [
        f"{case.name}: {fault}"
        for case in TWO_NODES
        for fault in find_faults(case, pages[case])
    ]
    write_page(
        "zero_overlap",
        "What do ZeRO and HSDP send, and what overlaps it?",
        "python -m scripts.overlap.zero_overlap",
        [
            _overlap_table({case: pages[case] for case in TWO_NODES}),
            _traffic_table({case: pages[case] for case in ONE_NODE}),
        ],
    )
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


def _overlap_table(found: dict[Case, Analysis]) -> Table:
    return Table(
        title="What overlaps the bytes on two nodes",
        text=(
            f"{MODEL.layers} layers of width {MODEL.d_model}, vocabulary "
            f"{MODEL.vocab_size}, {ROWS} rows of {SEQ_LEN} tokens a GPU and "
            "microbatch, 2 x 8 H200s: `dp_shard` is a node, `dp_replicate` the two. A "
            "byte counts as overlapped if a matmul or a kernel runs between the start "
            "and the end of its collective in the schedule. Gathers are bfloat16, "
            "reductions float32. The reduce-scatter stays in the node; the all-reduce "
            "sends 1/8 of the bytes across nodes, once per step. The exposed bytes are "
            "the gathers of the embedding and of the first layer, which the first "
            "matmul needs; the reductions of the first layer and of the embedding, "
            "after which there is no matmul; and the reduction of the head, which is "
            "ready before the backward pass of the layers but which XLA starts after "
            "it. Compiled for H200s without a GPU; no times were measured."
        ),
        header=("case", "GB a GPU sends", "overlapped", "of which", "exposed, MB"),
        rows=[
            (
                case.name,
                f"{analysis.wire_bytes('dp') / 1e9:.2f}",
                f"{analysis.overlapped_bytes_fraction('dp'):.1%}",
                ", ".join(_by_kind(analysis)),
                ", ".join(_exposed(analysis)),
            )
            for case, analysis in found.items()
        ],
    )


def _by_kind(analysis: Analysis) -> Iterator[str]:
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        bytes_of = [
            (c.wire_bytes * c.runs, c.is_overlapped)
            for c in analysis.collectives
            if c.kind == kind and c.role == "dp"
        ]
        total = sum(size for size, _ in bytes_of)
        hidden = sum(size for size, is_hidden in bytes_of if is_hidden)
        if total:
            yield f"{kind} {hidden / total:.1%}"


def _exposed(analysis: Analysis) -> Iterator[str]:
    for c in analysis.collectives:
        if c.role == "dp" and not c.is_overlapped and c.wire_bytes > SMALL_BYTES:
            times = f" x {c.runs}" if c.runs > 1 else ""
            yield f"{c.kind} {c.wire_bytes / 1e6:.0f}{times}"


def _traffic_table(found: dict[Case, Analysis]) -> Table:
    layers, ends = num_params()
    return Table(
        title="What ZeRO-3 sends against plain data parallelism",
        text=(
            "One node, 8 GPUs. Plain data parallelism all-reduces every gradient: 2 x "
            "7/8 of the parameters. ZeRO-3 gathers a layer in the forward pass and "
            "again in the backward pass (recomputation uses the same gathered "
            f"weights) and scatters its gradient: 3 x 7/8 of the {layers / 1e6:.0f} "
            "million parameters of the layers: 1.5 times as much. Embedding, norm and "
            f"head ({ends / 1e6:.0f} million) are gathered once: 2 x 7/8, as in plain "
            "data parallelism. Counted in the compiled program, with trip counts of "
            "loops; the share of these three is computed by that formula."
        ),
        header=(
            *("case", "--precision.reduce", "million elements sent", "layers"),
            "embedding and head",
            *("layers against plain", "MB sent"),
        ),
        rows=[_traffic_row(case, analysis) for case, analysis in found.items()],
    )


def _traffic_row(case: Case, analysis: Analysis) -> tuple[str, ...]:
    _, num_ends = num_params()
    sent = _elements(analysis.collectives)
    ends = 2 * 7 / 8 * num_ends
    layers = sent - ends
    plain = 2 * 7 / 8 * num_params()[0]
    return (
        case.name,
        case.reduce,
        f"{sent / 1e6:.1f}",
        f"{layers / 1e6:.1f}",
        f"{ends / 1e6:.1f}",
        f"{layers / plain:.3f}",
        f"{analysis.wire_bytes('dp') / 1e6:.0f}",
    )


def _elements(collectives: tuple[Collective, ...]) -> float:
    return sum(
        c.wire_bytes * c.runs / ITEM_BYTES[c.dtype]
        for c in collectives
        if c.dtype in ITEM_BYTES
    )


if __name__ == "__main__":
    sys.exit(main())
