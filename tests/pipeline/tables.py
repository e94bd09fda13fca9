"""Schedules for tests, and the filled slots of their tables."""

from collections.abc import Iterator

import numpy as np

from mjax.pipeline.config import ScheduleName
from mjax.pipeline.schedule import IDLE, Schedule, build


def interleaved(num_stages: int, num_chunks: int, num_microbatches: int) -> Schedule:
    return build(
        "interleaved-1f1b",
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )


def one_chunk(name: ScheduleName, num_stages: int, num_microbatches: int) -> Schedule:
    return build(
        name, num_stages=num_stages, num_chunks=1, num_microbatches=num_microbatches
    )


def entries(schedule: Schedule, kind: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tick, stage, local chunk, microbatch) of every filled slot."""
    chunk = getattr(schedule, f"{kind}_chunk")
    microbatch = getattr(schedule, f"{kind}_microbatch")
    for tick, stage in np.argwhere(chunk != IDLE).tolist():
        yield tick, stage, int(chunk[tick, stage]), int(microbatch[tick, stage])
