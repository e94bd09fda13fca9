"""Parse the words of a command line into instances of dataclasses.

A flag is --group.field, with hyphens or underscores. Its value is the next word, or
follows =. Lists take all words up to the next flag. A switch takes no value, and
--group.no-field turns it off. If a flag is repeated, the last value is used.
"""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mjax.cli.flags import asked_help, slips
from mjax.cli.flags.convert import kind_of, num_words, shown, value_of
from mjax.cli.flags.fields import (
    MISSING,
    Flag,
    alternatives,
    bare,
    default_of,
    fields_of,
    flags_of,
    summary,
)
from mjax.cli.flags.guide import Guide
from mjax.cli.flags.words import nearest

_HELP = ("-h", "--help")


def read(
    cls: Any,
    argv: Sequence[str],
    *,
    prog: str,
    default: Any = None,
    guide: Guide | None = None,
) -> Any:
    """Parse the words of a command line into a dataclass.

    Args:
      cls: dataclass whose fields are the flags. In a union of dataclasses each is a
        command, named by the first word.
      argv: words, without the program's name.
      prog: the command as typed, for the help.
      default: instance with the values of omitted flags; None uses the fields'
        defaults.
      guide: for the help and the messages; None uses the docstring of cls.
    Returns:
      An instance of cls.
    Raises:
      ValueError: a word is wrong, or a value is refused; the message suggests the fix.
      SystemExit: with code 0, after the help.
    """
    commands = {command_name(kind): kind for kind in alternatives(cls)}
    if len(commands) > 1:
        cls, argv = _command(commands, argv, prog, guide)
        prog = f"{prog} {command_name(cls)}"
        guide = Guide(meanings=guide.meanings) if guide else None
    if guide is None or not guide.description:
        guide = dataclasses.replace(guide or Guide(), description=_description(cls))
    start = MISSING if default is None else default
    (found,) = read_parts({cls: start}, argv, prog=prog, guide=guide)
    return found


def read_parts(
    parts: Mapping[Any, Any],
    argv: Sequence[str],
    *,
    prog: str,
    guide: Guide,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Parse the words of a command line into several dataclasses at once.

    Args:
      parts: dataclasses that share the command line, each with an instance of its
        defaults, or MISSING.
      argv: words, without the program's name.
      prog: the command as typed, for the help.
      guide: for the help and the messages.
      overrides: values by flag that override the defaults; the words override these.
    Returns:
      An instance of each part.
    Raises:
      ValueError, SystemExit: as `read`.
    """
    known = [
        flag
        for part, (cls, default) in enumerate(parts.items())
        for flag in flags_of(cls, default, part=part)
    ]
    if (groups := _asked(argv)) is not None:
        width = min(shutil.get_terminal_size((88, 24)).columns, 120)
        is_bold = sys.stdout.isatty()
        titles = _titles(parts)
        _show(asked_help.text(known, titles, groups, prog, guide, width, bold=is_bold))
    found = _Words(known, guide).read(argv)
    values = {
        (flag.part, flag.path): (overrides or {})[flag.name]
        for flag in known
        if flag.name in (overrides or {})
    } | found
    missing = [
        flag
        for flag in known
        if flag.default is MISSING and (flag.part, flag.path) not in values
    ]
    if missing:
        raise ValueError(_missing(missing))
    return tuple(
        _built(cls, default, values, part, ())
        for part, (cls, default) in enumerate(parts.items())
    )


def command_name(cls: Any) -> str:
    """Return the command that a dataclass defines: first-error for FirstError."""
    name = cls.__name__
    return "".join(
        f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name)
    )


def _command(
    commands: Mapping[str, Any], argv: Sequence[str], prog: str, guide: Guide | None
) -> tuple[Any, Sequence[str]]:
    """Return the dataclass named by the first word, and the other words."""
    first = argv[0] if argv else ""
    if first in _HELP:
        _show(asked_help.of_commands(commands, prog, guide or Guide()))
    if first in commands:
        return commands[first], argv[1:]
    names = ", ".join(commands)
    if not argv:
        raise ValueError(f"a command is missing (of {names}); write {prog} COMMAND")
    if first.startswith("-"):
        raise ValueError(f"a command must come before {shown(first)} (of {names})")
    raise ValueError(
        f"unknown command {shown(first)}; the nearest is {nearest(first, commands)} "
        f"(of {names})"
    )


def _asked(argv: Sequence[str]) -> list[str] | None:
    """Return the groups of the requested help; empty: all; None: not requested."""
    for index, word in enumerate(argv):
        if word in _HELP:
            rest = argv[index + 1 :]
            stop = next((i for i, w in enumerate(rest) if w.startswith("-")), len(rest))
            return [*rest[:stop]]
    return None


def _show(text: str) -> NoReturn:
    """Print the help and exit; the reader (head, less) may close the pipe early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def _description(cls: Any) -> str:
    return "" if (cls.__doc__ or "").startswith(f"{cls.__name__}(") else cls.__doc__


def _titles(parts: Mapping[Any, Any]) -> dict[str, str]:
    """Return the title of each group of flags."""
    titles = {"": ""}
    for cls in parts:
        for field, hint in fields_of(cls):
            if dataclasses.is_dataclass(bare(hint)):
                titles[field.name] = summary(bare(hint))
    return titles


def _missing(missing: Sequence[Flag]) -> str:
    """Return the error for required values that are missing."""
    first = missing[0]
    if len(missing) == 1:
        doc = f"{first.doc[:1].lower()}{first.doc[1:]}".removesuffix(".")
        about = f" ({doc})" if doc else ""
        if first.positional is not None:
            return f"{first.name} is missing{about}"
        return f"{first.name} is missing; give it {kind_of(first.hint)}{about}"
    names = [flag.name for flag in missing]
    return f"{', '.join(names[:-1])} and {names[-1]} are missing; -h explains them"


def _built(
    cls: Any, default: Any, values: Mapping[Any, Any], part: int, path: tuple[str, ...]
) -> Any:
    """Return an instance of a dataclass; ValueErrors of its checks pass through."""
    arguments = {}
    for field, hint in fields_of(cls):
        names, inner = (*path, field.name), default_of(field, default)
        kind = bare(hint)
        if not dataclasses.is_dataclass(kind):
            arguments[field.name] = values.get((part, names), inner)
        elif inner is not MISSING and not _touches(values, part, names):
            arguments[field.name] = inner
        else:
            arguments[field.name] = _built(kind, inner, values, part, names)
    return cls(**arguments)


def _touches(values: Mapping[Any, Any], part: int, path: tuple[str, ...]) -> bool:
    return any(p == part and key[: len(path)] == path for p, key in values)


class _Words:
    """Iterates over the words of a command line and collects their values."""

    def __init__(self, known: Sequence[Flag], guide: Guide) -> None:
        self._guide = guide
        self._slots = [flag for flag in known if flag.positional is not None]
        self._flags = {f.name: (f, True) for f in known if f.positional is None}
        self._flags |= {f.off_name: (f, False) for f in known if f.off_name is not None}
        self._names = {*self._flags, "--help"}
        self._found: dict[tuple[int, tuple[str, ...]], Any] = {}
        self._latest = ""
        """Description of the last word's flag, for messages."""
        self._remedy = ""
        """What to do if another word follows."""

    def read(self, argv: Sequence[str]) -> dict[tuple[int, tuple[str, ...]], Any]:
        words = [*argv]
        while words:
            word = words.pop(0)
            if slips.is_flag(word):
                self._flag(word, words)
            elif self._slots and word != "--" and not self._is_slip(word):
                slot = self._slots.pop(0)
                self._found[slot.part, slot.path] = value_of(
                    [word], slot.hint, slot.name
                )
                self._latest = f" after {slot.name} {shown(word)}"
                self._remedy = f"give one {slot.name}, in quotes if it has spaces"
            else:
                meanings, remedy = self._guide.meanings, self._remedy
                if self._guide.path and (not self._latest or "/" in word):
                    remedy = self._guide.path.format(path=shown(word))
                raise ValueError(
                    slips.misplaced(
                        word, self._names, meanings, self._latest, remedy=remedy
                    )
                )
        return self._found

    def _flag(self, word: str, words: list[str]) -> None:
        """Read a flag and its values from the remaining words."""
        written, has_value, value = word.partition("=")
        flag, is_on = self._flags.get(slips.normal(written), (None, True))
        if flag is None:
            meanings = self._guide.meanings
            raise ValueError(slips.unknown_flag(word, self._names, meanings))
        if flag.is_switch:
            self._switch(flag, written, value if has_value else None, words)
            self._found[flag.part, flag.path] = is_on
            self._latest, self._remedy = f" after the switch {written}", ""
            return
        count = num_words(flag.hint)
        taken = [value] if has_value else []
        while words and (count is None or len(taken) < count):
            if self._ends_values(words[0]):
                break
            taken.append(words.pop(0))
            if count is not None and _is_none(flag, taken):
                break
        if count is not None and len(taken) < count and not _is_none(flag, taken):
            raise ValueError(_too_few(flag, written, taken, count, words))
        self._found[flag.part, flag.path] = value_of(taken, flag.hint, written)
        self._latest = f" after {written} {' '.join(map(shown, taken))}".rstrip()
        is_text = str in alternatives(flag.hint)
        self._remedy = "put quotes around a text with spaces" if is_text else ""

    def _switch(
        self, flag: Flag, written: str, value: str | None, words: Sequence[str]
    ) -> None:
        """Refuse a value for a switch."""
        following = words[0] if words else ""
        if value is None and not self._slots and following.lower() in _ON_OR_OFF:
            value = following
        if value is None:
            return
        meant = f"{flag.name} or {flag.off_name}"
        if value.lower() in _ON_OR_OFF:
            is_on = _ON_OR_OFF[value.lower()] == (written != flag.off_name)
            meant = str(flag.name if is_on else flag.off_name)
        raise ValueError(
            f"{written} is a switch and takes no value, got {shown(value)}; write "
            f"{meant}"
        )

    def _ends_values(self, word: str) -> bool:
        """Return whether a word is not a value of the flag before it."""
        return word == "--" or slips.is_flag(word) or self._is_slip(word)

    def _is_slip(self, word: str) -> bool:
        """Return whether a word is -x, or a known flag with a wrong dash."""
        if word.startswith("-"):
            return slips.is_slip(word)
        return slips.is_slip_of(word, self._names)


_ON_OR_OFF = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def _is_none(flag: Flag, taken: Sequence[str]) -> bool:
    """Return whether a flag of several words has the single value None."""
    return [*taken] == ["None"] and type(None) in alternatives(flag.hint)


def _too_few(
    flag: Flag, written: str, taken: Sequence[str], count: int, words: Sequence[str]
) -> str:
    """Return the error for a flag with too few values."""
    following = f", got the flag {shown(words[0])}" if words else ", got nothing"
    if words and slips.is_slip(words[0]):
        following = (
            f", got {shown(words[0])}; a value that begins with a hyphen is written "
            f"{written}={shown(words[0])}"
        )
    if taken:
        return f"{written} needs {count} values, got {' '.join(map(shown, taken))}"
    return f"{written} needs a value, {kind_of(flag.hint)}{following}"
