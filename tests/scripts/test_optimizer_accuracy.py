"""The optimizer against an independent LAMB, and the bounds of its page."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.mesh.axes import AxisSizes
from scripts.correctness.lamb_numpy import LambLayer
from scripts.correctness.optimizer_accuracy import Compared, find_faults
from scripts.correctness.optimizer_runs import (
    ADAMW,
    LAMB,
    TOLERANCE,
    TOLERANCE_FLOAT64,
    TOLERANCE_LARGE_BETA2,
    build,
    clipped,
    float64_runs,
    make_gradients,
    make_params,
    optax_adamw,
    optax_lamb,
    paper_lamb,
    relative_errors,
    run,
    run_sharded,
    run_unstacked,
    shardings,
)

SIZES = AxisSizes(pp=1, dp_replicate=1, dp_shard=4, tp=2)
GOOD = Compared(name="near", error=1e-7, at_most=1e-6)
CONTROL = Compared(name="control", error=0.2, at_least=0.01)


@pytest.mark.parametrize(
    ("error", "control", "lamb", "faults"),
    [
        (1e-7, 0.2, 8, []),
        (2e-6, 0.2, 8, ["near: 2.0e-06"]),
        (1e-7, 1e-3, 8, ["control: 1.0e-03"]),
        (1e-7, 0.2, 28, ["dp_shard 4 x tp 2: LAMB adds 22 all-reduces"]),
    ],
)
def test_each_missed_bound_is_a_fault(error, control, lamb, faults):
    compared = [
        dataclasses.replace(GOOD, error=error),
        dataclasses.replace(CONTROL, error=control),
    ]
    assert find_faults(compared, {SIZES: [6, lamb, 28]}) == faults


@pytest.fixture(scope="module")
def plain_run():
    """Parameters, gradients, and the parameters after LAMB on one device."""
    params = make_params()
    gradients = make_gradients(params)
    return params, gradients, run(build(LAMB), params, gradients)


@pytest.mark.parametrize(
    ("changed", "tolerance"),
    [
        ({}, TOLERANCE),
        ({"beta1": 0.0}, TOLERANCE),
        ({"beta2": 0.999}, TOLERANCE_LARGE_BETA2),
    ],
)
def test_lamb_is_that_of_the_paper_in_float32(changed, tolerance, plain_run):
    config = dataclasses.replace(LAMB, **changed)
    params, gradients, actual = plain_run
    if changed:
        actual = run(build(config), params, gradients)
    errors = relative_errors(actual, paper_lamb(config, params, gradients))
    assert max(errors.values()) <= tolerance, errors


def test_lamb_is_that_of_the_paper_in_float64():
    errors = relative_errors(*float64_runs())
    assert max(errors.values()) <= TOLERANCE_FLOAT64, errors


def test_plain_optax_lamb_differs_on_a_stack(plain_run):
    # The negative control: one ratio for the whole stack is not the paper's LAMB.
    params, gradients, actual = plain_run
    errors = relative_errors(run(optax_lamb(), params, gradients), actual)
    assert errors["['block']['kernel']"] > 1e-2
    assert errors["['embed']"] <= TOLERANCE  # not stacked: the same


def test_stacked_lamb_is_unrolled_lamb(plain_run):
    params, gradients, scanned = plain_run
    errors = relative_errors(scanned, run_unstacked(params, gradients))
    # The same float32 operations; only the order within the norms' sums may differ.
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("config", [LAMB, ADAMW], ids=["lamb", "adamw"])
def test_sharded_is_unsharded(config):
    params = make_params()
    gradients = make_gradients(params)
    sharded, mesh = run_sharded(config, params, gradients)
    kept = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), sharded, shardings(mesh)
    )
    assert all(jax.tree.leaves(kept)), kept
    alone = run(build(clipped(config)), params, gradients)
    errors = relative_errors(sharded, alone)
    # Only the order of the norms' sums over devices differs.
    assert max(errors.values()) <= TOLERANCE, errors


def test_bfloat16_parameters_keep_their_dtype_and_float32_norms():
    rng = np.random.default_rng(2)
    params = {"w": jnp.asarray(rng.normal(size=1000), jnp.bfloat16)}
    grads = {"w": jnp.asarray(rng.normal(size=1000), jnp.float32)}
    trees = {"stacked": {"w": False}, "decayed": {"w": True}}
    config = dataclasses.replace(LAMB, warmup_steps=0, schedule="constant")
    optimizer = build(config, **trees)
    opt_state = optimizer.init(params)
    updates, new_state = optimizer.update(grads, opt_state, params)
    assert new_state["adam"].mu["w"].dtype == jnp.bfloat16
    dtypes = [jax.tree.map(lambda x: x.dtype, s) for s in (opt_state, new_state)]
    assert dtypes[0] == dtypes[1]
    hyper = {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
    layer = LambLayer(params["w"], weight_decay=config.weight_decay, **hyper)
    before = layer.x
    layer.step(grads["w"], config.lr)
    # Norms rounded to bfloat16 would be wrong by up to 2e-3.
    np.testing.assert_allclose(updates["w"], layer.x - before, rtol=1e-5, atol=1e-8)


def test_adamw_is_that_of_optax():
    params = make_params()
    gradients = make_gradients(params)
    errors = relative_errors(
        run(build(ADAMW), params, gradients), run(optax_adamw(), params, gradients)
    )
    assert max(errors.values()) <= TOLERANCE, errors
