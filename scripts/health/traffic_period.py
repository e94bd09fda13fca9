"""Measure how well the period of traffic is found, and its false alarms on noise.

    python -m scripts.health.traffic_period --first 600 --count 50
    python -m scripts.health.traffic_period --report

Input: seeds. Output: tables on stdout; with `--report`, which uses `REPORTED`, also
docs/benchmarks/traffic_period.md. Thresholds were fixed on clean series 600 to 799. The
baselines ("straw man" in the tables) are the highest peak of a plain periodogram
against white noise, and a port whose bytes in four minutes differ by half from before.
"""

import argparse
import collections
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mjax.health.watch.compare_ports import compare
from mjax.health.watch.counters import Counters
from mjax.health.watch.period import (
    TOLERANCE,
    Period,
    Steps,
    Traffic,
    find_period,
    find_step,
    fold,
)
from mjax.health.watch.samples import Detection, Sample, Step, Window
from mjax.health.watch.step_traffic import StepTraffic
from mjax.health.watch.thresholds import PeriodThresholds, Thresholds
from scripts.evidence import Table, write_page
from tests.health.series import TUNING_SEEDS, Kind, Series, make
from tests.health.watch.observations import observe, port_of
from tests.health.watch.traffic_faults import Fault, HostFault, host, spoil

REPORTED = range(40_000, 40_200)
SICK: tuple[Kind, ...] = ("flap", "decay", "neighbour")
FAULTS: tuple[Fault, ...] = ("shuffle", "other job")
HOST_FAULTS: tuple[HostFault, ...] = ("none", "shuffle", "other job", "late")
NUM_PORTS = 8
NUM_HOSTS = 60
NUM_NULL = 500
CLASSES = ((0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 8.0), (8.0, math.inf))
"""Classes of step times, s; a sample is 1 s."""
RIGHT_PART = 0.02
"""Relative difference from the step time up to which a period counts as right."""
LIMITS = PeriodThresholds()


def follow(
    series: Series, *, with_steps: bool = True
) -> tuple[StepTraffic, list[Detection]]:
    """Feed a series to the detector."""
    port = port_of(series)
    counters = Counters(port, Thresholds().longest_gap_s)
    follower = StepTraffic(port, LIMITS)
    found = []
    for seen in observe(series):
        match seen:
            case Sample():
                increment = counters.feed(seen)
                each = None if increment is None else follower.feed(increment)
                found += [] if each is None else [each]
            case Window():
                follower.add_window(seen)
            case Step() if with_steps:
                follower.add_step(seen)
    return follower, found


def straw_peak(traffic: Traffic) -> tuple[float, float]:
    """Return the highest peak of a plain periodogram, and log10 of p in white noise."""
    rate = traffic.rate - traffic.rate.mean()
    power = np.abs(np.fft.rfft(rate)[1:-1]) ** 2
    best = int(np.argmax(power))
    z = float(power[best] / power.mean())
    chance = min(0.0, math.log10(len(power)) - z / math.log(10))
    return len(rate) * traffic.sample_s / (best + 1), chance


def straw_loss(series: Series) -> float | None:
    """Return when the bytes of four minutes first differ by half from those before."""
    time_s = series.readings.time_s
    bits = series.port.data_counter_bits
    change = np.diff(series.readings.counters["port_xmit_data"].astype(np.int64))
    change = change % 2**32 if bits == 32 else np.maximum(change, 0)
    sums = np.concatenate(([0], np.cumsum(change))).astype(float)
    ends_s = np.arange(time_s[0], time_s[-1], LIMITS.block_s)
    blocks = np.diff(np.interp(ends_s, time_s, sums))
    for index in range(2, len(blocks)):
        if abs(blocks[index] / max(1.0, np.median(blocks[:index])) - 1) > 0.5:
            return float(ends_s[index + 1])
    return None


def noises(
    clean: Sequence[Series],
) -> dict[str, Callable[[np.random.Generator], Traffic]]:
    """Return the generators of traffic that has no period."""

    def times(rng: np.random.Generator) -> np.ndarray:
        time_s = np.arange(260) + 0.004 * rng.standard_normal(260)
        time_s[rng.random(260) < 0.01] += 0.5
        return np.sort(time_s[rng.random(260) > 0.01])[:241]

    def red(phi: float, heavy: bool) -> Callable[[np.random.Generator], Traffic]:
        def draw(rng: np.random.Generator) -> Traffic:
            time_s = times(rng)
            noise = rng.standard_normal(400)
            if heavy:
                noise = np.exp(noise)
            for index in range(1, 400):
                noise[index] += phi * noise[index - 1]
            rate = noise[-len(time_s) + 1 :]
            return Traffic(start_s=time_s[:-1], end_s=time_s[1:], rate=rate)

        return draw

    def shuffled(rng: np.random.Generator) -> Traffic:
        series = clean[int(rng.integers(len(clean)))]
        follower, _ = pool[id(series)]
        block = follower.traffic()
        if block is None:
            return shuffled(rng)
        long = max(block[0], key=len)
        return Traffic(
            start_s=long.start_s, end_s=long.end_s, rate=rng.permutation(long.rate)
        )

    pool = {id(series): follow(series) for series in clean}
    named = {f"AR(1), phi {phi}": red(phi, False) for phi in (0.5, 0.8, 0.95)}
    return {
        "white": red(0.0, False),
        "white, log-normal": red(0.0, True),
        **named,
        "clean series, seconds shuffled": shuffled,
    }


def null_table(clean: Sequence[Series], num: int) -> Table:
    """Count how often noise has a period."""
    rows = []
    for name, draw in noises(clean).items():
        rng = np.random.default_rng(28)
        counts = collections.Counter[str]()
        for _ in range(num):
            traffic = draw(rng)
            step_s = float(np.exp(rng.uniform(math.log(2.1), math.log(20))))
            ends_s = np.arange(traffic.start_s[0], traffic.end_s[-1], step_s)
            steps = Steps(end_s=ends_s, step_s=np.full(len(ends_s), step_s))
            found = {
                "step": find_step([traffic], steps),
                "blind": find_period([traffic]),
            }
            for key, one in found.items():
                if one is not None:
                    counts[f"{key} -2"] += one.log10_false_alarm < -2
                    counts[f"{key} -4"] += one.log10_false_alarm < -4
            straw = straw_peak(traffic)[1]
            counts["straw -2"] += straw < -2
            counts["straw -4"] += straw < -4
        keys = [f"{key} {p}" for key in ("step", "blind", "straw") for p in (-2, -4)]
        rows.append([name, *(f"{counts[key]}" for key in keys)])
    return Table(
        title="Noise",
        text=f"{num} stretches of four minutes at 1 Hz for each noise, with late and "
        "missing samples. Counted: false alarms at a stated probability of 1e-2 and "
        f"1e-4, so at most {num * 1e-2:.0f} and {num * 1e-4:.2f} are expected. The "
        "step is drawn from 2.1 to 20 s; the straw man takes noise for white.",
        header=(
            "noise",
            "with the step, 1e-2",
            "1e-4",
            "without steps, 1e-2",
            "1e-4",
            "straw man, 1e-2",
            "1e-4",
        ),
        rows=rows,
    )


def classes(step_s: float) -> str:
    """Return the name of the class of a step time."""
    low, high = next(each for each in CLASSES if each[0] <= step_s < each[1])
    return f"{low:g} to {high:g} s" if high < math.inf else f"{low:g} s and more"


def period_table(clean: Sequence[Series]) -> list[Table]:
    """Compare periods with the true steps at the end of each series."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    blocks = []
    for series in clean:
        follower, _ = follow(series)
        block, known = follower.traffic(), follower.summary()
        if block is None or known.step_s is None:
            counts["too few steps at the end"]["series"] += 1
            continue
        parts, _ = block
        step_s = known.step_s
        blocks.append((parts, step_s))
        row = counts[classes(step_s)]
        row["series"] += 1
        row[known.verdict] += 1
        claim = known.verdict in (
            "with the step",
            "an alias of the step",
            "with the step, in windows",
        )
        if claim and known.period is not None:
            away = abs(known.period.period_s / step_s - 1)
            row["within"] += away <= RIGHT_PART
            row["claims"] += 1
        blind = find_period(parts)
        row["blind " + _blind(blind, step_s, parts)] += 1
        peak_s, _ = straw_peak(max(parts, key=len))
        row["straw"] += abs(peak_s / step_s - 1) <= RIGHT_PART
    names = [classes(low) for low, _ in CLASSES]
    verdicts = (
        "with the step",
        "an alias of the step",
        "with the step, in windows",
        "no period",
        "not resolvable",
        "unlike the step",
    )
    told = [
        [
            name,
            str(counts[name]["series"]),
            *(str(counts[name][verdict]) for verdict in verdicts),
            f"{counts[name]['within']}/{counts[name]['claims']}",
        ]
        for name in names
    ]
    kinds = ("right", "harmonic or alias", "wrong", "nothing")
    blind_rows = [
        [
            name,
            *(str(counts[name][f"blind {kind}"]) for kind in kinds),
            f"{counts[name]['straw']}/{counts[name]['series']}",
        ]
        for name in names
    ]
    return [
        Table(
            title="The period beside the true step",
            text=f"{len(clean)} clean series, the last block of each; "
            f"{counts['too few steps at the end']['series']} end with too few steps. "
            f"Rows: the step time of the trainer. Right is within {RIGHT_PART:.0%} of "
            f"the median step of the block; it is searched within {TOLERANCE:.0%}, so "
            "this column is about accuracy. The tables of noise and of steps of "
            "another run assess the verdict.",
            header=("step", "series", *verdicts, "right"),
            rows=told,
        ),
        Table(
            title="The period without knowledge of the step",
            text="The same blocks; the strongest period, which `ports` prints with its "
            "aliases, never as a fact. The straw man is the highest peak.",
            header=("step", *kinds, "straw man right"),
            rows=blind_rows,
        ),
        _strangers(blocks),
    ]


def _blind(blind: Period | None, step_s: float, parts: Sequence[Traffic]) -> str:
    """Judge a period that was found without knowing the step time."""
    from mjax.health.watch.period import Period

    if (
        not isinstance(blind, Period)
        or blind.log10_false_alarm >= LIMITS.log10_periodic
    ):
        return "nothing"
    if abs(blind.period_s / step_s - 1) <= RIGHT_PART:
        return "right"
    sample_s = float(np.median([part.sample_s for part in parts if len(part)]))
    at_hz = fold(np.arange(1, 9) / step_s, 1 / sample_s)
    near = np.abs(at_hz - 1 / blind.period_s) < RIGHT_PART / blind.period_s
    return "harmonic or alias" if near.any() else "wrong"


def _strangers(blocks: Sequence[tuple[list[Traffic], float]]) -> Table:
    """Count how often traffic appears to repeat with the steps of another run."""
    seen = collections.Counter[tuple[str, str]]()
    for index, (parts, own_s) in enumerate(blocks):
        step_s = blocks[(index + 1) % len(blocks)][1]
        if abs(step_s / own_s - 1) < 0.08:
            continue
        ends_s = np.arange(parts[0].start_s[0], parts[-1].end_s[-1], step_s)
        steps = Steps(end_s=ends_s, step_s=np.full(len(ends_s), step_s))
        found = find_step(parts, steps)
        if found is None:
            continue
        name = "at least 2 samples" if not found.aliased else "less: at an alias"
        seen[name, "all"] += 1
        agrees = found.log10_false_alarm < LIMITS.log10_periodic
        seen[name, "agrees"] += agrees
        seen[name, "strong"] += agrees and found.strength >= 0.3
    rows = [
        [name, *(str(seen[name, key]) for key in ("all", "agrees", "strong"))]
        for name in ("at least 2 samples", "less: at an alias")
    ]
    return Table(
        title="With the steps of another run",
        text="The traffic of each series with the step time of the next one, at least "
        "8% away from its own: how often they seem to agree, since a harmonic or an "
        "alias of one is near that of the other. Strong: at least 30% of the variance.",
        header=("step of the other run", "cases", "agree", "strong"),
        rows=rows,
    )


def loss_table(clean: Sequence[Series], seeds: Sequence[int]) -> Table:
    """Count the reported losses, and the false ones."""
    rows = []
    hours = sum(float(np.ptp(each.readings.time_s)) for each in clean) / 3600
    for fault in FAULTS:
        counts = collections.Counter[str]()
        delays_s = []
        for index, series in enumerate(clean):
            other = clean[(index + 1) % len(clean)]
            bad, onset_s = spoil(series, fault, seeds[index], other)
            _, found = follow(bad)
            long = float(np.median(series.step_s)) >= 2
            counts["long"] += long
            right = [each for each in found if each.until_s > onset_s]
            counts["told"] += bool(right)
            counts["told long"] += bool(right) and long
            counts["detections"] += len(found)
            counts["right"] += len(right)
            if right:
                delays_s.append(right[0].until_s - onset_s)
            straw_s = straw_loss(bad)
            counts["straw"] += long and straw_s is not None and straw_s > onset_s
        rows.append(
            [
                fault,
                f"{counts['told long']}/{counts['long']}",
                f"{counts['told']}/{len(clean)}",
                f"{counts['right']}/{counts['detections']}",
                f"{np.median(delays_s) if delays_s else np.nan:.0f}",
                f"{counts['straw']}/{counts['long']}",
            ]
        )
    told = [follow(each)[1] for each in clean]
    straw = sum(straw_loss(each) is not None for each in clean)
    others, meet = collections.Counter[str](), 0
    for kind in SICK:
        for seed in seeds:
            series = make(kind, seed)
            found = follow(series)[1]
            others[kind] += bool(found)
            meet += any(_meets(each, series) for each in found)
    return Table(
        title="Traffic that stops repeating with the steps",
        text=f"{len(clean)} clean series, and each with a fault from an onset at 30 to "
        "50% on; the faults are by the author of the detector. "
        f"False alarms: {sum(map(len, told))} in {hours:.1f} h of {len(clean)} clean "
        f"series (straw man: in {straw} series). In series with a flap, decay or "
        f"neighbour the period is told as lost in {others['flap']}, {others['decay']} "
        f"and {others['neighbour']} of {len(clean)} each, of which {meet} meet the "
        "interval of that fault: jobs that share a link make steps irregular. "
        "Steps below two samples are never accused.",
        header=(
            "fault",
            "recall, steps of 2 s and more",
            "recall, all",
            "precision",
            "median delay, s",
            "straw man, 2 s and more",
        ),
        rows=rows,
    )


def _meets(found: Detection, series: Series) -> bool:
    """Return whether a detection overlaps the interval of the fault of a series."""
    onset_s, offset_s = series.truth.onset_s, series.truth.offset_s
    if onset_s is None or offset_s is None:
        return False
    return found.onset_s <= offset_s and found.until_s >= onset_s


def host_table(clean: Sequence[Series], seeds: Sequence[int]) -> Table:
    """Count hosts with the bad port named, and good ports that are named."""
    rows = []
    for fault in HOST_FAULTS:
        counts = collections.Counter[str]()
        for index, series in enumerate(clean):
            if float(np.median(series.step_s)) < 2:
                continue
            other = clean[(index + 1) % len(clean)]
            ports = host(series, fault, seeds[index], other, NUM_PORTS)
            traffic = {str(n): follow(port)[0] for n, port in enumerate(ports)}
            now_s = float(series.readings.time_s[-1])
            named = set(compare(traffic, now_s, LIMITS).unlike)
            bad = str(NUM_PORTS - 1)
            counts["hosts"] += 1
            counts["named"] += bad in named
            counts["good named"] += (
                len(named - {bad}) if fault != "none" else len(named)
            )
        rows.append(
            [
                fault,
                str(counts["hosts"]),
                str(counts["named"]) if fault != "none" else "-",
                str(counts["good named"]),
            ]
        )
    return Table(
        title="One port among others",
        text=f"Hosts of {NUM_PORTS} ports that send what a clean series sends, with a "
        "rate of their own and 3% noise in each second; the last port has the fault "
        "(late: by a quarter of a step). Judged once, at the end. Steps of 2 s "
        "and more.",
        header=("fault", "hosts", "bad port named", "good ports named"),
        rows=rows,
    )


def tables(seeds: Sequence[int]) -> Iterator[Table]:
    """Yield all tables."""
    clean = [make("clean", seed) for seed in seeds]
    yield null_table(clean, NUM_NULL)
    yield from period_table(clean)
    yield loss_table(clean, seeds)
    yield host_table(clean[:NUM_HOSTS], seeds[:NUM_HOSTS])


def main() -> int:
    """Print all tables; write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="take REPORTED")
    parser.add_argument("--first", type=int, default=600, help="of TUNING_SEEDS")
    parser.add_argument("--count", type=int, default=50, help="of TUNING_SEEDS")
    flags = parser.parse_args()
    tuning = TUNING_SEEDS[flags.first : flags.first + flags.count]
    made = []
    for table in tables(REPORTED if flags.report else tuning):
        made.append(table)
        print(table.title, table.text, table.header, *table.rows, sep="\n", flush=True)
    if flags.report:
        command = "python -m scripts.health.traffic_period --report"
        write_page("traffic_period", "Period of the traffic of ports", command, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
