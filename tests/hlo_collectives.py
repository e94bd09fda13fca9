"""Read the collectives of a compiled program: kind, mesh axes, arrays, loops around it.

Enters: the text of an optimised module, for CPU or GPU. On a GPU most collectives are
started and awaited apart; one is listed once, where it starts.
"""

import dataclasses
from collections.abc import Mapping

from mjax.mesh.axes import AxisSizes
from mjax.plan.hlo.analysis import collective_kind
from mjax.plan.hlo.groups import read_groups, read_pairs
from mjax.plan.hlo.parse import Computation, Instruction, Module, Shape, arrays, parse


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    axes: frozenset[str]
    shapes: tuple[str, ...]
    """Results, such as f32[4,16]."""
    num_bytes: int
    """Of the results."""
    loops: int
    """While loops around it."""
    operands: tuple[str, ...]
    """What each device brings, as shapes."""
    pairs: tuple[tuple[int, int], ...]
    """Of a collective-permute, the devices that send and receive."""
    outer_loop: str
    """Body of the outermost loop around it; empty without a loop."""


def collectives(hlo: str, mesh: Mapping[str, int]) -> list[Collective]:
    """List the collectives over more than one device; raise on an unread group.

    Args:
      hlo: the module.
      mesh: sizes of all axes, as jax.sharding.Mesh.shape gives them.
    """
    module = parse(hlo)
    callers = _callers(module)
    found = [
        _collective(kind, x, computation, _loops(computation.name, callers), mesh)
        for computation in module.computations.values()
        for x in computation.instructions
        if (kind := collective_kind(x, module))
    ]
    return [c for c in found if c.axes]


def _callers(module: Module) -> dict[str, tuple[str, bool]]:
    """Say who calls each computation, and whether as a loop."""
    return {
        called: (computation.name, x.opcode == "while")
        for computation in module.computations.values()
        for x in computation.instructions
        for called in (*x.called, *x.branches)
    }


def _loops(computation: str, callers: dict[str, tuple[str, bool]]) -> list[str]:
    """Return the bodies of the loops around a computation, the innermost first."""
    loops = []
    while computation in callers:
        caller, is_loop = callers[computation]
        if is_loop:
            loops.append(computation)
        computation = caller
    return loops


def _collective(
    kind: str,
    x: Instruction,
    computation: Computation,
    loops: list[str],
    mesh: Mapping[str, int],
) -> Collective:
    sizes = AxisSizes(**mesh)
    if kind == "collective-permute":
        groups = read_pairs(x.attributes["source_target_pairs"])
    else:
        groups = read_groups(x.attributes["replica_groups"], sizes.num_devices)
    pairs = groups.members.tolist() if groups.are_pairs else []
    return Collective(
        kind=kind,
        axes=frozenset(groups.axes(sizes)),
        shapes=_texts(x.result),
        num_bytes=sum(array.num_bytes for array in arrays(x.result)),
        loops=len(loops),
        operands=tuple(s for y in computation.operands(x) for s in _texts(y.shape)),
        pairs=tuple((source, target) for source, target in pairs),
        outer_loop=loops[-1] if loops else "",
    )


def _texts(shape: Shape) -> tuple[str, ...]:
    return tuple(f"{a.dtype}[{','.join(map(str, a.dims))}]" for a in arrays(shape))
