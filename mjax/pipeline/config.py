"""Settings of a pipeline. Touches no array and no device."""

import dataclasses
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b"]
Stash = Literal["residuals", "input"]


Idle = Literal["compute", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that change time and memory, never the result."""

    stash: Stash = "residuals"
    """What a forward half-tick keeps for its backward half-tick: the residuals that the
    layers' remat policy allows, or only the input of the virtual stage, which the
    backward half-tick then runs forward again."""
    idle: Idle = "compute"
    """What a stage does in an idle half-tick: compute on arbitrary data, or skip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism, for a mesh with --mesh.pp above 1."""

    schedule: ScheduleName | None = None
    """Order of forward and backward passes. Default: interleaved-1f1b if
    --pipeline.chunks > 1, else 1f1b."""
    chunks: int = 1
    """Virtual stages per stage, each of consecutive layers. More of them shrink the
    bubble and add sends."""
    stash: Stash = "residuals"
    """What is kept for the backward pass: residuals (as --model.remat says), or input
    (only the input of a virtual stage; the backward pass runs it forward again)."""
    idle: Literal["auto", "compute", "skip"] = "auto"
    """What an idle stage does: compute on arbitrary data, or skip the work by a
    condition, which makes a GPU wait for the host. auto: skip on CPU without
    --mesh.tp-overlap chunks, else compute."""
    uneven_layers: bool = False
    """Let virtual stages differ by one layer, or by one pattern of layer kinds. The
    last one is shortened first, then the first one."""

    def __post_init__(self) -> None:
        """Refuse fewer than one virtual stage."""
        if self.chunks < 1:
            raise ValueError(f"--pipeline.chunks must be at least 1, got {self.chunks}")

    @property
    def schedule_name(self) -> ScheduleName:
        """The schedule, or the default if none is set."""
        if self.schedule is not None:
            return self.schedule
        return "interleaved-1f1b" if self.chunks > 1 else "1f1b"

    def idle_on(self, platform: str, *, permutes: bool) -> Idle:
        """Return what a stage does in an idle half-tick.

        Args:
          platform: platform of the devices, such as cpu or gpu.
          permutes: see `check_pipeline`.
        """
        if self.idle != "auto":
            return self.idle
        return "skip" if platform == "cpu" and not permutes else "compute"
