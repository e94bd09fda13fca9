"""Find the collectives of a compiled program whose order nothing decides."""

from collections.abc import Iterator

from mjax.plan.hlo.collectives import KINDS
from mjax.plan.hlo.parse import Computation, Instruction, Module, parse


def unordered(hlo_text: str) -> list[tuple[str, str]]:
    """List pairs of collectives, or of loops with collectives, that no data path joins.

    Paths are followed through each element of a tuple separately: an element that a
    loop passes on unchanged does not depend on the loop.
    """
    module = parse(hlo_text)
    return [
        pair
        for computation in module.computations.values()
        for pair in _unordered(computation, module)
    ]


def _unordered(computation: Computation, module: Module) -> Iterator[tuple[str, str]]:
    above: dict[str, list[frozenset[str]]] = {}
    events: list[str] = []
    for x in computation.instructions:
        parts = [frozenset().union(*above[name]) for name in x.operands]
        if x.opcode == "tuple":
            above[x.name] = parts
            continue
        if x.opcode == "get-tuple-element":
            whole = above[x.operands[0]]
            index = int(x.attributes["index"])
            above[x.name] = [whole[index]] if len(whole) > 1 else whole
            continue
        own: frozenset[str] = frozenset().union(*parts)
        if _communicates(x, module):
            yield from ((event, x.name) for event in events if event not in own)
            own |= {x.name}
            events.append(x.name)
        above[x.name] = [own]
        if x.opcode == "while":
            given = above[x.operands[0]]
            kept = _passed_on(module.computations[x.body])
            if len(given) > 1:
                above[x.name] = [
                    old if index in kept else own for index, old in enumerate(given)
                ]


def _communicates(x: Instruction, module: Module) -> bool:
    if x.opcode in ("while", "conditional", "call"):
        inner = (*x.called, *x.branches)
        return any(
            _communicates(y, module)
            for name in inner
            for y in module.computations[name].instructions
        )
    return x.opcode in KINDS


def _passed_on(body: Computation) -> set[int]:
    """Return the indices of a loop's tuple that its body returns unchanged."""
    parts = [body.by_name[name] for name in body.root.operands]
    return {
        index
        for index, x in enumerate(parts)
        if x.opcode == "get-tuple-element"
        and x.attributes["index"] == str(index)
        and body.by_name[x.operands[0]].opcode == "parameter"
    }
