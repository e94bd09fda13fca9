"""Clipping and state of the optimizer, its schedule, and the guard of steps.

`tests/scripts/test_optimizer_accuracy.py` compares it with an independent LAMB.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from mjax.config.optim import OptimConfig
from mjax.step import optim

NUM_STEPS = 50
LAMB = OptimConfig(name="lamb", lr=0.01, warmup_steps=5, clip_norm=None)
ADAMW = dataclasses.replace(LAMB, name="adamw")
STACKED = {"block": {"kernel": True, "scale": True}, "embed": False}
DECAYED = {"block": {"kernel": True, "scale": False}, "embed": True}
SPECS = {
    "block": {"kernel": P(None, "dp_shard", "tp"), "scale": P(None, "dp_shard")},
    "embed": P("tp", "dp_shard"),
}


def draw(seed):
    """Parameters of two layers, or their gradients."""
    rng = np.random.default_rng(seed)
    shapes = {"block": {"kernel": (2, 4, 6), "scale": (2, 4)}, "embed": (8, 4)}
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def build(config, **changed) -> Any:
    """Any: Optax types its states so widely that no field of one can be read."""
    trees = {"stacked": STACKED, "decayed": DECAYED} | changed
    return optim.build_optimizer(config, num_steps=NUM_STEPS, **trees)


def test_a_zero_norm_gives_a_trust_ratio_of_one():
    params = {"zero": jnp.zeros(4), "still": jnp.ones(4)}
    grads = {"zero": jnp.full(4, 2.0), "still": jnp.zeros(4)}
    falses = {"zero": False, "still": False}
    config = dataclasses.replace(LAMB, warmup_steps=0, schedule="constant")
    optimizer = build(config, stacked=falses, decayed=falses)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Adam's first direction is the sign of the gradient, up to eps / |g|.
    np.testing.assert_allclose(updates["zero"], -config.lr, rtol=1e-6)
    np.testing.assert_array_equal(updates["still"], 0.0)


# Clipping, state


def test_entries_are_clipped_before_the_norm_is():
    config = dataclasses.replace(ADAMW, clip_value=1.0, clip_norm=1.0)
    params = {"w": jnp.zeros(2)}
    trees = {"stacked": {"w": False}, "decayed": {"w": False}}
    optimizer = build(config, **trees)
    grads = {"w": jnp.array([100.0, 1.0])}
    _, opt_state = optimizer.update(grads, optimizer.init(params), params)
    clipped = opt_state["adam"].mu["w"] / (1 - config.beta1)
    # By value: (1, 1), by norm: (0.71, 0.71). The other way round it were (1, 0.01).
    np.testing.assert_allclose(clipped, math.sqrt(0.5), rtol=1e-6)


def test_gradients_below_the_clips_pass_unchanged():
    params = {"w": jnp.zeros(2)}
    trees = {"stacked": {"w": False}, "decayed": {"w": False}}
    grads = {"w": jnp.array([0.3, -0.4])}
    mu = []
    for clip in (1.0, None):
        config = dataclasses.replace(ADAMW, clip_value=clip, clip_norm=clip)
        optimizer = build(config, **trees)
        _, opt_state = optimizer.update(grads, optimizer.init(params), params)
        mu.append(opt_state["adam"].mu["w"])
    np.testing.assert_array_equal(mu[0], mu[1])


@pytest.mark.parametrize("config", [LAMB, ADAMW], ids=["lamb", "adamw"])
def test_the_state_takes_specs_from_those_of_the_parameters(config):
    optimizer = build(config)
    state = jax.eval_shape(optimizer.init, draw(0))
    specs: Any = optax.tree_map_params(
        optimizer, lambda _, s: s, state, SPECS, transform_non_params=lambda _: P()
    )
    assert specs["adam"].mu == SPECS
    assert specs["adam"].nu == SPECS
    assert specs["adam"].count == P()
    assert specs["schedule"].count == P()


# Schedule


def schedule_values(config, num_steps, num_values=None):
    schedule = optim.learning_rate(config, num_steps)
    # Always 40 values, so that hypothesis' examples compile once.
    values = np.asarray(jax.vmap(schedule)(jnp.arange(40)))
    return values[: num_values or num_steps]


def test_cosine_has_the_values_of_its_formula():
    config = OptimConfig(lr=2.0, warmup_steps=4, final_lr_fraction=0.25)
    values = schedule_values(config, 12)
    np.testing.assert_allclose(values[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(values[7], 1.25, rtol=1e-6)  # half way, mean of ends
    np.testing.assert_allclose(values[-1], 0.5, rtol=1e-6)


def test_wsd_is_constant_and_then_falls_linearly():
    config = OptimConfig(
        lr=2.0,
        schedule="wsd",
        warmup_steps=2,
        decay_fraction=0.4,
        final_lr_fraction=0.0,
    )
    expected = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]
    np.testing.assert_allclose(schedule_values(config, 10), expected, atol=1e-6)


def test_the_rate_of_the_last_step_is_kept_beyond_it():
    values = schedule_values(OptimConfig(), 10, num_values=13)
    np.testing.assert_array_equal(values[10:], values[9])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["cosine", "wsd", "constant"]),
    num_steps=st.integers(1, 40),
    warmup_share=st.floats(0, 1),
    decay_share=st.floats(0.01, 1),
    final=st.floats(0, 1),
)
def test_the_rate_is_continuous_and_ends_right(
    name, num_steps, warmup_share, decay_share, final
):
    warmup_steps = int(warmup_share * (num_steps - 1))
    config = OptimConfig(
        lr=1.0,
        schedule=name,
        warmup_steps=warmup_steps,
        final_lr_fraction=final,
        decay_fraction=decay_share * (num_steps - warmup_steps) / num_steps,
    )
    values = schedule_values(config, num_steps)
    assert values[-1] == pytest.approx(1.0 if name == "constant" else final, abs=1e-6)
    rising, falling = values[:warmup_steps], values[max(warmup_steps - 1, 0) :]
    assert np.all(np.diff(rising) > 0)
    assert np.all(np.diff(falling) <= 0)
    if warmup_steps:
        assert values[warmup_steps - 1] == 1.0
    # Continuous: no jump steeper than the steepest slope of its pieces.
    fall_steps = max(1, round(config.decay_fraction * num_steps))
    if name == "cosine":
        fall_steps = num_steps - warmup_steps
    steepest = max(1 / max(warmup_steps, 1), math.pi / 2 / fall_steps)
    assert np.all(np.abs(np.diff(values)) <= steepest + 1e-6)


def test_the_current_rate_is_that_of_the_next_update():
    config = OptimConfig(name="adamw", lr=0.5, warmup_steps=5, weight_decay=0.0)
    params = {"w": jnp.zeros(3)}
    trees = {"stacked": {"w": False}, "decayed": {"w": False}}
    optimizer = build(config, **trees)
    opt_state = optimizer.init(params)
    for step in range(1, 4):
        rate = optim.current_learning_rate(opt_state, config, NUM_STEPS)
        grads = {"w": jnp.ones(3)}
        updates, opt_state = optimizer.update(grads, opt_state, params)
        assert float(rate) == pytest.approx(0.5 * step / 5, rel=1e-6)
        # Adam's direction under a constant gradient of 1 is 1 / (1 + eps).
        np.testing.assert_allclose(updates["w"], -rate, rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "num_steps", "words"),
    [
        (
            {"warmup_steps": 11},
            10,
            ["at most --steps 10, got 11; give --optim.warmup-steps 1 or --steps 110"],
        ),
        (
            {"schedule": "wsd", "warmup_steps": 6, "decay_fraction": 0.5},
            10,
            ["--optim.warmup-steps must be at most 5, got 6", "last 5 of --steps 10"],
        ),
        ({}, 0, ["--steps must be at least 1, got 0"]),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused(changed, num_steps, words):
    with pytest.raises(ValueError, match=r"steps") as caught:
        optim.learning_rate(OptimConfig(**changed), num_steps)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("eps", 0.0),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("spike_mean_decay", 1.0),
        ("final_lr_fraction", 1.5),
        ("decay_fraction", 0.0),
        ("weight_decay", -0.1),
        ("clip_value", 0.0),
        ("clip_norm", -1.0),
        ("skip_spike_factor", 1.0),
        ("warmup_steps", -1),
        ("spike_warmup_steps", 0),
        ("max_consecutive_skips", 0),
    ],
)
def test_a_field_out_of_range_is_refused_by_name_and_value(name, value):
    flag = f"--optim.{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"^{flag} must .*, got {value}"):
        OptimConfig(**{name: value})


@pytest.mark.parametrize("name", ["name", "schedule"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    # Set past the constructor, whose annotations are checked first, but in tests only.
    config = OptimConfig()
    object.__setattr__(config, name, "lion")
    with pytest.raises(ValueError, match=f"--optim.{name} must be .* or .*, got lion"):
        config.__post_init__()


# Guard


jitted_check = jax.jit(optim.guard_check, static_argnums=0)


def check(config, guard, loss, grad_norm):
    accept, guard = jitted_check(
        config, guard, jnp.float32(loss), jnp.float32(grad_norm)
    )
    return bool(accept), guard


SPIKY = OptimConfig(skip_spike_factor=3.0, spike_warmup_steps=4, spike_mean_decay=0.75)


@pytest.mark.parametrize(
    ("loss", "grad_norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_a_step_that_is_not_finite_is_skipped_and_counted(loss, grad_norm):
    accept, before = check(OptimConfig(), optim.guard_init(), 1.0, 2.0)
    assert accept
    accept, after = check(OptimConfig(), before, loss, grad_norm)
    assert not accept
    assert after == before._replace(num_skipped=1, num_consecutive_skips=1)


def test_a_spike_is_skipped_once_the_mean_is_known():
    guard = optim.guard_init()
    for norm in (1.0, 1.0, 1.0, 100.0):  # the fourth would be one, but it is too early
        accept, guard = check(SPIKY, guard, 1.0, norm)
        assert accept
    mean = float(guard.mean_norm)
    accept, after = check(SPIKY, guard, 1.0, 3.01 * mean)
    assert not accept
    assert float(after.mean_norm) == mean
    accept, after = check(SPIKY, guard, 1.0, 2.99 * mean)
    assert accept


def test_a_spike_is_accepted_without_a_factor():
    guard = optim.guard_init()
    for norm in (1.0,) * 30 + (1e6,):
        accept, guard = check(OptimConfig(), guard, 1.0, norm)
        assert accept


def test_the_mean_norm_is_plain_at_first_and_exponential_later():
    norms = [1.0, 2.0, 4.0, 3.0, 5.0, 2.0]
    guard = optim.guard_init()
    means = []
    for norm in norms:
        _, guard = check(SPIKY, guard, 1.0, norm)
        means.append(float(guard.mean_norm))
    np.testing.assert_allclose(means[:4], [1.0, 1.5, 7 / 3, 2.5], rtol=1e-6)
    for index in (4, 5):
        expected = 0.75 * means[index - 1] + 0.25 * norms[index]
        assert means[index] == pytest.approx(expected, rel=1e-6)


def test_consecutive_skips_are_counted_and_reset():
    guard = optim.guard_init()
    for loss in (math.nan, math.nan, 1.0, math.nan):
        _, guard = check(OptimConfig(), guard, loss, 1.0)
    assert int(guard.num_skipped) == 3
    assert int(guard.num_consecutive_skips) == 1
    assert int(guard.num_accepted) == 1


def test_a_skipped_step_leaves_parameters_moments_and_schedule_bitwise():
    optimizer = build(LAMB)

    @jax.jit
    def step(params, opt_state, guard, grads, loss):
        norm = optax.tree.norm(grads)
        accept, guard = optim.guard_check(LAMB, guard, loss, norm)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = optim.select(accept, new, (params, opt_state))
        return params, opt_state, guard

    def bits(tree):
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

    params = jax.tree.map(jnp.asarray, draw(0))
    state = (params, optimizer.init(params), optim.guard_init())
    good, bad = draw(1), draw(2)
    bad["block"]["kernel"][1, 2, 3] = np.nan
    after_good = step(*state, good, 1.0)
    assert bits(after_good[0]) != bits(params)
    after_bad = step(*after_good, bad, 1.0)
    assert bits(after_bad[:2]) == bits(after_good[:2])
    rate = optim.current_learning_rate(after_bad[1], LAMB, NUM_STEPS)
    assert float(rate) == pytest.approx(LAMB.lr * 2 / LAMB.warmup_steps)
    assert int(after_bad[2].num_skipped) == 1
    # And the run goes on as if the bad step had not been.
    assert bits(step(*after_bad, good, 1.0)[:2]) == bits(
        step(*after_good, good, 1.0)[:2]
    )
