"""The choices of a pipeline; no array and no device is touched."""

import dataclasses
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b"]
Stash = Literal["residuals", "input"]


Idle = Literal["compute", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Choices that change time and memory, never the result."""

    stash: Stash = "residuals"
    """What a forward slot keeps: what the layers' remat policy lets them keep, or the
    chunk's input alone, from which the backward slot computes the chunk again."""
    idle: Idle = "compute"
    """What a stage does in a slot that has nothing to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The pipeline, for a mesh with --mesh.pp above 1."""

    schedule: ScheduleName | None = None
    """Order of the work; None: interleaved-1f1b with chunks > 1, else 1f1b."""
    chunks: int = 1
    """Chunks of layers per stage; each one more cuts the bubble and adds sends."""
    stash: Stash = "residuals"
    """Kept from forward to backward: residuals (what --model.remat keeps), or input
    (the chunk's input alone; the backward pass computes the chunk again)."""
    idle: Literal["auto", "compute", "skip"] = "auto"
    """A stage with nothing to do: compute on anything, or skip by a condition, which
    makes a GPU wait for the host. auto: skip on CPU without --mesh.tp-overlap chunks,
    else compute."""
    uneven_layers: bool = False
    """Let chunks differ by one layer, or one pattern of layer kinds: first the last is
    shorter, then the first."""

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        if self.chunks < 1:
            raise ValueError(f"--pipeline.chunks must be at least 1, got {self.chunks}")

    @property
    def schedule_name(self) -> ScheduleName:
        """The schedule, chosen where none is named."""
        if self.schedule is not None:
            return self.schedule
        return "interleaved-1f1b" if self.chunks > 1 else "1f1b"

    def idle_on(self, platform: str, *, permutes: bool) -> Idle:
        """Return what idle slots do.

        Args:
          platform: of the devices, such as cpu or gpu.
          permutes: see `check_pipeline`.
        """
        if self.idle != "auto":
            return self.idle
        return "skip" if platform == "cpu" and not permutes else "compute"
