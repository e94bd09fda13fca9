"""The picture of a schedule: every box, in its place, and nothing from elsewhere."""

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from mjax.plan.html import COLOURS, document, joined, passes, svg
from mjax.plan.result import WHOLE_STEP, Branch, Span
from tests.plan.plans import PICTURE, make_plan


def boxes(text: str) -> list[tuple[str, float, float, float]]:
    """Return class, left, right and top of each box."""
    found = []
    for rect in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}rect"):
        x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
        kind, y = rect.attrib["class"], float(rect.attrib["y"])
        found.append((kind, x, x + width, y))
    return found


def test_a_page_needs_nothing_from_elsewhere():
    text = document(make_plan())
    assert "<script" not in text
    links = set(re.findall(r"https?://[^'\"]*", text))
    assert links <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in text


def test_names_of_the_program_are_escaped():
    text = document(make_plan())
    assert "body<1>" not in text
    assert "<h2 title='body&lt;1&gt;'>One tick of the loop over ticks: " in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "One tick of the loop over ticks: forward, head and loss; 40 per step"),
        ({"passes": ()}, "One tick of the loop over ticks; 40 per step"),
        ({"where": WHOLE_STEP, "runs": 1}, "The whole step"),
    ],
)
def test_a_title_says_what_a_picture_is(changes, words):
    picture = dataclasses.replace(PICTURE, **changes)
    assert f">{words}</h2>" in document(make_plan(pictures=(picture,)))


def test_a_branch_that_runs_in_some_ticks_only_is_named_with_the_mean():
    rarely = (
        Branch(part="head and loss", runs=30.0, seconds=2e-3),
        Branch(part="embedding", runs=20.0, seconds=1e-4),
    )
    picture = dataclasses.replace(PICTURE, mean_s=7.45e-3, branches=rarely)
    text = document(make_plan(pictures=(picture,)))
    assert (
        "<p>Drawn with every branch, 8 ms. The mean of the 40 passes is 7.45 ms: head "
        "and loss (2 ms) runs in 30, short branches run in some.</p>"
    ) in text
    assert "Drawn with every branch" not in document(make_plan())


def labels(text: str) -> list[tuple[str, float]]:
    """Return words and place of each label on a box."""
    found = ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
    return [
        (text.text or "", float(text.attrib["x"]))
        for text in found
        if "class" in text.attrib
    ]


def test_wide_boxes_have_labels_inside_and_narrow_ones_none():
    narrow = Span(
        stream="compute", name="x", kind="product", start_s=8e-3, stop_s=8.1e-3
    )
    picture = dataclasses.replace(PICTURE, spans=(*PICTURE.spans, narrow))
    drawn = svg(picture)
    found = labels(drawn)
    assert [words for words, _ in found] == ["matmul", "wait tp", "memory", "tp"]
    wide = [box for box in boxes(drawn) if box[2] - box[1] > 50]
    for (_, left, right, _), (words, x) in zip(wide, found, strict=True):
        assert (left + right) / 2 == pytest.approx(x, abs=0.5)
        assert right - left > 7 * len(words)


def test_compute_and_links_are_streams_of_one_time():
    sent = Span(stream="network", name="rs", kind="dp", start_s=0.0, stop_s=6e-3)
    picture = dataclasses.replace(PICTURE, spans=(*PICTURE.spans, sent))
    gemm, wait, memory, wire, network = boxes(svg(picture))
    assert [box[0] for box in (gemm, wait, memory)] == ["product", "wait", "memory"]
    assert gemm[3] == wait[3] == memory[3] < wire[3]
    assert gemm[1] == wire[1]
    assert (wire[0], network[0]) == ("tp", "dp")
    assert wire[3] < network[3]
    assert wait[2] == wire[2] == network[2] == pytest.approx(memory[1] - 0.8)
    assert (gemm[2] - gemm[1]) + 0.8 == pytest.approx(2 * (memory[2] - memory[1] + 0.8))


def span(
    start_s: float, stop_s: float, kind: str = "memory", passes: tuple[str, ...] = ()
) -> Span:
    return Span(
        stream="compute",
        name="x",
        kind=kind,
        start_s=start_s,
        stop_s=stop_s,
        passes=passes,
    )


def test_passes_are_drawn_above_their_boxes_and_waits_belong_to_the_one_before():
    wait = Span(stream="wait", name="ag", kind="tp", start_s=3.0, stop_s=4.0)
    body = ("head and loss", "backward")
    spans = (
        *(span(0.0, 1.0), span(1.0, 2.0, passes=("forward",))),
        *(span(2.0, 3.0, passes=("forward",)), wait),
        *(span(4.0, 9.0, "loop", passes=body), span(9.0, 10.0)),
    )
    found = [(s.passes, s.start_s, s.stop_s) for s in passes(spans, 0.1)]
    assert found == [(("forward",), 0.0, 4.0), (body, 4.0, 10.0)]
    brief = [span(10.0, 10.05, passes=("optimizer",)), span(10.05, 12.0, passes=body)]
    first = span(0.95, 1.0, passes=("loss",))
    found = passes([first, *spans[1:], *brief], 0.1)
    assert [(s.start_s, s.stop_s) for s in found] == [(0.95, 4.0), (4.0, 12.0)]
    assert len(passes([first, *spans[1:], *brief], 0.01)) == 5
    assert passes([span(0.0, 1.0)], 0.1) == []
    drawn = svg(dataclasses.replace(PICTURE, spans=spans))
    words = [words for words, _ in labels(drawn)]
    assert words[:2] == ["forward", "head and loss, backward"]
    assert "loop: head and loss, backward" in words
    above = [box for box in boxes(drawn) if box[0] == "pass"]
    assert [right - left for _, left, right, _ in above] == [480.0, 720.0]
    assert max(y for *_, y in above) < min(
        y for k, *_, y in boxes(drawn) if k != "pass"
    )


def test_boxes_too_narrow_to_see_join_and_cover_the_same_time():
    narrow = [span(0.1 * i, 0.1 * (i + 1)) for i in range(25)]
    wide = span(2.5, 4.5, "product")
    last = span(4.5, 4.6)
    found = list(joined([*narrow, wide, last], 1.0))
    assert [s.name for s in found] == ["x and 9 more"] * 2 + ["x and 4 more", "x", "x"]
    assert found[3] == wide
    edges = [(s.start_s, s.stop_s) for s in found]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    assert (edges[0][0], edges[-1][1]) == (0.0, 4.6)


def test_narrow_boxes_far_from_each_other_stay_apart():
    found = list(joined([span(0.0, 0.1), span(50.0, 50.1)], 1.0))
    assert len(found) == 2


def test_every_kind_of_box_is_explained():
    text = document(make_plan())
    assert all(meaning in text for _, meaning in COLOURS.values())


def test_bodies_of_loops_are_announced_only_if_there_are_more_pictures():
    words = "loop: the bodies with most of the time are drawn below"
    assert words not in document(make_plan(pictures=(PICTURE,)))
    assert words in document(make_plan(pictures=(PICTURE, PICTURE)))
    assert "<li>" not in document(make_plan(pictures=()))


def test_without_a_schedule_the_page_says_so():
    text = document(make_plan(pictures=(), communication=None, compile_s=None))
    assert "No schedule to draw" in text
