"""A step whose first weights are gathered in a call of their own: the same bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.optim import OptimConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.parse import parse
from mjax.step.program import Program
from tests.training import TINY, Layout, make_batch, make_program

MODEL = dataclasses.replace(TINY, dropout=0.1)
DEEP = dataclasses.replace(MODEL, layers=4)
LAYOUTS = [
    Layout((1, 1, 2, 2), 2),
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            Layout((1, 1, 2, 1), 2, 4),
            Layout((1, 2, 2, 1), 3, 2),
            Layout((1, 1, 4, 1), 3, 2, nodes=2),
            Layout((2, 1, 2, 1), 2, 2, PipelineConfig(chunks=2)),
            Layout((2, 1, 2, 2), 1, 2, tp_chunks=2),
        )
    ),
]
OPTIMIZER = OptimConfig(name="adamw", lr=1e-2, warmup_steps=1)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def gathers(found: Analysis) -> float:
    """Count the bytes that a device sends in all-gathers over data parallelism."""
    return sum(
        c.wire_bytes * c.runs
        for c in found.collectives
        if (c.role, c.kind) == ("dp", "all-gather")
    )


def read(function: Any, args: Any, layout: Layout) -> tuple[Any, Analysis]:
    compiled = function.lower(*args).compile(compiler_options=QUICK)
    sizes = layout.sizes
    return compiled, analyse(
        parse(compiled.as_text()), sizes, sizes.dp_shard * sizes.tp
    )


def bits(tree: Any) -> list[bytes]:
    # Of copies: an array that numpy shares is not donated afterwards.
    return [np.asarray(jnp.copy(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def donated(state: Any) -> int:
    """Count the leaves that a step has taken."""
    return sum(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def poisoned(state: Any) -> Any:
    """Return a state whose gradients are not finite."""
    norm = state.params["final_norm"]
    params = state.params | {"final_norm": jax.tree.map(lambda x: x * jnp.nan, norm)}
    return dataclasses.replace(state, params=params)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_with_gathered_weights_computes_the_same_bits(layout: Layout) -> None:
    model = MODEL if layout.pipeline is None else DEEP
    whole, split = (
        make_program(layout, model, OPTIMIZER, "bfloat16", gather_first=gather_first)
        for gather_first in (False, True)
    )
    assert whole.gather_first is None
    assert split.gather_first is not None
    params = split.abstract_state.params
    gather, of_gather = read(split.gather_first, (params,), layout)
    steps = [read(p.train_step, p.abstract_args, layout) for p in (whole, split)]
    (step, of_step), (rest, of_rest) = steps
    # Nothing is gathered twice, and something before the step.
    assert gathers(of_gather) > 0
    assert gathers(of_step) == gathers(of_gather) + gathers(of_rest)

    state = whole.init()
    states, skipped = [state, jax.tree.map(jnp.copy, state)], []
    for number in range(3):
        if number == 2:
            states = [poisoned(state) for state in states]
        before, batch = states[1], make_batch(split, number)
        first = gather(before.params)
        placed = jax.tree.map(lambda x: x.sharding, (first, split.abstract_first))
        assert placed[0] == placed[1]
        want, got = step(states[0], batch), rest(before, batch, first)
        assert bits(got) == bits(want)
        assert donated(before) == donated(states[0])
        assert donated(before) > 0.9 * len(jax.tree.leaves(before))
        states = [want[0], got[0]]
        skipped.append(int(got[1]["skipped"]))
    assert skipped == [0, 0, 1]


def test_what_is_gathered_is_the_embedding_and_the_first_layer() -> None:
    layout = Layout((1, 1, 2, 1), 2)
    program: Program = make_program(layout, MODEL, gather_first=True)
    sizes = [leaf.size // 2 for leaf in jax.tree.leaves(program.abstract_first)]
    params = program.abstract_state.params
    layer = [leaf.size // MODEL.layers for leaf in jax.tree.leaves(params["blocks"])]
    embed = [leaf.size for leaf in jax.tree.leaves(params["embed"])]
    assert sorted(sizes) == sorted(embed + layer)
