"""Flags made from config dataclasses, and one plain message for a bad one.

Enters: dataclasses and the words of a command line. Leaves: instances of them, or of a
program with several commands the exit code of the one that is named. Nothing here knows
what a flag means, and only the standard library is imported.

Read `reading.read`: fields become flags (`fields`), words become values (`convert`),
and an unknown flag is answered with what was probably meant (`slips`). `-h` is written
in `asked_help`.
"""

from mjax.flags.commands import run_command
from mjax.flags.convert import shown
from mjax.flags.fields import Flag, Positional, flags_of
from mjax.flags.guide import Guide
from mjax.flags.reading import read, read_parts
from mjax.flags.slips import unknown_name
from mjax.flags.words import given, nearest, values, with_flags

__all__ = [
    "Flag",
    "Guide",
    "Positional",
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
