"""Groups of bulk copies to global memory: a wait sees only what was committed.

jax's interpreter waits for copies, one by one, and ignores which group a copy belongs
to. A kernel that does not commit its last copy then passes, although it may end, or
write to the shared memory again, while the copy engine still reads it. Here, as on the
hardware,

- a copy belongs to no group until its warpgroup commits, by `commit_group=True` of this
  copy or a later one, or by `plgpu.commit_smem_to_gmem_group`. A commit makes one group
  of all copies since the one before, an empty group where there are none;
- `plgpu.wait_smem_to_gmem(n)` leaves at most the last n groups of its own warpgroup
  unfinished, and does not wait for copies without a group: a write to memory that they
  read is a race;
- a warpgroup that ends with a copy in no group is an error.

Source: PTX ISA, cp.async.bulk.commit_group and cp.async.bulk.wait_group.
"""

import dataclasses
from typing import Any

from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

from tests.kernels.interpreter import bulk_add


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copy:
    """A copy in no group, and the clocks at which it has read and written."""

    read: Any
    write: Any
    where: str


def _uncommitted(shared: memory.GPUSharedMemory, thread: memory.Thread) -> list[_Copy]:
    """Return the copies of one warpgroup; only that warpgroup changes the list."""
    # Stored with the memory of the running kernel, and freed with it.
    copies = vars(shared).setdefault("uncommitted_copies", {})
    return copies.setdefault(thread, [])


@gpu_callbacks.fail_on_exception
def copy(*, token, thread, source_info, commit_group, **rest):
    """Copy, and commit if asked to. Replaces `gpu_callbacks.copy_smem_to_gmem`."""
    token = bulk_add.copy(
        token=token,
        thread=thread,
        source_info=source_info,
        commit_group=commit_group,
        **rest,
    )
    shared = gpu_callbacks._get_shared_memory()
    if shared.detect_races:
        # jax has queued the copy for a wait; it is queued again with its group.
        op = _Copy(
            read=shared.pending_smem_to_gmem_read_clocks[thread].pop(),
            write=shared.pending_smem_to_gmem_write_clocks[thread].pop(),
            where=source_info_util.summarize(source_info),
        )
        _uncommitted(shared, thread).append(op)
        if commit_group:
            _commit(shared, thread)
    return token


@gpu_callbacks.fail_on_exception
def commit(*, token, mesh_location, thread, source_info=None):
    """Make a group of the copies since the last commit."""
    del mesh_location, source_info
    _commit(gpu_callbacks._get_shared_memory(), thread)
    return (token,)


def _commit(shared: memory.GPUSharedMemory, thread: memory.Thread) -> None:
    clock = shared.get_clock(thread)
    if clock is None:  # Race detection is off.
        return
    # The warpgroup's own clock, which an empty group does not change.
    read, write = clock.copy(), clock.copy()
    copies = _uncommitted(shared, thread)
    for op in copies:
        read.update(op.read)
        write.update(op.write)
    copies.clear()
    shared.add_copy_smem_to_gmem_clocks(thread, read, write)


_stock_finished = memory.GPUSharedMemory.kernel_thread_finished


def thread_finished(self, thread):
    """Check, then end. Replaces `GPUSharedMemory.kernel_thread_finished`."""
    copies = _uncommitted(self, thread)
    if copies:
        raise RuntimeError(
            "the kernel ends with a copy to global memory that belongs to no group, "
            f"called at {copies[0].where}: no wait has waited for it; commit it"
        )
    _stock_finished(self, thread)
