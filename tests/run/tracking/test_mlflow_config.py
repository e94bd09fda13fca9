"""The config of a run in MLflow, as later starts change it."""

import types
from pathlib import Path
from typing import Any

import pytest

from mjax.run.tracking import mlflow
from mjax.run.tracking.tracker import RunFacts

RUN = RunFacts(id="7f", name="a", work_dir=Path("/a"), start_number=1, start_step=0)


class Server:
    """One run of an MLflow server, with the part of its client that a start uses."""

    def __init__(self) -> None:
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.num_tags_set = 0

    @property
    def run(self) -> Any:
        data = types.SimpleNamespace(params={**self.params}, tags={**self.tags})
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"), data=data)

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="0")

    def search_runs(self, experiments: Any, query: str, max_results: int) -> Any:
        return [self.run] if self.tags else []

    def create_run(self, experiment: str, *, tags: Any, run_name: str) -> Any:
        self.tags |= tags
        return self.run

    def update_run(self, run_id: str, status: str) -> None: ...

    def log_batch(self, run_id: str, *, params: Any) -> None:
        for name, value in params:
            assert self.params.setdefault(name, value) == value  # as MLflow refuses
            self.params[name] = value

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.num_tags_set += 1
        self.tags[name] = value


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    modules = {
        "mlflow.entities": types.SimpleNamespace(Param=lambda *pair: pair),
        "mlflow.tracking": types.SimpleNamespace(MlflowClient=lambda: server),
    }
    monkeypatch.setattr(mlflow.importlib, "import_module", modules.__getitem__)
    return server


def test_a_field_that_is_changed_back_has_its_first_value_again(server: Server) -> None:
    seen = []
    for steps in (6, 8, 6, 6):
        mlflow.MLflow().start(RUN, {"steps": steps, "seed": 0})
        seen.append((server.params["steps"], server.tags.get("steps")))
    assert seen == [("6", None), ("6", "8"), ("6", "6"), ("6", "6")]
    assert (server.num_tags_set, "seed" in server.tags) == (2, False)
