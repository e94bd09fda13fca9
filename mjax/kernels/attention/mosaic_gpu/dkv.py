"""The backward kernel for keys and values: dk, dv of sliding-window attention.

A thread block computes a tile of keys of one key head. For each query head that reads
this key head, it walks the blocks of queries that see the keys. Scores are computed
transposed, keys by queries, so they are the register operand of both following matmuls.
dk and dv stay in registers; the sum over query heads needs no second pass.

If that gives too few thread blocks for the GPU, the query heads of each key head are
split into parts. Each part has its own thread block, which writes its sums in float32.
XLA adds the sums of the parts in a fixed order.

Source: Dao 2023, algorithm 2, arXiv:2307.08691. Differs: the scores are transposed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention.mosaic_gpu import masks, tiles
from mjax.kernels.attention.mosaic_gpu.tiles import COLUMN, ROWS, TILE, Problem
from mjax.kernels.attention.tuning import DKV_SPLIT, MosaicKernel
from mjax.kernels.varying import vary_like


def key_value_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    d_out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N P"],
    delta: Float[Array, "B N P"],
    last: Int32[Array, "B P"] | None,
    first: Int32[Array, "B P"] | None = None,
    *,
    problem: Problem,
    tuning: MosaicKernel,
    parts: int | None = None,
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K Hv"]]:
    """Run the kernel.

    Args:
      q: queries, bfloat16 or float16.
      k: keys, dtype of q.
      v: values, dtype of q.
      d_out: cotangent of the output, dtype of q.
      lse: log-sum-exp from `forward`, converted to base 2, minus `Problem.offset`,
        float32; inf beyond the end of the sequence.
      delta: sum over Hv of output times d_out, float32; 0 beyond the end of the
        sequence.
      last: `op.last_queries`, or None.
      first: `op.first_queries`, or None.
      problem: sizes.
      tuning: sizes of the kernel.
      parts: number of equal parts into which the query heads of a key head are split,
        one thread block each; None uses `shipped_parts`.

    Returns:
      Cotangents of k and v, dtype of q.
    """
    p, stages, block, wgs = problem, tuning.stages, tuning.block, tuning.warpgroups
    tile = wgs * ROWS
    if parts is None:
        parts = shipped_parts(
            p, batch=q.shape[0], tile=tile, has_documents=last is not None
        )
    heads = p.group // parts
    assert heads * parts == p.group, (p.group, parts)
    order = tiles.Order.of(
        p,
        batch=q.shape[0],
        heads=p.kv_heads * parts,
        other_heads=p.heads,
        tile=tile,
        uneven=last is not None,
    )
    by_walk = None if last is None else heaviest_first(p, last, first, tile)
    scores_type = tiles.accumulator(block)
    dk_type, dv_type = (tiles.accumulator(n) for n in (p.head_dim, p.out_dim))
    # K and V stay in registers, so they are not read from shared memory for each block.
    # Above head width 64 there are not enough registers.
    held = wgs == 2 and p.head_dim <= 64

    def kernel(*refs):
        (q_g, k_g, v_g, do_g, lse_g, delta_g, *edges_g), rest = refs[:-12], refs[-12:]
        dk_g, dv_g, k_s, v_s, q_s, do_s, lse_s, delta_s, *barriers = rest
        rows_full, q_full, do_full, free = barriers
        wg = lax.axis_index("wg")
        # Tile 0, which starts first, has the keys that the most queries see. With
        # documents this is not so, and by_walk gives the order of the tiles.
        b, share, t = order.here()
        last_g, first_g, tiles_g = masks.at_row(edges_g, (last, first, by_walk), b)
        if tiles_g is not None:
            t = tiles_g[t]
        kv, part = tiles.floor_div(share, parts), lax.rem(share, parts)
        queries = masks.LastQueries(p, last_g, first_g)
        whole = queries.blocks(t * tile, tile, block)
        low, high = whole.low, whole.high
        steps = high - low

        def compute():
            plgpu.set_max_registers(tuning.registers, action="increase")
            rows, full = pl.ds(t * tile + wg * ROWS, ROWS), rows_full.at[wg]
            plgpu.copy_gmem_to_smem(k_g.at[b, rows, kv], k_s.at[wg], full)
            plgpu.copy_gmem_to_smem(v_g.at[b, rows, kv], v_s.at[wg], full)
            plgpu.barrier_wait(full)
            dk, dv = pl.run_scoped(walk, dk_type, dv_type)
            if parts > 1:
                # Direct stores are efficient: four threads fill a 32-byte transaction.
                dk_g[part, b, rows, kv], dv_g[part, b, rows, kv] = dk, dv
                return
            k_s[wg] = (dk * p.scale).astype(q.dtype)
            v_s[wg] = dv.astype(q.dtype)
            plgpu.commit_smem()
            dk_rows, dv_rows = dk_g.at[b, rows, kv], dv_g.at[b, rows, kv]
            plgpu.copy_smem_to_gmem(k_s.at[wg], dk_rows, commit_group=False)
            plgpu.copy_smem_to_gmem(v_s.at[wg], dv_rows)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def walk(dk_acc, dv_acc):
            """Sum dk and dv; skip query blocks that see no key of this warpgroup.

            Each step releases the buffer entry of the previous step, because the
            matmuls that read that entry are done by then.
            """
            both = [plgpu.load(r.at[wg], layout=TILE) for r in (k_s, v_s) if held]

            def rows():
                """Return K and V of this warpgroup's rows."""
                if both:
                    return both
                me = tiles.in_loop(wg)
                return k_s.at[me], v_s.at[me]

            j0 = t * tile + wg * ROWS
            edges = (
                queries.begins(j0),
                queries.rows(j0) if queries.is_cut else None,
            )

            def head(_, step):
                own = queries.blocks(j0, ROWS, block).within(low, high)

                def idle(_, step):
                    tiles.wait(q_full, step, stages)
                    tiles.wait(do_full, step, stages)
                    plgpu.wgmma_wait(0)
                    tiles.release_before(free, step, stages)
                    return step + 1

                def body(qb, step, edges):
                    def hide(probs):
                        return masks.hide_outside(probs, 0.0, edges, qb * block)

                    next_block(dk_acc, dv_acc, rows, step, hide)
                    return step + 1

                step = lax.fori_loop(low, own.low, idle, step)
                for begin, end, cut in own.parts(edges, (None, edges[1])):
                    some = functools.partial(body, edges=cut)
                    step = lax.fori_loop(begin, end, some, step)
                return lax.fori_loop(own.high, high, idle, step)

            step = lax.fori_loop(0, heads, head, jnp.int32(0))
            sums = dk_acc[...], dv_acc[...]
            tiles.release_before(free, step, stages)
            return sums

        def column(ref):
            """Read one number per query, and broadcast it over the keys."""
            return tiles.along_columns(
                plgpu.load(ref, layout=COLUMN), scores_type.shape
            )

        def next_block(dk_acc, dv_acc, rows, step, hide):
            """Start the matmuls that add the contribution of one block."""
            s = tiles.slot(step, stages)
            k_rows, v_rows = rows()

            def raw_scores(acc):
                plgpu.wgmma(acc, k_rows, q_s.at[s].T)
                return acc[...]

            tiles.wait(q_full, step, stages)
            scores = pl.run_scoped(raw_scores, scores_type)
            tiles.release_before(free, step, stages)
            tiles.wait(do_full, step, stages)

            def d_scores(acc):
                plgpu.wgmma(acc, v_rows, do_s.at[s].T)
                capped = p.capped(scores)
                probs = hide(jnp.exp2(capped * p.exponent - column(lse_s.at[s])))
                plgpu.wgmma(dv_acc, probs.astype(q.dtype), do_s.at[s])
                probs = p.times_slope(probs, capped)
                d_probs = plgpu.wgmma_accumulator_load(acc, wait_n=1)
                return probs * (d_probs - column(delta_s.at[s]))

            d_scores16 = pl.run_scoped(d_scores, scores_type).astype(q.dtype)
            plgpu.wgmma(dk_acc, d_scores16, q_s.at[s])

        def load():
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def start(g, step, s):
                # The compute warpgroups have read lse and delta from this entry. This
                # fence orders the copies after their reads. It is here because the
                # loading warpgroup has time to spare.
                plgpu.commit_smem()
                n, rows = share * heads + g, pl.ds((low + step) * block, block)
                full = q_full.at[s]
                plgpu.copy_gmem_to_smem(q_g.at[b, rows, n], q_s.at[s], full)
                plgpu.copy_gmem_to_smem(lse_g.at[b, n, rows], lse_s.at[s], full)
                full = do_full.at[s]
                plgpu.copy_gmem_to_smem(do_g.at[b, rows, n], do_s.at[s], full)
                plgpu.copy_gmem_to_smem(delta_g.at[b, n, rows], delta_s.at[s], full)

            tiles.fill_rings(heads, steps, stages, [(free, start)])

        pl.when(wg < wgs)(compute)
        pl.when(wg == wgs)(load)

    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)]
    if parts > 1:
        whole = (parts, k.shape[0], order.tiles * tile)
        out_type = [
            jax.ShapeDtypeStruct((*whole, *x.shape[2:]), jnp.float32) for x in (k, v)
        ]
    dk, dv = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            tiles.smem_tile((wgs, ROWS, p.head_dim), q.dtype, block),
            tiles.smem_tile((wgs, ROWS, p.out_dim), q.dtype, block),
            tiles.smem_tile((stages, block, p.head_dim), q.dtype, block),
            tiles.smem_tile((stages, block, p.out_dim), q.dtype, block),
            plgpu.SMEM((stages, block), jnp.float32),
            plgpu.SMEM((stages, block), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        ],
        grid=order.grid,
        grid_names=tiles.GRID_NAMES,
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=tiles.compiler_params(),
        kernel_name="attention_dkv",
    )(q, k, v, d_out, lse, delta, *masks.given(last, first, by_walk))
    dk, dv = vary_like(dk, q), vary_like(dv, q)
    if parts > 1:
        dk, dv = (_added(x)[:, : p.seq_len] for x in (dk, dv))
        dk, dv = (dk * p.scale).astype(k.dtype), dv.astype(k.dtype)
    return dk, dv


def heaviest_first(
    p: Problem,
    last: Int32[Array, "B P"],
    first: Int32[Array, "B P"] | None,
    tile: int,
) -> Int32[Array, "B tiles"]:
    """Return the tile indices of each sequence, those with the longest walks first.

    Args:
      p: sizes.
      last: `op.last_queries`.
      first: `op.first_queries`; None if walks begin at the diagonal.
      tile: keys of a thread block.
    """
    begins = jnp.arange(0, p.seq_len, tile, dtype=jnp.int32)[None]
    num = begins.shape[1]
    if first is not None:
        begins = first[:, ::tile][:, :num]
    ends = jnp.minimum(last[:, tile - 1 :: tile][:, :num] + 1, p.seq_len)
    return jnp.argsort(begins - ends, axis=1)


def shipped_parts(p: Problem, *, batch: int, tile: int, has_documents: bool) -> int:
    """Return into how many parts the query heads of a key head are split.

    Args:
      p: sizes.
      batch: B.
      tile: keys of a thread block.
      has_documents: whether sequences consist of several documents.
    """
    starts = range(0, p.seq_len, tile)
    ends = [min(p.seq_len, j0 + tile - 1 + p.reach) for j0 in starts]
    begins = [j0 if p.causal else max(0, j0 - p.reach + 1) for j0 in starts]
    walks = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return DKV_SPLIT.parts(
        longest=max(walks),
        total=batch * p.kv_heads * sum(walks),
        group=p.group,
        documents=has_documents,
    )


def _added(parts: Float[Array, "parts B P K H"]) -> Float[Array, "B P K H"]:
    """Add the parts in a fixed order, so every run computes the same bits."""
    return functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])])
