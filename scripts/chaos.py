"""Kill a run of four processes at random, a hundred times; nothing may differ.

    python -m scripts.chaos --kills 100 --terms 5 --seed 0 --limit-s 3600

Four processes with two simulated devices each train the `debug` recipe with a pipeline
and tensor parallelism. A supervisor in this process starts them, kills one at a moment
that it draws (while they start, restore, take steps, save, or right after a save has
appeared), ends the others a little later, and starts all again on a new port. Some get
SIGTERM instead. Each row that any of them wrote is compared with the row of a run that
was left alone. Writes docs/benchmarks/chaos.md and chaos.jsonl, a line for each time
the processes were started, and ends with 1 if anything differs.

The four are forks of this process, which has imported what they need and touched no
device; from there on each is `python -m mjax.train`.
"""

import argparse
import atexit
import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import re
import runpy
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

# What the processes import, so that a fork has it.
import mjax.ckpt.manager
import mjax.data.loader
import mjax.loop
import mjax.recipes
import mjax.report
import mjax.traced  # noqa: F401
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from scripts.evidence import (
    BENCHMARKS_DIR,
    REPOSITORY,
    Table,
    read_metrics,
    without_timing,
    write_page,
)

NUM_PROCESSES = 4
RUN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--simulate-devices", "2", "--mesh.pp", "2", "--mesh.tp", "2"),
    *("--batch.microbatches", "2", "--ckpt.every", "2", "--eval.every", "20"),
)
XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
AIMS = ("start", "restore", "steps", "save", "commit")
SILENCE_LIMIT_S = 300.0
"""A process group that writes neither text nor a row for so long has failed."""
_PR_SET_PDEATHSIG = 1

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to one generation of processes."""

    aim: str
    """One of AIMS, or "none": it is left alone."""
    signal: int
    rank: int
    count: int
    """Of the rows, or of the folders, that are waited for."""
    share: float
    """Of the usual length of what is aimed at: when it happens, from its begin."""
    grace_s: float
    """How long the other processes live on."""


@dataclasses.dataclass(kw_only=True)
class Usual:
    """How long things took so far: the width of what is aimed at, in seconds."""

    start_s: float = 20.0
    restore_s: float = 1.0
    step_s: float = 0.3
    save_s: float = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One start of the four processes, and how it ended."""

    run: int
    fault: Fault
    phase: str
    """What process 0 was seen to do when the signal was sent; "" without one."""
    codes: list[int]
    """Exit code of each process, -9 for SIGKILL."""
    resumed: int
    """Step that was restored; 0 for a new state, -1 if it did not come so far."""
    committed: list[int]
    """Steps in the store when all processes had ended."""
    unfinished: list[str]
    first_row: int
    last_row: int
    recomputed: int
    """Rows that a generation before had written."""
    problems: list[str]
    wall_s: float
    cpu_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The first line of the log."""

    kills: int
    terms: int
    steps: int
    seed: int
    commit: str


def main() -> int:
    """Run everything, write page and log, return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="with SIGKILL")
    parser.add_argument("--terms", type=int, default=5, help="with SIGTERM")
    parser.add_argument("--steps", type=int, default=200, help="of a run")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--limit-s", type=float, default=3600, help="then no more")
    parser.add_argument("--page", action="store_true", help="from the log, run nothing")
    parser.add_argument("--log", default=str(BENCHMARKS_DIR / "chaos.jsonl"))
    parser.add_argument("--keep-dir", help="folder to work in, kept; else a temporary")
    args = parser.parse_args()
    if not args.page:
        with contextlib.ExitStack() as stack:
            folder = args.keep_dir or stack.enter_context(tempfile.TemporaryDirectory())
            run_all(args, Path(folder))
    settings, generations = read_log(Path(args.log))
    print(write_report(settings, generations))
    problems = [text for one in generations for text in one.problems]
    is_whole = count_faults(generations, signal.SIGKILL) == settings.kills
    return int(bool(problems) or not is_whole)


def run_all(args: argparse.Namespace, folder: Path) -> None:
    """Run undisturbed, then with all faults; write the log line by line."""
    # A start must be cheap to be repeated often: no passes of LLVM, all in the cache.
    os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    until_s = time.perf_counter() + args.limit_s
    supervisor = Supervisor(folder, args.steps)
    supervisor.run_reference()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True)
    settings = Settings(
        kills=args.kills,
        terms=args.terms,
        steps=args.steps,
        seed=args.seed,
        commit=commit.stdout.strip(),
    )
    faults = draw_faults(args.kills, args.terms, random.Random(args.seed))
    with Path(args.log).open("w") as log:
        log.write(json.dumps(dataclasses.asdict(settings)) + "\n")
        for generation in supervisor.run_faults(faults, until_s):
            line = json.dumps(dataclasses.asdict(generation))
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()


def read_log(path: Path) -> tuple[Settings, list[Generation]]:
    """Read what `run_all` has written."""
    first, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return Settings(**json.loads(first)), [
        Generation(**{**record, "fault": Fault(**record["fault"])})
        for record in records
    ]


def draw_faults(kills: int, terms: int, rng: random.Random) -> list[Fault]:
    """Draw what happens to each generation, in a random order."""
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

    def __init__(self, folder: Path, num_steps: int) -> None:
        """Name the folder of all runs; it exists."""
        self._folder = folder
        self._num_steps = num_steps
        self._reference: dict[int, Row] = {}
        self._usual = Usual()
        self._run = 0
        self._written: set[int] = set()
        """Steps of the present run of which there was a row."""

    def run_reference(self) -> None:
        """Run once without a fault."""
        work_dir = self._folder / "reference"
        group = Group(self._flags(work_dir), work_dir)
        codes = group.wait()
        if codes != [0] * NUM_PROCESSES:
            raise RuntimeError(f"the undisturbed run ended with {codes}: {group.log}")
        rows = read_metrics(work_dir)
        self._reference = {row["step"]: without_timing(row) for row in rows}
        assert [*self._reference] == [*range(1, self._num_steps + 1)]
        self._usual.step_s = statistics.median(row["step_s"] for row in rows)
        print(f"undisturbed: {self._usual}", flush=True)

    def run_faults(self, faults: list[Fault], until_s: float) -> Iterator[Generation]:
        """Let every fault happen, then the last run end; one that ended begins anew.

        Args:
          faults: one for each generation.
          until_s: of `time.perf_counter`; no fault is begun after it.
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
                return  # it would only fail again

    def _generation(self, fault: Fault) -> Generation:
        """Start the processes, do what is to be done to them, and look at the rest."""
        started_s = time.perf_counter()
        work_dir = self._folder / f"run-{self._run}"
        store = Store(work_dir / "checkpoints")
        before = store.steps()
        group = Group(self._flags(work_dir), work_dir)
        phase = _strike(group, fault, self._usual)
        codes = group.wait(fault.grace_s if phase and fault.signal == 9 else None)
        self._usual = group.measured(self._usual)
        resumed = group.resumed()
        first, last, recomputed, problems = self._compare(
            work_dir, resumed if group.has_begun() else self._num_steps
        )
        problems += _check(group, fault, phase, codes, before)
        problems += _damaged(store)
        if problems:
            problems.append(f"log: {group.log}")
        return Generation(
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
        """Compare all rows on the disk.

        Args:
          work_dir: of the run.
          resumed: step after which the rows are of this generation.
        Returns:
          the first and the last row of this generation, 0 without one; how many of them
          were there before; what is wrong.
        """
        problems, steps = [], []
        for row in read_metrics(work_dir):
            steps.append(row["step"])
            if without_timing(row) != self._reference[row["step"]]:
                problems.append(f"row {row['step']} differs: {row}")
        if steps != [*range(1, len(steps) + 1)]:
            problems.append(f"rows of the steps {steps}")
        new = [step for step in steps if step > resumed]
        recomputed = len(self._written.intersection(new))
        self._written.update(new)
        return min(new, default=0), max(new, default=0), recomputed, problems

    def _flags(self, work_dir: Path) -> list[str]:
        steps = ("--steps", str(self._num_steps))
        return [*RUN, *steps, "--work-dir", str(work_dir)]


class Group:
    """Four processes of one run."""

    def __init__(self, flags: list[str], work_dir: Path) -> None:
        """Start them.

        Args:
          flags: of the command, without those of the launcher.
          work_dir: of the run; the log of process 0 goes beside it.
        """
        self._store = work_dir / "checkpoints"
        self._rows = work_dir / "metrics.jsonl"
        self.log = work_dir.with_name(f"{work_dir.name}-{time.monotonic_ns()}.log")
        self._known = self._folders()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        flags = [
            *(*flags, "--distributed.coordinator", f"127.0.0.1:{port}"),
            *("--distributed.num-processes", str(NUM_PROCESSES)),
        ]
        self.started_s = time.perf_counter()
        self._pids = [
            _fork(
                [*flags, "--distributed.process-id", str(rank)],
                self.log if rank == 0 else self.log.with_suffix(f".{rank}"),
            )
            for rank in range(NUM_PROCESSES)
        ]
        self._codes: dict[int, int] = {}
        self.cpu_s = 0.0
        """Of the processes that have ended."""

    def is_whole(self) -> bool:
        """Say whether all processes live."""
        for pid in self._pids:
            if pid not in self._codes:
                found, status, usage = os.wait4(pid, os.WNOHANG)
                if found:
                    self.cpu_s += usage.ru_utime + usage.ru_stime
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
        return not self._codes

    def kill(self, rank: int, number: int) -> None:
        """Send a signal to one process."""
        os.kill(self._pids[rank], number)

    def wait(self, grace_s: float | None = None) -> list[int]:
        """Wait until all have ended, and end those that do not; return the exit codes.

        Args:
          grace_s: after which they are killed; None: a minute after the end of one,
            or after a long silence.
        """
        until_s = None if grace_s is None else time.perf_counter() + grace_s
        heard_s, heard = time.perf_counter(), -1
        while len(self._codes) < NUM_PROCESSES:
            now_s = time.perf_counter()
            if not self.is_whole() and until_s is None:
                until_s = now_s + 60
            if self._heard() != heard:
                heard_s, heard = now_s, self._heard()
            if (until_s and now_s > until_s) or now_s > heard_s + SILENCE_LIMIT_S:
                for pid in self._pids:
                    if pid not in self._codes:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        return [self._codes[pid] for pid in self._pids]

    def text(self) -> str:
        """Return what process 0 has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def resumed(self) -> int:
        """Return the step from which it went on, 0 for a new state, -1 if not yet."""
        found = re.search(r"resuming after step (\d+)", self.text())
        if found:
            return int(found[1])
        return 0 if self.has_begun() else -1

    def has_begun(self) -> bool:
        """Say whether the state is there, and rows of steps to come are dropped."""
        return "MFU" in self.text()

    def new_rows(self) -> int:
        """Return how many rows this generation has written."""
        if not self.has_begun() or not self._rows.exists():
            return 0
        return self._rows.read_bytes().count(b"\n") - self.resumed()

    def new_folders(self, *, unfinished: bool) -> set[str]:
        """Return the folders that appeared in the store since the start."""
        fresh = self._folders() - self._known
        return {name for name in fresh if (".unfinished-" in name) == unfinished}

    def phase(self) -> str:
        """Say what process 0 is doing, by what can be seen of it."""
        text = self.text()
        if "start-up: compile" not in text:
            return "start"
        if not self.has_begun():
            return "restore"
        if not self.new_rows():
            return "first step"
        newest = max((int(n) for n in self._folders() if n.isdigit()), default=0)
        writing = [
            int(name.partition(".")[0]) for name in self.new_folders(unfinished=True)
        ]
        if any(step > newest for step in writing):
            return "save"
        return "removal of an old step" if writing else "steps"

    def measured(self, before: Usual) -> Usual:
        """Return how long start and restoring took, where it came so far."""
        found = re.search(r"restored in ([0-9.]+) s", self.text())
        if found is None:
            return before
        return dataclasses.replace(before, restore_s=float(found[1]))

    def _heard(self) -> int:
        size = self._rows.stat().st_size if self._rows.exists() else 0
        return len(self.text()) + size

    def _folders(self) -> set[str]:
        return set(os.listdir(self._store)) if self._store.exists() else set()


def _fork(flags: list[str], log: Path) -> int:
    """Start `python -m mjax.train` in a fork of this process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(REPOSITORY)
        sys.argv = ["mjax.train", *flags]
        runpy.run_module("mjax.train", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as an interpreter that ends: jax says good-bye there
        sys.stdout.flush()
        os._exit(code)


def _strike(group: Group, fault: Fault, usual: Usual) -> str:
    """Wait for the moment and send the signal; return the phase that it hit.

    Returns "" where no signal was sent: none was wanted, or a process had ended.
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
    """Yield what is to be waited for, one after the other."""
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
    """Say what is wrong with the way a generation began and ended."""
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
    """Verify every step in another process: this one must stay free of threads."""
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


# --------------------------------------------------------------------------- the report


def count_faults(generations: list[Generation], number: int) -> int:
    """Count the generations that got a signal."""
    return sum(one.phase != "" and one.fault.signal == number for one in generations)


def write_report(settings: Settings, generations: list[Generation]) -> Path:
    """Write the page."""
    command = (
        f"python -m scripts.chaos --kills {settings.kills} --terms {settings.terms} "
        f"--steps {settings.steps} --seed {settings.seed}"
    )
    tables = [
        _outcome(settings, generations),
        _by_phase(generations),
        _terms(generations),
    ]
    return write_page("chaos", "Killed at random", command, tables)


def _outcome(settings: Settings, generations: list[Generation]) -> Table:
    rows_of = collections.Counter[str]()
    for one in generations:
        rows_of["written"] += one.last_row - one.first_row + 1 if one.last_row else 0
        rows_of["again"] += one.recomputed
    problems = [text for one in generations for text in one.problems]
    kills = count_faults(generations, signal.SIGKILL)
    killed = [one for one in generations if one.phase and one.fault.signal == 9]
    wall_s = sum(one.wall_s for one in generations)
    rows = [
        ["SIGKILL sent", str(kills)],
        ["starts of the four processes", str(len(generations))],
        ["runs that came to their end", str(sum(0 in g.codes for g in generations))],
        ["starts that restored a step", str(sum(g.resumed > 0 for g in generations))],
        ["rows written and compared", str(rows_of["written"])],
        ["of these steps computed again", str(rows_of["again"])],
        ["most steps lost by one kill", str(_most_lost(generations))],
        ["kills that left an unfinished folder", str(_num_unfinished(killed))],
        ["states that could not be restored, rows that differ", str(len(problems))],
        ["wall time, CPU time", f"{wall_s / 60:.0f} min, {_cpu_s(generations):.0f} s"],
    ]
    return Table(
        title="What was done, and what was found",
        text=(
            f"On commit {settings.commit}, 4 processes with 2 simulated devices each "
            f"on 2 cores: `{' '.join(RUN)} --steps {settings.steps}` (pp 2 x dp 2 x tp "
            f"2, ZeRO 2), `XLA_FLAGS={' '.join(XLA_FLAGS)}`. A signal goes to one "
            "process, drawn; the others are killed 0, 0.1, 0.5 or 2 s later (drawn), "
            "and all are started again on a new port. After each fault every committed "
            "step is read and compared with its checksums, and every row of "
            "metrics.jsonl, those that will be dropped and computed again included, is "
            "compared with that of a run that was left alone: all fields but the "
            "timing, exactly. Each start must resume at the newest committed step. "
            "Each start is a line of [chaos.jsonl](chaos.jsonl). Other programs shared "
            "the cores: times say nothing."
        ),
        header=("", "found"),
        rows=[*rows, *([[text, "**PROBLEM**"] for text in problems])],
    )


def _cpu_s(generations: list[Generation]) -> float:
    return sum(one.cpu_s for one in generations)


def _most_lost(generations: list[Generation]) -> int:
    """Return the most rows that lay after the newest committed step."""
    lost = [
        one.last_row - max(one.committed, default=0)
        for one in generations
        if one.phase and one.fault.signal == signal.SIGKILL and one.last_row
    ]
    return max(0, *lost) if lost else 0


def _num_unfinished(killed: list[Generation]) -> int:
    return sum(bool(one.unfinished) for one in killed)


def _by_phase(generations: list[Generation]) -> Table:
    hits = collections.Counter(
        (one.phase, one.fault.rank)
        for one in generations
        if one.phase and one.fault.signal == signal.SIGKILL
    )
    phases = sorted({phase for phase, _ in hits})
    ranks = range(NUM_PROCESSES)
    return Table(
        title="SIGKILL, by phase and process",
        text=(
            "What process 0 was doing at that moment, by what it had printed and "
            "which folders were there. Aimed at with equal chances: start, restoring, "
            "steps, a folder that is being written, and the first 0.1 s after a step "
            "has appeared."
        ),
        header=("phase", *(f"process {rank}" for rank in ranks), "in all"),
        rows=[
            [
                phase,
                *(str(hits[phase, rank]) for rank in ranks),
                str(sum(hits[phase, rank] for rank in ranks)),
            ]
            for phase in phases
        ],
    )


def _terms(generations: list[Generation]) -> Table:
    rows = []
    for one, after in zip(generations, [*generations[1:], None], strict=True):
        if one.phase and one.fault.signal == signal.SIGTERM:
            saved = max(one.committed, default=0)
            rows.append(
                [
                    *(str(one.fault.rank), one.phase, str(one.codes)),
                    *(str(one.last_row), str(saved)),
                    str(after.recomputed if after else 0),
                ]
            )
    return Table(
        title="SIGTERM to one process",
        text="All four save the same step and end with 42; nothing is computed again.",
        header=(
            *("process", "phase", "exit codes", "last row", "saved step"),
            "steps computed again after it",
        ),
        rows=rows,
    )


if __name__ == "__main__":
    sys.exit(main())
