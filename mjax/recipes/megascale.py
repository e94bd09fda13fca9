"""The two models of MegaScale: shapes for planning, counting and measuring.

Source: Jiang et al. 2024, arXiv:2402.15627, Table 1 (layers, widths, heads, tensor and
pipeline parallelism), section 6.1 (interleaved schedule with six and three virtual
stages, sequences of 2,048 tokens, a vocabulary of 64,000), section 2 (ZeRO-2), section
3.1 (parallel block, sliding window, LAMB), section 3.2 (matmuls chunked to overlap
tensor-parallel communication). The heads, 128 of width 96 and 160 of width 128, are
those of Table 1. The paper does not give the window, the learning rate or the
microbatch size. We chose a window of 1,024 keys, half a sequence, on every layer, as in
our model of the paper's step times (scripts/reproduce/megascale_cases.py). The learning
rate is a guess; nothing was trained with it. Remat core is the fastest of the policies
that fit, modelled by replay of compiled steps. Text is synthetic and the vocabulary is
the model's own, so the shapes are those of the table on any machine.

The architecture is the paper's, which no Hugging Face family has. A run logs this when
it starts, with the flags that would make the model exportable.
"""

import dataclasses

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig
from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.mesh.axes import MeshConfig
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig

_WINDOW = (1024,)
"""Our choice; the paper does not give it."""


def megascale_175b() -> TrainConfig:
    """Shape a model of 96 layers, width 12288: tp 8, pp 8 with 6 virtual stages each.

    Command: python -m mjax.train --recipe megascale-175b
    Hardware: 1,024 GPUs, as in the last row with batches of 768 in the paper's Table 2.
    With fewer GPUs a microbatch has more sequences: four on the 256 GPUs of the first
    row. Time: about 1.7e18 model FLOPs a step. Not trained: no loss is claimed. Keeps
    the paper's form: no export to Hugging Face. Layout: for 256 H200; 10.49 s a step,
    MFU 62.7%, 54.9 GiB, modelled by replay of the compiled step (2026-11), not
    measured.
    """
    return _megascale(
        ModelConfig(
            layers=96, d_model=12_288, heads=128, vocab_size=64_000, window=_WINDOW
        ),
        num_stages=8,
        num_chunks=6,
        batch=BatchConfig(size=768, microbatches=48),
    )


def megascale_530b() -> TrainConfig:
    """Shape a model of 105 layers, width 20480: tp 8, pp 35 with 3 virtual stages each.

    Command: python -m mjax.train --recipe megascale-530b
    Hardware: 2,240 GPUs, the fewest in the paper's Figure 9, where a batch has as many
    sequences as there are GPUs. Time: about 1.5e19 model FLOPs a step. Not trained: no
    loss is claimed. Keeps the paper's form: no export to Hugging Face.
    Layout: for 2,240 H200, where a microbatch is two sequences; 12.0 s a step, MFU
    55.3%, 46.7 GiB, modelled by replay of the compiled step (2026-11), not measured.
    """
    return _megascale(
        ModelConfig(
            layers=105, d_model=20_480, heads=160, vocab_size=64_000, window=_WINDOW
        ),
        num_stages=35,
        num_chunks=3,
        batch=BatchConfig(size=2240, microbatches=140),
    )


def _megascale(
    model: ModelConfig, *, num_stages: int, num_chunks: int, batch: BatchConfig
) -> TrainConfig:
    return TrainConfig(
        steps=100,
        zero=2,
        mesh=MeshConfig(pp=num_stages, tp=8, tp_overlap="chunks"),
        pipeline=PipelineConfig(chunks=num_chunks),
        batch=batch,
        model=dataclasses.replace(model, remat="core"),
        data=DataConfig(path=("synthetic",), vocab="model", seq_len=2048),
        optim=OptimConfig(name="lamb", lr=1e-3, warmup_steps=10),
    )
