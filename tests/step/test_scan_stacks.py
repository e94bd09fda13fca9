"""A scan into stacks that are not initialised returns what lax.scan returns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.step import stacks

_GARBAGE = {"f": np.nan, "i": 7, "b": True}


def _with_garbage(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Stand for memory that was used before: a CPU initialises with zeros."""
    return jnp.full(shape, _GARBAGE[np.dtype(dtype).kind], dtype)


def _body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    y = carry * 0.5 + x
    return y, {"out": jnp.outer(y, y), "rank": (x.astype(jnp.int32), y > 0)}


def _run(scan: Any) -> Any:
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    def run(carry: jax.Array) -> Any:
        carry, stacked = scan(_body, carry, jnp.arange(5.0))
        return carry, jax.tree.map(lambda stack: stack[None], stacked)

    carry = jax.device_put(jnp.arange(6.0), NamedSharding(mesh, P("dp")))
    return run(carry)


def test_every_entry_of_the_stacks_is_written(monkeypatch: Any):
    monkeypatch.setattr(lax, "empty", _with_garbage)
    got, want = _run(stacks.scan), _run(lax.scan)
    jax.tree.map(np.testing.assert_array_equal, got, want)
