"""Collect the pages of the docs site in one folder, and write its configuration.

Input: README.md, docs/ and the files they link to; mkdocs.yml. Output: the folder
build/site/source with the same paths as in the repository, so that links need no
change, with pages made from the code: flags, failures, notebooks, API; and
build/site/mkdocs.yml, whose navigation lists them. Run by `make docs`; `make docs
REPO_URL=https://github.com/OWNER/NAME` adds links to that repository, and to Colab for
each notebook.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

import yaml

from scripts import evidence_index
from scripts.site import failures, flags, notebooks
from scripts.site.messages import messages

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "site"
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
MADE_FROM = {"docs/failures.toml": "reference/failures.md"}
"""Files of the repository, and the pages of the site that are made from them."""


def main() -> int:
    """Write build/site/source and build/site/mkdocs.yml; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repo-url", help="the repository on GitHub")
    repo_url = parser.parse_args().repo_url
    try:
        page_of_notebooks = notebooks.page(ROOT / "notebooks", repo_url)
    except ValueError as error:
        parser.error(str(error))
    source = BUILD / "source"
    shutil.rmtree(BUILD, ignore_errors=True)
    source.mkdir(parents=True)
    pages = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
    for page in pages:
        copy(page, source)
        copied = source / page.relative_to(ROOT)
        copied.write_text(relinked(page))
    for path in sorted((ROOT / "docs").rglob("*.*")):
        if path.suffix in (".css", ".js", ".png", ".svg"):
            copy(path, source)
    for page in pages:
        for link in linked(page):
            if link.is_file() and not (source / link.relative_to(ROOT)).exists():
                copy(link, source)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        copy(path, source)
    found = messages(ROOT / "mjax")
    entries = failures.read(ROOT / "docs" / "failures.toml")
    made = {
        "reference/flags.md": flags.page(),
        "reference/notebooks.md": page_of_notebooks,
        "reference/failures.md": failures.failures_page(entries, found),
        "reference/refusals.md": failures.refusals_page(found),
    } | api_pages(ROOT / "mjax")
    for name, text in made.items():
        path = source / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config |= {
        "docs_dir": "source",
        "site_dir": "html",
        "nav": expanded(config["nav"], source, evidence()),
    }
    if repo_url is not None:
        config["repo_url"] = repo_url
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    print(f"docs: {len(pages)} pages of ours, {len(made)} made from the code")
    return 0


def copy(path: Path, source: Path) -> None:
    """Copy a file of the repository to the same path below source."""
    target = source / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def relinked(page: Path) -> str:
    """Return a page whose links to a source of a made page lead to the made page."""
    text = page.read_text()
    for name, made in MADE_FROM.items():
        link = os.path.relpath(ROOT / name, page.parent)
        target = os.path.relpath(ROOT / made, page.parent)
        text = text.replace(f"]({link})", f"]({target})")
    return text


def linked(page: Path) -> list[Path]:
    """Return the files of the repository that a page links to.

    Raises:
      ValueError: a link leads out of the repository.
    """
    links = (link for link in _LINK.findall(page.read_text()) if ":" not in link)
    paths = [Path(os.path.normpath(page.parent / link)) for link in links]
    for path in paths:
        if not path.is_relative_to(ROOT):
            raise ValueError(f"{page}: the link to {path} leads out of the repository")
    return paths


def api_pages(package: Path) -> dict[str, str]:
    """Return a page for each package, which mkdocstrings fills from its docstrings.

    Args:
      package: the folder of a package; those below it are included.
    Returns:
      Text of pages by name, in the order of the names.
    """
    pages = {}
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        name = ".".join(folder.relative_to(package.parent).parts)
        modules = [
            f"{name}.{path.stem}"
            for path in sorted(folder.glob("*.py"))
            if not path.stem.startswith("_")
        ]
        text = "".join(f"\n::: {module}\n" for module in [name, *modules])
        pages[f"reference/api/{name}.md"] = f"# {name}\n{text}"
    return pages


def evidence() -> list:
    """Return the navigation of the claims, each with its pages of output."""
    pages = evidence_index.read_pages()
    entries = []
    for claim in evidence_index.read_claims():
        output = [page.name for page in pages if page.claim == claim.name]
        files = [f"docs/benchmarks/{name}.md" for name in output]
        entries.append({claim.title: [f"docs/evidence/{claim.name}.md", *files]})
    return entries


def expanded(entries: list, source: Path, claims: list) -> list:
    """Return a navigation with folders replaced by their pages.

    Args:
      entries: as in mkdocs.yml. A folder with a title becomes the pages in it, and
        `docs/evidence/` becomes claims.
      source: the folder that paths are relative to.
      claims: navigation entries.
    """
    result = []
    for entry in entries:
        if entry == "docs/evidence/":
            result.extend(claims)
            continue
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            if isinstance(value, list):
                value = expanded(value, source, claims)
            elif value.endswith("/"):
                value = [
                    str(page.relative_to(source))
                    for page in sorted((source / value).glob("*.md"))
                ]
            entry = {title: value}
        result.append(entry)
    return result


if __name__ == "__main__":
    sys.exit(main())
