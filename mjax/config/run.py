"""What a run does beside its steps: evaluations, rows."""

import dataclasses
import math
from collections.abc import Sequence

from mjax import flags
from mjax.config import own_code

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""What --track may name, beside FILE.py:NAME."""

_LEAST_BEAT_S = 0.1
"""Chosen: beats that come faster would cost time of the steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out text."""

    every: int = 100
    """Steps between evaluations; one more at the end."""
    batches: int = 8
    """Held-out batches per evaluation."""

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        for name in ("every", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--eval.{name} must be at least 1, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is reported, and how often."""

    every: int = 10
    """Steps between progress lines."""
    sample_tokens: int = 200
    """Of the text that the model continues at the end, in sample.txt; 0 for none."""
    tensorboard: bool = False
    """The same as --track tensorboard."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"--log.every must be at least 1, got {self.every}")
        if self.sample_tokens < 0:
            raise ValueError(
                f"--log.sample-tokens must be at least 0, got {self.sample_tokens}"
            )


def check_trackers(names: Sequence[str]) -> None:
    """Check the names of trackers.

    Args:
      names: as given to --track.
    Raises:
      ValueError: one is unknown, or given twice.
    """
    for name in names:
        if name not in TRACKERS and not own_code.is_own(name):
            raise ValueError(
                f"unknown --track {flags.shown(name)}; the nearest is "
                f"{flags.nearest(name.lower(), TRACKERS)} (of {', '.join(TRACKERS)}; "
                "FILE.py:NAME is one of yours)"
            )
        if names.count(name) > 1:
            raise ValueError(f"--track {name} is given twice; leave one out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps are recorded with the profiler (profile/)."""

    steps: str | None = None
    """A:B, steps A to B - 1, each in a window of its own; the first step is 1."""
    every: int | None = None
    """One step in so many too, its multiples, on all processes; None is none."""

    def __post_init__(self) -> None:
        """Refuse what names no steps."""
        if self.every is not None and self.every < 1:
            raise ValueError(
                f"--profile.every must be at least 1, got {self.every}; leave it out "
                "to record no samples"
            )
        if self.series is None:
            return
        first, stop = self.series
        if first < 1:
            raise ValueError(
                f"--profile.steps must begin with step 1 or a later one, got "
                f"{self.steps}; use 1:{max(stop, 2)}"
            )
        if first >= stop:
            raise ValueError(
                f"--profile.steps A:B is steps A to B - 1, so A must be below B, got "
                f"{self.steps}; use {first}:{first + 1} for step {first} alone"
            )

    @property
    def series(self) -> tuple[int, int] | None:
        """The first step of the series and the one after the last; None: no series.

        Raises:
          ValueError: `steps` is not of the form A:B.
        """
        if self.steps is None:
            return None
        first, colon, stop = self.steps.partition(":")
        numbers = [n for n in (first, stop) if n.isascii() and n.isdigit()]
        if not colon or len(numbers) < 2:
            raise ValueError(
                "--profile.steps must be two whole numbers A:B, steps A to B - 1, got "
                f"{self.steps!r}; 100:105 records five steps"
            )
        return int(first), int(stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What each process writes about itself."""

    spans: bool = True
    """Write where the time of each step goes, on each process (spans/)."""
    spans_dir: str | None = None
    """Folder for them instead of the work dir's; with many hosts, on a local disk."""
    stamps: bool | None = None
    """Let devices write when they come to the parts of a step. None: GPUs do."""
    slow_step_factor: float | None = 3.0
    """A step that takes so many times the usual p99 writes its stacks (stacks/)."""
    beat_s: float | None = 1.0
    """Seconds between signs of life of each process (beats/); None writes none."""

    def __post_init__(self) -> None:
        """Refuse an empty folder, a factor of usual steps, beats without a pause."""
        if self.spans_dir == "":
            raise ValueError("--observe.spans-dir is empty; name a folder")
        factor = self.slow_step_factor
        if factor is not None and not 1 < factor < math.inf:
            raise ValueError(
                f"--observe.slow-step-factor must be finite and above 1, got {factor}; "
                "with 1 one step in a hundred would count as slow; None turns it off"
            )
        if self.beat_s is not None and not _LEAST_BEAT_S <= self.beat_s < math.inf:
            raise ValueError(
                f"--observe.beat-s must be finite and at least {_LEAST_BEAT_S}, got "
                f"{self.beat_s}; 1 costs nothing that can be seen; None writes no beats"
            )
