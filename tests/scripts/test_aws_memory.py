"""The published table of what fits: its runs, as flags of the trainer."""

import pytest

from mjax.config.sizes import check_sizes
from mjax.hardware.gpus import GPUS
from mjax.plan.compile import CompiledMemory
from scripts.plan import aws_memory
from scripts.plan.aws_memory import ARTICLE, OTHERS, WHOLE_LOSS, Cell, Compiled


@pytest.mark.parametrize("cell", [*ARTICLE, *WHOLE_LOSS, *OTHERS], ids=repr)
def test_every_run_is_one_of_the_trainer(cell: Cell):
    config = cell.config
    check_sizes(config, cell.sizes)
    assert cell.sizes.num_devices == aws_memory.NUM_GPUS
    assert (config.data.seq_len, config.model.vocab_size) == (8192, 128_256)


def test_the_runs_of_the_article_are_those_that_it_names():
    found = [
        (
            *(cell.sizes.tp, cell.sizes.dp_replicate, cell.sizes.dp_shard),
            *(cell.config.model.remat, cell.sequences, cell.article),
        )
        for cell in ARTICLE
    ]
    assert found == [
        (2, 2, 4, "none", 2, "fits"),
        (1, 2, 8, "none", 2, "out of memory"),
        (1, 2, 8, "full", 2, "fits"),
        (1, 2, 8, "full", 4, "out of memory"),
        (1, 1, 16, "full", 2, "fits"),
    ]


@pytest.mark.parametrize(("share", "outcome"), [(0.9, "fits"), (0.93, "out of memory")])
def test_a_step_fits_into_what_is_left_of_a_gpu(share: float, outcome: str):
    num_bytes = int(share * GPUS[aws_memory.GPU].memory_bytes)
    whole = CompiledMemory(
        argument_bytes=num_bytes,
        output_bytes=0,
        aliased_bytes=0,
        temporary_bytes=0,
        code_bytes=0,
    )
    assert Compiled(figure=whole, wall_s=1.0, max_resident=1).outcome == outcome


@pytest.mark.parametrize(("cell", "num_chunks"), [(ARTICLE[3], 32), (WHOLE_LOSS[1], 1)])
def test_the_loss_is_cut_as_in_training_or_not_at_all(cell: Cell, num_chunks: int):
    positions = cell.sequences * cell.config.data.seq_len
    chunks = aws_memory.loss_chunks(cell)
    assert chunks.num_chunks(positions, cell.config.model.padded_vocab) == num_chunks
