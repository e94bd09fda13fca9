"""Find the functions of mjax that traced each instruction, in the text of a module.

Input: the text of a compiled module, with the tables of source lines that XLA writes
before its computations (jax 0.11.2). Output: for each instruction, the functions of
mjax on the stack when it was traced, innermost first.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mjax.plan.hlo.parse import Instruction, Module

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"(\d+) (.*)$")
_NUMBERS = re.compile(r"(\w+)=(\d+)")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_PACKAGE = re.compile(r".*(?:^|/)mjax/")


class Frame(NamedTuple):
    """A function of mjax on the stack."""

    path: str
    """File of the function, relative to the package, such as pipeline/tick.py."""
    function: str
    """Qualified name without `<locals>` and `<lambda>`, such as Execution.tick."""


type Frames = Mapping[int, tuple[Frame, ...]]
"""Stacks of functions, the innermost first, by number of XLA's stack frame."""


def read_frames(text: str) -> Frames:
    """Read the stacks of a module, without functions of other packages.

    Args:
      text: text of the module. Without its tables there are no stacks.
    """
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    rows: dict[int, str] = {}
    for line in text.splitlines():
        if line in tables:
            rows = tables[line]
        elif row := _ROW.match(line):
            rows[int(row[1])] = row[2]
        elif line.startswith(("%", "ENTRY")):
            break
    locations = {
        n: _location(row, tables) for n, row in tables["FileLocations"].items()
    }
    stacks: dict[int, tuple[Frame, ...]] = {}
    # A caller precedes its callees. XLA counts callers from 1; 0 means no caller.
    for number, row in sorted(tables["StackFrames"].items()):
        fields = dict(_NUMBERS.findall(row))
        own = locations[int(fields["file_location_id"])]
        callers = stacks.get(int(fields.get("parent_frame_id", 0)) - 1, ())
        stacks[number] = callers if own is None else (own, *callers)
    return stacks


def frames_of(x: Instruction, module: Module, frames: Frames) -> tuple[Frame, ...]:
    """Return the stack of an instruction.

    A fusion without a stack gets the stack of its last instruction that has one.
    """
    for y in _candidates(x, module):
        found = _FRAME_ID.search(y.attributes.get("metadata", ""))
        if found and (stack := frames.get(int(found[1]), ())):
            return stack
    return ()


def _candidates(x: Instruction, module: Module) -> Iterator[Instruction]:
    yield x
    for name in x.called:
        yield from reversed(module.computations[name].instructions)


def _location(row: str, tables: Mapping[str, Mapping[int, str]]) -> Frame | None:
    """Return the function of a location; None if it is not in mjax."""
    fields = dict(_NUMBERS.findall(row))
    path = tables["FileNames"][int(fields["file_name_id"])]
    function = tables["FunctionNames"][int(fields["function_name_id"])]
    below = _PACKAGE.sub("", path.strip('"'))
    if below == path.strip('"'):
        return None
    words = [w for w in function.strip('"').split(".") if not w.startswith("<")]
    return Frame(below, ".".join(words))
