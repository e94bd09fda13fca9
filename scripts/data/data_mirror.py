"""Lose one of four hosts of a mirror, and count failed reads and remote bytes.

    python -m scripts.data.data_mirror

Four processes on this machine share a remote file; three of them keep each block, in
folders of their own, and serve it on a port of loopback. The remote is a file on disk
that logs what is read. One process is killed with SIGKILL: while all hosts read the
file after a fill, or in the middle of the fill. Also places blocks for many sets of
names, with the mirror and with hashing alone. Writes docs/benchmarks/data_mirror.md;
returns 1 if a read failed, content differs, or a bound is passed.
"""

import argparse
import bisect
import collections
import dataclasses
import hashlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from mjax.data.mirror import placement
from mjax.data.mirror.config import MirrorConfig
from mjax.data.mirror.mirror import Mirror, RemoteFile
from scripts.evidence import REPOSITORY, Table, write_page

HOSTS: tuple[str, ...] = ("a", "b", "c", "d")
LOST = "b"
NUM_REPLICAS = 3
BOUND = 0.1
"""Largest deviation of a host from the mean."""
RING_POINTS = 100
NAME = "f"
Phase = Literal["reading", "filling"]
"""What all hosts do when one is killed."""
Placement = Mapping[str, Sequence[str]]
"""Hosts of each block; the first reads the remote."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker process is told."""

    folder: str
    host: str
    ports: dict[str, int]
    num_bytes: int
    block_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a case showed."""

    phase: Phase
    num_reads: int
    """By the hosts that were not killed."""
    num_failed: int
    num_wrong: int
    """Hosts whose content has another SHA-256 than the file."""
    before: dict[str, int]
    """Remote bytes that each host has read when one is killed."""
    after: dict[str, int]
    kept: dict[str, int]
    """Bytes in the folder of each host before the first kill."""
    num_bytes: int
    most_reads: int
    """Of the remote, of one block."""


class LoggedRemote:
    """A file on disk; each read is a line of a log that all processes append to."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._folder = settings, Path(settings.folder)

    @property
    def files(self) -> list[RemoteFile]:
        """Return the one file."""
        told = self._settings
        return [RemoteFile(NAME, told.num_bytes, f"sha256:{told.sha256}")]

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of the file."""
        with (self._folder / "log").open("a") as log:
            log.write(f"{self._settings.host} {start} {length}\n")
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(length)


def work(settings: Settings) -> None:
    """Be one host: fill or read on each line of stdin, answer in lines of JSON."""
    config = MirrorConfig(
        addresses={h: ("127.0.0.1", port) for h, port in settings.ports.items()},
        token="of this run",
        num_replicas=NUM_REPLICAS,
        block_bytes=settings.block_bytes,
    )
    folder = Path(settings.folder) / settings.host
    mirror = Mirror(settings.host, LoggedRemote(settings), config, folder)
    mirror.serve()
    print("up", flush=True)
    for line in sys.stdin:
        if line == "fill\n":
            mirror.fill()
            print("filled", flush=True)
        else:
            print(json.dumps(read_all(mirror, settings)), flush=True)


def read_all(mirror: Mirror, settings: Settings) -> dict[str, int | str]:
    """Read the file in pieces that do not end where blocks end."""
    digest, num_reads, num_failed = hashlib.sha256(), 0, 0
    piece = settings.block_bytes * 3 // 10
    for start in range(0, settings.num_bytes, piece):
        if num_reads == settings.num_bytes // piece // 2:
            print("half", flush=True)
        num_reads += 1
        try:
            digest.update(mirror.read_range(NAME, start, piece))
        except OSError as error:
            print(f"host {mirror.host}: {error}", file=sys.stderr)
            num_failed += 1
    return {"sha256": digest.hexdigest(), "reads": num_reads, "failed": num_failed}


def measure(phase: Phase, folder: Path, num_bytes: int, block_bytes: int) -> Found:
    """Start four hosts, kill one in a phase, and let the others read all."""
    content = random.Random(0).randbytes(num_bytes)
    (folder / NAME).write_bytes(content)
    log = folder / "log"
    log.touch()
    told = {
        "folder": str(folder),
        "ports": free_ports(),
        "num_bytes": num_bytes,
        "block_bytes": block_bytes,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    hosts = {h: start_worker(Settings(host=h, **told)) for h in HOSTS}
    left = [h for h in HOSTS if h != LOST]
    try:
        expect(hosts, HOSTS, "up")
        tell(hosts, HOSTS, "fill")
        if phase == "filling":
            num_blocks = -(-num_bytes // block_bytes)
            while log.read_text().count("\n") < num_blocks // 2:
                time.sleep(0.01)
            before, kept = remote_bytes(log), kept_bytes(folder)
            kill(hosts[LOST])
            expect(hosts, left, "filled")
            tell(hosts, left, "read")
            expect(hosts, left, "half")
        else:
            expect(hosts, HOSTS, "filled")
            before, kept = remote_bytes(log), kept_bytes(folder)
            tell(hosts, HOSTS, "read")
            expect(hosts, [LOST], "half")
            kill(hosts[LOST])
            expect(hosts, left, "half")
        answers = [json.loads(line(hosts[h])) for h in left]
    finally:
        for process in hosts.values():
            kill(process)
    reads = collections.Counter(one.split()[1] for one in log.read_text().splitlines())
    return Found(
        phase=phase,
        num_reads=sum(answer["reads"] for answer in answers),
        num_failed=sum(answer["failed"] for answer in answers),
        num_wrong=sum(answer["sha256"] != told["sha256"] for answer in answers),
        before=before,
        after=remote_bytes(log),
        kept=kept,
        num_bytes=num_bytes,
        most_reads=max(reads.values()),
    )


def free_ports() -> dict[str, int]:
    """Return a port for each host that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in HOSTS]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return dict(zip(HOSTS, ports, strict=True))


def start_worker(settings: Settings) -> subprocess.Popen[str]:
    """Start a host in a process of its own."""
    command = [sys.executable, "-m", "scripts.data.data_mirror", "--worker"]
    return subprocess.Popen(
        [*command, json.dumps(dataclasses.asdict(settings))],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process.

    Raises:
      RuntimeError: it has ended.
    """
    assert process.stdout is not None
    found = process.stdout.readline()
    if not found:
        raise RuntimeError(f"a host has ended with exit code {process.wait()}")
    return found.strip()


def expect(
    hosts: Mapping[str, subprocess.Popen[str]], which: Iterable[str], word: str
) -> None:
    """Wait until each of these hosts has written a word."""
    for host in which:
        found = line(hosts[host])
        if found != word:
            raise RuntimeError(f"host {host} wrote {found!r} instead of {word!r}")


def tell(
    hosts: Mapping[str, subprocess.Popen[str]], which: Iterable[str], word: str
) -> None:
    """Write a word to each of these hosts."""
    for host in which:
        pipe = hosts[host].stdin
        assert pipe is not None
        pipe.write(f"{word}\n")
        pipe.flush()


def kill(process: subprocess.Popen[str]) -> None:
    """End a process with SIGKILL and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def remote_bytes(log: Path) -> dict[str, int]:
    """Return how many bytes of the remote each host has read."""
    found = dict.fromkeys(HOSTS, 0)
    for one in log.read_text().splitlines():
        host, _, length = one.split()
        found[host] += int(length)
    return found


def kept_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes of the blocks in the folder of each host."""
    return {
        host: sum(path.stat().st_size for path in (folder / host).glob("*.block"))
        for host in HOSTS
    }


def deviation(counts: Iterable[int]) -> float:
    """Return the largest relative distance from the mean."""
    found = [*counts]
    mean = sum(found) / len(found)
    return max(abs(count / mean - 1) for count in found)


def deviations(table: Placement) -> tuple[float, float]:
    """Return the deviation of blocks kept, and of blocks read from the remote."""
    kept = collections.Counter(host for hosts in table.values() for host in hosts)
    first = collections.Counter(hosts[0] for hosts in table.values())
    return deviation(kept[h] for h in HOSTS), deviation(first[h] for h in HOSTS)


def by_mirror(blocks: Sequence[str]) -> Placement:
    """Place blocks as the mirror does."""
    return placement.replicas(dict.fromkeys(blocks, 1), HOSTS, NUM_REPLICAS)


def by_rendezvous(blocks: Sequence[str]) -> Placement:
    """Place blocks by rendezvous hashing, without a bound on the load."""

    def ranked(block: str) -> list[str]:
        return sorted(HOSTS, key=lambda host: hash_of(f"{host} {block}"))

    return {block: ranked(block)[:NUM_REPLICAS] for block in blocks}


def by_ring(blocks: Sequence[str]) -> Placement:
    """Place blocks by consistent hashing: the next hosts on a ring of points.

    Source: Karger et al. 1997, "Consistent hashing and random trees".
    """
    points = sorted((hash_of(f"{h} {i}"), h) for h in HOSTS for i in range(RING_POINTS))
    table = {}
    for block in blocks:
        at = bisect.bisect(points, (hash_of(block), ""))
        around = [host for _, host in [*points[at:], *points[:at]]]
        table[block] = [*dict.fromkeys(around)][:NUM_REPLICAS]
    return table


PLACEMENTS: dict[str, Callable[[Sequence[str]], Placement]] = {
    "mirror": by_mirror,
    "rendezvous hashing alone": by_rendezvous,
    f"consistent hashing, {RING_POINTS} points a host": by_ring,
}


def hash_of(text: str) -> bytes:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).digest()


def placement_rows(num_blocks: int, num_sets: int) -> list[list[str]]:
    """Return for each placement the mean and the worst deviation over sets of names."""
    rows = []
    for name, place in PLACEMENTS.items():
        found = [
            deviations(place([f"{index} {block}" for block in range(num_blocks)]))
            for index in range(num_sets)
        ]
        cells = [
            f"{100 * value:.1f}%"
            for each in zip(*found, strict=True)
            for value in (sum(each) / num_sets, max(each))
        ]
        rows.append([name, str(num_blocks), *cells])
    return rows


def problems(found: Found) -> list[str]:
    """Return what a case shows against the mirror."""
    once = sum(found.after.values()) == found.num_bytes and found.most_reads == 1
    is_whole = found.phase == "reading"
    wrong = {
        f"{found.num_failed} reads failed": found.num_failed,
        f"{found.num_wrong} hosts read other content": found.num_wrong,
        "remote bytes were read again": is_whole and not once,
        "the remote was read unevenly": is_whole
        and deviation(found.before.values()) > BOUND,
        "the blocks are kept unevenly": is_whole
        and deviation(found.kept.values()) > BOUND,
    }
    return [f"{found.phase}: {what}" for what, is_so in wrong.items() if is_so]


def case_row(found: Found) -> list[str]:
    """Return the row of a case."""
    is_whole = found.phase == "reading"
    uneven = [
        f"{100 * deviation(counts.values()):.1f}%" if is_whole else "not full yet"
        for counts in (found.kept, found.before)
    ]
    return [
        found.phase,
        f"{found.num_reads:,}",
        str(found.num_failed),
        "equal" if not found.num_wrong else f"{found.num_wrong} hosts differ",
        f"{sum(found.before.values()) / found.num_bytes:.4f}",
        f"{sum(found.after.values()) / found.num_bytes:.4f}",
        str(found.most_reads),
        *uneven,
    ]


def write(cases: Sequence[Found], block_bytes: int, num_sets: int) -> None:
    """Write the page."""
    num_bytes = cases[0].num_bytes
    num_blocks = -(-num_bytes // block_bytes)
    lost = Table(
        title="One of four hosts is killed",
        text=(
            f"Four processes on loopback, one file of {num_bytes:,} bytes in "
            f"{num_blocks} blocks, {NUM_REPLICAS} replicas; the remote is a local file "
            f"that logs reads. Host {LOST} is killed with SIGKILL while all read after "
            "a fill, or when half of the blocks have been read from the remote. Then "
            "the other three read the whole file in pieces that do not end where "
            "blocks end, and compare its SHA-256. Remote bytes are per byte of the "
            f"file; deviations are from the mean of the four hosts. Bounds when "
            f"reading: no failed read, no byte of the remote read twice, {BOUND:.0%}. "
            "When filling: no failed read. What only the lost host had is read from "
            "the remote again. One machine: this measures no network."
        ),
        header=[
            *("killed while", "reads", "failed", "SHA-256"),
            *("remote bytes before", "remote bytes in all", "most reads of a block"),
            *("deviation of bytes kept", "deviation of remote bytes"),
        ],
        rows=[case_row(found) for found in cases],
    )
    placed = Table(
        title="Against hashing without a bound on the load",
        text=(
            f"{num_sets} sets of names of blocks, {len(HOSTS)} hosts, {NUM_REPLICAS} "
            "replicas; the largest deviation of a host from the mean, in blocks."
        ),
        header=[
            *("placement", "blocks", "kept, mean", "kept, worst"),
            *("remote, mean", "remote, worst"),
        ],
        rows=[row for num in (num_blocks, 40) for row in placement_rows(num, num_sets)],
    )
    write_page(
        "data_mirror",
        "Mirror of remote files",
        "python -m scripts.data.data_mirror",
        [lost, placed],
    )


def main() -> int:
    """Run both cases and write the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.data_mirror")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Settings(**json.loads(args.worker)))
        return 0
    block_bytes, num_bytes = 1 << 20, (200 << 20) + 12345
    phases: tuple[Phase, ...] = ("reading", "filling")
    cases = []
    for phase in phases:
        with tempfile.TemporaryDirectory() as folder:
            cases.append(measure(phase, Path(folder), num_bytes, block_bytes))
        print(" | ".join(case_row(cases[-1])), flush=True)
    write(cases, block_bytes, num_sets=30)
    wrong = [what for found in cases for what in problems(found)]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
