"""Apply the closed-form model of `mjax.estimate.formulas` to a run's configuration.

Input: a config, the sizes of its mesh, the cluster. Output: an `Estimate`, with the
modelled seconds of a step and bytes of a device. An estimate takes microseconds,
because nothing is traced.
"""

import dataclasses
import functools

import numpy as np

from mjax.config.train import TrainConfig
from mjax.estimate.formulas.case import Case, Constants, Device
from mjax.estimate.formulas.memory import Memory, layer_bytes, memory
from mjax.estimate.formulas.step_time import StepTime, mfu, simulate
from mjax.kernels.cross_entropy.tuning import CHUNKED
from mjax.mesh.axes import AxisSizes, tp_chunks
from mjax.model.config import ModelConfig
from mjax.model.counts import flops_per_token, row_pairs
from mjax.plan.host_copies import input_waits_s, state_copies_s
from mjax.plan.options import Topology

ASSUMED = Constants(stash_passes=4.0, chunk_passes=4.0)
"""Default when nothing has been measured: no overlap. `stash_passes`: each residual of
a layer is copied into a stack and out of it. `chunk_passes`: chunks over tp are copied
into one array, and partial sums are added."""

VISIT_BYTES = {"plain": 28.0, "pipeline": 7.0}
"""Values of `Constants.visit_bytes`, from the growth of memory-bound time with the
number of microbatches in compiled schedules (2026-11, jax 0.11.2), remat core. Plain:
gpt-1b3 on 8 H100, 4 and 16 microbatches. Pipeline: megascale-175b on 256 H200, 48 and
192 microbatches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Modelled time and memory of a run."""

    time: StepTime
    host_copies_s: float
    """Seconds per step that compute waits for copies to and from the host."""
    memory: Memory
    mfu: float

    @property
    def total_s(self) -> float:
        """Seconds of a step, including waits for copies to and from the host."""
        return self.time.total_s + self.host_copies_s


def estimate(
    config: TrainConfig,
    sizes: AxisSizes,
    topology: Topology,
    constants: Constants = ASSUMED,
) -> Estimate:
    """Model the time and memory of a run.

    Args:
      config: config of the run, from `topology.settle`.
      sizes: sizes of the mesh axes.
      topology: the cluster.
      constants: efficiencies and overlap. If the run sends chunks over tp, `tp_overlap`
        is raised to at least `hidden_by_chunks`. `VISIT_BYTES` replaces `visit_bytes`.
    """
    device = Device.of(topology.description, gpus_per_node=topology.gpus_per_node)
    case = case_of(config, sizes)
    is_pipeline = sizes.pp * config.pipeline.chunks > 1
    visited = VISIT_BYTES["pipeline" if is_pipeline else "plain"]
    constants = dataclasses.replace(constants, visit_bytes=visited)
    hidden = hidden_by_chunks(tp_chunks(config.mesh, sizes.tp), sizes.tp)
    if hidden > constants.tp_overlap:
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
    host_copies_s = _host_copies_s(config, case, time, topology)
    return Estimate(
        time=time,
        host_copies_s=host_copies_s,
        memory=needed,
        mfu=mfu(case, device, time.total_s + host_copies_s, per_token),
    )


def _host_copies_s(
    config: TrainConfig, case: Case, time: StepTime, topology: Topology
) -> float:
    """Return the seconds per step that compute waits for copies to or from a host."""
    gpu = topology.description
    weights = case.gpu_weights / (case.sizes.shards if config.zero else 1)
    seconds = state_copies_s(weights * case.host_state_bytes, gpu)
    if config.model.remat == "offload":
        inputs = case.microbatches * case.layers_per_gpu * layer_bytes(case)
        seconds += input_waits_s(inputs, time.layers_s, gpu)
    return seconds


def hidden_by_chunks(num_chunks: int, tp: int) -> float:
    """Return the fraction of the layers' tp bytes that overlaps matmuls of chunks.

    A device receives and sends the tp - 1 other shards in num_chunks - 1 groups. If
    each group has one shard, all groups are overlapped. With larger groups, the largest
    group of one direction is exposed. Compiled forward schedules of 8 devices agree:
    50% in 2 chunks, 79% in 4, 100% in 8 (docs/overlap.md). The same rule is assumed for
    other numbers.

    Args:
      num_chunks: from `mesh.axes.tp_chunks`; 1 sends all at once and overlaps nothing.
      tp: size of the axis tp.
    """
    if num_chunks == 1:
        return 0.0
    others = tp - 1
    largest = -(-others // (num_chunks - 1))
    return 1.0 if largest == 1 else 1 - largest / (2 * others)


@functools.lru_cache(maxsize=64)
def _counts(model: ModelConfig, seq_len: int) -> tuple[int, float]:
    """Return the visible pairs of all layers, and the FLOPs per token (cached)."""
    return row_pairs(model, seq_len), flops_per_token(model, seq_len)


def case_of(config: TrainConfig, sizes: AxisSizes) -> Case:
    """Return the sizes and options of a run that the closed form needs."""
    model, seq_len = config.model, config.data.seq_len
    pairs = _counts(model, seq_len)[0]
    param_bytes = np.dtype(config.precision.params).itemsize
    # Remat offload recomputes as much as full. In a pipeline only the inputs of one
    # half-tick are on the host.
    is_pipeline = sizes.pp * config.pipeline.chunks > 1
    remat = "full" if model.remat == "offload" else model.remat
    return Case(
        layers=model.layers,
        d_model=model.d_model,
        d_ff=model.ffn_width,
        heads=model.heads,
        head_width=model.head_width,
        kv_heads=model.num_kv_heads,
        gated=model.is_gated,
        parallel=model.block == "parallel",
        post_norms=model.post_norms,
        learned_positions=model.learned_positions or 0,
        vocab_size=model.padded_vocab,
        seq_len=seq_len,
        visible_keys=pairs / seq_len / model.layers,
        sizes=sizes,
        # With one stage there is no bubble, so virtual stages have no effect.
        chunks=config.pipeline.chunks if sizes.pp > 1 else 1,
        microbatches=config.batch.microbatches,
        tp_chunks=tp_chunks(config.mesh, sizes.tp),
        rows=config.batch.size // (sizes.dp * config.batch.microbatches),
        remat=remat,
        loading_horizon=None if is_pipeline else model.loading_horizon,
        zero=config.zero,
        param_bytes=np.dtype(config.precision.compute).itemsize,
        grad_bytes=np.dtype(config.precision.reduce).itemsize,
        state_bytes=3 * param_bytes,  # LAMB, AdamW: the parameter and two moments
        projection_rate=2.0 if config.precision.matmul == "fp8" else 1.0,
        host_state_bytes=2 * param_bytes * (config.optim.state_memory == "host"),
    )
