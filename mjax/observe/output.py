"""Output of the commands of this package: warnings, tables, files.

Input: texts. Output: text on stderr, in aligned columns, or in the file of `--out`.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import mjax
from mjax.cli import exit_codes


def refuse(error: ValueError) -> int:
    """Print a problem in one line; return the exit code."""
    print(f"error: {printable(str(error))}", file=sys.stderr)
    return exit_codes.BAD_INPUT


def warn(problems: Iterable[str]) -> None:
    """Print warnings: data that was left out or is unknown."""
    for problem in problems:
        print(f"warning: {printable(problem)}", file=sys.stderr)


def printable(text: str) -> str:
    """Escape control characters, since names come from files that others wrote."""
    return mjax.printable(text, kept="")


def check_folder(path: Path, flag: str = "--work-dir") -> None:
    """Refuse a path that is not a folder.

    Raises:
      ValueError: it is not a folder.
    """
    if not path.is_dir():
        raise ValueError(f"{flag} {path} is not a folder; give the work dir of a run")


def write(path: Path, text: str) -> None:
    """Write the file of `--out`.

    Raises:
      ValueError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot write --out {path}: {error.strerror}; give another path"
        ) from error


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return rows as lines with aligned columns, the first `left` ones to the left."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if at < left else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
