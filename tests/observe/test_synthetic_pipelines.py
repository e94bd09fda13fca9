"""The simulator satisfies the schedules' formulas, and a cause slows its run."""

import functools

import numpy as np
import pytest

from tests.observe import synthetic_severity as severity
from tests.observe.pipeline_graph import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    SEND,
    SYNC,
    Shape,
    build,
    orders,
    simulate,
)
from tests.observe.synthetic_pipelines import (
    CAUSES,
    CLOCK_ERROR_S,
    Cause,
    PipelineRun,
    make,
)

SEEDS = severity.TUNING_SEEDS[:6]


@functools.cache
def made(cause: Cause) -> tuple[PipelineRun, ...]:
    return tuple(make(cause, seed) for seed in SEEDS)


def shape_of(stages: int, chunks: int, num_micro: int, replicas: int = 1) -> Shape:
    return Shape(
        stages=stages,
        replicas=replicas,
        chunks=chunks,
        num_micro=num_micro,
        num_steps=1,
    )


@pytest.mark.parametrize(("stages", "num_micro"), [(2, 4), (4, 8), (8, 16)])
def test_one_chunk_takes_the_time_of_1f1b(stages, num_micro):
    """arXiv 2104.04473: (m + p - 1) (f + b) without communication."""
    graph = build(shape_of(stages, 1, num_micro))
    needed_s = np.where(graph.name == FORWARD, 1.0, 0.0)
    needed_s[graph.name == BACKWARD] = 2.0
    assert simulate(graph, needed_s)[1].max() == 3.0 * (num_micro + stages - 1)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_chunks_divide_the_bubble(stages, chunks):
    """The same paper: the bubble is 1 / chunks of (p - 1) (f + b) of a stage."""
    num_micro = 2 * stages
    graph = build(shape_of(stages, chunks, num_micro))
    needed_s = np.where(graph.name == FORWARD, 1.0, 0.0)
    needed_s[graph.name == BACKWARD] = 2.0
    took = simulate(graph, needed_s)[1].max()
    assert took == 3.0 * (num_micro * chunks + stages - 1)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("chunks", [1, 2])
def test_each_worker_computes_everything_once(stage, chunks):
    shape = shape_of(4, chunks, 8)
    order = list(orders(shape, stage))
    assert len(order) == len(set(order)) == 2 * 8 * chunks
    for backward, micro, virtual in order:
        if backward:
            assert order.index((False, micro, virtual)) < order.index(
                (True, micro, virtual)
            )


def test_microbatches_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of stages=4, got 6"):
        build(shape_of(4, 1, 6))


@pytest.mark.parametrize("cause", CAUSES)
def test_the_same_cause_and_seed_give_the_same_run(cause):
    first, again = make(cause, 3), make(cause, 3)
    np.testing.assert_array_equal(first.start_s, again.start_s)
    np.testing.assert_array_equal(first.end_s, again.end_s)
    np.testing.assert_array_equal(first.truth.step_s, again.truth.step_s)


def test_another_seed_or_cause_gives_another_run():
    first = {float(run.end_s[5]) for cause in CAUSES for run in made(cause)}
    assert len(first) == len(CAUSES) * len(SEEDS)


def test_an_unknown_cause_or_seed_is_refused():
    with pytest.raises(ValueError, match=r"one of clean, slow_worker, .* got 'fire'"):
        make("fire", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        make("clean", -1)


@pytest.mark.parametrize("cause", CAUSES)
def test_nothing_runs_before_what_it_waits_for(cause):
    for run in made(cause):
        graph = run.graph
        assert (run.end_s >= run.start_s).all()
        waits = (graph.name == SYNC) | (graph.name == OPTIMIZER)
        first, then = graph.edges.T
        slack_s = 2 * CLOCK_ERROR_S + 1e-9
        inside = ~waits[then]
        assert (run.start_s[then] >= run.end_s[first] - slack_s)[inside].all()
        assert (run.end_s[then] >= run.end_s[first] - slack_s).all()
        one_clock = graph.before >= 0
        gaps_s = run.start_s[one_clock] - run.end_s[graph.before[one_clock]]
        assert gaps_s.min() > -1e-9


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "clean"])
def test_a_cause_lengthens_the_steps(cause):
    for run in made(cause):
        truth = run.truth
        assert truth.slowdown > severity.WEAKEST_SLOWDOWN
        assert truth.workers
        ends_s = [
            run.end_s[(run.graph.step == step) & (run.graph.name == OPTIMIZER)].max()
            for step in range(run.graph.shape.num_steps)
        ]
        np.testing.assert_allclose(
            np.diff(ends_s, prepend=0.0), truth.step_s, atol=2 * CLOCK_ERROR_S
        )


def test_a_clean_run_is_its_own_ideal():
    for run in made("clean"):
        np.testing.assert_array_equal(run.truth.step_s, run.truth.ideal_step_s)
        assert run.truth.slowdown == 0
        assert not run.truth.workers


def test_the_slow_worker_computes_longer_and_waits_less():
    shortest = 0
    for run in made("slow_worker"):
        graph, took_s = run.graph, run.end_s - run.start_s
        (slow,) = run.truth.workers
        stages = graph.shape.stages
        peers = [
            worker
            for worker in range(slow % stages, stages * graph.shape.replicas, stages)
            if worker != slow
        ]
        forward, sync = graph.name == FORWARD, graph.name == SYNC
        ours = np.median(took_s[forward & (graph.worker == slow)])
        theirs = np.median(took_s[forward & np.isin(graph.worker, peers)])
        assert ours > 1.05 * theirs
        ours = np.median(took_s[sync & (graph.worker == slow)])
        theirs = np.median(took_s[sync & np.isin(graph.worker, peers)])
        shortest += ours < theirs
    assert shortest == len(SEEDS)


def test_the_last_stage_and_slow_links_are_where_the_truth_says():
    for run in made("slow_last_stage"):
        graph, took_s = run.graph, run.end_s - run.start_s
        last = graph.stage == graph.shape.stages * graph.shape.chunks - 1
        forward = graph.name == FORWARD
        ratio = np.median(took_s[forward & last]) / np.median(took_s[forward & ~last])
        assert 1.3 < ratio < 2.5
    links = set()
    for run in made("slow_link"):
        graph, took_s = run.graph, run.end_s - run.start_s
        links.add(run.truth.link)
        if run.truth.link == "pipeline":
            first, then = run.truth.workers
            assert then == first + 1
            sends = graph.name == SEND
            slow = sends & (graph.worker == first) & ~graph.backward
            others = sends & ~np.isin(graph.worker, (first, then))
            assert np.median(took_s[slow]) > 3 * np.median(took_s[others])
    assert links == {"pipeline", "sync"}


def test_uneven_lengths_keep_the_mean_of_the_compute():
    for run in made("sequence_lengths"):
        graph, took_s = run.graph, run.end_s - run.start_s
        compute = graph.name == BACKWARD
        by_micro = [
            took_s[compute & (graph.micro == micro) & (graph.step == 1)].mean()
            for micro in range(graph.shape.num_micro)
        ]
        assert np.std(np.log(by_micro)) > 0.02
