"""Batches that are left out: which is read instead, and who may go on with whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data import skips
from mjax.data.config import DataConfig
from mjax.data.stream import Stream
from mjax.data.synthetic import SyntheticSamples


@st.composite
def some_skips(draw):
    after = sorted(draw(st.sets(st.integers(0, 30), max_size=4)))
    return tuple(skips.Skip(step, draw(st.integers(1, 9))) for step in after)


@pytest.mark.parametrize("text", ["", "4", "4:", ":4", "4:0", "-4:2", "4:2:1", "٤:2"])
def test_a_bad_text_is_refused_with_its_form(text):
    with pytest.raises(ValueError, match=r"--data.skip must be STEP:N .* got '"):
        DataConfig(skip=(text,))


@pytest.mark.parametrize("texts", [("8:1", "4:1"), ("4:1", "4:2")])
def test_skips_out_of_order_are_refused(texts):
    with pytest.raises(ValueError, match="must name steps in order, each once, got"):
        DataConfig(skip=texts)


def test_the_stream_goes_on_behind_what_is_left_out():
    samples = (SyntheticSamples(100, 4, 0, 0),)
    plain = Stream(samples, (1.0,), 7)
    stream = Stream(samples, (1.0,), 7, skips.read(["2:3", "4:1"]))
    read = [stream.ids(step, 5).tolist() for step in range(6)]
    assert read == [plain.ids(step, 5).tolist() for step in (0, 1, 5, 6, 8, 9)]


@given(some_skips(), st.integers(0, 40), st.integers(1, 20))
def test_a_run_that_goes_back_reads_nothing_twice_and_leaves_nothing_else_out(
    before, to, num_steps
):
    step = to + num_steps
    after = skips.roll_back(before, to, step)
    assert skips.read([str(skip) for skip in after]) == after
    old = [skips.place(n, before) for n in range(step)]
    new = [skips.place(n, after) for n in range(step)]
    assert new[:to] == old[:to]
    assert new[to] == old[-1] + 1
    assert new == sorted({*new})
    assert skips.continues(before, after)
    assert skips.seen(to, before) == skips.seen(to, after)
    assert skips.seen(to + 1, before) != skips.seen(to + 1, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([], [], True),
        ([], ["4:2"], True),
        (["4:2"], [], False),
        (["4:2"], ["4:2", "9:1"], True),
        (["4:2"], ["4:3"], True),
        (["4:2", "9:1"], ["4:2"], True),
        (["4:2", "9:1"], ["3:8"], True),
        (["4:2"], ["9:1"], False),
        (["4:2", "9:1"], ["9:1"], False),
    ],
)
def test_a_run_may_pass_more_skips_and_go_back_but_forget_none(old, new, expected):
    assert skips.continues(skips.read(old), skips.read(new)) == expected
