"""The messages of refusals and failures, read from the source code.

Input: the folder of a package. Output: each error message, its module and the class of
the error. Nothing is imported: the text is that of the call, with the expressions of an
f-string in braces.
"""

import ast
import builtins
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message.

    Attributes:
      module: with dots.
      error: class of the error.
      base: the built-in class that it derives from.
      text: the message, with expressions in braces.
    """

    module: str
    error: str
    base: str
    text: str


def messages(package: Path) -> list[Message]:
    """Return the messages of a package, by module and line, each once.

    A run that gives up says why in its log, which counts as a RuntimeError. An error
    that forwards another one's text is not listed, nor is an AssertionError, which is
    for developers.

    Args:
      package: its folder; packages below it are included.
    """
    trees = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): ast.parse(
            path.read_text()
        )
        for path in sorted(package.rglob("*.py"))
    }
    bases = _bases([*trees.values()])
    found: dict[Message, None] = {}
    for module, tree in trees.items():
        constants = _constants(tree)
        for call, function in _calls(tree, tree):
            error = ast.unparse(call.func).rpartition(".")[2]
            if error == "say" and "gave up" in ast.unparse(call.args[0]):
                error = "RuntimeError"
            base = bases.get(error)
            if base is None or base == "AssertionError":
                continue
            given = [*call.args, *(word.value for word in call.keywords)]
            texts = [text for arg in given for text in _texts(arg, function, tree)]
            for text in texts:
                text = _filled(text, constants)
                if len(literal(text).split()) > 1:
                    message = Message(module=module, error=error, base=base, text=text)
                    found[message] = None
    return list(found)


def literal(text: str) -> str:
    """Return a message without the expressions in it."""
    return re.sub(r"\{[^{}]*\}", " ", text)


def _bases(trees: Sequence[ast.Module]) -> dict[str, str]:
    """Return all classes of errors, each with its built-in base."""
    bases = {
        name: name
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    classes = [
        (node.name, ast.unparse(node.bases[0]).rpartition(".")[2])
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases
    ]
    for _ in range(4):  # deeper than any class of errors
        bases |= {name: bases[base] for name, base in classes if base in bases}
    return bases


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the text constants of a module."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))
            ):
                found[name] = value
    return found


def _filled(text: str, constants: Mapping[str, str]) -> str:
    """Replace the names of constants in a message by their texts."""
    for name, value in constants.items():
        text = text.replace("{" + name + "}", value)
    return text


def _calls(
    node: ast.AST, function: _Function | ast.Module
) -> Iterator[tuple[ast.Call, _Function | ast.Module]]:
    """Yield each call below a node with its enclosing function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, function
        inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _calls(child, child if inner else function)


def _texts(node: ast.expr, function: ast.AST, tree: ast.Module) -> list[str]:
    """Return the possible texts of an expression, one for each alternative."""
    match node:
        case ast.Constant(value=value):
            return [value] if isinstance(value, str) else []
        case ast.JoinedStr(
            values=[prefix, ast.FormattedValue(value=ast.Name() as name)]
        ):
            return [_piece(prefix) + text for text in _texts(name, function, tree)]
        case ast.JoinedStr(values=values):
            return ["".join(map(_piece, values))]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [
                a + b
                for a in _texts(left, function, tree)
                for b in _texts(right, function, tree)
            ]
        case ast.IfExp(body=body, orelse=other):
            return _texts(body, function, tree) + _texts(other, function, tree)
        case ast.Name(id=name):
            values = [v for v in _assigned(name, function) if not _uses(v, name)]
            if values:
                return [text for v in values for text in _texts(v, function, tree)]
        case ast.Call(func=ast.Name(id=name)):
            for made in tree.body:
                if isinstance(made, ast.FunctionDef) and made.name == name:
                    returned = [n for n in ast.walk(made) if isinstance(n, ast.Return)]
                    return [
                        text
                        for n in returned
                        if n.value is not None and not _uses(n.value, name)
                        for text in _texts(n.value, made, tree)
                    ]
    return ["{" + ast.unparse(node) + "}"]


def _piece(value: ast.expr) -> str:
    if isinstance(value, ast.FormattedValue):
        return "{" + ast.unparse(value.value) + "}"
    return str(ast.literal_eval(value))


def _assigned(name: str, function: ast.AST) -> Iterator[ast.expr]:
    """Yield the values assigned to a name in a function."""
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.NamedExpr(target=ast.Name(id=target), value=value)
            ):
                if target == name:
                    yield value


def _uses(node: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))
