"""Settings of a run besides its steps: evaluation, logging, profiling, observation."""

import dataclasses
import math
from collections.abc import Sequence

from mjax.cli import flags
from mjax.config import own_code

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Values of --track, besides FILE.py:NAME."""

_LEAST_BEAT_S = 0.1
"""Minimum of --observe.beat-s. More frequent heartbeats would slow the steps down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out text."""

    every: int = 100
    """Steps between evaluations; the run also ends with one."""
    batches: int = 8
    """Held-out batches per evaluation."""

    def __post_init__(self) -> None:
        """Refuse counts below 1."""
        for name in ("every", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--eval.{name} must be at least 1, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logging: contents and interval."""

    every: int = 10
    """Steps between progress lines. A line shows mean timings over this many steps, or
    over ten if that is more."""
    sample_tokens: int = 200
    """Maximum number of tokens in sample.txt, generated at the end; 0 for none."""

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
      names: the values of --track.
    Raises:
      ValueError: one is unknown, or given twice.
    """
    for name in names:
        if name not in TRACKERS and not own_code.is_own(name):
            raise ValueError(
                f"unknown --track {flags.shown(name)}; the nearest is "
                f"{flags.nearest(name.lower(), TRACKERS)} (of {', '.join(TRACKERS)}; "
                "or FILE.py:NAME for your own)"
            )
        if names.count(name) > 1:
            raise ValueError(f"--track {name} is given twice; leave one out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps that the profiler records (in profile/)."""

    steps: str | None = None
    """A:B records steps A to B - 1, each in its own window; the first step is 1."""
    every: int | None = None
    """Also record each step that is a multiple of this, on all processes."""

    def __post_init__(self) -> None:
        """Refuse values that select no steps."""
        if self.every is not None and self.every < 1:
            raise ValueError(
                f"--profile.every must be at least 1, got {self.every}; leave it out "
                "to record no such steps"
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
        """The first step of `steps` and the step after the last one, or None.

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
    """Observations that each process records."""

    spans: bool = True
    """Record how each process spends the time of each step (in spans/)."""
    spans_dir: str | None = None
    """Folder for the records of --observe.spans, instead of the work dir; with many
    hosts, use a folder on a local disk."""
    stamps: bool | None = None
    """Record when each device reaches the parts of a step. None: only on GPUs."""
    slow_step_factor: float | None = 3.0
    """Record the call stacks of a step that takes longer than this factor times the
    usual p99 of step times (in stacks/). None: never."""
    beat_s: float | None = 1.0
    """Seconds between heartbeats of each process (in beats/); None writes none."""

    def __post_init__(self) -> None:
        """Refuse an empty folder name, a factor <= 1, and too frequent heartbeats."""
        if self.spans_dir == "":
            raise ValueError("--observe.spans-dir is empty; name a folder")
        factor = self.slow_step_factor
        if factor is not None and not 1 < factor < math.inf:
            raise ValueError(
                f"--observe.slow-step-factor must be finite and above 1, got {factor}; "
                "1 would count one step in a hundred as slow; None turns it off"
            )
        if self.beat_s is not None and not _LEAST_BEAT_S <= self.beat_s < math.inf:
            raise ValueError(
                f"--observe.beat-s must be finite and at least {_LEAST_BEAT_S}, got "
                f"{self.beat_s}; 1 costs no measurable time; None writes no beats"
            )
