"""Generated barriers of hosts whose clocks differ.

Input: a kind and a seed. Output: a `Barriers`: when each rank entered and left each
barrier, on its own clock, and the truth: by how much each clock is ahead of that of
rank 0, at each barrier. The same kind and seed give the same barriers. Ranges and seeds
are in `synthetic_severity`.

    from tests.observe.synthetic_clocks import make
    barriers = make("drift", TUNING_SEEDS[0])

The generator was fixed before any estimator existed, and not by the author of the
estimator.

Barrier k is over when all ranks have entered, so in true time every rank leaves after
the last one entered, by the time of a message and the time until the process runs:

    leave[r, k] >= max over q of enter[q, k]

Kinds:

- steady: clocks have an offset only.
- drift: each clock is fast or slow by a constant part (RFC 5905: 15 ppm).
- slew: as drift, and a time daemon steers some clocks by up to 500 ppm for a while.
- jump: as drift, and one clock jumps once, by seconds, between two barriers.

In every kind ranks come late by up to seconds, one rank may always be last, messages
have a long tail, and some barriers of some ranks are missing (-1).
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

from tests.observe import synthetic_severity as severity

type Array = np.ndarray
type Kind = Literal["steady", "drift", "slew", "jump"]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
UNKNOWN = -1
"""Time of a barrier whose record is missing."""

# All chosen.
RANKS, NUM_BARRIERS = (4, 65), (8, 61)
EVERY_S = (5.0, 120.0)  # time between barriers
LATE_S = (1e-3, 2.0)  # mean lateness of ranks, exponential; one draw per run
TAIL_PROBABILITY, TAIL_S = 0.02, (1e-3, 5e-2)  # late scheduling of the process
JUMP_S = (0.5, 30.0)
SLEWED_PART = 0.3  # part of the clocks that are steered
MISSING = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The known answer: errors put into the clocks, hidden from estimates."""

    kind: Kind
    offset_ns: Array
    """[R, K], int64: clock of the rank minus clock of rank 0, when the last rank has
    entered barrier k. 0 for rank 0."""
    one_way_s: float
    """Median time of a message."""
    jumped: tuple[int, int] | None
    """Rank, and the first barrier after the jump of its clock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Barriers:
    """Barriers of all ranks of a run. R ranks, K barriers."""

    enter_ns: Array
    """[R, K], int64, monotonic clock of the host of the rank; `UNKNOWN` if missing."""
    leave_ns: Array
    """[R, K], int64."""
    truth: Truth


def make(kind: Kind, seed: int) -> Barriers:
    """Make the barriers of a kind and a seed.

    Raises:
      ValueError: the kind is unknown, or the seed is negative.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    num_ranks, num = int(rng.integers(*RANKS)), int(rng.integers(*NUM_BARRIERS))
    shape = (num_ranks, num)
    start_s = np.cumsum(rng.uniform(0.5, 1.5, num) * rng.uniform(*EVERY_S))
    late_s = rng.exponential(float(severity.log_uniform(rng, LATE_S, 1)[0]), shape)
    if rng.random() < 0.5:
        late_s[int(rng.integers(num_ranks))] += late_s.max()  # always the last
    enter_s = start_s + late_s
    over_s = enter_s.max(axis=0)
    one_way_s = float(severity.log_uniform(rng, severity.ONE_WAY_S, 1)[0])
    message_s = one_way_s * rng.lognormal(0, 0.4, shape)
    tail = rng.random(shape) < TAIL_PROBABILITY
    message_s += tail * rng.uniform(*TAIL_S, shape)
    leave_s = over_s + message_s
    clocks = _Clocks(rng, kind, num_ranks, start_s)
    offset_ns = clocks.ahead_ns(over_s[None] + np.zeros(shape))
    enter_ns, leave_ns = clocks.read_ns(enter_s), clocks.read_ns(leave_s)
    lost = rng.random(shape) < MISSING
    lost[:, 0] = False
    enter_ns[lost] = leave_ns[lost] = UNKNOWN
    return Barriers(
        enter_ns=enter_ns,
        leave_ns=leave_ns,
        truth=Truth(
            kind=kind,
            offset_ns=offset_ns - offset_ns[:1],
            one_way_s=one_way_s,
            jumped=clocks.jumped,
        ),
    )


class _Clocks:
    """Clocks of R ranks, as a function of true time."""

    def __init__(
        self, rng: np.random.Generator, kind: Kind, num_ranks: int, start_s: Array
    ) -> None:
        # Since its boot, so never negative; whole nanoseconds lose nothing.
        boot_s = severity.log_uniform(rng, severity.OFFSET_S, num_ranks)
        self.boot_ns = np.round(boot_s * 1e9).astype(np.int64)
        most = 0.0 if kind == "steady" else severity.DRIFT_PPM * 1e-6
        self.drift = rng.uniform(-most, most, num_ranks)
        self.slew = np.zeros((num_ranks, 3))  # begin, end, part
        if kind == "slew":
            slewed = rng.random(num_ranks) < SLEWED_PART
            slewed[int(rng.integers(num_ranks))] = True
            edges = np.sort(rng.uniform(start_s[0], start_s[-1], (num_ranks, 2)))
            part = rng.uniform(-1, 1, num_ranks) * severity.SLEW_PPM * 1e-6
            self.slew = np.column_stack([edges, part * slewed])
        self.jump_s, self.jump_at_s = np.zeros(num_ranks), np.inf
        self.jumped: tuple[int, int] | None = None
        if kind == "jump":
            rank = int(rng.integers(1, num_ranks))
            first = int(rng.integers(2, len(start_s) - 2))
            self.jump_s[rank] = rng.choice([-1.0, 1.0]) * rng.uniform(*JUMP_S)
            self.jump_at_s = float(start_s[first]) - 1e-6
            self.jumped = rank, first

    def ahead_ns(self, time_s: Array) -> Array:
        """Return the lead of each clock over true time, [R, K] to [R, K]."""
        begin, end, part = (self.slew[:, None, column] for column in range(3))
        slewed_s = part * (np.clip(time_s, begin, end) - begin)
        jumped_s = np.where(time_s > self.jump_at_s, self.jump_s[:, None], 0.0)
        moved_s = self.drift[:, None] * time_s + slewed_s + jumped_s
        return self.boot_ns[:, None] + np.round(moved_s * 1e9).astype(np.int64)

    def read_ns(self, time_s: Array) -> Array:
        """Return the reading of each clock at a true time, [R, K] to [R, K]."""
        return self.ahead_ns(time_s) + np.round(time_s * 1e9).astype(np.int64)
