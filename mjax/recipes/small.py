"""Runs for a laptop: a smoke test and the demo.

Both are Cohere2 models, so the result can be exported: layers with a window have rotary
positions of neighbouring pairs, layers without one have no positions, and the
feed-forward layer is a SwiGLU. A SwiGLU has three matrices and a GELU layer two, so a
SwiGLU of width 8/3 D has the FLOPs of a GELU layer of width 4 D. In the demo the
embedding is also the output projection, as vLLM requires for this family
(docs/serving_elsewhere.md).
"""

from mjax.ckpt.config import CkptConfig
from mjax.config.optim import OptimConfig
from mjax.config.run import EvalConfig, LogConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.model.config import ModelConfig


def debug() -> TrainConfig:
    """Run all parts at toy size, in float32; all sizes are multiples of 8.

    Command: python -m mjax.train --recipe debug --simulate-devices 8
    Hardware: any CPU. Time: seconds, most of them compilation.
    Expect: a finite loss that falls from about ln 257 = 5.5 nats; nothing more.
    """
    return TrainConfig(
        steps=20,
        batch=BatchConfig(size=8),
        model=ModelConfig(
            layers=2,
            d_model=64,
            heads=8,
            d_ff=176,
            window=(16, None),
            rope=(True, False),
            rope_interleaved=True,
            activation="swiglu",
        ),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(seq_len=64),
        optim=OptimConfig(lr=5e-3, warmup_steps=2),
        eval=EvalConfig(every=10, batches=2),
    )


def demo() -> TrainConfig:
    """Learn to write Python from the standard library, byte by byte.

    Three layers of four see the last 64 bytes and have rotary positions; the fourth
    sees all 128 and has no positions. The optimizer is LAMB, as in every recipe that
    does not follow a published AdamW setting.

    Command: python -m mjax.train
    Hardware: 2 CPU cores. Time: about 4 minutes (docs/benchmarks/demo.md).
    Expect: about 1.8 bits per byte on all held-out text, 37% of the unigram entropy of
    that text, which is printed too.
    """
    return TrainConfig(
        steps=1500,
        batch=BatchConfig(size=8),
        model=ModelConfig(
            layers=4,
            d_model=128,
            heads=4,
            d_ff=344,
            window=(64, 64, 64, None),
            rope=(True, True, True, False),
            rope_interleaved=True,
            activation="swiglu",
            tie_embeddings=True,
            remat="none",
        ),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(seq_len=128),
        optim=OptimConfig(lr=1e-2, warmup_steps=100),
        ckpt=CkptConfig(every=500),
        eval=EvalConfig(every=750, batches=560),
        log=LogConfig(every=50),
    )
