"""Generated phase times of 1,024 ranks: healthy runs, and runs with slow hosts.

Enters: a kind and a seed. Leaves: a `Stragglers`, what a store returns of some hundred
steps of 128 hosts with 8 ranks, and the truth about it. The same kind and seed give the
same run. Ranges and seeds are in `synthetic_severity`.

    from tests.observe.synthetic_stragglers import make
    run = make("slow", TUNING_SEEDS[0])

What is generated was fixed before a detector existed, by somebody who does not write
it.

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

type Array = np.ndarray
type Kind = Literal["clean", "slow"]
type HostKind = Literal["compute", "throttled", "nic", "loader", "one_gpu", "hog"]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
HOST_KINDS: tuple[HostKind, ...] = get_args(HostKind.__value__)
PHASES = ("data", "forward", "backward", "pipeline", "sync", "optimizer")
NUM_HOSTS, RANKS_PER_HOST = 128, 8
NUM_RANKS = NUM_HOSTS * RANKS_PER_HOST
NUM_SLOW = round(severity.SLOW_PART * NUM_HOSTS)

STEPS = (120, 221)  # chosen: ten minutes of steps
STAGES = (4, 8, 16)  # chosen; data parallel 32, 16, 8
MICROBATCHES = (2, 5)  # times the stages; chosen: a bubble of 20 to 50%
STEP_S = (2.0, 8.0)  # chosen; compute of a step
TRANSFER = (0.04, 0.10)  # of the compute: gradients that nothing overlaps; chosen
TRANSFER_NOISE = (0.03, 0.12)
PIPELINE_TRANSFER = (0.005, 0.03)  # of the compute, per step and neighbour; chosen
OPTIMIZER = (0.01, 0.03)  # of the compute; Traces: 0.5% to 4%
USUAL_WAIT = (0.001, 0.004)  # of the compute: data that is ready must still be taken
HICCUP_PROBABILITY = 0.02  # per step: the storage is slow for many hosts
LEAK = (0.0, 0.08)  # chosen
WARMUP_STEPS, WARMUP = (2, 8), (1.3, 4.0)
SAVE_EVERY, SAVE_S = (25, 80), (5.0, 30.0)
EVALUATION_EVERY, EVALUATION_S = (30, 90), (5.0, 30.0)
MISSING = 0.001  # of the rows; chosen
ONSET = (0.1, 0.5)  # of the run, for half of the slow hosts; the others start slow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Place of each rank. All arrays are [R] and count from 0."""

    host: Array
    tp: Array
    """Rank in the tensor-parallel group, which is the host."""
    pp: Array
    """Stage."""
    dp: Array
    """Replica: one pipeline. Ranks with the same pp and tp sync gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that the trainer did after a step, and recorded."""

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
    """Ranks that have the fault: all of the host, or the one slow GPU or card."""
    cost: float
    """Mean part of a usual step by which it is later than without the fault, after the
    onset. Others may hide it: the step need not be longer by so much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """What was put into a run; a detector does not see it."""

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
    """[T, R], float64: end of the step, on the clock of the rank's host; NaN too."""
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
    layout = _draw_layout(rng)
    num_steps = int(rng.integers(*STEPS))
    work_s = float(rng.uniform(*STEP_S))
    work, lengths, uneven, healthy = _draw_work(rng, layout, num_steps, work_s)
    transfer = _draw_transfer(rng, layout, num_steps, work_s)
    before = {name: each.copy() for name, each in work.items()}
    nic = np.ones((num_steps, NUM_RANKS))
    drawn = _add_faults(rng, work, nic, work_s) if kind == "slow" else ()
    leak = float(rng.uniform(*LEAK))
    phases = _play(rng, layout, work, lengths, transfer, nic, leak)
    slow = tuple(
        _slow_host(each, before, work, (nic, transfer), work_s) for each in drawn
    )
    marks = _add_marks(rng, phases, num_steps)
    offset_s, drift = _draw_clocks(rng)
    step_end_s = np.cumsum(phases.sum(axis=2).max(axis=1))
    end_s = step_end_s[:, None] * (1 + drift) + offset_s
    end_s += rng.exponential(2e-4, end_s.shape)  # the clock is read a little later
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


def _draw_layout(rng: np.random.Generator) -> Layout:
    """Place the hosts on a mesh; the order of pp and dp differs between runs."""
    stages = int(rng.choice(STAGES))
    host, tp = np.divmod(np.arange(NUM_RANKS), RANKS_PER_HOST)
    if rng.random() < 0.5:
        pp, dp = host // (NUM_HOSTS // stages), host % (NUM_HOSTS // stages)
    else:
        dp, pp = host // stages, host % stages
    return Layout(host=host, tp=tp, pp=pp, dp=dp)


def _draw_work(
    rng: np.random.Generator, layout: Layout, num_steps: int, work_s: float
) -> tuple[dict[str, Array], Array, bool, Array]:
    """Draw what each rank would need alone, in seconds, [T, R].

    Returns:
      data, forward, backward; the factor of each step [T, replicas] that all stages of
      a replica share; whether it is uneven; the cost of each healthy host, [hosts].
    """
    shape, ratio = (num_steps, NUM_RANKS), rng.uniform(*severity.BACKWARD)
    spread = np.clip(
        rng.normal(0, severity.RANK_SPREAD, NUM_RANKS),
        -severity.MOST_RANK_SPREAD,
        severity.MOST_RANK_SPREAD,
    )
    noise = rng.uniform(*severity.STEP_NOISE)
    last = layout.pp == layout.pp.max()
    stage = 1 + (rng.uniform(*severity.FIRST_STAGE) - 1) * (layout.pp == 0)
    if _happens(rng):
        middle = int(rng.integers(1, layout.pp.max()))
        stage = stage + rng.uniform(*severity.UNEVEN_STAGE) * (layout.pp == middle)
    blips = _draw_blips(rng, num_steps)
    warm = rng.uniform(*severity.WARM_RACK) * _draw_rack(rng, layout) * _happens(rng)
    spread = spread + warm
    work = {}
    heavier = (severity.LAST_FORWARD, severity.LAST_BACKWARD)
    for name, part, bounds in (
        ("forward", 1 / (1 + ratio), heavier[0]),
        ("backward", ratio / (1 + ratio), heavier[1]),
    ):
        usual = part * work_s * np.where(last, rng.uniform(*bounds), stage)
        jitter = np.exp(noise * rng.standard_normal(shape) + spread)
        work[name] = usual * jitter * (1 + np.repeat(blips, RANKS_PER_HOST, axis=1))
    _add_garbage(rng, work, num_steps)
    _add_warmup(rng, work)
    work["data"] = _draw_data(rng, layout, num_steps, work_s)
    uneven = bool(rng.random() < severity.UNEVEN_PROBABILITY)
    deviation = rng.uniform(*severity.LENGTHS) if uneven else 0.004
    replicas = int(layout.dp.max()) + 1
    lengths = np.exp(rng.normal(0, deviation, (num_steps, replicas)))
    if _happens(rng):
        longer = rng.random(replicas) < 0.15
        lengths *= 1 + rng.uniform(*severity.LONG_REPLICAS) * longer
    if rng.random() < 0.3:  # longer sequences or a larger batch from some step on
        lengths[int(rng.uniform(0.2, 0.8) * num_steps) :] *= rng.uniform(1.05, 1.4)
    lasting = spread.reshape(NUM_HOSTS, RANKS_PER_HOST).max(axis=1)
    return work, lengths, uneven, np.maximum(lasting, 0) + blips.mean(axis=0)


def _happens(rng: np.random.Generator) -> bool:
    """Say whether a run has one of the differences between groups of hosts."""
    return bool(rng.random() < severity.GROUP_PROBABILITY)


def _draw_rack(rng: np.random.Generator, layout: Layout) -> Array:
    """Draw some neighbouring hosts; 1 for their ranks, 0 for the others, [R]."""
    size = int(rng.integers(*severity.RACK_HOSTS))
    first = int(rng.integers(0, NUM_HOSTS - size))
    return ((layout.host >= first) & (layout.host < first + size)).astype(float)


def _draw_blips(rng: np.random.Generator, num_steps: int) -> Array:
    """Draw the part of the compute by which healthy hosts are slow once, [T, hosts]."""
    blips = np.zeros((num_steps, NUM_HOSTS))
    for host in np.flatnonzero(rng.random(NUM_HOSTS) < severity.BLIP_PROBABILITY):
        length = int(rng.integers(*severity.BLIP_STEPS))
        start = int(rng.integers(0, num_steps - length))
        blips[start : start + length, host] = rng.uniform(*severity.BLIP_COST)
    return blips


def _add_garbage(
    rng: np.random.Generator, work: dict[str, Array], num_steps: int
) -> None:
    """Add collections: of each rank by itself, or of all ranks at the same steps."""
    pause_s = rng.uniform(*severity.GARBAGE_S, (num_steps, NUM_RANKS))
    if rng.random() < 0.5:
        every = int(rng.integers(10, 60))
        collects = np.zeros((num_steps, NUM_RANKS), bool)
        collects[every - 1 :: every] = True
    else:
        rate = rng.uniform(*severity.GARBAGE_PROBABILITY)
        collects = rng.random((num_steps, NUM_RANKS)) < rate
    in_forward = rng.random((num_steps, NUM_RANKS)) < 1 / 3
    work["forward"] += pause_s * (collects & in_forward)
    work["backward"] += pause_s * (collects & ~in_forward)


def _add_warmup(rng: np.random.Generator, work: dict[str, Array]) -> None:
    """Make the first steps slow, on each host by its own factor."""
    length = int(rng.integers(*WARMUP_STEPS))
    factors = np.ones((length, NUM_HOSTS)) + (
        (rng.uniform(*WARMUP) - 1)
        * np.linspace(1, 0.1, length)[:, None]
        * rng.uniform(0.5, 1.0, NUM_HOSTS)
    )
    for each in work.values():
        each[:length] *= np.repeat(factors, RANKS_PER_HOST, axis=1)


def _draw_data(
    rng: np.random.Generator, layout: Layout, num_steps: int, work_s: float
) -> Array:
    """Draw the wait for data: one loader per host, and a storage for all of them."""
    far = rng.uniform(*severity.FAR_RACK_WAIT) * _happens(rng)
    usual = rng.uniform(*USUAL_WAIT) + far * _draw_rack(rng, layout)[::RANKS_PER_HOST]
    waits = rng.exponential(usual, (num_steps, NUM_HOSTS))
    hiccups = np.flatnonzero(rng.random(num_steps) < HICCUP_PROBABILITY)
    for step in hiccups:
        hosts = rng.random(NUM_HOSTS) < rng.uniform(0.1, 1.0)
        waits[step, hosts] += rng.exponential(rng.uniform(0.05, 0.4), hosts.sum())
    skew = rng.uniform(0, 2e-4, (num_steps, NUM_RANKS))
    return work_s * (np.repeat(waits, RANKS_PER_HOST, axis=1) + skew)


def _draw_transfer(
    rng: np.random.Generator, layout: Layout, num_steps: int, work_s: float
) -> dict[str, Array]:
    """Draw the transfers of each step and rank; the fabric is congested at times."""
    congested = np.ones(num_steps)
    for _ in range(int(rng.integers(0, 4))):
        start, length = int(rng.integers(0, num_steps)), int(rng.integers(3, 30))
        congested[start : start + length] *= rng.uniform(1.2, 2.5)
    noise = rng.uniform(*TRANSFER_NOISE)
    busy = (layout.tp == rng.integers(RANKS_PER_HOST)) * _happens(rng)
    rail = 1 + (rng.uniform(*severity.BUSY_RAIL) - 1) * busy

    def one(bounds: tuple[float, float]) -> Array:
        jitter = np.exp(rng.normal(0, noise, (num_steps, NUM_RANKS)))
        return work_s * rng.uniform(*bounds) * congested[:, None] * rail * jitter

    return {
        "sync": one(TRANSFER),
        "pipeline": one(PIPELINE_TRANSFER),
        "optimizer": work_s
        * rng.uniform(*OPTIMIZER)
        * np.exp(rng.normal(0, 0.02, (num_steps, NUM_RANKS))),
    }


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
        # The threads of each rank are dispatched late, each by its own bad luck.
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
    """Say in which steps a host is throttled, [length] bool; it begins throttled."""
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
    idle = ready - data - forward - backward
    skew = rng.exponential(5e-4, (2, *shape))  # stamps of ranks that wait together
    measured = np.stack(
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
    return measured.reshape(len(nic), NUM_RANKS, len(PHASES))[:, back]


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
    rows[:, optimizer] += late_s.max() - late_s  # who is not late waits there


def _draw_clocks(rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw offset and drift of the clock of each rank; a host has one clock."""
    sign = rng.choice([-1.0, 1.0], NUM_HOSTS)
    offset_s = sign * severity.log_uniform(rng, severity.OFFSET_S, NUM_HOSTS)
    drift = rng.uniform(-1, 1, NUM_HOSTS) * severity.DRIFT_PPM * 1e-6
    return np.repeat(offset_s, RANKS_PER_HOST), np.repeat(drift, RANKS_PER_HOST)


def _draw_lost(rng: np.random.Generator, num_steps: int) -> Array:
    """Say which rows are missing: single ones, and one host for a while."""
    lost = rng.random((num_steps, NUM_RANKS)) < MISSING
    if rng.random() < 0.5:
        first = int(rng.integers(NUM_HOSTS)) * RANKS_PER_HOST
        start, length = int(rng.uniform(0, 0.9) * num_steps), int(rng.integers(2, 15))
        lost[start : start + length, first : first + RANKS_PER_HOST] = True
    return lost
