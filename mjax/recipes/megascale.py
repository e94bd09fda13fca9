"""The two models of MegaScale: shapes to plan, count and measure with.

Source: Jiang et al. 2024, arXiv:2402.15627, Table 1 (layers, widths, heads) and
section 6.1 (sequences of 2,048 tokens, a vocabulary of 64,000), section 3.1 (parallel
block, sliding window, LAMB). The paper gives neither the window nor the learning rate:
attention is full here, and the rate is a guess that nothing was trained with. Text is
synthetic and the vocabulary the model's own, so that the shapes are those of the table
on any machine.
"""

from mjax.config import TrainConfig
from mjax.data.dataset import DataConfig
from mjax.mesh.axes import MeshConfig
from mjax.model import ModelConfig
from mjax.optim import OptimConfig
from mjax.step import BatchConfig


def megascale_175b() -> TrainConfig:
    """Shape a model of 96 layers and width 12288, split over the 8 GPUs of a node.

    Command: python -m mjax.train --recipe megascale-175b
    Hardware: hundreds of GPUs; the paper's Table 2 starts at 256 with batches of 768.
    Time: about 1.7e18 model FLOPs a step. Not trained: no loss is claimed.
    """
    return _megascale(
        ModelConfig(layers=96, d_model=12_288, heads=96, vocab_size=64_000)
    )


def megascale_530b() -> TrainConfig:
    """Shape a model of 105 layers and width 20480, split over the 8 GPUs of a node.

    Command: python -m mjax.train --recipe megascale-530b
    Hardware: thousands of GPUs. Time: about 5.0e18 model FLOPs a step. Not trained: no
    loss is claimed.
    """
    return _megascale(
        ModelConfig(layers=105, d_model=20_480, heads=128, vocab_size=64_000)
    )


def _megascale(model: ModelConfig) -> TrainConfig:
    return TrainConfig(
        steps=100,
        zero=3,
        mesh=MeshConfig(tp=8),
        batch=BatchConfig(size=768),
        model=model,
        data=DataConfig(path=("synthetic",), vocab="model", seq_len=2048),
        optim=OptimConfig(name="lamb", lr=1e-3, warmup_steps=10),
    )
