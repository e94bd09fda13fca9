"""Rotary position embedding.

Source: Su et al. 2021, arXiv:2104.09864, eq. 34; linear scaling: Chen et al. 2023,
arXiv:2306.15595, eq. 4; partial and interleaved forms as in GPT-J; llama3: Llama 3.1,
`apply_scaling` of its reference code; yarn: Peng et al. 2023, arXiv:2309.00071, section
3.2 (frequencies) and 3.4 (magnitude). llama3 and yarn are computed as in
`modeling_rope_utils.py` of transformers 5.23.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.layers.config import RopeConfig

Angles = tuple[Float[Array, "B T R"], Float[Array, "B T R"]]


def angles(positions: Int[Array, "B T"], config: RopeConfig) -> Angles:
    """Compute cosine and sine [B, T, R] in float32, of R rotated pairs of entries."""
    frequency = frequencies(config)
    phase = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    if config.magnitude == 1.0:
        return cos, sin
    return cos * config.magnitude, sin * config.magnitude


def frequencies(config: RopeConfig) -> Float[Array, " R"]:
    """Return the angle of each of R pairs at position 1, float32.

    linear divides all frequencies by `scaling`. llama3 and yarn divide the frequencies
    of pairs with at most `slow_turns` turns in the original length, and do not change
    those of pairs with at least `fast_turns`. In between they interpolate: llama3 by
    the number of turns, yarn by the index of the pair.
    """
    width = config.rotated_width
    exponent = jnp.arange(0, width, 2, dtype=jnp.float32) / max(width, 1)
    if config.type == "linear":
        return config.base**-exponent / config.scaling
    plain = config.base**-exponent
    if config.type == "llama3":
        turns = config.original_len * plain / (2 * math.pi)
        kept = (turns - config.slow_turns) / (config.fast_turns - config.slow_turns)
    else:
        kept = 1.0 - _ramp(config)
    kept = jnp.clip(kept, 0.0, 1.0)
    return (1.0 - kept) * plain / config.scaling + kept * plain


def _ramp(config: RopeConfig) -> Float[Array, " R"]:
    """Interpolate by pair index: 0 at `fast_turns`, 1 at `slow_turns`; not clipped."""
    width = config.rotated_width

    def pair(turns: float) -> float:
        wavelength = config.original_len / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(config.base))

    low, high = pair(config.fast_turns), pair(config.slow_turns)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    return (jnp.arange(width // 2, dtype=jnp.float32) - low) / (high - low)


def rotate(
    x: Float[Array, "B T N H"], cos_sin: Angles, config: RopeConfig
) -> Float[Array, "B T N H"]:
    """Rotate R pairs, the first 2R entries of each head, in float32; dtype of x."""
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
