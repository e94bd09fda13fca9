"""The interface of trackers: TensorBoard, wandb, MLflow and your own.

Input: the identity of a run, its config, numbers of each step. Output: whatever the
tracker writes. Only process 0 of a run has trackers. Each has its own thread, see
`mjax.run.tracking.delivery`, which calls the three methods in order and one at a time.
They need not be fast, and each may raise.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

type Config = Mapping[str, Any]
"""JSON values by field: {"optim.lr": 0.001}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Identifies the run, and the step from which it continues."""

    id: str
    """Unique id of the run, the same in all its starts."""
    name: str
    """Human-readable name: that of the work dir."""
    work_dir: Path
    """Absolute path of the existing work dir."""
    start_number: int
    """Number of starts of the run, this one included: 1 for a new run."""
    start_step: int
    """Steps of the restored state; the first step of this start is one more."""


@runtime_checkable
class Tracker(Protocol):
    """A destination for the metrics of a run, besides metrics.jsonl."""

    takes_back: bool
    """Whether `start` removes the steps after `start_step`. If not, steps repeated
    after the run went back to a checkpoint are not sent again."""

    def start(self, run: RunFacts, config: Config) -> None:
        """Start or continue to track a run. Called again if it raised.

        Args:
          run: a later start of a run has the same `run.id`.
          config: all fields of the run's config, as JSON values.
        """
        ...

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step. Called again with the same step if it raised.

        Args:
          step: from 1, ascending. If the evaluation of `run.start_step` had been
            interrupted, that step comes first, with only its evaluation in `metrics`.
          metrics: fields of a row of metrics.jsonl; NaN and infinity may occur.
        """
        ...

    def finish(self, ending: str) -> None:
        """End this start of the run.

        Args:
          ending: "done", "stopped" (it will be resumed), "failed" or "gave up".
        """
        ...
