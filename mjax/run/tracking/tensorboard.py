"""TensorBoard: event files in the work dir, written by tensorboardX."""

import importlib
from collections.abc import Mapping
from typing import Any

from mjax.run.tracking.tracker import Config, RunFacts


class TensorBoard:
    """Writes `tensorboard/` in the work dir."""

    takes_back = True

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: RunFacts, config: Config) -> None:
        """Open an event file that hides the steps after `start_step` in older files."""
        del config  # the work dir has it in config.json
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(run.work_dir / "tensorboard"), purge_step=run.start_step + 1
        )

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, ending: str) -> None:
        """Close the event file."""
        del ending
        self._writer.close()
