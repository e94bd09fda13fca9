"""Write a page of evidence: what ran, at which commit, on which machine, and tables.

Input: the command, texts and tables. Output: a Markdown file in docs/benchmarks/ that
states the command that makes it, and a CSV file for each long table.
`scripts.evidence_index` lists the pages and marks those older than the code that they
certify.
"""

import csv
import dataclasses
import datetime
import io
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHMARKS_DIR = REPOSITORY / "docs" / "benchmarks"
MADE = r"At `(?P<commit>[0-9a-f]{7,40})`[^,]*, (?P<date>\d{4}-\d{2}-\d{2}), jax "
"""Start of the line that states when a page was made, see `about`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a page, under its own heading."""

    title: str
    text: str
    """The comparison, and the bound."""
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    file: str | None = None
    """Name, without suffix, of a CSV file for a long table, which the page links to
    instead of showing it; None: the page shows the rows."""


def write_page(
    name: str,
    title: str,
    command: str,
    tables: Sequence[Table],
    made: str | None = None,
) -> Path:
    """Write docs/benchmarks/<name>.md and its CSV files, and return its path.

    Each file is replaced atomically: a script that is killed leaves no partial file.

    Args:
      name: of the file, without suffix.
      title: heading of the page.
      command: makes the page again.
      tables: in order.
      made: result of `about` at the time of the results; None for now.
    """
    BENCHMARKS_DIR.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# {title}",
        "",
        f"{made or about()}. Made by `{command}`.",
    ]
    for table in tables:
        lines += ["", f"## {table.title}", "", table.text, ""]
        if table.file is None:
            lines += [_row(table.header), _row(["---"] * len(table.header))]
            lines += [_row(row) for row in table.rows]
        else:
            file = _write_csv(table, table.file)
            lines.append(f"[{file}]({file}) has the {len(table.rows)} rows.")
    path = BENCHMARKS_DIR / f"{name}.md"
    replace_text(path, "\n".join(lines) + "\n")
    return path


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: no reader sees an incomplete file.

    Args:
      path: of the file; `<path>.part` is overwritten.
      text: written in UTF-8, with its line endings.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8", newline="")
    part.replace(path)


def about() -> str:
    """Return commit, date, jax version and machine of a measurement; matches `MADE`.

    Raises:
      CalledProcessError: this is not a git checkout.
    """
    git = ["git", "status", "--porcelain", "--untracked-files=no"]
    done = subprocess.run(
        [*git, "--", "mjax", "scripts"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    changes = " with changes that are not committed" if done.stdout.strip() else ""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"At `{commit()}`{changes}, {today}, jax {version('jax')}, {machine()}"


def machine() -> str:
    """Describe the host: cores, processor (proc_cpuinfo(5)), memory."""
    names = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    name = platform.machine() if names is None else names[1].strip()
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{os.cpu_count()} cores of {name}, {num_bytes / 2**30:.0f} GiB"


def commit() -> str:
    """Return the short name of the commit that is checked out."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(
        git, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def train_command(*flags: str) -> list[str]:
    """Return the argument list of `python -m mjax.train` with these flags."""
    return [sys.executable, "-m", "mjax.train", *flags]


def run_training(*flags: str) -> None:
    """Run the trainer to its end.

    Raises:
      RuntimeError: its exit code is not 0; the message has its output.
    """
    done = subprocess.run(
        train_command(*flags), cwd=REPOSITORY, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(flags)} ended with {done.returncode}:\n"
            f"{done.stdout}\n{done.stderr}"
        )


def read_metrics(work_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, complete lines only."""
    path = work_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def largest_difference(
    rows: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
    field: str,
) -> float:
    """Return the largest relative difference of a field over the steps of reference.

    Raises:
      ValueError: a step of reference is missing in rows.
    """
    values = {row["step"]: row[field] for row in rows}
    missing = [row["step"] for row in reference if row["step"] not in values]
    if missing:
        raise ValueError(f"no rows for steps {missing}")
    return max(
        abs(values[row["step"]] - row[field]) / abs(row[field]) for row in reference
    )


def _write_csv(table: Table, name: str) -> str:
    """Write header and rows into docs/benchmarks, and return the name of the file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    replace_text(BENCHMARKS_DIR / f"{name}.csv", text.getvalue())
    return f"{name}.csv"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
