"""What a program says about its flags beside their documentation."""

import dataclasses
from collections.abc import Mapping, Sequence

Meanings = Mapping[str, str]
"""From names of other programs, without hyphens in front, to a flag or a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
    """For the help and for messages."""

    description: str = ""
    """Above the flags in the help."""
    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of a program that runs without a command too: what each does, in one line."""
    examples: Sequence[str] = ()
    """Commands for the help."""
    meanings: Meanings = dataclasses.field(default_factory=dict)
    """Other names of flags."""
