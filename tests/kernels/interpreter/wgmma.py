"""Asynchronous wgmma for the interpreter: operands are read when it is waited for.

jax's interpreter multiplies at the call, ignores `wgmma_wait`, and does not look for
races on the operands. A kernel that releases shared memory too early, or that
reads a sum before it is complete, then passes. Here a wgmma is queued per warpgroup,
and

- its operands in shared memory are read at the wait that finishes it, the latest that
  hardware may do so. Both the call and the wait are reads for the race detector, on
  the clock of the async proxy: a write before the call needs a fence or a barrier, a
  write after it must be ordered after the wait;
- a first operand in registers is the value at the call (ptxas keeps those registers);
- reading, storing or freeing an accumulator while a wgmma on it is in flight is an
  error, and so is ending the kernel with one.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

Key = memory.HostAllocationKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """A part of a buffer."""

    key: Key
    access: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wgmma:
    """acc += a @ b, called and not yet finished."""

    acc: _Place
    a: _Place | np.ndarray
    b: _Place
    thread: memory.Thread
    location: Any
    source: source_info_util.SourceInfo | None

    @property
    def where(self) -> str:
        """File and line of the call."""
        return source_info_util.summarize(self.source) if self.source else "unknown"


def _queue(thread: memory.Thread) -> list[_Wgmma]:
    """Return the wgmmas in flight of one warpgroup; only that warpgroup changes it."""
    # Stored with the memory of the running kernel, and freed with it.
    shared = vars(gpu_callbacks._get_shared_memory())
    return shared.setdefault("wgmmas_in_flight", {}).setdefault(thread, [])


def _tensor_core_clock(thread: memory.Thread, ahead: int) -> Any:
    """Return the clock of the wgmma that is `ahead` places behind the last finished.

    To the race detector, the tensor core is a separate thread. Its place in the
    clocks is that of the warpgroup's first warp, which no kernel without a warp mesh
    uses.
    """
    shared = gpu_callbacks._get_shared_memory()
    clock = shared.get_clock(thread)
    if clock is not None:
        assert isinstance(thread, memory.Warpgroup), "wgmma in a single warp"
        position = shared.thread_to_vc_position(thread.warp(0))
        for _ in range(ahead):
            clock.inc(position)
    return clock


def _check_reads(op: _Wgmma, clock: Any) -> None:
    if clock is None:  # Race detection is off.
        return
    for place in (op.a, op.b):
        if isinstance(place, _Place):
            gpu_callbacks.get_races().check_read(
                op.thread,
                clock.async_smem_clock.copy(),
                place.key,
                place.access,
                source_info=op.source,
            )


@gpu_callbacks.fail_on_exception
def call(
    *,
    token,
    mesh_location,
    thread,
    acc_allocation_key_as_array,
    acc_transforms,
    a_allocation_key_as_array,
    a_transforms,
    b_allocation_key_as_array,
    b_transforms,
    source_info=None,
):
    """Queue a wgmma. Replaces `gpu_callbacks.wgmma`."""
    shared = gpu_callbacks._get_shared_memory()

    def place(key_array, transforms) -> _Place:
        key = Key.from_array(key_array)
        plain = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        return _Place(key=key, access=shared.access(key, plain))

    a = a_allocation_key_as_array
    op = _Wgmma(
        acc=place(acc_allocation_key_as_array, acc_transforms),
        # A key has one axis, a value in registers two.
        a=place(a, a_transforms) if a.ndim == 1 else np.array(a),
        b=place(b_allocation_key_as_array, b_transforms),
        thread=thread,
        location=mesh_location,
        source=source_info,
    )
    queue = _queue(thread)
    queue.append(op)
    _check_reads(op, _tensor_core_clock(thread, ahead=len(queue)))
    return token


def _finish(op: _Wgmma) -> None:
    shared = gpu_callbacks._get_shared_memory()
    logging_info = memory.GPULoggingInfo(op.location, op.thread, op.source)

    def read(place: _Place) -> np.ndarray:
        value, _, _ = shared.get_buffer_content(
            place.key, place.access, op.thread, logging_info=logging_info
        )
        if value is None or value.shape != place.access.shape:
            raise IndexError(f"wgmma at {op.where}: {place} is out of bounds")
        return value

    acc = read(op.acc)
    a = op.a if isinstance(op.a, np.ndarray) else read(op.a)
    product = np.matmul(a.astype(acc.dtype), read(op.b).astype(acc.dtype))
    clock = _tensor_core_clock(op.thread, ahead=1)
    _check_reads(op, clock)
    shared.store_buffer_content(
        op.acc.key, op.acc.access, acc + product, op.thread, logging_info=logging_info
    )
    if clock is not None:
        with shared.lock:
            shared.clocks[op.thread].update(clock)


def _finish_all_but(thread: memory.Thread, n: int) -> None:
    queue = _queue(thread)
    while len(queue) > n:
        _finish(queue.pop(0))


def _refuse_in_flight(thread: memory.Thread, key: Key, what: str) -> None:
    for op in _queue(thread):
        if op.acc.key == key:
            raise RuntimeError(
                f"{what} while a wgmma on it is in flight, called at {op.where}: "
                "wait for it first"
            )


@gpu_callbacks.fail_on_exception
def wait(*, token, mesh_location, thread, n, source_info=None):
    """Finish all wgmmas of the warpgroup but the last n."""
    del mesh_location, source_info
    _finish_all_but(thread, int(n))
    return (token,)


_stock_read_accumulator = gpu_callbacks.wgmma_accumulator_deref


@gpu_callbacks.fail_on_exception
def read_accumulator(
    *,
    token,
    mesh_location,
    thread,
    acc_allocation_key_as_array,
    wait_n,
    source_info=None,
):
    """Wait, then read. Replaces `gpu_callbacks.wgmma_accumulator_deref`."""
    if wait_n is not None:
        _finish_all_but(thread, int(wait_n))
    key = Key.from_array(acc_allocation_key_as_array)
    _refuse_in_flight(thread, key, "accumulator read")
    return _stock_read_accumulator(
        token=token,
        mesh_location=mesh_location,
        thread=thread,
        acc_allocation_key_as_array=acc_allocation_key_as_array,
        wait_n=None,
        source_info=source_info,
    )


@gpu_callbacks.fail_on_exception
def store_accumulator(
    *,
    token,
    mesh_location,
    thread,
    acc_allocation_key_as_array,
    value,
    source_info=None,
):
    """Write to an accumulator.

    jax's store to memory is not used, because it looks for races. Registers have none,
    and the next block reuses their keys at clocks that start again.
    """
    shared = gpu_callbacks._get_shared_memory()
    key = Key.from_array(acc_allocation_key_as_array)
    _refuse_in_flight(thread, key, "accumulator stored to")
    shared.store_buffer_content(
        key,
        shared.access(key, ()),
        np.array(value),
        thread,
        logging_info=memory.GPULoggingInfo(mesh_location, thread, source_info),
    )
    return (token,)


_stock_deallocate_buffer = gpu_callbacks._deallocate_buffer


@gpu_callbacks.fail_on_exception
def deallocate_buffer(
    token, mesh_location, thread, allocation_key_as_array, source_info=None
):
    """Check, then free. Replaces `gpu_callbacks._deallocate_buffer`."""
    key = Key.from_array(allocation_key_as_array)
    _refuse_in_flight(thread, key, "end of the accumulator's scope")
    return _stock_deallocate_buffer(
        token, mesh_location, thread, allocation_key_as_array, source_info
    )
