"""Log of scripts.faults.chaos, and the page that is made from it."""

import collections
import dataclasses
import json
import signal
from collections.abc import Sequence
from pathlib import Path

from scripts.evidence import Table, write_page
from scripts.faults.chaos_processes import NUM_PROCESSES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault of one generation of processes."""

    aim: str
    """One of AIMS, or "none" for no fault."""
    signal: int
    rank: int
    count: int
    """Number of rows or folders to wait for."""
    share: float
    """When the fault happens, as a share of the usual duration of its phase."""
    grace_s: float
    """Seconds until the other processes are killed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One start of the four processes, and how it ended."""

    commit: str
    """Commit of the code that ran."""
    run: int
    fault: Fault
    phase: str
    """Activity of process 0 when the signal was sent; "" without a signal."""
    codes: list[int]
    """Exit code of each process, -9 for SIGKILL."""
    resumed: int
    """Restored step; 0 for a new state, -1 if the processes did not get so far."""
    committed: list[int]
    """Steps in the store when all processes had ended."""
    unfinished: list[str]
    first_row: int
    last_row: int
    recomputed: int
    """Number of its rows that an earlier generation had written too."""
    problems: list[str]
    wall_s: float
    cpu_s: float


@dataclasses.dataclass(frozen=True)
class Settings:
    """The first line of the log."""

    kills: int
    terms: int
    steps: int
    seed: int


def read_log(path: Path) -> tuple[Settings, list[Generation]]:
    """Read the log of `run_all`."""
    first, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return Settings(**json.loads(first)), [
        Generation(**{**record, "fault": Fault(**record["fault"])})
        for record in records
    ]


def count_faults(generations: list[Generation], number: int) -> int:
    """Count the generations that got a signal."""
    return sum(one.phase != "" and one.fault.signal == number for one in generations)


def write_report(
    settings: Settings, generations: list[Generation], run: Sequence[str]
) -> Path:
    """Write the page; `run` holds the flags of the training command."""
    command = (
        f"python -m scripts.faults.chaos --kills {settings.kills} "
        f"--terms {settings.terms} --steps {settings.steps} --seed {settings.seed}"
    )
    tables = [
        _outcome(settings, generations, run),
        _by_phase(generations),
        _terms(generations),
    ]
    return write_page("chaos", "Killed at random", command, tables)


def _outcome(
    settings: Settings, generations: list[Generation], run: Sequence[str]
) -> Table:
    rows_of = collections.Counter[str]()
    for one in generations:
        rows_of["written"] += one.last_row - one.first_row + 1 if one.last_row else 0
        rows_of["again"] += one.recomputed
    problems = [text for one in generations for text in one.problems]
    kills = count_faults(generations, signal.SIGKILL)
    killed = [one for one in generations if one.phase and one.fault.signal == 9]
    wall_s = sum(one.wall_s for one in generations)
    commits = dict.fromkeys(one.commit for one in generations)
    rows = [
        ["SIGKILL sent", f"{kills}; a session draws {settings.kills}"],
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
            f"Sessions on the commits {', '.join(commits)}, 4 processes with 2 "
            f"simulated devices each on 2 cores: `{' '.join(run)} --steps "
            f"{settings.steps}` (pp 2 x dp 2 x tp 2, ZeRO 2), compiled without LLVM's "
            "passes. One randomly drawn process gets the signal. The others are "
            "killed 0, 0.1, 0.5 or 2 s later (drawn), and all are restarted on a new "
            "port. After each fault every committed step is read and compared with "
            "its checksums. Every row of metrics.jsonl, including rows that will be "
            "dropped and computed again, is compared exactly with that of an "
            "undisturbed run, in all fields but the timing. Each start must resume at "
            "the newest committed step. Each start is a line of "
            "[chaos.jsonl](chaos.jsonl). Other programs shared the cores, so times "
            "mean nothing."
        ),
        header=("", "found"),
        rows=[*rows, *([[text, "**PROBLEM**"] for text in problems])],
    )


def _cpu_s(generations: list[Generation]) -> float:
    return sum(one.cpu_s for one in generations)


def _most_lost(generations: list[Generation]) -> int:
    """Return the largest number of rows after the newest committed step."""
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
            "The activity of process 0 at that moment, judged by its output and its "
            "folders. The kills aim with equal probability at the start, restoring, "
            "steps, a folder that is being written, and the first 0.1 s after a step "
            "appears."
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
