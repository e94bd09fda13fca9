"""The model of the loss's chunks: its bytes are the program's, its choices the best."""

import pytest

from mjax.kernels.cross_entropy.tuning import CHUNKED
from scripts.kernels import loss_chunks
from scripts.kernels.loss_chunks import Shape, cost
from scripts.overlap import xla_bytes


@pytest.mark.plan
@pytest.mark.parametrize(("vocab", "tp", "chunks"), [(32768, 1, 2), (32768, 8, 1)])
def test_the_bytes_are_those_of_the_compiled_program(vocab, tp, chunks) -> None:
    name = f"head D=2048 V={vocab} tp={tp}, loss and gradients"
    cases = {case.name: case for case in xla_bytes.head_cases()}
    counted = xla_bytes.count(cases[name])
    modelled = cost(
        Shape(positions=xla_bytes.POSITIONS, vocab=vocab, width=2048, tp=tp), chunks
    )
    # Without what is done once, and what is small.
    products = [k for k in counted.kernels if k.kind == "gemm"]
    moved = sum(k.moved_bytes for k in products)
    assert moved == pytest.approx(modelled.product_bytes, rel=0.02)
    logits = 4 * xla_bytes.POSITIONS // chunks * vocab // tp
    softmax = [
        k
        for k in counted.kernels
        if k.kind == "elementwise" and logits <= k.read_bytes < 1.2 * logits
    ]
    assert len(softmax) == 3
    moved = sum(k.moved_bytes for k in softmax)
    # And partial results of the reductions, 1% of what they read.
    assert moved == pytest.approx(modelled.softmax_bytes, rel=0.02)
    # And the condition of the loop.
    launched = [k for k in counted.kernels if k.runs == chunks]
    assert chunks == 1 or len(launched) + 1 == loss_chunks.LAUNCHES


def test_a_product_with_few_tiles_is_split_along_k() -> None:
    narrow = Shape(positions=1024, vocab=131_072, width=2048, tp=1)
    # dx has 64 tiles for 132 multiprocessors; whole, its k alone would take 1.9 ms.
    tile_s = 2 * 128 * 256 * 131_072 / (0.75 * 989.4e12 / 132)
    assert tile_s > 1.5e-3
    assert cost(narrow, 1).products_s < 3 * 2 * 1024 * 131_072 * 2048 / 600e12


@pytest.mark.parametrize("shape", loss_chunks.SHAPES, ids=str)
def test_the_shipped_sizes_are_near_the_fastest_and_bounded_in_memory(shape) -> None:
    chunks = CHUNKED.num_chunks(shape.positions, shape.local_vocab)
    most = 6 * max(2**27, 1024 * shape.local_vocab)
    assert cost(shape, chunks).chunk_bytes <= most
    assert loss_chunks.excess(CHUNKED, shape) < 0.03


def test_half_the_logits_would_cost_more_than_they_save() -> None:
    half = type(CHUNKED)(max_logits=2**26, min_positions=512)
    worst = max(loss_chunks.excess(half, shape) for shape in loss_chunks.SHAPES)
    assert worst > 0.09
