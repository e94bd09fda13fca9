"""Look up, list and replace the words of a command line before it is parsed.

Used by programs that pass flags on, or need one flag before they can parse the others.
"""

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


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
      changes: flag -> its new value.
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


def check_one_run(words: Iterable[str], *, num_after: int = 0) -> None:
    """Refuse several runs, as from a pattern such as runs/demo-*.

    Args:
      words: the command line after the name of the program or the subcommand.
      num_after: words without a flag that follow the run, such as an output folder.
    Raises:
      ValueError: the words in place of the run are several existing folders.
    """
    plain = [*itertools.takewhile(lambda word: not word.startswith("-"), words)]
    runs = plain[: len(plain) - num_after]
    if len(runs) > 1 and all(Path(run).is_dir() for run in runs):
        newest = max(runs, key=lambda run: Path(run).stat().st_mtime_ns)
        raise ValueError(
            f"{len(runs)} runs are given: {' '.join(runs)}; give one; the newest is "
            f"{newest}"
        )
