"""The shapes and learning rates of GPT-3, from 125M to 13B parameters.

Source: Brown et al. 2020, arXiv:2005.14165, Table 2.1 (layers, widths, heads, learning
rates; batch in tokens) and appendix B (Adam: beta2 0.95, clip 1.0, weight decay 0.1,
cosine to 10%). Differs: the architecture of GPT-J, so the result can be exported
(parallel blocks; rotary positions of neighbouring pairs; an untied output projection;
biases on norms, feed-forward layer and output, but none in attention); a vocabulary of
32,768 learned from the corpus; full attention in all layers; a warm-up of at most 2,000
steps; 16 heads of width 128 in the 1.3B model (the 24 heads of the table would be wider
than the model); a width of 5120 = 40 x 128 in the 13B model (the table prints 5140).

The default corpus is far too small for these models; set your own with `--data.path`.
The batch is split over all devices; raise `--batch.microbatches` to fit into memory.
"""

import dataclasses

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig
from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.model.config import ModelConfig

VOCAB_SIZE = 32_768


def gpt_125m() -> TrainConfig:
    """Train 12 layers of width 768.

    Command: python -m mjax.train --recipe gpt-125m --data.path corpus/
    Hardware: one GPU or more. Tokens: 2.6e9 (20 per parameter) in 5,000 steps, about
    2.0e18 model FLOPs. Not trained yet: no loss is claimed.
    """
    model = _gptj(layers=12, d_model=768, heads=12)
    return _gpt(model, steps=5_000, sequences=256, lr=6e-4)


def gpt_350m() -> TrainConfig:
    """Train 24 layers of width 1024.

    Command: python -m mjax.train --recipe gpt-350m --data.path corpus/
    Hardware: one GPU or more. Tokens: 7.3e9 (20 per parameter) in 14,000 steps, about
    1.7e19 model FLOPs. Not trained yet: no loss is claimed.
    """
    model = _gptj(layers=24, d_model=1024, heads=16)
    return _gpt(model, steps=14_000, sequences=256, lr=3e-4)


def gpt_1b3() -> TrainConfig:
    """Train 24 layers of width 2048.

    Command: python -m mjax.train --recipe gpt-1b3 --data.path corpus/
    Hardware: one node of 8 GPUs or more. Tokens: 2.7e10 (20 per parameter) in 26,000
    steps, about 2.3e20 model FLOPs. Not trained yet: no loss is claimed.
    Layout: for 8 H100; 2.22 s a step, MFU 49%, 39.6 GiB, modelled by replay of the
    compiled step (2026-11), not measured.
    """
    model = _gptj(layers=24, d_model=2048, heads=16)
    model = dataclasses.replace(model, remat="core")
    return _gpt(model, steps=26_000, sequences=512, lr=2e-4, microbatches=4)


def gpt_13b() -> TrainConfig:
    """Train 40 layers of width 5120, with ZeRO-3 over all GPUs.

    Command: python -m mjax.train --recipe gpt-13b --data.path corpus/
    Hardware: 8 nodes of 8 GPUs or more. Tokens: 2.6e11 (20 per parameter) in 125,000
    steps, about 2.1e22 model FLOPs. Not trained yet: no loss is claimed.
    Layout: for 64 H100; 4.72 s a step, MFU 55.5%, 37.9 GiB, modelled by replay of the
    compiled step (2026-11), not measured.
    """
    model = _gptj(layers=40, d_model=5120, heads=40)
    model = dataclasses.replace(model, remat="core")
    run = _gpt(model, steps=125_000, sequences=1024, lr=1e-4, microbatches=4)
    return dataclasses.replace(run, zero=3)


def _gptj(*, layers: int, d_model: int, heads: int) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        d_model=d_model,
        heads=heads,
        vocab_size=VOCAB_SIZE,
        rope_interleaved=True,
        mlp_bias=True,
        norm_bias=True,
        head_bias=True,
    )


def _gpt(
    model: ModelConfig,
    *,
    steps: int,
    sequences: int,
    lr: float,
    microbatches: int = 1,
) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        batch=BatchConfig(size=sequences, microbatches=microbatches),
        model=model,
        data=DataConfig(tokenizer=f"train:{VOCAB_SIZE}", seq_len=2048),
        optim=OptimConfig(
            name="adamw",
            lr=lr,
            beta2=0.95,
            eps=1e-8,
            warmup_steps=min(2000, steps // 10),
        ),
    )
