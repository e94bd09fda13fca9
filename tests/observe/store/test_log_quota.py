"""Only logs of ended processes are compressed, and deleted on request."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax.observe import gzipped, spans
from mjax.observe.collect import CollectFlags, _limit
from mjax.observe.stream import logs, quota
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.quota import Action, Spool
from mjax.observe.stream.wire import MarksAnswer
from tests.observe.store.run_files import header, line, span_path

NOW_S = time.time()
TEXT = b"a line of a log\n" * 500


def write(path: Path, age_s: float = 3600.0, data: bytes = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def a_run(work_dir: Path) -> dict[str, Path]:
    """Write the logs of three generations, the last of which is running."""
    found = {}
    for generation in range(3):
        folder = work_dir / "launch" / f"generation-{generation:04}"
        age_s = 3600.0 * (10 - generation)
        for rank in range(2):
            name = f"rank-{rank}.log"
            found[f"{generation}/{name}"] = write(folder / name, age_s)
            stacks = f"stacks-{rank}.txt"
            found[f"{generation}/{stacks}"] = write(folder / stacks, age_s)
            write(folder / f"progress-{rank}", age_s)
        host = f"node{generation % 2}"
        path = work_dir / "stacks" / f"{host}-0-{generation + 1}.txt"
        found[f"stacks/{generation}"] = write(path, age_s)
        for step in (5, 6):
            window = work_dir / "profile" / str(generation + 1) / f"step-{step}"
            window = window / f"{host}-0"
            write(window / "places.json", age_s)
            if step == 5:
                write(window / "window.json", age_s)
            os.utime(window, (NOW_S - age_s, NOW_S - age_s))
            found[f"window/{generation}/{step}"] = window
    rotated = work_dir / "launch" / "generation-0002" / "rank-0.log.1"
    found["rotated"] = write(rotated, 7200.0)
    write(work_dir / "launch" / "agent-node0.log")
    write(work_dir / "launch" / "journal.db")
    return found


def closed(work_dir: Path, **given) -> set[Path]:
    found = logs.find(work_dir, now_s=NOW_S, **given)
    assert all(spool.disk_bytes > 0 and not spool.is_stored for spool in found)
    return {spool.path for spool in found if spool.is_closed}


def names(found: dict[str, Path], paths: set[Path]) -> set[str]:
    return {name for name, path in found.items() if path in paths}


def test_logs_of_the_running_generation_are_open(tmp_path):
    found = a_run(tmp_path)
    there = {spool.path for spool in logs.find(tmp_path, now_s=NOW_S)}
    assert there == set(found.values())
    live = {
        *("2/rank-0.log", "2/rank-1.log", "2/stacks-0.txt", "2/stacks-1.txt"),
        *("stacks/2", "window/2/6"),
    }
    assert names(found, there - closed(tmp_path)) == live


def test_a_log_that_was_just_written_is_open(tmp_path):
    found = a_run(tmp_path)
    path = write(found["0/rank-1.log"], age_s=30.0)
    assert path not in closed(tmp_path)
    write(path, age_s=90.0)
    assert path in closed(tmp_path)


def test_after_the_end_of_the_launch_its_logs_are_closed(tmp_path):
    """A start without a launch may follow, so stacks and windows stay as they are."""
    found = a_run(tmp_path)
    before = names(found, closed(tmp_path))
    rows = [
        {"time_ns": 1, "source": "driver", "kind": "state", "text": state}
        for state in ("running", "ended", "running")
    ]
    for number in (1, 2, 3):
        text = "".join(json.dumps(row) + "\n" for row in rows[:number])
        (tmp_path / "events.jsonl").write_text(text)
        more = names(found, closed(tmp_path)) - before
        logs_of_2 = {name for name in found if name.startswith("2/")}
        assert more == (logs_of_2 if number == 2 else set())


def test_a_collector_of_a_host_takes_the_logs_of_its_ranks(tmp_path):
    found = a_run(tmp_path)
    own = {(0, 1), (2, 1)}
    there = {s.path for s in logs.find(tmp_path, now_s=NOW_S, host="node1", own=own)}
    assert names(found, there) == {
        *("0/rank-1.log", "0/stacks-1.txt", "2/rank-1.log", "2/stacks-1.txt"),
        *("stacks/1", "window/1/5", "window/1/6"),
    }


def collector_of(work_dir: Path, said: list[str]) -> Collector:
    return Collector(work_dir, _Sink(), say=said.append)


def limit(work_dir: Path, size: int, *, delete: bool = False) -> None:
    """Do once what the command does every ten seconds."""
    given = CollectFlags(work_dir=work_dir, log_quota_gb=size / 1e9, delete_logs=delete)
    _limit(given, collector_of(work_dir, []))


def contents(work_dir: Path) -> dict[str, bytes]:
    """Return what all logs hold, under their names before compression."""
    return {
        str(path.relative_to(work_dir)).removesuffix(".gz"): gzipped.read(path)[0]
        for path in work_dir.rglob("*")
        if path.is_file()
    }


def test_logs_are_compressed_and_none_is_lost(tmp_path, capsys):
    found = a_run(tmp_path)
    before = contents(tmp_path)
    limit(tmp_path, 1)
    after = contents(tmp_path)
    (moved,) = after.keys() - before.keys()
    assert moved.startswith("launch/generation-0002/rank-0.log.20")
    after["launch/generation-0002/rank-0.log.1"] = after.pop(moved)
    assert after == before
    compressed = set(tmp_path.rglob("*.gz"))
    assert len(compressed) == 2 * 4 + 2 + 1
    assert not compressed & {found["2/rank-0.log"], found["2/rank-1.log"]}
    assert "or needs --delete-logs" in capsys.readouterr().err
    limit(tmp_path, 1)
    assert set(tmp_path.rglob("*.gz")) == compressed


def test_below_the_quota_no_log_is_touched(tmp_path):
    a_run(tmp_path)
    size = sum(spool.disk_bytes for spool in logs.find(tmp_path, now_s=NOW_S))
    before = sorted(tmp_path.rglob("*"))
    limit(tmp_path, size, delete=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_on_demand_the_oldest_are_deleted_and_open_ones_never(tmp_path, capsys):
    found = a_run(tmp_path)
    limit(tmp_path, 1, delete=True)
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    kept = {
        *(
            found[f"2/{name}-{rank}.{end}"]
            for rank in range(2)
            for name, end in (("rank", "log"), ("stacks", "txt"))
        ),
        *(found["stacks/2"], found["window/2/6"] / "places.json"),
        *tmp_path.glob("launch/generation-*/progress-*"),
        *(tmp_path / "launch" / name for name in ("agent-node0.log", "journal.db")),
    }
    assert left == kept
    assert not (tmp_path / "profile" / "1").exists()
    said = capsys.readouterr().err
    assert f"{found['0/rank-0.log']} is deleted before all of it was stored" in said
    assert "the rest is still being written\n" in said


def test_the_oldest_go_first_and_only_as_many_as_needed(tmp_path):
    found = a_run(tmp_path)
    size = sum(s.small_bytes for s in logs.find(tmp_path, now_s=NOW_S))
    limit(tmp_path, size - 1, delete=True)
    gone = [
        name
        for name, path in found.items()
        if not path.exists() and not path.with_name(path.name + ".gz").exists()
    ]
    assert gone == ["0/rank-0.log", "rotated"]  # the second has another name


def test_a_log_that_a_process_of_this_machine_writes_is_not_touched(tmp_path):
    found = a_run(tmp_path)
    path = found["0/rank-1.log"]
    code = f"import sys; f = open({str(path)!r}, 'ab'); print(1, flush=True); "
    code += "sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        os.utime(path, (NOW_S - 36_000, NOW_S - 36_000))
        with found["0/rank-0.log"].open(
            "rb"
        ):  # a process that only reads does not count
            limit(tmp_path, 1, delete=True)
        assert path.read_bytes() == TEXT
        assert not found["0/rank-0.log"].exists()
        writer.communicate()
    limit(tmp_path, 1, delete=True)
    assert not path.exists()


def test_each_rotation_keeps_a_name_of_its_own(tmp_path):
    log = tmp_path / "rank-0.log.1"
    for number in range(3):
        write(log, age_s=1000.0 - number, data=TEXT + bytes([number]))
        quota.carry_out(Action(path=log, kind="compress"))
    kept = sorted(tmp_path.iterdir())
    assert [gzip.decompress(path.read_bytes())[-1] for path in kept] == [0, 1, 2]
    write(log, age_s=1000.0)
    with pytest.raises(FileExistsError):
        quota.carry_out(Action(path=log, kind="compress"))
    assert log.read_bytes() == TEXT


def test_a_window_that_was_half_deleted_goes_with_the_next(tmp_path, monkeypatch):
    found = a_run(tmp_path)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        quota.carry_out(Action(path=found["window/0/5"], kind="drop"))
    monkeypatch.undo()
    assert not found["window/0/5"].exists()
    assert found["window/0/5"] not in closed(tmp_path)
    quota.carry_out(Action(path=found["window/1/5"], kind="drop"))
    assert not (tmp_path / "profile" / ".deleted").exists()


def test_the_collector_knows_which_ranks_of_a_launch_are_of_its_host(tmp_path):
    head = header(3)
    launched = spans.Header(
        **{f: getattr(head, f) for f in head.__struct_fields__ if f != "launch"},
        launch=spans.Launch(name="l", generation=0),
    )
    span_path(tmp_path, 3).write_bytes(
        b"".join(map(spans.encode, (launched, line(0, 3))))
    )
    for rank in (2, 3):
        write(tmp_path / "launch" / "generation-0000" / f"rank-{rank}.log")
    one = Collector(tmp_path, _Sink(), host="node1", say=print)
    one.round()
    assert [spool.path.name for spool in one.logs()] == ["rank-3.log"]


class _Sink:
    """Takes nothing."""

    is_queue = False

    def marks(self, request):
        return MarksAnswer(marks=[], refused={}, pending=0)

    def send(self, batches, again):
        return []

    def close(self) -> None:
        pass


def test_sizes_are_planned_with_what_may_shrink():
    files = [
        Spool(
            path=Path(name),
            disk_bytes=100,
            modified_s=0.0,
            is_closed=is_closed,
            is_stored=False,
            is_log=name != "window",
        )
        for name, is_closed in (("a.log", True), ("b.log", False), ("window", True))
    ]
    assert [file.small_bytes for file in files] == [20, 100, 100]
    actions, excess = quota.plan(files, 150)
    assert (actions, excess) == ([Action(path=Path("a.log"), kind="compress")], 70)
    actions, excess = quota.plan(files, 150, drop_unstored=True)
    assert [action.kind for action in actions] == ["drop", "drop"]
