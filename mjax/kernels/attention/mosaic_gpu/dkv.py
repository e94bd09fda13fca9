"""The backward kernel for keys and values: dk, dv of causal sliding-window attention.

A thread block computes a tile of keys of one key head and walks, for each query head
that reads it, the blocks of queries that see them. Scores are made transposed, keys by
queries, so that they are the register operand of both products that follow. dk and dv
stay in registers; the sum over query heads needs no second pass.

Source: Dao 2023, algorithm 2, arXiv:2307.08691. Differs: the transposition.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention.mosaic_gpu import tiles
from mjax.kernels.attention.mosaic_gpu.tiles import COLUMN, ROWS, Problem
from mjax.kernels.attention.tuning import MosaicKernel
from mjax.kernels.varying import vary_like


def key_value_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    d_out: Float[Array, "B T N H"],
    lse: Float[Array, "B N P"],
    delta: Float[Array, "B N P"],
    segments: tuple[Int32[Array, "B P"], Int32[Array, "B 2 tiles"]] | None,
    *,
    problem: Problem,
    tuning: MosaicKernel,
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Run the kernel.

    Args:
      q: queries, bfloat16 or float16.
      k: keys, dtype of q.
      v: values, dtype of q.
      d_out: cotangent of the output, dtype of q.
      lse: log-sum-exp from `forward`, float32; inf beyond the end.
      delta: sum over H of output times d_out, float32; 0 beyond the end.
      segments: the segment of each position, and `op.query_bounds` of them.
      problem: sizes.
      tuning: sizes of the kernel.

    Returns:
      Cotangents of k and v, dtype of q.
    """
    p, stages, block, wgs = problem, tuning.stages, tuning.block, tuning.warpgroups
    tile = wgs * ROWS
    scores_type = tiles.accumulator(block)
    sums_type = tiles.accumulator(p.head_dim)

    def kernel(*refs):
        (q_g, k_g, v_g, do_g, lse_g, delta_g, *segment_refs), rest = (
            refs[:-12],
            refs[-12:],
        )
        dk_g, dv_g, k_s, v_s, q_s, do_s, lse_s, delta_s, *barriers = rest
        rows_full, q_full, do_full, free = barriers
        wg = lax.axis_index("wg")
        b, kv = lax.axis_index("batch"), lax.axis_index("heads")
        t = lax.axis_index("tile")
        blocks = tiles.query_blocks(p, t * tile, tile, block)
        low, high, segment_ids = blocks.low, blocks.high, None
        full_until = high
        if segment_refs:
            segment_ids, bounds = segment_refs[0].at[b], segment_refs[1]
            high = jnp.minimum(high, bounds[b, 0, t])
            full_until = bounds[b, 1, t]
        steps = high - low

        def compute():
            plgpu.set_max_registers(tuning.registers, action="increase")
            rows, full = pl.ds(t * tile + wg * ROWS, ROWS), rows_full.at[wg]
            plgpu.copy_gmem_to_smem(k_g.at[b, rows, kv], k_s.at[wg], full)
            plgpu.copy_gmem_to_smem(v_g.at[b, rows, kv], v_s.at[wg], full)
            plgpu.barrier_wait(full)
            dk, dv = pl.run_scoped(walk, sums_type, sums_type)
            k_s[wg] = (dk * p.scale).astype(q.dtype)
            v_s[wg] = dv.astype(q.dtype)
            plgpu.commit_smem()
            dk_rows, dv_rows = dk_g.at[b, rows, kv], dv_g.at[b, rows, kv]
            plgpu.copy_smem_to_gmem(k_s.at[wg], dk_rows, commit_group=False)
            plgpu.copy_smem_to_gmem(v_s.at[wg], dv_rows)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def walk(dk_acc, dv_acc):
            """Add up dk and dv; blocks of the other warpgroups alone pass by.

            Each step releases the slot of the step before, whose products are done by
            then.
            """

            def head(_, step):
                j0 = t * tile + tiles.in_loop(wg) * ROWS
                own = tiles.query_blocks(p, j0, ROWS, block)
                own = own.within(low, high, (low, full_until))

                def idle(_, step):
                    tiles.wait(q_full, step, stages)
                    tiles.wait(do_full, step, stages)
                    plgpu.wgmma_wait(0)
                    tiles.release_before(free, step, stages)
                    return step + 1

                def body(qb, step, masked):
                    def hide(probs):
                        starts = (j0, qb * block)
                        mask = tiles.visible(p, probs.shape, starts, 1, segment_ids)
                        return jnp.where(mask, probs, 0.0) if masked else probs

                    next_block(dk_acc, dv_acc, step, hide)
                    return step + 1

                step = lax.fori_loop(low, own.low, idle, step)
                for first, last, masked in own.parts():
                    some = functools.partial(body, masked=masked)
                    step = lax.fori_loop(first, last, some, step)
                return lax.fori_loop(own.high, high, idle, step)

            step = lax.fori_loop(0, p.group, head, jnp.int32(0))
            sums = dk_acc[...], dv_acc[...]
            tiles.release_before(free, step, stages)
            return sums

        def log_sum(s):
            lse = plgpu.load(lse_s.at[s], layout=COLUMN)
            return tiles.along_columns(lse, scores_type.shape)

        def next_block(dk_acc, dv_acc, step, hide):
            """Start to add one block's share."""
            s, me = tiles.slot(step, stages), tiles.in_loop(wg)

            def probabilities(acc):
                """Return them and, under a soft cap, its derivative."""
                tiles.wait(q_full, step, stages)
                if p.soft_cap is None:
                    # The sum starts from it, so that it takes up no registers.
                    acc[...] = log_sum(s) * (-1.0 / p.scale)
                plgpu.wgmma(acc, k_s.at[me], q_s.at[s].T)
                x = p.capped(acc[...])
                tiles.release_before(free, step, stages)
                if p.soft_cap is None:
                    return jnp.exp2(x * p.exponent), None
                slope = 1.0 - x * x
                return jnp.exp2(x * p.exponent - log_sum(s) * tiles.LOG2_E), slope

            probs, slope = pl.run_scoped(probabilities, scores_type)
            probs = hide(probs)
            probs16 = probs.astype(q.dtype)
            if slope is not None:
                probs = probs * slope

            def d_probabilities(acc):
                """Return them less delta."""
                tiles.wait(do_full, step, stages)
                delta = plgpu.load(delta_s.at[s], layout=COLUMN)
                # lse and delta are read before the slot is loaded again.
                plgpu.commit_smem()
                acc[...] = -tiles.along_columns(delta, scores_type.shape)
                plgpu.wgmma(acc, v_s.at[me], do_s.at[s].T)
                plgpu.wgmma(dv_acc, probs16, do_s.at[s])
                return plgpu.wgmma_accumulator_load(acc, wait_n=1)

            d_scores = probs * pl.run_scoped(d_probabilities, scores_type)
            plgpu.wgmma(dk_acc, d_scores.astype(q.dtype), q_s.at[s])

        def load():
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def start(g, step, s):
                n, rows = kv * p.group + g, pl.ds((low + step) * block, block)
                full = q_full.at[s]
                plgpu.copy_gmem_to_smem(q_g.at[b, rows, n], q_s.at[s], full)
                plgpu.copy_gmem_to_smem(lse_g.at[b, n, rows], lse_s.at[s], full)
                full = do_full.at[s]
                plgpu.copy_gmem_to_smem(do_g.at[b, rows, n], do_s.at[s], full)
                plgpu.copy_gmem_to_smem(delta_g.at[b, n, rows], delta_s.at[s], full)

            tiles.fill_rings(p.group, steps, stages, [(free, start)])

        pl.when(wg < wgs)(compute)
        pl.when(wg == wgs)(load)

    dk, dv = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        scratch_types=[
            tiles.smem_tile((wgs, ROWS, p.head_dim), q.dtype),
            tiles.smem_tile((wgs, ROWS, p.head_dim), q.dtype),
            tiles.smem_tile((stages, block, p.head_dim), q.dtype),
            tiles.smem_tile((stages, block, p.head_dim), q.dtype),
            plgpu.SMEM((stages, block), jnp.float32),
            plgpu.SMEM((stages, block), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        ],
        grid=(q.shape[0], p.kv_heads, pl.cdiv(p.seq_len, tile)),
        # The last axis runs fastest: tiles that run together read the same queries.
        grid_names=("batch", "heads", "tile"),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=tiles.compiler_params(),
        kernel_name="attention_dkv",
    )(q, k, v, d_out, lse, delta, *(segments or ()))
    return vary_like(dk, q), vary_like(dv, q)
