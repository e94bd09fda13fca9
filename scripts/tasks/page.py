"""The columns of mjax in docs/tasks.md, from the results of the tasks."""

import re
from collections.abc import Mapping
from typing import Any

from scripts.evidence import REPOSITORY

_LONGEST = 90
"""Characters of a command in the table of all tasks."""
PAGE = REPOSITORY / "docs" / "tasks.md"


def write(results: Mapping[int, Mapping[str, Any]]) -> None:
    """Write commands, seconds and checks into the page."""
    text = filled(PAGE.read_text(), results)
    PAGE.write_text(text)


def filled(text: str, results: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the page with the results in it.

    Raises:
      ValueError: a task has no row, or the page has no place for it.
    """
    lines, number = text.split("\n"), 0
    seen = set()
    for i, line in enumerate(lines):
        if heading := re.match(r"## (\d+)\. ", line):
            number = int(heading[1])
        if row := re.match(r"\| (\d+) \| ", line):
            done = results[int(row[1])]
            cells = line.split(" | ")
            lines[i] = " | ".join(
                [*cells[:6], code([shortened(done)]), f"{done['seconds']:.1f} |"]
            )
            seen.add(int(row[1]))
        elif line.startswith("| mjax |"):
            done = results[number]
            notes = "; ".join(note.replace("|", "\\|") for note in done["notes"])
            how = f"{code(done['commands'])}: {done['seconds']:.1f} s. {notes}"
            lines[i] = f"| mjax | yes | {how} | `scripts/tasks`, at {done['commit']} |"
    if seen != set(results):
        raise ValueError(f"the page has rows {sorted(seen)}, results {sorted(results)}")
    return "\n".join(lines)


def shortened(done: Mapping[str, Any]) -> str:
    """Return the first command of mjax, or its beginning."""
    first = next(command for command in done["commands"] if "mjax" in command)
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."


def code(commands: list[str]) -> str:
    """Return commands as they are shown in a cell."""
    return "; ".join(f"`{command}`".replace("|", "\\|") for command in commands)
