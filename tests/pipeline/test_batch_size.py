"""What a schedule costs as the batch grows: idle time, and entries of its buffers."""

import pytest

from mjax.pipeline.schedule import build


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(4, 1), (4, 2), (8, 6)])
def test_a_batch_four_times_as_large_has_a_quarter_of_the_bubble(
    num_stages: int, num_chunks: int
):
    """MegaScale, section 3.1, says an eighth; see docs/pipeline.md."""

    def idle(m: int) -> float:
        """Return idle time in the time that one microbatch takes on one stage."""
        schedule = build(
            "interleaved-1f1b",
            num_stages=num_stages,
            num_chunks=num_chunks,
            num_microbatches=m,
        )
        return schedule.bubble * m

    m = 2 * num_stages
    assert idle(4 * m) / (4 * idle(m)) == pytest.approx(0.25)
    four_steps = 4 / num_chunks * (num_stages - 1) / m
    one_step = 1 / num_chunks * (num_stages - 1) / (4 * m)
    assert 1 - one_step / four_steps == pytest.approx(0.9375)  # as it is printed


@pytest.mark.parametrize(("num_stages", "entries"), [(1, 8), (2, 9), (4, 9)])
def test_gpipe_has_one_more_entry_for_idle_slots_where_there_are_any(
    num_stages: int, entries: int
):
    schedule = build("gpipe", num_stages=num_stages, num_chunks=1, num_microbatches=8)
    assert schedule.num_stash_slots == entries
