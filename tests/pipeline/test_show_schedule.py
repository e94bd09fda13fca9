"""The pictures of a schedule, and the command that draws them."""

import collections
import html.parser
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from mjax.pipeline import show
from mjax.pipeline.__main__ import main
from mjax.pipeline.schedule import IDLE, Schedule, build, build_forward

SVG = "{http://www.w3.org/2000/svg}"


def example(num_stages=4, num_chunks=2, num_microbatches=8) -> Schedule:
    return build(
        "interleaved-1f1b",
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rects(schedule: Schedule) -> list[dict[str, str]]:
    """Return the attributes of every rect of the picture, and its title."""
    image = ElementTree.fromstring(show.svg(schedule))
    assert image.tag == f"{SVG}svg"
    return [
        {**rect.attrib, "title": rect.findtext(f"{SVG}title") or ""}
        for rect in image.iter(f"{SVG}rect")
    ]


# ----------------------------------------------------------------------------- text


def test_the_text_of_a_small_schedule_is_this():
    schedule = example(2, 2, 2)
    assert show.text(schedule) == "\n".join(
        [
            "tick       0              5",
            "stage 0 F 0a 1a 0b 1b  .",
            "        B           . 0B 1B 0A 1A",
            "stage 1 F  . 0a 1a 0b 1b",
            "        B          0B 1B 0A 1A  .",
        ]
    )


def test_eight_microbatches_on_four_stages_fit_beside_each_other():
    lines = show.text(example()).splitlines()
    assert len(lines) == 1 + 2 * 4
    assert max(map(len, lines)) <= 100


def test_a_long_schedule_is_continued_below_and_loses_nothing():
    schedule = example(8, 2, 32)
    text = show.text(schedule, num_columns=72)
    assert max(map(len, text.splitlines())) <= 72
    words = collections.Counter(re.findall(r"\b\d+[abAB]", text))
    labels = [f"{i}{letter}" for i in range(32) for letter in "abAB"]
    assert words == dict.fromkeys(labels, schedule.num_stages)


def test_a_stage_with_one_chunk_has_plain_numbers():
    lines = show.text(example(2, 1, 3)).splitlines()
    assert lines[1] == "stage 0 F 0 1 2 ."


# ------------------------------------------------------------------------------ svg


@pytest.mark.parametrize("sizes", [(4, 2, 8), (3, 1, 5), (2, 4, 4)])
def test_the_image_has_one_rect_for_each_slot(sizes):
    schedule = example(*sizes)
    classes = collections.Counter(rect["class"] for rect in rects(schedule))
    num_slots = np.prod(sizes)
    assert classes["forward"] == classes["backward"] == num_slots
    # The bubble, as idle slots: all stages have the same number of either kind.
    assert classes["idle"] == 2 * sizes[0] * schedule.bubble_ticks


def test_each_rect_lies_at_its_tick_and_stage_and_none_over_another():
    schedule = example()
    found = rects(schedule)
    places = {(int(rect["x"]), int(rect["y"])) for rect in found}
    assert len(places) == len(found)
    [width] = {int(rect["width"]) for rect in found}
    [height] = {int(rect["height"]) for rect in found}
    left = min(x for x, _ in places)
    tops = sorted({y for _, y in places})
    assert len(tops) == 2 * schedule.num_stages
    assert min(np.diff(tops)) >= height
    for rect in found:
        tick, rest = divmod(int(rect["x"]) - left, width)
        stage, is_backward = divmod(tops.index(int(rect["y"])), 2)
        kind = ("forward", "backward")[is_backward]
        chunk = getattr(schedule, f"{kind}_chunk")[tick, stage]
        microbatch = getattr(schedule, f"{kind}_microbatch")[tick, stage]
        assert rest == 0
        assert rect["title"].startswith(f"stage {stage}, tick {tick}, {kind}: ")
        if chunk == IDLE:
            assert rect["class"] == "idle"
            assert rect["title"].endswith(": idle")
        else:
            assert rect["class"] == kind
            assert rect["fill"] == show.colours(int(chunk))[is_backward]
            whole = chunk * schedule.num_stages + stage
            assert rect["title"].endswith(
                f": virtual stage {chunk} (in the model: {whole}), "
                f"microbatch {microbatch}"
            )


def test_the_picture_is_as_large_as_it_says():
    image = ElementTree.fromstring(show.svg(example()))
    width, height = int(image.attrib["width"]), int(image.attrib["height"])
    assert image.attrib["viewBox"] == f"0 0 {width} {height}"
    for rect in image.iter(f"{SVG}rect"):
        assert int(rect.attrib["x"]) + int(rect.attrib["width"]) <= width
        assert int(rect.attrib["y"]) + int(rect.attrib["height"]) <= height


def test_an_evaluation_is_drawn_without_backward_slots():
    schedule = build_forward(num_stages=2, num_chunks=2, num_microbatches=3)
    classes = collections.Counter(rect["class"] for rect in rects(schedule))
    assert classes["forward"] == 2 * 2 * 3
    assert classes["backward"] == 0


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2 of a colour #rrggbb."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
    ]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_labels_can_be_read_on_every_colour():
    """By WCAG 2.2: text has a contrast of 4.5 at least."""
    dark, white = luminance("#111111"), luminance("#ffffff")
    for chunk in range(32):
        forward, backward = map(luminance, show.colours(chunk))
        assert (forward + 0.05) / (dark + 0.05) >= 4.5
        assert (white + 0.05) / (backward + 0.05) >= 4.5
    assert len({show.colours(chunk) for chunk in range(32)}) == 32


# ------------------------------------------------------------------------- the page


class Reader(html.parser.HTMLParser):
    """Collect the tags and the text of a page, and hold that tags are closed."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: collections.Counter[str] = collections.Counter()
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [name for name, _ in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_has_the_counts():
    schedule = example()
    reader = Reader()
    reader.feed(show.page(schedule))
    assert reader.open == []
    assert not {"script", "link", "img", "iframe"} & reader.tags.keys()
    assert not {"src", "href", "onload", "onclick"} & set(reader.attributes)
    assert "url(" not in show.page(schedule)
    for line in show.count_lines(schedule):
        assert re.split(r" {2,}", line)[1] in reader.text


def test_the_lines_of_counts_have_the_numbers_of_the_schedule():
    assert dict(re.split(r" {2,}", line) for line in show.count_lines(example())) == {
        "ticks": "26: 7 forward, 12 forward and backward, 7 backward",
        "bubble, counted": "0.1875 of the ideal time",
        "bubble, (P - 1) / (v M)": "0.1875",
        "idle half-ticks": "3 of each kind, per stage",
        "in flight": "11 9 7 5 virtual-stage inputs, by stage",
        "sent forward": "16 16 16 8 activations, by stage",
        "sent backward": "8 16 16 16 gradients, by stage",
        "buffer entries": "11 for virtual-stage inputs, 1 for gradients",
    }


# ---------------------------------------------------------------------- the command


def test_json_is_one_object_with_the_counts(capsys):
    argv = ["--pp", 4, "--chunks", 2, "--microbatches", 8, "--json"]
    code, out, err = run(capsys, "show", *argv)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found.pop("bubble") == pytest.approx(3 / 16, abs=1e-14)
    assert found == {
        "schedule": "interleaved-1f1b",
        "stages": 4,
        "chunks": 2,
        "microbatches": 8,
        "ticks": 26,
        "bubble_formula": 3 / 16,
        "bubble_ticks": 3,
        "in_flight": [11, 9, 7, 5],
        "sends": [24, 32, 32, 24],
        "stash_slots": 11,
        "gradient_slots": 1,
        "phases": [
            {"start": 0, "stop": 7, "forward": True, "backward": False},
            {"start": 7, "stop": 19, "forward": True, "backward": True},
            {"start": 19, "stop": 26, "forward": False, "backward": True},
        ],
    }


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--chunks", 2], "interleaved-1f1b"),
        ([], "1f1b"),
        (["--schedule", "gpipe"], "gpipe"),
        (["--schedule", "interleaved-1f1b"], "interleaved-1f1b"),
    ],
)
def test_the_schedule_follows_the_chunks_unless_it_is_named(argv, name, capsys):
    numbers = ["--pp", 2, "--microbatches", 4, "--json"]
    code, out, _ = run(capsys, "show", *numbers, *argv)
    assert code == 0
    assert json.loads(out)["schedule"] == name


def test_without_json_the_picture_and_the_counts_are_printed(capsys):
    code, out, _ = run(capsys, "show", "--pp", 2, "--chunks", 2, "--microbatches", 2)
    schedule = example(2, 2, 2)
    assert code == 0
    counts = "\n".join(show.count_lines(schedule))
    assert out == f"{show.text(schedule)}\n\n{counts}\n"


def test_the_ending_of_the_file_says_what_is_written(tmp_path: Path, capsys):
    numbers = ["--pp", 2, "--chunks", 2, "--microbatches", 2]
    for ending in ("html", "svg", "txt"):
        path = tmp_path / f"schedule.{ending}"
        assert run(capsys, "show", *numbers, "--json", "--out", path)[0] == 0
    schedule = example(2, 2, 2)
    assert (tmp_path / "schedule.html").read_text() == show.page(schedule)
    assert (tmp_path / "schedule.svg").read_text() == show.svg(schedule)
    _, printed, _ = run(capsys, "show", *numbers)
    assert (tmp_path / "schedule.txt").read_text() == printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["show", "--pp", 4, "--chunks", 2, "--microbatches", 6],
            "with --chunks 2, --microbatches must be a multiple of --pp 4, got 6; "
            "nearest that fit: --microbatches 8, or --chunks 1, or --pp 3",
        ),
        (
            ["show", "--pp", 0, "--microbatches", 6],
            "--pp must be at least 1, got 0; nearest that fit: --pp 1",
        ),
        (
            [
                "show",
                "--pp",
                "2",
                "--chunks",
                "2",
                "--microbatches",
                "2",
                "--schedule",
                "gpipe",
            ],
            "with --schedule gpipe, --chunks must be 1, got 2; nearest that fit: "
            "--chunks 1, or --schedule interleaved-1f1b",
        ),
        (
            ["show", "--pp", "2", "--microbatches", "2", "--out", "a.png"],
            "--out must end in one of .html, .svg, .txt, got a.png; nearest that fit: "
            "--out a.html",
        ),
        (
            ["show", "--pp", "2", "--microbatches", "2", "--out", "missing/a.svg"],
            "there is no folder missing; make it; nearest that fit: --out "
            "schedule.html",
        ),
        (
            ["show", "--pp", "2", "--microbatchs", "2"],
            "unknown flag --microbatchs; the nearest is --microbatches",
        ),
        (
            ["draw"],
            "the command must be show, got draw; write python -m mjax.pipeline show",
        ),
        ([], "the command must be show, got nothing"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    argv, message, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv", [["--pp", "four"], ["--pp", "4", "--schedule", "zigzag"]]
)
def test_a_value_that_cannot_be_read_ends_with_2_and_is_named(argv, capsys):
    code, out, err = run(capsys, "show", "--microbatches", "8", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert argv[-1] in err


COUNTS = {
    "--pp": (0, 1, 2, 3, 4, 6),
    "--chunks": (None, None, 0, 1, 2, 3),
    "--microbatches": (0, 1, 2, 4, 5, 6, 7),
    "--schedule": (None, None, "gpipe", "1f1b", "interleaved-1f1b"),
    "--out": (*(None,) * 6, "a/b.png", "x.png", ".", "d.html", "a/b.html", "x"),
}


def test_every_fix_that_the_command_suggests_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.html").mkdir()
    rng, num_fixes = np.random.default_rng(3), 0
    for _ in range(150):
        drawn = {
            name: values[rng.integers(len(values))] for name, values in COUNTS.items()
        }
        given = {name: value for name, value in drawn.items() if value is not None}
        code, _, err = run(capsys, "show", *(w for f in given.items() for w in f))
        _, suggests, advice = err.strip().partition("; nearest that fit: ")
        assert (code, bool(suggests)) in ((0, False), (2, True)), err
        for fix in advice.split(", or ") if suggests else ():
            words = fix.split()
            changed = given | dict(zip(words[::2], words[1::2], strict=True))
            words = [word for pair in changed.items() for word in pair]
            assert run(capsys, "show", *words)[0] == 0, (err, words)
            num_fixes += 1
    assert num_fixes > 100
