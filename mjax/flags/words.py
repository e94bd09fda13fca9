"""Look up, list and replace the words of a command line before it is parsed.

For programs that pass flags on, or need one flag before they can parse the rest.
"""

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence


def given(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag, before the command line is parsed.

    None if the flag is absent; "" if no word follows it.
    """
    found = None
    for word, following in itertools.pairwise([*argv, ""]):
        written, has_value, value = word.partition("=")
        if written.replace("_", "-") == flag:
            found = value if has_value else following
    return found


def values(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags of a command line with their values.

    Raises:
      ValueError: the first word is not a flag.
    """
    found: dict[str, list[str]] = {}
    latest: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            latest = found[name.replace("_", "-")] = [value] if has_value else []
        elif latest is None:
            raise ValueError(f"flags begin with two hyphens, got {word}")
        else:
            latest.append(word)
    return found


def with_flags(words: Sequence[str], changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words of a command line with new values for some flags.

    Args:
      words: each flag begins with two hyphens, and its values follow.
      changes: from flags to their values.
    """
    kept, is_changed = [], False
    for word in words:
        if word.startswith("--"):
            is_changed = word.partition("=")[0].replace("_", "-") in changes
        if not is_changed:
            kept.append(word)
    return kept + [word for flag, new in changes.items() for word in (flag, *new)]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most similar to this one."""
    return difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.0)[0]
