"""With every axis of size 1 the step multiplies what the model says, and no more."""

import pytest

from mjax.config.step import BatchConfig
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.parse import arrays, parse
from tests.plan.compiled import compiled_text, described_program

ONE = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)


def compile_step(layers: int) -> Analysis:
    program = described_program(
        ONE,
        model=ModelConfig(
            layers=layers,
            d_model=256,
            heads=4,
            vocab_size=512,
            remat="none",
            attention="mosaic_gpu",
        ),
        batch=BatchConfig(size=1),
        seq_len=256,
    )
    return analyse(parse(compiled_text(program, "step")), ONE)


@pytest.mark.plan
@pytest.mark.slow
def test_one_gpu_multiplies_what_the_model_says_and_sends_nothing():
    """A parallel block: two products, each again for both gradients. A head: three."""
    few, many = compile_step(2), compile_step(5)
    assert few.collectives == many.collectives == ()
    assert many.num_products - few.num_products == (5 - 2) * 6
    assert few.num_products == 2 * 6 + 3


@pytest.mark.plan
def test_stacks_of_saved_activations_are_neither_filled_nor_copied():
    program = described_program(
        ONE,
        model=ModelConfig(layers=5, d_model=256, heads=4, vocab_size=512, remat="none"),
        batch=BatchConfig(size=1),
        seq_len=256,
    )
    module = parse(compiled_text(program, "gradients"))
    stacks = [
        x
        for x in module.computations[module.entry].instructions
        if x.opcode not in ("parameter", "get-tuple-element", "tuple", "while")
        and any(
            a.dtype == "bf16" and a.dims[:2] in ((5, 1), (4, 1))
            for a in arrays(x.shape)
        )
    ]
    assert len(stacks) > 5
    assert {x.target for x in stacks} == {"AllocateBuffer"}
