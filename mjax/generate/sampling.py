"""Draw tokens from logits: temperature, top-k, top-p, and a seed for each text.

Input: float32 logits of one position per slot, and the options of each slot. Output:
tokens and their log-probabilities. A draw depends on the logits, the seed and the
position of the token, never on the slot or on other slots.

Source: nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751, section 3.1. The order
is temperature, top-k, top-p, as in transformers. Tokens as likely as the last one kept
are kept too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mjax.generate.requests import MAX_LOGPROBS


class Draw(NamedTuple):
    """Options of each slot; arrays [slots], so that one program serves all requests."""

    temperature: Float[Array, "slots"]
    """0 takes the likeliest token."""
    top_k: Int[Array, "slots"]
    """From 1 to V; V keeps all tokens."""
    top_p: Float[Array, "slots"]
    """Above 0; 1 keeps all tokens."""
    seed: UInt32[Array, "slots"]


class Drawn(NamedTuple):
    """Drawn tokens of one position per slot."""

    token: Int[Array, "*slots"]
    logprob: Float[Array, "*slots"]
    """Log-probability before temperature and cuts; 0 if not requested."""
    top_tokens: Int[Array, "*slots n"]
    """The likeliest tokens, the likeliest first; 0 if not requested. n is MAX_LOGPROBS,
    or V if that is less."""
    top_logprobs: Float[Array, "*slots n"]


def draw(
    logits: Float[Array, "slots V"],
    how: Draw,
    positions: Int[Array, "slots"],
    *,
    with_logprobs: Bool[Array, ""],
) -> Drawn:
    """Draw one token per slot.

    Log-probabilities are a branch of the program, not a program of their own: that one
    would be compiled while the texts of all other requests wait.

    Args:
      logits: float32; -inf for ids without a token.
      how: options of each slot.
      positions: positions of the drawn tokens.
      with_logprobs: whether to compute log-probabilities.
    """
    is_cut = (how.temperature > 0) & ((how.top_k < logits.shape[1]) | (how.top_p < 1))
    likeliest = jnp.argmax(logits, axis=-1)

    def at_random(logits: jax.Array) -> jax.Array:
        hot = jnp.where(how.temperature > 0, how.temperature, 1.0)
        scaled = logits / hot[:, None]
        scaled = jax.lax.cond(
            is_cut.any(),
            lambda x: jax.vmap(_cut)(x, how.top_k, how.top_p),
            _same,
            scaled,
        )
        drawn = jax.vmap(_categorical)(scaled, how.seed, positions)
        return jnp.where(how.temperature > 0, drawn, likeliest)

    def greedily(_: jax.Array) -> jax.Array:
        return likeliest

    def with_zeros(logits: jax.Array, token: jax.Array) -> Drawn:
        top = jnp.zeros_like(logits[:, :num_top])
        return Drawn(token.astype(jnp.int32), top[:, 0], top.astype(jnp.int32), top)

    def measured(logits: jax.Array, token: jax.Array) -> Drawn:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        logprob = jnp.take_along_axis(logits, token[:, None], 1) - total
        top, top_tokens = jax.lax.top_k(logits, num_top)
        return Drawn(
            token.astype(jnp.int32),
            logprob[:, 0],
            top_tokens.astype(jnp.int32),
            top - total,
        )

    num_top = min(MAX_LOGPROBS, logits.shape[1])
    is_random = (how.temperature > 0).any()
    return jax.lax.switch(  # one choice per step, as on a GPU each waits for the host
        jnp.where(with_logprobs, 2, is_random.astype(jnp.int32)),
        [
            lambda x: with_zeros(x, greedily(x)),
            lambda x: with_zeros(x, at_random(x)),
            lambda x: measured(x, jax.lax.cond(is_random, at_random, greedily, x)),
        ],
        logits,
    )


def _same(x: jax.Array) -> jax.Array:
    return x


def _cut(
    scaled: Float[Array, " V"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, " V"]:
    """Keep the logits of the likeliest tokens; set the others to -inf."""
    ranked = -jnp.sort(-scaled)
    kept = jnp.arange(ranked.size) < top_k
    share = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    before = jnp.cumsum(share) - share
    kept &= (before < top_p) | (jnp.arange(ranked.size) == 0)
    least = jnp.min(jnp.where(kept, ranked, jnp.inf))
    return jnp.where(scaled >= least, scaled, -jnp.inf)


def _categorical(
    logits: Float[Array, " V"], seed: UInt32[Array, ""], position: Int[Array, ""]
) -> Int[Array, ""]:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.categorical(key, logits)
