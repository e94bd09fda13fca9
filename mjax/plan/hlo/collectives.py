"""List the collectives of a module: their kinds, groups and loops.

Input: a parsed module, for CPU or GPU, and the mesh it was compiled for. Output: its
collectives in order. On a GPU most have separate start and done instructions, and each
is listed once, at its start. `analysis` determines what may overlap them.
"""

import dataclasses
from collections.abc import Iterator

from mjax.mesh.axes import DP, PP, TP, AxisSizes
from mjax.plan.hlo.groups import Groups, read_groups, read_pairs
from mjax.plan.hlo.parse import Array, Instruction, Module, arrays
from mjax.plan.hlo.walk import Follow, Site, walk

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    "collective-permute",
)
# Communication that this package cannot count, and must not count as compute.
_UNKNOWN = ("send", "recv", "ragged-all-to-all", "collective-broadcast")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlacedCollective:
    """A collective of more than one device, with its place in the module."""

    kind: str
    """One of `KINDS`."""
    site: Site
    groups: Groups
    axes: tuple[str, ...]
    """Mesh axes along which the members of a group differ, in order of `AXES`."""

    @property
    def role(self) -> str:
        """Role of the axes: tp, dp, pp, or mixed."""
        if set(self.axes) <= set(DP):
            return "dp"
        return self.axes[0] if self.axes in ((PP,), (TP,)) else "mixed"

    @property
    def operands(self) -> tuple[Array, ...]:
        """Shapes of the operands on each device."""
        operands = self.site.computation.operands(self.site.instruction)
        return tuple(array for y in operands for array in arrays(y.shape))

    @property
    def results(self) -> tuple[Array, ...]:
        """Shapes of the results on each device."""
        return arrays(self.site.instruction.result)

    @property
    def result_bytes(self) -> int:
        """Bytes of the results."""
        return sum(array.num_bytes for array in self.results)

    @property
    def num_loops(self) -> int:
        """Number of while loops around it."""
        return len(self.site.loops)


def list_collectives(
    module: Module,
    sizes: AxisSizes,
    *,
    follow: Follow | None = None,
    start: str | None = None,
) -> Iterator[PlacedCollective]:
    """Yield the collectives in the order in which they start.

    Args:
      module: compiled for one device of the mesh.
      sizes: sizes of the mesh; its flat order is the order of the devices.
      follow: function from an instruction to the names of the computations to enter;
        None enters all that run, including loop conditions and every branch.
      start: name of the first computation; None starts at the entry.
    Returns:
      The collectives whose groups have more than one device; others send nothing.
    Raises:
      ValueError: communication or a group is not understood.
    """

    def all_that_run(x: Instruction) -> tuple[str, ...]:
        return x.called if x.opcode == "while" else executed(x, module)

    for site in walk(module, follow or all_that_run, start):
        kind = collective_kind(site.instruction, module)
        if kind is not None:
            groups = _groups(wrapped(site.instruction, module), sizes)
            axes = groups.axes(sizes)
            if axes:
                yield PlacedCollective(kind=kind, site=site, groups=groups, axes=axes)


def _groups(x: Instruction, sizes: AxisSizes) -> Groups:
    if "source_target_pairs" in x.attributes:
        return read_pairs(x.attributes["source_target_pairs"])
    if "replica_groups" not in x.attributes:
        raise ValueError(f"{x.name} ({x.opcode}) does not list its members")
    return read_groups(x.attributes["replica_groups"], sizes.num_devices)


def collective_kind(x: Instruction, module: Module) -> str | None:
    """Return the kind of a collective or of its `-start` half; otherwise None.

    Raises:
      ValueError: the instruction communicates in a way that is not understood.
    """
    inner = wrapped(x, module)
    kind = inner.opcode.removesuffix("-start")
    if kind in _UNKNOWN:
        raise ValueError(f"{x.name} is a {kind}, which is not understood")
    return kind if kind in KINDS else None


def executed(x: Instruction, module: Module) -> tuple[str, ...]:
    """Return the computations that an instruction runs: body, branches, or callee.

    Computations inside a kernel (a fusion, the sum of a reduction) do not run by
    themselves, and neither does the collective in an async-start.
    """
    if x.opcode == "while":
        return (x.body,)
    if x.opcode in ("call", "async-start") and not collective_kind(x, module):
        return x.called[:1]
    return x.branches


def wrapped(x: Instruction, module: Module) -> Instruction:
    """Return the collective in an async-start, or any other instruction unchanged."""
    if x.opcode != "async-start":
        return x
    inside = module.computations[x.called[0]].instructions
    return next((y for y in inside if y.opcode in (*KINDS, *_UNKNOWN)), x)


def wire_bytes(kind: str, operand_bytes: int, group_size: int) -> int:
    """Return the bytes that one device sends in a collective.

    With n devices and B bytes of operand on each: all-gather B (n - 1),
    reduce-scatter and all-to-all B (n - 1) / n, all-reduce 2 B (n - 1) / n, rounded
    up; a permute sends its operand. These are lower bounds (Patarasuk and Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002).

    Args:
      kind: one of `KINDS`.
      operand_bytes: operand size of one device.
      group_size: n.
    Raises:
      ValueError: the kind is unknown.
    """
    n = group_size
    match kind:
        case "all-gather":
            return operand_bytes * (n - 1)
        case "reduce-scatter" | "all-to-all":
            return -(-operand_bytes * (n - 1) // n)
        case "all-reduce":
            return -(-2 * operand_bytes * (n - 1) // n)
        case "collective-permute":
            return operand_bytes
        case _:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
