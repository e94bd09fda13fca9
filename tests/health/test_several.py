"""Several sources are one text that can be cut again, and is whole if they are."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.health import several
from mjax.health.findings import UnreadableError
from mjax.health.several import Called, Several
from mjax.health.sources import Command, Environment, File, Files, Reading


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A source that says what it is told to."""

    reading: Reading
    shown: str = "fixed"

    def read(self, limit_s: float) -> Reading:
        return self.reading if limit_s > 0 else Reading(status=None)


def whole(text: str, **fields) -> Fixed:
    num_bytes = len(text.encode(errors="surrogateescape"))
    return Fixed(Reading(text=text, num_bytes=num_bytes, **fields))


LINES = st.lists(st.text(st.characters(exclude_characters="\n=")), max_size=4)


@given(st.lists(LINES, min_size=1, max_size=4))
def test_sources_that_are_joined_can_be_cut_again(pieces):
    texts = ["".join(f"{line}\n" for line in lines) for lines in pieces]
    reading = Several(tuple(whole(text) for text in texts)).read(1.0)
    assert reading.cut == ""
    assert reading.status == 0
    found = several.parts(reading.text, len(texts))
    assert [part.text for part in found] == texts
    assert not any(part.absent for part in found)


def test_a_text_without_a_newline_does_not_run_into_the_next_header():
    reading = Several((whole("a"), whole("b"))).read(1.0)
    assert reading.cut == ""
    assert [part.text for part in several.parts(reading.text, 2)] == ["a\n", "b\n"]


def test_a_source_that_was_cut_cuts_the_whole():
    short = Fixed(Reading(text="abc", num_bytes=4))
    assert "were read" in Several((whole("x"), short)).read(1.0).cut
    late = Fixed(Reading(text="abc", status=None))
    assert Several((late, whole("x"))).read(1.0).cut == "its time limit passed"
    assert Several((whole("x"),)).read(0.0).cut == "its time limit passed"


def test_an_absent_source_says_why_and_only_all_are_absent_together():
    gone = Fixed(Reading(absent="there is no\ncommand ip"))
    reading = Several((gone, whole("x\n"))).read(1.0)
    assert (reading.absent, reading.status, reading.cut) == ("", 0, "")
    first, second = several.parts(reading.text, 2)
    assert first.absent == "there is no command ip"
    assert second == several.Part(text="x\n", absent="")
    with pytest.raises(UnreadableError, match="there is no command ip"):
        several.present(first)
    assert several.present(second) == "x\n"
    assert "no\ncommand ip" in Several((gone, gone)).read(1.0).absent


def test_the_first_bad_exit_status_is_that_of_the_whole():
    bad, worse = whole("", status=3, error="said so"), whole("", status=9)
    reading = Several((whole("x"), bad, worse)).read(1.0)
    assert (reading.status, reading.error) == (3, "said so")


def test_another_number_of_sources_is_refused():
    text = Several((whole("a\n"), whole("b\n"))).read(1.0).text
    for num in (1, 3):
        with pytest.raises(UnreadableError, match=f"2 sources, not {num}"):
            several.parts(text, num)
    with pytest.raises(UnreadableError, match="expected a source header, got 'before"):
        several.parts(f"before\n{text}", 2)
    with pytest.raises(UnreadableError, match="3 sources, not 2"):
        several.parts(text + "==> a forged header <==\n", 2)


def test_real_files_commands_and_variables_are_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_OF_A_TEST", "7")
    (tmp_path / "a").write_text("one\n")
    sources = (
        Environment(("NCCL_OF_A_TEST",)),
        File(str(tmp_path / "a")),
        Command(("printf", "two")),
        Files((str(tmp_path / "none*"),)),
    )
    reading = Several(sources).read(10.0)
    assert reading.cut == ""
    found = several.parts(reading.text, 4)
    assert [part.text for part in found[:3]] == ["NCCL_OF_A_TEST=7\n", "one\n", "two\n"]
    assert "none*" in found[3].absent


def test_a_source_is_shown_under_its_shorter_name(tmp_path):
    (tmp_path / "a").write_text("one\n")
    source = Called("all files", Files((f"{tmp_path}/*", "/none/of/them")))
    assert source.shown == "all files"
    assert source.read(1.0).text == f"{tmp_path}/a\tone\n"
    assert Called("all files", Files(("/none/*",))).read(1.0) == Reading(
        absent="there is no all files"
    )
