"""Inject faults into one run, then break down its time with the ledger.

    python -m scripts.observe.ledger_run --faults 50 --seed 0 --work-dir DIR
    python -m scripts.observe.ledger_run --work-dir DIR --read

Input: a number of faults, of the kinds of `scripts.faults.fault_kinds`. Output: the
work dir of one run of the `debug` recipe on two hosts and a spare, with `watched.json`,
the observations of this process by its own clock: start and end of the drivers, and the
result of each fault. `--read` writes docs/benchmarks/observe_ledger.md, which compares
the ledger of `mjax.observe` with these observations. Exits with 1 if the buckets do not
add up. The checkpoints are on a small ext4, which needs root to mount.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from scripts.evidence import commit
from scripts.faults.cut_off import CutOff
from scripts.faults.fault_kinds import KINDS, Found, Kind, suffer
from scripts.faults.launch_faults import HOSTS, RUN, SPARES, XLA_FLAGS
from scripts.faults.launched import StuckError
from scripts.faults.small_disks import ext4
from scripts.observe.ledger_page import WATCHED, Watched, write

_STEPS = 20_000
"""More steps than are run: the run is stopped after the last fault."""
_STORE_MB = 64
_KEEP_S = 0.25
_LOOK_S = 0.01
_LAST_BYTES = 4096
"""Bytes read from the end of metrics.jsonl: more than one row has."""


class Kept(CutOff):
    """A launch whose agents are restarted when they end, as in a cluster."""

    def __init__(self, work_dir: Path, flags: list[str]) -> None:
        """Start it, and record the time."""
        self.drivers: list[tuple[float, float, int]] = []
        self.rows: list[tuple[float, int]] = []
        self._agents: dict[str, Any] = {}
        self._is_over = threading.Event()
        self._run_dir = work_dir
        super().__init__(work_dir, HOSTS, SPARES, flags)
        threading.Thread(target=self._keep, daemon=True).start()
        threading.Thread(target=self._watch_rows, daemon=True).start()

    def start(self) -> None:
        """Start the driver, and record its start and end."""
        began_s = time.monotonic()
        super().start()
        process = self.process

        def note() -> None:
            code = process.wait()
            self.drivers.append((began_s, time.monotonic(), code))

        threading.Thread(target=note, daemon=True).start()

    def popen(self, command: list[str]) -> Any:
        """Start a process; an agent is identified by its host."""
        process = super().popen(command)
        if "--address" in command:
            self._agents[command[command.index("--host") + 1]] = process
            process.argv = command  # pyright: ignore[reportAttributeAccessIssue]
        return process

    def _keep(self) -> None:
        while not self._is_over.wait(_KEEP_S):
            for host, process in [*self._agents.items()]:
                if process.poll() is not None:
                    new = self.popen(process.argv)
                    path = self._run_dir / "launch" / f"agent-{host}.pid"
                    path.write_text(str(new.pid))

    def _watch_rows(self) -> None:
        """Record each change of the step of the last row, with its time."""
        path, last = self._run_dir / "metrics.jsonl", 0
        while not self._is_over.wait(_LOOK_S):
            try:
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _LAST_BYTES))
                    lines = file.read().split(b"\n")[:-1]
            except OSError:
                continue
            step = json.loads(lines[-1])["step"] if lines else 0
            if step != last:
                last = step
                self.rows.append((time.monotonic(), step))

    def finish(self) -> None:
        """Let the run save and end, and restart no agent."""
        self._is_over.set()
        self.stop()

    def end(self) -> None:
        """Kill all remaining processes."""
        self._is_over.set()
        super().end()


def draw(number: int, rng: random.Random) -> list[Kind]:
    """Draw kinds, all equally often, in a random order; none needs containers."""
    kinds = [kind for kind in KINDS if kind.place != "containers"]
    drawn = [kinds[index % len(kinds)] for index in range(number)]
    rng.shuffle(drawn)
    return drawn


def run(args: argparse.Namespace) -> Watched:
    """Inject every fault into one run; return the observations."""
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    os.environ["XDG_CACHE_HOME"] = str(args.work_dir.absolute() / "cache")
    rng, found = random.Random(args.seed), list[Found]()
    store = args.work_dir / "store"
    kinds = draw(args.faults, rng)
    with ext4(store, _STORE_MB):
        flags = [*RUN, "--steps", str(_STEPS), "--ckpt.dir", str(store / "run")]
        launched = Kept(args.work_dir / "run", flags)
        began_s = time.monotonic()
        try:
            launched.wait_for_row(1)
            for number, kind in enumerate(kinds):
                if time.monotonic() > began_s + args.limit_s:
                    break
                found.append(suffer(launched, kind, HOSTS, rng, 0))
                told = dataclasses.asdict(found[-1])
                print(f"{time.monotonic() - began_s:.0f} s, {number}: {told}")
                sys.stdout.flush()
            launched.finish()
        except StuckError as error:
            print(f"stuck: {error}: {launched.events()[-1]}", file=sys.stderr)
            raise
        finally:
            launched.end()
    time.sleep(0.1)  # for the last record
    return Watched(
        commit=commit(),
        seed=args.seed,
        num_asked=args.faults,
        drivers=sorted(launched.drivers),
        rows=launched.rows,
        found=found,
    )


def main() -> int:
    """Run or read; return 1 if the buckets do not add up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=440.0, help="for faults")
    parser.add_argument("--read", action="store_true", help="run nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    path = args.work_dir / WATCHED
    if not args.read:
        args.work_dir.mkdir(parents=True)
        watched = run(args)
        path.write_text(json.dumps(dataclasses.asdict(watched), indent=1) + "\n")
    known = json.loads(path.read_text())
    known["found"] = [Found(**one) for one in known["found"]]
    page, is_good = write(args.work_dir / "run", Watched(**known))
    print(page)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
