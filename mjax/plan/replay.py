"""Replay a schedule on four streams to model the time of a step.

Input: a module, its analysis, a cost model. Output: modelled seconds, and a timeline.

One stream computes: it executes the instructions of a computation in order, and a loop
as often as it runs. The other three are the links inside the node, the network between
nodes, and the link to the host. On each, transfers run one after another in the order
of their `-start` halves. Different links carry data at the same time. An asynchronous
transfer blocks the compute stream only at its `-done` half, a synchronous transfer as
soon as it starts. Work that XLA puts on further compute streams is executed in order
too, because it shares the same multiprocessors.

A collective between nodes uses both links if several of its members share a node. It
occupies each link for the time of its bytes there (`CostModel.links_s`), and is done
when both have carried it. Its part inside the node is assumed to pass when the node
links are free, even if the network is busy. So each link carries all its bytes, and
traffic inside the node never waits for the network.

Copies between GPU and host occupy the link to the host. The model runs copies of both
directions one after another, although the link can carry both at the same time. So it
overestimates the waits for these copies.

Each second of a wait is attributed to the role of the transfer that occupies the link
at that time. It may be a transfer that was queued before the awaited one.

Not modelled: multiprocessors that a collective takes from compute; collectives that
share a link at the same time (in the model they queue, with the same total time);
devices that wait for each other (each is assumed to execute the heaviest branch of
every conditional); and the host.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import Analysis, Collective, Tier
from mjax.plan.hlo.collectives import KINDS
from mjax.plan.hlo.parse import Computation, Instruction, Module
from mjax.plan.hlo.work import (
    ALLOCATE,
    FREE,
    KERNELS,
    fused_work,
    host_copy_bytes,
    is_stamp,
    moved_bytes,
)
from mjax.plan.result import HOST

type Link = Tier | Literal["host"]
"""Kinds of links: inside a node, between nodes, to the host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A box on the timeline."""

    stream: str
    """compute; wait (the compute stream is blocked); or the link of a transfer: node,
    network or host. A collective that uses two links has a box on each."""
    name: str
    kind: str
    """product, kernel, memory, loop (loops and branches), copy (between GPU and host),
    or the collective's kind."""
    role: str | None
    """Role of a collective: tp, dp, pp, mixed; or host. For a wait, the role of the
    transfer that occupies the link, which may not be the awaited one."""
    start_s: float
    """Seconds since the start of the run of its computation."""
    stop_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A modelled step."""

    step_s: float
    compute_s: float
    """Seconds of all kernels together."""
    waits_s: Mapping[tuple[str, str], float]
    """Seconds that the compute stream waits for transfers; the key is (name of the
    waiting computation, role that occupies the link). These values and compute_s add up
    to step_s."""
    communication_s: Mapping[str, float]
    """Seconds of all transfers together, by role."""
    timeline: Mapping[str, tuple[Event, ...]]
    """Timeline of the first run of each computation, by name of the computation."""
    timed_by_bytes: tuple[str, ...]
    """op_names of kernels that are assumed memory-bound: their FLOPs are not given."""

    @property
    def exposed_s(self) -> dict[str, float]:
        """Seconds that the compute stream waits for transfers, by role."""
        exposed: dict[str, float] = collections.defaultdict(float)
        for (_, role), seconds in self.waits_s.items():
            exposed[role] += seconds
        return dict(exposed)


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
      analysis: analysis of this module.
      cost: the cost model.
      kernel_flops: FLOPs of one call of each Pallas or cuDNN kernel, which the HLO text
        does not contain. The key is a component of the kernel's op_name: for
        .../attention_forward/... the key is attention_forward.
    Returns:
      The modelled step.
    Raises:
      ValueError: a key of kernel_flops matches no kernel, or two keys match the same
        kernel.
    """
    _check_names(kernel_flops, module)
    player = _Player(module, analysis, cost, kernel_flops)
    total = player.play(module.entry, _IDLE)
    return Replay(
        step_s=total.seconds,
        compute_s=total.compute_s,
        waits_s=dict(total.waits_s),
        communication_s=dict(total.communication_s),
        timeline=player.timeline,
        timed_by_bytes=tuple(sorted(player.by_bytes)),
    )


def _no_seconds() -> dict[Any, float]:
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


class _Booked(NamedTuple):
    """A transfer in the queue of a link: its role, and the second at which it ends."""

    role: str
    stop_s: float


_LINKS: tuple[Link, ...] = ("node", "network", "host")
type _Busy = tuple[tuple[_Booked, ...], ...]
"""Queued transfers of each of `_LINKS`; each ends in `stop_s` seconds from now."""
_IDLE: _Busy = ((),) * len(_LINKS)


@dataclasses.dataclass(kw_only=True)
class _Pass:
    """Result of one or several runs of a computation."""

    busy: _Busy
    """Transfers that remain on the links at the end."""
    seconds: float = 0.0
    compute_s: float = 0.0
    waits_s: dict[tuple[str, str], float] = dataclasses.field(
        default_factory=_no_seconds
    )
    communication_s: dict[str, float] = dataclasses.field(default_factory=_no_seconds)

    def add(self, other: "_Pass", times: int = 1) -> None:
        self.seconds += times * other.seconds
        self.busy = other.busy
        self.compute_s += times * other.compute_s
        for key, seconds in other.waits_s.items():
            self.waits_s[key] += times * seconds
        for role, seconds in other.communication_s.items():
            self.communication_s[role] += times * seconds


class _Player:
    """Replays each computation once for every state of the links at its start."""

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

    def _play(self, name: str, busy: _Busy) -> _Pass:
        """Replay one run of a computation that starts with busy links."""
        computation = self.module.computations[name]
        starts = {done: start for start, done in computation.done_of.items()}
        stage = _Stage(name, busy)
        for x in computation.instructions:
            collective = self.collectives.get((name, x.name))
            calls = self.calls.get((name, x.name), ())
            if collective is not None:
                stage.communicate(collective, self.cost)
            elif calls:
                stage.call(x.name, self._repeat(calls, stage.busy))
            elif starts.get(x.name) in stage.awaited:
                stage.wait(starts[x.name])
            elif x.opcode in FREE or _is_silent(x):
                continue
            elif copied := host_copy_bytes(x, computation, self.module):
                seconds = self.cost.host_copy_s(copied)
                stage.copy(x.name, seconds, is_async=x.opcode.endswith("-start"))
            else:
                stage.compute(x.name, *self._kernel(x, computation))
        self.timeline.setdefault(name, tuple(stage.events))
        return stage.close()

    def _repeat(self, calls: tuple[tuple[str, int], ...], busy: _Busy) -> _Pass:
        total = _Pass(busy=busy)
        for name, runs in calls:
            left = runs
            while left:
                one = self.play(name, total.busy)
                # Each run shortens the queue of a busy link. Once the queue is empty,
                # all further runs are alike.
                times = left if one.busy == total.busy else 1
                total.add(one, times)
                left -= times
        return total

    def _kernel(self, x: Instruction, computation: Computation) -> tuple[str, float]:
        """Return kind and seconds of the kernel that an instruction launches."""
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
    """Return the components of the op_names of a kernel and of its fused ops."""
    inside = [y for name in x.called for y in module.computations[name].instructions]
    return {part for y in (x, *inside) for part in y.op_name.split("/") if part}


def _is_silent(x: Instruction) -> bool:
    """Return whether an instruction takes no time.

    These are allocations, and both halves of a collective of one device.
    """
    if x.target == ALLOCATE:
        return True
    return x.opcode.removesuffix("-start").removesuffix("-done") in KINDS


class _Stage:
    """The streams during one run of a computation."""

    def __init__(self, name: str, busy: _Busy) -> None:
        self.name = name
        self.total = _Pass(busy=busy)
        self.queues = dict(zip(_LINKS, map(list, busy), strict=True))
        self.awaited: dict[str, tuple[str, tuple[_Booked, ...]]] = {}
        """Transfers in flight, by name of the `-start` half: the kind, and the queue of
        the link that carries the transfer longest."""
        self.events: list[Event] = []

    @property
    def now_s(self) -> float:
        return self.total.seconds

    @property
    def busy(self) -> _Busy:
        """Transfers that remain on each link; neighbours of one role are merged."""
        return tuple(self._left(self.queues[link]) for link in _LINKS)

    def _left(self, queue: list[_Booked]) -> tuple[_Booked, ...]:
        left: list[_Booked] = []
        for booked in queue:
            if booked.stop_s > self.now_s:
                if left and left[-1].role == booked.role:
                    left.pop()
                left.append(booked._replace(stop_s=booked.stop_s - self.now_s))
        return tuple(left)

    def close(self) -> _Pass:
        self.total.busy = self.busy
        return self.total

    def compute(self, name: str, kind: str, seconds: float) -> None:
        self._event("compute", name, kind, None, self.now_s, self.now_s + seconds)
        self.total.seconds += seconds
        self.total.compute_s += seconds

    def call(self, name: str, inner: _Pass) -> None:
        end = self.now_s + inner.seconds
        self._event("compute", name, "loop", None, self.now_s, end)
        self.total.add(inner)
        for link, left in zip(_LINKS, inner.busy, strict=True):
            self.queues[link] = [b._replace(stop_s=end + b.stop_s) for b in left]

    def communicate(self, c: Collective, cost: CostModel) -> None:
        self._transfer(c.name, c.kind, c.role, cost.links_s(c))
        self.total.communication_s[c.role] += cost.collective_s(c)
        if not c.is_async:
            self.wait(c.name)

    def copy(self, name: str, seconds: float, *, is_async: bool) -> None:
        self._transfer(name, "copy", HOST, {"host": seconds})
        self.total.communication_s[HOST] += seconds
        if not is_async:
            self.wait(name)

    def _transfer(
        self, name: str, kind: str, role: str, links_s: Mapping[Any, float]
    ) -> None:
        """Add a transfer to the queues of its links."""
        for link, seconds in links_s.items():
            queue = [b for b in self.queues[link] if b.stop_s > self.now_s]
            start = queue[-1].stop_s if queue else self.now_s
            queue.append(_Booked(role, start + seconds))
            self.queues[link] = queue
            self._event(link, name, kind, role, start, start + seconds)
        last = max(
            (self.queues[link] for link in links_s),
            key=lambda queue: queue[-1].stop_s,
        )
        self.awaited[name] = kind, tuple(last)

    def wait(self, start_name: str) -> None:
        kind, carried = self.awaited.pop(start_name)
        for role, stop_s in carried:
            held_up = stop_s - self.now_s
            if held_up > 0:
                self._event("wait", start_name, kind, role, self.now_s, stop_s)
                self.total.waits_s[self.name, role] += held_up
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
