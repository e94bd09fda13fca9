"""What is said about words that are no flags."""

import re

import pytest

from mjax.cli.flags import slips

KNOWN = {
    *(
        "--steps",
        "--recipe",
        "--mesh.tp",
        "--mesh.dp",
        "--optim.lr",
        "--mesh.gather-first",
    ),
    *("--mesh.no-gather-first", "--profile.steps", "--data.seq-len", "--help"),
}
MEANINGS = {
    "learning-rate": "--optim.lr",
    "resume": "--work-dir alone resumes",
    "gone": "--not.here",
    "tp-size": "--mesh.tp",
}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--learning-rate", "here it is --optim.lr"),
        ("--learning_rate=3", "here it is --optim.lr"),
        ("--Learning-Rate", "here it is --optim.lr"),
        ("--optimizer.learning_rate", "here it is --optim.lr"),
        ("--resume", "--work-dir alone resumes"),
        ("--gone", "-h lists all flags"),
        ("--lr", "the nearest is --optim.lr"),
        ("--training.steps", "the nearest is --steps"),
        ("--seq_len", "the nearest is --data.seq-len"),
        ("--mesh.tpp", "the nearest is --mesh.tp"),
        ("--steeps", "the nearest is --steps"),
        ("--mesh.tp2", "write --mesh.tp 2"),
        ("--mesh.tp:2", "write --mesh.tp 2"),
        ("--recipe:debug", "write --recipe debug"),
        ("--Steps", "write --steps"),
        ("--STEPS=3", "write --steps=3"),
        ("--no-mesh.gather-first", "write --mesh.no-gather-first"),
        ("--qqq.zzz", "-h lists all flags"),
    ],
)
def test_an_unknown_flag_is_answered_with_what_was_meant(word, message):
    found = slips.unknown_flag(word, KNOWN, MEANINGS)
    assert found == f"unknown flag {word.partition('=')[0]}; {message}"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("-lr", "flags begin with two hyphens, got -lr; the nearest is --optim.lr"),
        ("-steps=4", "flags begin with two hyphens, got -steps=4; write --steps=4"),
        ("---steps", "flags begin with two hyphens, got ---steps; write --steps"),
        (
            "\u2014steps",
            "flags begin with two hyphens, got \u2014steps, whose dash is not a "
            "hyphen; write --steps",
        ),
        ("recipe=demo", "unexpected word recipe=demo; write --recipe=demo"),
        ("steps", "unexpected word steps; write --steps"),
        ("lr=3", "unexpected word lr=3; write --optim.lr=3"),
        ("--steps 5", "unexpected word --steps 5; write --steps 5"),
        ("tp_size=4", "unexpected word tp_size=4; write --mesh.tp=4"),
        ("nothing", "unexpected word nothing"),
        ("", "unexpected word ''"),
        ("--", "unexpected --; leave it out"),
    ],
)
def test_a_misplaced_word_is_answered_with_what_was_meant(word, message):
    found = slips.misplaced(word, KNOWN, MEANINGS, "")
    assert re.sub(r"'--steps 5'", "--steps 5", found) == message


def test_numbers_and_texts_are_not_taken_for_flags():
    for word in (
        "-1",
        "-1e3",
        "-inf",
        "-nan",
        "-",
        "1-2",
        "-.5",
        "a-b",
        "\u2014 a",
        "-x y",
    ):
        assert not slips.is_slip(word), word
    for word in ("-lr", "-x", "\u2014steps", "---steps"):
        assert slips.is_slip(word), word
    for word in ("--steps", "--a.b=c d", "--_x"):
        assert slips.is_flag(word), word
    for word in ("--", "-- text", "--1", "---steps", "--a b", "x--a"):
        assert not slips.is_flag(word), word
