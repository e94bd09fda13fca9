"""Put a run's configuration into the closed-form model of `mjax.sim`.

Enters: a config, the sizes of its mesh, the cluster. Leaves: `Estimate`, the modelled
seconds of a step and the modelled bytes of a device: in microseconds, without tracing.
"""

import dataclasses
import functools

import numpy as np

from mjax.config import TrainConfig
from mjax.counts import flops_per_token, visible_pairs
from mjax.kernels.cross_entropy.tuning import CHUNKED
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.model import ModelConfig
from mjax.plan.topology import Topology
from mjax.sim.case import Case, Constants, Device
from mjax.sim.memory import Memory, memory
from mjax.sim.step_time import StepTime, mfu, simulate

ASSUMED = Constants()
"""Of a run of which nothing is known: nothing is hidden."""

HIDDEN_BY_CHUNKS = 0.9
"""Share over tp with --mesh.tp-overlap chunks: what compiled schedules of a wide layer
reach at least, by bytes (docs/overlap.md)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Modelled time and memory of a run."""

    time: StepTime
    memory: Memory
    mfu: float


def estimate(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    constants: Constants = ASSUMED,
) -> Estimate:
    """Model a run.

    Args:
      config: the run, settled.
      sizes: of the mesh axes.
      topology: the cluster.
      constants: how much of it is reached, and what is hidden; over tp at least
        `HIDDEN_BY_CHUNKS` if the run crosses it in chunks.
    """
    device = Device.of(topology.description, gpus_per_node=topology.gpus_per_node)
    case = case_of(config, sizes)
    if tp_chunks(config.mesh, sizes.tp) > 1:
        hidden = max(constants.tp_overlap, HIDDEN_BY_CHUNKS)
        constants = dataclasses.replace(constants, tp_overlap=hidden)
    time = simulate(case, device, constants)
    vocab = config.model.padded_vocab // sizes.tp
    chunks = CHUNKED.num_chunks(case.tokens, vocab)
    needed = memory(
        case,
        tied=config.model.tie_embeddings,
        logits_at_once=-(-case.tokens // chunks) * vocab,
    )
    per_token = _counts(config.model, config.data.seq_len)[1]
    return Estimate(
        time=time,
        memory=needed,
        mfu=mfu(case, device, time.total_s, per_token),
    )


@functools.lru_cache(maxsize=64)
def _counts(model: ModelConfig, seq_len: int) -> tuple[int, float]:
    """Count visible pairs of all layers, and FLOPs per token; a search asks often."""
    pairs = sum(visible_pairs(seq_len, kind.window) for kind in model.kinds)
    return pairs, flops_per_token(model, seq_len)


def case_of(config: TrainConfig, sizes: AxisSizes) -> Case:
    """Say what is trained, in the words of the model."""
    model, seq_len = config.model, config.data.seq_len
    pairs = _counts(model, seq_len)[0]
    param_bytes = np.dtype(config.precision.params).itemsize
    # What leaves its layers' inputs on the host computes as much again as full.
    remat = "full" if model.remat == "offload" else model.remat
    return Case(
        layers=model.layers,
        d_model=model.d_model,
        d_ff=model.ffn_width,
        heads=model.heads,
        head_width=model.head_width,
        kv_heads=model.num_kv_heads,
        gated=model.activation == "swiglu",
        parallel=model.block == "parallel",
        vocab_size=model.padded_vocab,
        seq_len=seq_len,
        visible_keys=pairs / seq_len / model.layers,
        sizes=sizes,
        # Chunks of one stage run one after the other: no bubble to cut.
        chunks=config.pipeline.chunks if sizes.pp > 1 else 1,
        microbatches=config.batch.microbatches,
        tp_chunks=tp_chunks(config.mesh, sizes.tp),
        rows=config.batch.size // (sizes.dp * config.batch.microbatches),
        remat=remat,
        zero=config.zero,
        param_bytes=np.dtype(config.precision.compute).itemsize,
        grad_bytes=np.dtype(config.precision.reduce).itemsize,
        state_bytes=3 * param_bytes,  # LAMB and AdamW: the parameter and two moments
    )
