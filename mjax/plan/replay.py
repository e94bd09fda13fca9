"""Replay a schedule on two streams to model the time of a step.

Enters: a module, its analysis, a cost model. Leaves: modelled seconds, and a timeline.

One stream computes: the instructions of a computation one after the other, a loop as
often as it runs. The other communicates: collectives one after the other in the order
of their starts, never before the start. An asynchronous collective holds up the compute
stream only at its done, another at once. Work that XLA puts on further compute streams
is taken in line: it shares the same multiprocessors.

Not modelled: multiprocessors that a collective takes from compute, several collectives
that share a link at once (they queue instead, the sum is the same), devices that wait
for each other (each is taken to execute the heaviest branch of every choice), and the
host.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import Analysis, Collective
from mjax.plan.hlo.collectives import KINDS
from mjax.plan.hlo.parse import Computation, Instruction, Module
from mjax.plan.hlo.work import FREE, KERNELS, fused_work, is_stamp, moved_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A box on the timeline."""

    stream: str
    """compute, communication, or wait: the compute stream is held up."""
    name: str
    kind: str
    """product, kernel, memory, loop (loops and branches), or the collective's kind."""
    role: str | None
    """Of a collective, and of a wait for one: tp, dp, pp, mixed."""
    start_s: float
    """Since the beginning of the pass of its computation."""
    stop_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A step, as modelled."""

    step_s: float
    compute_s: float
    """Sum of all kernels."""
    exposed_s: Mapping[str, float]
    """By role: how long the compute stream waits for collectives. With compute_s it
    adds up to step_s."""
    communication_s: Mapping[str, float]
    """By role: sum of all collectives."""
    timeline: Mapping[str, tuple[Event, ...]]
    """Of the first pass of each computation, by its name."""
    timed_by_bytes: tuple[str, ...]
    """op_name of the kernels of which the FLOPs were not given: these are taken to be
    bound by memory."""


def replay(
    module: Module,
    analysis: Analysis,
    cost: CostModel,
    *,
    kernel_flops: Mapping[str, int | float] = MappingProxyType({}),
) -> Replay:
    """Replay a step.

    Args:
      module: the step.
      analysis: of this module.
      cost: the cost model.
      kernel_flops: FLOPs of one call of a Pallas or cuDNN kernel, which the text does
        not say. The name is a part of its op_name, between slashes: a call from
        .../attention_forward/... is named attention_forward.
    Returns:
      The modelled step.
    Raises:
      ValueError: no kernel has a name of kernel_flops, or one has two of them.
    """
    _check_names(kernel_flops, module)
    player = _Player(module, analysis, cost, kernel_flops)
    total = player.play(module.entry, 0.0)
    return Replay(
        step_s=total.seconds,
        compute_s=total.compute_s,
        exposed_s=dict(total.exposed_s),
        communication_s=dict(total.communication_s),
        timeline=player.timeline,
        timed_by_bytes=tuple(sorted(player.by_bytes)),
    )


def _no_seconds() -> dict[str, float]:
    return collections.defaultdict(float)


def _check_names(kernel_flops: Mapping[str, int | float], module: Module) -> None:
    kernels = {
        x.op_name
        for computation in module.computations.values()
        for x in computation.instructions
        if x.target.startswith(KERNELS)
    }
    named = {kernel: set(kernel.split("/")) & set(kernel_flops) for kernel in kernels}
    if unused := sorted(set(kernel_flops).difference(*named.values())):
        raise ValueError(
            f"kernel_flops names {unused[0]!r}, and no kernel of {module.name} has "
            f"that in its op_name; kernels: {sorted(kernels)}"
        )
    for kernel, names in named.items():
        if len(names) > 1:
            raise ValueError(
                f"kernel_flops gives {kernel} FLOPs under several names: "
                f"{sorted(names)}; leave one"
            )


@dataclasses.dataclass(kw_only=True)
class _Pass:
    """One or several passes of a computation."""

    busy_s: float
    """How long after the end the communication stream is still busy."""
    seconds: float = 0.0
    compute_s: float = 0.0
    exposed_s: dict[str, float] = dataclasses.field(default_factory=_no_seconds)
    communication_s: dict[str, float] = dataclasses.field(default_factory=_no_seconds)

    def add(self, other: "_Pass", times: int = 1) -> None:
        self.seconds += times * other.seconds
        self.busy_s = other.busy_s
        self.compute_s += times * other.compute_s
        for mine, its in (
            (self.exposed_s, other.exposed_s),
            (self.communication_s, other.communication_s),
        ):
            for role, seconds in its.items():
                mine[role] += times * seconds


class _Player:
    """Plays computations; remembers each by its name and how busy it finds the link."""

    def __init__(
        self,
        module: Module,
        analysis: Analysis,
        cost: CostModel,
        kernel_flops: Mapping[str, int | float],
    ) -> None:
        self.module = module
        self.calls = analysis.calls
        self.cost = cost
        self.kernel_flops = kernel_flops
        self.collectives = {(c.computation, c.name): c for c in analysis.collectives}
        self.timeline: dict[str, tuple[Event, ...]] = {}
        self.by_bytes: set[str] = set()
        self.play = functools.cache(self._play)

    def _play(self, name: str, busy_s: float) -> _Pass:
        """Play one pass that finds the communication stream busy for busy_s."""
        computation = self.module.computations[name]
        starts = {done: start for start, done in computation.done_of.items()}
        stage = _Stage(_Pass(busy_s=busy_s))
        for x in computation.instructions:
            collective = self.collectives.get((name, x.name))
            calls = self.calls.get((name, x.name), ())
            if collective is not None:
                stage.communicate(collective, self.cost.collective_s(collective))
            elif calls:
                stage.call(x.name, self._repeat(calls, stage.busy_s))
            elif starts.get(x.name) in stage.ends:
                stage.wait(starts[x.name])
            elif x.opcode not in FREE and not _is_silent(x):
                stage.compute(x.name, *self._kernel(x, computation))
        self.timeline.setdefault(name, tuple(stage.events))
        return stage.close()

    def _repeat(self, calls: tuple[tuple[str, int], ...], busy_s: float) -> _Pass:
        total = _Pass(busy_s=busy_s)
        for name, runs in calls:
            left = runs
            while left:
                one = self.play(name, total.busy_s)
                # A busy link is less so after each pass; then all passes are alike.
                times = left if one.busy_s == total.busy_s else 1
                total.add(one, times)
                left -= times
        return total

    def _kernel(self, x: Instruction, computation: Computation) -> tuple[str, float]:
        """Return kind and seconds of what an instruction launches."""
        work = fused_work(x, computation, self.module)
        moved = sum(moved_bytes(x, computation, self.module))
        if work.products:
            return "product", self.cost.product_s(work, moved)
        if not work.kernels:
            return "memory", self.cost.memory_s(moved)
        for name in sorted(_origins(x, self.module)):
            if name in self.kernel_flops:
                return "kernel", self.cost.kernel_s(self.kernel_flops[name], moved)
        if not is_stamp(x):
            self.by_bytes.add(x.op_name)
        return "kernel", self.cost.memory_s(moved)


def _origins(x: Instruction, module: Module) -> set[str]:
    """List the parts of the op_name of a kernel; of a fusion also of those inside."""
    inside = [y for name in x.called for y in module.computations[name].instructions]
    return {part for y in (x, *inside) for part in y.op_name.split("/") if part}


def _is_silent(x: Instruction) -> bool:
    """Say whether it is a collective among one device, or the end of one."""
    return x.opcode.removesuffix("-start").removesuffix("-done") in KINDS


class _Stage:
    """The two streams during one pass of a computation."""

    def __init__(self, total: _Pass) -> None:
        self.total = total
        self.link_free_s = total.busy_s
        self.ends: dict[str, tuple[Collective, float]] = {}
        self.events: list[Event] = []

    @property
    def now_s(self) -> float:
        return self.total.seconds

    @property
    def busy_s(self) -> float:
        return max(0.0, self.link_free_s - self.now_s)

    def close(self) -> _Pass:
        self.total.busy_s = self.busy_s
        return self.total

    def compute(self, name: str, kind: str, seconds: float) -> None:
        self._event("compute", name, kind, None, self.now_s, self.now_s + seconds)
        self.total.seconds += seconds
        self.total.compute_s += seconds

    def call(self, name: str, inner: _Pass) -> None:
        end = self.now_s + inner.seconds
        self._event("compute", name, "loop", None, self.now_s, end)
        self.total.add(inner)
        self.link_free_s = end + inner.busy_s

    def communicate(self, c: Collective, seconds: float) -> None:
        start = max(self.now_s, self.link_free_s)
        self.link_free_s = start + seconds
        self.total.communication_s[c.role] += seconds
        self._event("communication", c.name, c.kind, c.role, start, self.link_free_s)
        self.ends[c.name] = c, self.link_free_s
        if not c.is_async:
            self.wait(c.name)

    def wait(self, start_name: str) -> None:
        c, end = self.ends.pop(start_name)
        held_up = end - self.now_s
        if held_up > 0:
            self._event("wait", c.name, c.kind, c.role, self.now_s, end)
            self.total.exposed_s[c.role] += held_up
            self.total.seconds += held_up

    def _event(
        self,
        stream: str,
        name: str,
        kind: str,
        role: str | None,
        start_s: float,
        stop_s: float,
    ) -> None:
        self.events.append(
            Event(
                stream=stream,
                name=name,
                kind=kind,
                role=role,
                start_s=start_s,
                stop_s=stop_s,
            )
        )
