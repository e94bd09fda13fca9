"""Harm a launched run again and again; it must go on by itself, and nothing may differ.

    python -m scripts.faults.launch_faults --faults 200 --seed 0 --limit-s 3600

A launch of two hosts and a spare trains the `debug` recipe. At moments that are drawn
(in compiling, restoring, steps and saves) something happens to it: to a rank, to an
agent, to the driver, to the newest checkpoint. Every row is compared with that of a run
that was left alone, the cause and the guilty rank with what was done. Writes
docs/benchmarks/launch_faults.md and launch_faults.jsonl, a line for each fault, and
ends with 1 if anything differs. What was done before --limit-s is in the log: --more
goes on from there.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mjax.launch.policy import Cause
from mjax.processes.progress import Phase
from mjax.run.metrics import read_computed
from scripts.evidence import BENCHMARKS_DIR, Table, commit, read_metrics, write_page
from scripts.faults.chaos import differences
from scripts.faults.launched import Launched, StuckError
from scripts.faults.wall_time import ledger

HOSTS, SPARES, STEPS, SAVE_EVERY = 2, 1, 200, 3
RUN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--simulate-devices", "1", "--ckpt.every", str(SAVE_EVERY)),
    *("--eval.every", "20", "--steps", str(STEPS)),
)
XLA_FLAGS = "--xla_backend_optimization_level=0"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    causes: tuple[Cause, ...]
    """What the launch may call it; empty: the run must not notice."""
    phase: Phase = Phase.STEP
    names_rank: bool = True
    """Whether the launch must name the very rank."""
    is_at_once: bool = True
    """Whether the steps since the last save are all that may be lost."""


KINDS = (
    Kind("SIGKILL", (Cause.KILLED,)),
    Kind("SIGSEGV", (Cause.CRASHED,)),
    Kind("SIGSTOP", (Cause.HUNG,)),
    Kind("SIGTERM", (Cause.PREEMPTED,), names_rank=False),
    Kind("exception", (Cause.FAILED,)),
    Kind("exit 137", (Cause.KILLED, Cause.OUT_OF_MEMORY)),
    Kind("sleep", (Cause.HUNG,)),
    Kind("hold the lock", (Cause.HUNG,)),
    Kind("SIGKILL in compile", (Cause.KILLED,), Phase.COMPILE),
    Kind("SIGKILL in restore", (Cause.KILLED,), Phase.RESTORE),
    Kind("SIGKILL in save", (Cause.KILLED,), Phase.SAVE),
    Kind("damaged checkpoint", (Cause.KILLED,), is_at_once=False),
    Kind("agent SIGKILL", (Cause.KILLED, Cause.HOST_LOST), names_rank=False),
    Kind("agent SIGSTOP", (Cause.HOST_LOST,), names_rank=False),
    Kind("driver SIGKILL", ()),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What followed one fault."""

    commit: str
    kind: str
    rank: int
    run: int
    step: int
    """Of the last row when it happened."""
    cause: str = ""
    ranks: list[int] = dataclasses.field(default_factory=list)
    """That the launch named."""
    detect_s: float | None = None
    """Until the launch had a cause."""
    restart_s: float | None = None
    """Until the next new row."""
    lost: int = 0
    """Rows that were computed again."""
    problems: list[str] = dataclasses.field(default_factory=list)


def happen(launched: Launched, kind: Kind, rank: int) -> None:
    """Let a fault happen now."""
    name = kind.name.removesuffix(f" in {kind.phase.name.lower()}")
    host = launched.hosts()[rank]
    if name == "driver SIGKILL":
        launched.kill_driver()
    elif name.startswith("agent "):
        os.kill(launched.agent_pid(host), getattr(signal, name.removeprefix("agent ")))
    elif name == "damaged checkpoint":
        launched.damage_newest_checkpoint()
        os.kill(launched.rank_pid(rank), signal.SIGKILL)
    elif name.startswith("SIG"):
        os.kill(launched.rank_pid(rank), getattr(signal, name))
    else:
        launched.inject(rank, name)


def suffer(launched: Launched, kind: Kind, rng: random.Random, run: int) -> Found:
    """Wait for the moment of a fault, let it happen, and see what follows."""
    rank, count = rng.randrange(HOSTS), rng.randint(2, 5)
    generation, first = launched.generation, launched.last_step()
    if kind.phase in (Phase.COMPILE, Phase.RESTORE):
        # The moment lies in the next start, which a kill brings about.
        launched.wait_for_row(first + count)
        os.kill(launched.rank_pid(rank), signal.SIGKILL)
        launched.wait_for(lambda: launched.generation > generation, "a restart")
        generation = launched.generation
        launched.wait_for(
            lambda: (w := launched.word(rank)) is not None and w.phase >= kind.phase,
            kind.phase.name,
        )
    else:
        launched.wait_for_row(first + count)
        launched.wait_for(
            lambda: (w := launched.word(rank)) is not None and w.phase is kind.phase,
            kind.phase.name,
        )
    time.sleep(rng.random() * 0.3)
    step, saved = launched.last_step(), max(launched.saved_steps(), default=0)
    num_failures = len(launched.events("failure"))
    num_drivers = len(launched.events("driver"))
    at_s, at_ns = time.monotonic(), time.time_ns()
    happen(launched, kind, rank)
    report: dict[str, Any] = {"commit": commit(), "kind": kind.name, "rank": rank}
    report |= {"run": run, "step": step}
    if not kind.causes:
        launched.wait_for(
            lambda: len(launched.events("driver")) > num_drivers, "driver"
        )
        launched.wait_for_row(step + 1)
        problems = []
        if launched.generation != generation:
            problems.append("the ranks were started again")
        return Found(
            **report, restart_s=round(time.monotonic() - at_s, 2), problems=problems
        )
    launched.wait_for(lambda: len(launched.events("failure")) > num_failures, "failure")
    failure = launched.events("failure")[num_failures]
    launched.wait_for(lambda: launched.generation > generation, "a restart")
    before = launched.last_step()
    launched.wait_for(
        lambda: (
            (w := launched.word(0)) is not None
            and w.phase is Phase.STEP
            and w.generation == launched.generation
        ),
        "steps",
    )
    resumed = max((int(s) for s in launched.saved_steps() if s <= before), default=0)
    word = launched.word(0)
    assert word is not None
    resumed = min(resumed, word.step)
    launched.wait_for_row(resumed + 1)
    problems = []
    cause, ranks = failure["data"]["cause"], failure["data"]["ranks"]
    if cause not in kind.causes:
        problems.append(f"cause {cause}: {failure['text']}")
    if kind.names_rank and ranks != [rank]:
        problems.append(f"rank {rank}, named {ranks}: {failure['text']}")
    lost = max(0, before - resumed)
    if kind.is_at_once and resumed < saved:
        problems.append(f"resumed at {resumed} although {saved} was saved")
    if kind.name == "SIGTERM" and lost:
        problems.append(f"{lost} steps were lost by a SIGTERM")
    return Found(
        **report,
        cause=cause,
        ranks=ranks,
        detect_s=round((failure["time_ns"] - at_ns) / 1e9, 3),
        restart_s=round(time.monotonic() - at_s, 2),
        lost=lost,
        problems=problems,
    )


def reference(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a run that is left alone, on the same mesh."""
    launched = Launched(folder / "reference", HOSTS, SPARES, [*RUN])
    try:
        if launched.process.wait(timeout=900) != 0:
            raise RuntimeError((launched.work_dir / "launch.log").read_text()[-2000:])
    finally:
        launched.end()
    return {row["step"]: row for row in read_computed(launched.work_dir)}


def run_all(
    kinds: list[Kind],
    folder: Path,
    rng: random.Random,
    until_s: float,
    first_run: int,
    spent: Callable[[int, Launched], None],
) -> Iterator[Found]:
    """Let every fault happen; a run that has ended, or that fails, begins anew.

    Args:
      kinds: what happens; those that have happened are taken out.
      folder: for the runs.
      rng: draws moments and ranks.
      until_s: by the monotonic clock, when to begin no further fault.
      first_run: its number.
      spent: takes the number of each run that has ended, and its launch.
    """
    expected = reference(folder)
    print(f"undisturbed: {len(expected)} rows", flush=True)
    run = first_run
    while kinds and time.monotonic() < until_s:
        launched = Launched(folder / f"run-{run}", HOSTS, SPARES, [*RUN])
        try:
            launched.wait_for_row(1)
            while kinds and time.monotonic() < until_s:
                if launched.last_step() > STEPS - 40:
                    break
                found = suffer(launched, kinds[0], rng, run)
                rows = read_metrics(launched.work_dir)
                problems = found.problems + differences(rows, expected)
                yield dataclasses.replace(found, problems=problems)
                kinds.pop(0)
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
        run += 1


def draw(number: int, rng: random.Random) -> list[Kind]:
    """Draw kinds, each as often as any other, in a random order."""
    kinds = [KINDS[index % len(KINDS)] for index in range(number)]
    rng.shuffle(kinds)
    return kinds


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
            "(scripts/faults/wall_time.py). The states of the driver tile the time; "
            "while ranks live it is that of rank 0 by its own clock. `unexplained` is "
            "what is left between the two: an order on its way, a rank that has ended "
            "and is not yet heard of."
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
        mine = by_kind[kind.name]
        detect = [one.detect_s for one in mine if one.detect_s is not None]
        restart = [one.restart_s for one in mine if one.restart_s is not None]
        named = sum(one.ranks == [one.rank] for one in mine)
        rows.append(
            [
                *(kind.name, str(len(mine)), " or ".join(kind.causes) or "none"),
                f"{named} of {len(mine)}" if kind.names_rank and kind.causes else "",
                _times(detect),
                _times(restart),
                str(max((one.lost for one in mine), default=0)),
                str(sum(bool(one.problems) for one in mine)),
            ]
        )
    commits = ", ".join(dict.fromkeys(one.commit for one in found))
    text = (
        f"{len(found)} faults of {len(by_kind)} kinds on the commit {commits}: "
        f"{HOSTS} hosts with a rank each and {SPARES} spare, `{' '.join(RUN)}`, "
        "compiled without LLVM's passes. Each row of metrics.jsonl is compared with "
        "that of a run that was left alone, all fields but the timing, exactly. "
        "Seconds are median and largest: until the launch had a cause (the limit of "
        "a step is 4 s), and until the next row."
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
    command = f"python -m scripts.faults.launch_faults --faults {args.faults} --seed "
    return write_page(
        *("launch_faults", "Runs that heal themselves", f"{command}{args.seed}"),
        [table, add_up(runs)],
    )


def _times(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else ""


def main() -> int:
    """Run, or go on; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--more", action="store_true", help="go on with the log")
    parser.add_argument("--log", default=str(BENCHMARKS_DIR / "launch_faults.jsonl"))
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    log, rng = Path(args.log), random.Random(args.seed)
    times = log.with_name(f"{log.stem}_time.jsonl")
    found: list[Found] = []
    if args.more:
        found = [Found(**json.loads(line)) for line in log.read_text().splitlines()]
    else:
        log.write_text("")
        times.write_text("")

    def spent(run: int, launched: Launched) -> None:
        buckets = ledger(launched.events())
        with times.open("a") as file:
            file.write(json.dumps({"run": run, "seconds": buckets}) + "\n")

    kinds = draw(args.faults, rng)[len(found) :]
    first_run = max((one.run + 1 for one in found), default=0)
    rng = random.Random(f"{args.seed} {len(found)}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        until_s = time.monotonic() + args.limit_s
        for one in run_all(kinds, Path(folder), rng, until_s, first_run, spent):
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
