"""Stamps of a step: which rows each device writes, and that they change no bit."""

import jax
import numpy as np
import pytest

from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.pipeline.config import PipelineConfig
from mjax.step.stamps import Place, writes_stamps
from tests.training import ONE_DEVICE, Layout, make_batch, make_mesh, make_program

LAYOUTS = {
    "one device": ONE_DEVICE,
    "dp and tp": Layout((1, 1, 4, 2), 2, microbatches=2),
    "four microbatches": Layout((1, 2, 1, 1), 1, microbatches=4),
    "parts of parameters": Layout((1, 1, 4, 2), 3, microbatches=2),
    "pipeline": Layout((2, 1, 2, 2), 1, microbatches=2, pipeline=PipelineConfig()),
}
SLOW = {"four microbatches"}
ONE_MICROBATCH = [Place.FORWARD, Place.BACKWARD]


def take(program, num_steps=2):
    state, results = program.init(), []
    for step in range(num_steps):
        state, metrics = program.train_step(state, make_batch(program, step))
        results.append(jax.device_get(metrics))
    return jax.device_get(state.params), results


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in LAYOUTS
    ],
)
def test_each_device_writes_the_places_of_a_step_in_order(name):
    layout = LAYOUTS[name]
    program = make_program(layout, stamps=True)
    params, results = take(program)
    plain_params, plain = take(make_program(layout))
    jax.tree.map(np.testing.assert_array_equal, params, plain_params)
    num_devices = int(np.prod(layout.mesh))
    last_clocks = np.zeros(num_devices, np.uint32)
    for stamped, without in zip(results, plain, strict=True):
        assert stamped["loss"] == without["loss"]
        logs = stamped.pop("stamps").reshape(num_devices, -1, 2)
        assert stamped.keys() == without.keys()
        for device, log in enumerate(logs):
            (count, _), *rows = log.tolist()
            places = [tag for tag, _ in rows]
            if layout.pipeline is None:
                middle = ONE_MICROBATCH * layout.microbatches
            else:
                num_ticks = len(rows) - 3
                assert num_ticks >= layout.microbatches + layout.mesh[0] - 1
                middle = [Place.TICK] * num_ticks + [Place.BACKWARD]
            assert places == [Place.BEGIN, *middle, Place.NORM]
            assert count == len(rows)
            clocks = np.array([clock for _, clock in rows], np.int32).view(np.uint32)
            passed = np.diff(np.array([last_clocks[device], *clocks], np.uint32))
            # A clock of 32 bits begins anew now and then: differences hold.
            is_first = int(last_clocks[device] == 0)
            assert (passed[is_first:] < 2**31).all()
            last_clocks[device] = clocks[-1]


def test_without_stamps_a_step_returns_none():
    program = make_program(ONE_DEVICE)
    assert "stamps" not in take(program, 1)[1][0]


def test_cpus_write_stamps_if_they_are_asked():
    here = make_mesh((1, 1, 1, 2))
    assert not writes_stamps(None, here)
    assert writes_stamps(True, here)


@pytest.mark.plan
def test_gpus_write_stamps_if_they_can():
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=2)
    h200, a100 = described_mesh(sizes), described_mesh(sizes, gpu="a100-80g")
    assert writes_stamps(None, h200)
    assert not writes_stamps(False, h200)
    assert not writes_stamps(None, a100)
    with pytest.raises(
        NotImplementedError, match=r"got .*A100.*--observe.stamps False"
    ):
        writes_stamps(True, a100)
