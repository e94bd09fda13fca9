"""The backward kernel for queries: dq of sliding-window attention.

A thread block computes dq for a tile of queries of one head. It walks the blocks of
keys that these queries see. Scores and their gradients are recomputed for each block;
dq stays in registers. The matmul that adds to it is still in flight when the next
block's scores start.

Source: Dao 2023, algorithm 2, arXiv:2307.08691, with the inner and outer loops
exchanged.
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


def query_gradient(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    d_out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N P"],
    delta: Float[Array, "B N P"],
    first: Int32[Array, "B P"] | None,
    last: Int32[Array, "B P"] | None = None,
    *,
    problem: Problem,
    tuning: MosaicKernel,
) -> Float[Array, "B T N H"]:
    """Run the kernel.

    Args:
      q: queries, bfloat16 or float16.
      k: keys, dtype of q.
      v: values, dtype of q.
      d_out: cotangent of the output, dtype of q.
      lse: log-sum-exp from `forward`, converted to base 2, minus `Problem.offset`,
        float32.
      delta: sum over Hv of output times d_out, float32.
      first: `op.first_keys`, or None.
      last: `op.last_keys`, or None.
      problem: sizes.
      tuning: sizes of the kernel.

    Returns:
      Cotangent of q, dtype of q.
    """
    p, stages, block, wgs = problem, tuning.stages, tuning.block, tuning.warpgroups
    tile = wgs * ROWS
    order = tiles.Order.of(
        p, batch=q.shape[0], heads=p.heads, other_heads=p.kv_heads, tile=tile
    )
    scores_type = tiles.accumulator(block)
    # An operand in registers need not be read from shared memory for each block. At
    # width 128 only one operand fits, above 128 none.
    do_held, q_held = (wgs == 2 and p.head_dim <= most for most in (128, 96))

    def kernel(*refs):
        (q_g, k_g, v_g, do_g, lse_g, delta_g, *edges_g), rest = refs[:-12], refs[-12:]
        dq_g, q_s, do_s, lse_s, delta_s, k_s, v_s, *barriers = rest
        rows_full, k_full, v_full, k_free, v_free = barriers
        wg = lax.axis_index("wg")
        b, n, place = order.here()
        t = order.tiles - 1 - place  # the last queries see the most keys
        keys = masks.FirstKeys(p, *masks.at_row(edges_g, (first, last), b))
        whole = keys.blocks(t * tile, tile, block)
        low, high = whole.low, whole.high

        def compute():
            plgpu.set_max_registers(tuning.registers, action="increase")
            i0 = t * tile + wg * ROWS
            rows, full = pl.ds(i0, ROWS), rows_full.at[wg]
            plgpu.copy_gmem_to_smem(q_g.at[b, rows, n], q_s.at[wg], full)
            plgpu.copy_gmem_to_smem(do_g.at[b, rows, n], do_s.at[wg], full)
            plgpu.copy_gmem_to_smem(lse_g.at[b, n, rows], lse_s.at[wg], full)
            plgpu.copy_gmem_to_smem(delta_g.at[b, n, rows], delta_s.at[wg], full)
            plgpu.barrier_wait(full)
            lse = plgpu.load(lse_s.at[wg], layout=ROW)
            delta = plgpu.load(delta_s.at[wg], layout=ROW)
            lse = tiles.along_rows(lse, scores_type.shape)
            delta = tiles.along_rows(delta, scores_type.shape)
            dq = pl.run_scoped(
                lambda acc: walk(acc, i0, lse, delta),
                tiles.accumulator(p.head_dim),
            )
            q_s[wg] = (dq * p.scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg], dq_g.at[b, rows, n])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def walk(dq_acc, i0, lse, delta):
            """Sum dq over the blocks; skip blocks that only other warpgroups see.

            The matmul for a block's scores starts while the gradients of the previous
            block's scores are computed. Each step releases the keys of the previous
            step, because the matmuls that read them are done by then.
            """
            # Rows entirely beyond the end of the sequence still visit the last block.
            visible = keys.blocks(i0, ROWS, block)
            own = visible.within(low, high - 1)
            edges = keys.rows(i0) if keys.is_cut else None, keys.ends(i0, block)
            full_low, full_high = own.full_low, own.full_high
            # Only the last block contains the diagonal.
            one_cut = keys.is_diagonal and block % ROWS == 0
            end = full_high
            if not one_cut:
                end = tiles.clip(visible.high - 1, own.low, high - 1)
                full_low, full_high = (
                    jnp.minimum(x, end) for x in (full_low, full_high)
                )
            both = [
                plgpu.load(ref.at[wg], layout=TILE) if held else ref.at[wg]
                for ref, held in ((q_s, q_held), (do_s, do_held))
            ]

            def rows():
                """Return Q and dO of this warpgroup's rows."""
                if p.head_dim <= 128:
                    return both
                me = tiles.in_loop(wg)
                return q_s.at[me], do_s.at[me]

            share = functools.partial(next_block, dq_acc, rows, (lse, delta))

            lax.fori_loop(low, own.low, idle, None)
            scores = pl.run_scoped(
                lambda acc: first_scores(acc, rows()[0], own.low - low), scores_type
            )
            if keys.is_cut:
                body = functools.partial(share, edges=(edges[0], None))
                scores = lax.fori_loop(own.low, full_low, body, scores)
            body = functools.partial(share, edges=(None, None))
            scores = lax.fori_loop(full_low, full_high, body, scores)
            if not one_cut:
                body = functools.partial(share, edges=edges)
                scores = lax.fori_loop(full_high, end, body, scores)
            share(end, scores, edges=edges, is_last=True)
            lax.fori_loop(end + 1, high, idle, None)
            dq = dq_acc[...]
            tiles.release_before(k_free, high - low, stages)
            return dq

        def first_scores(acc, q_rows, step):
            tiles.wait(k_full, step, stages)
            plgpu.wgmma(acc, q_rows, k_s.at[tiles.slot(step, stages)].T)
            return acc[...]

        def idle(kb, _):
            step = kb - low
            tiles.wait(k_full, step, stages)
            tiles.wait(v_full, step, stages)
            plgpu.wgmma_wait(0)
            tiles.release_before(k_free, step, stages)
            tiles.arrive(v_free, step, stages)

        def next_block(dq_acc, rows, sums, kb, scores, *, edges, is_last=False):
            """Start to add a block's contribution; return the next block's scores."""
            q_rows, do_rows = rows()
            lse, delta = sums
            step = kb - low
            s = tiles.slot(step, stages)
            after = 0 if is_last else 1

            def products(dp_acc, s_acc=None):
                plgpu.wgmma(dp_acc, do_rows, v_s.at[s].T)
                if s_acc is not None:
                    plgpu.wgmma(s_acc, q_rows, k_s.at[tiles.slot(step + 1, stages)].T)
                capped = p.capped(scores)
                probs = jnp.exp2(capped * p.exponent - lse)
                probs = masks.hide_outside(probs, 0.0, edges, kb * block)
                probs = p.times_slope(probs, capped)
                d_probs = plgpu.wgmma_accumulator_load(dp_acc, wait_n=after)
                tiles.release_before(k_free, step, stages)
                tiles.arrive(v_free, step, stages)
                d_scores = (probs * (d_probs - delta)).astype(q.dtype)
                plgpu.wgmma(dq_acc, d_scores, k_s.at[s])
                if s_acc is not None:
                    return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            tiles.wait(v_full, step, stages)
            if is_last:
                return pl.run_scoped(products, scores_type)
            tiles.wait(k_full, step + 1, stages)
            return pl.run_scoped(products, scores_type, scores_type)

        def load():
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def copy(source, ring, full):
                def start(_, step, s):
                    keys = pl.ds((low + step) * block, block)
                    part = source.at[b, keys, tiles.floor_div(n, p.group)]
                    plgpu.copy_gmem_to_smem(part, ring.at[s], full.at[s])

                return start

            rings = [
                (k_free, copy(k_g, k_s, k_full)),
                (v_free, copy(v_g, v_s, v_full)),
            ]
            tiles.fill_rings(1, high - low, stages, rings)

        pl.when(wg < wgs)(compute)
        pl.when(wg == wgs)(load)

    dq = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            tiles.smem_tile((wgs, ROWS, p.head_dim), q.dtype, block),
            tiles.smem_tile((wgs, ROWS, p.out_dim), q.dtype, block),
            plgpu.SMEM((wgs, ROWS), jnp.float32),
            plgpu.SMEM((wgs, ROWS), jnp.float32),
            tiles.smem_tile((stages, block, p.head_dim), q.dtype, block),
            tiles.smem_tile((stages, block, p.out_dim), q.dtype, block),
            plgpu.Barrier(num_arrivals=4, num_barriers=wgs),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        ],
        grid=order.grid,
        grid_names=tiles.GRID_NAMES,
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=tiles.compiler_params(),
        kernel_name="attention_dq",
    )(q, k, v, d_out, lse, delta, *masks.given(first, last))
    return vary_like(dq, q)
