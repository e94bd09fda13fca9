"""Batches as bytes, and invalid bytes."""

import dataclasses
import gzip
import json
import struct

import pytest

from mjax.observe.store.batches import Outcome
from mjax.observe.stream import wire
from tests.observe.store.run_files import batch, event_bytes, span_bytes

BATCHES = [
    batch(span_bytes(0, 3), "spans/node0-0-1.jsonl"),
    batch(event_bytes(range(2)), "events.jsonl", "events", revision=4),
]
SKIP = dataclasses.replace(BATCHES[0], start=10, end=99, skipped="too long", data=b"")


def test_batches_come_back_as_they_were():
    sent = [*BATCHES, SKIP]
    assert wire.decode_batches(wire.encode_batches(sent)) == sent
    assert wire.decode_batches(wire.encode_batches([])) == []


def test_no_damaged_byte_changes_a_batch():
    body = wire.encode_batches(BATCHES)
    refused = 0
    for place in range(len(body)):
        damaged = bytearray(body)
        damaged[place] ^= 0x10
        try:
            # A bit of the gzip header, or of what follows its last block, says nothing.
            assert wire.decode_batches(bytes(damaged)) == BATCHES
        except ValueError:
            refused += 1
    assert refused > len(body) - 20


@pytest.mark.parametrize("size", [0, 1, 5, 40, 200])
def test_a_body_that_is_cut_off_is_refused(size):
    with pytest.raises(ValueError, match="truncated"):
        wire.decode_batches(wire.encode_batches(BATCHES)[:size])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end": 5}, "are not complete lines"),
        ({"start": -1}, "are not complete lines"),
        ({"first_line": 0}, "are not complete lines"),
        ({"data": b"no end", "end": 6}, "are not complete lines"),
        ({"skipped": "why"}, "are not complete lines"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change, message):
    wrong = dataclasses.replace(BATCHES[0], **change)
    with pytest.raises(ValueError, match=message):
        wire.decode_batches(wire.encode_batches([wrong]))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(wire, "VERSION", 2)
    body = wire.encode_batches(BATCHES)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 2, this mjax reads 1; run the same"):
        wire.decode_batches(body)


def test_another_version_may_have_other_fields():
    header = json.dumps({"version": 2, "unheard_of": [1]}).encode()
    body = gzip.compress(struct.pack(">I", len(header)) + header)
    with pytest.raises(ValueError, match="version 2, this mjax reads 1; run the same"):
        wire.decode_batches(body)


def test_a_body_that_would_fill_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(wire, "_MAX_BODY", 1000)
    with pytest.raises(ValueError, match="unpacks to over 1000 bytes"):
        wire.decode_batches(gzip.compress(bytes(100_000)))


def test_an_answer_that_is_none_is_refused():
    outcome = Outcome(run="r", source="s", verdict="known")
    answer = wire.SendAnswer(outcomes=[outcome])
    assert wire.decode(wire.encode(answer), wire.SendAnswer) == answer
    for data in (b"", b"{}", b'{"outcomes": [{"run": 1}]}', b"\xff"):
        with pytest.raises(ValueError, match=r"\w"):
            wire.decode(data, wire.SendAnswer)
