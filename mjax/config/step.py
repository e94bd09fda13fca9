"""Settings of a step: batch, dtypes, and limits of combined collectives."""

import dataclasses
from typing import Literal

Precision = Literal["float32", "bfloat16"]
Matmul = Literal["compute", "fp8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The global batch."""

    size: int = 8
    """Sequences per step over all devices."""
    microbatches: int = 1
    """Microbatches per step, whose gradients are accumulated."""

    def __post_init__(self) -> None:
        """Refuse microbatches of unequal size."""
        for name in ("size", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--batch.{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.size % self.microbatches:
            above = -(-self.size // self.microbatches) * self.microbatches
            raise ValueError(
                "--batch.size must be a multiple of --batch.microbatches "
                f"{self.microbatches}, got {self.size}; use --batch.size {above}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of stored parameters, compute and gradient reduction."""

    params: Precision = "float32"
    """Dtype of stored (master) parameters and optimizer moments."""
    compute: Precision = "bfloat16"
    """Dtype of activations and gathered parameters."""
    reduce: Precision = "float32"
    """Dtype in which gradients are accumulated over microbatches and reduced. bfloat16
    rounds the sum after each microbatch. Within a microbatch sums are float32."""
    matmul: Matmul = "compute"
    """Dtype of the operands of the blocks' projections: compute, the same as
    --precision.compute, or fp8."""

    def __post_init__(self) -> None:
        """Refuse FP8 matmuls if the compute dtype is not bfloat16."""
        if self.matmul == "fp8" and self.compute != "bfloat16":
            raise ValueError(
                "--precision.matmul fp8 needs --precision.compute bfloat16, got "
                f"{self.compute}; use --precision.compute bfloat16, or "
                "--precision.matmul compute"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineConfig:
    """Size limits of combined collectives over data parallelism, in bytes."""

    gather_bytes: int | None = None
    """Largest combined all-gather of weights. None: the size of one layer; with a
    pipeline, the size of its smallest matrix."""
    reduce_bytes: int | None = None
    """Largest combined gradient reduction, by its size before the reduction. None: the
    size of one layer; with a pipeline, the size of its smallest matrix."""

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        for name in ("gather_bytes", "reduce_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                flag = f"--combine.{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} must be at least 0, got {value}; 0 combines nothing; "
                    "leave it out for the default"
                )
