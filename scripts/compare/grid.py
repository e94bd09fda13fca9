"""Run the grid of a study: arms by rates by seeds, one process a run, resumable.

Input: a study at one size. Output: a JSON file with one entry for each finished run
under its flags: losses, seconds, commit. The file is replaced as a whole after each
run, so a grid that is killed loses the run in flight and no other.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.compare.studies import Arm, Run, Size, Study
from scripts.compare.verdict import Tuned, rate_beyond, tune
from scripts.evidence import REPOSITORY, about, read_metrics, train_command

RUNS_DIR = REPOSITORY / "runs" / "compare"
MAX_ADDED_RATES = 2
"""Rates by which the grid of an arm is extended at most."""
GAVE_UP = 93
"""Exit code of the trainer if losses are not finite (docs/design.md)."""
# One thread, so that a grid leaves the other cores alone.
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What is kept of a finished run."""

    curve: tuple[tuple[int, float], ...]
    """Tokens seen, and held-out loss in nats per token, at each evaluation."""
    bits_per_byte: float | None
    """Of the held-out text after the last step; None: the run diverged."""
    wall_s: float
    made: str
    """Commit, date, versions and machine of the run, as `scripts.evidence.about`."""

    @property
    def loss(self) -> float:
        """Held-out loss after the last step; infinite: the run diverged."""
        return math.inf if self.bits_per_byte is None else self.curve[-1][1]


class Results:
    """The finished runs of a study, in a file."""

    def __init__(self, path: Path) -> None:
        """Read what earlier calls have finished.

        Args:
          path: of the JSON file; it need not exist.
        """
        self._path = path
        kept = json.loads(path.read_text()) if path.exists() else {}
        self._found = {key: _result(entry) for key, entry in kept.items()}

    def __len__(self) -> int:
        """Count them, at all sizes."""
        return len(self._found)

    def get(self, run: Run) -> Result | None:
        """Return the result of a run; None: it is not finished."""
        return self._found.get(run.key)

    def drop_other_commits(self, commit: str) -> None:
        """Forget, in memory, runs that were not made at a commit."""
        kept = self._found.items()
        self._found = {
            key: one for key, one in kept if one.made.startswith(f"At `{commit}`")
        }

    def add(self, run: Run, result: Result) -> None:
        """Keep a result; the file is replaced in one step."""
        self._found[run.key] = result
        entries = {key: dataclasses.asdict(one) for key, one in self._found.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        with partial.open("w") as file:
            file.write(json.dumps(entries, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)


def _result(entry: dict[str, Any]) -> Result:
    curve = tuple((int(tokens), float(loss)) for tokens, loss in entry["curve"])
    others = {name: value for name, value in entry.items() if name != "curve"}
    return Result(curve=curve, **others)


def train(run: Run, folder: Path = RUNS_DIR) -> Result:
    """Train one run from its start in a process of its own.

    Args:
      run: what to train.
      folder: for its work dir, which is removed when the run has finished.
    Raises:
      RuntimeError: the trainer failed; the message has the end of its output.
    """
    work_dir = folder / run.folder
    shutil.rmtree(work_dir, ignore_errors=True)  # left by a grid that was killed
    began_s, made = time.monotonic(), about()
    done = subprocess.run(
        train_command("--work-dir", str(work_dir), *run.flags),
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": _ONE_THREAD},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode not in (0, GAVE_UP):
        raise RuntimeError(
            f"{run.key} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        )
    rows = [row for row in read_metrics(work_dir) if row.get("eval_loss") is not None]
    tokens = run.size.rows * run.arm.batch_factor * run.size.seq_len
    result = Result(
        curve=tuple((row["step"] * tokens, row["eval_loss"]) for row in rows),
        bits_per_byte=None if done.returncode else rows[-1]["eval_bits_per_byte"],
        wall_s=round(time.monotonic() - began_s, 1),
        made=made,
    )
    shutil.rmtree(work_dir)
    return result


def losses(
    arm: Arm, size: Size, results: Results
) -> dict[float, tuple[float, ...] | None]:
    """Return the losses over the seeds of each rate of an arm, rates rising.

    While the best of the finished rates is at an edge of the grid, a rate beyond it is
    added, up to MAX_ADDED_RATES. None: some run of that rate is missing.
    """
    rates = list(arm.rates)
    while True:
        found = {rate: _losses_at(arm, size, rate, results) for rate in rates}
        whole = {rate: one for rate, one in found.items() if one is not None}
        edge = tune(whole).edge if len(whole) == len(rates) else None
        if edge in (None, "only") or len(rates) == len(arm.rates) + MAX_ADDED_RATES:
            return found
        rates = sorted([*rates, rate_beyond(rates, edge)])


def _losses_at(
    arm: Arm, size: Size, rate: float, results: Results
) -> tuple[float, ...] | None:
    kept = [results.get(run) for run in runs_at(arm, size, rate)]
    found = tuple(one.loss for one in kept if one is not None)
    return found if len(found) == len(kept) else None


def runs_at(arm: Arm, size: Size, rate: float) -> list[Run]:
    """Return the runs of an arm at one rate, in the order of its seeds."""
    return [Run(arm=arm, size=size, rate=rate, seed=seed) for seed in arm.seeds]


def tuned(arm: Arm, size: Size, results: Results) -> Tuned | None:
    """Return an arm at its best rate; None: runs of it are missing."""
    found = losses(arm, size, results)
    whole = {rate: one for rate, one in found.items() if one is not None}
    return tune(whole) if len(whole) == len(found) else None


def unfinished(arm: Arm, size: Size, results: Results) -> list[Run]:
    """List the runs of an arm that its grid lacks, as far as is known now."""
    rates = losses(arm, size, results)
    runs = [run for rate in rates for run in runs_at(arm, size, rate)]
    return [run for run in runs if results.get(run) is None]


def run_grid(
    study: Study,
    size: Size,
    results: Results,
    *,
    trainer: Callable[[Run], Result] = train,
    for_s: float | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Train what is not yet trained, arm by arm; return whether the grid is complete.

    Args:
      study: what is compared.
      size: of the models and the runs.
      results: what is finished; each new result is added at once.
      trainer: trains one run.
      for_s: start no run that would probably end later than so many seconds from now.
      say: takes a line of progress.
    """
    began_s = time.monotonic()
    spent: list[float] = []
    for arm in study.arms:
        while left := unfinished(arm, size, results):
            run_s = max(spent, default=0.0)
            passed_s = time.monotonic() - began_s
            if for_s is not None and passed_s + run_s > for_s:
                say(f"stopped after {passed_s:.0f} s; the same command continues")
                return False
            run = left[0]
            results.add(run, result := trainer(run))
            spent.append(result.wall_s)
            count = sum(len(unfinished(one, size, results)) for one in study.arms)
            left_min = count * sum(spent) / len(spent) / 60
            say(
                f"{arm.name}, lr {run.rate:g}, seed {run.seed}: held-out loss "
                f"{result.loss:.4f}, {result.wall_s:.0f} s; {count} runs left, about "
                f"{left_min:.0f} min"
            )
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep a second grid from the results of a study while one runs.

    Args:
      path: of the lock file, which is made.
    Raises:
      RuntimeError: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another process runs this grid ({path} is locked); wait for it"
            ) from None
        yield
