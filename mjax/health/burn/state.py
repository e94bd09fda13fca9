"""The state of a long burn: the results of its rounds, in one file.

Input: rounds. Output: a file from which a stopped burn resumes, replaced atomically
after each round. It belongs to one host and one set of measurements.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mjax import checked_json
from mjax.health.burn.judging import Round

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """The completed rounds of a burn."""

    version: int = VERSION
    host: str
    settings: Mapping[str, Any]
    """Flags that define the measurements; other flags may change on resume."""
    rounds: tuple[Round, ...] = ()
    agreed_s: float | None = None
    """Seconds of the longest burn among the processes that measure together, so that
    all of them stop after the same round."""

    @property
    def elapsed_s(self) -> float:
        """Seconds burned so far on this host."""
        return math.fsum(one.seconds for one in self.rounds)

    @property
    def burned_s(self) -> float:
        """Seconds burned, which --minutes limits."""
        return self.elapsed_s if self.agreed_s is None else self.agreed_s


def load(path: Path | None, host: str, settings: Mapping[str, Any]) -> Saved:
    """Return the burn saved in a file, or a new one.

    Raises:
      ValueError: the file cannot be read or belongs to another burn; the message names
        it.
    """
    new = Saved(host=host, settings=settings)
    if path is None or not path.exists():
        return new
    try:
        saved: Saved = checked_json.read(path.read_bytes(), Saved)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--state {path}: {error}; move the file away to start again"
        ) from error
    own = json.loads(json.dumps(settings))
    for name, there, here in (
        ("version", saved.version, VERSION),
        ("host", saved.host, host),
        *((key, saved.settings.get(key), own[key]) for key in own),
    ):
        if there != here:
            raise ValueError(
                f"--state {path} belongs to a burn with {name} {there}, but this one "
                f"has {here}; give the same flags, or another --state"
            )
    return saved


def save(path: Path | None, saved: Saved) -> None:
    """Replace the file; do nothing without a path.

    Raises:
      RuntimeError: it cannot be written.
    """
    if path is None:
        return
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(saved), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise RuntimeError(f"cannot write --state {path}: {error}") from error
