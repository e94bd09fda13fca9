"""Draw the computations of a compiled step that take most of its time.

Input: a module, its analysis and its replay. Output: the pictures of a `Plan`.
"""

import collections
import functools
from collections.abc import Callable, Mapping

from mjax import scopes
from mjax.plan.hlo.analysis import Analysis
from mjax.plan.hlo.parse import Module
from mjax.plan.reading import Runs
from mjax.plan.replay import Event, Replay
from mjax.plan.result import Picture, Span

_PICTURES = 6
"""Number of computations to draw: those with the largest part of the step."""

_LEAST_SHARE = 0.05
"""A pass with less than this fraction of a computation's time is not named."""

_PASSES = {"loss": "head and loss", "grad_norm": "gradient norm"}
"""Usual names of passes that differ from the names of their scopes."""


def pictures(
    module: Module, analysis: Analysis, found: Replay, runs: Runs
) -> tuple[Picture, ...]:
    """Choose the computations with most of the step's time, and draw them.

    Args:
      module: the step.
      analysis: analysis of this module.
      found: the replay.
      runs: number of runs of each computation in a step.
    """

    def own_s(name: str) -> float:
        events = found.timeline[name]
        return sum((e.stop_s - e.start_s for e in events if e.kind != "loop"), 0.0)

    names = sorted(found.timeline, key=lambda n: -own_s(n) * runs[n])
    times = _phase_times(module, analysis, found)
    return tuple(
        Picture(
            name=name,
            where=_where(module, analysis, name),
            passes=_named(times(name)),
            runs=round(runs[name]),
            spans=tuple(
                Span(
                    stream=e.stream,
                    name=e.name,
                    kind=e.role or e.kind,
                    start_s=e.start_s,
                    stop_s=e.stop_s,
                    passes=_named(times(name, e)) if e.stream == "compute" else (),
                )
                for e in found.timeline[name]
            ),
        )
        for name in names[:_PICTURES]
        if own_s(name) > 0
    )


def _phase_times(
    module: Module, analysis: Analysis, found: Replay
) -> Callable[..., Mapping[str, float]]:
    """Return a function that sums the seconds of each phase.

    Its arguments are the name of a computation and one of its events; without an event
    it sums one pass of the computation, with the bodies of its loops.
    """

    @functools.cache
    def times(name: str, event: Event | None = None) -> Mapping[str, float]:
        seconds: dict[str, float] = collections.defaultdict(float)
        if event is None:
            for one in found.timeline[name]:
                if one.stream == "compute":
                    for phase, taken_s in times(name, one).items():
                        seconds[phase] += taken_s
            return seconds
        for called, turns in analysis.calls.get((name, event.name), ()):
            for phase, taken_s in times(called).items():
                seconds[phase] += turns * taken_s
        phase = scopes.read(module.computations[name].by_name[event.name].op_name).phase
        if not seconds and phase is not None:
            seconds[phase] = event.stop_s - event.start_s
        return seconds

    return times


def _named(seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the passes that take most of the time, in their order."""
    least_s = _LEAST_SHARE * sum(seconds.values())
    return tuple(
        _PASSES.get(phase, phase)
        for phase in scopes.PHASES
        if seconds.get(phase, 0.0) > least_s
    )


def _where(module: Module, analysis: Analysis, name: str) -> str:
    """Say where in the step a computation is."""
    for (outer, call), called in analysis.calls.items():
        if name not in dict(called):
            continue
        x = module.computations[outer].by_name[call]
        if x.branches:
            return "a branch"
        loop = scopes.read(x.op_name).own_loop
        return (
            f"the body of the loop over {loop.unit}" if loop else "the body of a loop"
        )
    return "the whole step"
