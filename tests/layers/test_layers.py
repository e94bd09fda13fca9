"""Each layer against plain NumPy written from its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.kernels.cross_entropy import reference, tuning
from mjax.kernels.cross_entropy.tuning import ChunkedTuning
from mjax.layers.config import NormConfig, RopeConfig
from mjax.layers.dropout import DropoutKey, dropout
from mjax.layers.embed import look_up
from mjax.layers.linear import add_bias
from mjax.layers.loss import NO_TARGET, summed_nll
from mjax.layers.norm import Norm
from mjax.layers.rope import angles, rotate
from mjax.mesh import collectives
from mjax.mesh.axes import AXES, DP, PP, TP
from tests.training import make_mesh

# float32 against float64: sums of tens of terms.
TOLERANCE = 1e-5


def on_mesh(f, shape, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(f, mesh=make_mesh(shape), in_specs=in_specs, out_specs=out_specs)
    )


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_is_its_formula(kind) -> None:
    x = np.random.default_rng(0).normal(1.0, 2.0, (2, 3, 16))
    norm = Norm(16, NormConfig(kind=kind, eps=1e-3, use_bias=kind == "layernorm"))
    norm.scale[...] = jnp.arange(16, dtype=jnp.float32)
    centred = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    got = norm(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, expected * np.arange(16), rtol=TOLERANCE, atol=1e-6)


@pytest.mark.promotion(rank="allow")
def test_norm_of_bfloat16_takes_its_statistics_in_float32() -> None:
    # In bfloat16 the mean of 257 equal numbers would already be off.
    x = jnp.full((1, 1, 257), 3.0, jnp.bfloat16).at[0, 0, 0].set(300.0)
    norm = Norm(257, NormConfig(kind="rmsnorm", eps=0.0, use_bias=False))
    expected = 300.0 / np.sqrt((256 * 9.0 + 300.0**2) / 257)
    assert float(norm(x)[0, 0, 0]) == pytest.approx(expected, rel=2**-8)


# A sum is rounded once to 8 bits, or added in float32 in blocks of tens of terms.
ROUNDED_ONCE = {"bfloat16": 2.0**-8, "float32": 1e-6}


@pytest.mark.parametrize("dtype", ROUNDED_ONCE)
@pytest.mark.parametrize("shape", [(1, 1), (3, 21), (8, 1023)])
def test_the_gradient_of_a_row_is_the_sum_over_all_its_occurrences(
    dtype, shape
) -> None:
    """Ids that are not in the table, as with tp, read zeros and add to no row."""
    size, width = 7, 3
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, size + 2, shape, dtype=np.int32)
    ids[rng.random(shape) < 0.6] = 4  # thousands of times in the largest shape
    table = jnp.asarray(rng.normal(size=(size, width)), dtype)
    g = jnp.asarray(rng.uniform(0.5, 1.5, (*shape, width)), dtype)
    y, pull = jax.vjp(lambda table: look_up(table, jnp.asarray(ids)), table)
    (got,) = pull(g)
    is_in = (ids >= 0) & (ids < size)
    rows = np.asarray(table)[ids.clip(0, size - 1)]
    np.testing.assert_array_equal(y, np.where(is_in[..., None], rows, 0))
    expected = np.zeros((size, width))
    np.add.at(expected, ids[is_in], np.asarray(g, np.float64)[is_in])
    assert got.dtype == table.dtype
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=ROUNDED_ONCE[dtype]
    )


@pytest.mark.parametrize("dtype", ROUNDED_ONCE)
def test_the_gradient_of_a_bias_is_the_sum_over_all_positions(dtype) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 1024, 2, 3)), dtype)
    bias = jnp.asarray(rng.normal(size=(2, 3)), dtype)
    g = jnp.asarray(rng.uniform(0.5, 1.5, x.shape), dtype)
    y, pull = jax.vjp(add_bias, x, bias)
    np.testing.assert_array_equal(y, x + bias[None, None])
    dx, got = pull(g)
    np.testing.assert_array_equal(dx, g)
    expected = np.asarray(g, np.float64).sum((0, 1))
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=ROUNDED_ONCE[dtype]
    )


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rope_rotates_pairs_as_complex_numbers(interleaved, fraction) -> None:
    config = RopeConfig(
        head_width=8,
        base=100.0,
        scaling=2.0,
        fraction=fraction,
        interleaved=interleaved,
    )
    x = np.random.default_rng(1).normal(size=(1, 5, 2, 8))
    positions = np.array([[0, 1, 2, 0, 7]])
    width = int(8 * fraction)
    frequency = 100.0 ** (-np.arange(0, width, 2) / width) / 2.0
    turn = np.exp(1j * positions[..., None] * frequency)[:, :, None, :]
    first = np.s_[..., 0:width:2] if interleaved else np.s_[..., : width // 2]
    second = np.s_[..., 1:width:2] if interleaved else np.s_[..., width // 2 : width]
    turned = (x[first] + 1j * x[second]) * turn
    expected = x.copy()
    expected[first], expected[second] = turned.real, turned.imag
    cos_sin = angles(jnp.asarray(positions, jnp.int32), config)
    got = rotate(jnp.asarray(x, jnp.float32), cos_sin, config)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=1e-6)


@pytest.mark.promotion(rank="allow")
def test_rotated_scores_depend_on_the_distance_only() -> None:
    config = RopeConfig(
        head_width=16, base=1e4, scaling=1.0, fraction=1.0, interleaved=False
    )
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def at(x: jax.Array, position: int) -> jax.Array:
        return rotate(x, angles(jnp.full((1, 1), position), config), config)

    def score(i: int, j: int) -> float:
        return float((at(q, i) * at(k, j)).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_cross_entropy_and_its_gradients_are_those_of_the_whole_vocabulary(
    tp, num_chunks, monkeypatch
) -> None:
    """A shard that is all padding, a position without target."""
    vocab, padded = 11, 16
    limit = ChunkedTuning(max_logits=6 * padded // tp // num_chunks, min_positions=1)
    monkeypatch.setattr(tuning, "CHUNKED", limit)
    x, table = (
        2 * jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 3, 8), (padded, 8)])
    )
    bias = jax.random.normal(jax.random.key(2), (padded,))
    targets = jnp.array([[0, 10, NO_TARGET], [3, 4, 5]], jnp.int32)

    def dense(x: jax.Array, table: jax.Array, bias: jax.Array) -> jax.Array:
        return reference.summed_nll(
            x, table, bias, targets, scale=0.5, vocab_size=vocab
        )

    def per_device(*params: jax.Array) -> tuple[jax.Array, ...]:
        params = tuple(collectives.vary(p) for p in params)

        def loss(x: jax.Array, table: jax.Array, bias: jax.Array) -> jax.Array:
            return summed_nll(x, table, bias, targets, scale=0.5, vocab_size=vocab)

        nll, (dx, *grads) = jax.value_and_grad(loss, (0, 1, 2))(*params)
        once = [jax.lax.psum(g, (PP, *DP)) for g in grads]
        return collectives.sum_over_mesh(nll), jax.lax.psum(dx, AXES), *once

    specs = (P(), P(TP), P(TP))
    got = on_mesh(per_device, (1, 1, 1, tp), specs, (P(), *specs))(x, table, bias)
    nll, grads = jax.value_and_grad(dense, (0, 1, 2))(x, table, bias)
    for g, expected in zip(got, (nll, *grads), strict=True):
        np.testing.assert_allclose(g, expected, rtol=TOLERANCE, atol=1e-5)


def test_dropout_masks_do_not_depend_on_the_split_of_rows_or_sequence() -> None:
    x = jnp.ones((4, 8, 32))

    def draw(shape, rows_spec):
        def per_device(x: jax.Array, rows: jax.Array) -> jax.Array:
            return dropout(x, 0.25, DropoutKey(key=jax.random.key(3), rows=rows))

        spec = P(rows_spec, TP, None)
        return on_mesh(per_device, shape, (spec, P(rows_spec)), spec)(
            x, jnp.arange(4, dtype=jnp.int32)
        )

    whole = draw((1, 1, 1, 1), "dp_shard")
    np.testing.assert_array_equal(whole, draw((1, 1, 2, 4), "dp_shard"))
    kept = np.asarray(whole) != 0
    # 1024 draws: the share kept is 0.75 within 5 standard deviations (0.0135 each).
    assert abs(kept.mean() - 0.75) < 0.07
    np.testing.assert_allclose(np.asarray(whole)[kept], 1 / 0.75)
    assert not (kept[0] == kept[1]).all()
    other = DropoutKey(key=jax.random.key(3), rows=jnp.arange(4, dtype=jnp.int32)).at(1)
    assert not jnp.array_equal(other.key, jax.random.key(3))
