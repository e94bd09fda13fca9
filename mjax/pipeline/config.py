"""The choices of a pipeline, and what they come to on a mesh.

Enters: `PipelineConfig`, the layers of a model, P stages, M microbatches. Leaves:
`Pipeline`, the schedule and the cut of the layers that the executor follows, or an
error with the rule and the numbers. No array and no device is touched.
"""

import dataclasses
from typing import Literal

from mjax.pipeline.partition import Partition, split
from mjax.pipeline.schedule import Schedule, ScheduleName, build, check

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline that fits a model, a batch and a mesh."""

    schedule: Schedule
    partition: Partition
    options: Options


def check_pipeline(
    config: PipelineConfig,
    *,
    num_layers: int,
    period: int,
    num_stages: int,
    num_microbatches: int,
    permutes: bool,
) -> Partition:
    """Check that a pipeline fits; return the cut of the layers.

    Args:
      config: the choices.
      num_layers: L.
      period: layers after which the pattern of layer kinds repeats.
      num_stages: P.
      num_microbatches: M.
      permutes: a layer sends around the ring of another axis (--mesh.tp-overlap
        chunks), for which all devices of the mesh must meet.
    Raises:
      ValueError: it does not fit; the message has the rule, without advice.
    """
    if num_stages * config.chunks > 1:
        if config.idle == "skip" and permutes:
            raise ValueError(
                "--pipeline.idle skip keeps idle stages out of the permutes of "
                "--mesh.tp-overlap chunks, and the other stages would wait forever"
            )
        check(
            config.schedule_name,
            num_stages=num_stages,
            num_chunks=config.chunks,
            num_microbatches=num_microbatches,
        )
    return split(
        num_layers,
        num_stages=num_stages,
        num_chunks=config.chunks,
        period=period,
        uneven=config.uneven_layers,
    )


def make_pipeline(
    config: PipelineConfig,
    *,
    num_layers: int,
    period: int,
    num_stages: int,
    num_microbatches: int,
    platform: str,
    permutes: bool,
) -> Pipeline:
    """Build the schedule and the cut of the layers.

    Args:
      config: the choices.
      num_layers: L.
      period: layers after which the pattern of layer kinds repeats.
      num_stages: P.
      num_microbatches: M.
      platform: of the devices, such as cpu or gpu.
      permutes: see `check_pipeline`.
    Raises:
      ValueError: as `check_pipeline`.
    """
    partition = check_pipeline(
        config,
        num_layers=num_layers,
        period=period,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        permutes=permutes,
    )
    schedule = build(
        config.schedule_name,
        num_stages=num_stages,
        num_chunks=config.chunks,
        num_microbatches=num_microbatches,
    )
    idle = config.idle_on(platform, permutes=permutes)
    options = Options(stash=config.stash, idle=idle)
    return Pipeline(schedule=schedule, partition=partition, options=options)
