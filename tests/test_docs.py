"""What the documents name exists."""

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from mjax.config.train import TrainConfig
from mjax.kernels.attention.api import CAPABILITIES, Capability
from mjax.launch.config import RunConfig

ROOT = Path(__file__).parent.parent
# This page is made of flags that do not exist.
WRONG_ON_PURPOSE = ROOT / "docs" / "benchmarks" / "bad_inputs.md"
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {WRONG_ON_PURPOSE}
)
# Its other rows name the files and flags of other frameworks.
TASKS = ROOT / "docs" / "tasks.md"
by_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def text_on_mjax(document: Path) -> str:
    """The text of a document; of the tasks, the lines that say what mjax does."""
    text = document.read_text()
    if document != TASKS:
        return text
    summary = re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE)
    rows = re.findall(r"^\| mjax \|.*$", text, re.MULTILINE)
    return "\n".join([*summary, *rows])


def test_each_of_the_25_tasks_says_when_it_is_done_and_how_each_framework_does_it() -> (
    None
):
    text = TASKS.read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    summary = re.findall(r"^\| (\d+) \| ([^|]*) \|", text, re.MULTILINE)
    assert [f"{number}. {title}" for number, title in summary] == [
        section.partition("\n")[0] for section in sections
    ]
    assert [int(number) for number, _ in summary] == list(range(1, 26))
    for section in sections:
        assert "**Done when:** " in section
        rows = re.findall(r"^\| (\w+) \| (.*) \|$", section, re.MULTILINE)
        names = ["litgpt", "torchtitan", "levanter", "MaxText", "mjax"]
        assert [name for name, _ in rows] == names
        cells = [cell.strip() for _, row in rows[:4] for cell in row.split(" | ")]
        assert len(cells) == 12  # mark, how and source of each
        assert all(cells)


@by_document
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\[[^]]*\]\(([^)#]+)[^)]*\)", document.read_text())
    local = [link for link in links if not link.startswith("http")]
    assert [link for link in local if not (document.parent / link).exists()] == []


@by_document
def test_tests_that_are_named_exist(document: Path) -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    known = {path.stem for path in files}
    for path in files:
        known |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    named = set(re.findall(r"\btest_\w+", document.read_text()))
    assert named - known == set()


@by_document
def test_files_that_are_named_exist(document: Path) -> None:
    pattern = r"\b(?:mjax|tests|scripts|notebooks)/[\w/]+\.(?:py|sh|ipynb)\b"
    named = set(re.findall(pattern, text_on_mjax(document)))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def flags(cls: typing.Any, prefix: str = "--") -> Iterator[str]:
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from flags(hint, f"{prefix}{name}.")
        else:
            yield (prefix + name).replace("_", "-")


@by_document
def test_flags_of_a_group_that_are_named_exist(document: Path) -> None:
    known = {*flags(TrainConfig), *flags(RunConfig)}
    groups = {flag.partition(".")[0] for flag in known if "." in flag}
    groups |= {group.replace("--", "--no-") for group in groups}  # a wrong place of no-
    pattern = r"--[a-z][a-z-]*(?:\.[a-z][a-z0-9-]*)+"
    named = set(re.findall(pattern, text_on_mjax(document)))
    named = {flag.replace(".no-", ".") for flag in named}
    assert {f for f in named if f.partition(".")[0] in groups} - known == set()


def row(name: str, can: Capability) -> str:
    width = [f"multiple of {can.head_dim_multiple}"] * (can.head_dim_multiple > 1)
    if can.max_head_dim is not None:
        others = ", ".join(f"{on} {most}" for on, most in can.max_head_dim_on.items())
        width.append(f"at most {can.max_head_dim}" + f" ({others})" * bool(others))
    for H, Hv in can.head_dims or ():
        width.append(f"{H}" if Hv == H else f"{H}/{Hv}")
    other_value_dim = can.other_value_dim and (
        can.head_dims is None or any(Hv != H for H, Hv in can.head_dims)
    )
    able = (
        *(other_value_dim, can.window, can.segments, can.soft_cap, can.full),
        can.full and can.two_sided_window,
        can.prefix,
    )
    cells = [
        f"`{name}`",
        ", ".join(can.dtypes),
        ", ".join(can.platforms or ["any"]),
        ", ".join(can.generations or ["any"]),
        ", ".join(width) or "any",
        *("yes" if one else "no" for one in able),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_backends_is_the_one_in_the_code() -> None:
    text = (ROOT / "docs" / "model.md").read_text()
    section = text.partition("## Attention backends")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    assert table == [row(name, can) for name, can in CAPABILITIES.items()]
