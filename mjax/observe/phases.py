"""`python -m mjax.observe phases`: time of recorded steps by phase and role.

    python -m mjax.observe phases --work-dir DIR [--each] [--json] [--out FILE]

Input: a work dir with windows of the profiler (`python -m mjax.train --profile.steps
A:B`, or `--profile.every N`). Output: seconds per step by phase and role, for each
device and as their mean, split into exposed and overlapped (`windows.seconds`). Exit
codes: 0 done, 2 bad input.
"""

import collections
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import output
from mjax.observe.windows import folders
from mjax.observe.windows.places import ROLES, UNKNOWN
from mjax.observe.windows.read import Reading, read
from mjax.observe.windows.seconds import DeviceSeconds, Seconds, merged
from mjax.trace.scopes import PHASES

_RECORD = "record steps with python -m mjax.train ... --profile.steps 100:103"
Parts = Mapping[tuple[str, str], Seconds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePhases:
    """Times of one device: means over its windows."""

    device: int
    """Index in the flat order of the mesh."""
    rank: int
    host: str
    stage: int
    windows: int
    span_s: float
    """Seconds from the start of the first event of a step to the end of the last."""
    idle_s: float
    parts: Parts
    unknown: Mapping[str, float]
    """Seconds of each instruction whose phase and role are unknown, summed over all
    windows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
    """Times of the chosen steps, as the command reports them."""

    generation: int
    steps: tuple[int, ...]
    devices: tuple[DevicePhases, ...]
    problems: tuple[str, ...]
    """One message for each window that could not be read."""

    @property
    def mean(self) -> Parts:
        """Seconds of a step by (phase, role), as the mean over the devices."""
        parts = merged(device.parts for device in self.devices)
        return {key: _part_of(s, len(self.devices)) for key, s in parts.items()}


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe phases",
        description="Show the time of recorded steps by phase and role (computation, "
        "or the mesh axes of a collective).",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    add(
        "--generation",
        type=int,
        help="start of the run to read; default: the newest with recorded steps",
    )
    add("--step", type=int, help="one recorded step; default: all of the generation")
    add("--each", action="store_true", help="also show the phases of each device")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args(argv)
    try:
        found = phases(args.work_dir, generation=args.generation, step=args.step)
        text = json.dumps(as_json(found), indent=1) + "\n"
        if args.out is not None:
            output.write(args.out, text)
    except ValueError as error:
        return output.refuse(error)
    for problem in found.problems:
        print(f"warning: left out: {problem}", file=sys.stderr)
    print(text if args.json else page(found, each=args.each), end="")
    return 0


def phases(
    work_dir: Path, *, generation: int | None = None, step: int | None = None
) -> Phases:
    """Read the recorded steps of a run and average their times per device.

    Args:
      work_dir: work dir of the run.
      generation: start of the run; None takes the newest that has windows.
      step: one recorded step; None takes all of the generation.
    Raises:
      ValueError: the generation or the step was not recorded, or no window can be read.
    """
    if not work_dir.is_dir():
        raise ValueError(
            f"--work-dir {work_dir} is not a folder; give the work dir of a run"
        )
    complete, partial = folders.find(work_dir)
    if not complete and not partial:
        raise ValueError(f"--work-dir {work_dir} has no recorded steps; {_RECORD}")
    numbers = sorted({_generation(folder) for folder in (*complete, *partial)})
    chosen = numbers[-1] if generation is None else generation
    if chosen not in numbers:
        raise ValueError(
            f"--generation {chosen} has no recorded steps in {work_dir}; generations "
            f"with recorded steps: {', '.join(map(str, numbers))}"
        )
    of_chosen = [f for f in complete if _generation(f) == chosen]
    steps = sorted({_step(folder) for folder in of_chosen})
    if step is not None and step not in steps:
        raise ValueError(
            f"--step {step} is not recorded in generation {chosen} of {work_dir}; "
            f"recorded: {', '.join(map(str, steps)) or 'none'}"
        )
    problems = [
        f"{folder} has no {folders.WINDOW}, because its step did not end"
        for folder in partial
        if _generation(folder) == chosen and step in (None, _step(folder))
    ]
    readings = []
    for folder in of_chosen:
        if step in (None, _step(folder)):
            try:
                readings.append(read(folder))
            except ValueError as error:
                problems.append(str(error))
    if not readings:
        raise ValueError(f"no window can be read: {problems[0]}; {_RECORD}")
    return Phases(
        generation=chosen,
        steps=tuple(sorted({reading.window.step for reading in readings})),
        devices=tuple(_by_device(readings)),
        problems=tuple(problems),
    )


def _generation(folder: Path) -> int:
    return int(folder.parent.parent.name)


def _step(folder: Path) -> int:
    return int(folder.parent.name.removeprefix("step-"))


def _by_device(readings: Iterable[Reading]) -> Iterable[DevicePhases]:
    """Yield the mean of each device's windows, in the order of the mesh."""
    of_device: dict[int, list[tuple[Reading, DeviceSeconds]]] = collections.defaultdict(
        list
    )
    for reading in readings:
        for number, seconds in reading.seconds.items():
            of_device[number].append((reading, seconds))
    for number, several in sorted(of_device.items()):
        window, num = several[-1][0].window, len(several)
        unknown: collections.Counter[str] = collections.Counter()
        for _, seconds in several:
            unknown.update(seconds.unknown)
        parts = merged(seconds.parts for _, seconds in several)
        yield DevicePhases(
            device=number,
            rank=window.rank,
            host=window.host,
            stage=several[-1][0].stage_of(number),
            windows=num,
            span_s=sum(seconds.span_s for _, seconds in several) / num,
            idle_s=sum(seconds.idle_s for _, seconds in several) / num,
            parts={key: _part_of(s, num) for key, s in parts.items()},
            unknown=dict(unknown),
        )


def _part_of(seconds: Seconds, num: int) -> Seconds:
    return Seconds(
        total_s=seconds.total_s / num,
        exposed_s=seconds.exposed_s / num,
        events=round(seconds.events / num),
    )


# ------------------------------------------------------------------------------ output


def as_json(found: Phases) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {
        "format": "mjax-phases",
        "version": 1,
        "generation": found.generation,
        "steps": [*found.steps],
        "mean": _rows(found.mean),
        "devices": [
            {
                **{
                    field.name: getattr(device, field.name)
                    for field in dataclasses.fields(device)
                },
                "parts": _rows(device.parts),
            }
            for device in found.devices
        ],
        "problems": [*found.problems],
    }


def _rows(parts: Parts) -> list[dict[str, Any]]:
    return [
        {
            "phase": phase,
            "role": role,
            "total_s": parts[phase, role].total_s,
            "exposed_s": parts[phase, role].exposed_s,
            "overlapped_s": parts[phase, role].overlapped_s,
            "events": parts[phase, role].events,
        }
        for phase, role in _in_order(parts)
    ]


def _in_order(parts: Parts) -> list[tuple[str, str]]:
    order = [(phase, role) for phase in (*PHASES, UNKNOWN) for role in ROLES]
    return [key for key in order if key in parts]


def page(found: Phases, *, each: bool = False) -> str:
    """Return the tables as text; times are in milliseconds per step."""
    steps = ", ".join(map(str, found.steps))
    lines = [
        f"generation {found.generation}, step {steps}: milliseconds per step, mean of "
        f"{len(found.devices)} devices",
        "",
        *_phase_table(found.mean),
        "",
        "Exposed, by device:",
        "",
        *_device_table(found.devices),
    ]
    if each:
        for device in found.devices:
            title = f"device {device.device}, rank {device.rank} on {device.host}"
            lines += ["", f"{title}, stage {device.stage}:", ""]
            lines += _phase_table(device.parts)
    unknown: collections.Counter[str] = collections.Counter()
    for device in found.devices:
        unknown.update(device.unknown)
    if unknown:
        named = ", ".join(name for name, _ in unknown.most_common(5))
        lines += ["", f"Instructions whose phase is unknown: {named}"]
    return "".join(f"{output.printable(line)}\n" for line in lines)


def _phase_table(parts: Parts) -> list[str]:
    rows: list[Sequence[str]] = [
        ("phase", "role", "total", "exposed", "overlapped", "", "events")
    ]
    for key in _in_order(parts):
        one = parts[key]
        share = f"{one.overlapped_s / one.total_s:.0%}" if one.total_s else "-"
        times = (one.total_s, one.exposed_s, one.overlapped_s)
        rows.append((*key, *map(_ms, times), share, str(one.events)))
    return output.aligned(rows, left=2)


def _device_table(devices: Iterable[DevicePhases]) -> list[str]:
    rows: list[Sequence[str]] = [
        ("device", "rank", "host", "stage", "step", *ROLES, "idle", UNKNOWN)
    ]
    for device in devices:
        exposed: dict[str, float] = dict.fromkeys((*ROLES, UNKNOWN), 0.0)
        for (phase, role), one in device.parts.items():
            exposed[UNKNOWN if phase == UNKNOWN else role] += one.exposed_s
        who = (device.device, device.rank, device.host, device.stage)
        times = (device.span_s, *(exposed[role] for role in ROLES), device.idle_s)
        rows.append((*map(str, who), *map(_ms, (*times, exposed[UNKNOWN]))))
    return output.aligned(rows, left=0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
