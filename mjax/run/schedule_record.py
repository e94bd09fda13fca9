"""Record the schedule of a pipeline in the work dir.

Input: the tables that the step follows. Output: the file of `mjax.observe.schedule`,
or none without a pipeline.
"""

from pathlib import Path

from mjax.observe import schedule
from mjax.pipeline.make import Pipeline
from mjax.pipeline.schedule import IDLE, Table
from mjax.run.metrics import say
from mjax.run.record import Start


def write(work_dir: Path, start: Start, pipeline: Pipeline | None) -> None:
    """Write the schedule of a start. One process of the run calls this.

    A failed write is a warning; training continues.

    Args:
      work_dir: work dir of the run.
      start: start of the run.
      pipeline: pipeline of the step; None without one.
    """
    if pipeline is None:
        return
    tables = pipeline.schedule
    record = schedule.Schedule(
        run=start.run,
        generation=start.number,
        name=tables.name,
        idle=pipeline.options.idle,
        num_stages=tables.num_stages,
        num_chunks=tables.num_chunks,
        num_microbatches=tables.num_microbatches,
        forward=_entries(tables.forward_chunk, tables.forward_microbatch),
        backward=_entries(tables.backward_chunk, tables.backward_microbatch),
    )
    path = schedule.path_of(work_dir, start.number)
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(schedule.to_json(record))
    except OSError as error:
        say(f"warning: {path} cannot be written, training continues: {error.strerror}")


def _entries(chunks: Table, microbatches: Table) -> list[list[list[int] | None]]:
    """Join the two tables of a direction: [chunk, microbatch], or None where idle."""
    return [
        [
            None if chunk == IDLE else [chunk, microbatch]
            for chunk, microbatch in zip(*row, strict=True)
        ]
        for row in zip(chunks.tolist(), microbatches.tolist(), strict=True)
    ]
