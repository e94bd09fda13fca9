"""Command-line flags from config dataclasses, and plain messages for bad ones.

Input: dataclasses and the words of a command line. Output: instances of the
dataclasses, or the exit code of a subcommand. The meaning of a flag is not known here,
and only the standard library is imported.

Start with `reading.read`: fields become flags (`fields`), words become values
(`convert`), and the error for an unknown flag suggests the likely one (`slips`).
`asked_help` writes the text of `-h`.
"""

from mjax.cli.flags.commands import run_command
from mjax.cli.flags.convert import shown
from mjax.cli.flags.fields import Flag, Positional, flags_of
from mjax.cli.flags.guide import Guide
from mjax.cli.flags.reading import read, read_parts
from mjax.cli.flags.slips import unknown_name
from mjax.cli.flags.words import check_one_run, given, nearest, values, with_flags

__all__ = [
    "Flag",
    "Guide",
    "Positional",
    "check_one_run",
    "flags_of",
    "given",
    "nearest",
    "read",
    "read_parts",
    "run_command",
    "shown",
    "unknown_name",
    "values",
    "with_flags",
]
