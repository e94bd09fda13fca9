"""Idle slots counted from operations, compared with right and wrong schedules."""

import dataclasses
import json

import pytest

from mjax.observe import bubble, schedule
from mjax.observe.slots import Recorded, outside_ticks
from mjax.observe.spans import Line, Span
from mjax.pipeline.config import Options, ScheduleName
from mjax.pipeline.make import Pipeline
from mjax.pipeline.partition import split
from mjax.pipeline.schedule import build
from mjax.run import schedule_record
from mjax.run.record import Start
from tests.observe.span_files import Process, write

MS = 10**6
STEP = Span("step", "compute", "step", 1000, 2000)


def known(tmp_path, name: ScheduleName = "interleaved-1f1b", *, stages=2, chunks=2):
    """Record a schedule as a run does, and read it back."""
    tables = build(name, num_stages=stages, num_chunks=chunks, num_microbatches=4)
    partition = split(
        stages * chunks, num_stages=stages, num_chunks=chunks, period=1, uneven=False
    )
    pipeline = Pipeline(
        schedule=tables, partition=partition, options=Options(idle="skip")
    )
    schedule_record.write(tmp_path, Start(run="a1", number=1), pipeline)
    found = schedule.read(tmp_path, 1)
    assert found is not None
    return found, tables


def ran_by(found, *, tp=2, step=7, lasted_ms=(3, 5)):
    """Let every stage do what a schedule says, on `tp` devices."""
    recorded = []
    for device in range(found.num_stages * tp):
        stage = device // tp
        ran = {
            (slot.direction, slot.tick): (
                100 * MS * slot.tick,
                (100 * slot.tick + lasted_ms[stage % 2]) * MS,
            )
            for slot in found.slots(stage)
            if found.work(slot) is not None
        }
        recorded.append(
            Recorded(
                rank=0,
                device=device,
                stage=stage,
                step=step,
                ran=ran,
                ticks={},
                transfers=(),
                is_computed=False,
            )
        )
    return recorded


@pytest.mark.parametrize(
    ("name", "stages", "chunks"),
    [("interleaved-1f1b", 2, 2), ("1f1b", 4, 1), ("gpipe", 4, 1)],
)
def test_counted_idle_slots_are_those_of_the_schedule_and_of_the_formula(
    tmp_path, name, stages, chunks
):
    found, tables = known(tmp_path, name, stages=stages, chunks=chunks)
    counted = bubble.count(ran_by(found), found, 1)
    assert counted.problems == ()
    for stage in counted.stages:
        assert stage.idle == stage.idle_by_schedule == 2 * (stages - 1)
    assert counted.slots == pytest.approx(tables.bubble)
    assert found.bubble == pytest.approx(tables.bubble)


def test_an_idle_slot_takes_the_time_of_those_that_use_it(tmp_path):
    found, _ = known(tmp_path)
    first, last = bubble.count(ran_by(found), found, 1).stages
    # Two idle slots: stage 0 is idle while stage 1 takes 5 ms, stage 1 while 0 takes 3.
    assert (first.idle_s, last.idle_s) == pytest.approx((0.010, 0.006))
    assert (first.used_s, last.used_s) == pytest.approx((16 * 0.003, 16 * 0.005))


def test_the_schedule_of_another_run_disagrees_with_what_ran(tmp_path):
    found, _ = known(tmp_path)
    other, _ = known(tmp_path, "1f1b", chunks=1)
    counted = bubble.count(ran_by(found), other, 1)
    assert counted.slots == 0.125  # the operations do not change
    assert any("idle by the schedule" in text for text in counted.problems)


def test_slots_of_the_right_number_in_the_wrong_tick_disagree(tmp_path):
    """Counts alone would not see it."""
    found, _ = known(tmp_path)
    recorded = ran_by(found)
    moved = dict(recorded[3].ran)
    moved["forward", 0] = moved.pop(("forward", 1))
    recorded[3] = dataclasses.replace(recorded[3], ran=moved)
    counted = bubble.count(recorded, found, 1)
    assert [stage.idle for stage in counted.stages] == [2, 2]
    assert sorted(counted.problems) == [
        "device 3, step 7: forward slot of tick 0 ran, but is idle by the schedule",
        "device 3, step 7: forward slot of tick 1 did not run, but is in the schedule",
    ]


def test_without_a_pipeline_no_slot_is_idle():
    recorded = Recorded(
        rank=0,
        device=0,
        stage=0,
        step=7,
        ran={},
        ticks={},
        transfers=(),
        is_computed=False,
    )
    counted = bubble.count([recorded], None, 1)
    assert [(stage.used, stage.idle) for stage in counted.stages] == [(0, 0)]
    assert (counted.slots, counted.time) == (None, None)
    assert "no pipeline: 0 slots, 0 idle" in bubble.text_of(counted)


def test_computed_idle_slots_cannot_be_counted(tmp_path):
    found, _ = known(tmp_path)
    recorded = [dataclasses.replace(one, is_computed=True) for one in ran_by(found)]
    with pytest.raises(ValueError, match="record a step with --pipeline"):
        bubble.count(recorded, found, 1)


def test_operations_outside_of_the_stamps_of_their_tick_are_told(tmp_path):
    found, _ = known(tmp_path)
    recorded = ran_by(found)[0]
    ticks = [
        Span("tick", "compute", "device:0", 100 * MS * tick, 100 * MS * (tick + 1))
        for tick in range(found.num_ticks)
    ]
    assert outside_ticks(recorded, ticks) == []
    for by_ns in (50 * MS, -110 * MS):  # the operations are too early, or too late
        moved = [
            tick._replace(start_ns=tick.start_ns + by_ns, end_ns=tick.end_ns + by_ns)
            for tick in ticks
        ]
        assert len(outside_ticks(recorded, moved)) == len(recorded.ran)


def test_one_slow_device_does_not_make_the_idle_slots_of_others_longer(tmp_path):
    found, _ = known(tmp_path)
    recorded = ran_by(found, tp=3)
    slow = {
        key: (start_ns, start_ns + 90 * MS)
        for key, (start_ns, _) in recorded[3].ran.items()
    }
    fast = {
        key: (start_ns, start_ns + 1 * MS)
        for key, (start_ns, _) in recorded[4].ran.items()
    }
    recorded[3] = dataclasses.replace(recorded[3], ran=slow)
    recorded[4] = dataclasses.replace(recorded[4], ran=fast)
    first, _ = bubble.count(recorded, found, 1).stages
    assert first.idle_s == pytest.approx(0.010)


def test_the_command_ends_with_1_where_schedule_and_operations_disagree(
    tmp_path, monkeypatch, capsys
):
    found, _ = known(tmp_path)
    other, _ = known(tmp_path, "1f1b", chunks=1)
    words = ["--work-dir", str(tmp_path), "--steps", "7:8"]
    for schedule_of_run, code in ((found, 0), (other, 1)):
        counted = bubble.count(ran_by(found), schedule_of_run, 1)
        monkeypatch.setattr(bubble, "find", lambda *_, counted=counted: counted)
        assert bubble.main(words) == code
        said, warned = capsys.readouterr()
        assert "bubble, idle slots over used ones: 0.1250 counted" in said
        assert ("idle by the schedule" in warned) == bool(code)
        assert bubble.main([*words, "--json"]) == code
        told = json.loads(capsys.readouterr()[0])
        assert [stage["idle"] for stage in told["stages"]] == [2, 2]
        assert bool(told["problems"]) == bool(code)


def test_steps_that_were_not_recorded_are_refused_with_the_flag(tmp_path, capsys):
    write(tmp_path, Process(run="a1"), [Line(n=0, step=7, spans=(STEP,))])
    assert bubble.main(["--work-dir", str(tmp_path), "--steps", "7:8"]) == 2
    error = capsys.readouterr()[1]
    assert "no step of --steps 7:8 was recorded; train with --profile.steps" in error
    assert error.count("\n") == 1


# ---------------------------------------------------------------------- the record


def test_the_record_has_the_work_of_every_slot(tmp_path):
    found, tables = known(tmp_path)
    for direction in schedule.DIRECTIONS:
        chunks = getattr(tables, f"{direction}_chunk")
        microbatches = getattr(tables, f"{direction}_microbatch")
        for tick in range(tables.num_ticks):
            for stage in range(2):
                work = found.work(schedule.Slot(direction, tick, stage))
                pair = (-1, -1) if work is None else work
                assert pair == (chunks[tick, stage], microbatches[tick, stage])


def test_what_a_slot_sends_is_used_by_the_next_virtual_stage(tmp_path):
    found, tables = known(tmp_path)
    sent = {direction: [0, 0] for direction in schedule.DIRECTIONS}
    for stage in range(2):
        for slot in found.slots(stage):
            there = found.receiver(slot)
            if there is None:
                continue
            sent[slot.direction][stage] += 1
            own, work = found.work(slot), found.work(there)
            assert own is not None
            assert work is not None
            assert own.microbatch == work.microbatch
            assert there.tick == slot.tick + 1
    assert tuple(sent["forward"]) == tables.forward_sends
    assert tuple(sent["backward"]) == tables.backward_sends


def test_a_run_without_a_pipeline_leaves_no_record(tmp_path):
    schedule_record.write(tmp_path, Start(run="a1", number=1), None)
    assert [*tmp_path.iterdir()] == []
    assert schedule.read(tmp_path, 1) is None


def test_a_record_that_cannot_be_written_stops_no_run(tmp_path, capsys):
    (tmp_path / "schedules").write_text("a file")
    known_tables = build("1f1b", num_stages=2, num_chunks=1, num_microbatches=2)
    partition = split(2, num_stages=2, num_chunks=1, period=1, uneven=False)
    pipeline = Pipeline(schedule=known_tables, partition=partition, options=Options())
    schedule_record.write(tmp_path, Start(run="a1", number=1), pipeline)
    assert "cannot be written, training continues" in capsys.readouterr()[0]


def _without_one(record):
    record["forward"][0][0] = None


def _twice(record):
    record["forward"][8][0] = [0, 0]


def _backward_first(record):
    record["backward"][0][1] = record["backward"][3][1]
    record["backward"][3][1] = None


def _newer(record):
    record["version"] = 2


def _narrow(record):
    record["forward"][2] = [None]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without_one, "stage 0 does not run each microbatch once"),
        (_twice, "stage 0 does not run each microbatch once"),
        (_backward_first, "stage 1 has a backward slot before its forward"),
        (_newer, "version 2 instead of"),
        (_narrow, "a tick does not have 2 stages"),
    ],
)
def test_a_damaged_record_is_refused_with_its_path(tmp_path, damage, says):
    known(tmp_path)
    path = schedule.path_of(tmp_path, 1)
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"cannot read .*0001.json: .*{says}"):
        schedule.read(tmp_path, 1)
