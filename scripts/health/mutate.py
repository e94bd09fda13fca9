"""Plant faults in the checks of hosts, and test whether their cases detect them.

    python -m scripts.health.mutate [MODULE ...]

For each check: comparisons that are off by one, numbers a thousand times as large (a
wrong unit), wrong fields, inverted conditions and removed branches, in the function
that judges the host, and in the functions of the same module that it calls. A fault is
caught if a case of that check then fails, or the module does. Writes
docs/benchmarks/check_mutations.md for all modules; ends with 1 if a check has fewer
than three faults that are caught.
"""

import argparse
import ast
import copy
import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from mjax.health.check import Check
from mjax.health.checks import table
from scripts.evidence import Table, commit, write_page
from tests.health import cases

_OFF_BY_ONE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_WRONG_UNIT = 1000
MIN_CAUGHT = 3


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault in a function."""

    function: str
    line: int
    what: str
    tree: ast.Module
    """The module's source with the fault."""


def module_of(check: Check) -> types.ModuleType:
    """Return the module that has the function of a check."""
    return importlib.import_module(check.judge.__module__)


def _called(tree: ast.Module, name: str) -> set[str]:
    """Return a function and the functions of its module that it calls."""
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    found, new = set(), {name} & functions.keys()
    while new:
        found |= new
        names = {
            node.id
            for one in new
            for node in ast.walk(functions[one])
            if isinstance(node, ast.Name)
        }
        new = (names & functions.keys()) - found
    return found


def _judge_name(check: Check) -> str:
    """Return the name of the function, or of the function that a partial wraps."""
    function: Any = check.judge
    while hasattr(function, "func"):
        function = function.func
    return inspect.unwrap(function).__name__


def faults(check: Check, tree: ast.Module) -> Iterator[Fault]:
    """Plant one fault after the other."""
    names = _called(tree, _judge_name(check))
    for index, node in enumerate(ast.walk(tree)):
        if not (isinstance(node, ast.FunctionDef) and node.name in names):
            continue
        for place, inner in enumerate(ast.walk(node)):
            for what in _changes(inner):
                planted = copy.deepcopy(tree)
                function = next(_nth(ast.walk(planted), index))
                _change(next(_nth(ast.walk(function), place)))
                line = getattr(inner, "lineno", node.lineno)
                yield Fault(node.name, line, what, planted)


def _nth(nodes: Iterator[ast.AST], number: int) -> Iterator[ast.AST]:
    for index, node in enumerate(nodes):
        if index == number:
            yield node


def _changes(node: ast.AST) -> list[str]:
    """Return the possible faults of a node: none, or those of `_change`."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = _OFF_BY_ONE[type(node.ops[0])].__name__
        return [f"{type(node.ops[0]).__name__} becomes {new}"]
    number = _number(node)
    if number is not None:
        return [f"{number} becomes {number * _WRONG_UNIT + 1}"]
    if isinstance(node, ast.If) and not node.orelse:
        return ["the branch is left out"]
    if isinstance(node, ast.Call) and _is_field(node):
        return ["another field is read"]
    return []


def _number(node: ast.AST) -> int | float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value


def _is_field(node: ast.Call) -> bool:
    """Return whether a call reads a field by a literal name."""
    is_name = [
        isinstance(a, ast.Constant) and isinstance(a.value, str) for a in node.args
    ]
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else ""
    name = name or (function.id if isinstance(function, ast.Name) else "")
    return any(is_name) and name not in ("UnreadableError", "failed", "unknown", "join")


def _change(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops = [_OFF_BY_ONE[type(node.ops[0])]()]
    elif isinstance(node, ast.Constant):
        node.value = (_number(node) or 0) * _WRONG_UNIT + 1
    elif isinstance(node, ast.If):
        node.test = ast.Constant(value=False)
    elif isinstance(node, ast.Call):
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                argument.value += "_of_another"
                return


def is_caught(check: Check, fault: Fault) -> bool:
    """Return whether a case of the check detects the fault."""
    name = module_of(check).__name__
    module = types.ModuleType(name)
    module.__file__ = inspect.getfile(module_of(check))
    before = sys.modules[name]
    sys.modules[name] = module
    try:
        code = compile(ast.fix_missing_locations(fault.tree), module.__file__, "exec")
        exec(code, module.__dict__)
        planted = next(c for c in module.CHECKS if c.name == check.name)
        return not all(
            case.is_met_by(case.play(planted)) for case in cases.of_check(check.name)
        )
    except Exception:
        return True
    finally:
        sys.modules[name] = before


def by_group(rows: Sequence[Sequence[str]]) -> Table:
    """Sum up the rows (check, fixtures, cases, faults, caught) of each group."""
    groups: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        groups.setdefault(row[0].strip("`").partition(".")[0], []).append(row)
    sums = [
        [
            *(f"`{group}`", str(len(checks))),
            *(str(sum(int(row[k]) for row in checks)) for k in (3, 4)),
            str(min(int(row[4]) for row in checks)),
        ]
        for group, checks in groups.items()
    ]
    return Table(
        title="By group",
        text="The last column has the check of which the fewest faults are caught.",
        header=["group", "checks", "faults", "caught", "fewest caught of a check"],
        rows=sums,
    )


def main() -> int:
    """Plant all faults, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help="last part of their names")
    args = parser.parse_args()
    rows, is_short = [], False
    for check in table.CHECKS:
        module = module_of(check)
        short = module.__name__.rpartition(".")[2]
        if args.modules and short not in args.modules:
            continue
        tree = ast.parse(inspect.getsource(module))
        found = [(fault, is_caught(check, fault)) for fault in faults(check, tree)]
        caught = sum(is_so for _, is_so in found)
        is_short |= caught < MIN_CAUGHT
        files = {case.file for case in cases.of_check(check.name)}
        num_cases = len(cases.of_check(check.name))
        rows.append(
            [
                f"`{check.name}`",
                *map(str, (len(files), num_cases, len(found), caught)),
            ]
        )
        for fault, is_so in found:
            if not is_so:
                where = f"{short}.{fault.function}, line {fault.line}"
                print(f"{check.name}: not caught: {where}: {fault.what}")
        print(*rows[-1], "TOO FEW" if caught < MIN_CAUGHT else "", flush=True)
    if not args.modules:
        faulty, caught = (sum(int(row[k]) for row in rows) for k in (3, 4))
        text = (
            f"Commit {commit()}. {len(rows)} checks; {caught} of {faulty} planted "
            "faults are caught. Faults that are not caught change no output that the "
            "cases check: they are in the text of a reason, or in a guard against a "
            "format that another guard refuses too."
        )
        header = ["check", "fixtures", "cases", "faults", "caught"]
        page = Table(
            title="Planted faults",
            text=text,
            header=header,
            rows=rows,
            file="check_mutations",
        )
        command = "python -m scripts.health.mutate"
        pages = [page, by_group(rows)]
        print(write_page("check_mutations", "Checks of hosts", command, pages))
    return int(is_short)


if __name__ == "__main__":
    sys.exit(main())
