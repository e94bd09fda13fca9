"""A trainer without jax that counts steps, saves, resumes, and fails on command.

    python tests/launch/fake_trainer.py --work-dir DIR [--distributed.process-id N] ...

`faults.json` in the work dir has the faults, {"generation:rank": [step, fault]}, and
`pace_s`, the seconds of a step. `EVAL: sleep` is a fault in that phase. A line
`rank generation step` is appended to rows.txt for each step. All ranks wait for each
other before each step, as in a collective, by files in the work dir.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from mjax.processes import progress
from mjax.processes.progress import Phase

NUM_STEPS, SAVE_EVERY = 24, 4


def flag(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def fail(what: str) -> None:
    match what:
        case "sleep":
            time.sleep(600)
        case "hold the lock":
            while True:  # a signal ends each sleep
                ctypes.PyDLL(None).sleep(600)
        case "write slowly":
            signal.signal(progress.STACKS_SIGNAL, write_slowly)
            time.sleep(600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _ if what.startswith("exit"):
            print(f"error: told to {what}", flush=True)
            os._exit(int(what.split()[1]))
        case _:
            os.kill(os.getpid(), getattr(signal, what))


def write_slowly(*_) -> None:
    """Write stacks in pieces, as faulthandler does, but with pauses."""
    file = os.open(os.environ[progress.STACKS_VARIABLE], os.O_APPEND | os.O_WRONLY)
    for piece in (
        "Thread 0x1 (most recent call first):\n",
        '  File "a.py',
        '", line 1',
    ):
        os.write(file, piece.encode())
        time.sleep(0.05)
    os.write(file, b" in slow\n")
    os.close(file)


def read_flags() -> None:
    """Refuse seed 13 at once, and seed 17 only when the run begins."""
    seed = flag("--seed", "0")
    if seed == "13" or (seed == "17" and "--print-config" not in sys.argv):
        print(f"error: --seed must not be {seed}", file=sys.stderr)
        sys.exit(2)
    if "--print-config" in sys.argv:
        print("{}")
        sys.exit(0)


def main() -> None:
    read_flags()
    progress.show_stacks_on_signal()
    marks = progress.from_environment()
    work_dir = Path(flag("--work-dir", "."))
    rank = int(flag("--distributed.process-id", "0"))
    num_ranks = int(flag("--distributed.num-processes", "1"))
    generation = int(os.environ[progress.GENERATION_VARIABLE])
    faults = json.loads((work_dir / "faults.json").read_text())
    at, what = faults.get(f"{generation}:{rank}", (-1, ""))
    is_stopped = []
    signal.signal(signal.SIGTERM, lambda *_: is_stopped.append(1))
    marks.mark(Phase.RESTORE)
    saved = work_dir / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    is_first = True
    while step < NUM_STEPS and not is_stopped:
        marks.mark(Phase.STEP, step)
        if step == at:
            phase, _, then = what.rpartition(": ")
            if phase:
                marks.mark(Phase[phase], step)
            fail(then)
        (work_dir / f"at-{generation}-{step}-{rank}").touch()
        if not wait_for_others(work_dir, generation, step, num_ranks):
            break
        time.sleep(faults["pace_s"])
        with (work_dir / "rows.txt").open("a") as rows:
            rows.write(f"{rank} {generation} {step}\n")
        step += 1
        if is_first:
            marks.ended_first_step()
            is_first = False
        marks.mark(Phase.STEP, step)
        if step % SAVE_EVERY == 0:
            marks.mark(Phase.SAVE, step)
            if rank == 0:
                saved.with_suffix(".new").write_text(str(step))
                saved.with_suffix(".new").replace(saved)
            marks.saved(step)
    if step < NUM_STEPS:
        (work_dir / f"stopped-{generation}-{rank}").touch()
        if rank == 0:
            saved.write_text(str(step))
    marks.mark(Phase.EXIT)
    sys.exit(42 if step < NUM_STEPS else 0)


def wait_for_others(work_dir: Path, generation: int, step: int, num: int) -> bool:
    """Return whether all ranks arrived or one was stopped before this step.

    Calls no other function in Python: the stacks of ranks that wait must be alike.
    """
    names = {f"at-{generation}-{step}-{rank}" for rank in range(num)}
    prefix = f"stopped-{generation}-"
    while True:
        found = os.listdir(work_dir)
        if names.issubset(found):
            return True
        if [name for name in found if name.startswith(prefix)]:
            return False
        time.sleep(0.005)


if __name__ == "__main__":
    main()
