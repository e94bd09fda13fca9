"""Make every phase of a save fail on one of two processes, and kill one in each phase.

    python -m scripts.faults.save_faults

Two processes over gloo take small steps together and save (`mjax.ckpt`). In the first
save that should replace a good step, a phase fails on process 0, on process 1 or on
both: all must know at once, training must go on, the step before must stay intact, and
the retry must commit. Then pairs of processes are started of which one kills itself
(SIGKILL) in a phase. Writes docs/benchmarks/save_faults.md and ends with 1 if a promise
was not kept.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.ckpt import arrays, orbax_save, saving
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.phases import Phases
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from mjax.mesh.devices import simulate_devices
from mjax.processes import distributed
from mjax.processes.config import DistributedConfig
from scripts.evidence import REPOSITORY, Table, commit, write_page

COMMAND = "python -m scripts.faults.save_faults"
KNOWN_LIMIT_S = 2.0
"""Seconds within which a failure must be known on all processes."""
HANG_LIMIT_S = 2
"""Value of --ckpt.timeout-s in the cases in which a store hangs."""
GOOD, NEWER = 1, 2
GOOD_AT, NEWER_AT, NUM_STEPS, STEP_S = 10, 60, 300, 0.01
PATIENCE_S = 120.0
FAULTS = (
    *(("folder", "0"), ("written", "0"), ("written", "1"), ("written", "01")),
    *(("merged", "0"), ("checked", "0"), ("checked", "1"), ("checked", "01")),
    *(("committed", "0"), ("hangs", "1")),
)
KILLS = (
    *(("folder", 0, "after"), ("written", 1, "before"), ("written", 0, "after")),
    *(("merged", 0, "after"), ("checked", 1, "before"), ("checked", 0, "after")),
    *(("committed", 0, "before"), ("committed", 0, "after")),
)


def main() -> int:
    """Run everything, write the page, return 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", type=int, help="be one of the two processes")
    parser.add_argument("--port", type=int, help="of process 0")
    parser.add_argument("--folder", type=Path, help="to work in")
    parser.add_argument("--faults", help="numbers in FAULTS, 0,3 say; else all")
    parser.add_argument("--kill", help="PHASE:RANK:before|after, instead of faults")
    args = parser.parse_args()
    if args.rank is not None:
        faults = [FAULTS[int(n)] for n in (args.faults or "").split(",") if n]
        return take_part(args.rank, args.port, args.folder, faults, args.kill)
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        found = fail_each(Path(folder), range(len(FAULTS)))
    killed = []
    for phase, rank, moment in KILLS:
        with tempfile.TemporaryDirectory() as folder:
            killed.append(kill_once(Path(folder), phase, rank, moment))
        print(killed[-1], flush=True)
    page = write_page(
        "save_faults", "Saves that fail", COMMAND, tables(found, killed, at)
    )
    print(page)
    return int(any(row[-1] != "nothing" for row in [*found, *killed]))


# ----------------------------------------------------------------- one of the processes


def take_part(
    rank: int,
    port: int,
    folder: Path,
    faults: Sequence[tuple[str, str]],
    kill: str | None,
) -> int:
    """Train and save together with the other process; write observations to a file."""
    simulate_devices(1)
    distributed.start(
        DistributedConfig(
            coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=rank
        )
    )
    if kill is not None:
        phase, victim, moment = kill.split(":")
        with killed_in(phase, rank == int(victim), moment):
            train(folder / "kill", lambda: contextlib.nullcontext(), Seen(), 600)
        return 0
    seen = []
    for phase, ranks in faults:
        one = Seen()
        timeout_s = HANG_LIMIT_S if phase == "hangs" else 600
        fault = Fault(phase, str(rank) in ranks, one)
        train(folder / f"{phase}-{ranks}", fault.happens, one, timeout_s)
        seen.append(dataclasses.asdict(one))
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    return 0


@dataclasses.dataclass
class Seen:
    """Observations of a fault by one process; times are readings of the host's
    clock."""

    failed_at_s: list[float] = dataclasses.field(default_factory=list)
    known_at_s: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    save_s: list[float] = dataclasses.field(default_factory=list)
    steps_s: list[float] = dataclasses.field(default_factory=list)
    is_saved: bool = False


def train(
    work_dir: Path,
    fault: Callable[[], contextlib.AbstractContextManager[None]],
    seen: Seen,
    timeout_s: int,
) -> None:
    """Take steps, save twice, the second time with a fault."""
    work_dir.mkdir(exist_ok=True)
    checkpoints = Checkpoints(work_dir, CkptConfig(every=1, timeout_s=timeout_s))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    whole = np.arange(1 << 20, dtype=np.float32).reshape(2, -1)
    state = {"a": jax.make_array_from_callback(whole.shape, spec, lambda i: whole[i])}
    step = jax.jit(lambda tree: {"a": tree["a"] + jnp.mean(tree["a"])})
    jax.block_until_ready(step(state))
    with contextlib.ExitStack() as stack:
        for number in range(NUM_STEPS):
            started_s = time.perf_counter()
            state = jax.block_until_ready(step(state))
            time.sleep(STEP_S)
            if number == NEWER_AT:
                stack.enter_context(fault())
            saved_s = 0.0
            if number in (GOOD_AT, NEWER_AT):
                name = GOOD if number == GOOD_AT else NEWER
                before_s = time.perf_counter()
                checkpoints.save(name, lambda state=state: state, {})
                saved_s = time.perf_counter() - before_s
                seen.save_s.append(saved_s)
            if number == NEWER_AT - 1:
                assert checkpoints.wait()
            seen.steps_s.append(time.perf_counter() - started_s - saved_s)
            checkpoints.attempts()
        seen.is_saved = checkpoints.wait()
    checkpoints.close()


@dataclasses.dataclass
class Fault:
    """Something that fails once, on this process or not."""

    phase: str
    is_here: bool
    seen: Seen

    @contextlib.contextmanager
    def happens(self) -> Iterator[None]:
        """Make the next attempt fail, and note when the failure is known."""
        writer: Any = saving.Writer
        attempt = writer._try
        heal = self._spoil() if self.is_here else lambda: None

        def noted(*args: Any) -> Any:
            result = attempt(*args)
            if result.error is not None:
                self.seen.known_at_s.append(time.monotonic())
                self.seen.errors.append(result.error)
                heal()
            return result

        writer._try = noted
        try:
            yield
        finally:
            writer._try = attempt
            heal()

    def _spoil(self) -> Callable[[], None]:
        """Make the phase fail; return a function that repairs it."""
        if self.phase == "written":  # a file that is too large, as on a full disk
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            self._patch(arrays, "write_part", lambda act, *a: self._noting(act, *a))
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if self.phase == "hangs":
            return self._patch(arrays, "write_part", self._hanging)
        owner, name = {
            "folder": (Store, "begin"),
            "merged": (arrays, "merge_parts"),
            "checked": (orbax_save, "_read_back"),
            "committed": (Store, "commit"),
        }[self.phase]
        return self._patch(owner, name, self._failing)

    def _patch(
        self, owner: Any, name: str, instead: Callable[..., Any]
    ) -> Callable[[], None]:
        act = getattr(owner, name)
        setattr(owner, name, lambda *args: instead(act, *args))
        return lambda: setattr(owner, name, act)

    def _noting(self, act: Callable[..., Any], *args: Any) -> Any:
        try:
            return act(*args)
        except Exception:
            self.seen.failed_at_s.append(time.monotonic())
            raise

    def _failing(self, act: Callable[..., Any], *args: Any) -> None:
        self.seen.failed_at_s.append(time.monotonic())
        raise OSError("input/output error")

    def _hanging(self, act: Callable[..., Any], *args: Any) -> Any:
        self.seen.failed_at_s.append(time.monotonic())
        time.sleep(HANG_LIMIT_S + 1)
        return act(*args)


@contextlib.contextmanager
def killed_in(phase: str, is_here: bool, moment: str) -> Iterator[None]:
    """Kill this process in a phase of the second save."""
    real = {"lead": Phases.lead, "together": Phases.together}
    saves = []

    def striking(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Phases, name: str, work: Callable[[], Any]) -> Any:
            saves.extend([name] if name == "folder" else [])
            strikes = is_here and name == phase and len(saves) == NEWER

            def struck() -> Any:
                if strikes and moment == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                result = work()
                if strikes:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return act(self, name, struck)

        return call

    for name, act in real.items():
        setattr(Phases, name, striking(act))
    yield


# ------------------------------------------------------------------------- both of them


def start_pair(folder: Path, *flags: str) -> list[subprocess.Popen]:
    """Start the two processes; their output goes to files in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in (0, 1):
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "scripts.faults.save_faults"),
                        *("--rank", str(rank), "--port", str(port)),
                        *("--folder", str(folder), *flags),
                    ],
                    cwd=REPOSITORY,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def fail_each(folder: Path, numbers: Sequence[int]) -> list[list[str]]:
    """Cause faults in one pair of processes; return the rows of the table."""
    processes = start_pair(folder, "--faults", ",".join(map(str, numbers)))
    try:
        codes = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if codes != [0, 0]:
        logs = [(folder / f"{rank}.log").read_text()[-3000:] for rank in (0, 1)]
        raise RuntimeError(f"the processes ended with {codes}:\n" + "\n".join(logs))
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    rows = []
    faults = [FAULTS[number] for number in numbers]
    for (phase, ranks), *both in zip(faults, *seen, strict=True):
        store = Store(folder / f"{phase}-{ranks}" / "checkpoints")
        rows.append(fault_row(phase, ranks, [Seen(**one) for one in both], store))
        print(rows[-1], flush=True)
    return rows


def fault_row(phase: str, ranks: str, seen: list[Seen], store: Store) -> list[str]:
    """Return the cells of one fault; the last cell names the requirements not met."""
    failed_s = max(time_s for one in seen for time_s in one.failed_at_s[:1])
    known_s = [one.known_at_s[0] - failed_s for one in seen]
    limit_s = KNOWN_LIMIT_S + (HANG_LIMIT_S if phase == "hangs" else 0)
    usual_s = [statistics.median(one.steps_s[: NEWER_AT - 1]) for one in seen]
    during = [step_s for one in seen for step_s in one.steps_s[NEWER_AT:]]
    wrong = damage(store, [GOOD, NEWER])
    if phase != "hangs" and seen[0].errors[0] != seen[1].errors[0]:
        wrong.append(f"the processes differ: {[one.errors[0] for one in seen]}")
    if not all(one.is_saved for one in seen):
        wrong.append("the retry did not commit")
    if phase == "hangs":  # known there only when its store answers
        known_s = known_s[:1]
    if max(known_s) > limit_s:
        wrong.append(f"known after {max(known_s):.2f} s only")
    return [
        *(phase, " and ".join(ranks)),
        re.sub(r'"\S*/checkpoints\S*', "FILE", seen[0].errors[0])[:80],
        ", ".join(f"{1e3 * one:.0f} ms" for one in known_s),
        f"{1e3 * max(one.save_s[-1] for one in seen):.0f} ms",
        f"{1e3 * max(usual_s):.0f} ms",
        f"{1e3 * statistics.median(during):.0f} ms",
        f"{1e3 * max(during):.0f} ms",
        "; ".join(wrong) or "nothing",
    ]


def kill_once(folder: Path, phase: str, rank: int, moment: str) -> list[str]:
    """Start a pair of processes, one of which kills itself; return its table row."""
    processes = start_pair(folder, "--kill", f"{phase}:{rank}:{moment}")
    try:
        code = processes[rank].wait(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    store = Store(folder / "kill" / "checkpoints")
    is_renamed = (phase, moment) == ("committed", "after")
    wrong = damage(store, [GOOD, NEWER] if is_renamed else [GOOD])
    if code != -signal.SIGKILL:
        log = (folder / f"{rank}.log").read_text()[-2000:]
        wrong.append(f"it ended with {code} before it was killed: {log}")
    left = store.unfinished()
    return [
        *(f"{moment} {phase}", str(rank), ", ".join(map(str, store.steps()))),
        *("yes" if left else "no", "; ".join(wrong) or "nothing"),
    ]


def damage(store: Store, expected: list[int]) -> list[str]:
    """Return which steps are missing or damaged."""
    wrong = [] if store.steps() == expected else [f"steps {store.steps()}"]
    for step in store.steps():
        try:
            SavedStep(store.path(step)).verify()
        except (RuntimeError, ValueError) as error:
            wrong.append(f"step {step}: {error}")
    return [*wrong, *store.quarantined()]


# --------------------------------------------------------------------------- the report


def tables(found: list[list[str]], killed: list[list[str]], at: str) -> list[Table]:
    """Say what was found on a commit."""
    load = os.getloadavg()[0]
    return [
        Table(
            title="A phase that fails",
            text=(
                f"On commit {at}, load average {load:.0f} at the end. Two processes of "
                "one device each, 4 MB of state, a step is one reduction over gloo "
                f"and {1e3 * STEP_S:.0f} ms of sleep. *Written* fails by RLIMIT_FSIZE, "
                f"*hangs* is a write that takes {HANG_LIMIT_S + 1} s with "
                f"--ckpt.timeout-s {HANG_LIMIT_S}; the other phases raise OSError. "
                "*Known*: from the (last) failure to the end of the attempt, on "
                "processes 0 and 1; the hanging process learns it when its store "
                "answers. *save()*: the time of the call on the training thread, "
                "including the host copy. *Wrong*: the failure is not known after "
                f"{KNOWN_LIMIT_S:.0f} s, the step before lost or damaged, the retry "
                "not committed, a verdict that differs."
            ),
            header=(
                *("phase", "process", "verdict", "known after", "save()"),
                *("step before", "step meanwhile", "longest", "wrong"),
            ),
            rows=found,
        ),
        Table(
            title="A process killed in a phase",
            text=(
                "The process kills itself with SIGKILL at the beginning or the end of "
                f"its part of a phase of the save of step {NEWER}; step {GOOD} was "
                "saved before."
            ),
            header=("moment", "process", "steps", "unfinished folder", "wrong"),
            rows=killed,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
