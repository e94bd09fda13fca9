"""The rules of a schedule, checked without what builds it.

`validate` proves of a table that following it computes the gradients.
"""

import collections
import itertools
from typing import Literal

import numpy as np

from mjax.pipeline.schedule import IDLE, Schedule


def validate(schedule: Schedule) -> None:
    """Check every rule of a schedule: that following it computes the gradients.

    Raises:
      ValueError: a half-tick is missing or doubled, a value is not used in the tick
        after the one that made it, two values go into a buffer in one tick, or a buffer
        entry is overwritten while in use.
    """
    forward = ticks_of(schedule, "forward")
    backward = ticks_of(schedule, "backward")
    last = schedule.num_stages * schedule.num_chunks - 1
    for (chunk, microbatch), tick in forward.items():
        what = f"the forward slot of chunk {chunk}, microbatch {microbatch}"
        if chunk > 0 and tick != forward[chunk - 1, microbatch] + 1:
            raise ValueError(
                f"{what} is in tick {tick}; its input arrives in tick "
                f"{forward[chunk - 1, microbatch] + 1}"
            )
    for (chunk, microbatch), tick in backward.items():
        what = f"the backward slot of chunk {chunk}, microbatch {microbatch}"
        if tick < forward[chunk, microbatch]:
            raise ValueError(f"{what} is in tick {tick}, before its forward slot")
        if chunk < last and tick != backward[chunk + 1, microbatch] + 1:
            raise ValueError(
                f"{what} is in tick {tick}; its gradient arrives in tick "
                f"{backward[chunk + 1, microbatch] + 1}"
            )
    uses_forward = (schedule.forward_chunk != IDLE).any(axis=1)
    stash_ticks = np.flatnonzero(uses_forward)
    gradient_ticks = np.flatnonzero(
        uses_forward | (schedule.backward_chunk != IDLE).any(axis=1)
    )
    for stage in range(schedule.num_stages):
        check_buffer(schedule, stage, "stash", stash_ticks)
        check_buffer(schedule, stage, "gradient", gradient_ticks)


def ticks_of(
    schedule: Schedule, kind: Literal["forward", "backward"]
) -> dict[tuple[int, int], int]:
    """Return the tick of each (virtual stage, microbatch); check that each occurs
    once."""
    found: dict[tuple[int, int], int] = {}
    for stage in range(schedule.num_stages):
        chunks = getattr(schedule, f"{kind}_chunk")[:, stage]
        microbatches = getattr(schedule, f"{kind}_microbatch")[:, stage]
        filled = collections.Counter(
            zip(
                chunks[chunks != IDLE].tolist(),
                microbatches[chunks != IDLE].tolist(),
                strict=True,
            )
        )
        wanted = collections.Counter(
            itertools.product(
                range(schedule.num_chunks), range(schedule.num_microbatches)
            )
        )
        if filled != wanted:
            raise ValueError(
                f"stage {stage} must fill one {kind} slot for each (chunk, "
                f"microbatch); missing: {sorted(wanted - filled)[:4]}, too many: "
                f"{sorted(filled - wanted)[:4]}"
            )
        ticks = ticks_of_stage(schedule, kind, stage)
        for (chunk, microbatch), tick in ticks.items():
            found[chunk * schedule.num_stages + stage, microbatch] = tick
    return found


def ticks_of_stage(
    schedule: Schedule, kind: Literal["forward", "backward"], stage: int
) -> dict[tuple[int, int], int]:
    """Return the tick of each (local virtual stage, microbatch) of one stage."""
    chunks = getattr(schedule, f"{kind}_chunk")[:, stage]
    microbatches = getattr(schedule, f"{kind}_microbatch")[:, stage]
    ticks = np.flatnonzero(chunks != IDLE)
    names = zip(chunks[ticks].tolist(), microbatches[ticks].tolist(), strict=True)
    return dict(zip(names, ticks.tolist(), strict=True))


def check_buffer(
    schedule: Schedule,
    stage: int,
    name: Literal["stash", "gradient"],
    written_ticks: np.ndarray,
) -> None:
    """Check that every read finds what was written for it, not a later write."""
    write = getattr(schedule, f"{name}_write")[:, stage]
    read = getattr(schedule, f"{name}_read")[:, stage]
    forward = ticks_of_stage(schedule, "forward", stage)
    last = (schedule.num_chunks - 1, schedule.num_stages - 1)
    # IDLE is not a buffer entry: as an index it would select the last one.
    nowhere = written_ticks[write[written_ticks] == IDLE]
    if nowhere.size:
        raise ValueError(
            f"stage {stage} has no {name} slot to write in tick {nowhere[0]}"
        )
    reader: dict[int, int] = {}
    for (chunk, microbatch), tick in ticks_of_stage(
        schedule, "backward", stage
    ).items():
        from_forward = name == "stash" or (chunk, stage) == last
        written = forward[chunk, microbatch] if from_forward else tick
        if written in reader:
            raise ValueError(
                f"stage {stage} has one {name} slot to write in tick {written}, for "
                f"what ticks {reader[written]} and {tick} need"
            )
        reader[written] = tick
        slot = read[tick]
        if slot == IDLE or write[written] != slot:
            raise ValueError(
                f"stage {stage} reads {name} slot {slot} in tick {tick}; what it needs "
                f"was put into slot {write[written]} in tick {written}"
            )
        later = np.flatnonzero(write[written + 1 : tick + 1] == slot)
        if later.size:
            raise ValueError(
                f"stage {stage} overwrites {name} slot {slot} in tick "
                f"{written + 1 + later[0]}; it is needed until tick {tick}"
            )
