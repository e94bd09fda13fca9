import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mjax.mesh.ordering import in_order
from tests.mesh.unordered import unordered

MESH = Mesh(np.array(jax.devices()), ("x",))


def loops_and_gathers(w, c):
    """Two loops with collectives, and collectives before, between and after them."""

    def loop(x):
        def body(x, row):
            parts = [lax.all_gather(row[k], "x", tiled=True) for k in range(3)]
            for part in parts:
                x = jnp.tanh(x + part)
            return x, lax.psum(row.sum(), "x")

        return lax.scan(body, x, w)

    first, sums = loop(jnp.ones(8))
    count = lax.psum((c > 0).sum(), "x")
    head = lax.all_gather(c, "x", tiled=True)
    second, _ = jax.checkpoint(loop)(head)
    choice = lax.cond(
        count > 3, lambda v: lax.pmax(v, "x"), lambda v: lax.pmin(v, "x"), c.sum()
    )
    key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))
    moved = lax.ppermute(c, "x", [(i, (i + 1) % 8) for i in range(8)])
    noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("x")))
    return first, second, sums, count, (choice + noise)[None], moved


def mapped(f):
    return jax.jit(
        jax.shard_map(
            f,
            mesh=MESH,
            in_specs=(P(None, None, "x"), P("x")),
            out_specs=(P("x"), P("x"), P(), P(), P("x"), P("x")),
            check_vma=False,
        )
    )


ARGUMENTS = (
    np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32),
    np.arange(8, dtype=np.float32) - 3.5,
)


def compiled_text(f) -> str:
    return str(mapped(f).lower(*ARGUMENTS).compile().as_text())


def test_without_it_collectives_have_no_order():
    assert len(unordered(compiled_text(loops_and_gathers))) > 5


def test_each_collective_depends_on_the_one_before_it():
    assert unordered(compiled_text(in_order(loops_and_gathers))) == []


def test_the_results_are_the_same_bits():
    want = mapped(loops_and_gathers)(*ARGUMENTS)
    got = mapped(in_order(loops_and_gathers))(*ARGUMENTS)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0])
def test_a_value_that_orders_others_does_not_change_them(value: float):
    def f(x):
        first = lax.psum(x * value, "x")
        return first, lax.psum(x, "x")

    both = jax.shard_map(in_order(f), mesh=MESH, in_specs=P("x"), out_specs=(P(), P()))
    _, second = jax.jit(both)(jnp.arange(8.0))
    assert second.tolist() == [28.0]


def test_a_loop_whose_collectives_nobody_needs_is_no_obstacle():
    def f(x):
        def body(carry, _):
            lax.psum(carry, "x")
            return carry, None

        kept, _ = lax.scan(body, x, None, length=3)
        return lax.psum(kept, "x")

    mapped = jax.shard_map(in_order(f), mesh=MESH, in_specs=P("x"), out_specs=P())
    assert jax.jit(mapped)(jnp.arange(8.0)).tolist() == [28.0]


def test_what_is_ordered_keeps_the_scopes_that_it_was_traced_in():
    def scoped(x):
        def body(x, row):
            with jax.named_scope("inner"):
                return lax.psum(x * row, "x"), None

        with jax.named_scope("outer"):
            x = jax.jit(lambda x: lax.psum(x, "x"))(x)
            return lax.scan(body, x, jnp.ones(3))[0]

    f = jax.shard_map(
        in_order(scoped), mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False
    )
    text = jax.jit(f).lower(jnp.ones(())).as_text(debug_info=True)
    assert set(re.findall(r"(?:outer|inner)/psum", text)) == {
        "outer/psum",
        "inner/psum",
    }


def test_a_reduction_over_one_device_is_left_out():
    mesh = Mesh(MESH.devices[:, None], ("x", "one"))

    def f(x):
        most, total = lax.pmax(x, "one"), lax.psum(x, "one")
        return lax.psum(most * total, "x")

    both = ("x", "one")
    mapped = jax.shard_map(in_order(f), mesh=mesh, in_specs=P(both), out_specs=P())
    compiled = jax.jit(mapped).lower(jnp.arange(8.0)).compile()
    assert str(compiled.as_text()).count(" all-reduce(") == 1
    assert compiled(jnp.arange(8.0)).tolist() == [140.0]
