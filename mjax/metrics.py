"""Metrics: device scalars to rows, files and the progress line."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is reported, and how often."""

    every: int = 10
    """Steps between progress lines."""
    tensorboard: bool = False
    """Write TensorBoard event files too (extra: track)."""
