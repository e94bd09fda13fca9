"""Split the text of an HLO module into its computations, for those that count in it."""

import re

TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
"""In the line of a loop: how often it runs."""

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_COMMENT = re.compile(r"/\*.*?\*/")


def split_computations(hlo_text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation, without comments, and the entry's name.

    Args:
      hlo_text: of an optimised module, as compiled.as_text() gives it.

    Raises:
      ValueError: the text has no entry.
    """
    computations: dict[str, list[str]] = {}
    entry = None
    current: list[str] | None = None
    for line in hlo_text.splitlines():
        line = _COMMENT.sub("", line)
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    if entry is None:
        raise ValueError("no ENTRY computation: pass the text of compiled.as_text()")
    return computations, entry
