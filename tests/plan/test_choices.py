"""Choices of a pipeline's ticks are counted as often as the schedule takes them."""

import pytest

from mjax.pipeline.schedule import build
from mjax.plan.choices import choice, taken_share

STAGES, CHUNKS, MICROBATCHES = 4, 3, 8
SCHEDULE = build(
    "interleaved-1f1b",
    num_stages=STAGES,
    num_chunks=CHUNKS,
    num_microbatches=MICROBATCHES,
)


def times(kind: str) -> float:
    """Add up how often a choice is taken in the loops over ticks of a step."""
    found = 0.0
    for phase in SCHEDULE.phases:
        count = phase.stop - phase.start
        loop = f"f/shard_map/ticks.{phase.start}.1.{count}/while/body/eval_jaxpr"
        found += count * taken_share(f"{loop}/{kind}cond", SCHEDULE)
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("phase.loss/", MICROBATCHES),
        ("phase.backward/", MICROBATCHES),
        # The first is embedded before the first tick.
        ("", MICROBATCHES - 1),
        # Two groups of P microbatches go through the chunks one after the other.
        ("exchange/", 2 * CHUNKS - 1),
        ("phase.backward/exchange/", 2 * CHUNKS - 1),
    ],
)
def test_a_choice_is_taken_as_often_as_the_schedule_says(kind: str, expected: int):
    assert times(kind) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("phase.loss/cond", "head and loss"),
        ("phase.backward/cond", "backward pass of the embedding"),
        ("cond", "embedding"),
        ("exchange/cond", "change of virtual stage"),
        ("phase.backward/exchange/cond", "change of virtual stage"),
        ("skip/cond", None),
        ("while/body/cond", None),
    ],
)
def test_a_choice_has_the_name_of_what_it_computes(op_name: str, part: str | None):
    assert choice(f"f/shard_map/ticks.0.1.4/while/body/{op_name}") == part


def test_a_loop_whose_ticks_all_have_a_loss_takes_it_every_time():
    # The last chunk of the last stage follows P - 1 + (v - 1) P ticks later.
    first = STAGES - 1 + (CHUNKS - 1) * STAGES
    name = f"shard_map/ticks.{first}.1.{STAGES}/while/body/phase.loss/cond"
    assert taken_share(name, SCHEDULE) == 1


def test_without_a_pipeline_every_choice_is_always_taken():
    assert taken_share("shard_map/ticks.0.1.4/while/body/cond", None) == 1
