"""The steps that flags select are recorded by the loop."""

import numpy as np
import pytest

from mjax.config.command_line import parse
from mjax.config.run import ProfileConfig
from mjax.config.train import TrainConfig, from_json, to_json
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.observe.windows import folders
from mjax.observe.windows.record import Due, Origin, Recorder
from mjax.recipes import RECIPES
from mjax.run.metrics import read_computed, read_rows, summarize
from mjax.run.watch import Watch
from tests.run.test_loop import WIDTH, TinyProgram, run


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--profile.steps 5:5", "A must be below B, got 5:5; use 5:6"),
        ("--profile.steps 9:4", "A must be below B, got 9:4"),
        ("--profile.steps 0:4", "begin with step 1 or a later one, got 0:4; use 1:4"),
        ("--profile.steps 5", "two whole numbers A:B"),
        ("--profile.steps a:b", "two whole numbers A:B"),
        (
            "--profile.steps 18:22",
            "profiles up to step 21, but --steps 20 is the last one",
        ),
        ("--profile.every 0", "--profile.every must be at least 1, got 0"),
    ],
)
def test_flags_that_name_no_steps_are_refused(flags, said, capsys):
    words = ["--recipe", "debug", "--steps", "20", *flags.split()]
    with pytest.raises(SystemExit) as refused:
        parse(words, RECIPES, "prog")
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_the_last_step_can_be_recorded():
    config = TrainConfig(steps=20, profile=ProfileConfig(steps="20:21"))
    assert config.profile.series == (20, 21)
    assert from_json(to_json(config)) == config


def test_a_step_is_due_by_its_number_alone():
    due = Due(first=3, stop=5, every=4)
    assert [step for step in range(1, 13) if due.is_due(step)] == [3, 4, 8, 12]
    assert not any(Due().is_due(step) for step in range(1, 13))


def test_a_recorded_step_has_a_window_and_its_row_says_so(tmp_path):
    mesh = build_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=8, tp=1))
    program, said = TinyProgram(), []
    batch = np.zeros(WIDTH, np.float32)
    step = program.train_step.lower(program.abstract_state(), batch).compile()
    for name in "ab":
        (tmp_path / name).mkdir()
    recorder = Recorder(
        Due(first=3, stop=5),
        Origin(work_dir=tmp_path / "a", run="", host="h", rank=0, generation=1),
        lambda: step.as_text() or "",
        mesh.devices,
        said.append,
    )
    run(tmp_path / "a", watch=Watch(windows=recorder))
    run(tmp_path / "b")
    assert said == []
    rows = read_rows(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get("profiled")] == [3, 4]
    complete, partial = folders.find(tmp_path / "a")
    assert [folder.parent.name for folder in complete] == ["step-3", "step-4"]
    assert partial == []
    # Otherwise the run is the same.
    assert read_computed(tmp_path / "a") == read_computed(tmp_path / "b")


def test_recorded_steps_do_not_count_for_throughput():
    rows = [
        {"step": n, "loss": 1.0, "tokens_per_s": speed, "mfu": None} | more
        for n, speed, more in [(1, 10.0, {}), (2, 1.0, {"profiled": 1}), (3, 20.0, {})]
    ]
    assert summarize(rows)["tokens_per_s"] == 15.0
    assert summarize(rows[1:2])["tokens_per_s"] == 1.0
