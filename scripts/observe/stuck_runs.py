"""Stop one of four training processes, ask which one blocks the run, and resume it.

    python -m scripts.observe.stuck_runs --seed 1000 --runs 3 --limit-s 200
    python -m scripts.observe.stuck_runs --seed 1000 --runs 3 --limit-s 200 --more

Input: a seed, which determines 60 cases. A rank sleeps (20 cases), holds the
interpreter lock (20), or enters another collective than the others (20). Half of the
cases run under `python -m mjax.launch`, half in processes that were started by hand.
Rank, phase and place within the phase are random too. Healthy moments are tested too.
Output: docs/benchmarks/observe_stuck_runs.md, and a line for each question in
observe_stuck_runs.jsonl; --more continues with the missing ones. Exits with 1 if fewer
than 95% are right, if a rank is named in a healthy moment, or if cases are left.

`python -m mjax.observe stuck` is run as a user would, once the run has stopped. It is
also run without /proc, as on another host.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mjax.observe import seen
from mjax.observe.stuck import report
from mjax.processes.progress import Phase
from scripts.evidence import BENCHMARKS_DIR, REPOSITORY, Table, commit, write_page
from scripts.observe.stopped_run import (
    FLAGS,
    MODES,
    NUM_RANKS,
    WAIT_S,
    LateError,
    Run,
)

PAGE = "observe_stuck_runs"
KINDS = ("sleep", "lock", "skip")
NUM_OF_KIND, TARGET = 10, 0.95
LIMITS_S = {"step": 5.0, "eval": 7.0, "save": 10.0}
"""Time limit of each phase, as a user would set it."""
PLACES = {
    "step": ("data", "dispatch", "device", "metrics", "agree"),
    "eval": ("batch 0", "batch 1", "batch 2", "batch 3"),
    "save": ("barrier", "save"),
}
CLEAN = {
    "running": 2,
    "compile": 1,
    "restart": 1,
    "all save": 1,
    "one saves": 1,
    "all evaluate": 1,
    "slow step": 1,
}
"""Healthy moments, and how often each is tested in each mode."""
_MOST_TRIES = 3
_patching = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A fault or a healthy moment of a run."""

    mode: str
    kind: str
    """Name in KINDS or CLEAN."""
    index: int
    rank: int
    phase: str
    where: str
    after_steps: int
    delay_s: float

    @property
    def is_clean(self) -> bool:
        """Whether no rank may be named."""
        return self.kind in CLEAN

    @property
    def key(self) -> tuple[str, str, int]:
        """Identity of the case among those of a seed."""
        return self.mode, self.kind, self.index


def draw(seed: int) -> list[Case]:
    """Draw all cases of a seed, grouped by mode, in a random order."""
    cases = []
    for mode in MODES:
        counts = dict.fromkeys(KINDS, NUM_OF_KIND) | CLEAN
        some = [
            _draw_one(random.Random(f"{seed} {mode} {kind} {index}"), mode, kind, index)
            for kind, num in counts.items()
            for index in range(num)
        ]
        random.Random(f"{seed} {mode}").shuffle(some)
        some.sort(key=lambda case: case.kind == "compile")  # in a separate run
        cases += some
    return cases


def _draw_one(rng: random.Random, mode: str, kind: str, index: int) -> Case:
    phase = rng.choices(list(PLACES), weights=(6, 2, 2))[0]
    places = list(PLACES[phase])
    if phase == "step" and kind in ("sleep", "lock"):
        places.append("anywhere")
    if phase == "step" and kind == "lock":
        places += ["thread"] * len(places)
    return Case(
        mode=mode,
        kind=kind,
        index=index,
        rank=rng.randrange(NUM_RANKS),
        phase=phase,
        where=rng.choice(places),
        after_steps=rng.randint(1, 5),
        delay_s=rng.random() * 0.3,
    )


def ask(work_dir: Path) -> dict[str, Any]:
    """Ask as a user does, and at the same time without /proc."""
    limits = [f"--{name}-s={limit_s:g}" for name, limit_s in LIMITS_S.items()]
    words = ["-m", "mjax.observe", "stuck", "--work-dir", str(work_dir), "--json"]
    process = subprocess.Popen(
        [sys.executable, *words, *limits],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with _patching, mock.patch.object(seen, "process_state", return_value="?"):
        without_proc = _named(work_dir)
    said, refused = process.communicate(timeout=WAIT_S)
    if process.returncode == 0:
        found = json.loads(said)
    elif process.returncode == 2:
        found = {"ranks": [], "is_stuck": False, "reason": refused.strip()}
    else:
        raise RuntimeError(refused)
    ranks = [
        [one["step"], one["phase"], one["doing"], one["is_beating"], one["age_s"]]
        for one in found.get("seen", ())
    ]
    answers = {name: found[name] for name in ("ranks", "is_stuck", "reason")}
    return answers | {"without_proc": without_proc, "seen": ranks}


def _named(work_dir: Path) -> list[int]:
    try:
        return [*report(work_dir, limits_s=LIMITS_S).ranks]
    except ValueError:
        return []


def question(run: Run, case: Case) -> dict[str, Any]:
    """Cause a case, ask, and let the run continue.

    Raises:
      LateError: the case did not occur, or the run did not continue.
    """
    if case.is_clean:
        return _clean(run, case)
    run.go_on(case.after_steps)
    with run.stopped(case.kind, [case.rank], where=case.where, delay_s=case.delay_s):
        limit_s = LIMITS_S["save" if case.where == "save" else case.phase]
        if case.where == "barrier":
            limit_s = LIMITS_S["step"]
        began_s, step = time.monotonic(), run.last_step()
        time.sleep(limit_s + 1.5)
        while run.last_step() != step:  # it had not ended yet
            step, began_s = run.last_step(), time.monotonic()
            time.sleep(limit_s + 1.5)
        stood_s = time.monotonic() - began_s
        return ask(run.work_dir) | {"step": step, "stood_s": round(stood_s, 1)}


def _clean(run: Run, case: Case) -> dict[str, Any]:
    """Ask at a healthy moment."""
    every = [*range(NUM_RANKS)]
    match case.kind:
        case "running":
            run.go_on(case.after_steps)
            return ask(run.work_dir)
        case "compile" | "restart":
            if case.kind == "restart":
                run.restart()
            if case.mode == "launcher":
                seeks = Phase.COMPILE if case.kind == "compile" else Phase.BUILD
                run.wait_for(lambda: run.word_phase() == seeks, f"{seeks.name}")
            else:
                time.sleep(12 if case.kind == "compile" else 5)
            return ask(run.work_dir)
        case "all save":
            where, ranks, slow_s, asked_s = "save", every, 9.0, 5.0
        case "one saves":
            where, ranks, slow_s, asked_s = "save", every[:1], 9.0, 6.0
        case "all evaluate":
            where, ranks, slow_s, asked_s = "batch 1", every, 5.5, 2.0
        case _:
            where, ranks, slow_s, asked_s = "data", every[1:2], 3.5, 1.0
    run.go_on(case.after_steps)
    with run.stopped("slow", ranks, where=where, slow_s=slow_s):
        time.sleep(asked_s)
        return ask(run.work_dir)


class Queue:
    """Remaining cases, and results; shared by several threads."""

    def __init__(self, cases: Sequence[Case], until_s: float) -> None:
        """Take the cases.

        Args:
          cases: cases in the order in which they run.
          until_s: monotonic time after which no case is started.
        """
        self._cases, self._until_s = [*cases], until_s
        self._lock, self._tries = threading.Lock(), collections.Counter()
        self.found: queue.Queue[tuple[Case, dict[str, Any]] | None] = queue.Queue()

    def take(self, modes: Sequence[str]) -> Case | None:
        """Take the next case of the first mode that has any; None at the end."""
        with self._lock:
            if time.monotonic() > self._until_s:
                return None
            for mode in modes:
                for case in self._cases:
                    if case.mode == mode:
                        self._cases.remove(case)
                        self._tries[case.key] += 1
                        return case
        return None

    def give_back(self, case: Case) -> None:
        """Return a case that did not occur to the queue, up to three times."""
        with self._lock:
            if self._tries[case.key] < _MOST_TRIES:
                self._cases.append(case)

    def tell(self, case: Case, answers: dict[str, Any]) -> None:
        """Return the results."""
        self.found.put((case, answers | {"tries": self._tries[case.key]}))


def work(cases: Queue, folder: Path, cache: Path, modes: Sequence[str]) -> None:
    """Run cases until none is left; a run that fails is replaced.

    Args:
      cases: queue of cases of all threads.
      folder: folder for the runs of this thread.
      cache: folder of the compilation cache.
      modes: modes in the order in which they run.
    """
    run = mode = None
    try:
        for number in itertools.count():
            if (case := cases.take(modes)) is None:
                break
            is_cold = case.kind == "compile"
            if run is not None and (mode != case.mode or is_cold):
                run.end()
                run = None
            if run is None:
                mode, own = case.mode, folder / f"run-{number}"
                run = Run(own, mode, own / "cold" if is_cold else cache)
            answers = None
            try:
                answers = question(run, case)
                run.go_on(1)
            except LateError as error:
                print(f"did not come about or go on: {case}: {error}", flush=True)
                run.end()
                run = None
            if answers is None:
                cases.give_back(case)
            else:
                cases.tell(case, answers)
    finally:
        if run is not None:
            run.end()
        cases.found.put(None)


def run_all(
    cases: Queue, folder: Path, cache: Path, num_runs: int
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Run the cases in several concurrent runs."""
    threads = [
        threading.Thread(
            target=work,
            args=(cases, folder / str(index), cache, MODES[:: 1 - 2 * (index % 2)]),
        )
        for index in range(num_runs)
    ]
    for thread in threads:
        thread.start()
    num_live = num_runs
    while num_live:
        found = cases.found.get()
        if found is None:
            num_live -= 1
        else:
            yield found
    for thread in threads:
        thread.join()


def write_report(lines: Sequence[dict[str, Any]], seed: int, num_runs: int) -> None:
    """Write the page."""
    faults = [one for one in lines if one["kind"] in KINDS]
    clean = [one for one in lines if one["kind"] in CLEAN]
    rows = []
    for mode in (*MODES, "both"):
        for kind in (*KINDS, "all"):
            some = [
                one
                for one in faults
                if mode in (one["mode"], "both") and kind in (one["kind"], "all")
            ]
            rows.append([mode, kind, *_counts(some)])
    ways = ("ranks", "without_proc")
    alarms = [
        [
            mode,
            kind,
            str(len(some)),
            *(str(sum(bool(one[way]) for one in some)) for way in ways),
        ]
        for mode in MODES
        for kind in CLEAN
        if (some := [x for x in clean if (x["mode"], x["kind"]) == (mode, kind)])
    ]
    wrong = [
        [
            *(one["mode"], one["kind"], one["where"], str(one["rank"])),
            *(str(one["ranks"]), one["reason"]),
        ]
        for one in faults
        if one["ranks"] != [one["rank"]]
    ]
    tables = [
        Table(
            title="Runs that stand still",
            text=_TEXT.format(
                num=len(faults),
                seed=seed,
                commits=", ".join(dict.fromkeys(one["commit"] for one in lines)),
                flags=" ".join(FLAGS),
                num_runs=num_runs,
                again=sum(one["tries"] > 1 for one in lines),
            ),
            header=(
                *("run", "kind", "cases", "right", "wrong", "nobody"),
                "right without /proc",
            ),
            rows=rows,
        ),
        Table(
            title="Moments at which nothing is wrong",
            text=f"{len(clean)} questions with the same limits; no rank may be named. "
            "`compile`: the first start, with an empty cache. `restart`: after "
            "SIGKILL of all, before the first step. `all save`, `one saves`: all "
            "ranks, or rank 0, save for 9 s. `all evaluate`: a batch takes 5.5 s. "
            "`slow step`: a rank sleeps 3.5 s before its step. The table counts "
            "questions at which a rank is named.",
            header=("run", "moment", "times", "named", "named without /proc"),
            rows=alarms,
        ),
        Table(
            title="Cases that are not right",
            text=f"{len(wrong)} of {len(faults)}.",
            header=("run", "kind", "place", "rank", "named", "reason"),
            rows=wrong,
        ),
    ]
    command = f"python -m scripts.observe.stuck_runs --seed {seed} --runs {num_runs}"
    write_page(PAGE, "Who holds up a real run", command, tables[: 2 + bool(wrong)])


_TEXT = (
    "{num} cases of seed {seed} on the commit {commits}: four processes, `{flags}`. "
    "One rank sleeps, or holds the interpreter lock in a system call, or takes part in "
    "an agreement that no other rank joins. Rank, phase (6 of 10 in a step, 2 in an "
    "evaluation, 2 at a save) and place are drawn. When nothing has moved for longer "
    "than the limits, `python -m mjax.observe stuck --step-s 5 --eval-s 7 --save-s 10 "
    "--json` is asked; right is the injected rank and no other one. `launcher`: "
    "`python -m mjax.launch`, which has limits of an hour here and asks the ranks for "
    "nothing. `without /proc`: the states of processes are hidden, as on another host; "
    "only files count. Then the stop ends, and the run goes on to the next case. (It "
    "must end within 30 s, when the sockets of gloo give up.) {num_runs} such runs "
    "share the machine. {again} questions needed a second run, because the first one "
    "ended or the stop did not come about."
)


def _counts(some: Sequence[dict[str, Any]]) -> list[str]:
    right = sum(one["ranks"] == [one["rank"]] for one in some)
    nobody = sum(not one["ranks"] for one in some)
    files = sum(one["without_proc"] == [one["rank"]] for one in some)
    return [*map(str, (len(some), right, len(some) - right - nobody, nobody, files))]


def main() -> int:
    """Run or continue; return 1 if a result is wrong or missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=7200.0)
    parser.add_argument("--more", action="store_true", help="go on with the log")
    parser.add_argument("--log", type=Path, default=BENCHMARKS_DIR / f"{PAGE}.jsonl")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--runs", type=int, default=1, help="beside each other")
    parser.add_argument("--no-page", action="store_true")
    args = parser.parse_args()
    if not args.more:
        args.log.write_text("")
    lines = [json.loads(line) for line in args.log.read_text().splitlines()]
    done = {(one["mode"], one["kind"], one["index"]) for one in lines}
    cases = [
        case
        for case in draw(args.seed)
        if case.mode in args.modes and case.key not in done
    ]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        left = Queue(cases, time.monotonic() + args.limit_s)
        for case, answers in run_all(left, Path(folder), cache, args.runs):
            cases.remove(case)
            line = dataclasses.asdict(case) | answers | {"commit": commit()}
            print(json.dumps(line), flush=True)
            lines.append(line)
            with args.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
    if not args.no_page:
        write_report(lines, args.seed, args.runs)
    faults = [one for one in lines if one["kind"] in KINDS]
    right = sum(one["ranks"] == [one["rank"]] for one in faults)
    named = [x["ranks"] + x["without_proc"] for x in lines if x["kind"] in CLEAN]
    print(f"{right} of {len(faults)} right, {len(cases)} cases are left")
    return int(bool(cases) or right < TARGET * len(faults) or any(named))


if __name__ == "__main__":
    sys.exit(main())
