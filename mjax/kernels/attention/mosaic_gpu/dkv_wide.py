"""The backward kernel for keys and values of wide heads, where registers are scarce.

Input and output are those of `dkv`. At width 256 the sums dk and dv of 64 keys take 256
registers per thread. So the two warpgroups share a tile of 64 keys, and each keeps half
the width of dk and of dv. Each computes the scores of half the queries of a block, and
passes the probabilities and the gradients of the scores to the other warpgroup through
shared memory.

Source: Dao 2023, algorithm 2, arXiv:2307.08691; the split into halves: the backward
kernel of FlashAttention-3 at width 256 (hopper/flash_bwd_launch_template.h). Differs:
this kernel does not compute dq.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention.mosaic_gpu import masks, tiles
from mjax.kernels.attention.mosaic_gpu.tiles import COLUMN, ROWS, Problem
from mjax.kernels.attention.tuning import MosaicKernel
from mjax.kernels.varying import vary_like

_HALVES = 2
"""Number of parts of the width and of a block of queries: one for each warpgroup."""


def key_value_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    d_out: Float[Array, "B T N H"],
    lse: Float[Array, "B N P"],
    delta: Float[Array, "B N P"],
    last: Int32[Array, "B P"] | None,
    first: Int32[Array, "B P"] | None = None,
    *,
    problem: Problem,
    tuning: MosaicKernel,
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Run the kernel.

    Args:
      q: queries, bfloat16 or float16.
      k: keys, dtype of q.
      v: values, dtype of q, as wide as the keys.
      d_out: cotangent of the output, dtype of q.
      lse: as in `dkv.key_value_gradients`.
      delta: as in `dkv.key_value_gradients`.
      last: as in `dkv.key_value_gradients`.
      first: as in `dkv.key_value_gradients`.
      problem: sizes.
      tuning: sizes of the kernel.

    Returns:
      Cotangents of k and v, dtype of q.
    """
    p, stages, block = problem, tuning.stages, tuning.block
    rows, width = block // _HALVES, p.head_dim // _HALVES
    order = tiles.Order.of(
        p,
        batch=q.shape[0],
        heads=p.kv_heads,
        other_heads=p.heads,
        tile=ROWS,
        uneven=last is not None,
    )
    scores_type, sums_type = tiles.accumulator(rows), tiles.accumulator(width)

    def kernel(*refs):
        (q_g, k_g, v_g, do_g, lse_g, delta_g, *edges_g), rest = refs[:-15], refs[-15:]
        dk_g, dv_g, k_s, v_s, q_s, do_s, lse_s, delta_s, p_s, ds_s, *barriers = rest
        rows_full, q_full, do_full, free, exchange = barriers
        wg = lax.axis_index("wg")
        b, kv, t = order.here()  # the first keys are seen by the most queries
        j0 = t * ROWS
        queries = masks.LastQueries(p, *masks.at_row(edges_g, (last, first), b))
        own = queries.blocks(j0, ROWS, block)
        own = own.within(own.low, own.high)
        low, high = own.low, own.high
        steps = high - low

        def compute():
            plgpu.set_max_registers(tuning.registers, action="increase")
            keys, cols = pl.ds(j0, ROWS), pl.ds(wg * width, width)
            plgpu.copy_gmem_to_smem(k_g.at[b, keys, kv, cols], k_s.at[wg], rows_full)
            plgpu.copy_gmem_to_smem(v_g.at[b, keys, kv, cols], v_s.at[wg], rows_full)
            plgpu.barrier_wait(rows_full)
            dk, dv = pl.run_scoped(walk, sums_type, sums_type)
            # The other warpgroup has computed its last scores, so it no longer reads
            # k_s.
            k_s[wg] = (dk * p.scale).astype(q.dtype)
            v_s[wg] = dv.astype(q.dtype)
            plgpu.commit_smem()
            dk_part, dv_part = dk_g.at[b, keys, kv, cols], dv_g.at[b, keys, kv, cols]
            plgpu.copy_smem_to_gmem(k_s.at[wg], dk_part, commit_group=False)
            plgpu.copy_smem_to_gmem(v_s.at[wg], dv_part)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def walk(dk_acc, dv_acc):
            """Sum half the columns of dk and dv over the blocks."""
            edges = (
                queries.begins(j0),
                queries.rows(j0) if queries.is_cut else None,
            )

            def head(_, step):
                def body(qb, step, edges):
                    def hide(probs):
                        start = qb * block + wg * rows
                        return masks.hide_outside(probs, 0.0, edges, start)

                    next_block(dk_acc, dv_acc, step, hide)
                    return step + 1

                for begin, end, cut in own.parts(edges, (None, edges[1])):
                    some = functools.partial(body, edges=cut)
                    step = lax.fori_loop(begin, end, some, step)
                return step

            step = lax.fori_loop(0, p.group, head, jnp.int32(0))
            sums = dk_acc[...], dv_acc[...]
            tiles.release_before(free, step, stages)
            return sums

        def column(ref):
            """Read one number per query, and broadcast it over the keys."""
            return tiles.along_columns(
                plgpu.load(ref, layout=COLUMN), scores_type.shape
            )

        def next_block(dk_acc, dv_acc, step, hide):
            """Start to add the contribution of one block."""
            s, buffer = tiles.slot(step, stages), tiles.slot(step, _HALVES)

            def scores(s_acc, dp_acc):
                me = tiles.in_loop(wg)
                zero = tiles.in_loop(0)
                for half in range(_HALVES):
                    plgpu.wgmma(s_acc, k_s.at[zero + half], q_s.at[s, half, me].T)
                tiles.wait(do_full, step, stages)
                for half in range(_HALVES):
                    plgpu.wgmma(dp_acc, v_s.at[zero + half], do_s.at[s, half, me].T)
                capped = p.capped(plgpu.wgmma_accumulator_load(s_acc, wait_n=_HALVES))
                # The matmuls of the previous step are done as well.
                tiles.release_before(free, step, stages)
                probs = hide(jnp.exp2(capped * p.exponent - column(lse_s.at[s, me])))
                p_s[buffer, me] = probs.astype(q.dtype)
                probs = p.times_slope(probs, capped)
                d_probs = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                d_scores = probs * (d_probs - column(delta_s.at[s, me]))
                ds_s[buffer, me] = d_scores.astype(q.dtype)

            tiles.wait(q_full, step, stages)
            pl.run_scoped(scores, scores_type, scores_type)
            # Two buffers suffice: a warpgroup that gets here has read the buffer of two
            # steps ago.
            plgpu.commit_smem()
            plgpu.barrier_arrive(exchange)
            plgpu.barrier_wait(exchange)
            me = tiles.in_loop(wg)
            for half in range(_HALVES):
                plgpu.wgmma(dv_acc, p_s.at[buffer, half], do_s.at[s, me, half])
                plgpu.wgmma(dk_acc, ds_s.at[buffer, half], q_s.at[s, me, half])

        def load():
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def start(g, step, s):
                # lse and delta have been read from this entry. The loading warpgroup
                # orders the copies after these reads, because it has time to spare.
                plgpu.commit_smem()
                n, first = kv * p.group + g, (low + step) * block
                for source, ring, numbers, numbers_s, full in (
                    (q_g, q_s, lse_g, lse_s, q_full.at[s]),
                    (do_g, do_s, delta_g, delta_s, do_full.at[s]),
                ):
                    for part in range(_HALVES):
                        at = pl.ds(first + part * rows, rows)
                        here = numbers_s.at[s, part]
                        plgpu.copy_gmem_to_smem(numbers.at[b, n, at], here, full)
                        for half in range(_HALVES):
                            cols = pl.ds(half * width, width)
                            here = ring.at[s, half, part]
                            plgpu.copy_gmem_to_smem(
                                source.at[b, at, n, cols], here, full
                            )

            tiles.fill_rings(p.group, steps, stages, [(free, start)])

        pl.when(wg < _HALVES)(compute)
        pl.when(wg == _HALVES)(load)

    def tile(*shape):
        return tiles.smem_tile(shape, q.dtype, rows)

    copies = _HALVES * (_HALVES + 1)
    dk, dv = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        scratch_types=[
            tile(_HALVES, ROWS, width),
            tile(_HALVES, ROWS, width),
            tile(stages, _HALVES, _HALVES, rows, width),
            tile(stages, _HALVES, _HALVES, rows, width),
            plgpu.SMEM((stages, _HALVES, rows), jnp.float32),
            plgpu.SMEM((stages, _HALVES, rows), jnp.float32),
            tile(_HALVES, _HALVES, ROWS, rows),
            tile(_HALVES, _HALVES, ROWS, rows),
            plgpu.Barrier(num_arrivals=2 * _HALVES),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=_HALVES, num_barriers=stages),
            plgpu.Barrier(num_arrivals=_HALVES),
        ],
        grid=order.grid,
        grid_names=tiles.GRID_NAMES,
        num_threads=_HALVES + 1,
        thread_name="wg",
        compiler_params=tiles.compiler_params(),
        kernel_name="attention_dkv",
    )(q, k, v, d_out, lse, delta, *masks.given(last, first))
    return vary_like(dk, q), vary_like(dv, q)
