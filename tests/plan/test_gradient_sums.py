"""In a compiled tick matmuls add gradients to their sums, and nothing joins weights."""

from collections.abc import Iterator

import pytest

from mjax.config.step import BatchConfig
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.hlo.parse import Array, Computation, Instruction, Module, arrays, parse
from tests.plan.compiled import compiled_text, described_program

SIZES = AxisSizes(pp=2, dp_replicate=1, dp_shard=2, tp=2)
LAYERS, D, HEADS, T, MICROBATCHES = 8, 256, 4, 128, 4
PER_CHUNK = LAYERS // (2 * SIZES.pp)
# q | k | v | feed-forward in, and attention | feed-forward out, of one device.
IN, OUT = (D, 7 * D // SIZES.tp), (5 * D // SIZES.tp, D)


@pytest.fixture(scope="module")
def module() -> Module:
    program = described_program(
        SIZES,
        model=ModelConfig(layers=LAYERS, d_model=D, heads=HEADS, vocab_size=512),
        batch=BatchConfig(size=2 * MICROBATCHES, microbatches=MICROBATCHES),
        seq_len=T,
        pipeline=PipelineConfig(chunks=2),
    )
    return parse(compiled_text(program, "gradients"))


def ticks(module: Module) -> list[Computation]:
    """Return the bodies of the loops over ticks."""
    entry = module.computations[module.entry]
    loops = [x for x in entry.instructions if x.opcode == "while"]
    return [module.computations[x.body] for x in loops if "ticks" in x.op_name]


def inside(module: Module, body: Computation) -> Iterator[Instruction]:
    """Walk a computation and all that it calls, but the choices."""
    for x in body.instructions:
        yield x
        if x.opcode != "conditional":
            for name in x.called:
                yield from inside(module, module.computations[name])


def is_matmul(x: Instruction) -> bool:
    return x.opcode == "custom-call" and "cublas" in x.target


def makes(x: Instruction, dtype: str) -> bool:
    """Say whether one result of x is like a joined matrix, or a stack of them."""
    passes_on = ("parameter", "get-tuple-element", "tuple", "while", "conditional")
    return x.opcode not in passes_on and any(
        a.dtype == dtype and a.dims[-2:] in (IN, OUT) for a in arrays(x.shape)
    )


@pytest.mark.plan
def test_gradients_are_added_inside_their_matmuls(module) -> None:
    found = []
    for body in ticks(module):
        made = [x for x in inside(module, body) if makes(x, "f32")]
        sums = [x for x in made if is_matmul(x)]
        assert all('"beta":1' in x.attributes["backend_config"] for x in sums)
        aliases = {x.attributes.get("output_to_operand_aliasing") for x in sums}
        assert aliases <= {"{{0}: (2, {})}"}
        # Beside them, pieces are cut out of stacks to be reduced.
        others = [x for x in made if not is_matmul(x)]
        assert {x.opcode for x in others} <= {"bitcast"}, others
        found.append(len(sums))
    # Two projections a layer, in every loop that has backward slots.
    assert set(found) - {0} == {2 * PER_CHUNK}


@pytest.mark.plan
def test_weights_are_joined_before_the_first_tick(module) -> None:
    for body in ticks(module):
        joins = [
            x
            for x in inside(module, body)
            if x.opcode == "concatenate" and makes(x, "bf16")
        ]
        assert joins == []
    assert Array("bf16", IN) in {
        a for body in ticks(module) for x in body.instructions for a in arrays(x.shape)
    }
