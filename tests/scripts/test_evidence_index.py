"""Pages of evidence state their commit; the index tells which are out of date."""

import dataclasses
import re
import subprocess
import sys

import pytest

from scripts import evidence, evidence_claims, evidence_index
from scripts.evidence_index import Page, read_pages

PAGES = read_pages()
ROOT = evidence.REPOSITORY


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
        "claim": "speed",
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


def test_a_long_table_is_a_csv_file_that_the_page_links_to(repository):
    folder, _ = repository
    rows = [["1,5", "a | b"], ["1,024", "c"]]
    table = evidence.Table(title="T", text="?", header=["x", ""], rows=rows, file="all")
    text = evidence.write_page("one", "One", "python -c pass", [table]).read_text()
    assert text.endswith("## T\n\n?\n\n[all.csv](all.csv) has the 2 rows.\n")
    written = (folder / "docs" / "all.csv").read_text()
    assert written == 'x,\n"1,5",a | b\n"1,024",c\n'
    assert evidence_index.missing(page(found="1,024 and 1,025")) == {"1,025"}


def git_head(folder):
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(words, cwd=folder, text=True).strip()


def test_a_page_is_old_when_what_it_covers_changes_and_not_otherwise(repository):
    folder, git = repository
    write()
    assert evidence_index.since(page()) == "unchanged"
    (folder / "mjax" / "b.py").write_text("x = 2\n")
    git("commit", "-qam", "b")
    assert evidence_index.since(page()) == "unchanged"
    words = '"""Says what."""\n\n# A comment.\nx = (1)\n"""Of x."""\n'
    (folder / "mjax" / "a.py").write_text(words)
    git("commit", "-qam", "words")
    assert evidence_index.since(page()) == "unchanged"
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
    assert evidence_index.since(page()) == "unchanged"
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
    assert evidence_index.since(page()) == "unchanged"
    git("commit", "-q", "--amend", "-m", "another")
    assert evidence_index.since(page()) == "commit not found"


def test_every_file_of_output_is_a_page_and_the_evidence_is_made_of_the_pages():
    files = {path.stem for path in evidence.BENCHMARKS_DIR.glob("*.md")}
    assert {one.name for one in PAGES} == files

    def without_marks(text):
        # These columns depend on what has been committed since: the last of the
        # index, the last but one of a claim.
        text = re.sub(r"\| \d+ \|$", "|", text, flags=re.MULTILINE)
        return re.sub(r"\|[^|]*(\|[^|]*\|)$", r"\1", text, flags=re.MULTILINE)

    folder = evidence_claims.EVIDENCE_DIR
    found = {path.name: path.read_text() for path in folder.glob("*.md")}
    made = evidence_index.texts(evidence_index.read_claims(), PAGES)
    assert {name: without_marks(text) for name, text in found.items()} == {
        name: without_marks(text) for name, text in made.items()
    }
    links = re.findall(r"\(\.\./benchmarks/(\w+)\.md\)", "".join(found.values()))
    assert sorted(links) == sorted(files)


def test_every_figure_of_the_readme_is_the_result_of_a_page():
    text = (evidence.REPOSITORY / "README.md").read_text()
    # Versions of Python and Llama, parameters in billions, an exit code.
    names = {"3.12", "3.1", "175", "130"}
    quoted = evidence_index.figures(text) - names
    assert {"49.8%", "80 of 80", "0.91", "59,900", "1 min 42 s"} <= quoted
    claims = [f"{one.claim} {one.not_proved}" for one in evidence_index.read_claims()]
    quoted |= evidence_index.figures(" ".join(claims))
    assert (
        quoted - evidence_index.figures(" ".join(one.found for one in PAGES)) == set()
    )


@pytest.mark.parametrize("one", PAGES, ids=lambda one: one.name)
def test_every_figure_of_a_result_is_on_its_page(one):
    assert evidence_index.missing(one) == set()
    assert {*one.computed} <= evidence_index.figures(one.found)


def test_a_figure_that_its_page_does_not_have_is_told(repository):
    write("50 of 50 cases within 1.24e-07, 1,024 ranks, 0.498 of the peak, `7.5`")
    good = "50 of 50 within 1.2e-7, 1,024 ranks, 49.8% and 7.5"
    assert evidence_index.missing(page(found=good)) == set()
    bad = "51 of 50 within 1.3e-7, 1,025 ranks, 49.9% and 7.6"
    told = {"51 of 50", "1.3e-7", "1,025", "49.9%", "7.6"}
    assert evidence_index.missing(page(found=bad)) == told
    assert evidence_index.missing(page(found=bad, computed=tuple(told))) == set()


def test_a_claim_is_one_row_of_the_index_and_a_page_that_links_to_its_output(tmp_path):
    claims = [
        evidence_claims.Claim(
            name=name, title=name.title(), claim="It is.", method="How.", not_proved="?"
        )
        for name in ("one", "two")
    ]
    fields = {"question": "Is it?", "found": "yes", "made": "now", "commands": ("x",)}
    rows = [
        evidence_claims.Row(page="a", since=evidence_claims.SAME, **fields),
        evidence_claims.Row(page="b", since="**changed**", **fields),
    ]
    texts = evidence_claims.texts([(claims[0], rows), (claims[1], rows[1:])])
    assert list(texts) == ["README.md", "one.md", "two.md"]
    assert "| [One](one.md) | It is. | 2 | 1 |\n" in texts["README.md"]
    assert "| [Two](two.md) | It is. | 1 | 0 |\n" in texts["README.md"]
    row = "| [Is it?](../benchmarks/b.md) | yes | now | **changed** | `x` |\n"
    assert row in texts["two.md"]
    (tmp_path / "gone.md").write_text("")
    evidence_claims.write(texts, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\nquestion = "?"\n', "a must have"),
        ("bare", r"no page for the claims \['speed'\]"),
        ("claim", "claim must be one of"),
        ("run", "run must be one of"),
        ("covers", "covers what is not there"),
    ],
)
def test_an_entry_that_lacks_something_is_refused(text, message, tmp_path):
    entry = {
        "claim": '"overlap"',
        "question": '"?"',
        "found": '"!"',
        "commands": '["x"]',
        "run": '"quick"',
        "covers": '["mjax"]',
    }
    if text in entry:
        entry[text] = {"claim": '"none"', "run": '"now"', "covers": '["mjax/gone"]'}[
            text
        ]
    if not text.startswith("["):
        text = "[a]\n" + "\n".join(f"{key} = {value}" for key, value in entry.items())
    path = tmp_path / "pages.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_pages(path, ["speed", "overlap"])


def test_only_pages_of_other_code_are_made_when_asked(repository, monkeypatch, capsys):
    folder, git = repository
    write()
    stays, changes = page(), page(covers=("mjax/b.py",))
    (folder / "mjax" / "b.py").write_text("x = 2\n")
    git("commit", "-qam", "b")
    pages = [stays, dataclasses.replace(changes, commands=("test -d mjax",))]
    monkeypatch.setattr(evidence_index, "read_pages", lambda: pages)
    assert evidence_index.main(["--run", "quick", "--changed"]) == 0
    assert capsys.readouterr().out.endswith("1 pages made\n")


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


def bench(folder, code):
    """Return the command of a page: a script beside `write` in the test's checkout."""
    (folder / "make.py").write_text(code)
    return "python make.py"


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("raise SystemExit(1)", "ended with 1"),
        ("os.kill(os.getpid(), 9)", "ended with -9"),
    ],
)
def test_a_page_whose_command_fails_keeps_its_old_text(repository, capfd, end, told):
    folder, _ = repository
    table = evidence.Table(title="T", text="?", header=["x"], rows=[["1"]], file="all")
    old = evidence.write_page("one", "One", "python make.py", [table])
    (folder / "docs" / "two.csv").write_text("before\n")
    old.write_text(old.read_text() + "[two.csv](two.csv)\n")
    text = old.read_text()
    code = (
        "import os, pathlib\n"
        "docs = pathlib.Path('docs')\n"
        "(docs / 'all.csv').write_text('worse')\n"
        "(docs / 'new.csv').write_text('new')\n"
        "(docs / 'one.md').write_text('[all](all.csv) [new](new.csv)')\n"
    )
    assert evidence_index.run([page(commands=(bench(folder, code + end),))]) == 1
    assert old.read_text() == text
    assert (folder / "docs" / "all.csv").read_text() == "x\n1\n"
    assert (folder / "docs" / "two.csv").read_text() == "before\n"
    assert not (folder / "docs" / "new.csv").exists()
    rejected = folder / "build" / "rejected"
    assert (rejected / "one.md").read_text() == "[all](all.csv) [new](new.csv)"
    assert (rejected / "all.csv").read_text() == "worse"
    printed = capfd.readouterr().out
    assert f"one: python make.py {told}" in printed
    assert re.search(r"^ +\d+  one  old page kept$", printed, re.M)


def test_a_page_is_replaced_in_one_step(repository, monkeypatch):
    folder, _ = repository
    text = write().read_text()

    def full(path, target):
        assert path.read_text() != text
        assert target.read_text() == text
        raise OSError("stopped before the page is replaced")

    with monkeypatch.context() as patched:
        patched.setattr(evidence.Path, "replace", full)
        with pytest.raises(OSError, match="stopped before"):
            write("another")
    assert (folder / "docs" / "one.md").read_text() == text
    assert "another" in write("another").read_text()


def test_the_times_of_the_pages_are_listed_slowest_first(capfd, monkeypatch):
    clock = iter([0.0, 2.0, 2.0, 9.0])
    monkeypatch.setattr(evidence_index.time, "monotonic", lambda: next(clock))
    assert evidence_index.run([page(), page(name="two")]) == 0
    printed = capfd.readouterr().out
    table = (
        "     s  page\n     7  two  unchanged\n     2  one  unchanged\n     9  total\n"
    )
    assert table in printed


def test_ctrl_c_ends_a_command_keeps_its_old_page_and_lists_the_others(repository):
    folder, _ = repository
    code = (
        "import pathlib, os, time, sys, signal\n"
        "path = pathlib.Path('docs/one.md')\n"
        "path.write_text('half')\n"
        "try:\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "finally:\n"
        "    pathlib.Path('cleaned').touch()\n"
    )
    text = write().read_text()
    command = bench(folder, code)
    pages = [page(name="zero"), page(commands=(command,)), page(name="two")]
    main = (
        "import signal, sys\n"
        # Ignored by a process that was started in the background.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\n"
        "from scripts import evidence_index as index\n"
        f"index.REPOSITORY = Path({str(folder)!r})\n"
        "index.BENCHMARKS_DIR = index.REPOSITORY / 'docs'\n"
        "Page = index.Page\n"
        f"sys.exit(index.run({pages!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", main],
        cwd=ROOT,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert (folder / "docs" / "one.md").read_text() == text
    assert (folder / "cleaned").exists()
    assert "one: python make.py was stopped by Ctrl-C\nnot begun: two" in (done.stdout)
    assert re.search(r"^ +\d+  zero  unchanged$", done.stdout, re.M)


def test_a_page_that_is_asked_for_by_name_is_never_left_out(capsys):
    with pytest.raises(SystemExit):
        evidence_index.main(["--run", "quick", "cpu", "--only", "parity", "chaos"])
    told = "--only: --run quick cpu does not make chaos (long); add their kind to --run"
    assert told in capsys.readouterr().err
