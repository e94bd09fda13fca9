"""`--track` by name: refused before anything starts, with the remedy."""

import importlib.util
import json
import textwrap
from pathlib import Path

import pytest

from mjax.config.run import TRACKERS
from mjax.config.train import TrainConfig, from_json, to_fields
from mjax.run.tracking import names
from mjax.run.tracking.tracker import Tracker

OWN = """
class Mine:
    takes_back = False
    def start(self, run, config): ...
    def scalars(self, step, metrics): ...
    def finish(self, ending): ...
def broken():
    raise RuntimeError("no")
def nothing():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(OWN))
    return path


def test_every_name_that_the_config_takes_has_a_tracker() -> None:
    for name in TRACKERS:
        assert isinstance(names.make(name), Tracker)


def test_an_unknown_tracker_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="unknown --track wanb; the nearest is wandb"):
        TrainConfig(track=("tensorboard", "wanb"))
    with pytest.raises(ValueError, match=r"of tensorboard, wandb, mlflow; or FILE\.py"):
        TrainConfig(track=("wanb",))


def test_a_tracker_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="--track wandb is given twice"):
        TrainConfig(track=("wandb", "wandb"))


def test_the_old_switch_of_a_run_is_track_tensorboard() -> None:
    old = to_fields(TrainConfig(track=("wandb",)))
    for is_on, trackers in ((False, ("wandb",)), (True, ("wandb", "tensorboard"))):
        old["log"]["tensorboard"] = is_on
        assert from_json(json.dumps(old)).track == trackers


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_missing_is_refused_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"--track {name} needs .* pip install 'mjax"):
        names.check([name])


def test_mlflow_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match="for example to http://HOST:5000"):
        names.check(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    names.check(["mlflow"])


def test_a_tracker_of_ones_own_comes_from_a_file(own: Path) -> None:
    names.check([f"{own}:Mine"])
    assert type(names.make(f"{own}:Mine")).__name__ == "Mine"
    assert names.short_name(f"{own}:Mine") == "Mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mien", r"has no function Mien; the nearest is Mine \(of Mine, broken, no"),
        ("", "names a file but no function; write --track .*:Mine"),
    ],
)
def test_a_file_without_the_tracker_is_refused_at_once(
    own: Path, name: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        names.check([f"{own}:{name}"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "must return a Tracker, got int; it needs takes_back, start"),
        ("broken", r"line 8: broken\(\) failed with RuntimeError: no"),
    ],
)
def test_what_is_no_tracker_is_refused(own: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        names.make(f"{own}:{name}")
