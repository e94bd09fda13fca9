"""The bare loop and mjax train the same model."""

import dataclasses

import jax
import numpy as np
import pytest

from scripts.speed import bare_loop
from scripts.speed.bench_overhead import BareStep, MjaxStep, Workload

# float32, summed in another order: seen 2e-6. The tanh form of GELU, AdamW without its
# mask and AdamW without clipping are each off by 1e-3.
TOLERANCE = 1e-5


@pytest.mark.slow
def test_the_bare_loop_has_the_losses_of_mjax() -> None:
    """With a padded vocabulary, and two documents a row."""
    sizes = bare_loop.Sizes(
        layers=2, d_model=32, heads=4, vocab_size=97, padded_vocab=128
    )
    work = Workload(sizes=sizes, seq_len=32, batch=8, lr=1e-2)
    ours = MjaxStep(work)
    # At initialisation a block hardly changes its input, and errors would not show.
    params = jax.tree.map(lambda p: 4 * p, ours.state.params)
    ours.state = dataclasses.replace(ours.state, params=params)
    bare = BareStep(work, params)
    expected, got = ([float(step()) for _ in range(2)] for step in (ours, bare))
    assert expected[-1] < 0.8 * expected[0]
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE)
