"""The text of docs/evidence: an index of the claims, and a page for each.

Input: claims with the rows of their pages, from `scripts.evidence_index`. Output:
Markdown files that link to the pages of docs/benchmarks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.evidence import REPOSITORY

EVIDENCE_DIR = REPOSITORY / "docs" / "evidence"
INDEX = "README.md"
SAME = "unchanged"
"""State of a page whose code has not changed since it was made."""
_INDEX = """# Evidence

What mjax claims, how each claim was tested, and what is not proved. The page of a claim
links to the output of the programs that measured it, in `docs/benchmarks/`. Output with
a name that begins with `gpu` was measured on one H200, all other output on CPUs.

Code changes after it is measured. The column *of current code* counts the outputs whose
code was still unchanged when this table was written; `python -m scripts.evidence_index`
lists the state of each for the present code. `make evidence` and `make evidence-long`
measure again.

| claim | statement | outputs | of current code |
|---|---|---|---|
"""
_CLAIM = """# {title}

**{claim}**

{method}

*Not proved.* {not_proved}

| question | result | output made on | code since then | command |
|---|---|---|---|---|
{rows}
Each question links to the output of its command. *Code since then*: whether the code
that the output covers had changed between the measurement and this table; changes of
comments and docstrings do not count. If an output does not record its commit, the last
change of its file counts as the measurement.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the README, as claims.toml describes it."""

    name: str
    title: str
    claim: str
    """The claim in a sentence or two."""
    method: str
    not_proved: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One page of output, as a row of its claim's table."""

    page: str
    """Name of its file in docs/benchmarks, without suffix."""
    question: str
    found: str
    made: str
    """Date and commit, if the page states them."""
    since: str
    """`SAME`, or a few words on how the code differs."""
    commands: Sequence[str]


def texts(claims: Sequence[tuple[Claim, Sequence[Row]]]) -> dict[str, str]:
    """Return the text of each file by its name: the index first, then the claims."""
    index = _INDEX
    pages = {}
    for claim, rows in claims:
        name = f"{claim.name}.md"
        current = sum(row.since == SAME for row in rows)
        cells = (f"[{claim.title}]({name})", claim.claim, len(rows), current)
        index += _row(cells)
        fields = dataclasses.asdict(claim)
        pages[name] = _CLAIM.format(**fields, rows="".join(map(_output, rows)))
    return {INDEX: index} | pages


def write(files: Mapping[str, str], folder: Path = EVIDENCE_DIR) -> None:
    """Write the files into a folder, and remove other Markdown files there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)


def _output(row: Row) -> str:
    link = f"[{row.question}](../benchmarks/{row.page}.md)"
    # In a shell without $TMP the results would go to the root folder.
    commands = ", ".join(f"`{line.replace('$TMP', 'DIR')}`" for line in row.commands)
    return _row((link, row.found, row.made, row.since, commands))


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"
