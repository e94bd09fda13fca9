"""Chunked cross-entropy = all logits at once, in the loss and in every gradient."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.kernels.cross_entropy import api, chunked, reference
from mjax.kernels.cross_entropy.tuning import ChunkedTuning
from mjax.plan.hlo.counts import count_dot_flops

# Sums of at most 100 terms of order 1 in another order, 6e-8 each; relative to the
# largest entry.
F32_TOLERANCE = 1e-5
# softmax - onehot is rounded to bfloat16 (2^-9) before the products, their results too.
BF16_TOLERANCE = 1e-2


def make_inputs(B=2, T=15, D=8, V=24, dtype=jnp.float32):
    """Return x, w, bias and targets; every third position predicts nothing."""
    keys = jax.random.split(jax.random.key(T * V + D), 4)
    targets = jax.random.randint(keys[3], (B, T), 0, V - 3, jnp.int32)
    return (
        jax.random.normal(keys[0], (B, T, D), dtype),
        jax.random.normal(keys[1], (V, D), dtype),
        jax.random.normal(keys[2], (V,), dtype),
        jnp.where(jnp.arange(B * T).reshape(B, T) % 3 == 1, -1, targets),
    )


def in_chunks(num_chunks, scale, vocab_size, targets, x, w, bias, soft_cap=None):
    options = chunked.Options(
        num_chunks=num_chunks,
        scale=scale,
        vocabulary=chunked.Vocabulary(size=vocab_size),
        soft_cap=soft_cap,
    )
    flat = x.reshape(-1, x.shape[-1])
    return chunked.summed_nll(options, flat, targets.reshape(-1), w, bias, 0)


def run(loss, *params, cotangent=1.0):
    """Return the loss and the gradients of x, w and bias, as float32."""

    @jax.jit
    def both(*params):
        value, pull = jax.vjp(loss, *params)
        return value, *pull(jnp.asarray(cotangent, value.dtype))

    return [np.asarray(g, np.float32) for g in both(*params) if g is not None]


def assert_close(got, expected, tolerance):
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=0, atol=tolerance * np.abs(e).max())


@pytest.mark.parametrize("with_bias", [False, True])
# All at once, equal pieces, a last piece that is filled up, one position each.
@pytest.mark.parametrize("num_chunks", [1, 3, 4, 30])
def test_loss_and_gradients_are_the_reference(num_chunks, with_bias) -> None:
    x, w, bias, targets = make_inputs()
    bias = bias if with_bias else None
    got = run(functools.partial(in_chunks, num_chunks, 0.7, 21, targets), x, w, bias)

    def dense(x, w, bias):
        return reference.summed_nll(x, w, bias, targets, scale=0.7, vocab_size=21)

    assert_close(got, run(dense, x, w, bias), F32_TOLERANCE)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_capped_logits_are_those_of_the_reference(num_chunks) -> None:
    """Logits go up to 8, so that a cap of 2 bends most of them."""
    x, w, bias, targets = make_inputs()
    capped = functools.partial(in_chunks, num_chunks, 0.7, 21, targets, soft_cap=2.0)

    def dense(x, w, bias):
        return reference.summed_nll(
            x, w, bias, targets, scale=0.7, vocab_size=21, soft_cap=2.0
        )

    want = run(dense, x, w, bias)
    assert_close(run(capped, x, w, bias), want, F32_TOLERANCE)
    without = run(functools.partial(in_chunks, 1, 0.7, 21, targets), x, w, bias)
    assert abs(without[0] - want[0]) > 1.0


@pytest.mark.slow
@settings(max_examples=5)
@given(T=st.integers(1, 12), V=st.integers(4, 40), num_chunks=st.integers(1, 6))
def test_any_shape_agrees_with_the_reference(T, V, num_chunks) -> None:
    x, w, bias, targets = make_inputs(B=1, T=T, D=4, V=V)
    got = run(functools.partial(in_chunks, num_chunks, 1.0, V - 3, targets), x, w, bias)

    def dense(x, w, bias):
        return reference.summed_nll(x, w, bias, targets, scale=1.0, vocab_size=V - 3)

    expected = run(dense, x, w, bias)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=F32_TOLERANCE, atol=1e-5)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_bfloat16_differs_by_its_rounding(num_chunks) -> None:
    params = make_inputs(dtype=jnp.bfloat16)
    got = run(functools.partial(in_chunks, num_chunks, 1.0, 21, params[3]), *params[:3])

    def dense(x, w, bias):
        return reference.summed_nll(x, w, bias, params[3], scale=1.0, vocab_size=21)

    expected = run(dense, *(p.astype(jnp.float32) for p in params[:3]))
    # The loss is made of float32 logits of the same inputs: no bfloat16 rounding.
    assert_close(got[:1], expected[:1], F32_TOLERANCE)
    assert_close(got[1:], expected[1:], BF16_TOLERANCE)


def test_gradients_scale_with_the_cotangent() -> None:
    x, w, bias, targets = make_inputs()
    loss = functools.partial(in_chunks, 2, 1.0, 21, targets)
    once, thrice = run(loss, x, w, bias), run(loss, x, w, bias, cotangent=-3.0)
    assert_close(thrice[1:], [-3 * g for g in once[1:]], F32_TOLERANCE)


def test_no_targets_give_zero() -> None:
    x, w, bias, targets = make_inputs()
    loss = functools.partial(in_chunks, 2, 1.0, 21, jnp.full_like(targets, -1))
    assert all((g == 0).all() for g in run(loss, x, w, bias))


def test_padding_has_no_probability_and_no_gradient() -> None:
    x, w, bias, targets = make_inputs()
    w = w.at[21:].set(100.0)
    _, _, dw, db = run(functools.partial(in_chunks, 2, 1.0, 21, targets), x, w, bias)
    assert (dw[21:] == 0).all()
    assert (db[21:] == 0).all()


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_large_logits_stay_finite(num_chunks) -> None:
    x, w, bias, targets = make_inputs()
    loss = functools.partial(in_chunks, num_chunks, 1e4, 21, targets)
    assert all(np.isfinite(g).all() for g in run(loss, x, w, bias))


def compiled(differentiate, num_chunks, n=64, D=16, V=256):
    """Compile loss or gradients for n positions."""
    targets = jnp.zeros(n, jnp.int32)
    loss = functools.partial(in_chunks, num_chunks, 1.0, V, targets, bias=None)
    function = jax.value_and_grad(loss, (0, 1)) if differentiate else loss
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, D), (V, D))]
    text = jax.jit(function).lower(*shapes).compile().as_text()
    assert text is not None
    return text


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_no_product_is_repeated_and_a_loss_alone_costs_one(num_chunks) -> None:
    product = 2 * 64 * 16 * 256
    assert count_dot_flops(compiled(False, num_chunks)) == product
    assert count_dot_flops(compiled(True, num_chunks)) == 3 * product


@pytest.mark.parametrize("differentiate", [False, True])
def test_only_the_logits_of_a_chunk_exist(differentiate) -> None:
    def largest(num_chunks):
        """Entries of the largest array as wide as the vocabulary."""
        shapes = re.findall(r"f32\[([\d,]+)\]", compiled(differentiate, num_chunks))
        dims = [[int(n) for n in shape.split(",")] for shape in shapes]
        # w and its gradient are as long as the vocabulary, and 16 wide.
        return max(np.prod(d) for d in dims if 256 in d and 16 not in d)

    assert largest(1) == 64 * 256
    assert largest(8) == 8 * 256


def test_chunks_have_a_largest_number_of_logits_and_a_least_of_positions() -> None:
    tuning = ChunkedTuning(max_logits=1000, min_positions=4)
    assert tuning.num_chunks(10, 100) == 1
    assert tuning.num_chunks(11, 100) == 2
    assert tuning.num_chunks(8, 5000) == 2
    with pytest.raises(ValueError, match="at least 1, got 0 and 4"):
        ChunkedTuning(max_logits=0, min_positions=4)


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, w, bias, targets = make_inputs()
    with pytest.raises(ValueError, match=r"targets \(2, 14\)"):
        api._check(x, w, None, targets[:, 1:])
    with pytest.raises(ValueError, match=r"w \(24, 8\), bias \(23,\)"):
        api._check(x, w, bias[1:], targets)
    with pytest.raises(ValueError, match="float32 and bfloat16; cast"):
        api.linear_cross_entropy(
            x,
            w.astype(jnp.bfloat16),
            None,
            targets,
            scale=1.0,
            vocabulary=api.Vocabulary(size=21),
        )
