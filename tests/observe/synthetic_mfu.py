"""Generated MFU series: the signatures of the field guide, and clean runs.

Input: a kind and a seed. Output: a `Series`, what an observer knows of one to three
hours of a run, and the truth about it. The same kind and seed give the same series.
Ranges and seeds are in `synthetic_severity`; 50 of each kind are for the report.

    from tests.observe.synthetic_mfu import make
    series = make("thermal", TUNING_SEEDS[0])

The generator was fixed before any classifier existed, and not by the author of the
classifier.

Kinds, after the field guide (Imbue, imbue.com/research/70b-infrastructure/):

- clean: a healthy run with saves and evaluations, which make dips at their marks.
- dead_link: below 10% of the expected MFU. A link is dead, or PCIe is too narrow.
- no_gpudirect: about 30%. One host copies through its main memory.
- bad_link: 60-80%. A link or a card is bad, or a CPU is throttled.
- regular_dips: tenfold dips at a fixed interval that no mark explains.
- rare_dips: tenfold dips, irregular, one in about 15 minutes.
- slow_decay: the MFU falls slowly, and a restart resets it.
- thermal: 65-75%, but the first 12-20 s of load after a start or a long pause are fast.
- ragged: the MFU wanders between 90% and 100%.

dead_link, no_gpudirect and bad_link hold from the start, or from some time on. All
kinds have the same healthy life: noise, single slow steps, the drift of a day, a change
of the batch size (which changes the step time, not the MFU), saves, evaluations and
restarts with marks, pauses that the step before them contains or not, an expected MFU
that is a little wrong. A kind other than clean may lack saves or evaluations.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

from tests.observe import synthetic_severity as severity

type Array = np.ndarray
type Kind = Literal[
    "clean",
    "dead_link",
    "no_gpudirect",
    "bad_link",
    "regular_dips",
    "rare_dips",
    "slow_decay",
    "thermal",
    "ragged",
]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
LEVELS: dict[Kind, tuple[float, float]] = {
    "dead_link": severity.DEAD_LINK_LEVEL,
    "no_gpudirect": severity.NO_GPUDIRECT_LEVEL,
    "bad_link": severity.BAD_LINK_LEVEL,
}
# Chosen where no source is named: see `synthetic_severity` for the names.
LEVEL_NOISE = {
    "dead_link": (0.03, 0.2),
    "no_gpudirect": (0.01, 0.06),
}  # log deviation; chosen

DURATION_S = (3600.0, 10_800.0)  # chosen: at least four rare dips
STEP_S = (0.5, 4.0)  # chosen: 12 s of load have at least three steps
STALL_PROBABILITY = (0.0, 0.004)  # per step: collections, late data; chosen
STALL_FACTOR = (1.2, 2.5)
LONE_DIP_PROBABILITY = 0.15  # a single tenfold step in a series of any kind
BATCH = (0.8, 1.3)
EVALUATION_EVERY_S, EVALUATION_S = (120.0, 900.0), (3.0, 60.0)
SAVE_EVERY_S, SAVE_S = (300.0, 1800.0), (2.0, 60.0)
MARK_PROBABILITY = 0.8  # chance that a faulty run saves; the same for evaluations
RESTART_PROBABILITY, RESTART_S = 0.5, (60.0, 300.0)
FIRST_STEPS, FIRST_FACTOR = (1, 4), (1.5, 6.0)  # slow at a start: compilation, caches
MARK_ERROR_S = 0.3  # maximum delay of a mark, by its thread; chosen
COOLED_S = 20.0  # shortest pause that cools a GPU; chosen
ONSET = (0.1, 0.5)  # part of the run; half of the lasting faults begin at 0; chosen
FEWEST_STEPS = 40  # minimum after the onset of a lasting fault; chosen
RAGGED_S = (8.0, 90.0)  # correlation time; chosen: routes and flows of neighbours


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A recorded action of the trainer, in seconds after the run began."""

    kind: Literal["save", "eval", "restart"]
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The known answer: faults put into a series, hidden from classifiers."""

    kind: Kind
    onset_s: float | None
    """Onset of a lasting fault; None without such a fault."""
    level: float
    """Factor on the MFU while a lasting fault is present; 1 without such a fault."""
    dip_s: tuple[float, ...]
    """Ends of the tenfold steps of the fault."""
    lone_dip_s: tuple[float, ...]
    """End of the one such step that a healthy run may have."""
    lost: float
    """Fraction of the MFU that has decayed at the first restart; 0 without decay."""
    ragged: float
    """Deviation of the log MFU over 20 s, without what marks and levels explain."""
    pause_in_step: bool
    """The step before a save or an evaluation contains it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """MFU of a run. T steps."""

    step_end_s: Array
    """[T], float64, ascending, seconds after the run began."""
    step_s: Array
    """[T], float64."""
    mfu: Array
    """[T], float64, of each step by itself; not smoothed."""
    marks: tuple[Mark, ...]
    expected_mfu: float
    """Expected MFU from an earlier run or a benchmark, so slightly wrong."""
    truth: Truth


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """A series before it is laid out in time. N steps."""

    pause_s: Array
    """[N], after the step."""
    mark: tuple[tuple[int, Literal["save", "eval", "restart"], float], ...]
    """Step before it, kind, seconds; in the order in which they follow each other."""
    restarts: tuple[int, ...]
    """Steps before a restart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fault:
    """Effects of a kind of fault. N steps."""

    rate: Array
    """[N], remaining fraction of the healthy rate."""
    onset: int | None = None
    level: float = 1.0
    dips: tuple[int, ...] = ()
    lost: float = 0.0


def make(kind: Kind, seed: int) -> Series:
    """Make the series of a kind and a seed.

    Raises:
      ValueError: the kind is unknown, or the seed is negative.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    usual_s = float(severity.log_uniform(rng, STEP_S, 1)[0])
    duration_s = float(rng.uniform(*DURATION_S))
    fault = _Fault(rate=np.ones(int(duration_s / usual_s)))
    if kind in LEVELS:
        fault = _draw_level(rng, kind, duration_s / usual_s)
    num_steps = len(fault.rate)
    plan = _draw_plan(rng, kind, fault.rate, usual_s)
    usual = np.full(num_steps, usual_s)
    if rng.random() < 0.3:
        usual[int(rng.uniform(0.1, 0.9) * num_steps) :] *= rng.uniform(*BATCH)
    healthy, lone = _draw_healthy_rate(rng, plan, num_steps, usual_s)
    if kind not in LEVELS:
        fault = _draw_fault(rng, kind, plan, num_steps, usual_s)
    return _lay(rng, kind, plan, (usual, healthy, lone), fault)


def _draw_plan(
    rng: np.random.Generator, kind: Kind, rate: Array, usual_s: float
) -> _Plan:
    """Draw saves and evaluations, every so many steps, and restarts, at any time."""
    num_steps, time = len(rate), np.cumsum(1 / rate)
    pauses: dict[int, list] = {}

    def step_at(part: float) -> int:
        return int(np.searchsorted(time, part * time[-1]))

    for name, every_s, took_s in (
        ("eval", EVALUATION_EVERY_S, EVALUATION_S),
        ("save", SAVE_EVERY_S, SAVE_S),
    ):
        if kind != "clean" and rng.random() > MARK_PROBABILITY:
            continue
        every = max(2, int(rng.uniform(*every_s) / usual_s))
        mean_s = severity.log_uniform(rng, took_s, 1)[0]
        for step in range(int(rng.integers(1, every + 1)), num_steps - 1, every):
            took = float(mean_s * rng.lognormal(0, 0.1))
            pauses.setdefault(step, []).append((step, name, took))
    restarts = []
    if kind == "slow_decay" or rng.random() < RESTART_PROBABILITY:
        restarts.append(step_at(rng.uniform(0.4, 0.7)))
        if rng.random() < 0.2:
            restarts.append(step_at(rng.uniform(0.75, 0.9)))
    for step in restarts:
        took = float(rng.uniform(*RESTART_S))
        pauses.setdefault(step, []).append((step, "restart", took))
    mark = tuple(each for step in sorted(pauses) for each in pauses[step])
    pause_s = np.zeros(num_steps)
    for step, _, took in mark:
        pause_s[step] += took
    return _Plan(pause_s=pause_s, mark=mark, restarts=tuple(restarts))


def _draw_healthy_rate(
    rng: np.random.Generator, plan: _Plan, num_steps: int, usual_s: float
) -> tuple[Array, tuple[int, ...]]:
    """Draw the rate of a healthy run, part of the usual one, and its lone dip."""
    noise = rng.uniform(*severity.MFU_STEP_NOISE)
    rate = np.exp(noise * rng.standard_normal(num_steps))
    drift = rng.uniform(*severity.MFU_DRIFT)
    day = np.arange(num_steps) * usual_s / 86_400 + rng.random()
    rate *= 1 - drift * (0.5 + 0.5 * np.sin(2 * np.pi * day))
    stalled = rng.random(num_steps) < rng.uniform(*STALL_PROBABILITY)
    rate /= np.where(stalled, rng.uniform(*STALL_FACTOR, num_steps), 1.0)
    for start in (0, *(step + 1 for step in plan.restarts)):
        length = int(rng.integers(*FIRST_STEPS))
        rate[start : start + length] /= rng.uniform(*FIRST_FACTOR)
    lone = ()
    if rng.random() < LONE_DIP_PROBABILITY:
        lone = (int(rng.uniform(0.05, 0.95) * num_steps),)
        rate[lone[0]] /= rng.uniform(*severity.DIP_FACTOR)
    return rate, lone


def _draw_fault(
    rng: np.random.Generator, kind: Kind, plan: _Plan, num_steps: int, usual_s: float
) -> _Fault:
    """Draw the effects of a kind of fault on a healthy run."""
    if kind in ("regular_dips", "rare_dips"):
        return _draw_dips(rng, kind, num_steps, usual_s)
    if kind == "slow_decay":
        return _draw_decay(rng, plan, num_steps)
    if kind == "thermal":
        return _draw_thermal(rng, plan, num_steps, usual_s)
    if kind == "ragged":
        # A walk that returns, mapped so that each depth is equally likely.
        keep = np.exp(-usual_s / severity.log_uniform(rng, RAGGED_S, 1)[0])
        steps = rng.standard_normal(num_steps) * np.sqrt(1 - keep**2)
        steps[0] = rng.standard_normal()
        walk = np.array(_smooth(steps, float(keep)))
        depth = 1 / (1 + np.exp(-1.702 * walk))  # the normal distribution, nearly
        return _Fault(rate=1 - rng.uniform(*severity.RAGGED_LOSS) * depth)
    return _Fault(rate=np.ones(num_steps))


def _smooth(steps: Array, keep: float) -> list[float]:
    """Return the walk x[i] = keep * x[i - 1] + steps[i]."""
    walk, last = [], 0.0
    for step in steps:
        last = keep * last + float(step)
        walk.append(last)
    return walk


def _draw_level(rng: np.random.Generator, kind: Kind, duration: float) -> _Fault:
    """Draw a level that holds from some step on; the duration is in usual steps."""
    level = float(rng.uniform(*LEVELS[kind]))
    onset = int(rng.uniform(*ONSET) * duration) if rng.random() < 0.5 else 0
    length = max(FEWEST_STEPS, int((duration - onset) * level))
    noise = rng.uniform(*LEVEL_NOISE.get(kind, (0.0, 0.02)))
    slow = level * np.exp(noise * rng.standard_normal(length))
    rate = np.concatenate([np.ones(onset), slow])
    return _Fault(rate=rate, onset=onset, level=level)


def _draw_dips(
    rng: np.random.Generator, kind: Kind, num_steps: int, usual_s: float
) -> _Fault:
    """Draw tenfold dips, at a fixed interval or rare; each is one to three steps."""
    if kind == "regular_dips":
        every = max(8, round(rng.uniform(*severity.REGULAR_S) / usual_s))
        starts = np.arange(int(rng.integers(1, every + 1)), num_steps - 3, every)
    else:
        gaps_s = rng.gamma(4.0, severity.RARE_S / 4, 60)
        starts_s = np.cumsum(gaps_s) - gaps_s[0] * rng.random()
        starts = (starts_s / usual_s).astype(int)
        starts = starts[starts < num_steps - 3]
        while len(starts) < 3:
            starts = np.sort(rng.integers(1, num_steps - 3, 4))
    longest = int(rng.integers(1, 4))
    rate, dips = np.ones(num_steps), set()
    for start in starts:
        for step in range(int(start), int(start) + int(rng.integers(1, longest + 1))):
            rate[step] = 1 / rng.uniform(*severity.DIP_FACTOR)
            dips.add(step)
    return _Fault(rate=rate, dips=tuple(sorted(dips)))


def _draw_decay(rng: np.random.Generator, plan: _Plan, num_steps: int) -> _Fault:
    """Draw a decay, straight or flattening, that each restart resets."""
    lost, first = float(rng.uniform(*severity.DECAY)), plan.restarts[0]
    age = np.arange(num_steps)
    for step in plan.restarts:
        age[step + 1 :] = np.arange(num_steps - step - 1)
    shape = rng.choice([0.6, 1.0, 1.4])
    rate = 1 - lost * np.minimum((age / first) ** shape, 1.5)
    return _Fault(rate=rate, onset=0, lost=lost)


def _draw_thermal(
    rng: np.random.Generator, plan: _Plan, num_steps: int, usual_s: float
) -> _Fault:
    """Draw throttling that begins some seconds after each start of the load."""
    level = float(rng.uniform(*severity.THERMAL_LEVEL))
    rate = level * np.exp(rng.uniform(0.003, 0.02) * rng.standard_normal(num_steps))
    starts = [0, *(int(step) + 1 for step in np.flatnonzero(plan.pause_s > COOLED_S))]
    compiles = {0, *(step + 1 for step in plan.restarts)}
    for start in starts:
        fast = max(3, round(rng.uniform(*severity.THERMAL_DELAY_S) / usual_s))
        if start in compiles:
            fast += FIRST_STEPS[1] - 1  # that does not load the GPU yet
        rate[start : start + fast] = 1.0
        if start + fast < num_steps:
            rate[start + fast] = (1 + level) / 2
    return _Fault(rate=rate, onset=0, level=level)


def _lay(
    rng: np.random.Generator,
    kind: Kind,
    plan: _Plan,
    run: tuple[Array, Array, tuple[int, ...]],
    fault: _Fault,
) -> Series:
    """Lay a series out in time, and measure it."""
    usual, healthy, lone = run
    mfu = float(rng.uniform(*severity.MFU))
    expected = mfu * (
        1 + float(np.clip(rng.normal(0, severity.EXPECTED_ERROR), -0.03, 0.03))
    )
    pause_in_step = bool(rng.random() < 0.5)
    work_s = usual / (healthy * fault.rate)
    done_s = np.cumsum(work_s + plan.pause_s) - plan.pause_s
    step_s, end_s = work_s.copy(), done_s.copy()
    if pause_in_step:
        stops = set(plan.restarts)
        rows = np.array([step not in stops for step in range(len(usual))])
        step_s[rows] += plan.pause_s[rows]
        end_s[rows] += plan.pause_s[rows]
    marks = _lay_marks(rng, plan, done_s)
    onset = fault.onset
    return Series(
        step_end_s=end_s,
        step_s=step_s,
        mfu=(mfu * usual / step_s),
        marks=marks,
        expected_mfu=expected,
        truth=Truth(
            kind=kind,
            onset_s=None if onset is None else float(done_s[onset] - work_s[onset]),
            level=fault.level,
            dip_s=tuple(float(end_s[step]) for step in fault.dips),
            lone_dip_s=tuple(float(end_s[step]) for step in lone),
            lost=fault.lost,
            ragged=_ragged(usual, healthy * fault.rate / fault.level),
            pause_in_step=pause_in_step,
        ),
    )


def _lay_marks(
    rng: np.random.Generator, plan: _Plan, done_s: Array
) -> tuple[Mark, ...]:
    """Give each mark its times; two at the same step follow each other."""
    marks, last, used_s = [], -1, 0.0
    for step, kind, took_s in plan.mark:
        used_s = 0.0 if step != last else used_s
        last = step
        start_s = done_s[step] + used_s + rng.uniform(0, min(MARK_ERROR_S, took_s / 4))
        used_s += took_s
        end_s = float(done_s[step] + used_s)
        marks.append(Mark(kind=kind, start_s=float(start_s), end_s=end_s))
    return tuple(marks)


def _ragged(usual: Array, rate: Array) -> float:
    """Measure how the rate wanders: medians over 20 s, without the rarest tenths."""
    length = max(3, round(20 / float(np.median(usual))))
    logs = np.log(rate)
    blocks = logs[: len(logs) // length * length].reshape(-1, length)
    if len(blocks) < 2:
        return 0.0
    low, high = np.quantile(np.median(blocks, axis=1), [0.1, 0.9])
    return float(high - low) / 2.56  # the deviation, if it were normal
