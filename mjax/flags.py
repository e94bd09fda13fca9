"""Flags made from config dataclasses, and one plain message for a bad one.

Enters: a dataclass of configs and the words of a command line. Leaves: an instance of
it; or, of a program with several commands, the exit code of the one that is named. The
parsing is tyro's. Some kinds of mistakes are taken out of its hands, because here they
can be told better: an unknown flag, a value that is none of the choices or no whole
number, and a value that a config refuses in `__post_init__`.
"""

import dataclasses
import difflib
import importlib
import itertools
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructTypeInfo,
)


class _RefusedError(Exception):
    """The ValueError of a config on its way through tyro, which would frame it."""


def read(
    cls: Any,
    argv: Sequence[str],
    *,
    prog: str,
    named_by: Sequence[type] = (),
    default: Any = None,
    description: str | None = None,
) -> Any:
    """Turn the words of a command line into a config.

    Args:
      cls: dataclass whose fields are the flags, or a union of them: subcommands.
      argv: words, without the program's name.
      prog: how the program was called, for tyro's messages.
      named_by: dataclasses whose fields give all flags their names, `cls` itself say;
        empty leaves unknown flags to tyro.
      default: values of the flags that are not given.
      description: shown above the help.
    Returns:
      An instance of cls.
    Raises:
      ValueError: an unknown flag, a value that is none of the choices or no whole
        number, or one that a config refuses; the message names the nearest that would
        do.
      SystemExit: tyro has shown the help (code 0) or a mistake in the writing of a
        value (code 2).
    """
    hints = dict(itertools.chain.from_iterable(_flags(part) for part in named_by))
    if hints:
        _check_words(argv, hints)
    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            cls,
            prog=prog,
            description=description,
            args=list(argv),
            registry=_open_registry(),
            **given,
        )
    except _RefusedError as refused:
        raise ValueError(str(refused)) from refused.__cause__


def given(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value that a flag is given, before the real parsing.

    None: it is absent; "" if nothing follows it.
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
      ValueError: it does not begin with a flag.
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
    """Return the words of a command line with other values for some flags.

    Args:
      words: each flag begins with two hyphens; what follows are its values.
      changes: from flags to their values.
    """
    kept, is_changed = [], False
    for word in words:
        if word.startswith("--"):
            is_changed = word.partition("=")[0].replace("_", "-") in changes
        if not is_changed:
            kept.append(word)
    return kept + [word for flag, new in changes.items() for word in (flag, *new)]


def run_command(words: Sequence[str], commands: Mapping[str, str], help: str) -> int:
    """Run the command that the first word names; return its exit code.

    Args:
      words: of the command line, without the program's name.
      commands: from names to modules, each with `main(argv) -> exit code`; only that of
        the named one is imported.
      help: shown for --help, and with the message for a name that is none.
    Returns:
      the exit code of the command; 2 if there is none of this name; 1 if nobody reads
      what it prints any more.
    """
    try:
        code = _run_command(words, commands, help)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run_command(words: Sequence[str], commands: Mapping[str, str], help: str) -> int:
    if words and words[0] in ("-h", "--help"):
        print(help)
        return 0
    if words and words[0] in commands:
        return importlib.import_module(commands[words[0]]).main(words[1:])
    said = f"there is no command {words[0]}" if words else "a command is missing"
    print(f"error: {said}\n\n{help}", file=sys.stderr)
    return 2


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word most like this one."""
    return difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.0)[0]


def _open_registry() -> ConstructorRegistry:
    """Make rules by which tyro builds dataclasses as always, but shows no error."""
    registry = ConstructorRegistry()
    is_asking_tyro = False

    @registry.struct_rule
    def build_openly(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_asking_tyro
        if is_asking_tyro or not dataclasses.is_dataclass(info.type):
            return None
        is_asking_tyro = True
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_asking_tyro = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, instantiate=_openly(spec.instantiate))

    return registry


def _openly(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_openly(**values: Any) -> Any:
        try:
            return make(**values)
        except ValueError as error:
            raise _RefusedError(str(error)) from error

    return make_openly


def _flags(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field's flag, as tyro names it, with the field's type."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _flags(hint, f"{prefix}{name}.")
            continue
        yield f"--{prefix}{name}".replace("_", "-"), hint
        if hint is bool:
            yield f"--{prefix}no-{name}".replace("_", "-"), hint


def _check_words(argv: Sequence[str], hints: dict[str, Any]) -> None:
    """Refuse unknown flags, and values that their flags cannot take."""
    known = {"--help", *hints}
    for word, following in itertools.pairwise([*argv, ""]):
        written, has_value, value = word.partition("=")
        flag = written.replace("_", "-")
        if not flag.startswith("--"):
            continue
        if flag not in known:
            raise ValueError(
                f"unknown flag {written}; the nearest is {_nearest_flag(flag, known)}"
            )
        value = value if has_value else following
        # A flag without a value is left to tyro.
        if flag in hints and value and not value.startswith("--"):
            _check_value(flag, value, hints[flag])


def _check_value(flag: str, value: str, hint: Any) -> None:
    """Refuse a value that is none of the choices, or no whole number."""
    kinds = typing.get_args(hint) if _is_optional(hint) else (hint,)
    choices = [
        choice
        for kind in kinds
        if typing.get_origin(kind) is Literal
        for choice in typing.get_args(kind)
    ]
    absent = ["None"] if choices and types.NoneType in kinds else []
    if choices and value not in (*choices, *absent):
        raise ValueError(
            f"unknown {flag} {value}; the nearest is {nearest(value, choices)} (of "
            f"{', '.join([*choices, *absent])})"
        )
    if int in kinds and set(kinds) <= {int, types.NoneType} and not _is_whole(value):
        raise ValueError(f"{flag} must be a whole number, got {value}{_rounded(value)}")


def _is_optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def _is_whole(value: str) -> bool:
    try:
        int(value)
    except ValueError:
        return value == "None"
    return True


def _rounded(value: str) -> str:
    """Name the whole number nearest to a value, if it is a number."""
    try:
        return f"; the nearest is {round(float(value))}"
    except (ValueError, OverflowError):
        return ""


def _nearest_flag(flag: str, known: set[str]) -> str:
    """Return the known flag most like this one; same last part (--lr) comes first."""

    def last(name: str) -> str:
        return name.lstrip("-").rpartition(".")[2]

    same = [name for name in known if last(name) == last(flag)]
    return nearest(flag, same or known)
