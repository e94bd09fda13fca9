"""Cause faults in a launched run, which must continue by itself with equal results.

    python -m scripts.faults.launch_faults --faults 200 --seed 0 --limit-s 3600

A launch of two hosts and a spare trains the `debug` recipe. At random moments of
compiling, restoring, steps and saves, it causes faults of a rank, an agent, the driver,
the newest checkpoint, the disk or the network. Every row is compared with the same row
of an undisturbed run that skips the same data. The cause and the rank that the launcher
names are compared with the injected fault. A pause of the driver (1 to 60 s), a locked
journal, a slow or full store and a second agent must end no generation. The checkpoints
are on a small ext4, which needs root to mount. Writes docs/benchmarks/launch_faults.md,
and launch_faults.jsonl with a line for each fault (other names with --page); ends with
1 if anything differs. The log keeps the faults that were done before --limit-s; --more
continues after them.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.observe import events, launch_time
from mjax.run.metrics import read_computed
from scripts.evidence import BENCHMARKS_DIR, Table, commit, read_metrics, write_page
from scripts.faults.chaos import differences
from scripts.faults.cut_off import CONTAINER, CutOff
from scripts.faults.fault_kinds import KINDS, Found, Kind, suffer
from scripts.faults.launched import Launched, StuckError
from scripts.faults.small_disks import ext4

HOSTS, SPARES, STEPS, SAVE_EVERY = 2, 1, 200, 3
RUN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--model.rope", "True"),
    *("--simulate-devices", "1", "--ckpt.every", str(SAVE_EVERY)),
    *("--eval.every", "20", "--steps", str(STEPS)),
)
PAGE = "launch_faults"
_STORE_MB = 64
XLA_FLAGS = "--xla_backend_optimization_level=0"


Rows = dict[int, dict[str, Any]]


class References:
    """Rows of undisturbed runs on the same mesh, by skipped data."""

    def __init__(self, folder: Path) -> None:
        """Begin without rows; undisturbed runs are made in `folder` when needed."""
        self._folder = folder
        self._rows: dict[tuple[str, ...], Rows] = {}

    def __contains__(self, skip: tuple[str, ...]) -> bool:
        return skip in self._rows

    def rows(self, skip: tuple[str, ...]) -> Rows:
        """Return step -> row of an undisturbed run with these values of
        `--data.skip`."""
        if skip not in self._rows:
            more = ["--data.skip", *skip] if skip else []
            folder = self._folder / f"reference-{len(self._rows)}"
            launched = Launched(folder, HOSTS, SPARES, [*RUN, *more])
            try:
                if launched.process.wait(timeout=900) != 0:
                    log = (launched.work_dir / "launch.log").read_text()
                    raise RuntimeError(log[-2000:])
            finally:
                launched.end()
            rows = read_computed(launched.work_dir)
            self._rows[skip] = {row["step"]: row for row in rows}
            print(f"left alone, {skip or 'all data'}: {len(rows)} rows", flush=True)
        return self._rows[skip]


def left_out(launched: Launched) -> tuple[str, ...]:
    """Return the values of `--data.skip` with which a launch now runs."""
    events = launched.events("roll_back")
    return tuple(events[-1]["data"]["skip"]) if events else ()


def begin(folder: Path, store: Path, kind: Kind, run: int) -> Launched:
    """Start a launch in which faults of a kind can be caused."""
    flags = [*RUN, "--ckpt.dir", str(store / f"run-{run}")]
    where = folder / f"run-{run}", HOSTS, SPARES, flags
    if kind.place == "local":
        return Launched(*where)
    return CutOff(*where, prefix=CONTAINER if kind.place == "containers" else ())


def run_all(
    kinds: list[Kind],
    folder: Path,
    store: Path,
    rng: random.Random,
    until_s: float,
    first_run: int,
    spent: Callable[[int, Launched], None],
) -> Iterator[Found]:
    """Cause every fault; a run that has ended or failed starts again.

    Args:
      kinds: faults to cause, in order; each one is removed when it is done.
      folder: folder for the runs.
      store: a small file system for their checkpoints.
      rng: generator that draws moments and ranks.
      until_s: value of the monotonic clock after which no fault begins.
      first_run: number of the first run.
      spent: called with the number and the launch of each run that has ended.
    """
    references = References(folder)
    if kinds:
        references.rows(())  # while nothing else uses the processor
    run = first_run
    while kinds and time.monotonic() < until_s:
        first = kinds[0]
        launched = begin(folder, store, first, run)
        try:
            launched.wait_for_row(1)
            while kinds and time.monotonic() < until_s:
                is_late = launched.last_step() > STEPS - 40
                if is_late or kinds[0].place != first.place:
                    break
                found = suffer(launched, kinds[0], HOSTS, rng, run)
                skip = left_out(launched)
                if skip not in references:
                    launched.stop()  # otherwise it would end during the reference run
                rows = read_metrics(launched.work_dir)
                expected = references.rows(skip)
                problems = found.problems + differences(rows, expected)
                yield dataclasses.replace(found, problems=problems)
                kinds.pop(0)
                if launched.process.poll() is not None:
                    break
            launched.stop()
            spent(run, launched)
        except StuckError as error:
            log = (launched.work_dir / "launch.log").read_text()[-1500:]
            problem = f"{error}; {launched.events()[-1]['text']}; {log}"
            yield Found(
                commit=commit(),
                kind=kinds.pop(0).name,
                rank=-1,
                run=run,
                step=launched.last_step(),
                problems=[problem],
            )
        finally:
            launched.end()
            shutil.rmtree(store / f"run-{run}", ignore_errors=True)
        run += 1


def draw(kinds: Sequence[Kind], number: int, rng: random.Random) -> list[Kind]:
    """Draw kinds equally often, in random order.

    Kinds that need a separate launch come last.
    """
    drawn = [kinds[index % len(kinds)] for index in range(number)]
    rng.shuffle(drawn)
    return sorted(drawn, key=lambda kind: kind.place, reverse=True)


def add_up(runs: list[dict[str, float]]) -> Table:
    """Make the table of where the time of all runs went."""
    total: dict[str, float] = collections.defaultdict(float)
    for buckets in runs:
        for bucket, seconds in buckets.items():
            total[bucket] += seconds
    wall_s = sum(total.values()) or 1.0
    return Table(
        title="Where the time went",
        text=(
            f"{len(runs)} runs, {wall_s:.0f} s of wall time, from their events alone "
            "(mjax/observe/launch_time.py). The states of the driver cover the whole "
            "time; while ranks live, the phases of rank 0 divide it, by its own clock. "
            "Between the two, an order to start or the news of an end is on its way. "
            "`unexplained` is time that no event explains."
        ),
        header=["bucket", "s", "share"],
        rows=[
            [bucket, f"{seconds:.1f}", f"{seconds / wall_s:.2%}"]
            for bucket, seconds in sorted(total.items(), key=lambda item: -item[1])
            if abs(seconds) >= 0.05
        ],
    )


def write_report(
    args: argparse.Namespace, found: list[Found], runs: list[dict[str, float]]
) -> Path:
    """Write the page."""
    by_kind: dict[str, list[Found]] = collections.defaultdict(list)
    for one in found:
        by_kind[one.kind].append(one)
    rows = []
    for kind in KINDS:
        mine, names_rank = by_kind[kind.name], kind.names == "rank" and kind.causes
        if not mine:
            continue
        detect = [one.detect_s for one in mine if one.detect_s is not None]
        restart = [one.restart_s for one in mine if one.restart_s is not None]
        named = sum(one.ranks == [one.rank] for one in mine)
        rows.append(
            [
                *(kind.name, str(len(mine)), " or ".join(kind.causes) or "none"),
                f"{named} of {len(mine)}" if names_rank else "",
                _times(detect),
                _times(restart),
                str(max((one.lost for one in mine), default=0)),
                str(sum(bool(one.problems) for one in mine)),
            ]
        )
    commits = ", ".join(dict.fromkeys(one.commit for one in found))
    text = (
        f"{len(found)} faults of {len(rows)} kinds on the commit {commits}: {HOSTS} "
        f"hosts with a rank each and {SPARES} spare, `{' '.join(RUN)}`, compiled "
        "without LLVM's passes. Each row of metrics.jsonl is compared exactly with "
        "that of an undisturbed run, in all fields but the timing. Seconds are median "
        "and largest: until the launcher named a cause (the limit of a step is 4 s), "
        "and until the next row."
    )
    table = Table(
        title="What was done, and what followed",
        text=text,
        header=(
            *("fault", "times", "cause it must be given", "guilty rank named"),
            *("noticed, s", "next row, s", "most steps lost", "problems"),
        ),
        rows=rows,
    )
    words = ["--faults", str(args.faults), "--seed", str(args.seed)]
    if len(args.kinds) < len(KINDS):
        words += ["--kinds", *args.kinds]
    if args.page != PAGE:
        words += ["--page", args.page]
    command = f"python -m scripts.faults.launch_faults {shlex.join(words)}"
    title = "Runs that heal themselves"
    return write_page(args.page, title, command, [table, add_up(runs)])


def _times(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else ""


def main() -> int:
    """Run or continue; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--more", action="store_true", help="go on with the log")
    parser.add_argument("--page", default=PAGE, help="its name, and that of the log")
    names = {kind.name: kind for kind in KINDS}
    parser.add_argument("--kinds", nargs="+", choices=names, default=[*names])
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    log, rng = BENCHMARKS_DIR / f"{args.page}.jsonl", random.Random(args.seed)
    times = log.with_name(f"{log.stem}_time.jsonl")
    found: list[Found] = []
    if args.more:
        found = [Found(**json.loads(line)) for line in log.read_text().splitlines()]
    else:
        log.write_text("")
        times.write_text("")

    def spent(run: int, launched: Launched) -> None:
        buckets = launch_time.counted(events.read(launched.work_dir)[0]).parts
        with times.open("a") as file:
            file.write(json.dumps({"run": run, "seconds": buckets}) + "\n")

    chosen = [names[name] for name in args.kinds]
    kinds = draw(chosen, args.faults, rng)[len(found) :]
    first_run = max((one.run + 1 for one in found), default=0)
    rng = random.Random(f"{args.seed} {len(found)}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        until_s = time.monotonic() + args.limit_s
        store = Path(folder) / "store"
        with ext4(store, _STORE_MB):
            for one in run_all(
                kinds, Path(folder), store, rng, until_s, first_run, spent
            ):
                found.append(one)
                line = json.dumps(dataclasses.asdict(one))
                print(line, flush=True)
                with log.open("a") as file:
                    file.write(line + "\n")
    lines = times.read_text().splitlines()
    print(write_report(args, found, [json.loads(line)["seconds"] for line in lines]))
    return int(any(one.problems for one in found) or len(found) < args.faults)


if __name__ == "__main__":
    sys.exit(main())
