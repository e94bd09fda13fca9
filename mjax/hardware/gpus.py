"""Describe GPUs: data for the compiler and for time estimates.

Input: nothing. Output: `GPUS`, one description per GPU model, and the peak FLOP/s of a
device by its name, for MFU. A comment gives the source of each number:

- spec: XLA's description of a real device, in openxla/xla, folder
  xla/backends/gpu/target_config/specs; the file and the commit are given;
- sheet: NVIDIA's data sheet of the SXM module;
- DGX: NVIDIA's data sheet of the DGX system of 8 such modules.
"""

import dataclasses
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data of a GPU for the compiler and for time estimates."""

    device_kind: str
    """The `jax.Device.device_kind` of a real device."""
    compute_capability: tuple[int, int]
    num_sms: int
    """Number of streaming multiprocessors."""
    clock_ghz: float
    memory_bytes: int
    """Bytes of memory that the driver reports, fewer than in the data sheet."""
    memory_bytes_per_s: int
    l2_bytes: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int
    """Maximum for a thread block that requests more than the default of 48 KiB."""
    peak_bf16_flops_per_s: float
    """Dense bf16 peak; half of the data sheet's figure with sparsity."""
    node_link_bytes_per_s: int
    """NVLink, one direction, all links of one GPU; half of a data sheet's figure."""
    network_bytes_per_s: int
    """Network, one direction, per GPU, with the usual network card of its
    generation."""
    host_link_bytes_per_s: int
    """PCIe to the memory of the host, one direction; half of a data sheet's figure."""


GPUS = MappingProxyType(
    {
        "a100-80g": Gpu(
            # spec: a100_sxm_80.txtpb, commit 4336d12.
            device_kind="NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            num_sms=108,
            clock_ghz=1.41,
            memory_bytes=85_100_068_864,
            memory_bytes_per_s=2_039_040_000_000,
            l2_bytes=41_943_040,
            shared_memory_per_sm_bytes=167_936,
            shared_memory_per_block_bytes=166_912,
            # sheet: 312 TFLOP/s; NVLink 600 GB/s both ways.
            peak_bf16_flops_per_s=312e12,
            node_link_bytes_per_s=300_000_000_000,
            # DGX A100: eight ConnectX-6 for the GPUs, 200 Gb/s each.
            network_bytes_per_s=25_000_000_000,
            # sheet: PCIe Gen4, 64 GB/s both ways.
            host_link_bytes_per_s=32_000_000_000,
        ),
        "h100": Gpu(
            # spec: h100_sxm.txtpb, commit 0774019.
            device_kind="NVIDIA H100 80GB HBM3",
            compute_capability=(9, 0),
            num_sms=132,
            clock_ghz=1.98,
            memory_bytes=84_942_979_072,
            memory_bytes_per_s=3_352_320_000_000,
            l2_bytes=52_428_800,
            shared_memory_per_sm_bytes=233_472,
            shared_memory_per_block_bytes=232_448,
            # sheet: 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both ways.
            peak_bf16_flops_per_s=989.4e12,
            node_link_bytes_per_s=450_000_000_000,
            # DGX H100: eight ConnectX-7 for the GPUs, 400 Gb/s each.
            network_bytes_per_s=50_000_000_000,
            # sheet: PCIe Gen5, 128 GB/s both ways.
            host_link_bytes_per_s=64_000_000_000,
        ),
        "h200": Gpu(
            # spec: h200.txtpb, commit 4336d12; except the name, which is jax's.
            device_kind="NVIDIA H200",
            compute_capability=(9, 0),
            num_sms=132,
            clock_ghz=1.98,
            memory_bytes=151_397_597_184,
            memory_bytes_per_s=4_800_000_000_000,
            l2_bytes=52_428_800,
            shared_memory_per_sm_bytes=233_472,
            shared_memory_per_block_bytes=232_448,
            # sheet: 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both ways.
            peak_bf16_flops_per_s=989.4e12,
            node_link_bytes_per_s=450_000_000_000,
            # DGX H200: eight ConnectX-7 for the GPUs, 400 Gb/s each.
            network_bytes_per_s=50_000_000_000,
            # sheet: PCIe Gen5, 128 GB/s both ways.
            host_link_bytes_per_s=64_000_000_000,
        ),
        "b200": Gpu(
            # spec: b200.txtpb, commit 300ec95.
            device_kind="NVIDIA B200",
            compute_capability=(10, 0),
            num_sms=148,
            clock_ghz=1.965,
            memory_bytes=191_514_411_008,
            memory_bytes_per_s=7_672_320_000_000,
            l2_bytes=132_644_864,
            shared_memory_per_sm_bytes=233_472,
            shared_memory_per_block_bytes=232_448,
            # sheet of HGX B200: for 8 GPUs 36 PFLOP/s with sparsity, NVLink 14.4 TB/s
            # both ways.
            peak_bf16_flops_per_s=2250e12,
            node_link_bytes_per_s=900_000_000_000,
            # DGX B200: eight ConnectX-7 for the GPUs, 400 Gb/s each.
            network_bytes_per_s=50_000_000_000,
            # sheet: PCIe Gen5, 128 GB/s both ways.
            host_link_bytes_per_s=64_000_000_000,
        ),
    }
)
"""The GPUs that can be described, by name."""

# Dense bf16 FLOP/s by substring of `device_kind`; the first match wins. An entry taken
# from GPUS covers all variants of its model that are not listed before it. Source of
# the other entries: NVIDIA data sheets of H200 NVL, H100 PCIe and NVL, GB200 NVL72,
# L40S and L4; half of the figure with sparsity.
_PEAKS = (
    ("H200 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835.5e12),
    ("GB200", 2500e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("H200", GPUS["h200"].peak_bf16_flops_per_s),
    ("H100", GPUS["h100"].peak_bf16_flops_per_s),
    ("B200", GPUS["b200"].peak_bf16_flops_per_s),
    ("A100", GPUS["a100-80g"].peak_bf16_flops_per_s),
)


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return the dense bf16 peak of one device, in FLOP/s; None if unknown.

    Args:
      device_kind: value of `jax.Device.device_kind`. The peak of a MIG slice is
        unknown, because its name does not give its share of the device.
    """
    if "MIG" in device_kind:
        return None
    return next((peak for part, peak in _PEAKS if part in device_kind), None)
