"""Write the rows of a part: JSON for programs, Markdown for people.

Both are written anew after every row, so that what was measured stays if the report is
ended from outside.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.evidence import Table
from scripts.gpu.setting import Mode, Part, Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What the rows of a file have in common."""

    mode: Mode
    commit: str
    date: str
    command: str
    machine: Row
    """As `worker.probe` returns it."""

    def fits(self, stored: Mapping[str, Any]) -> bool:
        """Say whether rows that were stored earlier belong to the same table."""
        kind = stored.get("machine", {}).get("device_kind")
        return (
            stored.get("mode") == self.mode
            and stored.get("commit") == self.commit
            and kind == self.machine["device_kind"]
        )

    def describe(self) -> str:
        """Return one paragraph of Markdown."""
        m = self.machine
        versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items())
        text = (
            f"{self.date}, commit {self.commit}, {m['device_kind']}, driver "
            f"{m['driver']}, {versions}. Made by `{self.command}`."
        )
        if self.mode == "gpu":
            return text
        return f"**A rehearsal on a CPU with tiny shapes: no measurement.** {text}"


def json_path(out: Path, part: Part) -> Path:
    """Return where the rows of a part are."""
    return out / f"gpu_{part.name}.json"


def load_rows(out: Path, part: Part, origin: Origin) -> dict[str, Row]:
    """Return the good rows of an earlier call that fit; none if there is no file."""
    path = json_path(out, part)
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if not origin.fits(stored):
        return {}
    return {row["case"]: row for row in stored["rows"] if row["status"] == "ok"}


def write(
    out: Path, part: Part, origin: Origin, rows: Mapping[str, Row], *, small: bool
) -> None:
    """Write both files of a part.

    Args:
      out: folder; made if absent.
      part: names the files.
      origin: of the rows.
      rows: by case; those still to come may be absent.
      small: whether the cases are those of a rehearsal.
    """
    out.mkdir(parents=True, exist_ok=True)
    content = dataclasses.asdict(origin) | {"rows": list(rows.values())}
    _replace(json_path(out, part), json.dumps(content, indent=1) + "\n")
    tables: Sequence[Table] = part.module.tables(rows, small)
    _replace(out / f"gpu_{part.name}.md", markdown(part.title, origin, tables))


def markdown(title: str, origin: Origin, tables: Sequence[Table]) -> str:
    """Return the page."""
    lines = [f"# {title}", "", origin.describe()]
    for table in tables:
        lines += ["", f"## {table.title}", "", table.text, ""]
        lines += [_line(table.header), _line(["---"] * len(table.header))]
        lines += [_line(row) for row in table.rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    clean = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(clean) + " |"


def _replace(path: Path, text: str) -> None:
    """Write a file whole: who reads it never sees half of it."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)
