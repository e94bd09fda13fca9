"""Find the communication of a step in a scheduled module, and what may overlap it.

Input: a module (`hlo.parse`) and the mesh it was compiled for. Output: its collectives
and its matmuls, each with its number of executions in a step. All of this is read from
the executable; `replay` models times.

XLA executes the instructions of a computation in the order of the text: compute on one
stream, collectives on others. Instructions between the `-start` and `-done` halves of a
collective may overlap it; instructions after the `-done` half wait for it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Literal

from mjax.mesh.axes import AxisSizes
from mjax.plan.hlo.collectives import (
    PlacedCollective,
    collective_kind,
    executed,
    list_collectives,
    wire_bytes,
)
from mjax.plan.hlo.groups import Groups
from mjax.plan.hlo.parse import Computation, Instruction, Module
from mjax.plan.hlo.walk import trip_count, walk
from mjax.plan.hlo.work import Work, fused_work

type Tier = Literal["node", "network"]
"""Kinds of links: inside a node, and between nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective and the work that may overlap it, on one device."""

    name: str
    computation: str
    kind: str
    """One of `KINDS`."""
    dtype: str
    """Dtype of the data; several dtypes are joined by +."""
    axes: tuple[str, ...]
    """Mesh axes along which the members of a group differ, in order of `AXES`."""
    role: str
    """Role of the axes: tp, dp, pp, or mixed."""
    tier: Tier
    """Kind of the slowest link between members of a group."""
    group_size: int
    """Number of devices in a group; 2 for a permute (sender and receiver)."""
    group_size_in_node: int
    """Minimum number of devices of a group on one node; 1 for a permute."""
    wire_bytes: int
    """Bytes that one device sends per execution, with the algorithm that sends the
    fewest bytes (a ring)."""
    runs: int
    """Executions in a step: the product of the trip counts of the loops around it."""
    is_async: bool
    """Whether it has `-start` and `-done` halves; if not, it blocks compute."""
    products: int
    """Number of matmuls between `-start` and `-done`, in all loop iterations."""
    kernels: int
    """Number of Pallas and cuDNN kernels between `-start` and `-done`, likewise."""
    flops: int
    """FLOPs of the matmuls between `-start` and `-done`."""
    op_name: str
    """op_name of the collective: its place in the traced function."""
    groups: Groups = dataclasses.field(repr=False, compare=False)

    @property
    def is_overlapped(self) -> bool:
        """Whether a matmul or a kernel may run while the collective is in flight."""
        return self.is_async and self.products + self.kernels > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """Counts of one step on one device."""

    sizes: AxisSizes
    collectives: tuple[Collective, ...]
    """Collectives in the order in which they start, loop bodies listed once."""
    flops: int
    """FLOPs of all matmuls. FLOPs inside Pallas kernels are not in the text."""
    num_products: int
    num_kernels: int
    """Number of calls of Pallas and cuDNN kernels."""
    communicators: int
    """Number of different sets of groups, in all branches. All permutes along the same
    axes count as one."""
    branches: Mapping[str, str]
    """Name of the heaviest branch, the one that counts, of each conditional."""
    calls: Mapping[tuple[str, str], tuple[tuple[str, int], ...]]
    """(computation, name) of a loop, conditional or call -> the computations that it
    executes, and how often."""
    work: Mapping[str, Work]
    """Work of one run of each executed computation, callees included."""

    def wire_bytes(self, role: str | None = None) -> int:
        """Return the bytes that one device sends in a step, for one role or all."""
        return sum(
            c.wire_bytes * c.runs for c in self.collectives if role in (None, c.role)
        )

    def overlapped_bytes_fraction(self, role: str | None = None) -> float | None:
        """Return the fraction of the sent bytes that a matmul or a kernel may overlap.

        Args:
          role: tp, dp, pp or mixed; None means all.
        Returns:
          Between 0 and 1; None if nothing is sent.
        """
        total = self.wire_bytes(role)
        overlapped = sum(
            c.wire_bytes * c.runs
            for c in self.collectives
            if role in (None, c.role) and c.is_overlapped
        )
        return overlapped / total if total else None


def analyse(
    module: Module,
    sizes: AxisSizes,
    gpus_per_node: int = 8,
    *,
    unknown_trip_count: int | None = None,
) -> Analysis:
    """Walk a module in execution order: all loops, one branch per conditional.

    Args:
      module: a step, compiled for one device of the mesh.
      sizes: sizes of the mesh; its flat order is the order of the devices.
      gpus_per_node: consecutive devices that share a node.
      unknown_trip_count: trip count of loops whose count XLA does not know; None
        refuses them.
    Returns:
      The work and communication of the step. A collective of groups of one device sends
      nothing and is not listed. For a conditional the branch with the most FLOPs counts
      (then the most kernels, bytes, instructions), as an upper bound for any device.
    Raises:
      ValueError: the module is for another number of devices, or contains communication
        that is not understood or a loop of unknown length.
    """
    if module.num_partitions != sizes.num_devices:
        raise ValueError(
            f"module {module.name} was compiled for {module.num_partitions} devices, "
            f"but the mesh {sizes.as_tuple()} has {sizes.num_devices}"
        )
    counter = _Counter(module, sizes, gpus_per_node, unknown_trip_count)
    collectives = tuple(counter.collectives(module.entry))
    total = counter.work(module.entry)
    reached = counter.reached()
    return Analysis(
        sizes=sizes,
        collectives=collectives,
        flops=total.flops,
        num_products=total.products,
        num_kernels=total.kernels,
        communicators=len(
            {c.groups.partition(sizes) for c in list_collectives(module, sizes)}
        ),
        branches={
            x.name: counter.heaviest(x)
            for name in reached
            for x in module.computations[name].instructions
            if x.branches
        },
        calls={
            (name, x.name): calls
            for name in reached
            for x in module.computations[name].instructions
            if (calls := tuple(counter.calls(x)))
        },
        work={name: counter.work(name) for name in reached},
    )


class _Counter:
    """Counts the work of each computation once, and caches it."""

    def __init__(
        self,
        module: Module,
        sizes: AxisSizes,
        gpus_per_node: int,
        unknown_trip_count: int | None,
    ) -> None:
        self.module = module
        self.sizes = sizes
        self.gpus_per_node = gpus_per_node
        self.unknown_trip_count = unknown_trip_count
        self.work = functools.cache(self._work)
        self.heaviest = functools.cache(self._heaviest)

    def calls(self, x: Instruction) -> Iterator[tuple[str, int]]:
        """Yield pairs of (name, number of runs) of the computations that x executes."""
        if x.branches:
            yield self.heaviest(x), 1
            return
        for name in executed(x, self.module):
            is_loop = x.opcode == "while"
            yield name, trip_count(x, self.unknown_trip_count) if is_loop else 1

    def _heaviest(self, x: Instruction) -> str:
        def weight(branch: str) -> tuple[int, int, int, int]:
            work = self.work(branch)
            sent = sum(c.wire_bytes * c.runs for c in self.collectives(branch))
            length = len(self.module.computations[branch].instructions)
            return work.flops, work.kernels, sent, length

        return max(x.branches, key=weight)

    def _work(self, name: str) -> Work:
        computation = self.module.computations[name]
        return self.work_of(computation.instructions, computation)

    def work_of(
        self, instructions: tuple[Instruction, ...], computation: Computation
    ) -> Work:
        total = Work()
        for x in instructions:
            calls = list(self.calls(x))
            for called, runs in calls:
                total += self.work(called).times(runs)
            if not calls and not collective_kind(x, self.module):
                total += fused_work(x, computation, self.module)
        return total

    def collectives(self, start: str) -> Iterator[Collective]:
        placed = list_collectives(
            self.module,
            self.sizes,
            follow=lambda x: (name for name, _ in self.calls(x)),
            start=start,
        )
        return map(self.collective, placed)

    def collective(self, placed: PlacedCollective) -> Collective:
        x, computation = placed.site.instruction, placed.site.computation
        groups, axes, operands = placed.groups, placed.axes, placed.operands
        between = Work()
        sync = '"is_sync":true' in x.attributes.get("backend_config", "")
        is_async = x.opcode.endswith("-start") and not sync
        if is_async:
            place = computation.places[x.name]
            stop = computation.places[computation.done_of[x.name]]
            instructions = computation.instructions[place + 1 : stop]
            between = self.work_of(instructions, computation)
        size = groups.members.shape[1]
        return Collective(
            name=x.name,
            computation=computation.name,
            kind=placed.kind,
            dtype="+".join(sorted({array.dtype for array in operands})),
            axes=axes,
            role=placed.role,
            tier="network" if groups.crosses_nodes(self.gpus_per_node) else "node",
            group_size=size,
            group_size_in_node=groups.size_in_node(self.gpus_per_node),
            wire_bytes=wire_bytes(
                placed.kind, sum(a.num_bytes for a in operands), size
            ),
            runs=placed.site.runs(self.unknown_trip_count),
            is_async=is_async,
            products=between.products,
            kernels=between.kernels,
            flops=between.flops,
            op_name=x.op_name,
            groups=groups,
        )

    def reached(self) -> list[str]:
        """List the executed computations, including branches not taken."""
        sites = walk(self.module, lambda x: executed(x, self.module))
        return list(dict.fromkeys(site.computation.name for site in sites))
