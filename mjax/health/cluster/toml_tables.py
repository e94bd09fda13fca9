"""Convert TOML to frozen dataclasses, and report all errors of the text at once.

Input: tables as tomllib returns them, and a dataclass whose fields are the keys.
Output: an instance of it, and problems: unknown keys with the nearest known one,
missing keys, values of another type. Each has its path in the file, such as
`hosts[0].nics[1].rail`. `mjax.checked_json` does the same for JSON from programs, but
stops at the first error; a person who writes a file needs all of them.
"""

import dataclasses
import functools
import typing
from typing import Any, Literal

from mjax.cli.flags import nearest

UNKNOWN_KEY = "unknown key"
"""Kind of an error after which all tables are still usable."""
_SHOWN_CHARS = 60
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """An error in a file."""

    path: str
    """Path, such as `cables[3].ends[1]`."""
    kind: str
    """Kind of error in a few words, the same for all errors of a kind."""
    text: str
    """What is wrong, with the value, and the fix."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class _Absent:
    """Placeholder for a value of the wrong type, whose error has been reported."""


_ABSENT = _Absent()


def build(cls: Any, table: Any, path: str, problems: list[Problem]) -> Any:
    """Convert a table to a dataclass.

    Args:
      cls: dataclass whose fields are of type str, int, bool, Literal or a dataclass, or
        None, tuples or dicts of these. A field named `path` is not a key: it is set to
        the path of the table, for later messages.
      table: as tomllib returns it.
      path: path of the table in its file.
      problems: list to which errors are appended.
    Returns:
      An instance; None if a key without a default is missing or wrong. If a key with a
      default has a wrong value, the default is used, so that the rest can be checked
      too.
    """
    if not isinstance(table, dict):
        problems.append(_mismatch(path, "a table", table))
        return None
    hints = {name: hint for name, hint in _hints(cls).items() if name != "path"}
    for key in table:
        if key not in hints:
            near = nearest(key, hints)
            text = f"unknown key; did you mean {near}? Known keys: {', '.join(hints)}"
            problems.append(
                Problem(path=_below(path, key), kind=UNKNOWN_KEY, text=text)
            )
    found: dict[str, Any] = {}
    is_whole = True
    for field in dataclasses.fields(cls):
        value: Any = _ABSENT
        if field.name == "path":
            value = path
        elif field.name in table:
            inner = _below(path, field.name)
            value = _value(table[field.name], hints[field.name], inner, problems)
        elif _is_required(field):
            text = f"the key {field.name} is absent; add it"
            problems.append(Problem(path=path, kind="absent key", text=text))
        if value is not _ABSENT:
            found[field.name] = value
        elif _is_required(field):
            is_whole = False
    return cls(**found) if is_whole else None


_hints = functools.cache(typing.get_type_hints)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _value(value: Any, hint: Any, path: str, problems: list[Problem]) -> Any:
    """Return a value converted to its type, or `_ABSENT`."""
    if dataclasses.is_dataclass(hint):
        made = build(hint, value, path, problems)
        return _ABSENT if made is None else made
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _list(value, inner, path, problems)
    if origin is dict:
        return _dict(value, inner[1], path, problems)
    if origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
        near = f"; did you mean {nearest(value, inner)}?" if _is_text(value) else ""
        problems.append(_mismatch(path, f"one of {', '.join(inner)}", value, near))
        return _ABSENT
    kinds = [kind for kind in inner or (hint,) if kind is not type(None)]
    if type(value) in kinds:  # true is not an integer
        return value
    problems.append(_mismatch(path, " or ".join(_NAMES[k] for k in kinds), value))
    return _ABSENT


def _list(value: Any, inner: Any, path: str, problems: list[Problem]) -> Any:
    """Return a list as a tuple, or `_ABSENT` if it is invalid.

    Invalid items are dropped if the list may have any length. A list of fixed length is
    invalid if an item is.
    """
    if not isinstance(value, list):
        problems.append(_mismatch(path, "a list", value))
        return _ABSENT
    if inner[-1] is Ellipsis:
        kinds = [inner[0]] * len(value)
    elif len(value) == len(inner):
        kinds = list(inner)
    else:
        problems.append(_mismatch(path, f"a list of {len(inner)} items", value))
        return _ABSENT
    items = [
        _value(item, kind, f"{path}[{index}]", problems)
        for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
    ]
    if inner[-1] is not Ellipsis and _ABSENT in items:
        return _ABSENT
    return tuple(item for item in items if item is not _ABSENT)


def _dict(value: Any, kind: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, dict):
        problems.append(_mismatch(path, "a table", value))
        return _ABSENT
    found = {
        key: _value(item, kind, _below(path, f'"{key}"'), problems)
        for key, item in value.items()
    }
    return {key: item for key, item in found.items() if item is not _ABSENT}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _mismatch(path: str, expected: str, value: Any, hint: str = "") -> Problem:
    shown = repr(value)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}..."
    text = f"must be {expected}, got {shown}{hint}"
    return Problem(path=path, kind="type", text=text)
