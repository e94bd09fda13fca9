"""The executor computes what the sequential oracle computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.pipeline import run
from mjax.pipeline.schedule import build
from tests.pipeline import planted, reference, toy

# Float32 sums of a few thousand products in another order.
TOLERANCE = 2e-6


def check(got: tuple, want: tuple) -> None:
    assert np.isclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        scale = float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale)


@jax.jit
def sequential(weights: run.Weights, micro: run.Microbatches) -> tuple:
    return reference.gradients(toy.MODEL, weights, micro)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_chunks", "num_microbatches", "stash", "idle"),
    [
        ("gpipe", 4, 1, 5, "residuals", "compute"),
        ("1f1b", 4, 1, 4, "residuals", "skip"),
        ("1f1b", 2, 1, 7, "input", "compute"),
        ("1f1b", 4, 1, 2, "residuals", "compute"),
        ("interleaved-1f1b", 1, 4, 3, "residuals", "compute"),
        ("interleaved-1f1b", 4, 2, 8, "residuals", "compute"),
        ("interleaved-1f1b", 8, 3, 8, "residuals", "skip"),
        ("interleaved-1f1b", 2, 3, 2, "input", "skip"),
    ],
)
def test_a_pipeline_computes_what_the_sequence_of_its_chunks_computes(
    name, num_stages, num_chunks, num_microbatches, stash, idle
):
    schedule = build(
        name,
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )
    weights = toy.make_weights(num_stages * num_chunks)
    micro = toy.make_microbatches(num_microbatches)
    want = sequential(weights, micro)
    options = run.Options(stash=stash, idle=idle)
    check(toy.pipelined(schedule, weights, micro, options=options), want)


@pytest.mark.parametrize(("num_stages", "level"), [(4, 0), (4, 1), (3, 2)])
def test_weights_gathered_and_gradients_reduced_in_pieces_are_the_same(
    num_stages, level
):
    """Width 8 is cut into 4 pieces on 4 stages, into 2 on 3."""
    schedule = build(
        "interleaved-1f1b",
        num_stages=num_stages,
        num_chunks=3,
        num_microbatches=num_stages,
    )
    weights = toy.make_weights(3 * num_stages)
    micro = toy.make_microbatches(num_stages, rows=4)
    want = sequential(weights, micro)
    check(toy.pipelined(schedule, weights, micro, dp=2, level=level), want)


def test_weights_that_were_gathered_before_the_step_change_no_bit():
    schedule = build("interleaved-1f1b", num_stages=2, num_chunks=2, num_microbatches=2)
    weights, micro = toy.make_weights(4), toy.make_microbatches(2, rows=4)
    want, got = (
        toy.pipelined(schedule, weights, micro, dp=2, gathers_first=gathers_first)
        for gathers_first in (False, True)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("stash", ["residuals", "input"])
def test_garbage_in_idle_slots_stays_there(stash):
    """Idle slots compute on zeros and on each other's results: here, on 1e6."""
    schedule = build("interleaved-1f1b", num_stages=4, num_chunks=2, num_microbatches=4)
    weights = toy.make_weights(8)
    micro = toy.make_microbatches(4)
    first = jax.tree.map(lambda w: w[0], weights.chunks)
    micro_0 = {name: x[0] for name, x in micro.items()}
    nothing = jnp.zeros((toy.ROWS, toy.LENGTH, toy.WIDTH))
    idle = toy.FRAGILE.chunk(nothing, first, toy.context(micro_0), jnp.int32(0))
    assert float(jnp.abs(idle).min()) > 1e5
    want = jax.jit(lambda w, m: reference.gradients(toy.FRAGILE, w, m))(weights, micro)
    options = run.Options(stash=stash, idle="compute")
    got = toy.pipelined(schedule, weights, micro, options=options, model=toy.FRAGILE)
    check(got, want)


@pytest.mark.parametrize("name", planted.BUGS)
def test_a_planted_bug_changes_the_gradients(name):
    assert planted.error(planted.BUGS[name]) > 1000 * TOLERANCE
