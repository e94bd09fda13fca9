"""A mesh of GPUs that are described: as build_mesh makes it, and it compiles."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from mjax.hardware.described import abstract_mesh, described_devices, described_mesh
from mjax.hardware.gpus import GPUS
from mjax.kernels.target import Target, target
from mjax.mesh.axes import AXES, AxisSizes

PAIR = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=2)


@pytest.mark.plan
def test_the_mesh_is_laid_out_host_by_host():
    sizes = AxisSizes(pp=2, dp_replicate=1, dp_shard=2, tp=4)
    mesh = described_mesh(sizes, gpus_per_node=4)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == sizes.as_tuple()
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    np.testing.assert_array_equal(hosts[..., 0].ravel(), [0, 1, 2, 3])
    assert (hosts == hosts[..., :1]).all()


@pytest.mark.plan
def test_tp_across_described_hosts_is_refused_unless_asked_for():
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=8)
    with pytest.raises(ValueError, match=r"--mesh\.tp-across-hosts"):
        described_mesh(sizes, gpus_per_node=4)
    mesh = described_mesh(sizes, gpus_per_node=4, tp_across_hosts=True)
    assert mesh.devices.shape == (1, 1, 1, 1, 8)


@pytest.mark.plan
def test_what_is_traced_sees_the_gpu_while_this_process_runs_on_cpu():
    seen = []

    def look(x: jax.Array) -> jax.Array:
        device = jax.sharding.get_abstract_mesh().abstract_device
        seen.append((device.platform, device.device_kind, device.num_cores))
        return x

    mesh = described_mesh(PAIR)
    spec = PartitionSpec("tp")
    x = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh, spec))
    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec)).trace(x)
    gpu = GPUS["h200"]
    assert seen == [("gpu", gpu.device_kind, gpu.num_sms)]
    assert jax.default_backend() == "cpu"


def test_a_mesh_without_devices_traces_as_one_with_them():
    sizes = AxisSizes(pp=8, dp_replicate=1, dp_shard=192, tp=8)
    mesh = abstract_mesh(sizes, gpu="b200")
    seen = []

    def look(x: jax.Array) -> jax.Array:
        seen.append(target())
        return x

    spec = PartitionSpec("dp_shard")
    x = jax.ShapeDtypeStruct((192,), jnp.float32, sharding=NamedSharding(mesh, spec))
    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec)).trace(x)
    assert seen == [Target(platform="gpu", device_kind="NVIDIA B200")]
    with pytest.raises(ValueError, match="no GPU 'h300' is described"):
        abstract_mesh(sizes, gpu="h300")


@pytest.mark.plan
@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_compiles_to_its_own_code_with_its_own_memory(name):
    mesh = described_mesh(PAIR, gpu=name)
    everywhere = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=everywhere)
    compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes == 128 * 128 * 2
    device = mesh.devices.flat[0]
    major, minor = GPUS[name].compute_capability
    assert device.compute_capability == f"{major}.{minor}"
    assert device.device_kind == GPUS[name].device_kind


@pytest.mark.parametrize(
    ("num_devices", "options", "message"),
    [
        (8, {"gpu": "h300"}, "no GPU 'h300' is described; choose from a100-80g, h100"),
        (12, {}, "multiple of gpus_per_node 8, got 12; use 8, or"),
        (0, {}, "num_devices and gpus_per_node must be at least 1, got 0 and 8"),
        (8, {"gpus_per_node": 0}, "must be at least 1, got 8 and 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(num_devices, options, message):
    with pytest.raises(ValueError, match=message):
        described_devices(num_devices, **options)


def test_without_the_plugin_the_message_says_how_to_get_it(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    message = r"no CUDA plugin.* needed even on a host without one.* make env-plan"
    with pytest.raises(RuntimeError, match=message):
        described_devices(8)


@pytest.mark.plan
def test_the_plugin_prints_nothing_when_a_run_starts_without_a_gpu():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "mjax.mesh"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "1 devices (cpu)" in done.stdout
