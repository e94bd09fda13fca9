"""Names written as ranges: `gpu[001-048]` stands for 48 names.

Input: a pattern of a cluster file or a command line. Output: its names, in order. The
syntax is as in host lists of Slurm and pdsh: brackets contain numbers and ranges
separated by commas, leading zeros are kept, and commas outside brackets separate
patterns. If a pattern has several brackets, the last one varies fastest.
"""

import itertools
import re
from collections.abc import Iterator

MAX_NAMES = 1_000_000
"""Maximum number of names of a pattern. It is far above any cluster, but a typing error
such as `gpu[1-99999999999]` is refused before it fills the memory."""
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PLAIN = re.compile(r"[^\s\[\],]*")


def expand(pattern: str) -> list[str]:
    """Return the names of a pattern.

    Args:
      pattern: `gpu[001-004,007],login1`; empty stands for no names.
    Raises:
      ValueError: the pattern is malformed, a range runs backwards, or there are more
        than `MAX_NAMES` names; the message names the pattern.
    """
    if not pattern.strip():
        return []
    found: list[str] = []
    for one in _split(pattern):
        parts = list(_parts(one, pattern))
        num = 1
        for choices in parts:
            num *= len(choices)
        if len(found) + num > MAX_NAMES:
            raise ValueError(
                f"{pattern!r} stands for more than {MAX_NAMES} names; write a "
                "smaller range"
            )
        found += ["".join(words) for words in itertools.product(*parts)]
    return found


def _split(pattern: str) -> Iterator[str]:
    """Yield the parts between commas that are outside brackets."""
    start, depth = 0, 0
    for place, letter in enumerate(pattern):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield pattern[start:place].strip()
            start = place + 1
    yield pattern[start:].strip()


def _parts(one: str, whole: str) -> Iterator[list[str]]:
    """Yield the choices of each piece of a pattern; a piece of text has one choice."""
    place = 0
    for match in _PART.finditer(one):
        yield [_plain(one[place : match.start()], whole)]
        yield list(_numbers(match[1], whole))
        place = match.end()
    rest = _plain(one[place:], whole)
    if not one:
        raise ValueError(f"{whole!r} has an empty name between its commas")
    yield [rest]


def _plain(text: str, whole: str) -> str:
    if not _PLAIN.fullmatch(text):
        raise ValueError(
            f"{whole!r} has a bracket without its partner, or a space; write it as "
            "gpu[001-048]"
        )
    return text


def _numbers(text: str, whole: str) -> Iterator[str]:
    """Yield the numbers of one bracket."""
    for word in text.split(","):
        match = _RANGE.fullmatch(word.strip())
        if not match:
            raise ValueError(
                f"{whole!r} has {word!r} in its brackets; write numbers and ranges "
                "of numbers, as [001-048,050]"
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"{whole!r} has the range {word}, which runs backwards")
        if first.startswith("0") and len(first) > 1 and len(first) != len(last):
            raise ValueError(
                f"{whole!r} has the range {word}, whose ends have {len(first)} and "
                f"{len(last)} digits; write both with the same number of digits"
            )
        if int(last) - int(first) >= MAX_NAMES:
            raise ValueError(
                f"{whole!r} stands for more than {MAX_NAMES} names; write a "
                "smaller range"
            )
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
