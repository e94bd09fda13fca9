"""Draw a schedule: `python -m mjax.pipeline show --pp 4 --chunks 2`."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mjax import flags
from mjax.pipeline import show
from mjax.pipeline.config import PipelineConfig, ScheduleName
from mjax.pipeline.schedule import Schedule, build

_WRITERS: dict[str, Callable[[Schedule], str]] = {
    ".html": show.page,
    ".svg": show.svg,
    ".txt": lambda schedule: _in_text(schedule) + "\n",
}


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

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix not in _WRITERS:
            raise ValueError(
                f"--out must end in one of {', '.join(_WRITERS)}, got {self.out}; try "
                f"{self.out.with_suffix('.html')}"
            )


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code: 0, or 2 after bad input."""
    try:
        words = sys.argv[1:] if argv is None else argv
        command = read(words)
        schedule = build(
            PipelineConfig(
                schedule=command.schedule, chunks=command.chunks
            ).schedule_name,
            num_stages=command.pp,
            num_chunks=command.chunks,
            num_microbatches=command.microbatches,
        )
        if command.out is not None:
            write(schedule, command.out)
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


def write(schedule: Schedule, path: Path) -> None:
    """Write the picture of a schedule to a file, in the format of its suffix.

    Raises:
      ValueError: the folder does not exist.
    """
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it")
    path.write_text(_WRITERS[path.suffix](schedule), encoding="utf-8")


def _in_text(schedule: Schedule) -> str:
    return "\n".join([show.text(schedule), "", *show.count_lines(schedule)])


if __name__ == "__main__":
    sys.exit(main())
