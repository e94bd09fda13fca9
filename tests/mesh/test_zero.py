"""Gathers and scatters between nodes and inside them, against those in one step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.mesh import collectives, zero
from mjax.mesh.axes import AXES, SHARDS
from tests.training import make_mesh

SPECS = {"w": P(None, SHARDS), "v": P(("tp", *SHARDS)), "whole": P()}
WHOLE = {"w": P(), "v": P("tp"), "whole": P()}
NODES = pytest.mark.parametrize("nodes", [2, 4])


def values(dtype: Any) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (3, 16), "v": (16,), "whole": (5,)}
    return {
        name: jnp.asarray(rng.normal(size=shape), dtype)
        for name, shape in shapes.items()
    }


def gathered(nodes: int) -> dict[str, jax.Array]:
    def per_device(params: Any) -> Any:
        return zero.gather(jax.tree.map(collectives.vary, params), SPECS, "bfloat16")

    # Gathered arrays are the same on all devices, but their type does not say so.
    mapped = jax.shard_map(
        per_device,
        mesh=make_mesh((1, 1, 8, 1), nodes),
        in_specs=(SPECS,),
        out_specs=WHOLE,
        check_vma=False,
    )
    return jax.jit(mapped)(values(jnp.float32))


def reduced(nodes: int, level: int) -> dict[str, jax.Array]:
    def per_device(grads: Any) -> Any:
        place = jax.lax.axis_index(AXES).astype(jnp.float32)
        grads = jax.tree.map(lambda g: collectives.vary(g) * jnp.cos(place), grads)
        return zero.reduce_gradients(grads, SPECS, level=level, dtype="float32")

    mapped = jax.shard_map(
        per_device,
        mesh=make_mesh((1, 1, 8, 1), nodes),
        in_specs=(WHOLE,),
        out_specs=SPECS,
    )
    return jax.jit(mapped)(values(jnp.float32))


one_step = functools.cache(functools.partial(reduced, 1))


@NODES
def test_a_gather_in_two_steps_is_the_array_bit_for_bit(nodes: int):
    for name, array in gathered(nodes).items():
        want = values(jnp.float32)[name].astype("bfloat16")
        np.testing.assert_array_equal(array.astype("float32"), want.astype("float32"))


@NODES
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_reduction_in_two_steps_differs_from_one_by_rounding(nodes: int, level: int):
    """The 8 terms are added in another order: float32, at most 7 roundings each."""
    exact = np.cos(np.arange(8)).sum()
    for name, array in reduced(nodes, level).items():
        np.testing.assert_allclose(array, one_step(level)[name], rtol=8e-6)
        np.testing.assert_allclose(array, values("float32")[name] * exact, rtol=8e-6)
