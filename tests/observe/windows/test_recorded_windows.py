"""Windows of real steps on simulated devices: recorded, read, and nothing unknown."""

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mjax.mesh.axes import AxisSizes
from mjax.observe import phases as phases_module
from mjax.observe.__main__ import main
from mjax.observe.windows import folders
from mjax.observe.windows.places import table_of
from mjax.observe.windows.read import Reading, read
from mjax.observe.windows.record import Due, Origin, Recorder, devices_of
from tests.training import ONE_DEVICE, TINY, Layout, make_batch, make_program

MODEL = dataclasses.replace(TINY, layers=4, remat="full", vocab_size=64)
PLAIN = Layout((1, 1, 2, 2), zero=2)
PIPELINE = Layout((2, 1, 1, 2), zero=2, microbatches=2)
STEP = 7


@functools.cache
def compiled(layout: Layout):
    return make_program(layout, MODEL), lowered(layout).compile()


@functools.cache
def lowered(layout: Layout) -> jax.stages.Lowered:
    return make_program(layout, MODEL).trace().lower()


def record(layout: Layout, work_dir: Path) -> Path:
    """Record a step; return the folder of its window."""
    program, step = compiled(layout)
    state, batch = program.init(), make_batch(program, 0)
    jax.block_until_ready((state, batch))
    said: list[str] = []
    recorder = Recorder(
        Due(first=STEP, stop=STEP + 1),
        Origin(work_dir=work_dir, run="r", host="a b", rank=0, generation=2),
        lambda: step.as_text() or "",
        program.mesh.devices,
        said.append,
    )
    with recorder.window(STEP):
        jax.block_until_ready(step(state, batch))
    assert said == []
    [folder], partial = folders.find(work_dir)
    assert partial == []
    return folder


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def plain(work_dir) -> Reading:
    folder = record(PLAIN, work_dir)
    assert folder == work_dir / "profile" / "2" / f"step-{STEP}" / "a_b-0"
    return read(folder)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Reading:
    return read(record(PIPELINE, tmp_path_factory.mktemp("pipeline")))


def test_every_event_of_a_step_has_a_place(plain, pipeline):
    for reading in (plain, pipeline):
        assert sorted(reading.by_device) == [0, 1, 2, 3]
        for seconds in reading.seconds.values():
            assert seconds.unknown == {}
            assert seconds.span_s > 0


def test_every_phase_of_training_and_every_role_of_the_mesh_is_there(plain, pipeline):
    for reading, sent in ((plain, {"tp", "dp"}), (pipeline, {"tp", "pp"})):
        for seconds in reading.seconds.values():
            found = {phase for phase, _ in seconds.parts}
            assert found == {"forward", "loss", "backward", "grad_norm", "optimizer"}
            assert {role for _, role in seconds.parts} >= {"compute", *sent}
    in_phases = {key for s in plain.seconds.values() for key in s.parts}
    assert {("forward", "dp"), ("backward", "dp"), ("loss", "tp")} <= in_phases


def test_layers_come_in_order_and_go_back_in_reverse(plain):
    for events in plain.by_device.values():
        for phase, order in (("forward", [0, 1, 2, 3]), ("backward", [3, 2, 1, 0])):
            # Attention and feed-forward layer; what is sent ahead belongs to others.
            layers = [
                p.layer
                for p in events
                if p.phase == phase and p.role == "tp" and p.layer is not None
            ]
            assert list(dict.fromkeys(layers)) == order
            assert {layers.count(layer) for layer in order} == {layers.count(0)}


def test_some_of_the_backward_pass_is_told_to_be_computed_again(plain):
    [events, *_] = plain.by_device.values()
    phases = {p.phase for p in events if p.is_recomputed}
    assert phases == {"backward"}


def test_ticks_of_a_pipeline_are_numbered_and_devices_have_their_stage(pipeline):
    assert [pipeline.stage_of(n) for n in pipeline.by_device] == [0, 0, 1, 1]
    for events in pipeline.by_device.values():
        ticks = [p.tick for p in events if p.role == "pp" and p.tick is not None]
        assert ticks == sorted(ticks)
        # Two microbatches through two stages, one after the other.
        assert set(ticks) <= set(range(4))
        assert len(set(ticks)) > 1


def test_the_slots_that_ran_are_those_of_the_schedule(pipeline):
    """Windows do not contain the schedule: operations in conditionals show it."""
    program, _ = compiled(PIPELINE)
    assert program.pipeline is not None
    tables = program.pipeline.schedule
    for number, events in pipeline.by_device.items():
        stage = pipeline.stage_of(number)
        for direction in ("forward", "backward"):
            ran = {
                p.tick
                for p in events
                if p.is_slot and p.is_chosen and p.phase == direction
            }
            column = getattr(tables, f"{direction}_chunk")[:, stage]
            assert ran == {*np.flatnonzero(column >= 0).tolist()}
    assert all(
        p.is_chosen for some in pipeline.by_device.values() for p in some if p.is_slot
    )


def test_a_step_without_a_pipeline_has_no_slots(plain):
    assert not any(p.is_slot for some in plain.by_device.values() for p in some)
    assert compiled(PLAIN)[0].pipeline is None


def test_events_lie_between_begin_and_end_of_the_step_on_the_clock_of_the_host(plain):
    assert plain.offset_ns is not None
    for events in plain.by_device.values():
        for placed in events:
            start_ns = placed.event.start_ns + plain.offset_ns
            stop_ns = placed.event.stop_ns + plain.offset_ns
            assert plain.window.monotonic_ns <= start_ns + 1e3
            assert stop_ns <= plain.window.stop_ns + 1e3


# ------------------------------------------------------------- names change no step


@pytest.mark.parametrize("layout", [PLAIN, PIPELINE, ONE_DEVICE])
def test_scopes_are_metadata_of_the_step_and_change_nothing(layout, monkeypatch):
    named = lowered(layout)
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    unnamed = make_program(layout, MODEL).trace().lower()
    assert named.as_text() == unnamed.as_text()
    assert "phase.backward" in named.as_text(debug_info=True)
    assert "phase." not in unnamed.as_text(debug_info=True)


def test_an_evaluation_is_a_phase_of_its_own():
    program = make_program(ONE_DEVICE, dataclasses.replace(TINY, layers=2))
    params = program.abstract_state.params
    step = program.eval_step.lower(params, program.abstract_batch).compile()
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    table = table_of(step.as_text() or "", sizes)
    assert {place.phase for place in table.ops.values()} <= {"eval", "unknown"}
    counted = [p.phase for p in table.ops.values() if not p.is_container]
    assert counted.count("eval") > counted.count("unknown")


# ---------------------------------------------------------------------- the command


def test_the_command_shows_phases_and_devices(plain, work_dir, capsys):
    assert main(["phases", "--work-dir", str(work_dir), "--each"]) == 0
    out = capsys.readouterr().out
    assert "generation 2, step 7" in out
    assert "backward" in out
    assert "device 3, rank 0 on a b, stage 0:" in out


def test_names_of_hosts_and_instructions_cannot_control_the_terminal():
    device = phases_module.DevicePhases(
        **{"device": 0, "rank": 0, "host": "a\x1b[2J", "stage": 0, "windows": 1},
        **{"span_s": 1.0, "idle_s": 0.0, "parts": {}, "unknown": {"b\x1b[2J": 1.0}},
    )
    found = phases_module.Phases(
        generation=1, steps=(1,), devices=(device,), problems=()
    )
    text = phases_module.page(found, each=True)
    assert text.count("a\\x1b[2J") == 2
    assert "b\\x1b[2J" in text
    assert "\x1b" not in text


def test_the_command_writes_one_json_object(plain, work_dir, tmp_path, capsys):
    out = tmp_path / "phases.json"
    words = ["phases", "--work-dir", str(work_dir), "--json", "--out", str(out)]
    assert main(words) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert json.loads(out.read_text()) == found
    assert said.err == ""
    assert [d["device"] for d in found["devices"]] == [0, 1, 2, 3]
    for device in found["devices"]:
        exposed = sum(part["exposed_s"] for part in device["parts"])
        assert exposed + device["idle_s"] == pytest.approx(device["span_s"])
        assert device["unknown"] == {}


def test_a_run_without_windows_is_told_how_to_record_some(tmp_path, capsys):
    assert main(["phases", "--work-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "has no recorded steps" in said
    assert "--profile.steps" in said
    assert main(["phases", "--work-dir", str(tmp_path / "absent")]) == 2
    assert "not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "8"), "--step 8 is not recorded in generation 2"),
        (("--generation", "1"), "--generation 1 has no recorded steps"),
        (("--out", "/dev/null/x"), "cannot write --out /dev/null/x"),
    ],
)
def test_what_is_not_there_is_named(plain, work_dir, capsys, words, said):
    assert main(["phases", "--work-dir", str(work_dir), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_window_that_did_not_end_is_left_out_and_told(plain, work_dir, capsys):
    partial = work_dir / "profile" / "2" / "step-9" / "a_b-0"
    partial.mkdir(parents=True)
    found = phases_module.phases(work_dir)
    partial.rmdir()
    partial.parent.rmdir()
    assert found.steps == (STEP,)
    assert [problem for problem in found.problems if "step-9" in problem]


@pytest.mark.parametrize("name", ["places.json", "window.json", "trace"])
def test_a_damaged_window_is_refused_with_the_name_of_the_file(
    plain, work_dir, tmp_path, capsys, name
):
    source = work_dir / "profile" / "2" / f"step-{STEP}" / "a_b-0"
    folder = tmp_path / "profile" / "2" / f"step-{STEP}" / "a_b-0"
    for file in source.rglob("*"):
        if file.is_file():
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    path = folder / (plain.window.trace if name == "trace" else name)
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["phases", "--work-dir", str(tmp_path)]) == 2
    assert path.name in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_those_that_exist(capsys):
    assert main(["phase"]) == 2
    said = capsys.readouterr().err
    assert "there is no command phase" in said
    assert "phases    " in said
    assert main([]) == 2
    assert "a command is missing" in capsys.readouterr().err


# ---------------------------------------------------------------------- the recorder


@pytest.mark.parametrize(
    ("platform", "ordinals"), [("cpu", [2048, 2049]), ("gpu", [0, 1])]
)
def test_devices_are_numbered_as_their_windows_number_them(platform, ordinals):
    """As jax numbers the devices of two processes, those of the second one first."""
    devices = [
        SimpleNamespace(
            platform=platform,
            process_index=process,
            id=(2048 if platform == "cpu" else 2) * process + local,
            local_hardware_id=local,
        )
        for process in (1, 0)
        for local in (0, 1)
    ]
    found = devices_of(devices, 1)
    assert [device.ordinal for device in found] == ordinals
    assert [device.number for device in found] == [0, 1]
    assert [device.number for device in devices_of(devices, 0)] == [2, 3]


def test_windows_that_cannot_be_written_are_told_once_and_training_goes_on(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    said: list[str] = []
    recorder = Recorder(
        Due(every=2),
        Origin(work_dir=tmp_path, run="", host="h", rank=0, generation=1),
        lambda: "",
        make_program(ONE_DEVICE).mesh.devices,
        said.append,
    )
    taken = []
    for step in range(1, 7):
        if recorder.is_due(step):
            with recorder.window(step):
                taken.append(step)
    assert taken == [2, 4, 6]
    assert len(said) == 1
    assert "training continues" in said[0]


def test_a_step_that_fails_ends_its_window_and_is_not_hidden(tmp_path):
    said: list[str] = []
    recorder = Recorder(
        Due(every=1),
        Origin(work_dir=tmp_path, run="", host="h", rank=0, generation=1),
        lambda: "",
        make_program(ONE_DEVICE).mesh.devices,
        said.append,
    )
    with pytest.raises(ZeroDivisionError), recorder.window(1):
        raise ZeroDivisionError
    jax.profiler.start_trace(tmp_path / "other")  # no window is open any more
    jax.profiler.stop_trace()
    assert folders.find(tmp_path)[0] == []
