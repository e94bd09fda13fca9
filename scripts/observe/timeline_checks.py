"""Check the timeline of the runs of `real_timeline`, and write the results.

Input: the folder of the runs. Output: docs/benchmarks/observe_timeline.md and
docs/figures/timeline_pipeline.png; 1 if a check fails. The references are computed here
independently: mesh positions of devices, tables of the schedule, true clocks.
"""

import dataclasses
import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.observe import bubble, schedule, slots, spans, timeline, timeline_picture
from mjax.observe.merged import Merged, Rank, merge
from mjax.pipeline.config import Options
from mjax.pipeline.make import Pipeline
from mjax.pipeline.partition import split
from mjax.pipeline.schedule import build
from mjax.run import schedule_record
from mjax.run.record import Start
from scripts.evidence import REPOSITORY, Table, commit, write_page
from scripts.observe.real_timeline import (
    DRIFTS_PPM,
    FIRST,
    FLAGS,
    PIPELINE,
    PLAIN,
    SHIFTED,
    SHIFTS_NS,
    STEPS,
    STOP,
)

TEXT = f"{FIRST}:{STOP}"
FIGURE = REPOSITORY / "docs" / "figures" / "timeline_pipeline.png"
STAGES, CHUNKS, MICROBATCHES = 2, 2, 4
READ_NS = 1.0
"""Tolerance: times of merged and of shifted clocks are rounded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the page."""

    what: str
    found: str
    is_right: bool


# ------------------------------------------------------------------------ idle slots


def idle_checks(folder: Path) -> Iterator[Check]:
    """Count idle slots of the right, a wrong, and no schedule."""
    work_dir = folder / "pipeline"
    found = bubble.find(work_dir, TEXT)
    expected = _idle_of_table()
    for stage in found.stages:
        yield Check(
            what=f"idle slots of stage {stage.stage} in a step, from operations",
            found=f"{stage.idle:g} of {stage.idle + stage.used:g}; the table of the "
            f"schedule has {expected[stage.stage]}",
            is_right=stage.idle == expected[stage.stage],
        )
    formula = (STAGES - 1) / (CHUNKS * MICROBATCHES)
    yield Check(
        what="bubble: idle slots over used ones",
        found=f"{found.slots:.4f}; (P - 1) / (v M) = {formula:.4f}",
        is_right=found.slots == formula,
    )
    num = len(found.steps) * 8
    yield Check(
        what="slots that ran though they are idle by the schedule, or the reverse",
        found=f"{len(found.problems)} in {num} steps of devices",
        is_right=not found.problems and num == 8 * (STOP - FIRST),
    )
    used_s = sum(stage.used_s for stage in found.stages)
    idle_s = sum(stage.idle_s for stage in found.stages)
    yield Check(
        what="time of idle slots over that of used ones",
        found=f"{idle_s * 1e3:.1f} ms over {used_s * 1e3:.1f} ms = {found.time:.3f} "
        "(not a bar: slots of devices that share two cores are not equally long)",
        is_right=idle_s > 0,
    )
    yield _with_wrong_schedule(work_dir)
    plain = bubble.find(folder / "plain", "3:4")
    idle = sum(stage.idle for stage in plain.stages)
    yield Check(
        what="a run without a pipeline",
        found=f"{idle:g} idle slots, {sum(s.used for s in plain.stages):g} used",
        is_right=idle == 0 and plain.slots is None,
    )


def _idle_of_table() -> list[int]:
    """Count the idle slots of each stage from the tables of `mjax.pipeline`."""
    tables = build(
        "interleaved-1f1b",
        num_stages=STAGES,
        num_chunks=CHUNKS,
        num_microbatches=MICROBATCHES,
    )
    idle = np.zeros(STAGES, int)
    for table in (tables.forward_chunk, tables.backward_chunk):
        used = table >= 0
        idle += (~used & used.any(axis=1, keepdims=True)).sum(axis=0)
    return idle.tolist()


def _with_wrong_schedule(work_dir: Path) -> Check:
    """Claim one virtual stage per stage for the run: the count must detect it."""
    known = schedule.read(work_dir, 1)
    assert known is not None
    with tempfile.TemporaryDirectory() as name:
        wrong = Pipeline(
            schedule=build(
                "1f1b", num_stages=STAGES, num_chunks=1, num_microbatches=MICROBATCHES
            ),
            partition=split(8, num_stages=STAGES, num_chunks=1, period=2, uneven=False),
            options=Options(idle="skip"),
        )
        schedule_record.write(Path(name), Start(run=known.run, number=1), wrong)
        other = schedule.read(Path(name), 1)
    merged = _merged(work_dir)
    found = bubble.count(slots.recorded_slots(work_dir, merged), other, 1)
    return Check(
        what="the same run with the schedule of another one (1 virtual stage)",
        found=f"{len(found.problems)} slots disagree, as they should",
        is_right=len(found.problems) > 0,
    )


def witness_check(folder: Path) -> Check:
    """Compare the executor's report of each slot with the record of the run."""
    lines = (folder / "witness.jsonl").read_text().splitlines()
    known = schedule.read(folder / "witness", 1)
    assert known is not None
    said = {tuple(json.loads(line)) for line in lines}
    expected = {
        (direction, tick, stage, *work)
        for direction in schedule.DIRECTIONS
        for tick in range(known.num_ticks)
        for stage in range(STAGES)
        if (work := known.work(schedule.Slot(direction, tick, stage))) is not None
    }
    is_same = schedule.read(folder / "pipeline", 1)
    assert is_same is not None
    is_same = (is_same.forward, is_same.backward) == (known.forward, known.backward)
    return Check(
        what="virtual stage and microbatch of each slot, as the executor said while it "
        "ran (a callback in each slot)",
        found=f"{len(said & expected)} of {len(expected)} as recorded, "
        f"{len(said - expected)} others; {len(lines)} calls of 4 devices in 2 steps",
        is_right=said == expected and len(lines) == 4 * len(expected) and is_same,
    )


# ------------------------------------------------------------------ slots and stamps


def slot_checks(work_dir: Path) -> Iterator[Check]:
    """Compare operations with stamps, and count the slots."""
    found = slots.find(work_dir, _merged(work_dir))
    used = [bar for bar in found.bars if bar.work is not None]
    yield Check(
        what="slots in the timeline of the recorded steps",
        found=f"{len(used)} used, {len(found.bars) - len(used)} idle, "
        f"{sum(bar.is_measured for bar in used)} with times of their operations",
        is_right=len(used) == 8 * 16 * (STOP - FIRST)
        and all(bar.is_measured for bar in used),
    )
    yield Check(
        what=f"slots with operations more than {slots.APART_NS / 1e6:g} ms outside of "
        "the stamps of their tick",
        found=f"{len(found.problems)} of {len(used)}",
        is_right=not found.problems,
    )


# ----------------------------------------------------------------------------- arrows


def arrow_check(path: Path, steps: int) -> Check:
    """Read the trace for Perfetto, and follow each arrow."""
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    error_us = {of["rank"]: of["error_ns"] / 1e3 for of in content["metadata"]["ranks"]}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    bars: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            bars.setdefault((event["pid"], event["tid"]), []).append(event)
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    wrong, pairs, num_ordered = [], set(), 0
    for number, begin in begins.items():
        end = ends[number]
        sent, received = _bar_at(bars, begin), _bar_at(bars, end)
        device, there = (threads[e["pid"], e["tid"]] for e in (begin, end))
        ahead_us = sent["ts"] + sent["dur"] - received["ts"]
        num_ordered += ahead_us <= 0
        most_us = error_us[sent["pid"]] + error_us[received["pid"]]
        if ahead_us > most_us or not _is_right(sent, received, device, there):
            wrong.append((sent, received))
        pairs.add((sent["args"]["step"], device, sent["args"]["tick"], there))
    # v M sends of each stage in each direction, except M at the end of the model.
    sends = 2 * (STAGES * CHUNKS - 1) * MICROBATCHES * 4 * steps
    return Check(
        what="arrows of the trace: from a slot to the slot of the next tick with the "
        "same microbatch and the next virtual stage, on the device beside it",
        found=f"{len(begins) - len(wrong)} of {sends} right, {len(wrong)} wrong, "
        f"{len(ends.keys() ^ begins.keys())} without an end; in {num_ordered} the slot "
        "that sends ends first by the merged clocks, in all within their stated error",
        is_right=not wrong
        and len(begins) == len(pairs) == sends
        and begins.keys() == ends.keys(),
    )


def _bar_at(
    bars: Mapping[tuple[int, int], Sequence[dict[str, Any]]], event: dict[str, Any]
) -> dict[str, Any]:
    """Return the only bar that contains an end of an arrow, as a viewer finds it."""
    [found] = [
        bar
        for bar in bars[event["pid"], event["tid"]]
        if bar["ts"] <= event["ts"] < bar["ts"] + bar["dur"]
    ]
    return found


def _is_right(
    sent: dict[str, Any], received: dict[str, Any], stream: str, there: str
) -> bool:
    """Return whether an arrow is a transfer of the pipeline."""
    (own, direction), (other, same) = stream.split(), there.split()
    device, beside = int(own.split(":")[1]), int(other.split(":")[1])
    a, b = sent["args"], received["args"]
    if "chunk" not in a or "chunk" not in b or direction != same:
        return False
    # Of 8 devices the first four are stage 0; dp and tp are the rest of the number.
    step = 1 if direction == "forward" else -1
    number = a["chunk"] * STAGES + device // 4 + step
    return (
        (b["chunk"], beside // 4) == divmod(number, STAGES)
        and device % 4 == beside % 4
        and a["microbatch"] == b["microbatch"]
        and a["step"] == b["step"]
        and a["tick"] + 1 == b["tick"]
    )


# ----------------------------------------------------------------------------- clocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """Error of the placement of one rank's spans in some steps, in ns."""

    rank: int
    bound_ns: float
    worst_ns: float
    """Largest error against the true time by the clock of rank 0."""
    wall_ns: float
    """Largest error of a placement by wall clocks."""
    spans: int


def placed(work_dir: Path, anchor_ns: int, first: int, last: int) -> list[Placed]:
    """Compare merged times with true times, which are those of rank 0's clock."""
    files, _ = spans.read_run(work_dir)
    found = merge(files, (), first=first, last=last)
    own = {rank.header.rank: rank for rank in found.ranks}
    result = []
    for number in sorted(own):
        rank = own[number]
        errors = [_error_ns(rank, ns, anchor_ns) for ns in _times(rank, first, last)]
        lowest = own[0].header
        wall_ns = (rank.header.monotonic_ns - rank.header.wall_ns) - (
            lowest.monotonic_ns - lowest.wall_ns
        )
        shift_ns = rank.offset_ns - wall_ns
        result.append(
            Placed(
                rank=number,
                bound_ns=rank.error_ns,
                worst_ns=max(abs(ns) for ns in errors),
                wall_ns=max(abs(ns + shift_ns) for ns in errors),
                spans=len(errors) // 2,
            )
        )
    return result


def _times(rank: Rank, first: int, last: int) -> list[int]:
    return [
        time_ns
        for step, span in rank.spans
        if first <= step <= last
        for time_ns in (span.start_ns, span.end_ns)
    ]


def _error_ns(rank: Rank, merged_ns: int, anchor_ns: int) -> float:
    """Return the error of a merged time, by the clock of rank 0."""
    number = rank.header.rank
    own_ns = merged_ns + rank.offset_ns
    # own = true + shift + (true - anchor) * drift, solved for true - anchor.
    since_ns = (own_ns - SHIFTS_NS[number] - anchor_ns) / (1 + DRIFTS_PPM[number] / 1e6)
    of_0_ns = SHIFTS_NS[0] + since_ns * (1 + DRIFTS_PPM[0] / 1e6)
    return (merged_ns - anchor_ns) - of_0_ns


def clock_rows(folder: Path) -> tuple[list[Sequence[str]], list[Check]]:
    """Return the table of the clocks, and the checks on them."""
    work_dir, anchor_ns = folder / "pipeline", int((folder / "anchor").read_text())
    every = [
        (step, one)
        for step in range(1, STEPS + 1)
        for one in placed(work_dir, anchor_ns, step, step)
    ]
    rows = []
    for rank in range(len(SHIFTS_NS)):
        own = [one for _, one in every if one.rank == rank]
        rows.append(
            (
                str(rank),
                f"{SHIFTS_NS[rank] / 1e9:+g} s, {DRIFTS_PPM[rank]:+g} ppm",
                f"{max(one.bound_ns for one in own) / 1e3:.0f}",
                f"{max(one.worst_ns for one in own) / 1e3:.0f}",
                f"{max(one.worst_ns / (one.bound_ns or 1) for one in own):.2f}"
                if rank
                else "0",
                f"{max(one.wall_ns for one in own) / 1e3:.0f}",
            )
        )
    inside = [one.worst_ns <= one.bound_ns + READ_NS for _, one in every]
    checks = [
        Check(
            what="steps of ranks whose spans all lie within the stated error",
            found=f"{sum(inside)} of {len(inside)}, "
            f"{sum(one.spans for _, one in every)} spans",
            is_right=all(inside) and len(inside) == STEPS * len(SHIFTS_NS),
        ),
        _quarter_bound(every),
        _without_barriers(work_dir),
    ]
    return rows, checks


def _quarter_bound(every: Sequence[tuple[int, Placed]]) -> Check:
    """Count how often a quarter of the bound fails, to show that the check can fail."""
    others = [one for _, one in every if one.rank]
    over = sum(one.worst_ns > one.bound_ns / 4 for one in others)
    return Check(
        what="the same, if a quarter of the error were stated",
        found=f"{over} of {len(others)} steps of ranks 1 to 3 outside",
        is_right=over > 0,
    )


def _without_barriers(work_dir: Path) -> Check:
    """Remove the barriers from the files, so that nothing bounds the clocks."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        shutil.copytree(work_dir / spans.FOLDER, copy / spans.FOLDER)
        for path in (copy / spans.FOLDER).iterdir():
            head, *lines = path.read_bytes().splitlines()
            kept = [line for line in lines if b'"barrier":' not in line]
            numbered = [
                json.dumps(json.loads(line) | {"n": n}).encode()
                for n, line in enumerate(kept)
            ]
            path.write_bytes(b"\n".join([head, *numbered]) + b"\n")
        found = _merged(copy)
    unbounded = [rank for rank in found.ranks if math.isinf(rank.error_ns)]
    said = [text for text in found.problems if "is not bounded" in text]
    return Check(
        what="the same files without their barriers",
        found=f"{len(unbounded)} of {len(found.ranks)} ranks have no bound, and "
        f"{len(said)} lines say so",
        is_right=len(unbounded) == len(said) == len(found.ranks) - 1,
    )


# --------------------------------------------------------------------------- the page


def _merged(work_dir: Path, first: int = FIRST, last: int = STOP - 1) -> Merged:
    files, _ = spans.read_run(work_dir)
    return merge(files, (), first=first, last=last, view="pp")


def draw(work_dir: Path) -> None:
    """Draw one recorded step, and take a picture of the page."""
    found = _merged(work_dir, FIRST, FIRST)
    known = slots.find(work_dir, found)
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "page.html"
        page.write_text(timeline_picture.page(found, "pp", known, only_slots=True))
        subprocess.run(
            [
                *("/usr/bin/chromium", "--headless", "--no-sandbox", "--disable-gpu"),
                *("--hide-scrollbars", "--window-size=1520,650"),
                *(f"--screenshot={FIGURE}", f"file://{page}"),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def write(folder: Path) -> int:
    """Check, draw, and write the page; return 1 if a check fails."""
    work_dir = folder / "pipeline"
    trace = folder / "steps.json"
    words = ["--work-dir", str(work_dir), "--steps", TEXT, "--view", "pp"]
    assert timeline.main([*words, "--out", str(trace)]) == 0
    checks = [*idle_checks(folder), witness_check(folder), *slot_checks(work_dir)]
    checks.append(arrow_check(trace, STOP - FIRST))
    rows, more = clock_rows(folder)
    draw(work_dir)
    run_flags = " ".join((*FLAGS, *PIPELINE, *SHIFTED))
    slots_table = Table(
        title="Slots, transfers and the bubble",
        text=f"Runs of {(folder / 'commit').read_text()}, read by {commit()}: four "
        f"processes with `{run_flags}`, and for the run without a pipeline "
        f"`{' '.join(PLAIN)}`. Operations are those of the "
        "profiler's window; idle slots are skipped on simulated devices. All eight "
        "devices share two cores, so times show what this machine did, not what GPUs "
        "would do: a stage that idles leaves its core to the others.",
        header=("what", "found", "as it should be"),
        rows=[_row(check) for check in checks],
    )
    clocks = Table(
        title="Merged clocks",
        text="The clocks of the same run: each process read its own, shifted from the "
        "true one by an offset and a drift. The true time of a span by the clock of "
        f"rank 0 follows from these two numbers. All {STEPS} steps, each merged by "
        "itself; times in us, the largest of all steps.",
        header=(
            "rank",
            "shift",
            "stated error",
            "true error",
            "part of it",
            "by wall clocks",
        ),
        rows=rows,
    )
    about = Table(
        title="Bounds",
        text="What was checked of them.",
        header=("what", "found", "as it should be"),
        rows=[_row(check) for check in more],
    )
    command = "python -m scripts.observe.real_timeline"
    title = "The timeline of a real pipeline run"
    print(write_page("observe_timeline", title, command, [slots_table, clocks, about]))
    for check in (*checks, *more):
        print(" ".join(_row(check)[::-1]))
    return 0 if all(check.is_right for check in (*checks, *more)) else 1


def _row(check: Check) -> Sequence[str]:
    return check.what, check.found, "yes" if check.is_right else "NO"
