"""Fused projections over tp: at once and in chunks, against one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from mjax.layers.linear import (
    Joined,
    column_parallel,
    join_columns,
    join_rows,
    row_parallel,
)
from mjax.mesh import collectives
from mjax.mesh.axes import AXES, DP, PP
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


def through(
    num_chunks: int, x: jax.Array, joined_in: Joined, joined_out: Joined
) -> jax.Array:
    """In, something that must see the sequence in order, and out again."""
    widths = [F1 // lax.axis_size("tp"), F2 // lax.axis_size("tp")]
    q, up = column_parallel(x, joined_in, widths, num_chunks)
    mixed = jnp.cumsum(collectives.to_natural(q), 1) / LENGTH
    mixed = collectives.to_relative(mixed, whole=num_chunks == 1)
    return row_parallel([mixed, jnp.tanh(up)], joined_out, num_chunks)


def weigh(y: jax.Array) -> jax.Array:
    """Return a sum of the entries of an output, weighted."""
    y = y.astype(jnp.float32)
    at = collectives.sequence_offset(y.shape[1]) + jnp.arange(y.shape[1])
    return jnp.sum(y * jnp.cos(at)[None, :, None])


def run(num_chunks: int, dtype: Any = jnp.float32, tp: int = TP) -> dict[str, Any]:
    """Return the output and the gradients of a sum of its entries, weighted."""

    def loss(a: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        joined = join_columns([a["a"], a["b"]]), join_rows([a["oa"], a["ob"]])
        y = through(num_chunks, a["x"], *joined)
        return weigh(y), y.astype(jnp.float32)

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
    return jax.lax.psum(x, (PP, *DP))


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


@pytest.mark.parametrize(("num_chunks", "dtype"), [(1, "float32"), (8, "bfloat16")])
def test_a_projection_adds_its_gradient_to_the_total(num_chunks: int, dtype: str):
    """In float32, also where the weights are bfloat16: nothing is rounded between."""

    def per_device(a: dict[str, jax.Array]) -> Any:
        a = jax.tree.map(collectives.vary, a)
        joined = join_columns([a["a"], a["b"]]), join_rows([a["oa"], a["ob"]])

        def gradients(x: jax.Array, start: float | None) -> Any:
            def with_total(w: Joined) -> Joined:
                if start is None:
                    return w
                assert isinstance(w.weight, jax.Array)
                total = jnp.full_like(w.weight, start, jnp.float32)
                return w._replace(total=total)

            return jax.grad(lambda joined: weigh(through(num_chunks, x, *joined)))(
                tuple(map(with_total, joined))
            )

        def ordinary(x: jax.Array) -> list[jax.Array]:
            return [d.weight.astype(jnp.float32) for d in gradients(x, None)]

        added = gradients(a["x"], 2.0)
        errors = [
            jnp.abs(d.total - 2 - want).max() / jnp.abs(want).max()
            for d, want in zip(added, ordinary(a["x"]), strict=True)
        ]
        zeros = [jnp.abs(d.weight).max() for d in added]
        return jax.tree.map(lambda x: lax.pmax(x, AXES), (errors, zeros))

    everywhere = PartitionSpec()
    fn = jax.shard_map(
        per_device,
        mesh=make_mesh((1, 1, 1, TP)),
        in_specs=(SPECS,),
        out_specs=([everywhere] * 2, [everywhere] * 2),
    )
    errors, zeros = jax.jit(fn)(arguments(dtype))
    assert max(errors) < (4e-3 if dtype == "bfloat16" else 2e-6)
    assert max(zeros) == 0


def sum_over_tp(how: Callable[[jax.Array], jax.Array]) -> float:
    """Mean error of a sum of bfloat16 shards over tp, relative to the mean result."""
    x = jax.random.normal(jax.random.key(1), (TP, TP, BATCH, 64, D), jnp.bfloat16)

    def per_device(x: jax.Array) -> jax.Array:
        return _drop(how(collectives.vary(x[0])), SPECS["x"])

    fn = jax.shard_map(
        per_device,
        mesh=make_mesh((1, 1, 1, TP)),
        in_specs=PartitionSpec("tp"),
        out_specs=PartitionSpec(None, "tp"),
    )
    # Entry k of a device is for the device k places further.
    owner = (np.arange(TP)[:, None] + np.arange(TP)) % TP
    want = np.zeros((TP, BATCH, 64, D))
    for device in range(TP):
        want[owner[device]] += np.asarray(x[device], np.float64)
    got = np.asarray(jax.jit(fn)(x), np.float64)
    want = np.moveaxis(want, 0, 1).reshape(got.shape)
    return float(np.abs(got - want).mean() / np.abs(want).mean())


def straight(x: jax.Array) -> jax.Array:
    return collectives.scatter_chunks(collectives.cut_chunks(x, TP))


def at_once(x: jax.Array) -> jax.Array:
    return collectives.scatter_chunks([collectives.to_natural(x)[None]])


def ring(x: jax.Array) -> jax.Array:
    """What this is not: partial sums that go from device to device, rounded at each."""
    total = x[TP - 1]
    for k in range(TP - 2, -1, -1):
        total = collectives._send_by(total, 1) + x[k]
    return total


def test_a_sum_over_tp_is_rounded_once():
    at_once_error, error, ring_error = map(sum_over_tp, (at_once, straight, ring))
    assert error <= at_once_error
    assert ring_error > 1.5 * error


def test_bfloat16_rounds_no_more_in_chunks_than_at_once():
    by_chunks = {n: errors(run(n, jnp.bfloat16)) for n in (1, 8)}
    assert max(by_chunks[1].values()) > 1e-3
    for name, error in by_chunks[8].items():
        assert error <= by_chunks[1][name], name


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
