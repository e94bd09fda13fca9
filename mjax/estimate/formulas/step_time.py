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
  each microbatch, whose number `Constants` gives;
- tp: one all-gather and one reduce-scatter forward per branch of the serial block, and
  per layer of the parallel block. The backward pass has as many, and gathers the input
  again for the weight gradient (Korthikanti et al. 2022, arXiv:2205.05198, section
  4.2.2), unless the input is gathered in one piece and remat keeps it
  (`Case.tp_chunks`);
- bubble: (P - 1) / (v M) of the time of all layers (Narayanan et al. 2021,
  arXiv:2104.04473, section 2.2.2);
- pp: one activation and one gradient per virtual stage and microbatch, split over tp;
- head: output projection and loss on the last stage; the other stages wait for it;
- dp: the communication of `mjax.mesh.zero` at each level (Rajbhandari et al. 2020,
  arXiv:1910.02054, section 7), and with dp_replicate an all-reduce between replicas.
  With dp_node, each gather or scatter runs in two parts, between nodes and inside them;
- optimizer: its state read and written once.

A ring of n sends (n - 1) / n of the bytes of the full array. `Constants` gives the
share of communication that is overlapped. A second of matmuls and attention overlaps at
most one second of communication, of all kinds together.

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
    """Time of the layers' matmuls, including recomputed ones."""
    attention_s: float
    elementwise_s: float
    """Time of memory-bound kernels, and time lost between kernels."""
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
        """Time of all layers of one GPU without the bubble: the ideal time."""
        return self.products_s + self.attention_s + self.elementwise_s + self.tp_s

    @property
    def bubble(self) -> float:
        """Ratio of idle time to ideal time."""
        return self.bubble_s / self.layers_s


def simulate(case: Case, device: Device, constants: Constants) -> StepTime:
    """Model one step.

    Args:
      case: the model and its layout.
      device: the GPU; all are alike.
      constants: fractions of the GPU's rates that are reached.
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
      flops_per_token: FLOPs of the forward and backward pass per token. Any formula
        will do, if it is stated with the result; mjax uses
        `mjax.model.counts.flops_per_token`.
    """
    flops = case.batch * case.seq_len * flops_per_token
    return flops / (case.sizes.num_devices * device.peak_flops_per_s * step_s)


def _exposed(compute_s: float, *transfers: tuple[float, float]) -> list[float]:
    """Return the exposed seconds of each transfer.

    A transfer is (seconds, share that may overlap with compute).
    """
    exposed = []
    for time_s, overlap in transfers:
        hidden_s = min(overlap * time_s, compute_s)
        compute_s -= hidden_s
        exposed.append(time_s - hidden_s)
    return exposed


def _layer_products_flops(case: Case) -> float:
    """Return the matmul FLOPs of one layer and microbatch on one GPU, in all passes.

    With remat full they include a second forward pass.
    """
    repeated = case.repeated_weights if case.remat == "full" else 0
    weights = case.layer_weights * (1 + BACKWARD_PRODUCTS) + repeated
    return 2 * case.tokens * weights / case.sizes.tp


def _layer_attention_flops(case: Case) -> float:
    """Return the attention FLOPs of one layer and microbatch on one GPU, in all passes.

    They include a second forward pass if remat does not keep its result.
    """
    keys_per_gpu = case.keys * case.heads * case.head_width / case.sizes.tp
    forward = 4 * case.tokens * keys_per_gpu
    return forward * (1 + BACKWARD_ATTENTION + case.repeats_attention)


def _layer_elementwise_s(case: Case, device: Device, constants: Constants) -> float:
    """Return the seconds of elementwise work of one layer and microbatch.

    The work is norms, residual sums, rotation, activation, copies of residuals and
    copies of the chunks sent over tp. Gaps between kernels are included.
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
    """Return the seconds of copies of a GPU's weights and gradients per microbatch."""
    if case.microbatches == case.sizes.pp == 1:
        return 0.0
    rate = device.memory_bytes_per_s * constants.memory_efficiency
    return case.gpu_weights * constants.visit_bytes / rate


def _layer_tp_s(case: Case, device: Device, constants: Constants) -> float:
    """Return the seconds of one layer's collectives over tp per microbatch.

    Overlapped time is included.
    """
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
    """Return the seconds of one stage's transfers, in both directions.

    Overlapped time is included.
    """
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
    """Return the seconds of ZeRO's communication for the layers of one GPU.

    Overlapped time is included.
    """
    sizes = case.sizes
    params = case.gpu_weights * case.param_bytes
    grads = case.gpu_weights * case.grad_bytes
    collectives = case.layers_per_gpu if case.zero == 3 else case.chunks

    def ring(num_bytes: float, size: int, stride: int) -> float:
        piece = num_bytes / collectives
        return collectives * _ring_s(piece, size, stride, device, constants)

    def over_shards(num_bytes: float) -> float:
        """Return the seconds of a gather or scatter, between nodes and inside a node.

        A ring between nodes moves 1 / dp_shard of the bytes.
        """
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
    # An all-reduce takes two rings over all shards, without a separate part for nodes.
    reduced = 2 * ring(grads, sizes.shards, sizes.tp)
    return (gather if case.zero else 0.0) + reduced + across


def _head_s(case: Case, device: Device, constants: Constants) -> float:
    """Return the seconds of output projection and loss per microbatch, both passes."""
    entries = case.tokens * case.vocab_size / case.sizes.tp
    flops = 2 * (1 + BACKWARD_PRODUCTS) * entries * case.d_model
    # Logits and their gradient, each written and read once, in float32.
    traffic = 4 * 4 * entries
    return flops / (
        device.peak_flops_per_s * constants.product_efficiency
    ) + traffic / (device.memory_bytes_per_s * constants.memory_efficiency)


def _optimizer_s(case: Case, device: Device, constants: Constants) -> float:
    """Return the seconds to read state and gradient, and write state and weights."""
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
    """Return the seconds of an all-gather or reduce-scatter of num_bytes over a ring.

    Members are `stride` devices apart. Across nodes the network cards of all members in
    a node add up to the rate, which is at most the rate of the links inside the node.
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
