"""Options of the compiler: which step gets which, and unknown ones."""

import dataclasses

import jax
import pytest

from mjax.hardware import xla_flags
from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AXES, AxisSizes
from mjax.mesh.build import build_mesh

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
EARLY = "xla_gpu_experimental_collective_start_as_early_as_possible"
MERGER = "xla_gpu_dot_merger_threshold_mb"
END = {"xla_gpu_execution_terminate_timeout": "1200s"}


def wanted(pp: int, tp_chunks: int) -> dict[str, xla_flags.Value]:
    sizes = AxisSizes(pp=pp, dp_replicate=1, dp_shard=1, tp=8)
    use = xla_flags.Use(sizes=sizes, tp_chunks=tp_chunks)
    of_gpus = [option for option in xla_flags.TABLE if option.platform == "gpu"]
    chosen = [option for option in of_gpus if option.applies(use)]
    assert len({option.name for option in chosen}) == len(chosen), "set twice"
    return xla_flags.Chosen(used=tuple(chosen)).as_compiler_options()


def test_a_step_has_the_options_of_what_it_does():
    assert wanted(pp=1, tp_chunks=1) == END
    assert wanted(pp=1, tp_chunks=8) == {MERGER: 0, LIMIT: 64, EARLY: True} | END
    assert wanted(pp=2, tp_chunks=1) == {LIMIT: 4, EARLY: True} | END
    assert wanted(pp=2, tp_chunks=8) == wanted(pp=1, tp_chunks=8)


def test_simulated_devices_have_an_order_of_collectives_and_nothing_of_gpus():
    sizes = AxisSizes(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    mesh = build_mesh(sizes, jax.devices())
    assert mesh.axis_names == AXES
    chosen = xla_flags.choose(mesh, tp_chunks=2)
    assert [option.name for option in chosen.used] == ["xla_cpu_scheduler_type"]
    assert not chosen.unknown
    assert xla_flags.for_collectives(mesh) == chosen.as_compiler_options()


def test_one_device_of_a_cpu_needs_no_option():
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    mesh = build_mesh(sizes, jax.devices()[:1])
    assert xla_flags.choose(mesh, tp_chunks=1) == xla_flags.Chosen()


@pytest.mark.plan
def test_the_compiler_knows_all_and_what_it_does_not_know_is_left_out(monkeypatch):
    mesh = described_mesh(AxisSizes(pp=2, dp_replicate=1, dp_shard=1, tp=4))
    gone = dataclasses.replace(
        xla_flags.TABLE[0], name="xla_gpu_gone", applies=lambda use: True
    )
    monkeypatch.setattr(xla_flags, "TABLE", (*xla_flags.TABLE, gone))
    chosen = xla_flags.choose(mesh, tp_chunks=4)
    assert {LIMIT, MERGER, *END} <= set(chosen.as_compiler_options())
    assert chosen.unknown == (gone,)
    assert "xla_gpu_gone=0 left out" in chosen.describe()[-1]


@pytest.mark.plan
def test_a_wrong_value_is_an_error():
    device = described_mesh(
        AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    ).devices.flat[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        xla_flags._is_known(device, MERGER, "many")
