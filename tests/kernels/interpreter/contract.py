"""Check that the installed jax has the private functions on which the tests depend.

Pallas' Mosaic GPU interpreter is not public: any release of jax may change it. Each
entry names a function that this folder replaces or calls, and its parameters in jax
0.11.2 and 0.12.0.1. `check` compares them before anything is replaced, so that an
upgrade ends with an error that names the difference, not with wrong results.
"""

import importlib
import inspect
from typing import Any

import jax

VERSIONS = "0.11.2 and 0.12.0.1"
_PALLAS = "jax._src.pallas"
_GPU = f"{_PALLAS}.mosaic_gpu.interpret"

FUNCTIONS = {
    f"{_GPU}.gpu_callbacks:wgmma": (
        "token mesh_location thread acc_allocation_key_as_array acc_transforms "
        "a_allocation_key_as_array a_transforms b_allocation_key_as_array "
        "b_transforms source_info"
    ),
    f"{_GPU}.gpu_callbacks:wgmma_accumulator_deref": (
        "token mesh_location thread acc_allocation_key_as_array wait_n source_info"
    ),
    f"{_GPU}.gpu_callbacks:_deallocate_buffer": (
        "token mesh_location thread allocation_key_as_array source_info"
    ),
    f"{_GPU}.gpu_callbacks:kernel_thread_finished": "token mesh_location thread",
    f"{_GPU}.gpu_callbacks:copy_smem_to_gmem": (
        "token mesh_location thread src_allocation_key_as_array src_transforms "
        "dst_allocation_key_as_array dst_transforms predicate source_info "
        "commit_group reduction_op"
    ),
    f"{_GPU}.gpu_callbacks:AsyncCopySmemToGmemTask": (
        "mesh_location thread src_allocation_key src_access dst_allocation_key "
        "dst_access source_info clock"
    ),
    f"{_GPU}.gpu_callbacks:_clip_store_to_shape": "access val shape",
    f"{_GPU}.gpu_callbacks:_get_shared_memory": "",
    f"{_GPU}.gpu_callbacks:_remove_noop_transforms": "transforms",
    f"{_GPU}.gpu_callbacks:fail_on_exception": "func",
    f"{_GPU}.gpu_callbacks:get_races": "",
    f"{_GPU}.gpu_callbacks:reset_gpu_interpret_mode_state": "",
    f"{_GPU}.gpu_callbacks:call_make_allocation_request_array": (
        "token compute_unit memory_space_id initial_ref_count"
    ),
    f"{_GPU}.gpu_callbacks:call_allocate_buffer": (
        "token mesh_location thread allocation_request_as_array value source_info"
    ),
    f"{_GPU}.gpu_callbacks:call_deallocate_buffer": (
        "token mesh_location thread allocation_key_as_array source_info"
    ),
    f"{_GPU}.race_detection_state:GPURaceDetectionState.check_write": (
        "self thread clock buffer_key rnge source_info"
    ),
    f"{_GPU}.shared_memory:GPUSharedMemory.buffer_shape_and_dtype": "self key",
    f"{_GPU}.shared_memory:GPUSharedMemory.execute_async_task": "self task",
    f"{_GPU}.shared_memory:GPUSharedMemory.incr_clock": "self thread take_lock",
    f"{_GPU}.jaxpr_interpret:JaxprInterpreter.interpret": "self jaxpr token args",
    f"{_GPU}.race_detection_state:GPURaceDetectionState.check_read": (
        "self thread clock buffer_key rnge source_info"
    ),
    f"{_GPU}.shared_memory:GPUSharedMemory.access": "self key transforms",
    f"{_GPU}.shared_memory:GPUSharedMemory.get_buffer_content": (
        "self key access args kwargs"
    ),
    f"{_GPU}.shared_memory:GPUSharedMemory.store_buffer_content": (
        "self key access value args kwargs"
    ),
    f"{_GPU}.shared_memory:GPUSharedMemory.get_clock": "self thread",
    f"{_GPU}.shared_memory:GPUSharedMemory.thread_to_vc_position": "self thread",
    f"{_GPU}.shared_memory:GPUSharedMemory.add_copy_smem_to_gmem_clocks": (
        "self thread read_clock write_clock"
    ),
    f"{_GPU}.shared_memory:GPUSharedMemory.wait_smem_to_gmem": (
        "self thread n wait_read_only"
    ),
    f"{_GPU}.shared_memory:GPUSharedMemory.kernel_thread_finished": "self thread",
    f"{_GPU}.shared_memory:GPUSharedMemory.set_failed": (
        "self exception failed_thread top_level"
    ),
    f"{_GPU}.shared_memory:GpuClockBundle.inc": "self position",
    f"{_GPU}.shared_memory:GpuClockBundle.update": "self other",
    f"{_GPU}.shared_memory:Warpgroup.warp": "self warp_id",
    f"{_GPU}.shared_memory:Barrier._wait": "self thread logging_info",
    f"{_GPU}.shared_memory:get_memory_space_idx": "space",
    f"{_PALLAS}.mosaic.interpret.thread_map:_run_jaxpr": "jaxpr consts args",
    f"{_PALLAS}.mosaic.interpret.thread_map:_run": "jaxpr consts args",
}
"""Function -> names of its parameters, in order."""

VALUES = (
    f"{_PALLAS}.mosaic_gpu.primitives:commit_group_p",
    f"{_PALLAS}.mosaic_gpu.primitives:wgmma_accumulator_store_p",
    f"{_PALLAS}.mosaic_gpu.primitives:wgmma_wait_p",
    "jax._src.state.discharge:run_state_p",
)
"""Primitives that this folder adds to the interpreter."""


def check() -> None:
    """Compare every entry with the installed jax.

    Raises:
      RuntimeError: a function is missing or has other parameters; the message names it.
    """
    differences = []
    for name, expected in FUNCTIONS.items():
        found = _find(name)
        if found is None:
            differences.append(f"{name} is missing")
            continue
        # @wraps: the signature is that of the wrapped function.
        parameters = " ".join(inspect.signature(found).parameters)
        if parameters != expected:
            differences.append(f"{name} takes ({parameters}), not ({expected})")
    differences += [f"{name} is missing" for name in VALUES if _find(name) is None]
    if differences:
        raise RuntimeError(
            f"jax {jax.__version__} differs from jax {VERSIONS}, for which "
            "tests/kernels/interpreter completes the Mosaic GPU interpreter: "
            + "; ".join(differences)
            + ". Read the new code, adapt the completion, then contract.py"
        )


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
