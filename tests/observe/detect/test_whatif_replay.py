"""A replay of measured times equals the run; removing a cause removes nothing else."""

import dataclasses

import numpy as np
import pytest

from mjax.observe.detect.whatif import analyse
from tests.observe.detector_inputs import part_of_slowdown, trace_of
from tests.observe.synthetic_pipelines import CAUSES, make
from tests.observe.synthetic_severity import TUNING_SEEDS

NAME_OF = {
    "slow_worker": "slow host",
    "slow_last_stage": "last stage",
    "sequence_lengths": "uneven sequence lengths",
    "garbage": "garbage collection",
    "slow_link": "slow link",
}
SEED = TUNING_SEEDS[6000]


@pytest.mark.parametrize("cause", CAUSES)
def test_the_replay_of_what_was_measured_is_the_run(cause):
    found = analyse(trace_of(make(cause, SEED)))
    # The clocks of workers are wrong by 0.1 ms.
    np.testing.assert_allclose(found.replayed_s, found.step_s, rtol=0.01)


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "clean"])
def test_the_cause_is_ranked_first_and_its_cost_is_known(cause):
    for seed in TUNING_SEEDS[6000:6003]:
        run = make(cause, seed)
        first = analyse(trace_of(run)).first
        assert first is not None
        assert first.name == NAME_OF[cause]
        if first.workers:
            assert first.workers == run.truth.workers
        # Healthy pauses and lengths stay in the truth, so single runs may be worse.
        assert abs(part_of_slowdown(first.step_s, run)) < 0.25


def test_the_uneven_part_of_a_slow_worker_is_its_own():
    run = make("slow_worker", SEED)
    found = analyse(trace_of(run))
    (worker,) = run.truth.workers
    assert int(np.argmax(found.saved_by_worker)) == worker
    stage = worker % run.graph.shape.stages
    assert max(found.saved_by_stage, key=found.saved_by_stage.__getitem__) == stage


def test_an_even_run_has_no_stragglers():
    run = make("clean", SEED)
    trace = trace_of(run)
    found = analyse(trace)
    assert found.saved < 0.2
    slow = analyse(trace_of(make("slow_worker", SEED)))
    assert slow.saved > found.saved


def test_another_unit_of_time_changes_no_part():
    trace = trace_of(make("slow_link", SEED))
    found = analyse(trace)
    late = dataclasses.replace(
        trace, start_s=trace.start_s + 7.0, end_s=trace.end_s + 7.0
    )
    assert analyse(late).first.name == found.first.name  # pyright: ignore[reportOptionalMemberAccess]


def test_operations_that_wait_for_each_other_are_refused():
    trace = trace_of(make("clean", SEED))
    circle = np.concatenate([trace.edges, trace.edges[:1, ::-1]])
    with pytest.raises(ValueError, match="operations wait for each other"):
        analyse(dataclasses.replace(trace, edges=circle))


def test_a_step_without_an_end_is_refused():
    trace = trace_of(make("clean", SEED))
    phase = np.where(trace.phase == "optimizer", "sync", trace.phase)
    with pytest.raises(ValueError, match="must have an operation of the phase opt"):
        analyse(dataclasses.replace(trace, phase=phase))
