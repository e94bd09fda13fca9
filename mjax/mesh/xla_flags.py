"""XLA options that a program is compiled with: the one table.

They are given per program, as compiler options: they win over those of XLA_FLAGS, and
no process-wide state is changed.
"""

from mjax.mesh.axes import AxisSizes

PIPELINE_ON_GPU: dict[str, bool | int] = {
    # By default one collective is in flight at a time: a transfer between stages then
    # waits for every collective over tp, and hides behind nothing.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # Without, the gradient's transfer starts behind most of the forward slot.
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}
"""Read from the schedules that XLA makes for H200s: docs/benchmarks/pipeline_overlap.md
(jax 0.11.2)."""


def compiler_options(platform: str, sizes: AxisSizes) -> dict[str, bool | int]:
    """Return the options for a training step.

    Args:
      platform: of the devices, such as cpu or gpu.
      sizes: of the mesh axes.
    """
    if platform == "gpu" and sizes.pp > 1:
        return dict(PIPELINE_ON_GPU)
    return {}
