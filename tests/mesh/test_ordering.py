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


def sums(start, add=lambda c, total: c + total.sum().astype(c.dtype)):
    """A collective, and a loop with one whose carry starts from a constant."""

    def f(a, b):
        def body(carry, row):
            total = lax.psum(row, "x")
            return jax.tree.map(lambda c: add(c, total), carry), None

        return lax.psum(a, "x"), lax.scan(body, start(), b)[0]

    return f


def collectives_of_constants(a, b):
    return (
        lax.psum(a, "x"),
        lax.all_gather(jnp.zeros(3), "x"),
        lax.all_gather(jnp.zeros(3, bool), "x"),
        lax.psum_scatter(jnp.zeros(8), "x"),
        lax.ppermute(jnp.zeros(3), "x", [(i, (i + 1) % 8) for i in range(8)]),
        lax.pmax(b, "x"),
    )


def branches_of_a_constant(a, b):
    branches = [lambda: lax.psum(b, "x"), lambda: lax.pmax(b, "x")]
    return lax.psum(a, "x"), lax.switch(jnp.zeros((), jnp.int32), branches)


def counted_loop(a, b):
    def body(i, count):
        return count + lax.psum(a * i, "x").sum().astype(jnp.int32)

    return lax.psum(a, "x"), lax.fori_loop(0, 3, body, 0), lax.pmax(b, "x")


def loop_with_a_counter(a, b):
    def body(carry):
        return carry[0] + 1, carry[1] + lax.psum(carry[1], "x")

    loop = lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.int32(1)))
    return lax.psum(a, "x"), loop, lax.pmax(b, "x")


def loop_over_constants(a, b):
    _, sums = lax.scan(lambda _, x: (None, lax.psum(x, "x")), None, jnp.zeros((3, 2)))
    return lax.psum(a, "x"), sums, lax.pmax(b, "x")


def loop_with_an_empty_carry(a, b):
    def body(carry, row):
        return jnp.concatenate([carry, carry]), lax.psum(row, "x")

    return lax.psum(a, "x"), lax.scan(body, jnp.zeros(0), b)[1]


def loop_with_a_dead_carry(a, b):
    def body(carry, row):
        dead, kept = carry
        return (dead + lax.psum(row.sum(), "x"), kept + lax.psum(row, "x")), None

    return lax.psum(a, "x"), lax.scan(body, (a.sum(), a), b)[0][1]


def loop_inside_a_loop(a, b):
    def outer(total, row):
        start = (jnp.zeros(()), -jnp.inf)

        def inner(carry, x):
            return (carry[0] + lax.psum(x, "x"), jnp.maximum(carry[1], x)), None

        (added, largest), _ = lax.scan(inner, start, row)
        return total + added + lax.pmax(largest, "x"), None

    return lax.psum(a, "x"), lax.scan(outer, jnp.zeros(()), b)[0]


def counter_before_a_collective(a, b):
    def body(carry, row):
        return (carry[0] + 1, carry[1] + lax.psum(row, "x")), None

    (count, total), _ = lax.scan(body, (a.sum(), a), b)
    return total, lax.psum(count * a, "x"), lax.pmax(count, "x")


def as_numbers(results):
    def is_key(x):
        return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, results)


@pytest.mark.parametrize(
    "per_device",
    [
        *(
            pytest.param(sums(lambda x=x: jnp.asarray(x)), id=f"{x!r}")
            for x in (0.0, -0.0, 1.0, -np.inf, np.nan, 1e30, 0, 2**31 - 1, [0.0] * 8)
        ),
        pytest.param(sums(lambda: jnp.zeros((), jnp.bfloat16)), id="bfloat16"),
        pytest.param(sums(lambda: (0.0, jnp.zeros(8))), id="two"),
        pytest.param(sums(lambda: False, lambda c, t: c | (t > 9).any()), id="bool"),
        pytest.param(
            sums(
                lambda: jax.random.key(0),
                lambda c, total: jax.random.fold_in(c, total.sum().astype(int)),
            ),
            id="key",
        ),
        *(collectives_of_constants, branches_of_a_constant, counted_loop),
        *(loop_with_a_counter, loop_over_constants, loop_with_an_empty_carry),
        *(loop_with_a_dead_carry, loop_inside_a_loop, counter_before_a_collective),
    ],
)
def test_what_xla_knows_when_it_compiles_is_ordered_too(per_device):
    rows = jnp.arange(64.0).reshape(8, 8), jnp.arange(192.0).reshape(8, 3, 8)

    def with_rows(a, b):
        results = in_order(per_device)(a[0], b[0])
        return jax.tree.map(lambda x: x[None], as_numbers(results))

    mapped = jax.shard_map(
        with_rows, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    compiled = jax.jit(mapped).lower(*rows).compile()
    assert unordered(str(compiled.as_text())) == []
    want = jax.vmap(lambda a, b: as_numbers(per_device(a, b)), axis_name="x")(*rows)
    jax.tree.map(np.testing.assert_array_equal, compiled(*rows), want)


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
