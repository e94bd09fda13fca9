"""List the evidence pages, and write docs/evidence from them.

    python -m scripts.evidence_index              # has the code of each page changed?
    python -m scripts.evidence_index --write      # rewrite docs/evidence
    python -m scripts.evidence_index --run quick  # remake pages one by one

`--run quick cpu --changed` continues after an earlier call was stopped.

Input: docs/benchmarks/claims.toml and pages.toml, the pages, and git's history. A page
states the commit at which it was made; its entry lists the files and folders that it
covers. If their code has changed since (comments and docstrings do not count), the page
is older than the code that it covers. Its entry quotes figures, which the page must
contain. `scripts.evidence_claims` writes this into docs/evidence, one page for each
claim.
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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from scripts import evidence_claims
from scripts.evidence import BENCHMARKS_DIR, MADE, REPOSITORY
from scripts.evidence_claims import SAME, Claim, Row

Run = Literal["quick", "cpu", "long", "gpu"]
RUNS: tuple[Run, ...] = ("quick", "cpu", "long", "gpu")
PAGES_PATH = BENCHMARKS_DIR / "pages.toml"
CLAIMS_PATH = BENCHMARKS_DIR / "claims.toml"
_TEMPORARY = "$TMP"
"""Placeholder in a command for a temporary folder."""
_CLEANUP_S = 20.0
"""How long a command may clean up after Ctrl-C before it is killed."""
_SHOWN = r"\]\(((?:\.\./figures/)?\w+\.(?:csv|png))\)"
"""Link of a page to a table or a figure that its script writes."""
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
_FIGURE = re.compile(
    r"(?<![\w.,-])(?:\d+ min \d+ s|\d+ of \d+|\d{1,3}(?:,\d{3})+"
    r"|\d+\.\d+(?:e-?\d+)?%?|\d+%|\d{3,})(?!\w|[.,]\d)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """One page, as pages.toml describes it."""

    name: str
    claim: str
    """Name of the claim that it supports."""
    question: str
    found: str
    """The answer, in figures of the page."""
    commands: tuple[str, ...]
    """Commands that make the page; `$TMP` in them is a temporary folder."""
    run: Run
    covers: tuple[str, ...]
    """Files and folders of the repository."""
    computed: tuple[str, ...] = ()
    """Figures of `found` that follow from figures of the page or are bounds."""

    @property
    def path(self) -> Path:
        """The Markdown file."""
        return BENCHMARKS_DIR / f"{self.name}.md"


def read_claims(path: Path = CLAIMS_PATH) -> list[Claim]:
    """Return all claims in the order of the file.

    Raises:
      ValueError: an entry lacks a key or has an unknown one.
    """
    keys = {field.name for field in dataclasses.fields(Claim)} - {"name"}
    return [Claim(name=name, **entry) for name, entry in _entries(path, keys).items()]


def read_pages(
    path: Path = PAGES_PATH, claims: Collection[str] | None = None
) -> list[Page]:
    """Return all pages in the order of the file.

    Args:
      path: of a file like pages.toml.
      claims: names that a page's claim may have; None: those of claims.toml.
    Raises:
      ValueError: an entry lacks a key, has an unknown one, names an unknown claim or
        run, or covers a path that does not exist; or a claim has no page.
    """
    if claims is None:
        claims = [claim.name for claim in read_claims()]
    keys = {field.name for field in dataclasses.fields(Page)} - {"name", "computed"}
    pages = []
    for name, entry in _entries(path, keys, {"computed"}).items():
        if entry["claim"] not in claims:
            raise ValueError(f"{path.name}: {name}: claim must be one of {claims}")
        if entry["run"] not in RUNS:
            raise ValueError(f"{path.name}: {name}: run must be one of {RUNS}")
        gone = [one for one in entry["covers"] if not (REPOSITORY / one).exists()]
        if gone or not entry["covers"]:
            raise ValueError(f"{path.name}: {name} covers what is not there: {gone}")
        for key in ("commands", "covers", "computed"):
            entry[key] = tuple(entry.get(key, ()))
        pages.append(Page(name=name, **entry))
    if bare := {*claims} - {page.claim for page in pages}:
        raise ValueError(f"{path.name}: no page for the claims {sorted(bare)}")
    return pages


def _entries(
    path: Path, keys: Collection[str], optional: Collection[str] = ()
) -> Mapping[str, dict[str, Any]]:
    entries = tomllib.loads(path.read_text())
    for name, entry in entries.items():
        if {*entry} - {*optional} != {*keys}:
            raise ValueError(f"{path.name}: {name} must have {sorted(keys)}")
    return entries


def made(text: str) -> tuple[str, str] | None:
    """Return the commit and the date that a page states, or None if it does not."""
    found = re.search(MADE, text)
    return None if found is None else (found["commit"], found["date"])


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, text=True
    )


def changed(page: Page, commit: str) -> bool | None:
    """Return whether code that a page covers differs from a commit.

    Return None if the commit is not in the history.
    """
    # A commit of a rebased branch exists only in the clone that made it.
    if _git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return None
    names = _git("diff", "--name-only", "--no-renames", commit, "--", *page.covers)
    return any(_differs(name, commit) for name in names.stdout.splitlines())


def _differs(name: str, commit: str) -> bool:
    """Return whether the code of a file, which has changed, differs from a commit's."""
    path = REPOSITORY / name
    before = _git("show", f"{commit}:{name}")
    if path.suffix != ".py" or not path.exists() or before.returncode != 0:
        return True
    try:
        return _code(before.stdout) != _code(path.read_text())
    except SyntaxError:
        return True


def _code(text: str) -> str:
    """Return a module's code without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [one for one in body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def since(page: Page) -> str:
    """Return in a few words whether the code of a page has changed since then."""
    mark = made(page.path.read_text())
    if mark is not None:
        is_changed = changed(page, mark[0])
        words = {True: "**changed**", False: SAME, None: "commit not found"}
        return words[is_changed]
    # Its commit is unknown, but no newer than the last change of its file.
    written = _git("log", "-1", "--format=%h", "--", str(page.path)).stdout.strip()
    is_changed = not written or changed(page, written)
    return "**changed**" if is_changed else "commit not recorded"


def figures(text: str) -> set[str]:
    """Return the numbers of a text that look measured; code and links do not count.

    These are decimals, shares in percent, counts of counts ("80 of 80"), whole numbers
    of three digits or more, and times ("3 min 15 s").
    """
    text = re.sub(r"(?m)^    .*$|`[^`]*`|\[[^]]*\]\([^)]*\)", "", text)
    return set(_FIGURE.findall(text.replace("\n", " ")))


def missing(page: Page) -> set[str]:
    """Return the figures that a page's entry quotes and its output does not contain.

    The output is the page and the CSV files that it links to. A number may be rounded,
    and a share may be a ratio there.
    """
    text = page.path.read_text()
    for name in re.findall(r"\]\((\w+\.csv)\)", text):
        text += (page.path.parent / name).read_text()
    numbers = [float(one.replace(",", "")) for one in re.findall(_NUMBER, text)]

    def contains(figure: str) -> bool:
        if " " in figure:
            return figure in text or figure.replace(" of ", "/") in text
        number = figure.rstrip("%").replace(",", "")
        mantissa, _, exponent = number.partition("e")
        half = 0.5000001 * 10.0 ** (
            int(exponent or 0) - len(mantissa.partition(".")[2])
        )
        scales = (1, 100) if figure.endswith("%") else (1,)
        return any(
            abs(scale * one - float(number)) <= half
            for one in numbers
            for scale in scales
        )

    quoted = figures(page.found) - {*page.computed}
    return {figure for figure in quoted if not contains(figure)}


def texts(claims: Sequence[Claim], pages: Sequence[Page]) -> dict[str, str]:
    """Return the text of each file of docs/evidence, by its name."""
    rows = {claim.name: list[Row]() for claim in claims}
    for page in pages:
        mark = made(page.path.read_text())
        row = Row(
            page=page.name,
            question=page.question,
            found=page.found,
            made="not recorded" if mark is None else f"{mark[1]}, `{mark[0]}`",
            since=since(page),
            commands=page.commands,
        )
        rows[page.claim].append(row)
    return evidence_claims.texts([(claim, rows[claim.name]) for claim in claims])


def run(pages: Sequence[Page]) -> int:
    """Remake pages one by one, then print how long each took, slowest first.

    A command's exit code states whether its bounds held. If a command of a page fails,
    is killed, or is stopped by Ctrl-C, the old page and the tables and figures that it
    links to are restored. What the command wrote is moved to build/rejected.

    Returns:
      0: all commands succeeded. 1: one failed, or Ctrl-C ended the call.
    """
    failed = list[str]()
    times = list[tuple[float, str]]()
    for page in pages:
        before = _output(page)
        began_s = time.monotonic()
        errors, is_stopped = _run_commands(page)
        after = _output(page)
        if errors:
            _restore(before, after)
        failed += errors
        result = "old page kept" if errors else "unchanged" if after == before else ""
        took_s = time.monotonic() - began_s
        times.append((took_s, f"{page.name}  {result}".rstrip()))
        print(f"{page.name}: {took_s:.0f} s", flush=True)
        if is_stopped:
            rest = [one.name for one in pages[len(times) :]]
            failed.append(f"not begun: {', '.join(rest) or 'none'}")
            break
    rows = sorted(times, reverse=True)
    rows.append((sum(took_s for took_s, _ in times), "total"))
    print("\n     s  page")
    print("".join(f"{took_s:6.0f}  {name}\n" for took_s, name in rows))
    print("\n".join(failed) or f"{len(pages)} pages made", flush=True)
    return 1 if failed else 0


def _run_commands(page: Page) -> tuple[list[str], bool]:
    """Return which commands of a page failed, and whether Ctrl-C stopped one."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for command in page.commands:
            words = shlex.split(command.replace(_TEMPORARY, folder))
            if words[0] == "python":
                words[0] = sys.executable
            process = subprocess.Popen(words, cwd=REPOSITORY)
            try:
                code = process.wait()
            except KeyboardInterrupt:
                _end(process)
                return [*failed, f"{page.name}: {command} was stopped by Ctrl-C"], True
            if code != 0:
                failed.append(f"{page.name}: {command} ended with {code}")
    return failed, False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that the terminal has interrupted too; kill it if it hangs."""
    try:
        process.wait(timeout=_CLEANUP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _output(page: Page) -> dict[Path, bytes]:
    """Return the content of a page, and of the tables and figures that it links to."""
    if not page.path.exists():
        return {}
    names = re.findall(_SHOWN, page.path.read_text())
    paths = [page.path, *(page.path.parent / name for name in names)]
    return {path: path.read_bytes() for path in paths if path.exists()}


def _restore(before: Mapping[Path, bytes], after: Mapping[Path, bytes]) -> None:
    """Put back the files of before; move to build/rejected what replaced them."""
    folder = REPOSITORY / "build" / "rejected"
    for path, content in after.items():
        if before.get(path) != content:
            folder.mkdir(parents=True, exist_ok=True)
            path.replace(folder / path.name)
            print(f"{path.name} is kept as {folder / path.name}")
    for path, content in before.items():
        if not path.exists():
            path.write_bytes(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or run; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/evidence")
    parser.add_argument("--run", choices=RUNS, nargs="+", help="make pages of a kind")
    parser.add_argument("--only", nargs="+", help="names of pages")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="skip pages that were made by the present code",
    )
    args = parser.parse_args(argv)
    pages = read_pages()
    unknown = {*(args.only or ())} - {page.name for page in pages}
    if unknown:
        parser.error(f"--only: no page is named {', '.join(sorted(unknown))}")
    chosen = [page for page in pages if args.only is None or page.name in args.only]
    kinds = cast(list[Run] | None, args.run)
    if args.only is not None and kinds is not None:
        # Left out in silence, a page that was asked for would keep its old figures.
        others = [
            f"{page.name} ({page.run})" for page in chosen if page.run not in kinds
        ]
        if others:
            parser.error(
                f"--only: --run {' '.join(kinds)} does not make {', '.join(others)}; "
                "add their kind to --run"
            )
    if args.changed:
        chosen = [page for page in chosen if since(page) != SAME]
    if kinds is not None:
        return run([page for page in chosen if page.run in kinds])
    if args.write:
        evidence_claims.write(texts(read_claims(), pages))
        print(evidence_claims.EVIDENCE_DIR)
        return 0
    marks = {page.name: since(page) for page in chosen}
    for name, mark in marks.items():
        print(f"{name:24}{mark.strip('*')}")
    for page in chosen:
        if strange := missing(page):
            print(
                f"{page.name}: pages.toml quotes {sorted(strange)}, the page does not"
            )
    count = sum(mark == SAME for mark in marks.values())
    print(f"{count} of {len(marks)} pages were made by the present code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
