"""Read the state of the ranks of a run from outside, for `mjax.observe.stuck`.

Input: a work dir. Output: the progress of each rank of the newest start, the time since
it last made progress, and whether it is alive. No process is signalled and no file is
changed.
"""

import dataclasses
import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mjax.observe import beats as beats_
from mjax.observe.beats import Beat
from mjax.observe.spans import FOLDER, Header, SpanFile, paths, read_run
from mjax.processes import progress
from mjax.processes.progress import Phase, Word

_SAME_BOOT_S = 2.0
"""Largest difference between two values of wall minus monotonic clock within one boot
of one machine. It is more than NTP corrects at once, and far less than the difference
between two boots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """State of one rank as far as it can be read."""

    rank: int
    host: str | None
    phase: Phase
    step: int
    age_s: float
    """Seconds since the last progress; infinite if the rank has no records."""
    has_stepped: bool
    """Whether the first step of the rank has ended."""
    code: int | None = None
    """Exit code, if the rank ended by itself."""
    state: str = "?"
    """Letter of /proc/PID/stat, "gone" if there is no such process, "?" if it runs on
    another machine."""
    entered: tuple[int, int] | None = None
    """(operations begun, progress within the phase), for comparison with other ranks;
    None without beats."""
    doing: str = ""
    """Name of the open span; "" without beats."""
    is_beating: bool | None = None
    """Whether the rank still beats; None if unknown."""
    quiet_s: float | None = None
    """Seconds since the last beat, by the wall clocks of its host and of this host;
    None without beats."""
    stack: str = ""
    devices: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """Contents of the files of the newest start, by rank."""

    spans: Mapping[int, SpanFile]
    words: Mapping[int, Word]
    beats: Mapping[int, Beat]
    """Last beat of each rank."""
    problems: tuple[str, ...]
    launch: Path | None = None
    """The launcher's folder for this start."""
    beating: Collection[int] | None = None
    """Ranks that beat again; None: not checked."""

    def header(self, rank: int) -> Header | None:
        """Return the header of a rank's records, if there is one."""
        if rank in self.spans:
            return self.spans[rank].header
        return self.beats[rank].whose if rank in self.beats else None

    @property
    def headers(self) -> dict[int, Header]:
        """The header of each rank that has records, by rank."""
        found = {rank: self.header(rank) for rank in sorted({*self.spans, *self.beats})}
        return {rank: header for rank, header in found.items() if header is not None}

    @property
    def num_ranks(self) -> int:
        """Return the number of expected ranks."""
        num = max([*self.spans, *self.words, *self.beats]) + 1
        for header in self.headers.values():
            devices = math.prod(header.mesh.values())
            num = max(num, devices // max(1, len(header.devices)))
        return num


def read(work_dir: Path, spans: Sequence[SpanFile] | None = None) -> Records:
    """Return the records of the newest start.

    Args:
      work_dir: work dir of the run.
      spans: span files, if already read, with the newest lines of each rank.
    Raises:
      ValueError: there is no record of a run.
    """
    if not work_dir.is_dir():
        raise ValueError(f"--work-dir must be the work dir of a run, got {work_dir}")
    files, problems = list(spans or ()), list[str]()
    if spans is None and paths(work_dir / FOLDER):
        files, problems = read_run(work_dir)
    beats, more = beats_.read_run(work_dir)
    problems += more
    of_spans = [found.header for found in files]
    of_beats = [beat.whose for beat in beats.values()]
    newest = max((h.generation for h in (*of_spans, *of_beats)), default=-1)
    last = {f.header.rank: f for f in files if f.header.generation == newest}
    beats = {r: beat for r, beat in beats.items() if beat.whose.generation == newest}
    folder = max((work_dir / "launch").glob("generation-*"), default=None)
    starts = [h.launch for h in (*of_spans, *of_beats) if h.generation == newest]
    if folder is not None and any(starts):
        number = int(folder.name.rpartition("-")[2])
        if number not in {start.generation for start in starts if start}:
            last, beats = {}, {}  # spans of an older start; the newer one has none yet
    missing = sorted(last.keys() - beats.keys())
    if beats and missing:
        named = ", ".join(map(str, missing))
        problems.append(f"beats are ignored, because those of rank {named} are missing")
        beats = {}
    words = _words(folder, problems)
    if not last and not words and not beats:
        raise ValueError(
            f"{work_dir} has no spans and no progress words; give as --work-dir the "
            "work dir of a run that was started without --observe.no-spans"
        )
    return Records(
        spans=last, words=words, beats=beats, problems=tuple(problems), launch=folder
    )


def _words(folder: Path | None, problems: list[str]) -> dict[int, Word]:
    """Return the progress words that a launcher requested."""
    words = {}
    for path in sorted(folder.glob("progress-*")) if folder else ():
        rank = path.name.removeprefix("progress-")
        if not rank.isdigit():
            continue
        try:
            word = progress.read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        if word is not None:
            words[int(rank)] = word
    return words


def look_again(work_dir: Path, records: Records) -> Records:
    """Wait for the next beats; return the records with the ranks that beat again."""
    again = beats_.still_beating(work_dir, records.beats)
    beats = {**records.beats, **again}
    return dataclasses.replace(records, beats=beats, beating={*again})


def see(records: Records) -> dict[int, Seen]:
    """Return the state of each rank, from the records."""
    now_ns = time.time_ns()
    seen = {r: _see(r, records, now_ns) for r in range(records.num_ranks)}
    waiting_s = [one.age_s for one in seen.values() if one.is_beating]
    for rank, one in seen.items():
        # Host clocks may differ, but ranks that wait for this rank stopped after it, so
        # its last progress is at least as old as the most recent progress of theirs.
        if one.is_beating is False and waiting_s:
            age_s = max(one.age_s, min(waiting_s))
            seen[rank] = dataclasses.replace(one, age_s=age_s)
    return seen


def _see(rank: int, records: Records, now_ns: int) -> Seen:
    """Return the state of a rank as far as it can be read."""
    found, word = records.spans.get(rank), records.words.get(rank)
    beat, header = records.beats.get(rank), records.header(rank)
    is_beating = None
    if beat is not None and records.beating is not None:
        is_beating = rank in records.beating
    if word is not None and (beat is None or word.monotonic_ns > beat.since_ns):
        age_s = _since_s(header, word.monotonic_ns, now_ns)
        phase, step, first = word.phase, word.step, word.first_step_ns > 0
    elif beat is not None:
        age_s = (beat.monotonic_ns - beat.since_ns) / 1e9
        if not is_beating:
            age_s += max(0.0, (now_ns - beat.wall_ns) / 1e9)
        phase, step, first = Phase(beat.phase), beat.step, beat.has_stepped
    elif found is not None and not records.words:
        last = max((line.step for line in found.lines), default=0)
        ends_ns = [span.end_ns for line in found.lines for span in line.spans]
        last_ns = max(ends_ns, default=found.header.monotonic_ns)
        age_s = _since_s(header, last_ns, now_ns)
        # The line of a step is written after it, so the next step is running.
        phase, step, first = Phase.STEP, max(last, 0) + 1, last > 0
    else:
        age_s, phase, step, first = math.inf, Phase.IMPORT, 0, False
    code = found.lines[-1].end if found and found.lines else None
    code = beat.end if code is None and beat is not None else code
    return Seen(
        rank=rank,
        host=header.host if header else None,
        phase=Phase.EXIT if code is not None else phase,
        step=step,
        age_s=max(0.0, age_s),
        has_stepped=first,
        code=code,
        state=process_state(header, now_ns) if header else "?",
        entered=(beat.entered, beat.microstep) if beat else None,
        doing=beat.doing if beat else "",
        is_beating=is_beating,
        quiet_s=max(0.0, (now_ns - beat.wall_ns) / 1e9) if beat else None,
        devices=header.devices if header else (),
    )


def _since_s(header: Header | None, monotonic_ns: int, now_ns: int) -> float:
    """Return the seconds since a time of a host's monotonic clock, at `now_ns`."""
    if header is None:  # no spans yet: assume that the process is on this machine
        return (time.monotonic_ns() - monotonic_ns) / 1e9
    return (now_ns - header.wall_ns - monotonic_ns + header.monotonic_ns) / 1e9


def process_state(header: Header, now_ns: int) -> str:
    """Return the state of a process, as in `Seen.state`."""
    own_ns = now_ns - time.monotonic_ns()
    if abs(own_ns - (header.wall_ns - header.monotonic_ns)) > _SAME_BOOT_S * 1e9:
        return "?"
    try:
        text = Path(f"/proc/{header.pid}/stat").read_text()
    except OSError:
        return "gone" if Path("/proc/self/stat").exists() else "?"
    state = text.rpartition(")")[2].split()[0]
    return "gone" if state in "ZX" else state
