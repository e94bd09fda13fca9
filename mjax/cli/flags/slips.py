"""Suggestions for a word that is not a flag.

Input: the word as typed and the existing flags. Output: a sentence with a suggestion,
which comes from the table of names in other programs, otherwise from a flag with the
same last part, otherwise from the flag of most similar spelling.
"""

import difflib
import re
from collections.abc import Collection, Iterable

from mjax.cli.flags.convert import shown
from mjax.cli.flags.guide import Meanings

_LEAST_LIKE = 0.6
"""Minimum similarity of a suggested name, 0 to 1. Not measured."""
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""A hyphen, and the dashes that editors substitute for one or two hyphens."""
_SLIP = re.compile(rf"[{_DASHES}]+(?=[^\W\d])")


def normal(written: str) -> str:
    """Return a flag with hyphens instead of underscores, for comparison."""
    return written.replace("_", "-")


def is_flag(word: str) -> bool:
    """Return whether a word looks like a flag: two hyphens, a letter, no spaces."""
    name = word.partition("=")[0]
    return bool(re.match(r"--[^\W\d]|--_", name)) and not re.search(r"\s", name)


def unknown_flag(word: str, known: Collection[str], meanings: Meanings) -> str:
    """Return the error for an unknown flag, with the likely flag.

    Args:
      word: as typed, perhaps with = and a value.
      known: names of all flags.
      meanings: names in other programs, see `guide`.
    """
    written, has_value, value = word.partition("=")
    said = f"unknown flag {shown(written)}"
    if slip := _slip(normal(written), known):
        return f"{said}; write {slip}{f'={shown(value)}' if has_value else ''}"
    if any(flag.startswith(f"{normal(written)}.") for flag in known):
        group = written.lstrip("-")
        return f"{said}; it is a group of flags, which --help {group} lists"
    found = unknown_name(normal(written).lstrip("-"), known, meanings, "--")
    return f"{said}; {found or '-h lists all flags'}"


def names_flag(meaning: str) -> bool:
    """Return whether a meaning is a flag rather than a sentence."""
    return meaning.startswith("--") and " " not in meaning


def unknown_name(
    name: str, known: Collection[str], meanings: Meanings, prefix: str
) -> str | None:
    """Return a suggestion for an unknown name; None if none is similar.

    Args:
      name: without hyphens in front.
      known: names of all flags, hyphens in front.
      meanings: names in other programs, see `guide`.
      prefix: "--" writes flags; "" the names of fields in a file.
    """

    def written(flag: str) -> str:
        return flag if prefix else flag.removeprefix("--").replace("-", "_")

    name = name.lower().replace("_", "-")
    for key in (name, name.rpartition(".")[2]):
        meaning = meanings.get(key, "")
        if meaning in known:
            return f"here it is {written(meaning)}"
        if meaning and not names_flag(meaning):
            return meaning
        same = [flag for flag in known if _last(flag) == _last(key)]
        if same:
            alone = f"--{_last(key)}"  # --training.steps: --steps, not --profile.steps
            near = alone if alone in same else _most_like(f"--{name}", same)
            return f"the nearest is {written(near)}"
    best = _most_like(f"--{name}", known)
    last = _most_like(_last(name), [_last(flag) for flag in known])
    if _likeness(_last(name), last) > max(_likeness(f"--{name}", best), 0.8):
        best = _most_like(f"--{name}", [f for f in known if _last(f) == last])
    elif _likeness(f"--{name}", best) < _LEAST_LIKE:
        return None
    return f"the nearest is {written(best)}"


def misplaced(
    word: str,
    known: Collection[str],
    meanings: Meanings,
    before: str,
    *,
    remedy: str = "",
) -> str:
    """Return the error for a word that belongs to no flag, with a suggestion.

    Args:
      word: as typed.
      known: names of all flags.
      meanings: names in other programs, see `guide`.
      before: description of the flag before the word, which takes no more words; may
        be empty.
      remedy: what to do if the word does not resemble a flag.
    """
    if word == "--":
        return f"unexpected --{before}; leave it out"
    if is_slip(word):
        dashes = "" if word.startswith("-") else ", whose dash is not a hyphen"
        name = _SLIP.sub("", word, count=1).partition("=")[0]
        flag = f"--{normal(name)}"
        said = f"flags begin with two hyphens, got {shown(word)}{dashes}"
        if flag in known:
            return f"{said}; write --{_SLIP.sub('', word, count=1)}"
        found = unknown_name(name, known, meanings, "--")
        return f"{said}; {found or '-h lists all flags'}"
    said = f"unexpected word {shown(word)}{before}"
    name, has_value, value = word.partition("=")
    first, _, rest = normal(name).lstrip("-").partition(" ")
    for flag in (f"--{first}", _named(first, known, meanings)):
        if flag in known:
            value = f"={shown(value)}" if has_value else f" {shown(rest)}" * bool(rest)
            return f"{said}; write {flag}{value}"
    return f"{said}; {remedy}" if remedy else said


def is_slip(word: str) -> bool:
    """Return whether a word looks like a flag with wrong dashes: -lr, or an em dash."""
    if is_flag(word) or not _SLIP.match(word) or re.search(r"\s", word):
        return False
    try:
        float(word)  # -inf, -nan
    except ValueError:
        return True
    return False


def is_slip_of(word: str, known: Collection[str]) -> bool:
    """Return whether a word is a known flag with wrong dashes."""
    name = _SLIP.sub("", word, count=1).partition("=")[0]
    return is_slip(word) and f"--{normal(name)}" in known


def _named(name: str, known: Iterable[str], meanings: Meanings) -> str:
    """Return the one flag that a bare word matches by meaning or by last part."""
    meaning = meanings.get(name.lower(), "")
    same = [flag for flag in known if _last(flag) == name]
    return meaning if names_flag(meaning) else same[0] if len(same) == 1 else ""


def _slip(flag: str, known: Collection[str]) -> str | None:
    """Correct a joined value, a misplaced no- or capital letters; None otherwise."""
    match = re.fullmatch(r"(--.*?[^\W\d])[:-]?(\d[\w.]*)", flag)
    if match and match[1] in known:
        return f"{match[1]} {match[2]}"
    if ":" in flag and flag.partition(":")[0] in known:
        return " ".join(flag.partition(":")[::2]).rstrip()
    if flag.startswith("--no-"):
        *groups, last = flag.removeprefix("--no-").split(".")
        moved = f"--{'.'.join([*groups, f'no-{last}'])}"
        if moved in known:
            return moved
    lower = {name.lower(): name for name in known}
    return lower.get(flag.lower())


def _last(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2]


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lstrip("-"), b.lstrip("-")).ratio()


def _most_like(word: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.0)[0]
