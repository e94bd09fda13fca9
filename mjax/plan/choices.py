"""Count how often a pipeline stage takes a conditional's heavy branch.

Input: the op_name of a conditional, and the schedule. Output: the fraction of the
iterations of its loop in which the heavy branch runs, and what that branch computes.

The analysis assumes the heaviest branch of every conditional in every tick. In a
pipeline this is too often:

- embedding, loss, and backward pass of the embedding: one stage (the first or the last)
  runs each of them once per microbatch, and the other stages wait. So they count in
  each tick in which that stage runs them.
- change of virtual stage (`pipeline.held`): the stages change in different ticks, all
  equally often. So the changes of one stage count. This assumes that the other stages
  do not wait, because transfers overlap the other half-tick with time to spare.
"""

import re

import numpy as np
from jaxtyping import Bool

from mjax.pipeline.held import held_in_backward, held_in_forward
from mjax.pipeline.schedule import Schedule
from mjax.trace import scopes

_CHOICE_OF_TICK = re.compile(
    r"shard_map/ticks\.(?P<start>\d+)\.1\.(?P<count>\d+)/while/body/(?:eval_jaxpr/)*"
    rf"(?P<kind>(?:phase\.(?:loss|backward)/)?(?:{scopes.EXCHANGE}/)?)cond$"
)
"""op_name of a conditional of `mjax.pipeline.tick`. Conditionals of a layer are nested
more deeply, and the one that skips a half-tick has its own scope."""


_PARTS = {
    f"{scopes.phase('loss')}/": "head and loss",
    f"{scopes.phase('backward')}/": "backward pass of the embedding",
    f"{scopes.EXCHANGE}/": "change of virtual stage",
    f"{scopes.phase('backward')}/{scopes.EXCHANGE}/": "change of virtual stage",
    "": "embedding",
}
"""Names of the conditional parts of a tick; the keys are the scopes in an op_name."""


def choice(op_name: str) -> str | None:
    """Return the name of the part of a tick that a conditional decides.

    The result is None for any other conditional, such as one of a layer.
    """
    found = _CHOICE_OF_TICK.search(op_name)
    return None if found is None else _PARTS[found["kind"]]


def taken_share(op_name: str, schedule: Schedule | None) -> float:
    """Return the fraction of iterations that take the heavy branch of a conditional.

    Args:
      op_name: op_name of the conditional.
      schedule: schedule of the pipeline; None with one stage.
    Returns:
      Between 0 and 1; 1 for a conditional that decides no part of a tick.
    """
    found = _CHOICE_OF_TICK.search(op_name)
    if schedule is None or found is None:
        return 1.0
    start, count = int(found["start"]), int(found["count"])
    return float(_taken(found["kind"], schedule)[start : start + count].mean())


def _taken(kind: str, schedule: Schedule) -> Bool[np.ndarray, "ticks stages"]:
    """Return whether a stage takes the heavy branch in a tick.

    There is a column for each stage that may take it: the first, the last, or all.
    """
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
    # A tick computes the embedding for the next tick.
    return np.pad(schedule.forward_chunk[1:, :1] == 0, ((0, 1), (0, 0)))
