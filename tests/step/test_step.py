"""The sharded step is the step of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.optim import OptimConfig
from mjax.data import loader, samples
from mjax.model.transformer import NO_TARGET
from mjax.step.program import BATCH_FIELDS
from tests.training import (
    EVERY_OPTION,
    LENGTH,
    ONE_DEVICE,
    ROWS,
    TINY,
    Layout,
    losses,
    make_batch,
    make_program,
)

# float32 sums in another order: four steps of LAMB keep the losses within 1e-5.
TOLERANCE = 1e-5

LAYOUTS = [
    Layout((1, 1, 1, 8), zero=2),
    Layout((1, 2, 2, 2), zero=3, microbatches=2),
]
MORE_LAYOUTS = [
    Layout((1, 2, 2, 2), zero=0, microbatches=2),
    Layout((1, 1, 8, 1), zero=2),
    Layout((1, 1, 8, 1), zero=1),
    Layout((1, 2, 4, 1), zero=2),
    Layout((1, 1, 2, 4), zero=2, microbatches=4),
    Layout((1, 1, 4, 2), zero=3),
]


@pytest.fixture(scope="module")
def one_device() -> np.ndarray:
    return losses(make_program(ONE_DEVICE))


@pytest.fixture(scope="module")
def one_device_every_option() -> np.ndarray:
    return losses(make_program(ONE_DEVICE, EVERY_OPTION))


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_LAYOUTS)],
    ids=str,
)
def test_a_sharded_run_has_the_losses_of_one_device(
    layout: Layout, one_device: np.ndarray
) -> None:
    np.testing.assert_allclose(losses(make_program(layout)), one_device, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            Layout((1, 1, 2, 4), zero=2, microbatches=2), marks=pytest.mark.slow
        ),
        Layout((1, 2, 2, 2), zero=3),
    ],
    ids=str,
)
def test_every_option_of_the_model_agrees_with_one_device(
    layout: Layout, one_device_every_option: np.ndarray
) -> None:
    """Also dropout, and two key/value heads on four tensor-parallel devices."""
    sharded = losses(make_program(layout, EVERY_OPTION))
    np.testing.assert_allclose(sharded, one_device_every_option, rtol=TOLERANCE)


def test_a_step_counts_the_pairs_that_its_mask_leaves_visible() -> None:
    model = dataclasses.replace(TINY, layers=3, window=(6, None))
    program = make_program(ONE_DEVICE, model)
    batch = make_batch(program, 0)
    _, metrics = program.train_step(program.init(), batch)
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    segments, targets = np.asarray(batch["segments"]), np.asarray(batch["targets"])
    is_same = segments[:, :, None] == segments[:, None, :]
    seen = is_same & (j <= i) & (targets != NO_TARGET)[:, :, None]
    pairs = 2 * (seen & (i - j < 6)).sum() + seen.sum()
    assert float(metrics["visible_pairs"]) == pairs


@pytest.mark.slow
def test_every_loop_over_layers_and_microbatches_agrees_with_one_device() -> None:
    """Two kinds of layer, in and after the loop; first, middle and last microbatch."""
    model = dataclasses.replace(EVERY_OPTION, layers=7)
    want = losses(make_program(ONE_DEVICE, model, rows=16), steps=2)
    for zero in (2, 3):
        layout = Layout((1, 2, 2, 1), zero=zero, microbatches=4)
        got = losses(make_program(layout, model, rows=16), steps=2)
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, err_msg=str(layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "zero"),
    [
        pytest.param("none", 2, marks=pytest.mark.slow),
        pytest.param("attention", 1, marks=pytest.mark.slow),
        ("offload", 3),
    ],
)
def test_remat_does_not_change_the_step(remat, zero, one_device: np.ndarray) -> None:
    model = dataclasses.replace(TINY, remat=remat)
    got = losses(make_program(Layout((1, 1, 2, 2), zero=zero), model))
    np.testing.assert_allclose(got, one_device, rtol=TOLERANCE)


def test_the_state_is_born_and_stays_where_it_is_declared() -> None:
    program = make_program(Layout((1, 2, 2, 2), zero=2), EVERY_OPTION)
    declared = jax.tree.map(lambda s: s.sharding, program.abstract_state)
    state = program.init()
    after, _ = program.train_step(program.init(), make_batch(program, 0))
    for made in (state, after):
        placed = jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), made, declared
        )
        assert all(jax.tree.leaves(placed))


def test_zero_divides_the_bytes_of_the_state() -> None:
    def local_bytes(layout: Layout) -> int:
        state = make_program(layout).abstract_state
        return sum(
            int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves((state.params, state.opt_state))
        )

    whole = local_bytes(Layout((1, 1, 8, 1), zero=0))
    # Only scalars stay whole.
    assert local_bytes(Layout((1, 1, 8, 1), zero=1)) <= whole / 8 + 16
    assert local_bytes(Layout((1, 8, 1, 1), zero=2)) == whole


def test_a_step_with_a_bad_gradient_is_skipped_by_all() -> None:
    program = make_program(Layout((1, 2, 2, 2), zero=2))
    state = program.init()
    poisoned = dataclasses.replace(
        state, params=jax.tree.map(lambda p: p.at[0].set(jnp.nan), state.params)
    )
    before = jax.device_get((poisoned.params, poisoned.opt_state))
    after, metrics = program.train_step(poisoned, make_batch(program, 0))
    assert int(metrics["skipped"]) == 1
    assert int(after.step) == 1
    assert int(after.guard.num_skipped) == 1
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((after.params, after.opt_state)),
        before,
    )


def test_dropout_changes_from_step_to_step_and_is_off_in_evaluation() -> None:
    model = dataclasses.replace(TINY, dropout=0.5)
    frozen = OptimConfig(lr=1e-12)
    program = make_program(ONE_DEVICE, model, frozen)
    state = program.init()
    batch = make_batch(program, 0)
    evals = [float(program.eval_step(state.params, batch)["nll"]) for _ in range(2)]
    state, first = program.train_step(state, batch)
    state, second = program.train_step(state, batch)
    assert evals[0] == evals[1]
    assert float(first["loss"]) != float(second["loss"])


@pytest.mark.slow
def test_bfloat16_compute_stays_near_float32(one_device: np.ndarray) -> None:
    got = losses(make_program(Layout((1, 1, 2, 2), zero=2), compute="bfloat16"))
    # bfloat16 keeps 8 bits; losses of about 4.6 nats move in the third digit.
    np.testing.assert_allclose(got[::2], one_device[::2], rtol=1e-2)


def test_next_token_logits_are_those_of_the_prefix() -> None:
    program = make_program(Layout((1, 1, 2, 2), zero=3))
    state = program.init()
    tokens = make_batch(program, 0)["tokens"]
    some = program.next_token_logits(state.params, tokens, jnp.int32(5))
    changed = tokens.at[:, 5:].set(0)
    same = program.next_token_logits(state.params, changed, jnp.int32(5))
    np.testing.assert_allclose(some, same, rtol=1e-6)
    assert some.shape == (ROWS, TINY.padded_vocab)
    assert np.isneginf(np.asarray(some)[:, TINY.vocab_size :]).all()
    assert LENGTH > 5


def test_data_and_step_mean_the_same_batch() -> None:
    """The import table keeps the two apart; nothing else ties their constants."""
    assert samples.NO_TARGET == NO_TARGET
    assert loader.FIELDS == BATCH_FIELDS
