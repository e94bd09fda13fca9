"""Small kernels for tests of compiled code and of the programs that call them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def _tiles(shape: tuple[int, ...]) -> Any:
    transforms = (
        plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply in one warpgroup, which has 128 x 255 registers for the float32 sums."""
    shape = (x.shape[0], y.shape[1])
    # The tensor cores take 256 columns at a time.
    starts = range(0, shape[1], 256)
    widths = [min(256, shape[1] - start) for start in starts]
    parts = list(map(pl.ds, starts, widths))

    def kernel(x_ref, y_ref, out_ref, x_tile, y_tile, out_tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref, x_tile, barrier)
        plgpu.copy_gmem_to_smem(y_ref, y_tile, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(*sums):
            for part, out in zip(parts, sums, strict=True):
                plgpu.wgmma(out, x_tile, y_tile.at[:, part])
            return [out[...].astype(jnp.bfloat16) for out in sums]

        # Not in the list of what the module exports.
        acc = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
        sums = [acc((shape[0], width), jnp.float32) for width in widths]
        for part, out in zip(parts, pl.run_scoped(multiply, *sums), strict=True):
            out_tile[:, part] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        scratch_types=[
            _tiles(x.shape),
            _tiles(y.shape),
            _tiles(shape),
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="product",
    )(x, y)


def twice(x: jax.Array) -> jax.Array:
    """Double each element, read and written by the threads themselves.

    The threads of a block must divide the number of elements. Also works inside
    shard_map.
    """

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    kind = jax.typeof(x)
    out_type = jax.ShapeDtypeStruct(
        x.shape, x.dtype, manual_axis_type=kind.manual_axis_type
    )
    return plgpu.kernel(kernel, out_type=out_type, kernel_name="twice")(x)


def staged(x: jax.Array) -> jax.Array:
    """Copy by way of shared memory, all at once."""

    def kernel(x_ref, out_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        kernel_name="staged",
    )(x)
