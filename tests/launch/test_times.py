"""The driver's report on the time of an ended generation."""

import pytest

from mjax.launch.events import Event, teller
from mjax.launch.messages import RankState
from mjax.launch.times import Times
from mjax.processes.progress import Phase


def state(rank, seconds, code: int | None = None):
    spent_s = [seconds if phase is Phase.STEP else 0.0 for phase in Phase]
    return RankState(rank=rank, generation=1, pid=1, code=code, spent_s=spent_s)


@pytest.fixture
def told():
    return []


@pytest.fixture
def times(told: list[Event]):
    found = Times(teller(told.append))
    found.begin(2)
    return found


def test_when_a_rank_was_to_be_started_follows_from_its_first_message(times, told):
    times.look({0: state(0, 0.5)}, 20.75)
    times.look({1: state(1, 0.5)}, 20.9)
    times.look({0: state(0, 1.5)}, 22.25)  # later: this message took longer
    last = {0: state(0, 3.0, code=0), 1: state(1, 3.0, code=0)}
    times.ended(last, lambda rank: 9.0, 24.0)
    (event,) = told
    assert (event.kind, event.rank) == ("times", 0)
    assert event.text == "rank 0 ran for 3.0 s: step 3.0"
    assert event.data["asked_s"] == pytest.approx(20.25)
    assert event.data["silent_s"] == 0.0


@pytest.mark.parametrize(
    ("start_step", "name"), [(0, "initialise"), (8, "restore"), (-1, "restore")]
)
def test_a_rank_that_begins_at_step_0_has_restored_nothing(
    times, told, start_step, name
):
    spent_s = [8.25 if phase is Phase.RESTORE else 0.0 for phase in Phase]
    one = RankState(
        rank=0,
        generation=2,
        pid=1,
        code=-9,
        spent_s=spent_s,
        start_step=start_step,
        first_step_s=9.0,
    )
    times.begin(1)
    times.look({0: one}, 20.0)
    times.ended({0: one}, lambda rank: 0.0, 24.0)
    under_way, ended = told
    assert f", {name} 8.25, step 0.75" in under_way.text
    assert ended.text.endswith(f": {name} 8.2")
    assert under_way.data["spent_s"]["restore"] == 8.25


def test_a_rank_that_vanished_counts_as_it_was_last_seen(times, told):
    """The agents were killed, and their successors do not know the ranks."""
    times.look({1: state(1, 4.0)}, 24.0)
    times.look({0: state(0, 4.0)}, 24.5)
    times.look({1: state(1, 5.0)}, 25.0)
    times.look({}, 27.0)
    times.ended({}, lambda rank: 0.0, 30.0)
    (event,) = told
    assert (event.rank, event.data["spent_s"]["step"]) == (0, 4.0)
    assert event.data["silent_s"] == pytest.approx(30.0 - 24.5)


def test_a_rank_whose_end_was_seen_counts_before_one_that_vanished(times, told):
    times.look({0: state(0, 4.0)}, 24.0)
    times.look({1: state(1, 4.0)}, 24.0)
    times.ended({1: state(1, 4.5, code=-9)}, lambda rank: 3.0, 30.0)
    assert (told[0].rank, told[0].data["silent_s"]) == (1, 0.0)


def test_nothing_is_told_of_ranks_that_were_never_seen(times, told):
    times.look({0: state(0, 4.0)}, 24.0)
    times.begin(2)
    times.ended({}, lambda rank: 0.0, 30.0)
    assert told == []
