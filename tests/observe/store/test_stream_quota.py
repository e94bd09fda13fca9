"""Which files are compressed, which are deleted, and which are never touched."""

import random
from pathlib import Path

import pytest

from mjax.observe.stream import quota
from mjax.observe.stream.quota import Action, Spool


def spool(name: str, size: int, *, closed: bool = True, stored: bool = True) -> Spool:
    return Spool(
        path=Path(name),
        disk_bytes=size,
        modified_s=float(ord(name[0])),
        is_closed=closed,
        is_stored=stored,
    )


def test_below_the_quota_nothing_happens():
    assert quota.plan([spool("a", 60), spool("b", 40)], 100) == ([], 0)


def test_the_oldest_stored_files_are_compressed_first():
    files = [spool("c", 100), spool("b", 100), spool("a", 100, stored=False)]
    assert quota.plan(files, 250) == ([Action(path=Path("b"), kind="compress")], 0)


def test_where_compression_does_not_do_the_oldest_are_deleted():
    """And only as many as needed once the others are compressed."""
    files = [spool("a.gz", 100), spool("b", 100), spool("c", 100)]
    actions, excess = quota.plan(files, 100)
    assert actions == [
        Action(path=Path("a.gz"), kind="delete"),
        Action(path=Path("b"), kind="compress"),
        Action(path=Path("c"), kind="compress"),
    ]
    assert excess == 0
    assert quota.plan(files, 30)[0] == [
        Action(path=Path("a.gz"), kind="delete"),
        Action(path=Path("b"), kind="delete"),
        Action(path=Path("c"), kind="compress"),
    ]


def test_what_is_not_stored_is_dropped_only_if_that_is_asked_for():
    files = [spool("a", 100, stored=False), spool("b", 100)]
    assert quota.plan(files, 10) == ([Action(path=Path("b"), kind="delete")], 90)
    actions, excess = quota.plan(files, 10, drop_unstored=True)
    assert [(str(a.path), a.kind) for a in actions] == [("b", "delete"), ("a", "drop")]
    assert excess == 0


def test_no_choice_touches_an_open_file_or_one_that_is_not_stored():
    generator = random.Random(1)
    for _ in range(300):
        files = [
            spool(
                f"{chr(97 + i)}{generator.choice(['', '.gz'])}",
                generator.randrange(1, 1000),
                closed=generator.random() < 0.5,
                stored=generator.random() < 0.5,
            )
            for i in range(generator.randrange(8))
        ]
        by_path = {file.path: file for file in files}
        for drop in (False, True):
            total = sum(file.disk_bytes for file in files)
            limit = generator.randrange(1, 3000)
            actions, excess = quota.plan(files, limit, drop_unstored=drop)
            touched = [by_path[action.path] for action in actions]
            assert all(file.is_closed for file in touched)
            assert drop or all(file.is_stored for file in touched)
            assert all(by_path[a.path].is_stored == (a.kind != "drop") for a in actions)
            assert len({file.path for file in touched}) == len(touched)
            if excess:  # then all that may go goes
                may_go = [f for f in files if f.is_closed and (drop or f.is_stored)]
                assert {f.path for f in touched} == {f.path for f in may_go}
            if total <= limit:
                assert not actions


def test_a_disk_without_room_keeps_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"line\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        quota.carry_out(Action(path=path, kind="compress"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
