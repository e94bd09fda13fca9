"""Fused projections over tp: at once and in chunks, against one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mjax.layers.linear import column_parallel, row_parallel
from mjax.mesh import collectives
from tests.training import make_mesh

BATCH, LENGTH, D, F1, F2, TP = 2, 32, 48, 64, 128, 8
SPECS = {
    "x": PartitionSpec(None, "tp"),
    "a": PartitionSpec(None, "tp"),
    "b": PartitionSpec(None, "tp"),
    "oa": PartitionSpec("tp"),
    "ob": PartitionSpec("tp"),
}


def arguments(dtype: Any) -> dict[str, jax.Array]:
    shapes = {
        "x": (BATCH, LENGTH, D),
        "a": (D, F1),
        "b": (D, F2),
        "oa": (F1, D),
        "ob": (F2, D),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def through(num_chunks: int, a: dict[str, jax.Array]) -> jax.Array:
    """In, something that must see the sequence in order, and out again."""
    q, up = column_parallel(a["x"], [a["a"], a["b"]], num_chunks)
    mixed = jnp.cumsum(collectives.to_natural(q), 1) / LENGTH
    mixed = collectives.to_relative(mixed, whole=num_chunks == 1)
    return row_parallel([mixed, jnp.tanh(up)], [a["oa"], a["ob"]], num_chunks)


def run(num_chunks: int, dtype: Any = jnp.float32, tp: int = TP) -> dict[str, Any]:
    """Return the output and the gradients of a sum of its entries, weighted."""

    def loss(a: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = through(num_chunks, a).astype(jnp.float32)
        at = collectives.sequence_offset(y.shape[1]) + jnp.arange(y.shape[1])
        return jnp.sum(y * jnp.cos(at)[:, None]), y

    def per_device(a: dict[str, jax.Array]) -> tuple[Any, Any]:
        a = jax.tree.map(collectives.vary, a)
        grads, y = jax.grad(loss, has_aux=True)(a)
        return y, grads

    mesh = make_mesh((1, 1, 1, tp))
    everywhere = PartitionSpec(None, "tp")
    fn = jax.shard_map(
        lambda a: jax.tree.map(_drop, per_device(a), (everywhere, SPECS)),
        mesh=mesh,
        in_specs=(SPECS,),
        out_specs=(everywhere, SPECS),
    )
    y, grads = jax.jit(fn)(arguments(dtype))
    return {"y": y, **grads}


def _drop(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The other axes have size 1: a sum over them changes the type alone."""
    del spec
    return jax.lax.psum(x, ("pp", "dp_replicate", "dp_shard"))


@functools.cache
def exact() -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, run(1, tp=1))


def errors(found: dict[str, Any]) -> dict[str, float]:
    """Largest difference over the largest magnitude, for each array."""
    return {
        name: float(
            np.abs(np.asarray(found[name], np.float32) - want).max()
            / np.abs(want).max()
        )
        for name, want in exact().items()
    }


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
def test_any_number_of_chunks_is_one_device(num_chunks: int):
    assert max(errors(run(num_chunks)).values()) < 5e-6


def test_bfloat16_rounds_no_more_in_chunks_than_at_once():
    at_once, chunks = (errors(run(n, jnp.bfloat16)) for n in (1, 8))
    assert max(at_once.values()) > 1e-3
    for name, error in chunks.items():
        assert error <= 1.1 * at_once[name], name


def test_the_order_of_chunks_is_undone():
    def there_and_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = collectives.vary(x)
        chunks = jnp.concatenate(collectives.gather_chunks(x, 4))
        natural = collectives.to_natural(chunks)
        difference = chunks - collectives.to_relative(natural, whole=False)
        return _drop(natural[None], SPECS["x"]), _drop(difference[None], SPECS["x"])

    x = jnp.arange(BATCH * LENGTH * 3.0).reshape(BATCH, LENGTH, 3)
    fn: Callable[..., Any] = jax.shard_map(
        there_and_back,
        mesh=make_mesh((1, 1, 1, TP)),
        in_specs=PartitionSpec(None, "tp"),
        out_specs=(PartitionSpec("tp"), PartitionSpec("tp")),
    )
    natural, difference = jax.jit(fn)(x)
    np.testing.assert_array_equal(natural, np.broadcast_to(x, natural.shape))
    assert not difference.any()
