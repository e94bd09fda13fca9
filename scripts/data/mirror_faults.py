"""Faults of hosts, disks and the remote of a mirror; a part of `data_mirror`.

Each case starts four processes on one file, plants a fault, and lets the hosts that are
not at fault read the whole file and compare its SHA-256. Output: rows of a table.
"""

import dataclasses
import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.data import mirror_hosts as hosts
from scripts.data.mirror_hosts import DOWN, HOSTS, NAME, Settings

BAD = "b"
"""The host at fault."""
GOOD = tuple(host for host in HOSTS if host != BAD)
BLOCK_BYTES = 1 << 18
NUM_BYTES = 40 * BLOCK_BYTES + 12345
MAX_S = 60.0
"""Bound on the longest read."""


class Run:
    """Four hosts in processes, and the folder of all of them."""

    def __init__(self, folder: Path, content: bytes) -> None:
        """Start no process yet."""
        self.folder = folder
        self.told = {
            "folder": str(folder),
            "ports": hosts.free_ports(),
            "num_bytes": len(content),
            "block_bytes": BLOCK_BYTES,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, which: Sequence[str] = HOSTS, **changes: object) -> None:
        """Start hosts, with changes of their settings."""
        for host in which:
            told = Settings(host=host, **{**self.told, **changes})
            self.processes[host] = hosts.start_worker(told)
        hosts.expect(self.processes, which, "up")

    def tell(self, which: Sequence[str], word: str) -> None:
        """Write a word to hosts."""
        hosts.tell(self.processes, which, word)

    def fill(self, which: Sequence[str] = HOSTS) -> None:
        """Let hosts fill their disks."""
        self.tell(which, "fill")
        hosts.expect(self.processes, which, "filled")

    def kill(self, which: Sequence[str] = HOSTS) -> None:
        """End hosts with SIGKILL."""
        for host in which:
            hosts.kill(self.processes.pop(host))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the host at fault."""
        self.processes[BAD].send_signal(number)

    def blocks(self, host: str) -> list[Path]:
        """Return the blocks on the disk of a host."""
        return sorted((self.folder / host).glob("*.block"))

    def read(self, which: Sequence[str]) -> "Found":
        """Let hosts read the whole file."""
        self.tell(which, "read")
        hosts.expect(self.processes, which, "half")
        answers = [json.loads(hosts.line(self.processes[host])) for host in which]
        sent = sum(hosts.remote_bytes(self.folder / "log").values())
        return Found(
            num_reads=sum(answer["reads"] for answer in answers),
            num_failed=sum(answer["failed"] for answer in answers),
            num_wrong=sum(a["sha256"] != self.told["sha256"] for a in answers),
            remote=sent / self.told["num_bytes"],
            slowest_s=max(answer["slowest_s"] for answer in answers),
            error=next((a["error"] for a in answers if a["error"]), ""),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a case showed."""

    num_reads: int
    num_failed: int
    num_wrong: int
    """Hosts whose content has another SHA-256 than the file."""
    remote: float
    """Bytes of the remote that were read, per byte of the file."""
    slowest_s: float
    error: str


def _stopped_when_reading(run: Run) -> Found:
    run.start()
    run.fill()
    run.signal(signal.SIGSTOP)
    return run.read(GOOD)


def _stopped_when_filling(run: Run) -> Found:
    run.start()
    run.tell(HOSTS, "fill")
    while (run.folder / "log").read_text().count("\n") < 10:
        time.sleep(0.005)
    run.signal(signal.SIGSTOP)
    hosts.expect(run.processes, GOOD, "filled")
    return run.read(GOOD)


def _misbehaves(how: str) -> Callable[[Run], Found]:
    def act(run: Run) -> Found:
        run.start()
        run.tell([BAD], how)
        hosts.expect(run.processes, [BAD], "up")
        run.fill(GOOD)
        return run.read(GOOD)

    return act


def _empty_disk(run: Run) -> Found:
    run.start()
    run.fill()
    run.kill([BAD])
    shutil.rmtree(run.folder / BAD)
    run.start([BAD])
    return run.read(HOSTS)


def _damaged_disk(run: Run) -> Found:
    run.start()
    run.fill()
    run.kill([BAD])
    for path in run.blocks(BAD):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    run.start([BAD])
    return run.read(HOSTS)


def _full_disk(run: Run) -> Found:
    run.start(GOOD)
    run.start([BAD], max_file_bytes=BLOCK_BYTES // 2)
    run.fill()
    return run.read(HOSTS)


def _small_limit(run: Run) -> Found:
    run.start(limit_bytes=8 * BLOCK_BYTES)
    run.fill()
    return run.read(HOSTS)


def _other_list(run: Run) -> Found:
    run.start(GOOD)
    ports = {h: p for h, p in run.told["ports"].items() if h != "c"}
    run.start([BAD], ports=ports)
    run.fill()
    return run.read(HOSTS)


def _two_runs(run: Run) -> Found:
    run.start()
    other = Run(run.folder, b"")
    other.told = {**run.told, "ports": other.told["ports"]}
    try:
        other.start(token="of another run")
        run.tell(HOSTS, "fill")
        other.fill()
        hosts.expect(run.processes, HOSTS, "filled")
        found = other.read(HOSTS)
    finally:
        other.kill([*other.processes])
    own = run.read(HOSTS)
    return dataclasses.replace(
        own,
        num_reads=own.num_reads + found.num_reads,
        num_failed=own.num_failed + found.num_failed,
        num_wrong=own.num_wrong + found.num_wrong,
        slowest_s=max(own.slowest_s, found.slowest_s),
    )


def _remote_down(run: Run) -> Found:
    run.start()
    run.fill()
    run.kill()
    (run.folder / DOWN).touch()
    run.start(GOOD)
    return run.read(GOOD)


def _block_lost(run: Run) -> Found:
    run.start()
    run.fill()
    name = run.blocks(BAD)[0].name
    for host in HOSTS:
        (run.folder / host / name).unlink(missing_ok=True)
    (run.folder / DOWN).touch()
    return run.read(HOSTS)


CASES: dict[str, Callable[[Run], Found]] = {
    "a host is stopped while all read": _stopped_when_reading,
    "a host is stopped while all fill": _stopped_when_filling,
    "a host sends half of each block": _misbehaves("cut"),
    "a host sends wrong bytes with their SHA-256": _misbehaves("lie"),
    "a host comes back with an empty disk": _empty_disk,
    "a host comes back with a wrong byte in each block": _damaged_disk,
    "the disk of a host is full": _full_disk,
    "a limit of 8 blocks on each host": _small_limit,
    "a host knows only three of the four": _other_list,
    "two runs share the folders": _two_runs,
    "the remote and a host are down, all is kept": _remote_down,
    "the remote is down, one block is on no disk": _block_lost,
}
LOST = "the remote is down, one block is on no disk"
"""The case whose reads must fail."""


def measure(name: str) -> Found:
    """Run one case."""
    content = random.Random(name).randbytes(NUM_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), content)
        (run.folder / NAME).write_bytes(content)
        (run.folder / "log").touch()
        try:
            return CASES[name](run)
        finally:
            run.kill([*run.processes])


def problems(name: str, found: Found) -> list[str]:
    """Return what a case shows against the mirror."""
    is_lost = name == LOST
    wrong = {
        f"{found.num_failed} reads failed": bool(found.num_failed) != is_lost,
        f"{found.num_wrong} hosts read other content": found.num_wrong and not is_lost,
        f"a read took {found.slowest_s:.0f} s": found.slowest_s > MAX_S,
        f"the error says {found.error!r}": is_lost
        and not re.match(rf"host \w cannot read .* of {NAME} from", found.error),
    }
    return [f"{name}: {what}" for what, is_so in wrong.items() if is_so]


def row(name: str, found: Found) -> list[str]:
    """Return the row of a case."""
    return [
        name,
        f"{found.num_reads:,}",
        str(found.num_failed),
        "not compared" if name == LOST else f"{found.num_wrong} hosts differ",
        f"{found.remote:.2f}",
        f"{found.slowest_s:.1f}",
    ]
