"""Only what depends on the input is saved; the gradients are those of jax.vjp."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.trace.vjp import SplitVJP

LAYERS, ROWS, WIDTH = 3, 5, 4
Args = tuple[jax.Array, dict, jax.Array]


def chunk(x: jax.Array, weights: dict, mask: jax.Array) -> jax.Array:
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


def plain(x: jax.Array, weights: dict, mask: jax.Array) -> jax.Array:
    """The same layers, and no jax.checkpoint among them."""
    for pair in weights["pairs"]:
        joined = jnp.concatenate([pair[0], pair[1]], axis=1)
        both = jnp.sin(x @ joined)
        x = both[:, :WIDTH] * both[:, WIDTH:] * jnp.exp(mask)
    return x * weights["scale"]


@pytest.fixture
def args() -> Args:
    rng = np.random.default_rng(0)
    pairs = jnp.asarray(rng.normal(size=(LAYERS, 2, WIDTH, WIDTH)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    return x, {"pairs": pairs, "scale": jnp.float32(3)}, jnp.ones(WIDTH)


def test_weights_and_what_follows_from_them_are_not_saved(args: Args) -> None:
    everything = jax.tree.leaves(jax.vjp(chunk, *args)[1])
    _, saved = SplitVJP(chunk, *args).forward(*args)
    # Inputs of all layers, and the output that the last factor is multiplied with.
    assert sorted(x.shape for x in saved) == [(LAYERS, ROWS, WIDTH), (ROWS, WIDTH)]
    assert len(saved) < len(everything)


@pytest.mark.parametrize("function", [chunk, plain])
def test_the_gradients_are_those_of_one_vjp(
    function: Callable[..., jax.Array], args: Args
) -> None:
    x, *others = args
    y, pullback = jax.vjp(function, *args)
    dy = jnp.cos(y)
    split = SplitVJP(function, *args)
    split_y, saved = split.forward(x, *others)
    gradients = split.backward(saved, dy, *others)
    jax.tree.map(np.testing.assert_array_equal, split_y, y)
    jax.tree.map(np.testing.assert_array_equal, gradients, pullback(dy)[:2])


def test_types_of_the_arguments_are_enough(args: Args) -> None:
    types = jax.eval_shape(lambda *args: args, *args)
    _, saved = SplitVJP(chunk, *types).forward(*args)
    assert len(saved) == 2


def test_jax_leaves_the_places_of_unsaved_arguments_to_the_caller(args: Args) -> None:
    """What `SplitVJP.backward` relies on: args_res, in the order of the arguments."""
    saveable = (True, False, False)
    y, pullback = cast(Any, jax.vjp(plain, *args, saveable_args=saveable))
    assert isinstance(pullback.args_res, list)
    assert len(pullback.args_res) == len(args)
    held = {id(leaf) for leaf in jax.tree.leaves(pullback)}
    assert not held & {id(leaf) for leaf in jax.tree.leaves(args[1:])}
    with pytest.raises(ValueError, match="args_res"):
        pullback(jnp.ones_like(y))
    pullback.args_res[1:] = args[1:]
    pullback(jnp.ones_like(y))
