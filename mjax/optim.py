"""Build the optimizer: LAMB or AdamW, schedule, clipping, skip of bad steps."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: Literal["lamb", "adamw"] = "lamb"
    """lamb: layerwise adaptive large batch; adamw: Adam, decoupled weight decay."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to the end, warm-up-stable-decay, or constant."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    final_lr_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """wsd: fraction of all steps spent in the final linear decay."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay; not on biases and norm scales."""
    clip_value: float | None = None
    """Clip each gradient entry to +-this, before the norm is taken."""
    clip_norm: float | None = 1.0
    """Scale gradients down to this global L2 norm."""
    skip_spike_factor: float | None = None
    """Skip a step whose gradient norm exceeds this times its running mean."""
