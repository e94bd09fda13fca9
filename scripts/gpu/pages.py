"""Write the rows of a part: JSON for programs, Markdown for people.

The JSON is rewritten after every row, so measurements survive if the report is killed;
pages are made from the JSON alone.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.evidence import Table
from scripts.gpu.setting import Mode, Part, Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The properties that all rows of a file share."""

    mode: Mode
    commit: str
    date: str
    command: str
    machine: Row
    """As `worker.probe` returns it."""

    def fits(self, other: "Origin") -> bool:
        """Return whether rows that were stored earlier belong to the same table."""
        kind = other.machine["device_kind"]
        return (other.mode, other.commit, kind) == (
            self.mode,
            self.commit,
            self.machine["device_kind"],
        )

    def describe(self) -> str:
        """Return one paragraph of Markdown."""
        m = self.machine
        versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items())
        text = (
            f"At `{self.commit}`, {self.date}, {versions}, {m['device_kind']}, driver "
            f"{m['driver']}, ptxas {m['ptxas']}. Made by `{self.command}`."
        )
        if self.mode == "gpu":
            return text
        return f"**A rehearsal on a CPU with tiny shapes: no measurement.** {text}"


def json_path(out: Path, part: Part) -> Path:
    """Return where the rows of a part are."""
    return out / f"gpu_{part.name}.json"


def load_rows(out: Path, part: Part, origin: Origin) -> dict[str, Row]:
    """Return the matching good rows of an earlier call; none if there is no file."""
    path = json_path(out, part)
    if not path.exists():
        return {}
    try:
        stored_origin, rows = load(path)
    except (ValueError, KeyError, TypeError) as error:
        print(f"{path} is not kept: {type(error).__name__}: {error}", flush=True)
        return {}
    if not origin.fits(stored_origin):
        return {}
    return {name: row for name, row in rows.items() if row["status"] == "ok"}


def load(path: Path) -> tuple[Origin, dict[str, Row]]:
    """Return the data that `write_rows` wrote.

    Raises:
      ValueError, KeyError, TypeError: the file has another format.
    """
    stored = json.loads(path.read_text())
    rows = {row["case"]: row for row in stored.pop("rows")}
    return Origin(**stored), rows


def write_rows(out: Path, part: Part, origin: Origin, rows: Mapping[str, Row]) -> None:
    """Write the JSON of a part.

    Args:
      out: folder; made if absent.
      part: names the file.
      origin: of the rows.
      rows: by case; pending cases may be absent.
    """
    out.mkdir(parents=True, exist_ok=True)
    content = dataclasses.asdict(origin) | {"rows": list(rows.values())}
    _replace(json_path(out, part), json.dumps(content, indent=1) + "\n")


def write_page(out: Path, part: Part) -> None:
    """Write the page of a part from its JSON in the same folder.

    Raises:
      ValueError, KeyError, TypeError: a file or a row is not as expected.
    """
    origin, rows = load(json_path(out, part))
    tables: Sequence[Table] = part.module.tables(rows, origin.mode == "rehearse")
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
    """Write a file atomically: no reader sees an incomplete file."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)
