"""The sources of the docs site: what is collected, and what is made from the code."""

import re
from pathlib import Path

import pytest
import yaml

from mjax.__main__ import PROGRAMS
from scripts.site import drawings, flags, notebooks, stage

ROOT = Path(__file__).parents[2]


def test_every_public_module_has_its_place_in_the_api_pages():
    listed = re.findall(
        r"^::: (.*)$", "".join(stage.api_pages(ROOT / "mjax").values()), re.MULTILINE
    )
    files = (path.relative_to(ROOT) for path in (ROOT / "mjax").rglob("*.py"))
    names = {".".join(file.with_suffix("").parts) for file in files}
    public = {name.removesuffix(".__init__") for name in names} - {
        name for name in names if name.endswith("__main__")
    }
    assert sorted(listed) == sorted(public)


def test_the_page_of_flags_has_every_program_and_the_flags_of_its_commands():
    page = flags.page()
    assert re.findall(r"^## mjax (\S+)$", page, re.MULTILINE) == list(PROGRAMS)
    for flag in ("--mesh.tp", "--spares", "--history", "--held-out", "--reports"):
        assert flag in page


def test_a_link_out_of_the_repository_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("[a](other.md), [web](https://a.b), [out](../secret.txt)")
    with pytest.raises(ValueError, match=r"page\.md: the link to .* leads out"):
        stage.linked(page)


def test_the_page_of_notebooks_links_to_colab_only_if_the_repository_is_known():
    folder = ROOT / "notebooks"
    names = sorted(path.name for path in folder.glob("*.ipynb"))
    without = notebooks.page(folder, None)
    assert re.findall(r"\]\(\.\./notebooks/(\S+)\)", without) == names
    assert "colab" not in without.lower()
    hosted = re.findall(
        r"\(https://colab\.research\.google\.com/github/(\S+)\)",
        notebooks.page(folder, "https://github.com/someone/mjax.git"),
    )
    assert hosted == [f"someone/mjax/blob/main/notebooks/{name}" for name in names]


@pytest.mark.parametrize(
    "url", ["github.com/a/b", "https://gitlab.com/a/b", "https://github.com/a", ""]
)
def test_a_repository_that_colab_cannot_open_is_refused(url):
    with pytest.raises(ValueError, match="--repo-url must be https"):
        notebooks.page(ROOT / "notebooks", url)


def test_the_drawings_of_the_concepts_are_those_of_the_script():
    """`python -m scripts.site.drawings` writes them."""
    figures = {
        path.name: path.read_text() for path in drawings.FIGURES.glob("concept_*")
    }
    assert figures == {
        f"concept_{name}.svg": draw() for name, draw in drawings.DRAWINGS.items()
    }


def test_a_level_of_zero_never_stores_more_than_the_one_before():
    totals = [sum(drawings.bytes_per_parameter(n, 8).values()) for n in range(4)]
    assert totals == [18, 7.5, 7.5, 2.25]


def test_the_navigation_names_pages_that_exist_once():
    def pages(entries):
        for entry in entries:
            value = next(iter(entry.values())) if isinstance(entry, dict) else entry
            yield from pages(value) if isinstance(value, list) else [value]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = [p for p in pages(config["nav"]) if not p.startswith("reference/")]
    assert len(named) == len(set(named))
    assert [name for name in named if not (ROOT / name).exists()] == []
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")}
    assert ours - set(named) == set()


def test_code_in_a_list_is_indented_as_python_markdown_reads_it():
    """It asks for eight spaces; with seven, which GitHub takes, it is a paragraph."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    bad = [
        f"{page.name}: {line}"
        for page in pages
        for line in re.findall(
            r"^[0-9*-][^\n]*\n(?:[^\n]*\n)*?\n {7}(\S.*)$",
            page.read_text(),
            re.MULTILINE,
        )
    ]
    assert bad == []


def test_a_link_to_a_source_leads_to_the_page_that_is_made_from_it():
    how_to = ROOT / "docs" / "how_to.md"
    assert "](failures.toml)" in how_to.read_text()
    assert "](../reference/failures.md)" in stage.relinked(how_to)
    assert "](failures.toml)" not in stage.relinked(how_to)
