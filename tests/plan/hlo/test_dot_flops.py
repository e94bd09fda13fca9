"""FLOPs of matrix products, on programs whose count is known."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mjax.plan.hlo.counts import count_dot_flops

SQUARE = 2 * 16**3


def count(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    return count_dot_flops(text)


def repeat(x, times):
    return lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, length=times)[0]


def test_a_product_costs_two_flops_per_multiply_add():
    x, y = jnp.ones((3, 5, 7)), jnp.ones((3, 7, 11))
    assert (
        count(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), x, y) == 2 * 3 * 5 * 7 * 11
    )


def test_two_contracted_dims_multiply():
    x, y = jnp.ones((4, 6, 8)), jnp.ones((4, 6, 10))
    assert count(lambda x, y: jnp.einsum("abi,abj->ij", x, y), x, y) == 2 * 24 * 80


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_loop_counts_as_often_as_it_runs(dtype):
    assert count(lambda x: repeat(x, 7), jnp.ones((16, 16), dtype)) == 7 * SQUARE


def test_nested_loops_multiply():
    def nested(x):
        def body(c, _):
            return repeat(c, 5), None

        return lax.scan(body, x, None, length=3)[0]

    assert count(nested, jnp.ones((16, 16))) == 15 * SQUARE


def test_a_conditional_counts_its_dearest_branch():
    def either(p, x):
        return lax.cond(p, lambda x: repeat(x, 3), lambda x: repeat(x, 4), x)

    def one_of(i, x):
        branches = [lambda x, n=n: repeat(x, n) for n in (2, 6, 4)]
        return lax.switch(i, branches, x)

    x = jnp.ones((16, 16))
    assert count(either, jnp.array(True), x) == 4 * SQUARE
    assert count(one_of, jnp.array(1), x) == 6 * SQUARE


def test_a_program_without_products_counts_zero():
    assert count(lambda x: jnp.sin(x).sum(), jnp.ones(16)) == 0


def test_sharded_programs_count_per_device():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x", None)
    product = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec)
    assert count(product, jnp.ones((64, 16))) == 2 * 8 * 8 * 16


def test_a_loop_of_unknown_length_is_refused_only_if_it_holds_dots():
    def until(x, step):
        return lax.while_loop(lambda c: c.sum() < 100, step, x)

    x = jnp.ones((16, 16))
    assert count(lambda x: until(x, lambda c: c + 1), x) == 0
    with pytest.raises(ValueError, match="trip count is unknown"):
        count(lambda x: until(x, lambda c: c @ c), x)


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="not an HLO module"):
        count_dot_flops("hello")


MODULE = """HloModule example, is_scheduled=true

ENTRY %main (x: f32[4,8], y: f32[8,2]) -> f32[4,2] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %y = f32[8,2]{{1,0}} parameter(1)
  ROOT %out = f32[4,2]{{1,0}} {product}
}}
"""


@pytest.mark.parametrize(
    "product",
    [
        "dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "dot(f32[4,8]{1,0} %x, f32[8,2]{1,0} %y), lhs_contracting_dims={1}",
        'custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config='
        '{"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"]}}}',
    ],
)
def test_products_of_xla_and_of_cublas_are_counted(product):
    assert count_dot_flops(MODULE.format(product=product)) == 2 * 4 * 8 * 2


@pytest.mark.parametrize(
    "product",
    [
        'custom-call(%x, %y), custom_call_target="__onednn$matmul"',
        'custom-call(%x, %y), custom_call_target="__cudnn$fmha"',
        "convolution(%x, %y), dim_labels=bf_io->bf",
    ],
)
def test_a_product_inside_a_library_call_is_refused(product):
    with pytest.raises(ValueError, match="cannot count the matmul in out"):
        count_dot_flops(MODULE.format(product=product))
