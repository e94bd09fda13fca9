"""Pipeline schedules as tables: the work of each stage in each tick. NumPy only.

Input: the name of a schedule, P stages, v virtual stages per stage (`chunk` in names),
M microbatches. Output: tables [ticks, P], which `pipeline.run` executes and
`pipeline.show` draws.

The layers are divided into v P virtual stages. Stage s holds the virtual stages s,
s + P, s + 2P, ..., its local ones 0 to v - 1. A *tick* has a forward half-tick and a
backward half-tick. In each, a stage runs one microbatch through one virtual stage or is
idle. It sends the result at the end of the half-tick, and its neighbour uses it in the
next tick. The last virtual stage is an exception: it may run a microbatch forward and
backward in the same tick, because it sends nothing between the two.

Forward half-ticks go through the microbatches in groups of P, one virtual stage after
the other within a group. With g = k div (v P) and r = k mod (v P), the k-th forward
half-tick of stage s is in tick s + k and runs the local virtual stage r div P on
microbatch g P + r mod P. Backward half-ticks have the same order with the virtual
stages reversed. *1F1B* starts them as soon as the first gradient arrives, (v - 1) P + 2
(P - 1) - s ticks after the start. From then on, each tick has one forward and one
backward half-tick. *GPipe* runs all forward half-ticks first.

Source: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 (1F1B) and 2.2.2
(interleaved); Huang et al. 2019, arXiv:1811.06965 (GPipe). Differs: all stages move in
lockstep, as in the steady state of the paper's interleaved schedule. So a stage has up
to 2 (P - 1 - s) + (v - 1) P + 1 inputs of virtual stages in flight; in the paper's
plain 1F1B it has P - s. The bubble is the same, (P - 1) / (v M).
"""

import dataclasses
import heapq
import itertools
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int

from mjax.pipeline.config import ScheduleName

IDLE = -1
"""Table entry of an idle half-tick."""

Table = Int[np.ndarray, "ticks P"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive ticks with the same half-ticks: forward, backward or both."""

    start: int
    stop: int
    """First tick after the phase."""
    has_forward: bool
    has_backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The work of each stage in each tick, and the buffer entries that it uses.

    Tables have a row per tick and a column per stage. Virtual stages are numbered
    within their stage, from 0 to v - 1.
    """

    name: str
    num_chunks: int
    """v, virtual stages per stage."""
    num_microbatches: int
    forward_chunk: Table
    forward_microbatch: Table
    backward_chunk: Table
    backward_microbatch: Table
    stash_write: Table
    """Buffer entry in which the forward half-tick stores residuals for the backward
    half-tick; an entry not in use if the forward half-tick is idle."""
    stash_read: Table
    """Buffer entry that the backward half-tick reads."""
    gradient_write: Table
    """Buffer entry for the gradient that arrives in this tick, from the next stage or,
    for the last virtual stage, from the loss; an entry not in use if none arrives."""
    gradient_read: Table
    """Buffer entry that the backward half-tick reads."""

    @property
    def num_ticks(self) -> int:
        """Ticks from the first forward half-tick to the last backward half-tick."""
        return self.forward_chunk.shape[0]

    @property
    def num_stages(self) -> int:
        """P, stages."""
        return self.forward_chunk.shape[1]

    @property
    def num_stash_slots(self) -> int:
        """Number of entries of the ring buffer of residuals."""
        return int(self.stash_write.max()) + 1

    @property
    def num_gradient_slots(self) -> int:
        """Number of entries of the ring buffer of gradients that have arrived."""
        return int(self.gradient_write.max()) + 1

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in order: warm-up, steady, cool-down."""
        used = np.stack(
            [_is_used(self.forward_chunk), _is_used(self.backward_chunk)], 1
        )
        changes = np.flatnonzero((used[1:] != used[:-1]).any(axis=1)) + 1
        edges = [0, *changes.tolist(), self.num_ticks]
        return tuple(
            Phase(
                start=start,
                stop=stop,
                has_forward=bool(used[start, 0]),
                has_backward=bool(used[start, 1]),
            )
            for start, stop in itertools.pairwise(edges)
        )

    @property
    def bubble_ticks(self) -> int:
        """Idle forward half-ticks per stage; as many backward half-ticks are idle.

        All stages move in lockstep, so a half-tick takes its full time if at least one
        stage works in it.
        """
        work = self.num_chunks * self.num_microbatches
        return int(_is_used(self.forward_chunk).sum()) - work

    @property
    def bubble(self) -> float:
        """Idle time over ideal time; a backward half-tick takes two forward ones."""
        if not _is_used(self.backward_chunk).any():
            raise ValueError(
                f"{self.name} has no backward half-ticks, so it has no training bubble"
            )
        time = (
            _is_used(self.forward_chunk).sum() + 2 * _is_used(self.backward_chunk).sum()
        )
        return float(time / (3 * self.num_chunks * self.num_microbatches) - 1)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Maximum number of virtual-stage inputs in flight at once, by stage."""
        begun = np.cumsum(self.forward_chunk != IDLE, axis=0)
        done = np.cumsum(self.backward_chunk != IDLE, axis=0)
        done_before = np.vstack([np.zeros_like(done[:1]), done[:-1]])
        return tuple((begun - done_before).max(axis=0).tolist())

    @property
    def forward_sends(self) -> tuple[int, ...]:
        """Number of activations that each stage sends to the next one, by stage."""
        is_last = self.forward_chunk == self.num_chunks - 1
        is_last[:, :-1] = False
        return tuple(((self.forward_chunk != IDLE) & ~is_last).sum(axis=0).tolist())

    @property
    def backward_sends(self) -> tuple[int, ...]:
        """Number of gradients that each stage sends to the one before it, by stage."""
        is_first = self.backward_chunk == 0
        is_first[:, 1:] = False
        return tuple(((self.backward_chunk != IDLE) & ~is_first).sum(axis=0).tolist())


def build(
    name: ScheduleName, *, num_stages: int, num_chunks: int, num_microbatches: int
) -> Schedule:
    """Build a training schedule.

    Args:
      name: gpipe and 1f1b have one virtual stage per stage; interleaved-1f1b has any
        number.
      num_stages: P.
      num_chunks: v, virtual stages per stage.
      num_microbatches: M; a multiple of P if v > 1.
    Raises:
      ValueError: there is no schedule for these numbers.
    """
    check(
        name,
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )
    stage = np.arange(num_stages)
    if name == "gpipe":
        first_backward = num_microbatches + 2 * (num_stages - 1) - stage
    else:
        first_backward = (num_chunks - 1) * num_stages + 2 * (num_stages - 1) - stage
    chunk, microbatch = _order(num_stages, num_chunks, num_microbatches)
    num_ticks = int(first_backward[0]) + len(chunk)
    return _with_slots(
        name=name,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        forward_chunk=_place(chunk, stage, num_ticks),
        forward_microbatch=_place(microbatch, stage, num_ticks),
        backward_chunk=_place(num_chunks - 1 - chunk, first_backward, num_ticks),
        backward_microbatch=_place(microbatch, first_backward, num_ticks),
    )


def build_forward(
    *, num_stages: int, num_chunks: int, num_microbatches: int
) -> Schedule:
    """Build the schedule of an evaluation: forward half-ticks only, no residuals.

    Any number of microbatches is valid: if it is not a multiple of P, the last group
    has idle half-ticks.
    """
    groups = -(-num_microbatches // num_stages)
    padded = num_microbatches if num_chunks == 1 else groups * num_stages
    chunk, microbatch = _order(num_stages, num_chunks, padded)
    is_real = microbatch < num_microbatches
    chunk, microbatch = (np.where(is_real, x, IDLE) for x in (chunk, microbatch))
    num_ticks = num_stages - 1 + int(np.flatnonzero(is_real)[-1]) + 1
    stage = np.arange(num_stages)
    nothing = np.full((num_ticks, num_stages), IDLE, np.int32)
    return Schedule(
        name="forward",
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        forward_chunk=_place(chunk, stage, num_ticks),
        forward_microbatch=_place(microbatch, stage, num_ticks),
        backward_chunk=nothing,
        backward_microbatch=nothing,
        stash_write=nothing,
        stash_read=nothing,
        gradient_write=nothing,
        gradient_read=nothing,
    )


def check(
    name: str, *, num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    """Refuse numbers for which there is no schedule.

    Raises:
      ValueError: the message has the rule and the numbers.
    """
    if name not in get_args(ScheduleName):
        raise ValueError(
            "--pipeline.schedule must be one of "
            f"{', '.join(get_args(ScheduleName))}, got {name}"
        )
    counts = {
        "mesh.pp": num_stages,
        "pipeline.chunks": num_chunks,
        "batch.microbatches": num_microbatches,
    }
    for field, count in counts.items():
        if count < 1:
            raise ValueError(f"--{field} must be at least 1, got {count}")
    if name != "interleaved-1f1b" and num_chunks != 1:
        raise ValueError(
            f"with --pipeline.schedule {name}, --pipeline.chunks must be 1, got "
            f"{num_chunks}"
        )
    if num_chunks > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"with --pipeline.chunks {num_chunks}, --batch.microbatches must be a "
            f"multiple of --mesh.pp {num_stages}, got {num_microbatches}"
        )


def _order(
    num_stages: int, num_chunks: int, num_microbatches: int
) -> tuple[Int[np.ndarray, " slots"], Int[np.ndarray, " slots"]]:
    """Return the virtual stage and the microbatch of each forward half-tick k."""
    k = np.arange(num_chunks * num_microbatches, dtype=np.int32)
    if num_chunks == 1:
        return np.zeros_like(k), k
    group, rest = np.divmod(k, num_chunks * num_stages)
    chunk, place = np.divmod(rest, num_stages)
    return chunk, group * num_stages + place


def _place(
    values: Int[np.ndarray, " slots"], first: Int[np.ndarray, " P"], num_ticks: int
) -> Table:
    """Make a table; the values of stage s start in tick first[s]."""
    table = np.full((num_ticks, len(first)), IDLE, np.int32)
    for stage, start in enumerate(first):
        column = table[start : start + len(values), stage]
        column[:] = values[: len(column)]
    return table


def _is_used(table: Table) -> Bool[np.ndarray, " ticks"]:
    """Return, for each tick, whether at least one stage has work in it."""
    return (table != IDLE).any(axis=1)


def _with_slots(**fields) -> Schedule:
    """Make a schedule from its tables: assign a buffer entry to each stored value."""
    forward, backward = fields["forward_chunk"], fields["backward_chunk"]
    nothing = np.full_like(forward, IDLE)
    schedule = Schedule(
        **fields,
        stash_write=nothing.copy(),
        stash_read=nothing.copy(),
        gradient_write=nothing.copy(),
        gradient_read=nothing.copy(),
    )
    uses_forward, uses_backward = _is_used(forward), _is_used(backward)
    last_chunk, last_stage = schedule.num_chunks - 1, schedule.num_stages - 1
    for stage in range(schedule.num_stages):
        end = _ticks_of_stage(schedule, "backward", stage)
        stash, gradient = {}, {}
        for (chunk, microbatch), tick in _ticks_of_stage(
            schedule, "forward", stage
        ).items():
            stash[tick] = end[chunk, microbatch]
            if (chunk, stage) == (last_chunk, last_stage):
                gradient[tick] = end[chunk, microbatch]
        for (chunk, _), tick in end.items():
            if (chunk, stage) != (last_chunk, last_stage):
                gradient[tick] = tick
        # The executor writes in every tick of a phase, even on an idle stage.
        for tick in np.flatnonzero(uses_forward):
            stash.setdefault(int(tick), None)
        for tick in np.flatnonzero(uses_forward | uses_backward):
            gradient.setdefault(int(tick), None)
        _allocate(stash, schedule.stash_write[:, stage], schedule.stash_read[:, stage])
        _allocate(
            gradient,
            schedule.gradient_write[:, stage],
            schedule.gradient_read[:, stage],
        )
    return schedule


def _allocate(
    lifetimes: dict[int, int | None],
    write: Int[np.ndarray, " ticks"],
    read: Int[np.ndarray, " ticks"],
) -> None:
    """Assign a buffer entry to each lifetime (tick written -> tick read, None: never).

    First fit in order of time needs no more entries than the maximum number of values
    alive in one tick. An entry is free again in the tick after it was read.
    """
    free: list[int] = []
    held: list[tuple[int, int]] = []
    num_slots = 0
    for start in sorted(lifetimes):
        end = lifetimes[start]
        while held and held[0][0] < start:
            heapq.heappush(free, heapq.heappop(held)[1])
        if not free:
            heapq.heappush(free, num_slots)
            num_slots += 1
        slot = heapq.heappop(free)
        write[start] = slot
        if end is not None:
            read[end] = slot
        heapq.heappush(held, (start if end is None else end, slot))


def _ticks_of_stage(
    schedule: Schedule, kind: Literal["forward", "backward"], stage: int
) -> dict[tuple[int, int], int]:
    """Return the tick of each (local virtual stage, microbatch) of one stage."""
    chunks = getattr(schedule, f"{kind}_chunk")[:, stage]
    microbatches = getattr(schedule, f"{kind}_microbatch")[:, stage]
    ticks = np.flatnonzero(chunks != IDLE)
    names = zip(chunks[ticks].tolist(), microbatches[ticks].tolist(), strict=True)
    return dict(zip(names, ticks.tolist(), strict=True))
