"""Show how little the GPU attention kernels compute beyond the visible pairs.

    python -m scripts.kernels.visited_blocks --seq-len 8192 --windows 256 512 1024 4096

Prints, for each kernel, the number of pairs (query, key) whose score is computed over
the number of visible pairs. The functions with which the kernels choose their blocks
count the pairs, at the shipped sizes. Each warpgroup has its own blocks; in the forward
kernel all warpgroups of a thread block begin with the same block.
"""

import argparse
import math

import jax
import jax.numpy as jnp

from mjax.kernels.attention.mosaic_gpu import masks, tiles
from mjax.kernels.attention.tuning import MOSAIC_H200, MosaicTuning
from scripts.kernels.attention_cost import num_visible


def computed_pairs(
    seq_len: int, window: int | None, tuning: MosaicTuning
) -> dict[str, int]:
    """Count the pairs that each kernel computes for one head of one sequence."""
    p = tiles.Problem(
        seq_len=seq_len,
        padded_len=seq_len,
        heads=1,
        kv_heads=1,
        head_dim=64,
        window=window,
        scale=1.0,
        soft_cap=None,
    )
    counts = {}
    for name, sizes, edge in (
        ("forward", tuning.forward, masks.FirstKeys(p, None)),
        ("dq", tuning.dq, masks.FirstKeys(p, None)),
        ("dkv", tuning.dkv, masks.LastQueries(p, None)),
    ):
        tile = sizes.tile
        first = jnp.arange(math.ceil(seq_len / tile)) * tile
        whole = edge.blocks(first, tile, sizes.block)
        visits = jnp.zeros((), jnp.int32)
        for part in range(tile // tiles.ROWS):
            own = edge.blocks(first + part * tiles.ROWS, tiles.ROWS, sizes.block)
            own = own.within(whole.low, whole.high)
            high = whole.high if name == "forward" else own.high
            visits += (high - own.low).sum()
        counts[name] = int(visits) * tiles.ROWS * sizes.block
    return counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[256, 512, 1024, 4096]
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"pairs computed over pairs visible, sequence {args.seq_len}\n")
    print("| head width | window | forward | dq | dkv |")
    print("|--:|--:|--:|--:|--:|")
    for head_dim, tuning in MOSAIC_H200.items():
        for window in (*args.windows, None):
            counts = computed_pairs(args.seq_len, window, tuning)
            visible = num_visible(args.seq_len, window)
            cells = [f"{count / visible:.3f}" for count in counts.values()]
            print(f"| {head_dim} | {window or 'full'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
