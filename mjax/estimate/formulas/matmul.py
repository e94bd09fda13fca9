"""Model how the shape of a matmul limits its speed: tiles, waves, short sums.

Input: m, n, k and the number of multiprocessors. Output: the speed relative to a large
matmul, at most 1. Modelled, never measured.

A GPU computes [m, k] x [k, n] in tiles of the result, each on one multiprocessor:

- tiles at the edges are computed in full (tile quantisation);
- tiles run in waves of as many as there are multiprocessors, and the last wave takes as
  long as the others (wave quantisation);
- the first operands of a tile must arrive before its first multiplication. This delay
  counts as `START_K` further entries of k;
- a smaller tile reads more operands per FLOP. Its speed is assumed to fall in
  proportion.

The fastest of `TILES` is used. Split-k reductions, which would help a matmul with few
tiles and a long sum, are ignored.

Source: NVIDIA 2023, Matrix Multiplication Background, DU-09799-001, sections 2.3 (tile
sizes and reuse), 3.1 and 3.2 (quantisation). `START_K` and the proportion are assumed.
"""

import functools
import math

from mjax.estimate.formulas.case import Case

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of tiles, the largest first. cuBLAS has these for 16-bit matmuls."""
START_K = 128
"""Delay of a tile's first operands, in entries of k: two steps of 64, about a
microsecond for a 128 x 256 tile on an H100. Assumed."""
LARGE = 8192
"""m, n and k of the large matmul, which reaches `Constants.product_efficiency`."""


@functools.lru_cache(maxsize=65_536)
def relative_speed(m: int, n: int, k: int, num_sms: int) -> float:
    """Return a matmul's FLOPs per second relative to a large matmul, at most 1.

    Args:
      m: rows of the result.
      n: columns of the result.
      k: length of the sums.
      num_sms: multiprocessors of the GPU.
    """
    return min(1.0, _use(m, n, k, num_sms) / _use(LARGE, LARGE, LARGE, num_sms))


def _use(m: int, n: int, k: int, num_sms: int) -> float:
    """Return the share of the multiprocessors' time that is useful."""

    def with_tile(rows: int, columns: int) -> float:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / num_sms)
        reuse = _reuse(rows, columns) / _reuse(*TILES[0])
        needed = m * n * k / (num_sms * rows * columns * (k + START_K))
        return reuse * needed / waves

    return max(with_tile(*tile) for tile in TILES)


def _reuse(rows: int, columns: int) -> float:
    """Return multiply-adds per entry of the operands that a tile reads."""
    return rows * columns / (rows + columns)


def layer_matmuls(case: Case) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of each matmul of a layer's forward pass on one GPU.

    Projections with the same input are one matmul (`mjax.layers.block`). With chunks
    over tp, each matmul has the rows of one chunk.
    """
    tp, rows = case.sizes.tp, max(1, case.tokens // case.tp_chunks)
    core = case.heads * case.head_width // tp
    qkv = core + 2 * max(1, case.kv_heads // tp) * case.head_width
    ffn = case.d_ff // tp
    up = (2 if case.gated else 1) * ffn
    if case.parallel:
        shapes = [(qkv + up, case.d_model), (case.d_model, core + ffn)]
    else:
        shapes = [
            (qkv, case.d_model),
            (case.d_model, core),
            (up, case.d_model),
            (case.d_model, ffn),
        ]
    return [(rows, n, k) for n, k in shapes]


def layer_speed(case: Case, num_sms: int) -> float:
    """Return the speed of a layer's matmuls relative to large ones, in both passes.

    The matmul of the input gradient also has the rows of one chunk; the matmul of the
    weight gradient sums over all positions at once.
    """
    flops, seconds = 0.0, 0.0
    for m, n, k in layer_matmuls(case):
        one = m * n * k * case.tp_chunks
        whole = m * case.tp_chunks
        flops += 3 * one
        seconds += one / relative_speed(m, n, k, num_sms)
        seconds += one / relative_speed(m, k, n, num_sms)
        seconds += one / relative_speed(k, n, whole, num_sms)
    return flops / seconds
