"""FP8 matmuls are accepted only on GPUs that have them."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from mjax.hardware.described import abstract_mesh, described_mesh
from mjax.hardware.fp8 import describe_fp8
from mjax.mesh.axes import AXES, AxisSizes
from tests.training import make_mesh

SIZES = AxisSizes(pp=1, dp_replicate=1, dp_shard=2, tp=1)


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_gpus_from_ada_on_multiply_natively(gpu: str):
    assert "native on NVIDIA" in describe_fp8(abstract_mesh(SIZES, gpu=gpu))


def test_an_older_gpu_is_refused_with_its_capability_and_a_remedy():
    said = r"capability 8\.9 .*A100.* with 8\.0; use --precision\.matmul compute"
    with pytest.raises(ValueError, match=said):
        describe_fp8(abstract_mesh(SIZES, gpu="a100-80g"))


def test_a_gpu_that_nothing_is_known_of_is_refused():
    device = AbstractDevice(device_kind="NVIDIA X1", num_cores=1, platform="gpu")
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(SIZES.as_tuple(), AXES, types, abstract_device=device)
    with pytest.raises(ValueError, match="NVIDIA X1 with unknown"):
        describe_fp8(mesh)


@pytest.mark.plan
def test_described_devices_state_their_capability():
    with pytest.raises(ValueError, match=r"with 8\.0"):
        describe_fp8(described_mesh(SIZES, gpu="a100-80g"))
    assert "capability 9.0" in describe_fp8(described_mesh(SIZES, gpu="h200"))


def test_simulated_devices_compute_it():
    assert jax.default_backend() == "cpu"
    assert "simulated" in describe_fp8(make_mesh((1, 1, 2, 1)))
