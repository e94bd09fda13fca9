"""Parse and check the query of a request.

Input: the query of a request. Output: numbers and choices, or a BadQueryError with the
parameter, its value and the allowed values.
"""

from collections.abc import Mapping, Sequence

_MOST_NUMBERS = 100_000
"""Maximum length of a list. It is more than there are ranks."""
_LARGEST = 2**53
"""Limit of the whole numbers that JavaScript holds exactly (ECMA-262, MAX_SAFE_INTEGER
+ 1)."""


class BadQueryError(ValueError):
    """A viewer sent an invalid query."""


class Query:
    """The parameters of a request; if a name is repeated, the last value is used."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """Store the parameters as written."""
        self._given = given

    def text(self, name: str) -> str | None:
        """Return a parameter; None if it is absent or empty."""
        return self._given.get(name) or None

    def whole(self, name: str, least: int = 0, most: int = _LARGEST) -> int | None:
        """Return a whole number; None if it is absent."""
        text = self.text(name)
        return None if text is None else _whole(name, text, least, most)

    def wholes(self, name: str) -> list[int] | None:
        """Return whole numbers separated by commas; None if the parameter is absent."""
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
        """Return one of the allowed words; the first if the parameter is absent."""
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
