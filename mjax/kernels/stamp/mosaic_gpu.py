"""Append a row by a kernel of one thread, which reads the clock of the GPU.

Clock and cost measured on an H200, 2026-11: docs/benchmarks/gpu_stamps.md.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxtyping import Array, Int32

_UNIT_BITS = 8


@functools.partial(jax.jit, static_argnums=0)
def begin(num_rows: int, tag: Int32[Array, "1"]) -> Int32[Array, "rows 2"]:
    """Return a log with one row appended; later rows have arbitrary contents."""
    out = jax.ShapeDtypeStruct((num_rows + 1, 2), jnp.int32)
    return plgpu.kernel(_begin, out_type=out, kernel_name="stamp")(tag)


@jax.jit  # All call sites share one kernel, though its text has its caller's line.
def append(
    log: Int32[Array, "rows 2"], tag: Int32[Array, "1"]
) -> Int32[Array, "rows 2"]:
    """Return the log with one more row, written in place."""
    kernel = plgpu.kernel(_append, kernel_name="stamp")
    ref = jax.new_ref(log)
    kernel(tag, ref)
    return jax.freeze(ref)


def _begin(*refs: jax.Ref) -> None:
    _write(refs, lambda log: (_number(1), _at(1)))


def _append(*refs: jax.Ref) -> None:
    def next_row(log: ir.Value) -> tuple[ir.Value, ir.Value]:
        num = arith.addi(memref.load(log, [_at(0), _at(0)]), _number(1))
        last = _number(ir.MemRefType(log.type).shape[0] - 1)
        return num, arith.index_cast(ir.IndexType.get(), arith.minsi(num, last))

    _write(refs, next_row)


def _write(
    refs: tuple[jax.Ref, ...],
    next_row: Callable[[ir.Value], tuple[ir.Value, ir.Value]],
) -> None:
    """Write the tag and the clock to a row, and the number of rows.

    Args:
      refs: references to the tag and the log.
      next_row: maps the log to the number of rows, including the new one, and the index
        of the new row.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def write(ctx: object, tag: ir.Value, log: ir.Value) -> None:
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        with utils.single_thread(scope=utils.ThreadSubset.BLOCK):
            clock = arith.shrui(utils.globaltimer(), arith.constant(i64, _UNIT_BITS))
            num, row = next_row(log)
            memref.store(memref.load(tag, [_at(0)]), log, [row, _at(0)])
            memref.store(arith.trunci(i32, clock), log, [row, _at(1)])
            memref.store(num, log, [_at(0), _at(0)])

    write(*refs)  # pyright: ignore[reportArgumentType], refs become values


def _at(index: int) -> ir.Value:
    return arith.constant(ir.IndexType.get(), index)


def _number(number: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), number)
