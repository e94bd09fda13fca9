"""Find the slow hosts of a run, and the cause of each.

Input: seconds of each step, rank and phase, and the position of each rank in the mesh.
Output: the slow hosts with their causes, and the excess time of each host over its
peers. A rank here is a device or a process, whichever was timed. Ranks are compared
with peers in the same step by durations, so clock offsets do not matter.

Ranks wait for each other, so a long step or a long wait points to the wrong host. These
measures are independent of waiting:

- compute: forward and backward time, as a logarithm. Stages have different layers and
  replicas different sequence lengths, so the usual values of the stage and of the
  replica are subtracted in each step. Tensor parallelism couples the ranks of a group:
  all show the time of the slowest.
- data and host: work before the devices start, compared with the usual value of all
  ranks.
- network: the end of a rank's gradient sync compared with the end for the ranks that
  sync with it. All of them wait until the last one begins; a rank with a slow network
  card ends later.
- last: the rank that waits least in the gradient sync arrived last. This measure is
  used if the sync ends for all ranks at the same time. It names a host only if no other
  measure names that host.

A host may be slow in only some steps. Its measure is therefore an upper quantile over
the steps, which ignores single garbage collections but includes episodes. A host is
slow if it meets three conditions: it exceeds an absolute limit, it is far outside the
spread of its peers (median absolute deviation), and it stays above the limit when
blocks of steps are resampled (bootstrap).

Sources: medians with two effects, Tukey 1977, "Exploratory Data Analysis", chapter 11
(median polish); block bootstrap, Künsch 1989, doi:10.1214/aos/1176347265; causes
(sequence lengths, stages, slow workers), arXiv 2505.05713.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from mjax.observe.detect.late import Pattern, confidence_of, level_of, pattern_of
from mjax.observe.detect.peers import low_median, residual, shortest

type Role = Literal["data", "host", "compute", "wait", "sync"]
"""Role of a phase: `data` and `host` are work before the devices start, `compute` is
work of the devices, `sync` is the wait for the gradients of replicas, `wait` is any
other wait."""
type Channel = Literal["compute", "data", "host", "network", "last"]
"""Name of a measure."""
type Cause = Literal[
    "compute", "one GPU", "throttled", "host", "data", "network", "unknown"
]
CHANNELS: tuple[Channel, ...] = get_args(Channel.__value__)

MIN_STEPS = 10
"""Fewest steps. It is one block of the bootstrap."""
MIN_UNITS = 3
"""Fewest hosts: with two, neither can be called the outlier."""
_WARM_UP_STEPS = 8
"""First steps to leave out, at most a quarter of all: they compile and fill caches. Not
measured."""
_LEAST_USUAL = 1e-3
"""Fraction of a step below which a ratio is meaningless. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Position of each rank. All arrays are [R] and count from 0."""

    host: Int[np.ndarray, " R"]
    """Host of each rank; with fewer than `MIN_UNITS` hosts, its process instead."""
    tp: Int[np.ndarray, " R"]
    pp: Int[np.ndarray, " R"]
    """Pipeline stage."""
    dp: Int[np.ndarray, " R"]
    """Data-parallel replica."""


class Limits(NamedTuple):
    """Limits above which a host is slow.

    They lie between the healthy and the slow hosts of tuning seeds 0 to 39 of
    tests/observe/synthetic_stragglers.py: compute 1.7% and 6.4%, data 2.7% and 7.7%,
    network 0.5% and 2.2%. The limits of host and last are not measured, because
    the generator has no such times."""

    cost: Mapping[Channel, float] = {
        "compute": 0.04,
        "data": 0.05,
        "host": 0.05,
        "network": 0.01,
        "last": 0.05,
    }
    """By measure: excess of the host over its peers, as a fraction of the usual compute
    of a step."""
    z: float = 8.0
    """Excess of the host, in units of the deviation of its peers."""
    confidence: float = 0.75


LIMITS = Limits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlier:
    """One slow host."""

    host: int
    """Index of the host, as in `Layout`."""
    cause: Cause
    channel: Channel
    ratio: float
    """Ratio of the host's time to that of its peers, in its slow steps (upper
    quantile)."""
    cost: float
    """Excess of the host, as a fraction of the usual compute of a step."""
    z: float
    """Excess of the host, in units of the deviation of its peers."""
    confidence: float
    """Fraction of bootstrap samples in which the host is above the limit."""
    pattern: Pattern
    since_step: int
    """Index of the first slow step in the input of `find`."""
    ranks: tuple[int, ...]
    """Ranks of the host that are above the limit, as indexes in the input of `find`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Result of the analysis. H hosts, P phases."""

    outliers: tuple[Outlier, ...]
    """Slow hosts, the most costly first."""
    excess: Float[np.ndarray, "H P"]
    """[H, P], excess of each host over its peers in each phase, as a fraction of the
    usual compute of a step; NaN without measurements."""
    usual_s: float
    """Usual seconds of compute in a step, or of the whole step if no phase is
    compute."""


class _Measure(NamedTuple):
    """One measure of all ranks."""

    late: np.ndarray
    """[T, R], excess over the peers in each step, as a fraction of the usual
    compute."""
    usual: float
    """Usual value of the peers, in the same unit."""
    is_smooth: bool
    """Whether to use medians of blocks of steps, for measures that are noisy in single
    steps."""


def find(
    phase_s: Float[np.ndarray, "T R P"],
    roles: Sequence[Role],
    layout: Layout,
    *,
    left_s: Float[np.ndarray, "T R"] | None = None,
    left_out: Bool[np.ndarray, " T"] | None = None,
    limits: Limits = LIMITS,
) -> Report:
    """Find the slow hosts.

    Args:
      phase_s: seconds; NaN marks a missing value.
      roles: role of each phase.
      layout: positions of the ranks.
      left_s: seconds from the common start of the step to the end of the rank's
        gradient sync; None unless each rank leaves the sync when its own transfers are
        done.
      left_out: steps to ignore: those with saves or evaluations.
      limits: limits above which a host is slow.
    Raises:
      ValueError: the sizes of roles or layout differ from phase_s, there is only one
        host, there are too few steps, or nothing was measured.
    """
    values = _checked(phase_s, roles, layout, left_out)
    first = _warm_up(len(phase_s))
    left_s = None if left_s is None else left_s[first:].astype(np.float64)
    usual_s = _usual(values, roles)
    measures = _measures(values, roles, layout, left_s, usual_s)
    found: dict[int, Outlier] = {}
    for channel in CHANNELS:
        if channel not in measures:
            continue
        for each in _judge(channel, measures[channel], layout, limits, first):
            before = found.get(each.host)
            if before is None or (channel != "last" and each.cost > before.cost):
                found[each.host] = each
    return Report(
        outliers=tuple(sorted(found.values(), key=lambda each: -each.cost)),
        excess=_excess(values, roles, layout, usual_s),
        usual_s=usual_s,
    )


def _checked(
    phase_s: np.ndarray,
    roles: Sequence[Role],
    layout: Layout,
    left_out: np.ndarray | None,
) -> np.ndarray:
    """Return phase_s without its first steps, with NaN in ignored steps."""
    num_steps, num_ranks, num_phases = phase_s.shape
    if len(roles) != num_phases:
        raise ValueError(f"{num_phases} phases need as many roles, got {len(roles)}")
    if len(layout.host) != num_ranks:
        raise ValueError(f"the layout has {len(layout.host)} ranks, not {num_ranks}")
    if len(np.unique(layout.host)) < 2:
        raise ValueError(
            "all times are of one rank or host, but stragglers are found by "
            "comparison; use a run of at least 3 processes"
        )
    if num_steps < MIN_STEPS:
        raise ValueError(
            f"{num_steps} steps are too few to tell a slow host from noise; wait until "
            f"the run has {MIN_STEPS}"
        )
    values = phase_s.astype(np.float64)
    if left_out is not None:
        values[left_out] = np.nan
    values = values[_warm_up(num_steps) :]
    if np.isnan(values).all():
        raise ValueError(
            "no step has usable times: they are missing, or all steps are first "
            "steps, saves or evaluations; wait until the run has more steps"
        )
    return values


def _warm_up(num_steps: int) -> int:
    return min(_WARM_UP_STEPS, num_steps // 4)


def _columns(values: np.ndarray, roles: Sequence[Role], *kept: Role) -> np.ndarray:
    """Return the sum of phases of these roles, [T, R]; NaN where none has a time."""
    some = values[:, :, [role in kept for role in roles]]
    return np.where(np.isnan(some).all(axis=2), np.nan, np.nansum(some, axis=2))


def _usual(values: np.ndarray, roles: Sequence[Role]) -> float:
    compute = _columns(values, roles, "compute")
    if np.isnan(compute).all():
        compute = _columns(values, roles, "data", "host", "wait", "sync")
    return max(float(np.nanmedian(compute)), 1e-9)


def _measures(
    values: np.ndarray,
    roles: Sequence[Role],
    layout: Layout,
    left_s: np.ndarray | None,
    usual_s: float,
) -> dict[Channel, _Measure]:
    """Return the measures for which there are times."""
    found: dict[Channel, _Measure] = {}
    compute = _columns(values, roles, "compute")
    if "compute" in roles:
        logs = _logs(compute)
        late = residual(logs, host=layout.host, stage=layout.pp, replica=layout.dp)
        found["compute"] = _Measure(late, 1.0, is_smooth=False)
    everyone = np.zeros_like(layout.host)
    names: tuple[tuple[Channel, Role], ...] = (("data", "data"), ("host", "host"))
    for channel, role in names:
        if role in roles:
            waits = _columns(values, roles, role) / usual_s
            found[channel] = _Measure(
                waits - low_median(waits, everyone),
                0.0 if np.isnan(waits).all() else float(np.nanmedian(waits)),
                is_smooth=False,
            )
    sync = _columns(values, roles, "sync") / usual_s
    if left_s is not None:
        left, group = left_s / usual_s, layout.pp * (layout.tp.max() + 1) + layout.tp
        left = np.where(np.isnan(sync), np.nan, left)
        found["network"] = _Measure(
            left - low_median(left, group), shortest(sync, group), is_smooth=True
        )
    elif "sync" in roles:
        found["last"] = _Measure(
            low_median(sync, layout.pp) - sync, 1.0, is_smooth=True
        )
    return {
        channel: each
        for channel, each in found.items()
        if not np.isnan(each.late).all()
    }


def _judge(
    channel: Channel, measure: _Measure, layout: Layout, limits: Limits, first: int
) -> list[Outlier]:
    """Return the hosts that are slow by one measure."""
    level = level_of(measure.late, is_smooth=measure.is_smooth)
    hosts = np.unique(layout.host)
    score = np.array([_highest(level[layout.host == host]) for host in hosts])
    known, score = hosts[~np.isnan(score)], score[~np.isnan(score)]
    if len(known) < MIN_UNITS:
        return []
    least = limits.cost[channel]
    if channel == "compute":
        least = float(np.log1p(least))
    usual, spread = _peers(score)
    spread = max(spread, least / limits.z)  # keeps z finite if all peers are equal
    found = []
    for host, own in zip(known, score - usual, strict=True):
        if own <= least or own <= limits.z * spread:
            continue
        ranks = np.flatnonzero((layout.host == host) & (level - usual > least))
        late = measure.late[:, ranks[np.argmax(level[ranks])]] - usual
        confidence = confidence_of(late, least, is_smooth=measure.is_smooth)
        if confidence < limits.confidence:
            continue
        pattern, since = pattern_of(late, least)
        is_part = 2 * len(ranks) <= (layout.host == host).sum()
        found.append(
            Outlier(
                host=int(host),
                cause=_cause(channel, pattern, is_part=bool(is_part)),
                channel=channel,
                ratio=_ratio(channel, measure, float(own)),
                cost=float(np.expm1(own)) if channel == "compute" else float(own),
                z=float(own / spread),
                confidence=confidence,
                pattern=pattern,
                since_step=first + since,
                ranks=tuple(int(rank) for rank in ranks),
            )
        )
    return found


def _peers(score: np.ndarray) -> tuple[float, float]:
    """Return the usual score of the hosts, and their deviation."""
    usual = float(np.sort(score)[(len(score) - 1) // 2])
    # Take the upper median: with four hosts, one of them slow, the lower one may be
    # nearly 0.
    away = float(np.sort(np.abs(score - usual))[len(score) // 2])
    return usual, 1.4826 * away  # scaled to the deviation of a normal distribution


def _highest(level: np.ndarray) -> float:
    return float(np.nan) if np.isnan(level).all() else float(np.nanmax(level))


def _ratio(channel: Channel, measure: _Measure, own: float) -> float:
    if channel == "compute":
        return float(np.exp(own))
    return 1 + own / max(measure.usual, _LEAST_USUAL)


def _cause(channel: Channel, pattern: Pattern, *, is_part: bool) -> Cause:
    match channel, pattern:
        case "compute", "episodes":
            return "throttled"
        case "compute", "irregular":
            return "host"
        case "compute", _:
            return "one GPU" if is_part else "compute"
        case "last", _:
            return "unknown"
        case "data", _:
            return "data"
        case "network", _:
            return "network"
        case _:
            return "host"


def _excess(
    values: np.ndarray, roles: Sequence[Role], layout: Layout, usual_s: float
) -> np.ndarray:
    """Return the excess of each host over its peers in each phase, [H, P]."""
    hosts = np.unique(layout.host)
    found = np.full((len(hosts), values.shape[2]), np.nan)
    for phase, role in enumerate(roles):
        seconds = values[:, :, phase]
        # Excess compute is a factor on the stage's compute; other excess is added time.
        is_factor = role == "compute"
        late = residual(
            _logs(seconds) if is_factor else seconds / usual_s,
            host=layout.host,
            stage=layout.pp,
            replica=layout.dp,
        )
        level = level_of(late, is_smooth=role in ("wait", "sync"))
        own = np.array([_highest(level[layout.host == host]) for host in hosts])
        if np.isnan(own).all():
            continue
        own -= np.nanmedian(own)
        if is_factor:
            own = np.expm1(own) * float(np.nanmedian(seconds)) / usual_s
        found[:, phase] = own
    return found


def _logs(values: np.ndarray) -> np.ndarray:
    """Return logarithms; NaN for 0, the value of a phase that has no time."""
    return np.log(values, where=values > 0, out=np.full_like(values, np.nan))
