"""Backward pass of norms for Hopper, plus the residual gradient, in one read.

Input: x, the gradient g of the norm's result, and the gradient g_x of x from the
residual stream. Output: dx, the sum of the gradients of both paths, and the gradient of
the scale. XLA reads x and g twice, because it cannot fuse sums over a position and sums
over positions into one kernel.

A thread block is one warpgroup. Bulk copies (TMA) load positions into a ring buffer in
shared memory and store results from there: dx replaces g_x in its buffer entry. The
gradient of the scale stays in float32 registers for all positions of the block. XLA
adds the sums of the blocks, so the order of every sum is fixed.

A bulk copy moves at most 256 entries per dim, so a position is stored as [D/256, 256].
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from mjax.kernels.layer_norm.tuning import LANE, MosaicTuning
from mjax.kernels.varying import vary_like

_F32 = jnp.float32
_ROWS = 4
"""Rows of 256 entries in registers at a time: 8 entries per thread."""


def backward(
    x: Float[Array, "n D"],
    scale: Float[Array, " D"],
    g: Float[Array, "n D"],
    g_x: Float[Array, "n D"],
    *,
    centred: bool,
    eps: float,
    tuning: MosaicTuning,
) -> tuple[Float[Array, "n D"], Float[Array, " D"]]:
    """Return g_x plus the gradient through the norm, and the gradient of the scale.

    Args:
      x: input of the norm, bfloat16 or float16; D is a multiple of 256.
      scale: factors.
      g: gradient of the norm's result, dtype of x.
      g_x: gradient of x from the residual stream, dtype of x.
      centred: LayerNorm if True, otherwise RMSNorm.
      eps: added to the variance or mean square.
      tuning: sizes of the kernel.
    Returns:
      dx, dtype of x; d_scale, float32.
    """
    n, D = x.shape
    shape = (D // LANE, LANE)
    blocks = min(tuning.blocks, n)
    body = _body(n, shape, blocks, tuning.stages, x.dtype, centred, eps)
    ring = plgpu.SMEM((tuning.stages, *shape), x.dtype)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((n, *shape), x.dtype),
            jax.ShapeDtypeStruct((blocks, *shape), _F32),
        ],
        scratch_types=[
            *(ring, ring, ring),
            plgpu.SMEM(shape, scale.dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=tuning.stages),
            plgpu.Barrier(),
        ],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="norm_backward",
        # Pallas would put barriers around each copy and each store of a piece, 5 to 19
        # per position. The kernel does not need them: a thread reads and writes the
        # same entries in every access, and `commit_smem` and `wait_smem_to_gmem` are
        # barriers.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    dx, d_scale = kernel(
        *(a.reshape(n, *shape) for a in (x, g, g_x)), scale.reshape(shape)
    )
    return vary_like(dx, x).reshape(n, D), vary_like(d_scale, x).sum(0).reshape(D)


def _body(
    n: int,
    shape: tuple[int, int],
    blocks: int,
    stages: int,
    dtype: Any,
    centred: bool,
    eps: float,
) -> Any:
    """Return the kernel that one thread block runs."""
    num_rows, width = shape[0], math.prod(shape)
    step = max(r for r in range(1, _ROWS + 1) if num_rows % r == 0)
    pieces = [pl.ds(start, step) for start in range(0, num_rows, step)]

    def kernel(
        x_gmem, g_gmem, g_x_gmem, scale_gmem, dx_gmem, d_scale_gmem,
        x_ring, g_ring, g_x_ring, scale_tile, full, scale_full,
    ):  # fmt: skip
        block = lax.axis_index("block")
        num_positions = lax.div(n - block + (blocks - 1), blocks)

        def load(i, slot):
            position = block + i * blocks
            for source, ring in (
                (x_gmem, x_ring),
                (g_gmem, g_ring),
                (g_x_gmem, g_x_ring),
            ):
                plgpu.copy_gmem_to_smem(
                    source.at[position], ring.at[slot], full.at[slot]
                )

        def mean_of(term) -> Any:
            """Return the mean over the position of term(piece)."""
            total = jnp.zeros((step, LANE), _F32)
            for piece in pieces:
                total = total + term(piece)
            return jnp.sum(total) * (1 / width)

        def position(i, sums):
            slot, freed = lax.rem(i, stages), lax.rem(i + (stages - 1), stages)
            # The copy to global memory must have finished reading the previous
            # position's entry.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when((i > 0) & (i + (stages - 1) < num_positions))
            def _():
                load(i + (stages - 1), freed)

            plgpu.barrier_wait(full.at[slot])
            x, g, g_x = x_ring.at[slot], g_ring.at[slot], g_x_ring.at[slot]

            def wide(ref, piece):
                return ref[piece].astype(_F32)

            def scaled(piece):
                return wide(g, piece) * wide(scale_tile, piece)

            mean = mean_of(lambda p: wide(x, p)) if centred else jnp.float32(0)
            mean_g = mean_of(scaled) if centred else jnp.float32(0)
            square = mean_of(lambda p: (wide(x, p) - mean) ** 2)
            along = mean_of(lambda p: (wide(x, p) - mean) * scaled(p))
            rstd = lax.rsqrt(square + eps)
            slope = along * rstd * rstd

            added = []
            for piece, total in zip(pieces, sums, strict=True):
                y = wide(x, piece) - mean
                dx = rstd * (scaled(piece) - mean_g - y * slope) + wide(g_x, piece)
                g_x[piece] = dx.astype(dtype)
                added.append(total + wide(g, piece) * (y * rstd))
            # Orders these reads before the next copy into shared memory, and the writes
            # before this copy to global memory.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(g_x, dx_gmem.at[block + i * blocks])
            return tuple(added)

        plgpu.copy_gmem_to_smem(scale_gmem, scale_tile, scale_full)
        for slot in range(stages):
            pl.when(slot < num_positions)(lambda slot=slot: load(slot, slot))
        plgpu.barrier_wait(scale_full)
        sums = tuple(jnp.zeros((step, LANE), _F32) for _ in pieces)
        sums = lax.fori_loop(0, num_positions, position, sums)
        for piece, total in zip(pieces, sums, strict=True):
            d_scale_gmem[block, piece] = total
        plgpu.wait_smem_to_gmem(0)

    return kernel
