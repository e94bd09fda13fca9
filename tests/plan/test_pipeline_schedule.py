"""What a pipeline sends, and how often it chooses, in the schedule made for H200s."""

import collections
import itertools
import re

import pytest

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.pipeline.schedule import build
from mjax.plan.compile import OPTIONS
from mjax.plan.hlo.analysis import Analysis, Collective, analyse
from mjax.plan.hlo.parse import Computation, Instruction, Module, parse
from mjax.plan.reading import count_runs
from mjax.step.program import Program, build_program

# tp in eight chunks inside a node, stages and dp across: as megascale-175b, but with
# four stages of two chunks of two layers. Wide, as the scheduler weighs transfers
# against matmuls.
SIZES = AxisSizes(pp=4, dp_replicate=1, dp_shard=4, tp=8)
CHUNKS, LAYERS, D, ROWS, MICROBATCHES = 2, 2, 12_288, 4, 4
VOCAB = 64_000
KIND = re.compile(r"shard_map/(?:\S+/body/(?:eval_jaxpr/)*)?(\S*)cond$")


@pytest.fixture(scope="module")
def program() -> Program:
    return build_program(
        model=ModelConfig(
            layers=SIZES.pp * CHUNKS * LAYERS,
            d_model=D,
            heads=96,
            vocab_size=VOCAB,
            remat="full",
            attention="reference",  # its matmuls are in the text
        ),
        optimizer=OptimConfig(),
        batch=BatchConfig(
            size=ROWS * MICROBATCHES * SIZES.dp, microbatches=MICROBATCHES
        ),
        precision=PrecisionConfig(),
        seq_len=2048,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=described_mesh(SIZES),
        pipeline=PipelineConfig(chunks=CHUNKS),
        tp_chunks=SIZES.tp,
    )


@pytest.fixture(scope="module")
def module(program: Program) -> Module:
    state = program.abstract_state
    lowered = program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    # The schedule is the same without LLVM's optimisation of the kernels.
    quick = {"xla_backend_optimization_level": 0}
    text = lowered.compile(compiler_options=dict(OPTIONS) | quick).as_text()
    assert text is not None
    return parse(text)


@pytest.fixture(scope="module")
def analysis(module: Module) -> Analysis:
    return analyse(module, SIZES)


def in_loops(analysis: Analysis, module: Module, kind: str) -> list[Collective]:
    return [
        c
        for c in analysis.collectives
        if (c.role, c.kind) == ("dp", kind) and c.computation != module.entry
    ]


@pytest.mark.plan
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_every_piece_of_a_chunk_is_overlapped(kind: str, analysis, module):
    pieces = in_loops(analysis, module, kind)
    assert pieces
    assert [c for c in pieces if not c.is_overlapped] == []


def outside_loops(analysis: Analysis, module: Module, kind: str) -> list[Collective]:
    """Return the matrices that are sent between the loops over ticks."""
    return [
        c
        for c in analysis.collectives
        if (c.role, c.kind, c.computation) == ("dp", kind, module.entry)
        if c.wire_bytes > D * D // SIZES.tp // SIZES.dp
    ]


def is_table(c: Collective) -> bool:
    """Say whether this is the embedding or the head."""
    num_bytes = {"bf16": 2, "f32": 4}[c.dtype]
    part = VOCAB * D // SIZES.tp // SIZES.dp
    return c.wire_bytes == num_bytes * part * (SIZES.dp - 1)


@pytest.mark.plan
def test_weights_are_gathered_in_the_order_of_their_first_use(analysis, module):
    gathers = outside_loops(analysis, module, "all-gather")
    assert [is_table(c) for c in gathers[:1]] == [True]  # the embedding
    layers = {"in": 7 * D * D // SIZES.tp, "out": 5 * D * D // SIZES.tp}
    sent = [2 * size * (SIZES.dp - 1) // SIZES.dp for size in layers.values()]
    of_layers, later = gathers[1 : 1 + 2 * LAYERS], gathers[1 + 2 * LAYERS :]
    assert sorted(c.wire_bytes for c in of_layers) == sorted(sent * LAYERS)
    assert any(is_table(c) for c in later)  # the head, beside pieces
    computation = module.computations[module.entry]
    groups = [gathers[:1]]
    groups += [of_layers[n : n + 2] for n in range(0, 2 * LAYERS, 2)] + [later]
    for before, after in itertools.pairwise(groups):
        done = [computation.places[computation.done_of[c.name]] for c in before]
        assert max(done) < min(computation.places[c.name] for c in after)


@pytest.mark.plan
def test_no_gather_starts_before_one_whose_weights_are_read_earlier(analysis, module):
    computation = module.computations[module.entry]
    read = [
        first_read(computation, computation.done_of[c.name])
        for c in by_start(computation, outside_loops(analysis, module, "all-gather"))
    ]
    assert len(read) == 2 + 2 * LAYERS + 2  # embedding, head, a chunk, the first pieces
    assert read == sorted(read)


@pytest.mark.plan
def test_no_reduction_starts_before_one_whose_gradients_are_ready_earlier(
    analysis, module
):
    computation = module.computations[module.entry]
    loops = [computation.places[x.name] for x in instructions(computation, "while")]
    ready = []
    for c in by_start(computation, outside_loops(analysis, module, "reduce-scatter")):
        start = computation.places[c.name]
        # One that starts after a loop was ready at its end at the latest.
        before = max(place for place in loops if place < start)
        ready.append(max(before, produced(module, computation, c.name)))
    # Embedding, head, the layers of the first chunk, the pieces of two ticks.
    assert len(ready) == 2 + 2 * LAYERS + 4
    assert ready == sorted(ready)
    assert len(set(ready)) > LAYERS


def instructions(computation: Computation, opcode: str) -> list[Instruction]:
    return [x for x in computation.instructions if x.opcode == opcode]


def by_start(computation: Computation, found: list[Collective]) -> list[Collective]:
    return sorted(found, key=lambda c: computation.places[c.name])


def first_read(computation: Computation, name: str) -> int:
    """Return the place of the first instruction that reads a value.

    Tuples are followed to their members; a bitcast is the value itself.
    """
    readers: dict[str, list[Instruction]] = {}
    for x in computation.instructions:
        for operand in x.operands:
            readers.setdefault(operand, []).append(x)
    places: list[int] = []
    values: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    while values:
        value, members = values.pop()
        for x in readers.get(value, []):
            if x.opcode == "tuple":
                at = [n for n, operand in enumerate(x.operands) if operand == value]
                values += [(x.name, (n, *members)) for n in at]
            elif x.opcode == "get-tuple-element":
                # Of a done with several results each is read by itself.
                if not members or members[0] == int(x.attributes["index"]):
                    values.append((x.name, members[1:]))
            elif x.opcode == "bitcast":
                values.append((x.name, members))
            else:
                places.append(computation.places[x.name])
    return min(places)


def produced(module: Module, computation: Computation, name: str) -> int:
    """Return the place of the last loop, branch or matmul before a value.

    What lies between only casts, adds or orders its bytes anew.
    """
    found, names, seen = [0], [name], {name}
    while names:
        for x in computation.operands(computation.by_name[names.pop()]):
            inside = [
                i
                for called in x.called
                for i in module.computations[called].instructions
            ]
            opcodes = {x.opcode, *(i.opcode for i in inside if x.opcode == "fusion")}
            if opcodes & {"while", "conditional", "custom-call", "dot"}:
                found.append(computation.places[x.name])
            elif x.name not in seen:
                seen.add(x.name)
                names.append(x.name)
    return max(found)


@pytest.mark.plan
def test_the_head_is_gathered_in_the_warm_up_and_reduced_in_the_cool_down(
    analysis, module
):
    gathers = filter(is_table, outside_loops(analysis, module, "all-gather"))
    assert [c.is_overlapped for c in gathers] == [False, True]
    reductions = filter(is_table, outside_loops(analysis, module, "reduce-scatter"))
    assert [c.is_overlapped for c in reductions] == [True, False]


@pytest.mark.plan
def test_what_is_overlapped_over_dp_is_all_but_a_layer_and_the_embedding(analysis):
    # What the first matmul needs, and what the last one makes.
    layer, table = 12 * D * D // SIZES.tp, VOCAB * D // SIZES.tp
    exposed, total = layer + table, CHUNKS * LAYERS * layer + 2 * table
    fraction = analysis.overlapped_bytes_fraction("dp")
    assert fraction >= 1 - exposed / total - 0.01
    assert fraction > 0.7


@pytest.mark.plan
def test_every_chunk_over_tp_is_overlapped_in_ticks(analysis, module):
    # Where weights are exchanged too, the first matmul does not wait for a chunk.
    chunks = [
        c
        for c in analysis.collectives
        if (c.role, c.kind) == ("tp", "collective-permute")
        if c.computation != module.entry
    ]
    assert chunks
    assert [c for c in chunks if not c.is_overlapped] == []


@pytest.mark.plan
def test_choices_of_ticks_are_counted_by_the_schedule(analysis, module):
    schedule = build(
        "interleaved-1f1b",
        num_stages=SIZES.pp,
        num_chunks=CHUNKS,
        num_microbatches=MICROBATCHES,
    )
    runs = count_runs(module, analysis, schedule)
    found: dict[str, float] = collections.defaultdict(float)
    for computation in module.computations.values():
        for x in computation.instructions:
            if x.branches and (kind := KIND.search(x.op_name)):
                found[kind[1] or "embed"] += runs[analysis.branches[x.name]]
    # One stage embeds and one computes the loss. Each changes its chunk once.
    assert found == pytest.approx(
        {
            **{"embed": MICROBATCHES, "phase.backward/": MICROBATCHES},
            **{"phase.loss/": MICROBATCHES},
            **{"exchange/": CHUNKS - 1, "phase.backward/exchange/": CHUNKS - 1},
        }
    )
