"""Parse JSON from untrusted files and check it against a type.

Input: a text and the type of its value. Output: the value, with lists converted to
tuples and objects to dataclasses as the type requires. Other input raises a ValueError
with the position in the text and the value there. Other modules parse only JSON that
the same process has written.
"""

import collections.abc
import dataclasses
import functools
import json
import types
import typing
from typing import Any, Literal

_MAX_DEPTH = 64
"""Maximum depth of nesting: more than twice that of any file read here, and small
enough to recurse over."""
_SHOWN_CHARS = 60


def read(text: str | bytes, kind: Any) -> Any:
    """Parse a text and check its value.

    Args:
      text: JSON; bytes are UTF-8.
      kind: None, bool, int, float, str, Any, Literal, dataclasses, and lists, tuples,
        dicts and unions of these. An int is accepted as a float; true is not
        accepted as an int.
    Raises:
      ValueError: the text is not JSON, it is nested too deeply, or its value has
        another type. The message is one line.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if _is_deep(value):
        raise ValueError("nested too deeply")
    return check(value, kind)


def check(value: Any, kind: Any, name: str = "") -> Any:
    """Convert a parsed value to a type; raises as `read`.

    Args:
      value: as `json.loads` returns it.
      kind: as for `read`.
      name: name of the value, for messages.
    """
    try:
        return _checked(value, kind, name)
    except _MismatchError as error:
        raise ValueError(str(error)) from None


class _MismatchError(Exception):
    """A value has the wrong type."""

    def __init__(self, name: str, expected: str, value: Any) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}..."
        super().__init__(f"{name or 'the value'} must be {expected}, got {shown}")
        self.name, self.expected = name, expected


_SCALARS = {
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    type(None): ((type(None),), "null"),
}


def _checked(value: Any, kind: Any, name: str) -> Any:
    if kind is Any:
        return value
    if kind in _SCALARS:
        return _scalar(value, kind, name)
    if dataclasses.is_dataclass(kind):
        return _fields(value, kind, name)
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _alternative(value, inner, name)
    if origin is Literal:
        if not any(
            value is x or (value == x and type(value) is type(x)) for x in inner
        ):
            raise _MismatchError(name, f"one of {', '.join(map(repr, inner))}", value)
        return value
    if origin in (dict, collections.abc.Mapping):
        if not isinstance(value, dict):
            raise _MismatchError(name, "an object", value)
        each = inner[1] if inner else Any
        return {
            k: _checked(v, each, f"{name}.{k}".lstrip(".")) for k, v in value.items()
        }
    return _items(value, origin, inner, name)


def _scalar(value: Any, kind: Any, name: str) -> Any:
    accepted, expected = _SCALARS[kind]
    if type(value) not in accepted:
        raise _MismatchError(name, expected, value)
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _MismatchError(name, "a number that a float holds", value) from None
    return value


def _alternative(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    """Return the value as the first matching type."""
    errors: list[_MismatchError] = []
    for kind in kinds:
        try:
            return _checked(value, kind, name)
        except _MismatchError as error:
            errors.append(error)
    for error in errors:
        if error.name != name:  # the type matches, but an item inside does not
            raise error
    raise _MismatchError(name, " or ".join(e.expected for e in errors), value)


def _items(value: Any, origin: Any, inner: tuple[Any, ...], name: str) -> Any:
    """Check a list; a tuple type without an ellipsis has one type per item."""
    if not isinstance(value, list):
        raise _MismatchError(name, "a list", value)
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            raise _MismatchError(name, f"a list of {len(inner)} items", value)
        kinds = inner
    else:
        kinds = (inner[0] if inner else Any,) * len(value)
    pairs = zip(value, kinds, strict=True)
    found = (_checked(x, kind, f"{name}[{i}]") for i, (x, kind) in enumerate(pairs))
    return tuple(found) if origin is tuple else list(found)


_hints = functools.cache(typing.get_type_hints)


def _fields(value: Any, kind: Any, name: str) -> Any:
    """Convert an object to a dataclass; fields with a default may be absent."""
    if not isinstance(value, dict):
        raise _MismatchError(name, "an object", value)
    hints = _hints(kind)
    for key in value:
        if key not in hints:
            raise _MismatchError(name, f"an object of {', '.join(hints)}", value)
    found = {
        k: _checked(v, hints[k], f"{name}.{k}".lstrip(".")) for k, v in value.items()
    }
    for field in dataclasses.fields(kind):
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if field.name not in found and not has_default:
            raise _MismatchError(name, f"an object with {field.name}", value)
    return kind(**found)


def _is_deep(value: Any) -> bool:
    """Return whether a value is nested too deeply, without recursion."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [x for x in level if isinstance(x, dict | list)]
        if not nested:
            return False
        level = [y for x in nested for y in (x.values() if isinstance(x, dict) else x)]
    return True
