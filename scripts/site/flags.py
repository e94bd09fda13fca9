"""The page of all flags, made from the programs' own parsers.

Input: the help that each program prints. Output: a page of Markdown.
"""

import contextlib
import os
import re
from collections.abc import Iterator

from mjax.__main__ import PROGRAMS
from mjax.cli import completion
from mjax.launch.__main__ import COMMANDS

NUM_COLUMNS = 80
"""Width of the help, which fits in a code block of the theme on a desktop screen."""


def page() -> str:
    """Return the page: each program and command, with its output for `-h`."""
    parts = [
        "# Flags\n\nWhat each program prints for `-h`. `mjax NAME` and "
        "`python -m mjax.NAME` are the same program.\n"
    ]
    with _columns(NUM_COLUMNS):
        for program, does in PROGRAMS.items():
            parts.append(f"## mjax {program}\n\n{does.capitalize()}.\n")
            parts += _helps(program)
    return "\n".join(parts)


@contextlib.contextmanager
def _columns(number: int) -> Iterator[None]:
    """Give programs a terminal of a fixed width, independent of the build machine's."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _helps(*names: str) -> list[str]:
    """Return the `-h` output of a program or command, followed by its commands."""
    text = completion.help_of(*names)
    parts = [f"```text\n{text.strip()}\n```\n"]
    for command in _commands(names, text):
        parts.append(f"### mjax {' '.join([*names, command])}\n")
        parts += _helps(*names, command)
    return parts


def _commands(names: tuple[str, ...], text: str) -> list[str]:
    """Return the commands of a program or of a command, whose help is text."""
    if names == ("launch",):
        return list(COMMANDS)
    choices = re.search(r"\[-h\]\s+\{([a-z,-]+)\}\s+\.\.\.", text)
    if choices:
        return choices[1].split(",")
    return completion.commands_in(text) if len(names) == 1 else []
