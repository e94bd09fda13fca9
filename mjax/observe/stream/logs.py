"""Find the logs of a run on this host, for the quota, and which of them are closed.

Input: a work dir. Output: a `Spool` for each log. The store has no logs, so they are
deleted only on request.

A log counts as closed, which means that no process writes it, if nothing has been
written to it for a minute and it is one of these:

- `launch/generation-N/`: `rank-R.log`, `stacks-R.txt` and `coordinator.log`, if a later
  generation has begun or the launch has ended; and always `rank-R.log.1`, to which the
  launcher renames a log that gets too long.
- `stacks/HOST-RANK-GENERATION.txt`, if the run has been started again since; GENERATION
  counts all starts, including those without a launch.
- `profile/GENERATION/step-N/HOST-RANK/`: under the same condition, or once its last
  file, window.json, exists.

Logs of agents are not touched.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from mjax.observe import events, gzipped, launch_time, spans
from mjax.observe.stream.quota import Spool
from mjax.observe.windows import folders

_QUIET_S = 60.0
"""Seconds since the last write after which a log may count as closed. An agent reads
the log of an ended rank for some seconds."""
_NAME = re.compile(
    r"(?:coordinator\.log|(?:rank-(?P<rank>\d+)\.log(?P<aside>\.\w+)??|"
    r"stacks-(?P<of>\d+)\.txt))(?P<gz>\.gz)?"
)
"""Names of logs in the folder of a generation, from `mjax.launch.ranks`."""
_FLAGS = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
RankLog = tuple[int, int]
"""Generation by the launch's count, and rank."""


def find(
    work_dir: Path,
    *,
    now_s: float,
    host: str | None = None,
    own: Collection[RankLog] = (),
) -> list[Spool]:
    """Return the logs of a run, oldest first.

    Args:
      work_dir: work dir of the run.
      now_s: current time since 1970.
      host: only logs of this host, in a work dir that hosts share; None takes all.
      own: launched ranks of the host.
    """
    try:
        has_ended = launch_time.has_ended(events.read(work_dir)[0])
    except ValueError:
        has_ended = False
    found = [
        *_of_launch(work_dir, has_ended, host, own),
        *_of_starts(work_dir, host),
    ]
    spools = []
    for path, is_closed in found:
        try:
            size, modified_s = _measure(path)
        except OSError:
            continue  # it has just been deleted
        spools.append(
            Spool(
                path=path,
                disk_bytes=size,
                modified_s=modified_s,
                is_closed=is_closed and now_s - modified_s > _QUIET_S,
                is_stored=False,
                is_log=path.is_file(),
            )
        )
    return sorted(spools, key=lambda spool: (spool.modified_s, spool.path))


def written_here() -> set[tuple[int, int]]:
    """Return device and inode of each file that a process of this machine may write."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            status = link.stat()
            info = (link.parent.parent / "fdinfo" / link.name).read_text()
        except OSError:
            continue  # the process has ended, or belongs to another user
        flags = _FLAGS.search(info)  # proc(5): octal flags, as given to open(2)
        mode = int(flags[1], 8) & os.O_ACCMODE if flags else os.O_RDWR
        if stat.S_ISREG(status.st_mode) and mode != os.O_RDONLY:
            found.add((status.st_dev, status.st_ino))
    return found


def is_among(path: Path, files: Collection[tuple[int, int]]) -> bool:
    """Return whether a file, or any file in a folder, is among `files`."""
    inside = [path, *path.rglob("*")] if path.is_dir() else [path]
    try:
        return any((f.stat().st_dev, f.stat().st_ino) in files for f in inside)
    except OSError:
        return True  # another process is changing it


def _of_launch(
    work_dir: Path, has_ended: bool, host: str | None, own: Collection[RankLog]
) -> Iterator[tuple[Path, bool]]:
    """Yield logs of launched ranks, and whether no process writes them."""
    generations = {
        int(folder.name.rpartition("-")[2]): folder
        for folder in (work_dir / "launch").glob("generation-*")
        if folder.name.rpartition("-")[2].isdecimal()
    }
    newest = max(generations, default=0)
    for number, folder in sorted(generations.items()):
        is_over = has_ended or number < newest
        for path in sorted(folder.iterdir()):
            found = _NAME.fullmatch(path.name)
            if found is None or (found["gz"] and path.with_suffix("").exists()):
                continue
            rank = found["rank"] or found["of"]
            is_own = rank is not None and (number, int(rank)) in own
            if host is None or is_own:
                yield path, is_over or bool(found["aside"] or found["gz"])


def _of_starts(work_dir: Path, host: str | None) -> Iterator[tuple[Path, bool]]:
    """Yield stacks and windows, and whether no process writes them."""
    stacks = [*gzipped.find(work_dir / "stacks", ".txt").items()]
    names = [name.removesuffix(".txt") for name, _ in stacks]
    there = gzipped.find(work_dir / spans.FOLDER, spans.ENDING)
    names += [name.removesuffix(spans.ENDING) for name in there]
    numbers = [name.rpartition("-")[2] for name in names]
    newest = max((int(n) for n in numbers if n.isdecimal()), default=0)
    for name, path in stacks:
        of_host, _, number = name.removesuffix(".txt").rpartition("-")
        if number.isdecimal() and host in (None, of_host.rpartition("-")[0]):
            yield path, int(number) < newest
    complete, incomplete = folders.find(work_dir)
    ended = {*complete}
    for path in complete + incomplete:
        generation = int(path.parent.parent.name)
        own = host and folders.folder_of(
            work_dir, generation=generation, step=0, host=host, rank=0
        ).name.removesuffix("-0")
        if own in (None, path.name.rpartition("-")[0]):
            yield path, generation < newest or path in ended


def _measure(path: Path) -> tuple[int, float]:
    """Return the size of a file or folder, and the time of its last write."""
    if not path.is_dir():
        status = path.stat()
        return status.st_size, status.st_mtime
    found = [file.stat() for file in path.rglob("*") if file.is_file()]
    times_s = [path.stat().st_mtime, *(status.st_mtime for status in found)]
    return sum(status.st_size for status in found), max(times_s)
