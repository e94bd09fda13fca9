"""Tabulate how tensor parallelism slows the matmuls of a layer by making them smaller.

    python -m scripts.plan.matmul_shapes

Uses the model of tiles and waves by which the search ranks layouts
(`mjax.estimate.formulas.matmul`), for a described H100. Nothing is compiled or
measured. Writes docs/benchmarks/matmul_shapes.md.
"""

import sys
from collections.abc import Sequence

from mjax.estimate.formulas.case import Case
from mjax.estimate.formulas.matmul import (
    LARGE,
    START_K,
    TILES,
    layer_matmuls,
    layer_speed,
    relative_speed,
)
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from scripts.evidence import Table, write_page

NUM_SMS = GPUS["h100"].num_sms
WIDTHS = (2048, 3072, 4096, 5120, 6144, 8192, 12_288)
TP = (1, 2, 4, 8)
HEAD_WIDTH, SEQ_LEN = 128, 2048


def layer(d_model: int, tp: int, *, rows: int, in_chunks: bool) -> Case:
    """Return a GPT with parallel blocks; only its microbatch size matters here."""
    heads = d_model // HEAD_WIDTH
    return Case(
        layers=1,
        d_model=d_model,
        d_ff=4 * d_model,
        heads=heads,
        head_width=HEAD_WIDTH,
        kv_heads=heads,
        gated=False,
        parallel=True,
        vocab_size=32_768,
        seq_len=SEQ_LEN,
        sizes=AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=tp),
        microbatches=1,
        rows=rows,
        tp_chunks=tp if in_chunks else 1,
    )


def by_tp(rows: int, *, in_chunks: bool) -> Table:
    """Compare widths and sizes of tp."""

    def line(d_model: int) -> list[str]:
        cases = (layer(d_model, tp, rows=rows, in_chunks=in_chunks) for tp in TP)
        speeds = (layer_speed(case, NUM_SMS) for case in cases)
        return [f"{d_model}", *(f"{speed:.1%}" for speed in speeds)]

    overlap = "chunks" if in_chunks else "off"
    return Table(
        title=f"{rows * SEQ_LEN:,} tokens in a microbatch, `--mesh.tp-overlap "
        f"{overlap}`",
        text="Speed of all matmuls of a layer, forward and backward, relative to one "
        "large matmul.",
        header=["width", *(f"tp {tp}" for tp in TP)],
        rows=[line(d_model) for d_model in WIDTHS],
    )


def shapes(d_model: int, rows: int) -> Table:
    """List the forward matmuls of one width."""

    def line(tp: int) -> Sequence[str]:
        found = layer_matmuls(layer(d_model, tp, rows=rows, in_chunks=False))
        speeds = [relative_speed(*shape, NUM_SMS) for shape in found]
        return [
            f"{tp}",
            *(" x ".join(map(str, shape)) for shape in found),
            *(f"{speed:.1%}" for speed in speeds),
        ]

    return Table(
        title=f"Shapes: width {d_model}, {rows * SEQ_LEN:,} tokens",
        text="m x n x k of the forward matmuls, and their speeds, with "
        "`--mesh.tp-overlap off`. The layer is a parallel block (attention and "
        "feed-forward side by side), so its forward pass has two matmuls: `in` (query, "
        "key, value and feed-forward input) and `out` (the outputs of both).",
        header=["tp", "in", "out", "in, speed", "out, speed"],
        rows=[line(tp) for tp in TP],
    )


def main() -> int:
    """Write the page."""
    tiles = ", ".join(f"{rows} x {columns}" for rows, columns in TILES)
    model = Table(
        title="The model",
        text="Modelled, not measured. A GPU computes the result in tiles, in waves of "
        f"one tile per multiprocessor ({NUM_SMS}). Tiles at the edges and the last "
        "wave take as long as full ones. The start-up of a tile costs as much as "
        f"{START_K} entries of k. A smaller tile reads more operands per FLOP, and its "
        "speed is assumed to fall in proportion. The fastest tile shape is used. "
        f"Speeds are relative to a matmul of {LARGE} x {LARGE} x {LARGE}, which has "
        "the efficiency of the cost model, and are at most 100%. The planner's search "
        "for layouts uses these numbers; its replay of a compiled step assumes one "
        "efficiency for all matmuls. Source of tiles and waves: NVIDIA, Matrix "
        "Multiplication Background (DU-09799-001), sections 2.3, 3.1 and 3.2.",
        header=["tile shapes"],
        rows=[[tiles]],
    )
    tables = [by_tp(rows, in_chunks=c) for c in (False, True) for rows in (1, 4)]
    write_page(
        "matmul_shapes",
        "What does tensor parallelism cost by making matmuls smaller?",
        "python -m scripts.plan.matmul_shapes",
        [model, *tables, shapes(2048, 1)],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
