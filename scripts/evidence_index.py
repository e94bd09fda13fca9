"""The index of the pages of evidence: what each found, of which code, and how.

    python -m scripts.evidence_index              # pages whose code has changed since
    python -m scripts.evidence_index --write      # docs/benchmarks/README.md anew
    python -m scripts.evidence_index --run quick  # make pages anew, one after the other

Enters: docs/benchmarks/pages.toml, the pages, and what git knows. A page says at which
commit it was made; its entry says which files and folders it covers. Where these have
changed since, other than in comments and docstrings, the page is older than the code
that it certifies, and the index says so.
"""

import argparse
import ast
import dataclasses
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from scripts.evidence import BENCHMARKS_DIR, MADE, REPOSITORY

Run = Literal["quick", "cpu", "long", "gpu"]
RUNS: tuple[Run, ...] = ("quick", "cpu", "long", "gpu")
PAGES_PATH = BENCHMARKS_DIR / "pages.toml"
README_PATH = BENCHMARKS_DIR / "README.md"
_TEMPORARY = "$TMP"
"""In a command: a folder that is made for it and removed."""
_INTRO = """# Measurements

Each page says its command, versions and hardware, and is written again by that command.
Pages that were made since 2026-11-26 say their commit too. Those whose name begins
with gpu were measured on an H200, the others on CPUs. *Code since* says whether the
code that a page certifies had changed when this index was written; comments do not
count.
`python -m scripts.evidence_index` says how it is now; with `--write` it makes this file
of `pages.toml`.

| page | question | found | made | code since | command |
|---|---|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """One page, as pages.toml describes it."""

    name: str
    question: str
    found: str
    commands: tuple[str, ...]
    """That make it; `$TMP` in them is a temporary folder."""
    run: Run
    covers: tuple[str, ...]
    """Files and folders of the repository."""

    @property
    def path(self) -> Path:
        """Where it is."""
        return BENCHMARKS_DIR / f"{self.name}.md"


def read_pages(path: Path = PAGES_PATH) -> list[Page]:
    """Return all entries.

    Raises:
      ValueError: one lacks a key, has another, or covers what is not there.
    """
    keys = {field.name for field in dataclasses.fields(Page)} - {"name"}
    pages = []
    for name, entry in tomllib.loads(path.read_text()).items():
        if {*entry} != keys:
            raise ValueError(f"{path.name}: {name} must have {sorted(keys)}")
        if entry["run"] not in RUNS:
            raise ValueError(f"{path.name}: {name}: run must be one of {RUNS}")
        gone = [one for one in entry["covers"] if not (REPOSITORY / one).exists()]
        if gone or not entry["covers"]:
            raise ValueError(f"{path.name}: {name} covers what is not there: {gone}")
        entry["commands"] = tuple(entry["commands"])
        entry["covers"] = tuple(entry["covers"])
        pages.append(Page(name=name, **entry))
    return pages


def made(text: str) -> tuple[str, str] | None:
    """Return the commit and the date that a page says of itself; None: it does not."""
    found = re.search(MADE, text)
    return None if found is None else (found["commit"], found["date"])


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, text=True
    )


def changed(page: Page, commit: str) -> bool | None:
    """Say if code that a page covers differs from a commit; None: not in history."""
    # A commit of a branch that was rebased is only where it was made.
    if _git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return None
    names = _git("diff", "--name-only", "--no-renames", commit, "--", *page.covers)
    return any(_differs(name, commit) for name in names.stdout.splitlines())


def _differs(name: str, commit: str) -> bool:
    """Say whether a file that has changed since a commit computes something else."""
    path = REPOSITORY / name
    before = _git("show", f"{commit}:{name}")
    if path.suffix != ".py" or not path.exists() or before.returncode != 0:
        return True
    try:
        return _code(before.stdout) != _code(path.read_text())
    except SyntaxError:
        return True


def _code(text: str) -> str:
    """Return a module without what does nothing: comments, docstrings, layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [one for one in body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def since(page: Page) -> str:
    """Say in a word or two whether a page is still of this code."""
    mark = made(page.path.read_text())
    if mark is not None:
        is_changed = changed(page, mark[0])
        words = {True: "**changed**", False: "the same", None: "commit not found"}
        return words[is_changed]
    # Its own commit is not known; it is no newer than the last change of its file.
    written = _git("log", "-1", "--format=%h", "--", str(page.path)).stdout.strip()
    is_changed = not written or changed(page, written)
    return "**changed**" if is_changed else "commit not recorded"


def index(pages: Sequence[Page]) -> str:
    """Return the text of the index."""
    rows = []
    for page in pages:
        mark = made(page.path.read_text())
        when = "not recorded" if mark is None else f"{mark[1]}, `{mark[0]}`"
        commands = ", ".join(f"`{command}`" for command in page.commands)
        link = f"[{page.name}.md]({page.name}.md)"
        cells = (link, page.question, page.found, when, since(page), commands)
        rows.append("| " + " | ".join(cells) + " |\n")
    return _INTRO + "".join(rows)


def run(pages: Sequence[Page]) -> int:
    """Make pages anew, and say how long each took; return 1 if one failed.

    The exit code of a command says whether its bounds held.
    """
    failed = []
    for page in pages:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for command in page.commands:
                words = shlex.split(command.replace(_TEMPORARY, folder))
                if words[0] == "python":
                    words[0] = sys.executable
                code = subprocess.run(words, cwd=REPOSITORY).returncode
                if code != 0:
                    failed.append(f"{page.name}: {command} ended with {code}")
        print(f"{page.name}: {time.monotonic() - began_s:.0f} s", flush=True)
    print("\n".join(failed) or f"{len(pages)} pages made", flush=True)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or run; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the index")
    parser.add_argument("--run", choices=RUNS, nargs="+", help="make pages of a kind")
    parser.add_argument("--only", nargs="+", help="names of pages")
    args = parser.parse_args(argv)
    pages = read_pages()
    unknown = {*(args.only or ())} - {page.name for page in pages}
    if unknown:
        parser.error(f"--only: no page is named {', '.join(sorted(unknown))}")
    chosen = [page for page in pages if args.only is None or page.name in args.only]
    if args.run:
        kinds = cast(list[Run], args.run)
        return run([page for page in chosen if page.run in kinds])
    if args.write:
        README_PATH.write_text(index(pages))
        print(README_PATH)
        return 0
    marks = {page.name: since(page) for page in chosen}
    for name, mark in marks.items():
        print(f"{name:24}{mark.strip('*')}")
    count = sum(mark == "the same" for mark in marks.values())
    print(f"{count} of {len(marks)} pages are of this code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
