"""Compile a regular expression, or say why it may take too long on a hostile line.

Input: the text of a pattern. Output: a compiled pattern whose cost on a line of
`logs.MAX_LINE_BYTES` is at most quadratic. Python's `re` backtracks without a time
limit, and anyone who can write to a log chooses the matched text. So the form of the
pattern is checked: no choice inside a repeat (exponential cost), and a limited number
of repeats that can match the same text (polynomial cost).

Source of the two forms: Davis et al. 2018, "The impact of regular expression denial of
service (ReDoS) in practice", ESEC/FSE 2018. The rules here are stricter:
they refuse some safe patterns, and the message says how to rewrite them.
"""

import re
from collections.abc import Iterator
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_LONG = 16
"""Maximum count of a short repeat. Matching 16 positions of a line costs nothing."""
_MAX_DEGREE = 2
"""Maximum degree of the polynomial cost. 4096 squared is 17 million steps, which take
about 0.1 s."""
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_ALPHABET = frozenset(map(chr, range(128))) | {"\xe9"}  # one letter beyond ASCII
_ADVICE = "write a class that leaves out what follows, such as [^ ]+ or \\d+"
_CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern that is safe to search for in any line.

    Raises:
      ValueError: it is invalid, matches the empty text, or may take too long.
    """
    try:
        regex = re.compile(pattern)
        tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern {pattern!r} is invalid: {error}") from error
    if regex.flags & ~re.UNICODE:
        raise ValueError(
            f"pattern {pattern!r} sets a flag such as (?i); spell the cases out"
        )
    if regex.search(""):
        raise ValueError(f"pattern {pattern!r} matches an empty line, so every line")
    for atoms in _paths(tree, pattern):
        _check_degree(atoms, pattern)
    return regex


class _Atom(NamedTuple):
    """One step of a match."""

    characters: frozenset[str]
    """Characters that it matches; {""} stands for the start of the line."""
    is_long: bool = False
    """Whether it is a repeat that may match more than `_LONG` times."""
    is_optional: bool = False


_START = _Atom(frozenset({""}))


def _check_degree(atoms: list[_Atom], pattern: str) -> None:
    """Raise if too many long repeats in a sequence of atoms can match the same text."""
    is_anchored = atoms[:1] == [_START]
    longest = length = 0
    reach: frozenset[str] = frozenset()
    for atom in atoms:
        shares = bool(reach & atom.characters)
        if atom.is_long:
            length = length + 1 if shares else max(length, 1)
            reach = reach | atom.characters
            longest = max(longest, length)
        if not shares and not atom.is_optional and atom is not _START:
            # No earlier repeat can match across this atom.
            length, reach = (1, atom.characters) if atom.is_long else (0, frozenset())
    if longest + (not is_anchored) > _MAX_DEGREE:
        raise ValueError(
            f"pattern {pattern!r} may take minutes on one line: {longest} repeats "
            f"without an end can match the same text; {_ADVICE}"
        )


_MAX_PATHS = 64
"""Maximum number of combinations of alternatives. A rule needs a few."""


def _paths(tree: Any, pattern: str) -> list[list[_Atom]]:
    """Return each path through a pattern as a sequence of atoms."""
    paths: list[list[_Atom]] = [[]]
    for operation, value in tree:
        if operation is codes.BRANCH:
            steps = [path for branch in value[1] for path in _paths(branch, pattern)]
        elif operation is codes.SUBPATTERN:
            steps = _paths(value[-1], pattern)
        elif operation is codes.ATOMIC_GROUP:
            steps = _paths(value, pattern)
        elif operation in _REPEATS:
            steps = _repeat(value[0], value[1], value[2], pattern)
        elif operation is codes.AT:
            is_start = value in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
            steps = [[_START] if is_start else []]
        else:
            steps = [[_Atom(_characters(operation, value, pattern))]]
        paths = [path + step for path in paths for step in steps]
        if len(paths) > _MAX_PATHS:
            raise ValueError(f"pattern {pattern!r} has too many alternatives")
    return paths


def _repeat(least: int, most: int, body: Any, pattern: str) -> list[list[_Atom]]:
    if most > 1 and any(_choices(body)):
        raise ValueError(
            f"pattern {pattern!r} has a choice or a repeat inside a repeat, which may "
            f"take hours on one line; {_ADVICE}"
        )
    once = _paths(body, pattern)
    if most <= _LONG:
        return [[], *once] if least == 0 else once
    taken = frozenset[str]().union(*(atom.characters for path in once for atom in path))
    return [[_Atom(taken - {""}, is_long=True, is_optional=least == 0)]]


def _choices(tree: Any) -> Iterator[bool]:
    """Yield True for each choice in a pattern."""
    for operation, value in tree:
        if operation is codes.BRANCH:
            yield True
        elif operation in _REPEATS:
            if value[0] != value[1]:
                yield True
            yield from _choices(value[2])
        elif operation is codes.SUBPATTERN:
            yield from _choices(value[-1])
        elif operation is codes.ATOMIC_GROUP:
            yield from _choices(value)


def _characters(operation: Any, value: Any, pattern: str) -> frozenset[str]:
    """Return the characters of the alphabet that an atom matches."""
    if operation is codes.LITERAL:
        return frozenset({chr(value) if value < 128 else "\xe9"})
    if operation is codes.NOT_LITERAL:
        return _ALPHABET - {chr(value)}
    if operation is codes.ANY:
        return _ALPHABET - {"\n"}
    if operation is codes.IN:
        found: frozenset[str] = frozenset()
        for kind, item in value:
            if kind is codes.RANGE:
                found |= {c for c in _ALPHABET if item[0] <= ord(c) <= item[1]}
                found |= {"\xe9"} if item[1] >= 128 else set()
            elif kind is codes.CATEGORY:
                category = re.compile(_CATEGORIES[item])
                found |= {c for c in _ALPHABET if category.fullmatch(c)}
            elif kind is codes.LITERAL:
                found |= _characters(kind, item, pattern)
        is_negated = value[0][0] is codes.NEGATE
        return (_ALPHABET - found) | {"\xe9"} if is_negated else found
    raise ValueError(
        f"pattern {pattern!r} uses {str(operation).lower()}; back references, "
        "conditions and lookarounds are not allowed in rules"
    )
