"""Model the time of a training step in closed form: dp x pp x tp on a described GPU.

Input: a `Case`, a `Device`, `Constants`. Output: `StepTime`, the seconds of each part
of one step, which add up to the step. All times are modelled, none measured.

Per GPU, with T tokens in a microbatch, l layers, M microbatches, P stages, v virtual
stages:

- matmuls: 2 FLOPs per weight and token forward, twice that backward. Remat full repeats
  the forward pass, except a last matmul whose output the backward pass does not read;
- attention: 4 N H FLOPs per token and visible key forward, 2.5 times that backward (5
  matmuls instead of 2: Dao 2023, arXiv:2307.08691, section 4.1);
- elementwise: bytes of kernels that read and write each array once forward and twice
  backward; and copies of residuals, of chunks over tp, and of weights and gradients in
  each microbatch, as counted in `Constants`;
- tp: one all-gather and one reduce-scatter forward per branch of the serial block, and
  per layer of the parallel block; backward as many, and another gather of the input for
  the weight gradient (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), unless
  the sequence is gathered in one piece and remat keeps it (`Case.tp_chunks`);
- bubble: (P - 1) / (v M) of the time of all layers (Narayanan et al. 2021,
  arXiv:2104.04473, section 2.2.2);
- pp: one activation and one gradient per virtual stage and microbatch, split over tp;
- head: on the last stage, for which the others wait;
- dp: the communication of `mjax.mesh.zero` at each level (Rajbhandari et al. 2020,
  arXiv:1910.02054, section 7), in two hops with dp_replicate. With dp_node, a gather or
  scatter is one between nodes and one inside them, in sequence;
- optimizer: its state read and written once.

A ring of n sends (n - 1) / n of the bytes of the full array. The overlap share of
communication is overlapped, but in total no more than the time of the matmuls and
attention that run meanwhile: a second of compute overlaps at most one second of
communication.

Not modelled: stragglers, congestion, imbalance of stages, and faults. Without
`Constants.by_shape`, the lower speed of small matmuls is not modelled either.
"""

import dataclasses

from mjax.estimate.formulas.case import Case, Constants, Device
from mjax.estimate.formulas.matmul import layer_speed
from mjax.estimate.formulas.memory import layer_bytes

BACKWARD_PRODUCTS = 2
BACKWARD_ATTENTION = 2.5
BACKWARD_ELEMENTWISE = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Modelled seconds of one step, by part."""

    products_s: float
    """Matmuls of the layers, including recomputed ones."""
    attention_s: float
    elementwise_s: float
    """Memory-bound kernels, and time lost between kernels."""
    tp_s: float
    """Exposed time of the collectives over tp."""
    pp_s: float
    """Exposed time of the transfers between stages."""
    dp_s: float
    """Exposed time of gathers and reductions over dp."""
    bubble_s: float
    head_s: float
    optimizer_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(dataclasses.astuple(self))

    @property
    def layers_s(self) -> float:
        """Time of all layers of one GPU without waiting, the pipeline's ideal time."""
        return self.products_s + self.attention_s + self.elementwise_s + self.tp_s

    @property
    def bubble(self) -> float:
        """Idle time over ideal time."""
        return self.bubble_s / self.layers_s


def simulate(case: Case, device: Device, constants: Constants) -> StepTime:
    """Model one step.

    Args:
      case: the model and its layout.
      device: the GPU; all are alike.
      constants: fractions of its rates that are reached.
    """
    runs = case.microbatches * case.layers_per_gpu
    flops_per_s = device.peak_flops_per_s * constants.product_efficiency
    rate = flops_per_s * case.projection_rate
    products = runs * _layer_products_flops(case) / rate
    if constants.by_shape:
        products /= layer_speed(case, device.num_sms)
    attention = (
        runs
        * _layer_attention_flops(case)
        / (device.peak_flops_per_s * constants.attention_efficiency)
    )
    elementwise = runs * _layer_elementwise_s(case, device, constants)
    elementwise += case.microbatches * _visit_s(case, device, constants)
    tp, dp, pp = _exposed(
        products + attention,
        (runs * _layer_tp_s(case, device, constants), constants.tp_overlap),
        (_dp_s(case, device, constants), constants.dp_overlap),
        (_pp_s(case, device, constants), constants.pp_overlap),
    )
    idle = (case.sizes.pp - 1) / (case.chunks * case.microbatches)
    return StepTime(
        products_s=products,
        attention_s=attention,
        elementwise_s=elementwise,
        tp_s=tp,
        pp_s=pp,
        dp_s=dp,
        bubble_s=idle * (products + attention + elementwise + tp),
        head_s=case.microbatches * _head_s(case, device, constants),
        optimizer_s=_optimizer_s(case, device, constants),
        fixed_s=constants.fixed_s,
    )


def mfu(case: Case, device: Device, step_s: float, flops_per_token: float) -> float:
    """Return model FLOPs per second over the peak of all devices.

    Args:
      case: the model and its layout, which give batch and number of devices.
      device: the GPU, which gives the peak.
      step_s: seconds of one step.
      flops_per_token: forward and backward, by any formula, which belongs to the
        result. mjax's is `mjax.model.counts.flops_per_token`.
    """
    flops = case.batch * case.seq_len * flops_per_token
    return flops / (case.sizes.num_devices * device.peak_flops_per_s * step_s)


def _exposed(compute_s: float, *transfers: tuple[float, float]) -> list[float]:
    """Return the exposed seconds of each (time, overlap) beside some compute."""
    exposed = []
    for time_s, overlap in transfers:
        hidden_s = min(overlap * time_s, compute_s)
        compute_s -= hidden_s
        exposed.append(time_s - hidden_s)
    return exposed


def _layer_products_flops(case: Case) -> float:
    """Forward, backward, and forward again with remat full; one microbatch, one GPU."""
    repeated = case.repeated_weights if case.remat == "full" else 0
    weights = case.layer_weights * (1 + BACKWARD_PRODUCTS) + repeated
    return 2 * case.tokens * weights / case.sizes.tp


def _layer_attention_flops(case: Case) -> float:
    """Forward, backward, and forward again if remat does not keep the core."""
    keys_per_gpu = case.keys * case.heads * case.head_width / case.sizes.tp
    forward = 4 * case.tokens * keys_per_gpu
    return forward * (1 + BACKWARD_ATTENTION + case.repeats_attention)


def _layer_elementwise_s(case: Case, device: Device, constants: Constants) -> float:
    """Norms, residual sums, rotation, activation: traffic and gaps, one microbatch.

    Includes the copies of residuals and of the chunks sent over tp.
    """
    branches = 1 if case.parallel else 2
    norms = branches * (2 if case.post_norms else 1)
    entries = (
        (2 * norms + 3 * branches) * case.d_model  # norm: in, out; sum: 2 in, 1 out
        + 2 * (case.heads + case.kv_heads) * case.head_width  # rotation: in, out
        + (3 if case.gated else 2) * case.d_ff  # activation: in, gate, out
    )
    num_bytes = entries * case.tokens * case.param_bytes / case.sizes.tp
    rate = device.memory_bytes_per_s * constants.memory_efficiency
    kernels = constants.elementwise_passes * (norms + branches + 2) + 2 * branches + 1
    chunk_bytes = 0.0
    if case.tp_chunks > 1:
        crossing = branches * case.d_model * case.tokens * case.param_bytes
        chunk_bytes = constants.chunk_passes * crossing
    traffic = (constants.elementwise_passes * num_bytes + chunk_bytes) / rate
    forward = traffic + kernels * constants.kernel_s
    kept = constants.stash_passes * layer_bytes(case) / rate
    return forward * (1 + BACKWARD_ELEMENTWISE + case.repeats_layers) + kept


def _visit_s(case: Case, device: Device, constants: Constants) -> float:
    """Copies of weights and gradients of all layers of a GPU in one microbatch."""
    if case.microbatches == case.sizes.pp == 1:
        return 0.0
    rate = device.memory_bytes_per_s * constants.memory_efficiency
    return case.gpu_weights * constants.visit_bytes / rate


def _layer_tp_s(case: Case, device: Device, constants: Constants) -> float:
    """Collectives over tp of one layer and microbatch, overlapped or not."""
    n = case.sizes.tp
    branches = 1 if case.parallel else 2
    # A recomputed layer gathers its inputs again, which then also serve the weight
    # gradients, with or without chunks.
    is_again = case.tp_chunks > 1 or case.repeats_layers
    gathers = branches if is_again else 0
    # If fully recomputed, it scatters all but its last output again.
    scatters = branches - 1 if case.remat == "full" else 0
    num_bytes = case.tokens * case.d_model * case.param_bytes
    one = _ring_s(num_bytes, n, 1, device, constants)
    return (4 * branches + gathers + scatters) * one


def _pp_s(case: Case, device: Device, constants: Constants) -> float:
    """Transfers of one stage, both directions, overlapped or not."""
    sizes = case.sizes
    if sizes.pp == 1:
        return 0.0
    num_bytes = case.tokens * case.d_model * case.param_bytes / sizes.tp
    # A GPU sends only its own part to one neighbour, on its own links.
    in_node = sizes.num_devices <= device.gpus_per_node
    rate = _node_rate(device, constants) if in_node else _net_rate(device, constants)
    one = num_bytes / rate + constants.hop_s
    return 2 * case.microbatches * case.chunks * one


def _dp_s(case: Case, device: Device, constants: Constants) -> float:
    """Communication of ZeRO for the layers of one GPU in a step, overlapped or not."""
    sizes = case.sizes
    params = case.gpu_weights * case.param_bytes
    grads = case.gpu_weights * case.grad_bytes
    collectives = case.layers_per_gpu if case.zero == 3 else case.chunks

    def ring(num_bytes: float, size: int, stride: int) -> float:
        piece = num_bytes / collectives
        return collectives * _ring_s(piece, size, stride, device, constants)

    def over_shards(num_bytes: float) -> float:
        """Time a gather or scatter: a part between nodes, then all inside the node."""
        part = num_bytes / sizes.dp_shard
        between = ring(part, sizes.dp_node, sizes.tp * sizes.dp_shard)
        return between + ring(num_bytes, sizes.dp_shard, sizes.tp)

    gather = over_shards(params)
    scatter = over_shards(grads)
    shard = grads / (sizes.shards if case.zero else 1)
    across = 2 * ring(shard, sizes.dp_replicate, sizes.tp * sizes.shards)
    if case.zero == 3:
        return case.microbatches * (2 * gather + scatter) + across
    if case.zero == 2:
        return gather + scatter + across
    # An all-reduce is two rings, over all shards at once.
    reduced = 2 * ring(grads, sizes.shards, sizes.tp)
    return (gather if case.zero else 0.0) + reduced + across


def _head_s(case: Case, device: Device, constants: Constants) -> float:
    """Output projection and loss of one microbatch, forward and backward."""
    entries = case.tokens * case.vocab_size / case.sizes.tp
    flops = 2 * (1 + BACKWARD_PRODUCTS) * entries * case.d_model
    # Logits and their gradient, each written and read once, in float32.
    traffic = 4 * 4 * entries
    return flops / (
        device.peak_flops_per_s * constants.product_efficiency
    ) + traffic / (device.memory_bytes_per_s * constants.memory_efficiency)


def _optimizer_s(case: Case, device: Device, constants: Constants) -> float:
    """Read state and gradient, write state and gathered weights, once."""
    entries = case.gpu_weights / (case.sizes.shards if case.zero else 1)
    num_bytes = entries * (2 * case.state_bytes + case.grad_bytes + case.param_bytes)
    return num_bytes / (device.memory_bytes_per_s * constants.memory_efficiency)


def _ring_s(
    num_bytes: float | int,
    size: int,
    stride: int,
    device: Device,
    constants: Constants,
) -> float:
    """Gather, or reduce and scatter, an array of num_bytes over a ring.

    Members are `stride` devices apart. Across nodes each member adds its network card:
    the rings of one group use all of them, until the links inside the node are full.
    """
    if size == 1:
        return 0.0
    rate = _node_rate(device, constants)
    if size * stride > device.gpus_per_node:
        members = min(size, max(1, device.gpus_per_node // stride))
        rate = min(rate, members * _net_rate(device, constants))
    return (size - 1) * (num_bytes / size / rate + constants.hop_s)


def _node_rate(device: Device, constants: Constants) -> float:
    return device.node_link_bytes_per_s * constants.node_link_efficiency


def _net_rate(device: Device, constants: Constants) -> float:
    return device.network_bytes_per_s * constants.network_efficiency
