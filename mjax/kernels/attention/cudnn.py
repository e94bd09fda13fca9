"""Attention by cuDNN's fused kernels, through jax.nn.dot_product_attention.

Enters and leaves: as in `reference`, on an NVIDIA GPU, in bfloat16 or float16.
"""

import jax
from jaxtyping import Array, Float


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attend, causally within the window or without any mask.

    Args:
      q: queries.
      k: keys; head n of q reads head n * K // N.
      v: values.
      causal: hide the keys after the query.
      window: number of keys that a query sees, itself included; None means all. Must be
        None if not causal.
      scale: factor on the scores.

    Returns:
      The output in the dtype of q.
    """
    # JAX counts only the keys before the query. is_causal is set with the window,
    # because the window alone is lowered without a causal mask (jax 0.11.2).
    local_window = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=causal,
        local_window_size=local_window,
        implementation="cudnn",
    )
