"""The shape of Llama 3 8B, for planning, counting and measuring.

Source: Grattafiori et al. 2024, arXiv:2407.21783, Table 3 (layers, widths, heads,
key/value heads, peak learning rate, SwiGLU, rotary base) and section 3.4.1 (AdamW,
linear warm-up of 8,000 steps, cosine to 1% over 1,200,000 steps, sequences of 8,192
tokens). The vocabulary has the 128,256 tokens of the released tokenizer; the table has
128,000. The paper gives no batch size for this model: here it is 4.2 million tokens,
the initial batch of the largest model. Text is synthetic and the vocabulary is the
model's own, so the shapes are those of the table on any machine.
"""

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig
from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.model.config import ModelConfig


def llama3_8b() -> TrainConfig:
    """Shape a model of 32 layers and width 4096, with sequences of 8,192 tokens.

    Command: python -m mjax.train --recipe llama3-8b
    Hardware: 16 nodes of 8 GPUs, with two sequences per GPU in a microbatch; with fewer
    nodes raise --batch.microbatches to keep two. Time: about 2.2e17 model FLOPs a step.
    Not trained: no loss is claimed. Layout: for 128 H100; 3.04 s a step, MFU 56.0%,
    55.9 GiB, modelled by replay of the compiled step (2026-11), not measured.
    """
    return TrainConfig(
        steps=100,
        zero=3,
        batch=BatchConfig(size=512, microbatches=2),
        model=ModelConfig(
            layers=32,
            d_model=4096,
            heads=32,
            kv_heads=8,
            d_ff=14_336,
            vocab_size=128_256,
            block="serial",
            norm="rmsnorm",
            activation="swiglu",
            rope_base=500_000.0,
            remat="core",
        ),
        data=DataConfig(path=("synthetic",), vocab="model", seq_len=8192),
        optim=OptimConfig(name="adamw", lr=3e-4, warmup_steps=10),
    )
