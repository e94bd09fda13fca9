"""Rotary position embedding.

Source: Su et al. 2021, arXiv:2104.09864, eq. 34; linear scaling: Chen et al. 2023,
arXiv:2306.15595, eq. 4; partial and interleaved forms as in GPT-J.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.layers.config import RopeConfig

Angles = tuple[Float[Array, "B T R"], Float[Array, "B T R"]]


def angles(positions: Int[Array, "B T"], config: RopeConfig) -> Angles:
    """Compute cosine and sine [B, T, R/2] in float32, R the rotated width."""
    width = config.rotated_width
    exponent = jnp.arange(0, width, 2, dtype=jnp.float32) / max(width, 1)
    frequency = config.base**-exponent / config.scaling
    phase = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(phase), jnp.sin(phase)


def rotate(
    x: Float[Array, "B T N H"], cos_sin: Angles, config: RopeConfig
) -> Float[Array, "B T N H"]:
    """Rotate the first R entries of every head; computed in float32, dtype of x."""
    cos, sin = (a[:, :, None, :] for a in cos_sin)
    width = config.rotated_width
    head, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    if config.interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        out = out.reshape(head.shape)
    else:
        a, b = jnp.split(head, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([out.astype(x.dtype), rest], axis=-1)
