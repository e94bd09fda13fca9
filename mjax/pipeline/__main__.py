"""Draw a schedule: `python -m mjax.pipeline show --pp 4 --chunks 2`."""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

from mjax.cli import flags
from mjax.pipeline import show
from mjax.pipeline.config import PipelineConfig, ScheduleName
from mjax.pipeline.schedule import Schedule, build, check

_WRITERS: dict[str, Callable[[Schedule], str]] = {
    ".html": show.page,
    ".svg": show.svg,
    ".txt": lambda schedule: _in_text(schedule) + "\n",
}

_FLAGS_OF_RUN = {
    "--mesh.pp": "--pp",
    "--pipeline.chunks": "--chunks",
    "--pipeline.schedule": "--schedule",
    "--batch.microbatches": "--microbatches",
}
"""Flags of a run, and the same flags of this command."""
_MAX_FLAGS, _MAX_FIXES = 4, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Draw a schedule and count its bubble, its memory and its sends."""

    pp: int
    """Number of stages, as --mesh.pp of the run."""
    chunks: int = 1
    """Virtual stages per stage, as --pipeline.chunks of the run."""
    microbatches: int
    """Microbatches per step, as --batch.microbatches of the run."""
    schedule: ScheduleName | None = None
    """As --pipeline.schedule. Default: interleaved-1f1b if --chunks > 1, else 1f1b."""
    out: Path | None = None
    """Write the picture to this file: .html, .svg or .txt."""
    json: bool = False
    """Print only the counts, as one JSON object."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code: 0, or 2 after bad input."""
    try:
        command = read(sys.argv[1:] if argv is None else argv)
        if problem := problem_of(command):
            raise ValueError(f"{problem}{_advice(command)}")
        schedule = build(
            _schedule_name(command),
            num_stages=command.pp,
            num_chunks=command.chunks,
            num_microbatches=command.microbatches,
        )
        if command.out is not None:
            picture = _WRITERS[command.out.suffix](schedule)
            command.out.write_text(picture, encoding="utf-8")
        if command.json:
            print(json.dumps(show.counts(schedule)), flush=True)
        else:
            print(_in_text(schedule), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reading program (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def problem_of(command: Show) -> str:
    """Return the rule that a command violates, with its values; empty if none."""
    try:
        check(
            _schedule_name(command),
            num_stages=command.pp,
            num_chunks=command.chunks,
            num_microbatches=command.microbatches,
        )
    except ValueError as error:
        text = str(error)
        for of_run, here in _FLAGS_OF_RUN.items():
            text = text.replace(of_run, here)
        return text
    path = command.out
    if path is None:
        return ""
    if path.suffix not in _WRITERS:
        return f"--out must end in one of {', '.join(_WRITERS)}, got {path}"
    if not path.parent.is_dir():
        return f"--out {path}: there is no folder {path.parent}; make it"
    return f"--out {path} is a folder" if path.is_dir() else ""


def _advice(command: Show) -> str:
    """Return the nearest commands without a problem, with the fewest other flags."""
    values = _values(command)
    for num_flags in range(1, _MAX_FLAGS + 1):
        found: list[str] = []
        for names in itertools.combinations(values, num_flags):
            for chosen in itertools.product(*map(values.__getitem__, names)):
                change = dict(zip(names, chosen, strict=True))
                if not problem_of(dataclasses.replace(command, **change)):
                    found.append(" ".join(f"--{n} {v}" for n, v in change.items()))
                    break
        if found:
            return f"; nearest that fit: {', or '.join(found[:_MAX_FIXES])}"
    return ""


def _values(command: Show) -> dict[str, list[Any]]:
    """Return the values to try for each flag, nearest to its value first."""

    def by_distance(numbers: Iterable[int], value: int) -> list[int]:
        return sorted({*numbers} - {value}, key=lambda n: (abs(n - value), -n))

    pp, num = max(command.pp, 1), max(command.microbatches, 1)
    few = num // pp * pp
    divisors = (n for n in range(1, min(num, 2 * pp) + 1) if num % n == 0)
    values: dict[str, list[Any]] = {
        "microbatches": by_distance(
            {num, max(few, pp), few + pp}, command.microbatches
        ),
        "chunks": by_distance({1}, command.chunks),
        "schedule": [*get_args(ScheduleName)],
        "pp": by_distance({pp, *divisors}, command.pp),
    }
    if command.out is not None:
        name = f"{command.out.stem or 'schedule'}.html"
        values["out"] = [command.out.parent / name, Path("schedule.html")]
    return values


def read(words: list[str]) -> Show:
    """Parse the arguments of the command line.

    Raises:
      ValueError: the command is missing or unknown, or its flags are wrong.
      SystemExit: `--help` has printed the help.
    """
    prog = "python -m mjax.pipeline show"
    if words[:1] == ["show"]:
        words = words[1:]
    elif words[:1] not in (["--help"], ["-h"]):
        raise ValueError(
            f"the command must be show, got {words[0] if words else 'nothing'}; write "
            f"{prog} --pp 4 --microbatches 8"
        )
    return flags.read(Show, words, prog=prog)


def _schedule_name(command: Show) -> ScheduleName:
    # The config refuses counts below 1 with another message.
    config = PipelineConfig(schedule=command.schedule, chunks=max(command.chunks, 1))
    return config.schedule_name


def _in_text(schedule: Schedule) -> str:
    return "\n".join([show.text(schedule), "", *show.count_lines(schedule)])


if __name__ == "__main__":
    sys.exit(main())
