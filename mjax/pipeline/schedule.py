"""Pipeline schedules as tables: the work of each stage in each tick. NumPy only.

Enters: the name of a schedule, P stages, v chunks a stage, M microbatches. Leaves:
tables [ticks, P] that the executor follows (`pipeline.run`) and that people look at
(`pipeline.show`).

The layers are cut into K = v P chunks, and stage s holds the chunks s, s + P, s + 2P,
..., its local chunks 0 to v - 1. A *tick* has a forward slot and a backward slot, and
every stage fills each of them with one (chunk, microbatch) or leaves it idle. The
result of a slot is sent at its end, and the neighbour uses it in the next tick. The one
exception is the last chunk: its backward slot may follow its forward slot within a
tick, as nothing is sent between them.

Forward slots go through the microbatches in groups of P, chunk by chunk within a group:
the k-th slot of a stage, with g = k div (v P) and r = k mod (v P), is chunk r div P of
microbatch g P + r mod P, in tick s + k. Backward slots take the same order with the
chunks reversed. *1F1B* starts them as soon as the first gradient arrives,
(v - 1) P + 2 (P - 1) - s ticks after the start. From then on each tick has one forward
and one backward slot. *GPipe* does all forward slots first.

Source: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 (1F1B) and 2.2.2
(interleaved); Huang et al. 2019, arXiv:1811.06965 (GPipe). Differs: stages move in
lockstep, which is the steady state of the paper's interleaved schedule from the start,
so that a stage has up to 2 (P - 1 - s) + (v - 1) P + 1 chunk inputs in flight; the
paper's plain 1F1B has P - s. The bubble is the same, (P - 1) / (v M).
"""

import dataclasses
import heapq
import itertools
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int

from mjax.pipeline.config import ScheduleName

IDLE = -1
"""Entry of a table where a stage does nothing."""

Table = Int[np.ndarray, "ticks P"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A run of ticks in which the same slots are in use."""

    start: int
    stop: int
    """First tick after it."""
    has_forward: bool
    has_backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """What each stage does in each tick, and where it keeps what it needs for it.

    Tables have one row a tick and one column a stage. Chunks are local: 0 to v - 1.
    """

    name: str
    num_chunks: int
    """v, chunks of each stage."""
    num_microbatches: int
    forward_chunk: Table
    forward_microbatch: Table
    backward_chunk: Table
    backward_microbatch: Table
    stash_write: Table
    """Buffer entry in which the forward slot stores the residuals for its backward
    slot; for an idle forward slot, an unused entry."""
    stash_read: Table
    """Slot that the backward slot reads."""
    gradient_write: Table
    """Buffer entry for the gradient that arrives in this tick, from the next stage or,
    at the last chunk, from the loss; if none arrives, an unused entry."""
    gradient_read: Table
    """Slot that the backward slot reads."""

    @property
    def num_ticks(self) -> int:
        """Ticks from the first forward slot to the last backward slot."""
        return self.forward_chunk.shape[0]

    @property
    def num_stages(self) -> int:
        """P, stages."""
        return self.forward_chunk.shape[1]

    @property
    def num_stash_slots(self) -> int:
        """Entries of the ring buffer for residuals that a backward slot will read."""
        return int(self.stash_write.max()) + 1

    @property
    def num_gradient_slots(self) -> int:
        """Entries of the ring buffer for gradients that have arrived."""
        return int(self.gradient_write.max()) + 1

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The ticks as runs with the same slots in use: warm-up, steady, cool-down."""
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
        """Forward slots beyond the v M that a stage fills; as many backward slots.

        In lockstep a slot takes its full time if at least one stage fills it.
        """
        work = self.num_chunks * self.num_microbatches
        return int(_is_used(self.forward_chunk).sum()) - work

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, counted from the table, backward = 2 x forward."""
        if not _is_used(self.backward_chunk).any():
            raise ValueError(
                f"{self.name} has no backward slots, so no training bubble"
            )
        time = (
            _is_used(self.forward_chunk).sum() + 2 * _is_used(self.backward_chunk).sum()
        )
        return float(time / (3 * self.num_chunks * self.num_microbatches) - 1)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, most chunk inputs waiting for their backward slot at once."""
        begun = np.cumsum(self.forward_chunk != IDLE, axis=0)
        done = np.cumsum(self.backward_chunk != IDLE, axis=0)
        done_before = np.vstack([np.zeros_like(done[:1]), done[:-1]])
        return tuple((begun - done_before).max(axis=0).tolist())

    @property
    def forward_sends(self) -> tuple[int, ...]:
        """Activations that each stage sends to the next one."""
        is_last = self.forward_chunk == self.num_chunks - 1
        is_last[:, :-1] = False
        return tuple(((self.forward_chunk != IDLE) & ~is_last).sum(axis=0).tolist())

    @property
    def backward_sends(self) -> tuple[int, ...]:
        """Gradients that each stage sends to the one before it."""
        is_first = self.backward_chunk == 0
        is_first[:, 1:] = False
        return tuple(((self.backward_chunk != IDLE) & ~is_first).sum(axis=0).tolist())


def build(
    name: ScheduleName, *, num_stages: int, num_chunks: int, num_microbatches: int
) -> Schedule:
    """Build a training schedule.

    Args:
      name: gpipe and 1f1b have one chunk a stage; interleaved-1f1b has any number.
      num_stages: P.
      num_chunks: v, chunks of each stage.
      num_microbatches: M; with more than one chunk a multiple of P.
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
    """Build the schedule of an evaluation: forward slots only, no residuals.

    Any number of microbatches is valid: if it is not a multiple of P, the last group
    has idle slots.
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
      ValueError: with the rule and the numbers.
    """
    if name not in get_args(ScheduleName):
        raise ValueError(
            f"no schedule {name!r}; there are {', '.join(get_args(ScheduleName))}"
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
    """Return chunk and microbatch of the k-th slot of a stage, for every k."""
    k = np.arange(num_chunks * num_microbatches, dtype=np.int32)
    if num_chunks == 1:
        return np.zeros_like(k), k
    group, rest = np.divmod(k, num_chunks * num_stages)
    chunk, place = np.divmod(rest, num_stages)
    return chunk, group * num_stages + place


def _place(
    values: Int[np.ndarray, " slots"], first: Int[np.ndarray, " P"], num_ticks: int
) -> Table:
    """Put the values of all stages into a table, stage s from tick first[s] on."""
    table = np.full((num_ticks, len(first)), IDLE, np.int32)
    for stage, start in enumerate(first):
        column = table[start : start + len(values), stage]
        column[:] = values[: len(column)]
    return table


def _is_used(table: Table) -> Bool[np.ndarray, " ticks"]:
    """Say for each tick whether at least one stage has work in it."""
    return (table != IDLE).any(axis=1)


def _with_slots(**fields) -> Schedule:
    """Complete a schedule: assign an entry of its ring buffer to each stored value."""
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
        # The executor writes in every tick of a phase, even if a stage is idle.
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

    First fit in order of time: the number of entries is the largest number alive in one
    tick. An entry is free again in the tick after it was read.
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
    """Return the tick of each (local chunk, microbatch) of one stage."""
    chunks = getattr(schedule, f"{kind}_chunk")[:, stage]
    microbatches = getattr(schedule, f"{kind}_microbatch")[:, stage]
    ticks = np.flatnonzero(chunks != IDLE)
    names = zip(chunks[ticks].tolist(), microbatches[ticks].tolist(), strict=True)
    return dict(zip(names, ticks.tolist(), strict=True))
