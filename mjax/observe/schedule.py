"""The pipeline schedule that a run recorded: the work of each stage in each tick.

Input: the tables that the run's step follows. Output: `schedules/0001.json` in the
work dir, one file for each start of a run with a pipeline; and, for readers, the slots
of a stage, the receiver of each slot, and the number of idle slots.

A slot is idle if its stage has no work in it but another stage does. A slot that no
stage uses does not exist in the tick and takes no time.

Source of the bubble's formula: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from mjax import checked_json

FOLDER = "schedules"
FORMAT, VERSION = "mjax-schedule", 1
type Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Work(NamedTuple):
    """The work in a slot."""

    chunk: int
    """Virtual stage within the stage, from 0."""
    microbatch: int


class Slot(NamedTuple):
    """Position of a slot."""

    direction: Direction
    tick: int
    stage: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Contents of the file. Tables have a row for each tick, with an entry for each
    stage: its work, or none."""

    format: str = FORMAT
    version: int = VERSION
    run: str
    generation: int
    """Number of the start of the run."""
    name: str
    idle: Literal["compute", "skip"]
    """Whether a stage computes or skips an idle slot."""
    num_stages: int
    num_chunks: int
    """Number of virtual stages of each stage."""
    num_microbatches: int
    forward: list[list[list[int] | None]]
    backward: list[list[list[int] | None]]

    @property
    def num_ticks(self) -> int:
        """Number of ticks of a step."""
        return len(self.forward)

    def work(self, slot: Slot) -> Work | None:
        """Return the work in a slot; None if it is idle."""
        found = getattr(self, slot.direction)[slot.tick][slot.stage]
        return None if found is None else Work(*found)

    def exists(self, direction: Direction, tick: int) -> bool:
        """Return whether at least one stage uses the slot of a tick and direction."""
        return any(entry is not None for entry in getattr(self, direction)[tick])

    def slots(self, stage: int) -> Iterator[Slot]:
        """Yield the slots of a stage, including idle ones."""
        for tick in range(self.num_ticks):
            for direction in DIRECTIONS:
                if self.exists(direction, tick):
                    yield Slot(direction, tick, stage)

    def num_idle(self, stage: int, direction: Direction) -> int:
        """Count the idle slots of a stage."""
        return sum(
            slot.direction == direction and self.work(slot) is None
            for slot in self.slots(stage)
        )

    def receiver(self, slot: Slot) -> Slot | None:
        """Return the slot on another stage that receives the output of a slot.

        None: the slot sends nothing, because it is idle, or because its virtual stage
        is the model's last one in this direction.
        """
        own = self.work(slot)
        if own is None or self.num_stages == 1:
            return None
        step = 1 if slot.direction == "forward" else -1
        number = own.chunk * self.num_stages + slot.stage + step
        if not 0 <= number < self.num_chunks * self.num_stages:
            return None
        chunk, stage = divmod(number, self.num_stages)
        wanted = Work(chunk, own.microbatch)
        for tick in range(slot.tick + 1, self.num_ticks):
            there = Slot(slot.direction, tick, stage)
            if self.work(there) == wanted:
                return there
        return None

    @property
    def bubble(self) -> float:
        """Ratio of idle slots to used slots by the formula: (P - 1) / (v M)."""
        return (self.num_stages - 1) / (self.num_chunks * self.num_microbatches)


def label(slot: Slot, work: Work | None) -> str:
    """Return a name such as F2b: forward, microbatch 2, virtual stage b."""
    letter = slot.direction[0].upper()
    return (
        f"{letter} idle"
        if work is None
        else f"{letter}{work.microbatch}" + (_letter(work.chunk))
    )


def _letter(chunk: int) -> str:
    """Return the name of a virtual stage: a to z, then a number."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def path_of(work_dir: Path, generation: int) -> Path:
    """Return the path of the record of a start."""
    return work_dir / FOLDER / f"{generation:04d}.json"


def to_json(schedule: Schedule) -> str:
    """Encode the record as a line of JSON."""
    return json.dumps(dataclasses.asdict(schedule)) + "\n"


def read(work_dir: Path, generation: int) -> Schedule | None:
    """Read the record of a start; None if there is none.

    Raises:
      ValueError: it cannot be read, has another version, or is not a schedule.
    """
    path = path_of(work_dir, generation)
    try:
        found = checked_json.read(path.read_bytes(), Schedule)
        _check(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read {path}: {error}; move it away to see the run without slots"
        ) from error
    return found


def _check(found: Schedule) -> None:
    """Refuse a schedule unless each stage runs each work once, forward first."""
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ValueError(
            f"format {found.format!r} version {found.version} instead of {FORMAT!r} "
            f"version {VERSION}"
        )
    if min(found.num_stages, found.num_chunks, found.num_microbatches) < 1:
        raise ValueError("a count of stages, chunks or microbatches is below 1")
    tables = found.forward, found.backward
    if len(found.forward) != len(found.backward):
        raise ValueError("its tables have different numbers of ticks")
    if any(len(row) != found.num_stages for table in tables for row in table):
        raise ValueError(f"a tick does not have {found.num_stages} stages")
    entries = [e for table in tables for row in table for e in row if e is not None]
    if any(len(entry) != 2 for entry in entries):
        raise ValueError("an entry is not [chunk, microbatch]")
    every = {
        (chunk, microbatch)
        for chunk in range(found.num_chunks)
        for microbatch in range(found.num_microbatches)
    }
    for stage in range(found.num_stages):
        ticks = [_ticks(table, stage) for table in tables]
        if any(len(one) != len(every) or set(one) != every for one in ticks):
            raise ValueError(f"stage {stage} does not run each microbatch once")
        if any(ticks[0][work] > ticks[1][work] for work in every):
            raise ValueError(
                f"stage {stage} has a backward slot before its forward slot"
            )


def _ticks(
    table: Sequence[Sequence[Sequence[int] | None]], stage: int
) -> dict[tuple[int, ...], int]:
    """Return the tick of each work of a stage; empty if a work occurs twice."""
    found: dict[tuple[int, ...], int] = {}
    for tick, row in enumerate(table):
        entry = row[stage]
        if entry is not None and found.setdefault(tuple(entry), tick) != tick:
            return {}
    return found
