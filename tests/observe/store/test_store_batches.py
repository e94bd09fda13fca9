"""Which part of a batch is new."""

import dataclasses

import pytest

from mjax.observe.store.batches import Mark, admit
from tests.observe.store.run_files import batch, span_bytes

DATA = span_bytes(0, 10)
BATCH = batch(DATA, "spans/node0-0-1.jsonl")
MARK = Mark(
    file_id=1,
    run=BATCH.run,
    source=BATCH.source,
    kind="spans",
    identity=BATCH.identity,
    revision=0,
    at_byte=100,
    lines=1,
    last_n=-1,
    last_end_ns=None,
    exit_code=None,
    tail="",
)


@pytest.mark.parametrize(
    ("start", "end", "at_byte", "verdict", "first"),
    [
        (100, 200, 100, "stored", 100),
        (0, 200, 100, "stored", 100),
        (50, 101, 100, "stored", 100),
        (0, 100, 100, "known", 100),
        (0, 99, 100, "known", 100),
        (101, 200, 100, "gap", 100),
    ],
)
def test_only_the_bytes_behind_the_mark_are_new(start, end, at_byte, verdict, first):
    found = dataclasses.replace(BATCH, start=start, end=end)
    mark = dataclasses.replace(MARK, at_byte=at_byte)
    assert admit(found, mark) == (verdict, "", first)


def test_an_unknown_file_begins_with_its_first_byte():
    assert admit(BATCH, None) == ("stored", "", 0)
    assert admit(dataclasses.replace(BATCH, start=5), None) == ("gap", "", 0)


@pytest.mark.parametrize("change", [{"identity": "other"}, {"revision": 1}])
def test_spans_that_were_rewritten_are_refused(change):
    verdict, reason, _ = admit(dataclasses.replace(BATCH, **change), MARK)
    assert verdict == "refused"
    assert "is not the file that was stored under this name" in reason


def test_rows_that_were_rewritten_are_taken_from_their_start():
    mark = dataclasses.replace(MARK, kind="metrics", revision=3)
    rows = dataclasses.replace(BATCH, kind="metrics", identity="other")
    assert admit(dataclasses.replace(rows, revision=4), mark) == ("stored", "", 0)
    assert admit(dataclasses.replace(rows, revision=2), mark)[0] == "known"
    later = dataclasses.replace(rows, revision=4, start=7)
    assert admit(later, mark) == ("gap", "", 0)


def test_a_source_keeps_its_kind():
    rows = dataclasses.replace(BATCH, kind="metrics")
    assert admit(rows, MARK)[:2] == (
        "refused",
        "spans/node0-0-1.jsonl was stored as spans",
    )
