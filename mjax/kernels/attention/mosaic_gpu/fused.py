"""The fused backward kernel: dq, dk, dv of causal sliding-window attention in one pass.

A thread block computes a tile of keys of one key head, as in `dkv`. The copy engine
adds the tile's contribution to dq to float32 sums in global memory. So the scores are
computed once: a pair of blocks takes five matmuls, instead of seven in `dq` and `dkv`
together. **The order of these additions is not fixed, so dq is not deterministic**: its
last bits differ between runs. dk and dv are deterministic.

Both warpgroups store their gradients of scores in shared memory. Each then multiplies
the transposed gradients of both with half the columns of the tile's keys. The two
results form one block of dq, which is added once per tile, not once per warpgroup.

Source: Dao 2023, algorithm 2, arXiv:2307.08691; additions by the copy engine as in Shah
et al. 2024, arXiv:2407.08608 (hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp). Differs: the
scores are transposed. Their gradients are therefore the register operand of the matmul
for dk, which starts before the gradients are stored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention.mosaic_gpu import masks, tiles
from mjax.kernels.attention.mosaic_gpu.dkv import shipped_parts
from mjax.kernels.attention.mosaic_gpu.tiles import COLUMN, ROW, ROWS, Problem
from mjax.kernels.attention.tuning import MosaicKernel
from mjax.kernels.varying import vary_like

_BUFFERS = 2
"""Number of buffers for gradients of scores. When the warpgroups synchronise for a
block, both have read the previous block's buffer, so the next block may overwrite
it."""


def refuse_few_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    *,
    window: int | None,
    has_documents: bool,
    tuning: MosaicKernel,
) -> None:
    """Refuse shapes for which `dkv` splits query heads over thread blocks.

    Args:
      q: queries.
      k: keys.
      window: number of keys that a query sees, its own included; None means all.
      has_documents: whether there are segments.
      tuning: sizes of the kernel.
    Raises:
      ValueError: there are so few thread blocks that `dkv` would split query heads.
    """
    B, T, N, H = q.shape
    problem = Problem(
        seq_len=T,
        padded_len=T,
        heads=N,
        kv_heads=k.shape[2],
        head_dim=H,
        window=window,
        scale=1.0,
        soft_cap=None,
    )
    parts = shipped_parts(
        problem, batch=B, tile=tuning.tile, has_documents=has_documents
    )
    if parts > 1:
        raise ValueError(
            f"the fused backward pass of attention would be slow: {B} sequences x "
            f"{k.shape[2]} key heads on a device give too few thread blocks, because "
            f"each takes all {problem.group} query heads of a key head; the "
            f"deterministic one splits them into {parts} parts; use "
            "--model.attention-backward deterministic"
        )


def gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    d_out: Float[Array, "B T N H"],
    lse: Float[Array, "B N P"],
    delta: Float[Array, "B N P"],
    last: Int32[Array, "B P"] | None,
    *,
    problem: Problem,
    tuning: MosaicKernel,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Clear the sums of dq, run the kernel, and round the sums.

    Args:
      q: queries, bfloat16 or float16.
      k: keys, dtype of q.
      v: values, dtype of q.
      d_out: cotangent of the output, dtype of q.
      lse: log-sum-exp from `forward`, converted to base 2, minus `Problem.offset`,
        float32; inf beyond the end of the sequence.
      delta: sum over H of output times d_out, float32; 0 beyond the end of the
        sequence.
      last: `op.last_queries` of the segments; None without segments.
      problem: sizes.
      tuning: sizes of the kernel; the head width must be 64 times the number of
        warpgroups.

    Returns:
      Cotangents of q, k and v, dtype of q. The cotangent of q is not deterministic.
    """
    p, stages, block, wgs = problem, tuning.stages, tuning.block, tuning.warpgroups
    tile, width = wgs * ROWS, p.head_dim // wgs
    order = tiles.Order.of(
        p,
        batch=q.shape[0],
        heads=p.kv_heads,
        other_heads=p.heads,
        tile=tile,
        uneven=last is not None,
        # 16-bit queries and cotangents, and float32 sums of dq.
        entry_bytes=2 * 2 + 4,
    )
    scores_type = tiles.accumulator(block)
    sums_type = tiles.accumulator(p.head_dim)
    parts = [pl.ds(c * width, width) for c in range(wgs)]

    def kernel(*refs):
        (q_g, k_g, v_g, do_g, lse_g, delta_g, *last_g), rest = refs[:-15], refs[-15:]
        dq_g, dk_g, dv_g, k_s, v_s, q_s, do_s, ds_s, dq_s, vectors_s, *rest = rest
        rows_full, q_full, do_full, free, met = rest
        # One array for all three, because every array begins at a multiple of 1 KiB.
        lse_s, delta_s, last_s = (
            vectors_s.at[pl.ds(i * stages, n)]
            for i, n in enumerate((stages, stages, wgs))
        )
        wg = lax.axis_index("wg")
        b, kv, t = order.here()  # the first keys are seen by the most queries
        queries = masks.LastQueries(p, last_g[0].at[b] if last_g else None)

        def whole(t):
            """Return the bounds of the blocks of queries that see tile t."""
            return queries.blocks(t * tile, tile, block)

        def compute():
            plgpu.set_max_registers(tuning.registers, action="increase")
            rows = pl.ds(t * tile + wg * ROWS, ROWS)
            # K is split by columns, because each warpgroup uses its own columns.
            for c, columns in enumerate(parts):
                part = k_g.at[b, rows, kv, columns]
                plgpu.copy_gmem_to_smem(part, k_s.at[wg, c], rows_full)
            plgpu.copy_gmem_to_smem(v_g.at[b, rows, kv], v_s.at[wg], rows_full)
            if last_g:
                part = last_g[1].at[b, rows]
                plgpu.copy_gmem_to_smem(part, last_s.at[wg], rows_full)
            plgpu.barrier_wait(rows_full)
            dk, dv = pl.run_scoped(walk, sums_type, sums_type)
            meet()  # the other warpgroup no longer reads these keys
            for c in range(wgs):
                part = lax.slice(dk, (0, c * width), (ROWS, (c + 1) * width))
                k_s[wg, c] = (part * p.scale).astype(q.dtype)
            v_s[wg] = dv.astype(q.dtype)
            plgpu.commit_smem()
            for c, columns in enumerate(parts):
                part = dk_g.at[b, rows, kv, columns]
                plgpu.copy_smem_to_gmem(k_s.at[wg, c], part, commit_group=False)
            plgpu.copy_smem_to_gmem(v_s.at[wg], dv_g.at[b, rows, kv])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def meet():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def walk(dk_acc, dv_acc):
            """Sum dk and dv, and add the contribution of each block to dq.

            Bounds and edges are computed at each use: keeping them would take registers
            from the accumulators.
            """

            def edges(is_near):
                me = tiles.in_loop(wg)
                j0 = t * tile + me * ROWS
                first, end = masks.positions(j0) if is_near else None, None
                if last_g:
                    end = plgpu.load(last_s.at[me], layout=ROW)
                    end = lax.bitcast_convert_type(end, jnp.int32)
                elif queries.is_cut:
                    end = queries.rows(j0)
                return first, end

            def bounds(part):
                """Return (begin, end) of a part: 0 is masked, 1 unmasked, 2 masked.

                No warpgroup skips a block, because the other one needs its gradients of
                scores, even if they are zeros.
                """
                here = tiles.in_loop(t)
                low, high = (w := whole(here)).low, w.high
                own = queries.blocks(here * tile + wg * ROWS, ROWS, block)
                own = own.within(low, high)
                ends = low, own.full_low, own.full_high, high
                return ends[part], ends[part + 1]

            def head(g, step):
                def body(qb, step, cut):
                    def hide(probs):
                        return masks.hide_outside(probs, 0.0, cut(), qb * block)

                    next_block(dk_acc, dv_acc, step, hide, kv * p.group + g, qb)
                    return step + 1

                cuts = (
                    functools.partial(edges, True),
                    lambda: (None, None),
                    functools.partial(edges, False),
                )
                for part, cut in enumerate(cuts):
                    some = functools.partial(body, cut=cut)
                    step = lax.fori_loop(*bounds(part), some, step)
                return step

            lax.fori_loop(0, p.group, head, jnp.int32(0))
            return dk_acc[...], dv_acc[...]

        def column(ref):
            """Read one number per query, and broadcast it over the keys."""
            return tiles.along_columns(
                plgpu.load(ref, layout=COLUMN), scores_type.shape
            )

        def next_block(dk_acc, dv_acc, step, hide, n, qb):
            """Add a block's contribution to dk, dv and dq; release its buffer entry."""
            s, buffer = tiles.slot(step, stages), tiles.slot(step, _BUFFERS)
            me = tiles.in_loop(wg)

            def raw_scores(acc):
                for c, columns in enumerate(parts):
                    plgpu.wgmma(acc, k_s.at[me, c], q_s.at[s, :, columns].T)
                return acc[...]

            tiles.wait(q_full, step, stages)
            scores = pl.run_scoped(raw_scores, scores_type)
            tiles.wait(do_full, step, stages)

            def d_scores(acc):
                plgpu.wgmma(acc, v_s.at[me], do_s.at[s].T)
                capped = p.capped(scores)
                probs = hide(jnp.exp2(capped * p.exponent - column(lse_s.at[s])))
                plgpu.wgmma(dv_acc, probs.astype(q.dtype), do_s.at[s])
                probs = p.times_slope(probs, capped)
                d_probs = plgpu.wgmma_accumulator_load(acc, wait_n=1)
                return probs * (d_probs - column(delta_s.at[s]))

            d_scores16 = pl.run_scoped(d_scores, scores_type).astype(q.dtype)
            # If the matmul for dq came first, ptxas would serialise all matmuls.
            plgpu.wgmma(dk_acc, d_scores16, q_s.at[s])
            ds_s[buffer, me] = d_scores16
            # The barrier also covers lse and delta, which have been read from this
            # entry.
            plgpu.commit_smem()
            meet()

            def d_queries(acc):
                for u in range(wgs):
                    plgpu.wgmma(acc, ds_s.at[buffer, u].T, k_s.at[u, me])
                return acc[...]

            # No matmul is in flight after this one.
            dq = pl.run_scoped(d_queries, tiles.accumulator(width))
            tiles.arrive(free, step, stages)
            add(dq, n, qb)

        def add(dq, n, qb):
            """Add to dq, after the copy engine has read the previous contribution."""
            me = tiles.in_loop(wg)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            dq_s[me] = dq
            plgpu.commit_smem()
            rows, columns = pl.ds(qb * block, block), pl.ds(me * width, width)
            part = dq_g.at[b, rows, n, columns]
            plgpu.copy_smem_to_gmem(dq_s.at[me], part, reduction_op="add")

        def load():
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")
            blocks = whole(t)

            def start(g, step, s):
                n, rows = kv * p.group + g, pl.ds((blocks.low + step) * block, block)
                full = q_full.at[s]
                plgpu.copy_gmem_to_smem(q_g.at[b, rows, n], q_s.at[s], full)
                plgpu.copy_gmem_to_smem(lse_g.at[b, n, rows], lse_s.at[s], full)
                full = do_full.at[s]
                plgpu.copy_gmem_to_smem(do_g.at[b, rows, n], do_s.at[s], full)
                plgpu.copy_gmem_to_smem(delta_g.at[b, n, rows], delta_s.at[s], full)

            steps = blocks.high - blocks.low
            tiles.fill_rings(p.group, steps, stages, [(free, start)])

        pl.when(wg < wgs)(compute)
        pl.when(wg == wgs)(load)

    # The bounds read `last` as integers, the array of vectors as float32 of equal bits.
    edges = [] if last is None else [last, lax.bitcast_convert_type(last, jnp.float32)]
    # The sums, like the results, vary over no mesh axis: jax accepts no other refs.
    sums: Any = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    dk, dv = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        scratch_types=[
            tiles.smem_tile((wgs, wgs, ROWS, width), q.dtype),
            tiles.smem_tile((wgs, ROWS, p.head_dim), q.dtype),
            tiles.smem_tile((stages, block, p.head_dim), q.dtype),
            tiles.smem_tile((stages, block, p.head_dim), q.dtype),
            tiles.smem_tile((_BUFFERS, wgs, ROWS, block), q.dtype),
            tiles.smem_sums((wgs, block, width)),
            plgpu.SMEM((2 * stages + wgs, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=wgs * (wgs + (1 if last is None else 2))),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs),
        ],
        grid=order.grid,
        grid_names=tiles.GRID_NAMES,
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=tiles.compiler_params(),
        kernel_name="attention_fused",
    )(q, k, v, d_out, lse, delta, *edges, sums)
    dq = (sums[...] * p.scale).astype(q.dtype)
    return vary_like(dq, q), vary_like(dk, q), vary_like(dv, q)
