"""Parse and check the query of a request.

Enters: the query of a request. Leaves: numbers and choices, or a BadQueryError that
names the parameter, the value and what is allowed.
"""

from collections.abc import Mapping, Sequence

_MOST_NUMBERS = 100_000
"""Entries of a list; chosen: more than there are ranks."""
_LARGEST = 2**53
"""Whole numbers that JavaScript holds exactly (ECMA-262, MAX_SAFE_INTEGER + 1)."""


class BadQueryError(ValueError):
    """The query of a viewer is invalid."""


class Query:
    """The parameters of a request; of several with one name, the last counts."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """Take the parameters as they were written."""
        self._given = given

    def text(self, name: str) -> str | None:
        """Return a parameter; None if it is absent or empty."""
        return self._given.get(name) or None

    def whole(self, name: str, least: int = 0, most: int = _LARGEST) -> int | None:
        """Return a whole number; None if it is absent."""
        text = self.text(name)
        return None if text is None else _whole(name, text, least, most)

    def wholes(self, name: str) -> list[int] | None:
        """Return whole numbers between commas; None if the parameter is absent."""
        text = self.text(name)
        if text is None:
            return None
        words = text.split(",")
        if len(words) > _MOST_NUMBERS:
            raise BadQueryError(
                f"{name} has {len(words)} numbers; give at most {_MOST_NUMBERS}"
            )
        return [_whole(name, word, 0, _LARGEST) for word in words]

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return one of some words; the first if the parameter is absent."""
        text = self.text(name)
        if text is None:
            return choices[0]
        if text not in choices:
            raise BadQueryError(
                f"{name} must be one of {', '.join(choices)}, got {text[:100]!r}"
            )
        return text


def _whole(name: str, text: str, least: int, most: int) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= 16
    if not is_number or not least <= int(text) <= most:
        raise BadQueryError(
            f"{name} must be a whole number from {least} to {most}, got {text[:100]!r}"
        )
    return int(text)
