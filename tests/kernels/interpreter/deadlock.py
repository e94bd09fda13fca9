"""Make deadlocks errors; jax's interpreter would wait forever.

Copies by TMA are finished within the call that starts them, so only warpgroups make
progress. If each of them has ended or waits for a barrier phase that is not complete,
none can continue.
"""

import threading

from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory


class Cluster:
    """State of the warpgroups of the running cluster."""

    def __init__(self, shared: memory.GPUSharedMemory):
        self.num_warpgroups = (
            shared.num_blocks_per_cluster * shared.num_pallas_threads_per_block
        )
        self.lock = threading.Lock()
        self.finished: set[memory.Thread] = set()
        self.waiting: dict[memory.Thread, tuple[memory.Barrier, int, str]] = {}
        """Barrier, the phase whose end is waited for, and where."""

    def finish(self, thread: memory.Thread) -> None:
        with self.lock:
            self.finished.add(thread)
            if len(self.finished) == self.num_warpgroups:
                self.finished.clear()  # The next cluster uses the same threads.
                return
            self._raise_if_stuck()

    def enter(self, thread: memory.Thread, barrier: memory.Barrier, line: str) -> None:
        # Kept from before the wait: the barrier's own note changes before `leave`.
        phase = barrier.last_observed_phase_by_thread.get(thread, 0)
        with self.lock:
            self.waiting[thread] = (barrier, phase, line)
            self._raise_if_stuck()

    def leave(self, thread: memory.Thread) -> None:
        with self.lock:
            self.waiting.pop(thread, None)

    def _raise_if_stuck(self) -> None:
        stuck = {
            thread: line
            for thread, (barrier, phase, line) in self.waiting.items()
            if barrier.phase == phase
        }
        if stuck and len(stuck) + len(self.finished) == self.num_warpgroups:
            places = ", ".join(f"{thread} at {line}" for thread, line in stuck.items())
            raise RuntimeError(
                f"deadlock: all warpgroups that are not done wait: {places}"
            )


def _cluster(shared: memory.GPUSharedMemory) -> Cluster:
    # Stored with the memory of the running kernel, and freed with it.
    return vars(shared).setdefault("cluster", Cluster(shared))


_stock_wait = memory.Barrier._wait


def barrier_wait(self, thread, logging_info=None):
    """Wait for the barrier, or raise. Replaces `Barrier._wait`."""
    source = getattr(logging_info, "source_info", None)
    line = source_info_util.summarize(source) if source else "unknown"
    cluster = _cluster(self.shared_memory)
    try:
        cluster.enter(thread, self, line)
        _stock_wait(self, thread, logging_info)
    finally:
        cluster.leave(thread)


_stock_finished = gpu_callbacks.kernel_thread_finished


@gpu_callbacks.fail_on_exception
def kernel_thread_finished(*, token, mesh_location, thread):
    """End a warpgroup. Replaces `gpu_callbacks.kernel_thread_finished`."""
    token = _stock_finished(token=token, mesh_location=mesh_location, thread=thread)
    _cluster(gpu_callbacks._get_shared_memory()).finish(thread)
    return token
