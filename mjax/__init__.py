"""Train language models with JAX on GPU meshes.

Start reading at `mjax.train`; the reading tour is in the README.
"""

import os as _os
import re as _re
import signal as _signal
import sys as _sys
import time as _time
import typing as _typing
import unicodedata as _unicodedata
from collections.abc import Iterable as _Iterable

_OLDEST_PYTHON = (3, 12)
# This file has no newer syntax than Python 3.6, so that an older Python gets this far.
if _sys.version_info < _OLDEST_PYTHON:
    _needed, _is = (
        ".".join(map(str, version))
        for version in (_OLDEST_PYTHON, _sys.version_info[:3])
    )
    raise ImportError(
        f"mjax needs Python {_needed} or newer, and this is {_is} ({_sys.executable}); "
        f"`make env` looks for another one, or give it: make env PYTHON=/path/to/python"
    )

STARTED_S = _time.perf_counter()
"""Time at which the import of this package began, the origin of start-up times."""

# Python calls a program `-m` while it imports the packages of `python -m mjax.NAME`. In
# such a program Ctrl-C ends the process at once, see `interrupts`; not in process 1 of
# a container, where the system ignores a signal without a handler.
_is_program = _os.path.basename("".join(_sys.argv[:1])) in ("-m", "mjax")
_is_default = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _is_program and _is_default and _os.getpid() != 1:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of characters that a terminal interprets or cannot display."""
_JOINERS = "\u200c\u200d"
"""Characters of category Cf that belong to words and to emoji."""
_UNUSUAL = _re.compile("[^ -~]")
_PASSED = _re.compile("(\x1b\\[[0-9;:]{0,64}m|\r\n)")
"""A colour; the end of a line as Windows writes it."""


def printable(text: str, kept: str = "\t\n") -> str:
    r"""Escape the characters of a text that a terminal interprets, such as \x1b.

    These are control characters, marks that change the direction of text, halves of
    surrogate pairs and unassigned code points.

    Args:
      text: text that another process, a model or a person has written.
      kept: characters that stay as they are; give "" for a text of one line.
    """

    def escaped(char: "_re.Match[str]") -> str:
        is_shown = char[0] in kept or char[0] in _JOINERS
        if is_shown or _unicodedata.category(char[0]) not in _HIDDEN:
            return char[0]
        return char[0].encode("unicode_escape").decode()

    return _UNUSUAL.sub(escaped, text)


class Screen:
    """An output stream to a terminal that escapes what a terminal interprets.

    Newlines, tabs and colours pass, and with `redraws` also a carriage return that
    begins a write: progress bars of libraries redraw their line.
    """

    def __init__(self, stream: _typing.Any, *, redraws: bool = False) -> None:
        """Store the stream, whose other methods stay available."""
        self.unfiltered, self._redraws = stream, redraws

    def __getattr__(self, name: str) -> _typing.Any:
        return getattr(self.unfiltered, name)

    def write(self, text: str) -> int:
        """Write a text; return its number of characters."""
        begin = "\r" if self._redraws and text.startswith("\r") else ""
        parts = _PASSED.split(text[len(begin) :])
        parts[::2] = map(printable, parts[::2])
        self.unfiltered.write(begin + "".join(parts))
        return len(text)

    def writelines(self, lines: "_Iterable[str]") -> None:
        """Write texts one after another."""
        for line in lines:
            self.write(line)


def _filter_terminal() -> None:
    """Escape what this program writes to a terminal; pipes and files get all bytes."""
    for name in ("stdout", "stderr"):
        stream = getattr(_sys, name)
        if stream is not None and stream.isatty():
            setattr(_sys, name, Screen(stream, redraws=name == "stderr"))


if _is_program:
    _filter_terminal()

__version__ = "0.1.0"
