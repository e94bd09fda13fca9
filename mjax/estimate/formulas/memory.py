"""Estimate the memory of one GPU in a training step in closed form.

Input: a `Case`. Output: `Memory`, bytes by kind. This estimate selects layouts before
anything is traced; `mjax.estimate.memory` reads a traced step and is more accurate.

- Gathered weights, gradients, optimizer state: Rajbhandari et al. 2020,
  arXiv:1910.02054, section 5, with mjax's levels (`mjax.mesh.zero`). Up to level 2,
  gradients are unsharded while they accumulate over microbatches. With one microbatch
  and no pipeline, a layer's gradients are reduced at once, and from level 1 on only
  their shards are kept (`mjax.step.prefetch`); gradients of the tables (embedding and
  output projection) are unsharded until the layers are done.
- Activations of a layer: Korthikanti et al. 2022, arXiv:2205.05198, section 4, with the
  sequence split over tp. Differs: no dropout masks; no scores, which a fused attention
  kernel does not keep; the output of attention counts twice. The sum for a GPT is 34
  bytes per token and entry of the model width, as in the paper, where two masks take
  the place of the second output. For remat policies that keep only some arrays, those
  arrays are summed. All this holds for `Case.tp_chunks` above 1. If the sequence is
  gathered in one piece, the gathered input of each branch's first matmul is kept on
  every GPU of tp.
- Virtual stages in flight on the first stage: 2 (P - 1) + (v - 1) P + 1, at most v M.
  For v > 1 this is section 4.2.3 of the same paper, L (1 + (P - 1) / (P v)) layers. For
  v = 1 it follows from mjax's schedule, which keeps more in flight than plain 1F1B (P).

Not counted: gathered tables at level 3, buffers of collectives, workspaces,
fragmentation, norms and biases.
"""

import dataclasses

from mjax.estimate.formulas.case import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Modelled bytes on one GPU."""

    params_bytes: float
    """Bytes of gathered weights."""
    grads_bytes: float
    optimizer_bytes: float
    """Bytes of masters and moments."""
    activations_bytes: float
    """Bytes of residuals kept for the backward pass, and of one recomputed layer."""
    logits_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of all bytes."""
        return sum(dataclasses.astuple(self))


def memory(
    case: Case, *, tied: bool = False, logits_at_once: int | None = None
) -> Memory:
    """Estimate the memory of the fullest GPU.

    Args:
      case: the model and its layout.
      tied: whether the output projection is the embedding. In both cases every stage
        holds embedding and output projection.
      logits_at_once: number of logits that the loss holds on one GPU at the same time;
        None: all of a microbatch.
    """
    sizes = case.sizes
    tables = (1 if tied else 2) * case.vocab_size * case.d_model / sizes.tp
    tables += case.learned_positions * case.d_model
    weights = case.gpu_weights + tables
    sharded = weights / sizes.shards
    grads = weights
    if case.zero == 3:
        grads = sharded
    elif case.zero and case.microbatches == sizes.pp == 1:
        grads = case.gpu_weights / sizes.shards + tables
    logits = case.tokens * case.vocab_size / sizes.tp
    if logits_at_once is not None:
        logits = min(logits, float(logits_at_once))
    in_flight = layers_in_flight(case)
    if (
        case.loading_horizon is not None
    ):  # prefetched layers, one in use, one in transfer
        in_flight = min(in_flight, case.loading_horizon + 2)
    kept = in_flight * layer_bytes(case)
    if case.repeats_layers:
        kept += layer_bytes(dataclasses.replace(case, remat="none"))
    one_layer = case.layer_weights / sizes.tp
    at_level_3 = sharded + 2 * one_layer  # one in use, the next in transfer
    return Memory(
        params_bytes=(at_level_3 if case.zero == 3 else weights) * case.param_bytes,
        grads_bytes=grads * case.grad_bytes,
        optimizer_bytes=(sharded if case.zero else weights)
        * (case.state_bytes - case.host_state_bytes),
        activations_bytes=kept,
        # Float32, and their gradient in the compute dtype.
        logits_bytes=logits * (4 + case.param_bytes),
    )


def layers_in_flight(case: Case) -> float:
    """Return the number of layers whose activations the first stage keeps.

    A layer counts once for each microbatch in flight.
    """
    stages, chunks = case.sizes.pp, case.chunks
    in_flight = 2 * (stages - 1) + (chunks - 1) * stages + 1
    return min(in_flight, chunks * case.microbatches) * case.layers_per_gpu / chunks


def layer_bytes(case: Case) -> float:
    """Return the residual bytes of one layer and microbatch on one GPU.

    Attention is fused: it keeps its inputs, its output and the log-sum-exp.
    """
    branches = 1 if case.parallel else 2
    qkv = (case.heads + 2 * case.kv_heads) * case.head_width
    core = case.heads * case.head_width
    up = (2 if case.gated else 1) * case.d_ff
    adds = branches * case.d_model * (2 if case.post_norms else 1)
    # A post-norm reads the output of its branch. Without post-norms, the norm before
    # the next branch reads the sum of that output and the residual stream; no norm
    # follows the last branch, and the backward pass of an addition reads nothing.
    read_adds = (branches if case.post_norms else branches - 1) * case.d_model
    # Input of the first matmul of each branch. If it is gathered in one piece, the
    # gathered array is kept.
    gathered = branches * case.d_model * (case.sizes.tp if case.tp_chunks == 1 else 1)
    # The layer's input, and the projection outputs that the backward pass reads.
    projections = case.d_model + qkv + up + read_adds
    # Inputs and outputs of norms, q k v, input and output of the activation. The core's
    # output counts twice: its own backward pass keeps it, and so does the next
    # projection.
    everything = adds + gathered + qkv + 2 * core + up + case.d_ff
    entries = {
        "full": case.d_model,
        "dots": projections,
        "core": projections + core,
        "attention": everything,
        "none": everything,
    }
    per_token = entries[case.remat] * case.param_bytes
    # The core keeps one float32 per head and token, unless it is recomputed.
    statistics = 0 if case.repeats_attention else 4 * case.heads
    return case.tokens * (per_token + statistics) / case.sizes.tp
