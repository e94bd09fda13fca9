"""Convert words of a command line to values of a type; describe types.

Input: the type of a field and the words after its flag. Output: the value, or a
ValueError with the flag as typed, the words, and the fix.
"""

import collections.abc
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mjax.cli.flags.fields import alternatives
from mjax.cli.flags.words import nearest

_SHOWN_CHARS = 60
_LISTS = (tuple, list, collections.abc.Sequence)
_BOOLEANS = {"true": True, "false": False}


def num_words(hint: Any) -> int | None:
    """Return the number of words of a value; None if any number is valid."""
    for kind in alternatives(hint):
        if (typing.get_origin(kind) or kind) in _LISTS:
            inner = typing.get_args(kind)
            is_fixed = typing.get_origin(kind) is tuple and inner[-1] is not Ellipsis
            return len(inner) if is_fixed else None
    return 1


def value_of(words: Sequence[str], hint: Any, flag: str) -> Any:
    """Convert the words after a flag to a value.

    Args:
      words: words after the flag; `num_words` gives their number.
      hint: type of the value.
      flag: as typed, for messages.
    Raises:
      ValueError: they are not a value of the type.
    """
    kinds = alternatives(hint)
    if types.NoneType in kinds and [*words] == ["None"]:
        return None
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        if origin in _LISTS:
            inner = typing.get_args(kind) or (str, ...)
            each = inner if num_words(kind) is not None else inner[:1] * len(words)
            found = (_value(word, h, flag) for word, h in zip(words, each, strict=True))
            return list(found) if origin is list else tuple(found)
    return _value(words[0], hint, flag)


def _value(word: str, hint: Any, flag: str) -> Any:
    """Convert one word to a value, of the strictest type that accepts it."""
    kinds = alternatives(hint)
    if types.NoneType in kinds and word == "None":
        return None
    choices = choices_of(hint)
    for choice in choices:
        if word == str(choice):
            return choice
    for kind in (bool, int, float):
        if kind in kinds:
            try:
                return _parsed(word, kind)
            except (ValueError, OverflowError):
                pass
    if Path in kinds:
        return Path(word)
    if str in kinds:
        return word
    raise ValueError(_refusal(word, kinds, [str(c) for c in choices], flag))


def _parsed(word: str, kind: type) -> Any:
    if kind is bool:
        if word.lower() not in _BOOLEANS:
            raise ValueError
        return _BOOLEANS[word.lower()]
    return kind(word)


def _refusal(word: str, kinds: Sequence[Any], choices: list[str], flag: str) -> str:
    """Return the error for a word that is not a valid value, with valid values."""
    absent = ["None"] if types.NoneType in kinds else []
    if choices:
        return (
            f"unknown {flag} {shown(word)}; the nearest is "
            f"{nearest(word.lower(), choices)} (of {', '.join([*choices, *absent])})"
        )
    if bool in kinds:
        names = ["True", "False", "None"] if absent else ["True", "False"]
        listed = f"{', '.join(names[:-1])} or {names[-1]}"
        return f"{flag} must be {listed}, got {shown(word)}"
    if float in kinds:
        return f"{flag} must be a number, got {shown(word)}{_number(word, float)}"
    if int in kinds:
        return f"{flag} must be a whole number, got {shown(word)}{_number(word, int)}"
    raise NotImplementedError(f"{flag} has a type that no flag can give: {kinds}")


def _number(word: str, kind: type) -> str:
    """Return a suggestion for the number that a word likely means, or ""."""
    plain = word.strip().replace("\u2212", "-").replace("\u2013", "-")
    if kind is int or plain.count(",") > 1:
        plain = plain.replace(",", "")
    else:
        plain = plain.replace(",", ".")
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}.get(plain[-1:].lower(), 1)
    try:
        number = float(plain if scale == 1 else plain[:-1]) * scale
        if kind is float:
            return f"; write {number:g}"
        is_exact = (scale == 1 and "," in word) or scale > 1 or plain != word.strip()
        return f"; {'write' if is_exact else 'the nearest is'} {round(number)}"
    except (ValueError, OverflowError):
        return ""


def choices_of(hint: Any) -> list[Any]:
    """Return the possible values, if the type lists them."""
    return [
        choice
        for kind in alternatives(hint)
        if typing.get_origin(kind) is Literal
        for choice in typing.get_args(kind)
    ]


def kind_of(hint: Any) -> str:
    """Describe the expected value in a few words, for messages: a whole number."""
    kinds = alternatives(hint)
    for kind in kinds:
        if (typing.get_origin(kind) or kind) in _LISTS:
            inner = (typing.get_args(kind) or (str,))[0]
            return f"{_in_words(alternatives(inner))}, or several"
    return _in_words(kinds)


def _in_words(kinds: Sequence[Any]) -> str:
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    names = {int: "a whole number", float: "a number", Path: "a path"}
    names[bool] = "True or False"
    return next((names[kind] for kind in kinds if kind in names), "a text")


def metavar(hint: Any) -> str:
    """Name a type in the help: INT, {a,b}, PATH..., INT|None."""
    kinds = alternatives(hint)
    names = []
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        inner = typing.get_args(kind)
        if origin in _LISTS:
            one = metavar(inner[0]) if inner else "TEXT"
            count = num_words(kind)
            names.append(f"{one} ..." if count is None else " ".join([one] * count))
        elif origin is Literal:
            names.append(f"{{{','.join(map(str, inner))}}}")
        elif kind is types.NoneType:
            names.append("None")
        else:
            texts = {int: "INT", float: "NUMBER", Path: "PATH", bool: "{True,False}"}
            names.append(texts.get(kind, "TEXT"))
    return "|".join(names)


def shown(word: str) -> str:
    """Return a word as messages show it: quoted if unusual, and shortened if long."""
    if not word or not word.isprintable() or word != word.strip():
        word = repr(word)
    return word if len(word) <= _SHOWN_CHARS else f"{word[:_SHOWN_CHARS]}..."
