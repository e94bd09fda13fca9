"""The help: description of a program, examples, and its flags by group.

Input: flags, titles of groups, the width of the terminal. Output: the text.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.cli.flags.convert import metavar, shown
from mjax.cli.flags.fields import MISSING, Flag, summary
from mjax.cli.flags.guide import Guide
from mjax.cli.flags.words import nearest

GENERAL = "general"
"""Name of the group of flags without a group."""


def text(
    flags: Sequence[Flag],
    titles: Mapping[str, str],
    groups: Sequence[str],
    prog: str,
    guide: Guide,
    width: int,
    *,
    bold: bool,
) -> str:
    """Return the help.

    Args:
      flags: all flags of the program.
      titles: titles by group name; an empty title shows the name alone.
      groups: names of the groups to show; empty shows all.
      prog: the command as typed.
      guide: description, examples and commands of the program.
      width: columns.
      bold: whether the terminal supports bold text.
    Raises:
      ValueError: no group has such a name.
    """
    by_group: dict[str, list[Flag]] = {}
    for flag in flags:
        if flag.positional is None:
            by_group.setdefault(flag.group or GENERAL, []).append(flag)
    names = [name.replace("_", "-") for name in by_group]
    for name in groups:
        if name.replace("_", "-") not in names:
            raise ValueError(
                f"the help has no group {shown(name)}; the nearest is "
                f"{nearest(name, names)} (of {', '.join(names)})"
            )
    wanted = [name.replace("_", "-") for name in groups] or names
    lines = [] if groups else [*_head(flags, prog, guide, width, bold=bold)]
    for name, members in by_group.items():
        if name.replace("_", "-") in wanted:
            title = titles.get(name, "")
            heading = f"{name.replace('_', '-')}: {title}" if title else name
            lines += [_strong(heading, bold), *_table(members, width), ""]
    if len(names) > 1 and not groups:
        lines += textwrap.wrap(
            f"--help GROUP shows one group of flags (of {', '.join(names)})", width
        )
    return "\n".join(lines).rstrip()


def of_commands(commands: Mapping[str, Any], prog: str, guide: Guide) -> str:
    """Return the help of a program with several commands."""
    lines = [f"usage: {prog} COMMAND ...", ""]
    if guide.description:
        lines += [guide.description.strip(), ""]
    length = max(map(len, commands))
    lines += [f"  {name:{length}}  {summary(cls)}" for name, cls in commands.items()]
    lines += ["", f"{prog} COMMAND -h has the flags of each."]
    return "\n".join(lines)


def _head(
    flags: Sequence[Flag], prog: str, guide: Guide, width: int, *, bold: bool
) -> list[str]:
    """Return usage, description, examples, and the positional values."""
    slots = [flag for flag in flags if flag.positional is not None]
    needed = [f for f in flags if f.default is MISSING and f.positional is None]
    words = [slot.name for slot in slots]
    words += [f"{flag.name} {metavar(flag.hint)}" for flag in needed]
    usage = " ".join(["usage:", prog, *words, "[--flag value ...]"])
    lines = [*textwrap.wrap(usage, width, subsequent_indent="  "), ""]
    for paragraph in textwrap.dedent(guide.description).strip().split("\n\n"):
        if paragraph:
            lines += [*textwrap.wrap(" ".join(paragraph.split()), width), ""]
    if guide.commands:
        length = max(map(len, guide.commands))
        lines += [_strong("commands", bold)]
        lines += [f"  {name:{length}}  {what}" for name, what in guide.commands.items()]
        lines += ["", f"{prog} COMMAND -h has the flags of each.", ""]
    if guide.examples:
        lines += [_strong("examples", bold), *(f"  {x}" for x in guide.examples), ""]
    for slot in slots:
        lines += [f"{slot.name}", *_doc(slot.doc, width), ""]
    return lines


def _table(flags: Sequence[Flag], width: int) -> list[str]:
    lines = []
    for flag in flags:
        name = flag.name if flag.is_switch else f"{flag.name} {metavar(flag.hint)}"
        lines += textwrap.wrap(
            f"{name}  ({_default(flag)})",
            width,
            initial_indent="  ",
            subsequent_indent="      ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines += _doc(flag.doc, width)
    return lines


def _doc(doc: str, width: int) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        doc,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _default(flag: Flag) -> str:
    """Describe the default of a flag."""
    value = flag.default
    if value is MISSING:
        return "needed"
    if flag.is_switch:
        return f"on; {flag.off_name} turns it off" if value else "off"
    if isinstance(value, list | tuple):
        said = " ".join(_quoted(_shown(item)) for item in value) or "none"
        return f"default {said}"
    return f"default {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return shown(value)
    return (
        f"{value:g}"
        if isinstance(value, float)
        else (str(value) if isinstance(value, Path) else repr(value))
    )


def _quoted(item: str) -> str:
    return repr(item) if " " in item else item


def _strong(heading: str, bold: bool) -> str:
    return f"\033[1m{heading}\033[0m" if bold else heading
