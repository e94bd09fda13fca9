"""What a step is made of: batch, dtypes of its numbers, size of its collectives."""

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
    """Pieces whose gradients are accumulated within a step."""

    def __post_init__(self) -> None:
        """Refuse pieces that are not equal."""
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
    """Dtypes of the stored parameters, of the compute, and of gradient reduction."""

    params: Precision = "float32"
    """Stored (master) parameters and optimizer moments."""
    compute: Precision = "bfloat16"
    """Activations and the gathered parameters."""
    reduce: Precision = "float32"
    """Gradient accumulation and reduction."""
    matmul: Matmul = "compute"
    """Operands of the projections of the blocks: the compute dtype, or fp8 (8 bits)."""

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
    """Bytes that XLA may combine into one collective over data parallelism."""

    gather_bytes: int | None = None
    """Of gathered weights; None takes one layer, in a pipeline one matrix."""
    reduce_bytes: int | None = None
    """Of gradients before they are reduced; None takes one layer, or one matrix."""

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        for name in ("gather_bytes", "reduce_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                flag = f"--combine.{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} must be at least 0, got {value}; 0 combines nothing, and "
                    "without the flag mjax chooses"
                )
