"""With every axis of size 1 the step multiplies what the model says, and no more."""

import pytest

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.compile import OPTIONS
from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.parse import parse
from mjax.step.program import build_program

ONE = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)


def compile_step(layers: int) -> Analysis:
    program = build_program(
        model=ModelConfig(
            layers=layers,
            d_model=256,
            heads=4,
            vocab_size=512,
            remat="none",
            attention="mosaic_gpu",
        ),
        optimizer=OptimConfig(),
        batch=BatchConfig(size=1),
        precision=PrecisionConfig(),
        seq_len=256,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=described_mesh(ONE),
    )
    lowered = program.trace().lower()
    text = str(lowered.compile(compiler_options=dict(OPTIONS)).as_text())
    return analyse(parse(text), ONE)


@pytest.mark.plan
@pytest.mark.slow
def test_one_gpu_multiplies_what_the_model_says_and_sends_nothing():
    """A parallel block: two products, each again for both gradients. A head: three."""
    few, many = compile_step(2), compile_step(5)
    assert few.collectives == many.collectives == ()
    assert many.num_products - few.num_products == (5 - 2) * 6
    assert few.num_products == 2 * 6 + 3
