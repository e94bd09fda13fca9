"""Remat policy that keeps the results of attention, so its forward pass runs once.

Input: a primitive that jax.checkpoint passes to a policy. Output: whether its results
are kept. `blocked` and `mosaic_gpu` name their output and log-sum-exp. `cudnn` cannot,
because jax defines its derivative. So the policy recognises the primitive of its
forward kernel, which has the same two results. `reference` keeps nothing.
"""

from typing import Any

import jax

OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""Primitive of the forward kernel, in jax/_src/cudnn/fused_attention_stablehlo.py."""


def keep_core(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keep the output and the log-sum-exp of attention: a policy of jax.checkpoint."""
    named = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    return primitive.name == CUDNN_FORWARD or named(primitive, *args, **params)
