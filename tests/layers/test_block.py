"""The structure of a block, read from what JAX traces."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from mjax.layers.block import JoinedParams
from mjax.layers.linear import Joined
from mjax.mesh import collectives, zero
from mjax.mesh.axes import AXES, AxisSizes
from mjax.model.transformer import Params, Transformer, abstract_params
from mjax.step.state import param_specs
from tests.training import (
    EVERY_OPTION,
    LENGTH,
    ONE_DEVICE,
    ROWS,
    TINY,
    make_mesh,
    make_program,
)


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda v: isinstance(v, (Jaxpr, ClosedJaxpr)),
        ):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if isinstance(inner, Jaxpr):
                yield from equations(inner)


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize(
    ("block", "activation", "num_projections"),
    [("parallel", "gelu", 2), ("parallel", "swiglu", 2), ("serial", "swiglu", 4)],
)
def test_projections_that_share_input_or_output_are_one_product(
    block, activation, num_projections
) -> None:
    """q, k, v and feed-forward in at once, attention and feed-forward out at once."""
    model = dataclasses.replace(
        TINY, block=block, activation=activation, attention="reference"
    )
    program = make_program(ONE_DEVICE, model)
    jaxpr = jax.make_jaxpr(program.eval_step)(
        program.abstract_state.params, program.abstract_batch
    )
    weights = [
        equation.invars[1].aval.shape
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
        and equation.invars[1].aval.ndim == equation.invars[0].aval.ndim == 2
    ]
    # One scan over the layers holds the block once; the head reads the vocabulary.
    blocks = [shape for shape in weights if model.padded_vocab not in shape]
    assert len(blocks) == num_projections


@pytest.mark.promotion(dtype="standard", rank="allow")
def test_offload_keeps_the_input_of_each_block_in_host_memory_only() -> None:
    """Of the residual stream nothing but the host copies waits for the backward pass.

    XLA:CPU has one memory and drops the transfers, so they are read from the trace.
    """

    def stacked_residuals(remat: str) -> list[str]:
        model = dataclasses.replace(TINY, remat=remat, layers=5)
        program = make_program(ONE_DEVICE, model)
        trace = program.trace()
        shape = rf"\[5,{ROWS},{LENGTH},{TINY.d_model}\]"
        return re.findall(rf"f32(<\w+>)?{shape}", str(trace.jaxpr))

    assert set(stacked_residuals("full")) == {""}
    assert set(stacked_residuals("offload")) == {"<host>"}


@pytest.mark.promotion(dtype="standard", rank="allow")
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_joined_weights_never_wait_for_the_backward_pass(remat) -> None:
    """One stack of them would be a copy of all weights of the model."""
    model = dataclasses.replace(TINY, remat=remat, layers=5)
    program = make_program(ONE_DEVICE, model)
    trace = program.trace()
    width = 3 * TINY.d_model + TINY.ffn_width  # q | k | v | feed-forward in
    text = str(trace.jaxpr)
    assert f"f32[{TINY.d_model},{width}]" in text
    assert f"f32[5,{TINY.d_model},{width}]" not in text
    # The outputs of that product: one stack, or the parts it is split into, or none.
    keeps_product = f"f32[5,1,{ROWS},{LENGTH},{width}]" in text
    assert keeps_product is (remat == "dots")


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize(
    ("block", "activation", "kv_heads", "tp"),
    [
        ("parallel", "swiglu", 2, 4),
        ("serial", "geglu_tanh", 8, 2),
        ("serial", "gelu", 2, 2),
    ],
)
def test_joined_weights_have_the_gradients_of_stored_ones(
    block, activation, kv_heads, tp
) -> None:
    """Also where tp exceeds the key/value heads, each of which two devices use."""
    model = dataclasses.replace(
        EVERY_OPTION, block=block, activation=activation, kv_heads=kv_heads
    )
    graph, state = nnx.split(Transformer(model, rngs=nnx.Rngs(3)))
    params = nnx.to_pure_dict(state)
    one = jax.tree.map(lambda x: x[0] + 0.01, params["blocks"])
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=tp)
    specs = param_specs(abstract_params(model)[1], sizes, shard_over_dp=False)
    specs = jax.tree.map(lambda s: PartitionSpec(*s[1:]), specs["blocks"])

    def per_device(stored: Params, x: jax.Array) -> tuple[Params, Params]:
        stored, x = jax.tree.map(collectives.vary, (stored, x))
        whole = nnx.merge(graph, nnx.to_pure_dict(state))
        layer = whole.pattern(whole.context(jnp.arange(LENGTH)[None], None)).one

        def gradients(params: Any) -> Any:
            apply = layer(0, in_loop=False)
            context = whole.context(jnp.arange(LENGTH)[None], None), None
            y, pull = jax.vjp(lambda p: apply(x, p, 0, context), params)
            return pull(jnp.sin(y))[0]

        blocks, projections = whole.blocks, {}
        for name, w in blocks.join(stored).items():
            projections[name] = Joined(w, jnp.full_like(w, 2.0))
        found = gradients(JoinedParams(projections, blocks.others(stored)))
        sums = {name: d.total - 2 for name, d in found.projections.items()}
        weights = blocks.separate(sums, stored)
        got = _merged(weights, found.others)
        reduced = [
            zero.reduce_over(AXES, grads, specs) for grads in (got, gradients(stored))
        ]
        return reduced[0], reduced[1]

    mapped = jax.shard_map(
        per_device,
        mesh=make_mesh((1, 1, 1, tp)),
        in_specs=(specs, PartitionSpec(None, "tp")),
        out_specs=(specs, specs),
    )
    x = jax.random.normal(jax.random.key(0), (1, LENGTH, model.d_model))
    got, want = jax.jit(mapped)(one, x)

    def check(a: jax.Array, b: jax.Array) -> None:
        # Float32; the total of 2 rounds what is added to it.
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max() + 3e-6)

    jax.tree.map(check, got, want)


def _merged(a: Params, b: Params) -> Params:
    """Merge nested dicts that have no leaf in common."""
    both = a | b
    for name in a.keys() & b.keys():
        both[name] = _merged(a[name], b[name])
    return both


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_a_cached_core_gets_rotated_keys_and_changes_nothing_else(block, tp) -> None:
    """Its weights are multiplied one by one: sums in another order, float32."""
    model = dataclasses.replace(EVERY_OPTION, block=block, kv_heads=8)
    graph, state = nnx.split(Transformer(model, rngs=nnx.Rngs(3)))
    params = nnx.to_pure_dict(state)
    one = jax.tree.map(lambda x: x[0] + 0.01, params["blocks"])
    mesh = make_mesh((1, 1, 1, tp))
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=tp)
    specs = param_specs(abstract_params(model)[1], sizes, shard_over_dp=False)
    specs = jax.tree.map(lambda s: PartitionSpec(*s[1:]), specs["blocks"])

    def per_device(params: Any, x: jax.Array) -> Any:
        whole = nnx.merge(graph, nnx.to_pure_dict(state))
        blocks = nnx.merge(nnx.graphdef(whole.blocks), params)
        context = whole.context(jnp.arange(LENGTH)[None], None)
        cached = context._replace(cached=lambda core, *qkv: (core(*qkv), qkv[1:]))
        kind = model.kinds[0]
        plain = blocks(x, kind, context, None)
        return plain, *blocks.apply(x, kind, cached, None)

    split, heads = PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp")
    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(specs, split),
        out_specs=(split, split, (heads, heads)),
    )
    x = jax.random.normal(jax.random.key(0), (1, LENGTH, model.d_model))
    plain, cached, (k, v) = jax.jit(mapped)(one, x)
    np.testing.assert_allclose(cached, plain, rtol=2e-5, atol=2e-6)
    assert k.shape == v.shape == (1, LENGTH, 8, model.head_width)
    # The first position is not rotated, the others are: equal inputs, other keys.
    same = jnp.broadcast_to(x[:, :1], x.shape)
    _, _, (k, v) = jax.jit(mapped)(one, same)
    np.testing.assert_allclose(v, jnp.broadcast_to(v[:, :1], v.shape), atol=1e-6)
    assert float(jnp.abs(k - k[:, :1]).max()) > 1e-3
