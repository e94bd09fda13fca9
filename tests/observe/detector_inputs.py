"""Generated cases in the form that detectors take, without the known answer."""

import numpy as np

from mjax.observe.detect.whatif import Trace
from tests.observe.pipeline_graph import NAMES
from tests.observe.synthetic_pipelines import PipelineRun


def trace_of(run: PipelineRun) -> Trace:
    """Return the spans and the graph of a run, without its known answer."""
    graph, stages = run.graph, run.graph.shape.stages
    worker = np.arange(stages * graph.shape.replicas)
    return Trace(
        phase=np.array(NAMES)[graph.name],
        worker=graph.worker,
        step=graph.step,
        micro=graph.micro,
        stage=graph.stage,
        backward=graph.backward,
        edges=graph.edges,
        start_s=run.start_s,
        end_s=run.end_s,
        place=worker % stages,
        replica=worker // stages,
    )


def part_of_slowdown(step_s: np.ndarray, run: PipelineRun) -> float:
    """Return the error of a time without the cause, as a fraction of the slowdown."""
    ideal_s = float(run.truth.ideal_step_s.sum())
    slowdown_s = float(run.truth.step_s.sum()) - ideal_s
    return (float(step_s.sum()) - ideal_s) / slowdown_s
