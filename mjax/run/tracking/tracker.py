"""What a tracker is: the interface that TensorBoard, wandb, MLflow and yours have.

Enters: facts of a run, its config, numbers of each step. Leaves: whatever the tracker
makes of them. Only process 0 of a run has trackers. Each runs on a thread of its own,
see `mjax.run.tracking.delivery`, which calls the three methods in order and one at a
time: none has to be fast, and each may raise.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

type Config = Mapping[str, Any]
"""JSON values by field: {"optim.lr": 0.001}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Which run is tracked, and from where it goes on."""

    id: str
    """The same in all starts of the run, and of no other run."""
    name: str
    """For people: that of the work dir."""
    work_dir: Path
    """Absolute; exists."""
    start_number: int
    """Starts of the run, this one included: 1 for a new run."""
    start_step: int
    """Steps that the state has seen; the first step of this start is one more."""


@runtime_checkable
class Tracker(Protocol):
    """Where the metrics of a run go, beside metrics.jsonl."""

    takes_back: bool
    """Whether `start` removes the steps after `start_step`. If not, a step that is
    repeated because the run went back to a checkpoint is not sent again."""

    def start(self, run: RunFacts, config: Config) -> None:
        """Begin to track a run, or continue with it. Called again after it raised.

        Args:
          run: a later start of a run has the same `run.id`.
          config: all fields of the run's config.
        """
        ...

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step. Called again, with the same, after it raised.

        Args:
          step: from 1, ascending. `run.start_step` comes first if its evaluation was
            cut short and has been made now; `metrics` has that evaluation only.
          metrics: fields of a row of metrics.jsonl; NaN and infinity may occur.
        """
        ...

    def finish(self, ending: str) -> None:
        """End this start of the run.

        Args:
          ending: "done", "stopped" (it will be resumed), "failed" or "gave up".
        """
        ...
