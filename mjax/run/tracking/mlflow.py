"""MLflow, through the client in the package mlflow-skinny.

MLflow's own variables set the destination: MLFLOW_TRACKING_URI (required),
MLFLOW_EXPERIMENT_NAME (default "mjax"), MLFLOW_TRACKING_TOKEN.
"""

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

from mjax.run.tracking.tracker import Config, RunFacts

_TAG = "mjax.run"
"""Tag with the run id, because MLflow chooses its own ids."""
_PARAMS = 100
"""Maximum number of parameters in one request to MLflow."""
_STATUS = {"done": "FINISHED", "stopped": "KILLED"}


class MLflow:
    """Tracks a run as the MLflow run tagged with its id.

    The config of the first start becomes MLflow parameters, which cannot change later.
    A field that a resumed run changes becomes a tag of the same name, which later
    starts keep up to date.
    """

    takes_back = False

    def __init__(self) -> None:
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""
        self._sent: tuple[int, int] = (0, 0)

    def start(self, run: RunFacts, config: Config) -> None:
        """Find or create the run, and log the config."""
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        self._entities = importlib.import_module("mlflow.entities")
        client = importlib.import_module("mlflow.tracking").MlflowClient()
        experiment_id = _experiment(client)
        found = client.search_runs(
            [experiment_id], f"tags.`{_TAG}` = '{run.id}'", max_results=1
        )
        mlflow_run = (
            found[0]
            if found
            else client.create_run(
                experiment_id, tags={_TAG: run.id}, run_name=run.name
            )
        )
        self._client, self._run_id = client, mlflow_run.info.run_id
        client.update_run(self._run_id, status="RUNNING")
        self._log_config(mlflow_run.data.params, mlflow_run.data.tags, config)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step in one request.

        A repeated request has the time of the first request, so MLflow recognises the
        repetition.
        """
        if self._sent[0] != step:
            self._sent = (step, time.time_ns() // 1_000_000)
        points = [
            self._entities.Metric(name, value, self._sent[1], step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def finish(self, ending: str) -> None:
        """Report how the run ended."""
        self._client.set_terminated(self._run_id, _STATUS.get(ending, "FAILED"))

    def _log_config(
        self, logged: Mapping[str, str], tags: Mapping[str, str], config: Config
    ) -> None:
        texts = {name: str(value) for name, value in config.items()}
        params = [
            self._entities.Param(name, text)
            for name, text in texts.items()
            if name not in logged
        ]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[begin : begin + _PARAMS])
        for name, text in texts.items():
            if tags.get(name, logged.get(name, text)) != text:
                self._client.set_tag(self._run_id, name, text)


def _experiment(client: Any) -> str:
    """Return the id of the experiment, which is created if absent."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mjax")
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id
