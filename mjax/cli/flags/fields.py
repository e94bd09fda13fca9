"""Fields of dataclasses as flags: names, types, defaults, documentation.

Input: dataclasses, nested or not. Output: one `Flag` for each field that is not a
dataclass itself. The documentation is the string after a field, read from the source
when the help is printed.
"""

import ast
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

MISSING = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Positional:
    """Marks a field whose value has no flag: Annotated[str, Positional("PATH")]."""

    metavar: str
    """Name of the value in messages and in the help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One field that a command line may set."""

    path: tuple[str, ...]
    """Name of the field, after the names of the fields in which it is nested."""
    hint: Any
    """Type, without annotations."""
    default: Any
    """MISSING if the flag is required."""
    owner: type
    """Dataclass of the field."""
    part: int = 0
    """Index of the outermost dataclass among the parts of `reading.read_parts`."""
    positional: Positional | None = None
    """The mark of a positional value."""

    @functools.cached_property
    def name(self) -> str:
        """Name on the command line: --mesh.tp, or the metavar of a positional."""
        if self.positional is not None:
            return self.positional.metavar
        return f"--{'.'.join(self.path)}".replace("_", "-")

    @functools.cached_property
    def off_name(self) -> str | None:
        """The flag that turns a switch off: --mesh.no-gather-first."""
        if not self.is_switch:
            return None
        *groups, last = self.path
        return f"--{'.'.join([*groups, f'no_{last}'])}".replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag is a switch, without a value."""
        return self.hint is bool and self.default is not MISSING

    @property
    def group(self) -> str:
        """Name of the nested config, such as mesh; empty for a flag outside of one."""
        return self.path[0] if len(self.path) > 1 else ""

    @property
    def doc(self) -> str:
        """The string after the field, in one line."""
        return " ".join(docs(self.owner).get(self.path[-1], "").split())


def flags_of(
    cls: Any, default: Any = MISSING, *, part: int = 0, path: tuple[str, ...] = ()
) -> Iterator[Flag]:
    """Yield the flags of a dataclass in the order of its fields.

    Args:
      cls: the dataclass.
      default: an instance with the defaults; MISSING uses the defaults of the fields.
      part: `Flag.part` of the flags.
      path: names of the fields in which the dataclass is nested.
    """
    for field, hint in fields_of(cls):
        inner = default_of(field, default)
        positional = next((m for m in _marks(hint) if isinstance(m, Positional)), None)
        kind = bare(hint)
        names = (*path, field.name)
        if dataclasses.is_dataclass(kind):
            yield from flags_of(kind, inner, part=part, path=names)
            continue
        yield Flag(
            path=names,
            hint=kind,
            default=inner,
            owner=cls,
            part=part,
            positional=positional,
        )


def fields_of(cls: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Yield the fields of a dataclass with their types, annotations included."""
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            yield field, hints[field.name]


def default_of(field: dataclasses.Field[Any], instance: Any) -> Any:
    """Return the default of a field: the value of the instance, or the field's own."""
    if instance is not MISSING:
        return getattr(instance, field.name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def bare(hint: Any) -> Any:
    """Return a type without its annotations."""
    return typing.get_args(hint)[0] if _marks(hint) else hint


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def summary(cls: Any) -> str:
    """Return the first paragraph of the docstring of a dataclass, in one line."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else _paragraph(text)


def _paragraph(text: str) -> str:
    return " ".join(text.strip().partition("\n\n")[0].split())


@functools.cache
def docs(cls: Any) -> dict[str, str]:
    """Return the strings after the fields of a class and its bases, by field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= _classes_in(base.__module__).get(base.__qualname__, {})
    return found


@functools.cache
def _classes_in(module: str) -> dict[str, dict[str, str]]:
    """Return the strings after the fields of all top-level classes of a module."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return {}
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: _docs_in(node) for node in classes}


def _docs_in(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = text.value.value
    return found


def _marks(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)
