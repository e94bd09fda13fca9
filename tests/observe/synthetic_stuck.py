"""Generated progress records of runs that are stuck, or only slow.

Input: a kind and a seed. Output: a `StuckCase`: which operation each rank has entered
and left last, as far as records arrived, and the truth: which ranks are guilty. The
same kind and seed give the same case. Seeds are in `synthetic_severity`.

    from tests.observe.synthetic_stuck import make
    case = make("sleep", TUNING_SEEDS[0])

The generator was fixed before any analysis existed, and not by the author of the
analysis.

The ranks of a mesh tp x pp x dp run a program of blocking operations: the passes of
some microbatches with an all-gather and a reduce-scatter each in tp, sends and receives
in pp, then gradients in dp and the norm in all three. An operation ends when all its
members have entered. Sequence numbers count the operations that a rank has entered on
an axis. They depend on the stage for pp: the first and the last stage send less.

Kinds, after MegaScale (arXiv 2402.15627, section 5.2: the hung rank is the one without
a log, the others log what they wait for) and the kinds of issue I:

- sleep: a rank does not enter its next operation. Its records still arrive.
- lock: the same, and the log of its host ends some seconds later.
- skip: a rank leaves out one collective and goes on to others.
- dead_host: all ranks of a host stop, and nothing of them can be read.
- slow: nothing is stuck. A rank needs 10 to 200 times as long, or all ranks save.

In every kind the records of some healthy ranks may be missing, and the last records of
others may still be in a buffer (stale), so they seem to wait for nothing. The clocks of
hosts differ by more than operations last, and the program stops at any place. So the
earliest time, the missing record and the rank that does not wait may all be the wrong
ones. No stale rank shares a group with a guilty one: then nobody could tell them apart.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

type Array = np.ndarray
type Kind = Literal["sleep", "lock", "skip", "dead_host", "slow"]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
AXES = ("tp", "pp", "dp")
P2P = ("send", "recv")

# All chosen: sizes that a test can afford, and times of small to middle steps.
TP, PP, DP = (2, 4, 8), (1, 2, 4), (2, 4, 8)
RANKS_PER_HOST = (4, 8)
MICROBATCHES, NUM_STEPS = (2, 4), 3
COMPUTE_S = (2e-3, 5e-2)  # compute time between operations
COMPUTE_NOISE = 0.1
OPERATION_S = (2e-4, 5e-3)
CLOCK_ERROR_S = (0.01, 0.5)  # deviation between badly kept wall clocks
STUCK_FOR_S = (30.0, 900.0)  # from the last progress until the records are read
LOG_ENDS_S = (0.5, 5.0)  # time from the rank's stop to its last log line (lock)
STUCK_FOR_STEPS = 25.0  # minimum STUCK_FOR_S, in usual steps
SLOWER = (10.0, 200.0)  # factor on the time between operations; at most ~12 steps
SAVING_PROBABILITY, SAVING_S = 0.3, (5.0, 120.0)
MISSING_PROBABILITY, MOST_MISSING = 0.4, 3
STALE_PROBABILITY, MOST_STALE, STALE_RECORDS = 0.4, 6, (1, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Position of each rank, [R] each."""

    tp: Array
    pp: Array
    dp: Array
    host: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Last records of each rank and axis, [R, axes] in the order of `AXES`.

    A sequence number of 0 means that the rank is known to have done nothing; -1 that no
    record of this rank can be read. Times are NaN then.
    """

    entered: Array
    """int64: operations entered."""
    left: Array
    """int64: operations left; equal to entered, or one less."""
    entered_s: Array
    """float64, on the clock of the host."""
    left_s: Array
    entered_name: Array
    """str: the operation, and for send and recv the other stage: "send 2"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The known answer: the fault put into a case, hidden from analyses."""

    kind: Kind
    stuck: bool
    guilty: tuple[int, ...]
    """Guilty ranks: all of a host for dead_host, none for slow, otherwise one."""
    slow_rank: int | None
    step: int
    """Number of the step in which it happened, from 0."""
    missing: tuple[int, ...]
    """Healthy ranks whose records are missing."""
    stale: tuple[int, ...]
    """Healthy ranks whose last one to three records are missing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StuckCase:
    """Records that can be read from a run at one moment."""

    mesh: Mesh
    progress: Progress
    host_log_s: Array
    """[hosts], last line of the log of each host, on its clock; NaN if none arrived."""
    activity: tuple[str, ...]
    """For each rank: "step", "save", or "" if none of its records can be read."""
    now_s: float
    """Time of reading, on an accurate clock."""
    usual_step_s: float
    usual_save_s: float
    truth: Truth


type _Operation = tuple[str, str, tuple[int, ...]]
"""Axis, name, members."""


@dataclasses.dataclass(kw_only=True)
class _Visit:
    """One operation of one rank, in true time."""

    axis: str
    name: str
    step: int
    entered_s: float
    left_s: float = np.inf


def make(kind: Kind, seed: int) -> StuckCase:
    """Make the case of a kind and a seed.

    Raises:
      ValueError: the kind is unknown, or the seed is negative.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    mesh = _draw_mesh(rng)
    num_micro = int(rng.integers(*MICROBATCHES))
    program = [_program(mesh, rank, num_micro) for rank in range(len(mesh.tp))]
    rank, place, slower = _draw_fault(rng, kind, program)
    stopped = {rank: place}
    if kind == "dead_host":
        others = np.flatnonzero(mesh.host == mesh.host[rank])
        stopped = {int(other): place for other in others}
    visits, stop_s = _run(rng, program, kind, stopped, slower)
    return _look(rng, kind, mesh, visits, (rank, stopped, stop_s), len(program[rank]))


def _draw_mesh(rng: np.random.Generator) -> Mesh:
    """Draw sizes; tensor parallelism stays on a host, and there are two or more."""
    tp, pp, dp = (int(rng.choice(sizes)) for sizes in (TP, PP, DP))
    per_host = max(tp, int(rng.choice(RANKS_PER_HOST)))
    while tp * pp * dp < 2 * per_host:
        dp *= 2
    rank = np.arange(tp * pp * dp)
    return Mesh(
        tp=rank % tp, pp=rank // tp % pp, dp=rank // (tp * pp), host=rank // per_host
    )


def _program(mesh: Mesh, rank: int, num_micro: int) -> list[_Operation]:
    """List the operations of one step of a rank."""
    here = (
        mesh.tp == mesh.tp[rank],
        mesh.pp == mesh.pp[rank],
        mesh.dp == mesh.dp[rank],
    )
    tp, pp, dp = (
        tuple(np.flatnonzero(first & second).tolist())
        for first, second in ((here[1], here[2]), (here[0], here[2]), here[:2])
    )
    stage, last = int(mesh.pp[rank]), len(pp) - 1
    layer: list[_Operation] = [("tp", "all-gather", tp), ("tp", "reduce-scatter", tp)]

    def pass_on(name: str, other: int) -> list[_Operation]:
        if not 0 <= other <= last:
            return []
        return [("pp", f"{name} {other}", tuple(sorted((rank, pp[other]))))]

    program: list[_Operation] = []
    for source, target in ((stage - 1, stage + 1), (stage + 1, stage - 1)):
        for _ in range(num_micro):
            program += [*pass_on("recv", source), *layer, *pass_on("send", target)]
    program += [("dp", "reduce-scatter", dp), ("dp", "all-gather", dp)]
    axes: tuple[tuple[str, tuple[int, ...]], ...] = (("tp", tp), ("pp", pp), ("dp", dp))
    return program + [(axis, "all-reduce", members) for axis, members in axes]


def _draw_fault(
    rng: np.random.Generator, kind: Kind, program: list[list[_Operation]]
) -> tuple[int, int, float]:
    """Draw a rank, the place in its program at which it stops, and how slow it is."""
    rank = int(rng.integers(len(program)))
    length = len(program[rank])
    # Leave one step in which all ranks come to wait for this rank.
    places = list(range(length, (NUM_STEPS - 1) * length))
    if kind == "skip":
        # A send is not a collective; a group of one skips nothing.
        places = [
            place
            for place in places
            if program[rank][place % length][1].split()[0] not in P2P
            and len(program[rank][place % length][2]) > 1
        ]
    slower = float(rng.uniform(*SLOWER)) if kind == "slow" else 1.0
    return rank, int(rng.choice(places)), slower


def _run(
    rng: np.random.Generator,
    program: list[list[_Operation]],
    kind: Kind,
    stopped: dict[int, int],
    slower: float,
) -> tuple[list[list[_Visit]], float]:
    """Run the program until it blocks; return visits and stop time of each rank."""
    num, stops = len(program), kind in ("sleep", "lock", "dead_host")
    usual_s, lasts_s = rng.uniform(*COMPUTE_S), float(rng.uniform(*OPERATION_S))
    gaps_s = usual_s * rng.lognormal(0, COMPUTE_NOISE, (num, NUM_STEPS * 80))
    for rank, place in stopped.items():
        gaps_s[rank, place:] *= slower
    visits: list[list[_Visit]] = [[] for _ in range(num)]
    clock, place, stop_s = [0.0] * num, [0] * num, 0.0
    arrived: dict[tuple, list[int]] = {}
    skipped: tuple | None = None
    moving = list(range(num))
    while moving:
        rank = moving.pop()
        length = len(program[rank])
        if stopped.get(rank) == place[rank]:
            stop_s = max(stop_s, clock[rank])
            if stops:
                continue
            if kind == "skip":
                axis, _, members = program[rank][place[rank] % length]
                skipped = (rank, axis, members)
                place[rank] += 1
        if place[rank] == NUM_STEPS * length:
            continue
        step, index = divmod(place[rank], length)
        axis, name, members = program[rank][index]
        entered_s = float(clock[rank] + gaps_s[rank, place[rank]])
        visit = _Visit(axis=axis, name=name, step=step, entered_s=entered_s)
        visits[rank].append(visit)
        if skipped == (rank, axis, members):
            continue  # paired with another operation of the others: it never ends
        waiting = arrived.setdefault((axis, members), [])
        waiting.append(rank)
        if len(waiting) < len(members):
            continue
        end_s = max(visits[each][-1].entered_s for each in waiting) + lasts_s
        for each in waiting:
            visits[each][-1].left_s = clock[each] = end_s
            place[each] += 1
        moving += waiting
        del arrived[axis, members]
    return visits, stop_s


def _look(
    rng: np.random.Generator,
    kind: Kind,
    mesh: Mesh,
    visits: list[list[_Visit]],
    fault: tuple[int, dict[int, int], float],
    length: int,
) -> StuckCase:
    """Read the records at some moment after the fault."""
    rank, stopped, stop_s = fault
    host, num_hosts = mesh.host[rank], int(mesh.host.max()) + 1
    usual_s = _first_step_s(visits)
    save_s = float(rng.uniform(*SAVING_S))
    slow_from_s = visits[rank][min(stopped[rank], len(visits[rank]) - 1)].entered_s
    now_s, saving = _draw_moment(rng, kind, visits, usual_s, save_s, slow_from_s)
    missing = _draw_missing(rng, mesh, stopped)
    clock_s = rng.normal(0, rng.uniform(*CLOCK_ERROR_S), num_hosts)
    host_log_s = now_s - rng.uniform(0, 5, num_hosts)
    until_s = np.full(len(visits), now_s)
    stale = _draw_stale(rng, mesh, visits, until_s, {*stopped, *missing})
    if kind == "lock":
        host_log_s[host] = stop_s + rng.uniform(*LOG_ENDS_S)
        here = mesh.host == host
        until_s[here] = np.minimum(until_s[here], host_log_s[host])
    unread = set(missing)
    if kind == "dead_host":
        unread |= set(stopped)
        host_log_s[host] = np.nan
    activity = "save" if saving else "step"
    return StuckCase(
        mesh=mesh,
        progress=_read(visits, until_s, clock_s[mesh.host], unread),
        host_log_s=host_log_s + clock_s,
        activity=tuple("" if r in unread else activity for r in range(len(visits))),
        now_s=now_s,
        usual_step_s=float(usual_s),
        usual_save_s=save_s,
        truth=Truth(
            kind=kind,
            stuck=kind != "slow",
            guilty=() if kind == "slow" else tuple(sorted(stopped)),
            slow_rank=rank if kind == "slow" and not saving else None,
            step=stopped[rank] // length,
            missing=missing,
            stale=stale,
        ),
    )


def _first_step_s(visits: list[list[_Visit]]) -> float:
    """Return how long the first step took: of the lowest rank that does not hang in it.

    A stage whose program is longer than that of the stopped rank may stop in its first
    step, and hold up others there.
    """
    ends_s = (max(v.left_s for v in each if v.step == 0) for each in visits)
    return next(end_s for end_s in ends_s if end_s < np.inf)


def _draw_moment(
    rng: np.random.Generator,
    kind: Kind,
    visits: list[list[_Visit]],
    usual_s: float,
    save_s: float,
    slow_from_s: float,
) -> tuple[float, bool]:
    """Draw when the records are read, and whether all ranks save at that time."""
    last_s = max(
        visit.left_s for each in visits for visit in each if visit.left_s < np.inf
    )
    if kind != "slow":
        least_s = max(STUCK_FOR_S[0], STUCK_FOR_STEPS * usual_s)
        return float(last_s + max(least_s, rng.uniform(*STUCK_FOR_S))), False
    if rng.random() < SAVING_PROBABILITY:
        return float(last_s + rng.uniform(0.1, 0.9) * save_s), True
    return float(rng.uniform(slow_from_s, last_s)), False


def _draw_stale(
    rng: np.random.Generator,
    mesh: Mesh,
    visits: list[list[_Visit]],
    until_s: Array,
    excluded: set[int],
) -> tuple[int, ...]:
    """Draw ranks that share no group with others, and end their records early."""
    if rng.random() > STALE_PROBABILITY:
        return ()
    columns = (mesh.tp, mesh.pp, mesh.dp)
    apart = np.ones(len(mesh.tp), bool)
    for each in excluded:
        apart &= sum((column == column[each]).astype(int) for column in columns) < 2
    drawn = rng.permutation(np.flatnonzero(apart))
    stale = drawn[: int(rng.integers(1, MOST_STALE + 1))].tolist()
    for rank in stale:
        entered = [v.entered_s for v in visits[rank] if v.entered_s < until_s[rank]]
        until_s[rank] = entered[-int(rng.integers(*STALE_RECORDS))]
    return tuple(sorted(stale))


def _draw_missing(
    rng: np.random.Generator, mesh: Mesh, stopped: dict[int, int]
) -> tuple[int, ...]:
    """Draw healthy ranks whose records are missing, but never a whole host."""
    if rng.random() > MISSING_PROBABILITY:
        return ()
    count = int(rng.integers(1, MOST_MISSING + 1))
    drawn = rng.permutation(
        [each for each in range(len(mesh.tp)) if each not in stopped]
    )
    hosts: set[int] = set()
    kept = []
    for each in drawn[:count].tolist():
        if int(mesh.host[each]) not in hosts:
            hosts.add(int(mesh.host[each]))
            kept.append(each)
    return tuple(sorted(kept))


def _read(
    visits: list[list[_Visit]], until_s: Array, clock_s: Array, unread: set[int]
) -> Progress:
    """Return the last record of each rank and axis until a moment."""
    shape = (len(visits), len(AXES))
    entered, left = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    times_s = np.full((2, *shape), np.nan)
    names = np.full(shape, "", dtype="U16")
    for rank, each in enumerate(visits):
        if rank in unread:
            entered[rank] = left[rank] = -1
            continue
        for visit in each:
            axis = AXES.index(visit.axis)
            if visit.entered_s < until_s[rank]:
                entered[rank, axis] += 1
                names[rank, axis] = visit.name
                times_s[0, rank, axis] = visit.entered_s + clock_s[rank]
            if visit.left_s < until_s[rank]:
                left[rank, axis] += 1
                times_s[1, rank, axis] = visit.left_s + clock_s[rank]
    return Progress(
        entered=entered,
        left=left,
        entered_s=times_s[0],
        left_s=times_s[1],
        entered_name=names,
    )
