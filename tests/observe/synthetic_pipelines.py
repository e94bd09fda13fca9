"""Generated spans of pipelined runs with a known cause of slowness.

Input: a cause and a seed. Output: a `PipelineRun`: the spans that a store would return
of some steps, the graph of the step, and the truth: which workers are to blame, and how
long the same steps take without the cause, by the simulator in `pipeline_graph`. The
same cause and seed give the same run. Ranges and seeds are in `synthetic_severity`.

    from tests.observe.synthetic_pipelines import make
    run = make("slow_worker", TUNING_SEEDS[0])

The generator was fixed before any analysis existed, and not by the author of the
analysis.

Causes, after arXiv 2505.05713 (section 5), and what "without it" means:

- clean: none. The steps are what they are.
- slow_worker: one host computes slowly; it computes like the others.
- slow_last_stage: head and loss are too much; the last virtual stage costs no more than
  the mild extra that every run has.
- sequence_lengths: microbatches cost unequal time; all cost the mean.
- garbage: workers stop for collections, each at its own time; nobody stops.
- slow_link: one link is slow, between two stages or in a gradient sync; it
  is like the others. A slow sync slows its group, as a ring does.

All runs have noise, chips that differ, mildly uneven lengths, a mildly heavier last
stage, a few collections and waits for data. These stay in the truth without the cause,
with the same draws.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

from tests.observe import synthetic_severity as severity
from tests.observe.pipeline_graph import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    SEND,
    SYNC,
    Array,
    Graph,
    Shape,
    build,
    simulate,
)

type Cause = Literal[
    "clean",
    "slow_worker",
    "slow_last_stage",
    "sequence_lengths",
    "garbage",
    "slow_link",
]
CAUSES: tuple[Cause, ...] = get_args(Cause.__value__)

# Chosen where no source is named: see `synthetic_severity` for the names.
STAGES = (2, 4, 8)
REPLICAS = (2, 4, 8)
CHUNKS = (1, 2)
NUM_STEPS = (4, 7)
MOST_OPERATIONS = 6_000  # bounds the time to make a run
FORWARD_S = (0.03, 0.20)  # forward time of a virtual stage; Traces: 0.07 to 0.25
GRADIENTS = (0.5, 3.0)  # sync over a forward pass, without waits; Traces: 0.8 to 2
OPTIMIZER_PART = (0.1, 0.6)  # optimizer over a forward pass; Traces: 0.002 to 0.6
WAIT_S = 2e-3  # mean wait for data; chosen
MILD_LAST = (1.0, 1.10)  # factor on the last virtual stage; Traces: AR 1.03 to 1.07
MILD_LENGTHS = (0.0, 0.05)  # log deviation by microbatch, in every run; chosen
MILD_GARBAGE = 0.005  # collections per worker and step in every run; chosen
CLOCK_ERROR_S = 1e-4  # error left after clock merging, per worker; chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The known answer: the cause put into a run, hidden from analyses."""

    cause: Cause
    workers: tuple[int, ...]
    """Workers to blame; for a slow link both ends, or all workers of the slow sync."""
    link: Literal["none", "pipeline", "sync"]
    step_s: Array
    """[steps], times between the ends of successive last optimizers."""
    ideal_step_s: Array
    """[steps], times of the same run without the cause."""
    strength: float
    """Factor on the drawn excess; above 1 where the cause had to be made stronger."""

    @property
    def slowdown(self) -> float:
        """Fraction by which the cause lengthens the run."""
        return float(self.step_s.sum() / self.ideal_step_s.sum() - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """Spans of a run. N spans, in the order of the operations of the graph."""

    graph: Graph
    start_s: Array
    """[N]. A sync or an optimizer starts when its worker arrives there, so the wait
    for others is inside. Other spans start when they can run."""
    end_s: Array
    """[N]."""
    truth: Truth


def make(cause: Cause, seed: int) -> PipelineRun:
    """Make the run of a cause and a seed.

    Raises:
      ValueError: the cause is unknown, or the seed is negative.
    """
    if cause not in CAUSES:
        raise ValueError(f"cause must be one of {', '.join(CAUSES)}, got {cause!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    rng = np.random.default_rng([seed, CAUSES.index(cause)])
    graph = build(_draw_shape(rng))
    healthy_s = _draw_needed(rng, graph)
    excess_s, workers, link = _draw_excess(rng, cause, graph, healthy_s)
    ideal_step_s = _step_s(graph, simulate(graph, healthy_s)[1])
    strength, needed_s = 1.0, healthy_s + excess_s
    begin, end = simulate(graph, needed_s)
    while cause != "clean" and _step_s(graph, end).sum() < (
        1 + severity.WEAKEST_SLOWDOWN
    ) * float(ideal_step_s.sum()):
        strength *= 1.3
        needed_s = np.maximum(healthy_s + strength * excess_s, 0.1 * healthy_s)
        begin, end = simulate(graph, needed_s)
    truth = Truth(
        cause=cause,
        workers=workers,
        link=link,
        step_s=_step_s(graph, end),
        ideal_step_s=ideal_step_s,
        strength=strength,
    )
    arrived = np.where(graph.before >= 0, end[graph.before], 0.0)
    waits = (graph.name == SYNC) | (graph.name == OPTIMIZER)
    workers_count = graph.shape.stages * graph.shape.replicas
    error_s = rng.uniform(-1, 1, workers_count)[graph.worker] * CLOCK_ERROR_S
    return PipelineRun(
        graph=graph,
        start_s=np.where(waits, arrived, begin) + error_s,
        end_s=end + error_s,
        truth=truth,
    )


def _step_s(graph: Graph, end_s: Array) -> Array:
    """Return the time of each step: between the ends of the last optimizers."""
    ends = [
        end_s[(graph.step == step) & (graph.name == OPTIMIZER)].max()
        for step in range(graph.shape.num_steps)
    ]
    return np.diff(ends, prepend=0.0)


def _draw_shape(rng: np.random.Generator) -> Shape:
    """Draw sizes; large ones give up steps, then replicas, to stay bounded."""
    stages, replicas = int(rng.choice(STAGES)), int(rng.choice(REPLICAS))
    chunks = int(rng.choice(CHUNKS))
    num_micro = stages * int(rng.integers(2, 5))
    num_steps = int(rng.integers(*NUM_STEPS))
    while 4 * stages * replicas * chunks * num_micro * num_steps > MOST_OPERATIONS:
        if num_steps > 3:
            num_steps -= 1
        elif replicas > 2:
            replicas //= 2
        else:
            num_micro -= stages
    return Shape(
        stages=stages,
        replicas=replicas,
        chunks=chunks,
        num_micro=num_micro,
        num_steps=num_steps,
    )


def _draw_needed(rng: np.random.Generator, graph: Graph) -> Array:
    """Draw the seconds that each operation of a healthy run needs, [N]."""
    shape, num = graph.shape, len(graph.name)
    workers = shape.stages * shape.replicas
    forward_s = rng.uniform(*FORWARD_S)
    noise = rng.uniform(*severity.OPERATION_NOISE)
    spread = np.clip(
        rng.normal(0, severity.RANK_SPREAD, workers),
        -severity.MOST_RANK_SPREAD,
        severity.MOST_RANK_SPREAD,
    )
    jitter = np.exp(noise * rng.standard_normal(num) + spread[graph.worker])
    last = graph.stage == shape.stages * shape.chunks - 1
    jitter *= np.where(last, rng.uniform(*MILD_LAST), 1.0)
    size = (shape.num_steps, shape.replicas, shape.num_micro)
    lengths = np.exp(rng.normal(0, rng.uniform(*MILD_LENGTHS), size))
    jitter *= lengths[graph.step, graph.worker // shape.stages, graph.micro]
    network = np.exp(rng.normal(0, 0.1, num))
    parts = {
        DATA: rng.exponential(WAIT_S, num) / forward_s,
        FORWARD: jitter,
        BACKWARD: jitter * rng.uniform(*severity.BACKWARD),
        SEND: network * rng.uniform(*severity.PIPELINE_SEND),
        SYNC: np.ones(num) * rng.uniform(*GRADIENTS),
        OPTIMIZER: jitter * rng.uniform(*OPTIMIZER_PART),
    }
    needed_s = forward_s * np.choose(
        graph.name, [parts[name] for name in sorted(parts)]
    )
    # The workers of a stage sync together, so they need the same time.
    sync = np.flatnonzero(graph.name == SYNC)
    group = graph.step[sync] * shape.stages + graph.worker[sync] % shape.stages
    needed_s[sync] *= np.exp(rng.normal(0, 0.05, group.max() + 1))[group]
    return needed_s + _draw_garbage(rng, graph, MILD_GARBAGE)


def _draw_garbage(rng: np.random.Generator, graph: Graph, per_step: float) -> Array:
    """Draw pauses in forward passes, [N] seconds."""
    forward = graph.name == FORWARD
    shape = graph.shape
    rate = per_step / (shape.num_micro * shape.chunks)
    hit = forward & (rng.random(len(forward)) < rate)
    return np.where(hit, rng.uniform(*severity.GARBAGE_S, len(forward)), 0.0)


def _draw_excess(
    rng: np.random.Generator, cause: Cause, graph: Graph, needed_s: Array
) -> tuple[Array, tuple[int, ...], Literal["none", "pipeline", "sync"]]:
    """Draw the seconds that a cause adds to each operation, [N], and its workers."""
    shape, name = graph.shape, graph.name
    workers = shape.stages * shape.replicas
    compute = (name == FORWARD) | (name == BACKWARD)
    everybody = tuple(range(workers))
    if cause == "slow_worker":
        worker = int(rng.integers(workers))
        factor = rng.uniform(*severity.SLOW_WORKER) - 1
        return (
            needed_s * factor * (compute & (graph.worker == worker)),
            (worker,),
            "none",
        )
    if cause == "slow_last_stage":
        last = compute & (graph.stage == shape.stages * shape.chunks - 1)
        backward = rng.uniform(*severity.SLOW_LAST_BACKWARD) - 1
        forward = rng.uniform(*severity.SLOW_LAST_FORWARD) - 1
        factor = np.where(graph.backward, backward, forward) * last
        blamed = tuple(range(shape.stages - 1, workers, shape.stages))
        return needed_s * factor, blamed, "none"
    if cause == "sequence_lengths":
        deviation = rng.uniform(*severity.LENGTHS_BY_MICROBATCH)
        size = (shape.num_steps, shape.replicas, shape.num_micro)
        lengths = np.exp(rng.normal(0, deviation, size))
        lengths /= lengths.mean(axis=(1, 2), keepdims=True)  # as many tokens each step
        replica = graph.worker // shape.stages
        factor = lengths[graph.step, replica, graph.micro] - 1
        return needed_s * factor * compute, everybody, "none"
    if cause == "garbage":
        per_step = rng.uniform(*severity.GARBAGE_PER_STEP)
        return _draw_garbage(rng, graph, per_step), everybody, "none"
    if cause == "slow_link":
        return _draw_slow_link(rng, graph, needed_s)
    return np.zeros(len(name)), (), "none"


def _draw_slow_link(
    rng: np.random.Generator, graph: Graph, needed_s: Array
) -> tuple[Array, tuple[int, ...], Literal["none", "pipeline", "sync"]]:
    """Slow down one pair of stages in both directions, or the sync of one worker."""
    shape = graph.shape
    factor = rng.uniform(*severity.SLOW_LINK) - 1
    workers = shape.stages * shape.replicas
    worker = int(rng.integers(workers))
    if rng.random() < 0.5:
        slow = (graph.name == SYNC) & (
            graph.worker % shape.stages == worker % shape.stages
        )
        # In a ring the slow link cannot be located: the whole group is slow.
        blamed = tuple(range(worker % shape.stages, workers, shape.stages))
        return needed_s * slow * factor / 4, blamed, "sync"
    first = worker if (worker + 1) % shape.stages else worker - 1
    down = ~graph.backward & (graph.worker == first)
    up = graph.backward & (graph.worker == first + 1)
    slow = (graph.name == SEND) & (down | up)
    return needed_s * slow * factor, (first, first + 1), "pipeline"
