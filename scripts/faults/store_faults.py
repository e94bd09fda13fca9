"""Make the store of a run full, read-only, or slow; the run must continue.

    python -m scripts.faults.store_faults

Runs the `debug` recipe as a command, with its checkpoints on a small tmpfs (mounting it
needs root), and changes that tmpfs during the run. Writes
docs/benchmarks/store_faults.md and ends with 1 if a run stopped, a saved step was lost,
or an unfinished folder was left.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mjax import train
from mjax.ckpt import arrays, orbax_save
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from scripts.evidence import REPOSITORY, Table, commit, read_metrics, write_page
from scripts.faults.checkpoint_damage import flip
from scripts.faults.small_disks import fill, remount, tmpfs

FAILED, PREEMPTED, GAVE_UP = 1, 42, 93
RUN = (
    *("--recipe", "debug", "--simulate-devices", "2", "--model.layers", "2"),
    *("--model.window", "16", "--log.every", "50", "--eval.every", "100000"),
    *("--model.rope", "True"),
)
ENDLESS = ("--steps", "100000")
EVERY = 10
READ_ONLY_S, SLOW_S = 30.0, 5.0
LIMIT_S = 300.0
"""Time limit of every wait."""
_FILES_OF_A_PART = 3
"""An index and two data files, as TensorStore makes of a part of this size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one case."""

    name: str
    lasted_s: float
    before_s: float
    """Median seconds of a step before the fault."""
    during: list[float]
    """Seconds of the steps during the fault."""
    at_begin: list[int]
    """Steps in the store when the fault began."""
    saved: list[int]
    """Steps in the store at the end."""
    damaged: list[str]
    unfinished: list[str]
    code: int
    expected_code: int
    said: list[str]
    problems: list[str]

    @property
    def is_right(self) -> bool:
        """Whether nothing was lost and the run ended as it should."""
        return not (self.damaged or self.unfinished or self.problems) and (
            self.code == self.expected_code
        )


class Run:
    """A training command that runs in a child process."""

    def __init__(self, folder: Path, store: Path, *flags: str, slow: bool = False):
        """Start it.

        Args:
          folder: work dir of the run; the log is written next to it.
          store: folder of the checkpoints.
          flags: flags besides RUN.
          slow: whether writing each file of a checkpoint takes SLOW_S.
        """
        self.work_dir, self.store = folder, Store(store)
        self._log = folder.with_suffix(".log")
        command = ["-c", "import scripts.faults.store_faults as s; s.train_slowly()"]
        flags = (*RUN, *flags, "--ckpt.every", str(EVERY), "--ckpt.dir", str(store))
        self._process = subprocess.Popen(
            [
                *(sys.executable, *(command if slow else ["-m", "mjax.train"])),
                *(*flags, "--work-dir", str(folder)),
            ],
            cwd=REPOSITORY,
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def text(self) -> str:
        """Return the output of the run."""
        return self._log.read_text()

    def num_rows(self) -> int:
        """Count the rows that the run has written."""
        path = self.work_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds.

        Raises:
          RuntimeError: the run has ended, or the condition did not hold in time.
        """
        until_s = time.perf_counter() + LIMIT_S
        while not happened():
            if self._process.poll() is not None or time.perf_counter() > until_s:
                raise RuntimeError(f"waited for {what} in vain:\n{self.text()[-3000:]}")
            time.sleep(0.02)

    def until_saved(self, number: int) -> None:
        """Wait until the store has a number of steps."""
        self.until(lambda: len(self.store.steps()) >= number, f"{number} steps")

    def until_said(self, pattern: str, number: int = 1) -> None:
        """Wait until the run has printed a number of lines that match the pattern."""
        self.until(
            lambda: len(re.findall(pattern, self.text())) >= number,
            f"{number} times {pattern!r}",
        )

    def stop(self) -> int:
        """Ask the run to stop; return the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        try:
            return self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        """Kill the run if it has not ended."""
        self._process.kill()
        self._process.wait()


@dataclasses.dataclass
class Watch:
    """Records how a run continued during a fault."""

    run: Run
    damaged_step: int | None = None
    """Step that this script damaged, which does not count as lost."""

    def __post_init__(self) -> None:
        steps = self.run.store.steps()
        self.steps = [step for step in steps if step != self.damaged_step]
        self._first = self.run.num_rows()
        self._started_s = time.perf_counter()

    def result(
        self, name: str, code: int, expected: int = PREEMPTED, *, problems: list[str]
    ) -> Result:
        """Inspect the run after its end; the fault lasted until `over`."""
        rows = read_metrics(self.run.work_dir)
        store = self.run.store
        removed = re.findall(r"; removed ([\d, ]+)", self.run.text())
        known = {int(number) for text in removed for number in text.split(", ")}
        lost = {*self.steps} - {*store.steps()} - known
        return Result(
            name=name,
            lasted_s=self._lasted_s,
            before_s=statistics.median(r["step_s"] for r in rows[1 : self._first]),
            during=[row["step_s"] for row in rows[self._first : self._last]],
            at_begin=self.steps,
            saved=store.steps(),
            damaged=[
                *_damaged(store, self.damaged_step),
                *(f"step {step} is gone" for step in lost),
            ],
            unfinished=store.unfinished(),
            code=code,
            expected_code=expected,
            said=_warnings(self.run.text()),
            problems=problems,
        )

    def over(self) -> None:
        """Record that the fault is over."""
        self._last = self.run.num_rows()
        self._lasted_s = time.perf_counter() - self._started_s


def main() -> int:
    """Run all cases, write the page, return 1 if one went wrong."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    cases: list[Callable[[Path, Path], Result]] = [
        full_before,
        full_in_between,
        read_only,
        slow,
        full_work_dir,
        never_again,
        damaged_and_read_only,
    ]
    results, at = [], commit()
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            with tmpfs(store, 16):
                results.append(case(Path(folder), store))
        print(results[-1], flush=True)
    print(write_page("store_faults", "Stores that fail", COMMAND, tables(results, at)))
    return int(not all(result.is_right for result in results))


COMMAND = "python -m scripts.faults.store_faults"


# --------------------------------------------------------------------------- the cases


@contextlib.contextmanager
def running(*args: Any, **kwargs: Any) -> Iterator[Run]:
    """Start a run; kill it at the end of the context if it has not ended."""
    run = Run(*args, **kwargs)
    try:
        yield run
    finally:
        run.kill()


def full_before(folder: Path, store: Path) -> Result:
    """Leave less space than a checkpoint needs; free space after the second attempt."""
    with running(folder / "run", store, *ENDLESS) as run:
        run.until_saved(2)
        filler = fill(store, 1_000_000)
        watch = Watch(run)
        run.until_said(r"warning: checkpoint .*no space", 3)
        watch.over()
        filler.unlink()
        number = run.text().count(" saved: ")
        run.until_said(" saved: ", number + 2)
        return watch.result("full: no space is left", run.stop(), problems=[])


def full_in_between(folder: Path, store: Path) -> Result:
    """Leave just the space that a save checks for, which is not quite enough."""
    with running(folder / "run", store, *ENDLESS, "--ckpt.keep", "2") as run:
        run.until_saved(2)
        num_bytes = run.store.manifest(run.store.steps()[-1]).num_bytes
        run.until_said("; removed ", 2)  # the store no longer grows
        filler = fill(store, int(1.02 * num_bytes) + 8192)
        watch = Watch(run)
        run.until_said(r"warning: checkpoint .*No space left on device", 3)
        watch.over()
        filler.unlink()
        number = run.text().count(" saved: ")
        run.until_said(" saved: ", number + 2)
        return watch.result("full: space ends during a save", run.stop(), problems=[])


def read_only(folder: Path, store: Path) -> Result:
    """Turn the store read-only for a while."""
    with running(folder / "run", store, *ENDLESS, "--ckpt.max-unsaved", "90000") as run:
        run.until_saved(2)
        remount(store, "ro")
        watch = Watch(run)
        time.sleep(READ_ONLY_S)
        watch.over()
        remount(store, "rw")
        number = run.text().count(" saved: ")
        run.until_said(" saved: ", number + 2)
        return watch.result(
            f"read-only for {READ_ONLY_S:.0f} s", run.stop(), problems=[]
        )


def slow(folder: Path, store: Path) -> Result:
    """Make every file of a checkpoint take SLOW_S."""
    with running(folder / "run", store, *ENDLESS, slow=True) as run:
        run.until(lambda: run.num_rows() >= EVERY, "steps")
        watch = Watch(run)
        run.until_saved(2)
        watch.over()
        code = run.stop()
        problems = []
        if "the previous checkpoint is still being written" not in run.text():
            problems.append("nobody said that a step is not saved")
        return watch.result(f"{SLOW_S:.0f} s a file", code, problems=problems)


def train_slowly() -> None:
    """Train with the flags of this process; every file of a checkpoint takes SLOW_S."""

    def slowed(function: Callable[..., Any], num_files: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(SLOW_S * num_files)
            return function(*args, **kwargs)

        return call

    orbax_save.write_file = slowed(orbax_save.write_file, 1)
    arrays.write_part = slowed(arrays.write_part, _FILES_OF_A_PART)
    arrays.merge_parts = slowed(arrays.merge_parts, _FILES_OF_A_PART)
    sys.exit(train.main(sys.argv[1:]))


def full_work_dir(folder: Path, store: Path) -> Result:
    """Fill the work dir, which is on the small tmpfs here; the checkpoints are not."""
    steps, other = 400, folder / "checkpoints"
    with running(store / "run", other, "--steps", str(steps)) as run:
        run.until_saved(2)
        fill(store, 0)
        watch = Watch(run)
        code = run.wait()
        watch.over()
        problems = []
        if run.store.steps()[-1:] != [steps]:
            problems.append(f"the last step, {steps}, was not saved")
        # Its rows could not be written, so the run must end with a failure.
        return watch.result("work dir full to the end", code, FAILED, problems=problems)


def never_again(folder: Path, store: Path) -> Result:
    """Turn the store read-only until the end of the run."""
    with running(folder / "run", store, *ENDLESS, "--ckpt.max-unsaved", "60") as run:
        run.until_saved(2)
        remount(store, "ro")
        watch = Watch(run)
        code = run.wait()
        watch.over()
        remount(store, "rw")
        return watch.result(
            "read-only for good, `--ckpt.max-unsaved 60`", code, GAVE_UP, problems=[]
        )


def damaged_and_read_only(folder: Path, store: Path) -> Result:
    """Damage the newest step, and restart while the store cannot be changed.

    No start can own a store that it cannot write, so that one must be refused. The next
    one finds the store writable.
    """
    with running(folder / "run", store, *ENDLESS) as run:
        run.until_saved(2)
        run.stop()
        num_rows = run.num_rows()
        [older, newest] = run.store.steps()[-2:]
    data = max((store / str(newest)).rglob("d/*"), key=lambda path: path.stat().st_size)
    flip(data, 4 * data.stat().st_size)
    remount(store, "ro")
    problems = []
    with running(folder / "run", store, *ENDLESS) as run:
        watch = Watch(run, newest)
        code = run.wait()
        watch.over()
        refusal = _warnings(run.text())
        if code != FAILED or f"cannot write to {store}" not in run.text():
            problems.append(f"the start was not refused, it ended with {code}")
        if run.num_rows() != num_rows:
            problems.append(
                f"the refused start left {run.num_rows()} of {num_rows} rows"
            )
    remount(store, "rw")
    with running(folder / "run", store, *ENDLESS) as run:
        watch.run = run
        run.until_said(" saved: ", 2)
        code = run.stop()
        if f"resuming after step {older}, " not in run.text():
            problems.append(f"did not resume at {older}")
        if "quarantined" not in (run.work_dir / "checkpoints.jsonl").read_text():
            problems.append("the journal does not have it")
        name = "newest step damaged, store read-only at the start"
        result = watch.result(name, code, problems=problems)
        return dataclasses.replace(result, said=[*refusal, *result.said])


# --------------------------------------------------------------------------- the report


def tables(results: list[Result], at: str) -> list[Table]:
    """Return the tables of results and of printed lines; `at` is the commit."""
    rows = []
    for one in results:
        during = one.during
        count, pace, longest = str(len(during)), "unknown", "unknown"
        if len(during) > 1 and one.code != FAILED:
            pace = f"{1e3 * statistics.median(during):.0f} ms"
            longest = f"{1e3 * max(during):.0f} ms"
        if one.code == FAILED:  # the run whose rows could not be written
            count = f"{one.saved[-1] - one.at_begin[-1]}, by the steps saved"
        wrong = [*one.damaged, *one.unfinished, *one.problems]
        rows.append(
            [
                *(one.name, f"{one.lasted_s:.0f} s", f"{1e3 * one.before_s:.0f} ms"),
                *(count, pace, longest),
                *(_list(one.at_begin), _list(one.saved)),
                *(str(one.code), "; ".join(wrong) or "nothing"),
            ]
        )
    load = os.getloadavg()[0]
    found = Table(
        title="What happened to the run",
        text=(
            f"On commit {at}, load average {load:.0f} at the end: `{' '.join(RUN)} "
            f"--ckpt.every {EVERY} --ckpt.dir STORE`, one process, STORE a tmpfs of 16 "
            "MB. A fault begins after two steps are saved. After it ends, two more "
            "must be saved; then SIGTERM ends the run (exit code 42). Step times are "
            "those of metrics.jsonl. *Lost*: steps that were in the store and are "
            "gone without being removed by `--ckpt.keep`, steps with different "
            "checksums, and unfinished folders at the end. The slow store: a process "
            f"in which the functions that write sleep {SLOW_S:.0f} s for each file "
            "they are about to write (`write_part` and `merge_parts` "
            f"{_FILES_OF_A_PART} files, `write_file` one), then call the real ones."
        ),
        header=(
            *("fault", "lasted", "step before", "steps meanwhile", "median", "longest"),
            *("saved at its begin", "saved at the end", "exit code", "lost"),
        ),
        rows=rows,
    )
    said = Table(
        title="What was printed",
        text="Every kind of message once; STORE and numbers of folders are shortened.",
        header=("fault", "message"),
        rows=[[one.name, f"`{line}`"] for one in results for line in one.said],
    )
    return [found, said]


def _list(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)


def _warnings(text: str) -> list[str]:
    """Return the lines about saving and failing, one of each kind."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not re.search(r"warning|gave up|waits|at try|error|resuming", line):
            continue
        line = re.sub(r"/tmp/tmp\w+/store", "STORE", line)
        line = re.sub(r"/tmp/tmp\w+", "FOLDER", line)
        line = re.sub(r"unfinished-[0-9a-f]+", "unfinished-*", line)
        line = re.sub(r"[0-9a-f]{32}", "*", line).replace("|", "\\|")
        found.setdefault(re.sub(r"[\d.]+", "0", line)[:60], line[:400])
    return list(found.values())


def _damaged(store: Store, known: int | None) -> list[str]:
    """List the damaged steps in the store, except the step damaged on purpose."""
    quarantined = store.quarantined().items()
    found = [
        f"{name}: {why}" for name, why in quarantined if name != f"{known}.damaged"
    ]
    for step in store.steps():
        try:
            SavedStep(store.path(step)).verify()
        except (DamagedError, RuntimeError, ValueError) as error:
            if step != known:
                found.append(f"step {step}: {error}")
    return found


if __name__ == "__main__":
    sys.exit(main())
