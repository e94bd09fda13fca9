"""Build the pipeline of a configuration on a mesh.

Input: `PipelineConfig`, the layers of a model, P stages, M microbatches. Output: a
`Pipeline` for the executor (the schedule, and the partition of the layers), or an error
with the rule and the numbers. Touches no array and no device.
"""

import dataclasses

from mjax.pipeline.config import Options, PipelineConfig
from mjax.pipeline.partition import Partition, split
from mjax.pipeline.schedule import Schedule, build, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A valid pipeline for a model, a batch and a mesh."""

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
    """Check that a pipeline fits model, batch and mesh; return the layer partition.

    Args:
      config: the settings.
      num_layers: L.
      period: layers after which the pattern of layer kinds repeats.
      num_stages: P.
      num_microbatches: M.
      permutes: whether a layer sends around the ring of another axis (--mesh.tp-overlap
        chunks), in which all devices of the mesh must take part.
    Raises:
      ValueError: the pipeline does not fit. The message states the rule without advice.
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
    """Build the schedule and the partition of the layers.

    Args:
      config: the settings.
      num_layers: L.
      period: layers after which the pattern of layer kinds repeats.
      num_stages: P.
      num_microbatches: M.
      platform: platform of the devices, such as cpu or gpu.
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
