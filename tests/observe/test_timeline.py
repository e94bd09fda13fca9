"""The merged timeline: clocks that are shifted, order, arrows, marks, and bad input."""

import dataclasses
import html.parser
import json
import math
import re

import numpy as np
import pytest

from mjax.observe import (
    merged,
    places,
    schedule,
    slots,
    spans,
    timeline,
    timeline_picture,
    timeline_rows,
)
from mjax.observe.spans import Event, Line, Span
from tests.observe import synthetic_clocks
from tests.observe.span_files import SECOND, Process, write
from tests.observe.synthetic_severity import TUNING_SEEDS

MESH = (("pp", 2), ("dp_replicate", 1), ("dp_shard", 2), ("tp", 1))


@dataclasses.dataclass(frozen=True)
class Clock:
    """A clock that is ahead by an offset and runs fast by a fraction."""

    boot_ns: int
    fast: float

    def ns(self, true_s):
        return (
            self.boot_ns + round(true_s * SECOND) + round(true_s * SECOND * self.fast)
        )


def shifted_run(folder, *, seed, barriers=8, mesh=MESH):
    """Write four ranks with simultaneous spans of step 7, on clocks that differ.

    Returns:
      true times of the spans, in seconds.
    """
    rng = np.random.default_rng(seed)
    # Booted within four months; at most 40 ppm from true time, so 80 from each other.
    clocks = [
        Clock(int(rng.integers(10**16)), float(rng.uniform(-4e-5, 4e-5)))
        for _ in range(4)
    ]
    lines: list[list[Line]] = [[] for _ in clocks]
    for number in range(barriers):
        came_s = 10 + 3 * number + rng.exponential(0.01, 4)
        left_s = came_s.max() + rng.exponential(1e-4, 4)
        for rank, clock in enumerate(clocks):
            times_ns = clock.ns(came_s[rank]), clock.ns(left_s[rank])
            span = Span("barrier", "idle", "barrier", *times_ns)
            lines[rank].append(Line(n=0, spans=(span,), barrier=number))
    times_s = [40.0, 40.25, 41.0]
    for rank, clock in enumerate(clocks):
        of_step = tuple(
            Span(name, "compute", f"device:{rank}", clock.ns(start), clock.ns(end))
            for name, start, end in (
                ("forward", *times_s[:2]),
                ("backward", *times_s[1:]),
            )
        )
        lines[rank].append(Line(n=0, step=7, spans=of_step))
        process = Process(
            rank=rank,
            host=f"n{rank}",
            devices=(rank,),
            mesh=mesh,
            monotonic_ahead_ns=clock.boot_ns,
        )
        write(folder, process, lines[rank])
    return times_s


def merge(folder, first=7, last=7, **more) -> merged.Merged:
    return merged.merge(spans.read_run(folder)[0], (), first=first, last=last, **more)


@pytest.mark.parametrize("seed", range(20))
def test_simultaneous_spans_of_shifted_clocks_are_within_the_stated_bound(
    tmp_path, seed
):
    shifted_run(tmp_path, seed=seed)
    found = merge(tmp_path)
    of_0 = next(rank for rank in found.ranks if rank.header.rank == 0)
    assert of_0.error_ns == 0
    assert found.problems == ()
    for rank in found.ranks:
        assert rank.error_ns < 2e7  # late barriers and drift; the offsets are months
        assert [step for step, _ in rank.spans] == [7, 7]
        for (_, own), (_, other) in zip(rank.spans, of_0.spans, strict=True):
            assert abs(own.start_ns - other.start_ns) <= rank.error_ns
            assert abs(own.end_ns - other.end_ns) <= rank.error_ns


def test_the_bound_is_not_much_larger_than_the_error_can_be(tmp_path):
    """A bound of seconds would hold too: this one is that of barriers and drift."""
    shifted_run(tmp_path, seed=3)
    drift_ns = 1e-4 * (41 - 31) * SECOND
    for rank in merge(tmp_path).ranks:
        assert rank.error_ns < drift_ns + 2e6


def barriers_run(folder, kind, seed):
    """Write the barriers of a generator, and a step at the last one."""
    made = synthetic_clocks.make(kind, seed)
    for rank, (enter, leave) in enumerate(
        zip(made.enter_ns, made.leave_ns, strict=True)
    ):
        lines = [
            Line(n=0, barrier=k, spans=(Span("barrier", "idle", "barrier", *both),))
            for k, both in enumerate(zip(enter.tolist(), leave.tolist(), strict=True))
            if both[0] >= 0
        ]
        # All ranks at one time: that of rank 0, by the true offset.
        at_ns = int(made.leave_ns[0].max() + made.truth.offset_ns[rank, -1])
        span = Span("forward", "compute", "device:0", at_ns, at_ns + 1000)
        lines.append(Line(n=0, step=1, spans=(span,)))
        process = Process(rank=rank, host=f"n{rank}", mesh=(("dp_shard", 1),))
        write(folder, process, lines)
    return made


@pytest.mark.parametrize("seed", TUNING_SEEDS[:5])
def test_generated_clocks_that_drift_are_within_the_bound(tmp_path, seed):
    barriers_run(tmp_path, "drift", seed)
    found = merge(tmp_path, first=1, last=1)
    starts = [
        next(span.start_ns for step, span in rank.spans if step == 1)  # no barrier
        for rank in found.ranks
    ]
    assert len(starts) > 1
    for rank, start_ns in zip(found.ranks, starts, strict=True):
        assert abs(start_ns - starts[0]) <= rank.error_ns + 1


@pytest.mark.parametrize("seed", TUNING_SEEDS[:5])
def test_a_clock_that_has_jumped_has_no_bound_and_is_said(tmp_path, seed):
    made = barriers_run(tmp_path, "jump", seed)
    assert made.truth.jumped is not None
    jumped = made.truth.jumped[0]
    found = merge(tmp_path, first=1, last=1)
    unbounded = [r.header.rank for r in found.ranks if math.isinf(r.error_ns)]
    assert unbounded == [jumped]
    assert f"rank {jumped} on n{jumped}: its clock has jumped" in found.problems[0]
    json.dumps(timeline.trace(found, "dp"), allow_nan=False)


def test_without_barriers_the_wall_clocks_place_the_spans_without_a_bound(tmp_path):
    shifted_run(tmp_path, seed=0, barriers=0)
    found = merge(tmp_path)
    starts = [rank.spans[0][1].start_ns for rank in found.ranks]
    assert max(starts) - min(starts) < 0.01 * SECOND  # 80 ppm of 40 s
    assert [math.isinf(rank.error_ns) for rank in found.ranks].count(True) == 3
    assert len(found.problems) == 3
    assert all("shares no barrier with rank 0" in text for text in found.problems)


def test_ranks_of_one_host_read_one_clock(tmp_path):
    for rank in range(2):
        barrier = Span("barrier", "idle", "barrier", 1000 - rank, 5000 + rank)
        lines = [
            Line(n=0, spans=(barrier,), barrier=0),
            Line(n=0, step=1, spans=(Span("data", "data", "host", 9000, 9100),)),
        ]
        write(tmp_path, Process(rank=rank, devices=(rank,)), lines)
    found = merge(tmp_path, 1, 1)
    assert [rank.error_ns for rank in found.ranks] == [0.0, 0.0]
    assert {rank.spans[0][1].start_ns for rank in found.ranks} == {9000}


@pytest.mark.parametrize(
    ("view", "order"),
    [("dp", [0, 1, 2, 3]), ("pp", [0, 2, 1, 3]), ("tp", [0, 1, 2, 3])],
)
def test_ranks_that_differ_along_the_axis_of_the_view_are_neighbours(
    tmp_path, view, order
):
    shifted_run(tmp_path, seed=0)
    found = merge(tmp_path, view=view)
    assert [rank.header.rank for rank in found.ranks] == order
    events = timeline.trace(found, view)["traceEvents"]
    sorts = [e for e in events if e["name"] == "process_sort_index"]
    assert [e["pid"] for e in sorted(sorts, key=lambda e: e["args"]["sort_index"])] == (
        order
    )


def test_coordinates_are_those_of_the_mesh():
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 3, "tp": 4}
    for device in range(24):
        found = tuple(places.coordinates(device, mesh).values())
        assert found == np.unravel_index(device, (2, 1, 3, 4))


def pipeline(folder, *, recorded=True, ticks=4):
    """Write two stages with four ticks each, in two steps, on one clock."""
    for rank in range(2):
        lines = [
            Line(
                n=0,
                step=step,
                spans=tuple(
                    Span("tick", "compute", f"device:{rank}", begin, begin + 100)
                    for begin in (
                        10_000 * step + 100 * tick + 30 * rank for tick in range(ticks)
                    )
                ),
            )
            for step in (1, 2)
        ]
        process = Process(rank=rank, devices=(rank,), mesh=(("pp", 2), ("tp", 1)))
        barrier = Span("barrier", "idle", "barrier", 1, 2)
        write(folder, process, [Line(n=0, spans=(barrier,), barrier=0), *lines])
    if recorded:
        path = schedule.path_of(folder, 1)
        path.parent.mkdir(exist_ok=True)
        path.write_text(schedule.to_json(ONE_MICROBATCH))


ONE_MICROBATCH = schedule.Schedule(
    run="a1",
    generation=1,
    name="1f1b",
    idle="skip",
    num_stages=2,
    num_chunks=1,
    num_microbatches=1,
    # Stage 0 forward, stage 1 forward, stage 1 backward, stage 0 backward.
    forward=[[[0, 0], None], [None, [0, 0]], [None, None], [None, None]],
    backward=[[None, None], [None, None], [None, [0, 0]], [[0, 0], None]],
)


def arrows(folder, first=1, last=2):
    found = merge(folder, first, last)
    return timeline_rows.arrows(slots.find(folder, found), found.ranks)


def test_a_slot_sends_to_the_slot_that_uses_it_and_an_idle_one_sends_nothing(tmp_path):
    pipeline(tmp_path)
    drawn = {
        (a.sent.device, a.sent.start_ns, a.received.device, a.received_ns)
        for a in arrows(tmp_path)
    }
    expected = set()
    for base in (10_000, 20_000):
        # Stage 0 ends tick 0 before stage 1 begins tick 1; stage 1 ends tick 2 after
        # stage 0 has begun tick 3, which waits.
        expected.add((0, base, 1, base + 130))
        expected.add((1, base + 230, 0, base + 330))
    assert drawn == expected


def test_each_tick_has_its_slots_and_idle_ones_are_told(tmp_path):
    pipeline(tmp_path)
    found = slots.find(tmp_path, merge(tmp_path, 1, 1))
    told = {(bar.device, bar.slot.tick): bar.name for bar in found.bars}
    assert told == {
        **{(0, 0): "F0a", (0, 1): "F idle", (0, 2): "B idle", (0, 3): "B0a"},
        **{(1, 0): "F idle", (1, 1): "F0a", (1, 2): "B0a", (1, 3): "B idle"},
    }
    assert {bar.is_measured for bar in found.bars} == {False}
    assert all(bar.end_ns - bar.start_ns == 100 for bar in found.bars)


def test_a_run_that_has_not_recorded_its_schedule_has_no_slots_and_no_arrows(tmp_path):
    pipeline(tmp_path, recorded=False)
    found = slots.find(tmp_path, merge(tmp_path, 1, 2))
    assert found.bars == ()
    assert arrows(tmp_path) == []
    [problem] = found.problems
    assert "the run has not recorded its schedule, so slots" in problem


def test_ticks_that_do_not_fit_the_schedule_have_no_slots(tmp_path):
    pipeline(tmp_path, ticks=3)
    found = slots.find(tmp_path, merge(tmp_path, 1, 1))
    assert found.bars == ()
    assert len(found.problems) == 2
    assert "3 ticks, the schedule has 4; its slots are not shown" in found.problems[0]


def test_a_schedule_of_another_run_or_of_other_stages_is_not_used(tmp_path):
    pipeline(tmp_path)
    path = schedule.path_of(tmp_path, 1)
    other = dataclasses.replace(ONE_MICROBATCH, run="b2")
    path.write_text(schedule.to_json(other))
    found = slots.find(tmp_path, merge(tmp_path, 1, 1))
    assert found.bars == ()
    assert "is that of run b2, start 1, not of run a1" in found.problems[0]


def test_arrows_bind_to_the_slots_that_send_and_receive(tmp_path):
    pipeline(tmp_path)
    found = merge(tmp_path, 1, 2)
    known = slots.find(tmp_path, found)
    told = timeline.trace(found, "pp", known)["traceEvents"]
    bars = [e for e in told if e["ph"] == "X"]
    flows = {e["id"]: e for e in told if e["ph"] == "s"}
    ends = [e for e in told if e["ph"] == "f"]
    assert len(ends) == len(flows) == len(arrows(tmp_path)) == 4
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in told
        if e["name"] == "thread_name"
    }
    for end in ends:
        at = []
        for event in (flows[end["id"]], end):
            where = event["pid"], event["tid"]
            inside = [
                bar
                for bar in bars
                if (bar["pid"], bar["tid"]) == where
                and bar["ts"] <= event["ts"] < bar["ts"] + bar["dur"]
            ]
            assert len(inside) == 1, event
            at.append((inside[0], names[where]))
        (sent, stream), (received, there) = at
        assert received["pid"] == 1 - sent["pid"]
        assert stream.split()[1] == there.split()[1] == sent["args"]["direction"]
        for same in ("step", "chunk", "microbatch"):
            assert sent["args"][same] == received["args"][same]
        assert sent["args"]["tick"] < received["args"]["tick"]


@pytest.mark.parametrize(
    ("device", "stage", "there"), [(0, 1, 4), (3, 1, 7), (5, 0, 1), (6, 0, 2)]
)
def test_a_slot_is_sent_to_the_same_replica_and_the_same_part_of_tp(
    device, stage, there
):
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 2}
    slot = schedule.Slot("forward", 3, stage)
    assert timeline_rows._beside(device, mesh, slot) == there


def test_a_recorded_slot_has_the_times_of_its_operations(tmp_path, monkeypatch):
    """Work in an idle slot is reported, but does not count as work."""
    pipeline(tmp_path)
    sent = slots.Transfer(
        rank=0,
        device=0,
        step=1,
        tick=0,
        direction="forward",
        role="pp",
        start_ns=10_060,
        end_ns=10_090,
    )
    recorded = slots.Recorded(
        rank=0,
        device=0,
        stage=0,
        step=1,
        ran={
            **{("forward", 0): (10_010, 10_050), ("backward", 3): (10_340, 10_390)},
            ("forward", 1): (10_110, 10_120),
        },
        ticks={},
        transfers=(sent,),
        is_computed=False,
    )
    monkeypatch.setattr(slots, "recorded_slots", lambda *_: [recorded])
    found = slots.find(tmp_path, merge(tmp_path, 1, 1))
    told = {
        (bar.device, bar.name): (bar.start_ns, bar.end_ns, bar.is_measured)
        for bar in found.bars
    }
    assert told[0, "F0a"] == (10_010, 10_050, True)
    assert told[0, "B0a"] == (10_340, 10_390, True)
    assert told[0, "F idle"] == (10_100, 10_200, False)
    assert told[1, "F0a"] == (10_130, 10_230, False)
    assert found.transfers == (sent,)
    assert found.problems == (
        "device 0, step 1: forward slot of tick 1 ran, but is idle by the schedule",
    )
    threads = {
        e["args"]["name"]
        for e in timeline.trace(merge(tmp_path, 1, 1), "pp", found)["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 0
    }
    more = {f"device:0 {name}" for name in ("forward", "backward", "transfers")}
    assert threads == {"device:0", *more}


def test_a_run_without_ticks_has_no_slots_and_nothing_to_say(tmp_path):
    shifted_run(tmp_path, seed=0)
    found = slots.find(tmp_path, merge(tmp_path))
    assert (found.bars, found.problems) == ((), ())


def with_events(tmp_path):
    """Write two ranks with an event each, and events of a launch."""
    for rank, ahead_ns in ((0, 0), (1, 10**15)):
        told = Event(time_ns=10**18 + 1500, kind=f"slow{rank}", text="é")
        barrier = Span("barrier", "idle", "barrier", ahead_ns, ahead_ns + 10)
        lines = [
            Line(n=0, spans=(barrier,), barrier=0),
            Line(
                n=0,
                step=1,
                spans=(Span("data", "data", "host", ahead_ns + 1000, ahead_ns + 2000),),
            ),
            Line(n=0, event=told),
        ]
        process = Process(
            rank=rank, host=f"n{rank}", devices=(rank,), monotonic_ahead_ns=ahead_ns
        )
        write(tmp_path, process, lines)
    at = {"inside": 1200, "outside": 3000, "debugged": 1200}
    (tmp_path / "events.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "time_ns": 10**18 + time_ns,
                    "kind": kind,
                    "severity": "debug" if kind == "debugged" else "info",
                }
            )
            + "\n"
            for kind, time_ns in at.items()
        )
    )


def test_what_happened_meanwhile_is_marked_at_its_time(tmp_path):
    with_events(tmp_path)
    found = timeline._read(tmp_path, "1:2", None, "dp")
    marks = {mark.kind: (mark.rank, mark.time_ns) for mark in found.marks}
    assert set(marks) == {"slow0", "slow1", "inside"}
    assert marks["slow0"] == (0, 1500)
    assert marks["inside"] == (None, 1200)
    assert marks["slow1"][1] == pytest.approx(1500, abs=11)  # the bound of the barrier
    told = timeline.trace(found, "dp")["traceEvents"]
    assert {e["s"] for e in told if e["ph"] == "i"} == {"p", "g"}


def test_spans_of_other_steps_are_there_as_far_as_they_overlap(tmp_path):
    """The host's work for other steps at that time is not a gap."""
    lines = [
        Line(n=0, step=step, spans=(Span("device", "compute", "host", begin, end),))
        for step, begin, end in (
            (1, 0, 100),
            (2, 100, 1200),
            (3, 1100, 1300),
            (4, 1300, 1400),
        )
    ]
    write(tmp_path, Process(), lines)
    found = merge(tmp_path, 3, 3)
    assert [step for step, _ in found.ranks[0].spans] == [2, 3]
    assert (found.start_ns, found.end_ns) == (1100, 1300)
    told = timeline.trace(found, "dp")["traceEvents"]
    assert min(event["ts"] for event in told if event["ph"] == "X") == 0
    page = timeline_picture.page(found, "dp")
    lefts = [float(x) for x in re.findall(r'<rect x="([0-9.]+)"', page)]
    assert lefts == [timeline_picture._LEFT] * 2  # cut at the edge


def test_the_newest_start_that_took_the_steps_is_shown(tmp_path):
    for generation, step in ((1, 5), (2, 5), (3, 9)):
        span = Span("data", "data", "host", 1000 * generation, 1000 * generation + 9)
        line = Line(n=0, step=step, spans=(span,))
        write(tmp_path, Process(generation=generation), [line])
    assert merge(tmp_path, 5, 5).generation == 2
    assert merge(tmp_path, 5, 5, generation=1).generation == 1


def test_devices_and_ranks_without_spans_are_named(tmp_path):
    shifted_run(tmp_path, seed=0)
    (gone,) = (tmp_path / "spans").glob("n3-*")
    gone.unlink()
    (cut,) = (tmp_path / "spans").glob("n2-*")
    cut.write_bytes(cut.read_bytes()[:-9])  # its last line is cut off
    found = merge(tmp_path)
    assert found.problems == (
        "rank 2 has no spans of these steps",
        "1 of 4 devices have no file of spans: 3",
    )


class Parser(html.parser.HTMLParser):
    """Collects tags and texts."""

    def __init__(self):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def test_names_are_escaped_in_the_picture_which_needs_no_network(tmp_path):
    bad = '<script>alert("1")</script>'
    line = Line(n=0, step=1, spans=(Span(bad, "data", bad, 1000, 2000),))
    event = Line(n=0, event=Event(time_ns=10**18 + 1500, kind=bad, text=bad))
    write(tmp_path, Process(host=bad, run=bad), [line, event])
    page = timeline_picture.page(merge(tmp_path, 1, 1), "dp")
    parser = Parser()
    parser.feed(page)
    names = {tag for tag, _ in parser.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "style2"})
    urls = [
        v for _, attrs in parser.tags for k, v in attrs.items() if k in ("src", "href")
    ]
    assert urls == []
    assert sum(bad in text for text in parser.texts) >= 4  # as text
    assert "default-src 'none'" in page


def test_the_picture_has_a_bar_for_each_span_and_slot_and_a_path_for_each_arrow(
    tmp_path,
):
    pipeline(tmp_path)
    found = merge(tmp_path, 1, 2)
    known = slots.find(tmp_path, found)
    hatch = 1  # the pattern of idle slots
    page = timeline_picture.page(found, "pp", known)
    num = sum(len(rank.spans) for rank in found.ranks)
    assert page.count("<rect ") == num + len(known.bars) + hatch == 16 + 16 + 1
    assert page.count('marker-end="url(#') == 4
    assert page.count('fill="url(#idle)"') == 8
    assert "times within 0.0 us" in page
    only = timeline_picture.page(found, "pp", known, only_slots=True)
    assert only.count("<rect ") == len(known.bars) + hatch


def test_a_picture_of_slots_without_a_schedule_is_refused(tmp_path, capsys):
    pipeline(tmp_path, recorded=False)
    words = ["--work-dir", str(tmp_path), "--steps", "1:2", "--only-slots"]
    assert timeline.main([*words, "--out", str(tmp_path / "x.html")]) == 2
    assert "the run has not recorded its schedule" in capsys.readouterr()[1]


def test_a_picture_of_too_many_spans_is_refused(tmp_path, monkeypatch):
    pipeline(tmp_path)
    monkeypatch.setattr(timeline_picture, "MOST_SPANS", 11)
    with pytest.raises(ValueError, match="16 spans is too large, at most 11"):
        timeline_picture.page(merge(tmp_path, 1, 2), "pp")


def test_the_command_writes_a_trace_with_the_bound_of_each_rank(tmp_path, capsys):
    shifted_run(tmp_path, seed=1)
    out = tmp_path / "out.json"
    words = ["--work-dir", str(tmp_path), "--steps", "7:8", "--out", str(out)]
    assert timeline.main(words) == 0
    said, _ = capsys.readouterr()
    assert "8 spans of 4 ranks" in said
    found = json.loads(out.read_text())
    bounds = {of["rank"]: of["error_ns"] for of in found["metadata"]["ranks"]}
    assert bounds[0] == 0
    assert all(0 < bounds[rank] < 2e7 for rank in (1, 2, 3))
    bars = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert min(bar["ts"] for bar in bars) == 0
    assert {bar["cat"] for bar in bars} == {"compute"}
    assert timeline.main([*words[:4], "--json"]) == 0
    assert json.loads(capsys.readouterr()[0]) == found


def test_colours_are_there_for_every_kind():
    kinds = set(spans.Kind.__value__.__args__)
    assert set(timeline._COLOURS) == set(timeline_picture._COLOURS) == kinds


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "7"], "--steps A:B is steps A to B - 1"),
        (["--steps", "8:8"], "A must be at least 1 and below B, got 8:8"),
        (["--steps", "0:2"], "A must be at least 1"),
        (["--steps", "8:9"], "no spans of --steps 8:9; steps with spans: 7 to 7"),
        (["--steps", "7:8", "--generation", "4"], "of --steps 7:8 in start 4"),
        (["--steps", "7:8", "--out", "x.png"], "--out must end in .json or .html"),
        (["--steps", "7:8", "--out", "no/x.json"], "give another path"),
        (
            ["--steps", "7:8", "--only-slots", "--out", "x.json"],
            "--only-slots is for a picture, --out FILE.html, got x.json",
        ),
        (["--steps", "7:8"], "--out is missing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path, monkeypatch, capsys, words, says
):
    monkeypatch.chdir(tmp_path)
    shifted_run(tmp_path, seed=0)
    assert timeline.main(["--work-dir", ".", *words]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert says in error


def test_a_folder_without_spans_and_one_of_two_runs_are_refused(tmp_path, capsys):
    words = ["--steps", "7:8", "--out", str(tmp_path / "x.json")]
    assert timeline.main(["--work-dir", str(tmp_path), *words]) == 2
    assert "has no spans" in capsys.readouterr()[1]
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "a.jsonl").write_text("{}")
    assert timeline.main(["--work-dir", str(tmp_path), *words]) == 2
    assert "no file of spans can be read" in capsys.readouterr()[1]
    for rank, run in enumerate("ab"):
        write(tmp_path, Process(rank=rank, run=run), [])
    assert timeline.main(["--work-dir", str(tmp_path), *words]) == 2
    assert "spans of 2 runs" in capsys.readouterr()[1]
    assert timeline.main(["--work-dir", str(tmp_path / "no"), *words]) == 2
    assert "is not a folder" in capsys.readouterr()[1]
