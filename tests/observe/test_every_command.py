"""Every command of `mjax.observe` on the records of a run of every shape."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mjax.observe import schedule
from mjax.observe.__main__ import main
from mjax.observe.page.answers import Page
from mjax.observe.page.app import make_app
from mjax.observe.page.file_feed import FileFeed
from mjax.observe.spans import Event, Launch, Line, Span
from mjax.observe.windows import folders, trace
from mjax.observe.windows.places import LoopPlace, Place, Table
from mjax.processes.progress import Phase
from tests.observe.span_files import SECOND, Process, write
from tests.observe.test_timeline import ONE_MICROBATCH
from tests.processes.test_distributed import LIMIT_S, clean_environment, free_port

NUM_DEVICES, NUM_STEPS, RECORDED = 4, 40, (30, 31)
TICKS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    processes: int
    pipeline: bool
    windows: bool
    stamps: bool
    launch: bool = False
    is_live: bool = False
    missing: tuple[int, ...] = ()
    """Ranks whose spans are lost."""

    @property
    def mesh(self) -> dict[str, int]:
        stages = 2 if self.pipeline else 1
        shards = NUM_DEVICES // stages
        return {"pp": stages, "dp_replicate": 1, "dp_shard": shards, "tp": 1}

    def devices(self, rank: int) -> tuple[int, ...]:
        each = NUM_DEVICES // self.processes
        return tuple(range(rank * each, (rank + 1) * each))

    def __str__(self) -> str:
        has = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name)]
        return "-".join([str(self.processes), *has, *map(str, self.missing)])


_TRUTHS = (False, True)
SHAPES = [
    *(
        Shape(processes=processes, pipeline=p, windows=w, stamps=s)
        for processes in (1, 4)
        for p, w, s in itertools.product(_TRUTHS, _TRUTHS, _TRUTHS)
    ),
    *(
        Shape(processes=4, pipeline=p, windows=True, stamps=p, launch=True)
        for p in _TRUTHS
    ),
    *(
        Shape(processes=4, pipeline=True, windows=False, stamps=True, missing=ranks)
        for ranks in ((1,), (0, 1), (2, 3))
    ),
]


def step_spans(shape: Shape, device: int, step: int) -> Iterator[Span]:
    """The stamps of a device in a step, which takes a second."""
    begin, stream = step * SECOND, f"device:{device}"
    parts = ["forward", "norm"]
    if shape.pipeline:
        parts[1:1] = ["tick"] * TICKS
    for number, name in enumerate(parts):
        start = begin + number * SECOND // 10
        kind = "dp" if name == "norm" else "compute"
        yield Span(name, kind, stream, start, start + SECOND // 10)


def write_run(work_dir: Path, shape: Shape) -> None:
    for rank in sorted({*range(shape.processes)} - {*shape.missing}):
        lines = [
            Line(n=0, spans=(Span("barrier", "idle", "barrier", 1, 2),), barrier=0)
        ]
        for step in range(1, NUM_STEPS + 1):
            begin = step * SECOND
            found = [
                Span("data", "data", "host", begin, begin + 10**7),
                Span("dispatch", "host", "host", begin + 10**7, begin + 10**8),
                Span("device", "compute", "host", begin + 10**8, begin + 9 * 10**8),
            ]
            for device in shape.devices(rank) if shape.stamps else ():
                found += step_spans(shape, device, step)
            lines.append(Line(n=0, step=step, spans=tuple(found)))
        happened = Event(time_ns=7 * SECOND, kind="slow_step", text="step 6 was slow")
        process = Process(
            rank=rank,
            host=f"node{rank // 2}",
            devices=shape.devices(rank),
            mesh=tuple(shape.mesh.items()),
            launch=Launch(name="launch-a", generation=1) if shape.launch else None,
            wall_ahead_ns=0,
        )
        write(work_dir, process, [*lines, Line(n=0, event=happened)])
        for step in RECORDED if shape.windows else ():
            write_window(work_dir, shape, rank, step)
    rows = [
        {"step": n, "loss": 5.0, "step_s": 1.0, "data_wait_s": 0.0, "mfu": None}
        | {"tokens": 64, "tokens_per_s": 64.0, "skipped": 0, "lr": 0.1, "grad_norm": 1}
        for n in range(1, NUM_STEPS + 1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (work_dir / "metrics.jsonl").write_text(text)
    (work_dir / "config.json").write_text(json.dumps({"steps": NUM_STEPS}))
    if shape.launch:
        write_events(work_dir)
    if shape.pipeline:
        path = schedule.path_of(work_dir, 1)
        path.parent.mkdir()
        path.write_text(schedule.to_json(ONE_MICROBATCH))


def write_events(work_dir: Path) -> None:
    """Write the events of a launch that was done after one start."""
    spent_s = {phase.name.lower(): 0.0 for phase in Phase} | {"step": 40.0}
    times = {"start_step": 0, "step": NUM_STEPS, "age_s": 0.0, "silent_s": 0.0}
    told = [
        (0.0, "launch", 0, "a driver has begun", {}),
        (0.1, "state", 1, "looking for ports", {}),
        (0.2, "state", 1, "running", {}),
        (41.0, "times", 1, "", times | {"phase": "exit", "spent_s": spent_s}),
        (41.1, "state", 1, "ended", {}),
        (41.2, "end", 1, "done", {"exit": 0}),
    ]
    lines = [
        {"number": number, "kind": kind, "generation": start, "text": text}
        | {"time_ns": int(at_s * SECOND), "source": "driver", "data": data}
        for number, (at_s, kind, start, text, data) in enumerate(told, start=1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (work_dir / "events.jsonl").write_text(text)


def write_window(work_dir: Path, shape: Shape, rank: int, step: int) -> None:
    """Write a window whose events are in JSON, see `read_json`."""

    outside = Place(
        phase="optimizer",
        role="compute",
        is_recomputed=False,
        is_slot=False,
        is_container=False,
        singles={},
        place=0,
        loops=(),
        is_direct=True,
        is_chosen=False,
    )
    new = functools.partial(dataclasses.replace, outside)
    ops = {"update": outside, "reduce": new(phase="backward", role="dp")}
    loops = {}
    if shape.pipeline:
        loops = {"ticks": LoopPlace(trip_count=TICKS, unit="ticks", start=0, step=1)}
        slot = functools.partial(
            new, loops=("ticks",), is_slot=True, is_chosen=True, is_direct=False
        )
        ops |= {"slot-f": slot(phase="forward"), "slot-b": slot(phase="backward")}
        ops["send"] = new(phase="forward", role="pp", loops=("ticks",))
    table = Table(module="jit_step", num_devices=NUM_DEVICES, ops=ops, loops=loops)
    begin = step * SECOND
    events = []
    for ordinal, device in enumerate(shape.devices(rank)):
        stage = device // (NUM_DEVICES // 2)
        for tick in range(TICKS) if shape.pipeline else ():
            start = begin + (tick + 1) * SECOND // 10
            events.append((ordinal, "send", start, start + 10**7))
            for name, known in (
                ("slot-f", ONE_MICROBATCH.forward),
                ("slot-b", ONE_MICROBATCH.backward),
            ):
                if known[tick][stage] is not None:
                    events.append((ordinal, name, start + 10**7, start + 9 * 10**7))
        for number, name in enumerate(("reduce", "update")):
            start = begin + (6 + number) * SECOND // 10
            events.append((ordinal, name, start, start + SECOND // 10))
    window = folders.Window(
        format=folders.FORMAT,
        version=folders.VERSION,
        run="",
        host=f"node{rank // 2}",
        rank=rank,
        generation=1,
        step=step,
        wall_ns=begin,
        monotonic_ns=begin,
        start_ns=begin,
        stop_ns=begin + SECOND,
        platform="cpu",
        mesh=shape.mesh,
        devices=[
            folders.Device(ordinal=ordinal, number=device)
            for ordinal, device in enumerate(shape.devices(rank))
        ],
        trace="events.json",
    )
    folder = folders.folder_of(
        work_dir, generation=1, step=step, host=window.host, rank=rank
    )
    folder.mkdir(parents=True)
    (folder / folders.PLACES).write_text(table.to_json())
    (folder / window.trace).write_text(json.dumps([begin, events]))
    folders.write_window(folder, window)


def read_json(path: Path) -> trace.Trace:
    """Read the events that `write_window` has written, instead of the profiler's."""
    mark_ns, events = json.loads(path.read_text())
    return trace.Trace(
        events=tuple(
            trace.Event(
                device=device,
                name=name,
                module="jit_step",
                start_ns=float(start),
                stop_ns=float(stop),
            )
            for device, name, start, stop in sorted(events, key=lambda event: event[2])
        ),
        mark_ns=float(mark_ns),
        is_gpu=False,
    )


def exit_codes(shape: Shape) -> dict[str, int]:
    """Return the exit code of each command; 2: the run has no such record."""

    def needs(*, has: bool) -> int:
        return 0 if has else 2

    has_slots = shape.pipeline and (shape.windows or shape.stamps)
    return {
        "timeline --steps 30:32 --out OUT.json": 0,
        "timeline --steps 30:32 --out OUT.html": 0,
        "timeline --steps 1:41 --view tp --json": 0,
        "timeline --steps 30:32 --out OUT.html --only-slots": needs(has=has_slots),
        "bubble --steps 30:32 --json": needs(has=shape.windows),
        "diff --json": 0,
        "fake --dry-run": needs(has=shape.is_live),  # a start
        "heatmap --json": needs(has=shape.processes > 1),
        "heatmap --out OUT.html": needs(has=shape.processes > 1),
        "ledger --json": 0,
        "ledger": 0,
        "mfu --json": 0,
        "phases --json": needs(has=shape.windows),
        "phases --each": needs(has=shape.windows),
        "stuck --json": 0,
        "stuck": 0,
        "unused --json": needs(has=shape.is_live),  # a checkpoint
        "whatif --json": needs(has=shape.stamps),
        "whatif": needs(has=shape.stamps),
    }


ANSWERS = ("events", "heat", "ledger", "metrics", "run", "state", "stragglers")
ANSWERS = (*ANSWERS, "stuck", "timeline?first=30&last=31", "whatif")


def check_commands(work_dir: Path, other: Path, shape: Shape, capsys) -> None:
    """Check each command and each answer of the page.

    Args:
      work_dir: records of the run.
      other: records of a run to compare it with.
      shape: shape of the run.
    """
    for command, code in exit_codes(shape).items():
        name, *words = command.replace("OUT", str(work_dir / "out")).split()
        runs = ["--work-dir", str(work_dir)]
        runs = [str(work_dir), str(other)] if name == "diff" else runs
        found = main([name, *runs, *words])
        out, err = capsys.readouterr()
        assert found == code, (command, err)
        if code:
            assert err.startswith("error: "), command
            assert err.count("\n") == 1, command
        elif "--json" in words:
            json.loads(out)
    page = Page(FileFeed(work_dir), name="run", work_dir=work_dir, poll_s=0.01)
    try:
        app = make_app(page, token="t" * 16, names=frozenset({"testserver"}))
        client = TestClient(app, headers={"authorization": f"Bearer {'t' * 16}"})
        while not page.seen().is_complete:
            time.sleep(0.01)
        for name in ANSWERS:
            answer = client.get(f"/api/{name}")
            assert answer.status_code == 200, (name, answer.text)
    finally:
        page.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_command_reports_or_refuses_a_run_of_every_shape(
    shape, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trace, "read_file", read_json)
    for name, of in (("run", shape), ("other", SHAPES[0])):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, of)
    check_commands(tmp_path / "run", tmp_path / "other", shape, capsys)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b'{"step": 3, "ki', id="torn"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"step": 3, "n": ' + b"[" * 10**5, id="deep"),
        pytest.param(b'{"step": 3, "x": "\xff"}', id="not UTF-8"),
        pytest.param(b'{"step": 3, "step_s": %s}' % (b"9" * 4000), id="large"),
        pytest.param(b'{"step": -3, "step_s": "x", "loss": []}', id="types"),
        pytest.param(b"\0" * 4096, id="zeros"),
    ],
)
def test_a_damaged_line_is_left_out_by_every_command(
    damage, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trace, "read_file", read_json)
    shape = SHAPES[-4]
    assert shape.launch
    for name, of in (("run", shape), ("other", SHAPES[0])):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, of)
    [spans_file, *_] = sorted((tmp_path / "run" / "spans").iterdir())
    for path in (
        tmp_path / "run" / "metrics.jsonl",
        tmp_path / "run" / "events.jsonl",
        spans_file,
    ):
        lines = path.read_bytes().splitlines()
        lines.insert(4, damage)
        path.write_bytes(b"\n".join(lines) + b'\n{"step": 99')
    check_commands(tmp_path / "run", tmp_path / "other", shape, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        Shape(processes=1, pipeline=False, windows=True, stamps=False, is_live=True),
        Shape(processes=1, pipeline=True, windows=True, stamps=False, is_live=True),
        Shape(processes=4, pipeline=True, windows=True, stamps=True, is_live=True),
        Shape(
            processes=4,
            pipeline=True,
            windows=True,
            stamps=False,
            launch=True,
            is_live=True,
        ),
    ],
    ids=str,
)
def test_every_command_reports_or_refuses_a_real_run(shape, tmp_path, capsys):
    work_dir, other = tmp_path / "run", tmp_path / "other"
    train(work_dir, shape, tmp_path / "cache")
    other.mkdir()
    write_run(other, SHAPES[0])
    check_commands(work_dir, other, shape, capsys)


def train(work_dir: Path, shape: Shape, cache: Path) -> None:
    """Train a run of a shape, with 8 simulated devices."""
    num_devices = str(8 // shape.processes)
    flags = ["--recipe", "debug", "--data.path", "synthetic", "--data.seq-len", "32"]
    flags += ["--steps", str(NUM_STEPS), "--log.sample-tokens", "4"]
    flags += ["--simulate-devices", num_devices, "--work-dir", str(work_dir)]
    flags += ["--profile.steps", "30:32"] if shape.windows else []
    flags += ["--observe.stamps", "True"] if shape.stamps else []
    if shape.pipeline:
        flags += ["--model.layers", "4", "--mesh.pp", "2", "--mesh.tp", "2"]
        flags += ["--batch.microbatches", "4"]
    of_each: list[list[str]] = [["-m", "mjax.train", *flags]]
    if shape.launch:
        hosts = ["--hosts", "2", "--ranks-per-host", str(shape.processes // 2)]
        of_each = [["-m", "mjax.launch", *hosts, "--", *flags]]
    elif shape.processes > 1:
        same = ["--distributed.coordinator", f"127.0.0.1:{free_port()}"]
        same += ["--distributed.num-processes", str(shape.processes)]
        of_each = [
            [*of_each[0], *same, "--distributed.process-id", str(rank)]
            for rank in range(shape.processes)
        ]
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env=clean_environment() | {"XDG_CACHE_HOME": str(cache)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in of_each
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), errors
