"""Only what depends on a chunk's input waits; the rest is made again, the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.pipeline.residuals import separate

LAYERS, ROWS, WIDTH = 3, 5, 4


def chunk(weights: dict, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Layers whose residuals come from the input, from weights alone, and from both."""

    @jax.checkpoint
    def layer(x: jax.Array, pair: jax.Array) -> jax.Array:
        joined = jnp.concatenate([pair[0], pair[1]], axis=1)
        both = jnp.sin(x @ joined)
        return both[:, :WIDTH] * both[:, WIDTH:] * jnp.exp(mask)

    def step(x: jax.Array, pair: jax.Array) -> tuple[jax.Array, None]:
        # A condition gives out what its branch reads.
        return jax.lax.cond(mask[0] > 0, layer, lambda x, _: x, x, pair), None

    return jax.lax.scan(step, x, weights["pairs"])[0] * weights["scale"]


def leaves(weights: dict, x: jax.Array, mask: jax.Array) -> list[jax.Array]:
    return jax.tree.leaves(jax.vjp(chunk, weights, x, mask)[1])


@pytest.fixture
def args() -> tuple[dict, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    pairs = jnp.asarray(rng.normal(size=(LAYERS, 2, WIDTH, WIDTH)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    return {"pairs": pairs, "scale": jnp.float32(3)}, x, jnp.ones(WIDTH)


def test_weights_and_what_follows_from_them_are_not_kept(args) -> None:
    everything = leaves(*args)
    kept = separate(leaves, *args, place=1).kept(everything)
    # Inputs of all layers, and the output that the last factor is multiplied with.
    assert sorted(leaf.shape for leaf in kept) == [(LAYERS, ROWS, WIDTH), (ROWS, WIDTH)]
    assert len(kept) < len(everything)


def test_what_is_not_kept_is_made_again_whatever_the_input(args) -> None:
    weights, x, mask = args
    everything = leaves(*args)
    residuals = separate(leaves, *args, place=1)
    again = residuals.whole(
        residuals.kept(everything), weights, jnp.full_like(x, jnp.nan), mask
    )
    jax.tree.map(np.testing.assert_array_equal, again, everything)
