"""One small kernel for each property of the interpreter that the tests rely on.

Each probe multiplies a [64, 128] by b [128, 64] in its own way and returns the product.
Those whose name begins with `bad_` are wrong programs that the interpreter must refuse.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.interpreter import completion

M, N, K = 64, 64, 128
LAYOUT = plgpu.Layout.WGMMA
_Accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
ACC = _Accumulator((M, N), jnp.float32)
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def run(name: str) -> float:
    """Return the largest error of a probe's product."""
    with completion.interpreter():
        got, want = PROBES[name]()
    return float(np.abs(got - want).max())


def num_compilations(name: str) -> int:
    """Return how often the body of a probe's kernel is compiled."""
    run(name)
    return len(completion.compiled)


def _copy_out(tile, out) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)


def _multiply(
    body: Callable,
    *,
    threads: int = 1,
    indices=None,
    blocks: int = 1,
    store: Callable = _copy_out,
    beside: Callable = lambda: None,
):
    """Return the result of a kernel that runs `body`, and the expected product.

    Args:
      body: (a and b in SMEM, a and indices in GMEM, barriers) -> a @ b.
      threads: number of warpgroups; the first computes.
      indices: [1, 4] int32, for `body`.
      blocks: number of blocks that compute the product.
      store: (tile in SMEM, its destination in GMEM) writes the product.
      beside: function that each of the other warpgroups runs.
    """
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
    b = jax.random.normal(keys[1], (K, N), jnp.bfloat16)
    indices = jnp.zeros((1, 4), jnp.int32) if indices is None else indices

    def kernel(a_gmem, b_gmem, indices_gmem, o_gmem, a_smem, b_smem, o_smem, bars):
        def compute():
            plgpu.copy_gmem_to_smem(a_gmem, a_smem, bars.at[0])
            plgpu.copy_gmem_to_smem(b_gmem, b_smem, bars.at[0])
            plgpu.barrier_wait(bars.at[0])
            o_smem[...] = body(a_smem, b_smem, a_gmem, indices_gmem, bars)
            store(o_smem, o_gmem.at[lax.axis_index("block")])

        if threads == 1:
            compute()
        else:
            pl.when(lax.axis_index("wg") == 0)(compute)
            pl.when(lax.axis_index("wg") != 0)(beside)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((blocks, M, N), jnp.float32),
        scratch_types=[
            plgpu.SMEM((M, K), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.SMEM((K, N), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.SMEM((M, N), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="wg",
    )
    want = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    return np.asarray(run(a, b, indices)), want


def _scoped(body: Callable, *accumulators) -> jax.Array:
    return pl.run_scoped(body, *(accumulators or (ACC,)))


def register_operand():
    """Multiply with the first operand in registers."""

    def body(a, b, *_):
        def run(acc):
            plgpu.wgmma(acc, plgpu.load(a, layout=LAYOUT), b)
            return acc[...]

        return _scoped(run)

    return _multiply(body)


def run_state():
    """Start an accumulator from a value, get the sum back."""

    def body(a, b, *_):
        start = plgpu.layout_cast(jnp.full((M, N), 2.0, jnp.float32), LAYOUT)
        run = pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))
        return run(_Accumulator.init(start)) - jnp.float32(2)

    return _multiply(body)


def accumulator_store():
    """Scale an accumulator between two multiplications."""

    def body(a, b, *_):
        def run(acc):
            plgpu.wgmma(acc, a, b)
            acc[...] = acc[...] * 0.5
            plgpu.wgmma(acc, a, b)
            return acc[...] * (2 / 3)

        return _scoped(run)

    return _multiply(body)


def accumulator_store_in_blocks():
    """Store to the accumulators of two blocks, which have the same name."""

    def body(a, b, *_):
        def run(acc):
            acc[...] = plgpu.layout_cast(jnp.full((M, N), 2.0, jnp.float32), LAYOUT)
            plgpu.wgmma(acc, a, b)
            return acc[...] - 2.0

        return _scoped(run)

    return _multiply(body, threads=2, blocks=2)


def two_in_flight():
    """Read the first of two accumulators while the second is in flight."""

    def body(a, b, *_):
        def run(first, second):
            plgpu.wgmma(first, a, b)
            plgpu.wgmma(second, a, b)
            once = plgpu.wgmma_accumulator_load(first, wait_n=1)
            return second[...] * 2.0 - once

        return _scoped(run, ACC, ACC)

    return _multiply(body)


def partial_waits():
    """Wait for all wgmmas but the last in a loop over slices."""

    def body(a, b, *_):
        def run(acc):
            @pl.loop(0, K // 64)
            def _(i):
                part = pl.ds(i * 64, 64)
                plgpu.wgmma(acc, a.at[:, part], b.at[part])
                plgpu.wgmma_wait(1)

            return acc[...]

        return _scoped(run)

    return _multiply(body)


def branches():
    """Multiply within pl.when and lax.cond, on an accumulator from outside."""

    def body(a, b, a_gmem, indices, *_):
        def run(acc):
            zero = indices[0, 0]
            pl.when(zero == 0)(lambda: plgpu.wgmma(acc, a, b))
            pl.when(zero == 1)(lambda: plgpu.wgmma(acc, a, b))
            plgpu.wgmma_wait(0)

            def twice():
                plgpu.wgmma(acc, a, b)
                return plgpu.wgmma_accumulator_load(acc) * 0.5

            return lax.cond(zero == 0, twice, lambda: acc[...])

        return _scoped(run)

    return _multiply(body)


def gmem_scalars():
    """Take the bounds of a loop, and the slices in it, from global memory."""

    def body(a, b, a_gmem, indices, *_):
        def run(acc):
            @pl.loop(indices[0, 1], indices[0, 2])
            def _(i):
                part = pl.ds((1 - indices[0, i]) * 64, 64)
                plgpu.wgmma(acc, a.at[:, part], b.at[part])
                plgpu.wgmma_wait(0)

            return acc[...]

        return _scoped(run)

    return _multiply(body, indices=jnp.array([[1, 0, 2, 0]], jnp.int32))


def gmem_vectors():
    """Load a tile of global memory straight into registers."""

    def body(a, b, a_gmem, *_):
        def run(acc):
            plgpu.wgmma(acc, plgpu.load(a_gmem, layout=LAYOUT), b)
            return acc[...]

        return _scoped(run)

    return _multiply(body)


def many_blocks():
    """Compute the same product in three blocks."""

    def body(a, b, *_):
        def run(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return _scoped(run)

    return _multiply(body, threads=2, blocks=3)


def _product(a, b, *_):
    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return _scoped(run)


def _halves(tile, out):
    """Return source and destination of the copies of both halves."""
    parts = [pl.ds(start, M // 2) for start in (0, M // 2)]
    return [(tile.at[part], out.at[part]) for part in parts]


def copies_in_one_group():
    """Wait for two copies that the second commits, then write to the first's source."""

    def store(tile, out):
        first, second = _halves(tile, out)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(*first, commit_group=False)
        plgpu.copy_smem_to_gmem(*second)
        plgpu.wait_smem_to_gmem(0)
        tile[...] = jnp.zeros((M, N), jnp.float32)

    return _multiply(_product, store=store)


def copies_in_two_groups():
    """Wait for the first of two groups, then write to its source."""

    def store(tile, out):
        first, second = _halves(tile, out)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(*first)
        plgpu.copy_smem_to_gmem(*second)
        plgpu.wait_smem_to_gmem(1)
        first[0][...] = jnp.zeros((M // 2, N), jnp.float32)
        plgpu.wait_smem_to_gmem(0)

    return _multiply(_product, store=store)


def copies_committed_apart():
    """Commit two copies by an instruction of its own; an empty group comes after."""

    def store(tile, out):
        first, second = _halves(tile, out)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(*first, commit_group=False)
        plgpu.copy_smem_to_gmem(*second, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(1)
        tile[...] = jnp.zeros((M, N), jnp.float32)
        plgpu.wait_smem_to_gmem(0)

    return _multiply(_product, store=store)


def bad_wait_for_later_copies():
    """Wait for six later copies, but not for the copy of what is read."""

    def body(a, b, a_gmem, indices, bars):
        def wait_for_others(*others):
            plgpu.copy_gmem_to_smem(a_gmem, a, bars.at[1])
            for _ in range(3):
                for other in others:
                    plgpu.copy_gmem_to_smem(a_gmem, other, bars.at[0])
                plgpu.barrier_wait(bars.at[0])

        tile = plgpu.SMEM((M, K), jnp.bfloat16, transforms=_SWIZZLED)
        pl.run_scoped(wait_for_others, tile, tile, collective_axes="wg")
        return _product(a, b)

    return _multiply(body)


def bad_copy_in_no_group():
    """Commit the first of two copies only, wait, and end."""

    def store(tile, out):
        first, second = _halves(tile, out)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(*first)
        plgpu.copy_smem_to_gmem(*second, commit_group=False)
        plgpu.wait_smem_to_gmem(0)

    return _multiply(_product, store=store)


def bad_copy_committed_late():
    """Wait before the commit, and write to what the copy reads."""

    def store(tile, out):
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out, commit_group=False)
        plgpu.wait_smem_to_gmem(0)
        tile[...] = jnp.zeros((M, N), jnp.float32)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    return _multiply(_product, store=store)


def bad_copy_committed_by_another():
    """Let another warpgroup commit and wait."""

    def store(tile, out):
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out, commit_group=False)

    def beside():
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    return _multiply(_product, threads=2, store=store, beside=beside)


def bad_wait_for_copies():
    """Wait for all groups but one where both copies are in that one."""

    def store(tile, out):
        first, second = _halves(tile, out)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(*first, commit_group=False)
        plgpu.copy_smem_to_gmem(*second)
        plgpu.wait_smem_to_gmem(1)
        first[0][...] = jnp.zeros((M // 2, N), jnp.float32)
        plgpu.wait_smem_to_gmem(0)

    return _multiply(_product, store=store)


def bad_end_before_a_group():
    """End while the last of two groups may still be read."""

    def store(tile, out):
        first, second = _halves(tile, out)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(*first)
        plgpu.copy_smem_to_gmem(*second)
        plgpu.wait_smem_to_gmem(1)

    return _multiply(_product, store=store)


def _add(body: Callable, *, blocks: int = 2, rows: int = M, start: int = 0):
    """Return what two warpgroups of each block add to a matrix, and what they should.

    Args:
      body: (tile in SMEM, its place among the sums, barriers), for each warpgroup.
      blocks: number of blocks that add.
      rows: rows of the matrix; tiles may extend beyond them.
      start: row at which every tile is added.
    """
    values = jax.random.normal(jax.random.key(0), (blocks, 2, M, N))

    def kernel(values_gmem, sums_gmem, _, tile_smem, bars):
        b, wg = lax.axis_index("block"), lax.axis_index("wg")
        tile = tile_smem.at[wg]
        plgpu.copy_gmem_to_smem(values_gmem.at[b, wg], tile, bars.at[wg])
        plgpu.barrier_wait(bars.at[wg])
        # Added to a scalar of the kernel, since jax checks a slice that it knows.
        body(tile, sums_gmem.at[pl.ds(start + 0 * b, M)], bars.at[2])

    sums = jax.new_ref(jnp.ones((rows, N), jnp.float32))
    plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((1,), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, M, N), jnp.float32),
            plgpu.Barrier(num_barriers=3),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
    )(values, sums)
    want = np.ones((rows, N), np.float32)
    want[start:] += np.asarray(values).sum(axis=(0, 1))[: rows - start]
    return np.asarray(sums[...]), want


def _add_tile(tile, sums) -> None:
    plgpu.copy_smem_to_gmem(tile, sums, reduction_op="add")


def _by_first(function: Callable, *args) -> None:
    pl.when(lax.axis_index("wg") == 0)(lambda: function(*args))


def additions_of_all():
    """Let all warpgroups of all blocks add to the same numbers."""

    def body(tile, sums, _):
        _add_tile(tile, sums)
        plgpu.wait_smem_to_gmem(0)

    return _add(body)


def additions_beyond_the_end():
    """Add a tile of which the matrix has only the first rows."""

    def body(tile, sums, _):
        _add_tile(tile, sums)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return _add(body, rows=M, start=M // 4)


def addition_read_and_written_again():
    """Write to the source once it has been read, and add that too."""

    def body(tile, sums, _):
        _add_tile(tile, sums)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = jnp.zeros((M, N), jnp.float32)
        plgpu.commit_smem()
        _add_tile(tile, sums)
        plgpu.wait_smem_to_gmem(0)

    return _add(body)


def bad_source_of_an_addition():
    """Write to the source while it may still be read."""

    def body(tile, sums, _):
        _add_tile(tile, sums)
        tile[...] = jnp.zeros((M, N), jnp.float32)
        plgpu.wait_smem_to_gmem(0)

    return _add(body)


def bad_addition_without_a_fence():
    """Add what was stored without a fence."""

    def body(tile, sums, _):
        tile[...] = jnp.ones((M, N), jnp.float32)
        _add_tile(tile, sums)
        plgpu.wait_smem_to_gmem(0)

    return _add(body)


def bad_end_before_an_addition():
    """End while the source may still be read."""
    return _add(lambda tile, sums, _: _add_tile(tile, sums))


def bad_read_beside_an_addition():
    """Read the sums in one warpgroup while the other adds."""

    def body(tile, sums, barrier):
        def read():
            plgpu.copy_gmem_to_smem(sums, tile, barrier)
            plgpu.barrier_wait(barrier)

        def add():
            _add_tile(tile, sums)
            plgpu.wait_smem_to_gmem(0)

        _by_first(read)
        pl.when(lax.axis_index("wg") == 1)(add)

    return _add(body, blocks=1)


def bad_copy_beside_an_addition():
    """Copy to the sums in one warpgroup while the other adds."""

    def body(tile, sums, _):
        _by_first(plgpu.copy_smem_to_gmem, tile, sums)
        pl.when(lax.axis_index("wg") == 1)(lambda: _add_tile(tile, sums))
        plgpu.wait_smem_to_gmem(0)

    return _add(body, blocks=1)


def bad_early_overwrite():
    """Overwrite an operand before the wgmma that reads it is waited for."""

    def body(a, b, *_):
        def run(acc):
            plgpu.wgmma(acc, a, b)
            b[...] = jnp.zeros((K, N), jnp.bfloat16)
            return acc[...]

        return _scoped(run)

    return _multiply(body)


def bad_missing_fence():
    """Multiply what was just written, without a fence for the async proxy."""

    def body(a, b, *_):
        b[...] = b[...] * 1.0

        def run(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return _scoped(run)

    return _multiply(body)


def bad_late_fence():
    """Put the fence after the wgmma instead of before it."""

    def body(a, b, *_):
        b[...] = b[...] * 1.0

        def run(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.commit_smem()
            return acc[...]

        return _scoped(run)

    return _multiply(body)


def bad_read_in_flight():
    """Wait for all wgmmas but the last, and read the accumulator of the last."""
    return _read_after_wait(1)


def bad_read_at_once():
    """Read an accumulator without any wait."""
    return _read_after_wait(None)


def _read_after_wait(wait_n: int | None):

    def body(a, b, *_):
        def run(acc):
            plgpu.wgmma(acc, a, b)
            return plgpu.wgmma_accumulator_load(acc, wait_n=wait_n)

        return _scoped(run)

    return _multiply(body)


def bad_store_in_flight():
    """Store to an accumulator without waiting for its last wgmma."""

    def body(a, b, *_):
        def run(acc):
            plgpu.wgmma(acc, a, b)
            acc[...] = plgpu.layout_cast(jnp.zeros((M, N), jnp.float32), LAYOUT)
            return acc[...]

        return _scoped(run)

    return _multiply(body)


def bad_scope_end_in_flight():
    """Leave the scope of an accumulator while a wgmma on it is in flight."""

    def body(a, b, *_):
        _scoped(lambda acc: plgpu.wgmma(acc, a, b))

        def run(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return _scoped(run)

    return _multiply(body)


def bad_no_one_arrives():
    """Wait for a barrier at which no warpgroup arrives."""

    def body(a, b, a_gmem, indices, bars):
        plgpu.barrier_wait(bars.at[1])
        return jnp.zeros((M, N), jnp.float32)

    return _multiply(body, threads=2)


RIGHT = (
    register_operand,
    run_state,
    accumulator_store,
    accumulator_store_in_blocks,
    two_in_flight,
    partial_waits,
    branches,
    gmem_scalars,
    gmem_vectors,
    many_blocks,
    copies_in_one_group,
    copies_in_two_groups,
    copies_committed_apart,
    additions_of_all,
    additions_beyond_the_end,
    addition_read_and_written_again,
)
WRONG = {
    bad_early_overwrite: "RACE DETECTED",
    bad_missing_fence: "RACE DETECTED",
    bad_late_fence: "RACE DETECTED",
    bad_read_in_flight: "accumulator read while a wgmma on it is in flight",
    bad_read_at_once: "accumulator read while a wgmma on it is in flight",
    bad_store_in_flight: "accumulator stored to while a wgmma on it is in flight",
    bad_scope_end_in_flight: "end of the accumulator's scope while a wgmma on it is",
    bad_wait_for_later_copies: "RACE DETECTED",
    bad_copy_in_no_group: "a copy to global memory that belongs to no group",
    bad_copy_committed_late: "RACE DETECTED",
    bad_copy_committed_by_another: "a copy to global memory that belongs to no group",
    bad_wait_for_copies: "RACE DETECTED",
    bad_end_before_a_group: "Not all copy_smem_to_gmem read-side operations completed",
    bad_source_of_an_addition: "RACE DETECTED",
    bad_addition_without_a_fence: "RACE DETECTED",
    bad_end_before_an_addition: "Not all copy_smem_to_gmem read-side operations",
    bad_read_beside_an_addition: "RACE DETECTED",
    bad_copy_beside_an_addition: "RACE DETECTED",
    bad_no_one_arrives: "deadlock: all warpgroups that are not done wait",
}
"""What the interpreter says of each."""
PROBES = {probe.__name__: probe for probe in (*RIGHT, *WRONG)}
