"""Texts of a program's help and messages, besides the documentation of its flags."""

import dataclasses
from collections.abc import Mapping, Sequence

Meanings = Mapping[str, str]
"""Name of a flag in another program, without hyphens -> a flag or a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
    """Texts for the help and for messages."""

    description: str = ""
    """Description above the flags in the help."""
    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Commands with one-line descriptions, of a program that also runs without any."""
    examples: Sequence[str] = ()
    """Example commands in the help."""
    meanings: Meanings = dataclasses.field(default_factory=dict)
    """Names of flags in other programs."""
    path: str = ""
    """Advice for a path without a flag before it; {path} stands for the path."""
