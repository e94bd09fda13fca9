"""The page of the demo run refuses a run that is not one, and reads its files right."""

import json
from pathlib import Path

import pytest

from mjax.observe.spans import Header, Line, Span, SpanFile
from scripts import demo_page


def write_summary(run, **changed):
    summary = {"exit": 0, "eval_loss": 1.25} | changed
    (run / "summary.json").write_text(json.dumps(summary))


def test_only_a_finished_and_evaluated_run_is_read(tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        demo_page.read_summary(tmp_path)
    for changed in ({"exit": 42}, {"eval_loss": None}):
        write_summary(tmp_path, **changed)
        with pytest.raises(ValueError, match="no finished run"):
            demo_page.read_summary(tmp_path)
    write_summary(tmp_path)
    assert demo_page.read_summary(tmp_path)["eval_loss"] == 1.25


def span_file(*spans):
    lines = tuple(
        Line(n=n, spans=(Span(name, "restart", "host", begin, end),))
        for n, (name, begin, end) in enumerate(spans)
    )
    header = Header(
        run="a",
        host="vm",
        rank=0,
        generation=1,
        pid=1,
        wall_ns=0,
        monotonic_ns=0,
        devices=(0,),
        mesh={"pp": 1},
    )
    return SpanFile(path=Path("a"), header=header, lines=lines, problems=())


def test_the_parts_of_a_start_are_summed_and_a_second_start_is_refused():
    ms = 1_000_000
    file = span_file(
        ("import", 0, 500 * ms),
        ("compile", 600 * ms, 800 * ms),
        ("compile", 900 * ms, 1000 * ms),
        ("restore", 1000 * ms, 2000 * ms),
    )
    assert demo_page.starting_s([file]) == pytest.approx(
        {"import": 0.5, "build": 0.0, "compile": 0.3}
    )
    with pytest.raises(ValueError, match="one process and one start: 2"):
        demo_page.starting_s([file, file])


def test_a_time_is_rounded_before_it_is_split_into_minutes():
    assert demo_page.minutes(195.4) == "3 min 15 s"
    assert demo_page.minutes(119.6) == "2 min 0 s"
