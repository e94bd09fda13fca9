"""A step compiled now, for H200s without one, sends and computes what theory says."""

import math

import jax
import pytest

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.compile import OPTIONS
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.parse import Module, parse
from mjax.plan.replay import replay
from mjax.step.program import Program, build_program

SIZES = AxisSizes(pp=1, dp_replicate=1, dp_shard=2, tp=4)
GPUS_PER_NODE = 4  # tp inside a node, dp across
LAYERS, D, HEADS, VOCAB, T, ROWS = 3, 256, 4, 512, 256, 4
LOCAL_ROWS = ROWS // SIZES.dp


@pytest.fixture(scope="module")
def program() -> Program:
    return build_program(
        model=ModelConfig(
            layers=LAYERS,
            d_model=D,
            heads=HEADS,
            vocab_size=VOCAB,
            remat="full",
            attention="reference",  # its products are in the text
        ),
        optimizer=OptimConfig(),
        batch=BatchConfig(size=ROWS, microbatches=1),
        precision=PrecisionConfig(),
        seq_len=T,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=described_mesh(SIZES, gpus_per_node=GPUS_PER_NODE),
        pipeline=PipelineConfig(),
    )


@pytest.fixture(scope="module")
def module(program: Program) -> Module:
    state = program.abstract_state
    lowered = program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    text = lowered.compile(compiler_options=dict(OPTIONS)).as_text()
    assert text is not None
    return parse(text)


@pytest.fixture(scope="module")
def analysis(module: Module) -> Analysis:
    return analyse(module, SIZES, GPUS_PER_NODE)


def sent(analysis: Analysis, kind: str, role: str, dtype: str) -> int:
    return sum(
        c.wire_bytes * c.runs
        for c in analysis.collectives
        if (c.kind, c.role, c.dtype) == (kind, role, dtype)
    )


@pytest.mark.plan
def test_tp_gathers_and_scatters_the_sequence_once_per_layer_and_pass(analysis):
    one = LOCAL_ROWS * T * D * 2 * (SIZES.tp - 1) // SIZES.tp
    # Forward, computed again, and the gradient that a scatter hands back; the head's
    # input, and the gradient of the embedding's output.
    assert sent(analysis, "all-gather", "tp", "bf16") == one * (3 * LAYERS + 2)
    # Forward and backward; the embedding's output and the head's gradient.
    assert sent(analysis, "reduce-scatter", "tp", "bf16") == one * (2 * LAYERS + 2)


@pytest.mark.plan
def test_dp_gathers_in_bf16_and_scatters_in_f32_every_parameter_once(program, analysis):
    leaves = jax.tree.leaves(program.abstract_state.params)
    stored = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    others = SIZES.dp_shard - 1
    assert sent(analysis, "all-gather", "dp", "bf16") == 2 * stored * others
    assert sent(analysis, "reduce-scatter", "dp", "f32") == 4 * stored * others
    assert [c for c in analysis.collectives if c.role in ("pp", "mixed")] == []
    gathers = [c for c in analysis.collectives if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"bf16"}


@pytest.mark.plan
def test_axes_links_and_communicators_are_those_of_the_mesh(analysis):
    links = {(c.axes, c.group_size, c.tier) for c in analysis.collectives}
    assert links == {(("tp",), 4, "node"), (("dp_shard",), 2, "network")}
    assert analysis.communicators == 2


@pytest.mark.plan
def test_products_and_their_flops_are_those_of_the_model(analysis):
    tokens = LOCAL_ROWS * T
    column = (3 * D * D + D * 4 * D) // SIZES.tp  # q, k, v and the MLP's first, as one
    row = (D * D + 4 * D * D) // SIZES.tp
    head = VOCAB * D // SIZES.tp
    # Forward and two backward; what full remat computes again ends before the row
    # products, whose result no gradient needs.
    layer = 3 * (column + row) + column
    attention = LOCAL_ROWS * HEADS // SIZES.tp * T * T * (D // HEADS)
    # Two products forward, again, and twice as many backward; squares, not triangles.
    expected = LAYERS * (tokens * layer + 8 * attention) + tokens * 3 * head
    # The gradient of the embedding adds up tokens in blocks, and then the blocks.
    block = 64
    expected += tokens * block * D + (tokens // block) ** 2 * D
    assert analysis.flops == 2 * expected
    assert analysis.num_products == LAYERS * (7 + 8) + 3 + 2


@pytest.mark.plan
def test_the_modelled_step_is_no_faster_than_its_products(module, analysis):
    gpu = GPUS["h200"]
    played = replay(module, analysis, CostModel.of(gpu))
    assert played.compute_s > analysis.flops / gpu.peak_bf16_flops_per_s
    assert played.step_s == pytest.approx(
        played.compute_s + sum(played.exposed_s.values())
    )
    assert set(played.exposed_s) <= {"tp", "dp"}
