"""Cheap reads of the host give the same result as plain reads."""

import json
import math
import random

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.run import metrics
from mjax.run.host_reads import read_numbers
from mjax.run.slow_steps import SlowSteps


def placed(value: np.ndarray | np.generic, *spec: str | None) -> jax.Array:
    mesh = build_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=4, tp=2))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_numbers_are_read_as_device_get_reads_them(
    platform: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    values = {
        "loss": placed(np.float32(1.25)),
        "tokens": placed(np.int32(7)),
        "split": placed(np.arange(8, dtype=np.int32), "dp_shard"),
        "on the host": np.float32(2.5),
        "plain": 3,
    }
    expected, found = jax.device_get(values), read_numbers(values)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert np.asarray(value).dtype == found[name].dtype


def test_the_limit_of_a_slow_step_comes_from_the_last_200_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    draw = random.Random(0)
    clock, took = 0.0, []
    monkeypatch.setattr("mjax.run.slow_steps.time.perf_counter", lambda: clock)
    steps = SlowSteps(tmp_path / "stacks.txt", 3.0)
    for step in range(1, 501):
        steps.begin()
        took.append(draw.choice([1.0, 1.25, 1.5, 2.0]) * (1 if step < 300 else 3))
        clock += took[-1]
        steps.end(step)
        last = sorted(took[-200:])
        usual = last[math.ceil(0.99 * len(last)) - 1]
        assert steps._limit_s == (math.inf if step < 20 else 3 * usual)
    steps.close()


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1, "loss": 1e-05, "mfu": None, "skipped": 0},
        {"step": 2, "loss": math.nan, "lr": math.inf, "text": "ü"},
        {"step": 3, "loss": np.float64(0.1), "n": 10**20},
    ],
)
def test_a_line_is_what_json_writes_of_the_row(row: metrics.Row):
    line = metrics._line(row)
    bad = {n: str(v) for n, v in row.items() if v != v or v == math.inf}
    more = {**dict.fromkeys(bad), "nonfinite": bad} if bad else {}
    assert line == json.dumps({**row, **more}) + "\n"
