"""Lower bounds for the time of the parts of a step, independent of XLA's compilation.

Input: a config and a cost model. Output: seconds per step of one GPU, by source
(`sources`). Nothing is recomputed, and each array is read and written as often as the
algorithm needs, at the fractions of the peaks that the replay assumes. The bounds are
modelled, like the step with which they are compared.

- matmuls: 6 FLOPs per weight and token (Narayanan et al. 2021, arXiv:2104.04473,
  section 5.1), split evenly over the GPUs. One stage has the matmul of the head, and
  the other stages wait for it.
- attention kernels: 2 matmuls forward and 5 backward (Dao 2023, arXiv:2307.08691,
  section 4.1) over visible pairs.
- norms: input and output forward; input, gradient and gradient of the input backward.
- rope: queries and keys read and written, forward and backward.
- joins and sums of activations: with chunks over tp a device reads the tp partial sums
  of its shard and writes their sum, once forward and once backward per branch.
- optimizer: parameters and two moments read and written, gradient read.
- sums of gradients: 0, because the matmul adds them. Joins, slices and exchanges of
  weights, activation functions, copies: 0, because a matmul can read and write in
  place.
"""

from collections.abc import Mapping

import numpy as np

from mjax.config.train import TrainConfig
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.model.counts import row_pairs
from mjax.plan.cost import CostModel

_FREE = (
    *("sums of gradients", "joins of weights", "slices of weights"),
    *("exchange of chunks", "zeros and copies", "activation functions"),
)
_FP8_RATE = 2


def floors(
    config: TrainConfig, sizes: AxisSizes, cost: CostModel, *, params_bytes: int
) -> Mapping[str, float]:
    """Return the minimum seconds by source; sources without a formula are absent.

    Args:
      config: config of the run. With adapters the result is empty, because frozen
        weights need fewer FLOPs.
      sizes: sizes of the mesh axes.
      cost: speeds of the GPU.
      params_bytes: bytes of the stored parameters of one device.
    """
    if config.adapters is not None:
        return {}
    model, seq_len = config.model, config.data.seq_len
    local_rows = config.batch.size // sizes.dp
    tokens = local_rows * seq_len
    d, h = model.d_model, model.head_width
    heads = model.heads + model.num_kv_heads
    layer = d * h * 2 * heads + d * model.ffn_width * (3 if model.is_gated else 2)
    layers = model.layers / sizes.pp
    branches = layers * (1 if model.block == "parallel" else 2)
    pairs = row_pairs(model, seq_len) / sizes.pp
    rotated = sum(kind.rotate for kind in model.kinds) / sizes.pp
    peak = cost.peak_flops_per_s * cost.product_efficiency
    rate = _FP8_RATE if config.precision.matmul == "fp8" else 1
    entry = np.dtype(config.precision.compute).itemsize
    stored = np.dtype(config.precision.params).itemsize
    reduced = np.dtype(config.precision.reduce).itemsize

    def moved(entries: float | int, entry_bytes: int = entry) -> float:
        return (
            entries * entry_bytes / (cost.memory_bytes_per_s * cost.memory_efficiency)
        )

    norms = branches * (2 if model.post_norms else 1)
    in_chunks = tp_chunks(config.mesh, sizes.tp) > 1
    return dict.fromkeys(_FREE, 0.0) | {
        "matmuls of the layers": 6 * tokens * layers * layer / sizes.tp / peak / rate,
        "matmuls of the head": 6 * tokens * d * model.vocab_size / sizes.tp / peak,
        "attention kernels": 7
        * 2
        * h
        * model.heads
        / sizes.tp
        * local_rows
        * pairs
        / (cost.peak_flops_per_s * cost.kernel_efficiency),
        "norms": moved(5 * norms * tokens * d / sizes.tp),
        "rope": moved(4 * rotated * tokens * heads * h / sizes.tp),
        "joins and sums of activations": moved(
            2 * branches * tokens * d * (1 + 1 / sizes.tp) if in_chunks else 0
        ),
        "optimizer and norm of the gradients": moved(
            params_bytes / stored, 6 * stored + reduced
        ),
    }
