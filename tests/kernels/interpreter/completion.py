"""Complete jax's Mosaic GPU interpreter, for tests of kernels on a CPU.

    completion.install()
    with completion.interpreter():
        out = kernel(...)

Test-only. It replaces functions of private modules of jax in this process; what is
compiled for a GPU does not change. The docstrings of `wgmma`, `bulk_groups`,
`bulk_add`, `equations` and `deadlock` describe their replacements. Those of this
module: a race is always an error (jax 0.11 prints it and continues; jax 0.12 raises); a
kernel is compiled once, not once per warpgroup and block; and the first failure of a
kernel is kept, which XLA may replace by a later one.
"""

import logging
import threading
from typing import Any, NoReturn

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.interpreter import contract

NUM_COPIES = 256
"""Number of copies between global and shared memory that have clocks of their own. The
copies take these clocks in turn. Waiting for a copy also orders all earlier copies on
the same clock, so a race with one of those is not seen."""
failures: list[Exception] = []
"""Exceptions of failed kernels, in order, since the list was last cleared."""


def install() -> None:
    """Replace the functions; call it once, before any kernel is interpreted.

    Raises:
      RuntimeError: the installed jax differs from the versions that are supported.
    """
    contract.check()
    # Imported after `check`, because these modules need the functions that it checks.
    from jax._src.pallas.mosaic.interpret import race_detection_state, thread_map
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
    from jax._src.pallas.mosaic_gpu.interpret import (
        race_detection_state as gpu_race_detection_state,
    )
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

    from tests.kernels.interpreter import bulk_groups, deadlock, equations, wgmma

    gpu_callbacks.wgmma = wgmma.call
    gpu_callbacks.wgmma_accumulator_deref = wgmma.read_accumulator
    gpu_callbacks._deallocate_buffer = wgmma.deallocate_buffer
    gpu_callbacks.kernel_thread_finished = deadlock.kernel_thread_finished
    gpu_callbacks.copy_smem_to_gmem = bulk_groups.copy
    memory.GPUSharedMemory.kernel_thread_finished = bulk_groups.thread_finished
    memory.Barrier._wait = deadlock.barrier_wait
    jaxpr_interpret.JaxprInterpreter.interpret = equations.interpret
    for module in (race_detection_state, gpu_race_detection_state):
        vars(module)["print"] = _raise_race  # In 0.12 these modules print nothing.
    thread_map._run_jaxpr = _run_compiled

    stock_set_failed = memory.GPUSharedMemory.set_failed

    def set_failed(self, exception, failed_thread=None, top_level=True):
        failures.append(exception)
        stock_set_failed(self, exception, failed_thread, top_level)

    memory.GPUSharedMemory.set_failed = set_failed
    # Each failed callback would log its stack.
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)


def interpreter():
    """Return a context in which Mosaic GPU kernels are interpreted, races included.

    Memory that the kernel has not written holds NaN.
    """
    return plgpu.force_gpu_interpret_mode(
        plgpu.InterpretGPUParams(
            detect_races=True,
            uninitialized_memory="nan",
            num_tma_threads_per_device=NUM_COPIES,
        )
    )


def reset() -> None:
    """Discard a failed kernel and compiled programs; call this between kernels."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()
    failures.clear()
    compiled.clear()


def _raise_race(message: str) -> NoReturn:
    raise RuntimeError(message)


compiled: dict[int, tuple[Any, Any]] = {}
"""By id of a jaxpr: the executable, and the jaxpr, so that its id is not reused."""
_compiled_lock = threading.Lock()


def _run_compiled(jaxpr, consts, *args):
    """Run one warpgroup. Replaces `thread_map._run_jaxpr`, which compiles each time."""
    from jax._src.pallas.mosaic.interpret import thread_map

    with _compiled_lock:
        if id(jaxpr) not in compiled:
            run = jax.jit(thread_map._run, static_argnums=0)
            executable = run.trace(jaxpr, consts, *args).lower().compile()
            compiled[id(jaxpr)] = executable, jaxpr
        executable, _ = compiled[id(jaxpr)]
    executable(consts, *args)
