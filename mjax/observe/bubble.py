"""`python -m mjax.observe bubble`: how long are the stages of a pipeline idle?

    python -m mjax.observe bubble --work-dir DIR --steps A:B

Input: steps of a run that were recorded with the profiler. Output: for each stage the
number and the time of its used and idle slots, measured from the operations that ran,
and the number of idle slots in the schedule. A slot is the forward or the backward part
of a tick. Exit codes: 0 done, 1 the operations disagree with the schedule that the run
recorded, 2 bad input.

The stages of a tick wait for each other, so an idle slot takes the time of the same
slot on the stages that use it (the median of their devices). The bubble is the ratio of
the time of idle slots to that of used slots.
"""

import collections
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import merged, output, schedule, slots, spans, timeline
from mjax.observe.merged import Merged
from mjax.observe.schedule import Direction, Schedule
from mjax.observe.slots import Recorded

type Key = tuple[Direction, int]
"""Direction and tick of a slot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage in one step: the mean over its devices and the recorded steps."""

    stage: int
    used: float
    """Number of slots in which the stage worked."""
    idle: float
    """Number of slots in which another stage worked, but this one did not."""
    idle_by_schedule: int | None
    """Number of idle slots in the schedule; None: the run recorded no schedule."""
    used_s: float
    idle_s: float
    transfer_s: float
    """Time of sends and receives, including waits for the other stage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bubble:
    """Result of the command."""

    generation: int
    steps: tuple[int, ...]
    stages: tuple[Stage, ...]
    schedule: Schedule | None
    problems: tuple[str, ...]
    """Disagreements between operations and schedule."""

    @property
    def slots(self) -> float | None:
        """Ratio of the number of idle slots to that of used slots; None: no slots."""
        used = sum(stage.used for stage in self.stages)
        return sum(stage.idle for stage in self.stages) / used if used else None

    @property
    def time(self) -> float | None:
        """Ratio of the time of idle slots to that of used slots."""
        used_s = sum(stage.used_s for stage in self.stages)
        return sum(stage.idle_s for stage in self.stages) / used_s if used_s else None


def count(
    recorded: Sequence[Recorded], known: Schedule | None, generation: int
) -> Bubble:
    """Count the slots of recorded steps.

    Args:
      recorded: slots of all devices in each recorded step.
      known: schedule that the run recorded; None: it recorded none.
      generation: number of the start.
    Raises:
      ValueError: the run computes idle slots, so their operations look like those of
        used slots.
    """
    if any(one.is_computed for one in recorded):
        raise ValueError(
            "idle slots are computed (--pipeline.idle compute), so operations do not "
            "distinguish them from used ones; record a step with --pipeline.idle skip"
        )
    by_step: dict[int, list[Recorded]] = collections.defaultdict(list)
    for one in recorded:
        by_step[one.step].append(one)
    by_stage: dict[int, list[tuple[Recorded, Mapping[Key, float]]]]
    by_stage = collections.defaultdict(list)
    for some in by_step.values():
        lasted_s = _seconds(some)
        for one in some:
            by_stage[one.stage].append((one, lasted_s))
    problems = [] if known is None else _problems(by_step, known)
    stages = [_stage(number, by_stage[number], known) for number in sorted(by_stage)]
    return Bubble(
        generation=generation,
        steps=tuple(sorted(by_step)),
        stages=tuple(stages),
        schedule=known,
        problems=tuple(problems),
    )


def _problems(by_step: Mapping[int, Sequence[Recorded]], known: Schedule) -> list[str]:
    """Describe each disagreement between operations and schedule."""
    found = []
    for step, some in by_step.items():
        stages = max(one.stage for one in some) + 1
        if stages != known.num_stages:
            found.append(f"step {step}: {stages} stages, not {known.num_stages}")
            continue
        for one in some:
            found += slots.disagreements(known, one)
    return found


def _seconds(some: Sequence[Recorded]) -> dict[Key, float]:
    """Return the median seconds of each slot, over the devices that used it."""
    every: dict[Key, list[float]] = collections.defaultdict(list)
    for one in some:
        for key, (start_ns, end_ns) in one.ran.items():
            every[key].append((end_ns - start_ns) * 1e-9)
    return {key: statistics.median(lasted) for key, lasted in every.items()}


def _stage(
    number: int,
    some: Sequence[tuple[Recorded, Mapping[Key, float]]],
    known: Schedule | None,
) -> Stage:
    by_schedule = None
    if known is not None and number < known.num_stages:
        by_schedule = sum(known.num_idle(number, d) for d in schedule.DIRECTIONS)
    idle = [set(lasted_s) - set(one.ran) for one, lasted_s in some]
    idle_s = [
        sum(lasted_s[key] for key in keys)
        for keys, (_, lasted_s) in zip(idle, some, strict=True)
    ]
    own = [one for one, _ in some]
    return Stage(
        stage=number,
        used=statistics.fmean(len(one.ran) for one in own),
        idle=statistics.fmean(map(len, idle)),
        idle_by_schedule=by_schedule,
        used_s=statistics.fmean(sum(map(_lasted_s, one.ran.values())) for one in own),
        idle_s=statistics.fmean(idle_s),
        transfer_s=statistics.fmean(
            sum(
                _lasted_s((sent.start_ns, sent.end_ns))
                for sent in one.transfers
                if sent.role == slots.PIPELINE
            )
            for one in own
        ),
    )


def _lasted_s(times_ns: tuple[int, int]) -> float:
    return (times_ns[1] - times_ns[0]) * 1e-9


# --------------------------------------------------------------------- the command


def find(work_dir: Path, text: str, generation: int | None = None) -> Bubble:
    """Count the slots of a run.

    Args:
      work_dir: work dir of the run.
      text: A:B, steps A to B - 1.
      generation: start of the run; None takes the newest that ran one of the steps.
    Raises:
      ValueError: a step was recorded by no process or only by some, or a file cannot be
        read.
    """
    first, last = timeline.steps(text)
    output.check_folder(work_dir)
    files, _ = spans.read_run(work_dir)
    found = merged.merge(files, (), first=first, last=last, generation=generation)
    recorded = slots.recorded_slots(work_dir, found)
    if not recorded:
        raise ValueError(
            f"no step of --steps {text} was recorded; train with --profile.steps {text}"
        )
    _check_whole(recorded, found)
    known = schedule.read(work_dir, found.generation)
    return count(recorded, known, found.generation)


def _check_whole(recorded: Sequence[Recorded], found: Merged) -> None:
    """Refuse steps that some devices did not record: their slots would be missing."""
    num = 1
    for size in found.ranks[0].header.mesh.values():
        num *= size
    for step in {one.step for one in recorded}:
        there = {one.device for one in recorded if one.step == step}
        absent = sorted(set(range(num)) - there)
        if absent:
            raise ValueError(
                f"step {step} was recorded on {len(there)} of {num} devices, not on "
                f"{absent[0]}; copy the profile/ folders of all hosts into one work "
                "dir, or leave this step out of --steps"
            )


def text_of(found: Bubble) -> list[str]:
    """Return the report as lines of text."""
    known = found.schedule
    steps = ", ".join(map(str, found.steps))
    lines = [f"generation {found.generation}, step {steps}: means of devices and steps"]
    if not any(stage.used for stage in found.stages):
        return [*lines, "", "no pipeline: 0 slots, 0 idle"]
    names = ("stage", "used slots", "idle", "idle by schedule", "used ms", "idle ms")
    rows: list[Sequence[str]] = [(*names, "transfers and waits ms")]
    for stage in found.stages:
        expected = stage.idle_by_schedule
        rows.append(
            (
                str(stage.stage),
                f"{stage.used:g}",
                f"{stage.idle:g}",
                "unknown" if expected is None else str(expected),
                *(
                    f"{s * 1e3:.2f}"
                    for s in (stage.used_s, stage.idle_s, stage.transfer_s)
                ),
            )
        )
    lines += ["", *output.aligned(rows, left=0), ""]
    lines.append(f"bubble, idle slots over used ones: {found.slots:.4f} counted")
    if known is None:
        lines[-1] += "; the run has no record of its schedule to compare with"
    else:
        lines[-1] += f", (P - 1) / (v M) = {known.bubble:.4f}"
    lines.append(f"bubble, time of idle slots over that of used ones: {found.time:.4f}")
    return lines


def _json(found: Bubble) -> dict[str, Any]:
    known = found.schedule
    return {
        "generation": found.generation,
        "steps": [*found.steps],
        "stages": [dataclasses.asdict(stage) for stage in found.stages],
        "bubble_slots": found.slots,
        "bubble_time": found.time,
        "bubble_formula": None if known is None else known.bubble,
        "problems": [*found.problems],
    }


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe bubble",
        description="Show how long pipeline stages are idle, measured and scheduled.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    add("--steps", required=True, metavar="A:B", help="recorded steps A to B - 1")
    add("--generation", type=int, help="start of the run; default: the newest")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="write the output to this file")
    args = parser.parse_args(argv)
    try:
        found = find(args.work_dir, args.steps, args.generation)
        said = json.dumps(_json(found)) if args.json else "\n".join(text_of(found))
        if args.out is not None:
            output.write(args.out, said + "\n")
        else:
            print(said)
    except ValueError as error:
        return output.refuse(error)
    output.warn(found.problems)
    return 1 if found.problems else 0
