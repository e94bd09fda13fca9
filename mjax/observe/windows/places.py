"""Assign each instruction of a compiled step to a phase, a role and a layer.

Input: the text of a compiled step (`plan.hlo`) and the sizes of its mesh. Output: a
table from names of instructions, as in a profiler window, to places; and its JSON, so
that a window can be read without compiling the step.

The phase is the scope in which the step was traced (`mjax.trace.scopes`). An
instruction that XLA added without a name takes the scopes of the users of its result;
if they have none, those of its operands; if they have none, those of the call of its
computation. The role
of a collective follows from its groups. A collective in groups of one device moves
nothing and counts as compute.
"""

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mjax import checked_json
from mjax.mesh.axes import AxisSizes
from mjax.plan.hlo.collectives import collective_kind, executed, list_collectives
from mjax.plan.hlo.parse import Computation, Instruction, Module, parse
from mjax.trace import scopes
from mjax.trace.scopes import Phase, Scopes, Unit

UNKNOWN = "unknown"
type Role = Literal["compute", "tp", "pp", "dp", "mixed"]
ROLES: tuple[Role, ...] = ("compute", "tp", "pp", "dp", "mixed")
"""`mixed`: a collective over axes of several roles, such as a norm of all gradients."""
_FORMAT, _VERSION = "mjax-places", 2
_TRUTHS = ("is_recomputed", "is_slot", "is_container", "is_direct", "is_chosen")
_CONTAINERS = ("while", "call", "conditional")
_NOWHERE = scopes.read("")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where an instruction belongs."""

    phase: Phase | Literal["unknown"]
    role: Role
    is_recomputed: bool
    """Whether the instruction is recomputation, which is part of the backward pass."""
    is_slot: bool
    """Whether the instruction is work of a pipeline slot."""
    is_container: bool
    """Whether this is a loop, a call or a conditional; the instructions in it have
    their own events."""
    singles: dict[str, int]
    """Index of the layer, tick or microbatch, by unit, where a scope names a single
    one."""
    place: int
    """Position in the repeating pattern of layers."""
    loops: tuple[str, ...]
    """The enclosing loops, as keys of the table of loops, the outermost first."""
    is_direct: bool
    """Whether every iteration of the innermost loop runs the instruction."""
    is_chosen: bool
    """Whether the instruction is inside a conditional, at any depth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopPlace:
    """A loop of the compiled step."""

    trip_count: int | None
    unit: Unit | None
    """What the loop runs over; None: the loop has no scope, or XLA changed it."""
    start: int
    """Index of the unit in the first iteration."""
    step: int
    """Increase of that index from one iteration to the next."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The places of a compiled module."""

    module: str
    """Name of the module, as in the events of a window."""
    num_devices: int
    ops: Mapping[str, Place]
    loops: Mapping[str, LoopPlace]

    def to_json(self) -> str:
        """Encode the table; equal places are written once."""
        numbers: dict[str, int] = {}
        ops = {
            name: numbers.setdefault(
                json.dumps(dataclasses.asdict(place)), len(numbers)
            )
            for name, place in self.ops.items()
        }
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "module": self.module,
            "num_devices": self.num_devices,
            "loops": {key: dataclasses.asdict(x) for key, x in self.loops.items()},
            "places": [json.loads(text) for text in numbers],
            "ops": ops,
        }
        return json.dumps(content) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """The table in its JSON form."""

    format: str
    version: int
    module: str
    num_devices: int
    loops: dict[str, Any]
    places: list[Any]
    ops: dict[str, int]


def from_json(text: str | bytes) -> Table:
    """Read what `Table.to_json` wrote.

    Raises:
      ValueError: it is not a table, or has another version.
    """
    file = checked_json.read(text, _File)
    if (file.format, file.version) != (_FORMAT, _VERSION):
        raise ValueError(
            f"format {file.format!r} version {file.version} instead of {_FORMAT!r} "
            f"version {_VERSION}"
        )
    places = [_place_of(value) for value in file.places]
    loops = {key: _loop_of(value) for key, value in file.loops.items()}
    if any(not 0 <= number < len(places) for number in file.ops.values()):
        raise ValueError("an instruction has a place that is not in the file")
    if any(key not in loops for place in places for key in place.loops):
        raise ValueError("a place names a loop that is not in the file")
    return Table(
        module=file.module,
        num_devices=file.num_devices,
        loops=loops,
        ops={name: places[number] for name, number in file.ops.items()},
    )


def _place_of(value: Any) -> Place:
    fields = checked_json.check(value, dict[str, Any])
    kinds = {
        "phase": Literal[(*scopes.PHASES, UNKNOWN)],
        "role": Literal[ROLES],
        **dict.fromkeys(_TRUTHS, bool),
        "singles": dict[str, int],
        "place": int,
        "loops": tuple[str, ...],
    }
    return Place(**_checked(fields, kinds))


def _loop_of(value: Any) -> LoopPlace:
    fields = checked_json.check(value, dict[str, Any])
    units = Literal["layers", "ticks", "microbatches"]
    kinds = {"trip_count": int | None, "unit": units | None, "start": int, "step": int}
    return LoopPlace(**_checked(fields, kinds))


def _checked(fields: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    if fields.keys() != kinds.keys():
        raise ValueError(f"fields {sorted(fields)} instead of {sorted(kinds)}")
    return {
        name: checked_json.check(value, kinds[name], name)
        for name, value in fields.items()
    }


# ------------------------------------------------------------------- from the text


def table_of(text: str, sizes: AxisSizes) -> Table:
    """Find the place of each instruction of a compiled step.

    Args:
      text: output of `compiled.as_text()`.
      sizes: axis sizes of the mesh for which it was compiled.
    Raises:
      ValueError: the text cannot be read, or it has communication that `plan.hlo` does
        not understand.
    """
    module = parse(text)
    roles: dict[str, str] = {}
    for found in list_collectives(module, sizes):
        x, computation = found.site.instruction, found.site.computation
        names = [x.name, computation.done_of.get(x.name, x.name)]
        if x.opcode == "async-start":
            names += [y.name for y in module.computations[x.called[0]].instructions]
        roles |= dict.fromkeys(names, found.role)
    builder = _Builder(module, roles)
    builder.visit(module.entry, _NOWHERE, (), is_direct=True, is_chosen=False)
    return Table(
        module=module.name,
        num_devices=sizes.num_devices,
        ops=builder.ops,
        loops=builder.loops,
    )


class _Builder:
    """Walks through the computations that run."""

    def __init__(self, module: Module, roles: Mapping[str, str]) -> None:
        self.module, self.roles = module, roles
        self.ops: dict[str, Place] = {}
        self.loops: dict[str, LoopPlace] = {}

    def visit(
        self,
        name: str,
        caller: Scopes,
        loops: tuple[str, ...],
        *,
        is_direct: bool,
        is_chosen: bool,
    ) -> None:
        computation = self.module.computations[name]
        found = _resolve(computation, self.module, caller)
        for x in computation.instructions:
            at = found[x.name]
            place = self._place(x, at, loops, is_direct, is_chosen)
            self.ops.setdefault(x.name, place)
            chosen = is_chosen or bool(x.branches)
            for called, inside, direct in self._calls(x, at, loops, is_direct):
                self.visit(called, at, inside, is_direct=direct, is_chosen=chosen)

    def _place(
        self,
        x: Instruction,
        at: Scopes,
        loops: tuple[str, ...],
        is_direct: bool,
        is_chosen: bool,
    ) -> Place:
        return Place(
            phase=at.phase or UNKNOWN,
            role=self.roles.get(x.name, "compute"),  # pyright: ignore[reportArgumentType]
            is_recomputed=at.is_recomputed,
            is_slot=at.is_slot,
            is_container=x.opcode in _CONTAINERS,
            singles={**at.singles},
            place=at.place,
            loops=loops,
            is_direct=is_direct,
            is_chosen=is_chosen,
        )

    def _calls(
        self, x: Instruction, at: Scopes, loops: tuple[str, ...], is_direct: bool
    ) -> Iterator[tuple[str, tuple[str, ...], bool]]:
        """Yield the computations inside an instruction.

        Each comes with the loops around it, and whether it runs in each iteration.
        """
        if x.opcode == "while":
            self.loops[x.body] = _loop_place(x, at)
            for called in x.called:
                # The condition runs once more than the body does.
                is_body = called == x.body
                yield called, (*loops, x.body) if is_body else loops, is_body
        elif x.opcode == "async-start" and collective_kind(x, self.module):
            yield x.called[0], loops, is_direct
        else:
            for called in executed(x, self.module):
                yield called, loops, is_direct and not x.branches


def _loop_place(x: Instruction, at: Scopes) -> LoopPlace:
    own = at.own_loop
    if own is None or x.trip_count != own.count:
        return LoopPlace(trip_count=x.trip_count, unit=None, start=0, step=1)
    return LoopPlace(
        trip_count=x.trip_count, unit=own.unit, start=own.start, step=own.step
    )


def _resolve(
    computation: Computation, module: Module, caller: Scopes
) -> dict[str, Scopes]:
    """Return the scopes of each instruction: its own, or those of its neighbours."""
    found: dict[str, Scopes] = {}
    users = collections.defaultdict(list)
    for x in computation.instructions:
        at = _own(x, module)
        if at.phase is not None:
            found[x.name] = at
        for name in x.operands:
            users[name].append(x.name)
    for x in reversed(computation.instructions):
        known = [found[name] for name in users[x.name] if name in found]
        if x.name not in found and known:
            found[x.name] = known[0]
    for x in computation.instructions:
        known = [found[name] for name in x.operands if name in found]
        if x.name not in found:
            found[x.name] = known[0] if known else caller
    return found


def _own(x: Instruction, module: Module) -> Scopes:
    """Return the scopes of an instruction.

    A fusion without scopes takes those of its root or, if that has none, of the last
    instruction inside with scopes.
    """
    at = scopes.read(x.op_name)
    if at.phase is not None or not x.opcode.startswith("fusion"):
        return at
    inside = module.computations[x.called[0]]
    for y in (inside.root, *reversed(inside.instructions)):
        inner = scopes.read(y.op_name)
        if inner.phase is not None:
            return dataclasses.replace(inner, own_loop=None)
    return at
