"""Build a mesh of described GPUs, which need not be present.

Input: the name of a GPU in `gpus.GPUS`, and axis sizes. Output: a mesh as from
`build_mesh`. Its devices cannot hold arrays. But a function that is traced for the mesh
can read the kind of GPU, and a lowered program compiles to the instructions of that
GPU, with the collectives of that mesh. Compiling needs jax's CUDA plugin (`make
env-plan`), but no GPU.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from mjax.hardware.gpus import GPUS, Gpu
from mjax.mesh.axes import AXES, AxisSizes
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import load_plugin_without_gpu
from mjax.mesh.host_memory import HOST_KIND


class NoPluginError(RuntimeError):
    """jax's CUDA plugin, which compiles for GPUs, is not installed."""


def described_mesh(
    sizes: AxisSizes,
    *,
    gpu: str = "h200",
    gpus_per_node: int = 8,
    tp_across_hosts: bool = False,
) -> Mesh:
    """Build a mesh of GPUs that need not exist.

    Args:
      sizes: size of every axis; the product is the number of GPUs.
      gpu: a name in `gpus.GPUS`.
      gpus_per_node: GPUs per host; a mesh of fewer GPUs is part of one host.
      tp_across_hosts: as in `build_mesh`.
    Returns:
      A mesh of axes `AXES`, each of type Auto. The devices are ordered by host, and
      each host has one process.
    Raises:
      ValueError: the name is unknown, the GPUs do not fill whole hosts, or
        `build_mesh` refuses the sizes.
      NoPluginError: jax has no CUDA plugin.
    """
    devices = described_devices(sizes.num_devices, gpu=gpu, gpus_per_node=gpus_per_node)
    return build_mesh(sizes, devices, tp_across_hosts=tp_across_hosts)


def abstract_mesh(sizes: AxisSizes, *, gpu: str = "h200") -> AbstractMesh:
    """Return a mesh for tracing programs for described GPUs without a plugin.

    Args:
      sizes: size of every axis; the product may be any number.
      gpu: a name in `gpus.GPUS`.
    Returns:
      A mesh of axes `AXES`, each of type Auto, without devices: a program traced for it
      sees the kind of GPU, but cannot be compiled.
    Raises:
      ValueError: the name is unknown.
    """
    _check_name(gpu)
    device = AbstractDevice(
        device_kind=GPUS[gpu].device_kind, num_cores=GPUS[gpu].num_sms, platform="gpu"
    )
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(sizes.as_tuple(), AXES, types, abstract_device=device)


def described_devices(
    num_devices: int, *, gpu: str = "h200", gpus_per_node: int = 8
) -> list[Any]:
    """List devices of a described cluster, for `build_mesh`.

    Args:
      num_devices: total number of GPUs.
      gpu: a name in `gpus.GPUS`.
      gpus_per_node: GPUs per host; fewer devices than this are part of one host.
    Returns:
      jax devices that can compile but not run; process_index is the host's index.
    Raises:
      ValueError: the name is unknown, or the GPUs do not fill whole hosts.
      NoPluginError: jax has no CUDA plugin.
    """
    _check_name(gpu)
    if num_devices < 1 or gpus_per_node < 1:
        raise ValueError(
            "num_devices and gpus_per_node must be at least 1, got "
            f"{num_devices} and {gpus_per_node}"
        )
    local = min(num_devices, gpus_per_node)
    nodes, rest = divmod(num_devices, local)
    if rest:
        raise ValueError(
            f"num_devices must be a multiple of gpus_per_node {gpus_per_node}, got "
            f"{num_devices}; use {nodes * local}, or other gpus_per_node"
        )
    load_plugin_without_gpu()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=_target_config(GPUS[gpu]),
            topology=f"1x{nodes}x{local}",  # slices x hosts x GPUs of a host
        )
    except NotImplementedError as error:
        raise NoPluginError(
            "jax has no CUDA plugin, which compiles for GPUs and is needed even on a "
            "host without one: "
            f"pip install 'mjax[plan]' jax-cuda13-plugin=={jax.__version__} "
            f"jax-cuda13-pjrt=={jax.__version__}, or make env-plan in a clone"
        ) from error
    return list(topology.devices)


def put_in_host_memory(lowered: jax.stages.Lowered, results: Sequence[bool]) -> None:
    """Mark results that are in host memory, and the arguments donated to them.

    jax marks them for devices that are present. Described devices have no memories, so
    a sharding on them loses its memory kind.

    Args:
      lowered: a program for described devices; changed in place.
      results: whether each result of the program is in pinned host memory.
    Raises:
      RuntimeError: a result in host memory has no argument donated to it.
    """
    module: Any = lowered.compiler_ir()
    [main] = [op for op in module.body if op.attributes["sym_name"].value == "main"]
    with module.context:
        kind = ir.StringAttr.get(HOST_KIND)

        def marked(name: str, are: Sequence[bool]) -> ir.ArrayAttr:
            every = [
                {item.name: item.attr for item in ir.DictAttr(entry)}
                for entry in main.attributes[name]
            ]
            for entry, is_host in zip(every, are, strict=True):
                if is_host:
                    entry["mhlo.memory_kind"] = kind
            return ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in every])

        given = [
            "tf.aliasing_output" in entry
            and results[ir.IntegerAttr(entry["tf.aliasing_output"]).value]
            for entry in map(ir.DictAttr, main.attributes["arg_attrs"])
        ]
        if sum(given) != sum(results):
            raise RuntimeError(
                f"{sum(results)} results are in host memory, but arguments are donated "
                f"to {sum(given)} of them"
            )
        main.attributes["arg_attrs"] = marked("arg_attrs", given)
        main.attributes["res_attrs"] = marked("res_attrs", results)


def _check_name(gpu: str) -> None:
    if gpu not in GPUS:
        raise ValueError(f"no GPU {gpu!r} is described; choose from {', '.join(GPUS)}")


def _target_config(gpu: Gpu) -> str:
    """Return the description in XLA's format, a GpuTargetConfigProto as text.

    Limits that compute capabilities 8.0, 9.0 and 10.0 share are constants here (CUDA
    C++ Programming Guide, table of technical specifications).
    """
    major, minor = gpu.compute_capability
    # From Hopper on, use the generation-specific instructions: sm_90a, not sm_90.
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {features}
  }}
  core_count: {gpu.num_sms}
  fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {gpu.memory_bytes_per_s}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_bytes}
  shared_memory_per_core: {gpu.shared_memory_per_sm_bytes}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.device_kind}"
"""
