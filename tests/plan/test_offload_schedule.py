"""Copies of inputs to the host and back run beside the layers of a compiled step."""

import pytest

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.plan.compile import OPTIONS
from mjax.plan.hlo.parse import Computation, Instruction, Module, arrays, parse
from mjax.plan.hlo.work import CUBLAS
from mjax.step.program import build_program

HORIZON = 2


@pytest.fixture(scope="module")
def module() -> Module:
    program = build_program(
        model=ModelConfig(
            layers=6,
            d_model=128,
            heads=2,
            vocab_size=128,
            attention="blocked",
            remat="offload",
            offload_horizon=HORIZON,
        ),
        optimizer=OptimConfig(),
        batch=BatchConfig(size=4),
        precision=PrecisionConfig(),
        seq_len=128,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=False,
        mesh=described_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)),
    )
    state = program.abstract_state
    lowered = program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    text = lowered.compile(compiler_options=dict(OPTIONS)).as_text()
    assert text is not None
    return parse(text)


def is_on_host(x: Instruction) -> bool:
    return any(a.is_on_host for a in arrays(x.result))


def copies(body: Computation, *, to_host: bool) -> list[Instruction]:
    """List the starts in a computation that copy to the host, or from it."""
    starts = [x for x in body.instructions if x.opcode.endswith("-start")]
    if to_host:
        return [x for x in starts if is_on_host(x)]
    read = [x for x in starts if any(map(is_on_host, body.operands(x)))]
    return [x for x in read if not is_on_host(x)]


def loop_with(module: Module, *, to_host: bool) -> Computation:
    """Return the body of the only loop with such a copy."""
    loops = [
        module.computations[x.body]
        for x in module.computations[module.entry].instructions
        if x.opcode == "while"
    ]
    [body] = [body for body in loops if copies(body, to_host=to_host)]
    return body


def matmuls(instructions: tuple[Instruction, ...]) -> int:
    return sum(x.target.startswith(CUBLAS) for x in instructions)


def during(body: Computation, start: Instruction) -> tuple[Instruction, ...]:
    """Return what stands between a start and its done."""
    done = body.places[body.done_of[start.name]]
    return body.instructions[body.places[start.name] + 1 : done]


def carried_to(body: Computation, x: Instruction) -> list[int]:
    """List the places in the carry to which a value goes unchanged."""
    moves = ("bitcast", "copy", "fusion-done", "copy-done")
    found: list[int] = []
    for user in body.instructions:
        if x.name not in user.operands:
            continue
        if user.is_root:
            found += [at for at, name in enumerate(user.operands) if name == x.name]
        elif user.opcode in moves:
            found += carried_to(body, user)
    return found


def of_carry(body: Computation, place: int) -> Instruction:
    """Return the value at a place of the carry, as a turn finds it."""
    [found] = [
        x
        for x in body.instructions
        if x.opcode == "get-tuple-element"
        and int(x.attributes["index"]) == place
        and body.operands(x)[0].opcode == "parameter"
    ]
    return found


@pytest.mark.plan
def test_an_input_goes_to_the_host_while_its_layer_computes(module: Module) -> None:
    body = loop_with(module, to_host=True)
    [start] = copies(body, to_host=True)
    assert matmuls(during(body, start)) >= 1
    # Nothing waits in the same turn for what another one copies.
    assert copies(body, to_host=False) == []


@pytest.mark.plan
def test_an_input_is_loaded_a_horizon_of_layers_before_it_is_read(
    module: Module,
) -> None:
    body = loop_with(module, to_host=False)
    [start] = copies(body, to_host=False)
    # The whole turn of the loop, one layer, runs beside the copy.
    assert matmuls(during(body, start)) == matmuls(body.instructions) > 0
    turns, value = 0, start
    while places := carried_to(body, value):
        [place] = places
        value = of_carry(body, place)
        turns += 1
    assert turns == HORIZON
    readers = [x for x in body.instructions if value.name in x.operands]
    assert any(x.opcode == "fusion" for x in readers)


@pytest.mark.plan
def test_the_host_keeps_one_input_a_layer(module: Module) -> None:
    stacks = {
        a.dims
        for computation in module.computations.values()
        for x in computation.instructions
        for a in arrays(x.shape)
        if a.is_on_host
    }
    assert stacks == {(6, 4, 128, 128)}
