"""XLA combines the weights of one layer, and not two layers, at our thresholds."""

import pytest

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, CombineConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.compile import OPTIONS
from mjax.plan.hlo.analysis import Collective, analyse
from mjax.plan.hlo.parse import parse
from mjax.step.program import build_program

SIZES = AxisSizes(pp=1, dp_replicate=1, dp_shard=8, tp=1)
LAYERS, D, VOCAB = 4, 128, 8192  # embedding and head are larger than a layer
NUM_WEIGHTS = 7  # a norm, q, k, v, attention output, two of the feed-forward layer
NUM_ENDS = 3  # embedding, final norm, head
LAYER = 12 * D * D + D


def collectives(combine: CombineConfig) -> list[Collective]:
    """Compile the gradients of a step; return what carries weights or gradients."""
    program = build_program(
        model=ModelConfig(
            layers=LAYERS, d_model=D, heads=2, vocab_size=VOCAB, attention="reference"
        ),
        optimizer=OptimConfig(),
        batch=BatchConfig(size=8, microbatches=1),
        precision=PrecisionConfig(),
        combine=combine,
        seq_len=128,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=False,
        mesh=described_mesh(SIZES),
    )
    state = program.abstract_state
    lowered = program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    text = lowered.compile(compiler_options=dict(OPTIONS)).as_text()
    assert text is not None
    return list(analyse(parse(text), SIZES, 8).collectives)


def count(found: list[Collective], kind: str) -> int:
    return sum(c.runs for c in found if c.kind == kind)


def largest(found: list[Collective], kind: str) -> int:
    """Return the most bytes of one collective, apart from embedding and head."""
    ends = {VOCAB * D * itemsize * 7 // 8 for itemsize in (2, 4)}
    sent = [c.wire_bytes for c in found if c.kind == kind]
    return max(num_bytes for num_bytes in sent if num_bytes not in ends)


@pytest.mark.plan
def test_a_layer_is_gathered_and_reduced_in_one_collective_and_no_two_layers_are():
    found = collectives(CombineConfig())
    assert count(found, "all-gather") == LAYERS + NUM_ENDS
    assert count(found, "reduce-scatter") == LAYERS + NUM_ENDS
    assert largest(found, "all-gather") == 2 * LAYER * 7 // 8
    assert largest(found, "reduce-scatter") == 4 * LAYER * 7 // 8


@pytest.mark.plan
def test_less_than_a_layer_keeps_weights_apart_and_more_merges_a_layer_with_others():
    found = collectives(CombineConfig(gather_bytes=0, reduce_bytes=2**30))
    assert count(found, "all-gather") == LAYERS * NUM_WEIGHTS + NUM_ENDS
    assert count(found, "reduce-scatter") < LAYERS + NUM_ENDS
    assert largest(found, "reduce-scatter") > 4 * (LAYER + 2 * VOCAB * D) * 7 // 8
