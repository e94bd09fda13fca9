"""Make trackers by name, and check that this host can use them.

Does not import jax, so a run with a missing tracker is refused at once.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence

from mjax.config import own_code
from mjax.run.tracking.mlflow import MLflow
from mjax.run.tracking.tensorboard import TensorBoard
from mjax.run.tracking.tracker import Tracker
from mjax.run.tracking.weights_and_biases import WeightsAndBiases

_MAKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
_PACKAGES = {
    "tensorboard": ("tensorboardX", "mjax[track]"),
    "wandb": ("wandb", "mjax[wandb]"),
    "mlflow": ("mlflow", "mjax[mlflow]"),
}
"""For each tracker, the module that it imports and the package to install."""


def check(names: Sequence[str]) -> None:
    """Check that this host can use the trackers.

    Args:
      names: names of trackers, as in `TrainConfig.track`.
    Raises:
      ValueError: a package or MLFLOW_TRACKING_URI is missing, or FILE.py lacks the
        function.
    """
    for name in names:
        if own_code.is_own(name):
            own_code.load("--track", name, kind="tracker", returns="Tracker")
            continue
        module, install = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"--track {name} needs {module}, which is not installed: "
                f"pip install '{install}'"
            )
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError(
            "--track mlflow needs the address of a server in MLFLOW_TRACKING_URI, "
            "which is not set; set it, for example to http://HOST:5000"
        )


def make(name: str) -> Tracker:
    """Make a tracker.

    Args:
      name: a name that has passed `check`.
    Raises:
      ValueError: the user's function fails or does not return a tracker.
    """
    if not own_code.is_own(name):
        return _MAKERS[name]()
    made = own_code.load("--track", name, kind="tracker", returns="Tracker")()
    if not isinstance(made, Tracker):
        raise ValueError(
            f"--track {name} must return a Tracker, got {type(made).__name__}; it "
            "needs takes_back, start, scalars and finish (mjax/run/tracking/tracker.py)"
        )
    return made


def short_name(name: str) -> str:
    """Return the name of a tracker for messages and file names."""
    return name.rpartition(":")[2]
