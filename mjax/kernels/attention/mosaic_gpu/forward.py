"""The forward kernel: output and log-sum-exp of sliding-window attention.

A thread block computes a tile of queries of one head. It walks only the blocks of keys
that these queries see, from the diagonal or the last key back to the first.

The softmax overlaps matmuls in two ways (Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, sections 3.1 and 3.2). Inside a warpgroup, the output matmul of one
block is in flight while the softmax of the next block is computed. The warpgroups take
turns at issuing matmuls, so the matmuls of one warpgroup overlap the exponentials of
another.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention.mosaic_gpu import masks, tiles
from mjax.kernels.attention.mosaic_gpu.tiles import ROW, ROWS, TILE, Problem
from mjax.kernels.attention.tuning import MosaicKernel
from mjax.kernels.varying import vary_like

# The running maximum starts at a finite value, and hidden scores are -inf. If a whole
# row of a block is hidden, exp2(-inf - finite) = 0, and nothing becomes NaN.
_LOWEST = -1e30


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    first: Int32[Array, "B P"] | None,
    last: Int32[Array, "B P"] | None = None,
    *,
    problem: Problem,
    tuning: MosaicKernel,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N P"]]:
    """Run the kernel.

    Args:
      q: queries, bfloat16 or float16.
      k: keys, dtype of q.
      v: values, dtype of q.
      first: `op.first_keys`, or None.
      last: `op.last_keys`, or None.
      problem: sizes.
      tuning: sizes of the kernel.

    Returns:
      out: dtype of q.
      lse: float32, natural log-sum-exp of each query's scores. In the last tile it is
        inf at positions beyond the end of the sequence; beyond that tile it is
        undefined.
    """
    p, stages, block, wgs = problem, tuning.stages, tuning.block, tuning.warpgroups
    tile = wgs * ROWS
    order = tiles.Order.of(
        p, batch=q.shape[0], heads=p.heads, other_heads=p.kv_heads, tile=tile
    )
    scores_type = tiles.accumulator(block)
    out_type = tiles.accumulator(p.out_dim)
    # The first `out_dim` columns of the queries share memory with the output.
    parts = [(0, p.out_dim), (p.out_dim, p.head_dim)][: 1 + (p.out_dim < p.head_dim)]

    def kernel(*refs):
        (q_g, k_g, v_g, *edges_g), rest = refs[:-13], refs[-13:]
        out_g, lse_g, q_s, k_s, v_s, lse_s, sums_s, *barriers = rest
        q_full, k_full, v_full, k_free, v_free, turns = barriers
        wg = lax.axis_index("wg")
        b, n, place = order.here()
        t = order.tiles - 1 - place  # the last queries see the most keys
        keys = masks.FirstKeys(p, *masks.at_row(edges_g, (first, last), b))
        whole = keys.blocks(t * tile, tile, block)
        low, high = whole.low, whole.high
        steps = high - low

        def compute():
            plgpu.set_max_registers(tuning.registers, action="increase")
            i0 = t * tile + wg * ROWS
            rows = pl.ds(i0, ROWS)
            for (begin, end), part in zip(parts, q_s, strict=True):
                source = q_g.at[b, rows, n, pl.ds(begin, end - begin)]
                plgpu.copy_gmem_to_smem(source, part.at[wg], q_full.at[wg])
            plgpu.barrier_wait(q_full.at[wg])
            out, row_max, row_sum = pl.run_scoped(lambda acc: walk(acc, i0), out_type)
            out = out * tiles.along_rows(1.0 / row_sum, out.shape)
            out_s = q_s[0].at[wg]
            out_s[...] = out.astype(q.dtype)
            lse = (row_max + jnp.log2(row_sum) + p.offset) / tiles.LOG2_E
            # In the backward kernels, a query beyond the sequence must see no key.
            lse_s[wg] = jnp.where(masks.positions(i0) < p.seq_len, lse, jnp.inf)
            plgpu.commit_smem()
            out_rows, lse_rows = out_g.at[b, rows, n], lse_g.at[b, n, rows]
            plgpu.copy_smem_to_gmem(out_s, out_rows, commit_group=False)
            plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_rows)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def add_scores(acc, slot):
            """Start the matmul Q K^T."""
            # If registers are scarce, addresses are computed at each use.
            me = tiles.in_loop(wg) if p.out_dim > 128 else wg
            for (begin, end), part in zip(parts, q_s, strict=True):
                keys = k_s.at[slot, :, pl.ds(begin, end - begin)]
                plgpu.wgmma(acc, part.at[me], keys.T)

        def walk(out_acc, i0):
            """Return the unnormalised output, the row maxima and the row sums."""
            own = keys.blocks(i0, ROWS, block).within(low, high)
            edges = keys.rows(i0) if keys.is_cut else None, keys.ends(i0, block)

            def first_scores(acc):
                add_scores(acc, 0)
                return acc[...]

            tiles.wait(k_full, 0, stages)
            scores = pl.run_scoped(first_scores, scores_type)
            tiles.arrive(k_free, 0, stages)
            row_max = plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), ROW)
            sums = plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), TILE)
            scores = hide(p.capped(scores), 0, edges)
            probs, row_max, sums, _ = softmax(scores, row_max, sums)
            carry = (probs.astype(q.dtype), row_max, sums)
            pl.when(wg == wgs - 1)(lambda: plgpu.barrier_arrive(turns.at[0]))
            # Steps count down from the diagonal.
            ends = [jnp.maximum(high - end, 1) for end in own.ends_down()]
            cut = [edges, (None, None), (edges[0], None)]
            if (keys.is_diagonal and block % tile == 0) or edges[1] is None:
                cut[0] = None  # only the first block contains the last keys
            if not keys.is_cut:
                cut[2] = None
            begin = 1
            for end, cut_at in zip(ends, cut, strict=True):
                if cut_at is not None:
                    body = functools.partial(next_block, out_acc, edges=cut_at)
                    carry = lax.fori_loop(begin, end, body, carry)
                    begin = end
            probs, row_max, sums = carry
            last = begin - 1
            tiles.wait(v_full, last, stages)
            plgpu.wgmma(out_acc, probs, v_s.at[tiles.slot(last, stages)])
            out = out_acc[...]
            tiles.arrive(v_free, last, stages)
            lax.fori_loop(begin, steps, idle, None)
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(turns.at[0]))
            return out, row_max, sums.sum(axis=1)

        def next_block(out_acc, step, carry, *, edges):
            """Compute a block's softmax during the previous block's output matmul."""
            probs, row_max, sums = carry
            tiles.wait(k_full, step, stages)
            plgpu.barrier_wait(turns.at[wg])

            def products(acc):
                add_scores(acc, tiles.slot(step, stages))
                tiles.wait(v_full, step - 1, stages)
                plgpu.wgmma(out_acc, probs, v_s.at[tiles.slot(step - 1, stages)])
                tiles.arrive(turns, wg + 1, wgs)
                return plgpu.wgmma_accumulator_load(acc, wait_n=1)

            scores = pl.run_scoped(products, scores_type)
            tiles.arrive(k_free, step, stages)
            scores = hide(p.capped(scores), step, edges)
            new_probs, row_max, sums, shrink = softmax(scores, row_max, sums)
            # Nothing reads this store. Without it ptxas would move the wait for the
            # matmul before the exponentials; it cannot move the wait across a store
            # that depends on all of them.
            sums_s[wg] = sums
            plgpu.wgmma_wait(0)
            tiles.arrive(v_free, step - 1, stages)
            # The probabilities are rounded only here, because the matmul has been
            # reading the old ones from these registers, and ptxas serialises matmuls
            # whose registers are overwritten.
            new_probs = lax.optimization_barrier(new_probs).astype(q.dtype)
            out_acc[...] = out_acc[...] * tiles.along_rows(shrink, out_type.shape)
            return new_probs, row_max, sums

        def idle(step, _):
            """Skip a block that only other warpgroups see."""
            tiles.wait(k_full, step, stages)
            tiles.arrive(k_free, step, stages)
            plgpu.barrier_wait(turns.at[wg])
            tiles.arrive(turns, wg + 1, wgs)
            tiles.wait(v_full, step, stages)
            tiles.arrive(v_free, step, stages)

        def hide(scores, step, edges):
            j0 = (high - 1 - step) * block
            return masks.hide_outside(scores, -jnp.inf, edges, j0)

        def softmax(scores, row_max, sums):
            """Return probabilities, new maxima, new sums, and the factor on old sums.

            The sum of a row is kept in 8 parts, each over every eighth column, so each
            thread sums its own columns.
            """
            new_max = jnp.maximum(row_max, scores.max(axis=1) * p.exponent)
            shrink = jnp.exp2(row_max - new_max)
            top = tiles.along_rows(new_max, scores.shape)
            probs = jnp.exp2(scores * p.exponent - top)
            sums = sums * tiles.along_rows(shrink, sums.shape)
            return probs, new_max, tiles.add_eighths(sums, probs), shrink

        def load():
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def copy(source, ring, full):
                def start(_, step, s):
                    keys = pl.ds((high - 1 - step) * block, block)
                    part = source.at[b, keys, tiles.floor_div(n, p.group)]
                    plgpu.copy_gmem_to_smem(part, ring.at[s], full.at[s])

                return start

            rings = [
                (k_free, copy(k_g, k_s, k_full)),
                (v_free, copy(v_g, v_s, v_full)),
            ]
            tiles.fill_rings(1, steps, stages, rings)

        pl.when(wg < wgs)(compute)
        pl.when(wg == wgs)(load)

    B = q.shape[0]
    out, lse = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((*q.shape[:3], p.out_dim), q.dtype),
            jax.ShapeDtypeStruct((B, p.heads, p.padded_len), jnp.float32),
        ],
        scratch_types=[
            [tiles.smem_tile((wgs, ROWS, j - i), q.dtype) for i, j in parts],
            tiles.smem_tile((stages, block, p.head_dim), q.dtype),
            tiles.smem_tile((stages, block, p.out_dim), q.dtype),
            plgpu.SMEM((wgs, ROWS), jnp.float32),
            plgpu.SMEM((wgs, ROWS, 8), jnp.float32),
            plgpu.Barrier(num_arrivals=len(parts), num_barriers=wgs),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_barriers=wgs),
        ],
        grid=order.grid,
        grid_names=tiles.GRID_NAMES,
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=tiles.compiler_params(),
        kernel_name="attention_forward",
    )(q, k, v, *masks.given(first, last))
    return vary_like(out, q), vary_like(lse, q)
