"""Compiled for an H200, projections are FP8 matmuls, and tp carries 8 bits."""

import collections
from collections.abc import Iterator

import pytest

from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.hlo.analysis import analyse
from mjax.plan.hlo.parse import Computation, Instruction, Module, arrays, parse
from tests.plan.compiled import compiled_text, described_program

SIZES = AxisSizes(pp=2, dp_replicate=1, dp_shard=1, tp=2)
LAYERS, D, HEADS, T, MICROBATCHES, CHUNKS = 8, 256, 4, 128, 4, 2
PER_CHUNK = LAYERS // (2 * SIZES.pp)
# q | k | v | feed-forward in, and attention | feed-forward out, of one device.
IN, OUT = (D, 7 * D // SIZES.tp), (5 * D // SIZES.tp, D)
MATRICES = {IN, IN[::-1], OUT, OUT[::-1]}
F8 = "__cublas$lt$matmul$f8"


@pytest.fixture(scope="module")
def text() -> str:
    program = described_program(
        SIZES,
        model=ModelConfig(
            layers=LAYERS, d_model=D, heads=HEADS, vocab_size=512, remat="core"
        ),
        batch=BatchConfig(size=MICROBATCHES, microbatches=MICROBATCHES),
        precision=PrecisionConfig(matmul="fp8"),
        seq_len=T,
        pipeline=PipelineConfig(chunks=2),
        tp_chunks=CHUNKS,
    )
    return compiled_text(program, "gradients")


def ticks(module: Module) -> list[Computation]:
    """Return the bodies of the loops over ticks."""
    entry = module.computations[module.entry]
    loops = [x for x in entry.instructions if x.opcode == "while"]
    return [module.computations[x.body] for x in loops if "ticks" in x.op_name]


def matmuls(
    module: Module, body: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    """Walk the matmuls of a computation and of all that it calls."""
    for x in body.instructions:
        if "cublas" in x.target:
            yield x, body
        for name in x.called:
            yield from matmuls(module, module.computations[name])


@pytest.mark.plan
def test_every_matmul_of_a_projection_is_in_8_bits(text: str) -> None:
    module = parse(text)
    most = collections.Counter[tuple[str, str, str]]()
    for body in ticks(module):
        found = collections.Counter[tuple[str, str, str]]()
        for x, inside in matmuls(module, body):
            factors = [inside.by_name[name].array for name in x.operands[:2]]
            result = arrays(x.result)[0]
            shapes = {a.dims for a in (*factors, result)}
            if x.target == F8:
                found[factors[0].dtype, factors[1].dtype, result.dtype] += 1
            else:
                assert not shapes & MATRICES, x.name
            # Both scales are operands, none is multiplied with afterwards; a sum of
            # gradients is added to in place.
            if x.target == F8 and result.dtype == "f32":
                assert '"beta":1' in x.attributes["backend_config"]
                assert x.attributes["output_to_operand_aliasing"] == "{{0}: (2, {})}"
        most |= found
    # Of each layer two projections, in chunks where the sequence travels.
    assert most == {
        ("f8e4m3fn", "f8e4m3fn", "bf16"): 2 * CHUNKS * PER_CHUNK,
        ("f8e5m2", "f8e4m3fn", "bf16"): 2 * CHUNKS * PER_CHUNK,
        ("f8e4m3fn", "f8e5m2", "f32"): 2 * PER_CHUNK,
    }


@pytest.mark.plan
def test_tp_carries_operands_in_8_bits(text: str) -> None:
    sent = collections.Counter[str]()
    for c in analyse(parse(text), SIZES, 8).collectives:
        if c.kind == "collective-permute" and c.role == "tp":
            sent[c.dtype] += c.wire_bytes * c.runs
    eight = sum(n for dtype, n in sent.items() if dtype.startswith("f8"))
    # Of a layer: activations forward and backward and a gradient, one byte each entry;
    # two partial sums of two bytes. In bfloat16 all five have two.
    assert eight / sent["bf16"] == pytest.approx(3 / 4, rel=0.35)
    assert set(sent) >= {"bf16", "f8e4m3fn"}
