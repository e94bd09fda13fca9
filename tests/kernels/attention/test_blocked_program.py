"""What blocked attention compiles to."""

import re

import jax
import jax.numpy as jnp

from mjax.kernels.attention import api, blocked, tuning
from mjax.plan.hlo.counts import count_dot_flops


def compiled_text(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    return text


def test_one_tile_needs_no_loop():
    x = jnp.zeros((1, 64, 2, 8))
    attend = jax.grad(lambda q: api.attention(q, q, q, backend="blocked").sum())
    assert not re.search(r" while\(", compiled_text(attend, x))


def test_a_remat_policy_that_keeps_the_core_spares_the_second_forward():
    s, head_dim, block = 128, 8, tuning.BLOCKED_CPU.block
    tile = len(blocked.visible_tiles(s, block, None)) * 2 * block**2 * head_dim
    x = jnp.zeros((1, s, 1, head_dim))

    def flops(policy):
        def layer(x):
            return jnp.sin(api.attention(x, x, x, backend="blocked"))

        layer = jax.checkpoint(layer, policy=policy)
        grad = jax.value_and_grad(lambda x: layer(x).sum())
        return count_dot_flops(compiled_text(grad, x))

    policies = jax.checkpoint_policies
    assert flops(policies.nothing_saveable) == 9 * tile
    assert flops(api.keep_core) == 7 * tile
