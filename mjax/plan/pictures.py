"""Draw the computations of a compiled step that take most of its time.

Input: a module, its analysis and its replay. Output: the pictures of a `Plan`.

The replay executes the heaviest branch of every conditional in every tick of a
pipeline, although the schedule executes some of them less often (`choices`). In the
picture of the whole step, branches and loops take their mean times, in which a branch
counts as often as it runs. So this picture is as long as the modelled step. Each other
picture shows one run of a computation in which every branch is taken; only the loops in
it take mean times.

A *run* is one execution of a computation; a *pass* is a phase of the step, such as
forward.
"""

import collections
import functools
from collections.abc import Callable, Mapping

import numpy as np

from mjax.pipeline.schedule import Schedule
from mjax.plan.choices import choice, taken_share
from mjax.plan.hlo.analysis import Analysis
from mjax.plan.hlo.parse import Instruction, Module
from mjax.plan.reading import Runs
from mjax.plan.replay import Event, Replay
from mjax.plan.result import WHOLE_STEP, Branch, Picture, Span
from mjax.trace import scopes

_PICTURES = 6
"""Number of computations to draw: those with the largest part of the step."""

_LEAST_SHARE = 0.05
"""A pass with less than this fraction of a computation's time is not named."""

_PASSES = {"loss": "head and loss", "grad_norm": "gradient norm"}
"""Usual names of passes that differ from the names of their scopes."""


_ITERATIONS: Mapping[scopes.Unit, str] = {
    "ticks": "tick",
    "microbatches": "microbatch",
    "layers": "iteration",  # it may compute several layers
}


def pictures(
    module: Module,
    analysis: Analysis,
    found: Replay,
    *,
    every: Runs,
    taken: Runs,
    schedule: Schedule | None,
) -> tuple[Picture, ...]:
    """Return pictures of the whole step and of the computations with most of its time.

    Args:
      module: the step.
      analysis: analysis of this module.
      found: the replay.
      every: number of runs of each computation if heavy branches always run.
      taken: number of runs if heavy branches run as often as the schedule says.
      schedule: pipeline schedule; None with one stage.
    """

    def own_s(name: str) -> float:
        events = found.timeline[name]
        return sum((e.stop_s - e.start_s for e in events if e.kind != "loop"), 0.0)

    inner = sorted(
        (name for name in found.timeline if name != module.entry and own_s(name) > 0),
        key=lambda name: -own_s(name) * taken[name],
    )
    phases = _phase_times(module, analysis, found)
    means = _Means(module, analysis, found, every, schedule)
    return tuple(
        _picture(module, analysis, name, round(taken[name]), means, phases)
        for name in [module.entry, *inner][:_PICTURES]
    )


def _picture(
    module: Module,
    analysis: Analysis,
    name: str,
    runs: int,
    means: "_Means",
    phases: Callable[..., Mapping[str, float]],
) -> Picture:
    """Return the picture of one run of a computation."""
    computation = module.computations[name]
    spans, branches = [], []
    for event, start_s, stop_s in means.drawn(name):
        x = computation.by_name[event.name]
        is_branch = event.kind == "loop" and bool(x.branches)
        passes = _named(phases(name, event)) if event.stream == "compute" else ()
        span = Span(
            stream=event.stream,
            name=event.name,
            kind="branch" if is_branch else event.role or event.kind,
            start_s=start_s,
            stop_s=stop_s,
            passes=passes,
        )
        spans.append(span)
        share = means.share(x)
        if is_branch and share < 1 and name != module.entry:
            part = choice(x.op_name)
            assert part is not None  # other conditionals always run
            branches.append(
                Branch(part=part, runs=runs * share, seconds=stop_s - start_s)
            )
    return Picture(
        name=name,
        where=_where(module, analysis, name),
        passes=_named(phases(name)),
        runs=runs,
        mean_s=means.pass_s(name),
        spans=tuple(spans),
        branches=tuple(branches),
    )


class _Means:
    """Mean times of computations if branches run as often as the schedule says."""

    def __init__(
        self,
        module: Module,
        analysis: Analysis,
        found: Replay,
        every: Runs,
        schedule: Schedule | None,
    ) -> None:
        self.module = module
        self.calls = analysis.calls
        self.timeline = found.timeline
        self.schedule = schedule
        self.waits_s: dict[str, float] = collections.defaultdict(float)
        for (name, _), seconds in found.waits_s.items():
            self.waits_s[name] += seconds / every[name]
        self.pass_s = functools.cache(self._pass_s)

    def share(self, x: Instruction) -> float:
        """Return the fraction of the runs of x's computation in which x runs."""
        return taken_share(x.op_name, self.schedule) if x.branches else 1.0

    def call_s(self, name: str, x: Instruction) -> float:
        """Return the seconds of a loop or a branch, when it runs."""
        called = self.calls.get((name, x.name), ())
        return sum((turns * self.pass_s(body) for body, turns in called), 0.0)

    def _pass_s(self, name: str) -> float:
        """Return the seconds of the compute stream in a mean run."""
        own_s = sum(
            e.stop_s - e.start_s
            for e in self.timeline[name]
            if e.stream == "compute" and e.kind != "loop"
        )
        return sum(
            (
                self.share(x) * self.call_s(name, x)
                for x in self.module.computations[name].instructions
            ),
            own_s + self.waits_s[name],
        )

    def drawn(self, name: str) -> list[tuple[Event, float, float]]:
        """Return the events of a run, with the seconds at which they start and stop.

        If a loop takes another time than in the replay, the events after it move, and
        transfers during it shrink or grow. In the whole step, branches that never run
        are left out.
        """
        events = self.timeline[name]
        by_name = self.module.computations[name].by_name
        is_step = name == self.module.entry
        replayed, drawn, later_s = [0.0], [0.0], 0.0
        for e in events:
            if e.kind == "loop" and e.stop_s > e.start_s:
                x = by_name[e.name]
                mean_s = self.call_s(name, x) * (self.share(x) if is_step else 1.0)
                replayed += [e.start_s, e.stop_s]
                drawn += [e.start_s + later_s, e.start_s + later_s + mean_s]
                later_s += mean_s - (e.stop_s - e.start_s)
        end_s = max((e.stop_s for e in events), default=0.0)
        replayed.append(end_s)
        drawn.append(end_s + later_s)
        edges = np.interp([(e.start_s, e.stop_s) for e in events], replayed, drawn)
        return [
            (e, float(start_s), float(stop_s))
            for e, (start_s, stop_s) in zip(events, edges, strict=True)
            if e.kind != "loop" or stop_s > start_s
        ]


def _phase_times(
    module: Module, analysis: Analysis, found: Replay
) -> Callable[..., Mapping[str, float]]:
    """Return a function that sums the seconds of each phase.

    Its arguments are the name of a computation and one of its events; without an event
    it sums one run of the computation, with the bodies of its loops.
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
    """Return the names of the passes that take most of the time, in execution order."""
    least_s = _LEAST_SHARE * sum(seconds.values())
    return tuple(
        _PASSES.get(phase, phase)
        for phase in scopes.PHASES
        if seconds.get(phase, 0.0) > least_s
    )


def _where(module: Module, analysis: Analysis, name: str) -> str:
    """Return the place of a computation in the step, in words."""
    for (outer, call), called in analysis.calls.items():
        if name not in dict(called):
            continue
        x = module.computations[outer].by_name[call]
        if x.branches:
            return "one run of a branch"
        if x.opcode != "while":
            return "one call"
        loop = scopes.read(x.op_name).own_loop
        if loop is None:
            return "one iteration of a loop"
        return f"one {_ITERATIONS[loop.unit]} of the loop over {loop.unit}"
    return WHOLE_STEP
