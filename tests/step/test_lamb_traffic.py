"""What LAMB adds to the communication of a step compiled for described GPUs."""

from collections import Counter

import pytest

from mjax.config.optim import OptimConfig, OptimName
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.compile import OPTIONS
from mjax.plan.hlo.collectives import list_collectives
from mjax.plan.hlo.parse import parse
from mjax.step.program import build_program

SIZES = AxisSizes(pp=1, dp_replicate=1, dp_shard=4, tp=2)


def collectives_of(optimizer: OptimName) -> Counter[tuple[str, tuple[str, ...]]]:
    """Count the collectives of a step by kind and mesh axes."""
    mesh = described_mesh(SIZES)
    program = build_program(
        model=ModelConfig(
            layers=2, d_model=256, heads=4, vocab_size=512, attention="reference"
        ),
        optimizer=OptimConfig(name=optimizer),
        batch=BatchConfig(size=16),
        precision=PrecisionConfig(),
        seq_len=64,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=mesh,
    )
    lowered = program.trace().lower()
    text = str(lowered.compile(compiler_options=dict(OPTIONS)).as_text())
    found = list_collectives(parse(text), AxisSizes(**mesh.shape))
    return Counter((c.kind, c.axes) for c in found)


@pytest.mark.plan
@pytest.mark.slow
def test_lamb_adds_one_all_reduce_for_each_set_of_axes():
    """The lengths of all tensors that are sharded alike leave together, once."""
    added = collectives_of("lamb") - collectives_of("adamw")
    assert added == {
        ("all-reduce", ("dp_shard",)): 1,
        ("all-reduce", ("dp_shard", "tp")): 1,
    }
