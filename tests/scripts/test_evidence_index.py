"""Pages of evidence know of which code they are, and the index when it has changed."""

import re
import subprocess

import pytest

from scripts import evidence, evidence_index
from scripts.evidence_index import Page, read_pages

PAGES = read_pages()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A checkout with one page, of one file."""

    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True)

    (tmp_path / "mjax").mkdir()
    (tmp_path / "mjax" / "a.py").write_text("x = 1\n")
    (tmp_path / "mjax" / "b.py").write_text("x = 1\n")
    (tmp_path / "scripts").mkdir()
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    for module in (evidence, evidence_index):
        monkeypatch.setattr(module, "REPOSITORY", tmp_path)
        monkeypatch.setattr(module, "BENCHMARKS_DIR", tmp_path / "docs")
    return tmp_path, git


def page(**changes):
    fields = {
        "name": "one",
        "question": "?",
        "found": "!",
        "commands": ("python -c pass",),
        "run": "quick",
        "covers": ("mjax/a.py",),
    }
    return Page(**fields | changes)


def write(text="bound"):
    table = evidence.Table(title="T", text=text, header=["a"], rows=[["1"]])
    return evidence.write_page("one", "One", "python -c pass", [table])


def test_a_page_says_commit_date_and_machine_of_the_moment(repository):
    folder, _ = repository
    text = write().read_text()
    head = git_head(folder)
    assert commit_of(text) == head
    assert re.search(r"jax \d+\.\d+.*, \d+ cores of .+, \d+ GiB\. Made by `", text)
    (folder / "mjax" / "a.py").write_text("x = 2\n")
    text = write().read_text()
    assert f"At `{head}` with changes that are not committed, 20" in text
    assert commit_of(text) == head


def commit_of(text):
    mark = evidence_index.made(text)
    assert mark is not None
    return mark[0]


def git_head(folder):
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(words, cwd=folder, text=True).strip()


def test_a_page_is_old_when_what_it_covers_changes_and_not_otherwise(repository):
    folder, git = repository
    write()
    assert evidence_index.since(page()) == "the same"
    (folder / "mjax" / "b.py").write_text("x = 2\n")
    git("commit", "-qam", "b")
    assert evidence_index.since(page()) == "the same"
    words = '"""Says what."""\n\n# A comment.\nx = (1)\n"""Of x."""\n'
    (folder / "mjax" / "a.py").write_text(words)
    git("commit", "-qam", "words")
    assert evidence_index.since(page()) == "the same"
    (folder / "mjax" / "a.py").write_text(words.replace("1", "2"))
    git("commit", "-qam", "a")
    assert evidence_index.since(page()) == "**changed**"
    assert evidence_index.since(page(covers=("mjax/b.py",))) == "**changed**"


def test_a_file_that_is_gone_or_new_makes_a_page_old(repository):
    folder, git = repository
    write()
    (folder / "mjax" / "c.py").write_text("")
    git("add", "-A")
    git("commit", "-qm", "c")
    assert evidence_index.since(page(covers=("mjax",))) == "**changed**"
    assert evidence_index.since(page()) == "the same"
    git("rm", "-q", "mjax/a.py")
    assert evidence_index.since(page()) == "**changed**"


def test_a_page_without_a_commit_is_never_said_to_be_of_this_code(repository):
    folder, git = repository
    path = folder / "docs" / "one.md"
    path.parent.mkdir()
    path.write_text("# One\n\n2026-11, jax 0.11.2, 2-core x86 CPU.\n")
    git("add", "-A")
    git("commit", "-q", "-m", "page")
    assert evidence_index.since(page()) == "commit not recorded"
    (folder / "mjax" / "a.py").write_text("x = 2\n")
    git("commit", "-qam", "a")
    assert evidence_index.since(page()) == "**changed**"


def test_a_commit_that_git_lacks_is_told(repository):
    folder, _ = repository
    path = write()
    path.write_text(path.read_text().replace(git_head(folder), "0123456"))
    assert evidence_index.since(page()) == "commit not found"


def test_a_commit_that_was_rebased_away_is_not_found_though_git_still_has_it(
    repository,
):
    folder, git = repository
    (folder / "mjax" / "a.py").write_text("x = 2\n")
    git("commit", "-qam", "a")
    write()
    assert evidence_index.since(page()) == "the same"
    git("commit", "-q", "--amend", "-m", "another")
    assert evidence_index.since(page()) == "commit not found"


def test_every_page_is_in_the_index_and_the_index_is_of_the_pages():
    files = {path.stem for path in evidence.BENCHMARKS_DIR.glob("*.md")} - {"README"}
    assert {one.name for one in PAGES} == files

    def without_marks(text):
        # The last column but one depends on what has been committed since.
        return [
            re.sub(r"\|[^|]*(\|[^|]*\|)$", r"\1", line) for line in text.split("\n")
        ]

    found = without_marks(evidence_index.README_PATH.read_text())
    assert found == without_marks(evidence_index.index(PAGES))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\nquestion = "?"\n', "a must have"),
        ("run", "run must be one of"),
        ("covers", "covers what is not there"),
    ],
)
def test_an_entry_that_lacks_something_is_refused(text, message, tmp_path):
    entry = {
        "question": '"?"',
        "found": '"!"',
        "commands": '["x"]',
        "run": '"quick"',
        "covers": '["mjax"]',
    }
    if text in entry:
        entry[text] = {"run": '"now"', "covers": '["mjax/gone"]'}[text]
        text = "[a]\n" + "\n".join(f"{key} = {value}" for key, value in entry.items())
    path = tmp_path / "pages.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_pages(path)


def test_pages_are_made_in_turn_and_one_that_fails_is_named(capfd, tmp_path):
    out = tmp_path / "out"
    say = f"open({str(out)!r}, 'a').write"
    pages = [
        page(commands=(f'python -c "{say}(chr(97))"', "test -d $TMP")),
        page(name="two", commands=("python -c 'raise SystemExit(3)'",)),
        page(name="three", commands=(f'python -c "{say}(chr(98))"',)),
    ]
    assert evidence_index.run(pages) == 1
    assert out.read_text() == "ab"
    printed = capfd.readouterr().out
    assert "two: python -c 'raise SystemExit(3)' ended with 3" in printed
    assert evidence_index.run(pages[:1]) == 0
