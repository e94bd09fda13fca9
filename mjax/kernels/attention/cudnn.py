"""Attention by cuDNN's fused kernels, through jax.nn.dot_product_attention.

Input and output are those of `reference`, in bfloat16 or float16, on an NVIDIA GPU.
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
      causal: whether the keys after a query are hidden.
      window: number of keys that a query sees, its own included; None means all. Must
        be None if not causal.
      scale: factor on the scores.

    Returns:
      The output in the dtype of q.
    """
    # JAX's window leaves out the query's own key. is_causal is set as well, because a
    # window alone is lowered without a causal mask (jax 0.11.2).
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
