"""Precision and recall of the detectors of `health watch` on generated series.

    python -m scripts.health.watch_cases --first 300 --count 50
    python -m scripts.health.watch_cases --report

Input: seeds. Output: a table on stdout; with `--report`, which uses `REPORT_SEEDS`,
also docs/benchmarks/watch_cases.md. A detection is right if its kind is that of the
series and its interval overlaps the true one. The baseline ("straw man" in the table)
reports a fault if link_downed grew, or if a straight line through the step times rises
or falls by a tenth.
"""

import argparse
import collections
import dataclasses
import sys
import time

import numpy as np

from mjax.health.watch.samples import Detection
from mjax.health.watch.watcher import detect
from scripts.evidence import Table, write_page
from tests.health.series import KINDS, REPORT_SEEDS, TUNING_SEEDS, Series, make
from tests.health.watch.observations import observe, port_of

SICK = tuple(kind for kind in KINDS if kind != "clean")
HEADER = ("detector", "kind", "recall", "precision", "median delay, s")


@dataclasses.dataclass(kw_only=True)
class Score:
    """Counts of one detector's detections, by kind, and their delays in seconds."""

    right: collections.Counter[str]
    all: collections.Counter[str]
    confused: collections.Counter[tuple[str, str]]
    delays_s: dict[str, list[float]]


def straw_man(series: Series) -> list[Detection]:
    """Report a flap if link_downed grew, and decay if a fitted line slopes."""

    def whole(kind: str, text: str) -> Detection:
        last_s = float(series.readings.time_s[-1])
        return Detection(
            kind=kind,  # pyright: ignore[reportArgumentType]
            onset_s=0.0,
            until_s=last_s,
            score=1.0,
            evidence=text,
            numbers={},
        )

    found = []
    down = series.readings.counters["link_downed"].astype(np.int64)
    if (np.diff(down) > 0).any():
        found.append(whole("flap", "link_downed grew"))
    slope, start = np.polyfit(series.step_end_s, series.step_s, 1)
    rise = slope * float(np.ptp(series.step_end_s)) / start
    if abs(rise) > 0.1:
        found.append(whole("decay" if rise > 0 else "neighbour", "a line slopes"))
    return found


def judge(score: Score, series: Series, found: list[Detection]) -> None:
    """Add the detections found in a series to the counts."""
    truth = series.truth
    right = [
        each
        for each in found
        if each.kind == truth.kind
        and truth.onset_s is not None
        and truth.offset_s is not None
        and each.onset_s <= truth.offset_s
        and each.until_s >= truth.onset_s
    ]
    score.all.update(each.kind for each in found)
    score.all[f"right {truth.kind}"] += len(right)
    score.right[truth.kind] += bool(right)
    for kind in {each.kind for each in found} or {"nothing"}:
        score.confused[truth.kind, kind] += 1
    if right and truth.onset_s is not None:
        delay_s = min(each.until_s for each in right) - truth.onset_s
        score.delays_s.setdefault(truth.kind, []).append(delay_s)


def rows(name: str, score: Score, count: int) -> list[list[str]]:
    """Return the table rows of a detector, one per kind."""
    return [
        [
            name,
            kind,
            f"{score.right[kind]}/{count}",
            f"{score.all[f'right {kind}']}/{score.all[kind]}",
            f"{np.median(score.delays_s.get(kind, [np.nan])):.0f}",
        ]
        for kind in SICK
    ]


def main() -> int:
    """Run both detectors over all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="take REPORT_SEEDS")
    parser.add_argument("--first", type=int, default=0, help="of TUNING_SEEDS")
    parser.add_argument("--count", type=int, default=50, help="of TUNING_SEEDS")
    flags = parser.parse_args()
    tuning = TUNING_SEEDS[flags.first : flags.first + flags.count]
    seeds = REPORT_SEEDS if flags.report else tuning
    names = ("watch", "straw man")
    scores = {
        name: Score(
            right=collections.Counter(),
            all=collections.Counter(),
            confused=collections.Counter(),
            delays_s={},
        )
        for name in names
    }
    cpu_s, clean_h, false = 0.0, 0.0, 0
    for kind in KINDS:
        for seed in seeds:
            series = make(kind, seed)
            observations = observe(series)
            start_s = time.process_time()
            found = detect(port_of(series), observations)
            cpu_s += time.process_time() - start_s
            judge(scores["watch"], series, found)
            judge(scores["straw man"], series, straw_man(series))
            if kind == "clean":
                clean_h += float(np.ptp(series.readings.time_s)) / 3600
                false += len(found)
    text = (
        f"{len(seeds)} series of each kind, seeds {seeds[0]} to {seeds[-1]}. "
        f"{false} false alarms in {clean_h:.1f} h of clean series, "
        f"{cpu_s / len(seeds) / len(KINDS):.3f} s of CPU a series. "
        "A delay ends with the evidence, that of a neighbour with its load; lost rates "
        "and neighbours are told when they are judged, every 1800 s or at the end. "
        "The thresholds were fixed on seeds 600 to 1999 before these seeds were run. "
        "Earlier reports, each on 200 series of its own, are spent. Seeds 20000 to "
        "20199: flap recall 199, precision 368/368; decay 195, 206/211; neighbour 192, "
        "192/194. Then one rule was added: no sign may contradict a neighbour. Seeds "
        "30000 to 30199: flap 200, 378/379; decay 196, 213/224; neighbour 188, "
        "188/188, which missed the target of 0.95. Then one weight was changed on "
        "tuning seeds (`decay_weight`). Neither change looked at a series of a report."
    )
    quality = [row for name in names for row in rows(name, scores[name], len(seeds))]
    columns = (*SICK, "nothing")
    matrix = [
        [kind, *(str(scores["watch"].confused[kind, found]) for found in columns)]
        for kind in KINDS
    ]
    tables = [
        Table(title="Precision and recall", text=text, header=HEADER, rows=quality),
        Table(
            title="What is found in series of each kind",
            text="Series in which at least one such detection was made.",
            header=("series", *columns),
            rows=matrix,
        ),
    ]
    for table in tables:
        print(table.title, table.text, table.header, *table.rows, sep="\n")
    if flags.report:
        command = "python -m scripts.health.watch_cases --report"
        write_page("watch_cases", "Detectors of health watch", command, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
