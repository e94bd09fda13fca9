"""Remat policy that keeps the results of attention, so its forward pass runs once.

Input: a primitive that jax.checkpoint passes to a policy. Output: whether its results
are kept. `blocked` and `mosaic_gpu` name their output and log-sum-exp. `cudnn` cannot,
because jax defines its derivative. So the policy recognises the primitive of cuDNN's
forward kernel, which has the same two results. No result of `reference` is kept.
"""

from typing import Any

import jax

OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""Name of cuDNN's forward primitive in jax/_src/cudnn/fused_attention_stablehlo.py."""


def keep_core(primitive: Any, *args: Any, **params: Any) -> bool:
    """Return whether to keep a primitive's results; a policy for jax.checkpoint."""
    named = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    return primitive.name == CUDNN_FORWARD or named(primitive, *args, **params)
