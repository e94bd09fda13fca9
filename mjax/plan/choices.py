"""Count how often a stage of a pipeline takes the choices in its ticks.

Enters: the op_name of a conditional, and the schedule. Leaves: the part of the turns of
its loop in which the heavy branch runs.

The analysis takes the heaviest branch of every choice, in every tick. In a pipeline
that is too often:

- embedding, loss, and the backward pass of the embedding: one stage takes each as often
  as there are microbatches, and the others wait for it. So it counts in each tick in
  which the first stage, or the last, takes it.
- the exchange of a chunk (`pipeline.held`): each stage does it in other ticks, and all
  equally often. It counts as often as one stage does it. This assumes that the other
  stages do not wait: transfers beside the other slot have time to spare.
"""

import re

import numpy as np
from jaxtyping import Bool

from mjax import scopes
from mjax.pipeline.held import held_in_backward, held_in_forward
from mjax.pipeline.schedule import Schedule

_CHOICE_OF_TICK = re.compile(
    r"shard_map/ticks\.(?P<start>\d+)\.1\.(?P<count>\d+)/while/body/(?:eval_jaxpr/)*"
    rf"(?P<kind>(?:phase\.(?:loss|backward)/)?(?:{scopes.EXCHANGE}/)?)cond$"
)
"""op_name of a choice of `mjax.pipeline.tick`; those of a layer are deeper, and that of
a slot that is skipped has a scope of its own."""


def taken_share(op_name: str, schedule: Schedule | None) -> float:
    """Return the part of the turns in which the heavy branch of a choice is taken.

    Args:
      op_name: of the conditional.
      schedule: of the pipeline; None with one stage.
    Returns:
      Between 0 and 1; 1 if it is not a choice of a tick.
    """
    found = _CHOICE_OF_TICK.search(op_name)
    if schedule is None or found is None:
        return 1.0
    start, count = int(found["start"]), int(found["count"])
    return float(_taken(found["kind"], schedule)[start : start + count].mean())


def _taken(kind: str, schedule: Schedule) -> Bool[np.ndarray, "ticks stages"]:
    """Say in which ticks a choice is taken, for each stage that may take it."""
    last_chunk = schedule.num_chunks - 1
    backward, exchange = scopes.phase("backward"), scopes.EXCHANGE
    if kind == f"{scopes.phase('loss')}/":
        return schedule.forward_chunk[:, -1:] == last_chunk
    if kind == f"{backward}/":
        return schedule.backward_chunk[:, :1] == 0
    if kind == f"{exchange}/":
        held = held_in_forward(schedule.forward_chunk)
        return np.diff(held, axis=0, prepend=held[:1]) != 0
    if kind == f"{backward}/{exchange}/":
        held = held_in_backward(schedule.backward_chunk)
        return np.diff(held, axis=0, append=held[-1:]) != 0
    # A tick embeds for the next one.
    return np.pad(schedule.forward_chunk[1:, :1] == 0, ((0, 1), (0, 0)))
