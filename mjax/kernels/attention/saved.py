"""Names of what the backward pass of a flash backend keeps.

With both saved (jax.checkpoint_policies.save_only_these_names) it does not run its
forward pass again.
"""

OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"
