"""Opening data decides what a resumed run keeps of the run that began."""

import json

import pytest

from mjax.config.command_line import Command
from mjax.config.train import TrainConfig
from mjax.data.config import NEWEST, DataConfig
from mjax.processes.agreement import Agreement
from mjax.run.open_data import open_data


@pytest.mark.parametrize(
    ("recorded", "restarts", "version"),
    [
        (None, False, NEWEST),
        ({}, False, 1),
        ({"version": 1}, False, 1),
        ({"version": NEWEST}, False, NEWEST),
        ({}, True, NEWEST),
    ],
)
def test_a_resumed_run_keeps_its_data_version_whatever_the_flags(
    tmp_path, recorded, restarts, version
):
    (tmp_path / "a.txt").write_text("some text\n" * 2000)
    if recorded is not None:
        (tmp_path / "config.json").write_text(json.dumps({"data": recorded}))
    data = DataConfig(path=(str(tmp_path / "a.txt"),), cache_dir=str(tmp_path / "c"))
    config = TrainConfig(work_dir=str(tmp_path), data=data)
    command = Command(restart_from_scratch=restarts)
    opened = open_data(config, command, [], Agreement("test"))
    assert opened.config.data.version == version
