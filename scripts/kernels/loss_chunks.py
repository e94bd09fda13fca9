"""Model the time and memory of the loss for every number of chunks.

    python -m scripts.kernels.loss_chunks
    python -m scripts.kernels.loss_chunks --write

Input: positions, vocabulary, width, tensor parallelism. Output: for each number of
chunks the time of the head with its loss and gradients on an H200, part by part, and
the memory of a chunk. `mjax/kernels/cross_entropy/tuning.py` takes its sizes from this
model. Nothing is measured; the bytes are those that XLA's program moves
(tests/scripts/test_loss_chunks.py compares them with the compiled program).

A chunk of c positions, over a local vocabulary of v tokens, is

    logits = x w^T      2 c v D FLOPs; reads w, x; writes 4 c v bytes
    softmax             reads 4 c v bytes three times, writes 2 c v
    dx = dz w           2 c v D FLOPs; reads dz (2 c v), w; writes dx
    dw += dz^T x        2 c v D FLOPs; reads dz, x, 4 v D; writes 4 v D

and the kernels run one after another. A GEMM takes the longer of its arithmetic and its
bytes. Its m x n grid is cut into tiles of 128 x 256, which the multiprocessors process
in waves; if there are few tiles, k is split, for 8 m n bytes per part.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from mjax.hardware.gpus import GPUS
from mjax.kernels.cross_entropy.tuning import CHUNKED, ChunkedTuning
from scripts.evidence import Table, write_page

GPU = GPUS["h200"]
SHARE = 0.75
"""Share of the peak that a large GEMM reaches: an assumption, as in
`docs/benchmarks/megascale.md`.
"""
LAUNCHES = 16
"""Kernels and copies of a chunk, counted in the compiled program."""
LAUNCH_S = 2e-6
"""Time from the end of a kernel to the start of the next: an assumption."""
ALL_REDUCE_S = 15e-6
"""Time of an all-reduce of a few KiB over 8 GPUs of a host: an assumption. A chunk has
two.
"""
TILE = (128, 256)
MOST_SPLITS = 8
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A device's part of the head."""

    positions: int
    vocab: int
    width: int
    tp: int

    @property
    def local_vocab(self) -> int:
        """Number of vocabulary entries of this device."""
        return -(-self.vocab // self.tp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the head with its loss and gradients, for a number of chunks."""

    products_s: float
    softmax_s: float
    overhead_s: float
    """Launches, all-reduces, and work done once: zeros and the final scaling."""
    chunk_bytes: int
    """Maximum bytes of logits and their gradient at one time."""
    product_bytes: int
    softmax_bytes: int
    """Bytes moved by all chunks."""

    @property
    def time_s(self) -> float:
        """Sum of the three times."""
        return self.products_s + self.softmax_s + self.overhead_s


def cost(shape: Shape, chunks: int) -> Cost:
    """Return the cost of the head in `chunks` chunks of equal size."""
    c, v, d = -(-shape.positions // chunks), shape.local_vocab, shape.width
    # A single chunk writes its gradient without reading a sum.
    sums = 4 * v * d * (2 if chunks > 1 else 1)
    products = (
        ((c, v, d), 2 * v * d + 2 * c * d + 4 * c * v),
        ((c, d, v), 2 * c * v + 2 * v * d + 2 * c * d),
        ((v, d, c), 2 * c * v + 2 * c * d + sums),
    )
    softmax = 14 * c * v
    # Zeros; the gradient scaled and cast to float32, which the step accumulates.
    once = (4 * v * d if chunks > 1 else 0) + 8 * v * d
    all_reduces = 2 * ALL_REDUCE_S if shape.tp > 1 else 0.0
    return Cost(
        products_s=chunks * sum(_product_s(*product) for product in products),
        softmax_s=chunks * softmax / GPU.memory_bytes_per_s,
        overhead_s=chunks * (LAUNCHES * LAUNCH_S + all_reduces)
        + once / GPU.memory_bytes_per_s,
        chunk_bytes=6 * c * v,
        product_bytes=chunks * sum(num_bytes for _, num_bytes in products),
        softmax_bytes=chunks * softmax,
    )


def _product_s(sizes: tuple[int, int, int], num_bytes: int) -> float:
    m, n, k = sizes
    tiles = -(-m // TILE[0]) * -(-n // TILE[1])
    flops_per_s = SHARE * GPU.peak_bf16_flops_per_s

    def split_s(parts: int) -> float:
        rounds = -(-tiles * parts // GPU.num_sms)
        tile_s = 2 * TILE[0] * TILE[1] * (k / parts) / (flops_per_s / GPU.num_sms)
        moved = num_bytes + (8 * m * n * parts if parts > 1 else 0)
        return max(rounds * tile_s, moved / GPU.memory_bytes_per_s)

    return min(map(split_s, range(1, MOST_SPLITS + 1)))


def best(shape: Shape, *, most_bytes: float) -> tuple[int, Cost]:
    """Return the fastest number of chunks within a limit of bytes of logits."""
    costs = {n: cost(shape, n) for n in range(1, shape.positions // TILE[0] + 1)}
    fits = {n: found for n, found in costs.items() if found.chunk_bytes <= most_bytes}
    return min(fits.items(), key=lambda item: item[1].time_s)


SHAPES = tuple(
    Shape(positions=8192, vocab=vocab, width=width, tp=tp)
    for vocab in (32_768, 50_304, 128_256, 262_144)
    for width in (2048, 4096, 5120, 8192, 12_288)
    for tp in (1, 8)
)
CANDIDATES = tuple(
    ChunkedTuning(max_logits=2**log, min_positions=least)
    for log in (25, 26, 27, 28)
    for least in (256, 512, 1024, 2048)
)


def excess(tuning: ChunkedTuning, shape: Shape) -> float:
    """Return the time with these sizes over the time with the best number of chunks."""
    chunks = tuning.num_chunks(shape.positions, shape.local_vocab)
    least = best(shape, most_bytes=float("inf"))[1]
    return cost(shape, chunks).time_s / least.time_s - 1


def shape_row(shape: Shape) -> list[str]:
    """Return the cells of one shape: the shipped sizes, and the fastest."""
    chunks = CHUNKED.num_chunks(shape.positions, shape.local_vocab)
    shipped, (least_chunks, least) = (
        cost(shape, chunks),
        best(shape, most_bytes=float("inf")),
    )
    parts = (shipped.products_s, shipped.softmax_s, shipped.overhead_s)
    return [
        *(str(n) for n in (shape.vocab, shape.width, shape.tp, chunks)),
        f"{shipped.chunk_bytes / MIB:.0f}",
        f"{shipped.time_s * 1e6:.0f}",
        *(f"{part / shipped.time_s:.1%}" for part in parts),
        str(least_chunks),
        f"{least.chunk_bytes / MIB:.0f}",
        f"{shipped.time_s / least.time_s - 1:.1%}",
    ]


def candidate_row(tuning: ChunkedTuning) -> list[str]:
    """Return the cells of one pair of sizes, over all shapes."""
    found = [excess(tuning, shape) for shape in SHAPES]
    memory = [
        cost(s, tuning.num_chunks(s.positions, s.local_vocab)).chunk_bytes
        for s in SHAPES
    ]
    return [
        f"2^{tuning.max_logits.bit_length() - 1}",
        str(tuning.min_positions),
        f"{max(memory) / MIB:.0f}",
        f"{sum(found) / len(found):.1%}",
        f"{max(found):.1%}",
    ]


def tables() -> list[Table]:
    """Return the tables of the page."""
    shapes = Table(
        title="The shipped sizes, shape by shape",
        text=f"{GPU.device_kind}, 8192 positions on a device, bfloat16; modelled, "
        f"**nothing was measured on a GPU**. Matmuls at {SHARE:.0%} of the peak, "
        f"{GPU.memory_bytes_per_s / 1e12} TB/s, {LAUNCHES} launches a chunk of "
        f"{LAUNCH_S * 1e6:.0f} us each, two all-reduces of {ALL_REDUCE_S * 1e6:.0f} "
        "us each where tp > 1. *MiB*: of the logits and their gradient. *fastest*: of "
        "any number of chunks, whatever its memory.",
        header=(
            *("V", "D", "tp", "chunks", "MiB", "us", "products", "softmax"),
            *("launches, all-reduces, zeros", "fastest: chunks", "MiB", "slower by"),
        ),
        rows=[shape_row(shape) for shape in SHAPES],
    )
    candidates = Table(
        title="Other sizes",
        text=f"Over these {len(SHAPES)} shapes: the most memory of a chunk, and how "
        "much slower than the fastest number of chunks. Shipped: "
        f"2^{CHUNKED.max_logits.bit_length() - 1} logits, at least "
        f"{CHUNKED.min_positions} positions.",
        header=("logits", "positions", "most MiB", "slower, mean", "slower, most"),
        rows=[candidate_row(tuning) for tuning in CANDIDATES],
    )
    return [shapes, candidates]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    args = parser.parse_args(argv)
    if args.write:
        command = "python -m scripts.kernels.loss_chunks --write"
        print(write_page("loss_chunks", "Chunks of the loss", command, tables()))
        return 0
    for table in tables():
        for cells in (table.header, *table.rows):
            print(" | ".join(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
