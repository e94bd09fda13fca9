"""The catalogue of failures: all messages of the code, each with a cause and remedy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.site import failures
from scripts.site.messages import Message, literal, messages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> list[Message]:
    return messages(ROOT / "mjax")


@pytest.fixture(scope="module")
def entries() -> list[failures.Failure]:
    return failures.read(ROOT / "docs" / "failures.toml")


def test_every_failure_of_a_run_has_a_cause_and_a_remedy(found, entries):
    """If this fails, add an entry to docs/failures.toml, or a fragment to one."""
    without = [
        f"{message.module}: {message.text}"
        for message in failures.of_runs(found)
        if not any(failures.means(entry, message) for entry in entries)
    ]
    assert without == []


def test_every_fragment_is_a_part_of_a_message_of_the_code(found, entries):
    texts = [message.text for message in failures.of_runs(found)]
    unknown = [
        fragment
        for entry in entries
        for fragment in entry.fragments
        if not any(fragment in text for text in texts)
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("python", "flag", "title"),
    [
        ([], "--stps", "A program ends with exit code 2"),
        (["-S"], "--seed", "This Python has no jax"),
    ],
    ids=["bad flag", "without packages"],
)
def test_what_ends_a_run_before_it_starts_is_on_the_page(
    found, entries, python, flag, title
):
    done = subprocess.run(
        [sys.executable, *python, "-m", "mjax.train", flag, "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    matching = [
        entry
        for entry in entries
        for text in entry.printed
        if re.fullmatch(re.sub(r"\\{.*?\\}", ".*", re.escape(text)), last)
    ]
    # The most exact one; the form of all refusals matches too.
    entry = max(matching, key=lambda entry: len(entry.printed[0]))
    assert entry.title == title
    (text,) = entry.printed
    assert f"## {entry.title}" in failures.failures_page(entries, found)
    assert f"- `{text}`\n" in failures.failures_page(entries, found)


def test_a_message_is_on_one_of_the_two_pages(found, entries):
    pages = failures.failures_page(entries, found) + failures.refusals_page(found)
    missing = [
        message for message in found if " ".join(message.text.split()) not in pages
    ]
    assert missing == []


def test_messages_are_read_from_every_way_to_make_an_error(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text(
        '''
_WHY = "the disk is full"

class FullError(RuntimeError):
    """No room."""

def plain(size):
    raise ValueError(f"--size must be at least 1, got {size}")

def sum_of_parts(is_old):
    text = "a file is " + ("too old" if is_old else "too new")
    raise FullError(text)

def maker(path):
    return FullError(f"cannot write {path}, {_WHY}; make room")

def raises_what_another_makes(path):
    raise maker(path)

def calls_for_a_text():
    raise ValueError(_text("x"))

def _text(name):
    return f"the text of {name}"

def gives_up(self):
    problem = f"the state of step {self.step} is lost"
    self.say(f"gave up: {problem}")

def passes_on(error):
    raise ValueError(str(error)) from error

def ours():
    raise AssertionError("a mistake of ours")
'''
    )
    assert [(m.error, m.base, m.text) for m in messages(package)] == [
        ("ValueError", "ValueError", "--size must be at least 1, got {size}"),
        ("FullError", "RuntimeError", "a file is too old"),
        ("FullError", "RuntimeError", "a file is too new"),
        (
            "FullError",
            "RuntimeError",
            "cannot write {path}, the disk is full; make room",
        ),
        ("ValueError", "ValueError", "the text of {name}"),
        (
            "RuntimeError",
            "RuntimeError",
            "gave up: the state of step {self.step} is lost",
        ),
    ]


def test_the_expressions_of_a_message_are_not_its_words():
    assert literal("{path} is {size + 1} long").split() == ["is", "long"]
