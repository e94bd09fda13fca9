"""Lose one of four hosts of a mirror, and count failed reads and remote bytes.

    python -m scripts.data.data_mirror

Four processes on this machine share a remote file; three of them keep each block, in
folders of their own, and serve it on a port of loopback. The remote is a file on disk
that logs what is read. One process is killed with SIGKILL: while all hosts read the
file after a fill, or in the middle of the fill. Also places blocks for many sets of
names, with the mirror and with hashing alone, and plants the faults of `mirror_faults`.
Writes docs/benchmarks/data_mirror.md; returns 1 if a read failed, content differs, or a
bound is passed.
"""

import argparse
import bisect
import collections
import dataclasses
import hashlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from mjax.data.mirror import placement
from scripts.data import mirror_faults
from scripts.data.mirror_hosts import (
    HOSTS,
    NAME,
    NUM_REPLICAS,
    Settings,
    expect,
    free_ports,
    kept_bytes,
    kill,
    line,
    remote_bytes,
    start_worker,
    tell,
)
from scripts.evidence import Table, write_page

LOST = "b"
BOUND = 0.1
"""Largest deviation of a host from the mean."""
RING_POINTS = 100
Phase = Literal["reading", "filling"]
"""What all hosts do when one is killed."""
Placement = Mapping[str, Sequence[str]]
"""Hosts of each block; the first reads the remote."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a case showed."""

    phase: Phase
    seed: int
    """Of the content, on which the names of the blocks depend."""
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


def measure(
    phase: Phase, folder: Path, num_bytes: int, block_bytes: int, seed: int = 0
) -> Found:
    """Start four hosts, kill one in a phase, and let the others read all."""
    content = random.Random(seed).randbytes(num_bytes)
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
        seed=seed,
        num_reads=sum(answer["reads"] for answer in answers),
        num_failed=sum(answer["failed"] for answer in answers),
        num_wrong=sum(answer["sha256"] != told["sha256"] for answer in answers),
        before=before,
        after=remote_bytes(log),
        kept=kept,
        num_bytes=num_bytes,
        most_reads=max(reads.values()),
    )


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
    return [
        f"{found.phase}, seed {found.seed}: {what}"
        for what, is_so in wrong.items()
        if is_so
    ]


def case_row(found: Found) -> list[str]:
    """Return the row of a case."""
    is_whole = found.phase == "reading"
    uneven = [
        f"{100 * deviation(counts.values()):.1f}%" if is_whole else "not full yet"
        for counts in (found.kept, found.before)
    ]
    return [
        found.phase,
        str(found.seed),
        f"{found.num_reads:,}",
        str(found.num_failed),
        "equal" if not found.num_wrong else f"{found.num_wrong} hosts differ",
        f"{sum(found.before.values()) / found.num_bytes:.4f}",
        f"{sum(found.after.values()) / found.num_bytes:.4f}",
        str(found.most_reads),
        *uneven,
    ]


def write(
    cases: Sequence[Found],
    faults: Sequence[Sequence[str]],
    block_bytes: int,
    num_sets: int,
) -> None:
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
            *("killed while", "seed", "reads", "failed", "SHA-256"),
            *("remote bytes before", "remote bytes in all", "most reads of a block"),
            *("deviation of bytes kept", "deviation of remote bytes"),
        ],
        rows=[case_row(found) for found in cases],
    )
    others = Table(
        title="Other faults",
        text=(
            f"The same with a file of {mirror_faults.NUM_BYTES:,} bytes in 41 blocks. "
            f"The fault is one of host {mirror_faults.BAD}, or of the remote; reads "
            "are those of the hosts that are not stopped, killed or replaced. Remote "
            "bytes are per byte of the file. Bounds: no read fails and no content "
            "differs, except for the block that is on no disk, whose error must name "
            f"file and host; and no read takes longer than {mirror_faults.MAX_S:.0f} s."
        ),
        header=[
            *("fault", "reads", "failed", "SHA-256", "remote bytes"),
            "longest read, s",
        ],
        rows=faults,
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
        [lost, others, placed],
    )


def main() -> int:
    """Run both cases and write the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.data_mirror")
    parser.add_argument("--seeds", type=int, default=5, help="contents per phase")
    args = parser.parse_args()
    block_bytes, num_bytes = 1 << 20, (200 << 20) + 12345
    phases: tuple[Phase, ...] = ("reading", "filling")
    cases, faults, wrong = [], [], []
    for phase, seed in itertools.product(phases, range(args.seeds)):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(phase, Path(folder), num_bytes, block_bytes, seed)
        cases.append(found)
        wrong += problems(found)
        print(" | ".join(case_row(found)), flush=True)
    for name in mirror_faults.CASES:
        shown = mirror_faults.measure(name)
        faults.append(mirror_faults.row(name, shown))
        wrong += mirror_faults.problems(name, shown)
        print(" | ".join(faults[-1]), flush=True)
    write(cases, faults, block_bytes, num_sets=30)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
