"""Kill a run of four processes at random, a hundred times, and compare its results.

    python -m scripts.faults.chaos --kills 100 --terms 5 --seed 0 --limit-s 3600

Four processes with two simulated devices each train the `debug` recipe with a pipeline
and tensor parallelism. A supervisor in this process starts them and kills one at a
random moment: while they start, restore, take steps or save, or right after a save has
appeared. It kills the others a little later, and starts all again on a new port. Some
get SIGTERM instead of SIGKILL. Each row is compared with the same row of an undisturbed
run. Writes docs/benchmarks/chaos.md, and chaos.jsonl with a line for each start of the
processes; ends with 1 if anything differs.

The log keeps the faults done before --limit-s; --more continues after them.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from mjax.run.metrics import read_computed, without_timing
from scripts.evidence import BENCHMARKS_DIR, commit, read_metrics
from scripts.faults.chaos_log import (
    Fault,
    Generation,
    Settings,
    count_faults,
    read_log,
    write_report,
)
from scripts.faults.chaos_processes import NUM_PROCESSES, SILENCE_LIMIT_S, Group

RUN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--model.rope", "True"),
    *("--simulate-devices", "2", "--mesh.pp", "2", "--mesh.tp", "2"),
    *("--batch.microbatches", "2", "--ckpt.every", "2", "--eval.every", "20"),
)
XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
AIMS = ("start", "restore", "steps", "save", "commit")

Row = dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Usual:
    """Seconds that each phase took so far; a signal is sent within such a time."""

    start_s: float = 20.0
    restore_s: float = 1.0
    step_s: float = 0.3
    save_s: float = 0.3


def main() -> int:
    """Run everything, write page and log, return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="with SIGKILL")
    parser.add_argument("--terms", type=int, default=5, help="with SIGTERM")
    parser.add_argument("--steps", type=int, default=200, help="of a run")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--limit-s", type=float, default=3600, help="then no more")
    parser.add_argument("--more", action="store_true", help="go on with the log")
    parser.add_argument("--page", action="store_true", help="from the log, run nothing")
    parser.add_argument("--log", default=str(BENCHMARKS_DIR / "chaos.jsonl"))
    parser.add_argument("--keep-dir", help="folder to work in, kept; else a temporary")
    args = parser.parse_args()
    if not args.page:
        with contextlib.ExitStack() as stack:
            folder = args.keep_dir or tempfile.mkdtemp()
            if args.keep_dir is None:
                # Not a TemporaryDirectory: a forked process would delete it when it
                # exits.
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            run_all(args, Path(folder))
    settings, generations = read_log(Path(args.log))
    print(write_report(settings, generations, RUN))
    problems = [text for one in generations for text in one.problems]
    is_whole = count_faults(generations, signal.SIGKILL) == settings.kills
    return int(bool(problems) or not is_whole)


def run_all(args: argparse.Namespace, folder: Path) -> None:
    """Run undisturbed, then with all faults; write the log line by line.

    With --more the log is kept, and the faults in it are not repeated.
    """
    # Starts are repeated often, so they must be cheap: LLVM does not optimise, and all
    # programs are in the compilation cache.
    os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    until_s = time.perf_counter() + args.limit_s
    faults = draw_faults(args.kills, args.terms, random.Random(args.seed))
    path, done = Path(args.log), []
    if args.more:
        settings, done = read_log(path)
        asked = Settings(args.kills, args.terms, args.steps, args.seed)
        if settings != asked:
            raise ValueError(f"the log is of {settings}, not of {asked}")
        faults = faults[sum(one.phase != "" for one in done) :]
    else:
        settings = Settings(args.kills, args.terms, args.steps, args.seed)
        path.write_text(json.dumps(dataclasses.asdict(settings)) + "\n")
    supervisor = Supervisor(
        folder, args.steps, first_run=max((one.run + 1 for one in done), default=0)
    )
    supervisor.run_reference()
    with path.open("a") as log:
        for generation in supervisor.run_faults(faults, until_s):
            line = json.dumps(dataclasses.asdict(generation))
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()


def draw_faults(kills: int, terms: int, rng: random.Random) -> list[Fault]:
    """Draw the fault of each generation, in random order."""
    signals = [signal.SIGKILL] * kills + [signal.SIGTERM] * terms
    rng.shuffle(signals)
    return [
        Fault(
            aim=rng.choice(AIMS) if number == signal.SIGKILL else "steps",
            signal=int(number),
            rank=rng.randrange(NUM_PROCESSES),
            count=rng.randint(1, 4),
            share=rng.random(),
            grace_s=rng.choice((0.0, 0.1, 0.5, 2.0)),
        )
        for number in signals
    ]


class Supervisor:
    """Starts the four processes, watches them, and compares what they wrote."""

    def __init__(self, folder: Path, num_steps: int, *, first_run: int) -> None:
        """Set the folder of all runs, which exists and does not contain this run."""
        self._folder = folder
        self._num_steps = num_steps
        self._reference: dict[int, Row] = {}
        self._usual = Usual()
        self._run = first_run
        self._commit = commit()
        self._written: set[int] = set()
        """Steps of the current run that had a row."""

    def run_reference(self) -> None:
        """Run once without a fault."""
        work_dir = self._folder / "reference"
        group = Group(self._flags(work_dir), work_dir)
        codes = group.wait()
        if codes != [0] * NUM_PROCESSES:
            raise RuntimeError(f"the undisturbed run ended with {codes}: {group.log}")
        rows = read_computed(work_dir)
        self._reference = {row["step"]: row for row in rows}
        if [*self._reference] != [*range(1, self._num_steps + 1)]:
            missing = sorted({*range(1, self._num_steps + 1)} - {*self._reference})
            raise RuntimeError(
                f"the undisturbed run has {len(rows)} rows, without those of {missing}:"
                f" {group.text()}"
            )
        self._usual.step_s = statistics.median(row["step_s"] for row in rows)
        print(f"undisturbed: {self._usual}", flush=True)

    def run_faults(self, faults: list[Fault], until_s: float) -> Iterator[Generation]:
        """Cause every fault, then let the last run end; a run that ended starts again.

        Args:
          faults: one fault for each generation.
          until_s: value of `time.perf_counter` after which no fault begins.
        """
        left = [*faults]
        is_over = False
        while not is_over:
            alone = Fault(aim="none", signal=0, rank=0, count=0, share=0.0, grace_s=0.0)
            fault = left[0] if left and time.perf_counter() < until_s else alone
            generation = self._generation(fault)
            yield generation
            if generation.phase:
                left.pop(0)
            if 0 in generation.codes:
                self._run += 1
                self._written.clear()
            is_over = fault is alone
            if generation.problems and not generation.phase:
                return  # another start would fail in the same way

    def _generation(self, fault: Fault) -> Generation:
        """Start the processes, cause the fault, and check the results."""
        started_s = time.perf_counter()
        work_dir = self._folder / f"run-{self._run}"
        store = Store(work_dir / "checkpoints")
        before = store.steps()
        group = Group(self._flags(work_dir), work_dir)
        phase = _strike(group, fault, self._usual)
        codes = group.wait(fault.grace_s if phase and fault.signal == 9 else None)
        self._usual.restore_s = group.restore_s() or self._usual.restore_s
        resumed = group.resumed()
        first, last, recomputed, problems = self._compare(
            work_dir, resumed if group.has_begun() else self._num_steps
        )
        problems += _check(group, fault, phase, codes, before)
        problems += _damaged(store)
        if problems:
            problems.append(f"log: {group.log}")
        return Generation(
            commit=self._commit,
            run=self._run,
            fault=fault,
            phase=phase,
            codes=codes,
            resumed=resumed,
            committed=store.steps(),
            unfinished=store.unfinished(),
            first_row=first,
            last_row=last,
            recomputed=recomputed,
            problems=problems,
            wall_s=round(time.perf_counter() - started_s, 2),
            cpu_s=round(group.cpu_s, 2),
        )

    def _compare(self, work_dir: Path, resumed: int) -> tuple[int, int, int, list[str]]:
        """Compare all rows on disk.

        Args:
          work_dir: work dir of the run.
          resumed: restored step; rows of later steps are of this generation.
        Returns:
          the steps of the first and the last row of this generation (0 if it has none),
          the number of its rows that an earlier generation had written too, and the
          problems found.
        """
        rows = read_metrics(work_dir)
        problems = differences(rows, self._reference)
        steps = [row["step"] for row in rows]
        new = [step for step in steps if step > resumed]
        recomputed = len(self._written.intersection(new))
        self._written.update(new)
        return min(new, default=0), max(new, default=0), recomputed, problems

    def _flags(self, work_dir: Path) -> list[str]:
        steps = ("--steps", str(self._num_steps))
        return [*RUN, *steps, "--work-dir", str(work_dir)]


def differences(rows: list[Row], reference: Mapping[int, Row]) -> list[str]:
    """Return which rows are missing or differ from the undisturbed run.

    SIGTERM interrupts an evaluation, which the resumed run repeats. Until then the last
    row may lack its results.
    """
    found = []
    for row in rows:
        expected = reference.get(row["step"])
        if row is rows[-1] and row["step"] < max(reference) and "eval_loss" not in row:
            expected = {k: v for k, v in (expected or {}).items() if "eval_" not in k}
        if without_timing(row) != expected:
            found.append(f"row {row['step']} differs: {row}")
    steps = [row["step"] for row in rows]
    if steps != [*range(1, len(steps) + 1)]:
        found.append(f"the rows are of the steps {steps}")
    return found


def _strike(group: Group, fault: Fault, usual: Usual) -> str:
    """Wait for the moment and send the signal; return the phase that it hit.

    Returns "" if no signal was sent, because the fault has none or a process had ended.
    """
    if fault.aim == "none":
        return ""
    width_s = {
        "start": usual.start_s,
        "restore": usual.restore_s,
        "steps": 2 * usual.step_s,
        "save": usual.save_s,
        "commit": 0.1,
    }[fault.aim]
    for reached in _moments(group, fault):
        until_s = time.perf_counter() + SILENCE_LIMIT_S
        while not reached():
            if not group.is_whole() or time.perf_counter() > until_s:
                return ""
            time.sleep(0.001)
    if fault.aim == "restore":
        usual.start_s = time.perf_counter() - group.started_s
    time.sleep(fault.share * width_s)
    phase = group.phase()
    if not group.is_whole():
        return ""
    group.kill(fault.rank, fault.signal)
    return phase


def _moments(group: Group, fault: Fault) -> Iterator[Callable[[], bool]]:
    """Yield the conditions to wait for, in order."""
    if fault.aim == "restore":
        yield lambda: "start-up: compile" in group.text()
    if fault.aim in ("steps", "save", "commit"):
        yield lambda: group.new_rows() >= fault.count
    if fault.aim in ("save", "commit"):
        unfinished = fault.aim == "save"
        before = group.new_folders(unfinished=unfinished)
        yield lambda: bool(group.new_folders(unfinished=unfinished) - before)


def _check(
    group: Group, fault: Fault, phase: str, codes: list[int], before: list[int]
) -> list[str]:
    """Return what is wrong with the start and the end of a generation."""
    problems = []
    resumed = group.resumed()
    if resumed >= 0 and resumed != max(before, default=0):
        problems.append(f"resumed at {resumed} although {before} were committed")
    if "damaged" in group.text():
        problems.append("a step was found to be damaged")
    if not phase and codes != [0] * NUM_PROCESSES:
        problems.append(f"ended without a signal with {codes}")
    if phase and fault.signal == signal.SIGTERM and codes != [42] * NUM_PROCESSES:
        problems.append(f"SIGTERM at rank {fault.rank} in {phase}: {codes}")
    return problems


def _damaged(store: Store) -> list[str]:
    """Verify every step in another process: this one forks, so it must have no
    threads."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = [f"{name}: {why}" for name, why in store.quarantined().items()]
        for step in store.steps():
            try:
                SavedStep(store.path(step)).verify()
            except (DamagedError, RuntimeError, ValueError) as error:
                found.append(f"step {step} is not restorable: {error}")
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else ["the verification itself failed"]


if __name__ == "__main__":
    sys.exit(main())
