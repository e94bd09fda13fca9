"""Reports from the journal of a driver that is gone."""

import re

import pytest

from mjax.launch import __main__ as command
from mjax.launch.client import write_private
from mjax.launch.events import Event
from mjax.launch.journal import Journal


def write(work_dir, *events):
    """Write a journal and the files that a driver has left; nothing listens."""
    journal = Journal(work_dir)
    for generation, (kind, text, data) in enumerate(events):
        journal.record(Event(kind=kind, text=text, data=data), generation)
    journal.close()
    write_private(work_dir / "launch" / "address.json", '["127.0.0.1", 1]')
    write_private(work_dir / "launch" / "token", "secret")


BEGIN = ("launch", "a driver has begun", {})
FAILURE = ("failure", "rank 0 ended with 2; the last lines of its log:\nerror: x", {})


def end(code):
    return ("end", f"the run ended with {code}", {"code": code})


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([BEGIN, ("state", "running", {}), end(0)], "0, in generation 2"),
        (
            [BEGIN, ("stop", "asked to stop", {}), FAILURE, end(42)],
            "42 (asked to stop), in generation 3",
        ),
        (
            [BEGIN, FAILURE, ("gave_up", "gave up: 3 in a row", {}), end(93)],
            "93 (gave up: 3 in a row), in generation 3",
        ),
        ([BEGIN, FAILURE, end(2)], "2 (rank 0 ended with 2), in generation 2"),
        ([BEGIN, FAILURE, end(1), BEGIN, end(42)], "42, in generation 4"),
    ],
)
def test_the_status_of_an_ended_run_says_how_and_when(tmp_path, capsys, events, said):
    write(tmp_path, *events)
    assert command.main(["status", "--work-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    start = f"{re.escape(str(tmp_path))}: the run ended at {time} with exit code "
    assert re.match(start + re.escape(said), out), out


def test_a_command_for_an_ended_run_is_answered_with_its_end(tmp_path, capsys):
    """No matter who listens where its driver did."""
    write(tmp_path, BEGIN, FAILURE, end(93))
    assert command.main(["stop", "--work-dir", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"error: {tmp_path}: the run ended at ")
    assert "93 (rank 0 ended with 2)" in refused


def test_a_run_whose_driver_was_killed_has_not_ended(tmp_path, capsys):
    write(tmp_path, BEGIN, end(42), BEGIN, ("state", "running", {}))
    assert command.main(["status", "--work-dir", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("error: no driver answers at 127.0.0.1:1 (")
    assert "the journal records no end of the run" in refused
    assert "repeat the command that started the launch" in refused
