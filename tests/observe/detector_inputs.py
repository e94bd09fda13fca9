"""Generated cases in the form that detectors take, without the known answer."""

import numpy as np

from mjax.observe.detect.stuck import Places, Records, Usual, Verdict, judge
from mjax.observe.detect.whatif import Trace
from tests.observe.pipeline_graph import NAMES
from tests.observe.synthetic_pipelines import PipelineRun
from tests.observe.synthetic_stuck import StuckCase


def verdict(case: StuckCase) -> Verdict:
    """Judge a case without its known answer."""
    mesh, progress = case.mesh, case.progress
    return judge(
        Places(tp=mesh.tp, pp=mesh.pp, dp=mesh.dp, host=mesh.host),
        Records(
            entered=progress.entered,
            left=progress.left,
            entered_s=progress.entered_s,
            left_s=progress.left_s,
            names=progress.entered_name,
        ),
        case.host_log_s,
        case.activity,
        case.now_s,
        Usual(step_s=case.usual_step_s, save_s=case.usual_save_s),
    )


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
