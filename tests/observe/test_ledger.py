"""The ledger of a run: against seconds that were counted by hand, and bad input."""

import json

import pytest

from mjax.observe import ledger, spans, start_time
from mjax.observe.spans import Launch, Line
from tests.observe.span_files import Process, span, write


def start(process, begin_s, first, last, *, end: int | None = 0, step_s=1.0):
    """Return the lines of a start: 10 s until its first step, of which 4 compile."""
    lines = [
        Line(
            n=0,
            spans=(
                span(process, "import", "restart", "host", begin_s, begin_s + 5),
                span(process, "compile", "restart", "host", begin_s + 5, begin_s + 9),
            ),
        )
    ]
    now_s = begin_s + 10  # one second in no span: before the first step
    for step in range(first, last + 1):
        own = [
            span(process, "data", "data", "host", now_s, now_s + 0.25 * step_s),
            span(
                process,
                "device",
                "compute",
                "host",
                now_s + 0.25 * step_s,
                now_s + step_s,
            ),
            # Not of the host: overlaps.
            span(process, "step", "compute", "step", now_s, now_s + step_s),
        ]
        now_s += step_s
        if step % 4 == 0:
            own += [span(process, "save", "ckpt", "host", now_s, now_s + 0.5)]
            now_s += 0.5
        lines.append(Line(n=0, step=step, spans=tuple(own)))
    if end is not None:
        lines.append(
            Line(n=0, spans=(span(process, "eval", "eval", "host", now_s, now_s + 2),))
        )
        lines.append(Line(n=0, end=end))
    return lines


def two_starts(tmp_path, **more):
    """Steps 1 to 6 are taken, then again from 5 on, on a host that booted later."""
    first = Process(monotonic_ahead_ns=5 * 10**12, **more)
    second = Process(generation=2, monotonic_ahead_ns=7, **more)
    write(tmp_path, first, start(first, 0, 1, 6, end=None), at_s=9)
    write(tmp_path, second, start(second, 30, 5, 8), at_s=39)


def test_every_second_of_two_starts_is_in_one_bucket(tmp_path):
    two_starts(tmp_path)
    found = ledger.ledger(tmp_path)
    assert found.source == "spans"
    assert found.buckets == pytest.approx(
        {
            "productive": 4 + 4.0,
            "compile": 8.0,
            "restart": 6 + 6.0,
            "lost": 2.0,
            "save": 1.0,
            "eval": 2.0,
            "idle": 30 - 16.5,
        }
    )
    assert found.wall_s == pytest.approx(46.5)
    assert sum(found.buckets.values()) == pytest.approx(found.wall_s)
    assert found.effective == pytest.approx(8 / 46.5)
    assert found.problems == ()


def test_time_in_no_span_after_the_first_step_is_unexplained_and_in_no_bucket(tmp_path):
    process = Process()
    lines = start(process, 0, 1, 4)
    del lines[2]  # of step 2
    write(tmp_path, process, lines)
    found = ledger.ledger(tmp_path)
    assert found.unexplained_s == pytest.approx(1.0)
    assert "1.0 s are not explained" in found.problems[0]
    assert found.buckets["idle"] == 0
    total = sum(found.buckets.values()) + found.unexplained_s
    assert total == pytest.approx(found.wall_s)


def test_a_wall_clock_that_went_back_is_said_and_not_hidden(tmp_path):
    first, second = Process(), Process(generation=2, wall_ahead_ns=10**18 - 10**11)
    write(tmp_path, first, start(first, 0, 1, 4))
    write(tmp_path, second, start(second, 30, 5, 8))
    found = ledger.ledger(tmp_path)
    assert found.unexplained_s == pytest.approx(30 - 16.5 - 100)
    assert found.buckets["idle"] == 0
    assert "node-0-2.jsonl begins 86.5 s before the end of" in found.problems[0]


@pytest.mark.parametrize("jump_s", [-5, 100])
def test_a_wall_clock_that_jumps_within_one_boot_changes_nothing(tmp_path, jump_s):
    first = Process(boot="b00t")
    later = Process(boot="b00t", generation=2, wall_ahead_ns=10**18 + jump_s * 10**9)
    write(tmp_path, first, start(first, 0, 1, 4, end=None), at_s=9)
    write(tmp_path, later, start(later, 30, 5, 8), at_s=39)
    found = ledger.ledger(tmp_path)
    assert found.buckets["idle"] == pytest.approx(30 - 14.5)
    assert found.wall_s == pytest.approx(46.5)
    (problem,) = found.problems
    assert f"clock of node jumped by {jump_s:+.1f} s before" in problem


def test_another_boot_goes_on_by_the_wall_clock(tmp_path):
    first = Process(boot="b00t", monotonic_ahead_ns=5 * 10**12)
    later = Process(boot="b2", generation=2, monotonic_ahead_ns=7)
    write(tmp_path, first, start(first, 0, 1, 4, end=None), at_s=9)
    write(tmp_path, later, start(later, 30, 5, 8), at_s=39)
    found = ledger.ledger(tmp_path)
    assert found.buckets["idle"] == pytest.approx(30 - 14.5)
    assert found.problems == ()


def test_a_process_that_lived_on_beside_the_next_start_is_counted_once(tmp_path):
    """Its host was lost, and it did not know."""
    first, later = Process(boot="b00t"), Process(boot="b00t", generation=2)
    write(tmp_path, first, start(first, 0, 1, 6))
    write(tmp_path, later, start(later, 12.5, 3, 4))
    found = ledger.ledger(tmp_path)
    assert found.wall_s == pytest.approx(12.5 + 12 + 0.5 + 2)
    assert found.buckets["productive"] == pytest.approx(2 + 2)
    assert found.buckets["lost"] == pytest.approx(0.5)
    assert found.unexplained_s == 0
    assert found.problems == ()


def test_starts_and_lost_steps_are_counted(tmp_path):
    two_starts(tmp_path)
    found = ledger.ledger(tmp_path)
    assert (found.num_starts, found.num_lost_steps) == (2, 2)


def test_a_process_that_runs_is_said(tmp_path):
    process = Process()
    write(tmp_path, process, start(process, 0, 1, 4, end=None))
    assert "has no last line" in ledger.ledger(tmp_path).problems[0]


def written_late(process, *, end):
    """Return two steps as the loop writes them, the next one already dispatched."""
    rows = {
        1: [("data", 0, 1), ("dispatch", 1, 2), ("device", 4, 6), ("metrics", 6, 6.5)],
        2: [("data", 2, 3), ("dispatch", 3, 4), ("agree", 6.5, 7), ("device", 8, 10)],
    }
    kinds = {"data": "data", "device": "compute"}
    lines = [
        Line(
            n=0,
            step=step,
            spans=tuple(
                span(process, name, kinds.get(name, "host"), "host", begin_s, end_s)
                for name, begin_s, end_s in row
            ),
        )
        for step, row in rows.items()
    ]
    return [*lines, *([] if end is None else [Line(n=0, end=end)])]


@pytest.mark.parametrize(("end", "unexplained_s"), [(None, 0.0), (0, 1.0)])
def test_a_running_process_has_dispatched_a_step_that_no_line_has_yet(
    tmp_path, end, unexplained_s
):
    process = Process()
    write(tmp_path, process, written_late(process, end=end))
    found = ledger.ledger(tmp_path)
    assert found.unexplained_s == pytest.approx(unexplained_s)
    assert found.buckets["productive"] == pytest.approx(10.0 - unexplained_s)


def test_another_rank_counts_where_rank_0_is_missing(tmp_path):
    process = Process(rank=3)
    write(tmp_path, process, start(process, 0, 1, 4))
    found = ledger.ledger(tmp_path)
    assert found.buckets["productive"] == 4.0
    assert found.problems == ("start 1 has no spans of rank 0: rank 3 is used",)


def driver_events(tmp_path, *, ended=True, step_s=4.0):
    """Write the events of a launch with one generation of 16.5 s."""
    spent = {"import": 5.0, "init": 0.0, "build": 0.0, "compile": 4.0, "restore": 1.0}
    spent |= {"step": step_s, "eval": 2.0, "save": 0.5, "sample": 0.0, "exit": 0.0}
    facts = {"start_step": 0, "step": 4, "age_s": 0.0, "phase": "exit"}
    times = {"spent_s": spent, "silent_s": 0.0} | facts
    told = [
        {"time_ns": 10**18 - 2 * 10**9, "kind": "host"},
        {"time_ns": 10**18 - 10**9, "kind": "state", "text": "looking for ports"},
        {"time_ns": 10**18, "kind": "state", "text": "running", "generation": 1},
        {"time_ns": 10**18 + 165 * 10**8, "kind": "times", "data": times},
    ]
    told[-1]["generation"] = 1
    if ended:
        last = {"time_ns": 10**18 + 165 * 10**8, "kind": "state", "generation": 1}
        told.append(last | {"text": "ended", "severity": "debug"})
    text = "".join(json.dumps(one) + "\n" for one in told)
    (tmp_path / "events.jsonl").write_text(text)


def test_events_count_and_spans_check_them(tmp_path):
    driver_events(tmp_path)
    process = Process(launch=Launch(name="b2", generation=1))
    write(tmp_path, process, start(process, 0, 1, 4))
    found = ledger.ledger(tmp_path)
    assert found.source == "events"
    assert found.wall_s == pytest.approx(18.5)
    assert found.buckets["idle"] == pytest.approx(1.0)
    assert found.check == pytest.approx(
        {**dict.fromkeys(ledger.BUCKETS, 0.0), "restart": -1.0, "idle": -1.0}
    )
    assert found.problems == ()


def test_spans_of_a_launched_run_say_how_long_kept_steps_took(tmp_path):
    """Steps 1 to 6 take 6 s by the spans, and a seventh one that did not end 2 s."""
    told = []
    for generation, (first, last, step_s) in enumerate([(0, 6, 8.0), (4, 8, 4.0)]):
        at_ns = 10**18 + generation * 30 * 10**9
        spent = {"compile": 4.0, "build": 6.0, "step": step_s, "save": 0.5}
        data = {"spent_s": spent, "silent_s": 0.0, "age_s": 0.0, "phase": "step"}
        data |= {"start_step": first, "step": last}
        own = {"generation": generation + 1}
        told += [
            own | {"time_ns": at_ns, "kind": "state", "text": "running"},
            own | {"time_ns": at_ns + 19 * 10**9, "kind": "times", "data": data},
            own | {"time_ns": at_ns + 19 * 10**9, "kind": "state", "text": "ended"},
        ]
    lines = "".join(json.dumps(one) + "\n" for one in told)
    (tmp_path / "events.jsonl").write_text(lines)
    for number, (begin_s, first, last) in enumerate([(0, 1, 6), (30, 5, 8)], start=1):
        launch = Launch(name="b2", generation=number)
        process = Process(generation=number, launch=launch)
        write(tmp_path, process, start(process, begin_s, first, last, end=None))
    found = ledger.ledger(tmp_path)
    assert found.source == "events"
    assert found.buckets["productive"] == pytest.approx(4.0 + 4.0)
    assert found.buckets["lost"] == pytest.approx(4.0)


def test_starts_of_an_older_launch_are_not_those_of_the_newest(tmp_path):
    for number, name in enumerate(("a1", "b2"), start=1):
        process = Process(generation=number, launch=Launch(name=name, generation=1))
        write(tmp_path, process, start(process, 30 * number, 1, 3 * number))
    files, _ = spans.read_run(tmp_path)
    (seen,) = start_time.by_generation(files).values()
    assert seen(100.0)["productive steps"] == pytest.approx(6.0)


def test_sources_that_contradict_each_other_are_said(tmp_path):
    driver_events(tmp_path, step_s=5.0)
    process = Process(launch=Launch(name="b2", generation=1))
    write(tmp_path, process, start(process, 0, 1, 4))
    found = ledger.ledger(tmp_path)
    said = "productive: 5.0 s by the events, but 4.0 s by the spans"
    unknown = "1.0 s of generation 1 are not explained: an event is missing, or the "
    assert found.problems == (unknown + "clock jumped", said)
    assert found.unexplained_s == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("ended", "launch", "says"),
    [
        (False, Launch(name="b2", generation=1), "the launch has not ended"),
        (True, None, "start 1 was not made by the launch"),
    ],
)
def test_spans_count_where_the_events_are_not_the_whole_run(
    tmp_path, ended, launch, says
):
    driver_events(tmp_path, ended=ended)
    process = Process(launch=launch)
    write(tmp_path, process, start(process, 0, 1, 4))
    found = ledger.ledger(tmp_path)
    assert found.source == "spans"
    assert found.problems == (f"{says}: the spans are used",)


def test_a_launch_without_its_events_is_said(tmp_path):
    process = Process(launch=Launch(name="b2", generation=1))
    write(tmp_path, process, start(process, 0, 1, 4))
    found = ledger.ledger(tmp_path)
    said = "events.jsonl has no events of a launch: the spans are used"
    assert found.problems == (said,)


def test_a_file_without_a_span_is_said_and_the_other_start_counts(tmp_path):
    first, second = Process(), Process(generation=2)
    write(tmp_path, first, [])
    write(tmp_path, second, start(second, 30, 1, 8))
    found = ledger.ledger(tmp_path)
    assert found.buckets["productive"] == 8
    assert "start 1 has no spans of a host" in found.problems[0]


def test_a_file_that_is_cut_off_loses_its_last_line_only(tmp_path):
    process = Process()
    path = write(tmp_path, process, start(process, 0, 1, 4, end=None))
    path.write_bytes(path.read_bytes()[:-5])
    found = ledger.ledger(tmp_path)
    assert found.buckets["productive"] == 3
    assert found.unexplained_s == 0


def no_folder(tmp_path):
    return tmp_path / "none"


def nothing(tmp_path):
    return tmp_path


def not_ended(tmp_path):
    driver_events(tmp_path, ended=False)
    return tmp_path


def other_run(tmp_path):
    for run, rank in (("a", 0), ("b", 1)):
        process = Process(run=run, rank=rank)
        write(tmp_path, process, start(process, 0, 1, 4))
    return tmp_path


def only_headers(tmp_path):
    write(tmp_path, Process(), [])
    return tmp_path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (no_folder, "none is not a folder; give the work dir of a run"),
        (nothing, "has no spans; name the work dir of a run"),
        (
            not_ended,
            "has not ended, and it has no spans; read it again after its end",
        ),
        (other_run, "has spans of 2 runs: ['a', 'b']"),
        (only_headers, "has no span of a host; the run ended before its first step"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, make, says):
    assert ledger.main(["--work-dir", str(make(tmp_path))]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_the_command_prints_one_object_and_writes_it(tmp_path, capsys):
    two_starts(tmp_path)
    words = ["--work-dir", str(tmp_path), "--json", "--out", str(tmp_path / "out")]
    assert ledger.main(words) == 0
    out, _ = capsys.readouterr()
    found = json.loads(out)
    assert {"wall_s", "buckets", "effective"} <= set(found)
    assert (found["starts"], found["lost_steps"]) == (2, 2)
    assert [*found["buckets"]] == [*ledger.BUCKETS]
    assert (tmp_path / "out").read_text() == out
    assert ledger.main(words[:2]) == 0
    assert "46.5 s of wall time by the spans, 17.2% effective" in capsys.readouterr()[0]


def test_a_file_that_cannot_be_written_is_said(tmp_path, capsys):
    two_starts(tmp_path)
    words = ["--work-dir", str(tmp_path), "--out", str(tmp_path / "no" / "out")]
    assert ledger.main(words) == 2
    assert "give another path" in capsys.readouterr()[1]


def test_names_from_files_cannot_act_on_a_terminal(tmp_path, capsys):
    process = Process()
    lines = [
        Line(n=0, spans=(span(process, "im\x1b[2Jport", "restart", "host", 0, 1),)),
        Line(n=0, end=0),
    ]
    write(tmp_path, process, lines)
    assert ledger.main(["--work-dir", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr()[0]
