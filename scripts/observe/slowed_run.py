"""Train on four processes, and slow one of them in known blocks of steps.

    python -m scripts.observe.slowed_run --work-dir DIR --shape dp4 --seed 0

Input: a shape of the mesh and a seed. Output: the work dir of a short run of the debug
recipe with stamps, with `plan.json`, the delays by rank and step, and
`slept-RANK.jsonl`, their durations. Steps without delays lie between: machines drift,
and these steps are of the same processes.

Each process runs this script with `--rank`: it reads the plan, adds the delays before
the parts of its loop and its step, and runs the trainer.
"""

import argparse
import dataclasses
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mjax import checked_json
from scripts.observe.processes import Process, coordinated
from scripts.observe.processes import run as run_all

Kind = Literal["none", "late host", "every 5th", "slow forward", "garbage", "loader"]
KINDS: tuple[Kind, ...] = (
    "late host",
    "every 5th",
    "slow forward",
    "garbage",
    "loader",
)
"""A sleep in the host before each step; in every fifth one; within the forward pass of
the device (of a pipeline: within a tick); a collection of Python's garbage in some
steps; a sleep before each batch."""
NUM_PROCESSES = 4
BLOCK_STEPS = 10
"""Chosen: a block is shorter than most other activity on a shared machine, which then
affects it and the neighbouring blocks alike.
"""
WARM_UP_STEPS = 10
"""Chosen: one of the first steps took a second longer in a run that tuned this."""
SLEEP_S = (0.5, 0.9)
"""Chosen: four processes on two shared cores disturb each other by a tenth of a second
a step; a sleep takes no core from the others."""
EVERY, RARE = 5, 3.0
"""A sleep in every fifth step is three times as long."""
GARBAGE_OBJECTS = (20_000_000, 30_000_000)
GARBAGE_STEPS = (3, 4, 7)
"""Steps of a block, from 0: a minority of steps, at uneven distances."""
LIMIT_S = 200.0
"""Time limit of a run. Chosen: a run takes about 90 s on two cores."""

SHAPES: dict[str, list[str]] = {
    "dp4": [],
    "dp4 zero 0": ["--zero", "0"],
    "dp2 tp2": ["--mesh.tp", "2"],
    "pp2 dp2": ["--mesh.pp", "2", "--batch.microbatches", "2", "--model.layers", "4"],
}
FORWARD_TAG, TICK_TAG = 1, 3
"""Tags of stamps, see `mjax.step.stamps`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Steps with the same delay."""

    first: int
    """First step, from 1."""
    last: int
    kind: Kind
    rank: int
    """The slowed rank."""
    sleep_s: float
    """Seconds of each delay; for garbage, the number of objects / 10^7."""


def make_plan(seed: int, kinds: Sequence[Kind] = KINDS) -> list[Block]:
    """Draw the slowed rank of each block; every other block has none."""
    draw = random.Random(seed)
    order: list[Kind] = [*kinds]
    draw.shuffle(order)
    blocks: list[Block] = []
    at = WARM_UP_STEPS + 1
    for number in range(2 * len(order) + 1):
        kind: Kind = order[number // 2] if number % 2 else "none"
        sleep_s = draw.uniform(*SLEEP_S) * (RARE if kind == "every 5th" else 1.0)
        if kind == "garbage":
            sleep_s = draw.uniform(*GARBAGE_OBJECTS) / 1e7
        rank = draw.randrange(NUM_PROCESSES)
        last = at + BLOCK_STEPS - 1
        blocks.append(Block(first=at, last=last, kind=kind, rank=rank, sleep_s=sleep_s))
        at = last + 1
    return blocks


class _Delays:
    """The delay of this process in each of its steps."""

    def __init__(self, plan: Sequence[Block], rank: int, log: Path) -> None:
        self._blocks = [block for block in plan if block.rank == rank]
        self._log = log
        self._begun = 0
        self._heap: list[list[int]] = []
        self.is_collected = False

    def of(self, step: int) -> Block | None:
        found = [each for each in self._blocks if each.first <= step <= each.last]
        return found[0] if found else None

    def sleep(self, step: int, kind: Kind, sleep_s: float) -> None:
        begun_s = time.monotonic()
        time.sleep(sleep_s)
        self._write(step, kind, time.monotonic() - begun_s)

    def before_batch(self, step: int) -> None:
        block = self.of(step)
        if block is not None and block.kind == "loader":
            self.sleep(step, block.kind, block.sleep_s)

    def before_dispatch(self, step: int) -> None:
        block = self.of(step)
        kind = None if block is None else block.kind
        if kind != "garbage":
            self._heap = []
        if block is None:
            return
        if kind == "late host" or (
            kind == "every 5th" and (step - block.first) % EVERY == 3
        ):
            self.sleep(step, block.kind, block.sleep_s)
        elif kind == "garbage":
            self._collect(step, block)

    def _collect(self, step: int, block: Block) -> None:
        """Traverse many objects, as Python's collector does after allocations."""
        if not self._heap:
            self._heap = [[] for _ in range(int(block.sleep_s * 1e7))]
        if step - block.first in GARBAGE_STEPS:
            begun_s = time.monotonic()
            gc.collect()
            self._write(step, block.kind, time.monotonic() - begun_s)

    def on_stamp(self, tag: int) -> None:
        """Sleep before a device reports the end of its forward pass, or of a tick."""
        if tag == 0:
            self._begun += 1
            self._num_ticks = 0
        self._num_ticks += tag == TICK_TAG
        block = self.of(self._begun)
        if block is None or block.kind != "slow forward":
            return
        # The first tick's stamp ends no tick.
        if tag == FORWARD_TAG or (tag == TICK_TAG and self._num_ticks == 3):
            self.sleep(self._begun, block.kind, block.sleep_s)

    def _write(self, step: int, kind: Kind, seconds: float) -> None:
        with self._log.open("a") as file:
            row = {"step": step, "kind": kind, "seconds": seconds}
            file.write(json.dumps(row) + "\n")


class _Program:
    """A program whose steps begin late."""

    def __init__(self, program: Any, delays: _Delays) -> None:
        self._program, self._delays, self._step = program, delays, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def train_step(self, *args: Any) -> Any:
        self._step += 1
        self._delays.before_dispatch(self._step)
        return self._program.train_step(*args)


class _Batches:
    """Batches that come late."""

    def __init__(self, batches: Any, delays: _Delays) -> None:
        self._batches, self._delays, self._step = batches, delays, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        self._step += 1
        self._delays.before_batch(self._step)
        return next(self._batches)


def _train(work_dir: Path, rank: int, flags: Sequence[str]) -> int:
    """Run the trainer in this process, with its delays."""
    from mjax import train
    from mjax.kernels.stamp import callback
    from mjax.run.loop import Loop

    plan = checked_json.read((work_dir / "plan.json").read_text(), list[Block])
    delays = _Delays(plan, rank, work_dir / f"slept-{rank}.jsonl")
    begin, append = Loop.__post_init__, callback._append

    def slow(self: Loop) -> None:
        begin(self)
        self.program = _Program(self.program, delays)  # pyright: ignore[reportAttributeAccessIssue]
        self.batches = _Batches(self.batches, delays)  # pyright: ignore[reportAttributeAccessIssue]

    def slow_stamp(log: Any, tag: Any, *first: Any) -> Any:
        delays.on_stamp(int(tag[0]))
        return append(log, tag, *first)

    Loop.__post_init__ = slow
    callback._append = slow_stamp
    return train.main(flags)


def run(work_dir: Path, shape: str, plan: Sequence[Block]) -> None:
    """Train four processes with one device each.

    Raises:
      RuntimeError: one of them failed; the message has its errors.
    """
    work_dir.mkdir(parents=True)
    text = json.dumps([dataclasses.asdict(block) for block in plan])
    (work_dir / "plan.json").write_text(text)
    flags = ["--recipe", "debug", "--data.path", "synthetic", "--simulate-devices", "1"]
    flags += ["--steps", str(plan[-1].last), "--eval.every", "100000"]
    flags += ["--ckpt.every", "100000"]
    flags += ["--observe.stamps", "True", "--work-dir", str(work_dir / "run")]
    flags += [*coordinated(NUM_PROCESSES), *SHAPES[shape]]
    module = ("scripts.observe.slowed_run", "--work-dir", str(work_dir), "--rank")
    run_all(
        [
            Process(
                log=work_dir / f"{rank}.log",
                module=(*module, str(rank), "--"),
                flags=(*flags, "--distributed.process-id", str(rank)),
            )
            for rank in range(NUM_PROCESSES)
        ],
        LIMIT_S,
    )


def main() -> int:
    """Run one shape with one seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--shape", choices=[*SHAPES], default="dp4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--rank", type=int, help="of this process: the trainer's flags follow --"
    )
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    if args.rank is not None:
        return _train(args.work_dir, args.rank, args.flags)
    run(args.work_dir, args.shape, make_plan(args.seed, args.kinds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
