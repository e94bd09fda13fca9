"""Descriptions of GPUs are complete, and agree with the values that a run uses."""

import dataclasses

import pytest

from mjax.hardware.gpus import GPUS, peak_flops_per_s
from mjax.kernels.target import Target


@pytest.mark.parametrize("name", GPUS)
def test_a_description_has_every_number(name):
    assert all(dataclasses.astuple(GPUS[name]))


@pytest.mark.parametrize("name", GPUS)
def test_the_peak_that_is_described_is_the_one_of_mfu(name):
    gpu = GPUS[name]
    assert peak_flops_per_s(gpu.device_kind) == gpu.peak_bf16_flops_per_s


@pytest.mark.parametrize("name", GPUS)
def test_a_kernel_knows_the_generation_of_a_described_gpu(name):
    gpu = GPUS[name]
    generations = {8: "ampere", 9: "hopper", 10: "blackwell"}
    target = Target(platform="gpu", device_kind=gpu.device_kind)
    assert target.generation == generations[gpu.compute_capability[0]]


@pytest.mark.parametrize("name", GPUS)
def test_links_are_in_the_order_that_placement_goes_by(name):
    gpu = GPUS[name]
    assert gpu.network_bytes_per_s < gpu.node_link_bytes_per_s < gpu.memory_bytes_per_s


@pytest.mark.parametrize(
    ("device_kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_known_devices_have_their_peak(device_kind, tflops):
    assert peak_flops_per_s(device_kind) == tflops * 1e12


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA H200 MIG 1g.18gb"])
def test_an_unknown_device_has_no_peak(device_kind):
    assert peak_flops_per_s(device_kind) is None
