"""Bytes alive at once in small functions, counted by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.estimate import liveness
from mjax.mesh.host_memory import to_host
from mjax.trace.vjp import row_major

N = 64
SQUARE = 4 * N * N
"""Bytes of a float32 [N, N]."""
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def peak(f: Callable[..., Any], *args: Any) -> int:
    return liveness.peak_bytes(jax.make_jaxpr(f)(*args))


def test_a_chain_of_products_holds_two_at_once():
    assert peak(lambda x: x @ x @ x @ x, X) == 2 * SQUARE


def test_a_value_that_is_read_later_is_held_until_then():
    def f(x: jax.Array) -> jax.Array:
        first = x @ x
        return (first @ x @ x) @ first

    assert peak(f, X) == 3 * SQUARE


def test_what_only_a_sum_reads_is_never_in_memory():
    assert peak(lambda x: (jnp.sin(x) * 2.0 + 1.0).sum(), X) == 4


def test_what_a_product_reads_is_in_memory():
    # sin(x), then the matmul beside it.
    assert peak(lambda x: jnp.sin(x) @ x, X) == 2 * SQUARE


def test_a_result_takes_the_place_of_a_value_that_ends():
    # The matmul's result, overwritten by its sine.
    assert peak(lambda x: jnp.sin(x @ x), X) == SQUARE


def test_a_view_is_the_buffer_it_is_made_of():
    assert peak(lambda x: (x @ x).T.reshape(-1, 2), X) == SQUARE
    assert peak(lambda x: row_major(x @ x), X) == SQUARE


def test_an_update_is_in_place_unless_the_old_value_is_read_later():
    def update(x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x @ x, x[0], 3, 0)

    def update_a_copy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ x
        return lax.dynamic_update_index_in_dim(y, x[0], 3, 0), y

    assert peak(update, X) == SQUARE
    assert peak(update_a_copy, X) == 2 * SQUARE


def test_a_loop_holds_its_carry_one_turn_and_what_it_stacks():
    def f(x: jax.Array) -> Any:
        def turn(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            carry = carry @ x
            return carry, carry[0]

        return lax.scan(turn, x @ x, length=10)

    # The carry, the next carry, and ten rows.
    assert peak(f, X) == 2 * SQUARE + 10 * 4 * N


def test_a_loop_updates_a_buffer_in_place():
    def f(x: jax.Array) -> Any:
        def turn(i: jax.Array, ring: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(ring, x @ x, i, 0)

        return lax.fori_loop(0, 10, turn, jnp.zeros((10, N, N)))

    # A counter, the ring, and the new entry.
    assert 11 * SQUARE <= peak(f, X) <= 11 * SQUARE + 16


def test_a_condition_costs_the_larger_branch():
    def f(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x)

    assert peak(f, X) == 2 * SQUARE + 4  # and the index of the branch


def test_calls_are_looked_into():
    inner = jax.jit(lambda x: x @ x @ x)
    assert peak(lambda x: inner(x) @ x, X) == 2 * SQUARE
    assert peak(lambda x: jax.checkpoint(inner)(x) @ x, X) == 2 * SQUARE


def test_a_name_is_found_at_any_depth():
    def f(x: jax.Array) -> jax.Array:
        return lax.map(lambda row: checkpoint_name(row * 2, "row"), x)

    found = list(liveness.named(jax.make_jaxpr(f)(X), "row"))
    assert [(aval.shape, aval.dtype) for aval in found] == [((N,), jnp.float32)]
    assert list(liveness.named(jax.make_jaxpr(f)(X), "column")) == []


def test_arrays_in_host_memory_are_counted_apart():
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return x @ x, to_host(x)

        x, stack = lax.scan(turn, x, length=5)
        return x, stack, to_host(x)

    found = jax.make_jaxpr(f)(X)
    assert liveness.peak_bytes(found, on_host=True) == 6 * SQUARE
    assert liveness.peak_bytes(found) < 4 * SQUARE


def test_a_function_without_a_shard_map_is_refused():
    with pytest.raises(ValueError, match="the step has no shard_map"):
        liveness.main_shard_map(jax.make_jaxpr(lambda x: x)(X))
