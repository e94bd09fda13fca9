"""Check whether devices support FP8 matmuls.

Input: a mesh of real or described devices. Output: a text that says how these devices
multiply 8-bit floats, or an error. Source: NVIDIA, PTX ISA, section mma: `.e4m3` and
`.e5m2` from sm_89 on. On older GPUs XLA silently computes in 16 bits, more slowly than
a run without FP8.
"""

from jax.sharding import AbstractMesh, Mesh

from mjax.hardware.gpus import GPUS

FIRST = (8, 9)
"""Compute capability of the first GPUs with FP8 matmuls (Ada)."""


def describe_fp8(mesh: Mesh | AbstractMesh) -> str:
    """Return a text that says how the devices of a mesh multiply 8-bit floats.

    Raises:
      ValueError: the devices are GPUs without FP8 matmuls, or of unknown compute
        capability.
    """
    device = mesh.abstract_mesh.abstract_device
    if device.platform == "cpu":
        return "computed in bfloat16 on simulated devices: the same numbers, no gain"
    found = _compute_capability(mesh)
    if found is None or found < FIRST:
        what = "unknown" if found is None else f"{found[0]}.{found[1]}"
        raise ValueError(
            "--precision.matmul fp8 needs GPUs of compute capability "
            f"{FIRST[0]}.{FIRST[1]} or higher (Ada, Hopper, Blackwell), got "
            f"{device.device_kind} with {what}; use --precision.matmul compute"
        )
    return f"native on {device.device_kind} (compute capability {found[0]}.{found[1]})"


def _compute_capability(mesh: Mesh | AbstractMesh) -> tuple[int, int] | None:
    """Return (major, minor) of the devices' compute capability; None if unknown."""
    if isinstance(mesh, Mesh):
        stated = getattr(mesh.devices.flat[0], "compute_capability", None)
        if stated is None:
            return None
        major, _, minor = str(stated).partition(".")
        return int(major), int(minor or 0)
    kind = mesh.abstract_mesh.abstract_device.device_kind
    described = (gpu for gpu in GPUS.values() if gpu.device_kind == kind)
    return next((gpu.compute_capability for gpu in described), None)
