"""One training step as a pure function of state and batch."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The global batch."""

    size: int = 8
    """Sequences per step over all devices."""
    microbatches: int = 1
    """Pieces whose gradients are accumulated within a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of the stored parameters, of the compute, and of gradient reduction."""

    params: Literal["float32", "bfloat16"] = "float32"
    """Stored (master) parameters and optimizer moments."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Activations and the gathered parameters."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Gradient accumulation and reduction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out text."""

    every: int = 100
    """Steps between evaluations; one more at the end."""
    batches: int = 8
    """Held-out batches per evaluation."""
