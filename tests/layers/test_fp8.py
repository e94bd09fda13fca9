"""Quantised tensors and their matmuls, against float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mjax.layers import fp8
from mjax.mesh import collectives
from mjax.mesh.axes import DP, PP
from tests.training import make_mesh

# Rounding to m bits of mantissa is off by at most half a unit in the last place.
ROUNDING = {fp8.FORWARD: 2.0**-4, fp8.BACKWARD: 2.0**-3}
FORMATS = pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.BACKWARD])


def normal(*shape: int, seed: int = 0, dtype: DTypeLike = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def value_of(q: fp8.Quantised) -> np.ndarray:
    return np.asarray(q.values, np.float64) * float(q.scale)


@FORMATS
@pytest.mark.parametrize("magnitude", [1e-30, 3e-5, 1.0, 448.0, 449.0, 1e30])
def test_a_value_is_rounded_once_whatever_the_magnitude(dtype, magnitude: float):
    x = normal(64, 64) * magnitude
    q = fp8.quantise(x, dtype)
    info = jnp.finfo(dtype)
    error = np.abs(value_of(q) - np.asarray(x, np.float64))
    # Subnormal numbers all have the same last place.
    smallest = float(info.smallest_normal) * float(q.scale)
    allowed = ROUNDING[dtype] * np.maximum(np.abs(x), smallest)
    assert q.values.dtype == dtype
    assert np.all(error <= allowed)
    assert error.max() > 0  # it is rounded


@FORMATS
@pytest.mark.parametrize("largest", [1e-25, 0.7, 1.0, 448.0, 57344.0, 1e30])
def test_the_scale_is_the_smallest_power_of_two_that_avoids_overflow(dtype, largest):
    q = fp8.quantise(jnp.array([0.1 * largest, -largest], jnp.float32), dtype)
    assert np.frexp(float(q.scale))[0] == 0.5
    top = float(jnp.finfo(dtype).max)
    assert top / 2 < np.float32(largest) / float(q.scale) <= top


def test_what_is_quantised_again_stays_as_it_is():
    once = fp8.quantise(normal(64, 64), fp8.FORWARD).dequantised()
    again = fp8.quantise(once, fp8.FORWARD).dequantised()
    np.testing.assert_array_equal(np.asarray(once), np.asarray(again))


def test_zeros_stay_zeros():
    for x in (jnp.zeros((4, 4)), jnp.zeros((4, 4), jnp.bfloat16)):
        q = fp8.quantise(x, fp8.FORWARD)
        assert float(q.scale) == 1
        assert not np.any(value_of(q))


@FORMATS
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_stays_visible_in_every_product(dtype, bad: float):
    x = normal(8, 16).at[3, 5].set(bad)
    q = fp8.quantise(x, dtype)
    w = fp8.quantise(normal(4, 16), fp8.FORWARD)
    assert np.isnan(float(q.scale))
    y = fp8.multiply("tk,fk->tf", q, w)
    assert np.all(np.isnan(np.asarray(y, np.float32)))
    stack = fp8.quantise_weight(jnp.stack([normal(8, 16), x]))
    assert np.isfinite(np.asarray(stack.scale)).tolist() == [True, False]


@FORMATS
@pytest.mark.parametrize("spec", ["tk,fk->tf", "kt,kf->tf"])
def test_a_product_is_that_of_float32_up_to_the_rounding_of_its_factors(dtype, spec):
    a, b = (normal(96, 96, seed=seed, dtype=jnp.bfloat16) for seed in (0, 1))
    exact = np.asarray(jnp.einsum(spec, *(x.astype(jnp.float32) for x in (a, b))))
    found = fp8.multiply(
        spec,
        fp8.quantise(a, dtype),
        fp8.quantise(b, fp8.FORWARD),
        dtype=jnp.float32,
    )
    # Errors of the entries are independent: the error of a matmul, relative to the norm
    # of the result, is at most the root of the sum of squares of its factors' errors.
    error = np.linalg.norm(np.asarray(found) - exact) / np.linalg.norm(exact)
    bound = np.hypot(ROUNDING[dtype], ROUNDING[fp8.FORWARD])
    assert bound / 10 < error < bound


def test_a_weight_is_kept_in_both_orientations_with_one_scale():
    w = normal(3, 32, 48, dtype=jnp.bfloat16) * jnp.bfloat16(0.02)
    stack = fp8.quantise_weight(w)
    for layer in range(3):
        one = jax.tree.map(lambda leaf, i=layer: leaf[i], stack)
        alone = fp8.quantise(w[layer], fp8.FORWARD)
        np.testing.assert_array_equal(value_of(one.rows), value_of(alone))
        np.testing.assert_array_equal(value_of(one.columns), value_of(alone).T)


@pytest.mark.parametrize("over_tp", [True, False])
def test_parts_of_a_sequence_share_a_scale_where_asked(over_tp: bool):
    x = normal(2, 16, 8) * (4.0 ** jnp.arange(16.0))[None, :, None]

    def per_device(x: jax.Array) -> jax.Array:
        scale = fp8.quantise(x, fp8.FORWARD, over_tp=over_tp).scale
        return jax.lax.all_gather(collectives.vary(scale), "tp")

    scales = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.pmax(per_device(x), (PP, *DP))[None],
            mesh=make_mesh((1, 1, 1, 8)),
            in_specs=PartitionSpec(None, "tp"),
            out_specs=PartitionSpec("tp"),
        )
    )(x)
    found = set(np.asarray(scales).ravel().tolist())
    whole = float(fp8.quantise(x, fp8.FORWARD).scale)
    assert max(found) == whole
    assert len(found) == (1 if over_tp else 8)
