"""Copies that add to global memory, number by number, in no fixed order.

jax's interpreter refuses `plgpu.copy_smem_to_gmem(..., reduction_op="add")`. Here, as
on the hardware,

- it reads its source like any copy, and numbers that lie beyond the destination's end
  are dropped;
- each number is added atomically. So additions of any warpgroups and blocks do not race
  with each other. With any other read or write of these numbers, an addition races like
  a write.

Source: PTX ISA, cp.reduce.async.bulk.tensor.
"""

import threading
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

Key = memory.HostAllocationKey


class _Clock(vector_clock.NpVectorClock):
    """The time of an addition, which is in no order with other additions."""

    def __init__(self, clock: vector_clock.NpVectorClock) -> None:
        self.clock = clock.clock.copy()

    def ordered(self, other: Any) -> bool:
        """Return whether there is no race."""
        return isinstance(other, _Clock) or super().ordered(other)


class _Addition(gpu_callbacks.AsyncCopySmemToGmemTask):
    """An addition to global memory by the copy engine."""

    def __call__(self, tma_thread_id: int) -> None:
        shared = gpu_callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, shared)
        value, _, _ = shared.get_buffer_content(
            self.src_allocation_key,
            self.src_access,
            self.thread,
            logging_info=self.logging_info,
        )
        if value is None or value.shape != self.src_access.shape:
            raise IndexError(f"addition from beyond {self.src_allocation_key}")
        self.post_read(tma_thread_id, shared)
        key, shape = self.dst_allocation_key, self._destination_shape(shared)
        part = gpu_callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if part is not None:
            access, value = part
            with vars(shared).setdefault("additions", threading.Lock()):
                sums, _, _ = shared.get_buffer_content(
                    key, access, self.thread, logging_info=self.logging_info
                )
                assert sums is not None
                shared.store_buffer_content(
                    key,
                    access,
                    sums + value,
                    self.thread,
                    logging_info=self.logging_info,
                )
        self.post_write(tma_thread_id, shared)

    def _destination_shape(self, shared: memory.GPUSharedMemory) -> tuple[int, ...]:
        return tuple(shared.buffer_shape_and_dtype(self.dst_allocation_key).shape)

    def post_read(
        self, tma_thread_id: int, shared_memory: memory.GPUSharedMemory
    ) -> None:
        """Look for races on the destination."""
        if self.clock is None:  # Race detection is off.
            return
        self.clock.inc(tma_thread_id)
        self.write_clock = self.clock.copy()
        gpu_callbacks.get_races().check_write(
            self.thread,
            _Clock(self.clock.async_smem_clock),
            self.dst_allocation_key,
            self.dst_access,
            source_info=self.source_info,
        )


_stock_copy: Any = gpu_callbacks.copy_smem_to_gmem


@gpu_callbacks.fail_on_exception
def copy(
    *,
    token,
    mesh_location,
    thread,
    src_allocation_key_as_array,
    src_transforms,
    dst_allocation_key_as_array,
    dst_transforms,
    predicate,
    source_info: source_info_util.SourceInfo,
    commit_group,
    reduction_op,
):
    """Copy or add; the group is the caller's. For `gpu_callbacks.copy_smem_to_gmem`."""
    if reduction_op is None:
        return _stock_copy(
            token=token,
            mesh_location=mesh_location,
            thread=thread,
            src_allocation_key_as_array=src_allocation_key_as_array,
            src_transforms=src_transforms,
            dst_allocation_key_as_array=dst_allocation_key_as_array,
            dst_transforms=dst_transforms,
            predicate=predicate,
            source_info=source_info,
            commit_group=commit_group,
            reduction_op=None,
        )
    if reduction_op != "add" or predicate is not None:
        raise NotImplementedError(
            f"{reduction_op=}, {predicate=}; only add is modelled"
        )
    shared = gpu_callbacks._get_shared_memory()

    def place(key_array, transforms):
        key = Key.from_array(key_array)
        plain = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        return key, shared.access(key, plain)

    source, source_access = place(src_allocation_key_as_array, src_transforms)
    sums, sums_access = place(dst_allocation_key_as_array, dst_transforms)
    addition = _Addition(
        mesh_location=mesh_location,
        thread=thread,
        src_allocation_key=source,
        src_access=source_access,
        dst_allocation_key=sums,
        dst_access=sums_access,
        source_info=source_info,
        clock=shared.incr_clock(thread) if shared.detect_races else None,
    )
    shared.execute_async_task(addition)
    return token
