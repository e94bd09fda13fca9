"""Weights & Biases, through the package wandb.

wandb's own variables set the destination: WANDB_PROJECT (default "mjax"), WANDB_ENTITY,
WANDB_API_KEY or `wandb login`, WANDB_BASE_URL. WANDB_MODE=offline writes files in
`wandb/` of the work dir, which `wandb sync` sends later.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Any

from mjax.run.tracking.tracker import Config, RunFacts

_LOGIN_S = 30


class WeightsAndBiases:
    """Tracks a run under its own id, so that a resumed run continues the same curves.

    wandb refuses steps that do not ascend, even across starts.
    """

    takes_back = False

    def __init__(self) -> None:
        self._run: Any = None
        self._start_step = 0

    def start(self, run: RunFacts, config: Config) -> None:
        """Create or continue the run; upload neither output nor code."""
        wandb = importlib.import_module("wandb")
        self._start_step = run.start_step
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mjax"),
            id=run.id,
            name=run.name,
            dir=run.work_dir,
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                login_timeout=_LOGIN_S,
            ),
        )

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; an evaluation of the initial state goes only to the summary."""
        if step <= self._start_step:
            self._run.summary.update(dict(metrics))
        else:
            self._run.log(dict(metrics), step=step)

    def finish(self, ending: str) -> None:
        """Upload the remaining data and report how the run ended."""
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "done" else 1)
