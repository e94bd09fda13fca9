"""Generated phase times of 1,024 ranks: healthy runs, and runs with slow hosts.

Input: a kind and a seed. Output: a `Stragglers`, what a store returns of some hundred
steps of 128 hosts with 8 ranks, and the truth about it. The same kind and seed give the
same run. Ranges and seeds are in `synthetic_severity`.

    from tests.observe.synthetic_stragglers import make
    run = make("slow", TUNING_SEEDS[0])

The generator was fixed before any detector existed, and not by the author of the
detector.

Waiting is causal. Tensor parallelism couples the 8 ranks of a host, so they all show
the compute of the slowest. The stages of a replica wait for each other in the pipeline,
the replicas of a stage in the gradient sync, and everybody in the optimizer, which
needs the global gradient norm. All ranks start a step together. So the phases of a rank
add up to the same step time on every rank, and a slow host waits least:

    ready    = data + pipeline(forward + backward)
    leave    = max over the replicas of ready + transfer
    sync     = leave - ready
    optimizer = end of the step - leave

The column `pipeline` has the waits for neighbours and the transfers between stages. A
part of them (`leak`) is measured as forward and backward time, as happens to stamps at
the top of a loop body, before a receive.

Both kinds have the same healthy life: chips that differ, noise, collections of garbage,
blips of single hosts, hiccups of the storage, congestion of the whole fabric, uneven
sequence lengths by replica and step, replicas with longer documents, a heavier last
stage, a stage with more layers, a warm rack, a rack far from the storage, a busy switch
for one card of every host, longer batches from some step on, warm-up, saves,
evaluations, rows that are missing, clocks that differ. Kind slow has 13 slow hosts on
top, at least 2 of each of 6 kinds (`HostKind`).
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

from tests.observe import synthetic_severity as severity
from tests.observe.straggler_work import (
    NUM_HOSTS,
    NUM_RANKS,
    RANKS_PER_HOST,
    Array,
    Layout,
    draw_layout,
    draw_transfer,
    draw_work,
)

type Kind = Literal["clean", "slow"]
type HostKind = Literal["compute", "throttled", "nic", "loader", "one_gpu", "hog"]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
HOST_KINDS: tuple[HostKind, ...] = get_args(HostKind.__value__)
PHASES = ("data", "forward", "backward", "pipeline", "sync", "optimizer")
NUM_SLOW = round(severity.SLOW_PART * NUM_HOSTS)

# Chosen where no source is named: see `synthetic_severity` for the names.
STEPS = (120, 221)  # chosen: ten minutes of steps
MICROBATCHES = (2, 5)  # multiple of the stages; chosen: a bubble of 20 to 50%
STEP_S = (2.0, 8.0)  # compute of a step; chosen
LEAK = (0.0, 0.08)  # part of the waits measured as compute; chosen
SAVE_EVERY, SAVE_S = (25, 80), (5.0, 30.0)
EVALUATION_EVERY, EVALUATION_S = (30, 90), (5.0, 30.0)
MISSING = 0.001  # part of the rows; chosen
ONSET = (0.1, 0.5)  # part of the run; half of the slow hosts begin at 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A recorded action of the trainer after a step."""

    kind: Literal["save", "eval"]
    step: int
    """The time is in the optimizer phase of this step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowHost:
    """One host that is slow."""

    host: int
    kind: HostKind
    onset_step: int
    ranks: tuple[int, ...]
    """Ranks with the fault: all ranks of the host, or that of the slow GPU or card."""
    cost: float
    """Mean part of a usual step by which it is later than without the fault, after the
    onset. Others may hide it: the step need not be longer by so much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The known answer: slow hosts put into a run, hidden from detectors."""

    kind: Kind
    slow_hosts: tuple[SlowHost, ...]
    offset_s: Array
    """[R], clock of the rank's host minus the true time at the first step."""
    drift: Array
    """[R], parts by which that clock is fast."""
    uneven_lengths: bool
    leak: float
    healthy_cost: Array
    """[hosts], mean part of a usual step by which the lasting spread and the blips of
    this host hold it up; it is the same in both kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Phase times of a run. T steps, R ranks."""

    layout: Layout
    phase_s: Array
    """[T, R, phases], float32, in the order of `PHASES`; NaN where a row is missing."""
    end_s: Array
    """[T, R], float64: end of the step on the host's clock; NaN for a missing row."""
    marks: tuple[Mark, ...]
    truth: Truth


def make(kind: Kind, seed: int) -> Stragglers:
    """Make the run of a kind and a seed.

    Raises:
      ValueError: the kind is unknown, or the seed is negative.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    layout = draw_layout(rng)
    num_steps = int(rng.integers(*STEPS))
    work_s = float(rng.uniform(*STEP_S))
    work, lengths, uneven, healthy = draw_work(rng, layout, num_steps, work_s)
    transfer = draw_transfer(rng, layout, num_steps, work_s)
    before = {name: each.copy() for name, each in work.items()}
    nic = np.ones((num_steps, NUM_RANKS))
    drawn = _add_faults(rng, work, nic, work_s) if kind == "slow" else ()
    leak = float(rng.uniform(*LEAK))
    phases = _play(rng, layout, work, lengths, transfer, nic, leak)
    slow = tuple(
        _slow_host(each, before, work, (nic, transfer), work_s) for each in drawn
    )
    marks = _add_marks(rng, phases, num_steps)
    end_s, offset_s, drift = _draw_ends(rng, phases)
    lost = _draw_lost(rng, num_steps)
    phases[lost], end_s[lost] = np.nan, np.nan
    return Stragglers(
        layout=layout,
        phase_s=phases.astype(np.float32),
        end_s=end_s,
        marks=marks,
        truth=Truth(
            kind=kind,
            slow_hosts=slow,
            offset_s=offset_s,
            drift=drift,
            uneven_lengths=uneven,
            leak=leak,
            healthy_cost=healthy,
        ),
    )


def by_host(layout: Layout, values: Array) -> Array:
    """Group [..., R] as [..., hosts, ranks of the host]."""
    order = np.lexsort((layout.tp, layout.host))
    shape = (*values.shape[:-1], NUM_HOSTS, RANKS_PER_HOST)
    return values[..., order].reshape(shape)


def _add_faults(
    rng: np.random.Generator, work: dict[str, Array], nic: Array, work_s: float
) -> tuple[tuple[int, HostKind, int, Array], ...]:
    """Draw the slow hosts, and slow them down; host, kind, onset and ranks of each."""
    hosts = rng.choice(NUM_HOSTS, NUM_SLOW, replace=False)
    more = [int(rng.integers(len(HOST_KINDS))) for _ in hosts[2 * len(HOST_KINDS) :]]
    kinds: tuple[HostKind, ...] = (
        *HOST_KINDS,
        *HOST_KINDS,
        *(HOST_KINDS[each] for each in more),
    )
    drawn = []
    for host, kind in zip(hosts, kinds, strict=True):
        num_steps = len(nic)
        onset = 0
        if rng.random() < 0.5:
            onset = int(rng.uniform(*ONSET) * num_steps)
        ranks = int(host) * RANKS_PER_HOST + np.arange(RANKS_PER_HOST)
        if kind == "one_gpu" or (kind == "nic" and rng.random() < 0.5):
            ranks = ranks[rng.integers(RANKS_PER_HOST)][None]
        rows = np.ix_(np.arange(onset, num_steps), ranks)
        _slow_down(rng, kind, rows, work, nic, work_s)
        drawn.append((int(host), kind, onset, ranks))
    return tuple(drawn)


def _slow_down(
    rng: np.random.Generator,
    kind: HostKind,
    rows: tuple[Array, ...],
    work: dict[str, Array],
    nic: Array,
    work_s: float,
) -> None:
    """Put one fault into the rows of its ranks, from its onset on."""
    length, num_ranks = len(rows[0]), rows[1].shape[1]
    if kind == "nic":
        nic[rows] = rng.uniform(*severity.NIC_FACTOR)
    elif kind == "loader":
        waits = rng.random(length) < rng.uniform(*severity.SLOW_LOADER_PROBABILITY)
        mean_s = rng.uniform(*severity.SLOW_LOADER) * work_s
        wait_s = waits * mean_s * np.exp(rng.normal(-0.125, 0.5, length))
        work["data"][rows] += wait_s[:, None]
    elif kind == "hog":
        # The threads of each rank are dispatched late, independently.
        late = rng.random((length, 1)) < rng.uniform(*severity.HOG_PROBABILITY)
        mean = rng.uniform(*severity.HOG_PART)
        parts = late * rng.exponential(mean, (length, num_ranks))
        work["forward"][rows] *= 1 + parts
        work["backward"][rows] *= 1 + parts * rng.uniform(0.3, 1.0)
        work["data"][rows] *= 1 + 3 * late
    else:
        factor = np.full((length, 1), 1.0)
        if kind == "throttled":
            factor[_draw_episodes(rng, length)] = rng.uniform(*severity.THROTTLED)
        else:
            slow = severity.SLOW_COMPUTE if kind == "compute" else severity.ONE_GPU
            factor[:] = rng.uniform(*slow)
        work["forward"][rows] *= factor
        work["backward"][rows] *= factor


def _draw_episodes(rng: np.random.Generator, length: int) -> Array:
    """Draw the steps in which a host is throttled, [length] bool; the first one is."""
    throttled, start = np.zeros(length, bool), 0
    while start < length:
        end = start + int(rng.integers(*severity.EPISODE_STEPS))
        throttled[start:end] = True
        start = end + int(rng.integers(*severity.BETWEEN_STEPS))
    return throttled


def _play(
    rng: np.random.Generator,
    layout: Layout,
    work: dict[str, Array],
    lengths: Array,
    transfer: dict[str, Array],
    nic: Array,
    leak: float,
) -> Array:
    """Let the ranks of each step wait for each other; [T, R, phases] seconds.

    The pipeline of a replica with m microbatches needs the compute of all stages once
    and that of its slowest stage m - 1 times more. A stage leaves it when the stages
    before it have only their last backward pass to do.
    """
    stages, replicas = int(layout.pp.max()) + 1, int(layout.dp.max()) + 1
    ours = np.lexsort((layout.tp, layout.dp, layout.pp))
    back = np.argsort(ours)
    shape = (len(nic), stages, replicas, RANKS_PER_HOST)

    def grid(values: Array) -> Array:
        return values[:, ours].reshape(shape)

    share = lengths[:, None, :, None]
    forward = grid(work["forward"]).max(axis=3, keepdims=True) * share
    backward = grid(work["backward"]).max(axis=3, keepdims=True) * share
    data, slow = grid(work["data"]), grid(nic)
    num_micro = stages * int(rng.integers(*MICROBATCHES))
    sends = (grid(transfer["pipeline"]) * slow).max(axis=3, keepdims=True)
    each = (forward + backward + sends) / num_micro
    start = data.max(axis=(1, 3), keepdims=True)
    total = start + each.sum(axis=1, keepdims=True)
    total = total + (num_micro - 1) * each.max(axis=1, keepdims=True)
    drained = np.cumsum(backward, axis=1) - backward
    ready = total - drained / num_micro + rng.exponential(1e-3, shape)
    move = grid(transfer["sync"])
    part = rng.uniform(*severity.NIC_SHARED)
    shared = 1 + part * (slow.max(axis=2, keepdims=True) - 1)
    leave = ready.max(axis=2, keepdims=True) + move * np.maximum(slow, shared)
    end = leave.max(axis=(1, 2, 3), keepdims=True) + grid(transfer["optimizer"]).max(
        axis=(1, 2, 3), keepdims=True
    )
    measured = _measure(rng, (data, forward, backward), ready, leave, end, leak)
    return measured.reshape(len(nic), NUM_RANKS, len(PHASES))[:, back]


def _measure(
    rng: np.random.Generator,
    work: tuple[Array, Array, Array],
    ready: Array,
    leave: Array,
    end: Array,
    leak: float,
) -> Array:
    """Return the phases as they are stamped, [..., phases]."""
    data, forward, backward = work
    idle = ready - data - forward - backward
    skew = rng.exponential(5e-4, (2, *ready.shape))  # of ranks that wait together
    return np.stack(
        [
            data,
            forward + leak * idle / 3 - skew[0],
            backward + leak * idle * 2 / 3 - skew[1],
            (1 - leak) * idle + skew.sum(axis=0),
            leave - ready,
            end - leave,
        ],
        axis=-1,
    )


def _slow_host(
    drawn: tuple[int, HostKind, int, Array],
    before: dict[str, Array],
    work: dict[str, Array],
    moved: tuple[Array, dict[str, Array]],
    work_s: float,
) -> SlowHost:
    """Measure what a fault costs its host alone."""
    host, kind, onset, ranks = drawn
    rows = np.s_[onset:, host * RANKS_PER_HOST : (host + 1) * RANKS_PER_HOST]
    nic, transfer = moved
    cost_s = (nic[rows] - 1) * (transfer["sync"][rows] + transfer["pipeline"][rows])
    cost_s = cost_s.max(axis=1)
    for name in work:
        cost_s = cost_s + work[name][rows].max(axis=1) - before[name][rows].max(axis=1)
    return SlowHost(
        host=host,
        kind=kind,
        onset_step=onset,
        ranks=tuple(int(rank) for rank in ranks),
        cost=float(cost_s.mean() / work_s),
    )


def _add_marks(
    rng: np.random.Generator, phases: Array, num_steps: int
) -> tuple[Mark, ...]:
    """Add saves and evaluations to the optimizer phase, and what follows them."""
    marks = []
    optimizer, data = PHASES.index("optimizer"), PHASES.index("data")
    plans: tuple[tuple[Literal["save", "eval"], tuple[int, int], tuple], ...] = (
        ("save", SAVE_EVERY, SAVE_S),
        ("eval", EVALUATION_EVERY, EVALUATION_S),
    )
    for kind, every, bounds in plans:
        usual_s = rng.uniform(*bounds)
        interval = int(rng.integers(*every))
        for step in range(int(rng.integers(3, interval + 3)), num_steps, interval):
            phases[step, :, optimizer] += usual_s * rng.lognormal(0, 0.15)
            marks.append(Mark(kind=kind, step=step))
            if kind == "save" and step + 1 < num_steps:
                _delay_data(rng, phases[step + 1], data, optimizer)
    return tuple(sorted(marks, key=lambda mark: mark.step))


def _delay_data(
    rng: np.random.Generator, rows: Array, data: int, optimizer: int
) -> None:
    """Make the loaders of some hosts late, since a save filled their page cache."""
    hosts = rng.random(NUM_HOSTS) < 0.15
    late_s = np.where(hosts, rng.exponential(0.2, NUM_HOSTS), 0.0)
    late_s = np.repeat(late_s, RANKS_PER_HOST)
    rows[:, data] += late_s
    rows[:, optimizer] += late_s.max() - late_s  # ranks that are not late wait there


def _draw_ends(rng: np.random.Generator, phases: Array) -> tuple[Array, Array, Array]:
    """Draw the clock of each host, and the ends of steps by it.

    Returns:
      ends, [T, R]; offset and drift of the clock, [R].
    """
    sign = rng.choice([-1.0, 1.0], NUM_HOSTS)
    host_s = sign * severity.log_uniform(rng, severity.OFFSET_S, NUM_HOSTS)
    offset_s = np.repeat(host_s, RANKS_PER_HOST)
    drift = rng.uniform(-1, 1, NUM_HOSTS) * severity.DRIFT_PPM * 1e-6
    drift = np.repeat(drift, RANKS_PER_HOST)
    step_end_s = np.cumsum(phases.sum(axis=2).max(axis=1))
    end_s = step_end_s[:, None] * (1 + drift) + offset_s
    end_s += rng.exponential(2e-4, end_s.shape)  # the clock is read a little later
    return end_s, offset_s, drift


def _draw_lost(rng: np.random.Generator, num_steps: int) -> Array:
    """Draw the missing rows: single ones, and those of one host for a while."""
    lost = rng.random((num_steps, NUM_RANKS)) < MISSING
    if rng.random() < 0.5:
        first = int(rng.integers(NUM_HOSTS)) * RANKS_PER_HOST
        start, length = int(rng.uniform(0, 0.9) * num_steps), int(rng.integers(2, 15))
        lost[start : start + length, first : first + RANKS_PER_HOST] = True
    return lost
